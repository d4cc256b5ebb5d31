"""Pictures, boards and curves as small HTML and SVG: sharp on any screen, readable in both themes, a few kB each.

Images travel as PNG data inside the HTML, so nothing is written to disk for a preview. Everything drawn on top of them
is SVG in a 100 x 100 coordinate system, whatever the image's resolution.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lcs.counter.detector import Detections
from lcs.experiments import GRID, TEST_COLORS
from lcs.scenes import world

ASKED, FOUND, EXTRA = "#e4572e", "#1f9d63", "#e0a100"
SERIES = ("#4f6bed", "#e4572e", "#1f9d63", "#b5651d", "#8a4fd3", "#0f8b8d")
# Stops of the heat map, black to white over violet and orange: dark means no influence in both themes.
_HEAT = np.array(
    [(0, 0, 4), (28, 16, 68), (79, 18, 123), (129, 37, 129), (181, 54, 122), (229, 80, 100), (251, 135, 97),
     (254, 194, 135), (252, 253, 191)], float,
)  # fmt: skip


# ---- images ---------------------------------------------------------------------------------------


def png_bytes(rgb: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(rgb: np.ndarray) -> str:
    """uint8 [H, W, 3] -> data:image/png"""
    return "data:image/png;base64," + base64.b64encode(png_bytes(rgb)).decode()


def heat(values: np.ndarray) -> np.ndarray:
    """[H, W], 0 or more -> uint8 [H, W, 3]. The square root makes the faint parts visible; the largest is white."""
    top = float(values.max())
    level = np.sqrt(values / top) * (len(_HEAT) - 1) if top > 0 else np.zeros_like(values)
    below = np.clip(level.astype(int), 0, len(_HEAT) - 2)
    share = (level - below)[..., None]
    return (_HEAT[below] * (1 - share) + _HEAT[below + 1] * share).round().astype(np.uint8)


def shown_color(name: str) -> str:
    """A CLEVR colour as it looks on screen; the table's values are linear."""
    return "#" + "".join(f"{round(255 * (v / 255) ** (1 / 2.2)):02x}" for v in world.COLORS[name])


# ---- the board ------------------------------------------------------------------------------------


def location_marks(locations: Sequence[tuple[float, float]], radius: float = 3.6) -> str:
    """Numbered discs."""
    return "".join(
        f'<g class="asked"><circle cx="{100 * x:.2f}" cy="{100 * y:.2f}" r="{radius}" fill="{ASKED}" '
        f'stroke="#fff" stroke-width=".7"/><text x="{100 * x:.2f}" y="{100 * y:.2f}" dy=".36em" '
        f'font-size="{radius * 1.15:.2f}">{k}</text></g>'
        for k, (x, y) in enumerate(locations, 1)
    )


def dots(locations: Sequence[tuple[float, float]]) -> str:
    """Where objects were asked for, small enough to leave the objects visible."""
    return "".join(
        f'<circle class="asked" cx="{100 * x:.2f}" cy="{100 * y:.2f}" r="1.7" fill="{ASKED}" stroke="#fff" '
        'stroke-width=".7"/>'
        for x, y in locations
    )


def cross(x: float, y: float) -> str:
    """The watched pixel."""
    x, y = 100 * x, 100 * y
    lines = f"M{x - 4:.2f} {y:.2f}h8M{x:.2f} {y - 4:.2f}v8"
    return f'<path class="halo" d="{lines}"/><path class="probe" d="{lines}"/>'


def grid_board(locations: Sequence[tuple[float, float]], pixel: tuple[float, float] | None = None) -> str:
    """The image plane with its 16 x 16 cells; a click anywhere is sent to the server as fractions."""
    step = 100 / GRID
    lines = "".join(f"M{i * step} 0V100M0 {i * step}H100" for i in range(1, GRID))
    probe = "" if pixel is None else cross(*pixel)
    return (
        f'<div class="board" role="img" aria-label="board with {len(locations)} locations"><svg viewBox="0 0 100 100">'
        f'<path class="cells" d="{lines}"/>'
        f'<rect class="cell" width="{step}" height="{step}"/>{location_marks(locations)}{probe}</svg></div>'
    )


def color_board(colors: Sequence[str]) -> str:
    """The eight colours with how many of each are asked for."""
    cells = []
    for name in TEST_COLORS:
        count = list(colors).count(name)
        cells.append(
            f'<div class="swatch{" on" if count else ""}"><button type="button" data-color="{name}" '
            f'aria-label="one more {name}" style="background:{shown_color(name)}">{count or ""}</button>'
            f'<span>{name}</span><button type="button" class="less" data-color="{name}" data-less="1" '
            f'aria-label="one {name} less"{"" if count else " disabled"}>&minus;</button></div>'
        )
    return f'<div class="colors">{"".join(cells)}</div>'


# ---- samples --------------------------------------------------------------------------------------


def boxes(found: Detections, matched: Sequence[int]) -> str:
    """What the counter found: solid where it was asked for, dashed where not."""
    shapes, dashes = [], ' stroke-dasharray="2.2 1.6"'
    for i, box in enumerate(100 * found.boxes):
        left, top, right, bottom = upright(box)
        ours = i in matched
        shapes.append(
            f'<rect class="found" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'rx="1.2" stroke="{FOUND if ours else EXTRA}"{"" if ours else dashes}/>'
        )
    return "".join(shapes)


def upright(box: Sequence[float]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom in this order: the counter's distances may come out negative."""
    x0, y0, x1, y1 = map(float, box)
    return min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)


def picture(rgb: np.ndarray, over: str = "", kind: str = "") -> str:
    return (
        f'<svg class="picture {kind}" viewBox="0 0 100 100"><image href="{data_uri(rgb)}" width="100" height="100" '
        f'preserveAspectRatio="none"/>{over}</svg>'
    )


def card(rgb: np.ndarray, caption: str, over: str = "", state: str = "") -> str:
    """One sample with what is drawn on it; `caption` is HTML."""
    return f'<figure class="card {state}">{picture(rgb, over)}<figcaption>{caption}</figcaption></figure>'


def cards(items: Sequence[str], title: str = "") -> str:
    head = f'<h4 class="over">{title}</h4>' if title else ""
    return f'{head}<div class="cards n{len(items)}">{"".join(items)}</div>'


def progress(done: float, said: str) -> str:
    share = round(100 * min(max(done, 0.0), 1.0))
    return (
        f'<div class="progress" role="progressbar" aria-valuenow="{share}"><i style="width:{share}%"></i>'
        f"<span>{html.escape(said)}</span></div>"
    )


def note(text: str, kind: str = "") -> str:
    """A sentence in a box; `text` is HTML that we wrote."""
    return f'<div class="note {kind}">{text}</div>'


def empty(title: str, text: str, commands: Sequence[str] = ()) -> str:
    """What a tab says when it has nothing to show yet, and how to change that."""
    lines = "".join(f"<code>{html.escape(command)}</code>" for command in commands)
    return f'<div class="empty"><b>{title}</b><p>{text}</p>{lines}</div>'


# ---- curves ---------------------------------------------------------------------------------------


def curves(
    xs: Sequence[float], series: dict[str, Sequence[float]], title: str, y_label: str, top: float | None = None,
    strong: Sequence[str] = (),
) -> str:  # fmt: skip
    """Lines over the noise levels, as an SVG of 300 x 150 with a cursor that the slider moves.

    xs: noise levels, high to low, drawn on an even axis, because that is how the sampler walks through them.
    """
    high = top if top is not None else max((max(v) for v in series.values() if len(v)), default=0) * 1.08 or 1.0
    left, right, up, down = 34, 292, 26, 122
    at = lambda i: left + (right - left) * (i / max(len(xs) - 1, 1))  # noqa: E731
    height = lambda v: down - (down - up) * min(v / high, 1.0)  # noqa: E731
    ticks = "".join(
        f'<path class="grid" d="M{left} {height(v):.1f}H{right}"/>'
        f'<text x="{left - 4}" y="{height(v):.1f}" dy=".35em" text-anchor="end">{_short(v)}</text>'
        for v in (0, high / 2, high)
    )
    anchor = lambda i: "start" if i == 0 else "end" if i == len(xs) - 1 else "middle"  # noqa: E731
    marks = "".join(
        f'<text x="{at(i):.1f}" y="{down + 12}" text-anchor="{anchor(i)}">{_short(xs[i])}</text>'
        for i in sorted({0, len(xs) // 3, 2 * len(xs) // 3, len(xs) - 1})
    )
    lines, legend = [], []
    for n, (name, values) in enumerate(series.items()):
        color = SERIES[n % len(SERIES)]
        points = " ".join(f"{at(i):.1f},{height(float(v)):.1f}" for i, v in enumerate(values))
        width = 2.4 if name in strong or not strong else 1.2
        lines.append(f'<polyline points="{points}" stroke="{color}" stroke-width="{width}"/>')
        legend.append(f'<span><i style="background:{color}"></i>{html.escape(name)}</span>')
    return (
        f'<div class="curve"><div class="curve-title">{html.escape(title)}</div><svg viewBox="0 0 300 150" '
        f'data-left="{left}" data-right="{right}" data-count="{len(xs)}">{ticks}{marks}'
        f'<text x="{(left + right) / 2}" y="147" text-anchor="middle">noise level &#963;, high to low</text>'
        f'<text x="2" y="14">{html.escape(y_label)}</text>{"".join(lines)}'
        f'<path class="cursor" d="M{left} {up - 6}V{down}"/></svg><div class="legend">{"".join(legend)}</div></div>'
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


# ---- the same as one picture, for download --------------------------------------------------------

_TILE, _FOOT, _GAP = 256, 26, 8


def sheet(
    images: Sequence[np.ndarray], captions: Sequence[str], asked: Sequence[Sequence] = (),
    found: Sequence[Detections] = (), matched: Sequence[Sequence[int]] = (), columns: int = 4,
) -> bytes:  # fmt: skip
    """Samples with conditions and boxes as a PNG."""
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _FOOT + _GAP) + _GAP), "white")
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(14)
    for i, image in enumerate(images):
        x0, y0 = _GAP + i % columns * (_TILE + _GAP), _GAP + i // columns * (_TILE + _FOOT + _GAP)
        page.paste(Image.fromarray(image).resize((_TILE, _TILE), Image.Resampling.BICUBIC), (x0, y0))
        if found:
            for j, box in enumerate(found[i].boxes):
                corners = [(x0 if k % 2 == 0 else y0) + v * _TILE for k, v in enumerate(upright(box))]
                pen.rectangle(corners, outline=FOUND if j in matched[i] else EXTRA, width=2)
        for k, place in enumerate(asked[i] if asked else (), 1):
            if not isinstance(place, str):
                x, y = x0 + place[0] * _TILE, y0 + place[1] * _TILE
                pen.ellipse((x - 9, y - 9, x + 9, y + 9), fill=ASKED, outline="white")
                pen.text((x, y), str(k), fill="white", anchor="mm", font=font)
        pen.text((x0 + 2, y0 + _TILE + 4), captions[i], fill="#222222", font=font)
    return png_bytes(np.asarray(page))
