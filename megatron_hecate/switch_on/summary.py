"""The lines that rank 0 prints when FSSDP is on."""

from __future__ import annotations

from megatron_hecate.comm.agreement import Note
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.config import HecateConfig
from megatron_hecate.plan import H100, Speeds
from megatron_hecate.replicas.memory_estimate import JobMemory, RankMemory
from megatron_hecate.step.layer_parts import LayerParts
from megatron_hecate.switch_on.connect import Connection


def summarize_layers(parts: list[LayerParts], config: HecateConfig) -> str:
    """Describe the layers of this rank for the line of `print_summary`."""
    experts = parts[0].homes_only.num_experts
    ranks = len(parts[0].ranks)
    text = f"{experts} experts over {ranks} ranks, {config.slots} slots per rank and layer"
    if config.rehome:
        text += f", search for better homes every {config.rehome} iterations"
    return text


def job_memory(notes: list[Note]) -> JobMemory:
    """Collect the memory of all ranks with MoE layers."""
    return JobMemory(
        {rank: RankMemory.parse(note.memory) for rank, note in enumerate(notes) if note.memory}
    )


def print_summary(
    notes: list[Note], config: HecateConfig, speeds: Speeds, connection: Connection
) -> None:
    """Print the settings of the job and the memory of every rank.

    Ranks with the same figures share a table.
    """
    names: set[str] = set()
    for note in notes:
        names.update(note.layers)
    summary = next(note.summary for note in notes if note.summary)
    transport = f"transport {config.transport}"
    if connection.why:
        transport += f" ({connection.why})"
    late = ""
    if config.late_replicas:
        late = f", at most {config.late_replicas} late replicas per layer"
    measured = config.speeds or ("an H100 node" if speeds is H100 else "CPU ranks")
    print(
        f"FSSDP on: {len(names)} MoE layers, {summary}, lifetime {config.lifetime}, "
        f"{transport}{late}, cost model with the speeds of {measured}",
        flush=True,
    )
    if config.slots:
        print(job_memory(notes).describe(config.lifetime), flush=True)
    if connection.exposed:
        print(f"FSSDP: {connection.exposed}", flush=True)
        rounds = next((note.rounds for note in notes if note.rounds), "")
        if rounds and connection.name == P2P.name:
            print(f"FSSDP: {rounds}", flush=True)
