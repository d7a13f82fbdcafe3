"""Audits: equal terms for every defense, nothing granted by accident, resumable, and a report that
says no more than it knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import make_task, torch_rng, unit_noise_of, word_tokenizer
from PIL import Image
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

from hf_gradguard import DEFENSES, GradientMap
from hf_gradguard.attacks import ATTACKS, Attack, Observation, Reconstruction
from hf_gradguard.attacks.matching.matching_attacks import Tag
from hf_gradguard.audit import Audit, audit, markdown_table, summarize, write_report
from hf_gradguard.audit.cells import digest
from hf_gradguard.audit.report.page import html_report, marks
from hf_gradguard.audit.run import parse_specs
from hf_gradguard.cli import main
from hf_gradguard.defenses import Defense
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

pytestmark = pytest.mark.usefixtures("few_probes")

WORDS = [f"w{i}" for i in range(20)]
TEXTS = [("w1 w2 w3", 1), ("w2 w3 w4 w5", 0), ("w7 w8", 2), ("w1 w9 w10 w11", 1)]


def text_model(**settings: Any) -> tuple[nn.Module, Any]:
    return make_task("bert", dtype=torch.float32, num_hidden_layers=1, **settings)[
        0
    ], word_tokenizer(WORDS)


def image_model() -> tuple[nn.Module, Any]:
    model, _ = make_task("vit", dtype=torch.float32)
    return model, ViTImageProcessorPil(size={"height": 8, "width": 8})


def images(count: int = 2, size: int = 8) -> list[tuple[np.ndarray, int]]:
    draw = np.random.default_rng(0)
    return [
        (draw.integers(0, 256, (size, size, 3), dtype=np.uint8), label % 3)
        for label in range(count)
    ]


@dataclass
class Spy(Attack):
    """Keeps what it was given, and returns what it is told to."""

    name: ClassVar[str] = "spy"
    seen: ClassVar[list[tuple[Observation, torch.Tensor]]] = []
    answer: ClassVar[Callable[[Observation], Reconstruction]]

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        self.seen.append((seen, generator.get_state()))
        return type(self).answer(seen)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> type[Spy]:
    monkeypatch.setitem(ATTACKS, "spy", Spy)
    Spy.seen.clear()
    Spy.answer = staticmethod(lambda seen: Reconstruction(token_ids=[[5]] * seen.batch_size))
    return Spy


def without_times(result: Audit) -> dict[str, Any]:
    record = asdict(result)
    for row in record["shared"] + record["cells"]:
        row.pop("seconds", None)
    return record


# --- names with settings


def test_specs_in_all_ways() -> None:
    assert parse_specs("tag:steps=500,restarts=2,span,lamp:every=3") == {
        "tag:steps=500,restarts=2": [("tag", {"steps": 500, "restarts": 2})],
        "span": [("span", {})],
        "lamp:every=3": [("lamp", {"every": 3})],
    }
    assert parse_specs("tag:leave_out=[a, b],signed=true,learning_rate=1e-3")[
        "tag:leave_out=['a', 'b'],signed=true,learning_rate=0.001"
    ] == [("tag", {"leave_out": ["a", "b"], "signed": True, "learning_rate": 1e-3})]
    assert parse_specs("pruning:ratio=0.9+gaussian_noise:scale=1e+3") == {
        "pruning:ratio=0.9+gaussian_noise:scale=1000": [
            ("pruning", {"ratio": 0.9}),
            ("gaussian_noise", {"scale": 1e3}),
        ]
    }
    strengths = {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}], "none": None}
    # A file's 1e-2 is a word to YAML 1.1.
    assert parse_specs({"dlg": [{"learning_rate": "1e-2"}]}) == {
        "dlg:learning_rate=0.01": [("dlg", {"learning_rate": 0.01})]
    }
    assert list(parse_specs([strengths, "pruning:ratio=0.90"])) == [
        "pruning:ratio=0.5",
        "pruning:ratio=0.9",
        "none",
    ]


@pytest.mark.parametrize("text", ["tag:", "tag:steps", "tag:steps=", ":steps=1", "", "tag,,span"])
def test_unreadable_specs(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        parse_specs(text)


def test_wrong_names_and_settings(tmp_path: Path) -> None:
    model, tokenizer = text_model()
    for defenses, attacks, error, message in [
        ("prunning", "tag", ValueError, "Did you mean 'pruning'"),
        ("none", "tagg", ValueError, "Did you mean 'tag'"),
        ("none", "tag:step=3", TypeError, "tag has no setting step"),
        ("pruning:ratio=2", "tag", ValueError, "ratio must be"),
        ("none", "tag+lamp", ValueError, "cannot be chained"),
        ("none", [], ValueError, "one defense and one attack"),
    ]:
        with pytest.raises(error, match=message):
            audit(model, tokenizer, TEXTS, defenses, attacks, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (TEXTS[:3], {"batch_size": 2}, "3 samples do not fill messages of 2"),
        ([], {}, r"samples is an empty list\. Give the samples to audit"),
        (None, {}, r"samples is no list\. Give the samples to audit"),
        (8, {}, r"samples is no list\. Give the samples to audit"),
        (["w1", "w2"], {}, r"Sample 1 is no pair\. Give the samples to audit"),
        ([("w1", 1), ("w2",)], {}, r"Sample 2 is no pair"),
        ([("w1", 3)], {}, "class ids from 0 to 2, and one is not, so they may count from 1"),
        ([("w1", -1)], {}, "from 0 to 2.* -1, which stands for no label"),
        ([("w1", "one")], {}, "classes are: "),
        ([("w1", 0.5)], {}, r"must be a class id.*but one is float\. int\(label\)"),
        ([("w1", None)], {}, "must be a class id.*NoneType"),
        ([("w1", [0, 1, 0])], {}, "must be a class id.*multi_label_classification"),
        (TEXTS, {"attacks": [], "candidates": []}, "at least one defense and one attack"),
        (TEXTS, {"attacks": []}, "leave attacks out for those that are quick"),
        ([("nothing here", 1)], {}, "holds no tokens but special ones"),
        (TEXTS, {"repeats": 0}, "at least 1"),
    ],
)
def test_wrong_samples_and_settings(
    samples: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {"defenses": "none", "attacks": "tag", **settings}
    with pytest.raises(ValueError, match=message) as refusal:
        audit(*text_model(), samples, output=tmp_path, **settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_an_empty_list_of_candidates_asks_for_no_membership_inference(
    kind: Any, tmp_path: Path
) -> None:
    named = *text_model(), TEXTS[:2], "none", "tag:steps=1"
    result = audit(*named, candidates=kind([]), output=tmp_path)
    assert {cell["attack"] for cell in result.cells} == {"tag:steps=1"}


# --- resuming


@pytest.mark.long
def test_an_interrupted_audit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = text_model()
    settings: dict[str, Any] = {
        "defenses": ["gaussian_noise:relative_scale=1"],
        "attacks": "tag:steps=2,lamp:steps=2,moves=2,every=1",
    }
    whole = audit(model, tokenizer, TEXTS[:2], output=tmp_path / "whole", **settings)
    plain, calls = Tag.reconstruct, []

    def counted(self: Tag, *arguments: Any) -> Reconstruction:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    monkeypatch.setattr(Tag, "reconstruct", counted)
    with pytest.raises(KeyboardInterrupt):
        audit(model, tokenizer, TEXTS[:2], output=tmp_path / "parts", **settings)
    partial = json.loads((tmp_path / "parts" / "audit.json").read_text())
    assert len(partial["cells"]) == 2 * 2  # one message of two
    resumed = audit(model, tokenizer, TEXTS[:2], output=tmp_path / "parts", **settings)
    assert len(calls) == 3 + 2  # of four cells of tag two were there
    assert without_times(resumed) == without_times(whole)
    stored = json.loads((tmp_path / "parts" / "audit.json").read_text())
    assert stored == asdict(resumed)
    # Once more: nothing is left to do, times included. A torn file of a crash is in nobody's way.
    (tmp_path / "parts" / "cells" / ".x.json.1.part").write_text("{")
    assert (
        asdict(audit(model, tokenizer, TEXTS[:2], output=tmp_path / "parts", **settings)) == stored
    )
    assert len(calls) == 5


@pytest.mark.long
def test_a_changed_setting_starts_new_cells(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()

    def attacks_run(
        samples: Any = TEXTS[:1], defenses: Any = "none", attacks: Any = "spy", **settings: Any
    ) -> int:
        before = len(spy.seen)
        audit(model, tokenizer, samples, defenses, attacks, output=tmp_path, **settings)
        return len(spy.seen) - before

    assert attacks_run() == 1
    assert attacks_run() == 0
    for change in (
        {"seed": 1},
        {"labels_known": False},
        {"lengths_known": False},
        {"share_input_embeddings": True},
        {"samples": [("w1 w2 w3", 2)]},
        {"samples": [("w1 w2 w4", 1)]},
        {"defenses": "gaussian_noise:scale=1"},
        {"defenses": "gaussian_noise:scale=2"},
        {"repeats": 2},
    ):
        assert attacks_run(**change) == 1, change
        assert attacks_run(**change) == 0, change
    assert attacks_run(samples=TEXTS) == len(TEXTS) - 1  # more of the same: the first is there
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert attacks_run() == 1
    model.train()
    assert attacks_run() == 1


def test_digest_tells_apart() -> None:
    model, _ = text_model()
    values = [
        torch.zeros(2),
        torch.zeros(3),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(1, 2),
        np.zeros(2),
        [0, 0],
        (0, 0),
        {"a": 1},
        {"a": "1"},
        {"b": 1},
        ["ab", "c"],
        ["a", "bc"],
        None,
        0,
        False,
        model,
        [[1], 2],
        [[1, 2]],
        ATTACKS["tag"](),
        ATTACKS["tag"](steps=3),
        DEFENSES["pruning"](),
        DEFENSES["optimal_pruning"](),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(ATTACKS["tag"]()) == digest(ATTACKS["tag"]())


def test_an_output_that_cannot_be_written_to(tmp_path: Path, spy: type[Spy]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Cannot write to .*nothing was attacked"):
        audit(*text_model(), TEXTS, "none", "spy", output=tmp_path / "file" / "out")
    assert not spy.seen


# --- equal terms, and what the attacker sees


@pytest.mark.long
def test_every_defense_and_attack_has_the_same_seeds(tmp_path: Path, spy: type[Spy]) -> None:
    audit(
        *text_model(),
        TEXTS[:2],
        ["gaussian_noise:scale=1", "gaussian_noise:scale=2"],
        "spy",
        output=tmp_path,
        repeats=2,
    )
    states = torch.stack([state for _, state in spy.seen]).view(
        4, 3, -1
    )  # messages and repeats, defenses
    assert (states == states[:, :1]).all()
    assert len({state.numpy().tobytes() for state in states[:, 0]}) == 4
    name = "classifier.weight"
    for message in range(4):
        plain, once, twice = (
            seen.gradient[name] for seen, _ in spy.seen[3 * message : 3 * message + 3]
        )
        torch.testing.assert_close(
            2 * (once - plain), twice - plain
        )  # the same draws at twice the scale


def test_only_what_is_granted_is_seen(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    audit(
        model,
        tokenizer,
        TEXTS[:2],
        "gaussian_noise:scale=2",
        "spy",
        output=tmp_path / "a",
        batch_size=2,
    )
    seen, _ = spy.seen[-1]
    assert seen.labels.tolist() == [1, 0]
    assert seen.attention_mask.sum(1).tolist() == [5, 6]
    assert seen.noise_variance is None
    assert seen.image_mean is None
    assert "bert.embeddings.word_embeddings.weight" not in seen.gradient

    grants: dict[str, Any] = {"labels_known": False, "lengths_known": False, "max_length": 8}
    for text in ("w1", "w1 w2 w3 w4 w5 w6 w7 w8 w9"):
        audit(model, tokenizer, [(text, 1)], "none", "spy", output=tmp_path / "b", **grants)
        seen, _ = spy.seen[-1]
        assert seen.labels is None
        assert seen.attention_mask is None
        assert seen.input_shape == (1, 8)  # whatever the text's length

    audit(
        model,
        tokenizer,
        TEXTS[:1],
        "gaussian_noise:scale=2",
        "spy",
        output=tmp_path / "c",
        noise_known=True,
        share_input_embeddings=True,
    )
    (plain, _), (seen, _) = spy.seen[-2:]
    assert plain.noise_variance is None
    assert all((variance - 4).abs().max() < 1e-5 for variance in seen.noise_variance.values())
    assert "bert.embeddings.word_embeddings.weight" in seen.gradient


def test_the_granted_covariance_is_the_noises_own(tmp_path: Path, spy: type[Spy]) -> None:
    """With draws of 1 in place of noise, what is added is the standard deviation."""
    spec = "optimal_noise:relative_scale=0.5"
    with unit_noise_of(1.0):
        audit(*text_model(), TEXTS[:1], spec, "spy", output=tmp_path, noise_known=True)
    (plain, _), (seen, _) = spy.seen
    for name, variance in seen.noise_variance.items():
        torch.testing.assert_close(
            seen.gradient[name] - plain.gradient[name], variance.sqrt(), atol=1e-5, rtol=1e-3
        )


@pytest.mark.parametrize(
    ("spec", "granted"),
    [
        ("gaussian_noise:scale=3+gaussian_noise:scale=4", 25.0),
        ("gaussian_noise:scale=3+quantization", None),
        ("gaussian_noise:scale=3+optimal_noise:scale=4,shape=own", None),
    ],
)
def test_of_a_chain_the_covariance_of_the_sum_is_granted_or_none(
    tmp_path: Path, spy: type[Spy], spec: str, granted: float | None
) -> None:
    audit(*text_model(), TEXTS[:1], spec, "spy", output=tmp_path, noise_known=True, reference=False)
    ((seen, _),) = spy.seen
    if granted is None:
        assert seen.noise_variance is None
    else:
        assert all((v - granted).abs().max() < 1e-4 for v in seen.noise_variance.values())


@pytest.mark.long
def test_every_message_is_a_defenses_first(tmp_path: Path, spy: type[Spy]) -> None:
    """Else a resumed audit would differ, for sensitivities are kept between calls."""
    model, tokenizer = text_model()
    audit(
        model,
        tokenizer,
        TEXTS[:2],
        "optimal_noise:refresh_every=5,scale=0.1",
        "spy",
        output=tmp_path,
        reference=False,
    )
    second = spy.seen[1][0].gradient
    spy.seen.clear()
    key = [p for p in (tmp_path / "cells").iterdir() if "scores" in json.loads(p.read_text())]
    for path in key:
        path.unlink()
    (first_only, second_again) = (
        audit(
            model,
            tokenizer,
            TEXTS[:n],
            "optimal_noise:refresh_every=5,scale=0.1",
            "spy",
            output=tmp_path,
            reference=False,
        )
        for n in (1, 2)
    )
    assert len(spy.seen) == 2
    assert len(first_only.cells) == 1
    assert len(second_again.cells) == 2
    torch.testing.assert_close(spy.seen[1][0].gradient, second)


def test_what_was_shared_is_measured(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    result = audit(model, tokenizer, TEXTS[:1], ["pruning:ratio=0.5"], "spy", output=tmp_path)
    plain, pruned = (
        torch.cat([t.flatten() for t in seen.gradient.values()]) for seen, _ in spy.seen
    )
    assert result.shared[0]["relative_error"] == 0
    assert result.shared[0]["cosine"] == pytest.approx(1)
    assert result.shared[1]["relative_error"] == pytest.approx(
        float((pruned - plain).norm() / plain.norm()), rel=1e-4
    )
    assert result.shared[1]["cosine"] == pytest.approx(
        float(torch.cosine_similarity(pruned, plain, dim=0)), rel=1e-4
    )
    assert all(
        set(row["estimates"]) == {"i2f_lower_bound"} for row in result.shared
    )  # see test_audit_estimators.py


def test_the_model_stays_as_it_was(tmp_path: Path, spy: type[Spy]) -> None:
    """In training mode, too: batch statistics are put back, dropout does not touch the global
    generator.
    """
    torch.manual_seed(0)
    sizes = {
        "embedding_size": 4,
        "hidden_sizes": [4],
        "depths": [1],
        "layer_type": "basic",
        "num_labels": 3,
    }
    model = ResNetForImageClassification(ResNetConfig(**sizes)).train()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    spy.answer = staticmethod(lambda seen: Reconstruction(input=torch.zeros(seen.input_shape)))
    result = audit(
        model, processor, images(2), "optimal_noise", "spy", output=tmp_path, batch_size=2
    )
    assert model.training
    assert result.settings["training_mode"]
    assert all("scores" in cell for cell in result.cells)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_dropout_is_the_same_for_every_defense_and_run(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model(dropout=0.5)
    model.train()
    for folder in ("a", "b"):
        torch.manual_seed(ord(folder))
        audit(
            model, tokenizer, TEXTS[:1], "gaussian_noise:scale=0", "spy", output=tmp_path / folder
        )
    first, *others = (seen.gradient for seen, _ in spy.seen)
    assert len(others) == 3
    for other in others:
        torch.testing.assert_close(dict(other), dict(first))


# --- refusals


@pytest.mark.long
def test_attacks_that_refuse_are_recorded(tmp_path: Path) -> None:
    result = audit(
        *image_model(),
        images(2),
        "none",
        "lamp:steps=1,inverting_gradients:steps=1",
        output=tmp_path,
    )
    lamp, other = summarize(result).rows
    assert not lamp.scores
    assert "is for text" in lamp.reasons[0]
    assert other.messages == 2
    table = markdown_table(summarize(result))
    assert "not applicable" in table
    assert "- lamp:steps=1: lamp is for text" in table
    assert "lamp is for text" in html_report(summarize(result))


def test_an_attack_that_refuses_one_message_is_scored_on_the_others(
    tmp_path: Path, spy: type[Spy]
) -> None:
    def answer(seen: Observation) -> Reconstruction:
        if seen.input_shape[1] < 5:
            raise ValueError("too short")
        return Reconstruction(token_ids=[[5]])

    spy.answer = staticmethod(answer)
    result = audit(*text_model(), TEXTS, "none", "spy", output=tmp_path)
    (row,) = summarize(result).rows
    assert row.messages == 3
    assert row.reasons == ["too short"]
    assert "(3 of 4)" in markdown_table(summarize(result))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Reconstruction(), "gave no text"),
        # A broken contract is a fault of the attack, and no refusal.
        (Reconstruction(token_ids=[[1], [2]]), "TypeError: spy returned token_ids of 2 samples"),
    ],
)
def test_reconstructions_that_cannot_be_scored(
    found: Reconstruction, reason: str, tmp_path: Path, spy: type[Spy]
) -> None:
    spy.answer = staticmethod(lambda seen: found)
    result = audit(*text_model(), TEXTS[:1], "none", "spy", output=tmp_path)
    cell = result.cells[0]
    assert reason in cell["crash" if reason.startswith("TypeError") else "reason"]
    assert summarize(result).verdicts[0].standing == "unknown"


def test_a_defense_that_refuses_is_recorded(
    tmp_path: Path, spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Shy(Defense):
        name: ClassVar[str] = "shy"

        def protect(self, gmap: GradientMap, generator: Stream) -> Any:
            raise ValueError("not this batch")

    monkeypatch.setitem(DEFENSES, "shy", Shy)
    result = audit(*text_model(), TEXTS[:1], "shy", "spy", output=tmp_path)
    assert [cell.get("reason") for cell in result.cells] == [None, "not this batch"]
    assert len(spy.seen) == 1
    assert "nothing is known" in summarize(result).verdicts[1].text


# --- scores


def test_scores_are_those_of_score_text_in_any_order(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    guesses = ["w2 w3 w9 w5", "w1 w2 w3"]  # of the second text, and of the first
    spy.answer = staticmethod(
        lambda seen: Reconstruction(token_ids=[tokenizer(guess)["input_ids"] for guess in guesses])
    )
    result = audit(model, tokenizer, TEXTS[:2], "none", "spy", output=tmp_path, batch_size=2)
    expected = score_text(guesses, [text for text, _ in TEXTS[:2]], tokenizer=tokenizer)
    (row,) = summarize(result).rows
    assert {name: e.mean for name, e in row.scores.items()} == pytest.approx(expected.mean)
    assert row.scores["token_f1"].low is None  # of one message, whatever its size
    assert result.cells[0]["pieces"][0] == ["", "w1", " w2", " w3", ""]  # in the originals' order


def test_images_are_scored_in_pixels(tmp_path: Path, spy: type[Spy]) -> None:
    """The processor's normalization is undone; an attack that gives the truth has (nearly) no
    error.
    """
    model, processor = image_model()
    samples = images(2)
    truth = processor([Image.fromarray(image) for image, _ in samples], return_tensors="pt")[
        "pixel_values"
    ]
    truth[0, 0, 0, 0] = 7.0  # out of range: clipped as anybody can
    spy.answer = staticmethod(lambda seen: Reconstruction(input=truth.flip(0)))
    result = audit(model, processor, samples, "none", "spy", output=tmp_path, batch_size=2)
    mse, psnr = result.cells[0]["scores"]["mse"], result.cells[0]["scores"]["psnr"]
    assert psnr[1] > 80
    assert mse[0] == pytest.approx((1 - samples[0][0][0, 0, 0] / 255) ** 2 / 192, rel=1e-3)
    assert spy.seen[0][0].image_mean == [0.5, 0.5, 0.5]
    assert all(
        shown == original
        for shown, original in zip(
            result.cells[0]["images"][1:], result.messages[0]["images"][1:], strict=True
        )
    )


def test_an_image_attack_that_diverges_counts_as_gray(tmp_path: Path, spy: type[Spy]) -> None:
    spy.answer = staticmethod(
        lambda seen: Reconstruction(input=torch.full(seen.input_shape, torch.nan))
    )
    result = audit(*image_model(), images(1), "none", "spy", output=tmp_path)
    assert result.cells[0]["scores"] == result.chance[0]


def test_chance_of_texts_is_other_texts(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    result = audit(model, tokenizer, TEXTS[:3], "none", "spy", output=tmp_path / "a")
    # w1 w2 w3 | w2 w3 w4 w5 | w7 w8: two common words of three and four, F1 4/7, and none.
    assert [guess["token_f1"][0] for guess in result.chance] == pytest.approx([2 / 7, 2 / 7, 0])
    assert "texts of other messages" in markdown_table(summarize(result))
    alone = audit(model, tokenizer, TEXTS[:1], "none", "spy", output=tmp_path / "b")
    assert "random words" in markdown_table(summarize(alone))
    assert 0 <= alone.chance[0]["token_f1"][0] < 0.8
    again = audit(model, tokenizer, TEXTS[:1], "none", "spy", output=tmp_path / "c")
    assert alone.chance == again.chance


def test_chance_of_images_is_gray(tmp_path: Path) -> None:
    result = audit(
        *image_model(), images(1), "none", "inverting_gradients:steps=1", output=tmp_path
    )
    expected = np.square(images(1)[0][0] / 255 - 0.5).mean()
    assert result.chance[0]["mse"][0] == pytest.approx(expected, rel=1e-5)


def made(
    scores: dict[str, list[float]],
    chance: float = 0.2,
    attacks: list[str] | None = None,
    repeats: int = 1,
) -> Audit:
    """An audit with one word-score a message: {"defense/attack": [...]}."""
    names = list(dict.fromkeys(key.split("/")[0] for key in scores))
    attacks = attacks or list(dict.fromkeys(key.split("/")[1] for key in scores))
    count = len(next(iter(scores.values())))
    cells = [
        {
            "message": m,
            "repeat": r,
            "defense": key.split("/")[0],
            "attack": key.split("/")[1],
            "scores": {"token_f1": [value]},
            "ids": [[5]],
            "pieces": [["x"]],
            "knows_defense": True,
        }
        for r in range(repeats)
        for key, values in scores.items()
        for m, value in enumerate(values)
    ]
    settings = {
        "kind": "text",
        "main_score": "token_f1",
        "samples": count,
        "batch_size": 1,
        "chance": "other texts",
        "messages": count,
        "repeats": repeats,
        "estimators": {
            name: {"title": name, "meaning": "an error"}
            for name in ("i2f_lower_bound", "dfil_bound")
        },
    }
    messages = [{"ids": [[5]], "pieces": [["x"]], "labels": [0]}] * count
    jitter = [{"token_f1": [chance + 0.01 * (m % 2)]} for m in range(count)]
    shared = [
        {"message": m, "repeat": r, "defense": name}
        for r in range(repeats)
        for name in names
        for m in range(count)
    ]
    return Audit(
        settings, {n: {} for n in names}, {a: {} for a in attacks}, messages, jitter, shared, cells
    )


HIGH, MIDDLE = [0.9, 1.0, 0.95, 0.85, 0.9], [0.5, 0.6, 0.45, 0.55, 0.5]
LOW = [0.1, 0.3, 0.15, 0.25, 0.2]


@pytest.mark.parametrize(
    ("scores", "standings", "words"),
    [
        (
            {"none/tag": HIGH},
            ["open"],
            "tag recovers 92 % of the words [86, 99]; chance is 20 %.",
        ),
        (
            {"none/tag": HIGH, "d/tag": MIDDLE},
            ["open", "reduced"],
            "where undefended tag recovers 92 %; chance is 20 %. Better than chance",
        ),
        (
            {"none/tag": HIGH, "d/tag": HIGH[::-1]},
            ["open", "open"],
            "not distinguishable from no defense",
        ),
        (
            {"none/tag": HIGH, "d/tag": LOW},
            ["open", "chance"],
            "Not distinguishable from chance under these attacks on these 5 texts.",
        ),
        (
            {"none/tag": HIGH, "d/tag": [0.0, 0.01, 0.0, 0.02, 0.0]},
            ["open", "chance"],
            "No better than chance under these attacks",
        ),
        (
            {"none/tag": LOW, "d/tag": LOW},
            ["unknown", "unknown"],
            "These attacks fail undefended as well, so this says nothing.",
        ),
        ({"d/tag": LOW}, ["unknown"], "which was not tried, so this says nothing"),
        ({"d/tag": HIGH}, ["unknown"], "undefended gradient was not attacked"),
        ({"none/tag": [0.9]}, ["unknown"], "no interval, so this is an anecdote"),
        # What leaks on few messages leaks; what fails on few may not.
        (
            {"none/tag": HIGH[:4]},
            ["open"],
            "chance is 20 %. Fewer than 5 messages are weak evidence: give more samples.",
        ),
        (
            {"none/tag": HIGH[:4], "d/tag": MIDDLE[:4]},
            ["open", "reduced"],
            "it still leaks. Fewer than 5 messages are weak evidence: give more samples.",
        ),
        (
            {"none/tag": HIGH[:4], "d/tag": LOW[:4]},
            ["open", "unknown"],
            "Fewer than 5 messages do not say that attacks fail: give more samples.",
        ),
        # What a server reads falls, also where one attack reads what it did before.
        (
            {"none/tag": MIDDLE, "none/span": HIGH, "d/tag": MIDDLE, "d/span": LOW},
            ["open", "reduced"],
            "where undefended span recovers 92 %; chance is 20 %. Better than chance: it still "
            "leaks. It is no better than none against tag.",
        ),
        # The strongest attack counts, whichever it is.
        (
            {"none/tag": HIGH, "none/span": HIGH, "d/tag": LOW, "d/span": MIDDLE},
            ["open", "reduced"],
            " (tag 20 %), where undefended tag recovers 92 %",
        ),
    ],
)
def test_verdicts(scores: dict[str, list[float]], standings: list[str], words: str) -> None:
    found = summarize(made(scores)).verdicts
    assert [verdict.standing for verdict in found] == standings
    assert words in found[-1].text
    assert not any("safe" in verdict.text for verdict in found)


def test_few_words_in_their_places_are_a_leak() -> None:
    """The words of other texts give as many, but not where they belong."""
    result = made({"none/tag": HIGH, "d/tag": LOW})
    for cell in result.cells:
        cell["scores"]["position_accuracy"] = [
            0.9 if cell["defense"] == "none" else 0.1 + 0.01 * cell["message"]
        ]
    for guess in result.chance:
        guess["position_accuracy"] = [0.02]
    verdict = summarize(result).verdicts[1]
    assert verdict.standing == "reduced"
    assert verdict.text.endswith(
        "In position_accuracy tag is better than chance (0.12 against 0.02): it still leaks."
    )


def test_repeats_are_no_new_samples() -> None:
    once, often = (
        summarize(made({"none/tag": LOW})).rows,
        summarize(made({"none/tag": LOW}, repeats=5)).rows,
    )
    assert once == often


# --- the report


def test_marks_by_hand() -> None:
    # [CLS] a b c b [SEP] against [CLS] a c b d [SEP]: a in place, b and c elsewhere, once each.
    original, found = marks([2, 10, 11, 12, 11, 3], [2, 10, 12, 11, 13, 3], [2, 3])
    assert original == ["", "exact", "elsewhere", "elsewhere", "", ""]
    assert found == ["", "exact", "elsewhere", "elsewhere", "", ""]


def test_marks_agree_with_the_scores() -> None:
    draw, tokenizer = torch_rng(), word_tokenizer(WORDS)
    for length in (3, 6, 6, 6, 9, 12):
        original = [2, *torch.randint(1, 10, (6,), generator=draw).tolist(), 3]
        found = torch.randint(-1, 10, (length + 2,), generator=draw).tolist()
        scores = score_text([found], [original], tokenizer=tokenizer, bootstrap=0).mean
        words = sum(token not in tokenizer.all_special_ids for token in original)
        for kinds in marks(original, found, tokenizer.all_special_ids):
            assert kinds.count("exact") / words == pytest.approx(scores["position_accuracy"])
            assert sum(map(bool, kinds)) / words == pytest.approx(scores["token_recall"])


class Page(HTMLParser):
    """Tags, attributes that load something, and whether all that opens also closes."""

    VOID: ClassVar[set[str]] = {"meta", "img", "br", "wbr", "line", "rect"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [
            value or ""
            for name, value in attributes
            if name in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_report_escapes_and_loads_nothing(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    model, tokenizer = text_model()
    tokenizer = word_tokenizer(WORDS[:18])
    tokenizer.add_tokens([evil, '"onload="x'])
    model.config._name_or_path = model.name_or_path = "<img src=x onerror=alert(2)>"
    result = audit(
        model,
        tokenizer,
        [(f"w1 {evil} w2", 1), ('w1 "onload="x', 0)],
        ["gaussian_noise"],
        "tag:steps=2",
        output=tmp_path,
    )
    text = write_report(summarize(result), tmp_path).read_text()
    page = Page(text)
    assert not page.open
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "img" not in page.tags
    assert page.sources == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "url(" not in text
    assert "@import" not in text
    assert (tmp_path / "table.md").read_text() == markdown_table(summarize(result))


@pytest.mark.long
def test_the_report_of_images_is_self_contained(tmp_path: Path) -> None:
    result = audit(
        *image_model(),
        images(2),
        ["gaussian_noise"],
        "inverting_gradients:steps=1",
        output=tmp_path,
    )
    page = Page(html_report(summarize(result)))
    assert not page.open
    assert page.tags.count("img") == 2 * (1 + 2) + 3  # the last for the worst case
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.sources)


def test_the_report_says_the_threat_model(tmp_path: Path, spy: type[Spy]) -> None:
    model, tokenizer = text_model()
    known = html_report(
        summarize(
            audit(model, tokenizer, TEXTS[:1], "none", "spy", output=tmp_path, noise_known=True)
        )
    )
    model.train()
    grants: dict[str, Any] = {
        "labels_known": False,
        "lengths_known": False,
        "share_input_embeddings": True,
        "batch_size": 2,
    }
    result = audit(
        model, tokenizer, TEXTS[:2], "none", "spy", output=tmp_path, max_length=8, **grants
    )
    hidden = html_report(summarize(result))
    for yes, no in [
        ("It knows the labels", "does not know the labels"),
        ("how many tokens each text has", "all are padded to 8 tokens"),
        ("It knows the covariance", "does not know how a defense&#39;s noise was shaped"),
        ("is withheld", "is shared too"),
        ("the gradient of one text", "the gradient of 2 texts"),
        ("in eval mode", "in training mode"),
    ]:
        assert yes in known, yes
        assert no in hidden, no
        assert no not in known, no


# --- the command line


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    model, tokenizer = text_model(
        id2label={0: "bad", 1: "good", 2: "so so"}, label2id={"bad": 0, "good": 1, "so so": 2}
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [f"{text}\t{['bad', 'good', 'so so'][label]}" for text, label in TEXTS]
    (tmp_path / "data.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    return tmp_path


@pytest.mark.long
def test_command_line_for_texts(text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "audit",
        "--model",
        str(text_folder / "model"),
        "--dataset",
        str(text_folder / "data.tsv"),
        "--samples",
        "3",
    ]
    flags = [
        "--attack",
        "tag:steps=2,lamp:steps=1",
        "--defense",
        "pruning:ratio=0.5",
        "--defense",
        "pruning:ratio=0.9",
    ]
    output = text_folder / "out"
    assert main([*base, *flags, "--output", str(output), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((output / "audit.json").read_text())
    assert list(record["defenses"]) == ["none", "pruning:ratio=0.5", "pruning:ratio=0.9"]
    two, knows = ["tag:steps=2", "lamp:steps=1"], ", knows the defense"
    assert list(record["attacks"]) == [n for one in two for n in (one, one + knows)] + [
        "candidates"
    ]
    # Undefended there is nothing to know; candidates always knows.
    assert len(record["cells"]) == 3 * (3 + 5 + 5)
    assert record["settings"]["model"] == "model"  # a folder's path is nobody's business
    assert {tuple(message["labels"]) for message in record["messages"]} <= {(0,), (1,), (2,)}
    answer = (output / "table.md").read_text().splitlines()[0]
    assert answer in printed
    below = printed.partition(answer)[2].splitlines()
    assert max(map(len, below[:-1])) < 100  # the last line is the path
    assert "label bound" not in printed  # table.md has every column
    assert str(output / "report.html") in printed
    assert str(text_folder) not in (output / "report.html").read_text()

    settings = {
        "defense": {"pruning": [{"ratio": 0.5}, {"ratio": 0.9}]},
        "attack": ["tag:steps=2"],
        "samples": 1,
        "labels_known": True,
        "reference": False,
    }
    (text_folder / "audit.json").write_text(json.dumps(settings))
    config = ["--config", str(text_folder / "audit.json"), "--output", str(text_folder / "other")]
    assert main([*base, *config, "--no-labels_known"]) == 0  # flags over the file
    record = json.loads((text_folder / "other" / "audit.json").read_text())
    assert list(record["defenses"]) == ["pruning:ratio=0.5", "pruning:ratio=0.9"]
    assert record["settings"]["samples"] == 3
    assert not record["settings"]["labels_known"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": None}, "--model must be given"),
        ({"--attack": "tog"}, "Did you mean 'tag'"),
        ({"--defense": "pruning:rate=1"}, "no setting rate"),
        ({"--samples": "9"}, "from 1 to the 4"),
        ({"--column": "words"}, "has no words"),
        ({"--label_column": "words"}, "--label_column"),
        (
            {"--label_column": "sentence"},
            "sentence cannot be input and label",
        ),
        ({"--output": "data.tsv/out"}, "Cannot write to"),
        ({"--config": "wrong.yaml"}, "holds atack, which no flag is called"),
    ],
)
def test_command_line_errors(
    change: dict[str, str | None],
    message: str,
    text_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(text_folder)
    (text_folder / "wrong.yaml").write_text("atack: tag")
    flags = {
        "--model": "model",
        "--dataset": "data.tsv",
        "--attack": "tag:steps=1",
        "--samples": "1",
        "--output": "out",
    }
    flags |= change  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as done:
        main(
            [
                "audit",
                *(
                    part
                    for flag, value in flags.items()
                    if value is not None
                    for part in (flag, value)
                ),
            ]
        )
    assert done.value.code == 1
    error = capsys.readouterr().err
    assert "gradguard audit: " in error
    assert message in error


@pytest.mark.long
def test_command_line_for_images(tmp_path: Path) -> None:
    model, processor = image_model()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for number, (image, label) in enumerate(images(4)):
        folder = tmp_path / "photos" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    np.savez(
        tmp_path / "arrays.npz",
        x=np.stack([i for i, _ in images(4)]),
        y=np.array([k for _, k in images(4)]),
    )
    for name in ("photos", "arrays.npz"):
        output = tmp_path / f"out-{name}"
        flags = [
            "--model",
            str(tmp_path / "model"),
            "--dataset",
            str(tmp_path / name),
            "--attack",
            "inverting_gradients:steps=1",
        ]
        assert (
            main(["audit", *flags, "--samples", "2", "--batch_size", "2", "--output", str(output)])
            == 0
        )
        record = json.loads((output / "audit.json").read_text())
        assert record["settings"]["kind"] == "image"
        assert len(record["messages"][0]["images"]) == 2
        assert record["cells"][0]["scores"]["psnr"][0] > 0
