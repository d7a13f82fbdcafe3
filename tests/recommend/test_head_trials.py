"""Heads by proof in `gradguard recommend`: their names, their time, and what cannot be tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_gradguard.flags import SourceSettings
from hf_gradguard.recommend import head_trials as module
from hf_gradguard.recommend.head_trials import (
    HeadTrials,
    _labels,
    _recognition,
    _usual,
    public_for,
)
from hf_gradguard.recommend.pace import OutOfTime, Pace
from hf_gradguard.recommend.recommendation import _task_for
from hf_gradguard.recommend.trial_settings import TrialSettings
from hf_gradguard.recommend.trials import Split
from hf_gradguard.testing.small import WORDS, small_text_task

TEXTS = [(f"{WORDS[3 + i % 9]} {WORDS[1 + i % 2]} {WORDS[3 + i % 7]}", i % 2) for i in range(400)]
PUBLIC = [" ".join(WORDS[1 + (i * k) % 11] for k in (1, 2, 3)) for i in range(60)]
SETTINGS = TrialSettings(steps=10, batch_size=8)


def trials(folder: Path, pace: Pace, public: Sequence[str] = PUBLIC) -> HeadTrials:
    torch.manual_seed(0)
    model, _, tokenizer = small_text_task()
    split = Split.draw(TEXTS, 8, 8)
    encoders = {"mine": model}
    return HeadTrials(encoders, tokenizer, 2, public, "p.txt", split, SETTINGS, folder, pace)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_head_is_trained_and_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = trials(tmp_path, Pace(15))
    (label,) = heads.encoders
    accuracies = heads.judging(label, 0)
    found = heads.outcome_of(label, [accuracies], [accuracies])
    assert found.recognition is not None
    assert found.recognition.rows_found.mean < 0.4  # of 80 rows
    assert 0.3 < found.recognition.told_apart.mean < 1
    assert found.proof is not None
    assert found.proof.rows == 80
    assert heads.flags_of(label)["public"] == "p.txt"
    # Another process takes both from the folder, and trains nothing.
    monkeypatch.setattr(module, "private_head", lambda *args, **settings: pytest.fail("made"))
    again = trials(tmp_path, Pace(0.001))  # nor has it to make features
    assert again.judging(label, 0) == accuracies
    assert again.outcome_of(label, [accuracies], [accuracies]) == found


def test_another_encoder_or_other_public_samples_make_another_head(tmp_path: Path) -> None:
    one, same, other = (
        trials(tmp_path, Pace(15), public) for public in (PUBLIC, PUBLIC, PUBLIC[1:])
    )
    (label,) = one.encoders
    assert one._key(label) == same._key(label) != other._key(label)
    moved = trials(tmp_path, Pace(15))
    with torch.no_grad():
        next(moved._encoder(label)[0].parameters()).add_(1e-3)
    assert moved._key(label) != one._key(label)


def test_messages_that_would_fill_the_memory_are_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 10)
    heads = trials(tmp_path, Pace(15))
    accuracies = heads.judging("head on mine", 0)
    assert heads.outcome_of("head on mine", [accuracies], [accuracies]).recognition is None


def test_one_message_has_no_interval() -> None:
    one, two = ({"rows_found": found, "told_apart": found} for found in ([0.1], [0.1, 0.3]))
    assert _recognition([one, one]) is None
    assert _recognition([{}]) is None
    found = _recognition([two, two])
    assert found is not None
    assert found.rows_found.mean == pytest.approx(0.2)
    assert (found.rows_found.low, found.rows_found.high) == (
        pytest.approx(0.004),
        pytest.approx(0.396),
    )


class Slow:
    """A clock that each reading moves on, by as many seconds."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self._seconds
        return self.now


def test_no_features_are_begun_that_cannot_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 samples take a second by this clock, and 460 are to be read: half a minute."""
    monkeypatch.setattr(module, "time", Slow(1.0))
    made = list[Any]()
    monkeypatch.setattr(module, "private_head", lambda *args, **settings: made.append(args))
    heads = trials(tmp_path, Pace(0.4))
    with pytest.raises(OutOfTime):
        heads.judging("head on mine", 0)
    assert not made


def test_features_end_where_time_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made until then is stored."""
    pace = Pace(15)
    heads = trials(tmp_path, pace)
    head = heads._head("head on mine")
    monkeypatch.setattr(module, "_CHUNK", 100)
    monkeypatch.setattr(pace, "fits", lambda seconds: len(parts) < 2)
    parts, prepare = list[int](), head.prepare_dataset

    def watched(rows: Any) -> Any:
        parts.append(len(rows))
        return prepare(rows)

    monkeypatch.setattr(head, "prepare_dataset", watched)
    with pytest.raises(OutOfTime):
        heads._rows("head on mine", head, "training")
    assert parts == [100, 100]
    monkeypatch.setattr(pace, "fits", lambda seconds: True)
    rows = heads._rows("head on mine", head, "training")
    samples = [text for text, _ in heads._samples["training"]]
    assert parts == [100, 100, 100, 100, 100, 14]
    torch.testing.assert_close(rows[:]["features"], head.features_of(samples))


def test_heads_have_short_names_unless_two_would_be_alike(tmp_path: Path) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "model")
    folder, link = str(tmp_path / "a" / "model"), str(tmp_path / "link")
    assert _labels([folder, link, "org/mpnet"]) == {
        "head on model": folder, "head on link": link, "head on org/mpnet": "org/mpnet",
    }  # fmt: skip
    (tmp_path / "b" / "model").mkdir(parents=True)
    other = str(tmp_path / "b" / "model")
    assert list(_labels([folder, other])) == [f"head on {folder}", f"head on {other}"]


def test_the_usual_sample_has_a_mean_length() -> None:
    assert _usual(["a", "abcd", "abcdefg", "ab"], 1) == ["abcd"]
    assert _usual([3, 1, 2], 2) == [3, 1]


def test_too_few_public_samples_are_refused_before_anything_is_trained() -> None:
    model, _, _ = small_text_task()
    with pytest.raises(ValueError, match="--public has 2 samples of a list: give three or more"):
        public_for(model, PUBLIC[:2])
    assert public_for(model, PUBLIC) == PUBLIC
    assert len(public_for(model, None)) == 560


def test_a_masked_language_model_classifies_where_data_have_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `train --head` takes it; without labels it stays what it is."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=30, hidden_size=8, **sizes)
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    model, labeled, bare = (str(tmp_path / name) for name in ("masked", "rows.csv", "texts.csv"))
    Path(labeled).write_text("text,label\na film,1\n")
    Path(bare).write_text("text,kind\na film,1\n")

    def task(dataset: str, **settings: Any) -> str | None:
        return _task_for(SourceSettings(model=model, dataset=dataset, **settings))

    assert task(bare) is None
    assert task(labeled, task="fill-mask") == "fill-mask"
    assert not caplog.messages
    assert task(labeled) == task(bare, label_column="kind") == "text-classification"
    assert "its encoder gets a new classifier. --task fill-mask predicts" in caplog.messages[0]
