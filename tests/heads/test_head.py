"""Heads on features of a frozen encoder: what features are, how they are whitened, and that only
the head is trained.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples import example_names
from helpers import make_task
from torch import nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.heads import PrivateHead, layer_features, private_head, whitened_directions

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]


def names() -> tuple[nn.Module, object]:
    given = example_names("model tokenizer")
    return given["model"], given["tokenizer"]


def test_features_are_of_all_layers() -> None:
    """Against the encoder's own outputs; padding counts for nothing."""
    model, tokenizer = names()
    encoder = model.base_model
    texts = ["a fine film", "the plot is long and dull"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")  # type: ignore[operator]
    features = layer_features(encoder, inputs)  # type: ignore[arg-type]
    config = encoder.config
    layers = config.num_hidden_layers
    width = 2 * (layers + 1) * config.hidden_size + layers * config.intermediate_size
    assert features.shape == (2, width)
    with torch.no_grad():
        states = encoder(**inputs, output_hidden_states=True).hidden_states
        count = int(inputs["attention_mask"][0].sum())
        means = torch.cat([state[0, :count].mean(0) for state in states])
        first = torch.cat([state[0, 0] for state in states])
        inner = encoder.encoder.layer[0].intermediate(
            encoder.encoder.layer[0].attention(states[0][:1, :count])[0]
        )
    size = len(means)
    torch.testing.assert_close(features[0, :size], means)
    torch.testing.assert_close(features[0, size : 2 * size], first)
    end = 2 * size + config.intermediate_size
    torch.testing.assert_close(features[0, 2 * size : end], inner[0].mean(0))
    alone = tokenizer(texts[:1], return_tensors="pt")  # type: ignore[operator]
    torch.testing.assert_close(layer_features(encoder, alone)[0], features[0])


@pytest.mark.parametrize("rows", [12, 40])
def test_half_whitened_by_public_samples(rows: int) -> None:
    """Variance λ becomes √λ, the mean 0, directions are uncorrelated, and the largest are kept."""
    features = torch.randn(rows, 20, generator=torch.Generator().manual_seed(0)) * torch.arange(20)
    features += 3
    mapped = whitened_directions(features, 5)(features).detach().double()
    assert float(mapped.mean(0).abs().max()) < 1e-3
    values = torch.linalg.eigvalsh(torch.cov(features.double().T)).flip(0)[:5]
    torch.testing.assert_close(torch.cov(mapped.T), torch.diag(values.sqrt()), rtol=1e-3, atol=1e-3)


def test_public_samples_must_differ() -> None:
    with pytest.raises(ValueError, match="public"):
        whitened_directions(torch.ones(4, 3), 2)
    model, tokenizer = names()
    with pytest.raises(ValueError, match="public"):
        private_head(model, PUBLIC[:2], processing_class=tokenizer)


def test_samples_have_norm_one_and_the_head_starts_at_zero() -> None:
    model, tokenizer = names()
    head = private_head(model, PUBLIC, processing_class=tokenizer)
    features = head.features_of(["a fine film", "the plot"])
    torch.testing.assert_close(features.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(features[:, -1], torch.full((2,), 0.3))  # in a bias's place
    assert not bool(head.head.weight.any())
    assert [n for n, p in head.named_parameters() if p.requires_grad] == ["head.weight"]
    inputs = tokenizer(["a fine film", "the plot"], padding=True, return_tensors="pt")  # type: ignore[operator]
    torch.testing.assert_close(head.train().encode(**inputs), features)
    torch.testing.assert_close(head(**inputs).logits, head(features=features).logits)


def test_packaged_sentences_are_public() -> None:
    model, tokenizer = names()
    head = private_head(model, processing_class=tokenizer, directions=10)
    assert head.head.in_features == 11


@pytest.mark.parametrize("task", ["vit"])
def test_images(task: str) -> None:
    model, batch = make_task(task, dtype=torch.float32, batch_size=5)

    class Processor:
        def __call__(self, images: list[torch.Tensor], return_tensors: str) -> object:
            from transformers import BatchFeature

            return BatchFeature({"pixel_values": torch.stack(images)})

    images = list(batch["pixel_values"])
    head = private_head(model, images, directions=3, processing_class=Processor())
    assert head.features_of(images).shape == (5, 4)


def test_any_module_gives_features() -> None:
    public = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    head = private_head(nn.Linear(4, 6), public, 5, directions=3)
    assert head.features_of(public).shape == (9, 4)
    assert head.head.out_features == 5


@pytest.mark.long
def test_it_learns_behind_correlated_noise(tmp_path: Path) -> None:
    """Two classes that differ in the largest public direction, 320 messages of four, one sample in
    each: what independent noise would drown.
    """
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(1280, 6, generator=generator)
    labels = (samples[:, 0] > 0).long()
    samples[:, 0] *= 3
    head: PrivateHead = private_head(nn.Identity(), samples[:200], directions=6)
    features = head.features_of(samples)
    rows = [{"features": row, "labels": label} for row, label in zip(features, labels, strict=True)]
    args = GradGuardConfig(
        str(tmp_path), defense="dp_sgd", max_steps=320, per_device_train_batch_size=4,
        defense_kwargs={"per_sample": True, "correlated": True, "noise_multiplier": 1.5,
                        "clip": 0.5, "delta": 1e-4},
        optim="sgd", learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant",
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, noise_seed=1,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = GradGuardTrainer(head, args, train_dataset=rows)
    trainer.train()
    right = (head(features=features).logits.argmax(1) == labels).double().mean()
    assert float(right) > 0.9
    assert trainer.private_rows is not None
    assert trainer.private_rows.account.epsilon(1e-4) > 0  # stated by no log behind a known seed


def test_attacks_reach_a_heads_text() -> None:
    """A head that is given texts has a gradient that depends on them, as an audit of it needs."""
    model, tokenizer = names()
    head = private_head(model, PUBLIC, 2, processing_class=tokenizer)
    batch = dict(tokenizer(["the plot is long and dull"], return_tensors="pt"))  # type: ignore[operator]
    batch["labels"] = torch.tensor([0])
    gmap = GradientMap(head, batch)
    assert set(gmap.gradient()) == {"head.weight"}
    assert gmap.vjp(gmap.gradient()).abs().max() > 0
