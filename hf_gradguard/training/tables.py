"""What ranks agree on before they share anything: which tables the input indexes. And a look at the
first messages, for matrices that say by their rows what was in a batch all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.utils import logging

from ..gradient_map.parameters import find_tables, remember_tables
from ..gradient_map.types import LossFunction
from .exchange import average
from .secure_aggregation import SecureAggregation

logger = logging.get_logger(__name__)


class AgreedTables:
    """The input-indexed tables of a model, found on every rank's first batch and joined over ranks.

    Two ranks may see different ones: each looks at its own data. They must average the same
    tensors, so what one rank found is withheld on all.

    Args:
        accelerator: Of the ranks.

    Example:
        >>> agreed = AgreedTables(Accelerator(cpu=True))
        >>> agreed.settle(model, batch, lambda model, batch: model(**batch).loss)
        True
        >>> agreed.settle(model, batch, lambda model, batch: model(**batch).loss)
        False
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._model: ReferenceType[nn.Module] | None = None
        self._tables = frozenset[str]()

    def settle(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss_fn: LossFunction,
        secure: SecureAggregation | None = None,
    ) -> bool:
        """Look for tables, once per model and kind of batch. All ranks must call it at every step.

        Args:
            model: The bare model.
            batch: Of a client of this rank.
            loss_fn: What runs the model.
            secure: Hides what this rank alone found.

        Returns:
            Whether this was the model's first batch.

        Raises:
            ValueError: If a later batch has entries that index tables that were shared so far.
        """
        found = find_tables(model, batch, loss_fn)
        if self._model is None or self._model() is not model:
            self._tables = self._joined(model, found, secure)
            remember_tables(model, self._tables)
            self._model = ref(model)
            return True
        if late := sorted(found - self._tables):
            raise ValueError(
                f"A batch with entries {sorted(batch)} indexes {', '.join(late)}, which earlier "
                "batches without them shared, and other ranks may still share. Collate every batch "
                f"with the same entries, or name them from the start: withhold={late}."
            )
        return False

    def _joined(
        self, model: nn.Module, found: frozenset[str], secure: SecureAggregation | None
    ) -> frozenset[str]:
        names = [name for name, _ in model.named_parameters()]
        device = self._accelerator.device
        flags = torch.tensor([float(name in found) for name in names], device=device)
        average([flags], self._accelerator, secure)
        return frozenset(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)


class RowGuard:
    """Compares which rows of each matrix are zero in the first messages of a run.

    Where that differs from message to message it is a function of the batch, whatever is in the
    rows: experts of a mixture show routing, rectified units that nothing activated show which.

    Args:
        messages: How many are compared.

    Example:
        >>> guard = RowGuard()
        >>> guard.see({"experts": torch.tensor([[1.0], [0.0]])})
        []
        >>> guard.see({"experts": torch.tensor([[0.0], [1.0]])})
        ['experts']
    """

    def __init__(self, messages: int = 8) -> None:
        self._left = messages
        self._rows: dict[str, list[Tensor]] = {}
        self._named = set[str]()

    def see(
        self, gradient: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None = None
    ) -> list[str]:
        """Names that are new among those whose pattern of zeros differs, with a warning. What is
        shared without any zero, as behind noise everywhere, shows no pattern.
        """
        if not self._left:
            return []
        self._left -= 1
        fresh = []
        for name, tensor in gradient.items():
            if tensor.dim() < 2 or name in self._named or not bool(tensor.any()):
                continue
            if shared is not None and bool(shared[name].all()):
                continue
            rows = [(tensor != 0).movedim(dim, 0).flatten(1).any(1) for dim in range(tensor.dim())]
            before = self._rows.setdefault(name, rows)
            if not all(map(torch.equal, before, rows)):
                fresh.append(name)
        self._named.update(fresh)
        if fresh:
            more = f" and {len(fresh) - 5} more" if len(fresh) > 5 else ""
            logger.warning(
                f"Zero rows of {', '.join(fresh[:5])}{more} differ from message to message, so "
                "they tell something about a batch whatever is in the other rows: which experts "
                "its tokens were routed to, which units were active, how long a text is. A "
                "defense that adds noise everywhere (gaussian_noise) fills them; withhold=[...] "
                "with patterns of these names leaves them out."
            )
        return fresh
