"""What recipes that train share: flags, data, the training itself, and what is written of a run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import DatasetDict
from transformers import HfArgumentParser

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.data.files import DataError, load_splits
from hf_gradguard.data.labels import class_names, number_classes
from hf_gradguard.data.samples import Labeled, show_rows
from hf_gradguard.models import ModelError, check_name


def flag(default: Any, text: str) -> Any:
    """A dataclass field that is a flag with this help."""
    return field(default=default, metadata={"help": text})


@dataclass
class ColumnArguments:
    column: str | None = flag(None, "Of texts or images. Default: the usual names.")
    label_column: str | None = flag(None, "Of classes. Default: the usual names.")


@dataclass
class TextArguments(ColumnArguments):
    data_dir: str | None = flag(
        None, "A folder with train.tsv and dev.tsv, another table or Hub name. Default: SST-2."
    )
    max_length: int = flag(64, "Tokens a sentence; longer ones are cut.")

    @property
    def source(self) -> tuple[str, str | None]:
        """The data set, and its configuration."""
        return (self.data_dir, None) if self.data_dir else ("nyu-mll/glue", "sst2")


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


def load_classes(
    source: tuple[str, str | None], domain: str, columns: ColumnArguments, seed: int,
    state: PartialState,
) -> tuple[DatasetDict, str]:  # fmt: skip
    """What a classifier is trained on and judged by, read as `gradguard audit` reads it.

    Args:
        source: A file, a folder or a Hub name, and the configuration of one that has several.
        domain: `"text"` or `"image"`.
        columns: The flags.
        seed: Of what is held out where there are no rows to judge by.
        state: Rank 0 reads first, and shows the first rows on its terminal.

    Returns:
        The splits `train` and `validation` with `labels`, and the column of the inputs.

    Raises:
        DataError: If it cannot be read, or has no such columns, or a text is empty.
    """
    dataset, config = source
    with state.main_process_first():
        splits = load_splits(dataset, config, seed)
    flags = columns.column, columns.label_column
    labeled = Labeled(splits["train"], dataset, domain, "class", *flags)
    column, label_column = labeled.input_column, labeled.label_column
    splits = number_classes(splits.select_columns([column, label_column]), label_column)
    if label_column != "labels":
        splits = splits.rename_column(label_column, "labels")
    read = {
        name: Labeled(rows, dataset, domain, "class", column, "labels")
        for name, rows in splits.items()
    }
    if domain == "text":
        for labeled in read.values():
            deque(labeled.inputs(range(len(labeled))), maxlen=0)  # refuses empty ones
    if state.is_main_process:
        names = class_names(splits["train"].features["labels"])
        show_rows(read["train"], {name: number for number, name in enumerate(names)})
    return DatasetDict({name: labeled.rows for name, labeled in read.items()}), column


def run(main: Callable[[], None]) -> None:
    """A recipe, which says in one line what is wrong with its data or its model."""
    try:
        main()
    except (DataError, ModelError, FileNotFoundError, NotADirectoryError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")


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
        values = [row[name] for row in trainer.state.log_history if name in row]
        report[name] = sum(values) / len(values) if values else None
    report |= entries
    path = os.path.join(trainer.args.output_dir, "metrics.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
    return report, path
