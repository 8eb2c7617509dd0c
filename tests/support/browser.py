"""A small client of headless Chromium (Debian's package ``chromium``), by its DevTools protocol over two pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page. ``messages`` are what its console said, errors included; ``requests`` the addresses it asked for."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="hecate-chromium-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # the protocol's pipes are the descriptors 3 and 4
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        command += f" --disable-background-networking --remote-debugging-pipe --user-data-dir={self._profile}"
        command += f" 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **arguments: Any) -> dict:
        """One command; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise TimeoutError(f"Chromium did not answer {method} within 60 s")

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return {}
            part = os.read(self._from, 1 << 20)
            assert part, f"Chromium ended with {self._process.poll()}"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(told["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(told["args"]))
        elif message.get("method") == "Log.entryAdded":
            self.messages.append(told["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        return message

    def open(self, page: Path) -> None:
        """Load a file and wait until it says that it is ready."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until it holds."""
        deadline = time.monotonic() + 60
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < deadline, (
                f"{expression} does not hold after 60 s: {self.messages}"
            )
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, where the focus is."""
        codes = {"Enter": 13, "End": 35, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            event = dict(type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)
            self.call("Input.dispatchKeyEvent", **event)

    def resize(self, width: int, height: int) -> None:
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)
