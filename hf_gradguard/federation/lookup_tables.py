"""Recognition of embedding tables by their names, which is all that a guard knows of a model."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

import torch
from torch import Tensor

PREFIX = "gradguard."
TABLES = (
    "*embed*, *emb.weight, *wte.weight, *wpe.weight, shared.weight, *.shared.weight, "
    "*relative_attention_bias*, w.weight, *transformer.w.weight"
)
"""The usual names of tables, which are matrices whose rows the data looks up."""
_TABLE = re.compile(r"(.*[._])?(embed(der|dings?)?|emb|wte|wpe|shared|tokens|positions)")
"""The usual names of tables' modules.

A dense layer behind a table has another name, and a bias: ALBERT's `embedding_hidden_mapping_in`,
ELECTRA's `embeddings_project`.
"""


def check_tables(received: Mapping[str, Tensor], change: Mapping[str, Tensor], tables: str) -> None:
    """Refuse a change of a table that the data looks up: its rows name the words.

    Names decide which matrices are tables. A second name of the same values, as of a tied output
    head, counts as well. A dense layer behind a table does not. With the usual names (`TABLES`), a
    matrix of another name is also refused if some of its rows changed and others did not at all.
    Weight decay changes every row and so hides a table: list the tables of a model that has other
    names for them.

    Args:
        received: The weights that the client got.
        change: The change of those weights.
        tables: Patterns of names, with commas between them.

    Raises:
        ValueError: If a table changed. The message has its name and the way out.

    Example:
        >>> received, change = {"embed": torch.ones(5, 8)}, {"embed": torch.zeros(5, 8)}
        >>> change["embed"][:3] = 0.1
        >>> check_tables(received, change, TABLES)
        Traceback (most recent call last):
        ValueError: Nothing was sent: 'embed' is a table that the data looks up, ...
    """
    named = [name for name, t in received.items() if t.dim() == 2 and matches(name, tables)]
    if tables == TABLES:
        named = [name for name in named if not _is_dense(name, received)]
    for name in [name for name, tensor in change.items() if tensor.dim() == 2 and tensor.any()]:
        if len(change[name]) < 3:
            continue  # a table of two rows only says whether a text has a second segment
        # A head that is tied to a withheld table is refused, too.
        if any(torch.equal(received[name], received[table]) for table in named):
            raise ValueError(
                f"Nothing was sent: {name!r} is a table that the data looks up, and which of its "
                "rows changed names the words whatever is done to the others. Do not train it, "
                f"name it in {PREFIX}withhold, or set {PREFIX}share_input_embeddings to send it "
                f"all the same. If it is no table, list your model's tables in {PREFIX}tables."
            )
        # A row that stays zero is padding, or belongs to a factor of LoRA that starts at zero.
        changed = change[name].any(1)
        idle = ~changed & received[name].any(1)
        if tables == TABLES and idle.any():
            raise ValueError(
                f"Nothing was sent: {name!r} changed in {int(changed.sum())} of {len(changed)} "
                f"rows, as a table does that the data looks up. If it is one, name it in "
                f"{PREFIX}withhold; if not, list your model's tables in {PREFIX}tables (none: '-')."
            )


def _is_dense(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a matrix is a dense layer's that is only named after the table before it.

    Such a layer has a bias.
    """
    module = name.rpartition(".")[0]
    bias = weights.get(f"{module}.bias")
    return bias is not None and len(bias) == len(weights[name]) and not _TABLE.fullmatch(module)


def matches(name: str, patterns: str) -> bool:
    """Return whether a name fits one of some patterns with commas between them.

    Example:
        >>> matches("model.embed_tokens.weight", TABLES)
        True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in listed(patterns))


def listed(names: str) -> list[str]:
    """Return the names in a text, in which commas are between them.

    Example:
        >>> listed("a, b,")
        ['a', 'b']
    """
    return [name.strip() for name in names.split(",") if name.strip()]
