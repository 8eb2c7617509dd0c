"""Optimizer state of homes: main parameters, moments and host copies, by shard.

State is found through torch's optimizers, which all of Megatron's optimizers wrap. The tensor that
such an optimizer steps is the model's own parameter, a view of it (shards of fp32 parameters,
precision-aware optimizers), or the parameter's ``main_param``.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.comm.problems import raise_on_all
from megatron_hecate.homes.exchange import Relocation, Shard, pieces
from megatron_hecate.megatron.stored_weights import StoredWeights

# key of the stepped values; other keys are the optimizer's own
MAIN = "main_param"
# TransformerEngine stores state of these dtypes, and in its own tensor classes, with one scale per
# shard
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
    states = [State(0, {})] * len(params)
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        for stepped in itertools.chain.from_iterable(groups):
            inside = _containing(stepped, params, begins)
            index = owner.get(id(stepped), inside)
            if index is not None and not states[index].elements:
                tensors = _kept_for(stepped, optimizer, is_separate=inside is None)
                states[index] = State(stepped.numel(), tensors)
    return states


def _containing(
    stepped: Tensor, params: Sequence[Parameter], begins: Sequence[tuple[int, int]]
) -> int | None:
    """Find the parameter whose memory contains ``stepped``.

    Args:
        stepped: tensor that an optimizer steps.
        params: parameters of the model.
        begins: pairs of address and index of each plain parameter, sorted.
    """
    place = bisect.bisect_right(begins, (stepped.data_ptr(), len(params))) - 1
    if place < 0:
        return None
    index = begins[place][1]
    return index if _shares_memory(stepped, params[index]) else None


def _shares_memory(part: Tensor, tensor: Tensor) -> bool:
    return tensor.dtype is part.dtype and 0 <= part.data_ptr() - tensor.data_ptr() < tensor.nbytes


def _kept_for(
    stepped: Tensor, optimizer: Optimizer, *, is_separate: bool
) -> dict[str, list[Tensor]]:
    """Collect the state that ``optimizer`` keeps for ``stepped``, by name.

    Args:
        stepped: tensor that the optimizer steps.
        optimizer: optimizer of torch's kind.
        is_separate: whether ``stepped`` has memory of its own, outside the model's parameters.
    """
    # HybridDeviceOptimizer steps an inner copy on the host
    inner = getattr(optimizer, "param_to_inner_param", {}).get(stepped, stepped)
    main: list[Tensor] = []
    if inner is not stepped:
        main.append(inner)
    if is_separate:
        main.append(stepped)
    tensors = {MAIN: [values.detach().view(-1) for values in main]} if main else {}
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
        tensors[name] = [value.detach().view(-1)]
    return tensors


def _kind(state: State) -> str:
    """Names and dtypes of a state's tensors."""
    return repr([(name, str(tensors[0].dtype)) for name, tensors in sorted(state.kept.items())])


class _Summary(NamedTuple):
    """Optimizer state of one rank's homes.

    Args:
        place: see `StateOnRanks`.
        element_size: largest number of bytes of one element of a parameter, over all tensors of its
            state.
        kinds: different kinds of state of each parameter, over all homes; empty for a parameter
            that only other ranks step.
        elements: elements that are stepped on the rank, by home and parameter.
    """

    place: tuple[int, int]
    element_size: int
    kinds: list[list[str]]
    elements: list[int]

    @classmethod
    def of(cls, states: Sequence[State], num_parts: int, *, place: tuple[int, int]) -> _Summary:
        """Summarize the states of a rank.

        Args:
            states: state of each parameter, home by home.
            num_parts: number of parameters of an expert.
            place: see `StateOnRanks`.
        """
        kinds: list[list[str]] = []
        for part in range(num_parts):
            part_kinds = {_kind(state) for state in states[part::num_parts] if state.elements}
            kinds.append(sorted(part_kinds))
        sizes = (
            sum(tensors[0].element_size() for tensors in state.kept.values()) for state in states
        )
        return cls(place, max(sizes, default=0), kinds, [state.elements for state in states])


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

    Raises:
        ValueError: on all ranks, for a state that cannot move, for states that differ between
            ranks, and for an expert that no optimizer steps.
        TransferError: when a rank dies or does not take part in time.
    """

    def __init__(
        self,
        homes: Sequence[Sequence[Parameter]],
        optimizers: Iterable[Optimizer],
        *,
        place: tuple[int, int],
        group: dist.ProcessGroup,
    ) -> None:
        self._homes = homes
        self._rank = group.rank()
        num_parts = len(homes[0])
        named = {"what": "gathering optimizer states", "label": "homes"}
        with raise_on_all(group, error=ValueError, **named):
            states = _find_state(list(itertools.chain.from_iterable(homes)), optimizers)
        self._states = [states[i : i + num_parts] for i in range(0, len(states), num_parts)]
        own_summary = _Summary.of(states, num_parts, place=place)
        summaries = gather_objects(own_summary, group, **named)
        _check_same_kinds([summary.kinds for summary in summaries])
        self._locate_members([summary.place for summary in summaries])
        # elements that each rank steps, [N, homes, parameters]
        self._elements = np.array([summary.elements for summary in summaries])
        self._elements = self._elements.reshape(group.size(), len(homes), num_parts)
        self._check_all_stepped()
        self._weights = [
            [part.detach().view(-1) for part in StoredWeights(expert).tensors()] for expert in homes
        ]
        weight_bytes = sum(part.nbytes for part in self._weights[0])
        largest_element = max(summary.element_size for summary in summaries)
        most_elements = int(self._elements.max(axis=(0, 1)).sum())
        # upper bound of the bytes that one rank receives per expert, weights and state together
        self.expert_bytes = weight_bytes + largest_element * most_elements

    def _locate_members(self, places: Sequence[tuple[int, int]]) -> None:
        """Index the group's ranks by place.

        Args:
            places: number in the expert-parallel group and replica of each rank, N pairs.
        """
        self._member = {place: i for i, place in enumerate(places)}
        self._num_ranks = 1 + max(rank for rank, _ in places)
        self._replicas = 1 + max(replica for _, replica in places)

    def _check_all_stepped(self) -> None:
        """Raise ValueError unless all elements of trained parameters are stepped equally often."""
        stepped = 0
        for replica in range(self._replicas):
            members = [self._member[rank, replica] for rank in range(self._num_ranks)]
            stepped = stepped + self._elements[members]
        times, remainder = np.divmod(stepped, [p.numel() for p in self._homes[0]])
        trained = [p.requires_grad for p in self._homes[0]]
        if remainder.any() or (times != times[:1, :1]).any() or not times[..., trained].all():
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
        num_elements = self._homes[0][part].numel()
        # modulo, as several replicas may step the same elements
        begins = (np.cumsum(sizes) - sizes) % num_elements
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
        old_place = divmod(source, len(self._homes))
        new_place = divmod(target, len(self._homes))
        self._move_weights(old_place, new_place, relocation)
        for part in range(len(self._homes[0])):
            self._move_part(part, old_place, new_place, relocation)

    def _move_weights(
        self, old_place: tuple[int, int], new_place: tuple[int, int], relocation: Relocation
    ) -> None:
        """Send the weights from each replica of the old home to the same replica of the new one.

        Args:
            old_place: rank in the expert-parallel group, and home on that rank.
            new_place: the same of the new home.
            relocation: exchange to add to.
        """
        from_rank, from_index = old_place
        to_rank, to_index = new_place
        for replica in range(self._replicas):
            sender = self._member[from_rank, replica]
            receiver = self._member[to_rank, replica]
            for old_weights, new_weights in zip(
                self._weights[from_index], self._weights[to_index], strict=True
            ):
                if sender == self._rank:
                    relocation.send(receiver, old_weights)
                if receiver == self._rank:
                    relocation.receive(sender, [new_weights])

    def _move_part(
        self,
        part: int,
        old_place: tuple[int, int],
        new_place: tuple[int, int],
        relocation: Relocation,
    ) -> None:
        """Send the optimizer state of parameter ``part``; other arguments as in `_move_weights`."""
        from_rank, from_index = old_place
        to_rank, to_index = new_place
        old_shards = self._shards(from_rank, from_index, part)
        begins = [s.begin for s in old_shards if self._member[from_rank, s.rank] == self._rank]
        own_begin = begins[0] if begins else 0
        for shard in self._shards(to_rank, to_index, part):
            receiver = self._member[to_rank, shard.rank]
            for piece in pieces(old_shards, shard):
                sender = self._member[from_rank, piece.rank]
                if sender == self._rank:
                    sent_slice = slice(piece.begin - own_begin, piece.end - own_begin)
                    for _, values in sorted(self._states[from_index][part].kept.items()):
                        relocation.send(receiver, values[0][sent_slice])
                if receiver == self._rank:
                    received = slice(piece.begin - shard.begin, piece.end - shard.begin)
                    for _, values in sorted(self._states[to_index][part].kept.items()):
                        relocation.receive(sender, [tensor[received] for tensor in values])


def _check_same_kinds(kinds_by_rank: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raise ValueError unless all ranks that step a parameter keep the same kind of state.

    Args:
        kinds_by_rank: kinds of state by rank and parameter.
    """
    for part, part_kinds in enumerate(zip(*kinds_by_rank, strict=True)):
        kinds = sorted(set(itertools.chain.from_iterable(part_kinds)))
        if len(kinds) > 1:
            raise ValueError(
                "cannot move experts: the optimizer states of the experts of one layer differ, for "
                f"parameter {part} of an expert: {' or '.join(kinds)}; leave --moe-fssdp-rehome out"
            )
