"""Conditioners: counts against rendered masks, labelling rules against their definition, clear errors."""

import numpy as np
import pytest

from lcs.conditioning import CONDITIONERS, MAX_OBJECTS, ListConditioner, cell_of, get_conditioner
from lcs.errors import LcsError
from lcs.experiments import GRID, TEST_COLORS, TEST_LOCATIONS
from lcs.render.fast import render
from lcs.scenes import world
from lcs.scenes.placement import random_scene
from lcs.scenes.table import table_of

SCENES = [random_scene(seed, 1 + seed % 5) for seed in range(300)]
TABLE = table_of(SCENES)
INDEX = np.arange(len(SCENES))


def test_grid_cells_hold_object_centres_of_the_mask():
    """For unoccluded spheres the mask's centroid falls into the labelled cell, or next to its border."""
    grid_all = get_conditioner("grid-all")
    checked = 0
    for seed in range(60):
        scene = random_scene(seed, 1)
        if scene.objects[0].shape != "sphere":
            continue
        _, masks = render([scene], 160, 160)
        ys, xs = np.nonzero(masks[0])
        row, col = np.argwhere(grid_all.encode(scene).reshape(GRID, GRID))[0]
        assert abs((ys.mean() + 0.5) / 10 - (row + 0.5)) < 0.75
        assert abs((xs.mean() + 0.5) / 10 - (col + 0.5)) < 0.75
        checked += 1
    assert checked > 10


def test_how_many_objects_each_rule_labels():
    counts = np.array([len(s.objects) for s in SCENES])
    total = {name: CONDITIONERS[name].encode_table(TABLE, 0, INDEX).sum(1) for name in CONDITIONERS if "grid" in name}
    assert (total["grid-all"] == counts).all()
    assert (total["grid-single"] == 1).all()
    assert (total["grid-drop-one"] == counts - 1).all()
    assert ((total["grid-random"] >= 1) & (total["grid-random"] <= counts)).all()
    five = total["grid-random"][counts == 5]
    assert set(five) == {1, 2, 3, 4, 5}


def test_single_label_is_uniform_over_objects_and_follows_the_index():
    scene = random_scene(9, 3)
    assert len({cell_of(o.location) for o in scene.objects}) == 3
    table = table_of([scene]).rows(np.zeros(3000, int))
    labels = get_conditioner("grid-single").encode_table(table, 1, np.arange(3000))
    for o in scene.objects:
        row, col = cell_of(o.location)
        share = labels[:, row * GRID + col].mean()
        assert abs(share - 1 / 3) < 4 * np.sqrt(2 / 9 / 3000)
    again = get_conditioner("grid-single").encode_table(table.rows(slice(100, 200)), 1, np.arange(100, 200))
    assert (again == labels[100:200]).all()  # row i depends on index i alone
    other = get_conditioner("grid-single").encode_table(table, 2, np.arange(3000))
    assert (other != labels).any()


@pytest.mark.parametrize("name", ["grid-all", "list-all", "color"])  # those that label every object
def test_scene_and_conditions_agree(name):
    conditioner = CONDITIONERS[name]
    for scene in SCENES[:40]:
        conditions = [o.color if name == "color" else o.location for o in scene.objects]
        assert np.allclose(conditioner.encode(scene), conditioner.encode_conditions(conditions), atol=1e-6)


@pytest.mark.parametrize("name", list(CONDITIONERS))
def test_leave_one_out_and_pictures(name):
    conditioner = CONDITIONERS[name]
    conditions = conditioner.test_conditions[:4]
    removed = conditioner.leave_one_out(conditions)
    assert removed.shape == (4, conditioner.dim)
    for k in range(4):
        rest = [c for i, c in enumerate(conditions) if i != k]
        assert (removed[k] == conditioner.encode_conditions(rest)).all()
        assert (removed[k] != conditioner.encode_conditions(conditions)).any()
    empty, full = conditioner.picture(conditioner.test_vector(0)), conditioner.picture(conditioner.test_vector(4))
    assert empty.shape == full.shape
    assert full.dtype == np.uint8
    assert (empty != full).any()


def test_vectors_by_hand():
    grid = get_conditioner("grid-all").encode_conditions([(0.65, 0.25), (0.65, 0.26), (0.0, 0.999)])
    assert grid.reshape(GRID, GRID)[4, 10] == 2  # 0.25 * 16 = 4, 0.65 * 16 = 10.4
    assert grid.reshape(GRID, GRID)[15, 0] == 1
    assert grid.sum() == 3
    listed = get_conditioner("list-all").encode_conditions([(0.5, 0.25), (0.125, 0.75)])
    assert listed[:9].tolist() == [1, 0.5, 0.25, 1, 0.125, 0.75, 0, 0, 0]
    assert len(listed) == 3 * MAX_OBJECTS
    colors = get_conditioner("color").encode_conditions(["red", "blue", "red"])
    assert colors[TEST_COLORS.index("red")] == 2
    assert colors.sum() == 3
    assert (get_conditioner("color").encode_conditions({"red": 2, "blue": 1}) == colors).all()


def test_paper_conditions():
    assert len(TEST_LOCATIONS) == 12
    assert len({cell_of(x) for x in TEST_LOCATIONS}) == 12
    assert set(TEST_COLORS) == set(world.COLORS)
    for k in range(13):
        assert get_conditioner("grid-all").test_vector(k).sum() == k


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_conditioner("grid-all").encode_conditions([(1.0, 0.5)]), r"\(1.0, 0.5\)"),
        (lambda: get_conditioner("grid-all").encode_conditions([(0.5, -0.1)]), r"-0\.1"),
        (lambda: get_conditioner("grid-all").encode_conditions([(float("nan"), 0.1)]), "nan"),
        (lambda: get_conditioner("grid-all").encode_conditions([0.5]), r"pair .* 0\.5"),
        (lambda: get_conditioner("list-all").encode_conditions([(0.5, 0.5)] * 13), "13 locations .* 12 slots"),
        (lambda: ListConditioner(slots=2).encode_table(TABLE, 0, INDEX), "5 objects .* 2 slots"),
        (lambda: get_conditioner("color").encode_conditions(["pink"]), "pink"),
        (lambda: get_conditioner("color").encode_conditions({"red": -1}), "-1"),
        (lambda: get_conditioner("color").encode_conditions({"red": 1.5}), r"1\.5"),
        (lambda: get_conditioner("color").test_vector(9), "K = 9 .* 0..8"),
        (lambda: get_conditioner("grid-al"), "grid-al"),
        (lambda: get_conditioner("grid-all").picture(np.full(256, -1.0)), "negative count"),
    ],
)
def test_bad_input_names_the_value(call, message):
    with pytest.raises(LcsError, match=message):
        call()
