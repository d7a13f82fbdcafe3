"""Pushing evaluation networks and loading them back, against a Hub on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub import USER, FakeHub

from hf_gradguard.networks import ImageEvaluationNetwork, ImageEvaluationNetworkConfig, save_network
from hf_gradguard.networks.publish import network_card

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = ImageEvaluationNetworkConfig(num_channels=1, image_size=8, filters=[4, 4])
    network = ImageEvaluationNetwork(config)
    path = tmp_path / "digits-network"
    save_network(network, path)
    network_card(network, "digits").save(path / "README.md")
    return path


def run(hub: FakeHub, home: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **hub.environment(home), **environment}
    return subprocess.run([sys.executable, *command], env=settings, capture_output=True, text=True, timeout=120)


LOAD = """
import sys, torch
from hf_gradguard.networks import load_network
network = load_network(sys.argv[1])
print(type(network).__name__, float(network.noise_ratio(torch.full((1, 1, 8, 8), 0.3))))
"""


def test_pushed_by_the_recipe_and_loaded_back(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"not to be pushed")
    pushed = run(hub, tmp_path / "home", "recipes/publish_evalnets.py", "lab", str(folder))
    assert pushed.returncode == 0, pushed.stderr
    assert f"{hub.endpoint}/lab/digits-network/commit/" in pushed.stdout
    assert hub.commits == [["README.md", "config.json", "model.safetensors"]]
    for name, content in hub.repositories["lab/digits-network"].items():
        assert content == (folder / name).read_bytes()
    assert any(r.startswith("PUT /lfs/objects/") for r in hub.requests)  # the weights went as a large file

    here = run(hub, tmp_path / "other", "-c", LOAD, str(folder))
    there = run(hub, tmp_path / "home", "-c", LOAD, "lab/digits-network")
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    offline = run(hub, tmp_path / "home", "-c", LOAD, "lab/digits-network", HF_HUB_OFFLINE="1")
    assert offline.stdout == here.stdout  # from the cache


def test_pushed_by_the_command_line(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    command = ("-m", "hf_gradguard.cli", "evalnet", "push", str(folder), "digits", "--private")
    code = "import sys; from hf_gradguard.cli import main; sys.exit(main(sys.argv[1:]))"
    pushed = run(hub, tmp_path, "-c", code, *command[2:])
    assert pushed.returncode == 0, pushed.stderr
    assert hub.private == {f"{USER}/digits": True}
    again = run(hub, tmp_path, "-c", code, *command[2:])  # the repository is there already
    assert again.returncode == 0, again.stderr


def test_what_cannot_be_loaded_is_not_pushed(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"junk")
    pushed = run(hub, tmp_path, "recipes/publish_evalnets.py", "lab", str(folder))
    assert pushed.returncode != 0
    assert "corrupted" in pushed.stderr
    assert hub.requests == []


def test_wrong_token_and_missing_repository(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    code = "import sys; from hf_gradguard.cli import main; sys.exit(main(sys.argv[1:]))"
    pushed = run(hub, tmp_path, "-c", code, "evalnet", "push", str(folder), "digits", HF_TOKEN="hf_wrong")
    assert pushed.returncode == 1
    assert "gradguard evalnet push:" in pushed.stderr
    assert "Traceback" not in pushed.stderr
    assert hub.repositories == {}
    loaded = run(hub, tmp_path, "-c", LOAD, "lab/nothing")
    assert loaded.returncode != 0
    assert "There is no evaluation network 'lab/nothing'" in loaded.stderr


def test_only_configuration_and_weights_are_fetched(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["lab/mixed"], hub.private["lab/mixed"] = (
        {**files, "pytorch_model.bin": b"\x80", "code.py": b"1"},
        False,
    )
    loaded = run(hub, tmp_path, "-c", LOAD, "lab/mixed")
    assert loaded.returncode == 0, loaded.stderr
    fetched = {request.split("/")[-1] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"config.json", "model.safetensors"}

    del hub.repositories["lab/mixed"]["model.safetensors"]
    loaded = run(hub, tmp_path / "fresh", "-c", LOAD, "lab/mixed")
    assert loaded.returncode != 0
    assert "no model.safetensors" in loaded.stderr
