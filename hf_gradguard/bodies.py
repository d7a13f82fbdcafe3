"""What an encoder under a trained head still has to learn, by differentially private gradients of
few samples a message.

Noise is as large as the square root of how many numbers are shared, so an encoder's millions do not
learn under it. Its linear layers move in public directions instead, W + P S Qᵀ: P are the
directions in which public samples' scores depend on a layer's outputs, Q those in which its inputs
vary. All entries of all S move together in the directions in which public samples' gradients vary,
closer to each other in size (half-whitened, as a head's features are). What is trained is one
number for each of these directions, and what comes out is an ordinary model: `merged()`.

The training is that of a linear model: a sample's row is how fast its scores change with each
number, made once. So noise on the way, which is far larger than in the last weights, does not
change what gradients are taken of.

Which way a score depends on the body is known once there is a head, so a head is trained first, on
samples that this training does not see: then one bound holds for every sample (parallel
composition).

References: Yu, Zhang, Chen, Yin and Liu, "Do not let privacy overbill utility: gradient embedding
perturbation for private learning" (2021), where public gradients give directions to project on;
Mu, Liang and Li, "Gradients as features for deep representation learning" (2020): linear models on
a trained network's gradients.
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

_SAMPLES_OF_LAYERS = 1000  # by which a layer's directions are found: they have thousands of tokens
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
    """A head whose encoder moves in public directions, to the first order. `moves` alone is
    trained, on rows that are made once.

    Args:
        head: Trained, on other samples. It stays as it is.
        outputs: Directions of each linear layer's outputs, `(out, p)`, by its name in the head's
            encoder.
        inputs: The same of its inputs, `(in, q)`.
        mixing: `(directions, Σ p·q)`: the directions of all layers' S together.

    Attributes:
        layers: Names of the layers, in the order of `mixing`.

    Example:
        >>> from torch import nn
        >>> from hf_gradguard.heads import head_of
        >>> public = ["a good film", "a bad one", "a joke", "the plot is slow"]
        >>> head = head_of(model, public, 3, processing_class=tokenizer)
        >>> head.head.weight = nn.Parameter(torch.randn(2, 4))  # in place of a training
        >>> body = sketched_body(head, public, directions=4)
        >>> rows = body.rows_of(["a long film", "a plot"])
        >>> body(**rows, labels=torch.tensor([0, 1])).loss.requires_grad
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
        self._start = copy.deepcopy(head).requires_grad_(False)
        self.moves = nn.Linear(len(mixing), 1, bias=False, dtype=mixing.dtype, device=mixing.device)
        nn.init.zeros_(self.moves.weight)
        self.layers = list(outputs)
        for number, name in enumerate(self.layers):
            self.register_buffer(f"outputs_{number}", outputs[name].contiguous())
            self.register_buffer(f"inputs_{number}", inputs[name].contiguous())
        self.register_buffer("mixing", mixing.contiguous())

    def forward(
        self, scores: Tensor, tangents: Tensor, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """The class scores of rows, linear in `moves`.

        Args:
            scores: `(B, classes)`.
            tangents: `(B, classes - 1, directions)`.
            labels: `(B,)` class ids.
        """
        logits = scores + nn.functional.pad(self.moves(tangents)[..., 0], (0, 1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def rows_of(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """What this is trained on: one pass of the encoder for a sample, and one back for each
        class but the last.

        Args:
            samples: Texts or images.

        Returns:
            `scores` `(N, classes)` of the head before anything moves, and `tangents`
            `(N, classes - 1, directions)`: how fast each class gets ahead of the last one.
        """
        scores, tangents = [], []
        outputs, inputs = self._directions()
        for batch in self._start.batches_of(samples):
            with torch.enable_grad(), passes_of(self._start.encoder, self.layers) as passes:
                batch_scores = self._start.head(self._start.differentiable(**batch))
                ahead = (batch_scores[:, :-1] - batch_scores[:, -1:]).sum(0)
                ends = [passes[name].outputs for name in self.layers]
                slopes = [torch.autograd.grad(part, ends, retain_graph=True) for part in ahead]
            by_class = [
                sketches(passes, dict(zip(self.layers, part, strict=True)), outputs, inputs)
                for part in slopes
            ]
            scores.append(batch_scores.detach().cpu())
            tangents.append((torch.stack(by_class, 1) @ self.mixing.T).cpu())
        return {"scores": torch.cat(scores), "tangents": torch.cat(tangents)}

    @torch.no_grad()
    def merged(self) -> FeatureHead:
        """The head with its encoder's weights moved: an ordinary model, whose scores are this one's
        to the first order.
        """
        moved = copy.deepcopy(self._start)
        layers = dict(moved.encoder.named_modules())
        outputs, inputs = self._directions()
        shapes = [(outputs[name].shape[1], inputs[name].shape[1]) for name in self.layers]
        parts = (self.moves.weight @ self.mixing)[0].split([p * q for p, q in shapes])
        for name, part, shape in zip(self.layers, parts, shapes, strict=True):
            layer = layers[name]
            assert isinstance(layer, nn.Linear)
            layer.weight += outputs[name] @ part.view(shape) @ inputs[name].T
        return moved

    def _directions(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """P and Q of each layer."""
        outputs, inputs = (
            {name: self.get_buffer(f"{kind}_{place}") for place, name in enumerate(self.layers)}
            for kind in ("outputs", "inputs")
        )
        return outputs, inputs


def sketched_body(
    head: FeatureHead,
    public: Sequence[Any] | None = None,
    directions: int = 1400,
    outputs: int = 8,
    inputs: int = 48,
) -> SketchedBody:
    """The encoder of a head, to be trained by `dp_sgd(per_sample=True, correlated=True)`.

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
    some = samples[:: -(-len(samples) // _SAMPLES_OF_LAYERS)]
    for passes, slopes in _public_passes(head, some, layers):
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
def passes_of(encoder: nn.Module, names: Sequence[str]) -> Iterator[dict[str, LayerPass]]:
    """What goes into these layers and comes out of them in a pass, by their names."""
    passes: dict[str, LayerPass] = {}
    modules = dict(encoder.named_modules())

    def watched(name: str) -> Callable[[Any, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, inputs: tuple[Tensor], result: Tensor) -> Tensor:
            if name in passes:
                raise ValueError(f"the encoder uses {name} twice in a pass, so it cannot move.")
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
