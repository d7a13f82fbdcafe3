"""Tiny models of many families, from the configuration classes of the installed Transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

VOCABULARY, EOS = 120, 2

_COMMON = {
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers
        num_decoder_layers num_attention_heads n_head n_heads num_heads num_experts_per_tok
        encoder_attention_heads decoder_attention_heads coordinate_size shape_size eos_token_id""",
    4: """num_local_experts num_experts n_routed_experts num_latents rank qk_rope_head_dim
        state_size time_step_rank rotary_dim hidden_size_per_layer_input mask_token_id""",
    8: """d_kv head_dim d_head moe_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim
        v_head_dim shared_expert_intermediate_size sliding_window entity_emb_size patch_size""",
    16: """hidden_size d_model n_embd dim emb_dim embedding_size input_size d_latents image_size""",
    24: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim
        d_inner""",
    64: "max_position_embeddings n_positions max_2d_position_embeddings",
    VOCABULARY: "vocab_size vocab_size_per_layer_input entity_vocab_size",
    0: "pad_token_id decoder_start_token_id",
    1: "num_key_value_heads bos_token_id",
    3: "sep_token_id",
    5: "cls_token_id",
    6: "unk_token_id",
}
_SIZES = {name: size for size, names in _COMMON.items() for name in names.split()}

_HEADS = {
    "SEQUENCE_CLASSIFICATION": """albert bart bert big_bird bigbird_pegasus biogpt bloom camembert
        convbert ctrl data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert falcon
        flaubert fnet funnel gemma gemma2 gpt2 gpt_bigcode gpt_neox gptj gte ibert layoutlm llama
        longformer luke markuplm mbart megatron-bert mistral mixtral mobilebert modernbert mpnet mpt
        mra mt5 mvp nomic_bert nystromformer olmo openai-gpt opt phi plbart qwen2""",
    "CAUSAL_LM": """cohere cohere2 cpmant falcon_mamba gemma3_text gemma4_text glm
        gpt_neox_japanese gpt_oss granite helium mamba marian olmoe pegasus prophetnet qwen2_moe
        qwen3 qwen3_moe rembert roberta roformer stablelm starcoder2 trocr whisper xglm xlm
        xlm-roberta xlnet""",
    "MASKED_LM": "roberta-prelayernorm squeezebert tapas",
}
FAMILIES = [(kind, name) for kind, names in _HEADS.items() for name in names.split()]
"""Kinds of head and model types."""

RECTIFIED = {"distilbert", "opt", "ctrl", "mobilebert", "xlm", "flaubert", "openai-gpt"}
"""Families with units that can be dead in a batch."""


def tiny_model(kind: str, name: str, **settings: Any) -> nn.Module:
    """A model in eval mode with noise on all weights, so that none is special."""
    config_class = CONFIG_MAPPING[name]
    default = config_class()
    sizes = {
        key: size
        for key, size in _SIZES.items()
        if key in vars(default) and key not in default.attribute_map
    }
    found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")[name]
    class_name = found if isinstance(found, str) else found[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(config_class(**(sizes | settings))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def disjoint_batches(kind: str) -> list[dict[str, Tensor]]:
    """Two batches that have no token in common but the last of each text."""
    order = torch.randperm(VOCABULARY - 10, generator=torch.Generator().manual_seed(0)) + 10
    batches = []
    for part in order[:32].view(2, 2, 8):
        ids = part.clone()
        ids[:, -1] = EOS
        labels = torch.tensor([1, 0]) if kind == "SEQUENCE_CLASSIFICATION" else ids.clone()
        mask = torch.ones_like(ids)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def telling_matrices(
    gradients: list[dict[str, Tensor]],
) -> dict[str, list[tuple[set[int], set[int]]]]:
    """Matrices whose zero rows, along any dimension, differ between two gradients, with the rows
    that are not zero.
    """
    found: dict[str, list[tuple[set[int], set[int]]]] = {}
    for name, one in gradients[0].items():
        other = gradients[1][name]
        for dim in range(one.dim() if one.dim() > 1 else 0):
            rows = [
                {int(row) for row in (g != 0).movedim(dim, 0).flatten(1).any(1).nonzero()}
                for g in (one, other)
            ]
            if rows[0] != rows[1]:
                found.setdefault(name, []).append((rows[0], rows[1]))
    return found
