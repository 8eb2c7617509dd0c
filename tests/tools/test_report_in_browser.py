"""The page in a real browser, headless Chromium. Oracle: what it draws, says, asks for and complains about."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import recorded
from browser import CHROMIUM, Browser

from megatron_hecate.tools import report
from megatron_hecate.tools.report_content import Report, page_content

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
SIZE = recorded.Size(num=40, layers=5, experts=16, ranks=8, tokens=100_000)
BIG = recorded.Size(num=10, layers=60, experts=256, ranks=64, tokens=4_000_000)
COLOURS = """(canvas => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
})"""  # of a picture
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def _page(folder: Path, size: recorded.Size, *, fssdp: bool = True) -> Path:
    recorded.write(folder, size, held=recorded.arrays(size, fssdp=fssdp))
    report.write(folder, folder / "report.html")
    return folder / "report.html"


def _charts(size: recorded.Size, fssdp: bool) -> int:
    """Loads and memory; where there are tokens also lost time, and with several iterations the step's time, and with
    FSSDP the copies."""
    if not size.tokens:
        return 2
    return 3 + (size.num > 1) + fssdp


def test_it_renders_and_its_controls_work(tmp_path: Path) -> None:
    page = _page(tmp_path / "run", SIZE)
    with Browser() as browser:
        browser.open(page)
        see = browser.evaluate
        assert see("document.querySelectorAll('.uplot').length") == 5
        assert see("[...document.querySelectorAll('canvas.heat')].length") == 5
        assert see(f"[...document.querySelectorAll('canvas.heat')].every(c => {COLOURS}(c) > 20)")
        assert see("document.querySelectorAll('#layers tbody tr').length") == SIZE.layers
        assert see("document.querySelector('h1').textContent") == "What FSSDP did"

        # a keyboard reaches every control, each of which has a name
        names = []
        see("document.activeElement.blur()")
        for _ in range(70):
            browser.press("Tab")
            names.append(
                see(
                    "(e => e.getAttribute('aria-label') || (e.labels && e.labels[0]?.textContent) || e.textContent)"
                    "(document.activeElement)"
                ).strip()
            )
        reached = see(
            "document.querySelectorAll('a, button, select, input, summary, [tabindex=\"0\"]').length"
        )
        assert all(names) and len(set(names)) > 30 and reached <= 70, names

        # the sort of the table, the slider, the choice of a layer: each changes what is shown
        head = "[...document.querySelectorAll('#layers thead button')]"
        order = "[...document.querySelectorAll('#layers tbody tr')].map(r => parseFloat(r.children[1].textContent))"
        lost = "[...document.querySelectorAll('#layers tbody tr')].map(r => parseFloat(r.children[8].textContent))"
        assert see(lost) == sorted(see(lost), reverse=True), "the costliest layer is the first"
        see(f"{head}[1].focus()")
        browser.press("Enter")
        assert see(order) == sorted(see(order), reverse=True) and see(order)[0] > see(order)[-1]
        browser.press("Enter")
        assert see(order) == sorted(see(order))
        drawn = "document.querySelector('#loads canvas.heat').toDataURL()"
        whole = see(drawn)
        see("document.querySelector('#when').focus()")
        browser.press("ArrowRight")
        assert see("document.querySelector('#loads .controls output').value") == "iteration 1"
        first = see(drawn)
        assert first != whole
        see("(s => { s.value = 2; s.onchange(); })(document.querySelector('#loads select'))")
        assert see(drawn) != first and see("document.querySelector('#when').disabled")
        see("document.querySelector('#loads summary').click()")
        rows = "document.querySelectorAll('#loads details tbody tr').length"
        browser.wait_for(f"{rows} === {2 * SIZE.ranks}")  # of the layer that was chosen

        # arrow keys: a cell of a picture, an iteration of a line
        see("document.querySelector('#experts canvas.heat').focus()")
        browser.press("ArrowDown")
        browser.press("ArrowDown")
        assert " the mean" in see("document.querySelector('#experts .tip').value")
        see("document.querySelector('#lost [role=group]').focus()")
        browser.press("End")
        assert see("document.querySelector('#lost output').value").startswith(
            f"iteration {SIZE.num}: lost, as routed "
        )

        # colours
        background = "getComputedStyle(document.body).backgroundColor"
        assert see(background) == "rgb(255, 255, 255)"
        see("(s => { s.value = 'dark'; s.onchange(); })(document.querySelector('#theme'))")
        assert see(background) == "rgb(21, 24, 28)" and see(drawn) != first
        browser.resize(400, 800)
        browser.wait_for(f"innerWidth === 400 && {OVERFLOW} <= 0")  # it does not scroll sideways
        assert browser.messages == [] and browser.requests == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("size", "fssdp"),
    [
        (SIZE, False),
        (recorded.Size(num=1, layers=1), True),
        (recorded.Size(num=3, tokens=0), False),
    ],
    ids=["observed", "one-one", "no-tokens"],
)
def test_other_records_render(tmp_path: Path, size: recorded.Size, fssdp: bool) -> None:
    with Browser(dark=True, width=500) as browser:
        browser.open(_page(tmp_path / "run", size, fssdp=fssdp))
        assert browser.evaluate("document.querySelectorAll('.uplot').length") == _charts(
            size, fssdp
        )
        assert (
            browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        )
        assert browser.evaluate(OVERFLOW) <= 0
        browser.print(tmp_path / "page.pdf")
        assert (tmp_path / "page.pdf").stat().st_size > 10_000
        assert browser.messages == []


def _text(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def test_the_first_screen(tmp_path: Path) -> None:
    """On a desktop and on a phone it shows the verdict, the three layers that lose most, and the command; the words fit.
    Oracle: the figures that the page was made of, and the layers' table."""
    page = _page(tmp_path / "run", SIZE, fssdp=False)
    found = page_content(Report.read(tmp_path / "run"))
    rows = dict(zip(found["info"]["layers"], found["layers"], strict=True))
    for width, height, dark in ((1280, 900, False), (390, 844, True)):
        with Browser(width=width, height=height, dark=dark) as browser:
            browser.open(page)
            assert found["verdict"]["text"] in _text(browser, "#summary .verdict")
            worst = _text(browser, "#summary .worst").splitlines()
            assert len(worst) == 3
            names = [" ".join(line.split()[:2]) for line in worst]
            costliest = sorted(rows, key=lambda name: -rows[name][7])
            assert names == costliest[:3] and all("\u25bc" in line for line in worst)
            below = browser.evaluate(
                "document.querySelector('#summary .next pre').getBoundingClientRect().bottom"
            )
            assert below <= height, "the command is on the first screen"
            assert _text(browser, "#summary .next code") == found["verdict"]["command"]
            assert browser.evaluate(OVERFLOW) <= 0
            cut = browser.evaluate(
                "[...document.querySelectorAll('#summary *')].filter(e => "
                "e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1 && "
                "getComputedStyle(e).overflowX !== 'auto' && getComputedStyle(e).display !== 'inline').length"
            )
            assert cut == 0, "words are cut off"
            assert browser.messages == []


def test_lost_and_won_differ_without_colour(tmp_path: Path) -> None:
    """Signs in the table of parts, and the dashes of lines as uPlot draws them."""
    with Browser() as browser:
        browser.open(_page(tmp_path / "run", SIZE))
        cells = browser.evaluate(
            "[...document.querySelectorAll('.parts tbody tr')].map(r => [...r.children].map(c => c.textContent))"
        )
        assert [row[0] for row in cells][-1] == "together"
        lost = {row[0]: row[1][0] for row in cells}
        assert lost["expert compute"] == "\u25bc" and set(lost.values()) <= {
            "\u25bc",
            "\u2013",
            "\u25b2",
        }
        assert {row[2][0] for row in cells} <= {"\u25bc", "\u2013", "\u25b2"}
        assert not any("-" in cell or "\u2212" in cell for row in cells for cell in row[1:])
        styles = browser.evaluate(
            "[...document.querySelectorAll('#lost .u-series:not([hidden]) .u-marker')]"
            ".map(m => getComputedStyle(m).borderTopStyle)"
        )
        assert len({*styles} - {"none"}) == 3, (
            "lost, lost with FSSDP and won have three kinds of line"
        )


def test_ranks_are_grouped_by_node_and_scales_begin_at_1(tmp_path: Path) -> None:
    """Ranks of two nodes alternate in the record: the picture shows node 0's first."""
    folder = tmp_path / "run"
    held = recorded.arrays(SIZE, fssdp=False)
    recorded.write(folder, SIZE, held=held, node=[0, 1] * 4)
    report.write(folder, folder / "report.html")
    load = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
    with Browser() as browser:
        browser.open(folder / "report.html")
        browser.evaluate("document.querySelector('#loads summary').click()")
        heads = "[...document.querySelectorAll('#loads details thead th')].map(h => h.textContent)"
        browser.wait_for(f"{heads}.length === {SIZE.ranks + 1}")
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        assert browser.evaluate(heads)[1:] == [f"rank, by node (2 nodes) {rank}" for rank in order]
        first = browser.evaluate(
            "[...document.querySelector('#loads details tbody tr').children].slice(1).map(c => +c.textContent)"
        )
        right = load[:, 0].sum(axis=0) / load[:, 0].sum() * SIZE.ranks
        assert first == pytest.approx(right[order].tolist(), abs=2e-3)
        # Imbalance is never below 1, loads of ranks are.
        assert _text(browser, "#spread .legend .low") == "1.00 \u00d7"
        low = float(_text(browser, "#loads .legend .low").split()[0])
        assert low < 1


def test_copy_and_save(tmp_path: Path) -> None:
    """What the buttons hand out: the command, the layers as CSV, the figures as JSON."""
    page = _page(tmp_path / "run", SIZE)
    found = page_content(Report.read(tmp_path / "run"))
    with Browser() as browser:
        browser.open(page)
        browser.evaluate(
            "window.copied = ''; Object.defineProperty(navigator, 'clipboard', "
            "{value: {writeText: async text => { window.copied = text; }}})"
        )
        browser.evaluate("document.querySelector('.copy').click()")
        browser.wait_for("document.querySelector('.copy').textContent === 'Copied'")
        assert browser.evaluate("copied") == found["verdict"]["command"]
        browser.evaluate(
            "window.blobs = []; window.old = URL.createObjectURL; "
            "URL.createObjectURL = blob => { blobs.push(blob); return 'data:,'; }; "
            "HTMLAnchorElement.prototype.click = function () { blobs.push(this.download); }"
        )
        browser.evaluate("document.querySelector('#csv').click()")
        browser.evaluate("document.querySelector('#json').click()")
        assert browser.evaluate("[blobs[1], blobs[3]]") == ["layers.csv", "report.json"]
        rows = list(csv.reader(browser.evaluate("blobs[0].text()").splitlines()))
        for row, right, name in zip(
            rows[1:], found["layers"], found["info"]["layers"], strict=True
        ):
            assert row[0] == name and [float(v) for v in row[1:-1]] == right[:-1]
        saved = json.loads(browser.evaluate("blobs[2].text()"))
        assert saved["mean"] == found["mean"] and saved["lines"] == json.loads(
            json.dumps(found["lines"])
        )
        assert browser.messages == []


def test_the_page_of_two_runs(tmp_path: Path) -> None:
    recorded.write(tmp_path / "stock", SIZE, held=recorded.arrays(SIZE, fssdp=False))
    recorded.write(tmp_path / "ours", SIZE, held=recorded.arrays(SIZE))
    page = tmp_path / "both.html"
    assert report.main([str(tmp_path / "stock"), str(tmp_path / "ours"), "--out", str(page)]) == 0
    with Browser(width=390, height=844) as browser:
        browser.open(page)
        text = _text(browser, "#compared")
        assert "stock (stock)" in text and "ours (FSSDP)" in text and "measured step, ms" in text
        rows = "document.querySelectorAll('#compared tbody')[1].children.length"
        assert browser.evaluate(rows) == SIZE.layers
        assert browser.evaluate(OVERFLOW) <= 0 and browser.messages == []


@pytest.mark.slow
def test_a_large_record_is_small_and_opens_soon(tmp_path: Path) -> None:
    """1,000 iterations of 60 layers with 256 experts on 64 ranks: under 10 MB. A second on a quiet machine; three are
    allowed here, where other work may run beside."""
    few = recorded.arrays(BIG)
    held = {name: np.concatenate([array] * 100) for name, array in few.items()}
    held |= {"iteration": np.arange(1, 1001), "time": 1.7e9 + np.arange(1000)}
    recorded.write(tmp_path / "run", BIG, held=held)
    page = tmp_path / "run" / "report.html"
    report.write(tmp_path / "run", page)
    assert page.stat().st_size < 10e6
    with Browser() as browser:
        browser.open(page)
        assert float(browser.evaluate("document.documentElement.dataset.ready")) < 3000
        assert browser.messages == []
