"""Key agreement: every two ranks share a key that no other rank, and no carrier of messages, knows.

It is X25519 (RFC 7748) on fresh keys, all of them signed with Ed25519 (RFC 8032) if users gave
their ranks identities, and HKDF-SHA256 (RFC 5869). All of it is the `cryptography` package's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from transformers.utils import logging

logger = logging.get_logger(__name__)

KEY_BYTES, SIGNATURE_BYTES = 32, 64
_LABEL = b"hf-gradguard: secure aggregation"
_MAKE = (
    "Make a pair with `openssl genpkey -algorithm ed25519 -out rank{0}.pem`, `chmod 600 "
    "rank{0}.pem` and `openssl pkey -in rank{0}.pem -pubout -out rank{0}.pub`, and give the .pub "
    "file to every rank."
)


class Identity(NamedTuple):
    """The signing key of a rank, and the public keys of all ranks.

    Args:
        private_key: The key that signs this rank's messages of an agreement.
        public_keys: Every rank's public key, this one's among them.
    """

    private_key: Ed25519PrivateKey
    public_keys: list[Ed25519PublicKey]


def load_identity(folder: str, rank: int, ranks: int) -> Identity:
    """Read this rank's private key, `rankR.pem`, and all public keys, `rank0.pub`, `rank1.pub`, ...

    Raises:
        FileNotFoundError: If a key is missing.
        ValueError: If a file holds no Ed25519 key, if others can read the private one, or if it
            does not belong to this rank's public one.

    Example:
        >>> load_identity(".", rank=0, ranks=3)
        Traceback (most recent call last):
        ...
        FileNotFoundError: ... has no rank0.pem. Make a pair with `openssl genpkey ...
    """
    private = _private_key(folder, rank)
    if (mode := os.stat(Path(folder) / f"rank{rank}.pem").st_mode) & 0o077:
        raise ValueError(
            f"rank{rank}.pem in {folder} can be read by others (mode {mode & 0o777:o}), who could "
            f"pose as this rank. Make a new pair if they may have, and `chmod 600 rank{rank}.pem`."
        )
    public_keys = [_public_key(folder, peer) for peer in range(ranks)]
    if private.public_key().public_bytes_raw() != public_keys[rank].public_bytes_raw():
        raise ValueError(
            f"rank{rank}.pub in {folder} is not the public key of rank{rank}.pem. "
            + _how_to_make(rank)
        )
    return Identity(private, public_keys)


def agree(accelerator: Accelerator, identity: Identity | None) -> dict[int, bytes]:
    """Agree on a new key of 32 bytes with each other rank; all ranks must call it.

    A rank signs everybody's fresh keys, so an older agreement cannot be played back.

    Args:
        accelerator: The accelerator that carries 32 + 64 bytes of each rank to all.
        identity: The identity keys. Without them, fresh keys are accepted unsigned, with a warning.

    Returns:
        The keys, by rank.

    Raises:
        ValueError: If a rank's signature is missing or wrong, or its key is no fresh one.
    """
    rank, ephemeral = accelerator.process_index, X25519PrivateKey.generate()
    publics = _gathered(ephemeral.public_key().public_bytes_raw(), accelerator)
    # A key that comes twice, or another one in this rank's place, was put there on the way.
    if (
        len(set(publics)) < len(publics)
        or publics[rank] != ephemeral.public_key().public_bytes_raw()
    ):
        raise ValueError("Keys were changed on their way between ranks: nothing was exchanged.")
    # Over all keys at once: one that was changed for a single rank changes what that rank signs.
    transcript = transcript_of(publics)
    signature = (
        identity.private_key.sign(signed(rank, transcript)) if identity else bytes(SIGNATURE_BYTES)
    )
    # Ranks without an identity send zeros: all must take part in the collective.
    signatures = _gathered(signature, accelerator)
    if identity is None:
        logger.warning(
            "secure_aggregation takes ranks' keys as they come: whoever carries their messages and "
            "changes them could pose as each rank to the others and read every message. Give "
            "secure_aggregation_keys, or compare over another channel: ranks that show the same "
            f"fingerprint have each other's keys. This one's: {transcript.hex()}"
        )
    else:
        check_signatures(signatures, identity.public_keys, transcript)
    return {
        peer: pair_key(ephemeral, public, (rank, peer), transcript)
        for peer, public in enumerate(publics)
        if peer != rank
    }


def transcript_of(publics: Sequence[bytes]) -> bytes:
    """Return the SHA-256 of all ranks' fresh public keys, in their order.

    Example:
        >>> len(transcript_of([bytes(32), bytes(32)]))
        32
    """
    return hashlib.sha256(_LABEL + b"".join(publics)).digest()


def signed(rank: int, transcript: bytes) -> bytes:
    """Return the bytes that a rank signs.

    Example:
        >>> signed(2, b"...")
        b'hf-gradguard: secure aggregation, keys as rank 2 has them: ...'
    """
    return _LABEL + f", keys as rank {rank} has them: ".encode() + transcript


def check_signatures(
    signatures: Sequence[bytes], public_keys: Sequence[Ed25519PublicKey], transcript: bytes
) -> None:
    """Refuse an agreement that not every rank has signed.

    Raises:
        ValueError: If a signature is missing or wrong; the message names the rank.
    """
    for rank, (signature, key) in enumerate(zip(signatures, public_keys, strict=True)):
        try:
            key.verify(signature, signed(rank, transcript))
        except InvalidSignature:
            raise ValueError(
                f"Rank {rank} is not who rank{rank}.pub says, has no secure_aggregation_keys, or "
                "keys were changed on their way. Nothing was exchanged."
            ) from None


def pair_key(
    private: X25519PrivateKey, public: bytes, pair: tuple[int, int], transcript: bytes
) -> bytes:
    """Return the key of two ranks: HKDF-SHA256 of their X25519 secret, salted with the transcript.

    Args:
        private: The fresh private key of one rank.
        public: The fresh public key of the other.
        pair: The two ranks, in either order.
        transcript: The hash of the agreement, see `transcript_of`.

    Raises:
        ValueError: If the public key gives everybody the same secret.

    Example:
        >>> one, two = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        >>> key = pair_key(one, two.public_key().public_bytes_raw(), (0, 1), b"")
        >>> key == pair_key(two, one.public_key().public_bytes_raw(), (1, 0), b"")
        True
    """
    info = _LABEL + f", ranks {min(pair)} and {max(pair)}".encode()
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=transcript, info=info).derive(secret)


def _gathered(payload: bytes, accelerator: Accelerator) -> list[bytes]:
    """Return every rank's bytes, in their order."""
    everyone = gather(torch.tensor(list(payload), dtype=torch.uint8).to(accelerator.device))
    return [bytes(row.tolist()) for row in everyone.cpu().view(-1, len(payload))]


def _private_key(folder: str, rank: int) -> Ed25519PrivateKey:
    path, content = _read_key(folder, f"rank{rank}.pem", rank)
    try:
        key = load_pem_private_key(content, password=None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no key without a password: {error}. {_how_to_make(rank)}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} is of another kind than Ed25519. {_how_to_make(rank)}")
    return key


def _public_key(folder: str, rank: int) -> Ed25519PublicKey:
    path, content = _read_key(folder, f"rank{rank}.pub", rank)
    try:
        key = load_pem_public_key(content)
    except ValueError as error:
        raise ValueError(f"{path} is no public key: {error}. {_how_to_make(rank)}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} is of another kind than Ed25519. {_how_to_make(rank)}")
    return key


def _read_key(folder: str, name: str, rank: int) -> tuple[Path, bytes]:
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"secure_aggregation_keys={folder} has no {name}. {_how_to_make(rank)}"
        )
    return path, path.read_bytes()


def _how_to_make(rank: int) -> str:
    return _MAKE.format(rank)
