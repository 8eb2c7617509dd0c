"""Metrics of all pipeline stages reach the job's last rank, and training waits for none of it."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp, layer_metrics
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.record import job_metrics
from megatron_hecate.record.job_metrics import JobMetrics
from megatron_hecate.record.metrics import step_metrics


class _Board:
    """In the place of TensorBoard's writer."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.values.setdefault(iteration, {})[name] = value

    def flush(self) -> None:
        self.is_flushed = True


class _Wandb:
    """As a run of W&B keeps steps: rows only come after one another, and what has no step joins the running one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.x_axes: list[tuple[str, str]] = []
        self.run: _Wandb | None = self  # wandb's own name for it

    def log(self, values: dict, step: int | None = None, *, commit: bool | None = None) -> None:
        assert commit is not True
        running = len(self.rows) if step is None else step
        if running < len(self.rows):
            return  # dropped
        self.rows += [{} for _ in range(running - len(self.rows) + 1)] if step is not None else []
        self.rows[-1] |= values

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.x_axes.append((name, step_metric))


def _script(every: int) -> tuple[_Board, _Wandb]:
    """As in a script of ``megatron.training``: its arguments on all ranks, its writers on the last one."""
    names = types.ModuleType("megatron.training.global_vars")
    names._GLOBAL_ARGS = types.SimpleNamespace(
        tensorboard_dir="board", tensorboard_log_interval=every, moe_per_layer_logging=True
    )
    board, wandb = _Board(), _Wandb()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    names.get_tensorboard_writer = lambda: board if is_last else None
    names.get_wandb_writer = lambda: wandb if is_last else None
    sys.modules[names.__name__] = names
    return board, wandb


LAYOUTS = {
    "last stage dense": dict(pp=2, settings=(("moe_layer_freq", [1, 0]),)),
    "interleaved, uneven": dict(pp=2, vpp=2, settings=(("moe_layer_freq", [0, 1, 1, 1]),)),
}


@pytest.mark.parametrize(
    ("layout", "observe"), [("last stage dense", True), ("interleaved, uneven", False)]
)
@ranks(4)
def test_what_is_logged_is_of_all_stages(layout: str, observe: bool) -> None:
    """Oracle: the tokens that routers choose and that the experts of each rank are given, counted beside the run."""
    case = tiny_gpt.initialized(ep=2, accumulate=2, skew=3, **LAYOUTS[layout])
    (board, wandb), folder = _script(every=2), os.environ["TEST_FOLDER"] + "/run"
    # [T, layer's number]: tokens by expert, by rank computed
    counts = torch.zeros(5, 5, 8 + 2, dtype=torch.int64)
    config = HecateConfig(observe=observe, record=folder, speeds=tiny_gpt.FREE)
    step = 0

    def hook(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(fssdp(config)(chunks)):
            of_layer, rank = counts[:, layer.layer_number], layer.ep_group.rank()

            def routed(_: Any, args: Any, out: tuple, of_layer: Any = of_layer) -> None:
                of_layer[step, :8] += out[1].sum(dim=0)

            def computed(_: Any, args: tuple, of_rank: Any = of_layer[:, 8 + rank]) -> None:
                of_rank[step] += len(args[0])

            layer.router.register_forward_hook(routed)
            layer.experts.register_forward_pre_hook(computed)
        return chunks

    run = tiny_gpt.train(case, steps=0, hook=hook)
    assert layer_metrics(run.chunks) == []
    for step in range(5):
        run.step(step)
        wandb.log({"loss": 0.5}, step + 1)  # Megatron's own; ours may come later
    layers = tiny_gpt.moe_layers(run.chunks)
    for layer in layers[:1]:
        recorder = layer.router.observer if observe else layer.prefetcher.monitor.recorder
        recorder.stage.close()
    JobMetrics.newest.stop(20)
    assert not JobMetrics.newest.is_alive()
    dist.all_reduce(counts)
    of_layers = layer_metrics(run.chunks)
    for metrics, layer in zip(of_layers, [] if observe else layers, strict=True):
        homes = counts[4, layer.layer_number, :8].view(2, 4).sum(dim=1).tolist()
        assert metrics.layer == f"layer {layer.layer_number}"
        assert metrics.routed_tokens == max(homes)
        assert metrics.routed == pytest.approx(2 * max(homes) / sum(homes))
        assert metrics.bypassed == (metrics.replicas == 0)
        assert metrics.computed >= 1 and (metrics.computed < metrics.routed) != metrics.bypassed
    assert observe or any(metrics.replicas for metrics in of_layers)
    if dist.get_rank() < 3:
        assert not board.values
        return
    assert list(board.values) == [2, 4], "in order"
    numbers = [number for number in range(5) if counts[:, number].any()]
    assert len(numbers) == (3 if case.vpp else 1)
    for iteration, found in board.values.items():
        expert, rank = np.split(counts[iteration - 1, numbers].double().numpy(), [8], axis=1)
        factor = rank.max(axis=1) / rank.mean(axis=1)
        vio = expert.max(axis=1) / expert.mean(axis=1) - 1
        stages = [rank[[number % 2 == odd for number in numbers]].sum(axis=0) for odd in (1, 0)]
        fullest = [stage.max() / stage.mean() for stage in stages if stage.any()]
        expected = {
            "moe/avg_overload_factor": factor.mean(),
            "moe/max_overload_factor": factor.max(),
            "moe/max_cum_overload_factor": max(fullest),
            "moe/max_vio": vio.mean(),
            "moe/dead_experts": (expert == 0).sum(),
            **{f"moe/max_vio_layer_{number - 1}": vio[i] for i, number in enumerate(numbers)},
        }
        for i, number in enumerate(numbers):
            expected[f"moe/overload_factor_layer_{number - 1}"] = factor[i]
        assert {name: found[name] for name in expected} == pytest.approx(expected), iteration
        names = {name.rpartition("_")[2] for name in found if name.startswith("moe/max_vio_layer_")}
        assert names == {str(number - 1) for number in numbers}
        assert ("fssdp/replicas" in found) is not observe
    (row,) = [row for row in wandb.rows if row.get("fssdp/iteration") == 4]
    assert row == {"loss": 0.5, **board.values[4], "fssdp/iteration": 4}
    names = sorted((name, "fssdp/iteration") for name in board.values[4])
    assert sorted(wandb.x_axes) == names, "each once"
    rows, wandb.run = str(wandb.rows), None  # a script has finished the run
    load = np.array([[3, 1]])
    values = step_metrics(load, load, load, token_ms=1.0)
    job_metrics.log_step(6, ["layer 1"], values, ended=True)
    assert board.values[6] and board.is_flushed and str(wandb.rows) == rows


@pytest.mark.fast
def test_when_a_script_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other loops than Megatron's have neither its iteration nor its loggers."""
    name = "megatron.training.global_vars"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert running_iteration() is None and job_metrics.log_interval() is None
    for project, interval in (("", None), ("p", 2)):
        args = dict(tensorboard_dir=None, wandb_project=project, tensorboard_log_interval=2)
        script = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(curr_iteration=3, **args))
        monkeypatch.setitem(sys.modules, name, script)
        assert (running_iteration(), job_metrics.log_interval()) == (4, interval)


class _NotOfTraining:
    """A store that a thread of ours may use."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        assert threading.current_thread() is not threading.main_thread(), name
        return getattr(self._store, name)


class _Stages:
    """Two stages of one process, over a store of torch's; ``logged`` is what the second one logs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        layers: tuple[list[str], list[str]],
        every: int = 1,
    ) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        self.logged: list[tuple[int, list[str], dict[str, list[float]]]] = []
        monkeypatch.setattr(job_metrics, "_get_default_store", lambda: store)
        monkeypatch.setattr(job_metrics, "logging_pipeline", lambda: [0, 1])
        monkeypatch.setattr(job_metrics, "log_interval", lambda: every)
        self.ranks: list[JobMetrics] = []
        for rank, names in enumerate(layers):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(job_metrics.Attempt, "count", lambda *_: 7)
            self.ranks.append(JobMetrics(names))
        self.ranks[1].log = self.log
        self.store = store

    def log(self, iteration: int, layers: list[str], values: Any, *, ended: bool) -> None:
        self.logged.append((iteration, layers, {name: of.tolist() for name, of in values.items()}))

    def put(self, rank: int, iteration: int, **values: list[float]) -> None:
        self.ranks[rank].put(iteration, lambda: {name: np.array(of) for name, of in values.items()})

    def end(self) -> None:
        for metrics in self.ranks:
            if metrics._layers:
                metrics.put(float("inf"), dict)
        for metrics in self.ranks:
            metrics.stop(20)
            assert not metrics.is_alive()


@pytest.mark.fast
def test_only_whole_iterations_are_logged_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Literal messages: stages skip iterations, and know different metrics. What was read is kept nowhere."""
    stages = _Stages(monkeypatch, layers=(["layer 1", "layer 3"], ["layer 2"]), every=2)
    for iteration in (2, 3, 4, 8):
        stages.put(0, iteration, a=[iteration, 0.1], early=[1, 1])
    for iteration in (1, 2, 6, 8, 10):
        stages.put(1, iteration, late=[0], a=[iteration + 0.5])
    stages.end()
    layers = ["layer 1", "layer 3", "layer 2"]
    assert stages.logged == [(i, layers, {"a": [i, 0.1, i + 0.5]}) for i in (2, 8)]
    assert stages.store.num_keys() <= 1  # a TCPStore has one of its own


@pytest.mark.fast
def test_a_stage_whose_metrics_do_not_come_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the first stage hangs until both stages have trained: who waited for it would not come that far.
    Then everything is logged, in order. Training threads do not use the store."""
    stages, trained = _Stages(monkeypatch, layers=(["layer 1"], ["layer 2"])), threading.Event()
    for metrics in stages.ranks:
        metrics._store = _NotOfTraining(metrics._store)
    send = stages.ranks[0]._send
    stages.ranks[0]._send = lambda *message: trained.wait(60) and send(*message)
    for iteration in (1, 2, 3, 4):
        for rank in range(2):
            stages.put(rank, iteration, a=[iteration])
    assert not stages.logged
    trained.set()
    stages.end()
    assert [iteration for iteration, *_ in stages.logged] == [1, 2, 3, 4]


@pytest.mark.fast
def test_errors_of_loggers_and_metrics_are_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Training goes on, and so do later metrics. The last rank has no layers. Oracle: a literal line."""
    stages = _Stages(monkeypatch, layers=(["layer 1"], []))

    def full(iteration: int, *of: Any, ended: bool) -> None:
        if iteration < 3:
            raise OSError("No space left on device")
        stages.log(iteration, *of, ended=ended)

    stages.ranks[1].log = full
    for iteration in (1, 2, 3):
        stages.put(0, iteration, a=[1])
    stages.ranks[0].put(4, lambda: 1 / 0)
    stages.put(0, 5, a=[1])
    stages.end()
    assert [iteration for iteration, *_ in stages.logged] == [3, 5]
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "FSSDP: some metrics are not logged: No space left on device",
        "FSSDP: some metrics are not logged: division by zero",
    ]
