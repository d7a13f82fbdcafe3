"""The one Trainer that relies on private names of others: it turns them into public ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from ..defenses import Defense
from ..gradient_map.domain import check_batch
from ..gradient_map.exchanges import no_exchange
from ..gradient_map.replay import PassState, holders_in
from .accelerator import GuardedAccelerator
from .checkpoints.complete import (
    OURS,
    begin_checkpoint,
    check_checkpoint,
    list_checkpoint,
    newest_complete,
    without_private_files,
)
from .clients.batches import PlainRows
from .exchange.start import StartAlike, log_ranks
from .guards.labels import check_all_labels
from .guards.watch import AgreedTables, HookGuard, Ledger, freeze_statistics
from .learning_rate import set_rates
from .logs import LogPolicy, PoolingHandler, without_rows
from .message import Loss, LossWeights, MessageMaker, Normalization, SharedMessages
from .refusals import check_arguments, is_of_datasets


class Beginning(TrainerCallback):
    """Sets, checks and logs, when a training begins, what stands before its first step.

    Args:
        trainer: A protected one, with the optimizer that it was passed.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> beginning = Beginning(GradGuardTrainer(model, defense="pruning"))
    """

    def __init__(self, trainer: TrainerAdapter) -> None:
        self._trainer, self._users_optimizer = trainer, trainer.optimizer
        self._start: StartAlike | None = None
        self._model: nn.Module | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Look at rates first, and then compare ranks."""
        trainer = self._trainer
        senders = trainer.accelerator.num_senders
        if not trainer.is_trial:
            rates = kwargs["optimizer"], kwargs.get("lr_scheduler"), self._users_optimizer
            set_rates(args, trainer.defense, senders, *rates)
            log_ranks(senders, state)
        if self._start is None or self._model is not trainer.model:
            self._model = trainer.model
            self._start = StartAlike(lambda: trainer.eval_dataset, lambda: trainer.defense)
        self._start.on_train_begin(args, state, control, **kwargs)


class TrainerAdapter(Trainer):
    """`Trainer` whose private methods call public ones, which the mixin fills in. Its model is
    never wrapped, and its optimizer takes only gradients that `ledger` has been told of.

    Attributes:
        ledger: Of the gradients that may be exchanged and trained on.
        shared_messages: How many this rank has shared, and how, checkpoints included.
        defense: Of the messages.
        is_trial: Whether this process stands for one client of many, and its rates are what is
            tried: then nothing is said of either.
        asks_for_input: Whether anything asks for the continuous input of a batch.

    Example:
        >>> trainer = TrainerAdapter(model)
        >>> trainer.training_collator(list) is list  # as it is, unless a subclass says otherwise
        True
        >>> trainer.accelerator.backward(model(**batch).loss)
        Traceback (most recent call last):
        RuntimeError: GradGuardTrainer differentiates and protects a batch by itself: ...
    """

    is_trial: bool = False
    asks_for_input: bool = True
    defense: Defense
    _batch_statistics: str = "local"

    current_flos: float
    data_collator: Any
    _begins_anew = False  # though it was to be resumed: there is no checkpoint
    counts_items: bool = True  # whether ranks add up the labels of a step
    next_pass_counts: bool = False  # for what a loss holds; the passes of a defense do not
    _has_own_loss: bool = False  # and not the Trainer's, which holds nothing
    _loss_state: PassState | None = None  # when the message began
    accelerator: GuardedAccelerator
    callback_handler: CallbackHandler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ledger = Ledger()
        self.shared_messages = SharedMessages(self.describe_message)
        super().__init__(*args, **kwargs)
        self.hook_guard = HookGuard(self)
        for callback in (Beginning(self), self.ledger, self.hook_guard):
            self.add_callback(callback)
        self.callback_handler = PoolingHandler(
            self.callback_handler,
            lambda: self.shared_messages.total * self.accelerator.num_senders,
            lambda: self.log_policy,
        )

    def add_model_card_callback(self, *args: Any, **kwargs: Any) -> None:
        """As in sentence-transformers, without rows of data: its cards, which are pushed, show
        some.
        """
        card = self.model.model_card_data
        widget, examples = list(card.widget), card.usage_examples
        super().add_model_card_callback(*args, **kwargs)
        without_rows(card, widget, examples)

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`, which makes a new one for every trial of a search."""
        super().create_accelerator_and_postprocess()
        arguments = self.accelerator, self.ledger, self.average_over_ranks
        if not self.args.fsdp:
            self.accelerator = GuardedAccelerator(*arguments)
            return
        from .sharding import ShardedAccelerator

        self.accelerator, self.is_fsdp_enabled = ShardedAccelerator(*arguments, self.args), True

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As in `Trainer`, without FSDP: `ShardedAccelerator` says over which processes it is."""
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self.args.fsdp:
            arguments |= {"fsdp_plugin": None, "parallelism_config": None}
        return arguments

    def save_state_of_rank(self, folder: str) -> None:
        """Write what this rank alone remembers to a checkpoint."""

    def load_state_of_rank(self, folder: str) -> None:
        """Read it again."""

    def resume_account(self) -> None:
        """Where a killed run left no checkpoint: count what it shared."""

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
        self._begins_anew = False
        as_text = str(resume_from_checkpoint)  # of a command line "True" is a text
        if as_text.lower() in ("true", "false") and not Path(as_text).exists():
            resume_from_checkpoint = as_text.lower() == "true"
        if resume_from_checkpoint is True:
            folder = Path(str(self.args.output_dir))
            resume_from_checkpoint = newest_complete(folder, self.accelerator)
            self._begins_anew = resume_from_checkpoint is None
        if resume_from_checkpoint:
            check_checkpoint(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_state(self) -> None:
        """As in `Trainer`, without metrics of true gradients and with figures of many messages: a
        push uploads that file.
        """
        super().save_state()
        if self.is_world_process_zero():
            path = Path(str(self.args.output_dir)) / TRAINER_STATE_NAME
            public = self.log_policy.public_state(json.loads(path.read_text(encoding="utf-8")))
            text = json.dumps(public, indent=2, sort_keys=True) + "\n"
            path.write_text(text, encoding="utf-8")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """As in `Trainer`, with figures of many messages: a push uploads that file, too."""
        public = self.log_policy.public_summary(metrics, self.state.log_history)
        super().save_metrics(split, public, combined)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with figures of many messages."""
        history = self.state.log_history
        self.state.log_history = self.log_policy.public_history(history)
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = history

    @property
    def log_policy(self) -> LogPolicy:
        """Who may see which number of the log, as things are now."""
        return LogPolicy.of_trainer(self)

    @property
    def messages_per_step(self) -> int:
        """Of an optimizer step, of all ranks."""
        return self.args.gradient_accumulation_steps * self.accelerator.num_senders

    def ready_for_step(self, model: nn.Module) -> Any:
        """The bare model in training mode."""
        model.train()
        self._loss_state = None
        if self._batch_statistics == "frozen":
            freeze_statistics(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`, of batches that can be protected."""

        def checked(batch: Any) -> Any:
            if self.counts_items:  # else each of its rows may fail by itself
                check_batch(self.model, batch, self.asks_for_input)
            return batch

        return super().get_batch_samples(map(checked, epoch_iterator), *args, **kwargs)

    def training_collator(self, collate: Any) -> Any:
        """What makes training batches of rows, given what the Trainer has."""
        return collate

    def training_data(self, dataset: Any) -> Any:
        """What training batches are read from, given what their sampler knows."""
        return dataset

    def before_saving(self) -> None:
        """After every optimizer step, before anything is logged, evaluated or saved."""

    def before_training(self) -> None:
        """When training begins, after `model_init` and a trial's settings, before anything is
        loaded.
        """

    def describe_message(self) -> dict[str, str]:
        """How a message would be shared now, for the card: `defense`, its `settings`, and more."""
        return {"defense": self.defense.name}

    def weights_of_clients(self, loss: Loss) -> tuple[LossWeights, dict[bool, Normalization]]:
        """What weighs clients' mean losses, and how they are normalized, by whether labels are
        counted.
        """
        kind, weights = Normalization, LossWeights(loss)
        if self.is_fsdp_enabled:
            from .sharding import ShardedNormalization, ShardedWeights

            kind, weights = ShardedNormalization, ShardedWeights(loss, self.accelerator)
        return weights, {counted: kind.of_trainer(self, counted) for counted in (False, True)}

    def agreed_tables(self) -> AgreedTables:
        """What ranks agree on withholding."""
        if not self.is_fsdp_enabled:
            return AgreedTables(self.accelerator)
        from .sharding import ShardedTables

        return ShardedTables(self.accelerator)

    def message_maker(self, *arguments: Any) -> MessageMaker:
        """What makes this training's messages: for several devices a client if it has them, or
        under its gradient scaler.
        """
        if self.is_fsdp_enabled:
            from .sharding import ShardedMessages

            return ShardedMessages(*arguments, accelerator=self.accelerator)
        if self.accelerator.scaler is None:
            return MessageMaker(*arguments)
        from .scaling import ScaledMessages

        counts, optimizer = self.shared_messages, lambda: self.optimizer
        scaler = self.accelerator.scaler
        return ScaledMessages(*arguments, scaler=scaler, optimizer=optimizer, counts=counts)

    def average_over_ranks(self, figure: Tensor) -> None:
        """Replace a figure of this rank by its mean over ranks, in place. Here: on one rank."""

    def store_flos(self) -> None:
        """As in `Trainer`, of a mean in place of this rank's own count, which tells its tokens."""
        scale = 2.0**40  # a step's count is from 1e6 to 1e20
        flos = torch.tensor(self.current_flos / scale, dtype=torch.float64, device=self.args.device)
        self.average_over_ranks(flos)
        self.current_flos = float(flos) * scale
        super().store_flos()

    def loader_of(
        self, dataset: Dataset, sampler: Sampler, batch_size: int | None = None
    ) -> DataLoader:
        """Training batches of what `sampler` draws from `dataset`, so many draws each."""
        return self._get_dataloader(
            dataset=dataset,
            description=_TRAINING,
            batch_size=batch_size or self.args.per_device_train_batch_size,
            sampler_fn=lambda _: sampler,
            is_training=True,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> DataLoader:
        if description != _TRAINING:
            return super()._get_dataloader(
                dataset, description, batch_size, sampler_fn, *args, **kwargs
            )
        is_table = is_of_datasets(dataset, "Dataset")
        if is_table:
            dataset = self._remove_unused_columns(dataset, description=description)
        rows = self.training_data(dataset)
        if is_table and rows is dataset:
            rows = PlainRows(dataset)  # a table's own rows would be collated without asking how
        # Samplers may look at the data, by the length of its rows say.
        draw = None if sampler_fn is None else lambda _: sampler_fn(dataset)
        return super()._get_dataloader(rows, description, batch_size, draw, *args, **kwargs)

    def _get_collator_with_removed_columns(
        self, data_collator: Any, description: str | None = None
    ) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        return self.training_collator(collate) if description == _TRAINING else collate

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.before_saving()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self.average_over_ranks(tr_loss)  # which the Trainer then gathers
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _nested_gather(self, tensors: dict[str, Tensor], name: str | None = None) -> Any:
        """Sums over steps, one a part of a loss, which sentence-transformers gathers from all ranks
        to log their ratios. Their averages have the same ratios.
        """
        averages = {key: value.to(torch.float64, copy=True) for key, value in tensors.items()}
        for figure in averages.values():
            self.average_over_ranks(figure)
        return averages

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Tensor | int | None:
        return super()._get_num_items_in_batch(*args, **kwargs) if self.counts_items else None

    def loss_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """What each pass of a loss in this training is to run in: nothing is exchanged, and what a
        loss holds, to count, to draw or to log, changes once a message.
        """
        self._has_own_loss = self._losses()[0] is not Trainer.compute_loss
        is_alone = self.accelerator.num_processes == 1
        return nullcontext if is_alone and not self._has_own_loss else self._silent_pass

    def begin_message(self) -> None:
        """The next pass with gradients counts for what the loss holds, its defense's do not."""
        self.next_pass_counts = True
        if self._has_own_loss:
            self._loss_state = self._held_by_loss()

    def _losses(self) -> list[Any]:
        """What computes the loss: the user's first."""
        kinds = type(self).__mro__
        methods = [vars(kind)["compute_loss"] for kind in kinds if "compute_loss" in vars(kind)]
        return [f for f in (self.compute_loss_func, *methods) if f is not None]

    def _held_by_loss(self) -> PassState | None:
        losses = self._losses()
        if losses[0] is Trainer.compute_loss:
            return None
        attributes = self.__dict__
        values = [
            v for a in attributes.values() for v in (a.values() if isinstance(a, dict) else [a])
        ]
        values += losses
        objects = [v for v in values if isinstance(v, nn.Module) and v is not self.model]
        modules = {module for loss in objects for module in loss.modules()}
        owners, functions = holders_in(modules - set(self.model.modules()))
        owners.append(attributes)
        callables = [getattr(loss, "__self__", loss) for loss in losses]
        owners += [c.__dict__ for c in callables if hasattr(c, "__dict__") and c is not self]
        return PassState(owners, [*functions, *losses], _DATA)

    @contextmanager
    def _silent_pass(self) -> Iterator[None]:
        """Metrics of TRL's Trainers are this rank's own: they gather rewards and log-probabilities
        of every example to log means. What any other loss gathers is refused.
        """
        # A loss is computed several times per batch. The first pass with gradients counts.
        counts = self.next_pass_counts and torch.is_grad_enabled()
        self.next_pass_counts = self.next_pass_counts and not counts
        state = None if counts else self._loss_state or self._held_by_loss()
        kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(self).__mro__}
        gathers_for_log = bool(kinds & _GATHER_FOR_LOG)
        as_before = nullcontext() if state is None else state.replayed()
        with self.accelerator.in_loss(gathers_for_log), no_exchange(self.model), as_before:
            yield

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights under other names than the model's, which Transformers writes for some
        models (ViT; its issue 43701) and would leave as they start, with a warning.
        """
        if load_result.missing_keys and load_result.unexpected_keys:
            raise RuntimeError(
                f"The checkpoint holds other weights than {type(self.model).__name__} has. It "
                f"lacks {sorted(load_result.missing_keys)[:3]} and has "
                f"{sorted(load_result.unexpected_keys)[:3]}. It is of another model, or one that "
                "Transformers saves under older names (ViT): start a new training from "
                "from_pretrained(checkpoint)."
            )
        super()._issue_warnings_after_load(load_result)

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.before_training()
        check_all_labels(self)  # with their own reasons, before a loader tries rows
        if self._begins_anew:
            self.resume_account()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`, without any checkpoint or private file."""
        with without_private_files():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        check_arguments(self.args)  # hub_strategy may have changed since training began
        with without_private_files():
            super()._push_from_checkpoint(checkpoint_folder)

    def _checkpoint_push_skip_names(self, checkpoint_folder: str) -> set[str]:
        """What sentence-transformers does not copy out of a checkpoint to push it."""
        private = {path.name for path in Path(checkpoint_folder).glob(f"{OURS}*")}
        return private | super()._checkpoint_push_skip_names(checkpoint_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.save_state_of_rank(output_dir)
        self.accelerator.note_stepped(self.model, self.optimizer, output_dir)
        # Before rank 0 writes its own state, the last file, and deletes older checkpoints.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            list_checkpoint(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self.accelerator.loading_optimizer(self.model, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        # Not beside the random state, which a resumed run may leave behind.
        self.load_state_of_rank(checkpoint)


_TRAINING = "Training"  # what the Trainer calls its batches


_GATHER_FOR_LOG = {("trl", "SFTTrainer"), ("trl", "DPOTrainer"), ("trl", "RewardTrainer")}
"""Trainers whose loss gathers for its log alone."""
_DATA = frozenset({"train_dataset", "eval_dataset", "state", "args"})
"""Attributes of a Trainer that no loss changes, and that may be large."""
