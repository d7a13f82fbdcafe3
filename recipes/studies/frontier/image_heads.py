r"""Accuracy on CIFAR-10 where nothing but a linear head is shared, each sample clipped, and what
attackers read of it at the start, in the middle and at the end of training.

    python -m recipes.studies.frontier.run image_heads --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --public TINY.npz --models FOLDER \
        --output docs/results/frontier_image_heads

The head takes features that nobody learns: how patches of an image respond to 200 patches of public
images, of either sign, in its four quarters (Coates and Ng, 2011): 1,600 numbers, so that 16,010
are shared. Patches are of 3,000 images of Tiny ImageNet, by which features are whitened as the part
heads does it. (Such features before private training: Tramèr and Boneh, 2021, whose are wavelets.)
`dp_sgd` clips each image's gradient to norm 1 and adds noise of twice that to their sum: by the
lemma of Neyman and Pearson nobody then tells more than 3.4 % of a message's members at 1 % false
alarms.

Rows differ in how long training is, and in the images of a message. Rates are searched for as in
the part heads. Accuracy is of 10,000 images, compared with the undefended head of the same length
and seed, image by image; ε is of all messages, for one image more or less. Attacked are lossless
images, as in the part images: by Inverting Gradients, through the features (from noise: a gray
image is above no threshold, so nothing moves it), and by 300 candidates, ranked by likelihood, with
a message's labels and without. Noise alone is what labels come to: who knows that a message is of
one cat looks at cats. FOLDER keeps features and what was trained. Features take five minutes of one
core, a training one to five.
"""

from . import heads
from .heads import Heads
from .image_head_training import ImageHeadTask
from .image_training import IMAGES
from .images import measured
from .settings import (
    IMAGE_HEAD_ATTACKS,
    IMAGE_HEAD_ROWS,
    INVERTING,
    QUICK_IMAGE_HEAD,
    QUICK_IMAGE_HEADS,
)
from .shown import GRAY

ARGUMENTS = IMAGES | {
    "--public": "npz with x_train: images that are nobody's secret, Tiny ImageNet",
    "--models": "folder that keeps features and what was trained",
}


def cells(args) -> dict:
    some = (
        ([QUICK_IMAGE_HEAD], QUICK_IMAGE_HEADS)
        if args.quick
        else (IMAGE_HEAD_ROWS, IMAGE_HEAD_ATTACKS)
    )
    found = heads.cells_for(args, Heads(*some, lambda cell: "features", "candidates"))
    (name, size), (count, _, stages) = INVERTING, some[1][INVERTING]
    gray = {"attack": GRAY, "messages": count}
    return found | {(GRAY, f"{name}, {size}, {stage}", "0"): gray for stage in stages}


def prepare(args):
    return measured(ImageHeadTask(args.train, args.test, args.models, args.public), args.images)


def report(figures: dict, args) -> None:
    heads.report(figures, args)
