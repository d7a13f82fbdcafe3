"""A Trainer with correlated noise: which rows are in which message, what is accounted, what is
refused, and how it goes on after a kill.
"""

from __future__ import annotations

import collections
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from branching import Stop
from helpers import make_task
from transformers import TrainerState

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses.correlated import CorrelatedNoise, make_factor
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.leakage import balls_in_bins_epsilon, balls_in_bins_power, gaussian_epsilon
from hf_gradguard.randomness import Stream
from hf_gradguard.training.clients.batches import DUMMY
from hf_gradguard.training.message import Client
from hf_gradguard.training.privacy import secret_positions
from hf_gradguard.training.privacy.correlated_rows import CorrelatedRows
from hf_gradguard.training.privacy.private_rows import rounding_of_rows

ROWS, SIZE = 26, 4
PASS = ROWS // SIZE


def private(**settings: Any) -> DPSGD:
    whole = {"noise_multiplier": 1.5, "correlated": True, "delta": 1e-5}
    defense = make_defense("dp_sgd", per_sample=True, **{**whole, **settings})
    assert isinstance(defense, DPSGD)
    return defense


class Recording(GradGuardTrainer):
    """Keeps which rows are in each message, and what is shared of them."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = self.private_rows
        assert isinstance(rows, CorrelatedRows)
        if not hasattr(self, "taken"):
            self.taken: list[tuple[int, list[int]]] = []
            count = rows.count

            def counted(batches: Any) -> Any:
                assert rows._transcript is not None
                for batch in batches:
                    self.taken.append((rows._transcript.position, batch.rows.tolist()))
                return count(batches)

            rows.count = counted  # type: ignore[method-assign]
        return super().training_step(*args, **kwargs)


def trainer(folder: Path, defense: DPSGD | None = None, **settings: Any) -> Recording:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=ROWS)
    rows = [{name: entry[row] for name, entry in batch.items()} for row in range(ROWS)]
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        max_grad_norm=0.0, learning_rate=0.1,
        **{"max_steps": PASS, "per_device_train_batch_size": SIZE, "save_strategy": "no",
           "optim": "sgd", **settings},
    )  # fmt: skip
    return Recording(model=model, args=args, defense=defense or private(), train_dataset=rows)


def times(taken: list[tuple[int, list[int]]]) -> collections.Counter[int]:
    return collections.Counter(row for _, rows in taken for row in rows)


def test_each_row_is_in_one_message(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.train()
    assert [position for position, _ in trained.taken] == list(range(PASS))
    assert all(len(rows) == SIZE for _, rows in trained.taken)
    assert set(times(trained.taken).values()) == {1}
    other = trainer(tmp_path / "other")
    other.train()
    assert other.taken != trained.taken  # the order is private, and another in each run


def test_each_row_draws_its_own_message(tmp_path: Path) -> None:
    """Some messages of six have no row then, and share noise alone."""
    sizes, drawn = [], collections.Counter[int]()
    for number in range(6):
        trained = trainer(tmp_path / str(number), private(sampling="balls_in_bins"))
        trained.train()
        assert [position for position, _ in trained.taken] == list(range(PASS))
        rows = times([(place, batch) for place, batch in trained.taken if batch != [DUMMY]])
        assert rows == dict.fromkeys(range(ROWS), 1)  # all of them, no message left out
        sizes += [0 if batch == [DUMMY] else len(batch) for _, batch in trained.taken]
        drawn.update(place for place, batch in trained.taken for row in batch if row == 0)
    assert len(set(sizes)) > 3
    assert len(drawn) > 1  # row 0 is elsewhere each time


def test_an_empty_message_is_noise_of_the_same_stream(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path, private(sampling="balls_in_bins"), per_device_train_batch_size=1, max_steps=26,
        lr_scheduler_type="constant",
    )  # fmt: skip
    shared = []
    step = GradGuardTrainer.training_step

    def kept(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(self, *args, **kwargs)
        shared.append(torch.cat([p.grad.flatten() for p in self.model.parameters()
                                 if p.grad is not None]))  # fmt: skip
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradGuardTrainer, "training_step", kept)
        trained.train()
    empty = [place for place, batch in trained.taken if batch == [DUMMY]]
    assert empty  # with 26 rows in 26 places a third is empty
    assert noise_of(trained).position == 26  # those of no row included
    assert all(float(shared[place].norm()) > 0 for place in empty)


def test_places_of_rows_are_uniform(tmp_path: Path) -> None:
    trained = trainer(tmp_path, private(sampling="balls_in_bins"))
    rows = trained.private_rows
    assert isinstance(rows, CorrelatedRows)
    counts = torch.zeros(PASS)
    for _ in range(200):
        rows._transcript, rows._orders = rows._new_plan(PASS), {}
        order = rows._order(0)
        assert sorted(row for message in order for row in message) == list(range(ROWS))
        counts += torch.tensor([len(message) for message in order])
    deviation = (200 * ROWS / PASS * (1 - 1 / PASS)) ** 0.5
    assert float((counts - 200 * ROWS / PASS).abs().max()) < 4 * deviation


def test_passes_keep_drawn_places(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path, private(sampling="balls_in_bins", participations=2), max_steps=2 * PASS
    )
    trained.train()
    for place, batch in trained.taken[PASS:]:
        assert sorted(batch) == sorted(trained.taken[place - PASS][1])


def test_the_second_epsilon_is_of_secret_places(tmp_path: Path) -> None:
    trained = trainer(tmp_path, private(sampling="balls_in_bins", participations=2),
                      max_steps=2 * PASS)  # fmt: skip
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["defense/epsilon"] == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=2e-3)
    factor = make_factor("blt", 2 * PASS, 2, PASS, falling_rate=True)
    column = factor.column(2 * PASS)
    expected = balls_in_bins_epsilon(column, 1.5, PASS, 1e-5)
    assert logged["defense/epsilon_secret_positions"] == pytest.approx(expected)
    assert expected < 0.9 * logged["defense/epsilon"]
    trained.create_model_card()
    card = " ".join((tmp_path / "README.md").read_text().split())
    power = balls_in_bins_power(column, 1.5, PASS)
    assert f"ε = {expected:.4g} at δ = 1e-05, and at most {power:.2%} of the members" in card
    assert "an attacker that asks about a single message knows where to look" in card
    assert "nothing is gained by sampling" not in card
    # of one training: it stands beside no ε of two
    trained.train()
    assert "defense/epsilon_secret_positions" not in trained.state.log_history[-1]
    assert trained.state.log_history[-1]["defense/epsilon"] > logged["defense/epsilon"]


def test_a_resumed_run_keeps_its_sampling(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    first = trainer(tmp_path, private(sampling="balls_in_bins"), **settings)
    first.add_callback(Stop(3))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    other = trainer(tmp_path, private(), **settings)
    with pytest.raises(ValueError, match="sampling: 'shuffle' now"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    second = trainer(tmp_path, private(sampling="balls_in_bins"), **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    taken = {place: batch for run in (first, second) for place, batch in run.taken}
    assert sorted(taken) == list(range(PASS))
    rows = times([(place, batch) for place, batch in taken.items() if batch != [DUMMY]])
    assert rows == dict.fromkeys(range(ROWS), 1)


@pytest.mark.parametrize("sampling", ["shuffle", "balls_in_bins"])
@pytest.mark.parametrize(
    ("settings", "arguments"),
    [({"participations": 3, "min_separation": 1}, {}), ({}, {"per_device_train_batch_size": 3})],
)
def test_a_resumed_run_keeps_what_its_noise_was_planned_for(
    tmp_path: Path, sampling: str, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    kept: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    first = trainer(tmp_path, private(sampling=sampling), **kept)
    first.add_callback(Stop(3))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    other = trainer(tmp_path, private(sampling=sampling, **settings), **kept, **arguments)
    with pytest.raises(ValueError, match="in the run to resume"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_places_that_are_not_shared_hide_nobody(tmp_path: Path) -> None:
    """Of 26 places three are shared: who is in one of these is as well hidden as among three."""
    run = trainer(
        tmp_path, private(sampling="balls_in_bins"), per_device_train_batch_size=1, max_steps=3
    )
    run.train()
    assert isinstance(run.private_rows, CorrelatedRows)
    figures = run.private_rows.secret_positions()
    assert figures is not None
    column = make_factor("blt", 3, falling_rate=True).column(3)
    assert figures.epsilon == pytest.approx(balls_in_bins_epsilon(column, 1.5, 3, 1e-5))


def test_a_second_training_announces_its_own_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, private(sampling="balls_in_bins"), max_steps=3)
    run.train()
    run.args.max_steps = PASS
    caplog.clear()
    run.train()
    column = make_factor("blt", PASS, falling_rate=True).column(PASS)
    expected = balls_in_bins_epsilon(column, 1.5, PASS, 1e-5)
    assert f"ε = {expected:.4g} at δ = 1e-05, and at most" in caplog.text


def test_an_epsilon_that_protects_nobody_is_called_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, private(noise_multiplier=0.05), max_steps=2).train()
    assert "(no protection to speak of: an ε above 10" in caplog.text


@pytest.mark.parametrize("arguments", [{"noise_seed": 1}, {"max_steps": 1}])
def test_places_that_anybody_knows_are_no_secret(tmp_path: Path, arguments: dict[str, Any]) -> None:
    run = trainer(tmp_path, private(sampling="balls_in_bins"), **arguments)
    run.train()
    assert isinstance(run.private_rows, CorrelatedRows)
    assert run.private_rows.secret_positions() is None
    assert "nothing is gained by sampling" in run.private_rows.describe_sampling()
    assert "defense/epsilon_secret_positions" not in run.state.log_history[0]


def test_a_delta_too_small_for_draws_has_the_known_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_coarse(*args: Any, **kwargs: Any) -> float:
        raise ArithmeticError("draws=1 are too few")

    monkeypatch.setattr(secret_positions, "balls_in_bins_epsilon", too_coarse)
    secret_positions.positions_unknown.cache_clear()
    run = trainer(tmp_path, private(sampling="balls_in_bins"))
    run.train()
    logged = run.state.log_history[0]
    assert logged["defense/epsilon_secret_positions"] == logged["defense/epsilon"]
    secret_positions.positions_unknown.cache_clear()


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_noise_is_planned_for_the_schedule(tmp_path: Path, schedule: str) -> None:
    run = trainer(tmp_path, lr_scheduler_type=schedule)
    run.train()
    planned = make_factor("blt", PASS, falling_rate=schedule == "linear")
    assert noise_of(run).factor == planned


def test_passes_keep_their_order(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path, private(participations=5), max_steps=5, gradient_accumulation_steps=3,
        clients_per_process=2, per_device_train_batch_size=8, noise_seed=1,
    )  # fmt: skip
    rows = trained.private_rows
    assert isinstance(rows, CorrelatedRows)
    assert rows._rounds == 3  # 13 rows of a client hold three messages of four
    trained.train()
    by_client = [trained.taken[client::2] for client in range(2)]
    for taken in by_client:
        assert [place for place, _ in taken] == list(range(15))
        for place, batch in taken[3:]:
            assert sorted(batch) == sorted(taken[place - 3][1])
    assert not times(by_client[0]).keys() & times(by_client[1]).keys()


def test_the_account_is_one_gaussian_mechanism(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.train()
    epsilons = {row["defense/epsilon"] for row in trained.state.log_history if "loss" in row}
    assert len(epsilons) == 1  # of all messages together, from the first on
    expected = gaussian_epsilon(1.5, 1e-5)
    assert epsilons.pop() == pytest.approx(expected, rel=2e-3)
    ours = {name for row in trained.state.log_history for name in row if "defense" in name}
    assert ours == {"defense/epsilon"}
    trained.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "correlated noise" in card
    assert "Poisson" not in card
    # a second training is a second mechanism, under other noise and in another order
    first = list(trained.taken)
    trained.train()
    assert trained.private_rows is not None
    assert trained.private_rows.epsilon == pytest.approx(
        gaussian_epsilon(1.5 / 2**0.5, 1e-5), rel=2e-3
    )
    assert trained.taken[PASS:] != first


def test_target_epsilon_is_of_the_transcript(tmp_path: Path) -> None:
    trained = trainer(tmp_path, private(noise_multiplier=None, target_epsilon=2.0))
    trained.train()
    assert trained.private_rows is not None
    assert trained.private_rows.epsilon == pytest.approx(2.0, rel=5e-3)


@pytest.mark.parametrize("seed", [7, None])
def test_a_killed_run_shares_no_message_twice(seed: int | None, tmp_path: Path) -> None:
    """Messages 2 and 3 left after the checkpoint, so it goes on with message 4: rows of those
    between are in no further one, and the noise goes on where it was.
    """
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    killed = trainer(tmp_path / "killed", **settings, noise_seed=seed)
    killed.add_callback(Stop(4))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    shutil.rmtree(tmp_path / "killed/checkpoint-4", ignore_errors=True)  # it never got that far
    resumed = trainer(tmp_path / "killed", **settings, noise_seed=seed)
    resumed.train(resume_from_checkpoint=True)
    assert [position for position, _ in killed.taken] == [0, 1, 2, 3]
    assert [position for position, _ in resumed.taken] == [4, 5]
    assert resumed.state.global_step == 4  # two steps early
    assert set(times(killed.taken + resumed.taken).values()) == {1}
    account = resumed.private_rows.account  # type: ignore[union-attr]
    assert account.epsilon(1e-5) == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=2e-3)
    # what follows cancels the noise of all messages, also of those that were forgotten
    lines = (tmp_path / "killed/gradguard_account_rank0.jsonl").read_text().splitlines()
    records = [json.loads(line.rpartition("\t")[0]) for line in lines]
    whole, found = CorrelatedNoise(make_factor("blt", 6, falling_rate=True), 6), noise_of(resumed)
    for record in records:
        key = hashlib.sha256(bytes.fromhex(record["key"]) + bytes(8)).digest()
        _, whole = whole.draw(found.memory.shape[1], "cpu", Stream(key))
    torch.testing.assert_close(found.memory, whole.memory)
    if seed is None:
        return
    # as a run that was left alone has them
    alone = trainer(tmp_path / "alone", **settings, noise_seed=seed)
    alone.train()
    assert [sorted(rows) for _, rows in killed.taken + resumed.taken] == [
        sorted(rows) for _, rows in alone.taken
    ]
    torch.testing.assert_close(found.memory, noise_of(alone).memory)


def noise_of(run: Any) -> Any:
    return run._clients[0].state["noise"]


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "noise_seed": 5}
    alone = trainer(tmp_path / "alone", **settings)
    alone.train()
    again = trainer(tmp_path / "again", **settings)
    shutil.copytree(tmp_path / "alone/checkpoint-3", tmp_path / "again/checkpoint-3")
    lines = (tmp_path / "alone/gradguard_account_rank0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "again/gradguard_account_rank0.jsonl").write_text("".join(lines[:3]))
    again.train(resume_from_checkpoint=str(tmp_path / "again/checkpoint-3"))
    for name, parameter in alone.model.state_dict().items():
        assert torch.equal(parameter, again.model.state_dict()[name]), name


def test_what_is_private_stays_in_the_private_files(tmp_path: Path) -> None:
    """The rows' order and the noise to come are in no other file."""
    trained = trainer(tmp_path, save_strategy="steps", save_steps=2)
    trained.train()
    rows = trained.private_rows
    assert isinstance(rows, CorrelatedRows)
    secret = rows.saved_transcript()["order_key"]  # type: ignore[index]
    for path in tmp_path.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            assert path.name.startswith("gradguard_private")
    account = (tmp_path / "gradguard_account_rank0.jsonl").read_text().splitlines()
    records = [json.loads(line.rpartition("\t")[0]) for line in account]
    assert [record["position"] for record in records] == list(range(PASS))
    assert [record["messages"] for record in records] == [1] + [0] * (PASS - 1)


@pytest.mark.parametrize(
    ("settings", "defense", "error", "name"),
    [
        ({"max_steps": PASS + 1}, {}, ValueError, "participations=1"),
        ({"optim": "adamw_torch"}, {}, NotImplementedError, "AdamW"),
        ({"max_steps": 2 * PASS}, {"participations": 2, "min_separation": 7}, ValueError,
         "min_separation"),
    ],
)  # fmt: skip
def test_what_would_break_the_promise_is_refused(
    settings: Any, defense: Any, error: type[Exception], name: str, tmp_path: Path
) -> None:
    trained = trainer(tmp_path, private(**defense), **settings)
    with pytest.raises(error, match=name):
        trained.train()
    assert not hasattr(trained, "taken")


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"ignore_data_skip": True}, NotImplementedError, "ignore_data_skip"),
        ({"per_device_train_batch_size": 5, "clients_per_process": 2}, ValueError,
         "per_device_train_batch_size"),
        ({"per_device_train_batch_size": 27}, ValueError, "per_device_train_batch_size"),
    ],
)  # fmt: skip
def test_arguments_are_checked(
    settings: Any, error: type[Exception], name: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=name):
        trainer(tmp_path, **settings)


@pytest.mark.parametrize(("noise_for", "each"), [("message", 3.0), ("sum", 3.0 / 6**0.5)])
def test_noise_for_a_sum_is_shared_among_clients(
    noise_for: str, each: float, tmp_path: Path
) -> None:
    """Nine clients on three ranks: of a sum, what is not a rank's own has the multiplier."""
    defense = private(noise_multiplier=3.0)
    clients = [Client(defense) for _ in range(3)]
    args = GradGuardConfig(
        str(tmp_path), secure_aggregation=True, secure_aggregation_range=1.0, use_cpu=True,
        noise_for=noise_for, clients_per_process=3, per_device_train_batch_size=3, optim="sgd",
        max_grad_norm=0.0,
    )  # fmt: skip
    rows = CorrelatedRows(defense, args, rows=90, rank=0, ranks=3, clients=lambda: clients)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainerState(max_steps=8)
    rows.on_train_begin(args, state, model=model, optimizer=optimizer)
    # 2^-30 or so of a step is what ranks round
    multipliers = {client.defense.noise_multiplier for client in clients}
    assert multipliers.pop() == pytest.approx(each * (1 + rounding_of_rows(1)), rel=1e-4)
    assert not multipliers
    assert rows.noise_multiplier == 3.0


def test_batches_that_are_clipped_as_a_whole(tmp_path: Path) -> None:
    """Their rows are placed alike, and ε is of scale/(2C), whatever a batch is replaced by."""
    settings = {"correlated": True, "scale": 0.9, "clip": 0.3, "delta": 1e-5}
    trained = trainer(tmp_path, make_defense("dp_sgd", **settings))
    trained.train()
    assert set(times(trained.taken).values()) == {1}
    assert trained.private_rows is not None
    expected = gaussian_epsilon(1.5, 1e-5)
    assert trained.private_rows.epsilon == pytest.approx(expected, rel=2e-3)
    logged = [row["defense/epsilon"] for row in trained.state.log_history if "loss" in row]
    assert logged == [pytest.approx(expected, rel=2e-3)] * PASS
    trained.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "Each message as a whole" in card
    assert "client-level noise" not in card
    with pytest.raises(ValueError, match="participations"):
        trainer(tmp_path, make_defense("dp_sgd", **settings), max_steps=PASS + 1).train()


def test_other_rows_are_refused(tmp_path: Path) -> None:
    """A loader that draws in another way would break the promise: nothing is shared."""
    trained = trainer(tmp_path)
    rows = trained.private_rows
    assert isinstance(rows, CorrelatedRows)
    batch_at = rows._batch_at
    rows._batch_at = lambda place: batch_at(place + 1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rows"):
        trained.train()


@pytest.mark.parametrize(("excess", "is_refused"), [(0.0, False), (5e-4, False), (2e-3, True)])
def test_a_branch_may_exceed_its_target_by_rounding_alone(
    excess: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is found to a thousandth, and so is ε: more than that is spent, and not rounded."""
    rows = object.__new__(CorrelatedRows)
    rows.defense = private(noise_multiplier=None, target_epsilon=3.0)
    monkeypatch.setattr(rows, "_epsilon_with", lambda *_: 3.0 * (1 + excess), raising=False)
    plan = SimpleNamespace(noise_multiplier=1.0)
    if is_refused:
        with pytest.raises(ValueError, match="would be exceeded"):
            rows._branch_off(plan, 2)
    else:
        rows._branch_off(plan, 2)
