"""Defenses × attacks on data: protect each message, attack what was shared, score what came out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import Tensor, nn
from transformers import Trainer
from transformers.utils import logging

from ..attacks import Attack, make_attack
from ..attacks.analytic import readable
from ..data.samples import Sample
from ..defenses import Chain, Defense, chain, make_defense
from ..gradient_map.domain import IMAGE, domain_of_model
from .cells import Audit, Cells
from .client import Modality, Shared, modality_of, training_of
from .loop import Setup, plain_settings, run
from .settings import AuditSettings
from .trainer import set_up

DEFAULT_ATTACKS = {"text": "span", "image": "inverting_gradients"}
"""Attacks by domain, where none is named."""


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
    output: str | os.PathLike[str],
    **settings: Any,
) -> Audit:
    """Attack a model's shared gradients under each defense, on the same samples with the same seeds
    and attack budgets.

    A client's message is the gradient of one batch, protected by itself, in the mode in which the
    model is (`eval()` is without dropout: the attacker's best case). Every finished cell is kept in
    `output/cells`, so an interrupted audit goes on where it stopped. After every message
    `audit.json`, `table.md` and `report.html` in `output` are written anew.

    Args:
        model: A model of texts or images with the head that it is trained with. Left as it was. Or
            a `GradGuardTrainer`, built and maybe trained: its model, in training mode, its data,
            collator, batches, loss, and its defense with what that remembers.
        processing_class: Its tokenizer or image processor; `None` for an image model that takes
            pixels in [0, 1].
        samples: `(text or image, label)` each; images as PIL or bytes `(H, W)` or `(H, W, C)`. A
            label is a class id or name; a number; one 0 or 1 for each class; of a list of words a
            list of class ids; of a source text the target; `None` where the text is its own label.
            With a Trainer, how many rows to take of its data.
        defenses: Names with settings or objects, see `parse_specs`; each is a row.
        attacks: Names with settings or objects. Each also runs as somebody sets it who knows the
            defense, where that makes a difference. Default: the strongest that is quick.
        trainer: The same as a Trainer in place of the model.
        candidates: Texts, images or samples that an attacker has: adds the attack `candidates`,
            which asks who of them is in a message. A sample that is not among them has no rank.
        metrics: What a model reaches that is trained under each defense, by the defense's label, or
            files of that, as the recipes write them: the report says the price; see `read_metrics`.
        output: Folder to write to. Holds private data afterwards.
        **settings: Fields of `AuditSettings`; others are a TypeError.

    Raises:
        ValueError: For unknown names, samples that do not fill batches, labels that are no classes.
        OSError: If `output` cannot be written to. Said before any work.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [verdict.defense for verdict in summarize(result).verdicts]
        ['none', 'pruning']
    """
    if isinstance(model, Trainer):
        model, trainer = None, model
    asked = _Asked(defenses, attacks, candidates, metrics, output, settings)
    if model is not None and trainer is None:
        return _of_model(model, processing_class, samples, asked)
    if model is None and trainer is not None:
        return _of_trainer(trainer, processing_class, samples, asked)
    raise ValueError("Give a model or a Trainer to audit, and not both.")


class _Asked(NamedTuple):
    """What is asked of an audit, of a model's or of a Trainer's; see `audit`."""

    defenses: Spec | Sequence[Spec]
    attacks: Spec | Sequence[Spec] | None
    candidates: Sequence[Any] | None
    metrics: Metrics | None
    output: str | os.PathLike[str]
    settings: Mapping[str, Any]


def _of_model(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample] | int,
    asked: _Asked,
) -> Audit:
    if isinstance(samples, int):
        raise ValueError("Give the samples to audit: (text or image, label) each.")
    terms = AuditSettings.of(asked.settings)
    attacks = asked.attacks
    if attacks is None:
        attacks = _usual(model, processing_class, samples, terms)
    made = _made(asked.defenses, attacks, terms, asked.candidates)
    cells, setup = _of_samples(
        model, processing_class, samples, asked.candidates, terms, asked.output
    )
    for defense in made[0].values():
        defense.prepare(model, processing_class)
    return run(setup, terms, *made, cells, read_metrics(asked.metrics, made[0]))


def _of_trainer(
    trainer: Trainer,
    processing_class: Any,
    samples: Sequence[Sample] | int,
    asked: _Asked,
) -> Audit:
    if not isinstance(samples, int) or processing_class is not None:
        raise ValueError(
            "A Trainer has its own data and tokenizer: give the number of samples only."
        )
    mode, others = trainer.model.training, make_defenses(asked.defenses)
    try:
        terms, setup, defense = set_up(trainer, samples, asked.candidates, asked.settings)
        own = make_defenses([defense])
        setup.states = {label: one.state_dict() for label, one in own.items()}
        attacks = asked.attacks
        if attacks is None:
            attacks = usual_attacks(setup.model, setup.batches[0])
        made = _made([{**others, **own}], attacks, terms, setup.listed)
        for defense in others.values():
            defense.prepare(setup.model, trainer.processing_class)
        price = read_metrics(asked.metrics, made[0])
        return run(setup, terms, *made, Cells(Path(asked.output) / "cells"), price)
    finally:
        trainer.model.train(mode)


def _made(
    defenses: Spec | Sequence[Spec],
    attacks: Spec | Sequence[Spec],
    terms: AuditSettings,
    listed: Sequence[Any] | None,
) -> tuple[dict[str, Defense], dict[str, Attack]]:
    reference = make_defenses("none") if terms.reference else {}
    made_defenses, made_attacks = reference | make_defenses(defenses), make_attacks(attacks)
    if not made_defenses or not (made_attacks or listed):
        raise ValueError("An audit needs at least one defense and one attack.")
    return made_defenses, made_attacks


def _usual(
    model: nn.Module, processing_class: Any, samples: Sequence[Sample], terms: AuditSettings
) -> str:
    if not samples or domain_of_model(model) is not IMAGE:
        return DEFAULT_ATTACKS[domain_of_model(model).name]
    return usual_attacks(model, modality_of(model, processing_class, terms).batch(samples[:1]))


def usual_attacks(
    model: nn.Module, batch: Mapping[str, Tensor], attacks: Mapping[str, str] = DEFAULT_ATTACKS
) -> str:
    """Those of the model's domain, and on images `analytic` where it can read.

    Args:
        model: To attack.
        batch: As the messages to attack.
        attacks: By domain.
    """
    domain = domain_of_model(model)
    more = domain is IMAGE and readable(model, tuple(IMAGE.main_input(batch).shape))
    return attacks[domain.name] + (",analytic" if more else "")


def _of_samples(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample],
    candidates: Sequence[Any] | None,
    terms: AuditSettings,
    output: str | os.PathLike[str],
) -> tuple[Cells, Setup]:
    size = terms.rows
    if not samples or len(samples) % size:
        raise ValueError(f"{len(samples)} samples do not fill messages of {size}.")
    cells = Cells(Path(output) / "cells")
    modality = modality_of(model, processing_class, terms)
    batches = _batches(model, modality, samples, size)
    listed = None if candidates is None else modality.candidates(candidates)
    local = training_of(terms)
    shared = Shared(terms.share_input_embeddings, micro_batches=terms.accumulation, local=local)
    identity = [] if local is None else [str(local)]
    return cells, Setup(model, modality, batches, listed, shared, identity=identity)


def _batches(
    model: nn.Module, modality: Modality, samples: Sequence[Sample], size: int
) -> list[dict[str, Tensor]]:
    device = next(model.parameters()).device
    return [
        {name: tensor.to(device) for name, tensor in modality.batch(samples[at:][:size]).items()}
        for at in range(0, len(samples), size)
    ]


Spec = str | Defense | Attack | Mapping[str, Any]
"""`"name"`, `"name:key=value,key=value"`, an object, or a mapping: `{"name": {"key": value}}`,
where a list of settings means several, or `{"label": object}`.
"""

Links = list[tuple[str, dict[str, Any]]]
"""Names with their settings: one pair, or for a chain its links in order."""


def parse_specs(specs: Spec | Sequence[Spec]) -> dict[str, Links | Defense | Attack]:
    """Named settings and objects in all the ways they may be written.

    Args:
        specs: One or several of: `"tag:steps=500,restarts=2,span"` (a part without `=`, or with a
            `:`, begins the next one; `+` chains: `"pruning:ratio=0.9+gaussian_noise:scale=0.1"`),
            a `Defense` or `Attack`, or a mapping of names to their settings or to a list of
            settings, one for each strength, or of labels to objects. Values are YAML.

    Returns:
        `{label: [(name, settings), ...]}` or `{label: object}`. A label says the settings that were
        given, or in which an object differs from its class's defaults. What is said twice counts
        once.

    Raises:
        ValueError: If it cannot be read as that, or two objects would be called the same.

    Example:
        >>> list(parse_specs(["none", {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}]}]))
        ['none', 'pruning:ratio=0.5', 'pruning:ratio=0.9']
    """
    found: dict[str, Links | Defense | Attack] = {}
    for spec in [specs] if isinstance(specs, str | Mapping | Defense | Attack) else specs:
        for label, one in _entries(spec):
            earlier = found.get(label, one)
            if earlier is not one and not (isinstance(one, list) and isinstance(earlier, list)):
                raise ValueError(
                    f"Two are called {label!r}, and nothing would tell their results apart. Give "
                    "objects labels of their own: {'one': ..., 'other': ...}."
                )
            found[label] = one
    return found


def make_defenses(specs: Spec | Sequence[Spec]) -> dict[str, Defense]:
    """`{label: defense}`; see `parse_specs` and `make_defense`."""
    made = {}
    for label, one in parse_specs(specs).items():
        if isinstance(one, Attack):
            raise ValueError(f"{label} is an attack, where a defense was to be.")
        made[label] = one if isinstance(one, Defense) else _chained(one)
    return made


def make_attacks(specs: Spec | Sequence[Spec]) -> dict[str, Attack]:
    """`{label: attack}`; see `parse_specs` and `make_attack`."""
    made = {}
    for label, one in parse_specs(specs).items():
        if isinstance(one, Defense):
            raise ValueError(f"{label} is a defense, where an attack was to be.")
        made[label] = one if isinstance(one, Attack) else _single(one)
    return made


def check_specs(
    defenses: Spec | Sequence[Spec] | None, attacks: Spec | Sequence[Spec] | None
) -> None:
    """Refuse names and settings that there are not, before anything is loaded. `None` passes."""
    if defenses is not None:
        make_defenses(defenses)
    if attacks is not None:
        make_attacks(attacks)


def _chained(links: Links) -> Defense:
    return chain(*(make_defense(name, **settings) for name, settings in links))


def _single(links: Links) -> Attack:
    if len(links) > 1:
        raise ValueError(f"Attacks cannot be chained: {' + '.join(name for name, _ in links)}.")
    ((name, settings),) = links
    return make_attack(name, **settings)


def _entries(spec: Spec) -> Iterator[tuple[str, Links | Defense | Attack]]:
    """What one spec names, with labels."""
    if isinstance(spec, str):
        for one in _separate(spec):
            links = [_link(link) for link in re.split(r"\+(?=[A-Za-z])", one)]
            yield "+".join(map(_label, links)), links
    elif isinstance(spec, Defense | Attack):
        yield _label_of(spec), spec
    elif isinstance(spec, Mapping):
        for name, settings in spec.items():
            for one in settings if isinstance(settings, list) else [settings]:
                if isinstance(one, Defense | Attack):
                    yield str(name), one
                elif one is None or isinstance(one, Mapping):
                    link = str(name), {key: _number(value) for key, value in (one or {}).items()}
                    yield _label(link), [link]
                else:
                    raise ValueError(f"The settings of {name} must be a mapping, but are {one!r}.")
    else:
        raise ValueError(
            f"{spec!r} is neither a name, nor a defense or an attack, nor a mapping of names to "
            "settings."
        )


def _label_of(made: Defense | Attack) -> str:
    """The name of an object with the settings in which it differs from its class's defaults."""
    if isinstance(made, Chain):
        return f"{_label_of(made.first)}+{_label_of(made.second)}"
    given = {}
    for field in fields(made):  # type: ignore[arg-type]
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(made, field.name)
        if field.init and field.repr and not _same(value, default):
            given[field.name] = value
    return _label((made.name, given))


def _same(value: Any, default: Any) -> bool:
    same = value is default or value == default
    return same if isinstance(same, bool) else False  # tensors and arrays compare entry by entry


def _separate(text: str) -> list[str]:
    """`"a:x=1,y=2,b"` as `["a:x=1,y=2", "b"]`. Commas in brackets separate nothing."""
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if found and "=" in part and ":" not in part.split("=")[0]:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _link(text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = (part.strip() for part in text.partition(":"))
    settings = {}
    for part in re.split(r",(?![^\[]*\])", rest) if rest else []:
        key, equals, value = (side.strip() for side in part.partition("="))
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
    if value is None or isinstance(value, int | str | list | tuple | Mapping | PathLike):
        return str(value)
    return type(value).__name__


logger = logging.get_logger(__name__)

File = str | os.PathLike[str]
Metrics = File | Sequence[File] | Mapping[str, float]


def read_metrics(
    metrics: Metrics | None, defenses: Mapping[str, Defense] | None = None
) -> dict[str, float]:
    """What a model reaches under each defense, by label.

    Args:
        metrics: That itself, `{label: accuracy}`; or JSON files of it, or the `metrics.json` of
            runs of the recipes, each of which belongs to the defense that has all its settings.
        defenses: Those that are audited, by label.

    Raises:
        ValueError: If they are no numbers, or two runs are of one defense.
        OSError: If a file cannot be read.

    Example:
        >>> read_metrics({"none": 0.9, "pruning": 0.88})
        {'none': 0.9, 'pruning': 0.88}
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return _numbers(metrics)
    found: dict[str, float] = {}
    for file in [metrics] if isinstance(metrics, str | os.PathLike) else metrics:
        read = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(read, Mapping) and {"defense", "settings", "accuracy"} <= read.keys():
            read = _of_run(file, read, defenses or {})
        numbers = _numbers(read)
        if twice := found.keys() & numbers.keys():
            raise ValueError(f"{file} is the second to say what {sorted(twice)[0]} reaches.")
        found |= numbers
    return found


def _of_run(file: File, run: Mapping[str, Any], defenses: Mapping[str, Defense]) -> dict:
    """Of a run's defense, if it is audited with the same settings."""
    near = []
    for label, defense in defenses.items():
        if defense.name != run["defense"]:
            continue
        own, those = plain_settings(defense.settings()), run["settings"]
        other = [key for key in own.keys() | those.keys() if own.get(key) != those.get(key)]
        if not other:
            return {label: run["accuracy"]}
        near.append(f"{label} differs in {', '.join(sorted(other))}")
    why = "; ".join(near) or f"{run['defense']} is not among them"
    logger.warning(f"{file} is of none of the audited defenses: {why}. Its accuracy is left out.")
    return {}


def _numbers(found: Any) -> dict[str, float]:
    values: Iterable[Any] = found.values() if isinstance(found, Mapping) else [found]
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(
            "Metrics must be one number for each defense, as {defense: accuracy}, or the "
            f"metrics.json of a recipe's run, but are {found!r}."
        )
    return {str(label): float(value) for label, value in found.items()}
