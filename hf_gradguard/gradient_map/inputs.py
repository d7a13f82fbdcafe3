"""The private part of a batch: the continuous input, and the Jacobian of the gradient by it.

The library asks how a shared gradient depends on a client's *continuous input*: the pixels of an
image, or the token embeddings of a text. Token embeddings are reached through a forward hook on the
embedding's output, so that encoders, decoders, sequence-to-sequence and PEFT-wrapped models are all
called in their ordinary way, with token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .domain import Domain, Text, domain_of_batch
from .replay import Replay, check_whole, differentiate
from .types import Batch, LossFunction

NOT_FINITE = (
    "The gradient of {name} is not finite, so nothing was shared. Look for labels out of range, an "
    "overflow in the loss (in half precision use bf16), or a learning rate that made the weights "
    "diverge."
)


@dataclass(frozen=True)
class ContinuousInput:
    """The place where a model takes in what is private.

    Args:
        domain: The domain, text or image.
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
            loss_fn: The loss `(model, batch) -> loss`, a scalar.
            model: The model to run, in whatever mode it is in.
            batch: A batch, as a collator returns it. Its token ids stay in use: they give shapes,
                masks and the embedding rows.
            value: The input to run with; `None` takes the batch's own, as a new leaf.

        Returns:
            The input as it entered the graph, and the loss.

        Raises:
            ValueError: If the embedding runs more often in one forward pass than the batch has
                texts, so that nothing says what the continuous input is.
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
    """Return the loss that a Hugging Face model returns when the batch holds labels.

    Raises:
        ValueError: If the model returns none.
    """
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss on a batch of {sorted(batch)}. Add `labels` "
            "to the batch, use a model with a task head, or pass loss_fn."
        )
    return loss


def find_input(model: nn.Module, batch: Batch) -> ContinuousInput:
    """Return the continuous input of `model` on `batch`.

    Raises:
        ValueError: If the batch holds no token ids or pixels, holds both, or the model has no input
            embedding.
    """
    domain = domain_of_batch(batch)
    return ContinuousInput(domain, domain.embedding(model))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


class PixelSpace:
    """The space of images whose pixels were in [0, 1] before mean and deviation were taken out.

    Args:
        pixels: Images `(B, C, H, W)`, for device and type.
        mean: The mean per channel that was subtracted; `None` is 0.
        std: The deviation per channel that pixels were divided by afterwards; `None` is 1.
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
        """Draw pixels uniformly over their range."""
        uniform = torch.rand(
            tuple(shape), generator=generator, device=pixels.device, dtype=pixels.dtype
        )
        return self.low.to(pixels.dtype) + uniform * (self.high - self.low).to(pixels.dtype)

    def project_(self, x: Tensor) -> None:
        """Move images back into the pixel range, in place."""
        torch.minimum(torch.maximum(x, self.low.to(x.dtype)), self.high.to(x.dtype), out=x)

    def plain(self, x: Tensor) -> Tensor:
        """Return pixels as they were before normalization."""
        return x * self.std + self.mean


class OneSlot:
    """A hook on the embedding module that puts the continuous input in place of a batch's one text.

    A model may embed what it makes. A call without gradients, as of a reference model that shares
    its weights, is let through: it counts as a constant. One with ids that were seen before is the
    same text.

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
        """The number of texts that were embedded."""
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
    """A hook like `OneSlot` for several texts, which may be embedded together, row under row.

    Args:
        texts: The batch's texts, `(B, T)` each.
        value: The continuous input, in which texts stand side by side; `None` makes a new leaf.
    """

    def __init__(self, texts: Sequence[Tensor], value: Tensor | None) -> None:
        self._texts, self.x, self._has_value = list(texts), value, value is not None
        self._ends = torch.tensor([text.shape[-1] for text in texts]).cumsum(0).tolist()
        self._embedded_texts: dict[int, Tensor] = {}
        self.strangers = 0
        self._enabled = torch.is_grad_enabled()

    @property
    def embedded_count(self) -> int:
        """The number of texts that were embedded."""
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
        ValueError: If it is; the message names what does so.
    """
    if former is None or not torch.equal(former, embedding):
        raise ValueError(
            "A text was embedded twice, and not in the same way: noise on embeddings "
            "(neftune_noise_alpha) has no place in a loss that reads a text twice."
        )


def _pads(ids: Tensor, text: Tensor) -> bool:
    """Return whether ids are a text's with zeros after it.

    Several texts are embedded together, as wide as the widest.
    """
    length = text.shape[1]
    return _same(ids[:, :length], text) and not ids[:, length:].any()


def _same(ids: Tensor, known_ids: Tensor) -> bool:
    return ids.shape == known_ids.shape and torch.equal(ids, known_ids)


# --- the gradient's derivative by the input


class Jacobian:
    """Products with J, each by differentiating twice.

    Graphs are made when first needed, and kept.

    Args:
        loss: A scalar, with its graph.
        x: The continuous input that it was computed from.
        parameters: The parameters of the shared gradient.
        replay: The replay of the pass, whose attention kernels are used while the graph is walked.
    """

    def __init__(
        self, loss: Tensor, x: Tensor, parameters: Mapping[str, nn.Parameter], replay: Replay
    ) -> None:
        self._loss, self._x, self._parameters, self._replay = loss, x, parameters, replay
        self._gradient: dict[str, Tensor] | None = None
        self._input_gradient: Tensor | None = None

    def gradient(self) -> dict[str, Tensor]:
        """Return g with its graph, made once."""
        if self._gradient is None:
            self._gradient = differentiate(self._loss, self._parameters, create_graph=True)
        return self._gradient

    def vjp(self, delta: Mapping[str, Tensor]) -> Tensor:
        """Return J δ, in the shape of x; names that δ leaves out count as zero.

        Raises:
            ValueError: If a name or a shape is not one of the gradient's.
        """
        check_names(delta, self._parameters)
        with torch.enable_grad(), self._replay.kernels():
            gradient = self.gradient()
            # A gradient that does not depend on x has no graph: its rows of δ contribute nothing.
            rows = {name: gradient[name] for name in delta}
            rows = {name: row for name, row in rows.items() if row.requires_grad}
            if not rows:
                return torch.zeros_like(self._x)
            (product,) = torch.autograd.grad(
                list(rows.values()),
                self._x,
                grad_outputs=[delta[name].to(row.dtype) for name, row in rows.items()],
                retain_graph=True,
                allow_unused=True,
            )
        return torch.zeros_like(self._x) if product is None else product

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Return Jᵀ v for a stack of directions: one tensor `(k, *parameter.shape)` per parameter.

        Args:
            directions: The directions v, `(k, *x.shape)`.
        """
        parameters, count = list(self._parameters.values()), len(directions)
        with torch.enable_grad(), self._replay.kernels():
            if self._input_gradient is None:
                (self._input_gradient,) = torch.autograd.grad(
                    self._loss,
                    self._x,
                    create_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                check_whole([self._input_gradient])
            if not self._input_gradient.requires_grad:
                # L is linear in x, or does not depend on it: J is zero.
                return [p.new_zeros((count, *p.shape)) for p in parameters]
            products = torch.autograd.grad(
                self._input_gradient,
                parameters,
                grad_outputs=directions if count > 1 else directions[0],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=count > 1,
            )
        return [
            p.new_zeros((count, *p.shape)) if product is None else product.view(count, *p.shape)
            for p, product in zip(parameters, products, strict=True)
        ]


class UnrolledJacobian(Jacobian):
    """The Jacobian of a gradient that is no derivative of one loss.

    The outcome of several steps is one. Jᵀv is the derivative of ⟨J u, v⟩ by u, in which J u is
    linear.

    Args:
        run: The gradient at an input, with its graph.
        x: The input.
        parameters: The parameters of the gradient.
        replay: The replay of the map, which holds while the graph is walked.
    """

    def __init__(
        self,
        run: Callable[[Tensor], dict[str, Tensor]],
        x: Tensor,
        parameters: Mapping[str, nn.Parameter],
        replay: Replay,
    ) -> None:
        super().__init__(x, x.detach().requires_grad_(), parameters, replay)
        self._run, self._product = run, x
        self._directions: list[Tensor] = []

    def gradient(self) -> dict[str, Tensor]:
        if self._gradient is None:
            self._gradient = self._run(self._x)
            check_whole(self._gradient.values())
        return self._gradient

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        rows = {name: row for name, row in self.gradient().items() if row.requires_grad}
        with torch.enable_grad(), self._replay.kernels():
            if not self._directions and rows:
                self._directions = [torch.zeros_like(r).requires_grad_() for r in rows.values()]
                (self._product,) = torch.autograd.grad(
                    list(rows.values()),
                    self._x,
                    grad_outputs=self._directions,
                    create_graph=True,
                    materialize_grads=True,
                    allow_unused=True,
                )
            products = [dict(zip(rows, self._along(v), strict=True)) for v in directions]
        return [
            torch.stack(
                [
                    product.get(name, torch.zeros_like(p, requires_grad=False))
                    for product in products
                ]
            )
            for name, p in self._parameters.items()
        ]

    def _along(self, direction: Tensor) -> Sequence[Tensor]:
        if not self._product.requires_grad:
            return [torch.zeros_like(u) for u in self._directions]
        return torch.autograd.grad(
            self._product,
            self._directions,
            grad_outputs=direction,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )


def check_names(delta: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise an error if a name or a shape is not one of the shared gradient's.

    Raises:
        ValueError: If so.
    """
    for name, tensor in delta.items():
        if name not in parameters:
            raise ValueError(
                f"{name!r} is no shared parameter of this map. They are: {', '.join(parameters)}."
            )
        if tensor.shape != parameters[name].shape:
            raise ValueError(
                f"delta[{name!r}] has shape {tuple(tensor.shape)}, the parameter "
                f"{tuple(parameters[name].shape)}."
            )
