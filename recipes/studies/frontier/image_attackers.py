"""What attackers who know the defense read of images, at a stage of a client's training."""

import dataclasses
import functools
import itertools

import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses import Defense, Message
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream

from ..lib.attacks import attack_of
from ..lib.device import DEVICE, there
from ..lib.images import INVERTING, single_images, smoothed
from .attackers import NOISE_ALONE, noise_alone, of_each, says_nothing, sent, told, waited_for
from .client import Stage
from .image_training import ImageTask
from .settings import CANDIDATES, GATHERED, UNAWARE, UNLABELED
from .settings import INVERTING as ONE_IMAGE
from .shown import GRAY


def attacked(cell: dict, task: ImageTask, path: str) -> dict:
    """Figures of each image: PSNR in dB; of candidates, whether it is told at 1 % false alarms, and
    its rank.
    """
    count = cell["messages"]
    if cell["attack"] == GRAY:
        rows = _images(path, count)
        return _psnr([torch.full_like(row["pixel_values"], 0.5) for row in rows], rows)
    stage, settings = task.stage(cell, cell["stage"]), dict(cell["settings"])
    if NOISE_ALONE in cell:
        stage = noise_alone(stage)
    if cell["attack"] in (CANDIDATES[0], UNLABELED[0], GATHERED[0]):
        rows, size = _images(path, settings["listed"]), cell["size"]
        starts = range(0, count * size, size)
        batches = [_together(rows[at : at + size]) for at in starts]
        if cell["attack"] == GATHERED[0]:
            see = functools.partial(_granted, stage)
            seen = waited_for(cell, stage, batches, task.later(), see)
        else:
            seen = _observed(cell, stage, batches)
        if cell["attack"] == UNLABELED[0]:
            seen = [one and dataclasses.replace(one, labels=None) for one in seen]
        listed = [row["pixel_values"][0] for row in rows]
        return told(cell, listed, [int(row["labels"]) for row in rows], seen)
    own = settings.pop("own")
    rows = _images(path, count + own)
    images = [row["pixel_values"] for row in rows]
    gray = torch.full_like(images[0], 0.5)
    settings = INVERTING | {"patience": 5, "start": gray} | settings
    settings["match_nonzero"] = stage.defense.informed().get("match_nonzero", False)
    theirs = _observed(cell, stage._replace(defense=_own(cell, stage, task)), rows[count:])
    if all(one is not None for one in theirs):
        settings = smoothed(settings, theirs, images[count:])
    else:  # there is nothing to choose a weight by
        settings |= {"total_variation": settings["total_variation"][0]}
    seen, attack = _observed(cell, stage, rows[:count]), attack_of(ONE_IMAGE[0], **settings)
    found = of_each(attack, seen, torch.Generator(DEVICE).manual_seed(cell["seed"]))
    guesses = [gray if one is None else one.input for one in found]
    weight = {"total_variation": settings["total_variation"]}
    return _psnr([guess.nan_to_num(0.5) for guess in guesses], rows[:count]) | weight


def _own(cell: dict, stage: Stage, task: ImageTask) -> Defense:
    """An attacker's: with feedback after messages of his own, so that something is left out; at the
    start after those that are empty.
    """
    own = make_defense(cell["defense"], **cell["strength"])
    own.prepare(stage.model, None)
    if getattr(own, "error_feedback", False):
        before = own.facts.warmup_messages if cell["stage"] == "start" else None
        for number, batch in enumerate(itertools.islice(task.later(), before)):
            own(GradientMap(stage.model, batch), Stream.from_seeds(cell["seed"], number))
    return own


def _observed(cell: dict, stage: Stage, batches: list[dict]) -> list[Observation | None]:
    """What a server that knows the defense has; `None` of a message of zeros."""
    seen = [
        None if says_nothing(message) else _granted(stage, batch, message)
        for batch, message in zip(batches, sent(cell, stage, batches), strict=True)
    ]
    if cell["attack"] != UNAWARE[0]:
        return seen
    return [one and dataclasses.replace(one, noise_variance=None, mechanism=None) for one in seen]


def _granted(stage: Stage, batch: dict, message: Message) -> Observation:
    return Observation(
        stage.model,
        message,
        tuple(batch["pixel_values"].shape),
        labels=batch["labels"],
        noise_variance=None if message.noise is None else message.noise.added,
        mechanism=stage.defense.mechanism(message),
    )


def _images(path: str, count: int) -> list[dict]:
    return [there(row) for row in single_images(path, count)]


def _together(rows: list[dict]) -> dict:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _psnr(guesses: list, rows: list[dict]) -> dict:
    images = [row["pixel_values"] for row in rows]
    psnr = score_images(guesses, images, bootstrap=0).per_sample["psnr"]
    return {"psnr": [round(float(value), 2) for value in psnr]}
