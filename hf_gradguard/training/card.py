"""The privacy section of a model card: what was protected, how, and what was not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ..defenses import Defense
from ..defenses.measured import recovered_behind
from ..gradient_map.parameters import withheld_by_name, withheld_parameters
from ..leakage.differential_privacy import protection_note
from ..models import TASKS
from .config import setting
from .exchange.gradients import tracking_layers
from .message import SharedMessages
from .privacy.labels import UNIT_OF_LABELS
from .privacy.proofs import (
    CLIENT_LEVEL,
    FIXED_SEED,
    NO_EPSILON,
    has_known_seed,
    is_client_level,
    is_noise_known,
)


def complete_card(trainer: Any) -> None:
    """Append `privacy_section` to the card in the Trainer's output folder, and complete its data.

    The card's data then has a tag, the figures of the last evaluation, and the model that training
    started from.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> GradGuardTrainer(model, defense="pruning").create_model_card()  # calls it
        >>> "## Privacy" in open("tmp_trainer/README.md").read()
        True
    """
    path = os.path.join(str(trainer.args.output_dir), "README.md")
    card = ModelCard.load(path)
    tags = card.data.tags or []
    card.data.tags = [*tags, *(["gradguard"] if "gradguard" not in tags else [])]
    start = str(getattr(getattr(trainer.model, "config", None), "name_or_path", "") or "")
    text = card.text
    text = text.replace("is a fine-tuned version of [](https://huggingface.co/)", _SCRATCH)
    if start and _SCRATCH in text:
        name = os.path.basename(os.path.normpath(start)) if os.path.isdir(start) else start
        text = text.replace(_SCRATCH, f"was fine-tuned from `{name}`")
        if not os.path.isdir(start):
            card.data.base_model = card.data.base_model or start
    figures = _evaluated(trainer)
    if figures:
        card.data.metrics = card.data.metrics or sorted(figures)
        if not card.data.eval_results:
            card.data.eval_results = _indexed(trainer.model, figures)
            card.data.model_name = card.data.model_name or _title(text)
        lines = "\n".join(f"- {name}: {value:.4g}" for name, value in figures.items())
        text = f"{text.rstrip()}\n\n## Evaluation\n\n{lines}"
    if hasattr(trainer.model, "describe_for_card"):
        text = f"{text.rstrip()}\n\n{trainer.model.describe_for_card()}"
    card.text = f"{text.rstrip()}\n\n{privacy_section(trainer)}"
    card.save(path)


def _evaluated(trainer: Any) -> dict[str, float]:
    """The last evaluation's figures, without those of its speed."""
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if not logged:
        return {}
    about = ("runtime", "per_second", "loss", "_time")
    return {
        name.removeprefix("eval_"): value
        for name, value in logged[-1].items()
        if name.startswith("eval_") and not name.endswith(about) and isinstance(value, int | float)
    }


def _indexed(model: Any, figures: Mapping[str, float]) -> list[EvalResult]:
    """For the `model-index`, which Transformers leaves empty for data that is not on the Hub."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tasks = [task.name for task in TASKS.values() if type(base).__name__ in task.classes]
    return [
        EvalResult(
            tasks[0], "private", "evaluation data of the training", metric_type=name,
            metric_name=name, metric_value=float(f"{value:.4g}"),
        )
        for name, value in figures.items()
        if tasks
    ]  # fmt: skip


def _title(text: str) -> str:
    return next((line[2:] for line in text.splitlines() if line.startswith("# ")), "model")


def privacy_section(trainer: Any) -> str:
    """Return the privacy section as Markdown.

    It names the defenses of the shared messages, their settings, what was withheld, and what is not
    protected. Before the first message it describes what was asked for.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> print(privacy_section(GradGuardTrainer(model, defense="pruning")))
        ## Privacy
        ...
        - Defense: `pruning`, with hf-gradguard
        ...
    """
    messages = trainer.shared_messages
    of_total = f": {{}} of {messages.total} messages of rank 0" if messages.total else ""
    points = [
        f"Defense: `{name}`, with hf-gradguard{of_total.format(count)}"
        for name, count in messages.by("defense").items()
    ]
    points.append(_epsilon(trainer))
    for about in (*_ABOUT, "noise"):
        points += _statements(messages, about)
    private = "" not in messages.by("epsilon") and messages.complete
    return _SECTION.format(
        summary=_summary(messages),
        points="\n".join(f"- {point}" for point in points if point),
        settings="\n\n".join(text.strip() for text in _statements(messages, "settings")),
        memorized=_MEMORIZED_PRIVATELY if private else _MEMORIZED,
        counts=", the number of label tokens" if "shared" in messages.by("counts") else "",
        repetition="" if private else _REPETITION,  # ε counts it
    )


def sharing(trainer: Any) -> dict[str, str]:
    """Return what the card says of a message that is shared now.

    Example:
        >>> from hf_gradguard import GradGuardTrainer
        >>> sharing(GradGuardTrainer(model, defense="pruning"))["defense"]
        'pruning'
    """
    defense, args = trainer.defense, trainer.args
    settings = {"defense": defense.name} | defense.settings()
    subject = "each client's messages"
    if setting(args, "noise_for") == "sum":
        subject = "the sums of all clients' messages, if every rank adds its noise"
    return {
        "defense": defense.name,
        "settings": f"\n\n```json\n{json.dumps(settings, indent=2, default=str)}\n```",
        "clients": f"Clients: {_clients(trainer)}; every micro-batch is a message protected by "
        "itself",
        "alone": "" if trainer.accelerator.num_processes > 1 else _ALONE,
        "withheld": _embeddings(trainer),
        "labels": _labels(trainer),
        "statistics": _statistics(trainer),
        "state": _state(trainer),
        "aggregation": _aggregation(trainer),
        "counts": "shared" if _shares_counts(trainer) else "",
        "noise": FIXED_SEED if has_known_seed(args) else _NEW_KEYS,
        # whose messages it is of
        "epsilon": "" if trainer.private_rows is None or is_noise_known(trainer) else subject,
        "recovered": _recovered(defense),
        "unit": CLIENT_LEVEL.format(f"`{defense.name}`") if is_client_level(defense) else "",
    }


def _shares_counts(trainer: Any) -> bool:
    """Whether ranks add up how many labels they have, as the Trainer does for means of tokens."""
    args, counts = trainer.args, trainer.counts_items
    is_used = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    sums = getattr(args, "average_tokens_across_devices", False) and args.world_size > 1
    return bool(counts and is_used and sums)


def _recovered(defense: Defense) -> str:
    known = recovered_behind(defense)
    return f"What attacks recovered behind it elsewhere: {known}" if known else ""


def _statements(messages: SharedMessages, about: str) -> list[str]:
    """What is to be said about something: of which messages, if not of all."""
    counts = messages.by(about)
    if len(counts) == 1:
        return list(counts)
    texts = [(text, count) for text, count in counts.items() if text]
    return [f"In {count} of {messages.total} messages: {text}" for text, count in texts]


def _summary(messages: SharedMessages) -> str:
    unprotected = messages.by("defense")["none"]
    if not messages.total:
        summary = "Nothing was shared: this Trainer has not trained. It was asked for what follows."
    elif unprotected:
        summary = (
            f"**Gradients were shared unprotected in {unprotected} of {messages.total} messages of "
            "rank 0.** Training text or images can be read back out of them."
        )
    else:
        summary = (
            "Each client shared only protected gradients; they were protected before they left it."
        )
    return summary if messages.complete else f"{summary} {_UNKNOWN}"


def _clients(trainer: Any) -> str:
    args, ranks = trainer.args, trainer.accelerator.num_processes
    if (senders := trainer.accelerator.num_senders) < ranks:
        return f"{senders}, of {ranks // senders} devices each that add up true gradients"
    clients = setting(args, "clients_per_process")
    if not setting(args, "num_clients"):
        return f"{ranks} rank(s) with {clients} client(s) each"
    how = args.partition
    if how == "dirichlet":
        how = f"dirichlet({args.dirichlet_alpha})"
    return (
        f"{args.num_clients} simulated on {ranks} rank(s), {clients} of each rank drawn a step, "
        f"data partition {how}"
    )


def _embeddings(trainer: Any) -> str:
    shared = setting(trainer.args, "share_input_embeddings")
    tables = [] if shared else list(withheld_parameters(trainer.model))
    by_name = withheld_by_name(trainer.model, setting(trainer.args, "withhold") or [])
    by_name = [name for name in by_name if name not in tables]
    sentences = []
    if tables:
        names = ", ".join(f"`{name}`" for name in tables)
        sentences.append(f"Input embeddings ({names}) were withheld: neither shared nor trained.")
    if by_name:
        names = ", ".join(f"`{name}`" for name in by_name)
        sentences.append(
            f"So were, as told, {names}." if tables else f"{names} were withheld, as told."
        )
    return " ".join(sentences) or "No parameter was withheld."


def _labels(trainer: Any) -> str:
    epsilon = setting(trainer.args, "label_epsilon")
    if epsilon is None:
        return ""
    key = getattr(trainer.train_dataset, "key", None)
    if is_noise_known(trainer) or getattr(key, "is_from_seed", False):
        return f"Labels were randomized once for each row and rank. {NO_EPSILON}"
    return (
        f"Labels were randomized once for each row and rank, with ε = {epsilon:g} (randomized "
        "response): ε-label differential privacy for what each rank shared about a row. "
        f"{UNIT_OF_LABELS}"
    )


def _statistics(trainer: Any) -> str:
    if not tracking_layers(trainer.model):
        return ""
    choice = setting(trainer.args, "batch_statistics")
    return f"Batch statistics {_STATISTICS[choice]}"


def _state(trainer: Any) -> str:
    """What modules keep of batches, as far as the first message showed it."""
    names = ", ".join(f"`{name}`" for name in trainer.state_guard.written)
    return _WRITTEN.format(names) if names else ""


def _aggregation(trainer: Any) -> str:
    args = trainer.args
    if not setting(args, "secure_aggregation"):
        return ""
    trust = "signed" if args.secure_aggregation_keys else "taken as they came"
    summed = "; the noise's scale below is of their sum, not of each"
    return (
        f"Messages were aggregated securely (the ranks' keys were {trust}): ranks saw means alone"
        f"{summed if args.noise_for == 'sum' else ''}."
    )


_SCRATCH = "was trained from scratch"  # in the words of the Trainer's card
_ALONE = "One process trained, so nothing left it: these clients were simulated."


def _epsilon(trainer: Any) -> str:
    rows, subjects = trainer.private_rows, trainer.shared_messages.by("epsilon")
    uncovered = subjects.pop("", 0)
    if rows is None or not rows.account.messages:
        return ""
    sampled = rows.describe_sampling()
    if rows.is_noise_known():
        return f"{sampled} {NO_EPSILON}"
    if rows.epsilon is None:
        return f"{sampled} No δ was set, so no ε was computed."
    left_out = (
        f" It leaves out {uncovered} messages of other defenses, which trained this model, too."
    )
    note = protection_note(rows.epsilon)
    covers_all = not uncovered and trainer.shared_messages.complete
    return (
        f"**For one row of the training data, {rows.neighbors}: "
        f"ε = {rows.epsilon:.4g} at δ = {rows.defense.delta:g}**{note}, of {' and '.join(subjects)}"
        f"{_OF_MODEL if covers_all else ''} (privacy loss distributions). "
        f"{sampled}{left_out if uncovered else ''}"
    )


_ABOUT = (
    "recovered",
    "unit",
    "clients",
    "alone",
    "withheld",
    "labels",
    "statistics",
    "state",
    "aggregation",
)
_OF_MODEL = ", and for this model where nothing else chose it"
_NEW_KEYS = (
    "The noise was drawn by ChaCha20, with a new key from the operating system for every message."
)
_UNKNOWN = "**This leaves out what was shared before a checkpoint that does not say how.**"
_STATISTICS = {
    "local": "stayed on their ranks; those in this model are rank 0's, of its own data.",
    "shared": "were averaged over ranks unprotected; those in this model are of all ranks' data.",
    "frozen": "are those that the model started with.",
}
_WRITTEN = (
    "**The model wrote to {} as it ran: in this model that holds what it made of rank 0's data, "
    "unprotected.**"
)
_MEMORIZED = (
    "This model. Its weights may have memorized training data; gradient protection gives no "
    "differential privacy."
)
_MEMORIZED_PRIVATELY = (
    "What stands beside ε: logged losses, and what was chosen by them or by evaluation; people "
    "with several rows, for whom it is larger."
)
_REPETITION = (
    "- Repetition: an attacker who sees many messages about the same example can average noise "
    "away.\n"
)
_SECTION = """## Privacy

{summary}

{points}

{settings}

### What is not protected

- {memorized}
- What a client reveals beside gradients: the average loss{counts}, and evaluation predictions.
- What was fitted to data before training and is published with the model: a tokenizer's words, a \
processor's means, class names.
{repetition}- The label, as a rule: the last layer's gradient shows it under all but strong noise.
- The sentence's length, through the gradient of learned position embeddings.

How much an attacker still recovers is an empirical question. Attack your own setting before you \
rely on it.
"""
