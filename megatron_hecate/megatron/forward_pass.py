"""Decisions for one layer: of an iteration (`LayerIteration`) and of a forward (`ForwardPass`)."""

from __future__ import annotations

import dataclasses
import enum

from torch import Tensor

from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.megatron.training_state import Forward
from megatron_hecate.plan import Placement
from megatron_hecate.replicas.autograd import PendingGradients
from megatron_hecate.replicas.layer_replicas import Replicas

# Before the first iteration, 0, and none that it can repeat.
NO_ITERATION: int = -2


@dataclasses.dataclass(slots=True, eq=False)
class LayerIteration:
    """Placement of one layer in one iteration, and the transfers that bring it about.

    Args:
        placement: homes and replicas, late replicas included.
        planned: placement before late replicas.
        iteration: iteration of the placement; `NO_ITERATION` forces a new one.
        transfers: transfers of this rank that fetch the replicas; ``None`` without replicas.
        replicas: replicas of the next or running forward.
        fetched_epoch: epoch of the weights that were fetched last (`step.clock`); ``None`` before
            the first fetch.
        is_prepared: whether the replicas of the next forward are in flight.
    """

    placement: Placement
    planned: Placement
    iteration: int = NO_ITERATION
    transfers: TransferPlan | None = None
    replicas: Replicas | None = None
    fetched_epoch: int | None = None
    is_prepared: bool = False


class Stage(enum.Enum):
    """How far a forward of a layer has come."""

    # Its replicas are chosen.
    BEGUN = enum.auto()
    # Its replicas are chosen, before the attention; a graph replays parts of the forward.
    REPLAYED = enum.auto()
    # Its tokens have been dispatched.
    DISPATCHED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward of one layer, from before its router until its combine.

    Args:
        purpose: purpose of the forward.
        replicas: replicas that the forward computes with.
        joined_homes: pending gradients and the empty tensor that links both in autograd, if homes
            were joined to their replicas before the attention.
        stage: how far it has come.
        is_counted: whether the load monitor's sums include its tokens.
        num_tokens: rows of the experts' input, one per token and chosen expert.
    """

    purpose: Forward
    replicas: Replicas | None
    joined_homes: tuple[PendingGradients, Tensor] | None = None
    stage: Stage = Stage.BEGUN
    is_counted: bool = False
    num_tokens: int = 0
