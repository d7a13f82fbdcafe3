"""What text_defenses.py and image_defenses.py share: the defences at three strengths, attackers who know them, the table.

Nothing to run by itself.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, average

NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8


def strengths(relative_scales: tuple, alphas: tuple) -> dict[str, list[dict]]:
    """Rows of equal relative_scale add equal noise power; rows of equal ratio zero equally many coordinates."""
    power, share = [{"relative_scale": s} for s in relative_scales], [{"ratio": r} for r in (0.5, 0.9, 0.99)]
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


def parser_of(description: str | None, defenses: dict, attacks: dict) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defenses", nargs="+", default=list(defenses), choices=defenses)
    parser.add_argument("--attacks", nargs="+", default=list(attacks), choices=attacks)
    parser.add_argument("--adaptive", nargs="+", type=int, default=[0, 1], choices=[0, 1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    return parser


def fill(
    args: argparse.Namespace,
    defenses: dict,
    attacks: dict,
    report: dict,
    observe: Callable[..., list[Observation]],
    reconstruct: Callable[..., dict],
    again: dict,
) -> None:
    """Every cell that `args.output` does not have yet.

    Args:
        defenses: Strengths of each defence.
        attacks: Settings of each attack.
        report: `{defence and strength: {attack: scores}}`, so far.
        observe: `(defence, strength, what the attacker has seen more)` to what is seen of each message.
        reconstruct: `(attack, settings, observations)` to scores.
        again: How an attacker who knows Refiner starts.
    """
    cells = [(a, b, c, d) for a in args.adaptive for b in args.attacks for c in args.defenses for d in defenses[c]]
    for adaptive, attack, defense, strength in logging.tqdm(cells):
        row, column = " ".join([defense, *map("{0[0]}={0[1]}".format, strength.items())]), column_of(attack, adaptive)
        what_else = knowledge(defense, attack, again) if adaptive else ({}, {})
        if column in report.get(row, {}) or what_else is None:
            continue
        seen = observe(defense, strength, **what_else[0])
        report.setdefault(row, {})[column] = reconstruct(attack, attacks[attack] | what_else[1], seen)
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def share(
    model, gmap: GradientMap, made, number: int, grants: dict, uploads: int = 1, covariance: bool = False
) -> Observation:
    """What the server sees of a message: the mean of so many uploads, and the noise's covariance if it knows it."""
    generator = torch.Generator().manual_seed(1000 + number)
    if covariance:
        gradient = made.clipped(gmap.gradient())
        grants = grants | {"noise_variance": made.variance(gradient, made.shape(gmap, gradient, generator))}
    return average([Observation(model, made(gmap, generator=generator), **grants) for _ in range(uploads)])


def knowledge(defense: str, attack: str, again: dict) -> tuple[dict, dict] | None:
    """What an attacker who knows the defence has seen, and how its attack is set; `None` if all is as before."""
    spans = attack == "span"
    if defense in NOISE:
        return {"uploads": UPLOADS, "covariance": defense.startswith("optimal") and not spans}, {}
    if "pruning" in defense:
        return {}, ({"complete": True} if spans else {"match_nonzero": True})
    if spans:
        return None
    return {"soteria": ({}, {"leave_out": ["classifier"]}), "refiner": ({}, again)}.get(defense)


def column_of(attack: str, adaptive: int) -> str:
    return attack + ", adaptive" * adaptive


def table(report: dict, attacks: dict, score: str, digits: int) -> str:
    columns = [column_of(attack, adaptive) for attack in attacks for adaptive in (0, 1)]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, cells in report.items():
        shown = [cells[column][score] if column in cells else None for column in columns]
        lines.append(
            f"| {row} | "
            + " | ".join("{0:.{3}f} [{1:.{3}f}, {2:.{3}f}]".format(*v, digits) if v else "" for v in shown)
            + " |"
        )
    return "\n".join(lines)
