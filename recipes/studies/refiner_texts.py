"""Refiner as published, on sentences: what it does, what it hides, and what it costs."""

import functools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import cosine_similarity, normalize
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.defenses.refiner.published import brought_near
from hf_gradguard.metrics import score_text as score_texts
from hf_gradguard.randomness import Stream

from ..study import Study
from .frontier_attacks import F1, attack_texts
from .frontier_clients import Stage, TextTask
from .frontier_rows import BATCH, FOLDER, LBFGS, QUICK
from .frontier_tables import ACCURACY, accuracy_text, attack_cell, lost, score_text
from .lib.attacks import attack_of, observe
from .lib.defenses import as_published, published, with_own_strength
from .lib.images import flat
from .lib.intervals import student
from .lib.results import PUBLISHED, Results, named, nested
from .lib.tables import bracketed, summary, write_table
from .lib.text import (
    NETWORK,
    TEXT_FLAGS,
    batch_of,
    batches_of_one,
    load_classifier,
    load_tokenizer,
    of_length,
    sst2,
)
from .lib.training import learn
from .privacy_and_utility import accuracy_cells

CURVE = {
    f"alpha={alpha}, learning_rate={rate}": {"alpha": alpha, "learning_rate": rate}
    for alpha in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    for rate in (0.003, 0.01, 0.03)
}
PROJECTION = {
    "no projection (our default)": {},
    "`epsilon=0.05`": {"epsilon": 0.05},
    "`relative_epsilon=0.05`": {"relative_epsilon": 0.05},
    "`relative_epsilon=0.5`": {"relative_epsilon": 0.5},
}

BLENDED = {"iterations": 1, "learning_rate": 1e-9}
IN_TRAINING = {
    "α = 0.1, blended only": {"alpha": 0.1, **BLENDED},
    "α = 0.3, blended only": {"alpha": 0.3, **BLENDED},
    "α = 0.3, learning rate 0.001": {"alpha": 0.3, "learning_rate": 0.001},
    "α = 0.3, learning rate 0.01": {"alpha": 0.3, "learning_rate": 0.01},
    "α = 0.6, blended only": {"alpha": 0.6, **BLENDED},
    "α = 0.6, learning rate 0.001": {"alpha": 0.6, "learning_rate": 0.001},
    "α = 0.6, learning rate 0.01 (default)": {"alpha": 0.6, "learning_rate": 0.01},
}


class RefinerStudy(Study):
    """An encoder with a new head, before fine-tuning, without dropout."""

    ARGUMENTS: dict[str, Any] = TEXT_FLAGS | {"--evaluation_network": NETWORK}

    def load(self) -> None:
        set_seed(0)
        self.tokenizer = load_tokenizer(self.args.model)
        self.model = load_classifier(self.args.model, num_labels=2)
        self.data = sst2(self.args.data_dir)

    def refiner(self, model, strength: dict):
        network = {"evaluation_network": self.args.evaluation_network}
        defense = make_defense("refiner", objective="weighted", **network, **strength)
        defense.prepare(model, load_tokenizer(self.args.model))
        return defense


class Sentences(RefinerStudy):
    """Does Refiner do what its equation says, sentence by sentence? What do α and the learning rate
    trade, and what does ε do?

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        counts, fast = (
            ({"defaults": 3}, {"iterations": 5}) if self.quick else ({"defaults": 200}, {})
        )
        row_count = 2 if self.quick else 20
        return {
            (row,): {"strength": strength | fast, "sentences": counts.get(row, row_count)}
            for row, strength in ({"defaults": {}} | CURVE | PROJECTION).items()
        }

    def measure(self, cell: dict) -> dict:
        """Means with 95 % intervals; medians where values spread over decades."""
        rows = self.data.select(range(cell["sentences"]))
        samples = batches_of_one(self.tokenizer, rows, truncation=True, max_length=64)
        defense, generator = self.refiner(self.model, cell["strength"]), Stream.from_seeds(0)
        scores = [self.refined(defense, sample, generator) for sample in logging.tqdm(samples)]
        both = statistics.mean(float(score["fell"] and score["rose"]) for score in scores)
        metrics: dict = {"sentences": len(samples), "fell and rose": round(both, 4)}
        for name in scores[0]:
            values = [float(score[name]) for score in scores]
            half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
            metrics[name] = {"mean": round(statistics.mean(values), 4), "±": round(half, 4)}
            if name.startswith("metric"):
                metrics[name]["median"] = round(statistics.median(values), 6)
        return metrics

    def refined(self, defense, sample: dict, generator: Stream) -> dict[str, float]:
        gmap = GradientMap(self.model, sample)
        robust = defense.refine(gmap, generator)
        sent = brought_near(gmap.gradient(), robust.gradient, defense.bound(gmap.gradient()))
        true, shared = flat(gmap.gradient()), flat(sent)
        special = torch.tensor(defense.network.config.special_token_ids)
        words = ~torch.isin(sample["input_ids"][0], special)
        matrix = normalize(self.model.get_input_embeddings().weight.detach(), dim=1)
        nearest = (normalize(robust.input[0, words], dim=1) @ matrix.T).argmax(1)
        utility, noise = robust.utility_metric, robust.noise_ratio
        return {
            "fell": utility[-1] < utility[0], "rose": noise[-1] > noise[0],
            "metric_start": utility[0], "metric_end": utility[-1],
            "ratio_start": noise[0], "ratio_end": noise[-1],
            "cosine": float(cosine_similarity(true, shared, dim=0)),
            "distance": float((true - shared).norm()), "norm": float(true.norm()),
            "same_tokens": float((nearest == sample["input_ids"][0, words]).float().mean()),
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        def shown(row: str, name: str, digits: int, unit: float = 1) -> str:
            value = metrics[row][name]
            return f"{unit * value['mean']:.{digits}f} ± {unit * value['±']:.{digits}f}"

        count = metrics["defaults"]["sentences"]
        default_labels = {"alpha": 0.6, "learning_rate": f"0.01 (defaults, {count} sentences)"}
        rows: list = [
            (
                *settings.values(), shown(row, "cosine", 3),
                f"{shown(row, 'same_tokens', 0, 100)} %",
                f"{metrics[row]['metric_end']['mean']:.4f}",
                f"{100 * metrics[row]['fell']['mean']:.0f} %",
            )
            for row, settings in (CURVE | {"defaults": default_labels}).items()
        ]  # fmt: skip
        header = ["α", "learning rate", "cosine", "words still nearest", "UM at the end", "UM fell"]
        write_table(self.output, header, rows)
        rows = [(row, shown(row, "cosine", 4), shown(row, "distance", 3)) for row in PROJECTION]
        header = ["", "cosine", "distance to the true gradient"]
        write_table(named(self.output, "_projection"), header, rows)


class InTraining(RefinerStudy):
    """Does Refiner's gradient still point the right way once a model has begun to learn, and what
    does refining add?

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        steps, batches, fast = (2, 2, {"iterations": 2}) if self.quick else (80, 4, {})
        rows = {"loss": {}} | {row: {"strength": fast | s} for row, s in IN_TRAINING.items()}
        return {
            (when, row): {"steps": taken, "of": steps, "batches": batches, **strength}
            for when, taken in (("before", 0), ("after", steps))
            for row, strength in rows.items()
        }

    def load(self) -> None:
        self.maps = functools.cache(self._maps)

    def measure(self, cell: dict) -> float | dict:
        maps = self.maps(cell["steps"], cell["of"], cell["batches"])
        if "strength" not in cell:
            return statistics.mean(float(gmap.loss) for gmap in maps)
        refiner, true = self.refiner(maps[0].model, cell["strength"]), []
        true = [flat(gmap.gradient()) for gmap in maps]
        robust = [refiner.refine(gmap, Stream.from_seeds(i)) for i, gmap in enumerate(maps)]
        shared = [flat(refined.gradient) for refined in robust]
        cosines = [float(cosine_similarity(a, b, dim=0)) for a, b in zip(true, shared, strict=True)]
        utility = statistics.mean(refined.utility_metric[-1] for refined in robust)
        noise = statistics.mean(refined.noise_ratio[-1] for refined in robust)
        return {
            "each": round(statistics.mean(cosines), 3), "least": round(min(cosines), 3),
            "together": round(float(cosine_similarity(sum(true), sum(shared), dim=0)), 3),
            "relative UM": round(utility, 4), "noise ratio": round(noise, 3),
        }  # fmt: skip

    def _maps(self, steps: int, total: int, batches: int) -> list[GradientMap]:
        """Batches at the weights after `steps` of undefended training; they follow those of `total`
        steps.
        """
        set_seed(0)
        tokenizer = load_tokenizer(self.args.model)
        model = load_classifier(self.args.model, num_labels=2).train()
        data = sst2(self.args.data_dir, "train").shuffle(seed=0)

        def batch(start: int, size: int) -> dict[str, torch.Tensor]:
            rows = data.select(range(start, min(start + size, len(data))))
            return batch_of(tokenizer, rows, truncation=True, max_length=64)

        embeddings = model.get_input_embeddings().requires_grad_(False)  # withheld, so not trained
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5)
        for step in logging.tqdm(range(steps), desc="training"):
            learn(model, optimizer, batch(32 * step, 32))
        embeddings.requires_grad_(True)
        return [GradientMap(model, batch(32 * total + 16 * i, 16)) for i in range(batches)]

    def report(self, metrics: dict) -> None:
        rows = []
        for row in IN_TRAINING:
            cells_before, cells_after = metrics["before"][row], metrics["after"][row]
            cosines = [
                cell[key] for cell in (cells_before, cells_after) for key in ("each", "together")
            ]
            noise = f"{cells_after['noise ratio']:.2f}"
            rows.append([row, *(f"{cosine:.3f}" for cosine in cosines), noise])
        header = ["", "before: each", "together", "after: each", "together", "D after"]
        write_table(self.output, header, rows)


# Strengths; accuracies are those of `sst2`'s rows of that name
TEXT: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "paper: pruning": ("pruning", {"ratio": 0.2}),
    "paper: gaussian_noise": ("gaussian_noise", {"scale": 0.001}),
    "paper: refiner": ("refiner", {"epsilon": 0.05}),  # not trained: two hours of two cores
    "gaussian_noise-1": ("gaussian_noise", {"relative_scale": 1.0}),
    "refiner": ("refiner", {}),
}
ATTACKS: dict[str, dict] = {
    "tag": {"steps": 500},
    "inverting_gradients": {"steps": 25, **LBFGS},
}
PAPER_TEXT = {  # accuracy and F1 in %, against TAG and against Inverting Gradients
    "paper: pruning": "90.7, 32.28; 90.8, 50.09",
    "paper: gaussian_noise": "90.6, 30.44; 90.5, 49.36",
    "paper: refiner": "90.9, 24.55; 91.1, 35.64",
}
LENGTH, SAMPLES, QUICK_SAMPLES = 14, 10, 2  # tokens, and sentences that are attacked
PAPER = "paper: accuracy, F1 (TAG); accuracy, F1 (IG)"


class Texts(RefinerStudy):
    """What TAG and Inverting Gradients recover of sentences behind pruning, Gaussian noise and
    Refiner: Refiner paper (2025), Table 13.

    Conditions and figures: docs/findings/refiner.md.
    """

    ARGUMENTS = RefinerStudy.ARGUMENTS | {
        "--accuracies": {"type": Path, "default": PUBLISHED / "sst2", "help": "OUTPUT of sst2"}
    }

    def cells(self) -> dict:
        samples, fast = (QUICK_SAMPLES, {"steps": 1}) if self.quick else (SAMPLES, {})
        return {
            (row, attack): {
                "defense": defense, "strength": strength, "attack": attack,
                "settings": settings | fast, "samples": samples, "seed": 0,
            }
            for row, (defense, strength) in TEXT.items()
            for attack, settings in ATTACKS.items()
        }  # fmt: skip

    def load(self) -> None:
        super().load()
        self.batches = of_length(batches_of_one(self.tokenizer, self.data), LENGTH, SAMPLES)

    def measure(self, cell: dict) -> dict:
        batches, observations = self.batches[: cell["samples"]], []
        defense = published(cell["defense"], self.args.evaluation_network, **cell["strength"])
        defense.prepare(self.model, self.tokenizer)
        for number, batch in enumerate(batches):
            shared = defense(GradientMap(self.model, batch), Stream.from_seeds(number))
            observations.append(observe(self.model, batch, shared, tokenizer=self.tokenizer))
        attack = attack_of(cell["attack"], **cell["settings"])
        results = attack.reconstruct_many(observations, torch.Generator().manual_seed(cell["seed"]))
        texts = [batch["input_ids"].tolist() for batch in batches]
        token_ids = [result.token_ids for result in results]
        scores = score_texts(token_ids, texts, tokenizer=self.tokenizer)
        return summary(scores, ("token_f1", "position_accuracy"))

    def report(self, metrics: dict) -> None:
        runs, rows = nested(accuracy_cells("accuracy"), Results(self.args.accuracies)), []
        for row, cells in metrics.items():
            accuracy = f"{runs[row]['accuracy']:.3f}" if row in runs else ""
            shown = [bracketed(cells[attack]["token_f1"], ".2f") for attack in ATTACKS]
            rows.append([row, accuracy, *shown, PAPER_TEXT.get(row, "")])
        header = ["", "accuracy", *(f"token F1, {attack}" for attack in ATTACKS)]
        write_table(self.output, [*header, PAPER], rows)


# The model that is attacked, and that trainings go on from
FINE_TUNED: dict[str, Any] = {
    "defense": "none", "strength": {}, "seed": 0, "learning_rate": 1e-4, "steps": 1000, "batch": 32,
}  # fmt: skip


class FineTuned(Study):
    """What pruning, Gaussian noise and Refiner hide of a model that is fine-tuned already, and what
    they cost it: Refiner paper (2025), Table 13, at its operating point.

    Conditions and figures: docs/findings/refiner.md.
    """

    ARGUMENTS = TEXT_FLAGS | FOLDER | Study.ALL | {"--evaluation_network": NETWORK}
    ROWS = [row for row in TEXT if row == "none" or row.startswith("paper: ")]
    SIZE, START, REFINER = "gradient", "as it starts", "paper: refiner"
    ATTACKS: dict[str, dict] = {
        "span": {}, "tag": ATTACKS["tag"],
        "inverting_gradients_published": ATTACKS["inverting_gradients"],
    }  # fmt: skip

    @property
    def first_training(self) -> dict:
        """The training that others go on from."""
        return FINE_TUNED | (QUICK if self.quick else {})

    def cells(self) -> dict:
        """The fine-tuned model first, then what is recovered of it, then trainings that go on from
        it.
        """
        first_training, quick = self.first_training, QUICK if self.quick else {}
        sizes = {"learning_rate": 5e-5, "steps": 100, "batch": BATCH} | quick
        samples, fast = (QUICK_SAMPLES, {"steps": 1}) if self.quick else (SAMPLES, {})
        cells: dict = {
            (self.START, ACCURACY, "0"): first_training,
            (self.START, self.SIZE, "0"): first_training | {self.SIZE: samples},
        }
        rows = {
            row: {"defense": name, "strength": as_published(name, how), "start": first_training}
            for row, (name, how) in TEXT.items()
            if row in self.ROWS
        }
        for attack, settings in self.ATTACKS.items():
            settings = settings | (fast if settings else {})
            attack_settings = {"seed": 0} | attack_cell((attack, 1), samples, settings, "start")
            cells |= {(row, attack, "0"): cell | attack_settings for row, cell in rows.items()}
        for seed in range(1 if self.quick else 3):
            training_settings = {"seed": seed} | sizes
            cells |= {
                (row, ACCURACY, str(seed)): cell | training_settings for row, cell in rows.items()
            }
        return self.published(cells)

    def load(self) -> None:
        args = self.args
        self.half = FirstHalf(args.model, args.data_dir, Path(args.models, "fine_tuned"))
        self.task = SecondHalf(self.half, self.first_training, args.evaluation_network)
        ids = self.task.tokenizer
        data = sst2(args.data_dir)
        self.texts = [row for row in data if len(ids(row["sentence"])["input_ids"]) == LENGTH]

    def measure(self, cell: dict) -> dict:
        task = self.task
        if self.SIZE in cell:
            model = task.start(cell["seed"]).eval()
            batches = batches_of_one(task.tokenizer, self.texts[: cell[self.SIZE]])
            gradients = [flat(GradientMap(model, batch).gradient()) for batch in batches]
            norms = [round(float(g.norm()), 5) for g in gradients]
            return {"norm": norms, "entries": len(gradients[0])}
        if "attack" in cell:
            model = task.start(cell["seed"]).eval()
            defense = make_defense(cell["defense"], **with_own_strength(task.strength(cell)))
            defense.prepare(model, task.tokenizer)
            return attack_texts(cell, Stage(model, defense), task.tokenizer, self.texts)
        return (task if "start" in cell else self.half).learned(cell)

    def report(self, metrics: dict) -> None:
        plain, rows = metrics["none"].get(ACCURACY, {}), []
        for row, cells in metrics.items():
            runs = cells.get(ACCURACY, {})
            shown = [row, accuracy_text(runs), lost(runs, plain) if row != self.START else ""]
            for attack in self.ATTACKS:
                shown.append(score_text(cells.get(attack, {})))
                pair = [metrics.get(r, {}).get(attack, {}).get("0") for r in (row, self.REFINER)]
                if all(pair) and row != self.REFINER:
                    differences = np.subtract(*(cell[F1] for cell in pair)).tolist()
                    shown.append(student(differences).text(2))
                else:
                    shown.append("")
            rows.append([*shown, PAPER_TEXT.get(row, "")])
        header = ["", "accuracy", "less than none"]
        for attack in self.ATTACKS:
            header += [attack, "more than behind Refiner"]
        write_table(self.output, [*header, PAPER], rows)


class FirstHalf(TextTask):
    """Learns one half of the phrases."""

    def rows_to_learn(self) -> Dataset:
        rows = super().rows_to_learn()
        return rows.select(range(len(rows) // 2))


class SecondHalf(TextTask):
    """Starts from what learned one half, and learns the other."""

    def __init__(self, half: FirstHalf, first_training: dict, network: str) -> None:
        super().__init__(half.name, half.data_dir, half.folder)
        self._half, self._first_training, self._network = half, first_training, network

    def start(self, seed: int) -> torch.nn.Module:
        model = self._half.stage(self._first_training, "end").model
        torch.manual_seed(seed)
        return model

    def rows_to_learn(self) -> Dataset:
        rows = super().rows_to_learn()
        return rows.select(range(len(rows) // 2, len(rows)))

    def strength(self, cell: dict) -> dict:
        """With the evaluation network."""
        network = {"evaluation_network": self._network} if cell["defense"] == "refiner" else {}
        return cell["strength"] | network

    def trainer(self, model: torch.nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        return super().trainer(model, rows, cell | {"strength": self.strength(cell)})
