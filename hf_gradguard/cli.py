"""The command line `gradguard`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import __version__
from .flags import FlagParser, fill, option
from .registry import ATTACKS, DEFENSES, Registry


@dataclass(frozen=True)
class Command:
    """A command of `gradguard`; its help imports nothing but its settings.

    Args:
        summary: What the command does, in one line.
        example: Arguments that run, to be typed behind the command's name.
        run: `"module:function"`, which is called with the flags that are used, by name.
        settings: Dataclasses as `"module:dataclass"`, whose fields are the flags.
    """

    summary: str
    example: str
    run: str
    settings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class DemoSettings:
    """The settings of `gradguard demo`."""

    _argument_group_name: ClassVar[str] = "settings"

    model: str | None = option(
        None, "folder or Hub name of a text encoder. Default: MiniLM, by the extra demo"
    )
    output: str = option("runs/demo", "folder of the audit")
    steps: int = option(40, "optimizer steps of each training")
    attacked: int = option(3, "sentences that are attacked, each alone in its message")
    seed: int = option(0, "seed of trainings and attacks")


@dataclass(kw_only=True)
class EvalnetSettings:
    """The settings of `gradguard evalnet train`."""

    _argument_group_name: ClassVar[str] = "settings"

    output: str = option("", "folder to write the network to", required=True)
    dataset: str = option("", "file, folder or Hub name; docs/data.md says which", required=True)
    dataset_config: str | None = option(None, "configuration of a Hub data set that has several")
    split: str = option("train", "split of a Hub data set")
    column: str | None = option(None, "column or array to read. Default: the usual ones")
    model: str | None = option(
        None, "text: Hub name or folder of the model whose token embeddings are judged"
    )
    base_model: str | None = option(
        None, "text: name of the model in the config. Default: --model, if on the Hub"
    )
    steps: int | None = option(None, "text: optimizer steps")
    max_length: int | None = option(None, "text: longest passage in tokens")
    epochs: float | None = option(None, "images: passes over the data")
    num_channels: int | None = option(None, "images: gray or color", choices=(1, 3))
    image_size: int | None = option(None, "images: resize to so many pixels square")
    batch_size: int | None = option(None, "samples in a step")
    learning_rate: float | None = option(None, "learning rate of the optimizer")
    seed: int = option(0, "seed of the training")


@dataclass(kw_only=True)
class PushSettings:
    """The settings of `gradguard evalnet push`."""

    _argument_group_name: ClassVar[str] = "settings"

    folder: str = option("", "of the network", is_positional=True)
    repo: str = option("", "name or organization/name on the Hub", is_positional=True)
    private: bool = option(False, "if the repository is created now", action="store_true")


COMMANDS = {
    "recommend": Command(
        "short trainings of heads by proof and under defenses, attacked: which one to train",
        "--model my-model --dataset train.tsv --output runs/recommend",
        "recommend:run_recommend", ("recommend.trial_settings:CommandSettings",),
    ),
    "train": Command(
        "train a linear head by proof, or a whole model under a defense",
        "--head --encoder my-model --dataset train.tsv --output runs/model",
        "train:run_train",
        ("train:TrainSettings", "train:HeadSettings", "train:TrainArguments"),
    ),
    "audit": Command(
        "attack a model's shared gradients under chosen defenses; table, JSON, HTML",
        "--model my-model --dataset train.tsv --output runs/audit --defense gaussian_noise",
        "audit:run_audit", ("audit.settings:CommandSettings",),
    ),
    "demo": Command(
        "train an encoder with and without protection, attack it, and show both",
        "--output runs/demo", "cli:_demo", ("cli:DemoSettings",),
    ),
    "evalnet train": Command(
        "train an evaluation network (for the refiner defense), on public text or images",
        "--model my-model --dataset public.txt --output runs/network",
        "cli:_train_evalnet", ("cli:EvalnetSettings",),
    ),
    "evalnet push": Command(
        "push an evaluation network's folder to the Hub", "runs/network my-name/network",
        "cli:_push_evalnet", ("cli:PushSettings",),
    ),
    "defenses": Command("list the defenses and their settings", "", "cli:_list_defenses"),
    "attacks": Command("list the attacks and their settings", "", "cli:_list_attacks"),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run `gradguard` with these arguments and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    words = next((n for n in (1, 2) if " ".join(argv[:n]) in COMMANDS), None)
    if words is None:
        group = "evalnet" if argv[:1] == ["evalnet"] else ""
        _parser(group).parse_args(argv[1:] if group else argv)  # ends the program
    name, flags = " ".join(argv[:words]), argv[words or 0 :]
    command = COMMANDS[name]
    try:
        settings = map(_load, command.settings)
        parser = FlagParser(
            f"gradguard {name}", command.summary, f"gradguard {name} {command.example}", *settings
        )
        values = parser.values(flags)  # of which help is one, before anything heavy is imported
        if "model" in values:
            importlib.import_module(".heads", __package__)  # so that a saved head is a model, too
        _load(command.run)(values)
    except KeyboardInterrupt:
        _end(130, name, "interrupted.")
    # These messages are for people; a traceback, or a second line, would bury them.
    except (
        ValueError, TypeError, OSError, ImportError, FloatingPointError, NotImplementedError
    ) as error:  # fmt: skip
        _end(1, name, _one_line(error))
    return 0


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


def _end(status: int, name: str, message: str) -> None:
    print(f"gradguard {name}: {message}", file=sys.stderr)
    sys.exit(status)


def _one_line(error: Exception) -> str:
    message = str(error)
    # What a data loader's process raised comes with its traceback, the error last.
    if "Original Traceback" in message:
        message = message.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(message.split())


def _parser(group: str) -> argparse.ArgumentParser:
    """Return a parser for what is no command.

    It prints help, the version, or an error that names the commands of a group.
    """
    commands = {
        n.removeprefix(group).lstrip(): c for n, c in COMMANDS.items() if n[: len(group)] == group
    }
    width = max(map(len, commands)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in commands.items()]
    parser = argparse.ArgumentParser(
        prog=f"gradguard {group}".strip(),
        description="Protected training for the Hugging Face Trainer.",
        epilog="\n".join(["commands (--help behind one says more):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"gradguard {__version__}")
    parser.add_argument(
        "name", metavar="ACTION" if group else "COMMAND", help=argparse.SUPPRESS,
        choices=list(dict.fromkeys(name.split()[0] for name in commands)),
    )  # fmt: skip
    return parser


def _demo(flags: Mapping[str, Any]) -> None:
    from .demo import run_demo
    from .logs import errors_alone

    # It prints progress, a table and sentences, and nothing else.
    with errors_alone("transformers", __package__):
        run_demo(**asdict(fill(DemoSettings, flags)))


def _list_defenses(_: Mapping[str, Any]) -> None:
    print(describe(DEFENSES))


def _list_attacks(_: Mapping[str, Any]) -> None:
    print(describe(ATTACKS))


def describe(registry: Registry[Any]) -> str:
    """Return one paragraph for each name: its summary, its settings, and its package."""
    paragraphs = []
    for name in registry:
        package = registry.package(name)
        heading = f"{name} (of {package})" if package else name
        description = registry.describe(name)
        settings = [
            setting if default in (None, "None") else f"{setting}={default}"
            for setting, default in description.settings.items()
        ]
        paragraphs.append(
            f"{heading}\n  {description.summary}\n  settings: {', '.join(settings) or 'none'}"
        )
    return "\n\n".join(paragraphs)


def _train_evalnet(flags: Mapping[str, Any]) -> None:
    from .networks import save_network
    from .networks.loading import network_card

    args = fill(EvalnetSettings, flags)
    text, images = ("steps", "max_length", "base_model"), ("epochs", "num_channels", "image_size")
    for name in images if args.model else text:
        if getattr(args, name) is not None:
            kind = "images: leave out --model" if args.model else "text: give --model"
            raise ValueError(f"--{name} is for {kind}, or leave it out.")
    names = ("steps", "max_length", "epochs", "batch_size", "learning_rate", "seed")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _check_output(args.output)
    source: dict[str, Any] = {
        "column": args.column,
        "split": args.split,
        "config": args.dataset_config,
    }
    train = _train_text if args.model else _train_images
    network, metrics = train(args, source, settings)
    save_network(network, args.output)
    dataset = os.path.basename(args.dataset) if os.path.exists(args.dataset) else args.dataset
    network_card(network, dataset, metrics).save(os.path.join(args.output, "README.md"))
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters -> {args.output}")
    if metrics is None:
        print("Fewer than 20 samples: none was held out to judge the network by.")
    else:
        print(metrics.describe("text" if args.model else "image"))


def _train_text(args: EvalnetSettings, source: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return the network and its metrics on held-out texts, `None` where all were trained on."""
    import torch
    from transformers import AutoModel

    from .data.samples import load_texts
    from .models import check_name, explain_missing_model, load_tokenizer
    from .networks import train_text_network
    from .networks.configuration import hub_name
    from .networks.judging import evaluate_text_network, hold_out

    assert args.model is not None
    check_name(args.model)  # before texts are loaded
    texts = [text for text in load_texts(args.dataset, **source) if text and text.strip()]
    training, held_out = hold_out(texts)
    with explain_missing_model(args.model):
        tokenizer = load_tokenizer(args.model)
        embedding = AutoModel.from_pretrained(
            args.model, dtype=torch.float32, trust_remote_code=False
        ).get_input_embeddings()
    base_model = args.base_model or hub_name(args.model)
    network = train_text_network(
        embedding, tokenizer, [texts[i] for i in training], base_model=base_model, **settings
    )
    judged = [texts[i] for i in held_out]
    metrics = evaluate_text_network(network, embedding, tokenizer, judged) if judged else None
    return network, metrics


def _train_images(args: EvalnetSettings, source: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return the network and its metrics on held-out images, `None` where all were trained on."""
    from .data.samples import load_images
    from .networks import train_image_network
    from .networks.judging import evaluate_image_network, hold_out
    from .networks.noising import as_pixels

    sizes: dict[str, Any] = {"num_channels": args.num_channels, "image_size": args.image_size}
    if args.dataset.endswith(".npz") and any(sizes.values()):
        raise ValueError("An npz is taken as it is: leave --num_channels and --image_size out.")
    pixels = as_pixels(load_images(args.dataset, **source, **sizes))
    training, held_out = hold_out(range(len(pixels)))
    network = train_image_network(pixels[training], **settings)
    return network, evaluate_image_network(network, pixels[held_out]) if held_out else None


def _check_output(output: str) -> None:
    """Refuse an output folder that cannot be written to, before a training and not after it."""
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{output} is a file. Give a folder.")
    config = path / "config.json"
    if config.exists() and "gradguard_" not in config.read_text(encoding="utf-8"):
        raise ValueError(f"{output} holds another model, which would be lost. Give a new folder.")


def _push_evalnet(flags: Mapping[str, Any]) -> None:
    from .networks.loading import push_network

    args = fill(PushSettings, flags)
    print(push_network(args.folder, args.repo, private=args.private))
