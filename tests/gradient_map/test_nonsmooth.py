"""Operations on noted sides: their own values and derivatives where they were noted, and the same
branch everywhere else.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_gradguard.gradient_map.nonsmooth import ActivationPattern, OtherOperations

F = nn.functional
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {  # on either side
    "relu": F.relu, "method": Tensor.relu, "in place": lambda x: nn.ReLU(inplace=True)(x * 1.0),
    "relu6": nn.ReLU6(), "leaky": nn.LeakyReLU(0.2),
    "leaky in place": lambda x: F.leaky_relu_(x * 1.0),
    "prelu": nn.PReLU(3, dtype=torch.float64), "threshold": nn.Threshold(0.1, 0.3),
    "hardtanh": nn.Hardtanh(-0.5, 0.7),
    "softshrink": nn.Softshrink(0.25), "abs": torch.abs,
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "clamp": lambda x: x.clamp(-0.2, 0.4), "clamp in place": lambda x: (x * 1.0).clamp_(max=0.1),
    "clamp by tensors": lambda x: torch.clamp(x, -torch.ones(8).double(), torch.zeros(8).double()),
    "clamp_min": lambda x: x.clamp_min(0.1), "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)), "max of two": lambda x: torch.max(x, -x),
    "minimum": lambda x: torch.minimum(x, x.flip(0)), "min of two": lambda x: x.min(x.flip(1)),
    "max": Tensor.max, "max of a row": lambda x: x.max(dim=-1, keepdim=True).values,
    "min of a row": lambda x: torch.min(x, 1)[0], "amax": lambda x: x.amax(-1),
    "amin": lambda x: torch.amin(x, dim=(1,)), "topk": lambda x: x.topk(2, dim=1).values,
    "sort": lambda x: torch.sort(x, descending=True)[0],
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3), "max_pool2d": nn.MaxPool2d(3, 2, 1),
    "max_pool2d of one": lambda x: torch.max_pool2d(x[0], 2), "max_pool3d": nn.MaxPool3d(2),
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d(3),
}  # fmt: skip
CURVED: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": nn.ELU(1.5), "selu": nn.SELU(), "hardswish": lambda x: F.hardswish(4 * x),
}  # fmt: skip


def weights(value: Tensor) -> Tensor:
    return torch.linspace(1, 2, value.numel(), dtype=value.dtype).view_as(value)


def passed(
    function: Callable[[Tensor], Tensor], x: Tensor, pattern: ActivationPattern | None = None
) -> tuple[Tensor, Tensor]:
    """A function's value and the derivative of a weighted sum of it."""
    x = x.clone().requires_grad_()
    if pattern is None:
        value = function(x)
    else:
        with pattern.kept():
            value = function(x)
    (slope,) = torch.autograd.grad((value * weights(value)).sum(), x)
    return value.detach(), slope


@pytest.mark.parametrize("name", LINEAR | CURVED)
def test_where_sides_were_noted_nothing_changes(name: str) -> None:
    function = (LINEAR | CURVED)[name]
    x, pattern = torch.randn(2, 3, 8, 8).double(), ActivationPattern()
    stock = passed(function, x)
    noting, keeping = passed(function, x, pattern), passed(function, x, pattern)
    assert len(pattern.noted) == 1
    for value, expected in zip(noting, stock, strict=True):
        assert torch.equal(value, expected)
    for value, expected in zip(keeping, stock, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LINEAR)
def test_elsewhere_it_is_the_same_branch(name: str) -> None:
    """Far away, where stock has another derivative, a linear branch has the noted one."""
    function, pattern = LINEAR[name], ActivationPattern()
    x, other = torch.randn(2, 3, 8, 8).double(), torch.randn(2, 3, 8, 8).double()
    value, slope = passed(function, x, pattern)
    other_value, other_slope = passed(function, other, pattern)
    assert not torch.allclose(passed(function, other)[1], slope)
    torch.testing.assert_close(other_slope, slope, rtol=1e-12, atol=1e-12)
    moved = ((other - x) * slope).sum()
    change = ((other_value - value) * weights(value)).sum()
    torch.testing.assert_close(change, moved, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CURVED)
def test_a_curved_branch_goes_on_across_the_kink(name: str) -> None:
    """Its derivative is continuous along a way on which stock's jumps."""
    x, pattern = torch.full((1,), -1e-3, dtype=torch.float64), ActivationPattern()
    if name == "hardswish":  # 4x crosses -3 there
        x -= 0.75
    before = passed(CURVED[name], x, pattern)[1]
    after = passed(CURVED[name], x + 2e-3, pattern)[1]
    assert abs(float(after - before)) < 0.02
    assert abs(float(passed(CURVED[name], x + 2e-3)[1] - before)) > 0.02


def test_integers_and_what_is_smooth_are_left_alone() -> None:
    pattern = ActivationPattern()
    with pattern.kept():
        torch.arange(3).clamp(max=1).abs()
        torch.tanh(torch.ones(2))
    assert not pattern.noted


def test_another_pass_is_refused() -> None:
    pattern, x = ActivationPattern(), torch.ones(2)
    with pattern.kept():
        torch.relu(x)
    with pytest.raises(OtherOperations, match="abs was not noted"), pattern.kept():
        torch.abs(x)
    with pytest.raises(OtherOperations, match="ends before"), pattern.kept():
        torch.tanh(x)
    with pytest.raises(OtherOperations, match="relu was not noted"), pattern.kept():
        torch.relu(torch.relu(x))
