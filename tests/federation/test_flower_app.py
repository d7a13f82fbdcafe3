"""The example app, with Flower's server, strategies, mods and messages, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs it on a few images, and gives the nodes and the accuracy of every round."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (540, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=pixels, y=draws.integers(0, 10, 540))

    def run(**changes: Any) -> tuple[Any, list[float]]:
        from gradguard_flower import local

        named = {key.replace("__", ".").replace("_", "-"): v for key, v in changes.items()}
        named |= {
            "task": "cifar10", "data": str(tmp_path / "images.npz"), "local-steps": 2,
            "batch-size": 2, "output": str(tmp_path / "figures.json"), "rounds": 1,
        } | named  # fmt: skip
        grid = local.run(local.configuration(**named), clients=3)
        figures = json.loads((tmp_path / "figures.json").read_text())
        return grid, [one["accuracy"] for one in figures]

    yield run
    for name in [name for name in sys.modules if name.startswith("gradguard_flower")]:
        del sys.modules[name]


def test_the_configuration_is_the_projects(app: Any) -> None:
    """On by default, as pyproject.toml has it, with its defense's state at every node."""
    grid, accuracy = app(rounds=2, learning_rate=1e-3)
    assert len(accuracy) == 3
    for context in grid.contexts.values():
        assert context.run_config["gradguard.defense"] == "optimal_noise"
        assert context.state["gradguard.state.of"]["defense"] == "optimal_noise"
        assert len(context.state["gradguard.state"]) > 10
        assert len(context.state["times"]["all"]) == 2


@pytest.mark.parametrize("secure", [False, True])
def test_without_noise_the_server_averages_local_training(app: Any, secure: bool) -> None:
    """The same weights as three plain loops and their mean, with and without SecAgg+."""
    from gradguard_flower import server_app
    from gradguard_flower.task import Task

    found: dict[str, Any] = {}
    kept = server_app.load

    def look(model: Any, arrays: Any) -> None:
        kept(model, arrays)
        found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}

    server_app.load = look
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "secure_aggregation": secure}
    grid, _ = app(gradguard__defense="none", **settings)
    task = Task(next(iter(grid.contexts.values())).run_config)
    models = []
    for client in range(3):
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = task.batches(client, 3, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            model(**next(batches)).loss.backward()
            optimizer.step()
        models.append(dict(model.named_parameters()))
    tolerance = (
        1e-3 if secure else 1e-6
    )  # SecAgg+ rounds to 64 / 2²² of each weight times its share
    for name, weight in found["weights"].items():
        mean = torch.stack([model[name].detach() for model in models]).mean(0)
        torch.testing.assert_close(weight, mean, rtol=0, atol=tolerance)


def test_names_may_be_left_out(app: Any) -> None:
    _, accuracy = app(
        gradguard__defense="pruning", gradguard__withheld="left out", gradguard__withhold="conv*"
    )
    assert len(accuracy) == 2


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("partitioner", ["hf-gradguard", "flwr-datasets"])
def test_every_row_is_one_clients(app: Any, partitioner: str, alpha: float) -> None:
    if partitioner == "flwr-datasets":
        pytest.importorskip("flwr_datasets")
    from gradguard_flower.task import Task

    config = {"task": "cifar10", "alpha": alpha, "partitioner": partitioner, "seed": 0}
    labels = np.arange(400) % 10
    parts = Task(config).parts(labels, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    again = Task(config).parts(labels, 4)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))
    shares = [np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]
    assert (max(shares) > 0.2) == bool(alpha)  # of ten classes


def test_a_partitioner_that_there_is_not_is_refused(app: Any) -> None:
    from gradguard_flower.task import Task

    with pytest.raises(ValueError, match="'flwr-datasets'"):
        Task({"task": "cifar10", "alpha": 0, "partitioner": "x", "seed": 0}).parts(np.ones(4), 2)


def test_the_project_file_is_what_flower_reads() -> None:
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for component in project["components"].values():
        module, _, name = component.partition(":")
        text = (EXAMPLE / f"{module.replace('.', '/')}.py").read_text()
        assert f"\n{name} = " in text
