"""Estimators beside attacks: their figures, point by point, and rank correlations."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import spearmanr

from ..result import Audit


@dataclass(frozen=True)
class Point:
    """One sample of one message under one defense: an estimator's figure and an attack's scores."""

    defense: str
    figure: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of an estimator's figure with each score of an attack, over
    defenses and samples.

    Args:
        figure: Name of the estimator.
        attack: Label of the attack.
        coefficients: `{score: coefficient}`; `None` where fewer than three points, or equal ones,
            say nothing.
        common: The points, one for each sample, repeat and defense. Those of one sample are not
            independent.
    """

    figure: str
    attack: str
    coefficients: dict[str, float | None]
    common: list[Point]

    @property
    def points(self) -> int:
        """How many there are."""
        return len(self.common)


def correlate(result: Audit) -> list[Correlation]:
    """One for every estimator and attack that have points in common."""
    found = []
    for figure in result.settings["estimators"]:
        for attack in result.attacks:
            common = points(result, figure, attack)
            if not common:
                continue
            x = [point.figure for point in common]
            coefficients: dict[str, float | None] = {}
            for score in common[0].scores:
                y = [point.scores[score] for point in common]
                telling = len(common) >= 3 and len(set(x)) > 1 and len(set(y)) > 1
                coefficients[score] = float(spearmanr(x, y).statistic) if telling else None
            found.append(Correlation(figure, attack, coefficients, common))
    return found


def points(result: Audit, figure: str, attack: str) -> list[Point]:
    """Where both the figure and the attack's scores are there and finite."""
    found = {
        (row["message"], row["repeat"], row["defense"]): row.get("figures", {}).get(figure)
        for row in result.shared
    }
    return [
        Point(
            cell["defense"], value, {name: scores[place] for name, scores in cell["scores"].items()}
        )
        for cell in result.cells
        if cell["attack"] == attack and "scores" in cell
        for place, value in enumerate(
            found.get((cell["message"], cell["repeat"], cell["defense"])) or []
        )
        if value is not None
    ]


def silent(result: Audit) -> list[str]:
    """Which estimators say nothing of which defenses, with the reason."""
    under: dict[tuple[str, str], list[str]] = {}
    for row in result.shared:
        for name, reason in row.get("no_figures", {}).items():
            title = result.settings["estimators"][name]["title"]
            where = under.setdefault((reason, title), [])
            if row["defense"] not in where:
                where.append(row["defense"])
    return [
        f"{reason} ({title}, under {', '.join(where)})" for (reason, title), where in under.items()
    ]
