"""Cards of evaluation networks, and pushing a folder to the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

from .configuration import TextEvaluationNetworkConfig
from .loading import CONFIG, WEIGHTS, EvaluationNetwork, load_network

_FILES = [CONFIG, WEIGHTS, "README.md"]


def push_network(
    folder: str | Path, repo_id: str, *, private: bool = False, message: str | None = None
) -> str:
    """Create the Hub repository if need be, and push a network's folder to it in one commit.

    The folder is loaded first: what `load_network` refuses is not pushed. Only config.json,
    README.md and model.safetensors go.

    Args:
        folder: The folder of the network.
        repo_id: "name" or "organization/name".
        private: Whether a repository created now is private.
        message: Of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError, OSError: As `load_network`, and if `folder` is no folder. Hub errors pass
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


def network_card(network: EvaluationNetwork, dataset: str) -> ModelCard:
    """A short model card: what the network predicts, what it was trained on, how to load it.
    Figures are left to you.

    Args:
        network: The network.
        dataset: What it was trained on, as people know it.

    Example:
        >>> card = network_card(load_network("image-evaluation-network-32"), dataset="CIFAR-10")
        >>> "- Trained on: CIFAR-10" in card.text
        True
    """
    config = network.config
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
    base = (
        config.base_model
        if isinstance(config, TextEvaluationNetworkConfig) and config.base_model
        else None
    )
    data = ModelCardData(
        library_name="hf-gradguard", tags=["gradguard", "evaluation-network"], base_model=base
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

```python
from hf_gradguard.networks import load_network

network = load_network("this repository's name")
network.noise_ratio(x)  # (B,)
```
"""
    )
