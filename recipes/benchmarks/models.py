"""What defenses cost on models of other shapes: steps in plain steps (AdamW included), and memory
beyond a stock step of the same parameters.

Weights are random; costs do not depend on them. One thread, processor time; all rows of a model
take turns, between two stock steps. "Measuring" are the messages at which averages are fed; "as
set" is what they and the others come to at the default `refresh_every`. The last rows are
arithmetic: LoRA on 8 billion parameters, a gradient, and what measuring keeps of 2,048 tokens. A
run that was stopped goes on at the next model.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.sensitivity import REFRESH_EVERY
from hf_gradguard.randomness import Stream
from recipes.studies.lib.device import DEVICE
from recipes.studies.lib.results import Results, named

from .measuring import bytes_of, cells, clock, peak, share, spread

ROUNDS = 3
BETWEEN, MEASURING = {"refresh_every": 10**6}, {"refresh_every": 1}
DEFENSES: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "gaussian_noise": ("gaussian_noise", {}),
    "optimal_noise, in between": ("optimal_noise", BETWEEN),
    "optimal_noise, measuring": ("optimal_noise", MEASURING),
    "optimal_pruning, in between": ("optimal_pruning", {"ratio": 0.9, **BETWEEN}),
    "optimal_pruning, measuring": ("optimal_pruning", {"ratio": 0.9, **MEASURING}),
}
LLAMA = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "num_labels": 2,
    "pad_token_id": 0,
}  # fmt: skip
EIGHT_BILLION = {"layers": 32, "hidden": 4096, "key_value": 1024, "rank": 16, "tokens": 2048}


def encoder(name: str, quick: bool) -> tuple[nn.Module, dict]:
    config = AutoConfig.from_pretrained(name, num_labels=2, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    return model, texts(config.vocab_size, *((2, 8) if quick else (16, 128)))


def distilbert(_name: str, quick: bool) -> tuple[nn.Module, dict]:
    sizes = {"n_layers": 1, "dim": 24, "hidden_dim": 24, "n_heads": 2, "vocab_size": 99}
    config = DistilBertConfig(**(sizes if quick else {}))
    return DistilBertForSequenceClassification(config), texts(config.vocab_size, 16, 16)


def gpt2(_name: str, quick: bool) -> tuple[nn.Module, dict]:
    sizes = {"n_layer": 1, "n_embd": 24, "n_head": 2, "vocab_size": 99} if quick else {}
    config = GPT2Config(num_labels=2, pad_token_id=0, **sizes)
    return GPT2ForSequenceClassification(config), texts(config.vocab_size, 4, 8 if quick else 64)


def vit(_name: str, quick: bool) -> tuple[nn.Module, dict]:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
    if quick:
        sizes = {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 2}
    layers, size = (1, 32) if quick else (12, 224)
    config = ViTConfig(num_hidden_layers=layers, image_size=size, num_labels=10, **sizes)
    return ViTForImageClassification(config), images(2, size)


def resnet(_name: str, quick: bool) -> tuple[nn.Module, dict]:
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
    if quick:
        sizes = {"depths": [1, 1], "hidden_sizes": [4, 8]}
    config = ResNetConfig(
        layer_type="basic", embedding_size=4 if quick else 64, num_labels=10, **sizes
    )
    return ResNetForImageClassification(config), images(8, 32)


def llama(_name: str, quick: bool) -> tuple[nn.Module, dict]:
    tiny = {"hidden_size": 18, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 99}
    config = LlamaConfig(**(LLAMA | tiny if quick else LLAMA))
    lora = LoraConfig(task_type="SEQ_CLS", r=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForSequenceClassification(config), lora)
    return model, texts(config.vocab_size, 2, 8 if quick else 128)


MODELS: dict[str, Callable[[str, bool], tuple[nn.Module, dict]]] = {
    "MiniLM's shape, 16 × 128 tokens": encoder,
    "DistilBERT's, 16 × 16 tokens": distilbert,
    "GPT-2 small's, 4 × 64 tokens": gpt2,
    "ViT-small's, 2 images at 224": vit,
    "ResNet-18's, 8 images at 32": resnet,
    "LoRA of rank 16 on Llama of 135 M, 2 × 128 tokens": llama,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "only": {"nargs": "+", "choices": list(MODELS), "metavar": "MODEL",
             "help": "measure these; others stay as they are"},
}  # fmt: skip


def texts(words: int, size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(words // 2, words, (size, length), device=DEVICE)
    labels = torch.randint(0, 2, (size,), device=DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def images(size: int, side: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(size, 3, side, side, device=DEVICE)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), device=DEVICE)}


def measure(args) -> dict:
    torch.set_num_threads(1)
    stored, models = Results(named(args.output, ".cells")), {}  # what was stopped goes on
    earlier = {}
    if args.only:
        earlier = json.loads(named(args.output, ".json").read_text(encoding="utf-8"))["models"]
    for label, make in MODELS.items():
        if args.only and label not in args.only:
            models |= {label: earlier[label]} if label in earlier else {}
            continue
        cell = {"model": label, "rounds": 1 if args.quick else ROUNDS, "quick": args.quick}
        if cell not in stored:
            torch.manual_seed(0)
            model, batch = make(args.model, args.quick)
            stored.add(cell, measure_model(model.to(DEVICE).train(), batch, cell["rounds"]))
        models[label] = stored[cell]
    stored.path.unlink()
    return {"threads": 1, "models": models, "8 billion": eight_billion()}


def measure_model(model: nn.Module, batch: dict, rounds: int) -> dict:
    shared = GradientMap(model, batch, second_order=False).parameters
    for name, parameter in model.named_parameters():  # a stock step of the same parameters
        parameter.requires_grad_(name in shared)
    optimizer, stream = torch.optim.AdamW(shared.values(), lr=0.0), Stream()

    def run(defense=None, update: bool = True) -> None:
        if defense is None:
            model(**batch).loss.backward()
        else:
            share(defense, GradientMap(model, batch, second_order=False), stream)
        if update:
            optimizer.step()
            optimizer.zero_grad()

    defenses = {row: make_defense(name, **settings) for row, (name, settings) in DEFENSES.items()}
    run()
    for defense in defenses.values():
        run(defense)  # trials, and the first averages
    seconds: dict[str, list[float]] = {row: [] for row in defenses}
    for _ in range(rounds):  # all take turns, between two stock steps
        seconds_before = clock(run)
        taken_by_row = {
            row: clock(lambda defense_of_row=defense_of_row: run(defense_of_row))
            for row, defense_of_row in defenses.items()
        }
        unit = (seconds_before + clock(run)) / 2
        for row, taken in taken_by_row.items():
            seconds[row].append(taken / unit)
    for name in ("optimal_noise", "optimal_pruning"):
        pairs = zip(seconds[f"{name}, in between"], seconds[f"{name}, measuring"], strict=True)
        seconds[f"{name}, as set"] = [
            between + (measuring - between) / REFRESH_EVERY for between, measuring in pairs
        ]
    beyond = {}
    stock = peak(lambda: run(update=False))
    for row, defense in defenses.items():
        optimizer.zero_grad()
        beyond[row] = peak(lambda defense_of_row=defense: run(defense_of_row, update=False)) - stock
    for row in seconds.keys() - beyond.keys():
        beyond[row] = beyond[row.replace("as set", "measuring")]
    gradient = bytes_of(shared.values())
    return {
        "parameters": sum(p.numel() for p in shared.values()),
        "gradient_mib": round(gradient / 2**20, 1),
        "stock_mib": round(stock / 2**20, 1),
        "rows": {
            row: {
                "steps": spread(seconds[row]),
                "beyond_mib": round(beyond[row] / 2**20, 1),
                "beyond_gradients": round(beyond[row] / gradient, 2),
            }
            for row in seconds
        },
    }


def eight_billion() -> dict[str, float]:
    """Queries' and values' adapters, in float32. Measuring keeps what each took in and the slopes
    that came back, of two passes.
    """
    sizes = EIGHT_BILLION
    hidden, rank, ends = sizes["hidden"], sizes["rank"], (sizes["hidden"], sizes["key_value"])
    entries = sizes["layers"] * rank * sum(hidden + end for end in ends)
    values_stored = (
        sizes["layers"] * sizes["tokens"] * 2 * sum(hidden + 2 * rank + end for end in ends)
    )
    return {
        "parameters": entries,
        "gradient_mib": round(4 * entries / 2**20, 1),
        "measuring_mib": round(4 * values_stored / 2**20, 1),
    }


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    header = ["", "plain steps", "range", "MiB beyond stock", "in gradients"]
    rows = []
    for label, model in report["models"].items():
        title = f"{model['parameters'] / 1e6:.3g} M shared, stock peak {model['stock_mib']:.0f} MiB"
        rows.append([f"**{label}** ({title})", "", "", "", ""])
        for row, figures in model["rows"].items():
            beyond = f"{figures['beyond_mib']:+.1f}", f"{figures['beyond_gradients']:+.2f}"
            rows.append([row, *cells(figures["steps"]), *beyond])
    large = report["8 billion"]
    title = f"**LoRA of rank 16 on 8 billion** ({large['parameters'] / 1e6:.3g} M shared)"
    rows.append([title, "", "", f"a gradient: {large['gradient_mib']:.1f}", ""])
    measuring = f"{large['measuring_mib']:+.1f}"
    rows.append([f"measuring at {EIGHT_BILLION['tokens']:,} tokens", "", "", measuring, ""])
    return header, rows
