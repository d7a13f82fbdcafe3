"""What leaves a rank by its log: figures of training batches as means over many messages.

The loss of one text names it, to who knows the model; so do TRL's log-probabilities and the parts
of a loss that sentence-transformers logs. Trackers, cards and files that a push uploads get means.
The rank's own console, and `trainer.state.log_history` in memory, have them as they are; while
another callback runs, its `state.log_history` has what it may see, and so has a console whose
output a tracker uploads.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

logger = logging.get_logger(__name__)


LEAST_MESSAGES = 50
"""Messages that a figure which leaves the rank is a mean of, at least."""
MESSAGES = "shared_messages"
"""In the history in memory: of all ranks, since the last entry of a training."""
MESSAGES_OF_RUN = "shared_messages_of_run"
"""Beside the summary: since training began or was resumed, as its loss is."""
_CONSOLES = frozenset(
    {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "RichProgressCallback"}
)
_UPLOAD_CONSOLES = frozenset(
    {"WandbCallback", "CometCallback", "ClearMLCallback", "NeptuneCallback", "SwanLabCallback"}
)
_CONSOLE = (
    "{} uploads what is printed, so the console shows what trackers may see: means over 50 "
    "messages. Errors, which may quote a batch, are uploaded too. For wandb set WANDB_CONSOLE=off."
)
_OF_NO_BATCH = frozenset(
    {"step", "epoch", "learning_rate", "grad_norm", "train_runtime"}
    | {"train_samples_per_second", "train_steps_per_second"}
)
"""`grad_norm` is of the mean of messages, which all ranks have."""
_OF_NO_GRADIENT = frozenset(
    {"defense/seconds", "defense/noise_scale", "defense/client_noise_multiplier"}
    | {"defense/epsilon", "defense/epsilon_secret_positions"}
)
COUNTERS = frozenset(
    {"total_flos", "num_input_tokens_seen", "num_tokens"}
    | {"train_tokens_per_second", "train_tokens_per_second_per_gpu"}
)
"""Sums over all messages so far: two of them tell the tokens of those between."""


class PooledLogs:
    """The entries of a log, whose figures of training batches are means over 50 messages at least:
    an entry of fewer has none, and counts for the next one.

    Args:
        messages_per_step: Of all ranks, for entries that do not say how many they are of.

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
        self._logged: dict[str, int] = {}  # after how many messages each figure was logged
        self._shown: dict[str, int] = {}  # and each counter shown
        self._sums: dict[str, tuple[float, int]] = {}  # not shown yet: sum, messages
        self._losses = 0.0, 0  # of the losses shown: their sum, messages
        self._as_logged = True  # no loss was withheld or merged

    def add(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The next entry, as others may see it.

        Args:
            entry: As in `trainer.state.log_history`.
        """
        messages, of_run = entry.get(MESSAGES), entry.get(MESSAGES_OF_RUN)
        shown = {n: v for n, v in entry.items() if n not in (MESSAGES, MESSAGES_OF_RUN)}
        if not is_of_training(entry):
            return shown
        step, before = entry.get("step", self._step), self._messages
        self._messages += (step - self._step) * self._per_step if messages is None else messages
        self._step = step
        of_run = self._messages if of_run is None else of_run
        for name, value in list(shown.items()):
            if name == "train_loss":
                public = self._summarized(value, of_run)
            elif name in COUNTERS:
                public = self._counter(name, value)
            elif name in _OF_NO_BATCH or name.startswith(("defense/", "leakage/")):
                continue  # figures of gradients are another's task: see metrics.py
            else:
                public = self._mean(name, value, before)
            if public is None:
                del shown[name]
            else:
                shown[name] = public
        return shown

    def _mean(self, name: str, value: Any, before: int) -> float | None:
        if not isinstance(value, int | float):
            return None
        count = self._messages - self._logged.get(name, before)
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
        """The mean of a run, but for messages of which the losses shown do not tell: the
        difference would be theirs.
        """
        total, shown = self._losses
        if not shown or (self._as_logged and shown == self._messages):
            return value if of_run >= LEAST_MESSAGES else None
        return float(f"{total / shown:.4g}")


def is_of_gradient(name: str) -> bool:
    """Whether a metric is of true gradients.

    Example:
        >>> is_of_gradient("defense/cosine"), is_of_gradient("defense/epsilon")
        (True, False)
    """
    return name.startswith(("defense/", "leakage/")) and name not in _OF_NO_GRADIENT


def is_of_training(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is of training batches, and not of an evaluation or a user's own.

    Example:
        >>> is_of_training({"loss": 0.5}), is_of_training({"eval_loss": 0.5})
        (True, False)
    """
    return "loss" in entry or "train_loss" in entry or any(n.startswith("leakage/") for n in entry)


def pooled_logs(history: Iterable[Mapping[str, Any]], messages_per_step: int) -> list[Any]:
    """A log as others may see it.

    Args:
        history: As `trainer.state.log_history`.
        messages_per_step: Of all ranks.

    Example:
        >>> log = [{"loss": 2.0, "step": 20}, {"loss": 1.0, "step": 60}]
        >>> pooled_logs(log, messages_per_step=1)
        [{'step': 20}, {'loss': 1.333, 'step': 60}]
        >>> pooled_logs(log, messages_per_step=4) == log
        True
    """
    pool = PooledLogs(messages_per_step)
    return [pool.add(entry) for entry in history]


class PoolingHandler(CallbackHandler):
    """A Trainer's callbacks, of which the rank's own console gets each log as it is, and all others
    what others may see.

    Args:
        handler: Of the Trainer.
        messages: How many all ranks have shared.
        messages_per_step: Of all ranks.
        is_unprotected: Whether trackers get each log, too, since messages are shared as they are.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> type(GradGuardTrainer(model, defense="pruning").callback_handler).__name__
        'PoolingHandler'
    """

    def __init__(
        self,
        handler: CallbackHandler,
        messages: Callable[[], int],
        messages_per_step: Callable[[], int],
        is_unprotected: Callable[[], bool],
    ) -> None:
        self.__dict__.update(vars(handler))
        self._messages, self._per_step = messages, messages_per_step
        self._is_unprotected = is_unprotected
        self._begin([])

    def _begin(self, history: Iterable[Mapping[str, Any]]) -> None:
        self._pool = PooledLogs(self._per_step())
        self._shown = [_without_gradients(self._pool.add(entry)) for entry in history]
        self._counted = self._begun = self._messages()

    def on_train_begin(self, args: Any, state: Any, control: Any) -> Any:
        """As in `CallbackHandler`; windows go on where the log of a resumed run ends."""
        self._begin(state.log_history)
        return super().on_train_begin(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        """As in `CallbackHandler`, of what each callback may see."""
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
        """As in `CallbackHandler`, with logs and a history that each callback may see.

        Args:
            event: The callbacks' method.
            args: Training arguments.
            state: Of the Trainer.
            control: What callbacks may change.
            public_logs: Of `on_log`: what others than the rank's own console see.
            **kwargs: Of the event.
        """
        if self._is_unprotected():
            return super().call_event(event, args, state, control, **kwargs)
        public = kwargs if public_logs is None else kwargs | {"logs": public_logs}
        for sees_all, callbacks in itertools.groupby(self.callbacks, self.sees_all):
            audience, shown = copy.copy(self), kwargs if sees_all else public
            audience.callbacks = list(callbacks)
            with nullcontext() if sees_all else self._public_history(state):
                control = CallbackHandler.call_event(audience, event, args, state, control, **shown)
        return control

    def sees_all(self, callback: TrainerCallback) -> bool:
        """Whether a callback prints on the rank's own console, and no tracker uploads that."""
        return _is_console(callback) and not uploads_console(self.callbacks)

    @contextmanager
    def _public_history(self, state: TrainerState) -> Iterator[None]:
        """A history as others may see it. What is logged meanwhile belongs to the whole one."""
        whole, shown = state.log_history, list(self._shown)
        state.log_history, before = shown, len(shown)
        try:
            yield
        finally:
            state.log_history = whole
            whole.extend(shown[before:])


def _without_gradients(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a run that is resumed, whose metrics of true gradients stay in memory."""
    return {n: v for n, v in entry.items() if not is_of_gradient(n)}


def without_rows(card: Any, widget: list[Any], examples: Any) -> None:
    """Take rows, and figures of them, out of what sentence-transformers writes to a model's card:
    three of each data set, and as many texts to try the model on.

    Args:
        card: The model's `model_card_data`.
        widget: Texts to try, of before the Trainer looked at data.
        examples: Of how to use the model, likewise.

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
        kept = [
            {key: value for key, value in about.items() if key in _OF_DATA_SET}
            for about in getattr(card, name, ())
        ]
        setattr(card, name, kept)


_OF_DATA_SET = frozenset({"name", "id", "revision", "split", "size", "columns", "loss"})
"""What a card may say of a data set. All else, also of a newer version, may show its rows."""


def uploads_console(callbacks: Iterable[TrainerCallback]) -> str:
    """Name the tracker that uploads what a rank prints, if there is one: then the console is no
    place for figures of single messages.

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
    """Say once that a tracker uploads what a rank prints, if one does.

    Example:
        >>> from transformers import PrinterCallback
        >>> warn_of_uploaded_console([PrinterCallback()])
    """
    if tracker := uploads_console(callbacks):
        logger.warning_once(_CONSOLE.format(tracker))


def _is_console(callback: TrainerCallback) -> bool:
    """Tells whether a callback prints, by the names of its classes."""
    return not _CONSOLES.isdisjoint(kind.__name__ for kind in type(callback).__mro__)
