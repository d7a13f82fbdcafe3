"""Texts in an audit, which become a batch with labels, are scored, are guessed and are shown."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attacks.layer_inputs import is_causal_lm
from ..data.class_labels import explain_label, find_class
from ..gradient_map.domain import IGNORED, TEXT, is_framed
from ..metrics import Scores, score_text
from ..models import label_kind, task_of
from ..randomness import Stream

if TYPE_CHECKING:
    from ..attacks import Reconstruction
    from ..data.samples import Sample
    from .settings import AuditSettings

MASKED_SHARE = 0.15
GUESSES = 8  # of which the score of chance is a mean

_UNUSED_TOKEN = re.compile(r"[\[<]\W?(unused|extra_id|reserved|madeupword|dummy)[^\]>]*[\]>]")
"""Places that a vocabulary keeps free: an attack may name one, and it says nothing."""

_TASK_ASSUMPTIONS = {
    "fill-mask": (
        "The target is the text as the model read it: masked words do not count. For membership "
        "inference the attacker also knows which words of its candidates would be masked.",
    ),
    "text2text-generation": (
        "The target is the source text. For membership inference the attacker also has its "
        "candidates' target texts.",
    ),
    "token-classification": (
        "For membership inference the attacker also has the labels of its candidates' words.",
    ),
}
"""Further sentences for a task's audit."""


class Texts:
    """The modality of texts, for a model of any head.

    Args:
        model: The model. Its head says what a label is.
        tokenizer: The model's tokenizer.
        settings: The audit's settings. Without `lengths_known` every text is padded to
            `max_length`, so that the shape says nothing of its length.

    Raises:
        ValueError: If `tokenizer` is none.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, settings: AuditSettings) -> None:
        if not hasattr(tokenizer, "all_special_ids"):
            raise ValueError(
                f"{type(model).__name__} takes text, so it needs a tokenizer, but got "
                f"{tokenizer!r}."
            )
        config, max_length = getattr(model, "config", None), settings.max_length
        positions = getattr(config, "max_position_embeddings", None) or max_length
        # A model cannot place longer texts, whatever was asked for.
        self.max_length = min(max_length, positions, tokenizer.model_max_length)
        self.model, self.tokenizer, self.audit_settings = model, tokenizer, settings
        self.lengths_known = settings.lengths_known
        self.labels = label_kind(model)
        self.is_causal = is_causal_lm(model)
        self.special_ids = sorted(set(tokenizer.all_special_ids))

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return the client's batch."""
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
        for number, ids in enumerate(encoded["input_ids"].tolist(), 1):
            # Without words there is nothing to recover, and every score would be undefined.
            if set(ids) <= set(self.special_ids):
                raise ValueError(
                    f"Text {number} of {len(samples)} in a batch holds no tokens but special ones: "
                    "leave it out."
                )
        return with_labels(self.model, self.tokenizer, encoded, samples, self.audit_settings.seed)

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the fields of an Observation that texts need besides the gradient."""
        mask = _mask(batch)
        return {
            "input_shape": tuple(batch["input_ids"].shape),
            "attention_mask": mask.clone() if self.lengths_known else None,
            "tokenizer": self.tokenizer,
            "special_tokens": is_framed(self.tokenizer, batch["input_ids"], mask),
        }

    def granted(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return the labels if the attacker knows them, else `None`."""
        is_granted = self.audit_settings.labels_known and self.can_grant
        return batch["labels"].clone() if is_granted else None

    @property
    def can_grant(self) -> bool:
        """Whether labels say nothing of the text."""
        return self.labels != "text"

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """Return an attacker's list of texts as ids in the clients' form, each once.

        They have labels where these belong to the text.

        Args:
            samples: Texts, or samples with their labels; or a client's own rows.

        Raises:
            ValueError: If labels belong to a text and are not given.
        """
        has_labels = any(isinstance(row, Mapping) and "labels" in row for row in samples)
        if (self.labels in ("text", "token") and not self.is_causal) or has_labels:
            return self._labeled(samples)
        texts = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
        rows = [_ids_of(row) for row in texts if not isinstance(row, str)]
        if texts := [text for text in texts if isinstance(text, str)]:
            # Cut like the client's texts: otherwise a member would not be found among them.
            encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length)
            rows += encoded["input_ids"]
        return [list(ids) for ids in dict.fromkeys(map(tuple, rows))]

    def _labeled(self, samples: Sequence[Any]) -> list[Any]:
        # By ids, so that each text is there once.
        rows: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for row in samples:
            if not isinstance(row, Mapping):
                row = self._encoded([row if isinstance(row, tuple) else (row, None)], padding=False)
            ids = tuple(torch.as_tensor(row["input_ids"]).flatten().tolist())
            rows.setdefault(ids, {name: torch.as_tensor(row[name]) for name in row})
        return list(rows.values())

    def members_among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Return the indices of those candidates that are in a batch."""
        members = self.references(batch)
        return [index for index, row in enumerate(candidates) if _ids_of(row) in members]

    def references(self, batch: dict[str, Tensor]) -> list[list[int]]:
        """Return one list of ids per sample, special tokens included, padding left out."""
        rows = zip(batch["input_ids"], _mask(batch), strict=True)
        return [ids[mask.bool()].tolist() for ids, mask in rows]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the originals, for the report."""
        ids, labels_are_tokens = self.references(batch), self.labels in ("text", "token")
        labels = [None] * len(ids) if labels_are_tokens else batch["labels"].tolist()
        return {"ids": ids, "pieces": [self._pieces(row) for row in ids], "labels": labels}

    def score(self, reconstruction: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the scores of a reconstruction, one per sample, and its texts.

        Texts are in the samples' order.

        Raises:
            ValueError: If the attack gave no text.
        """
        ids = reconstruction.token_ids
        if ids is None:
            raise ValueError("The attack gave no text.")
        scores = self._score(ids, batch)
        ordered = [[] if match is None else ids[match] for match in scores.matched]
        pieces = [self._pieces(row) for row in ordered]
        return {"scores": scores.per_sample, "ids": ordered, "pieces": pieces}

    def chance(
        self, batches: Sequence[dict[str, Tensor]], index: int, seed: int
    ) -> dict[str, list[float]]:
        """Return the mean scores of guesses made without a gradient.

        The guesses are the texts of (up to 8) other messages. If there is only one message, they
        are random words of the same length.
        """
        count = len(batches)
        if count > 1:
            # Spread evenly over the other messages, and never the message itself.
            shifts = sorted({1 + k * (count - 1) // GUESSES for k in range(GUESSES)})
            guesses = [self.references(batches[(index + shift) % count]) for shift in shifts]
        else:
            guesses = [self._random_words(batches[index], seed, draw) for draw in range(GUESSES)]
        rows = [self._score(guess, batches[index]).per_sample for guess in guesses]
        return {name: np.mean([row[name] for row in rows], axis=0).tolist() for name in rows[0]}

    def describe_chance(self, messages: int) -> str:
        """Return the words for what `chance` guesses."""
        guess = "random words, as many as there are"
        return "the texts of other messages" if messages > 1 else guess

    def settings(self) -> dict[str, Any]:
        """Return what the report has to know of all texts."""
        return {"kind": TEXT.name, "max_length": self.max_length, "special_ids": self.special_ids}

    def threat_model(self) -> list[str]:
        """Return what the attacker sees and knows of texts, one sentence each."""
        task = task_of(self.model)
        return [
            "The token embeddings' gradient is shared too. It names the words."
            if self.audit_settings.share_input_embeddings
            else "The token embeddings' gradient, which would name the words, is withheld.",
            "It knows how many tokens each text has."
            if self.lengths_known
            else "It does not know how long the texts are: all are padded to "
            f"{self.max_length} tokens. Where the gradient of position embeddings shows the "
            "longest one's length, attacks read it there.",
            *_TASK_ASSUMPTIONS.get(task.name if task is not None else "", ()),
        ]

    def identity(self) -> list[Any]:
        """Return what of the tokenizer determines a result."""
        return [self.tokenizer.get_vocab(), self.special_ids, self.tokenizer("a")["input_ids"]]

    def _score(self, ids: list[list[int]], batch: dict[str, Tensor]) -> Scores:
        return score_text(ids, self.references(batch), tokenizer=self.tokenizer, bootstrap=0)

    def _random_words(self, batch: dict[str, Tensor], seed: int, draw: int) -> list[list[int]]:
        stream = Stream.from_seeds(seed, draw)
        # Sorted: the order of a set differs between processes.
        words = sorted(set(self.tokenizer.get_vocab().values()) - set(self.special_ids))
        return [
            [
                i if i in self.special_ids else words[int(stream.integers(len(words), ()))]
                for i in ids
            ]
            for ids in self.references(batch)
        ]

    def _pieces(self, ids: list[int]) -> list[str]:
        """Return the text that each token adds to those before it, blank included.

        The frame of special tokens adds nothing.
        """
        pieces, plain, decoded = [], list[int](), ""
        for token in ids:
            if token < 0:
                pieces.append(" …")  # nothing was recovered there
            elif token in self.special_ids:
                is_unknown = token == self.tokenizer.unk_token_id
                pieces.append(f" {self.tokenizer.unk_token}" if is_unknown else "")
            else:
                plain.append(token)
                text = self.tokenizer.decode(plain, clean_up_tokenization_spaces=False)
                # A character's bytes may be spread over tokens: then its text does not grow.
                grows = text.startswith(decoded)
                alone = f" {self.tokenizer.decode([token])}"
                pieces.append(text[len(decoded) :] if grows else alone)
                decoded = text
        return [_UNUSED_TOKEN.sub("□", piece).replace("##", "") for piece in pieces]


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the attention mask, which a collator of texts of one length may leave out."""
    ids = batch["input_ids"]
    return batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(ids)


def _ids_of(candidate: Any) -> list[int]:
    """Return the ids of a candidate without padding, as `references` are."""
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
    listed: list[int] = ids.tolist()
    return listed


# --- labels that a model's head takes, of texts and of images


def with_labels(
    model: nn.Module, tokenizer: Any, encoded: Any, samples: Sequence[Sample], seed: int = 0
) -> dict[str, Tensor]:
    """Return a batch with the labels that the model's head takes.

    Args:
        model: The model, which says what a label is.
        tokenizer: The tokenizer of texts.
        encoded: The inputs, as the tokenizer or the processor returned them.
        samples: Samples with a class id or its name; a number or a list of numbers; one 0 or 1 per
            class; a class per word; a target text; or `None`, where the text is its own label.
        seed: The seed of the words that are masked: the same ones in one text every time.

    Raises:
        ValueError: If a label does not fit the head.
    """
    # The order matters: labels of tokens need the encoding, those of texts the ids.
    batch, kind, task = dict(encoded), label_kind(model), task_of(model)
    if kind == "token":
        return batch | {"labels": _word_labels(encoded, samples)}
    if kind != "text":
        return batch | {"labels": _KINDS[kind](model, [label for _, label in samples])}
    assert task is not None
    if task.name == "fill-mask":
        return batch | _masked(tokenizer, batch, seed)
    if task.name == "text-generation":
        return batch | {"labels": batch[TEXT.key].masked_fill(_mask(batch) == 0, IGNORED)}
    return batch | {"labels": _targets(tokenizer, samples, batch[TEXT.key].shape[1])}


def _classes(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    config = getattr(model, "config", None)
    classes, ids = getattr(config, "num_labels", None), getattr(config, "label2id", None) or {}
    labels = [find_class(label, ids) if isinstance(label, str) else label for label in labels]
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int | np.integer):
            way_out = "int(label) makes one." if isinstance(label, float) else explain_label(label)
            raise ValueError(
                "A label must be a class id, a whole number, but one is "
                f"{type(label).__name__}. {way_out}"
            )
        if label < 0 or (classes is not None and label >= classes):
            raise ValueError(
                f"Labels must be class ids from 0 to {classes - 1 if classes else 'up'}, and one "
                f"is not{', so they may count from 1' * (label == classes)}. {explain_label(label)}"
            )
    return torch.tensor(labels, dtype=torch.long)


def _numbers(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    numbers = torch.tensor(labels, dtype=torch.float32)
    if not torch.isfinite(numbers).all():
        raise ValueError("Labels must be finite numbers, and one is not. Leave its row out.")
    return numbers


def _class_flags(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    classes: int = model.config.num_labels  # type: ignore[union-attr, assignment]
    for label in labels:
        if not isinstance(label, list | tuple) or len(label) != classes or set(label) - {0, 1}:
            raise ValueError(
                f"A label must be a list of one 0 or 1 for each of {classes} classes, and one is "
                "not."
            )
    return torch.tensor(labels, dtype=torch.float32)


_KINDS = {"class": _classes, "number": _numbers, "several": _class_flags}


def _word_labels(encoded: Any, samples: Sequence[Sample]) -> Tensor:
    """Return a class for the first token of every word."""
    if not getattr(encoded, "is_fast", False):
        raise ValueError(
            "This tokenizer does not say which token is of which word, so tokens cannot be given "
            "their words' labels: load a fast one."
        )
    labels = torch.full(encoded[TEXT.key].shape, IGNORED)
    for row, (words, classes) in enumerate(samples):
        if isinstance(words, str) or classes is None:
            raise ValueError(
                "Labels of words belong to their text: give a list of words and a list of as many "
                "labels."
            )
        if len(words) != len(classes):
            raise ValueError(f"There are {len(classes)} labels for {len(words)} words.")
        previous = None
        for place, word in enumerate(encoded.word_ids(row)):
            # Special tokens have no word, and further pieces of a word no label of their own.
            if word is not None and word != previous:
                labels[row, place] = classes[word]
            previous = word
    return labels


def _masked(tokenizer: Any, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return a batch with masked words and their labels, as BERT was trained.

    15 % of a text's words are chosen, one at least. 8 in 10 of these become the mask, one another
    word, and one does not change.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("This tokenizer has no mask token, so no words can be masked.")
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
    ids = batch[TEXT.key].clone()
    labels = torch.full_like(ids, IGNORED)
    for row, row_labels in zip(ids, labels, strict=True):
        places = (~torch.isin(row, special)).nonzero().flatten()
        # By the text itself, so that an attacker masks its candidates as the client does.
        stream = Stream.from_seeds(seed, zlib.crc32(row[places].numpy().tobytes()))
        count = max(1, round(MASKED_SHARE * len(places)))
        for place in places[stream.uniform((len(places),)).argsort()[:count]]:
            row_labels[place] = row[place]
            chance = float(stream.uniform(()))
            if chance < 0.8:
                row[place] = tokenizer.mask_token_id
            elif chance < 0.9:
                row[place] = int(stream.integers(len(tokenizer), ()))
    return {TEXT.key: ids, "labels": labels}


def _targets(tokenizer: Any, samples: Sequence[Sample], max_length: int) -> Tensor:
    for _, target in samples:
        if not isinstance(target, str) or not target:
            raise ValueError("A target must be a text with a word at least, and one is not.")
    encoded = tokenizer(
        text_target=[target for _, target in samples], truncation=True, max_length=max_length,
        padding=True, return_tensors="pt",
    )  # fmt: skip
    targets: Tensor = encoded[TEXT.key].masked_fill(encoded["attention_mask"] == 0, IGNORED)
    return targets
