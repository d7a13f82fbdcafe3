"""The metric `score_text` for the `evaluate` library."""

from __future__ import annotations

from typing import Any

import evaluate
from datasets import Features, List, Value

# Absolute: `evaluate.load` runs a copy of this file elsewhere.
from hf_gradguard.metrics.text import as_batches, score_text

_STRINGS, _IDS = (
    Features({"predictions": List(texts), "references": List(texts)})
    for texts in (Value("string"), List(Value("int64")))
)


class TextReconstruction(evaluate.Metric):
    """An `evaluate` metric of the means of `score_text`, under the same names.

    It needs neither the Hub nor a network. What one `add_batch` is given was shared in one
    gradient: its predictions are matched to its references. A list of lists is several batches, and
    `add` takes one batch, or one text as a batch of one.

    Example:
        >>> metric = TextReconstruction()
        >>> predictions, references = ["a film", "the dog barks"], ["the dog barked", "a film"]
        >>> metric.add_batch(predictions=predictions, references=references)
        >>> round(metric.compute()["token_f1"], 3)  # takes tokenizer= as `score_text` does
        0.833
    """

    def __init__(self, *args: Any, keep_in_memory: bool = True, **kwargs: Any) -> None:
        # else references, which are private, lie in a cache that everybody can read
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="How near texts reconstructed from a shared gradient are to the true ones.",
            citation="",
            inputs_description=(
                "\nPredictions and references are batches: lists of strings or of lists of token "
                "ids. `compute` also takes `tokenizer`.\n"
            ),
            features=[_STRINGS, _IDS],
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add one batch (a list of texts) or several (a list of lists)."""
        predicted, true = zip(*as_batches(predictions, references), strict=True)
        super().add_batch(predictions=list(predicted), references=list(true), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one batch (a list of texts), or one text as a batch of one."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> Features:
        # The base class tries one after the other, but "12" can be read as an id, and any id as a
        # string.
        return _STRINGS if isinstance(batch["references"][0][0], str) else _IDS

    def _compute(
        self, *, predictions: Any = None, references: Any = None, tokenizer: Any = None, **_: Any
    ) -> Any:
        return score_text(predictions, references, tokenizer=tokenizer, bootstrap=0).mean
