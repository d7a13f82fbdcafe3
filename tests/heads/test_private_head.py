"""A private head as a model of Transformers: files, the Hub, pipelines, and what its scores are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import example_names
from helpers import make_task
from hub import FakeHub
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
    BertTokenizer,
    TrainerCallback,
    ViTImageProcessor,
)

from hf_gradguard import GradGuardTrainer
from hf_gradguard.heads import (
    PrivateHead,
    PrivateHeadConfig,
    PrivateHeadForSequenceClassification,
    layer_features,
    private_head,
)
from hf_gradguard.heads.features import split_pairs

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]
TEXTS = ["a fine film", "the plot is long and dull"]


def make_head(folder: Path, **settings: Any) -> PrivateHead:
    """A head with weights that are not zero, on an encoder in a folder."""
    names = example_names("model tokenizer")
    names["model"].base_model.save_pretrained(folder)
    paired_tokenizer().save_pretrained(folder)
    head = private_head(str(folder), PUBLIC, **settings)
    nn.init.normal_(head.head.weight)
    return head


def paired_tokenizer() -> BertTokenizer:
    """The examples' words, with a separator after each text of a pair."""
    return BertTokenizer(vocab=example_names("tokenizer")["tokenizer"].get_vocab())


def inputs_of(texts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = paired_tokenizer()
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("save_encoder", [True, False])
def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path, save_encoder: bool) -> None:
    head = make_head(tmp_path / "encoder", labels=["bad", "good"], save_encoder=save_encoder)
    head.save_pretrained(tmp_path / "head")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    assert type(loaded) is PrivateHeadForSequenceClassification
    states = head.state_dict(), loaded.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    inputs = inputs_of(TEXTS)
    assert torch.equal(head(**inputs).logits, loaded(**inputs).logits)
    assert [n for n, p in loaded.named_parameters() if p.requires_grad] == ["head.weight"]
    assert not loaded.train().encoder.training
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    torch.testing.assert_close(loaded.features_of(TEXTS), head.features_of(TEXTS))


def test_an_encoder_is_saved_whole_or_by_its_name(tmp_path: Path) -> None:
    """A folder's path is in no file that can be loaded without it."""
    sizes = {}
    for save_encoder in (None, True, False):
        folder = tmp_path / str(save_encoder)
        make_head(tmp_path / "encoder", save_encoder=save_encoder).save_pretrained(folder)
        sizes[save_encoder] = (folder / "model.safetensors").stat().st_size
        has_path = str(tmp_path) in (folder / "config.json").read_text()
        assert has_path == (save_encoder is False)
    assert sizes[None] == sizes[True] > 2 * sizes[False]


def test_shared_weights_of_an_encoder_are_saved(tmp_path: Path) -> None:
    config = AlbertConfig(
        vocab_size=32, embedding_size=8, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    tokenizer = example_names("tokenizer")["tokenizer"]
    head = private_head(AlbertModel(config), PUBLIC, processing_class=tokenizer)
    head.save_pretrained(tmp_path)
    loaded = PrivateHeadForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.features_of(TEXTS), head.features_of(TEXTS))


def test_a_model_that_is_passed_is_saved_whole(tmp_path: Path) -> None:
    """Its weights may be others than those of its name."""
    names = example_names("model tokenizer")
    names["model"].config.name_or_path = "organization/model"
    head = private_head(names["model"], PUBLIC, processing_class=names["tokenizer"])
    assert head.config.save_encoder


def test_the_task_is_that_of_the_class(tmp_path: Path) -> None:
    make_head(tmp_path / "encoder").save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="text-classification"):
        AutoModelForTokenClassification.from_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="There is no task"):
        make_head(tmp_path / "encoder", task="summarization")
    with pytest.raises(ValueError, match="is no task for"):
        make_head(tmp_path / "encoder", task="image-classification")


# Loads what is saved in another process, which imports nothing else of the package.
PIPELINES = """
import json, sys
import hf_gradguard.heads
from transformers import pipeline
task, folder, *inputs = sys.argv[1:]
print("RESULT" + json.dumps(pipeline(task, model=folder)(inputs, **{}), default=float))
"""


def in_pipeline(task: str, folder: Path, *inputs: str) -> list[Any]:
    run = subprocess.run(
        [sys.executable, "-c", PIPELINES, task, str(folder), *inputs],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    result: list[Any] = json.loads(run.stdout.partition("RESULT")[2])
    return result


def test_whoever_trains_loads_a_head_by_an_auto_class(tmp_path: Path) -> None:
    """Without an import of heads; the package's own import loads nothing, and tells nobody."""
    make_head(tmp_path / "encoder").save_pretrained(tmp_path / "head")
    lines = [
        "import sys, hf_gradguard",
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules",
        "from hf_gradguard import protect",
        "from transformers import AutoModelForSequenceClassification as Auto",
        f"print(type(Auto.from_pretrained({str(tmp_path / 'head')!r})).__name__)",
    ]
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["PrivateHeadForSequenceClassification"]


def test_pipeline_of_texts(tmp_path: Path) -> None:
    head = make_head(tmp_path / "encoder", labels=["bad", "good"])
    head.save_pretrained(tmp_path / "head")
    found = in_pipeline("text-classification", tmp_path / "head", *TEXTS)
    scores = head(features=head.features_of(TEXTS)).logits.softmax(1).max(1)
    names = [["bad", "good"][place] for place in scores.indices.tolist()]
    assert [answer["label"] for answer in found] == names
    assert [answer["score"] for answer in found] == pytest.approx(scores.values.tolist(), rel=1e-4)


@pytest.mark.long
def test_pipeline_of_words(tmp_path: Path) -> None:
    head = make_head(tmp_path / "encoder", labels=["A", "B"], task="token-classification")
    head.save_pretrained(tmp_path / "head")
    (found,) = in_pipeline("token-classification", tmp_path / "head", TEXTS[0])
    (features,) = head.rows_of([TEXTS[0].split()])
    scores = head(features=features[None]).logits[0].softmax(1).max(1)
    assert [answer["entity"] for answer in found] == [
        "AB"[place] for place in scores.indices.tolist()
    ]
    assert [answer["score"] for answer in found] == pytest.approx(scores.values.tolist(), rel=1e-4)


def image_head(**settings: Any) -> PrivateHead:
    model, batch = make_task("vit", dtype=torch.float32, batch_size=8)
    side, channels = model.config.image_size, model.config.num_channels
    processor = ViTImageProcessor(
        size={"height": side, "width": side}, image_mean=[0.5] * channels,
        image_std=[0.5] * channels,
    )  # fmt: skip
    images = [pixels.clamp(0, 1) for pixels in batch["pixel_values"]]
    public = [_picture(pixels) for pixels in images]
    head = private_head(model, public, processing_class=processor, **settings)
    nn.init.normal_(head.head.weight)
    return head


def _picture(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray((255 * pixels).byte().permute(1, 2, 0).squeeze(-1).numpy())


@pytest.mark.long
def test_pipeline_of_images(tmp_path: Path) -> None:
    head = image_head(labels=["cat", "dog"])
    head.save_pretrained(tmp_path / "head")
    picture = _picture(torch.rand(3, 20, 20))
    picture.save(tmp_path / "picture.png")
    (found,) = in_pipeline("image-classification", tmp_path / "head", str(tmp_path / "picture.png"))
    scores = head(features=head.features_of([picture])).logits[0].softmax(0)
    assert {answer["label"]: answer["score"] for answer in found} == pytest.approx(
        {"cat": float(scores[0]), "dog": float(scores[1])}, rel=1e-4
    )


# Pushes a head, whose encoder is on that Hub, and loads it by name.
HUB = """
import sys, torch
from transformers import AutoModelForSequenceClassification, BertModel
from hf_gradguard import private_head

encoder, name = sys.argv[1:]
head = private_head(encoder, ["a good film", "a bad film", "the plot"], labels=["bad", "good"])
torch.nn.init.normal_(head.head.weight)
head.push_to_hub(name)
loaded = AutoModelForSequenceClassification.from_pretrained(name)
assert torch.equal(loaded.head.weight, head.head.weight)
assert torch.equal(loaded.features_of(["a film"]), head.features_of(["a film"]))
print(loaded.config.encoder, loaded.config.encoder_revision, loaded.config.save_encoder)
"""


def test_on_the_hub_an_encoder_is_kept_by_name_and_commit(tmp_path: Path) -> None:
    make_head(tmp_path / "encoder")
    with FakeHub() as hub:
        files = {path.name: path.read_bytes() for path in (tmp_path / "encoder").iterdir()}
        hub.add("organization/encoder", files)
        run = subprocess.run(
            [sys.executable, "-c", HUB, "organization/encoder", "me/head"],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        name, revision, is_whole = run.stdout.split()
        assert (name, revision[:6], is_whole) == ("organization/encoder", "c0ffee", "False")
        pushed = hub.repositories["me/head"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(pushed)
    assert len(pushed["model.safetensors"]) < len(files["model.safetensors"])


def test_its_forward_pass_is_exported(tmp_path: Path) -> None:
    head, inputs = make_head(tmp_path / "encoder").eval(), inputs_of(TEXTS)
    program = torch.export.export(head, (), inputs)
    torch.testing.assert_close(program.module()(**inputs).logits, head(**inputs).logits)


def plain_head(**settings: Any) -> PrivateHead:
    """A head without an encoder, on three directions and a constant."""
    head = PrivateHeadForSequenceClassification(PrivateHeadConfig(directions=3, **settings))
    nn.init.normal_(head.head.weight)
    return head


def test_several_classes_lose_their_sum() -> None:
    head = plain_head(num_labels=3, problem_type="multi_label_classification")
    features, labels = torch.randn(5, 4), torch.randint(2, (5, 3))
    output = head(features=features, labels=labels)
    expected = F.binary_cross_entropy_with_logits(
        features @ head.head.weight.T, labels.float(), reduction="sum"
    )
    torch.testing.assert_close(output.loss, expected / 5)


def test_numbers_lose_their_squared_error_in_units_of_their_scale() -> None:
    settings = {"label_center": 2.5, "label_scale": 2.0}
    head = plain_head(num_labels=1, problem_type="regression", **settings)
    features, labels = torch.randn(5, 4), 5 * torch.rand(5)
    output = head(features=features, labels=labels)
    expected = 2.5 + 2.0 * (features @ head.head.weight.T)
    torch.testing.assert_close(output.logits, expected)
    loss = ((expected[:, 0] - labels) / 2.0).square().mean() / 2
    torch.testing.assert_close(output.loss, loss)


def test_texts_of_a_pair_are_read_one_by_one(tmp_path: Path) -> None:
    """Also where a pipeline gives them in one: by their differences and products."""
    head = make_head(tmp_path / "encoder", pairs=True)
    pairs = [("a fine film", "the plot is long and dull"), ("the plot is slow and warm", "a joke")]
    texts = [
        layer_features(head.encoder, inputs_of(list(side))) for side in zip(*pairs, strict=True)
    ]
    raw = torch.cat([(texts[0] - texts[1]).abs(), texts[0] * texts[1]], 1)
    directed = F.normalize(head.directions(raw)) * (1 - 0.3**2) ** 0.5
    features = head.features_of(pairs)
    torch.testing.assert_close(features[:, :-1], directed)
    joined = head.processing_class(*map(list, zip(*pairs, strict=True)), padding=True,
                                   return_tensors="pt")  # fmt: skip
    torch.testing.assert_close(head(**joined).logits, head(features=features).logits)
    with pytest.raises(ValueError, match="pairs of texts"):
        head.features_of(["a film"])
    with pytest.raises(ValueError, match="single texts"):
        make_head(tmp_path / "encoder").features_of(pairs)
    names = example_names("model tokenizer")
    with pytest.raises(ValueError, match="separator"):
        private_head(names["model"], PUBLIC, pairs=True, processing_class=names["tokenizer"])


def test_a_separator_may_stand_twice() -> None:
    """As in RoBERTa: <s> 5 6 </s></s> 7 </s>, and padding."""
    inputs = {
        "input_ids": torch.tensor([[0, 5, 6, 2, 2, 7, 2, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]),
    }
    texts = [text["input_ids"][text["attention_mask"].bool()] for text in split_pairs(inputs, 2)]
    assert [ids.tolist() for ids in texts] == [[0, 5, 6, 2], [0, 7, 2]]


def test_directions_follow_the_number_of_rows(tmp_path: Path) -> None:
    """Cut later, they are those of a head that knew it before; a trained one stays as it is."""
    late, early = make_head(tmp_path / "encoder"), make_head(tmp_path / "encoder", num_rows=64)
    assert late.config.directions == 5  # one less than public samples
    nn.init.zeros_(late.head.weight)
    late.fit_directions(64)
    assert late.config.directions == early.config.directions == 4
    torch.testing.assert_close(late.features_of(TEXTS).abs(), early.features_of(TEXTS).abs())
    nn.init.normal_(late.head.weight)
    late.fit_directions(32)
    chosen = make_head(tmp_path / "encoder", directions=3)
    chosen.fit_directions(32)
    assert (late.config.directions, chosen.config.directions) == (4, 3)


def test_few_public_samples_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(tmp_path / "encoder")
    nn.init.zeros_(head.head.weight)
    head.fit_directions(3200)
    assert "differ in 5 directions, fewer than the 200" in caplog.text


def test_public_texts_of_a_file_are_cut_into_sentences(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text(
        " = A heading of four words = \n\n"
        "The plot is long. It is dull and very slow . Short one. A good film , a bad joke .\n"
        "the plot is slow and warm\n",
        encoding="utf-8",
    )
    head = make_head(tmp_path / "encoder")
    found = private_head(str(tmp_path / "encoder"), str(path))
    expected = [
        "The plot is long.", "It is dull and very slow .", "A good film , a bad joke .",
        "the plot is slow and warm",
    ]  # fmt: skip
    same = private_head(str(tmp_path / "encoder"), expected)
    torch.testing.assert_close(found.directions.weight, same.directions.weight)
    assert found.config.public_data == "4 samples of wiki.txt"
    assert head.config.public_data == "6 samples of a list"


def test_random_features_are_refused(tmp_path: Path) -> None:
    class Dropping(BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.hidden_states = [torch.randn_like(state) for state in output.hidden_states]
            return output

    names = example_names("model tokenizer")
    with pytest.raises(ValueError, match="other features each time"):
        private_head(Dropping(names["model"].config), PUBLIC, processing_class=names["tokenizer"])


def test_a_long_text_is_cut_as_in_training(tmp_path: Path) -> None:
    """A pipeline cuts nothing unless it is told to."""
    head = make_head(tmp_path / "encoder", max_length=6)
    texts = ["the plot is long and dull", "a fine film", "a good joke and"]
    found = head(**inputs_of(texts)).logits
    torch.testing.assert_close(found, head(features=head.features_of(texts)).logits)


@pytest.mark.parametrize("save_encoder", [True, False])
def test_a_training_is_resumed(tmp_path: Path, save_encoder: bool) -> None:
    """To the weights of one that was not interrupted."""
    rows = [{"text": text, "label": place % 2} for place, text in enumerate(4 * PUBLIC)]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def trained(folder: Path, stops: bool = False, resume: str | None = None) -> PrivateHead:
        head = make_head(tmp_path / "encoder", save_encoder=save_encoder)
        nn.init.zeros_(head.head.weight)
        args = head.training_arguments(
            str(folder), num_rows=len(rows), per_device_train_batch_size=4, noise_seed=1,
            save_strategy="steps", save_steps=4, disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        callbacks = [Stop()] if stops else []
        trainer = GradGuardTrainer(head, args, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return head

    uninterrupted = trained(tmp_path / "whole")
    trained(tmp_path / "parts", stops=True)
    checkpoint = tmp_path / "parts" / "checkpoint-4"
    resumed = trained(tmp_path / "parts", resume=str(checkpoint))
    assert torch.equal(uninterrupted.head.weight, resumed.head.weight)
    names = load_file(checkpoint / "model.safetensors").keys()
    assert any(name.startswith("encoder.") for name in names) == save_encoder


@pytest.mark.long
def test_a_saved_head_is_audited_by_the_command(tmp_path: Path) -> None:
    """In a process that imports nothing else of the package: the server recognizes each text."""
    head = make_head(tmp_path / "encoder", labels=["bad", "good"])
    head.save_pretrained(tmp_path / "head")
    rows = [f"{text}\t{name}" for text in (*TEXTS, *PUBLIC) for name in ("bad",)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]))
    command = [sys.executable, "-m", "hf_gradguard", "audit", "--model", str(tmp_path / "head")]
    command += ["--dataset", str(tmp_path / "rows.tsv"), "--samples", "2", "--estimators", "none"]
    command += ["--output", str(tmp_path / "out"), "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "recognizes 100 %" in run.stdout
