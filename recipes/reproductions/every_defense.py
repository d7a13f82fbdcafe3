"""What text_defenses.py and image_defenses.py share: the defenses at three strengths, attackers who
know them, the table.

Nothing to run by itself.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from reporting import Results, named, write_table
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, average

matplotlib.use("agg")
from matplotlib import pyplot as plt

NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8
CLIPS = {"dp_sgd": "clip_norm", "optimal_dp_sgd": "clip_coordinate"}


def strengths(relative_scales: tuple, alphas: tuple) -> dict[str, list[dict]]:
    """Rows of equal relative_scale add equal noise power; rows of equal ratio zero equally many
    coordinates.
    """
    power, share = (
        [{"relative_scale": s} for s in relative_scales],
        [{"ratio": r} for r in (0.5, 0.9, 0.99)],
    )
    return {
        "none": [{}],
        "gaussian_noise": power,
        "laplace_noise": power,
        "optimal_noise": power,
        "dp_sgd": [{"clip": 1.0, **p} for p in power],
        "optimal_dp_sgd": [{"clip": 0.01, **p} for p in power],
        "pruning": share,
        "optimal_pruning": share,
        "quantization": [{"bits": b} for b in (8, 4, 2)],
        "soteria": share,
        "refiner": [{"alpha": a} for a in alphas],
    }


def quickly(plan: dict) -> dict:
    """Two samples, one strength of one defense of each kind that attackers know, a step of each
    attack.
    """
    attacks = {
        name: s | ({"steps": 1} if "steps" in s else {}) for name, s in plan["attacks"].items()
    }
    kinds = ("none", "optimal_noise", "pruning", "quantization", "soteria", "refiner")
    return plan | {
        "samples": 2,
        "attacks": attacks,
        "defenses": {kind: plan["defenses"][kind][:1] for kind in kinds},
    }


def fill(results: Results, scores: Callable[..., dict], again: dict) -> None:
    """Every cell that is not there yet: first all attackers who do not know the defense, then those
    who do.

    Args:
        results: Its plan has `defenses`, with strengths, `attacks`, with settings, and perhaps
            `chosen`, those that who knows the defense chooses by what he sees. Filled with
            `{defense and strength: {attack: scores}}`.
        scores: Of `(defense, strength, what else the attacker has seen, attack, settings)`.
        again: How an attacker who knows Refiner starts.
    """
    defenses, attacks, chosen = (
        results.plan["defenses"],
        results.plan["attacks"],
        results.plan.get("chosen", {}),
    )
    cells = [(a, b, c, d) for a in (0, 1) for b in attacks for c in defenses for d in defenses[c]]
    for adaptive, attack, defense, strength in logging.tqdm(cells):
        what_else = knowledge(defense, strength, attack, again, chosen) if adaptive else ({}, {})
        if what_else is not None:
            row = " ".join([defense, *map("{0[0]}={0[1]}".format, strength.items())])
            arguments = (defense, strength, what_else[0], attack, attacks[attack] | what_else[1])
            results.get((row, column_of(attack, adaptive)), scores, *arguments)


def share(
    model,
    gmap: GradientMap,
    made,
    number: int,
    grants: dict,
    uploads: int = 1,
    covariance: bool = False,
) -> Observation:
    """What the server sees of a message: the mean of so many uploads, and the noise's covariance if
    it knows it.
    """
    generator = torch.Generator().manual_seed(1000 + number)
    if covariance:
        gradient = made.clipped(gmap.gradient())
        grants = grants | {
            "noise_variance": made.variance(gradient, made.shape(gmap, gradient, generator))
        }
    return average(
        [Observation(model, made(gmap, generator=generator), **grants) for _ in range(uploads)]
    )


def knowledge(
    defense: str, strength: dict, attack: str, again: dict, chosen: dict
) -> tuple[dict, dict] | None:
    """What an attacker who knows the defense has seen, and how its attack is set; `None` if all is
    as before.
    """
    spans, settings = attack == "span", chosen.get(attack, {})
    if defense in NOISE:
        clip = {CLIPS[defense]: strength["clip"]} if defense in CLIPS and not spans else {}
        return {
            "uploads": UPLOADS,
            "covariance": defense.startswith("optimal") and not spans,
        }, clip | settings
    if "pruning" in defense:
        return {}, ({"complete": True} if spans else {"match_nonzero": True} | settings)
    known = {"soteria": {"leave_out": ["classifier"]}, "refiner": again}.get(defense, {}) | settings
    return ({}, known) if known and not spans else None


def column_of(attack: str, adaptive: int) -> str:
    return attack + ", adaptive" * adaptive


def present(output: Path, results: Results, chance: list[float], score: str, digits: int) -> None:
    """The table, with bootstrap intervals, and the same as a picture: red is what leaks, chance is
    white.
    """
    columns = [
        column_of(attack, adaptive) for attack in results.plan["attacks"] for adaptive in (0, 1)
    ]
    found = {
        row: [cells.get(column, {}).get(score) for column in columns]
        for row, cells in results.figures.items()
    }

    def shown(values: list[float] | None) -> str:
        return "{0:.{3}f} [{1:.{3}f}, {2:.{3}f}]".format(*values, digits) if values else ""

    rows = [["chance", shown(chance), *[""] * (len(columns) - 1)]]
    write_table(
        output, ["", *columns], rows + [[row, *map(shown, cells)] for row, cells in found.items()]
    )
    means = np.array([[cell[0] if cell else np.nan for cell in cells] for cells in found.values()])
    most = max(chance[0], np.nanmax(means))
    figure, axes = plt.subplots(
        figsize=(3 + len(columns), 1.5 + 0.28 * len(found)), layout="constrained"
    )
    axes.imshow(means, cmap="Reds", vmin=chance[0], vmax=most, aspect="auto")
    middle = (chance[0] + most) / 2
    for (row, column), mean in np.ndenumerate(means):
        if not np.isnan(mean):
            color = "white" if mean > middle else "black"
            axes.text(
                column, row, f"{mean:.{digits}f}", ha="center", va="center", fontsize=8, color=color
            )
    axes.set_xticks(
        range(len(columns)),
        [column.replace(", ", "\n").replace("_", "\n") for column in columns],
        fontsize=8,
    )
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.xaxis.tick_top()
    axes.set_title(f"{score}; chance {chance[0]:.{digits}f}", fontsize=10)
    figure.savefig(named(output, ".png"), dpi=100)
