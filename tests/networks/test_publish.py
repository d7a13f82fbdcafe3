"""Pushing evaluation networks and loading them back, against a Hub on the loopback interface.

`huggingface_hub` reads its settings when it is imported, so everything runs in another process with
HF_ENDPOINT set. One process takes all steps: starting one costs seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import USER, FakeHub

from hf_gradguard.networks import (
    ImageEvaluationNetwork,
    ImageEvaluationNetworkConfig,
    load_network,
    save_network,
)
from hf_gradguard.networks.loading import network_card

ROOT = Path(__file__).resolve().parents[2]
FILES = ["README.md", "config.json", "model.safetensors"]

# Runs [["cli" | "load" | "token", *arguments], ...] and prints what each printed,
# returned or raised.
STEPS = """
import contextlib, io, json, os, sys, torch
from hf_gradguard.cli import main
from hf_gradguard.networks import load_network

def load(name):
    return float(load_network(name).noise_ratio(torch.full((1, 1, 8, 8), 0.3)))

def token(value):
    os.environ["HF_TOKEN"] = value

def cli(*arguments):
    return main(list(arguments))

actions = {"load": load, "token": token, "cli": cli}
results = []
for action, *arguments in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            value = actions[action](*arguments)
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
    results.append([value, text.getvalue()])
print("RESULTS" + json.dumps(results))
"""


def run(hub: FakeHub, home: Path, *steps: list[str], **environment: str) -> list[Any]:
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **hub.environment(home),
        **environment,
    }
    command = [sys.executable, "-c", STEPS, json.dumps(steps)]
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


def make_folder(path: Path) -> Path:
    torch.manual_seed(0)
    network = ImageEvaluationNetwork(
        ImageEvaluationNetworkConfig(num_channels=1, image_size=8, filters=[4, 4])
    )
    save_network(network, path)
    network_card(network, "digits").save(path / "README.md")
    return path


@pytest.mark.long
def test_push_and_load_back(hub: FakeHub, tmp_path: Path) -> None:
    folder, home = make_folder(tmp_path / "digits-network"), tmp_path / "home"
    junk = make_folder(tmp_path / "junk")
    (junk / "model.safetensors").write_bytes(b"junk")
    (folder / "optimizer.pt").write_bytes(b"not to be pushed")
    content = {name: (folder / name).read_bytes() for name in FILES}
    # Repositories that others filled: one with more than is needed, one with pickled weights alone.
    hub.add("lab/mixed", {**content, "pytorch_model.bin": b"\x80", "code.py": b"1"})
    hub.add("lab/pickled", {"config.json": content["config.json"], "pytorch_model.bin": b"\x80"})

    push = ["cli", "evalnet", "push", str(folder), "digits", "--private"]
    pushed, loaded, mixed, pickled, missing, first, again, refused, _, denied = run(
        hub,
        home,
        ["cli", "evalnet", "push", str(folder), "lab/digits-network"],
        ["load", "lab/digits-network"],
        ["load", "lab/mixed"],
        ["load", "lab/pickled"],
        ["load", "lab/nothing"],
        push,
        push,
        ["cli", "evalnet", "push", str(junk), "lab/junk"],
        ["token", "hf_wrong"],
        ["cli", "evalnet", "push", str(folder), "lab/denied"],
    )
    assert f"{hub.endpoint}/lab/digits-network/commit/" in pushed[1]
    assert hub.commits[0] == FILES
    assert hub.repositories["lab/digits-network"] == content
    assert any(
        request.startswith("PUT /lfs/objects/") for request in hub.requests
    )  # the weights went as a large file

    here = float(load_network(folder).noise_ratio(torch.full((1, 1, 8, 8), 0.3)))
    assert loaded[0] == mixed[0] == pytest.approx(here, abs=1e-6)
    fetched = {request.split("/")[-1] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"config.json", "model.safetensors"}
    assert "no model.safetensors" in pickled[0]
    assert "There is no evaluation network 'lab/nothing'" in missing[0]

    assert first[0] == again[0] == 0
    assert hub.private[f"{USER}/digits"]
    assert not hub.private["lab/digits-network"]
    assert "corrupted" in refused[1]
    assert "lab/junk" not in hub.repositories
    assert denied[0] == "SystemExit: 1"
    assert "gradguard evalnet push:" in denied[1]
    assert "lab/denied" not in hub.repositories

    offline, unknown = run(
        hub, home, ["load", "lab/digits-network"], ["load", "lab/other"], HF_HUB_OFFLINE="1"
    )
    assert offline[0] == loaded[0]  # from the cache
    assert "There is no evaluation network 'lab/other'" in unknown[0]
