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
    """Several uploads of one batch, from the same weights, as one: fresh noise averages out.

    Each entry weighs by the inverse of its noise's variance, where it was not withheld. Of Gaussian
    noise the mean says all that the uploads say, in whatever order they are.

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
    first = observations[0]
    if not all(alike(first, observation) for observation in observations):
        raise ValueError(
            "Uploads whose mechanisms, or what is granted of them, differ in more than the "
            "variance of Gaussian noise have no mean with a mechanism. Attack them "
            "by `history` of candidates, which adds up log-likelihoods."
        )
    shares = {name: _shares(observations, name) for name in first.gradient}
    mechanism = None if first.mechanism is None else first.mechanism.of_mean(len(observations))
    if mechanism is not None and mechanism.variance is not None:
        variances = [
            observation.mechanism.variance
            for observation in observations
            if observation.mechanism is not None
        ]
        mechanism = replace(mechanism, variance=_of_mean(variances, shares))
    return replace(
        first,
        gradient={name: _mean(observations, name, share) for name, share in shares.items()},
        noise_variance=_of_mean(
            [observation.noise_variance for observation in observations], shares
        ),
        mechanism=mechanism,
    )


def alike(one: Observation, other: Observation) -> bool:
    """Whether two uploads from the same weights differ in nothing that is known of them but the
    variance of Gaussian noise, so that they have a mean.

    Example:
        >>> alike(seen, replace(seen, noise_variance=0.5))  # of one nobody knows the noise
        False
    """
    if (
        one.gradient.keys() != other.gradient.keys()
        or one.local != other.local
        or (one.noise_variance is None) != (other.noise_variance is None)
        or (one.mechanism is None) != (other.mechanism is None)
    ):
        return False
    if one.mechanism is None or other.mechanism is None:
        return True
    plain, others = (replace(mechanism, noise=None, variance=None, batches=None, later_messages=())
                     for mechanism in (one.mechanism, other.mechanism))  # fmt: skip
    return (
        plain == others
        and not (one.mechanism.later_messages or other.mechanism.later_messages)
        and _same(one.mechanism.batches, other.mechanism.batches)
        and one.mechanism.noise == other.mechanism.noise
        and (
            one.mechanism.noise != "laplace"
            or _same(one.mechanism.variance, other.mechanism.variance)
        )
    )


def _same(one: _Variance, other: _Variance) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one == other
    return one is other or (
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    )


def _variance(observation: Observation, name: str) -> Tensor:
    """Of the noise on a parameter as far as it is known, to be broadcast; 0 where it is not."""
    known = observation.noise_variance
    if observation.mechanism is not None and observation.mechanism.variance is not None:
        known = observation.mechanism.variance
    if isinstance(known, Mapping):
        return known[name]
    return torch.tensor(known or 0.0, dtype=torch.float64)  # on the CPU: goes with all devices


def _shares(observations: Sequence[Observation], name: str) -> Tensor:
    """`(n, *shape)`, or `(n,)` where all entries are alike: what each upload weighs in the mean."""
    variances = [_variance(observation, name) for observation in observations]
    if _pruned(observations[0]) or any(v.dim() for v in variances):
        variances = [_where_sent(s, s.gradient[name], v)
                     for s, v in zip(observations, variances, strict=True)]  # fmt: skip
    stacked = torch.stack(variances)
    least = stacked.amin(0)
    precise = torch.where(stacked == least, 1.0, least / stacked)  # also if all are 0, or withheld
    return precise / precise.sum(0)


def _pruned(observation: Observation) -> bool:
    return observation.mechanism is not None and observation.mechanism.selection != "all"


def _where_sent(observation: Observation, y: Tensor, variance: Tensor) -> Tensor:
    """Infinite where an entry was withheld: 0, and if no mechanism says so, without noise."""
    variance = variance.to(y.device, torch.promote_types(y.dtype, torch.float32))
    withheld = (y == 0) if _pruned(observation) else (y == 0) & (variance == 0)
    return variance.expand_as(y).masked_fill(withheld, torch.inf)


def _mean(observations: Sequence[Observation], name: str, shares: Tensor) -> Tensor:
    messages = [observation.gradient[name] for observation in observations]
    if bool((shares == shares[0]).all()):
        return torch.stack(messages).mean(0)
    parts = [share * y for share, y in zip(shares, messages, strict=True)]
    return torch.stack(parts).sum(0).to(messages[0].dtype)


def _of_mean(variances: Sequence[_Variance], shares: Tensors) -> float | Tensors | None:
    """The variance of a mean with these shares, of what has such variances."""
    if any(variance is None for variance in variances):
        return None
    found = {}
    for name, share in shares.items():
        parts = [
            part.square() * (v[name].to(part.device) if isinstance(v, Mapping) else v)
            for part, v in zip(share, variances, strict=True)
            if v is not None
        ]
        found[name] = torch.stack(torch.broadcast_tensors(*parts)).sum(0)
    alone = not any(isinstance(v, Mapping) for v in variances)
    if alone and all(share.dim() == 1 for share in shares.values()):
        return float(next(iter(found.values())))
    return found


def gathered(uploads: Iterable[Observation], at: int = 0) -> Observation:
    """One batch's upload with what later ones bring of it, each entry with the number of batches
    that it is a sum of, in its mechanism.

    Args:
        uploads: One client's, in order, behind error feedback, with mechanisms, at models that
            differ little. Earlier ones tell how many batches an entry holds, later ones what was
            left out. What a first one's mechanism says of the batches before it is taken over.
        at: Which of them is attacked.

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
        >>> whole = gathered(uploads, at=1)  # the second entry waits for the third upload
        >>> whole.gradient[bias].tolist(), whole.mechanism.batches[bias].tolist()
        ([2.0, 6.0], [1, 3])
    """
    target: Observation | None = None
    later: list[Tensors] = []
    gradient: Tensors = {}
    batches: Tensors = {}  # in each entry of the upload, or of the one that brings it
    waiting: Tensors = {}  # for one that does
    for number, observation in enumerate(uploads):
        mechanism = _check_upload(observation, batches if number else observation.gradient)
        if not number:
            before = mechanism.batches or {}
            batches = {
                n: before.get(n, torch.ones_like(y)).int() for n, y in observation.gradient.items()
            }
        if number == at:
            target = observation
            gradient = {name: torch.zeros_like(y) for name, y in observation.gradient.items()}
            waiting = {name: torch.ones_like(y, dtype=torch.bool) for name, y in gradient.items()}
        if mechanism.fitted is not None:
            later += [dict(observation.gradient)] if number > at else []
            continue
        for name, y in observation.gradient.items():
            if number < at:
                batches[name] = (batches[name] + 1).masked_fill(y != 0, 1)
                continue
            gradient[name] = torch.where(waiting[name], y, gradient[name])
            waiting[name] &= y == 0
            batches[name] = batches[name] + waiting[name]
    if target is None or target.mechanism is None:
        raise ValueError(f"There is no upload at {at}.")
    mechanism = replace(target.mechanism, has_residual=True)
    if mechanism.fitted is not None:
        return replace(target, mechanism=replace(mechanism, later_messages=tuple(later)))
    return replace(target, gradient=gradient, mechanism=replace(mechanism, batches=batches))


def _check_upload(observation: Observation, names: Iterable[str]) -> Mechanism:
    """The mechanism of an upload that names these parameters."""
    if observation.mechanism is None or observation.gradient.keys() != set(names):
        raise ValueError(
            "gathered needs uploads of one client, with gradients of the same parameters and "
            "the mechanism of each: Observation(mechanism=defense.mechanism(message))."
        )
    return observation.mechanism


def own_entries(observation: Observation) -> Observation | None:
    """Of what was gathered the entries that are the batch's own, as if it had been pruned to them
    without feedback, for any attack; `None` where there is none, or nobody knows which.

    Args:
        observation: With `batches` in its mechanism.

    Example:
        >>> from hf_gradguard.defenses.mechanism import Mechanism
        >>> bias, batches = "classifier.bias", {"classifier.bias": torch.tensor([1, 3])}
        >>> mechanism = Mechanism(selection="largest", has_residual=True, batches=batches)
        >>> whole = replace(seen, gradient={bias: torch.tensor([2.0, 6.0])}, mechanism=mechanism)
        >>> own = own_entries(whole)
        >>> own.gradient[bias].tolist(), own.mechanism.has_residual
        ([2.0, 0.0], False)
    """
    mechanism = observation.mechanism
    if mechanism is None or mechanism.batches is None:
        return None
    gradient = {
        name: y.masked_fill(mechanism.batches[name] > 1, 0)
        for name, y in observation.gradient.items()
    }
    if not any(bool(y.any()) for y in gradient.values()):
        return None
    known = replace(mechanism, selection="chosen", has_residual=False, batches=None)
    return replace(observation, gradient=gradient, mechanism=known)
