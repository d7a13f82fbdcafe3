"""Verdicts on defenses: what attacks recovered, how sure that is, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...attacks.likelihood import Distinguishability

ENOUGH_MESSAGES = 5
"""Failing attacks on fewer messages say nothing. Four messages are all above chance by luck once in
16 times, and an interval of fewer than five says no more than that.
"""

INFORMED = ", knows the defense"
"""The end of an attack's label if its attacker knows the defense."""

PERCENTILE = "percentile"
"""The fraction of candidates outside the message that rank below a batch member; 0.5 is chance."""

TELLING = ("token_f1", "position_accuracy", "psnr", "ssim", PERCENTILE)
"""The scores that show a leak if they beat a guess. A few words in their places are no chance; nor
is noise with a face in it. For membership inference only the percentile counts: candidates drawn at
random are correct as often as there are few of them.
"""


@dataclass(frozen=True)
class MainScore:
    """The main score of a domain, and how it is named, scaled and shown.

    Args:
        name: The name of the score.
        sample: The word for one sample.
        verb: The verb for what an attack does with it.
        amount: The words behind the number in a sentence.
        scale: The factor from the score to `unit`.
        unit: The unit that it is shown in.
        digits: Digits after the point.
        legend: The score and its range, for a table's legend.
        note: A note on the score for readers.
        tick_step: The distance between ticks of an axis.
        axis_end: The least end of an axis.
        axis_limit: The farthest end. Larger values stand there: an exact copy would press all
            others together.
        clear_margin: How far above chance an attack has to be undefended, so that its failing says
            something of a defense.
        unit_of_change: The unit in which the two samples of a pair differ.
    """

    name: str
    sample: str
    verb: str
    amount: str
    scale: float
    unit: str
    digits: int
    legend: str
    note: str
    tick_step: float
    axis_end: float
    axis_limit: float
    clear_margin: float
    unit_of_change: str

    def format(self, mean: float) -> str:
        """Return a number as in a sentence: `"92 %"`."""
        return f"{self.scale * mean:.{self.digits}f} {self.unit}"

    def format_interval(self, low: float, high: float, between: str = ", ") -> str:
        """Return an interval behind a number: `" [85, 100]"`."""
        ends = (f"{self.scale * end:.{self.digits}f}" for end in (low, high))
        return f" [{between.join(ends)}]"

    def format_estimate(self, estimate: Estimate, between: str = ", ") -> str:
        """Return a number with its interval, if there is one: `"92 % [85, 100]"`."""
        text = self.format(estimate.mean)
        if estimate.low is None or estimate.high is None:
            return text
        return text + self.format_interval(estimate.low, estimate.high, between)

    def ticks(self, values: Iterable[float]) -> list[tuple[float, str]]:
        """Return where an axis from 0 has its ticks, with their labels; the last is its end."""
        highest = round(max([self.axis_end, *values]), 6)  # a mean of ones may be 1 + 2e-16
        count = math.ceil(min(highest, self.axis_limit) / self.tick_step)
        ends = ["≥ " * (k == count and highest > self.axis_limit) for k in range(count + 1)]
        return [
            (self.tick_step * k, f"{end}{self.scale * self.tick_step * k:.0f} {self.unit}")
            for k, end in enumerate(ends)
        ]


MAIN_SCORES = {
    "text": MainScore(
        name="token_f1", sample="text", verb="recovers", amount="of the words",
        scale=100, unit="%", digits=0, legend="token F1, from 0 to 1",
        note="The fraction of words is the token F1: precision and recall together, special "
        "tokens not counted.",
        tick_step=0.25, axis_end=1.0, axis_limit=1.0, clear_margin=0.25, unit_of_change="word",
    ),
    "image": MainScore(
        name="psnr", sample="image", verb="reaches", amount="PSNR",
        scale=1, unit="dB", digits=1, legend="PSNR in dB",
        note="PSNR in decibels: higher is nearer. Look at the images as well: no number says what "
        "a person recognizes.",
        tick_step=10.0, axis_end=30.0, axis_limit=40.0, clear_margin=5.0, unit_of_change="patch",
    ),
}  # fmt: skip
"""The main scores by the name of a domain."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95 % interval.

    Both ends are `None` if a single message gives no interval, however many samples it has.

    Args:
        mean: The mean over samples.
        low: The interval's lower end.
        high: The interval's upper end.

    Example:
        >>> Estimate(0.2, 0.1, 0.3).above_zero, Estimate(0.2).above_zero
        (True, False)
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low is not None and self.low > 0


@dataclass(frozen=True)
class AttackScores:
    """The scores of one attack under one defense.

    Args:
        defense: The defense's label.
        attack: The attack's label.
        scores: Estimates by score; empty if the attack gave nothing for any message.
        messages: The number of messages that the estimates are of.
        over_chance: The main score minus that of a guess, message by message.
        beats_chance: Which of `TELLING` scores are above a guess's, by intervals of the difference.
        below_itself: The main score of the same attack on the undefended gradient minus this one,
            message by message.
        below_strongest: The main score of the strongest attack on the undefended gradient minus
            this one; see `strongest_undefended`.
        reasons: Why the attack was not applicable to the other messages.
        crashes: How it failed on the others.
        knows_defense: Whether the attacker knows the defense, or there is nothing to know.
    """

    defense: str
    attack: str
    scores: dict[str, Estimate]
    messages: int
    over_chance: Estimate | None = None
    beats_chance: tuple[str, ...] = ()
    below_itself: Estimate | None = None
    below_strongest: Estimate | None = None
    reasons: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    knows_defense: bool = False

    @property
    def has_interval(self) -> bool:
        """Whether there are enough messages for an interval."""
        return self.over_chance is not None and self.over_chance.low is not None

    @property
    def is_at_chance(self) -> bool:
        """Whether the attack is no better than a guess, and messages are enough to say so."""
        return self.has_interval and not self.beats_chance

    @property
    def silence(self) -> str:
        """The words in place of scores, `"crashed"` or `"not applicable"`."""
        return "crashed" if self.crashes else "not applicable"

    def entry(self, score: str, messages: int) -> str:
        """Return a score as a table's entry.

        It names the number of messages behind it if it is not all of them.
        """
        if not self.scores:
            return self.silence
        coverage = f" ({self.messages} of {messages})" if self.messages < messages else ""
        return show(self.scores[score]) + coverage


@dataclass(frozen=True)
class Verdict:
    """The verdict of the audit on a defense.

    Args:
        defense: The defense's label.
        standing: The result of reconstruction: `"open"` (no different from sharing everything),
            `"reduced"`, `"chance"` (attacks do no better than guessing), or `"unknown"`. If no
            attack could reconstruct, the result of membership inference.
        text: The verdict in a sentence or two.
        recognized: Whether batch members are shown to be recognized among candidates; `None` if
            there were no candidates.
    """

    defense: str
    standing: str
    text: str
    recognized: bool | None = None


STANDINGS = {"open": "Leaks", "reduced": "Leaks less", "chance": "At chance", "unknown": "Unknown"}
"""The words for a verdict's standing."""


def base_of(label: str) -> str:
    """Return an attack's label without its attacker's knowledge of the defense.

    Example:
        >>> base_of("tag" + INFORMED), base_of("span")
        ('tag', 'span')
    """
    return label.removesuffix(INFORMED)


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Return labels without their settings, where they stay distinct."""
    names = [base_of(label).split(":")[0] + label[len(base_of(label)) :] for label in labels]
    pairs = zip(labels, names, strict=True)
    return {label: name if names.count(name) == 1 else label for label, name in pairs}


def show(value: Estimate) -> str:
    """Return a mean with its interval as text."""
    digits = 2 if abs(value.mean) < 10 else 1
    interval = "" if value.low is None else f" [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return f"{value.mean:.{digits}f}{interval}"


def show_mean(value: float | None) -> str:
    """Return a mean to three digits; an empty string if there is none."""
    if value is None:
        return ""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def show_coefficient(value: float | None) -> str:
    """Return a correlation to two digits."""
    return "–" if value is None else f"{value:+.2f}"


def strongest_undefended(
    row: AttackScores, undefended: Sequence[AttackScores], score: str
) -> AttackScores | None:
    """Return the undefended row of the highest score that has an interval.

    Membership inference is compared with membership inference, and reconstruction with
    reconstruction.
    """
    infers_members = PERCENTILE in row.scores
    measured = (rival for rival in undefended if rival.has_interval)
    comparable = [rival for rival in measured if (PERCENTILE in rival.scores) == infers_members]
    return max(comparable, key=lambda rival: rival.scores[score].mean, default=None)


def verdicts(
    rows: Sequence[AttackScores],
    chance: AttackScores,
    score: MainScore,
    samples: int,
    distinguishability: Mapping[str, Distinguishability | None],
    recognized: Mapping[str, tuple[bool, str]],
) -> list[Verdict]:
    """Return one verdict for each defense.

    Failing attacks prove nothing, and the words say no more. No defense is at chance if its
    messages distinguish a text from one with another word. Whether members are recognized among
    candidates stands beside it, and in a sentence.
    """
    judge, drawn_up = _Judge(rows, chance, score, samples), []
    for defense in dict.fromkeys(row.defense for row in rows):
        standing, text = judge.verdict(defense)
        pairs, (is_recognized, sentence) = distinguishability.get(defense), (None, "")
        if defense in recognized:
            is_recognized, sentence = recognized[defense]
        if pairs is not None and standing == "chance" and not pairs.is_at_chance:
            standing = "reduced"
        words = [text, sentence, distinguishing_rate(pairs, score) if pairs is not None else ""]
        drawn_up.append(Verdict(defense, standing, " ".join(filter(None, words)), is_recognized))
    return drawn_up


def distinguishing_rate(pairs: Distinguishability, score: MainScore) -> str:
    """Return a sentence on the rate at which messages distinguish the two texts of a pair.

    Example:
        >>> distinguishing_rate(Distinguishability(30, 32, 0.25, 160.0), MAIN_SCORES["text"])[-44:]
        'word was sent for 94 % [79, 99] of 32 pairs.'
        >>> distinguishing_rate(Distinguishability(17, 32, 0.25, 0.5), MAIN_SCORES["image"])[-32:]
        'not distinguishable from chance.'
    """
    low, high = pairs.interval
    rate = f"{100 * pairs.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of {pairs.pairs} pairs"
    pair = f"two {score.sample}s that differ in one {score.unit_of_change}"
    text = f"A message reveals which of {pair} was sent for {rate}"
    return text + (", which is not distinguishable from chance." if pairs.is_at_chance else ".")


class _Judge:
    """A judge that draws verdicts from intervals, and puts them in words."""

    def __init__(
        self, rows: Sequence[AttackScores], chance: AttackScores, score: MainScore, samples: int
    ) -> None:
        self.score, self.chance = score, chance
        self.scored = [row for row in rows if row.scores]
        self.undefended = [row for row in self.scored if row.defense == "none"]
        self.names = short_labels(list(dict.fromkeys(row.attack for row in rows)))
        self.data = f"this 1 {score.sample}" if samples == 1 else f"these {samples} {score.sample}s"

    def verdict(self, defense: str) -> tuple[str, str]:
        """Return the standing of a defense, and a sentence on it."""
        scored = [row for row in self.scored if row.defense == defense]
        if not scored:
            return "unknown", "No attack gave anything, so nothing is known."
        # What membership inference takes for a member is a whole text: it recovered no words.
        rows = [row for row in scored if PERCENTILE not in row.scores] or scored
        # An attack that works on one message must not outweigh others that work on more.
        measured = [row for row in rows if row.has_interval]
        best = max(measured or rows, key=self._main)
        if not measured:
            standing, text = "unknown", (
                f"{self._recovered(best, rows)}. One message gives no interval, so this is an "
                "anecdote: give more samples."
            )  # fmt: skip
        elif defense == "none":
            standing, text = self._without_defense(best, rows)
        elif any(row.beats_chance for row in rows):
            standing, text = self._leaking(best, rows)
        else:
            standing, text = self._at_chance(best, rows)
        return standing, text

    def _without_defense(self, best: AttackScores, rows: Sequence[AttackScores]) -> tuple[str, str]:
        recovered = self._recovered(best, rows)
        # Undefended, any score above chance shows that these attacks work.
        beaten = {score for row in rows for score in row.beats_chance}
        if beaten:
            # The sentence already gives the main score; another one has to be named.
            leak = "" if beaten & {self.score.name, PERCENTILE} else f" {self._leak(rows)}"
            return "open", f"{recovered}.{leak}{_weakness(rows)}"
        return "unknown", (
            f"{recovered}. These attacks fail even undefended: the audit says nothing about any "
            "defense. Give them more steps, or try others."
        )

    def _leaking(self, best: AttackScores, rows: Sequence[AttackScores]) -> tuple[str, str]:
        """Return the standing of a defense that leaks: whether it leaks less than undefended.

        It is compared with what the same attack recovers undefended, or what the strongest one
        does.
        """
        itself, name, weakness = best.below_itself, self.names[best.attack], _weakness(rows)
        drops = [drop for drop in (itself, best.below_strongest) if drop and drop.low is not None]
        recovered = self._recovered(best, rows)
        if not drops:
            lacking = "The undefended gradient was not attacked on the same messages."
            return "unknown", f"{recovered}. {self._leak(rows)} {lacking}{weakness}"
        # Neither below itself nor below the strongest attack: the defense takes nothing away.
        if not any(drop.above_zero for drop in drops):
            same = f"Against {name}, not distinguishable from no defense."
            return "open", f"{recovered}. {same}{weakness}"
        strongest = strongest_undefended(best, self.undefended, self.score.name)
        than = ""
        if strongest is not None:
            than = f"where undefended {self._does(strongest)}{self._coverage(strongest)}"
        text = f"{self._recovered(best, rows, than)}. {self._leak(rows)}"
        # Another attack fell, and this one recovers as much as before.
        if itself in drops and not itself.above_zero:
            text += f" It is no better than none against {name}."
        return "reduced", text + weakness

    def _at_chance(self, best: AttackScores, rows: Sequence[AttackScores]) -> tuple[str, str]:
        recovered, over = self._recovered(best, rows), best.over_chance
        undefended = self._undefended_like(best)
        if not any(row.beats_chance for row in undefended):
            # An attack that recovers nothing undefended has no evidence against a defense.
            why = "fail" if undefended else "may fail"
            untried = "" if undefended else ", which was not tried"
            return "unknown", (
                f"{recovered}. These attacks {why} undefended as well{untried}, so this says "
                "nothing."
            )
        if lacking := self._lacking_evidence(rows):
            return "unknown", f"{recovered}. {lacking}"
        infers_members = PERCENTILE in best.scores
        is_below = not infers_members and over is not None and (over.high or 0) < 0
        luck = "a random draw of candidates" if infers_members else "chance"
        standing = "No better than chance" if is_below else f"Not distinguishable from {luck}"
        return "chance", f"{recovered}. {standing} under these attacks on {self.data}."

    def _lacking_evidence(self, rows: Sequence[AttackScores]) -> str:
        """Return why failing attacks say nothing of a defense, or an empty string.

        It is empty if an attack knows the defense, recovers undefended data, and had enough
        messages.
        """
        informed = [row for row in rows if row.knows_defense]
        if not informed:
            return "No attacker that knows the defense was tried, so this says nothing."
        beating = (row for row in self._undefended_like(rows[0]) if row.beats_chance)
        working = {row.attack for row in beating if self._is_clear(row)}
        telling = [row for row in informed if base_of(row.attack) in working]
        if not telling:
            return (
                "Attackers that know the defense hardly recover undefended data, so this says "
                "nothing."
            )
        # Few messages prove a leak, and never its absence.
        if max(row.messages for row in telling) < ENOUGH_MESSAGES:
            return (
                f"Fewer than {ENOUGH_MESSAGES} messages do not say that attacks fail: give more "
                "samples."
            )
        for row in rows:
            if not row.has_interval and self._is_clear(row):
                return (
                    f"{self.names[row.attack]} recovers the one message that it works on, so this "
                    "says nothing: give more samples."
                )
        return ""

    def _undefended_like(self, row: AttackScores) -> list[AttackScores]:
        """Return undefended rows that reconstruct as this row does, or infer members as it does."""
        infers_members = PERCENTILE in row.scores
        return [r for r in self.undefended if (PERCENTILE in r.scores) == infers_members]

    def _is_clear(self, row: AttackScores) -> bool:
        """Return whether an attack is well above chance, by an interval if there is one."""
        over = row.over_chance
        if over is None or over.mean < self.score.clear_margin:
            return False
        return over.above_zero or not row.has_interval

    def _main(self, row: AttackScores) -> float:
        return row.scores[PERCENTILE if PERCENTILE in row.scores else self.score.name].mean

    def _short(self, row: AttackScores) -> str:
        if PERCENTILE in row.scores:
            return f"{100 * self._main(row):.0f} %"
        return self.score.format(self._main(row))

    def _does(self, row: AttackScores) -> str:
        """Return the words for what an attack does, and how much."""
        verb = "ranks members above" if PERCENTILE in row.scores else self.score.verb
        return f"{self.names[row.attack]} {verb} {self._short(row)}"

    def _coverage(self, row: AttackScores) -> str:
        """Return the words for how many messages a row is of, if not of all."""
        # Chance is scored on every message.
        if row.messages >= self.chance.messages:
            return ""
        return f" on {row.messages} of {self.chance.messages} messages"

    def _recovered(self, best: AttackScores, rows: Sequence[AttackScores], than: str = "") -> str:
        """Return what the attacks recovered, the strongest first, and what a guess has."""
        infers_members = PERCENTILE in best.scores
        amount = "of the other candidates" if infers_members else self.score.amount
        value = best.scores[PERCENTILE if infers_members else self.score.name]
        text = f"{self._does(best)} {amount}"
        if value.low is not None and value.high is not None:
            score = MAIN_SCORES["text"] if infers_members else self.score  # percentiles are shares
            text += score.format_interval(value.low, value.high)
        weaker = [
            f"{self.names[row.attack]} {self._short(row)}{self._coverage(row)}"
            for row in rows
            if row is not best
        ]
        text += self._coverage(best) + (f" ({', '.join(weaker)})" if weaker else "")
        text += f", {than}" if than else ""
        guess = "50 %" if infers_members else self._short(self.chance)
        return f"{text}; chance is {guess}"

    def _leak(self, rows: Sequence[AttackScores]) -> str:
        """Return the sentence that names a score in which some attack is better than chance."""
        if any({self.score.name, PERCENTILE} & {*row.beats_chance} for row in rows):
            return "Better than chance: it still leaks."
        row = next(row for row in rows if row.beats_chance)
        score = row.beats_chance[0]
        numbers = f"{row.scores[score].mean:.2f} against {self.chance.scores[score].mean:.2f}"
        better = f"{self.names[row.attack]} is better than chance ({numbers})"
        return f"In {score} {better}: it still leaks."


def _weakness(rows: Sequence[AttackScores]) -> str:
    """Return a note on a leak that few messages show, or an empty string."""
    if max(row.messages for row in rows if row.beats_chance) >= ENOUGH_MESSAGES:
        return ""
    return f" Fewer than {ENOUGH_MESSAGES} messages are weak evidence: give more samples."
