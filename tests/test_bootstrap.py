"""Resampling against closed forms."""

import numpy as np
import pytest

from lcs.bootstrap import interval, mean_of_pairs, quantiles, resamples


def test_interval_of_a_mean_is_the_normal_one():
    x = np.random.default_rng(1).normal(5, 2, 400)
    low, high = interval(lambda chosen: x[chosen].mean(), len(x), draws=4000)
    half = 1.96 * x.std() / np.sqrt(len(x))
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.1 * half)


def test_covers_the_truth_about_as_often_as_it_says():
    random, covered = np.random.default_rng(2), 0
    for _ in range(200):
        x = random.normal(0, 1, 40)
        low, high = interval(lambda chosen, x=x: x[chosen].mean(), len(x), draws=200)
        covered += low <= 0 <= high
    assert 0.88 <= covered / 200 <= 0.98


def test_groups_keep_their_sizes():
    labels = np.array(list("aabbbcb"))
    for picked in resamples(list(labels), draws=50):
        assert sorted(labels[picked]) == sorted(labels)
    assert len(np.unique(resamples(7, draws=50))) == 7
    assert (resamples(7) == resamples(7)).all()  # the same every time
    assert not (resamples(7) == resamples(7, seed=1)).all()


def test_values_that_are_not_numbers_are_left_out():
    assert quantiles([1.0, np.nan, 1.0]) == (1.0, 1.0)
    assert np.isnan(quantiles([np.nan])).all()


def test_pairs_of_one_unit_with_itself_do_not_count():
    matrix = np.array([[9, 1, 2], [1, 9, 4], [2, 4, 9]], float)
    assert mean_of_pairs(matrix, np.arange(3)) == pytest.approx((1 + 2 + 4) / 3)
    assert mean_of_pairs(matrix, np.array([0, 0, 1])) == 1  # drawn twice: a pair with itself says nothing
    assert np.isnan(mean_of_pairs(matrix, np.array([2, 2, 2])))
    assert mean_of_pairs(matrix, np.arange(3), list("aab")) == 1
    assert mean_of_pairs(matrix, np.arange(3), list("aab"), same=False) == 3
