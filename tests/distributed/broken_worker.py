"""Rank 1 breaks its second step: its pixels are not numbers, or its defense writes in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import recording
import torch
from cases import IN_ORDER, make_model, rows
from exchange_worker import Switch, settings
from launcher import begin, finish
from torch import Tensor

from hf_gradguard import DEFENSES, GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream

BROKEN_SAMPLE = 13  # of the fourth batch, rank 1's second


@dataclass
class InPlace(Defense):
    """Adds noise to the gradient itself, at the second call on rank 1."""

    name: ClassVar[str] = "in_place"
    calls: ClassVar[int] = 0

    def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
        gradient = gmap.gradient()
        InPlace.calls += 1
        if InPlace.calls == 2 and torch.distributed.get_rank() == 1:
            for tensor in gradient.values():
                tensor += generator.normal(tensor.shape)
        return gradient


def main() -> None:
    folder, (defense,) = begin()
    group = recording.initialize()
    group.journal = folder / f"journal{group.rank()}"
    data = rows("vit")
    if defense == InPlace.name:
        DEFENSES[InPlace.name] = InPlace
    else:
        data[BROKEN_SAMPLE]["pixel_values"] = torch.full_like(
            data[BROKEN_SAMPLE]["pixel_values"], torch.nan
        )
    args = GradGuardConfig(**settings(folder, **IN_ORDER, gradient_accumulation_steps=1))
    model = make_model("vit")
    GradGuardTrainer(
        model, args, defense=defense, train_dataset=data, callbacks=[Switch(group)]
    ).train()
    finish(folder, {})


if __name__ == "__main__":
    main()
