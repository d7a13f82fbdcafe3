"""Does `gradguard recommend` choose the same defense twice, and never a leaky one?"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hf_gradguard.audit.report.verdicts import MAIN_SCORES, MainScore
from hf_gradguard.audit.run import make_defenses
from hf_gradguard.recommend import Outcome, choose
from hf_gradguard.recommend.choice import finalists
from hf_gradguard.recommend.intervals import mean_over_seeds
from hf_gradguard.recommend.trial_settings import DEFAULT_DEFENSES, TrialSettings

from ..study import Study
from .frontier_tables import _right
from .lib.results import PUBLISHED, Results
from .lib.tables import write_table


class Frontier(NamedTuple):
    """Published cells that recommendations are drawn from.

    Args:
        output: Their results.
        kind: Of the data, as scores are named.
        attacks: Reconstructions of single samples, which `recommend` runs too.
        guess: Main score of a guess.
    """

    output: str
    kind: str
    attacks: tuple[str, ...]
    guess: float


FRONTIERS = {
    "MiniLM, SST-2": Frontier("frontier_text", "text", ("span", "tag"), 0.05),
    "convolutions, CIFAR-10": Frontier("frontier_images", "image", ("inverting_gradients",), 12.1),
}
JUDGED = 1000  # samples, as `recommend` judges on at most
LEAKY = {"text": 1 / 3, "image": 5.0}  # a share of the words; decibels above a guess


class DefenseCells(NamedTuple):
    """All that the frontier has of one defense.

    Args:
        right: Of each training, which test rows are right.
        scores: Of each attack and stage, the main scores of all messages.
    """

    right: list[np.ndarray]
    scores: dict[tuple[str, str], list[float]]

    def worst(self) -> tuple[tuple[str, str], float]:
        """The attack and stage that recover most, and what they recover."""
        means = {place: float(np.mean(scores)) for place, scores in self.scores.items()}
        place = max(means, key=lambda place: means[place])
        return place, means[place]


class Recommendations(Study):
    """Does `gradguard recommend` choose the same defense twice, and never a leaky one? It is fed
    with the frontier's cells: messages, judged samples and trainings are drawn again and again.

    Conditions and verdict: docs/findings/rates.md.
    """

    COLUMNS: ClassVar = [
        "frontier", "budget", "most frequent choice", "its share", "others",
        "a leaky one", "none of these", "qualify by all cells",
    ]  # fmt: skip

    def cells(self) -> dict:
        draws = 20 if self.quick else 500
        return {
            (name, f"{budget:g}"): {"frontier": name, "budget": budget, "draws": draws}
            for name in FRONTIERS
            for budget in (TrialSettings().budget, 0.05, 0.15)
        }

    def measure(self, cell: dict) -> dict:
        frontier = FRONTIERS[cell["frontier"]]
        defenses = cells_of_defenses(frontier)
        random = np.random.default_rng(0)
        chosen = Counter[str](
            recommended(defenses, frontier, cell["budget"], random) for _ in range(cell["draws"])
        )
        return {
            "chosen": dict(chosen.most_common()),
            "leaks": {name: round(cells.worst()[1], 3) for name, cells in defenses.items()},
            "lost": {
                name: round(_mean_right(defenses["none"]) - _mean_right(cells), 4)
                for name, cells in defenses.items()
            },
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for name, budgets in metrics.items():
            frontier = FRONTIERS[name]
            for budget, figures in budgets.items():
                chosen, draws = figures["chosen"], sum(figures["chosen"].values())
                first, count = next(iter(chosen.items()))
                others = ", ".join(
                    f"{other} {times / draws:.1%}" for other, times in chosen.items()
                    if other != first
                )  # fmt: skip
                leaky = sum(
                    times for other, times in chosen.items()
                    if other != NONE and is_leaky(figures["leaks"][other], frontier)
                )  # fmt: skip
                private = [
                    other for other, leak in figures["leaks"].items()
                    if other != "none" and not is_leaky(leak, frontier)
                    and figures["lost"][other] <= float(budget)
                ]  # fmt: skip
                rows.append(
                    [name, f"{100 * float(budget):g} points", first, f"{count / draws:.1%}", others,
                     f"{leaky / draws:.1%}", f"{chosen.get(NONE, 0) / draws:.1%}",
                     ", ".join(private) or "none"]
                )  # fmt: skip
        write_table(self.output, self.COLUMNS, rows)


NONE = "none of these"


def is_leaky(leak: float, frontier: Frontier) -> bool:
    """Whether a leak over all cells is one that nobody should be recommended."""
    chance = frontier.guess if frontier.kind == "image" else 0.0
    return leak >= chance + LEAKY[frontier.kind]


def cells_of_defenses(frontier: Frontier) -> dict[str, DefenseCells]:
    """Of the undefended training, and of the defenses that `recommend` tries by default."""
    stored, score = Results(PUBLISHED / frontier.output), MAIN_SCORES[frontier.kind].name
    tried = make_defenses("none") | make_defenses(DEFAULT_DEFENSES[frontier.kind])
    cells = {label: DefenseCells([], {}) for label in tried}
    for cell in stored:
        if "defense" not in cell:
            continue
        label = _spec(cell)
        if label not in cells:
            continue
        figures = stored[cell]
        if "attack" not in cell and "right" in figures:
            cells[label].right.append(_right(figures))
        elif (
            cell.get("attack") in frontier.attacks
            and cell["size"] == 1
            and cell["stage"] in ("start", "end")
        ):
            place = cell["attack"], cell["stage"]
            cells[label].scores.setdefault(place, []).extend(figures[score])
    return {label: found for label, found in cells.items() if found.right and found.scores}


def _spec(cell: Mapping[str, Any]) -> str:
    """A defense and its settings, as the command takes and labels them."""
    settings = ",".join(f"{name}={_written(value)}" for name, value in cell["strength"].items())
    return f"{cell['defense']}:{settings}" if settings else str(cell["defense"])


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


def recommended(
    defenses: Mapping[str, DefenseCells], frontier: Frontier, budget: float, random: Any
) -> str:
    """What one run would recommend: first trials on one seed, then finalists on others."""
    score, settings = MAIN_SCORES[frontier.kind], TrialSettings()
    rows = len(next(iter(defenses.values())).right[0])
    samples = random.integers(rows, size=JUDGED)
    half = settings.attacked // 2
    screened = outcomes_of(defenses, score, samples, 1, half, random)
    last = finalists(screened, budget, frontier.guess, score)
    if not last:
        return NONE
    order = [name for name in defenses if name in {o.defense for o in last} | {"none"}]
    again = outcomes_of(
        {name: defenses[name] for name in order}, score, samples, settings.seeds,
        settings.attacked, random,
    )  # fmt: skip
    choice = choose(again, budget, frontier.guess, score)
    return NONE if choice.chosen is None else choice.chosen.defense


def outcomes_of(
    defenses: Mapping[str, DefenseCells], score: MainScore, samples: np.ndarray, seeds: int,
    messages: int, random: Any,
) -> list[Outcome]:  # fmt: skip
    """By trainings and messages that are drawn from the cells; all defenses share samples."""
    plain, outcomes = np.zeros(0), []
    for name, cells in defenses.items():
        trainings = random.integers(len(cells.right), size=seeds)
        right = np.stack([cells.right[training][samples] for training in trainings])
        plain = right if name == "none" else plain
        leaks = {
            place: random.choice(scores, size=messages) for place, scores in cells.scores.items()
        }
        place = max(leaks, key=lambda place: float(np.mean(leaks[place])))
        others = [leak for other, leak in leaks.items() if other[1] != place[1]]
        elsewhere = max(others, key=lambda leak: float(np.mean(leak)), default=np.zeros(0))
        outcomes.append(
            Outcome(
                name, 1e-3, mean_over_seeds(right), mean_over_seeds(plain - right),
                mean_over_seeds([leaks[place]]), *place,
                accuracy_by_sample=dict(enumerate(right.mean(0).tolist())),
                leak_by_message=dict(enumerate(leaks[place].tolist())),
                trainings=right.mean(1).tolist(),
                leak_elsewhere=dict(enumerate(elsewhere.tolist())),
            )
        )  # fmt: skip
    return outcomes


def _mean_right(cells: DefenseCells) -> float:
    return float(np.mean([np.mean(right) for right in cells.right]))
