"""Trainings at many rates at once against others, and the study of default rates in quick mode."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import default_data_collator

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.defenses.correlated import final_error, make_factor, sensitivity
from hf_gradguard.heads import PrivateHeadConfig, PrivateHeadForSequenceClassification
from recipes.studies.default_rates import Condition, rule
from recipes.studies.frontier_heads import Rows
from recipes.studies.lib.linear_heads import HeadSettings, simulated_heads
from recipes.studies.lib.many_rates import heads_of_rates, rightly
from recipes.studies.rate_tasks import (
    Articles,
    Pairs,
    RateImages,
    RateTask,
    SomePhrases,
    articles_of,
)

IMAGES = ("train", "test", "mnist", "tiny_imagenet", "cifar10")
STEPS, BATCH, WIDTH, CLASSES = 6, 4, 40, 3


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    return nn.functional.normalize(features), torch.arange(STEPS * BATCH) % CLASSES


@pytest.mark.parametrize("correlated", [True, False])
def test_heads_of_many_rates_are_those_of_each_rate(correlated: bool) -> None:
    features, labels = samples()
    settings = HeadSettings(0.0, STEPS, BATCH, 0.3, 1.5, correlated)
    heads = heads_of_rates(features, labels, settings, [0.7, 9.0], CLASSES, seed=3)
    for place, rate in enumerate([0.7, 9.0]):
        one = dataclasses.replace(settings, learning_rate=rate)
        (expected,) = simulated_heads(features, labels, one, trainings=1, seed=3)
        torch.testing.assert_close(heads[:, place], expected, rtol=1e-4, atol=1e-5)


def test_a_head_is_right_where_its_largest_score_is_the_label() -> None:
    weights = torch.stack([torch.eye(2), torch.eye(2).flip(0)], 1)
    assert rightly(weights, torch.eye(2), torch.tensor([0, 0])).tolist() == [
        [True, False],
        [False, True],
    ]


def trained(
    features: Tensor, labels: Tensor, noise: float, folder: Path
) -> tuple[Tensor, list[Tensor]]:
    """What the library's own path makes, and which batches it looked at."""
    config = PrivateHeadConfig(directions=features.shape[1] - 1, num_labels=CLASSES)
    head = PrivateHeadForSequenceClassification(config)
    strength = {"per_sample": True, "correlated": True, "clip": 0.3, "noise_multiplier": noise}
    args = GradGuardConfig(
        str(folder), defense="dp_sgd", defense_kwargs=strength, learning_rate=9.0, optim="sgd",
        lr_scheduler_type="linear", max_grad_norm=0.0, per_device_train_batch_size=BATCH,
        max_steps=STEPS, remove_unused_columns=False, use_cpu=True, report_to="none",
        save_strategy="no", noise_seed=0, disable_tqdm=True,
    )  # fmt: skip
    batches: list[Tensor] = []

    def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = default_data_collator(rows)
        batches.append(batch["features"])
        return batch

    rows = Rows({"features": features, "labels": labels})
    GradGuardTrainer(head, args, collated, rows).train()
    return head.head.weight.detach().T, batches


def test_a_head_of_many_rates_is_what_the_trainer_makes(tmp_path: Path) -> None:
    """By nearly no noise, of the same rows in the same order."""
    features, labels = samples()
    weight, batches = trained(features, labels, 1e-5, tmp_path)
    rows_of = [{int((features - row).norm(dim=1).argmin()) for row in batch} for batch in batches]
    messages = dict.fromkeys(tuple(sorted(rows)) for rows in rows_of if len(rows) == BATCH)
    places = [row for message in messages for row in message]
    assert sorted(places) == list(range(STEPS * BATCH))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    rows, classes = torch.empty_like(features), torch.empty_like(labels)
    rows[order], classes[order] = features[places], labels[places]
    settings = HeadSettings(0.0, STEPS, BATCH, 0.3)
    expected = heads_of_rates(rows, classes, settings, [9.0], CLASSES, seed=0)[:, 0]
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-3)


def test_its_noise_is_the_trainers(tmp_path: Path) -> None:
    """Features of zero: what is left is noise, of 6,000 numbers."""
    features, labels = torch.zeros(STEPS * BATCH, 2000), samples()[1]
    weight, _ = trained(features, labels, 1.5, tmp_path)
    settings = HeadSettings(0.0, STEPS, BATCH, 0.3, 1.5, True)
    expected = heads_of_rates(features, labels, settings, [9.0], CLASSES, seed=0)
    assert float(weight.std()) == pytest.approx(float(expected.std()), rel=0.05)


def test_the_rule_leaves_as_much_noise_in_the_weights_of_any_training() -> None:
    """Nearly one deviation, of any σ, clip, batch and number of messages."""
    for condition in [Condition(50), Condition(1590, 64), Condition(200, 256, 16, 3.0, 0.1)]:
        factor = make_factor("blt", condition.steps, falling_rate=True)
        deviation = final_error(factor, condition.steps)
        deviation *= sensitivity(factor.column(condition.steps))
        noise = condition.clip * condition.noise_multiplier * deviation / condition.batch
        assert 0.8 < rule(condition) * noise < 1
    assert rule(Condition(200, noise_multiplier=0.0)) == rule(Condition(9, noise_multiplier=0.3))


@pytest.fixture
def wikitext(sst2: Path, tmp_path: Path) -> Path:
    """A folder with six articles of sentences of the common folder, and three public ones."""
    lines = (sst2 / "train.tsv").read_text().splitlines()[1:]
    texts = [f"{line.split(chr(9))[0]} ." for line in lines if len(line.split()) > 6]
    (folder := tmp_path / "wikitext").mkdir()
    for name, first, last in (("train", 0, 6), ("valid", 6, 9)):
        parts = [
            f" = Article {number} = \n \n {' '.join(texts[start : start + 8])} \n = = Part = = \n "
            f"{' '.join(texts[start + 8 : start + 16])} \n"
            for number in range(first, last)
            for start in [16 * number]
        ]
        (folder / f"{name}.txt").write_text("".join(parts))
    return folder


def test_articles_are_read_by_paragraphs(wikitext: Path) -> None:
    articles = articles_of(wikitext / "train.txt")
    assert [len(article) for article in articles] == [2] * 6
    assert all(4 <= len(text.split()) <= 30 for article in articles for text in chain(*article))


def test_each_sentence_is_in_one_pair(wikitext: Path) -> None:
    pairs, labels = Pairs("", str(wikitext), "").private_rows()
    assert len(set(chain(*pairs))) == 2 * len(pairs)
    paragraphs = [text for article in articles_of(wikitext / "train.txt") for text in article]
    neighbors = {pair for text in paragraphs for pair in pairwise(text)}
    assert [int(pair in neighbors) for pair in pairs] == labels
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_default_rates(encoder, sst2, wikitext, cifar10, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(SomePhrases, "HELD_OUT", 20)
    monkeypatch.setattr(RateTask, "HELD_OUT", 6)
    monkeypatch.setattr(RateTask, "TEST_ROWS", 6)
    monkeypatch.setattr(Articles, "CLASSES", 3)
    monkeypatch.setattr(RateImages, "HELD_OUT", 8)
    monkeypatch.setattr(RateImages, "FILTERS", 2)
    folder = shutil.copytree(sst2, tmp_path / "sst2")
    shutil.copy(folder / "dev.tsv", folder / "test_labelled_sst.tsv")
    data = ("--model", encoder, "--data_dir", folder, "--models", tmp_path, "--wikitext", wikitext)
    images = [part for name in IMAGES for part in (f"--{name}", cifar10)]
    study = quick("default_rates", *data, *images, output=tmp_path / "default_rates")
    rows = study.rows()
    names = ["SST-2", "articles", "pairs", "CIFAR-10", "MNIST", "Tiny ImageNet"]
    assert sorted(row[0].split(",")[0] for row in rows) == sorted(names)
    for row in rows:
        assert row[3] == "7.11"  # 0.8 · 4 / (0.3 · 1.5)
        assert all(0 <= float(accuracy.split()[0]) <= 1 for accuracy in row[4:6])
