"""Pruning, which shares g with a set A of coordinates zeroed.

U₁ = Σ_{i∉A} g_i² is the first-order utility and Σ_{i∉A} s_i² what leaks. At fixed U₁ the least
leaks when the largest k_i = s_i/|g_i| are pruned.

Reference: Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2024, 2025).
Their first version says "smallest"; the second, its Eq. 13 and the proof say largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.types import Shards
from ..randomness import Stream
from .base import DefenseFacts, Message, cast_like, count, floor_share, is_number, true_gradient
from .feedback import BiasedDefense, check_min_batches
from .sensitivity import SensitivityDefense, ShapedBy

_OF_A_RATIO: Mapping[str, Any] = {"error_feedback": False, "min_batches": 2}
"""Where a ratio or a utility is given, as papers have it."""


@dataclass
class PruningDefense(BiasedDefense):
    """A base of defenses that zero a fraction of all coordinates, ranked over all tensors together.

    At most one of `ratio` and `utility` may be given; with neither, the strength is `recommended`.

    Args:
        ratio: p in [0, 1): exactly floor(p·d) coordinates are zeroed, ties broken by position.
        utility: u in (0, 1]: coordinates are kept in order of rank until Σ g_i² ≥ u‖g‖².
        error_feedback: Whether to use error feedback, as for all biased defenses. Default: on if
            neither `ratio` nor `utility` is given. Without it what is left is exact, and names
            every batch member.
        min_batches: k in 1 to 255. With error feedback a coordinate is sent once it is the sum of k
            batches' gradients or more. So a client's first k-1 messages are empty. Default: 2, or
            what is `recommended`; with 1, as published, some are one batch's own, exact.
    """

    counts_entries: ClassVar[bool] = True
    recommended: ClassVar[Mapping[str, Any]] = {
        "ratio": 0.99, "error_feedback": True, "min_batches": 2,
    }  # fmt: skip
    ratio: float | None = None
    utility: float | None = None
    _: KW_ONLY
    error_feedback: bool | None = None  # type: ignore[assignment]
    min_batches: int | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.utility is not None:
            raise ValueError("Give ratio or utility, not both.")
        is_bare = self.ratio is None and self.utility is None
        for name, setting in (self.recommended if is_bare else _OF_A_RATIO).items():
            if getattr(self, name) is None:
                setattr(self, name, setting)
        if self.ratio is not None and not (is_number(self.ratio) and 0 <= self.ratio < 1):
            raise ValueError(
                "ratio must be at least 0 and below 1 (1 would share nothing), but is "
                f"{self.ratio!r}."
            )
        if self.utility is not None and not (is_number(self.utility) and 0 < self.utility <= 1):
            raise ValueError(f"utility must be above 0 and at most 1, but is {self.utility!r}.")
        check_min_batches(self.min_batches)

    def informed(self) -> dict[str, Any]:
        return {"match_nonzero": True, "complete": True}

    def worth(self, gmap: GradientMap, gradient: Tensors, generator: Stream) -> Iterable[Tensor]:
        """Return non-negative ranks, tensor by tensor in the gradient's order.

        The smallest are pruned first.
        """
        raise NotImplementedError

    def corrected(self, gmap: GradientMap, corrected_gradient: Tensors) -> GradientMap:
        """Return the map without what is the sum of too few batches to hide this one in it."""
        ready = self._residual.ready()
        if ready is None:
            return super().corrected(gmap, corrected_gradient)
        ready_gradient = {
            name: tensor.masked_fill(~ready[name], 0) for name, tensor in corrected_gradient.items()
        }
        return gmap.corrected(corrected_gradient).masked(ready_gradient, ready)

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gradient = true_gradient(gmap)
        entry_count = sum(g.numel() for g in gradient.values())
        worth = _flatten(self.worth(gmap, gradient, generator), entry_count)
        sizes = {name: g.numel() for name, g in gradient.items()}
        if self.utility is not None:
            power = _flatten(gradient.values(), entry_count).double().square()
            pruned = ~largest(worth, self.utility, power, sizes, gmap.shards)
        else:
            assert self.ratio is not None  # __post_init__ leaves exactly one of the two set
            total_count = count(gradient, gmap.shards)
            kept_count = total_count - floor_share(self.ratio, total_count)
            pruned = ~largest(worth, kept_count, None, sizes, gmap.shards)
        del worth  # before the message is there
        pruned_gradient, transmitted = {}, {}
        masks = pruned.split(list(sizes.values()))
        for (name, g), mask in zip(gradient.items(), masks, strict=True):
            pruned_gradient[name] = g.masked_fill(mask.view_as(g), 0.0)
            transmitted[name] = torch.ne(pruned_gradient[name], 0, out=mask.view_as(g))
        return Message(cast_like(pruned_gradient, gmap), transmitted=transmitted, exact=True)

    @property
    def facts(self) -> DefenseFacts:
        return replace(super().facts, is_exact=not self.error_feedback)


@dataclass
class Pruning(PruningDefense):
    """Zeroes the smallest |g_i| over all tensors together.

    Without settings it has a ratio of 0.99 with error feedback: a candidate-set attacker found 56 %
    of the sentences in a message of 16, and span 26 % of the words (docs/findings/text.md). At 0.9
    without feedback it found all, and 91 % of the words (docs/findings/text.md).
    """

    name: ClassVar[str] = "pruning"

    @property
    def facts(self) -> DefenseFacts:
        return replace(
            super().facts,
            needs_input=False,
            reruns_model=False,
            post_processes=True,
            sharded_refusal=None,
            selection="largest",
        )

    def worth(self, gmap: GradientMap, gradient: Tensors, generator: Stream) -> Iterable[Tensor]:
        return (g.abs() for g in gradient.values())


@dataclass
class OptimalPruning(SensitivityDefense, PruningDefense):
    """Zeroes the largest s_i/|g_i| over all tensors: the least leakage at a given utility.

    With `shape="own"`, as published, coordinates with g_i = 0 go first, because pruning them
    changes nothing. With `"public"` and `"past"` the mask does not depend on the batch; the first
    message of `"past"` keeps coordinates at random. With granularity "layer" all coordinates of a
    tensor rank the same, and go by position within it. With error feedback g² counts as averaged g²
    and e²: what waits gets its turn, by what earlier batches left.

    Without settings it has a ratio of 0.99 with error feedback, each coordinate the sum of eight
    batches or more: a candidate-set attacker found 0 of 48 sentences in messages of 16 at the end
    of training, at 4.2 points [2.4, 6.0] of accuracy (docs/findings/text.md). Without feedback it
    found all.
    """

    name: ClassVar[str] = "optimal_pruning"
    facts = SensitivityDefense.facts
    recommended: ClassVar[Mapping[str, Any]] = {**PruningDefense.recommended, "min_batches": 8}

    def __post_init__(self) -> None:
        PruningDefense.__post_init__(self)
        SensitivityDefense.__post_init__(self)

    def worth(self, gmap: GradientMap, gradient: Tensors, generator: Stream) -> Iterable[Tensor]:
        if self.shape == "own":
            roots, magnitude = self.own_sensitivity(gmap, gradient, generator)
            # s_i above 1e-30: coordinates that leak nothing are worth the more the larger they are,
            # and more than all others.
            return (
                (magnitude[name] / s.clamp(min=1e-30)).mul_(gradient[name] != 0)
                for name, s in roots.items()
            )
        waiting = self._residual.relative_squares() if self.error_feedback else None
        ratio = self.averaged_ratio(gmap, generator, waiting)
        shards = gmap.shards

        def rank(name: str) -> Tensor:
            if ratio is not None:
                return ratio[name].reciprocal()
            g = gradient[name]
            stream = generator if shards is None else shards.stream_of(name, generator)
            return stream.uniform(g.shape, device=g.device, dtype=g.dtype)

        # What is withheld already goes first.
        return (gmap.restrict({name: rank(name)})[name] for name in gradient)


@dataclass
class OptimalPruningPublished(OptimalPruning):
    """Zeroes the largest s_i/|g_i| of this very batch, exactly as the paper describes.

    s comes from k = 10 random directions, without error feedback. `ratio` is 0.8, the paper's own
    comparison (80 % optimal against 90 % plain pruning). What is left is exact, so that a
    candidate-set attacker finds every batch member (docs/findings/text.md). `optimal_pruning` is
    the form to train with.

    Reference: Chen, Gürsoy, Lei (2025), Theorem 3.6, Eq. 11, Algorithm 1, Figure 3, Appendix C.

    Example:
        >>> make_defense("optimal_pruning_published").ratio
        0.8
    """

    name: ClassVar[str] = "optimal_pruning_published"
    facts = OptimalPruning.facts
    recommended: ClassVar[Mapping[str, Any]] = {**_OF_A_RATIO, "ratio": 0.8}
    shape: ShapedBy = "own"
    num_probes: int | None = 10


def largest(
    worth: Tensor,
    amount: float,
    weight: Tensor | None = None,
    sizes: Mapping[str, int] | None = None,
    shards: Shards | None = None,
) -> Tensor:
    """Return a mask of the largest entries of a non-negative tensor.

    They are the fewest whose weights add up to a given amount. With shards each device gives its
    shard of the tensor, and gets that of the mask. It is a radix select on the bits, which are in
    the numbers' order: linear time, and nothing is sorted.

    Args:
        worth: The tensor, `(d,)`, not negative. Among equals the last ones are taken first.
        amount: How many entries; with `weight`, the fraction of Σ weight, in (0, 1].
        weight: The weights, `(d,)`, not negative.
        sizes: How many entries belong to each parameter. Default: all to one.
        shards: The map's shards.
    """
    sizes = sizes or {"": len(worth)}
    # Two or four digits of 16 bits per number, the lowest first.
    digits = worth.view(torch.int16).view(len(worth), -1)
    keys = worth.view(torch.int32 if worth.element_size() == 4 else torch.int64)
    counted = _counted(worth, sizes, shards)
    position: Any = slice(None)
    threshold, amount_left = 0, amount
    # From the highest digit down: find the digit of the last entry that is taken, keep what is
    # above it, and look at the next digit of those entries alone that have this one.
    for place in reversed(range(digits.shape[1])):
        digit = digits[position, place]
        if place < digits.shape[1] - 1:
            digit = digit.int() & 0xFFFF  # only the highest digit cannot be negative
        histogram = _histogram(digit, weight, counted, position)
        reached = (histogram if shards is None else shards.add(histogram)).flip(0).cumsum(0)
        if weight is not None and place == digits.shape[1] - 1:
            amount_left = amount * float(reached[-1])
        above = min(int((reached < amount_left).sum()), 0xFFFF)
        amount_left -= reached[above - 1].item() if above else 0
        threshold |= (0xFFFF - above) << 16 * place
        tied = (digit == 0xFFFF - above).nonzero().flatten()
        position = tied if isinstance(position, slice) else position[tied]
        weight = None if weight is None else weight[tied]
    # Entries equal to the threshold in all digits are taken from the end, as many as are left.
    chosen = keys > threshold
    share = torch.ones_like(position) if weight is None else weight
    later_shares = share.flip(0).cumsum(0).flip(0) - share
    if shards is not None:
        shards.add_later_(later_shares, share, position, sizes)
    chosen[position[later_shares < amount_left]] = True
    return chosen


def _counted(worth: Tensor, sizes: Mapping[str, int], shards: Shards | None) -> Tensor | None:
    """Which entries are this device's to count; `None` for all."""
    if shards is None or all(map(shards.counts, sizes)):
        return None
    counts = [worth.new_full((size,), shards.counts(name), dtype=torch.bool)
             for name, size in sizes.items()]  # fmt: skip
    return torch.cat(counts)


def _histogram(
    digit: Tensor, weight: Tensor | None, counted: Tensor | None, position: Any
) -> Tensor:
    """How many entries, or how much of the weight, there are of each digit."""
    if counted is not None:
        counted_here = counted[position]
        digit, weight = digit[counted_here], None if weight is None else weight[counted_here]
    return torch.bincount(digit, weight, minlength=2**16)


def _flatten(tensors: Iterable[Tensor], size: int) -> Tensor:
    """End to end, holding one at a time."""
    flat, start = None, 0
    for tensor in tensors:
        if flat is None:
            flat = tensor.new_empty(size)
        flat[start : start + tensor.numel()] = tensor.flatten()
        start += tensor.numel()
    assert flat is not None
    return flat
