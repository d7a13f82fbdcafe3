"""What an encoder-decoder is to write is padded to the longest of a batch, too: a row adds the same
whatever stands beside it, or is refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import ClippedSum, clipped_sum

ROWS, CLIP = 6, 0.1

in_bfloat16 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch has no attention in bfloat16 for a processor without vector instructions",
)


def writer(dtype: torch.dtype) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0,
        max_position_embeddings=256,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in name)
    return model


def clipped(model: BartForConditionalGeneration, targets: Tensor) -> ClippedSum:
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (len(targets), 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": targets}
    return clipped_sum(GradientMap(model, batch, second_order=False, needs_input=False), CLIP)


def padded(padding: int, by: int) -> Tensor:
    targets = torch.randint(3, 60, (ROWS, 7), generator=torch.Generator().manual_seed(2))
    return torch.cat([targets, torch.full((ROWS, padding), by)], 1)


@in_bfloat16
def test_in_half_precision_a_row_is_differentiated_without_it() -> None:
    model = writer(torch.bfloat16)
    alone = clipped(model, padded(0, -100))
    for padding in (1, 9, 57):
        found = clipped(model, padded(padding, -100))
        for name, total in alone.total.items():
            torch.testing.assert_close(found.total[name], total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_that_counts_as_labels(dtype: torch.dtype) -> None:
    """It moves what every row adds."""
    model = writer(dtype)
    assert model.config.pad_token_id not in (None, model.config.eos_token_id)
    with pytest.raises(NotImplementedError, match="it reads the padding"):
        clipped(model, padded(5, model.config.pad_token_id))


@in_bfloat16
@pytest.mark.parametrize("is_written_with_pads", [False, True])
def test_where_no_tokens_are_read(is_written_with_pads: bool) -> None:
    """As of speech: nothing but the targets says how long a row is."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0,
        num_mel_bins=8, max_source_positions=10, max_target_positions=80, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("decoder.layers" in name)
    sound = torch.randn(ROWS, 8, 20).bfloat16()

    def found(padding: int) -> ClippedSum:
        targets = padded(padding, 0 if is_written_with_pads else -100)
        batch = {"input_features": sound, "labels": targets}
        return clipped_sum(GradientMap(model, batch, second_order=False, needs_input=False), CLIP)

    if is_written_with_pads:
        with pytest.raises(NotImplementedError, match="it reads the padding"):
            found(9)
        return
    alone, beside_longer = found(0), found(57)
    for name, total in alone.total.items():
        torch.testing.assert_close(beside_longer.total[name], total, rtol=0, atol=0)
