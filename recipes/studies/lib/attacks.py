"""Attacks as stored cells name them, and where they compute."""

import torch

from hf_gradguard.attacks import Attack, Observation, make_attack


def attack_of(name: str, **settings) -> Attack:
    """An attack by the name and settings of a cell: `inverting_gradients` is there the published
    one, with what was changed of it.
    """
    published = {"inverting_gradients": "inverting_gradients_published"}
    return make_attack(published.get(name, name), **settings)


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
