"""The HTML report in a real browser, which runs its script under its own security policy."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from acutance.probing import HeadSummary, Moments
from acutance.report import html
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path draws the page")


def opened(text: str, folder: Path, fragment: str = "", then: str = "") -> str:
    """The document after its script ran, and after `then` ran in it.

    `then` is no part of the page, so the page's policy is taken off for it.
    """
    if then:
        text, count = re.subn(r"<meta http-equiv[^>]*>", "", text)
        assert count == 1
        text = text.replace("</body>", f"<script>{then}</script></body>")
    (folder / "report.html").write_text(text, encoding="utf-8")
    address = (folder / "report.html").as_uri() + fragment
    done = subprocess.run(
        [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # without the script and its data, which hold every string whether it is shown or not
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def test_the_page_shows_each_head_and_hostile_strings_as_text(
    summary_of: Make, tmp_path: Path
) -> None:
    hostile = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    summary = summary_of(
        (3, 2, 0),
        about={"model": hostile, "text": "prose"},
        layer={1: {"module": hostile, "status": "mismatch"}},
        unread=[hostile],
        normalized_entropy={(0, 1): 0.07, (0, 2): math.nan},
    )
    page = opened(html(summary), tmp_path)
    shown = hostile.replace("<", "&lt;").replace(">", "&gt;")
    assert page.count(shown) >= 4  # title, about, layers, unread
    assert "<img" not in page
    assert f"<title>{shown} · acutance report</title>" in page
    cells = re.findall(r'class="head[^"]*"[^>]*aria-label="([^"]*)"', page)
    assert len(cells) == 5
    assert cells[1] == "layer 0, head 1: 0.07000"
    assert cells[2] == "layer 0, head 2: –"
    assert "How sharply attention focuses: 3 layers, 5 heads, 40 rows for each head." in page
    assert "1 layer did not verify" in page
    assert '<h3 id="head-name">Layer 0 · head 1</h3>' in page  # the sharpest is chosen first
    assert len(re.findall(r'<rect [^>]*class="bar"', page)) == 1
    assert page.count(">show L") == 3


def test_an_address_opens_a_head_and_a_metric(summary_of: Make, tmp_path: Path) -> None:
    page = opened(html(summary_of((2, 3))), tmp_path, "#metric=entropy&head=1.2")
    assert '<h3 id="head-name">Layer 1 · head 2</h3>' in page
    assert "Shannon entropy of the weights. Range [0, log n], in nat." in page
    assert re.search(r'aria-label="layer 1, head 2: [23]\.\d+"[^>]*aria-selected="true"', page)


def test_pointing_clicking_and_keys(summary_of: Make, tmp_path: Path) -> None:
    then = """
      const cell = (at) => document.querySelector(`.head[data-at="${at}"]`);
      const fire = (at, [Kind, name], more) =>
        cell(at).dispatchEvent(new Kind(name, { bubbles: true, ...more }));
      const log = [];
      const tip = document.getElementById("tip");
      fire(3, [PointerEvent, "pointerover"], { pointerType: "mouse" });
      log.push(tip.style.visibility, tip.querySelector("strong").textContent);
      log.push(tip.querySelectorAll("tr").length);
      fire(4, [MouseEvent, "click"]);
      log.push(document.getElementById("head-name").textContent);
      fire(4, [KeyboardEvent, "keydown"], { key: "ArrowUp" });
      log.push(document.activeElement.dataset.at);
      fire(1, [KeyboardEvent, "keydown"], { key: "Enter" });
      log.push(document.getElementById("head-name").textContent);
      const metric = document.getElementById("metric");
      metric.value = [...metric.options].findIndex((one) => /^max logit/.test(one.textContent));
      metric.dispatchEvent(new Event("change"));
      log.push(document.getElementById("meaning").textContent.split(".")[0]);
      document.body.dataset.log = log.join(" | ");
    """
    page = opened(html(summary_of((3, 2))), tmp_path, then=then)
    (log,) = re.findall(r'data-log="([^"]*)"', page)
    assert log == (
        f"visible | Layer 1 · head 0 | {len(METRICS) + 1} | Layer 1 · head 1 | 1 | "
        "Layer 0 · head 1 | Largest visible score"
    )


def test_a_summary_of_nothing_breaks_nothing(tmp_path: Path) -> None:
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    page = opened(html(nothing), tmp_path)
    assert "0 layers, 0 heads" in page
    assert "Nothing to name" in page
    assert "what it could be" not in page
