"""Where noise goes and what pruning keeps: what a shape costs, and what it gives away."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, set_seed
from transformers import ViTForImageClassification as ViT
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib import text as texts
from .lib.defenses import with_own_strength
from .lib.images import array_images, flat
from .lib.intervals import share
from .lib.tables import settings_text, write_table
from .lib.training import learn

LEARNING_STEPS = 10  # between messages that averages take in
REFRESHED = {"refresh_every": 1}
SHAPES = {
    "uniform": ["gaussian_noise", {}],
    "public": ["optimal_noise", {"shape": "public", **REFRESHED}],
    "public, by tensor": [
        "optimal_noise",
        {"shape": "public", "granularity": "layer", **REFRESHED},
    ],
    "past": ["optimal_noise", {"shape": "past", **REFRESHED}],
    "past, by tensor": ["optimal_noise", {"shape": "past", "granularity": "layer", **REFRESHED}],
    "own, 1 probe": ["optimal_noise", {"shape": "own", "num_probes": 1}],
    "own, 10 probes": ["optimal_noise", {"shape": "own", "num_probes": 10}],
}
BEST = "averages of the evaluated batches"
TASKS = {
    "minilm": {"learning_rate": 5e-5, "steps": (0, 20, 100), "sizes": (16, 1)},
    "vit": {"learning_rate": 1e-3, "steps": (0, 100), "sizes": (16,)},
    "resnet": {"learning_rate": 1e-3, "steps": (0, 100), "sizes": (16,)},
}
BATCHES, BATCH = 3, 16  # batches that are evaluated; samples that training takes


class ShapeStudy(Study):
    """Noise while an encoder, or an image network, is trained."""

    ARGUMENTS: dict[str, Any] = texts.TEXT_FLAGS

    def load(self) -> None:
        torch.set_num_threads(1)

    def task(self, cell: dict) -> tuple[Any, Callable[[int], dict]]:
        """A model, and a function from a number of samples to the next batch."""
        set_seed(cell["seed"])
        order = np.random.default_rng(cell["seed"])
        if cell["task"] == "minilm":
            tokenizer = texts.load_tokenizer(self.args.model)
            model = texts.load_classifier(self.args.model)
            rows = texts.sst2(self.args.data_dir, "train")

            def draw(count: int) -> dict:
                batch = rows.select(order.integers(len(rows), size=count))
                return texts.batch_of(tokenizer, batch, truncation=True, max_length=64)

            return model, draw
        pixels, labels = array_images(self.args.cifar10)
        images = pixels.float() / 127.5 - 1

        def draw_images(count: int) -> dict:
            indices = order.integers(len(images), size=count)
            return {"pixel_values": images[indices], "labels": labels[indices]}

        if cell["task"] == "vit":
            sizes = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3}
            sizes |= {"image_size": 32, "patch_size": 4, "num_hidden_layers": 6}
            return ViT(ViTConfig(**sizes, num_labels=10)), draw_images
        widths = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256]}
        config = ResNetConfig(**widths, depths=[1, 1, 1, 1], layer_type="basic", num_labels=10)
        return ResNetForImageClassification(config), draw_images


def freeze_statistics(model) -> None:
    """Batch statistics stay as they were trained."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            module.eval()


def over_optimum(s: Tensor, g: Tensor, variance: Tensor) -> tuple[float, float]:
    """Tr J_F, and Tr J_F·|U₂| over its least value, of s² and g² of a batch."""
    information = float(torch.where(s > 0, s / variance, 0.0).sum())
    least = float((s * g).sqrt().sum()) ** 2
    return information, information * float((g * variance).sum()) / least


def median_text(ratios: list[float]) -> str:
    median, low, high = map(ratio_text, (np.median(ratios), min(ratios), max(ratios)))
    return f"{median} [{low}, {high}]"


def ratio_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else "over 100"


class Quality(ShapeStudy):
    """What does noise cost whose shape does not depend on the batch?

    Tr J_F·|U₂| does not depend on the noise's strength; its least value, (Σ s|g|)², needs s and |g|
    of the very batch. The last row has the averages of the evaluated batches themselves, entry by
    entry. Conditions and figures: docs/findings/shapes.md.
    """

    ARGUMENTS = ShapeStudy.ARGUMENTS | {"--cifar10": "npz with x, y in uint8"}
    PROBES = {16: 12, 1: 48}

    def cells(self) -> dict:
        quick = {"batches": 1, "probes": 1, "size": 2, "batch": 2} if self.quick else {}
        return {
            (task, str(step), str(batch), "0"): {
                "task": task, "learning_rate": settings["learning_rate"],
                "step": min(step, 1) if self.quick else step, "size": batch, "seed": 0,
                "batches": BATCHES, "probes": self.PROBES[batch], "shapes": SHAPES,
            }
            | quick
            for task, settings in TASKS.items()
            for step in (settings["steps"][:1] if self.quick else settings["steps"])
            for batch in settings["sizes"]
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        """By shape, Tr J_F·|U₂| over its least value and dFIL over uniform noise's, per batch."""
        model, draw = self.task(cell)
        defenses = {
            row: make_defense(name, relative_scale=1.0, strength="own", **settings)
            for row, (name, settings) in cell["shapes"].items()
        }
        optimizer, size = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"]), BATCH
        model.train()
        for step in range(cell["step"]):
            batch = draw(cell.get("batch", size))
            if step % LEARNING_STEPS == 0:
                feed_averages(defenses, model, batch)
            learn(model, optimizer, batch)
        feed_averages(defenses, model, draw(cell.get("batch", size)))
        freeze_statistics(model)
        batches = [draw(cell["size"]) for _ in range(cell["batches"])]
        maps = [GradientMap(model, batch, second_order=False) for batch in batches]
        squares = [
            flat(gmap.squared_sensitivity(cell["probes"], Stream.from_seeds(1))).double()
            for gmap in maps
        ]
        powers = [flat(gmap.gradient()).double().square() for gmap in maps]
        best = (sum(squares) / sum(powers).clamp(min=1e-30)).sqrt().clamp(max=1e12)
        scores: dict = {row: {"ratios": [], "dfils": []} for row in (*defenses, BEST)}
        for gmap, s, g in zip(maps, squares, powers, strict=True):
            variances = {BEST: best}
            for row, defense in defenses.items():
                state = defense.state_dict()
                variances[row] = flat(defense(gmap).noise.added).double()
                if state:
                    defense.load_state_dict(state)
            for row, variance in variances.items():
                information, ratio = over_optimum(s, g, variance)
                scores[row]["ratios"].append(ratio)
                dfil = information * float(variance.mean()) / float(s.sum())
                scores[row]["dfils"].append(dfil)
        return scores

    def report(self, metrics: dict) -> None:
        rows = []
        for task, steps in metrics.items():
            for step, sizes in steps.items():
                for size, seeds in sizes.items():
                    for row in (*SHAPES, BEST):
                        ratios, dfils = (
                            [value for cell in seeds.values() for value in cell[row][name]]
                            for name in ("ratios", "dfils")
                        )
                        shown = [median_text(ratios), ratio_text(max(dfils))]
                        rows.append([task, step, size, row, *shown])
        header = ["", "step", "samples", "noise", "over the optimum", "worst dFIL over uniform's"]
        write_table(self.output, header, rows)


def feed_averages(defenses: dict, model, batch: dict) -> None:
    """A message of each defense that keeps averages."""
    gmap = GradientMap(model, batch, second_order=False)
    for row, defense in defenses.items():
        if row.startswith(("public", "past")):
            defense(gmap)


AVERAGES = {  # shape, and messages between those that are learned from
    f"{shape}, every {period}th message": [shape, period]
    for shape in ("public", "past")
    for period in (10, 20)
}
ESTIMATES = {  # probes, and whether they are squared sample by sample
    "own, split, 1 probe": [1, True],
    "own, split, 2 probes": [2, True],
    "own, split, 3 probes": [3, True],
    "own, whole, 10 probes": [10, False],
}


class Estimates(ShapeStudy):
    """How near do estimates of s² come to the optimum, and how old may averages grow?

    Conditions and figures: docs/findings/shapes.md.
    """

    PROBES = {16: 24, 1: 96}

    def cells(self) -> dict:
        quick = {"batches": 1, "probes": 2, "size": 2, "batch": 2, "step": 1} if self.quick else {}
        return {
            (str(step), str(size), "0"): {
                "task": "minilm", "learning_rate": TASKS["minilm"]["learning_rate"], "step": step,
                "size": size, "seed": 0, "batches": BATCHES, "probes": self.PROBES[size],
                "batch": BATCH, "averages": AVERAGES, "estimates": ESTIMATES,
            }
            | quick
            for step in ((0,) if self.quick else (0, 20, 40, 100))
            for size in self.PROBES
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        """Tr J_F·|U₂| over its least value, of every row and batch."""
        model, draw = self.task(cell)
        defenses = {
            row: make_defense(
                "optimal_noise", relative_scale=1.0, strength="own", shape=shape, refresh_every=1
            )
            for row, (shape, _) in cell["averages"].items()
        }

        def feed(batch: dict, step: int) -> None:
            """A message of each client whose turn it is."""
            gmap = GradientMap(model, batch, second_order=False)
            for row, defense in defenses.items():
                if step % cell["averages"][row][1] == 0:
                    defense(gmap)

        optimizer = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"])
        model.train()
        for step in logging.tqdm(range(cell["step"]), desc=f"to step {cell['step']}"):
            batch = draw(cell["batch"])
            feed(batch, step)
            learn(model, optimizer, batch)
        if not cell["step"]:
            feed(draw(cell["batch"]), 0)
        freeze_statistics(model)
        scores: dict = {row: [] for row in ("uniform", *defenses, *cell["estimates"])}
        for number in range(cell["batches"]):
            gmap = GradientMap(model, draw(cell["size"]), second_order=False)
            squares = gmap.squared_sensitivity(cell["probes"], Stream.from_seeds(1, number))
            s, g = flat(squares).double(), flat(gmap.gradient()).double().square()
            variances = {"uniform": torch.ones_like(s)}
            for row, defense in defenses.items():
                state = defense.state_dict()
                state["calls"] = torch.tensor(1)  # so that it does not learn
                defense.load_state_dict(state)
                defense.refresh_every = 10**9
                variances[row] = flat(defense(gmap).noise.added).double()
                defense.refresh_every = 1
            for row, (probes, split) in cell["estimates"].items():
                stream = Stream.from_seeds(2, number)
                estimate = flat(gmap.squared_sensitivity(probes, stream, split=split)).double()
                variances[row] = estimate.sqrt().clamp(min=1e-30) / g.sqrt().clamp(min=1e-12)
            for row, variance in variances.items():
                scores[row].append(round(over_optimum(s, g, variance)[1], 4))
        return scores

    def report(self, metrics: dict) -> None:
        rows = []
        for step, sizes in metrics.items():
            for size, seeds in sizes.items():
                for row in next(iter(seeds.values())):
                    ratios = [ratio for cell in seeds.values() for ratio in cell[row]]
                    rows.append([step, size, row, median_text(ratios)])
        write_table(self.output, ["step", "phrases", "noise", "over the optimum"], rows)


MESSAGES = {
    "optimal_noise, own": ["optimal_noise", {"shape": "own", "num_probes": 1}],
    "optimal_noise, past": ["optimal_noise", {"shape": "past", "refresh_every": 1}],
    "optimal_noise, public": ["optimal_noise", {"shape": "public", "refresh_every": 1}],
    "gaussian_noise": ["gaussian_noise", {}],
    "optimal_pruning, own": ["optimal_pruning", {"shape": "own", "num_probes": 1}],
    "optimal_pruning, public": ["optimal_pruning", {"shape": "public", "refresh_every": 1}],
    "pruning": ["pruning", {}],
}
STRENGTHS = {"noise": [{"relative_scale": s} for s in (1, 10, 100)], "pruning": [{"ratio": 0.9}]}
TARGETS = ("this message", "the message before")
CANDIDATES, TRIALS, HISTORY, SENTENCES = 28, 20, 4, 4000


class Naming(ShapeStudy):
    """Does the shape of noise, or what pruning kept, name the text?

    An attacker has 28 sentences of equal length and label, one of which was the client's. It looks
    at shapes alone: the candidate is named whose shape has the largest correlation with log y² over
    all coordinates (pruning: with what was kept). Conditions and figures: docs/findings/shapes.md.
    """

    def cells(self) -> dict:
        quick = {"candidates": 3, "trials": 1, "history": 1} if self.quick else {}
        return {
            (row, target): {
                "defense": defense,
                "strengths": STRENGTHS["pruning" if "pruning" in row else "noise"],
                "target": target, "candidates": CANDIDATES, "trials": TRIALS, "history": HISTORY,
            }
            | quick
            for row, defense in MESSAGES.items()
            for target in (TARGETS if "past" in row else TARGETS[:1])
        }  # fmt: skip

    def load(self) -> None:
        super().load()
        tokenizer = texts.load_tokenizer(self.args.model)
        torch.manual_seed(0)
        self.model = texts.load_classifier(self.args.model, num_hidden_layers=2)
        rows = texts.of_usual_length(texts.sst2(self.args.data_dir, "train").take(SENTENCES))
        batches = texts.batches_of_one(tokenizer, rows)
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        common = max(set(lengths), key=lengths.count)
        pairs = zip(batches, lengths, strict=True)
        self.texts = [text for text, n in pairs if n == common and text["labels"] == 1]

    def measure(self, cell: dict) -> dict[str, list[bool]]:
        """Whether each trial named the right one, by strength."""
        is_named: dict[str, list[bool]] = {settings_text(s): [] for s in cell["strengths"]}
        for trial in logging.tqdm(range(cell["trials"]), desc=" ".join(map(str, cell["defense"]))):
            order = np.random.default_rng(trial).permutation(len(self.texts))
            count = cell["candidates"]
            maps = [
                GradientMap(self.model, self.texts[i]) for i in order[: count + cell["history"] + 1]
            ]
            member = trial % count  # equal scores must not favor the client's
            candidates, next_map, earlier = maps[:count], maps[count], maps[count + 1 :]
            for strength, right in self.trial(cell, candidates, member, earlier, next_map):
                is_named[strength].append(right)
        return is_named

    def trial(
        self, cell: dict, maps: list, member: int, earlier: list, next_map: GradientMap
    ) -> Iterator[tuple[str, bool]]:
        """Whether the candidate that is the client's is named, by strength."""
        (name, settings), strengths = cell["defense"], cell["strengths"]
        client = make_defense(name, **settings, **with_own_strength(strengths[0]))
        for gmap in earlier:
            client(gmap)
        state = client.state_dict()

        def message(gmap, strength: dict):
            defense = make_defense(name, **settings, **with_own_strength(strength))
            defense.load_state_dict(dict(state))
            sent = defense(gmap)
            return sent if cell["target"] == TARGETS[0] else defense(next_map)

        # Strengths scale a shape, and do not change it.
        shapes = [expected_shape(message(gmap, strengths[0]), gmap, name) for gmap in maps]
        for strength in strengths:
            shape = visible_shape(message(maps[member], strength), "pruning" in name)
            scores = [correlation(shape, candidate) for candidate in shapes]
            yield settings_text(strength), int(np.argmax(scores)) == member

    def report(self, metrics: dict) -> None:
        rows = []
        for row, targets in metrics.items():
            for target, strengths in targets.items():
                for strength, right in strengths.items():
                    _, low, high = share(sum(right), len(right))
                    named = f"{sum(right)} of {len(right)} [{low:.2f}, {high:.2f}]"
                    rows.append([row, strength, target, named])
        write_table(self.output, ["defense, shape", "strength", "the sentence of", "named"], rows)


def visible_shape(message, is_pruned: bool) -> Tensor:
    """log y², or what was kept."""
    y = flat(message)
    return (y != 0).float() if is_pruned else y.square().clamp(min=1e-30).log()


def expected_shape(message, gmap, defense: str) -> Tensor:
    """What a candidate would have given."""
    if "pruning" in defense:
        return visible_shape(message, is_pruned=True)
    if defense == "gaussian_noise":  # were there a shape, then this one
        settings = {"shape": "own", "num_probes": 1, "relative_scale": 1, "strength": "own"}
        message = make_defense("optimal_noise", **settings)(gmap)
    return flat(message.noise.added).clamp(min=1e-30).log()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1].nan_to_num(nan=-1.0))
