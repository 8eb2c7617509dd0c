"""When gradients of replicas return to their homes.

Within one call of Megatron's schedule they add up with the replicas, and return with the last backward, so
that the attention's backward hides the transfer. Which backward is the last is a hint: a return too many
is right, as returns add up, and `GradientReturns.complete` returns the rest before DDP reduces gradients.
In loops without a schedule every backward returns its own: the next line may read or change ``main_grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from megatron_hecate.megatron.data_parallel import DataParallel
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.runtime.layer_state import LayerState


class GradientReturns:
    """Decide which backward returns gradients, and return what is left at the end of an iteration.

    Args:
        states: of all layers, in the order of the forward.
        chunk_of: index of the model chunk of each.
    """

    def __init__(self, states: Sequence[LayerState], chunk_of: Sequence[int]) -> None:
        self._states = states
        self._chunk_of = chunk_of
        self.data_parallel: DataParallel | None = None
        # of any layer, while a backward may need them
        self.live: weakref.WeakSet[Replicas] = weakref.WeakSet()
        # whether gradients waited for the reduction in the last iteration, and do so in this one
        self._guesses = False
        self._waited = False
        self._expected_microbatches: int | None = None

    def begin_iteration(self, microbatches: int | None) -> None:
        """Expect as many ``microbatches`` as in the last iteration; not called where that one is repeated."""
        self._guesses = self._waited
        self._waited = False
        self._expected_microbatches = microbatches

    def is_last(self, state: LayerState, microbatches: int) -> bool:
        """Whether gradients of a layer return with the running backward.

        Where the schedule aligns stages with ``grad_sync_func``, most stages do not know which backward
        is the last: the iteration is then expected to be as long as the one before.

        Args:
            state: of the layer.
            microbatches: backwards of the layer in this iteration, with the running one.
        """
        if self.data_parallel is None or not state.in_schedule:
            return True
        wanted = self.data_parallel.wants_gradients(self._chunk_of[state.index])
        if wanted is False and self._guesses and microbatches == self._expected_microbatches:
            self._waited = True
            return True
        return wanted is not False

    def complete(self, chunk: int | None = None) -> None:
        """Return gradients that wait, of ``chunk`` or of all, and await them. Every rank calls it at the same point."""
        waiting = [
            state.replicas
            for state in reversed(self._states)
            if chunk in (None, self._chunk_of[state.index])
            and state.replicas is not None
            and state.replicas.unreturned
        ]
        if waiting:
            self._waited = True
        started = [replicas.return_waiting() for replicas in waiting]
        for pending in started:
            pending.arrive()

    def drop(self) -> list[str]:
        """Forget gradients that wait; returns the names of their layers."""
        waiting = [replicas for replicas in self.live if replicas.unreturned]
        for replicas in waiting:
            replicas.drop_unreturned()
        return sorted(replicas.label for replicas in waiting)

    def wait_for(self, optimizer: Optimizer) -> bool:
        """Whether gradients wait, and ``optimizer`` steps experts of this model, their main parameters, or shards."""
        if not any(replicas.unreturned for replicas in self.live):
            return False
        own = [
            p for state in self._states for expert in state.parts.experts.homes() for p in expert
        ]
        main = [p.main_param for p in own if getattr(p, "main_param", None) is not None]
        owned = {id(p) for p in (*own, *main)}
        memory = {p.untyped_storage().data_ptr() for p in own}
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        return any(id(p) in owned or p.untyped_storage().data_ptr() in memory for p in stepped)
