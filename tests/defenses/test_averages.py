"""Running averages, and the shapes of noise and pruning that are of no one's batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution
from torch import Tensor, nn

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Defense
from hf_gradguard.defenses.sensitivity import DECAY, PRIOR, Averages

NOISE = ("optimal_noise", "optimal_dp_sgd")


def test_two_batches_by_hand() -> None:
    """Sums to one of each batch, the earlier times the decay, and a thousandth of the mean."""
    averages = Averages()
    first = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([0.0, 10.0])}
    second = {"a": torch.tensor([[0.0, 0.0], [5.0, 5.0]]), "b": torch.tensor([10.0, 0.0])}
    for squares in (first, second):
        averages = averages.with_batch(
            squares.items(), {"a": torch.ones(2, 2), "b": torch.full((2,), 2.0)}
        )
    rows = DECAY * torch.tensor([3.0, 7.0]) / 20 + torch.tensor([0.0, 10.0]) / 20
    columns = DECAY * torch.tensor([4.0, 6.0]) / 20 + torch.tensor([5.0, 5.0]) / 20
    s2 = {
        "a": torch.outer(rows, columns) / rows.sum(),
        "b": DECAY * torch.tensor([0.0, 0.5]) + torch.tensor([0.5, 0.0]),
    }
    g2 = {"a": torch.full((2, 2), 1 / 12), "b": torch.full((2,), 4 / 12)}
    whole = 1 + DECAY
    prior = PRIOR * whole / 6  # added to every entry; of a matrix rows and columns are kept then
    lifted = torch.outer(rows + 2 * prior, columns + 2 * prior) / (rows.sum() + 4 * prior)
    found = averages.ratio()
    torch.testing.assert_close(found["a"], (lifted / (g2["a"] * whole + prior)).sqrt())
    torch.testing.assert_close(found["b"], ((s2["b"] + prior) / (g2["b"] * whole + prior)).sqrt())
    by_tensor = averages.ratio(by_tensor=True)
    for name, size in (("a", 4), ("b", 2)):
        mean = (s2[name].sum() / size + PRIOR * whole / 6) / (
            g2[name].mean() * whole + PRIOR * whole / 6
        )
        torch.testing.assert_close(by_tensor[name], mean.sqrt().expand_as(first[name]))


def test_products_of_rows_and_columns_are_kept_exactly() -> None:
    """Of a matrix, and of a convolution's weight flattened to one."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = (torch.rand(n, generator=generator).double() for n in (5, 12))
    matrix = torch.outer(rows, columns)
    for shape in ((5, 12), (5, 3, 2, 2)):
        averages, one = Averages(), torch.ones(shape, dtype=torch.float64)
        for _ in range(3):
            averages = averages.with_batch([("w", matrix.view(shape))], {"w": one})
        prior = PRIOR * matrix.mean()
        expected = torch.outer(rows * columns.sum() + 12 * prior, rows.sum() * columns + 5 * prior)
        expected = expected.view(shape)
        found = averages.ratio()["w"].square()
        torch.testing.assert_close(found / found.mean(), expected / expected.mean())


@pytest.mark.parametrize("factor", [1e-12, 1e9])
def test_batches_count_alike_whatever_their_scale(factor: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for scale in (1.0, factor):
        averages, state = Averages(), generator.get_state()
        for step in range(3):
            s2 = {
                "w": torch.rand(4, 3, generator=generator),
                "b": torch.rand(4, generator=generator),
            }
            g = {n: torch.rand(t.shape, generator=generator) for n, t in s2.items()}
            by = scale if step == 1 else 1.0
            averages = averages.with_batch(
                [(n, by * t) for n, t in s2.items()], {n: by**0.5 * t for n, t in g.items()}
            )
        ratios.append(flat(averages.ratio()))
        generator.set_state(state)
    torch.testing.assert_close(*ratios)


def test_probes_add_up() -> None:
    one, two = Averages(), Averages()
    g = {"w": torch.ones(2, 2)}
    parts = [torch.rand(2, 2, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    one = one.with_batch([("w", part) for part in parts], g)
    two = two.with_batch([("w", parts[0] + parts[1])], g)
    torch.testing.assert_close(one.ratio()["w"], two.ratio()["w"])


def test_state_round_trip() -> None:
    squares = {"layer.0.weight": torch.rand(3, 2), "layer.0.bias": torch.rand(3)}
    gradient = {n: torch.rand(t.shape) for n, t in squares.items()}
    averages = Averages().with_batch(squares.items(), gradient)
    state = averages.tensors()
    remaining = {**dict(reversed(state.items())), "calls_left": torch.tensor(1)}
    restored = Averages.from_tensors(remaining)
    assert restored is not None
    assert list(remaining) == ["calls_left"]
    assert restored.knows(squares)
    assert not restored.knows(["layer.0.weight"])
    for name, tensor in averages.ratio().items():
        assert torch.equal(restored.ratio()[name], tensor)
    assert Averages.from_tensors({}) is None
    incomplete = {key: tensor for key, tensor in state.items() if not key.startswith("powers")}
    for wrong in ({"squares.w": torch.ones(2)}, incomplete):
        with pytest.raises(ValueError, match="running averages"):
            Averages.from_tensors(dict(wrong))


# ------------------------------------------------------------------------------- whose shape it is


def two_batches(name: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A model and two private batches of one shape."""
    model, one = make_task(name) if name != "convolution" else small_convolution()
    generator = torch.Generator().manual_seed(4)
    other = dict(one)
    if "input_ids" in one:
        other["input_ids"] = torch.randint(4, 24, one["input_ids"].shape, generator=generator)
        other["attention_mask"] = torch.ones_like(one["attention_mask"])
    else:
        other["pixel_values"] = torch.rand(
            one["pixel_values"].shape, generator=generator, dtype=torch.float64
        )
    if name == "bert_mlm":
        other["labels"] = one["labels"].flip(0)
    else:
        other["labels"] = (one["labels"] + 1) % 3
    return model, one, other


def variance(defense: Defense, model: Any, batch: dict[str, Tensor], seed: int = 1) -> Tensor:
    noise = defense(GradientMap(model, batch), rng(seed)).noise
    assert noise is not None
    assert noise.shape_trace == 0
    return flat(noise.added)


@pytest.mark.parametrize(
    ("kind", "name", "granularity"),
    [
        *(("optimal_noise", name, "parameter") for name in ("bert", "bert_mlm", "vit")),
        *((kind, "convolution", grain) for kind in NOISE for grain in ("parameter", "layer")),
        ("optimal_noise", "bert", "layer"), ("optimal_dp_sgd", "bert", "parameter"),
    ],
)  # fmt: skip
def test_a_public_shape_is_the_same_for_every_batch(kind: str, name: str, granularity: str) -> None:
    """Exactly: two clients with one stream, whose data have nothing in common but the shape."""
    model, one, other = two_batches(name)
    found = [
        variance(make_defense(kind, scale=0.1, granularity=granularity), model, batch)
        for batch in (one, other)
    ]
    assert torch.equal(*found)
    assert found[0].max() > 2 * found[0].min()  # it is a shape
    own = [variance_of_own(kind, model, batch, granularity) for batch in (one, other)]
    assert not torch.allclose(*own, rtol=0.1)  # as published it is each batch's


def variance_of_own(kind: str, model: Any, batch: dict[str, Tensor], granularity: str) -> Tensor:
    defense = make_defense(kind, scale=0.1, shape="own", granularity=granularity)
    noise = defense(GradientMap(model, batch), rng(1)).noise
    assert noise is not None
    assert noise.shape_trace > 0
    return flat(noise.added)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_public_mask_is_the_same_for_every_batch(name: str) -> None:
    model, one, other = two_batches(name)
    masks = {}
    for shape in ("public", "own"):
        masks[shape] = []
        for batch in (one, other):
            defense, gmap = (
                make_defense("optimal_pruning", ratio=0.9, shape=shape),
                GradientMap(model, batch),
            )
            both = flat(gmap.gradient()) != 0
            masks[shape].append((flat(defense(gmap, rng(1))) != 0, both))
    shown = masks["public"][0][1] & masks["public"][1][1]  # zeros of a gradient look pruned
    assert shown.double().mean() > 0.9
    (one_mask, _), (other_mask, _) = masks["public"]
    assert torch.equal(one_mask[shown], other_mask[shown])
    (one_mask, _), (other_mask, _) = masks["own"]
    assert not torch.equal(one_mask[shown], other_mask[shown])


@pytest.mark.parametrize("kind", NOISE)
def test_a_past_shape_is_of_the_batches_before(kind: str) -> None:
    """Message n does not change with batch n, but with batch n - 1; the first is uniform."""
    model, one, other = two_batches("bert")

    def third(*batches: dict[str, Tensor]) -> Tensor:
        defense = make_defense(kind, scale=0.1, shape="past", refresh_every=1)
        found = [variance(defense, model, batch, seed) for seed, batch in enumerate(batches)]
        torch.testing.assert_close(found[0], torch.full_like(found[0], 0.01))
        return found[-1]

    assert torch.equal(third(one, other, one), third(one, other, other))
    assert not torch.allclose(third(one, other, one), third(one, one, one), rtol=0.01)


def test_a_past_mask_is_of_the_batches_before() -> None:
    model, one, other = two_batches("bert")

    def masks(*batches: dict[str, Tensor]) -> list[Tensor]:
        defense = make_defense("optimal_pruning", shape="past", refresh_every=1, ratio=0.5)
        maps = [GradientMap(model, batch) for batch in batches]
        return [flat(defense(gmap, rng(seed))) != 0 for seed, gmap in enumerate(maps)]

    (first, second), (again, swapped) = masks(one, one), masks(one, other)
    shown = (flat(GradientMap(model, one).gradient()) != 0) & (
        flat(GradientMap(model, other).gradient()) != 0
    )
    assert torch.equal(first, again)
    assert torch.equal(second[shown], swapped[shown])
    # The first one's mask is drawn: half of what another stream keeps.
    other_stream = make_defense("optimal_pruning", shape="past", ratio=0.5)
    kept = flat(other_stream(GradientMap(model, one), rng(9))) != 0
    assert abs(float((kept & first)[shown].double().mean()) - 0.25) < 0.05


@pytest.mark.parametrize("shape", ["public", "past"])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_no_coordinate_is_below_the_floor(shape: str, floor: float) -> None:
    """A share of the noise's power is spread over all alike; the power is the same."""
    model, one, other = two_batches("bert")
    defense = make_defense("optimal_noise", scale=0.1, shape=shape, floor=floor, refresh_every=1)
    for batch in (one, other):
        found = variance(defense, model, batch)
    assert abs(float(found.mean()) / 0.01 - 1) < 1e-6
    assert found.min() >= floor * found.mean() * (1 - 1e-6)
    assert (found.max() / found.min() < 1 + 1e-6) == (floor == 1)


@pytest.mark.parametrize("shape", ["public", "past"])
@pytest.mark.parametrize("granularity", ["parameter", "layer"])
def test_what_a_message_says_of_its_noise_is_of_its_own_time(shape: str, granularity: str) -> None:
    """Variances are made when asked for: from the averages that shaped the noise, though "past" has
    learned of this batch since; and they are the noise's own.
    """
    model, one, other = two_batches("bert")
    settings = {"shape": shape, "granularity": granularity, "refresh_every": 1}
    defense = make_defense("optimal_noise", relative_scale=1.0, **settings)
    defense(GradientMap(model, other), rng())
    state, gmap = defense.state_dict(), GradientMap(model, one)
    late = defense(gmap, rng(5))
    defense(GradientMap(model, other), rng())
    found = late.noise.added
    again = make_defense("optimal_noise", relative_scale=1.0, **settings)
    again.load_state_dict(state)
    early = again(gmap, rng(5))
    assert early.noise is not None
    for name, variance in found.items():
        assert torch.equal(variance, early.noise.added[name])
        assert torch.equal(late[name], early[name])
    # Of unit variance, divided by what is said: mean and mean square of all entries.
    unit = flat({n: (late[n] - g) / found[n].sqrt() for n, g in gmap.gradient().items()})
    assert abs(float(unit.mean())) < 5 / len(unit) ** 0.5
    assert abs(float(unit.square().mean()) - 1) < 5 * (2 / len(unit)) ** 0.5


def test_a_ratio_is_made_anew_and_is_of_its_time() -> None:
    averages = Averages()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        tensors = {n: torch.rand(s, generator=generator) for n, s in (("w", (4, 3)), ("b", (4,)))}
        gradient = {n: t.sqrt() for n, t in tensors.items()}
        averages = averages.with_batch(tensors.items(), gradient)
    ratio = averages.ratio()
    before = {name: tensor.clone() for name, tensor in ratio.items()}
    ratio["w"].zero_()
    gradient = {n: torch.rand(t.shape) for n, t in tensors.items()}
    averages = averages.with_batch(tensors.items(), gradient)
    for name, tensor in before.items():
        assert torch.equal(ratio[name], tensor)
        assert not torch.equal(averages.ratio()[name], tensor)
    assert ratio.total == pytest.approx(float(flat(before).sum()), rel=1e-6)
    assert averages.ratio().total != pytest.approx(ratio.total, rel=1e-6)
    assert set(ratio) == {"w", "b"}
    with pytest.raises(KeyError):
        ratio["c"]


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_pruning"])
def test_a_parameter_may_be_one_number(name: str) -> None:
    model, batch = make_task("bert")
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    gmap = GradientMap(
        model, batch, loss_fn=lambda model, batch: model(**batch).loss / model.temperature
    )
    message = make_defense(name)(gmap, rng())
    assert message["temperature"].shape == ()


def test_a_message_that_measures_nothing_asks_for_a_gradient_alone() -> None:
    """And one of other parameters measures anew, whatever its map was made with."""
    model, batch = small_convolution()
    defense = make_defense("optimal_noise", scale=0.1, refresh_every=3)
    asked = []
    for _ in range(4):
        asked.append((defense.facts.needs_input, defense.facts.reruns_model))
        defense(defense.gradient_map(model, batch))
    assert asked == [(True, True), (False, False), (False, False), (True, True)]
    next(model.parameters()).requires_grad_(False)
    gmap = defense.gradient_map(model, batch)
    with pytest.raises(ValueError, match="needs_input=False"):
        _ = gmap.input
    assert defense(gmap).keys() == gmap.parameters.keys()
    assert defense._measured.averages.knows(gmap.parameters)  # type: ignore[attr-defined]
