"""What a server knows of a client's local training, when it sees the change of weights alone."""

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


@dataclass(frozen=True)
class LocalTraining:
    """How a client trained before it sent.

    Args:
        rates: The learning rate of each step.
        optimizer: As `make_optimizer` makes it.
        batch_size: Samples a step, of all the client's samples in one order, over and over. `None`:
            every step is on all of them, which is what is best assumed where epochs shuffle: to
            first order in the learning rate it is the same, in whatever order the batches were.

    Example:
        >>> local = LocalTraining((0.1, 0.1, 0.1), make_optimizer("sgd"), batch_size=1)
        >>> [len(piece["labels"]) for piece in local.batches(batch)]
        [1, 1, 1]
    """

    rates: tuple[float, ...]
    optimizer: Optimizer
    batch_size: int | None = None

    @classmethod
    def of(
        cls,
        learning_rate: float | Sequence[float],
        steps: int,
        batch_size: int | None,
        optimizer: str | Optimizer,
        settings: Mapping[str, Any] | None,
    ) -> LocalTraining:
        """As `Observation.from_update` is told of it.

        Raises:
            ValueError: If there are not as many learning rates as steps.
        """
        rates = (
            tuple(learning_rate)
            if isinstance(learning_rate, Sequence)
            else (learning_rate,) * steps
        )
        if len(rates) != steps or not rates:
            raise ValueError(f"There are {len(rates)} learning rates for {steps} steps.")
        return cls(rates, make_optimizer(optimizer, settings), batch_size)

    def gradient_behind(
        self, model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Tensors:
        """The mean gradient that a change of weights says; see `difference` for what it raises."""
        return mean_gradient(self.optimizer, self.rates, *difference(model, before, after))

    def behind(self, grants: Mapping[str, Any]) -> dict[str, Any]:
        """What is granted of an update's defense, as it is of the mean gradient."""
        scale = self.optimizer.linear(list(self.rates))[1]
        found = dict(grants)
        if (variance := grants.get("noise_variance")) is not None:
            found["noise_variance"] = _over(variance, scale**2)
        mechanism: Mechanism | None = grants.get("mechanism")
        if mechanism is not None:
            found["mechanism"] = replace(
                mechanism,
                variance=None
                if mechanism.variance is None
                else _over(mechanism.variance, scale**2),
                clip_norm=mechanism.clip_norm and mechanism.clip_norm / scale,
                clip_coordinate=mechanism.clip_coordinate and mechanism.clip_coordinate / scale,
            )
        return found

    def batches(self, whole: Batch) -> list[Batch]:
        """What each step is on, of a batch of all samples."""
        pieces = pieces_of(whole, self.batch_size)
        return list(islice(cycle(pieces), len(self.rates)))

    def gradient_map(
        self, model: nn.Module, whole: Batch, loss_fn: LossFunction | None
    ) -> UpdateMap:
        """The map from candidates for all samples to the mean gradient of this training."""
        return MeanGradientMap(
            model,
            self.batches(whole),
            learning_rate=list(self.rates),
            optimizer=self.optimizer,
            loss_fn=loss_fn,
        )

    def many(self, model: nn.Module, names: Sequence[str], seeds: Sequence[int]) -> ManyGradients:
        """Mean gradients of many candidates for a client's only batch."""
        return _ManyTrainings(self, model, names, seeds)


class _ManyTrainings(ManyGradients):
    """What training on each batch adds up to, one after the other."""

    def __init__(
        self, local: LocalTraining, model: nn.Module, names: Sequence[str], seeds: Sequence[int]
    ) -> None:
        super().__init__(model, names, seeds, vectorized=False)
        self._local, self._shares = local, False

    def _evaluate_one(self, batch: Mapping[str, Any], seed: int) -> Tensors:
        with self._replay(seed).draws():
            gmap = MeanGradientMap(
                self.model,
                self._local.batches(batch),
                learning_rate=list(self._local.rates),
                optimizer=self._local.optimizer,
                share_input_embeddings=self._shares,
                second_order=False,
                needs_input=False,
            )
        found = gmap.gradient()
        if not self._shares and not self.parameters.keys() <= found.keys():
            self._shares = True  # the client sent its embeddings, so it trained them
            return self._evaluate_one(batch, seed)
        return {name: found[name] for name in self.parameters}


def difference(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """The weights that an update changed, before it, and their change, by name.

    Raises:
        ValueError: If a name is not the model's, one is missing before, or a shape differs.

    Example:
        >>> before = {name: p.detach() for name, p in model.named_parameters()}
        >>> after = before | {"classifier.bias": before["classifier.bias"] + 1}
        >>> difference(model, before, after)[1]
        {'classifier.bias': tensor([1., 1.])}
    """
    parameters, known = dict(model.named_parameters()), model.state_dict()
    start: Tensors = {}
    change: Tensors = {}
    for name, tensor in after.items():
        if name not in known or name not in before:
            where = "weights before" if name in known else f"parameters of {type(model).__name__}"
            raise ValueError(f"The update names {name!r}, which is not among the {where}.")
        if not tensor.shape == before[name].shape == known[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} after training, "
                f"{tuple(before[name].shape)} before, and {tuple(known[name].shape)} in the model."
            )
        if name not in parameters:
            continue  # statistics
        delta = tensor.detach().to(parameters[name].device) - before[name].detach().to(
            parameters[name].device
        )
        if delta.any():
            start[name], change[name] = before[name].detach().to(delta.device), delta
    if not change:
        raise ValueError("No weight changed: there is nothing in this update.")
    return start, change


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model, if these are its weights, or a copy that has them.

    Example:
        >>> with_weights(model, model.state_dict()) is model
        True
    """
    known: dict[str, Any] = model.state_dict()
    mine = {name: weights[name].to(known[name].device) for name in weights if name in known}
    if all(torch.equal(known[name], tensor) for name, tensor in mine.items()):
        return model
    copied = copy.deepcopy(model)
    copied.load_state_dict(mine, strict=False)
    return copied


def _over(variance: float | Mapping[str, Tensor], scale: float) -> float | dict[str, Tensor]:
    if isinstance(variance, Mapping):
        return {name: tensor / scale for name, tensor in variance.items()}
    return variance / scale
