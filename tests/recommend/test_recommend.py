"""`gradguard recommend` on a tiny model: what is written, kept and refused."""

from __future__ import annotations

import html
import json
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    set_seed,
)
from transformers.utils import logging

from hf_gradguard import DEFENSES as REGISTERED
from hf_gradguard import chain, make_defense
from hf_gradguard.attacks.span.span import Span
from hf_gradguard.audit.client import modality_of
from hf_gradguard.audit.report.verdicts import MAIN_SCORES
from hf_gradguard.audit.run import make_defenses
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.cli import main
from hf_gradguard.defenses import Defense
from hf_gradguard.defenses.dp import DPSGD, PrivacyPlan
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.flags import FlagParser, fill
from hf_gradguard.recommend import Choice, recommend
from hf_gradguard.recommend import evidence as evidence_module
from hf_gradguard.recommend.head_trials import why_no_head
from hf_gradguard.recommend.rendering import flags_of
from hf_gradguard.recommend.trial_settings import DEFAULT_ATTACKS, DEFAULT_DEFENSES, TrialSettings
from hf_gradguard.recommend.trials import Split, Trials, accuracy_by_sample, train
from hf_gradguard.testing.small import WORDS, small_text_task
from hf_gradguard.train import HeadSettings, TrainArguments, TrainSettings

TEXTS = [(" ".join(WORDS[i : i + 4]), i % 2) for i in range(40)]
FEW = {"steps": 1, "batch_size": 8, "attacked": 4, "decoys": 5, "seeds": 1, "budget": 0.99,
       "heads": False}  # fmt: skip
DEFENSES = ["gaussian_noise:relative_scale=20", "pruning:ratio=0.9"]
PRIVATE = "dp_sgd:per_sample=true,target_epsilon=8,delta=0.001"


@dataclass
class OwnNoise(GaussianNoise):
    name: ClassVar[str] = "own_noise"


@pytest.fixture(scope="module", autouse=True)
def few_messages_count() -> Iterator[None]:
    """Their interval is taken as it is: with as many as show something it would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_module, "highest_leak", lambda outcome, score: outcome.leak.high)
        yield


def run(folder: Path, defenses: Any = DEFENSES, **settings: Any) -> Choice:
    set_seed(0)
    model, _, tokenizer = small_text_task()
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter *= 1.5
    return recommend(model, tokenizer, TEXTS, defenses, "span", output=folder, **FEW | settings)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Choice]:
    folder = tmp_path_factory.mktemp("recommend")
    return folder, run(folder)


@pytest.mark.long
def test_every_defense_has_an_outcome(found: tuple[Path, Choice]) -> None:
    plain, noise, pruned = found[1].outcomes
    assert [plain.defense, noise.defense, pruned.defense] == ["none", *DEFENSES]
    assert plain.lost.mean == 0
    assert plain.leak.mean == 1  # span reads single texts
    assert noise.leak.mean < 0.5
    for one in found[1].outcomes:
        assert one.accuracy.low <= one.accuracy.mean <= one.accuracy.high
        assert one.lost.mean == pytest.approx(plain.accuracy.mean - one.accuracy.mean)


def test_membership_inference_is_reported_and_decides_nothing(found: tuple[Path, Choice]) -> None:
    plain, noise, pruned = found[1].outcomes
    assert plain.candidates == noise.candidates == pruned.candidates == 9
    assert plain.membership.mean == pruned.membership.mean == 1 >= noise.membership.mean
    assert plain.attack == "span"
    assert "among 9 candidates" in found[1].words
    assert "| members recognized |" in (found[0] / "recommend.md").read_text()


def test_rates_behind_noise_are_higher(found: tuple[Path, Choice]) -> None:
    plain, noise, _ = found[1].outcomes
    rates = [2e-4 * 2.0**power for power in range(-4, 5)]
    assert plain.learning_rate in rates
    assert noise.learning_rate in rates


def test_the_file_names_what_is_recommended(found: tuple[Path, Choice], tmp_path: Path) -> None:
    folder, choice = found
    assert choice.chosen is choice.outcomes[1]
    file = folder / "train.yaml"
    text = file.read_text()
    assert text.startswith("# Train the whole model with gaussian_noise:relative_scale=20, without")
    assert "\n# Unprotected: a server recovers 100 %" in text
    kinds = TrainSettings, HeadSettings, TrainArguments
    needed = ["--model", "m", "--dataset", "d", "--output", str(tmp_path), "--use_cpu"]
    parser = FlagParser("gradguard train", "", "", *kinds)
    values = parser.values(["--config", str(file), *needed])
    args = fill(TrainArguments, {**values, "output_dir": str(tmp_path)})
    assert args.learning_rate == pytest.approx(choice.chosen.learning_rate, rel=1e-2)
    assert args.per_device_train_batch_size == 8
    assert args.get_warmup_steps(200) == 20  # as many of its steps as where the rate was found
    assert (args.max_steps, args.seed) == (FEW["steps"], 0)
    made = make_defense(args.defense, **args.defense_kwargs)
    assert made == make_defense("gaussian_noise", relative_scale=20.0)


def write_encoder_and_rows(folder: Path, count: int = 100) -> None:
    """Texts of which one word says the class, and an encoder that reads it."""
    torch.manual_seed(0)
    tokenizer = small_text_task()[2]
    assert tokenizer is not None
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.3, **sizes)
    BertModel(config).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    kinds = [("good", WORDS[1]), ("bad", WORDS[2])]
    rows = [f"{WORDS[3 + i % 9]} {word} {WORDS[3 + i % 7]};{kind}"
            for i in range(count) for kind, word in kinds]  # fmt: skip
    (folder / "rows.csv").write_text("\n".join(["words;kind", *rows]))
    texts = [" ".join(WORDS[1 + (i * k) % 11] for k in (1, 2, 3)) for i in range(60)]
    (folder / "public.csv").write_text("\n".join(["text", *texts]))


@pytest.mark.long
def test_a_head_by_proof_is_recommended_and_trained_by_the_command_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two encoders the model's own comes first; the file trains the head as it was tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_encoder_and_rows(tmp_path, count=400)
    shutil.copytree("encoder", "second")
    flags = [
        "--model", "encoder", "--dataset", "rows.csv", "--output", "found", "--public",
        "public.csv", "--encoder", "second", "--column", "words", "--label_column", "kind",
        "--attack", "span", "--attacked", "8", "--defense", "pruning:ratio=0.9", "--decoys", "0",
        "--steps", "55", "--seeds", "2", "--batch_size", "8", "--budget", "0.5",
    ]  # fmt: skip
    main(["recommend", *flags])
    stored = json.loads(Path("found/recommend.json").read_text())
    names = [outcome["defense"] for outcome in stored["outcomes"]]
    assert names[:3] == ["none", "head on encoder", "head on second"]
    chosen = stored["chosen"]
    assert chosen["defense"] == "head on encoder"
    assert stored["words"].startswith("Train only a linear head on encoder, by proof (ε = 2.8 at")
    assert stored["limits"] == ""
    assert [len(outcome["trainings"]) for outcome in stored["outcomes"][:3]] == [2, 3, 3]
    train = yaml.safe_load(Path("found/train.yaml").read_text())
    assert (train["head"], train["encoder"], train["public"]) == (True, "encoder", "public.csv")
    assert "model" not in train
    command = "gradguard train --config found/train.yaml"
    assert all(command in Path(f"found/recommend.{kind}").read_text() for kind in ("md", "html"))
    main([*command.split()[1:], "--use_cpu"])
    trained = json.loads(Path("found/model/metrics.json").read_text())
    assert (trained["steps"], trained["eval_sentences"]) == (55, 80)
    assert chosen["accuracy"]["low"] > 0.6  # a guess has half
    assert chosen["accuracy"]["low"] - 0.15 <= trained["accuracy"]
    assert trained["epsilon"] == pytest.approx(chosen["proof"]["epsilon"], rel=1e-3)
    assert trained["noise_multiplier"] == chosen["proof"]["noise_multiplier"]
    assert trained["directions"] == train["directions"]
    again = json.loads(Path("found/recommend.json").read_text())["outcomes"][1]["trainings"]
    main(["recommend", *flags])
    assert json.loads(Path("found/recommend.json").read_text())["chosen"]["trainings"] == again


@pytest.mark.long
def test_what_is_recommended_is_trained_by_the_command_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The accuracy that was promised, on other held-out texts of the same kind."""
    monkeypatch.chdir(tmp_path)
    write_encoder_and_rows(tmp_path)
    main([
        "recommend", "--model", "encoder", "--dataset", "rows.csv", "--output", "found",
        "--column", "words", "--label_column", "kind", "--attack", "span", "--attacked", "8",
        "--defense", "gaussian_noise:relative_scale=2", "--decoys", "0", "--steps", "40",
        "--learning_rate", "5e-3", "--seeds", "2", "--no_heads",
    ])  # fmt: skip
    notices = "Behind ", "Withheld", "There is one process"  # a Trainer's, for who trains
    assert not [line for line in caplog.messages if line.startswith(notices)]
    stages = [line for line in caplog.messages if "minutes left] " in line]
    assert stages[0].endswith("the model before training")
    assert any("to judge: none, gaussian_noise:relative_scale=2" in line for line in stages)
    chosen = json.loads(Path("found/recommend.json").read_text())["chosen"]
    command = "gradguard train --config found/train.yaml"
    assert all(command in Path(f"found/recommend.{kind}").read_text() for kind in ("md", "html"))
    main([*command.split()[1:], "--use_cpu", "--report_to", "none"])
    trained = json.loads(Path("found/model/metrics.json").read_text())
    assert (trained["steps"], trained["eval_sentences"]) == (40, 20)
    assert trained["settings"]["relative_scale"] == 2
    assert chosen["accuracy"]["low"] > 0.8  # a guess has half
    assert chosen["accuracy"]["low"] - 0.1 <= trained["accuracy"]


def text_in(path: Path) -> str:
    """Without what keeps words on one line."""
    return html.unescape(re.sub(r'<span class="whole">|</span>', "", path.read_text()))


def test_pages_say_the_same(found: tuple[Path, Choice]) -> None:
    folder, choice = found
    stored = json.loads((folder / "recommend.json").read_text())
    assert stored["chosen"]["defense"] == DEFENSES[0]
    assert len(stored["outcomes"]) == 3
    for name in ("recommend.md", "recommend.html"):
        text = text_in(folder / name)
        assert all(paragraph in text for paragraph in choice.words.split("\n\n"))
        assert all(defense in text.replace("<wbr>", "") for defense in DEFENSES)
    assert (folder / "recommend.html").read_text().count("<circle") == 3
    private = [folder / "cells", folder / "audits" / "undefended"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in private)


@pytest.mark.long
def test_it_goes_on_where_it_stopped(found: tuple[Path, Choice]) -> None:
    folder, choice = found
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("cells/*")}
    # Each defense's best rate; of finalists and the undefended also the seed that is attacked
    assert 4 <= sum(path.suffix == ".safetensors" for path in kept) <= 6
    again = run(folder)
    assert again == choice
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("cells/*")} == kept


@pytest.mark.long
def test_a_target_is_met_in_the_trainings_and_in_the_attacks(tmp_path: Path) -> None:
    choice = run(tmp_path, PRIVATE)
    assert choice.chosen is choice.outcomes[1]
    epsilon, delta = choice.chosen.guarantee
    assert 7.9 < epsilon <= 8
    assert delta == 0.001
    assert choice.outcomes[0].guarantee is None
    assert "by proof (ε = 8 at δ = 0.001)" in choice.words
    assert choice.chosen.leak.mean < 0.5
    assert choice.chosen.defense == PRIVATE
    stored = yaml.safe_load((tmp_path / "train.yaml").read_text())
    asked = make_defense("dp_sgd", per_sample=True, target_epsilon=8, delta=0.001)
    assert make_defense("dp_sgd", **stored["defense_kwargs"]) == asked
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cells/*")}
    assert run(tmp_path, PRIVATE) == choice
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cells/*")} == kept


def test_trials_are_not_told_that_they_are_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The model that is to be trained will not be: a trial is one client of many."""
    model, _, tokenizer = small_text_task()
    logging.warning_once.cache_clear()
    terms, modality = TrialSettings(steps=1), modality_of(model, tokenizer, AuditSettings())
    train(model, make_defense("gaussian_noise"), TEXTS, modality, terms, rate=1e-4, seed=0)
    assert "Behind gaussian_noise" in caplog.text  # what a training says else
    assert "nothing leaves it" not in caplog.text


@pytest.mark.long
def test_attacks_meet_the_noise_that_a_trainer_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, tokenizer = small_text_task()
    modality = modality_of(model, tokenizer, AuditSettings())
    terms, split = TrialSettings(steps=3, batch_size=8), Split.draw(TEXTS, 16, batch_size=8)
    trials = Trials(model, tokenizer, modality, split, terms, tmp_path)
    asked, found = make_defenses(PRIVATE)[PRIVATE], []
    planned = DPSGD.planned

    def watched(defense: DPSGD, plan: PrivacyPlan) -> DPSGD:
        found.append(plan.noise_multiplier)
        return planned(defense, plan)

    monkeypatch.setattr(DPSGD, "planned", watched)
    trials.judging(PRIVATE, asked, 1e-4)
    calibrated: Any = trials.calibrated(asked)
    assert found == [calibrated.noise_multiplier]
    assert calibrated.target_epsilon is None
    assert trials.calibrated(make_defense("pruning")) == make_defense("pruning")


@pytest.mark.long
def test_a_defense_without_scores_is_left_out_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Span.reconstruct

    def dense_alone(attack: Span, seen: Any, generator: torch.Generator) -> Any:
        if torch.cat([g.flatten() for g in seen.gradient.values()]).eq(0).float().mean() > 0.8:
            raise ValueError("Too much is zero.")
        return read(attack, seen, generator)

    monkeypatch.setattr(Span, "reconstruct", dense_alone)
    choice = run(tmp_path, decoys=0)
    assert [one.defense for one in choice.outcomes] == ["none", DEFENSES[0]]
    (said,) = {text for text in caplog.messages if "is left out: no" in text}
    pruning = f"{DEFENSES[1]} is left out: no attack could be applied to two messages. "
    assert said == f"{pruning}Too much is zero."


@pytest.mark.long
def test_what_no_flags_name_is_recommended_in_words(tmp_path: Path) -> None:
    chained = "pruning:ratio=0.9+gaussian_noise:relative_scale=20"
    choice = run(tmp_path, [chained, {"mine": OwnNoise(relative_scale=20.0)}])
    assert [one.defense for one in choice.outcomes] == ["none", chained, "mine"]
    assert choice.chosen is not None
    assert not (tmp_path / "train.yaml").exists()
    for name in ("recommend.md", "recommend.html"):
        text = text_in(tmp_path / name)
        assert all(paragraph in text for paragraph in choice.words.split("\n\n"))
        assert "There is no train.yaml, since no flags name a chain or an object" in text


def test_why_no_head_is_tried() -> None:
    settings = TrialSettings()
    model, _, _ = small_text_task()
    assert why_no_head(model, None, settings) == ""
    assert "--no_heads" in why_no_head(model, None, TrialSettings(heads=False))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    assert "preferably thousands (--public FOLDER). The same command then" in why_no_head(
        vit, None, settings
    )
    assert why_no_head(vit, "public", settings) == ""
    language = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16))
    assert "this model is for text-generation" in why_no_head(language, None, settings)


def test_flags_name_what_they_can() -> None:
    for name in REGISTERED:
        made = make_defense(name)
        flags = yaml.safe_load(yaml.safe_dump(flags_of(made)))
        assert make_defense(flags["defense"], **flags["defense_kwargs"]) == made
    odd: list[Defense] = [
        chain(make_defense("pruning"), make_defense("gaussian_noise")),
        OwnNoise(),
        GaussianNoise(relative_scale=np.float64(5)),  # no YAML
    ]
    assert [flags_of(one) for one in odd] == [None, None, None]


@pytest.mark.long
def test_nothing_is_recommended_where_training_taught_nothing(found: tuple[Path, Choice]) -> None:
    """The same trainings and attacks, with a budget that is no longer all there is to lose."""
    folder, _ = found
    again = run(folder, budget=0.0)
    assert again.chosen is None
    assert "taught nothing" in again.words
    assert not (folder / "train.yaml").exists()
    said = "There is no train.yaml, since nothing is recommended: change one of the settings"
    assert said in (folder / "recommend.md").read_text()
    run(folder)


@pytest.mark.long
def test_a_language_model_with_adapters(tmp_path: Path) -> None:
    """Its accuracy is the share of next tokens."""
    set_seed(0)
    tokenizer = small_text_task()[2]
    assert tokenizer is not None
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), pad_token_id=0, **sizes))
    config = LoraConfig(task_type="CAUSAL_LM", r=24, fan_in_fan_out=True, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    texts = [(text, None) for text, _ in TEXTS]
    few = FEW | {"decoys": 0}
    choice = recommend(adapted, tokenizer, texts, DEFENSES[:1], "span", output=tmp_path, **few)
    plain, noise = choice.outcomes
    assert plain.leak.mean > 0.5 > noise.leak.mean
    assert plain.membership is None
    assert "fraction of tokens that are predicted correctly" in choice.words
    assert 0 <= plain.accuracy.mean < 0.5
    regression = BertForSequenceClassification(BertConfig(num_labels=1, num_hidden_layers=1))
    with pytest.raises(ValueError, match="recommend compares accuracies"):
        recommend(regression, tokenizer, texts, "pruning", "span", output=tmp_path, **FEW)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_images_by_what_is_usual_for_them(tmp_path: Path) -> None:
    """Attacks are those of images; `analytic` comes where it can read the model."""
    set_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = ViTConfig(image_size=8, patch_size=4, hidden_size=48, num_labels=2, **sizes)
    config.problem_type = "single_label_classification"
    model, processor = ViTForImageClassification(config).eval(), ViTImageProcessor(size=8)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    samples = [(Image.fromarray(image), at % 2) for at, image in enumerate(pixels)]
    few = FEW | {"attacked": 4, "decoys": 0, "heads": True}
    choice = recommend(model, processor, samples, DEFENSES[:1], output=tmp_path, **few)
    assert choice.words.split("\n\n")[1].startswith("No linear head by proof was tried: for images")
    assert "No linear head" not in choice.limits
    plain, noise = choice.outcomes
    assert plain.attack == "analytic"
    assert plain.leak.mean > 25 > noise.leak.mean  # dB
    audits = (tmp_path / "audits").rglob("audit.json")
    attacks = {name for path in audits for name in json.loads(path.read_text())["attacks"]}
    assert {DEFAULT_ATTACKS["image"], "analytic"} <= attacks
    assert DEFAULT_DEFENSES.keys() == DEFAULT_ATTACKS.keys() == MAIN_SCORES.keys()
    assert [len(make_defenses(specs)) for specs in DEFAULT_DEFENSES.values()] == [6, 6]


def test_what_counts_as_right() -> None:
    """Worked by hand: the first place predicts the second label, and -100 does not count."""
    predicted = torch.tensor([[7, 8, 9], [1, 2, 3]])
    labels = torch.tensor([[5, 7, 1], [4, 1, -100]])
    assert accuracy_by_sample(predicted, labels, shifted=True) == [0.5, 1.0]
    assert accuracy_by_sample(predicted, predicted.clone(), shifted=False) == [1.0, 1.0]
    assert accuracy_by_sample(torch.tensor([1, 0]), torch.tensor([1, 1]), shifted=False) == [
        1.0,
        0.0,
    ]


def test_splits_do_not_overlap() -> None:
    samples = [(str(i), 0) for i in range(200)]
    split = Split.draw(samples, 8, batch_size=16)
    parts = [split.attacked, split.choosing, split.judging, split.training]
    assert [len(part) for part in parts] == [8, 38, 38, 116]
    assert sorted(one for part in parts for one in part) == sorted(samples)


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    model, _, tokenizer = small_text_task()
    with pytest.raises(ValueError, match="20 samples are too few: 16 are attacked"):
        recommend(model, tokenizer, TEXTS[:20], output=tmp_path)
    with pytest.raises(ValueError, match="do not fill two halves of messages of 3"):
        recommend(model, tokenizer, TEXTS, output=tmp_path, message_size=3)
    with pytest.raises(ValueError, match="one message in a half, which has no interval: attack 12"):
        recommend(model, tokenizer, TEXTS, output=tmp_path, message_size=3, attacked=6)
    with pytest.raises(TypeError, match="no_such"):
        recommend(model, tokenizer, TEXTS, output=tmp_path, no_such=3)
    with pytest.raises(ValueError, match="nothing to choose from"):
        recommend(model, tokenizer, TEXTS, "none", output=tmp_path, heads=False)


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["recommend", "--model", "nowhere"])
    assert stopped.value.code == 1
    assert "gradguard recommend: --output, --dataset must be given." in capsys.readouterr().err


def test_the_command_refuses_before_weights_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each: too few rows, an output that is a file, an empty text."""
    model, _, tokenizer = small_text_task()
    model.base_model.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    table, full = tmp_path / "rows.csv", tmp_path / "full"
    table.write_text("text,label\n" + "a film,good\nno film,bad\n" * 40 + ",good\n")
    full.write_text("")
    capsys.readouterr()  # of saving
    usual = ["recommend", "--model", str(tmp_path / "encoder"), "--dataset", str(table)]
    for flags, line in (
        (["--output", str(tmp_path / "out"), "--rows", "0"], "rows must be more than the 16"),
        (["--output", str(full)], "full"),
        (["--output", str(tmp_path / "out")], "rows.csv, row 81: column 'text' is empty."),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*usual, *flags])
        assert stopped.value.code == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("gradguard recommend: ")
        assert line in said
