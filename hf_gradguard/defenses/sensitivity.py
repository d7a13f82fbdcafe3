"""Defenses that weigh parameters by sensitivity, and averages of s and |g| over batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import special_ids
from ..gradient_map.layers import Pass
from ..gradient_map.local_training.batches import first_rows
from ..gradient_map.marginals import Sums, heard, own_pass, power_sums, probe_sums, sums_of
from ..gradient_map.random_batch import random_batch
from ..gradient_map.sensitivity import TOLERANCE, plan_of, probe_squares
from ..gradient_map.types import Shards
from ..randomness import Stream
from .base import (
    Defense,
    DefenseFacts,
    OnDemand,
    Reader,
    add_up,
    check_whole,
    first_not_finite,
    of_whole,
    total,
)
from .public_data import PublicData, ShapeProduct, learn_public_data

DECAY = 0.7
"""What an average keeps at every step: about the last three batches count."""
PRIOR = 1e-3
"""How much of all parameters' mean is added to each one's, so that none that happened to be still
takes all the noise, or none.
"""

_KINDS = ("squares", "powers")


@dataclass(frozen=True, eq=False)
class Averages:
    """The exponential averages of s² and g² over batches.

    A matrix is kept as its row and column sums r and c, and read as r cᵀ/Σr. The s² of a layer's
    weight is very nearly of that form, and the errors of its probes average out over a row.

    Args:
        sums: Each parameter's sums, `{"squares": ..., "powers": ...}`, of s² and g².
        shapes: The shapes of the parameters.

    Example:
        >>> ones = {"weight": torch.ones(2, 3)}
        >>> averages = Averages().with_batch(ones.items(), ones)
        >>> averages.ratio()["weight"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    sums: Mapping[str, Mapping[str, Sums]] = field(default_factory=lambda: {k: {} for k in _KINDS})
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def knows(self, names: Iterable[str]) -> bool:
        """Return whether it is of these parameters and no others."""
        return set(self.shapes) == set(names)

    def with_batch(
        self,
        squares: Iterable[tuple[str, Tensor | Sums]],
        gradient: Tensors,
        powers: Iterable[tuple[str, Sums]] | None = None,
        shards: Shards | None = None,
        decay: float | None = None,
    ) -> Averages:
        """Return the averages with one more batch.

        Args:
            squares: Pairs of a parameter's name and its estimate of s_i², or the sums of one; those
                of several probes come after each other.
            gradient: The gradient g.
            powers: The sums of an estimate of E g_i². Default: those of g_i².
            shards: The map's shards.
            decay: The fraction that earlier batches keep, where batches weigh as much as they are
                large. By default they count alike, and keep `DECAY`.
        """
        former_sums = self.sums if self.knows(gradient) else Averages().sums
        batch_sums: dict[str, dict[str, Sums]] = {kind: {} for kind in _KINDS}
        for name, estimate in squares:
            marginals = estimate if isinstance(estimate, tuple) else sums_of(estimate)
            marginals = marginals if shards is None else shards.sums(name, marginals)
            batch_sums["squares"][name] = add_sums(batch_sums["squares"].get(name), marginals)
        for name, marginals in power_sums(gradient) if powers is None else powers:
            batch_sums["powers"][name] = (
                marginals if shards is None else shards.sums(name, marginals)
            )
        averaged_sums: dict[str, dict[str, Sums]] = {}
        for kind, sums in batch_sums.items():
            averaged_sums[kind] = dict(former_sums[kind])
            size = 1.0 if decay is not None else sum_of(sums, shards) or 1.0
            kept = DECAY if decay is None else decay
            for name, marginals in sums.items():
                previous = former_sums[kind].get(name)
                averaged = tuple(marginal / size for marginal in marginals)
                if previous is not None:
                    averaged = tuple(
                        new + kept * old for new, old in zip(averaged, previous, strict=True)
                    )
                averaged_sums[kind][name] = averaged
        return Averages(averaged_sums, {name: tensor.shape for name, tensor in gradient.items()})

    def ratio(
        self,
        by_tensor: bool = False,
        waiting: Mapping[str, Tensor] | None = None,
        shards: Shards | None = None,
    ) -> OnDemand:
        """Return √(s²/g²) of the present averages in the parameters' shapes, up to a factor.

        It is computed when it is asked for.

        Args:
            by_tensor: Whether there is one ratio a tensor, of its sums.
            waiting: What is added to g², whose sum over all parameters counts as 1.
            shards: The map's shards.
        """
        if waiting is not None:
            return self._ratio(by_tensor, waiting, shards)
        ratios: dict[bool, OnDemand] = self._ratios
        if by_tensor not in ratios:
            ratios[by_tensor] = self._ratio(by_tensor, None, shards)
        return ratios[by_tensor]

    @cached_property
    def _ratios(self) -> dict[bool, OnDemand]:
        """The ratios that were computed before, by whether they are per tensor."""
        return {}

    def _ratio(
        self, by_tensor: bool, waiting: Mapping[str, Tensor] | None, shards: Shards | None
    ) -> OnDemand:
        squares, powers = (self._lifted(kind, by_tensor, shards) for kind in _KINDS)
        shapes, unit = dict(self.shapes), sum_of(self.sums["powers"], shards)
        if waiting is not None:

            def with_waiting(name: str) -> Tensor:
                square, power = (from_sums(kind[name], shapes[name]) for kind in (squares, powers))
                waiting_power = waiting[name].to(power)
                power = power + unit * (waiting_power.mean() if by_tensor else waiting_power)
                return square.div(power).sqrt_()

            return OnDemand(shapes, with_waiting)
        # The root of a quotient of products is one of roots of quotients.
        roots = {
            name: tuple(
                square.div(power).sqrt_()
                for square, power in zip(square_sums, powers[name], strict=True)
            )
            for name, square_sums in squares.items()
        }
        root_sums = {name: sum_from_sums(roots[name], shapes[name]) for name in sorted(roots)}
        return OnDemand(
            shapes,
            lambda name: from_sums(roots[name], shapes[name]),
            float(add_up(root_sums, shards)),
        )

    def _lifted(self, kind: str, by_tensor: bool, shards: Shards | None) -> dict[str, Sums]:
        """Return the averages with a fraction of their mean added to every entry.

        The averages of matrices are factors of a product, rows and columns.
        """
        # The prior is relative to the mean over all parameters, on all shards.
        sizes = {name: torch.tensor(math.prod(shape)) for name, shape in self.shapes.items()}
        sizes_of_whole, sums = of_whole(sizes, shards), self.sums[kind]
        prior = PRIOR * sum_of(sums, shards) / float(add_up(sizes, shards)) or 1.0
        lifted: dict[str, Sums] = {}
        for name, marginals in sums.items():
            size = int(sizes_of_whole[name])
            if by_tensor:
                lifted[name] = (marginals[-1].sum() / size + prior,)
            elif len(marginals) == 1:
                lifted[name] = (marginals[0] + prior,)
            else:
                rows, columns = (
                    marginals[0],
                    marginals[1] + prior * max(size // len(marginals[1]), 1),
                )
                lifted[name] = ((rows + prior * len(columns)) / columns.sum(), columns)
        return lifted

    def tensors(self) -> Tensors:
        """Return O(rows + columns) numbers, for a checkpoint.

        They are private if the batches were.
        """
        return {
            f"{kind}.{place}.{name}": tensor
            for kind, sums in self.sums.items()
            for name, marginals in sums.items()
            for place, tensor in enumerate(marginals)
        } | {
            f"shape.{name}": torch.tensor(list(shape), dtype=torch.int64)
            for name, shape in self.shapes.items()
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Averages | None:
        """Read averages from a checkpoint's tensors, if they hold any.

        Raises:
            ValueError: If some of them are missing.
        """
        sums: dict[str, dict[str, Sums]] = {kind: {} for kind in _KINDS}
        shapes: dict[str, torch.Size] = {}
        for key in sorted(tensors):
            kind, _, name_and_place = key.partition(".")
            if kind == "shape":
                shapes[name_and_place] = torch.Size(tensors.pop(key).tolist())
            elif kind in _KINDS:
                name = name_and_place.partition(".")[2]
                sums[kind][name] = (*sums[kind].get(name, ()), tensors.pop(key))
        if any(of_kind.keys() != shapes.keys() for of_kind in sums.values()):
            raise ValueError("These are not the sums and shapes of running averages.")
        return cls(sums, shapes) if shapes else None


@dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of a client's earlier messages.

    Args:
        averages: The averages of s² and g².
        messages: The number of messages since averages began.
        product: The comparison of the shape with uniform noise, on `public_data`.
    """

    averages: Averages = Averages()
    messages: int = 0
    product: ShapeProduct | None = None

    def tensors(self) -> Tensors:
        """Return all measurements, for a checkpoint; nothing before the first batch."""
        if not self.averages:
            return {}
        state = {} if self.product is None else {"public_product": self.product.sums}
        return state | {"calls": torch.tensor(self.messages)} | self.averages.tensors()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Measured | None:
        """Read the measurements from a checkpoint's tensors, if they hold any.

        Raises:
            ValueError: If a part of them is missing.
        """
        messages = int(tensors.pop("calls", torch.tensor(0)))
        sums = tensors.pop("public_product", None)
        product = None if sums is None else ShapeProduct(sums)
        averages = Averages.from_tensors(tensors)
        return None if averages is None else cls(averages, messages, product)


def add_sums(sums: Sums | None, added: Sums) -> Sums:
    """Return sums with what is added to them."""
    return added if sums is None else tuple(a + b for a, b in zip(sums, added, strict=True))


def from_sums(factors: Sums, shape: torch.Size) -> Tensor:
    """Return a tensor in a parameter's shape, made from its sums.

    They are of rows and columns, of all entries, or one number for all.
    """
    if len(factors) == 2:
        return torch.outer(*factors).view(shape)
    return factors[0].expand(shape) if factors[0].dim() < len(shape) else factors[0].clone()


def sum_from_sums(factors: Sums, shape: torch.Size) -> Tensor:
    """Return the sum of the entries that `from_sums` would make."""
    sums = [factor.sum().double() for factor in factors]
    if len(factors) == 2:
        return sums[0] * sums[1]
    return sums[0] * math.prod(shape) if factors[0].dim() < len(shape) else sums[0]


def sum_of(sums: Mapping[str, Sums], shards: Shards | None) -> float:
    # In one order, whichever a loaded state has, so that a run that goes on has the same bits.
    return float(add_up({name: sums[name][0].sum().double() for name in sorted(sums)}, shards))


Granularity = Literal["parameter", "layer"]
ShapedBy = Literal["public", "past", "own"]

OWN_PROBES, LEAST_PROBES = 10, 3
SHARDED_PROBES = 4
"""Where nothing tells samples apart, a probe gives one square, and not one of each sample."""
MEASURED_SAMPLES = 8
"""Samples of a random batch, at the most: more of them make better averages, and cost more."""
FIRST_BATCHES = 4
"""Random batches that averages begin with: of one alone they err by a half."""
REFRESH_EVERY = 10
"""Messages from one that averages are fed at to the next, unless set."""
SMALLEST_GRADIENT = 1e-8
PUBLISHED_SMALLEST = 1e-6
"""c of the paper's experiments."""
LARGEST_RATIO = 1e6
_PUBLIC_DATA = "with public_data it takes products over whole gradients. Leave public_data out."
_BY_TENSOR = "with granularity='layer' it takes norms of whole tensors. Leave granularity out."


@dataclass
class SensitivityDefense(Defense):
    """A base of defenses that weigh every parameter by s_i/|g_i|, with sensitivity s_i = ‖∂g_i/∂x‖.

    Args:
        shape: Where s and |g| are from. `"public"`: random inputs, so that the weights say nothing
            of any client's data. `"past"`: averages over the client's earlier batches; the first
            message has none, and weighs all the same. `"own"`: this very batch, as published. The
            weights are then a function of the input, and can be read off what is shared.
        num_probes: The number of random directions to estimate s² from. Default: 1, for a sharded
            model 4. With `"own"` 10, or where samples are separated so many that there are ten
            squares of samples, but 3 at least.
        granularity: `"parameter"`, or `"layer"`: one s and one |g| a tensor, their norms over it.
        refresh_every: The interval of measured messages; averages weigh in between. Default: 10;
            `"own"` measures every message.
        public_data: With `"public"`: other real data in place of random inputs, two batches at
            least, as a collator returns them, or rows of a data set: expectations are over these.
            All are measured at the first message, and then one when it is due. Noise is uniform
            where that does as well on the half of them that the shape is not made of at first.

    Raises:
        ValueError: If a value is out of range, or `refresh_every` is given with `"own"`.

    Example:
        >>> defense = make_defense("optimal_noise", shape="past", refresh_every=5)
        >>> defense(gmap).keys() == gmap.gradient().keys()
        True
    """

    smallest_gradient: ClassVar[float] = SMALLEST_GRADIENT
    shape: ShapedBy = "public"
    num_probes: int | None = None
    granularity: Granularity = "parameter"
    refresh_every: int | None = None
    _: KW_ONLY
    public_data: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.public_data is not None:
            if self.shape != "public":
                raise ValueError(f"public_data is of shape='public', and shape is {self.shape!r}.")
            if not isinstance(self.public_data, PublicData):
                self.public_data = PublicData(self.public_data)
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
        self._special: list[int] = []

    @property
    def _measured(self) -> Measured:
        return self.state.get("measured") or Measured()

    def state_readers(self) -> dict[str, Reader]:
        return {**super().state_readers(), "measured": Measured.from_tensors}

    @property
    def facts(self) -> DefenseFacts:
        refusal = _BY_TENSOR if self.granularity == "layer" else None
        refusal = _PUBLIC_DATA if self.public_data is not None else refusal
        return replace(
            super().facts,
            needs_input=self._measures,
            reruns_model=self._measures or super().facts.reruns_model,
            post_processes=self.shape == "public",
            sharded_refusal=refusal,
        )

    @property
    def _measures(self) -> bool:
        """Whether the next message measures sensitivities, and not only weighs by averages."""
        is_due = self._measured.messages % (self.refresh_every or REFRESH_EVERY) == 0
        return self.shape == "own" or is_due or not self._measured.averages

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        self._special = special_ids(model, processing_class)
        if self.public_data is not None:
            self.public_data.prepare(processing_class)

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.public_data is not None:
            settings["public_data"] = repr(self.public_data)
        return settings

    def averaged_ratio(
        self, gmap: GradientMap, generator: Stream, waiting: Tensors | None = None
    ) -> OnDemand | None:
        """Return √(s²/g²) of public or past batches, up to a common factor.

        It is not a function of this batch.

        Args:
            gmap: The client's map.
            generator: The source of probes and random inputs.
            waiting: What is added to g², as for `Averages.ratio`.

        Returns:
            One positive tensor a shared parameter; `None` if there is no earlier batch.
        """
        undefended = gmap.undefended
        if not self._measured.averages.knows(undefended.parameters):
            if self._measured.averages:  # of another model, or some unfrozen
                undefended = undefended.with_input()  # the map may be one to weigh
            self.remember(measured=Measured())
        measured, is_due = self._measured, self._measures
        averages = measured.averages
        if self.public_data is not None and is_due:
            place = measured.messages // (self.refresh_every or REFRESH_EVERY)
            product = measured.product or ShapeProduct()
            averages, product = learn_public_data(
                self, averages, product, undefended, generator, place
            )
            measured = replace(measured, product=product)
        elif self.shape == "public" and is_due:
            example = (
                first_rows(undefended.batch, MEASURED_SAMPLES)
                if undefended.any_rows
                else undefended.batch
            )
            for _ in range(1 if averages else FIRST_BATCHES):
                batch = random_batch(
                    undefended.domain, undefended.model, example, generator, self._special
                )
                averages = self._with_map(averages, *heard(undefended, batch), generator)
        by_tensor = self.granularity == "layer"
        ratio = averages.ratio(by_tensor, waiting, gmap.shards) if averages else None
        # After the ratio was taken: this batch shapes later messages, and not its own.
        if self.shape == "past" and is_due:
            averages = self._with_map(averages, undefended, None, generator)
        measured = replace(measured, averages=averages, messages=measured.messages + 1)
        self.remember(measured=measured)
        return ratio

    def known_ratio(self, names: Iterable[str]) -> OnDemand | None:
        """Return the ratio that is known already, where there is no batch to learn from."""
        averages = self._measured.averages
        return averages.ratio(self.granularity == "layer") if averages.knows(names) else None

    def own_sensitivity(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> tuple[Tensors, Tensors]:
        """Return s_i and |g_i| of this very batch.

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
        """Return the g and s² that the averages are taken over.

        They belong to the message before its noise.
        """
        return gradient, squares

    def learns_all(self, gradient: Tensors, shards: Shards | None) -> bool:
        """Return whether `learned` returns g and s² unchanged."""
        return True

    def at_granularity(self, tensors: Tensors) -> Tensors:
        """Return magnitudes entry by entry, or each tensor's norm in all its entries.

        The second is for granularity "layer".
        """
        if self.granularity == "layer":
            return {name: tensor.norm().expand_as(tensor) for name, tensor in tensors.items()}
        return {name: tensor.abs() for name, tensor in tensors.items()}

    def _with_map(
        self, averages: Averages, gmap: GradientMap, start: Pass | None, generator: Stream
    ) -> Averages:
        """Return averages with the measurement of a map added."""
        gradient = gmap.gradient()
        shards = gmap.shards
        probes = self.num_probes or (1 if shards is None else SHARDED_PROBES)
        squares: dict[str, Sums] = {}
        powers: Iterator[tuple[str, Sums]] | None = None
        start = start or own_pass(gmap)
        if self.learns_all(gradient, shards):
            for name, sums in probe_sums(gmap, probes, generator, start):
                squares[name] = add_sums(squares.get(name), sums)
            powers = power_sums(gradient, len(gmap.input), start)
        else:
            # What is clipped is clipped entry by entry, so sums of rows and columns do not do.
            dense = {name: torch.zeros_like(g) for name, g in gradient.items()}
            for name, squares_of_probe in probe_squares(gmap, probes, generator, start=start):
                dense[name].add_(squares_of_probe)
            gradient, dense = self.learned(gradient, dense)
            squares = {name: sums_of(tensor) for name, tensor in dense.items()}
        estimates = {
            name: torch.cat([marginal.flatten() for marginal in sums])
            for name, sums in squares.items()
        }
        _check_squares(estimates, shards)
        return averages.with_batch(squares.items(), gradient, powers, shards)


def _own_probes(gmap: GradientMap) -> int:
    """Of one batch, whose estimates are averaged over nothing else."""
    plan, samples = plan_of(gmap.undefended), len(gmap.input)
    is_split = plan.error <= TOLERANCE and bool(plan.split_layers)
    return max(LEAST_PROBES, -(-OWN_PROBES // samples)) if is_split else OWN_PROBES


def _check_squares(squares: Tensors, shards: Shards | None) -> None:
    if name := first_not_finite(squares, shards):
        raise FloatingPointError(
            f"The sensitivity of {name} is not finite: the loss has no second derivative there."
        )


def sensitivity_ratio(
    sensitivity: Tensors, magnitude: Tensors, smallest: float = SMALLEST_GRADIENT
) -> Tensors:
    """Return s_i/|g_i| with |g_i| at least `smallest`: no vanishing g_i takes all the noise."""
    return {name: s / magnitude[name].clamp(min=smallest) for name, s in sensitivity.items()}


def capped(ratio: Tensors) -> Tensors:
    return {name: r.clamp(max=LARGEST_RATIO) for name, r in ratio.items()}
