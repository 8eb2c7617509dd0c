"""The folder of a run. Oracle: the arrays that were written, kept apart; the files on disk; the threads of this
process; the operating system's own refusal to write."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import recorded
import torch.distributed as dist

from megatron_hecate.__main__ import main
from megatron_hecate.record import job_metrics, recorder, run_folder
from megatron_hecate.record.run_folder import RunInfo, read
from megatron_hecate.record.run_writer import RunWriter

pytestmark = pytest.mark.fast
INFO = RunInfo(
    mode="observe", layers=("layer 1", "layer 3"), num_experts=6, ranks=2, node=(0, 1), top_k=2
)


def _load(iteration: int, layers: int = 2, experts: int = 6) -> np.ndarray:
    return np.random.default_rng(iteration).integers(0, 70_000, (layers, experts))


def _write(folder: Path, iterations: range, *, job: int = 0, **columns: np.ndarray) -> Path:
    """Record iterations of the job with this number; its loads differ from other jobs'."""
    started = f"2026-11-28T11:50:0{job}.123+00:00"
    writer = RunWriter(folder, dataclasses.replace(INFO, started=started))
    for iteration in iterations:
        writer.append(iteration, load=_load(iteration + 1000 * job), **columns)
    writer.stop()
    return folder


def test_what_was_written_is_read_and_readable_while_it_grows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "new" / "run", INFO)
    with pytest.raises(ValueError, match="holds no iteration yet"):
        read(tmp_path / "new" / "run")
    for iteration in range(1, 601):
        writer.append(iteration, load=_load(iteration), time=iteration / 2)
    writer.stop()
    record = read(tmp_path / "new" / "run")
    assert record.info == INFO and record.stages == (INFO,)
    assert record.iteration.tolist() == list(range(1, 601))
    assert record.time.tolist() == [iteration / 2 for iteration in range(1, 601)]
    assert (record.load == np.stack([_load(iteration) for iteration in range(1, 601)])).all()
    assert record.load.dtype == np.int64
    assert record.replica is None
    assert record.window is None
    (path,) = (tmp_path / "new" / "run").iterdir()
    # Two layers with six loads of 4 bytes, number and time of the iteration, and the checksum.
    assert path.stat().st_size == len(path.open("rb").readline()) + 600 * (2 * 6 * 4 + 8 + 8 + 4)


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
                load=rng.integers(0, 4e9, (size, experts)),
                replica=rng.integers(-1, experts, (size, 2, 3)),
                late=rng.integers(0, 3, size),
                rank_load=rng.integers(0, 4e9, (size, 2)),
                crossing=rng.integers(0, 100, size),
                window=np.full(size, np.nan if iteration == 20 else 1e-4, np.float32),
            )
            writer.append(iteration, time=iteration + stage, **rows[stage, iteration])
        writer.stop()
    record = read(tmp_path)
    assert record.info.layers == ("layer 2", "layer 3", "layer 10", "layer 11", "mtp layer 1")
    assert [stage.layers for stage in record.stages] == [layers for layers, _, _ in stages.values()]
    assert record.info.num_experts == 6
    assert record.iteration.tolist() == list(range(5, 37))
    assert record.time.tolist() == list(range(6, 38))
    for at, (stage, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 2), (1, 1)]):
        for name in ("load", "replica", "late", "rank_load", "crossing", "window"):
            written = np.stack([rows[stage, iteration][name][place] for iteration in range(5, 37)])
            found = getattr(record, name)[:, at]
            if name == "load":
                assert not found[:, written.shape[1] :].any()
                found = found[:, : written.shape[1]]
            assert np.array_equal(found, written, equal_nan=name == "window"), (name, at)


def test_a_long_record_is_read_with_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MOST_READ", 100)
    record = read(_write(tmp_path, range(1, 251)))
    assert record.iteration.tolist() == list(range(1, 251, 3))
    assert (record.load == np.stack([_load(i) for i in range(1, 251, 3)])).all()


def test_a_run_that_goes_back_to_a_checkpoint_is_continued(tmp_path: Path) -> None:
    """In another job, and once more in the same process."""
    _write(tmp_path, range(1, 31))
    _write(tmp_path, [*range(11, 21), 16], job=1)
    record = read(tmp_path)
    assert record.iteration.tolist() == list(range(1, 17))
    expected = [_load(i if i <= 10 else i + 1000) for i in range(1, 17)]
    assert (record.load == np.stack(expected)).all()


def test_jobs_in_one_folder_hide_nothing(tmp_path: Path) -> None:
    """A job that begins again, one of another model, and one that has not trained yet: each has files of its own."""
    _write(tmp_path, range(1, 11))
    _write(tmp_path, range(1, 4), job=1)
    assert read(tmp_path).load.tolist() == [_load(1000 + i).tolist() for i in (1, 2, 3)]
    other = dataclasses.replace(INFO, layers=("layer 1",), num_experts=6)
    writer = RunWriter(tmp_path, dataclasses.replace(other, started="2026-11-28T11:51+00:00"))
    assert read(tmp_path).iteration.tolist() == [1, 2, 3]
    writer.append(2, load=_load(5, layers=1))
    writer.stop()
    assert read(tmp_path).load.tolist() == [_load(5, layers=1).tolist()]
    first, second, third = sorted(path for path in tmp_path.iterdir())
    assert first.name == "2026-11-28T115000.123+0000"
    assert read(first).iteration.tolist() == list(range(1, 11))
    assert read(second).iteration.tolist() == [1, 2, 3]
    assert read(third).info.layers == ("layer 1",)


def test_a_job_that_starts_again_at_the_same_time_is_continued(tmp_path: Path) -> None:
    """Process groups are created again over the same store, up to a dozen times."""
    for first in range(1, 13):
        _write(tmp_path, range(first, first + 3))
    assert len(list(tmp_path.iterdir())) == 12
    assert read(tmp_path).iteration.tolist() == list(range(1, 15))


@pytest.mark.parametrize("limit", [100, 10_000])
def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, limit: int) -> None:
    """The operating system refuses files past a limit, as a full disk does; later there is room again."""
    code = f"""
import resource, signal, sys, time
sys.path[:0] = {[str(Path(file).parent) for file in (__file__, recorded.__file__)]}
import test_run_folder as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = t.RunWriter({str(tmp_path)!r}, t.INFO)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def write(iterations):
    for iteration in iterations:
        writer.append(iteration, load=t._load(iteration))
    while not writer._rows.empty():
        time.sleep(0.01)
    time.sleep(0.1)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, hard))
write(range(1, 701))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
write(range(701, 901))
print("trained")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == "trained\n"
    assert len(ran.stderr.splitlines()) == 1
    assert "cannot be written (OSError: [Errno " in ran.stderr
    assert "training continues" in ran.stderr
    record = read(tmp_path)
    num_before = 0 if limit == 100 else (limit - 600) // 68
    assert abs(sum(record.iteration < 701) - num_before) <= 10
    assert record.iteration[record.iteration > 700].tolist() == list(range(701, 901))
    assert (record.load == np.stack([_load(i) for i in record.iteration])).all()


def test_a_reader_never_sees_half_an_iteration(tmp_path: Path) -> None:
    """A reader beside a writer finds whole iterations without a gap."""
    writer = RunWriter(tmp_path, INFO)
    done, failures = threading.Event(), []

    def read_on() -> None:
        while not done.is_set():
            try:
                record = read(tmp_path)
                assert (np.diff(record.iteration) == 1).all()
                assert (record.load == np.stack([_load(i) for i in record.iteration])).all()
            except Exception as error:
                if "no iteration yet" not in str(error):
                    failures.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    for iteration in range(1200):
        writer.append(iteration, load=_load(iteration))
    writer.stop()
    done.set()
    reader.join()
    assert not failures, failures


def test_a_run_that_goes_on_with_another_dispatcher_is_read(tmp_path: Path) -> None:
    """Only Megatron's all-to-all tells what crosses nodes: one job holds a column that the other one lacks."""
    _write(tmp_path, range(1, 4), crossing=np.array([3, 4]))
    _write(tmp_path, range(4, 7), job=1)
    record = read(tmp_path)
    assert record.iteration.tolist() == [1, 2, 3, 4, 5, 6]
    expected = [_load(i if i < 4 else i + 1000) for i in range(1, 7)]
    assert (record.load == np.stack(expected)).all() and record.crossing is None


def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Wherever a disk has changed or lost a byte: checksums find all changes, and a lost end costs the last rows.

    Oracle: the record before. Commands end with one line and status 2."""
    for stage in range(2):
        held = recorded.arrays(recorded.Size(), seed=stage)
        recorded.write(tmp_path, recorded.Size(), held=held, stage=stage)
    path = sorted(tmp_path.rglob("*.rows"))[1]
    right, data, rng = read(tmp_path), path.read_bytes(), random.Random(1)
    rows = len(path.open("rb").readline())
    for _ in range(100):
        place = rng.randrange(rows) if rng.random() < 0.5 else rng.randrange(len(data))
        changed = bytes([data[place] ^ 1 << rng.randrange(8)])
        path.write_bytes(data[:place] + changed + data[place + 1 :])
        with pytest.raises(ValueError) as error:
            read(tmp_path)
        assert str(tmp_path) in str(error.value) and len(str(error.value).splitlines()) == 1
        path.write_bytes(data[:place])
        try:
            record = read(tmp_path)
        except ValueError as error:
            assert "holds no iteration yet" in str(error)
            continue
        assert (record.load == right.load[: len(record.iteration)]).all()
    path.write_bytes(data[:-5] + b"x" + data[-4:])
    for command in ("report", "what-if"):
        with contextlib.suppress(SystemExit):
            assert main([command, str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    path.write_bytes(data)
    assert (read(tmp_path).load == right.load).all()


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record of a run"):
        read(tmp_path)
    (tmp_path / "stage-000.rows").write_bytes(b"megatron-hecate-record 2 01234567 {}\n")
    with pytest.raises(ValueError, match="version 2, this package reads 3"):
        read(tmp_path)
    (tmp_path / "stage-000.rows").write_bytes(b"something\n")
    with pytest.raises(ValueError, match="it does not begin as a record"):
        read(tmp_path)


def test_reading_needs_numpy_alone() -> None:
    code = """
import sys
import megatron_hecate.record.run_folder, megatron_hecate.record.run_writer
assert not {"torch", "megatron", "numba"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_that_has_gone_leaves_a_whole_record_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As where post-training builds one model after another in a process, each in a folder of its own."""
    monkeypatch.setattr(recorder, "place_of_rank", lambda group: (0, True))
    monkeypatch.setattr(job_metrics, "logging_pipeline", lambda: [0])
    monkeypatch.setattr(job_metrics, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    info = RunInfo(mode="observe", layers=("layer 1",), num_experts=2, ranks=1, node=(0,))
    for iteration in (1, 2):
        before = set(threading.enumerate())
        folder = str(tmp_path / f"model-{iteration}")
        stage = recorder.StageRecorder(info, folder, group=None, experts=[2], collect=lambda: True)
        stage.take(iteration, lambda load=(iteration, 0): {"load": np.array([load])})
        started = set(threading.enumerate()) - before
        assert len(started) == 2  # a writer, and what takes metrics to loggers
        del stage
        for thread in started:
            thread.join(10)
            assert not thread.is_alive()
        record = read(folder)
        assert record.iteration.tolist() == [iteration]
        assert record.load.tolist() == [[[iteration, 0]]]
    assert not capsys.readouterr().err
