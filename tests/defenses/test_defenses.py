"""What holds for every defense: names, settings, purity, corner cases."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers import (
    exact_map,
    flat,
    make_task,
    rng,
    small_convolution,
    split_like,
    token_batch,
)
from torch import Tensor

from hf_gradguard import DEFENSES, GradientMap, chain, make_defense
from hf_gradguard.defenses import Defense, sensitivity
from hf_gradguard.gradient_map.local_training.update import UpdateMap

OWN = {"shape": "own", "num_probes": 2}
"""As published: weighed by sensitivities of the batch itself."""

OF_THIS_BATCH = {"relative_scale": 0.1, "strength": "own"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian_noise": ("gaussian_noise", {**OF_THIS_BATCH}),
    "laplace_noise": ("laplace_noise", {**OF_THIS_BATCH}),
    "optimal_noise": ("optimal_noise", {**OF_THIS_BATCH, **OWN}),
    "optimal_noise_layer": (
        "optimal_noise",
        {**OF_THIS_BATCH, "granularity": "layer", **OWN},
    ),
    "optimal_noise_public": ("optimal_noise", {**OF_THIS_BATCH}),
    "optimal_noise_past": ("optimal_noise", {**OF_THIS_BATCH, "shape": "past"}),
    "dp_sgd_norm": ("dp_sgd", {"clip": 0.5, **OF_THIS_BATCH}),
    "dp_sgd_coordinate": ("dp_sgd", {"clip": 0.01, "clip_by": "coordinate", **OF_THIS_BATCH}),
    "optimal_dp_sgd": ("optimal_dp_sgd", {"clip": 0.01, **OF_THIS_BATCH, **OWN}),
    "optimal_dp_sgd_public": ("optimal_dp_sgd", {"clip": 0.01, **OF_THIS_BATCH}),
    "pruning": ("pruning", {"ratio": 0.5}),
    "pruning_utility": ("pruning", {"utility": 0.9}),
    "optimal_pruning": ("optimal_pruning", {"ratio": 0.5, **OWN}),
    "optimal_pruning_layer": (
        "optimal_pruning",
        {"ratio": 0.5, "granularity": "layer", **OWN},
    ),
    "optimal_pruning_utility": ("optimal_pruning", {"utility": 0.9, **OWN}),
    "optimal_pruning_public": ("optimal_pruning", {"ratio": 0.5}),
    "optimal_pruning_past": ("optimal_pruning", {"ratio": 0.5, "shape": "past"}),
    "optimal_noise_published": ("optimal_noise_published", {**OF_THIS_BATCH}),
    "optimal_dp_sgd_published": ("optimal_dp_sgd_published", {"clip": 0.01, **OF_THIS_BATCH}),
    "optimal_pruning_published": ("optimal_pruning_published", {}),
    "quantization": ("quantization", {"bits": 4}),
    "quantization_stochastic": ("quantization", {"bits": 4, "stochastic": True}),
    "quantization_sign": ("quantization", {"sign_only": True}),
}
"""Every defense but "none", in every kind that its settings have."""
OWN_TESTS = {"gradient_sketch", "refiner", "refiner_published", "soteria"}

DETERMINISTIC = {"pruning", "pruning_utility", "quantization", "quantization_sign"}

# Of every setting: what its error says, and values outside its range.
NUMBERS = (-1, -1e-9, math.nan, math.inf, -math.inf, "1", True)
COUNTS = (0, -1, 1.5, 2.0, "3", True, math.nan)
RANGES: list[tuple[str, str, str, tuple[Any, ...]]] = [
    *(
        (defense, setting, rf"{setting} must be a finite number of at least 0", NUMBERS)
        for defense in (
            "gaussian_noise",
            "laplace_noise",
            "optimal_noise",
            "dp_sgd",
            "optimal_dp_sgd",
        )
        for setting in ("scale", "relative_scale", "utility_budget")
    ),
    *(
        (
            defense,
            "clip",
            "clip must be a finite number above 0",
            (0, -1, math.nan, math.inf, "1", True, None),
        )
        for defense in ("dp_sgd", "optimal_dp_sgd")
    ),
    ("dp_sgd", "clip_by", "clip_by must be 'norm' or 'coordinate'", ("layer", None)),
    *(
        (defense, setting, rf"{setting} must be a whole number of at least 1", COUNTS)
        for defense in ("optimal_noise", "optimal_dp_sgd", "optimal_pruning")
        for setting in ("num_probes", "refresh_every")
    ),
    *(
        (defense, "min_batches", "min_batches must be", (*COUNTS, 256))
        for defense in ("pruning", "optimal_pruning")
    ),
    *(
        (defense, "shape", "shape must be 'public' or 'past' or 'own'", ("private", None, 1))
        for defense in ("optimal_noise", "optimal_dp_sgd", "optimal_pruning")
    ),
    *(
        (defense, "floor", "floor must be from 0 to 1", (-0.1, 1.1, math.nan, "1", True))
        for defense in ("optimal_noise", "optimal_dp_sgd")
    ),
    *(
        (defense, "granularity", "granularity must be 'parameter' or 'layer'", ("tensor", None))
        for defense in ("optimal_noise", "optimal_dp_sgd", "optimal_pruning")
    ),
    *(
        (
            defense,
            "ratio",
            "ratio must be at least 0 and below 1",
            (-0.1, 1, 1.5, math.nan, math.inf, "0.5", True),
        )
        for defense in ("pruning", "optimal_pruning")
    ),
    *(
        (
            defense,
            "utility",
            "utility must be above 0 and at most 1",
            (0, -0.1, 1.0001, math.nan, math.inf, "0.5", True),
        )
        for defense in ("pruning", "optimal_pruning")
    ),
    (
        "quantization",
        "bits",
        "bits must be a whole number from 1 to 32",
        (0, 33, -1, 2.5, math.nan, "4", True),
    ),
]


def make(case: str) -> Defense:
    name, settings = CASES[case]
    return make_defense(name, **settings)


def bert_map(**settings: Any) -> GradientMap:
    return GradientMap(*make_task("bert", **settings))


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert sorted(one) == sorted(two)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


# ------------------------------------------------------------------------------------------ names
# and settings


def test_every_defense_has_a_case() -> None:
    """A new defense must be added to these tests; some have tests of their own."""
    assert set(DEFENSES) - {"none", *OWN_TESTS} == {name for name, _ in CASES.values()}
    assert "none" in DEFENSES


@pytest.mark.parametrize("name", DEFENSES)
def test_names(name: str) -> None:
    assert DEFENSES[name].name == name
    assert type(make_defense(name)) is DEFENSES[name]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("optimal_nose", "optimal_noise"), ("prunning", "pruning"), ("dpsgd", "dp_sgd")],
)
def test_an_unknown_name_lists_the_names_and_suggests_one(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no defense {wrong!r}") as error:
        make_defense(wrong)
    assert f"Did you mean {meant!r}?" in str(error.value)
    assert ", ".join(DEFENSES) in str(error.value)


@pytest.mark.parametrize("wrong", ["xyzzy", "", 3])
def test_a_name_like_no_other_gets_no_suggestion(wrong: Any) -> None:
    with pytest.raises(ValueError, match=", ".join(DEFENSES)) as error:
        make_defense(wrong)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("name", DEFENSES)
def test_an_unknown_setting_lists_the_settings(name: str) -> None:
    with pytest.raises(TypeError) as error:
        make_defense(name, power=3, also=1)
    message = str(error.value)
    assert message.startswith(f"{name} has no setting also, power.")
    settings = [field.name for field in fields(DEFENSES[name])]
    assert (f"It has: {', '.join(settings)}." if settings else "It has none.") in message


@pytest.mark.parametrize(
    ("defense", "setting", "message", "value"),
    [
        (defense, setting, message, value)
        for defense, setting, message, values in RANGES
        for value in values
    ],
)
def test_values_out_of_range(defense: str, setting: str, message: str, value: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_defense(defense, **{setting: value})
    assert repr(value) in str(error.value)


def test_every_setting_has_its_range_tested() -> None:
    tested = {(defense, setting) for defense, setting, *_ in RANGES}
    flags = {"stochastic", "sign_only", "error_feedback", "per_sample"}
    # of dp_sgd with per_sample=True: in test_private_sgd.py
    private = {"noise_multiplier", "target_epsilon", "delta", "expected_batch_size"}
    correlated = {"correlated", "participations", "min_separation", "factorization"}
    correlated |= {"bands", "messages", "falling_rate"}  # in test_correlated_noise.py
    correlated |= {"sampling"}  # in test_balls_in_bins.py
    elsewhere = {"strength", "public_data", *correlated}
    for name, _ in CASES.values():
        for field in fields(DEFENSES[name]):
            of = name.removesuffix("_published"), field.name
            assert field.name in flags | private | elsewhere or of in tested


@pytest.mark.parametrize(
    ("defense", "settings", "message"),
    [
        (
            "gaussian_noise",
            {"scale": 1, "relative_scale": 1},
            "one of scale, relative_scale and utility_budget",
        ),
        ("optimal_noise", {"scale": 0, "utility_budget": 1}, "not scale and utility_budget"),
        (
            "dp_sgd",
            {"relative_scale": 1, "utility_budget": 1},
            "not relative_scale and utility_budget",
        ),
        ("pruning", {"ratio": 0.5, "utility": 0.5}, "ratio or utility, not both"),
        ("optimal_pruning", {"ratio": 0, "utility": 0.5}, "ratio or utility, not both"),
        *(
            (name, {"shape": "own", "refresh_every": 2}, "shape='own' measures every message")
            for name in ("optimal_noise", "optimal_dp_sgd", "optimal_pruning")
        ),
        ("quantization", {"sign_only": True, "bits": 2}, "sign_only has no levels"),
        ("quantization", {"sign_only": True, "stochastic": True}, "sign_only has no levels"),
    ],
)
def test_settings_that_exclude_each_other(
    defense: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_defense(defense, **settings)


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("gaussian_noise", {"relative_scale": 20.0, "strength": "transcript"}),
        ("pruning", {"ratio": 0.99, "error_feedback": True, "min_batches": 2}),
        (
            "quantization",
            {"bits": 1, "stochastic": False, "sign_only": False, "error_feedback": False},
        ),
        (
            "dp_sgd",
            {
                "relative_scale": 20.0,
                "strength": "transcript",
                "clip": 1.0,
                "clip_by": "norm",
                "per_sample": False,
                "correlated": False,
            },
        ),
        (
            "optimal_noise",
            {
                "relative_scale": 20.0,
                "strength": "transcript",
                "shape": "public",
                "granularity": "parameter",
                "floor": 0.2,
            },
        ),
    ],
)
def test_defaults(defense: str, settings: dict[str, Any]) -> None:
    assert make_defense(defense).settings() == settings


# --------------------------------------------------------------------------------------------- what
# is shared


def test_none_shares_the_gradient_exactly() -> None:
    gmap = bert_map()
    assert_same(make_defense("none")(gmap), gmap.gradient())


@pytest.mark.parametrize("case", CASES)
def test_every_other_defense_changes_the_gradient(case: str) -> None:
    gmap = bert_map()
    shared = make(case)(gmap, rng())
    assert list(shared) == list(gmap.gradient())
    for name, g in gmap.gradient().items():
        assert shared[name].shape == g.shape
        assert shared[name].dtype == g.dtype
        assert not shared[name].requires_grad
    difference = flat(shared) - flat(gmap.gradient())
    assert (difference != 0).double().mean() > 0.25
    # These settings are mild: what is shared still points along the gradient.
    assert torch.cosine_similarity(flat(shared), flat(gmap.gradient()), dim=0) > 0.3


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        *(
            (defense, {strength: 0, "strength": "own"})
            for defense in ("gaussian_noise", "laplace_noise", "optimal_noise")
            for strength in ("scale", "relative_scale", "utility_budget")
        ),
        ("dp_sgd", {"clip": 1e9, "scale": 0}),
        ("dp_sgd", {"clip": 1e9, "clip_by": "coordinate", "relative_scale": 0}),
        ("optimal_dp_sgd", {"clip": 1e9, "utility_budget": 0, "strength": "own"}),
        ("optimal_noise", {"scale": 0.0, "granularity": "layer"}),
        ("pruning", {"ratio": 0}),
        ("pruning", {"ratio": 0.0}),
        ("pruning", {"ratio": 1e-12}),
        ("optimal_pruning", {"ratio": 0}),
        ("optimal_pruning", {"ratio": 0, "granularity": "layer"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_asked_for_is_nothing_done(
    defense: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    gmap = bert_map(dtype=dtype)
    assert_same(make_defense(defense, **settings)(gmap, rng()), gmap.gradient())


@pytest.mark.parametrize("case", [*CASES, "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_kept(case: str, dtype: torch.dtype) -> None:
    gmap = bert_map(dtype=dtype)
    shared = make_defense("none")(gmap) if case == "none" else make(case)(gmap, rng())
    assert {tensor.dtype for tensor in shared.values()} == {dtype}
    assert torch.isfinite(flat(shared)).all()


# --------------------------------------------------------------------------------------------------
# purity


@pytest.mark.parametrize("case", [*CASES, "none"])
def test_a_defense_touches_neither_model_nor_global_randomness(case: str) -> None:
    model, batch = make_task("bert", dropout=0.1)
    model.train()
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.5) if i % 2 else None
    gmap = GradientMap(model, batch)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    gradient = {n: t.clone() for n, t in gmap.gradient().items()}
    random_state = torch.get_rng_state()
    (make_defense("none") if case == "none" else make(case))(gmap, rng())
    assert_same(model.state_dict(), before)
    assert_same(gmap.gradient(), gradient)
    assert all(module.training for module in model.modules())
    for i, p in enumerate(model.parameters()):
        assert p.requires_grad
        assert (p.grad == 0.5).all() if i % 2 else p.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("case", CASES)
def test_all_randomness_comes_from_the_generator(case: str) -> None:
    gmap = bert_map()
    one, again, other = (make(case)(gmap, rng(seed)) for seed in (1, 1, 2))
    assert_same(one, again)
    assert torch.equal(flat(one), flat(other)) == (case in DETERMINISTIC)
    generator = rng()
    make(case)(gmap, generator)
    assert (generator.bytes(8) == rng().bytes(8)) == (case in DETERMINISTIC)


@pytest.mark.parametrize("case", sorted(CASES.keys() - DETERMINISTIC))
def test_without_a_generator_it_is_private(case: str) -> None:
    """The global seed, the same on all ranks, has no say."""
    gmap, results = bert_map(), []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(flat(make(case)(gmap)))
    assert not torch.equal(*results)


# ---------------------------------------------------------------------------------------------
# corner cases


@pytest.mark.parametrize("case", [*CASES, "none"])
def test_zero_gradient(case: str) -> None:
    """A loss that is zero everywhere: nothing to weigh by, nothing to divide by."""
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch, loss_fn=lambda model, batch: 0 * model(**batch).loss)
    assert not flat(gmap.gradient()).any()
    shared = (make_defense("none") if case == "none" else make(case))(gmap, rng())
    assert not flat(shared).any()  # noise here is relative to the gradient


def test_zero_gradient_gets_absolute_noise() -> None:
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch, loss_fn=lambda model, batch: 0 * model(**batch).loss)
    noise = flat(make_defense("gaussian_noise", scale=0.5)(gmap, rng()))
    assert abs(noise.square().mean() / 0.25 - 1) < 5 * (2 / len(noise)) ** 0.5


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_dp_sgd"])
@pytest.mark.parametrize("strength", ["scale", "relative_scale", "utility_budget"])
def test_zero_sensitivities_get_no_noise_and_one_warning(
    name: str, strength: str, caplog: pytest.LogCaptureFixture
) -> None:
    gmap = exact_map("bert")
    gmap.squared_sensitivity = lambda *_, **__: {
        n: torch.zeros_like(g) for n, g in gmap.gradient().items()
    }
    defense = make_defense(
        name,
        **{strength: 0.5, "strength": "own"},
        **OWN,
        **({"clip": 1e9} if name == "optimal_dp_sgd" else {}),
    )
    caplog.clear()
    for _ in range(3):
        assert_same(defense(gmap, rng()), gmap.gradient())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{name} added no noise" in record.getMessage()


def test_zero_sensitivities_are_pruned_by_size() -> None:
    gmap = exact_map("bert")
    gmap.squared_sensitivity = lambda *_, **__: {
        n: torch.zeros_like(g) for n, g in gmap.gradient().items()
    }
    shared = make_defense("optimal_pruning", ratio=0.5, shape="own")(gmap, rng())
    assert torch.equal(flat(shared), flat(make_defense("pruning", ratio=0.5)(gmap, rng())))


@pytest.mark.parametrize("case", CASES)
def test_batch_of_one(case: str) -> None:
    gmap = bert_map(batch_size=1)
    shared = flat(make(case)(gmap, rng()))
    assert torch.isfinite(shared).all()
    assert not torch.equal(shared, flat(gmap.gradient()))


@pytest.mark.parametrize("case", CASES)
def test_parameter_that_the_loss_does_not_use(case: str) -> None:
    gmap = GradientMap(*small_convolution())
    assert not gmap.gradient()["unused"].any()
    shared = make(case)(gmap, rng())
    assert torch.isfinite(flat(shared)).all()
    uniform = {"gaussian_noise", "laplace_noise", "dp_sgd_norm", "dp_sgd_coordinate"}
    spread = {"optimal_noise_public", "optimal_noise_past", "optimal_dp_sgd_public"}
    assert bool(shared["unused"].any()) == (case in uniform | spread)


@pytest.mark.parametrize(
    ("case", "value"),
    [
        *((case, math.nan) for case in (*CASES, "none", "chain")),
        *((case, math.inf) for case in ("none", "gaussian_noise", "pruning", "chain")),
        *((case, -math.inf) for case in ("none", "optimal_noise", "quantization")),
    ],
)
def test_a_gradient_that_is_not_finite_is_not_shared(case: str, value: float) -> None:
    gmap = bert_map()
    gmap.gradient()["bert.pooler.dense.bias"][3] = value
    if case == "chain":
        defense = chain(make("quantization"), make("gaussian_noise"))
    else:
        defense = make_defense("none") if case == "none" else make(case)
    with pytest.raises(
        FloatingPointError, match=r"gradient of bert\.pooler\.dense\.bias is not finite"
    ):
        defense(gmap, rng())


def test_a_loss_that_is_not_finite() -> None:
    model, batch = make_task("bert")
    with torch.no_grad():
        model.classifier.bias[1] = math.nan
    with pytest.raises(FloatingPointError, match="is not finite, so nothing was shared"):
        make_defense("none")(GradientMap(model, batch))


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_dp_sgd", "optimal_pruning"])
def test_sensitivities_that_are_not_finite(name: str) -> None:
    gmap = exact_map("bert")
    squares = {n: t.clone() for n, t in gmap.squared_sensitivity().items()}
    squares["classifier.weight"][0, 0] = math.nan
    gmap.squared_sensitivity = lambda *_, **__: squares
    with pytest.raises(
        FloatingPointError, match=r"sensitivity of classifier\.weight is not finite"
    ):
        make_defense(name, shape="own")(gmap, rng())


@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd"])
def test_noise_that_overflows_is_not_shared(name: str) -> None:
    gmap = bert_map(dtype=torch.float32)
    with pytest.raises(FloatingPointError, match=rf"{name} made the gradient of .*scale=1e\+30"):
        make_defense(name, scale=1e30)(gmap, rng())


# --------------------------------------------------------------------------- sensitivities kept
# between calls

SENSITIVE = ("optimal_noise", "optimal_dp_sgd", "optimal_pruning")
PUBLISHED = {f"{name}_published" for name in SENSITIVE}


AVERAGED = [(name, shape) for name in SENSITIVE for shape in ("public", "past")]


def batches_at_first(shape: str) -> int:
    """That averages begin with."""
    return sensitivity.FIRST_BATCHES if shape == "public" else 1


class Calls(list[tuple[GradientMap, int]]):
    """The maps that probes were made of, and how many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        probe = sensitivity.probe_sums

        def counted(gmap: GradientMap, num_probes: int, *rest: Any) -> Any:
            self.append((gmap, num_probes))
            return probe(gmap, num_probes, *rest)

        monkeypatch.setattr(sensitivity, "probe_sums", counted)


@pytest.mark.parametrize(("name", "shape"), AVERAGED)
@pytest.mark.parametrize("refresh_every", [1, 3, None])
def test_averages_are_fed_at_every_nth_message(
    name: str, shape: str, refresh_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tenth without the setting. `"past"` is fed the message's own batch, `"public"` never
    that, and random ones at first. First-order maps do.
    """
    model, batch = small_convolution()
    defense, calls, fed = make_defense(name, shape=shape, refresh_every=refresh_every), [], []
    calls = Calls(monkeypatch)
    for _ in range(11 if refresh_every is None else 2 * refresh_every + 1):
        gmap = GradientMap(model, batch, second_order=False)
        assert not defense.facts.needs_second_order
        defense(gmap, rng())
        fed.append(len(calls))
        assert all((seen is gmap) == (shape == "past") for seen, _ in calls)
        calls.clear()
    every = refresh_every or 10
    assert fed == [batches_at_first(shape)] + [
        1 if i % every == 0 else 0 for i in range(1, len(fed))
    ]


def small_task(samples: int) -> tuple[Any, dict[str, Tensor]]:
    """BERT with so many samples; with none, a model with ReLU whose layers are recomputed."""
    if samples:
        return make_task("bert")[0], token_batch(samples)
    model, batch = make_task("distilbert")
    model.gradient_checkpointing_enable()
    return model.train(), batch


@pytest.mark.parametrize("name", SENSITIVE)
def test_own_shapes_measure_every_message(name: str) -> None:
    """With the probes that are asked for, and by default so many that there are ten squares of
    samples, but three at least; ten where samples are not known apart.
    """
    one, many, kinked = (GradientMap(*small_task(n)) for n in (1, 7, 0))
    assert len(kinked.input) > 1
    for settings, probes, gmap in (
        ({}, 5, exact_map("bert")), ({"num_probes": 7}, 7, exact_map("bert")), ({}, 10, one),
        ({}, 3, many), ({}, 10, kinked),
    ):  # fmt: skip
        seen = []
        exact, generator = gmap.squared_sensitivity(), rng()
        gmap.squared_sensitivity = lambda *args, seen=seen, exact=exact: seen.append(args) or exact
        strength = {"ratio": 0.9} if name == "optimal_pruning" else {"scale": 1.0}
        defense = make_defense(name, shape="own", **strength, **settings)
        for _ in range(2):
            defense(gmap, generator)
        assert seen == [(probes, generator)] * 2
        assert defense.state_dict() == {}


@pytest.mark.parametrize("name", SENSITIVE)
def test_public_shapes_measure_few_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large batch at most eight; of local training, whose steps have batches of their own, as
    many as it has.
    """
    calls, (model, batch) = Calls(monkeypatch), small_task(11)
    make_defense(name)(GradientMap(model, batch, second_order=False), rng())
    assert {len(gmap.input) for gmap, _ in calls} == {sensitivity.MEASURED_SAMPLES}
    calls.clear()
    update = UpdateMap(model, [batch, token_batch(3)], learning_rate=0.1, second_order=False)
    make_defense(name)(update, rng())
    assert {len(gmap.input) for gmap, _ in calls} == {14}


@pytest.mark.parametrize("name", SENSITIVE)
def test_settings_reach_the_averages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    for settings in ({}, {"num_probes": 7}):
        make_defense(name, **settings)(GradientMap(*small_convolution()), rng())
    assert [count for _, count in calls] == [1] * sensitivity.FIRST_BATCHES + [
        7
    ] * sensitivity.FIRST_BATCHES


@pytest.mark.parametrize("shape", ["public", "past"])
def test_an_estimate_that_is_not_finite_is_not_kept(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad batch must not stop the messages after it, nor leave them without their shape."""
    model, batch = small_convolution()
    defense = make_defense("optimal_noise", shape=shape, refresh_every=5, scale=1.0)
    probe = sensitivity.probe_sums

    def overflown(*args: Any) -> Any:
        return ((name, tuple(s * math.nan for s in sums)) for name, sums in probe(*args))

    monkeypatch.setattr(sensitivity, "probe_sums", overflown)
    with pytest.raises(FloatingPointError, match=r"sensitivity of .* is not finite"):
        defense(GradientMap(model, batch), rng())
    assert defense.state_dict() == {}
    monkeypatch.undo()
    calls = Calls(monkeypatch)
    for _ in range(2):
        assert torch.isfinite(flat(defense(GradientMap(model, batch), rng()))).all()
    assert len(calls) == batches_at_first(shape)  # at once, not after five messages
    assert defense.state_dict()


@pytest.mark.parametrize(("name", "shape"), AVERAGED)
def test_the_state_is_rows_and_columns(name: str, shape: str) -> None:
    """O(rows + columns) numbers for each matrix, twice: of s² and of g²."""
    gmap = bert_map()
    defense = make_defense(name, shape=shape)
    defense(gmap, rng())
    sizes = {}
    for key, tensor in defense.state_dict().items():
        kind, _, rest = key.partition(".")
        if kind in ("squares", "powers"):
            parameter = rest.partition(".")[2]
            sizes[kind, parameter] = sizes.get((kind, parameter), 0) + tensor.numel()
    for parameter, g in gmap.gradient().items():
        expected = len(g) + g[0].numel() if g.dim() > 1 else g.numel()
        for kind in ("squares", "powers"):
            assert sizes[kind, parameter] == expected
    assert len(sizes) == 2 * len(gmap.gradient())


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - set(SENSITIVE) - PUBLISHED - OWN_TESTS))
def test_the_others_need_no_jacobian_and_keep_nothing(name: str) -> None:
    strength = {"pruning": {"ratio": 0.9}, "quantization": {}, "none": {}}.get(name, {"scale": 1.0})
    defense = make_defense(name, **strength)
    assert not defense.facts.needs_second_order
    defense(GradientMap(*make_task("bert"), second_order=False), rng())
    assert defense.state_dict() == {}
    defense.load_state_dict({})
    with pytest.raises(ValueError, match=f"{name} keeps no state.*calls_left"):
        defense.load_state_dict({"calls_left": torch.tensor(1)})


@pytest.mark.parametrize(("name", "shape"), AVERAGED)
@pytest.mark.parametrize("calls_before", [0, 1, 2, 3])
def test_state_dict_round_trip(name: str, shape: str, calls_before: int, tmp_path: Any) -> None:
    gmap, generator = GradientMap(*small_convolution()), rng()
    defense, restored = (make_defense(name, shape=shape, refresh_every=3) for _ in range(2))
    for _ in range(calls_before):
        defense(gmap, generator)
    torch.save(defense.state_dict(), tmp_path / "state.pt")
    restored(gmap, rng(8))  # what it remembers of its own must be replaced
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    generators = [rng(9), rng(9)]
    for _ in range(4):
        assert_same(defense(gmap, generators[0]), restored(gmap, generators[1]))
        assert_same(defense.state_dict(), restored.state_dict())


def test_a_state_in_another_order_is_the_same() -> None:
    """Files of tensors come back sorted by name."""
    gmap = GradientMap(*small_convolution())
    defense, restored = (make_defense("optimal_noise", scale=0.1) for _ in range(2))
    defense(gmap, rng())
    state = defense.state_dict()
    restored.load_state_dict({name: state[name] for name in sorted(state, reverse=True)})
    assert_same(defense(gmap, rng(9)), restored(gmap, rng(9)))


def test_a_state_is_not_changed_by_later_calls() -> None:
    gmap, defense = bert_map(), make_defense("optimal_noise", refresh_every=2)
    defense(gmap, rng(1))
    state = defense.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    for seed in (2, 3):
        defense(gmap, rng(seed))
    assert_same(state, kept)
    assert any((defense.state_dict()[name] != tensor).any() for name, tensor in kept.items())


@pytest.mark.parametrize("shape", ["public", "past"])
def test_a_changed_set_of_parameters_is_averaged_anew(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_task("bert")
    defense = make_defense("optimal_noise", refresh_every=5, shape=shape)
    calls = Calls(monkeypatch)
    for _ in range(2):
        defense(GradientMap(model, batch), rng())
    assert len(calls) == batches_at_first(shape)
    model.bert.pooler.requires_grad_(False)
    gmap = GradientMap(model, batch)
    assert list(defense(gmap, rng())) == list(gmap.gradient())
    assert len(calls) == 2 * batches_at_first(shape)
    assert not any("pooler" in name for name in defense.state_dict())


def test_split_like_undoes_flat() -> None:
    gradient = bert_map().gradient()
    assert_same(split_like(flat(gradient), gradient), gradient)


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_pruning"])
def test_averages_leave_nothing_bare(name: str) -> None:
    """Positions that the batches before did not reach are noisy as well."""
    model, batch = make_task("bert")
    short = {key: value[:, :3] if value.dim() > 1 else value for key, value in batch.items()}
    defense = make_defense(name, shape="past")
    for _ in range(2):
        defense(GradientMap(model, short), rng())
    gmap = GradientMap(model, batch)
    position = next(n for n in gmap.parameters if "position_embeddings" in n)
    unseen = gmap.gradient()[position][3:5]
    assert (unseen != 0).any()
    ratio = defense.averaged_ratio(gmap, rng())
    assert all((tensor > 0).all() for tensor in ratio.values())
    if name == "optimal_noise":
        shape = defense.shaped(gmap, gmap.gradient(), rng())
        assert shape[position][3:5].min() >= defense.floor * flat(shape).mean() * (1 - 1e-6)


def test_own_sensitivities_that_underflow_are_not_zero() -> None:
    """A coordinate that is not zero is not shared bare because its estimate underflowed."""
    gmap = GradientMap(*small_convolution(dtype=torch.float32))
    squares = gmap.squared_sensitivity(3, rng())
    weight = "convolution.weight"
    squares[weight] = torch.zeros_like(squares[weight])
    gmap.squared_sensitivity = lambda *_: squares
    defense = make_defense("optimal_noise", shape="own")
    roots, _ = defense.own_sensitivity(gmap, gmap.gradient(), rng())
    tiny = torch.tensor(torch.finfo(torch.float32).tiny).sqrt()
    assert (gmap.gradient()[weight] != 0).all()
    torch.testing.assert_close(roots[weight], tiny.expand_as(roots[weight]))
    assert not roots["unused"].any()  # zero there, and its gradient too
    gmap.squared_sensitivity = lambda *_: {n: torch.zeros_like(t) for n, t in squares.items()}
    roots, _ = defense.own_sensitivity(gmap, gmap.gradient(), rng())
    assert not flat(roots).any()  # a loss without second derivatives needs no noise


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_dp_sgd"])
def test_the_batchs_own_shape_has_no_floor(name: str) -> None:
    with pytest.raises(ValueError, match="leave floor out, or take shape='public'"):
        make_defense(name, shape="own", floor=0.2)
    assert "floor" not in make_defense(name, shape="own").settings()


def test_labels_without_a_count_of_classes_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 2))

    def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    batch = {"pixel_values": torch.rand(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=r"Class ids need model.config.num_labels, which is not"):
        make_defense("optimal_noise")(GradientMap(model, batch, loss_fn=loss))
