"""Attacks as stored figures name them."""

import torch

from hf_gradguard.attacks import Attack, Observation, make_attack


def attack_of(name: str, **settings) -> Attack:
    """An attack by the name and settings of a cell: `inverting_gradients` is there the published
    one, with what was changed of it.
    """
    published = {"inverting_gradients": "inverting_gradients_published"}
    return make_attack(published.get(name, name), **settings)


def generator_there(seen: Observation, seed: int) -> torch.Generator:
    """Where the attack computes."""
    return torch.Generator(next(iter(seen.gradient.values())).device).manual_seed(seed)


def ids_found(attack: Attack, seen: Observation, seed: int) -> list[list[int]]:
    """A text attack's token ids; none where a pruning left nothing of the layers that it reads."""
    try:
        return attack(seen, generator_there(seen, seed)).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        return [[] for _ in range(seen.batch_size)]
