"""Samples as files, folders and arrays have them: what they say is what is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_gradguard.data.samples import load_samples, load_texts

CLASSES = {"dog": 0, "cat": 1}


@pytest.fixture
def animals(tmp_path: Path) -> str:
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / "animals" / name).mkdir(parents=True)
        for number in range(2):
            image = Image.new("RGB", (8, 8), (shade, shade, shade))
            image.save(tmp_path / "animals" / name / f"{number}.png")
    return str(tmp_path / "animals")


def test_classes_that_have_names_are_the_models(animals: str) -> None:
    """A folder counts its classes by the alphabet, and a model as it likes."""
    samples = load_samples(animals, kind="image", count=4, classes=CLASSES)
    assert sorted((image.getpixel((0, 0))[0], label) for image, label in samples) == [
        (10, 1), (10, 1), (200, 0), (200, 0)
    ]  # fmt: skip


def test_names_that_say_nothing_leave_numbers(animals: str) -> None:
    samples = load_samples(animals, kind="image", count=4, classes={"LABEL_0": 0, "LABEL_1": 1})
    assert sorted((image.getpixel((0, 0))[0], label) for image, label in samples)[0] == (10, 0)


def test_a_class_that_the_model_lacks_is_refused(animals: str) -> None:
    with pytest.raises(ValueError, match=r"class 0 of its 2 has a name .* dog, bird"):
        load_samples(animals, kind="image", count=4, classes={"dog": 0, "bird": 1})
    with pytest.raises(ValueError, match="no class of the model"):
        load_samples(animals, kind="image", count=4, classes={"LABEL_0": 0})


@pytest.mark.parametrize(("suffix", "between"), [(".csv", ","), (".tsv", "\t")])
def test_words_that_look_like_nothing_are_texts(tmp_path: Path, suffix: str, between: str) -> None:
    texts = ["NA", "null", "None", "a fine film"]
    path = tmp_path / f"rows{suffix}"
    lines = [f"{text}{between}1" for text in texts]
    path.write_text("\n".join([f"sentence{between}label", *lines]) + "\n")
    assert load_texts(str(path)) == texts
    samples = load_samples(str(path), kind="text", count=4)
    assert sorted(text for text, _ in samples) == sorted(texts)
    path.write_text(f"sentence{between}label\n{between}1\n")
    with pytest.raises(ValueError, match="is empty"):
        load_samples(str(path), kind="text", count=1)


def test_arrays_of_several_labels_and_of_none(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.npz")
    np.savez(path, image=np.zeros((2, 4, 4), np.uint8), label=np.array([[0, 1], [1, 1]]))
    ((_, several),) = load_samples(path, kind="image", labels="several", count=1, classes=CLASSES)
    assert several in ([0.0, 1.0], [1.0, 1.0])
    np.savez(path, image=np.zeros((2, 4, 4), np.uint8))
    assert load_samples(path, kind="image", labels=None, count=2)[1][1] is None
