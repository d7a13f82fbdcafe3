"""The command line that fills training arguments."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import yaml
from transformers import HfArgumentParser


def parse_arguments(*dataclass_types: Any, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Command-line flags over a YAML file's values over the defaults.

    Args:
        *dataclass_types: What the flags fill, as for `HfArgumentParser`.
        argv: The command line. Default: the program's. `--config FILE.yaml` names the file; its
            keys are flags' names.

    Returns:
        One object a dataclass.

    Raises:
        ValueError: If the file holds a key that is no flag.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> argv = ["--output_dir=out", "--defense=pruning", '--defense_kwargs={"ratio": 0.9}']
        >>> (args,) = parse_arguments(GradGuardConfig, argv=argv)
        >>> args.defense_kwargs
        {'ratio': 0.9}
    """
    parser = HfArgumentParser(dataclass_types)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, rest = finder.parse_known_args(argv)
    if found.config is not None:
        with open(found.config, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
        known = {field.name for kind in dataclass_types for field in fields(kind) if field.init}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"{found.config} holds {', '.join(unknown)}, which no flag is called. See --help."
            )
        parser.set_defaults(**values)
    return parser.parse_args_into_dataclasses(args=rest)
