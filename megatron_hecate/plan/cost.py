"""Cost model of replicas, in tokens: the relief of the busiest rank from which on they pay.

Each cost is a time divided by the time of one token in one expert, forward and backward, so that a
planner can add it to rank loads. Sizes are properties of the layer, speeds of the world.
"""

from __future__ import annotations

import dataclasses

from megatron_hecate.plan.world import Link, World

# Largest rank load of a microbatch over the mean, beyond that of the forecast: a limit reserves it.
# On the recordings of bench/data with expensive copies, at most 3 of 239 iterations exceed it.
FORECAST_ERROR: float = 0.3
# FLOPs of a GEMM's backward over its forward: gradients of input and of weight
BACKWARD: float = 2.0
# dispatch and combine, forward and backward
TOKEN_TRIPS: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCost:
    """Cost of one layer's replicas per iteration, in tokens of the busiest rank; 0 is free.

    Args:
        near: fetch and return of one replica inside a node, with nothing hidden.
        far: fetch and return of one replica from another node, over the network adapter of one
            rank. The ranks of a node share their adapters.
        out: share of the fetch in ``near`` and ``far``; the rest is the return of gradients.
        hidden: window, in tokens, that hides fetches behind the compute before the layer; an equal
            window hides returns behind the layer's backward.
        contention: share of the hidden time that copies still take from compute.
        routing: fixed cost of replicas: the exchange of loads, quotas.
        computing: fixed cost of each replica on the rank with most of them: launches, reads of its
            weights, reads and writes of its gradient.
        crossing: one token that is computed on another node than its source; on a single node, on
            another rank.
        most: replicas that a rank may hold; ``None`` means its number of slots.
        scatters: whether receivers share the copying and each node receives one copy; otherwise the
            home sends every copy.
    """

    near: float = 0.0
    far: float = 0.0
    out: float = 0.5
    hidden: float = 0.0
    contention: float = 0.0
    routing: float = 0.0
    computing: float = 0.0
    crossing: float = 0.0
    most: int | None = None
    scatters: bool = True


def load_limit(factor: float, *, rows: float, experts: int, alignment: int) -> float:
    """Compute the limit of `plan_replicas` for ranks whose buffers have a fixed size.

    Padding of each physical expert, at its worst, and the error of the forecast are subtracted. A
    limit below 1 fills all slots of a layer that is not balanced already: full slots absorb most
    errors of the forecast.

    Args:
        factor: rows of a rank's buffer over the mean rank load of a microbatch.
        rows: that mean, in tokens.
        experts: physical experts of a rank, P.
        alignment: multiple of rows to which each expert is padded; 1 for no padding.
    """
    return factor - worst_padding(rows=rows, experts=experts, alignment=alignment) - FORECAST_ERROR


def worst_padding(*, rows: float, experts: int, alignment: int) -> float:
    """Return the most rows of padding on a rank, over ``rows``; arguments as of `load_limit`."""
    return experts * (alignment - 1) / max(rows, 1.0)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer on one rank.

    Args:
        expert_bytes: one expert's weights in the dtype of a fetch.
        grad_bytes: one expert's gradient in the dtype of a return.
        token_bytes: one token's hidden state on the wire.
        token_flops: forward FLOPs of one token in one expert.
        microbatches: microbatches per iteration.
        hidden_seconds: compute before the layer that hides one fetch (and, in the backward, one
            return).
        fetches: fetches of each replica per iteration.
        returns: returns of each replica's gradient per iteration.
    """

    expert_bytes: float
    grad_bytes: float
    token_bytes: float
    token_flops: float
    microbatches: int = 1
    hidden_seconds: float = 0.0
    fetches: int = 1
    returns: int = 1

    def token_seconds(self, world: World) -> float:
        """Return the seconds of one token in one expert, forward and backward."""
        return (1 + BACKWARD) * self.token_flops / world.speeds.flops

    def expert_seconds(self, world: World) -> float:
        """Return the seconds per microbatch of one more physical expert on a rank, without tokens.

        Forward and backward each read its weights; the backward adds to its gradient.
        """
        traffic = 2 * self.expert_bytes + 2 * self.grad_bytes
        return world.speeds.launch + traffic / world.speeds.memory

    def fetch_seconds(self, world: World) -> float:
        """Return the seconds that fetching one replica takes, over the group's slowest link."""
        return world.slowest_link.seconds(self.expert_bytes)

    def copy_cost(self, world: World, *, hidden: float = 0.0, scatters: bool = True) -> CopyCost:
        """Return the cost of this layer's replicas per iteration.

        Args:
            world: links, cores and nodes.
            hidden: fetches per rank that hide behind the compute before the layer, each of
                `fetch_seconds`; may be fractional. Returns have an equal window in the backward.
            scatters: see `CopyCost`.
        """
        token = self.token_seconds(world)

        def both_ways(link: Link) -> float:
            fetching = self.fetches * link.seconds(self.expert_bytes)
            returning = self.returns * link.seconds(self.grad_bytes)
            return fetching + returning

        out = self.fetches * self.fetch_seconds(world)
        return CopyCost(
            near=both_ways(world.speeds.intra) / token,
            far=both_ways(world.speeds.inter) / token,
            out=out / both_ways(world.slowest_link),
            hidden=hidden * out / token,
            contention=world.speeds.contention,
            routing=world.speeds.routing * self.microbatches / token,
            computing=self.expert_seconds(world) * self.microbatches / token,
            crossing=TOKEN_TRIPS * self.token_bytes / world.slowest_link.bandwidth / token,
            scatters=scatters,
        )
