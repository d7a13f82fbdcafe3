"""Names of defenses, attacks and estimators, also of other packages, and what they stand for.

A name stands for a class as `"module:Class"`, so that listing names imports nothing. What other
packages install under an entry point group is found beside the built-in names:

    [project.entry-points."hf_gradguard.defenses"]
    my_defense = "my_package.defense:MyDefense"
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .sources import Description, describe

T = TypeVar("T")


def need(room: str, extra: str, *modules: str) -> None:
    """Say what to install where something is missing that a room of the package cannot do without.

    Args:
        room: Of the package.
        extra: Of the package's installation, which brings the modules.
        *modules: As they are imported.

    Raises:
        ImportError: With what is missing, and the command.

    Example:
        >>> need("attacks", "attacks", "numpy", "no_such_module")
        Traceback (most recent call last):
        ImportError: hf_gradguard.attacks needs no_such_module, which is not installed: ...
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"hf_gradguard.{room} needs {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'hf-gradguard[{extra}]'"
        )


class UnknownNameError(ValueError, KeyError):
    """A name that nothing is registered under."""

    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class Registry(MutableMapping[str, T]):
    """Names and what they stand for, which is imported when it is first asked for.

    Args:
        kind: What they are, for errors: "defense", "attack" or "estimator".
        builtin: `{name: "module:attribute"}` of this package.

    Example:
        >>> from hf_gradguard import DEFENSES
        >>> list(DEFENSES)[:3]
        ['none', 'gaussian_noise', 'laplace_noise']
        >>> DEFENSES["pruning"].__name__
        'Pruning'
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.group = kind, f"hf_gradguard.{kind}s"
        self._builtin, self._added = dict(builtin), dict[str, T]()

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        own = {name: EntryPoint(name, value, self.group) for name, value in self._builtin.items()}
        # A built-in name cannot be taken over: who asks for it gets what the documents describe.
        return own | {p.name: p for p in entry_points(group=self.group) if p.name not in own}

    def __getitem__(self, name: str) -> T:
        """What a name stands for.

        Raises:
            UnknownNameError: A `ValueError` that lists the names.
            ImportError: If another package's cannot be imported, naming that package.
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
        """The distribution that brings a name; `None` if it is this one, or this process."""
        point = self._points.get(name)
        return point.dist.name if point is not None and point.dist is not None else None

    def describe(self, name: str) -> Description:
        """A summary and the settings of a class, read from its source: nothing is imported."""
        if name in self._added:
            value = self._added[name]
            return describe(f"{value.__module__}:{value.__qualname__}")  # type: ignore[attr-defined]
        return describe(self._points[name].value)


def make(
    registry: Registry[type[T]],
    name: str,
    settings: Mapping[str, Any],
    refused: Mapping[str, str] | None = None,
) -> T:
    """`registry[name](**settings)`, with errors that list what there is.

    Args:
        registry: Of classes, dataclasses of their settings.
        name: One of its names.
        settings: Fields of that class.
        refused: Settings that some classes do not have for a reason, with the reason.

    Raises:
        ValueError: For an unknown name.
        TypeError: For an unknown setting.
    """
    found = registry[name]
    known = [field.name for field in fields(found) if field.init]  # type: ignore[arg-type]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        reasons = refused or {}
        if setting := next((setting for setting in unknown if setting in reasons), None):
            raise TypeError(f"{name} has no setting {setting}: {reasons[setting]}.")
        has = f"It has: {', '.join(known)}." if known else "It has none."
        raise TypeError(f"{name} has no setting {', '.join(unknown)}. {has}")
    return found(**settings)


DEFENSES: Registry[Any] = Registry(
    "defense",
    {
        "none": "hf_gradguard.defenses.none:NoDefense",
        "gaussian_noise": "hf_gradguard.defenses.noise:GaussianNoise",
        "laplace_noise": "hf_gradguard.defenses.noise:LaplaceNoise",
        "optimal_noise": "hf_gradguard.defenses.noise:OptimalNoise",
        "dp_sgd": "hf_gradguard.defenses.dp:DPSGD",
        "optimal_dp_sgd": "hf_gradguard.defenses.dp:OptimalDPSGD",
        "pruning": "hf_gradguard.defenses.pruning:Pruning",
        "optimal_pruning": "hf_gradguard.defenses.pruning:OptimalPruning",
        "quantization": "hf_gradguard.defenses.quantization:Quantization",
        "soteria": "hf_gradguard.defenses.soteria:Soteria",
        "refiner": "hf_gradguard.defenses.refiner.defense:Refiner",
    },
)
ATTACKS: Registry[Any] = Registry(
    "attack",
    {
        "dlg": "hf_gradguard.attacks.matching.attacks:DLG",
        "idlg": "hf_gradguard.attacks.matching.attacks:IDLG",
        "inverting_gradients": "hf_gradguard.attacks.matching.attacks:InvertingGradients",
        "inverting_gradients_published": (
            "hf_gradguard.attacks.matching.attacks:InvertingGradientsPublished"
        ),
        "deep_image_prior": "hf_gradguard.attacks.matching.attacks:DeepImagePrior",
        "grad_inversion": "hf_gradguard.attacks.matching.attacks:GradInversion",
        "tag": "hf_gradguard.attacks.matching.attacks:Tag",
        "lamp": "hf_gradguard.attacks.matching.attacks:Lamp",
        "span": "hf_gradguard.attacks.span.attack:Span",
        "embedding_rows": "hf_gradguard.attacks.embedding_rows:EmbeddingRows",
        "candidates": "hf_gradguard.attacks.candidates.attack:Candidates",
        "analytic": "hf_gradguard.attacks.analytic:Analytic",
    },
)
ESTIMATORS: Registry[Any] = Registry(
    "estimator",
    {
        "i2f_lower_bound": "hf_gradguard.leakage.estimators:I2FLowerBound",
        "dfil_bound": "hf_gradguard.leakage.estimators:DFILBound",
    },
)
