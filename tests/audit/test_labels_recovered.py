"""Every audit says how many labels can be read off, beside what guessing finds."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_audit import TEXTS, Spy, image_model, images, spy, text_model  # noqa: F401

from hf_gradguard.attacks import Reconstruction
from hf_gradguard.audit import audit, summarize
from hf_gradguard.audit.report.summary import labels_by_chance, recovered_labels

pytestmark = pytest.mark.usefixtures("few_probes")

DEFENSES = ["pruning:ratio=0.5", "gaussian_noise:relative_scale=1000"]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), [("text", 1), ("text", 2), ("image", 1), ("image", 3)])
def test_labels_are_found_also_where_attacks_are_granted_them(
    kind: str,
    size: int,
    tmp_path: Path,
    spy: type[Spy],  # noqa: F811
) -> None:
    model, processor = text_model() if kind == "text" else image_model()
    samples = TEXTS if kind == "text" else images(6)
    if kind == "image":
        spy.answer = staticmethod(lambda seen: Reconstruction(input=torch.zeros(seen.input_shape)))
    result = audit(model, processor, samples, DEFENSES, "spy", output=tmp_path, batch_size=size)
    summary = summarize(result)
    assert summary.labels["none"] is not None
    assert summary.labels["none"].mean == 1.0
    assert summary.labels[DEFENSES[1]].mean < 1.0
    for row in result.shared:  # by hand
        true = result.messages[row["message"]]["labels"]
        share = (Counter(row["labels"]) & Counter(true)).total() / len(true)
        values = recovered_labels(replace(result, shared=[row]), row["defense"])
        assert values == {row["message"]: {"labels": [pytest.approx(share)]}}
    table = (tmp_path / "table.md").read_text()
    assert "| labels recovered |" in table
    assert "1.00" in next(line for line in table.splitlines() if line.startswith("| `none`"))
    assert f"| {summary.chance_labels:.2f} |" in table.split("| chance |")[1]
    report = (tmp_path / "report.html").read_text()
    assert f"drawing classes at random recovers {summary.chance_labels:.2f}" in report


@pytest.mark.parametrize("true", [[0], [0, 1, 2], [0, 0, 1], [2, 2, 2]])
def test_chance_equals_the_mean_over_all_draws(
    true: list[int],
    tmp_path: Path,
    spy: type[Spy],  # noqa: F811
) -> None:
    samples: list[Any] = [(f"w{place + 1} w5", label) for place, label in enumerate(true)]
    result = audit(*text_model(), samples, "pruning", "spy", output=tmp_path, batch_size=len(true))
    draws = list(itertools.product(range(3), repeat=len(true)))
    shares = [(Counter(draw) & Counter(true)).total() / len(true) for draw in draws]
    assert labels_by_chance(result) == pytest.approx(sum(shares) / len(draws))
