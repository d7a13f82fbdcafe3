"""What was found out about a model by trial. It is kept as long as the model lives."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class KnownTables:
    """The tables that the input indexes; see `parameters.find_tables`.

    Args:
        parameter_names: Of the model when it was watched. Other names make the rest untrue.
        watched_entries: The kinds of batches that it was watched on, by their entries' names.
        names: The parameters that are tables.
    """

    parameter_names: tuple[str, ...] = ()
    watched_entries: set[frozenset[str]] = field(default_factory=set)
    names: frozenset[str] = frozenset()


class DifferencePlan(NamedTuple):
    """How derivatives are taken as differences of two passes; see `sensitivity.plan_differences`.

    Args:
        split_layers: The layers whose samples are known apart.
        error: How much differences over two steps differ, relative to them.
        shrink: Of the step.
        shift_error: As `error`, of steps in the parameters; `None` if not tried yet.
    """

    split_layers: frozenset[str]
    error: float
    shrink: float = 1.0
    shift_error: float | None = None


class SamplePlan(NamedTuple):
    """How a model's samples are told apart; see `per_sample.plan.plan_samples`.

    Args:
        rules: The rules that give samples' weights in the loss; all of them agreed so far.
        reason: Why samples are differentiated one by one; empty if together.
        modules: Those that ran in the trial. Others (an expert without tokens) were not tried.
        labels: Label values that were tried beside each other.
        padded: Checksums of padded texts that were compared with themselves without padding.
    """

    rules: tuple[str, ...]
    reason: str = ""
    modules: frozenset[str] = frozenset()
    labels: tuple[frozenset[int], ...] = ()
    padded: frozenset[int] = frozenset()


@dataclass
class ModelCache:
    """What is known of one model.

    Args:
        tables: Which parameters the input indexes.
        difference_plans: By kind of batch, with how often each was used.
        sample_plans: By kind of batch.
        shared_parameters: What they were found of last, those that are trainable (held, so that no
            other tensor gets their identity), and those that are shared.
    """

    tables: KnownTables = field(default_factory=KnownTables)
    difference_plans: dict[Hashable, tuple[DifferencePlan, int]] = field(default_factory=dict)
    sample_plans: dict[Hashable, SamplePlan] = field(default_factory=dict)
    shared_parameters: tuple[Hashable, dict[str, nn.Parameter], dict[str, nn.Parameter]] | None = (
        None
    )

    def tables_of(self, parameter_names: tuple[str, ...]) -> KnownTables:
        """What is known of a model with these parameters: nothing, if it had others."""
        if self.tables.parameter_names != parameter_names:
            self.tables = KnownTables(parameter_names)
        return self.tables


_CACHES: WeakKeyDictionary[nn.Module, ModelCache] = WeakKeyDictionary()


def cache_of(model: nn.Module) -> ModelCache:
    """The one cache of a model, empty at first.

    Example:
        >>> cache_of(model) is cache_of(model)
        True
    """
    if model not in _CACHES:
        _CACHES[model] = ModelCache()
    return _CACHES[model]


def forget(model: nn.Module) -> None:
    """Try everything out anew, as another loss makes it untrue. Tables that were found stay found:
    other ranks may know them.

    Example:
        >>> forget(model)
    """
    cache = cache_of(model)
    cache.tables.watched_entries.clear()
    cache.difference_plans.clear()
    cache.sample_plans.clear()
