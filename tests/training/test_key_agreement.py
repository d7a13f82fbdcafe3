"""Keys between ranks: worked by hand on the RFCs' vectors, and every way to get them wrong."""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from identities import private_pem, write, write_keys
from torch import Tensor

from hf_gradguard.secure import key_agreement
from hf_gradguard.secure.key_agreement import (
    agree,
    load_identity,
    pair_key,
    transcript_of,
)

# RFC 7748, Section 6.1
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
SECRET = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """RFC 5869, Section 2, in its own words."""
    key = hmac.digest(salt, secret, "sha256")
    okm = block = b""
    for counter in range(1, 9):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        okm += block
    return okm[:length]


def test_hkdf_by_hand_gives_the_rfcs_vector() -> None:
    found = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert found.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_a_pairs_key_worked_by_hand() -> None:
    alice, bob = (X25519PrivateKey.from_private_bytes(key) for key in (ALICE, BOB))
    publics = [key.public_key().public_bytes_raw() for key in (alice, bob)]
    label = b"hf-gradguard: secure aggregation"
    transcript = hashlib.sha256(label + publics[0] + publics[1]).digest()
    assert transcript_of(publics) == transcript
    expected = hkdf(SECRET, transcript, label + b", ranks 0 and 1")
    assert pair_key(alice, publics[1], (0, 1), transcript) == expected
    assert pair_key(bob, publics[0], (1, 0), transcript) == expected
    # Another pair of the same keys, and another agreement, have other ones.
    assert pair_key(alice, publics[1], (0, 2), transcript) != expected
    assert pair_key(alice, publics[1], (0, 1), transcript_of(publics[::-1])) != expected


def test_a_key_that_gives_everybody_one_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="shared key"):
        pair_key(X25519PrivateKey.generate(), bytes(32), (0, 1), b"")


class Wire:
    """Ranks in threads, and what carries their bytes: it may change what it delivers to whom."""

    def __init__(self, ranks: int, change: Callable[[int, int, int, bytes], bytes] | None) -> None:
        self.ranks, self.change = ranks, change or (lambda _round, _from, _to, content: content)
        self.barrier, self.local = threading.Barrier(ranks), threading.local()
        self.sent: list[list[bytes]] = [[], []]
        for content in self.sent:
            content += [b""] * ranks

    def gather(self, own: Tensor) -> Tensor:
        rank, number = self.local.rank, self.local.round
        self.local.round += 1
        self.sent[number][rank] = bytes(own.tolist())
        self.barrier.wait(10)
        delivered = b"".join(
            content if peer == rank else self.change(number, peer, rank, content)
            for peer, content in enumerate(self.sent[number])
        )
        return torch.tensor(list(delivered), dtype=torch.uint8)

    def agree(self, folder: Path | None = None) -> list[dict[int, bytes] | ValueError]:
        found: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            identity = None if folder is None else load_identity(str(folder), rank, self.ranks)
            self.local.rank, self.local.round = rank, 0
            accelerator: Any = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
            try:
                found[rank] = agree(accelerator, identity)
            except ValueError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=[rank]) for rank in range(self.ranks)]
        with patch.object(key_agreement, "gather", self.gather):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found


@pytest.mark.parametrize("signs", [False, True])
def test_every_pair_has_one_key_and_every_agreement_others(tmp_path: Path, signs: bool) -> None:
    folder = write_keys(tmp_path, 4) if signs else None
    seen = set()
    for _ in range(2):
        keys: Any = Wire(4, None).agree(folder)
        for one, two in combinations(range(4), 2):
            assert keys[one][two] == keys[two][one]
            seen.add(keys[one][two])
        assert [sorted(own) for own in keys] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert len(seen) == 2 * 6


def relay() -> Callable[[int, int, int, bytes], bytes]:
    """Poses as rank 0 to the others, and as them to rank 0, with a key of its own each."""
    own = {rank: X25519PrivateKey.generate().public_key().public_bytes_raw() for rank in range(3)}

    def change(number: int, source: int, target: int, content: bytes) -> bytes:
        return own[source] if number == 0 and 0 in (source, target) else content

    return change


def test_without_identities_a_relay_reads_and_the_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys: Any = Wire(3, relay()).agree()
    assert keys[0][1] != keys[1][0]  # each of them is the relay's
    shown = {record.getMessage().split()[-1] for record in caplog.records}
    assert len(shown) == 2  # fingerprints that people can compare: rank 0's is another one
    assert "could pose as each rank" in caplog.text
    caplog.clear()
    Wire(3, None).agree()
    assert len({record.getMessage().split()[-1] for record in caplog.records}) == 1


def test_with_identities_a_relay_is_refused(tmp_path: Path) -> None:
    found = Wire(3, relay()).agree(write_keys(tmp_path, 3))
    assert all("not who rank" in str(error) for error in found)


def test_an_older_agreement_cannot_be_played_back(tmp_path: Path) -> None:
    """Rank 1's key and signature of another agreement, to everybody: its secret may have leaked."""
    folder = write_keys(tmp_path, 3)
    old = Wire(3, None)
    old.agree(folder)
    replayed = Wire(3, lambda n, source, _, content: old.sent[n][1] if source == 1 else content)
    found = replayed.agree(folder)
    assert all(isinstance(error, ValueError) for error in found)


def test_another_rank_cannot_sign_for_one(tmp_path: Path) -> None:
    """Rank 2's signature in rank 1's place, under rank 1's key of this agreement."""
    wire = Wire(3, None)
    wire.change = lambda n, source, _, content: (
        wire.sent[n][2] if n == 1 and source == 1 else content
    )
    found = wire.agree(write_keys(tmp_path, 3))
    assert [str(found[rank])[:24] for rank in (0, 2)] == ["Rank 1 is not who rank1."] * 2


def test_a_key_sent_back_is_refused() -> None:
    wire = Wire(3, None)
    wire.change = lambda n, source, to, content: wire.sent[n][to] if n == 0 else content
    assert all("changed on their way" in str(error) for error in wire.agree())


def test_a_rank_without_identity_is_refused_by_those_with_one(tmp_path: Path) -> None:
    wire = Wire(3, lambda n, source, _, content: bytes(64) if n and source == 2 else content)
    found = wire.agree(write_keys(tmp_path, 3))
    assert "Rank 2 is not who rank2.pub says, has no secure_aggregation_keys" in str(found[0])


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda f: (f / "rank0.pem").unlink(), FileNotFoundError, "no rank0.pem. Make a pair"),
        (lambda f: (f / "rank2.pub").unlink(), FileNotFoundError, "no rank2.pub. Make a pair"),
        (lambda f: (f / "rank0.pem").chmod(0o640), ValueError, r"read by others \(mode 640\)"),
        (lambda f: write(f / "rank0.pem", b"key"), ValueError, "is no key without a password"),
        (lambda f: write(f / "rank1.pub", b"key"), ValueError, "rank1.pub is no public key"),
        (
            lambda f: write(f / "rank0.pub", (f / "rank1.pub").read_bytes()),
            ValueError,
            "rank0.pub in .* is not the public key of rank0.pem",
        ),
        (
            lambda f: write(
                f / "rank0.pem",
                private_pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"x")),
            ),
            ValueError,
            "without a password",
        ),
        (
            lambda f: write(f / "rank0.pem", private_pem(generate_private_key(65537, 2048))),
            ValueError,
            "another kind than Ed25519",
        ),
    ],
)
def test_keys_that_cannot_be_used(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    folder = write_keys(tmp_path / "keys", 3)
    load_identity(str(folder), 0, 3)
    spoil(folder)
    with pytest.raises(error, match=says):
        load_identity(str(folder), 0, 3)


def test_the_commands_in_the_error_make_keys_that_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        load_identity(str(tmp_path), 0, 1)
    commands = str(raised.value).split("`")[1::2]
    assert len(commands) == 3
    assert os.system(f"cd {tmp_path} && {' && '.join(commands)} 2>/dev/null") == 0
    load_identity(str(tmp_path), 0, 1)
