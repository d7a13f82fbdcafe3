"""How far does one row move a clipped sum, in every arithmetic that trains?"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum, known_plan
from hf_gradguard.training.privacy.private_rows import rounding_of_rows

from ..study import Study
from .lib.tables import write_table

Batch = dict[str, Tensor]
BIASED = 1.3547821, 1.3267975  # whose sums float32 rounds upward, and downward, more often
LAST = 1100
BORDERS = [1, 2, 3, 7, 15, 31, 47, 63, 64, 95, 127, 191, 255, 383, 511, 767, 1023, 1099]
FEW = [1, 15, 63, 255]  # where rows are differentiated one by one
ARITHMETICS: dict[str, tuple[torch.dtype, torch.dtype | None, str]] = {
    "float32": (torch.float32, None, "highest"),
    "float64": (torch.float64, None, "highest"),
    "float32, coarse products": (torch.float32, None, "medium"),
    "bfloat16 autocast": (torch.float32, torch.bfloat16, "highest"),
    "float16 autocast": (torch.float32, torch.float16, "highest"),
    "bfloat16 weights": (torch.bfloat16, None, "highest"),
    "float16 weights": (torch.float16, None, "highest"),
}


class Classifier(nn.Module):
    """Cross-entropy of some layers, at zero where they have no body."""

    def __init__(self, *layers: nn.Module, at_zero: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for parameter in self.parameters() if at_zero else ():
            nn.init.zeros_(parameter)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        logits = self.layers(pixel_values.to(next(self.parameters()).dtype))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


class Tokens(nn.Module):
    """The mean of tokens' logits, but for the padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, 2)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs_embeds.to(self.body.weight.dtype)) * attention_mask[..., None]
        mean = logits.sum(1) / attention_mask.sum(1, keepdim=True)
        return SimpleNamespace(loss=nn.functional.cross_entropy(mean, labels))


def drawn(count: int, size: int) -> Batch:
    """Pictures, pixel by pixel."""
    return of_pixels(torch.randn(count, 3, size, size))


def bright(count: int, size: int, value: float) -> Batch:
    """Pictures of one brightness."""
    return of_pixels(torch.full((count, 3, size, size), 2 * value))


def of_pixels(pixels: Tensor) -> Batch:
    return {"pixel_values": pixels, "labels": torch.ones(len(pixels), dtype=torch.long)}


def alike(count: int, length: int, value: float) -> Batch:
    """Texts whose tokens are one vector."""
    mask = torch.ones(count, length, dtype=torch.long)
    tokens = torch.full((count, length, 8), 2 * value)
    labels = torch.ones(count, dtype=torch.long)
    return {"inputs_embeds": tokens, "attention_mask": mask, "labels": labels}


def texts(count: int, length: int) -> Batch:
    """Texts of words that are drawn, in two classes."""
    ids = torch.randint(2, 60, (count, length))
    labels = torch.arange(count) % 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def continued(count: int, length: int) -> Batch:
    """Texts whose next words are learned."""
    batch = texts(count, length)
    return batch | {"labels": batch["input_ids"]}


def groups() -> nn.Module:
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
    body = [first, nn.GroupNorm(4, 16), nn.ReLU(), second, nn.GroupNorm(4, 16), nn.ReLU()]
    return Classifier(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def sizes(**more: Any) -> dict[str, Any]:
    same = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return same | {"num_hidden_layers": 2} | more


def bert() -> nn.Module:
    config = BertConfig(**sizes(vocab_size=60, max_position_embeddings=40, pad_token_id=0))
    return BertForSequenceClassification(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        **sizes(vocab_size=60, num_key_value_heads=2, pad_token_id=0), tie_word_embeddings=False
    )
    return LlamaForCausalLM(config)


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**sizes(image_size=16, patch_size=8)))


def zero_head(size: int) -> nn.Module:
    return Classifier(nn.Flatten(), nn.Linear(3 * size**2, 2), at_zero=True)


def zero_convolution() -> nn.Module:
    pool = nn.AdaptiveAvgPool2d(1)
    return Classifier(nn.Conv2d(3, 2, 3, padding=1), pool, nn.Flatten(), at_zero=True)


class Task(NamedTuple):
    """A model, rows, and one row more.

    Args:
        make: Makes the model.
        rows: Makes so many rows, of one value.
        more: Makes the row more, which may be longer.
        values: Each is tried. None: rows are drawn.
        all_sizes: Whether every size is tried in float32.
    """

    make: Callable[[], nn.Module]
    rows: Callable[[int, Any], Batch]
    more: Callable[[Any], Batch]
    values: tuple[float | None, ...] = BIASED
    all_sizes: bool = False


def drawn_task(make: Callable[[], nn.Module], rows: Callable[[int, int], Batch], *sizes: int):
    """A task of rows that are drawn, of one size, and a row more of the same or another."""
    return Task(make, lambda n, _: rows(n, sizes[0]), lambda _: rows(1, sizes[-1]), (None,))


TASKS = {
    "a head at zero, rows alike": Task(
        lambda: zero_head(2), lambda n, v: bright(n, 2, v), lambda v: bright(1, 2, v),
        all_sizes=True,
    ),
    "a head at zero, rows drawn": drawn_task(lambda: zero_head(4), drawn, 4),
    "tokens alike, the row more is longer": Task(
        lambda: Tokens(8), lambda n, v: alike(n, 64, v), lambda v: alike(1, 400, v)
    ),
    "a convolution at zero, pictures alike": Task(
        zero_convolution, lambda n, v: bright(n, 16, v), lambda v: bright(1, 16, v)
    ),
    "convolutions, group normalization": drawn_task(groups, drawn, 8),
    "BERT, the row more is longer": drawn_task(bert, texts, 6, 20),
    "Llama, the row more is longer": drawn_task(llama, continued, 6, 20),
    "ViT": drawn_task(vit, drawn, 16),
}  # fmt: skip


class RowRounding(Study):
    """‖S(D + a row) - S(D)‖ / C of the clipped sum S that `dp_sgd(per_sample=True)` adds noise to,
    at its worst over sizes of D from 1 to 1,100 rows, beside 1 + what noise is made larger for.

    Rows are alike, or drawn. The bound C is what a row alike has, or half of what drawn ones have.
    One head is tried at all sizes, others about powers of two and where kernels cut sums. In half
    precision rows are differentiated one by one, so that sizes decide nothing: four are tried.
    """

    def cells(self) -> dict:
        tasks = list(TASKS)[:2] if self.quick else list(TASKS)
        return {
            (task, arithmetic): {"task": task, "arithmetic": arithmetic, "seed": 0}
            for task, arithmetic in itertools.product(tasks, ARITHMETICS)
        }

    def load(self) -> None:
        torch.set_num_threads(1)

    def measure(self, cell: dict) -> dict:
        task, (weights, autocast, products) = TASKS[cell["task"]], ARITHMETICS[cell["arithmetic"]]
        moved: list[tuple[float, int]] = []
        with _products(products):
            for value in task.values:
                torch.manual_seed(cell["seed"])
                sums = Sums(task, value, weights, autocast)
                chosen = FEW if sums.takes_single_rows else BORDERS
                if task.all_sizes and not sums.takes_single_rows:
                    chosen = list(range(1, LAST))
                chosen = chosen[:4] if self.quick else chosen
                moved += [(sums.moved(size), size) for size in chosen]
        worst, size = max(moved, key=lambda found: (found[0] - 1) / rounding_of_rows(found[1]))
        return {
            "moved": round(worst, 7), "rows": size, "sizes": len(chosen),
            "counted": round(1 + rounding_of_rows(size), 7), "row by row": sums.takes_single_rows,
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        header = ["worst ‖difference‖ / C (1 + what is counted, rows)", *ARITHMETICS]
        rows = []
        for task, cells in metrics.items():
            figures = [cells[name] for name in ARITHMETICS]
            rows.append(
                [task, *(f"{f['moved']:.5f} ({f['counted']:.5f}, {f['rows']})" for f in figures)]
            )
        write_table(self.output, header, rows)


class Sums:
    """Clipped sums of a task's rows, in one arithmetic."""

    def __init__(
        self, task: Task, value: float | None, weights: torch.dtype, autocast: torch.dtype | None
    ) -> None:
        self._autocast = autocast
        self._model = task.make().to(weights).eval()
        self._rows, self._more = task.rows(LAST, value), task.more(value)
        few = {name: entry[:4] for name, entry in self._rows.items()}
        gmap = self._map(few)
        norms, plan = clipped_sum(gmap, 1.0).norms, known_plan(gmap)
        self.takes_single_rows = plan is not None and bool(plan.reason)
        self._clip = float(norms[0]) * (0.5 if value is None else 1.0)

    def moved(self, size: int) -> float:
        """How far the row more moves the sum of so many, in units of C."""
        rows = {name: entry[:size] for name, entry in self._rows.items()}
        beside = {
            name: torch.cat([entry, _as_long(rows[name], entry, name)])
            for name, entry in self._more.items()
        }
        before, after = (self._clipped(some, self._clip).total for some in (rows, beside))
        squares = [(after[n].double() - t.double()).square().sum() for n, t in before.items()]
        return float(torch.stack(squares).sum().sqrt()) / self._clip

    def _clipped(self, rows: Batch, clip: float) -> Any:
        return clipped_sum(self._map(rows), clip)

    def _map(self, rows: Batch) -> GradientMap:
        dtype = next(self._model.parameters()).dtype
        batch = {n: e.to(dtype) if e.is_floating_point() else e for n, e in rows.items()}
        return GradientMap(
            self._model, batch, loss_fn=self._loss, second_order=False, needs_input=False
        )

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            loss: Tensor = model(**batch).loss
            return loss


def _as_long(rows: Tensor, longer: Tensor, name: str) -> Tensor:
    """Rows that are filled up to a longer one, as collators do."""
    if rows.dim() < 2 or rows.shape[1] == longer.shape[1]:
        return rows
    shape = (len(rows), longer.shape[1] - rows.shape[1], *rows.shape[2:])
    return torch.cat([rows, rows.new_full(shape, -100 if name == "labels" else 0)], 1)


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
