"""Rows of the tables."""

# attacked.py
PRUNINGS = {
    f"{name} {r}": {"ratio": r}
    for r in (0.5, 0.7, 0.8, 0.9, 0.99)
    for name in ("pruning", "optimal_pruning")
}
FEWER = {row: strength for row, strength in PRUNINGS.items() if strength["ratio"] in (0.7, 0.9)}
NOISES = {
    f"{name} {std}": {"scale": std, **clip}
    for std in (0.001, 0.01, 0.1)
    for name, clip in (("dp_sgd", {"clip_by": "coordinate"}), ("optimal_dp_sgd", {}))
}
SEEDS = {"mnist": 16, "cifar10": 6}
ROWS = {"mnist": {"none": {}, **PRUNINGS, **NOISES}, "cifar10": {"none": {}, **FEWER}}
SETTINGS = {
    "mnist": {
        "network": ["gradguard_leaky_convnet", {}],
        "learning_rate": 1e-3, "steps": 5, "client_batch": 16, "attacked": 4, "updates": 400,
    },
    "cifar10": {
        "network": ["gradguard_deep_convnet", {"width": 32, "batch_norm": False}],
        "learning_rate": 5e-4, "steps": 5, "client_batch": 2, "attacked": 2, "updates": 200,
    },
}  # fmt: skip
QUICK = {"steps": 1, "client_batch": 2, "attacked": 2, "updates": 3}
QUICK_NETWORKS = {
    "mnist": ["gradguard_leaky_convnet", {}],
    "cifar10": ["gradguard_deep_convnet", {"width": 4}],
}
QUICK_SEEDS, QUICK_PROBES = 2, 3
AGAINST = {row: [row.removeprefix("optimal_")] for row in NOISES if row.startswith("optimal_")}
AGAINST |= {
    "optimal_pruning 0.7": ["pruning 0.7", "pruning 0.9"],
    "optimal_pruning 0.8": ["pruning 0.8", "pruning 0.9"],
}
CLIENTS = 4

# training.py
EPOCH = 64  # steps
EQUAL = {"scale": 0.1, "clip": 1.0}
PARTS = {
    "noise": {
        "rows": {"none": {}, "dp_sgd": {**EQUAL, "clip_by": "coordinate"}, "optimal_dp_sgd": EQUAL},
        "learning_rate": 1e-3,
        "steps": 8 * EPOCH,
    },
    "pruning": {
        "rows": {
            "none": {},
            "pruning 0.8": {"ratio": 0.8},
            "pruning 0.9": {"ratio": 0.9},
            "optimal_pruning 0.8": {"ratio": 0.8},
        },
        "learning_rate": 5e-4,
        "steps": 3 * EPOCH,
    },
}
TRAINED_SEEDS = 5
PAPER = {"noise: dp_sgd": 0.886, "noise: optimal_dp_sgd": 0.910}  # Appendix D.2: test accuracies
TRAINED_AGAINST = {
    "optimal_dp_sgd": ["dp_sgd"],
    "optimal_pruning 0.8": ["pruning 0.8", "pruning 0.9"],
}
