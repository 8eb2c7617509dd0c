"""Agreement of a group's ranks on which layers train their experts.

Replicas compute and return gradients, unless the experts of a layer are frozen on all ranks. A home
that is frozen drops the gradients of its replicas. The sum of an iteration's loads includes the
number of frozen parameters. If that number is 0, all layers count as trained in the next iteration.
Otherwise the ranks exchange ``requires_grad`` of all parameters where the next iteration begins, so
that an unfrozen expert gets gradients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.load_monitor import GroupSum


class TrainedExperts:
    """Layers whose experts are trained on any rank of the FSSDP group.

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
        # By layer, in this iteration.
        self._are_trained = [True] * len(states)

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
        self._exchanged = None
        self._are_trained = [True] * len(self._states)
        config = self._states[0].config
        if not config.rehome and (num_frozen == 0 or not config.slots):
            return
        flags = torch.zeros((self._group.size(), sum(self._sizes)), dtype=torch.int64)
        flags[self._group.rank()] = torch.tensor(self._requires_grad())
        device = self._states[0].parts.experts.first[0].device
        if device.type == "cuda":
            flags = flags.pin_memory().to(device, non_blocking=True)
        self._exchanged = GroupSum(
            flags, self._group, timeout=config.timeout, what="frozen parameters"
        )
        if config.rehome:
            # Read at once, so that the error comes before any forward.
            self.is_trained(0)

    def is_trained(self, index: int) -> bool:
        """Return whether experts of layer ``index`` are trained, on any rank.

        Raises:
            ValueError: on all ranks, for a mixture that a layer's GEMMs cannot compute.
        """
        if self._exchanged is not None:
            flags = self._exchanged.read().astype(bool)
            self._exchanged = None
            if not flags.all():
                self._are_trained = self._check(flags)
        return self._are_trained[index]

    def _check(self, flags: np.ndarray) -> list[bool]:
        """Check ``requires_grad`` of all ranks' parameters, [R, sum of sizes]; see `is_trained`."""
        are_trained: list[bool] = []
        ends = np.cumsum(self._sizes)
        for state, part in zip(self._states, np.split(flags, ends[:-1], axis=1), strict=True):
            experts = state.parts.experts
            requires_grad = part.reshape(len(part), experts.num_homes, -1)
            if state.config.rehome and (requires_grad != requires_grad[:1, :1]).any():
                raise ValueError(
                    f"{state.name}: some experts are frozen, and an expert that moved to their "
                    "place would not be trained; leave --moe-fssdp-rehome out, or freeze all"
                )
            if experts.layout.is_grouped and requires_grad.any() and not requires_grad.all():
                _check_grouped(state, requires_grad)
            are_trained.append(bool(experts.layout.computed(requires_grad).any()))
        return are_trained


def _check_grouped(state: LayerState, requires_grad: np.ndarray) -> None:
    """Check a mixture of trained and frozen parameters, [R, H, parts], of grouped GEMMs."""
    experts = state.parts.experts
    layout = experts.layout
    if (requires_grad != requires_grad[..., :1]).any():
        raise ValueError(
            f"{state.name}: some parameters of an expert are frozen and others are not; a grouped "
            "GEMM computes gradients of all or none: freeze whole experts, or set "
            "model.moe_grouped_gemm=false or leave out --moe-grouped-gemm"
        )
    is_frozen = ~requires_grad.any(axis=-1)
    if layout.fuses_any or layout.uniform or experts.delayed is not None:
        raise ValueError(
            f"{state.name}: {is_frozen.sum()} of {is_frozen.size} experts are frozen, but grouped "
            "GEMMs with fused or delayed weight gradients compute those of all experts or none; "
            "freeze all experts, or set model.gradient_accumulation_fusion=false, "
            "model.use_transformer_engine_op_fuser=false and model.delay_wgrad_compute=false, or "
            "use --no-gradient-accumulation-fusion, and neither --use-transformer-engine-op-fuser "
            "nor --delay-wgrad-compute"
        )
    is_lost = is_frozen[:, 0] & ~is_frozen.all(axis=1)
    if layout.has_biases and is_lost.any():
        raise ValueError(
            f"{state.name}: the first expert of rank {is_lost.argmax()} (in its expert-parallel "
            "group) is frozen and others of this rank are not: a grouped GEMM computes no weight "
            "gradients then, but some of biases; freeze other experts, or set "
            "model.add_bias_linear=false or use --disable-bias-linear"
        )
