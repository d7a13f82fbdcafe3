"""Models by name, and the task that a model's head is for.

A name is a local folder or a name on the Hub. The configuration decides the model's class, and the
class decides what a label is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from .logs import load_weights

ADAPTER = "adapter_config.json"
_WAY_OUT = (
    "Give the folder that `save_pretrained` wrote, with its config.json, or a name on the Hugging "
    "Face Hub, like distilbert/distilbert-base-uncased."
)
_FILE = re.compile(
    r"\.(csv|tsv|txt|jsonl?|ndjson|ya?ml|xml|html?|parquet|pq|arrow|feather|pkl|np[yz]|h5|gz|bz2|xz|zst"
    r"|zip|tar|xlsx?|ods|db|sqlite|png|jpe?g|gif|bmp|tiff?|webp|safetensors|bin|pth?|onnx|gguf|ckpt)$",
    re.IGNORECASE,
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class ModelError(ValueError):
    """A model cannot be loaded; the message is one line that names the way out."""


def is_written_as_path(name: str) -> bool:
    """Return whether a name is written as a path, so that it cannot be one on the Hub.

    Such a name begins like a path, ends like a file, holds characters that no name on the Hub does,
    or begins with a folder that exists here.

    Example:
        >>> is_written_as_path("./runs/model"), is_written_as_path("my/train.CSV")
        (True, True)
        >>> is_written_as_path("C:/model")
        True
        >>> is_written_as_path("distilbert/distilbert-base-uncased")
        False
    """
    folder, slash, _ = name.partition("/")
    return (
        os.path.isabs(name)
        or name.startswith((".", "~"))
        or _HUB_NAME.fullmatch(name) is None
        or _FILE.search(name) is not None
        or (slash != "" and os.path.isdir(folder))
    )


def check_name(name: str | os.PathLike[str]) -> None:
    """Refuse a path that leads nowhere; what could be a name on the Hub passes.

    Raises:
        FileNotFoundError: If the name is written like a path, and no folder is there.
        NotADirectoryError: If a file is there.

    Example:
        >>> check_name("distilbert/distilbert-base-uncased")
        >>> check_name("./runs/model")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder ./runs/model. Give the folder that ...
    """
    path = os.fspath(name)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        raise NotADirectoryError(f"{path} is a file, not the folder of a model. {_WAY_OUT}")
    if path.startswith("~") and os.path.isdir(full := os.path.expanduser(path)):
        raise FileNotFoundError(f"There is no folder {path}: write {full}, as no shell did.")
    if is_written_as_path(path):
        raise FileNotFoundError(f"There is no folder {path}. {_WAY_OUT}")


@contextlib.contextmanager
def explain_missing_model(name: str | os.PathLike[str]) -> Iterator[None]:
    """Explain in one line why a model or tokenizer cannot be loaded inside the context.

    Transformers takes any name that is no folder for a name on the Hub, and reports for a mistyped
    folder that the Hub cannot be reached.

    Raises:
        FileNotFoundError: If there is no such folder, and the Hub gave no such model.
        NotADirectoryError: If a file is there.
        ModelError: If a file is cut, or the model needs code of its own.

    Example:
        >>> with explain_missing_model("folder"):
        ...     raise OSError("We couldn't connect to 'https://huggingface.co'.")
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder folder, and the Hub gave no model of that name ...
    """
    check_name(name)
    path = os.fspath(name)
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ModelError):
        raise
    except Exception as error:  # a broken file makes libraries raise whatever they stumble over
        why = " ".join(str(error).split("\n\n")[0].split())
        if "trust_remote_code" in why:
            raise ModelError(
                f"{path} brings code of its own (trust_remote_code), which is not run here. Take a "
                "model whose code is in Transformers, or audit the Trainer that trains it."
            ) from error
        if isinstance(error, OSError) and not os.path.isdir(path):
            raise FileNotFoundError(
                f"There is no folder {path}, and the Hub gave no model of that name "
                f"({str(error).splitlines()[0]}). {_WAY_OUT} For a gated one accept its terms on "
                "its page, and run `hf auth login`."
            ) from error
        if (damaged := _damaged_file(path)) is not None:
            raise ModelError(f"{damaged} is cut or damaged: copy it again.") from error
        if isinstance(error, UnpicklingError):
            raise ModelError(
                f"{path} has pickled weights that could run code: save them as safetensors."
            ) from error
        if not isinstance(error, OSError | ValueError | ImportError):
            why = f"{type(error).__name__}: {why}"
        if "ignore_mismatched_sizes" in why:
            why = "config.json and the weights are of different sizes: take both from one model"
        if "no file named" in why or "Repo id" in why:  # PEFT looks for adapters on the Hub then
            why = f"it has no weights. {_WAY_OUT}"
        raise ModelError(f"{path} cannot be loaded: {why}") from error


def _damaged_file(folder: str) -> str | None:
    """Return the path of a file in a folder that cannot be read to its end, or `None`."""
    for file in sorted(Path(folder).glob("*")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".safetensors":
                safe_open(file, framework="pt")
            elif file.suffix == ".bin" and file.name != "training_args.bin":
                zipfile.ZipFile(file).close()  # an older form was read without an error
        except (ValueError, SafetensorError, OSError, zipfile.BadZipFile):
            return str(file)
    return None


@dataclass(frozen=True)
class Task:
    """A task, which decides the kind of head that a model has.

    Args:
        name: The task's name on the Hub.
        auto: The name of the Auto class that loads such a model.
        models: Names of model classes by model type.
        own_labels: Whether the labels are made of the text itself, so that they are as private as
            the text.
        peft: The task's name in PEFT.
    """

    name: str
    auto: str
    models: Mapping[str, Any]
    own_labels: bool = False
    peft: str = ""

    @property
    def auto_class(self) -> Any:
        """The Auto class that loads such a model."""
        return getattr(transformers, self.auto)

    @property
    def classifies(self) -> bool:
        """Whether a label of this task is one class, several classes, or numbers."""
        return self.name.endswith("-classification")

    @functools.cached_property
    def classes(self) -> frozenset[str]:
        """The names of all model classes of this task."""
        return frozenset(
            name
            for names in self.models.values()
            for name in (names if isinstance(names, tuple | list) else (names,))
        )


PRIVATE_HEAD = "gradguard_head"
"""The type of a private head, which Transformers knows once `hf_gradguard.heads` is imported."""

TASKS = {
    task.name: task
    for task in (
        Task(
            "text-classification", "AutoModelForSequenceClassification",
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
            | {PRIVATE_HEAD: "PrivateHeadForSequenceClassification"}, peft="SEQ_CLS",
        ),
        Task(
            "image-classification", "AutoModelForImageClassification",
            MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
            | {PRIVATE_HEAD: "PrivateHeadForImageClassification"},
        ),
        Task(
            "text-generation", "AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            own_labels=True, peft="CAUSAL_LM",
        ),
        Task(
            "token-classification", "AutoModelForTokenClassification",
            MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
            | {PRIVATE_HEAD: "PrivateHeadForTokenClassification"}, peft="TOKEN_CLS",
        ),
        Task(
            "text2text-generation", "AutoModelForSeq2SeqLM",
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, own_labels=True, peft="SEQ_2_SEQ_LM",
        ),
        Task(
            "fill-mask", "AutoModelForMaskedLM", MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            own_labels=True,
        ),
    )
}  # fmt: skip
"""The tasks by name. A class that is in two lists (BART) counts for the first."""


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wrapped, or the model itself.

    Example:
        >>> without_adapters(model) is model
        True
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model


def task_of(model: nn.Module) -> Task | None:
    """Return the task of a model's head by the model's class, or `None` if the class is in no list.

    Example:
        >>> task_of(model).name
        'text-classification'
    """
    names = [model_class.__name__ for model_class in type(without_adapters(model)).__mro__]
    return next((task for name in names for task in TASKS.values() if name in task.classes), None)


def label_kind(model: nn.Module) -> str:
    """Return what one label of a model is.

    It is `"class"`; `"several"` classes; one `"number"` or several; `"token"`, where each token has
    a class; or `"text"`, where the text is its own label.

    Example:
        >>> label_kind(model)
        'class'
    """
    return _label_kind(task_of(model), getattr(model, "config", None))


def _label_kind(task: Task | None, config: Any) -> str:
    if task is not None and task.own_labels:
        return "text"
    if task is not None and task.name == "token-classification":
        return "token"
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return "several"
    if problem == "regression" or getattr(config, "num_labels", None) == 1:
        return "number"
    return "class"


@dataclass(frozen=True)
class Head:
    """The head that a named model will be trained with, as known before its weights are loaded.

    Args:
        task: The head's task.
        is_saved: Whether the model comes with the head. A classifier's may be missing.
        labels: What one label is; see `label_kind`. `None` if no column holds labels, since the
            text is its own label.
    """

    task: Task
    is_saved: bool
    labels: str | None

    @property
    def domain(self) -> str:
        """The name of the inputs' domain, `"image"` or `"text"`."""
        return "image" if self.task.name == "image-classification" else "text"


def load_model(
    name: str, task: str | None = None, head: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Any]:
    """Load a model with its own head, in eval mode, and its tokenizer or image processor.

    Args:
        name: A folder or a Hub name; a checkpoint in the middle of training, or a folder of PEFT
            adapters, whose base model is loaded below them and stays frozen.
        task: One of `TASKS`. Default: that of the class which the configuration names; a model
            without a head gets a classifier's, at random.
        head: Settings of that new head, such as those that `classifier_head` returns. They replace
            a head of other classes.

    Returns:
        The model, and its tokenizer, its image processor, or `None` for an image model that comes
            without one.

    Raises:
        ValueError: If there is no such task, no class of the model's type for it, or no tokenizer.
        FileNotFoundError: If neither a folder nor the Hub has the model.

    Example:
        >>> model.save_pretrained("classifier")
        >>> _ = tokenizer.save_pretrained("classifier")
        >>> classifier, processor = load_model("classifier")
        >>> classifier.num_labels, processor.pad_token
        (2, '[PAD]')
    """
    chosen = find_head(name, task).task
    if os.path.exists(os.path.join(name, ADAPTER)):
        return _adapted(name, chosen)
    return _load(name, chosen, **(head or {}))


def classifier_head(classes: Sequence[str]) -> dict[str, Any]:
    """Return settings of a model's configuration for a head of named classes.

    Example:
        >>> classifier_head(["bad", "good"])["label2id"]
        {'bad': 0, 'good': 1}
    """
    names = list(classes)
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def find_head(name: str, task: str | None = None) -> Head:
    """Return the head of a named model, from the model's configuration alone.

    Args:
        name: A folder or a Hub name, as for `load_model`.
        task: One of `TASKS`. Default: that of the class which the configuration names.

    Raises:
        ValueError: If there is no such task, or no class of the model's type for it.
        FileNotFoundError: If neither a folder nor the Hub has the model.

    Example:
        >>> model.base_model.save_pretrained("encoder")
        >>> head = find_head("encoder")
        >>> head.task.name, head.is_saved, head.labels
        ('text-classification', False, 'class')
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"There is no task {task!r}. There are: {', '.join(TASKS)}.")
    base, adapted_classes = name, dict[str, int]()
    if has_adapters := os.path.exists(os.path.join(name, ADAPTER)):
        base, peft_type = _base_of(name)
        adapted_classes = _classes_of(name, peft_type)
        if task is None:
            task = next((t.name for t in TASKS.values() if t.peft and t.peft == peft_type), None)
    with explain_missing_model(base):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False, **adapted_classes)
    chosen = TASKS[task] if task is not None else _own_task(config, base)
    if config.model_type not in chosen.models:
        raise ValueError(f"{base} ({config.model_type}) is no model for {chosen.name}.")
    is_saved = has_adapters or not chosen.classifies or _architecture(config) in chosen.classes
    is_self_labeled = chosen.name in ("text-generation", "fill-mask")
    return Head(chosen, is_saved, None if is_self_labeled else _label_kind(chosen, config))


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [""])[0])


def _load(name: str, task: Task, **head: Any) -> tuple[nn.Module, Any]:
    with explain_missing_model(name):
        model = load_weights(task.auto_class, name, head)
    processing_class = _processing(name, task)
    if task.name == "text-classification" and getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = processing_class.pad_token_id  # a decoder's head looks for it
    return model, processing_class


def _own_task(config: Any, name: str) -> Task:
    """Return the task of the class that a configuration names; a bare model's is a classifier's."""
    architecture = _architecture(config)
    by_head = [task for task in TASKS.values() if architecture in task.classes]
    usual = TASKS["text-classification"], TASKS["image-classification"]
    classifiers = [task for task in usual if config.model_type in task.models]
    is_bare = "For" not in architecture or "ForPreTraining" in architecture
    if not is_bare and not by_head:
        raise ValueError(
            f"{name} is a {architecture}, which is none of {', '.join(TASKS)}. Choose the head to "
            "put on it by a task, or audit the Trainer that trains it: audit(trainer)."
        )
    if not by_head + classifiers:
        raise ValueError(
            f"{name} ({config.model_type}) is no model for text or image classification, and names "
            f"no other head. Choose a task of: {', '.join(TASKS)}."
        )
    return (by_head + classifiers)[0]


def _adapted(name: str, task: Task) -> tuple[nn.Module, Any]:
    """Load a base model with trainable adapters, for the task that the adapters name."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{name} holds adapters, and peft is not installed: pip install 'hf-gradguard[peft]'"
        ) from error

    base, peft_type = _base_of(name)
    model, processing_class = _load(base, task, **_classes_of(name, peft_type))
    with explain_missing_model(name):  # PEFT hands the last to the download, which takes no code
        adapted = PeftModel.from_pretrained(model, name, is_trainable=True, trust_remote_code=False)
    if os.path.exists(os.path.join(name, "tokenizer_config.json")):
        processing_class = _processing(name, task)
    return adapted.eval(), processing_class


def _base_of(folder: str) -> tuple[str, str | None]:
    """Return the model that a folder's adapters are for, and the task's name in PEFT."""
    with explain_missing_model(folder), open(os.path.join(folder, ADAPTER), "rb") as file:
        adapter = json.load(file)
    base: str | None = adapter.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{folder}/{ADAPTER} does not say which model its adapters are for: write its folder "
            "or Hub name there, as base_model_name_or_path."
        )
    return base, adapter.get("task_type")


_HEADS = ("classifier", "score", "out_proj")  # not `pre_classifier`, which PEFT saves as well


def _classes_of(folder: str, peft_type: str | None) -> dict[str, int]:
    """Return how many classes the head has that was trained beside the adapters, as a setting."""
    path = os.path.join(folder, "adapter_model.safetensors")
    if peft_type not in ("SEQ_CLS", "TOKEN_CLS") or not os.path.exists(path):
        return {}
    with explain_missing_model(folder), safe_open(path, framework="pt") as file:
        names = list(file.keys())
        saved = [name for name in names if "lora_" not in name and name.endswith(".weight")]
        heads = [name for name in saved if name.split(".")[-2] in _HEADS] or saved
        return {"num_labels": file.get_slice(heads[-1]).get_shape()[0]} if heads else {}


def _processing(name: str, task: Task) -> Any:
    with explain_missing_model(name):
        if task.name == "image-classification":
            has_processor = os.path.exists(os.path.join(name, "preprocessor_config.json"))
            if os.path.isdir(name) and not has_processor:
                return None
            return AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        return load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer, and make sure that it has a token to pad with.

    Raises:
        ModelError: If the model has no tokenizer: Transformers makes an empty one, which knows no
            token.

    Example:
        >>> _ = tokenizer.save_pretrained("folder")
        >>> load_tokenizer("folder").pad_token
        '[PAD]'
    """
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"{name} has no tokenizer: save it there, by tokenizer.save_pretrained({name!r})."
        )
    if tokenizer.pad_token is None:  # as recipes for decoders do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer
