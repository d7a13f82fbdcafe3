"""Transformers' Auto classes know the evaluation networks once `hf_gradguard.networks` is imported,
and the papers' networks once their recipe is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from hf_gradguard.networks import ImageEvaluationNetwork, ImageEvaluationNetworkConfig, save_network
from hf_gradguard.networks import configuration as networks
from recipes.small_networks import MODELS, LeakyConvNetConfig, LeakyConvNetForImageClassification


def test_the_import_brings_none_of_what_is_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, hf_gradguard\nprint({heavy})"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "set()\n", done.stderr[-2000:]


def test_no_import_hook_is_left() -> None:
    assert not [f for f in sys.meta_path if type(f).__module__.startswith("hf_gradguard")]


def test_networks_load_by_their_type(tmp_path: Path) -> None:
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(filters=[2]))
    save_network(network, tmp_path / "network")
    classifier = LeakyConvNetForImageClassification(
        LeakyConvNetConfig(image_size=8, channels=[2, 2], hidden_size=5)
    )
    classifier.save_pretrained(tmp_path / "classifier")
    loaded = AutoModel.from_pretrained(tmp_path / "network", trust_remote_code=False)
    assert isinstance(loaded, ImageEvaluationNetwork)
    loaded = AutoModelForImageClassification.from_pretrained(
        tmp_path / "classifier", trust_remote_code=False
    )
    assert isinstance(loaded, LeakyConvNetForImageClassification)
    assert loaded.config.hidden_size == 5


@pytest.mark.parametrize("model_type", MODELS)
def test_a_configuration_is_made_by_its_type(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, num_labels=7)
    assert type(config) is MODELS[model_type].config_class
    assert config.num_labels == 7


def test_every_network_is_registered() -> None:
    own = [kind for kind in vars(networks).values() if getattr(kind, "model_type", None)]
    assert {type(AutoConfig.for_model(kind.model_type)) for kind in own} == set(own)
