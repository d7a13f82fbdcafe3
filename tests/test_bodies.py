"""A head and the body under it, in public directions: the gradient is that of the moved model."""

from __future__ import annotations

import pytest
import torch
from examples import example_names
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AlbertConfig, AlbertModel

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.bodies import SketchedBody, scaled_directions, sketch, sketched_body
from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
from hf_gradguard.heads import FeatureHead, head_of

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]
TEXTS, LABELS = ["a fine film", "the plot is long and dull", "a joke"], torch.tensor([1, 0, 2])


def make_body(classes: int = 3) -> tuple[SketchedBody, dict[str, Tensor], FeatureHead]:
    """With a head that is not zero, moved a little; in float64."""
    names = example_names("model tokenizer")
    head = head_of(names["model"], PUBLIC, 4, classes, names["tokenizer"]).double()
    nn.init.normal_(head.head.weight)
    body = sketched_body(head, PUBLIC, 5, 2, 3)
    nn.init.normal_(body.moves.weight, std=0.1)
    return body, dict(names["tokenizer"](TEXTS, padding=True, return_tensors="pt")), head


def test_gradients_of_samples_are_the_moved_models() -> None:
    """Against central differences of the loss of the merged model, sample by sample."""
    body, inputs, _ = make_body()
    for row in range(len(TEXTS)):
        one = {name: rows[row : row + 1] for name, rows in inputs.items()}
        loss = body(**one, labels=LABELS[row : row + 1]).loss
        gradients = torch.autograd.grad(loss, [body.head.weight, body.moves.weight])
        for parameter, gradient in zip(
            (body.head.weight, body.moves.weight), gradients, strict=True
        ):
            direction = torch.randn_like(parameter)
            losses = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter += step * direction
                    logits = body.merged()(**one).logits
                    parameter -= step * direction
                losses.append(F.cross_entropy(logits, LABELS[row : row + 1]))
            difference = (losses[0] - losses[1]) / 2e-5
            torch.testing.assert_close(
                (gradient * direction).sum(), difference, rtol=1e-5, atol=1e-7
            )


def test_the_merged_model_is_the_same() -> None:
    body, inputs, _ = make_body()
    torch.testing.assert_close(body(**inputs).logits, body.merged()(**inputs).logits)
    with_labels = body(**inputs, labels=LABELS)
    torch.testing.assert_close(with_labels.logits, body(**inputs).logits)
    torch.testing.assert_close(with_labels.loss, F.cross_entropy(with_labels.logits, LABELS))


def test_at_the_start_it_is_the_head() -> None:
    body, inputs, head = make_body()
    nn.init.zeros_(body.moves.weight)
    torch.testing.assert_close(body(**inputs).logits, head(**inputs).logits)


def test_the_head_that_it_is_made_of_stays() -> None:
    body, inputs, head = make_body()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    body.merged()
    body(**inputs, labels=LABELS).loss.backward()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert {name for name, parameter in body.named_parameters() if parameter.requires_grad} == {
        "head.weight",
        "moves.weight",
    }


def test_public_gradients_are_half_whitened() -> None:
    """Those of public samples are uncorrelated by directions, and of median norm one."""
    body, _, head = make_body(2)
    nn.init.zeros_(body.moves.weight)
    rows = []
    for text in PUBLIC:
        inputs = dict(example_names("tokenizer")["tokenizer"]([text], return_tensors="pt"))
        label = head(**inputs).logits.argmin(1)
        loss = body(**inputs, labels=label).loss
        wrong = float(head(**inputs).logits.softmax(1).max())
        rows.append(torch.autograd.grad(loss, body.moves.weight)[0][0] / wrong * 2**0.5)
    gradients = torch.stack(rows).double()
    moment = gradients.T @ gradients
    assert float((moment - moment.diag().diag()).abs().max()) < 1e-3 * float(moment.max())
    assert float(gradients.norm(dim=1).median()) == pytest.approx(1, abs=1e-3)


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
    """What is shared has the head's entries and the moves' alone."""
    names = example_names("model tokenizer")
    head = head_of(names["model"], PUBLIC, 4, 2, names["tokenizer"])
    nn.init.normal_(head.head.weight)
    body = sketched_body(head, PUBLIC, 5, 2, 3)
    rows = [
        {**names["tokenizer"](text, padding="max_length", max_length=8), "labels": number % 2}
        for number, text in enumerate(TEXTS + PUBLIC[:1])
    ]
    args = GradGuardConfig(
        str(tmp_path), defense="dp_sgd", learning_rate=1.0, optim="sgd", max_grad_norm=0.0,
        defense_kwargs={
            "per_sample": True, "correlated": True, "clip": 0.3, "noise_multiplier": 1.5,
        },
        per_device_train_batch_size=2, max_steps=2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = GradGuardTrainer(body, args, train_dataset=rows)
    trainer.train()
    assert float(body.moves.weight.abs().sum()) > 0
    shared = [parameter.numel() for parameter in body.parameters() if parameter.requires_grad]
    assert shared == [2 * 5, 5]
    assert trainer.private_rows is not None


def test_clipped_by_the_norm_of_both() -> None:
    """Each sample's gradient, over head and moves together, against backward passes row by row."""
    body, inputs, _ = make_body()
    batch = inputs | {"labels": LABELS}
    expected, norms = [], []
    for row in range(len(TEXTS)):
        one = {name: rows[row : row + 1] for name, rows in batch.items()}
        both = torch.autograd.grad(body(**one).loss, [body.head.weight, body.moves.weight])
        expected.append(torch.cat([part.flatten() for part in both]))
        norms.append(float(expected[-1].norm()))
    clip = sorted(norms)[1]  # one of them is under it
    gmap = GradientMap(body, batch, second_order=False, needs_input=False)
    total = clipped_sum(gmap, clip).total
    clipped = [row * min(1, clip / norm) for row, norm in zip(expected, norms, strict=True)]
    torch.testing.assert_close(
        torch.cat([part.flatten() for part in total.values()]),
        torch.stack(clipped).sum(0).to(next(iter(total.values()))),
        rtol=1e-4,
        atol=1e-6,
    )


def test_what_cannot_move_is_refused() -> None:
    names = example_names("model tokenizer")
    head = head_of(names["model"], PUBLIC, 4, 2, names["tokenizer"])
    with pytest.raises(ValueError, match="zero"):
        sketched_body(head, PUBLIC)
    plain = head_of(nn.Linear(3, 4), torch.randn(6, 3), 3, 2)
    nn.init.normal_(plain.head.weight)
    with pytest.raises(ValueError, match="Transformers"):
        sketched_body(plain, torch.randn(6, 3))
    config = AlbertConfig(
        vocab_size=32, embedding_size=8, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    shared = head_of(AlbertModel(config), PUBLIC, 4, 2, names["tokenizer"])
    nn.init.normal_(shared.head.weight)
    with pytest.raises(ValueError, match="twice"):
        sketched_body(shared, PUBLIC)
