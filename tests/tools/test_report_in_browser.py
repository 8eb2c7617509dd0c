"""The page in a real browser, headless Chromium. Oracle: what it draws, says, asks for and complains about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded
from browser import CHROMIUM, Browser

from megatron_hecate.tools import report
from megatron_hecate.tools.report_content import Report, page_content

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
SIZE = recorded.Size(num=40, layers=5, experts=16, ranks=8, tokens=100_000)
COLOURS = """(canvas => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
})"""  # of a picture
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CHARTS = "document.querySelectorAll('.uplot').length"


def _page(folder: Path, size: recorded.Size, *, fssdp: bool = True) -> Path:
    recorded.write(folder, size, held=recorded.arrays(size, fssdp=fssdp))
    report.write(folder, folder / "report.html")
    return folder / "report.html"


def _text(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def test_it_renders_and_its_controls_work(tmp_path: Path) -> None:
    page = _page(tmp_path / "run", SIZE)
    with Browser() as browser:
        browser.open(page)
        see = browser.evaluate
        assert see(CHARTS) == 5
        assert see("document.querySelectorAll('canvas.heat').length") == 5
        assert see(f"[...document.querySelectorAll('canvas.heat')].every(c => {COLOURS}(c) > 20)")
        assert see("document.querySelector('h1').textContent") == "What FSSDP did"

        # the sort of the table, the slider, the choice of a layer: each changes what is shown
        rows = "[...document.querySelectorAll('#layers tbody tr')]"
        order = f"{rows}.map(r => parseFloat(r.children[1].textContent))"
        lost = f"{rows}.map(r => parseFloat(r.children[8].textContent))"
        assert see(lost) == sorted(see(lost), reverse=True), "the costliest layer is the first"
        see("document.querySelectorAll('#layers thead button')[1].focus()")
        browser.press("Enter")
        assert see(order) == sorted(see(order), reverse=True) and see(order)[0] > see(order)[-1]
        drawn = "document.querySelector('#loads canvas.heat').toDataURL()"
        whole = see(drawn)
        see("document.querySelector('#when').focus()")
        browser.press("ArrowRight")
        assert see("document.querySelector('#loads .controls output').value") == "iteration 1"
        assert (first := see(drawn)) != whole
        see("(s => { s.value = 2; s.onchange(); })(document.querySelector('#loads select'))")
        assert see(drawn) != first
        see("document.querySelector('#lost [role=group]').focus()")
        browser.press("End")
        shown = see("document.querySelector('#lost output').value")
        assert shown.startswith(f"iteration {SIZE.num}: lost, as routed ")

        # the theme, a phone's width, and what the buttons hand out
        background = "getComputedStyle(document.body).backgroundColor"
        assert see(background) == "rgb(255, 255, 255)"
        see("(s => { s.value = 'dark'; s.onchange(); })(document.querySelector('#theme'))")
        assert see(background) == "rgb(21, 24, 28)"
        browser.resize(400, 800)
        browser.wait_for(f"innerWidth === 400 && {OVERFLOW} <= 0")
        see(
            "window.blobs = []; URL.createObjectURL = blob => { blobs.push(blob); return 'data:,'; }; "
            "HTMLAnchorElement.prototype.click = function () {}"
        )
        see("document.querySelector('#json').click()")
        saved = json.loads(see("blobs[0].text()"))
        assert saved["mean"] == page_content(Report.read(tmp_path / "run"))["mean"]
        assert browser.messages == [] and browser.requests == [page.resolve().as_uri()]


@pytest.mark.parametrize(
    ("size", "charts"),
    [(recorded.Size(num=1, layers=1), 4), (recorded.Size(num=3, tokens=0), 2)],
    ids=["one-one", "no-tokens"],
)
def test_odd_records_render(tmp_path: Path, size: recorded.Size, charts: int) -> None:
    with Browser(dark=True, width=500) as browser:
        browser.open(_page(tmp_path / "run", size, fssdp=bool(size.tokens)))
        assert browser.evaluate(CHARTS) == charts
        assert browser.evaluate(OVERFLOW) <= 0 and browser.messages == []


def test_the_first_screen(tmp_path: Path) -> None:
    """On a desktop and on a phone it shows the verdict, the three layers that lose most, and the command.

    Oracle: the figures that the page was made of, and the layers' table."""
    page = _page(tmp_path / "run", SIZE, fssdp=False)
    found = page_content(Report.read(tmp_path / "run"))
    rows = dict(zip(found["info"]["layers"], found["layers"], strict=True))
    costliest = sorted(rows, key=lambda name: -rows[name][7])[:3]
    for width, height, dark in ((1280, 900, False), (390, 844, True)):
        with Browser(width=width, height=height, dark=dark) as browser:
            browser.open(page)
            assert found["verdict"]["text"] in _text(browser, "#summary .verdict")
            worst = _text(browser, "#summary .worst").splitlines()
            assert [" ".join(line.split()[:2]) for line in worst] == costliest
            bottom = "document.querySelector('#summary .next pre').getBoundingClientRect().bottom"
            assert browser.evaluate(bottom) <= height, "the command is on the first screen"
            assert _text(browser, "#summary .next code") == found["verdict"]["command"]
            assert browser.evaluate(OVERFLOW) <= 0 and browser.messages == []
