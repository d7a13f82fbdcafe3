"""Loading of evaluation networks: packaged ones, folders, and the Hub.

What a network says decides what is shared, and it may come from anywhere. So only two files of a
folder are read, config.json as plain JSON and the weights from safetensors, and nothing is built
that is larger than a network has to be.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from .configuration import ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig
from .image_network import ImageEvaluationNetwork
from .judging import NetworkMetrics
from .text_network import TextEvaluationNetwork

EvaluationNetwork = ImageEvaluationNetwork | TextEvaluationNetwork
EvaluationNetworkConfig = ImageEvaluationNetworkConfig | TextEvaluationNetworkConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_CONFIGS: dict[str, type[EvaluationNetworkConfig]] = {
    config.model_type: config
    for config in (ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig)
}
_GENERAL = {field.name for field in fields(PreTrainedConfig)}
_MOST_CONFIG = _MOST_HEADER = 2**20  # bytes
# In a wheel the cards lie inside the package; in a checkout, beside it.
_PACKAGE = Path(__file__).resolve().parents[1]
_CARDS = (_PACKAGE / "model_cards", _PACKAGE.parent / "model_cards")


def load_network(
    name_or_path: str | Path, *, revision: str | None = None, sha256: str | None = None
) -> EvaluationNetwork:
    """Load an evaluation network, in float32 and eval mode, frozen.

    Its `revision` (the Hub's commit, or `None`) and `sha256` (of model.safetensors) say what was
    loaded.

    Args:
        name_or_path: A packaged network's name (see `packaged_networks`), a local folder, or a Hub
            name.
        revision: A branch, tag or commit of the Hub repository. Only a commit never changes.
        sha256: The hash that `sha256sum model.safetensors` prints, and the Hub's page shows.

    Raises:
        ValueError: If what is there is no evaluation network, has another `sha256`, is larger than
            any has to be, or has weights that do not fit its configuration or are not finite; also
            if a `revision` is given for what is not on the Hub.
        OSError: If there is nothing of that name, or the weights are missing, corrupted or not in
            safetensors.

    Example:
        >>> network = load_network("image-evaluation-network-32")
        >>> network.noise_ratio(image_batch["pixel_values"]).shape
        torch.Size([2])
        >>> load_network("image-evaluation-network-32", sha256=network.sha256).sha256[:6]
        '4aec0d'
    """
    folder, commit = _find(name_or_path, revision)
    config = _read_config(folder, name_or_path)
    _check_weights(folder, name_or_path, config)
    digest = check_digest(name_or_path, _digest(folder / WEIGHTS), sha256)
    network = _build(config, _read_weights(folder / WEIGHTS), name_or_path)
    # The name as given: cards and logs say it, and a cache's path may be private.
    network.name_or_path = str(name_or_path)
    network.revision, network.sha256 = commit, digest
    return network.eval().requires_grad_(False)


def check_digest(name: str | Path, digest: str | None, sha256: str | None) -> str | None:
    """Return `digest`, unless another hash was asked for.

    Args:
        name: The network's name, for the error.
        digest: The hash of its weights.
        sha256: The hash that was asked for, if any.

    Raises:
        ValueError: If the hashes differ.

    Example:
        >>> check_digest("me/network", "ab" * 32, "ab" * 32)[:4]
        'abab'
    """
    if sha256 is not None and sha256.lower() != digest:
        raise ValueError(
            f"{name} is not the evaluation network that was asked for: the sha256 of {WEIGHTS} is "
            f"{digest or 'unknown'}, not {sha256}. Somebody changed it, or the pin is of another "
            "one. Compare with its publisher's before you change the pin."
        )
    return digest


def save_network(network: EvaluationNetwork, folder: str | Path) -> None:
    """Save a network with its weights in half precision, to be loaded in float32 again.

    Example:
        >>> save_network(load_network("image-evaluation-network-32"), "network")
        >>> load_network("network").config.size
        (32, 32)
    """
    half = {
        name: (tensor.half() if torch.is_floating_point(tensor) else tensor).contiguous()
        for name, tensor in network.state_dict().items()
    }
    network.save_pretrained(folder, state_dict=half)


def packaged_networks() -> dict[str, EvaluationNetworkConfig]:
    """Return the networks that come with the package, each with its configuration.

    Example:
        >>> sorted(packaged_networks())
        ['image-evaluation-network-32', 'text-evaluation-network-minilm-l6']
    """
    networks: dict[str, EvaluationNetworkConfig] = {}
    for cards in _CARDS:
        if not cards.is_dir():
            continue
        for folder in sorted(cards.iterdir()):
            if (folder / "config.json").is_file() and folder.name not in networks:
                networks[folder.name] = _read_config(folder, folder.name)
    return networks


def packaged_image_network(num_channels: int, image_size: tuple[int, int]) -> str | None:
    """Return the name of the packaged network that judges such images unchanged, or `None`.

    Example:
        >>> packaged_image_network(3, (32, 32)), packaged_image_network(3, (224, 224))
        ('image-evaluation-network-32', None)
    """
    for name, config in packaged_networks().items():
        if isinstance(config, ImageEvaluationNetworkConfig) and (
            (config.num_channels, *config.size) == (num_channels, *image_size)
        ):
            return name
    return None


def packaged_text_network(fingerprint: str) -> str | None:
    """Return the name of the packaged network for this `embedding_fingerprint`, or `None`.

    Example:
        >>> config = packaged_networks()["text-evaluation-network-minilm-l6"]
        >>> packaged_text_network(config.embedding_fingerprint)
        'text-evaluation-network-minilm-l6'
    """
    for name, config in packaged_networks().items():
        if (
            isinstance(config, TextEvaluationNetworkConfig)
            and config.embedding_fingerprint == fingerprint
        ):
            return name
    return None


def _find(name_or_path: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """Return the network's folder, and the commit if it is the Hub's."""
    if folder := _find_here(name_or_path):
        if revision is not None:
            raise ValueError(
                f"{name_or_path} is on this machine, and has no revision. Leave revision out, and "
                "pin the weights by sha256."
            )
        return folder, None
    name = str(name_or_path)
    try:
        # Two files: nothing that could run code is ever fetched.
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        StrictDataclassError,
        OSError,
    ) as error:
        packaged = ", ".join(packaged_networks()) or "none"
        raise OSError(
            f"There is no evaluation network {name!r}: no packaged one (they are: {packaged}), no "
            f"folder, and the Hub gave none: {str(error).splitlines()[0]}"
        ) from error
    return folder, folder.name


def _find_here(name_or_path: str | Path) -> Path | None:
    name = str(name_or_path)
    for cards in _CARDS:
        if "/" not in name and (cards / name / "config.json").is_file():
            return cards / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise OSError(f"{name} is a file. Give the folder that holds {CONFIG} and {WEIGHTS}.")
    return None


def _read_config(folder: Path, name: str | Path) -> EvaluationNetworkConfig:
    """Return the configuration in a folder, made only of entries that evaluation networks have.

    A configuration of Transformers knows many more, some of which load or build things.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{name} has no {CONFIG}, so it is no evaluation network.")
    if path.stat().st_size > _MOST_CONFIG:
        raise ValueError(f"{name} is no evaluation network: its {CONFIG} is over 1 MiB.")
    try:
        entries: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is no evaluation network: {CONFIG}: {error}") from error
    kind = _CONFIGS.get(str(entries.get("model_type")))
    if kind is None:
        raise ValueError(
            f"{name} is a {entries.get('model_type')!r} model, no evaluation network. "
            "Train one with `gradguard evalnet train`."
        )
    settings = {field.name for field in fields(kind)} - _GENERAL
    try:
        return kind(**{key: value for key, value in entries.items() if key in settings})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{name} is no evaluation network: {error}") from error


def _check_weights(folder: Path, name: str | Path, config: EvaluationNetworkConfig) -> None:
    path = folder / WEIGHTS
    if not path.is_file():
        suffixes = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in suffixes)
        if pickled:
            raise OSError(
                f"{name} holds {', '.join(pickled)} but no {WEIGHTS}. Pickled weights can run code "
                "when they are read, so they are refused. Load them where you trust them and save "
                "with `save_pretrained`."
            )
        raise OSError(
            f"{name} has no {WEIGHTS}. Get the folder again, or train with `gradguard evalnet "
            "train`."
        )
    most = 8 * config.num_entries + _MOST_HEADER
    if path.stat().st_size > most:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and the network that {CONFIG} describes "
            f"has at most {most:,}: it does not fit, and is not read."
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return weights in float32.

    Second derivatives of a half-precision network would be noise.
    """
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise OSError(
            f"{path} is corrupted: {error}. Get it again, or train with `gradguard evalnet train`."
        ) from error
    return {name: tensor.float() for name, tensor in weights.items()}


def _build(
    config: EvaluationNetworkConfig, weights: dict[str, Tensor], name: str | Path
) -> EvaluationNetwork:
    judges_texts = isinstance(config, TextEvaluationNetworkConfig)
    kind = TextEvaluationNetwork if judges_texts else ImageEvaluationNetwork
    with torch.device("meta"):  # draws no starting weights
        network: EvaluationNetwork = kind(config)
    try:
        network.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"The weights of {name} do not fit its {CONFIG}: {problem}") from error
    for key, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{key} of {name} holds NaN or infinity. Get the file again, or train the network."
            )
    return network


_FILES = [CONFIG, WEIGHTS, "README.md"]


def push_network(
    folder: str | Path, repo_id: str, *, private: bool = False, message: str | None = None
) -> str:
    """Push a network's folder to a Hub repository in one commit, and create that if needed.

    The folder is loaded first: what `load_network` refuses is not pushed. Only config.json,
    README.md and model.safetensors are pushed.

    Args:
        folder: The folder of the network.
        repo_id: "name" or "organization/name".
        private: Whether a repository created now is private.
        message: The message of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: If `load_network` refuses what is there.
        OSError: If `folder` is no folder, or `load_network` cannot read it. Hub errors pass
            through.

    Example:
        >>> push_network("no-such-folder", "my-organization/network")
        Traceback (most recent call last):
        OSError: no-such-folder is no folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise OSError(f"{folder} is no folder.")
    load_network(path.resolve())
    api = HfApi()
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    message = message or f"Upload evaluation network {path.resolve().name}"
    commit = api.upload_folder(
        repo_id=repo.repo_id, folder_path=path, allow_patterns=_FILES, commit_message=message
    )
    return str(commit.commit_url)


def network_card(
    network: EvaluationNetwork, dataset: str, metrics: NetworkMetrics | None = None
) -> ModelCard:
    """Return a short model card: what the network predicts, how it was trained, how to load it.

    Args:
        network: The network.
        dataset: The data that it was trained on, as people know it.
        metrics: The network's metrics on held-out data of the same kind.

    Example:
        >>> card = network_card(load_network("image-evaluation-network-32"), dataset="CIFAR-10")
        >>> "- Trained on: CIFAR-10" in card.text
        True
    """
    config = network.config
    judges_texts = isinstance(config, TextEvaluationNetworkConfig)
    if isinstance(config, TextEvaluationNetworkConfig):
        judged = (
            f"token embeddings of {config.base_model or 'one model'}, `(B, T, "
            f"{config.embedding_size})`, and of no other embedding matrix (fingerprint "
            f"`{config.embedding_fingerprint[:12]}`)"
        )
        noise = "random tokens"
    else:
        shape = ", ".join(map(str, (config.num_channels, *config.size)))
        judged = f"images `(B, {shape})` with pixels in [0, 1]"
        noise = "uniform noise"
    base = config.base_model or None if judges_texts else None
    tags = ["gradguard", "evaluation-network"]
    data = ModelCardData(library_name="hf-gradguard", tags=tags, base_model=base)
    judged_by = "Not judged on held-out data."
    if metrics is not None:
        judged_by = metrics.describe("text" if judges_texts else "image")
        data.model_name = "evaluation-network"
        data.eval_results = eval_results(
            metrics, task_name="share of noise", dataset_type="held-out", dataset_name=dataset
        )
    return ModelCard(
        f"""---
{data.to_yaml()}
---

# Evaluation network

Predicts which fraction of an input is {noise}, from 0 (natural) to 1. It is the privacy metric of
the Refiner defense of hf-gradguard. It judges {judged}.

- Parameters: {sum(p.numel() for p in network.parameters()):,}
- Trained on: {dataset}
- {judged_by}

```python
from hf_gradguard.networks import load_network

network = load_network("this repository's name")
network.noise_ratio(x)  # (B,)
```
"""
    )


def eval_results(metrics: NetworkMetrics, suffix: str = "", **source: str) -> list[EvalResult]:
    """Return a network's metrics as entries of its card's `model-index`.

    Args:
        metrics: The metrics on one data set.
        suffix: Text behind the scores' names.
        **source: `task_name`, `dataset_type` and `dataset_name` of `EvalResult`.
    """
    scores = (
        ("mae", "MAE", metrics.mean_absolute_error),
        ("spearmanr", "Spearman", metrics.spearman),
    )
    return [
        EvalResult(
            "other", metric_type=kind, metric_value=score, metric_name=f"{title}{suffix}", **source
        )
        for kind, title, score in scores
    ]
