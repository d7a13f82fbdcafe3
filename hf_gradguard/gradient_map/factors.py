"""Gradients of linear layers' weights in factors.

A linear layer's weight has the gradient Σ_t δ_t a_tᵀ over the batch's tokens t, with a_t what went
into the layer and δ_t the loss's derivative by what came out. T tokens say in T (rows + columns)
numbers what written out takes rows × columns, and what is done with a gradient once (comparing it
with another) need not keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .graphs import hooked


@dataclass(frozen=True)
class Factors:
    """The matrix leftᵀ right, not written out.

    Args:
        left: `(T, rows)`.
        right: `(T, columns)`.
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """`(rows, columns)`."""
        return self.left.mT @ self.right

    def squared_norm(self) -> Tensor:
        """Σ_ij (leftᵀ right)²_ij, from two T × T products."""
        return ((self.left @ self.left.mT) * (self.right @ self.right.mT)).sum()

    def __mul__(self, scale: Tensor) -> Factors:
        return Factors(self.left * scale, self.right)


@dataclass
class LinearCalls:
    """What went into linear layers during an evaluation, with room for offsets on what came out.

    An offset of zero changes nothing, and the loss's derivative by it is δ.

    Args:
        layers: Linear layers by the names of their weights.
        offsets: One for every call, in its output's shape, by the weight's name and the call's
            number (`"head.weight@0"`). Calls without one are only listened to.
    """

    layers: Mapping[str, nn.Module]
    offsets: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, torch.Size] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen while the model runs inside."""
        # First in line: what other hooks make of an output is not the layer's own doing.
        with hooked(
            m.register_forward_hook(self._hook(name), prepend=True)
            for name, m in self.layers.items()
        ):
            yield

    def factors(self, derivatives: Mapping[str, Tensor]) -> dict[str, Factors]:
        """The weights' gradients, from the loss's derivatives by the offsets."""
        found = {}
        for name, inputs in self.inputs.items():
            left = torch.cat(
                [derivatives[f"{name}@{number}"].flatten(0, -2) for number in range(len(inputs))]
            )
            right = torch.cat([a.flatten(0, -2) for a in inputs])
            turned = isinstance(
                self.layers[name], Conv1D
            )  # (in, out), where nn.Linear has (out, in)
            found[name] = Factors(right, left) if turned else Factors(left, right)
        return found

    def _hook(self, name: str) -> Any:
        def call(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            earlier = self.inputs.setdefault(name, [])
            label = f"{name}@{len(earlier)}"
            earlier.append(args[0])
            self.outputs[label] = output.shape
            return output + self.offsets[label] if self.offsets else output

        return call


def linear_layers(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """The linear layers whose weight is among `parameters` and held by no other module, by the
    weight's name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = list(model.modules())
    holders = Counter(
        id(parameter) for module in modules for parameter in module.parameters(recurse=False)
    )
    return {
        names[id(module.weight)]: module
        for module in modules
        if type(module) in (nn.Linear, Conv1D)
        and id(module.weight) in names
        and holders[id(module.weight)] == 1
    }
