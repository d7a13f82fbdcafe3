"""Defenses, strengths, rates and attackers of the frontier."""

from collections.abc import Iterable
from typing import Any, NamedTuple

Row = tuple[str, dict]  # a defense and its strength
Attack = tuple[str, int]  # an attack, on messages of so many samples
Plan = tuple[int, dict]  # how many messages, and the attack's settings

STEPS, BATCH, RATES_SEED, SEEDS = 200, 16, 100, 3
GRID = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)  # of learning rates, the same for all
SPREAD = 1  # how many rates on either side of the one to start from are tried
STAGES = {"start": 0.0, "middle": 0.5, "end": 1.0}  # of a client's own training
DELTA = 1e-5  # of (ε, δ)
FOLDER = {"--models": "folder that keeps what was trained"}


def noises(*scales: float, names: tuple[str, ...] = ("gaussian_noise", "optimal_noise")) -> list:
    return [(name, {"relative_scale": scale}) for scale in scales for name in names]


def prunings(name: str, *ratios: float, **settings: Any) -> list[Row]:
    return [(name, {"ratio": ratio, **settings}) for ratio in ratios]


def quantizations(*bits: int) -> list[Row]:
    return [("quantization", {"bits": b}) for b in bits]


def sketches(*samples: int, **settings: Any) -> list[Row]:
    return [("gradient_sketch", {"samples": count, **settings}) for count in samples]


def dp_sgd(*multipliers: float) -> list[Row]:
    settings = {"per_sample": True, "clip": 1.0}
    return [("dp_sgd", settings | {"noise_multiplier": m}) for m in multipliers]


GAUSSIAN, OPTIMAL = ("gaussian_noise",), ("optimal_noise",)
NONE: Row = ("none", {})
PUBLISHED_REFINER: Row = ("refiner", {"objective": "weighted"})  # over half an hour per training
FEEDBACK: dict = {"error_feedback": True}

FIRST_ROWS: list[Row] = [
    NONE, *noises(5.0, 20.0, names=GAUSSIAN), *noises(5.0, 20.0, names=OPTIMAL)
]  # fmt: skip
ROWS: list[Row] = [
    *FIRST_ROWS,
    *noises(10.0),
    *prunings("pruning", 0.99), *prunings("optimal_pruning", 0.99),
    *quantizations(1), *sketches(4),
    *prunings("pruning", 0.99, **FEEDBACK),
    *prunings("optimal_pruning", 0.9), *prunings("optimal_pruning", 0.9, **FEEDBACK),
    *noises(100.0),
    *quantizations(2), *prunings("pruning", 0.9, 0.999, 0.5),
    ("optimal_noise", {"relative_scale": 5.0, "shape": "own"}),
    *prunings("optimal_pruning", 0.5, 0.999), *quantizations(4, 8),
    *noises(1.0, 50.0),
    ("optimal_noise", {"relative_scale": 20.0, "shape": "own"}),
    *prunings("optimal_pruning", 0.99, 0.97, 0.95, **FEEDBACK),
    *prunings("optimal_pruning", 0.99, 0.97, 0.95, 0.9, **FEEDBACK, min_batches=8),
    *prunings("pruning", 0.999, **FEEDBACK),
    *dp_sgd(0.1, 0.5, 1.5),
    *sketches(16, 64), *sketches(64, min_batches=8),
    *prunings("pruning", 0.95), *sketches(4, min_batches=8),
    *dp_sgd(0.2, 0.05),
    PUBLISHED_REFINER,
]  # fmt: skip
# Trained with more seeds than the others: what is recommended, and what comes near the bound
MORE_SEEDS = 5
MORE_SEEDED_ROWS: list[Row] = [
    *FIRST_ROWS, *sketches(4, 16), *sketches(4, min_batches=8),
    *prunings("optimal_pruning", 0.97, **FEEDBACK),
    *prunings("optimal_pruning", 0.99, **FEEDBACK, min_batches=8),
]  # fmt: skip

SPAN, CANDIDATES, TAG = ("span", 1), ("candidates", 16), ("tag", 1)
LAMP, INVERTED_TEXT = ("lamp", 1), ("inverting_gradients_published", 1)
LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False}
UNLABELED = ("candidates without labels", 16)  # labels of the message are not known
WORD = ("one word", 1)  # candidates for one word, all others of the sentence known
ACCUMULATED = ("gathered", 16)  # candidates, after waiting for so many later messages
LISTED = {"listed": 300}
ATTACKS: dict[Attack, Plan] = {
    SPAN: (8, {}),
    CANDIDATES: (3, LISTED),
    ACCUMULATED: (3, LISTED | {"later": 30}),
    ("candidates", 4): (4, LISTED),
    ("candidates", 1): (12, LISTED),
    TAG: (4, {"steps": 500}),
    INVERTED_TEXT: (4, {"steps": 25, **LBFGS}),
    LAMP: (4, {"steps": 300, "every": 100, "moves": 20}),
    ("span", 4): (3, {}),
}
SIZES = {"steps": STEPS, "batch": BATCH}
QUICK = {"steps": 2, "batch": 4}
QUICK_CANDIDATES = ("candidates", 4)
QUICK_LISTS: dict[Attack, Plan] = {
    QUICK_CANDIDATES: (1, {"listed": 20}), ("gathered", 4): (1, {"listed": 20, "later": 1}),
}  # fmt: skip
QUICK_ATTACKS: dict[Attack, Plan] = {SPAN: (1, {}), **QUICK_LISTS}
QUICK_ROWS = [NONE, *noises(20.0, names=GAUSSIAN), *prunings("pruning", 0.9, **FEEDBACK)]

# Images
IMAGE_SIZES = {"steps": 600, "batch": 64}
IMAGE_RATE = 4e-3  # undefended, about; the grid is around it
IMAGE_GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
IMAGE_ROWS: list[Row] = [
    NONE, *noises(1.0, 5.0, names=GAUSSIAN), *noises(1.0, names=OPTIMAL),
    *prunings("pruning", 0.99),
    *quantizations(1), *noises(20.0, names=GAUSSIAN), *noises(5.0, names=OPTIMAL),
    *noises(0.1, names=GAUSSIAN), *prunings("optimal_pruning", 0.9),
    *noises(100.0, names=GAUSSIAN), ("gradient_sketch", {}), *prunings("pruning", 0.99, **FEEDBACK),
    *noises(20.0, names=OPTIMAL), *prunings("pruning", 0.9), *noises(0.1, names=OPTIMAL),
    *prunings("optimal_pruning", 0.99), *quantizations(2), *noises(100.0, names=OPTIMAL),
    *dp_sgd(0.1, 0.5, 1.5),
    *prunings("optimal_pruning", 0.99, **FEEDBACK), *sketches(64), *quantizations(4, 8),
    *prunings("pruning", 0.5, 0.95, 0.999), *prunings("optimal_pruning", 0.5, 0.95, 0.999),
    *prunings("optimal_pruning", 0.95, 0.9, 0.8, **FEEDBACK),
    *prunings("optimal_pruning", 0.99, 0.9, **FEEDBACK, min_batches=8),
    *dp_sgd(0.2, 1.0), *sketches(256, 4),
    PUBLISHED_REFINER,
]  # fmt: skip
INVERTING = ("inverting_gradients", 1)
UNAWARE = ("inverting_gradients of who knows no covariance", 1)
SMOOTHED = {"total_variation": [1e-3, 1e-2, 0.1, 0.3, 1.0], "own": 2}
IMAGE_ATTACKS: dict[Attack, Plan] = {
    **dict.fromkeys((INVERTING, UNAWARE), (8, {"steps": 20, **SMOOTHED})),
    CANDIDATES: (3, LISTED),
    ACCUMULATED: (3, LISTED | {"later": 30}),
    ("candidates", 4): (4, LISTED),
    ("candidates", 1): (12, LISTED),
}
QUICK_IMAGE_ATTACKS: dict[Attack, Plan] = {
    INVERTING: (1, {"steps": 1, "total_variation": [1e-3, 1e-2], "own": 1}), **QUICK_LISTS,
}  # fmt: skip

# Other networks, and other images: the network, and the option that names the images
ELSEWHERE = {
    "ResNet": ("resnet", "cifar10"),
    "ViT": ("vit", "cifar10"),
    "digits": ("convolutions", "mnist"),
    "200 classes": ("convolutions", "tiny_imagenet"),
}
ELSEWHERE_ROWS: list[Row] = [
    NONE, *noises(1.0, 5.0, 20.0, names=GAUSSIAN), ("gradient_sketch", {}),
    *prunings("pruning", 0.99, **FEEDBACK), *quantizations(2),
]  # fmt: skip
ELSEWHERE_ATTACKS = (INVERTING, CANDIDATES, ACCUMULATED)


def at_all_stages(attacks: Iterable[Attack]) -> dict[Attack, list[str]]:
    return {attack: list(STAGES) for attack in attacks}


class HeadRow(NamedTuple):
    """A head on a frozen encoder: of so many last layers, messages, and phrases per message; with
    noise of so many times what a phrase is clipped to; attacked by whom; of how many seeds, of
    which so many are attacked with candidates for messages of 16.
    """

    layers: int
    steps: int
    batch: int
    is_whitened: bool = False
    multipliers: tuple[float, ...] = (1.5,)
    attackers: tuple[str, ...] = ()
    seeds: int = SEEDS
    attacked_seeds: int = 1


ONLY_CANDIDATES, WITH_TAG = ("candidates",), ("candidates", "tag")
HEAD_ROWS = [
    HeadRow(4, 1600, 1024, True, (1.5, 2.0), ONLY_CANDIDATES, seeds=5, attacked_seeds=5),
    HeadRow(4, 1600, 1024),
    HeadRow(4, 6400, 256, True, attackers=ONLY_CANDIDATES),
    HeadRow(4, 6400, 256),
    HeadRow(4, 1600, 256, True, attackers=ONLY_CANDIDATES),
    HeadRow(4, 1600, 256, attackers=WITH_TAG),
    HeadRow(1, 1600, 64, attackers=WITH_TAG),
    HeadRow(1, 1600, 256, True),
    HeadRow(1, 1600, 256, attackers=ONLY_CANDIDATES),
    HeadRow(1, 25_600, 16, attackers=ONLY_CANDIDATES),
    HeadRow(1, 200, 16),
]
QUICK_HEAD = HeadRow(1, *QUICK.values(), True, attackers=WITH_TAG)
HEAD_GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
HEAD_RATE = 4e-3  # around which rates are tried
StagedAttacks = dict[Attack, tuple[int, dict, list[str]]]  # the last: at which stages
HEAD_ATTACKS: StagedAttacks = {
    CANDIDATES: (12, LISTED, list(STAGES)),
    ("candidates", 1): (40, LISTED, list(STAGES)),
    TAG: (2, {"steps": 500}, ["start", "end"]),
}
QUICK_HEAD_ATTACKS: StagedAttacks = {
    QUICK_CANDIDATES: (1, {"listed": 20}, list(STAGES)), TAG: (1, {"steps": 1}, ["end"]),
}  # fmt: skip
BY_CANDIDATES = (CANDIDATES[0], UNLABELED[0])
BY_ALL = (*BY_CANDIDATES, INVERTING[0])
IMAGE_HEAD_ROWS = [
    HeadRow(1, 1600, 4096, True, (2.0,), BY_ALL, attacked_seeds=3),
    HeadRow(1, 1600, 1024, True, (2.0,), BY_CANDIDATES, seeds=5, attacked_seeds=5),
    HeadRow(1, 600, 64, True, (2.0,)),
]
IMAGE_HEAD_ATTACKS: StagedAttacks = {
    **{(name, 16): (12, LISTED, list(STAGES)) for name in BY_CANDIDATES},
    **{(name, 1): (40, LISTED, list(STAGES)) for name in BY_CANDIDATES},
    INVERTING: (8, {"steps": 60, **SMOOTHED, "start": "uniform"}, ["start", "end"]),
}
QUICK_IMAGE_HEAD = HeadRow(1, *QUICK.values(), True, (2.0,), BY_ALL)
QUICK_IMAGE_HEAD_ATTACKS: StagedAttacks = {
    (UNLABELED[0], 4): (1, {"listed": 20}, ["end"]),
    QUICK_CANDIDATES: (1, {"listed": 20}, list(STAGES)),
    INVERTING: (*QUICK_IMAGE_ATTACKS[INVERTING], ["end"]),
}
