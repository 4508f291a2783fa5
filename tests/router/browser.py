"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

_ANSWER_S = 20.0
_LINE_LIMIT = 64 << 20  # a screenshot is one message
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class Page:
    """One page of a browser, and everything it complained of or asked for."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: dict[str, str] = {}
        self._reading = asyncio.create_task(self._read())
        self.urls: list[str] = []
        """Of every request that left the page."""
        self.complaints: list[Any] = []
        """Errors and warnings in the console, and exceptions that nothing caught."""

    async def attach(self) -> None:
        found = await self.call("Target.getTargets")
        target = next(one for one in found["targetInfos"] if one["type"] == "page")
        named = {"targetId": target["targetId"], "flatten": True}
        session = await self.call("Target.attachToTarget", **named)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, **self._session}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(answer, _ANSWER_S)

    async def open(self, url: str) -> None:
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.navigate", url=url)

    async def prefer(self, scheme: str) -> None:
        """`scheme`: light or dark, as the user's system says."""
        wish = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[wish])

    async def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait for what the page is to show."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not await self.run(script):  # noqa: ASYNC110  the page has no event for it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {script}\n{text}") from None

    async def press(self, key: str) -> None:
        """As a person at the keyboard."""
        code = {"Enter": 13, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        event = {"key": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def screenshot(self, file: Path) -> None:
        """Of the whole page."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._session = {}
        with contextlib.suppress(TimeoutError):
            await self.call("Browser.close")
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._process.stdout.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._take_answer(message)
                else:
                    self._take_event(message["method"], message["params"])

    def _take_answer(self, message: Any) -> None:
        answer = self._answers.pop(message["id"])
        if answer.done():
            return  # nobody waits for it any more
        if "error" in message:
            answer.set_exception(AssertionError(message["error"]))
        else:
            answer.set_result(message["result"])

    def _take_event(self, method: str, event: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(event["request"]["url"])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(event["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.complaints.append(event)


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """`folder`: where its profile goes. Skips the test on a machine without Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    profile = f"--user-data-dir={folder / 'profile'}"
    process = await asyncio.create_subprocess_exec(  # its pipe is 3 and 4; what it says is lost
        *("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh"),
        *(program, *_FLAGS, profile, "about:blank"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT,
    )
    page = Page(process)
    try:
        await page.attach()
        yield page
        await page.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
