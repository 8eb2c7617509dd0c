"""What is kept compiled: where, by whom it is used, and never that of other sources. Oracle: the edited source itself,
numba's own count of what it compiled, and a folder's content.

Numba looks at a function's own file only. Were the others forgotten, ranks with other caches would plan differently.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megatron_hecate
from megatron_hecate import code_cache, files
from megatron_hecate.plan.compiled import _hash_sources, _warn_once, compiled, in_turn

SMALL = """
def add(a, b):
    return a + 2 * b
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "machine code"
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(folder))
    _warn_once.cache_clear()
    return folder


def _add_of(checkout: Path) -> Any:
    """A function as a new process finds it in that checkout's ``small.py``."""
    checkout.mkdir(exist_ok=True)
    (checkout / "small.py").write_text(SMALL)
    names: dict[str, Any] = {"__name__": "small"}
    exec(compile(SMALL, str(checkout / "small.py"), "exec"), names)
    return compiled(names["add"])


def _compiled_by(function: Any) -> int:
    return sum(function.stats.cache_misses.values())


@pytest.mark.fast
def test_checkouts_share_a_folder_of_the_users_own(cache: Path, tmp_path: Path) -> None:
    """Until another file of the source's folder changes: a function may call one of it, which numba does not look at."""
    first, second = _add_of(tmp_path / "one"), _add_of(tmp_path / "two")
    assert first(1, 2) == 5 and second(3, 4) == 11
    assert (_compiled_by(first), _compiled_by(second)) == (1, 0)
    assert second(1.5, 2.0) == 5.5 and _compiled_by(second) == 1, "another signature"
    paths = list(cache.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["small.py"], "beside the source"
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    damaged = _add_of(tmp_path / "one")
    assert damaged(1, 2) == 5 and _compiled_by(damaged) == 1
    third = _add_of(tmp_path / "one")
    (tmp_path / "one" / "other.py").write_text("two = 2")
    _hash_sources.cache_clear()
    assert third(1, 2) == 5 and _compiled_by(third) == 1 and len(list(cache.iterdir())) == 3


@pytest.mark.fast
def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (code_cache.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/someone")
    assert code_cache.folder() == Path("/someone/.cache/megatron-hecate")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert code_cache.folder() == Path("/scratch/megatron-hecate")
    monkeypatch.setenv(code_cache.VARIABLE, "/named")
    assert code_cache.folder() == Path("/named")


@pytest.mark.fast
@pytest.mark.parametrize("reason", ["no home", "no folder"])
def test_without_a_folder_each_process_compiles_and_is_told_once(
    reason: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numeric users of containers, who have no home and so no turns to take."""
    if reason == "no folder":
        cache.write_text("a file")
    else:
        for name in ("MEGATRON_HECATE_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    add = _add_of(tmp_path / "one")
    with pytest.warns(UserWarning, match="compiles the planner again") as said, in_turn(str):
        assert add(1, 2) == 5 and add(1.5, 2.0) == 5.5
    assert len(said) == 1
    left = {path.name for path in tmp_path.iterdir()} - {cache.name}
    assert left == {"one"}, "nothing is kept elsewhere"


@pytest.mark.fast
def test_what_is_anothers_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _add_of(tmp_path / "one")(1, 2) == 5
    (file,) = cache.iterdir()
    if os.getuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    others = _add_of(tmp_path / "one")
    with pytest.warns(UserWarning, match=r"belongs to user .* name another folder"):
        assert others(1, 2) == 5 and _compiled_by(others) == 1


@pytest.mark.fast
def test_a_filled_folder_that_cannot_be_written_is_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image: nothing is compiled, and the next signature is, with one warning. Root may ignore modes."""
    assert _add_of(tmp_path / "one")(1, 2) == 5
    refusal = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(files, "replace", mock.Mock(side_effect=refusal))
    cache.chmod(0o500)
    again = _add_of(tmp_path / "one")
    assert again(1, 2) == 5 and _compiled_by(again) == 0
    with pytest.warns(UserWarning, match="compiles the planner again") as said:
        assert again(1.5, 2.0) == 5.5 and again(1, 2.5) == 6.0
    cache.chmod(0o700)
    assert len(said) == 1 and len(list(cache.iterdir())) == 1


COUNTING = """
import sys, time
sys.path[:0] = sys.argv[1:]
import numba.core.dispatcher, small
from megatron_hecate.plan.compiled import compiled, in_turn
add = compiled(small.add)
with in_turn(lambda: print("compiling")):
    for call in ((1, 2), (1.5, 2.0), (1, 2.5), (2.5, 1)):
        add(*call)
print(sum(add.stats.cache_misses.values()))
"""


def _counting(checkout: Path) -> list[str]:
    """Return the command of a process that calls four signatures, and prints how many it compiled."""
    _add_of(checkout)
    root = str(Path(megatron_hecate.__file__).parents[1])
    return [sys.executable, "-c", COUNTING, root, str(checkout)]


def test_code_of_another_processor_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for processor in ("generic", "x86-64-v2", "generic"):
        monkeypatch.setenv("NUMBA_CPU_NAME", processor)
        subprocess.run(_counting(tmp_path / "one"), check=True, timeout=120)
        counts.append(len(list(cache.iterdir())))
    assert counts == [4, 8, 8]


def test_one_process_of_a_machine_compiles(cache: Path, tmp_path: Path) -> None:
    """Ranks that start together compile each signature once, in sum."""
    command = _counting(tmp_path / "one")
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert sorted(int(words[-1]) for words in said) == [0, 0, 4]
    later = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert any("compiling" in words for words in said) and later.stdout == "0\n"
