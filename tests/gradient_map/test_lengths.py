"""A row that is filled up to the longest of its batch must not add something else there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import flat
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap, clipped_sum

CLIP, SHORT, LONG = 0.01, 40, 100


class Speech(nn.Module):
    """Hears zeros as sound, as wav2vec2 with group normalization does."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 5, stride=2)
        self.head = nn.Linear(4, 2)

    def forward(
        self, input_values: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        heard = self.convolution(input_values[:, None]).tanh()
        if attention_mask is None:
            return SimpleNamespace(loss=self._loss(heard.mean(2), labels))
        counts = attention_mask[:, 4::2]
        mean = (heard * counts[:, None]).sum(2) / counts.sum(1, keepdim=True)
        return SimpleNamespace(loss=self._loss(mean, labels))

    def _loss(self, mean: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(mean), labels)


def sounds(rows: int, longest: int, has_mask: bool) -> dict[str, Tensor]:
    """Rows of `SHORT`, the last of `longest`, filled up with zeros."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.tensor([SHORT] * (rows - 1) + [longest])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    values = torch.zeros(rows, longest)
    for row, length in enumerate(lengths.tolist()):
        values[row, :length] = torch.randn(length, generator=draws)
    batch = {"input_values": values, "labels": torch.arange(rows) % 2}
    return batch | ({"attention_mask": mask} if has_mask else {})


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mean: Tensor = model(**batch).loss
    return mean


def total(model: nn.Module, batch: dict[str, Tensor], is_seen: bool = False) -> Tensor:
    kind = SampleMap if is_seen else GradientMap
    gmap = kind(model, batch, loss_fn=loss, second_order=False, needs_input=False)
    return flat(clipped_sum(gmap, CLIP).total)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("is_seen", [False, True])
def test_rows_of_another_length_without_a_mask_are_refused(rows: int, is_seen: bool) -> None:
    """One long row moved the sum of eight short ones by more than itself."""
    torch.manual_seed(0)
    model = Speech()
    total(model, sounds(8, SHORT, has_mask=False))
    with pytest.raises(NotImplementedError, match=r"'input_values' has rows of \(100,\)"):
        total(model, sounds(rows, LONG, has_mask=False), is_seen)
    total(model, sounds(5, SHORT, has_mask=False))


def test_rows_of_another_length_with_a_mask_move_the_sum_by_what_they_are_clipped_to() -> None:
    torch.manual_seed(0)
    model = Speech()
    few, more = (
        total(model, sounds(rows, longest, has_mask=True))
        for rows, longest in ((8, SHORT), (9, LONG))
    )
    assert float((more - few).norm()) == pytest.approx(CLIP, rel=1e-4)


def test_a_mask_that_the_model_does_not_obey_is_refused() -> None:
    class Deaf(Speech):
        def forward(self, input_values: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
            return super().forward(input_values, labels)

    torch.manual_seed(0)
    with pytest.raises(NotImplementedError, match="reads the padding"):
        total(Deaf(), sounds(9, LONG, has_mask=True))
