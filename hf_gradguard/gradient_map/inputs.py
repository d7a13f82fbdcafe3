"""What is private in a batch, and which parameters would give it away by themselves.

The library asks how a shared gradient depends on a client's *continuous input*: the pixels of an
image, or the token embeddings of a text. Token embeddings are reached through a forward hook on the
embedding's output, so that encoders, decoders, sequence-to-sequence and PEFT-wrapped models are all
called in their ordinary way, with token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .domain import Domain, Text, domain_of_batch
from .types import Batch, LossFunction


@dataclass(frozen=True)
class ContinuousInput:
    """Where a model takes in what is private.

    Args:
        domain: Text or image.
        embedding: For token ids, the module whose output, of shape `(B, T, H)`, is the input;
            `None` for pixels.
    """

    domain: Domain
    embedding: nn.Module | None = None

    def evaluate(
        self, loss_fn: LossFunction, model: nn.Module, batch: Batch, value: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the model with `value` in place of its continuous input.

        Args:
            loss_fn: `(model, batch) -> loss`, a scalar.
            model: The model to run, in whatever mode it is in.
            batch: What a collator returns. Its token ids stay in use: they give shapes, masks and
                the embedding rows.
            value: The input to run with; `None` takes the batch's own, as a new leaf.

        Returns:
            The input as it entered the graph, and the loss.
        """
        if self.embedding is None:
            x = _leaf(batch[self.domain.key]) if value is None else value
            return x, loss_fn(model, {**batch, self.domain.key: x})

        assert isinstance(self.domain, Text)
        texts = self.domain.texts(batch)
        is_single = len(self.domain.keys) == 1
        slots = OneSlot(value) if is_single else Slots(list(texts.values()), value)
        with self.embedding.register_forward_hook(slots, with_kwargs=True):
            loss = loss_fn(model, dict(batch))
        if slots.strangers or slots.embedded_count != len(texts):
            raise ValueError(
                f"The input embedding {type(self.embedding).__name__} of {type(model).__name__} "
                f"ran {slots.embedded_count + slots.strangers} times in one forward pass, on texts "
                f"that differ, where the batch holds {len(texts)} ({', '.join(texts)}), so "
                "nothing says what the continuous input is. Make `get_input_embeddings()` (for an "
                "encoder-decoder: of `get_encoder()`) return the module that embeds them. "
                "gaussian_noise, pruning and quantization need no such input."
            )
        assert slots.x is not None
        return slots.x, loss


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that a Hugging Face model returns when the batch holds labels."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss on a batch of {sorted(batch)}. Add `labels` "
            "to the batch, use a model with a task head, or pass loss_fn."
        )
    return loss


def find_input(model: nn.Module, batch: Batch) -> ContinuousInput:
    """The continuous input of `model` on `batch`.

    Raises:
        ValueError: If the batch holds no token ids or pixels, holds both, or the model has no input
            embedding.
    """
    domain = domain_of_batch(batch)
    return ContinuousInput(domain, domain.embedding(model))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


class PixelSpace:
    """Where images may lie whose pixels were in [0, 1] before mean and deviation were taken out.

    Args:
        like: Images `(B, C, H, W)`, for device and type.
        mean: Per channel, what was subtracted; `None` is 0.
        std: Per channel, what they were divided by afterwards; `None` is 1.
    """

    def __init__(
        self,
        pixels: Tensor,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.mean, self.std = (
            torch.tensor(list(values), device=pixels.device, dtype=pixels.dtype).view(1, -1, 1, 1)
            for values in (mean or [0.0], std or [1.0])
        )
        self.low, self.high = (0 - self.mean) / self.std, (1 - self.mean) / self.std

    def noise(self, shape: Sequence[int], pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform over the pixel range."""
        uniform = torch.rand(
            tuple(shape), generator=generator, device=pixels.device, dtype=pixels.dtype
        )
        return self.low.to(pixels.dtype) + uniform * (self.high - self.low).to(pixels.dtype)

    def project_(self, x: Tensor) -> None:
        """Back into the pixel range, in place."""
        torch.minimum(torch.maximum(x, self.low.to(x.dtype)), self.high.to(x.dtype), out=x)

    def plain(self, x: Tensor) -> Tensor:
        """Pixels as they were before normalization."""
        return x * self.std + self.mean


class OneSlot:
    """A hook on the module that embeds texts, which puts the continuous input in the place of what
    it makes of a batch's one text. A model may embed what it makes.

    A call without gradients, as of a reference model that shares its weights, is let through: it
    counts as a constant. One with ids that were seen before is the same text.

    Args:
        value: The continuous input; `None` makes a new leaf of what the module makes.
    """

    def __init__(self, value: Tensor | None) -> None:
        self.x, self._has_value = value, value is not None
        self._ids: Tensor | None = None
        self._embedding: Tensor | None = None
        self.strangers = 0
        # Vectorized evaluations differentiate by themselves, with the engine's own graphs off.
        self._enabled = torch.is_grad_enabled()

    @property
    def embedded_count(self) -> int:
        """How many texts were embedded."""
        return int(self._ids is not None)

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if self._enabled and not torch.is_grad_enabled():
            return None
        ids = args[0] if args else next(iter(kwargs.values()))
        if self._ids is None:
            self._ids = ids
            if not self._has_value:
                self._embedding, self.x = output.detach(), _leaf(output)
        elif not _same(ids, self._ids):
            self.strangers += 1
            return None
        elif not self._has_value:
            check_same(self._embedding, output)
        assert self.x is not None
        # The value is x. The graph keeps `output`, so the embedding matrix still gets its gradient
        # if it is shared.
        return output + (self.x - output.detach())


class Slots:
    """As `OneSlot`, of several texts. A call with several of them, row under row, is those.

    Args:
        texts: The batch's, `(B, T)` each.
        value: As for `OneSlot`: texts stand side by side in it.
    """

    def __init__(self, texts: Sequence[Tensor], value: Tensor | None) -> None:
        self._texts, self.x, self._has_value = list(texts), value, value is not None
        self._ends = torch.tensor([text.shape[-1] for text in texts]).cumsum(0).tolist()
        self._embedded_texts: dict[int, Tensor] = {}
        self.strangers = 0
        self._enabled = torch.is_grad_enabled()

    @property
    def embedded_count(self) -> int:
        """How many texts were embedded."""
        return len(self._embedded_texts)

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if self._enabled and not torch.is_grad_enabled():
            return None
        ids = args[0] if args else next(iter(kwargs.values()))
        rows = len(self._texts[0])
        texts = zip(ids.split(rows), output.split(rows), strict=True)
        entered = [self._enter(text_ids, embedded) for text_ids, embedded in texts]
        inputs = [x for x in entered if x is not None]
        if len(inputs) < len(entered):
            self.strangers += 1
            return None
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        return output + (x - output.detach())

    def _enter(self, ids: Tensor, embedded: Tensor) -> Tensor | None:
        """What stands in the place of an embedded text; `None` if it is none of the batch's."""
        place = next((k for k, text in enumerate(self._texts) if _pads(ids, text)), None)
        if place is None:
            return None
        length = self._texts[place].shape[1]
        text_embedding = embedded[:, :length]  # what follows is padding
        if place not in self._embedded_texts:
            self._embedded_texts[place] = text_embedding.detach()
            if not self._has_value:
                self._fill(place, text_embedding)
        elif not self._has_value:
            check_same(self._embedded_texts[place], text_embedding)
        x = self._slot_of(place)
        if length == embedded.shape[1]:
            return x
        return torch.cat([x, embedded[:, length:].detach()], 1)

    def _fill(self, place: int, embedded: Tensor) -> None:
        """Write what was embedded to the leaf."""
        if self.x is None:
            shape = (len(embedded), self._ends[-1], embedded.shape[-1])
            self.x = embedded.new_zeros(shape).requires_grad_()
        with torch.no_grad():
            self._slot_of(place).copy_(embedded)

    def _slot_of(self, place: int) -> Tensor:
        assert self.x is not None
        end = self._ends[place]
        return self.x[:, end - self._texts[place].shape[1] : end]


def check_same(former: Tensor | None, embedding: Tensor) -> None:
    """Refuse a text that is embedded twice, and not in the same way.

    Raises:
        ValueError: With what does so.
    """
    if former is None or not torch.equal(former, embedding):
        raise ValueError(
            "A text was embedded twice, and not in the same way: noise on embeddings "
            "(neftune_noise_alpha) has no place in a loss that reads a text twice."
        )


def _pads(ids: Tensor, text: Tensor) -> bool:
    """Whether ids are a text's, with zeros after it: texts are embedded together, as wide as the
    widest.
    """
    length = text.shape[1]
    return _same(ids[:, :length], text) and not ids[:, length:].any()


def _same(ids: Tensor, known_ids: Tensor) -> bool:
    return ids.shape == known_ids.shape and torch.equal(ids, known_ids)
