"""The training queue: what it claims, trains, ships and skips; the images a run is opened on."""

import pytest
from tiny import tiny_run

from lcs import weights
from lcs.data.files import read_json
from lcs.data.shards import DatasetSpec, render_dataset
from lcs.errors import LcsError
from lcs.experiments import Run, get_experiment
from lcs.training.queue import claimed, open_source, train_all
from lcs.training.trainer import TrainSettings

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


def test_a_queue_goes_on_without_the_data_of_one_run(tmp_path, capsys):
    cifar = Run(get_experiment("cifar10"), 0, tiny_run().scale)
    with pytest.raises(LcsError, match="cifar10 could not be trained"):
        train_all([cifar, tiny_run()], None, tmp_path, 0, QUIET, keep_going=True)
    assert "cifar10: skipped, cifar10 needs --cifar" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "grid-single-m2" / "late.safetensors").exists()
    with pytest.raises(LcsError, match="needs --cifar"):
        train_all([cifar], None, tmp_path, 0, QUIET)
