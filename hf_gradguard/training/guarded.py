"""A Trainer that will not go on with what nobody could have meant: batches of which nothing can be
protected, gradients that are not its own, checkpoints that were not finished.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from ..defenses import Defense
from ..gradient_map.domain import check_batch
from .batch_statistics import freeze_statistics
from .card import sharing
from .checkpoints import check_checkpoint, newest_complete
from .hooks import SeamTrainer
from .learning_rate import loaded_rates_follow, scale_learning_rate
from .ledger import Ledger
from .shared import SharedMessages


class GuardedTrainer(SeamTrainer):
    """`Trainer` whose model is never wrapped, and whose optimizer takes only gradients that
    `ledger` has been told of.

    Attributes:
        ledger: Of the gradients that may be exchanged and trained on.
        shared_messages: How many this rank has shared, and how, checkpoints included.
        defense: Of the messages.
        asks_for_input: Whether anything asks for the continuous input of a batch.

    Example:
        >>> trainer = GuardedTrainer(model)
        >>> trainer.accelerator.backward(model(**batch).loss)
        Traceback (most recent call last):
        RuntimeError: GradGuardTrainer differentiates and protects a batch by itself: ...
    """

    asks_for_input: bool = True
    defense: Defense
    _batch_statistics: str = "local"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ledger = Ledger()
        self.shared_messages = SharedMessages(lambda: sharing(self))
        super().__init__(*args, **kwargs)
        self.add_callback(self.ledger)

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`, which makes a new one for every trial of a search."""
        super().create_accelerator_and_postprocess()
        # "Evaluation mode" is Accelerate's word for preparing a model (device, autocast) without
        # wrapping it in DDP.
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )
        self.ledger.guard(self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in `Trainer`, with rates that follow the noise; see `learning_rate.py`."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        scale_learning_rate(optimizer, self.defense, self.args, made)
        return optimizer

    def loading_rates(self) -> contextlib.AbstractContextManager[None]:
        """A checkpoint has the rates of the noise that it was trained with."""
        return loaded_rates_follow(self.optimizer, self.lr_scheduler, self.defense, self.args)

    def save_state_of_rank(self, folder: str) -> None:
        """What was shared so far."""
        self.shared_messages.save(folder, self.accelerator.process_index)

    def load_state_of_rank(self, folder: str) -> None:
        """What was shared so far."""
        self.shared_messages.load(folder, self.accelerator.process_index)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """As in `Trainer`, with the defense and all arguments as they are now.

        Args:
            resume_from_checkpoint: `True` takes the newest checkpoint that is complete, and warns
                of newer ones that a killed run left behind; where there is none, training begins
                anew.
            *args: As for `Trainer`.
            **kwargs: As for `Trainer`.

        Raises:
            ValueError: If a checkpoint is named that is not complete, or a batch is none that could
                be protected.
            RuntimeError: If anything but the exchange put a gradient where the optimizer finds it.
        """
        named = str(resume_from_checkpoint)  # of a command line "True" is a text
        if named.lower() in ("true", "false") and not Path(named).exists():
            resume_from_checkpoint = named.lower() == "true"
        if resume_from_checkpoint is True:
            folder = Path(str(self.args.output_dir))
            resume_from_checkpoint = newest_complete(folder, self.accelerator)
        elif resume_from_checkpoint:
            check_checkpoint(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _ready(self, model: nn.Module) -> nn.Module:
        """The bare model in training mode."""
        model.train()
        if self._batch_statistics == "frozen":
            freeze_statistics(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        bare: nn.Module = self.accelerator.unwrap_model(model)
        return bare

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`, of batches that can be protected."""

        def checked(batch: Any) -> Any:
            check_batch(self.model, batch, self.asks_for_input)
            return batch

        return super().get_batch_samples(map(checked, epoch_iterator), *args, **kwargs)


@contextlib.contextmanager
def noting(batch: Mapping[str, Any]) -> Iterator[None]:
    """Errors in here, which often are a model's own, say what batch they are about.

    Example:
        >>> with noting({"labels": torch.tensor([7, 9])}):
        ...     raise IndexError("Target 9 is out of bounds.")
        Traceback (most recent call last):
        IndexError: Target 9 is out of bounds.
        The batch holds labels (2,) of int64 from 7 to 9.
    """
    try:
        yield
    except Exception as error:
        held = [f"{name} {_described(value)}" for name, value in batch.items()]
        error.add_note(f"The batch holds {', '.join(held)}.")
        if "more than 1 value per channel" in str(error):
            error.add_note(_SINGLE)
        raise


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"(a {type(value).__name__})"
    about = f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    # an accelerator may be unable to answer after an error
    if value.numel() and not value.is_floating_point() and value.device.type == "cpu":
        low, high = value.aminmax()
        about += f" from {int(low)} to {int(high)}"
    return about


_SINGLE = (
    "A client of one row has no batch statistics. Take larger batches, fewer clients_per_process, "
    "dataloader_drop_last=True, or batch_statistics='frozen'."
)
