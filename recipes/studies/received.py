"""Received models: what `check_received` says of malicious and of ordinary ones."""

import warnings

import torch
import transformers
from transformers import set_seed
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_gradguard.leakage import check_received

from ..study import Study
from .lib.images import array_images
from .lib.tables import interval, write_table
from .lib.text import load_classifier
from .lib.training import learn
from .malicious_models import (
    BUILT,
    CONSTRUCTIONS,
    FROZEN,
    HONEST,
    NOISY,
    PARTLY,
    RARE,
    SHARPENED,
    disturb,
    leaks,
)

FAMILIES = {
    "SEQUENCE_CLASSIFICATION": """albert bart bert big_bird biogpt bloom camembert convbert deberta
        deberta-v2 distilbert electra ernie gemma2 gpt2 gpt_neox llama mistral modernbert mpnet opt
        phi3 qwen2 qwen3 roberta xlm-roberta""",
    "CAUSAL_LM": "falcon gemma3_text granite mamba olmo2 phi smollm3 stablelm",
    "SEQ_TO_SEQ_CAUSAL_LM": "marian pegasus",
    "IMAGE_CLASSIFICATION": "beit convnext deit dinov2 mobilenet_v2 resnet vit",
}
WIDTHS = {"tiny": 48, "wide": 384}
PRETRAINED, TRAINED = "pretrained", "tiny, trained"


class Malicious(Study):
    """Misses: nine constructions that make gradients leak, each shown to leak.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = {"--cifar10": "npz with x_train in uint8"}
    PLAN = {"units": 256, "images": 8, "texts": 4, "width": 64}
    QUICK = {"units": 64, "images": 4, "texts": 2, "width": 32}
    NOISE = (0.0, 0.003, 0.03)  # on the planted weights, of so many times their size
    STRENGTHS = {  # rows' own noise; samples that reach a unit; units that are made; queries × keys
        NOISY: (0.05, 0.3, 1.0, 3.0),
        RARE: (0.07, 0.02, 0.2, 0.35),
        PARTLY: (0.1, 0.25, 0.5),
        SHARPENED: (40.0, 10.0, 20.0, 80.0),
    }
    WRITTEN = {NOISY: "rows' own, {:.0%}", RARE: "{:.0%} fire", PARTLY: "of {:.0%} of units"}

    def cells(self) -> dict:
        plan = self.QUICK if self.quick else self.PLAN
        seeds = range(1 if self.quick else 10)
        disturbed = {
            (name, f"{100 * noise:g} %", str(seed)): {"built": name, "hidden": noise, "seed": seed}
            for name in (*CONSTRUCTIONS, HONEST, FROZEN)
            if name not in self.STRENGTHS
            for noise in self.NOISE[: 1 if self.quick or name in (HONEST, FROZEN) else None]
            for seed in seeds
        }
        of_strengths = {
            (name, self.WRITTEN.get(name, "× {:g}").format(strength), str(seed)): {
                "built": name, "hidden": 0.0, "seed": seed, "strength": strength,
            }
            for name, strengths in self.STRENGTHS.items()
            for strength in strengths[: 1 if self.quick else None]
            for seed in seeds
        }  # fmt: skip
        return {key: {**cell, **plan} for key, cell in (disturbed | of_strengths).items()}

    def load(self) -> None:
        torch.set_num_threads(1)
        pixels, _ = array_images(self.args.cifar10, samples=3000)
        scaled = pixels.float() / 255
        self.images = torch.nn.functional.interpolate(scaled, size=16, mode="area")

    def measure(self, cell: dict) -> dict:
        set_seed(cell["seed"])
        order, count = torch.randperm(len(self.images)), cell["images"]
        public, private = self.images[order[:-count][:1000]], self.images[order[-count:]]
        planted = BUILT[cell["built"]](public, cell)
        disturb(planted, cell["hidden"])
        checks = sorted({finding.check for finding in check_received(planted.model)})
        return {"read": leaks(planted, private, cell), "checks": checks}

    def report(self, metrics: dict) -> None:
        rows = []
        for name, noises in metrics.items():
            for noise, runs in noises.items():
                checks = [set(run["checks"]) for run in runs.values()]
                # a perceptron warns of a layer on all pixels, whoever made it
                alarms = sum(bool(names - {"reads_all_pixels"}) for names in checks)
                recovered = interval([run["read"] for run in runs.values()], 2)
                all_checks = ", ".join(sorted(set.union(*checks))) or "–"
                share = f"{alarms} of {len(checks)}"
                rows.append([name, noise, recovered, share, all_checks])
        write_table(
            self.output,
            ["construction", "noise on it, or strength", "recovered", "found", "by"],
            rows,
        )


class Alarms(Study):
    """False alarms: ordinary models of 43 families of Transformers, none of which was made to leak.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = {"--model": "a pretrained encoder"}

    def cells(self) -> dict:
        columns = ("tiny",) if self.quick else (*WIDTHS, TRAINED)
        cells = {
            (name, column, "0"): {"kind": kind, "family": name, "column": column, "seed": 0}
            for kind, names in FAMILIES.items()
            for name in names.split()[: 1 if self.quick else None]
            for column in columns
        }
        if not self.quick:
            cell = {"kind": PRETRAINED, "family": PRETRAINED, "column": PRETRAINED, "seed": 0}
            cells[PRETRAINED, PRETRAINED, "0"] = cell
        return cells

    def load(self) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")

    def measure(self, cell: dict) -> dict:
        set_seed(cell["seed"])
        if cell["kind"] == PRETRAINED:
            model = load_classifier(self.args.model)
        else:
            width = WIDTHS.get(cell["column"], WIDTHS["tiny"])
            model = build(cell["kind"], cell["family"], width)
        if cell["column"] == TRAINED:
            train(model, cell["kind"])
        findings = [str(finding) for finding in check_received(model)]
        return {"findings": findings, "parameters": sum(p.numel() for p in model.parameters())}

    def report(self, metrics: dict) -> None:
        rows = []
        for column in ("tiny", "wide", TRAINED, PRETRAINED):
            models = {
                name: model
                for name, columns in metrics.items()
                for model in columns.get(column, {}).values()
            }
            alarms = [name for name, model in models.items() if model["findings"]]
            if models:
                counts = len(models), len(models), len(alarms)
                rows.append([column, *counts, ", ".join(alarms) or "–"])
        write_table(self.output, ["models", "families", "models", "false alarms", "of"], rows)


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
    by_name = {name: size for size, names in sizes.items() for name in names.split()}
    settings = {
        key: value
        for key, value in by_name.items()
        if key in vars(default) and key not in default.attribute_map
    }
    if isinstance(getattr(default, "num_heads", None), list) or hasattr(default, "depths"):
        settings = {"image_size": 32} if hasattr(default, "image_size") else {}
    names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")[name]
    class_name = names if isinstance(names, str) else names[0]
    return getattr(transformers, class_name)(config_class(**settings))


def train(model: torch.nn.Module, kind: str) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        learn(model, optimizer, batch(model, kind))


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
