"""Rank 1 meets pixels that are not numbers in its second step."""

from __future__ import annotations

import recording
import torch
from cases import IN_ORDER, make_model, rows
from exchange_worker import Switch, settings
from launcher import begin, finish

from hf_gradguard import GradGuardConfig, GradGuardTrainer

BROKEN_SAMPLE = 13  # of the fourth batch, rank 1's second


def main() -> None:
    folder, (defense,) = begin()
    group = recording.initialize()
    group.journal = folder / f"journal{group.rank()}"
    data = rows("vit")
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
