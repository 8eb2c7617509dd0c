"""Stand-in for slime's process groups that are destroyed for the rollout and made again.

Written after ``slime/utils/reloadable_process_group.py`` of THUDM/slime at commit 624b824a (August
2026), and without its code: every new group is a subclass of ``ProcessGroup`` that forwards to an inner
group, functions of the package ``torch.distributed`` unwrap it, and `destroy` and `reload` replace the
inner groups behind the objects that Megatron holds. Differences: gloo groups are wrapped, too, because
CPU ranks have no others, and the default process group stays, as with slime's
``SLIME_DESTROY_WORLD_PROCESS_GROUP=0``; `replace_world` does what slime does without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

QUERIES = """get_rank get_world_size get_backend get_global_rank get_group_rank
    get_process_group_ranks""".split()
COLLECTIVES = """all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all
    all_to_all_single broadcast reduce reduce_scatter reduce_scatter_tensor barrier send recv isend
    irecv _coalescing_manager""".split()
# slime lists collectives by name; torch 2.13 calls some by new names, and these are all of both
FORWARDED = (
    "barrier broadcast allreduce allreduce_coalesced reduce gather scatter alltoall alltoall_base "
    "all_to_all_single allgather _allgather_base allgather_coalesced all_gather_single "
    "allgather_into_tensor_coalesced all_gather_single_coalesced reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced send recv recv_anysource _start_coalescing _end_coalescing "
    "_get_backend _get_backend_name rank size name shutdown abort"
).split()
_made: list[ReloadableGroup] = []
_original: dict[str, Callable] = {}


class ReloadableGroup(dist.ProcessGroup):
    """A group whose collectives run in ``inner``, which may be destroyed and made again."""

    def __init__(self, inner: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__(_original["get_rank"](inner), _original["get_world_size"](inner))
        self.inner, self.created_with = inner, (args, kwargs)
        _made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _forward(name: str) -> Callable:
    def call(self: ReloadableGroup, *args: Any, **kwargs: Any) -> Any:
        if self.inner is None:
            raise RuntimeError(f"{name} of a process group that was destroyed")
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in FORWARDED:
    setattr(ReloadableGroup, _name, _forward(_name))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, ReloadableGroup) else value


def _unwrapping(function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_inner, args), **{name: _inner(v) for name, v in kwargs.items()})

    return call


def install() -> None:
    """Replace functions of ``torch.distributed``, as slime's actor does before it starts Megatron."""
    for name in ("new_group", *QUERIES, *COLLECTIVES):
        _original[name] = getattr(dist, name)

    def new_group(*args: Any, **kwargs: Any) -> ReloadableGroup:
        return ReloadableGroup(_original["new_group"](*args, **kwargs), args, kwargs)

    dist.new_group = new_group
    for name in (*QUERIES, *COLLECTIVES):
        setattr(dist, name, _unwrapping(_original[name]))
    for name in ("__new__", "__init__"):
        setattr(dist.P2POp, name, _p2p_op(getattr(dist.P2POp, name)))


def _p2p_op(function: Callable) -> Callable:
    def convert(value: Any) -> Any:
        for name in ("isend", "irecv"):
            if value is getattr(dist, name):
                return _original[name]
        return _inner(value)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(convert, args), **{name: convert(v) for name, v in kwargs.items()})

    return call


def destroy() -> int:
    """Destroy all inner groups, as for a rollout; return how many there were."""
    for group in _made:
        dist.destroy_process_group(group.inner)
        group.inner = None
    return len(_made)


def reload() -> None:
    """Make all inner groups again, in the order of their creation."""
    for group in _made:
        args, kwargs = group.created_with
        group.inner = _original["new_group"](*args, **kwargs)


def replace_world(folder: str) -> None:
    """Destroy the default process group with all others, and make all of them again.

    Args:
        folder: folder of the new rendezvous.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    _original["barrier"]()
    dist.destroy_process_group()
    for group in _made:
        group.inner = None
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size
    )
    reload()
