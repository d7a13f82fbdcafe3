"""Audits of what a server could read from a model's shared gradients, under each defense.

Example:
    defenses = ["optimal_noise:relative_scale=1"]
    result = audit(model, tokenizer, samples, defenses, "tag:steps=500", output="runs/audit")
    summarize(result).verdicts
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..extras import need

if TYPE_CHECKING:
    from .attributes import InferredAttribute, infer_attributes
    from .cells import Audit
    from .command import run_audit as run_audit
    from .report.page import markdown_table, write_report
    from .report.summary import Summary, summarize
    from .run import audit
    from .settings import AuditSettings
    from .words import word_distinguishability

__all__ = [
    "Audit",
    "AuditSettings",
    "InferredAttribute",
    "Summary",
    "audit",
    "infer_attributes",
    "markdown_table",
    "summarize",
    "word_distinguishability",
    "write_report",
]

_EXPORTS = {
    "Audit": ".cells",
    "AuditSettings": ".settings",
    "InferredAttribute": ".attributes",
    "Summary": ".report.summary",
    "audit": ".run",
    "infer_attributes": ".attributes",
    "markdown_table": ".report.page",
    "run_audit": ".command",
    "summarize": ".report.summary",
    "word_distinguishability": ".words",
    "write_report": ".report.page",
}


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that the command line's help imports no torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need("audit", "attacks", "jinja2", "PIL")
    return getattr(importlib.import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
