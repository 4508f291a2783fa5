"""The operators' page in a real browser, before a router that serves."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.v1 import router_pb2
from cli.main import main
from router.__main__ import operator_port
from tests.router.answers import PROMPT, Answer, ask_for
from tests.router.browser import Page, browser
from tests.router.deployment import DECODE, MIXED, PREFILL, Deployment, deployment

NUM_SERVED, NUM_RUNNING = 24, 9
# The least contrast of any text with its background, by WCAG 2.
CONTRAST = """(() => {
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], .05);
  const under = e => { const c = getComputedStyle(e).backgroundColor;
    return c === "rgba(0, 0, 0, 0)" ? under(e.parentElement) : c; };
  const over = e => getComputedStyle(e)[e instanceof SVGElement ? "fill" : "color"];
  const ratio = e => { const both = [under(e), over(e)].map(light);
    return Math.max(...both) / Math.min(...both); };
  const hasText = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  return Math.min(...[...document.querySelectorAll("body *")]
    .filter(e => !["SCRIPT", "title"].includes(e.tagName) && hasText(e)).map(ratio));
})()"""
# Names of workers stay inside the drawing, and nothing of the page is wider than the window.
OVERFLOWS = """[...document.querySelectorAll("svg text")].filter(text => {
    const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
    return box.left < svg.left - 1 || box.right > svg.right + 1;
  }).length + Math.max(0, document.documentElement.scrollWidth - innerWidth)"""
FOCUSED = "document.activeElement.dataset.id"
TEXT = "document.body.innerText"


@dataclass
class Watched:
    """A router that serves, and its page."""

    d: Deployment
    page: Page
    url: str
    go_on: Callable[[], None]
    """Ends what runs."""


def asked(d: Deployment, number: int, name: str) -> asyncio.Task[Answer]:
    prompt = f"{PROMPT * (1 + number % 7)} {number % 5}"
    request = ask_for(prompt, 6 + 5 * (number % 6), request_id=f"{name}-{number}")
    request.tenant = ("blue", "red", "")[number % 3]
    return asyncio.create_task(d.client.ask(request))


@contextlib.asynccontextmanager
async def busy() -> AsyncIterator[tuple[Deployment, Callable[[], None]]]:
    """Pools of all roles. Some requests have ended, one aborted and one after a failure; others
    run."""
    async with deployment(
        0, 0, placement={"local_prefill": "auto"}, clients={"resume_window_s": 30.0}
    ) as d:
        for number in range(2):
            await d.add_worker(f"prefill-{number}", PREFILL)
            await d.add_worker(f"decode-long-{number}", DECODE, pool="decode-long", num_blocks=400)
        await d.add_worker("decode-short-0", DECODE, pool="decode-short", num_blocks=60)
        await d.add_worker("both-0", MIXED, pool="both")
        await d.connected(6)
        for worker in d.all_workers:
            worker.step_s = 0.004
            worker.faults.fail_prefills = 1
        await asyncio.gather(*(asked(d, number, "served") for number in range(NUM_SERVED)))
        for worker in d.all_workers:
            worker.may_decode.clear()
        running = [asked(d, number, "running") for number in range(NUM_RUNNING)]
        await d.until(lambda: sum(len(w.runs) for w in d.all_workers) == NUM_RUNNING)
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="running-8"))

        def go_on() -> None:
            for worker in d.all_workers:
                worker.may_decode.set()

        yield d, go_on
        go_on()
        await asyncio.gather(*running)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with browser(tmp_path) as page, busy() as (d, go_on):
        server = operator_port(changed(RouterConfig(), metrics={"port": 0}), d.servers[0].units)
        assert server is not None
        await server.start()
        url = f"http://127.0.0.1:{server.port}/"
        await page.open(url)
        await page.until("document.querySelectorAll('.row').length > 20")
        yield Watched(d, page, url, go_on)
        await server.stop()
        await page.until(f"{TEXT}.includes('the router does not answer: asking again')")
        assert page.complaints == []
        assert all(asked.startswith((url, "data:")) for asked in page.urls), page.urls


async def test_the_page_shows_workers_flows_latencies_and_requests_as_they_end(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = watched.page
    lines = await page.run(
        "[...document.querySelectorAll('#workers tr')].map("
        "row => [...row.children].map(cell => cell.innerText.trim()))"
    )
    for worker in watched.d.all_workers:
        (line,) = [each for each in lines if each[1] == worker.worker_id]
        pool, _, _, state, kv, running, queued, _ = line
        assert (pool, state, queued.isdecimal()) == (worker.pool, "live", True)
        assert re.fullmatch(r"\d+%", kv)
        assert running == f"{len(worker.runs)} of 16"
    assert await page.run("[...document.querySelectorAll('.bar i')].some(b => b.clientWidth > 3)")
    flows = await page.run("document.querySelector('#flows').textContent")
    pairs = watched.d.router.parts.recent.bytes_per_s()
    assert pairs
    assert all(name in flows for pair in pairs for name in pair)
    for name in ("ttft", "itl"):
        counts = (
            f"[...document.querySelectorAll('#{name} div')].map(d => +d.title.split(' ').pop())"
        )
        assert await page.run(f"{counts}.reduce((sum, n) => sum + n)") >= NUM_SERVED - 1
    assert f"{NUM_RUNNING - 1} requests run, 0 wait" in await page.run(TEXT)
    assert "aborted" in await page.run("document.querySelector('.lost').textContent")
    stages = "[...document.querySelector('[data-id=served-11] .stack').children]"
    titles = await page.run(f"{stages}.map(part => part.title)")
    assert [title.rpartition(":")[0] for title in titles] == [
        "waits in line",
        "reserve",
        "waits at the prefill worker",
        "prefill",
        "handoff, second token",
        "decode",
        "before its end",
    ]
    filled = f"{stages}.reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)"
    cell = "document.querySelector('[data-id=served-11]').children[7].clientWidth"
    assert 0.5 < await page.run(f"{filled} / {cell}") <= 1.0  # it is one of the longest
    shown = "document.querySelector('#findings').innerText"
    assert "nothing" in await page.run(f"diagnosis([9, [], []]), {shown}")
    finding = "[9, [], [['bursts', 'prompts wait', 'keep room']]]"
    assert await page.run(f"diagnosis({finding}), {shown}") == "bursts: prompts wait\nkeep room"
    await page.until("document.querySelector('#figures').innerText.includes('first token, p95')")
    address = watched.url.removeprefix("http://").strip("/")
    assert await asyncio.to_thread(main, ["diagnose", "--metrics", address]) == 0
    assert await asyncio.to_thread(main, ["diagnose", "--metrics", "127.0.0.1:1"]) == 3
    assert re.search(r"Last \d+ s(.|\n)*found cached +\d+%", capsys.readouterr().out)
    for scheme, background in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(18, 22, 28)")):
        await page.prefer(scheme)
        for width in (1280, 600):
            await page.resize(width, 1000)
            assert await page.run(OVERFLOWS) == 0
            await page.screenshot(tmp_path / f"{scheme}-{width}.png")
        assert await page.run("getComputedStyle(document.body).backgroundColor") == background
        assert await page.run(CONTRAST) > 4.5
    watched.go_on()
    await page.until(f"document.querySelectorAll('[data-id^=running]').length === {NUM_RUNNING}")
    await page.until(f"{TEXT}.includes('0 requests run, 0 wait')")


async def test_the_keyboard_reaches_every_request_and_what_says_why_it_went_there(
    watched: Watched, tmp_path: Path
) -> None:
    page = watched.page
    await page.resize(1280, 1000)
    rows = await page.run("[...document.querySelectorAll('.row')].map(row => row.dataset.id)")
    await page.press("Tab")
    assert await page.run(FOCUSED) == rows[0]
    assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for _ in range(2):
        await page.press("ArrowDown")
    assert await page.run(FOCUSED) == rows[2]
    await page.press("Tab")
    assert await page.run(FOCUSED) == rows[3]
    await page.press("ArrowUp")
    await page.press("Enter")
    why = await page.run("document.querySelector('.why').textContent")
    assert "prefill on" in why
    assert "attempt" in why
    await page.screenshot(tmp_path / "why.png")
    await page.press("p")
    await page.until(f"{TEXT}.includes('paused')")
    watched.go_on()
    await page.press("p")
    await page.until(f"{TEXT}.includes('0 requests run')")
    assert await page.run(FOCUSED) == rows[2]  # although news came
    assert await page.run("document.querySelector('.why').textContent") == why
