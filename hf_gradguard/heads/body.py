"""Encoders under a trained head that learn by differentially private gradients.

Noise is as large as the square root of how many numbers are shared, so an encoder's millions of
weights do not learn under it. Its linear layers move in public directions instead: W + P S Qᵀ. P
holds the directions in which public samples' scores depend on a layer's outputs, Q those in which
its inputs vary. All entries of all S move together, in the directions in which public samples'
gradients vary. These directions are half-whitened, as a head's features are, so that they are
closer to each other in size. One number is trained for each direction, and `merged()` returns an
ordinary model.

The training is that of a linear model. A sample's row says how fast its scores change with each
number, and it is computed once. Noise during training is far larger than in the last weights, but
it does not change the point at which gradients are taken.

How a score depends on the body is known only once there is a head. So a head is trained first, on
samples that this training does not see; then one bound holds for every sample (parallel
composition).

References: Yu, Zhang, Chen, Yin and Liu, "Do not let privacy overbill utility: gradient embedding
perturbation for private learning" (2021), where public gradients give directions to project on; Mu,
Liang and Li, "Gradients as features for deep representation learning" (2020): linear models on a
trained network's gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from .features import half_whitened
from .head import PrivateHead
from .making import packaged_sentences

__all__ = ["SketchedBody", "sketched_body"]

_SAMPLES_OF_LAYERS = 1000  # by which a layer's directions are found: they have thousands of tokens
_LEAST_FRACTION = 1e-10  # of the largest second moment: below it there is rounding alone


class LayerPass(NamedTuple):
    """The inputs and outputs of one linear layer in one pass.

    Args:
        inputs: The layer's inputs, `(B, ..., in)`.
        outputs: The layer's outputs, `(B, ..., out)`; slopes are derivatives by them.
    """

    inputs: Tensor
    outputs: Tensor


class SketchedBody(nn.Module):
    """A head whose encoder moves in public directions, to the first order.

    Only `moves` is trained, on rows that are computed once.

    Args:
        head: A head that was trained on other samples. It does not change.
        outputs: Directions of each linear layer's outputs, `(out, p)`, by the layer's name in the
            head's encoder.
        inputs: Directions of each linear layer's inputs, `(in, q)`, by the same names.
        mixing: The directions of all layers' S together, `(directions, Σ p·q)`.

    Attributes:
        layers: Names of the layers, in the order of `mixing`.

    Example:
        >>> from torch import nn
        >>> from hf_gradguard.heads import private_head
        >>> public = ["a good film", "a bad one", "a joke", "the plot is slow"]
        >>> head = private_head(model, public, processing_class=tokenizer)
        >>> head.head.weight = nn.Parameter(torch.randn(2, 4))  # in place of a training
        >>> body = sketched_body(head, public, directions=4)
        >>> rows = body.rows_of(["a long film", "a plot"])
        >>> body(**rows, labels=torch.tensor([0, 1])).loss.requires_grad
        True
        >>> type(body.merged()).__name__
        'PrivateHeadForSequenceClassification'
    """

    mixing: Tensor

    def __init__(
        self,
        head: PrivateHead,
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
        """Compute the class scores of rows, which are linear in `moves`.

        Args:
            scores: The head's scores before anything moves, `(B, classes)`.
            tangents: How fast scores change with each direction, `(B, classes - 1, directions)`.
            labels: Class ids, `(B,)`; without them there is no loss.
        """
        logits = scores + nn.functional.pad(self.moves(tangents)[..., 0], (0, 1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def rows_of(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Compute the rows that this model is trained on.

        The encoder runs once forward for each sample, and once backward for each class but the
        last.

        Args:
            samples: Texts or images.

        Returns:
            `scores` `(N, classes)` of the head before anything moves, and `tangents` `(N, classes -
                1, directions)`: how fast each class gets ahead of the last one.
        """
        scores, tangents = [], []
        outputs, inputs = self._directions()
        for batch in self._start.batches_of(samples):
            with torch.enable_grad(), passes_of(encoder_of(self._start), self.layers) as passes:
                batch_scores = self._start.head(self._start.differentiable(**batch))
                ahead = (batch_scores[:, :-1] - batch_scores[:, -1:]).sum(0)
                ends = [passes[name].outputs for name in self.layers]
                slopes = [torch.autograd.grad(lead, ends, retain_graph=True) for lead in ahead]
            by_class = [
                sketches(passes, dict(zip(self.layers, layer_slopes, strict=True)), outputs, inputs)
                for layer_slopes in slopes
            ]
            scores.append(batch_scores.detach().cpu())
            tangents.append((torch.stack(by_class, 1) @ self.mixing.T).cpu())
        return {"scores": torch.cat(scores), "tangents": torch.cat(tangents)}

    @torch.no_grad()
    def merged(self) -> PrivateHead:
        """Return the head with its encoder's weights moved: an ordinary model.

        Its scores are those of this model, to the first order.
        """
        moved = copy.deepcopy(self._start)
        layers = dict(encoder_of(moved).named_modules())
        outputs, inputs = self._directions()
        shapes = [(outputs[name].shape[1], inputs[name].shape[1]) for name in self.layers]
        layer_moves = (self.moves.weight @ self.mixing)[0].split([p * q for p, q in shapes])
        for name, move, shape in zip(self.layers, layer_moves, shapes, strict=True):
            layer = layers[name]
            assert isinstance(layer, nn.Linear)
            layer.weight += outputs[name] @ move.view(shape) @ inputs[name].T
        return moved

    def _directions(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return P and Q of each layer, by its name."""
        outputs, inputs = (
            {name: self.get_buffer(f"{kind}_{place}") for place, name in enumerate(self.layers)}
            for kind in ("outputs", "inputs")
        )
        return outputs, inputs


def sketched_body(
    head: PrivateHead,
    public: Sequence[Any] | None = None,
    directions: int = 1400,
    outputs: int = 8,
    inputs: int = 48,
) -> SketchedBody:
    """Return a head's encoder, ready to be trained by `dp_sgd(per_sample=True, correlated=True)`.

    Args:
        head: A head that the same defense trained in some hundred messages, on samples that this
            training does not see.
        public: Texts or images that are nobody's secret, preferably thousands. Default: the
            sentences that come with this package, for texts.
        directions: The number of directions in which the encoder moves, at most the number of
            public samples.
        outputs: The number of directions of each linear layer's outputs.
        inputs: The number of directions of each linear layer's inputs.

    Returns:
        The model. It starts with the head's scores, and nothing else in it depends on private data.

    Raises:
        ValueError: If the encoder has no linear layers inside, or the scores do not depend on them
            (a head that is zero).

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> public = ["a good film", "a bad one", "a joke", "the plot is slow"]
        >>> head = private_head(model, public, processing_class=tokenizer)
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
    head: PrivateHead, samples: Sequence[Any], outputs: int, inputs: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the directions of each layer's outputs and inputs, by the layer's name."""
    layers = [
        name for name, layer in encoder_of(head).named_modules() if isinstance(layer, nn.Linear)
    ]
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    fewer_samples = samples[:: -(-len(samples) // _SAMPLES_OF_LAYERS)]
    for passes, slopes in _public_passes(head, fewer_samples, layers):
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


def encoder_of(head: PrivateHead) -> nn.Module:
    """Return a head's encoder.

    Args:
        head: The head.

    Raises:
        ValueError: If it has none, or one that is no model of Transformers.
    """
    if head.encoder is None or head.config.encoder_config is None:
        raise ValueError("the head's encoder has to be a model of Transformers.")
    return head.encoder


def sketch(inputs: Tensor, slopes: Tensor) -> Tensor:
    """Return each sample's sum over positions of outer products of slopes and inputs, `(B, p·q)`.

    Args:
        inputs: What goes into the layer, `(B, ..., q)`.
        slopes: Derivatives by the layer's outputs, `(B, ..., p)`.

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
    """Return each sample's gradient by all layers' S, `(B, Σ p·q)`, in the order of `slopes`.

    Args:
        passes: Each layer's inputs and outputs, by its name.
        slopes: Derivatives by each layer's outputs, `(B, ..., out)`.
        outputs: Directions P of each layer's outputs, `(out, p)`.
        inputs: Directions Q of each layer's inputs, `(in, q)`.
    """
    gradients = [
        sketch(passes[name].inputs @ inputs[name], slope @ outputs[name])
        for name, slope in slopes.items()
    ]
    return torch.cat(gradients, 1)


def scaled_directions(moment: Tensor, count: int) -> Tensor:
    """Return the first eigenvectors of a second moment, scaled, `(n, count)`.

    Each is divided by the fourth root of its eigenvalue.

    Args:
        moment: A second moment, `(n, n)`.
        count: The number of eigenvectors, those of the largest eigenvalues first.

    Example:
        >>> scaled_directions(torch.diag(torch.tensor([16.0, 1.0])), 1).abs()
        tensor([[0.5000],
                [0.0000]])
    """
    values, vectors = torch.linalg.eigh(moment.double())
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    return (vectors / values.clamp(min=_LEAST_FRACTION * values[0]) ** 0.25).to(moment)


@contextmanager
def passes_of(encoder: nn.Module, names: Sequence[str]) -> Iterator[dict[str, LayerPass]]:
    """Record the inputs and outputs of these layers during a pass, by their names.

    Args:
        encoder: The module that runs inside the context.
        names: Names of its linear layers.

    Raises:
        ValueError: If the encoder uses a layer twice in a pass.
    """
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
    head: PrivateHead, samples: Sequence[Any], names: Sequence[str]
) -> Iterator[tuple[dict[str, LayerPass], dict[str, Tensor]]]:
    """Yield passes over public samples, with slopes of the highest score's lead over the next one.

    The slopes are derivatives by the outputs of those layers on which the lead depends.
    """
    for inputs in head.batches_of(samples):
        with torch.enable_grad(), passes_of(encoder_of(head), names) as passes:
            scores = head.head(head.differentiable(**inputs)).topk(2).values
            ahead = (scores[:, 0] - scores[:, 1]).sum()
            results = [layer.outputs for layer in passes.values()]
            slopes = torch.autograd.grad(ahead, results, allow_unused=True)
        by_name = dict(zip(passes, slopes, strict=True))
        yield passes, {name: slope for name, slope in by_name.items() if slope is not None}
