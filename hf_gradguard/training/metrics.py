"""What was measured of true gradients: shown on the rank's own console, and to nobody else.

Two figures of 16 digits name a sentence among hundreds, whatever noise its message has. Trackers
upload what is logged, and a push what `save_state` writes. So both are without them. Checkpoints
have them: those are private, and pushing them is refused.

Who asks for them in the log (`private_metrics="log"`) gets two digits of means over 50 messages at
least. Two digits alone do not do: under noise of a known strength, ‖noise‖/‖g‖ of one message says
how large its gradient was.

What a training logs of its batches, as the loss, is logs.py's task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerState

from .config import setting
from .logs import LEAST_MESSAGES, is_of_gradient, pooled_logs
from .privacy.known_seed import without_claims

DIGITS = 2


class PrivateMetrics:
    """Metrics of a rank's messages, by optimizer step.

    Example:
        >>> metrics = PrivateMetrics()
        >>> metrics.rounded({"defense/cosine": 0.123456})
        {'defense/cosine': 0.12}
    """

    def __init__(self) -> None:
        self._pending: dict[str, float] = {}
        self._sums: dict[str, tuple[float, int]] = {}  # for the log: of metrics, and of how many
        self._logged_messages = self._counted_messages = 0

    def rounded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """To two significant digits."""
        return {name: float(f"{value:.{DIGITS}g}") for name, value in metrics.items()}

    def log(
        self, trainer: Any, logs: dict[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Keep metrics, and show them where the arguments say: in the log itself, or rounded on
        this rank's console.

        Args:
            trainer: Whose callbacks print.
            logs: What is logged; gets what is of no gradient, or all of them.
            metrics: Since the last log.

        Returns:
            `logs`.
        """
        metrics = without_claims(trainer, metrics)
        if setting(trainer.args, "private_metrics") == "log":
            logs.update(self.means(metrics, trainer.shared_messages.total))
            return logs
        self._pending = dict(metrics)
        logs.update({name: metrics[name] for name in metrics if _is_public(name)})
        shown = {name: value for name, value in metrics.items() if name not in logs}
        handler = trainer.callback_handler
        for callback in handler.callbacks if shown else ():
            is_printed = isinstance(callback, PrinterCallback | ProgressCallback)
            if is_printed and handler.sees_all(callback):
                callback.on_log(
                    trainer.args, trainer.state, trainer.control, logs=self.rounded(shown)
                )
        return logs

    def means(self, metrics: Mapping[str, float], messages: int) -> dict[str, float]:
        """Means of metrics since the last ones, to two digits; nothing but those of no gradient
        while they are of too few messages.

        Args:
            metrics: Of the messages since this was asked last.
            messages: How many there were of the rank in all.

        Example:
            >>> private = PrivateMetrics()
            >>> private.means({"defense/cosine": 0.5}, messages=30)
            {}
            >>> private.means({"defense/cosine": 0.2}, messages=60)
            {'defense/cosine': 0.35}
        """
        count, self._counted_messages = messages - self._counted_messages, messages
        for name, metric in metrics.items():
            total, counted = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + count * metric, counted + count
        shown = {name: metrics[name] for name in metrics if _is_public(name)}
        if messages - self._logged_messages < LEAST_MESSAGES:
            return shown
        sums, self._sums, self._logged_messages = self._sums, {}, messages
        return self.rounded({name: total / max(n, 1) for name, (total, n) in sums.items()}) | shown

    def remember(self, state: TrainerState, beside: bool = True) -> None:
        """Add what callbacks did not get to the history in memory: to its last entry, or as one."""
        if self._pending and not beside:
            state.log_history.append({"step": state.global_step})
        if self._pending:
            state.log_history[-1].update(self._pending)
        self._pending = {}


def without_private_metrics(
    trainer_state: Path, messages_per_step: int, keeps_metrics: bool = False
) -> None:
    """Rewrite a saved state without metrics of true gradients, and with figures of many messages.

    Args:
        trainer_state: The file.
        messages_per_step: Of all ranks.
        keeps_metrics: Whether its metrics are means of many messages already.
    """
    saved = json.loads(trainer_state.read_text(encoding="utf-8"))
    history = pooled_logs(saved["log_history"], messages_per_step)
    for name in ("total_flos", "num_input_tokens_seen"):
        shown = [entry[name] for entry in history if name in entry]
        saved[name] = shown[-1] if shown else 0
    if not keeps_metrics:
        history = [
            {name: value for name, value in entry.items() if not is_of_gradient(name)}
            for entry in history
        ]
    saved["log_history"] = [entry for entry in history if entry.keys() != {"step"}]
    trainer_state.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_public(name: str) -> bool:
    return name.startswith("defense/") and not is_of_gradient(name)
