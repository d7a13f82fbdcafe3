"""The mixin before other Trainers than the stock one, on one rank. Two ranks are in
`tests/distributed/test_frameworks_ranks.py`.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import Training, dpo, encoders, kto, reward, sentence_encoder, seq2seq, sft
from helpers import refuses
from test_checkpoints import Hub, hub  # noqa: F401
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_gradguard import GradGuardConfig, GradGuardMixin, GradGuardTrainer

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")

SHARED = {"defense": "none", "share_input_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder")


def named(name: str, folder: Path) -> Training:
    made = {
        "seq2seq": seq2seq, "sft": sft, "dpo, LoRA": lambda: dpo(lora=True),
        "triplets": lambda: encoders(folder, 3),
    }  # fmt: skip
    return made[name]()


ONCE = ("optimal_noise", "seq2seq"), ("optimal_pruning", "sft"), ("optimal_dp_sgd", "dpo, LoRA")
FAMILIES = [
    *ONCE, ("gaussian_noise", "triplets"), ("laplace_noise", "sft"), ("dp_sgd", "triplets"),
    ("pruning", "dpo, LoRA"), ("quantization", "triplets"), ("optimal_noise", "triplets"),
    pytest.param("gradient_sketch", "triplets", marks=pytest.mark.slow),
    pytest.param("refiner", "sft", marks=pytest.mark.slow),
    ("optimal_noise", "dpo, LoRA"), ("optimal_noise", "sft"),
]  # fmt: skip


@pytest.mark.parametrize(("defense", "name"), FAMILIES)
def test_every_family_of_defense_protects(
    tmp_path: Path, folder: Path, defense: str, name: str
) -> None:
    waits = defense in ("gradient_sketch", "refiner", "pruning", "optimal_pruning")
    at_once = {"min_batches": 1, "error_feedback": True} if waits else None
    settings = {"defense": defense, "defense_kwargs": at_once, "max_steps": 1}
    trainer = named(name, folder).run(tmp_path, settings)
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.state.log_history[0]["defense/relative_error"] > 1e-3
    assert entry["grad_norm"] > 0


@pytest.mark.parametrize("make", [reward, kto])
def test_trainers_whose_step_is_sfts_train_as_stock(tmp_path: Path, make: Any) -> None:
    """Their own training step enters a context, of offloading, that is refused."""
    stock, ours = make().run(tmp_path, None), make().run(tmp_path, SHARED)
    for (name, one), other in zip(
        ours.model.named_parameters(), stock.model.parameters(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6), name
    noisy = make().run(tmp_path, {"defense": "gaussian_noise", "max_steps": 1})
    assert noisy.state.log_history[0]["defense/relative_error"] > 1e-3
    with refuses("activation-offloading"):
        make().run(tmp_path, {"defense": "gaussian_noise", "activation_offloading": True})


def test_what_cannot_protect_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)no representation to weigh.*optimal_pruning"):
        sft().run(tmp_path, {"defense": "soteria"})


def test_figures_that_a_trainer_logs_are_of_the_batch_alone(tmp_path: Path) -> None:
    """A loss is computed several times a batch; what is counted beside it counts once."""
    stock = sft().run(tmp_path, None)
    ours = sft().run(tmp_path, SHARED | {"defense": "optimal_noise", "learning_rate": 0.0})
    for one, other in zip(ours.state.log_history[:3], stock.state.log_history[:3], strict=True):
        assert one["num_tokens"] == other["num_tokens"]
    first, expected = ours.state.log_history[0], stock.state.log_history[0]
    assert first["entropy"] == expected["entropy"]
    assert first["mean_token_accuracy"] == expected["mean_token_accuracy"]


def test_plain_arguments_of_another_library_are_taken(tmp_path: Path) -> None:
    training = sft()
    protected: Any = type("Protected", (GradGuardMixin, training.trainer), {})
    args = training.config(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", bf16=False)
    trainer = protected(args=args, defense="pruning", **training.make())
    assert trainer.defense.name == "pruning"


# What is refused


def test_losses_that_send_embeddings_are_refused(tmp_path: Path, folder: Path) -> None:
    from sentence_transformers import losses

    def gathering(model: nn.Module) -> nn.Module:
        return losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)

    with refuses("gathering-loss"):
        encoders(folder, loss=gathering).run(tmp_path, {"defense": "gaussian_noise"})


def test_losses_with_parameters_of_their_own_are_refused(tmp_path: Path, folder: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.scale = model, nn.Parameter(torch.ones(3))

        def forward(self, features: Any, labels: Any) -> Any:
            made = [self.model(feature)["sentence_embedding"] for feature in features]
            return (made[0] * made[1]).sum() * self.scale.sum()

    with refuses("loss-with-parameters"):
        encoders(folder, loss=Scaled).run(tmp_path, {"defense": "gaussian_noise"})


def test_a_model_that_guides_a_loss_is_not_trained(tmp_path: Path, folder: Path) -> None:
    """Its parameters are in the optimizer, without any gradient, as in the stock Trainer."""
    from sentence_transformers import losses

    def guided(model: Any) -> nn.Module:
        return losses.GISTEmbedLoss(model, guide=sentence_encoder(folder))

    stock = encoders(folder, loss=guided).run(tmp_path, None)
    ours = encoders(folder, loss=guided).run(tmp_path, SHARED)
    for one, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_losses_that_differentiate_by_themselves_are_refused(tmp_path: Path, folder: Path) -> None:
    from sentence_transformers import losses

    training = encoders(folder, loss=losses.CachedMultipleNegativesRankingLoss)
    with pytest.raises(ValueError, match=r"not computed from any shared parameter.*take the plain"):
        training.run(tmp_path, {"defense": "gaussian_noise"})


def test_private_files_are_not_pushed(
    tmp_path: Path,
    folder: Path,
    hub: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sentence-transformers copies nearly all of a checkpoint to push it."""
    # The class of these arguments was made in a function, so they cannot be saved.
    monkeypatch.setattr(GradGuardConfig, "__reduce__", lambda self: (dict, ()))
    pushed = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    encoders(folder).run(tmp_path, {"defense": "pruning", **pushed})
    assert (tmp_path / "checkpoint-1" / "gradguard_private_rank0.safetensors").is_file()
    assert "modules.json" in hub.uploads[0]
    assert not list(tmp_path.glob("gradguard_*"))
    assert not any("gradguard_" in name for name in hub.uploads[0])


@pytest.mark.parametrize("more", [{"clients_per_process": 2}, {"num_clients": 2}])
def test_pairs_of_answers_are_not_cut_into_clients(tmp_path: Path, more: dict[str, int]) -> None:
    """DPO's collator puts the chosen answers over the rejected ones."""
    with refuses("rows-of-one-example"):
        dpo(lora=True).run(tmp_path, {"defense": "gaussian_noise", **more})


def test_offloading_is_refused(tmp_path: Path) -> None:
    with refuses("activation-offloading"):
        sft().run(tmp_path, {"defense": "gaussian_noise", "activation_offloading": True})


def test_the_mixin_stands_first() -> None:
    with pytest.raises(TypeError, match=r"Write class Wrong\(GradGuardMixin, Seq2SeqTrainer\)"):
        type("Wrong", (Seq2SeqTrainer, GradGuardMixin), {})


def test_a_training_step_of_another_library_is_refused() -> None:
    class Stepping(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with refuses("own-training-step"):
        type("Protected", (GradGuardMixin, Stepping), {})

    class Last(GradGuardTrainer):  # before the mixin, it may end with the protected step
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    assert Last.training_step is not GradGuardMixin.training_step


def test_own_arguments_keep_their_defaults_and_dict_fields(tmp_path: Path) -> None:
    config = sft().config

    @dataclass
    class Right(config, GradGuardConfig):  # type: ignore[valid-type, misc]
        pass

    args = Right(str(tmp_path), defense_kwargs='{"ratio": 0.5}', defense="pruning", bf16=False)
    assert args.learning_rate == config(str(tmp_path), bf16=False).learning_rate
    assert args.defense_kwargs == {"ratio": 0.5}
    assert {"model_init_kwargs", "defense_kwargs"} <= set(Right._VALID_DICT_FIELDS)
    with pytest.raises(TypeError, match=r"Write class Wrong\(Seq2SeqTrainingArguments, GradGuardC"):
        type("Wrong", (GradGuardConfig, Seq2SeqTrainingArguments), {})


class Parts(nn.Module):
    """A loss in two parts, as a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        one, other = (self.model(text)["sentence_embedding"] for text in features)
        return {"near": (one - other).square().mean(), "small": 0.1 * one.square().mean()}


@pytest.mark.parametrize("defense", ["none", "gaussian_noise", "optimal_noise"])
def test_parts_of_a_loss_are_averaged_and_not_gathered(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, defense: str
) -> None:
    """sentence-transformers gathers every rank's parts of a loss to log them, unprotected also
    under secure aggregation. Here each is averaged as the loss is.
    """
    from transformers import trainer_pt_utils

    def gathered(*_: Any, **__: Any) -> None:
        raise AssertionError("a gather")

    averaged: list[torch.Tensor] = []

    def note(self: Any, figure: torch.Tensor) -> None:
        averaged.append(figure.clone())

    monkeypatch.setattr(trainer_pt_utils, "nested_gather", gathered)
    monkeypatch.setattr(GradGuardMixin, "average_over_ranks", note)
    settings: dict[str, Any] = {"defense": defense, "share_input_embeddings": True}
    trainer = encoders(folder, 2, loss=Parts).run(tmp_path, settings)
    steps = [entry for entry in trainer.state.log_history if "near" in entry]
    assert len(steps) == 3
    for entry in steps:  # each counted once, however often it was computed
        assert entry["near"] + entry["small"] == pytest.approx(entry["loss"], abs=2e-4)
        for part in ("near", "small"):  # of one step
            assert any(entry[part] == pytest.approx(float(one), abs=1e-4) for one in averaged)
    if defense == "none":
        monkeypatch.undo()
        stock = encoders(folder, 2, loss=Parts).run(tmp_path, None)
        for found, expected in zip(steps, stock.state.log_history, strict=False):
            assert found["near"] == pytest.approx(expected["near"], abs=2e-4)


OVERRIDDEN = {
    "__init__",
    "_checkpoint_push_skip_names",
    "add_model_card_callback",
}  # on purpose, with a call of theirs


@pytest.mark.parametrize("library", ["trl", "sentence_transformers"])
def test_no_name_of_ours_is_an_attribute_of_another_trainer(library: str) -> None:
    """A Trainer that sets `self.name` would replace a method of that name below it."""
    added = set(vars(GradGuardMixin))
    ours = added - set(dir(Trainer))
    folder = Path(str(importlib.import_module(library).__file__)).parent
    trainers = [path for path in folder.rglob("*trainer*.py") if "test" not in path.name]
    assert len(trainers) > 3
    for path in trainers:
        assigned = set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", path.read_text("utf-8")))
        assert not ours & assigned, path
        methods = set(re.findall(r"\n    def (\w+)\(", path.read_text("utf-8")))
        assert not (ours - OVERRIDDEN) & methods, path
