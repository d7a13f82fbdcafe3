"""Attacks on undefended gradients, in quick mode on generated data."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import UNHEARD, save_encoder, word_tokenizer

from recipes.studies.undefended_texts import SENTENCES


def test_images(cifar10, mnist, quick, tmp_path):
    data = ("--cifar10", cifar10, "--mnist", mnist)
    study = quick("undefended_images", *data, output=tmp_path / "images")
    figures = study.figures
    attacks = ("dlg", "idlg", "inverting_gradients", "inverting_gradients, as published")
    assert list(figures) == [
        f"{data}, {attack}" for data in ("cifar10", "mnist") for attack in attacks
    ]
    # Batch 1: the sign of the last bias says it.
    assert all(found["labels right"] == 1 for found in figures.values())
    mean, low, high = figures["mnist, idlg"]["psnr"]
    row = study.rows()[5]
    assert row[:2] == ["mnist, idlg", f"{mean:.3g} [{low:.3g}, {high:.3g}]"]


def test_text(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    (found,) = quick("undefended_text", *data, output=tmp_path / "t").figures.values()
    assert found["labels right"] == 1
    assert found["token_f1"][0] == sum(found["token_f1 of each"]) / 2


def test_batches(cifar10, quick, tmp_path):
    study = quick("undefended_batches", "--cifar10", cifar10, output=tmp_path / "b")
    networks = ("any network", "LeNet", "ResNet", "ResNet in training mode", "ViT")
    assert set(study.figures) == {f"{network}, {size}" for network in networks for size in (1, 2)}
    assert study.figures["ViT, 1"]["analytic"]["psnr"][0] > 60
    row = next(row for row in study.rows() if row[:2] == ["LeNet, 2", "inverting_gradients"])
    mean, low, high = study.figures["LeNet, 2"]["inverting_gradients"]["psnr"]
    assert row[2] == f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def test_deep_prior(cifar10, quick, tmp_path):
    study = quick("undefended_deep_prior", "--cifar10", cifar10, output=tmp_path / "d")
    smooth = ["total variation 0.0001", "total variation 0.1"]
    deep = [f"deep prior, {steps} steps" for steps in (100, 500)]
    (found,) = study.figures.values()
    assert list(found) == smooth + deep
    assert found[deep[1]]["evaluations"] == 5
    psnr = {row: found[row]["psnr of each"] for row in found}
    less = np.subtract(psnr[deep[1]], psnr[max(smooth, key=lambda row: np.mean(psnr[row]))])
    half = 12.706 * abs(less[0] - less[1]) / 2  # Student's t of one degree of freedom
    (shown,) = (row for row in study.rows() if row[:2] == ["1", deep[1]])
    assert float(shown[2].split(" ± ")[0]) == pytest.approx(np.mean(psnr[deep[1]]), abs=0.06)
    assert [float(end) for end in shown[3].split(" ± ")] == pytest.approx(
        [less.mean(), half], abs=0.06
    )


@pytest.fixture
def speaker(tmp_path):
    """A folder with a tokenizer that knows the words of the sentences."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    words += [f"{UNHEARD}{index}" for index in range(2 * len(words))]
    return save_encoder(tmp_path / "speaker", word_tokenizer(words), hidden_size=16)


@pytest.mark.slow
def test_families_and_lengths(quick, speaker, tmp_path):
    given = ("--tokenizer", speaker)
    study = quick("undefended_families", *given, output=tmp_path / "families")
    exact = {row: {n: (one["exact"], one["of"]) for n, one in sizes.items()}
             for row, sizes in study.figures.items()}  # fmt: skip
    kinds = ("language model", "classifier")
    single = [f"llama, {kind}{end}" for kind in kinds for end in ("", ", no special tokens")]
    four = ["bert, classifier", "bert, masked language model"]
    assert exact == {row: {"1": (1, 1)} for row in single} | {row: {"4": (4, 4)} for row in four}
    assert study.rows()[0][1].startswith("1 of 1 · 100% · ")
    study = quick("undefended_lengths", *given, output=tmp_path / "lengths")
    (lengths,) = study.figures.values()
    (kinds,) = lengths.values()
    assert [(one["right"], one["of"]) for one in kinds.values()] == [(7, 7)] * 3
    assert study.rows()[0][:2] == ["llama, language model", "8"]
    assert study.rows()[0][2].startswith("7 of 7 · ")
