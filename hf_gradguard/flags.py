"""One parser for the flags of all commands: fields of dataclasses, typed or in files.

Transformers' `HfArgumentParser` fills in defaults, so that a flag that was used could not be told
from one that was left out. It also takes seconds to import for a page of help.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def option(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field with the sentence of help that the command line shows.

    Args:
        default: The value where the flag is left out.
        text: The sentence of help.
        **metadata: `required=True`; `aliases`, other names of the flag; `is_positional=True`; or
            keywords of `add_argument`.
    """
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(kw_only=True)
class SourceSettings:
    """The settings that say which model and data a command loads."""

    _argument_group_name: ClassVar[str] = "model and data"

    model: str = option(
        "", "a folder, a checkpoint, a folder of PEFT adapters, or a Hub name", required=True,
        aliases=["--model_name_or_path"],
    )  # fmt: skip
    dataset: str = option(
        "", "csv, tsv, txt, json, parquet or npz (images) file, a folder, or a Hub name",
        required=True,
    )  # fmt: skip
    dataset_config: str | None = option(None, "configuration of a Hub data set that has several")
    split: str = option("train", "split of a Hub data set or a folder")
    column: str | None = option(None, "column of texts or images. Default: the usual names")
    label_column: str | None = option(
        None, "column of labels or target texts. Default: the usual names"
    )
    task: str | None = option(
        None,
        "what the model's head is for: text-classification, token-classification, "
        "text-generation, fill-mask, text2text-generation or image-classification. Default: what "
        "its configuration names",
    )


class FlagError(ValueError):
    """An error in a flag or in a settings file: an unknown name, or a value that cannot be read."""


class FlagParser(argparse.ArgumentParser):
    """A parser with a flag for each field, in groups by class, and `--config` for files.

    Args:
        command: The command as it is typed.
        summary: What the command does, in one line.
        example: A line that runs.
        *settings: Dataclasses. If several have a field of one name, the first makes the flag.

    Example:
        >>> parser = FlagParser("train", "Train.", "train --model M", SourceSettings)
        >>> parser.values(["--model", "bert", "--dataset", "rows.csv", "--split=test"])
        {'model': 'bert', 'dataset': 'rows.csv', 'split': 'test'}
        >>> parser.values(["--modle", "bert"])
        Traceback (most recent call last):
        hf_gradguard.flags.FlagError: There is no flag --modle. Did you mean --model? See --help.
    """

    def __init__(self, command: str, summary: str, example: str, *settings: type) -> None:
        super().__init__(
            prog=command, description=summary, epilog=f"example:\n  {example}", allow_abbrev=False,
            argument_default=argparse.SUPPRESS,  # what is left out must not override a file
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self._required, self._known = dict[str, str](), list[str]()
        self._repeated = set[str]()  # flags that may come several times
        positional = [f.name for kind in settings for f in fields(kind) if _is_positional(f)]
        if not positional:
            self.add_argument(
                "--config", action="append", metavar="FILE",
                help="YAML or JSON file of flags by name; flags override it, and a later file an "
                "earlier one",
            )  # fmt: skip
        for kind in settings:
            self._add_fields(kind)
        required = [f"--{name} ..." for name in self._required]
        self.usage = " ".join([command, *map(str.upper, positional), *required, "[--FLAG ...]"])

    def _add_fields(self, settings: type) -> None:
        types = get_type_hints(settings)
        for owner in settings.__mro__:  # its own come first
            title = vars(owner).get("_argument_group_name", owner.__name__)
            declared = [f for f in fields(settings) if f.init and _owner(settings, f) is owner]
            flags = [f for f in declared if f"--{f.name}" not in self._known]
            group = self.add_argument_group(title) if flags else self
            for setting in flags:
                self._add_field(group, setting, types[setting.name])

    def _add_field(self, group: Any, setting: Field[Any], annotation: Any) -> None:
        name, metadata = setting.name, dict(setting.metadata)
        text, aliases = metadata.pop("help", ""), metadata.pop("aliases", [])
        if metadata.pop("is_positional", False):
            group.add_argument(name, help=text)
            return
        if metadata.pop("required", False):
            self._required[name] = aliases[0] if aliases else ""
            text = f"required: {text}"
        kinds = {get_origin(kind) or kind for kind in get_args(annotation) or (annotation,)}
        options: dict[str, Any] = {"metavar": "TEXT"}
        if bool in kinds and str not in kinds:
            options = {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
        elif list in kinds or get_origin(annotation) is list:
            options = {"nargs": "+", "metavar": "TEXT"}
        elif dict in kinds:
            options = {"type": _json_or_text, "metavar": "JSON"}
        elif {int, float} & kinds and str not in kinds:
            kind = float if float in kinds else int
            options = {"type": kind, "metavar": "X" if kind is float else "N"}
        elif annotation is Any:  # specs of defenses and attacks, which a file may hold as mappings
            options = {"action": "append", "type": _json_or_text, "metavar": "SPEC"}
        if "choices" in metadata or "action" in metadata:
            del options["metavar"]
        options = metadata if "action" in metadata else options | metadata
        text += _default_text(setting)
        names = [f"--{name}", *aliases]
        group.add_argument(*names, dest=name, help=text, **options)
        if options.get("action") == "append":
            self._repeated.add(names[0])
        if options.get("type") is _boolean:
            help_text = "the opposite" if setting.default is True else argparse.SUPPRESS
            group.add_argument(f"--no_{name}", dest=name, action="store_false", help=help_text)
            names.append(f"--no_{name}")
        self._known += names

    def values(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the flags that are used, which take precedence over those of the files.

        Args:
            argv: The command line without the command. Default: the program's.

        Raises:
            FlagError: If a flag or key is unknown (the message names the nearest one), a value has
                the wrong type, or a required flag is missing.
            OSError: If a file cannot be read.
        """
        flags, unknown = self._parse(argv)
        if unknown:
            raise FlagError(f"There is no flag {unknown[0]}.{self._near(unknown[0])} See --help.")
        in_files: dict[str, Any] = {}
        for path in flags.pop("config", []):
            in_files |= self._values_in(path)
        values = in_files | flags
        if missing := [f"--{name}" for name in self._required if not values.get(name)]:
            raise FlagError(f"{', '.join(missing)} must be given.")
        return values

    def instances(self, argv: Sequence[str] | None, *settings: type[Any]) -> tuple[Any, ...]:
        """Return the flags that are used as one object for each dataclass.

        Args:
            argv: The command line without the command. Default: the program's.
            *settings: The dataclasses.
        """
        values = self.values(argv)
        return tuple(fill(kind, values) for kind in settings)

    def _parse(self, argv: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
        typed = sys.argv[1:] if argv is None else argv
        flags, unknown = self.parse_known_args(list(map(_underscored, typed)))
        return vars(flags), [token for token in unknown if token.startswith("-")] or unknown

    def _values_in(self, path: str) -> dict[str, Any]:
        argv = list[str]()
        for name, value in read_mapping(path).items():
            if f"--{name}" not in self._known:
                near = self._near(f"--{name}").replace("--", "")
                raise FlagError(f"{path} holds {name}, which no flag is called.{near} See --help.")
            argv += _tokens(f"--{name}", value, f"--{name}" in self._repeated)
        try:
            flags, unknown = self._parse(argv) if argv else ({}, [])
        except FlagError as error:
            raise FlagError(f"{path}: {error}") from None
        if unknown:
            raise FlagError(f"{path} holds a list where one value belongs: {unknown[0]!r}.")
        return flags

    def _near(self, flag: str) -> str:
        names = [name for name in ("--config", *self._known) if name.startswith("--")]
        near = difflib.get_close_matches(flag.split("=")[0], names, 1)
        return f" Did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        """Raise an error of one line; argparse would print all flags first.

        Raises:
            FlagError: Always.
        """
        raise FlagError(f"{message[:1].upper()}{message[1:]}.")


def fill(settings: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass's object made of those values that are its fields.

    Example:
        >>> fill(SourceSettings, {"model": "bert", "seed": 1}).model
        'bert'
    """
    names = {f.name for f in fields(settings) if f.init}  # type: ignore[arg-type]
    return settings(**{name: value for name, value in values.items() if name in names})


def read_mapping(path: str) -> dict[str, Any]:
    """Read the mapping that a YAML or JSON file holds.

    Raises:
        OSError: If the file cannot be read.
        FlagError: If it is neither YAML nor JSON (the message names the line), or no mapping.
    """
    import yaml  # not for help

    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror}): name a YAML or JSON file."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = getattr(error, "lineno", mark.line + 1 if mark else "unknown")
        raise FlagError(f"{path} is no YAML or JSON: mend line {line}.") from error
    if not isinstance(values, dict):
        raise FlagError(f"{path} must hold a mapping of settings.")
    return values


def _tokens(flag: str, value: Any, is_repeated: bool) -> list[str]:
    """Return a file's entry as it would be typed."""
    if value is None:
        return []
    if isinstance(value, list) and is_repeated:
        return [token for part in value for token in _tokens(flag, part, False)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return [f"{flag}={value if is_plain else json.dumps(value)}"]


def _underscored(token: str) -> str:
    """Return `--learning-rate=1` as `--learning_rate=1`."""
    name, equals, value = token.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if token[:2] == "--" else token


def _owner(settings: type, setting: Field[Any]) -> type:
    return next(c for c in settings.__mro__ if setting.name in vars(c).get("__annotations__", {}))


def _is_positional(setting: Field[Any]) -> bool:
    return bool(setting.metadata.get("is_positional"))


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise argparse.ArgumentTypeError(f"write true or false, and not {text!r}")
    return text.lower() in ("true", "yes", "1")


def _json_or_text(text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON ({error})") from None


def _default_text(setting: Field[Any]) -> str:
    default = setting.default
    if default is MISSING or setting.metadata.get("required"):
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    shown = f" (default: {default})" if isinstance(default, int | float) or default else ""
    return shown.replace("%", "%%")
