"""The transport ``p2p``: spAG and spRS by ``torch.distributed`` sends and receives, any backend."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import HomeGradients, LayerBuffer, TransferPlan, chunks_in
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.faults import under_way

# Upper bounds of the gradients that a home receives at once: their number, and their bytes unless
# a single gradient is larger. Gradients of further replicas are received in further rounds.
ARRIVING: int = 4
ARRIVING_BYTES: int = 256 << 20
NAMED: int = 8  # messages of a batch that one line lists


class P2P:
    """Transport of one FSSDP group's replicas by messages. See `transport.Transport`.

    Gradients are received in a staging buffer that all layers share, so a return waits for the
    previous return.

    Args:
        group: process group of the ranks.
        timeout: seconds to wait for a peer. With NCCL the group's own timeout applies: a shorter
            wait would need the host, which then could not run ahead of the stream.
    """

    name = "p2p"
    scatters = False
    is_capturable = False

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.group = group
        self.timeout = timeout
        self._num_transfers = 0
        self._staging = torch.empty(0, dtype=torch.uint8)
        # Chunks of the staging buffer by number, elements and data type.
        self._staged: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._returning: Transfer | None = None

    @cached_property
    def ranks(self) -> str:
        """This rank and the size of the group, for errors."""
        return f"rank {self.group.rank()} of {self.group.size()}"

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """Return the bytes of the staging buffer: gradients that arrive at once, and their sum."""
        needs = []
        for layer in layers:
            dtype = torch.promote_types(layer.grad_dtype, torch.float32)
            chunks = _arriving(layer.elements, dtype) + 1
            needs.append(chunks * LayerBuffer.aligned(layer.elements, dtype))
        return max(needs)

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """Allocate [size] uint8 anywhere on ``device``, and the staging buffer."""
        # The old staging buffer is freed before the new one is allocated.
        self.release()
        self._staging = torch.empty(self.extra_bytes(layers), dtype=torch.uint8, device=device)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def release(self) -> None:
        self._returning = None
        self._staged.clear()
        self._staging = self._staging.new_empty(0)

    def write(self, plans: Mapping[str, TransferPlan]) -> None:
        raise AssertionError("no CUDA graph holds messages")

    def prepare(self, plan: TransferPlan) -> None:
        # The plan caches these properties, and the properties from which they are computed.
        _ = plan.replicated, plan.slots, plan.turns

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
    ) -> Transfer:
        """Begin a spAG: post all messages now; they have completed when `Transfer.wait` returns."""
        messages = self.batch(self.next_tag(), what="spAG", label=label)

        def steps() -> Iterator[None]:
            for index, rank in plan.sends:
                for tensor in homes[index]:
                    messages.send(tensor.detach().contiguous().view(-1), rank)
            sizes = [tensor.numel() for tensor in homes[0]]
            for slot, rank in plan.receives:
                for part in slots[slot].split_with_sizes(sizes):
                    messages.receive(part, rank)
            messages.start()
            yield
            messages.finish()

        return Transfer(steps(), homes[0][0].device, what="spAG", label=label)

    def exchange_loads(self, num_experts: int, *, label: str) -> None: ...

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS, in rounds of the chunks that fit into the staging buffer at once."""
        previous = self._returning
        self._returning = None
        if previous is not None:
            previous.wait()
        steps = self._sum_in_rounds(plan, slots, homes, tag=self.next_tag(), label=label)
        self._returning = Transfer(steps, self._staging.device, what="spRS", label=label)
        return self._returning

    def _sum_in_rounds(
        self,
        plan: TransferPlan,
        slots: Sequence[Tensor],
        homes: HomeGradients,
        *,
        tag: int,
        label: str,
    ) -> Iterator[None]:
        """Yield the steps of a spRS.

        Both ends of a message know its round (`TransferPlan.turns`), so that each round is complete
        in itself: with NCCL a batch ends when all of its messages have been matched.
        """
        if not plan.sends and not plan.receives:
            return
        sends = plan.sends
        elements = slots[0].numel()
        dtype = torch.promote_types(slots[0].dtype, torch.float32)
        at_once = _arriving(elements, dtype)
        *_, total = self._chunks_of_staging(at_once + 1, elements, dtype)
        staged = self._chunks_of_staging(at_once, elements, slots[0].dtype)
        rounds = 1 + max([(len(sends) - 1) // at_once, *(turn // at_once for turn in plan.turns)])
        last_in_background = rounds - 1 if total.is_cuda else 0
        for index in range(rounds):
            messages = self.batch(tag, what="spRS", label=label)
            for (slot, rank), turn in zip(plan.receives, plan.turns, strict=True):
                if turn // at_once == index:
                    messages.send(slots[slot], rank)
            arriving = sends[index * at_once : (index + 1) * at_once]
            for chunk, (_, rank) in zip(staged, arriving, strict=False):
                messages.receive(chunk, rank)
            messages.start()
            # NCCL matches messages in order, so on a GPU all rounds are posted before `wait`.
            # Elsewhere the host would wait for each round, so only the first is posted before.
            if index == last_in_background:
                yield
            messages.finish()
            received = zip(staged, arriving, strict=False)
            for index_of_chunk, (chunk, (home, _)) in enumerate(received, index * at_once):
                # Gradients are added in order of the replicas' ranks, so runs repeat bitwise.
                if index_of_chunk == 0 or sends[index_of_chunk - 1][0] != home:
                    total.copy_(chunk)
                else:
                    total += chunk
                if index_of_chunk + 1 == len(sends) or sends[index_of_chunk + 1][0] != home:
                    homes.add(home, total)

    def _chunks_of_staging(self, count: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return chunks of the staging buffer, made once for all returns of layers of one size."""
        key = (count, elements, dtype)
        if key not in self._staged:
            with lasting_tensors():
                self._staged[key] = chunks_in(self._staging, *key)
        return self._staged[key]

    def next_tag(self) -> int:
        """Return the tag of a new transfer of the group, the same on all ranks.

        All ranks start the same transfers in the same order. Backends with tags (gloo) match the
        messages of a transfer by its tag, so that two transfers may be in flight.
        """
        self._num_transfers += 1
        return self._num_transfers % (1 << 30)

    def batch(self, tag: int, *, what: str, label: str) -> _Messages:
        """Create an empty batch of messages of the transfer ``tag``, to be posted together."""
        return _Messages(self, tag, f"{label}: {what}")


class _Messages:
    """Batch of sends and receives, with their peers, so that an error can name the failed one.

    Messages are posted by the group's own methods: ``dist.batch_isend_irecv`` calls the same ones,
    after some thirty Python calls per message that convert ranks and check arguments.
    """

    def __init__(self, transport: P2P, tag: int, name: str) -> None:
        self._transport = transport
        self._tag = tag
        self._name = name
        # (tensor, rank in the group, True to send it)
        self._messages: list[tuple[Tensor, int, bool]] = []
        self._works: list[dist.Work] = []
        self._is_cuda = False
        self._started = 0.0

    def send(self, tensor: Tensor, rank: int) -> None:
        self._messages.append((tensor, rank, True))

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._messages.append((tensor, rank, False))

    def start(self) -> None:
        """Post all messages."""
        self._started = time.monotonic()
        if not self._messages:
            return
        device = self._messages[0][0].device
        self._is_cuda = device.type == "cuda"
        try:
            if _coalesces(self._transport.group, device):
                # As one group of calls, which NCCL runs concurrently. slime replaces the function
                # of this name in torch.distributed by one that may wait for the GPU.
                manager = distributed_c10d._coalescing_manager
                with manager(self._transport.group, device, async_ops=True) as coalesced:
                    self._post()
                self._works = coalesced.works
            else:
                self._post()
        except RuntimeError as error:
            raise self._failure(len(self._works), error, seen=0) from error
        if self._is_cuda:
            sizes = [(rank, sends, tensor.nbytes) for tensor, rank, sends in self._messages]
            under_way.note(
                self._works, partial(_describe, self._name, self._transport.ranks, sizes)
            )

    def _post(self) -> None:
        """Post each message and keep its handle, which is void while the group coalesces."""
        for tensor, rank, sends in self._messages:
            post = self._transport.group.send if sends else self._transport.group.recv
            self._works.append(post([tensor], rank, self._tag))

    def finish(self) -> None:
        """Wait for all messages: on a GPU the current stream waits, else the host."""
        count = 0
        try:
            for work in self._works:
                if self._is_cuda:
                    work.wait()
                else:
                    work.wait(timeout=timedelta(seconds=self._transport.timeout))
                count += 1
        except RuntimeError as error:
            raise self._failure(count, error, seen=count) from error

    def _failure(self, failed: int, error: RuntimeError, *, seen: int) -> TransferError:
        """Return an error that names the peer of the failed message.

        Args:
            failed: index of the failed message.
            error: error of torch.
            seen: number of messages that were complete before.
        """
        tensor, peer, sends = self._messages[min(failed, len(self._messages) - 1)]
        seconds = time.monotonic() - self._started
        return TransferError(
            f"{self._name} failed on {self._transport.ranks} after {seconds:.1f} s (timeout "
            f"{self._transport.timeout:g} s), waiting to {_action(sends)} rank {peer} "
            f"({tensor.nbytes} bytes): expected {len(self._messages)} messages, {seen} were seen. "
            f"Rank {peer} died, hangs, or did not take part. Cause: {error}"
        )


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether calls of ``group`` can be posted together."""
    try:
        return group._get_backend(device).supports_coalescing
    except RuntimeError:
        # Groups that are implemented in Python may have no backend.
        return False


def _describe(name: str, ranks: str, sizes: list[tuple[int, bool, int]]) -> str:
    """Describe a batch: layer, transfer, this rank, and the expected messages by peer.

    Args:
        name: layer and transfer.
        ranks: this rank and the size of the group.
        sizes: rank, True to send, and bytes of each message.
    """
    bytes_by_peer: Counter[tuple[int, bool]] = Counter()
    for rank, sends, size in sizes:
        bytes_by_peer[rank, sends] += size
    parts = [
        f"{_action(sends)} rank {rank} ({size} bytes)"
        for (rank, sends), size in bytes_by_peer.items()
    ]
    ending = ""
    if len(parts) > NAMED:
        ending = f", and {len(parts) - NAMED} more"
    return f"{name}, {ranks} expected to {', '.join(parts[:NAMED])}{ending}"


def _action(sends: bool) -> str:
    return "send to" if sends else "receive from"


def _arriving(elements: int, dtype: torch.dtype) -> int:
    """Return how many gradients a home receives at once."""
    return max(1, min(ARRIVING, ARRIVING_BYTES // LayerBuffer.aligned(elements, dtype)))
