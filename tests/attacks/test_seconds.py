"""`seconds` of attacks: what has time comes to its end and says so; what has none returns the best
so far, and says that it is not complete.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import torch_rng
from test_candidates import batch_of, images, seen_by, texts
from test_candidates import make_task as task
from test_embedding_rows import share_all
from test_likelihood_search import PUBLIC, message
from test_patches import image, model_of, seen_of
from test_span import build, observe, sentences
from torch import nn

from hf_gradguard import make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.attacks.base import Clock
from hf_gradguard.attacks.span import encoder
from hf_gradguard.audit import AuditSettings, audit
from hf_gradguard.audit.settings import read_settings
from hf_gradguard.registry import ATTACKS


def test_every_attack_takes_seconds() -> None:
    assert len(list(ATTACKS)) >= 12
    for name in ATTACKS:
        assert "seconds" in {field.name for field in fields(ATTACKS[name])}, name


def test_a_clock_notes_that_it_stopped_an_attack() -> None:
    short, long = Clock(0.0), Clock(1e6)
    assert not short.has_stopped
    assert (short.must_stop(), short.has_stopped) == (True, True)
    assert (long.must_stop(), long.has_stopped) == (False, False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tag", "dlg"])  # together, and each by its own line search
def test_matching_says_whether_it_was_stopped(name: str) -> None:
    observation = observe(build("bert"), sentences(1))
    short = make_attack(name, steps=3, restarts=2, seconds=0.0)(observation, torch_rng())
    last = make_attack(name, steps=1, restarts=2, seconds=0.0)(observation, torch_rng())
    whole = make_attack(name, steps=3, restarts=2)(observation, torch_rng())
    assert not short.complete
    assert len(short.history) < len(whole.history)
    assert last.complete  # its one step was all there was to do
    assert whole.complete


@pytest.mark.long
def test_span_and_the_search_say_whether_they_were_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observation = observe(build("gpt2"), sentences(2))
    assert not make_attack("span", seconds=0.0)(observation).complete
    assert make_attack("span")(observation).complete
    search = make_attack("likelihood_search", public_texts=PUBLIC, evaluations=64, populations=1)
    assert not search(message("gaussian_noise", relative_scale=20.0), torch_rng()).complete
    # This message's noise takes 1.2 standard deviations from the true text's score.
    monkeypatch.setattr("hf_gradguard.attacks.likelihood_search.search._SETTLED", 2.0)
    longer = replace(search, evaluations=9000)
    assert longer(message("gaussian_noise", relative_scale=1.5), torch_rng()).complete


@pytest.mark.long
def test_span_stops_between_two_places_of_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after all of them: of four sentences whose special tokens are not known."""
    observation, passes = observe(build("bert"), sentences(4), tokenizer=None), []
    tried = encoder.distance_outside

    def counted(*args: Any) -> torch.Tensor:
        passes.append(len(args[2]))
        return tried(*args)

    monkeypatch.setattr(encoder, "distance_outside", counted)
    make_attack("span")(observation)
    whole = len(passes)
    passes.clear()
    monkeypatch.setattr(Clock, "must_stop", lambda clock: _stop(clock, len(passes) > 8))
    short = make_attack("span", seconds=1.0)(observation)
    assert not short.complete
    assert 8 < len(passes) < 40 < whole


def _stop(clock: Clock, is_over: bool) -> bool:
    clock.has_stopped |= is_over
    return is_over


def test_embedding_rows_of_a_tied_head_fall_back_on_norms() -> None:
    tied = share_all("gpt2_lm", sentences(2, (7, 9)))
    short, whole = (make_attack("embedding_rows", seconds=s)(tied) for s in (0.0, None))
    assert (short.complete, whole.complete) == (False, True)
    assert short.token_ids is not None
    assert whole.token_ids is not None
    weight = tied.gradient["transformer.wte.weight"]
    order = weight.norm(dim=1).argsort(descending=True).tolist()
    assert short.token_ids[0] == order[: len(short.token_ids[0])]
    assert set(short.token_ids[0]) != set(whole.token_ids[0])
    plain = share_all("bert", sentences(2))
    assert make_attack("embedding_rows", seconds=0.0)(plain).complete  # a look at norms is all


def test_patches_that_are_not_solved_are_gray() -> None:
    observation = seen_of(model_of("ViT"), image())
    short, whole = (make_attack("analytic", seconds=s)(observation) for s in (0.0, None))
    assert (short.complete, whole.complete) == (False, True)
    assert short.input is not None
    assert "gray" in short.undecided
    assert float(short.input.flatten(2).std(2).max()) < 1e-6
    assert float((whole.input - image()).abs().max()) < 1e-5


def test_readings_of_pixels_that_are_not_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
    observation = seen_by(Pixels(model).double(), batch_of(images(2), [0, 1]))
    short, whole = (make_attack("analytic", seconds=s)(observation) for s in (0.0, None))
    assert (short.complete, whole.complete) == (False, True)
    assert short.input is not None
    assert short.input.shape == (2, 3, 8, 8)


class Pixels(nn.Module):
    """A classifier whose first layer reads all pixels."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, pixel_values: torch.Tensor, labels: Any = None) -> Any:
        logits = self.layers(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


# --- candidates


@pytest.mark.long
@pytest.mark.parametrize("vectorized", [True, False])  # products of 64; one written out
def test_candidates_rank_those_that_time_reached(vectorized: bool) -> None:
    model, _ = task("bert")
    listed = texts(100, length=5)
    observation = seen_by(
        model, batch_of(listed[:1], [1]), make_defense("gaussian_noise", relative_scale=1)
    )
    whole = make_attack("candidates", candidates=listed, vectorized=vectorized)(observation)
    short = make_attack("candidates", candidates=listed, vectorized=vectorized, seconds=0.0)(
        observation
    )
    reached = 64 if vectorized else 1
    assert (whole.complete, whole.scored, whole.undecided) == (True, 100, "")
    assert (short.complete, short.scored) == (False, reached)
    assert f"{100 - reached} of 100" in short.undecided
    assert torch.allclose(short.scores[:reached], whole.scores[:reached])
    assert bool((short.scores[reached:] == short.scores[:reached].min()).all())
    assert int(short.ranking[0]) == 0
    assert float(short.posterior.sum()) == pytest.approx(1)
    assert short.token_ids == [listed[0]]


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("none", {}), ("gaussian_noise", {"relative_scale": 0.1}), ("pruning", {"ratio": 0.9}),
        ("quantization", {"bits": 8}),
    ],
)  # fmt: skip
def test_candidates_of_several_samples_are_ranked_as_if_the_list_ended_there(
    defense: str, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a list whose first pass has all members, the same are found as in the whole list; those
    that no pass reached change nothing in how candidates vary.
    """
    model, _ = task("bert")
    listed = texts(60, length=5)
    observation = seen_by(
        model, batch_of(listed[2:5], [0, 1, 1]), make_defense(defense, **settings)
    )
    size = sum(g.numel() for g in observation.gradient.values())
    monkeypatch.setattr("hf_gradguard.gradient_map.vectorized.ENTRIES", 20 * size)
    attack = make_attack("candidates", candidates=listed)
    whole, short = attack(observation), replace(attack, seconds=0.0)(observation)
    assert whole.complete
    assert not short.complete
    assert short.scored == 10  # of 20 in a pass, with each of both labels
    assert set(whole.ranking[:3].tolist()) == {2, 3, 4}
    assert set(short.ranking[:3].tolist()) == {2, 3, 4}
    assert bool(torch.isfinite(short.scores).all())
    assert not bool(short.scores.isnan().any())


def test_several_messages_each_have_a_score() -> None:
    """Lengths differ, so that a pass of one shape is of one message's candidates."""
    model, _ = task("bert")
    listed = [*texts(40, length=4), *texts(40, length=6, seed=2)]
    observations = [
        seen_by(model, batch_of([listed[row]], [1]), make_defense("gaussian_noise", scale=1e-3))
        for row in (0, 40)
    ]
    attack = make_attack("candidates", candidates=listed, seconds=0.0)
    found = attack.reconstruct_many(observations)
    # The second one's first pass comes after all of the first one's.
    assert [ranked.scored for ranked in found] == [80, 40]
    assert [ranked.complete for ranked in found] == [True, False]
    assert [bool(torch.isfinite(ranked.scores).all()) for ranked in found] == [True, True]


def test_a_bar_counts_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = task("bert")
    listed = texts(70, length=5)
    observation = seen_by(model, batch_of(listed[:2], [0, 1]))
    make_attack("candidates", candidates=listed, progress=True)(observation)
    assert "/140" in capsys.readouterr().err  # with each of both labels
    make_attack("candidates", candidates=listed)(observation)
    assert not capsys.readouterr().err


# --- audits


@pytest.mark.long
def test_an_audit_hands_seconds_on(tmp_path: Path) -> None:
    model, (tokenizer, rows) = task("bert", dtype=torch.float32)[0], _rows()
    result = audit(
        model, tokenizer, rows, "none", "tag:steps=4,span,dlg:steps=2,seconds=600",
        attack_seconds=1e-9, word_pairs=0, output=tmp_path,
    )  # fmt: skip
    stopped = {cell["attack"]: cell.get("complete", True) for cell in result.cells}
    assert not stopped["tag:steps=4"]
    assert stopped["dlg:steps=2,seconds=600"]
    assert result.settings["attack_seconds"] == 1e-9
    assert any("1e-09 seconds" in sentence for sentence in result.settings["threat_model"])


def _rows() -> tuple[Any, list[tuple[str, int]]]:
    from helpers import word_tokenizer

    words = [f"w{i}" for i in range(20)]
    return word_tokenizer(words), [("w1 w2 w3", 0), ("w4 w5 w6", 1)]


def test_the_flag_is_read() -> None:
    needed = {"model": "m", "dataset": "d", "output": "o"}
    assert read_settings({**needed, "attack_seconds": 60.0}).attack_seconds == 60.0
    for wrong in (0, -1.0, float("inf"), True):
        with pytest.raises(ValueError, match="attack_seconds"):
            AuditSettings(attack_seconds=wrong)
