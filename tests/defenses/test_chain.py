"""One defense after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import exact_map, flat, make_task, rng, small_convolution, unit_noise_of
from torch import Tensor

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.defenses import Chain, Defense, DefenseFacts
from hf_gradguard.randomness import Stream


@pytest.fixture
def gmap() -> GradientMap:
    """Of a batch as long as the model's positions, and without key biases (the softmax cancels
    them): no g_i is 0.
    """
    model, batch = make_task("bert", max_position_embeddings=5, type_vocab_size=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("key.bias" not in name)
    gmap = GradientMap(model, batch)
    assert flat(gmap.gradient()).all()
    return gmap


def pruned() -> Defense:
    """As papers have it, without feedback."""
    return make_defense("pruning", ratio=0.9)


def test_one_defense_is_its_own_chain() -> None:
    defense = pruned()
    assert chain(defense) is defense


def test_no_defense_is_no_chain() -> None:
    with pytest.raises(ValueError, match="at least one defense"):
        chain()


def test_the_second_gets_what_the_first_would_share(gmap: GradientMap) -> None:
    """Quantizing the pruned gradient: its levels and its endpoints, and the first one's generator
    goes on.
    """
    first, second = (
        make_defense("gaussian_noise", scale=0.05),
        make_defense("pruning", ratio=0.6),
    )
    generator, by_hand = rng(), rng()
    shared = chain(first, second)(gmap, generator)
    noisy = flat(first(gmap, by_hand))
    kept = noisy.abs() > noisy.abs().sort().values[int(0.6 * len(noisy)) - 1]
    assert torch.equal(flat(shared), noisy * kept)
    assert generator.bytes(8) == by_hand.bytes(8)


def test_none_in_a_chain_changes_nothing(gmap: GradientMap) -> None:
    none, noise = make_defense("none"), make_defense("gaussian_noise", scale=0.1)
    expected = flat(noise(gmap, rng()))
    for defense in (chain(none, noise), chain(noise, none), chain(none, noise, none)):
        assert torch.equal(flat(defense(gmap, rng())), expected)


def test_order_matters(gmap: GradientMap) -> None:
    """Noise first and then the largest of the noisy ones, or the largest ones and then noise on
    them.
    """
    noise, pruning = (
        make_defense("gaussian_noise", relative_scale=1),
        make_defense("pruning", ratio=0.5),
    )
    one, two = flat(chain(noise, pruning)(gmap, rng())), flat(chain(pruning, noise)(gmap, rng()))
    assert (one == 0).sum() == (two == 0).sum() == len(one) // 2
    assert ((one == 0) != (two == 0)).sum() > 100


def test_a_chain_leaves_the_map_as_it_was(gmap: GradientMap) -> None:
    gradient = {n: g.clone() for n, g in gmap.gradient().items()}
    chain(make_defense("optimal_pruning"), make_defense("optimal_noise"))(gmap, rng())
    assert all(torch.equal(g, gradient[n]) for n, g in gmap.gradient().items())
    ones = {n: torch.ones_like(g) for n, g in gradient.items()}
    assert flat(gmap.restrict(ones)).all()


NOISES: list[tuple[str, dict[str, Any]]] = [
    ("gaussian_noise", {}),
    ("laplace_noise", {}),
    ("dp_sgd", {"clip": 0.5}),
    ("dp_sgd", {"clip": 0.05, "clip_by": "coordinate"}),
    ("optimal_noise", {"shape": "own"}),
    ("optimal_noise", {"shape": "own", "granularity": "layer"}),
    ("optimal_noise", {"shape": "public"}),
    ("optimal_noise", {"shape": "past"}),
    ("optimal_dp_sgd", {"shape": "own", "clip": 0.05}),
    ("optimal_dp_sgd", {"shape": "own", "clip": 0.05, "granularity": "layer"}),
    ("optimal_dp_sgd", {"shape": "public", "clip": 0.05}),
]


@pytest.mark.parametrize(
    ("pruning", "noise", "settings"),
    [
        *(("pruning", *noise) for noise in NOISES),
        ("optimal_pruning", "gaussian_noise", {}),
        ("optimal_pruning", "optimal_noise", {"shape": "own"}),
        ("optimal_pruning", "optimal_dp_sgd", {"shape": "own", "clip": 0.05}),
    ],
)
def test_noise_after_pruning_falls_on_what_pruning_left(
    gmap: GradientMap, pruning: str, noise: str, settings: dict[str, Any]
) -> None:
    first, second = make_defense(pruning, ratio=0.7), make_defense(noise, scale=0.1, **settings)
    left = flat(first(gmap, rng())) != 0
    shared = flat(chain(first, second)(gmap, rng()))
    assert not shared[~left].any()
    unclipped = left & (
        flat(gmap.gradient()).abs() < (0.05 if noise == "optimal_dp_sgd" else torch.inf)
    )
    assert unclipped.any()
    assert (shared[unclipped] != flat(gmap.gradient())[unclipped]).all()


@pytest.mark.parametrize(("noise", "settings"), NOISES)
def test_pruned_zeros_get_no_noise_either(noise: str, settings: dict[str, Any]) -> None:
    """Zeros of the gradient (positions beyond the batch's length) are pruned first, so they are not
    shared either.
    """
    gmap = GradientMap(*make_task("bert"))
    zeros = flat(gmap.gradient()) == 0
    assert 20 < zeros.sum() < 0.05 * len(zeros)
    shared = flat(
        chain(make_defense("pruning", ratio=0.7), make_defense(noise, scale=0.1, **settings))(
            gmap, rng()
        )
    )
    assert not shared[zeros].any()


def test_layer_noise_after_pruning_weighs_by_what_pruning_left() -> None:
    """A tensor's norms of s and g are those of its transmitted coordinates: the others leak nothing
    any more.
    """
    gmap = exact_map("bert")
    pruning, noise = (
        make_defense("pruning", ratio=0.7),
        make_defense("optimal_noise", scale=1, granularity="layer", shape="own"),
    )
    shared, squares = pruning(gmap, rng()), gmap.squared_sensitivity()
    variance = {}
    for name, y in shared.items():
        left = y != 0
        variance[name] = squares[name][left].sum().sqrt() / y.norm().clamp(min=1e-8) * left
    power = flat(variance).mean()
    with unit_noise_of(1.0):
        std = flat(chain(pruning, noise)(gmap, rng())) - flat(shared)
    torch.testing.assert_close(std.square(), flat(variance) / power, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("noise", "settings"), NOISES)
def test_scale_in_a_chain_still_counts_all_parameters(noise: str, settings: dict[str, Any]) -> None:
    """Equal `scale` is equal noise power over all shared parameters: on fewer coordinates it is
    more on each.
    """
    gmap, shared = exact_map("bert"), []
    for sign in (1, -1):
        pruning, defense = (
            make_defense("pruning", ratio=0.7),
            make_defense(noise, scale=0.1, **settings),
        )
        with unit_noise_of(sign):
            shared.append(flat(chain(pruning, defense)(gmap, rng())))
    std = (shared[0] - shared[1]) / 2
    assert abs(std.square().mean() / 0.01 - 1) < 1e-12


@pytest.mark.parametrize("shape", ["public", "past"])
def test_averages_follow_what_each_step_transmits(shape: str) -> None:
    """They are of all coordinates, whatever was pruned of the batches that they are of."""
    model, batch = small_convolution()
    defense = chain(
        make_defense("pruning", ratio=0.7),
        make_defense("optimal_noise", scale=0.1, refresh_every=3, shape=shape),
    )
    sets = []
    for label in (0, 1, 2):
        batch["labels"].fill_(label)
        gmap = GradientMap(model, batch, second_order=False)
        left = flat(make_defense("pruning", ratio=0.7)(gmap, rng())) != 0
        assert left.sum() == 116 - 81
        shared = flat(defense(gmap, rng()))
        assert not shared[~left].any()
        assert (shared[left] != flat(gmap.gradient())[left]).all()
        sets.append(left)
    assert not torch.equal(sets[0], sets[1])


def test_three_in_a_row(gmap: GradientMap) -> None:
    one, two = make_defense("pruning", ratio=0.5), make_defense("optimal_pruning", ratio=0.8)
    defense = chain(one, two, make_defense("gaussian_noise", scale=0.1))
    shared = flat(defense(gmap, rng()))
    left = flat(chain(one, two)(gmap, rng())) != 0
    assert left.sum() == len(left) - int(0.8 * len(left))
    assert torch.equal(shared != 0, left)


# ------------------------------------------------------------------------------- noise after noise


def shaped_map() -> GradientMap:
    """Of 116 parameters, with the same sensitivities at every call, so that optimal noise has the
    same covariance in every message.
    """
    gmap = GradientMap(*small_convolution())
    squares = gmap.squared_sensitivity(10, rng())
    gmap.squared_sensitivity = lambda *_args, **_kwargs: squares  # type: ignore[method-assign]
    return gmap


def uniform(**settings: Any) -> Defense:
    return make_defense("gaussian_noise", **settings)


SUMS: dict[str, tuple[Callable[[], Defense], float]] = {
    "three, none between": (
        lambda: chain(
            uniform(scale=0.3), make_defense("none"), uniform(scale=0.4), uniform(scale=1.2)
        ),
        1.69,
    ),
    "the other way": (
        lambda: Chain(uniform(scale=0.3), Chain(uniform(scale=0.4), uniform(scale=1.2))), 1.69
    ),
    "relative to what is noisy": (
        lambda: chain(uniform(scale=2.0), uniform(relative_scale=0.5)), 4.0 * 1.25
    ),
    "optimal, then uniform": (
        lambda: chain(make_defense("optimal_noise", scale=0.3), uniform(scale=0.4)), 0.25
    ),
    "clipped, then uniform": (
        lambda: chain(make_defense("dp_sgd", clip=0.1, scale=0.3), uniform(scale=0.4)), 0.25
    ),
    "uniform, then of a public shape": (
        lambda: chain(uniform(scale=0.3), make_defense("optimal_noise", scale=0.4)), 0.25
    ),
    "pruned, then twice": (
        lambda: chain(pruned(), uniform(scale=0.3), uniform(scale=0.4)), 0.25
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("which", SUMS)
def test_noises_add_their_covariances(which: str) -> None:
    """Against the covariance of 400 messages: each one's change, in what its message says."""
    make, power = SUMS[which]
    gmap, generator, defense = shaped_map(), rng(), make()
    messages = [defense(gmap, generator) for _ in range(400)]
    assert all(message.noise is not None for message in messages)
    said = torch.stack([flat(message.noise.added) for message in messages])  # type: ignore[union-attr,arg-type]
    shared = torch.stack([flat(message) for message in messages])
    noisy = said[0] > 0
    assert torch.equal(noisy, flat(messages[0].transmitted or gmap.gradient()) != 0)
    tolerance = 0.15 if which.startswith("relative") else 1e-6  # 116 numbers' own norm varies
    assert abs(float(said.mean()) / power - 1) < tolerance
    change = ((shared - shared.mean(0)) / said.sqrt())[:, noisy]
    covariance = change.T @ change / (len(messages) - 1)
    entries, error = len(covariance), 6 / len(messages) ** 0.5
    assert abs(float(covariance.diagonal().mean()) - 1) < error * (2 / entries) ** 0.5
    assert (covariance.diagonal() - 1).abs().max() < error * 2**0.5
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < error
    assert not (shared - shared[0])[:, ~noisy].any()


def test_added_noise_is_what_estimators_count() -> None:
    """The information of two noises is that of one of their power, and not of the first alone."""
    gmap = shaped_map()
    both = chain(uniform(scale=0.3), uniform(scale=0.4))(gmap, rng())
    one = uniform(scale=0.5)(gmap, rng())
    assert both.noise is not None
    assert one.noise is not None
    found, expected = flat(both.noise.variance), flat(one.noise.variance)
    torch.testing.assert_close(found, expected)
    shaped = chain(make_defense("optimal_noise", scale=0.3, shape="own"), uniform(scale=0.4))(
        gmap, rng()
    )
    alone = make_defense("optimal_noise", scale=0.3, shape="own")(gmap, rng())
    assert shaped.noise is not None
    assert alone.noise is not None
    assert alone.noise.shape_trace > 0
    assert shaped.noise.shape_trace == alone.noise.shape_trace  # more noise hides no less of it
    expected = flat(alone.noise.variance) + 0.16
    torch.testing.assert_close(flat(shaped.noise.variance), expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quantization", {}), ("laplace_noise", {}), ("dp_sgd", {"scale": 0.1}),
        ("optimal_dp_sgd", {"scale": 0.1}),
    ],
)  # fmt: skip
def test_noise_that_was_processed_has_no_covariance_that_is_known(
    name: str, settings: dict[str, Any]
) -> None:
    """What the first one released still bounds the information."""
    gmap = shaped_map()
    defense = chain(uniform(scale=0.3), make_defense(name, **settings))
    for last in (defense, chain(defense, uniform(scale=0.1)), chain(defense, make_defense("none"))):
        noise = last(gmap, rng()).noise
        assert noise is not None
        assert (noise.added, noise.plain) == (None, False)
        torch.testing.assert_close(flat(noise.variance), torch.full((116,), 0.09).double())


@pytest.mark.long
def test_noise_that_follows_noise_does_not_have_the_covariance_it_would_say() -> None:
    """Why: optimal noise is large just where noise before it left little, so that the two are not
    of the variance that the sum of what both say would be, by far more than chance.
    """
    gmap, generator = shaped_map(), rng()
    first, second = uniform(scale=1.0), make_defense("optimal_noise", scale=1.0, shape="own")
    ratios = []
    for _ in range(400):
        one = first(gmap, generator)
        two = second(gmap.masked(one, None), generator)
        assert two.noise is not None
        assert two.noise.added is not None
        said = 1.0 + flat(two.noise.added)
        ratios.append((flat(two) - flat(gmap.gradient())).square() / said)
    assert abs(float(torch.stack(ratios).mean()) - 1) > 8 * (2 / 400 / 116) ** 0.5


def test_what_is_pruned_after_noise_carries_none() -> None:
    gmap = shaped_map()
    message = chain(uniform(scale=0.3), make_defense("pruning", ratio=0.5))(gmap, rng())
    assert message.noise is not None
    assert message.noise.added is not None
    assert message.transmitted is not None
    expected = flat(message.transmitted) * 0.3**2
    torch.testing.assert_close(flat(message.noise.added), expected.double())
    # What was kept tells of the first noise, and no second one hides that.
    more = chain(uniform(scale=0.3), pruned(), uniform(scale=0.4))(gmap, rng())
    assert more.noise is not None
    assert more.noise.added is None
    torch.testing.assert_close(flat(more.noise.variance), torch.full((116,), 0.09).double())


# -------------------------------------------------------------------------------------------- state


class Sharp(Defense):
    """Differentiates twice at every other call."""

    name = "sharp"

    @property
    def calls(self) -> int:
        return int(self.state.get("calls", 0))

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(needs_second_order=self.calls % 2 == 0)

    def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
        if self.facts.needs_second_order:
            gmap.vjp(gmap.gradient())
        self.remember(calls=self.calls + 1)
        return gmap.gradient()


def test_what_is_kept_in_an_attribute_is_refused(gmap: GradientMap) -> None:
    """It would be lost after each message, or be of all clients together."""

    class Counting(Defense):
        name = "counting"
        calls = 0

        def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
            self.calls += 1
            return gmap.gradient()

    with pytest.raises(RuntimeError, match=r"counting keeps 'calls'.*remember"):
        Counting().apply(gmap, {})


def test_needs_second_order() -> None:
    plain = pruned()
    assert not chain(plain, plain).facts.needs_second_order
    # Sensitivities are from differences.
    assert not chain(
        make_defense("optimal_pruning"), make_defense("optimal_noise")
    ).facts.needs_second_order
    for defense in (chain(plain, Sharp()), chain(Sharp(), plain), chain(plain, plain, Sharp())):
        model, batch = small_convolution()
        told = []
        for _ in range(3):
            told.append(defense.facts.needs_second_order)
            defense(GradientMap(model, batch, second_order=told[-1]), rng())
        assert told == [True, False, True]


def make_stateful() -> Chain:
    return chain(
        make_defense("optimal_pruning", ratio=0.5, refresh_every=3, num_probes=2),
        make_defense("quantization"),
        make_defense(
            "optimal_noise", relative_scale=0.1, refresh_every=2, num_probes=2, shape="past"
        ),
    )


@pytest.mark.parametrize("calls_before", [0, 1, 2, 3])
def test_state_dict_round_trip(calls_before: int, tmp_path: Path) -> None:
    defense, restored, generator = make_stateful(), make_stateful(), rng()
    gmap = GradientMap(*small_convolution())
    for _ in range(calls_before):
        defense(gmap, generator)
    torch.save(defense.state_dict(), tmp_path / "state.pt")
    restored(gmap, rng(8))
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    generators = [rng(9), rng(9)]
    for _ in range(6):
        one, two = (flat(d(gmap, g)) for d, g in zip((defense, restored), generators, strict=True))
        assert torch.equal(one, two)


def test_state_names_say_whose_they_are(gmap: GradientMap) -> None:
    defense = make_stateful()
    for _ in range(2):
        defense(gmap, rng())
    calls = {name: int(t) for name, t in defense.state_dict().items() if name.endswith("calls")}
    assert calls == {"first.first.calls": 2, "second.calls": 2}
    kinds = {"calls", "squares", "powers", "shape"}
    found = {name.split(kind)[0] for name in defense.state_dict() for kind in kinds if kind in name}
    assert found == {"first.first.", "second."}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("optimal_noise", {"scale": 5.0, "shape": "own"}), ("soteria", {}),
        ("optimal_pruning", {"shape": "past"}), ("optimal_dp_sgd", {"scale": 0.1, "shape": "own"}),
    ],
)  # fmt: skip
def test_noise_says_nothing_of_what_asks_for_the_data_again(
    name: str, settings: dict[str, Any]
) -> None:
    """Nor is what `dp_sgd` proves kept, however many follow."""
    model, batch = make_task("bert")
    gmap, first = GradientMap(model, batch), make_defense("dp_sgd", clip=1.0, scale=3.0)
    assert chain(first, pruned())(gmap).metrics["client_noise_multiplier"] == 1.5
    defense = chain(first, make_defense(name, **settings))
    for last in (defense, chain(defense, pruned())):
        message = last(gmap)
        assert not last.facts.adds_gaussian_noise
        assert message.noise is None
        assert "client_noise_multiplier" not in message.metrics


def test_refiner_as_published_is_refused_after_what_it_would_undo() -> None:
    """It shares a gradient of the client's own data: what came before gives weights alone."""
    published, noise = make_defense("refiner", objective="weighted"), uniform(scale=9.0)
    for first in (
        noise,
        chain(noise, pruned()),
        make_defense("quantization"),
    ):
        with pytest.raises(ValueError, match=r"Put refiner first.*gradient_sketch fit"):
            chain(first, published)
    assert chain(pruned(), published, noise).facts.adds_gaussian_noise is False
    for name in ("refiner", "gradient_sketch"):
        assert chain(noise, make_defense(name)).facts.adds_gaussian_noise
