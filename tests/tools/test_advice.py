"""Advice of ``what-if`` and of the page: ranges, verdicts and ways out follow from the numbers.

Oracles: shares by hand, and commands that are run as they are
printed.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded

from megatron_hecate.__main__ import main
from megatron_hecate.record.run_folder import read
from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.tools import report
from megatron_hecate.tools.recommendation import recommend
from megatron_hecate.tools.replay import Outcome
from megatron_hecate.tools.step_model import PARTS

pytestmark = pytest.mark.fast

SIZE = recorded.Size(num=6, layers=2, experts=16, tokens=800_000, skew=1.5)
ONE_WAY = ("--slots", "1", "--lifetime", "iteration", "--transport", "nvlink")


def _observed(
    folder: Path, size: recorded.Size = SIZE, *, step_ms: float = 400.0, **fields: Any
) -> Path:
    """Write the record of an observed run with steps of ``step_ms``."""
    held = recorded.arrays(size, fssdp=False)
    held["time"] = 1.7e9 + step_ms / 1e3 * np.arange(size.num)
    return recorded.write(folder, size, held=held, transport="", **fields)


def _simulated(folder: Path, *flags: str) -> dict[str, Any]:
    """Return what ``what-if`` saves about one way."""
    saved = folder / "saved.json"
    assert main(["what-if", str(folder), *ONE_WAY, *flags, "--save", str(saved)]) == 0
    return json.loads(saved.read_text())


def _outcomes(*seconds: float, **parts: float) -> list[Outcome]:
    """Return forced balance, stock, and one way of FSSDP that gains ``parts``."""
    memory = ExpertMemory(
        weights=1, grads=1, optimizer=1, replica_weights=0, replica_grads=0, transport=0
    )
    bare = dict(imbalance=1.0, parts=dict.fromkeys(PARTS, 0.0))
    found = []
    for slots, time in zip((0, 0, 1), seconds, strict=True):
        found.append(Outcome(name="way", slots=slots, seconds=time, memory=memory, **bare))
    of_way = {**dict.fromkeys(PARTS, 0.0), **parts}
    found[2] = dataclasses.replace(found[2], used=1, parts=of_way)
    return found


def test_the_experts_speed_changes_the_gain_in_expert_compute_alone() -> None:
    """By hand: 10 % in compute times 0.54 and 1.15, and 10 % in all-to-alls."""
    gains = {"expert compute": 0.1, "all-to-all": 0.1}
    text = recommend(_outcomes(0.8, 1.0, 0.8, **gains), 0.0).text
    assert "; 15.4% to 21.5%, since the experts' speed is assumed" in text


def test_a_loss_has_a_range_in_order() -> None:
    """By hand: 2 % of a step more, over a stock step that lasts 1.45 or 0.55 times as long."""
    text = recommend(_outcomes(1.0, 1.0, 1.02), 0.0, error=0.45).text
    assert text.startswith("do not switch it on: -3.6% to -1.4% of a step to win"), text
    # a step three times as long is no reason to try it
    assert recommend(_outcomes(1.0, 1.0, 3.0), 0.0, error=0.45).verdict == "no"


def test_an_obstacle_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Experts that do not fit, and a single rank, where nothing is uneven."""
    memory = 1 << 28
    folder = _observed(tmp_path / "small", job=dict(device_bytes=memory))
    assert report.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "stock itself does not fit" in text and "nothing to win" not in text
    alone = recorded.Size(num=4, layers=2, ranks=1)
    assert report.main([str(_observed(tmp_path / "alone", alone))]) == 0
    text = capsys.readouterr().out
    assert "nothing to win" in text and "slots are never filled" not in text
    assert "(--ranks, --ep, --microbatches):\n" in text


def test_speeds_that_do_not_fit_the_steps_are_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: by hand, a step cannot lose more time than it took."""
    for flops, fits in ((4.4e14, True), (4.4e8, False)):
        folder = tmp_path / f"{flops:g}"
        held = recorded.arrays(SIZE)
        held["time"] = 1.7e9 + 0.4 * np.arange(SIZE.num)
        recorded.write(folder, SIZE, held=held, speeds={**recorded.SPEEDS, "flops": flops})
        assert report.main([str(folder)]) == 0
        text = capsys.readouterr().out
        assert ("No verdict, since times are not known" in text) != fits, text
        assert ("but a step took 400.0 ms: train with --moe-fssdp-speeds FILE" in text) != fits
        assert ("of a stock step" in text) == fits


@pytest.mark.parametrize(
    "flags",
    [
        ("--microbatches", "8"),
        ("--seq", "5000"),
        ("--ranks", "8", "--pp", "2"),
    ],
    ids=["microbatches", "tokens", "stages"],
)
def test_a_recorded_step_is_not_one_with_other_work(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = _observed(tmp_path / "run")
    _simulated(folder)
    assert "stock step 400 ms" in capsys.readouterr().out
    _simulated(folder, *flags)
    text = capsys.readouterr().out
    assert "stock step unknown" in text and "give --step-ms" in text
    # more ranks with the same work each: data parallelism
    _simulated(folder, "--ranks", "16")
    assert "16 ranks, EP 4, PP 1" in (text := capsys.readouterr().out)
    assert "stock step 400 ms" in text


def _page(folder: Path) -> dict[str, Any]:
    """Return the page's content."""
    export = folder / "page.json"
    assert report.main([str(folder), "--export", str(export)]) == 0
    return json.loads(export.read_text())


def test_iterations_in_which_a_layer_is_idle_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the same record without these iterations."""
    held = recorded.arrays(SIZE, fssdp=False)
    held["time"] = 1.7e9 + 0.4 * np.arange(SIZE.num)
    held["load"][[2, 4], 1] = 0
    folder = recorded.write(tmp_path / "run", SIZE, held=held)
    found = _simulated(folder)
    assert "note: left out: 2 of 6 iterations, where a layer has no" in capsys.readouterr().out
    rest = np.delete(np.arange(SIZE.num), [2, 4])
    whole = {name: array[rest] for name, array in held.items()}
    right = _simulated(recorded.write(tmp_path / "right", SIZE, held=whole))
    for one, other in zip(found["outcomes"], right["outcomes"], strict=True):
        for name in ("seconds", "imbalance", "sent"):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name
    assert _page(folder)["verdict"]["text"].startswith("Switch FSSDP on")


def test_commands_name_folders_as_a_shell_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a shell's words."""
    monkeypatch.chdir(tmp_path)
    fields = dict(shape={}, speeds={}, memory={})
    for name in ("my run ü", "it's $HOME"):
        folder = Path(name)
        switch_on = shlex.split(_page(_observed(folder))["verdict"]["command"])
        assert f"{name}-fssdp" in switch_on
        words = shlex.split(_page(_observed(folder, **fields))["verdict"]["command"])
        assert words[:3] == ["megatron-hecate", "what-if", name]
    with pytest.raises(ValueError, match="write one with --moe-fssdp-record 'no run'"):
        read("no run")
    held = recorded.arrays(SIZE)
    words = shlex.split(_page(recorded.write(folder, SIZE, held=held))["verdict"]["command"])
    assert main([word.replace("STOCK_RUN", name) for word in words[1:]]) == 0
