"""A Trainer with per-sample clipping: which rows it draws, what it shares of them, and what it says
of ε.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task, refuses
from scipy.stats import poisson
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses import Defense, chain
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.gradient_map.layers import ROW_ROUNDING
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap
from hf_gradguard.leakage import FisherAccountant, PrivacyAccount, dp_sgd_epsilon
from hf_gradguard.training.clients.batches import DUMMY, PoissonSampler
from hf_gradguard.training.message import Client, ClientBatch
from hf_gradguard.training.privacy import private_rows
from hf_gradguard.training.privacy.coupling import CouplingCheck
from hf_gradguard.training.privacy.private_rows import PrivateRows, rounding_of_rows

ROWS = 24


def data(task: str = "bert", count: int = ROWS) -> list[dict[str, Any]]:
    batch = make_task(task, batch_size=count)[1]
    return [{key: value[row] for key, value in batch.items()} for row in range(count)]


def private(**settings: Any) -> Defense:
    return make_defense("dp_sgd", per_sample=True, **{"noise_multiplier": 1.0, **settings})


def trainer(folder: Path, defense: Defense, task: str = "bert", **settings: Any) -> Any:
    model = make_task(task, dtype=torch.float32)[0]
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        **{"max_steps": 2, "per_device_train_batch_size": 6, "save_strategy": "no", **settings},
    )  # fmt: skip
    return GradGuardTrainer(model=model, args=args, defense=defense, train_dataset=data(task))


class AtOnce:
    """As a data set of `datasets`, of which a batch is far quicker at once than row by row."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.fetched = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise AssertionError("rows are not to be fetched one by one")

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.fetched += 1
        return [self.rows[row] for row in rows]


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        (private(), {}),
        (make_defense("gaussian_noise", scale=0.1), {"num_clients": 4, "clients_per_process": 2}),
        (private(), {"protect_labels": "randomized_response", "label_epsilon": 50.0}),
    ],
)
def test_a_batch_is_fetched_at_once(
    defense: Defense, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CouplingCheck, "__call__", lambda *_: None)  # which reads rows again
    weights = []
    for at_once in (False, True):
        trained = trainer(tmp_path, defense, noise_seed=1, **settings)
        if at_once:
            rows = trained.train_dataset = AtOnce(trained.train_dataset)
        trained.train()
        weights.append(torch.cat([p.detach().flatten() for p in trained.model.parameters()]))
    looks = int(defense.per_sample) if isinstance(defense, DPSGD) else 0  # before the first message
    assert 2 <= rows.fetched - looks <= 3  # messages, and one that the loader has in hand
    assert torch.equal(*weights)


def test_the_log_says_nothing_of_the_rows_that_were_drawn(tmp_path: Path) -> None:
    """How many there were is secret: ε is of rows that nobody sees drawn."""
    trained = trainer(tmp_path, private(delta=1e-5))
    trained.train()
    ours = {name for row in trained.state.log_history for name in row if "defense" in name}
    assert ours == {"defense/epsilon"}


# --- rows


def sampler(**settings: Any) -> PoissonSampler:
    parts = [np.arange(client, 30, 3) for client in range(3)]
    whole = {"rates": [0.2, 0.3, 0.4], "rank": 0, "ranks": 1, "rounds": 3000, "seed": 1}
    return PoissonSampler(parts, **{**whole, **settings})


@pytest.mark.statistics
def test_every_row_is_drawn_independently() -> None:
    counts, pairs, sizes = np.zeros(30), 0, []
    for batch in sampler():
        rows = [pick.row for pick in batch if pick.row != DUMMY]
        assert len(rows) == len(set(rows))
        counts[rows] += 1
        pairs += {0, 3} <= set(rows)
        sizes.append(sum(pick.client == 0 and pick.row != DUMMY for pick in batch))
    rates = np.array([[0.2, 0.3, 0.4][row % 3] for row in range(30)])
    assert np.abs(counts / 3000 - rates).max() < 5 * np.sqrt(0.24 / 3000)
    assert pairs / 3000 == pytest.approx(0.2**2, abs=5 * math.sqrt(0.04 / 3000))
    assert np.var(sizes) == pytest.approx(10 * 0.2 * 0.8, rel=0.15)


def test_clients_draw_their_own_rows_and_an_empty_batch_is_marked() -> None:
    for batch in sampler(rates=[0.02, 0.5, 1.0], rounds=40):
        for client in range(3):
            rows = [pick.row for pick in batch if pick.client == client]
            assert rows == [DUMMY] or all(row % 3 == client for row in rows)
            assert client < 2 or len(rows) == 10
            assert all(pick.share == 1 / 3 for pick in batch)


def test_ranks_draw_what_others_cannot_foresee() -> None:
    first, second = (list(sampler(ranks=3, rank=rank, rounds=5)) for rank in (0, 1))
    assert [bool(batch) for batch in first] == [True, False, False] * 5
    assert [bool(batch) for batch in second] == [False, True, False] * 5
    assert {pick.client for batch in second for pick in batch} == {1}
    assert list(sampler(rounds=5)) == list(sampler(rounds=5))
    assert list(sampler(rounds=5)) != list(sampler(rounds=5, epoch=1))
    assert list(sampler(rounds=5, seed=None)) != list(sampler(rounds=5, seed=None))


# --- messages


@pytest.mark.parametrize("clients", [1, 2])
def test_a_step_is_the_mean_of_clipped_gradients(tmp_path: Path, clients: int) -> None:
    """Over B expected rows, and over accumulated messages, whatever was drawn."""
    t = trainer(
        tmp_path, private(clip=0.05, noise_multiplier=1e-6), max_steps=1, optim="sgd",
        learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, noise_seed=5,
        gradient_accumulation_steps=2, clients_per_process=clients, private_dropout=False,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    drawn = list(t.private_rows.sampler())[:2]
    t.train()
    names = t.shared_names
    wanted = {name: torch.zeros_like(before[name]) for name in names}
    sizes = []
    model = make_task("bert", dtype=torch.float32)[0]
    for batch in drawn:
        sizes.append(len(batch))
        for pick in batch:
            row = {k: v[None] for k, v in t.train_dataset[pick.row].items()}
            parameters = [p for n, p in model.named_parameters() if n in names]
            found = torch.autograd.grad(model(**row).loss, parameters)
            norm = torch.cat([g.flatten() for g in found]).norm()
            for name, g in zip(names, found, strict=True):
                wanted[name] += g * min(1.0, 0.05 / float(norm)) / 6 / 2
    assert sizes != [6, 6]  # the number of rows varies, what it is divided by does not
    for name, p in t.model.named_parameters():
        if name in names:
            assert torch.allclose(before[name] - p, wanted[name], atol=2e-6), name
    assert t.private_rows.account.messages == {(1e-6, 0.25): 2}


def test_tokens_of_a_row_are_its_own_mean(tmp_path: Path) -> None:
    """No counts of labels leave a rank, and a step with a language model works."""
    t = trainer(tmp_path, private(), task="gpt2_lm")
    assert not t.counts_items
    assert t._get_num_items_in_batch([{"labels": torch.ones(2, 5)}], torch.device("cpu")) is None
    t.train()
    assert t.state.global_step == 2
    t.defense = "pruning"
    t.train()
    assert t.counts_items
    assert t.private_rows is None


def test_an_empty_batch_shares_noise_and_counts(tmp_path: Path) -> None:
    t = trainer(tmp_path, private(), per_device_train_batch_size=1, max_steps=6)
    rows = t.private_rows
    t.train()
    assert rows.account.messages == {(1.0, 1 / ROWS): 6}
    batch = ClientBatch(t._clients[0], {}, 1.0, torch.tensor([DUMMY]))
    (empty,) = rows.count([batch])
    assert empty.is_empty
    (full,) = rows.count([batch._replace(rows=torch.tensor([3, 5]))])
    assert full.client is empty.client is t._clients[0]
    assert not full.is_empty


def test_training_on_empty_batches_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn: weights move by noise, losses are 0, and nothing is said of a gradient."""
    t = trainer(tmp_path, private())
    monkeypatch.setattr(t.private_rows, "_rates", [0.0])
    before = t.model.classifier.weight.detach().clone()
    t.train()
    assert not torch.equal(before, t.model.classifier.weight)
    logged = [entry for entry in t.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == [0.0, 0.0]
    assert t.state.total_flos == 0
    assert all("defense/cosine" not in entry for entry in logged)


def test_samples_are_clipped_without_the_sum_of_their_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is a third of a plain gradient, which nothing asks for after the first messages, whose
    zero rows are compared.
    """
    summed = []
    own_gradient = SampleMap._own_gradient
    monkeypatch.setattr(
        SampleMap, "_own_gradient", lambda gmap: summed.append(gmap) or own_gradient(gmap)
    )
    trainer(tmp_path, private(), max_steps=20).train()
    # A sample alone is its own sum.
    assert sum(len(gmap.batch["labels"]) > 1 for gmap in summed[8:]) == 0


class Strict(list):
    """Has no row -1."""

    def __getitem__(self, row: Any) -> Any:
        if row < 0:
            raise IndexError(row)
        return super().__getitem__(row)


def test_a_loss_that_changed_between_trainings_is_tried_anew(tmp_path: Path) -> None:
    """Classes that are weighed couple samples; a plain loss was tried before."""
    t = trainer(tmp_path, private())
    t.train()

    def weighed(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = outputs["logits"]
        weights = torch.arange(1.0, logits.shape[1] + 1)
        return torch.nn.functional.cross_entropy(logits, labels, weight=weights)

    args, rows = t.args, t.train_dataset
    again = GradGuardTrainer(
        model=t.model, args=args, defense=private(), train_dataset=rows, compute_loss_func=weighed
    )
    with pytest.raises(NotImplementedError, match="coupled"):
        again.train()


def test_an_empty_batch_reads_no_row_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path, private())
    t.train_dataset = Strict(t.train_dataset)
    t.before_training()
    monkeypatch.setattr(t.private_rows, "_rates", [0.0])
    t.train()
    assert t.state.global_step == 2


def test_rows_are_not_told_by_operations(tmp_path: Path) -> None:
    t = trainer(tmp_path, private())
    t.train()
    assert t.state.total_flos == 0
    stock = trainer(tmp_path, make_defense("gaussian_noise", scale=0.1))
    stock.train()
    assert stock.state.total_flos > 0
    with refuses("samples-with-token-counts"):
        trainer(tmp_path, private(), include_num_input_tokens_seen="all")


def test_a_batch_size_that_changed_between_trainings_counts(tmp_path: Path) -> None:
    t = trainer(tmp_path, private())
    t.train()
    t.args.per_device_train_batch_size = 12
    t.train()
    assert t.private_rows.account.messages == {(1.0, 6 / ROWS): 2, (1.0, 12 / ROWS): 2}


# --- ε


@pytest.mark.long
def test_epsilon_is_logged_and_stays_within_its_target(tmp_path: Path) -> None:
    defense = private(noise_multiplier=None, target_epsilon=1.0, delta=1e-3)
    t = trainer(tmp_path, defense, gradient_accumulation_steps=2)
    t.train()
    (((multiplier, rate), messages),) = t.private_rows.account.messages.items()
    assert (rate, messages) == (0.25, 4)
    spent = [entry["defense/epsilon"] for entry in t.state.log_history if "loss" in entry]
    assert spent == [
        pytest.approx(dp_sgd_epsilon(multiplier, 0.25, count, 1e-3)) for count in (2, 4)
    ]
    assert 0.98 < spent[-1] <= 1.0
    assert t.state.log_history[-1]["defense/epsilon"] == spent[-1]
    rounding = rounding_of_rows(6)
    assert t._clients[0].defense.noise_multiplier == pytest.approx(
        multiplier * (1 + rounding), rel=1e-12
    )
    assert t._clients[0].defense.expected_batch_size == 6
    t.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert f"ε = {spent[-1]:.4g} at δ = 0.001" in card
    assert "no differential privacy" not in card.replace("\n", " ")
    assert "Repetition:" not in card  # ε counts all messages
    with pytest.raises(ValueError, match="is spent"):  # the same data again
        t.train()


def test_without_delta_there_is_no_epsilon(tmp_path: Path) -> None:
    t = trainer(tmp_path, private())
    t.train()
    assert t.private_rows.epsilon is None
    assert not any("defense/epsilon" in entry for entry in t.state.log_history)
    t.create_model_card()
    assert "no ε was computed" in (tmp_path / "README.md").read_text()


def card(t: Any) -> str:
    t.create_model_card()
    return (Path(t.args.output_dir) / "README.md").read_text()


@pytest.mark.parametrize("other", ["none", "pruning"])
def test_the_card_says_what_epsilon_leaves_out(tmp_path: Path, other: str) -> None:
    """Messages of rows that were not clipped one by one: the model is of them, too."""
    t = trainer(tmp_path, private(delta=1e-3))
    assert "ε =" not in card(t)  # nothing was shared
    t.train()
    assert "and for this model" in card(t)
    t.defense = other
    t.train()
    assert "ε =" not in card(t)
    t.defense = private(delta=1e-3)
    t.train()
    text = card(t)
    assert f"ε = {t.private_rows.epsilon:.4g} at δ = 0.001" in text
    assert "4 messages of each client" in text
    assert "It leaves out 2 messages of other defenses, which trained this model, too." in text
    assert "and for this model" not in text
    assert "gives no differential privacy" in text.replace("\n", " ")
    assert "Repetition:" in text


def test_the_card_has_every_sampling_rate(tmp_path: Path) -> None:
    t = trainer(tmp_path, private(delta=1e-3))
    t.train()
    t.args.per_device_train_batch_size = 12
    t.train()
    assert "(rate 0.25, 0.5): 4 messages of each client, noise multiplier 1." in card(t)


def test_the_card_counts_empty_batches_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many turned out empty is secret."""
    cards = []
    for rates in ([0.0], [1.0]):
        t = trainer(tmp_path, private(delta=1e-3))
        monkeypatch.setattr(t.private_rows, "_rates", rates)
        t.train()
        assert t.shared_messages.total == 2
        cards.append(card(t).partition("## Privacy")[2])
    assert cards[0] == cards[1]


class StopsAt(TrainerCallback):
    """As if the run had been killed right after its checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


@pytest.mark.long
def test_a_resumed_run_keeps_count(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    defense = private(noise_multiplier=None, target_epsilon=1.0, delta=1e-3)
    whole = trainer(tmp_path / "whole", defense, **settings)
    whole.train()
    stopped = trainer(tmp_path / "run", defense, **settings)
    stopped.add_callback(StopsAt)
    stopped.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = trainer(tmp_path / "run", defense, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.private_rows.account.messages == whole.private_rows.account.messages
    assert resumed.private_rows.epsilon == whole.private_rows.epsilon
    (checkpoint / "gradguard_private_rank0.safetensors").unlink()
    again = trainer(tmp_path / "run", defense, **settings)
    with pytest.raises(ValueError, match="checkpoint-2"):
        again.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(("noise_for", "each"), [("message", 3.0), ("sum", 3.0 / 6**0.5)])
def test_noise_for_a_sum_is_shared_among_clients(noise_for: str, each: float) -> None:
    """Of nine messages a step a rank knows its own three: the others' six have all of the noise."""
    args = GradGuardConfig(
        "out", use_cpu=True, per_device_train_batch_size=6, clients_per_process=3,
        secure_aggregation=True, noise_for=noise_for,
    )  # fmt: skip
    defense: Any = private(noise_multiplier=3.0, delta=1e-3)
    clients = [Client(private(noise_multiplier=3.0)) for _ in range(3)]
    rows = PrivateRows(defense, args, 90, 1, 3, lambda: clients)
    state = type("State", (), {"max_steps": 5, "global_step": 0})
    rows.on_train_begin(args, state, None, model=torch.nn.Linear(1, 1))
    expected = each * (1 + rounding_of_rows(2))
    planned: list[Any] = [client.defense for client in clients]
    assert [d.noise_multiplier for d in planned] == [pytest.approx(expected)] * 3
    assert [d.expected_batch_size for d in planned] == [2.0] * 3
    assert sorted(np.concatenate(rows.rows_of_clients)) == list(range(90))
    rows.count([])
    assert rows.epsilon == pytest.approx(dp_sgd_epsilon(3.0, 0.2, 1, 1e-3))


def test_ranks_of_different_data_count_the_highest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand rows on another rank each is in a message ten times as often."""
    monkeypatch.setattr(private_rows, "gather", lambda own: torch.cat([own, 10 * own]))
    monkeypatch.setattr(private_rows, "check_agreed", lambda *_: None)
    args = GradGuardConfig("out", use_cpu=True, per_device_train_batch_size=16)
    defense: Any = private(delta=1e-5)
    rows = PrivateRows(defense, args, 20_000, 0, 2, lambda: [])
    monkeypatch.setattr(type(args), "world_size", 2)
    state = type("State", (), {"max_steps": 1, "global_step": 0})
    rows.on_train_begin(args, state, None, model=torch.nn.Linear(1, 1))
    rows.count([])
    assert rows.epsilon == pytest.approx(dp_sgd_epsilon(1.0, 10 * 16 / 10_000, 1, 1e-5))


def test_ranks_count_as_many_messages_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill may leave one rank with a message more on its disk than another."""

    def gathered(own: torch.Tensor) -> torch.Tensor:
        others = own.clone()
        if own.dim() == 2:
            others[0, 2] += 1
        return torch.cat([own, others])

    monkeypatch.setattr(private_rows, "gather", gathered)
    monkeypatch.setattr(private_rows, "check_agreed", lambda *_: None)
    args = GradGuardConfig("out", use_cpu=True, per_device_train_batch_size=5)
    account = PrivacyAccount({(2.0, 0.1): 3})
    defense: Any = private(delta=1e-5)
    rows = PrivateRows(defense, args, 100, 0, 2, lambda: [], account)
    monkeypatch.setattr(type(args), "world_size", 2)
    state = type("State", (), {"max_steps": 1, "global_step": 0})
    rows.on_train_begin(args, state, None, model=torch.nn.Linear(1, 1))
    assert rows.account.messages == {(2.0, 0.1): 4}


# --- the unit


@pytest.mark.parametrize("name", ["dp_sgd", "optimal_dp_sgd"])
def test_client_level_noise_says_so_first(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    t = trainer(tmp_path, make_defense(name, scale=0.1, clip=1.0))
    said = [record.message for record in caplog.records if "gradguard" in record.name]
    assert said[0].startswith(f"{name} is client-level noise")
    t.train()
    text = card(t).replace("\n", " ")
    assert f"`{name}` is client-level noise" in text
    assert "no (ε, δ) of a row follows" in text


@pytest.mark.parametrize("batch_size", [0.5, 1, 4, 30, 256, 4096, 1e5])
def test_rounding_is_counted_for_as_many_rows_as_are_ever_drawn(batch_size: float) -> None:
    """Rows that are drawn one by one are no more spread than a Poisson number of them, which is
    above what is counted with a probability below 1e-15, which is nothing beside any δ.
    """
    counted = rounding_of_rows(batch_size) / ROW_ROUNDING
    assert poisson.sf(math.floor(counted), batch_size) < 1e-15
    assert counted <= batch_size + 10 * math.sqrt(batch_size) + 50  # and hardly more


def test_what_epsilon_covers_is_said_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    t = trainer(tmp_path, private(delta=1e-3))
    t.train()
    (said,) = [record.message for record in caplog.records if "draws each of its" in record.message]
    assert said.index("one row of the training data") < said.index("noise multiplier")
    assert "client-level" not in caplog.text
    text = card(t)
    assert text.index("For one row of the training data") < text.index("ε = ")


@pytest.mark.parametrize(("noise", "is_said"), [(1.0, False), (0.02, True)])
def test_an_epsilon_that_protects_nobody_is_called_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, noise: float, is_said: bool
) -> None:
    t = trainer(tmp_path, private(noise_multiplier=noise, delta=1e-3))
    t.train()
    assert (t.private_rows.epsilon > 10) == is_said
    assert ("no protection to speak of" in caplog.text) == is_said
    assert ("no protection to speak of" in card(t).replace("\n", " ")) == is_said


def test_a_large_target_is_spent(tmp_path: Path) -> None:
    t = trainer(tmp_path, private(noise_multiplier=None, target_epsilon=30.0, delta=1e-3))
    t.train()
    assert 29.7 < t.private_rows.epsilon <= 30.0


# --- what is refused


class Own(GradGuardTrainer):
    """Draws batches in a way of its own."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data())


def test_what_epsilon_would_not_hold_of_is_refused(tmp_path: Path) -> None:
    known = private(delta=1e-3)
    with refuses("samples-in-chain"):
        trainer(tmp_path, chain(known, make_defense("pruning", ratio=0.5)))
    with refuses("samples-with-clients"):
        trainer(tmp_path, known, num_clients=2)
    with refuses("samples-by-length"):
        trainer(tmp_path, known, train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match="too few"):
        trainer(tmp_path, known, clients_per_process=ROWS + 1)
    model = make_task("bert", dtype=torch.float32)[0]
    settings: Any = {"model": model, "args": GradGuardConfig(str(tmp_path), use_cpu=True)}
    with refuses("samples-of-own-batches"):
        Own(**settings, defense=known, train_dataset=data())
    assert Own(**settings, defense=private(), train_dataset=data()).private_rows is None
    settings["args"].max_steps = 1
    with refuses("samples-of-own-batches"):
        GradGuardTrainer(**settings, defense=known, train_dataset=Streamed())
    with refuses("leakage-of-unknown-noise"):
        GradGuardTrainer(
            **settings, defense=known, train_dataset=data(), accountant=FisherAccountant()
        )


def test_nothing_is_measured_of_gradients_whose_samples_are_clipped(tmp_path: Path) -> None:
    """A log of 50 messages would have means over the first few."""
    args = GradGuardConfig(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        max_steps=55, logging_steps=55, per_device_train_batch_size=2, private_metrics="log",
    )  # fmt: skip
    model = make_task("bert", dtype=torch.float32)[0]
    t = Own(model=model, args=args, defense=private(), train_dataset=data())
    t.train()
    (entry,) = [entry for entry in t.state.log_history if "loss" in entry]
    assert not {"defense/cosine", "defense/relative_error", "defense/seconds"} & entry.keys()
    assert entry["defense/samples"] == 2


@pytest.mark.parametrize("defense", [private(), make_defense("gaussian_noise", scale=0.1)])
def test_an_error_says_nothing_of_the_rows_that_were_drawn(
    defense: Defense, tmp_path: Path
) -> None:
    """Logs of errors are uploaded; ε counts on nobody knowing how many rows a batch has."""
    t = trainer(tmp_path, defense)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("of a model's own")

    t.model.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="of a model's own") as error:
        t.train()
    (note,) = error.value.__notes__
    assert "labels" in note
    assert bool(set("0123456789") & set(note)) == (defense.name == "gaussian_noise")
