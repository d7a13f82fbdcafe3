"""dp_sgd with correlated noise: the noise of a transcript against the dense inverse, what a row's
trace in it is, its grid, and its state.
"""

from __future__ import annotations

import copy
import math
import pickle
from statistics import NormalDist
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Message
from hf_gradguard.defenses.base import NO_STATE, State
from hf_gradguard.defenses.correlated import CorrelatedNoise, add_on_grid, make_factor, sensitivity
from hf_gradguard.defenses.dp import DPSGD, PrivacyPlan
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
from hf_gradguard.randomness import Stream, grid_spacing
from hf_gradguard.testing import check_defense

ROWS, CLIP, SIGMA, MESSAGES = 4, 0.5, 1.5, 8


def private(**settings: Any) -> DPSGD:
    whole = {"clip": CLIP, "noise_multiplier": SIGMA, "messages": MESSAGES, "correlated": True}
    defense = make_defense("dp_sgd", per_sample=True, **{**whole, **settings})
    assert isinstance(defense, DPSGD)
    return defense


def task() -> GradientMap:
    model, batch = make_task("bert", batch_size=ROWS)
    return GradientMap(model, batch, second_order=False, needs_input=False)


def flat(message: Message | dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in message.values()]).double()


def dense(column: Tensor) -> Tensor:
    place = torch.arange(len(column))
    return torch.where(place[:, None] >= place, column[(place[:, None] - place).clamp(min=0)], 0.0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["blt", "banded", "square_root"])
def test_keeps_the_contract(kind: str) -> None:
    check_defense(private(messages=64, factorization=kind, bands=3 if kind == "banded" else None))


@pytest.mark.parametrize("kind", ["blt", "banded", "square_root", "blt of a falling rate"])
def test_noise_of_all_messages_is_white_behind_the_factor(kind: str) -> None:
    """C times the messages' noises is σC‖C‖ z, with z standard normal and independent."""
    gmap = task()
    is_falling, kind = kind.endswith("rate"), kind.split()[0]
    settings: dict[str, Any] = {
        "factorization": kind, "bands": 3 if kind == "banded" else None, "falling_rate": is_falling,
    }  # fmt: skip
    defense = private(**settings)
    clipped = flat(clipped_sum(gmap, CLIP).total) / ROWS
    noises = torch.stack([flat(defense(gmap)) - clipped for _ in range(MESSAGES)])
    bands = settings["bands"]
    factor = make_factor(kind, MESSAGES, bands=bands, falling_rate=is_falling)  # type: ignore[arg-type]
    column = factor.column(MESSAGES)
    white = dense(column) @ noises / (SIGMA * CLIP * sensitivity(column) / ROWS)
    covariance = white @ white.T / white.shape[1]
    error = (covariance - torch.eye(MESSAGES)).abs().max()
    assert float(error) < 6 * math.sqrt(2 / white.shape[1])


def whole(**settings: Any) -> DPSGD:
    """Clips the gradient or update as one."""
    defense = make_defense(
        "dp_sgd",
        **{"clip": CLIP, "scale": 0.3, "messages": MESSAGES, "correlated": True, **settings},
    )
    assert isinstance(defense, DPSGD)
    return defense


@pytest.mark.long
def test_noise_of_whole_updates_is_white_behind_the_factor() -> None:
    """As of samples, with σC in the place of scale: what is in two messages of eight, three apart,
    moves all of them together by 2C times the sensitivity at most.
    """
    gmap = task()
    defense = whole(participations=2, min_separation=3)
    check_defense(copy.deepcopy(defense))
    gradient = flat(Message(gmap.gradient()))
    clipped = gradient * min(1.0, CLIP / float(gradient.norm()))
    messages = [defense(gmap) for _ in range(MESSAGES)]
    noises = torch.stack([flat(message) - clipped for message in messages])
    column = make_factor("blt", MESSAGES, 2, 3).column(MESSAGES)
    white = dense(column) @ noises / (0.3 * sensitivity(column, 2, 3))
    covariance = white @ white.T / white.shape[1]
    error = (covariance - torch.eye(MESSAGES)).abs().max()
    assert float(error) < 6 * math.sqrt(2 / white.shape[1])
    assert messages[0].metrics["client_noise_multiplier"] == pytest.approx(0.3 / (2 * CLIP))
    mechanism = defense.mechanism(messages[-1])
    assert mechanism is not None
    assert float(noises[-1].var()) == pytest.approx(
        mechanism.variance, rel=5 * math.sqrt(2 / white.shape[1])
    )


@pytest.mark.long
def test_prefix_sums_have_little_noise() -> None:
    gmap, messages = task(), 64
    defense = private(messages=messages)
    clipped = flat(clipped_sum(gmap, CLIP).total) / ROWS
    total = torch.stack([flat(defense(gmap)) - clipped for _ in range(messages)]).sum(0)
    std = float(total.std()) / (SIGMA * CLIP / ROWS)
    assert std == pytest.approx(2.389, rel=5 / math.sqrt(2 * len(total)))  # independent noise: 8


def test_a_message_by_itself_has_the_variance_that_is_stated() -> None:
    gmap, defense = task(), private()
    clipped = flat(clipped_sum(gmap, CLIP).total) / ROWS
    for _ in range(MESSAGES):
        message = defense(gmap)
        mechanism = defense.mechanism(message)
        assert mechanism is not None
        assert float((flat(message) - clipped).var()) == pytest.approx(
            mechanism.variance, rel=5 * math.sqrt(2 / len(clipped))
        )
        assert mechanism.variance > (SIGMA * CLIP / ROWS) ** 2  # more than independent noise


@pytest.mark.long
def test_whoever_has_all_earlier_noise_finds_no_more_than_mu_allows() -> None:
    """The best test of one message: what the running sums add is subtracted, and the row's own
    direction is looked at. Fresh noise is σC‖C‖, so it finds less than Φ(Φ⁻¹(α) + 1/σ).
    """
    model, batch = make_task("bert", batch_size=ROWS)
    clip, tries = 1e-2, 40  # every row is longer than the bound
    without = {name: entry[1:] for name, entry in batch.items()}
    maps = [GradientMap(model, rows, second_order=False) for rows in (without, batch)]
    totals = [flat(clipped_sum(gmap, clip).total) for gmap in maps]
    row = totals[1] - totals[0]
    assert float(row.norm()) == pytest.approx(clip, rel=1e-3)
    scores: list[list[float]] = [[], []]
    for number in range(tries):
        defense = private(clip=clip, expected_batch_size=1.0)
        for message_number in range(3):
            defense(maps[0], Stream.from_seeds(number, message_number))
        before: CorrelatedNoise = defense.state["noise"]
        assert before.memory is not None
        # what the attacker is granted: the part of the noise that earlier messages decide
        zero = torch.zeros(before.memory.shape[1], dtype=torch.float64)
        known, _ = before.factor.correlate(zero, before.memory)
        strength = SIGMA * clip * sensitivity(before.factor.column(MESSAGES))
        for is_member, gmap in enumerate(maps):
            message, _ = defense.apply(gmap, defense.state, Stream.from_seeds(number, 3))
            left = flat(message) - known * strength - totals[0]
            scores[is_member].append(float(left @ row) / clip / strength)
    # both are drawn with the same noise, so their distance is exact
    distance = torch.tensor(scores[1]) - torch.tensor(scores[0])
    allowed = 1 / (SIGMA * sensitivity(make_factor("blt", MESSAGES).column(MESSAGES)))
    torch.testing.assert_close(distance, torch.full_like(distance, allowed), rtol=1e-2, atol=0)
    assert allowed < 1 / SIGMA
    assert float(torch.tensor(scores[0]).std()) == pytest.approx(1, abs=5 / math.sqrt(2 * tries))


def test_a_one_run_audit_of_the_transcript() -> None:
    """Steinke, Nasr and Jagielski (2023): canaries, each in one message with odds of one half, and
    guessed from all messages by the best test, C times them in the canary's direction. They are
    told apart as well as μ = 1/σ allows, and no better.
    """
    messages, canaries = 64, 4096
    column = make_factor("blt", messages).column(messages)
    matrix = dense(column)
    drawn, after = [], CorrelatedNoise(make_factor("blt", messages), messages)
    for _ in range(messages):
        message_noise, after = after.draw(canaries, "cpu", Stream())
        drawn.append(message_noise)
    noise = torch.stack(drawn)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(messages, (canaries,), generator=generator)
    members = torch.rand(canaries, generator=generator) < 0.5
    shared = SIGMA * sensitivity(column) * noise  # canary i has direction i, of norm C = 1
    shared[positions[members], torch.arange(canaries)[members]] += 1
    filters = torch.stack([matrix[:, position] for position in positions.tolist()], 1)
    scores = ((matrix @ shared) * filters).sum(0) / filters.square().sum(0).sqrt()
    scores = scores / (SIGMA * sensitivity(column))
    # the first messages' rows move the transcript by all of ‖C‖, the last ones' by less
    moved = filters.square().sum(0).sqrt() / (SIGMA * sensitivity(column))
    assert float(moved.max()) <= 1 / SIGMA + 1e-12
    guesses = scores > moved / 2
    right = float((guesses == members).double().mean())
    allowed = NormalDist().cdf(1 / (2 * SIGMA))
    exact = float(torch.special.ndtr(moved / 2).mean())
    margin = 3 * math.sqrt(0.25 / canaries)
    assert right <= allowed + margin
    assert abs(right - exact) < margin


def test_it_stays_on_the_grid() -> None:
    """Messages are whole multiples of a spacing that is known without the data."""
    gmap = task()
    defense = private(expected_batch_size=1.0)
    for _ in range(3):
        message = defense(gmap)
        entries = len(flat(message))
        spacing = grid_spacing(SIGMA * CLIP, SIGMA * CLIP, entries)
        whole = flat(message) / spacing
        assert torch.equal(whole, whole.round())
    values, noise = torch.full((9,), 1e9, dtype=torch.float64), torch.zeros(9).double()
    with pytest.raises(OverflowError, match="grid"):
        add_on_grid(values * 1e9, noise, 1.0, 9)


def keys(position: int) -> bytes:
    return bytes([position]) * 32


def message_at(defense: DPSGD, state: State, position: int) -> tuple[Tensor, State]:
    """A message whose noise has its place's key, and what is remembered then."""
    state = defense.at_message(state, position, keys)
    message, state = defense.apply(task(), state, Stream(keys(position)))
    return flat(message), state


def messages_of(defense: DPSGD, count: int) -> tuple[list[Tensor], State]:
    messages, state = [], NO_STATE
    for number in range(count):
        message, state = message_at(defense, state, number)
        messages.append(message)
    return messages, state


def test_state_goes_on_where_it_was() -> None:
    defense = private()
    first, _ = messages_of(defense, 5)
    cut, state = messages_of(defense, 2)
    assert all(torch.equal(*pair) for pair in zip(cut, first, strict=False))
    restored = private().unflatten(defense.flatten(state))
    # messages 2 and 3 left before a kill: their noise is drawn again for message 4 to cancel it
    assert torch.equal(message_at(private(), restored, 4)[0], first[4])
    assert private().unflatten({}) == {}


def test_a_message_that_was_never_drawn_is_passed_over() -> None:
    """A kill may leave one rank with a message less than others."""
    defense = private()
    _, state = messages_of(defense, 1)
    state = defense.at_message(state, 2, lambda position: None if position == 1 else keys(position))
    assert state["noise"].position == 2
    _, state = defense.apply(task(), state, Stream(keys(2)))
    assert state["noise"].position == 3


@pytest.mark.parametrize("how", ["state", "deepcopy", "copy", "pickle"])
def test_no_two_objects_draw_the_same_noise(how: str) -> None:
    """Whatever a used mechanism is copied by: with one noise the difference of two messages is that
    of the data. Nor is a key in what is saved.
    """
    gmap, defense = task(), private()
    for _ in range(2):
        defense(gmap)
    if how == "state":
        other = private()
        other.load_state_dict(defense.state_dict())
        assert set(defense.state_dict()) == {
            f"noise_stream/{name}" for name in ("memory", "factor", "plan")
        }
    else:
        other = {"deepcopy": copy.deepcopy, "copy": copy.copy,
                 "pickle": lambda d: pickle.loads(pickle.dumps(d))}[how](defense)  # fmt: skip
    messages = [flat(d(gmap)) for d in (defense, other)]
    clipped = flat(clipped_sum(gmap, CLIP).total) / ROWS
    noises = torch.stack([message - clipped for message in messages])
    assert abs(float(torch.corrcoef(noises)[0, 1])) < 0.6  # of what earlier noise decides
    fresh = [d.state["noise"].memory for d in (defense, other)]
    assert not torch.equal(fresh[0], fresh[1])


def test_a_saved_transcript_keeps_its_factor() -> None:
    """Also where another one would be planned now, under which its noise would not cancel."""
    first, _ = messages_of(private(), 3)
    _, state = messages_of(private(), 1)
    plan = PrivacyPlan(SIGMA, ROWS, MESSAGES, falling_rate=True)
    resumed = private().planned(plan)
    restored = resumed.unflatten(private().flatten(state))
    message, restored = message_at(resumed, restored, 1)
    assert torch.equal(message, first[1])
    again = resumed.at_message(restored, 0)  # another transcript
    assert again["noise"].factor == make_factor("blt", MESSAGES, falling_rate=True)


def test_a_plan_that_begins_again_has_other_noise() -> None:
    gmap, defense = task(), private()
    first, state = defense.apply(gmap, NO_STATE)
    again, _ = defense.apply(gmap, defense.at_message(state, 0))
    assert not torch.equal(flat(again), flat(first))


def test_no_message_more_than_planned() -> None:
    gmap, defense = task(), private(messages=2)
    defense(gmap)
    defense(gmap)
    with pytest.raises(RuntimeError, match="messages=2"):
        defense(gmap)


def test_settings_are_checked() -> None:
    for settings, name in [
        ({"messages": 3}, "correlated"), ({"correlated": True}, "per_sample"),
        ({"correlated": True, "relative_scale": 1.0}, "scale"),
        ({"correlated": True, "scale": 1.0, "clip_by": "coordinate"}, "clip_by"),
        ({"scale": 1.0, "delta": 1e-5}, "per_sample"),
        ({"per_sample": True, "noise_multiplier": 1.0, "participations": 2}, "correlated"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=name):
            make_defense("dp_sgd", **settings)
    for settings, name in [
        ({"factorization": "fourier"}, "factorization"), ({"participations": 0}, "participations"),
        ({"messages": 2.5}, "messages"), ({"falling_rate": "linear"}, "falling_rate"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=name):
            private(**settings)
    with pytest.raises(ValueError, match="messages"):
        private(messages=None)(task())


@pytest.mark.parametrize("name", ["participations", "min_separation", "bands", "messages"])
def test_numbers_of_the_plan_are_whole_and_of_correlated_noise(name: str) -> None:
    asked = {"per_sample": True, "noise_multiplier": 1.0, name: 2}
    make_defense("dp_sgd", correlated=True, **asked)
    with pytest.raises(ValueError, match=rf"{name} of dp_sgd: set correlated=True"):
        make_defense("dp_sgd", **asked)
    for wrong in (1.5, 0, True):
        with pytest.raises((TypeError, ValueError), match=name):
            make_defense("dp_sgd", correlated=True, **{**asked, name: wrong})
