"""What the parts of the frontier share: their cells, what is lost and read, and the picture."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.patheffects import withStroke

from hf_gradguard import make_defense

from ..lib.intervals import Interval, over_seeds, paired
from ..lib.tables import interval, plt, save, write_table
from .attackers import OTHERS
from .client import row_of
from .settings import DELTA, GATHERED, STAGES, UNAWARE

ACCURACY, GRAY, PROOF = "accuracy", "a gray image", f"ε at δ = {DELTA:g}"


class Score(NamedTuple):
    """What tables show of a score: its digits, and of which kind it is to `over_seeds`."""

    digits: int
    kind: str


TOLD = "tpr_1%"
AHEAD = 3.0  # the last rank of who has at most 1 % of a list's others ahead, of 284 to 299
TENTH = 29.0  # of at most 10 %
ONE_SEED = " (1 seed)"  # an interval over samples alone
SCORES = {
    "token_f1": Score(2, "part"),
    "psnr": Score(1, "decibels"),
    TOLD: Score(2, "shares"),
}


class Look(NamedTuple):
    """What is drawn.

    Args:
        score: Of the attackers.
        label: What it is, for the axis.
        lowest: Points of accuracy; what lost more stands there, with its number.
    """

    score: str
    label: str
    lowest: float


def cells_of(
    rows: list, passes: list, attacks: dict, sizes: dict, chosen: dict | None, usual: float = 2e-4
) -> dict:
    """Trainings first, then attacks. Rows whose rate is being searched for are left out; without
    those `chosen` all have the usual one.
    """
    found: dict = {}
    for seeds, some in passes:
        for seed in range(seeds):
            trained = {
                row_of(*row): {
                    "defense": row[0], "strength": row[1], "seed": seed,
                    "learning_rate": chosen[row_of(*row)] if chosen is not None else usual, **sizes,
                }
                for row in rows
                if chosen is None or row_of(*row) in chosen
            }  # fmt: skip
            found |= {(row, ACCURACY, str(seed)): cell for row, cell in trained.items()}
            for attack, stage in [(one, stage) for one in some for stage in some[one]]:
                name, size = attack
                place, own = f"{name}, {size}, {stage}", asked(attack, *attacks[attack], stage)
                found |= {(row, place, str(seed)): c | own for row, c in trained.items()}
    return found


def asked(attack: tuple[str, int], count: int, settings: dict, stage: str) -> dict:
    """What a cell says of an attack on so many messages of so many samples, at a stage."""
    name, size = attack
    return {"stage": stage, "attack": name, "size": size, "messages": count, "settings": settings}


def fitting(found: dict) -> dict:
    """Without those that wait for what a defense never brings, or ignore what it does not have."""

    def brings(cell: dict) -> bool:
        if cell.get("attack") == UNAWARE[0]:
            return cell["defense"] == "optimal_noise"
        if cell.get("attack") != GATHERED[0]:
            return True
        defense = make_defense(cell["defense"], **cell["strength"])
        return bool(getattr(defense, "error_feedback", False))

    return {place: cell for place, cell in found.items() if brings(cell)}


def lost(runs: dict, plain: dict) -> str:
    """The undefended runs' accuracy less this one's, with its interval."""
    seeds = len(runs.keys() & plain.keys())
    return apart(runs, plain).said() + ONE_SEED * (seeds == 1) if seeds else ""


def apart(runs: dict, plain: dict) -> Interval:
    """The same as numbers, paired by seed and sample."""
    seeds = sorted(runs.keys() & plain.keys())
    return paired(np.stack([_bits(plain[s]) - _bits(runs[s]) for s in seeds]))


def _bits(run: dict) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex(run["right"]), dtype=np.uint8)
    return np.unpackbits(packed)[: run["of"]].astype(float)


def proofs(figures: dict) -> dict[str, str]:
    """ε of a training, by row, for one sample more or less."""
    found = {row: list(places.get(ACCURACY, {}).values()) for row, places in figures.items()}
    proved = {
        row: runs[0]["epsilon"] for row, runs in found.items() if runs and "epsilon" in runs[0]
    }
    return {row: f"{epsilon:.2g}" for row, epsilon in proved.items()}


def read(runs: dict) -> str:
    """Mean with its interval: token F1, PSNR, or of candidates the share that is told. After token
    F1 that with other sentences, where it is known.
    """
    for name in SCORES:
        if values := _scores(runs, name):
            others = _scores(runs, OTHERS)
            if not others or list(map(len, others)) != list(map(len, values)):
                return told_of(values, name)
            by_chance = np.mean(np.concatenate(others))
            return f"{told_of(values, name)} ({by_chance:.{SCORES[name].digits}f})"
    return ""


def told_of(values: Sequence[Sequence[float]], name: str) -> str:
    """The same of one score's values, by seed."""
    score = SCORES[name]
    every = {value for group in values for value in group}
    count = sum(map(len, values))
    if score.kind == "part" and count > 1 and len(every) == 1:  # values alike tell no interval
        return f"{every.pop():.{score.digits}f} (all {count})"
    return over_seeds(values, score.kind).said(score.digits)


def _scores(runs: dict, name: str) -> list[list[float]]:
    """By seed. Members of messages are told by one threshold for all messages, or by each message's
    own, whichever tells more: what a message's scores are worth differs between messages.
    """
    found = [run[name] for run in runs.values() if run.get(name)]
    if name != TOLD or not all(run.get("rank") for run in runs.values()):
        return found
    own = [[float(rank <= AHEAD) for rank in run["rank"]] for run in runs.values()]
    return max(found, own, key=lambda told: sum(map(sum, told)))


def table(figures: dict, attacks: dict, output, more: dict[str, dict[str, str]]) -> None:
    """One row a defense.

    Args:
        figures: By row, place and seed.
        attacks: Whose columns there are, at all stages.
        output: Where it goes.
        more: Further columns: `{title: {row: cell}}`.
    """
    places = dict.fromkeys(place for found in figures.values() for place in found)
    columns = [place for place in _places(attacks) if place in places]
    plain, rows, proved = figures.get("none", {}).get(ACCURACY, {}), [], proofs(figures)
    proof = [PROOF] if proved else []
    for row, found in figures.items():
        runs = found.get(ACCURACY, {})
        accuracies = [run["accuracy"] for run in runs.values()]
        shown = [f"`{row}`", *(cells.get(row, "") for cells in more.values())]
        shown += [interval(accuracies) if accuracies else "", lost(runs, plain)]
        shown += [proved.get(row, "") for _ in proof]
        rows.append(shown + [read(found.get(column, {})) for column in columns])
    write_table(output, ["", *more, "accuracy", "less than none", *proof, *columns], rows)


def lists(figures: dict, attacks: dict, output) -> None:
    """OUTPUT_lists: how many of how many members are told at 1 % false alarms, and at 10 %."""
    columns = [
        place
        for place in _places(attacks)
        if any(_scores(found.get(place, {}), TOLD) for found in figures.values())
    ]
    rows = [
        [f"`{row}`", *(_counted(found.get(place, {})) for place in columns)]
        for row, found in figures.items()
    ]
    where = output.with_name(output.name + "_lists")
    write_table(
        where, ["of how many, at 1 % (10 %)", *columns], [row for row in rows if any(row[1:])]
    )


def _places(attacks: dict) -> list[str]:
    """Where tables may show attacks, as `cells_of` names them."""
    return [f"{attack}, {size}, {stage}" for attack, size in attacks for stage in STAGES]


def _counted(runs: dict) -> str:
    told = [float(one) for values in _scores(runs, TOLD) for one in values]
    ranks = [rank for run in runs.values() for rank in run.get("rank", ())]
    among = sum(rank <= TENTH for rank in ranks)
    return f"{sum(told):.0f} ({among}) of {len(told)}" if told else ""


def picture(figures: dict, output, look: Look) -> None:
    """Accuracy lost against the most that any attacker reads at any stage, or a guess. Noise in
    proportion to a clip is left out: a message of one sample has more of it than those of a
    training.
    """
    figure, axes = plt.subplots(figsize=(10, 8), layout="constrained")
    draw(axes, figures, look)
    save(figure, output)


def draw(axes, figures: dict, look: Look) -> None:
    """The picture's one panel."""
    plain = figures["none"][ACCURACY]
    points: dict[str, list] = {}
    guess = -np.inf
    for row, found in figures.items():
        read_by = [_scores(runs, look.score) for name, runs in found.items() if name != ACCURACY]
        if not any(read_by):
            continue
        worst = max(
            (over_seeds(scores, SCORES[look.score].kind) for scores in read_by if scores),
            key=lambda found: found.mean,
        )
        if row == GRAY:
            guess = worst.mean
            axes.axvline(guess, color="gray", linestyle=":", label=GRAY)
        elif ACCURACY in found and "noise_multiplier" not in row:
            kind, _, strength = row.partition(" ")
            points.setdefault(kind, []).append((strength, worst, apart(found[ACCURACY], plain)))
    names: list[tuple[str, tuple[float, float], str]] = []
    for number, (kind, some) in enumerate(points.items()):
        x = [max(worst.mean, guess) for _, worst, _ in some]
        means = [-100 * lost.mean for _, _, lost in some]
        y = [max(mean, look.lowest) for mean in means]
        shown = [mean > look.lowest for mean in means]
        bars = [
            [100 * side * there for side in reversed(lost.bar)]
            for there, (_, _, lost) in zip(shown, some, strict=True)
        ]
        wide = np.transpose([worst.bar for _, worst, _ in some])
        color = f"C{number}"
        style = {
            "color": color,
            "marker": "os^Dv<>pP*X"[number],
            "linestyle": "",
            "capsize": 3,
            "elinewidth": 1,
        }
        _, caps, lines = axes.errorbar(x, y, np.transpose(bars), wide, label=kind, **style)
        for part in (*caps, *lines):  # points and their names stand before them
            part.set_alpha(0.35)
        for left, up, mean, (strength, _, _) in zip(x, y, means, some, strict=True):
            said = _brief(strength) + (f" ({mean:.0f})" if mean < look.lowest else "")
            names.append((said, (left, up), color))
    axes.set_ylim(1.1 * look.lowest, None)
    _name(axes, names)
    axes.set_xlabel(look.label)
    axes.set_ylabel("points of accuracy against no defense (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend()


def _name(axes, names: list[tuple[str, tuple[float, float], str]]) -> None:
    """Names points, each in the picture and where the fewest other names and points are."""
    axes.figure.canvas.draw()
    scale = axes.figure.dpi / 72  # of a point
    places = [axes.transData.transform(at) for _, at, _ in names]
    taken = [(x - 5 * scale, x + 5 * scale, y - 4 * scale) for x, y in places]  # left, right, low
    for (said, at, color), (x, y) in zip(names, places, strict=True):
        width = 5.5 * len(said) * scale
        best: tuple[int, bool, int, tuple[float, float, float]] | None = None
        for up, right in itertools.product((6, -13, 20, -27, 34, -41, 48, 62, 76), (True, False)):
            left = x + 7 * scale if right else x - 7 * scale - width
            box = (left, left + width, y + up * scale)
            outside = box[0] < axes.bbox.x0 or box[1] > axes.bbox.x1
            met = 100 * outside + sum(
                box[0] < one[1] and one[0] < box[1] and abs(box[2] - one[2]) < 11 * scale
                for one in taken
            )
            if best is None or met < best[0]:
                best = met, right, up, box
        assert best is not None
        _, right, up, box = best
        taken.append(box)
        place = {"xytext": (7 if right else -7, up), "textcoords": "offset points"}
        place["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
        axes.annotate(said, at, color=color, ha="left" if right else "right", **place)


def _brief(strength: str) -> str:
    for long, short in (
        ("relative_scale=", "× "), ("ratio=", ""), (" error_feedback=True", " feedback"),
        ("objective=weighted", "published"),
        (" shape=own", ", own"), ("per_sample=True clip=1 noise_multiplier=", "σ = "),
    ):  # fmt: skip
        strength = strength.replace(long, short)
    strength = strength.replace(" min_batches", ", min_batches")
    for setting, unit in (("min_batches", "batches"), ("samples", "samples"), ("bits", "bit")):
        strength = re.sub(rf"{setting}=(\d+)", rf"\1 {unit}", strength)
    return strength
