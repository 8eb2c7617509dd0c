"""`bridge.Metrics` in Bridge's own loggers.

Oracle: maps of routers and rows of experts counted by hand, and `layer_metrics` of each rank after each iteration for
what cannot be counted. TensorBoard is the real
one, read back from its file; of the other loggers, which need accounts or servers, stand-ins record what they are
called with.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import types
from statistics import fmean
from typing import Any

import pytest
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

# Bridge logs losses of each layer under "moe/", too
OURS = (
    "fssdp/",
    *(f"moe/{name}" for name in ("avg_overload", "max_", "dead_experts", "overload_factor_layer_")),
)


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


@pytest.mark.parametrize("observe", [False, True])
@ranks(4)
def test_every_logger_has_the_metrics_of_all_stages(observe: bool) -> None:
    """Where it only observes, the last stage, whose last rank logs, has no MoE layer."""
    import torch
    import torch.distributed as dist
    from bridge_on_cpu import recipe
    from megatron.bridge.training.callbacks import Callback
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_hecate import bridge, layer_metrics

    recorders = {name: _Recorder(name) for name in ("wandb", "mlflow", "comet_ml")}
    sys.modules.update(recorders)
    folder = os.environ["TEST_FOLDER"]
    settings = ("model.pipeline_model_parallel_size=2", "model.moe_per_layer_logging=true")
    settings += ("model.moe_layer_freq=[1,0]",) if observe else ()
    board_settings = (
        f"logger.tensorboard_dir={folder}/board",
        "logger.tensorboard_log_interval=2",
        f"logger.wandb_save_dir={folder}",
    )
    config = recipe(*LOGGERS, *settings, *board_settings)
    bridge.enable(config, speeds=FREE, observe=observe, record=f"{folder}/run")
    expected: dict[int, dict[str, float]] = {}
    counts, rows = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    class Expect(Callback):
        def on_train_start(self, context: Any) -> None:
            layers = [
                m for chunk in context.model for m in chunk.modules() if isinstance(m, MoELayer)
            ]
            self.layer = layers[0] if layers else None
            if not layers:
                return

            def count(router: Any, args: Any, routed: Any) -> None:
                if torch._C._current_graph_task_id() == -1:  # not once more in the backward
                    counts.add_(routed[1].sum(dim=0))

            def compute(experts: Any, args: Any) -> None:
                if torch._C._current_graph_task_id() == -1:
                    rows.add_(len(args[0]))

            self.layer.router.register_forward_hook(count)
            self.layer.experts.register_forward_pre_hook(compute)

        def on_train_step_end(self, context: Any) -> None:
            mine: dict[str, float] = {}
            if self.layer is not None:
                load = counts.clone()
                counts.zero_()
                dist.all_reduce(load, group=self.layer.ep_group)
                homes = load.view(2, 4).sum(dim=1)
                mine = {"max_vio": load.max() / load.double().mean() - 1, "dead": (load == 0).sum()}
                mine |= {"routed": homes.max() / homes.double().mean()}
                computed = rows.repeat(2)
                dist.all_gather_into_tensor(computed, rows, group=self.layer.ep_group)
                rows.zero_()
                mine["counted"] = computed.max() / computed.double().mean()
            if not observe:
                (layer,) = layer_metrics(context.model)
                assert layer.routed == pytest.approx(float(mine["routed"]))
                mine |= dataclasses.asdict(layer)
            every: list = [None] * 4
            dist.all_gather_object(every, mine)
            layers = [
                of for of in (every[1], every[3]) if of
            ]  # this pipeline's: ranks 0 and 1 are the first stage
            factors = [float(layer["counted"]) for layer in layers]
            values = {
                "moe/avg_overload_factor": fmean(factors),
                "moe/max_overload_factor": max(factors),
            }
            values |= {f"moe/overload_factor_layer_{i}": factor for i, factor in enumerate(factors)}
            values["moe/max_vio"] = fmean(float(layer["max_vio"]) for layer in layers)
            values["moe/dead_experts"] = sum(int(layer["dead"]) for layer in layers)
            if not observe:
                values["fssdp/replicas"] = sum(layer["replicas"] for layer in layers)
                values |= {
                    f"fssdp/replicas_layer_{i}": layer["replicas"] for i, layer in enumerate(layers)
                }
                values["fssdp/bypassed_layers"] = sum(layer["bypassed"] for layer in layers)
            expected[context.state.train_state.step + 1] = values

    stock = train(recipe(*settings)) if observe else None
    ours = train(config, bridge.Metrics(), Expect())
    if stock is not None:
        ours.assert_same(stock, rel=0)
    expected = {step: values for step, values in expected.items() if step in (2, 4)}
    assert observe or all(values["fssdp/replicas"] for values in expected.values())
    logged = {
        name: {
            step: {n: v for n, v in values.items() if n.startswith(OURS)}
            for step, values in r.logged.items()
        }
        for name, r in recorders.items()
    }
    if dist.get_rank() < 3:
        assert not any(recorder.logged for recorder in recorders.values()), (
            "Bridge logs on the last rank"
        )
        return
    board: dict[int, dict[str, float]] = {}
    events = EventAccumulator(f"{folder}/board").Reload()
    for tag in (tag for tag in events.Tags()["scalars"] if tag.startswith(OURS)):
        for event in events.Scalars(tag):
            board.setdefault(event.step, {})[tag] = event.value
    for name, by_step in {**logged, "tensorboard": board}.items():
        found = {step: values for step, values in by_step.items() if values}
        assert found.keys() == expected.keys(), name
        for step, values in found.items():
            assert {n: values[n] for n in expected[step]} == pytest.approx(
                expected[step], rel=1e-6
            ), (name, step)
    assert not observe or not any(
        n.startswith("fssdp/repl") for values in board.values() for n in values
    )
