"""A real browser without a window, driven through its debugging pipe: no driver, no web socket, nothing to install but Chromium.

page = browser.open(path)           waits until the page says that it is ready
page.value("document.title")        what an expression is worth in the page
page.drag((200, 90), (300, 90))     real events of mouse, wheel and keyboard
page.complaints                     errors, exceptions, and requests for anything but the page
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
PATIENCE_S = 90.0
"""For a page to be ready, on a machine that does much else."""


def installed_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """The value of an expression, promises awaited. AssertionError where it throws."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drawn(self) -> None:
        """Waits until what was asked for has been drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, which is scrolled there."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{box}.scrollIntoView({{block: 'center'}})")
        return tuple(self.value(f"(() => {{const b = {box}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]}})()"))

    def mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", begin, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", end, button="left", buttons=1)
        self.mouse("mouseReleased", end, button="left", clickCount=1)
        self.drawn()

    def click(self, at: tuple[float, float], count: int = 1) -> None:
        for number in range(1, count + 1):
            self.mouse("mousePressed", at, button="left", buttons=1, clickCount=number)
            self.mouse("mouseReleased", at, button="left", clickCount=number)
        self.drawn()

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.drawn()

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A screenshot; of the whole page, or of the window."""
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


class Browser:
    """A running browser. Messages are JSON with a NUL behind each."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._number, self._read = 0, b""
        self._pages: dict[str, Page] = {}

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._notice(answer)

    def open(self, path: Path, width: int = 1400, height: int = 900) -> Page:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.send(f"{domain}.enable")
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.send("Page.navigate", url=path.as_uri())
        until_s = time.monotonic() + PATIENCE_S
        while page.value("document.body?.dataset.ready ?? ''") != "yes":
            assert time.monotonic() < until_s, f"the page is not ready: {page.complaints}"
            time.sleep(0.02)
        page.drawn()
        return page

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser is gone"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _notice(self, event: dict[str, Any]) -> None:
        page, about = self._pages.get(event.get("sessionId", "")), event.get("params", {})
        if page is None:
            return
        if event["method"] == "Runtime.exceptionThrown":
            page.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            page.complaints.append(about["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            page.complaints.append(json.dumps(about["args"])[:500])
        elif event["method"] == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("file:", "data:")):
            page.complaints.append(f"asks for {about['request']['url']}")


@contextmanager
def started(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    (requests_in, requests), (answers, answers_out) = os.pipe(), os.pipe()

    def as_it_expects() -> None:
        for end, number in [(os.dup2(each, each + 100), number) for each, number in ((requests_in, 3), (answers_out, 4))]:
            os.dup2(end, number)

    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=as_it_expects,
        close_fds=False,  # what is open here is not inherited; what it expects is
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=profile,
    )
    os.close(requests_in)
    os.close(answers_out)
    try:
        yield Browser(requests, answers)
    finally:
        os.close(requests)
        os.close(answers)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
