"""The benchmarks of compute on a tiny scale: what they report, not how fast this machine is."""

import pytest
from tiny import SCALE

from lcs.bench.compute import bench_compiled, bench_local, bench_sample, bench_train
from lcs.plan import plan

COMMON = {"samples_per_second", "gflops", "gemm_gflops", "share", "median_gflops", "median_share"}


@pytest.mark.parametrize("bench", [bench_train, bench_sample])
def test_shares_of_the_matrix_product(bench):
    result = bench(SCALE, seconds=0)
    assert set(result) == COMMON
    assert result["share"] == pytest.approx(result["gflops"] / result["gemm_gflops"])
    assert 0 < result["median_gflops"] <= result["gflops"]
    assert result["samples_per_second"] > 0


def test_local_is_compared_with_patch_by_patch():
    result = bench_local(SCALE, seconds=0)
    assert set(result) == COMMON | {"naive_seconds", "batched_seconds", "speedup"}
    assert result["speedup"] == pytest.approx(result["naive_seconds"] / result["batched_seconds"])


def test_a_plan_knows_the_data_of_every_run():
    costs = {cost.run: cost for cost in plan(["mini"], 50.0)}
    assert costs["cifar10"].data_gb == pytest.approx(50_000 * 32 * 32 * 3 / 1e9)
    assert costs["grid-all-m3"].data_gb == pytest.approx(3 * 100_000 * 64 * 64 * 3 / 1e9)


@pytest.mark.slow  # C++ is compiled
def test_compiled_steps_are_compared_with_plain_ones():
    result = bench_compiled(SCALE, seconds=0)
    ratio = result["compiled_bf16_samples_per_second"] / result["plain_samples_per_second"]
    assert result["speedup"] == pytest.approx(ratio)
