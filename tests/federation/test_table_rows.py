"""Rows that stayed as they were name the others: however few they are, in small tables as well. Nor
is a layer refused whose units never fired.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_guard import LABELS, OPTIMIZERS, trained
from torch import Tensor, nn

from hf_gradguard.federation.guard import Guard, GuardSettings

TRAINED = {name: one for name, one in OPTIMIZERS.items() if name != "Adam, much decay"}


def refused(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """What the guard says; nothing where it sends."""
    try:
        Guard(GuardSettings()).protect(before, after)
    except ValueError as error:
        return str(error)
    return ""


WIDE = [((60, 16), 12), ((60, 16), 59), ((3, 8), 2), ((1000, 16), 510), ((1000, 16), 999)]
FEW = [((1000,), 20), ((60,), 12)]
NARROW = [((1000, 1), 700), ((1000,), 510)]  # what decay did to single numbers, few of them tell


@pytest.mark.parametrize(
    ("shape", "used", "decay"),
    [(*one, 0.0) for one in WIDE + FEW + NARROW] + [(*one, 1e-4) for one in WIDE + FEW],
)
def test_one_more_row_is_no_way_out(shape: tuple[int, ...], used: int, decay: float) -> None:
    torch.manual_seed(0)
    before = {"table": torch.randn(shape), "layer.weight": torch.randn(16, 16)}
    after = {name: tensor * (1 - decay) for name, tensor in before.items()}
    words = torch.randperm(shape[0])[:used]
    after["table"][words] += 0.01 * torch.randn(used, *shape[1:])
    after["layer.weight"] += 0.01 * torch.randn(16, 16)
    assert f"'table' changed in {used} of {shape[0]} rows. " in refused(before, after)


def test_columns_are_words_where_no_earlier_layer_has_them() -> None:
    torch.manual_seed(0)
    words = (torch.rand(8, 300) < 0.2).float()  # which of them a text has
    assert 150 < int(words.any(0).sum()) < 300
    said = refused(*trained(nn.Sequential(nn.Linear(300, 16), nn.Linear(16, 2)), words, "SGD"))
    assert f"changed in {int(words.any(0).sum())} of 300 rows along dimension 1" in said


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, small steps", "AdamW, undecayed"])
@pytest.mark.parametrize("used", [16, 36, 54])
def test_a_small_vocabulary_is_refused(optimizer: str, used: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(60, 64)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(512, 2))
    words = torch.randperm(60)[torch.arange(64) % used].view(8, 8)
    assert "'0.weight' changed in " in refused(*trained(model, words, optimizer))


class Gated(nn.Module):
    """A feed-forward layer without biases, of which a gate often stays shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.gate(x) - 0.6) * self.up(x))


def dense() -> nn.Module:
    sizes = (64, 120, 84, 30)
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(*p), nn.ReLU()) for p in pairs), nn.Linear(30, 2)
    )


def convolutions() -> nn.Module:
    """Maps that are laid out; kernels that see nothing but padding."""
    first = (nn.Conv2d(3, 16, 5, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, 2))
    last = (nn.ReLU(), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU())
    one = (nn.Unflatten(1, (64, 1, 1)), nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, *last, *one, nn.Linear(32, 2))


def normed(norm: Callable[[int], nn.Module], first: bool) -> nn.Module:
    between = [nn.ReLU(), norm(128)]
    return nn.Sequential(
        nn.Linear(64, 128), *(between[::-1] if first else between), nn.Linear(128, 2)
    )


def frozen() -> nn.Module:
    """A head on features that are not trained."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    model[0].requires_grad_(False)
    return model


class Attending(nn.Module):
    """Its keys' bias has no gradient but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None] * torch.linspace(-1, 2, 4)[:, None])[:, 0])


HONEST: dict[str, Callable[[], nn.Module]] = {
    "dense": dense, "convolutions": convolutions, "frozen": frozen, "attention": Attending,
    "gated": lambda: nn.Sequential(Gated(), Gated(), nn.Linear(64, 2)),
    "layer norm": lambda: normed(nn.LayerNorm, first=False),
    "layer norm before": lambda: normed(nn.LayerNorm, first=True),
    "batch norm": lambda: normed(nn.BatchNorm1d, first=False),
    "batch norm before": lambda: normed(nn.BatchNorm1d, first=True),
    "dropout": lambda: nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.4), nn.Linear(128, 2)),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", TRAINED)
@pytest.mark.parametrize("name", HONEST)
def test_units_that_never_fired_pass(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model = HONEST[name]()
    x = torch.rand(8, 3, 32, 32) if name == "convolutions" else torch.randn(8, 64)
    assert refused(*trained(model, x, optimizer)) == ""


def test_units_did_stay_as_they_were() -> None:
    """So that the test above is one."""
    torch.manual_seed(1)
    before, after = trained(dense(), torch.randn(8, 64), "AdamW, undecayed")
    idle = [int((after[n] == before[n]).all(-1).sum()) for n in ("1.0.weight", "2.0.weight")]
    assert min(idle) > 0


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-5])
def test_what_rounding_left_alone_passes(rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Tanh(), nn.Linear(256, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), rate)
    nn.functional.cross_entropy(model(torch.randn(8, 64)), LABELS).backward()
    optimizer.step()
    assert rate > 1e-4 or bool((before["1.weight"] == model.state_dict()["1.weight"]).any())
    assert refused(before, model.state_dict()) == ""


@pytest.mark.parametrize("name", ["padding", "segments", "frozen", "bias of a whole layer"])
def test_what_says_nothing_passes(name: str) -> None:
    torch.manual_seed(0)
    before: dict[str, Any] = {"w.weight": torch.randn(100, 16), "w.bias": torch.randn(100)}
    if name == "padding":
        before["w.weight"][0] = 0
    if name == "segments":
        before["w.weight"] = torch.randn(2, 16)
    change = {n: 0.01 * torch.randn(tensor.shape) for n, tensor in before.items()}
    if name in ("padding", "segments"):
        change["w.weight"][0] = 0
    elif name == "frozen":
        change["w.weight"][:] = 0
    else:
        change["w.bias"][:30] = 0
    assert refused(before, {n: tensor + change[n] for n, tensor in before.items()}) == ""
