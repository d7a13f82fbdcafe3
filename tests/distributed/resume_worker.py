"""A run that is killed, the same run resumed, and the same run left alone."""

from __future__ import annotations

import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from cases import make_model, rows
from launcher import begin, finish, refusal
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.checkpoints.private_state import saved_record

SAVED, STEPS = (
    3,
    7,
)  # 5 steps an epoch: the checkpoint is within the first, the run ends within the second


class Slow(TrainerCallback):
    """After the checkpoint, says which step is done and takes its time, so that there is time for a
    kill.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > SAVED:
            (self.folder / f"step{state.global_step}.rank{args.process_index}").touch()
            time.sleep(5)


def train(
    folder: Path,
    checkpoint: Path | bool | None = None,
    callbacks: Any = None,
    accountant: FisherAccountant | None = None,
) -> dict[str, Tensor]:
    """The final weights. Averages are fed at every fourth message, and the checkpoint comes after
    six.
    """
    args = GradGuardConfig(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVED, per_device_train_batch_size=4,
        learning_rate=1e-2, gradient_accumulation_steps=2, use_cpu=True, report_to="none",
        disable_tqdm=True, logging_steps=1, defense="optimal_noise",
        defense_kwargs={"shape": "past", "refresh_every": 4}, clients_per_process=2, noise_seed=3,
    )  # fmt: skip
    model = make_model("bert", dropout=0.1)
    trainer = GradGuardTrainer(
        model, args, train_dataset=rows("bert"), callbacks=callbacks, accountant=accountant
    )
    trainer.train(
        resume_from_checkpoint=str(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    )
    assert trainer.state.global_step == STEPS
    return {name: p.detach() for name, p in model.named_parameters()}


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], two[name])]


class Warnings(logging.Handler):
    """Keeps this package's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("hf_gradguard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main() -> None:
    folder, arguments = begin()
    if not arguments:
        train(folder / "killed", callbacks=[Slow(folder)], accountant=FisherAccountant())
        finish(folder, {})
        return
    checkpoint, of_one_rank = map(Path, arguments)
    whole, continued = FisherAccountant(), FisherAccountant()
    left_alone = train(folder / "left_alone", accountant=whole)
    resumed = train(folder / "resumed", checkpoint, accountant=continued)
    rank = torch.distributed.get_rank()
    # Then the first checkpoint is the newest that is complete.
    for later in (folder / "left_alone").glob("checkpoint-*"):
        if later.name != checkpoint.name:
            (later / "model.safetensors").unlink(missing_ok=True)
    found = train(folder / "left_alone", True, accountant=FisherAccountant())
    # Without what the defenses remember, as a control: they estimate anew, and the noise has
    # another shape.
    forgetful = Path(
        shutil.copytree(
            checkpoint, folder / f"forgetful{torch.distributed.get_rank()}" / checkpoint.name
        )
    )
    for file in forgetful.glob("gradguard_private_*"):
        file.unlink()
    forgot = train(folder / "forgot", forgetful)
    warnings = Warnings()
    grown = train(folder / "grown", of_one_rank)
    record = saved_record(str(folder / "resumed" / f"checkpoint-{2 * SAVED}"), rank)
    assert record is not None
    assert record.shared is not None
    results = {
        "messages": list(record.shared["messages"].values()),
        "moved": len(differing(left_alone, dict(make_model("bert").named_parameters()))),
        "resumed": differing(resumed, left_alone),
        "found": differing(found, left_alone),
        "accounted": [
            len(whole),
            whole.steps,
            sum(0 < whole.dfil(key) < math.inf for key in whole),
        ],
        "repeated": continued.steps - whole.steps,
        "fewer": [key for key in whole if continued.dfil(key) < whole.dfil(key)],
        "forgot": differing(forgot, left_alone),
        "unaccounted": refusal(
            lambda: train(folder / "unaccounted", forgetful, accountant=FisherAccountant()),
            ValueError,
        ),
        "grown": [float(weight.double().sum()) for weight in grown.values()],
        "warnings": warnings.messages,
    }
    finish(folder, results)


if __name__ == "__main__":
    main()
