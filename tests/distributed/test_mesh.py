"""Two clients of two devices each: a model that `fully_shard` cut, beside a whole one a rank."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import launch

pytestmark = pytest.mark.distributed

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return launch("mesh_worker.py", tmp_path_factory.mktemp("mesh"), ranks=4, limit=240)


def test_weights_are_those_of_two_whole_ranks(reports: Reports) -> None:
    """In float64, full and LoRA, with rows that do not divide, ties, and a parameter that all
    devices hold.
    """
    for report in reports:
        assert len(report["identity"]) == 15
        for name, found in report["identity"].items():
            assert found["same names"], name  # so the second table is withheld, too
            assert found["moved"] > 1e-3, name
            assert found["error"] < 1e-13, name
            assert found["kept"], name


def test_ties_go_by_position_in_the_whole_tensor(reports: Reports) -> None:
    assert all(report["ties"] for report in reports)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_noise_has_the_law_of_a_whole_rank(reports: Reports, law: str) -> None:
    """Its size is relative to the whole client's gradient: by a shard's norm it would be off by
    √2, which the statistic shows at 0.09. Chance alone exceeds 0.07 once in 10⁴ times.
    """
    for report in reports:
        found = report[law]
        assert found["count"] == 3850
        assert found["statistic"] < 0.07
        assert found["power"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_devices_draw_other_noise_for_their_shards(reports: Reports, law: str) -> None:
    for report in reports:
        found = report[law]
        assert found["repeats"] == 0
        assert abs(found["shards' correlation"]) < 5 * found["products"] ** -0.5


def test_what_all_devices_hold_gets_one_noise_a_client(reports: Reports) -> None:
    """Else the server would average it away."""
    one, same, other, _ = (report["gaussian"]["factor"] for report in reports)
    assert one == same
    assert not set(one) & set(other)
    assert len(set(one)) == 50


def test_one_message_a_step_leaves_a_client(reports: Reports) -> None:
    for report in reports:
        plain, noisy = report["crossing"]["none"], report["crossing"]["gaussian_noise"]
        assert plain["sizes"] == noisy["sizes"] == [plain["own"]]
        assert plain["accumulates"]
        assert plain["elsewhere"] == noisy["elsewhere"] == 0
        assert plain["cosine"][0] > 0.999  # the recorder sees gradients where they are sent
        assert abs(noisy["cosine"][0]) < 0.25  # 1/30, and 5/√d of chance


def test_sensitivities_are_those_of_a_whole_model(reports: Reports) -> None:
    """Against second derivatives: of 100 probes an entry has a relative error of √(2/100)."""
    for report in reports:
        found = report["sensitivities"]
        assert found["error"] < 0.3
        assert found["trace"] == pytest.approx(1, abs=0.3)
        assert found["ratio"] < 1e-6  # averages over shards are those over whole tensors
    for one, same in zip(reports[::2], reports[1::2], strict=True):
        assert one["sensitivities"] == same["sensitivities"]


def test_defenses_by_sensitivity(reports: Reports) -> None:
    for report in reports:
        for shape, found in report["shaped"].items():
            kept = found["size"] - int(0.9 * found["size"])
            # gradients of keys' biases, 8 in each of two layers, are zero but for rounding
            assert kept - 16 <= found["kept"] <= kept
            assert found["true"], shape
            # where few entries have most of the noise, so few draws say little of its power
            spread = 0.7 if shape == "own" else 0.3
            assert found["power"] == pytest.approx(1, abs=spread), shape


def test_the_page_s_loop_trains_all_ranks_alike(reports: Reports) -> None:
    for report in reports:
        assert report["page"]["moved"] > 1e-5
        assert report["page"]["checksum"] == reports[0]["page"]["checksum"]


REFUSED = {
    "soteria": ("[sharded-defense]", "second derivatives", "give each rank the whole model"),
    "refiner": ("[sharded-defense]", "second derivatives", "give each rank the whole model"),
    "per sample": ("[sharded-defense]", "which no device holds", "Leave per_sample out"),
    "layer": ("[sharded-defense]", "Leave granularity out"),
    "chain": ("[sharded-defense]", "of soteria"),
    "subclass": (
        "[sharded-defense]",
        "Own (gaussian_noise)",
        "sharded_refusal=None",
    ),
    "kinks": ("RuntimeError", "derivatives jump", "Use gaussian_noise"),
    "hsdp": ("NotImplementedError", "average true gradients over clients", "clients=mesh"),
    "columns": ("NotImplementedError", "not by rows", "Leave shard_placement_fn"),
    "all ranks": ("ValueError", "one device of each client", "mesh['clients']"),
    "accelerator": ("ValueError", "nothing says which of which", "clients=mesh"),
    "both": ("ValueError", "not both"),
    "map": ("NotImplementedError", "each rank holds the whole model"),
    "outside": ("RuntimeError", "one device's part"),
    "infinite": ("FloatingPointError", "head.weight broke"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_all_ranks_with_the_way_out(reports: Reports, what: str) -> None:
    for report in reports:
        assert report["refusals"].keys() == REFUSED.keys()
        for part in REFUSED[what]:
            assert part in report["refusals"][what]
