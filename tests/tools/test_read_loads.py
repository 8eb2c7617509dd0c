"""Traces that ``what-if`` reads. Oracle: the loads as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter
from megatron_hecate.tools.run import Run

pytestmark = pytest.mark.fast


def test_kinds_of_traces(tmp_path: Path) -> None:
    load = np.arange(1, 25).reshape(2, 3, 4)
    np.savez(tmp_path / "sums.npz", load=load)
    assert (Run.read(tmp_path / "sums.npz").record.load == load).all()
    info = RunInfo(
        mode="observe",
        layers=("layer 1", "layer 2", "layer 3"),
        num_experts=4,
        ranks=2,
        node=(0, 0),
    )
    writer = RunWriter(tmp_path / "run", info)
    for iteration, loads in enumerate(load):
        writer.append(iteration, load=loads)
    writer.stop()
    assert (Run.read(tmp_path / "run").record.load == load).all()
    counts = np.stack([load, 2 * load], axis=2)
    np.savez(tmp_path / "sources.npz", counts=counts)
    assert (Run.read(tmp_path / "sources.npz").record.load == 3 * load).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(3)}, "holds no loads (it has no array counts or load, but other)"),
        ({"counts": np.ones((2, 2))}, "counts is float64 of shape (2, 2)"),
        ({"counts": -np.ones((1, 1, 1, 2))}, "counts must be finite and not negative"),
        ({"load": np.zeros((0, 1, 2))}, "give a folder of --moe-fssdp-record, or an .npz"),
    ],
)
def test_bad_traces(arrays: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as error:
        Run.read(tmp_path / "bad.npz")
    assert message in str(error.value)
    with pytest.raises(ValueError, match=r"missing\.npz does not exist; give a folder"):
        Run.read(tmp_path / "missing.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no record of a run"):
        Run.read(tmp_path / "empty")


def test_a_changed_trace_is_named(tmp_path: Path) -> None:
    """The libraries that read an .npz have several kinds of errors for changed bytes; all name the file."""
    path = tmp_path / "changed.npz"
    np.savez_compressed(path, counts=np.random.default_rng(0).integers(1, 9, (4, 2, 2, 8)))
    right = path.read_bytes()
    refused = 0
    places = range(0, len(right), 5)
    for place in places:
        path.write_bytes(right[:place] + bytes([right[place] ^ 0x55]) + right[place + 1 :])
        try:
            Run.read(path)
        except ValueError as error:
            assert str(error).startswith(f"{path} holds no loads (")
            refused += 1
    assert refused > len(places) // 2
