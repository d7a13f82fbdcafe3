"""Estimators in an audit: figures against dense Jacobians, correlations by hand, and where the plot
puts its points.
"""

# ruff: noqa: F811

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flat
from leakage_helpers import Linear
from test_audit import Audit, Spy, image_model, images, made, spy, text_model, without_times  # noqa: F401
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.audit import audit, markdown_table, summarize
from hf_gradguard.audit.client import Upload
from hf_gradguard.audit.report.page import html_report, scatters
from hf_gradguard.audit.report.verdicts import show_mean
from hf_gradguard.defenses import Message, Noise
from hf_gradguard.leakage import make_estimator
from hf_gradguard.registry import ESTIMATORS

TEXTS = [("w1 w2 w3", 1), ("w2 w3 w4 w5", 0), ("w7 w8", 2), ("w1 w9 w10 w11", 1)]
STRENGTHS = [f"gaussian_noise:relative_scale={scale}" for scale in (0.1, 1, 10)]


def dense_jacobian(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """J, `(m, d)`, by automatic differentiation of the model fed with `inputs_embeds`; and which
    rows are tokens.
    """
    names = [n for n, _ in model.named_parameters() if "word_embeddings" not in n]
    parameters = [model.get_parameter(name) for name in names]

    def gradient(x: Tensor) -> Tensor:
        loss = model(
            inputs_embeds=x, attention_mask=batch["attention_mask"], labels=batch["labels"]
        ).loss
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)]
        )

    x = model.get_input_embeddings()(batch["input_ids"]).detach()
    jacobian = torch.autograd.functional.jacobian(gradient, x, vectorize=True)
    real = batch["attention_mask"].bool()[..., None].expand(x.shape)
    return jacobian.reshape(len(jacobian), -1).T, real


@pytest.mark.long
def test_figures_by_dense_jacobians(tmp_path: Path, spy: type[Spy]) -> None:
    """Two texts of different length a message: figures are per sample, over its real tokens."""
    model, tokenizer = text_model(attn_implementation="eager")
    result = audit(
        model, tokenizer, TEXTS[:2], STRENGTHS[1:2], "spy", output=tmp_path, batch_size=2
    )
    plain, noisy = (flat(seen.gradient) for seen, _ in spy.seen)
    batch = tokenizer([text for text, _ in TEXTS[:2]], padding=True, return_tensors="pt")
    jacobian, real = dense_jacobian(model, {**batch, "labels": torch.tensor([1, 0])})
    rows = jacobian[real.flatten()].double()
    top = torch.linalg.matrix_norm(rows, 2) ** 2
    product = torch.zeros(real.shape, dtype=torch.double)
    product[real] = rows @ (noisy - plain).double()
    sizes = real.flatten(1).sum(1)
    expected = product.flatten(1).norm(dim=1) / top
    variance = float(plain.double().square().mean())  # relative_scale=1

    none, gaussian = (row["estimates"] for row in result.shared)
    assert none == {"i2f_lower_bound": [0, 0]}
    assert gaussian["i2f_lower_bound"] == pytest.approx(
        expected.tolist(), rel=1e-3
    )  # λ_max to 1e-4, float32
    traces = torch.stack(
        [
            j[r].double().square().sum()
            for j, r in zip(jacobian.view(*real.shape, -1), real, strict=True)
        ]
    )
    bounds = (variance * sizes / traces).sqrt()
    assert gaussian["dfil_bound"] == pytest.approx(
        bounds.tolist(), rel=0.3
    )  # 50 probes, at most √(2/50) = 20 % of the MSE
    assert json.loads((tmp_path / "audit.json").read_text())["shared"] == result.shared


@pytest.mark.long
def test_figures_are_the_same_when_an_audit_goes_on(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    first = audit(model, tokenizer, TEXTS[:2], ["optimal_noise", "pruning"], "spy", output=tmp_path)
    for path in (
        tmp_path / "cells"
    ).iterdir():  # as an audit before there were estimators would have left it
        if "i2f_lower_bound" in path.read_text():
            path.unlink()
    attacked = len(spy.seen)
    again = audit(model, tokenizer, TEXTS[:2], ["optimal_noise", "pruning"], "spy", output=tmp_path)
    assert len(spy.seen) == attacked
    assert without_times(again) == without_times(first)
    kinds = [set(row["estimates"]) for row in first.shared]
    noisy = {"i2f_lower_bound", "dfil_bound", "bayesian_bound", "label_bound"}
    assert kinds == [{"i2f_lower_bound"}, noisy, {"i2f_lower_bound"}] * 2


@pytest.mark.usefixtures("few_probes")
def test_only_those_that_are_named_are_asked_and_the_report_says_so(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later audit with all of them attacks nothing anew, and its report no longer says so."""
    asked = list[str]()
    estimate = Upload.estimate
    monkeypatch.setattr(
        Upload, "estimate", lambda upload, name: [asked.append(name), estimate(upload, name)][1]
    )

    def report(estimators: str) -> tuple[Audit, str, str]:
        result = audit(
            *text_model(), TEXTS[:1], "gaussian_noise", "spy", output=tmp_path,
            estimators=estimators,
        )  # fmt: skip
        return result, *((tmp_path / name).read_text() for name in ("table.md", "report.html"))

    result, table, page = report("none")
    assert not asked
    assert [row["estimates"] for row in result.shared] == [{}, {}]
    for text in (table, page):
        assert "No leakage estimator was asked" in text
        assert "Estimators predict" not in text
        assert "I²F" not in text
        assert "dFIL" not in text
    attacked = len(spy.seen)
    result, table, page = report("dfil_bound")
    assert set(asked) == {"dfil_bound"}
    assert [set(row["estimates"]) for row in result.shared] == [set(), {"dfil_bound"}]
    assert "dFIL bound" in table
    assert "I²F" not in table + page
    assert "No leakage estimator" not in table + page
    report("all")
    assert set(asked) == set(ESTIMATORS)
    assert len(spy.seen) == attacked


def test_infinite_bounds_and_complete_leaks() -> None:
    """L = xᵀJθ with two samples of one pixel: nothing depends on the second one."""
    gmap = GradientMap(
        Linear(torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double()),
        {"pixel_values": torch.ones(2, 1, 1, 1, dtype=torch.double)},
    )
    shared = {name: g + 0.5 for name, g in gmap.gradient().items()}

    def message(variance: torch.Tensor) -> Message:
        return Message(shared, noise=Noise({"theta": variance}, {"theta": variance}))

    influence, bound = (make_estimator(name, gmap) for name in ("i2f_lower_bound", "dfil_bound"))
    noisy = message(torch.tensor([0.25, 0.25]).double())
    assert influence(noisy).tolist() == pytest.approx([0.25, 0])  # ‖2 · 0.5‖/4
    found = bound(noisy, torch.Generator().manual_seed(0)).tolist()
    assert found[0] == pytest.approx(0.5 / 2, rel=0.3)  # σ/|a|, by 50 probes
    assert found[1] == math.inf
    silent = message(torch.zeros(2).double())
    assert bound(silent, torch.Generator().manual_seed(0)).tolist() == [0.0, math.inf]
    with pytest.raises(ValueError, match="Gaussian noise of known covariance"):
        bound(Message(shared))


def test_no_second_derivatives_is_said(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError("The largest eigenvalue is not known.")

    monkeypatch.setattr("hf_gradguard.leakage.influence.largest_eigenvalue", fail)
    model, tokenizer = text_model()
    result = audit(model, tokenizer, TEXTS[:1], [], "spy", output=tmp_path)
    assert result.shared[0]["estimates"] == {}
    reason = result.shared[0]["no_estimates"]["i2f_lower_bound"]
    assert reason == "The largest eigenvalue is not known."
    assert summarize(result).correlations == scatters(summarize(result)) == []
    assert "The largest eigenvalue is not known." in html_report(summarize(result))
    assert "- The largest eigenvalue is not known." in markdown_table(summarize(result))


# --- correlations and the plot


def with_figures(
    scores: dict[str, list[float]],
    found: dict[str, list[float | None]],
    figure: str = "i2f_lower_bound",
) -> Audit:
    result = made(scores)
    for row in result.shared:
        row["estimates"] = (
            {figure: [found[row["defense"]][row["message"]]]} if row["defense"] in found else {}
        )
    return result


def test_spearman_by_hand() -> None:
    """Ranks 1 2 3 4 5 6 against 6 4 5 3 1 2: Σd² = 66 and ρ = 1 - 6 · 66/(6 · 35) = -31/35."""
    result = with_figures(
        {"none/tag": [0.9, 0.7, 0.8], "d/tag": [0.5, 0.1, 0.3]},
        {"none": [0.1, 0.2, 0.3], "d": [4.0, 50.0, 600.0]},
    )
    (row,) = summarize(result).correlations
    assert (row.estimator, row.attack, len(row.points)) == ("i2f_lower_bound", "tag", 6)
    assert row.coefficients == {"token_f1": pytest.approx(-31 / 35)}


def test_what_tells_nothing_has_no_coefficient() -> None:
    constant = with_figures({"none/tag": [0.9, 0.7, 0.8]}, {"none": [0.0, 0.0, 0.0]})
    few = with_figures({"none/tag": [0.9, 0.7, 0.8]}, {"none": [0.1, 0.2, None]})
    assert [summarize(result).correlations[0].coefficients for result in (constant, few)] == [
        {"token_f1": None}
    ] * 2
    assert [len(summarize(result).correlations[0].points) for result in (constant, few)] == [3, 2]
    assert summarize(with_figures({"none/tag": [0.9, 0.7, 0.8]}, {})).correlations == []
    few_means, means = (summarize(result).shared["none"] for result in (few, constant))
    assert show_mean(few_means["i2f_lower_bound"]) == "∞"
    assert show_mean(means["i2f_lower_bound"]) == "0"
    assert show_mean(means["dfil_bound"]) == ""


def test_attacks_that_were_not_applicable_have_no_points() -> None:
    result = with_figures({"none/tag": [0.9, 0.7], "none/span": [0.1, 0.2]}, {"none": [1.0, 2.0]})
    for cell in result.cells:
        if cell["attack"] == "span" and cell["message"] == 0:
            del cell["scores"]
            cell["reason"] = "no"
    found = {c.attack: c.points for c in summarize(result).correlations}["span"]
    assert [(p.defense, p.estimate, p.scores) for p in found] == [("none", 2.0, {"token_f1": 0.2})]


def test_where_the_points_are() -> None:
    """Decades from 0.1 to 100 across, 0 at the left; 0 % at the bottom, 100 % at the top."""
    result = with_figures(
        {"none/tag": [1.0, 0.5], "d/tag": [0.25, 0.0]}, {"none": [0.0, 0.1], "d": [1.0, 60.0]}
    )
    (plot,) = scatters(summarize(result))
    left, right = plot["axis_start"], 388
    assert [(p["x"], p["y"], p["kind"]) for p in plot["points"]] == [
        (62.0, 14.0, 0),
        (left, 114.0, 0),
        (pytest.approx(left + (right - left) / 3, abs=0.1), 164.0, 1),
        (pytest.approx(left + (right - left) * (1 + math.log10(60)) / 3, abs=0.1), 214.0, 1),
    ]
    assert [power for _, power in plot["across"]] == [-1, 0, 1, 2]
    assert (plot["coefficient"], plot["count"], plot["zeros"]) == ("-1.00", 4, True)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_the_report_of_an_audit_shows_all_points(tmp_path: Path, spy: type[Spy]) -> None:
    result = audit(
        *image_model(), images(3), STRENGTHS, "inverting_gradients:steps=2", output=tmp_path
    )
    assert [(c.estimator, len(c.points)) for c in summarize(result).correlations] == [
        ("i2f_lower_bound", 12),
        ("dfil_bound", 9),
    ]
    assert {"mse", "rmse", "psnr", "ssim"} <= set(summarize(result).correlations[0].coefficients)
    page = html_report(summarize(result))
    assert page.count("<g>") == 12 + 9
    assert "I²F lower bound, inverting_gradients" in page
    table = markdown_table(summarize(result))
    assert "| I²F lower bound | dFIL bound | Bayesian bound | label bound |" in table
    assert page.count("label bound:") == 1  # said what it is, and drawn against no attack
