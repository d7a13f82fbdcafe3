"""Random models of the architectures that people fine-tune, of one width and vocabulary."""

from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

WIDTH, HEADS, BLOCKS, LENGTH = 384, 6, 2, 512
LM, CLASSIFIER, MASKED = "language model", "classifier", "masked language model"
KINDS = {
    LM: AutoModelForCausalLM,
    CLASSIFIER: AutoModelForSequenceClassification,
    MASKED: AutoModelForMaskedLM,
}
LLAMA: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "max_position_embeddings": LENGTH,
}  # fmt: skip
BERT: dict[str, Any] = {"max_position_embeddings": LENGTH + 2}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "phi3": {"max_position_embeddings": LENGTH, "num_key_value_heads": 2},
    "gpt_neox": {"max_position_embeddings": LENGTH},
    "gpt2": {"n_positions": LENGTH},
    "opt": {
        "ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH, "max_position_embeddings": LENGTH,
    },
    "bloom": {},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "distilbert": {
        "dim": WIDTH, "n_layers": BLOCKS, "n_heads": HEADS, "hidden_dim": 4 * WIDTH,
        "max_position_embeddings": LENGTH,
    },
    "electra": BERT | {"embedding_size": 128},
    "roberta": BERT,
    "albert": BERT | {"embedding_size": 128},
    "modernbert": {"max_position_embeddings": LENGTH},
    "deberta-v2": BERT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 64,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "t5": {
        "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": BLOCKS,
        "num_heads": HEADS,
    },
    "bart": {
        "d_model": WIDTH, "encoder_layers": BLOCKS, "decoder_layers": BLOCKS,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH,
        "max_position_embeddings": LENGTH,
    },
}  # fmt: skip


def config(family: str, tokenizer, **settings: Any) -> Any:
    """The family's configuration at this width, with the tokenizer's special tokens."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
    }
    own = (DECODERS | ENCODERS)[family]
    if "d_model" in own or "dim" in own:
        common = {"vocab_size": len(tokenizer)}
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "decoder_start_token_id": tokenizer.cls_token_id,
        "num_labels": 2,
    }
    return AutoConfig.for_model(family, **common | own | special | settings)


def build(family: str, task: str, tokenizer, **settings: Any) -> nn.Module:
    """A random model, from the global generator, without dropout."""
    return (
        KINDS[task]
        .from_config(config(family, tokenizer, **settings), trust_remote_code=False)
        .eval()
    )
