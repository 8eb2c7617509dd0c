"""Metrics of all pipeline stages reach the job's last rank, and training waits for none of it."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.record import job_metrics
from megatron_hecate.record.job_metrics import JobMetrics


class _Board:
    """In the place of TensorBoard's writer."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.values.setdefault(iteration, {})[name] = value

    def flush(self) -> None:
        pass


def _script(every: int) -> _Board:
    """As in a script of ``megatron.training``: its arguments on all ranks, its writer on the last one."""
    board, names = _Board(), types.ModuleType("megatron.training.global_vars")
    names._GLOBAL_ARGS = types.SimpleNamespace(
        tensorboard_dir="board", tensorboard_log_interval=every, moe_per_layer_logging=True
    )
    names.get_tensorboard_writer = lambda: (
        board if dist.get_rank() == dist.get_world_size() - 1 else None
    )
    names.get_wandb_writer = lambda: None
    sys.modules[names.__name__] = names
    return board


LAYOUTS = {
    "last stage dense": dict(pp=2, settings=(("moe_layer_freq", [1, 0]),)),
    "interleaved, uneven": dict(pp=2, vpp=2, settings=(("moe_layer_freq", [0, 1, 1, 1]),)),
}


@pytest.mark.parametrize(
    ("layout", "observe"),
    [
        ("last stage dense", True),
        ("interleaved, uneven", False),
    ],
)
@ranks(4)
def test_what_is_logged_is_of_all_stages(layout: str, observe: bool) -> None:
    """Oracle: the tokens that routers choose and that the experts of each rank are given, counted beside the run."""
    import tiny_gpt
    import torch

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(ep=2, accumulate=2, skew=3, **LAYOUTS[layout])
    tiny_gpt.initialize(case)
    board, folder = _script(every=2), os.environ["TEST_FOLDER"] + "/run"
    counts = torch.zeros(
        5, 5, 8 + 2, dtype=torch.int64
    )  # [T, layer's number]: tokens by expert, by rank computed
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
    for step in range(5):
        run.step(step)
    for layer in tiny_gpt.moe_layers(run.chunks)[:1]:
        (
            layer.router.observer.stage if observe else layer.prefetcher.monitor.recorder.stage
        ).close()
    JobMetrics.newest.stop(20)
    assert not JobMetrics.newest.is_alive()
    dist.all_reduce(counts)
    if dist.get_rank() < 3:
        assert not board.values
        return
    assert list(board.values) == [2, 4], "in order"
    numbers = [number for number in range(5) if counts[:, number].any()]
    assert len(numbers) == (3 if case.vpp else 1)
    for iteration, found in board.values.items():
        expert, rank = np.split(counts[iteration - 1, numbers].double().numpy(), [8], axis=1)
        factor, vio = (
            rank.max(axis=1) / rank.mean(axis=1),
            expert.max(axis=1) / expert.mean(axis=1) - 1,
        )
        stages = [
            rank[[number % 2 == 1 for number in numbers]],
            rank[[number % 2 == 0 for number in numbers]],
        ]
        fullest = [
            stage.sum(axis=0).max() / stage.sum(axis=0).mean() for stage in stages if len(stage)
        ]
        expected = {
            "moe/avg_overload_factor": factor.mean(),
            "moe/max_overload_factor": factor.max(),
            "moe/max_cum_overload_factor": max(fullest),
            "moe/max_vio": vio.mean(),
            "moe/dead_experts": (expert == 0).sum(),
            **{f"moe/max_vio_layer_{number - 1}": vio[i] for i, number in enumerate(numbers)},
            **{
                f"moe/overload_factor_layer_{number - 1}": factor[i]
                for i, number in enumerate(numbers)
            },
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected), iteration
        names = {name.rpartition("_")[2] for name in found if name.startswith("moe/max_vio_layer_")}
        assert names == {str(number - 1) for number in numbers}
        assert ("fssdp/replicas" in found) is not observe


@ranks(2)
def test_a_stage_whose_metrics_do_not_come_delays_nobody() -> None:
    """The thread of the first stage hangs until both stages have trained: who waited for it would not come that far.
    Then everything is logged, in order. Training threads do not use the store. Oracle: a barrier of theirs."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    case = tiny_gpt.Case(ep=1, pp=2)
    tiny_gpt.initialize(case)
    board, trained, hung = _script(every=1), threading.Event(), threading.Event()

    def hook(chunks: list) -> list:
        chunks = fssdp(HecateConfig(observe=True, record=os.environ["TEST_FOLDER"] + "/run"))(
            chunks
        )
        JobMetrics.newest._store = _NotOfTraining(JobMetrics.newest._store)
        if dist.get_rank() == 0:
            send = JobMetrics.newest._send

            def hang(*message: Any) -> bool:
                hung.set()
                assert trained.wait(60)
                return send(*message)

            JobMetrics.newest._send = hang
        return chunks

    run = tiny_gpt.train(case, steps=4, hook=hook)
    if dist.get_rank() == 0:
        assert hung.wait(60)
    dist.barrier()
    assert not board.values
    trained.set()
    tiny_gpt.moe_layers(run.chunks)[0].router.observer.stage.close()
    JobMetrics.newest.stop(20)
    dist.barrier()
    assert list(board.values) == ([1, 2, 3, 4] if dist.get_rank() == 1 else [])


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
        monkeypatch.setattr(job_metrics.training_log, "logging_pipeline", lambda: [0, 1])
        monkeypatch.setattr(job_metrics.training_log, "log_interval", lambda: every)
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
