"""Settings of the studies; those of quick runs replace some."""

# logistic.py
LOGISTIC = {
    "regularization": 1e-2, "std": 1e-2, "attacked_std": 1e-5, "trials": 1000, "targets": 400,
    "records": 60000,
}  # fmt: skip
QUICK_LOGISTIC = LOGISTIC | {"trials": 3, "targets": 8, "records": 400}

# predicts_attacks.py: strengths, all attacked together; a new defense is a new group
RATIOS = [0.3, 0.5, 0.7, 0.9]
IMAGE_GROUPS = [  # the gradient's RMS is about 0.2
    {"gaussian_noise": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "pruning": RATIOS}
]
TEXT_GROUPS = [  # about 0.01
    {"gaussian_noise": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "pruning": RATIOS}
]
QUICK_GROUPS = [{"gaussian_noise": [1e-3, 1e-2], "pruning": [0.5, 0.9]}]
PREDICTS = {"samples": 12, "side": 32, "lbfgs": 60, "tag": 300}
QUICK_PREDICTS = {"samples": 2, "side": 6, "lbfgs": 1, "tag": 2}

# directions.py; the gradient's norm is about 30
DIRECTIONS = {"samples": 3, "side": 32, "size": 0.3, "steps": 60}
QUICK_DIRECTIONS = {"samples": 2, "side": 6, "size": 0.3, "steps": 1}

# initializations.py
INITIALIZATIONS = ("uniform ±0.5", "normal, variance 0.5", "Kaiming", "Xavier")
NOISY = {"samples": 6, "side": 32, "variance": 1e-4, "steps": 60}
QUICK_NOISY = {"samples": 2, "side": 6, "variance": 1e-4, "steps": 1}
SPECTRUM = 100  # eigenvalues kept to be drawn

# unfairness.py
UNFAIR = {"per_class": 5, "side": 28, "variance": 1e-3, "training_steps": 5000, "steps": 60}
QUICK_UNFAIR = {"per_class": 1, "side": 6, "variance": 1e-3, "training_steps": 5, "steps": 1}

# epochs.py
NOISES = {
    "variance 1e-3": {"scale": 1e-3**0.5},
    "0.15 times the gradient": {"relative_scale": 0.15},
}
EPOCHS = {
    "epochs": [0, 1, 5, 20], "learned_from": 60000, "samples": 8, "own": 2, "steps": 30,
    "total_variation": [1e-3, 1e-1],
}  # fmt: skip
QUICK_EPOCHS = EPOCHS | {
    "epochs": [0, 1], "learned_from": 20, "samples": 2, "own": 1, "steps": 1,
    "total_variation": [1e-3, 1e-2],
}  # fmt: skip

# private_networks.py: (σ, C, learning rate); the first of each is Figure 6's
GRIDS = {
    "MNIST": [
        (0.5, 1, 1.0), (0.5, 1, 0.3), (0.5, 4, 0.1), (1, 1, 1.0), (1, 1, 0.3), (1, 4, 0.1),
        (2, 1, 0.3), (2, 4, 0.1), (5, 1, 0.3), (5, 4, 0.1),
    ],
    "CIFAR-10": [(0.5, 1, 0.3), (0.5, 1, 1.0), (0.5, 4, 0.1), (1, 1, 0.3), (2, 1, 0.3)],
}  # fmt: skip
QUICK_GRIDS = {"MNIST": [(0.5, 1, 0.3), (5, 4, 0.1)], "CIFAR-10": [(0.5, 1, 0.3)]}
PRIVATE = {
    "images": 2000, "batch": 100, "momentum": 0.5, "steps": [100, 200, 400],
    "stretches": [25] * 8 + [50] * 4, "probes": 1, "delta": 1e-5, "seeds": 3,
}  # fmt: skip
QUICK_PRIVATE = PRIVATE | {
    "images": 20,
    "batch": 4,
    "steps": [2, 4],
    "stretches": [1, 1, 2],
    "seeds": 2,
}
