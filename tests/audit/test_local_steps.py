"""Audits of clients that train for several steps: what they send, and what attackers are told."""

# ruff: noqa: F811

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_audit import TEXTS, Spy, spy, text_model  # noqa: F401
from test_planted_leaks import leaking

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.audit import audit, summarize
from hf_gradguard.audit.attackers import attackers
from hf_gradguard.audit.client import Client, Shared, Upload, training_of
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.federation import protect_update

pytestmark = pytest.mark.usefixtures("few_probes")

# Estimators would go through all the steps, many times.
LOCAL: dict[str, Any] = {
    "local_steps": 4, "local_epochs": 2, "learning_rate": 0.05, "estimators": "none",
}  # fmt: skip


def batch_of(model: torch.nn.Module, rows: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(5, 5 + 4 * rows).view(rows, 4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(rows) % 3,
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_message_is_that_of_a_protected_update(optimizer: str) -> None:
    """Two epochs over two batches, by the way that federations take."""
    model, _ = text_model()
    batch = batch_of(model, 4)
    terms = AuditSettings(batch_size=2, optimizer=optimizer, **LOCAL)
    client = Client(model, batch, Shared(local=training_of(terms)), (0, 0, 0))
    defense = make_defense("gaussian_noise", scale=1e-3)
    message = Upload(client, defense).message
    first, second = ({name: t[rows] for name, t in batch.items()}
                     for rows in (slice(2), slice(2, 4)))  # fmt: skip
    sent = protect_update(
        model, [first, second, first, second], make_defense("gaussian_noise", scale=1e-3),
        learning_rate=0.05, optimizer=optimizer, optimizer_kwargs={"weight_decay": 0.0},
        generator=client.generator(1),
    )  # fmt: skip
    assert message.keys() == sent.keys()
    for name, tensor in sent.items():
        if optimizer == "adamw" and name.endswith("key.bias"):
            continue  # its gradient is zero but for rounding, which AdamW blows up
        torch.testing.assert_close(message[name], tensor)


def test_what_the_attacker_observes(tmp_path: Path, spy: type[Spy]) -> None:
    """The mean gradient behind the update, how it was trained, and noise in the gradient's unit."""
    model, tokenizer = text_model()
    audit(
        model, tokenizer, TEXTS, "gaussian_noise:scale=0.1", "spy", output=tmp_path,
        batch_size=2, noise_known=True, **LOCAL,
    )  # fmt: skip
    plain, noisy = (seen for seen, _ in spy.seen)
    assert plain.input_shape[0] == 4
    assert plain.local is not None
    assert (plain.local.rates, plain.local.batch_size) == ((0.05,) * 4, 2)
    assert plain.local.optimizer.name == "sgd"
    total = 4 * 0.05
    change = torch.cat([noisy.gradient[n].flatten() - plain.gradient[n].flatten()
                        for n in plain.gradient])  # fmt: skip
    assert float(change.std()) == pytest.approx(0.1 / total, rel=0.1)
    for variance in noisy.noise_variance.values():
        torch.testing.assert_close(variance, torch.full_like(variance, (0.1 / total) ** 2))


def test_one_step_of_sgd_is_a_gradient(tmp_path: Path) -> None:
    model, tokenizer = text_model()
    same: dict[str, Any] = {"attacks": "tag:steps=3", "defenses": []}
    gradient = audit(model, tokenizer, TEXTS[:2], output=tmp_path / "a", **same)
    update = audit(
        model, tokenizer, TEXTS[:2], output=tmp_path / "b", local_steps=1, learning_rate=1.0, **same
    )
    for one, other in zip(gradient.cells, update.cells, strict=True):
        assert one["objective"] == pytest.approx(other["objective"], rel=1e-3)
    said = update.settings["threat_model"][0]
    assert "the change of the weights after 1 local steps" in said


def test_bounds_are_in_the_unit_of_gradients() -> None:
    defense, attack = make_defense("dp_sgd", clip=0.2, scale=0), make_attack("tag")
    informed = "tag, knows the defense"
    plain = attackers("tag", attack, defense, AuditSettings())
    local = attackers("tag", attack, defense, AuditSettings(**LOCAL))
    (name,) = (label for label in plain if label != "tag")
    assert informed.split()[0] in name
    settings = [vars(found[name].attack) for found in (plain, local)]
    bounds = [s["clip_norm"] or s["clip_coordinate"] for s in settings]
    assert bounds[0] == pytest.approx(0.2)
    assert bounds[1] == pytest.approx(0.2 / (4 * 0.05))


@pytest.mark.long
def test_planted_leaks_of_updates(tmp_path: Path) -> None:
    """Span reads the texts of two epochs over two batches, and not behind strong noise."""
    model, tokenizer, texts = leaking(width=32, count=2)
    same = {"local_epochs": 2, "learning_rate": 1e-3}
    open_ = audit(model, tokenizer, texts, [], "span", output=tmp_path / "a", local_steps=4, **same)
    noise = "gaussian_noise:relative_scale=100"
    hidden = audit(
        model, tokenizer, texts[:1], noise, "span", output=tmp_path / "b", local_steps=2,
        reference=False, **same,
    )  # fmt: skip
    (undefended,), (noisy,) = summarize(open_).rows, summarize(hidden).rows
    assert undefended.scores["token_f1"].mean > 0.9
    assert noisy.scores["token_f1"].mean < 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 2}, "2 local steps need a learning_rate above 0"),
        ({"local_steps": 2, "learning_rate": -1.0}, "above 0, not -1.0"),
        ({"learning_rate": 0.1}, "give local_steps, or leave them out"),
        ({"local_steps": 3, "local_epochs": 2, "learning_rate": 0.1}, "no whole number"),
        ({**LOCAL, "accumulation": 2}, "not both"),
        ({"local_steps": -1}, "at least 0"),
        ({**LOCAL, "optimizer": "lion"}, "lion"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        audit(*text_model(), TEXTS, "none", "span", output=tmp_path / "out", **settings)


def test_a_trainer_has_no_local_steps(tmp_path: Path) -> None:
    model, tokenizer = text_model()
    rows = [{**tokenizer(text), "labels": label} for text, label in TEXTS]
    args = GradGuardConfig(str(tmp_path / "t"), defense="pruning", use_cpu=True, report_to=[])
    trainer = GradGuardTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match="audit the model, with its samples"):
        audit(trainer, samples=2, attacks="span", output=tmp_path / "out", **LOCAL)


def test_steps_are_part_of_what_is_kept(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    for rate in (0.1, 0.1, 0.2):
        audit(
            model, tokenizer, TEXTS[:2], "none", "spy", output=tmp_path,
            local_steps=2, learning_rate=rate,
        )  # fmt: skip
    assert len(spy.seen) == 2
    assert json.loads((tmp_path / "audit.json").read_text())["settings"]["samples"] == 2
