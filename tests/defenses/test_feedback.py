"""Error feedback: by hand, over many messages, and as the client's own memory."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution
from torch import Tensor

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, chain, make_defense
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream
from hf_gradguard.testing import check_defense
from hf_gradguard.testing.defenses import small_tasks
from hf_gradguard.training.checkpoints.private_state import load_private_state, save_private_state
from hf_gradguard.training.message import Client

BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "pruning": ("pruning", {"ratio": 0.7, "min_batches": 1}),
    "optimal_pruning": ("optimal_pruning", {"ratio": 0.7, "refresh_every": 2, "min_batches": 1}),
    "own shape": (
        "optimal_pruning",
        {"ratio": 0.7, "shape": "own", "num_probes": 2, "min_batches": 1},
    ),
    "of three": ("pruning", {"ratio": 0.7, "min_batches": 3}),
    "of two, optimal": ("optimal_pruning", {"ratio": 0.7, "min_batches": 2}),
    "quantization": ("quantization", {"bits": 3}),
    "sign": ("quantization", {"sign_only": True}),
    "soteria": ("soteria", {"ratio": 0.5}),
}


def fed_back(which: str) -> Any:
    name, settings = BIASED[which]
    return make_defense(name, error_feedback=True, **settings)


def task(**settings: Any) -> GradientMap:
    return GradientMap(*small_convolution(**settings))


def with_bias(gmap: GradientMap, *values: float) -> GradientMap:
    """The map with another gradient: zero but for the last layer's bias."""
    gradient = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    gradient["head.bias"] = torch.tensor(values, dtype=torch.float64)
    return gmap.corrected(gradient)


def random_gradients(gmap: GradientMap, count: int) -> list[GradientMap]:
    generator = torch.Generator().manual_seed(2)
    return [
        gmap.corrected(
            {
                name: torch.randn(g.shape, generator=generator, dtype=g.dtype)
                for name, g in gmap.gradient().items()
            },
        )
        for _ in range(count)
    ]


def error_of(defense: Defense) -> dict[str, Tensor]:
    state = defense.state_dict()
    return {k.removeprefix("error."): t for k, t in state.items() if k.startswith("error.")}


# By hand


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # Of 9 + 1 + 4 the share 0.6 is 8.4: 3 alone. Of 9 + 4 + 16 it is 17.4: 4 and 3.
        (
            ("pruning", {"utility": 0.6, "min_batches": 1}),
            [((3, 0, 0), (0, -1, 2)), ((3, 0, 4), (0, -2, 0)), ((3, -3, 0), (0, 0, 2))],
        ),
        # Of 36 + 4 + 16 it is 33.6: 6 alone, which then waits. Of 9 + 36 it is 27: 6 alone.
        (
            ("pruning", {"utility": 0.6, "min_batches": 2}),
            [((0, 0, 0), (3, -1, 2)), ((6, 0, 0), (0, -2, 4)), ((0, 0, 6), (3, -3, 0))],
        ),
        (
            ("pruning", {"ratio": 0.0, "min_batches": 3}),
            [((0, 0, 0), (3, -1, 2)), ((0, 0, 0), (6, -2, 4)), ((9, -3, 6), (0, 0, 0))],
        ),
        # Signs times the mean of 3, 1, 2, then of 4, 0, 2, then of 5, -1, 2.
        (
            ("quantization", {"sign_only": True}),
            [
                ((2, -2, 2), (1, 1, 0)),
                ((2, 0, 2), (2, 0, 0)),
                ((8 / 3, -8 / 3, 8 / 3), (7 / 3, 5 / 3, -2 / 3)),
            ],
        ),
    ],
)
def test_worked_by_hand(
    settings: tuple[str, dict[str, Any]], steps: list[tuple[tuple[float, ...], tuple[float, ...]]]
) -> None:
    name, own = settings
    defense = make_defense(name, error_feedback=True, **own)
    gmap = with_bias(task(), 3, -1, 2)
    for sent, left in steps:
        message = defense(gmap, rng())
        assert message["head.bias"].tolist() == pytest.approx(sent, abs=1e-12)
        assert error_of(defense)["head.bias"].tolist() == pytest.approx(left, abs=1e-12)
        expected = math.hypot(*left) / 14**0.5
        assert message.metrics["left_out"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("which", BIASED)
def test_messages_add_up_to_the_gradients_but_for_the_error(which: str) -> None:
    defense = fed_back(which)
    maps = random_gradients(task(), 6)
    sent = sum(flat(defense(gmap, rng())) for gmap in maps)
    total = sum(flat(gmap.gradient()) for gmap in maps)
    torch.testing.assert_close(sent + flat(error_of(defense)), total, rtol=1e-12, atol=1e-12)


def test_without_feedback_nothing_is_kept() -> None:
    for name, settings in BIASED.values():
        defense = make_defense(name, **settings)
        defense(task(), rng())
        assert not error_of(defense)


# A contraction


def test_the_error_of_a_contraction_stays_bounded() -> None:
    """Keeping half of the entries keeps half of the power at least: δ = 1/2. Then ‖e‖² is at most
    4 (1-δ)/δ² ‖g‖² for the largest ‖g‖ (Karimireddy et al., Lemma 3). A sum without feedback is
    off by ever more.
    """
    maps = random_gradients(task(), 40)
    gradients = [flat(gmap.gradient()) for gmap in maps]
    largest = max(float(g.norm()) for g in gradients)
    ends = {}
    for feedback in (False, True):
        defense = by_power(ratio=0.5, utility=None, error_feedback=feedback)
        off, course = torch.zeros_like(gradients[0]), []
        for gmap, g in zip(maps, gradients, strict=True):
            off = off + g - flat(defense(gmap, rng()))
            course.append(float(off.norm()))
        if feedback:
            assert max(course) <= 8**0.5 * largest
        ends[feedback] = course[-1] / float(sum(gradients).norm())
    assert ends[True] < ends[False]


@pytest.mark.statistics
@pytest.mark.parametrize("which", ["pruning", "optimal_pruning", "sign"])
def test_one_gradient_again_and_again_comes_out_in_the_mean(which: str) -> None:
    """What single messages never show."""
    gmap, visits = task(), 60
    g = flat(gmap.gradient())

    def off(defense: Defense) -> float:
        mean = sum(flat(defense(gmap, rng())) for _ in range(visits)) / visits
        return float((mean - g).norm() / g.norm())

    name, settings = BIASED[which]
    alone, fed = off(make_defense(name, **settings)), off(fed_back(which))
    assert fed < 0.1
    assert fed < alone / 3


# When it is sent


def by_power(**settings: Any) -> Defense:
    usual = {"utility": 0.6, "error_feedback": True, "min_batches": 1}
    return make_defense("pruning", **usual | settings)


def every_entry(**settings: Any) -> Defense:
    return by_power(ratio=0.0, utility=None, **settings)


def test_a_batch_that_says_nothing_of_an_entry_does_not_count() -> None:
    """As in a row of an embedding whose token it has not."""
    gmap, defense = task(), every_entry(min_batches=2)
    sent = [
        defense(with_bias(gmap, *bias), rng())["head.bias"].tolist()
        for bias in ((1, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1))
    ]
    assert sent == [[0, 0, 0], [2, 0, 0], [0, 0, 0], [2, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_rounding_left_is_no_batch(dtype: torch.dtype) -> None:
    """The entry behind it would be one batch's own."""
    gmap, defense = task(dtype=dtype), every_entry(min_batches=3)
    assert [bool(flat(defense(gmap, rng())).any()) for _ in range(6)] == 2 * [False, False, True]


@pytest.mark.parametrize("ratio", [0.5, 0.97])
def test_every_entry_is_of_enough_batches(ratio: float) -> None:
    """Each adds 1 to all."""
    gmap, defense = task(), by_power(ratio=ratio, utility=None, min_batches=3)
    assert defense.facts.warmup_messages == 2
    ones = gmap.corrected({n: torch.ones_like(g) for n, g in gmap.gradient().items()})
    messages = [flat(defense(ones, rng())) for _ in range(12)]
    assert [bool(sent.any()) for sent in messages[:3]] == [False, False, True]
    for sent in messages:
        assert bool((sent[sent != 0] >= 3).all())


@pytest.mark.parametrize(("count", "is_taken"), [(255, True), (256, False), (0, False)])
def test_batches_are_counted_in_one_byte(count: int, is_taken: bool) -> None:
    """A count that wraps around would send one batch's own entry."""
    if is_taken:
        assert by_power(min_batches=count).facts.warmup_messages == count - 1
        return
    with pytest.raises(ValueError, match="min_batches must be"):
        by_power(min_batches=count)


def test_first_messages_are_held() -> None:
    assert make_defense("pruning", ratio=0.9).facts.warmup_messages == 0
    assert make_defense("optimal_pruning").facts.warmup_messages == 7
    assert by_power(min_batches=255).facts.warmup_messages == 254
    assert chain(by_power(min_batches=3), by_power(min_batches=2)).facts.warmup_messages == 3


# When it is dropped


def remembering(defense: Defense, gmap: GradientMap, size: float) -> Defense:
    """A gradient of that norm before, and 1 left out of the second entry in more than one batch."""
    defense(with_bias(gmap, 0, 1, 0), rng())
    state = defense.state_dict()
    left = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    left["head.bias"][1] = 1
    state |= {f"error.{name}": e for name, e in left.items()}
    defense.load_state_dict(state | {"error_size": torch.tensor(size)})
    return defense


@pytest.mark.parametrize(
    ("before", "now", "kept"), [(0.11, 0.05, True), (0.05, 0.11, True), (0.09, 0.09, False)]
)
def test_an_error_larger_than_ten_gradients_is_dropped(
    before: float, now: float, kept: bool
) -> None:
    """Than this one and the one before: after one alone, a small one would not be hidden."""
    gmap = task()
    defense = remembering(by_power(), gmap, before)
    message = defense(with_bias(gmap, now, 0, 0), rng())
    assert message["head.bias"].tolist() == ([0, 1, 0] if kept else [now, 0, 0])
    # What is of two batches may be twice as large.
    defense = remembering(by_power(min_batches=2), gmap, before / 2)
    message = defense(with_bias(gmap, 0, now / 2, 0), rng())
    assert message["head.bias"].tolist() == [0, 1 + now / 2 if kept else 0, 0]


@pytest.mark.parametrize(("gap", "kept"), [(20, True), (21, False)])
@pytest.mark.parametrize("chained", [False, True])
def test_a_stale_error_is_dropped(gap: int, kept: bool, chained: bool) -> None:
    gmap = task()
    defense = by_power()
    client = chain(make_defense("none"), defense) if chained else defense
    for step, bias in ((3, (2, 1, 0)), (3 + gap, (0.6, 0.4, 0))):
        client.at_step(step)
        message = client(with_bias(gmap, *bias), rng())
    assert message["head.bias"].tolist() == ([0, 1.4, 0] if kept else [0.6, 0, 0])


def test_without_steps_nothing_is_stale() -> None:
    defense = by_power()
    for _ in range(2):
        message = defense(with_bias(task(), 2, 1.5, 0), rng())
    assert message["head.bias"].tolist() == [0, 3, 0]


def test_other_parameters_begin_anew() -> None:
    model, batch = small_convolution()
    defense = make_defense("pruning", ratio=0.5, error_feedback=True)
    defense(GradientMap(model, batch), rng())
    model.head.bias.requires_grad_(False)
    fewer = GradientMap(model, batch)
    new = make_defense("pruning", ratio=0.5, error_feedback=True)(fewer, rng())
    assert torch.equal(flat(defense(fewer, rng())), flat(new))


# What a message says of itself, and chains


@pytest.mark.parametrize("which", ["pruning", "own shape", "of three", "sign", "soteria"])
def test_every_biased_defense_keeps_the_contract(which: str) -> None:
    """One of each kind of error, and of each way to wait."""
    check_defense(fed_back(which), small_tasks()[:1])


@pytest.mark.parametrize("which", BIASED)
def test_a_message_says_what_is_fed_back(which: str) -> None:
    defense = fed_back(which)
    first, later = defense(task(), rng()), defense(task(), rng())
    assert later.has_residual
    assert not first.has_residual  # nothing was left out before
    for message in (first, later):
        assert not message.exact
        assert message.noise is None
    mechanism = defense.mechanism(later)
    assert mechanism is not None
    assert mechanism.has_residual


def test_rounding_is_fed_back_too() -> None:
    gmap = task(dtype=torch.bfloat16)
    defense = every_entry()
    true = {name: g.float() for name, g in gmap.gradient().items()}
    first = defense(gmap, rng())
    assert torch.equal(flat(first), flat(gmap.gradient()))  # all of it, in the parameters' type
    defense.load_state_dict({f"error.{name}": g * 2**-12 for name, g in true.items()})
    sent = flat(defense(gmap, rng())).float()
    whole = flat(true) * (1 + 2**-12)  # more digits than bfloat16 has
    assert torch.equal(sent + flat(error_of(defense)), whole)
    assert flat(error_of(defense)).any()


def test_a_chain_feeds_back_what_each_part_leaves_out() -> None:
    """What the first withheld stays zero, and what waits for it waits on."""
    both = chain(
        by_power(ratio=0.5, utility=None),
        make_defense("quantization", bits=3, error_feedback=True),
    )
    maps, total = random_gradients(task(), 5), 0
    for gmap in maps:
        message = both(gmap, rng())
        assert not message.exact
        assert message.transmitted is not None
        withheld = ~flat(message.transmitted)
        assert 0.5 <= float(withheld.double().mean()) < 0.75
        assert not flat(message)[withheld].any()
        total = total + flat(message)
    left = [both.state[place]["residual"].error for place in ("first", "second")]
    whole = sum(flat(gmap.gradient()) for gmap in maps)
    torch.testing.assert_close(total + flat(left[0]) + flat(left[1]), whole)
    check_defense(both, small_tasks()[:1])


def test_noise_before_feedback_is_only_processed() -> None:
    noise = make_defense("gaussian_noise", scale=0.5)
    after = chain(noise, make_defense("pruning", ratio=0.5, error_feedback=True))
    for _ in range(2):
        message = after(task(), rng())
        assert message.noise is not None
        assert message.noise.added is None
        assert float(flat(message.noise.variance).max()) == pytest.approx(0.25)


def test_noise_after_feedback_is_not_noise_on_the_gradient() -> None:
    before = chain(
        make_defense("pruning", ratio=0.5, error_feedback=True),
        make_defense("gaussian_noise", scale=0.5),
    )
    assert not before.facts.adds_gaussian_noise
    assert before(task(), rng()).noise is None


@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd"])
def test_independent_noise_refuses_it(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} has no setting error_feedback.*averages out"):
        make_defense(name, error_feedback=True)


def test_unbiased_rounding_refuses_it() -> None:
    with pytest.raises(ValueError, match="keeps the mean"):
        make_defense("quantization", stochastic=True, error_feedback=True)


# The client's own


def test_two_clients_are_independent() -> None:
    one = make_defense("pruning", ratio=0.7, error_feedback=True)
    one(task(), rng())
    other = copy.deepcopy(one)
    before = flat(error_of(other)).clone()
    for gmap in random_gradients(task(), 2):
        one(gmap, rng())
    assert torch.equal(flat(error_of(other)), before)
    assert not torch.equal(flat(error_of(one)), before)


@pytest.mark.parametrize("which", ["pruning", "optimal_pruning"])
def test_a_private_file_holds_it(which: str, tmp_path: Path) -> None:
    maps, saved = random_gradients(task(), 4), fed_back(which)
    for step, gmap in enumerate(maps[:2]):
        saved.at_step(step)
        saved(gmap, Stream.from_seeds(step))
    save_private_state(str(tmp_path), 0, [Client(saved, saved.state)], None)
    client = Client(fed_back(which))
    load_private_state(str(tmp_path), 0, [client], None, torch.device("cpu"))
    restored = client.defense.with_state(client.state)
    for step in (2, 3):
        for defense in (saved, restored):
            defense.at_step(step)
        pair = [d(maps[step], Stream.from_seeds(step)) for d in (saved, restored)]
        assert torch.equal(flat(pair[0]), flat(pair[1]))
    # The step of the last message is kept as well.
    late = fed_back(which)
    late.load_state_dict(saved.state_dict())
    late.at_step(3 + 21)
    plain = make_defense(*BIASED[which][:1], **BIASED[which][1])
    if which == "pruning":
        assert torch.equal(flat(late(maps[0], rng())), flat(plain(maps[0], rng())))


def test_a_run_without_feedback_refuses_its_state() -> None:
    defense = make_defense("pruning", error_feedback=True)
    defense(task(), rng())
    with pytest.raises(ValueError, match="pruning keeps no state"):
        make_defense("pruning", ratio=0.9).load_state_dict(defense.state_dict())


def test_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    batch = make_task("bert", dtype=torch.float32, batch_size=8)[1]
    rows = [{key: value[k] for key, value in batch.items()} for k in range(8)]

    def run(folder: str, checkpoint: str | None = None, **more: Any) -> Tensor:
        args = GradGuardConfig(
            str(tmp_path / folder), max_steps=4, save_steps=2, per_device_train_batch_size=4,
            learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
            defense="pruning", defense_kwargs={"ratio": 0.9, "error_feedback": True}, **more,
        )  # fmt: skip
        trainer = GradGuardTrainer(
            make_task("bert", dtype=torch.float32)[0], args, train_dataset=rows
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        logs = [log for log in trainer.state.log_history if "defense/left_out" in log]
        assert len(logs) == 4
        return flat(dict(trainer.model.named_parameters()))

    alone = run("alone", clients_per_process=2)
    resumed = run("again", str(tmp_path / "alone" / "checkpoint-2"), clients_per_process=2)
    assert torch.equal(alone, resumed)


def test_a_message_that_is_kept_back_is_not_fed_back(tmp_path: Path) -> None:
    """Or the next one would share it."""
    batch = make_task("bert", dtype=torch.float32, batch_size=4)[1]
    rows = [{key: value[k] for key, value in batch.items()} for k in range(4)]
    defense = chain(
        make_defense("gaussian_noise", scale=0.1),
        make_defense("pruning", ratio=0.5, error_feedback=True),
    )
    args = GradGuardConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", leakage_limit=1e30, leakage_num_probes=1,
    )  # fmt: skip
    model = make_task("bert", dtype=torch.float32)[0]
    trainer = GradGuardTrainer(model, args, defense=defense, train_dataset=rows)
    trainer.train()
    (client,) = trainer._clients
    assert not client.state
