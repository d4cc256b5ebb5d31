"""What of the SDXL study needs the counter, with a painter and a judge whose answers are known."""

from types import SimpleNamespace

import numpy as np
import pytest

from lcs.counter import detector
from lcs.counter.detector import Detections
from lcs.rule import wilson
from lcs.scenes import world
from lcs.sdxl import composition, figures, judge, study
from lcs.sdxl.captions import evaluation_prompts, held_out, held_out_wording
from lcs.sdxl.concepts import MINI

X = {"left": 0.2, "middle": 0.5, "right": 0.8}


def detections(things):
    n = len(things)
    return Detections(
        centers=np.array([(X.get(t.place, 0.5), 0.5) for t in things], np.float32).reshape(n, 2),
        boxes=np.zeros((n, 4)), colors=np.array([world.COLOR_NAMES.index(t.color or "gray") for t in things], int),
        shapes=np.array([world.SHAPES.index(t.shape or "cube") for t in things], int), sizes=np.zeros(n, int),
        materials=np.zeros(n, int), scores=np.ones(n), quality=np.ones(n),
    )  # fmt: skip


@pytest.fixture
def painter(monkeypatch):
    """Draws nothing but a number; the eye that looks at it sees what the prompt asked for, or nothing.

    Plain: every second image is right. Separate: all. Mask: none. Pairs: those of two objects never.
    """
    asked = {compose: things for k in (1, 2, 3) for compose, things in evaluation_prompts(k, 12)}
    for pairs in composition.PAIRS.values():
        asked |= {held_out_wording(list(things)): list(things) for *_, things in pairs}
    pictures = []

    def generate_many(pipe, prompts, seeds, steps, guidance, regions=None, batch=32, done=None):
        numbers = range(len(pictures), len(pictures) + len(prompts))
        pictures.extend((prompt, seed, regions) for prompt, seed in zip(prompts, seeds, strict=True))
        if done:
            done(len(prompts))
        return np.stack([np.full((8, 8, 3), n // np.array([65536, 256, 1]) % 256, np.uint8) for n in numbers])

    def look(counter, views):
        found = []
        for view in views:
            prompt, seed, regions = pictures[int(view[0, 0] @ np.array([65536, 256, 1]))]
            things = asked[prompt]
            good = {None: seed % 2 == 0, "separate": True, "mask": False}[regions]
            found.append(detections(things if good else []))
        return found

    for module in (composition, judge):
        monkeypatch.setattr(module, "generate_many", generate_many)
        monkeypatch.setattr(module, "look", look)
    monkeypatch.setattr(detector, "load_counter", lambda: None)
    return pictures


def features(seed=0):
    """Cosines of all concepts, enough of a feature study for what is judged."""
    cosines = np.random.default_rng(seed).uniform(-1, 1, (len(MINI.concepts),) * 2)
    return SimpleNamespace(concepts=MINI.concepts, group=lambda name: cosines)


def test_obedience_counts_right_images(painter):
    result = judge.measure_obedience(None, None, 2, 12, 1, 3.0)
    assert result.count() == 6
    assert result.row()["right"] == 0.5
    assert (result.row()["low"], result.row()["high"]) == wilson(6, 12)
    assert sum(n for _, n in result.by_size().values()) == 12


def test_intervention_pairs_the_same_prompts_and_seeds(painter):
    result = composition.measure_intervention(None, None, 2, 12, steps=1)
    drawn = {mode: [(p, s) for p, s, m in painter if m == mode] for mode in (None, "separate", "mask")}
    assert drawn[None] == drawn["separate"] == drawn["mask"]
    rows = {(r["mode"], r["criterion"]): r for r in result.rows()}
    assert rows["separate", "right"]["gained"] == 6
    assert rows["separate", "right"]["lost"] == 0
    assert rows["separate", "right"]["difference"] == 0.5
    assert rows["mask", "right"]["lost"] == 6
    assert rows["mask", "right"]["low"] < -0.5 < rows["mask", "right"]["high"]


def test_relation_joins_success_and_cosine_of_each_pair(painter):
    study_ = features()
    relation = composition.relate(None, None, study_, range(4), 1)
    names = [c.name for c in MINI.concepts]
    assert len(relation.pairs) == sum(map(len, composition.PAIRS.values()))
    for pair in relation.pairs:
        assert (pair.successes, pair.trials) == (2, 4)  # seeds 0 and 2
        assert pair.cosine == study_.group("mid")[names.index(pair.first), names.index(pair.second)]
        assert held_out(pair.prompt)  # training never shows it


def test_all_that_is_judged_is_drawn_and_told(painter):
    level = study.Effort(1, 1, 1, 1, 12, 2, 1, True)
    drawn, tables, numbers = study._judged(None, features(), level, False, 0)
    assert {"samples", "relation", "intervention"} == set(drawn)
    assert numbers["obey_1"] == numbers["obey_2"] == 0.5
    assert numbers["intervention_3_separate"] == 0.5
    assert numbers["intervention_2_mask_interval"][0] < -0.5
    assert [row["objects"] for row in tables["obedience"]] == [1, 2]
    assert all(row["never shown"] for row in tables["relation"])
    title = drawn["samples"].get_suptitle()
    assert "1 object: 50% right" in title
    assert "within kinds" in drawn["relation"].axes[0].get_title()


def test_figures_frame_what_is_right(painter):
    result = judge.measure_obedience(None, None, 1, 8, 1, 3.0)
    panels = [a for a in figures.figure_samples([result]).axes if a.axison]
    colors = [tuple(a.spines["left"].get_edgecolor()) for a in panels]
    assert [colors[i] == colors[0] for i in range(8)] == [i % 2 == 0 for i in range(8)]
