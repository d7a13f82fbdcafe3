"""What a defense is: a function from a gradient map to what is shared."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..randomness import private_generator

Granularity = Literal["parameter", "layer"]


class Noise(NamedTuple):
    """Gaussian noise that a call of a defense added, as seen from the undefended gradient.

    Args:
        variance: Diagonal Σ; infinite where the coordinate was not shared, or was clipped to a
            constant.
        squares: Estimates of s_i² on this very batch that Σ was shaped by, if there are any.
        num_probes: How many probes `squares` come from.
        shaping_probes: The same, if Σ follows them entry by entry, and their sum is too small for
            that (see `fisher_trace_from_sensitivity`).
    """

    variance: Tensors
    squares: Tensors | None = None
    num_probes: int = 0
    shaping_probes: int | None = None


class Defense:
    """Base of all defenses. A subclass is a dataclass of its settings with one method, `protect`.

    A defense is pure: it touches neither the model nor `.grad`, and all its randomness comes from
    `generator`.
    """

    name: ClassVar[str]
    withholds: ClassVar[bool] = False
    keeps_values: ClassVar[bool] = (
        False  # whether what it shares is the true gradient wherever it is not withheld
    )
    noise: Noise | None = None
    _records = False

    def __call__(self, gmap: GradientMap, generator: torch.Generator | None = None) -> Tensors:
        """What a client shares in place of its gradient.

        Args:
            gmap: The client's gradient map.
            generator: Source of all randomness, on the input's device. Default: a fresh one from
                the system's entropy.

        Returns:
            One finite tensor a shared parameter, in the parameters' shapes and types.

        Raises:
            FloatingPointError: If a true or a protected gradient is not finite. Names the
                parameter.
        """
        generator = generator or private_generator(gmap.input.device)
        shared = self.protect(gmap, generator)
        check_finite(
            shared,
            f"{self.name} made the gradient of {{}} not finite. Weaken its settings: {self}.",
        )
        return shared

    def protect(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        """The defense itself. Implemented by subclasses."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load or make what the defense needs for this model and its tokenizer or image processor.
        Called once.
        """

    @property
    def adds_gaussian_noise(self) -> bool:
        """Whether what is shared has a Fisher information: Gaussian noise of known covariance on
        the true gradient.
        """
        return False

    def record_noise(self, on: bool) -> None:
        """Whether calls from now on leave the Gaussian noise that they add in `noise`: two
        gradients' worth of memory.
        """
        self._records, self.noise = on, None

    @property
    def needs_jacobian(self) -> bool:
        """Whether the next call differentiates twice, so that its map needs `second_order=True`."""
        return False

    def state_dict(self) -> Tensors:
        """What the defense remembers between calls. Private to the client: it depends on its
        data.
        """
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{self.name} keeps no state, but got {sorted(state)[:3]}.")

    def settings(self) -> dict[str, Any]:
        """The settings that differ from unset, for cards and logs."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in named if value is not None}


@dataclass
class SensitivityDefense(Defense):
    """A defense that weighs every parameter by its sensitivity s_i = ‖∂g_i/∂x‖.

    Args:
        num_probes: Random directions to estimate s_i² from; relative variance 2/num_probes.
        granularity: `"parameter"`, or `"layer"`: one s and one |g| a tensor, their norms over it.
        refresh_every: Estimate anew at every n-th call and reuse in between. The reused values
            belong to an earlier batch: protection is then optimal for that one, and cheaper by
                nearly n.
        probe_chunk: Probes that run at once; bounds memory, see `GradientMap.squared_sensitivity`.
    """

    num_probes: int = 10
    granularity: Granularity = "parameter"
    refresh_every: int = 1
    probe_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("num_probes", "refresh_every", "probe_chunk"):
            check_whole(name, getattr(self, name), 1)
        if self.granularity not in ("parameter", "layer"):
            raise ValueError(
                f"granularity must be 'parameter' or 'layer', but is {self.granularity!r}."
            )
        self._squares: Tensors = {}
        self._calls_left = 0
        self._fresh: Tensors | None = (
            None  # while noise is recorded: estimates that were made for this very batch
        )

    @property
    def needs_jacobian(self) -> bool:
        return self._calls_left == 0

    def sensitivity(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        """s_i for every shared parameter, estimated now or at most `refresh_every - 1` calls ago.

        Coordinates of the gradient that are not zero never count as insensitive by accident: where
        an estimate on this very batch underflowed they have the smallest s there is, and where an
        earlier batch did not reach them (other positions, another dropout mask) the root mean
        square of their tensor's, or of all.
        """
        if self._calls_left == 0 or self._squares.keys() != gmap.parameters.keys():
            self._calls_left = 0
            squares = gmap.squared_sensitivity(self.num_probes, generator, self.probe_chunk)
            check_finite(
                squares,
                "The sensitivity of {} is not finite: the loss has no second derivative there.",
            )
            self._squares, self._calls_left = squares, self.refresh_every
        fresh = self._calls_left == self.refresh_every
        self._calls_left -= 1
        squares = gmap.restrict(self._squares)
        self._fresh = squares if fresh and self._records else None
        if not self._calls_left:
            self._squares = {}
        squares = {
            name: squares[name] for name in gmap.parameters
        }  # a loaded state has an order of its own
        return {
            name: square.sqrt() for name, square in _filled(squares, gmap.gradient(), fresh).items()
        }

    def record_noise(self, on: bool) -> None:
        super().record_noise(on)
        self._fresh = None

    def at_granularity(self, tensors: Tensors) -> Tensors:
        """Magnitudes entry by entry, or with granularity "layer" each tensor's norm in all its
        entries.
        """
        if self.granularity == "layer":
            return {name: tensor.norm().expand_as(tensor) for name, tensor in tensors.items()}
        return {name: tensor.abs() for name, tensor in tensors.items()}

    def state_dict(self) -> Tensors:
        if not self._squares:
            return {}
        return {"calls_left": torch.tensor(self._calls_left)} | {
            f"squares.{n}": t for n, t in self._squares.items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        state = dict(state)
        self._calls_left = int(state.pop("calls_left", torch.tensor(0)))
        self._squares = {name.removeprefix("squares."): tensor for name, tensor in state.items()}


def _filled(squares: Tensors, gradient: Tensors, fresh: bool) -> Tensors:
    overall = total(squares) / sum(square.numel() for square in squares.values())
    if not overall:
        return squares
    filled = {}
    for name, square in squares.items():
        least = (
            torch.finfo(square.dtype).tiny
            if fresh
            else square.mean()
            if square.any()
            else overall.to(square.dtype)
        )
        filled[name] = torch.where((square == 0) & (gradient[name] != 0), least, square)
    return filled


def true_gradient(gmap: GradientMap) -> Tensors:
    """g, checked to be finite and in at least float32."""
    gradient = gmap.gradient()
    check_finite(
        gradient,
        "The gradient of {} is not finite, so nothing was shared. Look for labels out of range, an "
        "overflow in the loss (in half precision use bf16), or a learning rate that made the "
        "weights diverge.",
    )
    return {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in gradient.items()}


def floor_share(ratio: float, count: int) -> int:
    """floor(ratio · count), through the decimal that was written: 0.29 * 100 is 28.999… in
    binary.
    """
    return int(Decimal(str(ratio)) * count)


def check_finite(tensors: Tensors, message: str) -> None:
    """Raise `FloatingPointError(message)` with the first name whose tensor holds NaN or
    infinity.
    """
    # A sum with NaN or infinity in it is neither finite: one fast pass, and a closer look only
    # where a sum is not.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    if torch.isfinite(sums).all():
        return
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise FloatingPointError(message.format(name))


def cast_like(shared: Tensors, gmap: GradientMap) -> Tensors:
    """`shared` in the types of the gradient that it stands for."""
    return {name: tensor.to(gmap.gradient()[name].dtype) for name, tensor in shared.items()}


def total(tensors: Tensors) -> Tensor:
    """The sum over all entries of all tensors, tensors added up in float64."""
    return torch.stack([tensor.sum().double() for tensor in tensors.values()]).sum()


def norm(tensors: Tensors) -> float:
    """The Euclidean norm over all entries of all tensors."""
    return float(total({name: tensor.square() for name, tensor in tensors.items()}).sqrt())


def is_number(value: object) -> bool:
    """Whether a setting is a finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise `ValueError` unless a setting is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")
