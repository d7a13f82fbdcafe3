"""The app in one process, without a simulation engine: Flower's own server, strategies, mods and
messages, with clients that take turns.

    python -m gradguard_flower.local rounds=3 task=cifar10 data=/data/cifar10.npz \
        gradguard.defense=pruning gradguard.pruning.ratio=0.9
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

from hf_gradguard.testing.flower import InProcessGrid, run_in_process

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def configuration(**changes: Any) -> dict[str, Any]:
    """What pyproject.toml says, flat as Flower has it, with changes."""
    flat: dict[str, Any] = {}

    def flatten(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                flatten(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    flatten(tomllib.loads(PROJECT.read_text())["tool"]["flwr"]["app"]["config"], "")
    return flat | changes


def run(config: dict[str, Any], clients: int = 4) -> InProcessGrid:
    """Train, and return the nodes as they are afterwards."""
    from . import client_app, server_app

    nodes = [{"partition-id": node, "num-partitions": clients} for node in range(clients)]
    return run_in_process(client_app.app, server_app.app, nodes, config)


def main(arguments: list[str]) -> None:
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            changes[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key] = value
    run(configuration(**changes))


if __name__ == "__main__":
    main(sys.argv[1:])
