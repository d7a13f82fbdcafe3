"""What examples in docstrings and documents may use without making it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import torch
from helpers import word_tokenizer
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.attacks import Observation
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

SENTENCES = ["a fine film", "the plot is long and dull"]
MORE_WORDS = "an it and or very this that with cast script scene joke slow warm bad good"

TEXT = {
    *("model", "tokenizer", "texts", "labels", "samples", "train_dataset", "batch"),
    "public_texts",
    *("gmap", "shared", "delta", "seen", "observation"),
}
IMAGES = {"image_model", "image_batch", "image_gmap", "image_seen", "image_observation"}
IMPORTED = {
    "torch": torch,
    "GradientMap": GradientMap,
    "make_defense": make_defense,
    "chain": chain,
}


def example_names(source: str | None = None) -> dict[str, Any]:
    """New objects at every call, always the same. Of models there are those that `source` names.

    - `torch`, `GradientMap`, `make_defense`, `chain`: what everybody has imported.
    - `model`, `tokenizer`: a tiny BERT with 2 labels, in eval mode, and its whole words.
    - `texts`, `labels`, `samples`, `train_dataset`: two sentences, with their classes, as pairs,
      and as rows for a Trainer.
    - `public_texts`: other sentences, of the same words.
    - `batch`: the two sentences as a collator returns them.
    - `gmap`, `shared`, `delta`: the batch's gradient map, its gradient, and a small change of it.
    - `observation` (also `seen`): what a server sees of `shared`, with labels and tokenizer.
    - `image_model`, `image_batch`, `image_gmap`, `image_observation` (`image_seen`): the same for
      two images of 3 x 32 x 32 pixels.
    - `context`, `train_message`: of a node of Flower's, where that is installed.
    """
    named = TEXT | IMAGES if source is None else set(re.findall(r"\w+", source))
    found = {**IMPORTED, **_flower(), **_flare()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if named & (TEXT | IMAGES):  # images are drawn after it
            found |= _text()
        if named & IMAGES:
            found |= _images()
    return found


def _text() -> dict[str, Any]:
    words = dict.fromkeys([*" ".join(SENTENCES).split(), *MORE_WORDS.split()])
    tokenizer = word_tokenizer(list(words))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config).eval()
    labels = torch.tensor([1, 0])
    batch = {**tokenizer(SENTENCES, padding=True, return_tensors="pt"), "labels": labels}
    gmap, shared, seen = _seen(model, batch, batch["input_ids"].shape, tokenizer=tokenizer)
    rows = [
        {"labels": label, **tokenizer(text)}
        for text, label in zip(SENTENCES, labels.tolist(), strict=True)
    ]
    return {
        "model": model,
        "tokenizer": tokenizer,
        "texts": list(SENTENCES),
        "public_texts": MORE_WORDS.split(),
        "labels": labels,
        "samples": list(zip(SENTENCES, labels.tolist(), strict=True)),
        "train_dataset": rows,
        "batch": batch,
        "gmap": gmap,
        "shared": shared,
        "delta": {name: 1e-3 * torch.randn_like(tensor) for name, tensor in shared.items()},
        "seen": seen,
        "observation": seen,
    }


def _images() -> dict[str, Any]:
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig(num_labels=2)).eval()
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    gmap, _, seen = _seen(model, batch, batch["pixel_values"].shape)
    return {
        "image_model": model,
        "image_batch": batch,
        "image_gmap": gmap,
        "image_seen": seen,
        "image_observation": seen,
    }


def _seen(
    model: nn.Module, batch: dict[str, Any], shape: torch.Size, **public: Any
) -> tuple[GradientMap, dict[str, torch.Tensor], Observation]:
    gmap = GradientMap(model, batch)
    shared = gmap.gradient()
    seen = Observation(
        model=model, gradient=shared, input_shape=tuple(shape), labels=batch["labels"], **public
    )
    return gmap, shared, seen


def _flower() -> dict[str, Any]:
    if not find_spec("flwr"):
        return {}
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    weights = ArrayRecord({"w": Array(torch.ones(4).numpy())})
    message = Message(RecordDict({"arrays": weights}), dst_node_id=1, message_type="train")
    return {"context": context, "train_message": message}


def _flare() -> dict[str, Any]:
    if not find_spec("nvflare"):
        return {}
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext

    diff = DXO(DataKind.WEIGHT_DIFF, {"w": torch.ones(4).numpy()}).to_shareable()
    return {"weights_diff": diff, "fl_context": FLContext()}
