"""Audits: what a server could read from a model's shared gradients, under each defense.

result = audit(model, tokenizer, samples, ["optimal_noise:relative_scale=1"], "tag:steps=500",
output="runs/audit") write_report(result, "runs/audit")
"""

from ..data.samples import load_samples
from ..models.loading import load_classifier
from .report import write_report
from .run import Audit, audit
from .table import markdown_table, rows, verdicts

__all__ = [
    "Audit",
    "audit",
    "load_classifier",
    "load_samples",
    "markdown_table",
    "rows",
    "verdicts",
    "write_report",
]
