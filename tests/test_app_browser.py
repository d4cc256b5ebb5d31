"""The app in a real browser: Debian's chromium through playwright. One page per test, one server for all."""

import os
import re
from pathlib import Path

import pytest
from app_site import start

CHROMIUM = os.environ.get("LCS_CHROMIUM", "/usr/bin/chromium")
REQUIRED = bool(os.environ.get("LCS_REQUIRE_BROWSER") or os.environ.get("CI"))
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
WAIT = 120_000  # ms; a loaded machine is slow


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        reason = f"{CHROMIUM} is not there; `make test` installs it as root, or `apt-get install chromium`"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A page of its own, which remembers what went wrong and whom it asked."""

    def __init__(self, browser, query: str = "", **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.errors, self.asked = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{start()}/{query}")
        self.page.wait_for_selector("#length-board .board, #length-board .colors", state="attached")
        self.page.wait_for_function("document.querySelectorAll('#length-board .asked').length > 0 || "
                                    "document.querySelector('#length-board .swatch.on')")  # fmt: skip

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def click_board(self, board: str, x: float, y: float) -> None:
        box = self.page.locator(f"{board} .board").bounding_box()
        self.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def marks(self, board: str, count: int) -> None:
        """Waits until the board shows `count` locations."""
        self.page.wait_for_function(f"document.querySelectorAll('{board} .asked').length === {count}")


@pytest.fixture
def visit(browser):
    opened = []

    def open_page(query: str = "", **options) -> Visit:
        opened.append(Visit(browser, query, **options))
        return opened[-1]

    yield open_page
    for one in opened:
        one.context.close()


def fast_link(**values) -> str:
    """A link whose sampling takes a moment."""
    query = {"tab": "length", "experiment": "grid-all", "objects": 3, "conditions": "0.65,0.65;0.25,0.65", "seed": 1,
             "steps": 2, "solver": "dpmpp_2m", "samples": 2} | values  # fmt: skip
    return "?" + "&".join(f"{name}={value}" for name, value in query.items())


def test_click_locations_sample_and_see_the_count(visit):
    one = visit(fast_link())
    one.marks("#length-board", 2)
    one.click_board("#length-board", 0.1, 0.1)
    one.marks("#length-board", 3)
    one.click_board("#length-board", 0.11, 0.11)  # the same cell: removed again
    one.marks("#length-board", 2)
    one.click_board("#length-board", 0.9, 0.9)
    one.marks("#length-board", 3)
    one.page.click("#length-go")
    one.page.wait_for_selector("#length-samples .card.complete, #length-samples .card.failed")
    captions = one.page.locator("#length-samples figcaption").all_inner_texts()
    assert len(captions) == 2
    assert all(re.fullmatch(r"asked 3, drawn \d+, in place \d+", text) for text in captions)
    assert one.page.locator("#length-samples .card").first.locator("circle.asked").count() == 3
    assert "have exactly what was asked for" in one.page.locator("#length-status").inner_text()
    with one.page.expect_download() as download:
        one.page.get_by_text("Picture (PNG)").locator("visible=true").click()
    assert Path(download.value.path()).read_bytes()[:4] == b"\x89PNG"
    assert one.errors == []
    assert [u for u in one.asked if not u.startswith((start(), "data:", "blob:"))] == []  # works offline


def test_every_k_in_one_click_and_layers_that_hide(visit):
    one = visit(fast_link())
    one.page.click("#length-gallery")
    one.page.wait_for_selector("#length-samples .cards.n13 .card.failed, #length-samples .cards.n13 .card.complete")
    assert one.page.locator("#length-samples .card").count() == 13
    assert one.page.locator("#length-samples circle.asked").first.is_visible()
    one.page.get_by_label("what was asked").uncheck()
    one.page.wait_for_selector("#length-samples circle.asked", state="hidden")


def test_slider_moves_through_the_noise_levels(visit):
    one = visit("?tab=locality&model=grid-all-m3&other=none&conditions=0.65,0.65;0.25,0.65&x=0.3&y=0.6&go=1")
    one.page.wait_for_selector("#locality-maps .panel .frame.on")
    frame = one.page.locator("#locality-maps .frame.on")
    before = frame.get_attribute("data-i")
    field = one.page.locator("#locality-level input[type=number]")
    field.fill("9")
    field.press("Enter")
    one.page.wait_for_selector("#locality-maps .frame.on[data-i='8']")
    assert before != "8"
    assert frame.count() == 1
    one.click_board("#locality-board", 0.7, 0.2)  # sets the pixel, not a location
    one.marks("#locality-board", 2)
    assert one.errors == []


def test_a_link_restores_the_state(visit):
    one = visit(fast_link(seed=7, conditions="0.1,0.2;0.3,0.4;0.5,0.6"))
    one.marks("#length-board", 3)
    one.page.click("#length-link")
    shown = one.page.locator("#length-link-text input, #length-link-text textarea")
    shown.wait_for()
    link = shown.input_value()
    assert "seed=7" in link
    assert "experiment=grid-all" in link
    two = visit(link.removeprefix(start()).lstrip("/"))
    two.marks("#length-board", 3)
    two.page.wait_for_selector(
        "#length-samples .card.complete, #length-samples .card.failed"
    )  # go=1 presses the button
    assert two.page.locator("#length-samples figcaption").count() == 2


def test_colours_have_a_board_of_their_own(visit):
    one = visit(fast_link(experiment="color", conditions="red;blue"))
    one.page.wait_for_selector("#length-board .swatch.on")
    one.page.locator("#length-board [data-color=green]:not(.less)").click()
    one.page.wait_for_function("document.querySelectorAll('#length-board .swatch.on').length === 3")
    one.page.locator("#length-board .less[data-color=red]").click()
    one.page.wait_for_function("document.querySelectorAll('#length-board .swatch.on').length === 2")


def test_broken_links_open_the_page(visit):
    one = visit("?tab=<script>&seed=-5&conditions=../../etc/passwd&experiment=%00&x=nan")
    one.marks("#length-board", 6)
    assert one.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_tabs_in_both_themes(visit, scheme):
    one = visit(fast_link(), color_scheme=scheme)
    background = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3]))
    assert brightness > 600 if scheme == "light" else brightness < 200
    for name, sign in (
        ("Locality maps", "#locality-go"),
        ("Local versus standard", "#compare-go"),
        ("Paper and results", "#results-claims .claims"),
        ("Length generalization", "#length-go"),
    ):
        one.tab(name)
        one.page.locator(sign).first.wait_for(state="visible")
    assert one.errors == []


def test_phone(visit):
    one = visit(fast_link(go=1), viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    one.page.wait_for_selector("#length-samples .card.complete, #length-samples .card.failed")
    for name in ("Locality maps", "Local versus standard", "SDXL composition", "Paper and results", "Length general"):
        one.tab(name)
        one.page.wait_for_timeout(300)
        width, visible = one.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert width <= min(visible, 390), f"{name} scrolls sideways"
    assert one.errors == []
