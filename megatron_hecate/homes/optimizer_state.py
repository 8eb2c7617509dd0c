"""What optimizers keep for parameters: main parameters, moments, copies on the host, in the shards where they lie.

It is found from torch's optimizers, which all of Megatron's are wrapped around. What these step is the model's own
parameter, a view of it (shards of fp32 parameters, precision-aware optimizers), or stands in its ``main_param``.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_hecate.homes.exchange import Relocation, Shard, pieces
from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.megatron.stored_weights import StoredWeights

MAIN = "main_param"  # the values that are stepped; other names are the optimizer's own
SCALED = (
    torch.float16,
    torch.uint8,
)  # TransformerEngine keeps such, and tensors of its own, with a scale per shard


class State(NamedTuple):
    """What an optimizer keeps for a parameter on this rank.

    Args:
        elements: n of the parameter's that it steps here; 0 where other ranks do.
        kept: by name, tensors [n]. Those of one name hold the same values.
    """

    elements: int
    kept: Mapping[str, Sequence[Tensor]]


def find_state(params: Sequence[Parameter], optimizers: Iterable[Optimizer]) -> list[State]:
    """What ``optimizers`` keep for each of ``params`` on this rank.

    Raises:
        ValueError: naming a state that does not consist of one number for each element.
    """
    owner = {
        id(main): i for i, p in enumerate(params) if (main := getattr(p, MAIN, None)) is not None
    }
    owner |= {id(p): i for i, p in enumerate(params)}
    begins = sorted((p.data_ptr(), i) for i, p in enumerate(params) if type(p) is Parameter)
    found = [State(0, {})] * len(params)
    for optimizer in optimizers:
        for stepped in (p for group in optimizer.param_groups for p in group["params"]):
            at = bisect.bisect_right(begins, (stepped.data_ptr(), len(params))) - 1
            inside = (
                begins[at][1]
                if at >= 0 and _shares_memory(stepped, params[begins[at][1]])
                else None
            )
            index = owner.get(id(stepped), inside)
            if index is not None and not found[index].elements:
                kept = _kept_for(stepped, optimizer, apart=inside is None)
                found[index] = State(stepped.numel(), kept)
    return found


def _shares_memory(part: Tensor, whole: Tensor) -> bool:
    return whole.dtype is part.dtype and 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes


def _kept_for(stepped: Tensor, optimizer: Optimizer, *, apart: bool) -> dict[str, list[Tensor]]:
    """What ``optimizer`` keeps for ``stepped``, which lies ``apart`` from the model's parameters or in them."""
    inner = getattr(optimizer, "param_to_inner_param", {}).get(
        stepped, stepped
    )  # of HybridDeviceOptimizer
    main = [*([inner] if inner is not stepped else []), *([stepped] if apart else [])]
    kept = {MAIN: [values.detach().view(-1) for values in main]} if main else {}
    for name, value in optimizer.state.get(stepped, {}).items():
        if not isinstance(value, Tensor) or value is inner or value.dim() == 0:
            continue
        scaled = value.dtype in SCALED or type(value) not in (Tensor, Parameter)
        if value.numel() != stepped.numel() or scaled or not value.is_contiguous():
            raise ValueError(
                f"{type(optimizer).__name__} keeps {name} {tuple(value.shape)} ({value.dtype}) for a parameter "
                f"{tuple(stepped.shape)}: experts with such a state cannot move; leave --moe-fssdp-rehome out"
            )
        kept[name] = [value.detach().view(-1)]
    return kept


def _kind(state: State) -> str:
    return repr([(name, str(of[0].dtype)) for name, of in sorted(state.kept.items())])


class StateOnRanks:
    """The weights of one layer's homes and what optimizers keep for them, on all ranks that hold them.

    With the distributed optimizer, each rank that has a home's weights keeps some elements of its state only; which
    ones depends on where the home lies in Megatron's buffers.

    Args:
        homes: the parameters of this rank's homes, expert by expert.
        optimizers: that step the model.
        place: this rank's number in the expert-parallel group, and among the ranks that have the same homes.
        group: of all these ranks.
        timeout: seconds to wait for them.

    Raises:
        ValueError: for a state that cannot move, where ranks keep different ones, where nobody steps an expert.
    """

    def __init__(
        self,
        homes: Sequence[Sequence[Parameter]],
        optimizers: Iterable[Optimizer],
        *,
        place: tuple[int, int],
        group: dist.ProcessGroup,
        timeout: float,
    ) -> None:
        self._homes, self._rank, num_parts = homes, group.rank(), len(homes[0])
        error, states = None, [State(0, {})] * len(homes) * num_parts
        try:
            states = find_state([p for expert in homes for p in expert], optimizers)
        except ValueError as found:  # the others must hear of it
            error = found
        self._states = [states[i : i + num_parts] for i in range(0, len(states), num_parts)]
        kinds = [
            sorted({_kind(state) for state in states[i::num_parts] if state.elements})
            for i in range(num_parts)
        ]
        element = max(
            (sum(of[0].element_size() for of in state.kept.values()) for state in states), default=0
        )
        told = [
            *place,
            element,
            *(-1 if error or len(of) > 1 else zlib.crc32(repr(of).encode()) for of in kinds),
        ]
        numbers = torch.tensor(
            [*told, *(state.elements for state in states)], device=device_of_rank()
        )
        table = numbers.new_empty(group.size() * len(numbers))
        work = dist.all_gather_into_tensor(table, numbers, group=group, async_op=True)
        wait_collective(
            work, table, group, what="asking who keeps what", label="homes", timeout=timeout
        )
        of_rank = table.view(group.size(), -1).cpu().numpy()
        self._member = {
            (rank, replica): i for i, (rank, replica) in enumerate(of_rank[:, :2].tolist())
        }
        ranks, self._replicas = (of_rank[:, :2].max(axis=0) + 1).tolist()
        self._elements = of_rank[:, len(told) :].reshape(group.size(), len(homes), num_parts)
        stepped = sum(
            self._elements[[self._member[rank, n] for rank in range(ranks)]]
            for n in range(self._replicas)
        )
        times, rest = np.divmod(stepped, [p.numel() for p in homes[0]])
        if error is not None:
            raise error
        if any(
            -1 in of or len(set(of) - {zlib.crc32(b"[]")}) > 1
            for of in of_rank[:, 3 : len(told)].T.tolist()
        ):
            raise ValueError(
                f"optimizers keep different states for the experts of one layer, or such that cannot move, here "
                f"{kinds}: they cannot change places; leave --moe-fssdp-rehome out"
            )
        trained = [p.requires_grad for p in homes[0]]
        if rest.any() or (times != times[:1, :1]).any() or not times[..., trained].all():
            raise ValueError(
                "no optimizer of torch was seen to step all experts alike, so their state cannot move with them; "
                "leave --moe-fssdp-rehome out"
            )
        self._weights = [
            [part.detach().view(-1) for part in StoredWeights(expert).parts()] for expert in homes
        ]
        # of all that moves, the most that one rank receives for an expert
        self.expert_bytes = sum(part.nbytes for part in self._weights[0]) + int(
            of_rank[:, 2].max()
        ) * int(self._elements.max(axis=(0, 1)).sum())

    def _shards(self, rank: int, index: int, part: int) -> list[Shard]:
        """Who of the ranks with the homes of ``rank`` steps which elements of a parameter, by replica."""
        members = [self._member[rank, replica] for replica in range(self._replicas)]
        sizes = self._elements[members, index, part]
        whole = self._homes[0][part].numel()
        begins = (np.cumsum(sizes) - sizes) % whole  # several may step the same elements
        return [
            Shard(i, int(b), int(b + n))
            for i, (b, n) in enumerate(zip(begins, sizes, strict=True))
            if n
        ]

    def move(self, source: int, target: int, relocation: Relocation) -> None:
        """Add to ``relocation`` what moves with the expert at place ``source`` of a home to place ``target``; places
        are numbered rank by rank."""
        (from_rank, from_index), (to_rank, to_index) = (
            divmod(place, len(self._homes)) for place in (source, target)
        )
        for replica in range(self._replicas):
            sender, receiver = self._member[from_rank, replica], self._member[to_rank, replica]
            for kept, into in zip(self._weights[from_index], self._weights[to_index], strict=True):
                if sender == self._rank:
                    relocation.send(receiver, kept)
                if receiver == self._rank:
                    relocation.receive(sender, [into])
        for part in range(len(self._homes[0])):
            before, after = (
                self._shards(from_rank, from_index, part),
                self._shards(to_rank, to_index, part),
            )
            mine = next(
                (s.begin for s in before if self._member[from_rank, s.rank] == self._rank), 0
            )
            for wanted in after:
                receiver = self._member[to_rank, wanted.rank]
                for piece in pieces(before, wanted):
                    sender = self._member[from_rank, piece.rank]
                    if sender == self._rank:
                        for _, values in sorted(self._states[from_index][part].kept.items()):
                            relocation.send(
                                receiver, values[0][piece.begin - mine : piece.end - mine]
                            )
                    if receiver == self._rank:
                        at = slice(piece.begin - wanted.begin, piece.end - wanted.begin)
                        for _, values in sorted(self._states[to_index][part].kept.items()):
                            relocation.receive(sender, [of[at] for of in values])
