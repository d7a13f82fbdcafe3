"""What was measured of true gradients: shown on the rank's own console, and to nobody else.

Two figures of 16 digits name a sentence among hundreds, whatever noise its message has. Trackers
upload what is logged, and a push what `save_state` writes. So both are without them. Checkpoints
have them: those are private, and pushing them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from .config import setting

DIGITS = 2
_PRIVATE = ("defense/", "leakage/")
_OF_NO_GRADIENT = ("defense/seconds", "defense/noise_scale", "defense/client_noise_multiplier")


class PrivateMetrics:
    """Metrics of a rank's messages, by optimizer step.

    Attributes:
        history: All of them, in full.

    Example:
        >>> metrics = PrivateMetrics()
        >>> metrics.rounded({"defense/cosine": 0.123456})
        {'defense/cosine': 0.12}
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def rounded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """To two significant digits."""
        return {name: float(f"{value:.{DIGITS}g}") for name, value in metrics.items()}

    def log(self, trainer: Any, logs: dict[str, float], metrics: Mapping[str, float]) -> None:
        """Keep metrics, and show them where the arguments say: in the log itself, or rounded on
        this rank's console.

        Args:
            trainer: Whose callbacks print.
            logs: What is logged; gets what is of no gradient, or all of them.
            metrics: Since the last log.
        """
        self.history.append({**metrics, "step": trainer.state.global_step})
        if setting(trainer.args, "private_metrics") == "log":
            logs.update(metrics)
            return
        trainer.state.log_history.append(self.history[-1])
        logs.update({name: metrics[name] for name in _OF_NO_GRADIENT if name in metrics})
        shown = {name: value for name, value in metrics.items() if name not in logs}
        for callback in trainer.callback_handler.callbacks if shown else ():
            if isinstance(callback, PrinterCallback | ProgressCallback):
                callback.on_log(
                    trainer.args, trainer.state, trainer.control, logs=self.rounded(shown)
                )


def without_private_metrics(trainer_state: Path) -> None:
    """Rewrite a saved state without entries of private metrics alone."""
    saved = json.loads(trainer_state.read_text(encoding="utf-8"))
    saved["log_history"] = [
        entry
        for entry in saved["log_history"]
        if any(not name.startswith(_PRIVATE) for name in entry if name != "step")
    ]
    trainer_state.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
