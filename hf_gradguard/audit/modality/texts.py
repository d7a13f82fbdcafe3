"""Texts in an audit: becoming a batch, being scored, being guessed, being shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attacks.span.layer_inputs import is_causal_lm
from ...gradient_map.batch.texts import is_framed
from ...gradient_map.domain import TEXT
from ...metrics import Scores, score_text
from ...models import label_kind, task_of
from ...randomness import Stream
from .heads import with_labels

if TYPE_CHECKING:
    from ...attacks import Reconstruction
    from ...data.samples import Sample
    from ..settings import AuditSettings


class Texts:
    """Texts for a model of any head.

    Args:
        model: The model. Its head says what a label is.
        tokenizer: Its tokenizer.
        settings: Without `lengths_known` every text is padded to `max_length`, so that the shape
            says nothing of its length.

    Raises:
        ValueError: If `tokenizer` is none.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, settings: AuditSettings) -> None:
        if not hasattr(tokenizer, "all_special_ids"):
            raise ValueError(
                f"{type(model).__name__} takes text, so it needs a tokenizer, but got "
                f"{tokenizer!r}."
            )
        config, wanted = getattr(model, "config", None), settings.max_length
        longest = getattr(config, "max_position_embeddings", None) or wanted
        self.max_length = min(wanted, longest, tokenizer.model_max_length)
        self.model, self.tokenizer, self.terms = model, tokenizer, settings
        self.lengths_known = settings.lengths_known
        self.labels = label_kind(model)
        self.is_causal = is_causal_lm(model)
        self.special_ids = sorted(set(tokenizer.all_special_ids))

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The client's batch."""
        padding: Any = "max_length" if not self.lengths_known else len(samples) > 1
        return self._encoded(samples, padding)

    def _encoded(self, samples: Sequence[Sample], padding: Any) -> dict[str, Tensor]:
        encoded = self.tokenizer(
            [text for text, _ in samples],
            truncation=True,
            max_length=self.max_length,
            padding=padding,
            return_tensors="pt",
            is_split_into_words=self.labels == "token",
        )
        for (text, _), ids in zip(samples, encoded["input_ids"].tolist(), strict=True):
            if set(ids) <= set(self.special_ids):
                raise ValueError(
                    f"The text {text[:60]!r} holds no tokens but special ones: leave it out."
                )
        return with_labels(self.model, self.tokenizer, encoded, samples, self.terms.seed)

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What an Observation holds of a text besides the gradient."""
        mask = self._mask(batch).clone() if self.lengths_known else None
        return {
            "input_shape": tuple(batch["input_ids"].shape),
            "attention_mask": mask,
            "tokenizer": self.tokenizer,
            "special_tokens": is_framed(self.tokenizer, batch["input_ids"], self._mask(batch)),
        }

    def granted(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The labels that an attacker is told, if any are."""
        return batch["labels"].clone() if self.terms.labels_known and self.can_grant else None

    @property
    def can_grant(self) -> bool:
        """Whether labels say nothing of the text."""
        return self.labels != "text"

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """What an attacker makes of a list of texts: ids as clients have them, each once; with
        labels where these belong to the text.

        Args:
            samples: Texts, or samples with their labels; or a client's own rows.

        Raises:
            ValueError: If labels belong to a text and are not given.
        """
        if (self.labels in ("text", "token") and not self.is_causal) or _with_labels(samples):
            return self._labeled(samples)
        texts = [s[0] if isinstance(s, tuple) else s for s in samples]
        rows = [_ids_of(one) for one in texts if not isinstance(one, str)]
        if texts := [one for one in texts if isinstance(one, str)]:
            encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length)
            rows += encoded["input_ids"]
        return [list(ids) for ids in dict.fromkeys(map(tuple, rows))]

    def prepared(self, listed: Sequence[Any]) -> list[Any]:
        """An attack's own list as clients have it, in the same order: texts become ids; ids, and
        rows of a batch, stay.
        """
        return [
            one if isinstance(one, Mapping) or _is_ids(one) else self.candidates([one])[0]
            for one in listed
        ]

    def _labeled(self, samples: Sequence[Any]) -> list[Any]:
        found: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for one in samples:
            if not isinstance(one, Mapping):
                sample = one if isinstance(one, tuple) else (one, None)
                one = self._encoded([sample], padding=False)
            ids = tuple(torch.as_tensor(one["input_ids"]).flatten().tolist())
            found.setdefault(ids, {name: torch.as_tensor(one[name]) for name in one})
        return list(found.values())

    def among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Which candidates are in a batch; those that are not listed are left out."""
        inside = self.references(batch)
        return [place for place, one in enumerate(candidates) if _ids_of(one) in inside]

    def references(self, batch: dict[str, Tensor]) -> list[list[int]]:
        """One list of ids a sample, special tokens included, padding left out."""
        return [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batch["input_ids"], self._mask(batch), strict=True)
        ]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The originals, for the report."""
        ids = self.references(batch)
        return {
            "ids": ids,
            "pieces": [self._pieces(row) for row in ids],
            "labels": batch["labels"].tolist() if self._shows_labels else [None] * len(ids),
        }

    def score(self, found: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Scores of a reconstruction, one number per sample, and the reconstruction in the samples'
        order.

        Raises:
            ValueError: If the attack gave no text.
        """
        ids = found.token_ids
        if ids is None:
            raise ValueError("The attack gave no text.")
        scores = self._score(ids, batch)
        ordered = [[] if at is None else ids[at] for at in scores.matched]
        return {
            "scores": scores.per_sample,
            "ids": ordered,
            "pieces": [self._pieces(row) for row in ordered],
        }

    def chance(
        self, batches: Sequence[dict[str, Tensor]], index: int, seed: int
    ) -> dict[str, list[float]]:
        """Scores of guesses made without a gradient: the texts of (up to 8) other messages,
        averaged.

        A single message has no others: random words of the same length take their place.
        """
        count = len(batches)
        if count > 1:
            shifts = sorted({1 + k * (count - 1) // 8 for k in range(8)})
            guesses = [self.references(batches[(index + shift) % count]) for shift in shifts]
        else:
            guesses = [self._random_words(batches[index], seed, draw) for draw in range(8)]
        rows = [self._score(guess, batches[index]).per_sample for guess in guesses]
        return {name: np.mean([row[name] for row in rows], axis=0).tolist() for name in rows[0]}

    def describe_chance(self, messages: int) -> str:
        """What `chance` guesses, in words."""
        return (
            "the texts of other messages" if messages > 1 else "random words, as many as there are"
        )

    def settings(self) -> dict[str, Any]:
        """What the report has to know of all texts."""
        return {
            "kind": TEXT.name,
            "max_length": self.max_length,
            "special_ids": self.special_ids,
        }

    @property
    def _shows_labels(self) -> bool:
        return self.labels not in ("text", "token")

    @staticmethod
    def _mask(batch: dict[str, Tensor]) -> Tensor:
        """A collator of texts of one length may leave it out."""
        ids = batch["input_ids"]
        return batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(ids)

    def threat_model(self) -> list[str]:
        """What the attacker sees and knows of texts, a sentence each."""
        return [
            "The token embeddings' gradient is shared too. It names the words."
            if self.terms.share_input_embeddings
            else "The token embeddings' gradient, which would name the words, is withheld.",
            "It knows how many tokens each text has."
            if self.lengths_known
            else "It does not know how long the texts are: all are padded to "
            f"{self.max_length} tokens. Where the gradient of position embeddings tells the "
            "longest one's length, attacks read it there.",
            *_TOLD.get(task.name if (task := task_of(self.model)) is not None else "", ()),
        ]

    def identity(self) -> list[Any]:
        """What of the tokenizer determines a result."""
        return [self.tokenizer.get_vocab(), self.special_ids, self.tokenizer("a")["input_ids"]]

    def _score(self, ids: list[list[int]], batch: dict[str, Tensor]) -> Scores:
        return score_text(ids, self.references(batch), tokenizer=self.tokenizer, bootstrap=0)

    def _random_words(self, batch: dict[str, Tensor], seed: int, draw: int) -> list[list[int]]:
        stream = Stream.from_seeds(seed, draw)
        words = sorted(set(self.tokenizer.get_vocab().values()) - set(self.special_ids))
        return [
            [
                i if i in self.special_ids else words[int(stream.integers(len(words), ()))]
                for i in ids
            ]
            for ids in self.references(batch)
        ]

    def _pieces(self, ids: list[int]) -> list[str]:
        """The text that each token adds to those before it, blank included; nothing for the frame
        of special tokens.
        """
        pieces, plain, before = [], list[int](), ""
        for token in ids:
            if token < 0:
                pieces.append(" …")  # nothing was found there
            elif token in self.special_ids:
                pieces.append(
                    f" {self.tokenizer.unk_token}" if token == self.tokenizer.unk_token_id else ""
                )
            else:
                plain.append(token)
                text = self.tokenizer.decode(plain, clean_up_tokenization_spaces=False)
                grown = text.startswith(
                    before
                )  # not where a character's bytes are spread over tokens
                pieces.append(
                    text[len(before) :] if grown else f" {self.tokenizer.decode([token])}"
                )
                before = text
        return [_NO_WORD.sub("□", piece).replace("##", "") for piece in pieces]


_NO_WORD = re.compile(r"[\[<]\W?(unused|extra_id|reserved|madeupword|dummy)[^\]>]*[\]>]")
"""Places that a vocabulary keeps free: an attack may name one, and it says nothing."""


def _with_labels(samples: Sequence[Any]) -> bool:
    return any(isinstance(one, Mapping) and "labels" in one for one in samples)


def _is_ids(one: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return True
    listed = isinstance(one, Sequence) and not isinstance(one, str)
    return listed and all(isinstance(part, int | np.integer) for part in one)


def _ids_of(candidate: Any) -> list[int]:
    """Without padding, as `references` are."""
    row = candidate if isinstance(candidate, Mapping) else {TEXT.key: candidate}
    try:
        len(row[TEXT.key])  # a number alone is no text
        ids = torch.as_tensor(row[TEXT.key]).flatten().cpu()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"A candidate is {str(candidate)[:60]!r}: give a text, its ids, or a row of a batch."
        ) from error
    if row.get("attention_mask") is not None:
        ids = ids[torch.as_tensor(row["attention_mask"]).flatten().bool().cpu()]
    found: list[int] = ids.tolist()
    return found


_TOLD = {
    "fill-mask": (
        "What is looked for is the text as the model read it: masked words do not count. An "
        "attacker with a list of candidates is also told which words of theirs would be masked.",
    ),
    "text2text-generation": (
        "What is looked for is the source text. An attacker with a list of candidates has their "
        "targets too.",
    ),
    "token-classification": ("An attacker with a list of candidates has their words' labels too.",),
}
"""What else has to be said of a task's audit."""
