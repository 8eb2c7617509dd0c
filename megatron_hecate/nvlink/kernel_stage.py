"""A stage of a transfer inside one NVLink domain: its program, its launch and its failure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.comm.transfer import Stopwatch
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.peers import Peers
from megatron_hecate.nvlink.places import Place
from megatron_hecate.nvlink.program import Program
from megatron_hecate.nvlink.schedule import TransferSchedule


@dataclasses.dataclass(frozen=True)
class TransferJob:
    """One transfer of a layer.

    Args:
        what: "spAG" or "spRS".
        label: name of the layer.
        rank: rank and size of the FSSDP group as text, "rank 0 of 4".
        timeout: seconds per wait.
        itemsize: bytes per element.
        memory: function that returns the tensors of a place in this rank's memory.
        watch: stopwatch whose "begin" is marked when all ranks have arrived.
    """

    what: str
    label: str
    rank: str
    timeout: float
    itemsize: int
    memory: Callable[[Place], Sequence[Tensor]]
    watch: Stopwatch | None = None

    def mark_begin(self) -> None:
        """Mark the "begin" of the stopwatch, unless it is marked or there is no stopwatch."""
        if self.watch is not None and not self.watch.begun:
            self.watch.mark("begin")

    @property
    def name(self) -> str:
        return f"{self.label}: {self.what}"

    @property
    def sums(self) -> bool:
        """True for a spRS."""
        return self.what == "spRS"


@dataclasses.dataclass(frozen=True, eq=False)
class KernelStage:
    """Stage that is ready to run.

    Args:
        job: transfer of the stage.
        schedule: steps of this rank.
        program: the steps in the kernels' format.
        peers: memory of the domain.
        begin: progress counters before the stage.
    """

    job: TransferJob
    schedule: TransferSchedule
    program: Program
    peers: Peers
    begin: int

    def run(self, kernels: TransferKernels) -> None:
        """Run the stage on the current stream, or on the host.

        Args:
            kernels: kernels of transfers.

        Raises:
            TransferError: a peer died or did not answer in time, in this or an earlier transfer.
        """
        start = time.monotonic()
        if self.peers.failure is None:
            self._launch(kernels)
        if self.peers.failure is not None:
            raise TransferError(self._explain_failure(time.monotonic() - start))

    def _launch(self, kernels: TransferKernels) -> None:
        """Upload the program and launch it."""
        peers = self.peers
        name = "fssdp_reduce" if self.job.sums else "fssdp_gather"
        try:
            kernels.run(name, self.program, begin=self.begin, met=self.job.mark_begin)
        except RuntimeError:
            # With a recorded failure the barrier of the peers timed out, which ends the CUDA
            # context; `run` then raises an error with the reason.
            if peers.failure is None:
                raise

    def _explain_failure(self, seconds: float) -> str:
        """Describe the recorded failure; on CPU ranks print it as well.

        Args:
            seconds: seconds since the stage began.
        """
        job = self.job
        peers = self.peers
        schedule = self.schedule
        if peers.device.type == "cuda" or not schedule.peers:
            return peers.explain_failure()
        steps = {peer: peers.steps_of(peer, since=self.begin) for peer in sorted(schedule.peers)}
        # Other peers may be waiting for the same rank, so the rank furthest behind is named.
        last = min(steps, key=steps.__getitem__)
        text = (
            f"{job.name} failed on {job.rank} after {seconds:.1f} s (timeout {job.timeout:g} s): "
            f"expected rank {last} to finish {schedule.num_steps} steps, {max(0, steps[last])} "
            f"were seen. Rank {last} died, hangs, or did not take part, in this transfer or in an "
            "earlier one."
        )
        # The caller that waits for the transfer may be stuck elsewhere, so the reason is printed.
        peers.report(text)
        return text
