"""An encoder that moves in public directions: rows are what moves change in the merged model."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from examples import example_names
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AlbertConfig, AlbertModel

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
from hf_gradguard.heads import PrivateHead, SketchedBody, private_head, sketched_body
from hf_gradguard.heads.body import scaled_directions, sketch

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]
TEXTS, LABELS = ["a fine film", "the plot is long and dull", "a joke"], torch.tensor([1, 0, 2])


def _head(classes: int) -> PrivateHead:
    names = example_names("model tokenizer")
    return private_head(
        names["model"], PUBLIC, classes, directions=4, processing_class=names["tokenizer"]
    )


def make_body(classes: int = 3) -> tuple[SketchedBody, dict[str, Tensor], PrivateHead]:
    """With a head that is not zero; in float64."""
    names = example_names("model tokenizer")
    head = _head(classes).double()
    nn.init.normal_(head.head.weight)
    body = sketched_body(head, PUBLIC, 5, 2, 3)
    return body, dict(names["tokenizer"](TEXTS, padding=True, return_tensors="pt")), head


def test_tangents_are_what_moves_change() -> None:
    """Against central differences of the merged model's scores, class by class."""
    body, inputs, head = make_body()
    rows = body.rows_of(TEXTS)
    torch.testing.assert_close(rows["scores"], head(**inputs).logits)
    direction = torch.randn_like(body.moves.weight)
    scores = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            body.moves.weight.copy_(step * direction)
            logits = body.merged()(**inputs).logits
        scores.append(logits[:, :-1] - logits[:, -1:])
    expected = (scores[0] - scores[1]) / 2e-5
    torch.testing.assert_close(rows["tangents"] @ direction[0], expected, rtol=1e-5, atol=1e-7)


def test_its_gradient_is_that_of_the_merged_model() -> None:
    """Before anything moves, sample by sample, by central differences of the loss."""
    body, inputs, _ = make_body()
    rows, direction = body.rows_of(TEXTS), torch.randn_like(body.moves.weight)
    for row in range(len(TEXTS)):
        one = {name: entries[row : row + 1] for name, entries in rows.items()}
        label = LABELS[row : row + 1]
        gradient = torch.autograd.grad(body(**one, labels=label).loss, body.moves.weight)[0]
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                body.moves.weight.copy_(step * direction)
                logits = body.merged()(**inputs).logits[row : row + 1]
                body.moves.weight.zero_()
            losses.append(F.cross_entropy(logits, label))
        difference = (losses[0] - losses[1]) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-5, atol=1e-7)


def test_rows_stay_those_of_the_start() -> None:
    """A second part of them, made after a training, fits the first."""
    body, _, _ = make_body()
    before = body.rows_of(TEXTS)
    nn.init.normal_(body.moves.weight)
    for name, entries in body.rows_of(TEXTS).items():
        assert torch.equal(entries, before[name])


def test_at_the_start_it_is_the_head() -> None:
    body, inputs, head = make_body()
    expected = head(**inputs).logits
    torch.testing.assert_close(body(**body.rows_of(TEXTS)).logits, expected)
    torch.testing.assert_close(body.merged()(**inputs).logits, expected)


def test_the_head_that_it_is_made_of_stays() -> None:
    body, _, head = make_body()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    nn.init.normal_(body.moves.weight)
    body.merged()
    body(**body.rows_of(TEXTS), labels=LABELS).loss.backward()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name])
    trained = [name for name, parameter in body.named_parameters() if parameter.requires_grad]
    assert trained == ["moves.weight"]


def test_public_tangents_are_half_whitened() -> None:
    """Those of public samples are uncorrelated by directions, and of median norm one."""
    body, _, _ = make_body(2)
    tangents = body.rows_of(PUBLIC)["tangents"][:, 0]
    moment = tangents.T @ tangents
    assert float((moment - moment.diag().diag()).abs().max()) < 1e-3 * float(moment.max())
    assert float(tangents.norm(dim=1).median()) == pytest.approx(1, abs=1e-3)


def test_a_sketch_is_the_gradient_by_s() -> None:
    inputs, move = torch.randn(2, 4, 6), torch.zeros(2, 3, requires_grad=True)
    ingoing, outgoing = torch.randn(6, 3), torch.randn(5, 2)
    weights = torch.randn(5)
    for row in range(2):
        score = (inputs[row] @ ingoing @ move.T @ outgoing.T @ weights).sum()
        gradient = torch.autograd.grad(score, move)[0]
        slopes = weights.expand(1, 4, 5) @ outgoing
        torch.testing.assert_close(
            sketch(inputs[row : row + 1] @ ingoing, slopes)[0], gradient.flatten()
        )


def test_directions_are_scaled_by_the_fourth_root() -> None:
    moment = torch.diag(torch.tensor([1.0, 16.0, 81.0]))
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.5], [1 / 3, 0.0]])
    torch.testing.assert_close(scaled_directions(moment, 2).abs(), expected)


def test_trained_by_correlated_noise(tmp_path) -> None:
    """What is shared has the moves' entries alone, and the merged model moves with them."""
    names = example_names("model tokenizer")
    head = _head(2)
    nn.init.normal_(head.head.weight)
    body = sketched_body(head, PUBLIC, 5, 2, 3)
    rows = body.rows_of(TEXTS) | {"labels": LABELS % 2}
    data = [{name: entries[row] for name, entries in rows.items()} for row in range(len(TEXTS))]
    args = GradGuardConfig(
        str(tmp_path), defense="dp_sgd", learning_rate=1.0, optim="sgd", max_grad_norm=0.0,
        defense_kwargs={
            "per_sample": True, "correlated": True, "clip": 0.3, "noise_multiplier": 1.5,
        },
        per_device_train_batch_size=1, max_steps=2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = GradGuardTrainer(body, args, train_dataset=data)
    trainer.train()
    assert bool(body.moves.weight.any())
    trainer.save_model(str(tmp_path / "saved"))  # as checkpoints are
    shared = [parameter.numel() for parameter in body.parameters() if parameter.requires_grad]
    assert shared == [5]
    assert trainer.private_rows is not None
    inputs = dict(names["tokenizer"](TEXTS, padding=True, return_tensors="pt"))
    change = body.merged()(**inputs).logits - head(**inputs).logits
    assert float(change.abs().max()) > 1e-3


def test_samples_are_clipped_one_by_one() -> None:
    """Against backward passes row by row, several classes' tangents in each."""
    body, _, _ = make_body()
    batch = body.rows_of(TEXTS) | {"labels": LABELS}
    expected = []
    for row in range(len(TEXTS)):
        one = {name: rows[row : row + 1] for name, rows in batch.items()}
        expected.append(torch.autograd.grad(body(**one).loss, body.moves.weight)[0])
    norms = [float(gradient.norm()) for gradient in expected]
    clip = sorted(norms)[1]  # one of them is under it
    gmap = GradientMap(body, batch, second_order=False, needs_input=False)
    (total,) = clipped_sum(gmap, clip).total.values()
    clipped = [row * min(1, clip / norm) for row, norm in zip(expected, norms, strict=True)]
    torch.testing.assert_close(total, torch.stack(clipped).sum(0).to(total), rtol=1e-4, atol=1e-6)


def test_what_cannot_move_is_refused() -> None:
    names = example_names("model tokenizer")
    head = _head(2)
    with pytest.raises(ValueError, match="zero"):
        sketched_body(head, PUBLIC)
    plain = private_head(nn.Linear(3, 4), torch.randn(6, 3), directions=3)
    nn.init.normal_(plain.head.weight)
    with pytest.raises(ValueError, match="Transformers"):
        sketched_body(plain, torch.randn(6, 3))
    config = AlbertConfig(
        vocab_size=32, embedding_size=8, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    shared = private_head(AlbertModel(config), PUBLIC, processing_class=names["tokenizer"])
    nn.init.normal_(shared.head.weight)
    with pytest.raises(ValueError, match="twice"):
        sketched_body(shared, PUBLIC)


def test_old_place_warns() -> None:
    sys.modules.pop("hf_gradguard.bodies", None)  # another test may have imported it
    with pytest.warns(FutureWarning, match=r"hf_gradguard\.heads"):
        old = importlib.import_module("hf_gradguard.bodies")
    assert old.sketched_body is sketched_body
