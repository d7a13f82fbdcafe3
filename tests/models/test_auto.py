"""Transformers' Auto classes know the package's models as soon as it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_gradguard.auto import ROOMS
from hf_gradguard.models import MODELS, LeakyConvNetConfig, LeakyConvNetForImageClassification
from hf_gradguard.networks import ImageEvaluationNetwork, ImageEvaluationNetworkConfig, save_network
from hf_gradguard.networks import configuration as networks

LOAD = """
from transformers import AutoModel, AutoModelForImageClassification, AutoConfig
loaded = AutoModelForImageClassification.from_pretrained("classifier", trust_remote_code=False)
network = AutoModel.from_pretrained("network", trust_remote_code=False)
print(type(loaded).__name__, loaded.config.hidden_size, type(network).__name__)
config = AutoConfig.for_model("gradguard_leakage_lenet", num_labels=7)
print(type(config).__name__, config.num_labels)
"""
ORDERS = {
    "first": "import hf_gradguard\n",
    "second": "from transformers import AutoModel\nimport hf_gradguard\n",
    "trainer": "from hf_gradguard import GradGuardTrainer\n",
    "rooms": "import hf_gradguard.networks, hf_gradguard.models\n",
}
# Forked from one process that has imported what both import of others, which takes longest.
FORKS = """
import datasets, os, sys, torch._dynamo, torch.distributed.tensor
assert not {"transformers", "hf_gradguard"} & set(sys.modules)
for number, code in enumerate(sys.argv[1:]):
    if not os.fork():
        sys.stdout = open(f"said{number}", "w")
        sys.stderr = open(f"errors{number}", "w")
        exec(code)
        sys.exit()
    os.wait()
"""
SAID = "LeakyConvNetForImageClassification 5 ImageEvaluationNetwork\nLeakageLeNetConfig 7\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    config = LeakyConvNetConfig(image_size=8, channels=[2, 2], hidden_size=5)
    LeakyConvNetForImageClassification(config).save_pretrained(folder / "classifier")
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[2]))
    save_network(network, folder / "network")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def forked(folder: Path) -> Path:
    done = run(folder, FORKS, *(code + LOAD for code in ORDERS.values()))
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_the_import_brings_none_of_what_is_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = run(tmp_path, f"import sys, hf_gradguard\nprint({heavy})")
    assert done.stdout == "set()\n", done.stderr[-2000:]


@pytest.mark.parametrize("order", ORDERS)
def test_models_load_in_every_order(forked: Path, order: str) -> None:
    number = list(ORDERS).index(order)
    said, errors = (forked / f"{what}{number}" for what in ("said", "errors"))
    assert said.read_text() == SAID, errors.read_text()[-2000:]


def test_every_model_is_announced() -> None:
    found = {
        one.model_type: "networks"
        for one in (networks.ImageEvaluationNetworkConfig, networks.TextEvaluationNetworkConfig)
    }
    assert dict.fromkeys(MODELS, "models") | found == ROOMS
