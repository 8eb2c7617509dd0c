"""`bridge.Metrics` in Bridge's own loggers.

Oracle: `layer_metrics` of each rank after each iteration (`test_job_metrics` counts the tokens). TensorBoard is the
real one, read back from its file; of the other loggers, which need accounts or servers, stand-ins record what they are
called with.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from statistics import fmean
from typing import Any

import bridge_on_cpu
import pytest
import torch.distributed as dist
from ranks import ranks
from recipe_runs import train

LOGGERS = (
    "logger.wandb_project=p",
    "logger.wandb_exp_name=e",
    "logger.mlflow_experiment=e",
    "logger.mlflow_run_name=r",
    "logger.comet_project=p",
    "logger.comet_experiment_name=e",
)

# Bridge logs losses of each layer under "moe/", too
OURS = ("fssdp/", "moe/avg_overload", "moe/max_", "moe/dead_experts", "moe/overload_factor_layer_")


class _Recorder(types.ModuleType):
    """In the place of wandb, mlflow or comet_ml: does nothing, and keeps metrics by step."""

    __spec__ = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logged: dict[int, dict[str, float]] = {}
        self.step = 0
        self.run = self  # as W&B's

    def log(self, values: dict[str, Any], step: int | None = None, commit: bool = False) -> None:
        """W&B's: what comes after its step is dropped; without one, values join it."""
        assert set(values) and not commit
        if step is None or step >= self.step:
            self.step = self.step if step is None else step
            self.logged.setdefault(values.get("fssdp/iteration", self.step), {}).update(values)

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """The others', which MLflow finds by the thread that logs."""
        assert threading.current_thread() is threading.main_thread()
        self.logged.setdefault(step, {}).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "Experiment" else lambda *args, **kwargs: None

    def __call__(self, **kwargs: Any) -> _Recorder:
        return self


@ranks(4)
def test_every_logger_has_the_metrics_of_all_stages() -> None:
    from megatron.bridge.training.callbacks import Callback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_hecate import bridge, layer_metrics

    recorders = {name: _Recorder(name) for name in ("wandb", "mlflow", "comet_ml")}
    sys.modules.update(recorders)
    folder = os.environ["TEST_FOLDER"]
    settings = (
        "model.pipeline_model_parallel_size=2",
        "model.moe_per_layer_logging=true",
        f"logger.tensorboard_dir={folder}/board",
        "logger.tensorboard_log_interval=2",
        f"logger.wandb_save_dir={folder}",
    )
    config = bridge_on_cpu.enabled(*LOGGERS, *settings, record=f"{folder}/run")
    expected: dict[int, dict[str, float]] = {}

    class Expect(Callback):
        def on_train_step_end(self, context: Any) -> None:
            (mine,) = layer_metrics(context.model)
            every: list = [None] * 4
            dist.all_gather_object(every, mine)
            # this pipeline's: ranks 0 and 1 are the first stage
            layers = [every[1], every[3]]
            factors = [layer.computed for layer in layers]
            values = {
                "moe/avg_overload_factor": fmean(factors),
                "moe/max_overload_factor": max(factors),
                "fssdp/replicas": sum(layer.replicas for layer in layers),
                "fssdp/bypassed_layers": sum(layer.bypassed for layer in layers),
            }
            for i, layer in enumerate(layers):
                values[f"moe/overload_factor_layer_{i}"] = layer.computed
                values[f"fssdp/replicas_layer_{i}"] = layer.replicas
            expected[context.state.train_state.step + 1] = values

    train(config, bridge.Metrics(), Expect())
    expected = {step: values for step, values in expected.items() if step in (2, 4)}
    assert all(values["fssdp/replicas"] for values in expected.values())
    logged = {name: recorder.logged for name, recorder in recorders.items()}
    if dist.get_rank() < 3:
        assert not any(logged.values()), "Bridge logs on the last rank"
        return
    board: dict[int, dict[str, float]] = {}
    events = EventAccumulator(f"{folder}/board").Reload()
    for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith(OURS)):
        for event in events.Scalars(tag):
            board.setdefault(event.step, {})[tag] = event.value
    for name, by_step in {**logged, "tensorboard": board}.items():
        ours = {
            step: {n: v for n, v in values.items() if n.startswith(OURS)}
            for step, values in by_step.items()
        }
        ours = {step: values for step, values in ours.items() if values}
        assert ours.keys() == expected.keys(), name
        for step, values in ours.items():
            # the layer's own ratio is of exact quotas of the whole iteration
            right = pytest.approx(expected[step], rel=0.02)
            assert {n: values[n] for n in expected[step]} == right, (name, step)
