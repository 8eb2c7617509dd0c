"""Where an iteration begins and ends, seen from the layers.

An iteration is what lies between two optimizer steps: M microbatches, each with one forward and one backward per layer.
No training loop tells a layer where it is, so it is counted here, from calls that happen in every loop, in the same
order on every rank of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch.optim.optimizer import Optimizer

from megatron_hecate.adapter.global_hooks import listen_to_steps


class IterationTracker:
    """Tells each layer when a new iteration begins.

    A layer's replicas are good until the weights change: when an optimizer steps, when weights are loaded, or, because
    a step can be skipped (gradient overflow), when all M microbatches ran and another one starts.

    Args:
        passes: of every converted layer on this rank, how often a microbatch runs it.
        num_microbatches: M of the current iteration, or ``None`` where the training loop does not say.
        on_begin: called when the first layer enters a new iteration.
        on_forwards_done: called when the last layer has routed its last microbatch.
        drop_unreturned: forgets gradients that wait to return; returns (layer name, backward
            passes seen, of how many) of those.
    """

    def __init__(
        self,
        passes: Sequence[int],
        *,
        num_microbatches: Callable[[], int | None],
        on_begin: Callable[[], None],
        on_forwards_done: Callable[[], None],
        drop_unreturned: Callable[[], list[tuple[str, int, int]]],
    ) -> None:
        self._read_num_microbatches = num_microbatches
        self._on_begin, self._on_forwards_done, self._drop_unreturned = on_begin, on_forwards_done, drop_unreturned
        self.listeners: list[Callable[[], None]] = []  # called like `on_begin`, before it
        self.microbatches: int | None = None
        self.iteration = 0  # the one that is running
        self._begun = -1  # the last one that some layer entered
        self._passes = passes
        self._entered = [-1] * len(passes)  # the last one each layer entered
        self._forwards = [0] * len(passes)  # how often each layer ran forward in it
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], int]] = {}  # and in which iteration, last
        self.has_stepped = False  # any, since the last iteration began
        listen_to_steps(self)

    def enter(self, layer: int) -> bool:
        """The forward of a microbatch starts in ``layer``; evaluation and recomputation do not count.

        Returns:
            Whether it is the layer's first in a new iteration.

        Raises:
            RuntimeError: when a new iteration begins while gradients of replicas have not returned.
        """
        if not self.comes_to(layer):
            return False
        self._entered[layer], self._forwards[layer] = self.iteration, 0
        return True

    def comes_to(self, layer: int) -> bool:
        """The forward of a microbatch will enter ``layer``; what `enter` returns will be the same. Raises alike."""
        if self.is_in(layer) and self._is_done(layer):
            self.weights_changed()
        if self.is_in(layer):
            return False
        if self._begun != self.iteration:
            self._check_all_returned("a new iteration begins")
            self._begun = self.iteration
            self.microbatches = self._read_num_microbatches()
            for listener in self.listeners:
                listener()
            self._on_begin()
            self.has_stepped = False
        return True

    def is_in(self, layer: int) -> bool:
        """Whether ``layer`` has entered the running iteration."""
        return self._entered[layer] == self.iteration

    def has_forwarded(self, layer: int) -> bool:
        """Whether ``layer`` has routed a microbatch's tokens in the running iteration."""
        return self.is_in(layer) and self._forwards[layer] > 0

    def is_within_microbatch(self, layer: int) -> bool:
        """Whether the next forward of ``layer`` is a further pass of a microbatch that has begun."""
        return self.is_in(layer) and self._forwards[layer] % self._passes[layer] > 0

    def _is_done(self, layer: int) -> bool:
        return self.microbatches is not None and self._forwards[layer] == self.microbatches * self._passes[layer]

    def forwarded(self, layer: int) -> None:
        """``layer`` has routed the tokens of a microbatch."""
        self._forwards[layer] += 1
        if all(map(self._is_done, range(len(self._passes)))) and set(self._entered) == {self.iteration}:
            self._on_forwards_done()

    def weights_changed(self) -> None:
        """What replicas hold is out of date."""
        self.iteration += 1

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step; whose it is cannot be told, so any counts.

        Raises:
            RuntimeError: when gradients of replicas have not returned.
        """
        self._stepped[id(optimizer)], self.has_stepped = (weakref.ref(optimizer), self._begun), True
        self.weights_changed()
        self._check_all_returned(f"{type(optimizer).__name__} steps")

    def optimizers(self) -> list[Optimizer]:
        """All that have stepped and are there, whose ever they are; one that others took the place of comes after them,
        else they are in the order of their first step."""
        newest = sorted(self._stepped.values(), key=lambda stepped: -stepped[1])
        return [optimizer for reference, _ in newest if (optimizer := reference()) is not None]

    def _check_all_returned(self, event: str) -> None:
        waiting = self._drop_unreturned()  # forgotten, so that a loop which catches the error can go on
        if waiting:
            layers = ", ".join(f"{name} ({count} of {total})" for name, count, total in waiting)
            self.weights_changed()
            raise RuntimeError(
                f"FSSDP: {event} while gradients of replicas wait for the last of {self.microbatches} microbatches; "
                f"backward passes seen: {layers}. Megatron's get_num_microbatches() said {self.microbatches}: every "
                "iteration must run that many training forwards, each with its backward, and nothing else may step or "
                "run a training forward in between."
            )
