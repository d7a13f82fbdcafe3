r"""Accuracy on SST-2 of each defense at its own best learning rate, and what attackers read of it
at the start, in the middle and at the end of its own training.

    python -m recipes.studies.frontier.run text --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/frontier_text

One client of 16 phrases a message, 200 steps, seeds that chose no rate. Accuracy is of the 2,693
sentences of SST-2's dev and SST's test set, compared with the undefended run of the same seed,
sentence by sentence. Attacked are messages of sentences of the dev set, without dropout, labels
and lengths known. Attackers know the defense: TAG weighs coordinates by the noise's covariance, or
matches what a pruning left; span fills in what it pruned. Candidates are 300 sentences, ranked by
likelihood: what is shown is the share of a message's 16 that are told at 1 % false alarms. FOLDER
keeps what was trained, 45 MB a stage.
"""

import numpy as np

from ..lib.results import Results, named
from ..lib.tables import bracketed, interval, plt, save, write_table
from ..lib.text import of_usual_length, sst2
from . import rates
from .attackers import attacked
from .settings import (
    ALL,
    ATTACKS,
    BATCH,
    FIRST,
    PASSES,
    QUICK,
    QUICK_ATTACKS,
    QUICK_ROWS,
    ROWS,
    STAGES,
    STEPS,
)
from .training import TEXTS, Task, row_of

ARGUMENTS = TEXTS | {
    "--all": ALL,
    "--models": "folder that keeps what was trained",
    "--rates": {"default": "frontier_rates", "help": "results of the part rates, beside OUTPUT"},
}
ACCURACY = "accuracy"
LOWEST = -7  # points of accuracy that are drawn; what lost more stands there, with its number


def cells(args) -> dict:
    """All, from the most telling down; without `--all` the first ones, and those that are there."""
    if args.quick:
        passes = [(1, {one: list(STAGES) for one in QUICK_ATTACKS})]
        return _cells(QUICK_ROWS, passes, QUICK_ATTACKS, QUICK, None)
    chosen, sizes = _chosen(args), {"steps": STEPS, "batch": BATCH}
    whole = _cells(ROWS, PASSES, ATTACKS, sizes, chosen)
    if args.all:
        return whole
    first, results = _cells(FIRST, PASSES[:1], ATTACKS, sizes, chosen), Results(args.output)
    return {place: cell for place, cell in whole.items() if place in first or cell in results}


def _cells(rows: list, passes: list, attacks: dict, sizes: dict, chosen: dict | None) -> dict:
    """Trainings first, then attacks. Rows whose rate is being searched for are left out."""
    found: dict = {}
    for seeds, some in passes:
        for seed in range(seeds):
            trained = {
                row_of(*row): {
                    "defense": row[0], "strength": row[1], "seed": seed,
                    "learning_rate": chosen[row_of(*row)] if chosen is not None else 2e-4, **sizes,
                }
                for row in rows
                if chosen is None or row_of(*row) in chosen
            }  # fmt: skip
            found |= {(row, ACCURACY, str(seed)): cell for row, cell in trained.items()}
            for attack, stage in [(one, stage) for one in some for stage in some[one]]:
                (name, size), (count, settings) = attack, attacks[attack]
                asked = {"stage": stage, "attack": name, "size": size, "messages": count}
                asked |= {"settings": settings}
                place = f"{name}, {size}, {stage}"
                found |= {(row, place, str(seed)): c | asked for row, c in trained.items()}
    return found


def _chosen(args) -> dict[str, float]:
    """The rates of rows whose search has ended."""
    of_rates = type(args)(**vars(args) | {"output": args.output.with_name(args.rates)})
    results, found = Results(of_rates.output), {}
    if not named(of_rates.output, ".json").exists():
        raise SystemExit(f"{results.path} is not there: run the part rates first.")
    for (row, rate), cell in rates.cells(of_rates).items():
        found.setdefault(row, {})[rate] = results.get(cell)
    done = {row: tried for row, tried in found.items() if None not in tried.values()}
    return rates.best(done)


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        if "attack" not in cell:
            model = task.train(cell, keep=True)
            right = task.right(model, task.test_rows)
            held_out = task.right(model, task.held_out())
            bits = np.packbits(right).tobytes().hex()
            return {"accuracy": float(right.mean()), "held_out": float(held_out.mean()),
                    "right": bits, "of": len(right)}  # fmt: skip
        training = {k: cell[k] for k in
                    ("defense", "strength", "seed", "learning_rate", "steps", "batch")}  # fmt: skip
        return attacked(cell, task.stage(training, cell["stage"]), task.tokenizer, texts)

    return measure


def report(figures: dict, args) -> None:
    places = dict.fromkeys(place for found in figures.values() for place in found)
    attacks = [f"{attack}, {size}, {stage}" for attack, size in ATTACKS for stage in STAGES]
    columns = [attack for attack in attacks if attack in places]
    plain = figures.get("none", {}).get(ACCURACY, {})
    rows = []
    for row, found in figures.items():
        runs = found.get(ACCURACY, {})
        accuracies = [run["accuracy"] for run in runs.values()]
        shown = [f"`{row}`", interval(accuracies) if accuracies else "", lost(runs, plain)]
        rows.append(shown + [read(found.get(column, {})) for column in columns])
    write_table(args.output, ["", "accuracy", "less than none", *columns], rows)
    picture(figures, args.output)


def lost(runs: dict, plain: dict) -> str:
    """The undefended runs' accuracy less this one's, with its interval."""
    return bracketed(apart(runs, plain), ".3f") if runs.keys() & plain.keys() else ""


def apart(runs: dict, plain: dict) -> list[float]:
    """The same as numbers. The 95 % bootstrap interval is over seeds and sentences, paired in
    both.
    """
    seeds = sorted(runs.keys() & plain.keys())
    lost = np.stack([_bits(plain[s]) - _bits(runs[s]) for s in seeds])
    draws, means = np.random.default_rng(0), []
    for _ in range(2000):
        some = lost[draws.integers(len(seeds), size=len(seeds))]
        means.append(some[:, draws.integers(lost.shape[1], size=lost.shape[1])].mean())
    return [float(lost.mean()), *map(float, np.quantile(means, [0.025, 0.975]))]


def _bits(run: dict) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex(run["right"]), dtype=np.uint8)
    return np.unpackbits(packed)[: run["of"]].astype(float)


def read(runs: dict) -> str:
    """Mean with a 95 % interval over all sentences of all seeds: token F1, or of candidates the
    share that is told.
    """
    values = _scores(runs) or _scores(runs, "tpr_1%")
    return interval(values, 2) if values else ""


def _scores(runs: dict, name: str = "token_f1") -> list[float]:
    return [f for run in runs.values() for f in run.get(name, [])]


def picture(figures: dict, output) -> None:
    """Accuracy lost against the most that any attacker reads at any stage."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    plain = figures["none"][ACCURACY]
    points: dict[str, list] = {}
    for row, found in figures.items():
        read_by = [_scores(runs) for column, runs in found.items() if column != ACCURACY]
        if ACCURACY in found and any(read_by):
            kind, _, strength = row.partition(" ")
            worst = max((scores for scores in read_by if scores), key=np.mean)
            points.setdefault(kind, []).append((strength, worst, apart(found[ACCURACY], plain)))
    for number, (kind, some) in enumerate(points.items()):
        x = [float(np.mean(scores)) for _, scores, _ in some]
        means = [-100 * mean for _, _, (mean, _, _) in some]
        y = [max(mean, LOWEST) for mean in means]
        shown = [mean > LOWEST for mean in means]
        bars = [
            [100 * (high - mean) * there, 100 * (mean - low) * there]
            for there, (_, _, (mean, low, high)) in zip(shown, some, strict=True)
        ]
        wide = [1.96 * np.std(scores) / len(scores) ** 0.5 for _, scores, _ in some]
        color = f"C{number}"
        look = {
            "color": color,
            "marker": "os^Dv<>pP*X"[number],
            "linestyle": "",
            "capsize": 3,
            "elinewidth": 1,
        }
        axes.errorbar(x, y, np.transpose(bars), wide, label=kind, **look)
        for left, up, mean, (strength, _, _) in zip(x, y, means, some, strict=True):
            said = strength.replace("relative_scale=", "× ").replace("ratio=", "")
            said += f" ({mean:.0f})" if mean < LOWEST else ""
            place = {"xytext": (7, -13 if number % 2 else 6), "textcoords": "offset points"}
            axes.annotate(said, (left, up), color=color, **place)
    axes.set_ylim(LOWEST - 0.7, None)
    axes.set_xlabel("words that the best attacker finds at any stage (token F1; less is better)")
    axes.set_ylabel("points of accuracy against no defense (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, output)
