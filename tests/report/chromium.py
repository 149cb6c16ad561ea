"""Chromium without a window, driven through its DevTools protocol over a pipe: no package is needed for it."""

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

import pytest

__all__ = ["Page", "chromium_path", "needs_browser", "open_page"]

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_PATIENCE = 60.0
"""Seconds."""
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Home": 36, "End": 35}


def chromium_path() -> str | None:
    """Where Chromium is; ``None`` if it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    chromium_path() is None, reason="no Chromium: apt-get install --no-install-recommends chromium"
)


class Page:
    """A page that is open in a browser.

    Attributes:
        errors: what scripts threw or logged as errors, and what was asked of the network.
    """

    def __init__(self, to_browser: Any, from_browser: Any) -> None:
        self.errors: list[str] = []
        self._to, self._from, self._number, self._session = to_browser, from_browser, 0, ""
        self._received = b""

    def start(self) -> None:
        """Open an empty page."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        """Send a command, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._from.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._received += more
        text, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.errors.append(f"asked the network for {url}")

    def open(self, path: Path, width: int = 1280, height: int = 820, dark: bool = False) -> None:
        """Open a file, and wait until its scripts have run."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.dark(dark)
        self.command("Page.navigate", url=path.as_uri())
        until = time.monotonic() + _PATIENCE
        while not self.evaluate("document.body && document.body.dataset.ready"):
            if self.errors or time.monotonic() > until:
                raise AssertionError(f"the page is not ready: {self.errors}")
            time.sleep(0.05)
        self.settle()

    def dark(self, on: bool) -> None:
        """Prefer a dark scheme, or a light one."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def text(self, selector: str) -> str:
        """The text of an element that is in sight."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click an element, at shares of its width and height."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'nearest'}); "
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, **at)
        self.settle()

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        code = _KEYS.get(key, ord(key.upper()[0]))
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.command("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Write what is in sight as PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    """A browser with an empty page; it ends with the context.

    Args:
        folder: where it may write its profile.
    """
    program = chromium_path()
    assert program is not None
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # Chromium reads from descriptor 3 and writes to descriptor 4.
    shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, program, *_FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        with os.fdopen(write_commands, "wb") as to_browser, os.fdopen(read_answers, "rb", buffering=0) as from_browser:
            page = Page(to_browser, from_browser)
            page.start()
            yield page
    finally:
        process.terminate()
        process.wait(_PATIENCE)
