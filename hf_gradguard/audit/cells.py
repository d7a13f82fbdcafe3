"""Finished pieces of an audit on disk, so that an interrupted one continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .code import code_digest

Cell = dict[str, Any]
"""What was found, or a `reason` why nothing can be, or a `crash`."""


class Cells:
    """One JSON file for each cell, named by a hash of all that determines it. Other settings make
    other cells.

    Args:
        folder: Where they lie. Made if it is not there.

    Attributes:
        made: How many were not there and had to be made.

    Raises:
        OSError: If nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self.made = Path(folder), 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise OSError(
                f"Cannot write to {self.folder} ({error.strerror or error}), so nothing was "
                "attacked. Choose another output."
            ) from error

    def once(self, key: str, make: Callable[[], Cell]) -> Cell:
        """The cell of that key, made if it is not there yet.

        What crashed is not kept: it is tried again when the audit goes on.
        """
        path = self.folder / f"{key}.json"
        if not path.exists():
            self.made += 1
            cell = make()
            if "crash" in cell:
                return cell
            write_json(path, cell)
        # As it will be read the next time.
        stored: Cell = json.loads(path.read_text(encoding="utf-8"))
        return stored


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def digest(*parts: Any) -> str:
    """A hash of values: tensors by their entries, modules by weights and modes, dataclasses by
    their fields, the modules that they loaded, and the source of their class.
    """
    state = hashlib.sha256()
    _feed(state, parts)
    return state.hexdigest()[:24]


def _feed(state: Any, value: Any) -> None:
    state.update(f"<{type(value).__name__}".encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, nn.Module):
        trained = [name for name, parameter in value.named_parameters() if parameter.requires_grad]
        modes = [module.training for module in value.modules()]
        config: Any = getattr(value, "config", None) or {}
        if not isinstance(config, dict):
            config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        # Classifiers fill in `problem_type` at their first loss, by the labels.
        config = {
            k: v
            for k, v in config.items()
            if k not in ("_name_or_path", "transformers_version", "problem_type")
        }
        _feed(
            state,
            [str(value), repr(sorted(config.items(), key=str)), value.state_dict(), trained, modes],
        )
    elif is_dataclass(value) and not isinstance(value, type):
        settings = {field.name for field in fields(value) if field.init}
        own = {
            name: item
            for name, item in vars(value).items()
            if name in settings or isinstance(item, nn.Module)
        }
        _feed(state, [code_digest(type(value)), own])
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(state, (str(key), value[key]))
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode())
    state.update(b">")
