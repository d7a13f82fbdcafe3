"""What was found, as a table, as a page, and as a file of flags."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, Template

from ..audit.report.verdicts import Terms
from ..defenses import DEFENSES, Defense
from .choice import Choice, Outcome
from .settings import WARMUP, TrialSettings

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 380, 60, 50, 20, 34

_WIDE, _HIGH = 20, 15  # of a point's number


def markdown_table(choice: Choice, terms: Terms) -> str:
    """The words, and a line for every defense."""
    header = [
        "defense", "learning rate", "accuracy", "lost", f"{terms.score}, best attacker", "by",
        "named of a list",
    ]  # fmt: skip
    rows = [header, ["---"] * len(header), *(_cells(one, terms) for one in choice.outcomes)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{choice.words}\n\n{table}\n"


def _cells(one: Outcome, terms: Terms) -> list[str]:
    leak = one.leak.said(terms.scale, terms.places, f" {terms.unit}")
    accuracies = [one.accuracy.said(places=1), one.lost.said(places=1)]
    return [
        f"`{one.defense}`", f"{one.learning_rate:.2g}", *accuracies, leak,
        f"{one.attack}, {one.stage}", "–" if one.named is None else one.named.said(),
    ]  # fmt: skip


def configuration(choice: Choice, flags: Mapping[str, Any], terms: TrialSettings) -> str:
    """A file of flags for the recipes: the setting that is recommended, with its own `flags`."""
    assert choice.chosen is not None
    values = {
        **flags,
        "learning_rate": float(f"{choice.chosen.learning_rate:.3g}"),
        "scale_learning_rate": False,  # it is in the rate
        "warmup_steps": WARMUP,
        "per_device_train_batch_size": terms.batch_size,
    }
    words = "\n".join(f"# {line}" for line in textwrap.wrap(choice.words, 96))
    return f"{words}\n{yaml.safe_dump(values, sort_keys=False)}"


def flags_of(defense: Defense) -> dict[str, Any] | None:
    """What names a defense in a file; `None` where a file cannot: for a chain, a class that is not
    registered, or a setting that is an object.
    """
    if DEFENSES.get(defense.name) is not type(defense):
        return None
    flags = {"defense": defense.name, "defense_kwargs": defense.settings()}
    try:
        yaml.safe_dump(flags)
    except yaml.representer.RepresenterError:
        return None
    return flags


def html_report(choice: Choice, chance: float, settings: TrialSettings, terms: Terms) -> str:
    """The page: one file, no script, nothing from elsewhere."""
    ticks = terms.ticks([chance, *(one.leak.high for one in choice.outcomes)])
    highest = ticks[-1][0]
    lowest = min(one.accuracy.low for one in choice.outcomes) - 0.02
    best = min(max(one.accuracy.high for one in choice.outcomes) + 0.02, 1.0)

    def x(leak: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(leak / highest, 0), 1)

    def y(accuracy: float) -> float:
        share = (accuracy - lowest) / (best - lowest)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share

    points = [
        {
            "number": number,
            "x": x(one.leak.mean), "x_low": x(one.leak.low), "x_high": x(one.leak.high),
            "y": y(one.accuracy.mean), "y_low": y(one.accuracy.low), "y_high": y(one.accuracy.high),
            "chosen": one is choice.chosen, "plain": one.defense == "none",
            "beyond": terms.said(one.leak.mean) if one.leak.mean > highest else "",
        }
        for number, one in enumerate(choice.outcomes, 1)
    ]  # fmt: skip
    levels = [lowest + i / 4 * (best - lowest) for i in range(5)]
    _place_numbers(points)
    page: str = _template().render(
        choice=choice,
        settings=settings,
        terms=terms,
        rows=[_cells(one, terms) for one in choice.outcomes],
        points=points,
        ticks=[(x(value), said) for value, said in ticks],
        levels=[(y(value), f"{100 * value:.0f} %") for value in levels],
        floor=y(choice.outcomes[0].accuracy.mean - settings.budget),
        chance=x(chance),
        width=_WIDTH, height=_HEIGHT, left=_LEFT, bottom=_HEIGHT - _BOTTOM, top=_TOP,
        right=_WIDTH - _RIGHT,
    )  # fmt: skip
    return page


def _place_numbers(points: list[dict[str, Any]]) -> None:
    """Each beside its point, and below those of others that stand there."""
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: (one["y"], one["number"])):
        at = point["y"] - 7
        while near := [y for x, y in placed if abs(x - point["x"]) < _WIDE and abs(y - at) < _HIGH]:
            at = max(near) + _HIGH
        point["at"] = at
        placed.append((point["x"], at))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hf_gradguard", "recommend"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("recommend.html.jinja")
