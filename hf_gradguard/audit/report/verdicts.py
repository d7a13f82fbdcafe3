"""Verdicts on defenses: what attacks recovered, how sure that is, and how it is said."""

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
"""What the label of an attack ends with where it is set by an attacker that knows the defense."""

PERCENTILE = "percentile"
"""Which share of candidates outside the message rank below a batch member: 0.5 is chance."""

TELLING = ("token_f1", "position_accuracy", "psnr", "ssim", PERCENTILE)
"""Scores that show a leak if they beat a guess. Few words, each in its place, are no chance; nor is
noise with a face in it. Of membership inference the percentile alone counts: candidates drawn at
random are right as often as there are few of them.
"""


@dataclass(frozen=True)
class MainScore:
    """The main score of a domain: how it is named, scaled and shown.

    Args:
        name: Of the score.
        sample: What one sample is called.
        verb: What an attack does with it.
        amount: What follows a number of it in a sentence.
        scale: What it is multiplied by to be in `unit`.
        unit: That it is shown in.
        digits: After the point.
        legend: The score and its range, for a table's legend.
        note: What a reader should know of it.
        tick_step: Between ticks of an axis.
        axis_end: The least end of an axis.
        axis_limit: The farthest end. What is more stands there: an exact copy would press all
            others together.
        clear_margin: How far above chance an attack has to be undefended, so that its failing says
            something of a defense.
        unit_of_change: In what two samples differ that are to be told apart.
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
        """A number in a sentence: `"92 %"`."""
        return f"{self.scale * mean:.{self.digits}f} {self.unit}"

    def format_interval(self, low: float, high: float, between: str = ", ") -> str:
        """An interval behind a number: `" [85, 100]"`."""
        ends = (f"{self.scale * end:.{self.digits}f}" for end in (low, high))
        return f" [{between.join(ends)}]"

    def format_estimate(self, estimate: Estimate, between: str = ", ") -> str:
        """A number with its interval, if there is one: `"92 % [85, 100]"`."""
        text = self.format(estimate.mean)
        if estimate.low is None or estimate.high is None:
            return text
        return text + self.format_interval(estimate.low, estimate.high, between)

    def ticks(self, values: Iterable[float]) -> list[tuple[float, str]]:
        """Where an axis from 0 has its ticks, with their labels. The last one is its end."""
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
        note="A share of words is the token F1: precision and recall together, special tokens not "
        "counted.",
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
"""By a domain's name."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95 % interval. Both ends are `None` where a single message gives
    no interval, however many samples it has.

    Args:
        mean: Over samples.
        low: The interval's lower end.
        high: Its upper end.

    Example:
        >>> Estimate(0.2, 0.1, 0.3).above_zero, Estimate(0.2).above_zero
        (True, False)
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def above_zero(self) -> bool:
        """Whether the interval is."""
        return self.low is not None and self.low > 0


@dataclass(frozen=True)
class AttackScores:
    """One attack under one defense.

    Args:
        defense: Label of the defense.
        attack: Label of the attack.
        scores: Estimates by score; empty if the attack gave nothing for any message.
        messages: Messages that the estimates are of.
        over_chance: Main score minus that of a guess, message by message.
        beats_chance: Which of `TELLING` scores are above a guess's, by intervals of the difference.
        below_itself: Main score of the same attack on the undefended gradient minus this one,
            message by message.
        below_strongest: The same with the strongest attack on it; see `strongest_undefended`.
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
        """Whether there are messages enough for an interval."""
        return self.over_chance is not None and self.over_chance.low is not None

    @property
    def is_at_chance(self) -> bool:
        """Whether an attack is no better than a guess, and messages are enough to say so."""
        return self.has_interval and not self.beats_chance

    @property
    def silence(self) -> str:
        """What stands in place of scores."""
        return "crashed" if self.crashes else "not applicable"

    def entry(self, score: str, messages: int) -> str:
        """A score in a table, with how many of the messages it is of."""
        if not self.scores:
            return self.silence
        coverage = f" ({self.messages} of {messages})" if self.messages < messages else ""
        return show(self.scores[score]) + coverage


@dataclass(frozen=True)
class Verdict:
    """What the audit says of a defense.

    Args:
        defense: Its label.
        standing: Of reconstruction: `"open"` (no different from sharing everything), `"reduced"`,
            `"chance"` (attacks do no better than guessing), or `"unknown"`. Where no attack could
            reconstruct, the same of membership inference.
        text: The same in a sentence or two.
        recognized: Whether batch members are shown to be recognized among candidates; `None` where
            there were no candidates.
    """

    defense: str
    standing: str
    text: str
    recognized: bool | None = None


STANDINGS = {"open": "Leaks", "reduced": "Leaks less", "chance": "At chance", "unknown": "Unknown"}
"""What a person reads of a verdict's standing."""


def base_of(label: str) -> str:
    """The attack without its attacker's knowledge of the defense.

    Example:
        >>> base_of("tag" + INFORMED), base_of("span")
        ('tag', 'span')
    """
    return label.removesuffix(INFORMED)


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Labels without their settings, where they stay distinct."""
    names = [base_of(label).split(":")[0] + label[len(base_of(label)) :] for label in labels]
    pairs = zip(labels, names, strict=True)
    return {label: name if names.count(name) == 1 else label for label, name in pairs}


def show(value: Estimate) -> str:
    """A mean with its interval."""
    digits = 2 if abs(value.mean) < 10 else 1
    interval = "" if value.low is None else f" [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return f"{value.mean:.{digits}f}{interval}"


def show_mean(value: float | None) -> str:
    """A mean to three digits; nothing where there is none."""
    if value is None:
        return ""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def show_coefficient(value: float | None) -> str:
    """A correlation to two digits."""
    return "–" if value is None else f"{value:+.2f}"


def strongest_undefended(
    row: AttackScores, undefended: Sequence[AttackScores], score: str
) -> AttackScores | None:
    """The undefended row of the highest score, of several messages. Membership inference is
    compared with membership inference, and reconstruction with reconstruction.
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
    """One verdict for each defense. Failing attacks prove nothing, and the words say no more: no
    defense is at chance whose messages tell a text from one with another word. Whether members are
    recognized among candidates stands beside it, by defense, and in a sentence.
    """
    judge, drawn_up = _Judge(rows, chance, score, samples), []
    for defense in dict.fromkeys(row.defense for row in rows):
        standing, text = judge.verdict(defense)
        pairs, (is_recognized, sentence) = distinguishability.get(defense), (None, "")
        if defense in recognized:
            is_recognized, sentence = recognized[defense]
        if pairs is not None and standing == "chance" and not pairs.is_at_chance:
            standing = "reduced"
        words = [text, sentence, told_apart(pairs, score) if pairs is not None else ""]
        drawn_up.append(Verdict(defense, standing, " ".join(filter(None, words)), is_recognized))
    return drawn_up


def told_apart(pairs: Distinguishability, score: MainScore) -> str:
    """How many pairs a message tells apart, in a sentence.

    Example:
        >>> told_apart(Distinguishability(30, 32, 0.25, 160.0), MAIN_SCORES["text"])[-50:]
        ' message tells which in 94 % [79, 99] of 32 pairs.'
        >>> told_apart(Distinguishability(17, 32, 0.25, 0.5), MAIN_SCORES["image"])[-32:]
        'not distinguishable from chance.'
    """
    low, high = pairs.interval
    rate = f"{100 * pairs.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of {pairs.pairs} pairs"
    pair = f"two {score.sample}s that differ in one {score.unit_of_change}"
    text = f"Of {pair}, a message tells which in {rate}"
    return text + (": not distinguishable from chance." if pairs.is_at_chance else ".")


class _Judge:
    """Draws verdicts from intervals, and puts them in words."""

    def __init__(
        self, rows: Sequence[AttackScores], chance: AttackScores, score: MainScore, samples: int
    ) -> None:
        self.score, self.chance = score, chance
        self.scored = [row for row in rows if row.scores]
        self.undefended = [row for row in self.scored if row.defense == "none"]
        self.names = short_labels(list(dict.fromkeys(row.attack for row in rows)))
        self.data = f"this 1 {score.sample}" if samples == 1 else f"these {samples} {score.sample}s"

    def verdict(self, defense: str) -> tuple[str, str]:
        """The standing, and the same in words."""
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
        """Whether a leaking defense leaks less than the same attack recovers undefended, or than
        the strongest one does.
        """
        itself, name, weakness = best.below_itself, self.names[best.attack], _weakness(rows)
        drops = [drop for drop in (itself, best.below_strongest) if drop and drop.low is not None]
        recovered = self._recovered(best, rows)
        if not drops:
            lacking = "Undefended was not tried on the same messages."
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
        """Why failing attacks say nothing of a defense. Empty if one of them knows the defense,
        recovers undefended data, and had messages enough.
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
        """Undefended, what reconstructs as the row does; or what infers members as it does."""
        infers_members = PERCENTILE in row.scores
        return [r for r in self.undefended if (PERCENTILE in r.scores) == infers_members]

    def _is_clear(self, row: AttackScores) -> bool:
        """Whether an attack is well above chance, by an interval if there is one."""
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
        """What an attack does, and how much."""
        verb = "ranks members above" if PERCENTILE in row.scores else self.score.verb
        return f"{self.names[row.attack]} {verb} {self._short(row)}"

    def _coverage(self, row: AttackScores) -> str:
        """Of how many messages a row is, if not of all."""
        # Chance is scored on every message.
        if row.messages >= self.chance.messages:
            return ""
        return f" on {row.messages} of {self.chance.messages} messages"

    def _recovered(self, best: AttackScores, rows: Sequence[AttackScores], than: str = "") -> str:
        """What the attacks recovered, the strongest first, and what a guess has."""
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
        """In which score some attack is better than chance."""
        if any({self.score.name, PERCENTILE} & {*row.beats_chance} for row in rows):
            return "Better than chance: it still leaks."
        row = next(row for row in rows if row.beats_chance)
        score = row.beats_chance[0]
        numbers = f"{row.scores[score].mean:.2f} against {self.chance.scores[score].mean:.2f}"
        better = f"{self.names[row.attack]} is better than chance ({numbers})"
        return f"In {score} {better}: it still leaks."


def _weakness(rows: Sequence[AttackScores]) -> str:
    """What is to be said of a leak that few messages show."""
    if max(row.messages for row in rows if row.beats_chance) >= ENOUGH_MESSAGES:
        return ""
    return f" Fewer than {ENOUGH_MESSAGES} messages are weak evidence: give more samples."
