"""The global form of optimal shapes: expectations over other real data, and whether they help.

    Σ_ii = λ √(E s_i² / E g_i²)                                    (Theorem 3.5)

Its leakage times its cost, (E Tr J_F)(-E U₂), is measured on public batches that the shape was not
made of. Where that of uniform noise is no larger, noise is uniform.

Reference: Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding, default_data_collator
from transformers.utils import logging

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import IMAGE, domains_in
from ..gradient_map.sensitivity import probe_squares
from ..randomness import Stream
from .base import first_not_finite

logger = logging.get_logger(__name__)

ROWS_OF_A_BATCH = 8
"""Of rows that are collated here."""


class PublicData(list[Any]):
    """The public batches as a collator returns them, or rows of a data set.

    Rows are collated when the tokenizer is known. All clients of a process share them.

    Args:
        entries: The batches or rows.

    Raises:
        ValueError: If there are fewer than two: a shape is made of one and tried on another.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self.batches: list[dict[str, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> PublicData:
        return self

    def prepare(self, processing_class: Any) -> None:
        """Collate the rows in batches of eight, and keep batches as they are.

        Args:
            processing_class: The tokenizer that pads token ids, or `None`.

        Raises:
            ValueError: If there are fewer than two batches.
        """
        if self.batches:
            return
        entries = [dict(entry) for entry in self]
        # Plain modules may take neither: those have batches of their own making.
        domains = domains_in(entries[0]) if entries else []
        main_input = entries[0][domains[0].key] if domains else None
        if domains and (not isinstance(main_input, Tensor) or main_input.dim() < domains[0].dims):
            has_padding = hasattr(processing_class, "pad") and domains[0] is not IMAGE
            collate: Any = (
                DataCollatorWithPadding(processing_class) if has_padding else default_data_collator
            )
            starts = range(0, len(entries), ROWS_OF_A_BATCH)
            self.batches = [collate(entries[start : start + ROWS_OF_A_BATCH]) for start in starts]
        else:
            self.batches = entries
        if len(self.batches) < 2:
            raise ValueError(
                "public_data must hold two batches at least: a shape is made of some, and tried on "
                f"others; it holds {len(self.batches)}."
            )

    def map_of(self, gmap: GradientMap, place: int) -> GradientMap:
        """Return a client's map at a public batch, on its device."""
        device = gmap.input.device
        batch = self.batches[place % len(self.batches)]
        moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in batch.items()}
        return gmap.undefended.of_batch(moved)

    def __repr__(self) -> str:
        return f"<{len(self.batches or self)} public {'batches' if self.batches else 'entries'}>"


@dataclass(frozen=True, eq=False)
class ShapeProduct:
    """The product (E Tr J_F)(-E U₂) of a shape and of uniform noise.

    It is taken over batches that the shape was not made of.

    Args:
        sums: The leakage and cost of the shape, and of uniform noise, `(4,)` in float64.

    Example:
        >>> ones = {"weight": torch.ones(2)}
        >>> squares = {"weight": torch.tensor([4.0, 1.0])}
        >>> ShapeProduct().with_batch(squares, ones, ones).over_uniform  # uniform noise itself
        1.0
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def with_batch(
        self, squares: Tensors, gradient: Tensors, shape: Mapping[str, Tensor]
    ) -> ShapeProduct:
        """Return the products with one more batch.

        Args:
            squares: The squared sensitivities s², up to a factor that all batches have in common.
            gradient: The gradient g.
            shape: The variances of the noise, up to a common factor, positive.
        """
        sums = self.sums
        for name, g in gradient.items():
            square, power = squares[name].double(), g.double().square()
            variance = shape[name].double()
            sums = sums + torch.stack(
                [
                    (square / variance).sum(), (power * variance).sum(),
                    square.sum(), power.sum(),
                ]
            ).cpu()  # fmt: skip
        return ShapeProduct(sums)

    @property
    def over_uniform(self) -> float:
        """The shape's product over that of uniform noise; 1 before the first batch."""
        leakage, cost, uniform_leakage, uniform_cost = self.sums.tolist()
        uniform = uniform_leakage * uniform_cost
        return leakage * cost / uniform if uniform else 1.0

    def says_uniform(self, name: str) -> bool:
        """Return whether uniform noise does as well, which is logged once."""
        is_no_better = self.over_uniform >= 1.0
        if is_no_better:
            logger.warning_once(
                f"{name} adds uniform noise: on public_data its shape has "
                f"{self.over_uniform:.2f} times the leakage times cost of uniform noise."
            )
        return is_no_better


def learn_public_data(
    defense: Any,
    averages: Any,
    product: ShapeProduct,
    gmap: GradientMap,
    generator: Stream,
    place: int,
) -> tuple[Any, ShapeProduct]:
    """Return averages and products with public batches.

    At first all batches are used, and half of them try the shape as well. Later one is used at a
    time, which the shape is tried on before it is learned.

    Args:
        defense: A `SensitivityDefense`, with its `public_data`, probes, granularity and floor.
        averages: The defense's averages of s² and g².
        product: What the shape's trials add up to.
        gmap: The client's map, whose model and loss are used.
        generator: The source of the probes.
        place: The number of the batch that is due after the first time.

    Raises:
        FloatingPointError: If the loss has no finite second derivative on a public batch.
    """
    data: PublicData = defense.public_data
    data.prepare(None)
    count, is_first = len(data.batches), not averages
    for index in range(count) if is_first else [place]:
        batch_map = data.map_of(gmap, index)
        squares = {name: torch.zeros_like(g) for name, g in batch_map.gradient().items()}
        for name, estimate in probe_squares(batch_map, defense.num_probes or 1, generator):
            squares[name].add_(estimate)
        if broken := first_not_finite(squares, None):
            raise FloatingPointError(
                f"The sensitivity of {broken} is not finite on public_data: the loss has no second "
                "derivative there."
            )
        gradient, squares = defense.learned(batch_map.gradient(), squares)
        if not is_first or index >= count // 2:
            ratio = averages.ratio(defense.granularity == "layer")
            floor = getattr(defense, "floor", None) or 0.0
            mean = (ratio.total or 0.0) / max(sum(g.numel() for g in gradient.values()), 1)
            shape = {name: (1 - floor) * ratio[name] + floor * mean for name in gradient}
            product = product.with_batch(squares, gradient, shape)
        # Of the first round the plain mean; then what is old fades.
        decay = 1.0 if is_first else 1 - 1 / count
        averages = averages.with_batch(squares.items(), gradient, decay=decay)
    return averages, product
