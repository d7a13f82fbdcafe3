"""Layers are numbered from the input to the loss."""

from __future__ import annotations

import pytest
from helpers import make_task

from hf_gradguard.gradient_map.parameters import layer_numbers, shared_parameters


@pytest.mark.parametrize(
    ("task", "layers"),
    [
        ("bert", 4),
        ("bert_lora", 3),
        ("gpt2", 4),
        ("llama", 3),
        ("distilbert", 4),
        ("vit", 4),
        ("t5", 4),
    ],
)
def test_blocks_of_hugging_face_models(task: str, layers: int) -> None:
    """Two blocks, and what stands before and after them. Where all embeddings are withheld or
    frozen, nothing stands before.

    T5 has two stacks of two blocks and one, and a norm after each; its head is tied to the
    embeddings.
    """
    names = list(shared_parameters(make_task(task)[0]))
    numbers = layer_numbers(names)
    assert list(numbers) == names
    assert list(numbers.values()) == sorted(numbers.values())
    assert set(numbers.values()) == set(range(1, max(numbers.values()) + 1))
    if task != "t5":
        assert max(numbers.values()) == layers


def test_a_blocks_parameters_are_one_layer() -> None:
    numbers = layer_numbers(shared_parameters(make_task("bert")[0]))
    assert {n for name, n in numbers.items() if ".layer.0." in name} == {2}
    assert {n for name, n in numbers.items() if ".layer.1." in name} == {3}
    assert numbers["bert.embeddings.LayerNorm.weight"] == 1
    assert numbers["bert.pooler.dense.bias"] == numbers["classifier.weight"] == 4


def test_modules_are_layers_where_there_are_no_blocks() -> None:
    names = ["first.weight", "first.bias", "second.weight", "head.weight", "head.bias"]
    assert list(layer_numbers(names).values()) == [1, 1, 2, 3, 3]


def test_numbered_modules_are_blocks() -> None:
    assert list(
        layer_numbers(["body.0.weight", "body.0.bias", "body.2.weight", "head.weight"]).values()
    ) == [
        1,
        1,
        2,
        3,
    ]


def test_nothing() -> None:
    assert layer_numbers([]) == {}
