"""Audits run attackers who know the defense, and call nothing hidden that one of them finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import make_task, rng, word_tokenizer
from test_audit import HIGH, LOW, WORDS, image_model, images, made

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import ATTACKS, Attack, Observation, Reconstruction, make_attack
from hf_gradguard.attacks.candidates import regression
from hf_gradguard.attacks.candidates.membership import Candidates
from hf_gradguard.audit import audit, markdown_table, summarize
from hf_gradguard.audit.attackers import attackers, with_candidates, with_public_texts
from hf_gradguard.audit.report.page import html_report
from hf_gradguard.audit.report.verdicts import INFORMED
from hf_gradguard.audit.run import make_defenses
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.defenses import DEFENSES
from hf_gradguard.defenses.mechanism import Mechanism

pytestmark = pytest.mark.usefixtures("few_probes")

DRAW = np.random.default_rng(0)
TEXTS = [" ".join(DRAW.choice(WORDS, size=5)) for _ in range(12)]
MORE = [(text, number % 3) for number, text in enumerate(TEXTS[:10])]
SAMPLES = MORE[:4]


def text_model() -> tuple[Any, Any]:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    return model, word_tokenizer(WORDS)


def known(attack: Any, spec: str, **terms: Any) -> dict[str, Any]:
    """Settings and grants by label, and whether it counts as knowing the defense."""
    ((_, defense),) = make_defenses(spec).items()
    attack = make_attack(attack) if isinstance(attack, str) else attack
    found = attackers("a", attack, defense, AuditSettings(**terms))
    return {
        label.replace("a" + INFORMED, "informed"): (
            one.attack,
            sorted(one.grants),
            one.knows_defense,
        )
        for label, one in found.items()
    }


# --- who knows what


@pytest.mark.parametrize(
    ("attack", "spec", "changed"),
    [
        ("tag", "pruning:ratio=0.5", {"match_nonzero": True}),
        ("span", "optimal_pruning:ratio=0.5", {"complete": True}),
        ("tag", "dp_sgd:clip=0.3", {"clip_norm": 0.3}),
        ("lamp", "dp_sgd:clip=0.3,clip_by=coordinate", {"clip_coordinate": 0.3}),
        ("tag", "soteria", {"match_nonzero": True}),
        ("tag", "refiner", {"restarts": 4}),
        ("tag", "gradient_sketch", {"restarts": 4}),
        ("tag", "pruning:ratio=0.5+dp_sgd:clip=2", {"match_nonzero": True, "clip_norm": 2}),
    ],
)
def test_each_attack_takes_the_settings_that_it_has(
    attack: str, spec: str, changed: dict[str, Any]
) -> None:
    found = known(attack, spec)
    plain, informed = found["a"], found["informed"]
    assert plain == (make_attack(attack), [], False)
    assert informed == (replace(make_attack(attack), **changed), [], True)  # type: ignore[type-var]
    assert known(attack, spec, adaptive=False) == {"a": plain}


def test_what_there_is_no_use_of_makes_no_difference() -> None:
    for spec in ("none", "gaussian_noise:scale=1", "laplace_noise:scale=1"):
        assert known("tag", spec) == {"a": (make_attack("tag"), [], True)}
    # No setting follows cells; span has none against clipping by norm.
    assert known("tag", "quantization") == {"a": (make_attack("tag"), [], False)}
    assert known("span", "dp_sgd") == {"a": (make_attack("span"), [], False)}
    # What a user has set is theirs.
    own = make_attack("tag", match_nonzero=True)
    assert known(own, "pruning") == {"a": (own, [], True)}
    assert known(make_attack("tag", restarts=9), "refiner")["a"][0].restarts == 9


def test_covariances_and_mechanisms_are_granted_where_attacks_use_them() -> None:
    found = known("tag", "optimal_noise")
    assert found["a"][1:] == ([], False)
    assert found["informed"][1:] == (["noise_variance"], True)
    assert known("tag", "optimal_noise", noise_known=True)["a"][1:] == (["noise_variance"], True)
    for spec in ("none", "quantization", "optimal_noise", "gradient_sketch", "refiner"):
        assert known("candidates", spec)["a"][1:] == (["mechanism"], True)
        assert known("candidates", spec, adaptive=False)["a"][1:] == ([], False)


@pytest.mark.parametrize("name", [name for name in DEFENSES if not name.startswith("refiner")])
def test_every_defense_states_its_law(name: str) -> None:
    """Facts of the mechanism against the message itself: what is zero, in cells, within bounds."""
    settings: dict[str, Any] = {"clip": 0.05} if "dp_sgd" in name else {}
    model, batch = make_task("bert", dtype=torch.float32)
    gmap = GradientMap(model, batch)
    defense = make_defense(name, **settings)
    message = defense(gmap, rng())
    mechanism = defense.mechanism(message)
    assert mechanism is not None
    zeros = any(bool((tensor == 0).any()) for tensor in message.values())
    assert (mechanism.selection == "largest") == (name == "pruning")
    assert (mechanism.selection != "all") <= zeros
    assert (mechanism.noise is not None) == ("noise" in name or "dp_sgd" in name)
    assert (mechanism.levels is not None) == (name == "quantization")
    if name == "laplace_noise":
        true = {n: message[n] - g for n, g in gmap.gradient().items()}
        power = sum(float(t.square().sum()) for t in true.values())
        size = sum(t.numel() for t in true.values())
        assert mechanism.variance == pytest.approx(power / size, rel=0.1)
    if name == "gaussian_noise":
        assert mechanism.uniform
    if name == "optimal_noise":
        assert not mechanism.uniform


def test_other_laws() -> None:
    gmap = GradientMap(*make_task("bert", dtype=torch.float32))

    def mechanism(spec: str) -> Mechanism | None:
        ((_, defense),) = make_defenses(spec).items()
        return defense.mechanism(defense(gmap, rng()))

    assert mechanism("quantization:sign_only=true") == Mechanism(rounding="sign")
    assert mechanism("quantization:bits=2,stochastic=true") == Mechanism(
        rounding="stochastic", levels=4
    )
    assert mechanism("laplace_noise:scale=2") == Mechanism(noise="laplace", variance=4.0)
    assert mechanism("laplace_noise:utility_budget=1,strength=own") is None
    assert mechanism("pruning:ratio=0.9,error_feedback=true") == Mechanism(
        selection="largest"
    )  # a first message
    assert mechanism("gaussian_noise+quantization") is None
    assert mechanism("laplace_noise:scale=1+quantization") is None
    chained = mechanism("pruning:ratio=0.5+laplace_noise:scale=1")
    assert chained is not None
    assert (chained.selection, chained.noise) == ("largest", "laplace")
    # the same power on half of the entries
    assert chained.variance == pytest.approx(2.0, rel=1e-3)
    clipped = mechanism("dp_sgd:clip=0.5,scale=1+gaussian_noise:scale=1")
    assert clipped is not None
    assert clipped.clip_norm == 0.5
    assert all((v - 2).abs().max() < 1e-5 for v in clipped.variance.values())  # type: ignore[union-attr]


# --- verdicts


def test_at_chance_needs_an_informed_attack_that_works_undefended() -> None:
    told = made({"none/tag": HIGH, "d/tag": LOW})
    assert summarize(told).verdicts[1].standing == "chance"
    blind = made({"none/tag": HIGH, "d/tag": LOW})
    for cell in blind.cells:
        cell["knows_defense"] = cell["defense"] == "none"
    verdict = summarize(blind).verdicts[1]
    assert verdict.standing == "unknown"
    assert "No attacker that knows the defense was tried" in verdict.text
    # Six words in a hundred above chance are a leak, and no measure of a defense.
    weak = [0.26, 0.27, 0.26, 0.27, 0.26]
    verdict = summarize(made({"none/tag": weak, "d/tag": LOW})).verdicts[1]
    assert verdict.standing == "unknown"
    assert "hardly recover undefended data" in verdict.text
    # One attack knows, another one reads: neither says anything.
    both = made({"none/tag": HIGH, "none/span": weak, "d/tag": LOW, "d/span": LOW})
    for cell in both.cells:
        cell["knows_defense"] = cell["attack"] == "span"
    assert summarize(both).verdicts[1].standing == "unknown"


def test_informed_attacks_are_compared_with_the_same_attack_undefended() -> None:
    names = {"none/tag": HIGH, "d/tag": LOW, f"d/tag{INFORMED}": LOW}
    result = made(names)
    for cell in result.cells:
        cell["knows_defense"] = cell["attack"] != "tag" or cell["defense"] == "none"
    summary = summarize(result)
    assert summary.verdicts[1].standing == "chance"
    assert [(row.defense, row.attack, row.knows_defense) for row in summary.rows] == [
        ("none", "tag", True),
        ("d", "tag", False),
        ("d", f"tag{INFORMED}", True),
    ]
    table = markdown_table(summary)
    assert f"| defense | tag | tag{INFORMED} |" in table
    assert "An attacker that knows the defense has an entry where" in table


@dataclass
class Blunt(Attack):
    """Answers with one word. It reads nothing, and has nothing to know."""

    name: ClassVar[str] = "blunt"

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return Reconstruction(token_ids=[[5]] * seen.batch_size)


LEAKS = [
    "pruning:ratio=0.3",
    "gaussian_noise:relative_scale=0.001",
    "dp_sgd:clip=0.01,relative_scale=0.001",
    "soteria:ratio=0.5",
    "quantization:bits=8",
]


@pytest.mark.long
def test_no_leak_is_at_chance_that_another_attacker_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTACKS, "blunt", Blunt)
    result = audit(
        *text_model(), SAMPLES, LEAKS, "blunt", candidates=TEXTS, output=tmp_path / "both"
    )
    summary = summarize(result)
    found = {(one.defense, one.attack): one for one in summary.membership}
    for verdict in summary.verdicts:
        assert verdict.standing != "chance", verdict
        assert verdict.recognized
        one = found[verdict.defense, "candidates"]
        assert one.scores["top1"].mean > 0.8, verdict
        assert one.scores["tpr_1%"].mean > 0.5
        assert (one.candidates, one.members, one.knows_defense) == (12, 4, True)
    # Without the attacker who finds them nothing is claimed either.
    alone = audit(*text_model(), SAMPLES, LEAKS[:1], "blunt", output=tmp_path / "alone")
    assert "chance" not in [verdict.standing for verdict in summarize(alone).verdicts]
    table, page = markdown_table(summary), html_report(summary)
    assert "| `soteria:ratio=0.5` | 12 | yes | 1.00" in table
    assert "<h2>Membership inference</h2>" in page
    assert "<th>knows the defense</th>" in page


@pytest.mark.long
def test_what_hides_is_at_chance_and_batches_and_images_are_ranked(tmp_path: Path) -> None:
    hidden = audit(
        *text_model(), MORE, "gaussian_noise:relative_scale=3e5", [],
        candidates=TEXTS, output=tmp_path / "a", batch_size=2,
    )  # fmt: skip
    summary = summarize(hidden)
    assert [verdict.standing for verdict in summary.verdicts] == ["open", "chance"]
    assert {len(cell["membership"]["members"]) for cell in hidden.cells} == {2}
    pictures = images(8)
    shown = audit(
        *image_model(), pictures[:3], [], make_attack("candidates"),
        candidates=[image for image, _ in pictures], output=tmp_path / "b",
    )  # fmt: skip
    (one,) = summarize(shown).membership
    assert one.scores["rank"].mean == 1
    assert shown.attacks["candidates"]["candidates"] == ["Tensor"] * 8


@pytest.mark.long
def test_defenses_together_are_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several samples, where others' gradients are sketched; and by themselves where they cannot
    be attacked together: samples that are clipped one by one, and those that are not.
    """
    monkeypatch.setattr(regression, "ENTRIES", 0)  # sketches are shorter than gradients
    defenses = ["gaussian_noise:relative_scale=2", "optimal_noise:relative_scale=2"]
    defenses += ["pruning:ratio=0.9,error_feedback=True", "gradient_sketch"]
    calls: list[int] = []
    plain = Candidates.reconstruct_many

    def counted(self: Candidates, seen: Any, generator: Any = None) -> Any:
        calls.append(len(seen))
        return plain(self, seen, generator)

    monkeypatch.setattr(Candidates, "reconstruct_many", counted)

    def ranked(defenses: list[str], name: str) -> dict[tuple, list[float]]:
        found = audit(
            *text_model(), SAMPLES, defenses, [], candidates=TEXTS, output=tmp_path / name,
            batch_size=2,
        )  # fmt: skip
        return {
            (cell["message"], cell["defense"]): cell["membership"]["scores"] for cell in found.cells
        }

    together = ranked(defenses, "together")
    assert calls == [5, 5]  # two messages
    for defense in defenses:
        alone = ranked([defense], defense.partition(":")[0])
        for place, scores in alone.items():
            assert scores == pytest.approx(together[place], rel=1e-4, abs=1e-4), place
    clipped = "dp_sgd:per_sample=True,clip=0.1,noise_multiplier=0.01"
    both = ranked([*defenses[:1], clipped], "both")
    assert both[0, defenses[0]] == pytest.approx(together[0, defenses[0]], rel=1e-4, abs=1e-4)
    names = [label.partition(":")[0] for number, label in both if number == 0]
    assert names == ["none", "gaussian_noise", "dp_sgd"]


def test_candidates_are_shuffled() -> None:
    """Equal scores are ranked by place: the audited ones must not come first."""
    listed = [[5 + k] for k in range(9)]
    (attack,) = with_candidates({}, listed, 0).values()
    assert attack.candidates != listed == sorted(attack.candidates)  # type: ignore[attr-defined]
    assert with_candidates({"tag": make_attack("tag")}, None, 0).keys() == {"tag"}
    both = {"first": make_attack("candidates"), "second": make_attack("candidates", labels=[1])}
    shuffled = with_candidates(both, listed, 0)
    assert shuffled.keys() == both.keys()
    assert all(one.candidates == attack.candidates for one in shuffled.values())  # type: ignore[attr-defined]


def test_candidates_of_an_attacks_own_are_refused_and_places_are_not(tmp_path: Path) -> None:
    own = make_attack("candidates", candidates=TEXTS[:3])
    with pytest.raises(ValueError, match=r"audit\(candidates="):
        audit(*text_model(), SAMPLES[:1], [], own, output=tmp_path / "own")
    places = make_attack("candidates", candidates=TEXTS[0], places=[1], words=["word1", "word2"])
    result = audit(*text_model(), SAMPLES[:1], [], places, output=tmp_path / "places")
    assert "scores" in result.cells[0]
    assert "membership" not in result.cells[0]


@pytest.mark.parametrize("one", [None, ["two", "words"], 5])
def test_what_is_no_candidate_is_refused(one: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a text, its ids, or a row"):
        audit(*text_model(), SAMPLES[:1], [], [], candidates=[TEXTS[0], one], output=tmp_path)


@pytest.mark.long
def test_where_first_messages_are_empty_others_come_before(tmp_path: Path) -> None:
    """Two others, of three batches in a message's entries."""
    spec = "pruning:ratio=0.5,error_feedback=True,min_batches=3"
    model, tokenizer = text_model()

    def shared(samples: list[tuple[str, int]]) -> list[dict[str, Any]]:
        out: Any = {"output": tmp_path / "out", "candidates": TEXTS}
        found = audit(model, tokenizer, samples, [spec], [], **out)  # what is there is kept
        return [row for row in found.shared if row["defense"] != "none"]

    (alone,) = shared(SAMPLES[:1])
    assert "The first 2 messages of pruning are empty" in alone["reason"]
    for count in (2, 3):
        rows = shared(SAMPLES[:count])
        defense = make_defense("pruning", ratio=0.5, error_feedback=True, min_batches=3)
        for at in (1, count - 1, 0):
            text, label = SAMPLES[at]
            batch = dict(tokenizer(text, return_tensors="pt")) | {"labels": torch.tensor([label])}
            gmap = GradientMap(model, batch)
            message = defense(gmap, rng())
        true = torch.cat([g.flatten() for g in gmap.gradient().values()])
        got = torch.cat([y.flatten() for y in message.values()])
        wanted = float(torch.cosine_similarity(true, got, 0))
        assert rows[0]["cosine"] == pytest.approx(wanted, rel=1e-3)
        defense.load_state_dict({})


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "missing"),
    [
        ("likelihood_search", {"evaluations": 100}, "public_texts"),
        ("learned_inversion", {"messages": 10}, "public texts"),
    ],
)
def test_attackers_get_public_texts_that_no_message_has(
    name: str, settings: dict, missing: str, tmp_path: Path
) -> None:
    private, others = SAMPLES[:1], [" ".join(DRAW.choice(WORDS, size=5)) for _ in range(30)]
    search = make_attack(name, **settings)
    listed = [private[0][0], *others]
    spec = "gaussian_noise:relative_scale=2"
    result = audit(
        *text_model(), private, spec, [search], candidates=listed, output=tmp_path / "with"
    )
    cells = [cell for cell in result.cells if cell["attack"].startswith(name)]
    assert cells
    assert all("scores" in cell for cell in cells)
    without = audit(*text_model(), private, spec, [search], output=tmp_path / "without")
    assert all(missing in cell["reason"] for cell in without.cells)
    ids = [[2, 5, 6, 3], [2, 7, 8, 3]]
    members = SimpleNamespace(members_among=lambda candidates, batch: [1])
    (given,) = with_public_texts({"a": search}, ids, [{"input_ids": 0}], members).values()  # type: ignore[arg-type, dict-item]
    assert given.public_texts == ids[:1]  # type: ignore[attr-defined]
