"""Audits from Python: their arguments, and defenses and attacks by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import Trainer
from transformers.utils import logging

from ..attacks import Attack
from ..attacks.analytic import is_readable
from ..data.samples import Sample
from ..defenses import Chain, Defense, chain
from ..gradient_map.domain import IMAGE, domain_of_model
from ..registry import ATTACKS, DEFENSES, make
from ..training.guards.hooks import check_free_of_hooks
from .cells import Audit, Cells
from .client import Modality, Shared, modality_of, training_of
from .message_loop import Setup, plain_settings, run
from .settings import AuditSettings
from .trainer_setup import set_up_trainer

logger = logging.get_logger(__name__)

DEFAULT_ATTACKS = {"text": "span", "image": "inverting_gradients"}
"""The attacks by domain, if none is named."""

Spec = str | Defense | Attack | Mapping[str, Any]
"""A defense or an attack: `"name"`, `"name:key=value,key=value"`, an object, or a mapping:
`{"name": {"key": value}}`, where a list of settings means several, or `{"label": object}`.
"""

Links = list[tuple[str, dict[str, Any]]]
"""Names with their settings: one pair, or for a chain its links in order."""

File = str | os.PathLike[str]
Metrics = File | Sequence[File] | Mapping[str, float]


@dataclass
class AuditRequest:
    """The arguments of an audit of a model or of a Trainer; see `audit`."""

    defenses: Spec | Sequence[Spec]
    attacks: Spec | Sequence[Spec] | None
    candidates: Sequence[Any] | None
    metrics: Metrics | None
    output: File
    settings: Mapping[str, Any]


def audit(
    model: nn.Module | Trainer | None = None,
    processing_class: Any = None,
    samples: Sequence[Sample] | int = 8,
    defenses: Spec | Sequence[Spec] = (),
    attacks: Spec | Sequence[Spec] | None = None,
    *,
    trainer: Trainer | None = None,
    candidates: Sequence[Any] | None = None,
    metrics: Metrics | None = None,
    output: File,
    **settings: Any,
) -> Audit:
    """Attack a model's shared gradients under each defense, and store and report the results.

    All defenses get the same samples, seeds and attack budgets. A client's message is the gradient
    of one batch, protected by itself, in the mode in which the model is. (`eval()` is without
    dropout: the attacker's best case.) Every finished cell is stored in `output/cells`, so an
    interrupted audit continues where it stopped. After every message `audit.json`, `table.md` and
    `report.html` in `output` are rewritten.

    Args:
        model: A model of texts or images with the head that it is trained with. It is not changed.
            Or a `GradGuardTrainer`, built and maybe trained: its model, in training mode, its data,
            collator, batches, loss, and its defense with what that remembers.
        processing_class: The model's tokenizer or image processor. `None` for an image model that
            takes pixels in [0, 1].
        samples: `(text or image, label)` each; images as PIL or bytes `(H, W)` or `(H, W, C)`. A
            label is a class id or name; a number; one 0 or 1 for each class; for a list of words a
            list of class ids; for a source text the target; `None` where the text is its own label.
            With a Trainer, how many rows to take of its data.
        defenses: Names with settings or objects, see `parse_specs`; each is a row.
        attacks: Names with settings or objects. Each also runs with what an attacker sets that
            knows the defense, where that makes a difference. Default: the strongest that is quick.
        trainer: A Trainer in place of the model.
        candidates: Texts, images or samples that an attacker has. They add the attack `candidates`,
            membership inference. A sample that is not among them has no rank. `[]` asks for none.
        metrics: The accuracy of a model that is trained under each defense, by the defense's label,
            or files of that, as the recipes write them: the report says the price; see
            `read_metrics`.
        output: The folder to write to. It holds private data afterwards.
        **settings: Fields of `AuditSettings`; others are a TypeError.

    Raises:
        ValueError: If a name is unknown, samples do not fill batches, or labels are no classes.
        OSError: If `output` cannot be written to. It is raised before any work.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [verdict.defense for verdict in summarize(result).verdicts]
        ['none', 'pruning']
    """
    if isinstance(model, Trainer):
        model, trainer = None, model
    request = AuditRequest(defenses, attacks, candidates, metrics, output, settings)
    if model is not None and trainer is None:
        return _audit_model(model, processing_class, samples, request)
    if model is None and trainer is not None:
        return _audit_trainer(trainer, processing_class, samples, request)
    raise ValueError("Give a model or a Trainer to audit, and not both.")


def _audit_model(
    model: nn.Module, processing_class: Any, samples: Sequence[Sample] | int, request: AuditRequest
) -> Audit:
    samples = _check_samples(samples)
    settings = AuditSettings.from_mapping(request.settings)
    size = settings.rows
    if len(samples) % size:
        raise ValueError(
            f"{len(samples)} samples do not fill messages of {size}: give a multiple of {size}, or "
            "another batch_size."
        )
    modality = modality_of(model, processing_class, settings)
    device = next(model.parameters()).device
    batches = [
        {name: tensor.to(device) for name, tensor in modality.batch(samples[i:][:size]).items()}
        for i in range(0, len(samples), size)
    ]
    local = training_of(settings)
    setup = Setup(
        model, modality, batches, _listed(modality, request.candidates),
        Shared(settings.share_input_embeddings, micro_batches=settings.accumulation, local=local),
        identity=[] if local is None else [str(local)],
    )  # fmt: skip
    return _audit(setup, settings, request, processing_class, {})


def _check_samples(samples: Any) -> Sequence[Sample]:
    """Refuse samples that are not pairs in a list.

    Raises:
        ValueError: If they are not; the message names the way out.
    """
    way_out = "Give the samples to audit: (text or image, label) each."
    if isinstance(samples, str) or not hasattr(samples, "__len__"):
        raise ValueError(f"samples is no list. {way_out}")
    if not len(samples):
        raise ValueError(f"samples is an empty list. {way_out}")
    for number, sample in enumerate(samples, 1):
        if isinstance(sample, str | Mapping) or not hasattr(sample, "__len__") or len(sample) != 2:
            raise ValueError(f"Sample {number} is no pair. {way_out}")
    pairs: Sequence[Sample] = samples
    return pairs


def _listed(modality: Modality, candidates: Any) -> list[Any] | None:
    """Return an attacker's list of candidates; an empty one asks for no membership inference."""
    rows = [] if candidates is None else list(candidates)
    return modality.candidates(rows) if rows else None


def _audit_trainer(
    trainer: Trainer, processing_class: Any, samples: Sequence[Sample] | int, request: AuditRequest
) -> Audit:
    if not isinstance(samples, int) or processing_class is not None:
        raise ValueError(
            "A Trainer has its own data and tokenizer: give the number of samples only."
        )
    training = trainer.model.training
    try:
        settings, setup, defense = set_up_trainer(
            trainer, samples, request.candidates, request.settings
        )
        trained = make_defenses([defense])
        setup.states = {label: defense.state_dict() for label, defense in trained.items()}
        return _audit(setup, settings, request, trainer.processing_class, trained)
    finally:
        trainer.model.train(training)


def _audit(
    setup: Setup,
    settings: AuditSettings,
    request: AuditRequest,
    processing_class: Any,
    trained: dict[str, Defense],
) -> Audit:
    """Run the audit of what was set up.

    Defenses in `trained` are prepared already, and remember.
    """
    if _has_hooks(setup.model):
        check_free_of_hooks(setup.model)
    attacks = request.attacks
    if attacks is None:
        attacks = default_attacks(setup.model, setup.batches[0])
    made_attacks, named = make_attacks(attacks), make_defenses(request.defenses)
    # `none` comes first, so that every table begins with what leaks without a defense.
    reference = make_defenses("none") if settings.reference else {}
    defenses = {**reference, **named, **trained}
    if not defenses or not (made_attacks or setup.candidates):
        raise ValueError(
            "An audit needs at least one defense and one attack: name them, or leave attacks out "
            "for those that are quick."
        )
    cells = Cells(Path(request.output) / "cells")
    for label, defense in defenses.items():
        if label not in trained:
            defense.prepare(setup.model, processing_class)
    metrics = read_metrics(request.metrics, defenses)
    return run(setup, settings, defenses, made_attacks, cells, metrics)


def _has_hooks(model: nn.Module) -> bool:
    """Return whether any hook sees gradients, on a parameter or a module, or on all modules."""
    kinds = "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
    places = *model.parameters(), *model.modules()
    is_on_one = any(getattr(place, kind, None) for place in places for kind in kinds)
    return is_on_one or bool(_has_any_global_hook())


def default_attacks(
    model: nn.Module, batch: Mapping[str, Tensor], attacks: Mapping[str, str] = DEFAULT_ATTACKS
) -> str:
    """Return the attacks of the model's domain, and on images `analytic` if it is applicable.

    Args:
        model: The model to attack.
        batch: A batch of the form of the messages to attack.
        attacks: Default attacks by domain.
    """
    domain = domain_of_model(model)
    # Closed-form recovery costs next to nothing, where the first layer allows it.
    reads_pixels = domain is IMAGE and is_readable(model, tuple(IMAGE.main_input(batch).shape))
    return attacks[domain.name] + (",analytic" if reads_pixels else "")


# --- defenses and attacks by name


def parse_specs(specs: Spec | Sequence[Spec]) -> dict[str, Links | Defense | Attack]:
    """Return named settings and objects by label, from all the ways they may be written.

    Args:
        specs: One or several of: `"tag:steps=500,restarts=2,span"` (a part without `=`, or with a
            `:`, begins the next one; `+` chains: `"pruning:ratio=0.9+gaussian_noise:scale=0.1"`), a
            `Defense` or `Attack`, or a mapping of names to their settings or to a list of settings,
            one for each strength, or of labels to objects. Values are YAML.

    Returns:
        `{label: [(name, settings), ...]}` or `{label: object}`. A label has the settings that were
            given, or in which an object differs from its class's defaults. Repetitions count once.

    Raises:
        ValueError: If it cannot be read as that, or two objects would have one label.

    Example:
        >>> list(parse_specs(["none", {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}]}]))
        ['none', 'pruning:ratio=0.5', 'pruning:ratio=0.9']
    """
    by_label: dict[str, Links | Defense | Attack] = {}
    for spec in [specs] if isinstance(specs, str | Mapping | Defense | Attack) else specs:
        for label, named in _labeled(spec):
            earlier = by_label.get(label, named)
            if earlier is not named and not (isinstance(named, list) and isinstance(earlier, list)):
                raise ValueError(
                    f"Two are called {label!r}, and nothing would tell their results apart. Give "
                    "objects labels of their own: {'one': ..., 'other': ...}."
                )
            by_label[label] = named
    return by_label


def make_defenses(specs: Spec | Sequence[Spec]) -> dict[str, Defense]:
    """Return `{label: defense}`; see `parse_specs` and `make_defense`.

    Raises:
        ValueError: If a name or a setting is unknown, or an entry is an attack.
    """
    defenses = {}
    for label, named in parse_specs(specs).items():
        if isinstance(named, list):
            links = [make(DEFENSES, name, settings) for name, settings in named]
            named = chain(*links) if len(links) > 1 else links[0]
        if not isinstance(named, Defense):
            raise ValueError(f"{label} is an attack, where a defense was to be.")
        defenses[label] = named
    return defenses


def make_attacks(specs: Spec | Sequence[Spec]) -> dict[str, Attack]:
    """Return `{label: attack}`; see `parse_specs` and `make_attack`.

    Raises:
        ValueError: If a name or a setting is unknown, or an entry is a defense or a chain.
    """
    attacks = {}
    for label, named in parse_specs(specs).items():
        if isinstance(named, list):
            if len(named) > 1:
                raise ValueError(f"Attacks cannot be chained: {label}.")
            named = make(ATTACKS, *named[0])
        if not isinstance(named, Attack):
            raise ValueError(f"{label} is a defense, where an attack was to be.")
        attacks[label] = named
    return attacks


def _labeled(spec: Spec) -> Iterator[tuple[str, Links | Defense | Attack]]:
    """Yield what one spec names, with labels."""
    if isinstance(spec, str):
        for text in _separated(spec):
            # A plus before a digit is part of a number: 1e+3.
            links = [_link(link) for link in re.split(r"\+(?=[A-Za-z])", text)]
            yield "+".join(map(_label, links)), links
    elif isinstance(spec, Defense | Attack):
        yield _label_of(spec), spec
    elif isinstance(spec, Mapping):
        # A list of settings is one row for each strength.
        for name, entry in spec.items():
            for settings in entry if isinstance(entry, list) else [entry]:
                if isinstance(settings, Defense | Attack):
                    yield str(name), settings
                elif settings is None or isinstance(settings, Mapping):
                    values = {key: _number(value) for key, value in (settings or {}).items()}
                    yield _label((str(name), values)), [(str(name), values)]
                else:
                    raise ValueError(
                        f"The settings of {name} must be a mapping, but are {settings!r}."
                    )
    else:
        raise ValueError(
            f"{spec!r} is neither a name, nor a defense or an attack, nor a mapping of names to "
            "settings."
        )


def _label_of(named: Defense | Attack) -> str:
    """Return an object's name with the settings in which it differs from its class's defaults."""
    if isinstance(named, Chain):
        return f"{_label_of(named.first)}+{_label_of(named.second)}"
    changed = {}
    for field in fields(named):  # type: ignore[arg-type]
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(named, field.name)
        # Tensors and arrays compare entry by entry: those are settings of their own.
        same = value is default or value == default
        if field.init and field.repr and same is not True:
            changed[field.name] = value
    return _label((named.name, _settings_needed(named, changed)))


def _settings_needed(named: Defense | Attack, changed: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that follow from the others."""

    def is_made_by(settings: dict[str, Any]) -> bool:
        try:
            rebuilt = type(named)(**settings)
        except (TypeError, ValueError):
            return False
        return all(getattr(rebuilt, name) == value for name, value in changed.items())

    if not all(isinstance(value, bool | int | float | str) for value in changed.values()):
        return changed
    if is_made_by({}):
        return {}
    needed = changed
    for name in changed:
        fewer = {key: value for key, value in needed.items() if key != name}
        needed = fewer if is_made_by(fewer) else needed
    return needed


def _separated(text: str) -> list[str]:
    """Return `"a:x=1,y=2,b"` as `["a:x=1,y=2", "b"]`; commas in brackets separate nothing."""
    specs: list[str] = []
    for piece in re.split(r",(?![^\[]*\])", text):
        # `b=2` belongs to the spec before it, and `b:x=2` or `b` begins another one.
        if specs and "=" in piece and ":" not in piece.split("=")[0]:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return specs


def _link(text: str) -> tuple[str, dict[str, Any]]:
    name, colon, assignments = (side.strip() for side in text.partition(":"))
    settings = {}
    for assignment in re.split(r",(?![^\[]*\])", assignments) if assignments else []:
        key, equals, value = (side.strip() for side in assignment.partition("="))
        if not (key and equals and value):
            raise ValueError(
                f"{text!r} cannot be read. Settings are written name:key=value,key=value."
            )
        settings[key] = _number(yaml.safe_load(value))
    if not name or (colon and not settings):
        raise ValueError(f"{text!r} cannot be read. Write a name, or name:key=value,key=value.")
    return name, settings


def _number(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML 1.1 takes 1e-3 for a word
    return value


def _label(link: tuple[str, dict[str, Any]]) -> str:
    name, settings = link
    shown = ",".join(f"{key}={_shown(value)}" for key, value in settings.items())
    return f"{name}:{shown}" if shown else name


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if value is None or isinstance(value, int | str | list | tuple | Mapping | os.PathLike):
        return str(value)
    return type(value).__name__


# --- what training under each defense reaches, from the user's own runs


def read_metrics(
    metrics: Metrics | None, defenses: Mapping[str, Defense] | None = None
) -> dict[str, float]:
    """Return the accuracy of a model under each defense, by label.

    Args:
        metrics: A mapping `{label: accuracy}`; or JSON files of it, or the `metrics.json` of runs
            of the recipes, each of which belongs to the defense that has all its settings.
        defenses: The audited defenses by label.

    Raises:
        ValueError: If values are no numbers, or two runs are of one defense.
        OSError: If a file cannot be read.

    Example:
        >>> read_metrics({"none": 0.9, "pruning": 0.88})
        {'none': 0.9, 'pruning': 0.88}
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return _checked_metrics(metrics)
    reached: dict[str, float] = {}
    for file in [metrics] if isinstance(metrics, str | os.PathLike) else metrics:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        # A recipe's file says its settings in full, so they decide which row it is of.
        if isinstance(content, Mapping) and {"defense", "settings", "accuracy"} <= content.keys():
            content = _metrics_of_run(file, content, defenses or {})
        values = _checked_metrics(content)
        if twice := reached.keys() & values.keys():
            raise ValueError(f"{file} is the second to say what {min(twice)} reaches.")
        reached |= values
    return reached


def _metrics_of_run(
    file: File, trained: Mapping[str, Any], defenses: Mapping[str, Defense]
) -> dict[str, Any]:
    """Return a run's metrics by label of its defense, if that is audited with its settings."""
    differences = []
    for label, defense in defenses.items():
        if defense.name != trained["defense"]:
            continue
        audited, settings = plain_settings(defense.settings()), trained["settings"]
        keys = audited.keys() | settings.keys()
        differing = sorted(key for key in keys if audited.get(key) != settings.get(key))
        if not differing:
            return {label: trained["accuracy"]}
        differences.append(f"{label} differs in {', '.join(differing)}")
    why = "; ".join(differences) or f"{trained['defense']} is not among them"
    logger.warning(f"{file} is of none of the audited defenses: {why}. Its accuracy is left out.")
    return {}


def _checked_metrics(metrics: Any) -> dict[str, float]:
    values = metrics.values() if isinstance(metrics, Mapping) else [metrics]
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(
            "Metrics must be one number for each defense, as {defense: accuracy}, or the "
            f"metrics.json of a recipe's run, but are {metrics!r}."
        )
    return {str(label): float(value) for label, value in metrics.items()}
