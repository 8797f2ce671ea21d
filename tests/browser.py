"""Pages as they are written, and as headless Chromium shows them.

Chromium is spoken to through its debugging pipe: no package is needed, only the
program.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
"""Where it is installed; None where it is not."""


class Page(HTMLParser):
    """A page as it is written: its nesting is checked; pictures, text and all that
    would be fetched are collected.
    """

    VOID = frozenset({"meta", "img", "input", "line", "circle", "br", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[bytes] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and value:
                if value.startswith("data:image/jpeg;base64,"):
                    self.images.append(
                        base64.b64decode(value.partition(",")[2], validate=True)
                    )
                else:
                    self.fetched.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A closed tag, such as <path/>: nothing to close."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


class Browser:
    """One page of a headless Chromium.

    Args:
        scratch: a folder for its profile.
    """

    def __init__(self, scratch: Path) -> None:
        assert CHROMIUM is not None
        own_end, self._writer = os.pipe()
        self._reader, other_end = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{own_end} 4>&{other_end}'
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        )
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                shell,
                "bash",
                CHROMIUM,
                *options,
                f"--user-data-dir={scratch}",
                "about:blank",
            ],
            pass_fds=(own_end, other_end),
            stderr=subprocess.DEVNULL,
        )
        os.close(own_end)
        os.close(other_end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Messages of the console, and thrown errors."""

    def __enter__(self) -> "Browser":
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._writer)
        self._process.kill()
        self._process.wait()
        os.close(self._reader)

    def send(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._writer, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._reader, 2**20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") in (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
        ):
            self.complaints.append(json.dumps(message["params"]))
        return message

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Show a file in a window of this width, and wait until it is loaded."""
        metrics = {
            "width": width,
            "height": 900,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints.clear()
        self.send("Page.navigate", url=page.absolute().as_uri())
        self.wait_for(
            "document.readyState === 'complete' && location.protocol === 'file:'"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.send(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"{expression} was not true within {seconds} s"
            )
            time.sleep(0.05)


def wide_elements(browser: Browser) -> Sequence[str]:
    """Elements that make a page scroll sideways."""
    return browser.evaluate(
        "document.documentElement.scrollWidth <= innerWidth ? [] : "
        "[...document.querySelectorAll('body *')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth).map(e => "
        "e.outerHTML.slice(0, 120))"
    )
