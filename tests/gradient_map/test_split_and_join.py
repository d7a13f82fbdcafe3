"""Batches that are joined are cut apart again as they were, however many rows and tokens each has,
and clients that a batch is split into have each of its rows once, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_gradguard.gradient_map.local_training.batches import Pieces, cut, join, pieces_of
from hf_gradguard.training.message import split

SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def texts(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Rows of several lengths, of which one has all tokens; some labels are padding, too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    return {
        "input_ids": torch.randint(1, 50, (rows, length), generator=generator),
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        "labels": torch.randint(-1, 9, (rows, length), generator=generator).abs(),
        "weight": torch.rand(rows, generator=generator),
        "use_cache": False,
        "scale": torch.tensor(0.5),
    }


def is_same(entry: Any, other: Any) -> bool:
    return torch.equal(entry, other) if isinstance(entry, Tensor) else entry == other


@FEW
@given(SIZES)
def test_batches_that_were_joined_are_split_into_what_they_were(
    sizes: list[tuple[int, int]],
) -> None:
    batches = [texts(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    pieces = Pieces(batches)
    whole = pieces.joined()
    rows, longest = sum(rows for rows, _ in sizes), max(length for _, length in sizes)
    assert whole["input_ids"].shape == (rows, longest)
    # What was filled up counts as padding wherever it is looked up.
    assert int(whole["attention_mask"].sum()) == sum(
        int(b["attention_mask"].sum()) for b in batches
    )
    filled = rows * longest - sum(rows * length for rows, length in sizes)
    assert int((whole["labels"] == -100).sum()) == filled
    for piece, batch in zip(pieces.split(whole), batches, strict=True):
        assert piece.keys() == batch.keys()
        assert all(is_same(piece[name], batch[name]) for name in batch)


@FEW
@given(SIZES, st.integers(1, 3))
def test_cut_undoes_join(sizes: list[tuple[int, int]], width: int) -> None:
    """In any number of dimensions, and what is written to a part is written to the whole."""
    parts = [torch.randn(rows, length, width + length % 2) for rows, length in sizes]
    whole = join(parts, fill=7.0)
    shapes = [part.shape for part in parts]
    views = cut(whole, [len(part) for part in parts], shapes)
    assert all(map(torch.equal, views, parts))
    assert int((whole == 7).sum()) == whole.numel() - sum(part.numel() for part in parts)
    views[-1].zero_()
    assert not cut(whole, [len(part) for part in parts], shapes)[-1].any()


@FEW
@given(st.integers(1, 12), st.integers(1, 14))
def test_clients_have_each_row_once(rows: int, clients: int) -> None:
    batch = texts(rows, 3, 0)
    parts = split(batch, clients)
    counts = [len(part["labels"]) for part in parts]
    assert len(parts) == clients
    assert max(counts) - min(counts) <= 1
    for name in ("input_ids", "attention_mask", "labels", "weight"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert all(part["use_cache"] is False for part in parts)


@FEW
@given(st.integers(1, 12), st.integers(1, 14))
def test_pieces_of_one_size_are_the_batch(rows: int, size: int) -> None:
    batch = texts(rows, 3, 0)
    parts = pieces_of(batch, size)
    assert [len(part["labels"]) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]["labels"]) <= size
    whole = Pieces(parts).joined()
    assert all(is_same(whole[name], batch[name]) for name in batch)
