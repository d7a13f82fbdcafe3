"""What recipes of heads share: flags and data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from datasets import DatasetDict

from hf_gradguard import GradGuardConfig
from hf_gradguard.data.class_labels import class_names, number_classes
from hf_gradguard.data.files import DataError, load_splits
from hf_gradguard.data.samples import Labeled, show_rows
from hf_gradguard.flags import FlagError, FlagParser
from hf_gradguard.flags import option as flag
from hf_gradguard.models import ModelError, check_name


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
class DataArguments(ColumnArguments):
    dataset: str = flag(
        "uoft-cs/cifar10", "Hub name (ylecun/mnist, ...), or a folder of folders, one per class."
    )
    dataset_config: str | None = flag(None, "For SVHN: cropped_digits.")

    @property
    def source(self) -> tuple[str, str | None]:
        """The data set, and its configuration."""
        return self.dataset, self.dataset_config


@dataclass
class TrainingArguments(GradGuardConfig):
    num_train_epochs: float = flag(1.0, "Passes over the data.")
    save_strategy: str = flag("no", "Checkpoints on the way: no, steps or epoch.")


def parse_arguments(*dataclass_types: Any, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Command-line flags over a YAML file's values over the defaults, as `gradguard train` has it.

    Args:
        *dataclass_types: What the flags fill.
        argv: The command line. Default: the program's.

    Returns:
        One object a dataclass.

    Raises:
        ValueError: If there is no such flag, or the file holds a key that is no flag.
        FileNotFoundError: If `model_name_or_path` is a path that leads nowhere.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> argv = ["--output_dir=out", "--defense=pruning", '--defense_kwargs={"ratio": 0.9}']
        >>> (args,) = parse_arguments(GradGuardConfig, argv=argv)
        >>> args.defense_kwargs
        {'ratio': 0.9}
    """
    script = sys.modules["__main__"]
    example = f"accelerate launch {os.path.basename(sys.argv[0])} --config FILE.yaml"
    parser = FlagParser(sys.argv[0], script.__doc__ or "", example, *dataclass_types)
    parsed = parser.instances(argv, *dataclass_types)
    for arguments in parsed:
        if isinstance(name := getattr(arguments, "model_name_or_path", None), str):
            check_name(name)  # before data are loaded
    return parsed


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
            labeled.check()  # refuses empty ones
    if state.is_main_process:
        names = class_names(splits["train"].features["labels"])
        show_rows(read["train"], {name: number for number, name in enumerate(names)})
    return DatasetDict({name: labeled.rows for name, labeled in read.items()}), column


def run(main: Callable[[], None]) -> None:
    """A recipe, which says in one line what is wrong with its data or its model."""
    try:
        main()
    except (DataError, FlagError, ModelError, FileNotFoundError, NotADirectoryError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
