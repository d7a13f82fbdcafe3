"""Defenses of other packages train by name; a defense that breaks its contract is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from helpers import LABELS, make_task, token_batch
from torch import Tensor

from hf_gradguard import DEFENSES, GradGuardConfig, GradGuardTrainer, GradientMap, chain
from hf_gradguard import make_defense as make
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream
from recipes.command_line import parse_arguments

NAME = "classifier.bias"  # the tensor that broken defenses break


@dataclass
class Share(Defense):
    """Shares a part of the gradient, as a package of somebody else's might."""

    name: ClassVar[str] = "toy"
    part: float = 0.5

    def protect(self, gmap: GradientMap, generator: Stream) -> dict[str, Tensor]:
        return {name: self.part * g for name, g in gmap.gradient().items()}


@pytest.fixture
def toy() -> Iterator[str]:
    """The name of a defense that was registered in this process."""
    DEFENSES["toy"] = Share
    yield "toy"
    del DEFENSES["toy"]


def arguments(folder: Path, **settings: Any) -> GradGuardConfig:
    return GradGuardConfig(
        str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_steps=1, **settings,
    )  # fmt: skip


def trainer_of(args: GradGuardConfig, defense: Any = None) -> GradGuardTrainer:
    batch = token_batch(8)
    data = [{key: value[index] for key, value in batch.items()} for index in range(8)]
    model = make_task("bert", dtype=torch.float32)[0]
    return GradGuardTrainer(model, args, defense=defense, train_dataset=data)


def figures(trainer: GradGuardTrainer) -> dict[str, float]:
    trainer.train()
    return trainer.state.log_history[0]


def test_a_registered_class_trains_by_name(tmp_path: Path, toy: str) -> None:
    config = arguments(tmp_path, defense=toy, defense_kwargs={"part": 0.25})
    flags = (
        f"--output_dir={tmp_path} --defense=toy --use_cpu --max_steps=1 --logging_steps=1".split()
    )
    flags += ['--defense_kwargs={"part": 0.25}', "--report_to=none", "--save_strategy=no"]
    (parsed,) = parse_arguments(GradGuardConfig, argv=flags)
    for args in (config, parsed):
        assert figures(trainer_of(args))["defense/relative_error"] == pytest.approx(0.75)


def test_a_registered_class_is_checked_like_ours(tmp_path: Path, toy: str) -> None:
    with pytest.raises(TypeError, match=r"toy has no setting share. It has: part"):
        arguments(tmp_path, defense=toy, defense_kwargs={"share": 0.5})
    with pytest.raises(ValueError, match=r"There is no defense 'toi'. Did you mean 'toy'"):
        arguments(tmp_path, defense="toi")


def test_objects_and_chains_train(tmp_path: Path, toy: str) -> None:
    halves = chain(make(toy), make(toy))
    for defense, error in ((Share(0.25), 0.75), (halves, 0.75), (toy, 0.5)):
        trainer = trainer_of(arguments(tmp_path), defense)
        assert figures(trainer)["defense/relative_error"] == pytest.approx(error)
    trainer_of(arguments(tmp_path), chain(make(toy), make("pruning"))).train()


def test_an_object_is_no_argument_that_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a name here.*Pass the object to the Trainer"):
        arguments(tmp_path, defense=Share())


def test_an_installed_class_trains_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of a package with an entry point."""
    site, metadata = tmp_path / "site", tmp_path / "site" / "toys-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "toys.py").write_text(
        "from dataclasses import dataclass\n"
        "from hf_gradguard.defenses import Defense\n"
        "@dataclass\n"
        "class Sign(Defense):\n"
        "    name = 'toy_sign'\n"
        "    def protect(self, gmap, generator):\n"
        "        return {name: g.sign() for name, g in gmap.gradient().items()}\n"
    )
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hf_gradguard.defenses]\ntoy_sign = toys:Sign\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(DEFENSES.__dict__, "_points", raising=False)
    try:
        assert DEFENSES.package("toy_sign") == "toys"
        trainer = trainer_of(arguments(tmp_path / "out", defense="toy_sign"))
        trainer.train()
        assert type(trainer.defense).__module__ == "toys"
    finally:
        del DEFENSES.__dict__["_points"]  # without the package, when it is asked for again


def test_a_configuration_imports_no_defense() -> None:
    with patch.dict(sys.modules):  # as in a process that has imported nothing of the package
        for name in [name for name in sys.modules if name.split(".")[0] == "hf_gradguard"]:
            del sys.modules[name]
        importlib.import_module("hf_gradguard.training.config")
        names = [name for name in sys.modules if name.startswith("hf_gradguard.defenses.")]
    loaded = {name.rsplit(".", 1)[1] for name in names}
    assert "base" in loaded
    assert not loaded & {"noise", "pruning", "quantization", "soteria", "refiner", "none"}


# A broken contract


def _write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor += 1


def _missing(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    del shared[NAME]


def _unknown(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    shared["no.such.weight"] = torch.zeros(1)


def _scalar(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    shared[NAME] = torch.tensor(0.0)


def _bytes(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    shared[NAME] = shared[NAME].to(torch.int8)


def _number(shared: dict[str, Any], gmap: GradientMap) -> None:
    shared[NAME] = 0.0


def _nan(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    shared[NAME] = shared[NAME] * torch.nan


def _graph(shared: dict[str, Tensor], gmap: GradientMap) -> None:
    shared[NAME] = gmap.parameters[NAME] * 2


BROKEN: dict[str, tuple[Callable[[dict[str, Any], GradientMap], None], type[Exception], str]] = {
    "missing": (_missing, ValueError, rf"wrong shared nothing for '{NAME}'.*share zeros"),
    "unknown": (_unknown, ValueError, r"wrong shared 'no\.such\.weight', which is no shared"),
    "shape": (_scalar, ValueError, rf"wrong shared '{NAME}' with shape \(\), .* \({LABELS},\)"),
    "type": (_bytes, ValueError, rf"wrong shared '{NAME}' with type torch\.int8, .*float32"),
    "no tensor": (_number, TypeError, rf"wrong shared a float for '{NAME}', and no tensor"),
    "nan": (_nan, FloatingPointError, rf"wrong made the gradient of {NAME} not finite"),
    "graph": (_graph, ValueError, rf"wrong shared a tensor for '{NAME}' that holds its graph"),
    "gradient written": (
        lambda shared, gmap: _write(gmap.gradient()[NAME]),
        RuntimeError,
        rf"wrong wrote to the true gradient of '{NAME}' in place, so nothing was shared",
    ),
    "parameter written": (
        lambda shared, gmap: _write(gmap.parameters[NAME]),
        RuntimeError,
        rf"wrong wrote to the parameter '{NAME}' in place, so nothing was shared",
    ),
    "input written": (
        lambda shared, gmap: _write(gmap.input),
        RuntimeError,
        "wrong wrote to the continuous input in place, so nothing was shared",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_contract_stops_training_by_name(tmp_path: Path, case: str) -> None:
    spoil, error, says = BROKEN[case]

    @dataclass
    class Wrong(Defense):
        name: ClassVar[str] = "wrong"

        def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
            shared = {name: g.clone() for name, g in gmap.gradient().items()}
            spoil(shared, gmap)
            return shared

    trainer = trainer_of(arguments(tmp_path), Wrong())
    with pytest.raises(error, match=says):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
