"""Attacks as stored figures name them."""

from hf_gradguard.attacks import Attack, make_attack


def attack_of(name: str, **settings) -> Attack:
    """An attack by the name and settings of a cell: `inverting_gradients` is there the published
    one, with what was changed of it.
    """
    published = {"inverting_gradients": "inverting_gradients_published"}
    return make_attack(published.get(name, name), **settings)
