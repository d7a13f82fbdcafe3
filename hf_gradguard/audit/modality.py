"""What texts and images do differently in an audit: becoming a batch, being scored, being guessed,
being shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..gradient_map.domain import IMAGE, TEXT, domain_of_model
from ..gradient_map.pixel_space import PixelSpace
from ..metrics import Scores, score_images, score_text
from ..randomness import Stream
from .pictures import png, to_pil

if TYPE_CHECKING:
    from ..attacks import Reconstruction
    from ..data.samples import Sample
    from .settings import AuditSettings


def modality_of(model: nn.Module, processing_class: Any, settings: AuditSettings) -> Texts | Images:
    """What the inputs of a model ask for.

    Raises:
        ValueError: If a model of texts comes without a tokenizer.
    """
    return MODALITIES[domain_of_model(model).name](model, processing_class, settings)


class Texts:
    """Texts for a text classifier.

    Args:
        model: The model, with a class for each label.
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
        self.special_ids = sorted(set(tokenizer.all_special_ids))

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The client's batch."""
        padding: Any = "max_length" if not self.lengths_known else len(samples) > 1
        encoded = self.tokenizer(
            [text for text, _ in samples],
            truncation=True,
            max_length=self.max_length,
            padding=padding,
            return_tensors="pt",
        )
        for (text, _), ids in zip(samples, encoded["input_ids"].tolist(), strict=True):
            if set(ids) <= set(self.special_ids):
                raise ValueError(
                    f"The text {text[:60]!r} holds no tokens but special ones: leave it out."
                )
        return {**encoded, "labels": _labels(self.model, samples)}

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What an Observation holds of a text besides the gradient."""
        mask = batch["attention_mask"].clone() if self.lengths_known else None
        return {
            "input_shape": tuple(batch["input_ids"].shape),
            "attention_mask": mask,
            "tokenizer": self.tokenizer,
        }

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """What an attacker makes of a list of texts: ids as clients have them, each once."""
        encoded = self.tokenizer(list(samples), truncation=True, max_length=self.max_length)
        return [list(ids) for ids in dict.fromkeys(map(tuple, encoded["input_ids"]))]

    def among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Which candidates are in a batch; those that are not listed are left out."""
        inside = self.references(batch)
        return [place for place, ids in enumerate(candidates) if list(ids) in inside]

    def references(self, batch: dict[str, Tensor]) -> list[list[int]]:
        """One list of ids a sample, special tokens included, padding left out."""
        return [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The originals, for the report."""
        ids = self.references(batch)
        return {
            "ids": ids,
            "pieces": [self._pieces(row) for row in ids],
            "labels": batch["labels"].tolist(),
        }

    def score(self, found: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Scores of a reconstruction, one number a sample, and the reconstruction in the samples'
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

    def threat_model(self) -> list[str]:
        """What the attacker sees and knows of texts, a sentence each."""
        return [
            "The token embeddings' gradient is shared too. It names the words."
            if self.terms.share_input_embeddings
            else "The token embeddings' gradient, which would name the words, is withheld.",
            "It knows how many tokens each text has."
            if self.lengths_known
            else "It does not know how long the texts are: all are padded to "
            f"{self.max_length} tokens.",
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
        return pieces


class Images:
    """Images for an image classifier.

    Args:
        model: The model, with a class for each label.
        processor: Its image processor; `None` for a model that takes pixels in [0, 1] of its
            configuration's `image_size` and `num_channels`.
        settings: Says nothing of images.
    """

    def __init__(self, model: nn.Module, processor: Any, settings: AuditSettings) -> None:
        self.model, self.processor = model, processor
        self.mean = self.std = None
        if getattr(processor, "do_normalize", False):
            self.mean, self.std = list(processor.image_mean), list(processor.image_std)

    def batch(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The client's batch."""
        config: Any = self.model.config
        mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        images = [to_pil(image, mode) for image, _ in samples]
        if self.processor is not None:
            pixels = self.processor(images, return_tensors="pt")[IMAGE.key]
        else:
            arrays = [
                np.asarray(image.resize((config.image_size, config.image_size))) for image in images
            ]
            stacked = torch.from_numpy(np.stack(arrays)).float() / 255
            pixels = stacked[:, None] if mode == "L" else stacked.permute(0, 3, 1, 2).contiguous()
        dtype = next(p.dtype for p in self.model.parameters() if torch.is_floating_point(p))
        return {IMAGE.key: pixels.to(dtype), "labels": _labels(self.model, samples)}

    def observed(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What an Observation holds of an image besides the gradient."""
        return {
            "input_shape": tuple(IMAGE.main_input(batch).shape),
            "image_mean": self.mean,
            "image_std": self.std,
        }

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """What an attacker makes of a list of images: pixels as clients have them, each once."""
        pixels = IMAGE.main_input(self.batch([(image, 0) for image in samples]))
        return [row for at, row in enumerate(pixels) if not _same_as(row, pixels[:at])]

    def among(self, candidates: Sequence[Any], batch: dict[str, Tensor]) -> list[int]:
        """Which candidates are in a batch; those that are not listed are left out."""
        inside = IMAGE.main_input(batch).cpu()
        return [at for at, row in enumerate(candidates) if _same_as(row.cpu(), inside)]

    def show(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The originals, for the report."""
        return {
            "images": [png(image) for image in self._plain(batch)],
            "labels": batch["labels"].tolist(),
        }

    def score(self, found: Reconstruction, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Scores of a reconstruction, one number a sample, and the reconstruction in the samples'
        order.

        Raises:
            ValueError: If the attack gave no image.
        """
        if found.input is None:
            raise ValueError("The attack gave no image.")
        # Anybody can clip to the range of pixels, and an attack that diverged knows no more than
        # one that says gray.
        images = torch.nan_to_num(
            self._plain({IMAGE.key: found.input}), nan=0.5, posinf=1.0, neginf=0.0
        ).clamp(0, 1)
        scores = score_images(images, self._plain(batch), bootstrap=0)
        ordered = [images[at] for at in scores.matched if at is not None]
        return {"scores": scores.per_sample, "images": [png(image) for image in ordered]}

    def chance(
        self, batches: Sequence[dict[str, Tensor]], index: int, seed: int
    ) -> dict[str, list[float]]:
        """Scores of a guess made without a gradient: a uniform gray image."""
        plain = self._plain(batches[index])
        return score_images(torch.full_like(plain, 0.5), plain, bootstrap=0).per_sample

    def describe_chance(self, messages: int) -> str:
        """What `chance` guesses, in words."""
        return "a uniform gray image"

    def settings(self) -> dict[str, Any]:
        """What the report has to know of all images."""
        return {"kind": IMAGE.name}

    def threat_model(self) -> list[str]:
        """What the attacker sees and knows of images alone: nothing."""
        return []

    def identity(self) -> list[Any]:
        """What of the processor determines a result, beyond the pixels that it made."""
        return [self.mean, self.std]

    def _plain(self, batch: dict[str, Tensor]) -> Tensor:
        """`(B, C, H, W)` pixels in [0, 1]."""
        pixels = IMAGE.main_input(batch).detach().float().cpu()
        return PixelSpace(pixels, self.mean, self.std).plain(pixels)


def _same_as(image: Tensor, others: Tensor) -> bool:
    return any(torch.equal(image, other) for other in others)


MODALITIES: dict[str, type[Texts] | type[Images]] = {TEXT.name: Texts, IMAGE.name: Images}
"""By a domain's name."""


def _labels(model: nn.Module, samples: Sequence[Sample]) -> Tensor:
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    labels = [label for _, label in samples]
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int | np.integer):
            raise ValueError(f"A label must be a class id, but is {label!r}.")
        if label < 0 or (classes is not None and label >= classes):
            raise ValueError(
                f"Labels must be class ids from 0 to {classes - 1 if classes else 'up'}, but one "
                f"is {label}."
            )
    return torch.tensor(labels, dtype=torch.long)
