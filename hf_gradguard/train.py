"""The command `gradguard train`: from flags or a YAML file to a trained model on disk.

It also writes the model's card and `metrics.json`. It runs on one process, or under `accelerate
launch -m hf_gradguard train ...`. With `--head` it trains a linear head on a frozen encoder, by
proof.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import transformers
from accelerate import PartialState
from torch import nn
from transformers import (
    AutoConfig,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
    set_seed,
)

from .data.class_labels import find_class
from .data.files import hold_out, read_splits
from .data.samples import Labeled, show_rows
from .extras import need
from .flags import SourceSettings, fill, option
from .gradient_map.domain import IGNORED, IMAGE
from .heads import private_head
from .heads.making import HEADS
from .leakage import membership_power
from .models import TASKS, Head, Task, check_name, find_head, load_model
from .training.config import GradGuardConfig, resolve_defense
from .training.refusals import check_arguments
from .training.trainer import GradGuardTrainer

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_IMAGES = "image-classification"
_TASKS = ("text-classification", _IMAGES, "text-generation")


@dataclass(kw_only=True)
class TrainSettings(SourceSettings):
    """The settings of `gradguard train` beside training arguments."""

    _argument_group_name: ClassVar[str] = "this training"

    model: str = option(
        "", "a folder, a checkpoint, a folder of PEFT adapters, or a Hub name",
        aliases=["--model_name_or_path"],
    )  # fmt: skip
    output: str = option(
        "", "folder of the model, its card and metrics.json", required=True,
        aliases=["--output_dir"],
    )  # fmt: skip
    max_length: int = option(64, "most tokens of a text; longer ones are cut")
    num_ranks: int | None = option(None, "stop unless exactly this many ranks were started")
    use_peft: bool = option(False, "train LoRA adapters beside the frozen model (texts)")
    lora_r: int = option(16, "rank of the adapters")
    lora_alpha: float = option(32.0, "scale of the adapters, times their rank")
    lora_dropout: float = option(0.0, "dropout before the adapters")
    lora_target_modules: list[str] | None = option(  # noqa: RUF009
        None, "modules that get adapters. Default: those that PEFT has for the model"
    )
    from_scratch: str | None = option(
        None, "train a model of this type from nothing, in the place of --model: bert, vit, ..."
    )
    model_config: dict[str, Any] | None = option(None, "for --from_scratch: its settings")  # noqa: RUF009


@dataclass(kw_only=True)
class HeadSettings:
    """The settings of `gradguard train --head`, which have defaults that need no search."""

    _argument_group_name: ClassVar[str] = "a linear head by proof"

    head: bool = option(
        False, "train a linear head on a frozen encoder, by proof: dp_sgd by samples, with noise "
        "that cancels in the weights",
    )  # fmt: skip
    encoder: str | None = option(None, "the frozen encoder, a folder or Hub name. Default: --model")
    public: str | None = option(
        None, "file of texts, or folder of images, that are nobody's secret. Default for texts: "
        "sentences that come with the package",
    )  # fmt: skip
    noise_multiplier: float | None = option(
        None, "σ of all messages together, 1.5 by default; 0: no defense"
    )
    target_epsilon: float | None = option(None, "ε that the training may spend, in place of σ")
    delta: float | None = option(None, "δ. Default: 1e-5, or less for more than 10,000 rows")
    clip: float | None = option(None, "norm that each row's gradient is clipped to, by default 0.3")
    directions: int | None = option(
        None, "public directions of features. Default: one for every 16 rows, at most 1,400"
    )
    sampling: str | None = option(
        None, "how rows come into messages: shuffle (default), or each into one that is drawn in "
        "secret", choices=("shuffle", "balls_in_bins"),
    )  # fmt: skip


@dataclass
class TrainArguments(GradGuardConfig):
    """The training arguments of `gradguard train`, which have defaults of their own."""

    _argument_group_name: ClassVar[str] = "training: of Transformers, with other defaults"

    defense: str | None = option(
        None, "the defense, by name; none must be said. See `gradguard defenses`. Required unless "
        "--head",
    )  # fmt: skip
    num_train_epochs: float = option(1.0, "passes over the data")
    save_strategy: str = option("no", "checkpoints on the way: no, steps or epoch")


def run_train(flags: Mapping[str, Any]) -> None:
    """Train under a defense, evaluate, and save the model, its card and `metrics.json`.

    Args:
        flags: The flags that were used, by name.

    Raises:
        ValueError: If settings, data and model do not fit together.
        OSError: If a file cannot be read, or the output folder cannot be written to.
    """
    settings, head_settings = fill(TrainSettings, flags), fill(HeadSettings, flags)
    if head_settings.head:
        _run_head(settings, head_settings, flags)
        return
    for field in fields(HeadSettings):
        if flags.get(field.name) is not None and field.name != "head":
            raise ValueError(f"--{field.name} is for --head: give that too, or leave it out.")
    if not flags.get("defense"):
        raise ValueError("--defense must be given (none must be said), or --head.")
    args = fill(TrainArguments, {**flags, "output_dir": settings.output})
    args.remove_unused_columns = False  # the model's are made of the others when a row is read
    _check(settings, args)
    args.model_name_or_path = settings.model or None
    state = PartialState(cpu=args.use_cpu)
    check_ranks(state, settings.num_ranks)
    head, new_head, splits = _read_data(settings, args.seed, state)
    model, processing_class = _model_for(settings, args, head, new_head, splits["train"], state)
    datasets = {
        name: _dataset(labeled, model, processing_class, settings.max_length)
        for name, labeled in splits.items()
    }
    if settings.use_peft:
        model = _with_adapters(model, settings, head.task)
    is_language_model = head.labels is None
    trainer = GradGuardTrainer(
        model=model,
        args=args,
        train_dataset=datasets["train"],
        eval_dataset=datasets["validation"],
        data_collator=_collator(head, processing_class),
        processing_class=processing_class,
        compute_metrics=partial(accuracy_of, shifted=is_language_model),
        preprocess_logits_for_metrics=_predicted,
    )
    card = {"tasks": head.task.name, "dataset": os.path.basename(settings.dataset.rstrip("/"))}
    counted = "eval_images" if head.domain == "image" else "eval_sentences"
    report_run(trainer, train_and_save(trainer, card), counted)


def _run_head(
    settings: TrainSettings, head_settings: HeadSettings, flags: Mapping[str, Any]
) -> None:
    """Train a linear head on a frozen encoder, and save it, its card and `metrics.json`."""
    settings.model = head_settings.encoder or settings.model
    _check_head(settings, flags)
    task = _head_for(settings)
    state = PartialState(cpu=bool(flags.get("use_cpu")))
    check_ranks(state, settings.num_ranks)
    seed = int(flags.get("seed", GradGuardConfig.seed))
    _, new_head, splits = _read_data(settings, seed, state, task)
    classes, names = new_head["label2id"], list(new_head["label2id"])
    rows = {name: _head_rows(labeled, classes) for name, labeled in splits.items()}
    with state.main_process_first():
        head = private_head(
            settings.model, head_settings.public, labels=names, task=task.task.name,
            directions=head_settings.directions, max_length=settings.max_length,
        )  # fmt: skip
    if state.is_main_process:
        show_rows(splits["train"], classes)
    args = head.training_arguments(
        settings.output, num_rows=len(rows["train"]), **_head_arguments(head_settings, flags)
    )
    check_arguments(args)
    trainer = GradGuardTrainer(
        head,
        args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=head.processing_class,
        compute_metrics=accuracy_of,
        preprocess_logits_for_metrics=_predicted,
    )
    card = {"tasks": task.task.name, "dataset": os.path.basename(settings.dataset.rstrip("/"))}
    metrics = train_and_save(trainer, card | {"finetuned_from": settings.model})
    proved, claim = proof_of(trainer)
    counted = "eval_images" if task.domain == "image" else "eval_sentences"
    setup = {"encoder": settings.model, "directions": head.config.directions}
    report_run(trainer, metrics, counted, claim, **setup, **proved)
    if state.is_main_process:
        print(
            f"Load it by pipeline({task.task.name!r}, {settings.output!r}), after `import "
            "hf_gradguard.heads`."
        )


def _check_head(settings: TrainSettings, flags: Mapping[str, Any]) -> None:
    """Refuse settings that make no sense for a head, before anything is loaded."""
    if Path(settings.output).is_file():
        raise ValueError(f"{settings.output} is a file: give a folder as --output.")
    if not settings.model:
        raise ValueError("--head needs an encoder: name it by --encoder (or --model).")
    check_name(settings.model)
    if flags.get("defense") not in (None, "dp_sgd", "none"):
        raise ValueError(
            f"--head is behind dp_sgd, which proves something, and not {flags['defense']}: leave "
            "--defense out, or train the whole model, without --head."
        )
    for name in ("use_peft", "from_scratch"):
        if flags.get(name):
            raise ValueError(
                f"--head trains nothing below the head, so --{name} has nothing to do: leave one "
                "of both out."
            )


def _head_for(settings: TrainSettings) -> Head:
    """Return the head to put on an encoder, by `--task` or what the encoder was saved for."""
    head = find_head(settings.model, settings.task)
    if head.task.name == "fill-mask" and settings.task is None:
        return find_head(settings.model, "text-classification")  # such a model is an encoder
    if head.task.name not in HEADS:
        raise ValueError(
            f"--head classifies, and {settings.model} is for {head.task.name}. Give --task "
            "text-classification to put a head on its encoder, or leave --head out and train it "
            "under --defense dp_sgd."
        )
    return head


def _head_arguments(head_settings: HeadSettings, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training arguments and settings of `dp_sgd` that were given."""
    names = {field.name for field in fields(GradGuardConfig) if field.init}
    arguments = {name: value for name, value in flags.items() if name in names}
    is_undefended = arguments.pop("defense", None) == "none"
    mechanism = dict(arguments.pop("defense_kwargs", None) or {})
    for name in ("noise_multiplier", "target_epsilon", "delta", "clip", "sampling"):
        if (value := getattr(head_settings, name)) is not None:
            mechanism[name] = value
    if is_undefended:
        mechanism["noise_multiplier"] = 0
    return {name: value for name, value in arguments.items() if name != "output_dir"} | mechanism


def _head_rows(labeled: Labeled, classes: Mapping[str, int]) -> Dataset:
    """Return rows of a text or image and of `labels`, the class ids."""
    from datasets import Dataset

    places = range(len(labeled))
    labels = labeled.label_ids(classes, places)
    if labeled.kind == "text":
        return Dataset.from_dict({"text": list(labeled.inputs(places)), "labels": labels})
    rows = labeled.rows.select_columns([labeled.input_column])
    if labeled.input_column != "image":
        rows = rows.rename_column(labeled.input_column, "image")
    return rows.add_column("labels", labels)


def proof_of(trainer: GradGuardTrainer) -> tuple[dict[str, Any], str]:
    """Return what is proved of a training, for its metrics and in words; nothing without a proof.

    Args:
        trainer: The trainer, after training.
    """
    rows = trainer.private_rows
    # Whoever knows the noise takes it off again.
    if rows is None or rows.noise_multiplier is None or rows.is_noise_known():
        return {}, ", without a proof"
    # Noise that is correlated counts for all messages together, independent noise for each.
    is_of_all = bool(rows.defense.correlated)
    messages = "all messages together" if is_of_all else "a message"
    if trainer.args.noise_for == "sum":
        messages += ", summed up over ranks"
    members = membership_power(rows.noise_multiplier)
    proved = {
        "epsilon": rows.epsilon,
        "delta": rows.defense.delta,
        "noise_multiplier": rows.noise_multiplier,
        f"members_found_{'' if is_of_all else 'in_a_message_'}at_most": members,
    }
    claim = (
        f", proved for each row: of {messages} at most {members:.1%} of the members are found at 1 "
        "% false alarms"
    )
    if rows.epsilon is not None:
        claim += f", ε = {rows.epsilon:.3g} at δ = {rows.defense.delta:g}"
    return proved | _of_secret_positions(rows), claim


def _of_secret_positions(rows: Any) -> dict[str, float]:
    """Return the ε for whoever does not know in which messages a row is, if that is another one."""
    figures = rows.metrics()
    name = "epsilon_secret_positions"
    return {name: figures[f"defense/{name}"]} if f"defense/{name}" in figures else {}


def _check(settings: TrainSettings, args: TrainArguments) -> None:
    """Refuse settings that cannot work, before anything is loaded."""
    if Path(settings.output).is_file():
        raise ValueError(f"{settings.output} is a file: give a folder as --output.")
    defense = resolve_defense(None, args)
    check_arguments(args)
    if settings.from_scratch:
        settings.model = ""  # of the file that it overrides
    elif not settings.model:
        raise ValueError("--model must be given, or --from_scratch with a type of model.")
    else:
        check_name(settings.model)
    is_private = getattr(defense, "per_sample", False)
    if settings.from_scratch and is_private and _new_task(settings).name != _IMAGES:
        raise ValueError(
            "--from_scratch learns its vocabulary from the training texts and saves it: words "
            "of single ones too, which no ε of dp_sgd with per_sample covers. Name a model whose "
            "tokenizer comes from other text as --model."
        )


def check_ranks(state: PartialState, expected: int | None) -> None:
    """Stop unless exactly this many ranks were started.

    Args:
        state: The state of this process, which knows the number of ranks.
        expected: The number that was asked for; `None` accepts any.

    Raises:
        ValueError: If the numbers differ; the message has both.
    """
    state.print(f"ranks: {state.num_processes}")
    if expected is not None and state.num_processes != expected:
        raise ValueError(
            f"{expected} ranks were asked for, but {state.num_processes} started: docs/train.md "
            "has the line that starts several."
        )


# --- data


def _read_data(
    settings: TrainSettings, seed: int, state: PartialState, head: Head | None = None
) -> tuple[Head, dict[str, Any], dict[str, Labeled]]:
    """Return the model's head, settings of a head for the data's classes, and the splits.

    The splits are `train` and `validation`. A head that is given is taken.
    """
    is_new = settings.from_scratch is not None
    if is_new:
        head = Head(_new_task(settings), False, "class")
    head = head or find_head(settings.model, settings.task)
    if is_new and head.task.own_labels:
        head = replace(head, labels=None)
    check_task(head.task.name, head.labels)
    if head.domain == "image":
        need("train", "images", "PIL")
    columns = head.domain, head.labels, settings.column, settings.label_column

    def labeled(splits: DatasetDict) -> dict[str, Labeled]:
        return {name: Labeled(rows, settings.dataset, *columns) for name, rows in splits.items()}

    with state.main_process_first():
        rows = read_splits(settings.dataset, settings.dataset_config, settings.split)
    # Before any are held out: an error names a row by its place in the file, and the classes are
    # those of all rows.
    splits = labeled(rows)
    for split in splits.values():
        split.check()
    new_head = {} if head.labels is None else splits["train"].new_head()
    if new_head.get("problem_type"):
        raise ValueError(
            f"{settings.dataset}: {splits['train'].label_column!r} holds numbers with a point, or "
            "lists, which are no classes: choose another with --label_column."
        )
    if "validation" not in splits:
        splits = labeled(hold_out(rows["train"], settings.dataset, seed))
    return head, new_head, splits


def check_task(task: str, labels: str | None) -> None:
    """Refuse a task that the command does not train.

    Args:
        task: The name of a task.
        labels: What one label is; see `label_kind`. `None` if a text is its own label.

    Raises:
        ValueError: If it is refused; the message names the way out.

    Example:
        >>> check_task("text-classification", "class")
        >>> check_task("token-classification", "token")
        Traceback (most recent call last):
        ValueError: train takes text-classification, ... train it by GradGuardTrainer, ...
    """
    if task not in _TASKS or labels not in ("class", None):
        raise ValueError(
            f"train takes {', '.join(_TASKS)} by one class, and this is {task} "
            f"({labels or 'text'} labels): train it by GradGuardTrainer, or choose a --task."
        )


def _dataset(labeled: Labeled, model: nn.Module, processing_class: Any, max_length: int) -> Any:
    """Return rows of `labels` and of inputs that are made when they are read."""
    column, rows = labeled.input_column, labeled.rows.select_columns([labeled.input_column])
    config: Any = model.config
    if labeled.labels is not None:
        labels = labeled.label_ids(config.label2id, range(len(labeled)))
        rows = rows.add_column("labels", labels)
    places = getattr(config, "max_position_embeddings", None) or max_length
    if labeled.kind == "text":
        max_length = min(max_length, places, processing_class.model_max_length)

    def to_inputs(batch: dict[str, list[Any]]) -> dict[str, Any]:
        labels = {"labels": batch["labels"]} if "labels" in batch else {}
        if labeled.kind == "text":
            texts = [str(text) for text in batch[column]]
            return {**processing_class(texts, truncation=True, max_length=max_length), **labels}
        return {IMAGE.key: list(_pixels(batch[column], labeled, model, processing_class)), **labels}

    return rows.with_transform(to_inputs)


def _pixels(
    stored: Sequence[Any], labeled: Labeled, model: nn.Module, processor: Any
) -> torch.Tensor:
    from .data.images import read_image, to_pil

    folder, mode = Path(labeled.dataset).parent, mode_of(model.config)
    images = [to_pil(read_image(image, labeled.dataset, folder), mode) for image in stored]
    pixels: torch.Tensor = processor(images, return_tensors="pt")[IMAGE.key]
    return pixels


def mode_of(config: Any) -> str:
    """Return the mode of the images that a model takes, `"L"` or `"RGB"`."""
    return "L" if getattr(config, "num_channels", 3) == 1 else "RGB"


def _collator(head: Head, processing_class: Any) -> Any:
    if head.domain == "image":
        return default_data_collator
    if head.labels is None:
        return DataCollatorForLanguageModeling(processing_class, mlm=False)
    return DataCollatorWithPadding(processing_class)


# --- the model


def _model_for(
    settings: TrainSettings,
    args: TrainArguments,
    head: Head,
    new_head: Mapping[str, Any],
    labeled: Labeled,
    state: PartialState,
) -> tuple[nn.Module, Any]:
    """Return the model with a head for the data's classes, and its tokenizer or image processor."""
    set_seed(args.seed)
    if settings.from_scratch:
        model, processing_class = _new_model(settings, head, new_head, labeled, state)
    else:
        name, task = settings.model, settings.task
        model, processing_class = load_model(name, task, None if head.is_saved else new_head)
        # The head that a model comes with is kept where it is of these classes.
        if head.is_saved and new_head and not _is_of(model, new_head["label2id"]):
            set_seed(args.seed)
            model, processing_class = load_model(name, task, new_head)
        if processing_class is None:
            raise ValueError(f"{name} has no preprocessor_config.json: save one there.")
    if state.is_main_process:
        show_rows(labeled, new_head and model.config.label2id)  # type: ignore[union-attr, arg-type]
    return model, processing_class


def _is_of(model: nn.Module, names: Mapping[str, int]) -> bool:
    """Return whether a model's classes are those of the data, each once."""
    classes: Any = model.config.label2id  # type: ignore[union-attr]
    try:
        return {find_class(name, classes) for name in names} == set(classes.values())
    except ValueError:
        return False


def _new_task(settings: TrainSettings) -> Task:
    """Return the task of a model that is made from nothing."""
    reads_texts = settings.from_scratch in TASKS["text-classification"].models
    name = settings.task or ("text-classification" if reads_texts else _IMAGES)
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}. There are: {', '.join(TASKS)}.")
    return TASKS[name]


def _new_model(
    settings: TrainSettings,
    head: Head,
    new_head: Mapping[str, Any],
    labeled: Labeled,
    state: PartialState,
) -> tuple[nn.Module, Any]:
    """Return a model at random and its tokenizer or image processor.

    Rank 0 learns the tokenizer from the texts. The processor maps images to [-1, 1].
    """
    sizes: dict[str, Any] = {}
    processing_class: Any
    if head.domain == "text":
        folder = os.path.join(settings.output, "tokenizer")
        with state.main_process_first():
            if state.is_main_process:
                _learn_vocabulary(labeled.inputs(range(len(labeled))), folder)
            processing_class = BertTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        sizes["vocab_size"] = len(processing_class)
        sizes["max_position_embeddings"] = settings.max_length
    else:
        (image,) = labeled.inputs([0])
        channels, sizes["image_size"] = (1 if image.mode == "L" else 3), max(image.size)
        sizes["num_channels"] = channels
    sizes |= settings.model_config or {}
    if head.domain == "image":
        from transformers import ViTImageProcessor  # which warns where torchvision is missing

        gray = [0.5] * sizes["num_channels"]
        size = sizes["image_size"]
        processing_class = ViTImageProcessor(size=size, image_mean=gray, image_std=gray)
    config = AutoConfig.for_model(settings.from_scratch, **sizes, **new_head)
    return head.task.auto_class.from_config(config, trust_remote_code=False), processing_class


def _learn_vocabulary(texts: Iterable[str], folder: str) -> None:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    learned = BertWordPieceTokenizer()
    learned.train_from_iterator(texts, vocab_size=2000, min_frequency=2, show_progress=False)
    BertTokenizerFast(tokenizer_object=Tokenizer.from_str(learned.to_str())).save_pretrained(folder)


def _with_adapters(model: nn.Module, settings: TrainSettings, task: Task) -> nn.Module:
    need("train", "peft", "peft")
    from peft import LoraConfig, get_peft_model

    if not task.peft:
        raise ValueError(f"--use_peft is for models of texts, and this is {task.name}.")
    config = LoraConfig(
        task_type=task.peft, r=settings.lora_r, lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout, target_modules=settings.lora_target_modules,
    )  # fmt: skip
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


# --- what is measured and written


def _predicted(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return predicted classes; scores of a whole vocabulary would fill the memory."""
    scores: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return scores.argmax(-1)


def accuracy_of(evaluated: Any, shifted: bool = False) -> dict[str, float]:
    """Return the accuracy, as `compute_metrics` of a Trainer.

    It is the fraction of samples whose class is predicted correctly, or the mean over texts of that
    fraction of their tokens.

    Args:
        evaluated: The predicted classes or tokens, or the scores of classes, with the labels.
        shifted: Whether a place predicts the label of the next one.
    """
    predicted, labels = np.asarray(evaluated.predictions), np.asarray(evaluated.label_ids)
    predicted = predicted.argmax(-1) if predicted.ndim > labels.ndim else predicted
    accuracies = accuracy_by_sample(torch.from_numpy(predicted), torch.from_numpy(labels), shifted)
    return {"accuracy": sum(accuracies) / len(accuracies)}


def accuracy_by_sample(predicted: torch.Tensor, labels: torch.Tensor, shifted: bool) -> list[float]:
    """Return each sample's accuracy: 0 or 1, or the fraction of labeled tokens that are correct.

    Args:
        predicted: Class ids, `(B,)`, or token ids, `(B, T)`.
        labels: The true ids in the same shape, -100 where there is none.
        shifted: Whether a place predicts the label of the next one.

    Example:
        >>> labels = torch.tensor([[5, 7, -100]])
        >>> accuracy_by_sample(torch.tensor([[7, 8, 9]]), labels, shifted=True)
        [1.0]
    """
    if shifted:
        predicted, labels = predicted[:, :-1], labels[:, 1:]
    # One label per sample is a row of one token.
    counts = (labels != IGNORED).flatten(1) if labels.dim() > 1 else (labels != IGNORED)[:, None]
    correct = (predicted == labels).view_as(counts) & counts
    accuracies: list[float] = (correct.sum(1) / counts.sum(1).clamp_min(1)).tolist()
    return accuracies


def train_and_save(trainer: GradGuardTrainer, card: dict[str, str]) -> dict[str, float]:
    """Train and evaluate, save the model and its card, and return the metrics."""
    trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    metrics = {**trained.metrics, **trainer.evaluate()}
    trainer.save_model()
    trainer.create_model_card(**card)
    return metrics


def report_run(
    trainer: GradGuardTrainer, metrics: Mapping[str, float], counted: str,
    claim: str | None = None, **entries: Any,
) -> None:  # fmt: skip
    """Write `metrics.json`, print one line, and end the training.

    Args:
        trainer: The trainer, after training.
        metrics: What `train_and_save` returned.
        counted: The file's name for the number of evaluated rows, such as `"eval_sentences"`.
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
    """Write `metrics.json` into the output folder.

    `recipes/compare.py` and `gradguard audit --metrics` read it.

    Args:
        trainer: The trainer, after training.
        metrics: What `train` and `evaluate` return, with `eval_accuracy` and
            `train_steps_per_second`.
        counted: The file's name for the number of evaluated rows, such as `"eval_sentences"`.
        **entries: Further entries.

    Returns:
        What was written, and the file's path.

    Raises:
        OSError: If the file cannot be written.

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
        "loss": metrics.get("eval_loss"),
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
