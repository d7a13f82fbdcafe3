"""Packed updates unpack to the same bits, take few bytes, and are refused when malformed."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from hf_gradguard import make_defense
from hf_gradguard.federation.guard import Guard, GuardSettings
from hf_gradguard.federation.packing import is_added, is_packed, pack, unpack, unpack_update
from hf_gradguard.gradient_map.views import PrecomputedGradient
from hf_gradguard.randomness import Stream

HEADER = "<4sBBBxIQQ"  # magic, flags, bits of gaps, bits of levels, levels, entries, unary bits
SPARSE, LEVELS = 1, 2


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def bits(tensor: Tensor) -> bytes:
    return tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()


def sparse(size: int, share: float) -> Tensor:
    is_zero = torch.rand(size, generator=torch.Generator().manual_seed(4)) >= share
    return normal(size).masked_fill(is_zero, 0.0)


TENSORS = {
    "dense": normal(7, 11),
    "sparse": sparse(5000, 0.01).view(50, 100),
    "half of it": sparse(5000, 0.5),
    "clustered": torch.cat([normal(300), torch.zeros(100_000), normal(1)]),
    "last alone": torch.cat([torch.zeros(9999), torch.ones(1)]),
    "first alone": torch.cat([torch.ones(1), torch.zeros(9999)]),
    "signs": normal(1000).sign() * 0.3,
    "levels and zeros": (normal(3000) * 0.7).round(),
    "many levels": (normal(70_000) * 40).round(),
    "zeros": torch.zeros(3, 4),
    "negative zeros": -torch.zeros(100),
    "one number": torch.full((40,), 0.25),
    "scalar": torch.tensor(0.5),
    "empty": torch.zeros(0, 5),
    "half precision": normal(500, dtype=torch.float16),
    "bf16": torch.zeros(500, dtype=torch.bfloat16).index_fill_(0, torch.arange(3), 1.5),
    "float64": sparse(5000, 0.02).double() / 3,
    "subnormal": torch.full((10,), 1e-42),
    "not contiguous": normal(20, 30).t(),
}


@pytest.mark.parametrize("case", TENSORS)
def test_it_unpacks_to_the_same_bits(case: str) -> None:
    tensor = TENSORS[case]
    packed = pack(tensor)
    again = unpack("w", packed, torch.empty(tensor.shape, dtype=tensor.dtype))
    assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
    assert bits(again) == bits(tensor)
    assert packed.shape == (len(packed),)
    assert len(packed) <= 28 + tensor.numel() * tensor.element_size()


def test_positions_are_near_their_entropy() -> None:
    """Positions at random have an entropy of H(p) bits per entry, below which no code is."""
    for share in (0.001, 0.01, 0.1, 0.4):
        tensor = sparse(200_000, share)
        count = int(tensor.count_nonzero())
        p = count / len(tensor)
        entropy = len(tensor) * -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
        positions = len(pack(tensor)) - 28 - 4 * count
        assert 0.98 * entropy < positions < 1.07 * entropy, (share, positions / entropy)


@pytest.mark.parametrize(
    ("name", "settings", "share"),
    [
        ("pruning", {"ratio": 0.99}, 0.013),
        ("quantization", {"bits": 1}, 1 / 32),
        ("quantization", {"bits": 4, "stochastic": True}, 4 / 32),
        ("quantization", {"bits": 8}, 8 / 32),
        ("quantization", {"sign_only": True}, 1 / 32),
        ("gaussian_noise", {"scale": 0.1}, 1.0),
    ],
)
def test_messages_take_their_bits(name: str, settings: dict[str, object], share: float) -> None:
    gradient = {"w": normal(400, 500), "b": normal(500)}
    message = make_defense(name, **settings)(PrecomputedGradient(gradient))
    packed = {key: pack(tensor) for key, tensor in message.items()}
    for key, tensor in message.items():
        assert bits(unpack(key, packed[key], tensor)) == bits(tensor)
    whole = sum(4 * tensor.numel() for tensor in gradient.values())
    assert sum(map(len, packed.values())) < 1.01 * share * whole + 2400  # levels and headers


# Malformed


def remade(packed: Tensor, **changes: int) -> Tensor:
    """With other numbers in its header."""
    buffer = bytearray(packed.numpy().tobytes())
    names = ("magic", "flags", "low_bits", "level_bits", "levels", "count", "unary_bits")
    form = dict(zip(names, struct.unpack_from(HEADER, buffer), strict=True)) | changes
    struct.pack_into(HEADER, buffer, 0, *form.values())
    return torch.frombuffer(buffer, dtype=torch.uint8)


def flipped(packed: Tensor, place: int, mask: int = 0xFF) -> Tensor:
    changed = packed.clone()
    changed[place] ^= mask
    return changed


FEW = torch.zeros(100).index_fill_(0, torch.tensor([3, 50, 99]), 1.5)
ROUNDED = normal(100).round()
MALFORMED = {
    "other magic": (lambda: flipped(pack(FEW), 0), "begin"),
    "cut off": (lambda: pack(FEW)[:-1], "bytes"),
    "too long": (lambda: torch.cat([pack(FEW), torch.zeros(1, dtype=torch.uint8)]), "bytes"),
    "header alone": (lambda: pack(FEW)[:20], "begin"),
    "of floats": (lambda: pack(FEW).float(), "begin"),
    "unknown flags": (lambda: remade(pack(FEW), flags=64), "flags"),
    "more entries": (lambda: remade(pack(FEW), count=101), "more entries"),
    "entries of 2 to the 60": (lambda: remade(pack(FEW), count=2**60), "more entries"),
    "fewer entries": (lambda: remade(pack(normal(100)), count=99), "lacks entries"),
    "wide gaps": (lambda: remade(pack(FEW), low_bits=200), "gaps"),
    "long positions": (lambda: remade(pack(FEW), unary_bits=2**60), "positions"),
    "positions of all": (lambda: remade(pack(normal(100)), unary_bits=8), "positions"),
    "levels without a flag": (lambda: remade(pack(FEW), levels=3), "levels"),
    "bits of levels": (lambda: remade(pack(ROUNDED), level_bits=30), "bits"),
    "another tensor's": (lambda: pack(FEW.repeat(3)), "outside|more entries"),
    "positions cut short": (lambda: flipped(pack(FEW), 28), "positions"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_messages_are_refused_by_name(case: str) -> None:
    make, words = MALFORMED[case]
    with pytest.raises(ValueError, match=f"'layer.weight' is packed wrongly: .*({words})"):
        unpack("layer.weight", make(), torch.empty(100))


def test_levels_that_there_are_not_are_refused() -> None:
    three = torch.tensor([-1.0, 0.5, 1.0]).repeat(40)
    packed = pack(three)
    assert int(packed[4]) == LEVELS
    packed[-1] = 0xFF  # the last levels' numbers are 3
    with pytest.raises(ValueError, match="more levels"):
        unpack("w", packed, three)


def test_numbers_that_are_not_finite_are_refused() -> None:
    for number in (math.inf, math.nan):
        with pytest.raises(FloatingPointError, match="'w' is not finite"):
            unpack("w", pack(torch.tensor([1.0, number])), torch.empty(2))


def test_any_flipped_bit_is_refused_or_unpacks_to_some_tensor() -> None:
    """Nothing else comes out: no other error, no other shape, nothing that is not finite."""
    for tensor in (FEW, ROUNDED, normal(100)):
        packed, errors = pack(tensor), []
        for place in range(len(packed)):
            for mask in (1, 16, 128):
                try:
                    unpacked = unpack("w", flipped(packed, place, mask), tensor)
                except (ValueError, FloatingPointError) as error:
                    errors.append(str(error))
                else:
                    assert unpacked.shape == tensor.shape
                    assert torch.isfinite(unpacked).all()
        assert len(errors) > 60
        assert all("'w'" in error for error in errors)


# A guard's updates


START = {"a": normal(30, 40), "b": torch.ones(40)}
STEP = {"a": 0.01 * normal(30, 40).flip(0), "b": 0.01 * normal(40)}


@pytest.mark.parametrize("sends", ["weights", "difference"])
@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("pruning", {"ratio": 0.9}),
        ("quantization", {"bits": 4}),
        ("gaussian_noise", {"scale": 0.01}),
    ],
)
def test_the_server_gets_what_it_would_have_got(
    sends: str, defense: str, settings: dict[str, float]
) -> None:
    trained = {n: START[n] + STEP[n] for n in START} if sends == "weights" else STEP
    whole, packed = (
        Guard(
            GuardSettings(defense=defense, settings=settings, sends=sends, packed=is_on)  # type: ignore[arg-type]
        ).protect(START, trained, Stream.from_seeds(5))
        for is_on in (False, True)
    )
    assert all(is_packed(tensor) for tensor in packed.values())
    assert {is_added(tensor) for tensor in packed.values()} == {sends == "weights"}
    unpacked = unpack_update(packed, START)
    assert list(unpacked) == list(whole)
    for name, tensor in whole.items():
        assert bits(unpacked[name]) == bits(tensor), name


def test_what_is_withheld_takes_no_bytes() -> None:
    received = START | {"embed": normal(500, 40), "count": torch.tensor(3)}
    trained = {n: START[n] + STEP[n] for n in START} | {"embed": received["embed"] + 1}
    trained["count"] = torch.tensor(3)
    settings = {"defense": "pruning", "settings": {"ratio": 0.9}, "withhold": "embed"}
    sent = Guard(GuardSettings(**settings, packed=True)).protect(received, trained)  # type: ignore[arg-type]
    assert len(sent["embed"]) == 28
    unpacked = unpack_update(sent, received)
    assert torch.equal(unpacked["embed"], received["embed"])
    assert int(unpacked["count"]) == 3
    left_out = GuardSettings(**settings, packed=True, withheld="left out")  # type: ignore[arg-type]
    assert "embed" not in Guard(left_out).protect(received, trained)


def test_a_name_that_was_not_received_is_refused() -> None:
    with pytest.raises(ValueError, match="'c' was sent"):
        unpack_update({"c": pack(START["b"])}, START)
    with pytest.raises(ValueError, match="'b' is packed wrongly"):
        unpack_update({"b": torch.zeros(40, dtype=torch.uint8)}, START)
