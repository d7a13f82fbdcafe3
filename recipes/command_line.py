"""What recipes that train share: flags, data, the training itself, and what is written of a run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import ClassLabel, DatasetDict, load_dataset
from transformers import HfArgumentParser

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.models import check_name


def flag(default: Any, text: str) -> Any:
    """A dataclass field that is a flag with this help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Sst2Arguments:
    data_dir: str | None = flag(None, "Folder with train.tsv and dev.tsv. Default: GLUE's SST-2.")
    max_length: int = flag(64, "Tokens a sentence; longer ones are cut.")


@dataclass
class TrainingArguments(GradGuardConfig):
    num_train_epochs: float = flag(1.0, "Passes over the data.")
    save_strategy: str = flag("no", "Checkpoints on the way: no, steps or epoch.")


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
    finder_args, flags = finder.parse_known_args(argv)
    if finder_args.config is not None:
        with open(finder_args.config, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
        names = {field.name for kind in dataclass_types for field in fields(kind) if field.init}
        if unknown := sorted(set(values) - names):
            raise ValueError(
                f"{finder_args.config} holds {', '.join(unknown)}, which no flag is called. See "
                "--help."
            )
        parser.set_defaults(**values)
    parsed = parser.parse_args_into_dataclasses(args=flags)
    for arguments in parsed:
        if isinstance(name := getattr(arguments, "model_name_or_path", None), str):
            check_name(name)  # before data are loaded
    return parsed


def check_ranks(state: PartialState, expected: int | None) -> None:
    """Stop unless exactly this many ranks were started."""
    state.print(f"ranks: {state.num_processes}")
    if expected is not None and state.num_processes != expected:
        sys.exit(
            f"{expected} ranks were asked for, but {state.num_processes} started. See the head of "
            "this file."
        )


def load_sst2(data_dir: str | None, state: PartialState) -> DatasetDict:
    """`sentence` and `label`, of the Hub's GLUE or of a folder."""
    with state.main_process_first():
        if data_dir is None:
            return load_dataset("nyu-mll/glue", "sst2")
        files = {"train": f"{data_dir}/train.tsv", "validation": f"{data_dir}/dev.tsv"}
        return load_dataset("csv", data_files=files, delimiter="\t", quoting=3)


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
    kind = splits["train"].features[column]
    is_numbered = isinstance(kind, ClassLabel)
    labels = kind.names if is_numbered else splits["train"].unique(column)
    classes = [label for label in labels if label is not None]
    if len(classes) < 2:
        raise ValueError(
            f"Column {column!r} of the training split has {len(classes)} class(es), {classes}. A "
            "classifier needs two or more."
        )
    if is_numbered:
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
        numbered = [numbers[label] for label in rows[column]]
        coded[name] = rows.remove_columns(column).add_column(column, numbered, feature=kind)
    return coded


def accuracy_of(predictions: Any) -> dict[str, float]:
    """For `compute_metrics`."""
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def train_and_save(trainer: GradGuardTrainer, card: dict[str, str]) -> dict[str, float]:
    """The metrics. The model and its card are in the output folder then."""
    trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    metrics = {**trained.metrics, **trainer.evaluate()}
    trainer.save_model()
    trainer.create_model_card(**card)
    return metrics


def report_run(
    trainer: GradGuardTrainer, metrics: Mapping[str, float], counted: str,
    claim: str | None = None, **entries: Any,
) -> None:  # fmt: skip
    """Write `metrics.json`, print one line, and end.

    Args:
        trainer: After training.
        metrics: What `train_and_save` returns.
        counted: As for `write_metrics`.
        claim: The line's end. Default: the seconds of a step.
        **entries: Further entries of the file.
    """
    if trainer.is_world_process_zero():
        report, path = write_metrics(trainer, metrics, counted, **entries)
        claim = f", {report['seconds_per_step']:.2f} s a step" if claim is None else claim
        print(f"{report['defense']}: accuracy {report['accuracy']:.3f}{claim} -> {path}")
    trainer.accelerator.end_training()


def write_metrics(
    trainer: GradGuardTrainer, metrics: Mapping[str, float], counted: str, **entries: Any
) -> tuple[dict[str, Any], str]:
    """Write `metrics.json` into the output folder, which `recipes/compare.py` and `gradguard audit
    --metrics` read.

    Args:
        trainer: After training.
        metrics: What `train` and `evaluate` say, with `eval_accuracy` and `train_steps_per_second`.
        counted: What the number of rows that were judged on is called, such as
            `"eval_sentences"`.
        **entries: Further entries.

    Returns:
        What was written, and where.

    Raises:
        OSError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> from hf_gradguard import GradGuardConfig, GradGuardTrainer
        >>> args = GradGuardConfig(tempfile.mkdtemp(), defense="pruning")
        >>> trainer = GradGuardTrainer(model, args, eval_dataset=train_dataset)
        >>> metrics = {"eval_accuracy": 0.9, "train_steps_per_second": 4.0}
        >>> report, path = write_metrics(trainer, metrics, "eval_sentences")
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
        values = [row[name] for row in trainer.private_log_history if name in row]
        report[name] = sum(values) / len(values) if values else None
    report |= entries
    path = os.path.join(trainer.args.output_dir, "metrics.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
    return report, path
