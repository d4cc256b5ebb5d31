"""Heed: denoisers whose answer is known, from a palette to Bayes' rule, and the scenes it is measured on."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lcs import heed
from lcs.cli import app
from lcs.data.shards import DatasetSpec
from lcs.errors import LcsError
from lcs.experiments import get_run

RUN = get_run("color", 3, "mini")
PAIRS = heed.render_pairs(RUN, 24)


@pytest.mark.parametrize("sigma", heed.SIGMAS)
def test_a_palette_hardly_responds_and_a_count_does(sigma):
    best = heed.responses(partial(heed.count, PAIRS), PAIRS, sigma).mean()
    assert best > 0.1
    assert abs(heed.responses(partial(heed.palette, PAIRS), PAIRS, sigma).mean()) < 0.1 * best


def test_a_count_has_the_smaller_error():
    """Knowing that the colours differ helps: else there would be nothing to learn."""
    for sigma in (6.0, 9.0):
        x = PAIRS.ab + sigma * torch.randn(PAIRS.ab.shape, generator=torch.Generator().manual_seed(3))
        joint, alone = ((f(PAIRS, x, sigma) - PAIRS.ab).square().mean() for f in (heed.count, heed.palette))
        assert joint < 0.8 * alone


def test_a_count_of_one_pixel_is_bayes_rule_summed_over_both_colourings():
    """Against the sum over hypotheses with normal densities, pixel values 1 and -1."""
    ab, ba = torch.tensor([1.0, -1.0]).view(1, 1, 1, 2), torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2)
    pairs = heed.Pairs(ab, ba, torch.full((1, 1, 1, 2), -1.0), torch.zeros(1, 8))
    x, sigma = torch.tensor([0.3, 0.9]).view(1, 1, 1, 2), 1.7
    weights = [math.exp(-float((x - image).square().sum()) / (2 * sigma**2)) for image in (ab, ba)]
    mean = (weights[0] * ab + weights[1] * ba) / sum(weights)
    assert torch.allclose(heed.count(pairs, x, sigma), mean)
    own = torch.tanh(x / sigma**2)  # of a value that is 1 or -1
    assert torch.allclose(heed.palette(pairs, x, sigma), own)


def test_only_object_one_differs_between_the_images_compared():
    """AB and BB show object 2 alike; AB and BA are the same scene with the colours exchanged."""
    one, two = (PAIRS.ab - PAIRS.bb).abs(), (PAIRS.bb - PAIRS.ba).abs()
    assert (one.amax((1, 2, 3)) > 0.5).all()
    overlap = (one * two).flatten(1).sum(1) / (one.square().flatten(1).sum(1) * two.square().flatten(1).sum(1)).sqrt()
    assert overlap.median() < 0.1  # but for shadows and reflections
    assert (PAIRS.labels.sum(1) == 2).all()
    assert PAIRS.labels.max() == 1
    again = heed.render_pairs(RUN, 24)
    assert torch.equal(again.ab, PAIRS.ab)
    assert not torch.equal(heed.render_pairs(RUN, 24, seed=1).ab, PAIRS.ab)


class Knowing(nn.Module):
    """Somebody who knows the pairs, whatever part of them is asked for."""

    def __init__(self, rule, pairs):
        super().__init__()
        self.rule, self.pairs, self.one = rule, pairs, nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, x, sigma, labels):
        at = sum(self.seen) % len(self.pairs.ab)
        self.seen.append(len(x))
        part = slice(at, at + len(x))
        mine = heed.Pairs(*(getattr(self.pairs, name)[part] for name in ("ab", "ba", "bb", "labels")))
        assert torch.equal(labels, mine.labels)
        return self.rule(mine, x, sigma)


@pytest.mark.parametrize(("rule", "expected"), [(heed.palette, 0), (heed.count, 1)])
def test_a_model_is_asked_in_parts_with_the_labels_that_belong_to_them(monkeypatch, rule, expected):
    monkeypatch.setattr(heed, "CHUNK", 7)
    model = Knowing(rule, PAIRS)
    rows = heed.heed(RUN, model, (6.0, 9.0), scenes=24)
    assert [row.heed for row in rows] == pytest.approx([expected] * 2, abs=1e-5)
    assert [row.interval for row in rows] == [pytest.approx((expected, expected), abs=1e-5)] * 2
    assert model.seen[:4] == [7, 7, 7, 3]


def test_half_a_count_has_half_the_heed_and_scenes_an_interval():
    """Whoever counts in every other scene and takes the others as a palette."""
    half = torch.arange(24)[:, None, None, None] % 2 == 0
    model = Knowing(lambda p, x, s: torch.where(half, heed.count(p, x, s), heed.palette(p, x, s)), PAIRS)
    (row,) = heed.heed(RUN, model, (6.0,), scenes=24)
    low, high = row.interval
    assert 0 < low < row.heed < high < 1
    assert row.heed == pytest.approx(0.5, abs=0.2)


def test_only_models_that_are_told_colours_can_be_asked():
    with pytest.raises(LcsError, match="not told colours"):
        heed.heed(get_run("grid-all", 3, "mini"), nn.Linear(1, 1))


def test_who_ignores_the_label_does_not_heed():
    """x0hat from the image alone: object 2 is what it looks like, and nothing that object 1 does is an answer to it."""
    shrink = Knowing(lambda _, x, sigma: x / (1 + sigma**2), PAIRS)
    assert all(abs(row.heed) < 0.15 for row in heed.heed(RUN, shrink, scenes=24))


def test_noisy_images_that_were_not_asked_for_could_still_be_what_was():
    """BB is a standard deviation or a few from AB and BA, not so many that no image of the label is near it."""
    for other in (PAIRS.ab, PAIRS.ba):
        apart = (PAIRS.bb - other).flatten(1).norm(dim=1) / (2 * heed.SIGMAS[0])
        assert apart.median() < 2


def test_no_dataset_holds_its_scenes():
    assert DatasetSpec((2,), 10, 64, 10, base_seed=10**6).seed_of(9) < heed.FIRST_SCENE


def test_the_shipped_model_takes_its_label_as_a_palette():
    """As the README says: a model that counted would have to be seen here first."""
    result = CliRunner().invoke(app, ["probe", "color", "--json"])
    assert result.exit_code == 0
    assert "of a count" in result.output
    rows = json.loads(result.output.splitlines()[-1])
    assert [row["sigma"] for row in rows] == list(heed.SIGMAS)
    assert max(abs(row["heed"]) for row in rows) < 0.1
