"""Files that only their owner can read, such as private texts and the state of a defense."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def make_private_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder that only its owner can enter; one that exists keeps its rights.

    Raises:
        OSError: If it cannot be made.

    Example:
        >>> oct(make_private_folder(tmp_path / "runs" / "audit").stat().st_mode & 0o777)
        '0o700'
    """
    folder = Path(path)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # whatever the umask
    return folder


def write_private(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all.

    Raises:
        OSError: If it cannot be written.

    Example:
        >>> write_private(tmp_path / "file", b"secret")
        >>> oct((tmp_path / "file").stat().st_mode & 0o777), (tmp_path / "file").read_bytes()
        ('0o600', b'secret')
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # Never readable by others, not even while it is written.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
