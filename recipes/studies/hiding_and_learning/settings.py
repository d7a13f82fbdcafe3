"""Rows of the tables."""

# span.py: what noise is a share of, and how large
OWN, WHOLE = "each matrix's own RMS", "the whole gradient's RMS"
NOISE = [0.0, 0.015, 0.05, 0.15, 0.5, 1.5]
STRENGTHS = {
    "gaussian_noise": ("relative_scale", [0.01, 0.1, 1.0]),
    "optimal_noise": ("relative_scale", [0.01, 0.1, 1.0]),
    "pruning": ("ratio", [0.5, 0.9, 0.99]),
    "optimal_pruning": ("ratio", [0.5, 0.9, 0.99]),
    "refiner": ("iterations", [1, 10, 30]),
}
DEFENSES = {
    f"{name} {key}={v}": {"defense": [name, {key: v}]}
    for name, (key, values) in STRENGTHS.items()
    for v in values
}
ONE = {
    "model": "MiniLM", "size": 1, "batches": 10, "noise": None, "defense": ["none", {}],
    "attack": {},
}  # fmt: skip
SPAN = {
    "MiniLM, batch 1": ONE | {"batches": 20},
    "MiniLM, batch 2": ONE | {"size": 2, "batches": 5},
    "MiniLM, batch 4": ONE | {"size": 4, "batches": 5},
    "MiniLM, batch 8": ONE | {"size": 8, "batches": 5},
    "GPT-2 of 2 layers, batch 4": ONE | {"model": "GPT-2", "size": 4, "batches": 5},
    **{f"{v:.1%} of {unit}": ONE | {"noise": [v, unit]} for v in NOISE for unit in (OWN, WHOLE)},
    **{
        f"{v:.1%} of {OWN}, threshold 0.01": ONE
        | {"noise": [v, OWN], "attack": {"threshold": 0.01}}
        for v in NOISE
    },
    **{label: ONE | row for label, row in DEFENSES.items()},
    **{
        f"{label}, completed": ONE | row | {"attack": {"complete": True}}
        for label, row in DEFENSES.items()
        if "pruning" in label
    },
}
QUICK_SPAN = (
    "MiniLM, batch 1", "MiniLM, batch 2", "GPT-2 of 2 layers, batch 4",
    *(f"{v} of {unit}" for v in ("0.0%", "150.0%") for unit in (OWN, WHOLE)),
    f"1.5% of {OWN}, threshold 0.01", "gaussian_noise relative_scale=0.1",
    "optimal_noise relative_scale=0.1", "pruning ratio=0.99", "pruning ratio=0.9",
    "pruning ratio=0.9, completed", "optimal_pruning ratio=0.5, completed", "refiner iterations=1",
)  # fmt: skip

# accuracy.py
OPTIMAL = {"num_probes": 10, "refresh_every": 10}
NETWORK = {"evaluation_network": "text-evaluation-network-minilm-l6"}
ACCURACY: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "gaussian_noise-1": ("gaussian_noise", {"relative_scale": 1.0}),
    "optimal_noise-1": ("optimal_noise", {"relative_scale": 1.0, **OPTIMAL}),
    "gaussian_noise-5": ("gaussian_noise", {"relative_scale": 5.0}),
    "optimal_noise-5": ("optimal_noise", {"relative_scale": 5.0, **OPTIMAL}),
    "pruning-0.9": ("pruning", {"ratio": 0.9}),
    "optimal_pruning-0.9": ("optimal_pruning", {"ratio": 0.9, **OPTIMAL}),
    "pruning-0.99": ("pruning", {"ratio": 0.99}),
    "optimal_pruning-0.99": ("optimal_pruning", {"ratio": 0.99, **OPTIMAL}),
    "refiner": ("refiner", NETWORK),
    "refiner-slow": ("refiner", {"learning_rate": 0.001, "iterations": 4, **NETWORK}),
    "paper: pruning": ("pruning", {"ratio": 0.2}),  # Refiner paper, Table 13
    "paper: gaussian_noise": ("gaussian_noise", {"scale": 0.001}),
}
UNTIMED = ("refiner", "refiner-slow", "paper: pruning", "paper: gaussian_noise")
QUICK = ("none", "pruning-0.9")
STEPS = {"accuracy": 300, "seconds": 20, "quick": 2}

# picture.py: a row of SPAN, and the row of ACCURACY with the same defense at the same strength
PAIRS = {
    "MiniLM, batch 1": "none",
    "gaussian_noise relative_scale=1.0": "gaussian_noise-1",
    "optimal_noise relative_scale=1.0": "optimal_noise-1",
    "pruning ratio=0.9": "pruning-0.9",
    "pruning ratio=0.99": "pruning-0.99",
    "optimal_pruning ratio=0.9": "optimal_pruning-0.9",
    "optimal_pruning ratio=0.99": "optimal_pruning-0.99",
    "refiner iterations=10": "refiner",
}
