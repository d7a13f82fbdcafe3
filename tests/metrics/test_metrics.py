"""Scores of texts and images against values worked out by hand, matching, intervals, and the
`evaluate` metric.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import word_tokenizer
from torch import Tensor

from hf_gradguard.metrics import Scores, TextReconstruction, score_images, score_text
from hf_gradguard.metrics.scores import bootstrap_intervals
from hf_gradguard.metrics.text import TEXT_SCORES, words
from hf_gradguard.networks import ImageEvaluationNetwork, ImageEvaluationNetworkConfig, adapt_images

PAD, UNK, CLS, SEP = range(4)


def one(prediction: Any, reference: Any, **settings: Any) -> dict[str, float]:
    """The scores of a single text."""
    return score_text([prediction], [reference], bootstrap=0, **settings).mean


# ------------------------------------------------------------------------------------------- texts,
# by hand

BY_HAND = {
    # Common words: the, cat, on, mat, of 6 and 6. Common pairs: "the cat", of 5 and 5. Of the 18 1-
    # to 4-grams 4 + 1. BLEU's precisions: 4/6, 1/5, and for no match of 4 and of 3: 1/(2 · 4), 1/(4
    # · 3).
    "the cat sat on the mat <- the cat lay on a mat": (
        {
            "rouge1": 2 / 3,
            "rouge2": 1 / 5,
            "rougeL": 2 / 3,
            "bleu": (4 / 6 * 1 / 5 * 1 / 8 * 1 / 12) ** (1 / 4),
        }
        | {
            "google_bleu": 5 / 18,
            "token_precision": 4 / 6,
            "token_recall": 4 / 6,
            "token_f1": 2 / 3,
        }
        | {"position_accuracy": 4 / 6, "exact_match": 0}
    ),
    # A part of the reference, in order: precision 1, recall 3/5, pairs 2 of 4. BLEU: three orders,
    # all 1, times the penalty exp(1 - 5/3) for being short. n-grams: 3 + 2 + 1 of 5 + 4 + 3 + 2.
    # All one position too far left.
    "a b c d e <- b c d": (
        {
            "rouge1": 3 / 4,
            "rouge2": 2 / 3,
            "rougeL": 3 / 4,
            "bleu": math.exp(-2 / 3),
            "google_bleu": 6 / 14,
        }
        | {
            "token_precision": 1,
            "token_recall": 3 / 5,
            "token_f1": 3 / 4,
            "position_accuracy": 0,
            "exact_match": 0,
        }
    ),
    # A word twice in the reference counts twice, not four times: precision 2/4, recall 2/3. "a a"
    # counts once of three, so pairs have precision 1/3 and recall 1/2. BLEU: 2/4, 1/3, 1/(2 · 2),
    # 1/(4 · 1). n-grams: 2 + 1 of 4 + 3 + 2 + 1.
    "a a b <- a a a a": (
        {
            "rouge1": 4 / 7,
            "rouge2": 2 / 5,
            "rougeL": 4 / 7,
            "bleu": (2 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4),
        }
        | {
            "google_bleu": 3 / 10,
            "token_precision": 2 / 4,
            "token_recall": 2 / 3,
            "token_f1": 4 / 7,
        }
        | {"position_accuracy": 2 / 3, "exact_match": 0}
    ),
    # All words in the wrong order: b stays in place, no pair and no triple is right: BLEU 1, 1/(2 ·
    # 2), 1/(4 · 1).
    "a b c <- c b a": (
        {
            "rouge1": 1,
            "rouge2": 0,
            "rougeL": 1 / 3,
            "bleu": (1 / 4 * 1 / 4) ** (1 / 3),
            "google_bleu": 3 / 6,
        }
        | {
            "token_precision": 1,
            "token_recall": 1,
            "token_f1": 1,
            "position_accuracy": 1 / 3,
            "exact_match": 0,
        }
    ),
    # Longer than the reference, and right as far as it goes. Pairs: 1 of 3. BLEU: 2/4, 1/3, 1/(2 ·
    # 2), 1/(4 · 1).
    "a b <- a b c d": (
        {
            "rouge1": 2 / 3,
            "rouge2": 1 / 2,
            "rougeL": 2 / 3,
            "bleu": (2 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4),
        }
        | {"google_bleu": 3 / 10, "token_precision": 1 / 2, "token_recall": 1, "token_f1": 2 / 3}
        | {"position_accuracy": 1, "exact_match": 0}
    ),
    # A single word has no pairs, so ROUGE-2 is 0 by definition; everything else is 1.
    "a <- a": dict.fromkeys(TEXT_SCORES, 1) | {"rouge2": 0},
    "a b c d e <- a b c d e": dict.fromkeys(TEXT_SCORES, 1),
    "a b c <- x y": dict.fromkeys(TEXT_SCORES, 0),
}


@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.parametrize("as_ids", [False, True])
def test_texts_by_hand(case: str, as_ids: bool) -> None:
    reference, prediction = case.split(" <- ")
    if as_ids:
        vocabulary = {word: index for index, word in enumerate(sorted(set(case.split())))}
        scores = one(
            [vocabulary[w] for w in prediction.split()], [vocabulary[w] for w in reference.split()]
        )
    else:
        scores = one(prediction, reference)
    assert list(scores) == list(TEXT_SCORES)
    assert scores == pytest.approx(BY_HAND[case], abs=1e-12)


@pytest.mark.parametrize("empty", ["", "  \n", []])
def test_empty_predictions_score_zero_without_a_word(
    empty: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = one(empty, "the dog barks" if empty != [] else [1, 2, 3])
        both = score_text([empty, "a dog"], ["a dog", "a cat"])
    assert scores == dict.fromkeys(TEXT_SCORES, 0.0)
    assert both.per_sample["exact_match"] == [1, 0]
    assert not caplog.records


def test_equal_sentences_score_one_in_any_place() -> None:
    texts = [
        "the dog barks at night",
        "the dog barks at night",
        "a film that moves , slowly",
        "so it goes on",
    ]
    for order in itertools.permutations(texts):
        scores = score_text(order, texts, bootstrap=0)
        assert scores.per_sample == {name: [1.0] * 4 for name in TEXT_SCORES}
        assert [order[i] for i in scores.matched if i is not None] == texts


# -------------------------------------------------------------------------------------------
# batches


def test_a_batch_in_another_order() -> None:
    references = ["one two three", "four five six", "seven eight nine"]
    predictions = ["seven eight x", "one two three", "x y six"]
    scores = score_text(predictions, references)
    assert scores.matched == [1, 2, 0]
    assert scores.per_sample["token_f1"] == pytest.approx([1, 1 / 3, 2 / 3])
    assert scores.per_sample["exact_match"] == [1, 0, 0]
    assert scores.mean["token_f1"] == pytest.approx(2 / 3)


def test_matching_is_the_best_of_all_orders() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        predictions, references = random.integers(0, 6, (2, 4, 5)).tolist()
        found = score_text(predictions, references, bootstrap=0)
        f1 = [[one(p, r)["token_f1"] for p in predictions] for r in references]
        best = max(
            np.mean([f1[r][p] for r, p in enumerate(order)])
            for order in itertools.permutations(range(4))
        )
        assert found.mean["token_f1"] == pytest.approx(best)
        assert sorted(found.matched) == [0, 1, 2, 3]  # type: ignore[type-var]


def test_the_order_of_words_decides_between_equal_token_f1() -> None:
    scores = score_text(["dog bites man", "man bites dog"], ["man bites dog", "dog bites man"])
    assert scores.matched == [1, 0]
    assert scores.mean["exact_match"] == 1


def test_a_prediction_is_scored_on_one_reference_and_a_reference_on_one_prediction() -> None:
    """With the whole batch as references of each, both predictions would have precision 1 in every
    n-gram.
    """
    references = ["a b c d", "e f g h"]
    scores = score_text(["a b e f", "c d g h"], references)
    assert scores.per_sample["token_precision"] == [0.5, 0.5]
    # 2/4, then 1/3, then nothing of 2 and of 1: 1/(2 · 2), 1/(4 · 1)
    assert scores.per_sample["bleu"] == pytest.approx(
        [(2 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4)] * 2
    )
    assert score_text(["a b c d"] * 2, references).mean["token_f1"] == 0.5


def test_nothing_is_matched_across_batches() -> None:
    predictions, references = ["a b", "c d"], ["c d", "a b"]
    assert score_text(predictions, references).mean["exact_match"] == 1
    apart = score_text([[p] for p in predictions], [[r] for r in references])
    assert apart.mean["token_f1"] == 0
    assert apart.matched == [0, 0]
    two = score_text([["c d", "a b"], ["x"]], [["a b", "c d"], ["x"]])
    assert two.matched == [1, 0, 0]
    assert two.per_sample["exact_match"] == [1, 1, 1]


def test_missing_predictions_count_as_empty() -> None:
    scores = score_text(["c d"], ["a b", "c d", "e f"])
    assert scores.matched == [None, 0, None]
    assert scores.per_sample["token_f1"] == [0, 1, 0]
    nothing = score_text([[], ["x"]], [["a", "b"], ["x"]])
    assert nothing.matched == [None, None, 0]
    assert nothing.mean["token_f1"] == pytest.approx(1 / 3)


def test_tensors_arrays_and_lists_are_the_same() -> None:
    predictions, references = [[5, 6, 7], [8, 9, 10]], [[8, 9, 11], [5, 6, 7]]
    expected = score_text(predictions, references)
    assert score_text(torch.tensor(predictions), torch.tensor(references)) == expected
    assert score_text(np.array(predictions), list(map(tuple, references))) == expected
    assert score_text([torch.tensor(row) for row in predictions], references) == expected
    nested = score_text([torch.tensor(predictions)] * 2, [torch.tensor(references)] * 2)
    assert nested.mean == expected.mean


# -------------------------------------------------------------------------------------------
# special tokens


@pytest.fixture
def tokenizer() -> Any:
    return word_tokenizer(["the", "dog", "barks", "at", "night", "café", "电影"])


def test_special_tokens_are_stripped_from_ids(tokenizer: Any) -> None:
    dog = tokenizer("the dog barks")["input_ids"]
    assert dog == [CLS, 4, 5, 6, SEP]
    padded = [*dog, PAD, PAD]
    assert one(padded, dog, tokenizer=tokenizer) == dict.fromkeys(TEXT_SCORES, 1)
    assert one([4, 5, 6], padded, tokenizer=tokenizer) == dict.fromkeys(TEXT_SCORES, 1)
    # Without the tokenizer they would count: two of three tokens "recovered" of an otherwise wrong
    # sentence.
    assert one([CLS, 9, SEP], [CLS, 4, SEP])["token_f1"] == pytest.approx(2 / 3)
    assert one([CLS, 9, SEP], [CLS, 4, SEP], tokenizer=tokenizer)["token_f1"] == 0
    assert one([PAD] * 5, dog, tokenizer=tokenizer) == dict.fromkeys(TEXT_SCORES, 0)
    # [UNK] names no word.
    assert one([CLS, UNK, 9, SEP], [CLS, UNK, 4, SEP], tokenizer=tokenizer)["token_recall"] == 0


def test_a_special_token_inside_a_row_keeps_the_positions(tokenizer: Any) -> None:
    reference = [CLS, 4, 5, 6, SEP]
    gap = one([CLS, 4, PAD, 6, SEP], reference, tokenizer=tokenizer)
    assert gap["position_accuracy"] == pytest.approx(2 / 3)
    assert gap["token_recall"] == pytest.approx(2 / 3)
    # Two [PAD]s in front: nothing moves either, though the row without special tokens is "barks"
    # alone.
    assert one([CLS, PAD, PAD, 6, SEP], reference, tokenizer=tokenizer)[
        "position_accuracy"
    ] == pytest.approx(1 / 3)
    # Rows of unequal length have no common positions to keep: then both are stripped first.
    assert one([4, 5, SEP], reference, tokenizer=tokenizer)["position_accuracy"] == pytest.approx(
        2 / 3
    )
    assert one([CLS, 4, 5, 6], reference, tokenizer=tokenizer)["position_accuracy"] == 1


def test_strings_with_a_tokenizer_are_its_tokens(tokenizer: Any) -> None:
    assert one("[CLS] the dog barks [SEP]", "the dog barks", tokenizer=tokenizer) == dict.fromkeys(
        TEXT_SCORES, 1
    )
    assert one([4, 5], "the dog", tokenizer=tokenizer)["exact_match"] == 1
    assert one("café 电影", [9, 10], tokenizer=tokenizer)["exact_match"] == 1


def test_ignored_labels_are_no_tokens(tokenizer: Any) -> None:
    for settings in ({}, {"tokenizer": tokenizer}):
        assert one([-100, 7, 8], [-100, 5, 6], **settings)["token_f1"] == 0
        assert one([-100, 5, 6], [5, 6], **settings)["exact_match"] == 1


# -------------------------------------------------------------------------------------------
# Unicode


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The film's  good.\n", ["the", "film", "'", "s", "good", "."]),
        ("电影很好看！", ["电", "影", "很", "好", "看", "!"]),
        ("naïve Café", ["naïve", "café"]),
        ("cafe\u0301", ["café"]),  # the accent as a character of its own
        ("great🎉🎉 👩🏽\u200d🔬❤\ufe0f🇩🇪", ["great", "🎉", "🎉", "👩🏽\u200d🔬", "❤\ufe0f", "🇩🇪"]),
        ("これはペンです", list("これはペンです")),
        ("ไทย กิน", ["ไ", "ท", "ย", "กิ", "น"]),
        ("한국어 좋아요", ["한국어", "좋아요"]),
        ("STRASSE straße ＡＢＣ ﬁne", ["strasse", "strasse", "abc", "fine"]),
        ("\u00a0a\u2003b\u3000c\x1cd", ["a", "b", "c", "d"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_unicode_is_scored_like_everything_else() -> None:
    # 3 of 4 characters, pairs 2 of 3, 1- to 4-grams 3 + 2 + 1 of 10; BLEU 3/4, 2/3, 1/2, 1/(2 · 1).
    chinese = one("我爱电车", "我爱电影")
    assert (
        chinese["rouge1"]
        == chinese["token_f1"]
        == chinese["position_accuracy"]
        == pytest.approx(3 / 4)
    )
    assert chinese["rouge2"] == pytest.approx(2 / 3)
    assert chinese["google_bleu"] == pytest.approx(6 / 10)
    assert chinese["bleu"] == pytest.approx((3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** (1 / 4))
    for text in ("我爱电影 很多", "Ça a été très bien", "so good 🎉 👩🏽\u200d🔬 !", "Привет мир"):
        assert one(text, text) == pytest.approx(dict.fromkeys(TEXT_SCORES, 1))
    assert one("cafe", "café")["token_f1"] == 0  # accents tell words apart
    assert one("CAFE\u0301", "café")["exact_match"] == 1
    assert one("a 🎉", "a 🎈")["rouge1"] == 0.5


# ------------------------------------------------------------------------------------------- what
# texts are refused


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "2 predictions for 1 references.*flatter"),
        ([["a"], ["b"]], [["a"]], "1 batches.*as many"),
        ("a", ["a"], r"batches.*but is 'a'|list of strings"),
        (["a"], "a", "references must be a list"),
        (["a"], [], "references must be a list"),
        ([["a"]], [[]], "references must be a list"),
        ([["a"], []], [["a"], []], "holds no references"),
        ([["a"]], ["a"], "Nest predictions and references alike"),
        (["a"], [["a"]], "Nest predictions and references alike"),
        ([None], ["a"], "Nest predictions"),
        ([[1.5]], [[1]], "lists of token ids"),
        (["a", "b"], ["a", " "], "Reference 1 holds no tokens"),
        ([["a"], ["b"]], [["a"], [""]], "Reference 1 holds no tokens"),
        ([[1]], ["a"], "Pass tokenizer="),
        (["a", [1]], ["a", "b"], "Pass tokenizer="),
    ],
)
def test_texts_that_are_refused(predictions: Any, references: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_text(predictions, references)


def test_a_reference_of_special_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="Reference 1 holds no tokens but special ones"):
        score_text([[4], [5]], [[4], [CLS, SEP]], tokenizer=tokenizer)


@pytest.mark.parametrize(
    "settings", [{"bootstrap": 5}, {"bootstrap": -1}, {"confidence": 1.0}, {"confidence": 0}]
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        score_text(["a"], ["a"], **settings)
    with pytest.raises(ValueError, match=name):
        score_images(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8), **settings)


# -------------------------------------------------------------------------------------------
# intervals


def coverage(
    draw: Callable[[np.random.Generator, int], np.ndarray], batch_sizes: list[int], mean: float
) -> float:
    """How many of 2,000 data sets have an interval of 95 % that covers the true mean."""
    samples = draw(np.random.default_rng(1), 2000)
    data = {str(i): row.tolist() for i, row in enumerate(samples)}
    intervals = bootstrap_intervals(data, batch_sizes, bootstrap=1000, confidence=0.95, seed=2)
    return float(np.mean([low <= mean <= high for low, high in intervals.values()]))


# Of 2,000 intervals that cover with probability 0.95, the share that does has a standard deviation
# of 0.5 %.
@pytest.mark.parametrize(
    ("draw", "mean", "count"),
    [
        (lambda random, sets: random.normal(3, 2, (sets, 10)), 3, 10),
        (lambda random, sets: random.uniform(0, 1, (sets, 20)), 0.5, 20),
        (lambda random, sets: random.beta(2, 3, (sets, 16)), 0.4, 16),
    ],
)
def test_intervals_cover_the_mean_as_often_as_they_say(draw: Any, mean: float, count: int) -> None:
    assert coverage(draw, [1] * count, mean) == pytest.approx(0.95, abs=0.015)
    assert coverage(draw, [count], mean) == pytest.approx(0.95, abs=0.015)  # one batch: its samples


def test_intervals_of_batches_whose_samples_succeed_and_fail_together() -> None:
    def draw(random: np.random.Generator, sets: int) -> np.ndarray:
        return np.repeat(random.normal(0, 1, (sets, 15)), 4, axis=1) + random.normal(
            0, 0.3, (sets, 60)
        )

    assert coverage(draw, [4] * 15, 0) == pytest.approx(0.95, abs=0.015)
    assert coverage(draw, [1] * 60, 0) < 0.75  # the mistake this avoids


def test_intervals_with_batches_of_unequal_size_are_of_the_mean_over_samples() -> None:
    data = {"x": [1.0, 0.0, 0.0, 0.0]}
    ((low, high),) = bootstrap_intervals(
        data, [1, 3], bootstrap=1000, confidence=0.95, seed=0
    ).values()
    assert (low, high) == (0, 1)  # either batch twice; both give 1/4, not 1/2
    ((low, high),) = bootstrap_intervals(
        data, [1, 3], bootstrap=1000, confidence=0.1, seed=0
    ).values()
    assert (low, high) == (0, 0.25) or (low, high) == (0.25, 0.25)


def test_intervals_of_scores() -> None:
    predictions, references = (
        [["a b"], ["a x"], ["x y"], ["c"]] * 3,
        [["a b"], ["a b"], ["a b"], ["c"]] * 3,
    )
    scores = score_text(predictions, references)
    assert scores == score_text(predictions, references)
    for name, (low, high) in scores.interval.items():
        assert low < scores.mean[name] < high
        assert min(scores.per_sample[name]) <= low
        assert high <= max(scores.per_sample[name])
    low, high = scores.interval["token_f1"]
    narrow_low, narrow_high = score_text(predictions, references, confidence=0.5).interval[
        "token_f1"
    ]
    assert low < narrow_low < narrow_high < high
    assert scores.interval != score_text(predictions, references, seed=1).interval
    assert score_text(predictions, references, bootstrap=0).interval == {}
    assert np.isnan(
        score_text(["a"], ["a"]).interval["token_f1"]
    ).all()  # one sample says nothing about spread


def test_the_mean_is_the_plain_mean_and_json_takes_it() -> None:
    scores = score_text([["a b"], ["x"]], [["a b"], ["a b"]])
    for name in TEXT_SCORES:
        assert scores.mean[name] == np.mean(scores.per_sample[name])
    loaded = json.loads(json.dumps(dataclasses.asdict(scores)))
    assert loaded["per_sample"] == scores.per_sample
    assert Scores(**loaded).mean == scores.mean


# ------------------------------------------------------------------------------------------- images


def pictures(
    count: int = 3, channels: int = 3, size: tuple[int, int] = (16, 14), seed: int = 0
) -> Tensor:
    return torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(seed))


def reference_ssim(x: np.ndarray, y: np.ndarray, data_range: float, radius: int = 5) -> float:
    """SSIM of one image (C, H, W), window by window, from Wang et al., Eq. 13."""
    sigma = 0.3 * radius
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    values = []
    for a, b in zip(x, y, strict=True):
        for top, left in itertools.product(
            range(a.shape[0] - 2 * radius), range(a.shape[1] - 2 * radius)
        ):
            p, q = (i[top : top + 2 * radius + 1, left : left + 2 * radius + 1] for i in (a, b))
            mp, mq = (weights * p).sum(), (weights * q).sum()
            vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
            cov = (weights * (p - mp) * (q - mq)).sum()
            values.append(
                (2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2))
            )
    return float(np.mean(values))


def test_images_by_hand() -> None:
    """Constant 0.5 beside constant 0.6: an error of 0.1 everywhere; SSIM is its luminance term
    alone.
    """
    true = torch.full((1, 1, 12, 12), 0.5, dtype=torch.float64)
    scores = score_images(true + 0.1, true)
    ssim = (2 * 0.5 * 0.6 + 1e-4) / (0.5**2 + 0.6**2 + 1e-4)
    assert scores.mean == pytest.approx(
        {"mse": 0.01, "rmse": 0.1, "psnr": 20.0, "ssim": ssim}, abs=1e-9
    )
    # One pixel of 144 wrong by 0.5, in one of two images.
    spotted = true.clone()
    spotted[0, 0, 0, 0] = 0
    scores = score_images(torch.cat([spotted, true - 0.1]), torch.cat([true, true - 0.1]))
    assert scores.per_sample["mse"] == pytest.approx([0.25 / 144, 0])
    assert scores.per_sample["psnr"] == pytest.approx([10 * math.log10(576), 100])
    assert scores.mean["rmse"] == pytest.approx((0.5 / 12) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ssim_is_the_papers(dtype: torch.dtype) -> None:
    true = pictures().to(dtype)
    predicted = (true + 0.4 * pictures(seed=1).to(dtype)).flip(0)
    scores = score_images(predicted, true)
    pairs = zip(predicted.flip(0).double().numpy(), true.double().numpy(), strict=True)
    expected = [reference_ssim(p, t, 1) for p, t in pairs]
    assert scores.matched == [2, 1, 0]
    assert scores.per_sample["ssim"] == pytest.approx(expected, abs=1e-6)
    assert 0.5 < scores.mean["ssim"] < 0.99


@pytest.mark.parametrize(
    ("size", "radius"), [((3, 3), 1), ((4, 9), 1), ((6, 6), 2), ((9, 10), 4), ((11, 20), 5)]
)
def test_ssim_of_small_images_takes_the_window_that_fits(
    size: tuple[int, int], radius: int
) -> None:
    true, predicted = pictures(1, 2, size).double(), pictures(1, 2, size, seed=3).double()
    expected = reference_ssim(predicted[0].numpy(), true[0].numpy(), 1, radius)
    assert score_images(predicted, true).mean["ssim"] == pytest.approx(expected, abs=1e-9)
    assert score_images(true, true).mean["ssim"] == pytest.approx(1)


def test_equal_images_leave_finite_means() -> None:
    true = pictures(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score_images(true, true)
    assert scores.mean == pytest.approx({"mse": 0, "rmse": 0, "psnr": 100, "ssim": 1})
    nearly = score_images(true.double() + 1e-7, true.double())
    assert nearly.mean["psnr"] == 100  # beyond what float32 pixels can show


def test_a_data_range_of_255() -> None:
    true = (255 * pictures()).round().to(torch.uint8)
    predicted = (255 * pictures(seed=1)).round().to(torch.uint8)
    bytes_ = score_images(predicted, true, data_range=255).mean
    unit = score_images(predicted.double() / 255, true.double() / 255).mean
    assert bytes_["psnr"] == pytest.approx(unit["psnr"])
    assert bytes_["ssim"] == pytest.approx(unit["ssim"])
    assert bytes_["mse"] == pytest.approx(unit["mse"] * 255**2)
    assert bytes_["rmse"] == pytest.approx(unit["rmse"] * 255)
    black, white = (
        torch.zeros(1, 1, 8, 8, dtype=torch.uint8),
        torch.full((1, 1, 8, 8), 255, dtype=torch.uint8),
    )
    assert score_images(white, black, 255).mean["mse"] == 65025  # bytes do not wrap around
    assert score_images(white, black, 255).mean["psnr"] == 0


def test_images_in_another_order_and_in_batches() -> None:
    true = pictures(4)
    order = [2, 0, 3, 1]
    noisy = true + 0.05 * pictures(4, seed=5)
    expected = score_images([x[None] for x in noisy], list(true.split(1)))
    shuffled = score_images(noisy[order], true)
    assert shuffled.matched == [order.index(i) for i in range(4)]
    assert shuffled.per_sample == {
        name: pytest.approx(values) for name, values in expected.per_sample.items()
    }
    # Batches are apart: exchanged between them, the right images are no longer found.
    apart = score_images([noisy[2:], noisy[:2]], [true[:2], true[2:]])
    assert apart.mean["psnr"] < shuffled.mean["psnr"] - 5
    sizes = score_images([noisy[:1], noisy[1:]], [true[:1], true[1:]])
    assert sizes.per_sample["mse"] == pytest.approx(expected.per_sample["mse"])
    low, high = expected.interval["psnr"]
    assert low < expected.mean["psnr"] < high


def test_images_are_matched_by_the_smallest_sum_of_errors() -> None:
    for seed in range(10):
        true, predicted = pictures(4, 1, (4, 4), seed), pictures(4, 1, (4, 4), seed + 100)
        errors = [
            float((predicted[list(order)] - true).square().mean())
            for order in itertools.permutations(range(4))
        ]
        assert score_images(predicted, true, bootstrap=0).mean["mse"] == pytest.approx(min(errors))


class MeanPixel:
    """Judges by the mean pixel, so that expected values are known."""

    def noise_ratio(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x.flatten(1).mean(1)


def test_noise_ratio_is_of_the_predictions_and_only_with_a_network() -> None:
    true = torch.stack([torch.full((1, 8, 8), v) for v in (51.0, 204.0)])
    scores = score_images(true.flip(0) + 0.0, true, data_range=255, evaluation_network=MeanPixel())
    assert scores.per_sample["noise_ratio"] == pytest.approx([0.2, 0.8])
    assert "noise_ratio" not in score_images(true, true, 255).mean


def test_noise_ratio_of_small_gray_images_by_a_color_network() -> None:
    torch.manual_seed(0)
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(image_size=16, filters=(4, 4)))
    gray = pictures(2, 1, (12, 12))
    scores = score_images(gray, gray, evaluation_network=network)
    expected = network.noise_ratio(adapt_images(gray, network)).tolist()
    assert scores.per_sample["noise_ratio"] == pytest.approx(expected)


def test_lpips_is_called_as_the_package_wants_it() -> None:
    seen: list[Tensor] = []

    def distance(x: Tensor, y: Tensor) -> Tensor:
        seen.extend((x, y))
        return (x - y).abs().mean((1, 2, 3), keepdim=True)

    gray = torch.full((2, 1, 8, 8), 0.25)
    scores = score_images(gray + 0.5, gray, lpips=distance)
    assert [tuple(x.shape) for x in seen] == [(2, 3, 8, 8)] * 2
    assert (float(seen[0].unique()), float(seen[1].unique())) == (0.5, -0.5)
    assert scores.per_sample["lpips"] == pytest.approx([1, 1])
    with pytest.raises(ValueError, match="4 channels"):
        score_images(pictures(1, 4), pictures(1, 4), lpips=distance)


@pytest.mark.parametrize(
    ("predictions", "references", "settings", "message"),
    [
        (pictures(2), pictures(3), {}, r"\(2, 3, 16, 14\) and \(3, 3, 16, 14\)"),
        (pictures(2)[0], pictures(2)[0], {}, r"shape \(B, C, H, W\)"),
        (pictures(0), pictures(0), {}, r"shape \(B, C, H, W\)"),
        ([pictures(1)], pictures(1).split(1) * 2, {}, "1 batches of predictions and 2"),
        ([], [], {}, "at least one"),
        (pictures() * math.nan, pictures(), {}, "NaN or infinite"),
        (pictures(), 255 * pictures(), {}, "data_range=255 for bytes"),
        (pictures(), pictures() - 0.5, {}, "normalization"),
        (pictures(size=(2, 9)), pictures(size=(2, 9)), {}, "at least 3 x 3"),
        (pictures(), pictures(), {"data_range": 0}, "data_range must be positive"),
        (pictures(), pictures(), {"data_range": math.inf}, "data_range must be positive"),
    ],
)
def test_images_that_are_refused(
    predictions: Any, references: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score_images(predictions, references, **settings)


def test_scoring_leaves_no_graph() -> None:
    predicted = pictures().requires_grad_()
    assert score_images(predicted, pictures(seed=1)).mean["mse"] > 0
    assert predicted.grad is None


# ------------------------------------------------------------------------------------------- the
# evaluate metric


@pytest.fixture
def metric(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> TextReconstruction:
    def refuse(*_: Any) -> None:
        raise AssertionError("a metric must not open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return TextReconstruction(cache_dir=str(tmp_path))


def test_the_metric_gives_the_means(metric: TextReconstruction) -> None:
    predictions, references = ["a film", "the dog barks"], ["the dog barked", "a film"]
    assert metric.name == "text_reconstruction"
    assert (
        metric.compute(predictions=predictions, references=references)
        == score_text(predictions, references).mean
    )
    nested = {"predictions": [predictions, ["x"]], "references": [references, ["x y"]]}
    assert metric.compute(**nested) == score_text(**nested).mean


def test_evaluate_loads_it_by_its_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs a copy of the file, outside the package."""
    import evaluate
    from evaluate import config

    from hf_gradguard.metrics import text_reconstruction

    monkeypatch.setattr(config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    loaded = evaluate.load(text_reconstruction.__file__, cache_dir=str(tmp_path / "cache"))
    assert type(loaded).__name__ == "TextReconstruction"
    assert not isinstance(loaded, TextReconstruction)
    found, true = ["a film", "the dog barks"], ["the dog barked", "a film"]
    loaded.add_batch(predictions=found, references=true)
    assert loaded.compute() == score_text(found, true).mean


def test_what_one_add_batch_holds_is_a_batch(metric: TextReconstruction) -> None:
    metric.add_batch(predictions=["a b", "c d"], references=["c d", "a b"])
    metric.add_batch(predictions=["x"], references=["y", "x"])
    metric.add(prediction="p q", reference="p r")
    metric.add(prediction=["s", "t"], reference=["t", "s"])
    metric.add_batch(predictions=[["u"], []], references=[["v"], ["u"]])
    expected = score_text(
        [["a b", "c d"], ["x"], ["p q"], ["s", "t"], ["u"], []],
        [["c d", "a b"], ["y", "x"], ["p r"], ["t", "s"], ["v"], ["u"]],
    )
    assert metric.compute() == expected.mean
    assert expected.mean["exact_match"] == pytest.approx(5 / 9)
    metric.add(prediction="z", reference="z")  # starts afresh
    assert metric.compute()["exact_match"] == 1


def test_the_metric_takes_ids_and_strings_of_digits(
    metric: TextReconstruction, tokenizer: Any
) -> None:
    ids = {
        "predictions": [[CLS, 4, 5, SEP], []],
        "references": [[CLS, 6, SEP, PAD], [CLS, 4, 5, SEP]],
    }
    assert metric.compute(**ids) == score_text(**ids).mean
    assert metric.compute(**ids, tokenizer=tokenizer) == score_text(**ids, tokenizer=tokenizer).mean
    assert metric.compute(**ids, tokenizer=tokenizer)["exact_match"] == 0.5
    assert (
        metric.compute(predictions=torch.tensor([[4, 5]]), references=torch.tensor([[4, 5]]))[
            "token_f1"
        ]
        == 1
    )
    metric.add(prediction=[4, 5], reference=[4, 6])
    assert metric.compute()["token_f1"] == 0.5
    assert metric.compute(predictions=["12 7"], references=["12 8"])["token_f1"] == 0.5


def test_the_metric_refuses_what_score_text_refuses(metric: TextReconstruction) -> None:
    with pytest.raises(ValueError, match="2 predictions for 1 references"):
        metric.add_batch(predictions=["a", "b"], references=["a"])
    with pytest.raises(ValueError, match="Nest predictions and references alike"):
        metric.compute(predictions=[["a"]], references=["a"])
    assert (
        metric.compute(predictions=["a"], references=["a"])["token_f1"] == 1
    )  # and works on after that


def test_references_are_written_to_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path)
    metric = TextReconstruction(cache_dir=str(tmp_path))
    metric.add_batch(predictions=["x"], references=["a secret"])
    metric.compute()
    written = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(b"secret" in found for found in written)
