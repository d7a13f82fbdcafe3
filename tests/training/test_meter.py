"""The Trainer's leakage meter: what it logs, admits and accounts, against dense Jacobians and
estimates made outside.
"""

# ruff: noqa: F811 (fixtures of the Trainer's tests)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    exact_map,
    flat,
    make_task,
    refuses,
    rng,
    small_convolution,
    standard_deviations,
)
from leakage_helpers import dense_convolution, fisher
from test_trainer import Gradients, make_trainer, rows, settings, stack, weights  # noqa: F401
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, chain, make_defense
from hf_gradguard.defenses import Defense, Noise
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.gradient_map.differences import by_differences
from hf_gradguard.leakage import (
    FisherAccountant,
    dfil,
    fisher_trace,
    inversion_influence_lower_bound,
    mse_bound_from_dfil,
    one_product_bound,
)
from hf_gradguard.randomness import Stream
from hf_gradguard.training.meter import message_dfil

MakeTrainer = Callable[..., GradGuardTrainer]
# One batch after the other, and a model that stands still: what is measured can be computed again
# outside.
STILL = {
    "optim": "sgd",
    "learning_rate": 0.0,
    "train_sampling_strategy": "sequential",
    "noise_seed": 9,
}


def noise_of(defense: Defense, gmap: GradientMap, seed: int = 5) -> Noise:
    noise = defense(gmap, rng(seed)).noise
    assert noise is not None
    return noise


# What a defense says of its noise


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gaussian_noise", {}), ("optimal_noise", {"shape": "own"}),
        ("optimal_noise", {"shape": "own", "granularity": "layer"}), ("optimal_noise", {}),
        ("dp_sgd", {"clip": 1e3}), ("dp_sgd", {"clip": 0.02, "clip_by": "coordinate"}),
        ("optimal_dp_sgd", {"shape": "own", "clip": 0.02}), ("optimal_dp_sgd", {"clip": 0.02}),
    ],
)  # fmt: skip
def test_recorded_variance_is_that_of_the_draws(name: str, own: dict[str, Any]) -> None:
    """And infinite exactly on coordinates that clipping holds constant."""
    gmap = exact_map("bert")
    std = flat(standard_deviations(make_defense(name, scale=0.25, **own), gmap))
    found = flat(noise_of(make_defense(name, scale=0.25, **own), gmap).variance)
    constant = (
        flat(gmap.gradient()).abs() >= own["clip"]
        if "clip" in own
        else torch.zeros_like(std, dtype=torch.bool)
    )
    assert bool(constant.any()) == (own.get("clip") == 0.02)
    assert torch.equal(found.isinf(), constant)
    torch.testing.assert_close(found[~constant], std[~constant].square(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("clip", [0.05, 0.5, 5.0])
def test_clipping_by_norm_is_bounded_by_its_own_jacobian(clip: float) -> None:
    """J̃ by automatic differentiation of g C/max(‖g‖, C): never more information, and less by one
    direction at most.
    """
    gmap, jacobian = GradientMap(*small_convolution()), dense_convolution()
    g = flat(gmap.gradient())
    clipping = torch.autograd.functional.jacobian(lambda g: g * clip / g.norm().clamp(min=clip), g)
    clipped = jacobian @ clipping.T
    variance = noise_of(make_defense("dp_sgd", clip=clip, scale=0.3), gmap).variance
    excess = fisher(jacobian, variance) - clipped @ clipped.T / 0.3**2
    eigenvalues = torch.linalg.eigvalsh(excess)
    size = float(torch.linalg.matrix_norm(fisher(jacobian, variance), 2))
    assert eigenvalues[0] >= -1e-9 * size
    assert (eigenvalues > 1e-9 * size).sum() <= 1
    assert bool(eigenvalues[-1] > 1e-3 * size) == (float(g.norm()) > clip)


def test_what_a_chain_says_of_its_noise() -> None:
    gmap = GradientMap(*small_convolution())
    gaussian = make_defense("gaussian_noise", scale=0.3)
    pruned = make_defense("pruning", ratio=0.5)
    kept = flat(pruned(gmap, rng())) != 0

    after = flat(noise_of(chain(pruned, gaussian), gmap).variance)
    assert torch.equal(after.isinf(), ~kept)
    scale = 0.3**2 * len(kept) / int(kept.sum())  # all the noise power falls on what is left
    torch.testing.assert_close(after[kept], torch.full_like(after[kept], scale))
    # What asks for nothing else only processes it.
    for later in (pruned, make_defense("quantization")):
        first = chain(gaussian, later)
        assert first.facts.adds_gaussian_noise
        torch.testing.assert_close(
            flat(noise_of(first, gmap).variance), torch.full((len(kept),), 0.09).double()
        )
    # Noise whose shape is of no one's batch adds its variance.
    public = make_defense("optimal_noise", scale=5)
    noise_of(public, gmap)  # what it measured now stands for several messages
    more = flat(noise_of(chain(gaussian, public), gmap).variance)
    torch.testing.assert_close(more, 0.09 + flat(noise_of(public, gmap).variance))
    nested = chain(make_defense("none"), pruned, gaussian, pruned)
    assert torch.equal(flat(noise_of(nested, gmap).variance), after)
    for others in (
        chain(make_defense("quantization"), gaussian), chain(pruned, make_defense("laplace_noise")),
        pruned, chain(make_defense("laplace_noise"), gaussian), make_defense("none"),
        make_defense("laplace_noise"),
    ):  # fmt: skip
        assert not others.facts.adds_gaussian_noise
        assert others(gmap, rng()).noise is None


def test_a_defense_keeps_nothing_of_a_message() -> None:
    defense = make_defense("optimal_noise", num_probes=2, shape="own")
    gmap = GradientMap(*small_convolution())
    before = dict(vars(defense))
    _, state = defense.apply(gmap, {})
    assert vars(defense) == before
    usual = state.pop("usual")  # of what was shared
    assert all(isinstance(number, float) for number in usual)
    assert not state


# dFIL of a message


def by_sample(jacobian: Tensor, variance: Tensor) -> Tensor:
    """η̄² of two samples of one size, from a dense Jacobian."""
    precision = torch.where(variance > 0, 1 / variance, 0.0)
    return torch.stack(
        [(rows.square() * precision).sum() / len(rows) for rows in jacobian.chunk(2)]
    )


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("settings", [{}, {"shape": "past"}, {"granularity": "layer"}])
def test_dfil_of_a_message_on_average_over_draws(settings: dict[str, Any]) -> None:
    """200 draws of three probes, by differences, against the dense Jacobian."""
    gmap, jacobian = GradientMap(*small_convolution()), dense_convolution()
    noise = noise_of(make_defense("optimal_noise", scale=0.25, **settings), gmap)
    assert noise.shape_trace == 0
    exact = by_sample(jacobian, flat(noise.variance))
    found = [message_dfil(gmap, noise, generator=rng(seed)) for seed in range(200)]
    values = torch.stack([one.samples.value for one in found])
    error = values.std(0) / math.sqrt(len(found))
    assert ((values.mean(0) - exact).abs() < 4 * error).all()
    # Images of one size.
    assert found[0].mean == pytest.approx(float(found[0].samples.value.mean()))


@pytest.mark.parametrize("granularity", ["parameter", "layer"])
def test_the_shapes_own_information_is_added(granularity: str) -> None:
    """To every sample in full, for all of it could be one sample's; to the whole message once."""
    gmap = GradientMap(*small_convolution())
    noise = noise_of(
        make_defense("optimal_noise", scale=0.25, granularity=granularity, shape="own"), gmap
    )
    assert noise.shape_trace > 0
    plain = message_dfil(gmap, noise._replace(shape_trace=0.0), 5, rng())
    found = message_dfil(gmap, noise, 5, rng())
    size = gmap.input[0].numel()
    torch.testing.assert_close(
        found.samples.value, plain.samples.value + noise.shape_trace / size, rtol=1e-6, atol=0
    )
    assert found.mean == pytest.approx(plain.mean + noise.shape_trace / (2 * size))


def test_probes_give_every_samples_own() -> None:
    gmap, jacobian = GradientMap(*small_convolution()), dense_convolution()
    noise = noise_of(make_defense("optimal_noise", scale=0.25), gmap)
    precise = message_dfil(gmap, noise, 400, rng())
    exact = by_sample(jacobian, flat(noise.variance))
    assert ((precise.samples.value - exact).abs() < 4 * precise.samples.standard_error).all()
    assert precise.mean == pytest.approx(float(precise.samples.value.mean()))  # images of one size
    # By differences two probes do; bare coordinates take ten exact ones.
    assert torch.equal(
        message_dfil(gmap, noise, None, rng()).samples.value,
        dfil(by_differences(gmap), noise.variance, 2, rng()).value,
    )
    bare = noise_of(make_defense("optimal_noise", scale=0.25, shape="own"), gmap)
    assert not bare.variance["unused"].any()
    assert torch.equal(
        message_dfil(gmap, bare._replace(shape_trace=0.0), None, rng()).samples.value,
        dfil(gmap, bare.variance, 10, rng()).value,
    )


def test_coordinates_without_noise_are_infinite_leakage() -> None:
    """Averages of a shorter batch do not leave a position of a longer one without noise; if they
    did, it would show.
    """
    model, _ = make_task("bert")
    short, long = (
        GradientMap(
            model,
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])},
        )
        for ids in (torch.tensor([[3, 4]]), torch.tensor([[3, 4, 5]]))
    )
    defense = make_defense("optimal_noise", shape="past", refresh_every=2)
    assert math.isfinite(message_dfil(short, noise_of(defense, short)).mean)
    noise = noise_of(defense, long)
    assert math.isfinite(message_dfil(long, noise).mean)
    position = next(name for name in noise.variance if "position_embeddings" in name)
    bare = noise.variance | {
        position: noise.variance[position].index_fill(0, torch.tensor([2]), 0.0)
    }
    found = message_dfil(long, noise._replace(variance=bare))
    assert found.mean == math.inf
    assert found.samples.value.tolist() == [math.inf]
    assert found.samples.standard_error.tolist() == [0]


# What is logged


def logged(trainer: GradGuardTrainer) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for entry in trainer.state.log_history:
        figures = {
            name.removeprefix("leakage/"): value
            for name, value in entry.items()
            if name.startswith("leakage/")
        }
        if figures:
            assert entry["step"] not in found
            found[entry["step"]] = figures
    return found


def message(start: int, stop: int) -> GradientMap:
    return GradientMap(make_task("bert", dtype=torch.float32)[0].train(), stack(rows()[start:stop]))


def shared_delta(gmap: GradientMap, defense: Defense, *seeds: int) -> dict[str, Tensor]:
    shared = defense(gmap, Stream.from_seeds(9, 0, *seeds))
    return {name: shared[name] - g for name, g in gmap.gradient().items()}


def logged_influence(gmap: GradientMap, delta: dict[str, Tensor]) -> float:
    """The bound from products by differences: below the exact one, and not far. To 3 %: it depends
    on the batch that differences were tried out with.
    """
    quick = by_differences(gmap)
    assert quick is not None
    found = one_product_bound(quick, delta)
    assert 0.9 * (full := one_product_bound(gmap, delta)) <= found <= full
    assert found >= inversion_influence_lower_bound(gmap, delta)
    return found


@pytest.mark.long
@pytest.mark.statistics
def test_logged_figures_equal_those_computed_outside(make_trainer: MakeTrainer) -> None:
    """Two steps of two micro-batches of two clients with 2 samples each, of which the second step
    is logged.
    """
    trainer = make_trainer(
        "bert", make_defense("gaussian_noise", scale=0.05), leakage_logging_steps=2,
        leakage_num_probes=40, max_steps=3, gradient_accumulation_steps=2, clients_per_process=2,
        logging_steps=3, **STILL,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer).keys() == {2}
    figures = logged(trainer)[2]

    values, influences = [], []
    for number in range(4):
        gmap = message(8 + 2 * number, 10 + 2 * number)
        estimate = dfil(by_differences(gmap), 0.05**2, 40, Stream.from_seeds(9, 0, 1, number, 1))
        exact = float(fisher_trace(gmap, 0.05**2)) / gmap.input.numel()
        error = float(estimate.standard_error.norm()) / 2
        assert abs(float(estimate.value.mean()) - exact) < 5 * error
        values.append(estimate.value)
        delta = shared_delta(gmap, make_defense("gaussian_noise", scale=0.05), 1, number)
        influences.append(logged_influence(gmap, delta))
    worst = float(torch.cat(values).max())
    # Differences in float32. Another probe, or another sample's, would be off by a tenth and more.
    mean = float(torch.cat(values).mean())
    assert figures["dfil_mean"] == pytest.approx(mean, rel=5e-3)
    assert figures["dfil_max"] == pytest.approx(worst, rel=5e-3)
    assert figures["mse_bound"] == pytest.approx(1 / figures["dfil_max"])
    assert figures["i2f_lower_bound"] == pytest.approx(sum(influences) / 4, rel=0.03)


def test_figures_stand_beside_the_loss_where_both_are_due(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense="optimal_noise", leakage_logging_steps=2, logging_steps=3, max_steps=6,
    )  # fmt: skip
    trainer.train()
    figures = {
        "leakage/dfil_mean",
        "leakage/dfil_max",
        "leakage/mse_bound",
        "leakage/mse_bound_with_prior",
        "leakage/label_information",
        "leakage/i2f_lower_bound",
    }
    entries = trainer.state.log_history[:-1]
    assert [(entry["step"], "loss" in entry, figures <= entry.keys()) for entry in entries] == [
        (2, False, True), (3, True, False), (4, False, True), (6, True, True),
    ]  # fmt: skip
    assert all(math.isfinite(entry[name]) for entry in entries for name in figures & entry.keys())
    assert not any("leakage/skipped" in entry for entry in entries)


def test_dfil_of_optimal_noise_takes_no_second_derivative(
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = []
    for name in ("vjp", "jvps"):
        own = getattr(GradientMap, name)
        monkeypatch.setattr(
            GradientMap,
            name,
            lambda self, *a, own=own, name=name, **k: (passes.append(name), own(self, *a, **k))[1],
        )
    trainer = make_trainer(defense="optimal_noise", max_steps=2, leakage_limit=1e-30)
    trainer.train()
    assert passes == []
    assert logged(trainer)[2]["skipped"] == 0


def test_measuring_changes_nothing(make_trainer: MakeTrainer) -> None:
    trained = []
    for more in ({}, {"leakage_logging_steps": 1, "leakage_num_probes": 3, "leakage_limit": 1e-30}):
        trainer = make_trainer(defense="optimal_noise", dropout=0.1, noise_seed=4, **more)
        trainer.train()
        trained.append(weights(trainer.model))
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.parametrize("name", ["none", "pruning", "laplace_noise"])
def test_defense_without_dfil_logs_what_there_is_and_says_so(
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    trainer = make_trainer(defense=name, leakage_logging_steps=1, **STILL)
    trainer.train()
    assert [set(figures) for figures in logged(trainer).values()] == [{"i2f_lower_bound"}] * 3
    assert caplog.text.count("only leakage/i2f_lower_bound is logged") == 1
    gmap = message(0, 4)
    delta = shared_delta(gmap, make_defense(name), 0, 0)
    expected = logged_influence(gmap, delta)
    assert logged(trainer)[1]["i2f_lower_bound"] == pytest.approx(float(expected), rel=0.03)
    assert (float(expected) == 0) == (name == "none")


def test_no_noise_is_logged_as_infinite_leakage(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense=make_defense("gaussian_noise", scale=0), leakage_logging_steps=1, max_steps=1
    )
    trainer.train()
    nothing = {
        "dfil_mean": math.inf,
        "dfil_max": math.inf,
        "mse_bound": 0.0,
        "i2f_lower_bound": 0.0,
        "mse_bound_with_prior": 0.0,
        "label_information": math.inf,
    }
    assert logged(trainer)[1] == nothing


@dataclass
class Silent(GaussianNoise):
    """Does not say what it added."""

    def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
        return gmap.gradient()


def test_defense_that_does_not_say_what_it_added(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(defense=Silent(), leakage_logging_steps=1)
    trainer.train()
    assert set(logged(trainer)[1]) == {"i2f_lower_bound"}
    trainer = make_trainer(defense=Silent(), leakage_limit=1e-30)
    with pytest.raises(ValueError, match=r"did not say what noise it added, so nothing was shared"):
        trainer.train()


# The limit


@pytest.mark.long
def test_message_below_the_limit_counts_as_zeros(make_trainer: MakeTrainer) -> None:
    """Of three clients with 2, 1 and 1 samples the one that leaks most shares nothing; the others
    weigh what they did.
    """
    parts = [(0, 2), (2, 3), (3, 4)]
    maps = [message(*part) for part in parts]
    probes = [Stream.from_seeds(9, 0, 0, number, 1) for number in range(3)]
    bounds = [
        1 / float(dfil(by_differences(gmap), 0.05**2, 30, probe).value.max())
        for gmap, probe in zip(maps, probes, strict=True)
    ]
    least, second = sorted(bounds)[:2]
    gradients, accountant = Gradients(), FisherAccountant()
    trainer = make_trainer(
        "bert", make_defense("gaussian_noise", scale=0.05),
        options={"callbacks": [gradients], "accountant": accountant}, max_steps=1,
        clients_per_process=3, leakage_limit=(least + second) / 2, leakage_num_probes=30,
        max_grad_norm=0.0, **STILL,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer)[1] == {"skipped": 1}

    expected = {name: torch.zeros_like(g) for name, g in maps[0].gradient().items()}
    kept = [number for number in range(3) if bounds[number] != least]
    for number in kept:
        generator = Stream.from_seeds(9, 0, 0, number)
        for name, tensor in make_defense("gaussian_noise", scale=0.05)(
            maps[number], generator
        ).items():
            expected[name] += tensor * len(maps[number].input) / 4
    found = {name: gradients.steps[0][name] for name in expected}
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-6
    )  # float32 sums in another order
    assert set(accountant) == {row for number in kept for row in range(*parts[number])}


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_limit_that_nothing_keeps(make_trainer: MakeTrainer, action: str) -> None:
    trainer = make_trainer(
        defense="gaussian_noise", leakage_limit=1e30, leakage_action=action, optim="sgd",
        max_steps=4, logging_steps=2, learning_rate=0.1,
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.state.global_step == (4 if action == "skip" else 1)
    if action == "skip":
        assert [figures["skipped"] for figures in logged(trainer).values()] == [2, 2]


def test_a_stop_is_of_one_training(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense="gaussian_noise", leakage_limit=1e30, leakage_action="stop", max_steps=3
    )
    trainer.train()
    assert trainer.state.global_step == 1
    trainer._meter._limit = 0.0  # no message is below it
    trainer.train()
    assert trainer.state.global_step == 3


# Accounts


@pytest.mark.long
def test_accounts_add_up_what_was_computed_outside(make_trainer: MakeTrainer) -> None:
    """22 samples in batches of 4, 6 steps an epoch: the eighth step shares the first samples of the
    second epoch again.
    """
    accountant = FisherAccountant()
    trainer = make_trainer(
        defense=make_defense("gaussian_noise", scale=0.05),
        options={"accountant": accountant},
        max_steps=8,
        **STILL,
    )
    trainer.train()
    assert trainer.accountant is accountant
    totals: dict[int | str, float] = {}
    for step in range(8):
        start = 4 * (step % 6)
        gmap = message(start, min(start + 4, 22))
        values = dfil(by_differences(gmap), 0.05**2, 2, Stream.from_seeds(9, 0, step, 0, 1)).value
        for row, value in zip(range(start, 22), values.tolist(), strict=False):
            totals[row] = totals.get(row, 0.0) + value
    assert (accountant.steps, len(accountant)) == (8, len(totals))
    # How far differences reach depends on the batch that they were tried out with: another one here
    # than there. Another probe, or another sample's, would be off by a tenth and more.
    assert {key: accountant.dfil(key) for key in accountant} == pytest.approx(totals, rel=5e-3)
    assert accountant.mse_bound(accountant.worst()[0]) == mse_bound_from_dfil(
        max(map(accountant.dfil, accountant))
    )


class StopsAtSave(TrainerCallback):
    """What leaves after a checkpoint counts, too."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


@pytest.mark.long
@pytest.mark.parametrize("skip_data", [False, True])
def test_accounts_survive_in_checkpoints(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    skip_data: bool,
) -> None:
    def run(
        folder: str, checkpoint: str | None = None, callbacks: Any = (), **more: Any
    ) -> FisherAccountant:
        accountant = FisherAccountant()
        make_trainer(
            defense=make_defense("optimal_noise", shape="past", refresh_every=3),
            options={"accountant": accountant, "callbacks": list(callbacks)}, noise_seed=5,
            output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=4, max_steps=8,
            clients_per_process=2, **more,
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip
        return accountant

    alone = run("alone")
    run("stopped", callbacks=[StopsAtSave])
    checkpoint = str(tmp_path / "stopped" / "checkpoint-4")
    resumed = run("resumed", checkpoint, ignore_data_skip=skip_data)
    assert (alone.steps, resumed.steps) == (16, 16)
    if not skip_data:
        one, other = alone.state_dict(), resumed.state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_without_accounts(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for accountant in (None, FisherAccountant()):
        folder = str(tmp_path / f"{accountant is None}")
        make_trainer(
            defense="gaussian_noise", options={"accountant": accountant}, output_dir=folder,
            save_strategy="steps", save_steps=2,
        ).train()  # fmt: skip
    resuming = make_trainer(
        defense="gaussian_noise", options={"accountant": FisherAccountant()}, max_steps=4
    )
    with pytest.raises(ValueError, match="holds no accountant's state of this rank"):
        resuming.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-2"))
    make_trainer(defense="gaussian_noise", max_steps=4).train(
        resume_from_checkpoint=str(tmp_path / "False" / "checkpoint-2")
    )
    assert "holds an accountant's state, which this run leaves behind" in caplog.text


# Refusals


@pytest.mark.parametrize(
    "name", ["none", "laplace_noise", "pruning", "optimal_pruning", "quantization"]
)
def test_limit_and_account_need_gaussian_noise(make_trainer: MakeTrainer, name: str) -> None:
    with refuses("leakage-of-unknown-noise"):
        make_trainer(defense=name, leakage_limit=0.1)
    with refuses("leakage-of-unknown-noise"):
        make_trainer(defense=name, options={"accountant": FisherAccountant()})


class Fresh(GradGuardTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return super().get_train_dataloader()


def test_subsampling_needs_fresh_batches_and_a_bounded_message(settings: Any) -> None:
    def make(kind: type[GradGuardTrainer], multiplier: float, defense: Defense) -> GradGuardTrainer:
        return kind(
            make_task("bert", dtype=torch.float32)[0], GradGuardConfig(**settings()),
            defense=defense, train_dataset=rows(),
            accountant=FisherAccountant(0.1, multiplier, 1e-5),
        )  # fmt: skip

    clipped = make_defense("dp_sgd", clip=0.3, scale=0.6)
    with refuses("account-of-shuffled-epochs"):
        make(GradGuardTrainer, 2.0, clipped)
    for weak in (
        make_defense("dp_sgd", clip=0.3, scale=0.5),
        make_defense("dp_sgd", clip=0.3, relative_scale=9.0),
        make_defense("gaussian_noise", scale=9),
        make_defense("dp_sgd", clip=0.3, scale=9, clip_by="coordinate"),
    ):  # fmt: skip
        with refuses("account-of-little-noise"):
            make(Fresh, 2.0, weak)
    trainer = make(Fresh, 2.0, clipped)
    trainer.train()
    assert trainer.accountant is not None
    assert trainer.accountant.failure_probability == pytest.approx(3e-5)
