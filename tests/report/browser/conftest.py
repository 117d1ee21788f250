"""A real browser, driven over its own debugging pipe: that needs no further package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acutance.probing import HeadSummary
from acutance.report import html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-pipe",
]  # fmt: skip

#: Starts the browser with its pipe where it looks for it: read from 3, write to 4.
_START = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 20) for fd in sys.argv[1:3]]
for at, fd in enumerate(high): os.dup2(fd, 3 + at)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Chromium behind its debugging pipe."""

    def __init__(self, folder: Path) -> None:
        (theirs, self._write), (self._read, answers) = os.pipe(), os.pipe()
        arguments = [str(BROWSER), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs), str(answers), *arguments],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._count, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, wait: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], wait)
            assert ready, "the browser does not answer"
            read = os.read(self._read, 1 << 20)
            assert read, "the browser is gone"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)


class Page:
    """One page: what a reader does, and what went wrong on the way."""

    def __init__(self, browser: Browser, width: int, height: int, dark: bool) -> None:
        self.browser = browser
        self._context = browser.send("Target.createBrowserContext")["browserContextId"]
        target = browser.send(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        self._session = browser.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.send(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        browser.events.clear()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self._session, **params)

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def move(self, selector: str, kind: str = "mouseMoved", **more: Any) -> None:
        x, y = self.run(
            f"(async () => {{ const it = document.querySelector({json.dumps(selector)});"
            " it.scrollIntoView({block: 'center', behavior: 'instant'});"
            " for (const _ of [1, 2]) await new Promise(requestAnimationFrame);"
            " const box = it.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        self.move(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.move(selector, kind, button="left", clickCount=1)

    def key(self, name: str, text: str = "") -> None:
        code = {"Enter": 13, " ": 32, "Tab": 9}.get(name, 0)
        more = {"text": text or {"Enter": "\r", " ": " "}.get(name, "")}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name,
                  windowsVirtualKeyCode=code, **{k: v for k, v in more.items() if v})  # fmt: skip
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def choose(self, metric: str) -> None:
        self.run(
            f"""(() => {{ const list = document.getElementById("metric");
            list.value = [...list.options].find((one) => one.textContent === {metric!r}).value;
            list.dispatchEvent(new Event("change")); }})()"""
        )

    @property
    def problems(self) -> list[Any]:
        """Errors, warnings and requests for anything but the file itself."""
        self.run("1")
        found = []
        for event in self.browser.events:
            method, params = event.get("method", ""), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled":
                found.append(params["args"])
            elif method == "Log.entryAdded":
                found.append(params["entry"])
            elif method == "Network.requestWillBeSent" and params["type"] != "Document":
                found.append(params["request"]["url"])
        return found

    def close(self) -> None:
        self.browser.send("Target.disposeBrowserContext", browserContextId=self._context)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no chromium on the path draws the page")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a summary's report; at the end nothing may have gone wrong in it."""
    pages = []

    def opened(
        summary: HeadSummary,
        fragment: str = "",
        *,
        width: int = 1440,
        dark: bool = False,
        plan: dict[str, Any] | None = None,
    ) -> Page:
        page = Page(browser, width, 900, dark)
        pages.append(page)
        path = tmp_path / "report.html"
        path.write_text(html(summary, plan=plan), encoding="utf-8")
        page.open(path.as_uri() + fragment)
        return page

    yield opened
    for page in pages:
        assert page.problems == []
        page.close()


@pytest.fixture
def blank(browser: Browser) -> Iterator[Page]:
    """An empty page."""
    page = Page(browser, 1440, 1000, False)
    yield page
    assert page.problems == []
    page.close()
