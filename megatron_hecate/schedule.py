"""Where an iteration begins and ends, seen from the layers.

An iteration is what lies between two optimizer steps: M microbatches, each with one forward and one backward per layer.
No training loop tells a layer where it is, so it is counted here, from calls that happen in every loop, in the same
order on every rank of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class IterationClock:
    """Tells each layer when a new iteration begins.

    A layer's guests are good until the weights change: when an optimizer steps, when weights are loaded, or, because a
    step can be skipped (gradient overflow), when all M microbatches ran and another one starts.

    Args:
        num_layers: converted layers on this rank.
        num_microbatches: M of the current iteration, or ``None`` where the training loop does not say.
        on_begin: called when the first layer enters a new iteration.
        on_forwards_done: called when the last layer starts the forward of its last microbatch.
        unsent: (layer name, microbatches) of every layer with gradients that wait to be sent home.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_microbatches: Callable[[], int | None],
        on_begin: Callable[[], None],
        on_forwards_done: Callable[[], None],
        unsent: Callable[[], list[tuple[str, int]]],
    ) -> None:
        self._read_num_microbatches = num_microbatches
        self._on_begin, self._on_forwards_done, self._unsent = on_begin, on_forwards_done, unsent
        self.microbatches: int | None = None
        self._iteration = 0  # the one that is running
        self._begun = -1  # the last one that some layer entered
        self._entered = [-1] * num_layers  # the last one each layer entered
        self._forwards = [0] * num_layers  # microbatches each layer forwarded in it
        _call_before_step(self)

    def enter(self, layer: int, *, counts: bool) -> bool:
        """A forward of ``layer`` starts.

        Args:
            layer: index on this rank.
            counts: whether it is a microbatch's own training forward: no evaluation, no recomputation.

        Returns:
            Whether this is the layer's first forward in a new iteration.
        """
        current = self._entered[layer] == self._iteration
        if counts and current and self._forwards[layer] == self.microbatches:
            self.weights_changed()
        begins = self._entered[layer] != self._iteration
        if begins:
            self._entered[layer], self._forwards[layer] = self._iteration, 0
            if self._begun != self._iteration:
                self._begun = self._iteration
                self.microbatches = self._read_num_microbatches()
                self._on_begin()
        return begins

    def forwarded(self, layer: int) -> None:
        """A counted forward of ``layer`` has routed its tokens."""
        self._forwards[layer] += 1
        if all(n == self.microbatches for n in self._forwards) and set(self._entered) == {self._iteration}:
            self._on_forwards_done()

    def weights_changed(self) -> None:
        """What guests hold is out of date."""
        self._iteration += 1

    def before_step(self) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: when gradients of guests have not come home.
        """
        waiting = self._unsent()
        if waiting:
            layers = ", ".join(f"{name} ({count} of {self.microbatches})" for name, count in waiting)
            raise RuntimeError(
                f"FSSDP: the optimizer steps while gradients of guests wait for the last of {self.microbatches} "
                f"microbatches; backward passes seen: {layers}. Megatron's microbatch calculator says "
                f"{self.microbatches}, the loop ran fewer: let get_num_microbatches() return the loop's number."
            )
        self.weights_changed()


def _call_before_step(clock: IterationClock) -> None:
    reference = weakref.ref(clock)

    def hook(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if (alive := reference()) is not None:
            alive.before_step()

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(clock, handle.remove)
