"""A gradient or an update that is there already, of which nobody has the data any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from .map import GradientMap, Tensors


class Given(GradientMap):
    """What a defense sees of tensors that somebody else computed: their values, and nothing of the
    data behind them.

    Defenses of values work on it (noise of one size, clipping, pruning by size, quantization). What
    asks for the data, as sensitivities do, is refused.

    Args:
        tensors: By name.

    Example:
        >>> given = Given({"w": torch.tensor([3.0, 0.1])})
        >>> make_defense("pruning", ratio=0.5)(given)["w"]
        tensor([3., 0.])
        >>> make_defense("optimal_noise")(given)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: This defense asks for the client's data...
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._gradient = dict(tensors)
        self.model: Any = _Unknown()
        self.replay: Any = _Unknown()

    def gradient(self) -> Tensors:
        return dict(self._gradient or {})

    def versions(self) -> dict[str, int]:
        return {f"the update of {name!r}": t._version for name, t in self.gradient().items()}

    @property
    def undefended(self) -> GradientMap:
        _refuse("undefended")

    @property
    def input(self) -> Tensor:
        _refuse("input")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)


class _Unknown:
    """In the place of a model that is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"This defense asks for the client's data ({what}), and here only the outcome of its "
        "training is known. Take gaussian_noise, dp_sgd, pruning or quantization, or protect "
        "where the data is, by protect_update."
    )
