"""Messages: what a client shares, tensors by name, with what is true of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.inputs import NOT_FINITE
from ..gradient_map.types import How, Shards


class Noise(NamedTuple):
    """The Gaussian noise that a message carries, as seen from the undefended gradient.

    Args:
        variance: The diagonal Σ that noise on the undefended gradient would need in order to hide
            its input as well, or less well: infinite where the coordinate was not shared, or was
            clipped to a constant.
        added: The diagonal covariance of what was added to what is shared: 0 where nothing was.
            `None` if that is not known, because something came after the noise that changed it.
        shape_trace: The trace of the Fisher information about the batch's input that lies in Σ
            itself, ½ Σ_i ‖∂ log Σ_ii/∂x‖²: 0 where Σ's shape is no function of the batch.
        plain: Whether it was added to all of the gradient, unclipped, with a covariance that does
            not follow the gradient entry by entry. Where there was Gaussian noise before, the
            covariances then add up.

    Example:
        >>> noise = make_defense("gaussian_noise", scale=0.1)(gmap).noise
        >>> bool(torch.isclose(noise.added["classifier.bias"], torch.tensor(0.01)).all())
        True
    """

    variance: Tensors
    added: Tensors | None
    shape_trace: float = 0.0
    plain: bool = False


class Message(dict[str, Tensor]):
    """The message of a client: one tensor per shared parameter, by name, in place of its gradient.

    It also says what is true of it, so that nobody has to estimate it again.

    Args:
        tensors: Tensors in the parameters' names, shapes and types.
        noise: The Gaussian noise that it carries, if it has a Fisher information: noise of known
            covariance on the true gradient; or a function that finds it when it is first asked for.
            `None` otherwise.
        transmitted: Masks of the entries that were transmitted; the others are zero and carry
            nothing. `None`: all but what turned to zero.
        exact: Whether the transmitted entries are the true gradient's, unchanged.
        has_residual: Whether what the client's earlier messages left out is in it.
        metrics: Further figures of this message, by name; the Trainer logs each as
            `defense/<name>`. They stay on the rank.

    Example:
        >>> message = make_defense("pruning", ratio=0.9)(gmap)
        >>> message.exact, message.noise
        (True, None)
        >>> shared = sum(int(mask.sum()) for mask in message.transmitted.values())
        >>> shared <= sum(tensor.numel() for tensor in message.values())
        True
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        noise: Noise | Callable[[], Noise | None] | None = None,
        transmitted: Mapping[str, Tensor] | None = None,
        exact: bool = False,
        has_residual: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(tensors)
        self._noise = noise
        self.transmitted, self.exact, self.has_residual = transmitted, exact, has_residual
        self.metrics = dict(metrics or {})

    @property
    def noise(self) -> Noise | None:
        """The Gaussian noise that it carries, or `None`."""
        if callable(self._noise):
            self._noise = self._noise()
        return self._noise

    def of_part(self) -> Message:
        """Return the message as one device's shard of it; what is said of noise is of the whole."""
        return Message(
            self, transmitted=self.transmitted, exact=self.exact, has_residual=self.has_residual,
            metrics=self.metrics,
        )  # fmt: skip

    def __repr__(self) -> str:
        facts = f"noise={self._noise is not None}, exact={self.exact}"
        return f"Message({len(self)} tensors, {facts})"


def nothing_of(gmap: GradientMap) -> Message:
    """Return an empty message: zeros, of which none was transmitted."""
    zeros = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    none = {name: torch.zeros_like(g, dtype=torch.bool) for name, g in zeros.items()}
    return Message(zeros, transmitted=none, exact=True)


def check_message(name: str, message: object, gmap: GradientMap) -> Message:
    """Return the message that a defense made, if it is what its contract promises.

    Args:
        name: The name of the defense, for errors.
        message: What `protect` returned. A plain mapping is a message that says nothing of itself.
        gmap: The map that it was made from.

    Raises:
        TypeError: If it is no mapping of tensors.
        ValueError: If names are missing or unknown, or shapes, types or devices are not the
            gradient's; the message names the tensor.
        FloatingPointError: If there is NaN or infinity; the message names the tensor.
    """
    form = gmap.form()
    if not isinstance(message, Mapping) or message.keys() != form.keys():
        raise _wrong_names(name, message, form)
    for key, g in form.items():
        tensor = message[key]
        if not isinstance(tensor, Tensor) or tensor.requires_grad or _kind(tensor) != _kind(g):
            raise _wrong_tensor(name, key, tensor, g)
    if not isinstance(message, Message):
        message = Message(message)
    for key, mask in (message.transmitted or {}).items():
        if key not in form or mask.dtype != torch.bool or mask.shape != form[key].shape:
            raise ValueError(f"{name} says nothing usable of what it transmitted of {key!r}.")
    return message


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _wrong_names(name: str, message: object, gradient: Tensors) -> Exception:
    if not isinstance(message, Mapping):
        return TypeError(
            f"{name} must return a mapping of one tensor per shared parameter, but returned a "
            f"{type(message).__name__}."
        )
    if missing := [key for key in gradient if key not in message]:
        return ValueError(
            f"{name} shared nothing for {missing[0]!r} ({len(missing)} missing). To withhold a "
            "tensor share zeros, and say so in Message.transmitted."
        )
    unknown = next(key for key in message if key not in gradient)
    return ValueError(f"{name} shared {unknown!r}, which is no shared parameter.")


def _wrong_tensor(name: str, key: str, tensor: object, g: Tensor) -> Exception:
    if not isinstance(tensor, Tensor):
        return TypeError(f"{name} shared a {type(tensor).__name__} for {key!r}, and no tensor.")
    if tensor.requires_grad:
        return ValueError(
            f"{name} shared a tensor for {key!r} that holds its graph. Compute it under "
            "torch.no_grad(), or detach it."
        )
    attribute, shared, expected = next(
        difference
        for difference in (
            ("shape", tuple(tensor.shape), tuple(g.shape)),
            ("type", tensor.dtype, g.dtype),
            ("device", tensor.device, g.device),
        )
        if difference[1] != difference[2]
    )
    return ValueError(
        f"{name} shared {key!r} with {attribute} {shared}, where the gradient has {expected}."
    )


def effect(
    name: str, versions_before: Mapping[str, int], versions_after: Mapping[str, int]
) -> RuntimeError:
    """Return the error for a defense that wrote to what belongs to a map or its model.

    Args:
        name: The name of the defense.
        versions_before: `GradientMap.versions()` before its call.
        versions_after: `GradientMap.versions()` after it, where something differs.
    """
    for tensor, version in versions_after.items():
        if tensor in versions_before and versions_before[tensor] != version:
            return RuntimeError(
                f"{name} wrote to {tensor} in place, so nothing was shared: it was to read it "
                "only. Compute new tensors."
            )
    tensor = next(iter(versions_before.keys() ^ versions_after.keys()))
    verb = "made" if tensor in versions_after else "removed"
    return RuntimeError(f"{name} {verb} {tensor}, so nothing was shared: a defense has no effects.")


def true_gradient(gmap: GradientMap) -> Tensors:
    """Return g in at least float32.

    Raises:
        FloatingPointError: If it is not finite.
    """
    return wide(finite_gradient(gmap))


def wide(tensors: Tensors) -> Tensors:
    """Return tensors in at least float32."""
    return {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in tensors.items()}


def finite_gradient(gmap: GradientMap) -> Tensors:
    """Return g.

    Raises:
        FloatingPointError: If it is not finite; the message names the parameter.
    """
    gradient = gmap.gradient()
    if name := first_not_finite(gradient, gmap.shards):
        raise FloatingPointError(NOT_FINITE.format(name=name))
    return gradient


def first_not_finite(tensors: Mapping[str, Tensor], shards: Shards | None) -> str | None:
    """Return the first name whose tensor holds NaN or infinity, or `None`."""
    # A sum with NaN or infinity in it is neither finite: one fast pass, and a closer look only
    # where a sum is not.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    is_finite = bool(torch.isfinite(sums).all())
    if is_finite if shards is None else not shards.any(not is_finite):
        return None
    broken = {name: ~torch.isfinite(tensor).all() for name, tensor in tensors.items()}
    broken = of_whole(broken, shards, "max")
    return next((name for name, is_broken in broken.items() if is_broken), None)


def cast_like(shared: Tensors, gmap: GradientMap) -> Tensors:
    """Return `shared` in the types of the gradient that it stands for."""
    form = gmap.form()
    return {name: tensor.to(form[name].dtype) for name, tensor in shared.items()}


class OnDemand(Mapping[str, Tensor]):
    """A mapping whose tensors are made each time they are asked for, so that none are kept.

    Args:
        names: The names of all tensors.
        make: A function that makes the tensor of a name; whoever asks may write to it.
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


def of_whole(
    numbers: Mapping[str, Tensor], shards: Shards | None, how: How = "sum"
) -> dict[str, Tensor]:
    """Return numbers of whole parameters, given those of this device's shards of them."""
    return dict(numbers) if shards is None else shards.joined(numbers, how)


def add_up(numbers: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum of one number per parameter, over all shards."""
    return torch.stack(list(of_whole(numbers, shards).values())).sum()


def total(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum over all entries of all tensors, tensors added up in float64."""
    known_total = getattr(tensors, "total", None)
    if known_total is not None:
        return torch.tensor(known_total, dtype=torch.float64)
    return add_up({name: _sum(tensor) for name, tensor in tensors.items()}, shards)


def count(tensors: Mapping[str, Tensor], shards: Shards | None) -> int:
    """Return how many entries all tensors have."""
    return int(add_up({name: torch.tensor(t.numel()) for name, t in tensors.items()}, shards))


def power(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum of squares over all entries of all tensors."""
    return add_up({name: _square_sum(tensor) for name, tensor in tensors.items()}, shards)


def _sum(tensor: Tensor) -> Tensor:
    if (number := single_number(tensor)) is not None:
        return number.double() * tensor.numel()
    return tensor.sum().double()


def _square_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's squares without a tensor of squares.

    The norm is taken row by row, because the norm of many entries adds up in the tensor's own type,
    and rounds.
    """
    if (number := single_number(tensor)) is not None:
        return number.double().square() * tensor.numel()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.dim() < 2:
        return tensor.to(wide).square().sum().double()
    rows = torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=wide)
    return rows.double().square().sum()


def single_number(tensor: Tensor) -> Tensor | None:
    """Return the number `()` that an expanded tensor holds everywhere, `None` for any other."""
    if tensor.numel() and not any(tensor.stride()):
        return tensor[(0,) * tensor.dim()]
    return None


def norm(tensors: Mapping[str, Tensor], shards: Shards | None) -> float:
    """Return the Euclidean norm over all entries of all tensors."""
    return float(power(tensors, shards).sqrt())


def scaled(tensor: Tensor, factor: float, offset: float = 0.0) -> Tensor:
    """Return `factor * tensor + offset`, in place where possible, and one number for one."""
    if (number := single_number(tensor)) is not None:
        return (number * factor + offset).expand_as(tensor)
    return tensor.mul_(factor).add_(offset) if offset else tensor.mul_(factor)


def root(variances: Mapping[str, Tensor], squares: dict[str, Tensor], name: str) -> Tensor:
    """Return standard deviations of variances, one number for one, in place where possible.

    The sum of the variances' squares is written to `squares`, so that they need not be computed
    again.
    """
    squares[name] = _square_sum(variance := variances[name])
    if (number := single_number(variance)) is not None:
        return number.sqrt().expand_as(variance)
    return variance.sqrt_() if isinstance(variances, OnDemand) else variance.sqrt()
