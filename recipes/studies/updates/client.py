"""A client that trains as people do: with an optimizer of torch, for some epochs."""

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_gradguard.attacks import Observation

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def train(
    model: nn.Module, batch: Mapping[str, Tensor], cell: dict, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Weights before and after, and the number of steps; the model is left as it was. Token
    embeddings are not trained.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for name, p in model.named_parameters() if "word_embeddings" not in name]
    optimizer = OPTIMIZERS[cell["optimizer"]](trained, lr=cell["rate"])
    order, draws, steps = list(range(len(batch["labels"]))), random.Random(seed), 0
    for _ in range(cell["epochs"]):
        if cell["shuffle"]:
            draws.shuffle(order)
        for first in range(0, len(order), cell["size"]):
            rows = order[first : first + cell["size"]]
            optimizer.zero_grad()
            model(**{key: value[rows] for key, value in batch.items()}).loss.backward()
            optimizer.step()
            steps += 1
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(before, strict=False)
    model.zero_grad()
    return before, after, steps


def observed(
    model: nn.Module,
    weights: tuple[dict[str, Tensor], dict[str, Tensor], int],
    cell: dict,
    batch_size: int | None,
    **grants,
) -> Observation:
    before, after, steps = weights
    return Observation.from_update(
        model, before, after, learning_rate=cell["rate"], steps=steps, batch_size=batch_size,
        optimizer=cell["optimizer"], **grants,
    )  # fmt: skip
