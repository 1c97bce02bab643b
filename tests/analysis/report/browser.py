"""Pages in headless Chromium, driven over its debugging pipe with the standard library only.

With `--remote-debugging-pipe`, Chromium reads commands from descriptor 3 and answers on 4. Both are
JSON texts that end with a zero byte. No port is opened and nothing has to be downloaded.
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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--window-size=1400,1000",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  #: seconds to wait for an answer; the machine may be busy


def find_browser() -> str | None:
    """Return the browser in the variable CHROMIUM or else on the PATH, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab; `messages` holds its console output and its exceptions."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._count, self._rest, self._session = 0, b"", ""
        self.messages: list[str] = []
        self.requests: list[str] = []  #: addresses that the page requested

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)
        raise TimeoutError(method)

    def start(self) -> None:
        """Attach to a new tab and subscribe to its events."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Open a file and wait until the page is ready."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script} never came true; console: {self.messages}")
            time.sleep(0.1)

    def click(self, x: float, y: float) -> None:
        """Click at a position in pixels of the window, as a user does."""
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        time.sleep(0.3)  # plotly updates the hovered point with a delay
        self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        image = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise ConnectionError("the browser has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.messages.append(f"exception: {thrown}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            texts = [str(arg.get("value", arg.get("description"))) for arg in params["args"]]
            self.messages.append(f"{params['type']}: {' '.join(texts)}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """Yield a tab of a new browser with a profile of its own, and stop the browser at the end."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def place() -> None:  # in the child: make the pipes descriptors 3 and 4
        read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
        high = [os.dup2(read, 100), os.dup2(write, 101)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=place,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        page = Page(to_browser[1], from_browser[0])
        page.start()
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
