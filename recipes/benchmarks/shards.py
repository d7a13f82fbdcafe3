"""How far weights end apart where a client is on two devices instead of one: two clients of two
devices each, undefended, beside two of one device each; and the stock Trainer on four processes
beside two, with as many rows a step.

Both add up the same numbers in another order. What that rounding comes to is measured in float32,
and in float64, where it should vanish. AdamW divides by the root of a moving square, so an entry
whose gradient is all rounding still moves by a share of the learning rate. Texts of the language
model have from 3 to 8 tokens, so that clients and devices have different numbers of them.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer

from .measuring import classifier, on_ranks, random_batch

CLIENTS, DEVICES, ROWS, LENGTH, STEPS = 2, 2, 4, 16, 5  # rows of a client's batch
ADAM = {"learning_rate": 2e-5}
SGD = {"learning_rate": 0.05, "optim": "sgd"}
OURS, STOCK = "`none`", "stock Trainer"
Rows = list[dict[str, torch.Tensor]]


def encoder(name: str) -> tuple[nn.Module, Rows]:
    model = classifier(name)
    model.get_input_embeddings().requires_grad_(True)
    batch = random_batch(model, CLIENTS * ROWS * STEPS, LENGTH)
    count = len(batch["labels"])
    return model, [{key: tensor[row] for key, tensor in batch.items()} for row in range(count)]


def llama(_name: str) -> tuple[nn.Module, Rows]:
    """With LoRA on attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    rows = []
    for row in range(CLIENTS * ROWS * STEPS):
        ids = torch.randint(2, config.vocab_size, (3 + 5 * row % 6,))
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return get_peft_model(LlamaForCausalLM(config), lora), rows


class Case(NamedTuple):
    make: Callable[[str], tuple[nn.Module, Rows]]
    optimizer: dict
    dtype: torch.dtype = torch.float32


CASES = {
    "encoder, SGD": Case(encoder, SGD),
    "encoder, AdamW": Case(encoder, ADAM),
    "encoder, AdamW, float64": Case(encoder, ADAM, torch.float64),
    "Llama with LoRA, SGD": Case(llama, SGD),
    "Llama with LoRA, AdamW": Case(llama, {"learning_rate": 1e-3}),
}


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        for count in (CLIENTS, CLIENTS * DEVICES):
            on_ranks(count, _train_all, count, args.model, folder)
        cases = {
            label: {kind: _apart(Path(folder), label, kind) for kind in (OURS, STOCK)}
            for label in CASES
        }
    return {"steps": STEPS, "cases": cases}


def _train_all(rank: int, count: int, name: str, folder: str) -> None:
    for label, case in CASES.items():
        for kind in (OURS, STOCK):
            weights = _trained(case, kind, name, folder, sharded=count > CLIENTS)
            if not rank:
                save_file(weights, _path(Path(folder), label, kind, count))


def _trained(
    case: Case, kind: str, name: str, folder: str, sharded: bool
) -> dict[str, torch.Tensor]:
    model, rows = case.make(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # masks are a device's own
            module.p = 0.0
    settings = {
        "output_dir": folder, "max_steps": STEPS, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "train_sampling_strategy": "sequential",
        # A classifier's loss is a mean, which is not to be scaled by how many labels there are.
        "average_tokens_across_devices": case.make is llama,
        "per_device_train_batch_size": ROWS // DEVICES if sharded else ROWS, **case.optimizer,
    }  # fmt: skip
    if kind == STOCK:
        trainer = Trainer(model.to(case.dtype), TrainingArguments(**settings), pad, rows)
    else:
        if sharded:
            sizes = ParallelismConfig(dp_replicate_size=CLIENTS, dp_shard_size=DEVICES)
            settings |= {"fsdp": True, "parallelism_config": sizes}
        args = GradGuardConfig(**settings, defense="none", share_input_embeddings=True)
        trainer = GradGuardTrainer(model.to(case.dtype), args, pad, rows)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {key: tensor.contiguous().clone() for key, tensor in state.items()}


def pad(rows: Rows) -> dict[str, torch.Tensor]:
    """To the longest row."""
    if rows[0]["labels"].dim() == 0:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], True, fill[key])
        for key in rows[0]
    }


def _path(folder: Path, label: str, kind: str, count: int) -> Path:
    return folder / f"{list(CASES).index(label)} {kind == OURS} {count}.safetensors"


def _apart(folder: Path, label: str, kind: str) -> dict[str, float]:
    """The largest difference of weights, and how many entries differ by more than 10⁻⁶."""
    few, many = (load_file(_path(folder, label, kind, n)) for n in (CLIENTS, CLIENTS * DEVICES))
    if few.keys() != many.keys():
        raise RuntimeError(f"{label}: both runs have other weights.")
    differences = [(few[name] - many[name]).abs() for name in few]
    return {
        "largest": max(float(difference.max()) for difference in differences),
        "farther": sum(int((difference > 1e-6).sum()) for difference in differences),
        "entries": sum(map(torch.numel, few.values())),
    }


def table(report: dict) -> tuple[list[str], list]:
    header = [f"largest difference of weights after {report['steps']} steps"]
    for kind in (OURS, STOCK):
        header += [kind, "beyond 10⁻⁶"]
    rows = []
    for label, kinds in report["cases"].items():
        row = [label]
        for apart in kinds.values():
            row += [f"{apart['largest']:.1e}", f"{apart['farther']:,} of {apart['entries']:,}"]
        rows.append(row)
    return header, rows
