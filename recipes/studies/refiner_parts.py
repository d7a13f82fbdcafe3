"""Sketch and Refiner part by part: what each gives, and what a warm start does."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hf_gradguard import GradGuardTrainer, GradientMap
from hf_gradguard.defenses import Message
from hf_gradguard.training.message import Client

from ..study import Study
from . import frontier_clients as clients
from . import frontier_rows as plan
from . import frontier_tables as tables
from .frontier_attacks import attack_images, attack_texts, messages_of
from .lib.device import on_device
from .lib.images import array_images, flat, single_images
from .lib.results import Results
from .lib.tables import interval, write_table
from .lib.text import of_usual_length, sst2
from .rate_search import best_rates, cells_by_rate, chosen_rate


class PartRow(NamedTuple):
    """A row: a defense, rates of which the best is taken, and how many messages."""

    defense: str
    strength: dict
    rates: tuple[float, ...] = (1e-4, 2e-4)
    steps: int = 200


PART_ROWS = {  # the most telling first
    "none": PartRow("none", {}, (2e-4,)),
    "4 samples": PartRow("gradient_sketch", {"samples": 4}),
    "16 samples": PartRow("gradient_sketch", {"samples": 16}),
    "16, without feedback": PartRow("gradient_sketch", {"samples": 16, "error_feedback": False}),
    "16, a factor a sample": PartRow("gradient_sketch", {"samples": 16, "factors": "sample"}),
    "16, one factor": PartRow("gradient_sketch", {"samples": 16, "factors": "message"}),
    "16, a factor a sample, 2 steps": PartRow("refiner", {"samples": 16, "iterations": 2}),
    "none, 300 messages": PartRow("none", {}, (2e-4,), 300),
    "4 samples, 300 messages": PartRow("gradient_sketch", {"samples": 4}, (1e-4,), 300),
    "16 samples, 300 messages": PartRow("gradient_sketch", {"samples": 16}, (2e-4,), 300),
}


class RefinerParts(Study):
    """Sketches of 4 and 16 texts, and what each part gives: one is left out, or done otherwise, as
    where samples are refined.

    Conditions and figures: docs/findings/text.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS | plan.FOLDER | Study.ALL
    QUICK_ROWS, OF_WORDS = ("none", "4 samples", "16, without feedback"), 2

    def cells(self) -> dict:
        """Rates first. Then every row's first seed, what is recovered of it, and further seeds."""
        results, cells, best = Results(self.output), {}, {}
        for row in self.QUICK_ROWS if self.quick else PART_ROWS:
            defense, strength, rates, steps = PART_ROWS[row]
            cell = {"defense": defense, "strength": strength, "batch": plan.BATCH, "steps": steps}
            cell |= plan.QUICK if self.quick else {}
            is_single = self.quick or len(rates) == 1
            common = cell | {"seed": plan.RATES_SEED}
            search = cells_by_rate(common, () if is_single else rates)
            cells |= {(row, tables.RATES, rate): rate_cell for rate, rate_cell in search.items()}
            rate = rates[0] if is_single else chosen_rate(results, search)
            if rate is not None:
                best[row] = cell | {"learning_rate": rate}
        attacks, candidates = plan.ATTACKS | {plan.WORD: (8, {"words": 300})}, plan.CANDIDATES
        if self.quick:
            attacks = plan.QUICK_ATTACKS | {plan.WORD: (1, {"words": 4})}
            candidates = plan.QUICK_CANDIDATES
        rows_of = {plan.SPAN: list(PART_ROWS), candidates: list(PART_ROWS)}
        rows_of[plan.WORD] = list(PART_ROWS)[: self.OF_WORDS]
        for seed in range(1 if self.quick else 3):
            trained = {row: cell | {"seed": seed} for row, cell in best.items()}
            cells |= {(row, tables.ACCURACY, str(seed)): cell for row, cell in trained.items()}
            for attack, rows in rows_of.items() if seed == 0 else ():
                settings = tables.attack_cell(attack, *attacks[attack], "end")
                place = f"{attack[0]}, {attack[1]}"
                cells |= {(row, place, "0"): trained[row] | settings for row in rows if row in best}
        return self.published(cells)

    def load(self) -> None:
        self.task = SummedTask(self.args.model, self.args.data_dir, self.args.models)
        self.texts = of_usual_length(sst2(self.args.data_dir))

    def measure(self, cell: dict) -> dict:
        task = self.task
        if "attack" in cell:
            stage = task.stage(cell, cell["stage"])
            return attack_texts(cell, stage, task.tokenizer, self.texts)
        metrics = task.trained(cell)
        if cell["seed"]:
            return metrics
        return metrics | {"cosine_of_sums": round(task.sums.cosine, 4)}

    def report(self, metrics: dict) -> None:
        places = dict.fromkeys(place for cells in metrics.values() for place in cells)
        columns = [place for place in places if place not in (tables.RATES, tables.ACCURACY)]
        rows = []
        for row, cells in metrics.items():
            runs, rates = cells.get(tables.ACCURACY, {}), cells.get(tables.RATES, {})
            # The undefended row of as many messages
            plain = next(
                name
                for name, part_row in PART_ROWS.items()
                if (part_row.defense, part_row.steps) == ("none", PART_ROWS[row].steps)
            )
            shown = [row, f"{best_rates({row: rates})[row]:g}" if rates else ""]
            shown += [
                tables.accuracy_text(runs),
                tables.lost(runs, metrics.get(plain, {}).get(tables.ACCURACY, {})),
            ]
            sums = [run["cosine_of_sums"] for run in runs.values() if "cosine_of_sums" in run]
            shown += [interval(sums, 2) if sums else ""]
            rows.append(shown + [tables.score_text(cells.get(column, {})) for column in columns])
        header = ["", "rate", "accuracy", "less than none", "cosine of sums", *columns]
        write_table(self.output, header, rows)


class Sums:
    """What one client shared in a training, and its gradients, each added up."""

    def __init__(self) -> None:
        self.shared, self.gradient = torch.zeros(()), torch.zeros(())

    def watch(self, client: Client) -> None:
        sums, kind = self, type(client.defense)

        class Watched(kind):  # type: ignore[misc, valid-type]
            def __call__(self, gmap: GradientMap, *rest: Any, **named: Any) -> Message:
                message: Message = super().__call__(gmap, *rest, **named)
                sums.shared = sums.shared + flat(message)
                sums.gradient = sums.gradient + flat(gmap.undefended.gradient())
                return message

        client.defense = client.defense.with_state({})
        client.defense.__class__ = Watched

    @property
    def cosine(self) -> float:
        # In float32 sums of ten million squares are off in the third digit.
        return float(cosine_similarity(self.shared.double(), self.gradient.double(), dim=0))


class SummedTask(clients.TextTask):
    """The frontier's, with the sums of the last training."""

    def trainer(self, model: torch.nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        trainer, self.sums = super().trainer(model, rows, cell), Sums()
        self.sums.watch(trainer._clients[0])
        return trainer


PAPERS = {"alpha": 0.5}
WARM_IMAGES, WARM_RATE = 2000, 2e-3
WARM_NOISE_RATE = 4e-3  # the frontier's for these two
WARM_SIZES = {"steps": 600, "batch": 16}
WARM: dict[str, tuple[str, dict, float]] = {
    "none": ("none", {}, WARM_RATE),
    "10 iterations": ("refiner", PAPERS, WARM_RATE),
    "5 iterations": ("refiner", PAPERS | {"iterations": 5}, WARM_RATE),
    "10 iterations, 5 of what was seen before": (
        "refiner", PAPERS | {"warm_start": WARM_IMAGES}, WARM_RATE,
    ),
    "noise as large as the gradient": (
        "gaussian_noise", {"relative_scale": 1.0}, WARM_NOISE_RATE,
    ),
    "noise of five times": ("gaussian_noise", {"relative_scale": 5.0}, WARM_NOISE_RATE),
}  # fmt: skip

TRAINED_ALONE: dict[str, dict] = {  # Tables 5, 8 and 10: accuracy is all that they ask for
    **{f"beta={b}": {"beta": b} for b in (0.001, 1000.0)},
    **{f"tau={t}": {"tau": t} for t in (0.91, 1.0)},
    "element_wise=False": {"element_wise": False},
}
WARM_TRIED = {  # rates, and how they do on what was held out
    "5 iterations": (4e-3, 1e-3, 2e-3),
    "noise of five times": (2e-3, 4e-3, 8e-3),
    "none": (1e-3, 2e-3, 4e-3),
}
COSINE, MEMBERS, TRIED = "cosine", "TPR at 1 % FPR, end", "held out at"


AGAINST = (("10 iterations", "noise of five times"), ("5 iterations", "noise of five times"))
WARM_PAIRS: list[tuple[str, ...]] = [
    *AGAINST, ("5 iterations", "10 iterations"),
    ("10 iterations, 5 of what was seen before", "10 iterations"),
    *((*rows, place, place) for rows in AGAINST for place in ("PSNR, start", "PSNR, end")),
    *((row, "10 iterations") for row in TRAINED_ALONE),
]  # fmt: skip
"""Rows whose difference docs/findings/refiner.md speaks of."""


class Warm(Study):
    """What a warm start brings to Refiner as published: half the iterations where an image was
    refined before, from what they led to then.

    Conditions and figures: docs/findings/refiner.md.
    """

    ARGUMENTS = plan.FOLDER | Study.ALL | {
        "--test": "parquet with img and label, to judge on",
        "--images": "npz with x (N, 32, 32, 3) and y: to train on and to attack",
    }  # fmt: skip

    def cells(self) -> dict:
        """Trainings first, then what is recovered of the first seed's, early and late."""
        attacks = plan.QUICK_IMAGE_ATTACKS if self.quick else plan.IMAGE_ATTACKS
        sizes = plan.QUICK if self.quick else WARM_SIZES
        rows = {
            row: {"defense": defense, "strength": strength, **sizes, "learning_rate": rate}
            for row, (defense, strength, rate) in WARM.items()
        }
        cells: dict = {}
        for seed in range(1 if self.quick else 3):
            cells |= {
                (row, tables.ACCURACY, str(seed)): c | {"seed": seed} for row, c in rows.items()
            }
        for row, rates in WARM_TRIED.items():
            for rate in rates:
                tried = {"learning_rate": rate, "seed": plan.RATES_SEED}
                cells[row, f"{TRIED} {rate:g}", ""] = rows[row] | tried
        size, count = (4, 2) if self.quick else (16, 64)
        for row, cell in rows.items():
            first_seed = cell | {"seed": 0}
            for stage in ("start", "end"):
                attack_settings = tables.attack_cell(
                    plan.INVERTING, *attacks[plan.INVERTING], stage
                )
                cells[row, f"PSNR, {stage}", "0"] = first_seed | attack_settings
            candidates = ("candidates", size)
            attack_settings = tables.attack_cell(candidates, *attacks[candidates], "end")
            cells[row, MEMBERS, "0"] = first_seed | attack_settings
            cells[row, COSINE, "0"] = first_seed | {"stage": "end", COSINE: count}
        ten_iterations = rows["10 iterations"]
        for row, changed in () if self.quick else TRAINED_ALONE.items():
            strength = ten_iterations["strength"] | changed
            cells |= {
                (row, tables.ACCURACY, str(seed)): ten_iterations
                | {"strength": strength, "seed": seed}
                for seed in range(3)
            }
        return self.published(cells)

    def load(self) -> None:
        self.task = FewImages(self.args.images, self.args.test, self.args.models)

    def measure(self, cell: dict) -> dict:
        if "attack" in cell:
            return attack_images(cell, self.task, self.args.images)
        if COSINE not in cell:
            return self.task.learned(cell)
        batches = [on_device(row) for row in single_images(self.args.images, cell[COSINE])]
        stage, cosines = self.task.stage(cell, cell["stage"]), []
        for batch, message in zip(batches, messages_of(cell, stage, batches), strict=True):
            true = flat(GradientMap(stage.model, batch).gradient())
            cosines.append(round(float(cosine_similarity(flat(message), true, dim=0)), 4))
        return {COSINE: cosines}

    def report(self, metrics: dict) -> None:
        plain, rows = metrics["none"][tables.ACCURACY], []
        for row, cells in metrics.items():
            tried = [
                f"{place.removeprefix(TRIED).strip()} ({runs['']['held_out']:.3f})"
                for place, runs in cells.items()
                if place.startswith(TRIED)
            ]
            runs = cells[tables.ACCURACY]
            shown = [row, ", ".join(tried), tables.accuracy_text(runs), tables.lost(runs, plain)]
            shown += [
                tables.score_text(cells.get(place, {}))
                for place in ("PSNR, start", "PSNR, end", MEMBERS)
            ]
            cosines = cells.get(COSINE, {}).get("0", {}).get(COSINE)
            rows.append([*shown, interval(cosines, 2) if cosines else ""])
        header = ["", "rates (held out)", "accuracy", "less than none"]
        header += ["PSNR, start", "PSNR, end", MEMBERS, "cosine"]
        write_table(self.output, header, rows)
        tables.write_pairs(metrics, WARM_PAIRS, self.output)


class FewImages(clients.ImageTask):
    """The first images of an npz, as they are, and some of the next ones to judge by."""

    COUNT = WARM_IMAGES

    @functools.cached_property
    def train_rows(self) -> tuple[Tensor, Tensor]:
        return array_images(self._train)

    def rows_to_learn(self) -> clients.ImageRows:
        return clients.ImageRows(*(tensor[: self.COUNT] for tensor in self.train_rows), flip=False)

    def held_out(self) -> tuple[Tensor, Tensor]:
        pixels, labels = self.train_rows
        return pixels[self.COUNT :], labels[self.COUNT :]
