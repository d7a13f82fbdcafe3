"""How the scripts read GLUE SST-2. Nothing to run by itself."""

from collections.abc import Iterable

from datasets import Dataset, load_dataset


def sst2(folder: str, split: str = "dev") -> Dataset:
    """`sentence` and `label` of FOLDER/SPLIT.tsv."""
    return load_dataset(
        "csv", data_files={split: f"{folder}/{split}.tsv"}, delimiter="\t", quoting=3
    )[split]


def of_usual_length(rows: Iterable[dict]) -> list[dict]:
    """Those of 8 to 20 words."""
    return [row for row in rows if 8 <= len(row["sentence"].split()) <= 20]
