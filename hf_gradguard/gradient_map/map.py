"""The one function the library is about: from a client's continuous input to the gradient it would
share.

    g(x) = ∇_θ L(f_θ(x), y) ∈ R^d,    J[a, i] = ∂g_i/∂x_a ∈ R^{m×d}

No other module differentiates a client's loss, or knows about attention kernels, dropout masks and
embedding hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .domain import Domain
from .inputs import find_input, model_loss
from .jacobian import Jacobian
from .parameters import check_sharding, shared_by_batch
from .replay import Replay, differentiate
from .sensitivity import Method, estimate_squares
from .types import Batch, LossFunction, Tensors
from .vectorized import Candidates, Factors

if TYPE_CHECKING:
    from ..sharded.shards import Shards


class GradientMap:
    """The map x ↦ g(x) of one batch, with products with its Jacobian.

    Constructing it runs a forward pass in the model's present mode: dropout draws from the global
    generator, batch statistics are updated. Everything after that belongs to the *same* function:
    later evaluations replay this pass's random draws and leave generators, buffers, `.grad` and the
    model as they found them.

    Args:
        model: Any Hugging Face model that takes `input_ids` or `pixel_values` and returns a loss,
            or a module alike. Not a distributed wrapper: pass the module inside it.
        batch: What a collator returns, labels included, on the model's device.
        loss_fn: `(model, batch) -> scalar`, the batch-mean loss. Default: the loss that the model
            returns.
        share_input_embeddings: Share token embeddings and other tables that the input indexes (see
            `shared_parameters`). To find these, a model's first map runs it two times more.
        withhold: Patterns of parameters' names that are not shared in any case.
        second_order: `False` leaves the model's own attention kernels in use and refuses what
            differentiates twice. By default attention runs in plain mathematics, the only form with
            second derivatives, while this object computes; the model's setting stands again after
            every call.
        needs_input: `False`, with `second_order=False`, asks for no continuous input.
        shards: The client's devices, if `fully_shard` has cut the model over them. The map is then
            this device's part of it, and figures of a whole gradient are asked of `shards`.

    Raises:
        ValueError: If there is no usable continuous input, nothing to share, or no loss.

    Example:
        >>> gmap = GradientMap(model, batch)
        >>> gmap.input.shape == (*batch["input_ids"].shape, model.config.hidden_size)
        True
        >>> gmap.vjp(gmap.gradient()).shape == gmap.input.shape  # J g
        True
    """

    product_error = 0.0  # of `vjp` and `jvp`, relative to the product
    shards: Shards | None = None
    any_rows = True  # whether `of_batch` takes batches of any number of samples

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        loss_fn: LossFunction | None = None,
        share_input_embeddings: bool = False,
        withhold: Sequence[str] = (),
        second_order: bool = True,
        needs_input: bool = True,
        shards: Shards | None = None,
    ) -> None:
        check_sharding(model, shards, second_order)
        self.shards = shards
        self.model, self._batch = model, batch
        self.loss_fn = loss_fn or model_loss
        self._needs_input = needs_input or second_order
        share = share_input_embeddings
        self._sharing: Any = {"share_input_embeddings": share, "withhold": withhold}
        self._source = find_input(model, batch, self._needs_input)
        self.replay = Replay(model, second_order)
        with torch.enable_grad(), self.replay.kernels():
            self._parameters = shared_by_batch(
                model, batch, self.loss_fn, **self._sharing, shards=shards
            )
            self._x, self._loss = self._first_pass()
        if self._loss.dim() or not self._loss.requires_grad:
            raise ValueError(
                "The loss must be a differentiable scalar, but has shape "
                f"{tuple(self._loss.shape)} and requires_grad={self._loss.requires_grad}. Return "
                "the batch mean, computed from the model's output."
            )
        self._gradient: Tensors | None = None
        self._jacobian = Jacobian(self._loss, self._x, self._parameters, self.replay)
        self._candidates: dict[bool, Candidates] = {}

    @property
    def input(self) -> Tensor:
        """The continuous input x, detached: `(B, T, H)` embeddings or `(B, C, H, W)` pixels."""
        return self._source.checked(self._x).detach()

    @property
    def batch(self) -> Batch:
        """The batch as it was given."""
        return self._batch

    @property
    def domain(self) -> Domain:
        """What the input is made of: text or image."""
        return self._source.domain

    @property
    def embedding(self) -> nn.Module | None:
        """The module whose output is the continuous input; `None` if that is pixels."""
        return self._source.embedding

    @property
    def loss(self) -> Tensor:
        """The batch-mean loss L(f_θ(x), y), a detached scalar."""
        return self._loss.detach()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradient is shared, by name."""
        return dict(self._parameters)

    def evaluate(self, x: Tensor, entries: Mapping[str, Any] | None = None) -> Tensor:
        """The loss at another input, with its graph; to be called inside `replay.run()`.

        Args:
            x: Input of the same shape as `input`.
            entries: Entries of the batch to put in the place of its own.
        """
        batch = {**self._batch, **(entries or {})}
        return self._source.evaluate(self.loss_fn, self.model, batch, value=x)[1]

    def _first_pass(self) -> tuple[Tensor, Tensor]:
        return self._source.evaluate(self.loss_fn, self.model, self._batch)

    def versions(self) -> dict[str, int]:
        """A count of in-place writes for everything that is the map's own or its model's: equal
        before and after whatever only reads.
        """
        found = {"the continuous input": self._x._version}
        for name, tensor in self.gradient().items():
            found[f"the true gradient of {name!r}"] = tensor._version
        for name, parameter in self._parameters.items():
            shards = self.shards
            version = parameter._version if shards is None else shards.version(parameter)
            found[f"the parameter {name!r}"] = version
            if parameter.grad is not None:
                found[f"the .grad of {name!r}"] = parameter.grad._version
        return found

    def gradient(self) -> Tensors:
        """g(x): the gradient of the batch-mean loss, zeros where that does not use a parameter.
        Computed once; the tensors are the object's own, so do not write to them.
        """
        if self._gradient is None:
            retain = self.replay.second_order
            with self.replay.kernels():
                self._gradient = self._differentiate(self._loss, retain_graph=retain)
        return self._gradient

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """g at another input, with this batch's labels, masks and random draws.

        Args:
            x: Input of the same shape as `input`.
            create_graph: Keep the graph, to differentiate the result by `x`.
            **entries: Entries of the batch to put in the place of its own, such as other `labels`.

        Raises:
            ValueError: If the shape differs.
            RuntimeError: If `create_graph` on a map made with `second_order=False`.
        """
        if x.shape != (shape := self.input.shape):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but this batch's input has {tuple(shape)}."
            )
        if create_graph:
            self._require_second_order("gradient_at(create_graph=True)")
        with self.replay.run():
            x = x if x.requires_grad else x.detach().requires_grad_()
            loss = self.evaluate(x, entries)
            return self._differentiate(loss, create_graph=create_graph)

    def _differentiate(self, loss: Tensor, **graph: bool) -> Tensors:
        if self.shards is not None:
            return self.shards.gradient(loss, self._parameters)
        return differentiate(loss, self._parameters, **graph)

    def slopes_at(
        self,
        function: Callable[[Mapping[str, Tensor | Factors], Tensors], Tensor],
        xs: Tensor,
        extras: Tensors,
        *,
        factored: bool = False,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Values of a scalar function of g at K inputs, and their derivatives by the inputs: one
        vectorized pass.

        Much faster than K passes where model or batch is small.

        Args:
            function: `(g(x), extras) -> scalar`, of one candidate's tensors.
            xs: `(K, *input.shape)`.
            extras: What else the function needs, each tensor with a first dimension of K.
            factored: Give the function the gradients of linear layers' weights as `Factors`.
            **entries: Entries of the batch to put in the place of its own, with a first dimension
                of K.

        Returns:
            Values `(K,)`, their derivatives by `xs`, and by those entries that are floating point.

        Raises:
            ValueError: If the shape differs.
            RuntimeError: If K > 1 and the model cannot run vectorized: its control flow looks at
                values, it checkpoints activations, or its batch normalization is in training mode.
        """
        if xs.shape[1:] != (shape := self.input.shape):
            raise ValueError(
                f"xs has shape {tuple(xs.shape)}, but should be (K, {', '.join(map(str, shape))})."
            )
        self._require_second_order("slopes_at")
        if factored not in self._candidates:
            self._candidates[factored] = Candidates(self, factored)
        return self._candidates[factored].slopes(function, xs, extras, entries)

    def input_gradient(self, value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The derivatives of a scalar that was computed from `gradient_at(x, create_graph=True)`,
        by x and other leaves.

        Layers under activation checkpointing run again in this pass, with the same random draws as
        before.
        """
        self._require_second_order("input_gradient")
        with self.replay.draws(), self.replay.kernels():
            return torch.autograd.grad(value, inputs)

    def slope_of(self, values: Tensor, x: Tensor, directions: Tensor) -> Tensor:
        """Derivatives by x of what the model computed from it inside `replay.run()`.

        Args:
            values: What was computed, of any shape.
            x: The input that it was computed from.
            directions: `(k, *values.shape)`, combined with which `values` are differentiated.

        Returns:
            `(k, *x.shape)`; the graph is kept.
        """
        several = len(directions) > 1
        with self.replay.draws(), self.replay.kernels():  # checkpointed layers run again
            (slopes,) = torch.autograd.grad(
                values,
                x,
                grad_outputs=directions if several else directions[0],
                retain_graph=True,
                is_grads_batched=several,
            )
        return slopes if several else slopes[None]

    def vjp(self, delta: Tensors) -> Tensor:
        """J δ = ∇_x ⟨g(x), δ⟩.

        Args:
            delta: One tensor for every shared parameter, or for some of them; the missing ones
                count as zero.

        Returns:
            A tensor in the shape of `input`.

        Raises:
            ValueError: If a name or a shape is not one of the shared gradient's.
        """
        self._require_second_order("vjp")
        return self._jacobian.vjp(delta)

    def jvp(self, v: Tensor) -> Tensors:
        """Jᵀ v = ∇_θ ⟨∇_x L, v⟩, which is d/dα g(x + αv) at α = 0.

        Args:
            v: A tensor in the shape of `input`.
        """
        if v.shape != (shape := self.input.shape):
            raise ValueError(
                f"v has shape {tuple(v.shape)}, but this batch's input has {tuple(shape)}."
            )
        return {n: t[0] for n, t in zip(self.parameters, self.jvps(v[None]), strict=True)}

    def squared_sensitivity(
        self,
        num_probes: int = 1,
        generator: Stream | torch.Generator | None = None,
        *,
        split: bool = True,
        method: Method | None = None,
    ) -> Tensors:
        """Estimate s_i² = Σ_a J[a, i]² for every parameter: (1/k) Σ_j (Jᵀv_j)_i², v_j ~ N(0, I).

        Args:
            num_probes: k ≥ 1. Relative variance 2/k per parameter; split, about 2/(k B).
            generator: Of the probes, a `Stream` or a generator on the input's device.
            split: Square differences sample by sample, where layers know samples apart.
            method: `"difference"`, off by 0.2 to 0.5 % in float32, or `"exact"`, by second
                derivatives. Default: differences where two steps agree (tried out once per model).

        Returns:
            Non-negative tensors in the parameters' shapes, at least in float32.

        Raises:
            RuntimeError: If no method, or not the one asked for, works for this model.
        """
        return estimate_squares(self, num_probes, generator, split, method)

    @property
    def undefended(self) -> GradientMap:
        """The map of the client's own gradient, whatever this one is seen through."""
        return self

    def of_batch(self, batch: Batch, second_order: bool = False) -> GradientMap:
        """The same model, loss and random draws on another batch. Nothing is left changed."""
        sharing = {
            **self._sharing,
            "needs_input": self._needs_input,
            "second_order": second_order,
            "shards": self.shards,
        }
        with self.replay.draws():
            return GradientMap(self.model, batch, loss_fn=self.loss_fn, **sharing)

    def twice(self) -> GradientMap:
        """This map with `second_order=True`."""
        return self if self.replay.second_order else self.of_batch(self._batch, second_order=True)

    @property
    def transmitted(self) -> Tensors | None:
        """Masks of what an earlier defense of the chain left; `None` for all."""
        return None

    def restrict(self, tensors: Tensors) -> Tensors:
        """`tensors` with zeros (or False) where an earlier defense of the chain withheld."""
        return tensors

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Jᵀ v for a stack of directions (k, *input.shape): one tensor (k, *parameter.shape) a
        parameter.
        """
        self._require_second_order("jvp")
        return self._jacobian.jvps(directions)

    def _require_second_order(self, what: str) -> None:
        if not self.replay.second_order:
            raise RuntimeError(
                f"{what} differentiates twice; this GradientMap was made with second_order=False."
            )
