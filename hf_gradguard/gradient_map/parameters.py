"""The parameters whose gradient a client shares, and those that would give a batch away."""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import logging

from .domain import domain_of_model
from .lookups import scan
from .replay import ModuleState
from .types import Batch, LossFunction, Shards

logger = logging.get_logger(__name__)


def shared_parameters(
    model: nn.Module, share_input_embeddings: bool = False, withhold: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters whose gradient a client shares, by name, in model order.

    Tables that the input indexes are left out unless `share_input_embeddings`: their gradient is
    non-zero on exactly the rows that the batch looks up, so sharing it gives the words away
    whatever else is done. They are the model's token embeddings and what `find_tables` found. An
    output head tied to one is the same tensor, and is withheld with it. A warning says so once.

    Args:
        model: The model.
        share_input_embeddings: Share these tables all the same.
        withhold: Patterns of names (`"*.experts.*"`) that are left out in any case.

    Raises:
        ValueError: If nothing is left to share, or a pattern is of no parameter.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    cache = cache_of(model)
    # Of a step's messages all but the first have the same answer. Whoever freezes or swaps a
    # parameter in between asks something else.
    question = share_input_embeddings, tuple(withhold), cache.tables.names, tuple(trainable)
    known_question, asked_of, shared = cache.shared_parameters or (None, {}, {})
    if question != known_question or any(asked_of[n] is not p for n, p in trainable.items()):
        shared = _find_shared(model, trainable, share_input_embeddings, withhold)
        cache.shared_parameters = question, trainable, shared
    return dict(shared)


def _find_shared(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    share_input_embeddings: bool,
    withhold: Sequence[str],
) -> dict[str, nn.Parameter]:
    tables = {} if share_input_embeddings else withheld_parameters(model)
    chosen = withheld_by_name(model, withhold)
    shared = {n: p for n, p in trainable.items() if n not in tables and n not in chosen}
    if not shared:
        raise ValueError(
            "There is no gradient to share: every trainable parameter is an input embedding, and "
            "those are withheld."
            if trainable and not chosen
            else "There is no gradient to share: every trainable parameter is withheld."
            if trainable
            else "There is no gradient to share: every parameter of the model is frozen "
            "(`requires_grad=False`)."
        )
    if _is_first_rank():
        embeddings = _token_embeddings(model)
        _say_withheld(tables, {name for name in tables if trainable[name] in embeddings})
        if chosen:
            logger.warning_once(f"Withheld as told: {', '.join(chosen)}.")
    return shared


def withheld_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Return trainable parameters of the tables that the input indexes.

    Each name comes with all the names of the same tensor. They are those of the token embeddings,
    by name, and those that `find_tables` found. An adapter of a table is withheld with it.
    """
    tables = _token_embeddings(model)
    modules = dict(model.named_modules())
    for name in known_tables(model):
        tables.add(model.get_parameter(name))
        owner = name.rpartition(".")[0]
        path = owner.split(".")
        for length in range(1, len(path) + 1):
            wrapper = modules[".".join(path[:length])]
            if hasattr(wrapper, "base_layer"):  # as PEFT calls what an adapter is put around
                tables |= set(wrapper.parameters())
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in tables and parameter.requires_grad:
            aliases.setdefault(parameter, []).append(name)
    return {names[0]: names for names in aliases.values()}


def withheld_by_name(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return trainable parameters that a pattern names.

    Raises:
        ValueError: If a pattern is of none of the model's parameters.
    """
    if not patterns:
        return []
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(all_names, pattern):
            raise ValueError(
                f"withhold={pattern!r} names no parameter of {type(model).__name__}. Its last are: "
                f"{', '.join(all_names[-4:])}. `*` stands for anything."
            )
    return [
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def find_tables(
    model: nn.Module, batch: Batch, loss_fn: LossFunction, shards: Shards | None = None
) -> frozenset[str]:
    """Find the parameters that are looked up by what is in the input, frozen ones included.

    It runs the model twice without gradients, in eval mode, the first time that it sees a batch of
    these entries; the answer is kept with the model. Buffers, weights, modes, random draws and
    hooks do not change.

    Args:
        model: The model, on the batch's device.
        batch: A batch, as a collator returns it.
        loss_fn: The loss `(model, batch) -> loss`, which runs the model.
        shards: The client's devices, as for `GradientMap`.

    Returns:
        Names as in `named_parameters()`; for a tensor with several names, the first. They are all
            that were found for this model so far, also on other batches.

    Example:
        >>> sorted(find_tables(model, batch, lambda model, batch: model(**batch).loss))
        ['bert.embeddings.word_embeddings.weight']
    """
    tables = cache_of(model).tables_of(tuple(name for name, _ in model.named_parameters()))
    is_new = frozenset(batch) not in tables.watched_entries
    if shards is not None:  # all devices run the model, or none
        is_new = shards.any(is_new)
    if is_new:
        state = ModuleState(model, only_buffers=shards is not None)
        names = scan(model, batch, loss_fn, shards)
        state.restore()
        tables.names |= names if shards is None else shards.union(names)
        tables.watched_entries.add(frozenset(batch))
    return tables.names


def check_sharding(model: nn.Module, shards: Shards | None, second_order: bool) -> None:
    """Check that a map can be made of a model that may be sharded.

    Raises:
        NotImplementedError: If a sharded model comes without its shards, or with `second_order`;
            the message has the way out.

    Example:
        >>> check_sharding(nn.Linear(2, 2), None, second_order=True)
    """
    if shards is None and is_sharded(model):
        raise NotImplementedError(
            "No device holds all of a sharded model's gradient. hf_gradguard.protect protects it "
            "shard by shard; what asks for a GradientMap works where each rank holds the whole "
            "model."
        )
    if shards is not None and second_order:
        raise NotImplementedError(
            "Second derivatives of a sharded model: the backward pass of fully_shard reduces "
            "gradients, and leaves no graph of them. What needs them (soteria, refiner, and "
            "sensitivities of models with kinks such as ReLU) works where each rank holds the "
            "whole model."
        )


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard`, or something else, has cut a model's parameters.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return True
    # By name: importing torch.distributed.fsdp takes its time. Between passes fully_shard may hold
    # whole parameters, so they alone do not tell.
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in kinds)


def known_tables(model: nn.Module) -> frozenset[str]:
    """Return what `find_tables` found for this model so far, without looking.

    Example:
        >>> known_tables(nn.Linear(2, 2))
        frozenset()
    """
    return cache_of(model).tables.names


def remember_tables(model: nn.Module, tables: frozenset[str]) -> None:
    """Add parameters that others found to a model's tables: ranks have to share the same.

    Example:
        >>> remember_tables(model, frozenset({"classifier.bias"}))
        >>> "classifier.bias" in known_tables(model)
        True
    """
    known_tables_of_model = cache_of(model).tables
    known_tables_of_model.parameter_names = tuple(name for name, _ in model.named_parameters())
    known_tables_of_model.names |= tables


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the layer that each parameter belongs to: 1 for the layers nearest the input.

    Hugging Face models number their blocks (`bert.encoder.layer.3.…`, `transformer.h.3.…`). Each
    block is a layer, and so is what stands together before, between and after blocks: embeddings,
    poolers, the head. Of a model without numbered blocks every module is a layer. Names are taken
    in the order given, which is the order in which the model defines its parts; an
    encoder-decoder's decoder so follows its encoder.

    Args:
        names: Parameter names, as `model.named_parameters()` lists them.

    Example:
        >>> names = ["embed.weight", "layer.0.weight", "layer.0.bias", "layer.1.bias", "head.bias"]
        >>> list(layer_numbers(names).values())
        [1, 2, 2, 3, 4]
    """
    names = list(names)
    blocks = {name: _block(name) for name in names}
    if not any(blocks.values()):
        blocks = {name: name.rpartition(".")[0] for name in names}
    numbers: dict[str, int] = {}
    number, previous = 0, None
    for name in names:
        if blocks[name] != previous or not numbers:
            number, previous = number + 1, blocks[name]
        numbers[name] = number
    return numbers


def _block(name: str) -> str:
    """The name through its first number, or nothing if it has none."""
    path = name.split(".")
    for index, segment in enumerate(path):
        if segment.isdigit():
            return ".".join(path[: index + 1])
    return ""


def _token_embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the modules that a model calls its token embeddings."""
    modules = domain_of_model(model).token_embeddings(model)
    return {p for module in modules for p in module.parameters()}


def _say_withheld(tables: Mapping[str, list[str]], embeddings: set[str]) -> None:
    """Once for the token embeddings, and once for other tables."""
    for which, why in (
        (tables.keys() & embeddings, "Its gradient alone would list the batch's words."),
        (tables.keys() - embeddings, "The input says which rows of it are looked up, and its "
         "gradient is non-zero on exactly these."),
    ):  # fmt: skip
        names = sorted({alias for name in which for alias in tables[name]})
        tied = (
            " The output head is the same tensor, so it is not trained either."
            if len(names) > len(which)
            else ""
        )
        if names:
            logger.warning_once(
                f"Withheld, neither shared nor trained: {', '.join(names)}. {why}{tied} Set "
                "share_input_embeddings=True to share it all the same."
            )


def _is_first_rank() -> bool:
    return (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not torch.distributed.get_rank()
    )


# --- what was found out about a model by trial: kept as long as the model lives


@dataclass
class KnownTables:
    """The tables that the input indexes; see `parameters.find_tables`.

    Args:
        parameter_names: Names of the model's parameters when it was watched. Other names make the
            rest untrue.
        watched_entries: The kinds of batches that it was watched on, by their entries' names.
        names: The parameters that are tables.
    """

    parameter_names: tuple[str, ...] = ()
    watched_entries: set[frozenset[str]] = field(default_factory=set)
    names: frozenset[str] = frozenset()


class DifferencePlan(NamedTuple):
    """A plan by which derivatives are taken as differences of two passes.

    `sensitivity.plan_differences` makes it.

    Args:
        split_layers: The layers whose samples are known apart.
        error: How much differences over two steps differ, relative to them.
        shrink: The factor that the usual step is multiplied by.
        shift_error: The `error` of steps in the parameters; `None` if these were not tried yet.
        keeps_pattern: Whether derivatives jump, and passes keep every unit on its side.
    """

    split_layers: frozenset[str]
    error: float
    shrink: float = 1.0
    shift_error: float | None = None
    keeps_pattern: bool = False


LabelGroups = Mapping[str, tuple[frozenset[Hashable], ...]]
"""Values of labels, by entry of a batch, in groups of which each was tried beside each other."""


class SamplePlan(NamedTuple):
    """A plan by which a model's samples are told apart; see `per_sample.clipping`.

    Args:
        rules: The rules that give samples' weights in the loss; all of them agreed so far.
        reason: Why samples are differentiated one by one; empty if together.
        modules: The modules that ran in the trial. Other modules, such as an expert without tokens,
            were not tried.
        labels: Values of labels that were tried beside each other, by entry of a batch.
        padded: Checksums of padded texts that were compared with themselves without padding.
        shapes: The shapes, in the first batch, of rows whose padding no mask shows.
        coarse: Why numbers have fewer digits than those of float32; empty if they do not.
        uses: How many messages were made by it.
        is_of_unlike_rows: Whether rows that were tried beside each other differed.
    """

    rules: tuple[str, ...]
    reason: str = ""
    modules: frozenset[str] = frozenset()
    labels: LabelGroups = {}
    padded: frozenset[int] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = {}
    coarse: str = ""
    uses: int = 0
    is_of_unlike_rows: bool = False


@dataclass
class ModelCache:
    """A cache holds what is known of one model.

    Args:
        tables: Which parameters the input indexes.
        difference_plans: The plans of differences by kind of batch, each with how often it was
            used.
        sample_plans: The plans of how samples are separated, by kind of batch.
        shared_parameters: What was asked of them last, those that are trainable, and those that
            are shared.
        is_underway: Whether messages left before anything was found out here, as of a run that is
            gone on with: a refusal would tell of a row.
    """

    is_underway: bool = False
    tables: KnownTables = field(default_factory=KnownTables)
    difference_plans: dict[Hashable, tuple[DifferencePlan, int]] = field(default_factory=dict)
    sample_plans: dict[Hashable, SamplePlan] = field(default_factory=dict)
    shared_parameters: tuple[Hashable, dict[str, nn.Parameter], dict[str, nn.Parameter]] | None = (
        None
    )

    def tables_of(self, parameter_names: tuple[str, ...]) -> KnownTables:
        """Return what is known of a model with these parameters: nothing, if it had others."""
        if self.tables.parameter_names != parameter_names:
            self.tables = KnownTables(parameter_names)
        return self.tables


_CACHES: WeakKeyDictionary[nn.Module, ModelCache] = WeakKeyDictionary()


def cache_of(model: nn.Module) -> ModelCache:
    """Return the one cache of a model, empty at first.

    Example:
        >>> cache_of(model) is cache_of(model)
        True
    """
    if model not in _CACHES:
        _CACHES[model] = ModelCache()
    return _CACHES[model]


def code_of(loss_fn: Any) -> object:
    """Return what identifies a loss function.

    Lambdas and partial functions are made anew for every step, of the same code.

    Example:
        >>> code_of(lambda model, batch: 0) is code_of(print)
        False
    """
    while hasattr(loss_fn, "func"):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__code__", type(loss_fn))


def forget(model: nn.Module) -> None:
    """Forget what was tried out, as another loss makes it untrue.

    Tables that were found stay found: other ranks may know them.

    Example:
        >>> forget(model)
    """
    cache = cache_of(model)
    cache.tables.watched_entries.clear()
    cache.difference_plans.clear()
    cache.sample_plans.clear()
