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
FIRST = "import sys\nimport hf_gradguard\nassert 'torch' not in sys.modules\n"
SAID = "LeakyConvNetForImageClassification 5 ImageEvaluationNetwork\nLeakageLeNetConfig 7\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LeakyConvNetConfig(image_size=8, channels=[2, 2], hidden_size=5)
    LeakyConvNetForImageClassification(config).save_pretrained(tmp_path / "classifier")
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[2]))
    save_network(network, tmp_path / "network")
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        FIRST + LOAD,
        "from transformers import AutoModel\nimport hf_gradguard\n" + LOAD,
        "from hf_gradguard import GradGuardTrainer\n" + LOAD,
        "import hf_gradguard.networks, hf_gradguard.models\n" + LOAD,
    ],
    ids=["first", "second", "trainer", "rooms"],
)
def test_models_load_after_the_import(folder: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout == SAID, done.stderr[-2000:]


def test_every_model_is_announced() -> None:
    found = {
        one.model_type: "networks"
        for one in (networks.ImageEvaluationNetworkConfig, networks.TextEvaluationNetworkConfig)
    }
    assert dict.fromkeys(MODELS, "models") | found == ROOMS
