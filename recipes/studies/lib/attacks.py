"""Attacks as stored cells name them, and where they compute."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_gradguard.attacks import Attack, Observation, make_attack


def attack_of(name: str, **settings) -> Attack:
    """An attack by the name and settings of a cell: `inverting_gradients` is there the published
    one, with what was changed of it.
    """
    published = {"inverting_gradients": "inverting_gradients_published"}
    return make_attack(published.get(name, name), **settings)


def observe(
    model: nn.Module, batch: Mapping[str, Tensor], message: Mapping[str, Tensor], **grants: Any
) -> Observation:
    """What the server sees of a batch's message, its labels, and what is granted beside them."""
    samples = batch["input_ids" if "input_ids" in batch else "pixel_values"]
    return Observation(model, message, tuple(samples.shape), labels=batch["labels"], **grants)


def generator_for(observation: Observation, seed: int) -> torch.Generator:
    """Where the attack computes."""
    return torch.Generator(next(iter(observation.gradient.values())).device).manual_seed(seed)


def token_ids_of(attack: Attack, observation: Observation, seed: int) -> list[list[int]]:
    """None where a pruning left nothing of the layers that a text attack reads."""
    try:
        return attack(observation, generator_for(observation, seed)).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        return [[] for _ in range(observation.batch_size)]
