"""The live page in a real browser before real processes: a killed node turns red, a transfer's progress moves, everybody can
read it. Skipped where no Chromium is installed (CI installs one)."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from pd_golden import toy_prompt
from toy_cluster import ToyCluster, toy_cluster
from waiting import TIMES_ARE_TOLD

playwright = pytest.importorskip("playwright.async_api")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
LIMIT_MS = 30_000
RED_WITHIN_MS = LIMIT_MS if TIMES_ARE_TOLD else 3_000
LEAST_CONTRAST = 4.5
"""WCAG 2.2, level AA, for text."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToyCluster]:
    """`p0` sends a parcel every 150 ms, so that a transfer of a long prompt takes seconds."""
    folder = tmp_path_factory.mktemp("browser")
    async with toy_cluster(folder, ROLES, faults={"p0": "delay_sends_ms=150"}) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Any, cluster: ToyCluster) -> AsyncIterator[Any]:
    """Fails a test whose page reports an error or asks anybody but the router for anything."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    foreign: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(cluster.url) else foreign.append(request.url))
    await page.goto(f"{cluster.url}/ui")
    await page.wait_for_selector("#connection[data-condition=good]", timeout=LIMIT_MS)
    yield page
    await page.close()
    assert complaints == []
    assert foreign == []


def row(node: str, condition: str) -> str:
    return f'tr[data-node="{node}"][data-condition="{condition}"]'


async def test_every_node_is_shown_with_role_load_and_blocks(page: Any) -> None:
    for node, role in ROLES.items():
        shown = page.locator(row(node, "good"))
        await shown.wait_for(timeout=LIMIT_MS)
        text = await shown.inner_text()
        assert role in text
        assert "ready" in text
        assert "running" in text
        assert "in use" in text
    assert await page.locator("#readiness").inner_text() == "ready"
    assert await page.title() == "toy · Decant"


async def test_a_transfer_s_progress_moves_and_ends(page: Any, cluster: ToyCluster) -> None:
    answer = asyncio.ensure_future(cluster.complete(toy_prompt(160, 7)))
    bar = page.locator("#transfer-rows [role=progressbar]").first
    seen: list[int] = []
    while not answer.done():
        if await bar.count():
            value = await bar.get_attribute("aria-valuenow")
            if value is not None and (not seen or int(value) != seen[-1]):
                seen.append(int(value))
        await asyncio.sleep(0.05)
    assert len(seen) >= 3, seen
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= 100
    assert (await answer)["usage"]["completion_tokens"] == 4
    await page.locator("#transfer-rows td.nothing").wait_for(timeout=LIMIT_MS)
    lanes = page.locator(f"{row('d0', 'good')} .lane, {row('d1', 'good')} .lane")
    await lanes.filter(has_text="p0: tcp").first.wait_for(timeout=LIMIT_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
async def test_everybody_can_read_it(page: Any, width: int, scheme: str) -> None:
    await page.set_viewport_size({"width": width, "height": 800})
    await page.emulate_media(color_scheme=scheme)
    await page.wait_for_selector("tr[data-node]", timeout=LIMIT_MS)
    assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert await page.evaluate(STRUCTURE) == []
    texts = await page.evaluate(CONTRAST)
    assert len(texts) > 40
    assert [found for found in texts if found["ratio"] < LEAST_CONTRAST] == []


async def test_a_keyboard_reaches_everything_that_can_be_used(page: Any) -> None:
    reached = []
    for _ in range(12):
        await page.keyboard.press("Tab")
        focused = await page.evaluate(
            "(() => { const at = document.activeElement; const box = at.getBoundingClientRect();"
            " return [at.tagName, at.textContent, box.top >= 0 && box.left >= 0] })()"
        )
        reached.append(focused)
    links = await page.locator("a:visible").count()
    named = {text for tag, text, _ in reached if tag == "A"}
    assert "Skip to the nodes" in named
    assert len(named) == links
    assert all(visible for tag, _, visible in reached if tag == "A"), "what has the focus is seen"


async def test_f25_a_killed_node_turns_red_within_3_s_and_is_announced(page: Any, cluster: ToyCluster) -> None:
    await page.locator(row("d1", "good")).wait_for(timeout=LIMIT_MS)
    cluster.nodes["d1"].process.kill()
    shown = page.locator(row("d1", "bad"))
    await shown.wait_for(timeout=RED_WITHIN_MS)
    assert cluster.nodes["d1"].process.wait(5) == -9
    red, green, blue = await page.evaluate(
        "(row) => getComputedStyle(document.querySelector(row)).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)",
        row("d1", "bad"),
    )
    assert red > green + 15
    assert red > blue + 15
    assert "lost" in await shown.inner_text()
    announced = page.locator("#announcement[aria-live=polite]")
    assert "d1 is" in (await announced.text_content() or "")
    assert await page.locator(row("d0", "good")).count() == 1


async def test_a_router_that_is_gone_is_said_to_be_gone(browser: Any, cluster: ToyCluster) -> None:
    """The last test: it ends the router."""
    page = await browser.new_page()
    await page.goto(f"{cluster.url}/ui")
    await page.wait_for_selector("#connection[data-condition=good]", timeout=LIMIT_MS)
    cluster.router.kill()
    await page.wait_for_selector("#connection[data-condition=bad]", timeout=LIMIT_MS)
    assert "not reached" in await page.locator("#connection").inner_text()
    await page.close()


STRUCTURE = """(() => {
  const problems = [];
  const visible = (at) => at.getClientRects().length > 0;
  if (!document.documentElement.lang) problems.push("no language");
  if (!document.title) problems.push("no title");
  if (document.querySelectorAll("h1").length !== 1) problems.push("not one h1");
  if (document.querySelectorAll("main").length !== 1) problems.push("not one main");
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const now = Number(heading.tagName[1]);
    if (now > level + 1) problems.push(`heading skips a level: ${heading.textContent}`);
    level = now;
  }
  for (const image of document.querySelectorAll("img")) if (!image.hasAttribute("alt")) problems.push("image without alt");
  for (const drawn of document.querySelectorAll("[role=img], [role=progressbar]"))
    if (visible(drawn) && !drawn.getAttribute("aria-label")) problems.push(`no label: ${drawn.outerHTML.slice(0, 80)}`);
  for (const table of document.querySelectorAll("table")) {
    if (!table.caption?.textContent.trim()) problems.push("table without caption");
    for (const head of table.querySelectorAll("th")) if (!head.scope) problems.push(`th without scope: ${head.textContent}`);
    for (const row of table.querySelectorAll("tbody tr[data-node]")) {
      if (!row.querySelector("th[scope=row]")) problems.push("row without header");
      if (getComputedStyle(row).display !== "table-row" && row.getAttribute("role") !== "row") problems.push("row lost its role");
    }
  }
  for (const link of document.querySelectorAll("a, button")) if (!link.textContent.trim()) problems.push("link without a name");
  const ids = [...document.querySelectorAll("[id]")].map((at) => at.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push(`id twice: ${id}`);
  for (const at of document.querySelectorAll("[aria-labelledby]"))
    if (!document.getElementById(at.getAttribute("aria-labelledby"))) problems.push(`labelled by nothing: ${at.id}`);
  if (!document.querySelector("[aria-live=polite]")) problems.push("nothing is announced");
  return problems;
})()"""
"""What axe would say first."""

CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const linear = (s) => (s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = (at) => (at ? [...grounds(at.parentElement), getComputedStyle(at).backgroundColor] : ["white"]);
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const at = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || at.closest(".unseen, noscript, script, .skip, caption, thead, svg")) continue;
    if (!at.getClientRects().length) continue;
    const under = grounds(at);
    const [text, ground] = [light(paint([...under, getComputedStyle(at).color])), light(paint(under))];
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    found.push({ text: walk.currentNode.textContent.trim().slice(0, 40), ratio });
  }
  return found;
})()"""
"""The contrast of every visible text with what lies under it."""
