"""Decisions for one layer: of an iteration (`LayerIteration`) and of a forward (`ForwardPass`)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.megatron.training_state import Forward
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.autograd import PendingGradients
from megatron_hecate.replicas.layer_replicas import Replicas

NO_ITERATION: int = -1


@dataclasses.dataclass(slots=True, eq=False)
class LayerIteration:
    """Placement of one layer in one iteration, and the transfers that bring it about.

    Args:
        placement: homes and replicas, late replicas included.
        planned: placement before late replicas.
        number: iteration of the placement; `NO_ITERATION` forces a new one.
        transfers: transfers of this rank that fetch the replicas; ``None`` without replicas.
        replicas: replicas of the next or running forward.
        fetched_epoch: epoch of the weights that were fetched last (`step.clock`); ``None`` before
            the first fetch.
        is_prepared: whether the replicas of the next forward are in flight.
    """

    placement: Placement
    planned: Placement
    number: int = NO_ITERATION
    transfers: TransferPlan | None = None
    replicas: Replicas | None = None
    fetched_epoch: int | None = None
    is_prepared: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward of one layer, from before its router until its combine.

    Args:
        purpose: purpose of the forward.
        replicas: replicas that the forward computes with.
        is_traced: whether spans are recorded.
        joined_homes: pending gradients and the token that autograd sees, if homes were joined to
            their replicas before the attention.
        is_dispatched: whether the tokens have been dispatched.
        is_replayed: whether a graph holds parts of the forward, which began before the attention.
        is_counted: whether the load monitor's sums include its tokens.
        num_tokens: rows of the experts' input, one per token and chosen expert.
    """

    purpose: Forward
    replicas: Replicas | None
    is_traced: bool
    joined_homes: tuple[PendingGradients, Tensor] | None = None
    is_dispatched: bool = False
    is_replayed: bool = False
    is_counted: bool = False
    num_tokens: int = 0
