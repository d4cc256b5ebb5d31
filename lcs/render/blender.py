"""Driver of the reference renderer: keeps one Blender process and sends it scenes.

Blender's `bpy` module needs its own virtual environment (another numpy than ours), so it runs as a
subprocess, `lcs.render.blender_worker`, started once and asked many times:

    with BlenderRenderer() as blender:
        result = blender.render(scene, 128, 128, samples=64, denoise=True)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from lcs.errors import LcsError
from lcs.scenes import world
from lcs.scenes.scene import Scene, scene_to_json

PACKAGE = Path(__file__).resolve().parents[1]
PYTHON_VARIABLE = "LCS_BLENDER_PYTHON"
INSTALL = f"run `make blender`, or set {PYTHON_VARIABLE} to a Python 3.11 that can import bpy 4.5"
START_TIMEOUT = 120.0  # seconds; importing bpy the first time reads a few hundred megabytes


@dataclass(frozen=True)
class RenderResult:
    image: np.ndarray  # uint8 [H, W, 3], sRGB
    mask: np.ndarray | None  # uint8 [H, W]: 0 = no object, i + 1 = object i
    linear: np.ndarray | None  # float32 [H, W, 3], scene-linear
    seconds: float  # spent by Blender on this scene


def blender_python() -> Path:
    """The interpreter that has bpy: $LCS_BLENDER_PYTHON, else the one made by `make blender`."""
    return Path(os.environ.get(PYTHON_VARIABLE) or PACKAGE.parent / ".venv-blender" / "bin" / "python")


def blender_available() -> str | None:
    """None when Blender can be used, else one line that says why not and how to install it."""
    python = blender_python()
    if not python.is_file():
        return f"Blender's Python {python} does not exist: {INSTALL}"
    command = [str(python), "-c", "import bpy"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Blender's Python {python} does not run ({error}): {INSTALL}"
    if run.returncode != 0:
        return f"{python} cannot import bpy ({_last_line(run.stderr)}): {INSTALL}"
    return None


class BlenderRenderer:
    """A running Blender; use as a context manager. `threads` = 0 lets Blender take every core."""

    def __init__(self, clevr_assets: Path | None = None, threads: int = 0, timeout: float = 1800.0):
        if threads < 0:
            raise LcsError(f"threads must be 0 (all cores) or more, got {threads}")
        if clevr_assets is not None and not Path(clevr_assets).is_dir():
            raise LcsError(f"--clevr-assets {clevr_assets} is not a directory")
        self.clevr_assets = clevr_assets
        self.threads = threads
        self.timeout = timeout
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> BlenderRenderer:
        reason = blender_available()
        if reason:
            raise LcsError(reason)
        command = [str(blender_python()), "-m", "lcs.render.blender_worker", "--threads", str(self.threads)]
        if self.clevr_assets is not None:
            command += ["--clevr-assets", str(Path(self.clevr_assets).resolve())]
        self._folder = tempfile.TemporaryDirectory(prefix="lcs-blender-")
        folder = Path(self._folder.name)
        self._log = open(folder / "stderr.txt", "w+", errors="replace")
        # The worker must see this package but none of our other packages (numpy above all).
        (folder / "path").mkdir()
        (folder / "path" / "lcs").symlink_to(PACKAGE, target_is_directory=True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(folder / "path")},
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._collect, args=(self._process, self._answers), daemon=True).start()
        try:
            self._answer(START_TIMEOUT)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # it holds nothing worth saving
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):  # a request the dead worker never read
                stream.close()
        self._process = None
        self._folder.cleanup()

    def render(
        self,
        scene: Scene,
        width: int,
        height: int,
        samples: int = world.CYCLES_SAMPLES,
        denoise: bool = False,
        linear: bool = False,
        mask: bool = True,
        seed: int = 0,
    ) -> RenderResult:
        """One scene. `seed` is that of Cycles' noise, not of the scene."""
        if self._process is None:
            raise LcsError("BlenderRenderer is closed: use it in a `with` block")
        for name, value in (("width", width), ("height", height), ("samples", samples)):
            if value < 1:
                raise LcsError(f"{name} must be at least 1, got {value}")
        if len(scene.objects) > 255:
            raise LcsError(f"a mask holds at most 255 objects, the scene has {len(scene.objects)}")
        with tempfile.TemporaryDirectory(dir=self._folder.name) as out:
            request = {
                "scene": scene_to_json(scene),
                "width": width,
                "height": height,
                "samples": samples,
                "denoise": denoise,
                "seed": seed,
                "mask": mask,
                "linear": linear,
                "out": out,
            }
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                raise LcsError(self._death()) from None
            seconds = self._answer(self.timeout)["seconds"]
            with Image.open(Path(out) / "image.png") as picture:
                image = np.asarray(picture.convert("RGB"))
            load = lambda name: np.load(Path(out) / name, allow_pickle=False)  # noqa: E731
            return RenderResult(
                image, load("mask.npy") if mask else None, load("linear.npy") if linear else None, seconds
            )

    @staticmethod
    def _collect(process: subprocess.Popen, answers: queue.Queue) -> None:
        for line in process.stdout:
            answers.put(line)
        answers.put(None)  # end of output: the worker is gone

    def _answer(self, timeout: float) -> dict:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise LcsError(f"Blender did not answer within {timeout:g} seconds and was stopped") from None
        if line is None:
            raise LcsError(self._death())
        answer = json.loads(line)
        if not answer["ok"]:
            raise LcsError(f"Blender: {answer['error']}")
        return answer

    def _death(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return f"Blender stopped with exit code {code}: {_last_line(self._log.read())}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
