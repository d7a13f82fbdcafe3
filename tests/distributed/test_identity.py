"""On two ranks, defense="none" trains exactly as the stock Trainer does."""

from __future__ import annotations

from typing import Any

import pytest
from cases import IDENTITY, Case
from launcher import launch

pytestmark = pytest.mark.distributed
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return launch("identity_worker.py", tmp_path_factory.mktemp("identity"))


@pytest.fixture(params=IDENTITY.items(), ids=IDENTITY.keys())
def case(request: pytest.FixtureRequest, reports: Reports) -> tuple[Case, list[Any]]:
    name, case = request.param
    return case, [report[name] for report in reports]


def test_weights_equal_the_stock_trainers(case: tuple[Case, list[Any]]) -> None:
    for result in case[1]:
        assert result["ranks"] == 2
        assert not result["mismatch"], result["mismatch"]


def test_weights_moved(case: tuple[Case, list[Any]]) -> None:
    for result in case[1]:
        assert result["moved"] > 1e-3
        assert result["guarded_still"] == result["still"]
        assert len(result["still"]) < len(result["checksum"]) / 2 or case[0].model == "bert_lora"


def test_ranks_hold_the_same_weights(case: tuple[Case, list[Any]]) -> None:
    one, two = case[1]
    assert one["checksum"] == two["checksum"]


def test_log_equals_the_stock_trainers(case: tuple[Case, list[Any]]) -> None:
    spec, (result, _) = case
    # Losses and gradient norms of about 1, from float32; they drift apart no faster than the
    # weights do.
    tolerance = 1e-5 if spec.atol >= 1e-6 else 1e-7
    assert len(result["losses"]) == 6
    for pair, stock in zip(result["losses"], result["stock_losses"], strict=True):
        assert pair == pytest.approx(stock, rel=tolerance)


def test_withheld_embeddings_alone_stand_still(reports: Reports) -> None:
    assert reports[0]["withheld"]["guarded_still"] == ["bert.embeddings.word_embeddings.weight"]
    assert reports[0]["accumulation 1"]["guarded_still"] == []


@pytest.mark.parametrize("name", ["batch norm", "batch norm, accumulation 3"])
def test_rank_0s_batch_statistics_equal_the_stock_trainers(reports: Reports, name: str) -> None:
    """DDP sends rank 0's to the others, so the stock Trainer too saves the statistics of rank 0's
    data. Ours stay.
    """
    one, two = (report[name] for report in reports)
    assert len(one["statistics"]) == 12  # means and variances of six layers
    for key, values in one["statistics"].items():
        assert values == pytest.approx(one["stock_statistics"][key], rel=1e-5, abs=1e-6)
        assert values != two["statistics"][key]
