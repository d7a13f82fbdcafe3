"""What the span attack and TAG recover of texts from gradients that nobody defended."""

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    set_seed,
)
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack, recover_labels
from hf_gradguard.attacks.layer_inputs import attended_positions
from hf_gradguard.metrics import score_text

from ..study import Study
from .lib.tables import summary, write_table
from .lib.text import (
    TEXT_FLAGS,
    batches_of_one,
    load_classifier,
    load_tokenizer,
    of_usual_length,
    sst2,
)
from .lib.training import learn
from .undefended_images import write_scores

LONG = (
    "She put the glass on the table and the plate on the shelf before her brother came home from "
    "the village."
)
SENTENCES = [  # written for these tables, of the kind that tests of grammar use
    "The old sailor told the children a story about the sea.",
    "Mary expected her brother to leave before the meeting ended.",
    "It is likely that the bridge will be closed in winter.",
    "The book that I bought yesterday has no pictures.",
    "Who did the teacher say would win the prize?",
    "John tried to open the door, but the key was too small.",
    "We wondered whether the train had already left the station.",
    "The more you read, the better you write.",
    "Nobody believed that the mayor had paid for the dinner.",
    "She put the glass on the table and the plate on the shelf.",
    "The dogs that chased the cat were tired.",
    "He sent his sister a letter from the village.",
    "There seems to be a problem with the engine of the car.",
    "Bill can play the piano better than his father can.",
    "The committee has not decided which of the plans it prefers.",
    "After the rain stopped, the farmers went back to the field.",
    "What surprised me was that the answer was so simple.",
    "The river froze solid in a single night.",
    "I do not know the man who lives next to the bakery.",
    "Every student must hand in the paper by Friday at noon.",
    "The window was broken by a ball that somebody had thrown.",
    "Anna and her cousin painted the house green.",
    "Not until midnight did the guests begin to leave.",
    "The news about the storm made everyone in the town nervous.",
    "His habit of singing in the kitchen annoys the neighbors.",
    "The horse raced across the field and jumped over the fence.",
    "If the weather is fine, we will have lunch in the garden.",
    "The doctor whom she trusts most works in another city.",
    "They gave the actor who forgot his lines a second chance.",
    "The cake was eaten before the party had even started.",
    "To find a good apartment in this town is hard.",
    "The lawyer asked the witness where he had been that evening.",
]

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


def build(family: str, task: str, tokenizer, **settings: Any) -> nn.Module:
    """A random model of the family at this width, with the tokenizer's special tokens, from the
    global generator, without dropout.
    """
    sizes = (DECODERS | ENCODERS)[family]
    common = {"vocab_size": len(tokenizer)}
    if not {"d_model", "dim"} & set(sizes):
        common |= {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS,
                   "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}  # fmt: skip
    special = {
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id, "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "decoder_start_token_id": tokenizer.cls_token_id, "num_labels": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **common | sizes | special | settings)
    return KINDS[task].from_config(config, trust_remote_code=False).eval()


class Sentences(Study):
    """Sentences on an encoder.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = TEXT_FLAGS
    ATTACKS = {"tag": {"steps": 1500}}
    SCORES = ("token_f1", "position_accuracy", "rougeL", "exact_match")

    def cells(self) -> dict:
        samples, fast = (2, {"steps": 1}) if self.quick else (20, {})
        return {
            (row,): {"attack": row, "settings": settings | fast, "samples": samples, "seed": 0}
            for row, settings in self.ATTACKS.items()
        }

    def load(self) -> None:
        set_seed(0)
        self.tokenizer = load_tokenizer(self.args.model)
        self.model = load_classifier(self.args.model, num_labels=2)
        self.batches = batches_of_one(self.tokenizer, of_usual_length(sst2(self.args.data_dir)))

    def measure(self, cell: dict) -> dict:
        batches, observations, right = self.batches[: cell["samples"]], [], []
        for batch in batches:
            shape, labels = tuple(batch["input_ids"].shape), batch["labels"]
            gradient = GradientMap(self.model, batch).gradient()
            blind = Observation(self.model, gradient, input_shape=shape)
            right.append(bool((recover_labels(blind) == labels).all()))
            observations.append(
                Observation(self.model, gradient, shape, labels=labels, tokenizer=self.tokenizer)
            )
        attack = make_attack(cell["attack"], **cell["settings"])
        token_ids = by_length(attack, observations, cell["seed"])
        truth = [batch["input_ids"].tolist() for batch in batches]
        scores = score_text(token_ids, truth, tokenizer=self.tokenizer)
        return {
            **summary(scores, self.SCORES),
            "labels right": sum(right) / len(right),
            "token_f1 of each": scores.per_sample["token_f1"],
        }

    def report(self, metrics: dict) -> None:
        write_scores(metrics, self.SCORES, self.output)


def by_length(attack, observations: list[Observation], seed: int) -> list[list[list[int]]]:
    """Token ids of each. Sentences of one length are attacked together."""
    lengths, token_ids = [observation.input_shape[1] for observation in observations], {}
    for length in logging.tqdm(sorted(set(lengths)), desc=attack.name):
        same_length = [
            number for number, other_length in enumerate(lengths) if other_length == length
        ]
        generator = torch.Generator().manual_seed(seed)
        results = attack.reconstruct_many(
            [observations[number] for number in same_length], generator
        )
        token_ids |= {n: result.token_ids for n, result in zip(same_length, results, strict=True)}
    return [token_ids[number] for number in range(len(observations))]


class SpanStudy(Study):
    """The span attack on random models of the tokenizer's vocabulary."""

    ARGUMENTS: dict[str, Any] = {"--tokenizer": "of which the vocabulary is"}

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.tokenizer)


class Families(SpanStudy):
    """The span attack on one text or several, over the architectures that people fine-tune.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = SpanStudy.ARGUMENTS | Study.ALL
    TASKS = dict.fromkeys(DECODERS, (LM, CLASSIFIER)) | {"bert": (CLASSIFIER, MASKED)}

    def cells(self) -> dict:
        groups: list = [
            (n, batches, DECODERS | ENCODERS) for n, batches in ((1, 20), (4, 5), (8, 1))
        ]
        if self.quick:
            groups = [(1, 1, ["llama"]), (4, 1, ["bert"])]
        cells = {
            (row_of(family, task, special), str(texts)): {
                "family": family, "task": task, "special": special, "texts": texts,
                "batches": batches,
            }
            for texts, batches, families in groups
            for family in families
            for task in self.TASKS.get(family, (CLASSIFIER,))
            for special in ((True, False) if family in DECODERS else (True,))
        }  # fmt: skip
        return self.published(cells)

    def measure(self, cell: dict) -> dict:
        set_seed(0)
        model = build(cell["family"], cell["task"], self.tokenizer)
        exact, right, tokens, seconds = 0, 0, 0, []
        for number in range(cell["batches"]):
            observation, truth = observe(model, self.tokenizer, number, **cell)
            start = time.process_time()
            try:
                token_ids = make_attack("span")(observation).token_ids
            except ValueError:
                return {"exact": None}
            seconds.append(time.process_time() - start)
            rows = aligned(token_ids, truth)
            exact += sum(row == text for row, text in rows)
            right += sum(a == b for row, text in rows for a, b in zip(row, text, strict=True))
            tokens += sum(map(len, truth))
        count = cell["texts"] * cell["batches"]
        mean = sum(seconds) / len(seconds)
        return {"exact": exact, "of": count, "tokens right": right / tokens, "seconds": mean}

    def report(self, metrics: dict) -> None:
        columns = {"1": "1 text", "4": "4 texts", "8": "8 texts"}
        rows = [
            [name, *(self.cell_text(sizes[n]) if n in sizes else "–" for n in columns)]
            for name, sizes in metrics.items()
        ]
        write_table(self.output, ["exact · tokens · seconds a batch", *columns.values()], rows)

    def cell_text(self, cell: dict) -> str:
        if cell["exact"] is None:
            return "refused"
        share = f"{cell['exact']} of {cell['of']} · {cell['tokens right']:.0%}"
        return f"{share} · {cell['seconds']:.1f} s"


def row_of(family: str, task: str, special: bool) -> str:
    return f"{family}, {task}" + ("" if special else ", no special tokens")


def observe(
    model, tokenizer, number: int, task: str, special: bool, texts: int, **_
) -> tuple[Observation, list[list[int]]]:
    """What the server sees of a batch, and the tokens that its loss depends on."""
    sentences = [SENTENCES[(number * texts + i) % len(SENTENCES)] for i in range(texts)]
    ids = tokenizer(sentences, add_special_tokens=special)["input_ids"]
    batch = dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt"))
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if task in (LM, MASKED):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        labels = torch.arange(texts) % 2
    gradient = GradientMap(model, batch | {"labels": labels}, second_order=False).gradient()
    observation = Observation(
        model, gradient, tuple(batch["input_ids"].shape), attention_mask=batch["attention_mask"],
        tokenizer=tokenizer if special else None,
    )  # fmt: skip
    attended = attended_positions(observation).sum(1).tolist()
    return observation, [row[:count] for row, count in zip(ids, attended, strict=True)]


def aligned(
    token_ids: list[list[int]], truth: list[list[int]]
) -> list[tuple[list[int], list[int]]]:
    """Each true text with the recovered one that is nearest to it, of those that remain: a gradient
    does not say in which order the texts were.
    """
    pairs, remaining = [], [list(row) for row in token_ids]
    for text in sorted(truth, key=len, reverse=True):
        scores = [sum(a == b for a, b in zip(row, text, strict=False)) for row in remaining]
        row = remaining.pop(scores.index(max(scores)))[: len(text)]
        pairs.append((row + [-1] * (len(text) - len(row)), text))
    return pairs


def span_tokens(observation: Observation, ids: torch.Tensor) -> dict:
    """How many tokens of one text are right, of those that the loss depends on."""
    attended = int(attended_positions(observation).sum())
    start = time.process_time()
    token_ids = make_attack("span")(observation).token_ids[0][:attended]
    seconds = time.process_time() - start
    right = sum(a == b for a, b in zip(token_ids, ids[0, :attended].tolist(), strict=True))
    return {"right": right, "of": attended, "seconds": seconds}


def tokens_text(cell: dict) -> str:
    if cell["right"] is None:
        return "refused"
    return f"{cell['right']} of {cell['of']} · {cell['seconds']:.0f} s"


class Lengths(SpanStudy):
    """The span attack on one long text, on wider models, and on weights of half precision.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = SpanStudy.ARGUMENTS | Study.ALL
    MODELS = (("llama", LM), ("gpt2", LM), ("bert", CLASSIFIER))
    WIDTHS_AND_TYPES = ((WIDTH, "float32"), (2 * WIDTH, "float32"), (WIDTH, "bfloat16"))

    def cells(self) -> dict:
        cells = {
            (f"{family}, {task}", str(tokens), f"width {width}, {dtype}"): {
                "family": family, "task": task, "tokens": tokens, "width": width, "dtype": dtype,
                "seed": 0,
            }
            for tokens in ((8,) if self.quick else (64, 128, 256))
            for width, dtype in self.WIDTHS_AND_TYPES
            for family, task in (self.MODELS[:1] if self.quick else self.MODELS)
        }  # fmt: skip
        return self.published(cells)

    def measure(self, cell: dict) -> dict:
        set_seed(cell["seed"])
        wider = {"hidden_size": cell["width"], "intermediate_size": 4 * cell["width"]}
        if cell["family"] == "llama":
            wider["head_dim"] = cell["width"] // HEADS
        model = build(cell["family"], cell["task"], self.tokenizer, **wider)
        model = model.to(getattr(torch, cell["dtype"]))
        cut = {"truncation": True, "max_length": cell["tokens"], "return_tensors": "pt"}
        batch = self.tokenizer(" ".join(SENTENCES), **cut)
        ids = batch["input_ids"]
        labels = ids if cell["task"] == LM else torch.zeros(1, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}
        gradient = GradientMap(model, batch, second_order=False).gradient()
        observation = Observation(model, gradient, tuple(ids.shape), tokenizer=self.tokenizer)
        return span_tokens(observation, ids)

    def report(self, metrics: dict) -> None:
        columns = [f"width {width}, {dtype}" for width, dtype in self.WIDTHS_AND_TYPES]
        rows = [
            [model, tokens, *(tokens_text(cells[c]) if c in cells else "–" for c in columns)]
            for model, lengths in metrics.items()
            for tokens, cells in lengths.items()
        ]
        write_table(self.output, ["right tokens · seconds", "tokens", *columns], rows)


class Lora(SpanStudy):
    """The span attack on messages of LoRA adapters, in the first step and after ten.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ADAPTED = {  # fused layers as they are
        ("bert", CLASSIFIER): ["query", "value"],
        ("llama", LM): ["q_proj", "v_proj"],
        ("gpt2", LM): ["c_attn"],
    }

    def cells(self) -> dict:
        return {
            (f"{family}, {task}", f"rank {rank}, after {steps} steps"): {
                "family": family, "task": task, "rank": rank, "steps": steps, "seed": 0,
            }
            for family, task in list(self.ADAPTED)[: 1 if self.quick else None]
            for rank in ((8,) if self.quick else (8, 16))
            for steps in (0, 10)
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        set_seed(cell["seed"])
        family, task = cell["family"], cell["task"]
        adapters = LoraConfig(
            r=cell["rank"], lora_alpha=2 * cell["rank"], target_modules=self.ADAPTED[family, task],
            task_type={CLASSIFIER: "SEQ_CLS", LM: "CAUSAL_LM"}[task],
            fan_in_fan_out=family == "gpt2",
        )  # fmt: skip
        model = get_peft_model(build(family, task, self.tokenizer), adapters).eval()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(cell["steps"]):
            learn(model, optimizer, self.batch(SENTENCES[step % 2], task))
        batch = self.batch(LONG, task)
        gradient = GradientMap(model, batch, second_order=False).gradient()
        observation = Observation(
            model, gradient, tuple(batch["input_ids"].shape), tokenizer=self.tokenizer,
            attention_mask=batch["attention_mask"],
        )  # fmt: skip
        try:
            return span_tokens(observation, batch["input_ids"])
        except ValueError:
            return {"right": None, "of": int(attended_positions(observation).sum())}

    def batch(self, text: str, task: str) -> dict[str, torch.Tensor]:
        batch = dict(self.tokenizer([text], return_tensors="pt"))
        batch.pop("token_type_ids", None)
        return batch | {"labels": batch["input_ids"] if task == LM else torch.tensor([1])}

    def report(self, metrics: dict) -> None:
        columns = list(next(iter(metrics.values())))
        rows = [
            [name, *(tokens_text(cells[c]) for c in columns)] for name, cells in metrics.items()
        ]
        write_table(self.output, ["tokens", *columns], rows)
