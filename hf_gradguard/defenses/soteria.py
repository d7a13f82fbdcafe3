"""Soteria, which shares g without the last dense layer's columns of revealing neurons.

For the representation r that enters the last dense layer, neuron j is scored by |r_j| / ‖∂r_j/∂x‖,
and that layer's gradient columns of the largest scores are zeroed.

Reference: Sun, Li, Wang, Yang, Li, Chen, "Soteria: Provable Defense Against Privacy Leakage in
Federated Learning from Representation Perspective" (CVPR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap
from ..gradient_map.replay import hooked
from ..randomness import Stream
from .base import (
    DefenseFacts,
    Message,
    cast_like,
    check_whole,
    floor_share,
    is_number,
    true_gradient,
)
from .feedback import BiasedDefense


@dataclass
class Soteria(BiasedDefense):
    """Zeroes columns of the last dense layer's weight gradient; all else is shared unchanged.

    An attacker who leaves that layer out of the matching (`leave_out`) undoes it, whatever `ratio`
    is: it found 97 % of a sentence's words at 0.5, 0.9 and 0.99 (docs/findings/attacks_text.md).

    Args:
        ratio: p in [0, 1): floor(p·n) of the layer's n columns are zeroed, ties broken by position.
        neuron_chunk: Neurons differentiated at once; it bounds memory, see `representation`.
    """

    name: ClassVar[str] = "soteria"
    ratio: float = 0.9
    neuron_chunk: int = 1

    def __post_init__(self) -> None:
        if not (is_number(self.ratio) and 0 <= self.ratio < 1):
            raise ValueError(
                "ratio must be at least 0 and below 1 (1 would share nothing of the layer), but is "
                f"{self.ratio!r}."
            )
        check_whole("neuron_chunk", self.neuron_chunk, 1)

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(is_exact=not self.error_feedback)

    def informed(self) -> dict[str, Any]:
        return {"match_nonzero": True}

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gradient = true_gradient(gmap)
        reading = representation(gmap, generator, self.neuron_chunk)
        size = reading.values.norm(dim=0)
        # A neuron that is off shares nothing: it stays.
        score = torch.where(size > 0, size / reading.sensitivity, 0.0)
        order = score.argsort(descending=True, stable=True)
        zeroed = order[: floor_share(self.ratio, len(score))]
        name = reading.layer
        shared = gradient | {name: gradient[name].index_fill(1, zeroed, 0.0)}
        transmitted = {name: tensor != 0 for name, tensor in shared.items()}
        return Message(cast_like(shared, gmap), transmitted=transmitted, exact=True)


class Representation(NamedTuple):
    """The input of a model's last dense layer.

    Args:
        layer: The name of that layer's weight.
        values: r, `(B, n)`.
        sensitivity: ‖∂r_j/∂x‖ over the batch, `(n,)`.
    """

    layer: str
    values: Tensor
    sensitivity: Tensor


def representation(gmap: GradientMap, generator: Stream, neuron_chunk: int = 1) -> Representation:
    """Return the last dense layer's input, and how strongly its neurons depend on the input.

    It costs one forward pass, and per neuron one pass backward through what lies before that layer.

    Args:
        gmap: The client's gradient map.
        generator: The source of one random sign per sample. Without batch statistics the signs
            cancel; with them the squares of the result are unbiased.
        neuron_chunk: The number of neurons that run at once; it bounds memory.

    Raises:
        ValueError: If the last layer with parameters is no `nn.Linear`, runs several times, reads
            something else than one vector per sample, or shares no weight gradient.

    Example:
        >>> found = representation(gmap, Stream())
        >>> found.layer
        'classifier.weight'
        >>> found.values.shape[0] == len(batch["labels"])
        True
    """
    ran: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        ran.append((module, args[0] if args else torch.empty(0)))

    with_parameters = [m for m in gmap.model.modules() if any(True for _ in m.parameters(False))]
    noting = hooked(module.register_forward_pre_hook(note) for module in with_parameters)
    with noting, gmap.replay.run():
        x = gmap.input.clone().requires_grad_()
        gmap.evaluate(x)
    layer, r = ran[-1]
    weight = getattr(layer, "weight", None)
    name = next((name for name, p in gmap.parameters.items() if p is weight), None)
    if not isinstance(layer, nn.Linear) or sum(module is layer for module, _ in ran) > 1:
        reason = (
            f"its last layer with parameters is a {type(layer).__name__}, and not a dense layer "
            "that runs once"
        )
    elif r.dim() != 2 or len(r) != len(x):
        reason = (
            f"its last dense layer reads {tuple(r.shape)}, and not one vector for each of {len(x)} "
            "samples"
        )
    elif name is None:
        reason = "the weight of its last dense layer is not trained"
    else:
        return Representation(name, r.detach(), _norms(gmap, r, x, generator, neuron_chunk))
    raise ValueError(
        f"{type(gmap.model).__name__} has no representation to weigh: {reason}. Take a defense "
        "that works on every layer, such as optimal_pruning."
    )


def _norms(gmap: GradientMap, r: Tensor, x: Tensor, generator: Stream, chunk: int) -> Tensor:
    """‖∂r_j/∂x‖ of every column of `r`, `(n,)`."""
    if not r.requires_grad:
        return torch.zeros_like(r[0])
    signs = generator.integers(2, (len(r),), device=r.device).to(r.dtype) * 2 - 1
    chunk, norms = 1 if gmap.replay.recomputes() else chunk, []
    for neurons in torch.arange(r.shape[1], device=r.device).split(chunk):
        count = len(neurons)
        # One neuron in each direction, with a sign per sample.
        directions = r.new_zeros(count, *r.shape)
        directions[neurons - neurons[0], :, neurons] = signs
        slopes = gmap.slope_of(r, x, directions)
        norms.append(slopes.reshape(count, -1).norm(dim=1))
    return torch.cat(norms)
