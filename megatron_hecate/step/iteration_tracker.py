"""Boundaries of iterations, detected in the layers' forwards.

An iteration is the time between two reductions of gradients: M microbatches, each with one forward
and one backward per layer. M is known only afterwards, so nothing here depends on it:
`megatron.data_parallel` observes when DDP reduces or zeroes gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch.optim.optimizer import Optimizer

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron.global_hooks import listen_to_steps

# Upper bound of successive iterations without an optimizer step that keep their plans: the first
# iteration of a job, and the one repetition of each iteration by Megatron's rerun state machine.
MOST_REPEATED: int = 2


class IterationTracker:
    """Detector of each layer's first forward in a new iteration.

    An iteration ends when weights may change: when DDP has reduced or zeroes gradients, when an
    optimizer steps, or when weights are loaded.

    Args:
        passes: passes of a microbatch through each converted layer of this rank, [L].
        on_begin: callback for the first forward of an iteration.
        drop_unreturned: callback that forgets gradients that wait to return, and returns the names
            of their layers.
        waits_for: predicate: True if gradients of an optimizer's parameters wait to return.
    """

    def __init__(
        self,
        passes: Sequence[int],
        *,
        on_begin: Callable[[], None],
        drop_unreturned: Callable[[], list[str]],
        waits_for: Callable[[Optimizer], bool] = lambda _: True,
    ) -> None:
        self._on_begin = on_begin
        self._drop_unreturned = drop_unreturned
        self._waits_for = waits_for
        # Callbacks before `on_begin`.
        self.listeners: list[Callable[[], None]] = []
        # Microbatches of the last iteration: the best guess for the running one.
        self.microbatches: int | None = None
        self.iteration = 0
        # Last iteration that any layer has entered.
        self._begun = -1
        # Reason of the last iteration's end, for errors.
        self.ended_because = "weights may have changed"
        self._passes = passes
        # Last iteration that each layer has entered.
        self._entered = [-1] * len(passes)
        self._forwards = [0] * len(passes)
        # Each optimizer that has stepped, by its id, with the iteration of its last step.
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self.has_stepped = False
        self._num_unstepped = 0
        self._attempt = Attempt.current()
        listen_to_steps(self)

    def enter(self, layer: int) -> bool:
        """Note the start of a microbatch's forward in ``layer``.

        Not called in evaluation and recomputation.

        Returns:
            True if it is the layer's first forward in a new iteration.
        """
        if self._entered[layer] == self.iteration:
            return False
        self.comes_to(layer)
        self._entered[layer] = self.iteration
        self._forwards[layer] = 0
        return True

    def comes_to(self, layer: int) -> bool:
        """Begin an iteration if the next forward of ``layer`` will do so.

        Returns:
            The next result of `enter`.

        Raises:
            RuntimeError: if the job's default process group has been destroyed since conversion.
        """
        if self.is_in(layer):
            return False
        if self._begun != self.iteration:
            if self._attempt.is_over:
                raise RuntimeError(
                    "FSSDP: the default process group was destroyed after this model was "
                    "converted, and the groups that transfer replicas with it; keep it during a "
                    "rollout (slime: SLIME_DESTROY_WORLD_PROCESS_GROUP=0), or build and convert "
                    "the model again"
                )
            self._begun = self.iteration
            self.microbatches = self.counted_microbatches
            self._forwards = [0] * len(self._passes)
            for listener in self.listeners:
                listener()
            self._on_begin()
            self.has_stepped = False
        return True

    @property
    def counted_microbatches(self) -> int | None:
        """Microbatches since an iteration last began; if zero, the previous iteration's number."""
        counted = zip(self._forwards, self._passes, strict=True)
        return max(forwards // passes for forwards, passes in counted) or self.microbatches

    def is_in(self, layer: int) -> bool:
        """Return whether ``layer`` has entered the running iteration."""
        return self._entered[layer] == self.iteration

    @property
    def all_are_in(self) -> bool:
        """True if every layer has entered the running iteration."""
        return all(entered == self.iteration for entered in self._entered)

    def has_forwarded(self, layer: int) -> bool:
        """Return whether ``layer`` has routed a microbatch since an iteration last began.

        The iteration may have ended since: some loops zero gradients, or step another model's
        optimizer, between a forward and its backward.
        """
        return self._entered[layer] == self._begun and self._forwards[layer] > 0

    def is_within_microbatch(self, layer: int) -> bool:
        """Return whether the next forward of ``layer`` is a further pass of a begun microbatch."""
        return self.forwards(layer) % self._passes[layer] > 0

    def forwarded(self, layer: int) -> None:
        """Count a microbatch whose tokens ``layer`` has routed."""
        self._forwards[layer] += 1

    def forwards(self, layer: int) -> int:
        """Return the number of forwards of ``layer`` in the running iteration."""
        return self._forwards[layer] if self.is_in(layer) else 0

    def weights_changed(self, cause: str = "weights may have changed") -> None:
        """End the iteration: replicas may be out of date."""
        if self._begun == self.iteration:
            self.iteration += 1
            self.ended_because = cause

    def repeats_last(self) -> bool:
        """Return whether the new iteration may repeat the last one: no optimizer stepped between.

        With the same plans a repeated forward and backward, such as by Megatron's rerun state
        machine, is bitwise the same. Steps of an optimizer that is not torch's, or inside a CUDA
        graph, are not observed, so only a few successive iterations count as repetitions. Call it
        once per iteration.
        """
        if self.has_stepped:
            self._num_unstepped = 0
            return False
        self._num_unstepped += 1
        return self._num_unstepped <= MOST_REPEATED

    def before_step(self, optimizer: Optimizer) -> None:
        """End the iteration before a step of ``optimizer``, even if it steps another model.

        Raises:
            RuntimeError: if it steps experts whose replicas' gradients have not returned.
        """
        self._stepped[id(optimizer)] = (weakref.ref(optimizer), self._begun)
        self.has_stepped = True
        self.weights_changed(f"{type(optimizer).__name__} stepped, of this model or of another one")
        if not self._waits_for(optimizer):
            return
        # Drop the gradients, so that a loop which catches the error can continue.
        waiting = self._drop_unreturned()
        if waiting:
            raise RuntimeError(
                f"FSSDP: {type(optimizer).__name__} steps while gradients of replicas wait "
                f"({', '.join(waiting)}): the last backward ran in DDP's no_sync(), and nothing "
                "has reduced gradients since; leave it and call finish_grad_sync() of every model "
                "chunk before the step, as finalize_model_grads does"
            )

    @property
    def has_seen_optimizer(self) -> bool:
        """True if any optimizer has stepped since conversion."""
        return bool(self._stepped)

    def optimizers(self) -> list[Optimizer]:
        """Return the live optimizers that have stepped.

        Sorted by the iteration of the last step, latest first; ties in the order of the first step.
        """
        newest = sorted(self._stepped.values(), key=lambda stepped: -stepped[1])
        return [optimizer for reference, _ in newest if (optimizer := reference()) is not None]
