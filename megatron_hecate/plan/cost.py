"""What replicas cost, in tokens: how many tokens the busiest rank must be spared for them to pay.

Everything is seconds over the seconds of one token in one expert, forward and backward, so that a planner can add it to
rank loads. Sizes come from the layer, speeds from the world.
"""

from __future__ import annotations

import dataclasses

from megatron_hecate.plan.world import Link, World

BACKWARD: float = (
    2.0  # FLOPs of a GEMM's backward over its forward: gradients of input and of weight
)
TOKEN_TRIPS: int = 4  # dispatch and combine, forward and backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCost:
    """What one layer's replicas cost in an iteration, in tokens of the busiest rank. All 0: replicas are free.

    Args:
        near: one replica's way out and back inside a node, nothing hidden.
        far: the same from another node, over the network adapter of one rank. The ranks of a node share theirs.
        out: share of the way out in ``near`` and ``far``; the rest is the gradients' way back.
        hidden: tokens' worth of time that hides copies on their way out, behind the compute before the layer, and as
            much on their way back, behind its backward.
        contention: share of the hidden time that it takes from compute all the same.
        routing: having any replica at all: the exchange of loads, quotas, more physical experts.
        crossing: one token that is computed on another node than the one it starts on; on one node, on another rank.
        most: replicas that a rank may hold; ``None`` is what its slots hold.
        scatters: whether receivers share the work of copying, and one copy goes to each node; else homes send them all.

    Raises:
        ValueError: for a cost below 0, or a contention above 1.
    """

    near: float = 0.0
    far: float = 0.0
    out: float = 0.5
    hidden: float = 0.0
    contention: float = 0.0
    routing: float = 0.0
    crossing: float = 0.0
    most: int | None = None
    scatters: bool = True

    def __post_init__(self) -> None:
        # not `asdict`, which copies: a cost is made for each layer in each iteration
        for name, value in vars(self).items():
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} must be 0 or more")
        if max(self.contention, self.out) > 1:
            raise ValueError(
                f"contention={self.contention} and out={self.out} must be between 0 and 1"
            )


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer on one rank.

    Args:
        expert_bytes: one expert's weights as they are fetched.
        grad_bytes: one expert's gradient as it returns.
        token_bytes: one token's hidden state on the wire.
        token_flops: forward FLOPs of one token in one expert.
        microbatches: microbatches per iteration.
        hidden_seconds: compute before the layer behind which one fetch hides (and, in the backward, one return).
        fetches: how often replicas are fetched per iteration.
        returns: how often their gradients return.
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
        """Forward and backward of one token in one expert."""
        return (1 + BACKWARD) * self.token_flops / world.speeds.flops

    def fetch_seconds(self, world: World) -> float:
        """One replica's way out, over the slowest link of the group."""
        return world.slowest_link.seconds(self.expert_bytes)

    def copy_cost(self, world: World, *, hidden: float = 0.0) -> CopyCost:
        """What replicas of this layer cost in an iteration.

        Args:
            world: links, cores and nodes.
            hidden: copies per rank, over the slowest link of the group, that are fetched in the time before the layer
                (`fetch_seconds`); a fraction is a part of one copy. As much time hides copies on their way back.
        """
        token = self.token_seconds(world)

        def both_ways(link: Link) -> float:
            return self.fetches * link.seconds(self.expert_bytes) + self.returns * link.seconds(
                self.grad_bytes
            )

        out = self.fetches * self.fetch_seconds(world)
        return CopyCost(
            near=both_ways(world.speeds.intra) / token,
            far=both_ways(world.speeds.inter) / token,
            out=out / both_ways(world.slowest_link),
            hidden=hidden * out / token,
            contention=world.speeds.contention,
            routing=world.speeds.routing * self.microbatches / token,
            crossing=TOKEN_TRIPS * self.token_bytes / world.slowest_link.bandwidth / token,
        )
