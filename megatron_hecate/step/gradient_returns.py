"""Timing of the returns of replica gradients to their homes.

Within one call of Megatron's schedule gradients accumulate with the replicas and return with the
last backward, so that the attention's backward hides the transfer. The last backward is
guessed: an extra return is correct, because returns add up, and `GradientReturns.complete` returns
the rest before DDP reduces gradients. In loops without a schedule every backward returns its own
gradients, because the next line may read or change ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from megatron_hecate.megatron.data_parallel import DataParallel
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.step.layer_state import LayerState


class GradientReturns:
    """Decides which backward returns gradients; returns the rest at the end of an iteration.

    Args:
        states: states of all layers, in the order of the forward.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        self.data_parallel: DataParallel | None = None
        # True if gradients waited for the reduction in this iteration.
        self._waited = False
        # Microbatches after which gradients return, if they waited in the last iteration.
        self._expected_microbatches: int | None = None

    def begin_iteration(self, microbatches: int | None) -> None:
        """Expect ``microbatches`` in the new iteration, the number of the last one.

        Not called for an iteration that repeats the last one.
        """
        self._expected_microbatches = microbatches if self._waited else None
        self._waited = False

    def is_last(self, state: LayerState, microbatches: int) -> bool:
        """Return whether gradients of a layer return with the running backward.

        Where the schedule aligns stages with ``grad_sync_func``, most stages do not know which
        backward is the last: the iteration is then expected to have the length of the last one.

        Args:
            state: state of the layer.
            microbatches: backwards of the layer in this iteration, the running one included.
        """
        if self.data_parallel is None or not state.in_schedule:
            return True
        wants_gradients = self.data_parallel.wants_gradients(state.chunk)
        if wants_gradients is False and microbatches == self._expected_microbatches:
            self._waited = True
            return True
        return wants_gradients is not False

    def complete(self, chunk: int | None = None) -> None:
        """Return waiting gradients of ``chunk``, or of all chunks, and wait for the transfers.

        Collective: every rank calls it at the same point.
        """
        waiting = self._waiting(chunk)
        if waiting:
            self._waited = True
        started = [replicas.return_waiting() for replicas in reversed(waiting)]
        for pending in started:
            pending.arrive()

    def _waiting(self, chunk: int | None = None) -> list[Replicas]:
        """Return the replicas of ``chunk``, or of all chunks, whose gradients wait."""
        return [
            state.current.replicas
            for state in self._states
            if chunk in (None, state.chunk)
            and state.current.replicas is not None
            and state.current.replicas.is_accumulating
        ]

    def drop(self) -> list[str]:
        """Forget waiting gradients, and return the names of their layers."""
        waiting = self._waiting()
        for replicas in waiting:
            replicas.drop_waiting()
        return [replicas.label for replicas in waiting]

    def wait_for(self, optimizer: Optimizer) -> bool:
        """Return whether gradients of experts that ``optimizer`` steps wait to return.

        The optimizer may step the experts' parameters, their main parameters, or shards of them.
        """
        if not self._waiting():
            return False
        parameters: list[Parameter] = []
        for state in self._states:
            parameters += chain.from_iterable(state.parts.experts.homes())
        main = [p.main_param for p in parameters if getattr(p, "main_param", None) is not None]
        owned = {id(p) for p in (*parameters, *main)}
        # A distributed optimizer may step shards, which are views of the parameters' memory.
        memory = {p.untyped_storage().data_ptr() for p in parameters}
        stepped = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return any(id(p) in owned or p.untyped_storage().data_ptr() in memory for p in stepped)
