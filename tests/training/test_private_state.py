"""A rank's private file: its owner's alone, and what was written or an error that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import small_convolution
from safetensors.torch import load_file, save_file

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Defense
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.private_state import load_private_state, save_private_state

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Defense]:
    defense = make_defense("optimal_noise", refresh_every=3, num_probes=1)
    defense(GradientMap(*small_convolution()))
    account = FisherAccountant()
    save_private_state(str(tmp_path), 0, [defense], account)
    return tmp_path / "gradguard_private_rank0.safetensors", defense


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_it(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_private_state(str(tmp_path), 0, [make_defense("none")], None)
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()  # nothing else is left there
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_was_written_is_restored(saved: tuple[Path, Defense]) -> None:
    path, defense = saved
    other = make_defense("optimal_noise", refresh_every=3, num_probes=1)
    load_private_state(str(path.parent), 0, [other], FisherAccountant(), CPU)
    assert other.state_dict().keys() == defense.state_dict().keys()
    for name, tensor in defense.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize("damage", ["cut off", "empty", "a bit", "a name", "no checksum"])
def test_a_damaged_file_names_itself(damage: str, saved: tuple[Path, Defense]) -> None:
    path, defense = saved
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
        load_private_state(str(path.parent), 0, [defense], FisherAccountant(), CPU)
