"""What is decided for one layer: for an iteration (`LayerIteration`), and for one of its forwards (`ForwardPass`)."""

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
    """The plan of one layer in one iteration, and how far its execution has come.

    Args:
        placement: of homes and replicas, late replicas included.
        planned: the same before late replicas.
        number: of the iteration it was planned in; `NO_ITERATION` has it planned anew.
        plan: transfers of this rank that fetch the replicas; ``None`` without any.
        replicas: of the coming or running forward.
        fetched_weights: number of the homes' weights that were fetched last, see `Prefetcher`;
            ``None`` before the first fetch.
        is_prepared: whether the next forward has its replicas on their way.
        expects_late: whether the next forward may fetch late replicas.
    """

    placement: Placement
    planned: Placement
    number: int = NO_ITERATION
    plan: TransferPlan | None = None
    replicas: Replicas | None = None
    fetched_weights: int | None = None
    is_prepared: bool = False
    expects_late: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward of one layer, from before its router on. The next one of the layer replaces it.

    Args:
        purpose: of the forward.
        replicas: that it computes with.
        joined_homes: of the forward, if homes were joined to their replicas before the attention:
            gradients on their way, and the token that autograd sees.
        is_traced: whether spans are recorded.
        is_dispatched: whether its tokens have been sent to their experts.
        is_replayed: whether a graph holds parts of it, and it began before the attention.
        num_tokens: rows of the experts' input: one for each expert that a token went to.
    """

    purpose: Forward
    replicas: Replicas | None
    joined_homes: tuple[PendingGradients, Tensor] | None
    is_traced: bool
    is_dispatched: bool = False
    is_replayed: bool = False
    num_tokens: int = 0
