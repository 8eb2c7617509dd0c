"""Jobs that share a folder, at once or one after another, and disks without room: nothing recorded is lost or hidden
without a word. Oracle: the loads as they were written, and the operating system's locks and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.record.run_folder import RunInfo, read
from megatron_hecate.record.run_writer import RunWriter

pytestmark = pytest.mark.fast
INFO = RunInfo(
    mode="observe", layers=("layer 1", "layer 3"), num_experts=6, ranks=2, node=(0, 1), top_k=2
)
# Records iterations, forks a process that outlives this one, and waits for a signal.
JOB = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_shared_folders as t
t.record(Path(sys.argv[2]), range(1, 4), shift=7).flush()
if not os.fork():
    sys.stdout.close()
    time.sleep(30)
    os._exit(0)
print("recorded", flush=True)
time.sleep(30)
"""


def _loads(iteration: int, shift: int) -> np.ndarray:
    return np.full((2, 6), iteration + shift)


def record(folder: Path, iterations: range, *, shift: int = 0, stage: int = 0) -> RunWriter:
    """Append iterations of a new job, named after its ``shift``, to the record in ``folder``."""
    names = tuple(f"layer {1 + 2 * layer + 10 * stage}" for layer in range(2))
    job = f"job {shift}"
    info = RunInfo(**{**vars(INFO), "layers": names, "started": job, "run": job})
    writer = RunWriter(folder, info, stage=stage, seconds=1e6)
    for iteration in iterations:
        writer.append(iteration, load=_loads(iteration, shift))
    return writer


def _held(folder: Path) -> list[tuple[int, int]]:
    """Return each recorded iteration with its first load."""
    held = read(folder)
    return list(zip(held.iteration.tolist(), held.load[:, 0, 0].tolist(), strict=True))


def test_a_second_job_is_refused_while_the_first_one_records(tmp_path: Path) -> None:
    """Until the first one is killed, although a process that it forked lives on, as of a data loader."""
    command = [sys.executable, "-W", "ignore", "-c", JOB, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "recorded\n"
        before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
        for other in (INFO, RunInfo(**{**vars(INFO), "top_k": 1})):
            with pytest.raises(
                ValueError,
                match=f"another job records into .* now .* {job.pid}.*name another folder",
            ):
                RunWriter(tmp_path, other)
        assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
        record(tmp_path, range(1, 3), stage=1).close()
        job.kill()
        job.wait()
        record(tmp_path, range(4, 6)).close()
        (tmp_path / "run-001.json").unlink()
        (tmp_path / "loads-001-00000.npz").unlink()
        assert _held(tmp_path) == [(1, 8), (2, 9), (3, 10), (4, 4), (5, 5)]
        os.killpg(job.pid, signal.SIGKILL)


def test_a_run_that_begins_again_keeps_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Three jobs, of two stages each: nothing of the first ones is hidden, and each is read on its own."""
    for shift in (0, 100, 200):
        for stage in (0, 1):
            record(tmp_path, range(1 + shift // 200, 5), shift=shift, stage=stage).close()
        said = capsys.readouterr().err.splitlines()
        if shift == 100:
            line = f"FSSDP: this run begins at iteration 1: the record of iterations up to 4 that {tmp_path} held is in "
            # The first stage moves both.
            assert said == [f"{line}{tmp_path}/earlier-job0 now"]
        if shift == 200:
            line = f"FSSDP: the record in {tmp_path} goes on at iteration 2: iterations 2 to 4 of before are replaced"
            assert said == 2 * [line]
    assert _held(tmp_path / "earlier-job0") == [(i, i) for i in range(1, 5)]
    assert _held(tmp_path) == [(1, 101), *((i, i + 200) for i in range(2, 5))]
    assert len(read(tmp_path / "earlier-job0").info.layers) == 4
    record(tmp_path, range(5), shift=300).close()
    assert f"is in {tmp_path}/earlier-job100 now" in capsys.readouterr().err
    assert len(read(tmp_path / "earlier-job100").info.layers) == 4
    assert _held(tmp_path) == [(i, i + 300) for i in range(5)]


def _die(folder: Path, iterations: range, shift: int) -> None:
    """Record one stage of a job that is killed."""
    if not (child := os.fork()):
        writer = record(folder, iterations, shift=shift)
        if len(iterations):
            writer.flush()
        os._exit(9)
    os.waitpid(child, 0)


@pytest.mark.parametrize("iterations", [range(1, 3), range(0)])
def test_a_job_that_dies_before_its_stages_have_written_mixes_nothing(
    iterations: range, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The first stage of the second job writes, or none; a third one begins again, or goes on."""
    for stage in (0, 1):
        record(tmp_path, range(1, 6), shift=100, stage=stage).close()
    _die(tmp_path, iterations, 200)
    if iterations:
        assert _held(tmp_path / "earlier-job100") == [(i, i + 100) for i in range(1, 6)]
        assert _held(tmp_path) == [(i, i + 200) for i in iterations]
    else:
        held = read(tmp_path)
        assert held.info.started == "job 100" and len(held.info.layers) == 4
    for stage in (1, 0):
        record(tmp_path, range(2, 4), shift=300, stage=stage).close()
    loads = read(tmp_path).load[:, :, 0].tolist()
    if iterations:
        # The second stage has the third job's iterations alone.
        assert loads == [[302, 302, 302, 302], [303, 303, 303, 303]]
    else:
        assert loads == [[101] * 4, [302] * 4, [303] * 4]


def test_a_stage_that_has_not_begun_again_yet_is_said(tmp_path: Path) -> None:
    for stage in (0, 1):
        record(tmp_path, range(2, 6), shift=100, stage=stage).close()
    record(tmp_path, range(2, 4), shift=200).close()
    record(tmp_path, range(2, 4), shift=300, stage=1).close()
    with pytest.raises(ValueError, match="of different runs, begun at job 200, job 300"):
        read(tmp_path)
    record(tmp_path, range(2, 4), shift=300).close()
    assert read(tmp_path).load[0, :, 0].tolist() == [302] * 4


def test_a_job_of_fewer_stages_leaves_no_stage_of_the_earlier_one(tmp_path: Path) -> None:
    for stage in (0, 1):
        record(tmp_path, range(1, 5), shift=100, stage=stage).close()
    record(tmp_path, range(1, 5), shift=200).close()
    assert read(tmp_path).load.shape[1] == 2
    assert read(tmp_path / "earlier-job100").load.shape[1] == 4


def test_a_loop_that_counts_anew_in_one_process_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    writer = record(tmp_path, range(1, 4))
    for iteration in (1, 2, 2):
        writer.append(iteration, load=_loads(iteration, 50))
    writer.append(3, load=_loads(3, 90))
    writer.close()
    assert _held(tmp_path) == [(1, 51), (2, 52), (3, 93)]
    said = capsys.readouterr().err.splitlines()
    assert (
        len(said) == 2
        and "iterations 1 to 3 of before are replaced" in said[0]
        and "iterations 2 to 2 of before are replaced" in said[1]
    )


def test_a_job_that_took_over_is_named_as_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Where the filesystem has no locks. It is not said that the disk is full."""
    old = record(tmp_path, range(1, 3))
    old.flush()
    (tmp_path / "run-000.lock").write_text("other 1 2.0")
    old.append(3, load=_loads(3, 0))
    old.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert "another job writes there: other 1 2.0" in said and "missing in the record" in said
    assert "room" not in said


FULL = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_shared_folders as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
folder = Path(sys.argv[2])
writer = t.record(folder, range(1, 3))
writer.flush()
left = [path.name for path in folder.iterdir()]
assert left in ([], ["run-000.lock"]), left
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.append(3, load=t._loads(3, 0))
writer.close()
"""


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    """Iterations that are still in memory are written once there is room."""
    command = [sys.executable, "-c", FULL, str(Path(__file__).parent), str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    (of_record,) = ran.stderr.splitlines()
    assert f"{tmp_path}/run cannot be written (OSError: [Errno 27]" in of_record
    assert (
        "training continues, iterations are missing in the record until there is room" in of_record
    )
    assert _held(tmp_path / "run") == [(1, 1), (2, 2), (3, 3)]
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert files == ["loads-000-00000.npz", "run-000.json", "run-000.lock"]


def test_what_a_killed_job_left_behind_is_removed(tmp_path: Path) -> None:
    for name in (".loads-000-00007.npz.0a1b2c3d.tmp", ".run-000.json.0a1b2c3d.tmp"):
        (tmp_path / name).write_bytes(b"half")
    record(tmp_path, range(1, 3)).close()
    assert not list(tmp_path.glob("*.tmp")) and len(_held(tmp_path)) == 2
