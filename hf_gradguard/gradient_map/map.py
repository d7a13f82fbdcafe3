"""The map from a client's continuous input to its gradient, which this library is about.

    g(x) = ∇_θ L(f_θ(x), y) ∈ R^d,    J[a, i] = ∂g_i/∂x_a ∈ R^{m×d}

No other module differentiates a client's loss, or knows about attention kernels, dropout masks and
embedding hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .domain import Domain
from .inputs import ContinuousInput, Jacobian, find_input, model_loss
from .parameters import check_sharding, find_tables, shared_parameters
from .replay import Replay, RunWithin, differentiate
from .sensitivity import Method, estimate_squares
from .types import Batch, LossFunction, Shards, Tensors
from .vectorized import Candidates, Factors


class GradientMap:
    """The map x ↦ g(x) of one batch, with products with its Jacobian.

    Constructing it runs a forward pass in the model's present mode: dropout draws from the global
    generator, batch statistics are updated. Everything after that belongs to the *same* function:
    later evaluations replay this pass's random draws and leave generators, buffers, `.grad` and the
    model as they found them.

    Args:
        model: Any Hugging Face model that takes `input_ids` or `pixel_values` and returns a loss,
            or a module alike. Not a distributed wrapper: pass the module inside it.
        batch: A batch, as a collator returns it, labels included, on the model's device.
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
        reruns: `False` notes nothing that another pass needs: a gradient is all that can be asked.
        shards: The client's devices, if `fully_shard` has cut the model over them. The map is then
            this device's part of it, and figures of a whole gradient are asked of `shards`.

    Attributes:
        batch: The batch as it was given.
        parameters: The parameters whose gradient is shared, by name.

    Raises:
        ValueError: If there is no usable continuous input, nothing to share, or no loss.

    Example:
        >>> gmap = GradientMap(model, batch)
        >>> gmap.input.shape == (*batch["input_ids"].shape, model.config.hidden_size)
        True
        >>> gmap.vjp(gmap.gradient()).shape == gmap.input.shape  # J g
        True
    """

    product_error = 0.0
    """Of `vjp` and `jvp`, relative to the product."""
    transmitted: Tensors | None = None
    """Masks of what an earlier defense of the chain left; `None` for all."""
    any_rows = True
    """Whether `of_batch` takes batches of any number of samples."""
    is_clipped = False
    """Whether `gradient` is clipped, and with it all that is derived from it."""
    shards: Shards | None = None
    _base: GradientMap | None = None
    _shown: Tensors | None = None
    _gradient: Tensors | None = None

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
        reruns: bool = True,
        shards: Shards | None = None,
    ) -> None:
        check_sharding(model, shards, second_order)
        self.model, self.loss_fn, self.shards = model, loss_fn or model_loss, shards
        self.batch: Batch = batch
        self._needs_input = needs_input or second_order
        self._share, self._withhold = share_input_embeddings, withhold
        # First-order defenses take batches of any kind, also without text or image.
        self._source = find_input(model, batch) if self._needs_input else None
        self.replay = Replay(model, second_order, self.loss_fn, reruns)
        with torch.enable_grad(), self.replay.kernels():
            if not self._share:
                find_tables(model, batch, self.loss_fn, shards)
            self.parameters: dict[str, nn.Parameter] = shared_parameters(
                model, self._share, withhold
            )
            self._x, self._loss = self._first_pass()
        # The graph of this pass is kept: the gradient comes of it without another one.
        check_loss(self._loss)

    @property
    def input(self) -> Tensor:
        """The continuous input x, detached: `(B, T, H)` embeddings or `(B, C, H, W)` pixels."""
        assert self._input_source  # raises if nothing asked for it
        return self._x.detach()

    @property
    def domain(self) -> Domain:
        """The domain of the input: text or image."""
        return self._input_source.domain

    @property
    def embedding(self) -> nn.Module | None:
        """The module whose output is the continuous input; `None` if that is pixels."""
        return None if self._source is None else self._source.embedding

    @property
    def _input_source(self) -> ContinuousInput:
        if self._source is None:
            raise ValueError(
                "This GradientMap was made with needs_input=False, so it has no continuous input. "
                "A defense that asks for one has to say so in its facts: needs_input."
            )
        return self._source

    @property
    def loss(self) -> Tensor:
        """The batch-mean loss L(f_θ(x), y), a detached scalar."""
        return self._loss.detach()

    def evaluate(self, x: Tensor, entries: Mapping[str, Any] | None = None) -> Tensor:
        """Return the loss at another input, with its graph; call it inside `replay.run()`.

        Args:
            x: An input of the same shape as `input`.
            entries: Entries of the batch to replace.
        """
        return self._run({**self.batch, **(entries or {})}, x)[1]

    def slope_with(self, parameters: Tensors, x: Tensor) -> Tensor:
        """Return ∇_x L at an input, with other values of parameters, which are not written."""
        x = x.detach().requires_grad_()

        def slope() -> Tensor:
            # Where the parameters are still the others: under checkpointing layers run again here.
            # A loss that does not use the input, as where LayerDrop drops all layers, has slope 0.
            loss = self.evaluate(x)
            if not loss.requires_grad:
                return torch.zeros_like(x)
            (input_slope,) = torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)
            return input_slope

        with self.replay.run(), self.replay.full_precision():
            values = {f"model.{name}": p.to(x.device) for name, p in parameters.items()}
            input_slope: Tensor = torch.func.functional_call(
                RunWithin(self.model), values, (slope,)
            )
        return input_slope

    def _run(self, batch: Batch, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The input as it entered the graph, empty if nothing asks for it, and the loss."""
        if self._source is None and x is None:
            return torch.zeros(0), self.loss_fn(self.model, dict(batch))
        return self._input_source.evaluate(self.loss_fn, self.model, batch, x)

    def _first_pass(self) -> tuple[Tensor, Tensor]:
        return self._run(self.batch)

    def versions(self) -> dict[str, int]:
        """Return how often each tensor of the map and its model was written to in place.

        Code that only reads these tensors does not change the counts.
        """
        if self._base is not None:
            return self._base.versions() | {
                f"the gradient of {name!r} that the defense before shared": g._version
                for name, g in self.gradient().items()
            }
        version = (lambda p: p._version) if self.shards is None else self.shards.version
        named = self.parameters.items()
        return {
            "the continuous input": self._x._version,
            **{f"the true gradient of {n!r}": g._version for n, g in self.form().items()},
            **{f"the parameter {n!r}": version(p) for n, p in named},
            **{f"the .grad of {n!r}": p.grad._version for n, p in named if p.grad is not None},
        }

    def form(self) -> Tensors:
        """Return any tensors with the gradient's names, shapes, types and devices.

        They are the gradient, or tensors that are cheaper to have.
        """
        return self.gradient()

    def gradient(self) -> Tensors:
        """Return g(x), the gradient of the batch-mean loss, with zeros for unused parameters.

        It is computed once; the tensors are the object's own, so do not write to them.
        """
        if self._base is not None:
            return self._base.gradient() if self._shown is None else self._shown
        if self._gradient is None:
            self._gradient = self._own_gradient()
        return self._gradient

    def _own_gradient(self) -> Tensors:
        with self.replay.kernels():
            return self._differentiate(self._loss, retain_graph=self.replay.second_order)

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """Return g at another input, with this batch's labels, masks and random draws.

        Args:
            x: An input of the same shape as `input`.
            create_graph: Keep the graph, to differentiate the result by `x`.
            **entries: Entries of the batch to replace, such as `labels`.

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
            return self.shards.gradient(loss, self.parameters)
        return differentiate(loss, self.parameters, **graph)

    def slopes_at(
        self,
        function: Callable[[Mapping[str, Tensor | Factors], Tensors], Tensor],
        xs: Tensor,
        extras: Tensors,
        *,
        factored: bool = False,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return values of a scalar function of g at K inputs, and their derivatives.

        It is one vectorized pass, much faster than K passes where model or batch is small.

        Args:
            function: A function `(g(x), extras) -> scalar` of one candidate's tensors.
            xs: The inputs, `(K, *input.shape)`.
            extras: Further tensors for the function, each with a first dimension of K.
            factored: Give the function the gradients of linear layers' weights as `Factors`.
            **entries: Entries of the batch to replace, with a first dimension of K.

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
        candidates = self._factored_candidates if factored else self._plain_candidates
        return candidates.slopes(function, xs, extras, entries)

    @cached_property
    def _plain_candidates(self) -> Candidates:
        return Candidates(self, factored=False)

    @cached_property
    def _factored_candidates(self) -> Candidates:
        return Candidates(self, factored=True)

    def input_gradient(self, value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the derivatives of a scalar computed from `gradient_at(x, create_graph=True)`.

        They are by x and other leaves. Layers under activation checkpointing run again in this
        pass, with the same random draws as before.
        """
        self._require_second_order("input_gradient")
        with self.replay.draws(), self.replay.kernels():
            return torch.autograd.grad(value, inputs)

    def slope_of(self, values: Tensor, x: Tensor, directions: Tensor) -> Tensor:
        """Return derivatives by x of what the model computed from it inside `replay.run()`.

        Args:
            values: The computed values, of any shape.
            x: The input that it was computed from.
            directions: Combinations of `values` to differentiate, `(k, *values.shape)`.

        Returns:
            `(k, *x.shape)`; the graph is kept.
        """
        is_batched = len(directions) > 1
        grad_outputs = directions if is_batched else directions[0]
        with self.replay.draws(), self.replay.kernels():  # checkpointed layers run again
            (slopes,) = torch.autograd.grad(
                values, x, grad_outputs, retain_graph=True, is_grads_batched=is_batched
            )
        return slopes if is_batched else slopes[None]

    def vjp(self, delta: Tensors) -> Tensor:
        """Return J δ = ∇_x ⟨g(x), δ⟩.

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
        """Return Jᵀ v = ∇_θ ⟨∇_x L, v⟩, which is d/dα g(x + αv) at α = 0.

        Args:
            v: A tensor in the shape of `input`.

        Raises:
            ValueError: If the shape differs.
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
            generator: The source of the probes, a `Stream` or a generator on the input's device.
            split: Square differences sample by sample, where layers separate samples.
            method: `"difference"`, off by 0.2 to 0.5 % in float32, or `"exact"`, by second
                derivatives. Default: differences where two steps agree (tried out once per model).

        Returns:
            Non-negative tensors in the parameters' shapes, at least in float32.

        Raises:
            RuntimeError: If no method, or not the one asked for, works for this model.
        """
        return estimate_squares(self, num_probes, generator, split, method)

    @cached_property
    def _jacobian(self) -> Jacobian:
        if self._base is not None:  # its graphs are kept once
            return self._base._jacobian
        return Jacobian(self._loss, self._x, self.parameters, self.replay)

    def of_batch(self, batch: Batch, second_order: bool = False) -> GradientMap:
        """Return the map of the same model, loss and random draws on another batch.

        Generators, buffers and the model stay as they are.

        Args:
            batch: The other batch.
            second_order: Whether the new map differentiates twice.
        """
        with self.replay.draws():
            return self._on(batch, second_order=second_order, needs_input=self._needs_input)

    def with_input(self) -> GradientMap:
        """Return a map of this batch that knows the continuous input and can run again.

        It is this map, if it can. Otherwise it is a new one, from a pass with its own random draws.
        """
        is_able = self._source is not None and self.replay.held_state is not None
        return self if is_able else self._on(self.batch, second_order=False)

    def _on(self, batch: Batch, **needed: bool) -> GradientMap:
        return GradientMap(
            self.model, batch, loss_fn=self.loss_fn, shards=self.shards,
            share_input_embeddings=self._share, withhold=self._withhold, **needed,
        )  # fmt: skip

    def on_other_data(self, replaced: Callable[[Batch], Batch]) -> GradientMap:
        """Return the map with its batch replaced, or each batch of a local training.

        Args:
            replaced: The function that returns a batch in the place of the given one.
        """
        return self.of_batch(replaced(self.batch))

    def twice(self) -> GradientMap:
        """Return this map with `second_order=True`."""
        return self if self.replay.second_order else self.of_batch(self.batch, second_order=True)

    @property
    def undefended(self) -> GradientMap:
        """The map of the client's own gradient, whatever view this one is."""
        return self if self._base is None else self._base.undefended

    def corrected(self, gradient: Mapping[str, Tensor]) -> GradientMap:
        """Return this map with another `gradient()`: what earlier messages left out is added to it.

        That is a constant, so derivatives and `gradient_at` stay the client's own.

        Args:
            gradient: One tensor for every shared parameter.

        Example:
            >>> twice = gmap.corrected({name: 2 * g for name, g in gmap.gradient().items()})
            >>> g = gmap.gradient()["classifier.bias"]
            >>> torch.equal(twice.gradient()["classifier.bias"], 2 * g)
            True
        """
        view = copy.copy(self)
        view._base, view._shown = self, dict(gradient)
        return view

    def masked(
        self, shared: Mapping[str, Tensor], transmitted: Mapping[str, Tensor] | None = None
    ) -> GradientMap:
        """Return this map as the next defense of a chain sees it.

        Its `gradient()` is what the defense before would share. The Jacobian stays that of the
        undefended gradient, but coordinates that were not transmitted carry nothing any more:
        `restrict` drops them.

        Args:
            shared: One tensor for every shared parameter.
            transmitted: Masks of what was transmitted. Default: all but what `shared` zeroed.

        Example:
            >>> view = gmap.masked({name: g.clamp(min=0) for name, g in gmap.gradient().items()})
            >>> bool((view.gradient()["classifier.bias"] >= 0).all())
            True
        """
        # What an earlier defense zeroed by chance (g was 0 there) was transmitted all the same.
        view = self.corrected(shared)
        if transmitted is None:
            transmitted = {n: (shared[n] != 0) | (g == 0) for n, g in self.gradient().items()}
        view.transmitted = self.restrict(dict(transmitted))
        return view

    def restrict(self, tensors: Tensors) -> Tensors:
        """Return `tensors` with zeros (or False) where an earlier defense of the chain withheld."""
        if self.transmitted is None:
            return tensors
        return {name: tensor * self.transmitted[name] for name, tensor in tensors.items()}

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Return Jᵀ v for each of k directions: a tensor `(k, *parameter.shape)` per parameter.

        Args:
            directions: The directions v, `(k, *input.shape)`.
        """
        self._require_second_order("jvp")
        return self._jacobian.jvps(directions)

    def _require_second_order(self, operation: str) -> None:
        if not self.replay.second_order:
            raise RuntimeError(
                f"{operation} differentiates twice; this GradientMap was made with "
                "second_order=False."
            )


class View(GradientMap):
    """A view of another map's client, with products or a gradient of its own.

    All else is shared with it.

    Args:
        base: The map.
    """

    def __init__(self, base: GradientMap) -> None:
        vars(self).update(vars(base))
        self._base = self.base = base

    def twice(self) -> GradientMap:
        return self.base.twice()


def check_loss(loss: Tensor) -> None:
    """Raise an error if a loss is no differentiable scalar.

    Raises:
        ValueError: If so.
    """
    if loss.dim() or not loss.requires_grad:
        raise ValueError(
            f"The loss must be a differentiable scalar, but has shape {tuple(loss.shape)} and "
            f"requires_grad={loss.requires_grad}. Return the batch mean, computed from the model's "
            "output."
        )
