"""What a defense is: a function from a gradient map to what is shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.devices import devices
from ..gradient_map.law import Law
from ..randomness import Stream, together
from .knowledge import informed_settings, law_of
from .message import Message, check_untouched, checked_message


class Defense:
    """Base of all defenses. A subclass is a dataclass of its settings with one method, `protect`.

    A defense is pure: it touches neither the model nor `.grad`, and all its randomness comes from
    `generator`. What it remembers between calls is in `state_dict`, and is one client's: each
    client has a copy of its own. `hf_gradguard.testing.check_defense` checks all of this.

    Example:
        >>> message = make_defense("gaussian_noise", relative_scale=0.1)(gmap)
        >>> message.keys() == gmap.gradient().keys()
        True
    """

    name: ClassVar[str]
    first_order: ClassVar[bool] = False  # asks for the gradient alone, so takes any batch
    sharded: ClassVar[bool] = False  # takes a whole gradient's figures from this file's functions
    refused: ClassVar[dict[str, str]] = {
        "error_feedback": (
            "it shares the true gradient, or that with independent noise, which averages out over "
            "messages by itself. Fed back, each message would take back the noise of the one "
            "before, and their sum would show the sum of the gradients"
        )
    }
    """Settings that it has for a reason not."""

    def __call__(self, gmap: GradientMap, generator: Stream | None = None) -> Message:
        """What a client shares in place of its gradient.

        Args:
            gmap: The client's gradient map.
            generator: Source of all randomness. Default: a new one, with a key from the operating
                system.

        Returns:
            One finite tensor per shared parameter, in the parameters' shapes and types.

        Raises:
            FloatingPointError: If a true or a protected gradient is not finite. Names the
                parameter.
            TypeError: If what the defense made is no mapping of tensors, or for a
                `torch.Generator`, whose numbers can be predicted.
            ValueError: If a name is missing or unknown, or a shape, type or device differs.
            RuntimeError: If the defense wrote to what belongs to the map or the model.
        """
        if isinstance(generator, torch.Generator):
            raise TypeError(
                f"{self.name} takes no torch.Generator: whoever sees one message can compute its "
                "state, and with it all the noise. Leave generator out, or pass a "
                "hf_gradguard.randomness.Stream; in tests Stream.from_seeds(1)."
            )
        generator = generator or Stream()
        before = gmap.versions()
        message = checked_message(self.name, self.protect(gmap, generator), gmap)
        check_untouched(self.name, before, gmap.versions())
        check_finite(
            message,
            f"{self.name} made the gradient of {{}} not finite. Weaken its settings: {self}.",
        )
        return message if devices().size == 1 else message.of_part()

    def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
        """The defense itself. Implemented by subclasses: a `Message`, or a plain mapping if there
        is nothing to say of it.
        """
        raise NotImplementedError

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load or make what the defense needs for this model and its tokenizer or image processor.
        Called before training, and again for every other model.
        """

    def at_step(self, step: int) -> None:
        """Told before a message, by who counts them, how many optimizer steps are finished."""

    @property
    def adds_gaussian_noise(self) -> bool:
        """Whether its messages carry `noise`: Gaussian noise of known covariance on the true
        gradient.
        """
        return False

    @property
    def noise_ratio(self) -> float | None:
        """The noise's norm over that of the gradient it is added to; `None` if settings do not say
        it.
        """
        return 0.0

    @property
    def exact(self) -> bool:
        """Whether its messages are `exact`: the true gradient wherever anything is transmitted."""
        return False

    @property
    def held(self) -> int:
        """How many of a client's first messages are empty."""
        return 0

    @property
    def needs_jacobian(self) -> bool:
        """Whether the next call differentiates twice, so that its map needs `second_order=True`."""
        return False

    @property
    def needs_input(self) -> bool:
        """Whether a call asks for the continuous input, or how the gradient depends on it. A
        subclass does, unless it says that it is of first order itself.
        """
        return not vars(type(self)).get("first_order", False)

    @property
    def needs_samples(self) -> bool:
        """Whether a call asks for what each sample adds to the gradient."""
        return False

    @property
    def only_processes(self) -> bool:
        """Whether it asks nothing of a client but the gradient it is given, so that noise in that
        bounds what its messages tell.
        """
        return not (self.needs_input or self.needs_samples)

    def check_sharded(self) -> None:
        """Refuse a client of several devices, each of which has a part of the gradient. A subclass
        is refused, unless it says that it is `sharded` itself.

        Raises:
            NotImplementedError: With the reason and the way out.
        """
        if not vars(type(self)).get("sharded", False):
            raise NotImplementedError(
                f"{type(self).__name__} ({self.name}) does not protect a sharded model: it asks "
                "for second derivatives or for a whole gradient, which no device holds, or does "
                "not say that it asks for neither (sharded = True in its class). Use "
                "gaussian_noise, laplace_noise, optimal_noise, dp_sgd, optimal_dp_sgd, pruning, "
                "optimal_pruning or quantization, or give each rank the whole model."
            )

    def law(self, message: Message) -> Law | None:
        """How its messages come from gradients, as whoever knows it and its settings knows it: what
        audits grant informed attackers. `None` where no attacker can follow it.

        Args:
            message: One of its own.
        """
        return law_of(self, message)

    def informed(self) -> dict[str, Any]:
        """What attackers who know it do about it: settings, of which each attack takes those that
        it has, and grants by the names of an observation's fields. Empty where knowing it is of no
        use.
        """
        return informed_settings(self)

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


def check_finite(tensors: Mapping[str, Tensor], message: str) -> None:
    """Raise `FloatingPointError(message)` with the first name whose tensor holds NaN or
    infinity.
    """
    # A sum with NaN or infinity in it is neither finite: one fast pass, and a closer look only
    # where a sum is not.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    if not devices().any(not torch.isfinite(sums).all()):
        return
    broken = {name: ~torch.isfinite(tensor).all() for name, tensor in tensors.items()}
    for name, found in devices().each(broken, "max").items():
        if found:
            raise FloatingPointError(message.format(name))


def cast_like(shared: Tensors, gmap: GradientMap) -> Tensors:
    """`shared` in the types of the gradient that it stands for."""
    gradient = gmap.gradient()
    return {name: tensor.to(gradient[name].dtype) for name, tensor in shared.items()}


class OnDemand(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, anew each time, so that none are kept.

    Args:
        names: Of all of them.
        make: Gives the tensor of a name; whoever asks may write to it.
        total: The sum of all their entries, if that is known.
    """

    def __init__(
        self, names: Iterable[str], make: Callable[[str], Tensor], total: float | None = None
    ) -> None:
        self._names, self._make, self.total = dict.fromkeys(names), make, total

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def total(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sum over all entries of all tensors, tensors added up in float64."""
    known = getattr(tensors, "total", None)
    if known is not None:
        return torch.tensor(known, dtype=torch.float64)
    return devices().total({name: tensor.sum().double() for name, tensor in tensors.items()})


def count(tensors: Mapping[str, Tensor]) -> int:
    """How many entries all tensors have."""
    return int(devices().total({name: torch.tensor(t.numel()) for name, t in tensors.items()}))


def power(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sum of squares, likewise."""
    return devices().total({name: _square_sum(tensor) for name, tensor in tensors.items()})


def _square_sum(tensor: Tensor) -> Tensor:
    """Without a tensor of squares; by rows, since norms of many entries add up in their own type,
    and round.
    """
    if tensor.dim() < 2:
        return tensor.square().sum().double()
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1).double().square().sum()


def norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm over all entries of all tensors."""
    return float(power(tensors).sqrt())


def drawn(
    tensors: Mapping[str, Tensor],
    draw: Callable[[Tensor, Stream], Tensor],
    generator: Stream,
) -> Iterator[tuple[str, Tensor]]:
    """Random tensors in the shapes of those given: on each of a client's devices others, but for
    parameters that all of them hold.

    Args:
        tensors: By name.
        draw: Gives a random tensor in the shape, type and place of the one that it gets, whose
            entries are independent of each other.
        generator: This device's.
    """
    for some, stream in devices().streams(tensors, generator):
        yield from together(some, lambda like, stream=stream: draw(like, stream))  # type: ignore[misc]


def scaled(tensor: Tensor, factor: float, offset: float = 0.0) -> Tensor:
    """`factor * tensor + offset`, in place where that is possible, and one number for one."""
    if tensor.numel() and not any(tensor.stride()):
        return (tensor[(0,) * tensor.dim()] * factor + offset).expand_as(tensor)
    return tensor.mul_(factor).add_(offset) if offset else tensor.mul_(factor)


def root(variances: Mapping[str, Tensor], name: str) -> Tensor:
    """Standard deviations of variances, one number for one, in place where those were just made."""
    variance = variances[name]
    if variance.numel() and not any(variance.stride()):
        return variance[(0,) * variance.dim()].sqrt().expand_as(variance)
    return variance.sqrt_() if isinstance(variances, OnDemand) else variance.sqrt()


def is_number(value: object) -> bool:
    """Whether a setting is a finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_range(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Raise `ValueError` unless a setting is a number from `low`, or `above` it, to `high`."""
    if not is_number(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low}" if above else f"at least {low}"
        most = f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name} must be a finite number {least}{most}, but is {value!r}.")


def check_whole(name: str, value: object, least: int) -> None:
    """Raise `ValueError` unless a setting is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")
