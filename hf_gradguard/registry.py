"""Registries of defenses, attacks and estimators by name, also those of other packages.

A name stands for a class as `"module:Class"`, so that listing names imports nothing. What other
packages install under an entry point group is found beside the built-in names:

    [project.entry-points."hf_gradguard.defenses"]
    my_defense = "my_package.defense:MyDefense"
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """A description of a class, as it is listed.

    Args:
        summary: The first paragraph of its docstring.
        settings: The class's settings with their defaults as text; `None` for a setting without a
            default.
    """

    summary: str
    settings: dict[str, str | None]


class UnknownNameError(ValueError, KeyError):
    """An error: nothing is registered under this name."""

    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class Registry(MutableMapping[str, T]):
    """A mapping of names to what they stand for, which is imported when it is first asked for.

    Args:
        kind: The word for an entry in errors: "defense", "attack" or "estimator".
        builtin: This package's entries, `{name: "module:attribute"}`.
        refused: Settings that some entries lack for a reason, with the reason.

    Example:
        >>> from hf_gradguard import DEFENSES
        >>> list(DEFENSES)[:3]
        ['none', 'gaussian_noise', 'laplace_noise']
        >>> DEFENSES["pruning"].__name__
        'Pruning'
    """

    def __init__(
        self, kind: str, builtin: Mapping[str, str], refused: Mapping[str, str] | None = None
    ) -> None:
        self.kind, self.group, self.refused = kind, f"hf_gradguard.{kind}s", dict(refused or {})
        self._builtin, self._added = dict(builtin), dict[str, T]()

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        own = {name: EntryPoint(name, value, self.group) for name, value in self._builtin.items()}
        # A built-in name cannot be taken over: who asks for it gets what the documents describe.
        return own | {p.name: p for p in entry_points(group=self.group) if p.name not in own}

    def __getitem__(self, name: str) -> T:
        """Return what a name stands for.

        Raises:
            UnknownNameError: If nothing is registered under the name; the message lists the names.
            ImportError: If another package's entry cannot be imported; the message names that
                package.
        """
        if name in self._added:
            return self._added[name]
        if name not in self._points:
            near = difflib.get_close_matches(str(name), list(self), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(
                f"There is no {self.kind} {name!r}.{hint} The names are: {', '.join(self)}."
            )
        try:
            found: T = self._points[name].load()
        except (ImportError, AttributeError) as error:
            if name in self._builtin:
                raise
            raise ImportError(
                f"The {self.kind} {name!r} of {self.package(name)} ({self._points[name].value}) "
                f"cannot be imported: {error}"
            ) from error
        return found

    def __setitem__(self, name: str, value: T) -> None:
        """Register a class in this process, as a notebook does. Packages use entry points."""
        self._added[name] = value

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._points | self._added)

    def __len__(self) -> int:
        return len(self._points | self._added)

    def package(self, name: str) -> str | None:
        """Return the distribution that brings a name; `None` for this one, or this process."""
        point = self._points.get(name)
        return point.dist.name if point is not None and point.dist is not None else None

    def describe(self, name: str) -> Description:
        """Return a summary and the settings of what a name stands for.

        Raises:
            ImportError: If this package's own cannot be imported, for lack of an extra. Another
                package's is described as what cannot be imported.
        """
        try:
            kind: Any = self[name]
        except ImportError as error:
            if name in self._builtin:
                raise
            return Description(str(error), {})
        summary = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        settings = {
            field.name: None if field.default in (MISSING, None) else repr(field.default)
            for field in (fields(kind) if is_dataclass(kind) else ())
            if field.init
        }
        return Description(summary, settings)


def make(registry: Registry[type[T]], name: str, settings: Mapping[str, Any]) -> T:
    """Return `registry[name](**settings)`, with errors that list the names and the settings.

    Args:
        registry: A registry of dataclasses, whose fields are their settings.
        name: One of its names.
        settings: Values of that class's fields.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If a setting is unknown.
    """
    kind = registry[name]
    settings_of_kind = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    unknown = sorted(settings.keys() - set(settings_of_kind))
    if unknown:
        if setting := next((setting for setting in unknown if setting in registry.refused), None):
            raise TypeError(f"{name} has no setting {setting}: {registry.refused[setting]}.")
        has = f"It has: {', '.join(settings_of_kind)}." if settings_of_kind else "It has none."
        raise TypeError(f"{name} has no setting {', '.join(unknown)}. {has}")
    return kind(**settings)


# --- the names

DEFENSES: Registry[Any] = Registry(
    "defense",
    {
        "none": "hf_gradguard.defenses.base:NoDefense",
        "gaussian_noise": "hf_gradguard.defenses.noise:GaussianNoise",
        "laplace_noise": "hf_gradguard.defenses.noise:LaplaceNoise",
        "optimal_noise": "hf_gradguard.defenses.noise:OptimalNoise",
        "dp_sgd": "hf_gradguard.defenses.dp:DPSGD",
        "optimal_dp_sgd": "hf_gradguard.defenses.dp:OptimalDPSGD",
        "pruning": "hf_gradguard.defenses.pruning:Pruning",
        "optimal_pruning": "hf_gradguard.defenses.pruning:OptimalPruning",
        "quantization": "hf_gradguard.defenses.quantization:Quantization",
        "soteria": "hf_gradguard.defenses.soteria:Soteria",
        "gradient_sketch": "hf_gradguard.defenses.sketch:GradientSketch",
        "refiner": "hf_gradguard.defenses.refiner.defense:Refiner",
        "refiner_published": "hf_gradguard.defenses.refiner.defense:RefinerPublished",
        "optimal_noise_published": "hf_gradguard.defenses.noise:OptimalNoisePublished",
        "optimal_pruning_published": "hf_gradguard.defenses.pruning:OptimalPruningPublished",
        "optimal_dp_sgd_published": "hf_gradguard.defenses.dp:OptimalDPSGDPublished",
    },
    refused={
        "error_feedback": "it shares the true gradient, or that with independent noise, which "
        "averages out over messages by itself. Fed back, each message would take back the noise "
        "of the one before, and their sum would show the sum of the gradients"
    },
)
ATTACKS: Registry[Any] = Registry(
    "attack",
    {
        "dlg": "hf_gradguard.attacks.matching.matching_attacks:DLG",
        "idlg": "hf_gradguard.attacks.matching.matching_attacks:IDLG",
        "inverting_gradients": "hf_gradguard.attacks.matching.matching_attacks:InvertingGradients",
        "inverting_gradients_published": (
            "hf_gradguard.attacks.matching.matching_attacks:InvertingGradientsPublished"
        ),
        "deep_image_prior": "hf_gradguard.attacks.matching.matching_attacks:DeepImagePrior",
        "grad_inversion": "hf_gradguard.attacks.matching.matching_attacks:GradInversion",
        "tag": "hf_gradguard.attacks.matching.matching_attacks:Tag",
        "lamp": "hf_gradguard.attacks.matching.matching_attacks:Lamp",
        "span": "hf_gradguard.attacks.span.span:Span",
        "embedding_rows": "hf_gradguard.attacks.embedding_rows:EmbeddingRows",
        "candidates": "hf_gradguard.attacks.candidates.membership:Candidates",
        "likelihood_search": "hf_gradguard.attacks.likelihood_search.search:LikelihoodSearch",
        "learned_inversion": "hf_gradguard.attacks.learned_inversion:LearnedInversion",
        "analytic": "hf_gradguard.attacks.analytic:Analytic",
    },
)
ESTIMATORS: Registry[Any] = Registry(
    "estimator",
    {
        "i2f_lower_bound": "hf_gradguard.leakage.influence:I2FLowerBound",
        "dfil_bound": "hf_gradguard.leakage.fisher:DFILBound",
        "bayesian_bound": "hf_gradguard.leakage.fisher:BayesianBound",
        "label_bound": "hf_gradguard.leakage.labels:LabelBound",
    },
)
