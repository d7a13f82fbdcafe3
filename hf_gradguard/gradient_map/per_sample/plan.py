"""How a model's samples are told apart in one pass, found out by trial against single samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..batch.padding import READ, most_padded, real_tokens, shorter
from ..differences.plan import code_of
from ..domain import count_rows
from ..graphs import differentiate
from ..kept import modes_kept
from .listening import NotApartError, listen
from .shares import Share

if TYPE_CHECKING:
    from ..map import GradientMap, Tensors

logger = logging.get_logger(__name__)

TRIED = 4
"""Samples of a batch on which a model is tried out."""
CLASSES = 64
"""Up to so many label values a loss is tried out on each beside others: it may weigh classes."""


class Plan(NamedTuple):
    """How a model's samples are told apart, found out by trial.

    Args:
        rules: Which of `_RULES` give the weights w_b; all of them agreed so far.
        reason: Why samples are differentiated one by one; empty if together.
        modules: Those that ran in the trial. Others (an expert that no token was routed to) were
            not tried.
        labels: Label values that were tried beside each other.
        padded: Whether a text that is padded was compared with itself without padding.
    """

    rules: tuple[str, ...]
    reason: str = ""
    modules: frozenset[str] = frozenset()
    labels: tuple[frozenset[int], ...] = ()
    padded: bool = False


_PLANS: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()


def known_plan(gmap: GradientMap) -> Plan | None:
    """What was found out of a model on batches of this kind."""
    return _PLANS.get(gmap.model, {}).get(_key(gmap))


def forget(model: nn.Module) -> None:
    """Let a model and its loss be tried out anew."""
    _PLANS.pop(model, None)


def _key(gmap: GradientMap) -> object:
    return tuple(gmap.parameters), code_of(gmap.loss_fn), tuple(sorted(gmap.batch))


def plan_of(gmap: GradientMap, samples: int) -> tuple[Plan, Tensor]:
    """The plan, and the weights of this batch's samples."""
    plan = known_plan(gmap)
    if plan is None:
        plan = _try_out(gmap, samples, _RULES)
    weights = [_weights(rule, gmap.batch) for rule in plan.rules]
    agree = _agree(weights)  # if not, the first batches had as many tokens in every row
    if not agree or (not plan.reason and _has_untried(plan, gmap.batch)):
        again = _try_out(gmap, samples, plan.rules, plan.labels)
        modules = again.modules | plan.modules if agree else again.modules
        plan = again._replace(modules=modules, padded=plan.padded)
        weights = [_weights(rule, gmap.batch) for rule in plan.rules]
    if not plan.padded:
        plan = plan._replace(padded=_try_padding(gmap, samples))
    if gmap.replay.recomputes():
        plan = plan._replace(reason="activation checkpointing runs layers a second time")
    if plan.reason:
        logger.warning_once(
            f"{type(gmap.model).__name__}: {plan.reason}, so each sample's gradient takes a pass "
            "of its own. Freeze or withhold what stands in the way for one pass per batch."
        )
    _PLANS.setdefault(gmap.model, {})[_key(gmap)] = plan
    device = next(iter(gmap.parameters.values())).device
    return plan, weights[0].to(device)


def _try_out(
    gmap: GradientMap,
    samples: int,
    rules: tuple[str, ...],
    labels: tuple[frozenset[int], ...] = (),
) -> Plan:
    """Compares a few samples together with each by itself, without dropout."""
    chosen = _to_try(gmap.batch, labels)
    batch = rows_of(gmap.batch, chosen, samples)
    labels = _joined(labels, frozenset().union(*_labels(batch)))
    with _still(gmap, batch), gmap.replay.run(), gmap.replay.full_precision():
        whole = plain_gradient(gmap, batch)
        single = [plain_gradient(gmap, rows_of(gmap.batch, [row], samples)) for row in chosen]
        size = sum(float(_norm(each)) for each in single) / len(chosen)
        tolerance = size * _tolerance(gmap) + 1e-30
        fitting = []
        for rule in rules:
            weights = _weights(rule, batch)
            off = {
                n: g - sum(float(w) * each[n] for w, each in zip(weights, single, strict=True))
                for n, g in whole.items()
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
        weights = _weights(fitting[0], batch)
        try:
            shares = listen(gmap, batch, len(chosen))
            reason = _wrong(gmap, shares, single, weights, tolerance)
        except NotApartError as error:
            return Plan(tuple(fitting), str(error))
        except RuntimeError as error:  # a module that takes no copies, or is not vectorized
            why = str(error).splitlines()[0]
            return Plan(tuple(fitting), f"a module is not differentiated by rows ({why})")
    return Plan(tuple(fitting), reason, frozenset(shares), labels)


def _try_padding(gmap: GradientMap, samples: int) -> bool:
    """Whether there is a padded text, whose gradient is then seen to be what it is without padding.

    Raises:
        NotImplementedError: If it is not.
    """
    real = real_tokens(gmap.model, gmap.batch)
    if real is None or (row := most_padded(real, count_items(gmap.batch, True) > 0)) is None:
        return False
    alone = rows_of(gmap.batch, [row], samples)
    with _still(gmap, alone), gmap.replay.run(), gmap.replay.full_precision():
        one = plain_gradient(gmap, alone)
        other = plain_gradient(gmap, shorter(gmap.model, alone, real[row : row + 1]))
    apart = _norm({name: one[name] - other[name] for name in one})
    if float(apart) > float(_norm(other)) * _tolerance(gmap) + 1e-30:
        raise NotImplementedError(f"{type(gmap.model).__name__} {READ}")
    return True


def _to_try(batch: Mapping[str, Any], labels: tuple[frozenset[int], ...]) -> list[int]:
    """Rows whose labels were not tried beside each other, then those of most and of fewest items
    that count.
    """
    items, values = count_items(batch, True), _labels(batch)
    order = [k for k in items.argsort(descending=True, stable=True).tolist() if items[k] > 0]
    chosen = order[:1] or [0]
    seen = values[chosen[0]] if values else frozenset()
    for row in order if values else []:
        if len(chosen) < TRIED - 1 and not values[row] <= seen.union(*_joined(labels, seen)[-1:]):
            chosen.append(row)
            seen |= values[row]
    rest = [row for row in order if row not in chosen]
    return sorted({*chosen, *rest[: TRIED - 1 - len(chosen)], *order[-1:]})


def _labels(batch: Mapping[str, Any]) -> list[frozenset[int]]:
    """Each row's label values; nothing where labels are no classes."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return []
    rows = labels.reshape(len(labels), -1).tolist()
    return [frozenset(row) - {-100} for row in rows]


def _joined(labels: tuple[frozenset[int], ...], more: frozenset[int]) -> tuple[frozenset[int], ...]:
    """Values that were tried beside each other, also by way of others."""
    met = more.union(*(group for group in labels if group & more))
    return (*(group for group in labels if not group & more), *([met] if more else []))


def _has_untried(plan: Plan, batch: Mapping[str, Any]) -> bool:
    """Whether a batch has labels that were not tried beside each other."""
    if sum(map(len, plan.labels)) > CLASSES:
        return False
    values = frozenset().union(*_labels(batch))
    return len(values) > 1 and not any(values <= group for group in plan.labels)


def _wrong(
    gmap: GradientMap,
    shares: Mapping[str, Share],
    single: list[Tensors],
    weights: Tensor,
    tolerance: float,
) -> str:
    """Where samples' shares are not what they are by themselves; nothing if they are."""
    norms = norms_of(shares)
    for row, (each, weight) in enumerate(zip(single, weights.tolist(), strict=True)):
        alone = torch.zeros_like(norms)
        alone[row] = 1
        found = total_of(gmap.parameters, shares, alone)
        off = {name: found[name] - weight * g for name, g in each.items()}
        wrong = abs(float(norms[row]) - weight * float(_norm(each)))
        if max(float(_norm(off)), wrong) > tolerance * float(weights.max()):
            worst = max(off, key=lambda name: float(off[name].norm()))
            return f"samples cannot be told apart in {worst}"
    return ""


@contextmanager
def _still(gmap: GradientMap, batch: Mapping[str, Any]) -> Iterator[None]:
    """Without dropout. Modules of a model's own code stay as they are, since what they do to a
    batch in training may be something else, unless they draw at random.
    """
    with modes_kept(gmap.model) as parts:
        for part in parts:
            part.training = part.training and not _is_of_a_library(part)
        own = [part for part in parts if part.training]
        kept = [(b, b.clone()) for part in own for b in part.buffers(recurse=False)]
        try:
            if own:
                with gmap.replay.run():
                    one, other = plain_gradient(gmap, batch), plain_gradient(gmap, batch)
                apart = _norm({name: one[name] - other[name] for name in one})
                if not float(apart) <= _tolerance(gmap) * float(_norm(one)):
                    gmap.model.eval()
            yield
        finally:
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _is_of_a_library(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("torch", "transformers", "peft")


def norms_of(shares: Mapping[str, Share]) -> Tensor:
    return torch.stack([share.squares() for share in shares.values()]).sum(0).sqrt()


def total_of(
    parameters: Mapping[str, Tensor], shares: Mapping[str, Share], factors: Tensor
) -> Tensors:
    """Σ_b factor_b · (what b adds): zeros for parameters that no sample adds to."""
    found: Tensors = {}
    for share in shares.values():
        for name, tensor in share.total(factors).items():
            found[name] = tensor
    for name, parameter in parameters.items():
        if name not in found:
            found[name] = wide(torch.zeros_like(parameter, requires_grad=False))
    return {name: found[name] for name in parameters}


def plain_gradient(gmap: GradientMap, batch: Mapping[str, Any]) -> Tensors:
    """Of a batch's mean loss; zeros if nothing in it counts."""
    if not bool(count_items(batch, False).any()):
        return {n: wide(torch.zeros_like(p)) for n, p in gmap.parameters.items()}
    loss = gmap.loss_fn(gmap.model, dict(batch))
    found = differentiate(loss, gmap.parameters)
    return {name: wide(tensor) for name, tensor in found.items()}


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


def _weights(rule: str, batch: Mapping[str, Any]) -> Tensor:
    items = count_items(batch, rule == "shifted tokens").double()
    if rule == "rows":
        items = (items > 0).double()
    return items / items.sum().clamp(min=1)


_RULES = ("rows", "tokens", "shifted tokens")


def _agree(weights: list[Tensor]) -> bool:
    return all(torch.allclose(weights[0], other) for other in weights[1:])


def rows_of(batch: Mapping[str, Any], rows: list[int], samples: int) -> dict[str, Any]:
    """Some rows of a batch."""
    found: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim():
            if len(value) != samples:
                raise NotImplementedError(
                    f"{key!r} of a batch has {len(value)} entries where the batch has {samples} "
                    "rows, so a sample cannot be taken out. Return one entry per row from the "
                    "collator."
                )
            found[key] = value[rows]
        elif isinstance(value, list | tuple) and len(value) == samples:
            found[key] = [value[row] for row in rows]
        else:
            found[key] = value
    return found


def _tolerance(gmap: GradientMap) -> float:
    """Of comparisons, by what arithmetic can tell: half precision, and a GPU's TF32."""
    parameters = [p for p in gmap.model.parameters() if p.is_floating_point()]
    if any(torch.finfo(p.dtype).bits < 32 for p in parameters):
        return 0.1
    return 1e-4 if all(p.device.type == "cpu" for p in parameters) else 2e-3


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt()


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
