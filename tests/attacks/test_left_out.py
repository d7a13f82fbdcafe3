"""Candidates behind error feedback: what earlier messages left out is in a message too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task, torch_rng

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.candidates.regression import (
    _REGRESSION_RIDGE,
    MatchedFilter,
    WhitenedMessage,
)
from hf_gradguard.attacks.candidates.sample_likelihood import rescale
from hf_gradguard.attacks.uploads import accumulate_uploads, can_average, single_batch_entries
from hf_gradguard.audit.client import average_of
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.randomness import Stream


def test_a_regression_by_hand() -> None:
    """Against the t-statistics of a ridge regression that numpy solves."""
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(7, 30)), rng.normal(size=30)
    told = WhitenedMessage({"w": torch.tensor(y).float()}, {"w": torch.zeros(30)}, 3, None)
    found = MatchedFilter([told], None, 7, torch_rng())
    found.add(range(7), {"w": torch.tensor(h).float()})
    got = found.regressed(0, torch.full((7,), 1 / 7).double())
    gram = h @ h.T
    inverse = np.linalg.inv(gram + _REGRESSION_RIDGE * gram.diagonal().mean() * np.eye(7))
    share = (inverse @ gram).diagonal()
    wanted = (inverse @ h @ y) / np.sqrt(inverse.diagonal() * share)
    ratio = got.numpy() / wanted
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    assert ratio[0] > 0


@pytest.mark.parametrize("name", ["pruning", "gradient_sketch"])
def test_members_are_found_beside_what_was_left_out(name: str) -> None:
    """Where little was left out, they come before most others."""
    model, _ = make_task("bert", dtype=torch.float32)
    settings: dict[str, Any] = {"samples": 12} if name == "gradient_sketch" else {"ratio": 0.8}
    defense = make_defense(name, error_feedback=True, min_batches=1, **settings)
    drawn = torch_rng(3)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(40)]

    def message(rows: list[list[int]], number: int) -> tuple[Any, Observation]:
        batch = {"input_ids": torch.tensor(rows), "labels": torch.tensor([1, 0, 1, 2])}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        made = defense(GradientMap(model, batch), Stream.from_seeds(number))
        mechanism = defense.mechanism(made)
        return made, Observation(
            model, dict(made), (4, 5), labels=batch["labels"], mechanism=mechanism
        )

    message(words[36:], 0)
    made, seen = message(words[:4], 1)
    assert made.has_residual
    assert seen.mechanism is not None
    assert seen.mechanism.has_residual
    assert (seen.mechanism.fitted is not None) == (name == "gradient_sketch")
    scores = make_attack("candidates", candidates=words[:36])(seen, torch_rng()).scores
    before = [int((scores[4:] > scores[at]).sum()) for at in range(4)]
    assert sum(before) / 4 < 8, before  # 16 by chance


def test_a_mean_of_messages_carries_what_they_carry() -> None:
    """An accumulated message has what its first part left out in its later parts."""
    gmap, streams = GradientMap(*make_task("bert")), [Stream.from_seeds(n) for n in range(2)]
    defense = make_defense("pruning", ratio=0.9, error_feedback=True)
    mean = average_of([defense(gmap, stream) for stream in streams])
    assert mean.has_residual
    mechanism = defense.mechanism(mean)
    assert mechanism is not None
    assert mechanism.has_residual
    plain = make_defense("pruning", ratio=0.9)
    assert not average_of([plain(gmap, stream) for stream in streams]).has_residual


def _uploads(
    model: Any, words: list[list[int]], count: int, name: str = "pruning", **settings: Any
) -> tuple[list[dict[str, torch.Tensor]], list[Observation]]:
    """A client's gradients and messages behind error feedback, of four texts each."""
    defense = make_defense(name, error_feedback=True, **{"min_batches": 1} | settings)
    gradients, uploads = [], []
    for number in range(count):
        batch = {"input_ids": torch.tensor(words[4 * number : 4 * number + 4])}
        batch |= {"attention_mask": torch.ones_like(batch["input_ids"])}
        batch |= {"labels": torch.tensor([1, 0, 1, 2])}
        gmap = GradientMap(model, batch)
        made = defense(gmap, Stream.from_seeds(number))
        gradients.append({name: g.detach() for name, g in gmap.gradient().items()})
        if number < defense.facts.warmup_messages:
            continue  # empty
        mechanism = defense.mechanism(made)
        assert mechanism is not None
        if number == defense.facts.warmup_messages:
            of = {name: torch.tensor(number + 1) for name in made}
            mechanism = replace(mechanism, batches=of, has_residual=True)
        uploads.append(
            Observation(model, dict(made), (4, 5), labels=batch["labels"], mechanism=mechanism)
        )
    return gradients, uploads


def test_what_is_gathered_is_the_sum_of_as_many_gradients_as_it_says() -> None:
    model, _ = make_task("bert", dtype=torch.float64)
    drawn = torch_rng(4)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(32)]
    gradients, uploads = _uploads(model, words, 8, ratio=0.7)
    at = 3
    whole = accumulate_uploads(uploads, at)
    assert whole.mechanism is not None
    assert whole.mechanism.batches is not None
    counts = set()
    for name, got in whole.gradient.items():
        for place in range(got.numel()):
            brought = [n for n in range(at, 8) if uploads[n].gradient[name].flatten()[place]]
            if not brought:
                assert got.flatten()[place] == 0
                continue
            sent = [n for n in range(at) if uploads[n].gradient[name].flatten()[place]]
            window = range(max(sent, default=-1) + 1, brought[0] + 1)
            wanted = sum(float(gradients[n][name].flatten()[place]) for n in window)
            assert float(got.flatten()[place]) == pytest.approx(wanted, rel=1e-9, abs=1e-15)
            assert int(whole.mechanism.batches[name].flatten()[place]) == len(window)
            counts.add(len(window))
    assert {1, 2, 3, 4} <= counts


def test_what_is_gathered_goes_on_from_what_is_known_of_the_batches_before() -> None:
    model, _ = make_task("bert")
    words = [[5, 6, 7, 8, 9], [6, 7, 8, 9, 5], [7, 8, 9, 5, 6], [8, 9, 5, 6, 7]] * 6
    _, uploads = _uploads(model, words, 6, ratio=0.7)
    whole, early = accumulate_uploads(uploads, 4), accumulate_uploads(uploads[:3], 2)
    assert early.mechanism is not None
    assert early.mechanism.batches is not None
    sent = {name: y != 0 for name, y in uploads[2].gradient.items()}
    known = {n: b.masked_fill(sent[n], 1) for n, b in early.mechanism.batches.items()}
    assert uploads[3].mechanism is not None
    late = [
        replace(uploads[3], mechanism=replace(uploads[3].mechanism, batches=known)),
        *uploads[4:],
    ]
    again = accumulate_uploads(late, 1)
    assert whole.mechanism is not None
    assert again.mechanism is not None
    for name, count in (whole.mechanism.batches or {}).items():
        heard = whole.gradient[name] != 0
        assert torch.equal(whole.gradient[name], again.gradient[name])
        assert torch.equal(count[heard], (again.mechanism.batches or {})[name][heard])


def test_uploads_are_gathered_with_their_law() -> None:
    model, _ = make_task("bert")
    _, uploads = _uploads(model, [[5, 6, 7, 8, 9]] * 8, 2, ratio=0.7)
    with pytest.raises(ValueError, match="no upload at 2"):
        accumulate_uploads(uploads, 2)
    with pytest.raises(ValueError, match=r"mechanism=defense\.mechanism"):
        accumulate_uploads([uploads[0], replace(uploads[1], mechanism=None)])


def test_who_knows_which_entries_are_alone_names_all_members() -> None:
    """Where a client sends an entry in two messages in a row, which ours does not."""
    model, _ = make_task("bert", dtype=torch.float32)
    drawn, mechanism = torch_rng(5), Mechanism(selection="chosen", has_residual=True)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(64)]
    labels = torch.tensor([1, 0, 1, 2])
    error, uploads = None, []
    for number in (5, 4, 3, 2, 1, 0):
        batch = {"input_ids": torch.tensor(words[4 * number : 4 * number + 4]), "labels": labels}
        batch |= {"attention_mask": torch.ones_like(batch["input_ids"])}
        v = {name: g.detach().clone() for name, g in GradientMap(model, batch).gradient().items()}
        v = {name: g + error[name] for name, g in v.items()} if error else v
        least = torch.cat([g.abs().flatten() for g in v.values()]).quantile(0.8)
        sent = {name: g.masked_fill(g.abs() < least, 0) for name, g in v.items()}
        error = {name: g - sent[name] for name, g in v.items()}
        uploads.append(Observation(model, sent, (4, 5), labels=labels, mechanism=mechanism))
    attack = make_attack("candidates", candidates=[*words[:4], *words[24:]])
    whole = accumulate_uploads(uploads, index=5)
    own = single_batch_entries(whole)
    assert own is not None
    assert sum(int((y != 0).sum()) for y in own.gradient.values()) > 40
    before, known = attack.reconstruct_many([uploads[5], whole], torch_rng())
    assert set(known.ranking[:4].tolist()) == {0, 1, 2, 3}
    assert set(before.ranking[:4].tolist()) != {0, 1, 2, 3}


@pytest.mark.long
@pytest.mark.parametrize("name", ["pruning", "optimal_pruning"])
def test_every_entry_is_of_as_many_batches_as_a_client_asks_for(name: str) -> None:
    model, _ = make_task("bert")
    drawn = torch_rng(6)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(36)]
    for least in (1, 3):
        _, uploads = _uploads(model, words, 9, name, ratio=0.6, min_batches=least)
        found = []
        for at in range(10 - least):
            whole = accumulate_uploads(uploads, at)
            sent = {n: y != 0 for n, y in uploads[at].gradient.items()}
            found += [
                int(whole.mechanism.batches[n][mask].min())
                for n, mask in sent.items()
                if mask.any()
            ]
            assert (single_batch_entries(whole) is None) == (least > 1)
        assert min(found) == least


@pytest.mark.long
def test_fitted_messages_keep_later_ones_in_their_law() -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    drawn = torch_rng(1)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(32)]
    _, uploads = _uploads(model, words[:16], 4, "gradient_sketch", samples=12)
    whole = accumulate_uploads(uploads, 1)
    torch.testing.assert_close(whole.gradient, uploads[1].gradient, rtol=0, atol=0)
    assert whole.mechanism is not None
    for later, upload in zip(whole.mechanism.later_messages, uploads[2:], strict=True):
        torch.testing.assert_close(later, upload.gradient, rtol=0, atol=0)
    assert not can_average(whole, whole)
    twice = rescale(whole, whole.mechanism, 2.0)[1]
    assert twice is not None
    bias = "classifier.bias"
    assert torch.equal(twice.later_messages[0][bias], 2 * uploads[2].gradient[bias])
    with pytest.raises(ValueError, match="give fitted too"):
        Mechanism(later_messages=whole.mechanism.later_messages)
    attack = make_attack("candidates", candidates=words[4:8] + words[16:])
    scores = attack(whole, torch_rng()).scores
    before = [int((scores[4:] > scores[at]).sum()) for at in range(4)]
    assert sum(before) / 4 < 4, before  # 8 by chance


@pytest.mark.parametrize("name", ["pruning", "gradient_sketch"])
def test_who_has_another_label_is_as_good_as_excluded(name: str) -> None:
    model, _ = make_task("bert", dtype=torch.float32)
    drawn = torch_rng(5)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(24)]
    settings: dict[str, Any] = {"samples": 12} if name == "gradient_sketch" else {"ratio": 0.8}
    _, uploads = _uploads(model, words[:8], 2, name, **settings)
    seen = replace(uploads[1], labels=torch.tensor([1, 0, 1, 0]))
    classes = [at % 3 for at in range(16)]
    scores = make_attack("candidates", candidates=words[8:], labels=classes)(seen).scores
    other = torch.tensor(classes) == 2
    assert scores[other].max() < scores[~other].min()
