"""The page in a real browser, headless Chromium. Oracle: what it draws, says, asks for and complains about.

A script in the page acts as a user and writes down what is there, as JSON.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import recorded

from megatron_hecate.tools import report
from megatron_hecate.tools.report_content import Report, page_content

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
SIZE = recorded.Size(num=40, layers=5, experts=16, ranks=8, tokens=100_000)
SCRIPT = """<script>
const complaints = [];
addEventListener("error", event => complaints.push(event.message));
console.error = console.warn = (...words) => complaints.push(words.join(" "));
addEventListener("load", async () => {
  const $ = name => document.querySelector(name), all = name => [...document.querySelectorAll(name)];
  const act = (name, value) => { const it = $(name); it.value = value; it.dispatchEvent(new Event("input"));
                                 it.dispatchEvent(new Event("change")); };
  const column = at => all("#layers tbody tr").map(row => parseFloat(row.children[at].textContent));
  const colours = canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(
    0, 0, canvas.width, canvas.height).data.buffer)).size;
  const root = document.documentElement, seen = {
    charts: all(".uplot").length, heats: all("canvas.heat").map(colours), title: $("h1").textContent,
    overflow: root.scrollWidth - root.clientWidth, width: innerWidth,
    is_dark: matchMedia("(prefers-color-scheme: dark)").matches};
  ACT
  seen.requests = performance.getEntriesByType("resource").map(entry => entry.name);
  parent.postMessage(JSON.stringify({...seen, complaints}), "*");
});
</script>"""
# a window may not be as narrow as a phone
FRAME = """<body><script>onmessage = event => {{
  document.body.innerHTML = "<pre id=seen></pre>";
  document.querySelector("#seen").textContent = event.data;
}}</script><iframe width={} height={} style="border: 0" srcdoc="{}"></iframe></body>"""


def _see(
    folder: Path, act: str = "", *, width: int = 1280, height: int = 900, is_dark: bool = False
) -> dict[str, Any]:
    """What the page of a run shows after ``act``."""
    report.write(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    acting = page.replace("<head>", f"<head>{SCRIPT.replace('ACT', act)}", 1)
    (folder / "frame.html").write_text(FRAME.format(width, height, html.escape(acting)))
    options = "--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=20000"
    options += f" --blink-settings=preferredColorScheme={int(not is_dark)}"
    options += f" --user-data-dir={folder / 'chromium'} {(folder / 'frame.html').as_uri()}"
    command = [CHROMIUM, *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<pre id=.seen.>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert not seen["complaints"] and not seen["requests"] and seen["overflow"] <= 0, seen
    assert (seen["width"], seen["is_dark"]) == (width, is_dark)
    return seen


def _write(folder: Path, size: recorded.Size, *, fssdp: bool = True) -> Path:
    return recorded.write(folder, size, held=recorded.arrays(size, fssdp=fssdp))


# the sort of the table, the slider, the choice of a layer, a chart's cursor, the theme, a download
USER = """
  seen.lost = column(8);
  all("#layers thead button")[1].click();
  seen.order = column(1);
  const drawn = () => $("#loads canvas.heat").toDataURL();
  seen.drawn = [drawn()];
  act("#when", 1);
  seen.when = $("#loads .controls output").value;
  seen.drawn.push(drawn());
  act("#loads select", 2);
  seen.drawn.push(drawn());
  $("#lost [role=group]").dispatchEvent(new KeyboardEvent("keydown", {key: "End", bubbles: true}));
  seen.cursor = $("#lost output").value;
  const background = () => getComputedStyle(document.body).backgroundColor;
  seen.backgrounds = [background()];
  act("#theme", "dark");
  seen.backgrounds.push(background());
  const blobs = [];
  URL.createObjectURL = blob => { blobs.push(blob); return "data:,"; };
  HTMLAnchorElement.prototype.click = function () {};
  $("#json").click();
  seen.saved = JSON.parse(await blobs[0].text());
"""


def test_it_renders_and_its_controls_work(tmp_path: Path) -> None:
    seen = _see(_write(tmp_path / "run", SIZE), USER)
    assert seen["charts"] == 4 and seen["title"] == "What FSSDP did"
    assert len(seen["heats"]) == 5 and min(seen["heats"]) > 20
    assert seen["lost"] == sorted(seen["lost"], reverse=True), "the costliest layer is the first"
    order = seen["order"]
    assert order == sorted(order, reverse=True) and order[0] > order[-1]
    assert seen["when"] == "iteration 1" and len(set(seen["drawn"])) == 3
    assert seen["cursor"].startswith(f"iteration {SIZE.num}: lost, as routed ")
    assert seen["backgrounds"] == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]
    assert seen["saved"]["mean"] == page_content(Report.read(tmp_path / "run"))["mean"]


@pytest.mark.parametrize(
    ("size", "charts"),
    [(recorded.Size(num=1, layers=1), 3), (recorded.Size(num=3, tokens=0), 1)],
    ids=["one-one", "no-tokens"],
)
def test_odd_records_render(tmp_path: Path, size: recorded.Size, charts: int) -> None:
    folder = _write(tmp_path / "run", size, fssdp=bool(size.tokens))
    assert _see(folder, width=500, is_dark=True)["charts"] == charts


FIRST_SCREEN = """
  seen.verdict = $("#summary .verdict").innerText;
  seen.worst = $("#summary .worst").innerText.split("\\n");
  seen.code = $("#summary .next code").innerText;
  seen.bottom = $("#summary .next pre").getBoundingClientRect().bottom;
"""


@pytest.mark.parametrize(("width", "height", "is_dark"), [(1280, 900, False), (390, 844, True)])
def test_the_first_screen(tmp_path: Path, width: int, height: int, is_dark: bool) -> None:
    """On a desktop and on a phone it shows the verdict, the three layers that lose most, and the command.

    Oracle: the figures that the page was made of, and the layers' table."""
    folder = _write(tmp_path / "run", SIZE, fssdp=False)
    content = page_content(Report.read(folder))
    rows = dict(zip(content["info"]["layers"], content["layers"], strict=True))
    costliest = sorted(rows, key=lambda name: -rows[name][7])[:3]
    seen = _see(folder, FIRST_SCREEN, width=width, height=height, is_dark=is_dark)
    assert content["verdict"]["text"] in seen["verdict"]
    assert [" ".join(line.split()[:2]) for line in seen["worst"]] == costliest
    assert seen["bottom"] <= height and seen["code"] == content["verdict"]["command"]
