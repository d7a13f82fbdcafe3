"""What the parts of the frontier share: their cells, what is lost and read, and the picture."""

import itertools
import re
from typing import NamedTuple

import numpy as np

from ..lib.tables import bracketed, interval, plt, save, write_table
from .attackers import OTHERS
from .client import row_of
from .settings import DELTA, GATHERED, STAGES

ACCURACY, GRAY, PROOF = "accuracy", "a gray image", f"ε at δ = {DELTA:g}"
SCORES = {"token_f1": 2, "psnr": 1, "tpr_1%": 2}  # what tables show of them: digits


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
    """Without those that wait for what a defense never brings."""

    def brings(cell: dict) -> bool:
        waits = cell.get("attack") == GATHERED[0]
        return not waits or "error_feedback" in cell["strength"]

    return {place: cell for place, cell in found.items() if brings(cell)}


def lost(runs: dict, plain: dict) -> str:
    """The undefended runs' accuracy less this one's, with its interval."""
    return bracketed(apart(runs, plain), ".3f") if runs.keys() & plain.keys() else ""


def apart(runs: dict, plain: dict) -> list[float]:
    """The same as numbers. The 95 % bootstrap interval is over seeds and samples, paired in
    both.
    """
    seeds = sorted(runs.keys() & plain.keys())
    lost = np.stack([_bits(plain[s]) - _bits(runs[s]) for s in seeds])
    draws, means, count = np.random.default_rng(0), [], lost.shape[1]
    for _ in range(2000):
        some = lost[draws.integers(len(seeds), size=len(seeds))].sum(0)
        times = np.bincount(draws.integers(count, size=count), minlength=count)
        means.append(some @ times / lost.size)
    return [float(lost.mean()), *map(float, np.quantile(means, [0.025, 0.975]))]


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
    """Mean with a 95 % interval over all samples of all seeds: token F1, PSNR, or of candidates the
    share that is told. After token F1 that with other sentences, where it is known.
    """
    for name, digits in SCORES.items():
        if values := _scores(runs, name):
            others = _scores(runs, OTHERS)
            by_chance = f" ({np.mean(others):.{digits}f})" if len(others) == len(values) else ""
            return interval(values, digits) + by_chance
    return ""


def _scores(runs: dict, name: str) -> list[float]:
    return [f for run in runs.values() for f in run.get(name, [])]


def table(figures: dict, attacks: dict, output, more: dict[str, dict[str, str]]) -> None:
    """One row a defense.

    Args:
        figures: By row, place and seed.
        attacks: Whose columns there are, at all stages.
        output: Where it goes.
        more: Further columns: `{title: {row: cell}}`.
    """
    places = dict.fromkeys(place for found in figures.values() for place in found)
    named = [f"{attack}, {size}, {stage}" for attack, size in attacks for stage in STAGES]
    columns = [attack for attack in named if attack in places]
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


def picture(figures: dict, output, look: Look) -> None:
    """Accuracy lost against the most that any attacker reads at any stage, or a guess. Noise in
    proportion to a clip is left out: a message of one sample has more of it than those of a
    training.
    """
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
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
        worst = max((scores for scores in read_by if scores), key=np.mean)
        if row == GRAY:
            guess = float(np.mean(worst))
            axes.axvline(guess, color="gray", linestyle=":", label=GRAY)
        elif ACCURACY in found and "noise_multiplier" not in row:
            kind, _, strength = row.partition(" ")
            points.setdefault(kind, []).append((strength, worst, apart(found[ACCURACY], plain)))
    names: list[tuple[str, tuple[float, float], str]] = []
    for number, (kind, some) in enumerate(points.items()):
        x = [max(float(np.mean(scores)), guess) for _, scores, _ in some]
        means = [-100 * mean for _, _, (mean, _, _) in some]
        y = [max(mean, look.lowest) for mean in means]
        shown = [mean > look.lowest for mean in means]
        bars = [
            [100 * (high - mean) * there, 100 * (mean - low) * there]
            for there, (_, _, (mean, low, high)) in zip(shown, some, strict=True)
        ]
        wide = [1.96 * np.std(scores) / len(scores) ** 0.5 for _, scores, _ in some]
        color = f"C{number}"
        style = {
            "color": color,
            "marker": "os^Dv<>pP*X"[number],
            "linestyle": "",
            "capsize": 3,
            "elinewidth": 1,
        }
        axes.errorbar(x, y, np.transpose(bars), wide, label=kind, **style)
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
        for up, right in itertools.product((6, -13, 20, -27, 34, -41), (True, False)):
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
        axes.annotate(said, at, color=color, ha="left" if right else "right", **place)


def _brief(strength: str) -> str:
    for long, short in (
        ("relative_scale=", "× "), ("ratio=", ""), (" error_feedback=True", " fed back"),
        (" min_batches=", " of "),
        ("objective=weighted", "published"),
        (" shape=own", ", own"), ("per_sample=True clip=1 noise_multiplier=", "σ = "),
    ):  # fmt: skip
        strength = strength.replace(long, short)
    return re.sub(r"bits=(\d+)", r"\1 bit", strength)
