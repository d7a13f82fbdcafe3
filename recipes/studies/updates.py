"""Clients that train for several steps before they send: what their updates give away."""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images

from ..study import Study
from .lib.attacks import attack_of
from .lib.images import INVERTING, lenet_for, single_images
from .lib.tables import bracketed, interval, summary, write_table
from .lib.text import TEXT_FLAGS, batch_of, load_classifier, load_tokenizer, of_usual_length, sst2
from .lib.training import learn
from .privacy_and_utility import score, total_and_share

# `size`: samples per step; `epochs` over the client's samples
SGD = {"optimizer": "sgd", "rate": 0.01, "shuffle": False}
ADAMW = {"optimizer": "adamw", "rate": 5e-5, "shuffle": False}
WORDS = {
    "one gradient of four": SGD | {"size": 4, "epochs": 1},
    "1 epoch, one text a step": SGD | {"size": 1, "epochs": 1},
    "1 epoch, ten times the rate": SGD | {"size": 1, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2},
    "4 epochs": SGD | {"size": 1, "epochs": 4},
}
IMAGES = {
    "one gradient of two": SGD | {"size": 2, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2, "rate": 0.1},
    "2 epochs, ten times the rate": SGD | {"size": 1, "epochs": 2, "rate": 1.0},
    "2 epochs, order shuffled": SGD | {"size": 1, "epochs": 2, "rate": 0.1, "shuffle": True},
    "2 epochs of AdamW": ADAMW | {"size": 1, "epochs": 2, "rate": 1e-3},
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
Weights = tuple[dict[str, Tensor], dict[str, Tensor], int]  # before, after, and number of steps


def train(model: nn.Module, batch: Mapping[str, Tensor], cell: dict, seed: int) -> Weights:
    """As people do, by an optimizer of torch, for some epochs; the model is left as it was. Token
    embeddings are not trained.
    """
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = [p for name, p in model.named_parameters() if "word_embeddings" not in name]
    optimizer = OPTIMIZERS[cell["optimizer"]](parameters, lr=cell["rate"])
    order, draws, steps = list(range(len(batch["labels"]))), random.Random(seed), 0
    for _ in range(cell["epochs"]):
        if cell["shuffle"]:
            draws.shuffle(order)
        for start in range(0, len(order), cell["size"]):
            rows = order[start : start + cell["size"]]
            learn(model, optimizer, {key: value[rows] for key, value in batch.items()})
            steps += 1
    weights_after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(weights_before, strict=False)
    return weights_before, weights_after, steps


def observed(
    model: nn.Module, weights: Weights, cell: dict, batch_size: int | None, **grants: Any
) -> Observation:
    weights_before, weights_after, steps = weights
    return Observation.from_update(
        model, weights_before, weights_after, learning_rate=cell["rate"], steps=steps,
        batch_size=batch_size, optimizer=cell["optimizer"], **grants,
    )  # fmt: skip


class Words(Study):
    """What the span attack recovers from the change of MiniLM's weights after several local steps.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = TEXT_FLAGS
    TEXTS = 4

    def cells(self) -> dict:
        names = ["one gradient of four", "4 epochs"] if self.quick else WORDS
        return {(name,): WORDS[name] | {"clients": 1 if self.quick else 5} for name in names}

    def load(self) -> None:
        torch.set_num_threads(1)
        set_seed(0)
        self.tokenizer = load_tokenizer(self.args.model)
        self.model = load_classifier(self.args.model, num_labels=2)
        self.texts = of_usual_length(sst2(self.args.data_dir))

    def measure(self, cell: dict) -> dict:
        scores, seconds = [], 0.0
        for client in range(cell["clients"]):
            texts = self.texts[client * self.TEXTS : (client + 1) * self.TEXTS]
            batch = batch_of(self.tokenizer, texts)
            batch.pop("token_type_ids", None)
            weights = train(self.model, batch, cell, client)
            observation = observed(
                self.model, weights, cell, cell["size"], tokenizer=self.tokenizer,
                input_shape=tuple(batch["input_ids"].shape),
                attention_mask=batch["attention_mask"],
            )  # fmt: skip
            start = time.perf_counter()
            token_ids = make_attack("span")(observation).token_ids
            seconds = max(seconds, time.perf_counter() - start)
            scores.append(score(token_ids, batch))
        total, share = total_and_share(scores)
        return total | {"share": [round(value, 3) for value in share], "seconds": round(seconds, 1)}

    def report(self, metrics: dict) -> None:
        header = ["four sentences", "tokens found", "share", "together", "seconds, the slowest"]
        rows = [
            [name, f"{cell['hits']} of {cell['distinct']}", bracketed(cell["share"], ".3f"),
             f"{cell['together']} of {cell['tokens']}", f"{cell['seconds']:.1f}"]
            for name, cell in metrics.items()
        ]  # fmt: skip
        write_table(self.output, header, rows)


class Images(Study):
    """What gradient matching recovers from the change of a network's weights after several local
    steps, with and without going through them.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
    PAIRS = 3
    MATCHED = {
        "through the steps": "steps",
        "every step on all images": "order unknown",
        "as one gradient": "one gradient",
    }

    def cells(self) -> dict:
        size = {"pairs": 1, "steps": 1} if self.quick else {"pairs": self.PAIRS, "steps": 40}
        return {
            (name, column): row | {"matched": matched} | size
            for name, row in IMAGES.items()
            if name in ("one gradient of two", "2 epochs of AdamW") or not self.quick
            for column, matched in self.MATCHED.items()
        }

    def load(self) -> None:
        torch.set_num_threads(1)
        self.images = single_images(self.args.cifar10, 2 * self.PAIRS)

    def measure(self, cell: dict) -> dict:
        guesses: list[Tensor] = []
        truth: list[Tensor] = []
        for pair in range(cell["pairs"]):
            set_seed(pair)
            two = self.images[2 * pair : 2 * pair + 2]
            batch = {key: torch.cat([image[key] for image in two]) for key in two[0]}
            pixels = batch["pixel_values"] = batch["pixel_values"].double()
            model = lenet_for(batch).double()
            weights = train(model, batch, cell, pair)
            observation = self.observation(cell, model, weights, batch)
            attack = attack_of("inverting_gradients", **INVERTING | {"steps": cell["steps"]})
            images = attack(observation, torch.Generator().manual_seed(pair)).input
            orders = images, images.flip(0)
            nearer = min(orders, key=lambda order: float((order - pixels).square().sum()))
            guesses += list(nearer[:, None])
            truth += list(pixels[:, None])
        return summary(score_images(guesses, truth), ["psnr"])

    def observation(self, cell: dict, model, weights: Weights, batch: dict) -> Observation:
        grants = {"input_shape": tuple(batch["pixel_values"].shape), "labels": batch["labels"]}
        size = cell["size"] if cell["matched"] == "steps" else None
        observation = observed(model, weights, cell, size, **grants)
        if cell["matched"] == "one gradient":
            return Observation(model=model, gradient=observation.gradient, **grants)
        return observation

    def report(self, metrics: dict) -> None:
        rows = [
            [name, *(bracketed(row[column]["psnr"], ".1f") for column in self.MATCHED)]
            for name, row in metrics.items()
        ]
        write_table(self.output, ["PSNR in dB", *self.MATCHED], rows)


TASKS = {
    "cifar10": {
        "task": "cifar10", "learning-rate": 2e-3, "optimizer": "adamw", "batch-size": 32,
        "local-steps": 4, "test-every": 5,
    },
    "sst2": {
        "task": "sst2", "learning-rate": 2e-4, "optimizer": "adamw", "batch-size": 4,
        "local-steps": 4, "test-every": 20,
    },
}  # fmt: skip


def _defense(name: str, **settings: Any) -> dict:
    keys = {f"gradguard.{name}.{key}": value for key, value in settings.items()}
    return {"gradguard.defense": name} | keys


TRAINED = {
    "cifar10": {
        "none": _defense("none"),
        "gaussian_noise, relative_scale=0.5": _defense("gaussian_noise", relative_scale=0.5),
        "gaussian_noise, relative_scale=2": _defense("gaussian_noise", relative_scale=2.0),
        "optimal_noise, relative_scale=2": _defense("optimal_noise", relative_scale=2.0),
        "pruning, ratio=0.95": _defense("pruning", ratio=0.95),
        "pruning, ratio=0.95, error feedback as published": _defense(
            "pruning", ratio=0.95, error_feedback=True, min_batches=1
        ),
        "optimal_pruning, ratio=0.95": _defense("optimal_pruning", ratio=0.95),
        "quantization, bits=4": _defense("quantization", bits=4),
    },
    "sst2": {
        "none": _defense("none"),
        "gaussian_noise, relative_scale=2": _defense("gaussian_noise", relative_scale=2.0),
        "pruning, ratio=0.95": _defense("pruning", ratio=0.95),
    },
}


class Rounds(Study):
    """Twenty rounds of a federation of four clients in Flower: accuracy and time behind each
    defense.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = TEXT_FLAGS | {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
    SEEDS = {"cifar10": 5, "sst2": 1}

    def cells(self) -> dict:
        return {
            (task, row, str(seed)): common
            | defense
            | {"seed": seed, "rounds": 1 if self.quick else 20}
            for task, common in TASKS.items()
            for row, defense in TRAINED[task].items()
            for seed in range(1 if self.quick else self.SEEDS[task])
        }

    def load(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "flower"))
        torch.set_num_threads(1)

    def measure(self, cell: dict) -> dict:
        from gradguard_flower.local import configuration, run

        data = {"cifar10": self.args.cifar10, "sst2": self.args.data_dir}[cell["task"]]
        settings = {key: value for key, value in cell.items() if key != "quick"}
        settings |= {  # as it was when figures were stored
            key.replace("relative_scale", "strength"): "own"
            for key in cell
            if key.endswith(".relative_scale")
        }
        settings |= {"data": str(data), "model": str(self.args.model)}
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "figures.json"
            grid = run(configuration(**settings, output=str(output)))
            rounds = json.loads(output.read_text())
        times = [context.state["times"]["all"] for context in grid.contexts.values()]
        seconds = statistics.mean(taken for client in times for taken in client)
        return {"accuracy": [r["accuracy"] for r in rounds], "seconds": round(seconds, 3)}

    def report(self, metrics: dict) -> None:
        rows = []
        for task, defenses in metrics.items():
            for row, runs in defenses.items():
                last_accuracy = interval([run["accuracy"][-1] for run in runs.values()])
                seconds = statistics.mean(run["seconds"] for run in runs.values())
                rows.append([task, row, last_accuracy, f"{seconds:.2f}"])
        header = ["", "defense", "accuracy after the last round"]
        write_table(self.output, [*header, "processor seconds a client's round"], rows)
