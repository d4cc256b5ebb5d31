"""The page: tabs, links that restore a state, and how the server is set up.

Nothing heavy happens here: models load when somebody asks for a picture. The page needs no other server, sends no
analytics, and reads no file that a visitor names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl

import gradio as gr
import torch
from starlette.middleware import Middleware

from lcs.app import checks, compare, length, locality, results, sdxl
from lcs.app.inputs import QUICK, Linked, Site, press
from lcs.app.models import Models
from lcs.app.style import CSS, theme
from lcs.errors import LcsError
from lcs.weights import WEIGHTS

ROOT = Path(__file__).parents[2]
QUEUE_SIZE = 16  # waiting requests; a sample takes a second or two, so nobody waits much longer than half a minute
BODY_BYTES = 200_000  # of a request; ours are below 2 kB
SESSIONS = 200  # whose last values are kept in memory
CACHE_SECONDS = 3600  # how long files for download are kept
_TABS = (
    (length, "Length generalization"),
    (locality, "Locality maps"),
    (compare, "Local versus standard"),
    (sdxl, "SDXL composition"),
    (results, "Paper and results"),
)


def make_site(root: Path | None = None, scale: str | None = None, folder: Path | None = None) -> Site:
    """From arguments, or from LCS_WEIGHTS, LCS_SCALE and LCS_RESULTS, or what is bundled."""
    weights = Path(root or os.environ.get("LCS_WEIGHTS") or WEIGHTS)
    stored = Path(folder or os.environ.get("LCS_RESULTS") or ROOT / "artifact" / "results")
    models = Models(weights, scale or os.environ.get("LCS_SCALE") or "mini")
    return Site(models, stored, weights / "mini-sdxl")


def build(site: Site | None = None, threads: int = 1) -> gr.Blocks:
    """The app. One thread computes by default: on a busy machine two OpenMP threads wait for each other far longer
    than the second one saves, and the web server needs the other core."""
    site = site or make_site()
    torch.set_num_threads(threads)
    with gr.Blocks(
        title="Local conditional scores", analytics_enabled=False, delete_cache=(600, CACHE_SECONDS)
    ) as demo:
        gr.HTML(
            '<div class="hero"><h1>Local conditional scores</h1><p>When does a diffusion model count past its '
            'training? A reproduction of <a href="https://arxiv.org/abs/2509.16447" target="_blank" rel="noopener">'
            "Bradley (2025)</a>.</p></div>"
        )
        linked = []
        with gr.Tabs(elem_id="tabs", overflow_behavior="wrap") as tabs:
            for module, title in _TABS:
                with gr.Tab(title, id=module.TAB, elem_id=f"tab-{module.TAB}", render_children=True) as tab:
                    linked.append(module.build(site))
                if module is results:  # its figures load when somebody looks
                    tab.select(None, js=press(f"{results.TAB}-show"), api_visibility="private")
        linked = [one for one in linked if one is not None]
        query = gr.Textbox(visible="hidden", elem_id="query")
        restored = demo.load(
            _restorer(linked), query, [tabs, *(output for one in linked for output in one.outputs)],
            js="() => window.location.search", **QUICK,
        )  # fmt: skip
        buttons = {one.tab: one.button for one in linked if one.button}
        restored.then(
            None, api_visibility="private",
            js=f"""() => {{ const q = new URLSearchParams(window.location.search), b = {buttons!r}[q.get('tab')];
              if (b && q.get('go') === '1') setTimeout(() => document.getElementById(b)?.click(), 150); }}""",
        )  # fmt: skip
        gr.Button(visible=False).click(
            lambda: [run.name for run in site.models.runs(conditional=False).values()], None, gr.JSON(visible=False),
            api_name="models", api_description="Names of the shipped checkpoints.", queue=False,
        )  # fmt: skip
    demo.queue(max_size=QUEUE_SIZE, api_open=False, default_concurrency_limit=4)
    return demo


def _restorer(linked: list[Linked]):
    """A page load: the tab that the link names gets its values, the others what is shipped."""

    def restore(query):
        try:
            asked = parse_query(query)
        except LcsError:
            asked = {}
        known = {one.tab for one in linked} | {module.TAB for module, _ in _TABS}
        tab = asked.get("tab") if asked.get("tab") in known else None
        updates = [gr.Tabs(selected=tab) if tab else gr.skip()]
        for one in linked:
            updates += one.restore(asked if one.tab == tab else {})
        return updates

    return checks.guarded(restore)


_NUMBERS = {"objects": (0, 6), "seed": (0, checks.MAX_SEED - checks.MAX_CONDITIONS), "steps": (1, checks.MAX_STEPS),
            "samples": (1, checks.MAX_SAMPLES)}  # fmt: skip
_FRACTIONS = ("x", "y")
_FLAGS = ("local",)
_WORDS = ("experiment", "other", "solver", "pair", "model")


def parse_query(query) -> dict:
    """The values of a link that are possible; anything else is dropped, so a broken link still opens the page."""
    pairs = parse_qsl(checks.text(query or "", "the link", 2000).lstrip("?"), max_num_fields=40)
    found: dict = {}
    for name, value in pairs:
        try:
            if name in _NUMBERS and re.fullmatch(r"[0-9]{1,10}", value):
                found[name] = checks.whole(int(value), name, *_NUMBERS[name])
            elif name in _FRACTIONS and re.fullmatch(r"[0-9]?\.?[0-9]{1,20}", value):
                found[name] = checks.fraction(float(value), name)
            elif name in _FLAGS and value in ("true", "false"):
                found[name] = value == "true"
            elif name == "solver":
                found[name] = checks.solver(value)
            elif name in (*_WORDS, "tab") and re.fullmatch(r"[a-z0-9-]{1,40}", value):
                found[name] = value
            elif name in ("conditions", "prompt", "concepts"):
                found[name] = checks.text(value, name)
        except LcsError:
            continue
    return found


class _TooLarge(Exception):
    """A body that grew beyond the limit."""


class LimitBody:
    """Refuses large requests before they fill the memory; the widgets never send more than a few kB."""

    def __init__(self, app, limit: int = BODY_BYTES):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limit:
            await _refuse(send)
            return
        seen, answered = 0, False

        async def counted():  # a body sent in chunks announces no length
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise _TooLarge
            return message

        async def noted(message):
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _TooLarge:
            if not answered:
                await _refuse(send)


async def _refuse(send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"detail":"the request is too large"}'})


def launch_options() -> dict:
    """Arguments of `demo.launch`, the same for `app.py`, `lcs app`, benchmarks and tests."""
    return {
        "theme": theme(), "css": CSS, "footer_links": ["api", "settings"], "run_history": False, "show_error": False,
        "max_file_size": "1kb", "state_session_capacity": SESSIONS, "ssr_mode": False, "enable_monitoring": False,
        "mcp_server": False, "share": False, "app_kwargs": {"middleware": [Middleware(LimitBody)]},
    }  # fmt: skip


def launch(demo: gr.Blocks, host: str | None = None, port: int | None = None, **options) -> None:
    """Serves until stopped: 0.0.0.0:7860 unless GRADIO_SERVER_NAME, GRADIO_SERVER_PORT or PORT say otherwise."""
    host = host or os.environ.get("GRADIO_SERVER_NAME") or "0.0.0.0"
    number = port or os.environ.get("GRADIO_SERVER_PORT") or os.environ.get("PORT") or 7860
    try:
        demo.launch(server_name=host, server_port=int(number), **launch_options() | options)
    except (OSError, ValueError) as error:
        raise LcsError(f"cannot serve on {host}:{number}: {error}") from None
