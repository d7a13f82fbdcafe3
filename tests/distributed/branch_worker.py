"""Begins to go on with a run of which one rank's account has a record more than the other's, as
after a kill, and writes what each rank decides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from cases import rows
from correlated_worker import ROWS, trainer
from launcher import begin, finish

from hf_gradguard import make_defense

TARGET, DELTA = 6.0, 1e-5


def main() -> None:
    folder, _ = begin()
    training = trainer(folder, rows("bert", ROWS))
    training.create_optimizer_and_scheduler(6)
    correlated = training.private_rows
    correlated.defense = make_defense(
        "dp_sgd", per_sample=True, correlated=True, target_epsilon=TARGET, delta=DELTA
    )
    rank, args = training.args.process_index, training.args
    plan = correlated._new_plan(6)
    # What was spent leaves room for one transcript more where the record is missing, and none here.
    correlated.account.add(plan.noise_multiplier, 1.0, 1 + (rank == 0))
    correlated._transcript, correlated._saved_position, correlated._is_branch = plan, 3, True
    plan.position, plan.is_counted = 3, True
    state: Any = SimpleNamespace(max_steps=6, global_step=3)
    correlated.defense.target_epsilon = 1.01 * correlated._epsilon_with(
        plan.noise_multiplier, 1.0, 1 - (rank == 0), DELTA
    )
    outcome = "goes on"
    try:
        correlated.on_train_begin(
            args, state, model=training.model, optimizer=training.optimizer,
            lr_scheduler=training.lr_scheduler,
        )  # fmt: skip
    except ValueError as error:
        outcome = str(error)
    torch.distributed.barrier()
    finish(folder, {"outcome": outcome})


if __name__ == "__main__":
    main()
