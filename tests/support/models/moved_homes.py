"""Other homes are found at each look, whatever the loads are: for tests of what becomes of models whose homes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from megatron_hecate.homes.exchange import Relocation
from megatron_hecate.homes.planner import Choice, HomeAssignment, HomeSearch


def wanted_at(look: int, num_experts: int) -> np.ndarray:
    """[E] the order of homes from a look on: another one each time, in which experts of all ranks change places."""
    return np.random.default_rng(look).permutation(num_experts)


received_bytes = 0  # by this process, in all moves


class _Counted(Relocation):
    def exchange(self) -> None:
        global received_bytes
        super().exchange()
        received_bytes += self._received.nbytes


def find(orders: Callable[[int, int], np.ndarray] = wanted_at) -> None:
    """From here on each look of this process finds what ``orders`` gives, for 100 times the layer plus the look."""
    from megatron_hecate.homes import mover, schedule

    looks = 0

    class Wanted(HomeSearch):
        def choose(
            self, load: np.ndarray, order: np.ndarray, layers: Iterable[int]
        ) -> list[Choice]:
            nonlocal looks
            looks += 1
            assert load.sum() > 0
            return [
                Choice(layer, orders(looks + 100 * layer, order.shape[1]), 1.0) for layer in layers
            ]

        def afford(self, choices: Iterable[Choice], order: np.ndarray) -> HomeAssignment:
            found = {choice.layer: choice.order for choice in choices}
            return HomeAssignment(
                order=np.stack([found[i] for i in range(len(order))]), num_bytes=1.0, saved=1.0
            )

    schedule.HomeSearch = Wanted
    mover.Relocation = _Counted


def are_moved(chunks: list) -> bool:
    """Whether experts of a converted model are elsewhere."""
    import tiny_gpt

    layer = tiny_gpt.moe_layers(chunks)[0]
    rehoming = hasattr(layer, "fssdp") and layer.prefetcher.rehoming
    return bool(rehoming and rehoming.homes.are_moved)
