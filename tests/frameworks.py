"""Tiny trainings with Trainers of other libraries, stock and protected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from helpers import make_task, word_tokenizer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_gradguard import GradGuardConfig, GradGuardMixin

WORDS = ["a", "the", "cat", "dog", "bird", "sat", "ran", "sang", "on", "over", "in", "mat"]
WORDS += ["hill", "tree", "rain", "fell", "town", "all", "night"]
ROWS = 12
SETTINGS = {
    "max_steps": 3, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2,
}  # fmt: skip


def sentences(shift: int = 0) -> list[str]:
    """Of 3 to 6 words."""
    return [
        " ".join(WORDS[(3 * k + 5 * shift + j) % len(WORDS)] for j in range(3 + (k + shift) % 4))
        for k in range(ROWS)
    ]


def seeded(make: Callable[[], nn.Module]) -> Any:
    """A model that is the same at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def llama(vocabulary: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, pad_token_id=0, **sizes, **heads))


@dataclass
class Training:
    """What is trained, by which Trainer.

    Args:
        trainer: The stock class.
        config: Its arguments' class.
        make: All other arguments of the Trainer but these, made anew at every call.
        settings: Arguments beside `SETTINGS`.
    """

    trainer: Any
    config: Any
    make: Callable[[], dict[str, Any]]
    settings: dict[str, Any]

    def run(self, folder: Path, guarded: dict[str, Any] | None, **keywords: Any) -> Any:
        """A Trainer that has trained: the stock one, or a protected one with these settings."""
        settings = {**SETTINGS, **self.settings, "output_dir": str(folder)}
        if guarded is None:
            trainer = self.trainer(args=self.config(**settings), **self.make())
        else:
            bases = (self.config, GradGuardConfig)
            config: Any = make_dataclass("Guarded", [], bases=bases)
            trainer_class: Any = type("Protected", (GradGuardMixin, self.trainer), {})
            args = config(**{**settings, **guarded})
            trainer = trainer_class(args=args, **self.make(), **keywords)
        trainer.train()
        return trainer


def seq2seq() -> Training:
    batch = make_task("t5", dtype=torch.float32, batch_size=ROWS)[1]
    rows = [{key: value[k] for key, value in batch.items()} for k in range(ROWS)]
    return Training(
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        lambda: {"model": make_task("t5", dtype=torch.float32)[0], "train_dataset": rows},
        {},
    )


def _trl(lora: bool, data: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.eos_token = "[SEP]"
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = {key: seeded(lambda: llama(len(tokenizer))) for key in ("model", *more)}
    if lora:
        made["model"] = seeded(lambda: get_peft_model(made["model"], peft))
    return {**made, "train_dataset": Dataset.from_dict(data), "processing_class": tokenizer}


PLAIN = {"bf16": False, "gradient_checkpointing": False}


def sft(lora: bool = False) -> Training:
    import trl

    return Training(trl.SFTTrainer, trl.SFTConfig, lambda: _trl(lora, {"text": sentences()}), PLAIN)


def dpo(lora: bool = False) -> Training:
    import trl

    data = {"prompt": sentences(), "chosen": sentences(1), "rejected": sentences(2)}
    more = {} if lora else {"ref_model": None}
    return Training(trl.DPOTrainer, trl.DPOConfig, lambda: _trl(lora, data, **more), PLAIN)


def reward() -> Training:
    """Scores of answers, of which one is preferred."""
    import trl

    def make() -> dict[str, Any]:
        made = _trl(False, {"chosen": sentences(1), "rejected": sentences(2)})
        config = made["model"].config
        config.num_labels = 1
        made["model"] = seeded(lambda: LlamaForSequenceClassification(config))
        return made

    return Training(trl.RewardTrainer, trl.RewardConfig, make, PLAIN)


def kto() -> Training:
    """Answers that are good or bad, each beside another's prompt."""
    import trl

    data: dict[str, Any] = {"prompt": sentences(), "completion": sentences(1)}
    data["label"] = [bool(k % 2) for k in range(ROWS)]
    more = {"ref_model": None}
    return Training(trl.KTOTrainer, trl.KTOConfig, lambda: _trl(False, data, **more), PLAIN)


def sentence_encoder(folder: Path, lora: bool = False) -> Any:
    """A sentence encoder of a random BERT with the words' tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    tokenizer = word_tokenizer(WORDS)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = BertConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, max_position_embeddings=64, **sizes
    )
    if not (folder / "config.json").exists():
        seeded(lambda: BertModel(config)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    encoder = Transformer(str(folder))
    model = SentenceTransformer(modules=[encoder, Pooling(8)], device="cpu")
    if lora:
        adapter = LoraConfig(r=2, target_modules=["query", "value"])
        seeded(lambda: model.add_adapter(adapter))
    return model


def encoders(folder: Path, texts: int = 2, lora: bool = False, loss: Any = None) -> Training:
    """Sentence encoders on pairs or triplets."""
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    names = ("anchor", "positive", "negative")[:texts]
    data = Dataset.from_dict({name: sentences(k) for k, name in enumerate(names)})

    def make() -> dict[str, Any]:
        model = sentence_encoder(folder, lora)
        made = (loss or losses.MultipleNegativesRankingLoss)(model)
        return {"model": model, "train_dataset": data, "loss": made}

    return Training(SentenceTransformerTrainer, SentenceTransformerTrainingArguments, make, {})


def trainings(folder: Path) -> dict[str, Training]:
    return {
        "seq2seq": seq2seq(),
        "sft": sft(),
        "sft, LoRA": sft(lora=True),
        "dpo": dpo(),
        "dpo, LoRA": dpo(lora=True),
        "pairs": encoders(folder),
        "triplets": encoders(folder, 3),
        "pairs, LoRA": encoders(folder, lora=True),
    }


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
