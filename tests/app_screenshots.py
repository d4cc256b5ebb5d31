"""Takes the README's pictures of the app: PYTHONPATH=. python tests/app_screenshots.py http://localhost:7860 docs

Not a test. The app has to be running; the pictures show whatever checkpoints it offers.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from test_app_browser import CHROMIUM, FLAGS, WAIT

LENGTH = "?tab=length&experiment=grid-all&objects=3&samples=4&steps=24&seed=1&go=1"
LOCALITY = (
    "?tab=locality&model=grid-all-m3&other=grid-single-local-m3&x=0.65&y=0.65&seed=1&go=1"
    "&conditions=0.65,0.65;0.65,0.25;0.25,0.65;0.35,0.35"
)
DONE = {
    "length": "#length-samples .card.complete, #length-samples .card.failed",
    "locality": "#locality-maps .frame.on",
}


def take(browser, url: str, path: Path, scheme: str, width: int, done: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 820}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(url)
    page.wait_for_selector(done)
    page.wait_for_timeout(1500)
    page.screenshot(path=path)
    context.close()
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    address, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        take(chromium, f"{address}/{LENGTH}", folder / "app-length.png", "light", 1280, DONE["length"])
        take(chromium, f"{address}/{LOCALITY}", folder / "app-locality.png", "dark", 1280, DONE["locality"])
        chromium.close()
