"""Studies of the optimal defenses, in quick mode on generated images."""

from __future__ import annotations

import math
from pathlib import Path

import pytest


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_training_with_optimal_defenses(mnist, quick, tmp_path, capsys):
    output = tmp_path / "training"
    study = quick("optimal_defenses_training", "--data", mnist, output=output)
    report = study.figures
    for part in ("noise", "pruning"):
        for row, runs in report[part].items():
            assert list(runs) == ["0", "1"], row
            assert all(
                0 <= one["accuracy"] <= 1 and math.isfinite(one["loss"]) for one in runs.values()
            ), row
    # Before the first step every row has the same weights and the same batch.
    assert (
        len(
            {
                runs["0"]["losses"][0]
                for part in ("noise", "pruning")
                for runs in report[part].values()
            }
        )
        == 1
    )
    # Uniform noise is the same in every layer, optimal noise is not.
    stds = {row: report["noise"][row]["0"]["stds"] for row in ("dp_sgd", "optimal_dp_sgd")}
    plain, optimal = ([layer[0] for layer in layers.values()] for layers in stds.values())
    assert plain == pytest.approx([0.1] * len(plain), rel=1e-5)
    assert max(optimal) > 5 * min(optimal)
    assert is_png(Path(f"{output}.png"))

    # It goes on: a run that is there stays as it is, a missing one is made.
    kept = report["noise"]["none"]["0"]["accuracy"] = 0.125
    lost = report["pruning"]["pruning 0.9"].pop("1")
    study.overwrite(report)
    capsys.readouterr()
    study.again()
    again = study.figures
    assert again["noise"]["none"]["0"]["accuracy"] == kept
    assert again["pruning"]["pruning 0.9"]["1"] == lost
    assert "| noise: optimal_dp_sgd | " in (shown := capsys.readouterr().out)
    assert Path(f"{output}.md").read_text() in shown

    # Quick results are never taken for full ones.
    with pytest.raises(SystemExit, match=r"lacks 35 of 35 cells"):
        study.again(quick=False, tables=True)


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_attacks_on_optimal_defenses(data, quick, tmp_path, request):
    output = tmp_path / data
    arguments = ("--data", request.getfixturevalue(data))
    points = quick(f"optimal_defenses_{data}", *arguments, output=output).figures
    assert ("dp_sgd 0.1" in points) == (data == "mnist")
    for row, runs in points.items():
        for one in runs.values():
            assert all(math.isfinite(score) for score in one.values()), row
            if row.startswith(("none", "dp_sgd")):  # there is nothing to know
                assert one["mse known"] == one["mse"]
            if row == "none":
                assert (one["leakage"], one["cost"]) == (1, 0)
            elif row.startswith("dp_sgd"):
                assert (one["leakage"], one["cost"]) == pytest.approx((1, 1))
            elif row.startswith(
                "optimal_dp_sgd"
            ):  # the theorem: less leaks where the loss is disturbed as much
                assert one["leakage"] * one["cost"] < 1
    for name in ("pruning", "optimal_pruning", *(["optimal_dp_sgd"] if data == "mnist" else [])):
        runs = [
            one for row, runs in points.items() if row.split()[0] == name for one in runs.values()
        ]
        assert any(one["mse known"] != one["mse"] for one in runs), name
    for seed in ("0", "1"):
        costs = [runs[seed]["cost"] for row, runs in points.items() if row.startswith("pruning")]
        assert costs == sorted(costs)  # ratios rise
        plain, optimal = points["pruning 0.9"][seed], points["optimal_pruning 0.9"][seed]
        # At an equal count the smallest entries cost least, and those of the largest ratio cost
        # more but hide more.
        assert plain["cost"] < optimal["cost"]
        assert plain["leakage"] > optimal["leakage"]
    assert is_png(Path(f"{output}.png"))
