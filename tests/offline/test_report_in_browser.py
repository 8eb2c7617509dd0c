"""The page in a real browser, headless Chromium. Oracle: what it draws, says, asks for and complains about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recorded
from browser import CHROMIUM, Browser

from megatron_hecate.offline import report

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


def test_it_renders_and_its_controls_work(tmp_path: Path) -> None:
    page = _page(tmp_path / "run", SIZE)
    with Browser() as browser:
        browser.open(page)
        see = browser.evaluate
        assert see("document.querySelectorAll('.uplot').length") == 4
        assert see("[...document.querySelectorAll('canvas.heat')].length") == 5
        assert see(f"[...document.querySelectorAll('canvas.heat')].every(c => {COLOURS}(c) > 20)")
        assert see("document.querySelectorAll('#layers tbody tr').length") == SIZE.layers
        assert see("document.querySelector('h1').textContent") == "What FSSDP did"

        # a keyboard reaches every control, each of which has a name
        names = []
        see("document.activeElement.blur()")
        for _ in range(60):
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
        assert all(names) and len(set(names)) > 30 and reached <= 60, names

        # the sort of the table, the slider, the choice of a layer: each changes what is shown
        head = "[...document.querySelectorAll('#layers thead button')]"
        order = "[...document.querySelectorAll('#layers tbody tr')].map(r => parseFloat(r.children[1].textContent))"
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
        assert browser.evaluate("document.querySelectorAll('.uplot').length") == (4 if fssdp else 3)
        assert (
            browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        )
        assert browser.evaluate(OVERFLOW) <= 0
        browser.print(tmp_path / "page.pdf")
        assert (tmp_path / "page.pdf").stat().st_size > 10_000
        assert browser.messages == []


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
