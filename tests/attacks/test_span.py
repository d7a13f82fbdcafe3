"""The span attack against models whose batch is known: exact where the algebra says exact, refusals
elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import SPECIAL_TOKENS, make_task, randomize, torch_rng, word_tokenizer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.layer_inputs import find_projections, layer_inputs
from hf_gradguard.attacks.span.row_space import distances, row_space, select
from hf_gradguard.attacks.span.span import Span, complete

VOCABULARY = 128
TOKENIZER = word_tokenizer([f"w{i}" for i in range(VOCABULARY - len(SPECIAL_TOKENS))])
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 2}
ENCODER: dict[str, Any] = COMMON | {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 16,
}  # fmt: skip
GPT2: dict[str, Any] = COMMON | {
    "n_positions": 16, "n_embd": 40, "n_layer": 2, "n_head": 2,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip

MODELS = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**ENCODER)),
    "roberta": lambda: RobertaForSequenceClassification(
        RobertaConfig(**ENCODER | {"max_position_embeddings": 20}, bos_token_id=2, eos_token_id=3)
    ),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(
            **COMMON, dim=40, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=16
        )
    ),
    "gpt2": lambda: GPT2ForSequenceClassification(GPT2Config(**GPT2)),
    "gpt2_lm": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama": lambda: LlamaForSequenceClassification(
        LlamaConfig(
            **COMMON, hidden_size=40, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=64, max_position_embeddings=16,
        )
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return randomize(MODELS[name]()).to(dtype).eval()


def sentences(batch_size: int, lengths: tuple[int, ...] = (7, 9, 6, 8)) -> list[list[int]]:
    """Random sentences of distinct words, with their special tokens."""
    generator = torch_rng()
    return [
        [
            2,
            *(torch.randperm(VOCABULARY - 4, generator=generator)[: lengths[i] - 2] + 4).tolist(),
            3,
        ]
        for i in range(batch_size)
    ]


def collate(texts: list[list[int]]) -> dict[str, Tensor]:
    batch = TOKENIZER.pad({"input_ids": texts}, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _plain(model: nn.Module) -> nn.Module:
    """Without adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def observe(
    model: nn.Module, texts: list[list[int]], noise: float = 0.0, **grants: Any
) -> Observation:
    """What a server sees of these sentences; `noise` is relative to each tensor's own RMS."""
    batch = collate(texts)
    if isinstance(_plain(model), GPT2LMHeadModel):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        labels = torch.arange(len(texts)) % 2
    gradient = GradientMap(model, batch | {"labels": labels}, second_order=False).gradient()
    generator = torch_rng(7)
    gradient = {
        name: g
        + noise
        * g.square().mean().sqrt()
        * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in gradient.items()
    }
    grants = {"attention_mask": batch["attention_mask"], "tokenizer": TOKENIZER} | grants
    return Observation(
        model=model, gradient=gradient, input_shape=tuple(batch["input_ids"].shape), **grants
    )


def without_last(name: str, texts: list[list[int]]) -> list[list[int]]:
    """A causal language model's loss does not depend on a text's last token."""
    return [[*text[:-1], -1] for text in texts] if name == "gpt2_lm" else texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_one_sentence_is_recovered_whole(name: str, dtype: torch.dtype) -> None:
    texts = sentences(1)
    found = Span()(observe(build(name, dtype), texts))
    assert found.token_ids == without_last(name, texts)
    assert found.text == [TOKENIZER.decode(texts[0], skip_special_tokens=True)]
    assert found.objective < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gpt2_lm", "llama"])
def test_decoders_give_a_batch_of_sentences(name: str) -> None:
    texts = sentences(3)
    found = Span()(observe(build(name), texts))
    assert sorted(found.token_ids) == sorted(without_last(name, texts))
    assert [len(ids) for ids in found.token_ids] == [
        len(text) for text in texts
    ]  # the mask gave the lengths by row


def by_position(texts: list[list[int]]) -> list[list[int]]:
    """The tokens at every position, in no order."""
    return [
        sorted(text[place] for text in texts if len(text) > place)
        for place in range(max(map(len, texts)))
    ]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_encoders_give_every_token_with_its_position(name: str) -> None:
    texts = sentences(3)
    found = Span()(observe(build(name), texts))
    assert found.token_ids is not None
    assert by_position(found.token_ids) == by_position(texts)


def test_an_encoders_two_sentences_are_told_apart() -> None:
    texts = sentences(2, (8, 8))
    found = Span()(observe(build("bert"), texts))
    assert sorted(found.token_ids) == sorted(texts)


OTHERS = {
    "electra": lambda: ElectraForSequenceClassification(
        ElectraConfig(**ENCODER, embedding_size=24)
    ),
    "gpt_neox": lambda: GPTNeoXForSequenceClassification(
        GPTNeoXConfig(**ENCODER)
    ),  # one fused projection
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    torch.manual_seed(0)
    texts = sentences(2, (7, 7))
    found = Span()(observe(randomize(OTHERS[name]()).double().eval(), texts))
    assert sorted(found.token_ids) == sorted(texts)


def test_blocks_that_share_weights_are_read_over_all_their_calls() -> None:
    """The shared blocks' gradient spans what every call read, and the pooler's what it read of each
    text: both tell which sentence a token is of.
    """
    torch.manual_seed(0)
    model = AlbertForSequenceClassification(AlbertConfig(**ENCODER, embedding_size=24))
    texts = sentences(2, (7, 7))
    seen = observe(randomize(model).double().eval(), texts)
    groups = find_projections(seen)
    shared = [(group.call, group.calls) for group in groups if group.calls > 1]
    assert set(shared) == {(0, 2), (1, 2)}
    found = Span()(seen)
    assert sorted(found.token_ids) == sorted(texts)
    assert found.undecided == ""


def test_what_nothing_decides_is_said() -> None:
    """Of the first block's projections alone nobody can tell whose a token is: each position's go
    to the sentences by their ids.
    """
    texts = sentences(2, (7, 7))
    seen = observe(build("bert"), texts)
    first = {n: g for n, g in seen.gradient.items() if "layer.0.attention.self" in n}
    found = Span()(replace(seen, gradient=first))
    assert found.token_ids == [list(ids) for ids in zip(*by_position(texts), strict=True)]
    assert "of which sentence" in found.undecided


def test_an_encoder_with_relative_positions_gives_the_order() -> None:
    """What the attention reads of a token does not tell its place; what it makes of it does."""
    torch.manual_seed(0)
    model = ModernBertForSequenceClassification(
        ModernBertConfig(**ENCODER, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
    )
    texts = sentences(1, (8,))
    seen = observe(randomize(model).double().eval(), texts)
    assert not find_projections(seen)[0].positional
    assert Span()(seen).token_ids == texts


def test_the_bag_of_tokens_where_nothing_tells_their_order() -> None:
    torch.manual_seed(0)
    model = ModernBertForSequenceClassification(
        ModernBertConfig(**ENCODER, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
    )
    texts = sentences(1, (8,))
    seen = observe(randomize(model).double().eval(), texts)
    first = {n: g for n, g in seen.gradient.items() if "layers.0.attn.Wqkv" in n}
    found = Span()(replace(seen, gradient=first))
    assert sorted(found.token_ids[0]) == sorted(texts[0])
    assert "order" in found.undecided


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_classifiers_of_encoder_decoders(name: str) -> None:
    torch.manual_seed(0)
    ends: dict[str, Any] = {
        "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3, "d_model": 40,
    }  # fmt: skip
    if name == "bart":
        model: nn.Module = BartForSequenceClassification(
            BartConfig(
                **COMMON, **ends, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
                max_position_embeddings=16,
            )
        )  # fmt: skip
    else:
        model = T5ForSequenceClassification(
            T5Config(**COMMON, **ends, d_kv=20, d_ff=64, num_layers=2, num_heads=2)
        )
    texts = sentences(1)
    seen = observe(randomize(model).double().eval(), texts)
    assert Span()(seen).token_ids == texts


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_decoders_first_token_is_not_taken_for_the_whole_text(family: str, special: bool) -> None:
    """Behind causal attention without absolute positions one token, repeated, lies in the span as
    well as the truth does, and explains one direction of it. A text that does repeat its first
    token is found all the same.
    """
    torch.manual_seed(0)
    if family == "llama":
        model: nn.Module = MODELS["llama"]()
    else:
        model = BloomForSequenceClassification(
            BloomConfig(**COMMON, hidden_size=40, n_layer=2, n_head=2)
        )
    model = randomize(model).float().eval()
    frame = TOKENIZER if special else None
    again = [40, 40, 41, 42, 40, 43, 41]
    for texts in ([again], [again, [40, 44, 45, 41]]):
        texts = [[2, *text, 3] for text in texts] if special else texts
        found = Span()(observe(model, texts, tokenizer=frame)).token_ids
        assert sorted(found) == sorted(texts)


@pytest.mark.long
def test_an_encoders_four_sentences() -> None:
    """Words that two sentences have at one place, and words that one has at two places."""
    texts = sentences(4, (9, 9, 7, 8))
    texts[1][2], texts[3][4], texts[0][7] = texts[0][2], texts[2][4], texts[0][3]
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**ENCODER | {"hidden_size": 192}))
    found = Span()(observe(model.float().eval(), texts)).token_ids
    assert sorted(found) == sorted(texts)


def test_sentences_that_start_alike_and_a_word_twice() -> None:
    texts = [[2, 10, 11, 12, 13, 3], [2, 10, 11, 20, 10, 3]]
    assert sorted(Span()(observe(build("gpt2"), texts)).token_ids) == texts
    assert sorted(Span()(observe(build("llama"), texts)).token_ids) == texts


@pytest.mark.long
def test_lora_matrices_give_the_tokens() -> None:
    """A-matrices see the same inputs: 2 x 12 rows hold 9 tokens. Nothing else is trained but the
    head.
    """
    settings = LoraConfig(task_type="SEQ_CLS", r=12, target_modules=["query", "value"])
    for name, texts in (("bert", sentences(1, (9,))), ("bert", sentences(2))):
        model = randomize(get_peft_model(build(name, torch.float32), settings)).double().eval()
        seen = observe(model, texts)
        assert {n.split(".")[-3] for n in seen.gradient if "lora" in n} == {"lora_A", "lora_B"}
        found = Span()(seen).token_ids
        tokens = [{ids[t] for ids in found if len(ids) > t} for t in range(max(map(len, texts)))]
        assert tokens == [{text[t] for text in texts if len(text) > t} for t in range(len(tokens))]


def test_lora_decoder() -> None:
    settings = LoraConfig(task_type="SEQ_CLS", r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    model = randomize(get_peft_model(build("gpt2", torch.float32), settings)).double().eval()
    texts = sentences(1)
    assert Span()(observe(model, texts)).token_ids == texts


@pytest.mark.parametrize("rank", [5, 6])
def test_lora_of_lower_rank_than_the_text_is_long(rank: int) -> None:
    """What its rows and the tokens before span together holds the next one: 8 tokens are heard."""
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=rank, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = randomize(get_peft_model(build("gpt2_lm", torch.float32), settings)).double().eval()
    texts = sentences(1, (9,))
    (found,) = Span()(observe(model, texts)).token_ids
    assert found[:-1] == texts[0][:-1]


def test_lora_in_its_first_step_is_refused_by_its_rank() -> None:
    """B is zero, A has no gradient, and B's tells what A made of the tokens."""
    settings = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model = get_peft_model(build("bert", torch.float32), settings).double().eval()
    with pytest.raises(ValueError, match="of LoRA of rank 4 at most 3 while B is zero"):
        Span()(observe(model, sentences(1)))


def test_without_a_tokenizer_special_tokens_are_found_like_any_other() -> None:
    texts = sentences(1)
    found = Span()(observe(build("bert"), texts, tokenizer=None))
    assert found.token_ids == texts
    assert found.text is None


@pytest.mark.long
def test_without_the_mask_the_longest_sentence_is_found() -> None:
    texts = sentences(2, (9, 6))
    found = Span()(observe(build("bert"), texts, attention_mask=None))
    assert {len(ids) for ids in found.token_ids} == {9}
    for place in range(9):
        assert {text[place] for text in texts if len(text) > place} - {3} <= {
            ids[place] for ids in found.token_ids
        }


def test_vocabulary_rows_of_zeros_are_no_candidates() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[
            50:
        ].zero_()  # RMSNorm(0) = 0: a vector without a direction
    texts = [[2, 10, 11, 12, 13, 3]]
    assert Span()(observe(model, texts)).token_ids == texts


def test_ranking_survives_noise_at_which_a_threshold_finds_nothing() -> None:
    texts = sentences(1, (7,))
    seen = observe(build("bert"), texts, noise=0.02)
    assert Span()(seen).token_ids == texts
    by_threshold = Span(threshold=1e-3)(seen)
    assert by_threshold.token_ids == [[2, -1, -1, -1, -1, -1, 3]]  # the frame is known beforehand
    assert Span(threshold=1e-3)(observe(build("bert"), texts)).token_ids == texts


def test_a_decoders_text_ends_where_a_threshold_finds_nothing() -> None:
    found = Span(threshold=1e-3)(observe(build("gpt2"), sentences(1, (7,)), noise=0.02))
    assert found.token_ids == [[2, -1, -1, -1, -1, -1, -1]]


def test_known_noise_is_weighed() -> None:
    """Noise on one half of the columns only: rows and columns are scaled to equal noise, and the
    clean half decides.
    """
    generator = torch_rng(3)
    x, delta = (
        torch.randn(4, 20, generator=generator).double(),
        torch.randn(30, 4, generator=generator).double(),
    )
    variance = torch.full((30, 20), 1e-8, dtype=torch.float64)
    variance[:, 10:] = 1.0
    noisy = delta @ x + variance.sqrt() * torch.randn(30, 20, generator=generator).double()
    aware, plain = (
        row_space([noisy], [variance], 4),
        row_space([noisy], [torch.ones_like(variance)], 4),
    )
    far = {
        key: distances(x * space.columns, *space.directions()).max()
        for key, space in (("aware", aware), ("plain", plain))
    }
    assert far["aware"] < 1e-6 < 1e-2 < far["plain"]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_an_attacker_who_knows_the_noise(name: str) -> None:
    """Half of each matrix's columns are drowned; told which, by variances in the weights' own
    layout, it reads the rest.
    """
    texts, model = sentences(1, (6,)), build(name)
    clean = observe(model, texts)
    generator, gradient, variance = torch_rng(8), {}, {}
    for key, g in clean.gradient.items():
        deviation = torch.full_like(g, 1e-7 * float(g.square().mean().sqrt()))
        if g.dim() == 2 and "c_attn" in key:
            deviation[::2] = 3 * g.square().mean().sqrt()  # Conv1D: (in, out)
        elif g.dim() == 2 and any(part in key for part in ("query", "key", "value")):
            deviation[:, ::2] = 3 * g.square().mean().sqrt()
        variance[key] = deviation.square()
        gradient[key] = g + deviation * torch.randn(g.shape, generator=generator, dtype=g.dtype)
    seen = {"gradient": gradient, "input_shape": clean.input_shape, "tokenizer": TOKENIZER}
    assert Span()(Observation(model=model, **seen)).token_ids != texts
    assert Span()(Observation(model=model, noise_variance=variance, **seen)).token_ids == texts


def test_trust_is_the_cosine_between_noisy_and_true_directions() -> None:
    """One direction of strength 3 in unit noise of 400 x 100, over 40 draws: mean squared cosine
    within 0.02 of the formula.
    """
    generator = torch_rng(2)
    strength, cosines, trusts = 3.0 * 400**0.5, [], []
    for _ in range(40):
        left, right = (
            torch.nn.functional.normalize(torch.randn(n, generator=generator).double(), dim=0)
            for n in (400, 100)
        )
        noisy = (
            strength * left[:, None] * right + torch.randn(400, 100, generator=generator).double()
        )
        space = row_space([noisy], [torch.ones_like(noisy)], 1)
        directions, trust = space.directions()
        cosines.append(float((directions[0] @ right) ** 2))
        trusts.append(float(trust[0]))
    mean = sum(cosines) / 40
    assert mean == pytest.approx((81 - 0.25) / (81 + 0.25 * 9), abs=0.02)
    assert sum(trusts) / 40 == pytest.approx(mean, abs=0.02)


def test_selection_projects_out_what_it_found() -> None:
    """Candidates that share a large common part with the matrix are near its span, and are not
    chosen all the same.
    """
    generator = torch_rng(4)
    common = 30 * torch.randn(24, generator=generator).double()
    candidates = common + torch.randn(6, 12, 24, generator=generator).double()
    true = candidates[torch.arange(6), torch.arange(6)]
    weak = torch.tensor([1.0, 1, 1, 1e-2, 1e-3, 1e-4]).double()  # strengths over four decades
    noisy = torch.randn(80, 6, generator=generator).double() * weak @ true
    noisy = noisy + 1e-6 * torch.randn(80, 24, generator=generator).double()
    chosen = select(
        row_space([noisy], None, 6),
        candidates.new_zeros(0, 24),
        candidates,
        torch.ones(6, dtype=torch.long),
    )
    assert chosen == [[i] for i in range(6)]


def test_completion_fills_what_a_pruning_left_out() -> None:
    generator = torch_rng(6)
    whole = (
        torch.randn(60, 2, generator=generator).double()
        @ torch.randn(2, 40, generator=generator).double()
    )
    pruned = torch.where(whole.abs() < whole.abs().quantile(0.3), 0.0, whole)
    filled = complete(pruned, 2, iterations=200)
    assert torch.equal(filled[pruned != 0], whole[pruned != 0])
    assert (filled - whole).norm() < 0.05 * (pruned - whole).norm()
    assert torch.equal(complete(whole, 2), whole)


@pytest.mark.parametrize("name", MODELS)
def test_readers_are_the_first_blocks_projections(name: str) -> None:
    seen = observe(build(name), sentences(1))
    first = next(group for group in find_projections(seen) if group.mixing == "none")
    ends = {
        "gpt2": ["c_attn"],
        "llama": ["q_proj", "k_proj", "v_proj"],
        "distilbert": ["q_lin", "k_lin", "v_lin"],
    }
    expected = ends.get(name.removesuffix("_lm"), ["query", "key", "value"])
    assert [n.split(".")[-2] for n in first.names] == expected
    assert all(".0." in n for n in first.names)
    assert first.positional == (name != "llama")
    mixing = {group.mixing for group in find_projections(seen)} - {"none"}
    assert mixing == ({"causal"} if name in ("gpt2", "gpt2_lm", "llama") else {"full"})


def test_layer_inputs_are_those_of_a_whole_pass() -> None:
    model = build("bert")
    seen = observe(model, sentences(1))
    ids = torch.tensor(sentences(1))
    with torch.no_grad():
        expected = model.bert.embeddings(ids)
    first = next(group for group in find_projections(seen) if group.mixing == "none")
    assert torch.equal(layer_inputs(seen, first, ids), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_model_is_left_as_it_was() -> None:
    model = build("gpt2").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Span()(observe(model.eval(), sentences(1)))
    model.train()
    seen = observe(model, sentences(1))
    Span()(seen)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_refusals() -> None:
    seen = observe(build("bert"), sentences(1))
    shared = dict(seen.gradient)
    without = {
        n: g for n, g in shared.items() if not any(k in n for k in ("query", "key", "value"))
    }
    zero = {n: g * (n in without) for n, g in shared.items()}
    for gradient in (without, zero):
        with pytest.raises(ValueError, match=r"before attention mixes them.*tag"):
            Span()(Observation(model=seen.model, gradient=gradient, input_shape=seen.input_shape))
    with pytest.raises(ValueError, match="span all 40 dimensions"):
        Span()(observe(build("bert"), sentences(4, (12, 12, 12, 12))))
    model, batch = make_task("vit")
    pixels = Observation(
        model=model,
        gradient=GradientMap(model, batch).gradient(),
        input_shape=batch["pixel_values"].shape,
    )
    with pytest.raises(ValueError, match="pixels"):
        Span()(pixels)
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="pad on the right"):
        Span()(observe(build("gpt2"), sentences(1), attention_mask=left))
    with pytest.raises(ValueError, match="threshold"):
        Span(threshold=0.0)
    with pytest.raises(ValueError, match="beams"):
        Span(beams=0)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_rows_without_special_tokens_are_read_where_that_is_known(family: str) -> None:
    """Packed rows, or rows cut to length: how batches are made is public."""
    torch.manual_seed(0)
    model = randomize(MODELS[family]()).float().eval()
    text = [40, 41, 42, 43, 44, 45]
    seen = observe(model, [text], tokenizer=TOKENIZER)
    assert seen.known_ids()[0, 0] == 2
    bare = replace(seen, special_tokens=False)
    assert bare.known_ids().tolist() == [[-1] * 6]
    assert Span()(bare).token_ids == [text]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_text_that_is_there_twice_is_found_twice(family: str, dtype: torch.dtype) -> None:
    """It spans what it spans once. What rounding leaves is no third text, and nothing tells that no
    other text was there: that is said.
    """
    torch.manual_seed(0)
    model = MODELS[family]().to(dtype).eval()
    one, other = sentences(2, (6, 7))
    for texts in ([one, one], [one, other, one], [one, one, one]):
        found = Span()(observe(model, texts))
        assert found.token_ids == texts
        assert "several times" in found.undecided
    assert Span()(observe(model, [one, other])).undecided == ""


def test_selection_ends_where_rounding_begins() -> None:
    """Of two rows that are the same, one is chosen; under noise both places in it are filled."""
    generator = torch_rng(4)
    candidates = torch.randn(2, 12, 24, generator=generator).double()
    true = candidates[[0, 0, 1], [3, 3, 5]]
    matrix = torch.randn(80, 3, generator=generator).double() @ true
    given, capacity = candidates.new_zeros(0, 24), torch.tensor([2, 2])
    for noise, counts in ((0.0, [1, 1]), (1e-3, [2, 2])):
        noisy = matrix + noise * torch.randn(80, 24, generator=generator).double()
        chosen = select(row_space([noisy.float()], None, 4), given, candidates, capacity)
        assert [len(own) for own in chosen] == counts
        assert [own[0] for own in chosen] == [3, 5]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_without_time_the_nearest_texts_so_far_are_returned(name: str) -> None:
    observation = observe(build(name), sentences(2))
    found = Span(seconds=0.0)(observation)
    assert found.token_ids is not None
    assert "Time was up" in found.undecided
    assert "Time was up" not in Span(seconds=600.0)(observation).undecided
    with pytest.raises(ValueError, match="seconds"):
        Span(seconds=-1.0)(observation)
