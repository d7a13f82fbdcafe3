"""`GradGuardTrainer(args, defense="refiner")`: the evaluation network is found or made, and
training goes through it.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SmallNetwork, flat, make_task, rng, token_batch, torch_rng, word_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense, networks
from hf_gradguard.defenses.refiner.published import Pixels
from hf_gradguard.networks import (
    cached_text_network,
    embedding_fingerprint,
    fitting,
    load_network,
)

WORDS = [f"w{index}" for index in range(60)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    generator = random.Random(0)
    lines = [" ".join(generator.choices(WORDS[:12], k=generator.randint(3, 6))) for _ in range(60)]
    path = tmp_path / "public.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small network, trained for a few steps, in a cache of the test's own."""
    settings: dict[str, Any] = {
        "steps": 400,
        "learning_rate": 1e-2,
        "width": 8,
        "num_layers": 1,
        "cache": tmp_path / "cache",
        "progress": False,
    }
    monkeypatch.setattr(
        fitting, "cached_text_network", functools.partial(cached_text_network, **settings)
    )
    return tmp_path / "cache"


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, max_position_embeddings=16,
        )
    )  # fmt: skip


def arguments(folder: Path, **settings: Any) -> GradGuardConfig:
    settings["defense_kwargs"] = {"objective": "weighted", **settings.get("defense_kwargs", {})}
    return GradGuardConfig(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, defense="refiner",
        **settings,
    )  # fmt: skip


@pytest.mark.long
def test_text_network_is_trained_once_and_cached(
    tokenizer: PreTrainedTokenizerFast, sentences: Path, quick_training: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    texts = sentences.read_text().split("\n")
    data = [dict(tokenizer(text)) | {"labels": index % 2} for index, text in enumerate(texts)]
    settings = {"iterations": 2, "public_text": str(sentences)}
    fingerprints = []
    for _ in range(2):
        model = bert()
        before = {name: p.clone() for name, p in model.named_parameters()}
        trainer = GradGuardTrainer(
            model,
            arguments(tmp_path, defense_kwargs=settings),
            train_dataset=data,
            processing_class=tokenizer,
        )
        trainer.train()
        still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        assert still == ["bert.embeddings.word_embeddings.weight"]
        assert 0 < trainer.state.log_history[0]["defense/cosine"] < 1
        fingerprints.append(trainer.defense.network.config.embedding_fingerprint)
    assert fingerprints == [embedding_fingerprint(bert().get_input_embeddings().weight)] * 2
    assert caplog.text.count("Training one on public text") == 1
    assert caplog.text.count("Trained the evaluation network in") == 1
    assert (quick_training / fingerprints[0] / "model.safetensors").is_file()


def test_by_name_alone_it_needs_no_network(
    tokenizer: PreTrainedTokenizerFast, sentences: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The form that teaches: nothing is loaded or trained, and what was left out is fed back."""

    def asked(*args: Any) -> Any:
        raise AssertionError("a network was asked for")

    monkeypatch.setattr("hf_gradguard.networks.network_for", asked)
    texts = sentences.read_text().split("\n")
    data = [dict(tokenizer(text)) | {"labels": index % 2} for index, text in enumerate(texts)]
    args = arguments(tmp_path)
    args.defense_kwargs = None
    trainer = GradGuardTrainer(bert(), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert (trainer.defense.objective, trainer.defense.factors) == ("cosine", "sample")
    first, second = trainer.state.log_history[:2]
    assert first["defense/left_out"] == pytest.approx(1)  # nothing was sent
    assert 0 < second["defense/cosine"] < 1


def test_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass processing_class=tokenizer"):
        GradGuardTrainer(bert(), arguments(tmp_path), train_dataset=[])


def test_missing_public_text_is_an_error(
    tokenizer: PreTrainedTokenizerFast,
    quick_training: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(fitting, "load_texts", unreachable)
    with pytest.raises(
        ValueError, match=r"no route to the Hub.*Name a file of public sentences as public_text"
    ):
        GradGuardTrainer(bert(), arguments(tmp_path), train_dataset=[], processing_class=tokenizer)
    assert not list(quick_training.glob("*/model.safetensors"))


def vit(size: int) -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=size, patch_size=size // 2, hidden_size=8, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=8, num_labels=2,
        )
    )  # fmt: skip


def pictures() -> list[dict[str, Any]]:
    """Smooth ones: what is noise to the network is refused."""
    return [
        {
            "pixel_values": torch.nn.functional.interpolate(
                torch.rand(1, 3, 3, 3, generator=torch_rng(i)), size=32, mode="bilinear"
            )[0],
            "labels": i % 2,
        }
        for i in range(8)
    ]


def test_packaged_network_is_taken_for_images_of_its_size(tmp_path: Path) -> None:
    data = pictures()
    trainer = GradGuardTrainer(
        vit(32), arguments(tmp_path, defense_kwargs={"iterations": 1}), train_dataset=data
    )
    assert trainer.defense.network.config.num_channels == 3
    trainer.train()
    assert trainer.state.global_step == 2


def test_it_judges_images_of_another_size(tmp_path: Path) -> None:
    trainer = GradGuardTrainer(vit(20), arguments(tmp_path), train_dataset=[])
    assert trainer.defense.network.config.num_channels == 3


def test_normalization_comes_from_the_image_processor() -> None:
    """Of each model anew; what was given stays, and no processor's figures become settings."""

    def processor(mean: float, std: float) -> Any:
        return SimpleNamespace(do_normalize=True, image_mean=[mean] * 3, image_std=[std] * 3)

    def limits(defense: Any, model: Any) -> tuple[float, float]:
        """Of what the defense takes for noise: pixels from 0 to 1."""
        batch = {"pixel_values": torch.zeros(1, 3, 32, 32), "labels": torch.tensor([0])}
        gmap = GradientMap(model, batch)
        space = Pixels(gmap, *defense._normalization).space
        return float(space.low.min()), float(space.high.max())

    model = vit(32)
    network = SmallNetwork("image", 3)
    defense = make_defense("refiner", objective="weighted", evaluation_network=network)
    given = make_defense(
        "refiner", objective="weighted", evaluation_network=network,
        image_mean=[0.0] * 3, image_std=[1.0] * 3,
    )  # fmt: skip
    for one, expected in ((processor(0.5, 0.5), (-1, 1)), (processor(0.25, 0.25), (-1, 3))):
        before = defense.settings()
        defense.prepare(model, one)
        given.prepare(model, one)
        assert limits(defense, model) == expected
        assert limits(given, model) == (0, 1)
        assert defense.settings() == before
    defense.prepare(model, None)
    assert limits(defense, model) == (0, 1)


def test_shared_embeddings_are_refused() -> None:
    model = make_task("bert")[0]
    gmap = GradientMap(model, token_batch(), share_input_embeddings=True)
    with pytest.raises(
        ValueError,
        match=r"never shares the token embeddings.*Leave share_input_embeddings at False",
    ):
        make_defense("refiner", objective="weighted", evaluation_network=SmallNetwork("text", 8))(
            gmap, rng()
        )
    assert torch.isfinite(flat(gmap.gradient())).all()


def test_a_named_network_is_loaded_once_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, loads = "image-evaluation-network-32", []

    def counted(name_or_path: str) -> Any:
        loads.append(name_or_path)
        return load_network(name_or_path)

    monkeypatch.setattr(networks, "load_network", counted)
    settings = {"evaluation_network": name, "iterations": 1}
    args = arguments(tmp_path, defense_kwargs=settings, clients_per_process=2)
    assert loads == []
    data = pictures()
    trainer = GradGuardTrainer(vit(32), args, train_dataset=data)
    assert loads == [name]
    assert trainer.defense.evaluation_network == name
    assert trainer.defense.settings()["evaluation_network"] == name
    trainer.train()
    assert trainer.state.global_step == 2
    assert loads == [name]

    # without a Trainer: at the first call
    defense = make_defense("refiner", objective="weighted", **settings)
    model, batch = vit(32), {key: torch.as_tensor(value)[None] for key, value in data[0].items()}
    assert loads == [name]
    for _ in range(2):
        defense(GradientMap(model, batch), rng())
    assert loads == [name] * 2


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ValueError, match=r"evaluation_network must be a network of .* a int"):
        make_defense("refiner", objective="weighted", evaluation_network=3)
