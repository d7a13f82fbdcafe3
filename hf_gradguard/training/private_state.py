"""A rank's private file in a checkpoint: what its defenses remember, and what its examples have
given away.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.utils import logging

from ..data.private import write_private
from ..defenses import Defense
from ..leakage import FisherAccountant
from .labels import LabelKey

logger = logging.get_logger(__name__)

_ACCOUNT, _CHECKSUM, _NAMES = "accountant/", "gradguard_sha256", "gradguard_parameters"
_LABEL_KEY = "label_key"
_NO_LABEL_KEY = (
    "{} holds no key of this rank's randomized labels, so going on would release each label a "
    "second time. Resume with as many ranks as were saved, from a run with protect_labels."
)
_NO_ACCOUNT = (
    "{} holds no accountant's state of this rank, so what was shared until then would not be "
    "counted. Resume with as many ranks as were saved, from a run that had an accountant, or "
    "without one."
)
_BY_CONTENT = (
    "{} holds an account that knows examples by their content, as hf-gradguard 0.2 did. Here "
    "they are known by their row in the data set, so one's total would be in two parts, each too "
    "small. Resume with the version that wrote it, or without an accountant."
)


def save_private_state(
    folder: str,
    rank: int,
    clients: Sequence[Defense],
    accountant: FisherAccountant | None,
    names: Sequence[str] = (),
    label_key: LabelKey | None = None,
) -> None:
    """Write the state of each client's defense, of the accountant, and the key of randomized
    labels, to a file that only its owner can read: it depends on the client's data.

    Args:
        folder: Of the checkpoint.
        rank: Whose it is.
        clients: Each client's defense.
        accountant: The rank's, if it has one.
        names: What stands for the parameters that each client's last message was of.
        label_key: Of randomized labels, if there are any.

    Example:
        >>> save_private_state(".", 0, [make_defense("optimal_noise")], accountant=None)
        >>> os.listdir()
        ['gradguard_private_rank0.safetensors']
    """
    state = {
        f"{index}/{key}": tensor.contiguous()
        for index, defense in enumerate(clients)
        for key, tensor in defense.state_dict().items()
    }
    if accountant is not None:
        state |= {f"{_ACCOUNT}{key}": tensor for key, tensor in accountant.state_dict().items()}
    if label_key is not None:
        state[_LABEL_KEY] = label_key.tensor()
    about = {_CHECKSUM: _checksum(state), _NAMES: " ".join(names)}
    write_private(_file(folder, rank), save(state, about))


def load_private_state(
    folder: str,
    rank: int,
    clients: Sequence[Defense],
    accountant: FisherAccountant | None,
    device: torch.device,
    label_key: LabelKey | None = None,
) -> list[str]:
    """Restore them. Returns what stands for the parameters that each client's last message was of,
    nothing if the file does not say.

    Raises:
        ValueError: If there is an accountant, and the folder holds none of this rank, or one that
            knows examples by their content; or if the file is damaged.

    Example:
        >>> one, other = make_defense("optimal_noise"), make_defense("optimal_noise")
        >>> message = one(gmap)
        >>> save_private_state(".", 0, [one], accountant=None)
        >>> names = load_private_state(".", 0, [other], None, torch.device("cpu"))
        >>> one.state_dict().keys() == other.state_dict().keys()
        True
    """
    if not os.path.isfile(_file(folder, rank)):
        if accountant is not None:
            raise ValueError(_NO_ACCOUNT.format(folder))
        if label_key is not None:
            raise ValueError(_NO_LABEL_KEY.format(folder))
        logger.warning(
            f"{folder} holds no defense state of this rank. Sensitivities are estimated anew."
        )
        return []
    saved, names = _read(_file(folder, rank))
    _load_label_key(saved, folder, label_key)
    account = {
        key.removeprefix(_ACCOUNT): saved.pop(key)
        for key in list(saved)
        if key.startswith(_ACCOUNT)
    }
    if accountant is not None:
        if not account:
            raise ValueError(_NO_ACCOUNT.format(folder))
        accountant.load_state_dict(account)
        if any(isinstance(key, str) for key in accountant):
            raise ValueError(_BY_CONTENT.format(folder))
    elif account:
        logger.warning(
            f"{folder} holds an accountant's state, which this run leaves behind: it has no "
            "accountant."
        )
    state = {key: tensor.to(device) for key, tensor in saved.items()}
    for index, defense in enumerate(clients):
        prefix = f"{index}/"
        own = {
            key.removeprefix(prefix): tensor
            for key, tensor in state.items()
            if key.startswith(prefix)
        }
        defense.load_state_dict(own)
    return names


def _load_label_key(saved: dict[str, Tensor], folder: str, label_key: LabelKey | None) -> None:
    own = saved.pop(_LABEL_KEY, None)
    if label_key is not None:
        if own is None:
            raise ValueError(_NO_LABEL_KEY.format(folder))
        label_key.load(own)


def _read(path: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a private file as they were written, and the parameters they are of."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(_DAMAGED.format(path, error)) from error
    if about.get(_CHECKSUM) != _checksum(state):
        raise ValueError(_DAMAGED.format(path, "its checksum is another"))
    return state, about.get(_NAMES, "").split()


def _checksum(state: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


_DAMAGED = (
    "{} is cut off or was changed ({}), so what defenses remember and what was given away cannot "
    "be told. Resume from an earlier checkpoint."
)


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"gradguard_private_rank{rank}.safetensors")
