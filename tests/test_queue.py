"""The training queue: what it claims, trains, ships and skips; the images a run is opened on."""

from dataclasses import replace

import pytest
import torch
from tiny import state, tiny_run

from lcs import weights
from lcs.data.files import read_json, sha256_of
from lcs.data.shards import DatasetSpec, render_dataset
from lcs.errors import LcsError
from lcs.experiments import Run, get_experiment
from lcs.training import checkpoint
from lcs.training.queue import claimed, open_source, train_all
from lcs.training.trainer import TrainSettings, train

QUIET = TrainSettings(cpu=True, progress=False)


def test_queue_skips_what_another_process_holds(tmp_path, capsys):
    folder = tmp_path / "tiny" / "grid-single-m2"
    with claimed(folder) as mine:
        assert mine
        train_all([tiny_run()], None, tmp_path, 0, QUIET)
    assert "another process" in capsys.readouterr().out
    train_all([tiny_run()], None, tmp_path, 0, QUIET)
    train_all([tiny_run()], None, tmp_path, 0, QUIET)
    assert "finished" in capsys.readouterr().out


def test_images_of_another_size_are_refused(tmp_path):
    render_dataset(tmp_path, DatasetSpec(counts=(1, 2), scenes=2, size=16), progress=False)
    with pytest.raises(LcsError, match="holds images of 16 pixels"):
        open_source(tiny_run(), tmp_path)


def test_finished_runs_are_shipped_once(tmp_path, monkeypatch, capsys):
    exported, manifest = [], {}

    def export(run, folder, stage):
        exported.append((run.name, stage))
        manifest[weights.entry_key(run, stage)] = {
            "samples": run.recipe.samples, "settings": read_json(folder / "run.json"),
        }  # fmt: skip

    monkeypatch.setattr(weights, "export", export)
    monkeypatch.setattr(weights, "read_manifest", lambda: manifest)
    train_all([tiny_run()], None, tmp_path, 0, QUIET)
    assert not exported  # not asked to
    for _ in range(2):  # also when training ended in an earlier call, and not twice
        train_all([tiny_run()], None, tmp_path, 0, QUIET, ship=True)
    assert exported == [("grid-single-m2", "late")]
    manifest["tiny/grid-single-m2/late"]["settings"]["seed"] = 7  # another training of the same length
    train_all([tiny_run()], None, tmp_path, 0, QUIET, ship=True)
    assert len(exported) == 2
    manifest["tiny/grid-single-m2/late"]["samples"] = 1000  # better ones are there
    train_all([tiny_run()], None, tmp_path, 0, QUIET, ship=True)
    assert len(exported) == 2
    manifest["tiny/grid-single-m2/late"]["settings"]["recipe"]["lr"] = 7  # ... of a recipe that was given up
    train_all([tiny_run()], None, tmp_path, 0, QUIET, ship=True)
    assert len(exported) == 3
    assert "not shipped, weights of 1000 samples are" in capsys.readouterr().out


def growing(objects: int) -> Run:
    """A tiny run of which those on more than two objects are grown."""
    scale = tiny_run().scale
    return replace(tiny_run(), objects=objects, scale=replace(scale, grown_beyond=2, grown_recipe=scale.recipe))


def test_a_run_on_more_objects_begins_with_the_weights_of_the_one_on_fewer(tmp_path):
    one_step = replace(QUIET, stop_after_samples=8)  # of rate zero: the ramp begins there
    train_all([growing(4)], None, tmp_path, 0, one_step)  # its ancestors are wanted first, and are not finished either
    assert [p.name for p in (tmp_path / "tiny").iterdir() if (p / "run.json").exists()] == ["grid-single-m2"]
    train_all([growing(3)], None, tmp_path, 0, QUIET, keep_going=True)
    train_all([growing(4)], None, tmp_path, 0, one_step)
    folders = {m: tmp_path / "tiny" / f"grid-single-m{m}" for m in (2, 3, 4)}
    parent = checkpoint.load_tensors(folders[3] / "late.safetensors")[0]
    begun = state(folders[4])
    for name, value in parent.items():
        assert torch.allclose(begun[f"model.{name}"], value, atol=1e-5), name
    origin = read_json(folders[4] / "run.json")["grown_from"]
    assert origin == {
        "run": "grid-single-m3", "samples": 64, "sha256": sha256_of(folders[3] / "late.safetensors"),
    }  # fmt: skip
    assert "grown_from" not in read_json(folders[2] / "run.json")
    train_all([growing(4)], None, tmp_path, 0, QUIET)  # resumed from its own state
    assert checkpoint.load_meta(folders[4] / "late.safetensors")["grown_from"] == origin
    assert not torch.equal(state(folders[4])["model.unet.out_conv.weight"], begun["model.unet.out_conv.weight"])


def test_a_run_is_not_grown_from_nothing(tmp_path):
    with pytest.raises(LcsError, match="begins with the weights of grid-single-m2"):
        train(growing(3), open_source(growing(3), None), tmp_path, settings=QUIET)


def test_a_queue_goes_on_without_the_data_of_one_run(tmp_path, capsys):
    cifar = Run(get_experiment("cifar10"), 0, tiny_run().scale)
    with pytest.raises(LcsError, match="cifar10 could not be trained"):
        train_all([cifar, tiny_run()], None, tmp_path, 0, QUIET, keep_going=True)
    assert "cifar10: skipped, cifar10 needs --cifar" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "grid-single-m2" / "late.safetensors").exists()
    with pytest.raises(LcsError, match="needs --cifar"):
        train_all([cifar], None, tmp_path, 0, QUIET)
