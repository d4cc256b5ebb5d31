"""Which checkpoints are shipped, a bounded cache of loaded ones, and the one lane in which all computing happens.

A server has one processor for many visitors: handlers that compute share a concurrency group of size one, and the
work itself runs in a thread that holds `_LANE`, so that a cancelled run ends at its next step before another one
starts. `stream` connects the two: the work emits what it has so far, the handler yields it, and closing the handler
(cancel, a closed browser tab) makes the next emit stop the work.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lcs import weights
from lcs.counter.detector import MANIFEST_KEY, Counter, load_counter
from lcs.data.files import read_json
from lcs.errors import LcsError
from lcs.experiments import EXPERIMENTS, Run, get_run, get_scale
from lcs.model.build import trained_network
from lcs.rule import LABELS_ALL

try:  # Hugging Face's ZeroGPU; elsewhere the decorator does nothing
    import spaces

    gpu = spaces.GPU(duration=60)
except ImportError:

    def gpu(function: Callable) -> Callable:
        return function


LANE = {"concurrency_id": "compute", "concurrency_limit": 1}  # of every handler that computes
CACHE_BYTES = 1_000_000_000  # of loaded weights; a paper-size model has 0.5 GB
PREVIEW_SECONDS = 0.15  # between two pictures of a running sampler


# ---- what is there --------------------------------------------------------------------------------


class Models:
    """The checkpoints of one scale in a folder of weights. What is added to the folder later is offered too."""

    def __init__(self, root: Path, scale: str = "mini", stage: str = "late"):
        self.root, self.scale, self.stage = Path(root), get_scale(scale), stage
        self._loaded: OrderedDict[str, nn.Module] = OrderedDict()  # by sha256, the latest used last
        self._counter: tuple[str, Counter] | None = None
        self._lock = threading.Lock()

    def __reduce__(self):
        """ZeroGPU sends arguments to another process: what is loaded here stays here."""
        return Models, (self.root, self.scale.name, self.stage)

    def runs(self, conditional: bool = True) -> dict[str, Run]:
        """Shipped runs by name, in the order of the registry; `conditional`: only those that take conditions."""
        manifest = _manifest(self.root)
        found = {}
        for experiment in EXPERIMENTS.values():
            if experiment.conditioner in LABELS_ALL or (not conditional and experiment.conditioner == "none"):
                for objects in (0,) if experiment.conditioner == "none" else range(1, 7):
                    run = get_run(experiment.name, objects, self.scale.name)
                    if weights.entry_key(run, self.stage) in manifest:
                        found[run.name] = run
        return found

    def run(self, experiment, objects) -> Run:
        """The shipped run of an experiment and a training range, or a refusal that says what there is."""
        runs = self.runs(conditional=False).values()
        if objects in ("0", "1", "2", "3", "4", "5", "6"):  # as the API's page shows it
            objects = int(objects)
        if type(experiment) is str and type(objects) in (int, float):
            for run in runs:
                if run.experiment.name == experiment and run.objects == objects:
                    return run
        there = ", ".join(f"{run.experiment.name} with {run.objects}" for run in runs) or "nothing yet"
        raise LcsError(f"no checkpoint of {str(experiment)[:40]!r} trained on 1..{str(objects)[:10]}; shipped: {there}")

    def named(self, name) -> Run:
        """A shipped run by its name, e.g. grid-all-m3."""
        runs = self.runs(conditional=False)
        if not isinstance(name, str) or name not in runs:
            raise LcsError(f"no checkpoint {str(name)[:40]!r}; shipped: {', '.join(runs) or 'nothing yet'}")
        return runs[name]

    def model(self, run: Run) -> nn.Module:
        """The loaded model; the least recently used ones are dropped to stay below CACHE_BYTES."""
        entry = _manifest(self.root).get(weights.entry_key(run, self.stage), {})
        key = f"{run.name} {entry.get('sha256')}"
        with self._lock:
            if key not in self._loaded:
                loaded = weights.load(run, self.stage, self.root).to(device())
                while self._loaded and sum(map(_bytes, self._loaded.values())) + _bytes(loaded) > CACHE_BYTES:
                    self._loaded.popitem(last=False)
                self._loaded[key] = loaded
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def counter(self) -> Counter:
        sha = _manifest(self.root).get(MANIFEST_KEY, {}).get("sha256", "")
        with self._lock:
            if self._counter is None or self._counter[0] != sha:
                self._counter = (sha, load_counter(self.root))
            return self._counter[1]


def _manifest(root: Path) -> dict[str, dict]:
    path = root / "manifest.json"
    try:
        return read_json(path) if path.exists() else {}
    except LcsError:
        return {}  # being written just now by a training run: the next visitor sees it


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- the lane -------------------------------------------------------------------------------------

_LANE = threading.Lock()


class Cancelled(Exception):
    """Nobody waits for the result any more."""


@dataclass(frozen=True)
class Done:
    """The last thing a stream yields."""

    result: object


@dataclass(frozen=True)
class _Failed:
    error: BaseException


def stream(work: Callable[[Callable[[object], None]], object]) -> Iterator[object]:
    """Yields what `work(emit)` emits (the newest, if several wait) and finally `Done(its result)`."""
    box: queue.Queue = queue.Queue()
    stop = threading.Event()

    def emit(event: object) -> None:
        if stop.is_set():
            raise Cancelled
        box.put(event)

    def run() -> None:
        try:
            with _LANE:
                box.put(Done(work(emit)))
        except Cancelled:
            pass
        except BaseException as error:
            box.put(_Failed(error))

    threading.Thread(target=run, daemon=True, name="lcs-app-work").start()
    try:
        while True:
            event = box.get()
            while not isinstance(event, (Done, _Failed)) and not box.empty():
                event = box.get()
            if isinstance(event, _Failed):
                raise event.error
            yield event
            if isinstance(event, Done):
                return
    finally:
        stop.set()


@contextmanager
def pulses(model: nn.Module, on_pass: Callable[[int], None]):
    """Calls on_pass(number of passes so far) before every pass through the network: progress, and a place to stop.

    A hook rather than an argument, so that it works for anything that runs the model. The lane has one user at a time.
    """
    count = 0

    def before(*_) -> None:
        nonlocal count
        on_pass(count)
        count += 1

    first = next(iter(trained_network(model).unet.enc.values()))
    handle = first.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


class Often:
    """True at most every `seconds`, and the first time."""

    def __init__(self, seconds: float = PREVIEW_SECONDS):
        self.seconds, self.last = seconds, -1e9

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True
