"""What FLARE's simulator runs at each client: an executor whose training changes every weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

START = {"layer": np.linspace(-1, 1, 4000, dtype=np.float32).reshape(40, 100)}
STEP = (0.01 * np.cos(np.arange(4000))).astype(np.float32).reshape(40, 100)


class Trainer(Executor):
    """Sends its difference, or what it is told to.

    Args:
        sends: "WEIGHT_DIFF" or "WEIGHTS".
    """

    def __init__(self, sends: str = "WEIGHT_DIFF") -> None:
        super().__init__()
        self.sends = sends

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        received = from_shareable(shareable).data
        own = 1.0 + (fl_ctx.get_identity_name() == "site-2")
        step = {"layer": STEP * np.float32(own)}
        if self.sends == "WEIGHTS":
            step = {name: received[name] + change for name, change in step.items()}
        meta = {"NUM_STEPS_CURRENT_ROUND": 4, "initial_metrics": {"accuracy": 0.5}}
        return DXO(DataKind[self.sends], step, meta).to_shareable()


class Rounds(Controller):
    """Sends the same weights for some rounds, and writes what came back.

    Args:
        output: A JSON file.
        rounds: How many.
    """

    def __init__(self, output: str, rounds: int = 2) -> None:
        super().__init__()
        self.output, self.rounds = output, rounds

    def start_controller(self, fl_ctx: FLContext) -> None:
        self.found: list[dict[str, Any]] = []

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        for number in range(self.rounds):
            task = Task(
                "train", DXO(DataKind.WEIGHTS, START).to_shareable(), result_received_cb=self.got
            )
            self.broadcast_and_wait(task, fl_ctx, min_responses=2, abort_signal=abort_signal)
            for one in self.found[2 * number :]:
                one["round"] = number
        Path(self.output).write_text(json.dumps(self.found), encoding="utf-8")

    def got(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result = client_task.result
        row: dict[str, Any] = {"site": client_task.client.name, "code": result.get_return_code()}
        if "DXO" in result:
            dxo = from_shareable(result)
            row |= {"kind": dxo.data_kind, "layer": dxo.data["layer"].tolist(), "meta": dxo.meta}
        self.found.append(row)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """There is nothing to stop."""
