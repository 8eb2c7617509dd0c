"""Distributed checkpoints of `tiny_gpt` models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def state_of(run: Any, metadata: dict = METADATA, *, loading: bool) -> dict:
    """Model and optimizer as Megatron shards them."""
    model = run.chunks[0].module.sharded_state_dict(metadata=metadata)
    optimizer = run.optimizer.sharded_state_dict(dict(model), is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save(run: Any, folder: Path, metadata: dict = METADATA) -> None:
    """Save a `tiny_gpt.Trained`."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(state_of(run, metadata, loading=False), str(folder))


def load(run: Any, folder: Path, metadata: dict = METADATA) -> None:
    """Load into a `tiny_gpt.Trained`."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(state_of(run, metadata, loading=True), str(folder))
    run.chunks[0].module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])


def shared_folder(name: str) -> Path:
    """One folder for all ranks."""
    path = Path(os.environ["TEST_FOLDER"], name)
    path.mkdir(exist_ok=True)
    return path
