"""Fisher information about labels against a dense Jacobian by soft labels, and against the test
between two labels that it stands for.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import flat, make_task, rng
from leakage_helpers import uneven_variance
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.leakage import label_information, label_success_bound, make_estimator


def soft_jacobian(gmap: GradientMap, batch: dict, classes: int) -> Tensor:
    """∂g/∂p of each label's class probabilities p, `(B, K, d)`, by autograd."""
    model, parameters = gmap.model, list(gmap.parameters.values())
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}

    def gradient(soft: Tensor) -> Tensor:
        logits = model(**inputs).logits.double()
        loss = -(soft * logits.log_softmax(-1)).sum(-1).mean()
        g = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        return torch.cat([tensor.flatten() for tensor in g])

    own = torch.nn.functional.one_hot(batch["labels"], classes).double()
    jacobian = torch.autograd.functional.jacobian(gradient, own)
    return jacobian.movedim(0, -1)


def dense_information(jacobian: Tensor, variance: Tensor) -> Tensor:
    """Tr(P J Σ⁻¹ Jᵀ P)/(K - 1) of each label, with the projection P on the simplex's tangent."""
    centered = jacobian - jacobian.mean(1, keepdim=True)
    return (centered.square() / variance).sum((1, 2)) / (jacobian.shape[1] - 1)


def of_three_classes() -> tuple[GradientMap, dict]:
    model, batch = make_task("bert", num_labels=3)
    return GradientMap(model, batch), batch


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 3])
def test_it_is_that_of_a_dense_jacobian(classes: int) -> None:
    model, batch = make_task("bert", num_labels=classes, attn_implementation="eager")
    gmap = GradientMap(model, batch)
    variance = uneven_variance(gmap)
    expected = dense_information(soft_jacobian(gmap, batch, classes), flat(variance))
    found = [label_information(gmap, variance, sample=j) for j in range(len(expected))]
    assert found == pytest.approx(expected.tolist(), rel=1e-6)
    mean = label_information(gmap, variance)
    assert mean == pytest.approx(float(expected.mean()), rel=1e-6)
    assert mean.standard_error == 0


@pytest.mark.long
def test_random_pairs_estimate_it() -> None:
    gmap, _ = of_three_classes()
    variance = uneven_variance(gmap)
    estimate = label_information(gmap, variance, num_probes=100, generator=rng())
    exact = label_information(gmap, variance)
    assert abs(estimate - exact) < 4 * estimate.standard_error < 0.5 * exact
    alone = label_information(gmap, variance, sample=1, num_probes=100, generator=rng())
    assert abs(alone - label_information(gmap, variance, sample=1)) < 4 * alone.standard_error
    assert label_information(gmap, 1.0, num_probes=1).standard_error == math.inf


def test_the_best_attacker_is_right_as_often_as_the_bound() -> None:
    """The likelihood ratio between two labels, of 4,000 messages: Neyman and Pearson's test."""
    gmap, batch = of_three_classes()
    own, other = batch["labels"].clone(), batch["labels"].clone()
    other[0] = (own[0] + 1) % 3
    means = [flat(gmap.gradient_at(gmap.input, labels=labels)) for labels in (own, other)]
    distance = float((means[0] - means[1]).norm())
    std = distance / 2  # so that labels are two deviations apart
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, generator=generator).double() * std  # along the difference
    right = float((noise < distance / 2).double().mean())
    pairs = [
        float((a - b).norm()) ** 2 / std**2 / 2
        for a, b in [means, *([m, third_gradient(gmap, own)] for m in means)]
    ]
    information = label_information(gmap, std**2, sample=0)
    assert information == pytest.approx(sum(pairs) / 3, rel=1e-6)
    assert right == pytest.approx(label_success_bound(pairs[0]), abs=4 * 0.5 / math.sqrt(4000))
    # On average over pairs no attacker is above the bound of the mean.
    assert sum(map(label_success_bound, pairs)) / 3 <= label_success_bound(information)


def third_gradient(gmap: GradientMap, own: Tensor) -> Tensor:
    labels = own.clone()
    labels[0] = (own[0] + 2) % 3
    return flat(gmap.gradient_at(gmap.input, labels=labels))


def test_what_is_not_shared_and_what_has_no_noise() -> None:
    gmap, _ = of_three_classes()
    exact = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    assert label_information(gmap, exact) == math.inf
    assert label_success_bound(math.inf) == 1
    assert label_information(gmap, math.inf) == 0
    withheld = {name: torch.zeros_like(g, dtype=torch.bool) for name, g in exact.items()}
    masked = gmap.masked(exact, withheld)
    assert label_information(masked, 1.0) == 0


def test_labels_that_are_no_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="classes, one for each sample"):
        label_information(GradientMap(*make_task("gpt2_lm")), 1.0)
    gmap, _ = of_three_classes()
    with pytest.raises(ValueError, match="sample must be"):
        label_information(gmap, 1.0, sample=9)
    with pytest.raises(ValueError, match="num_probes"):
        label_information(gmap, 1.0, num_probes=0)


def test_the_named_estimator_is_the_share_of_errors() -> None:
    gmap, _ = of_three_classes()
    message = make_defense("gaussian_noise", scale=0.1)(gmap)
    errors = make_estimator("label_bound", gmap)(message)
    exact = [label_information(gmap, 0.1**2, sample=j) for j in range(len(gmap.input))]
    assert errors.tolist() == pytest.approx([1 - label_success_bound(i) for i in exact], rel=1e-5)
    assert (errors < 0.5).all()
