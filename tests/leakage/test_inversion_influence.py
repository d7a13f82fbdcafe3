"""Inversion influence against dense linear algebra in float64."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import flat, make_task, rng, torch_rng
from leakage_helpers import (
    DENSE,
    by_hand,
    dense_case,
    dense_convolution,
    linear_map,
    perturbation,
    random_jacobian,
    uneven_variance,
)

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.gradient_map.differences import by_differences
from hf_gradguard.leakage import (
    dfil,
    expected_squared_influence,
    fisher_trace,
    inversion_influence,
    inversion_influence_lower_bound,
    largest_eigenvalue,
    one_product_bound,
    smallest_directions,
)


def dense_influence(jacobian: torch.Tensor, delta: torch.Tensor, damping: float) -> torch.Tensor:
    """(J Jᵀ + ε)⁻¹ J δ through the singular values of J, with the pseudo-inverse at ε = 0."""
    u, s, vh = torch.linalg.svd(jacobian, full_matrices=False)
    weights = torch.where(s > 1e-7 * s[0], s / (s.square() + damping), 0.0)
    return u @ (weights * (vh @ delta))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("relative_damping", [0.0, 1e-6, 1e-2])
def test_influence_equals_the_dense_solution(name: str, relative_damping: float) -> None:
    """At damping 0 all of these are singular (padding, layer norms, more pixels than parameters):
    the pseudo-inverse.
    """
    gmap, jacobian = dense_case(name)
    damping = relative_damping * float(torch.linalg.matrix_norm(jacobian, 2)) ** 2
    delta = perturbation(gmap)
    expected = dense_influence(jacobian, flat(delta), damping)
    influence = inversion_influence(gmap, delta, damping)
    assert float(influence) == pytest.approx(float(expected.norm()), rel=1e-4)
    torch.testing.assert_close(
        influence.error.flatten(), expected, rtol=0, atol=1e-4 * float(expected.norm())
    )
    assert influence.residual < 1e-5
    assert influence.relative_error < 1e-4
    assert 1 < influence.iterations <= len(jacobian)


@pytest.mark.parametrize("name", DENSE)
def test_largest_eigenvalue_equals_the_dense_one(name: str) -> None:
    gmap, jacobian = dense_case(name)
    top = largest_eigenvalue(gmap)
    expected = float(torch.linalg.matrix_norm(jacobian, 2)) ** 2
    assert float(top) == pytest.approx(expected, rel=1e-4)
    assert top <= expected * (1 + 1e-6)  # ViT's reference has a softmax in float32
    assert top.residual <= 1e-4 * top
    vector = top.vector.flatten()
    assert float(vector.norm()) == pytest.approx(1)
    assert float((jacobian @ (jacobian.T @ vector) - top * vector).norm()) < 2e-4 * top


def test_lower_bound_equals_its_formula_and_reuses_the_eigenvalue() -> None:
    gmap, jacobian = dense_case("bert")
    delta = perturbation(gmap)
    product = jacobian @ flat(delta)
    largest = float(torch.linalg.matrix_norm(jacobian, 2)) ** 2
    bound = inversion_influence_lower_bound(gmap, delta, 0.3)
    assert float(bound) == pytest.approx(float(product.norm()) / (largest + 0.3), rel=1e-3)
    assert bound <= float(product.norm()) / (largest + 0.3)
    assert (
        inversion_influence_lower_bound(gmap, delta, 0.3, eigenvalue=largest_eigenvalue(gmap))
        == bound
    )
    parts = product.view(2, -1).norm(dim=1) / (largest + 0.3)
    torch.testing.assert_close(bound.per_sample, parts, rtol=1e-3, atol=0)
    assert float(bound.per_sample.norm()) == pytest.approx(float(bound))


@pytest.mark.long
def test_lower_bound_never_exceeds_influence() -> None:
    """200 random Jacobians, perturbations and dampings; a quarter near the direction in which the
    two are equal.
    """
    generator = torch_rng(8)
    tightest = 0.0
    for case in range(200):
        gmap = linear_map(random_jacobian(case))
        top = largest_eigenvalue(gmap)
        damping = 10 ** float(-6 * torch.rand((), generator=generator)) if case % 5 else 0.0
        delta = perturbation(gmap, case)
        if case % 4 == 0:
            along = gmap.jvp(top.vector)
            delta = {n: along[n] + 1e-4 * case * d for n, d in delta.items()}
        bound = inversion_influence_lower_bound(gmap, delta, damping, eigenvalue=top)
        # Also where conjugate gradients stop early: their iterates only grow, from ‖b‖/λ_max or
        # more.
        influence = inversion_influence(gmap, delta, damping, tolerance=0.5 if case % 3 else 1e-6)
        assert bound <= influence
        tightest = max(tightest, bound / influence)
    assert tightest > 0.999  # so the cases can tell: a bound a thousandth larger would have failed


@pytest.mark.statistics
@pytest.mark.parametrize("name", DENSE)
def test_lower_bound_never_exceeds_influence_on_models(name: str) -> None:
    gmap, _ = dense_case(name)
    top = largest_eigenvalue(gmap)
    for case, relative in enumerate((1e-3, 1e-1, 10.0)):
        delta = perturbation(gmap, case) if case else gmap.jvp(top.vector)
        bound = inversion_influence_lower_bound(gmap, delta, relative * top, eigenvalue=top)
        assert 0 < bound <= inversion_influence(gmap, delta, relative * top)


@pytest.mark.long
def test_one_product_bounds_from_below_and_never_looser() -> None:
    """200 random cases, a quarter in directions in which all three are equal."""
    tightest = 1.0
    for case in range(200):
        gmap = linear_map(random_jacobian(case))
        top = largest_eigenvalue(gmap)
        damping = 0.0 if case % 3 else 10.0 ** -(case % 5)
        delta = gmap.jvp(top.vector) if case % 4 == 0 else perturbation(gmap, case)
        bound = one_product_bound(gmap, delta, damping)
        loose = inversion_influence_lower_bound(gmap, delta, damping, eigenvalue=top)
        influence = inversion_influence(gmap, delta, damping, tolerance=1e-6)
        assert loose * (1 - 1e-9) <= bound <= influence * (1 + 1e-6)
        tightest = min(tightest, loose / bound if case % 4 else 1.0)
    assert tightest < 0.5
    assert one_product_bound(gmap, {}) == 0


@pytest.mark.parametrize("name", DENSE)
def test_one_product_equals_its_formula_and_stays_below_by_differences(name: str) -> None:
    gmap, jacobian = dense_case(name)
    delta, gram = perturbation(gmap), jacobian @ jacobian.T
    b = jacobian @ flat(delta)
    expected = float(b.norm() ** 2 / (gram @ b + 0.3 * b).norm())
    assert one_product_bound(gmap, delta, 0.3) == pytest.approx(expected, rel=1e-4)
    quick = by_differences(gmap)
    if quick is not None:
        found = one_product_bound(quick, delta, 0.3)
        assert 0 < quick.product_error < 0.1
        assert expected * (1 - 6 * quick.product_error) <= found <= expected
        top, exact = largest_eigenvalue(quick), largest_eigenvalue(gmap)
        assert float(top) == pytest.approx(float(exact), rel=3 * quick.product_error)
        assert inversion_influence_lower_bound(quick, delta) <= float(b.norm()) / exact


@pytest.mark.long
def test_per_sample_and_one_sample_alone() -> None:
    gmap, jacobian = dense_case("gpt2")
    delta = perturbation(gmap)
    damping = 1e-3 * float(torch.linalg.matrix_norm(jacobian, 2)) ** 2
    together = inversion_influence(gmap, delta, damping)
    expected = dense_influence(jacobian, flat(delta), damping).view(2, -1).norm(dim=1)
    torch.testing.assert_close(together.per_sample, expected, rtol=1e-4, atol=0)

    for sample, block in enumerate(jacobian.view(2, 40, -1)):
        alone = inversion_influence(gmap, delta, damping, sample=sample)
        assert float(alone) == pytest.approx(
            float(dense_influence(block, flat(delta), damping).norm()), rel=1e-4
        )
        assert alone.num_coordinates == 40 - 8 * sample  # the second sample's last token is padding
        assert not alone.error[1 - sample].any()
        top = largest_eigenvalue(gmap, sample=sample)
        assert float(top) == pytest.approx(float(torch.linalg.matrix_norm(block, 2)) ** 2, rel=1e-4)
        assert inversion_influence_lower_bound(gmap, delta, damping).per_sample[sample] <= alone


def test_rmse_counts_real_tokens() -> None:
    gmap, _ = dense_case("bert")
    influence = inversion_influence(gmap, perturbation(gmap), 0.1)
    assert influence.num_coordinates == 9 * 8
    assert influence.rmse == pytest.approx(influence / math.sqrt(72))


@pytest.mark.parametrize("name", ["gaussian_noise", "pruning", "quantization"])
def test_works_for_what_a_defense_shares(name: str) -> None:
    gmap, jacobian = dense_case("bert")
    shared = make_defense(name)(gmap, rng())
    delta = {n: shared[n] - g for n, g in gmap.gradient().items()}
    expected = dense_influence(jacobian, flat(delta), 0.1).norm()
    assert float(inversion_influence(gmap, delta, 0.1)) == pytest.approx(float(expected), rel=1e-4)


def test_scales_as_the_formula_says() -> None:
    gmap, _ = dense_case("convolution")
    delta = perturbation(gmap)
    once, thrice = (
        inversion_influence(gmap, {n: k * d for n, d in delta.items()}, 1e-3) for k in (1, 3)
    )
    assert thrice == pytest.approx(3 * once, rel=1e-4)


def test_withheld_coordinates_of_a_chain_say_nothing() -> None:
    gmap, jacobian = dense_case("convolution")
    withheld = {
        n: torch.full_like(g, n == "head.weight", dtype=torch.bool)
        for n, g in gmap.gradient().items()
    }
    view = gmap.masked(
        {n: g.masked_fill(withheld[n], 0) for n, g in gmap.gradient().items()},
        {n: ~mask for n, mask in withheld.items()},
    )
    kept = jacobian * ~flat(withheld)
    delta = perturbation(gmap)
    assert float(largest_eigenvalue(view)) == pytest.approx(
        float(torch.linalg.matrix_norm(kept, 2)) ** 2, rel=1e-4
    )
    expected = dense_influence(kept, flat(delta), 1e-3).norm()
    assert float(inversion_influence(view, delta, 1e-3)) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.long
def test_smallest_directions() -> None:
    gmap, jacobian = dense_case("bert")
    real = jacobian[:72]  # the last of the ten tokens is padding
    values, vectors = smallest_directions(gmap, 72)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(real @ real.T), rtol=1e-6, atol=1e-12)
    rows = vectors.flatten(1)[:, :72]
    torch.testing.assert_close(rows @ real @ real.T @ rows.T, values.diag(), rtol=1e-6, atol=1e-11)
    # δ = Jᵀu/√λ has norm 1 and moves the reconstruction by 1/√λ, along u.
    u, eigenvalue = vectors[-30], float(values[-30])
    delta = {n: t / math.sqrt(eigenvalue) for n, t in gmap.jvp(u).items()}
    assert float(flat(delta).norm()) == pytest.approx(1, rel=1e-6)
    assert float(inversion_influence(gmap, delta)) == pytest.approx(
        1 / math.sqrt(eigenvalue), rel=1e-4
    )
    assert smallest_directions(gmap, 2).vectors.shape == (2, *gmap.input.shape)


# --------------------------------------------------------------------------------------------------
# expectation


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("relative_damping", [0.0, 1e-3])
def test_exact_expectation(relative_damping: float) -> None:
    gmap, jacobian = dense_case("convolution")
    s = torch.linalg.svdvals(jacobian)
    damping = relative_damping * float(s[0]) ** 2
    kept = s[s > 1e-6 * s[0]].square()
    expected = 4e-4 * float((kept / (kept + damping).square()).sum())
    figure = expected_squared_influence(gmap, 4e-4, damping)
    assert float(figure) == pytest.approx(expected, rel=1e-6)
    assert figure.standard_error == 0

    variance = uneven_variance(gmap)
    inverse = torch.linalg.pinv(
        jacobian @ jacobian.T + damping * torch.eye(len(jacobian)), rtol=1e-10, hermitian=True
    )
    expected = float((inverse @ (jacobian * flat(variance)) @ jacobian.T @ inverse).trace())
    assert float(expected_squared_influence(gmap, variance, damping)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.long
@pytest.mark.statistics
def test_estimated_expectation_and_its_standard_error() -> None:
    """200 seeds of 10 draws: within 4 standard errors, and their squares average to the variance
    that they stand for.
    """
    jacobian = torch.eye(20, 25, dtype=torch.float64)
    jacobian[10:] *= 0.7
    gmap, damping = linear_map(jacobian), 0.1
    exact = float(expected_squared_influence(gmap, 1e-2, damping))
    figures = [
        expected_squared_influence(gmap, 1e-2, damping, num_probes=10, generator=torch_rng(seed))
        for seed in range(200)
    ]
    values = torch.tensor([float(figure) for figure in figures], dtype=torch.float64)
    errors = torch.tensor([figure.standard_error for figure in figures], dtype=torch.float64)
    assert ((values - exact).abs() <= 4 * errors).float().mean() >= 0.99
    assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(200)
    assert 0.8 < float(errors.square().mean().sqrt() / values.std()) < 1.25
    assert expected_squared_influence(gmap, 1e-2, damping, num_probes=1).standard_error == math.inf


# --------------------------------------------------------------------------------------------------
# edges


def test_by_hand() -> None:
    """J = a of norm 5: I(δ) = |δ|/5 and λ = 25; the other three directions of the input are
    invisible.
    """
    gmap = by_hand([3.0, 0.0, 4.0, 0.0])
    delta = {"theta": torch.tensor([2.0], dtype=torch.float64)}
    assert float(largest_eigenvalue(gmap)) == pytest.approx(25)
    influence = inversion_influence(gmap, delta)
    assert float(influence) == pytest.approx(0.4)
    assert float(inversion_influence(gmap, delta, 5.0)) == pytest.approx(10 / 30)
    assert influence.iterations == 1
    assert influence.rmse == pytest.approx(0.2)
    assert float(expected_squared_influence(gmap, 0.01)) == pytest.approx(0.01 / 25)
    assert smallest_directions(gmap, 3).eigenvalues.abs().max() < 1e-12


def test_nearly_singular_without_damping_is_an_error() -> None:
    """One pixel's part in the gradient is 1e-9 of the other's: rounding would decide the result."""
    gmap = linear_map(torch.tensor([[1.0, 0.0], [0.0, 1e-9]], dtype=torch.float64))
    delta = {"theta": torch.ones(2, dtype=torch.float64)}
    with pytest.raises(ArithmeticError, match=r"singular to working precision.*larger damping"):
        inversion_influence(gmap, delta)
    assert float(inversion_influence(gmap, delta, 1e-3)) == pytest.approx(1 / 1.001, rel=1e-5)


def test_too_few_iterations_are_an_error() -> None:
    gmap, _ = dense_case("bert")
    with pytest.raises(
        ArithmeticError, match=r"did not reach a relative error of 1e-05 in 5 iterations.*damping"
    ):
        inversion_influence(gmap, perturbation(gmap), max_iterations=5)
    with pytest.raises(ArithmeticError, match="not known to a relative residual of 1e-12 after 2"):
        largest_eigenvalue(gmap, tolerance=1e-12, max_iterations=2)


@pytest.mark.long
def test_float32_says_what_it_cannot_resolve() -> None:
    gmap = GradientMap(*make_task("bert", dtype=torch.float32))
    exact, _ = dense_case("bert")
    delta = perturbation(exact)
    single = {n: d.float() for n, d in delta.items()}
    top = largest_eigenvalue(gmap)
    assert float(top) == pytest.approx(float(largest_eigenvalue(exact)), rel=1e-4)
    damping = 1e-3 * top
    influence = inversion_influence(gmap, single, damping)
    assert float(influence) == pytest.approx(
        float(inversion_influence(exact, delta, damping)), rel=1e-3
    )
    gmap = GradientMap(
        *make_task("vit", dtype=torch.float32)
    )  # its spectrum spans seven orders of magnitude
    with pytest.raises(ArithmeticError, match=r"torch\.float32.*float64"):
        inversion_influence(gmap, {n: torch.ones_like(g) for n, g in gmap.gradient().items()})


def test_gradient_that_does_not_depend_on_the_input() -> None:
    gmap = by_hand([0.0, 0.0])
    delta = {"theta": torch.tensor([2.0], dtype=torch.float64)}
    for damping in (0.0, 1.0):
        assert inversion_influence(gmap, delta, damping) == 0
        assert inversion_influence_lower_bound(gmap, delta, damping) == 0
        assert expected_squared_influence(gmap, 1.0, damping) == 0
    assert largest_eigenvalue(gmap) == 0


def test_nothing_perturbed() -> None:
    gmap, _ = dense_case("bert")
    assert inversion_influence(gmap, {}) == inversion_influence_lower_bound(gmap, {}) == 0
    assert inversion_influence(gmap, {}).iterations == 0


def test_one_token() -> None:
    model, batch = make_task("bert", batch_size=1)
    gmap = GradientMap(model, {k: v[:, :1] if v.dim() == 2 else v for k, v in batch.items()})
    assert gmap.input.shape == (1, 1, 8)
    values, _ = smallest_directions(gmap, 8)
    assert float(largest_eigenvalue(gmap)) == pytest.approx(float(values[-1]), rel=1e-6)
    bound = inversion_influence_lower_bound(gmap, perturbation(gmap))
    assert 0 < bound <= inversion_influence(gmap, perturbation(gmap))


def test_refusals() -> None:
    gmap, _ = dense_case("convolution")
    delta = perturbation(gmap)
    with pytest.raises(
        ValueError, match=r"damping must be a finite number of at least 0, but is -1"
    ):
        inversion_influence(gmap, delta, -1)
    with pytest.raises(ValueError, match="damping"):
        inversion_influence_lower_bound(gmap, delta, math.nan)
    with pytest.raises(ValueError, match=r"tolerance must be between 0 and 1"):
        inversion_influence(gmap, delta, tolerance=0.0)
    with pytest.raises(ValueError, match=r"sample must be from 0 to 1, but is 2"):
        largest_eigenvalue(gmap, sample=2)
    with pytest.raises(ValueError, match=r"count must be from 1 to 384"):
        smallest_directions(gmap, 385)
    with pytest.raises(ValueError, match="num_probes"):
        expected_squared_influence(gmap, 1.0, num_probes=0)
    with pytest.raises(ValueError, match="'nonsense' is no shared parameter"):
        inversion_influence(gmap, {"nonsense": torch.ones(1)})


def test_products_that_are_not_finite() -> None:
    gmap = by_hand([math.inf, 1.0])
    with pytest.raises(FloatingPointError, match="not finite"):
        largest_eigenvalue(gmap)


def test_padding_must_be_told() -> None:
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch)
    gmap.batch["attention_mask"] = torch.ones(2, 1, 5, 5)
    with pytest.raises(ValueError, match=r"does not say which of the \(2, 5\) tokens are padding"):
        largest_eigenvalue(gmap)
    gmap.batch["attention_mask"] = torch.tensor([[1] * 5, [0] * 5])
    with pytest.raises(ValueError, match="Sample 1 of the batch is nothing but padding"):
        largest_eigenvalue(gmap)


def test_dense_reference_of_the_convolution() -> None:
    """The reference itself: its unused parameter has no rows, and there are more pixels than
    parameters.
    """
    jacobian = dense_convolution()
    assert jacobian.shape == (384, 116)
    assert (jacobian.abs().sum(0) == 0).sum() == 3


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "convolution"])
def test_a_bound_that_begins_at_what_noise_moves(name: str) -> None:
    """From Jδ of noise on all coordinates: never above the dense bound, near it, in no more
    products on average than from a random vector.
    """
    gmap, jacobian = dense_case(name)
    largest = float(torch.linalg.eigvalsh(jacobian @ jacobian.T)[-1])
    products = []
    for seed in range(5):
        noise = torch.Generator().manual_seed(seed)
        delta = {
            n: torch.randn(g.shape, generator=noise, dtype=g.dtype)
            for n, g in gmap.gradient().items()
        }
        exact = float((jacobian @ flat(delta)).norm()) / largest
        rough = [
            inversion_influence_lower_bound(gmap, delta, tolerance=0.1, random=random)
            for random in (True, False)
        ]
        for bound in rough:
            assert 0.85 * exact <= bound <= exact * (1 + 1e-9)
        products.append([bound.iterations for bound in rough])
        close = inversion_influence_lower_bound(gmap, delta, tolerance=1e-8, random=True)
        assert close == pytest.approx(exact, rel=1e-6)
    began, cold = torch.tensor(products).double().mean(0)
    assert began <= cold
    nothing = {n: torch.zeros_like(d) for n, d in delta.items()}
    assert inversion_influence_lower_bound(gmap, nothing, random=True) == 0


@pytest.mark.long
@pytest.mark.parametrize("size", [1e-18, 1e-25])
def test_small_perturbations_have_small_influence(size: float) -> None:
    """All of them are linear in δ, though squares of small numbers are zeros in float32."""
    model, batch = make_task("bert", dtype=torch.float32)
    gmap = GradientMap(model, batch)
    damping = 0.1 * largest_eigenvalue(gmap)
    delta = {
        name: torch.randn(g.shape, generator=torch_rng()) for name, g in gmap.gradient().items()
    }
    small = {name: size * d for name, d in delta.items()}
    for figure in (inversion_influence, inversion_influence_lower_bound, one_product_bound):
        assert float(figure(gmap, small, damping)) == pytest.approx(
            size * float(figure(gmap, delta, damping)), rel=1e-4
        )


@pytest.mark.long
def test_what_is_not_finite_is_no_figure() -> None:
    model, batch = make_task("bert")
    next(p for n, p in model.named_parameters() if "query" in n).data[0, 0] = torch.nan
    gmap = GradientMap(model, batch)
    delta = {name: torch.ones_like(g) for name, g in gmap.gradient().items()}
    for figure in (
        lambda: dfil(gmap, 1e-3, None),
        lambda: fisher_trace(gmap, 1e-3),
        lambda: inversion_influence_lower_bound(gmap, delta, 0.1),
        lambda: expected_squared_influence(gmap, 1e-3, 0.1),
        lambda: smallest_directions(gmap),
    ):
        with pytest.raises(FloatingPointError, match="not finite"):
            figure()
