"""The one function the library is about: from a client's continuous input to the gradient it would
share.

    g(x) = ∇_θ L(f_θ(x), y) ∈ R^d,    J[a, i] = ∂g_i/∂x_a ∈ R^{m×d}

No other module differentiates a client's loss, or knows about attention kernels, dropout masks and
embedding hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ..randomness import private_generator
from .domain import Domain
from .factors import Factors, LinearCalls, linear_layers
from .inputs import Batch, LossFunction, find_input, shared_parameters

Tensors = dict[str, Tensor]
"""One tensor a shared parameter, by name and in its shape."""


class GradientMap:
    """The map x ↦ g(x) of one batch, with products with its Jacobian.

    Constructing it runs one forward pass in the model's present mode, with all that a forward pass
    does: dropout draws from the global generator, batch statistics are updated. Everything after
    that belongs to the *same* function: later evaluations replay this pass's random draws and leave
    generators, buffers, `.grad` and the model as they found them.

    Args:
        model: Any Hugging Face model that takes `input_ids` or `pixel_values` and returns a loss,
            or a module alike. Not a distributed wrapper: pass the module inside it.
        batch: What a collator returns, labels included, on the model's device.
        loss_fn: `(model, batch) -> scalar`, the batch-mean loss. Default: the loss that the model
            returns.
        share_input_embeddings: Count the token embeddings' gradient among what is shared (see
            `shared_parameters`).
        second_order: `False` leaves the model's own attention kernels in use and refuses what
            differentiates twice. By default attention runs in plain mathematics, the only form with
            second derivatives, while this object computes; the model's setting stands again after
            every call.

    Raises:
        ValueError: If batch and model have no usable continuous input, nothing to share, or no
            loss.

    Example:
        >>> gmap = GradientMap(model, batch)
        >>> gmap.input.shape                      # (B, T, H) token embeddings or (B, C, H, W) pixels
        >>> gmap.vjp(gmap.gradient())             # J g, in the input's shape
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        loss_fn: LossFunction | None = None,
        share_input_embeddings: bool = False,
        second_order: bool = True,
    ) -> None:
        self._model, self._batch, self._second_order = model, batch, second_order
        self._modules = list(model.modules())
        self._loss_fn = loss_fn or model_loss
        self._source = find_input(model, batch)
        self._parameters = shared_parameters(model, share_input_embeddings)
        self._devices = sorted(
            {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
        )
        self._random_state = _random_state(self._devices)
        with torch.enable_grad(), self._kernels():
            self._x, self._loss = self._source.evaluate(self._loss_fn, model, batch)
        if self._loss.dim() or not self._loss.requires_grad:
            raise ValueError(
                "The loss must be a differentiable scalar, but has shape "
                f"{tuple(self._loss.shape)} and requires_grad={self._loss.requires_grad}. Return "
                "the batch mean, computed from the model's output."
            )
        self._gradient: Tensors | None = None
        self._calls: tuple[Tensors, dict[str, nn.Module]] | None = None
        self._input_gradient: Tensor | None = None
        self._differentiable_gradient: Tensors | None = None
        self._transmitted: Tensors | None = None

    @property
    def input(self) -> Tensor:
        """The continuous input x: `(B, T, H)` token embeddings or `(B, C, H, W)` pixels,
        detached.
        """
        return self._x.detach()

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

    def gradient(self) -> Tensors:
        """g(x): the gradient of the batch-mean loss. Parameters that the loss does not use have
        zeros.

        Computed once; the tensors are the object's own, so do not write to them.
        """
        if self._gradient is None:
            with self._kernels():
                self._gradient = self._differentiate(self._loss, retain_graph=self._second_order)
        return self._gradient

    def gradient_at(self, x: Tensor, create_graph: bool = False, **entries: Tensor) -> Tensors:
        """g at another input, with this batch's labels, masks and random draws.

        Args:
            x: Input of the same shape as `input`.
            create_graph: Keep the graph, to differentiate the result with respect to `x`.
            **entries: Entries of the batch to put in the place of its own, such as other `labels`.

        Raises:
            ValueError: If the shape differs.
            RuntimeError: If `create_graph` on a map made with `second_order=False`.
        """
        if x.shape != self._x.shape:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but this batch's input has {tuple(self._x.shape)}."
            )
        if create_graph:
            self._require_second_order("gradient_at(create_graph=True)")
        with torch.enable_grad(), self._replay(), self._kernels():
            x = x if x.requires_grad else x.detach().requires_grad_()
            _, loss = self._source.evaluate(
                self._loss_fn, self._model, {**self._batch, **entries}, value=x
            )
            return self._differentiate(loss, create_graph=create_graph)

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

        Much faster than K passes where the model is small or the batch is.

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
        if xs.shape[1:] != self._x.shape:
            raise ValueError(
                f"xs has shape {tuple(xs.shape)}, but should be (K, "
                f"{', '.join(map(str, self._x.shape))})."
            )
        self._require_second_order("slopes_at")
        free = {key: value.detach() for key, value in entries.items() if value.is_floating_point()}
        fixed = {key: value for key, value in entries.items() if key not in free}
        offsets, layers = self._linear_calls() if factored else ({}, {})
        dense = {name: p for name, p in self._parameters.items() if name not in layers}
        if len(xs) == 1:
            x = xs[0].detach().requires_grad_()
            leaves = {key: value[0].clone().requires_grad_() for key, value in free.items()}
            own = {**leaves, **{key: value[0] for key, value in fixed.items()}}
            calls = LinearCalls(
                layers, {call: zeros.clone().requires_grad_() for call, zeros in offsets.items()}
            )
            with torch.enable_grad(), self._replay(), self._kernels():
                with calls.watching():
                    _, loss = self._source.evaluate(
                        self._loss_fn, self._model, {**self._batch, **own}, value=x
                    )
                derivatives = self._differentiate(
                    loss, create_graph=True, leaves=dense | calls.offsets
                )
                gradient = {name: derivatives[name] for name in dense} | calls.factors(derivatives)
                single = function(gradient, {name: tensor[0] for name, tensor in extras.items()})
            slope, *others = self.input_gradient(single, x, *leaves.values())
            return (
                single.detach()[None],
                slope[None],
                {k: o[None] for k, o in zip(free, others, strict=True)},
            )
        held = _Held(self._model)
        parameters = {f"model.{name}": p.detach() for name, p in dense.items()}
        constants = {f"model.{name}": self._parameters[name].detach() for name in layers}

        def loss_and_inputs(
            parameters: Tensors, offsets: Tensors, x: Tensor, own: Tensors
        ) -> tuple[Tensor, dict[str, list[Tensor]]]:
            calls = LinearCalls(layers, offsets)

            def run() -> Tensor:
                with calls.watching():
                    return self._source.evaluate(
                        self._loss_fn, self._model, {**self._batch, **own}, value=x
                    )[1]

            value: Tensor = torch.func.functional_call(held, {**constants, **parameters}, (run,))
            return value, calls.inputs

        # Both derivatives are taken inside the vectorization: differentiating vmap(grad(loss)) from
        # outside gives wrong second derivatives of layer normalization (torch 2.13).
        def value(
            x: Tensor, free: Tensors, fixed: Tensors, extra: Tensors
        ) -> tuple[Tensor, Tensor]:
            differentiate = torch.func.grad(loss_and_inputs, argnums=(0, 1), has_aux=True)
            (written, deltas), inputs = differentiate(parameters, offsets, x, {**free, **fixed})
            calls = LinearCalls(layers, inputs=inputs)
            gradient = {
                name.removeprefix("model."): tensor for name, tensor in written.items()
            } | calls.factors(deltas)
            result = function(gradient, extra)
            return result, result

        each = torch.func.vmap(
            torch.func.grad(value, argnums=(0, 1), has_aux=True), randomness="same"
        )
        with torch.no_grad(), self._replay(), self._kernels():
            (slopes, others), values = each(xs.detach(), free, fixed, extras)
        return values, slopes, others

    def input_gradient(self, value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The derivatives of a scalar that was computed from `gradient_at(x, create_graph=True)`,
        by x and other leaves.

        Layers under activation checkpointing run again in this pass, with the same random draws as
        before.
        """
        self._require_second_order("input_gradient")
        with self._replay(), self._kernels():
            return torch.autograd.grad(value, inputs)

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
        for name, tensor in delta.items():
            if name not in self._parameters:
                raise ValueError(
                    f"{name!r} is no shared parameter of this map. They are: "
                    f"{', '.join(self._parameters)}."
                )
            if tensor.shape != self._parameters[name].shape:
                raise ValueError(
                    f"delta[{name!r}] has shape {tuple(tensor.shape)}, the parameter "
                    f"{tuple(self._parameters[name].shape)}."
                )
        with torch.enable_grad(), self._kernels():
            if self._differentiable_gradient is None:
                self._differentiable_gradient = self._differentiate(self._loss, create_graph=True)
            # A gradient that does not depend on x has no graph: its rows of δ contribute nothing.
            names = [name for name in delta if self._differentiable_gradient[name].requires_grad]
            if not names:
                return torch.zeros_like(self._x)
            (product,) = torch.autograd.grad(
                [self._differentiable_gradient[name] for name in names],
                self._x,
                grad_outputs=[
                    delta[name].to(self._differentiable_gradient[name].dtype) for name in names
                ],
                retain_graph=True,
                allow_unused=True,
            )
        return torch.zeros_like(self._x) if product is None else product

    def jvp(self, v: Tensor) -> Tensors:
        """Jᵀ v = ∇_θ ⟨∇_x L, v⟩, which is d/dα g(x + αv) at α = 0.

        Args:
            v: A tensor in the shape of `input`.
        """
        if v.shape != self._x.shape:
            raise ValueError(
                f"v has shape {tuple(v.shape)}, but this batch's input has {tuple(self._x.shape)}."
            )
        return {
            name: tensor[0]
            for name, tensor in zip(self._parameters, self._jvps(v[None]), strict=True)
        }

    def squared_sensitivity(
        self, num_probes: int = 10, generator: torch.Generator | None = None, probe_chunk: int = 1
    ) -> Tensors:
        """Estimate s_i² = Σ_a J[a, i]² for every shared parameter: (1/k) Σ_j (Jᵀv_j)_i², v_j ~ N(0,
        I).

        Unbiased, with relative variance 2/k per parameter. Costs one graph of ∇_x L, then per probe
        one pass backward through that graph and through the forward pass: four matrix products for
        every one of the forward pass.

        Args:
            num_probes: k ≥ 1.
            generator: Source of the probes, on the input's device. Default: a fresh one from the
                system's entropy.
            probe_chunk: How many probes run at once. Peak memory beyond the graph is `probe_chunk`
                gradients and their intermediate results; larger chunks help where small tensors
                leave a device idle.

        Returns:
            Non-negative tensors in the parameters' shapes, at least in float32.
        """
        if num_probes < 1 or probe_chunk < 1:
            raise ValueError(
                f"num_probes and probe_chunk must be at least 1, but are {num_probes} and "
                f"{probe_chunk}."
            )
        generator = generator or private_generator(self._x.device)
        total = [
            torch.zeros_like(
                p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False
            )
            for p in self._parameters.values()
        ]
        for start in range(0, num_probes, probe_chunk):
            shape = (min(probe_chunk, num_probes - start), *self._x.shape)
            probes = torch.randn(
                shape, generator=generator, device=self._x.device, dtype=total[0].dtype
            )
            # Checkpointed layers run again in the backward pass, and vmap refuses their dropout:
            # one probe at a time.
            for chunk in probes.split(1 if self._recomputes() else len(probes)):
                for squares, products in zip(
                    total, self._jvps(chunk.to(self._x.dtype)), strict=True
                ):
                    for product in products:
                        squares.addcmul_(product, product, value=1 / num_probes)
        return dict(zip(self._parameters, total, strict=True))

    def representation(
        self, generator: torch.Generator | None = None, neuron_chunk: int = 1
    ) -> tuple[str, Tensor, Tensor]:
        """What enters the model's last dense layer, and how strongly each of its neurons depends on
        the input.

        Costs one forward pass, and per neuron one pass backward through what lies before that
        layer.

        Args:
            generator: Source of one random sign a sample, on the input's device. Default: a fresh
                one from the system's entropy. Without batch statistics the signs cancel; with them
                the squares of the result are unbiased.
            neuron_chunk: How many neurons run at once. Bounds memory.

        Returns:
            The name of the layer's weight; the representation r, `(B, n)`; and ‖∂r_j/∂x‖ over the
            batch, `(n,)`.

        Raises:
            ValueError: If the last layer with parameters is no `nn.Linear`, runs several times,
                reads something else than one vector a sample, or shares no weight gradient.
        """
        ran: list[tuple[nn.Module, Tensor]] = []

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            ran.append((module, args[0] if args else torch.empty(0)))

        handles = [
            m.register_forward_pre_hook(note)
            for m in self._modules
            if any(True for _ in m.parameters(False))
        ]
        try:
            with torch.enable_grad(), self._replay(), self._kernels():
                x = self.input.clone().requires_grad_()
                self._source.evaluate(self._loss_fn, self._model, self._batch, value=x)
        finally:
            for handle in handles:
                handle.remove()
        layer, r = ran[-1]
        name = next(
            (name for name, p in self._parameters.items() if p is getattr(layer, "weight", None)),
            None,
        )
        if not isinstance(layer, nn.Linear) or sum(module is layer for module, _ in ran) > 1:
            reason = f"its last layer with parameters is a {type(layer).__name__}, and not a dense layer that runs once"
        elif r.dim() != 2 or len(r) != len(x):
            reason = f"its last dense layer reads {tuple(r.shape)}, and not one vector for each of {len(x)} samples"
        elif name is None:
            reason = "the weight of its last dense layer is not trained"
        else:
            return (
                name,
                r.detach(),
                self._norms(r, x, generator or private_generator(x.device), neuron_chunk),
            )
        raise ValueError(
            f"{type(self._model).__name__} has no representation to weigh: {reason}. Take a "
            "defense that works on every layer, such as optimal_pruning."
        )

    def _norms(self, r: Tensor, x: Tensor, generator: torch.Generator, chunk: int) -> Tensor:
        """‖∂r_j/∂x‖ of every column of `r`, `(n,)`."""
        if not r.requires_grad:
            return torch.zeros_like(r[0])
        signs = (
            torch.randint(2, (len(r),), generator=generator, device=r.device).to(r.dtype) * 2 - 1
        )
        chunk, norms = 1 if self._recomputes() else chunk, []
        with self._replay(), self._kernels():  # layers under activation checkpointing run again
            for neurons in torch.arange(r.shape[1], device=r.device).split(chunk):
                count = len(neurons)
                directions = r.new_zeros(
                    count, *r.shape
                )  # one neuron in each, with a sign a sample
                directions[neurons - neurons[0], :, neurons] = signs
                (slopes,) = torch.autograd.grad(
                    r,
                    x,
                    grad_outputs=directions if count > 1 else directions[0],
                    retain_graph=True,
                    is_grads_batched=count > 1,
                )
                norms.append(slopes.reshape(count, -1).norm(dim=1))
        return torch.cat(norms)

    def after(self, shared: Tensors, withheld: Tensors | None = None) -> GradientMap:
        """This map as the next defense of a chain sees it: `gradient()` is what the one before
        would share.

        The Jacobian stays that of the undefended gradient, but coordinates that the defense zeroed
        carry nothing any more: `restrict` drops them.
        """
        before = self.gradient()
        view = copy.copy(self)
        view._gradient = shared
        view._transmitted = self.restrict(
            {name: (shared[name] != 0) | (before[name] == 0) for name in before}
            if withheld is None
            else {name: ~mask for name, mask in withheld.items()}
        )
        return view

    def restrict(self, tensors: Tensors) -> Tensors:
        """`tensors` with zeros (or False) at the coordinates that an earlier defense of the chain
        withheld.
        """
        if self._transmitted is None:
            return tensors
        return {name: tensor * self._transmitted[name] for name, tensor in tensors.items()}

    def _jvps(self, directions: Tensor) -> Sequence[Tensor]:
        """Jᵀ v for a stack of directions (k, *input.shape): one tensor (k, *parameter.shape) a
        parameter.
        """
        self._require_second_order("jvp and squared_sensitivity")
        parameters = list(self._parameters.values())
        with torch.enable_grad(), self._kernels():
            if self._input_gradient is None:
                (self._input_gradient,) = torch.autograd.grad(
                    self._loss,
                    self._x,
                    create_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            if (
                not self._input_gradient.requires_grad
            ):  # L is linear in x, or does not depend on it: J is zero
                return [p.new_zeros((len(directions), *p.shape)) for p in parameters]
            batched = len(directions) > 1
            products = torch.autograd.grad(
                self._input_gradient,
                parameters,
                grad_outputs=directions if batched else directions[0],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        return [
            p.new_zeros((len(directions), *p.shape))
            if product is None
            else product
            if batched
            else product[None]
            for p, product in zip(parameters, products, strict=True)
        ]

    def _linear_calls(self) -> tuple[Tensors, dict[str, nn.Module]]:
        """Zeros in the shape of what comes out of each call of a linear layer, and the layers that
        run.
        """
        if self._calls is None:
            calls = LinearCalls(linear_layers(self._model, self._parameters))
            # Layers that run again in the backward pass would be heard twice.
            if not self._recomputes():
                with torch.no_grad(), self._replay(), self._kernels(), calls.watching():
                    self._source.evaluate(
                        self._loss_fn, self._model, self._batch, value=self._x.detach()
                    )
            zeros = {
                call: self._x.detach().new_zeros(shape) for call, shape in calls.outputs.items()
            }
            self._calls = (
                zeros,
                {name: layer for name, layer in calls.layers.items() if name in calls.inputs},
            )
        return self._calls

    def _differentiate(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        create_graph: bool = False,
        leaves: Mapping[str, Tensor] | None = None,
    ) -> Tensors:
        leaves = self._parameters if leaves is None else leaves
        gradients = torch.autograd.grad(
            loss,
            list(leaves.values()),
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
        return {
            name: torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }

    def _recomputes(self) -> bool:
        return any(
            getattr(m, "gradient_checkpointing", False) and m.training for m in self._modules
        )

    def _require_second_order(self, what: str) -> None:
        if not self._second_order:
            raise RuntimeError(
                f"{what} differentiates twice; this GradientMap was made with second_order=False."
            )

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Plain-mathematics attention: fused kernels have no derivative of their backward pass."""
        if not self._second_order:
            yield
            return
        configs = {id(m.config): m.config for m in self._modules if isinstance(m, PreTrainedModel)}
        fused = [
            c
            for c in configs.values()
            if getattr(c, "_attn_implementation", None) not in (None, "eager", "sdpa")
        ]
        settings = [config._attn_implementation for config in fused]
        try:
            for config in fused:
                config._attn_implementation_internal = "eager"
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            for config, setting in zip(fused, settings, strict=True):
                config._attn_implementation_internal = setting

    @contextmanager
    def _replay(self) -> Iterator[None]:
        """The random draws of the first evaluation again; generators and batch statistics are left
        as they were.
        """
        # Copies take the updates: writing a value back would count as an in-place change to what
        # autograd saved.
        statistics = [
            (module, dict(module._buffers))
            for module in self._modules
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        ]
        with torch.random.fork_rng(devices=self._devices):
            cpu, cuda = self._random_state
            torch.set_rng_state(cpu)
            for device, state in zip(self._devices, cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                for module, buffers in statistics:
                    module._buffers.update(
                        {n: b if b is None else b.clone() for n, b in buffers.items()}
                    )
                yield
            finally:
                for module, buffers in statistics:
                    module._buffers.update(buffers)


class _Held(nn.Module):
    """A module whose forward pass is a function that runs `model`: what `functional_call` needs to
    swap its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that a Hugging Face model returns when the batch holds labels."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss on a batch of {sorted(batch)}. Add `labels` "
            "to the batch, use a model with a task head, or pass loss_fn."
        )
    return loss


def _random_state(devices: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
