"""Rankings of candidates: likelihoods by hand, the filter against dense matrices, and who is found
behind each defense.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution, torch_rng, word_tokenizer
from torch import Tensor, nn

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.attacks import Observation, average, make_attack
from hf_gradguard.attacks.candidates import regression
from hf_gradguard.attacks.candidates.regression import MatchedFilter, WhitenedMessage
from hf_gradguard.attacks.likelihood import Likelihood
from hf_gradguard.attacks.local_training import LocalTraining
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.gradient_map.local_training.optimizers import make_optimizer
from hf_gradguard.gradient_map.vectorized import ManyGradients, has_draws

WORDS = [f"w{i}" for i in range(20)]


def texts(count: int, length: int | None = None, seed: int = 1) -> list[list[int]]:
    draw = torch_rng(seed)
    sizes = torch.randint(3, 7, (count,), generator=draw).tolist()
    return [torch.randint(4, 24, (length or n,), generator=draw).tolist() for n in sizes]


def images(count: int, seed: int = 1) -> list[Tensor]:
    return list(torch.rand((count, 3, 8, 8), generator=torch_rng(seed), dtype=torch.float64))


def batch_of(chosen: list[Any], labels: list[int]) -> dict[str, Tensor]:
    if isinstance(chosen[0], Tensor):
        return {"pixel_values": torch.stack(chosen), "labels": torch.tensor(labels)}
    longest = max(map(len, chosen))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in chosen])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor(labels),
    }


def seen_by(model: nn.Module, batch: dict[str, Tensor], defense: Any = None, **granted: Any) -> Any:
    """What a server sees, and is granted."""
    gmap = GradientMap(model, batch)
    message = defense(gmap, rng()) if defense is not None else None
    main = batch["pixel_values"] if "pixel_values" in batch else batch["input_ids"]
    settings = {"labels": batch["labels"], **granted}
    if defense is not None and "mechanism" not in granted:
        settings["mechanism"] = defense.mechanism(message)
    gradient = gmap.gradient() if message is None else dict(message)
    return Observation(model, gradient, tuple(main.shape), **settings)


def gradient_of(model: nn.Module, one: Any, label: int) -> Tensor:
    return flat(GradientMap(model, batch_of([one], [label])).gradient())


def like(vector: Tensor, seen: Observation) -> dict[str, Tensor]:
    parts = vector.split([g.numel() for g in seen.gradient.values()])
    return {
        n: p.view_as(g) for (n, g), p in zip(seen.gradient.items(), parts, strict=True)
    }  # fmt: skip


# --- likelihoods by hand


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_posterior_of_two_is_by_the_formula(noise: Any) -> None:
    model, _ = make_task("bert")
    two = texts(2, seed=3)
    seen = seen_by(model, batch_of(two[:1], [1]))
    g = [gradient_of(model, one, 1) for one in two]
    variance = 0.5 + torch.rand(len(g[0]), generator=torch_rng(), dtype=torch.float64)
    variance *= 4 * (g[0] - g[1]).square().sum()  # so that the posterior is neither 0 nor 1
    y = g[0] + variance.sqrt() * torch.randn(len(g[0]), generator=torch_rng(2), dtype=torch.float64)
    seen = replace(seen, gradient=like(y, seen))
    mechanism = Mechanism(noise=noise, variance=like(variance, seen))
    found = make_attack("candidates", candidates=two, rounding=1e-9)(
        replace(seen, mechanism=mechanism)
    )
    if noise == "gaussian":
        logs = [float(-((y - one).square() / (2 * variance)).sum()) for one in g]
    else:
        logs = [float(-((y - one).abs() / (variance / 2).sqrt()).sum()) for one in g]
    expected = 1 / (1 + math.exp(logs[1] - logs[0]))
    assert 0.05 < expected < 0.95
    assert float(found.posterior[0]) == pytest.approx(expected, abs=1e-6)
    assert found.scores.tolist() == pytest.approx(logs, rel=1e-6)
    if noise == "gaussian":  # the older grant says the same
        same = replace(seen, noise_variance=like(variance, seen))
        again = make_attack("candidates", candidates=two, rounding=1e-9)(same)
        assert torch.equal(again.scores, found.scores)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise"])
def test_strength_of_the_batchs_own_names_a_candidate_by_its_norm(name: str) -> None:
    """Every candidate has the variance r² ‖g‖²/d of its own. At noise of 300 times, where products
    with gradients say nothing, that of one variance for all is the control.
    """
    model, _ = make_task("bert")
    listed = texts(40, length=6, seed=5)
    first, control = 0, 0
    for truth in range(12):
        defense = make_defense(name, relative_scale=300.0, strength="own")
        gmap = GradientMap(model, batch_of(listed[truth : truth + 1], [1]))
        message = defense(gmap, rng(truth))
        seen = replace(
            seen_by(model, batch_of(listed[truth : truth + 1], [1])), gradient=dict(message)
        )
        mechanism = defense.mechanism(message)
        assert mechanism is not None
        assert mechanism.relative_to == pytest.approx(
            float(flat(gmap.gradient()).square().sum()), rel=0.3
        )
        for is_control in (False, True):
            granted = replace(mechanism, relative_to=None) if is_control else mechanism
            attack = make_attack("candidates", candidates=listed)
            ranks = attack(replace(seen, mechanism=granted)).ranking[:8].tolist()
            first += not is_control and truth in ranks
            control += is_control and truth in ranks
    assert first > 7  # of 12; 2.4 by chance
    assert control <= 7


FLOOR = 0.5


@pytest.mark.parametrize(
    ("mechanism", "message", "candidate", "expected"),
    [
        # exact values, in units of 2 · floor = 1
        (Mechanism(), [1.0, 2.0], [1.0, 4.0], -4.0),
        (Mechanism(selection="chosen"), [1.0, 0.0], [3.0, 9.0], -4.0),
        # what was withheld is no larger than the least that was kept
        (Mechanism(selection="largest"), [2.0, 0.0], [2.0, 1.5], 0.0),
        (Mechanism(selection="largest"), [2.0, 0.0], [2.0, 3.0], -1.0),
        # cells of width 1 around 0, 1, 2, 3
        (Mechanism(rounding="nearest", levels=4), [0.0, 1.0, 3.0], [0.4, 1.5, 3.0], 0.0),
        (Mechanism(rounding="nearest", levels=4), [0.0, 1.0, 3.0], [0.0, 2.5, 3.0], -1.0),
        (
            Mechanism(rounding="stochastic", levels=4),
            [0.0, 1.0, 3.0],
            [0.25, 0.5, 3.0],
            math.log(0.75 * 0.5),
        ),
        # signs times the mean size: a wrong sign by its size, and the mean's distance
        (Mechanism(rounding="sign"), [1.0, -1.0], [1.0, -1.0], 0.0),
        (Mechanism(rounding="sign"), [1.0, -1.0], [1.5, 0.5], -0.25),
        # clipped to norm 5, then exact
        (Mechanism(clip_norm=5.0), [3.0, 4.0], [6.0, 8.0], 0.0),
        (Mechanism(clip_coordinate=2.0), [2.0, 1.0], [7.0, 1.0], 0.0),
        # noise of variance 1.5, to which the floor is added
        (Mechanism(noise="gaussian", variance=1.5), [1.0, 2.0], [1.0, 4.0], -1.0),
        (Mechanism(noise="laplace", variance=1.5), [1.0, 2.0], [1.0, 4.0], -2.0),
        # whose strength is the candidate's own: ‖g‖² is 17, twice the 8.5 that 1.5 is of
        (
            Mechanism(noise="gaussian", variance=1.5, relative_to=8.5),
            [1.0, 2.0],
            [1.0, 4.0],
            -4.0 / 7.0 - math.log(2.0),
        ),
    ],
)
def test_likelihoods_by_hand(
    mechanism: Mechanism, message: list[float], candidate: list[float], expected: float
) -> None:
    told = Likelihood(mechanism, {"w": torch.tensor(message)}, {"w": FLOOR})
    assert float(told({"w": torch.tensor([candidate])})[0]) == pytest.approx(expected, abs=1e-6)


def test_behind_noise_the_kept_set_is_a_candidates_own() -> None:
    """Two are kept. A candidate whose two largest are others is told by how far they are off."""
    mechanism = Mechanism(selection="largest", noise="gaussian", variance=1e6)
    told = Likelihood(mechanism, {"w": torch.tensor([50.0, -30.0, 0.0])}, {"w": FLOOR})
    right, wrong = told({"w": torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 4.0]])}).tolist()
    assert right == pytest.approx(0, abs=0.01)
    # its threshold is 2: the first entry, kept, has 1; the third, withheld, has 4
    assert wrong == pytest.approx(-(1.0 + 4.0), abs=0.01)


def test_the_filter_against_dense_matrices() -> None:
    """Σ, a prior of unequal shares, and other members' covariance, all written out."""
    draw = torch_rng()
    h = torch.randn(6, 40, generator=draw, dtype=torch.float64)
    y, prior = torch.randn(40, generator=draw, dtype=torch.float64), torch.rand(6, generator=draw)
    prior = (prior / prior.sum()).double()
    center = torch.randn(40, generator=draw, dtype=torch.float64)
    precise = 0.5 + torch.rand(40, generator=draw, dtype=torch.float64)
    for samples in (1, 3):
        told = WhitenedMessage({"w": y + center}, {"w": center}, samples, 1.0)
        one = MatchedFilter([told], {"w": precise}, 6, draw)
        one.add([3, 4, 5], {"w": h[3:]})
        one.add([0, 1, 2], {"w": h[:3]})
        covariance = torch.diag(precise**-2)
        covariance += (samples - 1) / samples**2 * (h.T * prior) @ h
        inverse = torch.linalg.inv(covariance)
        part = h / samples
        expected = part @ inverse @ y - ((part @ inverse) * part).sum(1) / 2
        torch.testing.assert_close(one.log_ratio(0, prior), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("members", "complete"), [(range(6), True), ([0, 1, *range(30, 34)], False)]
)
@pytest.mark.parametrize("variance", [1e-7, 0.1])
def test_members_are_found_beside_others_that_are_not_listed(
    variance: float, members: Sequence[int], complete: bool
) -> None:
    """Four of a message's six may be nobody's candidates: no noise that a list explains. Gradients
    are differences from the mean of the list's, so that they add up to nothing.
    """
    draw = torch_rng()
    every = 5 * torch.randn(34, 3000, generator=draw)
    every[:30] -= every[:30].mean(0)
    y = every[list(members)].mean(0) + variance**0.5 * torch.randn(3000, generator=draw)
    told = WhitenedMessage({"w": y}, {"w": torch.zeros(3000)}, 6, variance)
    one = MatchedFilter([told], None, 30, draw)
    one.add(range(30), {"w": every[:30]})
    prior = torch.full((30,), 1 / 30, dtype=torch.float64)
    assert one.explains(0, prior) == complete
    listed = [member for member in members if member < 30]
    found = one.log_ratio(0, prior) if complete else one.regressed(0, prior)
    assert sorted(found.topk(len(listed)).indices.tolist()) == listed


@pytest.mark.long
def test_of_a_list_of_half_a_batch_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of undefended messages, exact as they are, than by who believes his list to be complete."""
    model, _ = make_task("vit")

    def told() -> int:
        found = 0
        for seed in range(8):
            list_ = images(34, seed)
            labels = [0, 1, 1, 0, 2, 1]
            batch = batch_of([list_[i] for i in (0, 1, 2, 30, 31, 32)], labels)
            listed = labels[:3] + [i % 3 for i in range(27)]
            attack = make_attack("candidates", candidates=list_[:30], labels=listed)
            ranking = attack(seen_by(model, batch, LAWS["none"]), torch_rng()).ranking
            found += len(set(ranking[:3].tolist()) & {0, 1, 2})
        return found

    one = told()
    monkeypatch.setattr(MatchedFilter, "explains", lambda *_: True)
    assert one > told() + 2


def test_coordinates_that_weigh_nothing_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 coordinates 20,000 // 50 are heard: products of these are exact where a sketch of
    all would collide.
    """
    monkeypatch.setattr(regression, "ENTRIES", 1)
    monkeypatch.setattr(regression, "SHORTEST", 501)
    draw = torch_rng()
    shapes = {"a": (100, 100), "b": (10_000,), "c": (7,)}
    h = {n: torch.randn(4, *shape, generator=draw) for n, shape in shapes.items()}
    weights = {n: (1 + torch.rand(s, generator=draw)) for n, s in shapes.items()}
    for name in ("a", "b"):
        weights[name].view(-1)[torch.arange(10_000) % 50 != 3] = 0
    told = WhitenedMessage({n: g[0] + g[1] for n, g in h.items()},
                    {n: torch.zeros_like(g[0]) for n, g in h.items()}, 2, 1.0)  # fmt: skip
    one = MatchedFilter([told], weights, 4, draw)
    one.add(range(4), h)
    assert one.size == one.length == one.sketches.shape[1] == 407
    flat = torch.cat([(h[n] * weights[n]).flatten(1) for n in shapes], 1).double()
    products = flat @ flat.T
    near = {"rtol": 1e-5, "atol": 1e-3}  # of some 1,000, in float32
    torch.testing.assert_close((one.sketches @ one.sketches.T).double(), products, **near)
    torch.testing.assert_close(one.products[:, 0], products[0] + products[1], **near)
    torch.testing.assert_close(one.norms, products.diagonal(), **near)


def test_sketches_keep_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "ENTRIES", 3 * 20_000)
    draw = torch_rng()
    h = torch.randn(3, 60_000, generator=draw)
    h[1] += h[0]
    shapes = {"a": (100, 100), "b": (200, 250)}
    parts = {
        n: p.reshape(-1, *s)
        for (n, s), p in zip(shapes.items(), h.split([10_000, 50_000], 1), strict=True)
    }
    first = {n: p[0] for n, p in parts.items()}
    told = WhitenedMessage(first, {n: torch.zeros_like(p) for n, p in first.items()}, 2, 1.0)
    one = MatchedFilter([told], None, 3, draw)
    one.add([0, 1, 2], parts)
    exact, rough = h.double() @ h.double().T, (one.sketches @ one.sketches.T).double()
    assert one.sketches.shape[1] == 20_001
    assert (exact - rough).abs().max() < 0.06 * exact.max()  # some seven deviations
    torch.testing.assert_close(one.products[:, 0], exact[0], rtol=1e-4, atol=0.05)
    torch.testing.assert_close(one.norms, exact.diagonal(), rtol=1e-4, atol=0)


# --- gradients of many batches


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "bert_lora", "llama", "vit"])
def test_vectorized_as_one_by_one(name: str) -> None:
    model, batch = make_task(name, dtype=torch.float32, batch_size=5)
    singles = [{key: entry[i : i + 1] for key, entry in batch.items()} for i in range(5)]
    gmap = GradientMap(model, singles[0])
    names = list(gmap.parameters)
    fast, slow = ManyGradients(model, names), ManyGradients(model, names, vectorized=False)
    found = dict(_rows(fast(singles)))
    assert all(fast._allowed.values())  # it did run so
    assert fast._allowed
    for number, one in _rows(slow(singles)):
        own = GradientMap(model, singles[number]).gradient()
        size = flat(own).norm()
        for other in (found[number], own):
            assert (flat(one) - flat(other)).norm() < 1e-5 * size


def _rows(found: Any) -> Any:
    for rows, gradients in found:
        for place, row in enumerate(rows):
            yield row, {name: g[place] for name, g in gradients.items()}


@pytest.mark.long
def test_scores_are_the_same_one_by_one() -> None:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    list_ = texts(8, length=5)
    noise = make_defense("gaussian_noise", relative_scale=1)
    for size in (1, 3):
        seen = seen_by(model, batch_of(list_[:size], [1, 0, 1][:size]), noise)
        fast, slow = (
            make_attack("candidates", candidates=list_, vectorized=v)(seen, torch_rng())
            for v in (True, False)
        )
        scale = fast.scores.max() - fast.scores.min()
        assert (fast.scores - slow.scores).abs().max() < 1e-4 * scale


@pytest.mark.parametrize(
    "defense",
    [
        make_defense("gaussian_noise", relative_scale=20),
        make_defense("gaussian_noise", relative_scale=20, strength="own"),
        make_defense("optimal_noise", relative_scale=5),
        make_defense("dp_sgd", clip=0.1, relative_scale=2),
    ],
)
def test_likelihoods_by_products_write_no_gradient_out(
    defense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    listed = texts(12, length=5)
    seen = seen_by(model, batch_of(listed[:1], [1]), defense)
    attack = make_attack("candidates", candidates=listed)
    written = make_attack("candidates", candidates=listed, vectorized=False)(seen, torch_rng())
    evaluated = []
    plain = ManyGradients._evaluate_one
    monkeypatch.setattr(
        ManyGradients, "_evaluate_one", lambda *args: evaluated.append(args) or plain(*args)
    )
    found = attack(seen, torch_rng())
    assert len(evaluated) <= 2  # to try the products out
    scale = written.scores.max() - written.scores.min()
    torch.testing.assert_close(found.scores, written.scores, rtol=0, atol=1e-4 * float(scale))
    assert found.ranking.tolist() == written.ranking.tolist()


def test_statistics_of_a_batch_run_one_by_one() -> None:
    """Batch normalization that counts cannot be vectorized; nothing of it is changed."""
    model, batch = small_convolution(batch_norm=True)
    before = copy.deepcopy(model.state_dict())
    singles = [{key: entry[i : i + 1] for key, entry in batch.items()} for i in range(2)]
    many = ManyGradients(model, ["head.weight"])
    ((_, found),) = many(singles)
    assert not any(many._allowed.values())
    for row, single in enumerate(singles):
        own = GradientMap(copy.deepcopy(model), single).gradient()["head.weight"]
        torch.testing.assert_close(found["head.weight"][row], own)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_draws_of_dropout_are_averaged_and_counted() -> None:
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.3)
    assert not has_draws(model, batch)
    model.train()
    assert has_draws(model, batch)
    state = torch.get_rng_state()
    one, two, both = (ManyGradients(model, ["classifier.weight"], s) for s in ([1], [2], [1, 2]))
    values = [next(many([batch]))[1]["classifier.weight"] for many in (one, two, both)]
    assert not torch.equal(values[0], values[1])
    torch.testing.assert_close(values[2], (values[0] + values[1]) / 2)
    spread = both.spread([batch])["classifier.weight"]
    assert spread == pytest.approx(float((values[0] - values[1]).square().mean() / 2), rel=1e-4)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.long
def test_who_ran_dropout_is_found() -> None:
    model, _ = make_task("bert", dtype=torch.float32, dropout=0.02, num_hidden_layers=1)
    list_ = texts(8, length=5)
    model.train()
    ranks = []
    for number in range(4):
        torch.manual_seed(number)
        seen = seen_by(model, batch_of([list_[number]], [1]), mechanism=Mechanism())
        found = make_attack("candidates", candidates=list_)(seen, torch_rng())
        ranks.append(found.ranking.tolist().index(number))
    assert sum(rank == 0 for rank in ranks) >= 3, ranks


# --- who is found

LAWS = {
    "none": make_defense("none"),
    "gaussian": make_defense("gaussian_noise", relative_scale=0.05),
    "laplace": make_defense("laplace_noise", relative_scale=0.05),
    "optimal": make_defense("optimal_noise", relative_scale=0.05),
    "dp_sgd": make_defense("dp_sgd", clip=0.1, relative_scale=0.05),
    "coordinate": make_defense("optimal_dp_sgd", clip=0.05, relative_scale=0.05),
    "pruning": make_defense("pruning", ratio=0.9),
    "optimal_pruning": make_defense("optimal_pruning", ratio=0.9),
    "nearest": make_defense("quantization", bits=2),
    "stochastic": make_defense("quantization", bits=3, stochastic=True),
    "sign": make_defense("quantization", sign_only=True),
    "soteria": make_defense("soteria", ratio=0.5),
    "chain": chain(
        make_defense("pruning", ratio=0.5), make_defense("gaussian_noise", relative_scale=0.05)
    ),
    "chain_of_laplace": chain(
        make_defense("pruning", ratio=0.5), make_defense("laplace_noise", relative_scale=0.05)
    ),
}


@functools.cache
def small(kind: str) -> tuple[nn.Module, list[Any]]:
    """A model, and a list for it."""
    model, _ = make_task(kind)
    return model, images(14) if kind == "vit" else texts(14, length=5)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("bert", name) for name in LAWS), ("vit", "none"), ("vit", "nearest")]
)
def test_one_sample_is_found_behind_each_law(name: str, kind: str) -> None:
    model, list_ = small(kind)
    seen = seen_by(model, batch_of([list_[13]], [2]), LAWS[name])
    assert seen.mechanism is not None
    found = make_attack("candidates", candidates=list_)(seen, torch_rng())
    assert found.ranking[0] == 13
    assert found.posterior[13] > 0.9
    assert float(found.posterior.sum()) == pytest.approx(1)
    # Not knowing the label costs little; nor does not knowing the defense, where it leaves most.
    if name not in ("coordinate", "optimal_pruning", "sign"):
        blind = make_attack("candidates", candidates=list_)(
            replace(seen, mechanism=None), torch_rng()
        )
        assert 13 in blind.ranking[:3]
    unlabeled = replace(seen, labels=None)
    assert 13 in make_attack("candidates", candidates=list_)(unlabeled, torch_rng()).ranking[:2]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bert_lora", "none"), ("bert_lora", "gaussian"), ("vit", "none"), ("vit", "optimal"),
     ("bert", "pruning"), ("bert", "nearest")],
)  # fmt: skip
def test_members_of_a_batch_are_found(name: str, kind: str) -> None:
    model, list_ = small(kind)
    members = [3, 8, 12]
    seen = seen_by(model, batch_of([list_[i] for i in members], [0, 1, 1]), LAWS[name])
    found = make_attack("candidates", candidates=list_)(seen, torch_rng())
    assert len(set(found.ranking[:3].tolist()) & set(members)) >= 2
    assert float(found.posterior.sum()) == pytest.approx(3, abs=1e-3)
    if name == "none":
        assert sorted(found.ranking[:3].tolist()) == members
        assert float(found.posterior[members].min()) > 0.9


@pytest.mark.long
def test_members_are_found_where_most_entries_are_clipped() -> None:
    """What is clipped on average is left out: it says nothing of who is in the message."""
    model, list_ = small("bert")
    defense = make_defense("optimal_dp_sgd", clip=0.005, relative_scale=0.05)
    told = 0
    for members in ([3, 8, 12], [0, 5, 9], [1, 2, 13], [4, 6, 11], [2, 7, 10], [5, 8, 13]):
        seen = seen_by(model, batch_of([list_[i] for i in members], [0, 1, 1]), defense)
        found = make_attack("candidates", candidates=list_)(seen, torch_rng())
        told += len(set(found.ranking[:3].tolist()) & set(members))
    shared = torch.cat([g.flatten() for g in seen.gradient.values()]).abs()
    assert float((shared > 0.004).double().mean()) > 0.5
    assert told >= 11  # of 18; a blind guess has 3.9


@pytest.mark.long
def test_members_are_found_where_each_is_clipped() -> None:
    """One large gradient does not drown the others, for who knows that each is clipped."""
    torch.manual_seed(0)
    model, _ = small_convolution()
    list_ = images(30)
    list_[20:] = [40 * one for one in list_[20:]]
    defense = make_defense("dp_sgd", per_sample=True, clip=0.05, noise_multiplier=0.05)
    told = {True: 0, False: 0}
    for first in range(10):
        members = [first, 10 + first, 20 + first]
        seen = seen_by(model, batch_of([list_[i] for i in members], [0, 1, 1]), defense)
        for knows in told:
            mechanism = seen.mechanism if knows else replace(seen.mechanism, clip_sample=None)
            attack = make_attack("candidates", candidates=list_, labels=[0] * 10 + [1] * 20)
            found = attack(replace(seen, mechanism=mechanism), torch_rng())
            told[knows] += len(set(found.ranking[:3].tolist()) & set(members))
    assert told[True] >= 24, told  # of 30
    assert told[False] < told[True] - 5, told


def test_a_clipped_sample_of_an_expected_batch_is_by_the_formula() -> None:
    model, list_ = small("bert")
    settings = {"clip": 0.5, "noise_multiplier": 0.4, "expected_batch_size": 8.0}
    defense = make_defense("dp_sgd", per_sample=True, **settings)
    seen = seen_by(model, batch_of([list_[3]], [1]), defense)
    found = make_attack("candidates", candidates=list_, labels=[1] * len(list_))(seen, torch_rng())
    y, std = flat(seen.gradient), 0.4 * 0.5 / 8
    own = [gradient_of(model, one, 1) for one in list_]
    sent = torch.stack([g * min(1.0, 0.5 / float(g.norm())) / 8 for g in own])
    wanted = -(y - sent).square().sum(1) / (2 * std**2)
    torch.testing.assert_close(
        found.scores - found.scores[0], wanted - wanted[0], rtol=1e-3, atol=1e-3
    )


def test_messages_that_were_clipped_otherwise_are_not_attacked_together() -> None:
    model, list_ = small("bert")
    one = seen_by(model, batch_of([list_[3]], [1]), mechanism=Mechanism(clip_sample=1.0))
    with pytest.raises(ValueError, match="clipped alike"):
        make_attack("candidates", candidates=list_).reconstruct_many(
            [one, replace(one, mechanism=Mechanism())]
        )


@pytest.mark.long
def test_pure_noise_names_nobody() -> None:
    """Ranks are uniform over who is said to be the client's: their mean, and how many are first."""
    model, _ = make_task("bert", dtype=torch.float32)
    list_ = texts(10)
    mechanism = Mechanism(noise="gaussian", variance=1.0)
    observations, draw = [], torch_rng()
    seen = seen_by(model, batch_of([list_[4]], [1]))
    for number in range(120):
        noise = {n: torch.randn(g.shape, generator=draw) for n, g in seen.gradient.items()}
        observations.append(
            replace(seen, gradient=noise, mechanism=mechanism if number % 2 else None)
        )
    found = make_attack("candidates", candidates=list_).reconstruct_many(observations, torch_rng())
    for own in (found[::2], found[1::2]):
        ranks = torch.tensor(
            [one.ranking.tolist().index(i % 10) + 1.0 for i, one in enumerate(own)]
        )
        # deviation of a mean of 60 ranks from 1 to 10: 0.37
        assert abs(float(ranks.mean()) - 5.5) < 1.5
        assert int((ranks == 1).sum()) <= 16  # 6 expected, deviation 2.3


@pytest.mark.long
def test_together_is_each_by_itself() -> None:
    """Also of other labels, known or not, and of other sizes; up to float32's rounding."""
    model, _ = make_task("bert")
    list_ = texts(8, length=5)
    batch = batch_of(list_[:2], [1, 0])
    observations = [seen_by(model, batch, LAWS[n]) for n in ("none", "gaussian", "pruning")]
    observations.append(replace(observations[1], mechanism=None))
    observations.append(replace(observations[0], labels=None))
    observations.append(seen_by(model, batch_of(list_[3:4], [1]), LAWS["gaussian"]))
    observations.append(seen_by(model, batch_of(list_[3:6], [1, 1, 0]), LAWS["gaussian"]))
    observations.append(seen_by(model, batch_of(list_[3:6], [1, 1, 1]), LAWS["gaussian"]))
    attack = make_attack("candidates", candidates=list_)
    for found, seen in zip(
        attack.reconstruct_many(observations, torch_rng()), observations, strict=True
    ):
        alone = attack(seen, torch_rng())
        torch.testing.assert_close(found.scores, alone.scores, rtol=1e-5, atol=1e-5)
        assert len(found.token_ids) == seen.batch_size


@pytest.mark.long
def test_what_earlier_messages_left_out_together_is_each_by_itself() -> None:
    model, _ = make_task("bert")
    list_ = texts(8, length=5)
    observations = []
    for name in ("pruning", "gradient_sketch"):
        settings = {"pruning": {"ratio": 0.5}, "gradient_sketch": {"samples": 16}}[name]
        for members, labels in (([0, 1], [1, 0]), ([2, 3, 4], [1, 1, 0])):
            defense = make_defense(name, error_feedback=True, min_batches=1, **settings)
            defense.prepare(model, None)
            batch = batch_of([list_[i] for i in members], labels)
            observations.append(seen_by(model, batch, defense))
    attack = make_attack("candidates", candidates=list_, labels=[1, 0, 1, 1, 0, 0, 1, 0])
    for found, seen in zip(
        attack.reconstruct_many(observations, torch_rng()), observations, strict=True
    ):
        alone = attack(seen, torch_rng())
        assert found.ranking.shape == alone.ranking.shape
        torch.testing.assert_close(found.scores, alone.scores, rtol=1e-5, atol=1e-5)


def test_texts_are_cut_to_the_length_of_each_message() -> None:
    """Who has the right text in the right length is found, in each of several lengths."""
    model, _ = make_task("bert")
    list_ = texts(6, length=6) + texts(6, length=3, seed=2)
    short = [text[:3] for text in list_]
    observations = [
        seen_by(model, batch_of([list_[2], list_[7]], [1, 0])),
        seen_by(model, batch_of([short[4], list_[8]], [0, 0])),
        seen_by(model, batch_of([list_[9]], [1]), LAWS["none"]),
    ]
    attack = make_attack("candidates", candidates=list_)
    found = attack.reconstruct_many(observations, torch_rng())
    assert [set(one.ranking[:2].tolist()) for one in found[:2]] == [{2, 7}, {4, 8}]
    assert found[2].ranking[0] == 9
    assert [one.token_ids[0] for one in found[2:]] == [list_[9]]
    assert sorted(found[1].token_ids) == sorted([short[4], list_[8]])


@pytest.mark.parametrize("mechanism", [Mechanism(noise="gaussian", variance=1.0), None])
def test_where_lengths_are_known_texts_of_others_are_as_good_as_excluded(mechanism: Any) -> None:
    """Behind noise: a longer text that starts as the client's, and shorter ones."""
    model, _ = make_task("bert")
    own = texts(5, length=5)
    list_ = [[*own[2], 9, 9], *own, *texts(4, length=3, seed=2)]
    seen = seen_by(model, batch_of([own[2]], [1]), mechanism=mechanism)
    noise = torch.randn(len(flat(seen.gradient)), generator=torch_rng()).double()
    seen = replace(seen, gradient=like(flat(seen.gradient) + noise, seen))
    attack = make_attack("candidates", candidates=list_)
    told = attack(replace(seen, attention_mask=torch.ones(1, 5)), torch_rng())
    open_ = attack(seen, torch_rng()).scores
    rare = torch.tensor([len(text) != 5 for text in list_])
    torch.testing.assert_close(told.scores, open_ + math.log(1e-6) * rare)
    assert set(told.ranking[:5].tolist()) == {1, 2, 3, 4, 5}
    assert float(told.posterior[rare].sum()) < 1e-4 < float(open_.softmax(0)[rare].sum())
    # Where none is as long, they were cut otherwise.
    two = torch.ones(1, 5).index_fill(1, torch.tensor([2, 3, 4]), 0)
    assert torch.equal(attack(replace(seen, attention_mask=two), torch_rng()).scores, open_)


def test_a_text_may_have_been_cut_to_the_known_length() -> None:
    model, _ = make_task("bert")
    tokenizer = word_tokenizer(WORDS)
    batch = {**tokenizer(["w3 w7 w5"], return_tensors="pt"), "labels": torch.tensor([1])}
    seen = seen_by(model, batch, attention_mask=batch["attention_mask"], tokenizer=tokenizer)
    found = make_attack("candidates", candidates=["w3 w7 w4", "w3 w7 w5 w8", "w3 w7"])(seen)
    assert found.ranking[0] == 1
    assert found.scores[2] == found.scores.min()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gaussian_noise", "gradient_sketch"])
def test_single_texts_of_other_lengths_together_are_each_by_itself(name: str) -> None:
    """Each is compared with what its length allows, and with all of that."""
    settings = {
        "gaussian_noise": {"relative_scale": 1.0},
        "gradient_sketch": {"samples": 16, "min_batches": 1},
    }[name]
    model, _ = make_task("bert")
    list_ = texts(4, length=3) + texts(4, length=6, seed=2)
    observations = []
    for text, label in ((list_[1], 0), (list_[5], 1), (list_[6][:4], 1), (list_[2], 0)):
        defense = make_defense(name, **settings)
        defense.prepare(model, None)
        observations.append(seen_by(model, batch_of([text], [label]), defense))
    attack = make_attack("candidates", candidates=list_, labels=[1, 0, 0, 1, 1, 1, 1, 0])
    for found, seen in zip(
        attack.reconstruct_many(observations, torch_rng()), observations, strict=True
    ):
        alone = attack(seen, torch_rng())
        torch.testing.assert_close(found.scores, alone.scores, rtol=1e-5, atol=1e-5)


def test_of_other_models_or_kinds_of_training_are_not_attacked_together() -> None:
    model, _ = make_task("bert")
    seen = seen_by(model, batch_of(texts(2, length=5), [1, 0]))
    attack = make_attack("candidates", candidates=texts(8, length=5))
    with pytest.raises(ValueError, match="one model"):
        attack.reconstruct_many([seen, replace(seen, model=copy.deepcopy(model))])
    local = LocalTraining((0.1, 0.1), make_optimizer("sgd"))
    with pytest.raises(ValueError, match="kind of local training"):
        attack.reconstruct_many([seen, replace(seen, local=local)])
    one = seen_by(model, batch_of(texts(1, length=5), [1]), local=local)
    with pytest.raises(ValueError, match="to first order"):
        attack.reconstruct_many([replace(seen, local=local), one])


# --- several uploads


@pytest.mark.long
def test_log_likelihoods_of_changing_weights_add_up() -> None:
    list_, uploads = texts(8), []
    for seed in range(3):
        model, _ = make_task("bert")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch_rng(seed), dtype=p.dtype))
        noise = make_defense("gaussian_noise", relative_scale=5)
        uploads.append(seen_by(model, batch_of([list_[2]], [1]), noise))
    attack = make_attack("candidates", candidates=list_)
    together = attack.history(uploads, torch_rng())
    total = sum(attack(seen, torch_rng()).scores for seen in uploads)
    torch.testing.assert_close(together.scores, total)
    torch.testing.assert_close(together.posterior, total.softmax(0))


def test_repeated_batches_are_averaged_first() -> None:
    model, _ = make_task("bert")
    list_ = texts(8)
    seen = seen_by(model, batch_of([list_[2]], [1]), LAWS["gaussian"])
    noise = [torch_rng(s) for s in (1, 2, 3, 4)]
    uploads = [
        replace(
            seen,
            gradient={
                n: g + torch.randn(g.shape, generator=draw, dtype=g.dtype)
                for n, g in seen.gradient.items()
            },
            mechanism=Mechanism(noise="gaussian", variance=1.0),
        )
        for draw in noise
    ]
    attack = make_attack("candidates", candidates=list_)
    mean = average(uploads)
    assert mean.mechanism == Mechanism(noise="gaussian", variance=0.25)
    torch.testing.assert_close(attack.history(uploads).scores, attack(mean).scores)
    with pytest.raises(ValueError, match="at least one"):
        attack.history([])


def uneven(seen: Any, variances: Sequence[Any], noise: str = "gaussian") -> list[Any]:
    """Uploads behind noise of these variances, in units of the gradient's mean square."""
    unit = float(flat(seen.gradient).square().mean())
    found = []
    for seed, share in enumerate(variances):
        v = like(share * unit + torch.zeros_like(flat(seen.gradient)), seen)
        gradient = {
            n: g + v[n].sqrt() * torch.randn(g.shape, generator=torch_rng(seed), dtype=g.dtype)
            for n, g in seen.gradient.items()
        }
        mechanism = Mechanism(
            noise=noise, variance=v if isinstance(share, Tensor) else share * unit
        )
        found.append(replace(seen, gradient=gradient, mechanism=mechanism))
    return found


@pytest.mark.parametrize("kind", ["numbers", "by entry", "both"])
def test_the_mean_of_uneven_noise_is_by_the_formula(kind: str) -> None:
    model, _ = make_task("bert")
    seen = seen_by(model, batch_of(texts(1), [1]))
    size, draw = len(flat(seen.gradient)), torch_rng(9)
    drawn = [0.1 + torch.rand(size, generator=draw).double() for _ in range(3)]
    drawn[1][:5] = 0.0  # exact there
    variances: list[Any] = {
        "numbers": [1.0, 100.0, 4.0], "by entry": drawn, "both": [drawn[0], 2.0, drawn[2]],
    }[kind]  # fmt: skip
    uploads = uneven(seen, variances)
    v = torch.stack([flat({n: one.mechanism.variance_of(n) + torch.zeros_like(g)
                           for n, g in seen.gradient.items()}) for one in uploads])  # fmt: skip
    y = torch.stack([flat(one.gradient) for one in uploads])
    expected = torch.where(v[1] == 0, y[1], (y / v).sum(0) / (1 / v).sum(0))
    for ordered in (uploads, uploads[::-1]):
        granted = [
            replace(one, noise_variance=one.mechanism.variance, mechanism=None) for one in ordered
        ]
        for mean in (average(ordered), average(granted)):
            told = mean.noise_variance if mean.mechanism is None else mean.mechanism.variance
            assert isinstance(told, float) == (kind == "numbers")
            if isinstance(told, float):
                told = {n: torch.full_like(g, told) for n, g in seen.gradient.items()}
            torch.testing.assert_close(flat(mean.gradient), expected)
            torch.testing.assert_close(flat(told), 1 / (1 / v).sum(0))


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_uneven_uploads_tell_what_each_tells_in_any_order(noise: str) -> None:
    """Of one sample log-likelihoods add up, whether or not there is a mean that says the same."""
    model, _ = make_task("bert")
    list_ = texts(8)
    uploads = uneven(seen_by(model, batch_of([list_[2]], [1])), [100.0, 0.5, 1e4], noise)
    attack = make_attack("candidates", candidates=list_, rounding=1e-9)
    total = sum(attack(one, torch_rng()).scores for one in uploads)
    for ordered in (uploads, uploads[::-1]):
        scores = attack.history(ordered, torch_rng()).scores
        torch.testing.assert_close(scores - scores[0], total - total[0], rtol=1e-6, atol=1e-6)


def test_a_noisy_upload_does_not_spoil_a_precise_one() -> None:
    """Nor of several samples, where others' gradients are the same in both."""
    model, _ = make_task("bert")
    list_ = texts(12, length=5)
    seen = seen_by(model, batch_of([list_[2], list_[7]], [1, 0]))
    attack = make_attack("candidates", candidates=list_)
    precise, noisy = uneven(seen, [1e-4, 1e4])
    alone = attack(precise, torch_rng())
    for ordered in ([precise, noisy], [noisy, precise]):
        both = attack.history(ordered, torch_rng())
        assert set(both.ranking[:2].tolist()) == {2, 7}
        torch.testing.assert_close(both.posterior, alone.posterior, rtol=1e-2, atol=1e-2)


def test_uploads_with_other_laws_have_no_mean_but_a_history() -> None:
    model, _ = make_task("bert")
    list_ = texts(8)
    seen = seen_by(model, batch_of([list_[2]], [1]), LAWS["none"])
    (noisy,) = uneven(seen, [1.0])
    for other in (
        seen,
        replace(noisy, mechanism=None),
        replace(noisy, noise_variance=1.0),
        replace(noisy, mechanism=replace(noisy.mechanism, clip_norm=1.0)),
        replace(noisy, mechanism=replace(noisy.mechanism, noise="laplace")),
        replace(noisy, local=LocalTraining((0.1,), make_optimizer("sgd"))),
    ):
        with pytest.raises(ValueError, match="have no mean"):
            average([noisy, other])
    attack = make_attack("candidates", candidates=list_)
    found = attack.history([noisy, seen], torch_rng()).scores
    total = attack(noisy, torch_rng()).scores + attack(seen, torch_rng()).scores
    torch.testing.assert_close(found, total)


@pytest.mark.parametrize("told", ["mechanism", "noise_variance"])
def test_what_was_withheld_takes_no_part_in_a_mean(told: str) -> None:
    model, _ = make_task("bert")
    list_ = texts(8)
    seen = seen_by(model, batch_of([list_[2]], [1]))
    size = len(flat(seen.gradient))
    kept = [torch.rand(size, generator=torch_rng(seed)) < 0.5 for seed in (1, 2)]
    uploads = []
    for seed, (here, scale) in enumerate(zip(kept, (1.0, 3.0), strict=True)):
        v = scale * here.double()
        y = flat(seen.gradient) + torch.randn(size, generator=torch_rng(seed)).double() * v.sqrt()
        mechanism = Mechanism(selection="chosen", noise="gaussian", variance=like(v, seen))
        grant = (
            {"mechanism": mechanism}
            if told == "mechanism"
            else {"noise_variance": mechanism.variance}
        )
        uploads.append(replace(seen, gradient=like(y * here, seen), **grant))
    y = torch.stack([flat(one.gradient) for one in uploads])
    precision = torch.stack(
        [here.double() / scale for here, scale in zip(kept, (1.0, 3.0), strict=True)]
    )
    mean = average(uploads)
    sent = precision.sum(0) > 0
    expected = (y * precision).sum(0)[sent] / precision.sum(0)[sent]
    torch.testing.assert_close(flat(mean.gradient)[sent], expected)
    assert not flat(mean.gradient)[~sent].any()
    variance = mean.mechanism.variance if told == "mechanism" else mean.noise_variance
    torch.testing.assert_close(flat(variance)[sent], 1 / precision.sum(0)[sent])
    if told == "mechanism":
        attack = make_attack("candidates", candidates=list_, rounding=1e-9)
        total = sum(attack(one, torch_rng()).scores for one in uploads)
        scores = attack.history(uploads, torch_rng()).scores
        torch.testing.assert_close(scores - scores[0], total - total[0], rtol=1e-6, atol=1e-6)


# --- lists


def test_texts_ids_and_the_vocabulary_at_places() -> None:
    model, _ = make_task("bert")
    tokenizer = word_tokenizer(WORDS)
    batch = {**tokenizer(["w3 w7 w5"], return_tensors="pt"), "labels": torch.tensor([1])}
    seen = seen_by(model, batch, mechanism=Mechanism(), tokenizer=tokenizer)
    found = make_attack("candidates", candidates=["w1 w2", "w3 w7 w5", "w9"])(seen)
    assert found.text == ["w3 w7 w5"]
    assert found.token_ids == batch["input_ids"].tolist()
    every = make_attack("candidates", candidates="w3 w1 w5", places=[2])(seen)
    assert len(every.scores) == 20
    assert every.text == ["w3 w7 w5"]
    few = make_attack(
        "candidates", candidates=[2, 7, 4, 4, 3], places=[2, 3], words=["w7", "w5", 4]
    )(seen)
    assert few.scores.shape == (9,)
    assert few.text == ["w3 w7 w5"]


def test_own_labels_and_tokens() -> None:
    model, _ = make_task("bert")
    list_ = texts(6)
    seen = seen_by(model, batch_of([list_[1]], [2]), mechanism=Mechanism())
    own = make_attack("candidates", candidates=list_, labels=[0, 2, 1, 0, 1, 2])(seen)
    assert own.ranking[0] == 1
    lm, _ = make_task("gpt2_lm")
    ids = torch.tensor([list_[1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    seen = seen_by(lm, batch, mechanism=Mechanism())
    assert make_attack("candidates", candidates=list_)(seen).ranking[0] == 1
    mapped = [{"input_ids": torch.tensor([t]), "labels": torch.tensor([t])} for t in list_]
    assert make_attack("candidates", candidates=mapped)(seen).ranking[0] == 1


def labeled(kind: str, list_: list[list[int]]) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model whose loss is a mean over tokens, and texts with labels for it."""
    model, _ = make_task(kind)
    made = []
    for text in list_:
        ids = torch.tensor([text])
        labels = ids.clone() if kind != "t5" else ids[:, : max(1, len(text) // 2)]
        if kind == "bert_mlm":
            labels[:, 1::2] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return model, made


@pytest.mark.parametrize("kind", ["gpt2_lm", "bert_mlm", "t5"])
def test_a_message_of_one_is_a_mean_over_its_tokens(kind: str) -> None:
    model, list_ = labeled(kind, texts(6))
    gradients = [flat(GradientMap(model, one).gradient()) for one in list_]
    y = gradients[2] + 0.1 * torch.randn(len(gradients[2]), generator=torch_rng()).double()
    seen = seen_by(
        model, list_[2], labels=None, mechanism=Mechanism(noise="gaussian", variance=0.01)
    )
    seen = replace(seen, gradient=like(y, seen))
    scores = make_attack("candidates", candidates=list_, rounding=1e-9)(seen).scores
    expected = torch.stack([-(y - g).square().sum() / 0.02 for g in gradients])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    # Without a mechanism by distance or cosine, in units of the list's mean, which is taken off; of
    # the gradient itself, where it points away from that.
    blind = make_attack("candidates", candidates=list_)(replace(seen, mechanism=None)).ranking
    center = torch.stack(gradients).mean(0)
    scale = float(y @ center / center.square().sum())
    h, rest = torch.stack(gradients) - center, y / (scale if scale > 0 else 1.0) - center
    statistics = h @ rest - h.square().sum(1) / 2, h @ rest / h.norm(dim=1)
    assert blind.tolist() in [told.argsort(descending=True).tolist() for told in statistics]


def test_texts_in_a_message_weigh_by_what_they_predict() -> None:
    """Two of 3 and of 6 tokens add 2 and 5 of 7 labels, and others of the list are like them."""
    list_ = texts(7, length=3) + texts(3, length=6, seed=2)
    model, rows = labeled("gpt2_lm", list_)
    batch = batch_of([list_[1], list_[8]], [0, 0])
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    mechanism = Mechanism(noise="gaussian", variance=0.05)
    seen = seen_by(
        model, batch, labels=None, mechanism=mechanism, attention_mask=batch["attention_mask"]
    )
    y = flat(seen.gradient)
    y = y + 0.05**0.5 * torch.randn(len(y), generator=torch_rng()).double()
    found = make_attack("candidates", candidates=list_, rounding=1e-9)(
        replace(seen, gradient=like(y, seen))
    )
    added = torch.stack(
        [(len(t) - 1) / 7 * flat(GradientMap(model, one).gradient())
         for t, one in zip(list_, rows, strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(added[1] + added[8], flat(seen.gradient))
    h = added - added.mean(0)
    inverse = torch.linalg.inv(0.05 * torch.eye(len(y)).double() + h.T @ h / len(h))
    expected = h @ inverse @ (y - 2 * added.mean(0)) - ((h @ inverse) * h).sum(1) / 2
    torch.testing.assert_close(found.scores, expected, rtol=1e-3, atol=1e-3)


def test_shared_embeddings_count() -> None:
    """Which rows of the table are not zero is the strongest fact there is."""
    model, _ = make_task("bert", dtype=torch.float32)
    list_ = texts(6)
    batch = batch_of([list_[1]], [2])
    gradient = GradientMap(model, batch, share_input_embeddings=True).gradient()
    seen = Observation(
        model, gradient, (1, len(list_[1])), labels=batch["labels"], mechanism=Mechanism()
    )
    fast, slow = (
        make_attack("candidates", candidates=list_, vectorized=v)(seen) for v in (True, False)
    )
    assert fast.ranking[0] == 1
    torch.testing.assert_close(fast.scores, slow.scores, rtol=1e-4, atol=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing to compare with"),
        ({"candidates": "one text"}, "nothing to compare with"),
        ({"candidates": [torch.rand(3, 8, 8)]}, "holds none for tokens"),
        ({"candidates": [[5, 6]], "labels": [1, 2]}, "2 labels for 1 candidates"),
        ({"candidates": ["w1"]}, "need a tokenizer"),
        ({"candidates": [5, 6], "places": [2]}, "from 0 to 1"),
        ({"candidates": [5, 6, 7], "places": [0, 1], "words": list(range(500))}, "more than"),
        ({"candidates": [[5, 6], [5, 24]]}, "the token id 24, where the model's are from 0 to 23"),
        ({"candidates": [[5, -1]]}, "the token id -1"),
        ({"candidates": [{"input_ids": torch.tensor([5, 99])}]}, "the token id 99"),
        ({"candidates": [5, 6], "places": [1], "words": [7, 1000]}, "the token id 1000"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    model, _ = make_task("bert")
    seen = seen_by(model, batch_of(texts(1), [1]))
    with pytest.raises(ValueError, match=message):
        make_attack("candidates", **settings)(seen)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="draws"):
        make_attack("candidates", draws=0)
    with pytest.raises(ValueError, match="rounding"):
        make_attack("candidates", rounding=0)
    with pytest.raises(ValueError, match="variance"):
        Mechanism(noise="gaussian")
    with pytest.raises(ValueError, match="selection"):
        Mechanism(selection="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="levels"):
        Mechanism(levels=4)
