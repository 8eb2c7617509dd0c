"""MoE layer of several virtual ranks on one device, in plain torch with FSSDP's kernels.

All ranks of a group run in one process and on one stream, one after another. They exchange data
through the device's own memory: the all-to-all is a permutation, and fetches and returns are
kernel programs with both ends on this device, so no rank waits for another. The compute of each
rank and its kernel launches equal those of a rank with its own device; the communication does not.

Without replicas the layer is a stock one: no quotas, no rerouting, no transfer. Replicas must not
change the values.

Letters: V ranks, P physical experts of a rank, E experts, T tokens of a rank, k experts of a token,
D hidden, F ffn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from placing import greedy_placement
from step_transfers import Transfers
from torch import Tensor

from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens, reroute
from megatron_hecate.routing.tables import GroupShape

# popularity of experts: this power of their position in it
SKEW: float = 1.5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a layer.

    Args:
        ranks: ranks of the group.
        homes, slots: home experts and replica slots per rank.
        hidden, ffn: sizes of an expert with SwiGLU.
        tokens: tokens per rank.
        top: experts per token.
    """

    ranks: int
    homes: int
    hidden: int
    ffn: int
    tokens: int
    top: int
    slots: int = 2

    @property
    def experts(self) -> int:
        """Number of experts E."""
        return self.ranks * self.homes

    @property
    def rows(self) -> int:
        """Number of rows that a rank sends."""
        return self.tokens * self.top


class Weights:
    """Inputs, weights and gradients of all ranks, shared by layers with and without replicas.

    Args:
        sizes: sizes of the layer.
        device, dtype: device and type of tokens and weights; sums are fp32.
        seed: seed of all random values.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, dtype: torch.dtype, *, seed: int = 0
    ) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = dtype
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        s = sizes
        held = s.homes + s.slots
        self.inputs = [
            drawn(s.tokens, s.hidden, scale=1.0).requires_grad_() for _ in range(s.ranks)
        ]
        self.grads = [drawn(s.tokens, s.hidden, scale=1.0) for _ in range(s.ranks)]
        self.router = drawn(s.experts, s.hidden, scale=s.hidden**-0.5).requires_grad_()
        popularity = np.arange(1, s.experts + 1) ** -SKEW
        order = np.random.default_rng(seed).permutation(s.experts)
        self.bias = torch.tensor(np.log(popularity[order]), dtype=torch.float32, device=device)
        self.first = [
            drawn(held, s.hidden, 2 * s.ffn, scale=s.hidden**-0.5) for _ in range(s.ranks)
        ]
        self.second = [drawn(held, s.ffn, s.hidden, scale=s.ffn**-0.5) for _ in range(s.ranks)]
        shapes = (s.hidden, 2 * s.ffn), (s.ffn, s.hidden)
        self.main_grads = [
            [torch.zeros(s.homes, *shape, device=device) for shape in shapes]
            for _ in range(s.ranks)
        ]
        self.slot_grads = [
            [torch.zeros(s.slots, *shape, device=device) for shape in shapes]
            for _ in range(s.ranks)
        ]
        for weight in (*self.first, *self.second):
            # Slots start as NaN, so that a read before the fetch shows in the values.
            weight[s.homes :] = float("nan")
            weight.requires_grad_()

    def loads(self) -> np.ndarray:
        """Count the tokens [E] that the router sends to each expert."""
        with torch.no_grad():
            maps = [self.route(rank)[0] for rank in range(self.sizes.ranks)]
        return np.asarray(torch.stack(maps).sum(dim=(0, 1)).cpu())

    def route(self, rank: int) -> tuple[Tensor, Tensor]:
        """Compute the routing map and the probabilities of a rank, both [T, E]."""
        scores = torch.softmax((self.inputs[rank] @ self.router.t()).float() + self.bias, dim=-1)
        chosen = scores.topk(self.sizes.top, dim=-1).indices
        routing_map = torch.zeros(scores.shape, dtype=torch.bool, device=self.device)
        routing_map.scatter_(1, chosen, True)
        return routing_map, scores * routing_map


class Layer:
    """Layer of all ranks; one `step` is a forward and a backward.

    Args:
        weights: weights of the layer.
        replicas: whether replicas of hot experts fill the slots of all ranks.
    """

    def __init__(self, weights: Weights, *, replicas: bool) -> None:
        s = weights.sizes
        self.weights = weights
        self.sizes = s
        self.replicas = replicas
        self.device = weights.device
        self.kernels = TransferKernels(weights.device)
        homes = Placement.initial(s.experts, s.ranks, num_slots=s.slots)
        if replicas:
            self.placement = greedy_placement(weights.loads(), homes, s.slots)
            self.held = homes.slots_per_rank
        else:
            self.placement = homes
            self.held = s.homes
        shape = GroupShape.of(World((0,) * s.ranks), homes)
        self.tables = QuotaTables(shape, self.device, self.kernels)
        self.tables.place(self.placement)
        self.loads = torch.zeros(s.ranks, s.experts, dtype=torch.int32, device=self.device)
        self.transfers = Transfers(self) if replicas else None
        self._columns = torch.arange(s.ranks * self.held * s.tokens, device=self.device)
        # Computed once: a CUDA graph must not contain copies of sizes to the host.
        self._exchange: _Exchange | None = None
        self._exchange = _Exchange.of(self, [self._to_physical(r) for r in self._routed()])

    @property
    def computed(self) -> np.ndarray:
        """Number of rows that each rank's experts compute, [V]."""
        assert self._exchange is not None
        return np.array(self._exchange.sizes)

    def step(self) -> list[Tensor]:
        """Run the forward and backward of all ranks.

        Gradients of inputs and router are in ``grad``; gradients of experts are added to the main
        gradients at their homes.

        Returns:
            Each rank's output [T, D].
        """
        weights = self.weights
        for leaf in (*weights.inputs, weights.router):
            leaf.grad = None
        side = self._fork() if self.transfers is not None else None
        outputs = self.forward(side)
        torch.autograd.backward(outputs, weights.grads)
        if self.transfers is not None:
            self.transfers.give_back()
        return [output.detach() for output in outputs]

    def forward(self, side: Any = None) -> list[Tensor]:
        """Compute each rank's output; ``side``: stream that fetches replicas concurrently."""
        s = self.sizes
        exchange = self._exchange
        assert exchange is not None
        physical = [self._to_physical(routed) for routed in self._routed()]
        sent = [self._permute(rank, *of_rank) for rank, of_rank in enumerate(physical)]
        sent_rows = torch.cat([rows for rows, _, _ in sent])
        rows = _Rows.apply(sent_rows, exchange.index, exchange.inverse)
        # Only the experts need the replicas; router and permutation overlap with the fetch.
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        parts = zip(range(s.ranks), rows.split(exchange.sizes), exchange.ends, strict=True)
        computed = torch.cat([self.experts(rank, part, ends) for rank, part, ends in parts])
        back = _Rows.apply(computed, exchange.inverse, exchange.index).split(s.rows)
        outputs = []
        for part, (_, token, probs) in zip(back, sent, strict=True):
            empty = torch.zeros(s.tokens, s.hidden, dtype=part.dtype, device=part.device)
            outputs.append(empty.index_add(0, token, part * probs[:, None].to(part.dtype)))
        return outputs

    def experts(self, rank: int, rows: Tensor, ends: Tensor) -> Tensor:
        """Run the physical experts (SwiGLU) of ``rank``.

        Args:
            rank: rank of the experts.
            rows: inputs sorted by physical expert.
            ends: end of each expert's rows, [P].
        """
        weights = self.weights
        first, second = (
            _Collected.apply(weight[: self.held], self._collect, rank, number)
            for number, weight in enumerate((weights.first[rank], weights.second[rank]))
        )
        gate, up = grouped(rows, first, ends).chunk(2, dim=-1)
        return grouped(torch.nn.functional.silu(gate) * up, second, ends)

    def experts_alone(self, rank: int) -> Callable[[], None]:
        """Return a function that runs a rank's experts forward and backward."""
        assert self._exchange is not None
        count = self._exchange.sizes[rank]
        ends = self._exchange.ends[rank]
        rows = torch.randn(count, self.sizes.hidden, device=self.device).to(self.weights.dtype)
        rows.requires_grad_()
        grad = torch.randn_like(rows)

        def run() -> None:
            rows.grad = None
            self.experts(rank, rows, ends).backward(grad)

        return run

    def _fork(self) -> Any:
        """Fetch replicas, on a GPU on a side stream, which is returned."""
        assert self.transfers is not None
        if self.device.type != "cuda":
            self.transfers.fetch()
            return None
        side = self.transfers.stream
        # The previous step may still use the slots.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.transfers.fetch()
        return side

    def _routed(self) -> list[tuple[int, Tensor, Tensor, CountedTokens | None]]:
        """Route the tokens of all ranks, and with replicas count the tokens per expert.

        ``loads`` holds the counts of all ranks before the first rank is rerouted.

        Returns:
            Rank, routing map, probabilities and counts of each rank.
        """
        found = []
        for rank in range(self.sizes.ranks):
            routing_map, probs = self.weights.route(rank)
            counted = CountedTokens.of(routing_map, self.kernels) if self.replicas else None
            if counted is not None:
                self.loads[rank].copy_(counted.loads)
            found.append((rank, routing_map, probs, counted))
        return found

    def _to_physical(
        self, routed: tuple[int, Tensor, Tensor, CountedTokens | None]
    ) -> tuple[Tensor, Tensor]:
        """Map the routing of a rank to physical experts, [T, V * P]; unchanged without replicas."""
        rank, routing_map, probs, counted = routed
        if counted is None:
            return routing_map, probs
        return reroute(counted, probs, self.tables, self.tables.parts(self.loads, rank))

    def _permute(
        self, rank: int, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Permute a rank's tokens by physical expert, without host synchronization.

        The number of rows, T * k, is known without reading the routing map.

        Returns:
            Rows, and the token and the probability of each row.
        """
        s = self.sizes
        chosen = routing_map.t().reshape(-1)
        place = torch.where(chosen, torch.cumsum(chosen, 0) - 1, s.rows)
        pairs = torch.zeros(s.rows + 1, dtype=torch.int64, device=self.device)
        pairs = pairs.scatter_(0, place, self._columns[: len(place)])[: s.rows]
        token = pairs % s.tokens
        rows = self.weights.inputs[rank].index_select(0, token)
        return rows, token, probs.t().reshape(-1).index_select(0, pairs)

    def _collect(self, grad: Tensor, rank: int, number: int) -> None:
        """Add gradients of homes to main gradients, and store gradients of replicas for returns."""
        homes = self.sizes.homes
        self.weights.main_grads[rank][number].add_(grad[:homes])
        if self.replicas:
            self.weights.slot_grads[rank][number].copy_(grad[homes:])


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """All-to-all as a permutation, with sizes known on the host from the initial tokens.

    Args:
        index: sent row at each position of all received rows, [V * T * k], ordered by rank,
            physical expert and source.
        inverse: inverse permutation, for the combine.
        sizes: number of rows that each rank receives, [V].
        ends: end of each physical expert's rows, [P] int32 per rank.
    """

    index: Tensor
    inverse: Tensor
    sizes: list[int]
    ends: list[Tensor]

    @classmethod
    def of(cls, layer: Layer, physical: Sequence[tuple[Tensor, Tensor]]) -> _Exchange:
        """Build the exchange from each rank's routing map and probabilities [T, V * P]."""
        per_rank = torch.stack([routing_map.sum(dim=0) for routing_map, _ in physical])
        counts = np.asarray(per_rank.cpu())  # [V, V * P]
        # first sent row of each source and physical expert
        begins = np.cumsum(counts, axis=1) - counts
        begins += layer.sizes.rows * np.arange(len(counts))[:, None]
        pairs = itertools.product(range(counts.shape[1]), range(len(counts)))
        index = np.concatenate([np.arange(counts[s, x]) + begins[s, x] for x, s in pairs])
        of_rank = counts.sum(axis=0).reshape(layer.sizes.ranks, layer.held)
        places = [torch.from_numpy(array).to(layer.device) for array in (index, np.argsort(index))]
        ends = [torch.from_numpy(row.cumsum().astype(np.int32)).to(layer.device) for row in of_rank]
        return cls(*places, of_rank.sum(axis=1).tolist(), ends)


class _Rows(torch.autograd.Function):
    """Permutation of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Collected(torch.autograd.Function):
    """Identity on weights; the backward passes their gradient to ``collect``, not to autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, collect: Callable, rank: int, number: int) -> Tensor:
        ctx.collect = collect
        ctx.place = (rank, number)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.collect(grad, *ctx.place)
        return None, None, None, None


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of every expert by its weights.

    Args:
        rows: inputs sorted by expert, [N, D].
        weights: weights of all experts, [P, D, F].
        ends: end of each expert's rows, [P] int32.

    Returns:
        Outputs [N, F].
    """
    if rows.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, weights, offs=ends)
    # torch's grouped GEMM takes bf16 only.
    bounds = itertools.pairwise([0, *ends.tolist()])
    return torch.cat(
        [rows[begin:end] @ weight for (begin, end), weight in zip(bounds, weights, strict=True)]
    )
