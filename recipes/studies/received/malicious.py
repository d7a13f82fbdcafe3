"""Misses: six constructions that make gradients leak, each shown to leak.

    python -m recipes.studies.received.run malicious --cifar10 NPZ --output
        docs/results/received_malicious

Each construction is put into a model: Robbing the Fed's imprint module in front of a ViT, bins in a
BERT's feed-forward layer behind an attention that adds nothing (after Decepticons), a head that
lets one class through (after Fishing), trap weights (Curious Abandon Honesty), and a layer with
every direction 16 times. The sixth makes a BERT's first attention pick single tokens, and its
client trains all behind the first block; its check was written when the construction was known, as
those of the others were. Images are of CIFAR-10, at 16 × 16 pixels; the server sets its bins by
1,000 other images. A message is of 8 images, 4 texts of 12 tokens, or, of the sixth, one. Read: the
share of images above 30 dB by `analytic`, or of tokens at their places (of the sixth, by `span`).
The last two constructions are none: a perceptron as it is initialized, and the sixth's BERT. Noise
of 0.3 and 3 % of the planted weights hides that rows are alike. Ten seeds. Three minutes of one
core.
"""

import numpy as np
import torch
from transformers import set_seed

from hf_gradguard.leakage import check_received

from ..lib.tables import interval, write_table
from .constructions import BUILT, disturb, leaks
from .settings import CONSTRUCTIONS, FROZEN, HIDDEN, HONEST, PLAN, QUICK

ARGUMENTS = {"--cifar10": "npz with x_train in uint8"}


def cells(args) -> dict:
    plan = QUICK if args.quick else PLAN
    return {
        (name, str(share), str(seed)): {"built": name, "hidden": share, "seed": seed, **plan}
        for name in (*CONSTRUCTIONS, HONEST, FROZEN)
        for share in (HIDDEN[:1] if args.quick or name in (HONEST, FROZEN) else HIDDEN)
        for seed in range(1 if args.quick else 10)
    }


def prepare(args):
    torch.set_num_threads(1)
    with np.load(args.cifar10) as file:
        name = next(one for one in ("x_train", "images", "x") if one in file)
        found = torch.from_numpy(file[name][:3000])
    if found.shape[-1] == 3:
        found = found.permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(found.float() / 255, size=16, mode="area")
    return lambda cell: measure(cell, small)


def measure(cell: dict, images: torch.Tensor) -> dict:
    set_seed(cell["seed"])
    order = torch.randperm(len(images))
    count = cell["images"]
    public, private = images[order[:-count][:1000]], images[order[-count:]]
    planted = BUILT[cell["built"]](public, cell)
    disturb(planted, cell["hidden"])
    found = check_received(planted.model)
    return {
        "read": leaks(planted, private, cell),
        "checks": sorted({one.check for one in found}),
    }


def report(figures: dict, args) -> None:
    rows = []
    for name, shares in figures.items():
        for share, runs in shares.items():
            found = [set(run["checks"]) for run in runs.values()]
            # of a layer on all pixels a perceptron is warned of whoever made it
            told = sum(bool(own - {"reads_all_pixels"}) for own in found)
            every = sorted(set.union(*found))
            rows.append([
                name, f"{100 * float(share):g} %", interval([r["read"] for r in runs.values()], 2),
                f"{told} of {len(found)}", ", ".join(every) or "–",
            ])  # fmt: skip
    header = ["construction", "noise on it", "read", "found", "by"]
    write_table(args.output, header, rows)
