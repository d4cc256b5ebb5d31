"""Training: schedule, resume, kill -9, process-count independence; what stops it is in test_training_stops.py."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from tiny import QUIET, assert_same, source, state, tiny_run

from lcs.data.files import read_json, write_json
from lcs.data.shards import StreamedScenes
from lcs.errors import LcsError
from lcs.experiments import EXPERIMENTS, Recipe, get_run, with_samples
from lcs.model.build import build_model, trained_network
from lcs.model.layers import MPConv
from lcs.training import checkpoint, trainer
from lcs.training.batches import make_batch, standardise, to_rgb
from lcs.training.trainer import learning_rate, run_settings, train
from lcs.weights import load_stage

REPO = Path(__file__).parents[1]


def test_learning_rate_by_hand():
    recipe = Recipe(batch=100, lr=0.01, lr_decay_batches=50, lr_rampup_samples=1000)
    assert learning_rate(recipe, 0) == 0
    assert learning_rate(recipe, 500) == pytest.approx(0.005)
    assert learning_rate(recipe, 5000) == pytest.approx(0.01)  # batch 50: the decay starts
    assert learning_rate(recipe, 20000) == pytest.approx(0.005)  # batch 200: sqrt(200 / 50) = 2
    assert learning_rate(recipe, 20000, begun=19500) == pytest.approx(0.0025)  # Adam began anew: half up the new ramp
    ending = replace(recipe, samples=30000, lr_anneal=0.5)
    assert learning_rate(ending, 15000) == learning_rate(recipe, 15000)
    assert learning_rate(ending, 24000) == pytest.approx(0.4 * learning_rate(recipe, 24000))


def test_training_learns(tmp_path):
    run = tiny_run("grid-all", samples=1600, batch=16, lr_decay_batches=50)
    train(run, source(), tmp_path, settings=QUIET)
    rows = checkpoint.read_loss_log(tmp_path / "loss.csv")
    assert [r[0] for r in rows] == [1008.0]  # 1,000 samples a row, in whole batches
    assert rows[0][2] < 0.9  # predicting nothing but the best constant scores 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_a_run(straight):
    names = {path.name for path in straight.iterdir()}
    assert names >= {"state.safetensors", "run.json", "loss.csv", "early.safetensors", "mid.safetensors"}
    assert len([n for n in names if n.startswith("snapshot-")]) == trainer.SNAPSHOTS
    metas = [checkpoint.load_meta(straight / f"{s}.safetensors")["samples"] for s in ("early", "mid", "late")]
    assert metas == [8, 32, 64]
    model = load_stage(tiny_run(), straight / "late.safetensors")
    assert not model.training


def test_stopping_and_resuming_is_bit_identical(straight, tmp_path):
    for stop in (16, 40, 1000):
        train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=stop))
    assert_same(state(straight), state(tmp_path))
    late = [checkpoint.load_tensors(f / "late.safetensors")[0] for f in (straight, tmp_path)]
    assert_same(*late)
    assert (straight / "run.json").read_text() == (tmp_path / "run.json").read_text()


def test_resuming_on_one_thread_is_bit_identical(tmp_path):
    """With the loops that only one thread takes, at widths that the weight gradient of our own needs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = tiny_run("grid-all", optimizer="muon", samples=40)
        wide = replace(run.scale.network, channels=16)
        run = replace(run, scale=replace(run.scale, network=wide))
        train(run, source(), tmp_path / "straight", settings=QUIET)
        for stop in (8, 24, 1000):
            train(run, source(), tmp_path / "cut", settings=replace(QUIET, stop_after_samples=stop))
    finally:
        torch.set_num_threads(threads)
    assert_same(state(tmp_path / "straight"), state(tmp_path / "cut"))


def test_kill_9_and_resume_is_bit_identical(straight, tmp_path):
    command = [
        sys.executable,
        "tests/tiny.py",
        "run",
        "grid-single",
        "adam",
        str(tmp_path),
        "0",
        "64",
    ]  # a checkpoint after every step
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "state.safetensors").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (tmp_path / ".state.safetensors.1.tmp").write_bytes(b"half a checkpoint")
    done = checkpoint.load_meta(tmp_path / "state.safetensors")["samples"]
    assert 0 < done < 64
    train(tiny_run(), source(), tmp_path, settings=QUIET)
    assert_same(state(straight), state(tmp_path))
    assert not list(tmp_path.glob(".*.tmp"))


def two_processes(*arguments: str) -> list[subprocess.Popen]:
    """Two workers of one launch, each `python tests/tiny.py ARGUMENTS`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(2):
        env = os.environ | {
            "PYTHONPATH": str(REPO), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "tests/tiny.py", *arguments]
        workers.append(subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True))
    return workers


def finish(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        _, errors = worker.communicate(timeout=240)
        assert worker.returncode == 0, errors


def test_two_processes_equal_one(straight, tmp_path):
    finish(two_processes("run", "grid-single", "adam", str(tmp_path), "1000", "64"))
    one, two = state(straight), state(tmp_path)
    moved = max((one[name] - value).abs().max() for name, value in _initial_state().items())
    assert moved > 0.01
    assert_same(one, two, tolerance=2e-4)


def test_two_processes_equal_one_with_muon_on_patches(tmp_path):
    finish(two_processes("run", "grid-single-local", "muon", str(tmp_path / "two"), "1000", "64"))
    train(tiny_run("grid-single-local", optimizer="muon"), source(), tmp_path / "one", settings=QUIET)
    assert_same(state(tmp_path / "one"), state(tmp_path / "two"), tolerance=2e-3)


def test_an_error_ends_a_launch_of_several_processes(tmp_path):
    """One process that went on to the next run alone would train it on the other's samples of the failed one."""
    out = tmp_path / "runs"
    train(tiny_run("grid-all"), source(), trainer.run_folder(out, tiny_run("grid-all")), seed=1,
          settings=replace(QUIET, stop_after_samples=16))  # fmt: skip
    workers = two_processes("queue", str(out))
    _, errors = workers[0].communicate(timeout=240)  # the main process finds another seed
    assert workers[0].returncode == 1
    assert "other settings (seed)" in errors
    workers[1].kill()  # as a launcher does
    workers[1].communicate()
    assert not (trainer.run_folder(out, tiny_run("grid-single")) / "state.safetensors").exists()


def _initial_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = trained_network(build_model(tiny_run()))
    trainer.normalize_weights_(network)
    return {f"model.{name}": value for name, value in network.state_dict().items()}


def test_two_processes_of_micro_batches_equal_one_batch(straight, tmp_path):
    """Gradients are summed over the parts of a process without talking, then once between processes."""
    finish(two_processes("run", "grid-single", "adam", str(tmp_path), "1000", "64", "3"))
    assert_same(state(straight), state(tmp_path), tolerance=2e-4)


def test_other_images_are_refused(straight, tmp_path):
    half = replace(QUIET, stop_after_samples=32)
    train(tiny_run(), source(), tmp_path, settings=half)
    assert read_json(tmp_path / "run.json")["data"] == "streamed 0"
    with pytest.raises(LcsError, match=r"other settings \(data\)"):
        train(tiny_run(), StreamedScenes((1, 2), 32, base_seed=7), tmp_path, settings=QUIET)
    found = read_json(tmp_path / "run.json")
    del found["data"]  # as earlier versions wrote it
    write_json(tmp_path / "run.json", found)
    train(tiny_run(), source(), tmp_path, settings=QUIET)
    assert read_json(tmp_path / "run.json")["data"] == "streamed 0"
    assert_same(state(straight), state(tmp_path))


def test_micro_batches_equal_one_batch(straight, tmp_path):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, micro_batch=3))
    assert_same(state(straight), state(tmp_path), tolerance=2e-4)


@pytest.mark.parametrize("experiment", ["grid-all", "list-all", "color", "grid-single-local", "list-all-local"])
def test_sample_i_is_the_same_in_any_batch(experiment):
    run = tiny_run(experiment)
    model = build_model(run)
    whole = make_batch(run, model, source(), 0, np.arange(6), torch.device("cpu"))
    part = make_batch(run, model, source(), 0, np.arange(4, 6), torch.device("cpu"))
    per_sample = 2 if run.experiment.local else 1
    for name in ("images", "labels", "sigma", "noise"):
        assert torch.equal(getattr(whole, name)[4 * per_sample :], getattr(part, name)), name
    assert whole.images.shape[0] == 6 * per_sample


def test_noise_has_the_stated_distribution():
    run = tiny_run()
    batch = make_batch(run, build_model(run), source(), 0, np.arange(400), torch.device("cpu"))
    log = batch.sigma.log()
    assert log.mean() == pytest.approx(run.recipe.p_mean, abs=4 * run.recipe.p_std / 20)
    assert log.std() == pytest.approx(run.recipe.p_std, rel=0.15)
    assert batch.noise.mean() == pytest.approx(0, abs=0.01)
    assert batch.noise.std() == pytest.approx(1, abs=0.01)
    assert batch.images.std() == pytest.approx(run.scale.sigma_data, rel=0.3)


def test_every_kind_of_run_has_its_recipe():
    names = {e: get_run(e, 0 if e == "cifar10" else 3, "mini").recipe_name for e in EXPERIMENTS}
    assert names.pop("color") == "color_recipe"
    assert names.pop("cifar10") == "recipe"
    assert {names.pop("grid-single-local"), names.pop("list-all-local")} == {"local_recipe"}
    assert set(names.values()) == {"labelled_recipe"}
    assert {get_run(e, 4, "mini").recipe_name for e in ("grid-all", "grid-random", "color")} == {"grown_recipe"}
    assert get_run("grid-single-local", 5, "mini").recipe_name == "local_recipe"
    assert get_run("grid-all", 6, "mini").grown_from == get_run("grid-all", 5, "mini")
    assert get_run("color", 5, "mini").grown_from == get_run("color", 3, "mini")
    assert get_run("grid-all", 6, "paper").grown_from is None  # the paper's begin at random
    assert get_run("color", 3, "paper").recipe == Recipe() == get_run("grid-all", 3, "paper").recipe  # the paper's
    longer = with_samples(get_run("color", 3, "mini"), 999)
    assert (longer.recipe.samples, longer.scale.labelled_recipe.samples) == (999, 400_000)


def test_a_run_can_begin_at_high_noise():
    run = tiny_run()
    recipe = replace(run.recipe, high_noise_samples=400, high_noise=(3.0, 0.5))
    run = replace(run, scale=replace(run.scale, **{run.recipe_name: recipe}))
    first, then = (
        make_batch(run, build_model(run), source(), 0, np.arange(at, at + 400), torch.device("cpu")).sigma.log()
        for at in (0, 400)
    )
    assert (first.mean(), first.std()) == (pytest.approx(3.0, abs=0.1), pytest.approx(0.5, rel=0.1))
    assert (then.mean(), then.std()) == (
        pytest.approx(recipe.p_mean, abs=3 * recipe.p_std / 20),
        pytest.approx(recipe.p_std, rel=0.15),
    )
    mixed = make_batch(run, build_model(run), source(), 0, np.arange(390, 410), torch.device("cpu")).sigma.log()
    assert torch.equal(mixed, torch.cat([first[390:], then[:10]]))  # the sample's number decides, not the batch


def test_standardise_and_back():
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    assert (to_rgb(standardise(images, tiny_run()), tiny_run()) == images).all()


def test_weights_are_renormalised_after_the_update(straight):
    network = load_stage(tiny_run(), straight / "late.safetensors")
    network.load_state_dict({k.removeprefix("model."): v for k, v in state(straight).items() if k.startswith("model.")})
    for layer in network.modules():
        if isinstance(layer, MPConv):
            assert torch.allclose(layer.weight.flatten(1).square().mean(1), torch.ones(()), atol=1e-3)


def test_posthoc_ema_of_a_tracked_width_is_the_tracked_average(straight):
    tracked = checkpoint.load_tensors(straight / "late.safetensors")[0]
    rebuilt, samples = checkpoint.posthoc_ema(straight, 0.05)
    assert samples == 64
    assert rebuilt.keys() == tracked.keys()
    for name in tracked:
        assert torch.allclose(rebuilt[name].float(), tracked[name], atol=1e-4), name
    wider, _ = checkpoint.posthoc_ema(straight, 0.15)
    assert max((wider[n] - tracked[n]).abs().max() for n in tracked) > 1e-3
    with pytest.raises(LcsError, match="no EMA snapshots"):
        checkpoint.posthoc_ema(straight / "nowhere", 0.1)


def test_posthoc_ema_may_end_at_any_snapshot(straight, tmp_path):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=40))
    then = checkpoint.load_tensors(tmp_path / "state.safetensors")[0]
    rebuilt, samples = checkpoint.posthoc_ema(straight, 0.10, 42)
    assert samples == 40
    off = max((rebuilt[n] - then[f"ema.ema1.{n}"]).abs().max() for n in rebuilt)
    end = max((state(straight)[f"ema.ema1.{n}"] - then[f"ema.ema1.{n}"]).abs().max() for n in rebuilt)
    assert off < 1e-3 < end


def test_a_stage_can_be_rebuilt_with_another_width(tmp_path):
    run = tiny_run()
    folder = trainer.run_folder(tmp_path, run)
    train(run, source(), folder, settings=QUIET)
    path = trainer.reconstruct_stage(run, tmp_path, "mid", 0.12, 40)
    meta = checkpoint.load_meta(path)
    assert (path.name, meta["samples"], meta["ema_std"], meta["stage"]) == ("mid.safetensors", 40, 0.12, "mid")
    with pytest.raises(LcsError, match="unknown stage"):
        trainer.reconstruct_stage(run, tmp_path, "middle", 0.12)


def test_a_run_cannot_end_before_what_it_has_seen(tmp_path):
    run = tiny_run(lr_anneal=0.3)
    train(run, source(), tmp_path, settings=replace(QUIET, stop_after_samples=32))
    before = read_json(tmp_path / "run.json")
    with pytest.raises(LcsError, match="too many samples to end at 34"):  # its rate would have fallen from 23.8 on
        train(tiny_run(lr_anneal=0.3, samples=34), source(), tmp_path, settings=QUIET)
    assert read_json(tmp_path / "run.json") == before
    train(run, source(), tmp_path, settings=QUIET)


def test_a_run_may_end_earlier_while_its_rate_would_have_been_the_same(tmp_path):
    ending = tiny_run(lr_anneal=0.3, samples=40)  # the rate falls from sample 28 on: first felt by the batch at 32
    train(tiny_run(lr_anneal=0.3), source(), tmp_path / "cut", settings=replace(QUIET, stop_after_samples=32))
    train(ending, source(), tmp_path / "cut", settings=QUIET)
    train(ending, source(), tmp_path / "straight", settings=QUIET)
    assert_same(state(tmp_path / "cut"), state(tmp_path / "straight"))


def test_the_end_may_begin_from_the_average(tmp_path):
    """As if the run's averaged weights had been taken at that moment and trained on by themselves."""
    run = tiny_run(lr_anneal=0.4, anneal_average=True, samples=40)  # from sample 24 on
    straight, again, cut = (tmp_path / name for name in ("straight", "again", "cut"))
    train(run, source(), straight, settings=QUIET)
    train(run, source(), cut, settings=replace(QUIET, stop_after_samples=24))
    average = {k.removeprefix("ema.ema0."): v for k, v in state(cut).items() if k.startswith("ema.ema0.")}
    checkpoint.save_tensors(tmp_path / "average.safetensors", average, {"samples": 24})
    train(run, source(), again, settings=QUIET, continued=tmp_path / "average.safetensors")
    train(run, source(), cut, settings=QUIET)
    assert_same(state(straight), state(cut))
    own = lambda folder: {k: v for k, v in state(folder).items() if not k.startswith("ema.")}  # noqa: E731
    assert_same(own(straight), own(again), 2e-3)  # normalised once more, with its eps of 1e-4
    plain = tiny_run(lr_anneal=0.4, samples=40)
    train(plain, source(), tmp_path / "plain", settings=QUIET)
    with pytest.raises(AssertionError):
        assert_same(own(straight), own(tmp_path / "plain"), 2e-3)
    assert learning_rate(run.recipe, 24, 0) == 0  # the ramp begins again
    assert learning_rate(plain.recipe, 24, 0) > 0


def test_a_run_shortened_to_where_it_stopped_is_finished(straight, tmp_path):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=32))
    short = tiny_run(samples=32)
    late = train(short, source(), tmp_path, settings=QUIET)
    assert trainer.is_finished(tmp_path, short)
    assert checkpoint.load_meta(late)["samples"] == 32
    assert torch.equal(
        checkpoint.load_tensors(late)[0]["unet.out_conv.weight"], state(tmp_path)["ema.ema0.unet.out_conv.weight"]
    )


def test_stages_that_a_new_length_moves_are_taken_from_snapshots(tmp_path):
    train(tiny_run(samples=320), source(), tmp_path, settings=replace(QUIET, stop_after_samples=160))
    assert checkpoint.load_meta(tmp_path / "mid.safetensors")["samples"] == 128
    train(tiny_run(samples=168), source(), tmp_path, settings=QUIET)  # 40% of it, 67, is gone; kept were 40, 80, ...
    tensors, meta = checkpoint.load_tensors(tmp_path / "mid.safetensors")
    assert (meta["samples"], meta["stage"]) == (80, "mid")
    snapshot = checkpoint.load_tensors(tmp_path / "snapshot-80.safetensors")[0]
    assert all(torch.allclose(t, snapshot[f"ema0.{n}"], atol=1e-4) for n, t in tensors.items())


def test_other_pixels_are_refused(tmp_path):
    run = tiny_run()
    train(run, source(), tmp_path, settings=replace(QUIET, stop_after_samples=16))
    other = replace(run, scale=replace(run.scale, pixel_mean=(0.4, 0.4, 0.4)))
    with pytest.raises(LcsError, match=r"other settings \(pixels\)"):
        train(other, source(), tmp_path, settings=QUIET)


def test_adam_is_the_papers_whatever_the_number_of_pixels():
    """One step of Adam on the mean over pixels equals one on the paper's sum, also where gradients are tiny."""
    run = tiny_run()
    network = trained_network(build_model(run))
    (weight,) = [p for n, p in network.named_parameters() if n == "unet.out_conv.weight"]
    pixels = 3 * run.scale.resolution**2
    summed = torch.nn.Parameter(weight.detach().clone())
    ours = trainer.build_optimizer(network, run.recipe)
    theirs = torch.optim.Adam([summed], lr=0.01, betas=run.recipe.betas, eps=1e-8)
    summed.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 1e-7
    weight.grad = summed.grad / pixels
    ours.param_groups[0]["lr"] = 0.01
    before = weight.detach().clone()
    ours.step(), theirs.step()
    assert (weight - before).abs().mean() > 0.005
    assert torch.allclose(weight, summed, atol=1e-6)


def test_bf16_stays_close_to_full_precision(straight, tmp_path):  # fp16 needs a GPU: accelerate ignores it elsewhere
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate allows one precision per process
    try:
        train(tiny_run(), source(), tmp_path, settings=replace(QUIET, mixed_precision="bf16"))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    one, other = state(straight), state(tmp_path)
    assert all(t.dtype == torch.float32 for n, t in other.items() if n.startswith("model."))
    moved = {n: (one[n] - v).norm() for n, v in _initial_state().items() if v.ndim > 1 and "label" not in n}
    apart = {n: (one[n] - other[n]).norm() for n in moved}
    assert 0 < sum(apart.values()) < 0.5 * sum(moved.values())


def test_other_settings_are_refused(straight):
    with pytest.raises(LcsError, match=r"other settings \(recipe\)"):
        train(tiny_run(lr=0.5), source(), straight, settings=QUIET)
    with pytest.raises(LcsError, match="seed"):
        train(tiny_run(), source(), straight, seed=1, settings=QUIET)


# ---- going on from bare weights -------------------------------------------------------------------


def test_weights_of_another_network_are_refused(straight, tmp_path):
    run = tiny_run()
    wider = replace(run, scale=replace(run.scale, network=replace(run.scale.network, channel_mult_emb=8)))
    with pytest.raises(LcsError, match="of another network"):
        train(wider, source(), tmp_path, settings=QUIET, continued=straight / "mid.safetensors")


def test_a_run_goes_on_from_bare_weights(straight, tmp_path):
    """Same samples, schedule and EMA clock as the run they come from; only the optimizer starts anew, and the ramp."""
    early = straight / "mid.safetensors"
    at = checkpoint.load_meta(early)["samples"]
    longer = tiny_run()
    train(longer, source(), tmp_path / "on", settings=replace(QUIET, stop_after_samples=at + 16), continued=early)
    tensors, meta = checkpoint.load_tensors(tmp_path / "on" / "state.safetensors")
    assert meta["samples"] == at + 16
    assert meta["ema_steps"] == (at + 16) // longer.recipe.batch
    assert read_json(tmp_path / "on" / "run.json")["continued_at"] == [at]
    given, _ = checkpoint.load_tensors(early)
    name = "unet.out_conv.weight"
    # The first step of the ramp has rate zero: what moves is left to the second.
    assert 0 < (tensors[f"ema.ema0.{name}"] - given[name]).abs().max() < 0.5
    train(longer, source(), tmp_path / "on", settings=QUIET)  # resumes from its own state from then on
    assert checkpoint.load_meta(tmp_path / "on" / "late.safetensors")["continued_at"] == [at]


def test_a_start_that_left_nothing_is_forgotten(straight, tmp_path):
    """Killed before the first checkpoint: the next start decides anew whether to go on from shipped weights."""
    early = straight / "mid.safetensors"
    at = checkpoint.load_meta(early)["samples"]
    write_json(tmp_path / "run.json", run_settings(tiny_run(), 0))
    stop = replace(QUIET, stop_after_samples=at + 8)
    train(tiny_run(), source(), tmp_path, settings=stop, continued=early)
    assert read_json(tmp_path / "run.json")["continued_at"] == [at]
    (tmp_path / "state.safetensors").unlink()
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=8))
    assert "continued_at" not in read_json(tmp_path / "run.json")
    assert checkpoint.load_meta(tmp_path / "state.safetensors")["samples"] == 8


def test_a_run_may_be_made_longer_but_not_changed(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    run = tiny_run()
    longer = with_samples(run, run.recipe.samples + 16)
    train(longer, source(), tmp_path / "run", settings=QUIET)
    assert checkpoint.load_meta(tmp_path / "run" / "late.safetensors")["samples"] == longer.recipe.samples
    assert read_json(tmp_path / "run" / "run.json")["recipe"]["samples"] == longer.recipe.samples


def test_a_run_whose_length_is_no_whole_number_of_batches_may_be_made_longer(tmp_path):
    run = tiny_run()
    batch = run.recipe.batch
    train(with_samples(run, 3 * batch - 1), source(), tmp_path / "run", settings=QUIET)  # ends at 3 batches
    train(with_samples(run, 4 * batch), source(), tmp_path / "run", settings=QUIET)
    assert checkpoint.load_meta(tmp_path / "run" / "late.safetensors")["samples"] == 4 * batch
