r"""Who is among the images that a network was trained on, told from its last weights, behind each
defense.

    python -m recipes.studies.members.run weights --train TRAIN.parquet --test TEST.parquet \
        --models FOLDER --output docs/results/members

One client owns 1,000 of a pool of 2,000 images of CIFAR-10, and trains the frontier's network on
them from nothing: 600 messages of 64, flipped at random, so 38 times each. A seed draws the network
and which half is owned. The attacker has the last weights and all 2,000 images with their labels,
and says who was owned. He looks at an image and its mirror image, in three ways: at the loss; at
the log odds, less what other networks make of the same image, trained without a defense; and the
same with networks behind the very defense. The other networks are those of the other seeds: he
knows what they were trained on. Accuracy is of the 10,000 test images. Each defense has the
frontier's learning rate, which was chosen on held-out images that are not in the pool, for as many
messages; there no image came twice.

Less learning is less memory, whatever protects. So each row stands beside undefended training that
stopped earlier, and beside noise, at its own accuracy: between the two nearest of such trainings,
seed by seed. Intervals are over seeds (Student's t). Seeds share a pool, and each one's networks
are the others' measure, so they are not quite independent. Sizes were chosen by hand. FOLDER keeps
what was trained. Twenty-five minutes of one core.
"""

import functools
import json

import numpy as np

from ..frontier.image_training import IMAGES, ImageTask
from .client import Owner
from .settings import BATCH, POOL, QUICK, QUICK_ROWS, QUICK_SEEDS, ROWS, SEEDS
from .shown import TOLD, TRAINED, beside, picture, table
from .telling import ATTACKERS, by_difficulty, by_loss, log_odds, told

ARGUMENTS = {flag: IMAGES[flag] for flag in ("--train", "--test")}
ARGUMENTS |= {"--models": "folder that keeps what was trained"}
# What makes a network, but for its seed
TRAINING = ("defense", "strength", "learning_rate", "steps", "pool", "batch")


def cells(args) -> dict:
    """Trainings first: who tells needs those of the other seeds."""
    rows = QUICK_ROWS if args.quick else ROWS
    sizes = QUICK if args.quick else {"pool": POOL, "batch": BATCH}
    seeds = range(QUICK_SEEDS if args.quick else SEEDS)
    trained = {
        (row, TRAINED, str(seed)): settings | sizes | {"seed": seed}
        for seed in seeds
        for row, settings in rows.items()
    }
    attacked = {
        (row, TOLD, seed): cell
        | {"undefended": rows["none"], "others": _without(cell["seed"], seeds)}
        for (row, _, seed), cell in trained.items()
    }
    return trained | attacked


def _without(one: int, seeds: range) -> list[int]:
    return [seed for seed in seeds if seed != one]


def prepare(args):
    data = ImageTask(args.train, args.test, args.models)

    @functools.cache
    def owner(pool: int, seed: int) -> Owner:
        return Owner(data, args.models, pool, seed)

    kept: dict[str, np.ndarray] = {}  # a network is beside many others

    def odds(cell: dict, seed: int) -> np.ndarray:
        trained = {name: cell[name] for name in TRAINING} | {"seed": seed}
        key = json.dumps(trained, sort_keys=True)
        if key not in kept:
            one = owner(cell["pool"], seed)
            kept[key] = log_odds(one.stage(trained, "end").model, *one.pool)
        return kept[key]

    def measure(cell: dict) -> dict:
        own = owner(cell["pool"], cell["seed"])
        if "others" not in cell:
            return own.learned(cell)
        seeds, seen = cell["others"], odds(cell, cell["seed"])
        owned = np.stack([owner(cell["pool"], seed).owned.numpy() for seed in seeds])
        scores = [by_loss(seen)]
        for networks in (cell | cell["undefended"], cell):
            others = np.stack([odds(networks, seed) for seed in seeds])
            scores.append(by_difficulty(seen, others, owned))
        found = [told(one, own.owned.numpy()) for one in scores]
        return dict(zip(ATTACKERS, found, strict=True))

    return measure


def report(figures: dict, args) -> None:
    table(figures, args.output)
    beside(figures, args.output)
    picture(figures, args.output)
