"""Folders of identity keys for ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def write_keys(folder: Path, ranks: int) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        key = Ed25519PrivateKey.generate()
        write(folder / f"rank{rank}.pem", private_pem(key))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        write(folder / f"rank{rank}.pub", public)
    return folder


def private_pem(key: Any, encryption: Any = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
