"""Inversion influence: can leakage be told without attacking? Zhang et al. (2023)."""

import functools
from typing import Any

import numpy as np
import pandas
import torch
from scipy.stats import rankdata, spearmanr, wilcoxon
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import (
    inversion_influence,
    inversion_influence_lower_bound,
    largest_eigenvalue,
    smallest_directions,
)
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import attack_of, observe
from .lib.images import INVERTING, SINGLE_IMAGES, flat, lenet_for, single_images
from .lib.intervals import share
from .lib.results import named
from .lib.tables import plt, save, significant, write_table
from .lib.text import batches_of_one, load_tokenizer, of_usual_length, small_bert, sst2

DATA = {"MNIST": "mnist", "CIFAR-10": "cifar10"}


def invert_dlg(
    cell: dict, model: nn.Module, shared: dict, batch: dict[str, Tensor], seed: int, **settings: Any
) -> Tensor:
    """What DLG by L-BFGS makes of an image's message, the label known."""
    dlg = make_attack("dlg", steps=cell["steps"], **{"start": "uniform", "patience": 5} | settings)
    return dlg(observe(model, batch, shared), torch.Generator().manual_seed(seed)).input


class PredictsAttacks(Study):
    """Whether the influence's lower bound says how well an attack will do: Figures 2, 4 and 16.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = SINGLE_IMAGES | {"--sst2": "folder with dev.tsv", "--tokenizer": "folder or name"}
    SCORES = {"MNIST": ("rmse",), "CIFAR-10": ("rmse",), "SST-2": ("rougeL", "google_bleu")}
    TITLES = {"rmse": "RMSE", "rougeL": "ROUGE-L", "google_bleu": "Google BLEU"}
    # Strengths, all attacked together; a new defense is a new group
    RATIOS = [0.3, 0.5, 0.7, 0.9]
    IMAGE_GROUPS = [  # the gradient's RMS is about 0.2
        {"gaussian_noise": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "pruning": RATIOS}
    ]
    TEXT_GROUPS = [  # about 0.01
        {"gaussian_noise": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "pruning": RATIOS}
    ]
    QUICK_GROUPS = [{"gaussian_noise": [1e-3, 1e-2], "pruning": [0.5, 0.9]}]

    @property
    def samples(self) -> int:
        return 2 if self.quick else 12

    def cells(self) -> dict:
        sizes = {"side": 32, "lbfgs": 60, "tag": 300}
        if self.quick:
            sizes = {"side": 6, "lbfgs": 1, "tag": 2}
        cells = {}
        for data in self.SCORES:
            groups, settings = self.TEXT_GROUPS, {"steps": sizes["tag"]}
            if data in DATA:
                groups = self.IMAGE_GROUPS
                settings = {"side": sizes["side"], "steps": sizes["lbfgs"]}
            for sample in range(self.samples):
                for number, group in enumerate(self.QUICK_GROUPS if self.quick else groups):
                    cell = {"data": data, "sample": sample, "strengths": group, **settings}
                    cells[data, str(sample), str(number)] = cell
        return cells

    def load(self) -> None:
        self.task = functools.cache(self._task)

    def _task(self, data: str, side: int | None) -> tuple:
        """The model, all samples, and the tokenizer if there is one."""
        set_seed(0)
        if data in DATA:
            batches = single_images(getattr(self.args, DATA[data]), self.samples, side)
            return lenet_for(batches[0]), batches, None
        tokenizer = load_tokenizer(self.args.tokenizer)
        batches = batches_of_one(tokenizer, of_usual_length(sst2(self.args.sst2)))
        return small_bert(tokenizer), batches, tokenizer

    def measure(self, cell: dict) -> list[dict]:
        """One sample behind every defense: influences and what the attack makes of it."""
        model, batches, tokenizer = self.task(cell["data"], cell.get("side"))
        sample, batch = cell["sample"], batches[cell["sample"]]
        gmap = GradientMap(model, batch)
        gradient, top = gmap.gradient(), largest_eigenvalue(gmap)
        points, observations = [], []
        settings = [(name, s) for name, strengths in cell["strengths"].items() for s in strengths]
        for number, (name, strength) in enumerate(settings):
            generator = Stream.from_seeds(100 * sample + number)
            argument = {"gaussian_noise": "scale", "pruning": "ratio"}[name]
            shared = make_defense(name, **{argument: strength})(gmap, generator=generator)
            delta = {key: shared[key] - g for key, g in gradient.items()}
            bound = inversion_influence_lower_bound(gmap, delta, eigenvalue=top)
            influence = inversion_influence(gmap, delta, 1e-3 * top, tolerance=1e-2)
            points.append({
                "defense": name, "strength": strength, "size": flat(delta).norm(), "bound": bound,
                "influence": influence, "coordinates": bound.num_coordinates,
            })  # fmt: skip
            observations.append(observe(model, batch, shared, tokenizer=tokenizer))
        if tokenizer:
            attack = make_attack("tag", steps=cell["steps"])
        else:
            attack = attack_of("inverting_gradients", steps=cell["steps"], patience=5, **INVERTING)
        results = attack.reconstruct_many(observations, torch.Generator().manual_seed(sample))
        for point, result in zip(points, results, strict=True):
            point |= self.scores_of(cell, batch, result, gmap.input, tokenizer)
        return [
            {k: v if isinstance(v, str) else significant(v, 4) for k, v in point.items()}
            for point in points
        ]

    def scores_of(self, cell: dict, batch: dict, result: Any, true: Tensor, tokenizer: Any) -> dict:
        """Of one reconstruction."""
        guess = result.input if tokenizer else result.input.clamp(0, 1)
        scores: dict = {"rmse": (guess - true).square().mean().sqrt()}
        if tokenizer:
            texts = [result.token_ids], [batch["input_ids"].tolist()]
            found = score_text(*texts, tokenizer=tokenizer, bootstrap=0).mean
            scores |= {score: found[score] for score in ("rougeL", "google_bleu")}
        return scores

    def report(self, metrics: dict) -> None:
        rows, picture, panels = [], *plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
        kinds = [(data, score) for data, scores in self.SCORES.items() for score in scores]
        for (data, score), axis in zip(kinds, panels.flat, strict=True):
            samples, title = metrics[data].values(), self.TITLES[score]
            points = [point for groups in samples for group in groups.values() for point in group]
            frame = pandas.DataFrame(points)
            below = frame["bound"] / frame["coordinates"] ** 0.5 <= frame["rmse"]
            share = f"{below.sum()} of {len(frame)}"
            rows.append([f"{data}, {title}", *rank_texts(frame, score, len(samples)), share])
            plot_points(axis, frame, score)
            axis.set(xscale="log", xlabel="I_lb", ylabel=title)
            axis.set_title(f"{data}: Spearman {rank(frame, score):.2f}")
        rows.append(["SST-2, RMSE of embeddings", *rank_texts(frame, "rmse", len(samples)), share])
        self.write_bounds(metrics)
        header = ["", "I_lb", "under noise", "under pruning", "samples at one setting (mean)"]
        write_table(self.output, [*header, "I, ε = 1e-3 λ_max", "‖δ‖", "I_lb/√m ≤ RMSE"], rows)
        save(picture, self.output, dpi=80)

    def write_bounds(self, metrics: dict) -> None:
        """Whether I itself is a bound: Figure 19."""
        rows = []
        for data, samples in metrics.items():
            points = [point for groups in samples.values() for point in groups.values()]
            frame = pandas.DataFrame([point for group in points for point in group])
            influence = frame["influence"] / frame["coordinates"] ** 0.5
            below, noise = influence <= frame["rmse"], frame["defense"] == "gaussian_noise"
            strongest = noise & (frame["strength"] == frame["strength"][noise].max())
            low, middle, high = (frame["rmse"] / influence)[~strongest].quantile([0, 0.5, 1])
            shown = [f"{below[part].sum()} of {part.sum()}" for part in (~strongest, strongest)]
            rows.append([data, *shown, f"{middle:.2g} ({low:.2g} to {high:.2g})"])
        header = ["", "I/√m ≤ RMSE, but for the strongest noise", "at that noise"]
        header += ["RMSE over I/√m, but for it: median, range"]
        write_table(named(self.output, "_epsilon"), header, rows)


def rank(frame: pandas.DataFrame, score: str, name: str = "bound") -> float:
    return float(frame[name].corr(frame[score], method="spearman"))


def rank_texts(frame: pandas.DataFrame, score: str, samples: int) -> list[str]:
    """Spearman of I_lb and the score, with a 95 % bootstrap interval over samples; in parts; of
    other metrics.
    """
    draws = np.random.default_rng(0).integers(samples, size=(1000, samples))
    resampled = np.arange(len(frame)).reshape(samples, -1)[draws].reshape(1000, -1)
    pairs = (rankdata(frame[name].to_numpy()[resampled], axis=1) for name in ("bound", score))
    correlations = [np.corrcoef(pair)[0, 1] for pair in zip(*pairs, strict=True)]
    low, high = np.quantile(correlations, (0.025, 0.975))
    noise, pruning = (rank(noise_part, score) for _, noise_part in frame.groupby("defense"))
    groups = [noise_part for _, noise_part in frame.groupby(["defense", "strength"])]
    settings = [rank(noise_part, score) for noise_part in groups if noise_part[score].nunique() > 1]
    mean_at_setting = float(np.mean(settings)) if settings else float("nan")
    correlations_shown = [
        noise,
        pruning,
        mean_at_setting,
        rank(frame, score, "influence"),
        rank(frame, score, "size"),
    ]
    main_correlation = f"**{rank(frame, score):.2f}** [{low:.2f}, {high:.2f}]"
    return [main_correlation, *(f"{number:z.2f}" for number in correlations_shown)]


def plot_points(axis, frame: pandas.DataFrame, score: str) -> None:
    for (defense, strength), points in frame.groupby(["defense", "strength"]):
        marker, colors = ("o", "Blues") if defense == "gaussian_noise" else ("^", "Oranges")
        strengths = sorted(set(frame["strength"][frame["defense"] == defense]))
        color = plt.get_cmap(colors)(0.3 + 0.15 * strengths.index(strength))
        style = {"s": 14, "marker": marker, "color": color, "label": f"{defense} {strength:g}"}
        axis.scatter(points["bound"], points[score], **style)
    if score == "rmse":
        axis.set_yscale("log")
        root = frame["coordinates"].iloc[0] ** 0.5
        line = {"color": "black", "linewidth": 0.8, "label": "I_lb / √m = rmse"}
        axis.axline((root, 1), (root / 10, 0.1), **line)
    axis.legend(fontsize=6)


class Directions(Study):
    """A perturbation of one size along four eigenvectors of J Jᵀ, and what DLG makes of it: Figure
    6.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = SINGLE_IMAGES

    @property
    def samples(self) -> int:
        return 2 if self.quick else 3

    def cells(self) -> dict:
        side, steps = (6, 1) if self.quick else (32, 60)
        settings = {"side": side, "size": 0.3, "steps": steps}  # the gradient's norm is about 30
        return {
            (data, str(sample)): {"data": data, "sample": sample, **settings}
            for data in DATA
            for sample in range(self.samples)
        }

    def load(self) -> None:
        self.task = functools.cache(self._task)

    def _task(self, data: str, side: int) -> tuple:
        batches = single_images(getattr(self.args, DATA[data]), self.samples, side)
        set_seed(0)
        return lenet_for(batches[0]), batches

    def measure(self, cell: dict) -> list[dict]:
        """One image, its gradient perturbed in four directions."""
        model, batches = self.task(cell["data"], cell["side"])
        batch = batches[cell["sample"]]
        image, gmap = batch["pixel_values"], GradientMap(model, batch)
        gradient = gmap.gradient()
        spectrum = smallest_directions(gmap, image.numel())
        logarithms = spectrum.eigenvalues.clamp_min(1e-12).log()
        targets = torch.linspace(float(logarithms[-1]), float(logarithms[0]), 4)
        messages, points = [gradient], []
        for index in (logarithms[:, None] - targets).abs().argmin(0):
            direction = gmap.jvp(spectrum.vectors[index])
            # The eigenvalue once more, as ‖Jᵀu‖²: the smallest of a large matrix carry the rounding
            # of the largest.
            root, size = flat(direction).norm(), cell["size"]
            messages.append(
                {name: g + size / root * direction[name] for name, g in gradient.items()}
            )
            points.append({"eigenvalue": root**2, "predicted": size**2 / root**2 / image.numel()})
        undefended, *guesses = self.inverted(cell, model, batch, messages)
        for point, guess in zip(points, guesses, strict=True):
            point["undefended"] = (undefended - image).square().mean()
            mse, clipped = ((x - image).square().mean() for x in (guess, guess.clamp(0, 1)))
            point |= {"mse": mse, "clipped": clipped}
        return [{key: significant(value, 4) for key, value in point.items()} for point in points]

    def inverted(self, cell: dict, model: Any, batch: dict, messages: list[dict]) -> list[Tensor]:
        """What DLG makes of each message of an image, one after the other."""
        observations, dlg = self.observed(cell, model, batch, messages)
        return [dlg(seen, torch.Generator().manual_seed(0)).input for seen in observations]

    @staticmethod
    def observed(cell: dict, model: Any, batch: dict, messages: list[dict]) -> tuple[list, Any]:
        """As if pixels came from -50 to 50: this attacker does not know their range."""
        shape = tuple(batch["pixel_values"].shape)
        start = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        knowledge = {"labels": batch["labels"], "image_mean": [0.5], "image_std": [0.01]}
        observations = [Observation(model, shared, shape, **knowledge) for shared in messages]
        return observations, make_attack("dlg", steps=cell["steps"], start=start)

    def report(self, metrics: dict) -> None:
        rows, picture, axes = [], *plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
        for axis, (data, samples) in zip(axes, metrics.items(), strict=True):
            points = [point for group in samples.values() for point in group]
            columns = {key: np.array([point[key] for point in points]) for key in points[0]}
            plot_directions(axis, data, columns)
            above = columns["predicted"] > columns["undefended"]
            ratios = np.sqrt(columns["mse"] / columns["predicted"])[above]
            nothing = [float("nan")] * 3
            low, middle, high = np.quantile(ratios, (0, 0.5, 1)) if above.any() else nothing
            correlation = spearmanr(columns["eigenvalue"], columns["mse"]).statistic
            undefended = f"{np.median(columns['undefended']):.1e}"
            shown = [f"{correlation:.2f}", undefended, f"{above.sum()} of {len(points)}"]
            rows.append([data, *shown, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
        header = ["", "Spearman of λ and MSE", "MSE undefended, median"]
        header += ["points predicted above that", "their RMSE over predicted: median, range"]
        write_table(self.output, header, rows)
        save(picture, self.output, dpi=80)


def plot_directions(axis, data: str, columns: dict[str, np.ndarray]) -> None:
    eigenvalues, order = columns["eigenvalue"], columns["eigenvalue"].argsort()
    axis.plot(eigenvalues[order], columns["predicted"][order], color="black", label="size² / λm")
    axis.scatter(eigenvalues, columns["mse"], s=18, label="DLG")
    style = {"s": 18, "facecolors": "none", "edgecolors": "tab:blue", "label": "clipped"}
    axis.scatter(eigenvalues, columns["clipped"], **style)
    style = {"color": "gray", "linestyle": "--", "label": "undefended, median"}
    axis.axhline(np.median(columns["undefended"]), **style)
    axis.set(xscale="log", yscale="log", xlabel="eigenvalue λ of J Jᵀ", ylabel="MSE", title=data)
    axis.legend()


class SmallDirections(Study):
    """Is noise along the smallest eigenvectors of J Jᵀ a defense, as I² has it? Against uniform
    noise of the same power, with a list of candidates.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = {"--cifar10": "an npz"}
    NOISES, COUNTS = ("uniform", "small directions"), (1, 19)  # of 192 directions
    STRENGTHS = (1.0, 20.0, 1000.0)  # norm of the noise over that of the gradient

    @property
    def samples(self) -> int:
        return 2 if self.quick else 16

    def cells(self) -> dict:
        side, counts = (6, (1, 3)) if self.quick else (8, self.COUNTS)
        return {
            (str(count), str(sample)): {"sample": sample, "side": side, "directions": count}
            for count in counts
            for sample in range(self.samples)
        }

    def load(self) -> None:
        self.images = functools.cache(self._images)
        self.directions = functools.cache(self._directions)

    def _images(self, side: int) -> list[GradientMap]:
        """The candidates, in float64: what is left without noise is zero, not rounding."""
        batches = single_images(self.args.cifar10, self.samples, side)
        set_seed(0)
        model = lenet_for(batches[0]).double()
        return [
            GradientMap(model, batch | {"pixel_values": batch["pixel_values"].double()})
            for batch in batches
        ]

    def _directions(self, side: int, sample: int) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of Jᵀu for the smallest eigenvectors u first, `(m, d)`, and their
        eigenvalues.
        """
        gmap = self.images(side)[sample]
        units = torch.eye(gmap.input.numel()).double().view(-1, *gmap.input.shape)
        rows = [
            torch.cat([part.flatten(1) for part in gmap.jvps(some)], 1) for some in units.split(16)
        ]
        _, sizes, basis = torch.linalg.svd(torch.cat(rows), full_matrices=False)
        return basis.flip(0)[: max(self.COUNTS)].clone(), sizes.square().flip(0)

    def measure(self, cell: dict) -> dict:
        """Where the true image stands in the list behind each noise, by the best test of each."""
        maps, count, sample = self.images(cell["side"]), cell["directions"], cell["sample"]
        gradients = [flat(gmap.gradient()) for gmap in maps]
        bases = [self.directions(cell["side"], j)[0][:count] for j in range(len(maps))]
        eigenvalues = self.directions(cell["side"], sample)[1].clamp(min=1e-12)
        generator = torch.Generator().manual_seed(sample)
        gradient, basis = gradients[sample], bases[sample]
        inverse = 1 / eigenvalues
        # E I² at a power P: P/k Σ 1/λ of these directions, P/d Σ 1/λ of all.
        metrics: dict = {
            "influence": significant(
                float(len(gradient) / count * inverse[:count].sum() / inverse.sum()), 4
            )
        }
        for strength in self.STRENGTHS:
            noise = {
                "uniform": torch.randn(len(gradient), generator=generator).double(),
                "small directions": torch.randn(count, generator=generator).double() @ basis,
            }
            for name, direction in noise.items():
                message = gradient + strength * gradient.norm() * direction / direction.norm()
                left = []
                for candidate, own_basis in zip(gradients, bases, strict=True):
                    rest = message - candidate
                    if name == "small directions":  # this candidate's own would be left bare
                        rest = rest - own_basis.T @ (own_basis @ rest)
                    left.append(float(rest.norm()))
                rank = sorted(range(len(left)), key=left.__getitem__).index(sample) + 1
                metrics[f"{name}, {strength:g}"] = rank
        return metrics

    def report(self, metrics: dict) -> None:
        rows = []
        for count, samples in metrics.items():
            ratio = np.median([cell["influence"] for cell in samples.values()])
            for strength in self.STRENGTHS:
                shown = []
                for name in self.NOISES:
                    firsts = [c[f"{name}, {strength:g}"] == 1 for c in samples.values()]
                    found = share(sum(firsts), len(firsts)).text(2)
                    shown.append(f"{sum(firsts)} of {len(firsts)}, {found}")
                rows.append([count, f"{strength:g}", f"{ratio:.1e}", *shown])
        header = ["directions", "noise over gradient", "I² over that of uniform noise"]
        header += [f"{name}: true image first" for name in self.NOISES]
        write_table(self.output, header, rows)


class Initializations(Study):
    """Four initializations under the same noise: Figures 5 and 8.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = SINGLE_IMAGES
    NAMES = ("uniform ±0.5", "normal, variance 0.5", "Kaiming", "Xavier")
    VARIANCE, EIGENVALUES_DRAWN = 1e-4, 100  # of the noise; eigenvalues that are drawn

    def cells(self) -> dict:
        samples, side, steps = (2, 6, 1) if self.quick else (6, 32, 60)
        settings = {"samples": samples, "side": side, "variance": self.VARIANCE, "steps": steps}
        cells = {}
        for data in DATA:
            for name in self.NAMES:
                common = {"data": data, "initialization": name}
                cells["attacked", data, name] = {"measure": "attacked", **common, **settings}
                spectrum = {
                    "measure": "spectrum",
                    **common,
                    "side": side,
                    "values": self.EIGENVALUES_DRAWN,
                }
                cells["spectrum", data, name] = spectrum
        return cells

    def measure(self, cell: dict) -> dict:
        path, name = getattr(self.args, DATA[cell["data"]]), cell["initialization"]
        if cell["measure"] == "spectrum":
            return self.spectrum(name, *single_images(path, 1, cell["side"]))
        noise = make_defense("gaussian_noise", scale=cell["variance"] ** 0.5)
        mse, norms, largest = [], [], []
        for sample, batch in enumerate(single_images(path, cell["samples"], cell["side"])):
            model = started(name, sample, batch)
            gmap = GradientMap(model, batch)
            shared = noise(gmap, generator=Stream.from_seeds(sample))
            guess = invert_dlg(cell, model, shared, batch, sample).clamp(0, 1)
            mse.append(significant((guess - batch["pixel_values"]).square().mean(), 3))
            norms.append(float(flat(gmap.gradient()).norm()))
            largest.append(float(largest_eigenvalue(gmap)))
        return {
            "mse": mse,
            "median norm of the gradient": significant(np.median(norms), 3),
            "median λ_max": significant(np.median(largest), 3),
        }

    def spectrum(self, name: str, batch: dict[str, Tensor]) -> dict[int, float]:
        """Eigenvalues of J Jᵀ by their rank."""
        m, gmap = batch["pixel_values"].numel(), GradientMap(started(name, 0, batch), batch)
        values = smallest_directions(gmap, m).eigenvalues.flip(0).clamp_min(1e-12)
        ranks = np.unique(np.linspace(0, m - 1, self.EIGENVALUES_DRAWN).round().astype(int))
        return {int(index) + 1: significant(values[index], 3) for index in ranks}

    def report(self, metrics: dict) -> None:
        rows = []
        for data, cells in metrics["attacked"].items():
            mse = [np.array(cell["mse"]) for cell in cells.values()]
            p = wilcoxon(mse[0], mse[3]).pvalue
            below = f"{(mse[0] < mse[3]).sum()} of {len(mse[0])}, p = {p:.2f}"
            spread = [f"{m.mean():.3f} ({m.min():.3f} to {m.max():.3f})" for m in mse]
            rows.append([f"{data}, MSE: mean, range", *spread, below])
            for key in ("median λ_max", "median norm of the gradient"):
                values = [cell[key] for cell in cells.values()]
                shown = [f"{v:,.0f}" if v >= 100 else f"{v:.2g}" for v in values]
                rows.append([f"{data}, {key}", *shown, ""])
        write_table(self.output, ["", *self.NAMES, "uniform below Xavier"], rows)
        figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
        for (data, cells), (spectrum_axis, error_axis) in zip(
            metrics["attacked"].items(), axes, strict=True
        ):
            for name, values in metrics["spectrum"][data].items():
                spectrum_axis.plot(
                    [int(index) for index in values], list(values.values()), label=name
                )
            spectrum_axis.set(yscale="log", xlabel="rank", ylabel="eigenvalue of J Jᵀ")
            spectrum_axis.set_title(f"{data}: the first image")
            spectrum_axis.legend()
            labels = [name.split()[0].strip(",") for name in cells]
            error_axis.boxplot([cell["mse"] for cell in cells.values()], tick_labels=labels)
            error_axis.set(yscale="log", ylabel="MSE of DLG")
            error_axis.set_title(f"{data}: noise of variance {self.VARIANCE:g}")
        save(figure, self.output, dpi=80)


def started(name: str, sample: int, batch: dict[str, Tensor]) -> nn.Module:
    """The weights that this sample gets."""
    set_seed(sample)
    model = lenet_for(batch)
    for parameter in model.parameters():
        weights = parameter.data
        if name.startswith("uniform"):
            nn.init.uniform_(weights, -0.5, 0.5)
        elif name.startswith("normal"):
            nn.init.normal_(weights, 0, 0.5**0.5)
        elif weights.dim() == 1:
            nn.init.zeros_(weights)
        else:
            {"Kaiming": nn.init.kaiming_uniform_, "Xavier": nn.init.xavier_uniform_}[name](weights)
    return model
