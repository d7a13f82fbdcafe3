"""Extras of the installation that rooms of the package cannot do without."""

from __future__ import annotations

import importlib.util


def need(room: str, extra: str, *modules: str) -> None:
    """Raise an error with the install command if modules that a room needs are missing.

    Args:
        room: The room of the package that needs them.
        extra: The extra of the package's installation that brings the modules.
        *modules: Names of the modules, as they are imported.

    Raises:
        ImportError: If a module is missing; the message names it, and the command.

    Example:
        >>> need("attacks", "attacks", "numpy", "no_such_module")
        Traceback (most recent call last):
        ImportError: hf_gradguard.attacks needs no_such_module, which is not installed: ...
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"hf_gradguard.{room} needs {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'hf-gradguard[{extra}]'"
        )
