"""Rows of the tables. `size`: samples a step; `epochs` over the client's four samples."""

SGD = {"optimizer": "sgd", "rate": 0.01, "shuffle": False}

WORDS = {
    "one gradient of four": SGD | {"size": 4, "epochs": 1},
    "1 epoch, one text a step": SGD | {"size": 1, "epochs": 1},
    "1 epoch, ten times the rate": SGD | {"size": 1, "epochs": 1, "rate": 0.1},
    "2 epochs": SGD | {"size": 1, "epochs": 2},
    "4 epochs": SGD | {"size": 1, "epochs": 4},
}
CLIENTS, TEXTS = 5, 4
QUICK_WORDS = ["one gradient of four", "4 epochs"]
