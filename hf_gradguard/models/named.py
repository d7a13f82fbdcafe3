"""A model's name: a folder here, or a name on the Hub."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_WAY_OUT = (
    "Give the folder that `save_pretrained` wrote, with its config.json, or a name on the Hugging "
    "Face Hub, like distilbert/distilbert-base-uncased."
)


def check_name(name: str | os.PathLike[str]) -> None:
    """Refuse a path that leads nowhere. What could be a name on the Hub passes.

    Raises:
        FileNotFoundError: If the name is written like a path, and no folder is there.
        NotADirectoryError: If a file is there.

    Example:
        >>> check_name("distilbert/distilbert-base-uncased")
        >>> check_name("./runs/model")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder ./runs/model. Give the folder that ...
    """
    path = os.fspath(name)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        raise NotADirectoryError(f"{path} is a file, not the folder of a model. {_WAY_OUT}")
    if path.startswith("~") and os.path.isdir(full := os.path.expanduser(path)):
        raise FileNotFoundError(f"There is no folder {path}: write {full}, as no shell did.")
    if os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1:
        raise FileNotFoundError(f"There is no folder {path}. {_WAY_OUT}")


@contextlib.contextmanager
def loading(name: str | os.PathLike[str]) -> Iterator[None]:
    """Around what loads a model, or its tokenizer, by name: says what is missing.

    Transformers takes what is no folder for a name on the Hub, and says of a mistyped folder that
    the Hub cannot be reached.

    Raises:
        FileNotFoundError: If there is no such folder, and the Hub gave no such model.
        NotADirectoryError: If a file is there.

    Example:
        >>> with loading("folder"):
        ...     raise OSError("We couldn't connect to 'https://huggingface.co'.")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder folder, and the Hub gave no model of that name ...
    """
    check_name(name)
    try:
        yield
    except OSError as error:
        if os.path.isdir(name):
            raise
        raise FileNotFoundError(
            f"There is no folder {os.fspath(name)}, and the Hub gave no model of that name "
            f"({str(error).splitlines()[0]}). {_WAY_OUT}"
        ) from error
