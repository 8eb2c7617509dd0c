"""Weights and optimizer state of homes: main parameters, moments and host copies, by shard.

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

from megatron_hecate.comm.agreement import raise_on_all
from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.homes.exchange import Relocation, Shard, pieces
from megatron_hecate.megatron.stored_weights import StoredWeights

# key of the stepped values; other keys are the optimizer's own
MAIN = "main_param"
# TransformerEngine stores state of these dtypes, and in its own tensor classes, with one scale per
# shard
SCALED = (torch.float16, torch.uint8)
# names and dtypes of what is kept for each element of a tensor
Kind = tuple[tuple[str, torch.dtype], ...]


class Portion(NamedTuple):
    """Part of one tensor of an expert that this rank keeps: a weight, or state of an optimizer.

    Args:
        elements: number n of the tensor's elements that are kept here; 0 if only other ranks keep
            some.
        values: tensors [n] by name; all tensors of one name hold the same values.
    """

    elements: int
    values: Mapping[str, Sequence[Tensor]]

    @property
    def kind(self) -> Kind:
        return tuple((name, copies[0].dtype) for name, copies in sorted(self.values.items()))


def _find_states(params: Sequence[Parameter], optimizers: Iterable[Optimizer]) -> list[Portion]:
    """Find the state that ``optimizers`` keep for each of ``params`` on this rank.

    Raises:
        ValueError: for a state that is not one number per element, by name.
    """
    mains = enumerate(getattr(param, MAIN, None) for param in params)
    owner = {id(main): index for index, main in mains if main is not None}
    owner |= {id(param): index for index, param in enumerate(params)}
    begins = sorted((p.data_ptr(), i) for i, p in enumerate(params) if type(p) is Parameter)
    states = [Portion(0, {})] * len(params)
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        for stepped in itertools.chain.from_iterable(groups):
            container = _containing(stepped, params, begins)
            index = owner.get(id(stepped), container)
            if index is not None and not states[index].elements:
                values = _state_of(stepped, optimizer, is_separate=container is None)
                states[index] = Portion(stepped.numel(), values)
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
    begin, index = begins[place]
    param = params[index]
    is_inside = stepped.dtype is param.dtype and stepped.data_ptr() - begin < param.nbytes
    return index if is_inside else None


def _state_of(
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


class _Summary(NamedTuple):
    """What one rank keeps of its homes.

    Args:
        place: see `StateOnRanks`.
        elements: elements that the rank keeps, by home and tensor.
        kinds: different kinds of each tensor, over all homes; empty for a tensor that only other
            ranks keep.
        are_trained: whether the homes are trained, and not frozen.
    """

    place: tuple[int, int]
    elements: list[list[int]]
    kinds: list[set[Kind]]
    are_trained: bool


class StateOnRanks:
    """Weights and optimizer state of one layer's homes, on all ranks that hold a part.

    Each rank with a home keeps its whole weights. With the distributed optimizer it keeps only some
    elements of the home's optimizer state; the range depends on the home's offset in Megatron's
    buffers.

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
        self._rank = group.rank()
        params = homes[0]
        named = {"what": "gathering optimizer states", "label": "homes"}
        with raise_on_all(group, error=ValueError, **named):
            states = _find_states(list(itertools.chain.from_iterable(homes)), optimizers)
        weights = [part.detach().view(-1) for part in StoredWeights(params).tensors()]
        # Elements of each tensor of an expert: of its parameters' states, then of its weights.
        self._sizes = [values.numel() for values in (*params, *weights)]
        # What this rank keeps of each tensor, by home.
        self._portions: list[list[Portion]] = []
        for index, expert in enumerate(homes):
            parts = [part.detach().view(-1) for part in StoredWeights(expert).tensors()]
            home_weights = [Portion(part.numel(), {"weight": [part]}) for part in parts]
            home_states = states[index * len(params) : (index + 1) * len(params)]
            self._portions.append(home_states + home_weights)
        summary = _Summary(
            place,
            elements=[[portion.elements for portion in home] for home in self._portions],
            kinds=[
                {portion.kind for portion in portions if portion.elements}
                for portions in zip(*self._portions, strict=True)
            ],
            are_trained=params[0].requires_grad,
        )
        summaries = gather_objects(summary, group, **named)
        kinds = _common_kinds([summary.kinds for summary in summaries])
        if len({summary.are_trained for summary in summaries}) > 1:
            raise ValueError(
                "cannot move experts: those of one layer are frozen on some ranks only; freeze "
                "them on all ranks or on none"
            )
        # number in the group by rank and replica, [R, D]
        places = [summary.place for summary in summaries]
        self._members = np.empty(np.max(places, axis=0) + 1, np.int64)
        for member, member_place in enumerate(places):
            self._members[member_place] = member
        # elements that each rank keeps, [N, homes, tensors]
        self._elements = np.array([summary.elements for summary in summaries])
        self._check_all_stepped(len(params) if summary.are_trained else 0)
        # upper bound of the bytes that one rank receives per expert, weights and state together
        element_sizes = [sum(dtype.itemsize for _, dtype in kind) for kind in kinds]
        self.expert_bytes = int(self._elements.max(axis=(0, 1)) @ element_sizes)

    def _check_all_stepped(self, num_parameters: int) -> None:
        """Raise ValueError unless all elements of an expert's parameters are stepped equally often.

        Args:
            num_parameters: trained parameters of an expert, all or none.
        """
        times, remainder = np.divmod(self._elements[self._members].sum(axis=1), self._sizes)
        is_stepped = times[..., :num_parameters].all()
        if remainder.any() or (times != times[:1, :1]).any() or not is_stepped:
            raise ValueError(
                "cannot move experts: no torch.optim optimizer stepped all parameters of all "
                "experts equally; leave --moe-fssdp-rehome out"
            )

    def _shards(self, rank: int, index: int, part: int) -> list[Shard]:
        """List the shards of one tensor, by replica.

        Args:
            rank: number of the home's rank in the expert-parallel group.
            index: home on that rank.
            part: tensor of the expert.
        """
        sizes = self._elements[self._members[rank], index, part]
        # modulo, as several replicas may keep the same elements
        begins = (np.cumsum(sizes) - sizes) % self._sizes[part]
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
        for part in range(len(self._sizes)):
            self._move_part(part, source, target, relocation)

    def _move_part(self, part: int, source: int, target: int, relocation: Relocation) -> None:
        """Add the move of tensor ``part`` of an expert; other arguments as in `move`."""
        from_rank, from_index = divmod(source, len(self._portions))
        to_rank, to_index = divmod(target, len(self._portions))
        old_shards = self._shards(from_rank, from_index, part)
        senders = self._members[from_rank]
        begins = [shard.begin for shard in old_shards if senders[shard.rank] == self._rank]
        for shard in self._shards(to_rank, to_index, part):
            receiver = self._members[to_rank, shard.rank]
            for piece in pieces(old_shards, shard):
                sender = senders[piece.rank]
                if sender == self._rank:
                    sent_slice = slice(piece.begin - begins[0], piece.end - begins[0])
                    for _, copies in sorted(self._portions[from_index][part].values.items()):
                        relocation.send(receiver, copies[0][sent_slice])
                if receiver == self._rank:
                    received_slice = slice(piece.begin - shard.begin, piece.end - shard.begin)
                    for _, copies in sorted(self._portions[to_index][part].values.items()):
                        relocation.receive(sender, [values[received_slice] for values in copies])


def _common_kinds(kinds_by_rank: Sequence[Sequence[set[Kind]]]) -> list[Kind]:
    """Return the kind of each tensor, the same on all ranks that keep elements of it.

    Args:
        kinds_by_rank: different kinds by rank and tensor.
    """
    common: list[Kind] = []
    for part, part_kinds in enumerate(zip(*kinds_by_rank, strict=True)):
        kinds = set(itertools.chain.from_iterable(part_kinds))
        if len(kinds) > 1:
            texts = [str([(name, str(dtype)) for name, dtype in kind]) for kind in kinds]
            raise ValueError(
                "cannot move experts: the optimizer states of the experts of one layer differ, for "
                f"parameter {part} of an expert: {' or '.join(sorted(texts))}; leave "
                "--moe-fssdp-rehome out"
            )
        common += kinds or [()]
    return common
