"""Trainings of two clients: on four ranks, of two devices each, or on two with whole models."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from helpers import make_task, pad, ragged_rows, token_batch
from launcher import begin, finish, refusal
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.training.exchange.gradients import INSTEAD

ROOT = Path(__file__).resolve().parents[2]
NOISE = "gaussian_noise"
CLIENTS, DEVICES, ROWS = 2, 2, 4  # rows of a client's batch
STEPS, SAVED, DRAWS = 5, 3, 40
Rows = list[dict[str, Tensor]]


def bert() -> nn.Module:
    return make_task("bert")[0]


def planted() -> nn.Module:
    """Rank 0's is taken, before it is cut."""
    model = bert()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    return model


def llama() -> nn.Module:
    """With LoRA on attention, in float32."""
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
        return get_peft_model(LlamaForCausalLM(config), lora)


def texts(count: int = 48) -> Rows:
    batch = token_batch(count, 5)
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def uneven() -> Rows:
    """Of each client's four rows the last two, which its second device gets, have few labels; the
    first client's have none.
    """
    rows = ragged_rows(48)
    for index, row in enumerate(rows):
        if index % ROWS >= ROWS // 2:
            row["labels"][slice(None) if index % (2 * ROWS) < ROWS else slice(2)] = -100
    return rows


def nobody() -> Rows:
    """The first client's rows have no labels at all."""
    rows = ragged_rows(48)
    for index, row in enumerate(rows):
        if index % (2 * ROWS) < ROWS:
            row["labels"][:] = -100
    return rows


def is_cut() -> bool:
    return dist.get_world_size() == CLIENTS * DEVICES


def arguments(folder: Path, **settings: Any) -> GradGuardConfig:
    engine: dict[str, Any] = {"per_device_train_batch_size": ROWS}
    if is_cut():
        sizes = ParallelismConfig(dp_replicate_size=CLIENTS, dp_shard_size=DEVICES)
        engine = {
            "per_device_train_batch_size": ROWS // DEVICES,
            "fsdp": True,
            "parallelism_config": sizes,
        }
    common = {
        "output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-2, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "defense": "none", "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return GradGuardConfig(**{**common, **engine, **settings})


def trainer_of(
    make: Callable[[], nn.Module], data: Rows, args: GradGuardConfig, **settings: Any
) -> GradGuardTrainer:
    collator = pad if make is llama else None
    return GradGuardTrainer(make(), args, train_dataset=data, data_collator=collator, **settings)


PRUNING = {"defense": "pruning", "defense_kwargs": {"ratio": 0.8, "error_feedback": True}}
CLIPPING = {"defense": "dp_sgd", "defense_kwargs": {"clip": 0.05, "scale": 0.0}}
ACCUMULATED = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "random"}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Rows], dict[str, Any]]] = {
    "bert": (bert, texts, {"max_grad_norm": 0.5}),
    "bert, accumulated": (bert, texts, ACCUMULATED),
    "bert, recomputed": (bert, texts, {"activation_checkpointing": True}),
    "bert, pruned": (bert, texts, PRUNING),
    "bert, clipped": (bert, texts, CLIPPING),
    "bert, planted": (planted, texts, {}),
    "bert, twice": (bert, texts, {}),
    "llama": (llama, lambda: ragged_rows(48), {"eval_strategy": "steps", "eval_steps": 2}),
    "llama, accumulated": (llama, lambda: ragged_rows(48), ACCUMULATED),
    "llama, uneven": (llama, uneven, {}),
    "llama, local tokens": (llama, uneven, {"average_tokens_across_devices": False}),
    "llama, nobody": (llama, nobody, {}),
    "llama, clipped": (llama, uneven, CLIPPING),
    "llama, bf16": (llama, lambda: ragged_rows(48), {"bf16": True}),
}


def train(case: str, folder: Path) -> dict[str, Any]:
    """The weights go to a file, as `save_model` writes them."""
    make, rows, settings = CASES[case]
    data = rows()
    trainer = trainer_of(make, data, arguments(folder, **settings), eval_dataset=data[:8])
    trainer.train()
    if case.endswith("twice"):
        trainer.args.max_steps = 2 * STEPS
        trainer.train()
    save_weights(trainer, folder)
    history = trainer.state.log_history
    return {
        "losses": [[e["loss"], e["grad_norm"]] for e in history if "loss" in e],
        "evaluated": [e["eval_loss"] for e in history if "eval_loss" in e],
        "errors": [e["defense/relative_error"] for e in history if "defense/relative_error" in e],
        "cosines": [e["defense/cosine"] for e in history if "defense/cosine" in e],
        "senders": trainer.accelerator.num_senders,
    }


def save_weights(trainer: GradGuardTrainer, folder: Path) -> None:
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        folder.mkdir(exist_ok=True, parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / "weights.safetensors")


class Gradients(TrainerCallback):
    """What each step's optimizer is given: this device's part of the mean message."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.steps.append({name: part(gradient).clone() for name, gradient in gradients.items()})


def part(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def means(folder: Path, steps: int, **settings: Any) -> list[dict[str, Tensor]]:
    """Mean messages of steps that all see the same rows and the same weights."""
    still = {
        "learning_rate": 0.0, "max_steps": steps, "max_grad_norm": 0.0, "optim": "sgd",
        "average_tokens_across_devices": False,  # BERT's loss is a mean that should not be scaled
    }  # fmt: skip
    gradients = Gradients()
    args = arguments(folder, **still, **settings)
    trainer_of(bert, texts(CLIENTS * ROWS), args, callbacks=[gradients]).train()
    return gradients.steps


def client_norms() -> list[float]:
    """Of clients' whole gradients."""
    norms = []
    for client in range(CLIENTS):
        rows = {key: value[client * ROWS :][:ROWS]
                for key, value in token_batch(CLIENTS * ROWS, 5).items()}  # fmt: skip
        gradient = GradientMap(bert(), rows).gradient()
        norms.append(float(torch.cat([g.flatten() for g in gradient.values()]).norm()))
    return norms


NOISY: dict[str, dict[str, Any]] = {
    "gaussian_noise": {"relative_scale": 2.0, "strength": "own"},
    "laplace_noise": {"relative_scale": 2.0, "strength": "own"},
    "dp_sgd": {"clip": 0.05, "scale": 0.3},
    "optimal_noise": {"relative_scale": 2.0, "strength": "own", "shape": "past"},
}


def noise(folder: Path) -> dict[str, Any]:
    """Noise of mean messages, this device's part. It goes to a file."""
    (clear,) = means(folder, 1)
    (clipped,) = means(folder, 1, defense="dp_sgd", defense_kwargs=CLIPPING["defense_kwargs"])
    tensors, found = {}, {"norms": client_norms(), "size": sum(g.numel() for g in clear.values())}
    for name, settings in NOISY.items():
        messages = means(folder, DRAWS, defense=name, defense_kwargs=settings)
        true = clipped if name == "dp_sgd" else clear
        draws = [torch.cat([(m[n] - true[n]).flatten() for n in true]) for m in messages]
        tensors[name] = torch.stack(draws)
    save_file(tensors, folder / f"noise{dist.get_rank()}.safetensors")
    return found


class Sent(TorchDispatchMode):
    """Keeps what collectives send over groups that hold more than this client's devices."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [a for a in args if "ProcessGroup" in str(getattr(a, "_type", lambda: "")())]
            for group in map(dist.ProcessGroup.unbox, groups):
                ranks = dist.get_process_group_ranks(group)
                if len({rank // DEVICES for rank in ranks}) > 1:
                    self.tensors += [(len(ranks), t.detach().clone()) for t in tensors_in(args[0])]
        return func(*args, **(kwargs or {}))


def tensors_in(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for inner in argument:
            yield from tensors_in(inner)


class Watched(GradGuardTrainer):
    """Of its second step it is known what crosses clients."""

    sent: Sent

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step != 1:
            return super().training_step(*args, **kwargs)
        self.sent = Sent()
        with self.sent:
            return super().training_step(*args, **kwargs)


def crossing(folder: Path) -> dict[str, Any]:
    """Sizes of what crosses clients in a step, by size of the group, and how like the true gradient
    the largest is.
    """
    found: dict[str, Any] = {}
    rows = texts(CLIENTS * ROWS)
    for defense, settings in (("none", {}), (NOISE, {"relative_scale": 30.0})):
        args = arguments(
            folder, learning_rate=0.0, optim="sgd", defense=defense, defense_kwargs=settings
        )
        trainer = Watched(bert(), args, train_dataset=rows)
        trainer.train()
        numbers = [(size, t.numel()) for size, t in trainer.sent.tensors]
        largest = max((t for _, t in trainer.sent.tensors), key=Tensor.numel)
        found[defense] = {"numbers": numbers, "largest": largest.double().tolist()}
    return found


class Backward(TrainerCallback):
    """Adds a true gradient to what was exchanged."""

    def __init__(self) -> None:
        self.batch = token_batch(2, 5)

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        model(**self.batch).loss.backward()


def summed_loss(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    """Tells other clients a figure of this device's batch."""
    loss = nn.functional.cross_entropy(outputs["logits"], labels)
    dist.all_reduce(loss.detach())
    return loss


REFUSED: dict[str, dict[str, Any]] = {
    "soteria": {"defense": "soteria"},
    "refiner": {"defense": "refiner"},
    "rows": {"defense": "dp_sgd", "defense_kwargs": {"per_sample": True, "noise_multiplier": 1.0}},
    "no sizes": {"parallelism_config": None},
    "no clients": {"parallelism_config": {"dp_shard_size": 4}},
    "no devices": {"parallelism_config": {"dp_replicate_size": 4}},
    "unsharded": {"fsdp": None},
    "shards": {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "first": {"fsdp_config": {"version": 1}},
    "compiled": {"torch_compile": True},
    "several": {"clients_per_process": 2},
    "simulated": {"num_clients": 4, "train_sampling_strategy": "random"},
    "labels": {"protect_labels": "randomized_response", "label_epsilon": 1.0},
    "measured": {"leakage_logging_steps": 1},
    "more": {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4}},
}


def refusals(folder: Path) -> dict[str, str]:
    found = {}
    for name, settings in REFUSED.items():
        sizes = settings.get("parallelism_config")
        if isinstance(sizes, dict):
            settings = {**settings, "parallelism_config": ParallelismConfig(**sizes)}
        found[name] = refusal(
            lambda: trainer_of(bert, texts(), arguments(folder, **settings)),  # noqa: B023
            (NotImplementedError, ValueError),
        )
    found["accountant"] = refusal(
        lambda: trainer_of(
            bert, texts(), arguments(folder, defense=NOISE), accountant=FisherAccountant()
        ),
        NotImplementedError,
    )
    exchanging = trainer_of(bert, texts(), arguments(folder), compute_loss_func=summed_loss)
    found["loss"] = refusal(exchanging.train, NotImplementedError)
    backward = trainer_of(bert, texts(), arguments(folder), callbacks=[Backward()])
    found["backward"] = refusal(backward.train, RuntimeError).replace(INSTEAD, "INSTEAD")
    return found


def page(folder: Path) -> dict[str, Any]:
    """The Trainer of the documents, on these ranks."""
    text = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    start, code = [b for b in blocks if "BertConfig(" in b or "GradGuardTrainer(" in b]
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(start, names)
    before = {name: p.detach().clone() for name, p in names["model"].named_parameters()}
    with contextlib.chdir(folder):
        exec(code.replace('"out",', '"out", use_cpu=True, report_to="none",'), names)
    after = {name: p.detach().full_tensor() for name, p in names["model"].named_parameters()}
    return {
        "moved": max(float((after[n] - before[n]).abs().max()) for n in after),
        "checksum": [float(tensor.double().sum()) for tensor in after.values()],
        "card": names["trainer"].describe_message()["clients"],
    }


class Slow(TrainerCallback):
    """After the checkpoint, says which step is done and takes its time, so that there is time for a
    kill.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > SAVED:
            (self.folder / f"step{state.global_step}.rank{args.process_index}").touch()
            time.sleep(5)


SHAPED = {"defense": "optimal_noise", "defense_kwargs": {"shape": "past", "refresh_every": 4}}


def resumable(
    folder: Path,
    checkpoint: Path | None = None,
    make: Callable[[], nn.Module] = bert,
    callbacks: Any = None,
) -> None:
    """A defense that remembers, whose noise is the same in each run."""
    args = arguments(
        folder, noise_seed=3, save_strategy="steps", save_steps=SAVED,
        train_sampling_strategy="random", **(SHAPED if make is bert else CLIPPING)
    )  # fmt: skip
    data = texts() if make is bert else ragged_rows(48)
    trainer = trainer_of(make, data, args, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    save_weights(trainer, folder)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 1)


def main() -> None:
    folder, (mode, *rest) = begin()
    GradGuardConfig(str(folder), use_cpu=True, defense="none")  # starts the process group
    seconds: dict[str, float] = {}
    results: dict[str, Any] = {"seconds": seconds}
    if mode == "train":
        for case in CASES:
            with timed(seconds, case):
                results[case] = train(case, folder / case)
        with timed(seconds, "noise"):
            results["noise"] = noise(folder)
    if mode == "train" and is_cut():
        with timed(seconds, "others"):
            results["crossing"], results["refusals"] = crossing(folder), refusals(folder)
            results["page"] = page(folder)
    if mode == "kill":
        resumable(folder / "killed", callbacks=[Slow(folder)])
    if mode == "resume":
        resumable(folder / "left alone")
        resumable(folder / "resumed", Path(*rest))
        resumable(folder / "llama", make=llama)
        resumable(folder / "llama resumed", folder / "llama" / f"checkpoint-{SAVED}", llama)
    finish(folder, results)


if __name__ == "__main__":
    main()
