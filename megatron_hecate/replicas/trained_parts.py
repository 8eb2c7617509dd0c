"""Parameters of a layer's experts that are trained and not frozen, on all ranks of its group."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_hecate.comm.transport import Copy, TransferPlan
from megatron_hecate.replicas.chunk_layout import ChunkLayout


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedParts:
    """Parameters that get gradients, equal on all ranks of the FSSDP group.

    Args:
        flags: one flag per rank, own expert and parameter, [R, H, parts] bool.
    """

    flags: np.ndarray

    @classmethod
    def check(
        cls, requires_grad: np.ndarray, layout: ChunkLayout, *, delays: bool, label: str
    ) -> TrainedParts:
        """Make the flags from ``requires_grad`` of all parameters, [R, H, parts] bool.

        Args:
            requires_grad: flags of the parameters.
            layout: layout of an expert's parameters.
            delays: whether weight gradients are computed after the backward.
            label: name of the layer, for errors.

        Raises:
            ValueError: if some parameters are frozen, where the experts' GEMMs compute all
                gradients or none.
        """
        is_mixed = requires_grad.any() and not requires_grad.all()
        if is_mixed and layout.is_grouped:
            if (requires_grad != requires_grad[..., :1]).any():
                raise ValueError(
                    f"{label}: some parameters of an expert are frozen and others are not; a "
                    "grouped GEMM computes gradients of all or none: freeze whole experts, or set "
                    "model.moe_grouped_gemm=false or leave out --moe-grouped-gemm"
                )
            if layout.fuses_any or layout.uniform or delays:
                count = int((~requires_grad).any(axis=-1).sum())
                experts = requires_grad.shape[0] * requires_grad.shape[1]
                raise ValueError(
                    f"{label}: {count} of {experts} experts are frozen, but grouped GEMMs with "
                    "fused or delayed weight gradients compute those of all experts or none; "
                    "freeze all experts, or set model.gradient_accumulation_fusion=false, "
                    "model.use_transformer_engine_op_fuser=false and "
                    "model.delay_wgrad_compute=false, or use --no-gradient-accumulation-fusion, "
                    "and neither --use-transformer-engine-op-fuser nor --delay-wgrad-compute"
                )
        first = requires_grad[:, :1]
        if is_mixed and layout.is_grouped and layout.has_biases:
            is_lost = requires_grad.any(axis=(1, 2)) & ~first.any(axis=(1, 2))
            if is_lost.any():
                rank = int(is_lost.argmax())
                raise ValueError(
                    f"{label}: the first expert of rank {rank} (in its expert-parallel group) is "
                    "frozen and others of this rank are not: a grouped GEMM computes no weight "
                    "gradients then, but some of biases; freeze other experts, or set "
                    "model.add_bias_linear=false or use --disable-bias-linear"
                )
        return cls(apply_group_rule(requires_grad, layout))

    @property
    def is_any_trained(self) -> bool:
        """True if any parameter is trained."""
        return bool(self.flags.any())

    def of_copy(self, copy: Copy) -> list[bool]:
        """Return the flags of a replica's parameters."""
        return self.flags[copy.home, copy.index].tolist()

    def returned(self, transfers: TransferPlan) -> TransferPlan:
        """Return the part of ``transfers`` that returns gradients: replicas of trained experts."""
        is_returned = self.flags.any(axis=-1)
        copies = (copy for copy in transfers.copies if is_returned[copy.home, copy.index])
        return TransferPlan(transfers.rank, tuple(copies))


def apply_group_rule(requires_grad: np.ndarray, layout: ChunkLayout) -> np.ndarray:
    """Return which parameters get gradients, from ``requires_grad`` [..., H, parts].

    TransformerEngine's grouped GEMM computes no gradients if its first weight is frozen. If its
    gradients are fused and the first weight is trained, it computes those of frozen weights, too.
    """
    if not layout.is_grouped:
        return requires_grad
    first = requires_grad[..., :1, :]
    return np.where(layout.fused, first, requires_grad & first)
