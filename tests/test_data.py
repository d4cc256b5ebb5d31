"""Datasets: kill -9 and resume, splitting over machines, hashes, streaming, sample order."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lcs.data.files import atomic_write, map_safetensors
from lcs.data.shards import DatasetSpec, RenderedScenes, StreamedScenes, parse_counts, parse_part, render_dataset
from lcs.errors import LcsError
from lcs.rng import hashed_seeds, hashed_uniform
from lcs.training.batches import dataset_rows

SPEC = DatasetSpec((1, 2), scenes=50, size=16, shard_size=20)
REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    assert render_dataset(root, SPEC, progress=False)
    return root


def hashes(root: Path) -> dict:
    return json.loads((root / "manifest.json").read_text())["sha256"]


def test_shards_hold_every_scene_once(dataset):
    seeds = {1: [], 2: []}
    for path in sorted(dataset.glob("count-*/*.safetensors")):
        tensors = load_file(path)
        count = int(path.parent.name.split("-")[1])
        assert (tensors["counts"] == count).all()
        seeds[count] += tensors["seeds"].tolist()
    assert seeds == {1: list(range(50)), 2: list(range(50))}


def test_kill_9_and_resume_gives_the_same_dataset(dataset, tmp_path):
    command = [sys.executable, "-m", "lcs", "render", "--count", "1-2", "--n", "50", "--size", "16"]
    command += ["--shard-size", "20", "--out", str(tmp_path)]
    for wait_for in (1, 3):  # kill once after the first shard, once after the third
        process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("count-*/*.safetensors"))) < wait_for and time.monotonic() < deadline:
            time.sleep(0.002)
            if process.poll() is not None:
                break
        os.kill(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
    stale = tmp_path / "count-1" / ".shard-00000.safetensors.999.tmp"
    stale.write_bytes(b"half a file")
    assert render_dataset(tmp_path, SPEC, progress=False)
    assert hashes(tmp_path) == hashes(dataset)
    assert len(RenderedScenes(tmp_path, (1, 2), verify=True)) == 100


def test_parts_of_two_machines_make_one_dataset(dataset, tmp_path):
    assert not render_dataset(tmp_path, SPEC, part=(0, 2), progress=False)
    with pytest.raises(LcsError, match=r"manifest\.json does not exist"):
        RenderedScenes(tmp_path, (1,))
    assert render_dataset(tmp_path, SPEC, part=(1, 2), progress=False)
    assert hashes(tmp_path) == hashes(dataset)


def test_resume_renders_nothing_twice(dataset, monkeypatch):
    monkeypatch.setattr("lcs.data.shards._render_shard", lambda *_: pytest.fail("rendered again"))
    assert render_dataset(dataset, SPEC, progress=False)


def test_folder_of_another_dataset_is_refused(dataset):
    with pytest.raises(LcsError, match="differs in size"):
        render_dataset(dataset, DatasetSpec((1, 2), 50, 32, 20), progress=False)


def test_corrupt_shard_is_noticed(dataset, tmp_path):
    render_dataset(tmp_path, DatasetSpec((1,), 5, 16), progress=False)
    path = next(tmp_path.glob("count-1/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LcsError, match="sha256"):
        RenderedScenes(tmp_path, (1,), verify=True)
    path.write_bytes(data[:40])
    with pytest.raises(LcsError, match="not a readable safetensors"):
        RenderedScenes(tmp_path, (1,))


def test_mapped_equals_loaded(dataset):
    path = next(dataset.glob("count-2/*.safetensors"))
    loaded, mapped = load_file(path), map_safetensors(path)
    assert loaded.keys() == mapped.keys()
    for name, value in loaded.items():
        assert (value == mapped[name]).all()
        assert value.dtype == mapped[name].dtype


def test_streamed_scenes_equal_rendered_ones(dataset):
    streamed, rendered = StreamedScenes((1, 2), 16), RenderedScenes(dataset, (1, 2))
    images, table = streamed.fetch(np.array([0, 1, 6, 7]))  # scenes 0 and 3 of counts 1 and 2
    expected, rows = rendered.fetch(np.array([0, 50, 3, 53]))
    assert (images == expected).all()
    for name, column in table.columns().items():
        assert (column == rows.columns()[name]).all(), name


def test_missing_count(dataset):
    with pytest.raises(LcsError, match=r"no scenes with \[5\] objects"):
        RenderedScenes(dataset, (1, 5))


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_and_fail():
        with atomic_write(path) as temporary:
            temporary.write_text("new, but")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_a_clear_error(tmp_path):
    with pytest.raises(LcsError, match="disk is full"), atomic_write(tmp_path / "file"):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("text", ["x", "3-1", "1-", ""])
def test_bad_count(text):
    with pytest.raises(LcsError):
        parse_counts(text)


@pytest.mark.parametrize("text", ["2/2", "x/2", "1", "-1/2"])
def test_bad_part(text):
    with pytest.raises(LcsError):
        parse_part(text)


def test_part_from_accelerate_launch(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_part(None) == (1, 4)


def test_every_epoch_is_a_permutation():
    for length in (1, 2, 7, 100, 257):
        rows = dataset_rows(0, np.arange(3 * length), length)
        for epoch in range(3):
            assert sorted(rows[epoch * length : (epoch + 1) * length]) == list(range(length))
    rows = dataset_rows(0, np.arange(2000), 1000)
    assert (rows[:1000] != rows[1000:]).mean() > 0.9  # another order in the second epoch
    assert abs(np.corrcoef(rows[:1000], np.arange(1000))[0, 1]) < 0.15
    some = np.array([3, 999, 1500])
    assert (dataset_rows(0, some, 1000) == rows[some]).all()


def test_hashed_numbers_are_uniform_and_independent():
    u = hashed_uniform(3, 1, np.arange(20_000), 3)
    assert u.min() >= 0
    assert u.max() < 1
    assert np.allclose(u.mean(0), 0.5, atol=5 / np.sqrt(12 * 20_000))
    assert np.allclose(u.var(0), 1 / 12, rtol=0.05)
    assert np.abs(np.corrcoef(u.T) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.03
    assert len(np.unique(hashed_seeds(0, 0, np.arange(100_000)))) == 100_000
    assert (hashed_seeds(0, 0, np.arange(10)) != hashed_seeds(0, 1, np.arange(10))).all()
    assert (hashed_seeds(0, 0, np.arange(10)) != hashed_seeds(1, 0, np.arange(10))).all()
