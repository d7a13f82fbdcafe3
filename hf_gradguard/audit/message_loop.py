"""The loop of an audit: protect each message, attack what was shared, score the reconstruction."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from .. import __version__
from ..attacks import Attack
from ..attacks.base import Clock
from ..attacks.candidates.membership import Candidates
from ..defenses import Defense
from ..defenses.base import NO_STATE
from ..defenses.noise import STRENGTH_KEY
from ..models import task_of
from .attackers import (
    SMOOTHING,
    WEIGHTS,
    attacker_batches,
    attackers,
    choose_weight,
    smooths,
    threat_model,
    with_candidates,
    with_public_texts,
    with_seconds,
)
from .cells import Audit, Cell, Cells, code_digest, digest, write_json
from .client import DEFENSE, Client, Modality, Shared, Upload, attack_together
from .report.page import write_report
from .report.summary import summarize
from .report.verdicts import INFORMED, MAIN_SCORES, base_of
from .settings import AuditSettings

GRANTS = ("labels_known", "lengths_known", "noise_known", "share_input_embeddings")
"""The settings that decide what the attacker sees."""

_GROUP_ENTRIES = 2**28  # entries of several defenses' messages that are attacked together: 1 GiB
_LONGEST_LIST = 20  # entries of a list that is a setting

BURN_IN = 16
"""The number of messages before the audited ones, for noise whose strength follows what was shared.
"""
STRENGTH = (
    "Noise relative to the usual gradient is as strong as it is after {} messages of the audited "
    "batches at this model; before the first one it is that of random inputs."
)

FEWEST_MESSAGES = 2  # are attacked however short time is: one has no interval

_Pair = tuple[str, str]  # labels of a defense and of an attack


@dataclass
class Setup:
    """The setup of an audit: the model, its batches and what the attacker has.

    Args:
        model: The model, in the mode in which the client runs it.
        modality: How the model's inputs are handled.
        batches: The batches, one per message.
        candidates: The candidates of an attacker that infers membership.
        shared: What of a client's gradient is shared.
        states: The states of the defenses after the messages before the audited ones, by the
            defense's label.
        identity: Values besides that determine a result.
        assumptions: Further sentences of the threat model.
    """

    model: nn.Module
    modality: Modality
    batches: list[dict[str, Tensor]]
    candidates: list[Any] | None
    shared: Shared
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    identity: list[Any] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


def run(
    setup: Setup,
    settings: AuditSettings,
    defenses: dict[str, Defense],
    attacks: dict[str, Attack],
    cells: Cells,
    metrics: Mapping[str, float],
) -> Audit:
    """Attack what was set up.

    Args:
        setup: The set-up that is audited.
        settings: The settings, the same for all.
        defenses: Defenses by label, prepared for the model.
        attacks: Attacks by label.
        cells: The finished pieces; results go to the folder above them.
        metrics: The accuracy of a model that is trained under each defense, by the defense's label.
    """
    minutes = settings.budget_minutes
    clock = Clock(None if minutes is None else 60 * minutes)
    attacks = with_candidates(attacks, setup.candidates, settings.seed)
    attacks = with_public_texts(attacks, setup.candidates, setup.batches, setup.modality)
    attacks = with_seconds(attacks, settings.attack_seconds)
    learn_strengths(setup, settings, defenses)
    grid = _Grid(setup, settings, defenses, attacks, cells)
    grid.record["metrics"] = dict(metrics)
    return grid.run(cells.folder.parent, clock)


def learn_strengths(setup: Setup, settings: AuditSettings, defenses: dict[str, Defense]) -> None:
    """Let noise that follows the usual gradient reach the strength of a training that has gone on.

    Nothing else of these messages is remembered.
    """
    learning = {
        label: defense
        for label, defense in defenses.items()
        if defense.facts.follows_transcript and not setup.states.get(label)
    }
    if not learning:
        return
    states = dict.fromkeys(learning, NO_STATE)  # of messages before, as of a training
    for number, batch in enumerate(islice(cycle(setup.batches), BURN_IN)):
        client = Client(setup.model, batch, setup.shared, (settings.seed, number, BURN_IN))
        for label, defense in learning.items():
            # What is refused here is refused of every audited message, with the reason.
            with suppress(ValueError, FloatingPointError):
                for gmap in client.micro_maps:
                    generator = client.generator(DEFENSE)
                    _, states[label] = defense.apply(gmap, states[label], generator)
    for label, defense in learning.items():
        state = defense.flatten(states[label]).items()
        setup.states[label] = {key: size for key, size in state if key.endswith(STRENGTH_KEY)}
    setup.assumptions.append(STRENGTH.format(BURN_IN))


class _Grid:
    """The grid of messages, defenses and attackers of an audit with checked arguments."""

    def __init__(
        self,
        setup: Setup,
        settings: AuditSettings,
        defenses: dict[str, Defense],
        attacks: dict[str, Attack],
        cells: Cells,
    ) -> None:
        self.setup, self.settings, self.cells = setup, settings, cells
        self.model, self.modality, self.batches = setup.model, setup.modality, setup.batches
        self.defenses, self.attacks = defenses, attacks
        self.estimators = settings.chosen_estimators()
        self.record = _record(setup, settings, self.estimators)
        self.attackers = {
            (defense_label, label): attacker
            for defense_label, defense in defenses.items()
            for name, attack in attacks.items()
            for label, attacker in attackers(name, attack, defense, settings).items()
        }
        candidates = setup.candidates if settings.adaptive else None
        trial_batches = attacker_batches(candidates, setup.batches, self.modality)
        self.trial_clients = [
            Client(self.model, batch, setup.shared, (settings.seed, len(self.batches) + number, 0))
            for number, batch in enumerate(trial_batches)
        ]
        self.smoothing = self._smoothing_attackers()
        if self.smoothing:
            self.record["threat_model"].append(SMOOTHING)
        # Each part of a key is what determines the cells below it, and no more: a changed attack
        # leaves the cells of others alone.
        self.defense_keys = {
            label: digest(defense, *([setup.states[label]] if setup.states.get(label) else []))
            for label, defense in defenses.items()
        }
        self.estimator_keys = {name: code_digest(e) for name, e in self.estimators.items()}
        code = code_digest(Client, type(self.modality))
        grants = [getattr(settings, name) for name in GRANTS]
        identity = [self.modality.identity(), setup.identity]
        versions = self.record["versions"]
        self.key = digest(self.model, identity, grants, settings.seed, versions, code)

    def _smoothing_attackers(self) -> list[_Pair]:
        """Return attackers that choose on images of their own how much to smooth.

        For each attack it is the one that knows most of each defense.
        """
        if not self.trial_clients:
            return []
        return [
            (label, informed if (label, informed := name + INFORMED) in self.attackers else name)
            for label, defense in self.defenses.items()
            for name, attack in self.attacks.items()
            if defense.name != "none" and smooths(attack)
        ]

    def _choose_smoothing(self) -> None:
        weights = self.record["smoothing"] = dict[str, float]()
        batches = [client.batch for client in self.trial_clients]
        for defense, label in self.smoothing:
            attacker = self.attackers[defense, label]
            clients = self.trial_clients
            uploads = [self._upload(client, defense, clients) for client in clients]
            trial = digest(attacker.attack, sorted(attacker.grants), batches, WEIGHTS)
            key = digest(self.key, self.defense_keys[defense], trial)
            choice = self.cells.once(key, partial(choose_weight, attacker, uploads, self.modality))
            if "total_variation" not in choice:
                continue  # what is refused there is refused of every message, with the reason
            attack: Any = attacker.attack
            name, weight = base_of(label), choice["total_variation"]
            weights[f"{defense}, {name}"] = weight
            plain = self.attackers[defense, name]
            self.attackers[defense, name] = replace(plain, knows_defense=False)
            informed = replace(attacker, attack=replace(attack, total_variation=weight))
            self.attackers[defense, name + INFORMED] = informed

    def run(self, folder: Path, clock: Clock) -> Audit:
        """Run the audit, and write it to a folder as it proceeds.

        It is also written if the clock stops it between two messages.
        """
        self._choose_smoothing()
        self.attack_keys = {
            pair: digest(attacker.attack, sorted(attacker.grants))
            for pair, attacker in self.attackers.items()
        }
        result = Audit(
            settings=self.record,
            defenses={
                label: plain_settings(defense.settings())
                for label, defense in self.defenses.items()
            },
            attacks={
                label: plain_settings(_public(self.attacks[base_of(label)]))
                for label in self._attack_labels()
            },
            messages=[], chance=[], shared=[], cells=[],
        )  # fmt: skip
        count, started, spent, longest = len(self.batches), time.monotonic(), 0.0, 0.0
        bar = logging.tqdm(total=self.settings.repeats * count * len(self.attackers), desc="audit")
        try:
            for repeat, index in product(range(self.settings.repeats), range(count)):
                began = clock.elapsed
                has_enough = len(result.messages) >= FEWEST_MESSAGES
                is_late = clock.seconds is not None and began + longest >= clock.seconds
                if has_enough and is_late and not self._is_stored(index, repeat):
                    break
                shared, cells = self._message(index, repeat, bar)
                longest = max(longest, clock.elapsed - began)
                # Repeats have the same originals, and a guess knows nothing of their noise.
                if not repeat:
                    guess = self.modality.chance(self.batches, index, self.settings.seed)
                    result.messages.append(self.modality.show(self.batches[index]))
                    result.chance.append(guess)
                result.shared += shared
                result.cells += cells
                # After every message, as long as that takes at most a tenth of the time.
                if 10 * spent <= time.monotonic() - started:
                    spent += _write(result, folder)
        finally:
            bar.close()
            # Also after an interruption: the report says of how many messages it is.
            if result.messages:
                _write(result, folder)
        return result

    def _attack_labels(self) -> list[str]:
        """Return each attack's label, followed by that of its attacker that knows the defense."""
        used = {label for _, label in self.attackers}
        pairs = [(name, name + INFORMED) for name in self.attacks]
        return [label for pair in pairs for label in pair if label in used]

    def _upload(self, client: Client, defense: str, clients: list[Client]) -> Upload:
        """Return an upload that has the clients after it first, for messages before its own."""
        index = clients.index(client)
        later_first = [*clients[index + 1 :], *clients[:index]]
        return Upload(client, self.defenses[defense], self.setup.states.get(defense), later_first)

    def _message(self, index: int, repeat: int, bar: Any) -> tuple[list[Cell], list[Cell]]:
        """Return the rows of one message: what every defense shared, and what attacks recovered."""
        clients = self._clients(repeat)
        place = {"message": index, "repeat": repeat}
        shared_rows, cells = list[Cell](), list[Cell]()
        for labels in self._groups():
            uploads = {label: self._upload(clients[index], label, clients) for label in labels}
            keys = self._keys(uploads, index, repeat)
            shared = {label: self._measure(uploads[label], keys[label]) for label in labels}
            shared_rows += [{**place, "defense": label, **shared[label]} for label in labels]
            for (label, name), cell in self._attack(uploads, shared, keys, bar):
                cells.append({**place, "defense": label, "attack": name, **cell})
        return shared_rows, cells

    def _clients(self, repeat: int) -> list[Client]:
        """Return one client for every batch.

        If a defense's first messages are empty, those of other clients come before. Maps are made
        only when they are needed.
        """
        return [
            Client(self.model, batch, self.setup.shared, (self.settings.seed, number, repeat))
            for number, batch in enumerate(self.batches)
        ]

    def _keys(self, uploads: dict[str, Upload], index: int, repeat: int) -> dict[str, str]:
        """Return the keys of what each of these defenses makes of a message."""
        message_key, keys = digest(self.key, self.batches[index], index, repeat), {}
        for label, upload in uploads.items():
            warmup = [client.batch for client in upload.warmup_clients]
            keys[label] = digest(message_key, self.defense_keys[label], warmup)
        return keys

    def _is_stored(self, index: int, repeat: int) -> bool:
        """Return whether an earlier run attacked the message, so that it takes no time."""
        clients = self._clients(repeat)
        uploads = {label: self._upload(clients[index], label, clients) for label in self.defenses}
        keys = self._keys(uploads, index, repeat)
        return all(digest(keys[d], key) in self.cells for (d, _), key in self.attack_keys.items())

    def _groups(self) -> list[list[str]]:
        """Return groups of defenses whose messages are in memory together.

        A group has several if candidates are ranked, whose gradients are then computed once for
        all.
        """
        ranks = any(isinstance(a.attack, Candidates) for a in self.attackers.values())
        entries = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        size = max(1, _GROUP_ENTRIES // max(entries, 1)) if ranks else 1
        labels = list(self.defenses)
        return [labels[start : start + size] for start in range(0, len(labels), size)]

    def _attack(
        self, uploads: dict[str, Upload], shared: dict[str, Cell], keys: dict[str, str], bar: Any
    ) -> Iterator[tuple[_Pair, Cell]]:
        """Yield what every attacker recovers from each of these uploads."""
        refusals: dict[str, Cell] = {
            label: {why: row[why] for why in ("reason", "crash") if why in row}
            for label, row in shared.items()
        }
        # Cells of one message differ by defense, attack, grants and nothing else.
        attack_keys = {pair: key for pair, key in self.attack_keys.items() if pair[0] in uploads}
        cell_keys = {pair: digest(keys[pair[0]], key) for pair, key in attack_keys.items()}
        open_keys = {pair: key for pair, key in cell_keys.items() if not refusals[pair[0]]}
        ranked = self._rank(uploads, open_keys)
        for pair, key in cell_keys.items():
            bar.set_postfix_str(", ".join(pair))
            # One seed for all attacks: they differ in nothing but themselves.
            attack = partial(uploads[pair[0]].attack, self.attackers[pair], self.modality)
            cell = refusals[pair[0]] or ranked.get(pair) or self.cells.once(key, attack)
            yield pair, cell
            bar.update()

    def _rank(self, uploads: dict[str, Upload], keys: dict[_Pair, str]) -> dict[_Pair, Cell]:
        """Return membership inference that is not stored yet, for all defenses together."""
        missing: dict[str, list[_Pair]] = {}
        for pair, key in keys.items():
            # Cells that are there already are read by the caller.
            if isinstance(self.attackers[pair].attack, Candidates) and key not in self.cells:
                missing.setdefault(pair[1], []).append(pair)
        ranked: dict[_Pair, Cell] = {}
        for pairs in missing.values():
            pair_uploads = [uploads[label] for label, _ in pairs]
            pair_attackers = [self.attackers[pair] for pair in pairs]
            cells = attack_together(pair_uploads, pair_attackers, self.modality)
            for pair, cell in zip(pairs, cells, strict=True):  # stored before other attacks run
                ranked[pair] = self.cells.once(keys[pair], partial(dict, cell))
        return ranked

    def _measure(self, upload: Upload, key: str) -> Cell:
        """Return what is known of a message without attacking it."""
        # Stored without estimates and labels: a new estimator must not protect the message anew.
        row = self.cells.once(key, upload.distance)
        if "reason" in row or "crash" in row:
            return row
        row |= {"estimates": {}, "no_estimates": {}}
        for name in self.estimators:
            estimate_key = digest(key, name, self.estimator_keys[name])
            cell = self.cells.once(estimate_key, partial(upload.estimate, name))
            if "values" in cell:
                row["estimates"][name] = cell["values"]
            else:
                row["no_estimates"][name] = _why(cell)
        if count := self.settings.word_pairs:
            terms = self.modality, count, self.settings.adaptive
            cell = self.cells.once(
                digest(key, "pairs", *terms[1:]), partial(upload.distinguish, *terms)
            )
            row |= {"pairs": cell["pairs"]} if "pairs" in cell else {"no_pairs": _why(cell)}
        recover = partial(upload.recover_labels, self.modality)
        cell = self.cells.once(digest(key, "labels"), recover)
        return row | ({"labels": cell["labels"]} if "labels" in cell else {"no_labels": _why(cell)})


def _why(cell: Cell) -> str:
    return cell.get("reason") or f"It crashed. {cell['crash']}"


def _write(result: Audit, folder: Path) -> float:
    """Write audit.json, table.md and report.html, and return the seconds that it took."""
    started = time.monotonic()
    write_json(folder / "audit.json", asdict(result))
    write_report(summarize(result), folder)
    return time.monotonic() - started


# --- the record


def _record(setup: Setup, settings: AuditSettings, estimators: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that it takes to repeat the audit, and that its report has to know."""
    model, modality, messages = setup.model, setup.modality, len(setup.batches)
    described, task = modality.settings(), task_of(model)
    # Only drawing classes has a chance level; numbers and texts have none.
    has_classes = modality.labels == "class" and hasattr(model, "config")
    return {
        **asdict(settings),
        **described,
        "main_score": MAIN_SCORES[described["kind"]].name,
        "model": _model_name(model),
        "training_mode": model.training,
        "samples": messages * settings.rows,
        "messages": messages,
        "task": None if task is None else task.name,
        "classes": getattr(model.config, "num_labels", None) if has_classes else None,
        "chance": modality.describe_chance(messages),
        "threat_model": [*threat_model(model, modality, settings), *setup.assumptions],
        "estimators": {
            name: {
                "title": estimator.title,
                "meaning": estimator.meaning,
                "ranks": estimator.ranks,
            }
            for name, estimator in estimators.items()
        },
        "device": str(next(model.parameters()).device),
        "versions": {
            "hf-gradguard": __version__,
            **{name: version(name) for name in ("torch", "transformers", "numpy")},
            "python": platform.python_version(),
        },
    }


def _model_name(model: nn.Module) -> str:
    """Return the model's name on the Hub, or its folder; of an absolute path only the last part.

    The rest of a path is private.
    """
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return os.path.basename(os.path.normpath(name)) if os.path.isabs(name) else name


def _public(attack: Attack) -> dict[str, Any]:
    return {name: value for name, value in vars(attack).items() if not name.startswith("_")}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON takes them, with objects by their class."""
    return {str(key): _plain(value) for key, value in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{len(value)} entries"
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return repr(value) if isinstance(value, Defense) else type(value).__name__
