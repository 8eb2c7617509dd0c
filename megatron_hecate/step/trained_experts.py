"""Agreement of a group's ranks on which experts are trained and which are frozen.

A replica of a frozen expert returns no gradients, so sender and receiver must know. The sum of an
iteration's loads includes the number of frozen parameters. If that number is 0, all experts count
as trained in the next iteration: an expert that was frozen meanwhile drops the gradients of its
replicas. Otherwise the ranks exchange ``requires_grad`` of all parameters where the next iteration
begins, so that an unfrozen expert gets gradients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from megatron_hecate.replicas.trained_parts import TrainedParts
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.load_monitor import GroupSum


class TrainedExperts:
    """Trained parameters of all layers' experts, on all ranks of the FSSDP group.

    Args:
        states: states of all layers, whose groups have the same ranks.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        self._group = states[0].group
        # Submodule and attribute of each parameter of this rank's experts, for all layers: kept,
        # because they are looked up in every iteration. And the number of parameters per layer.
        owners = [state.parts.experts.owners for state in states]
        self._owners = list(chain.from_iterable(owners))
        self._sizes = list(map(len, owners))
        # ``requires_grad`` of all ranks' parameters, [R * (sum of sizes)], while in flight.
        self._exchanged: GroupSum | None = None
        self._stream: torch.cuda.Stream | None = None
        # By layer; ``None``: all are trained.
        self._layers: list[TrainedParts] | None = None

    def count_frozen(self) -> int:
        """Return the number of frozen parameters of this rank's experts."""
        return self._requires_grad().count(False)

    def _requires_grad(self) -> list[bool]:
        return [module._parameters[name].requires_grad for module, name in self._owners]

    def begin_iteration(self, num_frozen: int | None) -> None:
        """Start to exchange the trained parameters, unless all are trained.

        Collective if ``num_frozen`` is not 0, and where homes move.

        Args:
            num_frozen: frozen parameters of all ranks in the last iteration; ``None`` if unknown.

        Raises:
            ValueError: on all ranks, if homes move and some experts are frozen.
        """
        self._exchanged = self._layers = None
        config = self._states[0].config
        if not config.rehome and (num_frozen == 0 or not config.slots):
            return
        flags = torch.zeros((self._group.size(), sum(self._sizes)), dtype=torch.int64)
        flags[self._group.rank()] = torch.tensor(self._requires_grad())
        device = self._states[0].parts.experts.home(0)[0].device
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream()
            flags = flags.pin_memory().to(device, non_blocking=True)
        self._exchanged = GroupSum(
            flags,
            self._group,
            timeout=config.timeout,
            stream=self._stream,
            what="frozen parameters",
        )
        if config.rehome:
            self._check_movable()

    def of_layer(self, index: int) -> TrainedParts | None:
        """Return the trained parameters of layer ``index``; ``None`` if all are trained.

        Raises:
            ValueError: on all ranks, for a mixture that a layer's GEMMs cannot compute.
        """
        if self._exchanged is not None:
            flags = self._exchanged.read().astype(bool)
            self._exchanged = None
            if not flags.all():
                self._layers = self._split(flags)
        return None if self._layers is None else self._layers[index]

    def _check_movable(self) -> None:
        """Check that experts can change homes: the same parameters of all are trained."""
        for state in self._states:
            trained = self.of_layer(state.index)
            if trained is not None and (trained.flags != trained.flags[:1, :1]).any():
                raise ValueError(
                    f"{state.name}: some experts are frozen, and an expert that moved to their "
                    "place would not be trained; leave --moe-fssdp-rehome out, or freeze all"
                )

    def _split(self, flags: np.ndarray) -> list[TrainedParts]:
        """Split ``flags`` [R, sum of sizes] by layer."""
        layers: list[TrainedParts] = []
        ends = np.cumsum(self._sizes)
        for state, part in zip(self._states, np.split(flags, ends[:-1], axis=1), strict=True):
            experts = state.parts.experts
            shape = (len(part), experts.num_homes, -1)
            trained = TrainedParts.check(
                part.reshape(shape),
                experts.layout,
                delays=experts.delayed is not None,
                label=state.name,
            )
            layers.append(trained)
        return layers
