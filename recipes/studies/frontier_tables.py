"""What the studies of the frontier share: their cells, what is lost and recovered, the picture."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.patheffects import withStroke

from hf_gradguard import make_defense

from .frontier_attacks import F1_OTHERS, GRAY
from .frontier_clients import row_of
from .frontier_rows import ACCUMULATED, DELTA, STAGES, UNAWARE, Attack, Row
from .lib.intervals import Interval, over_seeds, paired
from .lib.results import named
from .lib.tables import interval, plt, save, write_table
from .rate_search import ACCURACY, RATES, best_rates

PROOF = f"ε at δ = {DELTA:g}"
TPR = "tpr_1%"
AHEAD = 3.0  # the last rank with at most 1 % of a list's others ahead, of 284 to 299
TENTH = 29.0  # with at most 10 %
ONE_SEED = " (1 seed)"  # an interval over samples alone
# Digits of a score, and of which kind it is to `over_seeds`
SCORES = {"token_f1": (2, "part"), "psnr": (1, "decibels"), TPR: (2, "shares")}


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
    rows: Sequence[Row], seeds: int, stages: Mapping[Attack, Sequence[str]], attacks: Mapping,
    sizes: dict, rates: dict | None, usual: float = 2e-4,
) -> dict:  # fmt: skip
    """Of each seed trainings first, then attacks at some stages. Rows whose rate is being searched
    for are left out; without `rates` all have the usual one.
    """
    cells: dict = {}
    for seed in range(seeds):
        trained = {
            row_of(*row): {
                "defense": row[0], "strength": row[1], "seed": seed,
                "learning_rate": rates[row_of(*row)] if rates is not None else usual, **sizes,
            }
            for row in rows
            if rates is None or row_of(*row) in rates
        }  # fmt: skip
        cells |= {(row, ACCURACY, str(seed)): cell for row, cell in trained.items()}
        for attack, stage in [(a, stage) for a, names in stages.items() for stage in names]:
            place, settings = place_of(attack, stage), attack_cell(attack, *attacks[attack], stage)
            cells |= {(row, place, str(seed)): c | settings for row, c in trained.items()}
    return cells


def place_of(attack: Attack, stage: str) -> str:
    return f"{attack[0]}, {attack[1]}, {stage}"


def title_of(place: str) -> str:
    """Of the place's column; cells name attacks otherwise."""
    unaware = f"{UNAWARE[0]}, ", "inverting_gradients, covariance unknown, "
    return place.replace("gathered, ", "accumulated, ").replace(*unaware)


def attack_cell(attack: Attack, count: int, settings: dict, stage: str) -> dict:
    """What a cell says of an attack on so many messages of so many samples, at a stage."""
    name, size = attack
    return {"stage": stage, "attack": name, "size": size, "messages": count, "settings": settings}


def fitting(cells: dict) -> dict:
    """Without those that wait for what a defense never brings, or ignore what it does not have."""

    def fits(cell: dict) -> bool:
        if cell.get("attack") == UNAWARE[0]:
            return cell["defense"] == "optimal_noise"
        if cell.get("attack") != ACCUMULATED[0]:
            return True
        defense = make_defense(cell["defense"], **cell["strength"])
        return bool(getattr(defense, "error_feedback", False))

    return {place: cell for place, cell in cells.items() if fits(cell)}


def accuracy_text(runs: dict) -> str:
    return interval([run["accuracy"] for run in runs.values()]) if runs else ""


def lost(runs: dict, plain: dict) -> str:
    """The undefended runs' accuracy less this one's, with its interval."""
    seeds = len(runs.keys() & plain.keys())
    return accuracy_lost(runs, plain).text() + ONE_SEED * (seeds == 1) if seeds else ""


def accuracy_lost(runs: dict, plain: dict) -> Interval:
    """The same as numbers, paired by seed and sample."""
    seeds = sorted(runs.keys() & plain.keys())
    return paired(np.stack([_right(plain[s]) - _right(runs[s]) for s in seeds]))


def _right(run: dict) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex(run["right"]), dtype=np.uint8)
    return np.unpackbits(packed)[: run["of"]].astype(float)


def epsilons_of(metrics: dict) -> dict[str, str]:
    """ε of a training, by row, for one sample more or less."""
    first_runs = {
        row: next(iter(cells.get(ACCURACY, {}).values()), {}) for row, cells in metrics.items()
    }
    return {row: f"{run['epsilon']:.2g}" for row, run in first_runs.items() if "epsilon" in run}


def score_text(runs: dict) -> str:
    """Mean with its interval: token F1, PSNR, or of candidates the TPR at 1 % FPR. After token F1
    that with other sentences, where it is known.
    """
    for name in SCORES:
        if values := scores_by_seed(runs, name):
            other_scores = scores_by_seed(runs, F1_OTHERS)
            if not other_scores or list(map(len, other_scores)) != list(map(len, values)):
                return values_text(values, name)
            by_chance = np.mean(np.concatenate(other_scores))
            return f"{values_text(values, name)} ({by_chance:.{SCORES[name][0]}f})"
    return ""


def values_text(values: Sequence[Sequence[float]], name: str) -> str:
    """The same of one score's values, by seed."""
    digits, kind = SCORES[name]
    values_seen = {value for group in values for value in group}
    count = sum(map(len, values))
    if kind == "part" and count > 1 and len(values_seen) == 1:  # values alike tell no interval
        return f"{values_seen.pop():.{digits}f} (all {count})"
    return over_seeds(values, kind).text(digits)


def scores_by_seed(runs: dict, name: str) -> list[list[float]]:
    """Members of messages are told by one threshold for all messages, or by each message's own,
    whichever tells more: what a message's scores are worth differs between messages.
    """
    scores = [run[name] for run in runs.values() if run.get(name)]
    if name != TPR or not all(run.get("rank") for run in runs.values()):
        return scores
    by_rank = [[float(rank <= AHEAD) for rank in run["rank"]] for run in runs.values()]
    return max(scores, by_rank, key=lambda scores_of_way: sum(map(sum, scores_of_way)))


def write_frontier(
    metrics: dict, attacks: Mapping, output, columns_before: dict[str, dict]
) -> None:
    """One row a defense.

    Args:
        metrics: By row, place and seed.
        attacks: Whose columns there are, at all stages.
        output: Where it goes.
        more: Further columns: `{title: {row: cell}}`.
    """
    places = {place for cells in metrics.values() for place in cells}
    columns = [place for place in _places(attacks) if place in places]
    plain, rows = metrics.get("none", {}).get(ACCURACY, {}), []
    epsilons = epsilons_of(metrics)
    proof = [PROOF] if epsilons else []
    for row, cells in metrics.items():
        runs = cells.get(ACCURACY, {})
        shown = [f"`{row}`", *(column.get(row, "") for column in columns_before.values())]
        shown += [accuracy_text(runs), lost(runs, plain)]
        shown += [epsilons.get(row, "") for _ in proof]
        rows.append(shown + [score_text(cells.get(column, {})) for column in columns])
    write_table(
        output,
        ["", *columns_before, "accuracy", "less than none", *proof, *map(title_of, columns)],
        rows,
    )


def write_lists(metrics: dict, attacks: Mapping, output) -> None:
    """OUTPUT_lists: how many of how many members are told at 1 % FPR, and at 10 %."""
    columns = [
        place
        for place in _places(attacks)
        if any(scores_by_seed(cells.get(place, {}), TPR) for cells in metrics.values())
    ]
    rows = [
        [f"`{row}`", *(_counts(cells.get(place, {})) for place in columns)]
        for row, cells in metrics.items()
    ]
    header = ["true positives at 1 % (10 %) FPR", *map(title_of, columns)]
    rows = [row for row in rows if any(row[1:])]
    write_table(named(output, "_lists"), header, rows)


def write_pairs(metrics: dict, pairs: Sequence[Sequence[str]], output) -> None:
    """OUTPUT_pairs: how two rows differ, or two stages of one, seed by seed and sample by sample.

    Args:
        metrics: By row, place and seed.
        pairs: Two rows each, of accuracy; with a place for each row, of what is recovered.
        output: Where it goes.
    """
    rows = []
    for first, second, *places in pairs:
        place, other = places or (ACCURACY, ACCURACY)
        runs = metrics.get(first, {}).get(place, {})
        against = metrics.get(second, {}).get(other, {})
        if not runs.keys() & against.keys():
            continue
        shown = [f"`{first}`", f"`{second}`"]
        if places:
            at, reference = title_of(place), title_of(other)
            at = at if at == reference else f"{at} less {reference}"
            difference = paired(_scores(runs, against) - _scores(against, runs)).text(3)
        else:
            at, difference = "accuracy lost", lost(runs, against)
        rows.append([*shown, at, difference])
    if rows:
        write_table(named(output, "_pairs"), ["first", "second", "of", "first less second"], rows)


def _scores(runs: dict, others: dict) -> np.ndarray:
    """By seed and sample, of the seeds that both have."""
    seeds = sorted(runs.keys() & others.keys())
    (score,) = [name for name in SCORES if name in runs[seeds[0]]]
    return np.stack([runs[seed][score] for seed in seeds])


def _places(attacks: Mapping) -> list[str]:
    return [place_of(attack, stage) for attack in attacks for stage in STAGES]


def _counts(runs: dict) -> str:
    hits = [float(value) for values in scores_by_seed(runs, TPR) for value in values]
    ranks = [rank for run in runs.values() for rank in run.get("rank", ())]
    among = sum(rank <= TENTH for rank in ranks)
    return f"{sum(hits):.0f} ({among}) of {len(hits)}" if hits else ""


def pop_rates(metrics: dict) -> dict[str, str]:
    """By row, which rates were tried and what each came to; taken out of the metrics."""
    searches = {row: cells.pop(RATES, {}) for row, cells in metrics.items()}
    best = best_rates({row: rates for row, rates in searches.items() if rates})

    def text(row: str, rate: str) -> str:
        shown = f"**{rate}**" if float(rate) == best[row] else rate
        return f"{shown} ({searches[row][rate]['held_out']:.3f})"

    return {row: ", ".join(text(row, rate) for rate in searches[row]) for row in best}


def picture(metrics: dict, output, look: Look) -> None:
    """Accuracy lost against the most that any attacker recovers at any stage, or a guess. Noise in
    proportion to a clip is left out: a message of one sample has more of it than those of a
    training.
    """
    figure, axes = plt.subplots(figsize=(10, 8), layout="constrained")
    draw(axes, metrics, look)
    save(figure, output)


def draw(axes, metrics: dict, look: Look) -> None:
    """The picture's one panel."""
    plain, kind = metrics["none"][ACCURACY], SCORES[look.score][1]
    points: dict[str, list] = {}
    guess = -np.inf
    for row, cells in metrics.items():
        scores = [
            scores_by_seed(runs, look.score) for name, runs in cells.items() if name != ACCURACY
        ]
        if not any(scores):
            continue
        worst = max(
            (over_seeds(s, kind) for s in scores if s),
            key=lambda interval_of_cell: interval_of_cell.mean,
        )
        if row == GRAY:
            guess = worst.mean
            axes.axvline(guess, color="gray", linestyle=":", label=GRAY)
        elif ACCURACY in cells and "noise_multiplier" not in row:
            defense, _, strength = row.partition(" ")
            points_lost = accuracy_lost(cells[ACCURACY], plain)
            points.setdefault(defense, []).append((strength, worst, points_lost))
    names: list[tuple[str, tuple[float, float], str]] = []
    for number, (defense, rows) in enumerate(points.items()):
        x = [max(worst.mean, guess) for _, worst, _ in rows]
        means = [-100 * points_lost.mean for _, _, points_lost in rows]
        y = [max(mean, look.lowest) for mean in means]
        bars = [
            [100 * side * (mean > look.lowest) for side in reversed(points_lost.bar)]
            for mean, (_, _, points_lost) in zip(means, rows, strict=True)
        ]
        wide = np.transpose([worst.bar for _, worst, _ in rows])
        color, marker = f"C{number}", "os^Dv<>pP*X"[number]
        style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": ""}
        style |= {"capsize": 3, "elinewidth": 1, "label": defense}
        _, caps, lines = axes.errorbar(x, y, np.transpose(bars), wide, **style)
        for artist in (*caps, *lines):  # points and their names stand before them
            artist.set_alpha(0.35)
        for x_of_point, up, mean, (strength, _, _) in zip(x, y, means, rows, strict=True):
            name = _brief(strength) + (f" ({mean:.0f})" if mean < look.lowest else "")
            names.append((name, (x_of_point, up), color))
    axes.set_ylim(1.1 * look.lowest, None)
    _name_points(axes, names)
    axes.set_xlabel(look.label)
    axes.set_ylabel("points of accuracy against no defense (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend()


def _name_points(axes, names: list[tuple[str, tuple[float, float], str]]) -> None:
    """Names points, each in the picture and where the fewest other names and points are."""
    axes.figure.canvas.draw()
    scale = axes.figure.dpi / 72  # of a point
    places = [axes.transData.transform(position) for _, position, _ in names]
    taken = [(x - 5 * scale, x + 5 * scale, y - 4 * scale) for x, y in places]  # left, right, low

    def meets(box: tuple[float, float, float]) -> int:
        is_outside = box[0] < axes.bbox.x0 or box[1] > axes.bbox.x1
        return 100 * is_outside + sum(
            box[0] < box_taken[1]
            and box_taken[0] < box[1]
            and abs(box[2] - box_taken[2]) < 11 * scale
            for box_taken in taken
        )

    ups = (6, -13, 20, -27, 34, -41, 48, 62, 76)
    for (name, position, color), (x, y) in zip(names, places, strict=True):
        width, boxes = 5.5 * len(name) * scale, {}
        for up, right in itertools.product(ups, (True, False)):
            left_end = x + 7 * scale if right else x - 7 * scale - width
            boxes[up, right] = (left_end, left_end + width, y + up * scale)
        up, right = min(boxes, key=lambda place, boxes=boxes: meets(boxes[place]))
        taken.append(boxes[up, right])
        style = {"xytext": (7 if right else -7, up), "textcoords": "offset points"}
        style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
        axes.annotate(name, position, color=color, ha="left" if right else "right", **style)


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
