"""Several messages of one client as one observation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..defenses.mechanism import Mechanism
from ..gradient_map import Tensors
from .base import Observation

_Variance = float | Mapping[str, Tensor] | None


def average(observations: Sequence[Observation]) -> Observation:
    """Average several uploads of one batch from the same weights: independent noise averages out.

    Each entry weighs by the inverse of its noise's variance, where it was not withheld. For
    Gaussian noise the mean says all that the uploads say, in whatever order they are.

    Raises:
        ValueError: If there are none, they name different parameters, or what is known of them
            differs in more than the variance of Gaussian noise.

    Example:
        >>> mean = average([replace(observation, noise_variance=0.04)] * 4)
        >>> mean.noise_variance
        0.01
        >>> uneven = average([replace(observation, noise_variance=v) for v in (1.0, 0.25)])
        >>> round(uneven.noise_variance, 6)  # the second weighs four times as much
        0.2
    """
    if not observations or any(
        observation.gradient.keys() != observations[0].gradient.keys()
        for observation in observations
    ):
        raise ValueError(
            "average needs at least one observation, all with gradients of the same parameters."
        )
    reference = observations[0]
    if not all(can_average(reference, observation) for observation in observations):
        raise ValueError(
            "Uploads whose mechanisms, or what is granted of them, differ in more than the "
            "variance of Gaussian noise have no mean with a mechanism. Attack them "
            "by `history` of candidates, which adds up log-likelihoods."
        )
    weights = {name: _weights(observations, name) for name in reference.gradient}
    mechanism = reference.mechanism
    mechanism = mechanism and mechanism.of_mean(len(observations))
    if mechanism is not None and mechanism.variance is not None:
        mechanisms = [observation.mechanism for observation in observations]
        variances = [granted.variance for granted in mechanisms if granted is not None]
        mechanism = replace(mechanism, variance=_variance_of_mean(variances, weights))
    return replace(
        reference,
        gradient={name: _mean(observations, name, weight) for name, weight in weights.items()},
        noise_variance=_variance_of_mean(
            [observation.noise_variance for observation in observations], weights
        ),
        mechanism=mechanism,
    )


def can_average(reference: Observation, observation: Observation) -> bool:
    """Return whether two uploads from the same weights have a mean.

    All that is known of them has to be the same, except for the variance of Gaussian noise.

    Example:
        >>> can_average(seen, replace(seen, noise_variance=0.5))  # the noise of one is unknown
        False
    """
    if (
        reference.gradient.keys() != observation.gradient.keys()
        or reference.local != observation.local
        or (reference.noise_variance is None) != (observation.noise_variance is None)
        or (reference.mechanism is None) != (observation.mechanism is None)
    ):
        return False
    if reference.mechanism is None or observation.mechanism is None:
        return True
    reference_mechanism, mechanism = (replace(mechanism, noise=None, variance=None, batches=None,
    later_messages=())
                     for mechanism in (reference.mechanism, observation.mechanism))  # fmt: skip
    return (
        reference_mechanism == mechanism
        and not (reference.mechanism.later_messages or observation.mechanism.later_messages)
        and _equal_variances(reference.mechanism.batches, observation.mechanism.batches)
        and reference.mechanism.noise == observation.mechanism.noise
        and (
            reference.mechanism.noise != "laplace"
            or _equal_variances(reference.mechanism.variance, observation.mechanism.variance)
        )
    )


def _equal_variances(reference: _Variance, variance: _Variance) -> bool:
    if not isinstance(reference, Mapping) or not isinstance(variance, Mapping):
        return reference == variance
    return reference is variance or (
        reference.keys() == variance.keys()
        and all(torch.equal(reference[name], variance[name]) for name in reference)
    )


def _variance(observation: Observation, name: str) -> Tensor:
    """Return the known variance of the noise on a parameter, to be broadcast; 0 if unknown."""
    variance = observation.noise_variance
    if observation.mechanism is not None and observation.mechanism.variance is not None:
        variance = observation.mechanism.variance
    if isinstance(variance, Mapping):
        return variance[name]
    return torch.tensor(variance or 0.0, dtype=torch.float64)  # on the CPU: goes with all devices


def _weights(observations: Sequence[Observation], name: str) -> Tensor:
    """Return each upload's weight in the mean, `(n, *shape)`, or `(n,)` if entries are equal."""
    variances = [_variance(observation, name) for observation in observations]
    if _is_pruned(observations[0]) or any(variance.dim() for variance in variances):
        variances = [_infinite_where_withheld(upload, upload.gradient[name], variance)
                     for upload, variance in zip(observations, variances, strict=True)]  # fmt: skip
    stacked = torch.stack(variances)
    smallest = stacked.amin(0)
    precision = torch.where(
        stacked == smallest, 1.0, smallest / stacked
    )  # also if all are 0, or withheld
    return precision / precision.sum(0)


def _is_pruned(observation: Observation) -> bool:
    return observation.mechanism is not None and observation.mechanism.selection != "all"


def _infinite_where_withheld(observation: Observation, y: Tensor, variance: Tensor) -> Tensor:
    """Return variances that are infinite where an entry was withheld.

    It was withheld if it is 0 and, unless a mechanism says so, has no noise.
    """
    variance = variance.to(y.device, torch.promote_types(y.dtype, torch.float32))
    withheld = (y == 0) if _is_pruned(observation) else (y == 0) & (variance == 0)
    return variance.expand_as(y).masked_fill(withheld, torch.inf)


def _mean(observations: Sequence[Observation], name: str, weights: Tensor) -> Tensor:
    messages = [observation.gradient[name] for observation in observations]
    if bool((weights == weights[0]).all()):
        return torch.stack(messages).mean(0)
    weighed = [weight * y for weight, y in zip(weights, messages, strict=True)]
    return torch.stack(weighed).sum(0).to(messages[0].dtype)


def _variance_of_mean(variances: Sequence[_Variance], weights: Tensors) -> float | Tensors | None:
    """Return the variance of a mean with these weights, of terms with such variances."""
    if any(variance is None for variance in variances):
        return None
    variance_by_name = {}
    for name, weight in weights.items():
        terms = [
            of_upload.square()
            * (variance[name].to(of_upload.device) if isinstance(variance, Mapping) else variance)
            for of_upload, variance in zip(weight, variances, strict=True)
            if variance is not None
        ]
        variance_by_name[name] = torch.stack(torch.broadcast_tensors(*terms)).sum(0)
    are_scalars = not any(isinstance(variance, Mapping) for variance in variances)
    if are_scalars and all(weight.dim() == 1 for weight in weights.values()):
        return float(next(iter(variance_by_name.values())))
    return variance_by_name


def accumulate_uploads(uploads: Iterable[Observation], index: int = 0) -> Observation:
    """Return one batch's upload with what later uploads bring of the same batch.

    The mechanism has for each entry the number of batches that it is a sum of.

    Args:
        uploads: One client's uploads, in order, behind error feedback, with mechanisms, at models
            that differ little. Earlier ones tell how many batches an entry holds, later ones what
            was left out. What a first one's mechanism says of the batches before it is taken over.
        index: The number of the upload that is attacked.

    Returns:
        The observation at that place. Entries that no upload brings are 0, and count the batches
            that the next one would bring. Fitted messages are `later_messages` of its mechanism.

    Raises:
        ValueError: If there is none at that place, or one has no mechanism or other parameters.

    Example:
        >>> from hf_gradguard.defenses.mechanism import Mechanism
        >>> bias, mechanism = "classifier.bias", Mechanism(selection="largest", has_residual=True)
        >>> sent = [[1.0, 0.0], [2.0, 0.0], [0.0, 6.0]]
        >>> uploads = [
        ...     replace(seen, gradient={bias: torch.tensor(y)}, mechanism=mechanism) for y in sent
        ... ]
        >>> whole = accumulate_uploads(uploads, index=1)  # one entry waits for the third upload
        >>> whole.gradient[bias].tolist(), whole.mechanism.batches[bias].tolist()
        ([2.0, 6.0], [1, 3])
    """
    target: Observation | None = None
    later_messages: list[Tensors] = []
    gradient: Tensors = {}
    batches: Tensors = {}  # in each entry of the upload, or of the one that brings it
    waiting: Tensors = {}  # for one that does
    for position, observation in enumerate(uploads):
        mechanism = _check_upload(observation, batches if position else observation.gradient)
        if not position:
            earlier_batches = mechanism.batches or {}
            no_others = {name: torch.ones_like(y) for name, y in observation.gradient.items()}
            batches = {name: earlier_batches.get(name, y).int() for name, y in no_others.items()}
        if position == index:
            target = observation
            gradient = {name: torch.zeros_like(y) for name, y in observation.gradient.items()}
            waiting = {name: torch.ones_like(y, dtype=torch.bool) for name, y in gradient.items()}
        if mechanism.fitted is not None:
            later_messages += [dict(observation.gradient)] if position > index else []
            continue
        for name, y in observation.gradient.items():
            if position < index:
                batches[name] = (batches[name] + 1).masked_fill(y != 0, 1)
                continue
            gradient[name] = torch.where(waiting[name], y, gradient[name])
            waiting[name] &= y == 0
            batches[name] = batches[name] + waiting[name]
    if target is None or target.mechanism is None:
        raise ValueError(f"There is no upload at {index}.")
    mechanism = replace(target.mechanism, has_residual=True)
    if mechanism.fitted is not None:
        return replace(target, mechanism=replace(mechanism, later_messages=tuple(later_messages)))
    return replace(target, gradient=gradient, mechanism=replace(mechanism, batches=batches))


def _check_upload(observation: Observation, names: Iterable[str]) -> Mechanism:
    """Return the mechanism of an upload that names these parameters."""
    if observation.mechanism is None or observation.gradient.keys() != set(names):
        raise ValueError(
            "accumulate_uploads needs uploads of one client, of the same parameters and with the "
            "mechanism of each: Observation(mechanism=defense.mechanism(message))."
        )
    return observation.mechanism


def single_batch_entries(observation: Observation) -> Observation | None:
    """Return those entries of accumulated messages that are the batch's own, or `None`.

    The observation is as if it had been pruned to them without feedback, for any attack. It is
    `None` if there is no such entry, or which ones is unknown.

    Args:
        observation: An observation with `batches` in its mechanism.

    Example:
        >>> from hf_gradguard.defenses.mechanism import Mechanism
        >>> bias, batches = "classifier.bias", {"classifier.bias": torch.tensor([1, 3])}
        >>> mechanism = Mechanism(selection="largest", has_residual=True, batches=batches)
        >>> whole = replace(seen, gradient={bias: torch.tensor([2.0, 6.0])}, mechanism=mechanism)
        >>> own = single_batch_entries(whole)
        >>> own.gradient[bias].tolist(), own.mechanism.has_residual
        ([2.0, 0.0], False)
    """
    mechanism = observation.mechanism
    if mechanism is None or mechanism.batches is None:
        return None
    batches, shared = mechanism.batches, observation.gradient
    gradient = {name: y.masked_fill(batches[name] > 1, 0) for name, y in shared.items()}
    if not any(bool(y.any()) for y in gradient.values()):
        return None
    single_batch = replace(mechanism, selection="chosen", has_residual=False, batches=None)
    return replace(observation, gradient=gradient, mechanism=single_batch)
