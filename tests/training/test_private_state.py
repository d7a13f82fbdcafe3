"""A rank's private file: its owner's alone, and what was written or an error that names it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from helpers import small_convolution
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.gradient_map.views import PrecomputedGradient
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.checkpoints import private_state
from hf_gradguard.training.checkpoints.private_state import load_private_state, save_private_state
from hf_gradguard.training.message import Client

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Client]:
    defense = make_defense("optimal_noise", refresh_every=3, num_probes=1)
    _, state = defense.apply(GradientMap(*small_convolution()), {})
    client, account = Client(defense, state), FisherAccountant()
    save_private_state(str(tmp_path), 0, [client], account)
    return tmp_path / "gradguard_private_rank0.safetensors", client


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_it(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_private_state(str(tmp_path), 0, [Client(make_defense("none"))], None)
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()  # nothing else is left there
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_was_written_is_restored(saved: tuple[Path, Client]) -> None:
    path, client = saved
    other = Client(make_defense("optimal_noise", refresh_every=3, num_probes=1))
    load_private_state(str(path.parent), 0, [other], FisherAccountant(), CPU)
    tensors, other_tensors = (c.defense.flatten(c.state) for c in (client, other))
    assert other_tensors.keys() == tensors.keys() != set()
    for name, tensor in tensors.items():
        assert torch.equal(other_tensors[name], tensor)


@pytest.mark.parametrize("damage", ["cut off", "empty", "a bit", "a name", "no checksum"])
def test_a_damaged_file_names_itself(damage: str, saved: tuple[Path, Client]) -> None:
    path, client = saved
    content = bytearray(path.read_bytes())
    state = load_file(path)
    if damage == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "a bit":
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        name = next(iter(state))
        renamed = {"0/other" if key == name else key: tensor for key, tensor in state.items()}
        save_file(renamed if damage == "a name" else state, path)
    message = r"gradguard_private_rank0\.safetensors is cut off or was changed.*earlier checkpoint"
    with pytest.raises(ValueError, match=message):
        load_private_state(str(path.parent), 0, [client], FisherAccountant(), CPU)


def remembering(count: int) -> list[Client]:
    """Clients with error feedback; the k-th has left out k + 1."""
    defense = make_defense("pruning", ratio=0.5, error_feedback=True)
    states = [
        defense.apply(PrecomputedGradient({"w": torch.full((4,), k + 1.0)}), {})[1]
        for k in range(count)
    ]
    return [Client(defense, state, "n") for state in states]


def left_out(clients: list[Client]) -> list[float]:
    tensors = [client.defense.flatten(client.state) for client in clients]
    return [float(state.get("error.w", torch.zeros(1)).max()) for state in tensors]


def without_metadata(path: Path, *names: str) -> None:
    """As older versions wrote it."""
    with safe_open(path, "pt") as file:
        about = {key: value for key, value in file.metadata().items() if key not in names}
    save_file(load_file(path), path, about)


OLDER = ("gradguard_clients", "gradguard_ranks")
OLDEST = (*OLDER, "gradguard_parameters")


@pytest.mark.parametrize("lacking", [(), OLDER, OLDEST])
@pytest.mark.parametrize("count", [2, 4, 5])
def test_the_state_of_other_clients_is_refused(
    tmp_path: Path, count: int, lacking: tuple[str, ...]
) -> None:
    save_private_state(str(tmp_path), 0, remembering(4), None)
    without_metadata(tmp_path / "gradguard_private_rank0.safetensors", *lacking)
    clients = remembering(count)[::-1]
    before = left_out(clients)
    if count == 4:
        load_private_state(str(tmp_path), 0, clients, None, CPU)
        names = {client.parameters for client in clients}
        assert names == {"-" if lacking == OLDEST else "n"}
        assert left_out(clients) == before[::-1]
        return
    with pytest.raises(ValueError, match=rf"of 4 client.*hosts {count}.*num_clients.*begin anew"):
        load_private_state(str(tmp_path), 0, clients, None, CPU)
    assert left_out(clients) == before


def test_clients_that_shared_nothing_yet_are_counted(tmp_path: Path) -> None:
    fresh = Client(make_defense("pruning", ratio=0.5, error_feedback=True))
    save_private_state(str(tmp_path), 0, [*remembering(1), fresh], None)
    clients = remembering(2)
    load_private_state(str(tmp_path), 0, clients, None, CPU)
    assert left_out(clients) == [1.0, 0.0]


def test_where_nothing_is_remembered_clients_may_be_others(tmp_path: Path) -> None:
    save_private_state(str(tmp_path), 0, [Client(make_defense("gaussian_noise"))] * 4, None)
    load_private_state(str(tmp_path), 0, [Client(make_defense("gaussian_noise"))] * 2, None, CPU)


@pytest.mark.parametrize("case", ["no file", "other ranks"])
def test_defenses_that_begin_anew_forget_an_earlier_training(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if case == "other ranks":
        save_private_state(str(tmp_path), 0, remembering(2), None)
        monkeypatch.setattr(private_state, "_ranks", lambda: 2)
    clients = remembering(2)
    assert left_out(clients) == [1.0, 2.0]
    with caplog.at_level(logging.WARNING):
        load_private_state(str(tmp_path), 0, clients, None, CPU)
    assert left_out(clients) == [0.0, 0.0]
    says = {"no file": "no defense state of this rank", "other ranks": "saved by 1 rank(s), not 2"}
    assert says[case] in caplog.text


def test_an_account_of_other_ranks_is_refused(
    saved: tuple[Path, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_state, "_ranks", lambda: 2)
    with pytest.raises(ValueError, match=r"by 1 rank.*now there are 2.*without an accountant"):
        load_private_state(str(saved[0].parent), 0, [saved[1]], FisherAccountant(), CPU)
