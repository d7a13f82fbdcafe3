"""The policy of who may see which number of a training's log (`LogPolicy`).

The loss of one text identifies it to anybody who knows the model. So do TRL's log-probabilities,
and the parts of a loss that sentence-transformers logs. Two figures of true gradients, to 16
digits, identify a sentence among hundreds, whatever noise its message has. So there are four kinds
of numbers:

- Numbers that no batch decides, or that all ranks have anyway, are shown to everybody.
- Figures of training batches leave a rank as means over at least 50 messages.
- Counters leave it every 50 messages at most, since two of them tell what was between them.
- Metrics of true gradients leave it only if `private_metrics="log"` asks for it. Then others get
  two digits of means over at least 50 messages. Two digits of one message would tell too much:
  under noise of a known strength, ‖noise‖/‖g‖ says how large that message's gradient was.

The rank's own console and its history in memory have all numbers, and the console has two digits of
those of gradients. Checkpoints have them as well, but they are private, and pushing them is
refused. Trackers, model cards and uploaded files have only what may leave. So has a console whose
output a tracker uploads. While a tracker's callback runs, its `state.log_history` is the public
one.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from .config import setting
from .privacy.proofs import is_noise_known

logger = logging.get_logger(__name__)

LEAST_MESSAGES = 50
"""The least number of messages that a figure which leaves the rank is a mean of."""
DIGITS = 2
"""The number of digits of a metric of true gradients, wherever it is shown."""
MESSAGES = "shared_messages"
"""The name, in the history in memory, of how many messages all ranks shared since the last entry.
"""
MESSAGES_OF_RUN = "shared_messages_of_run"
"""The name of how many were shared since training began or was resumed, beside the summary."""


PUBLISHED = "published_metrics"
"""The mark of an entry whose metrics of true gradients are means that others have, too."""


class Kind(Enum):
    """The kinds of numbers in a training's log, by what they tell of."""

    NO_BATCH = "nothing that a single message tells: everybody sees it"
    BATCHES = "training batches: others see means over 50 messages"
    COUNTER = "all messages so far: others see it after 50 more"
    GRADIENTS = "true gradients: the rank's own"


_KINDS = {
    Kind.NO_BATCH: frozenset(
        {"step", "epoch", "learning_rate", "train_runtime"}
        | {"train_samples_per_second", "train_steps_per_second"}
        | {"grad_norm"}  # of the mean of messages, which all ranks have
        | {"defense/seconds", "defense/noise_scale", "defense/client_noise_multiplier"}
        | {"defense/epsilon", "defense/epsilon_secret_positions"}
    ),
    Kind.COUNTER: frozenset(
        {"total_flos", "num_input_tokens_seen", "num_tokens"}
        | {"train_tokens_per_second", "train_tokens_per_second_per_gpu"}
    ),
}
_CLAIMS = frozenset(
    {"defense/epsilon", "defense/epsilon_secret_positions", "defense/client_noise_multiplier"}
)
"""The figures that claim a proof. They are not logged if somebody may know the noise."""
_CONSOLES = frozenset(
    {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "RichProgressCallback"}
)
_UPLOAD_CONSOLES = frozenset(
    {"WandbCallback", "CometCallback", "ClearMLCallback", "NeptuneCallback", "SwanLabCallback"}
)


def kind_of(name: str) -> Kind:
    """Return which kind of number a log's name stands for.

    An unknown name is taken for a figure of training batches. An unknown name of a defense's metric
    is taken for one of true gradients.

    Example:
        >>> kind_of("loss").name, kind_of("defense/cosine").name, kind_of("epoch").name
        ('BATCHES', 'GRADIENTS', 'NO_BATCH')
    """
    for kind, names in _KINDS.items():
        if name in names:
            return kind
    return Kind.GRADIENTS if name.startswith(("defense/", "leakage/")) else Kind.BATCHES


@dataclass(frozen=True)
class LogPolicy:
    """A policy of who may see which number of a training's log.

    Args:
        messages_per_step: The number of messages that all ranks share in a step. It is used for
            entries that do not state theirs.
        publishes_metrics: Whether others get means of metrics of true gradients.
        is_unprotected: Whether trackers get each log as it is, because messages are shared as they
            are, too.
        hides_rows: Whether an ε counts on nobody knowing how many rows were drawn and clipped, and
            how long that took. If so, no defense's metrics are shown to anybody.
        is_noise_known: Whether somebody may know the noise. If so, no log claims a proof.

    Example:
        >>> log = [{"loss": 2.0, "step": 20}, {"loss": 1.0, "step": 60}]
        >>> LogPolicy(messages_per_step=1).public_history(log)
        [{'step': 20}, {'loss': 1.333, 'step': 60}]
        >>> LogPolicy(messages_per_step=4).public_history(log) == log
        True
    """

    messages_per_step: int
    publishes_metrics: bool = False
    is_unprotected: bool = False
    hides_rows: bool = False
    is_noise_known: bool = False

    @classmethod
    def of_trainer(cls, trainer: Any) -> LogPolicy:
        """Return the policy that follows from a protected Trainer as it is now.

        Args:
            trainer: A Trainer with `defense`, `messages_per_step`, `private_rows` and
                `shared_messages`.
        """
        return cls(
            trainer.messages_per_step,
            setting(trainer.args, "private_metrics") == "log",
            trainer.defense.name == "none",
            trainer.private_rows is not None,
            is_noise_known(trainer),
        )

    def measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a message's metrics without those that nobody may see.

        Args:
            metrics: The metrics of the defense and of the meter, by name.
        """
        hidden = ("defense/",) if self.hides_rows else ()
        return {
            name: value
            for name, value in metrics.items()
            if not name.startswith(hidden) and not (self.is_noise_known and name in _CLAIMS)
        }

    def public_history(self, history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a log as others may see it.

        Args:
            history: The entries of a `trainer.state.log_history`.
        """
        return PooledLogs(self.messages_per_step).add_all(history)

    def public_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of `trainer_state.json` as others may see it: a push uploads it.

        Args:
            saved: The content that the Trainer writes.
        """
        history, counted = self.public_history(saved["log_history"]), {}
        for name in ("total_flos", "num_input_tokens_seen"):
            shown = [entry[name] for entry in history if name in entry]
            counted[name] = shown[-1] if shown else 0
        return {
            **saved,
            **counted,
            "log_history": [entry for entry in history if entry.keys() != {"step"}],
        }

    def public_summary(
        self, metrics: Mapping[str, Any], history: Iterable[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a training's metrics as others may see them: a push uploads the file of them.

        Args:
            metrics: The metrics that `train()` or an evaluation returned.
            history: The entries of `trainer.state.log_history`.
        """
        history = list(history)
        logged = [entry for entry in history if "train_loss" in entry]
        if not logged or "train_loss" not in metrics:
            return dict(metrics)
        public = [e for e in self.public_history(history) if "train_runtime" in e][-1]
        return {
            name: public.get(name, value)
            for name, value in metrics.items()
            if name in public or name not in logged[-1]
        }

    def shows_all(self, callback: TrainerCallback, callbacks: Iterable[TrainerCallback]) -> bool:
        """Return whether a callback may see all numbers.

        It may if it prints on the rank's own console, and no tracker uploads that.

        Args:
            callback: One of the Trainer's callbacks.
            callbacks: All of the Trainer's callbacks.
        """
        return is_console(callback) and not uploads_console(callbacks)


class PooledLogs:
    """A log whose figures of training batches are means over at least 50 messages.

    An entry over fewer messages has no such figure, and counts for the next entry.

    Args:
        messages_per_step: The number of messages that all ranks share in a step. It is used for
            entries that do not state theirs.

    Example:
        >>> logs = PooledLogs(messages_per_step=1)
        >>> logs.add({"loss": 2.0, "learning_rate": 0.1, "step": 20})
        {'learning_rate': 0.1, 'step': 20}
        >>> logs.add({"loss": 1.0, "learning_rate": 0.1, "step": 60})
        {'loss': 1.333, 'learning_rate': 0.1, 'step': 60}
    """

    def __init__(self, messages_per_step: int) -> None:
        self._per_step = messages_per_step
        self._step = self._messages = 0
        self._at_loss = 0  # after how many messages the last loss was logged
        self._logged: dict[str, int] = {}  # after how many each figure was logged last
        self._shown: dict[str, int] = {}  # after how many each counter was shown last
        self._sums: dict[str, tuple[float, int]] = {}  # figures not shown yet: (sum, messages)
        self._losses = 0.0, 0  # losses that were shown: (sum, messages)
        self._as_logged = True  # whether no loss was withheld or merged

    def add(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add the next entry, and return it as others may see it.

        Args:
            entry: An entry of `trainer.state.log_history`.
        """
        messages, of_run = entry.get(MESSAGES), entry.get(MESSAGES_OF_RUN)
        notes = (MESSAGES, MESSAGES_OF_RUN, PUBLISHED)
        shown = {name: value for name, value in entry.items() if name not in notes}
        if not is_of_training(entry):
            return shown
        step = entry.get("step", self._step)
        self._messages += (step - self._step) * self._per_step if messages is None else messages
        self._step = step
        of_run = self._messages if of_run is None else of_run
        for name, value in list(shown.items()):
            if name == "train_loss":
                public = self._summarized(value, of_run)
            elif (kind := kind_of(name)) is Kind.COUNTER:
                public = self._counter(name, value)
            elif kind is Kind.BATCHES:
                public = self._mean(name, value)
            else:
                continue  # PrivateMetrics decides which metrics of gradients are logged
            if public is None:
                del shown[name]
            else:
                shown[name] = public
        if "loss" in entry:
            self._at_loss = self._messages
        return shown

    def add_all(self, history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of a history as others may see them.

        Metrics of true gradients are left out unless they were published as means.

        Args:
            history: The entries of `trainer.state.log_history`.
        """
        shown = [(entry, self.add(entry)) for entry in history]
        return [
            public if entry.get(PUBLISHED) else without_gradients(public) for entry, public in shown
        ]

    def _mean(self, name: str, value: Any) -> float | None:
        if not isinstance(value, int | float):
            return None
        # A figure counts the messages since the last loss, or since its own last entry if that was
        # later.
        count = self._messages - max(self._logged.get(name, 0), self._at_loss)
        self._logged[name] = self._messages
        total, pooled = self._sums.pop(name, (0.0, 0))
        total, pooled = total + count * value, pooled + count
        if pooled < LEAST_MESSAGES:
            self._sums[name] = total, pooled
            return None
        shown = value if pooled == count else float(f"{total / pooled:.4g}")
        if name == "loss":
            self._as_logged = self._as_logged and pooled == count
            self._losses = self._losses[0] + pooled * shown, self._losses[1] + pooled
        return shown

    def _counter(self, name: str, value: Any) -> Any:
        if self._messages - self._shown.get(name, 0) < LEAST_MESSAGES:
            return None
        self._shown[name] = self._messages
        return value

    def _summarized(self, value: float, of_run: int) -> float | None:
        """Return the mean loss of a run, without messages that no shown loss covers.

        With them, the difference from the shown losses would be theirs alone.
        """
        total, shown = self._losses
        if not shown or (self._as_logged and shown == self._messages):
            return value if of_run >= LEAST_MESSAGES else None
        return float(f"{total / shown:.4g}")


def is_of_training(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a log is about training batches.

    An evaluation's entry and a user's own are not.

    Example:
        >>> is_of_training({"loss": 0.5}), is_of_training({"eval_loss": 0.5})
        (True, False)
    """
    return "loss" in entry or "train_loss" in entry or any(n.startswith("leakage/") for n in entry)


class PrivateMetrics:
    """A store of a rank's metrics of true gradients, from one log to the next.

    Example:
        >>> metrics = PrivateMetrics()
        >>> metrics.rounded({"defense/cosine": 0.123456})
        {'defense/cosine': 0.12}
    """

    def __init__(self) -> None:
        self._pending: dict[str, float] = {}
        self._sums: dict[str, tuple[float, int]] = {}  # metrics not logged yet: (sum, messages)
        self._messages = 0
        self._is_published = False

    def rounded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Round metrics to two significant digits."""
        return {name: float(f"{value:.{DIGITS}g}") for name, value in metrics.items()}

    def log(
        self,
        trainer: Any,
        logs: dict[str, float],
        metrics: Mapping[str, float],
        counts: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """Keep metrics, and show them where the policy allows it.

        The policy allows means of them in the log itself, or rounded ones on this rank's console.

        Args:
            trainer: The Trainer whose callbacks print, and whose `log_policy` applies.
            logs: The log. Metrics that it may show are added to it.
            metrics: The metrics since the last log, by name.
            counts: The number of messages that a metric is a mean of, by name, where it is not that
                of all messages since the last log.

        Returns:
            `logs`.
        """
        policy: LogPolicy = trainer.log_policy
        if policy.publishes_metrics:
            shown = self.means(metrics, trainer.shared_messages.total, counts)
            self._is_published = any(kind_of(name) is Kind.GRADIENTS for name in shown)
            logs.update(shown)
            return logs
        self._pending = dict(metrics)
        shown = {n: v for n, v in metrics.items() if kind_of(n) is Kind.GRADIENTS}
        logs.update({n: v for n, v in metrics.items() if n not in shown})
        callbacks = trainer.callback_handler.callbacks
        for callback in callbacks if shown else ():
            is_printed = isinstance(callback, PrinterCallback | ProgressCallback)
            if is_printed and policy.shows_all(callback, callbacks):
                callback.on_log(
                    trainer.args, trainer.state, trainer.control, logs=self.rounded(shown)
                )
        return logs

    def means(
        self,
        metrics: Mapping[str, float],
        messages: int,
        counts: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """Return the metrics that may leave the rank now.

        A metric of true gradients is shown as a mean since it was last shown, to two digits, once
        that covers 50 messages. All other metrics are returned as they are.

        Args:
            metrics: The metrics since the last call, by name.
            messages: The number of messages that the rank has shared so far.
            counts: The number of messages of some metrics, as for `log`.

        Example:
            >>> private = PrivateMetrics()
            >>> private.means({"defense/cosine": 0.5}, messages=30)
            {}
            >>> private.means({"defense/cosine": 0.2}, messages=60)
            {'defense/cosine': 0.35}
        """
        since, self._messages = messages - self._messages, messages
        shown = {n: v for n, v in metrics.items() if kind_of(n) is not Kind.GRADIENTS}
        for name in metrics.keys() - shown.keys():
            count = since if counts is None else counts.get(name, since)
            total, pooled = self._sums.pop(name, (0.0, 0))
            total, pooled = total + count * metrics[name], pooled + count
            if pooled < LEAST_MESSAGES:
                self._sums[name] = total, pooled
            else:
                shown |= self.rounded({name: total / pooled})
        return shown

    def remember(self, state: TrainerState, beside: bool = True) -> None:
        """Add the metrics that callbacks did not get to the history in memory.

        Args:
            state: The Trainer's state, which holds the history.
            beside: Whether they belong to the last entry; otherwise they become one of their own.
        """
        if self._pending and not beside:
            state.log_history.append({"step": state.global_step})
        if self._pending:
            state.log_history[-1].update(self._pending)
        if self._is_published:
            state.log_history[-1][PUBLISHED] = True
        self._pending, self._is_published = {}, False


class PoolingHandler(CallbackHandler):
    """A handler of a Trainer's callbacks that shows each callback only what it may see.

    The rank's own console gets each log as it is. All other callbacks get the public log.

    Args:
        handler: The Trainer's handler of callbacks.
        messages: A function that returns how many messages all ranks have shared.
        policy: A function that returns the policy, as the Trainer's arguments are now.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> type(GradGuardTrainer(model, defense="pruning").callback_handler).__name__
        'PoolingHandler'
    """

    def __init__(
        self,
        handler: CallbackHandler,
        messages: Callable[[], int],
        policy: Callable[[], LogPolicy],
    ) -> None:
        models = handler.model, handler.processing_class
        super().__init__(handler.callbacks, *models, handler.optimizer, handler.lr_scheduler)
        self._messages, self._policy = messages, policy
        self._pool = PooledLogs(1)  # entries state their messages, so this number is not used
        self._shown: list[dict[str, Any]] = []
        self._counted = self._begun = 0

    def _begin(self, history: Iterable[Mapping[str, Any]]) -> None:
        self._pool = PooledLogs(self._policy().messages_per_step)
        self._shown = self._pool.add_all(history)
        self._counted = self._begun = self._messages()

    def on_train_begin(self, args: Any, state: Any, control: Any) -> Any:
        """Call callbacks as `CallbackHandler` does.

        The means of a resumed run go on where its log ended.
        """
        self._begin(state.log_history)
        return super().on_train_begin(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        """Call callbacks as `CallbackHandler` does, each with the log that it may see."""
        control.should_log = False
        entry = state.log_history[-1]
        if is_of_training(entry):
            total = self._messages()
            entry[MESSAGES], self._counted = total - self._counted, total
            if "train_loss" in entry:
                entry[MESSAGES_OF_RUN] = total - self._begun
        pooled = self._pool.add(entry)
        self._shown.append(pooled)
        public = {name: pooled[name] for name in logs if name in pooled}
        return self.call_event("on_log", args, state, control, public, logs=logs, **kwargs)

    def call_event(
        self,
        event: str,
        args: Any,
        state: Any,
        control: Any,
        public_logs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call callbacks as `CallbackHandler` does, each with logs and a history that it may see.

        Args:
            event: The name of the callbacks' method.
            args: The training arguments.
            state: The Trainer's state.
            control: The control flags, which callbacks may change.
            public_logs: The logs that all but the rank's own console see. It is given for `on_log`.
            **kwargs: All other arguments of the event.
        """
        policy = self._policy()
        if policy.is_unprotected:
            return super().call_event(event, args, state, control, **kwargs)
        public = kwargs if public_logs is None else kwargs | {"logs": public_logs}
        shows_all = lambda callback: policy.shows_all(callback, self.callbacks)  # noqa: E731
        for sees_all, callbacks in itertools.groupby(self.callbacks, shows_all):
            audience, shown = copy.copy(self), kwargs if sees_all else public
            audience.callbacks = list(callbacks)
            with nullcontext() if sees_all else self._public_history(state):
                control = CallbackHandler.call_event(audience, event, args, state, control, **shown)
        return control

    @contextmanager
    def _public_history(self, state: TrainerState) -> Iterator[None]:
        """Replace a state's history by the public one meanwhile.

        Entries that are added meanwhile are added to the whole history, too.
        """
        history, shown = state.log_history, list(self._shown)
        state.log_history, count = shown, len(shown)
        try:
            yield
        finally:
            state.log_history = history
            history.extend(shown[count:])


def without_gradients(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a log without metrics of true gradients.

    Example:
        >>> without_gradients({"loss": 0.5, "defense/cosine": 0.1})
        {'loss': 0.5}
    """
    return {name: v for name, v in entry.items() if kind_of(name) is not Kind.GRADIENTS}


def without_rows(card: Any, widget: list[Any], examples: Any) -> None:
    """Take training rows, and figures of them, out of a model card of sentence-transformers.

    It writes three rows of each data set there, and as many texts to try the model on.

    Args:
        card: The model's `model_card_data`.
        widget: The texts to try the model on, as they were before the Trainer read its data.
        examples: The examples of how to use the model, as they were before that.

    Example:
        >>> from types import SimpleNamespace
        >>> data = [{"name": "mine", "size": 9, "examples": {"text": ["secret"]}}]
        >>> card = SimpleNamespace(widget=[{"text": "secret"}], train_datasets=data)
        >>> without_rows(card, widget=[], examples=None)
        >>> card.widget, card.train_datasets
        ([], [{'name': 'mine', 'size': 9}])
    """
    card.widget, card.usage_examples, card.usage_examples_display = widget, examples, None
    for name in ("train_datasets", "eval_datasets"):
        public = [
            {key: value for key, value in about.items() if key in _OF_DATA_SET}
            for about in getattr(card, name, ())
        ]
        setattr(card, name, public)


_OF_DATA_SET = frozenset({"name", "id", "revision", "split", "size", "columns", "loss"})
"""The entries that a card may have for a data set. Any other, also a future one, may show rows."""


def uploads_console(callbacks: Iterable[TrainerCallback]) -> str:
    """Return the name of the tracker that uploads what a rank prints; an empty text if none does.

    If one does, the console is no place for figures of single messages.

    Example:
        >>> from transformers import PrinterCallback
        >>> uploads_console([PrinterCallback()])
        ''
    """
    kinds = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    for name in _UPLOAD_CONSOLES & kinds:
        if name != "WandbCallback" or os.getenv("WANDB_CONSOLE", "").lower() != "off":
            return name
    return ""


def warn_of_uploaded_console(callbacks: Iterable[TrainerCallback]) -> None:
    """Warn once if a tracker uploads what a rank prints.

    Example:
        >>> from transformers import PrinterCallback
        >>> warn_of_uploaded_console([PrinterCallback()])
    """
    if tracker := uploads_console(callbacks):
        logger.warning_once(
            f"{tracker} uploads what is printed, so the console shows what trackers may see: means "
            "over 50 messages. Errors, which may quote a batch, are uploaded too. For wandb set "
            "WANDB_CONSOLE=off."
        )


def is_console(callback: TrainerCallback) -> bool:
    """Return whether a callback prints, by the names of its classes.

    Example:
        >>> is_console(PrinterCallback())
        True
    """
    return not _CONSOLES.isdisjoint(kind.__name__ for kind in type(callback).__mro__)
