"""A rank's private file in a checkpoint.

It holds the states of defenses, the account of what each example has leaked, the name of the run,
and the settings that a resumed run must keep. One checksum covers all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.utils import logging

from ...data.private import write_private
from ...defenses.base import NO_STATE
from ...leakage import FisherAccountant
from ..message import Client
from ..privacy.labels import LabelKey

logger = logging.get_logger(__name__)

_ACCOUNT, _CHECKSUM, _NAMES = "accountant/", "gradguard_sha256", "gradguard_parameters"
_LABEL_KEY, _CLIENTS, _RANKS = "label_key", "gradguard_clients", "gradguard_ranks"
_RUN = "gradguard_run"
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
_NO_EPSILON = (
    "{} holds no count of the messages that this rank shared, so ε would leave them out. Resume "
    "with as many ranks as were saved, from a run of dp_sgd with per_sample=True."
)
_TRUE_LABELS = (
    "{} was trained with label_epsilon={:g}, and now protect_labels is not set: true labels would "
    "be shared of rows whose labels were protected. Set both as they were, or begin a new run."
)
_OTHER_EPSILON = (
    "{} was trained with label_epsilon={:g}, and {:g} would release each label a second time. Set "
    "it as it was, or begin a new run."
)
_OTHER_ROWS = (
    "{} was trained on other rows, or on these in another order. Here rows are known by their "
    "number (by an account, randomized labels or clients), so one row's would be another's. Pass "
    "train_dataset as it was, or begin a new run."
)
_OTHER_RANKS = (
    "{} was saved by {} rank(s), and now there are {}, so what examples of other ranks have given "
    "away would not be counted. Resume with as many ranks, or without an accountant."
)


@dataclass
class RunRecord:
    """A record of a run in a checkpoint's private file.

    Args:
        run: The run's name, as in the account of what was shared.
        counted: How many records of that account are counted in the file, by attempt at the run.
        privacy: The noise multiplier, sampling rate and number of messages of each training with
            per-sample `dp_sgd`, earlier ones included. It is `None` if there was none.
        label_epsilon: The ε of randomized labels; `None` if labels are true.
        data: The fingerprint of the rows, salted with `run`; `None` if nothing knows rows by their
            number.
        settings: The settings, by name, that the states of defenses depend on.
        shared: The number of shared messages, by the kinds that the model card states.
        transcript: The order of rows and the number of shared messages, with correlated noise.

    Example:
        >>> RunRecord("run").label_epsilon is None
        True
    """

    run: str
    counted: dict[str, int] = field(default_factory=dict)
    privacy: list[list[float]] | None = None
    label_epsilon: float | None = None
    data: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] | None = None
    transcript: dict[str, Any] | None = None


def save_private_state(
    folder: str,
    rank: int,
    clients: Sequence[Client],
    accountant: FisherAccountant | None,
    label_key: LabelKey | None = None,
    record: RunRecord | None = None,
) -> None:
    """Write a rank's private state to a file that only its owner can read.

    The file holds the states of the clients' defenses and of the accountant, and the key of
    randomized labels. It also says how many clients and ranks there were, and which run it is from.

    Args:
        folder: The folder of the checkpoint.
        rank: The rank that the file belongs to.
        clients: The clients whose states are written.
        accountant: The rank's accountant, if it has one.
        label_key: The key of randomized labels, if there are any.
        record: The record of the run.

    Example:
        >>> save_private_state(".", 0, [Client(make_defense("optimal_noise"))], accountant=None)
        >>> os.listdir()
        ['gradguard_private_rank0.safetensors']
    """
    state = {
        f"{index}/{key}": tensor.contiguous()
        for index, client in enumerate(clients)
        for key, tensor in client.defense.flatten(client.state).items()
    }
    if accountant is not None:
        state |= {f"{_ACCOUNT}{key}": tensor for key, tensor in accountant.state_dict().items()}
    if label_key is not None:
        state[_LABEL_KEY] = label_key.tensor()
    names = [client.parameters for client in clients]
    about = {_NAMES: " ".join(names), _CLIENTS: str(len(clients)), _RANKS: str(_ranks())}
    if record is not None:
        about[_RUN] = json.dumps(asdict(record), sort_keys=True)
    about[_CHECKSUM] = _checksum(state, about)
    write_private(_file(folder, rank), save(state, about))


def saved_record(folder: str, rank: int) -> RunRecord | None:
    """Return the record of the run that wrote a checkpoint.

    It is `None` if the checkpoint holds no private file of this rank, or if an older version wrote
    the file.

    Raises:
        ValueError: If the file is damaged.

    Example:
        >>> save_private_state(".", 0, [], None, record=RunRecord("a name"))
        >>> saved_record(".", 0).run
        'a name'
    """
    if not os.path.isfile(_file(folder, rank)):
        return None
    _, about = _read_tensors(_file(folder, rank))
    return RunRecord(**json.loads(about[_RUN])) if _RUN in about else None


def check_record(
    folder: str, saved: RunRecord | None, current: RunRecord, needs_epsilon: bool = False
) -> None:
    """Check that this run may continue from a checkpoint.

    It may not if it would release labels a second time, share true labels, or leave earlier
    messages out of an account.

    Args:
        folder: The folder of the checkpoint.
        saved: The record in the checkpoint's private file, if it has one.
        current: The record of this run. Its data's fingerprint is salted as the saved one.
        needs_epsilon: Whether this run counts messages for ε.

    Raises:
        ValueError: If it may not. The message has the reason and the way out.

    Example:
        >>> check_record("out", RunRecord("a", label_epsilon=1.0), RunRecord("a"))
        Traceback (most recent call last):
        ValueError: out was trained with label_epsilon=1, and now protect_labels is not set: ...
    """
    if needs_epsilon and (saved is None or saved.privacy is None):
        raise ValueError(_NO_EPSILON.format(folder))
    if saved is None:
        return
    if saved.label_epsilon is not None and current.label_epsilon is None:
        raise ValueError(_TRUE_LABELS.format(folder, saved.label_epsilon))
    if saved.label_epsilon is None and current.label_epsilon is not None:
        raise ValueError(_NO_LABEL_KEY.format(folder))
    if saved.label_epsilon != current.label_epsilon:
        raise ValueError(_OTHER_EPSILON.format(folder, saved.label_epsilon, current.label_epsilon))
    if None not in (saved.data, current.data) and saved.data != current.data:
        raise ValueError(_OTHER_ROWS.format(folder))


def load_private_state(
    folder: str,
    rank: int,
    clients: Sequence[Client],
    accountant: FisherAccountant | None,
    device: torch.device,
    label_key: LabelKey | None = None,
    record: RunRecord | None = None,
    releases: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Restore a rank's private state, which `save_private_state` wrote.

    Defenses begin with an empty state, with a warning, if the folder has no file of this rank, if
    another number of ranks saved it, or if it was saved under other settings.

    Args:
        folder: The folder of the checkpoint.
        rank: The rank whose file is read.
        clients: The clients that get their states back.
        accountant: The rank's accountant, if it has one, which gets its state back.
        device: The device that states are loaded to.
        label_key: The key of randomized labels, if there are any, which gets its bytes back.
        record: The record of this run, whose settings are compared with the saved ones.
        releases: The releases after the file was written, which the accountant counts, too.

    Raises:
        ValueError: If the file is damaged, or of another number of clients; or if there is an
            accountant, and the folder has no account of this rank, one of another number of ranks,
            or one that knows examples by their content.

    Example:
        >>> defense = make_defense("optimal_noise")
        >>> message, state = defense.apply(gmap, {})
        >>> save_private_state(".", 0, [Client(defense, state)], accountant=None)
        >>> resumed = Client(defense)
        >>> load_private_state(".", 0, [resumed], None, torch.device("cpu"))
        >>> resumed.state.keys() == state.keys()
        True
    """
    if not os.path.isfile(_file(folder, rank)):
        if accountant is not None:
            raise ValueError(_NO_ACCOUNT.format(folder))
        if label_key is not None:
            raise ValueError(_NO_LABEL_KEY.format(folder))
        _begin_anew(clients, f"{folder} holds no defense state of this rank")
        return
    saved, about = _read_tensors(_file(folder, rank))
    names, states = about.get(_NAMES, "").split(), _of_clients(saved)
    num_clients = int(about.get(_CLIENTS) or len(names) or 1 + max(states, default=-1))
    if states and num_clients != len(clients):
        raise ValueError(_OTHER_CLIENTS.format(folder, num_clients, len(clients)))
    ranks = int(about.get(_RANKS, _ranks()))
    if ranks != _ranks() and accountant is not None:
        raise ValueError(_OTHER_RANKS.format(folder, ranks, _ranks()))
    _load_label_key(saved, folder, label_key)
    _load_account(saved, folder, accountant, releases)
    if states and ranks != _ranks():
        _begin_anew(clients, f"{folder} was saved by {ranks} rank(s), not {_ranks()}")
    elif states and (changed := _changed_settings(about, record)):
        _begin_anew(clients, f"{folder} was saved with other {', '.join(changed)}")
    else:
        for index, client in enumerate(clients):
            saved_state = {name: t.to(device) for name, t in states.get(index, {}).items()}
            client.state = client.defense.unflatten(saved_state)
            client.parameters = names[index] if index < len(names) else "-"


def _changed_settings(about: Mapping[str, str], record: RunRecord | None) -> list[str]:
    if record is None or _RUN not in about:
        return []
    saved = json.loads(about[_RUN])["settings"]
    current = json.loads(json.dumps(record.settings))
    return [name for name, value in current.items() if saved.get(name, value) != value]


def _begin_anew(clients: Sequence[Client], reason: str) -> None:
    """Empty the states of clients, also those that an earlier training of this process left."""
    logger.warning(f"{reason}. Sensitivities are estimated anew, and nothing is left to be sent.")
    for client in clients:
        client.state, client.parameters = NO_STATE, "-"


def _of_clients(saved: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the saved tensors of each client's state, by the client's number.

    A client with an empty state is left out.
    """
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in saved.items():
        index, _, name = key.partition("/")
        if index.isdecimal():
            states[int(index)][name] = tensor
    return states


def _load_account(
    saved: Mapping[str, Tensor],
    folder: str,
    accountant: FisherAccountant | None,
    releases: Sequence[Mapping[str, Any]],
) -> None:
    account = {
        key.removeprefix(_ACCOUNT): tensor
        for key, tensor in saved.items()
        if key.startswith(_ACCOUNT)
    }
    if accountant is not None:
        if not account:
            raise ValueError(_NO_ACCOUNT.format(folder))
        keys = json.loads(bytes(account["keys"].tolist()))
        if any(isinstance(key, str) for key in keys):
            raise ValueError(_BY_CONTENT.format(folder))
        accountant.load_releases(releases, account)
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
    """Return the tensors of a private file, and its metadata.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(_DAMAGED.format(path, error)) from error
    if about.get(_CHECKSUM) != _checksum(state, about):
        raise ValueError(_DAMAGED.format(path, "its checksum is another"))
    return state, about


def _checksum(state: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return the checksum of a private file's tensors and metadata.

    In a file of an older version, it covers the tensors alone.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    for name in sorted(about.keys() - {_CHECKSUM}) if _RUN in about else ():
        digest.update(f"{name}={about[name]};".encode())
    return digest.hexdigest()


_DAMAGED = (
    "{} is cut off or was changed ({}), so what defenses remember and what was given away cannot "
    "be told. Resume from an earlier checkpoint."
)


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"gradguard_private_rank{rank}.safetensors")
