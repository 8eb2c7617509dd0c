"""`bridge.Metrics` in Bridge's own loggers.

Oracle: `layer_metrics` of each rank after each iteration. TensorBoard is the real one, read back from its file; of the
other loggers, which need accounts or servers, stand-ins record what they are called with.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from statistics import fmean
from typing import Any

from ranks import ranks
from recipe_runs import FREE, train

LOGGERS = (
    "logger.wandb_project=p",
    "logger.wandb_exp_name=e",
    "logger.mlflow_experiment=e",
    "logger.mlflow_run_name=r",
    "logger.comet_project=p",
    "logger.comet_experiment_name=e",
)


class _Recorder(types.ModuleType):
    """In the place of wandb, mlflow or comet_ml: does nothing, and keeps metrics by step."""

    __spec__ = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logged: dict[int, dict[str, float]] = {}

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        assert set(values) and step is not None
        self.logged.setdefault(step, {}).update(values)

    log_metrics = log

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "Experiment" else lambda *args, **kwargs: None

    def __call__(self, **kwargs: Any) -> _Recorder:
        return self


@ranks(4)
def test_every_logger_has_the_metrics_of_all_stages() -> None:
    import torch
    import torch.distributed as dist
    from bridge_on_cpu import recipe
    from megatron.bridge.training.callbacks import Callback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_hecate import bridge
    from megatron_hecate.tools.metrics import layer_metrics

    recorders = {name: _Recorder(name) for name in ("wandb", "mlflow", "comet_ml")}
    sys.modules.update(recorders)
    folder = f"{os.environ['TEST_FOLDER']}/tensorboard"
    stages = "model.pipeline_model_parallel_size=2"
    config = recipe(*LOGGERS, f"logger.tensorboard_dir={folder}", stages, "logger.tensorboard_log_interval=2")
    bridge.enable(config, speeds=FREE)
    expected: dict[int, dict[str, float]] = {}

    class Expect(Callback):
        def on_train_step_end(self, context: Any) -> None:
            mine = [dataclasses.asdict(layer) for layer in layer_metrics(context.model)]
            every: list = [None] * 4
            dist.all_gather_object(every, mine)
            layers = [*every[1], *every[3]]  # this pipeline's: ranks 0 and 1 are the first stage
            assert [layer["layer"] for layer in layers] == ["layer 1", "layer 2"]
            values = {f"fssdp/{n} {layer['layer']}": layer[n] for layer in layers for n in layer if n != "layer"}
            values |= {f"fssdp/{n}": fmean(layer[n] for layer in layers) for n in layers[0] if n != "layer"}
            expected[context.state.train_state.step + 1] = values

    train(config, bridge.Metrics(), Expect())
    del expected[1], expected[3]
    assert all(any(name.startswith("fssdp/replicas") and value for name, value in e.items()) for e in expected.values())
    logged = {
        name: {step: {n: v for n, v in values.items() if n.startswith("fssdp/")} for step, values in r.logged.items()}
        for name, r in recorders.items()
    }
    if dist.get_rank() < 3:
        assert not any(recorder.logged for recorder in recorders.values()), "Bridge logs on the last rank"
        return
    for name, by_step in logged.items():
        assert {step: values for step, values in by_step.items() if values} == expected, name
    events = EventAccumulator(folder).Reload()
    board: dict[int, dict[str, float]] = {}
    for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith("fssdp/")):
        for event in events.Scalars(tag):
            board.setdefault(event.step, {})[tag] = event.value
    single = {
        step: {n: float(torch.tensor(v, dtype=torch.float32)) for n, v in e.items()} for step, e in expected.items()
    }
    assert board == single
