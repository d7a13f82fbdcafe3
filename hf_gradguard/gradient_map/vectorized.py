"""Functions of the gradient at many candidate inputs, with derivatives, in one vectorized pass.

Gradient matching evaluates them thousands of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .inputs import model_loss
from .replay import Replay, RunWithin, differentiate, draws_kept, hooked, seed_draws
from .types import ClientMap, Tensors

GradientFunction = Callable[[Mapping[str, "Tensor | Factors"], "Tensors"], Tensor]
"""`(g(x), extras) -> scalar`, of one candidate's tensors."""


class Candidates:
    """An evaluator of a map at candidates of somebody who does not know its input.

    Args:
        gmap: The map.
        factored: Give functions the gradients of linear layers' weights as `Factors`.
    """

    def __init__(self, gmap: ClientMap, factored: bool) -> None:
        self._gmap = gmap
        self._offsets, self._layers = _linear_calls(gmap) if factored else ({}, {})
        self._dense = {n: p for n, p in gmap.parameters.items() if n not in self._layers}
        self._is_checked = False

    def slopes(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, entries: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return values `(K,)`, their derivatives by `xs`, and by the floating-point entries."""
        free = {key: value.detach() for key, value in entries.items() if value.is_floating_point()}
        fixed = {key: value for key, value in entries.items() if key not in free}
        if len(xs) == 1:
            return self._evaluate_one(function, xs, extras, free, fixed)
        if not self._is_checked:  # kernels without second derivatives, which vectorization hides
            self._gmap.gradient_at(self._gmap.input, create_graph=True)
            self._is_checked = True
        return self._evaluate_many(function, xs, extras, free, fixed)

    def _evaluate_one(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, free: Tensors, fixed: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        """By the ordinary engine, which runs models that cannot be vectorized."""
        gmap, x = self._gmap, xs[0].detach().requires_grad_()
        leaves = {key: value[0].clone().requires_grad_() for key, value in free.items()}
        candidate_entries = {**leaves, **{key: value[0] for key, value in fixed.items()}}
        zeros = {call: zero.clone().requires_grad_() for call, zero in self._offsets.items()}
        calls = LinearCalls(self._layers, zeros)
        with gmap.replay.run():
            with calls.watching():
                loss = gmap.evaluate(x, candidate_entries)
            derivatives = differentiate(loss, self._dense | calls.offsets, create_graph=True)
            gradient: dict[str, Tensor | Factors]
            gradient = {name: derivatives[name] for name in self._dense}
            gradient |= calls.factors(derivatives)
            value = function(gradient, {name: tensor[0] for name, tensor in extras.items()})
        slope, *leaf_slopes = gmap.input_gradient(value, x, *leaves.values())
        by_leaf = {key: leaf_slope[None] for key, leaf_slope in zip(free, leaf_slopes, strict=True)}
        return value.detach()[None], slope[None], by_leaf

    def _evaluate_many(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, free: Tensors, fixed: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        gmap, runner = self._gmap, RunWithin(self._gmap.model)
        parameters = {f"model.{name}": p.detach() for name, p in self._dense.items()}
        shared = gmap.parameters
        constants = {f"model.{name}": shared[name].detach() for name in self._layers}

        def loss_and_inputs(
            parameters: Tensors, offsets: Tensors, x: Tensor, candidate_entries: Tensors
        ) -> tuple[Tensor, dict[str, list[Tensor]]]:
            calls = LinearCalls(self._layers, offsets)

            def run() -> Tensor:
                with calls.watching():
                    return gmap.evaluate(x, candidate_entries)

            value: Tensor = torch.func.functional_call(runner, {**constants, **parameters}, (run,))
            return value, calls.inputs

        # Both derivatives are taken inside the vectorization: differentiating vmap(grad(loss)) from
        # outside gives wrong second derivatives of layer normalization (torch 2.13).
        def value(
            x: Tensor, free: Tensors, fixed: Tensors, extra: Tensors
        ) -> tuple[Tensor, Tensor]:
            both = torch.func.grad(loss_and_inputs, argnums=(0, 1), has_aux=True)
            (written, deltas), inputs = both(parameters, self._offsets, x, {**free, **fixed})
            gradient = {name.removeprefix("model."): tensor for name, tensor in written.items()}
            gradient |= LinearCalls(self._layers, inputs=inputs).factors(deltas)
            result = function(gradient, extra)
            return result, result

        slopes_of = torch.func.grad(value, argnums=(0, 1), has_aux=True)
        vectorized = torch.func.vmap(slopes_of, randomness="same")
        with torch.no_grad(), gmap.replay.draws(), gmap.replay.kernels():
            (slopes, entry_slopes), values = vectorized(xs.detach(), free, fixed, extras)
        return values, slopes, entry_slopes


def _linear_calls(gmap: ClientMap) -> tuple[Tensors, dict[str, nn.Module]]:
    """Zeros in the shape of each output of a linear layer, and the layers that run."""
    calls = LinearCalls(linear_layers(gmap.model, gmap.parameters))
    # Layers that run again in the backward pass would be heard twice.
    if not gmap.replay.recomputes():
        with torch.no_grad(), gmap.replay.draws(), gmap.replay.kernels(), calls.watching():
            gmap.evaluate(gmap.input)
    zeros = {call: gmap.input.new_zeros(shape) for call, shape in calls.outputs.items()}
    return zeros, {name: layer for name, layer in calls.layers.items() if name in calls.inputs}


@dataclass(frozen=True)
class Factors:
    """The matrix LᵀR, not written out.

    Args:
        left_factor: L, `(T, rows)`.
        right_factor: R, `(T, columns)`.
    """

    left_factor: Tensor
    right_factor: Tensor

    def dense(self) -> Tensor:
        """Return the matrix, `(rows, columns)`."""
        return self.left_factor.mT @ self.right_factor

    def squared_norm(self) -> Tensor:
        """Return Σ_ij (LᵀR)²_ij, from two T × T products."""
        return (
            (self.left_factor @ self.left_factor.mT) * (self.right_factor @ self.right_factor.mT)
        ).sum()

    def __mul__(self, scale: Tensor) -> Factors:
        return Factors(self.left_factor * scale, self.right_factor)


@dataclass
class LinearCalls:
    """The inputs of linear layers during an evaluation, with room for offsets on their outputs.

    An offset of zero changes nothing, and the loss's derivative by it is δ.

    Args:
        layers: Linear layers by the names of their weights.
        offsets: One for every call, in its output's shape, by the weight's name and the call's
            number (`"head.weight@0"`). Calls without one are only listened to.
        inputs: The inputs of each call, which `watching` fills in.
        outputs: The shape of each call's output, filled in by `watching`.
    """

    layers: Mapping[str, nn.Module]
    offsets: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, torch.Size] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen while the model runs inside the context."""
        # First in line: what other hooks make of an output is not the layer's own doing.
        with hooked(
            m.register_forward_hook(self._hook(name), prepend=True)
            for name, m in self.layers.items()
        ):
            yield

    def factors(self, derivatives: Mapping[str, Tensor]) -> dict[str, Factors]:
        """Return the weights' gradients, from the loss's derivatives by the offsets."""
        factors = {}
        for name, inputs in self.inputs.items():
            output_slopes = torch.cat(
                [derivatives[f"{name}@{number}"].flatten(0, -2) for number in range(len(inputs))]
            )
            layer_inputs = torch.cat([a.flatten(0, -2) for a in inputs])
            turned = isinstance(
                self.layers[name], Conv1D
            )  # (in, out), where nn.Linear has (out, in)
            factors[name] = (
                Factors(layer_inputs, output_slopes)
                if turned
                else Factors(output_slopes, layer_inputs)
            )
        return factors

    def _hook(self, name: str) -> Any:
        def call(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            earlier = self.inputs.setdefault(name, [])
            label = f"{name}@{len(earlier)}"
            earlier.append(args[0])
            self.outputs[label] = output.shape
            return output + self.offsets[label] if self.offsets else output

        return call


def linear_layers(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return the linear layers whose weight is among `parameters` and held by no other module.

    They are by the weight's name.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    modules = list(model.modules())
    holders = Counter(
        parameter for module in modules for parameter in module.parameters(recurse=False)
    )
    linear: list[Any] = [m for m in modules if type(m) in (nn.Linear, Conv1D)]
    return {
        names[module.weight]: module
        for module in linear
        if module.weight in names and holders[module.weight] == 1
    }


logger = logging.get_logger(__name__)

ENTRIES = 2**26
"""Of gradients that are written out at once: 256 MiB in float32."""


class ManyGradients:
    """The gradients of a model at many batches, in the mode in which the model is.

    Random draws (dropout) are the attacker's own: the same for every batch, from seeds, and the
    gradient is the mean over them. Generators, statistics and `.grad` do not change.

    Args:
        model: The model.
        names: The parameters to differentiate by.
        seeds: One for each set of draws over which to average.
        vectorized: Run several batches of one shape in one pass, if a trial of two gives what they
            give by themselves.

    Raises:
        ValueError: If a name is no parameter of the model that can be trained.

    Example:
        >>> many = ManyGradients(model, ["classifier.bias"])
        >>> one = {key: entry[:1] for key, entry in batch.items()}
        >>> batches = [one, {**one, "labels": 1 - one["labels"]}]
        >>> [(rows, found["classifier.bias"].shape) for rows, found in many(batches)]
        [([0, 1], torch.Size([2, 2]))]
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        seeds: Sequence[int] = (0,),
        vectorized: bool = True,
    ) -> None:
        parameters = dict(model.named_parameters())
        if unknown := [n for n in names if n not in parameters or not parameters[n].requires_grad]:
            raise ValueError(f"{unknown[0]!r} is no parameter of the model that is trained.")
        self.model = model
        self.parameters = {name: parameters[name] for name in names}
        self._seeds = list(seeds)
        size = sum(parameter.numel() for parameter in self.parameters.values())
        self.at_once = max(1, ENTRIES // max(size, 1)) if vectorized else 1
        self._allowed: dict[tuple[str, ...], bool] = {}

    def __call__(
        self, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield which batches, and their gradients `(k, *parameter.shape)`, until all are done."""
        shapes: dict[str, list[int]] = {}
        for number, batch in enumerate(batches):
            shapes.setdefault(repr(batch_shape(batch)), []).append(number)
        for numbers in shapes.values():
            for start in range(0, len(numbers), self.at_once):
                rows = numbers[start : start + self.at_once]
                yield rows, self._mean([batches[number] for number in rows])

    @property
    def draws(self) -> int:
        """The number of sets of random draws that a gradient is the mean over."""
        return len(self._seeds)

    def of_parameters(self, names: Sequence[str]) -> ManyGradients:
        """Return the same for some of the parameters."""
        if set(names) == set(self.parameters):
            return self
        return ManyGradients(self.model, names, self._seeds, self.at_once > 1)

    def spread(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the variance between sets of draws of each parameter's gradient, per entry.

        It is a mean over the entries and the batches; 0 with one set.
        """
        total = dict.fromkeys(self.parameters, 0.0)
        if len(self._seeds) < 2:
            return total
        for batch in batches:
            draws = [self._evaluate_one(batch, seed) for seed in self._seeds]
            for name in total:
                gradients = torch.stack([draw[name] for draw in draws]).float()
                total[name] += float(gradients.var(0).mean()) / len(batches)
        return total

    def _mean(self, batches: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        gradients_by_seed = [self._gradients_of(batches, seed) for seed in self._seeds]
        if len(gradients_by_seed) == 1:
            return gradients_by_seed[0]
        return {
            n: torch.stack([gradient[n] for gradient in gradients_by_seed]).mean(0)
            for n in self.parameters
        }

    def _gradients_of(self, batches: list[Mapping[str, Any]], seed: int) -> dict[str, Tensor]:
        if len(batches) > 1:
            varying = _different(batches)
            if varying not in self._allowed:
                self._allowed[varying] = self._try(batches, varying, seed)
            if self._allowed[varying]:
                return self._vectorized(batches, varying, seed)
        gradients = [self._evaluate_one(batch, seed) for batch in batches]
        return {
            name: torch.stack([gradient[name] for gradient in gradients])
            for name in self.parameters
        }

    def _evaluate_one(self, batch: Mapping[str, Any], seed: int) -> Tensors:
        with self._replay(seed).run():
            return differentiate(model_loss(self.model, dict(batch)), self.parameters)

    def _vectorized(
        self, batches: list[Mapping[str, Any]], varying: tuple[str, ...], seed: int
    ) -> dict[str, Tensor]:
        fixed = {key: value for key, value in batches[0].items() if key not in varying}
        stacked = {key: torch.stack([batch[key] for batch in batches]) for key in varying}
        if not varying:  # one batch, several times
            gradient = self._evaluate_one(batches[0], seed)
            return {name: g.expand(len(batches), *g.shape) for name, g in gradient.items()}
        runner = RunWithin(self.model)
        parameters = {f"model.{name}": p.detach() for name, p in self.parameters.items()}

        def loss(parameters: Tensors, entries: Tensors) -> Tensor:
            def run() -> Tensor:
                return model_loss(self.model, {**fixed, **entries})

            value: Tensor = torch.func.functional_call(runner, parameters, (run,))
            return value

        vectorized = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")
        with torch.no_grad(), self._replay(seed).draws(), sdpa_kernel(SDPBackend.MATH):
            gradients = vectorized(parameters, stacked)
        return {name.removeprefix("model."): gradient for name, gradient in gradients.items()}

    def _try(self, batches: list[Mapping[str, Any]], varying: tuple[str, ...], seed: int) -> bool:
        """Whether the model gives vectorized what it gives otherwise."""
        alone = [self._evaluate_one(batch, seed) for batch in (batches[0], batches[-1])]
        try:
            vectorized = self._vectorized(batches, varying, seed)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # control flow that looks at values, statistics, checkpoints
            logger.info(f"{type(self.model).__name__} runs batch by batch: {error}")
            return False
        change = size = 0.0
        for name in self.parameters:
            for row, gradient in zip((0, -1), alone, strict=True):
                change += float((vectorized[name][row] - gradient[name]).double().square().sum())
                size += float(gradient[name].double().square().sum())
        eps = torch.finfo(next(iter(self.parameters.values())).dtype).eps
        return change <= (1e3 * eps) ** 2 * size

    def _replay(self, seed: int) -> Replay:
        with draws_kept(self.model):
            seed_draws(self.model, seed)
            return Replay(self.model, second_order=False)


def has_draws(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a model's loss depends on random draws, in the mode in which it is."""
    if not any(module.training for module in model.modules()):
        return False
    losses = []
    for seed in (0, 1):
        with draws_kept(model):
            seed_draws(model, seed)
            replay = Replay(model, second_order=False)
        with replay.draws(), torch.no_grad():
            losses.append(float(model_loss(model, dict(batch))))
    return losses[0] != losses[1]


def _different(batches: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The entries that are not alike in all: only these are vectorized."""
    reference = batches[0]
    keys = [key for key, value in reference.items() if isinstance(value, Tensor)]
    return tuple(k for k in keys if any(not torch.equal(b[k], reference[k]) for b in batches[1:]))


def batch_shape(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what batches must share to run together: shapes, and masks.

    Masks decide which way a model takes.
    """
    return tuple(
        (key, tuple(value.shape), value.dtype, key.endswith("mask") and value.tolist())
        if isinstance(value, Tensor)
        else (key, repr(value))
        for key, value in sorted(batch.items())
    )
