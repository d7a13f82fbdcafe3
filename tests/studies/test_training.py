"""Studies that train on SST-2, in quick mode on generated sentences and a random encoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import save_encoder
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.leakage import dp_sgd_epsilon, gaussian_epsilon
from hf_gradguard.randomness import Stream
from hf_gradguard.testing.small import small_text_task
from recipes.studies import frontier_rows, frontier_texts
from recipes.studies.correlated_bodies import Bodies, BodyTask
from recipes.studies.correlated_heads import Choice, HeadTask, ImagesTask, Texts
from recipes.studies.frontier_attacks import attack_texts, f1_of, messages_of
from recipes.studies.frontier_clients import Stage, TextTask, row_of
from recipes.studies.frontier_heads import TextHeadTask
from recipes.studies.frontier_rows import (
    GRID,
    QUICK_ATTACKS,
    QUICK_HEAD_ATTACKS,
    QUICK_ROWS,
    STAGES,
)
from recipes.studies.frontier_tables import lost, score_text
from recipes.studies.lib.intervals import over_seeds
from recipes.studies.lib.text import sst2
from recipes.studies.private_accuracy import RATES, Accuracy
from recipes.studies.rate_search import next_rate, rates_to_try
from recipes.studies.whole_models import PartTask


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory, sst2: Path) -> Path:
    """The common folder, with a test set."""
    folder = shutil.copytree(sst2, tmp_path_factory.mktemp("data") / "sst2")
    shutil.copy(folder / "dev.tsv", folder / "test_labelled_sst.tsv")
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    folder = tmp_path_factory.mktemp("data") / "encoder"
    return save_encoder(folder, tokenizer, hidden_size=96)


def test_what_is_read_stands_beside_what_others_have_of_it(encoder):
    """Two texts of four words each, of which one is common to both."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    words = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))[:7]
    one, two = [words[:4]], [[words[0], *words[4:]]]
    assert f1_of([one, [[]]], [one, two], tokenizer) == {
        "token_f1": [1.0, 0.0], "token_f1_others": [0.25, 0.0]
    }  # fmt: skip
    assert f1_of([one], [one], tokenizer) == {"token_f1": [1.0]}


def test_refiner_parts(encoder, sentences, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences, "--models", tmp_path / "models")
    study = quick("refiner_parts", *data, output=tmp_path / "parts")
    found = study.figures
    assert list(found) == ["none", "4 samples", "16, without feedback"]
    for name, row in found.items():
        word = [] if name == "16, without feedback" else ["one word, 1"]
        assert list(row) == ["accuracy", "span, 1", "candidates, 4", *word]
        (trained,), (read,) = row["accuracy"].values(), row["candidates, 4"].values()
        assert 0 <= trained["accuracy"] <= 1
        assert len(read["tpr_1%"]) == 4
    assert found["none"]["one word, 1"]["0"]["rank"] == [1]
    cosines = {row: one["accuracy"]["0"]["cosine_of_sums"] for row, one in found.items()}
    assert cosines["none"] == pytest.approx(1)
    assert -1 <= cosines["4 samples"] < 1
    rows = study.rows()
    assert rows[0][:4] == ["none", "", f"{found['none']['accuracy']['0']['accuracy']:.3f}",
                           "0.000 [0.000, 0.000] (1 seed)"]  # fmt: skip


def test_frontier(encoder, sentences, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier_rows, "QUICK_ROWS", QUICK_ROWS[::2])
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences)
    study = quick("frontier_rates", *data, output=tmp_path / "frontier_rates")
    found = {row: list(tried) for row, tried in study.figures.items()}
    assert found == {
        row_of(*row): [f"{rate:g}" for rate in rates_to_try(row[1], 0)] for row in QUICK_ROWS[::2]
    }
    models = tmp_path / "models"
    study = quick("frontier_text", *data, "--models", models, output=tmp_path / "frontier_text")
    assert {place for row in study.figures.values() for place in row} == {
        "accuracy",
        *(f"{attack}, {size}, {stage}" for attack, size in QUICK_ATTACKS for stage in STAGES),
    }
    plain = study.figures["none"]
    assert plain["span, 1, start"]["0"]["token_f1"] == [1.0]  # a lone sentence, undefended
    told = plain["candidates, 4, start"]["0"]
    assert len(told["rank"]) == 4  # one of each of the message's sentences
    assert score_text({"0": told}) == over_seeds([told["tpr_1%"]], "shares").text(2)
    assert lost(plain["accuracy"], plain["accuracy"]) == "0.000 [0.000, 0.000] (1 seed)"
    assert (tmp_path / "frontier_text.png").exists()

    study = quick("frontier_lists", *data, "--models", models, output=tmp_path / "frontier_lists")
    (found,) = study.figures.values()
    assert len(found["rank"]) == 4
    (row,) = study.rows()
    assert row[:2] == ["20", f"{(found['parameters'] / 4) ** 0.5 / 20:.2g}"]

    study = quick("frontier_partly", *data, "--models", models, output=tmp_path / "partly")
    (found,) = study.figures.values()
    assert {listed: len(one["rank"]) for listed, one in found.items()} == {"4": 4, "2": 2}

    study = quick("frontier_batches", *data, output=tmp_path / "frontier_batches")
    for found in study.figures.values():
        assert found["1"]["tpr_1%"] == found["1"]["all"]  # the same two sentences, read by all
        assert (len(found["2"]["tpr_1%"]), len(found["2"]["all"])) == (2, 4)
    assert [row[1] for row in study.rows()] == ["1", "2"] * 2

    other = tmp_path / "text.txt"
    title = " = A title of more than eight words that none reads = \n\n"
    other.write_text(title + " The plot is <unk> and long and slow and dull . " * 2 + "\n")
    assert list(frontier_texts.sentences_in(other)) == []
    paragraph = " ".join(row["sentence"] + " ." for row in sst2(sentences))
    other.write_text(title + paragraph + "\n")
    study = quick(
        "frontier_corpora", *data, "--text", other, "--models", models,
        output=tmp_path / "frontier_corpora",
    )  # fmt: skip
    assert study.figures["none"]["span, 1, end"]["0"]["token_f1"] == [1.0]
    (row,) = study.rows()
    assert row[:2] == ["`none`", "1.00"]


@pytest.fixture
def public(sentences, tmp_path) -> Path:
    """The same sentences as a text of one paragraph."""
    path = tmp_path / "public.txt"
    path.write_text(" ".join(row["sentence"] + " ." for row in sst2(sentences, "train")))
    return path


def test_heads(encoder, sentences, public, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences, "--public", public)
    data += ("--models", tmp_path / "models")
    study = quick("frontier_heads", *data, output=tmp_path / "frontier_heads")
    plain, private, alone = study.figures.values()
    attacked = {
        f"{name}, {size}, {stage}"
        for (name, size), (_, _, stages) in QUICK_HEAD_ATTACKS.items()
        for stage in stages
    }
    assert plain.keys() == private.keys() == {"learning rate", "accuracy", *attacked}
    assert alone.keys() == {place for place in attacked if place.startswith("tag")}
    told = plain["candidates, 4, end"]["0"]
    assert len(told["rank"]) == 4
    # No noise, and 96 embedding dimensions for 20 sentences: who is in the message is plain.
    assert max(told["rank"]) <= 4
    rows = len(TextHeadTask(str(encoder), str(sentences), str(tmp_path / "models")).rows_to_learn())
    (spent,) = (run["epsilon"] for run in private["accuracy"].values())
    assert spent == pytest.approx(dp_sgd_epsilon(1.5, 4 / rows, 2, 1e-5))
    assert [row[0] for row in study.rows()] == list(study.figures)
    # What was kept is the head alone, and gives the same classes anew.
    (kept,) = (tmp_path / "models").glob("*/dp_sgd*/end.safetensors")
    assert set(load_file(kept)) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("whitened", [False, True])
def test_embeddings_made_before_give_the_same_logits(
    whitened, encoder, sentences, public, tmp_path, monkeypatch
):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    text = str(public) if whitened else None
    task = TextHeadTask(str(encoder), str(sentences), str(tmp_path), public=text)
    model, texts = task.start(0), task.texts.train_rows.select(range(5))
    batch = task.tokenizer.pad({"input_ids": texts["input_ids"]}, return_tensors="pt")
    kept = task.held_out()["embeddings"][:5]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(embeddings=kept).logits)
        inputs = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
        inputs["attention_mask"] = batch["attention_mask"]
        torch.testing.assert_close(model(**inputs).logits, model(embeddings=kept).logits)


def test_embeddings_of_several_layers(encoder, sentences, tmp_path):
    """One after the other the means of each layer's states, the last layer's at the end."""
    last, two = (TextHeadTask(str(encoder), str(sentences), str(tmp_path), n) for n in (1, 2))
    one, both = last.test_rows["embeddings"], two.test_rows["embeddings"]
    width = one.shape[1]
    assert both.shape == (len(one), 2 * width)
    assert two.start(0).head.in_features == 2 * width
    torch.testing.assert_close(both[:, width:], one)
    ids = torch.tensor([two.texts.test_rows[0]["input_ids"]])
    with torch.no_grad():
        states = two.start(0).encoder(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(both[0, :width], states[-2][0].mean(0))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("pruning", {"ratio": 0.9, "error_feedback": True}), ("optimal_noise", {"scale": 0.1})],
)
def test_each_message_is_the_next_one_of_a_training(name, settings):
    """What an earlier message left out of its sentences would name these in a later one."""
    model, batch, tokenizer = small_text_task()
    model.eval()
    other = {key: value.flip(0) for key, value in batch.items()} | {"labels": batch["labels"]}

    def stage() -> Stage:
        defense = make_defense(name, **settings)
        defense.prepare(model, tokenizer)
        defense(GradientMap(model, batch), Stream.from_seeds(5))
        return Stage(model, defense)

    both = messages_of({"seed": 0}, stage(), [batch, other])
    again = messages_of({"seed": 0}, stage(), [other, other])
    assert all(torch.equal(both[1][key], again[1][key]) for key in both[1])
    assert not all(torch.equal(both[0][key], again[0][key]) for key in both[0])


def test_of_a_message_of_zeros_no_word_is_found():
    model, _, tokenizer = small_text_task()
    defense = make_defense("pruning", ratio=0.5, error_feedback=True, min_batches=2)
    defense.prepare(model, tokenizer)  # it sends nothing of a first batch
    texts = [{"sentence": tokenizer.decode([i, i + 1]), "label": 0} for i in (10, 12, 14, 16)]
    cell = {"attack": "span", "size": 2, "messages": 2, "settings": {}, "seed": 0}
    found = attack_texts(cell, Stage(model.eval(), defense), tokenizer, texts)
    assert found == {"token_f1": [0.0] * 4, "token_f1_others": [0.0] * 4}
    listed = {"attack": "candidates", "settings": {"listed": 4}}
    named = attack_texts(cell | listed, Stage(model.eval(), defense), tokenizer, texts)
    assert named["tpr_1%"] == [0.0] * 4
    assert len(set(named["rank"])) == 1  # a guess: all alike


def test_the_start_is_where_a_client_first_says_something(
    encoder, sentences, tmp_path, monkeypatch
):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    task = TextTask(str(encoder), str(sentences), str(tmp_path))
    strength = {"ratio": 0.9, "error_feedback": True, "min_batches": 3}
    cell = {"defense": "pruning", "strength": strength, "learning_rate": 1e-3, "seed": 0}
    cell |= {"steps": 6, "batch": 4}
    batch = next(iter(task.later_batches()))
    for stage, most in (("start", 3), ("middle", 4), ("end", 7)):
        found = task.stage(cell, stage)
        counts = [int(count.max()) for count in found.batches.values()]
        assert max(counts) == most
        message = found.defense(GradientMap(found.model, batch), Stream.from_seeds(0))
        assert any(bool(y.any()) for y in message.values())


def test_the_rate_is_searched_beyond_the_ends(tmp_path):
    """Of three equal steps up the last is best: one more is asked for, until one is worse."""
    common = {"defense": "none", "strength": {}}
    tried = list(GRID[:3])

    class Found(dict):
        def __contains__(self, cell):
            return super().__contains__(cell["learning_rate"])

        def __getitem__(self, cell):
            return {"held_out": super().__getitem__(cell["learning_rate"])}

    results = Found(zip(GRID, (0.5, 0.6, 0.7, 0.8, 0.75), strict=False))
    assert next_rate(results, common, tried) == GRID[3]
    assert next_rate(results, common, [*tried, GRID[3]]) == GRID[4]
    assert next_rate(results, common, list(GRID[:5])) is None


def test_private_accuracy(encoder, sentences, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences)
    output = tmp_path / "private_accuracy"
    found = quick("private_accuracy", *data, output=output).figures
    assert set(found) == {"rates", "no privacy", "dp_sgd, ε = 8"}
    spent = found["dp_sgd, ε = 8"]["0"]["epsilon"]
    assert 7.9 < spent <= 8
    assert found["no privacy"]["0"]["epsilon"] is None


def test_private_accuracy_asks_for_both_once_a_rate_is_chosen(tmp_path):
    class Args:
        quick, output = False, tmp_path / "private_accuracy"

    first = Accuracy(Args).cells()
    assert [place[0] for place in first] == ["rates"] * len(RATES)


def test_correlated_heads(encoder, sentences, public, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(HeadTask, "HELD_OUT", 20)
    monkeypatch.setattr(HeadTask, "PUBLIC", 12)
    monkeypatch.setattr(Texts, "QUICK_ROW", Texts.QUICK_ROW._replace(batch=4, directions=5))
    data = ("--model", encoder, "--data_dir", sentences, "--public", public)
    output, models = tmp_path / "correlated_heads", tmp_path / "models"
    study = quick("correlated_heads", *data, "--models", models, output=output)
    plain, private, secret = study.figures.values()
    assert plain.keys() == private.keys() == {"learning rate", "accuracy"}
    (run,) = private["accuracy"].values()
    assert run["epsilon"] == pytest.approx(gaussian_epsilon(1.5, 1e-5))
    assert "epsilon" not in plain["accuracy"]["0"]
    (run,) = secret["accuracy"].values()
    assert run["epsilon"] == pytest.approx(gaussian_epsilon(0.95, 1e-5))
    assert run["epsilon_unknown"] < run["epsilon"]
    rows = study.rows()
    shape = "2 messages of 4, 5 directions"
    names = ["none", "σ 1.5 correlated", "σ 0.95 correlated (balls in bins)"]
    assert [row[0] for row in rows] == [f"{name}, {shape}" for name in names]
    assert rows[1][-3:] == ["0.048", "", ""]
    assert rows[2][-2:] == [f"{run['epsilon_unknown']:.2g}", f"{run['members_found_unknown']:.2g}"]
    kept = load_file(models / "correlated-heads" / "features-test.safetensors")
    torch.testing.assert_close(kept["features"].norm(dim=1), torch.ones(len(kept["labels"])))


def test_correlated_bodies(encoder, sentences, public, quick, tmp_path, monkeypatch):
    """Head and body learn of different rows, and what is judged is an ordinary model."""
    monkeypatch.setattr(HeadTask, "HELD_OUT", 20)
    monkeypatch.setattr(HeadTask, "PUBLIC", 12)
    monkeypatch.setattr(BodyTask, "PART", 5)
    row = Bodies.QUICK_ROW._replace(batch=4, directions=5)
    monkeypatch.setattr(Bodies, "QUICK_ROW", row)
    data = ("--model", encoder, "--data_dir", sentences, "--public", public)
    output, models = tmp_path / "correlated_bodies", tmp_path / "models"
    study = quick("correlated_bodies", *data, "--models", models, output=output)
    (figures,) = study.figures.values()
    assert figures["accuracy"]["0"]["epsilon"] == pytest.approx(gaussian_epsilon(1.5, 1e-5))
    (shown,) = study.rows()
    assert shown[0] == "σ 1.5 correlated, 4 messages of 4, 5 directions"
    assert (shown[4], shown[-1]) == ("", "0.048")  # no heads are published beside it
    parts = list((models / "correlated-heads" / "bodies").glob("rows-*"))
    assert len(parts) == 4  # eight rows in files of five, once for the rate and once for the table
    made = sum(len(load_file(path)["scores"]) for path in parts)
    assert made == 2 * 2 * 4


def test_the_whole_model_is_trained_at_the_rate_of_held_out_rows(
    encoder, sentences, quick, tmp_path, monkeypatch
):
    monkeypatch.setattr(TextTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences, "--models", tmp_path / "models")
    study = quick("whole_models", *data, output=tmp_path / "whole_models")
    ((place, cells),) = study.figures.items()
    assert place == "2 messages of 16"
    (tried,) = cells["learning rate"].values()
    assert 0 <= tried["held_out"] <= 1
    accuracy = cells["accuracy"]["0"]["accuracy"]
    (shown,) = study.rows()
    assert shown[1:] == [f"**0.0001** ({tried['held_out']:.3f})", f"{accuracy:.3f}",
                         f"{0.98 * accuracy:.3f}"]  # fmt: skip


def test_parts_of_a_model_are_trained_by_correlated_noise(
    encoder, sentences, quick, tmp_path, monkeypatch
):
    monkeypatch.setattr(PartTask, "HELD_OUT", 20)
    data = ("--model", encoder, "--data_dir", sentences)
    study = quick("correlated_models", *data, output=tmp_path / "correlated_models")
    rows = study.rows()
    assert [row[0] for row in rows] == [
        f"{part}, 2 messages"
        for part in (
            "LoRA of rank 8, none",
            "LoRA of rank 8, σ 1.5 correlated",
            "LoRA of rank 2, σ 1.5 correlated",
            "whole model, σ 1.5 correlated",
        )
    ]
    plain, private, fewer, whole = rows
    assert int(plain[1].replace(",", "")) > int(fewer[1].replace(",", ""))
    assert private[-2:] == fewer[-2:] == ["2.8", "0.048"]
    assert plain[-2:] == ["", ""]
    assert (whole[1], whole[3]) == ("", "")  # tried on held-out rows alone


def test_settings_of_heads_are_chosen_by_simulation(
    encoder, sentences, public, quick, tmp_path, monkeypatch
):
    monkeypatch.setattr(HeadTask, "HELD_OUT", 20)
    monkeypatch.setattr(HeadTask, "PUBLIC", 12)
    monkeypatch.setattr(Texts, "QUICK_ROW", Texts.QUICK_ROW._replace(batch=4, directions=5))
    data = ("--model", encoder, "--data_dir", sentences, "--public", public)
    output = tmp_path / "correlated_heads_choice"
    study = quick("correlated_heads_choice", *data, "--models", tmp_path, output=output)
    rows = {row[0]: row[1:] for row in study.rows()}
    assert rows.keys() == Choice.OTHERS.keys()
    rates = [row[0].split()[0].strip("*") for row in rows.values()]
    assert set(rates) == {"20", "40", "2.5", "80", "5"}


def test_correlated_heads_of_images(cifar10, quick, tmp_path, monkeypatch):
    """The held-out rows and the others are all there are; features have norm 1."""
    monkeypatch.setattr(ImagesTask, "HELD_OUT", 8)
    monkeypatch.setattr(ImagesTask, "FILTERS", 2)
    monkeypatch.setattr(Texts, "QUICK_ROW", Texts.QUICK_ROW._replace(batch=4, directions=5))
    output, models = tmp_path / "correlated_heads_images", tmp_path / "models"
    data = ("--train", cifar10, "--test", cifar10, "--public", cifar10, "--models", models)
    study = quick("correlated_heads_images", *data, output=output)
    kinds = ["none", "σ 1.5 correlated", "σ 0.95 correlated (balls in bins)"]
    assert [row[0].split(",")[0] for row in study.rows()] == kinds
    rows = load_file(models / "correlated-image-heads" / "features-train.safetensors")
    torch.testing.assert_close(rows["features"].norm(dim=1), torch.ones(len(rows["labels"])))
    task = ImagesTask(str(cifar10), str(cifar10), str(models), str(cifar10))
    held_out, learned = task.places()
    assert (len(held_out), sorted(held_out + learned)) == (8, list(range(len(rows["labels"]))))
