"""The command line: `gradguard`."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields

from . import __version__
from .defenses import DEFENSES


def main(argv: list[str] | None = None) -> int:
    """Entry point of `gradguard`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="gradguard", description="Protected training for the Hugging Face Trainer.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("defenses", help="list the defences with their settings and defaults")
    arguments = parser.parse_args(argv)
    if arguments.command == "defenses":
        print(describe_defenses())
    return 0


def describe_defenses() -> str:
    """One paragraph a defence: its name, what it does, and its settings."""
    paragraphs = []
    for name, defense in DEFENSES.items():
        summary = (defense.__doc__ or "").strip().splitlines()[0]
        settings = ", ".join(_setting(field) for field in fields(defense))  # type: ignore[arg-type]
        paragraphs.append(f"{name}\n  {summary}\n  settings: {settings or 'none'}")
    return "\n\n".join(paragraphs)


def _setting(field: Field[object]) -> str:
    return field.name if field.default in (None, MISSING) else f"{field.name}={field.default!r}"
