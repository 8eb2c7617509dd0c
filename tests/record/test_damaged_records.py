"""Records and speeds that were damaged: one line that names the file, and exit status 2.

Oracle: the output of the undamaged record. A command either refuses a mutation, or its output is that of the original;
nothing ends with a traceback, waits, or reads without end. Mutations are of a real record by the writer, of two stages
with replicas, and of one observed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded

from megatron_hecate import files
from megatron_hecate.__main__ import main
from megatron_hecate.plan import Speeds
from megatron_hecate.record.run_folder import RunInfo, read
from megatron_hecate.record.run_writer import RunWriter

pytestmark = pytest.mark.fast
SIZE = recorded.Size(num=4, layers=2)
JOB = dict(ranks=8, pp=2, vpp=1, tp=1, hidden=64, ffn=32, dense_ffn=64, num_layers=4, heads=4)
JOB |= dict(groups=4, head_width=16, shared=0, dispatcher="alltoall", recompute=False)
JOB |= dict(seq=256, vocab=512, optimizer_shards=1, device_bytes=1 << 34)
# Values that replace one value of a header. A number may be changed into another allowed one, which no reader can
# notice: these are beyond all ranges, or of another type.
WRONG = [None, True, "3", "", [], {}, [[]], {"a": 1}, -1, -(2**63), 1e300, 10**30, 2**63]
WRONG += [float("nan"), float("inf"), "\n", "\ud800", "x" * 1000]
ARRAY_NAMES = ("load", "iteration", "time", "replica", "late", "rank_load", "window", "copy")
ARRAY_NAMES += ("peak", "timed_ns", "timed_tokens", "home", "crossing", "every")


def _write(folder: Path, *, fssdp: bool) -> Path:
    """Write a record as training does: two stages with FSSDP, or one that observes."""
    for stage in range(1 + fssdp):
        held = recorded.arrays(SIZE, seed=stage, fssdp=fssdp)
        by_rank = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
        held |= dict(peak=by_rank.max(axis=2) + 1, timed_tokens=by_rank, timed_ns=7 * by_rank)
        if fssdp:
            held["home"] = np.tile(np.arange(8) // 2, (SIZE.num, SIZE.layers, 1))
            held["crossing"] = held["late"]
        info = RunInfo(
            mode="fssdp" if fssdp else "observe",
            layers=tuple(
                f"layer {1 + stage * SIZE.layers + layer}" for layer in range(SIZE.layers)
            ),
            num_experts=SIZE.experts,
            ranks=SIZE.ranks,
            node=(0, 0, 1, 1),
            top_k=2,
            slots=SIZE.slots if fssdp else 0,
            shape=recorded.SHAPE,
            speeds=recorded.SPEEDS,
            memory=recorded.MEMORY,
            job={**JOB, "pp": 1 + fssdp},
            lifetime="iteration" if fssdp else "",
            transport="nvlink" if fssdp else "",
            versions={"torch": "2.13"},
            started="2026-11-24T12:00:00+00:00",
        )
        writer = RunWriter(folder, info, stage=stage, seconds=1e6)
        for at, iteration in enumerate(held.pop("iteration").tolist()):
            writer.append(iteration, **{name: array[at] for name, array in held.items()})
        writer.close()
    return folder


def _output(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Run a command; return its exit status, output and errors."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


def _report(capsys: pytest.CaptureFixture, folder: Path) -> tuple[int, str, str]:
    """Run ``report``; the output contains the exported figures."""
    page = folder / "page.json"
    page.unlink(missing_ok=True)
    status, out, err = _output(
        capsys, "report", folder, "--out", folder / "a.html", "--export", page
    )
    return status, page.read_text() if status == 0 else out, err


def _assert_refused(capsys: pytest.CaptureFixture, path: Path, *command: object) -> None:
    """Run a command that must end soon with one line about ``path``."""
    signal.alarm(30)
    status, out, err = _output(capsys, *command)
    signal.alarm(0)
    assert status == 2 and not out, (status, out)
    assert len(err.splitlines()) == 1 and str(path) in err, err


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value inside a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield (*path, key)
        yield from _places(one, (*path, key))


def _header_mutations(text: str, rng: random.Random) -> Iterator[str]:
    """Replace, remove and rename each value of a header; add names and lengths."""
    for place in _places(json.loads(text)):
        for wrong in [*rng.sample(WRONG, 3), "remove", "rename"]:
            header = json.loads(text)
            *outer, last = place
            inner = header
            for key in outer:
                inner = inner[key]
            if wrong == "remove":
                del inner[last]
            elif wrong == "rename":
                if not isinstance(inner, dict):
                    inner.append(inner[last])
                else:
                    inner[f"{last}s"] = inner.pop(last)
            else:
                inner[last] = wrong
            yield json.dumps(header)
    for end in rng.sample(range(len(text)), 10):
        yield text[:end]
    for name in ("num_experts", "ranks", "top_k"):
        yield json.dumps({**json.loads(text), name: 0})
        yield json.dumps({**json.loads(text), name: 3 if name != "top_k" else 9})
    yield from ("[" * 100_000, '{"version": ' * 50_000, "null", "3", "[]", '"text"', "", "\0" * 100)


def test_a_header_is_believed_only_if_it_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Values that may be missing or differ unnoticed: all of ``job``, defaults, names, and what only names a run."""
    free = {
        "layers",
        "job",
        "lifetime",
        "transport",
        "versions",
        "started",
        "run",
        "first",
        "memory",
        "speeds",
        "shape",
    }
    rng = random.Random(1)
    accepted = num = 0
    for fssdp in (False, True):
        folder = _write(tmp_path / str(fssdp), fssdp=fssdp)
        status, right, _ = _report(capsys, folder)
        assert status == 0
        path = folder / "run-000.json"
        text = path.read_text()
        for mutation in _header_mutations(text, rng):
            path.write_text(mutation)
            num += 1
            try:
                record = read(folder)
            except ValueError as error:
                assert str(folder) in str(error), error
                assert "run-000.json" in str(error) or "run-001.json" in str(error), error
                assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
                continue
            # The record of every stage has the same arrays; differences are in values that may be left out.
            values, before = json.loads(mutation), json.loads(text)
            differing = {
                name for name in {*values, *before} if values.get(name, 0) != before.get(name, 0)
            }
            assert differing <= free | {"overlap_degree"}, mutation
            for name in differing & {"shape", "speeds", "memory", "job"}:
                held = dict(values.get(name, {}))
                # Forks of Megatron have dispatchers of other names.
                if isinstance(held.get("dispatcher"), str):
                    del held["dispatcher"]
                assert held.items() <= before[name].items(), f"{name} holds another value: {held}"
            assert record.load.any()
            accepted += 1
            # A page takes longer than a record's reading.
            if accepted % 8 == 0:
                status, _, err = _report(capsys, folder)
                assert status == 0 or len(err.splitlines()) == 1, err
        path.write_text(text)
        assert _report(capsys, folder)[1] == right
    assert num > 700 and accepted < num / 10


def _array_mutations(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> Iterator[dict]:
    """Damage each array of a segment in its type, shape, signs, range and order; leave each out."""
    for name in ARRAY_NAMES:
        if name not in arrays:
            continue
        array = arrays[name]
        # What a thinned segment lacks concerns the writer alone.
        changes: list[Any] = [None] if name != "every" else []
        changes += [array[:-1], array[..., None], array.ravel()[:1], array[:0], np.array(3)]
        changes += [
            array.astype(str),
            array.astype(bool),
            array.astype(complex),
            np.concatenate([array, array]),
        ]
        changes += [
            -np.abs(np.nan_to_num(array).astype(np.int64)) - 2,
            np.zeros(array.shape, "f4" if array.dtype.kind in "iu" else "i8"),
        ]
        changes += [array.astype(object), np.zeros(array.shape, [("a", "i4")])]
        if array.dtype.kind == "f":
            huge: list[Any] = [np.inf, -np.inf, 1e300, -1.0, *([np.nan] if name == "time" else [])]
        else:
            huge = [2**62, -(2**62), -5, 1 << 54]
        place = tuple(rng.integers(array.shape))
        for value in huge:
            changed = array.astype("f8" if array.dtype.kind == "f" else "i8")
            changed[place] = value
            changes.append(changed)
        for change in changes:
            yield {key: one for key, one in {**arrays, name: change}.items() if one is not None}
    yield {**arrays, "iteration": arrays["iteration"][::-1]}
    yield {**arrays, "iteration": np.zeros_like(arrays["iteration"])}
    yield {**arrays, "peak": arrays["peak"].astype("i8") + (1 << 41)}


def test_arrays_are_believed_only_if_they_are_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rng = np.random.default_rng(2)
    num = 0
    for fssdp in (False, True):
        folder = _write(tmp_path / str(fssdp), fssdp=fssdp)
        path = folder / "loads-000-00000.npz"
        with np.load(path) as archive:
            arrays = dict(archive)
        for changed in _array_mutations(arrays, rng):
            np.savez(path, **changed)
            num += 1
            with pytest.raises(ValueError, match="is broken") as error:
                read(folder)
            assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1
            # Both commands for some: they take longer.
            if num % 9 == 0:
                for command in ("report", "what-if"):
                    _assert_refused(capsys, path, command, folder)
        # Without change of meaning: other dtypes, order in memory, and arrays of other names.
        np.savez(
            path,
            **{name: np.asfortranarray(array) for name, array in arrays.items()},
            more=np.ones(2),
        )
        assert (
            read(folder).load.tolist()
            == read(_write(tmp_path / f"again {fssdp}", fssdp=fssdp)).load.tolist()
        )
        with pytest.raises(
            ValueError,
            match=r"array load is u?int\d+ of shape \(4, 1, 8\), expected integers of \(4, 2, 8\)",
        ):
            np.savez(path, **{**arrays, "load": arrays["load"][:, :1]})
            read(folder)
    assert num > 200


def _special_files(path: Path) -> dict[str, Callable[[], object]]:
    """Return functions that put something else than a regular file of a sane size at ``path``."""

    def sparse() -> None:
        with path.open("wb") as file:
            file.truncate(files.MOST_BYTES + 1)

    def bomb() -> None:
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("load.npy", "w") as file,
        ):
            zeros = bytes(1 << 24)
            for _ in range(8):
                file.write(zeros)

    def listen() -> None:
        # A path of a socket is short.
        os.chdir(path.parent)
        socket.socket(socket.AF_UNIX).bind(path.name)

    return {
        "FIFO": lambda: os.mkfifo(path),
        "character device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "link to a directory": lambda: path.symlink_to(path.parent),
        "loop": lambda: path.symlink_to(path.name),
        "link to nothing": lambda: path.symlink_to("nothing"),
        "socket": listen,
        "sparse": sparse,
        "bomb": bomb,
        "empty": lambda: path.write_bytes(b""),
    }


@pytest.mark.parametrize("name", ["run-001.json", "loads-001-00000.npz"])
def test_only_regular_files_are_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 26)
    monkeypatch.setattr("megatron_hecate.record.run_schema.MOST_BYTES", 1 << 26)
    folder = _write(tmp_path / "run", fssdp=True)
    for kind in _special_files(folder / name):
        damaged = tmp_path / kind.replace(" ", "-")
        shutil.copytree(folder, damaged)
        (damaged / name).unlink(missing_ok=True)
        _special_files(damaged / name)[kind]()
        for command in (["report", damaged], ["what-if", damaged], ["report", damaged, folder]):
            # The page of the other folder stays away.
            (folder / "report.html").unlink(missing_ok=True)
            _assert_refused(capsys, damaged / name, *command)
        with pytest.raises((ValueError, OSError), match=name):
            RunWriter(damaged, _info_of(folder), stage=1)


def _info_of(folder: Path) -> RunInfo:
    return RunInfo(
        mode="fssdp",
        layers=("layer 3", "layer 4"),
        num_experts=8,
        ranks=4,
        node=(0, 0, 1, 1),
        top_k=2,
        slots=2,
    )


def test_files_that_miss_or_have_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, to in (
        ("run-000.json", None),
        ("run-000.json", "run-x.json"),
        ("run-000.json", "run-00.json"),
        ("run-001.json", "run-002.json"),
        ("loads-000-00000.npz", "loads-000-x.npz"),
        ("loads-000-00000.npz", "loads-003-00000.npz"),
        ("loads-000-00000.npz", None),
    ):
        folder = _write(tmp_path / f"{name} {to}", fssdp=True)
        if to is None:
            (folder / name).unlink()
        else:
            (folder / name).rename(folder / to)
        for command in ("report", "what-if"):
            _assert_refused(capsys, folder, command, folder)


def test_files_of_a_user_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Names like those of a record, as a framework or a profiler may write, change nothing."""
    folder = _write(tmp_path / "run", fssdp=True)
    assert main(["report", str(folder)]) == 0
    right = capsys.readouterr().out
    for name in (
        "run-arguments.json",
        "loads-before.npz",
        "loads-000-00000 (1).npz",
    ):
        (folder / name).write_text('[{"ph": "X"}]')
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == right


def test_valid_headers_that_look_strange(tmp_path: Path) -> None:
    """Layers of a hybrid model's multi-token prediction have the decoder's names; a package may lack a version."""
    folder = _write(tmp_path / "run", fssdp=True)
    for path in folder.glob("run-*.json"):
        header = json.loads(path.read_text())
        header |= {"layers": ["layer 1"] * len(header["layers"]), "run": "one"}
        path.write_text(json.dumps(header))
    assert read(folder).load.shape[1] == 4


def test_small_files_of_large_arrays(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And a member of the archive that is no array of numpy's."""
    folder = _write(tmp_path / "run", fssdp=True)
    path = folder / "loads-000-00000.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    many = np.repeat(arrays["load"], 1 << 20, axis=0)
    np.savez_compressed(path, **{**arrays, "load": many})
    _assert_refused(capsys, folder, "report", folder)
    for name in ("load", "iteration", "every"):
        np.savez(path, **{key: array for key, array in arrays.items() if key != name})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"{name}.npy", b"junk")
        _assert_refused(capsys, folder, "report", folder)


def test_a_stage_of_another_run_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", fssdp=True)
    header = json.loads((folder / "run-001.json").read_text())
    for change in (
        {"layers": ["layer 1", "layer 9"]},
        {"top_k": 1},
        {"mode": "observe", "slots": 0},
    ):
        (folder / "run-001.json").write_text(json.dumps({**header, **change}))
        with pytest.raises(ValueError, match=r"run-001\.json does not describe a further stage"):
            read(folder)


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, who runs the tests in containers, may read all: the operating system's error is put in its place."""
    folder = _write(tmp_path / "run", fssdp=False)
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    for command in ("report", "what-if"):
        _assert_refused(capsys, folder, command, folder)
    with pytest.raises(ValueError, match=r"run cannot be read \(PermissionError"):
        read(folder)


def test_damaged_speeds_and_loads_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    speeds = json.loads(json.dumps({**recorded.SPEEDS, "origin": "a test"}))
    for change in (
        {"flops": "4e14"},
        {"flops": True},
        {"intra": {"bandwidth": True, "latency": 0}},
        {"routing": []},
    ):
        (tmp_path / "speeds.json").write_text(json.dumps({**speeds, **change}))
        with pytest.raises(ValueError, match=r"speeds\.json does not hold measured speeds"):
            Speeds.load(tmp_path / "speeds.json")
    np.savez(tmp_path / "loads.npz", load=np.ones((2, 2, 8)))
    for name in _special_files(tmp_path):
        for suffix in (".json", ".npz"):
            path = tmp_path / f"file{suffix}"
            if name in ("bomb", "sparse"):
                continue
            _special_files(path)[name]()
            asked = ["--model", "olmoe,layers=2,experts=8", "--ranks", "4"]
            _assert_refused(capsys, path, "what-if", path, *asked, "--cluster", "h100x8")
            if suffix == ".json":
                _assert_refused(
                    capsys, path, "what-if", tmp_path / "loads.npz", *asked, "--cluster", path
                )
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_bytes_of_any_file_may_change(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Truncated files, and files with bits that were flipped."""
    rng = random.Random(4)
    folder = _write(tmp_path / "run", fssdp=True)
    right = _report(capsys, folder)[1]
    for path in (folder / "run-001.json", folder / "loads-001-00000.npz"):
        data = path.read_bytes()
        for _ in range(100):
            place = rng.randrange(len(data))
            changed = rng.choice(
                [
                    data[:place],
                    data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :],
                ]
            )
            path.write_bytes(changed)
            try:
                read(folder)
            except ValueError as error:
                assert str(folder) in str(error) and len(str(error).splitlines()) == 1
                continue
            # A digit or a letter may have changed into another one; arrays have checksums.
            if path.suffix == ".npz":
                assert _report(capsys, folder)[1] == right
        path.write_bytes(data)
    assert _report(capsys, folder)[1] == right
