"""One line where weights are missing, and none where a new head was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_gradguard.logs import errors_alone
from hf_gradguard.models import classifier_head, load_model
from tests.helpers import word_tokenizer

WORDS = ["a", "fine", "film"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """Of one layer."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = word_tokenizer(WORDS)
    config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes)
    BertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_new_head_is_no_news(
    encoder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_model(str(encoder), head=classifier_head(["bad", "good"]))
    assert model.num_labels == 2
    assert not caplog.messages
    assert "MISSING" not in capsys.readouterr().err


def test_missing_weights_are_one_line(encoder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = BertConfig.from_pretrained(encoder, num_hidden_layers=2)  # one more than its weights
    config.save_pretrained(encoder)
    load_model(str(encoder), head=classifier_head(["bad", "good"]))
    (line,) = caplog.messages
    assert line.startswith(f"{encoder} lacks weights, which are random now: bert.encoder.layer.1.")
    assert line.endswith(" and 13 more.")


def test_a_head_that_nobody_asked_for_is_news(
    encoder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(str(encoder))
    assert caplog.messages == [
        f"{encoder} lacks weights, which are random now: classifier.bias, classifier.weight."
    ]


def test_levels_are_given_back() -> None:
    logger = logging.getLogger("some.package")
    logger.setLevel(logging.INFO)
    with errors_alone("some.package"):
        assert logger.level == logging.ERROR
    assert logger.level == logging.INFO
    with pytest.raises(ZeroDivisionError), errors_alone("some.package"):
        _ = 1 // 0
    assert logger.level == logging.INFO
