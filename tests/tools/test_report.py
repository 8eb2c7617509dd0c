"""The page about a recorded run. Oracle: sums and maxima by plain loops over the record; for times,
what ``what-if`` says about the same folder."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded

from megatron_hecate.__main__ import main
from megatron_hecate.tools import report, what_if
from megatron_hecate.tools.report_content import Report

pytestmark = pytest.mark.fast
SIZE = recorded.Size()


def _content(folder: Path) -> dict[str, Any]:
    """What the page holds, as a browser would read it."""
    report.write(folder, folder / "report.html")
    text = (folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def _values(picture: dict[str, Any], kind: str, side: int) -> list[float]:
    words = np.frombuffer(base64.b64decode(picture[kind][side]), "<u2")
    return [math.nan if word == 65535 else word * picture["top"] / 65534 for word in words.tolist()]


def _series(content: dict[str, Any], chart: str) -> dict[str, list[float]]:
    return {name: values for name, _, values in content["lines"][chart]["series"]}


@pytest.fixture
def made(tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    held = recorded.arrays(SIZE)
    return held, _content(recorded.write(tmp_path / "run", SIZE, held=held))


def _sides(held: dict[str, np.ndarray], t: int, layer: int) -> tuple[list[int], list[int]]:
    """Tokens of each rank before and after, by loops."""
    load, per_rank = held["load"][t, layer].tolist(), SIZE.experts // SIZE.ranks
    before = [0] * SIZE.ranks
    for expert, tokens in enumerate(load):
        before[expert // per_rank] += tokens
    return before, held["rank_load"][t, layer].tolist()


def _token_ms() -> float:
    """Forward, and a backward of twice as much."""
    return 1e3 * 3 * recorded.SHAPE["token_flops"] / recorded.SPEEDS["flops"]


def test_imbalance_pictures_and_tables(made: tuple) -> None:
    held, content = made
    ratios = {"as routed": [], "as computed": []}  # [L][T] each
    for layer in range(SIZE.layers):
        sides = [_sides(held, t, layer) for t in range(SIZE.num)]
        for at, name in enumerate(ratios):
            loads = [side[at] for side in sides]
            of_layer = [max(load) / statistics.fmean(load) for load in loads]
            ratios[name].append(of_layer)
            whole, parts = (_values(content["loads"], kind, at) for kind in ("whole", "parts"))
            for rank in range(SIZE.ranks):
                total, mean = (
                    sum(f(load) for load in loads)
                    for f in (lambda x, r=rank: x[r], statistics.fmean)
                )
                assert whole[layer * SIZE.ranks + rank] == pytest.approx(total / mean, abs=1e-4)
                for t in range(SIZE.num):
                    right = loads[t][rank] / statistics.fmean(loads[t])
                    assert parts[(layer * SIZE.ranks + rank) * SIZE.num + t] == pytest.approx(
                        right, abs=1e-4
                    )
            spread = _values(content["spread"], "parts", at)[
                layer * SIZE.num : (layer + 1) * SIZE.num
            ]
            assert spread == pytest.approx(of_layer, abs=1e-4)
        row = content["layers"][layer]
        before, after = ratios["as routed"][layer], ratios["as computed"][layer]
        count = [
            sum(e >= 0 for e in held["replica"][t, layer].ravel().tolist()) for t in range(SIZE.num)
        ]
        right = [
            statistics.fmean(before),
            max(before),
            statistics.fmean(after),
            max(after),
            statistics.fmean(count),
        ]
        right += [count.count(0) / SIZE.num, statistics.fmean(held["late"][:, layer].tolist())]
        assert row[:7] == pytest.approx(right, rel=1e-4)
    series = _series(content, "imbalance")
    for name, of_layers in ratios.items():
        for t in range(SIZE.num):
            values = sorted(of_layer[t] for of_layer in of_layers)
            assert series[f"{name}, worst layer"][t] == pytest.approx(values[-1], rel=1e-4)
            assert series[f"{name}, median layer"][t] == pytest.approx(
                statistics.median(values), rel=1e-4
            )
            assert (
                series[f"{name}, 10 % of layers below"][t]
                <= series[f"{name}, 90 % of layers below"][t]
            )
    assert content["layers"][1][-1] == "Not worth it", (
        "fewer milliseconds to win than routing takes"
    )
    assert content["layers"][0][-1] == "Replicas"
    assert content["reasons"].keys() == {"Replicas", "Not worth it"}
    words = " ".join(content["words"])
    assert (
        "6 iterations (1 to 6) of 3 MoE layers with 8 experts over 4 ranks on 2 nodes. FSSDP was on."
        in words
    )
    assert f"{content['mean']['before']:.2f} times the mean load" in words


def test_hottest_experts_and_memory(made: tuple) -> None:
    held, content = made
    for layer in range(SIZE.layers):
        total = held["load"][:, layer].sum(axis=0).tolist()
        order = sorted(range(SIZE.experts), key=lambda e: (-total[e], e))
        assert content["experts"]["number"][layer] == order
        assert content["experts"]["home"][layer] == [e // 2 for e in order]
        whole = _values(content["hot"], "whole", 0)[
            layer * SIZE.experts : (layer + 1) * SIZE.experts
        ]
        assert whole == pytest.approx([total[e] / statistics.fmean(total) for e in order], abs=1e-4)
        for e, count in zip(order, content["experts"]["replicas"][layer], strict=True):
            assert count * SIZE.num == pytest.approx((held["replica"][:, layer] == e).sum())
    memory = _series(content, "memory")
    for t in range(SIZE.num):
        ranks = [_sides(held, t, layer) for layer in range(SIZE.layers)]
        for at, name in enumerate(("stock", "FSSDP")):
            tokens = max(sum(side[at][rank] for side in ranks) for rank in range(SIZE.ranks))
            kept = 2 * tokens / recorded.SHAPE["microbatches"] * 7e3
            assert memory[f"{name}, activations of experts"][t] == pytest.approx(
                kept / 2**20, rel=1e-4
            )
            assert memory[f"{name}, all"][t] == pytest.approx(
                (3.6e7 + 7e6 * at + kept) / 2**20, rel=1e-4
            )
    assert memory["homes: weights, gradients, optimizer"] == pytest.approx(
        [3.6e7 / 2**20] * SIZE.num, rel=1e-4
    )
    assert memory["replicas: buffers for all slots"] == pytest.approx(
        [7e6 / 2**20] * SIZE.num, rel=1e-4
    )


def test_only_observed_and_without_sizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    held = recorded.arrays(SIZE, fssdp=False)
    folder = recorded.write(tmp_path / "observed", SIZE, held=held)
    assert report.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "FSSDP was off" in said and f"what-if {folder}\n" in said and "ranks wait" in said
    content = _content(folder)
    assert content["observed"] and content["lines"].keys() == {
        "imbalance",
        "memory",
        "lost",
        "step",
    }
    assert [len(content[name]["parts"]) for name in ("loads", "spread")] == [1, 1]
    assert {row[-1] for row in content["layers"]} <= {"Uneven", "Balanced"}
    bare = recorded.write(tmp_path / "bare", SIZE, held=held, shape={}, speeds={}, memory={})
    content = _content(bare)
    assert (
        content["lines"].keys() == {"imbalance", "memory"}
        and content["lines"]["memory"]["unit"] == "tokens"
    )
    assert "times are not known" in content["verdict"]["text"]


@pytest.mark.parametrize("fssdp", [True, False])
@pytest.mark.parametrize(
    "size",
    [
        recorded.Size(num=1, layers=1),
        recorded.Size(num=3, tokens=0),
        recorded.Size(num=2500, layers=2),
        recorded.Size(ranks=1, slots=0),
    ],
    ids=["one-one", "no-tokens", "many-iterations", "one-rank"],
)
def test_odd_records(tmp_path: Path, size: recorded.Size, fssdp: bool) -> None:
    content = _content(
        recorded.write(tmp_path / "run", size, held=recorded.arrays(size, fssdp=fssdp))
    )
    points = min(size.num, 1000)
    assert len(content["iterations"]) == points and content["iterations"] == sorted(
        content["iterations"]
    )
    for chart in content["lines"].values():
        assert {len(values) for _, _, values in chart["series"]} == {points}
    assert len(content["layers"]) == size.layers
    loads = _values(content["loads"], "whole", 0)
    assert len(loads) == size.layers * size.ranks and all(map(math.isnan, loads)) == (
        size.tokens == 0
    )
    first, last = content["loads"]["groups"][0][0], content["loads"]["groups"][-1][1]
    assert (first, last) == (1, size.num)


def test_no_record_and_no_place_for_the_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "no report: " in capsys.readouterr().err
    folder = recorded.write(tmp_path / "run", SIZE, held=recorded.arrays(SIZE))
    assert report.main([str(folder), "--out", str(tmp_path / "missing" / "page.html")]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0, (
        "by the command line, too"
    )
    assert (tmp_path / "page.html").exists() and not (folder / "report.html").exists()


def test_one_file_that_needs_nothing_and_escapes_names(tmp_path: Path) -> None:
    evil = ["</script><b>layer 1", "layer <!-- 2", "layer 3"]
    folder = recorded.write(tmp_path / "run", SIZE, held=recorded.arrays(SIZE), layers=evil)
    assert sorted(_content(folder)["info"]["layers"]) == sorted(evil)
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == 3 and "/*data*/" not in page and "/*page.js*/" not in page
    addresses = set(
        re.findall(
            r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}[^\s\"')]*", re.sub(r"\s//\s.*", "", page)
        )
    )
    assert addresses == {"https://github.com/leeoniya/uPlot"}, (
        "but for the library's own comment, no address"
    )
    assert not re.search(r"\b(?:src|href)\s*=\s*[\"'](?!#|data:,)", page) and "@import" not in page
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|WebSocket|import)\s*\(", page)


def test_the_page_and_what_if_give_one_number(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: what the other command prints and saves about the same folder."""
    size = recorded.Size(num=12, layers=3, experts=16, ranks=4, tokens=800_000, skew=1.5)
    held = recorded.arrays(size, fssdp=False)
    held["time"] = 1.7e9 + 0.4 * np.arange(size.num)
    by_rank = held["load"].reshape(size.num, size.layers, size.ranks, -1).sum(axis=3)
    extra = np.random.default_rng(3).integers(1, 5_000, (size.num, size.layers))
    held["peak"] = by_rank.max(axis=2) + extra  # microbatches differ
    folder = recorded.write(tmp_path / "run", size, held=held, transport="")
    content = _content(folder)
    saved = tmp_path / "saved.json"
    assert what_if.main([str(folder), "--save", str(saved)]) == 0
    text = capsys.readouterr().out
    saved = json.loads(saved.read_text())
    assert saved["recommendation"] in content["verdict"]["reason"]
    forced, stock, *ways = saved["outcomes"]
    parts = {name: (lost, won) for name, lost, won in content["parts"]["rows"]}
    assert sum(lost for lost, _ in parts.values()) == pytest.approx(
        1e3 * (stock["seconds"] - forced["seconds"]), abs=1e-5
    )
    assert parts["expert compute"][0] > 0 < parts["all-to-all"][0]
    assert any(
        [1e3 * way["parts"][name] for name in parts]
        == pytest.approx([won for _, won in parts.values()], abs=1e-5)
        for way in ways
    )
    cost = f"{sum(lost for lost, _ in parts.values()) / content['parts']['step']:.1%}"
    assert f"imbalance costs {cost}" in text and f"together{cost:>31}" in text
    # The chart of all iterations is of the same model: here both cover the same iterations.
    lost = _series(content, "lost")["lost, as routed"][1:]
    assert statistics.fmean(lost) == pytest.approx(
        sum(lost for lost, _ in parts.values()), rel=2e-3
    )
    measured = _series(content, "step")["measured"]
    assert measured[0] is None and measured[1:] == pytest.approx([400.0] * 11, rel=1e-4)
    modelled = _series(content, "step")["modelled"]
    assert statistics.fmean(modelled[1:]) == pytest.approx(400.0, rel=2e-3)


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Oracle: the two pages of single runs."""
    stock = recorded.write(
        tmp_path / "stock", SIZE, held=recorded.arrays(SIZE, fssdp=False), transport=""
    )
    ours = recorded.write(tmp_path / "ours", SIZE, held=recorded.arrays(SIZE))
    page = tmp_path / "both.html"
    export = tmp_path / "both.json"
    command = [str(stock), str(ours), "--out", str(page), "--export", str(export)]
    assert report.main(command) == 0
    said = capsys.readouterr().out.splitlines()
    both = json.loads(export.read_text())
    alone = [_content(folder) for folder in (stock, ours)]
    first, second = both["compared"]["rows"]
    assert first[0] == f"{stock} (stock)" and second[0] == f"{ours} (FSSDP)"
    assert [row[1] for row in (first, second)] == [one["info"]["step"] for one in alone]
    for head, *cells in zip(both["compared"]["heads"], first, second, strict=True):
        (line,) = [line for line in said if line.lstrip().startswith(head)]
        assert line.split()[-2:] == [str(cell) for cell in cells] or head == "run"
    assert not any("megatron-hecate report STOCK_RUN" in line for line in said)
    assert first[4] == pytest.approx(alone[0]["mean"]["lost"], abs=1e-6)
    assert second[4] == pytest.approx(alone[1]["mean"]["left"], abs=1e-6)
    for row, a, b in zip(
        both["compared"]["layers"], *(one["layers"] for one in alone), strict=True
    ):
        assert row[1:4] == [a[2], b[2], a[7]] and row[4] == pytest.approx(b[7] - b[8], abs=2e-6)
    with pytest.raises(SystemExit):
        report.main([str(stock), str(ours), str(ours)])
    assert "one or two folders, got 3" in capsys.readouterr().err


def test_layers_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = recorded.write(tmp_path / "run", SIZE, held=recorded.arrays(SIZE))
    export = tmp_path / "layers.csv"
    assert report.main([str(folder), "--export", str(export)]) == 0
    with export.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, right in zip(rows, _content(folder)["layers"], strict=True):
        assert [float(value) for value in list(row.values())[1:-1]] == right[:-1]
        assert row["decision"] == right[-1]
    with pytest.raises(SystemExit):
        report.main([str(folder), "--export", "layers.xlsx"])
    assert "the name must end with .csv or .json" in capsys.readouterr().err


def test_microbatches_that_differ_cost_more_than_their_sum(tmp_path: Path) -> None:
    """Oracle: the record without the fullest rank of each microbatch, and the additional tokens' time by loops."""
    held, rng = recorded.arrays(SIZE), np.random.default_rng(3)
    # Tokens of the fullest rank beyond those of the iteration's fullest rank, [T, L].
    routed, computed = rng.integers(1, 200, (2, SIZE.num, SIZE.layers))
    by_rank = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
    peaks = dict(
        peak=by_rank.max(axis=2) + routed,
        computed_peak=held["rank_load"].max(axis=2) + computed,
    )
    before, after = (
        Report.read(recorded.write(tmp_path / name, SIZE, held={**held, **more})).prediction
        for name, more in (("summed", {}), ("single", peaks))
    )
    for t in range(SIZE.num):
        lost = before.lost_ms[t] + sum(routed[t].tolist()) * _token_ms()
        left = before.left_ms[t] + sum(computed[t].tolist()) * _token_ms()
        assert after.lost_ms[t] == pytest.approx(lost, rel=1e-4)
        assert after.left_ms[t] == pytest.approx(left, rel=1e-4)
    # Padded inputs are not counted by microbatch: a difference of definitions is no gain.
    held["replica"][:] = -1
    held |= dict(rank_load=by_rank, peak=by_rank.max(axis=2) + 100)
    padded = Report.read(recorded.write(tmp_path / "padded", SIZE, held=held)).prediction
    assert padded.lost_ms == pytest.approx(padded.left_ms, rel=1e-9)
