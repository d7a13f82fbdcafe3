"""Rows of the tables, and what the paper has for them."""

from typing import Any, NamedTuple

from ..frontier.settings import BATCH, LBFGS, WORD
from ..lib.images import INVERTING

# sentences.py
CURVE = {
    f"alpha={alpha}, learning_rate={rate}": {"alpha": alpha, "learning_rate": rate}
    for alpha in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    for rate in (0.003, 0.01, 0.03)
}
PROJECTION = {
    "no projection (our default)": {},
    "`epsilon=0.05`": {"epsilon": 0.05},
    "`relative_epsilon=0.05`": {"relative_epsilon": 0.05},
    "`relative_epsilon=0.5`": {"relative_epsilon": 0.5},
}
SENTENCES = {"defaults": 200, "others": 20}
QUICK_SENTENCES = {"defaults": 3, "others": 2}

# in_training.py
BLENDED = {"iterations": 1, "learning_rate": 1e-9}
IN_TRAINING = {
    "α = 0.1, blended only": {"alpha": 0.1, **BLENDED},
    "α = 0.3, blended only": {"alpha": 0.3, **BLENDED},
    "α = 0.3, learning rate 0.001": {"alpha": 0.3, "learning_rate": 0.001},
    "α = 0.3, learning rate 0.01": {"alpha": 0.3, "learning_rate": 0.01},
    "α = 0.6, blended only": {"alpha": 0.6, **BLENDED},
    "α = 0.6, learning rate 0.001": {"alpha": 0.6, "learning_rate": 0.001},
    "α = 0.6, learning rate 0.01 (default)": {"alpha": 0.6, "learning_rate": 0.01},
}

# text.py: strengths; their accuracies are those of hiding_and_learning's rows of that name
TEXT: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "paper: pruning": ("pruning", {"ratio": 0.2}),
    "paper: gaussian_noise": ("gaussian_noise", {"scale": 0.001}),
    "paper: refiner": ("refiner", {"epsilon": 0.05}),  # not trained: two hours of two cores
    "gaussian_noise-1": ("gaussian_noise", {"relative_scale": 1.0}),
    "refiner": ("refiner", {}),
}
TEXT_ATTACKS = {
    "tag": {"steps": 500},
    "inverting_gradients": {"steps": 25, **LBFGS},
}
PAPER_TEXT = {  # accuracy and F1 in %, against TAG and against Inverting Gradients
    "paper: pruning": "90.7, 32.28; 90.8, 50.09",
    "paper: gaussian_noise": "90.6, 30.44; 90.5, 49.36",
    "paper: refiner": "90.9, 24.55; 91.1, 35.64",
}

# fine_tuned.py: the model that is attacked, and what goes on from it
FINE_TUNED: dict[str, Any] = {
    "defense": "none", "strength": {}, "seed": 0, "learning_rate": 1e-4, "steps": 1000, "batch": 32,
}  # fmt: skip
FINE_TUNED_SEEDS, FINE_TUNED_SIZES = 3, {"learning_rate": 5e-5, "steps": 100, "batch": BATCH}

# ablations.py and frontier.py, in the federation of federation.py
SEEDS, QUICK_SEEDS = 3, 2
ROUNDS, QUICK_ROUNDS = {"rounds": 500}, {"rounds": 1}
ATTACKED, QUICK_ATTACKED = {"samples": 16}, {"samples": 2}
OWN, QUICK_OWN = {"own": 4}, {"own": 1}  # images of an attacker who chooses by them
UNKNOWING, QUICK_STEPS = {"steps": 60, **INVERTING}, {"steps": 1}

BASE = {"alpha": 0.5}  # the paper's; beta 1, tau 0.95, ten iterations
ABLATIONS: dict[str, dict] = {
    "none": {},
    **{f"alpha={a}": {"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"tau={t}": BASE | {"tau": t} for t in (0.91, 0.93, 0.97, 1.0)},
    "element_wise=False": BASE | {"element_wise": False},
    **{f"epsilon={e}": BASE | {"epsilon": e} for e in (0.05, 0.1, 1.0)},
    **{f"beta={b}": BASE | {"beta": b} for b in (0.001, 0.1, 10.0, 1000.0)},
    **{f"iterations={i}": BASE | {"iterations": i} for i in (5, 20)},
}
QUICK_ABLATIONS = ("none", "alpha=0.9", "epsilon=0.05", "beta=1000.0")
# What the rows of ε show is their PSNR; twenty iterations take their time.
ONE_SEED = ("epsilon", "iterations=20")
PAPER_ABLATIONS = {  # PMM and PSNR of Tables 5 to 8 and 10
    "none": (100, ""),
    "alpha=0.0": (98.52, 21.24), "alpha=0.1": (95.45, 16.52), "alpha=0.3": (92.61, 14.99),
    "alpha=0.5": (90.69, 13.20), "alpha=0.7": (90.08, 12.53), "alpha=0.9": (89.34, 10.52),
    "tau=0.91": (90.98, 12.93), "tau=0.93": (90.82, 13.05), "tau=0.97": (90.46, 13.25),
    "tau=1.0": (89.28, 15.44), "element_wise=False": (85.32, 13.15),
    "beta=0.001": (91.93, 13.89), "beta=0.1": (91.06, 13.44), "beta=10.0": (90.00, 13.08),
    "beta=1000.0": (88.90, 12.04),
    "iterations=5": (85.61, 13.05), "iterations=20": (92.17, 13.45),
}  # fmt: skip

PARTITIONS = ("iid", "dirichlet")
FRONTIER: dict[str, list[dict]] = {
    "none": [{}],
    "refiner": [{"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)],
    "gaussian_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "laplace_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "optimal_noise": [{"relative_scale": s, "refresh_every": 10} for s in (0.03, 0.1, 0.3)],
    "pruning": [{"ratio": r} for r in (0.5, 0.7, 0.9, 0.99)],
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": [{"ratio": 0.5}],
}
KNOWN: dict[str, dict] = {  # what an attacker who knows the defense sets, beside the smoothing
    "pruning": {"match_nonzero": True},
    "soteria": {"leave_out": ["classifier"]},
}
FEWER_SEEDS = {("soteria", "iid"): 1, ("soteria", "dirichlet"): 0}

# pruning.py
SCORES = ("weight", "gradient", "product")
RATIOS, QUICK_RATIOS = (0.2, 0.4, 0.6, 0.8), (0.2, 1.0)
EPOCHS, QUICK_EPOCHS = 5, 1
PAPER_PRUNING = {
    "weight": {0.2: 51.35, 0.4: 48.61, 0.6: 46.80, 0.8: 42.72},
    "gradient": {0.2: 51.67, 0.4: 50.90, 0.6: 49.14, 0.8: 47.35},
    "product": {0.2: 52.88, 0.4: 51.45, 0.6: 50.96, 0.8: 49.54},
}

# layers.py
LAYER_NOISE: list[dict[str, float]] = [
    {"variance": 0.001}, {"variance": 0.1}, {"relative": 3.0}, {"variance": 0.01},
]  # fmt: skip
QUICK_LAYER_NOISE: list[dict[str, float]] = [{"variance": 0.1}, {"relative": 3.0}]
PAPER_LAYERS: dict[str, dict[int | str, float]] = {  # it has three layers, and a linear one
    "variance 0.001": {0: 48.94, 1: 49.92, 2: 50.84, "linear": 51.73},
    "variance 0.01": {0: 48.40, 1: 49.72, 2: 50.25, "linear": 51.60},
    "variance 0.1": {0: 47.56, 1: 49.55, 2: 49.54, "linear": 51.38},
}


# parts.py
class Part(NamedTuple):
    """A row: a defense, rates of which the best is taken, and how many messages."""

    defense: str
    strength: dict
    rates: tuple[float, ...] = (1e-4, 2e-4)
    steps: int = 200


PARTS = {  # the most telling first
    "none": Part("none", {}, (2e-4,)),
    "4 samples": Part("refiner", {"samples": 4}),
    "16 samples": Part("refiner", {"samples": 16}),
    "16, without feedback": Part("refiner", {"samples": 16, "error_feedback": False}),
    "16, a factor a sample": Part("refiner", {"samples": 16, "factors": "sample"}),
    "16, one factor": Part("refiner", {"samples": 16, "factors": "message"}),
    "16, a factor a sample, 2 steps": Part("refiner", {"samples": 16, "iterations": 2}),
    "none, 300 messages": Part("none", {}, (2e-4,), 300),
    "4 samples, 300 messages": Part("refiner", {"samples": 4}, (1e-4,), 300),
    "16 samples, 300 messages": Part("refiner", {"samples": 16}, (2e-4,), 300),
}
QUICK_PARTS, FIRST_PARTS, PARTS_SEEDS = ("none", "4 samples", "16, without feedback"), 6, 3
OF_WORDS = 2  # rows that who knows all other words attacks
WORDS, QUICK_WORDS = {WORD: (8, {"words": 300})}, {WORD: (1, {"words": 4})}

# warm.py
WARM_IMAGES, WARM_SEEDS, WARM_RATE = 2000, 3, 2e-3
WARM_NOISE_RATE = 4e-3  # the frontier's for these two
WARM_SIZES = {"steps": 600, "batch": 16}
WARM: dict[str, tuple[str, dict, float]] = {
    "none": ("none", {}, WARM_RATE),
    "10 iterations": ("refiner", BASE, WARM_RATE),
    "5 iterations": ("refiner", BASE | {"iterations": 5}, WARM_RATE),
    "10 iterations, 5 of what was seen before": (
        "refiner", BASE | {"warm_start": WARM_IMAGES}, WARM_RATE,
    ),
    "noise as large as the gradient": (
        "gaussian_noise", {"relative_scale": 1.0}, WARM_NOISE_RATE,
    ),
    "noise of five times": ("gaussian_noise", {"relative_scale": 5.0}, WARM_NOISE_RATE),
}  # fmt: skip

WARM_TRIED = {  # rates, and how they do on what was held out
    "5 iterations": (4e-3, 1e-3, 2e-3),
    "noise of five times": (2e-3, 4e-3, 8e-3),
    "none": (1e-3, 2e-3, 4e-3),
}
