"""Sentences that are solved for: what the first attention gives, against the model's own attention;
the equations, against true sentences and finite differences.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import torch_rng
from test_span import ENCODER, build, observe, sentences
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from hf_gradguard.attacks.base import Clock, Observation
from hf_gradguard.attacks.layer_inputs import Slots, find_projections
from hf_gradguard.attacks.span import encoder
from hf_gradguard.attacks.span.encoder import _Descent
from hf_gradguard.attacks.span.first_attention import FirstAttention
from hf_gradguard.attacks.span.program import STEPS, SentenceProgram
from hf_gradguard.attacks.span.row_space import View, row_space
from hf_gradguard.attacks.span.span import Span

WIDE: dict[str, Any] = ENCODER | {
    "hidden_size": 96, "num_attention_heads": 4, "initializer_range": 0.1,
}  # fmt: skip
FRAME: dict[str, Any] = {
    "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
RELATIVE: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
FAMILIES = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**WIDE)),
    "modernbert": lambda: ModernBertForSequenceClassification(ModernBertConfig(**WIDE, **FRAME)),
    "deberta": lambda: DebertaV2ForSequenceClassification(DebertaV2Config(**WIDE | RELATIVE)),
    "t5": lambda: T5ForSequenceClassification(
        T5Config(
            vocab_size=ENCODER["vocab_size"], d_model=96, d_kv=24, d_ff=128, num_layers=2,
            num_heads=4, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, num_labels=2,
        )
    ),
}  # fmt: skip


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def views_of(seen: Observation) -> list[View]:
    mixed = [projections for projections in find_projections(seen) if projections.mixing == "full"]
    tokens = int(seen.tokens.sum())
    return [View(r, row_space(r.gradients(seen), None, rank=tokens)) for r in mixed[:2]]


def program_of(seen: Observation, texts: list[list[int]]) -> SentenceProgram:
    """Of the first text's length, with all words of all texts at each place."""
    words = torch.tensor(sorted({word for text in texts for word in text[1:-1]}))
    last = len(texts[0]) - 1
    attention = FirstAttention(seen, views_of(seen))
    candidates = dict.fromkeys(range(1, last), words)
    return SentenceProgram(attention, {0: texts[0][0], last: texts[0][last]}, candidates)


def choice(program: SentenceProgram, text: list[int]) -> Tensor:
    places = zip(program.candidates.items(), text[1:-1], strict=True)
    return torch.cat([(ids == word).double() for (_, ids), word in places])


def test_weights_are_those_of_the_models_own_attention() -> None:
    """Softmax's, at [CLS] of a sentence, by the model's report of its attention."""
    model, texts = model_of("bert"), sentences(2, (8, 8))
    attention = FirstAttention(observe(model, texts), views_of(observe(model, texts)))
    beside = {place: torch.tensor([word]) for place, word in enumerate(texts[0]) if place}
    weights = torch.cat([torch.ones(1, 4), *attention.weights(0, {0: texts[0][0]}, beside)])
    model.set_attn_implementation("eager")
    ids = torch.tensor(texts[:1])
    given = model.double()(ids, output_attentions=True).attentions[0][0, :, 0]  # (heads, T)
    torch.testing.assert_close((weights / weights.sum(0)).T, given.detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_true_sentences_alone_solve_the_equations(family: str) -> None:
    model, texts = model_of(family), sentences(3, (8, 8, 7))
    program = program_of(observe(model.double(), texts), texts)
    width, tokens = 96, 23
    for query in program._queries:
        assert query.columns.shape[1] == 2 * (width - tokens)  # of the output, and normalized
        residuals = []
        for words in (texts[0], texts[1], [*texts[0][:4], *texts[1][4:]]):
            z = choice(program, words)
            matrix, target = query.linearized(z)
            residuals.append(float((matrix @ z - target).norm() / target.norm()))
        assert max(residuals[:2]) < 1e-9
        assert residuals[2] > 1e-3


def test_linearized_equations_are_the_derivatives() -> None:
    texts = sentences(3, (8, 8, 7))
    program = program_of(observe(model_of("bert"), texts), texts)
    z = torch.rand(len(choice(program, texts[0])), dtype=torch.float64, generator=torch_rng())
    for query in program._queries:

        def fractions(z: Tensor, query: Any = query) -> Tensor:
            denominators = query.weights @ z + query.known_weights
            sums = query.columns @ z + query.known_columns
            return (sums / denominators[:, None]).sum(0) + query.constant

        matrix, target = query.linearized(z)
        torch.testing.assert_close(matrix @ z - target, fractions(z))
        jacobian = torch.autograd.functional.jacobian(fractions, z)
        torch.testing.assert_close(matrix, jacobian)


@pytest.mark.parametrize("family", FAMILIES)
def test_sentences_of_one_message_are_solved_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them of one length, without a search."""

    def no_search(*args: Any) -> Iterator[Any]:
        raise AssertionError("searched")

    monkeypatch.setattr(_Descent, "_tries", no_search)
    texts = sentences(4, (8, 8, 7, 9))
    seen = observe(model_of(family), texts)
    found = Span()(seen)
    assert sorted(found.token_ids) == sorted(texts)


def test_a_search_remains_where_no_average_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told a wrong number of heads, nothing is solved for."""
    model, texts = model_of("bert"), sentences(2, (7, 8))
    seen = observe(model, texts)
    views = views_of(seen)
    assert FirstAttention(seen, views).is_average
    model.config.num_attention_heads = 1
    assert not FirstAttention(seen, views).is_average
    monkeypatch.setattr(encoder, "SentenceProgram", None)
    assert sorted(Span()(seen).token_ids) == sorted(texts)


def test_the_attacked_model_stays_as_it_is() -> None:
    model, texts = model_of("bert"), sentences(2, (8, 8))
    before = {name: p.clone() for name, p in model.named_parameters()}
    Span()(observe(model, texts))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_time_ends_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is built, and between its steps."""
    texts = sentences(3, (8, 8, 7))
    seen, steps = observe(model_of("bert"), texts), []
    monkeypatch.setattr(SentenceProgram, "_step", lambda *args: steps.append(args) or args[1])
    program_of(seen, texts).sentence(torch_rng())
    assert len(steps) == STEPS
    attention = FirstAttention(seen, views_of(seen))
    candidates = {place: torch.arange(10, 20) for place in range(1, 7)}
    program = SentenceProgram(attention, {0: 2, 7: 3}, candidates, Clock(0.0))
    program.sentence(torch_rng())
    assert len(steps) == STEPS
    weights = attention.weights(0, {0: 2, 7: 3}, candidates, Clock(0.0))
    assert not any(bool(of_place.any()) for of_place in weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_do_not_depend_on_what_stands_beside(family: str) -> None:
    """Of few words, which have one value at all places where a model has relative positions."""
    texts = sentences(2, (8, 8))
    seen = observe(model_of(family), texts)
    attention, words = FirstAttention(seen, views_of(seen)), torch.tensor([10, 11, 12])
    together = attention.weights(0, {0: 2, 7: 3}, dict.fromkeys(range(1, 7), words))
    for place, weights in enumerate(together, 1):
        (alone,) = attention.weights(0, {0: 2, 7: 3}, {place: words})
        torch.testing.assert_close(weights, alone, rtol=1e-6, atol=1e-12)


def test_a_model_that_is_not_copied_is_searched(caplog: pytest.LogCaptureFixture) -> None:
    model, texts = model_of("bert"), sentences(2, (7, 8))
    model.lock = threading.Lock()
    assert sorted(Span()(observe(model, texts)).token_ids) == sorted(texts)
    assert "searches sentences" in caplog.text


def test_large_programs_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(encoder, "SentenceProgram", None)
    texts = sentences(2, (7, 8))
    assert sorted(Span()(observe(model_of("bert"), texts)).token_ids) == sorted(texts)


def test_where_known_noise_hides_directions_sentences_are_searched() -> None:
    texts = sentences(2, (7, 8))
    seen = observe(build("bert"), texts)
    view, slots = views_of(seen)[0], Slots.from_observation(seen)
    assert encoder._is_whole(view, slots)
    blocks = view.projections.gradients(seen)
    size = 0.3 * float(torch.cat(blocks).square().mean().sqrt())
    noisy = [b + size * torch.randn(b.shape, generator=torch_rng()).to(b) for b in blocks]
    variances = [torch.full_like(b, size**2) for b in blocks]
    space = row_space(noisy, variances, rank=int(seen.tokens.sum()))
    assert not encoder._is_whole(View(view.projections, space), slots)
