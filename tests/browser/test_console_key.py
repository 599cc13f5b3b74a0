"""Where a server has API keys, the console asks for one."""

from __future__ import annotations

from shared.bus.memory_bus import MemoryBus
from tests.browser.chromium import FLAGS, chromium_path
from tests.support.gateway.gateway_server import gateway_stack


async def test_an_operators_key_opens_it(memory_bus: MemoryBus) -> None:
    path = chromium_path()
    from playwright.async_api import async_playwright

    async with gateway_stack(memory_bus, api_keys=("boss",)) as stack, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        page = await browser.new_page()
        await page.goto(f"{stack.url}/console")
        key = page.get_by_label("API key")
        await key.fill("wrong")
        await key.press("Enter")
        await page.get_by_text("a valid API key is needed").wait_for()
        await key.fill("boss")
        await key.press("Enter")
        await page.locator('[data-instance="engine-1"][data-phase="ready"]').wait_for()
        await page.reload()
        await page.locator('[data-instance="engine-1"]').wait_for()
        await browser.close()
