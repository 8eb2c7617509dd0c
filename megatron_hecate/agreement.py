"""All ranks switch FSSDP on alike, or none does and all say why.

Ranks tell each other over the rendezvous store, not over a process group: a rank that was started without the flag is
then a named error after the timeout, not a collective that hangs.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.config import HecateConfig

_round = 0  # how often this process has agreed: every model has keys of its own


def agree(config: HecateConfig, *, num_layers: int, problems: list[str]) -> None:
    """Wait for all ranks of the job and compare notes.

    Args:
        config: this rank's settings.
        num_layers: MoE layers on this rank; none is fine for a pipeline stage, not for a whole model.
        problems: what stops this rank.

    Raises:
        ValueError: when any rank has a problem or other settings, or no rank has a MoE layer.
        TimeoutError: naming the ranks that did not come within ``config.timeout``.
    """
    global _round
    _round += 1
    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    keys = [f"megatron_hecate/agree/{_round}/{r}" for r in range(size)]
    settings = dataclasses.asdict(config)
    store.set(keys[rank], json.dumps({"settings": settings, "layers": num_layers, "problems": problems}))
    try:
        store.wait(keys, timedelta(seconds=config.timeout))
    except RuntimeError as error:  # DistStoreError is one
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"FSSDP: rank {rank} waited {config.timeout:g} s for ranks {missing} to switch FSSDP on; is --moe-fssdp "
            "given on every rank, and do all of them build the model?"
        ) from error
    notes = [json.loads(store.get(key)) for key in keys]

    found = dict.fromkeys(problem for note in notes for problem in note["problems"])
    for other, note in enumerate(notes):
        for name, value in note["settings"].items():
            if value != notes[0]["settings"][name]:
                found[f"rank {other} has {name}={value!r}, rank 0 has {name}={notes[0]['settings'][name]!r}"] = None
    if not any(note["layers"] for note in notes):
        found["the model has no MoE layer; set --num-experts, or leave --moe-fssdp off"] = None
    if found:
        raise ValueError("FSSDP cannot be switched on:\n" + "\n".join(f"  - {problem}" for problem in found))
