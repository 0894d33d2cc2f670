"""The page, in Chromium: a chat by keyboard, colours and numbers of pieces, settings, and no request to elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytestmark = pytest.mark.browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window. A machine without one fails here, and is told what to install."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.fail("expected Chromium on the path, found none: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail("expected Playwright, found none: pip install playwright")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


class Open:
    """The page of one server, with what went wrong in it and what it asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(60_000)
        self.troubles: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address + "/")
        self.address = address

    def ready(self) -> Any:
        """The page, once it knows the experts."""
        self.page.locator("#legend li").first.wait_for()
        return self.page

    def set(self, **values: Any) -> None:
        """Fill in settings by their ids."""
        self.page.get_by_role("button", name="Settings").click()
        for name, value in values.items():
            self.page.locator("#" + name.replace("_", "-")).fill(str(value))
        self.page.get_by_role("button", name="Settings").click()


@pytest.fixture
def opened(
    browser: Any, serve: Callable[..., Any], on_socket: Callable[[Any], str], slow_babblers: Callable[..., Any]
) -> Iterator[Callable[..., Open]]:
    """A function that opens the page of a new server."""
    made: list[Open] = []

    def open_page(*, delay_s: float = 0.0, settings: Any = None, **options: Any) -> Open:
        served = serve(partial(slow_babblers, delay_s=delay_s), **(settings or {}))
        made.append(Open(browser, on_socket(served), **options))
        return made[-1]

    yield open_page
    for one in made:
        one.page.close()


def test_a_chat_by_keyboard(opened: Callable[..., Open]) -> None:
    """Type, Enter, an answer in coloured pieces; the arrow keys go through them and tell who carried each."""
    site = opened()
    page = site.ready()
    assert page.evaluate("document.activeElement.id") == "message"
    site.set(max_tokens=20, seed=3)
    page.locator("#message").focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()
    words = page.locator(".experts .words")
    pieces = page.locator(".experts .words .piece")
    assert words.inner_text() == "".join(pieces.all_inner_texts()) != ""
    assert words.get_attribute("aria-busy") == "false"
    assert page.get_by_role("status").inner_text() == "The answer was cut at the longest length."
    assert "carried by" in page.locator(".facts").inner_text() and "seed 3" in page.locator(".facts").inner_text()

    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.className").startswith("piece")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.at") == 1
    tip = page.get_by_role("tooltip")
    for text in ("left", "right", "carried", "weight", "probability", "What could have come", "bits per byte"):
        assert text in tip.inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.at") == pieces.count() - 1
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    pieces.nth(2).hover()
    assert tip.is_visible()

    page.locator("#message").fill("And now?")
    page.keyboard.press("Enter")
    page.locator(".facts").nth(1).wait_for()
    assert page.get_by_role("listitem").filter(has_text="And now?").count() == 1
    assert site.troubles == [] and all(url.startswith((site.address, "data:")) for url in site.asked)


def test_weights_and_strategy_of_the_settings_count(opened: Callable[..., Open]) -> None:
    """With weight 0 for one expert all pieces are the other's; a strategy that does not exist is told."""
    site = opened()
    page = site.ready()
    site.set(max_tokens=10, weight_0=0, strategy="linear(w=static)")
    page.locator("#message").fill("Hello")
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()
    assert page.locator(".experts .piece.e1").count() == page.locator(".experts .piece").count() > 0
    assert "right 100 %, left 0.0 %" in page.locator(".facts").inner_text()
    site.set(strategy="linea")
    page.locator("#message").fill("Hello")
    page.keyboard.press("Enter")
    assert "did you mean 'linear'" in page.get_by_role("alert").inner_text()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Weights and strategy of the ensemble").click()
    assert page.locator("#weight-0").input_value() == "0.67" and page.locator("#strategy").input_value() == ""


def test_an_answer_can_be_stopped(opened: Callable[..., Open]) -> None:
    """Escape and the button stop it; what came stays, and the next message is answered."""
    site = opened(delay_s=0.02)
    page = site.ready()
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Stop").click()):
        page.get_by_role("button", name="New chat").click()
        page.locator("#message").fill("Hello")
        page.keyboard.press("Enter")
        page.locator(".experts .piece").first.wait_for()
        stop()
        page.locator(".facts").wait_for()
        assert page.get_by_role("status").inner_text() == "The answer was stopped."
        assert page.get_by_role("button", name="Send").is_enabled()


def test_a_server_with_a_key_asks_for_it(opened: Callable[..., Open]) -> None:
    """Without the key nothing is told; with it the page begins to work."""
    site = opened(settings={"keys": ("secret",)})
    page = site.page
    page.locator("#key").wait_for()
    page.locator("#key").fill("secret")
    page.locator("#key").blur()
    site.ready()
    site.set(max_tokens=3)
    page.locator("#message").fill("Hello")
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()


def test_everything_has_a_name(opened: Callable[..., Open]) -> None:
    """Each control has a label, there is one main part and one heading; small screens need no sideways scrolling."""
    site = opened(viewport={"width": 360, "height": 640})
    page = site.ready()
    page.get_by_role("button", name="Settings").click()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, button, output")]
            .filter((node) => !(node.labels?.length || node.textContent.trim() || node.ariaLabel))
            .map((node) => node.id)"""
    )
    assert nameless == []
    assert page.get_by_role("main").count() == 1 and page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("slider", name="Weight of left").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#message").fill("x" * 200 + " " + "y" * 200)
    page.keyboard.press("Enter")
    page.locator(".facts, .error").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
