"""`GradGuardTrainer` on one process. What needs two ranks is in `distributed/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import (
    CHECKPOINTING,
    PAD,
    VOCABULARY,
    SmallNetwork,
    make_task,
    pad,
    ragged_rows,
    randomize,
    token_batch,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_gradguard import (
    DEFENSES,
    GradGuardConfig,
    GradGuardTrainer,
    GradientMap,
    chain,
    make_defense,
)
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.randomness import Stream
from hf_gradguard.training.exchange.gradients import buckets

Row = dict[str, Any]


def rows(task: str = "bert", count: int = 22) -> list[Row]:
    """Samples of a task of `helpers`, all of one length. 22 of them are five batches of 4 and one
    of 2.
    """
    batch = make_task(task, dtype=torch.float32, batch_size=count)[1]
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def stack(samples: list[Row]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Training arguments of a short run; more of them, or others, by keyword."""

    def make(**more: Any) -> dict[str, Any]:
        return {
            "output_dir": str(tmp_path / "out"), "max_steps": 3, "per_device_train_batch_size": 4,
            "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none",
            "disable_tqdm": True, "save_strategy": "no", **more,
        }  # fmt: skip

    return make


@pytest.fixture
def make_trainer(settings: Callable[..., dict[str, Any]]) -> Callable[..., GradGuardTrainer]:
    """A trainer of a small float32 model, with training arguments by keyword."""

    def make(
        task: str | nn.Module = "bert", defense: Any = None, data: Any = None, dropout: float = 0.0,
        options: dict[str, Any] | None = None, **more: Any,
    ) -> GradGuardTrainer:  # fmt: skip
        model = (
            make_task(task, dtype=torch.float32, dropout=dropout)[0]
            if isinstance(task, str)
            else task
        )
        data = data if data is not None else rows(task if isinstance(task, str) else "bert")
        args = GradGuardConfig(**settings(**more))
        return GradGuardTrainer(model, args, defense=defense, train_dataset=data, **(options or {}))

    return make


MakeTrainer = Callable[..., GradGuardTrainer]
Settings = Callable[..., dict[str, Any]]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Gradients(TrainerCallback):
    """Keeps `.grad` as the optimizer finds it. Run with `max_grad_norm=0`, or it is clipped."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor | None]] = []

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )


@dataclass
class WatchedNoise(GaussianNoise):
    """Gaussian noise that keeps what it was given and what it shared."""

    log: ClassVar[list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = []

    def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
        shared = super().protect(gmap, generator)
        self.log.append((gmap.gradient(), shared))
        return shared


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    WatchedNoise.log.clear()


# Construction


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """A folder with a model and a tokenizer."""
    folder = tmp_path / "model"
    make_task("bert", dtype=torch.float32)[0].save_pretrained(folder)
    words = {"[PAD]": PAD, "[UNK]": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


def test_arguments_first_load_model_and_tokenizer(saved_model: Path, settings: Settings) -> None:
    args = GradGuardConfig(**settings(model_name_or_path=str(saved_model)))
    data = [
        {"input_ids": list(range(2, 4 + index % 4)), "labels": index % 3} for index in range(12)
    ]
    trainer = GradGuardTrainer(args, defense="gaussian_noise", train_dataset=data)

    assert type(trainer.model).__name__ == "BertForSequenceClassification"
    reference = make_task("bert", dtype=torch.float32)[0]
    assert all(
        torch.equal(p, reference.get_parameter(name))
        for name, p in trainer.model.named_parameters()
    )
    assert trainer.processing_class("w3 w5")["input_ids"] == [3, 5]
    # lists of different lengths: padded by the tokenizer's collator, which returns no plain dict
    trainer.train()
    assert trainer.state.global_step == 3


def test_folder_without_a_tokenizer_loads_the_model_alone(
    tmp_path: Path, settings: Settings
) -> None:
    make_task("vit", dtype=torch.float32)[0].save_pretrained(tmp_path / "model")
    trainer = GradGuardTrainer(
        GradGuardConfig(**settings(model_name_or_path=str(tmp_path / "model"))), defense="none"
    )
    assert type(trainer.model).__name__ == "ViTForImageClassification"
    assert trainer.processing_class is None


def test_folder_of_a_model_without_a_head_is_refused(tmp_path: Path, settings: Settings) -> None:
    make_task("bert")[0].bert.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"BertModel.*choose a model with a head"):
        GradGuardTrainer(
            GradGuardConfig(**settings(model_name_or_path=str(tmp_path / "model"))), defense="none"
        )


def test_folder_that_names_no_model_class_is_refused(tmp_path: Path, settings: Settings) -> None:
    make_task("bert")[0].config.save_pretrained(
        tmp_path / "model"
    )  # made by hand, so it has no `architectures`
    with pytest.raises(ValueError, match="architectures"):
        GradGuardTrainer(
            GradGuardConfig(**settings(model_name_or_path=str(tmp_path / "model"))), defense="none"
        )


def test_no_model_is_refused(settings: Settings) -> None:
    with pytest.raises(
        ValueError, match="There is no model: pass model=, model_init=, or model_name_or_path"
    ):
        GradGuardTrainer(GradGuardConfig(**settings()), defense="none")


def test_model_first_in_the_stock_order_of_arguments(settings: Settings) -> None:
    model, data = make_task("bert", dtype=torch.float32)[0], rows()
    trainer = GradGuardTrainer(
        model, GradGuardConfig(**settings()), stack, data, data[:4], defense="none"
    )
    trainer.train()
    assert trainer.model is model
    assert trainer.data_collator is stack
    assert "eval_loss" in trainer.evaluate()


def test_model_init(settings: Settings) -> None:
    args = GradGuardConfig(**settings())
    trainer = GradGuardTrainer(
        args=args,
        model_init=lambda: make_task("bert", dtype=torch.float32)[0],
        defense="none",
        train_dataset=rows(),
    )
    trainer.train()
    assert trainer.state.global_step == 3


def test_plain_training_arguments(settings: Settings) -> None:
    model = make_task("bert", dtype=torch.float32)[0]
    trainer = GradGuardTrainer(
        model, TrainingArguments(**settings()), defense="pruning", train_dataset=rows()
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert "bert.embeddings.word_embeddings.weight" not in trainer.shared_names


def test_missing_defense_is_an_error_that_lists_the_names(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="No defense is named") as error:
        make_trainer()
    assert all(name in str(error.value) for name in DEFENSES)


def test_unknown_defense_is_an_error_that_lists_the_names(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="no defense 'noise'") as error:
        make_trainer(defense="noise")
    assert all(name in str(error.value) for name in DEFENSES)


def test_two_defenses_are_refused(make_trainer: MakeTrainer, settings: Settings) -> None:
    model, args = make_task("bert")[0], GradGuardConfig(**settings(defense="pruning"))
    for other in ("none", make_defense("none"), make_defense("pruning")):
        with pytest.raises(ValueError, match=r"Two defenses are named.*Give one"):
            GradGuardTrainer(model, args, defense=other)


def test_same_defense_twice_is_one(settings: Settings) -> None:
    args = GradGuardConfig(**settings(defense="pruning", defense_kwargs={"ratio": 0.25}))
    trainer = GradGuardTrainer(make_task("bert")[0], args, defense="pruning")
    assert trainer.defense == make_defense("pruning", ratio=0.25)


def test_defense_by_arguments_alone(settings: Settings) -> None:
    args = GradGuardConfig(**settings(defense="pruning", defense_kwargs={"ratio": 0.25}))
    assert GradGuardTrainer(make_task("bert")[0], args).defense == make_defense(
        "pruning", ratio=0.25
    )


def test_defense_by_keyword_takes_settings_from_the_arguments(settings: Settings) -> None:
    args = GradGuardConfig(**settings(defense_kwargs={"ratio": 0.25}))
    assert GradGuardTrainer(make_task("bert")[0], args, defense="pruning").defense == make_defense(
        "pruning", ratio=0.25
    )
    with pytest.raises(TypeError, match="dp_sgd has no setting ratio"):
        GradGuardTrainer(make_task("bert")[0], args, defense="dp_sgd")


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_defense_settings(settings: Settings, empty: Any) -> None:
    args = GradGuardConfig(**settings(defense_kwargs=empty))
    assert GradGuardTrainer(make_task("bert")[0], args, defense="pruning").defense == make_defense(
        "pruning"
    )
    defense = make_defense("pruning", ratio=0.5)
    assert GradGuardTrainer(make_task("bert")[0], args, defense=defense).defense is defense


def test_defense_object_brings_its_own_settings(settings: Settings) -> None:
    args = GradGuardConfig(**settings(defense_kwargs={"ratio": 0.25}))
    with pytest.raises(
        ValueError, match="A Defense object brings its own settings: leave defense_kwargs empty"
    ):
        GradGuardTrainer(make_task("bert")[0], args, defense=make_defense("pruning"))


def test_noise_seed_is_called_unsafe(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(defense="gaussian_noise")
    assert "UNSAFE" not in caplog.text
    make_trainer(defense="gaussian_noise", noise_seed=4)
    assert "UNSAFE: noise_seed=4" in caplog.text


# Unprotected training equals the stock Trainer's, also on one process


def question_answering() -> tuple[nn.Module, list[Row]]:
    """A task without `labels`, so that nothing is counted."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
    )
    torch.manual_seed(0)
    batch = token_batch(22)
    del batch["labels"]
    batch["start_positions"], batch["end_positions"] = torch.arange(22) % 5, torch.arange(22) % 3
    data = [{key: value[index] for key, value in batch.items()} for index in range(22)]
    return randomize(BertForQuestionAnswering(config)), data


# Adam divides by the gradient's size, so it is used where both do the same arithmetic: exactly
# equal. Elsewhere float32 rounds otherwise, by about 1e-7 of gradients of size 1, and plain SGD
# shows no more than that.
SGD = {"optim": "sgd", "learning_rate": 0.05}
IDENTITY: dict[str, tuple[str, dict[str, Any], float]] = {
    "accumulation 4, uneven": ("bert", {"gradient_accumulation_steps": 4}, 0.0),
    "bf16, checkpointing": ("bert", {"bf16": True, CHECKPOINTING: True}, 0.0),
    "noisy embeddings": ("bert", {"neftune_noise_alpha": 5.0}, 0.0),
    "causal lm": ("gpt2_lm", {**SGD, "gradient_accumulation_steps": 3}, 1e-6),
    "causal lm, label smoothing": ("gpt2_lm", {**SGD, "label_smoothing_factor": 0.1}, 1e-6),
    "vision": ("vit", {**SGD, "gradient_accumulation_steps": 2}, 1e-6),
    "no loss arguments": ("convnext", {**SGD, "gradient_accumulation_steps": 2}, 1e-6),
    "no labels": ("question answering", {**SGD, "gradient_accumulation_steps": 3}, 1e-6),
}


@pytest.mark.parametrize(("task", "more", "tolerance"), IDENTITY.values(), ids=IDENTITY.keys())
def test_unprotected_weights_equal_the_stock_trainers(
    task: str, more: dict[str, Any], tolerance: float, settings: Settings
) -> None:
    trained = []
    for guarded in (False, True):
        if task == "question answering":
            model, data = question_answering()
        else:
            model = make_task(task, dtype=torch.float32, dropout=0.1)[0]
            data = ragged_rows(22) if task == "gpt2_lm" else rows(task)
        options = {"train_dataset": data, "data_collator": pad if task == "gpt2_lm" else None}
        before = weights(model)
        if guarded:
            args = GradGuardConfig(**settings(max_steps=4, share_input_embeddings=True, **more))
            GradGuardTrainer(model, args, defense="none", **options).train()
        else:
            Trainer(model, TrainingArguments(**settings(max_steps=4, **more)), **options).train()
        trained.append(weights(model))
        assert max((trained[-1][n] - before[n]).abs().max() for n in before) > 1e-3
    torch.testing.assert_close(trained[1], trained[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clients", [2, 3, 9])
@pytest.mark.parametrize("task", ["bert", "gpt2_lm"])
def test_clients_gradients_sum_to_the_batchs(
    make_trainer: MakeTrainer, task: str, clients: int
) -> None:
    seen = []
    for count in (1, clients):
        gradients = Gradients()
        data = ragged_rows(22) if task == "gpt2_lm" else rows(task)
        options = {"callbacks": [gradients], "data_collator": pad if task == "gpt2_lm" else None}
        make_trainer(
            task, "none", data, options=options, clients_per_process=count,
            gradient_accumulation_steps=2, max_steps=1, max_grad_norm=0.0,
            share_input_embeddings=True,
        ).train()  # fmt: skip
        seen.append(gradients.steps[0])
    torch.testing.assert_close(
        seen[1], seen[0], rtol=1e-4, atol=1e-6
    )  # float32 sums of gradients of size 1, reordered


def test_client_without_labels_does_not_change_the_others_weights(
    make_trainer: MakeTrainer,
) -> None:
    """The very first client has nothing to predict; the others' losses are sums over the whole step
    all the same.
    """
    seen = []
    for count in (1, 4):
        data = ragged_rows(22)
        data[0]["labels"] = torch.full_like(data[0]["labels"], -100)
        gradients = Gradients()
        make_trainer(
            "gpt2_lm", "none", data, options={"callbacks": [gradients], "data_collator": pad},
            max_steps=1, clients_per_process=count, gradient_accumulation_steps=2,
            max_grad_norm=0.0, share_input_embeddings=True, train_sampling_strategy="sequential",
        ).train()  # fmt: skip
        seen.append(gradients.steps[0])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-6)  # as above


# Losses of one's own


def _summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def _mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs["logits"], labels)


@pytest.mark.parametrize("loss", [_summed, _mean])
def test_own_loss_equals_the_stock_trainers(loss: Any, settings: Settings) -> None:
    trained = []
    for guarded in (False, True):
        model = make_task("bert", dtype=torch.float32, dropout=0.1)[0]
        options = {"train_dataset": rows(), "compute_loss_func": loss}
        more = settings(**SGD, gradient_accumulation_steps=4)
        if guarded:
            args = GradGuardConfig(**more, share_input_embeddings=True)
            GradGuardTrainer(model, args, defense="none", **options).train()
        else:
            Trainer(model, TrainingArguments(**more), **options).train()
        trained.append(weights(model))
    torch.testing.assert_close(
        trained[1], trained[0], rtol=1e-6, atol=1e-6
    )  # float32 rounding, as above


@pytest.mark.parametrize(("power", "factor"), [(2, "0.25"), (0.5, "0.707107"), (-1.0, "2")])
def test_loss_that_depends_oddly_on_the_count_is_refused(
    make_trainer: MakeTrainer, power: float, factor: str
) -> None:
    def odd(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch**power

    trainer = make_trainer(defense="none", options={"compute_loss_func": odd})
    before = weights(trainer.model)
    message = rf"factor of {factor} when num_items_in_batch doubles.*change compute_loss_func"
    with pytest.raises(NotImplementedError, match=message):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


# Messages


def test_accumulation_adds_up_separately_protected_messages(make_trainer: MakeTrainer) -> None:
    """Two micro-batches of 4, each of three clients with 2, 1 and 1 samples: six messages, each
    with noise of its own.
    """
    gradients, data = Gradients(), rows()
    trainer = make_trainer(
        make_task("bert")[0], "gaussian_noise", data, options={"callbacks": [gradients]},
        gradient_accumulation_steps=2, clients_per_process=3, max_steps=2, noise_seed=9,
        max_grad_norm=0.0, train_sampling_strategy="sequential", optim="sgd", learning_rate=0.0,
    )  # fmt: skip
    trainer.train()

    model = make_task("bert")[0].train()
    defenses = [make_defense("gaussian_noise") for _ in range(3)]
    for step in range(2):
        expected = {
            name: torch.zeros_like(model.get_parameter(name)) for name in trainer.shared_names
        }
        messages = 0
        for micro in range(2):
            first = 8 * step + 4 * micro
            parts = ((first, first + 2), (first + 2, first + 3), (first + 3, first + 4))
            for defense, (start, stop) in zip(defenses, parts, strict=True):
                generator = Stream.from_seeds(9, 0, step, messages)
                shared = defense(GradientMap(model, stack(data[start:stop])), generator)
                for name, tensor in shared.items():
                    expected[name] += tensor * (stop - start) / 4
                messages += 1
        found = {name: gradients.steps[step][name] for name in trainer.shared_names}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_noise_is_added_to_the_mean_loss_and_weighted_afterwards(make_trainer: MakeTrainer) -> None:
    """The Trainer divides a language model's loss by the tokens of the whole step; the noise scale
    does not see that.
    """
    sigma, gradients, data = 0.5, Gradients(), ragged_rows(22)
    trainer = make_trainer(
        "gpt2_lm", WatchedNoise(scale=sigma), data,
        options={"callbacks": [gradients], "data_collator": pad}, gradient_accumulation_steps=3,
        max_steps=1, max_grad_norm=0.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer.train()

    model = make_task("gpt2_lm", dtype=torch.float32)[0].train()
    batches = [pad(data[start : start + 4]) for start in (0, 4, 8)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert len(set(counts)) > 1
    expected = {name: torch.zeros_like(model.get_parameter(name)) for name in trainer.shared_names}
    assert len(WatchedNoise.log) == 3
    for batch, count, (given, shared) in zip(batches, counts, WatchedNoise.log, strict=True):
        mean = torch.autograd.grad(
            model(**batch).loss, [model.get_parameter(name) for name in trainer.shared_names]
        )
        mean_loss_gradient = dict(zip(trainer.shared_names, mean, strict=True))
        torch.testing.assert_close(
            given, mean_loss_gradient, rtol=1e-4, atol=1e-6
        )  # float32 sums in another order
        noise = torch.cat([(shared[name] - given[name]).flatten() for name in given])
        assert float(noise.std()) == pytest.approx(
            sigma, rel=0.1
        )  # of 1000 draws: standard error 0.022
        for name in expected:
            expected[name] += shared[name] * count / sum(counts)
    found = {name: gradients.steps[0][name] for name in trainer.shared_names}
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-6
    )  # float32 sums in another order


@pytest.mark.parametrize(
    ("batch", "clients", "messages"), [(1, 1, 3), (1, 4, 3), (3, 5, 9), (4, 2, 6)]
)
def test_every_client_with_data_sends_one_message(
    make_trainer: MakeTrainer, batch: int, clients: int, messages: int
) -> None:
    trainer = make_trainer(
        "bert", WatchedNoise(scale=0.0), rows(count=batch * 3), per_device_train_batch_size=batch,
        clients_per_process=clients,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3
    assert len(WatchedNoise.log) == messages


def test_clients_keep_what_they_remember_to_themselves(make_trainer: MakeTrainer) -> None:
    given = make_defense("optimal_noise", shape="past", refresh_every=100)
    trainer = make_trainer(defense=given, clients_per_process=2)
    trainer.train()
    one, two = (client.defense.flatten(client.state) for client in trainer._clients)
    assert one.keys() == two.keys() != set()
    assert any(not torch.equal(one[key], two[key]) for key in one)
    assert given.state_dict() == {}


def test_withheld_embeddings_stand_still_and_all_else_moves(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(defense="gaussian_noise", weight_decay=0.1)
    before = weights(trainer.model)
    trainer.train()
    still = [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert still == ["bert.embeddings.word_embeddings.weight"]
    assert set(trainer.shared_names) == before.keys() - set(still)


def test_withheld_embeddings_have_no_gradient(make_trainer: MakeTrainer) -> None:
    gradients = Gradients()
    make_trainer("gpt2_lm", "none", options={"callbacks": [gradients]}).train()
    assert [name for name, gradient in gradients.steps[0].items() if gradient is None] == [
        "transformer.wte.weight"
    ]


def test_shared_embeddings_move(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(defense="gaussian_noise", share_input_embeddings=True)
    before = weights(trainer.model)
    trainer.train()
    assert not [
        name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])
    ]


@pytest.mark.parametrize("name", [name for name in DEFENSES if name != "none"])
def test_every_defense_trains_and_changes_the_weights(make_trainer: MakeTrainer, name: str) -> None:
    trained = []
    settings = {}
    if name == "refiner_published":
        settings = {"evaluation_network": SmallNetwork("text", 8)}
    for defense in (make_defense("none"), make_defense(name, **settings)):
        trainer = make_trainer(defense=defense)
        trainer.train()
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
        trained.append(weights(trainer.model))
    assert any(not torch.equal(trained[0][n], trained[1][n]) for n in trained[0])


@pytest.mark.parametrize("clients", [1, 2])
def test_gradient_that_is_not_finite_stops_before_anything_is_applied(
    make_trainer: MakeTrainer, clients: int
) -> None:
    data = rows("vit")
    data[2]["pixel_values"] = torch.full_like(data[2]["pixel_values"], torch.inf)
    trainer = make_trainer(
        "vit",
        "gaussian_noise",
        data,
        train_sampling_strategy="sequential",
        clients_per_process=clients,
    )
    before = weights(trainer.model)
    with pytest.raises(
        FloatingPointError, match=r"The gradient of vit\.\S+ is not finite, so nothing was shared"
    ):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_buckets_keep_order_types_and_bounds() -> None:
    grads = [
        torch.zeros(n, dtype=dtype)
        for n, dtype in [(3, torch.float32), (4, torch.float32), (9, torch.float32)]
    ]
    grads += [
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.float32),
        torch.zeros(7),
    ]
    found = list(buckets(grads, entries=8))
    assert [[g.numel() for g in bucket] for bucket in found] == [[3, 4], [9], [2], [1, 7]]
    assert all(a is b for a, b in zip((g for bucket in found for g in bucket), grads, strict=True))
    assert list(buckets([])) == []


# Logs


def test_figures_stand_beside_the_loss_and_not_in_evaluation(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense="gaussian_noise", options={"eval_dataset": rows()[:4]}, eval_strategy="steps",
        eval_steps=1, max_steps=4, logging_steps=2,
    )  # fmt: skip
    trainer.train()
    figures = {"defense/relative_error", "defense/cosine", "defense/seconds"}
    with_loss = [entry for entry in trainer.state.log_history if "loss" in entry]
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert len(with_loss) == 2
    assert any("eval_loss" in entry for entry in others)
    assert all(figures <= entry.keys() for entry in with_loss)
    assert not any(figures & entry.keys() for entry in others)
    assert all(entry["defense/seconds"] > 0 for entry in with_loss)


def test_what_was_not_logged_by_the_end_stands_beside_the_summary(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(defense=WatchedNoise(relative_scale=0.5), max_steps=3, logging_steps=2)
    trainer.train()
    assert len(WatchedNoise.log) == 3
    given, shared = (
        torch.cat([t.flatten() for t in tensors.values()]) for tensors in WatchedNoise.log[-1]
    )
    assert "train_loss" in trainer.state.log_history[-1]
    summary = trainer.state.log_history[-1]
    assert summary["defense/relative_error"] == pytest.approx(
        float((shared - given).norm() / given.norm()), rel=1e-4
    )
    assert summary["defense/seconds"] > 0


def test_figures_are_means_over_messages(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense=WatchedNoise(relative_scale=0.5), clients_per_process=2,
        gradient_accumulation_steps=2, max_steps=2, logging_steps=2,
    )  # fmt: skip
    trainer.train()
    assert len(WatchedNoise.log) == 8
    errors, cosines = [], []
    for given, shared in WatchedNoise.log:
        g, y = (
            torch.cat([t.flatten().double() for t in tensors.values()])
            for tensors in (given, shared)
        )
        errors.append(float((y - g).norm() / g.norm()))
        cosines.append(float(g @ y / (g.norm() * y.norm())))
    entry = trainer.state.log_history[0]
    assert entry["defense/relative_error"] == pytest.approx(
        sum(errors) / 8, rel=1e-5
    )  # differences of float32
    assert entry["defense/cosine"] == pytest.approx(sum(cosines) / 8, rel=1e-5)


def test_figures_of_an_unprotected_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(defense="none")
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        assert entry["defense/relative_error"] == 0
        assert entry["defense/cosine"] == pytest.approx(1, abs=1e-6)  # sums in float32


# What a Trainer does otherwise


def test_evaluate_and_predict(make_trainer: MakeTrainer) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    data = rows()
    trainer = make_trainer(
        defense="gaussian_noise", options={"eval_dataset": data, "compute_metrics": accuracy}
    )
    trainer.train()
    with torch.no_grad():
        logits = trainer.model.eval()(**stack(data)).logits
    output = trainer.predict(data)
    torch.testing.assert_close(
        torch.tensor(output.predictions), logits, rtol=1e-4, atol=1e-5
    )  # other batch sizes
    right = float((logits.argmax(-1) == stack(data)["labels"]).float().mean())
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(right)


def test_iterable_data_on_one_process(make_trainer: MakeTrainer) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Row]:
            return iter(rows())

    trainer = make_trainer(defense="gaussian_noise", data=Stream(), max_steps=8)
    before = weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 8
    assert not torch.equal(trainer.model.classifier.weight, before["classifier.weight"])


def test_early_stopping_stops_as_ever(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        defense="gaussian_noise",
        options={"eval_dataset": rows()[:4], "callbacks": [EarlyStoppingCallback(2)]},
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss", max_steps=9, optim="sgd", learning_rate=0.0,
    )  # fmt: skip
    trainer.train()  # nothing changes, so nothing improves
    assert trainer.state.global_step == 3


# Checkpoints


# 6 steps are an epoch: within one, and at its end
@pytest.mark.long
@pytest.mark.parametrize(("saved", "chained"), [(3, True), (6, False)])
def test_resumed_run_equals_one_left_alone(
    make_trainer: MakeTrainer, tmp_path: Path, saved: int, chained: bool
) -> None:
    """Averages are fed at every fourth message, so that both checkpoints are in between; dropout
    and noise go on where they were.
    """

    def run(folder: str, checkpoint: str | None = None, **more: Any) -> dict[str, Tensor]:
        noise = make_defense("optimal_noise", shape="past", refresh_every=4)
        defense = (
            chain(make_defense("optimal_pruning", num_probes=2, refresh_every=5), noise)
            if chained
            else noise
        )
        trainer = make_trainer(
            defense=defense, dropout=0.1, clients_per_process=2, noise_seed=5,
            output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=saved, max_steps=8,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(trainer.model)

    alone = run("alone")
    resumed = run("resumed", str(tmp_path / "alone" / f"checkpoint-{saved}"))
    assert all(torch.equal(alone[name], resumed[name]) for name in alone)


@pytest.mark.long
@pytest.mark.statistics
def test_no_two_messages_have_related_noise(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps, two micro-batches, two clients, before and after resuming, with workers that
    load the data. The control: with `noise_seed` a resumed run draws what was drawn before.
    """
    drawn: list[Tensor] = []

    noisy_of = Stream.noisy

    def noisy(stream: Stream, values: Tensor, *settings: Any) -> Tensor:
        shared = noisy_of(stream, values, *settings)
        drawn.append(shared - values)
        return shared

    monkeypatch.setattr(Stream, "noisy", noisy)

    def largest_correlation(**more: Any) -> float:
        drawn.clear()
        folder = tmp_path / str(len(more))
        for checkpoint in (None, str(folder / "checkpoint-2"), str(folder / "checkpoint-2")):
            make_trainer(
                defense="gaussian_noise", max_steps=4, save_strategy="steps", save_steps=2,
                clients_per_process=2, gradient_accumulation_steps=2, dataloader_num_workers=2,
                output_dir=str(folder), **more,
            ).train(resume_from_checkpoint=checkpoint)  # fmt: skip
        messages = torch.stack([noise.flatten() for noise in drawn])
        assert len(messages) == (4 + 2 + 2) * 2 * 2
        return float(torch.corrcoef(messages).fill_diagonal_(0).abs().max()) * len(drawn[0]) ** 0.5

    assert largest_correlation() < 6
    assert largest_correlation(noise_seed=3) > 30


@pytest.mark.parametrize("private", [True, False])
def test_private_dropout_is_a_setting(make_trainer: MakeTrainer, private: bool) -> None:
    """Two runs of one seed: private masks differ, and so does what is learned. `pruning` draws
    nothing itself.
    """

    def learned() -> Tensor:
        trainer = make_trainer(
            defense="pruning", dropout=0.5, private_dropout=private, max_steps=2, seed=3
        )
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    assert torch.equal(learned(), learned()) is not private


def test_weights_that_are_saved_under_other_names_are_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Transformers saves ViT under the names of its older versions, which its Trainer then leaves
    out with a warning, both where it resumes and where it loads the best model.
    """

    def make(folder: str) -> GradGuardTrainer:
        return make_trainer(
            "vit", "pruning", rows("vit"), output_dir=str(tmp_path / folder), save_strategy="steps",
            save_steps=2, max_steps=4,
        )  # fmt: skip

    trainer, checkpoint = make("whole"), tmp_path / "whole" / "checkpoint-2"
    trainer.train()
    assert load_file(checkpoint / "model.safetensors").keys() != trainer.model.state_dict().keys()
    with pytest.raises(RuntimeError, match=r"other weights.*from_pretrained"):
        make("resumed").train(resume_from_checkpoint=str(checkpoint))
    trainer.state.best_model_checkpoint = str(checkpoint)
    with pytest.raises(RuntimeError, match=r"other weights.*from_pretrained"):
        trainer._load_best_model()


def test_a_checkpoint_of_another_model_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer("bert", "pruning", save_strategy="steps", save_steps=2).train()
    other = make_trainer("distilbert", "pruning", rows("distilbert"))
    with pytest.raises(RuntimeError, match=r"other weights than DistilBert"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_private_state_is_safetensors(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(
        defense="optimal_noise", defense_kwargs={"refresh_every": 4},
        save_strategy="steps", save_steps=3,
    )  # fmt: skip
    trainer.train()
    state = load_file(tmp_path / "out" / "checkpoint-3" / "gradguard_private_rank0.safetensors")
    assert int(state.pop("0/calls")) == 3
    assert len(state.pop("0/usual_power")) == 2
    for name in trainer.shared_names:
        shape = trainer.model.get_parameter(name).shape
        assert state.pop(f"0/shape.{name}").tolist() == list(shape)
        for kind in ("squares", "powers"):
            sizes = [len(state.pop(f"0/{kind}.0.{name}"))]
            if len(shape) > 1:
                sizes.append(len(state.pop(f"0/{kind}.1.{name}")))
            expected = [shape[0], shape[1:].numel()] if len(shape) > 1 else [shape.numel()]
            assert sizes == expected  # rows and columns
    assert not state


def test_defense_without_memory_saves_an_empty_file(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    stated = {"defense": "dp_sgd", "defense_kwargs": {"scale": 1.0}}
    make_trainer(**stated, save_strategy="steps", save_steps=3).train()
    assert (
        load_file(tmp_path / "out" / "checkpoint-3" / "gradguard_private_rank0.safetensors") == {}
    )


def test_stock_checkpoint_resumes_with_a_warning(
    make_trainer: MakeTrainer, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = TrainingArguments(**settings(save_strategy="steps", save_steps=2))
    Trainer(make_task("bert", dtype=torch.float32)[0], args, train_dataset=rows()).train()
    trainer = make_trainer(defense="gaussian_noise", max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert "holds no defense state of this rank" in caplog.text
