"""Rows (defenses at three strengths) and columns (attacks, and what attackers know)."""

from ..lib.images import INVERTING, SMOOTHING

# Rows of equal relative_scale add equal noise power; rows of equal ratio zero equally many
# coordinates.
RATIOS = [{"ratio": 0.5}, {"ratio": 0.9}, {"ratio": 0.99}]
BITS = [{"bits": 8}, {"bits": 4}, {"bits": 2}]
TEXT_NOISE = [{"relative_scale": 0.1}, {"relative_scale": 0.5}, {"relative_scale": 2.0}]
IMAGE_NOISE = [{"relative_scale": 0.01}, {"relative_scale": 0.1}, {"relative_scale": 1.0}]
TEXT_DEFENSES: dict[str, list[dict]] = {
    "none": [{}],
    "gaussian_noise": TEXT_NOISE,
    "laplace_noise": TEXT_NOISE,
    "optimal_noise": TEXT_NOISE,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in TEXT_NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in TEXT_NOISE],
    "pruning": RATIOS,
    "optimal_pruning": RATIOS,
    "quantization": BITS,
    "soteria": RATIOS,
    "refiner": [{"alpha": 0.3}, {"alpha": 0.6}, {"alpha": 0.9}],
}
IMAGE_DEFENSES = TEXT_DEFENSES | {
    "gaussian_noise": IMAGE_NOISE,
    "laplace_noise": IMAGE_NOISE,
    "optimal_noise": IMAGE_NOISE,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in IMAGE_NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in IMAGE_NOISE],
    "refiner": [{"alpha": 0.1}, {"alpha": 0.5}, {"alpha": 0.9}],
}

TEXT = {
    "defenses": TEXT_DEFENSES,
    "attacks": {
        "tag": {"steps": 300},
        "span": {},
        "inverting_gradients": {
            "steps": 300, "learning_rate": 0.01, "signed": False, "schedule": "linear", "warmup": 50
        },
        "lamp": {"steps": 300, "every": 100, "moves": 20},
    },
    "chosen": {},  # settings that an attacker who knows the defense has
    "again": {"start": "tokens", "restarts": 4},  # how one who knows Refiner starts
    "samples": {"samples": 20, "seed": 0},
    "refiner": {"network_steps": 1000},
}  # fmt: skip
IMAGES = {
    "defenses": IMAGE_DEFENSES,
    "attacks": {
        "inverting_gradients": {"steps": 60, "patience": 5, **INVERTING},
        "idlg": {"steps": 100, "patience": 15, "start": "uniform"},
    },
    "chosen": {"inverting_gradients": SMOOTHING},
    "again": {"restarts": 4},
    "samples": {"samples": 16, "own": 4, "seed": 0},
    "refiner": {},
}

# What attackers who know the defense know
NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8
CLIPS = {"dp_sgd": "clip_norm", "optimal_dp_sgd": "clip_coordinate"}

# One defense of each kind that attackers know, at one strength, and a step of each attack
QUICK_DEFENSES = ("none", "optimal_noise", "pruning", "quantization", "soteria", "refiner")
QUICK_SAMPLES = {"samples": 2, "own": 1}
QUICK_NETWORK_STEPS, QUICK_UPLOADS = 400, 2
