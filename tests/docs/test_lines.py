"""The table "their line, our line" of the page on frameworks: both columns run, on tiny models."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from examples import example_names
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from hf_gradguard import GradGuardMixin, GradGuardTrainer, make_defense, private_head, protect

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
LIBRARIES = {
    "PEFT": ["peft"], "TRL, SFT": ["trl"], "TRL, SFT of adapters": ["trl", "peft"],
    "TRL, rewards": ["trl"], "sentence-transformers": ["sentence_transformers"],
    "Fabric": ["lightning_fabric"],
}  # fmt: skip
SETTINGS: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "report_to": "none"}
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "pad_token_id": 0}


def lines() -> dict[str, tuple[str, str]]:
    """Their lines and ours, by what the user has."""
    text = PAGE.read_text(encoding="utf-8").partition("## Their line, our line")[2]
    rows = re.findall(r"^\| (.+?) \| (`.+`) \| (`.+`) \|$", text.partition("\n## ")[0], re.M)
    return {
        re.sub(r"\[(.+?)\]\(.+?\)", r"\1", kind): (_code(theirs), _code(ours))
        for kind, theirs, ours in rows
    }


def _code(cell: str) -> str:
    *before, last = [line.strip("`") for line in cell.split("<br>")]
    return "\n".join([*before, f"found = {last}"])


def names(tmp_path: Path, kind: str) -> dict[str, Any]:
    """What the lines of a user with these libraries are about, made anew."""
    torch.manual_seed(0)
    made = example_names("model tokenizer train_dataset batch texts")
    vocabulary = made["tokenizer"].get_vocab()
    made["tokenizer"] = tokenizer = BertTokenizer(vocab=vocabulary)
    tokenizer.eos_token = "[SEP]"
    made["model"].base_model.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    texts, size = made["texts"], {"vocab_size": len(vocabulary), **SIZES}
    made |= {
        "noise": make_defense("gaussian_noise", relative_scale=20.0),
        "rows": made["train_dataset"], "args": TrainingArguments(str(tmp_path / "out"), **SETTINGS),
        "folder": str(tmp_path / "encoder"), "public": [*texts, *list(vocabulary)[5:15]],
        "accelerator": Accelerator(cpu=True), "Trainer": Trainer, "protect": protect,
        "GradGuardMixin": GradGuardMixin, "GradGuardTrainer": GradGuardTrainer,
        "private_head": private_head, "Seq2SeqTrainer": Seq2SeqTrainer,
        "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
    }  # fmt: skip
    if kind == "Seq2Seq":
        config = BartConfig(
            vocab_size=len(vocabulary), d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
            decoder_ffn_dim=16, max_position_embeddings=16, pad_token_id=0, eos_token_id=3,
            bos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=3,
        )  # fmt: skip
        made["seq2seq"] = BartForConditionalGeneration(config)
        made["collator"] = DataCollatorForSeq2Seq(tokenizer, made["seq2seq"])
        made["pairs_of_texts"] = [
            {**tokenizer(text), "labels": tokenizer(text)["input_ids"]} for text in texts
        ]
        made["seq2seq_args"] = Seq2SeqTrainingArguments(str(tmp_path / "s2s"), **SETTINGS)
    if "peft" in LIBRARIES.get(kind, []):
        from peft import LoraConfig, get_peft_model

        made["get_peft_model"] = get_peft_model
        made["lora"] = LoraConfig(task_type="CAUSAL_LM" if "TRL" in kind else "SEQ_CLS")
    if kind.startswith("TRL"):
        import trl

        no_half = SETTINGS | {"bf16": False}
        data = {"chosen": texts, "rejected": texts[::-1]}
        made |= {
            "SFTTrainer": trl.SFTTrainer, "RewardTrainer": trl.RewardTrainer,
            "lm": LlamaForCausalLM(LlamaConfig(**size)),
            "texts": Dataset.from_dict({"text": texts}),
            "sft_args": trl.SFTConfig(str(tmp_path / "sft"), **no_half),
            "reward": LlamaForSequenceClassification(LlamaConfig(**size, num_labels=1)),
            "reward_args": trl.RewardConfig(str(tmp_path / "reward"), **no_half),
            "answers": Dataset.from_dict(data),
        }  # fmt: skip
    if kind == "sentence-transformers":
        import sentence_transformers as st
        from sentence_transformers.losses import MultipleNegativesRankingLoss
        from sentence_transformers.models import Pooling, Transformer

        modules = [Transformer(made["folder"]), Pooling(32)]
        made["encoder"] = st.SentenceTransformer(modules=modules, device="cpu")
        made["loss"] = MultipleNegativesRankingLoss(made["encoder"])
        made["anchors"] = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
        arguments = st.SentenceTransformerTrainingArguments(str(tmp_path / "st"), **SETTINGS)
        made |= {
            "encoder_args": arguments,
            "SentenceTransformerTrainer": st.SentenceTransformerTrainer,
        }
    if kind == "Fabric":
        from lightning_fabric import Fabric

        made["fabric"] = Fabric(accelerator="cpu", devices=1)
        optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1)
        made["model"], _ = made["fabric"].setup(made["model"], optimizer)
    return made


@pytest.mark.parametrize("kind", lines())
@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
def test_line_runs(kind: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for library in LIBRARIES.get(kind, []):
        if not find_spec(library):
            pytest.skip(f"lacks {library}")
    made = names(tmp_path, kind)
    exec(lines()[kind][ours], made)
    found = made["found"]
    if isinstance(found, Trainer):
        found.train()
        assert found.state.global_step == 1
        assert getattr(getattr(found, "defense", None), "name", None) == (
            "gaussian_noise" if ours else None
        )
    elif "classifier" in kind:
        assert type(found).__name__ == (
            "PrivateHeadForSequenceClassification" if ours else "BertForSequenceClassification"
        )
        assert not ours or found.training_arguments("out", num_rows=32).defense == "dp_sgd"
    else:
        gradients = [p.grad for p in made["model"].parameters() if p.grad is not None]
        true = example_names("gmap")["gmap"].gradient()
        size = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        whole = torch.cat([gradient.flatten() for gradient in true.values()]).norm()
        assert (size > 3 * whole) == ours  # noise of twenty times a usual gradient


def test_the_table_has_all_its_rows() -> None:
    assert len(lines()) == 11
    assert lines().keys() >= LIBRARIES.keys()
