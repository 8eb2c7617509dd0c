"""Where an iteration begins and ends, seen from the layers.

An iteration is the time between two reductions of gradients: M microbatches, each with one forward and one backward per
layer. M is known afterwards only, so nothing here asks for it: DDP says when gradients are reduced or zeroed
(`adapter.data_parallel`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch.optim.optimizer import Optimizer

from megatron_hecate.megatron.global_hooks import listen_to_steps

# Iterations in a row without an optimizer step that keep their plans: the first one of a job, and the one repetition of
# each that Megatron's rerun state machine runs.
MOST_REPEATED: int = 2


class IterationTracker:
    """Detect the first forward of each layer in a new iteration.

    An iteration ends when weights may change: when DDP has reduced gradients or zeroes them, when an optimizer steps,
    or when weights are loaded.

    Args:
        passes: times that a microbatch runs each converted layer of this rank, [L].
        on_begin: callback for the first forward of an iteration.
        drop_unreturned: forgets gradients that wait to return, and gives the names of their layers.
        waits_for: whether gradients of parameters that an optimizer steps wait to return.
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
        # called like `on_begin`, before it
        self.listeners: list[Callable[[], None]] = []
        # of the last iteration: the best guess for the running one
        self.microbatches: int | None = None
        self.iteration = 0
        # the last iteration that some layer entered, and that each layer entered
        self._begun = -1
        # why the last iteration ended, for errors
        self.ended_because = "weights may have changed"
        self._passes = passes
        self._entered = [-1] * len(passes)
        self._forwards = [0] * len(passes)
        # every optimizer that has stepped, by its id, with the iteration of its last step
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self.has_stepped = False
        self._num_unstepped = 0
        listen_to_steps(self)

    def enter(self, layer: int) -> bool:
        """Note that the forward of a microbatch starts in ``layer``; evaluation and recomputation do not count.

        Returns:
            Whether it is the layer's first in a new iteration.
        """
        if self._entered[layer] == self.iteration:
            return False
        self.comes_to(layer)
        self._entered[layer] = self.iteration
        self._forwards[layer] = 0
        return True

    def comes_to(self, layer: int) -> bool:
        """Begin an iteration if the next forward of ``layer`` does; returns what `enter` will return."""
        if self.is_in(layer):
            return False
        if self._begun != self.iteration:
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
        """Microbatches since an iteration last began, or as many as in the one before while there are none."""
        counted = zip(self._forwards, self._passes, strict=True)
        return max(forwards // passes for forwards, passes in counted) or self.microbatches

    def is_in(self, layer: int) -> bool:
        """Whether ``layer`` has entered the running iteration."""
        return self._entered[layer] == self.iteration

    @property
    def all_are_in(self) -> bool:
        """Whether every layer has."""
        return all(entered == self.iteration for entered in self._entered)

    def has_forwarded(self, layer: int) -> bool:
        """Whether ``layer`` has routed a microbatch's tokens since an iteration last began.

        That one may be over: loops zero gradients, or step another model's optimizer, between a forward and its
        backward.
        """
        return self._entered[layer] == self._begun and self._forwards[layer] > 0

    def is_within_microbatch(self, layer: int) -> bool:
        """Whether the next forward of ``layer`` is a further pass of a microbatch that has begun."""
        return self.forwards(layer) % self._passes[layer] > 0

    def forwarded(self, layer: int) -> None:
        """Note that ``layer`` has routed the tokens of a microbatch."""
        self._forwards[layer] += 1

    def forwards(self, layer: int) -> int:
        """Forwards of ``layer`` in the running iteration."""
        return self._forwards[layer] if self.is_in(layer) else 0

    def weights_changed(self, cause: str = "weights may have changed") -> None:
        """End the iteration: replicas may be out of date."""
        if self._begun == self.iteration:
            self.iteration += 1
            self.ended_because = cause

    def repeats_last(self) -> bool:
        """Whether the iteration that begins may repeat the last one: no optimizer has stepped since.

        With the same plans a repeated forward and backward, as by Megatron's rerun state machine, is
        bitwise the same. Steps of an optimizer that is none of torch's, or inside a CUDA graph, are not
        seen, so only a few iterations in a row count as repetitions. Call it once per iteration.
        """
        if self.has_stepped:
            self._num_unstepped = 0
            return False
        self._num_unstepped += 1
        return self._num_unstepped <= MOST_REPEATED

    def before_step(self, optimizer: Optimizer) -> None:
        """End the iteration: ``optimizer`` is about to step, whatever it steps.

        Raises:
            RuntimeError: when it steps experts whose replicas' gradients have not returned.
        """
        self._stepped[id(optimizer)] = (weakref.ref(optimizer), self._begun)
        self.has_stepped = True
        self.weights_changed(f"{type(optimizer).__name__} stepped, of this model or of another one")
        if not self._waits_for(optimizer):
            return
        # dropped, so that a loop which catches the error can go on
        waiting = self._drop_unreturned()
        if waiting:
            raise RuntimeError(
                f"FSSDP: {type(optimizer).__name__} steps while gradients of replicas wait ({', '.join(waiting)}): "
                "the last backward ran in DDP's no_sync(), and nothing has reduced gradients since; leave "
                "it and call finish_grad_sync() of every model chunk before the step, as finalize_model_grads does"
            )

    @property
    def has_seen_optimizer(self) -> bool:
        """Whether any optimizer has stepped, ever."""
        return bool(self._stepped)

    def optimizers(self) -> list[Optimizer]:
        """All optimizers that have stepped and still exist, those of the latest iteration first, else in the order of
        their first step."""
        newest = sorted(self._stepped.values(), key=lambda stepped: -stepped[1])
        return [optimizer for reference, _ in newest if (optimizer := reference()) is not None]
