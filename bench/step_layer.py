"""A MoE layer of several virtual ranks on one device, on torch alone, with our kernels where FSSDP has them.

All ranks of a group live in one process and on one stream, one after another. Between them nothing travels but through
the device's own memory: the all-to-all is a permutation, and fetches and returns are programs of the kernels whose both
ends lie here, so no rank waits for another. What each rank computes, and what its host launches, is what it would be
with a device of its own; what lies between them is not.

Without replicas the layer is a stock one: no quotas, no rerouting, no transfer. With them, the values must be the same.

Letters: V ranks, P physical experts of a rank, E experts, T tokens of a rank, k experts of a token, D hidden, F ffn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from placing import greedy_placement
from torch import Tensor

from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.places import Place, Pull
from megatron_hecate.comm.nvlink.program import FAILURE, Program, Signals
from megatron_hecate.comm.nvlink.schedule import Schedule
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens, reroute
from megatron_hecate.routing.tables import GroupShape

SKEW: float = 1.5  # of the popularity of experts: a power of their rank in it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a layer.

    Args:
        ranks, homes, slots: of the group, of each rank.
        hidden, ffn: of an expert, SwiGLU.
        tokens: of a rank.
        top: experts of a token.
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
        return self.ranks * self.homes

    @property
    def rows(self) -> int:
        """What a rank sends."""
        return self.tokens * self.top


class Weights:
    """All that the ranks own, for layers with and without replicas alike.

    Args:
        sizes: of the layer.
        device, dtype: of tokens and weights; sums are fp32.
        seed: of all that is drawn.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, dtype: torch.dtype, *, seed: int = 0
    ) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        s, held = sizes, sizes.homes + sizes.slots
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
            weight[s.homes :] = float(
                "nan"
            )  # of slots: whoever reads them before a fetch is found out
            weight.requires_grad_()

    def loads(self) -> np.ndarray:
        """[E] tokens of each expert, as the router has it."""
        with torch.no_grad():
            maps = [self.route(rank)[0] for rank in range(self.sizes.ranks)]
        return np.asarray(torch.stack(maps).sum(dim=(0, 1)).cpu())

    def route(self, rank: int) -> tuple[Tensor, Tensor]:
        """[T, E] routing map and probabilities."""
        scores = torch.softmax((self.inputs[rank] @ self.router.t()).float() + self.bias, dim=-1)
        chosen = scores.topk(self.sizes.top, dim=-1).indices
        routing_map = torch.zeros(scores.shape, dtype=torch.bool, device=self.device).scatter_(
            1, chosen, True
        )
        return routing_map, scores * routing_map


class Layer:
    """The layer of all ranks; one `step` is a forward and a backward.

    Args:
        weights: of the layer.
        replicas: whether hot experts have replicas on other ranks, which fill all slots.
    """

    def __init__(self, weights: Weights, *, replicas: bool) -> None:
        s = weights.sizes
        self.weights, self.sizes, self.replicas = weights, s, replicas
        self.device, self.kernels = weights.device, TransferKernels(weights.device)
        homes = Placement.initial(s.experts, s.ranks, num_slots=s.slots)
        self.placement = greedy_placement(weights.loads(), homes, s.slots) if replicas else homes
        self.held = homes.slots_per_rank if replicas else s.homes
        self.tables = QuotaTables(
            GroupShape.of(World((0,) * s.ranks), homes), self.device, self.kernels
        )
        self.tables.place(self.placement)
        self.loads = torch.zeros(s.ranks, s.experts, dtype=torch.int32, device=self.device)
        self.transfers = _Transfers(self) if replicas else None
        self._columns = torch.arange(s.ranks * self.held * s.tokens, device=self.device)
        self._exchange: _Exchange | None = None
        self._exchange = _Exchange.of(self, [self._to_physical(r) for r in self._routed()])

    @property
    def computed(self) -> np.ndarray:
        """[V] tokens of each rank's experts."""
        assert self._exchange is not None
        return np.array(self._exchange.sizes)

    def step(self) -> list[Tensor]:
        """Forward and backward of all ranks; gradients of inputs and router are in ``grad``, those of experts are added
        to main gradients, at home. Returns each rank's output [T, D]."""
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
        """Each rank's output; ``side``: the stream that fetches replicas meanwhile."""
        s, exchange = self.sizes, self._exchange
        assert exchange is not None
        physical = [self._to_physical(routed) for routed in self._routed()]
        sent = [self._permute(rank, *of_rank) for rank, of_rank in enumerate(physical)]
        rows = _Rows.apply(
            torch.cat([rows for rows, _, _ in sent]), exchange.index, exchange.inverse
        )
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
        """SwiGLU of the physical experts of ``rank`` over their ``rows``, those of expert i before ``ends[i]``."""
        weights = self.weights
        first, second = (
            _Collected.apply(weight[: self.held], self._collect, rank, number)
            for number, weight in enumerate((weights.first[rank], weights.second[rank]))
        )
        gate, up = grouped(rows, first, ends).chunk(2, dim=-1)
        return grouped(torch.nn.functional.silu(gate) * up, second, ends)

    def experts_alone(self, rank: int) -> Callable[[], None]:
        """What runs a rank's experts forward and backward."""
        assert self._exchange is not None
        count, ends = self._exchange.sizes[rank], self._exchange.ends[rank]
        rows = (
            torch.randn(count, self.sizes.hidden, device=self.device)
            .to(self.weights.dtype)
            .requires_grad_()
        )
        grad = torch.randn_like(rows)

        def run() -> None:
            rows.grad = None
            self.experts(rank, rows, ends).backward(grad)

        return run

    def _fork(self) -> Any:
        """Fetch replicas, on a stream of their own where there are streams."""
        assert self.transfers is not None
        if self.device.type != "cuda":
            self.transfers.fetch()
            return None
        side = self.transfers.stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.transfers.fetch()
        return side

    def _routed(self) -> list[tuple[int, Tensor, Tensor, CountedTokens | None]]:
        """Of each rank: routing map, probabilities and, where tokens are split, their counts; those of all ranks stand
        in ``loads`` when the first is rerouted."""
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
        """[T, V * P] routing map and probabilities; without replicas, those of the experts."""
        rank, routing_map, probs, counted = routed
        if counted is None:
            return routing_map, probs
        return reroute(counted, probs, self.tables, self.tables.parts(self.loads, rank))

    def _permute(
        self, rank: int, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a rank's tokens by physical expert, the token and the probability of each. The host waits for
        nothing: there are as many rows as tokens have experts."""
        s = self.sizes
        chosen = routing_map.t().reshape(-1)
        place = torch.where(chosen, torch.cumsum(chosen, 0) - 1, s.rows)
        pairs = torch.zeros(s.rows + 1, dtype=torch.int64, device=self.device)
        pairs = pairs.scatter_(0, place, self._columns[: len(place)])[: s.rows]
        token = pairs % s.tokens
        return (
            self.weights.inputs[rank].index_select(0, token),
            token,
            probs.t().reshape(-1).index_select(0, pairs),
        )

    def _collect(self, grad: Tensor, rank: int, number: int) -> None:
        """Take gradients of a rank's weights: of homes to main gradients, of replicas to where returns read them."""
        homes = self.sizes.homes
        self.weights.main_grads[rank][number].add_(grad[:homes])
        if self.replicas:
            self.weights.slot_grads[rank][number].copy_(grad[homes:])


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The all-to-all, whose sizes the host knows from the tokens that were drawn.

    Args:
        index: [V * T * k] which of all sent rows stands at each place of all received ones: by rank, physical expert,
            source; ``inverse``: the way back.
        sizes: rows that each rank receives.
        ends: of each rank, [P] int32: where the rows of each of its experts end.
    """

    index: Tensor
    inverse: Tensor
    sizes: list[int]
    ends: list[Tensor]

    @classmethod
    def of(cls, layer: Layer, physical: Sequence[tuple[Tensor, Tensor]]) -> _Exchange:
        counts = np.asarray(
            torch.stack([routing_map.sum(dim=0) for routing_map, _ in physical]).cpu()
        )  # [V, V * P]
        begins = (
            np.cumsum(counts, axis=1) - counts + layer.sizes.rows * np.arange(len(counts))[:, None]
        )
        pairs = itertools.product(range(counts.shape[1]), range(len(counts)))
        index = np.concatenate([np.arange(counts[s, x]) + begins[s, x] for x, s in pairs])
        of_rank = counts.sum(axis=0).reshape(layer.sizes.ranks, layer.held)
        places = [torch.from_numpy(array).to(layer.device) for array in (index, np.argsort(index))]
        ends = [torch.from_numpy(row.cumsum().astype(np.int32)).to(layer.device) for row in of_rank]
        return cls(*places, of_rank.sum(axis=1).tolist(), ends)


class _Transfers:
    """Fetches and returns of a layer: one program and one launch for each rank."""

    def __init__(self, layer: Layer) -> None:
        s, weights = layer.sizes, layer.weights
        self.layer, self.elements = layer, 3 * s.hidden * s.ffn
        self.stream = torch.cuda.Stream() if layer.device.type == "cuda" else None
        self._words = torch.zeros(s.ranks, 64, dtype=torch.int32, device=layer.device)
        self._failure = torch.zeros(
            FAILURE.itemsize, dtype=torch.uint8, pin_memory=layer.device.type == "cuda"
        )
        # a place's rank is the launching one, as nobody is waited for; its index says whose memory it is
        self._memory = {
            "parameters": (weights.first, weights.second, s.homes, 0),
            "slot": (weights.first, weights.second, s.slots, s.homes),
            "grad": (*zip(*weights.slot_grads, strict=True), s.slots, 0),
            "main_grad": (*zip(*weights.main_grads, strict=True), s.homes, 0),
        }
        fetches: list[list[Pull]] = [[] for _ in range(s.ranks)]
        grads: dict[int, list[int]] = {}
        for expert, rank, slot in layer.placement.replicas:
            at = rank * s.slots + slot - s.homes
            home = int(layer.placement.home[expert])
            number = home * s.homes + int(np.flatnonzero(layer.placement.table[home] == expert)[0])
            source, into = Place(rank, "parameters", number), Place(rank, "slot", at)
            fetches[rank].append(Pull((source,), into, 0, self.elements))
            grads.setdefault(number, []).append(at)
        returns: list[list[Pull]] = [[] for _ in range(s.ranks)]
        for number, slots in grads.items():
            home = number // s.homes
            sources = tuple(Place(home, "grad", at) for at in slots)
            returns[home].append(
                Pull(sources, Place(home, "main_grad", number), 0, self.elements, add=True)
            )
        self._fetches = [
            self._program(rank, pulls, sums=False) for rank, pulls in enumerate(fetches)
        ]
        self._returns = [
            self._program(rank, pulls, sums=True) for rank, pulls in enumerate(returns)
        ]

    def fetch(self) -> None:
        for at in self._fetches:
            self.layer.kernels.run_at("fssdp_gather", at)

    def give_back(self) -> None:
        for at in self._returns:
            self.layer.kernels.run_at("fssdp_reduce", at)

    def _program(self, rank: int, pulls: Sequence[Pull], *, sums: bool) -> Tensor:
        words = self._words[rank].data_ptr()
        signals = Signals(rank, {rank: words}, words + 64, self._failure.data_ptr(), timeout=10.0)
        itemsize = 4 if sums else self.layer.weights.dtype.itemsize
        schedule = Schedule((tuple(pulls),), frozenset())
        program = Program(
            schedule, self._extents, signals=signals, itemsize=itemsize, sums=sums, begin=1
        )
        at = torch.empty(len(program.data), dtype=torch.uint8, device=self.layer.device)
        program.relocate(at.data_ptr())
        return at.copy_(torch.from_numpy(program.data))

    def _extents(self, place: Place) -> list[tuple[int, int]]:
        first, second, of_rank, begin = self._memory[place.memory]
        rank, index = divmod(place.index, of_rank)
        tensors = first[rank][begin + index], second[rank][begin + index]
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


class _Rows(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Collected(torch.autograd.Function):
    """Weights; the backward hands over their gradient, and autograd keeps none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, collect: Callable, rank: int, number: int) -> Tensor:
        ctx.collect, ctx.place = collect, (rank, number)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.collect(grad, *ctx.place)
        return None, None, None, None


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[N, F] rows of expert i, which end at ``ends[i]``, times ``weights[i]`` [D, F]."""
    if rows.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, weights, offs=ends)
    bounds = itertools.pairwise([0, *ends.tolist()])  # torch's own takes bf16 alone
    return torch.cat(
        [rows[begin:end] @ weight for (begin, end), weight in zip(bounds, weights, strict=True)]
    )
