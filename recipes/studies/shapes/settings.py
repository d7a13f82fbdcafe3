"""Rows of the tables."""

# quality.py
EVERY = 10  # steps between messages that averages take in
EACH = {"refresh_every": 1}
SHAPES = {
    "uniform": ["gaussian_noise", {}],
    "public": ["optimal_noise", {"shape": "public", **EACH}],
    "public, by tensor": ["optimal_noise", {"shape": "public", "granularity": "layer", **EACH}],
    "past": ["optimal_noise", {"shape": "past", **EACH}],
    "past, by tensor": ["optimal_noise", {"shape": "past", "granularity": "layer", **EACH}],
    "own, 1 probe": ["optimal_noise", {"shape": "own", "num_probes": 1}],
    "own, 10 probes": ["optimal_noise", {"shape": "own", "num_probes": 10}],
}
BEST = "averages of the evaluated batches"
TASKS = {
    "minilm": {"learning_rate": 5e-5, "steps": (0, 20, 100), "sizes": (16, 1)},
    "vit": {"learning_rate": 1e-3, "steps": (0, 100), "sizes": (16,)},
    "resnet": {"learning_rate": 1e-3, "steps": (0, 100), "sizes": (16,)},
}
SEEDS, BATCHES, PROBES = 1, 3, {16: 12, 1: 48}
BATCH = 16  # that training takes

# estimates.py
AVERAGES = {  # shape, and messages between those that are learned from
    f"{shape}, every {every}th message": [shape, every]
    for shape in ("public", "past")
    for every in (10, 20)
}
ESTIMATES = {  # probes, and whether they are squared sample by sample
    "own, split, 1 probe": [1, True],
    "own, split, 2 probes": [2, True],
    "own, split, 3 probes": [3, True],
    "own, whole, 10 probes": [10, False],
}

# naming.py
MESSAGES = {
    "optimal_noise, own": ["optimal_noise", {"shape": "own", "num_probes": 1}],
    "optimal_noise, past": ["optimal_noise", {"shape": "past", "refresh_every": 1}],
    "optimal_noise, public": ["optimal_noise", {"shape": "public", "refresh_every": 1}],
    "gaussian_noise": ["gaussian_noise", {}],
    "optimal_pruning, own": ["optimal_pruning", {"shape": "own", "num_probes": 1}],
    "optimal_pruning, public": ["optimal_pruning", {"shape": "public", "refresh_every": 1}],
    "pruning": ["pruning", {}],
}
STRENGTHS = {"noise": [{"relative_scale": s} for s in (1, 10, 100)], "pruning": [{"ratio": 0.9}]}
TARGETS = ("this message", "the message before")
CANDIDATES, TRIALS, HISTORY, SENTENCES = 28, 20, 4, 4000
