"""An evaluation network decides what Refiner shares, and may come from anybody. Each attack here
used to work; each is refused by name, before anything is shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, rng, word_tokenizer
from hub import COMMIT, FakeHub
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, chain, make_defense
from hf_gradguard.defenses.sketch import SpecialTokens
from hf_gradguard.networks import (
    ImageEvaluationNetwork,
    ImageEvaluationNetworkConfig,
    TextEvaluationNetwork,
    TextEvaluationNetworkConfig,
    load_network,
    save_network,
    train_text_network,
)
from hf_gradguard.training.card import privacy_section

WORDS = [f"w{index}" for index in range(60)]
TOKENIZER = word_tokenizer(WORDS)
TEXTS = [" ".join(WORDS[(start + 2 * step) % 20] for step in range(8)) for start in range(20)]


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, intermediate_size=16, max_position_embeddings=32, **sizes)
    return BertForSequenceClassification(config).eval()


def batch(texts: list[str] = TEXTS[:4]) -> dict[str, Tensor]:
    encoded = dict(TOKENIZER(texts, padding=True, return_tensors="pt"))
    encoded.pop("token_type_ids", None)
    return {**encoded, "labels": torch.arange(len(texts)) % 2}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = train_text_network(
        bert().get_input_embeddings(), TOKENIZER, TEXTS, steps=400, learning_rate=1e-2, width=8,
        batch_size=16, num_layers=1, progress=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("networks") / "honest"
    save_network(network, folder)
    return folder


def refiner(folder: Path, **settings: Any) -> Any:
    return make_defense(
        "refiner", objective="weighted", evaluation_network=str(folder), iterations=2, **settings
    )


def poisoned(
    honest: Path, folder: Path, config: dict[str, Any] | None = None, **weights: Tensor
) -> Path:
    """A copy with other entries."""
    folder.mkdir()
    entries = json.loads((honest / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(entries))
    save_file(load_file(honest / "model.safetensors") | weights, folder / "model.safetensors")
    return folder


@pytest.mark.long
def test_an_honest_network_is_taken(honest: Path) -> None:
    defense, model = refiner(honest), bert()
    defense.prepare(model, TOKENIZER)
    message = defense(GradientMap(model, batch()))
    assert message.metrics == {"movable_share": 1.0}
    found = defense.refine(GradientMap(model, batch()), rng())
    moved = (found.input != GradientMap(model, batch()).input).any(-1)
    special = torch.isin(batch()["input_ids"], torch.tensor(TOKENIZER.all_special_ids))
    assert torch.equal(moved, ~special)


def all_special(honest: Path, folder: Path) -> Path:
    weight = bert().get_input_embeddings().weight.detach()
    listed = {"special_token_ids": list(range(len(weight)))}
    return poisoned(honest, folder, listed, special_embeddings=weight.half())


def test_every_word_special(honest: Path, tmp_path: Path) -> None:
    """It switched Refiner off without a word: no token moved, and the true gradient was shared."""
    folder = all_special(honest, tmp_path / "poisoned")
    model = bert()
    with pytest.raises(ValueError, match=r"poisoned takes 60 token\(s\) for special that"):
        refiner(folder).prepare(model, TOKENIZER)
    with pytest.raises(ValueError, match=r"poisoned gives pure noise a ratio of 0\.00"):
        refiner(folder).prepare(model)
    with pytest.raises(ValueError, match=r"only 0% would be hidden.*nothing was shared"):
        refiner(folder)(GradientMap(model, batch()))
    args = {"use_cpu": True, "report_to": "none"}
    with pytest.raises(ValueError, match="poisoned takes 60"):
        GradGuardTrainer(
            model, GradGuardConfig(str(tmp_path / "out"), **args), defense=refiner(folder),
            processing_class=TOKENIZER,
        )  # fmt: skip


def test_words_special_behind_the_configurations_back(honest: Path, tmp_path: Path) -> None:
    """The list is the tokenizer's, and the embeddings kept for it are those of common words."""
    weight, model = bert().get_input_embeddings().weight.detach(), bert()
    common = torch.tensor(TOKENIZER.convert_tokens_to_ids(["w0", "w10", "w30", "w40"]))
    folder = poisoned(honest, tmp_path / "poisoned", special_embeddings=weight[common].half())
    defense = refiner(folder)
    defense.prepare(model, TOKENIZER)
    with pytest.raises(ValueError, match=r"only 75% would be hidden, and at least 90%"):
        defense(GradientMap(model, batch(["w0 w2 w4 w6 w8 w10 w12 w14"])))


def test_words_special_to_the_tokenizer(honest: Path) -> None:
    """Extra special tokens are content: a tenth of a batch may be, and not a quarter."""
    model, own = bert(), word_tokenizer(WORDS)
    own.add_special_tokens({"additional_special_tokens": ["w0", "w10"]})
    defense = refiner(honest)
    defense.prepare(model, own)
    with pytest.raises(ValueError, match=r"Of the 8 tokens .* only 75% would be hidden"):
        defense(GradientMap(model, batch(["w0 w2 w4 w6 w8 w10 w12 w14"])))
    found = defense(GradientMap(model, batch(["w2 w4 w6 w8 w10 w12 w14 w16 w18 w1 w3"])))
    assert found.metrics["movable_share"] == pytest.approx(10 / 11)


def constant(value: float) -> dict[str, Tensor]:
    return {"head.weight": torch.zeros(1, 8).half(), "head.bias": torch.tensor([value]).half()}


def inverted(honest: Path) -> dict[str, Tensor]:
    weights = load_file(honest / "model.safetensors")
    return {name: -weights[name] for name in ("head.weight", "head.bias")}


def test_a_constant(honest: Path, tmp_path: Path) -> None:
    model = bert()
    with pytest.raises(ValueError, match=r"low gives pure noise a ratio of 0\.02"):
        refiner(poisoned(honest, tmp_path / "low", **constant(-4.0))).prepare(model, TOKENIZER)
    defense = refiner(poisoned(honest, tmp_path / "high", **constant(4.0)))
    defense.prepare(model, TOKENIZER)  # of noise alone it is right
    with pytest.raises(ValueError, match=r"high gives this data a ratio of 0\.98.*noise 0\.98"):
        defense(GradientMap(model, batch()))


def test_an_inverted_network(honest: Path, tmp_path: Path) -> None:
    """Raised, it leads back to the text."""
    model, folder = bert(), poisoned(honest, tmp_path / "inverted", **inverted(honest))
    with pytest.raises(ValueError, match=r"inverted gives pure noise a ratio of 0\.[0-4]"):
        refiner(folder).prepare(model, TOKENIZER)
    unprepared = refiner(folder)
    unprepared._special = SpecialTokens.of(TOKENIZER)
    with pytest.raises(ValueError, match=r"inverted gives this data a ratio of .* must rise"):
        unprepared(GradientMap(model, batch()))
    with pytest.raises(ValueError, match="must rise"):
        chain(make_defense("none"), unprepared)(GradientMap(model, batch()))


def test_a_step_that_cannot_be_climbed(honest: Path, tmp_path: Path) -> None:
    """A head so steep that D is 0 or 1 everywhere: in order, and its slope is zero."""
    weights = load_file(honest / "model.safetensors")
    steep = {n: 60000 * weights[n].float().sign().half() for n in ("head.weight", "head.bias")}
    folder = poisoned(honest, tmp_path / "steep", **steep)
    defense = refiner(folder)
    defense._special = SpecialTokens.of(TOKENIZER)
    with pytest.raises(ValueError, match=r"steep (is flat|gives)"):
        defense(GradientMap(bert(), batch()))


def test_overflow_to_nan(honest: Path, tmp_path: Path) -> None:
    weights = {"project.weight": torch.full((8, 16), 3e38), "head.weight": torch.full((1, 8), 3e38)}
    folder = poisoned(honest, tmp_path / "overflow", **weights)
    with pytest.raises(ValueError, match="overflow gives pure noise a ratio of nan"):
        refiner(folder).prepare(bert(), TOKENIZER)


def test_an_image_network_is_tried_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig(image_size=8, filters=[4]))
    for bias, where in ((-9.0, "low"), (9.0, "high")):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.bias.fill_(bias)
        save_network(network, tmp_path / where)
    model, images = make_task("vit")
    with pytest.raises(ValueError, match=r"low gives pure noise a ratio of 0\.00"):
        refiner(tmp_path / "low").prepare(model)
    with pytest.raises(ValueError, match=r"high gives this data a ratio of 1\.00"):
        refiner(tmp_path / "high")(GradientMap(model, images))


# Size


@pytest.mark.parametrize(
    ("kind", "entries", "says"),
    [
        (TextEvaluationNetworkConfig, {"num_layers": 20_000}, "20,000 layers"),
        (TextEvaluationNetworkConfig, {"width": 10**6}, "parameters"),
        (TextEvaluationNetworkConfig, {"embedding_size": 10**12}, "parameters"),
        (TextEvaluationNetworkConfig, {"kernel_size": 10**9 + 1}, "parameters"),
        (TextEvaluationNetworkConfig, {"special_token_ids": [0] * 20_000}, "special tokens"),
        (ImageEvaluationNetworkConfig, {"filters": [1] * 20_000}, "20,000 layers"),
        (ImageEvaluationNetworkConfig, {"filters": [100_000, 100_000]}, "parameters"),
        (ImageEvaluationNetworkConfig, {"image_size": 10**6, "filters": [1] * 20}, "pixels a side"),
        (ImageEvaluationNetworkConfig, {"num_channels": 10**11}, "parameters"),
    ],
)  # fmt: skip
def test_size_is_bounded_before_anything_is_built(
    tmp_path: Path, kind: Any, entries: dict[str, Any], says: str
) -> None:
    """20,000 layers ran for a minute into a MemoryError."""
    (tmp_path / "huge").mkdir()
    entries = {"model_type": kind.model_type, **entries}
    (tmp_path / "huge" / "config.json").write_text(json.dumps(entries))
    (tmp_path / "huge" / "model.safetensors").write_bytes(b"")
    started = time.perf_counter()
    with pytest.raises(ValueError, match=f"huge is no evaluation network.*{says}.*before it is"):
        load_network(tmp_path / "huge")
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    "config",
    [
        TextEvaluationNetworkConfig(embedding_size=12, width=6, num_layers=2, kernel_size=3,
                                    special_token_ids=[0, 1, 2]),
        TextEvaluationNetworkConfig(embedding_size=5, width=1, num_layers=0, kernel_size=1),
        ImageEvaluationNetworkConfig(num_channels=1, image_size=[7, 10], filters=[3, 5]),
    ],
)  # fmt: skip
def test_size_is_what_it_says(config: Any) -> None:
    kind = TextEvaluationNetwork if hasattr(config, "width") else ImageEvaluationNetwork
    network = kind(config)
    assert config.num_parameters == sum(p.numel() for p in network.parameters())
    assert config.num_entries == sum(t.numel() for t in network.state_dict().values())


def test_weights_larger_than_their_network(honest: Path, tmp_path: Path) -> None:
    folder = poisoned(honest, tmp_path / "padded", padding=torch.zeros(10**6))
    with pytest.raises(ValueError, match=r"4,00\d,\d\d\d bytes.*does not fit, and is not read"):
        load_network(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"num_labels": 10**9},  # Transformers makes a name for each
        {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}},
        {"quantization_config": {"quant_method": "bitsandbytes"}, "_commit_hash": "x"},
    ],
)
def test_entries_that_no_network_has_do_nothing(
    honest: Path, tmp_path: Path, entry: dict[str, Any]
) -> None:
    folder = poisoned(honest, tmp_path / "more", entry)
    (folder / "code.py").write_text("raise SystemExit('ran')")
    started = time.perf_counter()
    network = load_network(folder)
    assert time.perf_counter() - started < 2
    assert not hasattr(network.config, "auto_map")
    assert network.config.special_token_ids == [0, 1, 2, 3]


def test_a_configuration_that_is_no_such_thing(tmp_path: Path) -> None:
    kind = TextEvaluationNetworkConfig.model_type
    for index, text in enumerate(
        ["[" * 200_000, "[1]", "{", json.dumps({"model_type": kind, "width": "wide"}), '"' * 2**21]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="is no evaluation network"):
            load_network(folder)


# Which one it is


def test_a_pickle_beside_the_weights_is_never_read(honest: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = poisoned(honest, tmp_path / "bomb")
    for name in ("pytorch_model.bin", "training_args.bin", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    load_network(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"pytorch_model\.bin.*can run code"):
        load_network(folder)
    assert not (tmp_path / "ran").exists()


def test_weights_are_pinned(honest: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((honest / "model.safetensors").read_bytes()).hexdigest()
    network = load_network(honest, sha256=digest.upper())
    assert (network.sha256, network.revision) == (digest, None)
    other = poisoned(honest, tmp_path / "other", **constant(4.0))
    with pytest.raises(ValueError, match=rf"other is not the evaluation network.*not {digest}"):
        load_network(other, sha256=digest)
    for given in (str(other), load_network(other)):
        with pytest.raises(ValueError, match="is not the evaluation network that was asked for"):
            make_defense(
                "refiner", objective="weighted", evaluation_network=given, sha256=digest
            ).prepare(bert())
    with pytest.raises(ValueError, match="revision is of a Hub repository"):
        make_defense("refiner", objective="weighted", evaluation_network=network, revision="main")
    with pytest.raises(ValueError, match="on this machine, and has no revision"):
        load_network(honest, revision="main")


def test_the_model_card_names_the_network(honest: Path, tmp_path: Path) -> None:
    args = GradGuardConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    trainer = GradGuardTrainer(bert(), args, defense=refiner(honest), processing_class=TOKENIZER)
    network = trainer.defense.network
    network.revision = COMMIT
    section = privacy_section(trainer)
    assert f'"sha256": "{network.sha256}"' in section
    assert f'"revision": "{COMMIT}"' in section
    assert f'"evaluation_network": "{honest}"' in section


def test_two_files_are_asked_for(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def download(name: str, **how: Any) -> str:
        asked.update(how, name=name)
        return str(poisoned(honest, tmp_path / COMMIT))

    monkeypatch.setattr("hf_gradguard.networks.loading.snapshot_download", download)
    network = load_network("somebody/net", revision="v1")
    patterns = ["config.json", "model.safetensors"]
    assert asked == {"name": "somebody/net", "revision": "v1", "allow_patterns": patterns}
    assert network.revision == COMMIT


@pytest.mark.slow
def test_of_the_hub_two_files_are_fetched(honest: Path, tmp_path: Path) -> None:
    names = ["pytorch_model.bin", "other.safetensors", "code.py", "adapter_config.json"]
    files = dict.fromkeys(names, b"bad")
    files |= {path.name: path.read_bytes() for path in honest.iterdir()}
    script = (
        "from hf_gradguard.networks import load_network\n"
        "network = load_network('somebody/net', revision='main')\n"
        "print(network.revision, network.sha256)"
    )
    with FakeHub() as hub:
        hub.add("somebody/net", files)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            env={**os.environ, **hub.environment(tmp_path)},
        )  # fmt: skip
        asked = {request.rsplit("/", 1)[-1] for request in hub.requests if "/resolve/" in request}
    assert asked == {"config.json", "model.safetensors"}
    assert done.stdout.split() == [COMMIT, load_network(honest).sha256]


def test_the_share_is_logged(honest: Path, tmp_path: Path) -> None:
    rows = [{key: value[0] for key, value in batch([text]).items()} for text in TEXTS]
    args = GradGuardConfig(
        str(tmp_path / "out"), use_cpu=True, report_to="none", logging_steps=1, max_steps=2,
        per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    defense = chain(refiner(honest), make_defense("quantization"))
    trainer = GradGuardTrainer(
        bert(), args, defense=defense, processing_class=TOKENIZER, train_dataset=rows
    )
    trainer.train()
    logged = [entry["defense/movable_share"] for entry in trainer.state.log_history[:2]]
    assert logged == [1.0, 1.0]


def test_few_words_are_tried_until_there_are_more(
    honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, trial = [], "hf_gradguard.defenses.refiner.published.check_order"
    monkeypatch.setattr(trial, lambda *arguments: tried.append(arguments[2]))
    defense, model = refiner(honest), bert()
    defense.prepare(model, TOKENIZER)
    for text in ("w0 w2", "w0 w2 w4", *TEXTS[:3]):
        defense(GradientMap(model, batch([text])))
    assert tried == [0.0, 0.0, 0.2]


def test_a_network_of_ones_own_is_ones_own(honest: Path) -> None:
    class Own(nn.Module):
        config = load_network(honest).config
        name_or_path = "own"
        weight = nn.Parameter(torch.ones(()))

        def check_embedding(self, weight: Tensor) -> None: ...

        def noise_ratio(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return 0 * x.sum((1, 2))

    defense = make_defense("refiner", objective="weighted", evaluation_network=Own(), iterations=1)
    defense.prepare(bert(), TOKENIZER)
    assert defense(GradientMap(bert(), batch())).metrics["movable_share"] == 1
