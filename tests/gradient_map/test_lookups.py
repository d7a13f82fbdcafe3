"""Every operation of torch's by which a model may look something up is seen, and where its index
stands: by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig

from hf_gradguard.gradient_map.lookups import Lookup, contents, lookups, special_ids

ROWS, WIDTH = 5, 3
USED = {1, 3}
TABLE = torch.arange(1.0, ROWS * WIDTH + 1).view(ROWS, WIDTH)
IDS = torch.tensor([1, 3, 1])
COUNTS = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])


class Recorder(TorchDispatchMode):
    """Keeps the lookups of all operations, of which one is the table or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Lookup]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        self.seen += [(name, lookup) for lookup in lookups(name, args, kwargs or {})]
        return func(*args, **(kwargs or {}))


BATCH = TABLE.expand(2, ROWS, WIDTH).contiguous()
LOOKING: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "embedding": ("embedding", lambda t: functional.embedding(IDS, t)),
    "bag": ("_embedding_bag", lambda t: functional.embedding_bag(IDS[None], t.requires_grad_())),
    "bag, without gradients": (
        "_embedding_bag_forward_only", lambda t: functional.embedding_bag(IDS[None], t.detach()),
    ),
    "index_select": ("index_select", lambda t: t.index_select(0, IDS)),
    "gather": ("gather", lambda t: t.gather(0, IDS[:, None].expand(3, WIDTH))),
    "take_along_dim": ("gather", lambda t: t.take_along_dim(IDS[:, None], 0)),
    "take": ("take", lambda t: t[:, 0].contiguous().take(IDS)),
    "masked_select": ("masked_select", lambda t: t.masked_select(COUNTS[:, None] != 0)),
    "select": ("select", lambda t: t[3]),
    "index": ("index", lambda t: t[IDS]),
    "unsafe index": ("_unsafe_index", lambda t: torch.ops.aten._unsafe_index(t, [IDS])),
    "mm": ("mm", lambda t: COUNTS[None] @ t),
    "mm, transposed": ("mm", lambda t: t.T @ COUNTS[:, None]),
    "bmm": ("bmm", lambda t: torch.bmm(COUNTS.expand(2, 1, ROWS), t.expand(2, ROWS, WIDTH))),
    "mv": ("mv", lambda t: t.T @ COUNTS),
    "addmm": ("addmm", lambda t: torch.addmm(torch.zeros(1, WIDTH), COUNTS[None], t)),
    "baddbmm": (
        "baddbmm",
        lambda t: torch.baddbmm(
            torch.zeros(2, 1, WIDTH), COUNTS.expand(2, 1, ROWS), t.expand(2, ROWS, WIDTH)
        ),
    ),
    "addmv": ("addmv", lambda t: torch.addmv(torch.zeros(WIDTH), t.T, COUNTS)),
    "convolution": (
        "convolution", lambda t: functional.conv1d(COUNTS.view(1, ROWS, 1), t.T[..., None]),
    ),
}  # fmt: skip


def used_rows(lookup: Lookup) -> set[int]:
    places = lookup.places()
    if places.dtype == torch.bool:
        flags = places if places.dim() == 1 else places.any(-1)
        return set(flags.nonzero().flatten().tolist())
    return set(places.flatten().tolist())


@pytest.mark.parametrize(("operation", "look"), LOOKING.values(), ids=LOOKING)
def test_every_way_to_look_up_is_seen(operation: str, look: Callable[[Tensor], Any]) -> None:
    table, expected = TABLE.clone(), {3} if operation == "select" else USED
    with Recorder() as recorder:
        look(table)
    named = [lookup for name, lookup in recorder.seen if name == operation]
    assert named, [name for name, _ in recorder.seen]
    assert any(used_rows(lookup) == expected for lookup in named)


def test_a_layer_that_is_not_taken_apart_is_a_product() -> None:
    """As torch hands it on where it keeps `linear` whole: its weight is `(out, in)`."""
    seen = list(lookups("linear", (COUNTS[None], TABLE.T), {}))
    assert [used_rows(lookup) for lookup in seen if lookup.table.shape == (WIDTH, ROWS)] == [USED]
    counts_of_words = list(lookups("linear", (TABLE.T, COUNTS[None]), {}))
    assert USED in [used_rows(lookup) for lookup in counts_of_words]


def test_what_adds_is_no_lookup() -> None:
    with Recorder() as recorder:
        _ = (TABLE + 1).sum() * TABLE.mean(0)
    assert not recorder.seen


@pytest.mark.parametrize(
    ("name", "is_content"),
    [
        ("input_ids", True), ("labels", True), ("decoder_input_ids", True), ("bbox", True),
        ("pixel_values", True), ("entity_ids", True), ("masked_lm_labels", True),
        ("attention_mask", False), ("decoder_attention_mask", False), ("masks", False),
        ("mask", False), ("position_ids", False), ("entity_position_ids", False),
        ("positions", False), ("start_position", False), ("token_type_ids", False),
        ("segment_ids", False), ("length", False), ("input_lengths", False),
    ],
)  # fmt: skip
def test_entries_that_say_what_is_there(name: str, is_content: bool) -> None:
    assert contents({name: torch.ones(1)}) == ({name} if is_content else set())


@pytest.mark.parametrize(
    ("name", "ids"),
    [("pad_token_id", 7), ("eos_token_id", [7, 8]), ("forced_token_ids", [7, 8]),
     ("image_token_index", 7)],
)  # fmt: skip
def test_special_ids_have_many_names(name: str, ids: Any) -> None:
    """They stay where content is varied: positions are counted from padding."""
    config, wrapper = BertConfig(pad_token_id=None), nn.Module()
    assert not special_ids(config) & {7, 8}
    setattr(config, name, ids)
    wrapper.text_config = config  # type: ignore[assignment]
    expected = set(ids) if isinstance(ids, list) else {ids}
    assert expected <= special_ids(config)
    assert expected <= special_ids(wrapper)
