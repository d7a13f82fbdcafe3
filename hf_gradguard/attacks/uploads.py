"""Several uploads of one batch from the same weights, as one: fresh noise averages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..gradient_map import Tensors
from .observation import Observation

_Variance = float | Mapping[str, Tensor] | None


def average(observations: Sequence[Observation]) -> Observation:
    """Several uploads of one batch, from the same weights, as one: fresh noise averages out.

    Each entry weighs by the inverse of its noise's variance, where it was not withheld. Of Gaussian
    noise the mean says all that the uploads say, in whatever order they are.

    Raises:
        ValueError: If there are none, they name different parameters, or what is known of them
            differs in more than the variance of Gaussian noise.

    Example:
        >>> mean = average([replace(seen, noise_variance=0.04)] * 4)
        >>> mean.noise_variance
        0.01
        >>> uneven = average([replace(seen, noise_variance=v) for v in (1.0, 0.25)])
        >>> round(uneven.noise_variance, 6)  # the second weighs four times as much
        0.2
    """
    if not observations or any(
        seen.gradient.keys() != observations[0].gradient.keys() for seen in observations
    ):
        raise ValueError(
            "average needs at least one observation, all with gradients of the same parameters."
        )
    first = observations[0]
    if not all(alike(first, seen) for seen in observations):
        raise ValueError(
            "Uploads whose laws, or what is granted of them, differ in more than the variance of "
            "Gaussian noise have no mean with a law. Attack them by `history` of candidates, which "
            "adds up log-likelihoods."
        )
    shares = {name: _shares(observations, name) for name in first.gradient}
    law = None if first.law is None else first.law.of_mean(len(observations))
    if law is not None and law.variance is not None:
        variances = [seen.law.variance for seen in observations if seen.law is not None]
        law = replace(law, variance=_of_mean(variances, shares))
    return replace(
        first,
        gradient={name: _mean(observations, name, share) for name, share in shares.items()},
        noise_variance=_of_mean([seen.noise_variance for seen in observations], shares),
        law=law,
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
        or (one.law is None) != (other.law is None)
    ):
        return False
    if one.law is None or other.law is None:
        return True
    plain, others = (replace(law, noise=None, variance=None, batches=None, later=())
                     for law in (one.law, other.law))  # fmt: skip
    return (
        plain == others
        and not (one.law.later or other.law.later)
        and _same(one.law.batches, other.law.batches)
        and one.law.noise == other.law.noise
        and (one.law.noise != "laplace" or _same(one.law.variance, other.law.variance))
    )


def _same(one: _Variance, other: _Variance) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one == other
    return one is other or (
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    )


def _variance(seen: Observation, name: str) -> Tensor:
    """Of the noise on a parameter as far as it is known, to be broadcast; 0 where it is not."""
    known = seen.noise_variance
    if seen.law is not None and seen.law.variance is not None:
        known = seen.law.variance
    if isinstance(known, Mapping):
        return known[name]
    return torch.tensor(known or 0.0, dtype=torch.float64)  # on the CPU: goes with all devices


def _shares(observations: Sequence[Observation], name: str) -> Tensor:
    """`(n, *shape)`, or `(n,)` where all entries are alike: what each upload weighs in the mean."""
    variances = [_variance(seen, name) for seen in observations]
    if _pruned(observations[0]) or any(v.dim() for v in variances):
        variances = [_where_sent(s, s.gradient[name], v)
                     for s, v in zip(observations, variances, strict=True)]  # fmt: skip
    stacked = torch.stack(variances)
    least = stacked.amin(0)
    precise = torch.where(stacked == least, 1.0, least / stacked)  # also if all are 0, or withheld
    return precise / precise.sum(0)


def _pruned(seen: Observation) -> bool:
    return seen.law is not None and seen.law.kept != "all"


def _where_sent(seen: Observation, y: Tensor, variance: Tensor) -> Tensor:
    """Infinite where an entry was withheld: 0, and if no law says so, without noise."""
    variance = variance.to(y.device, torch.promote_types(y.dtype, torch.float32))
    withheld = (y == 0) if _pruned(seen) else (y == 0) & (variance == 0)
    return variance.expand_as(y).masked_fill(withheld, torch.inf)


def _mean(observations: Sequence[Observation], name: str, shares: Tensor) -> Tensor:
    messages = [seen.gradient[name] for seen in observations]
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
