"""The search for the likeliest text: its score against gradients that are written out, what it
finds behind noise above the gradient, its budget, and what it refuses.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import torch_rng
from test_span import TOKENIZER, build, collate
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, Reconstruction, make_attack
from hf_gradguard.attacks.candidates.membership import Candidates
from hf_gradguard.attacks.label_recovery import recover_labels
from hf_gradguard.attacks.likelihood import mechanism_of
from hf_gradguard.attacks.likelihood_search.messages import white_message
from hf_gradguard.attacks.likelihood_search.proposals import PublicWords, cross, mutate
from hf_gradguard.attacks.likelihood_search.score import (
    Text,
    WhitenedScore,
    WholeLikelihood,
    _norms,
    linear_names,
)
from hf_gradguard.attacks.likelihood_search.search import (
    Found,
    LikelihoodSearch,
    _rows_of,
    _Search,
)
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

TRUE = [2, 20, 31, 42, 53, 60, 3]
PUBLIC = [
    " ".join(f"w{random_.randrange(60)}" for _ in range(5))
    for random_ in [random.Random(seed) for seed in range(300)]
]


def message(defense: str, name: str = "bert", **settings: Any) -> Observation:
    """Of one text, with all that a server may know."""
    model = build(name, torch.float32)
    ids = torch.tensor([TRUE])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])}
    if name == "gpt2_lm":
        batch["labels"] = ids
    made = make_defense(defense, **settings)
    shared = made(GradientMap(model, batch), Stream.from_seeds(3))
    return Observation(
        model, shared, (1, len(TRUE)), labels=None if name == "gpt2_lm" else batch["labels"],
        tokenizer=TOKENIZER, mechanism=made.mechanism(shared),
    )  # fmt: skip


def public_ids() -> list[Text]:
    return [tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]) for text in PUBLIC]


def scorer(observation: Observation, damping: float = 10.0) -> WhitenedScore:
    white = white_message(observation, mechanism_of(observation), linear_names(observation.model))
    return WhitenedScore(observation, white, public_ids(), observation.labels, damping)


def f1(found: Reconstruction) -> float:
    assert found.token_ids is not None
    overlap = Counter(found.token_ids[0][1:-1]) & Counter(TRUE[1:-1])
    return overlap.total() / len(TRUE[1:-1])


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "gpt2_lm", "llama"])
def test_scores_are_those_of_gradients_written_out(name: str) -> None:
    observation = message("gaussian_noise", name, relative_scale=2.0)
    score = scorer(observation)
    texts = [tuple(TRUE[1:-1]), *public_ids()[:3]]
    found = score(texts)
    turned = linear_names(observation.model)
    for text, (value, own) in zip(texts, found.tolist(), strict=True):
        gradient = GradientMap(observation.model, score.batch([text])).gradient()
        white, parts = {}, []
        for layer_name in score._layers:
            g = gradient[layer_name].T if turned[layer_name] else gradient[layer_name]
            outputs, inputs = score.message.scales[layer_name]
            white[layer_name] = g / outputs[:, None] / inputs
        norm = total(g.square() for g in white.values()) ** 0.5
        size = 1.0 if score._norm is None else score._norm / norm
        for layer_name, layer in score._layers.items():
            parts.append((layer, size * layer.outputs.T @ white[layer_name] @ layer.inputs))
        # As a message without noise it would lose its own share of the mean.
        factor = total(layer.weights * layer.mean * g for layer, g in parts) / total(
            layer.weights * layer.mean.square() for layer, _ in parts
        )
        changes = [(layer, g - layer.mean, g - max(factor, 0.0) * layer.mean) for layer, g in parts]
        inner = total(layer.weights * change * layer.message for layer, change, _ in changes)
        square = total(layer.weights * change.square() for layer, change, _ in changes)
        alone = total(layer.weights * change * centered for layer, change, centered in changes)
        assert own == pytest.approx(alone / square**0.5 / score.unit, rel=1e-3)
        assert value == pytest.approx(inner / square**0.5 / score.unit, rel=1e-3, abs=1e-3)


def total(products: Iterable[Tensor]) -> float:
    return sum(float(product.sum()) for product in products)


def test_the_true_text_scores_what_it_is_expected_to() -> None:
    score = scorer(message("gaussian_noise", relative_scale=1.0))
    value, own = score([tuple(TRUE[1:-1])])[0].tolist()
    assert abs(value - own) < 4  # standard deviations of the noise
    assert score.expected is not None
    assert abs(score.expected - own) < 0.5 * own
    assert float(score(public_ids()[:64])[:, 0].max()) < value


@pytest.mark.parametrize("count", [1, 2])
def test_texts_stand_out_where_gradients_differ_in_size(count: int) -> None:
    """What a model knows well has a far smaller gradient than what it gets wrong, which would rule
    the metric.
    """
    model = build("bert", torch.float32)
    public = torch.tensor([[2, *text, 3] for text in public_ids()[:64]])
    ids = torch.tensor([[2, 25, 33, 40, 51, 58, 3], TRUE])[-count:]
    with torch.no_grad():
        model.classifier.weight *= 10
        model.classifier.bias -= model(input_ids=public).logits.mean(0)
        labels = model(input_ids=ids).logits.argmax(1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    made = make_defense("gaussian_noise", relative_scale=2.0, strength="own")
    shared = made(GradientMap(model, batch), Stream.from_seeds(3))
    observation = Observation(
        model, shared, tuple(ids.shape), labels=labels, tokenizer=TOKENIZER,
        mechanism=made.mechanism(shared),
    )  # fmt: skip
    white = white_message(observation, mechanism_of(observation), linear_names(model))
    rows = _rows_of(observation)
    score = LikelihoodSearch(PUBLIC)._score(rows[0], rows, white, public_ids())
    public_norms = _norms(score._raw_factors(score.batch(public_ids()[:64])))
    assert float(public_norms.log().std()) > 1
    text = tuple(ids[0, 1:-1].tolist())  # of two the one with the larger gradient
    true_norm = float(_norms(score._raw_factors(score.batch([text]))))
    assert score._norm == pytest.approx(true_norm / count**0.5, rel=0.2)
    value, own = score([text])[0].tolist()
    assert count > 1 or abs(value - own) < 4
    assert value > float(score(public_ids()[:64])[:, 0].max()) + 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("gaussian_noise", {"relative_scale": 1.5}),
        ("laplace_noise", {"relative_scale": 1.5}),
        ("optimal_noise", {"relative_scale": 1.5}),
        ("pruning", {"ratio": 0.9}),
        ("quantization", {"bits": 3}),
        ("none", {}),
    ],
)
def test_words_are_found_behind_every_kind_of_defense(
    defense: str, settings: dict[str, float]
) -> None:
    attack = make_attack("likelihood_search", public_texts=PUBLIC, evaluations=5000)
    found = attack(message(defense, **settings), torch_rng())
    assert f1(found) >= 0.6  # a public text has 0.1 on average


def test_a_mechanism_that_states_no_noise_expects_no_score() -> None:
    observation = message("pruning", ratio=0.5)
    attack = LikelihoodSearch(PUBLIC, evaluations=200)
    found = attack(observation, torch_rng())
    assert isinstance(found, Found)
    assert found.expected_score != found.expected_score
    assert not found.undecided
    stopped = attack(message("gaussian_noise", relative_scale=20.0), torch_rng())
    assert "of about" in stopped.undecided


def test_unknown_labels_are_tried() -> None:
    observation = replace(message("gaussian_noise", relative_scale=0.5), labels=None)
    found = LikelihoodSearch(PUBLIC, evaluations=200)(observation, torch_rng())
    assert found.labels is not None
    assert found.labels.tolist() == [1]


def test_signs_say_more_of_laplace_noise() -> None:
    def separation(noise: str) -> float:
        observation = message("laplace_noise", relative_scale=4.0)
        assert observation.mechanism is not None
        variance = observation.mechanism.variance
        told = replace(observation, mechanism=Mechanism(noise=noise, variance=variance))  # type: ignore[arg-type]
        return float(scorer(told)([tuple(TRUE[1:-1])])[0, 1])

    assert separation("laplace") > 1.2 * separation("gaussian")


def test_uneven_noise_is_white_after_division() -> None:
    observation = message("gaussian_noise", relative_scale=1.0)
    generator = torch_rng()
    rows = {n: torch.rand(len(y), 1, generator=generator) + 0.1
            for n, y in observation.gradient.items() if y.dim() == 2}  # fmt: skip
    variance: dict[str, Tensor] = {}
    noise: dict[str, Tensor] = {}
    for name, y in observation.gradient.items():
        variance[name] = rows[name].square().expand_as(y) if name in rows else torch.ones_like(y)
        noise[name] = variance[name].sqrt() * torch.randn(y.shape, generator=generator)
    told = replace(observation, gradient=noise, mechanism=None, noise_variance=variance)
    white = white_message(told, mechanism_of(told), linear_names(told.model))
    for name, y in white.tensors.items():
        if y.numel() > 500:
            assert float(y.square().mean()) == pytest.approx(1, abs=0.2), name


def test_time_is_kept() -> None:
    started = time.perf_counter()
    found = LikelihoodSearch(PUBLIC, seconds=1.0)(
        message("gaussian_noise", relative_scale=50.0), torch_rng()
    )
    assert time.perf_counter() - started < 20
    assert isinstance(found, Found)
    assert found.evaluated >= 1


def test_changes_keep_the_length_and_stay_in_public_words() -> None:
    words = PublicWords(public_ids(), torch.randn(128, 8, generator=torch_rng()))
    text, other = public_ids()[:2]
    known = {word for row in public_ids() for word in row}
    random_ = random.Random(0)
    for _ in range(500):
        child = mutate(cross(text, other, random_), words, [text, other], random_)
        assert len(child) == len(text)
        assert set(child) <= known


@pytest.mark.parametrize("name", ["bert", "gpt2_lm"])
def test_the_whole_likelihood_is_that_of_gradients_written_out(name: str) -> None:
    observation = message("gaussian_noise", name, relative_scale=2.0)
    mechanism = mechanism_of(observation)
    assert mechanism is not None
    texts = [tuple(TRUE[1:-1]), *public_ids()[:3]]
    score = scorer(observation)
    found = WholeLikelihood(score, mechanism)(texts)[:, 0]
    expected = []
    for text in texts:
        gradient = GradientMap(observation.model, score.batch([text])).gradient()
        total = 0.0
        for key, g in gradient.items():
            y, variance = observation.gradient[key].double(), mechanism.variance_of(key)
            total += float(((y.square() - (y - g).square()) / (2 * variance)).sum())
        expected.append(total)
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-2)


@pytest.mark.long
def test_a_search_ends_by_the_whole_likelihood_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it returns is the likeliest text that was scored by it, whatever the metric says."""
    scored: dict[Text, float] = {}
    whole = WholeLikelihood.__call__

    def noted(self: WholeLikelihood, texts: list[Text]) -> Tensor:
        scores = whole(self, texts)
        scored.update(zip(texts, scores[:, 0].tolist(), strict=True))
        return scores

    monkeypatch.setattr(WholeLikelihood, "__call__", noted)
    attack = LikelihoodSearch(PUBLIC, evaluations=600, prior=0.0, whole_share=0.25)
    found = attack(message("gaussian_noise", relative_scale=20.0), torch_rng())
    assert found.token_ids is not None
    assert tuple(found.token_ids[0][1:-1]) == max(scored, key=lambda text: scored[text])
    assert 150 <= len(scored) < 600
    scored.clear()
    attack(message("pruning", ratio=0.9), torch_rng())
    attack(message_of(SEVERAL, "bert", 5.0), torch_rng())
    assert not scored


# --- messages of several texts

SEVERAL = [[2, 20, 31, 42, 53, 60, 3], [2, 9, 14, 27, 38, 3], [2, 11, 58, 8, 33, 47, 3]]
CLASSES = [1, 0, 0]


def message_of(texts: list[list[int]], name: str, scale: float | None) -> Observation:
    """With lengths, classes and the noise known."""
    batch: dict[str, Tensor] = collate(texts)
    batch["labels"] = torch.tensor(CLASSES[: len(texts)])
    if name == "gpt2_lm":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    made = make_defense("none") if scale is None else make_defense(
        "gaussian_noise", relative_scale=scale)  # fmt: skip
    shared = made(GradientMap(build(name, torch.float32), batch), Stream.from_seeds(3))
    return Observation(
        build(name, torch.float32), shared, tuple(batch["input_ids"].shape), tokenizer=TOKENIZER,
        labels=None if name == "gpt2_lm" else batch["labels"], mechanism=made.mechanism(shared),
        attention_mask=batch["attention_mask"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "gpt2_lm"])
def test_leaving_out_a_text_is_a_message_without_it(name: str) -> None:
    """Beside gradients that are written out, each weighed as in the mean loss."""
    observation = message_of(SEVERAL[:2], name, 2.0)
    first, second = _rows_of(observation)
    mechanism, linear = mechanism_of(observation), linear_names(observation.model)
    white = white_message(observation, mechanism, linear).for_fraction(first.fraction)
    others = [] if second.label is None else [torch.tensor([second.label])]
    settings = public_ids(), first.observation.labels, 10.0, others, 2
    score = WhitenedScore(first.observation, white, *settings)
    untouched = score([tuple(SEVERAL[0][1:-1])])[0, 0]

    ids = torch.tensor([SEVERAL[1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = ids if second.label is None else torch.tensor([second.label])
    gradient = GradientMap(observation.model, batch).gradient()
    count = len(SEVERAL[0]) + len(SEVERAL[1])
    fraction = (len(SEVERAL[1]) - 1) / (count - 2) if name == "gpt2_lm" else 0.5
    left = {n: y - 0.6 * fraction * gradient[n] for n, y in observation.gradient.items()}
    white = white_message(replace(observation, gradient=left), mechanism, linear)
    expected = WhitenedScore(first.observation, white.for_fraction(first.fraction), *settings)

    score.leave_out([({**batch}, 0.6 * second.fraction / first.fraction)])
    texts = [tuple(SEVERAL[0][1:-1]), *public_ids()[:5]]
    assert torch.allclose(score(texts), expected(texts), rtol=1e-3, atol=1e-3)
    assert abs(float(score(texts)[0, 0] - untouched)) > 1e-2
    score.leave_out([])
    assert float(score(texts[:1])[0, 0]) == pytest.approx(float(untouched), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scale", "least"),
    [("bert", None, 0.8), ("bert", 0.5, 0.7), ("gpt2_lm", 0.5, 0.7)],
)
def test_texts_of_a_message_are_told_apart(name: str, scale: float | None, least: float) -> None:
    """On average over searches: where one ends depends on rounding."""
    observation = message_of(SEVERAL, name, scale)
    search, token_f1 = LikelihoodSearch(PUBLIC, evaluations=12_000), []
    for seed in range(3):
        found = search(observation, torch_rng(seed))
        assert found.token_ids is not None
        assert [len(ids) for ids in found.token_ids] == [len(text) for text in SEVERAL]
        scores = score_text(found.token_ids, SEVERAL, tokenizer=TOKENIZER)
        token_f1.append(scores.per_sample["token_f1"])
    means = torch.tensor(token_f1).mean(0)
    assert float(means.mean()) >= least  # a public text has 0.1 on average
    assert float(means.min()) > 0.3


def test_classes_of_several_texts_are_read_off() -> None:
    observation = message_of(SEVERAL, "bert", None)
    found = LikelihoodSearch(PUBLIC, evaluations=200)(replace(observation, labels=None))
    assert found.labels is not None
    assert found.labels.tolist() == recover_labels(observation).tolist()
    told = LikelihoodSearch(PUBLIC, evaluations=200)(observation)
    assert told.labels is not None
    assert told.labels.tolist() == CLASSES


@pytest.mark.long
def test_populations_begin_apart_and_are_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from public texts of its own; with little effort there is one."""
    scanned: list[set[Any]] = []
    best: list[float] = []
    scan = _Search._scan

    def watch(search: _Search, end: float) -> None:
        if scanned:
            best.append(search.history[-1])
        scanned.append(set(search.public))
        scan(search, end)

    monkeypatch.setattr(_Search, "_scan", watch)
    observation = message("gaussian_noise", relative_scale=4.0)
    attack = LikelihoodSearch(PUBLIC, evaluations=4000, populations=2, prior=0.0)
    found = attack(observation, torch_rng())
    first, second = scanned
    assert first
    assert second
    assert not first & second
    assert found.score >= best[0]
    assert found.evaluated >= 4000 or found.complete
    scanned.clear()
    LikelihoodSearch(PUBLIC, evaluations=300, populations=2)(observation, torch_rng())
    assert len(scanned) == 1


def test_it_refuses_few_public_texts_and_what_has_no_class() -> None:
    observation = message_of(SEVERAL, "bert", None)
    with pytest.raises(ValueError, match="class"):
        LikelihoodSearch(PUBLIC)(replace(observation, labels=torch.rand(3)))
    with pytest.raises(ValueError, match="tokenizer"):
        LikelihoodSearch(PUBLIC)(replace(message("none"), tokenizer=None))
    with pytest.raises(ValueError, match="public_texts"):
        LikelihoodSearch(PUBLIC[:3])(message("none"))
    with pytest.raises(ValueError, match="seconds"):
        LikelihoodSearch(PUBLIC, seconds=0)
    with pytest.raises(ValueError, match="populations"):
        LikelihoodSearch(PUBLIC, populations=0)


def test_the_log_likelihood_is_that_of_gradients_written_out() -> None:
    observation = message("gaussian_noise", relative_scale=2.0)
    observation = replace(observation, mechanism=None, noise_variance=0.01)
    texts = [list(TRUE), [2, 20, 31, 42, 53, 59, 3]]
    found = Candidates(texts)(observation).scores
    expected = []
    for text in texts:
        ids = torch.tensor([text])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
                 "labels": observation.labels}  # fmt: skip
        gradient = GradientMap(observation.model, batch).gradient()
        misfit = sum(float((observation.gradient[n] - g).double().square().sum())
                     for n, g in gradient.items())  # fmt: skip
        expected.append(-misfit / 0.02)
    assert float(found[0] - found[1]) == pytest.approx(expected[0] - expected[1], rel=1e-3)
