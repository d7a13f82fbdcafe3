"""What a client shares, with what is true of it; and the contract that every defense keeps."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import NamedTuple

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors


class Noise(NamedTuple):
    """Gaussian noise that a message carries, as seen from the undefended gradient.

    Args:
        variance: Diagonal Σ that noise on the undefended gradient would have to have to hide its
            input as well, or less well: infinite where the coordinate was not shared, or was
            clipped to a constant.
        added: Diagonal covariance of what was added to what is shared: 0 where nothing was. `None`
            if that is not known, because something came after the noise that changed it.
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


class Message(Mapping[str, Tensor]):
    """One tensor per shared parameter, by name: what a client shares in place of its gradient.

    It also says what is true of it, so that nobody has to estimate it again.

    Args:
        tensors: In the parameters' names, shapes and types.
        noise: The Gaussian noise that it carries, if it has a Fisher information: noise of known
            covariance on the true gradient; or a function that finds it when it is first asked for.
            `None` otherwise.
        transmitted: Masks of the entries that were transmitted; the others are zero and carry
            nothing. `None`: all but what turned to zero.
        exact: Whether the transmitted entries are the true gradient's, unchanged.
        has_residual: Whether what the client's earlier messages left out is in it.
        metrics: What else the defense says of this message, by name; the Trainer logs each as
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
        self._tensors, self._noise = dict(tensors), noise
        self.transmitted, self.exact, self.has_residual = transmitted, exact, has_residual
        self.metrics = dict(metrics or {})

    @property
    def noise(self) -> Noise | None:
        """The Gaussian noise that it carries."""
        if callable(self._noise):
            self._noise = self._noise()
        return self._noise

    def of_part(self) -> Message:
        """What holds of one device's part of it: what is said of noise is of the whole."""
        return Message(
            self, transmitted=self.transmitted, exact=self.exact, has_residual=self.has_residual,
            metrics=self.metrics,
        )  # fmt: skip

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def __repr__(self) -> str:
        facts = f"noise={self._noise is not None}, exact={self.exact}"
        return f"Message({len(self)} tensors, {facts})"


def nothing_of(gmap: GradientMap) -> Message:
    """An empty message: zeros, of which none was transmitted."""
    zeros = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    none = {name: torch.zeros_like(g, dtype=torch.bool) for name, g in zeros.items()}
    return Message(zeros, transmitted=none, exact=True)


def checked_message(name: str, message: object, gmap: GradientMap) -> Message:
    """What a defense returned, if it is what its contract promises.

    Args:
        name: Of the defense, for errors.
        message: What `protect` returned. A plain mapping is a message that says nothing of itself.
        gmap: The map that it was made from.

    Raises:
        TypeError: If it is no mapping of tensors.
        ValueError: For missing or unknown names, other shapes, types or devices than the
            gradient's. Names the tensor.
    """
    if not isinstance(message, Mapping):
        raise TypeError(
            f"{name} must return a mapping of one tensor per shared parameter, but returned a "
            f"{type(message).__name__}."
        )
    gradient = gmap.gradient()
    if missing := [key for key in gradient if key not in message]:
        raise ValueError(
            f"{name} shared nothing for {missing[0]!r} ({len(missing)} missing). To withhold a "
            "tensor share zeros, and say so in Message.transmitted."
        )
    if unknown := [key for key in message if key not in gradient]:
        raise ValueError(f"{name} shared {unknown[0]!r}, which is no shared parameter.")
    for key, g in gradient.items():
        _check_tensor(name, key, message[key], g)
    if not isinstance(message, Message):
        message = Message(message)
    for key, mask in (message.transmitted or {}).items():
        if key not in gradient or mask.dtype != torch.bool or mask.shape != gradient[key].shape:
            raise ValueError(f"{name} says nothing usable of what it transmitted of {key!r}.")
    return message


def _check_tensor(name: str, key: str, tensor: object, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} shared a {type(tensor).__name__} for {key!r}, and no tensor.")
    if tensor.requires_grad:
        raise ValueError(
            f"{name} shared a tensor for {key!r} that holds its graph. Compute it under "
            "torch.no_grad(), or detach it."
        )
    for what, found, wanted in (
        ("shape", tuple(tensor.shape), tuple(like.shape)),
        ("type", tensor.dtype, like.dtype),
        ("device", tensor.device, like.device),
    ):
        if found != wanted:
            raise ValueError(
                f"{name} shared {key!r} with {what} {found}, where the gradient has {wanted}."
            )


def check_untouched(name: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise if anything of a map or its model was written to.

    Raises:
        RuntimeError: Naming the tensor.
    """
    for what, version in after.items():
        if before.get(what, version) != version:
            raise RuntimeError(
                f"{name} wrote to {what} in place, so nothing was shared: it was to read it only. "
                "Compute new tensors."
            )
    if added := [what for what in after if what not in before]:
        raise RuntimeError(
            f"{name} made {added[0]}, so nothing was shared: a defense has no effects."
        )
