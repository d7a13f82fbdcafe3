"""Partitions against hand-worked cases and their distributions; rounds, weights, and training with
them.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain as flatten
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers import LABELS, SmallNetwork, image_batch, make_task, pad, ragged_rows
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.defenses import Message
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.randomness import Stream
from hf_gradguard.training.clients.batches import (
    CLIENT,
    SHARE,
    ClientCollator,
    ClientSampler,
    SampledRow,
)
from hf_gradguard.training.clients.partition import (
    class_labels,
    make_partition,
    partition_dirichlet,
    partition_iid,
)
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

# --- partitions


@pytest.mark.parametrize(
    ("rows", "clients", "sizes"), [(10, 3, [4, 3, 3]), (9, 3, [3, 3, 3]), (2, 3, [1, 1, 0])]
)
def test_iid_parts_are_equal(rows: int, clients: int, sizes: list[int]) -> None:
    parts = partition_iid(rows, clients, np.random.default_rng(0))
    assert [len(part) for part in parts] == sizes
    assert sorted(flatten(*parts)) == list(range(rows))


def test_iid_rows_fall_on_any_client() -> None:
    owners = Counter(
        next(
            k
            for k, part in enumerate(partition_iid(6, 3, np.random.default_rng(seed)))
            if 0 in part
        )
        for seed in range(300)
    )
    assert all(abs(count - 100) < 35 for count in owners.values())  # standard deviation 8.2


class Fixed:
    """A generator whose draws are known."""

    def __init__(self, *shares: list[float]) -> None:
        self.shares = list(shares)

    def permutation(self, rows: np.ndarray) -> np.ndarray:
        return rows[::-1]

    def dirichlet(self, alpha: list[float]) -> list[float]:
        assert alpha == [0.5, 0.5, 0.5]
        return self.shares.pop(0)


def test_dirichlet_by_hand() -> None:
    # Class 3 has rows 0, 2, 4, 6 (from behind: 6, 4 | 2 | 0), class 7 has rows 1, 3, 5 (5 | nothing
    # | 3, 1: 0.4 · 3 = 1.2).
    labels = [3, 7, 3, 7, 3, 7, 3]
    parts = partition_dirichlet(labels, 3, 0.5, Fixed([0.5, 0.25, 0.25], [0.4, 0.0, 0.6]))  # type: ignore[arg-type]
    assert [part.tolist() for part in parts] == [[4, 5, 6], [2], [0, 1, 3]]


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_proportions_have_their_mean_and_variance(alpha: float) -> None:
    """A client's share of a class has mean 1/K and variance (K-1)/(K²(Kα+1))."""
    clients, classes, each = 4, 200, 500
    labels = np.repeat(np.arange(classes), each)
    parts = partition_dirichlet(labels, clients, alpha, np.random.default_rng(3))
    assert sorted(flatten(*parts)) == list(range(len(labels)))
    shares = np.array(
        [np.bincount(labels[part], minlength=classes) / each for part in parts]
    )  # (K, classes)
    assert np.allclose(shares.sum(0), 1)
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert np.abs(shares.mean(1) - 1 / clients).max() < 4 * np.sqrt(variance / classes)
    assert shares.var() == pytest.approx(variance, rel=0.25)  # of 800 draws


def test_a_seed_reproduces_a_partition() -> None:
    data = [{"labels": k % 3} for k in range(60)]
    for kind in ("iid", "dirichlet"):
        one, two, other = (
            [p.tolist() for p in make_partition(data, 4, kind, 1.0, seed)] for seed in (1, 1, 2)
        )
        assert one == two
        assert one != other


def test_labels_are_found_without_making_pixels_of_the_rows() -> None:
    def fail(rows: Any) -> Any:
        raise AssertionError("a row was read")

    data = datasets.Dataset.from_dict({"label": [2, 0, 1], "x": [0.5, 1.5, 2.5]})
    assert class_labels(data.with_transform(fail)).tolist() == [2, 0, 1]
    assert class_labels([{"labels": torch.tensor(4)}, {"labels": torch.tensor(1)}]).tolist() == [
        4,
        1,
    ]


@pytest.mark.parametrize(
    "data",
    [
        [{"x": 1}],
        [{"labels": [1, 2]}],
        [{"labels": 0.5}],
        [],
        datasets.Dataset.from_dict({"y": [1]}),
    ],
    ids=["none", "tokens", "scores", "empty", "another name"],
)
def test_rows_without_classes_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"divides by class.*partition='iid'"):
        make_partition(data, 2, "dirichlet", 1.0, 0)


def test_empty_clients_and_endless_data_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Of 5 clients 2 would have no rows of 3 \(the first is client 3\)"
    ):
        make_partition([{}] * 3, 5, "iid", 1.0, 0)
    with pytest.raises(ValueError, match="with a length"):
        make_partition(iter([{}]), 2, "iid", 1.0, 0)


# --- rounds

PARTS = [
    np.arange(0, 5),
    np.arange(5, 7),
    np.arange(7, 10),
    np.arange(10, 20),
]  # of 5, 2, 3 and 10 rows


def rounds_of(sampler: ClientSampler) -> list[list[SampledRow]]:
    size = sampler.ranks * sampler.per_rank * sampler.batch_size
    picks = list(sampler)
    assert len(picks) == len(sampler)
    return [picks[start : start + size] for start in range(0, len(picks), size)]


def test_one_round_by_hand() -> None:
    """Clients 0 and 2 live on rank 0, 1 and 3 on rank 1. Drawing all: 5, 2, 3 and 10 of 20 rows."""
    sampler = ClientSampler(PARTS, per_rank=2, batch_size=3, ranks=2)
    assert (sampler.rounds, len(sampler)) == (1, 12)  # 20 rows, 12 places a round
    (picks,) = rounds_of(sampler)
    first, second = picks[:6], picks[6:]
    assert Counter(pick.client for pick in first) == {0: 3, 2: 3}
    assert Counter(pick.client for pick in second) == {1: 3, 3: 3}
    assert {pick.client: pick.share for pick in picks} == {0: 0.25, 1: 0.1, 2: 0.15, 3: 0.5}
    for client, part in enumerate(PARTS):
        rows = [pick.row for pick in picks if pick.client == client]
        filled = [row for row in rows if row is not None]
        assert (
            len(filled) == min(3, len(part)) == len(set(filled))
        )  # none twice; client 1 has only two
        assert set(filled) <= set(part.tolist())


def test_clients_are_drawn_anew_each_round_and_equally_often() -> None:
    parts = [np.arange(10 * k, 10 * k + 10) for k in range(6)]
    drawn: Counter[int] = Counter()
    pairs = set()
    for epoch in range(100):
        sampler = ClientSampler(parts, per_rank=2, batch_size=5)
        sampler.set_epoch(epoch)
        for picks in rounds_of(sampler):
            clients = {pick.client for pick in picks}
            assert len(clients) == 2
            pairs.add(tuple(sorted(clients)))
            drawn.update(clients)
    assert len(pairs) == 15
    assert all(
        abs(count - 200) < 50 for count in drawn.values()
    )  # of 600 rounds a third; standard deviation 11.5


def test_rounds_are_the_seeds_and_the_epochs() -> None:
    def picks(seed: int, epoch: int) -> list[SampledRow]:
        sampler = ClientSampler(PARTS, 1, 2, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert picks(1, 0) == picks(1, 0)
    assert len({tuple(picks(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_empty_places_are_left_out_of_the_batch() -> None:
    collator = ClientCollator(lambda rows: {"x": torch.tensor(rows)})
    batch = collator(
        [
            (5, SampledRow(0, 3, 0.25)),
            (None, SampledRow(None, 3, 0.25)),
            (7, SampledRow(9, 1, 0.75)),
        ]
    )
    assert batch["x"].tolist() == [5, 7]
    assert batch[CLIENT].tolist() == [3, 1]
    assert batch[SHARE].tolist() == [0.25, 0.75]


# --- training


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.steps.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )


def samples(count: int = 20) -> list[dict[str, Tensor]]:
    batch = image_batch(count)
    return [{"pixel_values": x.float(), "labels": y} for x, y in zip(*batch.values(), strict=True)]


def make_trainer(
    folder: Path, data: Any, defense: Any = "none", **settings: Any
) -> GradGuardTrainer:
    args = GradGuardConfig(
        output_dir=str(folder), **{
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            "learning_rate": 0.0, "max_grad_norm": 0.0, "max_steps": 3,
            "per_device_train_batch_size": 6, **settings,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig(image_size=8, num_labels=LABELS))
    return GradGuardTrainer(
        model, args, defense=defense, train_dataset=data, callbacks=[Gradients()]
    )


def gradients_of(trainer: GradGuardTrainer) -> list[dict[str, Tensor]]:
    return next(c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Gradients))


def weighted(trainer: GradGuardTrainer, picks: list[SampledRow], data: Any) -> dict[str, Tensor]:
    """Σ_k n_k/Σn · g_k with the plain gradient of each drawn client's own rows."""
    total: dict[str, Tensor] = {}
    sizes = {k: len(trainer._rows_of_clients[k]) for k in {pick.client for pick in picks}}
    for client, size in sizes.items():
        rows = [data[pick.row] for pick in picks if pick.client == client and pick.row is not None]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        for name, gradient in GradientMap(trainer.model, batch).gradient().items():
            total[name] = total.get(name, 0) + size / sum(sizes.values()) * gradient
    return total


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_step_is_the_mean_of_the_drawn_clients_weighted_by_size(
    tmp_path: Path, partition: str
) -> None:
    data = samples()
    settings = {"partition": partition, "dirichlet_alpha": 2.0, "data_seed": 4}
    trainer = make_trainer(tmp_path, data, num_clients=5, clients_per_process=2, **settings)
    trainer.train()
    sampler = ClientSampler(trainer._rows_of_clients, 2, 3, seed=4)
    rounds = rounds_of(sampler)
    assert len(rounds) == 3  # 20 rows, 6 places a round
    sizes = {len(part) for part in trainer._rows_of_clients}
    assert (len(sizes) > 1) == (partition == "dirichlet")  # weights that differ
    for picks, found in zip(rounds, gradients_of(trainer), strict=True):
        torch.testing.assert_close(found, weighted(trainer, picks, data), rtol=1e-4, atol=1e-6)


def test_accumulated_rounds_are_averaged(tmp_path: Path) -> None:
    data = samples()
    trainer = make_trainer(
        tmp_path,
        data,
        num_clients=5,
        clients_per_process=2,
        gradient_accumulation_steps=3,
        max_steps=1,
        seed=7,
    )
    trainer.train()
    rounds = [
        weighted(trainer, picks, data)
        for picks in rounds_of(ClientSampler(trainer._rows_of_clients, 2, 3, seed=7))
    ]
    expected = {
        name: (rounds[0][name] + rounds[1][name] + rounds[2][name]) / 3 for name in rounds[0]
    }
    torch.testing.assert_close(gradients_of(trainer)[0], expected, rtol=1e-4, atol=1e-6)


class Seen(tuple[list[int], ...]):
    """The rows of a client's messages, as its defense remembers them."""

    def tensors(self) -> dict[str, Tensor]:
        return {}


def test_each_client_is_protected_by_itself_and_remembers_for_itself(tmp_path: Path) -> None:
    data = samples(30)

    class Watched(GaussianNoise):
        def protect(self, gmap: GradientMap, generator: Stream) -> Message:
            rows = [
                next(k for k, row in enumerate(data) if torch.equal(row["pixel_values"], x))
                for x in gmap.input
            ]
            self.remember(seen=Seen((*self.state.get("seen", ()), rows)))
            return super().protect(gmap, generator)

    trainer = make_trainer(
        tmp_path, data, Watched(), num_clients=4, clients_per_process=2, max_steps=12
    )
    trainer.train()
    assert len(trainer._clients) == 4
    assert sum(len(client.state["seen"]) for client in trainer._clients) == 24  # two a step
    for number, client in enumerate(trainer._clients):
        assert client.state["seen"]
        for rows in client.state["seen"]:
            assert len(rows) == 3
            assert set(rows) <= set(trainer._rows_of_clients[number].tolist())


def test_clients_of_refiner_share_its_network_and_nothing_else() -> None:
    defense = make_defense(
        "refiner", objective="weighted", evaluation_network=SmallNetwork("image", 3), warm_start=5
    )
    model, batch = make_task("vit", dtype=torch.float32)
    _, state = defense.apply(GradientMap(model, batch), {}, Stream())
    one, two = defense.with_state(state), defense.with_state({})
    assert one.network is two.network is defense.network
    assert one.state_dict()
    assert not two.state_dict()
    assert not defense.state_dict()


def test_data_sets_with_transforms_and_other_columns(tmp_path: Path) -> None:
    rows = samples()
    data = datasets.Dataset.from_dict(
        {"row": list(range(20)), "label": [int(row["labels"]) for row in rows]}
    )

    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "pixel_values": [rows[i]["pixel_values"] for i in batch["row"]],
            "labels": batch["label"],
        }

    columns = {key: [row[key].tolist() for row in rows] for key in rows[0]}
    noted = datasets.Dataset.from_dict({**columns, "note": ["what no model takes"] * 20})
    settings = {
        "num_clients": 4,
        "partition": "dirichlet",
        "dirichlet_alpha": 3.0,
        "max_steps": 1,
        "seed": 5,
    }
    found = []
    for given, removed in ((rows, True), (data.with_transform(read), False), (noted, True)):
        trainer = make_trainer(tmp_path, given, remove_unused_columns=removed, **settings)
        trainer.train()
        found.append(gradients_of(trainer)[0])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_language_models_and_a_client_without_labels(tmp_path: Path) -> None:
    """A client's mean is over its tokens; its weight is its rows. One that has nothing to predict
    sends nothing.
    """
    data = ragged_rows(12)
    for row in data[:6]:
        row["labels"] = torch.full_like(row["labels"], -100)
    args = GradGuardConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", max_steps=1, learning_rate=0.0, max_grad_norm=0.0,
        per_device_train_batch_size=6, num_clients=6, clients_per_process=6,
    )  # fmt: skip
    model, _ = make_task("gpt2_lm", dtype=torch.float32)
    trainer = GradGuardTrainer(
        model, args, defense="none", train_dataset=data, data_collator=pad, callbacks=[Gradients()]
    )
    trainer.train()
    picks = list(ClientSampler(trainer._rows_of_clients, 6, 1, seed=args.seed))[:6]
    speaking = [pick.row for pick in picks if pick.row is not None and pick.row >= 6]
    assert 0 < len(speaking) < 6
    expected: dict[str, Tensor] = {}
    for row in speaking:
        batch = {key: value[None] for key, value in data[row].items()}
        for name, gradient in GradientMap(model, batch).gradient().items():
            expected[name] = expected.get(name, 0) + gradient / 6
    found = {name: gradients_of(trainer)[0][name] for name in expected}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_draws_the_same_clients(tmp_path: Path) -> None:
    settings = {
        "num_clients": 5,
        "clients_per_process": 2,
        "max_steps": 5,
        "learning_rate": 0.01,
        "save_steps": 2,
    }
    settings |= {"save_strategy": "steps"}
    whole = make_trainer(tmp_path, samples(), "pruning", **settings)
    whole.train()
    resumed = make_trainer(tmp_path, samples(), "pruning", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(gradients_of(resumed)) == 3
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_card_says_how_many_and_how(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, samples(), num_clients=5, partition="dirichlet", dirichlet_alpha=2.0
    )
    trainer.create_model_card()
    expected = (
        "- Clients: 5 simulated on 1 rank(s), 1 of each rank drawn a step, data partition "
        "dirichlet(2.0); every"
    )
    assert expected in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 0}, "fewer than clients_per_process=1"),
        (
            {"num_clients": 2, "clients_per_process": 3},
            "num_clients is 2, fewer than clients_per_process=3",
        ),
        (
            {"num_clients": 8, "clients_per_process": 4},
            "6 rows cannot be shared equally by clients_per_process=4",
        ),
        ({"partition": "dirichlet"}, "partition='dirichlet' divides the data among num_clients"),
        ({"num_clients": 2, "partition": "sorted"}, "one of iid, dirichlet, but is 'sorted'"),
        (
            {"num_clients": 2, "dirichlet_alpha": 0.0},
            "dirichlet_alpha must be a finite number above 0",
        ),
        (
            {"num_clients": 2, "dirichlet_alpha": float("inf")},
            "dirichlet_alpha must be a finite number above 0",
        ),
        (
            {"num_clients": 2, "train_sampling_strategy": "sequential"},
            "leave train_sampling_strategy",
        ),
        (
            {"num_clients": 2, "accelerator_config": {"split_batches": True}},
            "and split_batches at their defaults",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, samples(), **settings)
