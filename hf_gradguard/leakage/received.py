"""Checks of a received model, before training, for what makes its gradients leak data.

A sender can make weights so that a layer's gradient holds samples one by one: rows that all measure
the same with biases in a ladder (Fowl et al., "Robbing the Fed", 2021, "Decepticons", 2022), rows
that hardly any sample activates (Boenisch et al., "When the Curious Abandon Honesty", 2021), heads
that let one class through (Wen et al., "Fishing for User Data in Large-Batch Federated Learning",
2022). What they have in common does not occur by itself: rows that are the same, rows of zeros,
biases that outweigh all that a row can say, layers that the architecture does not have. Where
weights look ordinary, what layers do with public inputs still shows it (probes.py).

A model that passes may still be made to leak. Honest layers leak too, and a few manipulated units
can hide among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .probes import examine_behavior, probe_inputs

logger = logging.get_logger(__name__)

LEAST_INPUTS = 16  # below, rows are alike by chance
LEAST_COSINE = 0.999  # cosine of rows that measure the same
FEWEST = 3  # rows alike, rows of zeros
LARGEST = 20_000  # rows of which every pair is compared; of more, equal ones only
FAR = 20.0  # a bias, beside the length of its row
FEWEST_SUMS = 32  # rows whose sums are compared
EVEN = 0.3  # deviation of these, where 1 is that of rows that were drawn
TALL = 30.0  # a row, beside the median one
_PROJECTED = 48
_CONVOLUTION = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Finding:
    """One property of a model that makes gradients leak.

    Args:
        check: The name of the check that found it.
        name: The name of the parameter or module.
        says: A sentence that describes it.

    Example:
        >>> print(Finding("rows_of_zeros", "classifier", "1 of 2 rows are zero."))
        classifier: 1 of 2 rows are zero.
    """

    check: str
    name: str
    says: str

    def __str__(self) -> str:
        return f"{self.name}: {self.says}"


ADVICE = (
    "Weights can be made so that gradients give away their data. Ask whoever sent the model why it "
    "has these, compare it with a copy that you trust (check_received(model, reference)), withhold "
    "the layers named (withhold=[...]) or do not train it."
)


def check_received(
    model: nn.Module,
    reference: nn.Module | Mapping[str, Tensor] | None = None,
    probes: Mapping[str, Tensor] | None = None,
) -> list[Finding]:
    """Find what in a received model makes the gradients leak that a client would share.

    The check looks at weights, at structure, and at what layers do with public inputs. Frozen
    parameters do not count, except those of attention.

    Args:
        model: The model as it was received.
        reference: A copy that you trust, or its state: parameters that are not in it, have other
            shapes, or are 30 times as large are reported too. Default: the architecture that the
            model's own configuration describes, by names and shapes.
        probes: Public inputs like the client's, as the model takes them, in one batch. Default:
            random ones, for models of texts and of images.

    Returns:
        The findings; an empty list is no proof.

    Example:
        >>> check_received(model)
        []
        >>> with torch.no_grad():
        ...     _ = model.classifier.weight[1].zero_()
        >>> [finding.check for finding in check_received(model)]
        ['rows_of_zeros']
    """
    layers = list(_layers(model))
    findings = [
        Finding(name, layer_name, says)
        for layer_name, weight, bias in layers
        for name, check in _CHECKS.items()
        for says in check(weight, bias)
    ]
    equal = ((name, says) for name, table in _tables(model) for says in _equal_rows(table))
    findings += [Finding("equal_embeddings", name, says) for name, says in equal]
    findings += [
        Finding("single_tokens", layer_name, says) for layer_name, says in sharp_attention(model)
    ]
    findings += _on_probes(model, {name: weight for name, weight, _ in layers}, probes)
    return [*findings, *_on_pixels(model), *_against(model, reference)]


def _on_probes(
    model: nn.Module, weights: Mapping[str, Tensor], probes: Mapping[str, Tensor] | None
) -> list[Finding]:
    """Find layers by their behavior, and warn if only weights can be examined."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return []
    batches = probe_inputs(model) if probes is None else [dict(probes)]
    unable = None if batches else "it takes neither texts nor images: give probes="
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        unable = "it is sharded, and other ranks would have to run it too"
    by_layer: dict[tuple[str, str], Finding] = {}
    try:
        for batch in [] if unable else batches:
            for check, name, says in examine_behavior(model, weights, batch):
                by_layer.setdefault((check, name), Finding(check, name, says))
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        unable = f"it fails on probes ({error})"
    if unable:
        logger.warning(f"check_received examines only weights of {type(model).__name__}: {unable}.")
    return list(by_layer.values())


def _layers(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield the layers that are trained: weights as `(out, in)`, with their biases."""
    # an output head that is a table's is looked at as a table: padding has a row of zeros
    looked_at = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_layer = isinstance(module, nn.Linear | Conv1D | _CONVOLUTION)
        if not is_layer or not isinstance(weight, Tensor) or id(weight) in looked_at:
            continue
        looked_at.add(id(weight))
        bias = getattr(module, "bias", None)
        if not weight.requires_grad and (bias is None or not bias.requires_grad):
            continue
        matrix = weight.detach().T if isinstance(module, Conv1D) else weight.detach().flatten(1)
        yield name, matrix.float(), None if bias is None else bias.detach().float()


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            yield name, module.weight.detach()


def _rows_alike(weight: Tensor, bias: Tensor | None) -> Iterator[str]:
    """Find rows that are multiples of each other.

    They measure one thing, and their gradients' differences are single samples.
    """
    rows = weight[weight.norm(dim=1) > 0]
    if rows.shape[1] < LEAST_INPUTS or len(rows) < FEWEST:
        return
    parallel = int((_partners(rows) >= FEWEST - 1).sum())
    if parallel >= FEWEST:
        no_ladder = bias is None or len(bias.unique()) < FEWEST
        with_biases = "" if no_ladder else ", with biases that differ"
        yield (
            f"{parallel} of {len(weight)} rows measure the same{with_biases}. Differences of their "
            "gradients are single samples."
        )


def _partners(rows: Tensor) -> Tensor:
    """Return how many other rows have each row's direction, or its opposite."""
    if len(rows) > LARGEST:
        return _equal(rows) - 1
    unit = nn.functional.normalize(rows, dim=1)
    short = unit
    if rows.shape[1] > 2 * _PROJECTED:  # a short look first: it loses no pair that is alike
        draw = torch.randn(rows.shape[1], _PROJECTED, generator=torch.Generator().manual_seed(0))
        short = nn.functional.normalize(unit @ draw.to(unit), dim=1)
    count = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    for start in range(0, len(rows), 1024):
        near = (short[start : start + 1024] @ short.T).abs() > 2 * LEAST_COSINE - 1
        rows_i, rows_j = near.nonzero(as_tuple=True)
        if len(rows_i) > 64 * len(rows):  # too many to look at twice, and no doubt any more
            count[start : start + 1024] = near.sum(1) - 1
            continue
        exact = (unit[start + rows_i] * unit[rows_j]).sum(1).abs() > LEAST_COSINE
        count.index_add_(0, start + rows_i[exact], torch.ones_like(rows_i[exact]))
        count[start : start + 1024] -= 1  # itself
    return count


def _equal(rows: Tensor) -> Tensor:
    """Return how many rows are exactly equal to each row."""
    _, inverse, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return counts[inverse]


def _rows_of_zeros(weight: Tensor, bias: Tensor | None) -> Iterator[str]:
    """Find layers of which most rows are zero, so that the gradient is of the others' samples.

    A layer that is all zero (adapters begin so) tells nothing.
    """
    nothing = (weight == 0).all(1)
    if not nothing.any() or nothing.all():
        sparse = (weight == 0).float().mean(1) > 0.9
        if weight.shape[1] >= LEAST_INPUTS and not nothing.all() and sparse.sum() >= FEWEST:
            yield (
                f"{int(sparse.sum())} of {len(weight)} rows are zero but for a few entries: they "
                "copy single inputs."
            )
        return
    yield (
        f"{int(nothing.sum())} of {len(weight)} rows are zero: what flows back is of the others' "
        "samples alone."
    )


def _biases_out_of_reach(weight: Tensor, bias: Tensor | None) -> Iterator[str]:
    """Find units that are always on, always off, or decided by one sample in many."""
    if bias is None or weight.shape[1] < LEAST_INPUTS:
        return
    reach = weight.norm(dim=1)
    far = bias.abs() > FAR * reach + 1
    if far.any():
        yield (
            f"{int(far.sum())} of {len(bias)} biases are more than {FAR:.0f} times as large as "
            "their rows: these units say the same of nearly every sample."
        )


def _rows_out_of_scale(weight: Tensor, bias: Tensor | None) -> Iterator[str]:
    """Find a few huge rows, where one sample's gradient drowns all others'."""
    lengths = weight.norm(dim=1)
    usual = lengths[lengths > 0]
    if len(usual) < 2:
        return
    tall = lengths > TALL * usual.sort().values[(len(usual) - 1) // 2]
    if tall.any():
        yield (
            f"{int(tall.sum())} of {len(weight)} rows are more than {TALL:.0f} times as long as "
            "the median one: what they pass drowns everything else."
        )


def _mirrored_rows(weight: Tensor, bias: Tensor | None) -> Iterator[str]:
    """Find trap weights: the positive entries of a row are its negative ones, a little smaller.

    Hardly any sample activates such a row. Sums of random rows differ by as much as rows are long;
    these do not.
    """
    lengths = weight.norm(dim=1)
    sums = weight.sum(1)[lengths > 0] / lengths[lengths > 0]
    if weight.shape[1] < LEAST_INPUTS or len(sums) < FEWEST_SUMS:
        return
    if float(sums.std()) < EVEN and float(sums.abs().mean()) < weight.shape[1] ** 0.5 / 4:
        yield (
            f"The positive and negative entries of all {len(sums)} rows cancel alike: hardly any "
            "sample activates such a row, and then the gradient is that sample."
        )


_CHECKS: dict[str, Callable[[Tensor, Tensor | None], Iterator[str]]] = {
    "rows_alike": _rows_alike,
    "rows_of_zeros": _rows_of_zeros,
    "biases_out_of_reach": _biases_out_of_reach,
    "rows_out_of_scale": _rows_out_of_scale,
    "mirrored_rows": _mirrored_rows,
}


def _equal_rows(table: Tensor) -> Iterator[str]:
    rows = table[(table != 0).any(1)]
    if len(rows) < FEWEST or table.shape[1] < LEAST_INPUTS // 2:
        return
    equal = int((_equal(rows) >= FEWEST).sum())
    if equal:
        yield f"{equal} of {len(table)} embeddings are equal to others."


def _on_pixels(model: nn.Module) -> list[Finding]:
    """Find a first layer that reads all pixels at once."""
    config: Any = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    layers = (m for m in model.named_modules() if isinstance(m[1], nn.Linear | _CONVOLUTION))
    first_layer = next(layers, None)
    if (
        first_layer is None
        or not isinstance(first_layer[1], nn.Linear)
        or not isinstance(size, int | list)
    ):
        return []
    sides = [size, size] if isinstance(size, int) else size
    pixels = sides[0] * sides[-1] * (channels or 1)
    name, layer = first_layer
    if layer.in_features != pixels or not layer.weight.requires_grad:
        return []
    says = "The first layer reads all pixels: rows of its gradient, over the bias's, are images."
    return [Finding("reads_all_pixels", name, says)]


def _against(model: nn.Module, reference: nn.Module | Mapping[str, Tensor] | None) -> list[Finding]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if reference is None:
        shapes = _described(model)
        return [] if shapes is None else _structure(trained, shapes, "the configuration describes")
    state = reference.state_dict() if isinstance(reference, nn.Module) else reference
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    findings = _structure(trained, shapes, "the reference has")
    for name, parameter in trained.items():
        if name not in state or state[name].shape != parameter.shape:
            continue
        reference_norm = float(state[name].float().norm())
        received_norm = float(parameter.detach().float().norm())
        if reference_norm and received_norm > TALL * reference_norm:
            says = f"It is {received_norm / reference_norm:.0f} times as large as in the reference."
            findings.append(Finding("larger_than_reference", name, says))
    return findings


def _structure(
    trained: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str
) -> list[Finding]:
    findings = []
    for name, parameter in trained.items():
        if name not in shapes:
            says = f"No parameter of that name is in what {source}."
            findings.append(Finding("added", name, says))
        elif shapes[name] != tuple(parameter.shape):
            says = f"Its shape is {tuple(parameter.shape)}, where {source} {shapes[name]}."
            findings.append(Finding("reshaped", name, says))
    return findings


def _described(model: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return names and shapes of the architecture that a model's configuration describes.

    It is `None` if the model's class cannot say. No weights are made. For a model of a custom
    class, only what was put into an instance is seen. Adapters are there because somebody asked for
    them.
    """
    config = getattr(model, "config", None)
    if config is None or hasattr(model, "get_base_model"):
        return None
    try:
        with torch.device("meta"):
            rebuilt = type(model)(config)
    except Exception:  # classes are free to need more than that
        return None
    return {name: tuple(tensor.shape) for name, tensor in rebuilt.state_dict().items()}


SHARP = 100.0
"""Logits of one query that are so far apart leave no second token. A third of that would do; the
margin is for pretrained weights behind normalizations whose gains are small, which are not looked
at.
"""
QUERIES = ("query", "q_proj", "q_lin", "q", "wq", "query_proj", "q_attn")
KEYS = ("key", "k_proj", "k_lin", "k", "wk", "key_proj", "k_attn")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
FUSED = ("c_attn", "query_key_value", "qkv", "qkv_proj", "wqkv")


def sharp_attention(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Find attention whose logits lie too far apart for more than one token to count.

    The weights alone say how far apart the logits of one query are, for keys of inputs whose
    entries have variance 1, as layer normalization makes them, in the median head. Frozen layers
    count too: they decide what trained layers behind them read. If queries and keys are normalized
    (Qwen3, Gemma 3, OLMo 2), their weights' size says nothing, and attention is not examined.

    Yields:
        The attention's name, and a description of what it does.

    Example:
        >>> list(sharp_attention(model))
        []
        >>> with torch.no_grad():
        ...     for parameter in (block := model.bert.encoder.layer[0].attention.self).parameters():
        ...         _ = parameter.mul_(1e3)
        >>> [name for name, _ in sharp_attention(model)]
        ['bert.encoder.layer.0.attention.self']
    """
    if not any(p.requires_grad for p in model.parameters()):
        return
    for name, module in model.named_modules():
        query_and_key = _query_and_key(module)
        if query_and_key is None:
            continue
        width = _head_width(module, model, query_and_key[0][0])
        spread = float(_spreads(*query_and_key, width).median())
        if spread > SHARP:
            yield (
                name,
                f"Its logits are {spread:.0f} apart for one query: attention picks single tokens, "
                "and what is behind it reads them one by one.",
            )


_Layer = tuple[Tensor, Tensor | None]


def _query_and_key(module: nn.Module) -> tuple[_Layer, _Layer] | None:
    """Return queries' and keys' weights `(out, in)` with biases, which are equal if fused."""
    if any(name in NORMS for name, _ in module.named_children()):
        return None
    layers = {
        name.lower(): child
        for name, child in module.named_children()
        if isinstance(weight := getattr(child, "weight", None), Tensor) and weight.dim() == 2
    }
    query, key = _first_layer(layers, QUERIES), _first_layer(layers, KEYS)
    if query is None or key is None:
        query = key = _first_layer(layers, FUSED)
    if query is None or key is None:
        return None
    matrices = _matrix(query), _matrix(key)
    return matrices if matrices[0][0].shape[1] == matrices[1][0].shape[1] else None


def _first_layer(layers: Mapping[str, nn.Module], names: tuple[str, ...]) -> nn.Module | None:
    return next((layers[name] for name in names if name in layers), None)


def _matrix(layer: Any) -> _Layer:
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    bias_values = bias.detach().float() if isinstance(bias, Tensor) else None
    return (weight.T if isinstance(layer, Conv1D) else weight).float(), bias_values


def _head_width(module: nn.Module, model: nn.Module, weight: Tensor) -> int:
    """Return the number of entries of a head's queries; all of them if nothing says it."""
    config: Any = getattr(model, "config", None)
    for owner, names in (
        (module, ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")),
        (config, ("head_dim", "d_kv")),
    ):
        for name in names:
            width = getattr(owner, name, None)
            if isinstance(width, int) and width > 0 and len(weight) % width == 0:
                return width
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1 or weight.shape[1] % heads:
        return len(weight)
    width = weight.shape[1] // heads
    return width if len(weight) % width == 0 else len(weight)


def _spreads(query: _Layer, key: _Layer, width: int) -> Tensor:
    """Return ‖[W_q b_q]ᵀ W_k‖_F/√d of every head of queries with its own keys, `(heads,)`.

    Several heads may share keys; for a fused layer every head is taken with itself.
    """
    queries = _heads(query[0], width)
    keys = _heads(key[0], width)
    keys = keys.repeat_interleave(max(1, len(queries) // len(keys)), 0)[: len(queries)]
    queries = queries[: len(keys)]
    if query[1] is not None:
        bias = query[1].view(-1, width, 1)[: len(queries)]
        queries = torch.cat([queries, bias], 2)
    # ‖QᵀK‖² = ⟨QQᵀ, KKᵀ⟩: matrices of a head's width
    inner = (queries @ queries.mT * (keys @ keys.mT)).sum((1, 2))
    return inner.clamp(min=0).sqrt() / math.sqrt(width)


def _heads(weight: Tensor, width: int) -> Tensor:
    return weight.reshape(-1, width, weight.shape[1])
