"""A client of a federation that trains a head: each row in one message, and noise by its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_gradguard.defenses.correlated import make_factor, sensitivity
from hf_gradguard.heads import HeadClient, PrivateHead, private_head
from hf_gradguard.heads.client import MOST_WEIGHT, weights_name
from hf_gradguard.leakage import gaussian_epsilon
from hf_gradguard.randomness import Stream

CLASSES, WIDTH = 3, 120


def make_head(seed: int = 0, **settings: Any) -> PrivateHead:
    """A head on features that are what it is given."""
    public = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(seed))
    return private_head(
        nn.Identity(), public, num_labels=CLASSES, directions=100, device="cpu", **settings
    )


def rows_of(head: PrivateHead, count: int, seed: int = 1) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    features = head.features_of(torch.randn(count, WIDTH, generator=draws))
    labels = torch.randint(CLASSES, (count,), generator=draws)
    return [{"features": f, "labels": int(y)} for f, y in zip(features, labels, strict=True)]


def zeros(head: PrivateHead) -> dict[str, Tensor]:
    return {weights_name(head): torch.zeros_like(head.head.weight)}


def row_gradient(weights: Tensor, row: dict[str, Any]) -> Tensor:
    """By autograd, of one row alone."""
    weights = weights.clone().requires_grad_()
    loss = F.cross_entropy(row["features"] @ weights.T, torch.tensor(row["labels"]))
    return torch.autograd.grad(loss, weights)[0]


def test_rounds_without_noise_are_sgd_on_every_row_once() -> None:
    """Three clients of other sizes, whose answers a server averages."""
    head = make_head()
    data = [rows_of(head, count, seed) for seed, count in enumerate((9, 14, 30))]
    clients = [HeadClient(head, rows, 4, noise_multiplier=0) for rows in data]
    name, expected = weights_name(head), torch.zeros(CLASSES, 101)
    received = zeros(head)
    for turn in range(4):
        moves = []
        for client, rows in zip(clients, data, strict=True):
            total = sum(row_gradient(expected, rows[place]) for place in client.order()[turn])
            moves.append(1.25 * (1 - turn / 4) * total)
        answers = [client.train(received)[name] for client in clients]
        expected = expected - torch.stack(moves).mean(0)  # type: ignore[arg-type]
        received = {name: torch.stack(answers).mean(0)}
    assert received[name].norm() > 1
    torch.testing.assert_close(received[name], expected, rtol=1e-4, atol=1e-4)


def test_a_message_is_the_sum_of_clipped_rows() -> None:
    """With next to no noise; at weights where each row's gradient is above the clip."""
    head = make_head()
    rows = rows_of(head, 10)
    client = HeadClient(head, rows, 2, noise_multiplier=1e-5, clip=0.1, learning_rate=5.0)
    weights = torch.randn(CLASSES, 101, generator=torch.Generator().manual_seed(5))
    for turn in range(2):
        total = torch.zeros_like(weights)
        for place in client.order()[turn]:
            gradient = row_gradient(weights, rows[place])
            assert gradient.norm() > 0.1
            total += gradient * 0.1 / gradient.norm()
        sent = client.train({client.weights_name: weights})[client.weights_name]
        expected = weights - 5.0 * (1 - turn / 2) * total / 5
        torch.testing.assert_close(sent, expected, rtol=0, atol=1e-4)


def test_noise_is_as_planned_and_independent_between_clients() -> None:
    """C times all messages' noise is white, of deviation σ · clip · ‖C‖, as the proof takes it."""
    head, messages, sigma, clip = make_head(), 6, 1.5, 0.3
    rows = rows_of(head, 12)
    whites = []
    for _ in range(2):
        client = HeadClient(head, rows, messages, noise_multiplier=sigma, clip=clip)
        plain = HeadClient(head, rows, messages, noise_multiplier=1e-6, clip=clip)
        plain._order_key = client._order_key
        noises = []
        for turn in range(messages):
            rate = (1 - turn / messages) / 2  # of a sum of two rows
            sent = client.train(zeros(head))[client.weights_name] / client.learning_rate
            true = plain.train(zeros(head))[client.weights_name] / plain.learning_rate
            noises.append(((sent - true) / rate).flatten().double())
        column = make_factor("blt", messages, falling_rate=True).column(messages)
        matrix = torch.stack([F.pad(column, (t, 0))[:messages] for t in range(messages)], 1)
        whites.append(matrix @ torch.stack(noises))
        deviation = sigma * clip * sensitivity(column)
        # Of 303 draws a deviation is within a fifth but for one in 10⁶.
        assert whites[-1].std(1).tolist() == pytest.approx([deviation] * messages, rel=0.2)
    both = torch.corrcoef(torch.cat(whites))
    assert float((both - torch.eye(2 * messages)).abs().max()) < 0.3


def test_a_row_is_in_one_message_and_moves_it_by_twice_the_clip_at_most() -> None:
    """At any weights that a server may choose, also such as make gradients large."""
    head = make_head()
    rows = rows_of(head, 20)
    others = [dict(row) for row in rows]
    others[7]["labels"] = (rows[7]["labels"] + 1) % CLASSES
    one, other = (HeadClient(head, data, 5, clip=0.3, learning_rate=4.0) for data in (rows, others))
    other._order_key = one._order_key
    weights = {one.weights_name: 40 * torch.randn(CLASSES, 101)}
    moved = []
    for turn in range(5):
        sent = [
            client.train(weights, Stream.from_seeds(turn))[one.weights_name].double()
            for client in (one, other)
        ]
        moved.append(float((sent[0] - sent[1]).norm()) / (4.0 * (1 - turn / 5) / 4))
    assert sum(distance > 0.01 for distance in moved) == 1
    assert 0.01 < max(moved) <= 0.6 + 0.05  # large weights have few digits


def test_every_row_is_in_one_message_by_a_private_order() -> None:
    head = make_head()
    rows = rows_of(head, 23)
    orders = [[part.tolist() for part in HeadClient(head, rows, 4).order()] for _ in range(2)]
    for order in orders:
        assert sorted(row for part in order for row in part) == list(range(23))
        assert sorted(map(len, order)) == [5, 6, 6, 6]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("size", [3e38, 1e6, 1e4])
def test_weights_that_round_scores_are_refused_before_rows_are_looked_at(size: float) -> None:
    """Whether a row fails at such weights would be seen by whoever sent them."""
    head = make_head()
    client = HeadClient(head, rows_of(head, 8), 1)
    weights = size * torch.ones(CLASSES, 101)
    weights[0] *= -1
    with pytest.raises(ValueError, match="norm above"):
        client.train({client.weights_name: weights})
    assert client.position == 0


@pytest.mark.parametrize("seed", range(5))
def test_large_weights_are_answered_whatever_rows_say(seed: int) -> None:
    head = make_head()
    client = HeadClient(head, rows_of(head, 8), 1)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(CLASSES, 101, generator=generator)
    weights *= 0.99 * MOST_WEIGHT / weights.norm(dim=1).max()
    sent = client.train({client.weights_name: weights})[client.weights_name]
    assert bool(torch.isfinite(sent).all())


def test_what_is_received_must_be_of_this_head() -> None:
    head = make_head()
    client = HeadClient(head, rows_of(head, 8), 2)
    ((name, weights),) = zeros(head).items()
    assert weights_name(make_head()) == name != weights_name(make_head(seed=3))
    renamed = make_head()
    renamed.config.id2label = {0: "a", 1: "b", 2: "c"}
    assert weights_name(renamed) != name
    for received in (
        {weights_name(renamed): weights}, {"head.weight": weights}, {},
        {name: weights, "encoder": weights}, {name: weights[:, :-1]}, {name: weights.double()},
        {name: weights + torch.nan}, {name: weights - torch.inf},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="received"):
            client.train(received)
    assert client.position == 0


def test_no_more_messages_than_the_noise_was_planned_for() -> None:
    head = make_head()
    client = HeadClient(head, rows_of(head, 8), 2)
    for _ in range(2):
        client.train(zeros(head))
    with pytest.raises(RuntimeError, match="All 2 messages"):
        client.train(zeros(head))
    with pytest.raises(ValueError, match="at most the number of rows"):
        HeadClient(head, rows_of(head, 8), 9)


def test_epsilon_is_that_of_one_gaussian_mechanism() -> None:
    head = make_head()
    rows = rows_of(head, 8)
    assert HeadClient(head, rows, 2).epsilon == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=2e-3)
    strict = HeadClient(head, rows, 2, target_epsilon=1.0, delta=1e-6)
    assert (strict.epsilon, strict.delta) == (pytest.approx(1.0, abs=1e-3), 1e-6)
    assert strict.noise_multiplier > 3
    assert HeadClient(head, rows, 2, noise_multiplier=0).epsilon is None
    assert "ε = 2.75" in HeadClient(head, rows, 2).describe()
    with pytest.raises(ValueError, match="not both"):
        HeadClient(head, rows, 2, target_epsilon=1.0, noise_multiplier=1.5)


def test_a_folder_remembers_what_was_sent(tmp_path: Path) -> None:
    """After a kill, noise goes on that cancels what has left, and no row is sent again."""
    head, folder = make_head(), tmp_path / "state"
    rows = rows_of(head, 12)
    client = HeadClient(head, rows, 3, state_folder=folder, name="a")
    client.train(zeros(head))
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    again = HeadClient(head, rows, 3, state_folder=folder, name="a")
    assert again.position == 1
    assert [list(part) for part in again.order()] == [list(part) for part in client.order()]
    sent = [c.train(zeros(head), Stream.from_seeds(1))[c.weights_name] for c in (client, again)]
    assert torch.equal(*sent)
    with pytest.raises(ValueError, match="The rows are others"):
        HeadClient(head, rows[1:], 3, state_folder=folder, name="a")
    with pytest.raises(ValueError, match="The settings are others"):
        HeadClient(head, rows, 3, state_folder=folder, name="a", clip=0.1)
    assert HeadClient(head, rows, 3, state_folder=folder, name="b").position == 0
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match="damaged"):
        HeadClient(head, rows, 3, state_folder=folder, name="a")


def test_a_label_out_of_range_is_refused_before_anything_is_sent() -> None:
    head = make_head()
    rows = rows_of(head, 8)
    rows[5]["labels"] = 17
    with pytest.raises(ValueError, match="A label is no class of the head") as caught:
        HeadClient(head, rows, 2)
    assert "17" not in str(caught.value)
    with pytest.raises(ValueError, match="no labels"):
        HeadClient(head, [{"features": row["features"]} for row in rows], 2)
    with pytest.raises(ValueError, match="float32"):
        HeadClient(make_head().to(torch.bfloat16), rows, 2)
