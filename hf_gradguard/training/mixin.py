"""A mixin that makes any Trainer share only protected gradients, `GradGuardMixin`.

The stock Trainer wraps the model in DDP, whose backward pass averages gradients over ranks as it
goes. Here the model is never wrapped, so nothing in the process exchanges gradients by itself:
every rank differentiates its own loss, protects the result, and averages what is protected by hand.

In reading order: how a Trainer is made, what begins a training, where its batches come from, a
step, logs, checkpoints, and what is published. This is the one file that overrides private methods
of Transformers.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from ..defenses import Defense
from ..gradient_map.domain import check_batch
from ..gradient_map.exchanges import no_exchange
from ..gradient_map.parameters import forget, shared_parameters
from ..gradient_map.replay import PassState, holders_in
from ..leakage import FisherAccountant, PrivacyAccount
from .accelerator import GuardedAccelerator
from .card import complete_card, sharing
from .checkpoints.complete import (
    OURS,
    begin_checkpoint,
    check_checkpoint,
    list_checkpoint,
    newest_complete,
    without_private_files,
)
from .checkpoints.private_state import (
    RunRecord,
    check_record,
    load_private_state,
    save_private_state,
    saved_record,
)
from .clients.batches import (
    CLIENT,
    ROW,
    ClientCollator,
    ClientRows,
    NumberedCollator,
    NumberedRows,
    PlainRows,
    RowSampler,
    WholeCollator,
    divide,
    round_sampler,
)
from .clients.partition import Rows
from .config import GradGuardConfig, RequestedSettings, setting
from .exchange.gradients import (
    AgreedTables,
    Ledger,
    SecureSum,
    any_rank,
    average,
    average_statistics,
    freeze_statistics,
    warn_of_statistics,
)
from .exchange.start import StartAlike, log_ranks
from .guards.hooks import HookGuard
from .guards.labels import check_all_labels
from .learning_rate import set_rates
from .logs import LogPolicy, PoolingHandler, PrivateMetrics, without_rows
from .message import (
    Client,
    ClientBatch,
    EmptyClients,
    LossWeights,
    MessageMaker,
    Normalization,
    RandomStreams,
    SharedMessages,
    Spread,
    annotate_errors,
    clients_in,
    is_summed,
    split,
    state_guard,
)
from .meter import LeakageMeter
from .privacy.coupling import CouplingCheck
from .privacy.failing_rows import PassingCollator, ReadableRows, RowTrial
from .privacy.fingerprint import Fingerprints
from .privacy.labels import RandomizedLabels, Randomizer
from .privacy.private_rows import AccountFile, AttemptsPassingRows, PrivateRows, resume_epsilon
from .privacy.proofs import is_proved, log_protection
from .privacy.row_sampling import private_rows_of
from .refusals import (
    Measured,
    check_arguments,
    check_collator,
    check_drawing,
    check_leakage,
    check_loss,
    check_order,
    check_trackers,
    check_training,
    draws_batches,
    is_of_datasets,
    refusal,
)


class GradGuardMixin(Trainer):
    """A mixin that replaces each rank's local gradient by a protected one before any exchange.

    It comes before `Trainer` or a subclass of it. The model is never wrapped, and the optimizer
    takes only gradients that `ledger` was told of.

    Args:
        model: The model, as the Trainer takes it.
        args: `GradGuardConfig`, or training arguments of any other kind.
        defense: A name of `DEFENSES` (its settings come from `args.defense_kwargs`) or a `Defense`.
            Required here or in `args`.
        accountant: The accountant that gets the dFIL of every example that this rank shares
            something about, known by its row in `train_dataset`. It is checkpointed.
        **kwargs: All other arguments of the Trainer, by keyword.

    Beside the loss each rank prints `defense/relative_error` (‖shared - g‖/‖g‖) and
    `defense/cosine`, means over its messages since the last log, and with `leakage_logging_steps=n`
    at every n-th step the `leakage/*` of `docs/estimators.md`. They are of true gradients, so they
    stay on the rank (`private_metrics`). Where each sample is clipped by itself, the gradient is
    not known, and there are none.

    Each client's micro-batch is one message, protected by itself; accumulation, averaging over
    ranks, clipping and the optimizer only process messages that are protected. Noise is added to
    the gradient of the client's *mean* loss.

    Attributes:
        ledger: The ledger of the gradients that may be exchanged and trained on.
        shared_messages: The counts of the messages that this rank has shared, checkpoints included.
        private_rows: The object that draws the rows of per-sample `dp_sgd`, and counts the messages
            that ε covers; `None` for other defenses.
        is_trial: Whether this process stands for one client of many in a trial of rates. Then no
            notice about clients and rates is logged.
        asks_for_input: Whether anything asks for the continuous input of a batch.
        counts_items: Whether ranks add up the labels of a step.
        next_pass_counts: Whether the next pass with gradients counts for what a loss holds; the
            passes of a defense do not.

    Raises:
        ValueError: If no defense is named, or one is named twice.
        NotImplementedError: If the set-up cannot be protected (see `refusals.py`).

    Example:
        >>> class Protected(GradGuardMixin, Trainer):
        ...     pass
    """

    train_dataset: Any
    private_rows: PrivateRows | None = None
    is_trial: bool = False
    asks_for_input: bool = True
    counts_items: bool = True
    next_pass_counts: bool = False

    current_flos: float
    data_collator: Any
    accelerator: GuardedAccelerator
    callback_handler: CallbackHandler
    _batch_statistics: str = "local"
    _begins_anew = False  # though it was to be resumed: there is no checkpoint
    _has_own_loss: bool = False  # and not the Trainer's, which holds nothing
    _loss_state: PassState | None = None  # when the message began

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse an order of bases that would leave the mixin out of the way."""
        super().__init_subclass__(**kwargs)
        check_order(cls, GradGuardMixin)

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        defense: str | Defense | None = None,
        accountant: FisherAccountant | None = None,
        **kwargs: Any,
    ) -> None:
        if args is not None:
            check_arguments(args)
        self._requested, self._accountant = RequestedSettings(args, defense), accountant
        self._former_account: PrivacyAccount | None = None  # of ε, under other settings
        self._private_metrics = PrivateMetrics()
        self.ledger = Ledger()
        self.shared_messages = SharedMessages(self.describe_message)
        models = {} if model is None else {"model": model}
        super().__init__(args=args, **models, **kwargs)
        self.hook_guard = HookGuard(self)
        for callback in (Beginning(self), self.ledger, self.hook_guard):
            self.add_callback(callback)
        self.callback_handler = PoolingHandler(
            self.callback_handler,
            lambda: self.shared_messages.total * self.accelerator.num_senders,
            lambda: self.log_policy,
        )
        self.before_training()

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the accelerator that `Trainer` makes, anew for every trial of a search."""
        super().create_accelerator_and_postprocess()
        arguments = self.accelerator, self.ledger, self.average_over_ranks
        if not self.args.fsdp:
            self.accelerator = GuardedAccelerator(*arguments)
            return
        from .sharding import ShardedAccelerator

        self.accelerator, self.is_fsdp_enabled = ShardedAccelerator(*arguments, self.args), True

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Leave FSDP out: `ShardedAccelerator` says over which processes it is."""
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self.args.fsdp:
            arguments |= {"fsdp_plugin": None, "parallelism_config": None}
        return arguments

    @property
    def defense(self) -> Defense:
        """The defense that protects the messages; each client has its own state of it.

        Setting it, by name or as an object, or changing `args.defense` and the other arguments of
        `GradGuardConfig`, counts from the next training on.
        """
        return self._requested.defense

    @defense.setter
    def defense(self, defense: str | Defense) -> None:
        self._requested.request(self.args, defense)

    @property
    def shared_names(self) -> list[str]:
        """The names of the parameters that a message would be of now.

        Withheld and frozen ones are left out.
        """
        return list(self._shared(self.model))

    @property
    def accountant(self) -> FisherAccountant | None:
        """The account of what this rank has shared about each example. Private to the rank."""
        return self._accountant

    # What begins a training

    def before_training(self) -> None:
        """Check and prepare what was asked for, before anything is loaded.

        Clients forget what they remember if arguments, defense, model or data changed since the
        last training.
        """
        if isinstance(self.args, GradGuardConfig) and self._requested.changed(self.args):
            self.args.check()
        self._requested.resolve(self.args)
        forget(self.model)  # its loss may be another now
        self.shared_messages.begin_training()
        self._loss_pass = self._pass_of_loss()
        self._weights, self._normalizations = self._weights_of_clients()
        own_batches = draws_batches(type(self), GradGuardMixin)
        if "account_file" in vars(self):
            self.account_file.write_to(str(self.args.output_dir))
        if setting(self.args, "protect_labels") is not None or "_labels" in vars(self):
            self.train_dataset = self._labels(
                self.train_dataset, self.args, self.model, own_batches
            )
        objects = {n: getattr(self, n) for n in ("model", "train_dataset", "processing_class")}
        defense = self.defense
        check_training(self.args, self.model, self.accelerator, self.train_dataset, defense)
        check_trackers(self.callback_handler.callbacks)
        check_loss(getattr(self, "loss", None))
        self._secure: SecureSum | None = None
        if setting(self.args, "secure_aggregation"):
            from .exchange.secure import secure_sum_of

            self._secure = secure_sum_of(self.args, self.accelerator)
        if sums := is_summed(defense, self.args):
            from .exchange.secure import share_of_noise

            defense = share_of_noise(defense, self.args, self.accelerator.num_processes)
        measured = Measured(self.args, defense, self._accountant, own_batches, self.train_dataset)
        check_leakage(measured)
        self._empty = EmptyClients(self._shared, sums)
        changed = self._requested.changed(self.args, objects)
        if not changed:
            return
        defense.prepare(self.model, self.processing_class)
        self._share_input_embeddings: bool = setting(self.args, "share_input_embeddings")
        self._batch_statistics: str = setting(self.args, "batch_statistics")
        if self.is_world_process_zero():
            log_protection(self.defense, self.model)
            warn_of_statistics(self.model, self._batch_statistics)
        self._withhold = setting(self.args, "withhold") or []
        self._tables = self._agreed_tables()
        self._shared(self.model)  # refuse none, name withheld
        self._host_clients(defense, own_batches)
        self._meter: LeakageMeter | None = None
        if measured.measures:
            write = self.account_file.write
            self._meter = LeakageMeter(self.args, defense, self._accountant, write)
        self.asks_for_input = defense.facts.needs_input or measured.measures
        seed, is_private = setting(self.args, "noise_seed"), setting(self.args, "private_dropout")
        streams = RandomStreams(seed, self.accelerator.process_index, is_private)
        shared = self._share_input_embeddings, self._withhold
        self._messages = self._message_maker(streams, self._meter, self.ledger, *shared)
        self._attempt: Any = (self.private_rows and AttemptsPassingRows(self)) or operator.call
        self.state_guard = state_guard(is_proved(defense), self._batch_statistics)
        self._messages.state_guard = self.state_guard
        self._requested.bind(self.args, objects)

    def _shared(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return what is shared of a model, as far as it is known.

        Tables are found at the first batch.
        """
        return shared_parameters(module, self._share_input_embeddings, self._withhold)

    def _host_clients(self, defense: Defense, own_batches: bool) -> None:
        """Make this rank's clients, and give them rows of their own where that is asked for."""
        ranks, account = self.accelerator.num_processes, self._privacy_account
        self.remove_callback(PrivateRows)
        self.private_rows, self._former_account = None, account
        if is_proved(self.defense):
            self.private_rows = private_rows_of(
                self, own_batches, lambda: self._clients, account, self.account_file
            )
        # Each sample's loss is its own mean then; counts of labels would tell of the rows.
        self.counts_items = self.private_rows is None
        self._rows_of_clients: list[Rows] = []
        if self.private_rows is None and setting(self.args, "num_clients") is not None:
            self._rows_of_clients = divide(self.train_dataset, self.args, ranks)
        elif self.private_rows is not None:
            self._rows_of_clients = self.private_rows.rows_of_clients
            self.add_callback(self.private_rows)
        if self._rows_of_clients:
            self._check_drawing()
        per_process = setting(self.args, "clients_per_process")
        hosted = len(self._rows_of_clients) // ranks or per_process
        if hosted > 1:
            check_collator(self.data_collator)
        self._clients = [Client(defense) for _ in range(hosted)]

    def _weights_of_clients(self) -> tuple[LossWeights, dict[bool, Normalization]]:
        """Return the weights of clients' mean losses, and their normalization by what counts.

        It is that of steps whose labels are counted, and of steps whose labels are not.
        """
        kind, weights = Normalization, LossWeights(self._loss)
        if self.is_fsdp_enabled:
            from .sharding import ShardedNormalization, ShardedWeights

            kind, weights = ShardedNormalization, ShardedWeights(self._loss, self.accelerator)
        return weights, {counted: kind.of_trainer(self, counted) for counted in (False, True)}

    def _agreed_tables(self) -> AgreedTables:
        """Return what ranks agree on withholding."""
        if not self.is_fsdp_enabled:
            return AgreedTables(self.accelerator)
        from .sharding import ShardedTables

        return ShardedTables(self.accelerator)

    def _message_maker(self, *arguments: Any) -> MessageMaker:
        """Return the maker of this training's messages.

        There are special ones for several devices a client, and under a gradient scaler.
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

    def _pass_of_loss(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes the context that each pass of a loss is to run in.

        Nothing is exchanged there, and what a loss holds, to count, to draw or to log, changes once
        a message.
        """
        self._has_own_loss = self._losses()[0] is not Trainer.compute_loss
        is_alone = self.accelerator.num_processes == 1
        return nullcontext if is_alone and not self._has_own_loss else self._silent_pass

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `Trainer` does, with the defense and all arguments as they are now.

        Args:
            resume_from_checkpoint: `True` takes the newest checkpoint that is complete, and warns
                of newer ones that a killed run left behind; where there is none, training begins
                anew.
            *args: Further arguments, as for `Trainer`.
            **kwargs: Further arguments, as for `Trainer`.

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

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.before_training()
        check_all_labels(self)  # with their own reasons, before a loader tries rows
        if self._begins_anew:
            self._resume_account()

    # Where batches come from

    def get_train_dataloader(self) -> DataLoader:
        """Return training batches, with `num_clients` of the clients that each step draws."""
        if not self._rows_of_clients:
            return super().get_train_dataloader()
        self._check_drawing()
        if self.private_rows is not None:
            sampler: Sampler = self.private_rows.sampler()
        else:
            ranks = self.accelerator.num_processes
            sampler = round_sampler(self._rows_of_clients, self.args, ranks)
        rows = ClientRows if self.private_rows is None else ReadableRows
        return self.loader_of(rows(self.train_dataset), sampler)

    def _check_drawing(self) -> None:
        drawn_by = "num_clients" if self.private_rows is None else "dp_sgd and per_sample=True"
        check_drawing(self, GradGuardMixin, drawn_by)

    def loader_of(
        self, dataset: Dataset, sampler: Sampler, batch_size: int | None = None
    ) -> DataLoader:
        """Return training batches of what `sampler` draws from `dataset`, so many draws each.

        What a `RowSampler` draws at a time is a batch.
        """
        if isinstance(sampler, RowSampler):
            batch_size = 1
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
        rows = dataset
        if self.accountant is not None and not self._rows_of_clients:
            rows = NumberedRows(dataset)
        if is_table and rows is dataset:
            rows = PlainRows(dataset)  # a table's own rows would be collated without asking how
        # Samplers may look at the data, by the length of its rows say.
        draw = None if sampler_fn is None else lambda _: sampler_fn(dataset)
        return super()._get_dataloader(rows, description, batch_size, draw, *args, **kwargs)

    def _get_collator_with_removed_columns(
        self, data_collator: Any, description: str | None = None
    ) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        return self._training_collator(collate) if description == _TRAINING else collate

    def _training_collator(self, collate: Any) -> Any:
        """Return what makes training batches of rows.

        With `num_clients` batches say whose the rows are, and with an accountant which ones.
        """
        collate = collate if len(self._clients) == 1 else WholeCollator(collate)
        if self._rows_of_clients:
            if self.private_rows is None:
                return ClientCollator(collate)
            check = CouplingCheck(self.train_dataset, collate)
            trial = RowTrial(self.train_dataset, collate, getattr(self.model, "config", None))
            return PassingCollator(collate, check, trial)
        return collate if self.accountant is None else NumberedCollator(collate)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of an optimizer step as `Trainer` does, and check them.

        Settings may not change within a training. Where rows are of clients, batches must say
        whose.
        """

        def checked(batch: Any) -> Any:
            if self.counts_items:  # else each of its rows may fail by itself
                check_batch(self.model, batch, self.asks_for_input)
            return batch

        self._requested.check_unchanged(self.args)
        checked_batches = map(checked, epoch_iterator)
        batches, count = super().get_batch_samples(checked_batches, *args, **kwargs)
        if batches and self.ledger.strangers:
            inputs = dict(self._prepare_inputs(batches[0]))
            self.ledger.check_strangers(self.model, inputs, self._loss)
        if self._rows_of_clients and any(CLIENT not in batch for batch in batches):
            raise refusal("rows-of-no-client")
        return batches, count

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Tensor | int | None:
        return super()._get_num_items_in_batch(*args, **kwargs) if self.counts_items else None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count operations, but not those of private rows, whose tokens they would tell."""
        return 0 if self.private_rows is not None else int(super().floating_point_ops(inputs))

    # A step

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Differentiate, protect and accumulate one micro-batch.

        Ranks average what they have accumulated when a step is due.
        """
        module, inputs = self.ready_for_step(model), dict(self._prepare_inputs(inputs))
        step, accumulation = self.state.global_step, self.current_gradient_accumulation_steps
        rules = self._normalizations[num_items_in_batch is not None]
        normalization = replace(rules, num_items=num_items_in_batch, accumulation=accumulation)
        losses = []
        with annotate_errors(inputs, self.private_rows is not None):
            turns, spread = self._turns_of(module, inputs, normalization)
            mean_loss = functools.partial(normalization.mean_loss, self._loss, spread)
            if not self._share_input_embeddings:
                self._attempt(self._agree_on_tables, module, turns[0], mean_loss)
            for turn in turns:
                if turn.weight:
                    self._begin_message()
                    share = self._messages.share
                    loss = self._attempt(share, module, turn, mean_loss, step, model)
                    losses.append(turn.weight * loss)
            if self._empty.summed or len(losses) < len(turns):
                self._empty.share(self._messages, module, turns, accumulation, step)
        if self.hook_guard.has_sums:
            self.hook_guard.run(self._shared(module).values())
        self.shared_messages.add(len(turns))
        if (steps := self.args.torch_empty_cache_steps) and step % steps == 0:
            clear_device_cache()
        if self.accelerator.sync_gradients:
            self._exchange(module)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.args.device)

    def ready_for_step(self, model: nn.Module) -> Any:
        """Return the bare model, in training mode."""
        model.train()
        self._loss_state = None
        if self._batch_statistics == "frozen":
            freeze_statistics(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _turns_of(
        self, module: nn.Module, inputs: dict[str, Any], normalization: Normalization
    ) -> tuple[list[ClientBatch], Spread]:
        """Return what of a rank's batch is whose, with its weight, and the spread of `Weights`."""
        if CLIENT not in inputs:
            batches = [inputs] if len(self._clients) == 1 else split(inputs, len(self._clients))
            rows = [batch.pop(ROW, None) for batch in batches]
            factors, spread = self._weights(module, batches, normalization)
            return list(map(ClientBatch, self._clients, batches, factors, rows)), spread
        # n_k/Σn over all ranks; ranks are averaged, and accumulated steps added up, later
        ranks, steps = self.accelerator.num_processes, normalization.accumulation
        turns = [
            ClientBatch(
                self._clients[number // ranks],
                batch,
                0.0 if normalization.items(batch) == 0 else share * ranks / steps,
                rows,
            )
            for number, share, rows, batch in clients_in(inputs)
        ]
        if self.private_rows is not None:
            turns = self.private_rows.count(turns)
        return turns, Spread()

    def _agree_on_tables(self, module: nn.Module, turn: ClientBatch, mean_loss: Any) -> None:
        self._tables.agree(module, turn.batch, mean_loss, self._secure)

    def _loss(self, module: nn.Module, batch: dict[str, Any], items: float | None) -> Tensor:
        """Return the Trainer's own loss, which a subclass may have overridden."""
        count = None if items is None else torch.tensor(items, device=self.args.device)
        with self.compute_loss_context_manager(), self._loss_pass():
            return self.compute_loss(module, dict(batch), num_items_in_batch=count)

    def _begin_message(self) -> None:
        """Let the next pass with gradients count for what the loss holds, but no later one."""
        self.next_pass_counts = True
        if self._has_own_loss:
            self._loss_state = self._held_by_loss()

    @contextmanager
    def _silent_pass(self) -> Iterator[None]:
        """Let nothing leave the rank meanwhile, and a loss keep what it held unless it counts.

        Metrics of TRL's Trainers are this rank's own: they gather rewards and log-probabilities of
        every example to log means. What any other loss gathers is refused.
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

    def _losses(self) -> list[Any]:
        """Return what computes the loss, the user's first."""
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

    def _exchange(self, module: nn.Module) -> None:
        """Average over ranks what they have protected, and agree on going on."""
        if self._empty.summed:
            step = self.state.global_step
            self._empty.share_sum(self._messages, module, step, self.accelerator, self._secure)
        parameters = list(self._shared(module).values())
        self.ledger.check(parameters, "exchange gradients")
        self._messages.average(parameters, self.accelerator, self._secure)
        self.ledger.write(parameters, exchanged=True)
        if self._meter is not None and self._meter.stops:
            # A rank that left alone would leave the others waiting for it.
            is_due = any_rank(self._meter.pop_stop(), self.accelerator, self._secure)
            self.control.should_training_stop |= is_due
        if self._batch_statistics == "shared":
            average_statistics(module, self.accelerator, self._secure)

    # Logs

    def average_over_ranks(self, figure: Tensor) -> None:
        """Replace a figure of this rank by its mean over ranks, in place.

        Such are losses and counts, which the stock Trainer gathers from every rank.
        """
        average([figure], self.accelerator, self._secure)

    def store_flos(self) -> None:
        """Store a mean over ranks in place of this rank's own count, which tells its tokens."""
        scale = 2.0**40  # a step's count is from 1e6 to 1e20
        flos = torch.tensor(self.current_flos / scale, dtype=torch.float64, device=self.args.device)
        self.average_over_ranks(flos)
        self.current_flos = float(flos) * scale
        super().store_flos()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._log_leakage()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self.average_over_ranks(tr_loss)  # which the Trainer then gathers
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _log_leakage(self) -> None:
        """Log leakage metrics, so that a checkpoint of the same step holds them.

        Where the loss is logged they stand beside it.
        """
        if self._meter is None or self.control.should_log:
            return
        counts = self._meter.metric_counts
        if metrics := self._meter.pop_metrics():
            if logs := self._private_metrics.log(self, {}, metrics, counts):
                super().log(logs)
            self._private_metrics.remember(self.state, beside=False)

    def _nested_gather(self, tensors: dict[str, Tensor], name: str | None = None) -> Any:
        """Average the sums over steps that sentence-transformers gathers from all ranks.

        There is one for each part of a loss. It logs their ratios, which averages have, too.
        """
        averages = {key: value.to(torch.float64, copy=True) for key, value in tensors.items()}
        for figure in averages.values():
            self.average_over_ranks(figure)
        return averages

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer` does, with the defense's metrics and ε beside the training loss.

        Metrics since the last log are added to the training's summary.
        """
        if "loss" in logs or "train_loss" in logs:
            counts, metrics = self._messages.metric_counts, self._messages.pop_metrics()
            if self._meter is not None:
                counts |= self._meter.metric_counts
                metrics |= self._meter.pop_metrics() | self._meter.pop_skipped()
            metrics = self.log_policy.measured(metrics)
            if self.private_rows is not None:
                logs.update(self.private_rows.metrics())
            # beside the summary only if something came since the last log
            if "loss" in logs or any(metrics.values()):
                self._private_metrics.log(self, logs, metrics, counts)
        super().log(logs, *args, **kwargs)
        self._private_metrics.remember(self.state)

    @property
    def log_policy(self) -> LogPolicy:
        """The policy of who may see which number of the log, as things are now."""
        return LogPolicy.of_trainer(self)

    @property
    def messages_per_step(self) -> int:
        """The number of messages of an optimizer step, of all ranks."""
        return self.args.gradient_accumulation_steps * self.accelerator.num_senders

    def save_state(self) -> None:
        """Save the Trainer's state as others may see it, since a push uploads the file.

        It has no metrics of true gradients, and other figures are means over many messages.
        """
        super().save_state()
        if self.is_world_process_zero():
            path = Path(str(self.args.output_dir)) / TRAINER_STATE_NAME
            public = self.log_policy.public_state(json.loads(path.read_text(encoding="utf-8")))
            text = json.dumps(public, indent=2, sort_keys=True) + "\n"
            path.write_text(text, encoding="utf-8")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Save metrics with figures of many messages: a push uploads that file, too."""
        public = self.log_policy.public_summary(metrics, self.state.log_history)
        super().save_metrics(split, public, combined)

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # What a defense remembers: a run that is killed and resumed goes on as if it had not been.
        state = self._clients, self.accountant, self._labels.key, self._run_record()
        save_private_state(output_dir, self.accelerator.process_index, *state)
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
        self._load_state_of_rank(checkpoint)

    def _load_state_of_rank(self, folder: str) -> None:
        """Load what this rank alone remembers, and count what left it after the checkpoint.

        Raises:
            ValueError: If the checkpoint is none that this Trainer may go on with.
        """
        rank, account = self.accelerator.process_index, self.account_file
        saved = saved_record(folder, rank)
        record = self._run_record(None if saved is None else saved.run)
        check_record(folder, saved, record, self.private_rows is not None)
        records = []
        if saved is not None and (self._has_account or saved.privacy is not None):
            account.go_on_with(saved.run)
            account.come_from(Path(folder).parent)
            transcript = (saved.transcript or {}).get("name")
            is_only = not saved.counted or account.is_untouched(transcript)
            records = account.records([Path(folder).parent, self.args.output_dir], saved.counted)
            if saved.privacy is not None:  # also where this training adds nothing to it
                if (privacy := self._privacy_account) is None:
                    privacy = self._former_account = PrivacyAccount()
                resume_epsilon(privacy, saved.privacy, records)
            if self.private_rows is not None:
                self.private_rows.resume(saved.transcript, records, is_only)
        releases = [entry["release"] for entry in records if "release" in entry]
        load_private_state(
            folder, rank, self._clients, self.accountant, self.args.device, self._labels.key,
            record, releases,
        )  # fmt: skip
        self.shared_messages.load_state_dict(None if saved is None else saved.shared)

    def _resume_account(self) -> None:
        """Count what a killed run shared that left no checkpoint in the output folder."""
        account = self.account_file
        run = account.last_run()
        if run is None or not self._has_account:
            return
        account.go_on_with(run)
        records = account.records([self.args.output_dir], {})
        if self._privacy_account is not None:
            resume_epsilon(self._privacy_account, (), records)
        if self.accountant is not None:
            self.accountant.load_releases(e["release"] for e in records if "release" in e)

    @functools.cached_property
    def _labels(self) -> Randomizer:
        return Randomizer()

    @functools.cached_property
    def _fingerprints(self) -> Fingerprints:
        return Fingerprints()

    @functools.cached_property
    def account_file(self) -> AccountFile:
        """The file that a message's figures are written to before the message leaves the rank."""
        return AccountFile(str(self.args.output_dir), self.args.process_index)

    @property
    def _privacy_account(self) -> PrivacyAccount | None:
        """The account of ε: that of rows behind a proof, or the one of an earlier training."""
        return self._former_account if self.private_rows is None else self.private_rows.account

    @property
    def _has_account(self) -> bool:
        return self.private_rows is not None or self.accountant is not None

    def _run_record(self, run: str | None = None) -> RunRecord:
        """Return what is asked for now, as a private file of a run, or of this one, says it."""
        data, args, privacy = self.train_dataset, self.args, self._privacy_account
        data = data.data if isinstance(data, RandomizedLabels) else data
        run = run or self.account_file.run
        numbered = self._has_account or self._rows_of_clients or self._labels.key is not None
        of_clients = ("num_clients", "partition", "dirichlet_alpha", "clients_per_process")
        settings = {name: getattr(args, name, None) for name in of_clients}
        devices = self.accelerator.num_processes // self.accelerator.num_senders
        settings |= {"correlated": getattr(self.defense, "correlated", False), "devices": devices}
        return RunRecord(
            run,
            self.account_file.counted,
            None if privacy is None else [[*key, n] for key, n in privacy.messages.items()],
            None if self._labels.key is None else self.train_dataset.epsilon,
            self._fingerprints(data, run) if numbered else None,
            {"defense": self.defense.name, **settings},
            self.shared_messages.state_dict(),
            None if self.private_rows is None else self.private_rows.saved_transcript(),
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights under other names than the model's.

        Transformers writes them for some models (ViT; its issue 43701), and would leave weights as
        they start, with a warning.
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

    # What is published

    def describe_message(self) -> dict[str, str]:
        """Return how a message would be shared now, for the model's card."""
        return sharing(self)

    def add_model_card_callback(self, *args: Any, **kwargs: Any) -> None:
        """Add sentence-transformers' callback, without the rows of data that its cards show."""
        card = self.model.model_card_data
        widget, examples = list(card.widget), card.usage_examples
        super().add_model_card_callback(*args, **kwargs)
        without_rows(card, widget, examples)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write a card with figures of many messages, and what was protected and what was not."""
        history = self.state.log_history
        self.state.log_history = self.log_policy.public_history(history)
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = history
        if self.is_world_process_zero():
            complete_card(self)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push files to the Hub as `Trainer` does, but no checkpoint and no private file."""
        with without_private_files():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        check_arguments(self.args)  # hub_strategy may have changed since training began
        with without_private_files():
            super()._push_from_checkpoint(checkpoint_folder)

    def _checkpoint_push_skip_names(self, checkpoint_folder: str) -> set[str]:
        """Return what sentence-transformers does not copy out of a checkpoint to push it."""
        private = {path.name for path in Path(checkpoint_folder).glob(f"{OURS}*")}
        return private | super()._checkpoint_push_skip_names(checkpoint_folder)


class Beginning(TrainerCallback):
    """A callback that sets, checks and logs what stands before the first step of a training.

    Args:
        trainer: The protected Trainer, with the optimizer that it was passed.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> beginning = Beginning(GradGuardTrainer(model, defense="pruning"))
    """

    def __init__(self, trainer: GradGuardMixin) -> None:
        self._trainer, self._users_optimizer = trainer, trainer.optimizer
        self._start: StartAlike | None = None
        self._model: nn.Module | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Set rates first, and then compare ranks."""
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


_TRAINING = "Training"  # what the Trainer calls its batches
_GATHER_FOR_LOG = {("trl", "SFTTrainer"), ("trl", "DPOTrainer"), ("trl", "RewardTrainer")}
"""Trainers whose loss gathers for its log alone."""
_DATA = frozenset({"train_dataset", "eval_dataset", "state", "args"})
"""Attributes of a Trainer that no loss changes, and that may be large."""
