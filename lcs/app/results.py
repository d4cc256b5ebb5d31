"""Tab 5: what the artifact found, claim by claim, with its figures; how to cite; how to run it."""

from __future__ import annotations

import html
from pathlib import Path

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache
from gradio.utils import get_upload_folder

from lcs.app import draw
from lcs.app.checks import guarded
from lcs.app.inputs import QUICK, Linked, Site
from lcs.data.files import read_json
from lcs.errors import LcsError
from lcs.hub.cards import CITATION

TAB = "results"
MAX_FIGURE_BYTES = 4_000_000
_BADGES = {"came out": "yes", "partly": "partly", "not": "no", "not run": ""}
_WORDS = {"not": "did not come out"}
_COLUMNS = ("paper", "ours", "interval")

COMMANDS = """make artifact                       # every table and figure, from the shipped checkpoints
make test                           # tests
python -m lcs app                   # this page
python -m lcs evaluate grid-all     # K_max of one experiment
python -m lcs train grid-all --objects 3 --data data/mini
python -m lcs plan                  # what the paper's scale would cost"""

API = """from gradio_client import Client
client = Client("http://localhost:7860")
client.predict(api_name="/models")
client.predict("grid-all", 3, "0.65,0.65; 0.25,0.65", 0, 16, "dpmpp_2m", 4, api_name="/sample")"""


def load_list(path: Path) -> list[dict]:
    """A list of objects from a file of the results folder; [] if it is not there or not readable."""
    try:
        found = read_json(path) if path.is_file() else []
    except (LcsError, OSError, UnicodeDecodeError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def claims_html(folder: Path) -> str:
    claims = load_list(folder / "claims.json")
    if not claims:
        return draw.empty(
            "No results are stored here yet",
            "The artifact measures every claim of the paper on the shipped checkpoints and writes what came out. Run",
            ["python -m lcs artifact --keep artifact/results"],
        )
    rows = []
    for claim in claims:
        verdict = str(claim.get("verdict", "not run"))
        badge = f'<span class="badge {_BADGES.get(verdict, "")}">{_text(_WORDS.get(verdict, verdict))}</span>'
        rule = f'<span class="rule">{_text(claim["rule"])}</span>' if claim.get("rule") else ""
        cells = "".join(f'<td data-name="{name}">{_text(claim.get(name, ""))}</td>' for name in _COLUMNS)
        rows.append(f"<tr><td>{badge}</td><td><b>{_text(claim.get('claim', ''))}</b>{rule}</td>{cells}</tr>")
    counts = [sum(c.get("verdict") == verdict for c in claims) for verdict in ("came out", "partly", "not", "not run")]
    said = (
        f"Of {len(claims)} claims, <b>{counts[0]}</b> came out, <b>{counts[1]}</b> partly, "
        f"<b>{counts[2]}</b> did not, and {counts[3]} were not run."
    )
    head = "".join(f"<th>{name}</th>" for name in ("", "claim", "paper", "ours", "95% interval"))
    return (
        draw.note(said) + '<div class="scroll"><table class="claims"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{tables_html(folder)}"
    )


def stored_tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.md")) if folder.is_dir() else []


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a Markdown file that holds one table, as the artifact writes it."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    except (OSError, UnicodeDecodeError):
        return []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[2:]]


def table_html(rows: list[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f'<td data-name="{_text(name)}">{_text(value)}</td>' for name, value in row.items()) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def tables_html(folder: Path) -> str:
    """Every stored table, closed until somebody opens it."""
    parts = [(path.stem, table_html(read_table(path))) for path in stored_tables(folder)]
    shown = (f"<details><summary>{_text(name)}</summary>{table}</details>" for name, table in parts if table)
    return f'<div class="tables">{"".join(shown)}</div>'


def figures(folder: Path) -> list[tuple[str, str]]:
    """(file in Gradio's cache, caption) of every stored figure; a name that leaves the folder is not followed."""
    shown, root = [], folder.resolve()
    for figure in load_list(folder / "figures.json"):
        path = (root / str(figure.get("file", ""))).resolve()
        if not path.is_relative_to(root) or path.suffix != ".png" or not path.is_file():
            continue
        if path.stat().st_size <= MAX_FIGURE_BYTES:
            cached = save_bytes_to_cache(path.read_bytes(), path.name, get_upload_folder())
            caption = f"{figure.get('title', '')}. {figure.get('caption', '')}".strip(". ")
            shown.append((cached, f"{caption}  [{figure['command']}]" if figure.get("command") else caption))
    return shown


def _text(value) -> str:
    if isinstance(value, (list, tuple)):
        value = " to ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in value)
    return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value if value is not None else ""))


def build(site: Site) -> Linked:
    gr.HTML(
        '<p class="lead"><a href="https://arxiv.org/abs/2509.16447" target="_blank" rel="noopener"><em>Local '
        "Mechanisms of Compositional Generalization in Conditional Diffusion</em></a> asks why some conditional "
        "diffusion models draw more objects than they were trained on. Its answer: they do when their scores are "
        "local. This is what we found when we measured it again, at small scale.</p>"
    )
    claims = gr.HTML(claims_html(site.results), elem_id=f"{TAB}-claims")
    gallery = gr.Gallery(
        label="Figures", columns=2, object_fit="contain", height="auto", visible=False, elem_id=f"{TAB}-figures",
        interactive=False, buttons=["download", "fullscreen"],
    )  # fmt: skip
    with gr.Row(equal_height=False):
        with gr.Column(min_width=300):
            gr.Markdown(f"**How to cite the paper**\n\n{CITATION}")
        with gr.Column(min_width=300):
            gr.Markdown(f"**Commands**\n```bash\n{COMMANDS}\n```")
    gr.Markdown(f"**The same from Python**\n```python\n{API}\n```")

    @guarded
    def load_figures():
        found = figures(site.results)
        return gr.Gallery(value=found, visible=bool(found))

    refresh = gr.Button("Show the figures", size="sm", elem_id=f"{TAB}-show", visible=_any_figure(site.results))
    refresh.click(load_figures, None, gallery, **QUICK)

    def restore(_query: dict) -> list:
        return [claims_html(site.results), gr.Button(visible=_any_figure(site.results))]

    return Linked(TAB, {}, [claims, refresh], restore, f"{TAB}-show")


def _any_figure(folder: Path) -> bool:
    return bool(load_list(folder / "figures.json"))
