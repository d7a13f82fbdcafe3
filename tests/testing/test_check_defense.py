"""The contract of defenses: everything registered keeps it, and every breach of it is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from helpers import SmallNetwork
from torch import Tensor

from hf_gradguard import DEFENSES, GradientMap, chain, make_defense
from hf_gradguard.defenses import Defense, DefenseFacts, Message, Noise
from hf_gradguard.randomness import Stream
from hf_gradguard.testing import check_defense
from hf_gradguard.testing.small import small_text_task

NEEDS_A_NETWORK = "refiner_published"
VARIANTS: dict[str, dict[str, Any]] = {
    "optimal_noise": {"shape": "past", "refresh_every": 3, "num_probes": 2},
    "optimal_dp_sgd": {"shape": "own", "num_probes": 2, "clip": 0.01},
    "optimal_pruning": {"refresh_every": 2, "num_probes": 2, "granularity": "layer"},
    "dp_sgd": {"clip": 0.05, "clip_by": "coordinate", "scale": 0.1},
    "quantization": {"bits": 3, "stochastic": True},
    "gaussian_noise": {"utility_budget": 1.0},
    "pruning": {"utility": 0.9},
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DEFENSES if name != NEEDS_A_NETWORK])
def test_every_defense_keeps_the_contract(name: str) -> None:
    cheap = {"num_probes": 2} if name.startswith("optimal") else {}
    check_defense(make_defense(name, **cheap))


def test_a_model_without_a_configuration_will_do() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.layer(pixel_values)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    batch = {"pixel_values": torch.rand(2, 3), "labels": torch.tensor([0, 1])}
    check_defense(make_defense("gaussian_noise"), [(Plain(), batch)])


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_contract(name: str) -> None:
    check_defense(make_defense(name, **VARIANTS[name]))


@pytest.mark.long
def test_refiner_keeps_the_contract() -> None:
    model, batch, _ = small_text_task()
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    # its words are drawn at random, which no network of the package could tell from noise
    network = SmallNetwork("text", width)
    settings = {"objective": "weighted", "evaluation_network": network, "iterations": 2}
    check_defense(make_defense("refiner", **settings), [(model, batch)])
    check_defense(make_defense("refiner", warm_start=4, **settings), [(model, batch)])
    check_defense(
        make_defense(NEEDS_A_NETWORK, evaluation_network=network, iterations=2), [(model, batch)]
    )
    check_defense(make_defense("refiner", samples=3, factors="message"))
    check_defense(make_defense("gradient_sketch", factors="parameter"))
    braked = {
        "objective": "cosine",
        "evaluation_network": network,
        "iterations": 2,
        "beta": 0.5,
        "factors": "message",
    }
    check_defense(make_defense("refiner", **braked), [(model, batch)])


CHAINS: dict[str, Callable[[], Defense]] = {
    "noise after pruning": lambda: chain(
        make_defense("pruning", ratio=0.5), make_defense("gaussian_noise", relative_scale=0.5)
    ),
    "pruning after noise": lambda: chain(
        make_defense("gaussian_noise", relative_scale=0.5), make_defense("pruning", ratio=0.5)
    ),
    "three, two with a memory": lambda: chain(
        make_defense("optimal_pruning", refresh_every=3, num_probes=1),
        make_defense("quantization"),
        make_defense("optimal_noise", refresh_every=2, num_probes=1, shape="past"),
    ),
    "only none": lambda: chain(make_defense("none"), make_defense("none")),
}


@pytest.mark.long
@pytest.mark.parametrize("which", CHAINS)
def test_chains_keep_the_contract(which: str) -> None:
    check_defense(CHAINS[which]())


@pytest.mark.parametrize("name", [name for name in DEFENSES if name != NEEDS_A_NETWORK])
def test_no_defense_draws_from_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's generators can be computed backward from what one message shows of their numbers."""
    gmap = GradientMap(*small_text_task()[:2])
    gmap.gradient()
    for draw in ("randn", "rand", "randint", "randperm", "multinomial", "normal", "bernoulli"):
        monkeypatch.setattr(torch, draw, lambda *_, draw=draw, **__: pytest.fail(draw))
    for draw in ("normal_", "uniform_", "exponential_", "random_", "bernoulli_"):
        monkeypatch.setattr(Tensor, draw, lambda *_, draw=draw, **__: pytest.fail(draw))
    make_defense(name)(gmap)
    with pytest.raises(TypeError, match=rf"{name} takes no torch\.Generator.*Stream"):
        make_defense(name)(gmap, torch.Generator())  # type: ignore[arg-type]


# Breaches. Each is one line away from a defense that keeps the contract.


@dataclass
class Toy(Defense):
    """Adds noise of a given deviation, and says so."""

    name: ClassVar[str] = "toy"
    scale: float = 0.5

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(adds_gaussian_noise=True)

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gradient = gmap.gradient()
        variance = {name: torch.full_like(g, self.scale**2) for name, g in gradient.items()}
        noisy = {n: g + self.scale * self.draw(g, generator) for n, g in gradient.items()}
        return Message(noisy, noise=Noise(variance, variance))

    def draw(self, like: Tensor, generator: Stream) -> Tensor:
        return generator.normal(like.shape, dtype=like.dtype)


def test_the_toy_keeps_the_contract() -> None:
    check_defense(Toy())


def first(gmap: GradientMap) -> str:
    return next(iter(gmap.gradient()))


class Missing(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        shared = dict(super().protect(gmap, generator))
        shared.pop(first(gmap))
        return shared


class Extra(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        return {**super().protect(gmap, generator), "more": torch.zeros(1)}


class NoMapping(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        return list(super().protect(gmap, generator).values())


def changed(change: Callable[[Tensor], Any]) -> type[Toy]:
    """A defense that does something to the first tensor that it shares."""

    class Changed(Toy):
        def protect(self, gmap: GradientMap, generator: Stream) -> Any:
            shared = dict(super().protect(gmap, generator))
            return {**shared, first(gmap): change(shared[first(gmap)])}

    return Changed


class InPlace(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        return {n: g.add_(self.draw(g, generator)) for n, g in gmap.gradient().items()}


class InPlaceUnseen(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        return {n: g.data.add_(self.draw(g, generator)) for n, g in gmap.gradient().items()}


class WritesWeights(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        with torch.no_grad():
            gmap.parameters[first(gmap)].mul_(0.5)
        return super().protect(gmap, generator)


class LeavesAGradient(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gmap.parameters[first(gmap)].grad = gmap.gradient()[first(gmap)].clone()
        return super().protect(gmap, generator)


class LeavesAHook(Toy):
    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gmap.model.register_forward_hook(lambda *_: None)
        return super().protect(gmap, generator)


class OwnRandomness(Toy):
    def draw(self, like: Tensor, generator: Stream) -> Tensor:
        return torch.randn_like(like)


class FreshRandomness(Toy):
    def draw(self, like: Tensor, generator: Stream) -> Tensor:
        return Stream().normal(like.shape, dtype=like.dtype)


class SharesTheTruth(Toy):
    scale: float = 0.0

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts()

    def protect(self, gmap: GradientMap, generator: Stream) -> Any:
        return dict(gmap.gradient())


class SaysExact(SharesTheTruth):
    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(is_exact=True)

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        return Message({n: g * 0.9 for n, g in gmap.gradient().items()}, exact=True)


class SaysNotTransmitted(SaysExact):
    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        nothing = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in gmap.gradient().items()}
        return Message(gmap.gradient(), transmitted=nothing, exact=True)


class SaysMoreNoise(Toy):
    def draw(self, like: Tensor, generator: Stream) -> Tensor:
        return 0.9 * super().draw(like, generator)


class SaysNoNoise(Toy):
    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts()


class Counts(Toy):
    """Remembers, and says so to nobody."""

    calls: int = 0

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        self.calls += 1
        shared = super().protect(gmap, generator)
        first_more = {first(gmap): shared[first(gmap)] + 0.01 * self.calls}
        return Message({**shared, **first_more}, noise=shared.noise)


@dataclass
class Leaks(Toy):
    """One memory for all clients."""

    memory: ClassVar[dict[str, Tensor]] = {}

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        shared = super().protect(gmap, generator)
        own, name = gmap.gradient()[first(gmap)], str(float(gmap.input.sum()))
        others = sum(g for key, g in self.memory.items() if key != name and g.dtype == own.dtype)
        self.memory[name] = own.clone()
        moved = {first(gmap): shared[first(gmap)] + others}
        return Message({**shared, **moved}, noise=shared.noise)


@dataclass
class Unsaid(Toy):
    """A second derivative that it did not ask for."""

    seen: list[str] = field(default_factory=list, init=False, repr=False)

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gmap.vjp(gmap.gradient())
        return super().protect(gmap, generator)


TENSOR = "'bert.embeddings.position_embeddings.weight'"
BREACHES: dict[str, tuple[type[Toy], str]] = {
    "a missing name": (Missing, f"toy shared nothing for {TENSOR}"),
    "an unknown name": (Extra, "toy shared 'more'"),
    "no mapping": (NoMapping, "toy must return a mapping"),
    "a scalar": (changed(lambda t: t.sum()), rf"toy shared {TENSOR} with shape \(\)"),
    "a number": (changed(lambda t: 1.0), f"toy shared a float for {TENSOR}"),
    "another shape": (changed(lambda t: t.T), f"toy shared {TENSOR} with shape"),
    "int8": (changed(lambda t: t.to(torch.int8)), f"toy shared {TENSOR} with type torch.int8"),
    "half": (changed(lambda t: t.half()), f"toy shared {TENSOR} with type torch.float16"),
    "elsewhere": (changed(lambda t: t.to("meta")), f"toy shared {TENSOR} with device meta"),
    "NaN": (changed(lambda t: t * torch.nan), "gradient of bert.embeddings.position_embeddings"),
    "infinity": (changed(lambda t: t / 0), "gradient of bert.embeddings.position_embeddings"),
    "a graph": (changed(lambda t: t.requires_grad_() * 1), f"{TENSOR} that holds its graph"),
    "in place": (InPlace, f"toy wrote to the true gradient of {TENSOR}"),
    "in place, unseen": (InPlaceUnseen, f"changed the gradient of {TENSOR}"),
    "weights": (WritesWeights, f"toy wrote to the parameter {TENSOR}"),
    "a .grad": (LeavesAGradient, f"toy made the .grad of {TENSOR}"),
    "a hook": (LeavesAHook, "changed the modules' hooks"),
    "global randomness": (OwnRandomness, "changed torch's random numbers"),
    "fresh randomness": (FreshRandomness, f"one seed gives one message, but {TENSOR} differs"),
    "the truth": (SharesTheTruth, "changes the gradient, or says that its message is exact"),
    "exact, and is not": (SaysExact, f"true gradient's, but {TENSOR} differs"),
    "not transmitted, and is": (SaysNotTransmitted, f"is zero, but {TENSOR} holds something"),
    "more noise than there is": (SaysMoreNoise, r"its noise has 0\.8.* times the variance"),
    "noise that it did not announce": (SaysNoNoise, "`facts.adds_gaussian_noise` is False"),
    "a memory that is not saved": (Counts, f"restores what it remembers, but {TENSOR} differs"),
    "a memory of all clients": (Leaks, f"another client's messages change {TENSOR}"),
    "second derivatives": (Unsaid, "second_order=False it raised RuntimeError"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_breaches_are_caught(breach: str) -> None:
    toy, message = BREACHES[breach]
    Leaks.memory.clear()
    with pytest.raises(AssertionError, match=message) as error:
        check_defense(toy())
    assert "toy" in str(error.value)


REFUSED = [name for name, (_, said) in BREACHES.items() if said.startswith("toy ")] + [
    "NaN",
    "infinity",
    "a graph",
]


@pytest.mark.parametrize("breach", REFUSED)
def test_calling_refuses_what_the_contract_forbids(breach: str) -> None:
    """Also where nobody runs the check: nothing of it can be shared."""
    toy, message = BREACHES[breach]
    gmap = GradientMap(*small_text_task()[:2])
    with pytest.raises((TypeError, ValueError, RuntimeError, FloatingPointError), match=message):
        toy()(gmap, Stream.from_seeds(0))
