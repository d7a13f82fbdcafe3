"""Every registered attack keeps the contract of attacks, and every breach of it is named."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_gradguard import GradientMap
from hf_gradguard.attacks import ATTACKS, Attack, Observation, Reconstruction, make_attack
from hf_gradguard.attacks.base import as_text
from hf_gradguard.testing import check_attack
from hf_gradguard.testing.attacks import small_observation
from recipes.studies.malicious_models import perceptron

# Ids of ordinary words, as long as the text behind `of_one_text`.
PUBLIC_TEXTS = [
    [5 + (start + step * (start // 9 + 1)) % 9 for step in range(3)] for start in range(40)
]

# What makes an attack quick. One that is not here runs for a single step, if it has steps.
QUICK: dict[str, dict[str, Any]] = {
    "lamp": {"steps": 2, "every": 1, "moves": 2},
    "likelihood_search": {"public_texts": PUBLIC_TEXTS, "evaluations": 64},
    "learned_inversion": {"public_texts": PUBLIC_TEXTS, "defense": "none", "messages": 10},
    # texts and images: each message is compared with its own kind
    "candidates": {"candidates": [[2, 5, 6, 3], [2, 7, 3], [8], *torch.rand(3, 3, 16, 16)]},
}


def quick(name: str) -> Attack:
    has_steps = any(field.name == "steps" for field in fields(ATTACKS[name]))
    return make_attack(name, **QUICK.get(name, {"steps": 1} if has_steps else {}))


def of_a_perceptron() -> Observation:
    model = perceptron(16)
    batch = {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.tensor([2, 0])}
    gradient = GradientMap(model, batch, second_order=False).gradient()
    return Observation(model, gradient, (2, 3, 16, 16), labels=batch["labels"])


def of_one_text() -> Observation:
    whole = small_observation("text")
    batch = {"input_ids": torch.tensor([[2, 5, 6, 7, 3]]), "labels": torch.tensor([1])}
    gradient = GradientMap(whole.model, batch, second_order=False).gradient()
    return replace(
        whole, gradient=gradient, input_shape=(1, 5), labels=batch["labels"],
        attention_mask=torch.ones(1, 5, dtype=torch.long),
    )  # fmt: skip


# Attacks on models of a certain kind, or on messages of one sample
OBSERVATIONS: dict[str, dict[str, Any]] = {
    "analytic": {"image": of_a_perceptron},
    "likelihood_search": {"text": of_one_text},
    "learned_inversion": {"text": of_one_text},
}


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_keeps_the_contract(name: str) -> None:
    observations = {domain: make() for domain, make in OBSERVATIONS.get(name, {}).items()}
    check_attack(quick(name), **observations)


@pytest.mark.long
def test_an_attack_of_several_restarts_keeps_the_contract() -> None:
    check_attack(make_attack("grad_inversion", steps=1, restarts=2))


def test_a_name_will_do() -> None:
    check_attack("embedding_rows")


@dataclass
class Guess(Attack):
    """Keeps the contract: words and pixels drawn at random."""

    name: ClassVar[str] = "guess"

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return {"text": self.text, "image": self.image}[seen.domain.name](seen, generator)

    def text(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        drawn = torch.randint(4, 64, seen.input_shape, generator=generator)
        ids = [row[there].tolist() for row, there in zip(drawn, seen.tokens, strict=True)]
        found = as_text(ids, seen.tokenizer)
        return Reconstruction(token_ids=ids, text=found, labels=seen.labels, objective=0.0)

    def image(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return Reconstruction(input=torch.rand(seen.input_shape, generator=generator))


def test_a_guess_keeps_the_contract() -> None:
    check_attack(Guess())


def breach(change: Any, **names: Any) -> type[Attack]:
    """A `Guess` that does something to the observation, or to its result, that it should not."""

    class Breach(Guess):
        def reconstruct(self, seen: Observation, generator: torch.Generator) -> Any:
            found = super().reconstruct(seen, generator)
            changed = change(self, seen, found)
            return found if changed is None else changed

    for name, value in {"name": "toy", **names}.items():
        setattr(Breach, name, value)
    return dataclass(Breach)


def first_weight(seen: Observation) -> Tensor:
    return next(seen.model.parameters())


def shared(seen: Observation) -> Tensor:
    return next(iter(seen.gradient.values()))


def write(tensor: Tensor, value: float = 1.0) -> None:
    with torch.no_grad():
        tensor.add_(value)


def write_unseen(tensor: Tensor) -> None:
    tensor.data.add_(1.0)  # without a new version


def put(**parts: Any) -> Any:
    def change(attack: Attack, seen: Observation, found: Reconstruction) -> None:
        for name, value in parts.items():
            setattr(found, name, value(seen, found) if callable(value) else value)

    return change


def touch(act: Any) -> Any:
    def change(attack: Attack, seen: Observation, found: Reconstruction) -> None:
        act(seen)

    return change


def count(attack: Any, seen: Observation, found: Reconstruction) -> None:
    """Remembers how often it ran."""
    attack.runs = getattr(attack, "runs", 0) + 1
    found.objective = float(attack.runs)


def crash(seen: Observation) -> None:
    if seen.labels is None:
        raise KeyError("labels")


def refuse_silently(seen: Observation) -> None:
    if seen.labels is None:
        raise ValueError


def refuse_all(seen: Observation) -> None:
    raise ValueError("I would rather not.")


def hook(seen: Observation) -> None:
    seen.model.register_forward_hook(lambda *_: None)


def grad(seen: Observation) -> None:
    first_weight(seen).grad = torch.zeros_like(first_weight(seen))


def swap(seen: Observation) -> None:
    head = next(m for m in seen.model.modules() if isinstance(m, torch.nn.Linear))
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def buffer(seen: Observation) -> None:
    buffers = [tensor for name, tensor in seen.model.state_dict().items() if "running" in name]
    for tensor in buffers:
        write(tensor)


TEXT: dict[str, Any] = {"domains": ("text",)}
IMAGE: dict[str, Any] = {"domains": ("image",)}
BREACHES: dict[str, tuple[Any, str]] = {
    "returns a dict": (breach(lambda *_: {"text": "a"}), "returned dict"),
    "returns nothing of a text": (breach(put(token_ids=None), **TEXT), "`token_ids` is one list"),
    "returns nothing of an image": (breach(put(input=None), **IMAGE), "`input` is what an image"),
    "one sample missing": (
        breach(put(token_ids=lambda seen, found: found.token_ids[1:]), **TEXT),
        "token_ids of 1 samples",
    ),
    "ids beyond the vocabulary": (
        breach(put(token_ids=[[10**6], [4]]), **TEXT),
        "below the vocabulary's 64",
    ),
    "ids below -1": (breach(put(token_ids=[[-2], [4]]), **TEXT), "-1 where nothing"),
    "ids as tensors": (
        breach(
            put(token_ids=lambda seen, found: [torch.tensor(i) for i in found.token_ids]), **TEXT
        ),
        "lists of whole numbers",
    ),
    "too many tokens": (breach(put(token_ids=[[4] * 99, [4]]), **TEXT), "no more tokens than"),
    "no strings": (breach(put(text=None), **TEXT), "one string a sample"),
    "strings without a tokenizer": (
        breach(put(text=lambda seen, found: ["", ""]), **TEXT),
        "None without a tokenizer",
    ),
    "embeddings of a wrong shape": (
        breach(put(input=lambda seen, found: torch.zeros(2, 6, 3)), **TEXT),
        r"`input` has shape \(2, 6, 32\)",
    ),
    "images of a wrong shape": (
        breach(put(input=lambda seen, found: found.input[..., :-1]), **IMAGE),
        r"`input` has shape \(2, 3, 16, 16\)",
    ),
    "pixels out of range": (
        breach(put(input=lambda seen, found: found.input + 1), **IMAGE),
        "within the range of pixels",
    ),
    "pixels out of range of images that were normalized": (
        breach(put(input=lambda seen, found: found.input + 3 * bool(seen.image_std)), **IMAGE),
        "within the range of pixels",
    ),
    "pixels that are NaN": (
        breach(put(input=lambda seen, found: found.input * torch.nan), **IMAGE),
        "`input` is finite",
    ),
    "pixels that need a gradient": (
        breach(put(input=lambda seen, found: found.input.requires_grad_()), **IMAGE),
        "`input` is detached",
    ),
    "labels of a wrong shape": (
        breach(put(labels=lambda seen, found: torch.zeros(2, 1, dtype=torch.long))),
        r"`labels` has shape \(B,\)",
    ),
    "labels that are scores": (breach(put(labels=torch.zeros(2))), "`labels` are class ids"),
    "labels out of range": (breach(put(labels=torch.tensor([0, 3]))), "class ids from 0 to 2"),
    "labels other than those granted": (
        breach(put(labels=torch.tensor([1, 1]))),
        "granted are returned as they are",
    ),
    "an objective that is a tensor": (breach(put(objective=torch.zeros(()))), "`objective` is a"),
    "finds words in an image": (
        breach(lambda *_: Reconstruction(token_ids=[[4], [5]]), **IMAGE),
        "`input` is what an image is",
    ),
    "writes to weights": (breach(touch(lambda seen: write(first_weight(seen)))), "the model's "),
    "writes to weights unseen": (
        breach(touch(lambda seen: write_unseen(first_weight(seen)))),
        "the model's ",
    ),
    "writes and puts back": (
        breach(touch(lambda seen: (write(first_weight(seen)), write(first_weight(seen), -1.0)))),
        "the model's ",
    ),
    "writes to batch statistics": (breach(touch(buffer), **IMAGE), "running_mean"),
    "puts another parameter in place": (breach(touch(swap)), "which parameters there are"),
    "writes to the gradient": (breach(touch(lambda seen: write(shared(seen)))), "the gradient of"),
    "writes to labels": (
        breach(touch(lambda seen: seen.labels is None or write(seen.labels, 0))),
        "the observation's labels",
    ),
    "writes to the mask": (
        breach(touch(lambda seen: write(seen.attention_mask, 0)), **TEXT),
        "the observation's attention_mask",
    ),
    "drops a tensor of the gradient": (
        breach(touch(lambda seen: seen.gradient.popitem())),
        "the names in the gradient",
    ),
    "leaves another mode": (
        breach(touch(lambda seen: seen.model.train(not seen.model.training))),
        "training modes",
    ),
    "freezes": (
        breach(touch(lambda seen: first_weight(seen).requires_grad_(False))),
        "requires_grad",
    ),
    "leaves .grad": (breach(touch(grad)), r"\.grad"),
    "leaves a hook": (breach(touch(hook)), "hooks"),
    "leaves a tensor's hook": (
        breach(touch(lambda seen: first_weight(seen).register_hook(lambda g: g))),
        "the parameters' hooks",
    ),
    "changes the configuration": (
        breach(touch(lambda seen: setattr(seen.model.config, "initializer_range", 1.0))),
        "configuration",
    ),
    "draws from torch": (breach(touch(lambda seen: torch.rand(1))), "torch's random numbers"),
    "seeds torch": (breach(touch(lambda seen: torch.manual_seed(9))), "torch's random numbers"),
    "draws from numpy": (breach(touch(lambda seen: np.random.rand())), "numpy's random numbers"),
    "draws from random": (breach(touch(lambda seen: random.random())), "random module"),
    "switches gradients off": (
        breach(touch(lambda seen: torch.set_grad_enabled(False))),
        "gradients are enabled",
    ),
    "draws from entropy": (
        breach(put(objective=lambda seen, found: random.SystemRandom().random())),
        "`objective` differs",
    ),
    "remembers": (breach(count), "`objective` differs"),
    "crashes": (breach(touch(crash)), "without labels it raised KeyError: 'labels'"),
    "refuses without a reason": (breach(touch(refuse_silently)), "a refusal says why"),
    "refuses everything": (
        breach(touch(refuse_all)),
        "refused tokens with everything granted: I would",
    ),
    "has no name": (breach(touch(lambda seen: None), name=""), "an attack has a `name`"),
    "has no domain": (breach(touch(lambda seen: None), domains=()), "`domains` is a tuple"),
}


@pytest.fixture(autouse=True)
def _gradients_enabled() -> Any:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("case", BREACHES)
def test_every_breach_is_named(case: str) -> None:
    attack, words = BREACHES[case]
    with pytest.raises(AssertionError, match=words) as caught:
        check_attack(attack())
    assert str(caught.value).startswith(f"{attack.name or 'Breach'}: ")


def test_an_attack_must_be_a_dataclass_of_attack() -> None:
    class Plain(Guess.__base__):  # type: ignore[misc, name-defined]
        name = "plain"

    with pytest.raises(AssertionError, match="plain: an attack is a dataclass"):
        check_attack(Plain())
    with pytest.raises(AssertionError, match="function: an attack is a subclass of `Attack`"):
        check_attack(lambda seen, generator: None)  # type: ignore[arg-type]


def test_another_domain_is_refused_by_the_call_itself() -> None:
    """Unless somebody takes the call over."""

    @dataclass
    class Greedy(Guess):
        name: ClassVar[str] = "greedy"
        domains: ClassVar[tuple[str, ...]] = ("text",)

        def check_domain(self, seen: Observation) -> None:
            pass

    with pytest.raises(AssertionError, match=r"greedy: .* does not declare, but it took pixels"):
        check_attack(Greedy())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"text": ["a"]}, "returned dict, and not a Reconstruction"),
        (Reconstruction(token_ids=[[4]]), "token_ids of 1 samples, but the batch has 2"),
        (Reconstruction(labels=torch.zeros(3)), "labels of 3 samples"),
        (Reconstruction(input=torch.zeros(1, 4, 4)), "input of 1 samples"),
    ],
)
def test_a_call_checks_what_an_attack_returns(found: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"toy returned .*{words.removeprefix('returned ')}"):
        breach(lambda *_: found)()(small_observation("text"))
