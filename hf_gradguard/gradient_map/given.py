"""A gradient or an update that is there already, of which nobody has the data any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
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

    _why = (
        "here only the outcome of its training is known. Take gaussian_noise, dp_sgd, pruning or "
        "quantization, or protect where the data is, by protect_update"
    )

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._gradient = dict(tensors)
        self.model: Any = _Unknown(self._why)
        self.replay: Any = _Unknown(self._why)

    def gradient(self) -> Tensors:
        return dict(self._gradient or {})

    def versions(self) -> dict[str, int]:
        return {f"the update of {name!r}": t._version for name, t in self.gradient().items()}

    @property
    def undefended(self) -> GradientMap:
        _refuse("undefended", self._why)

    @property
    def input(self) -> Tensor:
        _refuse("input", self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name, self._why)


class Nothing(Given):
    """A batch in which nothing counts: a gradient of zeros, and no data behind it.

    Args:
        parameters: The shared ones, by name.

    Example:
        >>> alone = Nothing({"w": torch.ones(1000)})
        >>> 0.4 < float(make_defense("gaussian_noise", scale=0.5)(alone)["w"].std()) < 0.6
        True
    """

    _why = (
        "a batch in which nothing counts has none. Let its `protect` do without, or filter rows "
        "without labels"
    )

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__({name: torch.zeros_like(p.detach()) for name, p in parameters.items()})


class _Unknown:
    """In the place of a model that is not there."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name, self._why)


def _refuse(what: str, why: str) -> NoReturn:
    raise RuntimeError(f"This defense asks for the client's data ({what}), and {why}.")
