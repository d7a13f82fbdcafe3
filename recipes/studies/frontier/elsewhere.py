r"""The frontier on images once more, by other networks and on other images.

    python -m recipes.studies.frontier.run elsewhere --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --mnist MNIST.npz --tiny_imagenet TINY.npz --models FOLDER \
        --output docs/results/frontier_elsewhere

After Figures 10 and 11 of the Refiner paper (2025): a ResNet10 and a ViT on CIFAR-10, and the
frontier's own network on MNIST's digits and Tiny ImageNet's 200 classes, where the paper has SVHN
and CIFAR-100. Everything else is as in the part images: 600 messages of 64, three seeds, each
defense at its own rate, attackers who know it. Refiner is our default. About three hours of one
core with `--all`. FOLDER keeps what was trained.
"""

import functools

from ..lib.results import Results, chosen, named
from ..lib.tables import plt, save
from . import rates
from .client import row_of
from .image_attackers import attacked
from .image_networks import Place
from .image_training import IMAGES
from .images import RATES, search_of, tried_of
from .settings import (
    ALL,
    ELSEWHERE,
    ELSEWHERE_PASSES,
    ELSEWHERE_ROWS,
    IMAGE_ATTACKS,
    IMAGE_RATE,
    IMAGE_SIZES,
    INVERTING,
    QUICK,
    QUICK_IMAGE_ATTACKS,
    QUICK_ROWS,
)
from .shown import ACCURACY, GRAY, TOLD, Look, apart, cells_of, draw, fitting, table

LABEL = "members of 16 that a list tells at 1 % false alarms (less is better)"
ARGUMENTS = IMAGES | {
    "--mnist": "npz with x_train, y_train, x_test and y_test",
    "--tiny_imagenet": "npz with x_train, y_train, x_val and y_val",
    "--models": "folder that keeps what was trained",
    "--all": ALL,
}


def cells(args) -> dict:
    """Place by place: the rates of every row, and then what takes the best of them. Without `--all`
    one seed and lists, and what is there.
    """
    results, found = Results(args.output), {}
    for name in ELSEWHERE:
        if args.quick:
            passes = [(1, {one: ["end"] for one in QUICK_IMAGE_ATTACKS})]
            sizes = QUICK | {"place": name}
            here = cells_of(QUICK_ROWS, passes, QUICK_IMAGE_ATTACKS, sizes, None, IMAGE_RATE)
            found |= {(name, *place): cell for place, cell in fitting(here).items()}
            continue
        sizes = IMAGE_SIZES | {"place": name}
        gray = {"attack": GRAY, "messages": IMAGE_ATTACKS[INVERTING][0], "place": name}
        found[name, GRAY, f"{INVERTING[0]}, {INVERTING[1]}, end", "0"] = gray
        best = {}
        for defense, strength in ELSEWHERE_ROWS:
            row, search = row_of(defense, strength), search_of(results, defense, strength, sizes)
            found |= {(name, row, RATES, rate): cell for rate, cell in search.items()}
            if (rate := rates.chosen(results, search)) is not None:
                best[row] = rate
        whole, first = (
            cells_of(ELSEWHERE_ROWS, passes, IMAGE_ATTACKS, sizes, best)
            for passes in (ELSEWHERE_PASSES, ELSEWHERE_PASSES[:1])
        )
        here = chosen(whole, lambda cell, first=first: cell in first.values(), args)
        found |= {(name, *place): cell for place, cell in here.items()}
    return found


def prepare(args):
    shown = {"cifar10": args.images, "mnist": args.mnist, "tiny_imagenet": args.tiny_imagenet}
    files = {name: (path, path) for name, path in shown.items()}
    files["cifar10"] = args.train, args.test

    @functools.cache
    def place(name: str) -> Place:
        return Place(name, files, args.models)

    def measure(cell: dict) -> dict:
        task = place(cell["place"])
        if "attack" in cell:
            return attacked(cell, task, shown[task.images])
        return task.trained(cell)

    return measure


def report(figures: dict, args) -> None:
    size = {"figsize": (13, 10), "layout": "constrained"}
    figure, panels = plt.subplots(2, 2, **size)
    for axes, (name, found) in zip(panels.flat, figures.items(), strict=True):
        tried = {"rates (held out)": tried_of(found)}
        ending = "_" + name.lower().replace(" ", "_")
        table(found, IMAGE_ATTACKS, named(args.output, ending), tried)
        runs = [places[ACCURACY] for places in found.values() if ACCURACY in places]
        most = max(apart(one, found["none"][ACCURACY]).mean for one in runs)
        draw(axes, found, Look(TOLD, LABEL, -110 * max(most, 0.01)))
        axes.set_title(name)
    for axes in panels.flat[:-1]:
        axes.get_legend().remove()
    save(figure, args.output)
