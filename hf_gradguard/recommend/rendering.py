"""A recommendation as a table, as a page, and as flags."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup, escape

from ..audit.report.page import template
from ..audit.report.verdicts import Estimate, MainScore
from ..defenses import DEFENSES, Defense
from ..flags import SourceSettings
from .choice import Choice
from .evidence import FALSE_ALARMS, Outcome, low_end, shown_leak
from .explanation import messages_of, percent, promise
from .trial_settings import WARMUP, TrialSettings

TRAIN_FILE = "train.yaml"
_SOURCE = ("model", "task", "dataset", "dataset_config", "split", "column", "label_column")
_AS_MEASURED = "These are the steps that it was measured with. Train longer, and audit the result."
_HEAD_AS_TRIED = (
    "This trains the head as it was tried. Without max_steps, learning_rate and directions every "
    "row is used, each in one message: the proof is the same."
)

_WIDTH, _HEIGHT, _MARGIN, _BOTTOM, _TOP, _RIGHT = 480, 340, 68, 50, 20, 34
_WHOLE = re.compile(r"--\w+|\[[^\]]*\]|[≤εδ] =? ?[\d.e+-]+(?: %)?|[\d.]+ %")
_NUMBER_WIDTH, _NUMBER_HEIGHT = 20, 15  # of a point's number


def markdown_table(choice: Choice, score: MainScore, command: str) -> str:
    """Return the explanation, the command to type, and a table row for everything tried.

    Args:
        choice: The recommendation.
        score: The main score of attacks.
        command: The command to type, or a sentence on why there is none.
    """
    header = [
        "defense", "proof", "accuracy", "points lost", f"best attack {score.verb}",
        "members recognized", "by", "learning rate",
    ]  # fmt: skip
    entries = [_entries(outcome, score) for outcome in choice.outcomes]
    if choice.untrained is not None:
        accuracy = percent(choice.untrained, digits=1)
        entries.insert(0, ["before training", "", accuracy, *[""] * 5])
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *entries)]
    typed = [f"    {command}" if _is_typed(command) else command, ""] if command else []
    limits = [choice.limits, ""] if choice.limits else []
    return "\n".join([choice.words, "", *typed, *limits, *lines]) + "\n"


def _is_typed(command: str) -> bool:
    return command.startswith("gradguard ")


def _entries(outcome: Outcome, score: MainScore) -> list[str]:
    """Return a row's cells, in the order of the table's header."""
    proof, membership = outcome.proof, outcome.membership
    lost = "–" if outcome.defense == "none" else percent(outcome.lost, digits=1).replace(" %", "")
    accuracy, rate = percent(outcome.accuracy, digits=1), f"{outcome.learning_rate:.2g}"
    if proof is not None:
        tells = f"tells two {score.sample}s apart in ≤ {100 * proof.pairs:.0f} % by proof"
        finds = f"≤ {100 * proof.members:.1f} % by proof, at {100 * FALSE_ALARMS:g} % false alarms"
        if outcome.recognition is not None:
            tells += f"; measured: {percent(outcome.recognition.told_apart)}"
            finds += f"; measured: {percent(outcome.recognition.rows_found, digits=1)}"
        return [
            outcome.defense, promise(outcome), accuracy, lost,
            tells, finds, "all messages", rate,
        ]  # fmt: skip
    return [
        f"`{outcome.defense}`", promise(outcome) or "no proof", accuracy, lost,
        score.format_estimate(shown_leak(outcome, score)),
        "–" if membership is None else percent(membership),
        f"{outcome.attack}, {outcome.stage}, {messages_of(outcome)}", rate,
    ]  # fmt: skip


def whole_model_flags(chosen: Outcome, settings: TrialSettings) -> dict[str, Any]:
    """Return the flags by which `gradguard train` trains a whole model as it was tried.

    Args:
        chosen: The outcome of the defense.
        settings: The settings of all trials.
    """
    return {
        "learning_rate": float(f"{chosen.learning_rate:.3g}"),
        "warmup_steps": WARMUP,
        "per_device_train_batch_size": settings.batch_size,
        "max_steps": settings.steps,
    }


def train_file(
    choice: Choice,
    flags: Mapping[str, Any],
    settings: TrialSettings,
    source: SourceSettings | None,
    folder: Path,
) -> str:
    """Return a file for `gradguard train --config` that trains the recommended row.

    Args:
        choice: The recommendation, which has a chosen row.
        flags: The row's own flags.
        settings: The settings of all trials.
        source: Names of the model and the data.
        folder: The folder of the recommendation.
    """
    assert choice.chosen is not None
    is_head = choice.chosen.proof is not None
    # A head's encoder stands in the place of the model.
    named = [name for name in _SOURCE if not (is_head and name == "model")]
    data = {} if source is None else {
        name: value for name in named if (value := getattr(source, name)) is not None
    }  # fmt: skip
    values = {
        **data,
        "output": str(folder / "model"),
        **flags,
        "max_length": settings.max_length,
        "seed": settings.seed,
    }
    paragraphs = [*choice.words.split("\n\n"), _HEAD_AS_TRIED if is_head else _AS_MEASURED]
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, 96)]
    words = "\n".join(f"# {line}" for line in lines)
    return f"{words}\n{yaml.safe_dump(values, sort_keys=False)}"


def train_command(folder: Path, source: SourceSettings | None, chosen: Outcome) -> str:
    """Return the command to type, once `train.yaml` is in the folder.

    Args:
        folder: The folder of the recommendation.
        source: Names of the model and the data; `None` if a person has to fill them in.
        chosen: The recommended row.
    """
    command = f"gradguard train --config {shlex.quote(str(folder / TRAIN_FILE))}"
    if source is not None:
        return command
    return f"{command} --{'model' if chosen.proof is None else 'encoder'} MODEL --dataset FILE"


def flags_of(defense: Defense) -> dict[str, Any] | None:
    """Return the flags that name a defense in a file, or `None` if a file cannot.

    A file cannot name a chain, a class that is not registered, or a setting that is an object.
    """
    if DEFENSES.get(defense.name) is not type(defense):
        return None
    flags = {"defense": defense.name, "defense_kwargs": defense.settings()}
    try:
        yaml.safe_dump(flags)
    except yaml.representer.RepresenterError:
        return None
    return flags


def html_report(
    choice: Choice, chance: float, settings: TrialSettings, score: MainScore, command: str
) -> str:
    """Return the page: one file without scripts that loads nothing from elsewhere."""
    outcomes = choice.outcomes
    leaks = {o.defense: shown_leak(o, score) for o in outcomes if o.leak is not None}
    ticks = score.ticks([chance, *(leak.high or 0.0 for leak in leaks.values())])
    end = ticks[-1][0]
    # Room for whiskers within the frame.
    lowest = min(low_end(outcome.accuracy) for outcome in outcomes) - 0.02
    highest = min(max(outcome.accuracy.high or 0.0 for outcome in outcomes) + 0.02, 1.0)

    def x(leak: float | None) -> float:
        return _MARGIN + (_WIDTH - _MARGIN - _RIGHT) * min(max((leak or 0.0) / end, 0), 1)

    def y(accuracy: float | None) -> float:
        fraction = ((accuracy or 0.0) - lowest) / (highest - lowest)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * fraction

    # A head stands at the left edge: what is proved of it is no such score.
    at_edge = Estimate(0.0, 0.0, 0.0)
    points = [
        {
            "number": number,
            "x": x(leak.mean), "x_low": x(leak.low), "x_high": x(leak.high),
            "y": y(accuracy.mean), "y_low": y(accuracy.low), "y_high": y(accuracy.high),
            "chosen": outcome is choice.chosen, "plain": outcome.defense == "none",
            "proved": outcome.proof is not None,
            "beyond": score.format(leak.mean) if leak.mean > end else "",
        }
        for number, outcome in enumerate(outcomes, 1)
        for leak, accuracy in [(leaks.get(outcome.defense, at_edge), outcome.accuracy)]
    ]  # fmt: skip
    step = next((s for s in (1, 2, 5, 10) if 20 * (highest - lowest) <= s), 20)  # five at most
    percents = range(math.ceil(100 * lowest / step) * step, math.floor(100 * highest) + 1, step)
    _place_numbers(points)
    page: str = template("recommend", "recommend.html.jinja").render(
        paragraphs=list(map(_unbroken, choice.words.split("\n\n"))),
        limits=_unbroken(choice.limits),
        choice=choice,
        command=command,
        is_typed=_is_typed(command),
        settings=settings,
        score=score,
        rows=[_page_entries(outcome, score) for outcome in outcomes],
        untrained=choice.untrained and _unbroken(percent(choice.untrained, digits=1)),
        points=points,
        ticks=[(x(value), label) for value, label in ticks],
        levels=[(y(value / 100), f"{value} %") for value in percents],
        floor=y(outcomes[0].accuracy.mean - settings.budget),
        chance=x(chance),
        width=_WIDTH, height=_HEIGHT, left=_MARGIN, bottom=_HEIGHT - _BOTTOM, top=_TOP,
        right=_WIDTH - _RIGHT,
    )  # fmt: skip
    return page


def _page_entries(outcome: Outcome, score: MainScore) -> list[Any]:
    """Return a row's cells as a page shows them."""
    name, *entries = _entries(outcome, score)
    return [name, *map(_unbroken, entries)]


def _unbroken(text: str) -> Markup:
    """Return text whose flags, figures with their units, and intervals no line breaks."""
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(text))))


def _place_numbers(points: list[dict[str, Any]]) -> None:
    """Place each number beside its point, and below other points' numbers that stand there."""
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point["y"], point["number"])):
        height = point["y"] - 7
        while near := [
            y
            for x, y in placed
            if abs(x - point["x"]) < _NUMBER_WIDTH and abs(y - height) < _NUMBER_HEIGHT
        ]:
            height = max(near) + _NUMBER_HEIGHT
        point["at"] = height
        placed.append((point["x"], height))
