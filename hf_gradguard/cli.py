"""The command line: `gradguard`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from . import __version__
from .audit.settings import add_fields, add_flags
from .recommend.settings import CommandSettings, TrialSettings
from .registry import ATTACKS, DEFENSES, Registry


def main(argv: list[str] | None = None) -> int:
    """Entry point of `gradguard`. Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command = arguments.command
    name = f"{command} {arguments.action}" if command == "evalnet" else command
    try:
        if command in ("defenses", "attacks"):
            print(describe(DEFENSES if command == "defenses" else ATTACKS))
        elif command == "evalnet":
            (_train_evalnet if arguments.action == "train" else _push_evalnet)(arguments)
        else:
            _run(command, {flag: v for flag, v in vars(arguments).items() if flag != "command"})
    # These messages are for people; a traceback, or a second line, would bury them.
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        parser.exit(1, f"gradguard {name}: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(
            130, f"gradguard {name}: interrupted. The same command goes on where it stopped.\n"
        )
    return 0


def _run(command: str, flags: dict[str, Any]) -> None:
    # Imported here, so that help imports nothing heavy.
    if command == "audit":
        from .audit import run_audit

        run_audit(flags)
    elif command == "demo":
        from .demo import run_demo

        run_demo(**flags)
    else:
        from .recommend import run_recommend

        run_recommend(flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradguard", description="Protected training for the Hugging Face Trainer."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("defenses", "attacks"):
        commands.add_parser(
            name, help=f"list the {name} and their settings; docs/{name}.md says more"
        )
    _add_evalnet(commands)
    audit = commands.add_parser(
        "audit", help="attack a model's shared gradients under chosen defenses; table, JSON, HTML"
    )
    add_flags(audit)
    recommend = commands.add_parser(
        "recommend",
        help="short trainings under several defenses, attacked: which one to train with",
    )
    add_fields(recommend, CommandSettings, TrialSettings)
    _add_demo(commands)
    return parser


def describe(registry: Registry[Any]) -> str:
    """One paragraph for each name: what it does, its settings, and the package that brings it."""
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


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="train an encoder with and without protection, attack it, and show both"
    )
    demo.add_argument(
        "--model", help="folder or Hub name of a text encoder. Default: MiniLM, by the extra demo"
    )
    demo.add_argument("--output", default="runs/demo", help="folder of the audit (%(default)s)")
    counts = {
        "steps": (40, "optimizer steps of each training"),
        "attacked": (6, "sentences that are attacked, each alone in its message"),
        "seed": (0, "seed of trainings and attacks"),
    }
    for name, (default, text) in counts.items():
        demo.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )


def _add_evalnet(commands: Any) -> None:
    evalnet = commands.add_parser(
        "evalnet", help="train or publish an evaluation network (for the refiner defense)"
    )
    actions = evalnet.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser(
        "train", help="train on public text (with --model) or public images (without)"
    )
    train.add_argument("--output", required=True, help="folder to write the network to")
    train.add_argument(
        "--dataset",
        required=True,
        help="file, folder or Hub name; docs/data.md says which",
    )
    train.add_argument(
        "--split", default="train", help="split of a Hub data set (default: %(default)s)"
    )
    train.add_argument("--num_channels", type=int, choices=(1, 3), help="images: gray or color")
    train.add_argument("--seed", type=int, default=0)
    flags: list[tuple[str, type, str]] = [
        ("model", str, "text: Hub name or folder of the model whose token embeddings are judged"),
        ("base_model", str, "name of the model in the config. Default: --model, if on the Hub"),
        ("dataset_config", str, "configuration of a Hub data set that has several"),
        ("column", str, "column or array to read. Default: the usual ones"),
        ("steps", int, "text: optimizer steps"),
        ("epochs", float, "images: passes over the data"),
        ("batch_size", int, "samples in a step"),
        ("learning_rate", float, "learning rate of the optimizer"),
        ("max_length", int, "text: longest passage in tokens"),
        ("image_size", int, "images: resize to so many pixels square"),
    ]
    for name, kind, text in flags:
        train.add_argument(f"--{name}", type=kind, help=text)
    push = actions.add_parser("push", help="push a network's folder to the Hub")
    push.add_argument("folder")
    push.add_argument("repo", help="name or organization/name on the Hub")
    push.add_argument("--private", action="store_true", help="if the repository is created now")


def _train_evalnet(args: argparse.Namespace) -> None:
    from .data.samples import load_images, load_texts
    from .networks import save_network, train_image_network, train_text_network
    from .networks.loading import network_card

    text, images = ("steps", "max_length", "base_model"), ("epochs", "num_channels", "image_size")
    for name in images if args.model else text:
        if getattr(args, name) is not None:
            kind = "images: leave out --model" if args.model else "text: give --model"
            raise ValueError(f"--{name} is for {kind}, or leave it out.")
    names = ("steps", "max_length", "epochs", "batch_size", "learning_rate", "seed")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _check_output(args.output)
    source = {"column": args.column, "split": args.split, "config": args.dataset_config}
    network: Any
    if args.model:
        import torch
        from transformers import AutoModel

        from .models import check_name, explain_missing_model, load_tokenizer
        from .networks.configuration import hub_name

        check_name(args.model)  # before texts are loaded

        texts = load_texts(args.dataset, **source)
        with explain_missing_model(args.model):
            tokenizer = load_tokenizer(args.model)
            embedding = AutoModel.from_pretrained(
                args.model, dtype=torch.float32, trust_remote_code=False
            ).get_input_embeddings()
        base_model = args.base_model or hub_name(args.model)
        network = train_text_network(embedding, tokenizer, texts, base_model=base_model, **settings)
    else:
        sizes = {"num_channels": args.num_channels, "image_size": args.image_size}
        if args.dataset.endswith(".npz") and any(sizes.values()):
            raise ValueError("An npz is taken as it is: leave --num_channels and --image_size out.")
        network = train_image_network(load_images(args.dataset, **source, **sizes), **settings)
    save_network(network, args.output)
    network_card(
        network, os.path.basename(args.dataset) if os.path.exists(args.dataset) else args.dataset
    ).save(os.path.join(args.output, "README.md"))
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters -> {args.output}")


def _check_output(output: str) -> None:
    """Before a training, and not after it."""
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{output} is a file. Give a folder.")
    config = path / "config.json"
    if config.exists() and "gradguard_" not in config.read_text(encoding="utf-8"):
        raise ValueError(f"{output} holds another model, which would be lost. Give a new folder.")


def _push_evalnet(args: argparse.Namespace) -> None:
    from .networks.loading import push_network

    print(push_network(args.folder, args.repo, private=args.private))
