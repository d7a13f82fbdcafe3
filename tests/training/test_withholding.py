"""Input-indexed tables, the guard on rows, and `withhold`, in the Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, make_task
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, protect
from hf_gradguard.gradient_map.inputs import model_loss
from hf_gradguard.gradient_map.parameters import known_tables
from hf_gradguard.training.card import privacy_section
from hf_gradguard.training.exchange.gradients import AgreedTables
from hf_gradguard.training.message import RowGuard


class Bigrams(nn.Module):
    """Token embeddings, a table of pairs of tokens that nothing declares, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.pairs = nn.Embedding(VOCABULARY, 4), nn.Embedding(64, 4)
        self.experts, self.head = nn.Parameter(torch.randn(8, 4, 4)), nn.Linear(4, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self, input_ids: Tensor, labels: Tensor, features: Tensor | None = None, **_: Any
    ) -> dict[str, Tensor]:
        pairs = (7 * input_ids + input_ids.roll(1, 1)) % 64
        hidden = (self.embedding(input_ids) + self.pairs(pairs)).mean(1)
        if features is not None:
            hidden = hidden + self.head.weight[features]
        chosen = self.experts[(hidden @ self.experts.sum(1).T).argmax(1)]
        logits = self.head((hidden[:, None] @ chosen)[:, 0])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int = 32) -> list[dict[str, Tensor]]:
    batch = make_task("bert", dtype=torch.float32, batch_size=count)[1]
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def config(tmp_path: Path, **more: Any) -> GradGuardConfig:
    settings = {
        "output_dir": str(tmp_path), "max_steps": 6, "per_device_train_batch_size": 1,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "defense": "none", "learning_rate": 1e-2,
    }  # fmt: skip
    return GradGuardConfig(**(settings | more))


def trained(args: GradGuardConfig) -> tuple[GradGuardTrainer, set[str]]:
    """A Trainer that has trained, and the parameters that it moved."""
    model = Bigrams()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = GradGuardTrainer(model, args, train_dataset=rows())
    trainer.train()
    return trainer, {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def test_a_table_that_nothing_declares_is_neither_shared_nor_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, moved = trained(config(tmp_path))
    assert moved == set(trainer.shared_names) == {"experts", "head.weight", "head.bias"}
    said = [r.getMessage() for r in caplog.records if "Withheld" in r.getMessage()]
    assert [message.split(". ")[0] for message in said] == [
        "Withheld, neither shared nor trained: embedding.weight",
        "Withheld, neither shared nor trained: pairs.weight",
    ]
    assert "`pairs.weight`) were withheld" in privacy_section(trainer)


def test_sharing_it_all_the_same(tmp_path: Path) -> None:
    trainer, moved = trained(config(tmp_path, share_input_embeddings=True))
    assert moved >= {"pairs.weight", "embedding.weight"}
    assert known_tables(trainer.model) == frozenset()


def test_experts_are_named_and_can_be_withheld(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config(tmp_path / "one"))
    (warning,) = [r.getMessage() for r in caplog.records if "Zero rows" in r.getMessage()]
    assert warning.startswith("Zero rows of experts differ from message to message")
    assert "gaussian_noise" in warning
    caplog.clear()
    trainer, moved = trained(config(tmp_path / "two", withhold=["exp*"]))
    assert moved == {"head.weight", "head.bias"}
    assert "Zero rows" not in caplog.text
    assert "Withheld as told: experts." in caplog.text
    assert "So were, as told, `experts`." in privacy_section(trainer)


def test_experts_are_named_in_a_loop_of_ones_own_too(caplog: pytest.LogCaptureFixture) -> None:
    model = Bigrams()
    for row in rows():
        protect(model, {name: torch.as_tensor(value)[None] for name, value in row.items()}, "none")
    (warning,) = [r.getMessage() for r in caplog.records if "Zero rows" in r.getMessage()]
    assert warning.startswith("Zero rows of experts differ from message to message")


def test_a_pattern_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no parameter of Bigrams"):
        GradGuardTrainer(Bigrams(), config(tmp_path, withhold=["expert"]))
    with pytest.raises(ValueError, match="list of patterns"):
        config(tmp_path, withhold="experts")


def test_the_guard_sees_rows_of_any_dimension_and_names_each_once() -> None:
    guard = RowGuard(messages=3)
    one = {"columns": torch.eye(3)[:, :1].T, "same": torch.ones(2, 2), "bias": torch.ones(2)}
    assert guard.compare(one) == []
    other = {**one, "columns": torch.eye(3)[:, 1:2].T, "bias": torch.zeros(2)}
    assert guard.compare(other) == ["columns"]
    assert guard.compare(one) == []
    assert guard.compare({"same": torch.eye(2)[:1].expand(2, 2)}) == []  # it has stopped looking


def test_the_guard_does_not_warn_of_rows_that_noise_filled() -> None:
    guard, filled = RowGuard(), {"experts": torch.ones(2, 1)}
    assert guard.compare({"experts": torch.tensor([[1.0], [0.0]])}, filled) == []
    other = {"experts": torch.tensor([[0.0], [1.0]])}
    assert guard.compare(other, filled) == []
    assert guard.compare({"experts": torch.tensor([[1.0], [0.0]])}, other) == []
    assert guard.compare(other, other) == ["experts"]


class Peer(SimpleNamespace):
    """An accelerator whose other rank found what it says."""

    device, num_processes = torch.device("cpu"), 2

    def reduce(self, flags: Tensor, reduction: str) -> Tensor:
        assert reduction == "mean"
        return (flags + torch.tensor([float(name in self.found) for name in self.names])) / 2


def test_ranks_withhold_what_any_of_them_found() -> None:
    model = Bigrams()
    batch = make_task("bert", dtype=torch.float32)[1]
    names = [name for name, _ in model.named_parameters()]
    agreed = AgreedTables(Peer(names=names, found={"head.bias"}))  # type: ignore[arg-type]
    assert agreed.agree(model, batch, model_loss)
    assert known_tables(model) == {"embedding.weight", "pairs.weight", "head.bias"}
    assert not agreed.agree(model, batch, model_loss)
    later = {**batch, "features": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=r"indexes head\.weight, which earlier"):
        agreed.agree(model, later, model_loss)
