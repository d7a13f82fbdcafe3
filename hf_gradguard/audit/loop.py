"""The loop of an audit: protect each message, attack what was shared, score what came out."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from .. import __version__
from ..attacks import Attack
from ..attacks.candidates.attack import Candidates
from ..defenses import Defense
from ..models import task_of
from ..registry import ESTIMATORS
from .attackers import SMOOTHED, WEIGHTS, attackers, chosen_weight, own_batches, smooths, with_list
from .cells import Audit, Cell, Cells, code_digest, digest, write_json
from .client import Client, Modality, Shared, Upload, beside, ranked_together
from .report.page import write_report
from .report.summary import summarize
from .report.verdicts import INFORMED, TERMS, base_of
from .settings import AuditSettings

logger = logging.get_logger(__name__)

_HELD = 2**28  # entries of several defenses' messages that are attacked together: 1 GiB

_Place = tuple[str, str]  # labels of a defense and of an attack


@dataclass
class Setup:
    """What is audited.

    Args:
        model: In the mode in which the client runs it.
        modality: What its inputs ask for.
        batches: One a message.
        listed: What an attacker has a list of.
        shared: What of a client's gradient is shared.
        states: By label of a defense, what it remembers of messages before the audited ones.
        identity: What else determines a result.
        told: What else there is to say of the threat model.
    """

    model: nn.Module
    modality: Modality
    batches: list[dict[str, Tensor]]
    listed: list[Any] | None
    shared: Shared
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    identity: list[Any] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def run(
    setup: Setup,
    terms: AuditSettings,
    defenses: dict[str, Defense],
    attacks: dict[str, Attack],
    cells: Cells,
    price: Mapping[str, float] | None = None,
) -> Audit:
    """Attack what was set up. Says first how long it is going to take.

    Args:
        setup: What is audited.
        terms: The same for all.
        defenses: By label, prepared for the model.
        attacks: By label.
        cells: Finished pieces; results go to the folder above them.
        price: By label of a defense, what a model reaches that is trained under it.
    """
    every = with_list(attacks, setup.listed, setup.modality, terms.seed)
    made = _Run(setup, terms, defenses, every, cells)
    made.settings["metrics"] = dict(price or {})
    logger.warning(made.expected())
    return made.to(cells.folder.parent)


class _Run:
    """An audit whose arguments have been checked."""

    def __init__(
        self,
        setup: Setup,
        terms: AuditSettings,
        defenses: dict[str, Defense],
        attacks: dict[str, Attack],
        cells: Cells,
    ) -> None:
        self.setup, self.terms, self.cells = setup, terms, cells
        self.model, self.modality, self.batches = setup.model, setup.modality, setup.batches
        self.defenses, self.attacks, self.estimators = defenses, attacks, dict(ESTIMATORS)
        self.settings = facts(
            self.model, self.modality, terms, self.estimators, len(self.batches), setup.told
        )
        self.defense_keys = {
            label: digest(one, *([state] if (state := setup.states.get(label)) else []))
            for label, one in defenses.items()
        }
        self.attackers = {
            (defense, label): found
            for defense, made in defenses.items()
            for name, attack in attacks.items()
            for label, found in attackers(name, attack, made, terms).items()
        }
        own = own_batches(setup.listed, setup.batches, self.modality) if terms.adaptive else []
        self.own = [
            Client(self.model, batch, setup.shared, (terms.seed, len(self.batches) + number, 0))
            for number, batch in enumerate(own)
        ]
        if self._choosing():
            self.settings["threat_model"].append(SMOOTHED)
        self.estimator_keys = {name: code_digest(one) for name, one in self.estimators.items()}
        makers = code_digest(Client, type(self.modality))
        grants = [getattr(terms, name) for name in GRANTS]
        versions = self.settings["versions"]
        identity = [self.modality.identity(), setup.identity]
        self.key = digest(self.model, identity, grants, terms.seed, versions, makers)

    def expected(self) -> str:
        """How long it is going to take, from the time of one gradient."""
        each = math.inf
        for _ in range(2):  # the first one also finds out what there is to share
            client = Client(self.model, self.batches[0], self.setup.shared, (self.terms.seed, 0, 0))
            started = time.perf_counter()
            try:
                client.gradient()
            except (ValueError, ArithmeticError, RuntimeError) as error:
                return f"No gradient could be taken of the first message: {error}"
            each = min(each, time.perf_counter() - started)
        times = self.terms.repeats * len(self.batches)
        once = len(self._groups()) / len(self.defenses)  # of a list's gradients
        passes = times * sum(
            one.attack.passes * (once if isinstance(one.attack, Candidates) else 1.0)
            for one in self.attackers.values()
        )
        for place in self._choosing():
            passes += len(WEIGHTS) * len(self.own) * self.attackers[place].attack.passes
        return (
            f"{times} messages, {len(self.defenses)} defenses, {len(self.attackers)} attackers on "
            f"each message: about {_duration(each * passes)} on this machine, less what "
            "is there already. The bar corrects it."
        )

    def _choosing(self) -> list[tuple[str, str]]:
        """Attackers who have images of their own to find out on how much to smooth: the one with
        each attack who knows most of each defense.
        """
        return [
            (defense, best)
            for defense, made in self.defenses.items()
            for name, attack in self.attacks.items()
            if self.own and made.name != "none" and smooths(attack)
            for best in [name + INFORMED if (defense, name + INFORMED) in self.attackers else name]
        ]

    def _choose(self) -> None:
        """Give them the weight that they choose."""
        chosen_weights = self.settings["smoothing"] = dict[str, float]()
        for defense, label in self._choosing():
            attacker = self.attackers[defense, label]
            state = self.setup.states.get(defense)
            uploads = [
                Upload(client, self.defenses[defense], state, others)
                for client, others in beside(self.own)
            ]
            batches = [client.batch for client in self.own]
            own = digest(attacker.attack, sorted(attacker.grants), batches, WEIGHTS)
            key = digest(self.key, self.defense_keys[defense], own)
            found = self.cells.once(key, partial(chosen_weight, attacker, uploads, self.modality))
            if "total_variation" not in found:
                continue  # what is refused there is refused of every message, with the reason
            attack: Any = attacker.attack
            plain, weight = base_of(label), found["total_variation"]
            chosen_weights[f"{defense}, {plain}"] = weight
            chosen = replace(attack, total_variation=weight)
            self.attackers[defense, plain] = replace(self.attackers[defense, plain], knows=False)
            self.attackers[defense, plain + INFORMED] = replace(attacker, attack=chosen)

    def to(self, folder: Path) -> Audit:
        """The audit, written to a folder whenever a message has something new."""
        self._choose()
        self.attack_keys = {
            place: digest(one.attack, sorted(one.grants)) for place, one in self.attackers.items()
        }
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
        writer = Writer(result, folder)
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
        clients = [
            Client(self.model, one, self.setup.shared, (terms.seed, number, repeat))
            for number, one in enumerate(self.batches)
        ]
        client, others = beside(clients)[index]
        key = digest(self.key, batch, index, repeat)
        rows, found = [], []
        for labels in self._groups():
            uploads = {
                label: Upload(client, self.defenses[label], self.setup.states.get(label), others)
                for label in labels
            }
            keys = {
                label: digest(key, self.defense_keys[label], [c.batch for c in upload.before])
                for label, upload in uploads.items()
            }
            shared = {label: self._shared(one, keys[label]) for label, one in uploads.items()}
            place: Cell = {"message": index, "repeat": repeat}
            rows += [{**place, "defense": label, **row} for label, row in shared.items()]
            for (label, name), cell in self._attacked(uploads, shared, keys, bar):
                found.append({**place, "defense": label, "attack": name, **cell})
        return rows, found

    def _groups(self) -> list[list[str]]:
        """Defenses whose messages are held at once: several where somebody has a list, whose
        gradients are then computed once for all of them.
        """
        ranks = any(isinstance(one.attack, Candidates) for one in self.attackers.values())
        size = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        count = max(1, _HELD // max(size, 1)) if ranks else 1
        labels = list(self.defenses)
        return [labels[at : at + count] for at in range(0, len(labels), count)]

    def _attacked(
        self, uploads: dict[str, Upload], shared: dict[str, Cell], own: dict[str, str], bar: Any
    ) -> Iterator[tuple[_Place, Cell]]:
        """What every attacker finds in each of these."""
        refused: dict[str, Cell] = {
            label: {why: row[why] for why in ("reason", "crash") if why in row}
            for label, row in shared.items()
        }
        keys = {
            (label, name): digest(own[label], attack)
            for (label, name), attack in self.attack_keys.items()
            if label in uploads
        }
        ranked = self._ranked(uploads, {at: own for at, own in keys.items() if not refused[at[0]]})
        for (label, name), place in keys.items():
            bar.set_postfix_str(f"{label}, {name}")
            # One seed for all attacks: they differ in nothing but themselves.
            alone = partial(uploads[label].attacked, self.attackers[label, name], self.modality)
            cell = refused[label] or ranked.get((label, name)) or self.cells.once(place, alone)
            yield (label, name), cell
            bar.update()

    def _ranked(self, uploads: dict[str, Upload], keys: dict[_Place, str]) -> dict[_Place, Cell]:
        """What is not there yet of those who have a list, attacked together."""
        asked = [
            place
            for place, key in keys.items()
            if isinstance(self.attackers[place].attack, Candidates) and key not in self.cells
        ]
        found: dict[_Place, Cell] = {}
        for name in dict.fromkeys(name for _, name in asked):
            places = [place for place in asked if place[1] == name]
            cells = ranked_together(
                [uploads[label] for label, _ in places],
                [self.attackers[place] for place in places],
                self.modality,
            )
            for place, cell in zip(places, cells, strict=True):  # kept before others are attacked
                found[place] = self.cells.once(keys[place], partial(dict, cell))
        return found

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
        found = self.cells.once(digest(key, "labels"), partial(upload.labeled, self.modality))
        if "labels" in found:
            row["labels"] = found["labels"]
        else:
            row["no_labels"] = found.get("reason") or f"It crashed. {found['crash']}"
        return row


def _duration(seconds: float) -> str:
    for size, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(1, round(seconds))} seconds"


class Writer:
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


_MOST = 20  # entries of a list that is a setting
GRANTS = ("labels_known", "lengths_known", "noise_known", "share_input_embeddings")
"""What decides on what the attacker sees."""


def facts(
    model: nn.Module,
    modality: Modality,
    settings: AuditSettings,
    estimators: Mapping[str, Any],
    messages: int,
    told: Sequence[str] = (),
) -> dict[str, Any]:
    """All that it takes to repeat the audit, and all that its report has to know of it. `told` is
    what else there is to say of the threat model.
    """
    kind = modality.settings()
    return {
        **asdict(settings),
        **kind,
        "main_score": TERMS[kind["kind"]].score,
        "model": _model_name(model),
        "training_mode": model.training,
        "samples": messages * settings.rows,
        "messages": messages,
        "task": None if (task := task_of(model)) is None else task.name,
        "classes": getattr(model.config, "num_labels", None)
        if modality.labels == "class" and hasattr(model, "config")
        else None,
        "chance": modality.describe_chance(messages),
        "threat_model": [*threat_model(model, modality, settings), *told],
        "estimators": {
            name: {"title": one.title, "meaning": one.meaning} for name, one in estimators.items()
        },
        "device": str(next(model.parameters()).device),
        "versions": _versions(),
    }


def threat_model(model: nn.Module, modality: Modality, settings: AuditSettings) -> list[str]:
    """What the attacker sees and knows, a sentence each."""
    terms = TERMS[modality.settings()["kind"]]
    size = settings.rows
    return [
        f"The server knows the model and follows the protocol. It sees {_shared(settings)} of "
        f"{f'one {terms.one}' if size == 1 else f'{size} {terms.many}'} at a time, as the defense "
        "lets it through, and tries to read the data back out of it.",
        *modality.threat_model(),
        *(
            [f"The client averages {settings.accumulation} batches, protected one by one, first."]
            if settings.accumulation > 1
            else []
        ),
        "The labels are made of the texts themselves, so nobody is told them."
        if not modality.can_grant
        else "It knows the labels."
        if settings.labels_known
        else "It does not know the labels: attacks have to recover them.",
        "It knows the covariance of the noise that a defense adds."
        if settings.noise_known
        else "It does not know how a defense's noise was shaped, but where it is said to know the "
        "defense."
        if settings.adaptive
        else "It does not know how a defense's noise was shaped.",
        "The model ran in training mode: dropout draws hide something from the attacker."
        if model.training
        else "The model ran in eval mode, without dropout: the attacker's best case.",
        "Every message is attacked by itself. A server that sees the same data again knows more.",
    ]


def _shared(settings: AuditSettings) -> str:
    if not settings.local_steps:
        return "the gradient"
    return (
        f"the change of the weights after {settings.local_steps} local steps (batches of "
        f"{settings.batch_size}, {settings.optimizer}, learning rate {settings.learning_rate:g}, "
        "in an order that it knows)"
    )


def attack_settings(attack: Attack) -> dict[str, Any]:
    """The settings of an attack."""
    return {name: value for name, value in vars(attack).items() if not name.startswith("_")}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON takes them; objects by their class."""
    return {str(key): _plain(value) for key, value in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple) and len(value) > _MOST:
        return f"{len(value)} entries"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, Defense) else type(value).__name__


def _model_name(model: nn.Module) -> str:
    """As on the Hub, or a folder; of an absolute path the last part: the rest is nobody's
    business.
    """
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return os.path.basename(os.path.normpath(name)) if os.path.isabs(name) else name


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"hf-gradguard": __version__, **packages, "python": platform.python_version()}
