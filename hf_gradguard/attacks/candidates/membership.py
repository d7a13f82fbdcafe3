"""Membership inference by candidate sets: templates, a leaked corpus, words at one place.

Each candidate's gradient is computed once, and compared to what was shared. Noise that stops every
reconstruction attack may leave one of a thousand candidates recognizable: it averages out over
millions of coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...metrics import membership_log_odds
from ...randomness import Stream, torch_generator
from ..base import Attack, Clock, Observation, Reconstruction, as_text
from ..uploads import average, can_average
from .candidate_inputs import Entries, at_places, make_entries
from .scorer import Scorer


@dataclass
class Ranked(Reconstruction):
    """A ranking of K candidates by how likely each is to be in a message.

    The best B of them are the reconstruction.

    Args:
        scores: `(K,)` in float64, logarithms: for one sample of p(message | candidate), up to a
            common constant; for several of p(message | candidate in it)/p(message).
        ranking: The numbers of candidates, the likeliest first, `(K,)`.
        posterior: The probability of each candidate of being in the message, `(K,)`, if all were
            equally likely before and B of them are. They add up to B. If the defense has no known
            mechanism, they are only as good as a guess at one.
        scored: How many were scored, with those that cannot be in the message. Others, which time
            did not reach, count as the least likely one of these.

    Example:
        >>> found = Candidates(["a fine film", "a dull plot"])(observation)
        >>> found.scores.shape, found.ranking.sort().values.tolist()
        (torch.Size([2]), [0, 1])
    """

    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    ranking: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    posterior: Tensor = field(default_factory=lambda: torch.empty(0))
    scored: int = 0


@dataclass
class Candidates(Attack):
    """Ranks a list of texts or images by how well the gradient of each explains the message.

    It takes one gradient per candidate and label. With the defense's mechanism
    (`Observation.mechanism`, or `noise_variance`) the score is the log-likelihood: of noisy values,
    of the kept set and its values, of cells. Without one it is cosine or distance, with the mean
    gradient of the label subtracted, whichever makes the best candidate stand out more. For several
    samples it is the log-ratio of membership, where other samples' gradients count as noise that
    varies as candidates do.

    Texts that are longer than a message are cut to it. Shorter ones are padded on the left if
    clients pad there, by the mask or else by the tokenizer. If the message's lengths are known,
    texts of other lengths are as good as excluded.

    Args:
        candidates: Texts, token ids as clients have them, tensors or arrays `(C, H, W)` of pixels
            as the model takes them, or mappings of a batch's entries for one sample, `labels`
            included, as rows of a data set have them. With `places`, one text. Entries of the other
            domain are passed over: they rank last, with a score of -inf.
        labels: One class id a candidate, if the attacker's list has them. Default: those that the
            message may have.
        places: Positions of a text (special tokens included) at which every word is tried.
        words: The words to try there. Default: the vocabulary without special tokens.
        draws: If the client ran dropout, the attacker's gradients are means over this many draws of
            their own, and how much these differ counts as noise.
        rounding: How far evaluations of one gradient differ, in units of its root mean square.
        vectorized: Evaluate several candidates in one pass, where the model allows it.
        seconds: Time per message after which the attack stops with the candidates that were scored,
            at least those of the first pass. The mean gradients of labels are always computed.
        progress: Show a bar.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> found = make_attack("candidates", candidates=["a fine film", "a dull plot"])(seen)
        >>> found.posterior.sum() > 1.99  # of two candidates two are in it
        tensor(True)
    """

    name: ClassVar[str] = "candidates"
    informed_by: ClassVar[frozenset[str]] = frozenset({"mechanism"})
    candidates: Any = None
    labels: Sequence[Any] | None = None
    places: Sequence[int] = ()
    words: Sequence[Any] | None = None
    draws: int = 4
    rounding: float = 1e-4
    vectorized: bool = True
    seconds: float | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, but is {self.draws}.")
        if not 0 < self.rounding < 1:
            raise ValueError(f"rounding must be between 0 and 1, but is {self.rounding}.")
        Clock(self.seconds)

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Ranked:
        return self._rank([[observation]], generator)[0]

    def reconstruct_many(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> list[Ranked]:
        """Attack several observations at one model, each by itself.

        Every candidate's gradient is computed once for all of them.

        Args:
            observations: Observations of one model and kind of local training, with gradients of
                the same parameters. Labels, lengths and numbers of samples may differ.
            generator: The source of all randomness.

        Raises:
            ValueError: If they differ in those, or this attack cannot work on them.
        """
        _check_together(observations)
        torch_rng = torch_generator(generator, observations[0].device)
        return self._rank([[observation] for observation in observations], torch_rng)

    def history(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> Ranked:
        """Attack all uploads of the same batch together, each with the model at which it was made.

        Log-likelihoods add up. Uploads at the same weights are averaged first, if what is known of
        them differs only in the variance of Gaussian noise.

        Args:
            observations: Observations of one client and one batch.
            generator: The source of all randomness.

        Raises:
            ValueError: If there are none, or this attack cannot work on them.
        """
        if not observations:
            raise ValueError("There is nothing to attack: give at least one observation.")
        groups = _at_same_weights(observations)
        means = [uploads[0] if len(uploads) == 1 else average(uploads) for uploads in groups]
        return self._rank([means], torch_generator(generator, observations[0].device))[0]

    def _rank(
        self, targets: Sequence[Sequence[Observation]], generator: torch.Generator
    ) -> list[Ranked]:
        """Return one result a target: the uploads of one batch, each at a model of its own."""
        clock, fraction = Clock(None), len(targets) / len(targets[0])  # of the time, in each round
        totals: list[Tensor] = []
        for uploads in zip(*targets, strict=True):
            own_clock = Clock(None if self.seconds is None else self.seconds * fraction)
            entries = [self._entries(observation) for observation in uploads]
            scores_of_round = Scorer(self, uploads, entries, generator, own_clock).scores()
            totals = totals or [torch.zeros_like(scores) for scores in scores_of_round]
            totals = [a + b for a, b in zip(totals, scores_of_round, strict=True)]
        seconds = clock.elapsed / len(targets)
        return [
            _ranked(uploads[0], target_entries, scores + target_entries.likely, seconds)
            for uploads, target_entries, scores in zip(targets, entries, totals, strict=True)
        ]

    def _entries(self, observation: Observation) -> Entries:
        listed = self.candidates
        if listed is None or (not self.places and isinstance(listed, str | Mapping)):
            raise ValueError(
                "There is nothing to compare with: give candidates, a list of texts or images, or "
                "one text with places at which to try every word."
            )
        if self.places:
            listed = at_places(observation, listed, self.places, self.words)
        return make_entries(observation, listed, self.labels)


def _at_same_weights(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Return groups of uploads that can be averaged."""
    groups: list[list[Observation]] = []
    for observation in observations:
        for group in groups:
            if group[0].model is observation.model and can_average(group[0], observation):
                group.append(observation)
                break
        else:
            groups.append([observation])
    return groups


def _ranked(observation: Observation, entries: Entries, scores: Tensor, seconds: float) -> Ranked:
    """Return the ranking by K scores, which are NaN for candidates that time did not reach."""
    is_scored = ~scores.isnan()
    scores = scores.masked_fill(~is_scored, float(scores[is_scored].min()))
    best = [entries.inputs[int(k)] for k in scores.argsort(descending=True, stable=True)]
    best = best[: observation.batch_size]
    best += [best[-1]] * (observation.batch_size - len(best))  # a short list
    listed_scores = scores.new_full((entries.listed,), -torch.inf)
    listed_scores[entries.places] = scores
    posterior = torch.zeros_like(listed_scores)
    posterior[entries.places] = _posterior(scores, observation.batch_size)
    labels = observation.labels
    return Ranked(
        **_SHOWN[observation.domain.name](observation, best),
        labels=None if labels is None or labels.dim() != 1 else labels,
        objective=-float(scores.max()),
        seconds=seconds,
        scores=listed_scores,
        ranking=listed_scores.argsort(descending=True, stable=True),
        posterior=posterior,
        scored=int(is_scored.sum()),
        undecided=_unreached(is_scored),
        complete=bool(is_scored.all()),
    )


def _unreached(is_scored: Tensor) -> str:
    count = len(is_scored) - int(is_scored.sum())
    return f"Time was up before {count} of {len(is_scored)} candidates were scored." * bool(count)


def _texts(observation: Observation, best: list[Tensor]) -> dict[str, Any]:
    ids = [row[0, : observation.input_shape[1]].tolist() for row in best]
    return {"token_ids": ids, "text": as_text(ids, observation.tokenizer)}


def _images(observation: Observation, best: list[Tensor]) -> dict[str, Any]:
    return {"input": torch.cat(best)}


_SHOWN = {"text": _texts, "image": _images}


def _posterior(scores: Tensor, samples: int) -> Tensor:
    """Return the probability `(K,)` of each to be a sample, if all samples are candidates."""
    if samples >= len(scores):
        return torch.ones_like(scores)
    odds = membership_log_odds(scores.cpu().numpy(), samples)
    return torch.from_numpy(odds).to(scores).sigmoid()


def _check_together(observations: Sequence[Observation]) -> None:
    reference = observations[0]
    for observation in observations[1:]:
        if (
            observation.model is not reference.model
            or observation.domain is not reference.domain
            or observation.gradient.keys() != reference.gradient.keys()
            or observation.local != reference.local
        ):
            raise ValueError(
                "Observations that are attacked together must be of one model and kind of local "
                "training, with gradients of the same parameters. Attack the others by themselves."
            )
        if reference.local is not None and (observation.batch_size == 1) != (
            reference.batch_size == 1
        ):
            raise ValueError(
                "Updates of one sample are followed step by step, those of several to first order: "
                "do not attack them together, but by themselves."
            )
