"""A rank's private file in a checkpoint: what its defenses remember, and what its examples have
given away.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.utils import logging

from ...data.private import write_private
from ...defenses import Defense
from ...leakage import FisherAccountant
from ..privacy.labels import LabelKey

logger = logging.get_logger(__name__)

_ACCOUNT, _CHECKSUM, _NAMES = "accountant/", "gradguard_sha256", "gradguard_parameters"
_LABEL_KEY, _CLIENTS, _RANKS = "label_key", "gradguard_clients", "gradguard_ranks"
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
_OTHER_CLIENTS = (
    "{} holds what the defenses of {} client(s) of this rank remember, and now it hosts {}, so one "
    "would go on with what another left out. Resume with as many ranks, num_clients and "
    "clients_per_process as were saved; or remove its gradguard_private_* files, and defenses "
    "begin anew."
)
_OTHER_RANKS = (
    "{} was saved by {} rank(s), and now there are {}, so what examples of other ranks have given "
    "away would not be counted. Resume with as many ranks, or without an accountant."
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
    labels, to a file that only its owner can read: it depends on the client's data. It says of how
    many clients and ranks it is.

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
    about = {
        _CHECKSUM: _checksum(state),
        _NAMES: " ".join(names),
        _CLIENTS: str(len(clients)),
        _RANKS: str(_ranks()),
    }
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

    Without a file of this rank, or with one that another number of ranks saved, defenses forget
    what they remember, with a warning.

    Raises:
        ValueError: If the file is of another number of clients, or damaged; or if there is an
            accountant, and the folder holds none of this rank, one of another number of ranks, or
            one that knows examples by their content.

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
        return _begin_anew(clients, f"{folder} holds no defense state of this rank")
    saved, about = _read_tensors(_file(folder, rank))
    names, states = about.get(_NAMES, "").split(), _of_clients(saved)
    num_clients = int(about.get(_CLIENTS) or len(names) or 1 + max(states, default=-1))
    if states and num_clients != len(clients):
        raise ValueError(_OTHER_CLIENTS.format(folder, num_clients, len(clients)))
    ranks = int(about.get(_RANKS, _ranks()))
    if ranks != _ranks() and accountant is not None:
        raise ValueError(_OTHER_RANKS.format(folder, ranks, _ranks()))
    _load_label_key(saved, folder, label_key)
    _load_account(saved, folder, accountant)
    if states and ranks != _ranks():
        return _begin_anew(clients, f"{folder} was saved by {ranks} rank(s), not {_ranks()}")
    for index, defense in enumerate(clients):
        client_state = states.get(index, {})
        defense.load_state_dict({key: tensor.to(device) for key, tensor in client_state.items()})
    return names


def _begin_anew(clients: Sequence[Defense], reason: str) -> list[str]:
    """Also what an earlier training of this process has left."""
    logger.warning(f"{reason}. Sensitivities are estimated anew, and nothing is left to be sent.")
    for defense in clients:
        defense.load_state_dict({})
    return []


def _of_clients(saved: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """What each client's defense remembers; nothing of one that remembers nothing."""
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in saved.items():
        index, _, name = key.partition("/")
        if index.isdecimal():
            states[int(index)][name] = tensor
    return states


def _load_account(
    saved: Mapping[str, Tensor], folder: str, accountant: FisherAccountant | None
) -> None:
    account = {
        key.removeprefix(_ACCOUNT): tensor
        for key, tensor in saved.items()
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


def _load_label_key(saved: Mapping[str, Tensor], folder: str, label_key: LabelKey | None) -> None:
    if label_key is not None:
        if _LABEL_KEY not in saved:
            raise ValueError(_NO_LABEL_KEY.format(folder))
        label_key.load(saved[_LABEL_KEY])


def _ranks() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _read_tensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a private file as they were written, and what it says of them."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(_DAMAGED.format(path, error)) from error
    if about.get(_CHECKSUM) != _checksum(state):
        raise ValueError(_DAMAGED.format(path, "its checksum is another"))
    return state, about


def _checksum(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_DAMAGED = (
    "{} is cut off or was changed ({}), so what defenses remember and what was given away cannot "
    "be told. Resume from an earlier checkpoint."
)


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"gradguard_private_rank{rank}.safetensors")
