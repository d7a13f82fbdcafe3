"""Linear heads on features of a frozen encoder, for differentially private training.

What noise costs a head depends on how many directions it has, and how well they are aligned with
what differs between samples. So features come from all layers, and public samples say in which
directions they vary. These directions are half-whitened (divided by the fourth root of their
variance), the others are cut off, and every sample has norm 1. A constant is one of the features: a
bias beside them would be half of every clipped gradient.

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

from ..gradient_map.domain import domain_of_model
from ..models import load_tokenizer

__all__ = ["FeatureHead", "LayerFeatures", "head_of"]

logger = logging.get_logger(__name__)

_BATCH = 64  # samples at once
_LEAST_FRACTION = 1e-7  # of the largest variance: below it there is rounding alone
_CONSTANT = 0.3  # the feature in a bias's place; chosen on held-out sentences of SST-2


class LayerFeatures(nn.Module):
    """A frozen encoder that returns features from all of its layers.

    The features are means of hidden states over attended positions, the states of the first
    position, and means of activations inside the layers.

    Args:
        encoder: A model of Transformers that takes texts or images. The features of any other
            module are what it returns. Its weights do not change.

    Example:
        >>> inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        >>> LayerFeatures(model.base_model)(**inputs).ndim
        2
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> LayerFeatures:
        """Keep eval mode, so that features have no dropout and no statistics of a batch."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        """Return the features, `(B, width)`, without derivatives.

        They are in float32, or in float64 if the encoder is.
        """
        return self.differentiable(*inputs, **named_inputs)

    def differentiable(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        """Return the features, `(B, width)`, with derivatives where gradients are enabled."""
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
    """A linear head on public directions of an encoder's features and a constant.

    Only `head` is trained, and it starts at zero.

    Args:
        encoder: The module that gives features of samples.
        directions: The map from features to directions, before samples get norm 1.
        classes: The number of classes.
        process: The function that makes the encoder's inputs of texts or images.

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
        """Compute the class scores of samples.

        Args:
            features: Features that `features_of` computed once, `(B, directions + 1)`, so that a
                training need not compute them again.
            labels: Class ids, `(B,)`; without them there is no loss.
            **inputs: The encoder's inputs, in the place of `features`.
        """
        if features is None:
            features = self.encode(**inputs)
        logits = self.head(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def encode(self, **inputs: Any) -> Tensor:
        """Return features of an encoder's inputs, `(B, directions + 1)`, each row of norm 1."""
        return self.differentiable(**inputs)

    def differentiable(self, **inputs: Any) -> Tensor:
        """Return what `encode` returns, with derivatives where gradients are enabled."""
        return self._with_constant(self.encoder.differentiable(**inputs))

    def features_of(self, samples: Sequence[Any] | Tensor) -> Tensor:
        """Return features of texts or images, `(N, directions + 1)`, to train on.

        Each row has norm 1, and its last entry is a constant.
        """
        features = _features(self.encoder, samples, self._process)
        return torch.cat([self._with_constant(batch).cpu() for batch in features])

    def batches_of(self, samples: Sequence[Any]) -> Iterator[Any]:
        """Yield the encoder's inputs for texts or images, a batch at a time.

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
    """Return a head to train in place of a model, by `dp_sgd(per_sample=True, correlated=True)`.

    Args:
        model: An encoder of Transformers, or a classifier, whose encoder is taken. The features of
            any other module are what it returns for a batch of samples.
        public: Texts or images that are nobody's secret, preferably thousands: what is learned from
            them is shared. Default: the 562 sentences that come with this package, for texts.
        directions: The number of directions to keep, at most one less than there are public
            samples. More keep more of what differs between samples, and take more noise: one for
            every 16 private samples is enough.
        classes: The number of classes. Default: the number of the model's labels.
        processing_class: The tokenizer or image processor. Default: the one of the model's name.
        max_length: The most tokens of a text.

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
    """Return the centered map onto the directions of largest variance, half-whitened.

    Each direction is divided by the fourth root of its variance, after the mean is subtracted.

    Args:
        features: Features of public samples, `(N, width)`.
        count: The most directions to keep.

    Raises:
        ValueError: If the samples do not differ in any direction.

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
    """Return the directions in which rows differ most from zero, half-whitened, `(count, width)`.

    Each direction is divided by the fourth root of its second moment.

    Args:
        rows: The rows, `(N, width)`.
        count: The most directions to keep.

    Raises:
        ValueError: If the rows do not differ in any direction.
    """
    rows = rows.double()
    is_wide = len(rows) <= rows.shape[1]
    # eigenvectors of the smaller of both products
    values, vectors = torch.linalg.eigh(rows @ rows.T if is_wide else rows.T @ rows)
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    is_real = values > _LEAST_FRACTION * values[0]
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
    """Yield the features of samples on the CPU, a batch at a time."""
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
    """Return the function that makes the encoder's inputs of texts or images."""
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

    from ..data.samples import load_texts

    folder = files("hf_gradguard.data") / "sentiment"
    return [text for name in ("train", "dev") for text in load_texts(str(folder / f"{name}.tsv"))]


@contextmanager
def _activations_of(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the activation functions inside an encoder's layers return, in order."""
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
    """Return means over attended positions of `(B, T, width)`, or over all places of an image."""
    if state.ndim == 4:
        return state.mean((2, 3))
    if attention_mask is None or attention_mask.shape != state.shape[:2]:
        return state.mean(1)
    attended = attention_mask[..., None].to(state)
    return (state * attended).sum(1) / attended.sum(1).clamp(min=1)
