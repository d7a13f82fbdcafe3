"""Protection of what a client of NVIDIA FLARE sends. It needs `hf-gradguard[flare]`.

`GradGuardFilter` in `task_result_filters` protects every difference of weights, and lets nothing
else pass. `GradGuardUnpackFilter` unpacks on the server what clients pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .guard import STATISTICS, UNCHANGED, Guard, GuardSettings, Withheld
from .lookup_tables import TABLES, listed
from .packing import is_added, is_packed, unpack_update

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.event_type import EventType
    from nvflare.apis.filter import FilterChainType, FilterContextKey
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
except ImportError as error:
    raise ImportError(
        "hf_gradguard.federation.flare needs NVIDIA FLARE: pip install 'hf-gradguard[flare]'"
    ) from error

_FOLDER = "gradguard"
_DIRECTIONS = {
    FilterChainType.TASK_DATA_CHAIN: FilterKey.IN,
    FilterChainType.TASK_RESULT_CHAIN: FilterKey.OUT,
}
_OF_FLARE = {
    getattr(names, key)
    for names in (ReservedHeaderKey, MetaKey)
    for key in dir(names)
    if key.isupper()
}
_RECEIVED, _PASSED = "__gradguard_received__", "__gradguard_passed__"


class GradGuardFilter(DXOFilter):
    """A filter of a client's task results that protects what training changed before it is sent.

    It is on without any arguments (Gaussian noise as large as the update), and only
    `defense="none"` turns it off. A result passes if it is one `WEIGHT_DIFF` with the names, shapes
    and types of the weights that came with the task, finite, with single numbers beside it; or
    metrics that are single numbers. Everything else ends with an error, which FLARE reports to the
    server in place of the result.

    The state of the defense stays in the job's folder on the client, in a private file, so that a
    client that was killed continues from there.

    Args:
        defense: The defense's name. `"none"`, and only that, turns protection off.
        settings: The defense's settings.
        withhold: Patterns of names that are not sent, as in `GuardSettings`.
        withheld: What is sent for withheld names, as in `GuardSettings`.
        share_input_embeddings: Whether to send tables, as in `GuardSettings`.
        allow: Names of headers and metadata that may pass unread, with commas between them.
        state_folder: The folder of the state, in place of the job's folder.
        tables: Patterns of the names of tables, as in `GuardSettings`.
        frozen: Patterns of the names of frozen weights, as in `GuardSettings`.
        packed: Whether updates are packed; the server then needs a `GradGuardUnpackFilter`.

    Raises:
        ValueError: If a setting is unknown or out of range.
        TypeError: If the defense does not have a setting.

    Example:
        >>> guard = GradGuardFilter("pruning", {"ratio": 0.9})
        >>> guard.process(weights_diff, fl_context)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Nothing was sent: no weights came with the task...
    """

    def __init__(
        self,
        defense: str = "gaussian_noise",
        settings: Mapping[str, Any] | None = None,
        withhold: str = STATISTICS,
        withheld: Withheld = "zeros",
        share_input_embeddings: bool = False,
        allow: str = "",
        state_folder: str = "",
        tables: str = TABLES,
        frozen: str = UNCHANGED,
        packed: bool = False,
    ) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        # Under the names of the arguments: FLARE's job API writes them into a job's files.
        self.defense = defense
        self.settings = dict(settings or {})
        self.withhold = withhold
        self.withheld = withheld
        self.share_input_embeddings = share_input_embeddings
        self.allow = allow
        self.state_folder = state_folder
        self.tables = tables
        self.frozen = frozen
        self.packed = packed
        self._guard = Guard(
            GuardSettings(
                defense=defense, settings=self.settings, withhold=withhold, withheld=withheld,
                tables=tables, sends="difference", share_input_embeddings=share_input_embeddings,
                allow=allow, state_folder=state_folder, frozen=frozen, packed=packed,
            )
        )  # fmt: skip
        self._taken_up = False
        self._received: dict[str, Tensor] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remember the weights that come with a task, and empty results that no filter saw.

        FLARE applies a filter to tasks of exactly the names that it has, and `"*"` is none.
        """
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            self._received = weights_in(fl_ctx.get_prop(FLContextKey.TASK_DATA))
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER and self._guard.settings.on:
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if result is not None and not fl_ctx.get_prop(_PASSED, False):
                self._close(result, fl_ctx)

    def _close(self, result: Shareable, fl_ctx: FLContext) -> None:
        code = result.get_return_code()
        if code == ReturnCode.OK:
            try:
                if self._opened(result).data_kind == DataKind.METRICS:
                    return
                why = "it went past this filter. Name its task in task_result_filters"
            except ValueError as error:
                why = str(error)
            self.log_error(fl_ctx, f"A result was emptied: {why}")
            code = ReturnCode.TASK_RESULT_FILTER_ERROR
        result.clear()
        result.update(make_reply(code))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a result with its difference of weights protected; a task's data is not changed.

        Raises:
            ValueError: If the result may not be sent.
            FloatingPointError: If something in it is not finite.
            RuntimeError: If the defense needs the client's data, or this is no client.
        """
        chain = self.get_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_RESULT_CHAIN)
        direction = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION, _DIRECTIONS[chain])
        if direction != _DIRECTIONS[chain]:
            raise RuntimeError("GradGuardFilter is the clients': a server sees what it protects.")
        if chain == FilterChainType.TASK_DATA_CHAIN:
            fl_ctx.set_prop(_RECEIVED, weights_in(shareable), private=True, sticky=False)
            return shareable
        fl_ctx.set_prop(_PASSED, True, private=True, sticky=False)
        received, self._received = self._received or fl_ctx.get_prop(_RECEIVED, {}), {}
        if shareable.get_return_code() != ReturnCode.OK:
            return make_reply(shareable.get_return_code())  # the result's content is left out
        if not self._guard.settings.on:
            return shareable
        dxo = self._opened(shareable)
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            folder, client = self._folder(fl_ctx), str(fl_ctx.get_identity_name("client"))
            if folder and not self._taken_up:
                self._guard.load_state(folder, client)
                self._taken_up = True
            dxo.data = self._protected(received, dxo.data)
            dxo.add_filter_history(type(self).__name__)
            if folder:
                self._guard.save_state(folder, client)
        return dxo.update_shareable(shareable)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Refuse to be called: `process` lets nothing pass that is no DXO, where FLARE's does."""
        raise NotImplementedError

    def _opened(self, shareable: Shareable) -> DXO:
        """Return the data of a result, if all of it may be sent.

        Raises:
            ValueError: If it is no data exchange object, or holds anything else.
        """
        dxo = from_shareable(shareable)
        kinds = (DataKind.WEIGHT_DIFF, DataKind.METRICS)
        if dxo.data_kind not in kinds:
            raise ValueError(
                f"Nothing was sent: the result is {dxo.data_kind}, and no difference of weights. "
                "Let the client send its difference: params_transfer_type=TransferType.DIFF, or "
                "ParamsType.DIFF."
            )
        if processed := dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM):
            raise ValueError(
                f"Nothing was sent: the result was processed by {processed!r} already, and cannot "
                "be read. Put GradGuardFilter before that filter."
            )
        beside_update = {key: value for key, value in shareable.items() if key != "DXO"}
        headers = beside_update.pop(ReservedHeaderKey.HEADERS, {})
        numbers = dxo.data if dxo.data_kind == DataKind.METRICS else {}
        for mapping in (beside_update, headers, dxo.meta, numbers):
            for name, value in mapping.items():
                self._check(name, value)
        return dxo

    def _check(self, name: str, value: Any) -> None:
        if name in listed(self.allow) or value is None or isinstance(value, Number):
            return
        if name == MetaKey.INITIAL_METRICS and isinstance(value, dict):
            for key, metric in value.items():
                self._check(f"{name}.{key}", metric)
            return
        words = value if isinstance(value, list) else [value]
        if name in _OF_FLARE and all(isinstance(word, str) for word in words):
            return
        raise ValueError(
            f"Nothing was sent: the result holds {name!r}, a {type(value).__name__}. Single "
            f"numbers may be sent beside a difference of weights; for more, name {name!r} in allow."
        )

    def _protected(self, received: Mapping[str, Tensor], data: Mapping[str, Any]) -> dict[str, Any]:
        change = {name: _tensor(name, value) for name, value in data.items()}
        if not received:
            raise ValueError(
                "Nothing was sent: no weights came with the task that this could be a difference "
                "of. Where they do not pass through this process, name GradGuardFilter in "
                "task_data_filters as well."
            )
        sent = self._guard.protect(received, change)
        return {
            name: tensor.numpy() if isinstance(data[name], np.ndarray) else tensor
            for name, tensor in sent.items()
        }

    def _folder(self, fl_ctx: FLContext) -> Path | None:
        if self.state_folder:
            return Path(self.state_folder)
        engine = fl_ctx.get_engine()
        if engine is None:
            return None
        return Path(engine.get_workspace().get_run_dir(fl_ctx.get_job_id())) / _FOLDER


class GradGuardUnpackFilter(DXOFilter):
    """A filter of a server's task results that unpacks differences that clients packed.

    What is not packed is not changed. Shapes are those of the weights that went out with tasks, so
    that no client can ask for more memory than the model has.

    Raises:
        ValueError: If a difference is packed wrongly; FLARE then counts the result as failed.
        FloatingPointError: If an entry is not finite.

    Example:
        >>> unpacking = GradGuardUnpackFilter()  # recipe.add_server_input_filter(unpacking)
        >>> dxo = DXO(DataKind.WEIGHT_DIFF, data={"w": torch.ones(2)})  # which is not packed
        >>> unpacking.process_dxo(dxo, Shareable(), FLContext()).data
        {'w': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        self._outlines: dict[str, Tensor] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remember the shapes and types of a task's weights when it goes out."""
        if event_type == EventType.AFTER_TASK_DATA_FILTER:
            weights = weights_in(fl_ctx.get_prop(FLContextKey.TASK_DATA))
            self._outlines |= {name: tensor.to("meta") for name, tensor in weights.items()}

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Return a result with every packed tensor unpacked.

        Raises:
            ValueError: If a packed tensor is no difference of weights.
        """
        arrays = {k: v for k, v in dxo.data.items() if isinstance(v, np.ndarray | Tensor)}
        packed = {name: _tensor(name, array) for name, array in arrays.items()}
        packed = {name: tensor for name, tensor in packed.items() if is_packed(tensor)}
        if added := [name for name, tensor in packed.items() if is_added(tensor)]:
            raise ValueError(f"{added[0]!r} is packed wrongly: it is no difference of weights.")
        for name, tensor in unpack_update(packed, self._outlines).items():
            is_array = isinstance(dxo.data[name], np.ndarray)
            dxo.data[name] = tensor.numpy() if is_array else tensor
        return dxo


def weights_in(data: Shareable | None) -> dict[str, Tensor]:
    """Return the weights that came with a task, by name; none if none came.

    Example:
        >>> weights_in(None)
        {}
    """
    try:
        dxo = from_shareable(data if data is not None else Shareable())
    except ValueError:
        return {}
    if dxo.data_kind != DataKind.WEIGHTS:
        return {}
    arrays = {k: v for k, v in dxo.data.items() if isinstance(v, np.ndarray | Tensor)}
    return {name: _tensor(name, array) for name, array in arrays.items()}


def _tensor(name: str, value: Any) -> Tensor:
    """Return a value as a tensor that shares no memory with the client's training.

    Raises:
        ValueError: If it is no array.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    raise ValueError(f"Nothing was sent: {name!r} is a {type(value).__name__}, and no array.")


__all__ = ["GradGuardFilter", "GradGuardUnpackFilter", "weights_in"]
