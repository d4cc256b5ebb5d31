"""Parts of the SDXL study that are kept: a killed study goes on, and what it gives is the same."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from sdxl_tiny import tiny_pipeline

from lcs.sdxl import concepts, features, generate, pixel
from lcs.sdxl.kept import keeping, kept

PROMPT = "a red cube on the left and a blue sphere on the right"


class Killed(Exception):
    pass


def limited(monkeypatch, module, calls: int | None) -> list:
    """`module.sample` is counted, and ends in `Killed` after `calls` calls."""
    whole, seen = module.sample, []

    def sample(*args, **kwargs):
        if len(seen) == calls:
            raise Killed
        seen.append(1)
        return whole(*args, **kwargs)

    monkeypatch.setattr(module, "sample", sample)
    return seen


def images(pipe):
    return generate.generate_many(pipe, [PROMPT] * 6, range(6), 2, 2.0, batch=2)


def pixels(pipe):
    study = pixel.run_pixel_study(pipe, PROMPT, [(0.2, 0.5), (0.8, 0.5)], range(5), 3, 2.0, batch=2)
    return np.concatenate([getattr(study, n).ravel() for n in ("sigmas", "gradients", "influence", "maps", "images")])


def hidden(pipe):
    names = ("red", "blue", "cube", "sphere")
    few = tuple(c for c in concepts.MINI.concepts if c.name in names)
    subject = concepts.Subject(**{**vars(concepts.MINI), "size": 32, "concepts": few})
    pair = concepts.Composition(("red", "cube"), "a red cube")
    study = features.run_feature_study(pipe, subject, range(2), 3, 32, (pair,))
    parts = study.hidden, study.attention, study.latent, study.pixel, study.samples, *study.composed.values()
    return np.concatenate([p.ravel() for p in parts])


@pytest.mark.parametrize(("study", "module", "batches"), [(images, generate, 3), (pixels, pixel, 3),
                                                          (hidden, features, 6)])  # fmt: skip
def test_a_killed_study_goes_on_to_the_same_result(study, module, batches, one_thread, monkeypatch, tmp_path):
    pipe = tiny_pipeline()
    with monkeypatch.context() as patch:
        drawn = limited(patch, module, None)
        want = study(pipe)
        assert len(drawn) == batches
    with monkeypatch.context() as patch, keeping(tmp_path):
        limited(patch, module, batches - 1)
        with pytest.raises(Killed):
            study(pipe)
    assert len(list(tmp_path.iterdir())) == batches - 1
    with monkeypatch.context() as patch, keeping(tmp_path):
        drawn = limited(patch, module, None)
        assert np.array_equal(study(pipe), want)
        assert len(drawn) == 1  # only the batch that the kill took
        assert np.array_equal(study(pipe), want)
        assert len(drawn) == 1


def test_other_facts_and_damaged_files_are_worked_out_again(tmp_path):
    calls = []

    def work():
        calls.append(1)
        return {"a": np.arange(3.0)[::-1], "b": np.zeros((2, 0), np.uint8)}

    with keeping(tmp_path):
        for facts in (["x", 1, "seed"], ["x", 1, "seed"], ["x", 2, "seed"]):
            found = kept(facts, work)
            assert found["a"].tolist() == [2, 1, 0]
            assert found["b"].shape == (2, 0)
        assert len(calls) == 2
        first = sorted(tmp_path.iterdir())[0]
        assert load_file(first)["a"].tolist() == [2, 1, 0]
        for path in tmp_path.iterdir():
            path.write_bytes(b"cut off")
        assert kept(["x", 1, "seed"], work)["a"].tolist() == [2, 1, 0]
        assert len(calls) == 3
    kept(["x", 1, "seed"], work)  # outside nothing is taken or stored
    assert len(calls) == 4
    assert len(list(tmp_path.iterdir())) == 2
