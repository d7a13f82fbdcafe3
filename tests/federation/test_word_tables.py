"""Names of tables, against the models of Transformers: an update of a table names the words."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_gradguard.federation.guard import STATISTICS
from hf_gradguard.federation.lookup_tables import TABLES, check_tables, matches

NAMES = [
    "bert.embeddings.word_embeddings.weight",  # any that says embed
    "roberta.embeddings.position_embeddings.weight",
    "model.embed_tokens.weight",
    "embed",
    "emb.weight",  # OpenAI's first models, and word vectors
    "encoder.word_emb.weight",
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "shared.weight",  # T5
    "model.shared.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "w.weight",  # CTRL
    "transformer.w.weight",
]
MODULES = ["embed", "embedder", "embedding", "embeddings", "word_embedding", "emb", "word_emb",
           "transformer.wte", "wpe", "model.shared", "embed_tokens", "embed_positions"]  # fmt: skip
FAMILIES = ["albert", "bart", "bert", "bloom", "ctrl", "deberta-v2", "distilbert", "electra",
            "gpt2", "gpt_neox", "gpt_oss", "llama", "mamba", "mpnet", "opt", "openai-gpt", "rwkv",
            "t5", "vit", "xlm", "xlnet"]  # fmt: skip


def change_of_all_rows(name: str, bias: str = "") -> None:
    """Look at an update in which every row changed, as under weight decay: names alone tell."""
    received = {name: torch.ones(5, 4)} | ({bias: torch.ones(5)} if bias else {})
    check_tables(received, {key: 0.1 * tensor for key, tensor in received.items()}, TABLES)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_known_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="is a table that the data looks up"):
        change_of_all_rows(name)


@pytest.mark.parametrize("module", MODULES)
def test_a_bias_beside_makes_no_dense_layer_of_a_table(module: str) -> None:
    with pytest.raises(ValueError, match="is a table that the data looks up"):
        change_of_all_rows(f"{module}.weight", bias=f"{module}.bias")


@pytest.mark.parametrize(
    "module", ["embedding_hidden_mapping_in", "embeddings_project", "patch_embed.projection"]
)
def test_a_dense_layer_behind_a_table_is_none(module: str) -> None:
    change_of_all_rows(f"{module}.weight", bias=f"{module}.bias")


def test_other_matrices_pass() -> None:
    for name in ("classifier.weight", "layer.0.query.weight", "lm_head.weight", "mlp.w1.weight"):
        change_of_all_rows(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_table_of_a_model_is_known(family: str) -> None:
    """Whatever looks up by `nn.Embedding`, of the model as its authors published it."""
    try:
        config = AutoConfig.for_model(family)
    except ValueError:
        pytest.skip("no longer in Transformers")
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    tables = [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    assert [name for name in tables if not matches(name, TABLES)] == []


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_running_statistics_are_withheld(kind: type[nn.Module]) -> None:
    """All that normalization over a batch keeps of it, by torch's own names."""
    layer = kind(3)
    buffers = [f"encoder.norm.{name}" for name, _ in layer.named_buffers()]
    assert len(buffers) == 3
    assert all(matches(name, STATISTICS) for name in buffers)
    assert not any(matches(f"encoder.norm.{name}", STATISTICS) for name, _ in
                   layer.named_parameters())  # fmt: skip
