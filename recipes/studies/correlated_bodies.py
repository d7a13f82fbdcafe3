"""Beyond a head, by proof, at messages of 16: a head first, then its encoder in public directions,
each sentence in one message of one of the two trainings.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_gradguard.heads import PrivateHead, SketchedBody, sketched_body

from . import correlated_heads as heads
from . import frontier_tables as tables
from .frontier_heads import Rows
from .frontier_rows import RATES_SEED
from .lib.results import Results, named
from .lib.tables import write_table

HEAD_STEPS, HEAD_RATE = 400, 20.0
TRAININGS = 3  # of each rate


class Row(heads.Row):
    """Trainings of one length, which is that of head and body together."""

    @property
    def body_steps(self) -> int:
        """Messages of the second training."""
        return self.steps - min(HEAD_STEPS, self.steps // 2)


class BodyTask(heads.HeadTask):
    """Trainings of a body, on rows that are made once and kept, a part at a time."""

    PART = 3200  # rows of a file

    def train(self, cell: dict, keep: bool = False) -> PrivateHead:
        """The merged model."""
        return self._merged(*self._body_and_rows(cell), cell)

    def _merged(self, body: SketchedBody, rows: Rows, cell: dict) -> PrivateHead:
        body.moves.weight.data.zero_()
        self.trainer(body, rows, cell).train()
        return body.merged()

    def _body_and_rows(self, cell: dict) -> tuple[SketchedBody, Rows]:
        """After a training of the head. Rates are tried on rows that are not held out."""
        places = list(range(len(self.train_rows["labels"])))
        if cell["seed"] == RATES_SEED:
            _, places = self.places()
        generator = torch.Generator().manual_seed(cell["seed"])
        order = torch.tensor(places)[torch.randperm(len(places), generator=generator)]
        of_head = cell["head_steps"] * cell["batch"]
        of_body = order[of_head : of_head + cell["steps"] * cell["batch"]]
        body = self.body_after(cell, order[:of_head].tolist())
        rows = self._body_rows(body, cell, of_body)
        return body, Rows(rows | {"labels": self.train_rows["labels"][of_body]})

    def body_after(self, cell: dict, places: list[int]) -> SketchedBody:
        """Of a head that these rows train."""
        rows = {name: tensor[places] for name, tensor in self.train_rows.items()}
        head = copy.deepcopy(self.full_head)
        path = self.folder / "bodies" / f"body-{_name(cell)}.safetensors"
        if path.exists():
            return _loaded(head, load_file(path))
        trainer = self.trainer(self.start_of(rows), Rows(rows), _of_head(cell))
        trainer.train()
        head.head.load_state_dict(trainer.model.head.state_dict())
        body = sketched_body(head, self.sentences("public")[0], cell["directions"])
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(body, head), path)
        return body

    def _body_rows(self, body: SketchedBody, cell: dict, places: Tensor) -> dict[str, Tensor]:
        texts, _ = self.sentences("train")
        parts = []
        for number, part in enumerate(places.split(self.PART)):
            name = f"rows-{_name(cell)}-{number}-{len(part)}.safetensors"
            path = self.folder / "bodies" / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                order = sorted(range(len(part)), key=lambda row: len(texts[int(part[row])]))
                rows = body.rows_of([texts[int(part[row])] for row in order])
                back = torch.tensor(order).argsort()
                save_file({name: tensor[back] for name, tensor in rows.items()}, path)
            parts.append(load_file(path))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def on_held_out(self, cell: dict) -> dict:
        """The mean of trainings that differ in their noise and in the order of rows. They are as
        long as the rows that are not held out allow.
        """
        held_out, _ = self.places()
        texts, labels = self.sentences("train")
        body, rows = self._body_and_rows(cell)
        cell = cell | {"steps": min(cell["steps"], len(rows) // cell["batch"])}
        scores = []
        for number in range(cell["trainings"]):
            model = self._merged(body, rows, cell | {"seed": RATES_SEED + number})
            classes = self._classes_of(model, [texts[row] for row in held_out])
            scores.append(float((classes == labels[held_out]).double().mean()))
        return {"held_out": round(sum(scores) / len(scores), 5)}

    @torch.no_grad()
    def right(self, model: Any, rows: dict[str, Tensor]) -> np.ndarray:
        """By the merged model, which reads the test sentences themselves."""
        return (self._classes_of(model, self.sentences("test")[0]) == rows["labels"]).numpy()

    @torch.no_grad()
    def _classes_of(self, model: PrivateHead, texts: Sequence[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        batches = model.batches_of([texts[row] for row in order])
        classes = torch.cat([model(**batch).logits.argmax(1).cpu() for batch in batches])
        return classes[torch.tensor(order).argsort()]


def _name(cell: dict) -> str:
    """Of files that depend on a cell's head."""
    return f"{cell['strength'].get('noise_multiplier')}-{cell['seed']}"


def _tensors(body: SketchedBody, head: PrivateHead) -> dict[str, Tensor]:
    """What a body is made of, but for the encoder."""
    tensors = {"mixing": body.mixing, "head": head.head.weight.detach()}
    for number, name in enumerate(body.layers):
        for kind in ("outputs", "inputs"):
            directions = body.get_buffer(f"{kind}_{number}")
            tensors[f"{kind} {number:03} {name}"] = directions
    return tensors


def _loaded(head: PrivateHead, tensors: dict[str, Tensor]) -> SketchedBody:
    """Of a head with its encoder, whose weight is among the tensors."""
    head.head.weight.data.copy_(tensors["head"])
    outputs, inputs = (
        {key.split()[2]: tensors[key] for key in sorted(tensors) if key.split()[0] == kind}
        for kind in ("outputs", "inputs")
    )
    return SketchedBody(head, outputs, inputs, tensors["mixing"])


def _of_head(cell: dict) -> dict:
    """A cell's first training, which those of other rates and lengths share."""
    return cell | {"steps": cell["head_steps"], "learning_rate": HEAD_RATE}


class Bodies(heads.Texts):
    """Accuracy on SST-2 of an ordinary model, whose head and then encoder were trained by messages
    of 16 sentences, each in one of them, with correlated noise and none.

    Conditions and figures: docs/findings/heads.md.
    """

    ROWS = [Row(1590, [heads.CORRELATED]), Row(4209, [heads.CORRELATED, heads.NONE])]
    MORE_ROWS: Sequence[heads.Row] = [Row(1590, [heads.NONE])]
    QUICK_ROW = Row(4, [heads.CORRELATED])
    FASTER, SEEDS = -2, 5
    UNDEFENDED = (RATES_SEED, 0, 1)  # seeds: each makes rows of its own, for half an hour

    def cells(self) -> dict:
        cells = super().cells()
        return {
            place: cell
            for place, cell in cells.items()
            if cell["defense"] != "none" or cell["seed"] in self.UNDEFENDED
        }

    def search_of(self, row: heads.Row, kind: heads.Kind, **other: float) -> dict[str, dict]:
        common = self._trained(row, kind) | {"seed": RATES_SEED, "trainings": TRAININGS} | other
        return self.search(common, heads.GRID, self._middle(kind))

    def _trained(self, row: heads.Row, kind: heads.Kind) -> dict:
        assert isinstance(row, Row)
        head_steps = row.steps - row.body_steps
        cell = super()._trained(row, kind)
        return cell | {"steps": row.body_steps, "head_steps": head_steps, "trained": "body"}

    def load(self) -> None:
        args = self.args
        self.task = BodyTask(args.model, args.data_dir, args.models, args.public)

    def report(self, metrics: dict) -> None:
        rows, tried = [], tables.pop_rates(metrics)
        for row, name in self._trainings():
            place = row.place(name)
            if place not in tried:
                continue
            runs, head = metrics[place].get(tables.ACCURACY, {}), self._heads(row, name)
            first = next(iter(runs.values()), {})
            proof = [f"{first[name]:.2g}" if name in first else "" for name in heads.PROOF]
            rate = self.best(self.search_of(row, heads.KINDS[name]))
            shown = [place, tried[place], f"{rate:g}"]
            gains = [tables.lost(head, runs), tables.lost(self._heads(row, heads.NONE), runs)]
            rows.append([*shown, tables.accuracy_text(runs), *gains, *proof])
        header = ["head of 400, then its body", "rates (held out)", "rate", "accuracy"]
        header += ["more than such a head", "more than the undefended head", "ε"]
        write_table(self.output, [*header, "members found at most"], rows)

    def _heads(self, row: heads.Row, name: str) -> dict:
        """Runs of heads alone, by as many messages, if they are published beside this."""
        output: Path = self.output.with_name("correlated_heads")
        if not named(output, ".json").exists():
            return {}
        strength = heads.KINDS[name].strength
        results, wanted = Results(output), {"steps": row.steps, "batch": row.batch}
        return {
            str(cell["seed"]): results[cell]
            for cell in results
            if "accuracy" in results[cell]
            and wanted.items() <= cell.items()
            and (cell["strength"], cell["directions"]) == (strength, row.directions)
        }
