"""The clock of a model: its iterations, and the epochs of its weights.

An iteration is the time between two reductions of gradients: M microbatches, each with one forward
and one backward per layer. M is known only afterwards, so nothing here depends on it. `detect`
tells the clock what it infers from Megatron; a loop may say so itself, by
`megatron_hecate.iteration_begins` and `megatron_hecate.weights_changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron.events import StepEvents

# Upper bound of successive iterations without an optimizer step that keep their plans: the first
# iteration of a job, and the one repetition of each iteration by Megatron's rerun state machine.
MOST_REPEATED: int = 2


class Clock:
    """The one count of a model's iterations on this rank, and of changes of its weights.

    Args:
        passes: passes of a microbatch through each converted layer of this rank, [L].
        num_chunks: number of model chunks of this rank.
        read_number: returns the number of the running iteration in the job's log, ``None`` where
            there is no such number.
    """

    def __init__(
        self,
        passes: Sequence[int],
        *,
        num_chunks: int = 1,
        read_number: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._passes = passes
        self._read_number = read_number
        # Called in this order where an iteration begins, and where its gradients are reduced.
        self.listeners: list[StepEvents] = []
        # Iterations that have ended.
        self.iteration = 0
        # For each model chunk, a number that grows whenever weights may have changed. Replicas of
        # an older epoch are fetched again.
        self.epochs = [0] * num_chunks
        # Number of the running iteration in the job's log.
        self.log_number = 0
        # Last iteration that has begun.
        self.begun = -1
        # Reason of the last iteration's end, for errors.
        self.ended_because = "weights may have changed"
        # Microbatches of the last iteration: the best guess for the running one.
        self.microbatches: int | None = None
        # True if an optimizer has stepped since the last iteration began.
        self.has_stepped = False
        # True if the loop says where its iterations begin.
        self.is_told = False
        # Successive iterations without an optimizer step.
        self._num_unstepped = 0
        # Last iteration that each layer has entered, and its forwards there.
        self._entered = [-1] * len(passes)
        self._forwards = [0] * len(passes)
        self._attempt = Attempt.current()

    def enter(self, layer: int) -> bool:
        """Note the start of a microbatch's forward in ``layer``.

        Not called in evaluation and recomputation.

        Returns:
            True if it is the layer's first forward in a new iteration.
        """
        if self.is_in(layer):
            return False
        self.begin()
        self._entered[layer] = self.iteration
        return True

    def begin(self) -> None:
        """Begin an iteration before a forward, unless one is running.

        Raises:
            RuntimeError: if the job's default process group has been destroyed since conversion.
        """
        if self.begun == self.iteration:
            return
        if self._attempt.is_over:
            raise RuntimeError(
                "FSSDP: the default process group was destroyed after this model was "
                "converted, and the groups that transfer replicas with it; keep it during a "
                "rollout (slime: SLIME_DESTROY_WORLD_PROCESS_GROUP=0), or build and convert "
                "the model again"
            )
        self.begun = self.iteration
        self.microbatches = self.counted_microbatches
        self._num_unstepped = 0 if self.has_stepped else self._num_unstepped + 1
        self.log_number = self._read_number() or self.log_number + 1
        self._forwards = [0] * len(self._passes)
        try:
            for listener in self.listeners:
                listener.iteration_begins(self.log_number)
        except BaseException:
            # A loop that catches the error begins another iteration.
            self.end_iteration()
            raise
        # Listeners read it: homes move only after a step.
        self.has_stepped = False

    @property
    def is_repeated(self) -> bool:
        """True if the running iteration may repeat the last one: no optimizer stepped between.

        With the same plans a repeated forward and backward, such as by Megatron's rerun state
        machine, is bitwise the same. Steps of an optimizer that is not torch's, or inside a CUDA
        graph, are not observed, so only a few successive iterations count as repetitions.
        """
        return 0 < self._num_unstepped <= MOST_REPEATED

    @property
    def counted_microbatches(self) -> int | None:
        """Microbatches since an iteration last began; if zero, the previous iteration's number."""
        counted = zip(self._forwards, self._passes, strict=True)
        return max(forwards // passes for forwards, passes in counted) or self.microbatches

    def is_in(self, layer: int) -> bool:
        """Return whether ``layer`` has entered the running iteration."""
        return self._entered[layer] == self.iteration

    def has_forwarded(self, layer: int) -> bool:
        """Return whether ``layer`` has routed a microbatch since an iteration last began.

        The iteration may have ended since: some loops zero gradients, or step another model's
        optimizer, between a forward and its backward.
        """
        return self._entered[layer] == self.begun and self._forwards[layer] > 0

    def is_within_microbatch(self, layer: int) -> bool:
        """Return whether the next forward of ``layer`` is a further pass of a begun microbatch."""
        return self.forwards(layer) % self._passes[layer] > 0

    def forwarded(self, layer: int) -> None:
        """Count a microbatch whose tokens ``layer`` has routed."""
        self._forwards[layer] += 1

    def forwards(self, layer: int) -> int:
        """Return the number of forwards of ``layer`` in the running iteration."""
        return self._forwards[layer] if self.is_in(layer) else 0

    def weights_changed(self, chunk: int | None = None) -> None:
        """Begin another epoch of the weights: the next forwards fetch replicas again.

        Args:
            chunk: index of the model chunk; ``None`` for all of them.
        """
        for index in range(len(self.epochs)) if chunk is None else (chunk,):
            self.epochs[index] += 1

    def end_iteration(self, cause: str = "weights may have changed") -> None:
        """End the iteration, if one has begun; the next forward begins another one.

        Args:
            cause: what happened, for errors of a later backward.
        """
        if self.begun == self.iteration:
            self.iteration += 1
            self.ended_because = cause
            self.weights_changed()

    def gradients_reduced(self) -> None:
        """End the iteration after DDP has reduced its gradients."""
        for listener in self.listeners:
            listener.gradients_reduced()
        self.end_iteration("DDP reduced gradients")
