"""Hash what trainings with every defense leave, so that a refactoring can show it changed nothing.

    python scripts/transcripts.py write before.json    # at the commit that the change starts from
    python scripts/transcripts.py write after.json     # after the change
    python scripts/transcripts.py compare before.json after.json

Each cell is a short training of a small model with a `noise_seed`: defenses × {BERT, GPT-2, ViT,
LoRA} × {one client, three clients, accumulation, resume, two ranks}. The script hashes the averaged
gradients that the optimizer got, the weights, and the tensors of the checkpoint; it keeps the log
and the card as they are, without seconds. Hashes are equal to the bit on one machine with one
version of torch. They are not compared between machines, so none are committed.

`--only TEXT` writes the cells whose name contains it; `--quick` writes BERT's of one process alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from hf_gradguard import DEFENSES, GradGuardConfig, GradGuardTrainer, chain, make_defense  # noqa: E402
from hf_gradguard.defenses import Defense  # noqa: E402

ROWS, STEPS, BATCH = 24, 3, 4
PRIVATE = {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "laplace_noise": {"scale": 0.1},
    "dp_sgd": {"scale": 0.1},
    "optimal_dp_sgd": {"scale": 0.1},
    "optimal_dp_sgd_published": {"scale": 0.1},
    "gradient_sketch": {"samples": 2},
    "refiner": {"samples": 2, "iterations": 1},
    "refiner_published": {"iterations": 1},
}
VARIANTS: dict[str, Callable[[], Defense]] = {
    "dp_sgd/per_sample": lambda: make_defense("dp_sgd", **PRIVATE),
    "dp_sgd/target": lambda: make_defense(
        "dp_sgd", per_sample=True, target_epsilon=3.0, delta=1e-3
    ),
    "dp_sgd/correlated": lambda: make_defense("dp_sgd", **PRIVATE, correlated=True),
    "dp_sgd/banded": lambda: make_defense(
        "dp_sgd", **PRIVATE, correlated=True, factorization="banded", bands=2
    ),
    "dp_sgd/balls_in_bins": lambda: make_defense(
        "dp_sgd", **PRIVATE, correlated=True, sampling="balls_in_bins"
    ),
    "dp_sgd/correlated_updates": lambda: make_defense("dp_sgd", scale=0.1, correlated=True),
    "chain/pruning+optimal_noise": lambda: chain(
        make_defense("pruning", ratio=0.5), make_defense("optimal_noise", relative_scale=0.5)
    ),
    "chain/gaussian_noise+quantization": lambda: chain(
        make_defense("gaussian_noise", scale=0.01), make_defense("quantization")
    ),
}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_steps": 2,
    "logging_steps": 1,
    "noise_seed": 7,
    "per_device_train_batch_size": BATCH,
    "seed": 3,
    "learning_rate": 1e-3,
}
WORDS = torch.randint(5, 40, (ROWS, 6), generator=torch.Generator().manual_seed(1)).tolist()
PIXELS = torch.rand(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(2))


class Gradients(TrainerCallback):
    """Hashes what the optimizer gets at each step."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.hash.update(name.encode() + bytes_of(parameter.grad))


def bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40, max_position_embeddings=16, num_labels=2, **SIZES
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=2, **SIZES)
    return transformers.ViTForImageClassification(config)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(bert(), config)


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "vit": vit, "lora": lora}


def rows_of(model: str) -> list[dict[str, Any]]:
    """Return a model's training data."""
    if model == "vit":
        return [{"pixel_values": PIXELS[i], "labels": i % 2} for i in range(ROWS)]
    texts = [{"input_ids": words, "attention_mask": [1] * len(words)} for words in WORDS]
    if model == "gpt2":
        return [{**text, "labels": text["input_ids"]} for text in texts]
    return [{**text, "labels": i % 2} for i, text in enumerate(texts)]


def defenses() -> dict[str, Callable[[], Defense]]:
    """Return how to make each defense, by name: all that are registered, and forms of some."""
    named = {n: (lambda n=n: make_defense(n, **SETTINGS.get(n, {}))) for n in DEFENSES}
    return named | VARIANTS


SCENARIOS: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"clients_per_process": 3},
    "accumulation": {"gradient_accumulation_steps": 2},
    "resume": {},
    "ranks": {},
}


def cells(quick: bool, only: str) -> Iterator[tuple[str, str, str]]:
    """Yield each cell's model, defense and scenario."""
    for model in ["bert"] if quick else MODELS:
        for defense in defenses():
            for scenario in SCENARIOS:
                # two ranks cost a training each, so one model stands for all
                if scenario == "ranks" and (quick or model != "bert"):
                    continue
                if only in f"{model} {defense} {scenario}":
                    yield model, defense, scenario


def trainer_of(
    folder: Path, model: str, defense: str, scenario: str, steps: int, save: bool = True
) -> tuple[GradGuardTrainer, Gradients]:
    gradients, form = Gradients(), defense.split("/")[-1]
    settings = SCENARIOS[scenario]
    if scenario == "three":
        settings = settings | {"per_device_train_batch_size": 6}
    if form in ("correlated", "banded", "balls_in_bins", "correlated_updates"):
        settings = settings | {"optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 0.0}
    settings = settings | {"max_steps": steps, "save_strategy": "steps" if save else "no"}
    args = GradGuardConfig(str(folder), **(COMMON | settings))
    torch.manual_seed(0)
    trainer = GradGuardTrainer(
        MODELS[model](),
        args,
        train_dataset=rows_of(model),
        defense=defenses()[defense](),
        callbacks=[gradients],
    )
    return trainer, gradients


def hashes(folder: Path, trainer: GradGuardTrainer, gradients: Gradients) -> dict[str, str]:
    """Return what a training left, by kind: hashes, and the log as it is."""
    weights = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + bytes_of(tensor))
    log = [
        {k: v for k, v in row.items() if "second" not in k and "runtime" not in k}
        for row in trainer.state.log_history
    ]
    found = {
        "messages": gradients.hash.hexdigest(),
        "weights": weights.hexdigest(),
        "log": json.dumps(log),
    }
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        card = (folder / "README.md").read_text().replace(str(folder), "FOLDER")
        found["card"] = re.sub(r"\d{4}-\d\d-\d\d.*", "DATE", card)
    checkpoint = hashlib.sha256()
    for file in sorted(folder.glob("checkpoint-*/*")):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                for name in sorted(tensors.keys()):
                    checkpoint.update(name.encode() + bytes_of(tensors.get_tensor(name)))
        elif file.name in ("optimizer.pt", "scheduler.pt"):
            state = torch.load(file, weights_only=True)
            for key, leaf in leaves(state):
                checkpoint.update(key.encode())
                checkpoint.update(
                    bytes_of(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode()
                )
    return found | {"checkpoint": checkpoint.hexdigest()}


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dictionaries and lists, with their places."""
    if isinstance(tree, dict):
        for name, branch in tree.items():
            yield from leaves(branch, f"{key}/{name}")
    elif isinstance(tree, list | tuple):
        for number, branch in enumerate(tree):
            yield from leaves(branch, f"{key}/{number}")
    else:
        yield key, tree


def run(model: str, defense: str, scenario: str, root: Path) -> dict[str, str]:
    """Train a cell. A refusal is recorded with its text."""
    folder = root / re.sub(r"\W", "_", f"{model}_{defense}_{scenario}")
    try:
        trainer, gradients = trainer_of(folder, model, defense, scenario, STEPS)
        trainer.train()
        if scenario == "resume":
            trainer, gradients = trainer_of(folder, model, defense, scenario, STEPS)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return hashes(folder, trainer, gradients)
    except (NotImplementedError, ValueError, RuntimeError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")}


def write(path: Path, quick: bool, only: str, ranks: bool) -> None:
    """Train all cells and write what they left: those of two ranks in processes of their own."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    chosen = [cell for cell in cells(quick, only) if (cell[2] == "ranks") == ranks]
    # the ranks of one cell share a folder
    root = Path(os.environ["TRANSCRIPTS_FOLDER"]) if ranks else Path(tempfile.mkdtemp())
    found = {}
    for number, cell in enumerate(chosen):
        faulthandler.dump_traceback_later(40, exit=True)  # a cell takes seconds, or ranks wait
        found[" ".join(cell)] = run(*cell, root)
        print(f"\r{number + 1} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    if ranks:
        if int(os.environ["RANK"]) == 0:
            path.write_text(json.dumps(found, indent=1))
        return
    shutil.rmtree(root)
    if any(cell[2] == "ranks" for cell in cells(quick, only)):
        folder, part = tempfile.mkdtemp(), path.with_suffix(".ranks.json")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        where |= {"TRANSCRIPTS_FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "write", str(part), "--only", only, "--ranks"]
        workers = [
            subprocess.Popen(command, env=os.environ | where | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in ("0", "1")
        ]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise RuntimeError("A rank ended with an error; see above.")
        found |= json.loads(part.read_text())
        part.unlink()
        shutil.rmtree(folder)
    path.write_text(json.dumps(found, indent=1))


def compare(before: Path, after: Path) -> int:
    """Print what differs between two files; return how many cells do."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    common, differing = [cell for cell in old if cell in new], 0
    for cell in common:
        if kinds := [k for k in {**old[cell], **new[cell]} if old[cell].get(k) != new[cell].get(k)]:
            differing += 1
            print(f"{cell}: {', '.join(kinds)}")
            for kind in kinds:
                if kind in ("log", "card", "refused"):
                    for time, cells_then in (("before", old), ("after", new)):
                        print(f"    {kind}, {time}: {cells_then[cell].get(kind)}")
    print(f"{differing} of {len(common)} cells differ; {len(old) - len(common)} are in one alone.")
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command == "compare":
        sys.exit(min(1, compare(*args.files)))
    write(args.files[0], args.quick, args.only, args.ranks)


if __name__ == "__main__":
    main()
