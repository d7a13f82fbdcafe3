"""Tiny models with a batch each, built from configurations: nothing is downloaded.

    model, batch = make_task("bert")  # float64, eval mode, no dropout, the same every time
    model, batch = make_task("gpt2_lm", dtype=torch.float32, dropout=0.1)

`TASKS` has the names. Other code that runs in its own process can import this module too: it needs
no pytest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from hf_gradguard import GradientMap
from hf_gradguard.defenses.noise import NoiseDefense
from hf_gradguard.randomness import Stream
from hf_gradguard.training.refusals import UnsupportedError

VOCABULARY = 24
PAD = 0
LABELS = 3
WIDTH = 8
COLORS = {"blue": (40, 40, 210), "green": (40, 210, 40), "red": (210, 40, 40)}


def token_batch(batch_size: int = 2, length: int = 5, labels: str = "class") -> dict[str, Tensor]:
    """Random token ids, the last sample padded by one token, with `labels` "class" or "token"."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(1, VOCABULARY, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    if batch_size > 1:
        ids[-1, -1], mask[-1, -1] = PAD, 0
    if labels == "class":
        targets = torch.randint(LABELS, (batch_size,), generator=generator)
    else:
        targets = torch.randint(1, VOCABULARY, (batch_size, length), generator=generator).where(
            mask.bool(), -100
        )
    return {"input_ids": ids, "attention_mask": mask, "labels": targets}


def image_batch(batch_size: int = 2, size: int = 8) -> dict[str, Tensor]:
    """Random pixels in float64 with class labels."""
    generator = torch.Generator().manual_seed(12)
    pixels = torch.rand((batch_size, 3, size, size), generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(LABELS, (batch_size,), generator=generator),
    }


def _encoder_settings(dropout: float, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 8,
        "pad_token_id": PAD,
        "num_labels": LABELS,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        **settings,
    }


def _gpt2_config(dropout: float, **settings: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=12,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=1, num_labels=LABELS, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, **settings,
    )  # fmt: skip


def _bert(dropout: float, **settings: Any) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_encoder_settings(dropout, settings)))


def _bert_mlm(dropout: float, **settings: Any) -> nn.Module:
    return BertForMaskedLM(BertConfig(**_encoder_settings(dropout, settings)))


def _bert_lora(dropout: float, **settings: Any) -> nn.Module:
    lora = LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=dropout,
        target_modules=["query", "value"]
    )  # fmt: skip
    return get_peft_model(_bert(dropout, **settings), lora)


def _distilbert(dropout: float, **settings: Any) -> nn.Module:
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=12,
            max_position_embeddings=8, pad_token_id=PAD, num_labels=LABELS, dropout=dropout,
            attention_dropout=dropout, seq_classif_dropout=dropout, **settings,
        )
    )  # fmt: skip


def _electra(dropout: float, **settings: Any) -> nn.Module:
    return ElectraForSequenceClassification(
        ElectraConfig(
            embedding_size=6, **_encoder_settings(dropout, settings)
        )  # its embeddings are projected
    )


def _gpt2(dropout: float, **settings: Any) -> nn.Module:
    return GPT2ForSequenceClassification(_gpt2_config(dropout, **settings))


def _gpt2_lm(dropout: float, **settings: Any) -> nn.Module:
    return GPT2LMHeadModel(_gpt2_config(dropout, **settings))


def _llama(dropout: float, **settings: Any) -> nn.Module:
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=12, max_position_embeddings=8,
            pad_token_id=PAD, num_labels=LABELS, attention_dropout=dropout, **settings,
        )
    )  # fmt: skip


def _vit(dropout: float, **settings: Any) -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=4, hidden_size=WIDTH, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=12, num_labels=LABELS,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **settings,
        )
    )  # fmt: skip


def _convnext(dropout: float, **settings: Any) -> nn.Module:
    return ConvNextForImageClassification(
        ConvNextConfig(
            image_size=8, patch_size=2, num_stages=2, hidden_sizes=[4, 8], depths=[1, 1],
            num_labels=LABELS, drop_path_rate=dropout, **settings,
        )
    )  # fmt: skip


def _t5(dropout: float, **settings: Any) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=12, num_layers=2, num_heads=2,
            pad_token_id=PAD, decoder_start_token_id=PAD, feed_forward_proj="gated-gelu",
            dropout_rate=dropout, **settings,
        )
    )  # fmt: skip


TASKS: dict[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "bert": (_bert, token_batch),
    "bert_mlm": (_bert_mlm, lambda batch_size: token_batch(batch_size, labels="token")),
    "bert_lora": (_bert_lora, token_batch),
    "distilbert": (_distilbert, token_batch),
    "electra": (_electra, token_batch),
    "gpt2": (_gpt2, token_batch),
    "gpt2_lm": (_gpt2_lm, lambda batch_size: token_batch(batch_size, labels="token")),
    "llama": (_llama, token_batch),
    "vit": (_vit, image_batch),
    "convnext": (_convnext, image_batch),
    "t5": (_t5, lambda batch_size: token_batch(batch_size, labels="token")),
}
"""Builder and batch by name. The language models' heads are tied to their embeddings; T5's two
stacks share theirs.
"""


def randomize(model: nn.Module, seed: int = 1) -> nn.Module:
    """Add N(0, 0.3²) to all weights, so that none is special: no zero biases, no zero LoRA
    products.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def make_task(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    batch_size: int = 2,
    **settings: Any,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model in eval mode with a batch, the same on every call.

    Args:
        name: One of `TASKS`.
        dtype: Of the weights, and of pixels.
        dropout: Every dropout probability of the model.
        batch_size: Samples in the batch.
        settings: More entries of the model's configuration, for example
            `attn_implementation="eager"`.
    """
    build, batch_of = TASKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomize(build(dropout, **settings)).to(dtype).eval()
    batch = batch_of(batch_size)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    return model, batch


# --------------------------------------------------------------------------------------------------
# A reference that shares no code with the package: the model is fed its continuous input through
# `inputs_embeds` or `pixel_values`, with eager attention, and everything is differentiated densely.

WITHHELD = {
    "bert": {"bert.embeddings.word_embeddings.weight"},
    "bert_mlm": {"bert.embeddings.word_embeddings.weight"},  # and the tied head, the same tensor
    "bert_lora": set(),  # frozen
    "distilbert": {"distilbert.embeddings.word_embeddings.weight"},
    "electra": {"electra.embeddings.word_embeddings.weight"},
    "gpt2": {"transformer.wte.weight"},
    "gpt2_lm": {"transformer.wte.weight"},
    "llama": {"model.embed_tokens.weight"},
    "vit": set(),
    "convnext": set(),
    "t5": {"shared.weight"},
}
"""The token embeddings of each task, as `named_parameters` calls them."""

_EMBEDDINGS = {
    "bert_lora": "base_model.model.bert.embeddings.word_embeddings.weight",
    **{name: next(iter(names)) for name, names in WITHHELD.items() if names},
}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All entries of all tensors in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def reference_input(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The rows of the embedding matrix that the batch's token ids select, or the pixels."""
    if "pixel_values" in batch:
        return batch["pixel_values"].clone()
    return dict(model.named_parameters())[_EMBEDDINGS[name]].detach()[batch["input_ids"]]


def reference_loss(name: str, model: nn.Module, batch: dict[str, Tensor], x: Tensor) -> Tensor:
    """The batch-mean loss at the continuous input x."""
    if "pixel_values" in batch:
        return model(pixel_values=x, labels=batch["labels"]).loss
    mask = batch["attention_mask"]
    if name in (
        "gpt2",
        "llama",
    ):  # without token ids these cannot tell where a sample's padding begins
        decoder = model.transformer if name == "gpt2" else model.model
        logits = model.score(decoder(inputs_embeds=x, attention_mask=mask).last_hidden_state)
        last = mask.sum(1) - 1
        return nn.functional.cross_entropy(logits[torch.arange(len(last)), last], batch["labels"])
    return model(inputs_embeds=x, attention_mask=mask, labels=batch["labels"]).loss


def reference_gradient(
    name: str, model: nn.Module, batch: dict[str, Tensor], x: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """g(x) without the token embeddings."""
    shared = {
        n: p for n, p in model.named_parameters() if p.requires_grad and n not in WITHHELD[name]
    }
    loss = reference_loss(name, model, batch, x)
    gradients = torch.autograd.grad(
        loss, list(shared.values()), create_graph=create_graph, materialize_grads=True
    )
    return dict(zip(shared, gradients, strict=True))


@functools.cache
def dense_reference(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """g(x) and the dense Jacobian J[a, i] = ∂g_i/∂x_a of `make_task(name)`, one row of Jᵀ for each
    parameter.
    """
    model, batch = make_task(name, attn_implementation="eager")
    x = reference_input(name, model, batch)
    transposed = torch.autograd.functional.jacobian(
        lambda x: flat(reference_gradient(name, model, batch, x, create_graph=True)),
        x,
        vectorize=True,
    )
    return reference_gradient(name, model, batch, x), transposed.reshape(
        len(transposed), -1
    ).T.contiguous()


# --------------------------------------------------------------------------------------------------
# Small things that several files need.


class Convolution(nn.Module):
    """A convolution, optionally with batch statistics, and a head. One parameter is not used by the
    loss.
    """

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=LABELS)
        self.convolution = nn.Conv2d(3, 2, 3, stride=2)
        self.norm = nn.BatchNorm2d(2) if batch_norm else nn.Identity()
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(18, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.norm(self.convolution(pixel_values))).flatten(1)
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def small_convolution(
    batch_size: int = 2, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A `Convolution` in train mode with a batch: 116 parameters, a hundred times faster than the
    models above.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Convolution(**settings).to(dtype)
    batch = image_batch(batch_size)
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    return model, batch


class SmallNetwork(nn.Module):
    """What Refiner asks of an evaluation network: a ratio a sample, from the mean over a sample's
    tokens or pixels.
    """

    special_token_ids: ClassVar[list[int]] = [PAD, 1, 2]

    def __init__(self, kind: str, width: int, seed: int = 0) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type=f"gradguard_{kind}_evaluation",
            special_token_ids=self.special_token_ids,
            num_channels=width,
        )
        self.name_or_path = f"small-{kind}"
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, generator=generator))

    def check_embedding(self, weight: Tensor) -> None:
        if weight.shape[1] != len(self.weight):
            raise ValueError("another embedding space")

    def noise_ratio(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if x.dim() == 4:
            return torch.sigmoid((x.mean((2, 3)) * self.weight.to(x)).sum(1))
        mask = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask.to(x)
        return torch.sigmoid(
            (((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)) * self.weight.to(x)).sum(1)
        )


CHECKPOINTING = next(  # as the installed version of Transformers calls it
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
UNHEARD = "unheard"
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Whole words, split at blanks, between [CLS] and [SEP]; the special tokens have the ids 0 to
    3.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL_TOKENS, strict=True)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerFast, hidden_size: int) -> Path:
    """Saves a random BERT classifier of two layers with that tokenizer.

    Words that begin with `UNHEARD` lie apart from the others, so that even a small evaluation
    network soon knows noise.
    """
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        intermediate_size=24,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    unheard = [index for word, index in tokenizer.get_vocab().items() if word.startswith(UNHEARD)]
    with torch.no_grad():
        model.get_input_embeddings().weight[unheard] += 0.1 * (-1) ** torch.arange(hidden_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_demo_encoder(folder: Path) -> Path:
    """Saves a tiny encoder of the demo's words, which stands in the place of MiniLM."""
    from hf_gradguard.demo import sentences  # not where no test asks: it imports audits

    rows = sentences("train") + sentences("dev")
    words = sorted({word for text, _ in rows for word in re.findall(r"\w+|[^\w\s]", text)})
    return save_encoder(folder, word_tokenizer(words), 48)


def write_images(folder: Path, count: int, mode: str = "RGB") -> Path:
    """`count` noisy images of 12 × 10 pixels a class, each class of one color, in one subfolder
    each.
    """
    draw = np.random.default_rng(count)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(np.array(color) + draw.normal(0, 30, (10, 12, 3)), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{number}.png")
    return folder


def ragged_rows(count: int) -> list[dict[str, Tensor]]:
    """Language-model samples of 3 to 8 tokens, where a prompt of 1 to 2 tokens has no labels."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (3 + 5 * index % 6,), generator=generator)
        labels = ids.clone()
        labels[: 1 + index % 2] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate to the longest sample of the batch."""
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence(
            [s[key] for s in samples], batch_first=True, padding_value=fill[key]
        )
        for key in samples[0]
    }


def refuses(*rules: str) -> Any:
    """What is raised in here ends with one of these rules' names."""
    return pytest.raises(UnsupportedError, match=rf"\[({'|'.join(rules)})\]")


def rng(seed: int = 5) -> Stream:
    """What defenses draw from."""
    return Stream.from_seeds(seed)


def torch_rng(seed: int = 5) -> torch.Generator:
    """What tests draw from."""
    return torch.Generator().manual_seed(seed)


def split_like(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flat`."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.view_as(tensor) for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def exact_map(name: str) -> GradientMap:
    """The map of `make_task(name)` with its squared sensitivities from the dense Jacobian in place
    of estimates.
    """
    gradient, jacobian = dense_reference(name)
    squares = split_like(jacobian.square().sum(0), gradient)
    gmap = GradientMap(*make_task(name))
    gmap.squared_sensitivity = lambda *_args, **_kwargs: squares  # type: ignore[method-assign]
    return gmap


@contextmanager
def unit_noise_of(value: float) -> Iterator[None]:
    """A constant in place of unit noise, and no grid."""

    def noisy(_: Stream, values: Tensor, deviation: Tensor, *_more: Any) -> Tensor:
        return values + value * deviation.to(values)

    with patch.object(Stream, "noisy", noisy):
        yield


def standard_deviations(defense: NoiseDefense, gmap: GradientMap) -> dict[str, Tensor]:
    """std of the noise on every coordinate: half the difference of what is shared with a draw of 1
    and of -1.
    """
    shared = []
    for value in (1.0, -1.0):
        with unit_noise_of(value):
            shared.append(defense(gmap, rng()))
    return {name: (plus - shared[1][name]) / 2 for name, plus in shared[0].items()}


WORDS_OF_FLOATS = 5
"""Candidates for the float that was drawn, around the quotient."""


def reachable(shared: Tensor, guess: Tensor, deviation: Tensor | float) -> Tensor:
    """Whether float32 noise n exists with fl(guess + fl(deviation · n)) = shared, or with one
    rounding in place of two, per entry.
    """
    std = torch.as_tensor(deviation, dtype=torch.float32)
    quotient = ((shared.double() - guess.double()) / std.double()).float().numpy()
    candidates = [quotient]
    for _ in range(WORDS_OF_FLOATS // 2):
        candidates.append(np.nextafter(candidates[-1], np.float32(np.inf)))
    candidates.append(np.nextafter(quotient, np.float32(-np.inf)))
    candidates.append(np.nextafter(candidates[-1], np.float32(-np.inf)))
    is_reached = torch.zeros(shared.shape, dtype=torch.bool)
    for candidate in map(torch.from_numpy, candidates):
        is_reached |= guess + std * candidate == shared
        is_reached |= (guess.double() + std.double() * candidate.double()).float() == shared
    return is_reached
