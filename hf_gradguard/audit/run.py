"""Defenses × attacks on data: protect each message, attack what was shared, score what came out."""

from __future__ import annotations

from . import installed as installed

# isort: split
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Trainer

from ..attacks import Attack
from ..attacks.analytic import readable
from ..data.samples import Sample
from ..defenses import Defense
from ..gradient_map.domain import IMAGE, domain_of_model
from .cells import Cells
from .client import Shared
from .local import training_of
from .loop import Setup, run
from .modality import Modality, modality_of
from .price import Metrics, read_metrics
from .result import Audit
from .settings import AuditSettings
from .specs import Spec, make_attacks, make_defenses
from .trained import set_up

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
        terms, setup, own = set_up(trainer, samples, asked.candidates, asked.settings)
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
