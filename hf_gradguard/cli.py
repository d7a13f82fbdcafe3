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
    parser = argparse.ArgumentParser(
        prog="gradguard", description="Protected training for the Hugging Face Trainer."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "defenses", help="list the defenses and their settings; docs/defenses.md says more"
    )
    commands.add_parser(
        "attacks", help="list the attacks and their settings; docs/attacks.md says more"
    )
    _add_evalnet(commands)
    _add_audit(commands)
    _add_recommend(commands)
    arguments = parser.parse_args(argv)
    if arguments.command in ("defenses", "attacks"):
        print(describe(DEFENSES if arguments.command == "defenses" else ATTACKS))
    elif arguments.command == "evalnet":
        try:
            (_train_evalnet if arguments.action == "train" else _push_evalnet)(arguments)
        # said for people already; a traceback would hide it
        except (ValueError, OSError, ImportError) as error:
            parser.exit(1, f"gradguard evalnet {arguments.action}: {error}\n")
    else:
        if arguments.command == "audit":
            from .audit import run_audit as run
        else:
            from .recommend import run_recommend as run
        try:
            run({name: value for name, value in vars(arguments).items() if name != "command"})
        except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
            parser.exit(1, f"gradguard {arguments.command}: {error}\n")
        except KeyboardInterrupt:
            parser.exit(
                130,
                f"gradguard {arguments.command}: interrupted. The same command goes on where it "
                "stopped.\n",
            )
    return 0


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


def _add_evalnet(commands: Any) -> None:
    evalnet = commands.add_parser(
        "evalnet", help="train or publish an evaluation network (for the refiner defense)"
    )
    actions = evalnet.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser(
        "train", help="train on public text (with --model) or public images (without)"
    )
    train.add_argument(
        "--model", help="text: Hub name or folder of the model whose token embeddings are judged"
    )
    train.add_argument(
        "--base_model",
        help="name of the model kept in the config. Default: --model, if it is a Hub name",
    )
    train.add_argument(
        "--dataset",
        required=True,
        help="Hub name, or a txt, tsv, csv, json, parquet or npz (images) file",
    )
    train.add_argument("--dataset_config", help="of a Hub data set with several")
    train.add_argument("--split", default="train", help="of a Hub data set (default: %(default)s)")
    train.add_argument("--column", help="column or array to read. Default: the usual ones")
    train.add_argument("--output", required=True, help="folder to write the network to")
    train.add_argument("--steps", type=int, help="text: optimizer steps")
    train.add_argument("--epochs", type=float, help="images: passes over the data")
    train.add_argument("--batch_size", type=int)
    train.add_argument("--learning_rate", type=float)
    train.add_argument("--max_length", type=int, help="text: longest passage in tokens")
    train.add_argument("--num_channels", type=int, choices=(1, 3), help="images: gray or color")
    train.add_argument("--image_size", type=int, help="images: resize to so many pixels square")
    train.add_argument("--seed", type=int, default=0)
    push = actions.add_parser("push", help="push a network's folder to the Hub")
    push.add_argument("folder")
    push.add_argument("repo", help="name or organization/name on the Hub")
    push.add_argument("--private", action="store_true", help="if the repository is created now")


def _train_evalnet(args: argparse.Namespace) -> None:
    from .data.files import load_images, load_texts
    from .networks import save_network, train_image_network, train_text_network
    from .networks.publish import network_card

    names = ("steps", "max_length") if args.model else ("epochs",)
    foreign = (
        ("epochs", "num_channels", "image_size")
        if args.model
        else ("steps", "max_length", "base_model")
    )
    for name in foreign:
        if getattr(args, name) is not None:
            kind = "images: leave out --model" if args.model else "text: give --model"
            raise ValueError(f"--{name} is for {kind}, or leave it out.")
    settings = {
        name: getattr(args, name) for name in (*names, "batch_size", "learning_rate", "seed")
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    _check_output(args.output)
    source = {"column": args.column, "split": args.split, "config": args.dataset_config}
    network: Any
    if args.model:
        import torch
        from transformers import AutoModel, AutoTokenizer

        from .models import check_name, explain_missing_model
        from .networks.configuration import hub_name

        check_name(args.model)  # before texts are loaded

        texts = load_texts(args.dataset, **source)
        with explain_missing_model(args.model):
            tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
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
    from .networks.publish import push_network

    print(push_network(args.folder, args.repo, private=args.private))


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser(
        "audit",
        help="attack a model's shared gradients under chosen defenses; table, JSON, HTML",
    )
    add_flags(audit)


def _add_recommend(commands: Any) -> None:
    recommend = commands.add_parser(
        "recommend",
        help="short trainings under several defenses, attacked: which one to train with",
    )
    add_fields(recommend, CommandSettings, TrialSettings)
