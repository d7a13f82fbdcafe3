"""What command lines that train share: the flags, classes, and what is written of a run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from transformers import HfArgumentParser

from hf_gradguard.models import check_name

if TYPE_CHECKING:
    from datasets import DatasetDict

    from hf_gradguard.training.trainer import GradGuardTrainer


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
        FileNotFoundError: If `model_name_or_path` is a path that leads nowhere.

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
    parsed = parser.parse_args_into_dataclasses(args=rest)
    for one in parsed:
        if isinstance(name := getattr(one, "model_name_or_path", None), str):
            check_name(name)  # before data are loaded
    return parsed


def with_classes(splits: DatasetDict, column: str) -> DatasetDict:
    """Number the classes of a column of labels: in every split those of the training split, sorted.

    Args:
        splits: Rows with other columns too. One split is called `train`.
        column: Of numbers or strings. A `ClassLabel` has its numbers already.

    Raises:
        ValueError: For fewer than two classes, or a label that is none of them.

    Example:
        >>> from datasets import Dataset, DatasetDict
        >>> rows = Dataset.from_dict({"text": ["fine", "poor"], "label": ["good", "bad"]})
        >>> rows = with_classes(DatasetDict(train=rows), "label")["train"]
        >>> rows.features["label"].names, rows["label"][:]
        (['bad', 'good'], [1, 0])
    """
    from datasets import ClassLabel, DatasetDict

    kind = splits["train"].features[column]
    numbered = isinstance(kind, ClassLabel)
    found = kind.names if numbered else splits["train"].unique(column)
    classes = [label for label in found if label is not None]
    if len(classes) < 2:
        raise ValueError(
            f"Column {column!r} of the training split has {len(classes)} class(es), {classes}. A "
            "classifier needs two or more."
        )
    if numbered:
        return splits
    classes = sorted(classes)
    numbers = {label: number for number, label in enumerate(classes)}
    kind, coded = ClassLabel(names=list(map(str, classes))), DatasetDict()
    for name, rows in splits.items():
        if unknown := [label for label in rows.unique(column) if label not in numbers]:
            raise ValueError(
                f"Column {column!r} of split {name!r} holds {unknown[:5]}: no classes of the "
                f"training split, which has {classes[:5]}. Correct these rows, or leave them out."
            )
        labels = [numbers[label] for label in rows[column]]
        coded[name] = rows.remove_columns(column).add_column(column, labels, feature=kind)
    return coded


def write_metrics(
    trainer: GradGuardTrainer, metrics: Mapping[str, float], counted: str, **more: Any
) -> tuple[dict[str, Any], str]:
    """Write `metrics.json` into the output folder, which `recipes/compare.py` and `gradguard audit
    --metrics` read.

    Args:
        trainer: After training.
        metrics: What `train` and `evaluate` say, with `eval_accuracy` and `train_steps_per_second`.
        counted: What the number of rows that were judged on is called, such as
            `"eval_sentences"`.
        **more: Further entries.

    Returns:
        What was written, and where.

    Raises:
        OSError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> from hf_gradguard import GradGuardConfig, GradGuardTrainer
        >>> args = GradGuardConfig(tempfile.mkdtemp(), defense="pruning")
        >>> trainer = GradGuardTrainer(model, args, eval_dataset=train_dataset)
        >>> known = {"eval_accuracy": 0.9, "train_steps_per_second": 4.0}
        >>> report, path = write_metrics(trainer, known, "eval_sentences")
        >>> report["defense"], report["eval_sentences"], report["seconds_per_step"]
        ('pruning', 2, 0.25)
    """
    report = {
        "defense": trainer.defense.name,
        "settings": trainer.defense.settings(),
        "accuracy": metrics["eval_accuracy"],
        counted: len(trainer.eval_dataset),
        "ranks": trainer.accelerator.num_processes,
        "steps": trainer.state.global_step,
        "seconds_per_step": 1 / metrics["train_steps_per_second"],
        "seed": trainer.args.seed,
        "command": shlex.join(sys.argv),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    for name in ("defense/relative_error", "defense/cosine", "defense/seconds"):
        values = [row[name] for row in trainer.state.log_history if name in row]
        report[name] = sum(values) / len(values) if values else None
    report |= more
    path = os.path.join(trainer.args.output_dir, "metrics.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
    return report, path
