"""The probe: scenes at asked places, and models whose answer is known."""

import numpy as np
import pytest
import torch
from tiny import SCALE
from torch import nn
from typer.testing import CliRunner

from lcs import experiments, probe, weights
from lcs.cli import app
from lcs.conditioning import cell_of, get_conditioner
from lcs.errors import LcsError
from lcs.experiments import TEST_LOCATIONS, get_run
from lcs.probe import ground_under, scene_at
from lcs.scenes import world
from lcs.scenes.scene import project
from lcs.training.batches import standardise

RUN = get_run("grid-all", 3, "mini")


@pytest.mark.parametrize("k", [1, 5, 12])
def test_objects_stand_in_the_asked_cells_and_apart(k):
    for seed in range(6):
        scene = scene_at(seed, TEST_LOCATIONS[:k])
        assert [cell_of(o.location) for o in scene.objects] == [cell_of(at) for at in TEST_LOCATIONS[:k]]
        places = np.array([o.position[:2] for o in scene.objects])
        radii = np.array([o.radius for o in scene.objects])
        gaps = np.linalg.norm(places[:, None] - places, axis=-1) - radii[:, None] - radii
        assert (gaps[~np.eye(k, dtype=bool)] >= probe.GAP).all()
        assert all(o.position[2] == o.radius for o in scene.objects)
    assert scene_at(0, TEST_LOCATIONS[:3]) == scene_at(0, TEST_LOCATIONS[:3]) != scene_at(1, TEST_LOCATIONS[:3])
    sizes = {o.size for seed in range(10) for o in scene_at(seed, TEST_LOCATIONS[:2]).objects}
    assert sizes == set(world.SIZE_NAMES)


def test_the_ground_under_a_pixel_projects_back_to_it():
    x, y = ground_under(world.CAMERA, (0.3, 0.6), 0.7)
    pixel = project(world.CAMERA, (x, y, 0.7))
    assert pixel == pytest.approx((0.3 * world.IMAGE_WIDTH, 0.6 * world.IMAGE_HEIGHT), abs=1e-4)


class Mean(nn.Module):
    """Answers a label with the mean of the images it stands for, and share `lost` of the way to the mean without."""

    def __init__(self, k: int, renders: int, lost: float):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.asked = standardise(probe._renders(k, 64, renders, 0), RUN).mean(0)
        self.lost = lost

    def forward(self, x, sigma, labels):
        empty = torch.zeros_like(self.asked)
        share = (labels.sum(1) == 0).float()[:, None, None, None]
        share = share + (1 - share) * self.lost
        return share * empty + (1 - share) * self.asked


def test_models_that_follow_in_part_are_told_apart():
    n = 48
    whole = probe.probe(RUN, Mean(5, n, 0.0), [5], n)[0]
    assert whole.error == pytest.approx(whole.spread * (n - 1) / n, rel=1e-4)  # the mean of these very images
    assert whole.unfollowed == pytest.approx(0, abs=0.05)
    half = probe.probe(RUN, Mean(5, n, 0.5), [5], n)[0]  # squared: a quarter is missing
    assert half.unfollowed == pytest.approx(0.25, abs=0.05)
    assert probe.probe(RUN, Mean(5, n, 1.0), [5], n)[0].unfollowed == pytest.approx(1)


def test_only_models_that_are_told_locations_can_be_probed(monkeypatch):
    run = get_run("color", 3, "mini")
    assert get_conditioner("color").test_conditions != TEST_LOCATIONS
    with pytest.raises(LcsError, match="not told locations"):
        probe.probe(run, nn.Linear(1, 1))
    result = CliRunner().invoke(app, ["probe", "grid-all", "--running", "nowhere"])
    assert isinstance(result.exception, LcsError)
    assert "does not exist" in str(result.exception)


def test_a_run_in_training_is_probed_with_its_averaged_weights(tmp_path, monkeypatch):
    from lcs.data.shards import StreamedScenes
    from lcs.training import checkpoint
    from lcs.training.trainer import TrainSettings, train

    monkeypatch.setitem(experiments.SCALES, "tiny", SCALE)
    run = get_run("grid-all", 2, "tiny")
    train(run, StreamedScenes((1, 2), run.scale.resolution), tmp_path, settings=TrainSettings(cpu=True, progress=False))
    model = weights.load_running(run, tmp_path)
    late, _ = checkpoint.load_tensors(tmp_path / "late.safetensors")
    assert all(torch.equal(late[name], value) for name, value in model.state_dict().items())
