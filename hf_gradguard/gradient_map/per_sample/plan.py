"""How a model's samples are told apart in one pass, found out by trial against single samples."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..domain import count_rows, ends_of, is_of_targets
from ..inputs import NOT_FINITE
from ..layers import ROW_ROUNDING, Contribution, NotApartError, listen
from ..map import GradientMap
from ..parameters import SamplePlan, cache_of
from ..replay import differentiate, modes_kept
from ..sensitivity import code_of
from ..types import Tensors
from .lengths import row_shapes
from .precision import coarse_arithmetic

logger = logging.get_logger(__name__)

TRIED = 4
"""Samples of a batch on which a model is tried out."""
PADDED = 6
"""Different padded texts that must have the gradient that they have without padding."""
CLASSES = 64
"""Up to so many label values a loss is tried out on each beside others: it may weigh classes."""


def known_plan(gmap: GradientMap) -> SamplePlan | None:
    """What was found out of a model on batches of this kind."""
    return cache_of(gmap.model).sample_plans.get(_key(gmap))


def _key(gmap: GradientMap) -> Hashable:
    return tuple(gmap.parameters), code_of(gmap.loss_fn), tuple(sorted(gmap.batch))


def plan_of(gmap: GradientMap, samples: int, clip: float) -> tuple[SamplePlan, Tensor]:
    """The plan, and how much each of this batch's samples counts, as `sample_items` says."""
    plan = known_plan(gmap)
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
    cache_of(gmap.model).sample_plans[_key(gmap)] = plan
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
    batch = rows_of(gmap.batch, _to_try(gmap.batch, labels), samples)
    with _still(gmap, batch, coarse), gmap.replay.run(), gmap.replay.full_precision():
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
    with _still(gmap, alone, coarse), gmap.replay.run(), gmap.replay.full_precision():
        padded = plain_gradient(gmap, alone)
        unpadded = plain_gradient(gmap, shorter(gmap.model, alone))
    size = float(_norm(unpadded))
    difference = _norm({name: padded[name] - unpadded[name] for name in padded})
    if float(difference) > size * _tolerance(gmap, coarse) + 1e-30:
        raise NotImplementedError(f"{type(gmap.model).__name__} {READS_PADDING}")
    return 0 < size < math.inf  # one that overflowed could not fail


def _to_try(batch: Mapping[str, Any], labels: tuple[frozenset[int], ...]) -> list[int]:
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
def _still(gmap: GradientMap, batch: Mapping[str, Any], coarse: str) -> Iterator[None]:
    """Without dropout. Modules of a model's own code stay as they are, since what they do to a
    batch in training may be something else, unless they draw at random.
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


def norms_of(contributions: Mapping[str, Contribution]) -> Tensor:
    return torch.stack([entry.squared_norms() for entry in contributions.values()]).sum(0).sqrt()


def total_of(
    parameters: Mapping[str, Tensor], contributions: Mapping[str, Contribution], factors: Tensor
) -> Tensors:
    """Σ_b factor_b · (what b adds): zeros for parameters that no sample adds to."""
    totals: Tensors = {}
    for contribution in contributions.values():
        for name, tensor in contribution.weighted_sum(factors).items():
            totals[name] = tensor
    for name, parameter in parameters.items():
        if name not in totals:
            totals[name] = wide(torch.zeros_like(parameter, requires_grad=False))
    return {name: totals[name] for name in parameters}


def plain_gradient(gmap: GradientMap, batch: Mapping[str, Any]) -> Tensors:
    """Of a batch's mean loss; zeros if nothing in it counts."""
    if not bool(count_items(batch, False).any()):
        return {n: wide(torch.zeros_like(p)) for n, p in gmap.parameters.items()}
    loss = gmap.loss_fn(gmap.model, dict(batch))
    gradient = differentiate(loss, gmap.parameters)
    return {name: wide(tensor) for name, tensor in gradient.items()}


def count_items(batch: Mapping[str, Any], shifted: bool) -> Tensor:
    """How many labels of each row count, `(B,)`; ones where there are none.

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
    """What each sample's own mean loss weighs in a batch's, `(B,)`, by one of `WEIGHT_RULES`."""
    items = sample_items(rule, batch)
    return items / items.sum().clamp(min=1)


def sample_items(rule: str, batch: Mapping[str, Any]) -> Tensor:
    """Counts what of each sample a batch's mean loss is over, `(B,)` in float64: a row, or its
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
    """Some rows of a batch."""
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


def real_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """`(B, T)`: which positions are no padding, by the mask or else by the padding's id; `None`
    where a batch is not of texts.

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
    """A batch of one text without its padding at both ends, and without that of what an
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
    """`(B, T)`: which labels of an encoder-decoder are no padding; `None` where there are none.

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
    """Whether a batch holds padding, of what is read or of what is to be written."""
    places = real_tokens(model, batch), real_targets(model, batch)
    return any(real is not None and not bool(real.all()) for real in places)


def most_padded(real: Tensor, rows: Tensor) -> int | None:
    """Of some rows, `(B,)` bools, the one with the most padding at its ends; `None` if none has."""
    if real.all():
        return None
    first_place, last_place = ends_of(real)
    length = (last_place - first_place + 1).where(rows.to(real.device), real.shape[1])
    row = int(length.argmin())
    return row if length[row] < real.shape[1] else None
