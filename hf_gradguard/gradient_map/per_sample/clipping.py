"""The sum of samples' gradients, each clipped by itself: Σ_b min(1, C/‖g_b‖) g_b.

g_b is the gradient of sample b's own mean loss, so that what a sample adds depends on no other. Of
a batch-mean loss L = Σ_b n_b L_b / N (n_b = 1 for a mean over rows, or a row's tokens; N = Σ_b n_b)
the sum N L is differentiated, to which a sample adds n_b g_b. So no number that a sample's part is
made of follows how many others there are. A mean's slopes would: they carry 1/N, each is rounded,
and all would err together.

How a model's samples are told apart in one pass is found out by trial against single samples, on
its first batch of several. Half precision rounds every number to 8 or 11 bits. What a row adds to a
gradient then follows from how many rows stand beside it: kernels and the padding are chosen by the
size of a batch, and a change in the last bit of float32 is rounded up to one of 2⁻⁹. Rows that are
alike move together, so that one row more can move the sum of a thousand by several clipping bounds.
No clipping of rows bounds that. So rows are differentiated one by one there, each in a pass that no
other row has a part in.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from ..domain import count_rows, ends_of, is_of_targets
from ..inputs import NOT_FINITE
from ..layers import ROW_ROUNDING, Contribution, Listener, NotApartError, is_coarse, listen
from ..map import GradientMap
from ..parameters import SamplePlan, cache_of, code_of
from ..replay import differentiate, modes_kept
from ..types import Tensors

logger = logging.get_logger(__name__)

LEFT_OUT = (
    "A row's gradient is not finite, or too large for float32. It adds nothing to its message, as "
    "do all such rows from now on: a training that stopped would tell that the row is there. Only "
    "this process is told."
)


COARSE = (
    "{}: {}. A row's part of a sum would follow from how many rows stand beside it, which no "
    "clipping bounds, so each sample's gradient takes a pass of its own. Train in float32 for one "
    "pass per batch."
)
PARTED = "{}, which was found after messages had left (a refusal would tell that a row is there)"
READS_PADDING = (
    "gives a text another gradient where others of its batch are longer: it reads the padding, or "
    "counts positions from it, as with padding on the left. So one long text changes what all "
    "others add, and no clipping bounds that. Pad on the right (tokenizer.padding_side = 'right'), "
    "with an attention_mask, and labels with -100; or pass position_ids that count from the start "
    "of each text."
)
OTHER_LENGTHS = (
    "{name!r} has rows of {shape} in this batch and of {known_shape} in the first, and no "
    "attention_mask says what of them is padding. Where a row is filled up to the longest of its "
    "batch, that one changes what all others add, and no clipping bounds it. Pad all rows to one "
    "length (padding='max_length'), or pass an attention_mask, `(rows, length)`."
)
TRIED = 4
"""Samples of a batch on which a model is tried out."""
PADDED = 6
"""Different padded texts that must have the gradient that they have without padding."""
CLASSES = 64
"""Up to so many label values a loss is tried out on each beside others: it may weigh classes."""


class ClippedSum(NamedTuple):
    """Samples' clipped gradients, added up.

    Args:
        total: Σ_b min(1, C/‖g_b‖) g_b, by parameter, at least in float32. A sample whose gradient
            is not finite adds nothing, so that it stops no training, which would tell of it.
        norms: ‖g_b‖, `(B,)` in float64; never below the true one by more than rounding.
    """

    total: Tensors
    norms: Tensor


def clipped_sum(gmap: GradientMap, clip: float) -> ClippedSum:
    """Return the sum of the batch's gradients, each clipped to the norm C.

    Samples' norms come from one pass, by products of what layers took in and gave back, and the sum
    from the same products. If a model does not let samples be separated so, or computes in half
    precision, they are differentiated one by one, and a warning says so once. Which of both applies
    is tried out on a model's first batch of several samples, against gradients of single ones.

    Args:
        gmap: A client's own map; a first-order one is enough.
        clip: C > 0.

    Raises:
        NotImplementedError: If samples are coupled (batch statistics, losses between samples), so
            that a sample has no gradient of its own, or the batch cannot be cut into rows; also if
            rows have another length than those of the first batch, and no mask says what is
            padding.

    Example:
        >>> total, norms = clipped_sum(gmap, clip=0.1)
        >>> bool(torch.nn.utils.get_total_norm(list(total.values())) <= 0.1 * len(norms))
        True
    """
    _refuse_coupled_rows(gmap)
    batch, samples = gmap.batch, count_rows(gmap.batch)
    if (plan := known_plan(gmap)) is not None:
        refuse_other_lengths(plan.shapes, row_shapes(batch, real_tokens(gmap.model, batch)))
    if samples == 1 and not is_padded(gmap.model, batch):
        total = _zeros(gmap)
        return _summed(gmap, total, [_add_clipped(total, gmap.gradient(), clip)])
    if samples == 1:
        return _one_by_one(gmap, samples, clip)
    contributions, scale = None, 0.0
    if isinstance(gmap, SampleMap):
        # Before a model is tried out again, whose passes may write to what this pass has saved.
        contributions, scale = gmap.contributions, gmap.scale
    plan, items = plan_of(gmap, samples, clip)
    count = float(items.sum().clamp(min=1))
    if contributions is None and not plan.reason:
        scale = count
        with suppress(NotApartError), gmap.replay.run():
            contributions = listen(gmap, batch, samples, scale)
    # Without a reason, samples may still lie otherwise than when the model was tried out.
    if plan.reason or not contributions or contributions.keys() - plan.modules:
        return _one_by_one(gmap, samples, clip)
    # What a sample adds is n_b g_b, unless the rule was found out after the pass.
    inverse = torch.where(items > 0, count / scale / items, 0.0)
    inverse = inverse.to(next(iter(gmap.parameters.values())).device)
    norms = inverse * norms_of(contributions)
    is_usable = _usable(norms, clip)
    if not bool(is_usable.all()):
        logger.warning_once(LEFT_OUT)
        contributions = {n: entry.with_zeros(~is_usable) for n, entry in contributions.items()}
    factors = (inverse * _factors(norms, clip)).where(is_usable, 0.0)
    return ClippedSum(total_of(gmap.parameters, contributions, factors), norms)


def _refuse_coupled_rows(gmap: GradientMap) -> None:
    if gmap.replay.kind:
        raise NotImplementedError(
            "After several local steps a sample has no gradient of its own that could be clipped. "
            "Clip the update as a whole: dp_sgd without per_sample."
        )
    if type(gmap) not in (GradientMap, SampleMap) and gmap.undefended is gmap:
        raise NotImplementedError(
            f"{type(gmap).__name__}: only of a loss's gradient are there samples' gradients. Use "
            "dp_sgd without per_sample, whose clipping is of all that a client shares."
        )
    if gmap.undefended is not gmap:
        raise NotImplementedError(
            "Samples' gradients are clipped before anything else is done to them: put dp_sgd with "
            "per_sample=True first in a chain."
        )
    for name, module in gmap.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.training or module.running_mean is None
        ) and not isinstance(module, nn.modules.instancenorm._InstanceNorm):  # fmt: skip
            raise NotImplementedError(
                f"{name} normalizes with the statistics of the batch, so that every sample's "
                "gradient depends on all others. Use batch_statistics='frozen', or group or layer "
                "normalization."
            )


def _factors(norms: Tensor, clip: float) -> Tensor:
    """Gives min(1, C/‖g‖)."""
    return torch.where(norms > clip, clip / norms, torch.ones_like(norms))


def _usable(norms: Tensor, clip: float) -> Tensor:
    """Tells which samples add something: not those whose gradient is no number, or so large that
    float32 has few digits for the factor that clips it.
    """
    return norms * torch.finfo(torch.float32).tiny < clip  # false where it is no number


def _one_by_one(gmap: GradientMap, samples: int, clip: float) -> ClippedSum:
    """Clips each sample's gradient in a pass that is the same whatever stands beside it: of its own
    tokens, without the padding of the longest text.
    """
    total = _zeros(gmap)
    with gmap.replay.run():
        norms = [
            _add_clipped(total, _row_gradient(gmap, row, samples), clip) for row in range(samples)
        ]
    return _summed(gmap, total, norms)


def _row_gradient(gmap: GradientMap, row: int, samples: int) -> Tensors:
    return plain_gradient(gmap, shorter(gmap.model, rows_of(gmap.batch, [row], samples)))


def _zeros(gmap: GradientMap) -> Tensors:
    return {
        name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
        for name, p in gmap.parameters.items()
    }


def _summed(gmap: GradientMap, total: Tensors, norms: list[Tensor]) -> ClippedSum:
    types = {n: torch.promote_types(p.dtype, torch.float32) for n, p in gmap.parameters.items()}
    return ClippedSum({n: tensor.to(types[n]) for n, tensor in total.items()}, torch.stack(norms))


def _add_clipped(total: Tensors, gradient: Tensors, clip: float) -> Tensor:
    """Adds one sample's clipped gradient to a sum in float64, in which the order does not matter.
    Returns its norm before.
    """
    squares = [tensor.double().square().sum() for tensor in gradient.values()]
    size = torch.stack(squares).sum().sqrt()
    if not bool(_usable(size, clip)):
        logger.warning_once(LEFT_OUT)
        return size
    factor = _factors(size, clip)
    for name, tensor in gradient.items():
        total[name] += tensor.double() * factor
    return size


class SampleMap(GradientMap):
    """A first-order map for `clipped_sum`, which then takes no pass of its own.

    Its gradient is the sum of what samples add: that of a `GradientMap`, to rounding. Where a model
    does not let samples be told apart, and on its first batch, where that has to be tried out, it
    is a `GradientMap` like any other.

    Example:
        >>> from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
        >>> _ = clipped_sum(GradientMap(model, batch), clip=0.1)  # tries the model out
        >>> seen = SampleMap(model, batch, second_order=False, needs_input=False)
        >>> seen.contributions is not None
        True
    """

    scale: float = 1.0
    """What the loss was multiplied by before it was differentiated: how many rows or tokens its
    mean is over, so that slopes are those of the sum.
    """
    _listener: Listener | None = None
    _modules = frozenset[str]()  # that ran when the model was tried out
    _gradient_versions: dict[str, int] | None = None

    @cached_property
    def contributions(self) -> Mapping[str, Contribution] | None:
        """Return what samples add, by module; `None` if this pass does not tell.

        A module may not have run when the model was tried out, or samples may have lain in it
        otherwise then.
        """
        if self._listener is None:
            return None
        try:
            with self.replay.kernels():
                contributions = self._listener.contributions(self._loss, self.scale)
        except NotApartError:
            return None
        # There are none where all layers were dropped.
        return contributions if contributions and contributions.keys() <= self._modules else None

    def versions(self) -> dict[str, int]:
        """Return counts as `GradientMap` does, without asking for the gradient.

        Of the gradient, writes since it was made are counted.
        """
        versions = super().versions()
        if self._listener is not None:
            gradient, fresh_versions = self._gradient or {}, self._gradient_versions or {}
            for name in self.parameters:
                writes = gradient[name]._version - fresh_versions[name] if gradient else 0
                versions[f"the true gradient of {name!r}"] = writes
        return versions

    def form(self) -> Tensors:
        """Return the parameters: clipping needs no pass for the sum of samples' gradients."""
        return super().form() if self._listener is None else {**self.parameters}

    def _own_gradient(self) -> Tensors:
        if self._listener is None:
            return super()._own_gradient()
        if self.contributions is None:
            with self.replay.run():
                gradient = plain_gradient(self, self.batch)
        else:
            factors = torch.full((count_rows(self.batch),), 1 / self.scale)
            gradient = total_of(self.parameters, self.contributions, factors.to(self._loss.device))
        gradient = {name: gradient[name].to(p.dtype) for name, p in self.parameters.items()}
        self._gradient_versions = {name: g._version for name, g in gradient.items()}
        return gradient

    def _first_pass(self) -> tuple[Tensor, Tensor]:
        plan, samples = known_plan(self), count_rows(self.batch)
        if plan is None or plan.reason or samples == 1 or self.replay.recomputes():
            return super()._first_pass()
        self._listener = Listener(self.model, self.parameters, self.batch, samples, is_exact=True)
        items = sample_items(plan.rules[0], self.batch)
        self.scale, self._modules = float(items.sum().clamp(min=1)), plan.modules
        try:
            with self._listener.listening():
                return super()._first_pass()
        except NotApartError:  # a module is called otherwise than when it was tried out
            self._listener = None
            return super()._first_pass()


def norms_of(contributions: Mapping[str, Contribution]) -> Tensor:
    return torch.stack([entry.squared_norms() for entry in contributions.values()]).sum(0).sqrt()


def total_of(
    parameters: Mapping[str, Tensor], contributions: Mapping[str, Contribution], factors: Tensor
) -> Tensors:
    """Return Σ_b factor_b · (what b adds): zeros for parameters that no sample adds to."""
    totals: Tensors = {}
    for contribution in contributions.values():
        for name, tensor in contribution.weighted_sum(factors).items():
            totals[name] = tensor
    for name, parameter in parameters.items():
        if name not in totals:
            totals[name] = wide(torch.zeros_like(parameter, requires_grad=False))
    return {name: totals[name] for name in parameters}


def plain_gradient(gmap: GradientMap, batch: Mapping[str, Any]) -> Tensors:
    """Return the gradient of a batch's mean loss; zeros if nothing in it counts."""
    if not bool(count_items(batch, False).any()):
        return {n: wide(torch.zeros_like(p)) for n, p in gmap.parameters.items()}
    loss = gmap.loss_fn(gmap.model, dict(batch))
    gradient = differentiate(loss, gmap.parameters)
    return {name: wide(tensor) for name, tensor in gradient.items()}


def known_plan(gmap: GradientMap) -> SamplePlan | None:
    """Return what was found out of a model on batches of this kind."""
    key = _key(gmap)
    return cache_of(gmap.model).sample_plans.get(key)


def _key(gmap: GradientMap) -> Hashable:
    return tuple(gmap.parameters), code_of(gmap.loss_fn), tuple(sorted(gmap.batch))


def plan_of(gmap: GradientMap, samples: int, clip: float) -> tuple[SamplePlan, Tensor]:
    """Return the plan, and how much each of this batch's samples counts, as `sample_items` says.

    Raises:
        FloatingPointError: If no row has a finite gradient, before a message left.
    """
    known = plan = known_plan(gmap)
    is_underway = plan is not None or cache_of(gmap.model).is_underway
    coarse = coarse_arithmetic(gmap) if plan is None else plan.coarse
    if plan is None:
        plan = _try_out_or_part(gmap, samples, clip, coarse, WEIGHT_RULES, (), is_underway)
        if plan is None and is_underway:  # nothing is known of the model yet
            return SamplePlan(WEIGHT_RULES, "no row has a gradient"), sample_items(
                "rows", gmap.batch
            )
        if plan is None:  # of no row: it is the model's doing
            with gmap.replay.run():
                gradient = plain_gradient(gmap, gmap.batch)
            broken = (name for name, tensor in gradient.items() if not tensor.isfinite().all())
            raise FloatingPointError(NOT_FINITE.format(name=next(broken, "a parameter")))
        shapes = row_shapes(gmap.batch, real_tokens(gmap.model, gmap.batch))
        plan = plan._replace(shapes=shapes, coarse=coarse)
    weights = [sample_weights(rule, gmap.batch) for rule in plan.rules]
    agree = _agree(weights)  # if not, the first batches had as many tokens in every row
    if not plan.reason and (not agree or _has_untried(plan, gmap.batch)):
        new_plan = (
            _try_out_or_part(gmap, samples, clip, coarse, plan.rules, plan.labels, True) or plan
        )
        modules = new_plan.modules | plan.modules if agree else new_plan.modules
        plan = new_plan._replace(
            modules=modules, padded=plan.padded, shapes=plan.shapes, coarse=coarse
        )
        weights = [sample_weights(rule, gmap.batch) for rule in plan.rules]
    if len(plan.padded) < PADDED and not (is_underway and plan.reason):
        try:
            plan = plan._replace(padded=plan.padded | _try_padding(gmap, samples, plan))
        except NotImplementedError:
            if not is_underway:
                raise
            plan = plan._replace(reason=PARTED.format("it reads the padding"))
    if gmap.replay.recomputes():
        plan = plan._replace(reason="activation checkpointing runs layers a second time")
    if plan.coarse:
        logger.warning_once(COARSE.format(type(gmap.model).__name__, plan.coarse))
        plan = plan._replace(reason=plan.coarse)
    elif plan.reason:
        logger.warning_once(
            f"{type(gmap.model).__name__}: {plan.reason}, so each sample's gradient takes a pass "
            "of its own. Freeze or withhold what stands in the way for one pass per batch."
        )
    if plan != known:
        key = _key(gmap)
        cache_of(gmap.model).sample_plans[key] = plan
    return plan, sample_items(plan.rules[0], gmap.batch)


def _try_out_or_part(
    gmap: GradientMap,
    samples: int,
    clip: float,
    coarse: str,
    rules: tuple[str, ...],
    labels: tuple[frozenset[int], ...],
    is_underway: bool,
) -> SamplePlan | None:
    """Tries a model out. A loss that couples rows is refused before a message has left. Afterwards
    a refusal would tell which rows are in a batch, so rows are then differentiated one by one, in
    passes in which no other row has a part: those of a loss that no other row decides.
    """
    try:
        return _try_out(gmap, samples, clip, coarse, rules, labels)
    except NotImplementedError:
        if not is_underway:
            raise
        return SamplePlan(rules, PARTED.format("its loss couples rows"))


def _try_out(
    gmap: GradientMap,
    samples: int,
    clip: float,
    coarse: str,
    rules: tuple[str, ...],
    labels: tuple[frozenset[int], ...] = (),
) -> SamplePlan | None:
    """Compares a few samples together with each by itself, without dropout. Those whose gradients
    are not finite say nothing: `None` if none is.
    """
    batch = rows_of(gmap.batch, _rows_to_try(gmap.batch, labels), samples)
    with _trial(gmap, batch, coarse):
        tried = range(count_rows(batch))
        single = [plain_gradient(gmap, rows_of(batch, [row], len(tried))) for row in tried]
        norms = [float(_norm(sample_gradient)) for sample_gradient in single]
        chosen = [row for row in tried if math.isfinite(norms[row])]
        if not chosen:
            return None
        batch, single = rows_of(batch, chosen, len(tried)), [single[row] for row in chosen]
        labels = _joined(labels, frozenset().union(*_labels(batch)))
        batch_gradient = plain_gradient(gmap, batch)
        tolerance = (
            sum(norms[row] for row in chosen) / len(chosen) * _tolerance(gmap, coarse) + 1e-30
        )
        fitting = []
        for rule in rules:
            weights = sample_weights(rule, batch)
            off = {
                n: g
                - sum(
                    float(w) * sample_gradient[n]
                    for w, sample_gradient in zip(weights, single, strict=True)
                )
                for n, g in batch_gradient.items()
            }
            if float(_norm(off)) <= tolerance:
                fitting.append(rule)
        if not fitting:
            raise NotImplementedError(
                f"{type(gmap.model).__name__}'s loss of a batch is no mean of its samples' own "
                "losses: they are coupled (classes that are weighed, contrastive losses, routers, "
                "losses between samples), so that no sample has a gradient of its own to clip. Use "
                "a loss that is a mean over rows or tokens, or dp_sgd without per_sample."
            )
        weights = sample_weights(fitting[0], batch)
        try:
            contributions = listen(gmap, batch, len(chosen))
            reason = _wrong(gmap, contributions, single, weights, tolerance, clip)
        except NotApartError as error:
            return SamplePlan(tuple(fitting), str(error))
        except RuntimeError as error:  # a module that takes no copies, or is not vectorized
            why = str(error).splitlines()[0]
            return SamplePlan(tuple(fitting), f"a module is not differentiated by rows ({why})")
    return SamplePlan(tuple(fitting), reason, frozenset(contributions), labels)


def _try_padding(gmap: GradientMap, samples: int, plan: SamplePlan) -> frozenset[int]:
    """Padded texts that were not tried before, two of a batch at most, whose gradients are seen to
    be what they are without padding. One text may be an exception: a label or weights can hide what
    others show.

    Raises:
        NotImplementedError: If one's is not.
    """
    real, targets = real_tokens(gmap.model, gmap.batch), real_targets(gmap.model, gmap.batch)
    shown = targets if real is None else real
    if shown is None:
        return frozenset()
    ids = gmap.batch["labels"] if real is None else gmap.batch.get("input_ids")
    ids = ids if isinstance(ids, Tensor) and ids.shape == shown.shape else shown.long()
    texts = [hash(tuple(row[is_real].tolist())) for row, is_real in zip(ids, shown, strict=True)]
    counts = count_items(gmap.batch, True) > 0
    passed, met = set[int](), set(plan.padded)
    for places in (real, real, targets):
        if places is None:
            continue
        is_new = torch.tensor([text not in met for text in texts], device=counts.device)
        if (row := most_padded(places, counts & is_new)) is None:
            continue
        met.add(texts[row])
        if _shows_padding(gmap, rows_of(gmap.batch, [row], samples), plan.coarse):
            passed.add(texts[row])
    return frozenset(passed)


def _shows_padding(gmap: GradientMap, alone: Mapping[str, Any], coarse: str) -> bool:
    """Whether a padded text, which passes, has a gradient by which it could have failed."""
    with _trial(gmap, alone, coarse):
        padded = plain_gradient(gmap, alone)
        unpadded = plain_gradient(gmap, shorter(gmap.model, alone))
    size = float(_norm(unpadded))
    difference = _norm({name: padded[name] - unpadded[name] for name in padded})
    if float(difference) > size * _tolerance(gmap, coarse) + 1e-30:
        raise NotImplementedError(f"{type(gmap.model).__name__} {READS_PADDING}")
    return 0 < size < math.inf  # one that overflowed could not fail


def _rows_to_try(batch: Mapping[str, Any], labels: tuple[frozenset[int], ...]) -> list[int]:
    """Rows whose labels were not tried beside each other, then those of most and of fewest items
    that count.
    """
    items, values = count_items(batch, True), _labels(batch)
    order = [k for k in items.argsort(descending=True, stable=True).tolist() if items[k] > 0]
    chosen = order[:1] or [0]
    tried_labels = values[chosen[0]] if values else frozenset()
    for row in order if values else []:
        if len(chosen) < TRIED - 1 and not values[row] <= tried_labels.union(
            *_joined(labels, tried_labels)[-1:]
        ):
            chosen.append(row)
            tried_labels |= values[row]
    untried = [row for row in order if row not in chosen]
    return sorted({*chosen, *untried[: TRIED - 1 - len(chosen)], *order[-1:]})


def _labels(batch: Mapping[str, Any]) -> list[frozenset[int]]:
    """Each row's label values; nothing where labels are no classes."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return []
    rows = labels.reshape(len(labels), -1).tolist()
    return [frozenset(row) - {-100} for row in rows]


def _joined(
    labels: tuple[frozenset[int], ...], new_labels: frozenset[int]
) -> tuple[frozenset[int], ...]:
    """Values that were tried beside each other, also by way of others."""
    met = new_labels.union(*(group for group in labels if group & new_labels))
    return (*(group for group in labels if not group & new_labels), *([met] if new_labels else []))


def _has_untried(plan: SamplePlan, batch: Mapping[str, Any]) -> bool:
    """Whether a batch has labels that were not tried beside each other."""
    if sum(map(len, plan.labels)) > CLASSES:
        return False
    values = frozenset().union(*_labels(batch))
    return len(values) > 1 and not any(values <= group for group in plan.labels)


def _wrong(
    gmap: GradientMap,
    contributions: Mapping[str, Contribution],
    single: list[Tensors],
    weights: Tensor,
    tolerance: float,
    clip: float,
) -> str:
    """Say where what samples add is not what they add by themselves, or how; nothing if it is."""
    norms = norms_of(contributions)
    for row, (sample_gradient, weight) in enumerate(zip(single, weights.tolist(), strict=True)):
        alone = torch.zeros_like(norms)
        alone[row] = 1
        added = total_of(gmap.parameters, contributions, alone)
        off = {name: added[name] - weight * g for name, g in sample_gradient.items()}
        size, away = weight * float(_norm(sample_gradient)), float(_norm(off))
        if max(away, abs(float(norms[row]) - size)) > tolerance * float(weights.max()):
            worst = max(off, key=lambda name: float(off[name].norm()))
            return f"samples cannot be told apart in {worst}"
        if away > ROW_ROUNDING * max(size, weight * clip):
            return "it makes much of the last bits, which follow from what stands beside a row"
    return ""


@contextmanager
def _trial(gmap: GradientMap, batch: Mapping[str, Any], coarse: str) -> Iterator[None]:
    """Let passes inside have no dropout, no autocast, and the map's own random draws."""
    # Where nothing is coarse there is no autocast to leave.
    precise = gmap.replay.full_precision() if coarse else nullcontext()
    with _without_dropout(gmap, batch, coarse), gmap.replay.run(), precise:
        yield


@contextmanager
def _without_dropout(gmap: GradientMap, batch: Mapping[str, Any], coarse: str) -> Iterator[None]:
    """Modules of a model's own code stay as they are, since what they do to a batch in training may
    be something else, unless they draw at random.
    """
    with modes_kept(gmap.model) as modules:
        for module in modules:
            module.training = module.training and not _is_of_a_library(module)
        custom_modules = [module for module in modules if module.training]
        buffers = [
            (b, b.clone()) for module in custom_modules for b in module.buffers(recurse=False)
        ]
        try:
            if custom_modules:
                with gmap.replay.run():
                    first_gradient, second_gradient = (
                        plain_gradient(gmap, batch),
                        plain_gradient(gmap, batch),
                    )
                difference = _norm(
                    {name: first_gradient[name] - second_gradient[name] for name in first_gradient}
                )
                if not float(difference) <= _tolerance(gmap, coarse) * float(_norm(first_gradient)):
                    gmap.model.eval()
            yield
        finally:
            for buffer, saved in buffers:
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)


def _is_of_a_library(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("torch", "transformers", "peft")


def _tolerance(gmap: GradientMap, coarse: str) -> float:
    """Of comparisons, by what arithmetic can tell: half precision, and a GPU's TF32."""
    parameters = [p for p in gmap.model.parameters() if p.is_floating_point()]
    if coarse or any(torch.finfo(p.dtype).bits < 32 for p in parameters):
        return 0.1
    return 1e-4 if all(p.device.type == "cpu" for p in parameters) else 2e-3


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt()


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Operations(TorchDispatchMode):
    """Notes what runs inside: which operation first gives back numbers of a type, and whether
    anything is convolved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolves, self._first = False, dict[torch.dtype, str]()

    @property
    def coarse(self) -> str:
        """The first operation that gave back numbers of half precision or less, if any did."""
        coarse_names = [
            name
            for kind, name in self._first.items()
            if kind.is_floating_point and kind.itemsize < 4
        ]
        return coarse_names[0] if coarse_names else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.convolves |= "conv" in name or "rnn" in name
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._first.setdefault(output.dtype, name)
        return outputs


def coarse_arithmetic(gmap: GradientMap) -> str:
    """Say why a map's gradient is not computed in float32 or better; nothing if it is.

    All operations of one pass and of its gradient are looked at, and torch's settings for products
    of float32.

    Example:
        >>> coarse_arithmetic(gmap)
        ''
    """
    if any(map(is_coarse, gmap.parameters.values())):
        return "its weights are in half precision"
    operations = _Operations()
    with gmap.replay.run(), operations:
        differentiate(gmap.loss_fn(gmap.model, dict(gmap.batch)), gmap.parameters)
    if operations.coarse:
        return f"it computes in half precision ({operations.coarse}), as under autocast"
    is_cuda = next(iter(gmap.parameters.values())).is_cuda
    return _coarse_products("cuda" if is_cuda else "cpu", operations.convolves)


def _coarse_products(device: str, convolves: bool) -> str:
    """Says what torch is allowed to do to float32 numbers before it multiplies them."""
    products, convolutions = _PRODUCTS[device]
    for name in products + convolutions * convolves:
        backend, _, operation = name.partition(".")
        settings: Any = getattr(getattr(torch.backends, backend), operation, None)
        if not hasattr(settings, "fp32_precision"):  # torch before 2.9 has one setting for all
            return _of_older_torch(device, convolves)
        if settings.fp32_precision not in ("none", "ieee"):
            return f"torch.backends.{name}.fp32_precision rounds what it multiplies"
    return ""


def _of_older_torch(device: str, convolves: bool) -> str:
    if torch.get_float32_matmul_precision() != "highest":
        return "torch.set_float32_matmul_precision rounds what it multiplies"
    if device == "cuda" and convolves and torch.backends.cudnn.allow_tf32:
        return "torch.backends.cudnn.allow_tf32 rounds what it multiplies"
    return ""


_PRODUCTS = {
    "cpu": (["mkldnn.matmul"], ["mkldnn.conv", "mkldnn.rnn"]),
    "cuda": (["cuda.matmul"], ["cudnn.conv", "cudnn.rnn"]),
}
"""Where torch says how float32 numbers are multiplied: always, and in convolutions."""


def count_items(batch: Mapping[str, Any], shifted: bool) -> Tensor:
    """Count the labels of each row that count, `(B,)`; ones where there are none.

    Args:
        batch: Rows with `labels` or `shift_labels`, or neither.
        shifted: Whether the first label of a row of several does not count.

    Example:
        >>> count_items({"labels": torch.tensor([[5, 6, -100], [7, 8, 9]])}, shifted=True)
        tensor([1., 2.])
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return torch.ones(count_rows(batch))
    if labels.dim() > 1 and shifted and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return labels.ne(-100).reshape(len(labels), -1).sum(1).float()


def sample_weights(rule: str, batch: Mapping[str, Any]) -> Tensor:
    """Return what samples' own mean losses weigh in a batch's, `(B,)`, by one of `WEIGHT_RULES`."""
    items = sample_items(rule, batch)
    return items / items.sum().clamp(min=1)


def sample_items(rule: str, batch: Mapping[str, Any]) -> Tensor:
    """Count what of each sample a batch's mean loss is over, `(B,)` in float64: a row, or its
    labels.

    Example:
        >>> labels = torch.tensor([[5, 6, -100], [7, 8, 9], [-100, -100, -100]])
        >>> sample_items("tokens", {"labels": labels}), sample_items("rows", {"labels": labels})
        (tensor([2., 3., 0.], dtype=torch.float64), tensor([1., 1., 0.], dtype=torch.float64))
    """
    items = count_items(batch, rule == "shifted tokens").double()
    return (items > 0).double() if rule == "rows" else items


WEIGHT_RULES = ("rows", "tokens", "shifted tokens")
"""How samples may weigh in a batch's loss."""


def _agree(weights: list[Tensor]) -> bool:
    return all(torch.allclose(weights[0], other_weights) for other_weights in weights[1:])


def rows_of(batch: Mapping[str, Any], rows: list[int], samples: int) -> dict[str, Any]:
    """Return some rows of a batch."""
    chosen: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim():
            if len(value) != samples:
                raise NotImplementedError(
                    f"{key!r} of a batch has {len(value)} entries where the batch has {samples} "
                    "rows, so a sample cannot be taken out. Return one entry per row from the "
                    "collator."
                )
            chosen[key] = value[rows]
        elif isinstance(value, list | tuple) and len(value) == samples:
            chosen[key] = [value[row] for row in rows]
        else:
            chosen[key] = value
    return chosen


def real_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Tell which positions are no padding, `(B, T)`; `None` where a batch is not of texts.

    The mask says it, or else the padding's id.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> real_tokens(model, {"input_ids": 1 + mask, "attention_mask": mask}).sum().item()
        5
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.bool()
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if mask is not None or padding is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    return ids != padding


def shorter(model: nn.Module, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of one text without its padding at both ends, and without that of what an
    encoder-decoder is to write.

    Args:
        model: Whose batch it is.
        row: The batch.
    """
    real, targets = real_tokens(model, row), real_targets(model, row)
    start, end = (0, -1) if real is None else map(int, ends_of(real))
    last = None if targets is None else int(ends_of(targets)[1])

    def along(name: str, value: Any) -> bool:
        if real is None or not isinstance(value, Tensor) or value.dim() < 2:
            return False
        if value.shape[1] != real.shape[1]:
            return False
        is_multi_label = name.endswith("labels") and value.is_floating_point()  # of as many classes
        return not is_multi_label and not is_of_targets(model, name)

    def is_written(name: str, value: Any) -> bool:
        if targets is None or not isinstance(value, Tensor) or not is_of_targets(model, name):
            return False
        return value.dim() > 1 and value.shape[1] == targets.shape[1]

    def cut(name: str, value: Any) -> Any:
        if last is not None and is_written(name, value):
            return value[:, : last + 1]
        return value[:, start : end + 1] if along(name, value) else value

    return {name: cut(name, value) for name, value in row.items()}


def real_targets(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Tell which labels of an encoder-decoder are no padding, `(B, T)`; `None` without any.

    Example:
        >>> real_targets(model, {"labels": torch.tensor([[5, -100]])}) is None  # a classifier
        True
    """
    labels, config = batch.get("labels"), getattr(model, "config", None)
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return None
    if not is_of_targets(model, "labels"):
        return None
    padding = getattr(config, "pad_token_id", None)
    is_real = labels != -100
    if padding is not None and padding != getattr(config, "eos_token_id", None):
        is_real &= labels != padding
    return is_real


def is_padded(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Tell whether a batch holds padding, of what is read or of what is to be written."""
    places = real_tokens(model, batch), real_targets(model, batch)
    return any(real is not None and not bool(real.all()) for real in places)


def most_padded(real: Tensor, rows: Tensor) -> int | None:
    """Find the row, of some, with the most padding at its ends, `(B,)`; `None` if none has any."""
    if real.all():
        return None
    first_place, last_place = ends_of(real)
    length = (last_place - first_place + 1).where(rows.to(real.device), real.shape[1])
    row = int(length.argmin())
    return row if length[row] < real.shape[1] else None


def row_shapes(batch: Mapping[str, Any], real: Tensor | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of rows that no mask tells apart from their padding.

    Speech and pictures are often filled up with zeros. A model that takes the zeros for sound gives
    a row another gradient where a longer one stands beside it, and no clipping bounds that. With a
    mask, or the padding's id, rows are compared with themselves without padding. Without either
    nobody can tell what is padding, but rows that are all filled up to one length are the same in
    every batch.

    Args:
        batch: Whose entries but the labels count.
        real: Which tokens are no padding, `(B, T)`, as `real_tokens` says.

    Example:
        >>> row_shapes({"input_values": torch.zeros(2, 5), "labels": torch.zeros(2, 3)}, None)
        {'input_values': (5,)}
    """
    return {
        name: tuple(entry.shape[1:])
        for name, entry in batch.items()
        if isinstance(entry, Tensor)
        and entry.dim() > 1
        and not name.endswith("labels")
        and (real is None or (entry.is_floating_point() and entry.shape[1] != real.shape[1]))
    }


def refuse_other_lengths(
    tried_shapes: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse rows of another shape than those that a model was tried out on.

    Args:
        tried_shapes: What `row_shapes` gave then.
        shapes: What it gives now.

    Raises:
        NotImplementedError: With the entry, and what to do.

    Example:
        >>> refuse_other_lengths({"input_values": (400,)}, {"input_values": (400,)})
    """
    for name, shape in shapes.items():
        if tried_shapes.get(name, shape) != shape:
            raise NotImplementedError(
                OTHER_LENGTHS.format(name=name, shape=shape, known_shape=tried_shapes[name])
            )
