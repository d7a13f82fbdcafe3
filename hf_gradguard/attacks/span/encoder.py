"""An encoder's sentences, from each position's tokens and gradients behind its attention.

These gradients decide which tokens stood together. If noise is little more than rounding, and a
token of each sentence is known, sentences are solved for. Otherwise they are searched: attention
averages over a sentence, so that a text with tokens of several is the nearer to the gradients' span
the more of them are of one, and going down from any start, one token at a time, ends at a whole
sentence. Each is looked for by itself, from tokens that no sentence has used up yet.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..base import ENDLESS, Clock, Observation
from ..layer_inputs import Slots
from .first_attention import FirstAttention
from .program import SentenceProgram
from .row_space import View
from .sentences import NEAR, Explained, Pool, Text, choose, distance_outside, vectors_of

SWEEPS, ROUNDS = 40, 4
ROUNDS_NOISELESS, MOST_ENUMERATED = (
    12,
    1024,
)  # rounds, and texts that are all tried, where nothing but rounding is noise
SURE = 0.5  # trust in the least sure direction of a span that sentences are solved with
NEAREST = 4  # texts of all those tried that run through the whole model
STARTS = 4  # at most for each sentence that is looked for
ATTEMPTS, LEFT_IN = 4, 0.1  # to solve for each, and the share of others' words that each lets in
MOST_ENTRIES = 2**26  # of a program's matrix: 512 MiB. Of larger ones sentences are searched.

_logger = logging.getLogger(__name__)


def assemble_texts(
    observation: Observation, views: Sequence[View], slots: Slots, filled: Tensor, unmixed: View,
    clock: Clock = ENDLESS,
) -> Tensor:  # fmt: skip
    """Return an encoder's sentences.

    Args:
        observation: The observation of the server.
        views: Layers whose input depends on the whole sentence.
        slots: Known and candidate tokens of every position.
        filled: The surest tokens of every position, in no order, `(B, T)`.
        unmixed: The layers in front of the attention: their span is explained by tokens at their
            places, whatever stands beside them.
        clock: A clock; when it is over, the nearest texts so far are taken.

    Returns:
        `(B, T)` ids, -1 where nothing was looked for or found.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = [group for group in find_projections(seen) if group.mixing == "full"][:2]
        >>> views = [View(r, row_space(r.gradients(observation), None, rank=13)) for r in mixed]
        >>> ids, attended = batch["input_ids"], batch["attention_mask"].bool()
        >>> candidate_ids = {position: ids[:, position].tolist() for position in range(1, 7)}
        >>> slots = Slots(attended, ids.masked_fill((ids > 4) & attended, -1), candidate_ids)
        >>> rows = assemble_texts(observation, views, slots, ids, views[0])
        >>> sorted(rows.tolist()) == sorted(ids.tolist())
        True
    """
    attended, rows = slots.attended, slots.known_ids.clone()
    pools = _pools(observation, views, slots, unmixed.projections.positional, clock)
    for index, text in enumerate(choose(observation, [unmixed, *views], pools)):
        rows[index, attended[index]] = torch.tensor(text, dtype=torch.long, device=rows.device)
    is_near = _are_near(observation, views, attended, rows)
    distinct = len(rows[is_near].unique(dim=0))
    if distinct == len(rows):
        return rows
    # Noise, or a text that was not found, or one that is there twice: all tokens of a place are
    # used before nearer texts are, but for those that are as near as only right ones are.
    exchanged = exchange(observation, views, slots, filled, clock)
    is_nearer = _are_near(observation, views, attended, exchanged)
    if bool(is_near.all()) and not bool(is_nearer.all()):
        # Whether they leave no token over that the exchanged ones use: they explain as much of
        # what the first layers read, to within half a token.
        misfits = [misfit(observation, [unmixed], attended, texts) for texts in (rows, exchanged)]
        if misfits[0] < misfits[1] + 0.5:
            return rows
    if unmixed.projections.positional and int(is_nearer.sum()) >= distinct:
        return exchanged
    return min((exchanged, rows), key=lambda texts: misfit(observation, views, attended, texts))


def _pools(
    observation: Observation, views: Sequence[View], slots: Slots, positional: bool, clock: Clock
) -> list[Pool]:
    """Return for each row the whole sentences that may be there, with their distances."""
    patterns: dict[tuple[tuple[bool, ...], Text], list[int]] = {}
    rows = zip(slots.attended.tolist(), slots.known_ids.tolist(), strict=True)
    for index, (present, known_text) in enumerate(rows):
        patterns.setdefault((tuple(present), tuple(known_text)), []).append(index)
    pools: list[Pool] = [{} for _ in slots.attended]
    candidate_ids = slots.candidate_ids
    surest = len(pools) if positional else max(map(len, candidate_ids.values()), default=0)
    used: set[tuple[int, int]] = set()
    searches = {
        key: _Descent(observation, views, *key, candidate_ids, surest, len(indices), clock)
        for key, indices in patterns.items()
    }
    if (attention := _first_attention(observation, views, slots)) is not None:
        # First those that are alone of their length. What is left is solved beside all others.
        in_order = sorted(searches.values(), key=lambda search: search.count)
        for attempts in (1, ATTEMPTS):
            for search in in_order:
                search.solve(attention, used, attempts)
            if not any(search.correct for search in in_order):
                break
    for key, indices in patterns.items():
        pool = searches[key].sentences(used)
        for index in indices:
            pools[index] = pool
    return pools


def _first_attention(
    observation: Observation, views: Sequence[View], slots: Slots
) -> FirstAttention | None:
    """Return the attention that sentences are solved with, or `None` if they are not."""
    whole_views = list(itertools.takewhile(partial(_is_whole, slots=slots), views[:2]))
    if not whole_views or not bool((slots.known_ids >= 0).any()):
        return None
    try:
        attention = FirstAttention(observation, whole_views)
    except (TypeError, RuntimeError, ValueError) as error:
        _logger.warning(
            "span searches sentences where it would solve for them: a copy of the model does not "
            "run in float64 (%s).", error
        )  # fmt: skip
        return None
    return attention if attention.is_average else None


def _is_whole(view: View, slots: Slots) -> bool:
    """Return whether all directions of the span stand out of the noise."""
    rank = int(slots.attended.sum()) * view.projections.calls
    is_found = view.space.ends or len(view.directions) >= rank
    return is_found and not view.projections.pooled and float(view.trust.min()) > SURE


def _are_near(
    observation: Observation, views: Sequence[View], attended: Tensor, rows: Tensor
) -> Tensor:
    """Return whether each text is as near as only correct ones are, `(B,)`."""
    return distance_outside(observation, views, rows, attended) < NEAR * attended.sum(1)


def misfit(
    observation: Observation, views: Sequence[View], attended: Tensor, rows: Tensor
) -> float:
    """Return what texts `(B, T)` leave outside the views' spans, and unexplained of them.

    It counts dimensions.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> views = [View(mixed, row_space(mixed.gradients(observation), None, rank=13))]
        >>> attended = batch["attention_mask"].bool()
        >>> wrong = batch["input_ids"].clone()
        >>> wrong[:, 1] = wrong[:, 1].flip(0)  # the first word of the other sentence
        >>> correct = misfit(observation, views, attended, batch["input_ids"])
        >>> correct < misfit(observation, views, attended, wrong)
        True
    """
    explained = Explained(views)
    ids = rows.clamp(min=0)
    texts = [row[present].tolist() for row, present in zip(ids, attended, strict=True)]
    for vectors in vectors_of(observation, views, texts):
        explained.add(vectors)
    return float(distance_outside(observation, views, rows, attended).sum()) + explained.total


def exchange(
    observation: Observation, views: Sequence[View], slots: Slots, rows: Tensor,
    clock: Clock = ENDLESS,
) -> Tensor:  # fmt: skip
    """Swap tokens at a position between sentences while they get nearer the views' spans.

    Args:
        observation: The observation of the server.
        views: Layers whose input depends on the whole sentence.
        slots: Where tokens are, and which are known.
        rows: Ids to start from, `(B, T)`.
        clock: A clock; when it is over, texts stay as they are by then.

    Returns:
        `(B, T)` ids.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = [group for group in find_projections(seen) if group.mixing == "full"][:2]
        >>> views = [View(r, row_space(r.gradients(observation), None, rank=13)) for r in mixed]
        >>> ids, attended = batch["input_ids"], batch["attention_mask"].bool()
        >>> slots = Slots(attended, torch.full_like(ids, -1))
        >>> swapped = ids.clone()
        >>> swapped[:, 1] = ids[:, 1].flip(0)  # the first word of the other sentence
        >>> torch.equal(exchange(observation, views, slots, swapped), ids)
        True
    """
    rows, attended, is_unknown = rows.clone(), slots.attended, slots.is_unknown
    current = distance_outside(observation, views, rows, attended)
    for _ in range(SWEEPS // 5):
        changed = False
        for place in range(rows.shape[1]):
            text_indices = is_unknown[:, place].nonzero().flatten().tolist()
            every_pair = itertools.combinations(text_indices, 2)
            text_pairs = [(i, j) for i, j in every_pair if rows[i, place] != rows[j, place]]
            if not text_pairs or clock.must_stop():
                continue
            pairs = torch.tensor(text_pairs, device=rows.device)
            swapped = rows[pairs]  # (pairs, 2, T)
            swapped[:, :, place] = rows[pairs.flip(1), place]
            flat, masks = swapped.flatten(0, 1), attended[pairs].flatten(0, 1)
            new_distances = distance_outside(observation, views, flat, masks)
            gains = (current[pairs] - new_distances.view(-1, 2)).sum(1)
            best = int(gains.argmax())
            if gains[best] > 1e-9 * current.sum():
                rows[pairs[best]] = swapped[best]
                current[pairs[best]] = new_distances.view(-1, 2)[best]
                changed = True
        if not changed:
            break
    return rows


class _Descent:
    """A search for sentences of one length, with the same known tokens."""

    def __init__(
        self,
        observation: Observation,
        views: Sequence[View],
        present: tuple[bool, ...],
        known_text: Text,
        candidate_ids: dict[int, list[int]],
        surest: int,
        count: int,
        clock: Clock,
    ) -> None:
        self.observation, self.views, self.surest = observation, views, surest
        self.count, self.clock = count, clock
        self.pool: Pool = {}
        self.program: SentenceProgram | None = None
        self.generator = torch.Generator().manual_seed(0)
        self.mask = torch.tensor(present, device=observation.device)
        self.near = NEAR * sum(present)
        self.known_text = torch.tensor(known_text, device=observation.device)
        self.tokens = {
            place: torch.tensor(candidate_ids[place], device=observation.device)
            for place in range(len(present))
            if present[place] and known_text[place] < 0 and candidate_ids.get(place)
        }

    @property
    def correct(self) -> Pool:
        """The sentences that are as near as only correct ones are."""
        return {text: distance for text, distance in self.pool.items() if distance < self.near}

    def solve(self, attention: FirstAttention, used: set[tuple[int, int]], attempts: int) -> None:
        """Solve for sentences, each beside those that were found.

        Args:
            attention: The attention that gives the equations.
            used: `(place, token)` that sentences use so far, as for `sentences`.
            attempts: The number of attempts for each sentence.
        """
        places = self.mask.nonzero().flatten().tolist()
        known_ids = {p: int(self.known_text[p]) for p in places if self.known_text[p] >= 0}
        if len(known_ids) + len(self.tokens) < len(places) or not (known_ids and self.tokens):
            return
        choices = sum(map(len, self.tokens.values()))
        if attention.heads * attention.num_equations * choices > MOST_ENTRIES:
            return
        for attempt in range(attempts * self.count):
            if len(self.correct) >= self.count or self.clock.must_stop():
                break
            if self.program is None:
                self.program = SentenceProgram(attention, known_ids, self.tokens, self.clock)
            words = sorted({token for _, token in used})
            draws = torch.rand(len(words), generator=self.generator).tolist()
            words = [w for w, draw in zip(words, draws, strict=True) if draw >= LEFT_IN * attempt]
            row = self.known_text.clamp(min=0)
            ids = self.program.sentence(self.generator, words)
            row[list(self.tokens)] = torch.tensor(ids, device=row.device)
            self._note(row[None], self._distances(row[None], self.views), used)

    def sentences(self, used: set[tuple[int, int]]) -> Pool:
        """Return whole sentences with their distances.

        Args:
            used: `(place, token)` that sentences use so far; what is found here is added.
        """
        if len(self.correct) < self.count:
            for rows, distances in self._tries(used):
                self._note(rows, distances, used)
                if len(self.correct) >= self.count or self.clock.must_stop():
                    break
        return self.correct if len(self.correct) >= self.count else self.pool

    def _note(self, rows: Tensor, distances: Tensor, used: set[tuple[int, int]]) -> None:
        for row, distance in zip(rows, distances.tolist(), strict=True):
            text = tuple(row[self.mask].tolist())
            self.pool[text] = min(distance, self.pool.get(text, distance))
            if distance < self.near:
                used |= {(place, int(row[place])) for place in self.tokens}

    def _tries(self, used: set[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield texts and their distances, from other starts each time.

        Rounding decides which start leads where. If that is the only noise, all texts come last if
        they are few.
        """
        exact = any(view.space.ends for view in self.views)
        for turn in range((ROUNDS_NOISELESS if exact else ROUNDS) if self.tokens else 1):
            starts, anchor = self._starts(used, turn, STARTS * self.count)
            yield self.descend(starts, anchor, self.count if turn == 0 else None)
        if exact and self.tokens and math.prod(map(len, self.tokens.values())) <= MOST_ENUMERATED:
            rows = self._all_texts()
            distances = self._distances(rows, self.views)
            nearest = distances.argsort()[: self.count]
            yield rows[nearest], distances[nearest]

    def _all_texts(self) -> Tensor:
        """Return all texts of these tokens, `(N, T)`."""
        chosen = torch.cartesian_prod(*self.tokens.values()).view(-1, len(self.tokens))
        rows = self.known_text.clamp(min=0).repeat(len(chosen), 1)
        rows[:, list(self.tokens)] = chosen.to(rows.dtype)
        return rows

    def _starts(self, used: set[tuple[int, int]], turn: int, max_starts: int) -> tuple[Tensor, int]:
        """Return texts to start from, `(S, T)`, and the place in which they differ.

        That place has the fewest tokens to choose from, and there is one text for each of the
        surest tokens left over there.
        """
        row = self.known_text.clamp(min=0)
        if not self.tokens:
            return row[None], -1
        remaining = {
            place: [token for token in tokens.tolist() if (place, token) not in used]
            or tokens.tolist()
            for place, tokens in self.tokens.items()
        }
        counts = {place: len(tokens) for place, tokens in self.tokens.items()}
        anchor = min(remaining, key=lambda place: (counts[place] < 2, counts[place]))
        remaining[anchor] = remaining[anchor][:max_starts]
        starts = row.repeat(len(remaining[anchor]), 1)
        for place, tokens in remaining.items():
            starts[:, place] = torch.tensor(
                [tokens[(i + turn * place) % len(tokens)] for i in range(len(starts))],
                device=row.device,
            )
        starts[:, anchor] = torch.tensor(remaining[anchor], device=row.device)
        return starts, anchor

    def descend(self, rows: Tensor, anchor: int, count: int | None) -> tuple[Tensor, Tensor]:
        """Take at every place the token that brings the text nearest, and exchange pairs of them.

        It repeats this until nothing gets nearer. First it uses only the attention's output and the
        surest tokens, and keeps the anchor. If word and position add up, that decides which tokens
        are of a sentence and not their order. The layers behind it decide that, and do not need the
        starts that stayed far, except for `count`. Layers that read whole texts run the whole
        model, and come last.
        """
        rows = rows.clone()
        surest_tokens = {
            p: tokens[: self.surest] for p, tokens in self.tokens.items() if p != anchor
        }
        position_views = _position_views(self.views)
        stages = [(self.views[:1], surest_tokens)] if count is not None else []
        stages += [(position_views, self.tokens)] if position_views else []
        for views, choice in stages:
            rows, distances = self._descend_by(rows, self._distances(rows, views), views, choice)
            if count is not None:
                rows = rows[distances.argsort()[: count + 1]].unique(dim=0)
        return self._descend_by(rows, self._distances(rows, self.views), self.views, self.tokens)

    def _distances(self, rows: Tensor, views: Sequence[View]) -> Tensor:
        return distance_outside(self.observation, views, rows, self.mask.expand_as(rows))

    def _descend_by(
        self, rows: Tensor, distances: Tensor, views: Sequence[View], choice: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        for _ in range(SWEEPS):
            if self.clock.must_stop():
                break
            previous = rows.clone()
            for place, tokens in choice.items():
                if len(tokens) > 1 and not self.clock.must_stop():
                    tried = rows[:, None].repeat(1, len(tokens), 1)
                    tried[:, :, place] = tokens
                    self._improve(rows, distances, tried, views)
            is_same = torch.equal(rows, previous)
            if is_same and choice is self.tokens and not self.clock.must_stop():
                self._reorder(rows, distances, views)
            if torch.equal(rows, previous):
                break
        return rows, distances

    def _reorder(self, rows: Tensor, best: Tensor, views: Sequence[View]) -> None:
        """Exchange two tokens of each text, or move one, if that brings the text nearer.

        The best exchange or move is made.
        """
        places = list(self.tokens)
        orders = []
        for i in range(len(places)):
            for j in range(len(places)):
                exchanged, moved = list(places), list(places)
                exchanged[i], exchanged[j] = places[j], places[i]
                moved.insert(j, moved.pop(i))
                orders += [exchanged] * (i < j) + [moved] * (abs(i - j) > 1)
        if orders:
            tried = rows[:, None].repeat(1, len(orders), 1)
            tried[:, :, places] = rows[:, torch.tensor(orders, device=rows.device)]
            self._improve(rows, best, tried, views)

    def _improve(self, rows: Tensor, current: Tensor, tried: Tensor, views: Sequence[View]) -> None:
        """Put the nearest of the texts tried, `(S, K, T)`, in place of a row that is farther.

        If there are many, the whole model runs only on those that are nearest within its first
        block.
        """
        position_views = _position_views(views)
        if position_views and tried.shape[1] > NEAREST:
            distances = self._distances(tried.flatten(0, 1), position_views).view(tried.shape[:2])
            nearest = distances.topk(NEAREST, largest=False).indices
            tried = tried[torch.arange(len(rows), device=rows.device)[:, None], nearest]
        distances, which = self._distances(tried.flatten(0, 1), views).view(len(rows), -1).min(1)
        better = distances < current * (1 - 1e-9)
        rows[better] = tried[better, which[better]]
        current[better] = distances[better]


def _position_views(views: Sequence[View]) -> list[View]:
    """Return the views that read positions near the model's start, if others read whole texts."""
    position_views = [view for view in views if not view.projections.pooled]
    return position_views if len(position_views) < len(views) else []
