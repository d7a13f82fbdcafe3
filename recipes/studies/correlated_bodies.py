"""A head and the body under it by proof, at messages of 16: the body moves in public directions."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from hf_gradguard.bodies import SketchedBody, sketched_body
from hf_gradguard.heads import FeatureHead

from . import frontier_clients as clients
from .correlated_heads import CORRELATED, GRID, NONE, HeadTask, Kind, Row, Texts
from .frontier_heads import Rows
from .frontier_rows import RATES_SEED
from .lib.device import DEVICE
from .lib.linear_heads import cut
from .lib.results import Results
from .lib.text import load_tokenizer

HEAD_STEPS, HEAD_RATE = 400, 10.0
PUBLIC = 2000  # sentences that say in which directions the body moves
MIDDLE_RATE = GRID[3]
OTHER_SEED = 1000  # beyond the head's: of the body's messages and of their noise


class Sentences(Dataset):
    """Tokens of sentences, made when they are asked for.

    Args:
        tokenizer: Makes them.
        texts: The sentences.
        labels: `(N,)` class ids.
        length: Tokens of a sentence at most.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], labels: Tensor, length: int
    ) -> None:
        self._texts, self._labels = texts, labels
        self._tokens = functools.partial(tokenizer, truncation=True, max_length=length)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**self._tokens(self._texts[row]), "labels": int(self._labels[row])}


def first_rows(linear: nn.Linear, count: int) -> nn.Linear:
    """The same map, to its first `count` outputs."""
    kept = nn.Linear(linear.in_features, count).requires_grad_(False)
    kept.weight.copy_(linear.weight[:count])
    kept.bias.copy_(linear.bias[:count])
    return kept


class BodyTask(HeadTask):
    """A head is trained first, then head and body on sentences that the head has not seen."""

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._name)

    def train(self, cell: dict, keep: bool = False) -> nn.Module:
        return self.trained_on(list(range(len(self.sentences("train")[0]))), cell)

    def trained_on(self, places: Sequence[int], cell: dict) -> FeatureHead:
        """By some of the training sentences, each in one message: a usual model."""
        generator = torch.Generator().manual_seed(cell["seed"])
        order = torch.tensor(places)[torch.randperm(len(places), generator=generator)]
        stop, end = (cell[steps] * cell["batch"] for steps in ("head_steps", "steps"))
        body = copy.deepcopy(self.body_of(order[:stop], cell))
        texts, labels = self.sentences("train")
        later = [texts[place] for place in order[stop:end].tolist()]
        rows = Sentences(self.tokenizer, later, labels[order[stop:end]], self.LENGTH)
        steps = {"steps": len(rows) // cell["batch"], "seed": cell["seed"] + OTHER_SEED}
        collator = DataCollatorWithPadding(self.tokenizer)
        self.trainer(body, rows, cell | steps, collator).train()
        return body.merged()

    def body_of(self, places: Tensor, cell: dict) -> SketchedBody:
        """On a head that these sentences train; cells that differ in the body's rate share it."""
        rate_aside = {name: entry for name, entry in cell.items() if name != "learning_rate"}
        if getattr(self, "_body_cell", None) != rate_aside:
            rows = cut(
                {name: rows[places] for name, rows in self.train_rows.items()}, cell["directions"]
            )
            head = self.start_of(rows)
            settings = {"steps": cell["head_steps"], "learning_rate": HEAD_RATE}
            self.trainer(head, Rows(rows), cell | settings).train()
            whole = copy.deepcopy(self.full_head)
            whole.directions = first_rows(whole.directions, head.head.in_features - 1)
            whole.head = head.head
            public = self.sentences("public")[0][: cell["public"]]
            self._body = sketched_body(whole, public, cell["directions"])
            self._body_cell = rate_aside
        return self._body

    def on_held_out(self, cell: dict) -> dict:
        """What a rate is chosen by: as many messages as there are rows for."""
        held_out, learned = self.places()
        steps = min(cell["steps"], len(learned) // cell["batch"])
        texts, labels = self.sentences("train")
        judged = [texts[place] for place in held_out]
        model = self.trained_on(learned, cell | {"steps": steps})
        right = self.right_texts(model, judged, labels[torch.tensor(held_out)])
        return {"held_out": round(float(right.mean()), 5), "messages": steps}

    def right_of_test(self, cell: dict) -> np.ndarray:
        return self.right_texts(self.train(cell), *self.sentences("test"))

    @torch.no_grad()
    def right_texts(self, model: nn.Module, texts: Sequence[str], labels: Tensor) -> np.ndarray:
        """Which of these sentences a usual model classifies rightly, those of a length together."""
        right = np.zeros(len(texts), dtype=bool)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            inputs = self.tokenizer(
                [texts[place] for place in places], padding=True, truncation=True,
                max_length=self.LENGTH, return_tensors="pt",
            )  # fmt: skip
            classes = model.to(DEVICE)(**inputs.to(DEVICE)).logits.argmax(1).cpu()
            right[places] = (classes == labels[places]).numpy()
        return right


class Bodies(Texts):
    """Accuracy on SST-2 of a head and its encoder, trained by messages of 16 sentences, each in one
    of them, with correlated noise and with none: 400 messages train the head, all others both.

    Conditions and figures: docs/findings/correlated_bodies.md.
    """

    ROWS, MORE_ROWS = [Row(1590, [NONE, CORRELATED])], [Row(4209, [NONE, CORRELATED])]
    QUICK_ROW = Row(4, [NONE, CORRELATED], 2, 4)

    def load(self) -> None:
        args = self.args
        self.task = BodyTask(args.model, args.data_dir, args.models, args.public)

    def search(self, row: Row, kind: Kind, **other: float) -> dict[str, dict]:
        """Cells of rates so far, which are trained on rows that are held out."""
        common = self._trained(row, kind) | {"seed": RATES_SEED} | other
        middle = GRID.index(MIDDLE_RATE)
        start = GRID[middle - 1 : middle + 2]
        rates = start[1:2]
        if not self.quick:
            rates = clients.rates_so_far(Results(self.output), common, start, GRID)
        return clients.cells_by_rate(common, rates)

    def _trained(self, row: Row, kind: Kind) -> dict:
        head_steps = row.steps // 2 if self.quick else HEAD_STEPS
        own = {"body": True, "head_steps": head_steps, "public": PUBLIC}
        return super()._trained(row, kind) | own
