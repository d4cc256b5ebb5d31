"""The prompts of the study: the paper's for SDXL, and mini-sdxl's own.

v1 gives 8 concepts, 3 compositions and the token whose attention stands for each (section G). v2 speaks of 24
prompts in 4 categories and names three of them (animals, art styles, foods); the 24 prompts themselves are not in
our sources, so `SDXL_CONCEPTS` extends v1's wording to 6 each, and the fourth category (places) is our choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from lcs.errors import LcsError
from lcs.scenes import world
from lcs.sdxl.captions import PLACES, STYLES, Thing, compose, held_out_wording


@dataclass(frozen=True)
class Concept:
    name: str
    category: str
    prompt: str
    token: str  # the last token of the word whose attention map stands for the concept


@dataclass(frozen=True)
class Composition:
    concepts: tuple[str, ...]  # names of concepts
    prompt: str

    @property
    def name(self) -> str:
        return "+".join(self.concepts)


@dataclass(frozen=True)
class Subject:
    """What the study asks of one model."""

    concepts: tuple[Concept, ...]
    shown: tuple[str, ...]  # the concepts of the small cosine matrices (v1 Fig 7, v2 Fig 5 middle)
    compositions: tuple[Composition, ...]
    pixel_prompt: str  # v1 Fig 6, v2 Fig 4
    locations: tuple[tuple[float, float], ...]  # (x, y) as fractions of the image
    steps: int  # of the pixel study
    feature_steps: int
    guidance: float
    size: int  # pixels per side

    def concept(self, name: str) -> Concept:
        for concept in self.concepts:
            if concept.name == name:
                return concept
        raise LcsError(f"unknown concept {name!r}; choose from {', '.join(c.name for c in self.concepts)}")


def _photo(name: str) -> Concept:
    article = "An" if name[0] in "aeiou" else "A"
    return Concept(name, "animals", f"{article} {name}, full body, highly detailed photograph.", name)


def _style(name: str, category_prompt: str, token: str) -> Concept:
    return Concept(name, "styles", category_prompt, token)


def _food(name: str, phrase: str) -> Concept:
    return Concept(name, "foods", f"Eating {phrase}, highly detailed photograph.", name)


def _scene(name: str) -> Concept:
    return Concept(name, "places", f"A {name}, wide angle, highly detailed photograph.", name)


SDXL_CONCEPTS = (
    _photo("dog"), _photo("horse"), _photo("cat"), _photo("elephant"), _photo("rabbit"), _photo("lion"),
    _style("vangogh", "An oil-painting in the style of Van Gogh.", "gogh"),
    _style("monet", "A watercolor-painting in the style of Monet.", "monet"),
    _style("hokusai", "A woodblock print in the style of Hokusai.", "sai"),
    _style("picasso", "An oil-painting in the style of Picasso.", "picasso"),
    _style("rembrandt", "An oil-painting in the style of Rembrandt.", "rembrandt"),
    _style("warhol", "A screen print in the style of Warhol.", "warhol"),
    _food("sushi", "sushi with chopsticks"), _food("croissant", "a croissant"), _food("pizza", "a pizza"),
    _food("burger", "a burger"), _food("salad", "a salad"), _food("cake", "a cake"),
    _scene("beach"), _scene("forest"), _scene("city"), _scene("desert"), _scene("mountain"), _scene("kitchen"),
)  # fmt: skip

SDXL = Subject(
    concepts=SDXL_CONCEPTS,
    shown=("dog", "horse", "cat", "vangogh", "monet", "hokusai", "sushi", "croissant"),
    compositions=(
        Composition(
            ("vangogh", "cat", "sushi"), "A cat eating sushi with chopsticks, oil-painting in the style of Van Gogh."
        ),
        Composition(("vangogh", "cat"), "A cat, full body, oil-painting in the style of Van Gogh."),
        Composition(("cat", "sushi"), "A cat eating sushi with chopsticks."),
        # v1 Fig 7, bottom: concepts of one category, which compose badly; the wording is ours
        Composition(("horse", "dog", "cat"), "A horse, a dog and a cat, full body, highly detailed photograph."),
    ),
    pixel_prompt="a beautiful photograph with a horse in the middle, a dog on the left, and a cat on the right",
    locations=((0.5, 0.5), (0.2, 0.6), (0.8, 0.6), (0.5, 0.15)),
    steps=50,
    feature_steps=15,
    guidance=5.0,
    size=1024,
)


# ---- mini-sdxl --------------------------------------------------------------------------------------


def _mini_concepts() -> tuple[Concept, ...]:
    colors = [Concept(c, "colours", compose([Thing(color=c)]), c) for c in world.COLOR_NAMES]
    shapes = [Concept(s, "shapes", compose([Thing(shape=s)]), s) for s in world.SHAPES]
    places = [Concept(p, "places", compose([Thing(place=p)]), p) for p in PLACES]
    styles = [Concept(style, "styles", compose([Thing()], style), words.split()[1]) for style, words in STYLES.items()]
    return (*colors, *shapes, *places, *styles)


def _mini_composition(*things: Thing, style: str = "") -> Composition:
    """In words that training never shows, where there are such words."""
    said = [v for t in things for v in (t.color, t.shape, t.place) if v]
    return Composition((*said, style) if style else tuple(said), held_out_wording(list(things), style))


MINI = Subject(
    concepts=_mini_concepts(),
    shown=("red", "blue", "green", "cube", "sphere", "cylinder", "night", "sepia"),
    compositions=(
        _mini_composition(Thing(color="red", shape="cube")),
        _mini_composition(Thing(color="blue", shape="sphere")),
        _mini_composition(Thing(shape="cube", place="left")),
        _mini_composition(Thing(color="red", shape="cube", place="left")),
        _mini_composition(Thing(color="green", shape="cylinder"), style="fog"),
        _mini_composition(Thing(shape="cube"), style="night"),
        _mini_composition(Thing(color="red"), Thing(color="blue")),  # of one category, as the paper's horse+dog+cat
        _mini_composition(Thing(shape="cube"), Thing(shape="sphere")),
    ),
    pixel_prompt="a large red cube on the left and a large blue sphere on the right",
    locations=((0.25, 0.55), (0.75, 0.55), (0.5, 0.55), (0.5, 0.1)),
    steps=25,
    feature_steps=15,
    guidance=3.0,
    size=64,
)
