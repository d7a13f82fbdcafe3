"""Defenses, attacks and estimators of others, by name and as objects."""

# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_audit import TEXTS, Spy, spy, text_model  # noqa: F401
from torch import Tensor

from hf_gradguard import DEFENSES, GradientMap
from hf_gradguard.attacks import ATTACKS, Attack, Observation, Reconstruction, make_attack
from hf_gradguard.audit import audit, markdown_table, summarize
from hf_gradguard.audit.report.page import html_report
from hf_gradguard.audit.run import make_attacks, make_defenses, parse_specs
from hf_gradguard.defenses import Defense, Message, chain, make_defense
from hf_gradguard.leakage import Estimator
from hf_gradguard.randomness import Stream
from hf_gradguard.registry import ESTIMATORS


@dataclass
class Shrunk(Defense):
    """Shares a part of the gradient."""

    name: ClassVar[str] = "shrunk"
    factor: float = 0.5

    def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
        return {name: self.factor * g for name, g in gmap.gradient().items()}


@dataclass
class Constant(Attack):
    """Says the same of every text."""

    name: ClassVar[str] = "constant"
    word: int = 5

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return Reconstruction(token_ids=[[self.word]] * seen.batch_size)


class Size(Estimator):
    """How large what was shared is."""

    title = "size"
    meaning = "no error at all"

    def estimate(self, message: Message, generator: torch.Generator | None) -> Tensor:
        size = torch.stack([t.norm() for t in message.values()]).norm()
        return size.expand(len(self.gmap.input))


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFENSES, "shrunk", Shrunk)
    monkeypatch.setitem(ATTACKS, "constant", Constant)


@pytest.mark.long
def test_classes_of_others_by_name_and_as_objects(toys: None, tmp_path: Path) -> None:
    model, tokenizer = text_model()
    by_name = audit(
        model,
        tokenizer,
        TEXTS[:2],
        ["shrunk:factor=0.25", "shrunk+pruning:ratio=0.5"],
        ["constant:word=6", "constant"],
        output=tmp_path / "a",
    )
    as_objects = audit(
        model,
        tokenizer,
        TEXTS[:2],
        [Shrunk(factor=0.25), chain(Shrunk(), make_defense("pruning", ratio=0.5))],
        [Constant(word=6), Constant()],
        output=tmp_path / "b",
    )
    labels = ["none", "shrunk:factor=0.25", "shrunk+pruning:ratio=0.5"]
    assert list(by_name.defenses) == list(as_objects.defenses) == labels
    assert list(by_name.attacks) == list(as_objects.attacks) == ["constant:word=6", "constant"]
    assert by_name.shared[1]["relative_error"] == pytest.approx(0.75)
    assert [cell["ids"] for cell in by_name.cells] == [cell["ids"] for cell in as_objects.cells]
    figures = [[row["estimates"] for row in one.shared] for one in (by_name, as_objects)]
    assert figures[0] == figures[1]
    assert "`shrunk:factor=0.25`" in markdown_table(summarize(as_objects))


def test_two_objects_with_one_label_are_refused_and_can_have_labels() -> None:
    with pytest.raises(
        ValueError, match=r"Two are called 'shrunk:factor=0.1'.*labels of their own"
    ):
        make_defenses([Shrunk(0.1), Shrunk(0.1)])
    with pytest.raises(ValueError, match="Two are called 'constant'"):
        make_attacks([{"constant": Constant()}, Constant()])
    one = Shrunk(0.1)
    assert make_defenses([one, one]) == {"shrunk:factor=0.1": one}
    named = make_defenses({"first": one, "second": Shrunk(0.1), "pruning": {"ratio": 0.9}})
    assert list(named) == ["first", "second", "pruning:ratio=0.9"]
    assert list(parse_specs([make_attack("tag", steps=3, leave_out=["a"])])) == [
        "tag:steps=3,leave_out=['a']"
    ]


def test_an_attack_is_no_defense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="constant is an attack, where a defense was to be"):
        audit(*text_model(), TEXTS, Constant(), "tag", output=tmp_path)
    with pytest.raises(ValueError, match="none is a defense, where an attack was to be"):
        audit(*text_model(), TEXTS, "none", make_defense("none"), output=tmp_path)
    with pytest.raises(ValueError, match="neither a name, nor a defense"):
        audit(*text_model(), TEXTS, [3], "tag", output=tmp_path)  # type: ignore[list-item]


@pytest.mark.long
def test_estimators_of_others_stand_beside_the_two(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ESTIMATORS, "size", Size)
    result = audit(*text_model(), TEXTS, ["shrunk"], "constant:word=6,constant", output=tmp_path)
    full, half = (row["estimates"]["size"][0] for row in result.shared[:2])
    assert half == pytest.approx(full / 2)
    summary = summarize(result)
    assert summary.estimator_titles["size"] == "size"
    table, page = markdown_table(summary), html_report(summary)
    assert "| I²F lower bound | dFIL bound |" in table
    assert "| size |" in table
    assert "size: no error at all." in table
    assert "size, constant:word=6" in page


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda gmap: torch.tensor(1.0), "an error from 0 to infinity"),
        (lambda gmap: torch.full((len(gmap.input),), torch.nan), "an error from 0 to infinity"),
        (lambda gmap: {}["lost"], "It crashed. KeyError: 'lost'"),
    ],
)
def test_an_estimator_that_fails_stops_nothing(
    wrong: Any, reason: str, tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Size):
        def estimate(self, message: Message, generator: torch.Generator | None) -> Tensor:
            found: Tensor = wrong(self.gmap)
            return found

    monkeypatch.setitem(ESTIMATORS, "wrong", Wrong)
    result = audit(*text_model(), TEXTS[:1], [], "spy", output=tmp_path)
    assert reason.replace("an error", "error") in result.shared[0]["no_estimates"]["wrong"]
    assert "i2f_lower_bound" in result.shared[0]["estimates"]
    assert "scores" in result.cells[0]


@pytest.mark.long
def test_the_covariance_of_a_chains_noise_is_known(tmp_path: Path, spy: type[Spy]) -> None:
    """Noise falls on what pruning left, and the attacker is told so."""
    audit(
        *text_model(),
        TEXTS[:1],
        "pruning:ratio=0.5+gaussian_noise:scale=2",
        "spy",
        output=tmp_path,
        noise_known=True,
    )
    (plain, _), (seen, _) = spy.seen
    assert plain.noise_variance is None
    kept = {name: tensor != 0 for name, tensor in seen.gradient.items()}
    assert (
        0 < sum(int(mask.sum()) for mask in kept.values()) < sum(m.numel() for m in kept.values())
    )
    level = {float(v) for n, v in seen.noise_variance.items() for v in v[kept[n]].unique()}
    assert len({round(value, 3) for value in level}) == 1
    assert all(not v[~kept[n]].any() for n, v in seen.noise_variance.items())
