"""Soteria: columns of the last dense layer against dense Jacobians, and the attacker who leaves
that layer out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_task, reference_input, reference_loss, rng, small_convolution, torch_rng
from torch import Tensor, nn

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.defenses.soteria import representation
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

HEADS = {
    "vit": "classifier",
    "convnext": "classifier",
    "bert": "classifier",
    "electra": "classifier.out_proj",
}


def dense_norms(
    head: nn.Module, loss_at: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """r and ‖∂r_j/∂x‖ over the batch, from the dense Jacobian of what enters `head`."""

    def features(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        loss_at(x)
        handle.remove()
        return seen[0]

    jacobian = torch.autograd.functional.jacobian(features, x)  # (B, n, *x.shape)
    return features(x).detach(), jacobian.flatten(2).square().sum((0, 2)).sqrt()


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("task", HEADS)
def test_norms_equal_the_dense_jacobians(task: str, chunk: int) -> None:
    name, r, norms = representation(GradientMap(*make_task(task)), rng(), chunk)
    model, batch = make_task(task, attn_implementation="eager")
    head = model.get_submodule(HEADS[task])
    expected = dense_norms(
        head, lambda x: reference_loss(task, model, batch, x), reference_input(task, model, batch)
    )
    assert name == f"{HEADS[task]}.weight"
    # Eager attention takes its softmax in float32.
    torch.testing.assert_close(r, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "count"), [(0.0, 0), (0.12, 0), (0.125, 1), (0.5, 4), (0.9, 7), (0.999, 7)]
)
@pytest.mark.parametrize("task", HEADS)
def test_the_columns_of_the_largest_scores_are_zeroed_and_nothing_else(
    task: str, ratio: float, count: int
) -> None:
    gmap = GradientMap(*make_task(task))
    name, r, norms = representation(gmap, rng())
    scores = (r.norm(dim=0) / norms).tolist()
    ranked = sorted(range(8), key=lambda j: -scores[j])
    shared = make_defense("soteria", ratio=ratio)(gmap, rng())
    for key, gradient in gmap.gradient().items():
        expected = gradient.clone()
        if key == name:
            expected[:, ranked[:count]] = 0
        assert torch.equal(shared[key], expected)


class Linear(nn.Module):
    """r = Wx, so that ∂r_j/∂x is W's row."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.body = nn.Linear(2, len(rows), bias=False)
        self.body.weight = nn.Parameter(torch.tensor(rows))
        self.head = nn.Linear(len(rows), 2)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {
            "loss": nn.functional.cross_entropy(
                self.head(self.body(pixel_values.flatten(1))), labels
            )
        }


def zeroed(rows: list[list[float]], x: list[list[float]], ratio: float) -> list[int]:
    batch = {
        "pixel_values": torch.tensor(x).view(-1, 1, 1, 2),
        "labels": torch.zeros(len(x), dtype=torch.long),
    }
    gmap = GradientMap(Linear(rows), batch)
    shared = make_defense("soteria", ratio=ratio)(gmap, rng())["head.weight"]
    return [
        j
        for j in range(len(rows))
        if not shared[:, j].any() and gmap.gradient()["head.weight"][:, j].any()
    ]


def test_by_hand() -> None:
    # One sample x = (3, 4): scores |w·x|/‖w‖ are 3, 4, 5 and 1.4/√2 = 0.99, whatever the rows'
    # lengths.
    rows = [[2.0, 0.0], [0.0, -1.0], [0.6, 0.8], [-10.0, 10.0]]
    assert zeroed(rows, [[3.0, 4.0]], 0.25) == [2]
    assert zeroed(rows, [[3.0, 4.0]], 0.5) == [1, 2]
    assert zeroed(rows, [[3.0, 4.0]], 0.75) == [0, 1, 2]
    # Two samples: √(3² + 0²)/(√2·1) = 2.1, √(4² + 6²)/√2 = 5.1, √(5² + 4.8²)/√2 = 4.9.
    assert zeroed(rows, [[3.0, 4.0], [0.0, 6.0]], 0.25) == [1]


def test_neurons_that_are_off_stay_and_ties_go_by_position() -> None:
    # The first neuron is 0 at x = (1, 0): its column is zero as it is, and a place for another is
    # not spent on it.
    assert zeroed([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]], [[1.0, 0.0]], 0.5) == [1, 2]


def test_batch_statistics_mix_samples_and_the_squares_are_unbiased() -> None:
    model, batch = small_convolution(batch_size=3, batch_norm=True)
    _, exact = dense_norms(
        model.head,
        lambda x: model(x, batch["labels"])["loss"],
        batch["pixel_values"].requires_grad_(),
    )
    batch["pixel_values"].requires_grad_(False)
    gmap, generator = GradientMap(model, batch), rng()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    draws = torch.stack([representation(gmap, generator, 18)[2].square() for _ in range(200)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
    error = draws.std(0) / 200**0.5
    assert (draws.std(0) / exact.square()).max() > 0.01  # samples do depend on one another
    assert ((draws.mean(0) - exact.square()).abs() < 4 * error + 1e-9).all()


def test_the_dropout_mask_is_the_gradients() -> None:
    """For one sample the head's weight gradient is δ rᵀ with δ its bias gradient: r is zero where
    it is.
    """
    model, batch = make_task("bert", dropout=0.5, batch_size=1)
    gmap = GradientMap(model.train(), batch)
    torch.manual_seed(9)
    _, r, _ = representation(gmap, rng())
    gradient = gmap.gradient()
    assert (r == 0).any()
    torch.testing.assert_close(
        torch.outer(gradient["classifier.bias"], r[0]), gradient["classifier.weight"]
    )


@pytest.mark.parametrize("second_order", [True, False])
def test_it_leaves_everything_as_it_found_it(second_order: bool) -> None:
    model, batch = make_task("vit", dropout=0.3)
    gmap = GradientMap(model.train(), batch, second_order=second_order)
    state = torch.get_rng_state()
    shared = make_defense("soteria", ratio=0.5)(gmap, rng())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(
        torch.equal(shared[n], g) for n, g in gmap.gradient().items() if n != "classifier.weight"
    )


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.last = nn.Linear(8, 8), nn.Conv2d(3, 3, 8)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {
            "loss": nn.functional.cross_entropy(
                self.last(self.dense(pixel_values)).flatten(1), labels
            )
        }


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("gpt2", r"reads \(2, 5, 8\), and not one vector for each of 2 samples"),
        ("bert_mlm", r"reads \(2, 5, 8\)"),
        ("t5", r"reads \(2, 5, 8\)"),
        ("convolution", "its last layer with parameters is a Conv2d"),
        ("frozen", "the weight of its last dense layer is not trained"),
    ],
)
def test_models_without_such_a_layer_are_refused(task: str, reason: str) -> None:
    model, batch = make_task(task if task in ("gpt2", "bert_mlm", "t5") else "vit")
    if task == "convolution":
        model = Convolutional().double()
    if task == "frozen":
        model.classifier.requires_grad_(False)
    with pytest.raises(
        ValueError, match=f"{type(model).__name__} has no representation.*{reason}.*optimal_pruning"
    ):
        make_defense("soteria")(GradientMap(model, batch), rng())


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, float("nan"), "0.5", True, None])
def test_ratios_out_of_range(value: Any) -> None:
    with pytest.raises(ValueError, match="ratio must be at least 0 and below 1"):
        make_defense("soteria", ratio=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_chunks_out_of_range(value: Any) -> None:
    with pytest.raises(ValueError, match="neuron_chunk must be a whole number of at least 1"):
        make_defense("soteria", neuron_chunk=value)


def test_noise_after_it_falls_on_what_it_left() -> None:
    gmap = GradientMap(*make_task("vit"))
    zeros = make_defense("soteria", ratio=0.5)(gmap, rng())["classifier.weight"] == 0
    both = chain(
        make_defense("soteria", ratio=0.5), make_defense("gaussian_noise", relative_scale=0.5)
    )
    shared = both(gmap, rng())["classifier.weight"]
    assert zeros.sum() == 4 * 3
    assert torch.equal(shared == 0, zeros)


@pytest.mark.long
def test_the_attacker_who_leaves_the_layer_out_undoes_it() -> None:
    torch.manual_seed(0)
    config = LeakageLeNetConfig(
        image_size=8, hidden_channels=6, strides=[1, 2], num_labels=3, initializer_range=0.3
    )
    model = LeakageLeNetForImageClassification(config).double().eval()
    batch = {
        "pixel_values": torch.rand(1, 3, 8, 8, generator=torch_rng(), dtype=torch.float64),
        "labels": torch.tensor([2]),
    }
    shared = make_defense("soteria", ratio=0.9)(GradientMap(model, batch), rng())
    seen = Observation(
        model=model, gradient=shared, input_shape=(1, 3, 8, 8), labels=batch["labels"]
    )
    psnr = {}
    for left_out in ((), ("classifier",)):
        found = make_attack("dlg", steps=60, start="uniform", leave_out=left_out)(seen, rng())
        assert found.input is not None
        psnr[left_out] = float(
            -10 * torch.log10((found.input - batch["pixel_values"]).square().mean())
        )
    assert psnr[()] < 15
    assert psnr["classifier",] > 30
