"""Figures of docs/results/*.json, where pages, README and the package quote them.

    python recipes/figures.py            writes what is committed anew: README, cards, the package
    python recipes/figures.py text.md    prints a page of docs/findings as the site shows it

A page holds no figure. It holds the name of one, `{{ text.sketch_cost }}`, or a selection of a
table's rows and columns, in a block of the language `table`. `docs/figures.yml` says for each name
in which table, row and column it stands. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib.pyplot as plt
import yaml
from jinja2 import Environment, Undefined, UndefinedError

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from hf_gradguard.leakage import membership_power  # noqa: E402
from recipes.results import RUNS, Run  # noqa: E402

DOCS = ROOT / "docs"
PUBLISHED = DOCS / "results"
PACKAGE = ROOT / "hf_gradguard" / "defenses" / "measured.json"

DERIVED = ("hiding_and_learning", "knowing", "recommendations")
"""Runs whose tables are made of the figures of others."""

NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_INTERVAL = re.compile(rf"\[({NUMBER})%?, ({NUMBER})%?\]")
_HALF = re.compile(rf"± ({NUMBER})")
_COUNT = re.compile(r"(\d+(?:,\d{3})*)(?: \((\d+)\))? of (\d+(?:,\d{3})*)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_NAME = re.compile(r"{{ (.+?) }}")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _decimals(scale: float, digits: int, unit: str = "") -> Callable[[float], str]:
    def shown(value: float) -> str:
        text = f"{scale * value:,.{digits}f}"
        return (text.replace("-", "", 1) if float(text.replace(",", "")) == 0 else text) + unit

    return shown


FORMS: dict[str, Callable[[float], str]] = {
    "points": _decimals(100, 1),
    "percent": _decimals(100, 0, " %"),
    "percent1": _decimals(100, 1, " %"),
    "percentage": _decimals(1, 0, " %"),
    "whole": _decimals(1, 0),
    "one": _decimals(1, 1),
    "two": _decimals(1, 2),
    "short": lambda value: f"{float(f'{value:.2g}'):,.10g}",
}
"""How a number is shown: a share as points or percent; a percentage; a number to so many decimals,
or `short`, to two digits.
"""

COUNTS = ("count", "count10")
"""`39 (45) of 48` as `39 of 48`, found at 1 % FPR, and as `45 of 48`, found at 10 %."""

BOLD = "bold"
"""The number in bold, of several in a cell."""


class Figure(float):
    """A figure of a table's cell. As text it is the figure alone, as pages' sentences show it.

    Args:
        cell: The cell's text.
        form: One of `FORMS` or `COUNTS`, or `BOLD`; without one the number is as the cell has it.

    Example:
        >>> lost = Figure("0.025 [0.016, 0.035]", "points")
        >>> str(lost), lost.full, lost.interval
        ('2.5', '2.5 [1.6, 3.5]', '[1.6, 3.5]')
    """

    cell: str
    form: str
    _shown: str

    def __new__(cls, cell: str, form: str = "") -> Figure:
        pattern = rf"\*\*({NUMBER})\*\*" if form == BOLD else f"({NUMBER})"
        found = _COUNT.search(cell) if form in COUNTS else re.search(pattern, cell)
        if found is None:
            raise ValueError(f"{cell!r} has no figure.")
        number = found[2 if form == "count10" else 1]
        figure = super().__new__(cls, _number(number))
        figure.cell, figure.form = cell, form
        figure._shown = f"{number} of {found[3]}" if form in COUNTS else number
        return figure

    def __str__(self) -> str:
        return FORMS[self.form](float(self)) if self.form in FORMS else self._shown

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval that the cell has.

        Raises:
            ValueError: If it has none.
        """
        if found := _INTERVAL.search(self.cell):
            return _number(found[1]), _number(found[2])
        if found := _HALF.search(self.cell):
            half = _number(found[1])
            return float(self) - half, float(self) + half
        raise ValueError(f"{self.cell!r} has no interval.")

    @property
    def interval(self) -> str:
        """The interval as `[low, high]`, in the figure's form."""
        if not self.form and (found := _INTERVAL.search(self.cell)):
            return found[0]
        low, high = (self._bare(end) for end in self.ends)
        return f"[{low}, {high}]"

    @property
    def turned(self) -> Figure:
        """The figure with the other sign: how much less, of how much more."""
        if _INTERVAL.search(self.cell):
            low, high = self.ends
            return Figure(f"{-float(self)!r} [{-high!r}, {-low!r}]", self.form)
        found = _HALF.search(self.cell)
        half = f" ± {found[1]}" if found else ""
        number = str(self) if not self.form else repr(float(self))
        return Figure((number[1:] if number.startswith("-") else f"-{number}") + half, self.form)

    @property
    def full(self) -> str:
        """The figure with its interval or its half-width, if the cell has one."""
        if self.form in COUNTS:
            return str(self)
        if _INTERVAL.search(self.cell):
            return f"{self} {self.interval}"
        if found := _HALF.search(self.cell):
            unit = " %" * (self.form in ("percent", "percent1"))
            half = self._bare(_number(found[1])) if self.form else found[1]
            return f"{str(self).removesuffix(unit)} ± {half}{unit}"
        return str(self)

    def _bare(self, value: float) -> str:
        if self.form in FORMS:
            return FORMS[self.form](value).removesuffix(" %")
        return f"{value:g}"


class Table(NamedTuple):
    """A table that a study or a benchmark wrote."""

    name: str
    header: list[str]
    rows: list[list[str]]

    @classmethod
    def parse(cls, name: str, text: str) -> Table:
        """The table of a Markdown file that holds nothing else."""
        lines = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in text.splitlines()
        ]
        return cls(name, lines[0], lines[2:])

    def labels(self) -> list[tuple[str, ...]]:
        """Each row's cells, as a row is called by. Below a row in bold that is empty otherwise its
        text comes first.
        """
        section, labels = "", []
        for row in self.rows:
            if row[0].startswith("**") and not any(row[1:]):
                section = _plain(row[0])
            labels.append((section, *map(_plain, row)) if section else tuple(map(_plain, row)))
        return labels

    def row(self, label: str) -> list[str]:
        """The row whose first cells are `A & B`. Of these, those that do not tell rows apart may be
        left out.

        Raises:
            KeyError: If not exactly one row is called so.
        """
        wanted = label.split(" & ")
        labels = self.labels()
        found = [n for n, cells in enumerate(labels) if list(cells[: len(wanted)]) == wanted]
        if len(found) != 1:
            known = "; ".join(" & ".join(cells[:2]) for cells in labels)
            raise KeyError(f"{self.name} has {len(found)} rows {label!r}. It has {known}.")
        return self.rows[found[0]]

    def cell(self, label: str, column: str) -> str:
        """The cell of a row in a column. Of two columns of one name the second is `NAME, 2`.

        Raises:
            KeyError: If there is no such row or column.
        """
        seen: dict[str, int] = {}
        for number, title in enumerate(map(_plain, self.header)):
            seen[title] = seen.get(title, 0) + 1
            if column in ((title,) if seen[title] == 1 else (f"{title}, {seen[title]}",)):
                return self.row(label)[number]
        raise KeyError(f"{self.name} has no column {column!r}. It has {self.header}.")

    def text(self) -> str:
        """The table in Markdown."""
        rows = [f"| {' | '.join(row)} |" for row in (self.header, *self.rows)]
        return "\n".join([rows[0], "|---" * len(self.header) + "|", *rows[1:]])


def _plain(cell: str) -> str:
    return re.sub(r"[`*]", "", cell).strip()


class Tables(Mapping[str, Table]):
    """The tables of all figures that are published, made when they are first asked for.

    Args:
        published: A folder with the figures, `NAME.json`.
    """

    def __init__(self, published: Path = PUBLISHED) -> None:
        self._keep = tempfile.TemporaryDirectory()
        self.folder = Path(self._keep.name)
        for figures in published.glob("*.json"):
            shutil.copy(figures, self.folder)
        self._made: set[str] = set()

    def __getitem__(self, name: str) -> Table:
        self.make(run_of(name))
        file = self.folder / f"{name}.md"
        if not file.exists():
            raise KeyError(f"No study writes a table {name!r}.")
        return Table.parse(name, file.read_text(encoding="utf-8"))

    def __iter__(self) -> Iterator[str]:
        for run in published_runs(self.folder):
            self.make(run)
        return iter(sorted(file.stem for file in self.folder.glob("*.md")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def make(self, run: Run) -> None:
        """Makes the tables of one run, and no picture."""
        if run.output not in self._made:
            quiet = contextlib.redirect_stdout(io.StringIO())
            with quiet, mock.patch.object(plt.Figure, "savefig"):
                run.make_tables(self.folder)
            plt.close("all")
            self._made.add(run.output)

    def of(self, run: Run) -> list[Table]:
        """The tables of one run."""
        self.make(run)
        names = sorted(file.stem for file in self.folder.glob(f"{run.output}*.md"))
        return [self[name] for name in names if run_of(name) is run]


def published_runs(folder: Path = PUBLISHED) -> list[Run]:
    """The runs that have figures; one may be new."""
    return [
        run for run in RUNS if run.output in DERIVED or (folder / f"{run.output}.json").exists()
    ]


def run_of(name: str) -> Run:
    """The run that writes a table.

    Raises:
        KeyError: If no run does.
    """
    writing = [run for run in RUNS if name == run.output or name.startswith(f"{run.output}_")]
    if not writing:
        raise KeyError(f"No study writes a table {name!r}.")
    return max(writing, key=lambda run: len(run.output))


@functools.cache
def published() -> Tables:
    """The published tables, made once a process."""
    return Tables()


class Group:
    """The named figures of one subject, each looked up when it is asked for."""

    def __init__(self, name: str, specifications: Mapping[str, str], tables: Tables) -> None:
        self._name, self._specifications, self._tables = name, specifications, tables

    def __getattr__(self, name: str) -> Figure:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._specifications:
            raise KeyError(f"docs/figures.yml has no figure {self._name}.{name}.")
        return look_up(self._specifications[name], self._tables)


def look_up(specification: str, tables: Tables) -> Figure:
    """The figure at `TABLE | ROW | COLUMN`, or `TABLE | ROW | COLUMN | FORM`."""
    table, row, column, *form = specification.split(" | ")
    try:
        return Figure(tables[table].cell(row, column), *form)
    except ValueError as error:
        raise ValueError(f"{specification}: {error}") from None


@functools.cache
def specifications() -> dict[str, dict[str, str]]:
    """Where each named figure stands, by subject and name."""
    return yaml.safe_load((DOCS / "figures.yml").read_text(encoding="utf-8"))


def render(text: str, tables: Tables) -> str:
    """A page with its figures and tables in place of their names.

    Raises:
        KeyError: If a name, a table, a row or a column does not exist.
    """
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [filled(text[end : fence.start()], tables)]
        made = {"table": selection, "runs": runs}.get(fence[1])
        parts += [fence[0] if made is None else _unbroken(f"{made(fence[2], tables)}\n")]
        end = fence.end()
    return "".join([*parts, filled(text[end:], tables)])


def _unbroken(table: str) -> str:
    """A table whose intervals stand on one line each."""
    space = "\N{NO-BREAK SPACE}"
    table = re.sub(rf"(?<=\d) \[({NUMBER}), ", rf"{space}[\1,{space}", table)
    return table.replace(" ± ", f"{space}±{space}").replace(" % ", f"{space}% ")


def filled(text: str, tables: Tables) -> str:
    """A text with its figures in place of their names."""
    return _NAME.sub(lambda name: evaluate(name[1], tables), text)


def evaluate(expression: str, tables: Tables) -> str:
    """An expression of named figures as text, such as `text.cost` or `points(a.one - a.two)`.

    `at("TABLE | ROW | COLUMN")` is one without a name. `members_bound(σ)` is the most members that
    any test finds at 1 % FPR, by proof. `rows(table, column, entry)` is how many rows have that
    entry.
    """
    names: dict[str, Any] = {
        group: Group(group, entries, tables) for group, entries in specifications().items()
    }
    names |= {
        "at": lambda where: look_up(where, tables),
        "members_bound": membership_power,
        "rows": functools.partial(count_rows, tables),
    }
    try:
        value = Environment().compile_expression(expression, undefined_to_none=False)(names | FORMS)
        if isinstance(value, Undefined):
            raise UndefinedError
    except UndefinedError:
        raise KeyError(f"docs/figures.yml has no figure for {expression!r}.") from None
    return str(value)


def runs(_: str, tables: Tables) -> str:
    """All runs, with their hours and the pages that show them: a block `runs`."""
    pages = {
        page.name: page.read_text(encoding="utf-8") for page in (DOCS / "findings").glob("*.md")
    }
    rows = []
    for run in published_runs():
        shown = [
            f"[{name[:-3]}](findings/{name})" for name in sorted(pages) if shows(pages[name], run)
        ]
        rows.append(
            [f"[{run.output}](results/{run.output}.md)", f"{run.hours:g}", ", ".join(shown)]
        )
    return Table("", ["run", "hours of one core, roughly", "shown in"], rows).text()


def shows(text: str, run: Run) -> bool:
    """Whether a page has one of a run's tables, or links it."""
    names = re.findall(r"results/(\w+)\.json|^of: (\S+)$", text, re.M)
    mine = [one or other for one, other in names if (one or other).startswith(run.output)]
    return any(run_of(name) is run for name in mine)


def result_page(run: Run, tables: Tables) -> str:
    """The page of a run: its tables and its pictures."""
    lines = [
        f"# {run.output}",
        "",
        f"`make results ONLY={run.output}` makes it anew, in about {run.hours:g}",
    ]
    lines[-1] += " hours of one core. [What the words mean](../results.md#words-used)."
    for table in tables.of(run):
        if table.name != run.output:
            lines += ["", f"## {table.name}"]
        lines += ["", table.text()]
    pictures = sorted(PUBLISHED.glob(f"{run.output}*.png"))
    lines += [f"\n![{file.stem}]({file.name})" for file in pictures if run_of(file.stem) is run]
    return "\n".join(lines) + "\n"


def count_rows(tables: Tables, name: str, column: str = "", entry: str = "") -> int:
    """How many rows a table has, or how many of them with that entry in a column."""
    table = tables[name]
    if not column:
        return len(table.rows)
    place = table.header.index(column)
    return sum(row[place] == entry for row in table.rows)


def selection(specification: str, tables: Tables) -> str:
    """Rows and columns of one table or several, as a block `table` asks for them.

    `of` names the table. `rows` are those to show, as a list, or by what they are called on the
    page. `columns` are those to show, by what they are called there, each as `COLUMN`, `COLUMN |
    FORM`, `TABLE | COLUMN` or `TABLE | COLUMN | FORM`; in another table a row is called as in `of`.
    `first` is the title of the first column.
    """
    asked = yaml.safe_load(specification)
    table = tables[asked.pop("of")]
    if not asked:
        return table.text()
    rows = asked.pop("rows", None) or [" & ".join(cells[:1]) for cells in table.labels()]
    rows = rows if isinstance(rows, dict) else {row: row for row in rows}
    columns = asked.pop("columns", None) or {title: title for title in table.header[1:]}
    columns = columns if isinstance(columns, dict) else {title: title for title in columns}
    first = asked.pop("first", " ")
    if asked:
        raise KeyError(f"A block `table` has no {', '.join(asked)}.")
    shown = [
        [str(name), *(_selected(table, str(row), column, tables) for column in columns.values())]
        for name, row in rows.items()
    ]
    return Table("", [first, *map(str, columns)], shown).text()


def _selected(table: Table, row: str, column: str, tables: Tables) -> str:
    *before, name = column.split(" | ")
    form = ""
    if before and (name in FORMS or name in COUNTS):
        form, (*before, name) = name, before
    if before:
        table = tables[before[0]]
        if row not in {" & ".join(cells[: row.count(" & ") + 1]) for cells in table.labels()}:
            return ""
    cell = table.cell(row, name)
    return Figure(cell, form).full if cell and form else cell


# What is committed with figures in it: README, and a file of the package.

_QUOTED = re.compile(r"(<!-- figure: (.+?) -->).*?(<!-- -->)")


def quoted(text: str, tables: Tables) -> str:
    """A text whose figures stand between `<!-- figure: NAME -->` and `<!-- -->`, anew."""
    return _QUOTED.sub(lambda m: m[1] + evaluate(m[2], tables) + m[3], text)


FED_BACK = "error_feedback=True"
STRENGTHS: dict[str, tuple[str, tuple[float, ...]]] = {
    "uniform_noise": ("gaussian_noise relative_scale={:g}", (1, 5, 10, 20, 50, 100)),
    "optimal_noise": ("optimal_noise relative_scale={:g}", (1, 5, 10, 20, 50, 100)),
    "own_shape": ("optimal_noise relative_scale={:g} shape=own", (5, 20)),
    "pruning": ("pruning ratio={:g}", (0.5, 0.9, 0.99, 0.999)),
    "pruning_fed_back": (f"pruning ratio={{:g}} {FED_BACK}", (0.99, 0.999)),
    "optimal_pruning": ("optimal_pruning ratio={:g}", (0.5, 0.9, 0.99)),
    "optimal_pruning_fed_back": (
        f"optimal_pruning ratio={{:g}} {FED_BACK}", (0.9, 0.95, 0.97, 0.99)
    ),
    "optimal_pruning_of_eight": (
        f"optimal_pruning ratio={{:g}} {FED_BACK} min_batches=8", (0.9, 0.95, 0.97, 0.99)
    ),
    "bits": ("quantization bits={:g}", (8, 4, 2, 1)),
    "sketch": ("gradient_sketch samples={:g}", (256, 64, 16, 4)),
}  # fmt: skip
"""Families of defenses, with what the tables of the frontiers call one at a strength."""

CALLED = {"frontier_images": {"gradient_sketch samples=16": "gradient_sketch"}}
SEARCHED = {
    "gaussian_noise relative_scale=5": "start & 5",
    "gaussian_noise relative_scale=20": "start, of 6 and of 12 populations: the higher score",
}
"""What `likelihood_search` was run against, with its table's row."""


def package_figures(tables: Tables) -> dict[str, Any]:
    """What `hf_gradguard.defenses.measured` says was recovered behind each defense."""

    def recovered(row: str) -> list[float | None]:
        cells = [
            _cell(tables["frontier_text"], row, "span, 1, end"),
            _cell(tables["frontier_text"], row, "candidates, 16, end"),
            _cell(tables["frontier_images"], row, "inverting_gradients, 1, end"),
            _cell(tables["frontier_images"], row, "candidates, 16, end"),
        ]
        if row in SEARCHED:
            cells.append(tables["likelihood_search"].cell(SEARCHED[row], "token F1"))
        return [float(Figure(cell)) if cell else None for cell in cells]

    strengths = {
        family: {f"{strength:g}": recovered(name.format(strength)) for strength in measured}
        for family, (name, measured) in STRENGTHS.items()
    }
    said = {
        name: str(look_up(where, tables)) for name, where in specifications()["package"].items()
    }
    return {"strengths": strengths, "said": said}


def _cell(table: Table, row: str, column: str) -> str:
    """The cell, or nothing where the table has no such row."""
    row = CALLED.get(table.name, {}).get(row, row)
    return table.cell(row, column) if row in {cells[0] for cells in table.labels()} else ""


def committed(tables: Tables) -> dict[Path, str]:
    """The files that hold figures, with the text that they should have."""
    readme = ROOT / "README.md"
    return {
        readme: quoted(readme.read_text(encoding="utf-8"), tables),
        PACKAGE: json.dumps(package_figures(tables), indent=1, ensure_ascii=False) + "\n",
    }


def main() -> None:
    if len(sys.argv) > 1:
        page = DOCS / "findings" / sys.argv[1]
        print(render(page.read_text(encoding="utf-8"), published()))
        return
    for file, text in committed(published()).items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
