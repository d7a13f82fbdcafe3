"""One defense after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..gradient_map import GradientMap, Tensors
from .base import Defense, Noise


@dataclass
class Chain(Defense):
    """Applies `second` to what `first` would share."""

    name: ClassVar[str] = "chain"
    first: Defense
    second: Defense

    def protect(self, gmap: GradientMap, generator: torch.Generator) -> Tensors:
        shared = self.first(gmap, generator)
        withheld = (
            {name: tensor == 0 for name, tensor in shared.items()} if self.first.withholds else None
        )
        return self.second(gmap.after(shared, withheld), generator)

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        for part in (self.first, self.second):
            part.prepare(model, processing_class)

    @property
    def withholds(self) -> bool:  # type: ignore[override]
        return self.first.withholds or self.second.withholds

    @property
    def keeps_values(self) -> bool:  # type: ignore[override]
        return self.first.keeps_values and self.second.keeps_values

    @property
    def adds_gaussian_noise(self) -> bool:
        return self.first.adds_gaussian_noise or (
            self.first.keeps_values and self.second.adds_gaussian_noise
        )

    def record_noise(self, on: bool) -> None:
        for part in (self.first, self.second):
            part.record_noise(on)

    @property
    def noise(self) -> Noise | None:  # type: ignore[override]
        """Of the first part that adds any: what comes after only processes what that one
        released.
        """
        return self.second.noise if self.first.keeps_values else self.first.noise

    @property
    def needs_jacobian(self) -> bool:
        return self.first.needs_jacobian or self.second.needs_jacobian

    def state_dict(self) -> Tensors:
        return {
            f"{part}.{k}": v
            for part in ("first", "second")
            for k, v in getattr(self, part).state_dict().items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        for part in ("first", "second"):
            prefix = f"{part}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            getattr(self, part).load_state_dict(own)


def chain(*defenses: Defense) -> Defense:
    """One defense after the other, each applied to what the ones before it would share.

    Noise after pruning falls only on the coordinates that pruning left.

    Raises:
        ValueError: If no defense is given.

    Example:
        >>> chain(make_defense("optimal_pruning", ratio=0.8), make_defense("optimal_noise", relative_scale=0.5))
    """
    if not defenses:
        raise ValueError("chain needs at least one defense.")
    *head, last = defenses
    return Chain(chain(*head), last) if head else last
