"""The command line of a study: `python -m recipes.studies.STUDY.run PART ... --output OUTPUT`.

It computes the cells that OUTPUT.json lacks, one after the other, and then writes OUTPUT.md (the
table) and, if the part draws, OUTPUT.png. Stop it when you like: run again, it goes on.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

from hf_gradguard.models import check_name

from .results import Place, Results, nested


def common(parser: argparse.ArgumentParser) -> None:
    """What every study and benchmark takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--output", type=Path, required=True, help="where results go, without an ending")
    add("--quick", action="store_true", help="seconds, to see that it runs; figures mean nothing")
    add("--tables", action="store_true", help="compute nothing: table and picture of what is there")


def main(doc: str | None, parts: Sequence[ModuleType], argv: Sequence[str] | None = None) -> None:
    """Runs the part that the command line names.

    Args:
        doc: The study's docstring.
        parts: Modules, each with
            `ARGUMENTS`: what the computation reads, as `{"--flag": help}`; other arguments as
            `{"--flag": {keyword of add_argument: value}}`;
            `cells(args)`: all settings by their place in the tables, `{place: settings}`;
            `prepare(args)`: loads what is to be loaded, and returns a function from a
            cell's settings to its figures;
            `report(figures, args)`: tables and pictures, of figures nested by place.
        argv: Instead of the process's own.
    """
    args = parse(doc, parts, argv)
    run(args.module, args)


def parse(
    doc: str | None, parts: Sequence[ModuleType], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The arguments, with the part that they name as `module`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for part in parts:
        about = (part.__doc__ or "").strip()
        command = commands.add_parser(
            part.__name__.split(".")[-1], description=about, help=about.split("\n\n")[0]
        )
        common(command)
        for flag, more in part.ARGUMENTS.items():
            command.add_argument(flag, **({"help": more} if isinstance(more, str) else more))
        command.set_defaults(module=part)
    return parser.parse_args(argv)


def cells_of(part: ModuleType, args: argparse.Namespace) -> dict[Place, dict]:
    """All cells of a part. Those of quick runs are never taken for those of full ones."""
    mark = {"quick": True} if args.quick else {}
    return {place: settings | mark for place, settings in part.cells(args).items()}


def run(part: ModuleType, args: argparse.Namespace) -> None:
    results, cells = Results(args.output), cells_of(part, args)
    missing, measure = lacking(cells, results), None
    if missing and args.tables:
        sys.exit(f"{results.path} lacks {len(missing)} of {len(cells)} cells: leave out --tables.")
    while missing:
        measure = measure or _prepared(part, args, len(missing))
        for settings in logging.tqdm(missing, desc="cells"):
            if settings not in results:  # two places may show the same cell
                results.add(settings, measure(settings))
        cells = cells_of(part, args)  # figures may ask for more
        missing = lacking(cells, results)
    part.report(nested(cells, results), args)


def lacking(cells: dict[Place, dict], results: Results) -> list[dict]:
    return [settings for settings in cells.values() if settings not in results]


def _prepared(part: ModuleType, args: argparse.Namespace, missing: int) -> Callable[[dict], dict]:
    needed = [flag for flag, more in part.ARGUMENTS.items() if isinstance(more, str)]
    if absent := [flag for flag in needed if getattr(args, flag.lstrip("-")) is None]:
        sys.exit(f"{missing} cells are to be computed: give {', '.join(absent)}.")
    for flag in {"--model", "--tokenizer"} & set(part.ARGUMENTS):
        if (name := getattr(args, flag.lstrip("-"))) is not None:
            check_name(name)
    return part.prepare(args)
