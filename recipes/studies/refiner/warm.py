r"""What a warm start brings to Refiner as published: half the iterations where an image was refined
before, from what they led to then.

    python -m recipes.studies.refiner.run warm --test TEST.parquet --images LOSSLESS.npz \
        --models FOLDER --output docs/results/refiner_warm

After Figures 15 and 18 of the Refiner paper (2025), and for its Figure 6 on a network that learns.
One client trains the network of the frontier on images on 2,000 lossless images of CIFAR-10: 600
messages of 16, so that each is seen about five times, at the learning rate that is best for
Refiner's default there; and behind uniform noise, at the rate that is best for it there. Rates
beside them were tried with a seed of their own, on images that nothing was trained on. Accuracy is
of 10,000 images, compared with the undefended run of the same seed, image by image. Read are eight
images that were trained on, one per message, by the frontier's attacker; told are members of three
messages of 16 by its list of 300 candidates, at 1 % false alarms. The cosine is of what is shared
of 64 messages of one with their gradients. FOLDER keeps what was trained.
"""

import functools

from torch import Tensor
from torch.nn.functional import cosine_similarity

from hf_gradguard import GradientMap

from ..frontier.attackers import sent
from ..frontier.client import Stage
from ..frontier.image_attackers import attacked
from ..frontier.image_training import Images, ImageTask
from ..frontier.settings import (
    IMAGE_ATTACKS,
    INVERTING,
    QUICK,
    QUICK_IMAGE_ATTACKS,
    RATES_SEED,
)
from ..frontier.shown import ACCURACY, asked, lost, read
from ..lib.device import there
from ..lib.images import array_images, single_images
from ..lib.tables import interval, write_table
from .federation import flat
from .settings import WARM, WARM_IMAGES, WARM_SEEDS, WARM_SIZES, WARM_TRIED

ARGUMENTS = {
    "--test": "parquet with img and label, to judge on",
    "--images": "npz with x (N, 32, 32, 3) and y: to train on and to attack",
    "--models": "folder that keeps what was trained",
}
COSINE, TOLD, TRIED = "cosine", "told, end", "held out at"


def cells(args) -> dict:
    """Trainings first, then what is read of the first seed's, early and late."""
    found: dict = {}
    attacks = QUICK_IMAGE_ATTACKS if args.quick else IMAGE_ATTACKS
    sizes = QUICK if args.quick else WARM_SIZES
    rows = {
        row: {"defense": defense, "strength": strength, **sizes, "learning_rate": rate}
        for row, (defense, strength, rate) in WARM.items()
    }
    for seed in range(1 if args.quick else WARM_SEEDS):
        found |= {(row, ACCURACY, str(seed)): c | {"seed": seed} for row, c in rows.items()}
    for row, rates in WARM_TRIED.items():
        some = {f"{TRIED} {rate:g}": {"learning_rate": rate, "seed": RATES_SEED} for rate in rates}
        found |= {(row, place, ""): rows[row] | tried for place, tried in some.items()}
    for row, cell in rows.items():
        for stage in ("start", "end"):
            own = asked(INVERTING, *attacks[INVERTING], stage)
            found[row, f"PSNR, {stage}", "0"] = cell | {"seed": 0} | own
        size, count = (4, 2) if args.quick else (16, 64)
        listed = ("candidates", size)
        told = asked(listed, *attacks[listed], "end")
        found[row, TOLD, "0"] = cell | {"seed": 0} | told
        found[row, COSINE, "0"] = cell | {"seed": 0, "stage": "end", COSINE: count}
    return found


def prepare(args):
    task = FewImages(args.images, args.test, args.models)

    def measure(cell: dict) -> dict:
        if "attack" in cell:
            return attacked(cell, task, args.images)
        if COSINE in cell:
            rows = [there(row) for row in single_images(args.images, cell[COSINE])]
            return {COSINE: cosines(cell, task.stage(cell, cell["stage"]), rows)}
        return task.learned(cell)

    return measure


class FewImages(ImageTask):
    """The first images of an npz, as they are, and some of the next ones to judge by."""

    @functools.cached_property
    def train_rows(self) -> tuple[Tensor, Tensor]:
        return array_images(self._train)

    def rows_to_learn(self) -> Images:
        return Images(*(part[:WARM_IMAGES] for part in self.train_rows), flip=False)

    def held_out(self) -> tuple[Tensor, Tensor]:
        pixels, labels = self.train_rows
        return pixels[WARM_IMAGES:], labels[WARM_IMAGES:]


def cosines(cell: dict, stage: Stage, batches: list[dict]) -> list[float]:
    """Of each message with its gradient."""
    messages = sent(cell, stage, batches)
    found = []
    for batch, message in zip(batches, messages, strict=True):
        true = flat(GradientMap(stage.model, batch).gradient())
        found.append(round(float(cosine_similarity(flat(message), true, dim=0)), 4))
    return found


def report(figures: dict, args) -> None:
    plain, rows = figures["none"][ACCURACY], []
    for row, found in figures.items():
        runs = found[ACCURACY]
        tried = [
            f"{place.removeprefix(TRIED).strip()} ({one['']['held_out']:.3f})"
            for place, one in found.items()
            if place.startswith(TRIED)
        ]
        shown = [row, ", ".join(tried), interval([run["accuracy"] for run in runs.values()])]
        shown.append(lost(runs, plain))
        shown += [read(found[f"PSNR, {stage}"]) for stage in ("start", "end")]
        rows.append([*shown, read(found[TOLD]), interval(found[COSINE]["0"][COSINE], 2)])
    header = ["", "rates (held out)", "accuracy", "less than none"]
    header += ["PSNR, start", "PSNR, end", TOLD, "cosine"]
    write_table(args.output, header, rows)
