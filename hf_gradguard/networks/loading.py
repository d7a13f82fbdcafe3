"""Loading evaluation networks: packaged ones, folders, and the Hub. Weights are read from
safetensors alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from .configuration import ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig
from .image import ImageEvaluationNetwork
from .text import TextEvaluationNetwork

EvaluationNetwork = ImageEvaluationNetwork | TextEvaluationNetwork
EvaluationNetworkConfig = ImageEvaluationNetworkConfig | TextEvaluationNetworkConfig

WEIGHTS = "model.safetensors"
_CLASSES: dict[type, type[PreTrainedModel]] = {
    ImageEvaluationNetworkConfig: ImageEvaluationNetwork,
    TextEvaluationNetworkConfig: TextEvaluationNetwork,
}
# In a wheel the cards lie inside the package; in a checkout, beside it.
_PACKAGE = Path(__file__).resolve().parents[1]
_CARDS = (_PACKAGE / "model_cards", _PACKAGE.parent / "model_cards")


def load_network(name_or_path: str | Path, *, revision: str | None = None) -> EvaluationNetwork:
    """Load an evaluation network, in float32 and eval mode, frozen.

    Args:
        name_or_path: A packaged network's name (see `packaged_networks`), a local folder, or a Hub
            name.
        revision: A branch, tag or commit of the Hub repository.

    Raises:
        ValueError: If what is there is no evaluation network, or its weights do not fit its
            configuration or are not finite.
        OSError: If there is nothing of that name, or the weights are missing, corrupted or not in
            safetensors.

    Example:
        >>> network = load_network("image-evaluation-network-32")
        >>> network.noise_ratio(image_batch["pixel_values"]).shape
        torch.Size([2])
    """
    folder = _find(name_or_path, revision)
    config = _read_config(folder, name_or_path)
    _check_weights(folder, name_or_path)
    # Half-precision files become float32: second derivatives of a half-precision network would be
    # noise.
    try:
        network, report = _CLASSES[type(config)].from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
        )
    except RuntimeError as error:  # sizes that differ
        raise ValueError(
            f"The weights of {name_or_path} do not fit its config.json: {error}"
        ) from error
    wrong = {
        kind: sorted(report[kind])
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report[kind]
    }
    if wrong:
        raise ValueError(f"The weights of {name_or_path} do not fit its config.json: {wrong}.")
    for name, tensor in network.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{name} of {name_or_path} holds NaN or infinity. Get the file again, or train the "
                "network."
            )
    # As it was asked for: cards and logs say it, and a cache's path is nobody's business.
    network.name_or_path = str(name_or_path)
    return network.eval().requires_grad_(False)


def save_network(network: EvaluationNetwork, folder: str | Path) -> None:
    """Save a network with its weights in half precision, to be loaded in float32 again.

    Example:
        >>> save_network(load_network("image-evaluation-network-32"), "network")
        >>> load_network("network").config.size
        (32, 32)
    """
    half = {
        name: tensor.to(
            torch.float16 if torch.is_floating_point(tensor) else tensor.dtype
        ).contiguous()
        for name, tensor in network.state_dict().items()
    }
    network.save_pretrained(folder, state_dict=half)


def packaged_networks() -> dict[str, EvaluationNetworkConfig]:
    """The networks that come with the package, each with its configuration.

    Example:
        >>> sorted(packaged_networks())
        ['image-evaluation-network-32', 'text-evaluation-network-minilm-l6']
    """
    found: dict[str, EvaluationNetworkConfig] = {}
    for cards in _CARDS:
        if not cards.is_dir():
            continue
        for folder in sorted(cards.iterdir()):
            if (folder / "config.json").is_file() and folder.name not in found:
                found[folder.name] = _read_config(folder, folder.name)
    return found


def packaged_image_network(num_channels: int, image_size: tuple[int, int]) -> str | None:
    """The packaged network that judges such images as they are, or `None`.

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
    """The packaged network for the embedding matrix with this `embedding_fingerprint`, or
    `None`.

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


def _find(name_or_path: str | Path, revision: str | None) -> Path:
    name = str(name_or_path)
    for cards in _CARDS:
        if "/" not in name and (cards / name / "config.json").is_file():
            return cards / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    packaged = ", ".join(packaged_networks()) or "none"
    if folder.exists():
        raise OSError(f"{name} is a file. Give the folder that holds config.json and {WEIGHTS}.")
    try:
        # Two kinds of file only: nothing that could run code is ever fetched.
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=["config.json", "*.safetensors"]
            )
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        StrictDataclassError,
        OSError,
    ) as error:
        raise OSError(
            f"There is no evaluation network {name!r}: no packaged one (they are: {packaged}), no "
            f"folder, and the Hub gave none: {str(error).splitlines()[0]}"
        ) from error


def _read_config(folder: Path, name: str | Path) -> EvaluationNetworkConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json, so it is no evaluation network.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{name} is no evaluation network: {error}") from error
    if not isinstance(config, ImageEvaluationNetworkConfig | TextEvaluationNetworkConfig):
        raise ValueError(
            f"{name} is a {config.model_type!r} model, no evaluation network. Train one with "
            "`gradguard evalnet train`."
        )
    return config


def _check_weights(folder: Path, name: str | Path) -> None:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")
        )
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
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is no dict)
                tensor: Tensor = file.get_tensor(key)
                del tensor
    except (SafetensorError, OSError) as error:
        raise OSError(
            f"{path} is corrupted: {error}. Get it again, or train with `gradguard evalnet train`."
        ) from error
