"""What both parts share: the cells, what attackers see and know, and the table."""

import numpy as np

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, average
from hf_gradguard.randomness import Stream

from ..lib.images import QUICK_SMOOTHING
from ..lib.tables import bracketed, plt, save, write_table
from .settings import (
    CLIPS,
    NOISE,
    QUICK_DEFENSES,
    QUICK_NETWORK_STEPS,
    QUICK_SAMPLES,
    QUICK_UPLOADS,
    UPLOADS,
)


def quickly(plan: dict) -> dict:
    steps = {"steps": 1}
    return plan | {
        "uploads": QUICK_UPLOADS,
        "samples": {name: QUICK_SAMPLES.get(name, n) for name, n in plan["samples"].items()},
        "attacks": {a: s | steps if "steps" in s else s for a, s in plan["attacks"].items()},
        "chosen": {name: s | QUICK_SMOOTHING for name, s in plan["chosen"].items()},
        "defenses": {name: plan["defenses"][name][:1] for name in QUICK_DEFENSES},
        "refiner": dict.fromkeys(plan["refiner"], QUICK_NETWORK_STEPS),
    }


def cells_of(plan: dict) -> dict:
    """First all attackers who do not know the defense, then those who do."""
    cells = {}
    for adaptive in (False, True):
        for attack, settings in plan["attacks"].items():
            for defense, strengths in plan["defenses"].items():
                for strength in strengths:
                    known = knowledge(plan, defense, strength, attack) if adaptive else ({}, {})
                    if known is None:
                        continue
                    row = " ".join([defense, *(f"{k}={v}" for k, v in strength.items())])
                    cells[row, column(attack, adaptive)] = {
                        "defense": defense,
                        "strength": strength,
                        "attack": attack,
                        "settings": settings | known[1],
                        "seen": known[0],
                        **plan["samples"],
                        **(plan["refiner"] if defense == "refiner" else {}),
                    }
    return cells


def column(attack: str, adaptive: bool) -> str:
    return attack + ", adaptive" * adaptive


def knowledge(plan: dict, defense: str, strength: dict, attack: str) -> tuple[dict, dict] | None:
    """What an attacker who knows the defense has seen, and how its attack is set; `None` if all is
    as before.
    """
    spans, settings = attack == "span", plan["chosen"].get(attack, {})
    if defense in NOISE:
        clip = {CLIPS[defense]: strength["clip"]} if defense in CLIPS and not spans else {}
        weighs = defense.startswith("optimal") and not spans
        return {"uploads": plan.get("uploads", UPLOADS), "covariance": weighs}, clip | settings
    if "pruning" in defense:
        return {}, ({"complete": True} if spans else {"match_nonzero": True} | settings)
    known = {"soteria": {"leave_out": ["classifier"]}, "refiner": plan["again"]}.get(defense, {})
    return ({}, known | settings) if known | settings and not spans else None


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
    generator = Stream.from_seeds(1000 + number)
    if covariance:
        gradient = made.clipped(gmap.gradient(), None)
        shape, _ = made.shaped(gmap, gradient, generator)
        grants = grants | {"noise_variance": made.variance(gradient, shape)}
    return average(
        [Observation(model, made(gmap, generator=generator), **grants) for _ in range(uploads)]
    )


def present(plan: dict, figures: dict, chance: list[float], score: str, digits: int, output):
    """The table, with bootstrap intervals, and the same as a picture: red is what leaks, chance is
    white.
    """
    columns = [column(attack, adaptive) for attack in plan["attacks"] for adaptive in (False, True)]
    found = {
        row: [cells.get(name, {}).get(score) for name in columns] for row, cells in figures.items()
    }

    def shown(values: list[float] | None) -> str:
        return bracketed(values, f".{digits}f") if values else ""

    rows = [["chance", shown(chance), *[""] * (len(columns) - 1)]]
    rows += [[row, *map(shown, cells)] for row, cells in found.items()]
    write_table(output, ["", *columns], rows)
    means = np.array([[cell[0] if cell else np.nan for cell in cells] for cells in found.values()])
    most = max(chance[0], np.nanmax(means))
    size = (3 + len(columns), 1.5 + 0.28 * len(found))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.imshow(means, cmap="Reds", vmin=chance[0], vmax=most, aspect="auto")
    middle = (chance[0] + most) / 2
    for (y, x), mean in np.ndenumerate(means):
        if not np.isnan(mean):
            color = "white" if mean > middle else "black"
            text = f"{mean:.{digits}f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
    titles = [name.replace(", ", "\n").replace("_", "\n") for name in columns]
    axes.set_xticks(range(len(columns)), titles, fontsize=8)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.xaxis.tick_top()
    axes.set_title(f"{score}; chance {chance[0]:.{digits}f}", fontsize=10)
    save(figure, output)
