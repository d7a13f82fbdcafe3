"""What a guard refuses whichever framework sends: tables of words, and rounding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_gradguard.defenses.correlated import make_factor, sensitivity
from hf_gradguard.federation.guard import Guard, GuardSettings, _check_grid
from hf_gradguard.federation.lookup_tables import TABLES, check_tables
from hf_gradguard.leakage import gaussian_epsilon

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, 5),
    "AdamW, small steps": (torch.optim.AdamW, {"lr": 2e-5}, 50),
    "AdamW, below rounding": (torch.optim.AdamW, {"lr": 4e-6, "fused": True}, 20),
    "AdamW, undecayed": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}, 5),
    "Adam, decay in the gradient": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-4}, 5),
    "Adam, little decay": (torch.optim.Adam, {"lr": 1e-4, "weight_decay": 1e-5}, 30),
    "Adam, much decay": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}, 5),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 5e-4}, 5),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-3, "weight_decay": 1e-4, "momentum": 0.9}, 9),
}
WORDS = torch.arange(0, 96, 2).view(8, 6)
LABELS = torch.arange(8) % 2
NOISE = {"scale": 0.01}


class LowRank(nn.Module):
    """A linear map as LoRA has it: one factor starts at zero, of the other one row is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 128) / 8), nn.Parameter(torch.zeros(128, 8))
        self.a.data[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.a.T @ self.b.T


def trained(
    model: nn.Module, x: Tensor, optimizer: str, steps: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's weights before and after local training at a rate that falls."""
    kind, settings, default_steps = OPTIMIZERS[optimizer]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = kind(model.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.5, default_steps)
    for _ in range(steps or default_steps):
        made.zero_grad()
        nn.functional.cross_entropy(model(x), LABELS).backward()
        made.step()
        schedule.step()
    return before, model.state_dict()


class Words(nn.Module):
    """A table under a name that says so, with its output head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(1000, 16)
        self.classifier = nn.Linear(96, 2)
        self.head = nn.Linear(16, 1000, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.classifier(self.embeddings(words).flatten(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_is_refused_by_its_name(optimizer: str) -> None:
    """Weight decay changes every row of it."""
    torch.manual_seed(0)
    received, trained_weights = trained(Words(), WORDS, optimizer)
    with pytest.raises(ValueError, match=r"'embeddings\.weight' is a table"):
        Guard(GuardSettings(settings=NOISE)).protect(received, trained_weights)
    withheld = Guard(GuardSettings(settings=NOISE, withhold="embeddings.weight"))
    with pytest.raises(ValueError, match=r"'head\.weight'"):
        withheld.protect(received, trained_weights)
    withheld = Guard(GuardSettings(settings=NOISE, withhold="embeddings.weight, head.weight"))
    assert torch.equal(
        withheld.protect(received, trained_weights)["head.weight"], received["head.weight"]
    )


def test_a_tied_head_counts_as_its_table() -> None:
    received = {"embed": torch.rand(9, 4)}
    received["head"] = received["embed"].clone()
    change = {name: torch.full((9, 4), 0.1) for name in received}
    with pytest.raises(ValueError, match="'embed'"):
        check_tables(received, change, TABLES)
    with pytest.raises(ValueError, match="'head'"):
        check_tables(received, {"head": change["head"], "embed": change["embed"] * 0}, "embed")


DENSE = {
    "albert.encoder.embedding_hidden_mapping_in": True,
    "electra.embeddings_project": True,
    "bert.embeddings.word_embeddings": False,
    "model.embed_tokens": False,
    "own.embed": False,  # a table with a bias for each word, as tied heads have
}


@pytest.mark.parametrize("module", DENSE)
def test_a_dense_layer_behind_a_table_is_sent(module: str) -> None:
    """It has a bias, and is only named after the table."""
    shapes = {f"{module}.weight": (9, 4), f"{module}.bias": (9,)}
    received = {name: torch.rand(shape) for name, shape in shapes.items()}
    change = {name: torch.full(shape, 0.1) for name, shape in shapes.items()}
    if DENSE[module]:
        check_tables(received, change, TABLES)
        del received[f"{module}.bias"]
    with pytest.raises(ValueError, match="is a table"):
        check_tables(received, change, TABLES)
    change[f"{module}.weight"][3:] = 0
    received = {name: torch.rand(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="Nothing was sent"):
        check_tables(received, change, TABLES)


@pytest.mark.parametrize("sends", ["weights", "difference"])
def test_a_table_of_another_name_shows_by_the_rows_it_left_alone(sends: Any) -> None:
    received = {"t": torch.randn(2000, 8)}
    change = {"t": torch.zeros(2000, 8)}
    change["t"][[3, 7]] = 0.1
    update = change if sends == "difference" else {"t": received["t"] + change["t"]}
    with pytest.raises(ValueError, match="2 of 2000 rows"):
        Guard(GuardSettings(settings=NOISE, sends=sends)).protect(received, update)
    # A list of one's own is taken at its word: rows of units that never fired stay as well.
    assert Guard(GuardSettings(settings=NOISE, sends=sends, tables="-")).protect(received, update)


@pytest.mark.parametrize("steps", [1, 2, None])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layers_that_were_trained_whole_pass(optimizer: str, steps: int | None) -> None:
    """Also where the first steps change LoRA's first factor by decay, or by rounding, alone."""
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (2, 8, 8)), nn.Conv2d(2, 64, 3), nn.GELU(), nn.Conv2d(64, 64, 3))
    last = (nn.Flatten(), nn.Linear(1024, 128), LowRank(), nn.GELU(), nn.Linear(128, 2))
    before, after = trained(nn.Sequential(*layers, *last), torch.randn(8, 128), optimizer, steps)
    assert Guard(GuardSettings(settings=NOISE)).protect(before, after).keys() == before.keys()


def test_a_layer_that_grows_along_itself_has_not_decayed() -> None:
    start = torch.cat([torch.ones(60), -torch.ones(40)]).view(100, 1)
    before, after = {"w": start}, {"w": start + 0.01 * start + 1e-5 * torch.randn(100, 1)}
    assert not torch.equal(
        Guard(GuardSettings(settings=NOISE)).protect(before, after)["w"], after["w"]
    )


def test_single_entries_that_shrink_have_not_decayed() -> None:
    torch.manual_seed(0)
    start = torch.randn(100, 1)
    change = (
        0.01 * torch.rand(100, 1) * start.sign() * torch.tensor([-1.0] * 60 + [1.0] * 40)[:, None]
    )
    before, after = {"w": start}, {"w": start + change}
    assert not torch.equal(
        Guard(GuardSettings(settings=NOISE)).protect(before, after)["w"], after["w"]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_weights_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = {"w": (0.1 * torch.randn(3000)).to(dtype), "x": torch.ones(3)}
    after = {"w": (before["w"] + 1e-5 * torch.randn(3000)).to(dtype), "x": 2 * torch.ones(3)}
    with pytest.raises(ValueError, match=r"float16.*Train and exchange float32"):
        Guard(GuardSettings(settings=NOISE)).protect(before, after)
    with pytest.raises(ValueError, match="Train and exchange float32"):
        Guard(GuardSettings("pruning")).sent(before, {"w": torch.zeros(3000)})
    assert torch.equal(Guard(GuardSettings("none")).protect(before, after)["w"], after["w"])
    found = Guard(GuardSettings(settings=NOISE, withhold="w")).protect(before, after)
    assert torch.equal(found["w"], before["w"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences_in_half_precision_keep_their_noise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = {"w": (0.1 * torch.randn(3000)).to(dtype)}
    step = {"w": (1e-5 * torch.randn(3000)).to(dtype)}
    settings = GuardSettings(settings={"scale": 1e-5}, sends="difference")
    found = Guard(settings).protect(before, step)["w"]
    assert found.dtype == dtype
    assert (found == step["w"]).float().mean() < 0.05
    assert 0.9 < (found - step["w"]).float().norm() / step["w"].float().norm() < 1.1


@pytest.mark.parametrize("exchanged", ["as trained", "float32"])
@pytest.mark.parametrize("sends", ["weights", "difference"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e-5), (torch.bfloat16, 1e-4)])
def test_training_in_half_precision_is_refused(
    dtype: torch.dtype, size: float, sends: Any, exchanged: str
) -> None:
    """Rounding to the grid of who trains in half precision takes most of the noise off again."""
    torch.manual_seed(0)
    start = {"w": 0.1 * torch.randn(3000), "x": torch.ones(3)}
    before = {name: tensor.to(dtype) for name, tensor in start.items()}
    after = {name: t + (size * torch.randn(t.shape)).to(dtype) for name, t in before.items()}
    message = after["w"].float() + size * torch.randn(3000)  # as a guard would have sent it
    assert (message.to(dtype) == after["w"]).float().mean() > 0.5
    if exchanged == "float32":
        before, after = ({n: t.float() for n, t in one.items()} for one in (before, after))
    if sends == "difference":
        after = {name: tensor - before[name] for name, tensor in after.items()}
    with pytest.raises(ValueError, match=r"Nothing was sent: 'w' .*float16.*float32"):
        Guard(GuardSettings(settings=NOISE, sends=sends)).protect(before, after)


class Tied(nn.Module):
    """One bias under two names, as BERT's masked-word head has it, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(128, 16).requires_grad_(False)
        self.decoder = nn.Linear(16, 2)
        self.bias = self.decoder.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.frozen(x))


@pytest.mark.parametrize("sends", ["weights", "difference"])
@pytest.mark.parametrize("withheld", ["zeros", "left out"])
def test_a_tensor_of_two_names_has_one_noise_and_a_frozen_one_none(
    withheld: Any, sends: Any
) -> None:
    torch.manual_seed(0)
    before, after = trained(Tied(), torch.randn(8, 128), "SGD")
    update = {n: after[n] - before[n] for n in after} if sends == "difference" else after
    settings = GuardSettings(settings={"scale": 0.01}, withheld=withheld, sends=sends)
    sent = Guard(settings).protect(before, update)
    assert torch.equal(sent["bias"], sent["decoder.bias"])
    assert not torch.equal(sent["bias"], update["bias"])
    if withheld == "left out":
        assert "frozen.weight" not in sent
    else:
        assert torch.equal(sent["frozen.weight"], update["frozen.weight"])
    filled = Guard(GuardSettings(settings=NOISE, sends=sends, frozen="-")).protect(before, update)
    assert not torch.equal(filled["frozen.weight"], update["frozen.weight"])


def test_weights_that_start_alike_are_not_one() -> None:
    before = {name: torch.zeros(9) for name in "ab"}
    sent = Guard(GuardSettings(settings=NOISE)).protect(before, {n: torch.randn(9) for n in before})
    assert not torch.equal(sent["a"], sent["b"])
    unchanged = {"a": torch.zeros(9), "b": torch.zeros(9), "c": torch.randn(9)}
    sent = Guard(GuardSettings(settings=NOISE, frozen="-")).protect(
        before | {"c": torch.zeros(9)}, unchanged
    )
    assert not torch.equal(sent["a"], sent["b"])


def test_few_entries_on_a_grid_are_chance() -> None:
    before = {"w": torch.randn(3000), "x": torch.ones(3)}
    after = {"w": before["w"] + 0.01 * torch.randn(3000), "x": 2 * torch.ones(3)}
    after["w"][:1000] = after["w"][:1000].bfloat16().float()
    assert Guard(GuardSettings(settings=NOISE)).protect(before, after).keys() == before.keys()


def test_noise_of_an_update_has_a_stated_strength() -> None:
    """Of an update that was computed elsewhere no usual one is known, and its own would show."""
    before = {"w": torch.randn(3000)}
    after = {"w": before["w"] + 0.1 * torch.randn(3000)}
    for settings in ({}, {"relative_scale": 20.0}):
        with pytest.raises(ValueError, match=r"gaussian_noise\.scale"):
            Guard(GuardSettings(settings=settings)).protect(before, after)
    published = GuardSettings(settings={"relative_scale": 1.0, "strength": "own"})
    assert Guard(published).protect(before, after).keys() == before.keys()


def correlated(**settings: Any) -> GuardSettings:
    noise = {"correlated": True, "scale": 0.3, "clip": 0.1, "messages": 6, "delta": 1e-5}
    return GuardSettings("dp_sgd", {**noise, **settings}, tables="-")


def test_updates_with_correlated_noise_go_on_after_a_kill(tmp_path: Path) -> None:
    """A client's rounds are one transcript: behind the factor their noise is white, also where
    another process takes up what the last one left.
    """
    size, rounds = 20_000, 6
    received = {"w": torch.zeros(size)}
    update = {"w": torch.full((size,), 1e-3)}  # of norm 0.14, clipped to 0.1
    noises = []
    for _ in range(rounds):
        guard = Guard(correlated())  # as after a kill
        guard.load_state(tmp_path, "client")
        sent = guard.protect(received, update)["w"]
        guard.save_state(tmp_path, "client")
        noises.append(sent.double() - update["w"] * 0.1 / update["w"].norm())
    column = make_factor("blt", rounds).column(rounds)
    place = torch.arange(rounds)
    matrix = torch.where(place[:, None] >= place, column[(place[:, None] - place).clamp(min=0)], 0)
    white = matrix @ torch.stack(noises) / (0.3 * sensitivity(column))
    covariance = white @ white.T / size
    assert float((covariance - torch.eye(rounds)).abs().max()) < 6 * (2 / size) ** 0.5
    guard = Guard(correlated())
    guard.load_state(tmp_path, "client")
    with pytest.raises(RuntimeError, match="messages=6"):
        guard.protect(received, update)


class Unsent(Guard):
    """A guard whose updates cannot be sent."""

    def sent(self, received: Any, message: Any) -> dict[str, Tensor]:
        raise ValueError("Nothing was sent.")


@pytest.mark.parametrize(
    "settings", [correlated(), GuardSettings("pruning", {"ratio": 0.9, "error_feedback": True})]
)
def test_a_message_that_is_not_sent_leaves_the_state_as_it_was(settings: GuardSettings) -> None:
    received, update = {"w": torch.zeros(50)}, {"w": 1e-3 * torch.rand(50)}
    sender, guard = Guard(settings), Unsent(settings)
    sender.protect(received, update)
    guard.state = sender.state
    before = guard.remembered()
    with pytest.raises(ValueError, match="Nothing was sent"):
        guard.protect(received, update)
    after = guard.remembered()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    sender.protect(received, update)
    assert any(not torch.equal(sender.remembered()[name], t) for name, t in before.items())


def broken(kind: str, received: dict[str, Tensor]) -> dict[str, Tensor]:
    """An update that would be refused, for what is in it."""
    trained = {name: tensor + 1e-3 * torch.rand(tensor.shape) for name, tensor in received.items()}
    if kind == "not finite":
        trained["w"][3] = math.nan
    if kind == "a table's rows":
        trained["rows"][:2] = received["rows"][:2]
    if kind == "too small":
        trained = {name: 1e-3 * tensor for name, tensor in received.items()}
    if kind == "half precision":
        trained["w"] = trained["w"].bfloat16().float()
    if kind == "one layer unchanged":
        trained["rows"] = received["rows"].clone()
    if kind == "unchanged":
        trained = {name: tensor.clone() for name, tensor in received.items()}
    return trained


BROKEN = [
    "not finite", "a table's rows", "too small", "half precision", "one layer unchanged",
    "unchanged",
]  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_no_update_decides_whether_its_message_with_correlated_noise_is_sent(kind: str) -> None:
    """Its noise is that of the plan, and of the same entries as all others'."""
    noise = {"correlated": True, "scale": 3.0, "clip": 0.1, "messages": 3}
    guard = Guard(GuardSettings("dp_sgd", noise))
    received = {"w": torch.rand(500), "rows": torch.rand(30, 20)}
    guard.protect(received, broken("none", received))
    for number in (1, 2):
        assert guard.position == number
        sent = guard.protect(received, broken(kind, received))
        for name in received:
            assert sent[name].isfinite().all()
            assert float((sent[name] - received[name]).std()) > 1.0
    assert guard.position == 3
    with pytest.raises(ValueError, match="is missing"):  # the app's doing
        Guard(GuardSettings("dp_sgd", noise)).protect(received, {"w": received["w"]})


@pytest.mark.parametrize("kind", BROKEN)
def test_a_first_update_is_refused_for_what_a_setting_mends(kind: str) -> None:
    """Nothing has left yet; of what is not finite there is no setting."""
    guard = Guard(GuardSettings("dp_sgd", {"correlated": True, "scale": 3.0, "messages": 3}))
    received = {"w": torch.rand(500), "rows": torch.rand(30, 20)}
    update = broken(kind, received)
    if kind in ("not finite", "unchanged"):
        assert guard.protect(received, update).keys() == received.keys()
        return
    with pytest.raises(ValueError, match="Nothing was sent"):
        guard.protect(received, update)
    assert guard.position == 0


def test_without_correlated_noise_what_is_not_finite_is_refused() -> None:
    received = {"w": torch.rand(500), "rows": torch.rand(30, 20)}
    guard = Guard(GuardSettings(settings={"scale": 0.1}))
    with pytest.raises(FloatingPointError, match="'w' is not finite"):
        guard.protect(received, broken("not finite", received))


@pytest.mark.parametrize(("entries", "is_chance"), [(32, True), (33, False)])
def test_of_a_small_tensor_33_entries_on_a_grid_are_no_chance(
    entries: int, is_chance: bool
) -> None:
    start = torch.zeros(entries)
    change = torch.linspace(0.1, 1.0, entries).bfloat16().float()
    if is_chance:
        _check_grid("w", start, change)
    else:
        with pytest.raises(ValueError, match="was trained in"):
            _check_grid("w", start, change)


def test_correlated_noise_says_what_it_protects(caplog: pytest.LogCaptureFixture) -> None:
    logging.enable_propagation()
    Guard(correlated(participations=2, min_separation=3, messages=7))
    assert f"ε = {gaussian_epsilon(1.5, 1e-5):.4g}" in caplog.text
    assert "no protection to speak of" not in caplog.text
    assert "A round that is repeated is one more update of its data" in caplog.text
    Guard(correlated(scale=0.01))
    assert "(no protection to speak of: an ε above 10" in caplog.text
    with pytest.raises(ValueError, match="messages"):
        Guard(correlated(messages=None))


def test_rows_of_an_update_are_not_clipped() -> None:
    settings = {
        "per_sample": True,
        "correlated": True,
        "noise_multiplier": 1.0,
        "messages": 3,
    }
    with pytest.raises(ValueError, match="per_sample clips single rows"):
        Guard(GuardSettings("dp_sgd", settings))
