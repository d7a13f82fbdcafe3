"""Defenses, strengths, rates and attackers of the frontier."""

from typing import NamedTuple

STEPS, BATCH, RATES_SEED, SEEDS = 200, 16, 100, 3
HELD_OUT, LENGTH = 500, 64
GRID = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)  # of learning rates, the same for all
SPREAD = 1  # how many rates on either side of the one to start from are tried
STAGES = {"start": 0.0, "middle": 0.5, "end": 1.0}  # of a client's own training
DELTA = 1e-5  # of (ε, δ)

# By strength; the first rows are what `--all` goes on from
_FIRST = {
    "none": [{}],
    "gaussian_noise": [{"relative_scale": 5.0}, {"relative_scale": 20.0}],
    "optimal_noise": [{"relative_scale": 5.0}, {"relative_scale": 20.0}],
}
PRIVATE: list[tuple[str, dict]] = [
    ("dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": m}) for m in (0.1, 0.5, 1.5)
]
_THEN = [
    ("gaussian_noise", {"relative_scale": 10.0}),
    ("optimal_noise", {"relative_scale": 10.0}),
    ("pruning", {"ratio": 0.99}),
    ("optimal_pruning", {"ratio": 0.99}),
    ("quantization", {"bits": 1}),
    ("refiner", {"samples": 4}),
    ("pruning", {"ratio": 0.99, "error_feedback": True}),
    ("optimal_pruning", {"ratio": 0.9}),
    ("optimal_pruning", {"ratio": 0.9, "error_feedback": True}),
    ("gaussian_noise", {"relative_scale": 100.0}),
    ("optimal_noise", {"relative_scale": 100.0}),
    ("quantization", {"bits": 2}),
    *(("pruning", {"ratio": r}) for r in (0.9, 0.999, 0.5)),
    ("optimal_noise", {"relative_scale": 5.0, "shape": "own"}),
    *(("optimal_pruning", {"ratio": r}) for r in (0.5, 0.999)),
    *(("quantization", {"bits": b}) for b in (4, 8)),
    *((name, {"relative_scale": 1.0}) for name in ("gaussian_noise", "optimal_noise")),
    *((name, {"relative_scale": 50.0}) for name in ("gaussian_noise", "optimal_noise")),
    ("optimal_noise", {"relative_scale": 20.0, "shape": "own"}),
    *(("optimal_pruning", {"ratio": r, "error_feedback": True}) for r in (0.99, 0.97, 0.95)),
    *(
        ("optimal_pruning", {"ratio": r, "error_feedback": True, "min_batches": 8})
        for r in (0.99, 0.97, 0.95, 0.9)
    ),
    ("pruning", {"ratio": 0.999, "error_feedback": True}),
    *PRIVATE,
    ("refiner", {"samples": 16}),
    ("refiner", {"samples": 64}),
    ("refiner", {"samples": 64, "min_batches": 8}),
    ("pruning", {"ratio": 0.95}),
    ("refiner", {"samples": 4, "min_batches": 8}),
    ("dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": 0.2}),
    ("dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": 0.05}),
    ("refiner", {"objective": "weighted"}),  # forty minutes of a core per training
]
FIRST = [(name, strength) for name, some in _FIRST.items() for strength in some]
ROWS = FIRST + _THEN
# Trained with more seeds than the others: what is recommended, and what comes near the bound
MORE_SEEDS = 5
MORE = [
    *FIRST,
    *(("refiner", {"samples": count}) for count in (4, 16)),
    ("refiner", {"samples": 4, "min_batches": 8}),
    ("optimal_pruning", {"ratio": 0.97, "error_feedback": True}),
    ("optimal_pruning", {"ratio": 0.99, "error_feedback": True, "min_batches": 8}),
]
ALL = {"action": "store_true", "help": "all rows, seeds and attackers, not only the first"}

# Messages of so many sentences, how many of them, and the attack's settings
SPAN, CANDIDATES, TAG = ("span", 1), ("candidates", 16), ("tag", 1)
LAMP, INVERTED_TEXT = ("lamp", 1), ("inverting_gradients_published", 1)
LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False}
UNLABELED = ("candidates without labels", 16)  # who does not know a message's labels
WORD = ("one word", 1)  # candidates of who knows all others of a sentence
GATHERED = ("gathered", 16)  # candidates of who waits for so many messages more
ATTACKS = {
    SPAN: (8, {}),
    CANDIDATES: (3, {"listed": 300}),
    GATHERED: (3, {"listed": 300, "later": 30}),
    ("candidates", 4): (4, {"listed": 300}),
    ("candidates", 1): (12, {"listed": 300}),
    TAG: (4, {"steps": 500}),
    INVERTED_TEXT: (4, {"steps": 25, **LBFGS}),
    LAMP: (4, {"steps": 300, "every": 100, "moves": 20}),
    ("span", 4): (3, {}),
}
# What comes first: so many seeds, trained and attacked by these at these stages
PASSES = [
    (1, {SPAN: ["end", "middle", "start"]}),
    (1, {CANDIDATES: ["end"], GATHERED: ["end"]}),
    (1, {("candidates", 1): ["end"], ("candidates", 4): ["end"]}),
    (SEEDS, {SPAN: ["end"]}),
    (1, {CANDIDATES: ["start"]}),
    (1, {TAG: ["end"]}),
    (SEEDS, {one: list(STAGES) for one in ATTACKS}),
]
QUICK = {"steps": 2, "batch": 4}
QUICK_CANDIDATES = ("candidates", 4)
QUICK_ATTACKS = {
    SPAN: (1, {}),
    QUICK_CANDIDATES: (1, {"listed": 20}),
    ("gathered", 4): (1, {"listed": 20, "later": 1}),
}
QUICK_ROWS = [
    ("none", {}),
    ("gaussian_noise", {"relative_scale": 20.0}),
    ("pruning", {"ratio": 0.9, "error_feedback": True}),
]

# Images
WIDTHS = (24, 48, 96)  # of the network's convolutions
IMAGE_SIZES, IMAGE_HELD_OUT = {"steps": 600, "batch": 64}, 2000
IMAGE_RATE = 4e-3  # undefended, about; the grid is around it
IMAGE_GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
IMAGE_FIRST: list[tuple[str, dict]] = [
    ("none", {}),
    ("gaussian_noise", {"relative_scale": 1.0}),
    ("gaussian_noise", {"relative_scale": 5.0}),
    ("optimal_noise", {"relative_scale": 1.0}),
    ("pruning", {"ratio": 0.99}),
]
IMAGE_ROWS: list[tuple[str, dict]] = [
    *IMAGE_FIRST,
    ("quantization", {"bits": 1}),
    ("gaussian_noise", {"relative_scale": 20.0}),
    ("optimal_noise", {"relative_scale": 5.0}),
    ("gaussian_noise", {"relative_scale": 0.1}),
    ("optimal_pruning", {"ratio": 0.9}),
    ("gaussian_noise", {"relative_scale": 100.0}),
    ("refiner", {}),
    ("pruning", {"ratio": 0.99, "error_feedback": True}),
    ("optimal_noise", {"relative_scale": 20.0}),
    ("pruning", {"ratio": 0.9}),
    ("optimal_noise", {"relative_scale": 0.1}),
    ("optimal_pruning", {"ratio": 0.99}),
    ("quantization", {"bits": 2}),
    ("optimal_noise", {"relative_scale": 100.0}),
    *PRIVATE,
    ("optimal_pruning", {"ratio": 0.99, "error_feedback": True}),
    ("refiner", {"samples": 64}),
    *(("quantization", {"bits": b}) for b in (4, 8)),
    *(("pruning", {"ratio": r}) for r in (0.5, 0.95, 0.999)),
    *(("optimal_pruning", {"ratio": r}) for r in (0.5, 0.95, 0.999)),
    *(("optimal_pruning", {"ratio": r, "error_feedback": True}) for r in (0.95, 0.9, 0.8)),
    *(
        ("optimal_pruning", {"ratio": r, "error_feedback": True, "min_batches": 8})
        for r in (0.99, 0.9)
    ),
    *(("dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": m}) for m in (0.2, 1.0)),
    ("refiner", {"samples": 256}),
    ("refiner", {"samples": 4}),
    ("refiner", {"objective": "weighted"}),  # over half an hour per training
]
INVERTING = ("inverting_gradients", 1)
UNAWARE = ("inverting_gradients of who knows no covariance", 1)
SMOOTHED = {"total_variation": [1e-3, 1e-2, 0.1, 0.3, 1.0], "own": 2}
IMAGE_ATTACKS = {
    **dict.fromkeys((INVERTING, UNAWARE), (8, {"steps": 20, **SMOOTHED})),
    CANDIDATES: (3, {"listed": 300}),
    GATHERED: (3, {"listed": 300, "later": 30}),
    ("candidates", 4): (4, {"listed": 300}),
    ("candidates", 1): (12, {"listed": 300}),
}
IMAGE_PASSES = [
    (1, {INVERTING: ["end"], CANDIDATES: ["end"], GATHERED: ["end"]}),
    (1, {INVERTING: ["start", "middle"], CANDIDATES: ["start"], GATHERED: ["start"]}),
    (SEEDS, {INVERTING: ["end"], CANDIDATES: ["end"]}),
    (1, {("candidates", 4): ["end"], ("candidates", 1): ["end"]}),
    (1, {CANDIDATES: list(STAGES)}),
    (SEEDS, {UNAWARE: ["end"]}),
    (SEEDS, {INVERTING: list(STAGES)}),
]
QUICK_IMAGE_ATTACKS = {
    INVERTING: (1, {"steps": 1, "total_variation": [1e-3, 1e-2], "own": 1}),
    ("candidates", 4): (1, {"listed": 20}),
    ("gathered", 4): (1, {"listed": 20, "later": 1}),
}


# Other networks, and other images
class Elsewhere(NamedTuple):
    """A network, and the option that names its images."""

    network: str
    images: str


ELSEWHERE = {
    "ResNet": Elsewhere("resnet", "cifar10"),
    "ViT": Elsewhere("vit", "cifar10"),
    "digits": Elsewhere("convolutions", "mnist"),
    "200 classes": Elsewhere("convolutions", "tiny_imagenet"),
}
ELSEWHERE_ROWS: list[tuple[str, dict]] = [
    ("none", {}),
    *(("gaussian_noise", {"relative_scale": r}) for r in (1.0, 5.0, 20.0)),
    ("refiner", {}),
    ("pruning", {"ratio": 0.99, "error_feedback": True}),
    ("quantization", {"bits": 2}),
]
ELSEWHERE_PASSES = [
    (1, {CANDIDATES: ["end"]}),
    (SEEDS, {}),
    (1, {INVERTING: ["start", "end"]}),
    (1, {CANDIDATES: list(STAGES), GATHERED: ["start", "end"], INVERTING: list(STAGES)}),
    (SEEDS, {CANDIDATES: list(STAGES)}),
]

# A head on a frozen encoder
PUBLIC = 5000  # sentences by which embeddings are whitened


class HeadRow(NamedTuple):
    """Of so many last layers, messages, and phrases per message; with noise of so many times what a
    phrase is clipped to; attacked by whom; of how many seeds, of which so many are attacked by
    lists of messages of 16.
    """

    layers: int
    steps: int
    batch: int
    whitened: bool = False
    multipliers: tuple[float, ...] = (1.5,)
    by: tuple[str, ...] = ()
    seeds: int = SEEDS
    attacked: int = 1


HEAD_ROWS = [
    HeadRow(4, 1600, 1024, True, (1.5, 2.0), ("candidates",), seeds=5, attacked=5),
    HeadRow(4, 1600, 1024),
    HeadRow(4, 6400, 256, True, by=("candidates",)),
    HeadRow(4, 6400, 256),
    HeadRow(4, 1600, 256, True, by=("candidates",)),
    HeadRow(4, 1600, 256, by=("candidates", "tag")),
    HeadRow(1, 1600, 64, by=("candidates", "tag")),
    HeadRow(1, 1600, 256, True),
    HeadRow(1, 1600, 256, by=("candidates",)),
    HeadRow(1, 25_600, 16, by=("candidates",)),
    HeadRow(1, 200, 16),
]
QUICK_HEAD = HeadRow(1, *QUICK.values(), True, by=("candidates", "tag"))
HEAD_GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
HEAD_RATE = 4e-3  # around which rates are tried
HEAD_ATTACKS: dict[tuple[str, int], tuple[int, dict, list[str]]] = {  # the last: at which stages
    CANDIDATES: (12, {"listed": 300}, list(STAGES)),
    ("candidates", 1): (40, {"listed": 300}, list(STAGES)),
    TAG: (2, {"steps": 500}, ["start", "end"]),
}
FILTERS, PUBLIC_IMAGES = 200, 3000  # of features; images by which they are made and whitened
BY_LISTS = (CANDIDATES[0], UNLABELED[0])
IMAGE_HEAD_ROWS = [
    HeadRow(1, 1600, 4096, True, (2.0,), (*BY_LISTS, "inverting_gradients"), attacked=3),
    HeadRow(1, 1600, 1024, True, (2.0,), BY_LISTS, seeds=5, attacked=5),
    HeadRow(1, 600, 64, True, (2.0,)),
]
IMAGE_HEAD_ATTACKS: dict[tuple[str, int], tuple[int, dict, list[str]]] = {
    CANDIDATES: (12, {"listed": 300}, list(STAGES)),
    UNLABELED: (12, {"listed": 300}, list(STAGES)),
    ("candidates", 1): (40, {"listed": 300}, list(STAGES)),
    (UNLABELED[0], 1): (40, {"listed": 300}, list(STAGES)),
    INVERTING: (
        8,
        {"steps": 60, **SMOOTHED, "start": "uniform"},
        ["start", "end"],
    ),
}
QUICK_IMAGE_HEAD = HeadRow(1, *QUICK.values(), True, (2.0,), (*BY_LISTS, "inverting_gradients"))
QUICK_IMAGE_HEADS: dict[tuple[str, int], tuple[int, dict, list[str]]] = {
    (UNLABELED[0], 4): (1, {"listed": 20}, ["end"]),
    ("candidates", 4): (1, {"listed": 20}, list(STAGES)),
    INVERTING: (*QUICK_IMAGE_ATTACKS[INVERTING], ["end"]),
}
QUICK_HEADS: dict[tuple[str, int], tuple[int, dict, list[str]]] = {
    ("candidates", 4): (1, {"listed": 20}, list(STAGES)),
    TAG: (1, {"steps": 1}, ["end"]),
}
