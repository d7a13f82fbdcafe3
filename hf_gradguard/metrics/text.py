"""Scores of reconstructed texts.

All are in [0, 1] and use the same tokens:

- `rouge1`, `rouge2`, `rougeL`: F-measure of common words, word pairs, and the longest common
  subsequence.
- `bleu`: sentence BLEU up to 4-grams, exponential smoothing, effective order; sacrebleu's number
  over 100.
- `google_bleu`: the smaller of precision and recall over all 1- to 4-grams (Wu et al., 2016).
- `token_precision`, `token_recall`, `token_f1`: over multisets of tokens, so a word counts as often
  as it occurs.
- `position_accuracy`: the fraction of the reference's tokens that the prediction has at the same
  position.
- `exact_match`: 1 if all tokens are the same in the same order.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex
from nltk.translate.gleu_score import sentence_gleu
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU

from .scores import Scores, check_bootstrap, match, summarize

TEXT_SCORES = (
    "rouge1",
    "rouge2",
    "rougeL",
    "bleu",
    "google_bleu",
    "token_precision",
    "token_recall",
    "token_f1",
    "position_accuracy",
    "exact_match",
)

Token = str | int | None
"""A word, an id, or None for a special token: no word, but it keeps its position."""

# Scripts that are written without spaces: there a character with its marks is a word.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(rf"(?V1)[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+|\X")


class _Identity:
    """A tokenizer of texts that are tokens already; rouge-score's own drops other than ASCII."""

    def tokenize(self, tokens: list[Token]) -> list[Token]:
        return tokens


_ROUGE = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=_Identity())
_BLEU = BLEU(tokenize="none", smooth_method="exp", effective_order=True)


def score_text(
    predictions: Any,
    references: Any,
    *,
    tokenizer: Any = None,
    bootstrap: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Scores:
    """Score reconstructed texts by how close they are to the true ones.

    The scores are ROUGE, BLEU and Google BLEU, token precision, recall and F1, the accuracy by
    position, and exact match, all in [0, 1]. `TEXT_SCORES` has their names.

    A flat list is **one batch**, shared in one gradient. A gradient has no order, so predictions
    are matched to references one to one before anything is scored, by the largest sum of token F1
    (Google BLEU decides between equals). Several batches are a list of such lists; nothing is
    matched across batches. Independent samples are batches of one: `[[text] for text in texts]`.

    Args:
        predictions: Texts as strings or lists of token ids, or a `(B, T)` tensor of ids; or a list
            of such batches. A batch may have fewer than references: a missing one scores 0.
        references: The true texts, batch by batch as in `predictions`.
        tokenizer: A tokenizer whose ids are the tokens, for strings as well, without its special
            tokens. One inside a prediction that is as long as its reference keeps the others'
            position. Without a tokenizer, tokens are ids as given, or the `words` of a string.
            Negative ids are no tokens.
        bootstrap: Resamples of whole batches for the intervals of the means; 0 for no intervals.
        confidence: The confidence of the intervals.
        seed: The seed of the resampling.

    Returns:
        Scores per reference, means, intervals, and which prediction was compared with which
            reference.

    Raises:
        ValueError: If a reference holds no tokens, a batch has more predictions than references,
            strings meet ids without a tokenizer, or the two sides are not nested in the same way.

    Example:
        >>> scores = score_text(["a film", "the dog barks"], ["the dog barked", "a film"])
        >>> scores.matched, scores.per_sample["exact_match"], round(scores.mean["token_f1"], 3)
        ([1, 0], [0.0, 1.0], 0.833)
    """
    check_bootstrap(bootstrap, confidence)
    rows: list[dict[str, float]] = []
    matched: list[int | None] = []
    pairs = as_batches(predictions, references)
    if tokenizer is None:
        _check_one_kind(pairs)
    for batch in pairs:
        predicted, true = ([_tokens(text, tokenizer) for text in texts] for texts in batch)
        for tokens in true:
            if not _words(tokens):
                raise ValueError(
                    f"Reference {len(rows) + true.index(tokens)} holds no tokens but special ones, "
                    "so there is nothing to recover. Leave it out, with its prediction."
                )
        order = match(np.array([[_similarity(p, t) for p in predicted] for t in true]))
        matched_predictions = [[] if i is None else predicted[i] for i in order]
        rows += [_score(p, t) for p, t in zip(matched_predictions, true, strict=True)]
        matched += order
    sizes = [len(true) for _, true in pairs]
    return summarize(rows, matched, sizes, bootstrap=bootstrap, confidence=confidence, seed=seed)


def as_batches(predictions: Any, references: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return both sides as batches: pairs (predictions, references) of lists of strings or of ids.

    Raises:
        ValueError: If the sides are not nested in the same way, or a batch has more predictions
            than references or no references.
    """
    predictions, references = _plain(predictions), _plain(references)
    depth = _depth(references)
    if depth not in (1, 2):
        raise ValueError(
            "references must be a list of strings or of lists of token ids, or a list of such "
            f"lists, one per batch, and hold at least one token, but is {_shorten(references)}."
        )
    if depth == 1:
        predictions, references = [predictions], [references]
    if not isinstance(predictions, list) or len(predictions) != len(references):
        raise ValueError(
            f"references holds {len(references)} batches, so predictions must be a list of as "
            f"many, but is {_shorten(predictions)}."
        )
    for predicted, true in zip(predictions, references, strict=True):
        for side, batch in (("predictions", predicted), ("references", true)):
            if not isinstance(batch, list) or not all(map(_is_text, batch)):
                raise ValueError(
                    f"A batch of {side} must be a list of strings or of lists of token ids, but is "
                    f"{_shorten(batch)}. Nest predictions and references alike: a flat list is one "
                    "batch, a list of lists several."
                )
        if not true:
            raise ValueError("A batch holds no references. Leave it out, with its predictions.")
        if len(predicted) > len(true):
            raise ValueError(
                f"A batch has {len(predicted)} predictions for {len(true)} references. Taking the "
                "best of several guesses would flatter the attack: keep as many as the batch has "
                "samples."
            )
    return list(zip(predictions, references, strict=True))


def words(text: str) -> list[str]:
    """Return the words of a string, of which punctuation marks count as words too.

    The string is normalized by Unicode NFKC, case folded, and split at spaces and punctuation. In
    scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) every character is a word.
    So is an emoji.

    Example:
        >>> words("Naïve, 电影!")
        ['naïve', ',', '电', '影', '!']
    """
    chunks = unicodedata.normalize("NFKC", text).casefold().split()
    return [word for chunk in chunks for word in _WORD.findall(chunk)]


def _score(predicted: list[Token], true: list[Token]) -> dict[str, float]:
    ours, theirs = _words(predicted), _words(true)
    rouge = _ROUGE.score(theirs, ours)
    common = (Counter(ours) & Counter(theirs)).total()
    # Of equal length, both are rows of one padded batch: a special token in the middle is then a
    # gap, not a shift.
    placed = (predicted, true) if len(predicted) == len(true) else (ours, theirs)
    hits = sum(p == t for p, t in zip(*placed, strict=False) if t is not None)
    scores = {name: float(score.fmeasure) for name, score in rouge.items()} | {
        "bleu": _sentence_bleu(ours, theirs),
        "google_bleu": float(sentence_gleu([theirs], ours)),
        "token_precision": common / max(1, len(ours)),
        "token_recall": common / len(theirs),
        "token_f1": _f1(ours, theirs),
        "position_accuracy": hits / len(theirs),
        "exact_match": float(ours == theirs),
    }
    return {name: scores[name] for name in TEXT_SCORES}


def _similarity(predicted: list[Token], true: list[Token]) -> float:
    ours, theirs = _words(predicted), _words(true)
    return _f1(ours, theirs) + 1e-4 * sentence_gleu([theirs], ours)  # the second term sees order


def _f1(ours: list[Token], theirs: list[Token]) -> float:
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def _sentence_bleu(ours: list[Token], theirs: list[Token]) -> float:
    score = _BLEU.sentence_score(" ".join(map(str, ours)), [" ".join(map(str, theirs))]).score
    return min(1.0, score / 100)  # exp(log(100)) is a little more than 100


def _tokens(text: str | list[int], tokenizer: Any) -> list[Token]:
    if tokenizer is None and isinstance(text, str):
        return [*words(text)]
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    if isinstance(text, str):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = text
    return [None if i in special or i < 0 else i for i in ids]


def _words(tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if token is not None]


def _plain(texts: Any) -> Any:
    """Return tensors, arrays and tuples as lists, to any depth."""
    if hasattr(texts, "tolist"):
        return texts.tolist()
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    return [_plain(text) for text in texts] if is_list else texts


def _depth(item: Any) -> int | None:
    """Return 0 for a text, 1 for a list of texts, 2 for a list of batches, `None` if undecided."""
    if isinstance(item, str) or (isinstance(item, list) and any(isinstance(i, int) for i in item)):
        return 0
    depths = map(_depth, item) if isinstance(item, list) else ()
    depth = next((depth for depth in depths if depth is not None), None)
    return None if depth is None else 1 + depth


def _is_text(item: Any) -> bool:
    return isinstance(item, str) or (
        isinstance(item, list) and all(isinstance(i, int) for i in item)
    )


def _check_one_kind(pairs: Sequence[tuple[list[Any], list[Any]]]) -> None:
    # An empty prediction is of either kind.
    kinds = {isinstance(text, str) for pair in pairs for texts in pair for text in texts if text}
    if len(kinds) > 1:
        raise ValueError(
            "Some texts are strings and some lists of token ids, so they have no tokens in common. "
            "Pass tokenizer= to compare them by its ids."
        )


def _shorten(item: Any) -> str:
    shown = repr(item)
    return shown if len(shown) < 80 else f"{shown[:77]}..."
