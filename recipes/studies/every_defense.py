"""Every defense at three strengths against every attack, and against attackers that know it."""

import argparse
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, average
from hf_gradguard.metrics import score_images, score_text
from hf_gradguard.networks import train_text_network
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import attack_of, token_ids_of
from .lib.defenses import published
from .lib.images import INVERTING, QUICK_SMOOTHING, SMOOTHING, lenet_for, single_images, smoothed
from .lib.results import PUBLISHED, Results, nested
from .lib.tables import bracketed, plt, save, summary, write_table
from .lib.text import batches_of_one, load_tokenizer, of_length, small_bert, sst2

# Rows of equal relative_scale add equal noise power; rows of equal ratio zero equally many
# coordinates.
RATIOS = [{"ratio": 0.5}, {"ratio": 0.9}, {"ratio": 0.99}]
BITS = [{"bits": 8}, {"bits": 4}, {"bits": 2}]
TEXT_NOISE = [{"relative_scale": 0.1}, {"relative_scale": 0.5}, {"relative_scale": 2.0}]
IMAGE_NOISE = [{"relative_scale": 0.01}, {"relative_scale": 0.1}, {"relative_scale": 1.0}]
TEXT_DEFENSES: dict[str, list[dict]] = {
    "none": [{}],
    "gaussian_noise": TEXT_NOISE,
    "laplace_noise": TEXT_NOISE,
    "optimal_noise": TEXT_NOISE,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in TEXT_NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in TEXT_NOISE],
    "pruning": RATIOS,
    "optimal_pruning": RATIOS,
    "quantization": BITS,
    "soteria": RATIOS,
    "refiner": [{"alpha": 0.3}, {"alpha": 0.6}, {"alpha": 0.9}],
}
IMAGE_DEFENSES = TEXT_DEFENSES | {
    "gaussian_noise": IMAGE_NOISE,
    "laplace_noise": IMAGE_NOISE,
    "optimal_noise": IMAGE_NOISE,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in IMAGE_NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in IMAGE_NOISE],
    "refiner": [{"alpha": 0.1}, {"alpha": 0.5}, {"alpha": 0.9}],
}

TEXT = {
    "defenses": TEXT_DEFENSES,
    "attacks": {
        "tag": {"steps": 300},
        "span": {},
        "inverting_gradients": {
            "steps": 300, "learning_rate": 0.01, "signed": False, "schedule": "linear", "warmup": 50
        },
        "lamp": {"steps": 300, "every": 100, "moves": 20},
    },
    "chosen": {},  # settings that an attacker who knows the defense has
    "again": {"start": "tokens", "restarts": 4},  # how one who knows Refiner starts
    "samples": {"samples": 20, "seed": 0},
    "refiner": {"network_steps": 1000},
}  # fmt: skip
IMAGES = {
    "defenses": IMAGE_DEFENSES,
    "attacks": {
        "inverting_gradients": {"steps": 60, "patience": 5, **INVERTING},
        "idlg": {"steps": 100, "patience": 15, "start": "uniform"},
    },
    "chosen": {"inverting_gradients": SMOOTHING},
    "again": {"restarts": 4},
    "samples": {"samples": 16, "own": 4, "seed": 0},
    "refiner": {},
}

# What attackers that know the defense know
NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8
CLIPS = {"dp_sgd": "clip_norm", "optimal_dp_sgd": "clip_coordinate"}

# In quick runs one defense of each kind that attackers know, at one strength, a step of each attack
QUICK_DEFENSES = ("none", "optimal_noise", "pruning", "quantization", "soteria", "refiner")
QUICK_SAMPLES = {"samples": 2, "own": 1}


def quick_plan(plan: dict) -> dict:
    steps = {"steps": 1}
    return plan | {
        "uploads": 2,
        "samples": {name: QUICK_SAMPLES.get(name, n) for name, n in plan["samples"].items()},
        "attacks": {a: s | steps if "steps" in s else s for a, s in plan["attacks"].items()},
        "chosen": {name: s | QUICK_SMOOTHING for name, s in plan["chosen"].items()},
        "defenses": {name: plan["defenses"][name][:1] for name in QUICK_DEFENSES},
        "refiner": dict.fromkeys(plan["refiner"], 400),
    }


def cells_of(plan: dict) -> dict:
    """First all attackers that do not know the defense, then those that do."""
    cells = {}
    for is_adaptive in (False, True):
        for attack, settings in plan["attacks"].items():
            for defense, strengths in plan["defenses"].items():
                for strength in strengths:
                    knows: Any = ({}, {})
                    if is_adaptive:
                        knows = knowledge(plan, defense, strength, attack)
                    if knows is None:
                        continue
                    uploads, attackers_settings = knows
                    row = " ".join([defense, *(f"{k}={v}" for k, v in strength.items())])
                    cells[row, column(attack, is_adaptive)] = {
                        "defense": defense, "strength": strength, "attack": attack,
                        "settings": settings | attackers_settings, "seen": uploads,
                        **plan["samples"],
                        **(plan["refiner"] if defense == "refiner" else {}),
                    }  # fmt: skip
    return cells


def column(attack: str, is_adaptive: bool) -> str:
    return attack + ", adaptive" * is_adaptive


def knowledge(plan: dict, defense: str, strength: dict, attack: str) -> tuple[dict, dict] | None:
    """What an attacker that knows the defense has seen, and how its attack is set; `None` if all is
    as before.
    """
    spans, settings = attack == "span", plan["chosen"].get(attack, {})
    if defense in NOISE:
        clip = {CLIPS[defense]: strength["clip"]} if defense in CLIPS and not spans else {}
        weighs = defense.startswith("optimal") and not spans
        return {"uploads": plan.get("uploads", UPLOADS), "covariance": weighs}, clip | settings
    if "pruning" in defense:
        return {}, ({"complete": True} if spans else {"match_nonzero": True} | settings)
    settings_of_knowing = {"soteria": {"leave_out": ["classifier"]}, "refiner": plan["again"]}.get(
        defense, {}
    )
    return (
        ({}, settings_of_knowing | settings)
        if settings_of_knowing | settings and not spans
        else None
    )


def observe(
    gmap: GradientMap, defense, number: int, grants: dict, uploads: int = 1,
    covariance: bool = False,
) -> Observation:  # fmt: skip
    """What the server sees of a message: the mean of so many uploads, and the noise's covariance if
    it knows it.
    """
    generator = Stream.from_seeds(1000 + number)
    if covariance:
        gradient = defense.clipped(gmap.gradient(), None)
        shape = defense.shaped(gmap, gradient, generator)
        grants = grants | {"noise_variance": defense.variance(gradient, shape, None)}
    messages = [defense(gmap, generator=generator) for _ in range(uploads)]
    return average([Observation(gmap.model, message, **grants) for message in messages])


class EveryDefense(Study):
    """Rows are defenses, columns attacks."""

    PLAN: dict[str, Any]
    SCORE: tuple[str, int]  # shown, with its digits

    @property
    def plan(self) -> dict:
        return quick_plan(self.PLAN) if self.quick else self.PLAN

    def chance(self) -> tuple[str, dict]:
        """An attack's column and the cell of what is shown there by chance."""
        raise NotImplementedError

    def cells(self) -> dict:
        attack, cell = self.chance()
        return {("chance", attack): cell} | cells_of(self.plan)

    def report(self, metrics: dict) -> None:
        """The table, with bootstrap intervals, and the same as a picture: red is what leaks, chance
        is white.
        """
        name, digits = self.SCORE
        chance = metrics.pop("chance")[self.chance()[0]][name]
        columns = [
            column(attack, is_adaptive) for attack in self.plan["attacks"] for is_adaptive in (0, 1)
        ]
        scores = {
            row: [cells.get(attack, {}).get(name) for attack in columns]
            for row, cells in metrics.items()
        }

        def shown(values: list[float] | None) -> str:
            return bracketed(values, f".{digits}f") if values else ""

        rows = [["chance", shown(chance), *[""] * (len(columns) - 1)]]
        rows += [[row, *map(shown, cells)] for row, cells in scores.items()]
        write_table(self.output, ["", *columns], rows)
        means = np.array([[cell[0] if cell else np.nan for cell in row] for row in scores.values()])
        most = max(chance[0], np.nanmax(means))
        size = (3 + len(columns), 1.5 + 0.28 * len(scores))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        axes.imshow(means, cmap="Reds", vmin=chance[0], vmax=most, aspect="auto")
        middle = (chance[0] + most) / 2
        for (y, x), mean in np.ndenumerate(means):
            if not np.isnan(mean):
                style = {"ha": "center", "va": "center", "fontsize": 8}
                color = "white" if mean > middle else "black"
                axes.text(x, y, f"{mean:.{digits}f}", color=color, **style)
        titles = [title.replace(", ", "\n").replace("_", "\n") for title in columns]
        axes.set_xticks(range(len(columns)), titles, fontsize=8)
        axes.set_yticks(range(len(scores)), list(scores), fontsize=8)
        axes.xaxis.tick_top()
        axes.set_title(f"{name}; chance {chance[0]:.{digits}f}", fontsize=10)
        save(figure, self.output)


class Texts(EveryDefense):
    """Every defense against every attack on text.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = {"--tokenizer": "folder or name", "--data_dir": "folder with train.tsv and dev.tsv"}
    PLAN, SCORE, LENGTH = TEXT, ("token_f1", 2), 14

    def chance(self) -> tuple[str, dict]:
        # What another sentence, the next one, has in common with each; no gradient is asked.
        return "tag", {"attack": "another sentence", **self.plan["samples"]}

    def load(self) -> None:
        torch.set_num_threads(1)
        set_seed(0)
        self.tokenizer = load_tokenizer(self.args.tokenizer)
        self.model = small_bert(self.tokenizer)
        batches = batches_of_one(self.tokenizer, sst2(self.args.data_dir))
        batches = of_length(batches, self.LENGTH, self.plan["samples"]["samples"])
        self.maps = [GradientMap(self.model, batch) for batch in batches]
        self.texts = [batch["input_ids"].tolist() for batch in batches]
        self.network = functools.cache(self._network)

    def _network(self, steps: int):
        public = sst2(self.args.data_dir, "train")["sentence"][:20_000]
        embedding = self.model.get_input_embeddings()
        return train_text_network(embedding, self.tokenizer, public, steps=steps, seed=0)

    def measure(self, cell: dict) -> dict:
        if cell["attack"] == "another sentence":
            return self.scored(self.texts[1:] + self.texts[:1])
        network = self.network(cell["network_steps"]) if "network_steps" in cell else None
        defense = published(cell["defense"], network, **cell["strength"])
        if network is not None:
            defense.prepare(self.model, self.tokenizer)
        observations = []
        for number, gmap in enumerate(self.maps):
            grants = {"input_shape": (1, self.LENGTH), "tokenizer": self.tokenizer}
            grants |= {"labels": gmap.batch["labels"]}
            observations.append(observe(gmap, defense, number, grants, **cell["seen"]))
        attack = attack_of(cell["attack"], **cell["settings"])
        if cell["attack"] == "span":
            return self.scored([token_ids_of(attack, o, cell["seed"]) for o in observations])
        generator = torch.Generator().manual_seed(cell["seed"])
        return self.scored([r.token_ids for r in attack.reconstruct_many(observations, generator)])

    def scored(self, ids: list) -> dict:
        scores = score_text(ids, self.texts, tokenizer=self.tokenizer)
        return summary(scores, ("token_f1", "position_accuracy", "rougeL", "exact_match"))


class Images(EveryDefense):
    """Every defense against attacks on images.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = {
        "--images": "npz with x (N, 32, 32, 3) and y",
        "--evaluation_network": "Refiner's, as train_evaluation_network.py trains it",
    }
    PLAN, SCORE = IMAGES, ("psnr", 1)

    def chance(self) -> tuple[str, dict]:
        samples = self.plan["samples"]["samples"]
        return "inverting_gradients", {"attack": "gray", "samples": samples}

    def load(self) -> None:
        torch.set_num_threads(1)
        set_seed(0)
        samples = self.plan["samples"]
        self.count = samples["samples"]
        batches = single_images(self.args.images, self.count + samples["own"])
        model, self.images = lenet_for(batches[0]), [batch["pixel_values"] for batch in batches]
        self.maps = [GradientMap(model, batch) for batch in batches]

    def measure(self, cell: dict) -> dict:
        count = self.count
        if cell["attack"] == "gray":
            return self.scored([torch.full_like(image, 0.5) for image in self.images[:count]])
        defense = published(cell["defense"], self.args.evaluation_network, **cell["strength"])
        grants = {"input_shape": tuple(self.images[0].shape)}
        observations = [
            observe(gmap, defense, number, grants, **cell["seen"])
            for number, gmap in enumerate(self.maps)
        ]
        settings = smoothed(cell["settings"], observations[count:], self.images[count:])
        attack = attack_of(cell["attack"], **settings)
        generator = torch.Generator().manual_seed(cell["seed"])
        guesses = [
            r.input.nan_to_num(0.5)
            for r in attack.reconstruct_many(observations[:count], generator)
        ]
        weight = {name: value for name, value in settings.items() if name == "total_variation"}
        return self.scored(guesses) | weight

    def scored(self, guesses: list) -> dict:
        return summary(score_images(guesses, self.images[: self.count]), ("psnr", "ssim"))


Interval = list[float]  # mean, and the ends of its interval


class Knowing(Study):
    """Does it matter that an attacker knows the defense?

    Conditions and figures: docs/findings/attacks_text.md.
    """

    # The study that each part is of, the score and its format
    SOURCES = {
        "text_defenses": ("every_defense:Texts", "token_f1", ".2f"),
        "image_defenses": ("every_defense:Images", "psnr", ".1f"),
        "candidates": ("candidates:FortyEight", "top1", ".2f"),
    }
    ARGUMENTS = {f"--{name}": {"type": Path, "default": PUBLISHED / name} for name in SOURCES}

    def report(self, metrics: dict) -> None:
        best: dict = {}
        for defense, attack, strength, without, knowing, form in self.pairs():
            change = abs(knowing[0] - without[0])
            row = (change, strength, without, knowing, form)
            best[defense, attack] = max(best.get((defense, attack), row), row)
        rows = [
            [f"`{defense}`", attack, f"`{strength}`" if strength else "",
             bracketed(without, form), bracketed(knowing, form), verdict(without, knowing)]
            for (defense, attack), (_, strength, without, knowing, form) in sorted(best.items())
        ]  # fmt: skip
        header = ["defense", "attack", "strength", "defense unknown", "defense known", "knowing"]
        write_table(self.output, header, rows)

    def pairs(self) -> Iterator[tuple[str, str, str, Interval, Interval, str]]:
        """Defense, attack and strength; what an attacker recovers without knowing the defense, and
        knowing it.
        """
        for source in ("text_defenses", "image_defenses"):
            _, score, form = self.SOURCES[source]
            for row, cell in self.published(source).items():
                defense, _, strength = row.partition(" ")
                for attack in cell:
                    adaptive_cell = cell.get(column(attack, True))
                    if adaptive_cell and defense not in ("none", "chance"):
                        kind = f"{attack}, {'images' if score == 'psnr' else 'text'}"
                        yield (
                            defense,
                            kind,
                            strength,
                            cell[attack][score],
                            adaptive_cell[score],
                            form,
                        )
        _, score, form = self.SOURCES["candidates"]
        for defense, states in self.published("candidates").items():
            for state, sizes in states.items():
                cells = sizes.get("1", {})
                for key in cells:
                    strength, _, knows = key.partition("|")
                    without = cells.get(f"{strength}|does not")
                    if knows == "knows" and without and defense != "none":
                        kind = f"candidates, text, {state} model"
                        yield defense, kind, strength, without[score], cells[key][score], form

    def published(self, source: str) -> dict:
        """The metrics of a part, as far as they are there."""
        output = getattr(self.args, source)
        args = argparse.Namespace(quick=False, all=True, output=output)
        module, _, name = self.SOURCES[source][0].partition(":")
        study = getattr(importlib.import_module(f"recipes.studies.{module}"), name)
        return nested(study(args).cells(), Results(output))


def verdict(without: Interval, knowing: Interval) -> str:
    if knowing[1] > without[2]:
        return "matters"
    return "does harm" if knowing[2] < without[1] else "cannot tell"
