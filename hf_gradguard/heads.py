"""Linear heads on features of a frozen encoder, for training by differentially private gradients
of few samples a message.

What noise costs a head is decided by how many directions it has, and how well they are aligned
with what differs between samples. So features come from all layers, public samples say in which
directions they vary, these are brought closer to each other in size (half-whitened: divided by the
fourth root of their variance), the rest is cut off, and every sample has norm 1. A constant is one
of the features: a bias beside them would be half of every clipped gradient.

Reference: Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More
Data)" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import logging

from .gradient_map.domain import domain_of_model
from .models import load_tokenizer

__all__ = ["FeatureHead", "LayerFeatures", "head_of"]

logger = logging.get_logger(__name__)

_BATCH = 64  # samples at once
_LEAST_SHARE = 1e-7  # of the largest variance: below it there is rounding alone
_CONSTANT = 0.3  # the feature in a bias's place; chosen on held-out sentences of SST-2


class LayerFeatures(nn.Module):
    """What all layers of an encoder say of a sample: means of hidden states over attended
    positions, the states of the first position, and means of activations inside the layers.

    Args:
        encoder: A model of Transformers that takes texts or images. Of any other module what it
            returns are the features. Its weights stay as they are.

    Example:
        >>> inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        >>> LayerFeatures(model.base_model)(**inputs).ndim
        2
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> LayerFeatures:
        """Features stay the same: no dropout, no statistics of a batch."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        """`(B, width)` in float32, of an encoder in float64 in that."""
        return self.differentiable(*inputs, **named_inputs)

    def differentiable(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        """The same, with derivatives where they are asked for."""
        if not hasattr(self.encoder, "config"):
            features: Tensor = self.encoder(*inputs, **named_inputs)
            return _precise(features.flatten(1))
        attention_mask = named_inputs.get("attention_mask")
        with _activations_of(self.encoder) as activations:
            output = self.encoder(*inputs, **named_inputs, output_hidden_states=True)
        states = list(output.hidden_states)
        blocks = [_mean(state, attention_mask) for state in states]
        blocks += [state[:, 0] for state in states if state.ndim == 3]
        blocks += [_mean(state, attention_mask) for state in activations if state.ndim > 2]
        return torch.cat([_precise(block) for block in blocks], 1)


class FeatureHead(nn.Module):
    """A linear head on public directions of an encoder's features and a constant. `head` alone is
    trained, and it starts at zero.

    Args:
        encoder: Gives features of samples.
        directions: Maps features to the directions, before samples get norm 1.
        classes: How many.
        process: Makes the encoder's inputs of texts or images.

    Example:
        >>> public = ["a good film", "a bad one", "a joke"]
        >>> head = head_of(model, public, processing_class=tokenizer)
        >>> features = head.features_of(["a long film", "a plot"])
        >>> head(features=features, labels=torch.tensor([0, 1])).loss
        tensor(0.6931, grad_fn=<NllLossBackward0>)
    """

    def __init__(
        self,
        encoder: LayerFeatures,
        directions: nn.Linear,
        classes: int,
        process: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.directions = encoder, directions.requires_grad_(False)
        self.head = nn.Linear(directions.out_features + 1, classes, bias=False)
        nn.init.zeros_(self.head.weight)
        self._process = process

    def forward(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """The class scores of samples.

        Args:
            features: `(B, directions + 1)`, as `features_of` makes them once, so that a training
                need not.
            labels: `(B,)` class ids.
            **inputs: Of the encoder, in the place of `features`.
        """
        if features is None:
            features = self.encode(**inputs)
        logits = self.head(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def encode(self, **inputs: Any) -> Tensor:
        """Features of an encoder's inputs, `(B, directions + 1)`, each of norm 1."""
        return self.differentiable(**inputs)

    def differentiable(self, **inputs: Any) -> Tensor:
        """The same, with derivatives where they are asked for."""
        return self._with_constant(self.encoder.differentiable(**inputs))

    def features_of(self, samples: Sequence[Any] | Tensor) -> Tensor:
        """Features of texts or images, `(N, directions + 1)`, each of norm 1, the last of them a
        constant: what is to be trained on, made once.
        """
        features = _features(self.encoder, samples, self._process)
        return torch.cat([self._with_constant(batch).cpu() for batch in features])

    def batches_of(self, samples: Sequence[Any]) -> Iterator[Any]:
        """The encoder's inputs of texts or images.

        Raises:
            ValueError: If the encoder is no model of Transformers.
        """
        if self._process is None:
            raise ValueError("the head's encoder has to be a model of Transformers.")
        for chunk in _chunks(samples):
            yield self._process(list(chunk)).to(self.head.weight.device)

    def _with_constant(self, features: Tensor) -> Tensor:
        features = features.to(self.directions.weight)
        projected = nn.functional.normalize(self.directions(features))
        constant = projected.new_full((len(projected), 1), _CONSTANT)
        return torch.cat([(1 - _CONSTANT**2) ** 0.5 * projected, constant], 1)


def head_of(
    model: nn.Module,
    public: Sequence[Any] | Tensor | None = None,
    directions: int = 1400,
    classes: int | None = None,
    processing_class: Any = None,
    max_length: int = 128,
) -> FeatureHead:
    """A head to train in the place of a model, by `dp_sgd(per_sample=True, correlated=True)`.

    Args:
        model: An encoder of Transformers, or a classifier, whose encoder is taken. Of any other
            module what it returns for a batch of samples are the features.
        public: Texts or images that are nobody's secret, better thousands: what is learned of them
            is shared. Default: the 562 sentences that come with this package, for texts.
        directions: How many to keep, at most one less than there are public samples. More keep more
            of what differs between samples, and take more noise: one for every 16 private samples
            is enough.
        classes: How many. Default: the model's labels.
        processing_class: Its tokenizer or image processor. Default: of the model's name.
        max_length: Tokens of a text.

    Returns:
        The head, with nothing in it that depends on private data.

    Raises:
        ValueError: If there are fewer than three public samples, or no direction in which they
            differ.

    Example:
        >>> public = ["a good film", "a bad film", "the plot is slow", "it is a joke"]
        >>> head = head_of(model, public, processing_class=tokenizer)
        >>> head.head.in_features, float(head.head.weight.abs().sum())
        (4, 0.0)
    """
    config = getattr(model, "config", None)
    count = classes or (2 if config is None else config.num_labels)
    process = None if config is None else _processing(model, processing_class, max_length)
    encoder = LayerFeatures(getattr(model, "base_model", model) if config is not None else model)
    samples = packaged_sentences() if public is None else public
    if len(samples) < 3:
        raise ValueError(f"public has {len(samples)} samples, and whitening takes three or more.")
    features = torch.cat(list(_features(encoder, samples, process)))
    kept = whitened_directions(features, directions)
    if kept.out_features < directions:
        logger.warning(
            f"{len(samples)} public samples differ in {kept.out_features} directions, fewer than "
            f"the {directions} asked for: a head learns more with thousands of them."
        )
    return FeatureHead(encoder, kept, count, process)


def whitened_directions(features: Tensor, count: int) -> nn.Linear:
    """The directions of largest variance, each divided by the fourth root of it, after the mean is
    taken away.

    Args:
        features: `(N, width)`, of public samples.
        count: How many to keep at most.

    Raises:
        ValueError: If there is no direction.

    Example:
        >>> map = whitened_directions(torch.tensor([[4.0, 0], [-4, 0], [0, 1], [0, -1]]), 2)
        >>> map(torch.eye(2)).abs().round(decimals=2)
        tensor([[0.5500, 0.0000],
                [0.0000, 1.1100]], grad_fn=<RoundBackward1>)
    """
    mean = features.double().mean(0)
    matrix = half_whitened(features.double() - mean, count)
    directions = nn.Linear(matrix.shape[1], matrix.shape[0])
    with torch.no_grad():
        directions.weight.copy_(matrix)
        directions.bias.copy_(-matrix @ mean)
    return directions


def half_whitened(rows: Tensor, count: int) -> Tensor:
    """The directions in which rows `(N, width)` differ most from zero, each divided by the fourth
    root of its second moment, `(count, width)`.

    Raises:
        ValueError: If there is no direction.
    """
    rows = rows.double()
    is_wide = len(rows) <= rows.shape[1]
    # eigenvectors of the smaller of both products
    values, vectors = torch.linalg.eigh(rows @ rows.T if is_wide else rows.T @ rows)
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    is_real = values > _LEAST_SHARE * values[0]
    if not bool(is_real.any()):
        raise ValueError("public samples do not differ: give texts or images that do.")
    values, vectors = values[is_real], vectors[:, is_real]
    if is_wide:
        vectors = rows.T @ (vectors / values.sqrt())
    return (vectors / (values / (len(rows) - 1)) ** 0.25).T


def _chunks(samples: Sequence[Any] | Tensor) -> Iterator[Any]:
    for start in range(0, len(samples), _BATCH):
        yield samples[start : start + _BATCH]


@torch.no_grad()
def _features(
    encoder: LayerFeatures,
    samples: Sequence[Any] | Tensor,
    process: Callable[[Sequence[Any]], Any] | None,
) -> Iterator[Tensor]:
    """A batch at a time, on the CPU."""
    parameter = next(encoder.parameters(), None)
    device = "cpu" if parameter is None else parameter.device
    for chunk in _chunks(samples):
        if process is not None:
            yield encoder(**process(list(chunk)).to(device)).cpu()
        else:
            inputs = chunk if isinstance(chunk, Tensor) else torch.stack(list(chunk))
            yield encoder(inputs.to(device)).cpu()


def _processing(
    model: Any, processing_class: Any, max_length: int
) -> Callable[[Sequence[Any]], Any]:
    """What makes inputs of texts, or of images."""
    takes_images = domain_of_model(model).name == "image"
    if processing_class is None:
        name = model.config.name_or_path
        processing_class = (
            AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            if takes_images
            else load_tokenizer(name)
        )
    if takes_images:
        return lambda images: processing_class(list(images), return_tensors="pt")
    longest = getattr(model.config, "max_position_embeddings", None) or max_length
    settings = {"padding": True, "truncation": True, "max_length": min(max_length, longest)}
    return lambda texts: processing_class(list(texts), return_tensors="pt", **settings)


def packaged_sentences() -> list[str]:
    from importlib.resources import files

    from .data.samples import load_texts

    folder = files("hf_gradguard.data") / "sentiment"
    return [text for name in ("train", "dev") for text in load_texts(str(folder / f"{name}.tsv"))]


@contextmanager
def _activations_of(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """What the activation functions of its layers return inside, in order."""
    activations: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: activations.append(output))
        for module in encoder.modules()
        if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
        and not isinstance(module, nn.MultiheadAttention)
    ]
    try:
        yield activations
    finally:
        for hook in hooks:
            hook.remove()


def _precise(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _mean(state: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Over attended positions of `(B, T, width)`, or all places of `(B, width, rows, columns)`."""
    if state.ndim == 4:
        return state.mean((2, 3))
    if attention_mask is None or attention_mask.shape != state.shape[:2]:
        return state.mean(1)
    attended = attention_mask[..., None].to(state)
    return (state * attended).sum(1) / attended.sum(1).clamp(min=1)
