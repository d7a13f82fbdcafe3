"""Defenses × attacks on data: protect each message, attack what was shared, score what came out."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .. import __version__
from ..attacks import Attack, Observation, make_attack
from ..data.samples import Sample
from ..defenses import Defense, Message
from ..gradient_map import GradientMap, Tensors
from ..leakage import Eigenvalue, largest_eigenvalue
from ..randomness import seeded_generator
from .cells import Cells, digest, write_json
from .estimators import figures
from .modality import Images, Texts
from .specs import Spec, make_defenses, parse_specs

_DROPOUT, _DEFENSE, _ATTACK, _GUESS, _PROBES = range(5)  # streams of random numbers


@dataclass
class Audit:
    """What an audit found. `asdict` of it is `audit.json`.

    Args:
        settings: Model, data, threat model, seeds, versions: all that it takes to repeat it.
        defenses: `{label: settings}`.
        attacks: `{label: settings}`.
        messages: The originals, one entry a message. Private data.
        chance: Scores of guesses without a gradient: for each message
            `{score: one number a sample}`.
        shared: One entry a message, repeat and defense: `relative_error` ‖shared - g‖/‖g‖ and
            `cosine` of what was shared, and `figures`, those of `estimators.figures` or the
            `reason` why there are none; or `reason`, if the defense refused.
        cells: One entry a message, repeat, defense and attack: `scores` and the reconstruction; or
            `reason`, if the attack is not applicable.
    """

    settings: dict[str, Any]
    defenses: dict[str, dict[str, Any]]
    attacks: dict[str, dict[str, Any]]
    messages: list[dict[str, Any]]
    chance: list[dict[str, list[float]]]
    shared: list[dict[str, Any]]
    cells: list[dict[str, Any]]


def audit(
    model: nn.Module,
    processing_class: Any,
    samples: Sequence[Sample],
    defenses: Spec | Sequence[Spec],
    attacks: Spec | Sequence[Spec],
    *,
    output: str | os.PathLike[str],
    batch_size: int = 1,
    repeats: int = 1,
    seed: int = 0,
    max_length: int = 64,
    labels_known: bool = True,
    lengths_known: bool = True,
    noise_known: bool = False,
    share_input_embeddings: bool = False,
    reference: bool = True,
) -> Audit:
    """Attack a model's shared gradients under each defense, on the same samples with the same seeds
    and attack budgets.

    A client's message is the gradient of one batch, protected by itself, in the mode in which the
    model is (`eval()` is without dropout: the attacker's best case). Every finished cell is kept in
    `output/cells`, so an interrupted audit goes on where it stopped; other settings make new cells.
    The whole is written to `output/audit.json`.

    Args:
        model: A text or image classifier. Left as it was.
        processing_class: Its tokenizer or image processor; `None` for an image model that takes
            pixels in [0, 1].
        samples: `(text or image, class id)` each; images as PIL or bytes `(H, W)` or `(H, W, C)`.
        defenses: Names with settings, see `parse_specs`. Several strengths of one defense are
            several rows.
        attacks: Names with settings.
        output: Folder to write to. Holds private data afterwards.
        batch_size: Samples a message.
        repeats: Times that each message is protected and attacked, with fresh seeds.
        seed: Of all randomness. An audit is no place to hide anything: its noise is reproducible.
        max_length: Longer texts are cut to so many tokens.
        labels_known: Grant the labels to the attacker.
        lengths_known: Grant the texts' lengths. Without it texts are padded to `max_length` and the
            mask is withheld.
        noise_known: Grant the covariance of a defense's noise.
        share_input_embeddings: Share the token embeddings' gradient, which names the words.
        reference: Add the row `none`, without which nobody can tell whether the attacks work at
            all.

    Raises:
        ValueError: For unknown names, samples that do not fill the batches, labels out of range, or
            texts without words.
        OSError: If `output` cannot be written to. Said before any work.

    Example:
        >>> result = audit(model, tokenizer, samples, ["optimal_noise:relative_scale=1"], "tag:steps=500", output="runs/audit")
        >>> write_report(result, "runs/audit")
    """
    made_defenses = make_defenses(defenses)
    if reference:
        made_defenses = make_defenses("none") | made_defenses
    made_attacks = {
        label: make_attack(links[0][0], **links[0][1])
        for label, links in parse_specs(attacks).items()
        if _single(links)
    }
    if not made_defenses or not made_attacks:
        raise ValueError("An audit needs at least one defense and one attack.")
    if min(batch_size, repeats) < 1 or seed < 0:
        raise ValueError(
            f"batch_size and repeats must be at least 1, seed at least 0, but are {batch_size}, "
            f"{repeats} and {seed}."
        )
    if not samples or len(samples) % batch_size:
        raise ValueError(f"{len(samples)} samples do not fill messages of {batch_size}.")
    cells = Cells(Path(output) / "cells")

    is_text = getattr(model, "main_input_name", "input_ids") != "pixel_values"
    if is_text and not hasattr(processing_class, "all_special_ids"):
        raise ValueError(
            f"{type(model).__name__} takes text, so it needs a tokenizer, but got "
            f"{processing_class!r}."
        )
    modality = (
        Texts(model, processing_class, max_length, lengths_known)
        if is_text
        else Images(model, processing_class)
    )
    device = next(model.parameters()).device
    batches = [
        {
            key: tensor.to(device)
            for key, tensor in modality.batch(samples[start : start + batch_size]).items()
        }
        for start in range(0, len(samples), batch_size)
    ]
    for defense in made_defenses.values():
        defense.prepare(model, processing_class)

    settings = {
        **modality.settings(),
        "main_score": modality.main_score,
        "model": _model_name(model),
        "training_mode": model.training,
        "samples": len(samples),
        "batch_size": batch_size,
        "repeats": repeats,
        "seed": seed,
        "labels_known": labels_known,
        "lengths_known": lengths_known,
        "noise_known": noise_known,
        "share_input_embeddings": share_input_embeddings,
        "chance": modality.describe_chance(len(batches)),
        "device": str(device),
        "versions": _versions(),
    }
    grants = [labels_known, lengths_known, noise_known, share_input_embeddings]
    base = digest(model, modality.identity(), grants, seed, settings["versions"])
    defense_keys = {label: digest(defense) for label, defense in made_defenses.items()}
    attack_keys = {label: digest(attack) for label, attack in made_attacks.items()}
    shared_rows, rows = [], []
    bar = logging.tqdm(
        total=len(batches) * repeats * len(made_defenses) * len(made_attacks), desc="audit"
    )
    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            message = _Message(model, batch, share_input_embeddings, (seed, index, repeat))
            message_key = digest(base, batch, index, repeat)
            for defense_label, defense in made_defenses.items():
                place = {"message": index, "repeat": repeat, "defense": defense_label}
                upload = _Upload(message, defense, noise_known)
                key = digest(message_key, defense_keys[defense_label])
                row = cells.get(key) or cells.put(key, upload.describe())
                if "reason" not in row:
                    figures_key = digest(key, "figures, I_lb as a norm")
                    row["figures"] = cells.get(figures_key) or cells.put(
                        figures_key, upload.figures()
                    )
                shared_rows.append({**place, **row})
                for (
                    attack_label,
                    attack,
                ) in (
                    made_attacks.items()
                ):  # one seed for all: they differ in nothing but themselves
                    bar.set_postfix_str(f"{defense_label}, {attack_label}")
                    key = digest(
                        message_key, defense_keys[defense_label], attack_keys[attack_label]
                    )
                    cell = cells.get(key)
                    if cell is None and "reason" in row:
                        cell = {"reason": row["reason"]}
                    elif cell is None:
                        given: dict[str, Any] = (
                            {"labels": batch["labels"].clone()} if labels_known else {}
                        )
                        given |= modality.observed(batch)
                        cell = cells.put(key, _attack(attack, upload, given, modality))
                    rows.append({**place, "attack": attack_label, **cell})
                    bar.update()
    bar.close()

    result = Audit(
        settings=settings,
        defenses={label: _json(defense.settings()) for label, defense in made_defenses.items()},
        attacks={label: _json(_attack_settings(attack)) for label, attack in made_attacks.items()},
        messages=[modality.show(batch) for batch in batches],
        chance=[modality.chance(batches, index, seed) for index in range(len(batches))],
        shared=shared_rows,
        cells=rows,
    )
    write_json(Path(output) / "audit.json", asdict(result))
    return result


class _Message:
    """One client's batch, with its gradient map, made when it is first needed and the same for
    every defense.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        share_embeddings: bool,
        seeds: tuple[int, ...],
    ) -> None:
        self.model, self.batch, self.share_embeddings, self.seeds = (
            model,
            batch,
            share_embeddings,
            seeds,
        )
        self._gmap: GradientMap | None = None

    @property
    def device(self) -> torch.device:
        return self.batch["labels"].device

    def generator(self, stream: int) -> torch.Generator:
        """The same for every defense and every attack."""
        return seeded_generator(self.device, *self.seeds, stream)

    @property
    def gmap(self) -> GradientMap:
        if self._gmap is None:
            with _reproducible(self.model, self.generator(_DROPOUT)):
                self._gmap = GradientMap(
                    self.model, self.batch, share_input_embeddings=self.share_embeddings
                )
        return self._gmap

    @cached_property
    def eigenvalue(self) -> Eigenvalue:
        """λ_max(J Jᵀ), which no defense changes."""
        return largest_eigenvalue(self.gmap)


class _Upload:
    """What one defense shares of one message, computed when it is first needed."""

    def __init__(self, message: _Message, defense: Defense, noise_known: bool) -> None:
        self.message, self.defense, self.noise_known = message, defense, noise_known
        self._shared: Message | None = None

    @property
    def shared(self) -> Message:
        if self._shared is None:
            # Every message is a first one: nothing is kept from those before.
            self.defense.load_state_dict({})
            self._shared = self.defense(self.message.gmap, self.message.generator(_DEFENSE))
        return self._shared

    def figures(self) -> dict[str, Any]:
        """What estimators say of it, or why they say nothing."""
        message, shared = self.message, self.shared
        try:
            return figures(message.gmap, shared, message.eigenvalue, message.generator(_PROBES))
        except (ValueError, ArithmeticError) as error:
            return {"reason": str(error)}

    def describe(self) -> dict[str, Any]:
        """How far what is shared is from the gradient, or why nothing is."""
        gradient = self.message.gmap.gradient()
        started = time.perf_counter()
        try:
            shared = self.shared
        except (ValueError, FloatingPointError) as error:
            return {"reason": str(error)}
        seconds = time.perf_counter() - started
        size, shared_size = (math.sqrt(_inner(tensors, tensors)) for tensors in (gradient, shared))
        change = {name: shared[name] - g for name, g in gradient.items()}
        return {
            "relative_error": math.sqrt(_inner(change, change)) / size if size else None,
            "cosine": _inner(gradient, shared) / (size * shared_size)
            if size * shared_size
            else None,
            "seconds": seconds,
        }

    @property
    def noise_variance(self) -> Tensors | None:
        """Σ of the noise in `shared`, if the threat model grants it and there is any."""
        noise = self.shared.noise
        if not self.noise_known or noise is None:
            return None
        return noise.added if any(bool(tensor.any()) for tensor in noise.added.values()) else None


def _attack(
    attack: Attack, upload: _Upload, given: dict[str, Any], modality: Texts | Images
) -> dict[str, Any]:
    """One cell: scores and reconstruction, or why the attack is not applicable."""
    message = upload.message
    try:
        seen = Observation(
            model=message.model,
            gradient=upload.shared,
            noise_variance=upload.noise_variance,
            **given,
        )
        found = attack(seen, message.generator(_ATTACK))
    except (ValueError, FloatingPointError) as error:
        return {"reason": str(error)}
    try:
        scored = modality.score(found, message.batch)
    except ValueError as error:
        return {"reason": f"What the attack returned cannot be scored. {error}"}
    labels = None if found.labels is None or "labels" in given else found.labels.tolist()
    return {
        **scored,
        "labels": labels,
        "objective": _finite(found.objective),
        "seconds": _finite(found.seconds),
    }


@contextmanager
def _reproducible(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Draws of dropout that the generator determines, and buffers (batch statistics) put back
    afterwards.
    """
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        torch.manual_seed(
            int(torch.randint(2**62, (), generator=generator, device=generator.device))
        )
        try:
            yield
        finally:
            for name, tensor in model.named_buffers():
                tensor.data.copy_(
                    buffers[name]
                )  # .data: to the graph of the pass just made, nothing has changed


def _inner(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _single(links: list[Any]) -> bool:
    if len(links) > 1:
        raise ValueError(f"Attacks cannot be chained: {' + '.join(name for name, _ in links)}.")
    return True


def _attack_settings(attack: Attack) -> dict[str, Any]:
    return {name: value for name, value in vars(attack).items() if not name.startswith("_")}


def _json(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON takes them; objects by their class."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return repr(value) if isinstance(value, Defense) else type(value).__name__

    return {key: plain(value) for key, value in settings.items()}


def _model_name(model: nn.Module) -> str:
    """As on the Hub, or a folder; of an absolute path the last part: the rest is nobody's
    business.
    """
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return os.path.basename(os.path.normpath(name)) if os.path.isabs(name) else name


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"hf-gradguard": __version__, **packages, "python": platform.python_version()}
