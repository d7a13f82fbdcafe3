r"""Accuracy on CIFAR-10 of each defense at its own best learning rate, and what attackers read of
it at the start, in the middle and at the end of its own training.

    python -m recipes.studies.frontier.run images --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --models FOLDER --output docs/results/frontier_images

One client trains a small network from nothing: 600 messages of 64 images, flipped at random. The
rate is chosen first, as in the part rates, on 2,000 held-out training images by a seed that is not
used again. Accuracy is of 10,000 images, compared with the undefended run of the same seed, image
by image. Attacked are messages of lossless images, labels known. (They are among the training
images, which a training sees once at most, recompressed.) Attackers know the defense: Inverting
Gradients weighs coordinates by the noise's covariance, matches what a pruning left, and smooths by
the weight that shows most of two images of its own. It starts from a gray image.
Candidates are 300 images, ranked by likelihood: what is shown is the share of a message's 16 that
are told at 1 % false alarms. A minute of one core a cell. FOLDER keeps what was trained.
"""

from collections.abc import Callable

from ..lib.results import Results
from . import rates
from .client import Client, row_of
from .image_attackers import attacked
from .image_training import IMAGES, ImageTask
from .settings import (
    ALL,
    IMAGE_ATTACKS,
    IMAGE_FIRST,
    IMAGE_GRID,
    IMAGE_PASSES,
    IMAGE_RATE,
    IMAGE_ROWS,
    IMAGE_SIZES,
    INVERTING,
    QUICK,
    QUICK_IMAGE_ATTACKS,
    QUICK_ROWS,
    RATES_SEED,
    SPREAD,
)
from .shown import GRAY, Look, cells_of, fitting, lists, picture, table

ARGUMENTS = IMAGES | {"--all": ALL, "--models": "folder that keeps what was trained"}
RATES = "learning rate"
LOOK = Look("psnr", "PSNR in dB of what the best attacker reads (less is better)", -25)


def cells(args) -> dict:
    """Row by row, the rates and then what takes the best of them; with `--all` further stages and
    seeds once every row is there. Without `--all` the first rows, and what is there of the others.
    """
    if args.quick:
        passes = [(1, {one: ["end"] for one in QUICK_IMAGE_ATTACKS})]
        return fitting(cells_of(QUICK_ROWS, passes, QUICK_IMAGE_ATTACKS, QUICK, None, IMAGE_RATE))
    results, (name, size) = Results(args.output), INVERTING
    gray = {"attack": GRAY, "messages": IMAGE_ATTACKS[INVERTING][0]}
    found, chosen, searched = {(GRAY, f"{name}, {size}, end", "0"): gray}, {}, True
    for defense, strength in IMAGE_ROWS:
        row, search = row_of(defense, strength), search_of(results, defense, strength)
        rate = rates.chosen(results, search)
        if rate is not None:
            chosen[row] = rate
        if row in chosen or (searched and (args.all or (defense, strength) in IMAGE_FIRST)):
            found |= {(row, RATES, tried): cell for tried, cell in search.items()}
        searched = searched and row in chosen
    asked = IMAGE_PASSES if args.all and searched else IMAGE_PASSES[:1]
    some = IMAGE_ROWS if args.all else IMAGE_FIRST
    found |= cells_of(some, asked, IMAGE_ATTACKS, IMAGE_SIZES, chosen)
    whole = cells_of(IMAGE_ROWS, IMAGE_PASSES, IMAGE_ATTACKS, IMAGE_SIZES, chosen)
    return fitting(found | {place: cell for place, cell in whole.items() if cell in results})


def search_of(
    results: Results, defense: str, strength: dict, sizes: dict = IMAGE_SIZES
) -> dict[str, dict]:
    """Cells of a row's rates, so far."""
    common = {"defense": defense, "strength": strength, "seed": RATES_SEED, **sizes}
    start = rates.rates(strength, SPREAD, IMAGE_RATE, IMAGE_GRID)
    return rates.by_rate(common, rates.searched(results, common, start, IMAGE_GRID))


def prepare(args):
    task = ImageTask(args.train, args.test, args.models)

    return measured(task, args.images)


def measured(task: Client, images: str) -> Callable[[dict], dict]:
    """From a cell to its figures, where `images` are attacked."""

    def measure(cell: dict) -> dict:
        return attacked(cell, task, images) if "attack" in cell else task.trained(cell)

    return measure


def report(figures: dict, args) -> None:
    table(figures, IMAGE_ATTACKS, args.output, {"rates (held out)": tried_of(figures)})
    lists(figures, IMAGE_ATTACKS, args.output)
    picture(figures, args.output, LOOK)


def tried_of(figures: dict) -> dict[str, str]:
    """By row, which rates were tried and what each came to; taken out of the figures."""
    searches = {row: found.pop(RATES, {}) for row, found in figures.items()}
    best = rates.best({row: tried for row, tried in searches.items() if tried})
    return {
        row: ", ".join(
            f"**{rate}** ({found['held_out']:.3f})"
            if float(rate) == best[row]
            else f"{rate} ({found['held_out']:.3f})"
            for rate, found in searches[row].items()
        )
        for row in best
    }
