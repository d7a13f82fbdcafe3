"""False alarms: ordinary models of 43 families of Transformers, none of which was made to leak.

    python -m recipes.studies.received.run alarms --model DIR --output docs/results/received_alarms

Every family is built by its own class from a configuration, with two layers, of width 48 ("tiny")
and 384 ("wide"), and with its own initialization; a third column adds 20 steps of
training by Adam at 1e-3 on random inputs and labels to the tiny ones, so that no weight is left as
it was made. A pretrained model (`--model`) is looked at as it is. A model that has any finding
counts. Five minutes of one core.
"""

import warnings

import torch
import transformers
from transformers import AutoModelForSequenceClassification, set_seed
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_gradguard.leakage import check_received

from ..lib.tables import write_table
from .settings import FAMILIES, SEEDS, WIDTHS

ARGUMENTS = {"--model": "a pretrained encoder"}
PRETRAINED = "pretrained"
TRAINED = "tiny, trained"


def cells(args) -> dict:
    found = {}
    for kind, names in FAMILIES.items():
        for name in names.split()[: 1 if args.quick else None]:
            for column in ["tiny"] if args.quick else [*WIDTHS, TRAINED]:
                for seed in list(SEEDS)[: 1 if args.quick or column == "wide" else None]:
                    cell = {"kind": kind, "family": name, "column": column, "seed": seed}
                    found[name, column, str(seed)] = cell
    if not args.quick:
        cell = {"kind": PRETRAINED, "family": PRETRAINED, "column": PRETRAINED, "seed": 0}
        found[PRETRAINED, PRETRAINED, "0"] = cell
    return found


def prepare(args):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    return lambda cell: measure(cell, args.model)


def measure(cell: dict, pretrained: str | None) -> dict:
    set_seed(cell["seed"])
    if cell["kind"] == PRETRAINED:
        model = AutoModelForSequenceClassification.from_pretrained(
            pretrained, trust_remote_code=False
        )
    else:
        model = build(cell["kind"], cell["family"], WIDTHS.get(cell["column"], WIDTHS["tiny"]))
    if cell["column"] == TRAINED:
        train(model, cell["kind"])
    found = [str(one) for one in check_received(model)]
    return {"findings": found, "parameters": sum(p.numel() for p in model.parameters())}


def report(figures: dict, args) -> None:
    rows, alarms = [], []
    for column in ("tiny", "wide", TRAINED, PRETRAINED):
        runs = {
            name: list(columns[column].values())
            for name, columns in figures.items()
            if column in columns
        }
        if not runs:
            continue
        models = [one for several in runs.values() for one in several]
        alarmed = [one for one in models if one["findings"]]
        families = [name for name, several in runs.items() if any(o["findings"] for o in several)]
        alarms += [(column, name) for name in families]
        named = ", ".join(families) or "–"
        rows.append([column, len(runs), len(models), len(alarmed), named])
    write_table(args.output, ["models", "families", "models", "false alarms", "of"], rows)


def build(kind: str, name: str, width: int) -> torch.nn.Module:
    """A model with two layers and its own initialization."""
    config_class = CONFIG_MAPPING[name]
    default, heads = config_class(), max(2, width // 64)
    sizes = {
        2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
        "num_decoder_layers",
        heads: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_key_value_heads",
        width: "hidden_size d_model n_embd dim embedding_size",
        4 * width: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner "
        "hidden_dim",
        width // heads: "head_dim d_kv",
        1000: "vocab_size",
        128: "max_position_embeddings n_positions",
        32: "image_size",
        8: "patch_size",
        0: "pad_token_id decoder_start_token_id",
    }
    given = {name: size for size, names in sizes.items() for name in names.split()}
    wanted = {
        key: value
        for key, value in given.items()
        if key in vars(default) and key not in default.attribute_map
    }
    if isinstance(getattr(default, "num_heads", None), list) or hasattr(default, "depths"):
        wanted = {"image_size": 32} if hasattr(default, "image_size") else {}
    found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")[name]
    class_name = found if isinstance(found, str) else found[0]
    return getattr(transformers, class_name)(config_class(**wanted))


def train(model: torch.nn.Module, kind: str) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        loss = model(**batch(model, kind)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def batch(model: torch.nn.Module, kind: str) -> dict:
    labels = torch.randint(2, (8,))
    if kind == "IMAGE_CLASSIFICATION":
        size = getattr(model.config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(8, 3, size, size), "labels": labels}
    ids = torch.randint(5, 1000, (8, 16))
    eos = getattr(model.config, "eos_token_id", None)
    if isinstance(eos, int) and eos < 1000:
        ids[:, -1] = eos
    if kind != "SEQUENCE_CLASSIFICATION":
        labels = ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
