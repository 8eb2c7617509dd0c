"""The folder of a run. Oracle: the arrays that were written, kept apart; the files on disk; the operating system's own
refusal to write."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.record import run_writer
from megatron_hecate.record.run_folder import RunInfo, read
from megatron_hecate.record.run_writer import RunWriter

pytestmark = pytest.mark.fast
INFO = RunInfo(
    mode="observe", layers=("layer 1", "layer 3"), num_experts=6, ranks=2, node=(0, 1), top_k=2
)


def _load(iteration: int, layers: int = 2, experts: int = 6) -> np.ndarray:
    return np.random.default_rng(iteration).integers(0, 70_000, (layers, experts))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("loads-*.npz"))


def test_what_was_written_is_read_and_readable_while_it_grows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "new" / "run", INFO, seconds=1e6)
    with pytest.raises(ValueError, match="holds no iteration of stage 0 yet"):
        read(tmp_path / "new" / "run")
    for iteration in range(1, 601):
        writer.append(iteration, load=_load(iteration), time=iteration / 2)
        if iteration in (1, 2, 300):
            writer.flush()
            record = read(tmp_path / "new" / "run")
            assert record.iteration.tolist() == list(range(1, iteration + 1))
    writer.close()
    record = read(tmp_path / "new" / "run")
    assert record.info == dataclasses.replace(INFO, first=1)
    assert record.iteration.tolist() == list(range(1, 601))
    assert record.time.tolist() == [iteration / 2 for iteration in range(1, 601)]
    assert (record.load == np.stack([_load(iteration) for iteration in range(1, 601)])).all()
    assert record.load.dtype == np.int64
    assert record.replica is None
    assert record.window is None and record.copy is None
    assert not list(tmp_path.rglob("*.tmp"))


def test_all_arrays_of_a_run_with_replicas_of_two_stages(tmp_path: Path) -> None:
    """Stages hold alternating layers, other numbers of experts, and have recorded other iterations."""
    stages = {
        0: (("layer 2", "layer 10"), 4, range(5, 40)),
        1: (("layer 3", "mtp layer 1", "layer 11"), 6, range(37)),
    }
    rows = {}
    for stage, (layers, experts, iterations) in stages.items():
        info = RunInfo(
            mode="fssdp", layers=layers, num_experts=experts, ranks=2, node=(0, 0), slots=3
        )
        writer = RunWriter(tmp_path, info, stage=stage)
        for iteration in iterations:
            rng, size = np.random.default_rng((stage, iteration)), len(layers)
            rows[stage, iteration] = dict(
                load=rng.integers(0, 5e9, (size, experts)),
                replica=rng.integers(-1, experts, (size, 2, 3)),
                late=rng.integers(0, 3, size),
                rank_load=rng.integers(0, 5e9, (size, 2)),
                crossing=rng.integers(0, 100, size),
                window=rng.uniform(0, 1, size),
                copy=np.full(size, np.nan if iteration == 20 else 1e-4),
            )
            writer.append(iteration, time=iteration + stage, **rows[stage, iteration])
        writer.close()
    record = read(tmp_path)
    assert record.info.layers == ("layer 2", "layer 3", "layer 10", "layer 11", "mtp layer 1")
    assert record.info.num_experts == 6
    assert record.iteration.tolist() == list(range(5, 37))
    assert record.time.tolist() == list(range(6, 38))
    for at, (stage, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 2), (1, 1)]):
        for name in ("load", "replica", "late", "rank_load", "crossing", "window", "copy"):
            written = np.stack([rows[stage, iteration][name][place] for iteration in range(5, 37)])
            found = getattr(record, name)[:, at]
            if name == "load":
                assert not found[:, written.shape[1] :].any()
                found = found[:, : written.shape[1]]
            assert np.array_equal(found, written, equal_nan=name == "copy"), (name, at)


def test_bytes_are_bounded_and_stages_keep_the_same_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_writer.files.os, "fsync", lambda _: None)  # which takes milliseconds
    bound, newest = 32 << 10, 1500
    sizes, alone = [], None
    for stage, layers in enumerate((2, 7)):
        names = tuple(f"layer {stage * 2 + i}" for i in range(layers))
        info = RunInfo(mode="observe", layers=names, num_experts=6, ranks=2, node=(0, 1))
        writer = RunWriter(tmp_path / str(stage), info, stage=stage, bound=bound, seconds=1e6)
        for iteration in range(1, newest + 1):
            writer.append(iteration, load=_load(iteration, layers))
            if iteration % 50 == 0:
                writer.flush()
                sizes.append(_size(tmp_path / str(stage)))
        writer.close()
        for path in (tmp_path / str(stage)).iterdir():
            path.rename(tmp_path / path.name)
        alone = alone or read(tmp_path)
    assert max(sizes) <= bound * 1.2  # the one that grows is not compressed
    assert max(sizes) > bound / 2
    record = read(tmp_path)
    assert len(alone.iteration) > len(record.iteration) > 100
    assert record.iteration[-20:].tolist() == list(
        range(newest - 19, newest + 1)
    )  # the newest are never thinned
    steps = np.diff(record.iteration)
    assert (np.diff(steps) <= 0).sum() == len(steps) - 1, "older ones are at least as far apart"
    assert steps[0] > 1
    assert record.iteration[0] < newest / 10
    assert (
        record.load == [np.concatenate([_load(i), _load(i, 7)]) for i in record.iteration]
    ).all()


def test_a_run_that_goes_back_to_a_checkpoint_is_continued(tmp_path: Path) -> None:
    for first, last, shift in ((1, 30, 0), (11, 20, 1000)):
        writer = RunWriter(tmp_path, INFO)
        for iteration in range(first, last + 1):
            writer.append(iteration, load=_load(iteration + shift))
        if shift:  # and once more, in the same process
            writer.append(16, load=_load(7))
        writer.close()
    record = read(tmp_path)
    assert record.iteration.tolist() == list(range(1, 17))
    expected = [_load(i if i <= 10 else i + 1000) for i in range(1, 16)] + [_load(7)]
    assert (record.load == np.stack(expected)).all()


def test_another_run_and_another_job_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = RunWriter(tmp_path, INFO, seconds=1e6)
    with pytest.raises(
        ValueError, match=r"holds another run.*2 layers, 6 experts.*name another folder"
    ):
        RunWriter(
            tmp_path,
            RunInfo(mode="observe", layers=("layer 1",), num_experts=6, ranks=2, node=(0, 1)),
        )
    new = RunWriter(tmp_path, INFO, seconds=1e6)
    old.append(1, load=_load(0))
    new.append(1, load=_load(1))
    new.close()
    old.close()
    assert "another job writes there" in capsys.readouterr().err
    assert (read(tmp_path).load == _load(1)).all()


def test_stages_of_another_run_are_not_mixed_with_those_that_are_there(tmp_path: Path) -> None:
    """A run of one stage, then the same model as two stages, of which the second finds no file of its own number; a
    stage of another mode. Oracle: the folder as it was."""
    writer = RunWriter(tmp_path, INFO)
    writer.append(1, load=_load(1))
    writer.close()
    before = sorted(path.name for path in tmp_path.glob("*-*.[nj]*"))
    for mode, layer in (("observe", "layer 3"), ("fssdp", "layer 4")):
        info = RunInfo(mode=mode, layers=(layer,), num_experts=6, ranks=2, node=(0, 1))
        with pytest.raises(
            ValueError, match=r"holds another run.*2 layers, 6 experts.*name another folder"
        ):
            RunWriter(tmp_path, info, stage=1)
    assert sorted(path.name for path in tmp_path.glob("*-*.[nj]*")) == before
    assert (read(tmp_path).load == _load(1)).all()


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    """The operating system refuses files past a limit, as a full disk does; later there is room again."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_run_folder as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = t.RunWriter({str(tmp_path)!r}, t.INFO, seconds=1e6)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for iteration in range(1, 901):
    if iteration == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    if iteration == 700:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.append(iteration, load=t._load(iteration))
    if iteration % 50 == 1:
        writer.flush()
assert len(writer._rows) < 300, "what cannot be written piles up"
print("trained")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == "trained\n"
    assert len(ran.stderr.splitlines()) == 1
    assert "cannot be written (OSError: [Errno 27]" in ran.stderr
    assert "training continues" in ran.stderr
    record = read(tmp_path)  # closed at exit
    assert record.iteration.tolist() == [1, *range(513, 901)]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader beside a writer that flushes and thins all the time finds whole iterations, the newest it was told."""
    monkeypatch.setattr(run_writer.files.os, "fsync", lambda _: None)
    monkeypatch.setattr(run_writer, "SEGMENT_ITERATIONS", 8)
    writer = RunWriter(tmp_path, INFO, bound=16 << 10, seconds=1e-4)
    writer.append(0, load=_load(0))
    writer.flush()
    flushed, done, failures = [0], threading.Event(), []

    def read_on() -> None:
        while not done.is_set():
            at_least = flushed[0]
            try:
                record = read(tmp_path)
                assert record.iteration[-1] >= at_least
                assert (np.diff(record.iteration) > 0).all()
                assert all(
                    (load == _load(i)).all()
                    for i, load in zip(record.iteration, record.load, strict=True)
                )
            except Exception as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read_on)
    reader.start()
    for iteration in range(1, 1200):
        writer.append(iteration, load=_load(iteration))
        if iteration % 3 == 0:
            writer.flush()
            flushed[0] = iteration
    done.set()
    reader.join()
    writer.close()
    assert not failures, failures


def test_a_run_that_goes_on_with_another_dispatcher_is_read(tmp_path: Path) -> None:
    """Only Megatron's all-to-all tells what crosses nodes: some segments hold an array that others lack."""
    for first, more in ((1, {"crossing": np.array([3, 4])}), (4, {})):
        writer = RunWriter(tmp_path, INFO)
        for iteration in range(first, first + 3):
            writer.append(iteration, load=_load(iteration), **more)
        writer.close()
    record = read(tmp_path)
    assert record.iteration.tolist() == [1, 2, 3, 4, 5, 6]
    assert (record.load == np.stack([_load(i) for i in range(1, 7)])).all()
    assert record.crossing is None


def test_bytes_that_were_changed_are_named(tmp_path: Path) -> None:
    """Wherever a disk has changed a byte; the reader's libraries have several kinds of errors for it."""
    writer = RunWriter(tmp_path, INFO)
    for iteration in range(257):
        writer.append(iteration, load=_load(iteration))
    writer.close()
    segment = min(tmp_path.glob("loads-*.npz"))
    right = segment.read_bytes()
    directory = range(
        len(right) - 1000, len(right)
    )  # of the archive: where most kinds of errors come from
    places = [(at, 0x55) for at in range(0, len(right), len(right) // 100)]
    places += [(at, mask) for at in directory for mask in (0x55, 0xFF)]
    refused = 0
    for at, mask in places:
        segment.write_bytes(right[:at] + bytes([right[at] ^ mask]) + right[at + 1 :])
        try:
            read(tmp_path)
        except ValueError as error:
            assert f"{segment.name} is broken" in str(error)
            refused += 1
    assert refused > len(places) // 2


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record of a run"):
        read(tmp_path)
    writer = RunWriter(tmp_path, INFO)
    writer.append(1, load=_load(1))
    writer.close()
    (segment,) = tmp_path.glob("loads-*.npz")
    segment.write_bytes(segment.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"{segment.name} is broken"):
        read(tmp_path)
    (tmp_path / "run-000.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="version 2, this package reads 1"):
        read(tmp_path)


def test_reading_needs_numpy_alone() -> None:
    code = """
import sys
import megatron_hecate.record.run_folder, megatron_hecate.record.run_writer
assert not {"torch", "megatron", "numba"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
