"""The local training of a client, as known to a server that sees only the change of weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from ..defenses.mechanism import Mechanism
from ..gradient_map import Batch, LossFunction, Tensors, UpdateMap
from ..gradient_map.local_training.batches import pieces_of
from ..gradient_map.local_training.optimizers import Optimizer, make_optimizer
from ..gradient_map.local_training.update import MeanGradientMap, mean_gradient
from ..gradient_map.vectorized import ManyGradients

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class LocalTraining:
    """The local training of a client before it sent.

    Args:
        rates: The learning rate of each step.
        optimizer: The optimizer, as `make_optimizer` makes it.
        batch_size: Samples a step, of all the client's samples in one order, over and over. `None`:
            every step is on all of them. That is the best assumption if epochs shuffle: to first
            order in the learning rate it is the same, in whatever order the batches were.

    Example:
        >>> local = LocalTraining((0.1, 0.1, 0.1), make_optimizer("sgd"), batch_size=1)
        >>> [len(piece["labels"]) for piece in local.batches(batch)]
        [1, 1, 1]
    """

    rates: tuple[float, ...]
    optimizer: Optimizer
    batch_size: int | None = None

    @classmethod
    def from_settings(
        cls,
        learning_rate: float | Sequence[float],
        steps: int,
        batch_size: int | None,
        optimizer: str | Optimizer,
        optimizer_kwargs: Mapping[str, Any] | None,
    ) -> LocalTraining:
        """Return the training that the arguments of `Observation.from_update` describe.

        Raises:
            ValueError: If there are not as many learning rates as steps.
        """
        if not isinstance(learning_rate, Sequence):
            learning_rate = (learning_rate,) * steps
        rates = tuple(learning_rate)
        if len(rates) != steps or not rates:
            raise ValueError(f"There are {len(rates)} learning rates for {steps} steps.")
        return cls(rates, make_optimizer(optimizer, optimizer_kwargs), batch_size)

    def mean_gradient_of(
        self,
        model: nn.Module,
        weights_before: Weights,
        weights_after: Weights,
    ) -> Tensors:
        """Return the mean gradient behind a change of weights; `difference` says what it raises."""
        start, change = difference(model, weights_before, weights_after)
        return mean_gradient(self.optimizer, self.rates, start, change)

    def scale_grants(self, grants: Mapping[str, Any]) -> dict[str, Any]:
        """Convert what is granted of an update's defense to the unit of the mean gradient."""
        by = 1 / self.optimizer.linear(list(self.rates))[1]
        scaled = dict(grants)
        if (variance := grants.get("noise_variance")) is not None:
            scaled["noise_variance"] = scale_variance(variance, by**2)
        if (mechanism := grants.get("mechanism")) is not None:
            scaled["mechanism"] = scale_mechanism(mechanism, by)
        return scaled

    def batches(self, full_batch: Batch) -> list[Batch]:
        """Return the batch of each step, given a batch of all samples."""
        pieces = pieces_of(full_batch, self.batch_size)
        return list(islice(cycle(pieces), len(self.rates)))

    def gradient_map(
        self, model: nn.Module, full_batch: Batch, loss_fn: LossFunction | None
    ) -> UpdateMap:
        """Return the map from candidates for all samples to the mean gradient of this training."""
        batches, rates = self.batches(full_batch), list(self.rates)
        return MeanGradientMap(
            model, batches, learning_rate=rates, optimizer=self.optimizer, loss_fn=loss_fn
        )

    def many_gradients(
        self, model: nn.Module, names: Sequence[str], seeds: Sequence[int]
    ) -> ManyGradients:
        """Return the function that gives mean gradients of many candidates for the only batch."""
        return _ManyTrainings(self, model, names, seeds)


class _ManyTrainings(ManyGradients):
    """The mean gradients of training on each of many batches, one after the other."""

    def __init__(
        self, local: LocalTraining, model: nn.Module, names: Sequence[str], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, names, seeds, vectorized=False)
        self._local, self._sends_embeddings = local, False

    def _evaluate_one(self, batch: Mapping[str, Any], seed: int) -> Tensors:
        with self._replay(seed).draws():
            gmap = MeanGradientMap(
                self.model,
                self._local.batches(batch),
                learning_rate=list(self._local.rates),
                optimizer=self._local.optimizer,
                share_input_embeddings=self._sends_embeddings,
                second_order=False,
                needs_input=False,
            )
        gradient = gmap.gradient()
        if not self._sends_embeddings and not self.parameters.keys() <= gradient.keys():
            self._sends_embeddings = True  # the client sent its embeddings, so it trained them
            return self._evaluate_one(batch, seed)
        return {name: gradient[name] for name in self.parameters}


def difference(
    model: nn.Module, weights_before: Weights, weights_after: Weights
) -> tuple[Tensors, Tensors]:
    """Return the weights that an update changed, before it, and their change, by name.

    Raises:
        ValueError: If a name is not the model's, one is missing before, or a shape differs.

    Example:
        >>> before = {name: p.detach() for name, p in model.named_parameters()}
        >>> after = before | {"classifier.bias": before["classifier.bias"] + 1}
        >>> difference(model, before, after)[1]
        {'classifier.bias': tensor([1., 1.])}
    """
    parameters, state = dict(model.named_parameters()), model.state_dict()
    start: Tensors = {}
    change: Tensors = {}
    for name, tensor in weights_after.items():
        if name not in state or name not in weights_before:
            parameters_of_model = f"parameters of {type(model).__name__}"
            missing_from = "weights before" if name in state else parameters_of_model
            raise ValueError(f"The update names {name!r}, which is not among the {missing_from}.")
        if not tensor.shape == weights_before[name].shape == state[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} after training, "
                f"{tuple(weights_before[name].shape)} before, and {tuple(state[name].shape)} in "
                "the model."
            )
        if name not in parameters:
            continue  # statistics
        delta = tensor.detach().to(parameters[name].device) - weights_before[name].detach().to(
            parameters[name].device
        )
        if delta.any():
            start[name], change[name] = weights_before[name].detach().to(delta.device), delta
    if not change:
        raise ValueError("No weight changed: there is nothing in this update.")
    return start, change


def with_weights(model: nn.Module, weights: Weights) -> nn.Module:
    """Return the model, if these are its weights, or a copy that has them.

    Example:
        >>> with_weights(model, model.state_dict()) is model
        True
    """
    state: dict[str, Any] = model.state_dict()
    new_weights = {name: weights[name].to(state[name].device) for name in weights if name in state}
    if all(torch.equal(state[name], tensor) for name, tensor in new_weights.items()):
        return model
    copied = copy.deepcopy(model)
    copied.load_state_dict(new_weights, strict=False)
    return copied


def scale_mechanism(mechanism: Mechanism, by: float) -> Mechanism:
    """Return the mechanism, as if gradients were `by` times as large.

    Example:
        >>> scaled = scale_mechanism(Mechanism(clip_norm=1.0, noise="gaussian", variance=0.5), 2.0)
        >>> scaled.clip_norm, scaled.variance
        (2.0, 2.0)
    """
    variance = mechanism.variance
    return replace(
        mechanism,
        clip_norm=mechanism.clip_norm and mechanism.clip_norm * by,
        clip_coordinate=mechanism.clip_coordinate and mechanism.clip_coordinate * by,
        variance=None if variance is None else scale_variance(variance, by**2),
        relative_to=mechanism.relative_to and mechanism.relative_to * by**2,
        later_messages=tuple(
            {name: g * by for name, g in message.items()} for message in mechanism.later_messages
        ),
    )


def scale_variance(variance: float | Mapping[str, Tensor], by: float) -> float | dict[str, Tensor]:
    """Return a variance, one number or a tensor per parameter, times a number."""
    if isinstance(variance, Mapping):
        return {name: tensor * by for name, tensor in variance.items()}
    return variance * by
