"""Derivatives of a loss, what autograd computed them by, and hooks that go away again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def differentiate(
    loss: Tensor,
    leaves: Mapping[str, Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """The derivatives of a loss by leaves, zeros by those that it does not use.

    Raises:
        ValueError: If it uses none of them.
        RuntimeError: With `create_graph`, if they come through a kernel that is not to be
            differentiated twice.
    """
    gradients = torch.autograd.grad(
        loss,
        list(leaves.values()),
        retain_graph=retain_graph or create_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "The loss is not computed from any shared parameter, so there is no gradient of it. "
            "Losses that differentiate by themselves and keep what they found (sentence-"
            "transformers' Cached...Loss) are such: take the plain one, with smaller batches."
        )
    if create_graph:
        check_whole(gradient for gradient in gradients if gradient is not None)
    return {
        name: torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks away again on the way out.

    Example:
        >>> with hooked([model.register_forward_hook(print)]):
        ...     len(model._forward_hooks)
        1
        >>> len(model._forward_hooks)
        0
    """
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Every step of autograd's that tensors were computed by."""
    nodes, seen = [tensor.grad_fn for tensor in tensors], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [after for after, _ in node.next_functions]


def check_whole(derivatives: Iterable[Tensor]) -> None:
    """Raise if derivatives come through a kernel that is not to be differentiated twice: autograd
    does so itself only where its path leads on, and leaves it out where it ends.
    """
    if any(node.name() == "torch::autograd::Error" for node in nodes_of(derivatives)):
        raise RuntimeError(
            "The model has a function that is marked once_differentiable, as fused kernels are: "
            "without it second derivatives would be wrong. Run the model without that kernel, or "
            "ask for nothing that differentiates twice (method='difference', second_order=False)."
        )
