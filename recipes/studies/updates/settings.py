"""Rows of the tables. `size`: samples a step; `epochs` over the client's four samples."""

SGD = {"optimizer": "sgd", "rate": 0.01, "shuffle": False}
ADAMW = {"optimizer": "adamw", "rate": 5e-5, "shuffle": False}

WORDS = {
    "one gradient of four": SGD | {"size": 4, "epochs": 1},
    "1 epoch, one text a step": SGD | {"size": 1, "epochs": 1},
    "1 epoch, ten times the rate": SGD | {"size": 1, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2},
    "4 epochs": SGD | {"size": 1, "epochs": 4},
    "4 epochs, ten times the rate": SGD | {"size": 1, "epochs": 4, "rate": 0.1},
    "4 epochs, order shuffled": SGD | {"size": 1, "epochs": 4, "shuffle": True},
    "1 epoch of AdamW": ADAMW | {"size": 1, "epochs": 1},
    "4 epochs of AdamW": ADAMW | {"size": 1, "epochs": 4},
}
CLIENTS, TEXTS = 5, 4
QUICK_WORDS = ["one gradient of four", "4 epochs", "1 epoch of AdamW"]

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
PAIRS, STEPS = 4, 60
QUICK_STEPS = 2
