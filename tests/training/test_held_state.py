"""Passes that stock does not make count as nothing for modules and losses that hold a state: that
draw from a generator of their own, count, keep averages, or depend on their first pass.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import Trainer, TrainingArguments, set_seed

from hf_gradguard import GradGuardConfig, GradGuardMixin, GradientMap
from hf_gradguard.gradient_map.replay import PassState, holders_in

STEPS = 3
GENERATORS: dict[str, Callable[[], tuple[Any, Callable[[Any], float]]]] = {
    "torch": lambda: (
        torch.Generator().manual_seed(5),
        lambda g: float(torch.rand(1, generator=g)),
    ),
    "numpy": lambda: (np.random.default_rng(5), lambda g: float(g.random())),
    "numpy's former": lambda: (np.random.RandomState(5), lambda g: float(g.rand())),
    "random": lambda: (random.Random(5), lambda g: g.random()),
}


class Words(nn.Module):
    """A classifier of words. `between` is what a case puts into its pass."""

    config = SimpleNamespace(num_labels=2)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        logits = self.last(self.between(self.layer(self.words(input_ids).mean(1))))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


def drawing(kind: str) -> type[Words]:
    class Drawing(Words):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.draw = GENERATORS[kind]()

        def between(self, hidden: Tensor) -> Tensor:
            return hidden * (0.5 + self.draw(self.generator))

    return Drawing


class Counting(Words):
    """In a number, a list, a mapping, a record and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.log, self.counts = 0, deque[bool](), {"passes": [0]}
        self.record = SimpleNamespace(passes=0)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))

    def between(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        self.log.append(self.training)
        self.counts["passes"][0] += 1
        self.record.passes += 1
        self.tokens += 1
        counted = self.passes + len(self.log) + self.counts["passes"][0] + self.record.passes
        return hidden * (1 + 0.1 * (counted + int(self.tokens)))


class Averaging(Words):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.norm, self.layer = nn.BatchNorm1d(4), spectral_norm(nn.Linear(4, 4))

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.norm(hidden) - self.mean


class Quantized(Words):
    """Packs its weights at the first pass, as that pass needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[bool, Tensor] | None = None

    def between(self, hidden: Tensor) -> Tensor:
        self.first = self.first or (self.training, hidden.detach().abs().max())
        return hidden * self.first[1] * (1 if self.first[0] else 2)


class Routing(Words):
    """Sends each row to one of two experts, and biases against the fuller one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("load", torch.zeros(2))

    def between(self, hidden: Tensor) -> Tensor:
        chosen = (hidden[:, :2] - 0.1 * self.load).argmax(-1).tolist()
        self.load += torch.bincount(torch.tensor(chosen), minlength=2)
        return torch.stack([self.experts[k](row) for k, row in zip(chosen, hidden, strict=True)])


MODELS: dict[str, type[Words]] = {
    **{f"a generator of {kind}": drawing(kind) for kind in GENERATORS},
    "counts": Counting, "averages": Averaging, "first pass": Quantized, "experts": Routing,
}  # fmt: skip


def train(
    folder: Path, model: nn.Module, base: type[Trainer] = Trainer, defense: str | None = None,
    share: bool = True, **trainer: Any,
) -> dict[str, Tensor]:  # fmt: skip
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "learning_rate": 0.1,
        "output_dir": str(folder),
        # Adam skips an expert that nothing was sent to, whose gradient is shared as zeros.
        "optim": "sgd",
    }  # fmt: skip
    args = TrainingArguments(**settings)
    if defense is not None:
        args = GradGuardConfig(
            **settings, defense=defense, private_dropout=False, share_input_embeddings=share,
            leakage_logging_steps=1,
        )  # fmt: skip
        base = type("Private", (GradGuardMixin, base), {})
    words = torch.arange(30).reshape(6, 5) % 9
    rows = [{"input_ids": row.tolist(), "labels": n % 2} for n, row in enumerate(words)]
    set_seed(3)
    base(model=model, args=args, train_dataset=rows, **trainer).train()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(stock: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    for name, tensor in stock.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0, msg=name)


def seeded(kind: type[Words]) -> Words:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_holds_a_state_trains_as_stock(case: str, tmp_path: Path) -> None:
    stock = train(tmp_path, seeded(MODELS[case]))
    assert_same(stock, train(tmp_path, seeded(MODELS[case]), defense="none"))


@pytest.mark.parametrize("defense", ["gaussian_noise", "optimal_noise"])
def test_only_stocks_passes_count(defense: str, tmp_path: Path) -> None:
    """Also where tables are looked for, and where a defense differentiates by the input."""
    counting, quantized = seeded(Counting), seeded(Quantized)
    train(tmp_path, counting, defense=defense, share=False)
    assert (counting.passes, counting.record.passes, int(counting.tokens)) == (STEPS,) * 3
    assert list(counting.log) == [True] * STEPS
    assert counting.counts == {"passes": [STEPS]}
    train(tmp_path, quantized, defense=defense, share=False)
    assert quantized.first is not None
    assert quantized.first[0], "its first pass was not in training mode"


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_loss_that_holds_a_generator_trains_as_stock(kind: str, tmp_path: Path) -> None:
    class Drawing(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.generator, self.draw = GENERATORS[kind]()

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:  # fmt: skip
            return (0.5 + self.draw(self.generator)) * model(**inputs)["loss"]

    stock = train(tmp_path, seeded(Words), Drawing)
    assert_same(stock, train(tmp_path, seeded(Words), Drawing, defense="none"))


def test_a_loss_that_counts_trains_as_stock(tmp_path: Path) -> None:
    """In a list of the function around it, and in its own object."""

    class Warming:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            self.calls += 1
            return nn.functional.cross_entropy(outputs["logits"], labels) / self.calls

    def around() -> Callable[..., Tensor]:
        calls, generator = [0], random.Random(5)

        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            calls[0] += 1
            plain = nn.functional.cross_entropy(outputs["logits"], labels)
            return plain * generator.random() / calls[0]

        return loss

    for make in (Warming, around):
        stock = train(tmp_path, seeded(Words), compute_loss_func=make())
        ours = train(tmp_path, seeded(Words), defense="none", compute_loss_func=make())
        assert_same(stock, ours)


LAST = torch.zeros(1)


def test_a_function_that_sets_variables_around_it_is_refused() -> None:
    """To put them back would be to write into closures and globals of others."""
    calls, mean = 0, torch.zeros(1)

    def sets_closure(module: nn.Module, inputs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return calls * module(**inputs)["loss"]

    def sets_global(module: nn.Module, inputs: Any) -> Tensor:
        global LAST
        loss = module(**inputs)["loss"]
        LAST = loss.detach()
        return loss

    def writes_to_tensor(module: nn.Module, inputs: Any) -> Tensor:
        loss = module(**inputs)["loss"]
        mean.add_(loss.detach())
        return loss

    batch = {"input_ids": torch.arange(10).reshape(2, 5) % 9, "labels": torch.tensor([0, 1])}
    for loss_fn, name in (
        (sets_closure, "calls"),
        (sets_global, "LAST"),
        (writes_to_tensor, "mean"),
    ):
        gmap = GradientMap(seeded(Words), batch, loss_fn=loss_fn, share_input_embeddings=True)
        gmap.gradient()  # one pass is one function
        last = calls
        with pytest.raises(NotImplementedError, match=f"{name}.*another function"):
            gmap.gradient_at(gmap.input)
        assert calls == last


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_map_evaluates_one_function(kind: str) -> None:
    generator, draw = GENERATORS[kind]()
    batch = {"input_ids": torch.arange(10).reshape(2, 5) % 9, "labels": torch.tensor([0, 1])}

    def loss_fn(module: nn.Module, inputs: Any) -> Tensor:
        return (0.5 + draw(generator)) * module(**inputs)["loss"]

    gmap = GradientMap(seeded(Words).double(), batch, loss_fn=loss_fn)
    following = draw(generator)
    again = gmap.gradient_at(gmap.input)
    for name, tensor in gmap.gradient().items():
        torch.testing.assert_close(again[name], tensor)
    fresh, same_draw = GENERATORS[kind]()
    assert [same_draw(fresh) for _ in range(2)][1] == following


def test_what_is_held_comes_back_as_it_was() -> None:
    module = Counting()
    module.shared = module.counts["passes"]
    owners, _ = holders_in([module])
    state = PassState(owners, [lambda: GENERATORS])
    tokens, counts = module.tokens, module.counts
    for _ in range(2):
        with state.replayed():
            module.between(torch.ones(1))
            module.made = 1
            assert module.counts["passes"] == [1]
    assert module.tokens is tokens
    assert module.counts is counts
    assert (module.passes, module.counts, list(module.log)) == (0, {"passes": [0]}, [])
    assert not hasattr(module, "made")
