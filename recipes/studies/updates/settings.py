"""Rows of the tables. `size`: samples per step; `epochs` over the client's four samples."""

SGD = {"optimizer": "sgd", "rate": 0.01, "shuffle": False}
ADAMW = {"optimizer": "adamw", "rate": 5e-5, "shuffle": False}

WORDS = {
    "one gradient of four": SGD | {"size": 4, "epochs": 1},
    "1 epoch, one text a step": SGD | {"size": 1, "epochs": 1},
    "1 epoch, ten times the rate": SGD | {"size": 1, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2},
    "4 epochs": SGD | {"size": 1, "epochs": 4},
}
CLIENTS, TEXTS = 5, 4
QUICK_WORDS = ["one gradient of four", "4 epochs"]

IMAGES = {
    "one gradient of two": SGD | {"size": 2, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2, "rate": 0.1},
    "2 epochs, ten times the rate": SGD | {"size": 1, "epochs": 2, "rate": 1.0},
    "2 epochs, order shuffled": SGD | {"size": 1, "epochs": 2, "rate": 0.1, "shuffle": True},
    "2 epochs of AdamW": ADAMW | {"size": 1, "epochs": 2, "rate": 1e-3},
}
MATCHED = {
    "through the steps": "steps",
    "every step on all images": "order unknown",
    "as one gradient": "one gradient",
}
PAIRS, STEPS = 3, 40
QUICK_STEPS, QUICK_IMAGES = 1, ["one gradient of two", "2 epochs of AdamW"]

TASKS = {
    "cifar10": {
        "task": "cifar10", "learning-rate": 2e-3, "optimizer": "adamw", "batch-size": 32,
        "local-steps": 4, "test-every": 5,
    },
    "sst2": {
        "task": "sst2", "learning-rate": 2e-4, "optimizer": "adamw", "batch-size": 4,
        "local-steps": 4, "test-every": 20,
    },
}  # fmt: skip


def _defense(name: str, **settings) -> dict:
    named = {f"gradguard.{name}.{key}": value for key, value in settings.items()}
    return {"gradguard.defense": name} | named


TRAINED = {
    "cifar10": {
        "none": _defense("none"),
        "gaussian_noise, relative_scale=0.5": _defense("gaussian_noise", relative_scale=0.5),
        "gaussian_noise, relative_scale=2": _defense("gaussian_noise", relative_scale=2.0),
        "optimal_noise, relative_scale=2": _defense("optimal_noise", relative_scale=2.0),
        "pruning, ratio=0.95": _defense("pruning", ratio=0.95),
        "pruning, ratio=0.95, error feedback as published": _defense(
            "pruning", ratio=0.95, error_feedback=True, min_batches=1
        ),
        "optimal_pruning, ratio=0.95": _defense("optimal_pruning", ratio=0.95),
        "quantization, bits=4": _defense("quantization", bits=4),
    },
    "sst2": {
        "none": _defense("none"),
        "gaussian_noise, relative_scale=2": _defense("gaussian_noise", relative_scale=2.0),
        "pruning, ratio=0.95": _defense("pruning", ratio=0.95),
    },
}
ROUNDS, QUICK_ROUNDS = 20, 1
SEEDS = {"cifar10": 5, "sst2": 1}
