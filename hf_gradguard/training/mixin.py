"""`GradGuardMixin`: any Trainer, sharing only protected gradients.

The stock Trainer wraps the model in DDP, whose backward pass averages gradients over ranks as it
goes. Here the model is never wrapped, so nothing in the process exchanges gradients by itself:
every rank differentiates its own loss, protects the result, and averages what is protected by hand.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import TrainingArguments

from ..defenses import Defense
from ..gradient_map.parameters import forget, shared_parameters
from ..leakage import FisherAccountant, PrivacyAccount
from .adapter import TrainerAdapter
from .card import complete_card, sharing
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
    WholeCollator,
    clients_in,
    divide,
    round_sampler,
    split,
)
from .clients.partition import Rows
from .config import GradGuardConfig, RequestedSettings, setting
from .exchange.average import SecureSum, any_rank, average
from .guards.watch import average_statistics, state_guard, warn_of_statistics
from .logs import PrivateMetrics
from .message import (
    Client,
    ClientBatch,
    EmptyClients,
    Normalization,
    RandomStreams,
    Spread,
    annotate_errors,
    is_summed,
)
from .meter import LeakageMeter
from .privacy.account import AccountFile
from .privacy.coupling import CouplingCheck
from .privacy.failing_rows import AttemptsPassingRows, PassingCollator, ReadableRows, RowTrial
from .privacy.fingerprint import Fingerprints
from .privacy.labels import RandomizedLabels, Randomizer
from .privacy.private_rows import (
    PrivateRows,
    RowSampler,
    is_proved,
    log_protection,
    resume_epsilon,
)
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
    refusal,
)


class GradGuardMixin(TrainerAdapter):
    """Replaces each rank's local gradient by a protected one before anything is exchanged: before
    `Trainer` or a subclass of it.

    Args:
        args: `GradGuardConfig`, or training arguments of any other kind.
        defense: A name of `DEFENSES` (its settings come from `args.defense_kwargs`) or a `Defense`.
            Required here or in `args`.
        accountant: Gets the dFIL of every example that this rank shares something about, known by
            its row in `train_dataset`, and is checkpointed with it.
        **kwargs: All other arguments of the Trainer, by keyword.

    Beside the loss each rank prints `defense/relative_error` (‖shared - g‖/‖g‖) and
    `defense/cosine`, means over its messages since the last log, and with `leakage_logging_steps=n`
    at every n-th step the `leakage/*` of `docs/estimators.md`. They are of true gradients, so they
    stay on the rank (`private_metrics`). Where each sample is clipped by itself, the gradient is
    not known, and there are none.

    Each client's micro-batch is one message, protected by itself; accumulation, averaging over
    ranks, clipping and the optimizer only process messages that are protected. Noise is added to
    the gradient of the client's *mean* loss.

    Raises:
        ValueError: If no defense is named, or one is named twice.
        NotImplementedError: For set-ups that cannot be protected; see `refusals.py`.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> class Protected(GradGuardMixin, Seq2SeqTrainer):
        ...     pass
    """

    train_dataset: Any
    private_rows: PrivateRows | None = None
    """Of `dp_sgd` with `per_sample`: draws its rows, and counts the messages that ε is of."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls, GradGuardMixin)

    def __init__(
        self,
        *,
        args: TrainingArguments | None = None,
        defense: str | Defense | None = None,
        accountant: FisherAccountant | None = None,
        **kwargs: Any,
    ) -> None:
        if args is not None:
            check_arguments(args)
        self._requested, self._accountant = RequestedSettings(args, defense), accountant
        self._privacy_account: PrivacyAccount | None = None
        self._private_metrics = PrivateMetrics()
        super().__init__(args=args, **kwargs)
        self.before_training()

    @property
    def defense(self) -> Defense:
        """What protects the messages: each client has a copy. Setting it, by name or as an object,
        or changing `args.defense` and the other arguments of `GradGuardConfig`, counts from the
        next training on.
        """
        return self._requested.defense

    @defense.setter
    def defense(self, defense: str | Defense) -> None:
        self._requested.request(self.args, defense)

    @property
    def shared_names(self) -> list[str]:
        """The parameters that a message would be of now: withheld and frozen ones are not."""
        return list(self._shared(self.model))

    def before_training(self) -> None:
        """Check and prepare what was asked for. Clients forget what they remember if arguments,
        defense, model or data changed since the last training.
        """
        if isinstance(self.args, GradGuardConfig) and self._requested.changed(self.args):
            self.args.check()
        self._requested.resolve(self.args)
        forget(self.model)  # its loss may be another now
        self.shared_messages.begin_training()
        self._loss_pass = self.loss_pass()
        self._weights, self._normalizations = self.weights_of_clients(self._loss)
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
            log_protection(self.defense)
            warn_of_statistics(self.model, self._batch_statistics)
        self._withhold = setting(self.args, "withhold") or []
        self._tables = self.agreed_tables()
        self._shared(self.model)  # refuse none, name withheld
        self._host_clients(defense, own_batches)
        self._meter: LeakageMeter | None = None
        if measured.measures:
            self._meter = LeakageMeter(self.args, defense, self._accountant, self.account_file)
        self.asks_for_input = defense.facts.needs_input or measured.measures
        streams = RandomStreams.of_arguments(self.args, self.accelerator.process_index)
        shared = self._share_input_embeddings, self._withhold
        self._messages = self.message_maker(streams, self._meter, self.ledger, *shared)
        self._attempt: Any = (self.private_rows and AttemptsPassingRows(self)) or operator.call
        self.state_guard = state_guard(is_proved(defense), self._batch_statistics)
        self._messages.state_guard = self.state_guard
        self._requested.bind(self.args, objects)

    def _shared(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """What is shared of a model, as far as it is known: tables are found at the first batch."""
        return shared_parameters(module, self._share_input_embeddings, self._withhold)

    def _host_clients(self, defense: Defense, own_batches: bool) -> None:
        """Each client that lives on this rank gets a defense of its own, and rows of its own where
        the defense or `num_clients` asks for that.
        """
        ranks = self.accelerator.num_processes
        self.remove_callback(PrivateRows)
        self.private_rows = None
        if is_proved(self.defense):
            self.private_rows = private_rows_of(
                self, own_batches, lambda: self._clients, self._privacy_account, self.account_file
            )
        # Each sample's loss is its own mean then; counts of labels would tell of the rows.
        self.counts_items = self.private_rows is None
        self._rows_of_clients: list[Rows] = []
        if self.private_rows is None and setting(self.args, "num_clients") is not None:
            self._rows_of_clients = divide(self.train_dataset, self.args, ranks)
        elif self.private_rows is not None:
            self._privacy_account = self.private_rows.account  # kept under other settings, too
            self._rows_of_clients = self.private_rows.rows_of_clients
            self.add_callback(self.private_rows)
        if self._rows_of_clients:
            self._check_drawing()
        per_process = setting(self.args, "clients_per_process")
        hosted = len(self._rows_of_clients) // ranks or per_process
        if hosted > 1:
            check_collator(self.data_collator)
        self._clients = [Client(defense) for _ in range(hosted)]

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-batch: differentiate, protect and accumulate locally; average over ranks when a
        step is due.
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
                    self.begin_message()
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

    def _agree_on_tables(self, module: nn.Module, turn: ClientBatch, mean_loss: Any) -> None:
        self._tables.agree(module, turn.batch, mean_loss, self._secure)

    def _loss(self, module: nn.Module, batch: dict[str, Any], items: float | None) -> Tensor:
        """The Trainer's own loss, which a subclass may have overridden."""
        count = None if items is None else torch.tensor(items, device=self.args.device)
        with self.compute_loss_context_manager(), self._loss_pass():
            return self.compute_loss(module, dict(batch), num_items_in_batch=count)

    def _turns_of(
        self, module: nn.Module, inputs: dict[str, Any], normalization: Normalization
    ) -> tuple[list[ClientBatch], Spread]:
        """What of a rank's batch is whose, how much it counts, and the spread of `Weights`."""
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

    def describe_message(self) -> dict[str, str]:
        """How a message would be shared now, for the card."""
        return sharing(self)

    def average_over_ranks(self, number: Tensor) -> None:
        """Of losses and counts, which the stock Trainer gathers from every rank."""
        average([number], self.accelerator, self._secure)

    def get_train_dataloader(self) -> DataLoader:
        """As in `Trainer`; with `num_clients`, of the clients that each step draws."""
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
        """As before; what a `RowSampler` draws at a time is a batch."""
        batch_size = 1 if isinstance(sampler, RowSampler) else batch_size
        return super().loader_of(dataset, sampler, batch_size)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`, once before each optimizer step: settings may not change within a
        training. Where rows are of clients, batches must say whose.
        """
        self._requested.check_unchanged(self.args)
        batches, count = super().get_batch_samples(*args, **kwargs)
        if batches and self.ledger.strangers:
            inputs = dict(self._prepare_inputs(batches[0]))
            self.ledger.check_strangers(self.model, inputs, self._loss)
        if self._rows_of_clients and any(CLIENT not in batch for batch in batches):
            raise refusal("rows-of-no-client")
        return batches, count

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As in `Trainer`; not of private rows, whose tokens it would tell."""
        return 0 if self.private_rows is not None else int(super().floating_point_ops(inputs))

    def training_collator(self, collate: Any) -> Any:
        """With `num_clients` batches say whose the rows are, and with an accountant which ones."""
        collate = collate if len(self._clients) == 1 else WholeCollator(collate)
        if self._rows_of_clients:
            if self.private_rows is None:
                return ClientCollator(collate)
            check = CouplingCheck(self.train_dataset, collate)
            trial = RowTrial(self.train_dataset, collate, getattr(self.model, "config", None))
            return PassingCollator(collate, check, trial)
        return collate if self.accountant is None else NumberedCollator(collate)

    def training_data(self, dataset: Any) -> Any:
        """With an accountant, rows that know their number."""
        numbered = self._rows_of_clients or self.accountant is None
        return dataset if numbered else NumberedRows(dataset)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with the defense's metrics, and ε so far, beside the training loss, and
        the last ones beside the summary.
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

    def before_saving(self) -> None:
        """Log leakage metrics, so that a checkpoint of the same step holds them; where the loss is
        logged they stand beside it.
        """
        if self._meter is None or self.control.should_log:
            return
        counts = self._meter.metric_counts
        if metrics := self._meter.pop_metrics():
            if logs := self._private_metrics.log(self, {}, metrics, counts):
                super().log(logs)
            self._private_metrics.remember(self.state, beside=False)

    @property
    def accountant(self) -> FisherAccountant | None:
        """What this rank has shared about each of its examples. Private to the rank."""
        return self._accountant

    def save_state_of_rank(self, folder: str) -> None:
        """What a defense remembers belongs in a checkpoint: a run that is killed and resumed goes
        on as if it had not been.
        """
        state = self._clients, self.accountant, self._labels.key, self._run_record()
        save_private_state(folder, self.accelerator.process_index, *state)

    def load_state_of_rank(self, folder: str) -> None:
        """What `save_state_of_rank` wrote, and what left this rank after it.

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
                self._privacy_account = self._privacy_account or PrivacyAccount()
                resume_epsilon(self._privacy_account, saved.privacy, records)
            if self.private_rows is not None:
                self.private_rows.resume(saved.transcript, records, is_only)
        releases = [entry["release"] for entry in records if "release" in entry]
        load_private_state(
            folder, rank, self._clients, self.accountant, self.args.device, self._labels.key,
            record, releases,
        )  # fmt: skip
        self.shared_messages.load_state_dict(None if saved is None else saved.shared)

    def resume_account(self) -> None:
        """As in `TrainerAdapter`, of the run that wrote to the output folder last."""
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
        """Where what leaves this rank is written down before."""
        return AccountFile(str(self.args.output_dir), self.args.process_index)

    @property
    def _has_account(self) -> bool:
        return self.private_rows is not None or self.accountant is not None

    def _run_record(self, run: str | None = None) -> RunRecord:
        """What is asked for now, as a private file of that run, or this one, would say it."""
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

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with a section on what was protected and what was not."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            complete_card(self)
