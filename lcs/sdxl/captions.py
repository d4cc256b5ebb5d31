"""Captioned scenes: what mini-sdxl is trained on, and the prompts it is asked to draw.

A caption names the objects from left to right, with some attributes left out at random, where they stand, and
a style: "a large red metal cube on the left and a small blue rubber sphere on the right in warm light". A
style is a plain transform of the rendered image, so style and content are independent by construction.

A quarter of all captions, chosen by a hash of their text, never occurs in training (`held_out`): prompts for
evaluation are drawn from those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lcs.errors import LcsError
from lcs.scenes import world
from lcs.scenes.table import SceneTable

LEFT, RIGHT = 0.42, 0.58  # fractions of the image's width: further out counts as on the left or on the right
PLACES = {"left": "on the left", "middle": "in the middle", "right": "on the right"}
STYLES = {
    "monochrome": "in monochrome",
    "sepia": "in sepia",
    "night": "at night",
    "warm": "in warm light",
    "cool": "in cool light",
    "fog": "in fog",
}
STYLED = 0.25  # share of styled images
UNKNOWN_SHAPE = "object"
SMALL_SHARE = 1 / 3  # of the objects in training and in prompts: small ones are hard to tell apart
HELD_OUT_SHARE = 4  # one caption in so many


# ---- styles -----------------------------------------------------------------------------------------


def apply_style(images: np.ndarray, style: str) -> np.ndarray:
    """uint8 [..., 3] -> uint8 [..., 3]; '' leaves the image as it is."""
    x = images.astype(np.float32) / 255
    gray = x @ np.array([0.299, 0.587, 0.114], np.float32)  # [...]
    if style == "":
        return images
    if style == "monochrome":
        y = np.repeat(gray[..., None], 3, -1)
    elif style == "sepia":
        y = gray[..., None] * np.array([1.25, 1.0, 0.72], np.float32)
    elif style == "night":
        y = x * np.array([0.28, 0.33, 0.55], np.float32)
    elif style == "warm":
        y = x * np.array([1.3, 1.0, 0.68], np.float32)
    elif style == "cool":
        y = x * np.array([0.7, 0.98, 1.35], np.float32)
    elif style == "fog":
        y = 0.45 * x + 0.55 * 0.78
    else:
        raise LcsError(f"unknown style {style!r}; choose from {', '.join(STYLES)}")
    return (y.clip(0, 1) * 255 + 0.5).astype(np.uint8)


# ---- prompts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    """One object of a prompt; None is an attribute that the prompt does not mention."""

    shape: str | None = None
    color: str | None = None
    size: str | None = None
    material: str | None = None
    place: str | None = None  # a key of PLACES

    def words(self) -> str:
        noun = self.shape or UNKNOWN_SHAPE
        adjectives = [w for w in (self.size, self.color, self.material) if w]
        phrase = " ".join([*adjectives, noun])
        article = "an" if phrase[0] in "aeiou" else "a"
        return f"{article} {phrase}" + (f" {PLACES[self.place]}" if self.place else "")


def compose(things: list[Thing], style: str = "") -> str:
    """The caption of things given from left to right."""
    parts = [t.words() for t in things]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""
    return " ".join(part for part in (text, STYLES.get(style, "")) if part)


def held_out(caption: str) -> bool:
    """True for captions that training never shows."""
    return int.from_bytes(hashlib.sha256(caption.encode()).digest()[:4], "big") % HELD_OUT_SHARE == 0


def held_out_wording(things: list[Thing], style: str = "") -> str:
    """The caption of things, with a size and materials added if that makes it one that training never shows.

    Attributes that are said already stay as they are; if no such wording is held out, the plain one is returned.
    """
    plain = compose(things, style)
    for size in (None, "large"):
        for materials in product((None, *world.MATERIALS), repeat=len(things)):
            named = zip(things, materials, strict=True)
            caption = compose([replace(t, size=t.size or size, material=t.material or m) for t, m in named], style)
            if held_out(caption):
                return caption
    return plain


def place_of(x: float) -> str:
    return "left" if x < LEFT else "right" if x > RIGHT else "middle"


def things_of(table: SceneTable, row: int) -> list[Thing]:
    """The objects of one scene, from left to right, with every attribute."""
    n = int(table.counts[row])
    order = np.argsort(table.locations[row, :n, 0], kind="stable")
    return [
        Thing(
            shape=world.SHAPES[table.shapes[row, i]],
            color=world.COLOR_NAMES[table.colors[row, i]],
            size=world.SIZE_NAMES[table.sizes[row, i]],
            material=world.MATERIALS[table.materials[row, i]],
            place=place_of(float(table.locations[row, i, 0])),
        )
        for i in order
    ]


def random_caption(things: list[Thing], style: str, rng: np.random.Generator) -> tuple[str, list[Thing]]:
    """A caption true of the scene that is not held out, and what it says: attributes are left out at random.

    Two objects at the same place are never both placed by words ("on the left and ... on the left"
    would be true but no help); their order in the caption still is from left to right.
    """
    for _ in range(20):
        placed = rng.random() < 0.6 and (len(things) < 2 or len({t.place for t in things}) == len(things))
        said = [
            Thing(
                shape=t.shape if rng.random() < 0.93 else None,
                color=t.color if rng.random() < 0.93 else None,
                size=t.size if rng.random() < 0.5 else None,
                material=t.material if rng.random() < 0.4 else None,
                place=t.place if placed else None,
            )
            for t in things
        ]
        caption = compose(said, style)
        if not held_out(caption):
            return caption, said
    return "", []


def all_told(objects: int, rng: np.random.Generator) -> list[Thing]:
    """Random objects from left to right with every attribute, as `things_of` a scene."""
    pick = lambda names: str(rng.choice(names))  # noqa: E731
    return [
        Thing(pick(world.SHAPES), pick(world.COLOR_NAMES), pick(world.SIZE_NAMES), pick(world.MATERIALS), place)
        for place in (list(PLACES)[k] for k in sorted(rng.integers(len(PLACES), size=objects)))
    ]


def evaluation_prompts(objects: int, n: int, seed: int = 0) -> list[tuple[str, list[Thing]]]:
    """`n` distinct held-out prompts without style, each with what it asks for; colour and shape are always named.

    Attributes are drawn as in training, and several objects stand at different places. Because prompts
    are distinct and those with one object are few, small ones are more frequent among those.
    """
    rng = np.random.default_rng([seed, objects, 77])
    found: dict[str, list[Thing]] = {}
    for _ in range(200 * n):
        things = next(_random_things(objects, rng))
        caption = compose(things)
        if held_out(caption):
            found.setdefault(caption, things)
        if len(found) == n:
            return list(found.items())
    raise LcsError(f"there are only {len(found)} held-out prompts with {objects} objects, not {n}")


def _random_things(objects: int, rng: np.random.Generator) -> Iterator[list[Thing]]:
    names = list(PLACES)
    while True:
        chosen = sorted(rng.choice(3, objects, replace=False)) if objects <= 3 else [None] * objects
        placed = objects > 1 or rng.random() < 0.6
        yield [
            Thing(
                shape=str(rng.choice(world.SHAPES)),
                color=str(rng.choice(world.COLOR_NAMES)),
                size=("small" if rng.random() < SMALL_SHARE else "large") if rng.random() < 0.5 else None,
                material=str(rng.choice(world.MATERIALS)) if rng.random() < 0.4 else None,
                place=names[c] if placed and c is not None else None,
            )
            for c in chosen
        ]


def all_words() -> list[str]:
    """Every word (and sign) that a caption can contain, plus a few for prompts of one's own."""
    text = " ".join([*PLACES.values(), *STYLES.values(), *world.SHAPES, *world.COLOR_NAMES, *world.SIZE_NAMES])
    more = "a an and the of with two three photo scene empty object night light"
    return sorted({*text.split(), *world.MATERIALS, *more.split(), ","})
