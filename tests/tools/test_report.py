"""The page about a recorded run. Oracle: plain sums and maxima over the record; for times, what ``what-if`` says about
the same folder."""

from __future__ import annotations

import base64
import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded

from megatron_hecate.tools import report
from megatron_hecate.tools.report_content import Report

pytestmark = pytest.mark.fast
SIZE = recorded.Size()


def _content(folder: Path) -> dict[str, Any]:
    """What the page holds, as a browser would read it."""
    assert report.main([str(folder)]) == 0
    text = (folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def _values(picture: dict[str, Any], kind: str, side: int) -> np.ndarray:
    words = np.frombuffer(base64.b64decode(picture[kind][side]), "<u2")
    return np.where(words == 65535, np.nan, words * (picture["top"] / 65534))


def _series(content: dict[str, Any], chart: str) -> dict[str, list[float]]:
    return {name: values for name, _, values in content["lines"][chart]["series"]}


@pytest.fixture
def made(tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    held = recorded.arrays(SIZE)
    return held, _content(recorded.write(tmp_path / "run", SIZE, held=held))


def _sides(held: dict[str, np.ndarray]) -> list[np.ndarray]:
    """[T, L, R] tokens of each rank before and after."""
    by_home = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
    return [by_home, held["rank_load"]]


def _token_ms() -> float:
    """Forward, and a backward of twice as much."""
    return 1e3 * 3 * recorded.SHAPE["token_flops"] / recorded.SPEEDS["flops"]


def test_imbalance_pictures_and_tables(made: tuple) -> None:
    """Rows of pictures are layers, and of each its ranks."""
    held, content = made
    ratios = {}
    sides = zip(("as routed", "as computed"), _sides(held), strict=True)
    for at, (name, tokens) in enumerate(sides):
        mean = tokens.mean(axis=2, keepdims=True)
        whole, parts = tokens.sum(axis=0) / mean.sum(axis=0), tokens / mean
        ratios[name] = parts.max(axis=2)
        for picture, kind, right in (
            ("loads", "whole", whole),
            ("loads", "parts", parts.transpose(1, 2, 0)),
            ("spread", "parts", ratios[name].T),
        ):
            shown = _values(content[picture], kind, at)
            assert shown == pytest.approx(right.ravel(), abs=1e-4), (name, picture, kind)
    before, after = ratios.values()
    count = (held["replica"] >= 0).sum(axis=(2, 3))
    columns = [before.mean(axis=0), before.max(axis=0), after.mean(axis=0), after.max(axis=0)]
    columns += [count.mean(axis=0), (count == 0).mean(axis=0), held["late"].mean(axis=0)]
    table = np.array([row[:7] for row in content["layers"]])
    assert pytest.approx(np.array(columns), rel=1e-4) == table.T
    series = _series(content, "imbalance")
    for name, of_layers in ratios.items():
        worst, median = of_layers.max(axis=1), np.median(of_layers, axis=1)
        assert series[f"{name}, worst layer"] == pytest.approx(worst, rel=1e-4)
        assert series[f"{name}, median layer"] == pytest.approx(median, rel=1e-4)
        low, high = (np.array(series[f"{name}, {n} % of layers below"]) for n in (10, 90))
        assert (low <= high).all()
    # in layer 2 there are fewer milliseconds to win than routing takes
    assert [row[-1] for row in content["layers"][:2]] == ["Replicas", "Not worth it"]
    assert content["reasons"].keys() == {"Replicas", "Not worth it"}
    words = " ".join(content["words"])
    said = "6 iterations (1 to 6) of 3 MoE layers with 8 experts over 4 ranks on 2 nodes. FSSDP was on."
    assert said in words and f"{content['mean']['before']:.2f} times the mean load" in words


def test_hottest_experts(made: tuple) -> None:
    held, content = made
    total = held["load"].sum(axis=0)
    order = np.argsort(-total, axis=1, kind="stable")
    assert content["experts"]["number"] == order.tolist()
    assert content["experts"]["home"] == (order // 2).tolist()
    hot = np.take_along_axis(total, order, axis=1) / total.mean(axis=1, keepdims=True)
    assert _values(content["hot"], "whole", 0) == pytest.approx(hot.ravel(), abs=1e-4)
    for layer, experts in enumerate(order):
        count = [(held["replica"][:, layer] == expert).sum() / SIZE.num for expert in experts]
        assert content["experts"]["replicas"][layer] == pytest.approx(count)


def test_only_observed(tmp_path: Path, cli: Any) -> None:
    held = recorded.arrays(SIZE, fssdp=False)
    folder = recorded.write(tmp_path / "observed", SIZE, held=held)
    status, said, _ = cli("report", folder)
    assert status == 0 and "FSSDP was off" in said
    assert f"what-if {folder}\n" in said and "ranks wait" in said
    content = _content(folder)
    assert content["observed"] and content["lines"].keys() == {"imbalance", "lost", "step"}
    assert [len(content[name]["parts"]) for name in ("loads", "spread")] == [1, 1]
    assert {row[-1] for row in content["layers"]} <= {"Uneven", "Balanced"}


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
    held = recorded.arrays(size, fssdp=fssdp)
    content = _content(recorded.write(tmp_path / "run", size, held=held))
    iterations, points = content["iterations"], min(size.num, 1000)
    assert len(iterations) == points and iterations == sorted(iterations)
    for chart in content["lines"].values():
        assert {len(values) for _, _, values in chart["series"]} == {points}
    assert len(content["layers"]) == size.layers
    loads = _values(content["loads"], "whole", 0)
    assert len(loads) == size.layers * size.ranks and np.isnan(loads).all() == (size.tokens == 0)
    first, last = content["loads"]["groups"][0][0], content["loads"]["groups"][-1][1]
    assert (first, last) == (1, size.num)


def test_no_record_and_no_place_for_the_page(tmp_path: Path, cli: Any) -> None:
    status, _, error = cli("report", tmp_path)
    assert status == 2 and "no report: " in error
    folder = recorded.write(tmp_path / "run", SIZE, held=recorded.arrays(SIZE))
    status, _, error = cli("report", folder, "--out", tmp_path / "missing" / "page.html")
    assert status == 2 and "missing" in error
    assert cli("report", folder, "--out", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page.html").exists() and not (folder / "report.html").exists()
    status, _, error = cli("report", folder, folder, folder)
    assert status == 2 and "one or two folders, got 3" in error
    status, _, error = cli("report", folder, "--export", "layers.xlsx")
    assert status == 2 and "the name must end with .csv or .json" in error
    status, _, error = cli("report", folder, "--out", next(folder.rglob("*.rows")))
    assert status == 2 and "has the name of a recorded file" in error
    status, _, error = cli("report", folder, "--out", "both.csv", "--export", "both.csv")
    assert status == 2 and "name the same file" in error


def test_one_file_that_needs_nothing_and_escapes_names(tmp_path: Path) -> None:
    evil = ["</script><b>layer 1", "layer <!-- 2", "layer 3"]
    folder = recorded.write(tmp_path / "run", SIZE, held=recorded.arrays(SIZE), layers=evil)
    assert sorted(_content(folder)["info"]["layers"]) == sorted(evil)
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == 3 and "/*data*/" not in page and "/*page.js*/" not in page
    scripts = re.sub(r"\s//\s.*", "", page)
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}[^\s\"')]*", scripts))
    # in the library's own comment
    assert addresses == {"https://github.com/leeoniya/uPlot"}
    assert not re.search(r"\b(?:src|href)\s*=\s*[\"'](?!#|data:,)", page) and "@import" not in page
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|WebSocket|import)\s*\(", page)


def test_the_page_and_what_if_give_one_number(tmp_path: Path, cli: Any) -> None:
    """Oracle: what the other command prints and saves about the same folder."""
    size = recorded.Size(num=12, layers=3, experts=16, ranks=4, tokens=800_000, skew=1.5)
    held = recorded.arrays(size, fssdp=False)
    held["time"] = 1.7e9 + 0.4 * np.arange(size.num)
    by_rank = held["load"].reshape(size.num, size.layers, size.ranks, -1).sum(axis=3)
    extra = np.random.default_rng(3).integers(1, 5_000, (size.num, size.layers))
    held["peak"] = by_rank.max(axis=2) + extra  # microbatches differ
    folder = recorded.write(tmp_path / "run", size, held=held, transport="")
    content = _content(folder)
    status, text, _ = cli("what-if", folder, "--save", tmp_path / "saved.json")
    assert status == 0
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved["recommendation"] in content["verdict"]["reason"]
    forced, stock, *ways = saved["outcomes"]
    names, lost, won = zip(*content["parts"]["rows"], strict=True)
    gap = 1e3 * (stock["seconds"] - forced["seconds"])
    assert sum(lost) == pytest.approx(gap, abs=1e-5)
    parts = dict(zip(names, lost, strict=True))
    assert parts["expert compute"] > 0 < parts["all-to-all"]
    simulated = [[1e3 * way["parts"][name] for name in names] for way in ways]
    assert any(way == pytest.approx(won, abs=1e-5) for way in simulated)
    cost = f"{sum(lost) / content['parts']['step']:.1%}"
    assert f"imbalance costs {cost}" in text and f"together{cost:>31}" in text
    # The chart of all iterations is of the same model: here both cover the same iterations.
    of_iterations = _series(content, "lost")["lost, as routed"][1:]
    assert statistics.fmean(of_iterations) == pytest.approx(sum(lost), rel=2e-3)
    measured, modelled = (_series(content, "step")[name] for name in ("measured", "modelled"))
    assert measured[0] is None and measured[1:] == pytest.approx([400.0] * 11, rel=1e-4)
    assert statistics.fmean(modelled[1:]) == pytest.approx(400.0, rel=2e-3)


def test_two_runs_are_compared(tmp_path: Path, cli: Any) -> None:
    """Oracle: the two pages of single runs."""
    observed = recorded.arrays(SIZE, fssdp=False)
    stock = recorded.write(tmp_path / "stock", SIZE, held=observed, transport="")
    ours = recorded.write(tmp_path / "ours", SIZE, held=recorded.arrays(SIZE))
    export = tmp_path / "both.json"
    files = ["--out", tmp_path / "both.html", "--export", export]
    status, text, _ = cli("report", stock, ours, *files)
    both, said = json.loads(export.read_text()), text.splitlines()
    alone = [_content(folder) for folder in (stock, ours)]
    first, second = both["compared"]["rows"]
    assert status == 0 and (first[0], second[0]) == (f"{stock} (stock)", f"{ours} (FSSDP)")
    assert [row[1] for row in (first, second)] == [one["info"]["step"] for one in alone]
    for head, *cells in zip(both["compared"]["heads"], first, second, strict=True):
        (line,) = [line for line in said if line.lstrip().startswith(head)]
        if head != "run":
            figures = [float(text.replace(",", "")) for text in line.split()[-2:]]
            assert figures == pytest.approx(cells, rel=1e-4)
    assert not any("megatron-hecate report STOCK_RUN" in line for line in said)
    assert first[4] == pytest.approx(alone[0]["mean"]["lost"], abs=1e-6)
    assert second[4] == pytest.approx(alone[1]["mean"]["left"], abs=1e-6)
    layers = zip(both["compared"]["layers"], *(one["layers"] for one in alone), strict=True)
    for row, a, b in layers:
        assert row[1:4] == [a[2], b[2], a[7]] and row[4] == pytest.approx(b[7] - b[8], abs=2e-6)


def test_which_budget_of_tokens_suffices_is_said(tmp_path: Path) -> None:
    """Literal numbers: 4 of 8 experts' homes and 2 slots on 2 ranks, 128 tokens of a rank and microbatch, top 2."""
    size = recorded.Size(ranks=2, tokens=2048)
    held = recorded.arrays(size)
    shape = (size.num, size.layers)
    held |= {"factor": np.full(shape, 1.1), "stock_factor": np.full(shape, 1.5)}
    held["factor"][0, 1], held["factor"][3, 2], held["stock_factor"][5, 0] = 1.9, 1.204, 1.907
    folder = recorded.write(tmp_path / "run", size, held=held, job=dict(alignment=16))
    assert (
        "moe_expert_rank_capacity_factor=1.21 sufficed from the second iteration on, 1.90 in the first; without FSSDP "
        "1.91 would have. Padding to 16 rows adds 0.35 at most, 0.23 without FSSDP."
    ) in " ".join(_content(folder)["words"])
    stock = recorded.arrays(size, fssdp=False) | {"stock_factor": held["stock_factor"]}
    folder = recorded.write(tmp_path / "stock", size, held=stock)
    assert "moe_expert_rank_capacity_factor=1.91 sufficed." in " ".join(_content(folder)["words"])


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
