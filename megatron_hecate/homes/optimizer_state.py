"""Optimizer state of homes: main parameters, moments and host copies, by shard.

State is found through torch's optimizers, which all of Megatron's optimizers wrap. The tensor that
such an optimizer steps is the model's own parameter, a view of it (shards of fp32 parameters,
precision-aware optimizers), or the parameter's ``main_param``.
"""

from __future__ import annotations

import bisect
import itertools
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
from megatron_hecate.job.collectives import gather_rows
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.megatron.stored_weights import StoredWeights

# key of the stepped values; other keys are the optimizer's own
MAIN = "main_param"
# TransformerEngine keeps state of these dtypes, and of tensor classes of its own, with one scale
# per shard
SCALED = (torch.float16, torch.uint8)


class State(NamedTuple):
    """State that an optimizer keeps for a parameter on this rank.

    Args:
        elements: number n of the parameter's elements that are stepped here; 0 if only other ranks
            step it.
        kept: tensors [n] by name; all tensors of one name hold the same values.
    """

    elements: int
    kept: Mapping[str, Sequence[Tensor]]


def _find_state(params: Sequence[Parameter], optimizers: Iterable[Optimizer]) -> list[State]:
    """Find the state that ``optimizers`` keep for each of ``params`` on this rank.

    Raises:
        ValueError: for a state that is not one number per element, by name.
    """
    owner: dict[int, int] = {}
    for index, param in enumerate(params):
        main = getattr(param, MAIN, None)
        if main is not None:
            owner[id(main)] = index
    owner |= {id(param): index for index, param in enumerate(params)}
    begins = sorted((p.data_ptr(), i) for i, p in enumerate(params) if type(p) is Parameter)
    found = [State(0, {})] * len(params)
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        for stepped in itertools.chain.from_iterable(groups):
            inside = _containing(stepped, params, begins)
            index = owner.get(id(stepped), inside)
            if index is not None and not found[index].elements:
                kept = _kept_for(stepped, optimizer, apart=inside is None)
                found[index] = State(stepped.numel(), kept)
    return found


def _containing(
    stepped: Tensor, params: Sequence[Parameter], begins: Sequence[tuple[int, int]]
) -> int | None:
    """Find the parameter whose memory contains ``stepped``.

    Args:
        stepped: tensor that an optimizer steps.
        params: parameters of the model.
        begins: pairs of address and index of each plain parameter, sorted.
    """
    at = bisect.bisect_right(begins, (stepped.data_ptr(), len(params))) - 1
    if at < 0:
        return None
    index = begins[at][1]
    return index if _shares_memory(stepped, params[index]) else None


def _shares_memory(part: Tensor, whole: Tensor) -> bool:
    return whole.dtype is part.dtype and 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes


def _kept_for(stepped: Tensor, optimizer: Optimizer, *, apart: bool) -> dict[str, list[Tensor]]:
    """Collect the state that ``optimizer`` keeps for ``stepped``, by name.

    Args:
        stepped: tensor that the optimizer steps.
        optimizer: optimizer of torch's kind.
        apart: whether ``stepped`` has memory of its own, outside the model's parameters.
    """
    # HybridDeviceOptimizer steps an inner copy on the host
    inner = getattr(optimizer, "param_to_inner_param", {}).get(stepped, stepped)
    main: list[Tensor] = []
    if inner is not stepped:
        main.append(inner)
    if apart:
        main.append(stepped)
    kept = {MAIN: [values.detach().view(-1) for values in main]} if main else {}
    for name, value in optimizer.state.get(stepped, {}).items():
        if not isinstance(value, Tensor) or value is inner or value.dim() == 0:
            continue
        scaled = value.dtype in SCALED or type(value) not in (Tensor, Parameter)
        if value.numel() != stepped.numel() or scaled or not value.is_contiguous():
            raise ValueError(
                f"cannot move experts: {type(optimizer).__name__} keeps {name} "
                f"{tuple(value.shape)} ({value.dtype}) for a parameter {tuple(stepped.shape)}; "
                "leave --moe-fssdp-rehome out"
            )
        kept[name] = [value.detach().view(-1)]
    return kept


def _kind(state: State) -> str:
    """Names and dtypes of a state's tensors."""
    return repr([(name, str(of[0].dtype)) for name, of in sorted(state.kept.items())])


class StateOnRanks:
    """Weights and optimizer state of one layer's homes, on all ranks that hold a part.

    With the distributed optimizer, each rank with a home's weights keeps only some elements of the
    home's optimizer state; the range depends on the home's offset in Megatron's buffers.

    Args:
        homes: parameters of this rank's homes, expert by expert.
        optimizers: optimizers that step the model.
        place: this rank's number in the expert-parallel group, and its number among the ranks with
            the same homes.
        group: all ranks that hold a part.
        timeout: seconds per wait.

    Raises:
        ValueError: for a state that cannot move, for states that differ between ranks, and for an
            expert that no optimizer steps.
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
        self._homes = homes
        self._rank = group.rank()
        num_parts = len(homes[0])
        error: ValueError | None = None
        states = [State(0, {})] * len(homes) * num_parts
        try:
            states = _find_state(list(itertools.chain.from_iterable(homes)), optimizers)
        except ValueError as found:
            # raised after the exchange: the other ranks wait in the collective
            error = found
        self._states = [states[i : i + num_parts] for i in range(0, len(states), num_parts)]
        kinds = _kinds(states, num_parts)
        summary = [*place, _element_size(states), *_kind_codes(kinds, error)]
        of_rank = _gather_rows(
            [*summary, *(state.elements for state in states)], group, timeout=timeout
        )
        self._locate_members(of_rank[:, :2])
        num_elements = of_rank[:, len(summary) :]
        self._elements = num_elements.reshape(group.size(), len(homes), num_parts)
        if error is not None:
            raise error
        _check_same_kinds(of_rank[:, 3 : len(summary)], kinds)
        self._check_all_stepped()
        self._weights = [
            [part.detach().view(-1) for part in StoredWeights(expert).tensors()] for expert in homes
        ]
        weight_bytes = sum(part.nbytes for part in self._weights[0])
        largest_element = int(of_rank[:, 2].max())
        most_elements = int(self._elements.max(axis=(0, 1)).sum())
        # upper bound of the bytes that one rank receives per expert, weights and state together
        self.expert_bytes = weight_bytes + largest_element * most_elements

    def _locate_members(self, places: np.ndarray) -> None:
        """Index the group's ranks by place.

        Args:
            places: number in the expert-parallel group and replica of each rank, [N, 2].
        """
        self._member = {(rank, replica): i for i, (rank, replica) in enumerate(places.tolist())}
        self._num_ranks, self._replicas = (places.max(axis=0) + 1).tolist()

    def _check_all_stepped(self) -> None:
        """Raise ValueError unless all elements of trained parameters are stepped equally often."""
        stepped = 0
        for replica in range(self._replicas):
            members = [self._member[rank, replica] for rank in range(self._num_ranks)]
            stepped = stepped + self._elements[members]
        times, rest = np.divmod(stepped, [p.numel() for p in self._homes[0]])
        trained = [p.requires_grad for p in self._homes[0]]
        if rest.any() or (times != times[:1, :1]).any() or not times[..., trained].all():
            raise ValueError(
                "cannot move experts: no torch.optim optimizer stepped all parameters of all "
                "experts equally; leave --moe-fssdp-rehome out"
            )

    def _shards(self, rank: int, index: int, part: int) -> list[Shard]:
        """List the shards of one parameter's state, by replica.

        Args:
            rank: number of the home's rank in the expert-parallel group.
            index: home on that rank.
            part: parameter of the expert.
        """
        members = [self._member[rank, replica] for replica in range(self._replicas)]
        sizes = self._elements[members, index, part]
        whole = self._homes[0][part].numel()
        # modulo, as several replicas may step the same elements
        begins = (np.cumsum(sizes) - sizes) % whole
        shards: list[Shard] = []
        for replica, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
            if size:
                shards.append(Shard(replica, int(begin), int(begin + size)))
        return shards

    def move(self, source: int, target: int, relocation: Relocation) -> None:
        """Add the move of one expert, with all its tensors, to ``relocation``.

        Args:
            source: place of the expert, numbered rank by rank.
            target: its new place.
            relocation: exchange to add to.
        """
        before = divmod(source, len(self._homes))
        after = divmod(target, len(self._homes))
        self._move_weights(before, after, relocation)
        for part in range(len(self._homes[0])):
            self._move_part(part, before, after, relocation)

    def _move_weights(
        self, before: tuple[int, int], after: tuple[int, int], relocation: Relocation
    ) -> None:
        """Send the weights from each replica of the old home to the same replica of the new one.

        Args:
            before: rank in the expert-parallel group, and home on that rank.
            after: the same of the new home.
            relocation: exchange to add to.
        """
        from_rank, from_index = before
        to_rank, to_index = after
        for replica in range(self._replicas):
            sender = self._member[from_rank, replica]
            receiver = self._member[to_rank, replica]
            for kept, into in zip(self._weights[from_index], self._weights[to_index], strict=True):
                if sender == self._rank:
                    relocation.send(receiver, kept)
                if receiver == self._rank:
                    relocation.receive(sender, [into])

    def _move_part(
        self,
        part: int,
        before: tuple[int, int],
        after: tuple[int, int],
        relocation: Relocation,
    ) -> None:
        """Send the optimizer state of parameter ``part``; other arguments as in `_move_weights`."""
        from_rank, from_index = before
        to_rank, to_index = after
        kept = self._shards(from_rank, from_index, part)
        begins = [s.begin for s in kept if self._member[from_rank, s.rank] == self._rank]
        own_begin = begins[0] if begins else 0
        for wanted in self._shards(to_rank, to_index, part):
            receiver = self._member[to_rank, wanted.rank]
            for piece in pieces(kept, wanted):
                sender = self._member[from_rank, piece.rank]
                if sender == self._rank:
                    sent = slice(piece.begin - own_begin, piece.end - own_begin)
                    for _, values in sorted(self._states[from_index][part].kept.items()):
                        relocation.send(receiver, values[0][sent])
                if receiver == self._rank:
                    received = slice(piece.begin - wanted.begin, piece.end - wanted.begin)
                    for _, values in sorted(self._states[to_index][part].kept.items()):
                        relocation.receive(sender, [of[received] for of in values])


def _kinds(states: Sequence[State], num_parts: int) -> list[list[str]]:
    """List the different kinds of state of each parameter over a rank's experts, sorted."""
    kinds: list[list[str]] = []
    for part in range(num_parts):
        of_part = {_kind(state) for state in states[part::num_parts] if state.elements}
        kinds.append(sorted(of_part))
    return kinds


def _kind_codes(kinds: Sequence[list[str]], error: ValueError | None) -> list[int]:
    """Hash the kinds of each parameter; -1 for a state that cannot move."""
    return [-1 if error or len(of) > 1 else zlib.crc32(repr(of).encode()) for of in kinds]


def _element_size(states: Sequence[State]) -> int:
    """Largest number of bytes that one element of a parameter has in all of a state's tensors."""
    sizes = (sum(of[0].element_size() for of in state.kept.values()) for state in states)
    return max(sizes, default=0)


def _gather_rows(row: Sequence[int], group: dist.ProcessGroup, *, timeout: float) -> np.ndarray:
    """Gather one row of integers per rank of ``group``, [N, len(row)] int64."""
    numbers = torch.tensor(row, device=device_of_rank())
    table = gather_rows(
        numbers, group, what="gathering optimizer states", label="homes", timeout=timeout
    )
    return table.cpu().numpy()


def _check_same_kinds(codes: np.ndarray, kinds: Sequence[list[str]]) -> None:
    """Raise ValueError unless all ranks that step a parameter keep the same kinds of state.

    Args:
        codes: `_kind_codes` of each rank, [N, parameters].
        kinds: kinds on this rank, for the error.
    """
    # a rank that steps no element of a parameter has no kind
    no_kind = zlib.crc32(b"[]")
    for of_part in codes.T.tolist():
        if -1 in of_part or len(set(of_part) - {no_kind}) > 1:
            raise ValueError(
                "cannot move experts: the experts of one layer have optimizer states that differ "
                f"or cannot move, on this rank {kinds}; leave --moe-fssdp-rehome out"
            )
