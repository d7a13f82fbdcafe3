"""A head and the body under it, trained together by differentially private gradients of few samples
a message.

Noise is as large as the square root of how many numbers are shared, so an encoder's millions do not
learn under it. Its linear layers move in public directions instead, W + P S Qᵀ: P are the
directions in which public samples' scores depend on a layer's outputs, Q those in which its inputs
vary. All entries of all S move together in the directions in which public samples' gradients vary,
closer to each other in size (half-whitened, as a head's features are). What is trained is the head
and one number for each of these directions. What comes out is an ordinary model: `merged()`.

Which way a score depends on the body is known once there is a head, so a head is trained first, on
samples that this training does not see: then one bound holds for every sample (parallel
composition).

Reference: Yu, Zhang, Chen, Yin and Liu, "Do not let privacy overbill utility: gradient embedding
perturbation for private learning" (2021), where public gradients give directions to project on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from .heads import FeatureHead, half_whitened, packaged_sentences

__all__ = ["SketchedBody", "sketched_body"]

_HALF = 0.5**0.5  # of a sample's norm for the head, and as much for the body
_LEAST_SHARE = 1e-10  # of the largest second moment: below it there is rounding alone


class LayerPass(NamedTuple):
    """One linear layer in a pass.

    Args:
        inputs: `(B, ..., in)`.
        outputs: `(B, ..., out)`, which slopes are taken by.
    """

    inputs: Tensor
    outputs: Tensor


class SketchedBody(nn.Module):
    """A head whose encoder moves in public directions. `head` and `moves` alone are trained.

    Args:
        head: Trained, on other samples.
        outputs: Directions of each linear layer's outputs, `(out, p)`, by its name in the head's
            encoder.
        inputs: The same of its inputs, `(in, q)`.
        mixing: `(directions, Σ p·q)`: the directions of all layers' S together.

    Example:
        >>> from torch import nn
        >>> from hf_gradguard.heads import head_of
        >>> public = ["a good film", "a bad one", "a joke", "the plot is slow"]
        >>> head = head_of(model, public, 3, processing_class=tokenizer)
        >>> head.head.weight = nn.Parameter(torch.randn(2, 4))  # in place of a training
        >>> body = sketched_body(head, public, directions=4)
        >>> inputs = tokenizer(["a long film", "a plot"], padding=True, return_tensors="pt")
        >>> body(**inputs, labels=torch.tensor([0, 1])).loss.requires_grad
        True
        >>> type(body.merged()).__name__
        'FeatureHead'
    """

    mixing: Tensor

    def __init__(
        self,
        head: FeatureHead,
        outputs: dict[str, Tensor],
        inputs: dict[str, Tensor],
        mixing: Tensor,
    ) -> None:
        super().__init__()
        self._features = copy.deepcopy(head).requires_grad_(False)
        width, classes = head.head.in_features, head.head.out_features
        kind: Any = {"bias": False, "dtype": mixing.dtype, "device": mixing.device}
        self.head, self.moves = nn.Linear(width, classes, **kind), nn.Linear(len(mixing), 1, **kind)
        with torch.no_grad():
            self.head.weight.copy_(head.head.weight / _HALF)
            self.moves.weight.zero_()
        self._layers = list(outputs)
        for number, name in enumerate(self._layers):
            self.register_buffer(f"outputs_{number}", outputs[name])
            self.register_buffer(f"inputs_{number}", inputs[name])
        self.register_buffer("mixing", mixing)

    def train(self, mode: bool = True) -> SketchedBody:
        """No dropout: a layer's move is the same in every pass."""
        return super().train(False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """The class scores of samples.

        With labels, each sample's loss also depends on `moves`, by a term that is zero and has the
        loss's gradient: the pass through the encoder is made and taken back here.

        Args:
            input_ids: Of the encoder, as its other inputs.
            attention_mask: Its own.
            token_type_ids: Its own.
            pixel_values: Its own.
            labels: `(B,)` class ids.
        """
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask,
            "token_type_ids": token_type_ids, "pixel_values": pixel_values,
        }  # fmt: skip
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        if labels is None or not self.moves.weight.requires_grad:
            with torch.no_grad(), self._moved():
                features = self._features.encode(**inputs)
            logits = self.head(_HALF * features)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)
        with torch.enable_grad(), self._moved() as passes:
            features = self._features.differentiable(**inputs)
            scores = nn.functional.linear(_HALF * features, self.head.weight.detach())
            total = nn.functional.cross_entropy(scores, labels, reduction="sum")
            ends = [passes[name].outputs for name in self._layers]
            slopes = torch.autograd.grad(total, ends)
        by_name = dict(zip(self._layers, slopes, strict=True))
        gradients = _HALF * sketches(passes, by_name, *self._directions()) @ self.mixing.T
        logits = self.head(_HALF * features.detach())
        change = self.moves(gradients)[:, 0]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        return SequenceClassifierOutput(
            loss=(losses + change - change.detach()).mean(), logits=logits
        )

    @torch.no_grad()
    def merged(self) -> FeatureHead:
        """The same scores by a head and an encoder of the usual kind, whose weights have moved."""
        plain = copy.deepcopy(self._features)
        layers = dict(plain.encoder.named_modules())
        for name, (outputs, move, inputs) in self._low_ranks().items():
            layer = layers[name]
            assert isinstance(layer, nn.Linear)
            layer.weight += outputs @ move @ inputs.T
        plain.head.weight.copy_(_HALF * self.head.weight)
        return plain

    def _directions(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """P and Q of each layer."""
        outputs, inputs = (
            {name: self.get_buffer(f"{kind}_{place}") for place, name in enumerate(self._layers)}
            for kind in ("outputs", "inputs")
        )
        return outputs, inputs

    def _low_ranks(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """P, S and Q of each layer."""
        outputs, inputs = self._directions()
        shapes = [(outputs[name].shape[1], inputs[name].shape[1]) for name in self._layers]
        moves = (_HALF * self.moves.weight.detach() @ self.mixing)[0]
        parts = moves.split([rows * columns for rows, columns in shapes])
        return {
            name: (outputs[name], part.view(shape), inputs[name])
            for name, part, shape in zip(self._layers, parts, shapes, strict=True)
        }

    @contextmanager
    def _moved(self) -> Iterator[dict[str, LayerPass]]:
        """Passes through the encoder with its layers moved."""
        factors = self._low_ranks()

        def moved(name: str, inputs: Tensor, result: Tensor) -> Tensor:
            outputs, move, directions = factors[name]
            return result + inputs @ directions @ move.T @ outputs.T

        with passes_of(self._features.encoder, self._layers, moved) as passes:
            yield passes


def sketched_body(
    head: FeatureHead,
    public: Sequence[Any] | None = None,
    directions: int = 1400,
    outputs: int = 8,
    inputs: int = 48,
) -> SketchedBody:
    """A head and its encoder to train together, by `dp_sgd(per_sample=True, correlated=True)`.

    Args:
        head: Trained by some hundred messages, by the same defense, of samples that this training
            does not see.
        public: Texts or images that are nobody's secret, better thousands. Default: the sentences
            that come with this package, for texts.
        directions: In how many the encoder moves, at most as many as there are public samples.
        outputs: Directions of each linear layer's outputs.
        inputs: Directions of its inputs.

    Returns:
        The model, with the head's scores at the start, and nothing else in it that depends on
        private data.

    Raises:
        ValueError: If the encoder has no linear layers inside, or the scores do not depend on them
            (a head that is zero).

    Example:
        >>> from hf_gradguard.heads import head_of
        >>> public = ["a good film", "a bad one", "a joke", "the plot is slow"]
        >>> head = head_of(model, public, 3, processing_class=tokenizer)
        >>> head.head.weight = torch.nn.Parameter(torch.randn(2, 4))  # in place of a training
        >>> sketched_body(head, public, directions=4).moves
        Linear(in_features=4, out_features=1, bias=False)
    """
    samples = packaged_sentences() if public is None else public
    if not bool(head.head.weight.any()):
        raise ValueError("a head that is zero says nothing of its encoder: train the head first.")
    of_outputs, of_inputs = _layers_directions(head, samples, outputs, inputs)
    gradients = torch.cat(
        [
            sketches(passes, slopes, of_outputs, of_inputs).cpu()
            for passes, slopes in _public_passes(head, samples, list(of_outputs))
        ]
    )
    mixing = half_whitened(gradients, directions).to(gradients)
    mixing /= (gradients @ mixing.T).norm(dim=1).median()
    return SketchedBody(head, of_outputs, of_inputs, mixing.to(head.head.weight.device))


def _layers_directions(
    head: FeatureHead, samples: Sequence[Any], outputs: int, inputs: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of each layer's outputs and inputs."""
    layers = [name for name, part in head.encoder.named_modules() if isinstance(part, nn.Linear)]
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    for passes, slopes in _public_passes(head, samples, layers):
        for name, layer_slopes in slopes.items():
            rows, row_slopes = passes[name].inputs.flatten(0, -2), layer_slopes.flatten(0, -2)
            rows = rows[row_slopes.abs().sum(1) > 0]  # what no score depends on is padding
            slope_moment, moment = row_slopes.T @ row_slopes, rows.T @ rows
            if name in moments:
                slope_moment, moment = slope_moment + moments[name][0], moment + moments[name][1]
            moments[name] = slope_moment, moment
    if not moments:
        raise ValueError("the head's encoder has no linear layers that its scores depend on.")
    return (
        {name: scaled_directions(moment[0], outputs) for name, moment in moments.items()},
        {name: scaled_directions(moment[1], inputs) for name, moment in moments.items()},
    )


def sketch(inputs: Tensor, slopes: Tensor) -> Tensor:
    """Each sample's sum over positions of what goes in times what comes back, `(B, p·q)`.

    Args:
        inputs: `(B, ..., q)`.
        slopes: `(B, ..., p)`.

    Example:
        >>> sketch(torch.tensor([[[1.0, 2]]]), torch.tensor([[[3.0]]]))
        tensor([[3., 6.]])
    """
    count = len(inputs)
    inputs, slopes = (
        inputs.reshape(count, -1, inputs.shape[-1]),
        slopes.reshape(count, -1, slopes.shape[-1]),
    )
    return (slopes.mT @ inputs).flatten(1)


def sketches(
    passes: Mapping[str, LayerPass],
    slopes: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Each sample's gradient by all layers' S, `(B, Σ p·q)`, of slopes in the order of layers."""
    parts = [
        sketch(passes[name].inputs @ inputs[name], slope @ outputs[name])
        for name, slope in slopes.items()
    ]
    return torch.cat(parts, 1)


def scaled_directions(moment: Tensor, count: int) -> Tensor:
    """The first eigenvectors of a second moment `(n, n)`, each divided by the fourth root of its
    value, `(n, count)`.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    return (vectors / values.clamp(min=_LEAST_SHARE * values[0]) ** 0.25).to(moment)


@contextmanager
def passes_of(
    encoder: nn.Module,
    names: Sequence[str],
    change: Callable[[str, Tensor, Tensor], Tensor] | None = None,
) -> Iterator[dict[str, LayerPass]]:
    """What goes into these layers and comes out of them in a pass, by their names; with a change to
    what comes out.
    """
    passes: dict[str, LayerPass] = {}
    modules = dict(encoder.named_modules())

    def watched(name: str) -> Callable[[Any, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
            if name in passes:
                raise ValueError(f"the encoder uses {name} twice in a pass, so it cannot move.")
            if change is not None:
                result = change(name, inputs[0], result)
            if torch.is_grad_enabled() and not result.requires_grad:
                result = result.detach().requires_grad_()
            passes[name] = LayerPass(inputs[0].detach(), result)
            return result

        return hook

    hooks = [modules[name].register_forward_hook(watched(name)) for name in names]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def _public_passes(
    head: FeatureHead, samples: Sequence[Any], names: Sequence[str]
) -> Iterator[tuple[dict[str, LayerPass], dict[str, Tensor]]]:
    """Of how far the class of the highest score is ahead of the next, the slopes by those layers
    that it depends on.
    """
    for inputs in head.batches_of(samples):
        with torch.enable_grad(), passes_of(head.encoder, names) as passes:
            scores = head.head(head.differentiable(**inputs)).topk(2).values
            ahead = (scores[:, 0] - scores[:, 1]).sum()
            results = [layer.outputs for layer in passes.values()]
            slopes = torch.autograd.grad(ahead, results, allow_unused=True)
        by_name = dict(zip(passes, slopes, strict=True))
        yield passes, {name: slope for name, slope in by_name.items() if slope is not None}
