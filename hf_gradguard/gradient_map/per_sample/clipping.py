"""The sum of samples' gradients, each clipped by itself: Σ_b min(1, C/‖g_b‖) g_b.

g_b is the gradient of sample b's own mean loss, so a sample's term depends on no other sample. A
batch-mean loss is L = Σ_b n_b L_b / N, with N = Σ_b n_b. n_b is 1 for a mean over rows, or the
number of a row's tokens. The sum N L is differentiated, to which a sample adds n_b g_b. So no
number in a sample's term depends on how many others there are. The slopes of a mean would: they
carry 1/N, each is rounded, and all would err together.

How the samples of a model can be separated in one pass is found out by trial against single
samples: on its first batch of several samples and from time to time, at the model's own weights and
at random ones, which hide nothing (see `random_weights`).

Half precision rounds every number to 8 or 11 bits. There a row's contribution depends on how many
rows are beside it: kernels and padding are chosen by the size of a batch, and a change in the last
bit of float32 is rounded up to one of 2⁻⁹. Rows that are alike move together, so one more row can
move the sum of a thousand by several clipping bounds. No clipping of rows bounds that. So rows are
differentiated one by one in half precision, each in a pass without any other row.
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
from ..parameters import LabelGroups, SamplePlan, cache_of, code_of
from ..replay import DrawState, differentiate, modes_kept
from ..types import Tensors
from .random_weights import last_bits_moved, random_weights

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
"""The number of samples of a batch on which a model is tried out."""
RETRIED = 100
"""The number of messages after which a model is tried out again, since its loss may change."""
PADDED = 6
"""The number of different texts whose gradient must be the same with and without padding."""
CLASSES = 64
"""The most label values that a loss is tried out on together, since it may weigh classes."""
NOT_AT_RANDOM = (
    "whether rows are coupled cannot be tried out at random weights ({}), and at its own a fresh "
    "model may hide it"
)
COUPLED_BY_DRAWS = "another row changes what a row adds while it draws at random, as in training"


class ClippedSum(NamedTuple):
    """The sum of samples' clipped gradients, and the norms before clipping.

    Args:
        total: Σ_b min(1, C/‖g_b‖) g_b, by parameter, at least in float32. A sample whose gradient
            is not finite adds nothing. It stops no training, because that would reveal it.
        norms: ‖g_b‖, `(B,)` in float64; never below the true norm by more than rounding.
    """

    total: Tensors
    norms: Tensor


def clipped_sum(gmap: GradientMap, clip: float) -> ClippedSum:
    """Return the sum of the batch's per-sample gradients, each clipped to the norm C.

    One pass gives both the samples' norms and the sum, from layers' inputs and slopes. Some models
    do not let samples be separated in this way, and half precision does not allow it. Then samples
    are differentiated one by one, and a warning says so once. A trial on a model's first batch of
    several samples decides which way is taken.

    Args:
        gmap: A client's own gradient map; a first-order one is enough.
        clip: The clipping bound C > 0.

    Raises:
        NotImplementedError: If samples are coupled, as by batch statistics or by a loss between
            samples, so that a sample has no gradient of its own; if the batch cannot be cut into
            rows; or if rows have another length than in the first batch, and no mask says what is
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
        # These are read first: a new trial's passes may overwrite what this pass has saved.
        contributions, scale = gmap.contributions, gmap.scale
    plan, items = plan_of(gmap, samples, clip)
    count = float(items.sum().clamp(min=1))
    if contributions is None and not plan.reason:
        scale = count
        with suppress(NotApartError), gmap.replay.run():
            contributions = listen(gmap, batch, samples, scale)
    # Even without a reason, other modules may have run than when the model was tried out.
    if plan.reason or not contributions or contributions.keys() - plan.modules:
        return _one_by_one(gmap, samples, clip)
    # A sample adds n_b g_b, unless the rule was found out after the pass.
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
    """Return min(1, C/‖g‖) for each norm ‖g‖."""
    return torch.where(norms > clip, clip / norms, torch.ones_like(norms))


def _usable(norms: Tensor, clip: float) -> Tensor:
    """Return which samples may add to the sum.

    A sample may not if its gradient is no number, or so large that float32 has too few digits for
    the factor that clips it.
    """
    return norms * torch.finfo(torch.float32).tiny < clip  # false for a norm that is no number


def _one_by_one(gmap: GradientMap, samples: int, clip: float) -> ClippedSum:
    """Return the sum of clipped gradients, with a pass of its own for each sample.

    Such a pass has only the sample's own tokens, without padding up to the longest text. So it is
    the same whatever the other samples are.
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
    """Add one sample's clipped gradient to a sum, and return its norm before clipping.

    The sum is in float64, so that the order of samples does not matter.
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
    """A first-order gradient map that saves `clipped_sum` a pass.

    Its gradient is the sum of what samples add, which equals that of a `GradientMap` to rounding.
    It is an ordinary `GradientMap` if a model does not let samples be separated, and on a model's
    first batch, on which that is tried out.

    Example:
        >>> from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
        >>> _ = clipped_sum(GradientMap(model, batch), clip=0.1)  # tries the model out
        >>> seen = SampleMap(model, batch, second_order=False, needs_input=False)
        >>> seen.contributions is not None
        True
    """

    scale: float = 1.0
    """The number of rows or tokens that the loss is a mean over.

    The loss is multiplied by it before it is differentiated, so that slopes are those of the sum.
    """
    _listener: Listener | None = None
    _modules = frozenset[str]()  # the modules that ran when the model was tried out
    _gradient_versions: dict[str, int] | None = None

    @cached_property
    def contributions(self) -> Mapping[str, Contribution] | None:
        """The contributions of samples, by module; `None` if this pass cannot separate samples.

        It cannot if a module did not run when the model was tried out, or was called in another way
        then.
        """
        if self._listener is None:
            return None
        try:
            with self.replay.kernels():
                contributions = self._listener.contributions(self._loss, self.scale)
        except NotApartError:
            return None
        # There are no contributions if all layers were dropped.
        return contributions if contributions and contributions.keys() <= self._modules else None

    def versions(self) -> dict[str, int]:
        """Return how often tensors were written to, as `GradientMap` does.

        The gradient is not computed for this. Its own writes are counted since it was computed.
        """
        versions = super().versions()
        if self._listener is not None:
            gradient, fresh_versions = self._gradient or {}, self._gradient_versions or {}
            for name in self.parameters:
                writes = gradient[name]._version - fresh_versions[name] if gradient else 0
                versions[f"the true gradient of {name!r}"] = writes
        return versions

    def form(self) -> Tensors:
        """Return tensors of the gradient's shapes: the parameters, which need no pass."""
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
        except NotApartError:  # a module was called in another way than when it was tried out
            self._listener = None
            return super()._first_pass()


def norms_of(contributions: Mapping[str, Contribution]) -> Tensor:
    """Return the norms of what samples add to the gradient, `(B,)`.

    Args:
        contributions: The contributions of samples, by module.
    """
    return torch.stack([entry.squared_norms() for entry in contributions.values()]).sum(0).sqrt()


def total_of(
    parameters: Mapping[str, Tensor], contributions: Mapping[str, Contribution], factors: Tensor
) -> Tensors:
    """Return the weighted sum of samples' contributions, by parameter.

    A parameter that no sample adds to gets zeros.

    Args:
        parameters: The parameters, by name.
        contributions: The contributions of samples, by module.
        factors: The weight of each sample, `(B,)`.
    """
    totals: Tensors = {}
    for contribution in contributions.values():
        for name, tensor in contribution.weighted_sum(factors).items():
            totals[name] = tensor
    for name, parameter in parameters.items():
        if name not in totals:
            totals[name] = wide(torch.zeros_like(parameter, requires_grad=False))
    return {name: totals[name] for name in parameters}


def plain_gradient(gmap: GradientMap, batch: Mapping[str, Any]) -> Tensors:
    """Return the gradient of a batch's mean loss; zeros if no label in it counts.

    Args:
        gmap: The map, whose model, loss and parameters are used.
        batch: The batch.
    """
    if not bool(count_items(batch, False).any()):
        return {n: wide(torch.zeros_like(p)) for n, p in gmap.parameters.items()}
    loss = gmap.loss_fn(gmap.model, dict(batch))
    gradient = differentiate(loss, gmap.parameters)
    return {name: wide(tensor) for name, tensor in gradient.items()}


def known_plan(gmap: GradientMap) -> SamplePlan | None:
    """Return how a model's samples are separated on batches of this kind, as a trial found.

    It is `None` if the model was not tried out yet on a batch with these entries.
    """
    key = _key(gmap)
    return cache_of(gmap.model).sample_plans.get(key)


def _key(gmap: GradientMap) -> Hashable:
    return tuple(gmap.parameters), code_of(gmap.loss_fn), tuple(sorted(gmap.batch))


def plan_of(gmap: GradientMap, samples: int, clip: float) -> tuple[SamplePlan, Tensor]:
    """Return how this batch's samples are separated, and how much each of them counts.

    The model is tried out if it was not yet, or if this batch shows something new.

    Args:
        gmap: The batch's gradient map.
        samples: The number of the batch's samples.
        clip: The clipping bound C.

    Returns:
        The plan, and the count of each sample as `sample_items` returns it.

    Raises:
        FloatingPointError: If no row has a finite gradient, before any message was shared.
    """
    known = known_plan(gmap)
    is_underway = known is not None or cache_of(gmap.model).is_underway
    plan = known or SamplePlan(
        WEIGHT_RULES,
        shapes=row_shapes(gmap.batch, real_tokens(gmap.model, gmap.batch)),
        coarse=coarse_arithmetic(gmap),
    )
    is_due = plan.uses % RETRIED == 0
    while not plan.reason and ((is_unknown := _is_unknown(plan, gmap.batch)) or is_due):
        at_random, labels = is_unknown or not plan.uses, plan.labels
        new_plan = _try_out_or_part(gmap, samples, clip, plan, is_underway, at_random)
        if new_plan is None and known is None and is_due:
            return _plan_of_no_row(gmap, is_underway)
        is_due, plan = False, new_plan or plan
        if plan.labels == labels:  # nothing more can be tried, as of rows without finite gradients
            break
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
    plan = plan._replace(uses=plan.uses + 1)
    if plan != known:
        key = _key(gmap)
        cache_of(gmap.model).sample_plans[key] = plan
    return plan, sample_items(plan.rules[0], gmap.batch)


def _plan_of_no_row(gmap: GradientMap, is_underway: bool) -> tuple[SamplePlan, Tensor]:
    """Return what `plan_of` does for a batch without a finite gradient, before any other."""
    if is_underway:  # this batch tells nothing about the model
        return SamplePlan(WEIGHT_RULES, "no row has a gradient"), sample_items("rows", gmap.batch)
    with gmap.replay.run():
        gradient = plain_gradient(gmap, gmap.batch)
    broken = (name for name, tensor in gradient.items() if not tensor.isfinite().all())
    raise FloatingPointError(NOT_FINITE.format(name=next(broken, "a parameter")))


def _is_unknown(plan: SamplePlan, batch: Mapping[str, Any]) -> bool:
    """Return whether a batch separates rules, labels or rows that no trial has separated."""
    is_first_unlike = not plan.is_of_unlike_rows and len(set(_checksums(batch))) > 1
    return is_first_unlike or not _agree(plan, batch) or _has_untried(plan, batch)


def _try_out_or_part(
    gmap: GradientMap,
    samples: int,
    clip: float,
    plan: SamplePlan,
    is_underway: bool,
    at_random: bool,
) -> SamplePlan | None:
    """Try a model out, as `_try_out` does, without a refusal once messages have been shared.

    A loss that couples rows is refused before the first message. Later a refusal would tell which
    rows are in a batch. So rows are then differentiated one by one, in passes without other rows.
    """
    try:
        return _try_out(gmap, samples, clip, plan, at_random)
    except NotImplementedError:
        if not is_underway:
            raise
        return plan._replace(reason=PARTED.format("its loss couples rows"))


def _try_out(
    gmap: GradientMap, samples: int, clip: float, plan: SamplePlan, at_random: bool
) -> SamplePlan | None:
    """Try a model out on a few samples, at its own weights and, with `at_random`, at random ones.

    The result is the plan with what this showed, or `None` if no sample has a finite gradient.
    """
    rows = _rows_to_try(gmap.batch, plan.labels)
    batch = rows_of(gmap.batch, rows, samples)
    # What a module was tried for by rules that this batch refutes counts no more.
    modules = plan.modules if _agree(plan, gmap.batch) else frozenset[str]()
    with _trial(gmap, batch, plan.coarse):
        new_plan = _compare(gmap, batch, clip, plan._replace(modules=modules))
    # Where numbers are coarse, each row takes a pass of its own in any case.
    if new_plan is None or plan.coarse or not at_random:
        return new_plan
    # One row twice: a loss may couple rows of one label alone.
    repeated = rows_of(gmap.batch, [*rows, rows[0]], samples)
    random_plan, why = None, "not finite"
    with random_weights(gmap.parameters, seed=0):
        try:
            with _trial(gmap, repeated, ""):
                random_plan = _compare(gmap, repeated, None, new_plan)
            draws_couple = _draws_couple(gmap, batch, new_plan.rules[0])
        except NotImplementedError:
            if not _last_bits_decide(gmap, repeated):
                raise
            why = "the last bits decide there"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of anybody's code, which may not take such weights
            random_plan, why = None, type(error).__name__
    if random_plan is None:
        return new_plan._replace(reason=new_plan.reason or NOT_AT_RANDOM.format(why))
    return random_plan._replace(reason=new_plan.reason or random_plan.reason or draws_couple)


def _compare(
    gmap: GradientMap, batch: Mapping[str, Any], clip: float | None, plan: SamplePlan
) -> SamplePlan | None:
    """Compare the gradient of a few samples together with the gradients of each alone.

    Samples whose gradients are not finite are left out. The result is the plan with what this
    showed, or `None` if no sample is left. Rounding is compared with the bound `clip`, if any.
    """
    every_row = range(count_rows(batch))
    single = [plain_gradient(gmap, rows_of(batch, [row], len(every_row))) for row in every_row]
    norms = [float(_norm(sample_gradient)) for sample_gradient in single]
    chosen = [row for row in every_row if math.isfinite(norms[row])]
    if not chosen:
        return None
    batch, single = rows_of(batch, chosen, len(every_row)), [single[row] for row in chosen]
    batch_gradient = plain_gradient(gmap, batch)
    mean_norm = sum(norms[row] for row in chosen) / len(chosen)
    tolerance = mean_norm * _tolerance(gmap, plan.coarse) + 1e-30
    fitting = []
    for rule in plan.rules:
        pairs = list(zip(sample_weights(rule, batch).tolist(), single, strict=True))
        off = {n: g - sum(w * alone[n] for w, alone in pairs) for n, g in batch_gradient.items()}
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
    plan = plan._replace(rules=tuple(fitting))
    try:
        contributions = listen(gmap, batch, len(chosen))
        reason = _wrong(gmap, contributions, single, weights, tolerance, clip)
    except NotApartError as error:
        return plan._replace(reason=str(error))
    except RuntimeError as error:  # a module that takes no copies, or is not vectorized
        why = str(error).splitlines()[0]
        return plan._replace(reason=f"a module is not differentiated by rows ({why})")
    return plan._replace(
        reason=reason,
        modules=plan.modules | contributions.keys(),
        labels=_joined(plan.labels, batch),
        is_of_unlike_rows=plan.is_of_unlike_rows or len(set(_checksums(batch))) > 1,
    )


def _last_bits_decide(gmap: GradientMap, batch: Mapping[str, Any]) -> bool:
    """Return whether rounding alone moves a gradient by as much as coupled rows would."""
    with _trial(gmap, batch, ""):
        gradient = plain_gradient(gmap, batch)
        with last_bits_moved(gmap.parameters):
            moved = plain_gradient(gmap, batch)
    off = float(_norm({name: moved[name] - gradient[name] for name in gradient}))
    return not off <= _tolerance(gmap, "") * float(_norm(gradient))


def _draws_couple(gmap: GradientMap, batch: Mapping[str, Any], rule: str) -> str:
    """Return `COUPLED_BY_DRAWS` if another row changes a row's gradient in the model's own mode.

    The result is an empty text if it does not, or if the draws do not allow a comparison.
    Single rows have other draws than a batch. So rows are exchanged: with a or c in front, and b or
    d behind, under the same draws, g(a, b) - g(c, b) - g(a, d) + g(c, d) is zero where rows add up.
    """
    if not any(module.training for module in gmap.model.modules()):
        return ""
    real = real_tokens(gmap.model, batch)
    lengths = [0] * count_rows(batch) if real is None else real.sum(1).tolist()
    fronts, backs = (_of_one_length(lengths, order) for order in (1, -1))
    if fronts is None or backs is None:
        return ""
    ends, off, size = [], _zeros(gmap), 0.0
    for front, back in ((0, 0), (1, 0), (0, 1), (1, 1)):
        pair = rows_of(batch, [fronts[front], backs[back]], count_rows(batch))
        with gmap.replay.run():
            gradient = plain_gradient(gmap, pair)
            ends.append((DrawState.now().plain(), gmap.replay.device_states()))
        items = float(sample_items(rule, pair).sum().clamp(min=1))
        for name, tensor in gradient.items():
            off[name] += (1 if front == back else -1) * items * tensor.double()
        size += items * float(_norm(gradient)) / 4
    is_comparable = all(end == ends[0] for end in ends) and math.isfinite(size)
    return COUPLED_BY_DRAWS * (is_comparable and float(_norm(off)) > _tolerance(gmap, "") * size)


def _of_one_length(lengths: list[int], order: int) -> tuple[int, int] | None:
    """Return the first or the last two rows of one length; `None` if all lengths differ."""
    rows = range(len(lengths))[::order]
    pairs = ((a, b) for a in rows for b in rows if a != b and lengths[a] == lengths[b])
    return next(pairs, None)


def _try_padding(gmap: GradientMap, samples: int, plan: SamplePlan) -> frozenset[int]:
    """Return the hashes of new padded texts whose gradients proved to be the same without padding.

    At most two texts of what is read, and one of what is to be written, are tried in a batch. One
    text alone could be an exception: a label or weights can hide what others show.

    Raises:
        NotImplementedError: If a text's gradient depends on its padding.
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
    """Check a text's gradient with and without its padding, and return whether it could differ.

    Raises:
        NotImplementedError: If the text's gradient depends on its padding.
    """
    size = _padded_as_unpadded(gmap, alone, coarse)
    if not coarse:
        with random_weights(gmap.parameters, seed=0):
            try:
                _padded_as_unpadded(gmap, alone, coarse)
            except NotImplementedError:
                if not _last_bits_decide(gmap, alone):
                    raise
            except Exception as error:  # it was told when the model was tried out
                logger.debug(NOT_AT_RANDOM.format(type(error).__name__))
    return 0 < size < math.inf  # the check cannot fail for a gradient that overflowed


def _padded_as_unpadded(gmap: GradientMap, alone: Mapping[str, Any], coarse: str) -> float:
    """Return the norm of a text's gradient, which must be the same with its padding.

    Raises:
        NotImplementedError: If it is not.
    """
    with _trial(gmap, alone, coarse):
        padded = plain_gradient(gmap, alone)
        unpadded = plain_gradient(gmap, shorter(gmap.model, alone))
    size = float(_norm(unpadded))
    difference = _norm({name: padded[name] - unpadded[name] for name in padded})
    if float(difference) > size * _tolerance(gmap, coarse) + 1e-30:
        raise NotImplementedError(f"{type(gmap.model).__name__} {READS_PADDING}")
    return size


def _rows_to_try(batch: Mapping[str, Any], labels: LabelGroups) -> list[int]:
    """Choose the rows of a batch on which a model is tried out.

    Rows whose labels were not tried together come first, then those with the most and the fewest
    labels that count.
    """
    items = count_items(batch, True)
    order = [k for k in items.argsort(descending=True, stable=True).tolist() if items[k] > 0]
    sums = _checksums(batch)
    order.sort(key=lambda row: sums.index(sums[row]) != row)  # repeated rows last
    chosen = order[:1] or [0]
    for name, entry in _label_entries(batch).items():
        values = _values(entry)
        tried = frozenset().union(*(values[row] for row in chosen))
        for row in order:
            met = tried.union(*_joined_groups(labels.get(name, ()), tried)[-1:])
            if len(chosen) < TRIED - 1 and not values[row] <= met:
                chosen.append(row)
                tried |= values[row]
    untried = [row for row in order if row not in chosen]
    return sorted({*chosen, *untried[: TRIED - 1 - len(chosen)], *order[-1:]})


def _checksums(batch: Mapping[str, Any]) -> list[int]:
    """Return a number for each row, which equal rows share."""
    rows = count_rows(batch)
    tensors = [e for e in batch.values() if isinstance(e, Tensor) and e.shape[:1] == (rows,)]
    flat = [tensor.detach().cpu().reshape(rows, -1).tolist() for tensor in tensors]
    return [hash(tuple(tuple(entry[row]) for entry in flat)) for row in range(rows)]


def _label_entries(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a batch's labels and its entries of one number a row.

    Those may be labels under another name, or weights of rows.
    """
    rows = count_rows(batch)
    return {
        name: entry
        for name, entry in sorted(batch.items(), key=lambda item: item[0] != "labels")
        if isinstance(entry, Tensor)
        and entry.shape[:1] == (rows,)
        and (name == "labels" or entry.dim() == 1)
    }


def _values(entry: Tensor) -> list[frozenset[Hashable]]:
    """Return each row's set of classes, or a set of one value if the entry holds no classes."""
    rows = entry.reshape(len(entry), -1).tolist()
    if entry.is_floating_point():
        return [frozenset([tuple(row)]) for row in rows]
    return [frozenset(row) - {-100} for row in rows]


def _joined(labels: LabelGroups, batch: Mapping[str, Any]) -> LabelGroups:
    """Return the label values that were tried together, with those of a batch added."""
    joined = dict(labels)
    for name, entry in _label_entries(batch).items():
        new_values = frozenset().union(*_values(entry))
        joined[name] = _joined_groups(labels.get(name, ()), new_values)
    return joined


def _joined_groups(
    groups: tuple[frozenset[Hashable], ...], new_values: frozenset[Hashable]
) -> tuple[frozenset[Hashable], ...]:
    """Return the groups of values that were tried together, with new ones added.

    Two values are in one group, too, if each was tried together with a third.
    """
    met = new_values.union(*(group for group in groups if group & new_values))
    return (*(group for group in groups if not group & new_values), *([met] if new_values else []))


def _has_untried(plan: SamplePlan, batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has label values that were not tried together."""
    for name, entry in _label_entries(batch).items():
        groups = plan.labels.get(name, ())
        if sum(map(len, groups)) > (TRIED if entry.is_floating_point() else CLASSES):
            continue
        values = frozenset().union(*_values(entry))
        if len(values) > 1 and not any(values <= group for group in groups):
            return True
    return False


def _wrong(
    gmap: GradientMap,
    contributions: Mapping[str, Contribution],
    single: list[Tensors],
    weights: Tensor,
    tolerance: float,
    clip: float | None,
) -> str:
    """Return why samples cannot be separated; an empty text if they can.

    What a sample adds beside others is compared with what it adds alone. Rounding depends on the
    weights, so it is checked only if `clip` is given.
    """
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
        if clip is not None and away > ROW_ROUNDING * max(size, weight * clip):
            return "it makes much of the last bits, which follow from what stands beside a row"
    return ""


@contextmanager
def _trial(gmap: GradientMap, batch: Mapping[str, Any], coarse: str) -> Iterator[None]:
    """Switch dropout and autocast off meanwhile, and use the map's own random draws."""
    # Without coarse arithmetic there is no autocast to switch off.
    precise = gmap.replay.full_precision() if coarse else nullcontext()
    with _without_dropout(gmap, batch, coarse), gmap.replay.run(), precise:
        yield


@contextmanager
def _without_dropout(gmap: GradientMap, batch: Mapping[str, Any], coarse: str) -> Iterator[None]:
    """Switch the modules of libraries to eval mode meanwhile.

    A model's own modules keep their mode, because in training they may do something else with a
    batch. They change it only if they draw at random.
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
    """Return the relative tolerance of comparisons, which half precision and TF32 make larger."""
    parameters = [p for p in gmap.model.parameters() if p.is_floating_point()]
    if coarse or any(torch.finfo(p.dtype).bits < 32 for p in parameters):
        return 0.1
    return 1e-4 if all(p.device.type == "cpu" for p in parameters) else 2e-3


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt()


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Operations(TorchDispatchMode):
    """A mode that records the operations that run inside.

    It records which operation first returned each type of number, and whether anything is
    convolved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolves, self._first = False, dict[torch.dtype, str]()

    @property
    def coarse(self) -> str:
        """The first operation that returned half precision or less; an empty text if none did."""
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
    """Return why a map's gradient is not computed in float32; an empty text if it is.

    The check covers all operations of one pass and of its gradient, and torch's settings for
    products of float32 numbers.

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
    """Return which setting of torch rounds float32 numbers before products; empty if none does."""
    products, convolutions = _PRODUCTS[device]
    for name in products + convolutions * convolves:
        backend, _, operation = name.partition(".")
        settings: Any = getattr(getattr(torch.backends, backend), operation, None)
        if not hasattr(settings, "fp32_precision"):  # before 2.9, torch had one setting for all
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
"""Torch's settings of how float32 numbers are multiplied: in products, and in convolutions."""


def count_items(batch: Mapping[str, Any], shifted: bool) -> Tensor:
    """Return how many labels of each row count in the loss, `(B,)`; ones without such labels.

    Args:
        batch: A batch, with `labels`, `shift_labels` or neither.
        shifted: Whether the first of a row's labels is left out, as a language model's loss does.

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
    """Return the weight of each sample's mean loss in the batch's mean loss, `(B,)`.

    Args:
        rule: One of `WEIGHT_RULES`.
        batch: The batch.
    """
    items = sample_items(rule, batch)
    return items / items.sum().clamp(min=1)


def sample_items(rule: str, batch: Mapping[str, Any]) -> Tensor:
    """Return how many terms of a batch's mean loss each sample has, `(B,)` in float64.

    A term is a row or one of its labels, as the rule says.

    Args:
        rule: One of `WEIGHT_RULES`.
        batch: The batch.

    Example:
        >>> labels = torch.tensor([[5, 6, -100], [7, 8, 9], [-100, -100, -100]])
        >>> sample_items("tokens", {"labels": labels}), sample_items("rows", {"labels": labels})
        (tensor([2., 3., 0.], dtype=torch.float64), tensor([1., 1., 0.], dtype=torch.float64))
    """
    items = count_items(batch, rule == "shifted tokens").double()
    return (items > 0).double() if rule == "rows" else items


WEIGHT_RULES = ("rows", "tokens", "shifted tokens")
"""The ways in which samples may weigh in a batch's loss: as rows, or by their tokens."""


def _agree(plan: SamplePlan, batch: Mapping[str, Any]) -> bool:
    """Return whether all rules of a plan weigh a batch's samples alike."""
    weights = [sample_weights(rule, batch) for rule in plan.rules]
    return all(torch.allclose(weights[0], other_weights) for other_weights in weights[1:])


def rows_of(batch: Mapping[str, Any], rows: list[int], samples: int) -> dict[str, Any]:
    """Return some rows of a batch, as a batch.

    Args:
        batch: The batch.
        rows: The numbers of the rows.
        samples: The number of the batch's rows.

    Raises:
        NotImplementedError: If an entry of the batch has another number of rows.
    """
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
    """Return a mask of the positions that are no padding, `(B, T)`; `None` without texts.

    It is the batch's attention mask, or else follows from the padding's token id.

    Args:
        model: The model, whose configuration has the padding's id.
        batch: The batch.

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
    """Return a batch of one text without the padding at its ends.

    The padding of a text that an encoder-decoder is to write is cut off, too.

    Args:
        model: The model that reads the batch.
        row: The batch of one text.
    """
    real, targets = real_tokens(model, row), real_targets(model, row)
    start, end = (0, -1) if real is None else map(int, ends_of(real))
    last = None if targets is None else int(ends_of(targets)[1])

    def along(name: str, value: Any) -> bool:
        if real is None or not isinstance(value, Tensor) or value.dim() < 2:
            return False
        if value.shape[1] != real.shape[1]:
            return False
        # Labels of several classes may have as many entries as the text has tokens.
        is_multi_label = name.endswith("labels") and value.is_floating_point()
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
    """Return a mask of an encoder-decoder's labels that are no padding, `(B, T)`.

    It is `None` for other models.

    Args:
        model: The model that reads the batch.
        batch: The batch.

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
    """Return whether a batch holds padding, in its inputs or in texts that are to be written.

    Args:
        model: The model that reads the batch.
        batch: The batch.
    """
    places = real_tokens(model, batch), real_targets(model, batch)
    return any(real is not None and not bool(real.all()) for real in places)


def most_padded(real: Tensor, rows: Tensor) -> int | None:
    """Return the number of the row with the most padding at its ends; `None` if none has any.

    Args:
        real: The mask of positions that are no padding, `(B, T)`.
        rows: The mask of rows to choose from, `(B,)`.
    """
    if real.all():
        return None
    first_place, last_place = ends_of(real)
    length = (last_place - first_place + 1).where(rows.to(real.device), real.shape[1])
    row = int(length.argmin())
    return row if length[row] < real.shape[1] else None


def row_shapes(batch: Mapping[str, Any], real: Tensor | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of rows in entries whose padding no mask shows, by entry.

    Speech and pictures are often padded with zeros. A model that takes the zeros for sound gives a
    row another gradient if a longer row is beside it, and no clipping bounds that. With a mask, or
    the padding's id, a row can be compared with itself without padding. Without either, nobody can
    tell what is padding. So all rows must have one length in every batch, and their shapes are
    remembered.

    Args:
        batch: The batch. Its labels are left out.
        real: The mask of tokens that are no padding, `(B, T)`, as `real_tokens` returns it.

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
        tried_shapes: The result of `row_shapes` for the batch of the trial.
        shapes: The result of `row_shapes` for this batch.

    Raises:
        NotImplementedError: If a shape differs. The message names the entry, and what to do.

    Example:
        >>> refuse_other_lengths({"input_values": (400,)}, {"input_values": (400,)})
    """
    for name, shape in shapes.items():
        if tried_shapes.get(name, shape) != shape:
            raise NotImplementedError(
                OTHER_LENGTHS.format(name=name, shape=shape, known_shape=tried_shapes[name])
            )
