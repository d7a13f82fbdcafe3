"""The example of hospitals by `accelerate launch`: a rank trains on each row of its own file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_demo_encoder
from launcher import environment
from transformers import AutoModelForSequenceClassification

from hf_gradguard import private_head
from hf_gradguard.demo import sentences

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.distributed


def test_each_row_of_each_site_is_in_the_message(tmp_path: Path) -> None:
    """One message of all rows, with next to no noise: the step is by all rows' mean gradient, of
    which each is clipped from 0.5 √2 to 0.3.
    """
    rows = [(text, ["bad", "good"][label]) for text, label in sentences("train")]
    sites = [rows[:16], rows[100:116]]
    for number, own in enumerate(sites):
        lines = ["text\tlabel", *("\t".join(row) for row in own)]
        (tmp_path / f"{number}.tsv").write_text("\n".join(lines))
    save_demo_encoder(tmp_path / "encoder")
    public = [text for text, _ in rows[200:300]]
    head = private_head(str(tmp_path / "encoder"), public, labels=["bad", "good"], num_rows=160)
    head.save_pretrained(tmp_path / "head")

    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    flags = ["--head", str(tmp_path / "head"), "--output", str(tmp_path / "out"), "--use_cpu"]
    flags += ["--noise_multiplier", "1e-6", "--data", *(str(tmp_path / f"{n}.tsv") for n in (0, 1))]
    places = os.pathsep.join([str(ROOT / "examples/hospitals"), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *launch, "--multi_gpu", "-m", "hospitals.ranks", *flags],
        cwd=tmp_path, env=environment() | {"PYTHONPATH": places}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]

    features = head.features_of([text for own in sites for text, _ in own])
    labels = torch.tensor([int(label == "good") for own in sites for _, label in own])
    head(features=features, labels=labels).loss.backward()
    for number in (1, 2):
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"out/site-{number}")
        rate = 0.8 * 16 / (0.3 * 0.3)
        expected = -rate * 0.3 / 0.5**0.5 * head.head.weight.grad  # type: ignore[operator]
        torch.testing.assert_close(saved.head.weight.detach(), expected, rtol=1e-3, atol=1e-3)
