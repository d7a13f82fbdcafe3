"""Defenses × attacks on data: protect each message, attack what was shared, score what came out."""

from __future__ import annotations

from . import installed as installed

# isort: split
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from ..attacks import Attack
from ..data.samples import Sample
from ..defenses import Defense
from ..randomness import Stream
from ..registry import ESTIMATORS
from .adaptive import attackers, with_list
from .cells import Cell, Cells, code_digest, digest, write_json
from .client import Client, Upload
from .facts import GRANTS, attack_settings, facts, plain_settings
from .modality import Images, Texts, modality_of
from .report import write_report
from .result import Audit
from .settings import AuditSettings
from .specs import Spec, make_attacks, make_defenses
from .summary import summarize
from .verdicts import INFORMED, base_of

_ORDER = 5  # a stream of random numbers, beside a client's


def audit(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample],
    defenses: Spec | Sequence[Spec],
    attacks: Spec | Sequence[Spec],
    *,
    candidates: Sequence[Any] | None = None,
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
        model: A text or image classifier. Left as it was.
        processing_class: Its tokenizer or image processor; `None` for an image model that takes
            pixels in [0, 1].
        samples: `(text or image, class id)` each; images as PIL or bytes `(H, W)` or `(H, W, C)`.
        defenses: Names with settings or objects, see `parse_specs`; each is a row.
        attacks: Names with settings or objects. Each also runs as somebody sets it who knows the
            defense, where that makes a difference.
        candidates: Texts or images that an attacker has: adds the attack `candidates`, which asks
            who of them is in a message. A sample that is not among them has no rank.
        output: Folder to write to. Holds private data afterwards.
        **settings: Fields of `AuditSettings`.

    Raises:
        ValueError: For unknown names, samples that do not fill the batches, labels out of range, or
            texts without words.
        TypeError: For unknown settings.
        OSError: If `output` cannot be written to. Said before any work.

    Example:
        >>> defenses = ["gaussian_noise:relative_scale=1", "pruning:ratio=0.5+gaussian_noise"]
        >>> result = audit(model, tokenizer, samples, defenses, "span", output="runs/audit")
        >>> [verdict.defense for verdict in summarize(result).verdicts]
        ['none', 'gaussian_noise:relative_scale=1', 'pruning:ratio=0.5+gaussian_noise']
    """
    terms = AuditSettings.of(settings)
    reference = make_defenses("none") if terms.reference else {}
    made_defenses, made_attacks = reference | make_defenses(defenses), make_attacks(attacks)
    if not made_defenses or not (made_attacks or candidates):
        raise ValueError("An audit needs at least one defense and one attack.")
    if not samples or len(samples) % terms.batch_size:
        raise ValueError(f"{len(samples)} samples do not fill messages of {terms.batch_size}.")
    cells = Cells(Path(output) / "cells")
    modality = modality_of(model, processing_class, terms)
    batches = _batches(model, modality, samples, terms.batch_size)
    listed = None if candidates is None else _shuffled(modality.candidates(candidates), terms.seed)
    made_attacks = with_list(made_attacks, listed)
    for defense in made_defenses.values():
        defense.prepare(model, processing_class)
    run = _Run(model, modality, terms, made_defenses, made_attacks, cells, batches)
    return run.to(Path(output))


def _shuffled(listed: list[Any], seed: int) -> list[Any]:
    """The place in the list says nothing: who scores alike is ranked by it."""
    order = Stream.from_seeds(seed, _ORDER).uniform((len(listed),)).argsort().tolist()
    return [listed[at] for at in order]


def _batches(
    model: nn.Module, modality: Texts | Images, samples: Sequence[Sample], size: int
) -> list[dict[str, Tensor]]:
    device = next(model.parameters()).device
    return [
        {name: tensor.to(device) for name, tensor in modality.batch(samples[at:][:size]).items()}
        for at in range(0, len(samples), size)
    ]


class _Run:
    """An audit whose arguments have been checked."""

    def __init__(
        self,
        model: nn.Module,
        modality: Texts | Images,
        terms: AuditSettings,
        defenses: dict[str, Defense],
        attacks: dict[str, Attack],
        cells: Cells,
        batches: list[dict[str, Tensor]],
    ) -> None:
        self.model, self.modality, self.terms, self.cells = model, modality, terms, cells
        self.defenses, self.attacks, self.estimators = defenses, attacks, dict(ESTIMATORS)
        self.batches = batches
        self.settings = facts(model, modality, terms, self.estimators, len(batches))
        self.defense_keys = {label: digest(one) for label, one in defenses.items()}
        self.attackers = {
            (defense, label): found
            for defense, made in defenses.items()
            for name, attack in attacks.items()
            for label, found in attackers(name, attack, made, terms).items()
        }
        self.attack_keys = {
            place: digest(one.attack, sorted(one.grants)) for place, one in self.attackers.items()
        }
        self.estimator_keys = {name: code_digest(one) for name, one in self.estimators.items()}
        makers = code_digest(Client, type(modality))
        grants = [getattr(terms, name) for name in GRANTS]
        versions = self.settings["versions"]
        self.key = digest(model, modality.identity(), grants, terms.seed, versions, makers)

    def to(self, folder: Path) -> Audit:
        """The audit, written to a folder whenever a message has something new."""
        result = Audit(
            settings=self.settings,
            defenses={
                label: plain_settings(one.settings()) for label, one in self.defenses.items()
            },
            attacks={
                label: plain_settings(attack_settings(self.attacks[base_of(label)]))
                for label in self._labels()
            },
            messages=[],
            chance=[],
            shared=[],
            cells=[],
        )
        count = len(self.batches)
        writer = _Writer(result, folder)
        bar = logging.tqdm(total=self.terms.repeats * count * len(self.attackers), desc="audit")
        try:
            for repeat, index in product(range(self.terms.repeats), range(count)):
                made = self.cells.made
                shared, cells = self._message(index, repeat, bar)
                if not repeat:
                    result.messages.append(self.modality.show(self.batches[index]))
                    result.chance.append(self.modality.chance(self.batches, index, self.terms.seed))
                result.shared += shared
                result.cells += cells
                writer.add(new=self.cells.made > made)
        except BaseException:
            writer.flush()
            raise
        finally:
            bar.close()
        writer.write()
        return result

    def _labels(self) -> list[str]:
        """Of attacks, each followed by what somebody made of it who knows the defense."""
        used = {name for _, name in self.attackers}
        return [n for label in self.attacks for n in (label, label + INFORMED) if n in used]

    def _message(self, index: int, repeat: int, bar: Any) -> tuple[list[Cell], list[Cell]]:
        """The rows of one message: what every defense shared, and what every attack found in it."""
        terms, batch = self.terms, self.batches[index]
        client = Client(
            self.model, batch, terms.share_input_embeddings, (terms.seed, index, repeat)
        )
        key = digest(self.key, batch, index, repeat)
        rows, found = [], []
        for label, defense in self.defenses.items():
            place: Cell = {"message": index, "repeat": repeat, "defense": label}
            upload = Upload(client, defense)
            row = self._shared(upload, digest(key, self.defense_keys[label]))
            rows.append({**place, **row})
            refused: Cell = {why: row[why] for why in ("reason", "crash") if why in row}
            # One seed for all attacks: they differ in nothing but themselves.
            for (where, name), attacker in self.attackers.items():
                if where != label:
                    continue
                bar.set_postfix_str(f"{label}, {name}")
                cell = refused or self.cells.once(
                    digest(key, self.defense_keys[label], self.attack_keys[where, name]),
                    partial(upload.attacked, attacker, self.modality, terms.labels_known),
                )
                found.append({**place, "attack": name, **cell})
                bar.update()
        return rows, found

    def _shared(self, upload: Upload, key: str) -> Cell:
        """What is known of a message without attacking it."""
        row = self.cells.once(key, upload.described)
        if "reason" in row or "crash" in row:
            return row
        figures: dict[str, list[float | None]] = {}
        no_figures: dict[str, str] = {}
        for name in self.estimators:
            own = digest(key, name, self.estimator_keys[name])
            cell = self.cells.once(own, partial(upload.estimated, name))
            if "values" in cell:
                figures[name] = cell["values"]
            else:
                no_figures[name] = cell.get("reason") or f"It crashed. {cell['crash']}"
        row |= {"figures": figures, "no_figures": no_figures}
        found = self.cells.once(digest(key, "labels"), partial(upload.labelled, self.modality))
        if "labels" in found:
            row["labels"] = found["labels"]
        else:
            row["no_labels"] = found.get("reason") or f"It crashed. {found['crash']}"
        return row


class _Writer:
    """Writes what there is of an audit after every message, as long as that takes at most a tenth
    of the time.
    """

    def __init__(self, result: Audit, folder: Path) -> None:
        self.result, self.folder = result, folder
        self.started, self.spent, self.pending = time.monotonic(), 0.0, False

    def add(self, new: bool) -> None:
        """A message was added to the result; `new` if its cells had not been there before."""
        self.pending |= new
        if 10 * self.spent <= time.monotonic() - self.started:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        if self.pending:
            self.write()

    def write(self) -> None:
        """Write audit.json, table.md and report.html."""
        before = time.monotonic()
        write_json(self.folder / "audit.json", asdict(self.result))
        write_report(summarize(self.result), self.folder)
        self.spent += time.monotonic() - before
        self.pending = False
