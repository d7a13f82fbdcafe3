"""Rows (defenses at three strengths), messages of how many sentences, among how many, and who
searches.
"""

RATIOS = [{"ratio": 0.5}, {"ratio": 0.9}, {"ratio": 0.99}]
NOISE = [{"relative_scale": 1.0}, {"relative_scale": 10.0}, {"relative_scale": 100.0}]
DEFENSES: dict[str, list[dict]] = {
    "none": [{}],
    "gaussian_noise": NOISE,
    "pruning": RATIOS,
    "quantization": [{"bits": 4}, {"bits": 2}, {"sign_only": True}],
    "refiner": [{"alpha": 0.3}, {"alpha": 0.6}, {"alpha": 0.9}],
    "optimal_noise": NOISE,
    "laplace_noise": NOISE,
    "optimal_pruning": RATIOS,
    "soteria": RATIOS,
    "dp_sgd": [{"clip": 1.0, **noise} for noise in NOISE],
    "optimal_dp_sgd": [{"clip": 0.01, **noise} for noise in NOISE],
}
QUICK_DEFENSES = ("none", "gaussian_noise", "optimal_noise", "pruning", "quantization")
STATES = ("initial", "trained")
MESSAGES = {1: 6, 16: 2, 4: 3}  # messages of so many sentences
PLAN = {"layers": 2, "candidates": 48, "train_steps": 200, "network_steps": 400, "seed": 0}
QUICK = {"layers": 2, "candidates": 6, "train_steps": 1, "network_steps": 400, "seed": 0}

# Among a thousand: messages by size; and attackers who have no list, beside them
THOUSAND: dict[str, list[dict]] = DEFENSES | {  # Refiner's default, which sends a first message
    "refiner": [{"min_batches": 1}, {"alpha": 0.3}, {"alpha": 0.9}]
}
THOUSAND_FIRST = (
    "none", "gaussian_noise", "optimal_noise", "pruning", "optimal_pruning", "quantization",
)  # fmt: skip
THOUSAND_MESSAGES = {16: 1, 1: 3, 4: 1}
SEARCHES: dict[str, dict] = {
    "span": {},
    "tag": {"steps": 500},
    "lamp": {"steps": 300, "every": 100, "moves": 20},
}
SEARCHED = 3  # messages of one sentence
