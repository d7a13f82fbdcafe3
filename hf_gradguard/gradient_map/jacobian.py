"""Products with the Jacobian J[a, i] = ∂g_i/∂x_a of one evaluated loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .replay import Replay, check_whole, differentiate


class Jacobian:
    """Products with J, each by differentiating twice. Graphs are made when first needed, and kept.

    Args:
        loss: A scalar, with its graph.
        x: The continuous input that it was computed from.
        parameters: Those of the shared gradient.
        replay: What holds while the graph is walked.
    """

    def __init__(
        self, loss: Tensor, x: Tensor, parameters: Mapping[str, nn.Parameter], replay: Replay
    ) -> None:
        self._loss, self._x, self._parameters, self._replay = loss, x, parameters, replay
        self._gradient: dict[str, Tensor] | None = None
        self._input_gradient: Tensor | None = None

    def gradient(self) -> dict[str, Tensor]:
        """g with its graph, made once."""
        if self._gradient is None:
            self._gradient = differentiate(self._loss, self._parameters, create_graph=True)
        return self._gradient

    def vjp(self, delta: Mapping[str, Tensor]) -> Tensor:
        """J δ, in the shape of x. Names that δ leaves out count as zero.

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
        """Jᵀ v for a stack of directions `(k, *x.shape)`: one tensor `(k, *parameter.shape)` per
        parameter.
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
    """Of a gradient that is no derivative of one loss, such as the outcome of several steps.

    Jᵀv is the derivative of ⟨J u, v⟩ by u, in which J u is linear.

    Args:
        run: The gradient at an input, with its graph.
        x: The input.
        parameters: Those of the gradient.
        replay: What holds while the graph is walked.
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
    """Raise if a name or a shape is not one of the shared gradient's."""
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
