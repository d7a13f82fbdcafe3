"""Inversion influence beside more scores, on more models, and at several ε: Zhang et al. (2023),
Figures 1, 4, 9, 10, 13, 15, 17 and 19.
"""

import time
from typing import Any

import numpy as np
import pandas
import torch
from scipy.stats import kruskal
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.leakage import (
    inversion_influence_lower_bound,
    largest_eigenvalue,
    smallest_directions,
)
from hf_gradguard.metrics import score_images, score_text
from hf_gradguard.randomness import Stream
from recipes.small_networks import SmallImageClassifierConfig

from ..study import Study
from .frontier_images import Block, ResNet
from .influence import DATA, Directions, PredictsAttacks, rank_texts
from .lib.attacks import attack_of, observe
from .lib.images import (
    INVERTING,
    array_images,
    flat,
    lenet_for,
    predicted_classes,
    single_images,
)
from .lib.perceptual import EFFICIENTNET, Perceptual
from .lib.results import named
from .lib.tables import interval, significant, write_table
from .lib.text import SMALL, batches_of_one, load_tokenizer, of_usual_length, small_bert, sst2
from .lib.training import learn


class Scores(PredictsAttacks):
    """Does the lower bound follow other scores than the error, and on GPT-2? Figures 4, 9 and 17.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = PredictsAttacks.ARGUMENTS | EFFICIENTNET
    TEXT_SCORES = ("rouge1", "rougeL", "google_bleu", "features")
    SCORES = {
        "MNIST": ("ssim", "perceptual"), "CIFAR-10": ("ssim", "perceptual"),
        "SST-2, BERT": TEXT_SCORES, "SST-2, GPT-2": TEXT_SCORES,
    }  # fmt: skip
    TITLES = {
        "ssim": "SSIM", "perceptual": "perceptual distance", "rouge1": "ROUGE-1",
        "rougeL": "ROUGE-L", "google_bleu": "Google BLEU", "features": "MSE of features",
    }  # fmt: skip
    RATIOS = [0.7, 0.9]
    IMAGE_GROUPS = [{"gaussian_noise": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "pruning": RATIOS}]
    TEXT_GROUPS = [{"gaussian_noise": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "pruning": RATIOS}]

    @property
    def samples(self) -> int:
        return 2 if self.quick else 5

    def cells(self) -> dict:
        cells = super().cells()
        for cell in cells.values():
            cell["steps"] = min(cell["steps"], 25 if "side" in cell else 100)
        return cells

    def load(self) -> None:
        super().load()
        folder = self.args.efficientnet
        self.perceptual = None if folder is None else Perceptual(folder)

    def _task(self, data: str, side: int | None) -> tuple:
        if data in DATA:
            return super()._task(data, side)
        set_seed(0)
        tokenizer = load_tokenizer(self.args.tokenizer)
        batches = batches_of_one(tokenizer, of_usual_length(sst2(self.args.sst2)))
        model = small_bert(tokenizer) if data.endswith("BERT") else small_gpt2(tokenizer)
        return model, batches, tokenizer

    def scores_of(self, cell: dict, batch: dict, result: Any, true: Tensor, tokenizer: Any) -> dict:
        if tokenizer is None:
            guess = result.input.nan_to_num(0.5).clamp(0, 1)
            scores = {"ssim": score_images([guess], [true], bootstrap=0).mean["ssim"]}
            if self.perceptual is not None:
                scores["perceptual"] = float(self.perceptual(guess, true))
            return scores
        ids = torch.tensor(result.token_ids)
        found = score_text(
            [ids.tolist()], [batch["input_ids"].tolist()], tokenizer=tokenizer, bootstrap=0
        ).mean
        scores = {name: found[name] for name in self.TEXT_SCORES if name in found}
        model = self.task(cell["data"], None)[0]
        with torch.no_grad():
            pair = [
                model(input_ids=rows, output_hidden_states=True).hidden_states[-1].mean(1)
                for rows in (ids, batch["input_ids"])
            ]
        return scores | {"features": float((pair[0] - pair[1]).square().mean())}

    def report(self, metrics: dict) -> None:
        rows = []
        for data, scores in self.SCORES.items():
            samples = metrics[data].values()
            points = [point for groups in samples for group in groups.values() for point in group]
            frame = pandas.DataFrame(points)
            for score in scores:
                if score in frame:
                    title = f"{data}, {self.TITLES[score]}"
                    rows.append([title, *rank_texts(frame, score, len(samples))])
        header = ["", "I_lb", "under noise", "under pruning", "samples at one setting (mean)"]
        write_table(self.output, [*header, "I, ε = 1e-3 λ_max", "‖δ‖"], rows)


def small_gpt2(tokenizer) -> GPT2ForSequenceClassification:
    """A random one of the small BERT's size, from the global generator."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=SMALL["hidden_size"], n_layer=SMALL["num_hidden_layers"],
        n_head=SMALL["num_attention_heads"], n_inner=SMALL["intermediate_size"],
        n_positions=SMALL["max_position_embeddings"], initializer_range=SMALL["initializer_range"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config).eval()


class ResNet18(ResNet):
    """Four stages of two blocks each, an eighth as wide as the published one. 176,770 parameters
    for CIFAR-10.
    """

    WIDTHS = (8, 16, 32, 64)

    def __init__(self, config: SmallImageClassifierConfig) -> None:
        super().__init__(config)
        layers = list(self.layers)
        blocks = [
            part
            for layer in layers[3:7]
            for width in [layer.long[-1].num_channels]
            for part in (layer, Block(width, width, 1))
        ]
        self.layers = nn.Sequential(*layers[:3], *blocks, *layers[7:])


def resnet18(batch: dict[str, Tensor]) -> ResNet18:
    """From the global generator."""
    _, channels, side, _ = batch["pixel_values"].shape
    config = SmallImageClassifierConfig(num_channels=channels, image_size=side)
    return ResNet18(config).eval()


MODELS = {"LeNet": lenet_for, "ResNet-18": resnet18}


class Damping(Study):
    """Is I near I_lb and near an attack's error, and at which ε is it a bound? Figures 1 and 19;
    and how soon λ_max and the attack are known: Figure 10.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = {"--mnist": "npz with x_train and y_train"}
    EPSILONS, VARIANCES = (0.01, 0.1, 1.0, 10.0), (1e-8, 1e-6, 1e-4, 1e-3, 1e-2)
    TOLERANCES = (0.1, 0.01, 0.001)

    def cells(self) -> dict:
        samples, side, steps = (2, 8, 2) if self.quick else (3, 28, 40)
        return {
            (name, str(sample)): {"model": name, "sample": sample, "side": side, "steps": steps}
            for sample in range(samples)
            for name in MODELS
        }

    def load(self) -> None:
        torch.set_num_threads(1)

    def measure(self, cell: dict) -> dict:
        sample = cell["sample"]
        batch = single_images(self.args.mnist, sample + 1, cell["side"])[sample]
        set_seed(sample)
        model = MODELS[cell["model"]](batch)
        gmap = GradientMap(model, batch)
        started, top = time.process_time(), {}
        for tolerance in self.TOLERANCES:
            found = largest_eigenvalue(gmap, tolerance=tolerance)
            top[f"{tolerance:g}"] = [found.iterations, significant(found, 6)]
        seconds = time.process_time() - started
        spectrum = smallest_directions(gmap, gmap.input.numel())
        values, vectors = spectrum.eigenvalues.clamp(min=0), spectrum.vectors.flatten(1)
        gradient, points, observations = gmap.gradient(), [], []
        for number, variance in enumerate(self.VARIANCES):
            noise = make_defense("gaussian_noise", scale=variance**0.5)
            shared = noise(gmap, generator=Stream.from_seeds(100 * sample + number))
            delta = {name: shared[name] - g for name, g in gradient.items()}
            bound = inversion_influence_lower_bound(gmap, delta, eigenvalue=found)
            moved = vectors @ gmap.vjp(delta).flatten()
            root = len(values) ** 0.5
            point = {"variance": variance, "bound": float(bound) / root}
            for epsilon in self.EPSILONS:
                point[f"I, {epsilon:g}"] = float((moved / (values + epsilon)).norm()) / root
            points.append(point)
            observations.append(observe(model, batch, shared))
        attack = attack_of("dlg", steps=cell["steps"], start="uniform", patience=5)
        started = time.process_time()
        results = attack.reconstruct_many(observations, torch.Generator().manual_seed(sample))
        attacked = (time.process_time() - started) / len(observations)
        for point, result in zip(points, results, strict=True):
            guess = result.input.nan_to_num(0.5).clamp(0, 1)
            point["RMSE"] = float((guess - gmap.input).square().mean().sqrt())
        shown = [{name: significant(v, 4) for name, v in point.items()} for point in points]
        return {"points": shown, "λ_max": top, "seconds": [round(seconds, 3), round(attacked, 3)]}

    def report(self, metrics: dict) -> None:
        rows, costs = [], []
        for name, samples in metrics.items():
            cells = list(samples.values())
            points = [point for cell in cells for point in cell["points"]]
            rmse = np.array([point["RMSE"] for point in points])
            weak = [point for cell in cells for point in cell["points"][:2]]
            for title in ("bound", *(f"I, {epsilon:g}" for epsilon in self.EPSILONS)):
                values = np.array([point[title] for point in points])
                ratio = bracketed_median(rmse / values)
                beside = bracketed_median(values / np.array([p["bound"] for p in points]))
                below = values <= rmse
                rank = pandas.Series(values).corr(pandas.Series(rmse), method="spearman")
                first = sum(point[title] <= point["RMSE"] for point in weak)
                shown = [f"{below.sum()} of {len(below)}", f"{first} of {len(weak)}"]
                name_shown = "I_lb" if title == "bound" else title.replace("I, ", "I, ε = ")
                rows.append([name, name_shown, ratio, beside, *shown, f"{rank:.2f}"])
            powers, attacks = np.array([cell["seconds"] for cell in cells]).T
            for tolerance in self.TOLERANCES:
                found = [cell["λ_max"][f"{tolerance:g}"] for cell in cells]
                best = [cell["λ_max"][f"{min(self.TOLERANCES):g}"][1] for cell in cells]
                off = max(
                    abs(value / last - 1) for (_, value), last in zip(found, best, strict=True)
                )
                iterations = [count for count, _ in found]
                costs.append(
                    [
                        name,
                        f"{tolerance:g}",
                        f"{min(iterations)} to {max(iterations)}",
                        f"{off:.1e}",
                        "",
                        "",
                    ]
                )
            costs[-1][4:] = [interval(powers.tolist(), 2), interval((attacks / powers).tolist(), 1)]
        header = [
            "",
            "",
            "RMSE over it: median, range",
            "over I_lb: median, range",
            "at most the RMSE",
        ]
        write_table(self.output, [*header, "of these under the weakest two", "Spearman"], rows)
        header = [
            "",
            "tolerance",
            "iterations",
            "λ_max off by at most",
            "seconds",
            "attack over that",
        ]
        write_table(named(self.output, "_cost"), header, costs)


def bracketed_median(values: np.ndarray) -> str:
    low, middle, high = (significant(v, 2) for v in np.quantile(values, (0, 0.5, 1)))
    return f"{middle:g} ({low:g} to {high:g})"


class ResNetDirections(Directions):
    """Perturbations along four eigenvectors of a ResNet-18: Figure 13.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}

    def cells(self) -> dict:
        cells = {place: cell for place, cell in super().cells().items() if place[0] == "CIFAR-10"}
        for cell in cells.values():
            cell["side"], cell["steps"] = min(cell["side"], 8), min(cell["steps"], 30)
        return cells

    def inverted(self, cell: dict, model: Any, batch: dict, messages: list[dict]) -> list[Tensor]:
        """All of them together, which a deep network does far faster."""
        observations, dlg = self.observed(cell, model, batch, messages)
        results = dlg.reconstruct_many(observations, torch.Generator().manual_seed(0))
        return [result.input for result in results]

    def _task(self, data: str, side: int) -> tuple:
        batches = single_images(self.args.cifar10, self.samples, side)
        set_seed(0)
        return resnet18(batches[0]), batches

    def report(self, metrics: dict) -> None:
        rows = []
        for sample, points in metrics["CIFAR-10"].items():
            errors = [f"{point['mse']:.2g} at {point['eigenvalue']:.1e}" for point in points]
            undefended = points[0]["undefended"]
            smallest = min(points, key=lambda point: point["eigenvalue"])
            largest_error = max(point["mse"] for point in points)
            most = "yes" if smallest["mse"] == largest_error else "no"
            rows.append([sample, f"{undefended:.1e}", *errors, most])
        header = [
            "image",
            "MSE undefended",
            *(f"MSE at λ, {n}" for n in ("smallest", "second", "third", "largest")),
        ]
        write_table(self.output, [*header, "most at the smallest λ"], rows)


class ResNetUnfairness(Study):
    """The same noise protects some images and classes, and not others, of a trained ResNet-18:
    Figure 15.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
    ATTACK = {"total_variation": 1e-3, "patience": 5}

    def cells(self) -> dict:
        sizes = {"per_class": 4, "training_steps": 400, "steps": 25}
        if self.quick:
            sizes = {"per_class": 1, "training_steps": 2, "steps": 1}
        return {
            (str(label),): {"class": label, "scale": scale, **sizes}
            for scale in (1e-3**0.5,)
            for label in range(10)
        }

    def load(self) -> None:
        torch.set_num_threads(1)
        self.pixels, self.labels = array_images(self.args.cifar10)
        set_seed(0)
        steps = next(iter(self.cells().values()))["training_steps"]
        self.model = resnet18({"pixel_values": self.pixels}).train()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        half = len(self.pixels) // 2
        for _ in range(steps):
            rows = torch.randint(half, (64,))
            learn(
                self.model,
                optimizer,
                {"pixel_values": self.pixels[rows].float() / 255, "labels": self.labels[rows]},
            )
        self.model.eval()
        right = predicted_classes(self.model, self.pixels[half:]) == self.labels[half:]
        self.accuracy = float(right.float().mean())

    def measure(self, cell: dict) -> dict:
        """Images of one class that the network has not seen."""
        half, count = len(self.pixels) // 2, cell["per_class"]
        rows = half + (self.labels[half:] == cell["class"]).nonzero().flatten()[:count]
        noise, observations = make_defense("gaussian_noise", scale=cell["scale"]), []
        batches = [
            {
                "pixel_values": self.pixels[row : row + 1].float() / 255,
                "labels": self.labels[row : row + 1],
            }
            for row in rows
        ]
        norms = []
        for row, batch in zip(rows, batches, strict=True):
            gmap = GradientMap(self.model, batch)
            shared = noise(gmap, generator=Stream.from_seeds(int(row)))
            norms.append(significant(flat(gmap.gradient()).norm(), 4))
            observations.append(observe(self.model, batch, shared))
        attack = attack_of(
            "inverting_gradients", **INVERTING | self.ATTACK | {"steps": cell["steps"]}
        )
        results = attack.reconstruct_many(
            observations, torch.Generator().manual_seed(cell["class"])
        )
        mse = [
            float(
                (result.input.nan_to_num(0.5).clamp(0, 1) - batch["pixel_values"]).square().mean()
            )
            for result, batch in zip(results, batches, strict=True)
        ]
        gray = [float((batch["pixel_values"] - 0.5).square().mean()) for batch in batches]
        return {
            "mse": [significant(v, 4) for v in mse], "gray": [significant(v, 4) for v in gray],
            "norms": norms, "accuracy": round(self.accuracy, 3),
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        groups = [cell["mse"] for cell in metrics.values()]
        mse = np.concatenate(groups)
        means = [float(np.mean(group)) for group in groups]
        gray = np.concatenate([cell["gray"] for cell in metrics.values()])
        rows = [
            ["accuracy", f"{metrics['0']['accuracy']:.1%}"],
            ["MSE: mean", interval(mse.tolist(), 3)],
            ["MSE: range", f"{mse.min():.3f} to {mse.max():.3f}"],
            ["images below half the mean", f"{(mse < mse.mean() / 2).sum()} of {len(mse)}"],
            ["images nearer than a gray one", f"{(mse < gray).sum()} of {len(mse)}"],
            ["means of classes", f"{min(means):.3f} to {max(means):.3f}"],
            ["horses, ships: means", f"{means[7]:.3f}, {means[8]:.3f}"],
            ["p that classes are alike (Kruskal-Wallis)", f"{kruskal(*groups).pvalue:.3f}"],
        ]
        write_table(self.output, ["", "found"], rows)
