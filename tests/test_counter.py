"""The counter: data, degradation, decoding on hand-made maps, training, and the shipped weights on held-out renders."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lcs.counter import evaluate
from lcs.counter.data import FIRST_SEED, CounterData, DataSpec, boxes_of, make_scene, open_folder, render_folder
from lcs.counter.data import render_split as render_scenes
from lcs.counter.degrade import DAMAGES, DegradeSettings, blur, degrade, spread
from lcs.counter.detector import (
    BOX_UNIT,
    FIELDS,
    MANIFEST_KEY,
    Architecture,
    Counter,
    Detector,
    Thresholds,
    decode,
    export_counter,
    load_counter,
    prepare,
)  # fmt: skip
from lcs.counter.evaluate import auc, compare, measure, to_csv, to_markdown
from lcs.counter.training import CounterRecipe, load_trained, make_targets, train_counter
from lcs.errors import LcsError
from lcs.experiments import GRID, SCALES
from lcs.scenes import world
from lcs.training import checkpoint
from lcs.weights import WEIGHTS

DATA = Path(__file__).parent / "data"

TINY = Architecture(widths=(8, 8, 8), blocks=(1, 1, 1), head=8)
CLEAN = DegradeSettings(styled_images=0.0, damaged_images=0.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small networks gain nothing from threads and lose a lot on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scenes() -> CounterData:
    return render_scenes("train", range(26))


# ---- data -----------------------------------------------------------------------------------------


def test_seeds_are_disjoint_from_training_sets():
    starts = sorted(FIRST_SEED.values())
    assert min(b - a for a, b in zip(starts, starts[1:], strict=False)) > 10**9
    # Training scenes have seeds base_seed * 2^32 + i; all shipped models use base seed 0 and far fewer than 2^32.
    assert starts[0] > 2**32 > max(s.scenes_per_count for s in SCALES.values())
    assert make_scene("test", 5).seed == FIRST_SEED["test"] + 5
    with pytest.raises(LcsError, match="split 'holdout'"):
        make_scene("holdout", 0)


def test_scenes_hold_every_count(scenes):
    assert scenes.table.counts.tolist() == list(range(13)) * 2
    assert (scenes.masks.max((1, 2)) == scenes.table.counts).all()
    nothing = scenes.table.counts == 0
    assert (scenes.images[nothing] == scenes.empty[nothing]).all()
    far = scenes.masks[5] == 0
    assert np.abs(scenes.images[5].astype(int) - scenes.empty[5])[far].mean() < 6  # shadows and reflections only


def test_boxes_hold_exactly_the_mask():
    masks = np.zeros((2, 64, 64), np.uint8)
    masks[0, 10:20, 5:9] = 1
    masks[0, 12:14, 8:30] = 3
    boxes = boxes_of(masks)
    assert boxes[0, 0] * 64 == pytest.approx([5, 10, 9, 20])
    assert boxes[0, 2] * 64 == pytest.approx([8, 12, 30, 14])
    assert not boxes[0, 1].any()
    assert not boxes[1].any()


def test_folder_resumes_and_refuses_other_data(tmp_path, scenes):
    spec = DataSpec("train", 20, part=8)
    render_folder(tmp_path, spec, progress=False)
    (tmp_path / "part-0001.safetensors").unlink()
    with pytest.raises(LcsError, match="part-0001"):
        open_folder(tmp_path)
    kept = (tmp_path / "part-0002.safetensors").stat().st_mtime_ns
    render_folder(tmp_path, spec, progress=False)
    assert (tmp_path / "part-0002.safetensors").stat().st_mtime_ns == kept
    data = open_folder(tmp_path)
    assert (data.images == scenes.images[:20]).all()
    assert (data.table.locations == scenes.table.locations[:20]).all()
    with pytest.raises(LcsError, match="other data"):
        render_folder(tmp_path, DataSpec("train", 21, part=8), progress=False)


# ---- degradation ----------------------------------------------------------------------------------


def test_nothing_happens_without_damage_and_style(scenes):
    result = degrade(scenes, torch.Generator().manual_seed(0), CLEAN)
    assert (result.images.permute(0, 2, 3, 1) * 255 - torch.from_numpy(scenes.images)).abs().max() < 1e-3
    assert not result.strength.any()
    assert (result.present.sum(1).numpy() == scenes.table.counts).all()


def test_damage_stays_near_its_object(scenes):
    settings = DegradeSettings(styled_images=0.0, damaged_images=1.0, damaged_objects=0.5, removed_objects=0.2)
    result = degrade(scenes, torch.Generator().manual_seed(1), settings)
    touched = torch.where(result.present, result.strength, torch.ones(()))  # a removed object is touched too
    touched = touched * (torch.arange(12) < torch.from_numpy(scenes.table.counts)[:, None])
    masks = torch.from_numpy(scenes.masks.astype(np.int64))
    outside = spread((touched > 0).float(), masks)[:, 0] == 0
    change = (result.images.permute(0, 2, 3, 1) * 255 - torch.from_numpy(scenes.images)).abs().amax(-1)
    assert change[outside].max() < 1e-2
    assert change[~outside].mean() > 1
    assert (result.strength > 0).sum() > 30
    assert (~result.present & (touched > 0)).any()


def test_stronger_damage_changes_more(scenes):
    from lcs.counter.degrade import DAMAGE

    x, empty = (torch.from_numpy(a).permute(0, 3, 1, 2).float() / 255 for a in (scenes.images, scenes.empty))
    masks = torch.from_numpy(scenes.masks.astype(np.int64))
    for name in DAMAGES:
        changes = []
        for s in (0.0, 0.3, 0.6, 0.9):
            where = spread(torch.full((len(x), 12), s), masks)
            y = DAMAGE[name](x, where, empty, x.roll(1, 0), torch.Generator().manual_seed(0))
            changes.append((y - x).abs().mean().item())
        assert changes[0] < 1e-6, name
        assert changes == sorted(changes), name


def test_blur_keeps_the_mean_and_constants():
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(blur(torch.full((1, 3, 16, 16), 0.3), 2.0), torch.full((1, 3, 16, 16), 0.3))
    assert blur(x, 1.5).std() < 0.5 * x.std()


# ---- decoding -------------------------------------------------------------------------------------


def blank_maps(images: int = 1, size: int = 64) -> dict[str, torch.Tensor]:
    maps = {name: torch.zeros(images, channels, size, size) for name, channels in FIELDS.items()}
    maps["heat"] -= 8
    return maps


def put(maps, image: int, x: float, y: float, logit: float, **classes) -> None:
    """An object centred at pixel coordinates (x, y), with a bump of two pixels around it."""
    col, row = int(x), int(y)
    for dr in (-1, 0, 1):
        for dc in (-1, 0, 1):
            r, c = row + dr, col + dc
            maps["heat"][image, 0, r, c] = max(maps["heat"][image, 0, r, c].item(), logit - (dr != 0) - (dc != 0))
            maps["offset"][image, :, r, c] = torch.tensor([x - c - 0.5, y - r - 0.5])
    maps["quality"][image, 0, row, col] = classes.pop("quality", 5.0)
    maps["box"][image, :, row, col] = torch.tensor(classes.pop("box", (2.0, 3.0, 2.0, 3.0))) / BOX_UNIT
    for name, index in classes.items():
        maps[name][image, index, row, col] = 9.0


def test_decode_reads_synthetic_maps():
    maps = blank_maps(2)
    put(maps, 0, 20.3, 30.8, 4.0, color=3, shape=2, size=1, material=1, box=(4.0, 5.0, 6.0, 7.0))
    put(maps, 0, 40.9, 10.2, 2.0, color=7, quality=-5.0)
    put(maps, 0, 50.5, 50.5, -2.0, color=1)  # probability 0.12
    first, second = decode(maps, 0.3)
    assert len(second) == 0
    assert second.centers.shape == (0, 2)
    assert second.names() == []
    assert first.centers * 64 == pytest.approx(np.array([[20.3, 30.8], [40.9, 10.2]]), abs=1e-4)
    assert first.boxes[0] * 64 == pytest.approx([16.3, 25.8, 26.3, 37.8], abs=1e-4)
    assert first.colors.tolist() == [3, 7]
    assert (first.shapes[0], first.sizes[0], first.materials[0]) == (2, 1, 1)
    assert first.names()[0] == f"small {world.COLOR_NAMES[3]} metal cylinder"
    assert first.scores == pytest.approx(1 / (1 + np.exp([-4.0, -2.0])))
    assert first.quality == pytest.approx(1 / (1 + np.exp([-5.0, 5.0])))
    assert len(decode(maps, 0.1)[0]) == 3


def test_decode_merges_peaks_that_point_to_one_object():
    maps = blank_maps()
    for col, logit in ((20, 3.0), (22, 2.5)):  # two maxima ...
        maps["heat"][0, 0, 30, col] = logit
        maps["offset"][0, 0, 30, col] = 21.5 - col - 0.5  # ... of the same centre
    maps["heat"][0, 0, 30, 24] = 2.0  # another object three pixels on
    (found,) = decode(maps, 0.3)
    assert found.scores == pytest.approx(1 / (1 + np.exp([-3.0, -2.0])))


def test_decode_at_the_border():
    maps = blank_maps()
    maps["heat"][0, 0, 0, 63] = 3.0
    maps["offset"][0, :, 0, 63] = torch.tensor([0.4, -0.4])
    (found,) = decode(maps, 0.3)
    assert found.centers[0] * 64 == pytest.approx([63.9, 0.1], abs=1e-4)
    assert found.boxes.min() >= 0
    assert found.boxes.max() <= 1


def test_targets_decode_to_the_truth(scenes):
    """Maps filled with the training targets give back every object: no information is lost on the way."""
    degraded = degrade(scenes, torch.Generator().manual_seed(0), CLEAN)
    targets = make_targets(scenes, degraded)
    maps = blank_maps(len(scenes))
    maps["heat"] = torch.logit(targets.heat.clamp(1e-4, 1 - 1e-4))[:, None]
    place = (targets.image, slice(None), targets.row, targets.col)
    maps["offset"][place], maps["box"][place] = targets.offset, targets.box
    columns = {"color": scenes.table.colors, "shape": scenes.table.shapes}
    for name, column in columns.items():
        maps[name][
            targets.image, torch.from_numpy(column).long()[targets.image, targets.slot], targets.row, targets.col
        ] = 1
    outcome = compare(scenes, decode(maps, 0.9))
    assert (outcome.drawn == scenes.table.counts).mean() > 0.95  # two centres may fall into neighbouring pixels
    assert outcome.found.mean() > 0.99
    assert np.nanmax(outcome.error) < 0.02
    assert outcome.correct["color"].mean() > 0.99


# ---- evaluation -----------------------------------------------------------------------------------


def test_auc_against_pairs():
    rng = np.random.default_rng(0)
    high, low = rng.integers(0, 6, 30), rng.integers(-2, 4, 20)
    pairs = np.mean([(h > w) + 0.5 * (h == w) for h in high for w in low])
    assert auc(high, low) == pytest.approx(pairs)
    assert auc(high, np.zeros(0)) is None


# ---- training -------------------------------------------------------------------------------------


def test_training_learns_and_resumes_identically(tmp_path, scenes):
    recipe = CounterRecipe(samples=320, batch=8, lr=1e-2, warmup=80, architecture=TINY)
    whole = train_counter(scenes, tmp_path / "whole", recipe, progress=False)
    losses = [row[1] for row in checkpoint.read_loss_log(tmp_path / "whole" / "loss.csv")]
    assert losses[-1] < 0.8 * losses[0]

    parts = tmp_path / "parts"
    train_counter(scenes, parts, recipe, progress=False, stop_after=120)
    assert not (parts / "final.safetensors").exists()
    train_counter(scenes, parts, recipe, progress=False)
    a, _ = checkpoint.load_tensors(whole)
    b, _ = checkpoint.load_tensors(parts / "final.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert isinstance(load_trained(whole, recipe), Detector)
    with pytest.raises(LcsError, match="lr"):
        train_counter(scenes, parts, CounterRecipe(samples=320, batch=8, lr=1e-3, warmup=80, architecture=TINY))


# ---- weights --------------------------------------------------------------------------------------


def test_export_and_load_check_the_hash(tmp_path):
    torch.manual_seed(0)
    detector = Detector(TINY).eval()
    other = {"file": "other.safetensors", "sha256": "0"}
    (tmp_path / "manifest.json").write_text(json.dumps({"other": other}))
    path = export_counter(detector, Thresholds(0.4, 0.5), {"note": 1}, {"exact": 0.5}, tmp_path)
    counter = load_counter(tmp_path)
    assert counter.thresholds == Thresholds(0.4, 0.5)
    assert counter.detector.architecture == TINY
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(counter.detector(x)["heat"], detector(x)["heat"], atol=0.05)
    entry = json.loads((tmp_path / "manifest.json").read_text())
    assert entry["other"] == other
    assert entry[MANIFEST_KEY]["measured"] == {"exact": 0.5}
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(LcsError, match="sha256"):
        load_counter(tmp_path)
    with pytest.raises(LcsError, match="no counter"):
        load_counter(tmp_path / "elsewhere")


def test_counter_refuses_other_arrays():
    with pytest.raises(LcsError, match="float64"):
        prepare(np.zeros((1, 64, 64, 3)))
    with pytest.raises(LcsError, match=r"\[64, 64, 3\]"):
        prepare(np.zeros((64, 64, 3), np.uint8))


@pytest.fixture(scope="module")
def shipped() -> Counter:
    return load_counter()


@pytest.fixture(scope="module")
def held_out() -> CounterData:
    return render_scenes("test", range(10_400, 10_400 + 156))  # 12 of each count; not among the 2,000 of the report


def test_shipped_counter_is_small_and_described():
    entry = json.loads((WEIGHTS / "manifest.json").read_text())[MANIFEST_KEY]
    assert entry["bytes"] < 3e6
    measured = entry["measured"]
    assert measured["images"] == evaluate.TEST_IMAGES
    assert measured["by_count"]["1-6"]["images"] + measured["by_count"]["7-12"]["images"] > 1_800
    assert "exact count" in to_markdown(measured)
    assert len(to_csv(measured).splitlines()) == 1 + len(measured["by_count"]) + len(measured["by_size"])


def test_shipped_counter_reaches_its_stated_accuracy(shipped, held_out):
    """On new renders, within three standard errors of what the manifest states."""
    stated = json.loads((WEIGHTS / "manifest.json").read_text())[MANIFEST_KEY]["measured"]["by_count"]
    outcome = compare(held_out, shipped(held_out.images))
    counts = held_out.table.counts
    for group, low, high in (("1-6", 1, 6), ("7-12", 7, 12)):
        images = (counts >= low) & (counts <= high)
        exact, p = (outcome.drawn == counts)[images].mean(), stated[group]["exact"]
        assert exact >= p - 3 * np.sqrt(p * (1 - p) / images.sum()) - 0.01, (group, exact, p)
    assert (outcome.drawn[counts == 0] == 0).mean() > 0.9
    assert np.nanmean(outcome.error) < 0.5
    for name in ("color", "shape"):
        assert outcome.correct[name][outcome.found].mean() > stated["1-12"][name] - 0.03, name


def test_shipped_counter_takes_other_sizes(shipped, held_out):
    few = held_out.rows(np.flatnonzero(held_out.table.counts <= 4))
    double = np.repeat(np.repeat(few.images, 2, axis=1), 2, axis=2)
    same = shipped.counts(few.images) == shipped.counts(double)
    assert same.mean() > 0.9
    assert shipped.counts(np.zeros((0, 64, 64, 3), np.uint8)).shape == (0,)


STILL_OBJECTS = (
    "known defect: quality tells faded and blurred objects, not warped or stained ones (by eye often objects)"
)


@pytest.mark.parametrize(
    "kind",
    ["fade", "smear"]
    + [pytest.param(k, marks=pytest.mark.xfail(strict=True, reason=STILL_OBJECTS)) for k in DAMAGES[2:]],
)
def test_shipped_counter_rejects_heavy_damage(shipped, held_out, monkeypatch, kind):
    monkeypatch.setattr("lcs.counter.degrade.DAMAGES", (kind,))
    few = held_out.rows(np.flatnonzero(held_out.table.counts <= 6))
    settings = DegradeSettings(styled_images=0, damaged_images=1, damaged_objects=1, removed_objects=0, min_damage=0.9)
    images, _ = evaluate.degraded_images(few, settings, 3)
    assert shipped.counts(images).sum() < 0.1 * few.table.counts.sum()


def test_shipped_counter_sees_nothing_in_an_empty_room(shipped, held_out):
    assert shipped.counts(held_out.empty).sum() <= 4  # of 156 rooms


def test_measure_reports_every_group(shipped):
    report = measure(shipped.detector, shipped.thresholds, images=26)
    assert report["by_count"]["1-12"]["images"] == 24
    assert 0.5 < report["quality"]["auc"] <= 1
    assert json.loads(json.dumps(report)) == report
    center = report["by_count"]["1-12"]["center_cells"]
    assert 0 < center < 16 / GRID


def agreement(counter: Counter, sheet: Path) -> list[tuple[dict, bool]]:
    """Each labelled image's row, and whether counter and eye agree on the count."""
    images, rows = evaluate.labelled_images(sheet)
    return [(row, bool(row["count"] == count)) for row, count in zip(rows, counter.counts(images), strict=True)]


def test_agreement_with_counts_made_by_eye(shipped):
    """Generated images, labelled by looking at them; other ones than those the threshold was chosen on.

    The first 152 had been looked at with several thresholds before the rule that chooses it was written; the later 156
    were labelled when it was fixed: on these the wanted 90% are not reached. 160 are of the shipped models, 128 of
    models shipped until others replaced them.
    """
    every = agreement(shipped, DATA / "generated")
    reached = {
        "first": (152, 0.90, {
            "grid-all-m3": 0.85, "grid-single-m3": 0.93, "list-all-m3": 0.95, "grid-all-m1": 0.90, "color-m3": 0.95,
            "grid-single-local-m3": 0.70, "list-all-local-m3": 0.85}),
        "later": (156, 0.88, {
            "grid-all-m3": 0.92, "grid-random-m3": 0.95, "grid-single-m3": 0.91, "list-all-m3": 0.83,
            "grid-all-m1": 0.98, "list-all-local-m3": 0.75, "grid-single-local-m3": 0.68}),
        "before": (128, 0.91, {
            "grid-all-m3": 0.93, "grid-single-m3": 0.93, "list-all-m3": 0.95, "grid-random-m3": 0.93,
            "grid-drop-one-m3": 0.93, "grid-all-m1": 0.93, "color-m3": 0.85, "grid-single-local-m3": 0.70}),
        "shipped": (160, 0.90, {
            "grid-all-m3": 0.93, "grid-single-m3": 0.93, "list-all-m3": 0.95, "grid-random-m3": 0.85,
            "grid-drop-one-m3": 0.95, "grid-all-m1": 0.95, "grid-all-m2": 0.93, "color-m3": 0.85,
            "grid-single-local-m3": 0.68, "list-all-local-m3": 0.80}),
    }  # fmt: skip
    for kind, (images, least, by_run) in reached.items():
        agree: dict[str, list[bool]] = {}
        for row, right in every:
            if next((name for name in ("later", "before", "shipped") if row.get(name)), "first") == kind:
                agree.setdefault(row["run"], []).append(right)
        rights = [right for group in agree.values() for right in group]
        assert len(rights) == images
        assert np.mean(rights) >= least
        assert agree.keys() == by_run.keys()
        assert [run for run, group in agree.items() if np.mean(group) < by_run[run]] == []


def test_score_threshold_prefers_the_eye_among_what_renders_allow(shipped, tmp_path, monkeypatch):
    data = evaluate.render_many("validation", 130)
    monkeypatch.setattr(evaluate, "render_many", lambda *_: data)
    chosen = evaluate.choose_thresholds(shipped.detector)
    sheet = WEIGHTS / evaluate.LABELLED
    images, rows = evaluate.labelled_images(sheet)
    eye = np.array([row["count"] for row in rows])
    right = [(Counter(shipped.detector, Thresholds(s, 0.5)).counts(images) == eye).mean() for s in (chosen.score, 0.36)]
    assert right[0] > right[1]  # 0.36: what renders alone would choose
    # Were the labels what another threshold counts, that one would be chosen.
    other = Counter(shipped.detector, Thresholds(0.42, 0.5)).counts(images)
    about = json.loads(sheet.with_suffix(".json").read_text())
    about["images"] = [row | {"count": int(n)} for row, n in zip(rows, other, strict=True)]
    (tmp_path / "sheet.json").write_text(json.dumps(about))
    (tmp_path / "sheet.png").write_bytes(sheet.with_suffix(".png").read_bytes())
    assert evaluate.choose_thresholds(shipped.detector, sheet=tmp_path / "sheet").score == 0.42
