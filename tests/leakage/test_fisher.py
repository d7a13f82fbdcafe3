"""Fisher information against dense linear algebra in float64, and its estimates against their own
error bars.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution, split_like, torch_rng
from leakage_helpers import (
    DENSE,
    by_hand,
    dense_case,
    dense_convolution,
    fisher,
    linear_map,
    perturbation,
    random_jacobian,
    uneven_variance,
)
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.leakage import (
    bayesian_bound,
    dfil,
    fisher_norm,
    fisher_trace,
    make_estimator,
    prior_deviation,
    smooth_clip,
    smoothly_clipped,
)


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_exact_figures_equal_the_dense_ones(name: str) -> None:
    gmap, jacobian = dense_case(name)
    variance = uneven_variance(gmap)
    information = fisher(jacobian, variance)
    trace = fisher_trace(gmap, variance)
    assert float(trace) == pytest.approx(float(information.trace()), rel=1e-6)
    assert trace.standard_error == 0
    half = len(jacobian) // 2
    sizes = torch.tensor(
        [half, half if name in ("vit", "convolution") else half - 8]
    )  # one token is padding
    blocks = (
        torch.stack([information[:half, :half].trace(), information[half:, half:].trace()]) / sizes
    )
    value, error = dfil(gmap, variance, num_probes=None)
    torch.testing.assert_close(value, blocks, rtol=1e-6, atol=0)
    assert not error.any()


@pytest.mark.long
def test_one_number_is_the_same_variance_everywhere() -> None:
    gmap, jacobian = dense_case("convolution")
    assert float(fisher_trace(gmap, 1e-3)) == pytest.approx(1e3 * float(jacobian.square().sum()))
    each = {name: torch.tensor(1e-3, dtype=torch.float64) for name in gmap.parameters}  # broadcast
    assert float(fisher_trace(gmap, each)) == pytest.approx(float(fisher_trace(gmap, 1e-3)))


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("name", DENSE)
def test_estimates_agree_with_the_exact_figures(name: str) -> None:
    gmap, _ = dense_case(name)
    variance = uneven_variance(gmap)
    value, error = dfil(gmap, variance, 50, rng())
    exact = dfil(gmap, variance, None).value
    assert ((value - exact).abs() <= 4 * error).all()
    assert (error < 0.3 * value).all()
    total = fisher_trace(gmap, variance, 50, rng())
    assert abs(total - fisher_trace(gmap, variance)) <= 4 * total.standard_error


@pytest.mark.long
@pytest.mark.statistics
def test_estimates_keep_to_their_standard_errors() -> None:
    """200 seeds of 50 probes on a flat and a steep spectrum: within 4 standard errors, which are
    those of normal probes; signs have less where single parameters say much.
    """
    jacobian = torch.cat([random_jacobian(4), torch.eye(6, 9, dtype=torch.float64)])
    gmap = linear_map(jacobian, batch_size=2)
    exact = dfil(gmap, 0.1, None).value
    assert exact.tolist() == pytest.approx(
        [float(part.square().sum()) / 0.6 for part in jacobian.split(6)]
    )
    values, errors = map(
        torch.stack, zip(*(dfil(gmap, 0.1, 50, rng(seed)) for seed in range(200)), strict=True)
    )
    assert ((values - exact).abs() <= 4 * errors).double().mean(0).min() >= 0.99
    assert ((values.mean(0) - exact).abs() <= 4 * values.std(0) / math.sqrt(200) + 1e-9).all()
    # What the module states: variance at most 2‖FIM_j‖²/k. Of signs it is by Hutchinson's law less
    # by what each parameter says alone, which is all where J is the identity. The spread of 200
    # values has a relative error of 5 %.
    whole = torch.tensor([float((part @ part.T).square().sum()) for part in jacobian.split(6)])
    alone = torch.tensor([float(part.square().sum(0).square().sum()) for part in jacobian.split(6)])
    stated, spread = (((2 * figure / 50).sqrt() / 0.6) for figure in (whole, whole - alone))
    assert values.std(0).tolist() == pytest.approx(spread.tolist(), rel=0.2, abs=1e-9)
    assert errors.square().mean(0).sqrt().tolist() == pytest.approx(stated.tolist(), rel=0.2)
    assert spread[0] > 0.3 * stated[0] > 0 == spread[1]


def within_four_errors(block: Tensor, probes: int = 50, draws: int = 4_000) -> float:
    """How often an estimate lies within 4 of its own standard errors, by the exact law: a probe
    gives Σ λ_i z_i², with the dense spectrum λ. Few large λ skew it, so that this is below what a
    normal law has.
    """
    spectrum = torch.linalg.eigvalsh(block).clamp(min=0)
    spectrum = spectrum[spectrum > 1e-6 * spectrum.max()]
    inside = 0
    for seed in range(draws // 500):
        z = torch.randn((500, probes, len(spectrum)), generator=torch_rng(seed)).double()
        each = z.square() @ spectrum
        errors = each.std(1) / math.sqrt(probes)
        inside += int(((each.mean(1) - spectrum.sum()).abs() <= 4 * errors).sum())
    return inside / draws


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_estimates_on_models_keep_to_their_standard_errors(name: str) -> None:
    """As often within 4 of them as the dense spectrum says, within 4 σ of 200 seeds. The errors are
    those of normal probes; of signs, which are used, what a single parameter tells has none.
    """
    gmap, jacobian = dense_case(name)
    exact = dfil(gmap, 1e-2, None).value
    values, errors = map(
        torch.stack, zip(*(dfil(gmap, 1e-2, 50, rng(seed)) for seed in range(200)), strict=True)
    )
    inside = ((values - exact).abs() <= 4 * errors).double().mean(0)
    half = len(jacobian) // 2
    for share, part in zip(inside, (jacobian[:half], jacobian[half:]), strict=True):
        expected = within_four_errors(part @ part.T)
        assert expected > 0.97
        assert abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / 200)
    for j, part in enumerate((jacobian[:half], jacobian[half:])):
        gram = part.T @ part
        gram *= exact[j] / gram.trace()
        normal, single = 2 * gram.square().sum() / 50, 2 * gram.diagonal().square().sum() / 50
        assert float(errors[:, j].mean()) == pytest.approx(float(normal.sqrt()), rel=0.1)
        assert float(values[:, j].std()) == pytest.approx(float((normal - single).sqrt()), rel=0.25)


@pytest.mark.long
def test_probes_are_independent() -> None:
    """The trap: one random key for all probes makes fifty of them one. Here the fiftieth's error is
    a seventh.
    """
    gmap = linear_map(torch.randn((6, 200), generator=torch_rng(0), dtype=torch.float64))
    one = torch.stack([dfil(gmap, 1.0, 1, rng(seed)).value for seed in range(200)]).std()
    fifty = torch.stack([dfil(gmap, 1.0, 50, rng(seed)).value for seed in range(200)]).std()
    assert 5.5 < float(one / fifty) < 9


def test_the_generator_decides() -> None:
    gmap, _ = dense_case("convolution")
    assert torch.equal(dfil(gmap, 1.0, 2, rng(1)).value, dfil(gmap, 1.0, 2, rng(1)).value)
    assert not torch.equal(dfil(gmap, 1.0, 2).value, dfil(gmap, 1.0, 2).value)


def test_one_probe_has_no_standard_error() -> None:
    gmap, _ = dense_case("convolution")
    assert torch.isinf(dfil(gmap, 1.0, 1).standard_error).all()
    assert fisher_trace(gmap, 1.0, 1).standard_error == math.inf


def test_a_samples_information_falls_with_the_square_of_the_batch() -> None:
    """J_j = (1/B) of the sample's own Jacobian: the same sample in a batch of two leaks a
    quarter.
    """
    model, batch = make_task("bert")
    alone = GradientMap(model, {k: v[:1] for k, v in batch.items()})
    both = GradientMap(model, batch)
    assert float(dfil(both, 1.0, None).value[0]) == pytest.approx(
        float(dfil(alone, 1.0, None).value[0]) / 4
    )


def test_padding_is_no_coordinate() -> None:
    """A sample leaks the same, per coordinate too, however long it is padded."""
    model, batch = make_task("bert", batch_size=1)
    short = GradientMap(model, batch)
    padded = GradientMap(
        model,
        {
            "input_ids": torch.cat([batch["input_ids"], torch.zeros(1, 2, dtype=torch.long)], 1),
            "attention_mask": torch.tensor([[1] * 5 + [0] * 2]),
            "labels": batch["labels"],
        },
    )
    assert padded.input.shape == (1, 7, 8)
    assert float(dfil(padded, 1.0, None).value) == pytest.approx(
        float(dfil(short, 1.0, None).value)
    )


# --------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("name", DENSE)
def test_norm_equals_the_dense_one(name: str) -> None:
    gmap, jacobian = dense_case(name)
    variance = uneven_variance(gmap)
    information = fisher(jacobian, variance)
    norm = fisher_norm(gmap, variance)
    assert float(norm) == pytest.approx(float(torch.linalg.matrix_norm(information, 2)), rel=1e-4)
    half = len(jacobian) // 2
    block = information[half:, half:]
    assert float(fisher_norm(gmap, variance, sample=1)) == pytest.approx(
        float(torch.linalg.matrix_norm(block, 2)), rel=1e-4
    )


# --------------------------------------------------------------------------------------- no noise,
# no leak


def test_no_noise_where_the_gradient_is_sensitive_leaks_everything() -> None:
    gmap, _ = dense_case("convolution")
    for num_probes in (None, 3):
        value, error = dfil(gmap, 0.0, num_probes)
        assert torch.isinf(value).all()
        assert not error.any()
        assert fisher_trace(gmap, 0.0, num_probes) == math.inf
    assert fisher_norm(gmap, 0.0) == math.inf


def test_no_noise_where_the_gradient_is_not_sensitive_leaks_nothing() -> None:
    gmap, jacobian = dense_case("convolution")
    variance = uneven_variance(gmap)
    expected = float(fisher(jacobian, variance).trace())
    variance["unused"] = torch.zeros(3)
    for num_probes in (None, 3):
        assert torch.isfinite(dfil(gmap, variance, num_probes).value).all()
    assert float(fisher_trace(gmap, variance)) == pytest.approx(expected)
    assert math.isfinite(fisher_norm(gmap, variance))


def test_a_coordinate_without_noise_exposes_only_the_samples_it_depends_on() -> None:
    jacobian = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    gmap = linear_map(jacobian, batch_size=2)
    variance = {"theta": torch.tensor([0.5, 0.0], dtype=torch.float64)}
    assert dfil(gmap, variance, None).value.tolist() == [2.0, math.inf]
    value, error = dfil(gmap, variance, 50, rng())
    assert math.isfinite(value[0])
    assert value[1] == math.inf
    assert not torch.isnan(error).any()


def test_a_coordinate_that_is_not_shared_has_infinite_variance() -> None:
    gmap, jacobian = dense_case("convolution")
    variance = {
        n: torch.full_like(g, math.inf if n == "head.weight" else 1.0)
        for n, g in gmap.gradient().items()
    }
    kept = torch.cat(
        [torch.full((g.numel(),), n != "head.weight") for n, g in gmap.gradient().items()]
    )
    assert float(fisher_trace(gmap, variance)) == pytest.approx(
        float(jacobian[:, kept].square().sum())
    )


def test_a_gradient_that_does_not_depend_on_the_input_leaks_nothing() -> None:
    gmap = by_hand([0.0, 0.0])
    for variance in (0.0, 1.0):
        assert dfil(gmap, variance, None).value.tolist() == [0.0]
        assert fisher_trace(gmap, variance, 3) == 0
        assert fisher_norm(gmap, variance) == 0


def test_one_token() -> None:
    model, batch = make_task("bert", batch_size=1)
    gmap = GradientMap(model, {k: v[:, :1] if v.dim() == 2 else v for k, v in batch.items()})
    assert float(dfil(gmap, 1.0, None).value) == pytest.approx(float(fisher_trace(gmap, 1.0)) / 8)


@pytest.mark.long
def test_variances_of_a_defense() -> None:
    """Optimal noise leaks less than uniform noise that costs the same second-order utility."""
    gmap, jacobian = dense_case("bert")
    gradient = gmap.gradient()
    squares = split_like(jacobian.square().sum(0), gradient)
    leaks = []
    for name in ("gaussian_noise", "optimal_noise"):
        own = {"shape": "own"} if name == "optimal_noise" else {}
        defense = make_defense(name, utility_budget=1e-4, strength="own", **own)
        gmap.squared_sensitivity = lambda *_args, **_kwargs: squares
        variance = defense.variance(gradient, defense.shaped(gmap, gradient, rng()), None)
        leaks.append(dfil(gmap, variance, None).value)
    assert torch.isfinite(leaks[1]).all()
    assert leaks[1].sum() < 0.6 * leaks[0].sum()


@pytest.mark.parametrize("num_probes", [0, -1, 2.5])
def test_probes_below_one(num_probes: float) -> None:
    gmap, _ = dense_case("convolution")
    for call in (dfil, fisher_trace):
        with pytest.raises(ValueError, match="num_probes must be a whole number of at least 1"):
            call(gmap, 1.0, num_probes)


def test_variances_that_do_not_fit() -> None:
    gmap, _ = dense_case("convolution")
    good = uneven_variance(gmap)
    with pytest.raises(
        ValueError, match=r"every shared parameter and no other; it differs in unused"
    ):
        dfil(gmap, {n: v for n, v in good.items() if n != "unused"})
    with pytest.raises(
        ValueError, match=r"noise_variance\['unused'\] has shape \(4,\), the parameter \(3,\)"
    ):
        dfil(gmap, {**good, "unused": torch.ones(4)})
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="at least 0"):
            dfil(gmap, bad)


@pytest.mark.long
def test_half_precision_keeps_small_variances() -> None:
    model, batch = make_task("bert", dtype=torch.bfloat16)
    value, _ = dfil(GradientMap(model, batch), 1e-12, 20, rng())
    exact, _ = dense_case("bert")
    assert ((value / dfil(exact, 1e-12, None).value).log().abs() < 1).all()


# --------------------------------------------------------------------------------------- smooth
# clipping


def test_smooth_clip_by_hand() -> None:
    """At ‖g‖ = C, GELU(0) = 0: nothing is clipped. Norms go up to 1.115 C and no further, and tend
    to C.
    """
    assert smooth_clip({"a": torch.tensor([3.0, 4.0])}, 5.0)["a"].tolist() == [3.0, 4.0]
    norms = torch.linspace(0, 100, 200_001, dtype=torch.float64)
    clipped = torch.stack([smooth_clip({"a": n[None]}, 2.0)["a"][0] for n in norms[:40_000:20]]) / 2
    assert float(clipped.max()) == pytest.approx(1.115, abs=5e-4)
    assert float(smooth_clip({"a": torch.tensor([1e6])}, 2.0)["a"]) == pytest.approx(2, rel=1e-4)
    assert smooth_clip({"a": torch.zeros(2)}, 1.0)["a"].tolist() == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("clip", [0.05, 0.5, 50.0])
def test_clipped_map_equals_the_dense_jacobian(clip: float) -> None:
    """Far below, near and far above the gradient's norm."""
    gmap = smoothly_clipped(GradientMap(*small_convolution(1)), clip)
    jacobian = dense_convolution(1, clip)
    delta = perturbation(gmap)
    v = torch.randn(gmap.input.shape, generator=torch_rng(), dtype=torch.float64)
    torch.testing.assert_close(gmap.vjp(delta).flatten(), jacobian @ flat(delta))
    torch.testing.assert_close(flat(gmap.jvp(v)), v.flatten() @ jacobian)
    some = {"head.bias": delta["head.bias"]}
    chosen = flat({n: torch.full_like(g, n == "head.bias") for n, g in gmap.gradient().items()})
    torch.testing.assert_close(gmap.vjp(some).flatten(), jacobian @ (chosen * flat(delta)))
    torch.testing.assert_close(flat(gmap.gradient()), flat(gmap.gradient_at(gmap.input)))
    # The release of private SGD: noise σC on the sum.
    sigma = 0.7
    expected = float(jacobian.square().sum()) / (sigma * clip) ** 2 / len(jacobian)
    assert float(dfil(gmap, (sigma * clip) ** 2, None).value) == pytest.approx(expected)
    several = gmap.squared_sensitivity(500, rng())
    assert float(sum(t.sum() for t in several.values())) == pytest.approx(
        float(jacobian.square().sum()), rel=0.2
    )


def test_clipping_refusals() -> None:
    gmap, _ = dense_case("convolution")
    with pytest.raises(ValueError, match=r"per sample, but this map's batch holds 2"):
        smoothly_clipped(gmap, 1.0)
    for clip in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="clip must be a finite number above 0"):
            smooth_clip(gmap.gradient(), clip)


def test_clipping_a_zero_gradient() -> None:
    jacobian: Tensor = torch.eye(2, dtype=torch.float64)
    gmap = smoothly_clipped(linear_map(jacobian), 1.0)
    zero = GradientMap(gmap.model, {"pixel_values": torch.zeros(1, 1, 1, 2, dtype=torch.float64)})
    clipped = smoothly_clipped(zero, 1.0)
    assert not flat(clipped.gradient()).any()
    factor = 1 / (1 + float(torch.nn.functional.gelu(torch.tensor(-1.0, dtype=torch.float64))))
    assert float(fisher_trace(clipped, 1.0)) == pytest.approx(2 * factor**2)


# --- Theorem 3.2 as a number


@pytest.mark.long
def test_the_bayesian_bound_is_that_of_dense_linear_algebra() -> None:
    gmap, jacobian = dense_case("bert")
    variance = uneven_variance(gmap)
    coordinates = int((jacobian.square().sum(1) > 0).sum())  # all but one token of padding
    trace = float(fisher(jacobian, variance).trace())
    expected = 1 / (trace / coordinates + 1 / 0.3**2)
    exact = bayesian_bound(gmap, variance, 0.3)
    assert exact == pytest.approx(expected, rel=1e-6)
    assert exact.standard_error == 0
    probed = bayesian_bound(gmap, variance, 0.3, 50, rng())
    assert abs(probed - exact) < 4 * probed.standard_error < exact


@pytest.mark.parametrize("seed", range(10))
def test_no_attacker_of_a_linear_map_is_below_the_bayesian_bound(seed: int) -> None:
    """x ~ N(0, τ²I), y = Jᵀx + N(0, Σ): the posterior mean is the best of all attackers. Its error
    is in closed form, and is measured on 20,000 draws.
    """
    jacobian, tau = random_jacobian(seed), 0.2 + seed / 5
    gmap = linear_map(jacobian)
    variance = uneven_variance(gmap)
    eye = torch.eye(len(jacobian), dtype=torch.float64)
    covariance = torch.linalg.inv(fisher(jacobian, variance) + eye / tau**2)
    best = float(covariance.trace()) / len(jacobian)
    generator, std = torch_rng(seed), flat(variance).sqrt()
    x = tau * torch.randn(20_000, len(jacobian), generator=generator).double()
    y = x @ jacobian + std * torch.randn(20_000, len(std), generator=generator).double()
    recovered = (y / std.square()) @ jacobian.T @ covariance
    errors = (recovered - x).square().mean(1)
    assert float(errors.mean()) == pytest.approx(best, rel=5 * float(errors.std()) / 141 / best)
    bound = bayesian_bound(gmap, variance, tau)
    assert 0 < bound <= best * (1 + 1e-9) < tau**2


def test_it_is_reached_where_all_directions_are_alike() -> None:
    gmap = linear_map(2 * torch.eye(6, dtype=torch.float64))
    assert bayesian_bound(gmap, 0.5, 0.7) == pytest.approx(1 / (4 / 0.5 + 1 / 0.7**2))


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_it_holds_for_any_prior_that_was_smoothed(tau: float, sigma: float) -> None:
    """An attacker that knows x = ±1 + N(0, τ²), a prior of two words, by numerical integrals."""
    x = torch.linspace(-1 - 8 * tau, 1 + 8 * tau, 601, dtype=torch.float64)
    prior = sum(torch.exp(-((x - word) ** 2) / 2 / tau**2) for word in (-1, 1))
    assert isinstance(prior, Tensor)
    prior = prior / torch.trapezoid(prior, x)
    y = torch.linspace(-1 - 8 * (tau + sigma), 1 + 8 * (tau + sigma), 601, dtype=torch.float64)
    likelihood = torch.exp(-((y[:, None] - x) ** 2) / 2 / sigma**2)
    joint = likelihood * prior / math.sqrt(2 * math.pi) / sigma
    evidence = torch.trapezoid(joint, x)
    mean = torch.trapezoid(joint * x, x) / evidence.clamp(min=1e-300)
    second = torch.trapezoid(joint * x**2, x) / evidence.clamp(min=1e-300)
    error = float(torch.trapezoid((second - mean**2) * evidence, y))
    score = torch.gradient(prior.clamp(min=1e-300).log(), spacing=(x,))[0]
    information = float(torch.trapezoid(score**2 * prior, x))
    assert information <= 1.001 / tau**2  # J_P, whatever the words are
    assert float(bayesian_bound(by_hand([1.0]), sigma**2, tau)) <= error * 1.001


def test_how_far_inputs_are_spread() -> None:
    model, batch = make_task("bert")
    gmap, weight = GradientMap(model, batch), model.get_input_embeddings().weight
    assert prior_deviation(gmap) == pytest.approx(float(weight.detach().var(0).mean().sqrt()))
    model, batch = small_convolution()
    pixels = batch["pixel_values"].transpose(0, 1).flatten(1)
    expected = float(pixels.var(1).mean().sqrt())
    assert prior_deviation(GradientMap(model, batch)) == pytest.approx(expected)
    for wrong in (0.0, math.inf, -1.0):
        with pytest.raises(ValueError, match="deviation must be"):
            bayesian_bound(gmap, 1.0, wrong)


@pytest.mark.long
def test_without_noise_the_bayesian_bound_is_zero() -> None:
    gmap, _ = dense_case("bert")
    silent = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    assert bayesian_bound(gmap, silent) == 0
    assert bayesian_bound(gmap, math.inf, 0.3) == pytest.approx(0.09)  # nothing is shared


def test_the_named_bayesian_bound_is_that_of_each_sample() -> None:
    gmap, _ = dense_case("bert")
    message = make_defense("gaussian_noise", scale=0.1)(gmap)
    exact = dfil(gmap, 0.1**2, None).value
    expected = (exact + prior_deviation(gmap) ** -2).rsqrt()
    found = make_estimator("bayesian_bound", gmap)(message, rng())
    torch.testing.assert_close(found, expected, rtol=0.3, atol=0)
    assert (found < prior_deviation(gmap)).all()


@pytest.mark.parametrize("seed", range(5))
def test_noise_along_small_eigenvectors_is_the_wrong_way_round(seed: int) -> None:
    """At equal power: information is least with variances as √λ, more with uniform noise, and most
    where power went to the smallest eigenvectors, however small a floor is left elsewhere.
    """
    _, sizes, basis = torch.linalg.svd(random_jacobian(seed), full_matrices=False)
    jacobian = random_jacobian(seed)

    def information(variance: Tensor) -> float:
        covariance = basis.T @ (variance / variance.sum()).diag() @ basis
        return float((jacobian @ torch.linalg.pinv(covariance) @ jacobian.T).trace())

    small = torch.full_like(sizes, 0.1)
    small[-2:] = 1.0
    smaller = torch.full_like(sizes, 0.01)
    smaller[-2:] = 1.0
    best, uniform = information(sizes), information(torch.ones_like(sizes))
    assert best <= uniform < information(small) < information(smaller)
    generator = torch_rng(seed)
    for _ in range(50):
        assert best <= information(torch.rand(len(sizes), generator=generator).double() + 1e-3)
