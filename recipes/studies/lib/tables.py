"""Tables, and the figures in their cells."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from .intervals import half_width
from .results import named

matplotlib.use("agg")
from matplotlib import pyplot as plt

__all__ = [
    "bracketed",
    "draw_images",
    "interval",
    "plt",
    "save",
    "settings_text",
    "significant",
    "summary",
    "write_table",
]


def write_table(output: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """OUTPUT.md, and the same on the screen."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    output.parent.mkdir(parents=True, exist_ok=True)
    named(output, ".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def save(figure: plt.Figure, output: Path, dpi: int = 100) -> None:
    """OUTPUT.png."""
    figure.savefig(named(output, ".png"), dpi=dpi)
    plt.close(figure)


def summary(scores, names: Sequence[str]) -> dict[str, list[float]]:
    """Mean of each score with the ends of its 95 % bootstrap interval, of `score_text` or
    `score_images`.
    """
    return {
        name: [round(float(v), 4) for v in (scores.mean[name], *scores.interval[name])]
        for name in names
    }


def bracketed(values: Sequence[float], form: str) -> str:
    """What `summary` gives, as mean [low, high], each in the given format."""
    mean, low, high = (format(value, form) for value in values)
    return f"{mean} [{low}, {high}]"


def significant(value: float, digits: int) -> float:
    """To so many digits."""
    return float(f"{float(value):.{digits}g}")


def settings_text(settings: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of it (Student's t) over seeds or samples; of one value, that."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {half_width(values):.{digits}f}"


def draw_images(path: str, rows: Sequence[Sequence], size: tuple[float, float], dpi: int) -> None:
    """Rows of `(image (C, H, W), title)`, as a PNG."""
    figure, axes = plt.subplots(len(rows), len(rows[0]), figsize=size, layout="constrained")
    for row, panels in zip(rows, axes, strict=True):
        for (image, title), axis in zip(row, panels, strict=True):
            axis.imshow(image.permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
            axis.set_title(title, fontsize=8)
            axis.axis("off")
    figure.savefig(path, dpi=dpi)
