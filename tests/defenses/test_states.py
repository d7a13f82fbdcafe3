"""What a defense remembers of a client is a value: properties that hold for any clients, defenses
and order of messages.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hf_gradguard
from hf_gradguard import chain, make_defense
from hf_gradguard.defenses import Chain, Defense
from hf_gradguard.gradient_map.views import PrecomputedGradient
from hf_gradguard.randomness import Stream

PACKAGE = Path(hf_gradguard.__file__).parent
LINKS: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian_noise": {"scale": 0.1},
    "laplace_noise": {"scale": 0.1},
    "dp_sgd": {"scale": 0.1, "clip": 0.5},
    "pruning": {"ratio": 0.5, "error_feedback": True, "min_batches": 1},
    "quantization": {"bits": 3, "error_feedback": True},
}
SEVERAL = LINKS | {
    "pruning of two batches": {"ratio": 0.5, "error_feedback": True, "min_batches": 2},
    "correlated dp_sgd": {"scale": 0.1, "clip": 0.5, "correlated": True, "messages": 40},
}
names = st.sampled_from(sorted(SEVERAL))
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def made(name: str) -> Defense:
    kind = {"pruning of two batches": "pruning", "correlated dp_sgd": "dp_sgd"}.get(name, name)
    return make_defense(kind, **SEVERAL[name])


def gradient(number: int) -> PrecomputedGradient:
    generator = torch.Generator().manual_seed(number)
    shapes = {"weight": (4, 3), "bias": (4,)}
    return PrecomputedGradient(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    )


def is_same(tensors: Any, others: Any) -> bool:
    """Whether two mappings of tensors are equal to the bit."""
    return tensors.keys() == others.keys() and all(
        torch.equal(tensor, others[name]) for name, tensor in tensors.items()
    )


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@quick
@given(name=names, messages=st.integers(0, 4))
def test_apply_changes_neither_defense_nor_state(name: str, messages: int) -> None:
    defense: Defense = made(name)
    attributes, state = dict(vars(defense)), {}
    for number in range(messages):
        _, state = defense.apply(gradient(number), state, Stream.from_seeds(number))
    before = copies(defense.flatten(state))
    once, next_state = defense.apply(gradient(9), state, Stream.from_seeds(9))
    again, _ = defense.apply(gradient(9), state, Stream.from_seeds(9))
    assert is_same(once, again)
    assert is_same(before, defense.flatten(state))
    assert vars(defense) == attributes
    if defense.flatten(next_state):  # it remembers something: the next state is another
        assert not is_same(before, defense.flatten(next_state))


@quick
@given(name=names, messages=st.integers(0, 4))
def test_a_state_survives_a_checkpoint(name: str, messages: int) -> None:
    defense, state = made(name), {}
    for number in range(messages):
        _, state = defense.apply(gradient(number), state, Stream.from_seeds(number))
    restored = made(name).unflatten(copies(defense.flatten(state)))
    for number in range(10, 12):
        message, state = defense.apply(gradient(number), state, Stream.from_seeds(number))
        other, restored = made(name).apply(gradient(number), restored, Stream.from_seeds(number))
        assert is_same(message, other)


@quick
@given(name=names, order=st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_clients_of_one_object_are_as_if_alone(name: str, order: list[int]) -> None:
    shared, states = made(name), [{}, {}, {}]
    alone = [made(name) for _ in states]
    for number, client in enumerate(order):
        stream = Stream.from_seeds(number)
        message, states[client] = shared.apply(gradient(number), states[client], stream)
        other = alone[client](gradient(number), Stream.from_seeds(number))
        assert is_same(message, other)


@quick
@given(links=st.tuples(*[st.sampled_from(sorted(LINKS))] * 3), messages=st.integers(1, 3))
def test_chains_are_associative(links: tuple[str, str, str], messages: int) -> None:
    """Also in what they remember."""
    first, second, third = (made(name) for name in links)
    left, right = Chain(chain(first, second), third), Chain(first, chain(second, third))
    left_state, right_state = {}, {}
    for number in range(messages):
        streams = [Stream.from_seeds(number) for _ in range(2)]
        message, left_state = left.apply(gradient(number), left_state, streams[0])
        other, right_state = right.apply(gradient(number), right_state, streams[1])
        assert is_same(message, other)
    values = [
        sorted(float(t.double().sum()) for t in c.flatten(s).values())
        for c, s in ((left, left_state), (right, right_state))
    ]
    assert values[0] == pytest.approx(values[1])


def test_nobody_copies_or_rolls_back_a_defense() -> None:
    """A message that is not shared is forgotten by keeping the state that was there before."""
    found = []
    for room in ("defenses", "training", "federation", "audit", "recommend"):
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                copied = ast.unparse(node.args[0]) if node.args else ""
                if called.endswith("deepcopy") and ("defense" in copied or "client" in copied):
                    found.append(f"{path}:{node.lineno} copies {copied}")
                if room == "training" and called.endswith(("defense.load_state_dict",)):
                    found.append(f"{path}:{node.lineno} rolls back")
    assert not found, "\n".join(found)


MEMOS = {
    "training/privacy/coupling.py": "copy.deepcopy's own, of what a copy shares with its original",
    "training/config.py": "copy.deepcopy's own",
}


def test_clients_are_not_known_by_their_addresses() -> None:
    """An address may be another object's by the time that somebody looks it up."""
    found = set()
    for room in ("defenses", "training"):
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Subscript | ast.DictComp):
                    key = node.slice if isinstance(node, ast.Subscript) else node.key
                    if isinstance(key, ast.Call) and ast.unparse(key.func) == "id":
                        found.add(str(path.relative_to(PACKAGE)))
    assert found == set(MEMOS)


def test_a_class_cannot_replace_apply() -> None:
    """A Trainer calls `protect` by way of its own copy: what stands in `apply` would never run."""
    with pytest.raises(TypeError, match="overrides apply: override protect"):
        type("Mine", (Defense,), {"name": "mine", "apply": lambda self, *_: None})
