"""What robust data and reconstructions look like to metrics: Refiner's Figures 3, 8, 9, 14, 16 and
21, its Equation 9 and Table 15.
"""

import copy
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses.refiner import Refiner
from hf_gradguard.metrics import score_images
from hf_gradguard.networks import load_network
from hf_gradguard.randomness import Stream

from ..study import Study
from .evaluation_networks import IMAGE
from .lib.attacks import attack_of
from .lib.defenses import published
from .lib.images import INVERTING, QUICK_SMOOTHING, SMOOTHING, flat, single_images, smoothed
from .lib.intervals import share
from .lib.perceptual import EFFICIENTNET, Perceptual
from .lib.results import named
from .lib.tables import draw_images, interval, significant, write_table
from .refiner_federation import KNOWLEDGE_SETTINGS, lenet

REFINED = {"alpha": 0.5}
SOLVED, BY_MSE = "alpha=0.5, a gradient at that distance", "alpha=0.5, MSE for D"
RECOVERED: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "refiner alpha=0.5": ("refiner", REFINED),
    f"refiner {BY_MSE}": ("refiner", {**REFINED, "privacy": "mse"}),
    f"refiner {SOLVED}": ("refiner", {**REFINED, "solved": True}),
    "soteria ratio=0.5": ("soteria", {"ratio": 0.5}),
    "gaussian_noise relative_scale=0.3": ("gaussian_noise", {"relative_scale": 0.3}),
    "pruning ratio=0.9": ("pruning", {"ratio": 0.9}),
}
QUICK_RECOVERED = ("none", "refiner alpha=0.5", f"refiner {BY_MSE}", f"refiner {SOLVED}")
LIST = 4000  # images among which an attacker that has a list looks for the true one


class FarFrom(nn.Module):
    """The mean squared error to a batch's own pixels, where an evaluation network has its D."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()
        self.register_buffer("pixels", pixels)

    def noise_ratio(self, x: Tensor) -> Tensor:
        return (x - self.pixels).square().flatten(1).mean(1)


def centered(pixels: Tensor) -> Tensor:
    """`(N, pixels)`, whose products are correlations."""
    rows = pixels.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)


def places_in_list(shown: Tensor, candidates: Tensor) -> list[int]:
    """Where the candidate that each is of stands, by likeness: the first are of the first, and so
    on. 1 is the likest.
    """
    likeness = shown @ candidates.T
    own = likeness[range(len(shown)), range(len(shown))]
    return (1 + (likeness > own[:, None]).sum(1)).tolist()


def pixel_scores(network: nn.Module, perceptual: Perceptual | None, shown: Tensor, true: Tensor):
    """Each metric of the paper, image by image."""
    with torch.no_grad():
        scores = score_images(shown.split(1), true.split(1), bootstrap=0).per_sample
        columns = {name: scores[name] for name in ("mse", "psnr", "ssim")}
        columns["D"] = network.noise_ratio(shown).tolist()
        if perceptual is not None:
            columns["perceptual"] = perceptual(shown, true).tolist()
    return {name: [significant(v, 4) for v in values] for name, values in columns.items()}


class Pictures(Study):
    """Shared by both studies: images, an evaluation network, and an eye."""

    ARGUMENTS: dict[str, Any] = {"--images": "npz with x (N, 32, 32, 3) and y", **EFFICIENTNET}

    def load(self) -> None:
        torch.set_num_threads(1)
        self.network = load_network(IMAGE).eval()
        folder = self.args.efficientnet
        self.perceptual = None if folder is None else Perceptual(folder)
        self.batches = single_images(self.args.images, LIST)
        self.pixels = torch.cat([batch["pixel_values"] for batch in self.batches])


class Recovered(Pictures):
    """What Inverting Gradients recovers of LeNet's gradients, by every metric; and of Refiner, how
    far that is from the robust data.

    Conditions and figures: docs/findings/refiner.md.
    """

    ARGUMENTS = Pictures.ARGUMENTS | {
        "--pictures": {"help": "a PNG to draw at α = 0.5: true images, robust data, what came back"}
    }

    def cells(self) -> dict:
        settings = INVERTING | SMOOTHING | {"steps": 1 if self.quick else 15}
        settings |= QUICK_SMOOTHING if self.quick else {"total_variation": [1e-4, 1e-2]}
        sizes = {"samples": 2, "own": 1} if self.quick else {"samples": 8, "own": 1}
        return {
            (row, ""): {
                "defense": defense, "strength": strength, **sizes,
                "settings": settings | KNOWLEDGE_SETTINGS.get(defense, {}),
            }
            for row, (defense, strength) in RECOVERED.items()
            if not self.quick or row in QUICK_RECOVERED
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        count = cell["samples"]
        model, batches = lenet(seed=0), self.batches[: count + cell["own"]]
        observations, robust_images, distances = [], [], []
        for number, batch in enumerate(batches):
            gmap = GradientMap(model, batch)
            gradient = flat(gmap.gradient())
            shared, robust_image = self.message(cell, gmap, Stream.from_seeds(number))
            robust_images.append(robust_image)
            distances.append(float((flat(shared) - gradient).norm() / gradient.norm()))
            observations.append(Observation(model, shared, tuple(gmap.input.shape)))
        images = [batch["pixel_values"] for batch in batches]
        settings = smoothed(cell["settings"], observations[count:], images[count:])
        attack = attack_of("inverting_gradients", **settings)
        results = attack.reconstruct_many(observations[:count], torch.Generator().manual_seed(0))
        guesses = torch.cat([r.input.nan_to_num(0.5) for r in results]).clamp(0, 1)
        true = self.pixels[:count]
        scores = pixel_scores(self.network, self.perceptual, guesses, true)
        scores["place"] = places_in_list(centered(guesses), centered(self.pixels))
        scores["distance"] = [significant(value, 4) for value in distances[:count]]
        if robust_images[0] is not None:
            robust = torch.cat(robust_images[:count])
            own = pixel_scores(self.network, self.perceptual, robust, true)
            scores |= {f"robust {name}": values for name, values in own.items()}
            pairs = {"robust and true": (robust, true), "guess and robust": (guesses, robust),
                     "guess and true": (guesses, true)}  # fmt: skip
            for name, (one, other) in pairs.items():
                likeness = (centered(one) * centered(other)).sum(1)
                scores[f"correlation, {name}"] = [significant(v, 3) for v in likeness]
            scores["robust place"] = places_in_list(centered(robust), centered(self.pixels))
        if self.args.pictures and cell["strength"] == REFINED:
            drawn = {"true": true, "robust data": robust, "recovered": guesses}
            rows = [[(x, title) for x in tensor[:6]] for title, tensor in drawn.items()]
            draw_images(self.args.pictures, rows, (9, 5), 60)
        return scores | {"total_variation": settings["total_variation"]}

    def message(self, cell: dict, gmap: GradientMap, noise: Stream) -> tuple[dict, Tensor | None]:
        """What is shared, and robust data where there is some."""
        strength = dict(cell["strength"])
        privacy, is_solved = strength.pop("privacy", "D"), strength.pop("solved", False)
        network = FarFrom(gmap.input) if privacy == "mse" else self.network
        defense = copy.deepcopy(published(cell["defense"], network, **strength))
        if not isinstance(defense, Refiner):
            return defense(gmap, generator=noise), None
        robust = defense.refine(gmap, noise)
        shared = robust.gradient
        if is_solved:  # what descent of (‖g* - g'‖² - const)² ends in, from a random start
            true = gmap.gradient()
            way = {name: noise.normal(g.shape) for name, g in shared.items()}
            far = float((flat(shared) - flat(true)).norm() / flat(way).norm())
            shared = {name: g + far * way[name] for name, g in shared.items()}
        return shared, robust.input

    def report(self, metrics: dict) -> None:
        rows, plain = [], metrics["none"][""]
        for row, cells in metrics.items():
            cell = cells[""]
            shown = [interval(cell["psnr"], 1), interval(cell["ssim"], 2)]
            shown += [interval(cell[name], 2) if name in cell else "" for name in ("perceptual",)]
            shown += [interval(cell["D"], 2), found_text(cell["place"])]
            rows.append([row, *shown, interval(cell["distance"], 2), cell["total_variation"]])
        header = ["", "PSNR", "SSIM", "perceptual", "D", "first of 4,000", "‖shared - g‖/‖g‖"]
        write_table(self.output, [*header, "total variation"], rows)
        rows = []
        error = np.mean(np.abs(np.subtract(plain["D"], 0)))
        for row, cells in metrics.items():
            if "robust D" not in (cell := cells[""]):
                continue
            holds = np.array(cell["D"]) >= np.array(cell["robust D"]) - error
            shown = [interval(cell["robust psnr"], 1), interval(cell["robust D"], 2)]
            shown += [found_text(cell["robust place"])]
            kinds = ("robust and true", "guess and robust", "guess and true")
            shown += [interval(cell[f"correlation, {kind}"], 2) for kind in kinds]
            rows.append([row, *shown, f"{holds.sum()} of {len(holds)}"])
        header = ["", "PSNR of robust data", "D of robust data", "robust data: first of 4,000"]
        header += ["correlation, robust and true", "recovered and robust", "recovered and true"]
        write_table(named(self.output, "_robust"), [*header, "Equation 9 holds"], rows)
        self.orders(metrics)

    def orders(self, metrics: dict) -> None:
        """Whether defenses stand by one metric as by PSNR, over rows and samples together."""
        rows, cells = [], [cells[""] for cells in metrics.values()]
        psnr = [np.mean(cell["psnr"]) for cell in cells]
        draws = np.random.default_rng(0).integers(
            len(cells[0]["psnr"]), size=(1000, len(cells[0]["psnr"]))
        )
        for name in ("ssim", "perceptual", "D"):
            if name not in cells[0]:
                continue
            pairs = [np.array([[cell[key] for cell in cells] for key in ("psnr", name)])]
            both = pairs[0]
            drawn = [spearmanr(*both[:, :, draw].mean(2)).statistic for draw in draws]
            found = spearmanr(psnr, [np.mean(cell[name]) for cell in cells]).statistic
            low, high = np.quantile(drawn, (0.025, 0.975))
            rows.append([name, f"{found:.2f} [{low:.2f}, {high:.2f}]"])
        write_table(named(self.output, "_orders"), ["", "Spearman with PSNR over rows"], rows)


def found_text(places: list[int]) -> str:
    """How often the true image is the likest, with its interval."""
    first = sum(place == 1 for place in places)
    return f"{first} of {len(places)}, {share(first, len(places)).text(2)}"


SHARES = [round(0.1 * r, 1) for r in range(1, 10)]
CHANGES: dict[str, tuple[str, float]] = {
    **{f"noise blended, {r}": ("blended", r) for r in SHARES},
    **{f"noise added, MSE {m}": ("added", m) for m in (0.004, 0.01, 0.03, 0.1, 0.3)},
    **{f"shifted by {k}": ("shifted", k) for k in (1, 2)},
    **{f"scaled by {c}": ("scaled", c) for c in (0.5, 0.25)},
}
BOUNDS = {"psnr": 15.0, "ssim": 0.5, "D": 0.4}  # private beyond: below, below, above
MSE, OF_EQUAL = "mse", "noise of equal error"


class Thresholds(Pictures):
    """Do the paper's thresholds say when an image cannot be made out any more, and does the same
    error hide less as a shift than as noise? In the place of people's eyes are two attackers that
    have 4,000 images of which one is the true one: by pixels, and by EfficientNet's features.

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        changes = dict(list(CHANGES.items())[:: 4 if self.quick else 1])
        samples = 3 if self.quick else 200
        return {
            (row, ""): {"change": kind, "amount": amount, "samples": samples}
            for row, (kind, amount) in changes.items()
        }

    def load(self) -> None:
        super().load()
        self.lists = {"pixels": (centered, centered(self.pixels))}
        if self.perceptual is not None:
            embedding = self.perceptual.embedding
            self.lists["features"] = (embedding, embedding(self.pixels))

    def measure(self, cell: dict) -> dict:
        true, draw = self.pixels[: cell["samples"]], torch.Generator().manual_seed(0)
        kind, amount = cell["change"], cell["amount"]
        changed = change(true, kind, amount, draw)
        metrics = self.scored(changed, true)
        if kind in ("shifted", "scaled"):
            error = (changed - true).square().flatten(1).mean(1)[:, None, None, None]
            noisy = true + error.sqrt() * torch.randn(true.shape, generator=draw)
            other = self.scored(noisy, true)
            metrics |= {f"{OF_EQUAL}: {name}": values for name, values in other.items()}
        return metrics

    def scored(self, shown: Tensor, true: Tensor) -> dict:
        scores = pixel_scores(self.network, self.perceptual, shown, true)
        for name, (of, candidates) in self.lists.items():
            scores[f"place by {name}"] = places_in_list(of(shown), candidates)
        return scores

    def report(self, metrics: dict) -> None:
        kinds = [
            n for n in ("pixels", "features") if f"place by {n}" in next(iter(metrics.values()))[""]
        ]
        rows, alike = [], []
        for row, cells in metrics.items():
            cell = cells[""]
            rows.append(
                [row, *metric_texts(cell, ""), *(found_text(cell[f"place by {k}"]) for k in kinds)]
            )
            if f"{OF_EQUAL}: mse" in cell:
                prefix = f"{OF_EQUAL}: "
                alike.append(
                    [
                        row,
                        OF_EQUAL,
                        *metric_texts(cell, prefix),
                        *(found_text(cell[f"{prefix}place by {k}"]) for k in kinds),
                    ]
                )
                pairs = ("ssim", "perceptual", "D")
                differences = {
                    n: np.subtract(cell[n], cell[prefix + n]).tolist() for n in pairs if n in cell
                }
                alike.append(
                    [
                        row,
                        "less that",
                        "",
                        "",
                        *(interval(differences[n], 2) if n in differences else "" for n in pairs),
                        *[""] * len(kinds),
                    ]
                )
        header = ["MSE", "PSNR", "SSIM", "perceptual", "D", *(f"found by {k}" for k in kinds)]
        write_table(self.output, ["", *header], rows)
        write_table(named(self.output, "_equal"), ["", "beside", *header], alike)
        self.thresholds(metrics, kinds)

    def thresholds(self, metrics: dict, kinds: list[str]) -> None:
        """Of noisy images on either side of each threshold, how many are found."""
        noisy = [cells[""] for row, cells in metrics.items() if row.startswith("noise")]
        rows = []
        for name, bound in BOUNDS.items():
            values = np.concatenate([cell[name] for cell in noisy])
            hidden = values > bound if name == "D" else values < bound
            places = np.array(
                [np.concatenate([cell[f"place by {k}"] for cell in noisy]) for k in kinds]
            )
            for title, side in (("beyond", hidden), ("before", ~hidden)):
                shown = [found_text(row[side].tolist()) if side.any() else "" for row in places]
                rows.append([f"{name} {bound:g}", title, *shown])
        header = ["threshold", "side", *(f"found by {k}" for k in kinds)]
        write_table(named(self.output, "_bounds"), header, rows)


def metric_texts(cell: dict, prefix: str) -> list[str]:
    digits = {"mse": 3, "psnr": 1, "ssim": 2, "perceptual": 2, "D": 2}
    return [interval(cell[prefix + n], d) if prefix + n in cell else "" for n, d in digits.items()]


def change(pixels: Tensor, kind: str, amount: float, draw: torch.Generator) -> Tensor:
    """Images `(N, C, H, W)` with one change; what a shift uncovers repeats the border."""
    if kind == "blended":
        return (1 - amount) * pixels + amount * torch.rand(pixels.shape, generator=draw)
    if kind == "added":
        return pixels + amount**0.5 * torch.randn(pixels.shape, generator=draw)
    if kind == "scaled":
        return amount * pixels
    steps = int(amount)
    cut = pixels[..., steps:, steps:]
    return nn.functional.pad(cut, (0, steps, 0, steps), mode="replicate")
