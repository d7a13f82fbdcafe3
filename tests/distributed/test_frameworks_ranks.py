"""On two ranks, the mixin trains as each library's own Trainer does, and sends nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frameworks import sentence_encoder
from launcher import launch

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.distributed
Reports = list[dict[str, Any]]
FEW = ["sft", "dpo, LoRA", "triplets"]
OTHERS = ["seq2seq", "sft, LoRA", "dpo", "pairs", "pairs, LoRA"]
NAMES = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frameworks")
    sentence_encoder(folder / "encoder")  # before ranks read it
    return folder


@pytest.fixture(scope="module")
def few(folder: Path) -> Reports:
    return launch("frameworks_worker.py", folder, *FEW)


@pytest.fixture(scope="module")
def others(folder: Path) -> Reports:
    return launch("frameworks_worker.py", folder, *OTHERS)


@pytest.fixture
def reports(name: str, request: pytest.FixtureRequest) -> Reports:
    found: Reports = request.getfixturevalue("few" if name in FEW else "others")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_the_stock_trainers(reports: Reports, name: str) -> None:
    for report in reports:
        found = report[name]
        assert found["ranks"] == 2
        assert found["moved"] > 1e-3
        # Adam divides rounding by gradients' size: 1e-6 is a ten-thousandth of a step
        assert found["difference"] <= 1e-6
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
        assert len(found["losses"][0]) == 3


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_messages_leaves_a_rank(reports: Reports, name: str) -> None:
    """Not the rewards and log-probabilities of every example that TRL's Trainers gather: three
    messages with noise, at the first step a flag for each parameter, which says whether the input
    indexes it, and single numbers of which the Trainer logs means.
    """
    for report in reports:
        found = report[f"{name}, sent"]
        messages = [size for size in found["sizes"] if size > 1]
        assert messages[0] == found["parameters"]
        assert sum(messages[1:]) == 3 * found["shared"]
        assert all(
            kind == "allreduce"
            for kind, size in zip(found["names"], found["sizes"], strict=True)
            if size > 1
        )
        assert found["noise"] > 1e3  # of the gradient's norm
