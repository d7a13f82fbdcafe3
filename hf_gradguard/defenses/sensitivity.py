"""What defenses that weigh parameters by sensitivity share: where s and |g| come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.layers import Pass
from ..gradient_map.local_training.batches import first_rows
from ..gradient_map.marginals import Sums, heard, own_pass, power_sums, probe_sums, sums_of
from ..gradient_map.random_batch import random_batch, special_ids
from ..gradient_map.sensitivity import TOLERANCE, plan_of, probe_squares
from ..randomness import Stream
from .averages import PARTS, Averages, added
from .base import Defense, DefenseFacts, check_whole
from .message import OnDemand, first_not_finite, total

if TYPE_CHECKING:
    from ..sharded.shards import Shards

Granularity = Literal["parameter", "layer"]
ShapedBy = Literal["public", "past", "own"]

OWN_PROBES, LEAST_PROBES = 10, 3
SHARDED_PROBES = 4
"""Where nothing tells samples apart, a probe gives one square, and not one of each sample."""
MEASURED = 8
"""Samples of a random batch, at the most: more of them make better averages, and cost more."""
FIRST = 4
"""Random batches that averages begin with: of one alone they err by a half."""
REFRESH_EVERY = 10
"""Messages from one that averages are fed at to the next, unless set."""
SMALLEST_GRADIENT = 1e-8
LARGEST_RATIO = 1e6
_BY_TENSOR = "with granularity='layer' it takes norms of whole tensors. Leave granularity out."


@dataclass
class SensitivityDefense(Defense):
    """A defense that weighs every parameter by s_i/|g_i|, with the sensitivity s_i = ‖∂g_i/∂x‖.

    Args:
        shape: Where s and |g| are from. `"public"`: random inputs, so that the weights say nothing
            of any client's data. `"past"`: averages over the client's earlier batches; the first
            message has none, and weighs all alike. `"own"`: this very batch, as published. The
            weights are then a function of the input, and can be read off what is shared.
        num_probes: Random directions to estimate s² from. Default: 1, of a sharded model 4. With
            `"own"` 10, or where samples are known apart so many that there are ten squares of
            samples, but 3 at least.
        granularity: `"parameter"`, or `"layer"`: one s and one |g| a tensor, their norms over it.
        refresh_every: Measure at every n-th message, and weigh by averages in between. Default: 10;
            `"own"` measures every message.

    Raises:
        ValueError: For a value out of range, or `refresh_every` with `"own"`.

    Example:
        >>> defense = make_defense("optimal_noise", shape="past", refresh_every=5)
        >>> defense(gmap).keys() == gmap.gradient().keys()
        True
    """

    shape: ShapedBy = "public"
    num_probes: int | None = None
    granularity: Granularity = "parameter"
    refresh_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_probes", "refresh_every"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name, choices in (("granularity", Granularity), ("shape", ShapedBy)):
            if getattr(self, name) not in get_args(choices):
                words = " or ".join(repr(choice) for choice in get_args(choices))
                raise ValueError(f"{name} must be {words}, but is {getattr(self, name)!r}.")
        if self.shape == "own" and self.refresh_every not in (None, 1):
            raise ValueError(
                "shape='own' measures every message: leave refresh_every out. What is measured "
                "now and then is an average: shape='public' or 'past'."
            )
        self._averages, self._calls = Averages(), 0
        self._special: list[int] = []

    @property
    def facts(self) -> DefenseFacts:
        refusal = _BY_TENSOR if self.granularity == "layer" else None
        return replace(
            super().facts,
            needs_input=True,
            post_processes=self.shape == "public",
            sharded_refusal=refusal,
        )

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        self._special = special_ids(model, processing_class)

    def averaged_ratio(
        self, gmap: GradientMap, generator: Stream, waiting: Tensors | None = None
    ) -> OnDemand | None:
        """√(s²/g²) of public or past batches, up to a common factor: not a function of this one.

        Args:
            gmap: The client's map.
            generator: Of probes and random inputs.
            waiting: As for `Averages.ratio`.

        Returns:
            One positive tensor a shared parameter; `None` if there is no earlier batch.
        """
        plain = gmap.undefended
        if not self._averages.knows(plain.parameters):
            self._averages, self._calls = Averages(), 0
        due = not self._averages or self._calls % (self.refresh_every or REFRESH_EVERY) == 0
        if self.shape == "public" and due:
            like = first_rows(plain.batch, MEASURED) if plain.any_rows else plain.batch
            for _ in range(1 if self._averages else FIRST):
                made = random_batch(gmap.domain, gmap.model, like, generator, self._special)
                self._learn(*heard(plain, made), generator)
        by_tensor = self.granularity == "layer"
        ratio = self._averages.ratio(by_tensor, waiting, gmap.shards) if self._averages else None
        if self.shape == "past" and due:
            self._learn(plain, None, generator)
        self._calls += 1
        return ratio

    def known_ratio(self, names: Iterable[str]) -> OnDemand | None:
        """The same of what is known already, where there is no batch to learn from."""
        if not self._averages.knows(names):
            return None
        return self._averages.ratio(self.granularity == "layer")

    def own_sensitivity(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> tuple[Tensors, Tensors]:
        """s_i and |g_i| of this very batch.

        A coordinate that is not zero never counts as insensitive because its estimate underflowed.
        """
        squares = gmap.squared_sensitivity(self.num_probes or _own_probes(gmap), generator)
        _check_squares(squares, gmap.shards)
        squares = gmap.restrict(squares)
        if total(squares, gmap.shards):
            tiny = {name: torch.finfo(square.dtype).tiny for name, square in squares.items()}
            squares = {
                name: torch.where((square == 0) & (gradient[name] != 0), tiny[name], square)
                for name, square in squares.items()
            }
        gradient, squares = self.learned(gradient, squares)
        roots = {name: squares[name].sqrt() for name in gradient}
        return self.at_granularity(roots), self.at_granularity(gradient)

    def learned(self, gradient: Tensors, squares: Tensors) -> tuple[Tensors, Tensors]:
        """What averages are of: g and s² of what the defense shares before noise."""
        return gradient, squares

    def learns_all(self, gradient: Tensors, shards: Shards | None) -> bool:
        """Whether that is g and s² as they are."""
        return True

    def at_granularity(self, tensors: Tensors) -> Tensors:
        """Magnitudes entry by entry, or with granularity "layer" each tensor's norm in all its
        entries.
        """
        if self.granularity == "layer":
            return {name: tensor.norm().expand_as(tensor) for name, tensor in tensors.items()}
        return {name: tensor.abs() for name, tensor in tensors.items()}

    def state_dict(self) -> Tensors:
        state = super().state_dict()
        if not self._averages:
            return state
        return state | {"calls": torch.tensor(self._calls)} | self._averages.state_dict()

    def load_state_dict(self, state: Tensors) -> None:
        state = dict(state)
        self._calls = int(state.pop("calls", torch.tensor(0)))
        own = {key: state.pop(key) for key in list(state) if key.partition(".")[0] in PARTS}
        self._averages.load_state_dict(own)
        super().load_state_dict(state)

    def _learn(self, gmap: GradientMap, start: Pass | None, generator: Stream) -> None:
        gradient = gmap.gradient()
        shards = gmap.shards
        probes = self.num_probes or (1 if shards is None else SHARDED_PROBES)
        squares: dict[str, Sums] = {}
        powers: Iterator[tuple[str, Sums]] | None = None
        start = start or own_pass(gmap)
        if self.learns_all(gradient, shards):
            for name, sums in probe_sums(gmap, probes, generator, start):
                squares[name] = added(squares.get(name), sums)
            powers = power_sums(gradient, len(gmap.input), start)
        else:
            dense = {name: torch.zeros_like(g) for name, g in gradient.items()}
            for name, found in probe_squares(gmap, probes, generator, start=start):
                dense[name].add_(found)
            gradient, dense = self.learned(gradient, dense)
            squares = {name: sums_of(tensor) for name, tensor in dense.items()}
        flat = {n: torch.cat([s.flatten() for s in sums]) for n, sums in squares.items()}
        _check_squares(flat, shards)
        self._averages.add(squares.items(), gradient, powers, shards)


def _own_probes(gmap: GradientMap) -> int:
    """Of one batch, whose estimates are averaged over nothing else."""
    plan, samples = plan_of(gmap.undefended), len(gmap.input)
    apart = plan.error <= TOLERANCE and bool(plan.split_layers)
    return max(LEAST_PROBES, -(-OWN_PROBES // samples)) if apart else OWN_PROBES


def _check_squares(squares: Tensors, shards: Shards | None) -> None:
    if name := first_not_finite(squares, shards):
        raise FloatingPointError(
            f"The sensitivity of {name} is not finite: the loss has no second derivative there."
        )


def sensitivity_ratio(sensitivity: Tensors, magnitude: Tensors) -> Tensors:
    """s_i/|g_i| with |g_i| held above 1e-8, so that no vanishing g_i takes all the noise."""
    return {
        name: s / magnitude[name].clamp(min=SMALLEST_GRADIENT) for name, s in sensitivity.items()
    }


def capped(ratio: Tensors) -> Tensors:
    return {name: r.clamp(max=LARGEST_RATIO) for name, r in ratio.items()}
