"""report.html (one self-contained file) and report.md: claims first, then every figure, then how it was made."""

from __future__ import annotations

import base64
import html
import importlib.metadata
import os
import platform
import shlex
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from PIL import Image

import lcs
from artifact.claims import Verdict, as_rows
from artifact.context import Settings
from artifact.steps import Checkpoint, Output, Step
from lcs import weights
from lcs.data.files import atomic_write, write_json
from lcs.errors import LcsError
from lcs.evaluation import to_markdown
from lcs.sdxl.package import MINI_ID, mini_sha256

PACKAGES = ("torch", "numpy", "diffusers", "transformers", "accelerate", "numba", "matplotlib")
KEPT_WIDTH = 1100  # pixels of the pictures that the app shows
COLORS = {"came out": "#1a7f37", "partly": "#9a6700", "not": "#b3261e", "not run": "#6b6b6b"}


def command(step: str, facts: dict) -> str:
    """What redoes one step alone."""
    settings = facts["settings"]
    options = {"only": step, "scale": settings["scale"], "effort": settings["effort"]["name"], "seed": settings["seed"],
               "device": settings["device"], "samples": settings["samples"]}  # fmt: skip
    if settings["sdxl_model"] != MINI_ID:
        options["sdxl-model"] = settings["sdxl_model"]
    if facts["weights folder"] != str(weights.WEIGHTS):
        options["weights"] = facts["weights folder"]
    options["out"] = facts["out"]
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    return shlex.join(["python", "-m", "lcs", "artifact", *given, "--again"])


def environment(chosen: dict, settings: Settings, wanted: list[Checkpoint], seconds: float) -> dict:
    """Everything a reader needs to judge or redo the numbers."""
    used = {c.key: settings.sha256(c) for c in wanted if settings.root_of(c) is not None}
    return {
        "settings": chosen, "out": str(settings.out), "seconds": round(seconds, 1),
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "lcs": lcs.__version__,
        "python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if settings.device.startswith("cuda") else settings.device,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "weights folder": str(settings.roots[0]), "weights": used, MINI_ID: mini_sha256(),
        "counter": weights.read_manifest(weights.WEIGHTS).get("counter", {}).get("sha256"),
        "missing": sorted(c.key for c in wanted if settings.root_of(c) is None),
    }  # fmt: skip


def write(
    out: Path,
    steps: list[Step],
    results: dict[str, Output],
    failures: dict[str, str],
    verdicts: list[Verdict],
    facts: dict,
) -> None:
    data = {"claims": as_rows(verdicts), "environment": facts, "failures": failures,
            "steps": {name: asdict(output) for name, output in results.items()}}  # fmt: skip
    write_json(out / "results.json", data)
    for name, text in (
        ("report.md", as_markdown(steps, results, failures, verdicts, facts)),
        ("report.html", as_html(out, steps, results, failures, verdicts, facts)),
    ):
        with atomic_write(out / name) as path:
            path.write_text(text)


def check_keep(keep: Path) -> None:
    """The folder is replaced as a whole, so it must be empty or one of ours."""
    if keep.exists() and not (keep / "figures.json").exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise LcsError(f"--keep {keep} holds other files; choose an empty folder, or one written by --keep before")
    above = next(p for p in keep.absolute().parents if p.exists())
    if not os.access(above, os.W_OK):
        raise LcsError(f"cannot write --keep {keep}: no permission in {above}")


def keep_small(
    out: Path, keep: Path, steps: list[Step], results: dict[str, Output], verdicts: list[Verdict], facts: dict
) -> None:
    """Claims and pictures, small enough for the repository: what the app and the README show."""
    check_keep(keep)
    beside = keep.with_name(f".{keep.name}.partial")  # replaces the old folder when it is complete
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        _write_small(out, beside, steps, results, verdicts, facts)
        shutil.rmtree(keep, ignore_errors=True)
        beside.rename(keep)
    except OSError as error:
        raise LcsError(f"cannot write --keep {keep}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_small(out: Path, keep: Path, steps, results, verdicts, facts) -> None:
    figures = []
    for step in steps:
        for item in results[step.name].figures if step.name in results else ():
            file = f"{step.name}-{item['file']}" if not item["file"].startswith(step.name) else item["file"]
            picture = Image.open(out / step.name / item["file"]).convert("RGB")
            picture.thumbnail((KEPT_WIDTH, 4 * KEPT_WIDTH))
            _few_colors(picture).save(keep / file, optimize=True)
            missing = ", ".join(key.split("/", 1)[1].removesuffix("/late") for key in results[step.name].missing)
            caption = item["caption"] + (f" Not shipped: {missing}." if missing else "")
            figures.append({"name": step.name, "title": step.title, "caption": caption, "file": file,
                            "command": command(step.name, {**facts, "out": "out"}),
                            "seconds": results[step.name].seconds})  # fmt: skip
        for item in results[step.name].tables if step.name in results else ():
            shutil.copyfile(out / step.name / item["file"], keep / f"{step.name}-{item['file']}")
    write_json(keep / "claims.json", as_rows(verdicts))
    rows = [_claim_row(v) for v in verdicts]
    (keep / "claims.md").write_text(to_markdown([{k: row[k] for k in row if k != "rule"} for row in rows]))
    write_json(keep / "figures.json", figures)
    here = {name: value for name, value in facts.items() if name not in ("out", "weights folder")}
    write_json(keep / "environment.json", here)  # which weights, settings and versions these results are of


def _few_colors(picture: Image.Image) -> Image.Image:
    """A palette that reaches small bright objects too: median cut spends it all on the gray background."""
    return picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=4)


# ---- Markdown -------------------------------------------------------------------------------------


def as_markdown(steps, results, failures, verdicts, facts) -> str:
    lines = ["# Artifact report", "", headline(facts), "", "## Claims", ""]
    lines.append(to_markdown([_claim_row(v) for v in verdicts]))
    for step in steps:
        lines += [f"## {step.name}: {step.title}", "", f"{step.paper}. `{command(step.name, facts)}`", ""]
        if step.name not in results:
            lines += [f"Not drawn: {failures.get(step.name, '')}", ""]
            continue
        output = results[step.name]
        lines += [_time_of(output) + (f" Missing: {', '.join(output.missing)}." if output.missing else ""), ""]
        for item in output.tables:
            path = Path(facts["out"]) / step.name / item["file"]
            lines += [item["caption"], "", path.read_text()]
        for item in output.figures:
            lines += [f"![{step.name}]({step.name}/{item['file']})", "", item["caption"], ""]
    lines += ["## How it was made", "", *[f"- {name}: {value}" for name, value in _flat(facts)]]
    return "\n".join(lines) + "\n"


def _time_of(output: Output) -> str:
    shared = (
        f"; its samples and measurements took {output.sampling:.0f} s of one core, which other figures share"
        if output.sampling
        else ""
    )
    return f"{output.seconds:g} s{shared}."


def headline(facts: dict) -> str:
    settings = facts["settings"]
    return (f"lcs {facts['lcs']}, scale {settings['scale']}, effort {settings['effort']['name']}, seed "
            f"{settings['seed']}; {facts['seconds'] / 60:.1f} minutes on {facts['machine']}, {facts['device']}; "
            f"{facts['made']}.")  # fmt: skip


def _claim_row(v: Verdict) -> dict:
    return {"claim": v.claim, "paper": v.paper, "ours": v.ours, "95% interval": v.interval, "verdict": v.verdict,
            "rule": v.rule}  # fmt: skip


def _flat(facts: dict) -> list[tuple[str, str]]:
    pairs = []
    for name, value in facts.items():
        if isinstance(value, dict) and name in ("settings", "weights"):
            pairs += _flat({f"{name}: {k}": v for k, v in value.items()})
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "nothing"
        pairs.append((name, str(value)))
    return pairs


# ---- HTML -----------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #8884; padding: .35rem .5rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #8888; }
figure { margin: 1.5rem 0; } figure img { width: 100%; background: white; border-radius: 4px; }
figcaption, .rule, .note { font-size: 14px; opacity: .8; }
code { font-size: 13px; background: #8882; padding: .1rem .3rem; border-radius: 3px; overflow-wrap: anywhere; }
.verdict { font-weight: 600; white-space: nowrap; } nav a { margin-right: .8rem; white-space: nowrap; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem; }
"""


def as_html(out: Path, steps, results, failures, verdicts, facts) -> str:
    e = html.escape
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
             f"<title>lcs artifact report</title><style>{STYLE}</style>",
             "<h1>Local mechanisms of compositional generalization: artifact report</h1>",
             f"<p class=note>{e(headline(facts))}</p>",
             "<nav>" + "".join(f"<a href='#{s.name}'>{s.name}</a>" for s in steps) + "</nav>",
             "<h2 id=claims>Claims</h2>",
             "<table><tr><th>claim<th>paper<th>ours<th>95% interval<th>verdict</tr>"]  # fmt: skip
    for v in verdicts:
        parts.append(f"<tr><td>{e(v.claim)}<div class=rule>{e(v.rule)}</div><td>{e(v.paper)}<td>{e(v.ours)}"
                     f"<td>{e(v.interval)}<td class=verdict style='color:{COLORS[v.verdict]}'>{e(v.verdict)}"
                     "</tr>")  # fmt: skip
    parts.append("</table>")
    for step in steps:
        parts.append(f"<h2 id='{step.name}'>{e(step.name)}: {e(step.title)}</h2>")
        parts.append(f"<p class=note>{e(step.paper)} &middot; <code>{e(command(step.name, facts))}</code></p>")
        if step.name not in results:
            parts.append(f"<p>Not drawn: {e(failures.get(step.name, ''))}</p>")
            continue
        output = results[step.name]
        missing = f" Missing checkpoints: {e(', '.join(output.missing))}." if output.missing else ""
        parts.append(f"<p class=note>{_time_of(output)}{missing}</p>")
        for item in output.tables:
            parts.append(f"<p>{e(item['caption'])}</p>" + _html_table((out / step.name / item["file"]).read_text()))
        for item in output.figures:
            data = base64.b64encode((out / step.name / item["file"]).read_bytes()).decode()
            alt = e(item["caption"][:120], quote=True)
            parts.append(f"<figure><img alt='{alt}' src='data:image/png;base64,{data}'>")
            parts.append(f"<figcaption>{e(item['caption'])}</figcaption></figure>")
    parts.append("<h2 id=environment>How it was made</h2><table>")
    parts += [f"<tr><td>{e(name)}<td>{e(value)}</tr>" for name, value in _flat(facts)]
    return "".join(parts) + "</table></html>\n"


def _html_table(markdown: str) -> str:
    """A table written by `to_markdown`, as HTML."""
    head, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in markdown.strip().splitlines()]
    cells = ["<table><tr>" + "".join(f"<th>{html.escape(c)}" for c in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{html.escape(c)}" for c in row) + "</tr>" for row in rows]
    return "".join(cells) + "</table>"
