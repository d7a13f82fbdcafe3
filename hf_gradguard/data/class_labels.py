"""Labels: which class of a model a label is, and which classes a data set has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .tables import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

logger = logging.get_logger(__name__)


def class_names(feature: Any) -> list[str]:
    """Return the names that a data set gives its classes, or an empty list.

    Example:
        >>> from datasets import ClassLabel, List
        >>> class_names(List(ClassLabel(names=["O", "B-PER"]))), class_names(None)
        (['O', 'B-PER'], [])
    """
    return list(getattr(getattr(feature, "feature", feature), "names", None) or [])


def sorted_classes(labels: Sequence[Any]) -> list[str]:
    """Return the sorted names of the classes in labels; none if they are numbers with a fraction.

    Whole numbers are sorted by size, others by their letters.

    Example:
        >>> sorted_classes(["10", "9", "9"]), sorted_classes([1.5, 2.0])
        (['9', '10'], [])
    """
    distinct = {_plain(label) for label in labels}
    if not all(map(_is_number, distinct)):
        return sorted(distinct)
    is_whole = all(float(label).is_integer() for label in distinct)
    return sorted(distinct, key=float) if is_whole else []


_MISSING = {"nan", "null", "na", "n/a", "#n/a", "<na>", "none"}
"""Ways in which tables write an empty cell. A class may be called so too, among other words."""


def check_classes(names: Sequence[str], where: str) -> None:
    """Refuse labels that are no set of classes; the message does not say their names.

    Args:
        names: Names of the classes in the labels.
        where: The data set's name and the column.

    Raises:
        DataError: If there are fewer than two classes, two that differ only in case, or numbers
            among which is one without a value.

    Example:
        >>> check_classes(["Good", "bad", "good"], "rows.csv: column 'label'")
        Traceback (most recent call last):
        hf_gradguard.data.tables.DataError: rows.csv: column 'label' has two classes that ...
    """
    if len(names) < 2:
        raise DataError(f"{where} has one class alone. A classifier needs two or more.")
    if len({name.lower() for name in names}) < len(names):
        raise DataError(
            f"{where} has two classes that differ in nothing but case. Write them alike."
        )
    missing = [name for name in names if name.lower() in _MISSING]
    others = [name for name in names if name not in missing]
    if missing and ("nan" in map(str.lower, missing) or all(map(_is_number, others))):
        raise DataError(f"{where} has rows without a value (NaN). Fill them, or delete the rows.")
    if all("," in name and _is_number(name.replace(",", ".", 1)) for name in names):
        raise DataError(f"{where} has numbers with a comma in them. Write a point.")


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _plain(label: Any) -> str:
    """Return a label as its class's name: 1.0, "1.0", 1, True and "1" are one class."""
    if isinstance(label, bool | int | float) and math.isfinite(label) and int(label) == label:
        return str(int(label))
    return re.sub(r"^(-?\d+)\.0*$", r"\1", str(label).strip())


def find_class(label: Any, classes: Mapping[str, int] | None) -> int:
    """Return the model's class id of a label, which is a name or a number.

    A name is looked up exactly, then without regard to case if only one class matches, then as a
    number.

    Raises:
        ValueError: If it is no class of the model. The message does not say the label.

    Example:
        >>> find_class("Good", {"bad": 0, "good": 1}), find_class("1", {"bad": 0, "good": 1})
        (1, 1)
    """
    name, numbers = _plain(label), classes or {}
    if name in numbers:
        return numbers[name]
    in_any_case = [number for other, number in numbers.items() if other.lower() == name.lower()]
    if len(in_any_case) == 1:
        return in_any_case[0]
    name = {"true": "1", "false": "0"}.get(name.lower(), name)
    # Where a class is called "5", a number is its name and not its place.
    is_place = name.isdigit() and not any(map(str.isdigit, numbers))
    if is_place and (not numbers or int(name) in numbers.values()):
        return int(name)
    shown = ", ".join(list(numbers)[:20]) or "unnamed"
    raise ValueError(
        f"{explain_label(label)} The model's classes are: {shown}{', ...' * (len(numbers) > 20)}."
    )


def explain_label(label: Any) -> str:
    """Explain why a label is no class, and what to do, without saying what it is.

    Example:
        >>> explain_label(-1)
        'It is -1, which stands for no label. Leave such rows out, or choose another split.'
    """
    if isinstance(label, list | tuple):
        return (
            "It is a list. Give one class a row; or, for several, take a model with "
            "problem_type='multi_label_classification'."
        )
    name = _plain(label)
    if name == "-1":
        return "It is -1, which stands for no label. Leave such rows out, or choose another split."
    if name.lower() in _MISSING:
        return "It has no value (NaN). Fill it, or delete the row."
    if _is_number(name) and not float(name).is_integer():
        return (
            "It is a number with a point, which is no class. For a regression take a model with "
            "num_labels=1."
        )
    return "It is no class of the model: correct it, or leave the row out."


def check_counting(labels: Sequence[Any], classes: Mapping[str, int] | None, where: str) -> None:
    """Refuse numbers that count from 1 where the model's count from 0.

    All but the largest would be taken for the next class.

    Args:
        labels: A whole column.
        classes: The model's `label2id`.
        where: The data set's name and the column.

    Raises:
        DataError: If the numbers count from 1; the message names the way out.

    Example:
        >>> check_counting(["1", "2"], {"bad": 0, "good": 1}, "rows.csv: column 'label'")
        Traceback (most recent call last):
        hf_gradguard.data.tables.DataError: rows.csv: column 'label' counts classes from 1 to 2, ...
    """
    if not classes or any(map(str.isdigit, classes)):
        return
    distinct = {_plain(label) for label in labels if label is not None}
    if distinct and all(map(str.isdigit, distinct)):
        numbers = set(map(int, distinct))
        if min(numbers) > 0 and max(numbers) == len(classes):
            raise DataError(
                f"{where} counts classes from 1 to {len(classes)}, and the model from 0 to "
                f"{len(classes) - 1}. Subtract 1 from each, or give the classes' names."
            )


def check_names(names: Sequence[str], classes: Mapping[str, int] | None, dataset: str) -> bool:
    """Return whether to match a data set's classes with the model's by their names.

    Returns:
        False if one of the two has no names.

    Raises:
        DataError: If the model lacks a name, or two would be one class.

    Example:
        >>> check_names(["neg", "pos"], {"POS": 0, "NEG": 1}, "data")
        True
    """
    if not names or not classes:
        return False
    if all(name == f"LABEL_{number}" for name, number in classes.items()):
        logger.warning(
            "The model does not name its classes: their numbers are taken for those of the data "
            "set, in its order."
        )
        return False
    numbers = set()
    for position, name in enumerate(names):
        try:
            numbers.add(find_class(name, classes))
        except ValueError as error:
            raise DataError(
                f"{dataset}: class {position} of its {len(names)} has a name that the model has "
                f"not. {error} Rename one of them."
            ) from None
    if len(numbers) < len(names):
        raise DataError(f"{dataset}: two of its classes have the name of one of the model's.")
    return True


def name_class(label: Any, names: Sequence[str]) -> Any:
    """Return the name of a data set's class number, or the names of several.

    Raises:
        ValueError: If a number is -1, which stands for no label.

    Example:
        >>> name_class([0, 1], ["neg", "pos"])
        ['neg', 'pos']
    """
    if isinstance(label, list):
        return [name_class(number, names) for number in label]
    if not 0 <= label < len(names):
        raise ValueError("The row has none. Choose another split.")
    return names[label]


def number_classes(splits: DatasetDict, column: str) -> DatasetDict:
    """Number the classes of a column of labels: in every split those of the training split, sorted.

    Args:
        splits: Rows with other columns too. One split is called `train`.
        column: The column of numbers or names. A `ClassLabel` has its numbers already.

    Raises:
        DataError: If there are fewer than two classes, or a label that is none of them.

    Example:
        >>> from datasets import Dataset, DatasetDict
        >>> rows = Dataset.from_dict({"text": ["fine", "poor"], "label": ["good", "bad"]})
        >>> rows = number_classes(DatasetDict(train=rows), "label")["train"]
        >>> rows.features["label"].names, rows["label"][:]
        (['bad', 'good'], [1, 0])
    """
    from datasets import ClassLabel, DatasetDict

    feature = splits["train"].features[column]
    where = f"Column {column!r} of the training split"
    names = class_names(feature)
    train = [label for label in splits["train"][column][:] if label is not None]
    if not names:
        names = sorted_classes(train)
        if train and not names:
            raise DataError(
                f"{where} holds numbers with a point, which are no classes: name another "
                "(--label_column)."
            )
    check_classes(names, where)
    numbers = {name: number for number, name in enumerate(names)}
    if is_numbered := bool(class_names(feature)):  # of which -1 stands for none
        numbers = {str(number): number for number in range(len(names))}
    coded = DatasetDict()
    for split, rows in splits.items():
        labels = []
        for row, label in enumerate(rows[column][:], 1):
            if (number := numbers.get(_plain(label))) is None:
                raise DataError(
                    f"Column {column!r} of split {split!r}, row {row}: no class of the training "
                    f"split, which has {len(names)}"
                    f"{': it is -1, which stands for no label' * (_plain(label) == '-1')}. Correct "
                    "the row, or leave it out."
                )
            labels.append(number)
        if is_numbered:
            coded[split] = rows
            continue
        kind = ClassLabel(names=names)
        coded[split] = rows.remove_columns(column).add_column(column, labels, feature=kind)
    return coded


def _class_ids(label: Any, classes: Mapping[str, int] | None) -> list[int]:
    if isinstance(label, str):  # a column of a table
        label = [name for name in label.split(",") if name.strip()]
    if not isinstance(label, list | tuple):
        raise ValueError("It is one value, and the model takes a list of classes a row.")
    return [find_class(name, classes) for name in label]


def _class_flags(label: Any, classes: Mapping[str, int] | None) -> list[float]:
    """Return one 0 or 1 for each class."""
    count = len(classes or ())
    if isinstance(label, list | tuple) and len(label) == count and set(label) <= {0, 1}:
        return [float(flag) for flag in label]
    ids = set(_class_ids(label, classes))
    return [float(number in ids) for number in range(count)]


def _number(label: Any, classes: Mapping[str, int] | None) -> float:
    if not _is_number(label):
        raise ValueError("It is no number.")
    return float(label)


CONVERTERS: dict[str, Callable[..., Any]] = {
    "class": find_class,
    "number": _number,
    "several": _class_flags,
    "token": _class_ids,
    "text": lambda label, classes: str(label),
}
"""Functions of a cell and the model's `label2id` that return the label, by the label's kind."""
