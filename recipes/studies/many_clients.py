"""A thousand clients with few rows each, in Flower's own simulation engine. A client with all of
its rows is protected: its whole update is clipped, and noise is the server's, or of shares, or each
client's alone. Each is asked once, and a tenth of them drops out.

Conditions and figures: docs/findings/clients.md.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from hf_gradguard.defenses.correlated import Banded, Factor, make_factor, sensitivity
from hf_gradguard.leakage import gaussian_epsilon, membership_power

from ..study import Study
from . import frontier_clients as judging
from . import frontier_tables as tables
from .frontier_rows import DELTA, RATES_SEED
from .lib.linear_heads import HeadSettings, mean_accuracy, simulated_heads
from .lib.results import Results, named
from .lib.tables import plt, save, write_table
from .rate_search import RateStudy
from .rate_tasks import SomePhrases

CLIENTS, ROWS, ASKED, DROPOUT, LEAST = 1000, 26, 50, 0.1, 0.8
CLIP, SIGMA, LOCAL_STEPS, LOCAL_RATE, SEEDS = 2.0, 1.5, 5, 5.0, 5
SKEW = 0.1  # α of Dirichlet's distribution
GRID = tuple(0.0625 * 2**power for power in range(11))
POOLED_GRID = tuple(0.625 * 2**power for power in range(8))
POOLED_MESSAGES, POOLED_BATCH = 1590, 16  # nearly all rows, once
ORDERS = 3  # of clients, when a rate is chosen

NONE, SERVER, CORRELATED = "none", "server", "server, correlated"
SHARES, ALONE = "shares", "alone"
MIDDLE = {NONE: 8.0, SERVER: 2.0, CORRELATED: 4.0, SHARES: 1.0, ALONE: 0.25}
TITLES = {
    NONE: "none", SERVER: "noise of the server",
    CORRELATED: "noise of the server that cancels in the weights",
    SHARES: "shares of the clients", ALONE: "each client alone",
}  # fmt: skip
SKEWED = (NONE, CORRELATED)
POOLED, SECURE = "all rows in one place", "shares of the clients under SecAgg+"
EVERYBODY, DRAWN = "all clients, a message found by its node", "all clients, as released"
SECURELY = "all clients under SecAgg+, 15 neighbors"
SIZES = {
    EVERYBODY: (10, 100, 1000, 10_000), DRAWN: (10, 100, 1000), SECURELY: (20, 60, 180),
}  # fmt: skip
STAGES = {
    "setup": "before its keys", "share_keys": "before it shares them",
    "collect_masked_vectors": "before its masked update", "unmask": "before the masks are removed",
}  # fmt: skip
FLOWER = "Flower's DifferentialPrivacyClientSideFixedClipping"
ENGINE, GROWTH, STAGE, LYING = "engine", "growth", "stage", "lying"


class Averaging(NamedTuple):
    """What a simulated training is, beside its clients.

    Args:
        protection: As in `simulated_clients.Federation`.
        rate: Of the server, in the first round.
        asked: Clients of a round.
        clip: Of a client's update.
        noise_multiplier: Of the sum, in clips.
    """

    protection: str
    rate: float
    asked: int = ASKED
    clip: float = CLIP
    noise_multiplier: float = SIGMA


def averaged_head(
    features: Tensor, labels: Tensor, parts: Tensor, of: Averaging, seed: int
) -> Tensor:
    """Weights `(width, classes)` as the engine trains them, without it. Noise here is drawn by
    torch's generator, so it protects nobody.

    Args:
        features: `(N, width)`.
        labels: `(N,)` class ids.
        parts: `(clients, rows)`: which rows a client has.
        of: The training.
        seed: Of clients, dropouts and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(parts), generator=generator)
    rounds, answers_planned = len(parts) // of.asked, (1 - DROPOUT) * of.asked
    factor: Factor = Banded((1.0,))
    if of.protection == CORRELATED:
        factor = make_factor("blt", rounds, falling_rate=True)
    weights = torch.zeros(features.shape[1], int(labels.max()) + 1)
    memory = torch.zeros(factor.memory, weights.numel())
    for number, asked in enumerate(order[: rounds * of.asked].split(of.asked)):
        here = asked[torch.rand(len(asked), generator=generator) >= DROPOUT]
        total = clipped_updates(features[parts[here]], labels[parts[here]], weights, of).sum(0)
        deviation = of.clip * of.noise_multiplier
        if of.protection == SHARES:
            deviation *= math.sqrt(len(here) / math.ceil(LEAST * of.asked))
        elif of.protection == ALONE:
            deviation *= math.sqrt(len(here))
        elif of.protection == CORRELATED:
            deviation *= sensitivity(factor.column(rounds))
        if of.protection != NONE:
            white_noise = torch.randn(weights.numel(), generator=generator)
            noise, memory = factor.correlate(white_noise, memory)
            total += deviation * noise.view_as(total)
        size = len(here) if of.protection == NONE else answers_planned
        weights = weights + of.rate * (1 - number / rounds) / size * total
    return weights


def clipped_updates(samples: Tensor, labels: Tensor, start: Tensor, of: Averaging) -> Tensor:
    """`(clients, width, classes)`: what local steps change, of `(clients, rows, width)`."""
    targets = F.one_hot(labels, start.shape[1])
    weights = start.expand(len(samples), -1, -1)
    for _ in range(LOCAL_STEPS):
        errors = (samples @ weights).softmax(-1) - targets
        weights = weights - LOCAL_RATE * samples.transpose(1, 2) @ errors / samples.shape[1]
    updates = weights - start
    if of.protection == NONE:
        return updates
    norms = updates.flatten(1).norm(dim=1)
    return updates * (of.clip / norms.clamp(min=1e-12)).clamp(max=1)[:, None, None]


def equal_parts(labels: Tensor, clients: int, rows: int, seed: int, alpha: float = 0.0) -> Tensor:
    """`(clients, rows)`: which rows each has, shuffled; with α by classes of which each client has
    proportions drawn from Dirichlet(α, ..., α), as far as there are rows left (Hsu et al., 2019).
    """
    generator = np.random.default_rng(seed)
    if not alpha:
        order = generator.permutation(len(labels))[: clients * rows]
        return torch.from_numpy(order.reshape(clients, rows))
    classes = np.unique(labels.numpy())
    left = [list(generator.permutation(np.flatnonzero(labels.numpy() == c))) for c in classes]
    parts = []
    for _ in range(clients):
        proportions = generator.dirichlet([alpha] * len(classes))
        part = []
        for _ in range(rows):
            there = proportions * np.array([bool(rows_left) for rows_left in left])
            there = there if there.any() else np.array([float(bool(r)) for r in left])
            part.append(left[generator.choice(len(classes), p=there / there.sum())].pop())
        parts.append(part)
    return torch.tensor(np.array(parts))


class ManyClients(RateStudy):
    """Accuracy on SST-2 of heads by a thousand clients of 26 phrases each, what a round costs with
    up to ten thousand clients, and what Flower's own parts do when clients drop out.

    Conditions and figures: docs/findings/clients.md.
    """

    ARGUMENTS = Study.ALL | {
        "--model": "name or folder of the sentence encoder",
        "--data_dir": "folder with SST-2",
        "--models": "folder that keeps features",
        "--public": "a public text, WikiText-2's training part, a paragraph a line",
    }

    def cells(self) -> dict:
        cells: dict = {}
        for protection in TITLES:
            search = self._search(protection)
            row, seeds = TITLES[protection], range(1 if self.quick else SEEDS)
            simulated = {"simulated": True, "protection": protection} | SETTINGS
            cells |= self.rated_cells(row, search, simulated, seeds)
            rate = self.best(search)
            for seed in seeds if rate is not None and protection in SKEWED else ():
                place = f"{row}, skewed", tables.ACCURACY, str(seed)
                cells[place] = {**simulated, "alpha": SKEW, "learning_rate": rate, "seed": seed}
            if rate is not None and not self.quick:
                trained = {"learning_rate": rate, "seed": 0}
                cells[row, ENGINE, "0"] = self._trained(protection) | trained
                if protection == SHARES:
                    secure = self._trained(protection, secure=True)
                    cells[SECURE, ENGINE, "0"] = secure | trained
        common = {"pooled": True, "steps": POOLED_MESSAGES, "batch": POOLED_BATCH}
        search = self.search(common | {"seed": RATES_SEED}, POOLED_GRID, 10.0)
        cells |= self.rated_cells(POOLED, search, common, range(1 if self.quick else SEEDS))
        if not self.quick:
            cells |= self._cells_of_the_engine()
        cells = self.published(cells)
        return dict(sorted(cells.items(), key=lambda cell: cell[0][1] != tables.RATES))

    def _search(self, protection: str) -> dict[str, dict]:
        common = {"simulated": True, "seed": RATES_SEED, "protection": protection} | SETTINGS
        return self.search(common, GRID, MIDDLE[protection])

    def _trained(self, protection: str, **other: Any) -> dict:
        sizes = {"engine": True, "clients": CLIENTS, "rounds": CLIENTS // ASKED}
        return {"protection": protection} | SETTINGS | sizes | other

    def _cells_of_the_engine(self) -> dict:
        cells = {}
        for kind, sizes in SIZES.items():
            for size in sizes:
                rounds = 2 if size <= 1000 else 1
                cell = {"engine": True, "clients": size, "asked": size, "rounds": rounds, "seed": 0}
                cell |= {"protection": SHARES, "clip": CLIP, "noise_multiplier": SIGMA}
                cell |= {"learning_rate": 1.0, "by_node": kind != DRAWN}
                cell |= {"secure": True, "shares": 15} if kind == SECURELY else {}
                cells[GROWTH, kind, str(size)] = cell
        dropping = {"clients": 60, "asked": 12, "rounds": 5, "least": 0.6, "dropout": 0.2}
        for stage in STAGES:
            cell = self._trained(SHARES, secure=True, dropout_stage=stage) | dropping
            cells[STAGE, stage, ""] = cell | {"learning_rate": 1.0, "seed": 0}
        for dropout in (DROPOUT, 0.0):
            cell = self._trained("flower", dropout=dropout) | {"learning_rate": 1.0, "seed": 0}
            cell["rounds"] = 4
            cells[STAGE, "flower", f"{dropout:g}"] = cell
        cells[STAGE, LYING, ""] = {"lying": True, "clients": 12, "entries": 2802, "seed": 0}
        return cells

    def load(self) -> None:
        args = self.args
        self._task = SomePhrases(args.model, args.data_dir, args.models, args.public)
        self._scratch = tempfile.TemporaryDirectory()
        self._ready: dict[str, dict] = {}

    def measure(self, cell: dict) -> dict:
        if "pooled" in cell:
            return self._pooled(cell)
        if "simulated" in cell:
            return self._simulated(cell)
        if "lying" in cell:
            return unmasked(cell)
        if (key := json.dumps(cell, sort_keys=True)) not in self._ready:
            self._train_together(cell)
        return self._ready.pop(key)

    def _pooled(self, cell: dict) -> dict:
        rows, judged = self._task.split
        settings = HeadSettings(cell["learning_rate"], cell["steps"], cell["batch"])
        weights = simulated_heads(rows["features"], rows["labels"], settings, 1, cell["seed"])
        if cell["seed"] == RATES_SEED:
            return {"held_out": mean_accuracy(weights, judged["features"], judged["labels"])}
        return self._judged(weights[0])

    def _simulated(self, cell: dict) -> dict:
        if cell["seed"] != RATES_SEED:
            return self._judged(self._averaged(cell, cell["seed"]))
        _, judged = self._task.split
        heads = torch.stack([self._averaged(cell, seed) for seed in range(ORDERS)])
        score = mean_accuracy(heads, judged["features"], judged["labels"])
        return {"held_out": round(score, 5)}

    def _averaged(self, cell: dict, seed: int) -> Tensor:
        rows, _ = self._task.split
        of = Averaging(cell["protection"], cell["learning_rate"])
        parts = equal_parts(rows["labels"], CLIENTS, ROWS, seed, cell.get("alpha", 0.0))
        return averaged_head(rows["features"], rows["labels"], parts, of, seed)

    def _judged(self, weights: Tensor) -> dict:
        rows = self._task.test_rows
        return judging.judgment(((rows["features"] @ weights).argmax(1) == rows["labels"]).numpy())

    def _train_together(self, first: dict) -> None:
        """Of as many nodes, in one simulation: its processes take minutes to start."""
        results = Results(self.output)
        together = [
            cell
            for cell in self.marked_cells().values()
            if cell not in results and _engine_of(cell) == _engine_of(first)
        ]
        federations = [self._federation(cell) for cell in together]
        # Of nothing that is measured: in its one round processes import what they need.
        first_round = {"asked": min(10, first["clients"]), "rounds": 1, "secure": False}
        federations = [federations[0] | first_round, *federations]
        folder = Path(self._scratch.name)
        (folder / "settings.json").write_text(json.dumps(federations))
        environment = os.environ | {
            "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",  # as the server, not 15 behind all other processes
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, "-m", "recipes.studies.lib.simulated_clients"]
        log = folder / "log.txt"
        with log.open("w") as written:
            done = subprocess.run(
                [*command, str(folder / "settings.json"), str(folder / "result.safetensors")],
                env=environment, stdout=written, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"The simulation failed:\n{log.read_text()[-5000:]}")
        with safe_open(folder / "result.safetensors", "pt") as result:
            figures = json.loads(result.metadata()["figures"])
            for number, cell in enumerate(together, start=1):
                judged = self._judged(result.get_tensor(f"{number}.0").T)
                measured = judged | figures[number] | {"asked": cell["asked"]}
                self._ready[json.dumps(cell, sort_keys=True)] = measured

    def _federation(self, cell: dict) -> dict:
        from .lib.simulated_clients import write_rows

        folder = Path(self._scratch.name) / f"rows-{cell['seed']}-{cell.get('alpha', 0)}"
        if not folder.exists():
            rows, _ = self._task.split
            alpha = cell.get("alpha", 0.0)
            parts = equal_parts(rows["labels"], CLIENTS, ROWS, cell["seed"], alpha)
            write_rows(folder, rows["features"], rows["labels"], parts.tolist())
        taken = ("protection", "clients", "asked", "rounds", "clip", "noise_multiplier", "secure",
                 "shares", "dropout", "dropout_stage", "least", "local_steps", "local_rate",
                 "by_node")  # fmt: skip
        given = {"by_node": True} | {name: cell[name] for name in taken if name in cell}
        return given | {"folder": str(folder), "server_rate": cell["learning_rate"]}

    def report(self, metrics: dict) -> None:
        growth, stages = metrics.pop(GROWTH, {}), metrics.pop(STAGE, {})
        self._report_accuracy(metrics)
        _report_noise(named(self.output, "_noise"))
        if growth:
            _report_growth(growth, self.output)
        if stages:
            _report_stages(stages, named(self.output, "_dropouts"))

    def _report_accuracy(self, metrics: dict) -> None:
        tried, rows = tables.pop_rates(metrics), []
        plain = metrics[TITLES[NONE]].get(tables.ACCURACY, {})
        pooled = metrics[POOLED].get(tables.ACCURACY, {})
        skewed = metrics.get(f"{TITLES[NONE]}, skewed", {}).get(tables.ACCURACY, {})
        for row, cells in metrics.items():
            runs = cells.get(tables.ACCURACY, {})
            against = skewed if row.endswith(", skewed") else plain
            less = "" if runs is against or row == POOLED else tables.lost(runs, against)
            bounds = [""] * 3
            if row != POOLED and not row.startswith(NONE):
                bounds = [f"{gaussian_epsilon(SIGMA, DELTA):.2f}",
                          f"{gaussian_epsilon(SIGMA / 2, DELTA):.2f}",
                          f"{membership_power(SIGMA):.1%}"]  # fmt: skip
            of_engine = cells.get(ENGINE, {})
            cost = _cost(of_engine.values()) if of_engine else [""] * 4
            below = "" if row == POOLED else tables.lost(runs, pooled)
            accuracies = tables.accuracy_text(runs), tables.accuracy_text(of_engine)
            shown = [row, tried.get(row, ""), *accuracies, less, below]
            rows.append([*shown, *bounds, *cost])
        header = [
            "", "rates (held out)", "accuracy", "accuracy in the engine", "less than none",
            "less than all in one place",
            "ε of a client", "ε, replaced", "clients found at most", "answers of a round",
            "processor seconds of a round", "bytes down, a client", "bytes up, a client",
        ]  # fmt: skip
        write_table(self.output, header, rows)


SETTINGS = {
    "asked": ASKED, "rows": ROWS, "clip": CLIP, "noise_multiplier": SIGMA,
    "local_steps": LOCAL_STEPS, "local_rate": LOCAL_RATE, "dropout": DROPOUT, "least": LEAST,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def unmasked(cell: dict) -> dict:
    """How far one client's update, as a server that lies unmasks it, is from what the client sent;
    and how far its others are.
    """
    from .lib.lying_server import unmasked_update

    draw = np.random.default_rng(cell["seed"])
    shape = cell["clients"], cell["entries"]
    updates = draw.normal(scale=0.1, size=shape).astype(np.float32)
    found = unmasked_update(updates, victim=0)
    errors = np.abs(updates - found).max(1)
    return {"largest_error": float(errors[0]), "others": float(errors[1:].min())}


def _engine_of(cell: dict) -> tuple:
    """What cells of one simulation have in common."""
    is_apart = cell.get("asked") == cell.get("clients") or cell.get("secure", False)
    kind = is_apart and "dropout_stage" not in cell
    return "engine" in cell, cell.get("clients"), cell.get("by_node", True), kind


def _cost(runs: Iterable[dict]) -> list[str]:
    runs = list(runs)
    answers = [number for run in runs for number in run["answers"]]
    seconds = [of for run in runs for of in run["processor_seconds"]]
    ways = [f"{_bytes(runs[0], way):,.0f}" for way in ("down", "up")]
    return [f"{min(answers)} to {max(answers)}", f"{statistics.median(seconds):.2f}", *ways]


def _bytes(run: dict, way: str) -> float:
    """Of a client that was asked, or that answered, in a round."""
    return run["bytes"][way] / (run["asked"] if way == "down" else run["answers"][0])


def _report_noise(output: Path) -> None:
    """What shares of noise come to when clients drop out, or tell each other theirs."""
    rows = []
    for planned in (ASKED, math.ceil(LEAST * ASKED)):
        for answers, told in ((50, 0), (45, 0), (40, 0), (45, 5), (40, 10), (40, 20), (1, 0)):
            sigma = SIGMA * math.sqrt((answers - told) / planned)
            bounds = [f"{gaussian_epsilon(sigma, DELTA):.2f}", f"{membership_power(sigma):.1%}"]
            rows.append([planned, answers, told, f"{sigma:.2f}", *bounds])
    header = [
        "planned for answers", "answers", "of which tell their noise", "σ that is left",
        "ε of a client", "clients found at most",
    ]  # fmt: skip
    write_table(output, header, rows)


def _report_growth(growth: dict, output: Path) -> None:
    rows: list[list[Any]] = []
    figure, places = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for kind, runs in growth.items():
        sizes = [int(size) for size in runs]
        columns = {
            "seconds of a round": [statistics.median(r["seconds"]) for r in runs.values()],
            "processor seconds of a round": [
                statistics.median(r["processor_seconds"]) for r in runs.values()
            ],
            "MB of a round": [sum(r["bytes"].values()) / 1e6 for r in runs.values()],
            "MB at the peak": [r["peak_memory"] / 1e6 for r in runs.values()],
        }
        for place, number in enumerate(runs):
            shown = [f"{values[place]:,.2f}" for values in columns.values()]
            rows.append([kind, f"{int(number):,}", *shown])
        if len(sizes) > 1:
            slopes = [_exponents(sizes, values) for values in columns.values()]
            rows.append([kind, "exponent (of the last step)", *slopes])
        shown_columns = [name for name in columns if name != "seconds of a round"]
        for axis, name in zip(places, shown_columns, strict=True):
            axis.loglog(sizes, columns[name], marker="o", ms=3, label=kind)
            axis.set_xlabel("clients")
            axis.set_title(name, fontsize=9)
    places[0].legend(fontsize=7)
    save(figure, output)
    write_table(
        named(output, "_growth"),
        ["", "clients", "seconds of a round", "processor seconds of a round", "MB of a round",
         "MB at the peak"],
        rows,
    )  # fmt: skip


def _exponents(sizes: Sequence[int], values: Sequence[float]) -> str:
    """Of all sizes by least squares, and between the last two."""
    x, y = ([math.log(max(value, 1e-3)) for value in of] for of in (sizes, values))
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return f"{statistics.linear_regression(x, y).slope:.2f} ({last:.2f})"


def _report_stages(stages: dict, output: Path) -> None:
    rows = []
    for stage, runs in stages.items():
        for dropout, run in runs.items():
            if stage == LYING:
                errors = f"{run['largest_error']:.1g}", f"{run['others']:.2g}"
                rows.append(["SecAgg+, the server asks for both shares", "", "", "", *errors])
                continue
            name = f"SecAgg+, clients drop out {STAGES[stage]}" if stage in STAGES else FLOWER
            if stage not in STAGES:
                name += f", {float(dropout):.0%} drop out"
            answers = f"{min(run['answers'])} to {max(run['answers'])}"
            rows.append([name, len(run["used"]), sum(run["used"]), answers, "", ""])
    header = [
        "", "rounds", "rounds that count", "answers", "one client's update, largest error",
        "of other clients'",
    ]  # fmt: skip
    write_table(output, header, rows)
