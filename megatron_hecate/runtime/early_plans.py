"""Plans of the next iteration, made while the optimizer steps.

The loads of an iteration are summed when its backward has ended. From then on the host waits for the norm of the
gradients and launches the optimizer's kernels; planning releases Python's lock for most of its time, so a thread plans
all layers meanwhile, and works out their transfers. It makes no CUDA call, which would break a capture of CUDA graphs
in the main thread.

Planning is a pure function. The thread guesses its inputs, and a plan is used only where the layer asks with equal
ones: results never depend on how far the thread has come, nor on what it has guessed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.job.attempt import Attempt
from megatron_hecate.plan import CopyCost, Placement, World, plan_replicas
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.load_monitor import LoadMonitor

PAUSE: float = 1e-3  # seconds between two looks at whether the loads have arrived


@dataclasses.dataclass(frozen=True, eq=False)
class PlanInputs:
    """Arguments of `plan_replicas` for one layer."""

    forecast: np.ndarray
    homes: Placement
    world: World
    cost: CopyCost
    previous: Placement | None

    @classmethod
    def of(
        cls, state: LayerState, forecast: np.ndarray, microbatches: int, meter: OverlapMeter
    ) -> PlanInputs:
        """Those of a layer as it stands.

        Args:
            state: of the layer.
            forecast: [E] tokens of an iteration, over the group.
            microbatches: of the iteration.
            meter: what ranks have agreed on about time.
        """
        return cls(
            forecast, state.homes, state.world, state.copy_cost(microbatches, meter), state.planned
        )

    def plan(self) -> Placement:
        """Plan the layer's replicas."""
        return plan_replicas(
            self.forecast, self.homes, self.world, cost=self.cost, previous=self.previous
        )

    def equal(self, other: PlanInputs) -> bool:
        """Whether both give the same plan, because they are the same."""
        return (
            self.homes is other.homes
            and self.previous is other.previous
            and self.world == other.world
            and self.cost == other.cost
            and np.array_equal(self.forecast, other.forecast)
        )


# A layer that the main thread plans itself.
_TAKEN: tuple[None, None] = (None, None)


class EarlyPlans:
    """Plan the layers of one model in a thread, for one iteration at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # of the running thread: by index of the layer, what it has planned or is planning, or `_TAKEN`
        self._plans: dict[int, tuple[PlanInputs | None, Future[Placement] | None]] = {}
        self._stopped = threading.Event()
        Attempt.current().at_end(self.stop)

    def start(
        self,
        states: Sequence[LayerState],
        monitor: LoadMonitor,
        meter: OverlapMeter,
        microbatches: int,
    ) -> None:
        """Plan the next iteration, as it will be if it has as many ``microbatches`` as this one.

        Args:
            states: of all layers, in the order of the forward.
            monitor: has started to sum the loads of this iteration.
            meter: as it is before it gets what was measured in this iteration.
            microbatches: of this iteration.
        """
        self.stop()
        self._plans, self._stopped = {}, threading.Event()
        history, meter = monitor.history.copy(), copy.copy(meter)
        placed = [(state, state.homes, state.planned) for state in states]

        def inputs(load: np.ndarray, measured: list[int]) -> Iterator[tuple[int, PlanInputs]]:
            history.append(load)
            meter.agree(measured)
            forecast = history.forecast()
            assert forecast is not None
            for state, homes, previous in placed:
                of_layer = forecast[state.index, : state.parts.homes_only.num_experts]
                cost = state.copy_cost(microbatches, meter)
                yield state.index, PlanInputs(of_layer, homes, state.world, cost, previous)

        prepare = {state.index: state.prepare_transfers for state in states}
        settings: dict[str, Any] = dict(target=self._plan_all, name="fssdp plans", daemon=True)
        threading.Thread(
            args=(self._plans, self._stopped, monitor.peek(), inputs, prepare), **settings
        ).start()

    def stop(self) -> None:
        """Have the thread end after the layer that it plans; its plans can still be asked for."""
        self._stopped.set()

    def plan(self, index: int, inputs: PlanInputs) -> Placement:
        """The plan of layer ``index`` for ``inputs``: the thread's if it is for the same, else made here."""
        with self._lock:
            theirs, made = self._plans.get(index, _TAKEN)
            self._plans[index] = _TAKEN
        if (
            theirs is None
            or made is None
            or not theirs.equal(inputs)
            or made.exception() is not None
        ):
            # what failed in the thread fails here again, or does not
            return inputs.plan()
        return made.result()

    def _plan_all(
        self,
        plans: dict[int, tuple[PlanInputs | None, Future[Placement] | None]],
        stopped: threading.Event,
        loads: Callable[[], tuple[np.ndarray, list[int]] | None],
        inputs: Callable[[np.ndarray, list[int]], Iterator[tuple[int, PlanInputs]]],
        prepare: Mapping[int, Callable[[Placement], None]],
    ) -> None:
        while (arrived := loads()) is None:
            if stopped.wait(PAUSE):
                return
        for index, of_layer in inputs(*arrived):
            made: Future[Placement] = Future()
            with self._lock:
                if stopped.is_set():
                    return
                if index in plans:
                    continue
                plans[index] = of_layer, made
            try:
                made.set_result(of_layer.plan())
            except BaseException as error:
                # whoever asks for the plan waits for it
                made.set_exception(error)
                continue
            # what goes wrong here goes wrong again where the layer fetches
            with contextlib.suppress(Exception):
                prepare[index](made.result())
