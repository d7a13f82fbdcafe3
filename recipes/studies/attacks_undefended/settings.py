"""Rows of the tables: attacks and their settings."""

from ..lib.images import INVERTING

DATA = ("cifar10", "mnist")
IMAGES = {
    "dlg": {"steps": 100, "start": "uniform"},
    "idlg": {"steps": 100, "start": "uniform"},
    "inverting_gradients": {"steps": 100, **INVERTING},
    "inverting_gradients, as published": {"steps": 4800},
}
NETWORKS = {  # and their batches
    "LeNet": (4, 8, 16),
    "ResNet": (4, 8),
    "ResNet in training mode": (4, 8),
    "ViT": (4, 8),
}
QUICK_BATCHES, SINGLE, PUBLISHED_STEPS = (2,), 4, 1200
DEEP_STEPS = (100, 500)
SMOOTHED = {  # noise, and weights of total variation around the best
    0.0: (1e-4, 1e-2, 3e-2),
    0.1: (1e-4, 1e-3, 1e-2, 3e-2),
    1.0: (1e-4, 1e-2, 3e-2, 1e-1, 3e-1),
}
QUICK_SMOOTHED = {1.0: (1e-4, 1e-1)}
TEXT = {"tag": {"steps": 1500}}
FULL = {"images": 16, "sentences": 20}
QUICK = {"images": 2, "sentences": 2}
RANKS, STEPS_BEFORE = (8, 16), (0, 10)
ADAPTED = {
    ("bert", "classifier"): ("query", "value"),
    ("llama", "language model"): ("q_proj", "v_proj"),
    ("gpt2", "language model"): ("c_attn",),
}  # fused layers as they are
LONG = (
    "She put the glass on the table and the plate on the shelf before her brother came home from "
    "the village."
)
SENTENCES = [  # written for this table, of the kind that tests of grammar use
    "The old sailor told the children a story about the sea.",
    "Mary expected her brother to leave before the meeting ended.",
    "It is likely that the bridge will be closed in winter.",
    "The book that I bought yesterday has no pictures.",
    "Who did the teacher say would win the prize?",
    "John tried to open the door, but the key was too small.",
    "We wondered whether the train had already left the station.",
    "The more you read, the better you write.",
    "Nobody believed that the mayor had paid for the dinner.",
    "She put the glass on the table and the plate on the shelf.",
    "The dogs that chased the cat were tired.",
    "He sent his sister a letter from the village.",
    "There seems to be a problem with the engine of the car.",
    "Bill can play the piano better than his father can.",
    "The committee has not decided which of the plans it prefers.",
    "After the rain stopped, the farmers went back to the field.",
    "What surprised me was that the answer was so simple.",
    "The river froze solid in a single night.",
    "I do not know the man who lives next to the bakery.",
    "Every student must hand in the paper by Friday at noon.",
    "The window was broken by a ball that somebody had thrown.",
    "Anna and her cousin painted the house green.",
    "Not until midnight did the guests begin to leave.",
    "The news about the storm made everyone in the town nervous.",
    "His habit of singing in the kitchen annoys the neighbors.",
    "The horse raced across the field and jumped over the fence.",
    "If the weather is fine, we will have lunch in the garden.",
    "The doctor whom she trusts most works in another city.",
    "They gave the actor who forgot his lines a second chance.",
    "The cake was eaten before the party had even started.",
    "To find a good apartment in this town is hard.",
    "The lawyer asked the witness where he had been that evening.",
]
