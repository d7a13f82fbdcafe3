"""On two ranks, no unprotected gradient leaves a rank, and no peer can repeat the noise."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import make_model
from exchange_worker import NOISE_RUNS, STEPS
from launcher import launch
from torch import Tensor
from transformers import set_seed

from hf_gradguard.defenses.noise import add_noise
from hf_gradguard.randomness import Stream, normal

CPU = torch.device("cpu")

pytestmark = pytest.mark.distributed
PROTECTED = ["gaussian_noise", "shared embeddings", "optimal_noise", "dp_sgd", "2 clients"]
SHORTEST = 24  # entries; shorter tensors come to resemble something by chance


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exchange")
    reports = launch("exchange_worker.py", folder)
    return [
        torch.load(folder / f"tensors{rank}.pt") | report for rank, report in enumerate(reports)
    ]


def resemblance(sent: Tensor, target: Tensor) -> float:
    """The largest |cosine| between `target` and any run of `sent` of its length: 1 if a multiple of
    it is in there.
    """
    sent, target = sent.double(), target.flatten().double()
    if len(target) > len(sent) or not target.any():
        return 0.0
    size = len(sent) + len(target)
    products = torch.fft.irfft(
        torch.fft.rfft(sent, size) * torch.fft.rfft(target, size).conj(), size
    )
    squares = torch.cat([torch.zeros(1, dtype=torch.double), sent.square().cumsum(0)])
    energy = squares[len(target) :] - squares[: -len(target)]
    # Where a run is this weak beside the rest, the transform's rounding is all there is.
    cosines = products[: len(energy)].abs() / (
        energy.clamp(min=1e-12 * float(squares[-1])).sqrt() * target.norm()
    )
    return float(cosines.max())


def largest_resemblance(run: dict[str, Any], truth: dict[str, Tensor]) -> dict[str, float]:
    """For every tensor of a true gradient, how much of it was sent."""
    sent = [
        tensor
        for _, tensor in run["sent"]
        if tensor.is_floating_point() and len(tensor) >= SHORTEST
    ]
    return {
        name: max(resemblance(tensor, gradient) for tensor in sent)
        for name, gradient in truth.items()
        if gradient.numel() >= SHORTEST
    }


@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_detector_finds_a_multiple_at_any_place(factor: float) -> None:
    gradient, before, after = torch.randn(40), 100 * torch.randn(333), torch.randn(70)
    assert (
        resemblance(torch.cat([before, factor * gradient, after]), gradient) > 0.9999
    )  # the rest is float32 rounding
    assert resemblance(torch.cat([before, gradient + torch.randn(40), after]), gradient) < 0.99
    assert resemblance(torch.cat([before, after]), gradient) < 0.99


@pytest.mark.parametrize("name", ["stock", "none"])
def test_detector_finds_unprotected_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        run = rank["runs"][name]
        assert len(run["steps"]) == STEPS
        for step in run["steps"]:
            found = largest_resemblance(run, {n: g for n, g in step.items() if n in run["shared"]})
            assert len(found) >= 15
            # Rounding of float32 sums, relative to tensors that are no smaller than a thousandth of
            # the largest one.
            assert min(found.values()) > 0.9999


@pytest.mark.parametrize("name", PROTECTED)
def test_no_unprotected_gradient_leaves_a_rank(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        run = rank["runs"][name]
        for truth in run["messages"] + run["steps"]:
            found = largest_resemblance(run, truth)
            assert len(found) >= 15
            assert max(found.values()) < 0.99, max(found, key=lambda n: found[n])


def test_refined_gradients_resemble_the_true_ones_and_equal_none(
    ranks: list[dict[str, Any]],
) -> None:
    """They are meant to be alike. What the detector finds of an unprotected gradient is above
    0.9999 (see above).
    """
    for rank in ranks:
        run = rank["runs"]["refiner"]
        for truth in run["messages"] + run["steps"]:
            found = largest_resemblance(run, {n: g for n, g in truth.items() if n in run["shared"]})
            assert len(found) >= 15
            assert max(found.values()) < 0.9999, max(found, key=lambda n: found[n])


def first_of(run: dict[str, Any], what: tuple[str, int]) -> int:
    """Where a collective of that kind and size comes first."""
    return [(kind, len(t)) for kind, t in run["sent"]].index(what)


@pytest.mark.parametrize("name", ["none", *PROTECTED, "refiner", "pruning"])
def test_one_bucket_a_step_is_all_that_is_exchanged(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        run = rank["runs"][name]
        truth = run["messages"][0]
        entries = sum(truth[n].numel() for n in run["shared"])
        larger = [(kind, len(t)) for kind, t in run["sent"] if t.is_floating_point() and len(t) > 1]
        flags = []
        if name != "shared embeddings":  # first, which tables a rank's batch indexes
            flags = [larger.pop(0)]
            assert flags == [("allreduce", len(truth))]
            assert set(run["sent"][first_of(run, flags[0])][1].tolist()) <= {0.0, 0.5, 1.0}
        assert larger == [("allreduce", entries)] * STEPS
        # Everything else is one number. Losses and counts, as many as the stock Trainer gathers,
        # are reduced.
        small = Counter(
            (kind, len(t)) for kind, t in run["sent"] if (kind, len(t)) not in (larger[0], *flags)
        )
        stock = Counter((kind, len(t)) for kind, t in rank["runs"]["stock"]["sent"])
        assert set(small) == {("allgather", 1), ("allreduce", 1)}
        assert small["allreduce", 1] == stock["allgather", 1]
        assert small["allgather", 1] <= stock["allgather", 1]


@pytest.mark.parametrize("name", ["stock", "none", "gaussian_noise", "2 clients"])
def test_what_is_gathered_is_no_ranks_own(ranks: list[dict[str, Any]], name: str) -> None:
    """The stock Trainer gathers every rank's loss and counts; here they are means by then."""
    one, two = (
        [tensor for kind, tensor in rank["runs"][name]["sent"] if kind == "allgather"]
        for rank in ranks
    )
    assert len(one) == len(two) >= STEPS
    equal = [torch.equal(ours, theirs) for ours, theirs in zip(one, two, strict=True)]
    assert all(equal) == (name != "stock")


def test_embeddings_are_in_no_bucket(ranks: list[dict[str, Any]]) -> None:
    shared = {name: run["shared"] for name, run in ranks[0]["runs"].items()}
    withheld = {"bert.embeddings.word_embeddings.weight"}
    assert set(shared["shared embeddings"]) - set(shared["gaussian_noise"]) == withheld
    assert set(shared["stock"]) - set(shared["none"]) == withheld


def test_pruned_gradients_are_what_leaves(ranks: list[dict[str, Any]]) -> None:
    """A pruned gradient is the true one, masked: the 90 % of smallest size have to be gone."""
    for rank in ranks:
        run = rank["runs"]["pruning"]
        # after the tables
        _, *buckets = [t for kind, t in run["sent"] if kind == "allreduce" and len(t) > 1]
        for bucket, truth in zip(buckets, run["steps"], strict=True):
            gradient = torch.cat([truth[name].flatten() for name in run["shared"]])
            gone = gradient.abs().argsort()[: len(gradient) * 9 // 10]
            expected = gradient.clone()
            expected[gone] = 0
            factor = float(
                bucket.norm() / expected.norm()
            )  # the weight that the Trainer gives a rank's loss
            assert factor in (pytest.approx(1), pytest.approx(2))
            # The same float32 arithmetic but for kernels with another order of summation.
            torch.testing.assert_close(bucket, factor * expected, rtol=1e-4, atol=1e-7)
            assert int((bucket == 0).sum()) == len(gone)


def test_branch_that_one_rank_does_not_use_does_not_hang_with_noise(
    ranks: list[dict[str, Any]],
) -> None:
    one, two = (torch.tensor(rank["branching"]) for rank in ranks)
    assert torch.isfinite(one).all()
    assert torch.equal(one, two)


def test_ranks_that_ask_for_different_things_do_not_begin(ranks: list[dict[str, Any]]) -> None:
    """Their exchanges would wait for each other, or mix up what is whose."""
    whats = {
        "max_steps": "max_steps",
        "leakage_action": "leakage_action",
        "frozen": "the model's parameters, and which of them are trained",
    }
    for rank in ranks:
        told = {name: f"Ranks differ in {what}, so nothing" for name, what in whats.items()}
        assert {n: e[: len(told[n])] for n, e in rank["asked apart"].items()} == told


def test_ranks_that_start_apart_train_rank_0s_weights(ranks: list[dict[str, Any]]) -> None:
    one, two = (torch.tensor(rank["started apart"]) for rank in ranks)
    assert torch.isfinite(one).all()
    assert torch.equal(one, two)
    first = torch.cat([p.detach().flatten() for p in make_model("plain").parameters()])
    assert float((one - first).abs().mean()) < 0.5  # rank 1's are 1 away


# Noise


def _cosines(one: Tensor, two: Tensor) -> Tensor:
    """|cosine| of every row of one with every row of two."""
    unit = [rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (one, two)]
    return (unit[0] @ unit[1].T).abs()


def _stream(
    generator: Stream | torch.Generator, shapes: list[tuple[int, ...]], messages: int
) -> Tensor:
    """What a peer who knows the generator's state draws for `messages` messages, in the way of a
    defense.
    """
    zeros = {str(index): torch.zeros(shape) for index, shape in enumerate(shapes)}
    entries, one = sum(tensor.numel() for tensor in zeros.values()), torch.tensor(1.0)
    if not isinstance(generator, Stream):
        return normal(generator, (messages, entries), CPU, torch.float32)

    def draw() -> Tensor:
        noisy = add_noise(zeros, lambda name: one.expand_as(zeros[name]), entries, generator)
        return torch.cat([tensor.flatten() for _, tensor in noisy])

    return torch.stack([draw() for _ in range(messages)])


@pytest.mark.parametrize("name", NOISE_RUNS)
def test_noise_differs_between_ranks_steps_micro_batches_and_clients(
    ranks: list[dict[str, Any]], name: str
) -> None:
    noise = torch.cat([rank["noise"][name]["noise"] for rank in ranks])
    assert len(noise) == 2 * STEPS * 2 * 2
    cosines = [
        float(_cosines(noise[i, None], noise[j, None]))
        for i, j in combinations(range(len(noise)), 2)
    ]
    assert max(cosines) < 0.25  # independent noise of 1259 entries: standard deviation 0.028


def test_noise_is_reproducible_with_a_noise_seed_only(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        runs = {name: run["noise"] for name, run in rank["noise"].items()}
        # Added to a gradient a thousandth of its size and subtracted again, in float32.
        torch.testing.assert_close(runs["seeded"], runs["seeded again"], rtol=0, atol=1e-3)
        assert _cosines(runs["private"], runs["private again"]).max() < 0.25
        assert _cosines(runs["private"], runs["seeded"]).max() < 0.25


def _global_after(seeding: Any) -> torch.Generator:
    with torch.random.fork_rng(devices=[]):
        seeding()
        return torch.default_generator.clone_state()


@pytest.mark.parametrize("name", ["private", "private again"])
def test_peer_who_knows_the_seed_cannot_repeat_the_noise(
    ranks: list[dict[str, Any]], name: str
) -> None:
    shapes, seed = ranks[0]["noise"][name]["shapes"], ranks[0]["noise"][name]["seed"]
    noise = torch.cat([rank["noise"][name]["noise"] for rank in ranks])
    generators = [
        _global_after(lambda: torch.manual_seed(seed)),
        _global_after(lambda: set_seed(seed)),
        torch.Generator().manual_seed(seed),
        Stream.from_seeds(seed),
        *[Stream.from_seeds(seed, rank) for rank in range(2)],
        *[torch.Generator().manual_seed(seed + rank) for rank in range(2)],
    ]
    for rank in ranks:  # the state that every rank's global generator is in when training starts
        generators.append(torch.Generator())
        generators[-1].set_state(rank["noise"][name]["global"])
    longest = max(range(len(shapes)), key=lambda i: torch.Size(shapes[i]).numel())
    sizes = [torch.Size(shape).numel() for shape in shapes]
    start = sum(sizes[:longest])
    for generator in generators:
        guess = _stream(generator, shapes, messages=STEPS * 2 * 2)
        assert _cosines(guess, noise).max() < 0.25
        for message in noise[
            :, start : start + sizes[longest]
        ]:  # at any other place of the stream either
            assert (
                resemblance(guess.flatten(), message) < 0.7
            )  # 128 entries by chance: 0.088, eight of those


def test_peer_who_knows_the_noise_seed_repeats_the_noise(ranks: list[dict[str, Any]]) -> None:
    """The control of the test above, and the reason for the warning about `noise_seed`."""
    for index, rank in enumerate(ranks):
        noise, shapes = rank["noise"]["seeded"]["noise"], rank["noise"]["seeded"]["shapes"]
        per_step = len(noise) // STEPS
        for number, message in enumerate(noise):
            generator = Stream.from_seeds(7, index, *divmod(number, per_step))
            assert _cosines(_stream(generator, shapes, 1), message[None]).min() > 0.999
