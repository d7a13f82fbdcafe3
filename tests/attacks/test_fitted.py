"""Who knows that a message was fitted in the span of synthetic samples' gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
from helpers import flat, make_task, torch_rng
from torch import Tensor, nn

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.candidates.fitted import LEAST_LEFT, Fits, accumulate, fractions_of
from hf_gradguard.defenses.base import Message
from hf_gradguard.defenses.mechanism import Fitted, Mechanism
from hf_gradguard.gradient_map.layers import Pass, layers_of
from hf_gradguard.gradient_map.per_sample.span import Granularity, SampleSpan
from hf_gradguard.gradient_map.random_batch import synthetic_samples
from hf_gradguard.randomness import Stream


def text(ids: list[int], label: int) -> dict[str, Tensor]:
    row = torch.tensor([ids])
    return {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "labels": torch.tensor([label]),
    }


def texts(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    drawn = torch.randint(4, 24, (count, 6), generator=torch_rng(seed)).tolist()
    return [text([1, *ids, 2], at % 3) for at, ids in enumerate(drawn)]


def gradient_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return GradientMap(model, batch, second_order=False).gradient()


def columns_of(made: GradientMap, factors: Granularity) -> list[dict[str, Tensor]]:
    """Groups of parameters, and what spans each, written out: dense, in float64."""
    count, layers = len(made.input), layers_of(made.model, made.parameters)
    told = Pass.evaluate(made, made.input, layers)
    parts: list[tuple[str, Tensor]] = []
    for key, layer in layers.items():
        for slopes, features in told.rows(key, count) or []:
            if layer.bias is not None:
                parts.append((layer.bias, layer.bias_gradients(slopes).flatten(1).T))
            if layer.weight is None:
                continue
            if factors == "token" and isinstance(layer.module, nn.Linear):
                slopes, features = (t.reshape(-1, 1, t.shape[-1]) for t in (slopes, features))
            parts.append((layer.weight, layer.weight_gradients(slopes, features).flatten(1).T))
    rest = [(name, r.flatten()[:, None]) for name, r in told.unsplit.items()]
    if factors == "message":
        whole = [(name, part.sum(1, keepdim=True)) for name, part in parts]
        groups = [whole + rest]
    else:
        groups = [[one] for one in parts] if factors != "sample" else [parts]
        groups.append(rest)
    return [dict(group) for group in groups]


@pytest.mark.parametrize("factors", get_args(Granularity))
def test_powers_are_those_of_a_dense_projection(factors: Granularity) -> None:
    model, batch = make_task("bert")
    made = synthetic_samples(GradientMap(model, batch, second_order=False), 2, Stream.from_seeds(1))
    powers = SampleSpan(made).powers(factors)
    some = [gradient_of(model, one) for one in texts(2)]
    found = powers({name: torch.stack([one[name] for one in some]) for name in some[0]})
    dense = {frozenset(group): group for group in columns_of(made, factors)}
    assert len(powers.names) > (4 if factors in ("parameter", "token") else 0)
    for at, gradient in enumerate(some):
        whole = float(flat(gradient).square().sum())
        for group, names in enumerate(powers.names):
            matrix = torch.cat([dense[frozenset(names)][name] for name in names])
            wanted = torch.cat([gradient[name].flatten() for name in names])
            solved = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution
            expected = float((matrix @ solved).square().sum())
            # Vectors that are nearly alike have a ridge.
            assert float(found[at, group]) == pytest.approx(expected, rel=1e-3, abs=1e-5 * whole)
            assert powers.factors[group] == matrix.shape[1]


def test_the_score_is_that_of_the_formula() -> None:
    """-Σ_l d_l/2 log(‖M‖² - 2⟨M, g⟩ + ‖P g‖²), in units of ‖M‖²."""
    model, batch = make_task("bert")
    mechanism, some = Fitted(2, "parameter"), [gradient_of(model, one) for one in texts(3)]
    message = dict(some[0])
    told = Fits({7: (message, mechanism)}, batch, model, torch_rng(5))
    stacked = {name: torch.stack([one[name] for one in some]) for name in message}
    (span,) = told._spans.values()
    powers, expected = span(stacked), torch.zeros(3, dtype=torch.float64)
    for names, factors, power in zip(span.names, span.factors, powers.T, strict=True):
        own = flat({name: message[name] for name in names})
        if own.norm() < 1e-6 * flat(message).norm():
            continue  # a key's bias: rounding alone
        for at, one in enumerate(some):
            inner = float(own @ flat({name: one[name] for name in names}))
            left = 1 - (2 * inner - float(power[at])) / float(own.square().sum())
            expected[at] -= factors / 2 * torch.tensor(max(left, LEAST_LEFT)).log()
    torch.testing.assert_close(told(stacked)[7], expected)


def rank_of(right: int, listed: list[Any], informed: bool) -> int:
    """How many of a list score higher than the text behind a message. What earlier messages left
    out is large in one layer.
    """
    model, _ = make_task("bert")
    defense = make_defense("gradient_sketch", samples=2, factors="parameter", min_batches=1)
    gmap = GradientMap(model, listed[right], second_order=False)
    error = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    pooler = error["bert.pooler.dense.weight"]
    pooler += torch.randn(pooler.shape, generator=torch_rng(right), dtype=pooler.dtype)
    pooler *= 9 * float(flat(gmap.gradient()).norm() / pooler.norm())
    state = {f"error.{name}": e for name, e in error.items()}
    defense.load_state_dict(state | {"error_size": torch.tensor(1.0, dtype=torch.float64)})
    message = defense(gmap, Stream.from_seeds(right))
    mechanism, labels = defense.mechanism(message) if informed else None, listed[right]["labels"]
    seen = Observation(model, dict(message), (1, 8), labels=labels, mechanism=mechanism)
    attack = make_attack("candidates", candidates=listed)
    scores = attack(seen, generator=torch_rng(right)).scores
    return int((scores > scores[right]).sum())


@pytest.mark.long
def test_who_knows_it_names_more() -> None:
    listed = texts(24)
    informed, plain = ([rank_of(at, listed, knows) for at in range(8)] for knows in (True, False))
    assert sum(informed) <= 8  # of 23 others, one in the mean
    assert sum(plain) >= 14


def test_the_law_holds_nothing_secret() -> None:
    """It is the same from settings alone, of a client that has seen nothing, and of a message that
    has lost all but its tensors.
    """
    model, batch = make_task("bert")
    settings: dict[str, Any] = {"samples": 3, "min_batches": 1}
    used, fresh = (make_defense("gradient_sketch", **settings) for _ in range(2))
    message = used(GradientMap(model, batch, second_order=False), Stream.from_seeds(1))
    again = pickle.loads(pickle.dumps({n: t.clone() for n, t in message.items()}))
    mechanism = used.mechanism(message)
    assert (
        mechanism == fresh.mechanism(type(message)(again)) == Mechanism(fitted=Fitted(3, "token"))
    )
    assert mechanism == copy.deepcopy(mechanism)


@pytest.mark.parametrize("factors", ["sample", "message"])
def test_samples_that_move_count_as_if_they_stayed(factors: Granularity) -> None:
    """What such an attacker finds is a bound from below."""
    settings: dict[str, Any] = {"samples": 3, "iterations": 1, "factors": factors}
    mechanism = make_defense("refiner", **settings).mechanism(Message({}))
    assert mechanism == Mechanism(fitted=Fitted(3, factors))


@pytest.mark.parametrize("name", ["refiner", "refiner_published"])
def test_data_of_the_batch_that_moves_has_no_mechanism(name: str) -> None:
    settings = {"objective": "weighted"} if name == "refiner" else {}
    assert make_defense(name, **settings).mechanism(Message({})) is None


def test_several_laws_and_messages_at_once() -> None:
    """Together they are scored as one by one, up to the server's own samples."""
    model, batch = make_task("bert")
    some = [gradient_of(model, one) for one in texts(3)]
    stacked = {name: torch.stack([one[name] for one in some]) for name in some[0]}
    mechanism, other = Fitted(2, "parameter"), Fitted(2, "sample")
    both = {0: (some[0], mechanism), 1: (some[1], mechanism), 2: (some[2], other)}
    told = Fits(both, batch, model, torch_rng(5))(stacked)
    alone = Fits({0: both[0]}, batch, model, torch_rng(5))(stacked)
    torch.testing.assert_close(told[0], alone[0])
    assert [int(told[at].argmax()) for at in range(3)] == [0, 1, 2]


def test_dropout_is_the_generators() -> None:
    """One seed gives one result, and draws nothing from torch's own generator."""
    model, batch = make_task("bert", dropout=0.3)
    some = [gradient_of(model.eval(), one) for one in texts(2)]
    stacked = {name: torch.stack([one[name] for one in some]) for name in some[0]}
    before, found = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        told = Fits({0: (some[0], Fitted(2, "sample"))}, batch, model.train(), torch_rng(seed))
        found.append(told(stacked)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch_that_cannot_be_replaced_is_refused() -> None:
    model, batch = make_task("bert")
    batch = {**batch, "weights": torch.ones(len(batch["labels"]), 3)}
    message = gradient_of(model, texts(1)[0])
    with pytest.raises(ValueError, match="'weights' cannot be made up"):
        Fits({0: (message, Fitted(2, "token"))}, batch, model, torch_rng())


class Span:
    """Two groups of parameters, and what a span has of them."""

    names = [["a"], ["b", "c"], ["still"]]
    factors = torch.tensor([2, 3, 1])

    def __call__(self, gradients: dict[str, Tensor]) -> Tensor:
        both = torch.cat([gradients["b"], gradients["c"]], 1).double().square().sum(1)
        first = gradients["a"].double().square().sum(1)
        return torch.stack([first / 2, both / 4, torch.zeros_like(both)], 1)


def some_messages(count: int) -> list[dict[str, Tensor]]:
    drawn = torch_rng(2)
    sizes = {"a": 3, "b": 2, "c": 4}
    made = [{n: torch.randn(k, generator=drawn).double() for n, k in sizes.items()}
            for _ in range(count)]  # fmt: skip
    return [one | {"still": torch.zeros(2).double(), "no sample's": torch.ones(1).double()}
            for one in made]  # fmt: skip


def test_shares_are_medians_over_candidates() -> None:
    drawn = torch_rng(1)
    sizes = {"a": 3, "b": 2, "c": 4, "still": 2}
    gradients = [{n: torch.randn(2, k, generator=drawn) for n, k in sizes.items()} for _ in "12"]
    assert fractions_of(Span(), gradients) == pytest.approx([0.5, 0.25, 1e-3])  # type: ignore


def test_what_later_messages_bring_is_weighed_as_in_the_normal_equations() -> None:
    """Σ_t d r_t ⟨h, M_t⟩/‖M_t‖² and Σ_t φ d r_t² ⟨h, h⟩/‖M_t‖², r_t = (1 - φ)ᵗ, group by group."""
    messages, shares = some_messages(3), [0.5, 0.25, 1e-3]
    y, weights = accumulate(messages, Span(), shares)  # type: ignore[arg-type]
    h = some_messages(4)[3]
    for names, factors, share in zip(Span.names[:2], (2, 3), shares[:2], strict=True):
        products = squares = 0.0
        for place, message in enumerate(messages):
            power = sum(float(message[n].square().sum()) for n in names)
            left = (1 - share) ** place
            products += factors * left * sum(float(h[n] @ message[n]) for n in names) / power
            squares += share * factors * left**2 * sum(float(h[n] @ h[n]) for n in names) / power
        got = sum(float((weights[n] ** 2 * h[n]) @ y[n]) for n in names)
        assert got == pytest.approx(products, rel=1e-9)
        got = sum(float((weights[n] * h[n]).square().sum()) for n in names)
        assert got == pytest.approx(squares, rel=1e-9)
    for name in ("still", "no sample's"):  # rounding alone, and what is in no span
        assert not weights[name].any()
        assert not y[name].any()
    assert y.keys() == weights.keys() == messages[0].keys()


class Drawn:
    """One group of 60 parameters, of which samples span 15 directions."""

    names = [["a"]]
    factors = torch.tensor([15])


def test_later_messages_tell_more() -> None:
    """M_t = P_t v_t of random spans, v_t+1 = v_t - M_t and other batches: members are told by what
    M_0 brings, and better with what M_1 to M_3 do.
    """
    drawn, ranks = torch_rng(7), torch.zeros(2)
    for _ in range(200):
        listed = torch.randn(12, 60, generator=drawn).double()
        v = listed[:3].mean(0) + 0.6 * torch.randn(60, generator=drawn)
        messages = []
        for _ in range(4):
            basis = torch.linalg.qr(torch.randn(60, 15, generator=drawn).double())[0]
            messages.append({"a": basis @ (basis.T @ v)})
            v = v - messages[-1]["a"] + 0.3 * torch.randn(60, generator=drawn)
        for place, some in enumerate((messages[:1], messages)):
            y, weights = accumulate(some, Drawn(), [0.25])  # type: ignore[arg-type]
            scores = listed @ (weights["a"] ** 2 * y["a"])
            ranks[place] += (scores[3:, None] > scores[:3]).sum() / 200 / 3
    alone, waited = ranks.tolist()
    assert alone < 3  # 4.5 by chance
    assert waited < 0.75 * alone, (waited, alone)
