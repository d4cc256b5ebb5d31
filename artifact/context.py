"""What a step may ask for: models, counted samples, a place to save.

Counted samples (`Context.counts`) are the expensive part and several steps share them, so they are stored under a hash
of everything they depend on: weights, counter, settings and the code that samples and counts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from tqdm import tqdm

from artifact.steps import Checkpoint, Effort, Output
from lcs import weights
from lcs.conditioning import get_conditioner
from lcs.counter.detector import MANIFEST_KEY, Counter, load_counter
from lcs.data.files import atomic_write, content_hash, read_json, write_json
from lcs.evaluation import evaluate_run, to_markdown
from lcs.rule import KRow, summarise
from lcs.sdxl.package import MINI_ID

LCS = Path(weights.__file__).parent
COUNT_SOURCES = ("evaluation.py", "rule.py", "experiments.py", "sampling.py", "conditioning.py", "rng.py", "weights.py",
                 "diffusion/samplers.py", "model/*.py", "training/batches.py", "counter/data.py", "counter/detector.py",
                 "counter/matching.py", "scenes/world.py")  # fmt: skip
Say = Callable[[str], None] | None
SHOWN = 8  # images per K that are kept beside the counts


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    scale: str
    effort: Effort
    out: Path
    device: str = "cpu"
    seed: int = 0
    samples: int | None = None  # per K, instead of the effort's
    sdxl_model: str = MINI_ID
    sdxl_offload: bool = False  # changes no result
    roots: tuple[Path, ...] = (weights.WEIGHTS,)  # folders of weights; the first that has a checkpoint is used
    stale: tuple[tuple[int, int], ...] = ()  # marks of step files that are drawn again although nothing has changed

    def root_of(self, checkpoint: Checkpoint) -> Path | None:
        """The folder of weights that holds a checkpoint, file and all."""
        for root in self.roots:
            entry = weights.read_manifest(root).get(checkpoint.key)
            if entry is not None and (root / entry["file"]).exists():
                return root
        return None

    def sha256(self, checkpoint: Checkpoint) -> str:
        return weights.read_manifest(self.root_of(checkpoint))[checkpoint.key]["sha256"]


def code_hash(patterns: Sequence[str], *files: Path) -> str:
    """Hash of source files: of lcs/ by pattern, and others."""
    paths = sorted({p for pattern in patterns for p in LCS.glob(pattern)} | set(files))
    return content_hash([p.read_text() for p in paths])


class Context:
    """Handed to a step's `make`. Everything it saves goes into its own folder and its `Output`.

    say: where it tells what it is doing; without it the step is silent, progress bars included. parts: where a step
    that takes minutes may keep what it has so far, until it is drawn.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        checkpoints: list[Checkpoint],
        say: Say = None,
        parts: Path | None = None,
    ):
        self.settings, self.effort, self.folder = settings, settings.effort, folder
        self.parts = parts
        self.say, self.progress = say or (lambda text: None), say is not None
        self.output, self.sampled = Output(), {}
        self.checkpoints = [c for c in checkpoints if settings.root_of(c) is not None]  # those that are there
        self.output.missing = [c.key for c in checkpoints if c not in self.checkpoints]

    # ---- models and samples ----

    def model(self, checkpoint: Checkpoint) -> nn.Module:
        root = self.settings.root_of(checkpoint)
        return weights.load(checkpoint.run, checkpoint.stage, root).to(self.settings.device)

    def uncounted(self, checkpoint: Checkpoint) -> list[int]:
        """The K of a checkpoint whose samples are not there yet."""
        store, ks, _ = self._store(checkpoint)
        return [k for k in ks if not (_row_file(store, k).exists() and _pictures_file(store, k).exists())]

    def seconds_of_k(self, checkpoint: Checkpoint) -> float:
        """About how many seconds the samples of one K take on one core."""
        per_call = 0.2 if checkpoint.run.experiment.local else 0.012
        return self._store(checkpoint)[2] * self.effort.steps * per_call

    def _store(self, checkpoint: Checkpoint) -> tuple[Path, list[int], int]:
        """Folder of the counted samples of a checkpoint, the K and the samples per K."""
        run, effort = checkpoint.run, self.effort
        ks = list(range(len(get_conditioner(run.experiment.conditioner).test_conditions) + 1))
        samples = self.settings.samples or effort.samples_of(checkpoint)
        counter_sha = weights.read_manifest(weights.WEIGHTS).get(MANIFEST_KEY, {}).get("sha256")
        key = content_hash(
            [checkpoint.key, self.settings.sha256(checkpoint), counter_sha, code_hash(COUNT_SOURCES), ks, samples,
             effort.solver, effort.steps, self.settings.seed, self.settings.device]
        )  # fmt: skip
        return self.settings.out / "counts" / f"{run.name}-{checkpoint.stage}-{key}", ks, samples

    def count(self, checkpoint: Checkpoint, k: int, model: nn.Module, counter: Counter) -> None:
        """Draws the samples of one K and stores what was counted and the first pictures."""
        run, effort = checkpoint.run, self.effort
        store, _, samples = self._store(checkpoint)
        part = evaluate_run(
            run, model, [k], samples, effort.steps, effort.solver, self.settings.seed, progress=False, counter=counter,
            on_images=lambda k, images, _: save_png(_pictures_file(store, k), np.concatenate(images[:SHOWN], axis=1)),
        )  # fmt: skip
        write_json(_row_file(store, k), part.to_json())  # last: its presence means all is there

    def counts(self, checkpoint: Checkpoint) -> dict:
        """`RunResult.to_json()`, and under "pictures" the first images of every K: uint8 [n, H, W, 3] by K."""
        store, ks, samples = self._store(checkpoint)
        if left := self.uncounted(checkpoint):
            self.say(f"{checkpoint.run.name} ({checkpoint.stage}): {samples} samples for each of {len(left)} K")
            model, counter = self.model(checkpoint), load_counter()
            for k in tqdm(left, unit="K", disable=not self.progress, desc=checkpoint.run.name):
                self.count(checkpoint, k, model, counter)
        parts = [read_json(_row_file(store, k)) for k in ks]
        rows = [KRow(**row) for part in parts for row in part["rows"]]
        seconds = sum(part["seconds"] for part in parts)
        self.shares(store, seconds)
        result = summarise(checkpoint.run, rows, parts[0]["extras_allowed"], parts[0]["settings"], seconds).to_json()
        result["pictures"] = {k: _read_pictures(_pictures_file(store, k), checkpoint.run.scale.resolution) for k in ks}
        return result

    def shares(self, file: Path, seconds: float) -> None:
        """The step shows what took `seconds` of one core, and which other steps may show too."""
        self.sampled[file] = seconds
        self.output.sampling = round(sum(self.sampled.values()), 1)

    # ---- saving ----

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """As PNG and PDF."""
        for kind in ("png", "pdf"):
            with atomic_write(self.folder / f"{name}.{kind}") as path:
                metadata = {"CreationDate": None} if kind == "pdf" else None  # same input, same bytes
                figure.savefig(path, format=kind, dpi=150, metadata=metadata)
        self.output.figures.append({"file": f"{name}.png", "caption": caption})

    def table(self, name: str, rows: Sequence[dict], caption: str) -> None:
        """As CSV and Markdown; all rows have the same keys."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader(), writer.writerows(rows)
        for suffix, content in (("csv", text.getvalue()), ("md", to_markdown(rows))):
            with atomic_write(self.folder / f"{name}.{suffix}") as path:
                path.write_text(content)
        self.output.tables.append({"file": f"{name}.md", "caption": caption})


def _row_file(store: Path, k: int) -> Path:
    return store / f"k{k:02d}.json"


def _pictures_file(store: Path, k: int) -> Path:
    return store / f"k{k:02d}.png"


def _read_pictures(file: Path, size: int) -> np.ndarray:
    """uint8 [n, size, size, 3] from n pictures side by side."""
    row = np.asarray(Image.open(file).convert("RGB"))
    return np.stack(np.split(row, row.shape[1] // size, axis=1))


def save_png(path: Path, image: np.ndarray) -> None:
    with atomic_write(path) as temporary:
        Image.fromarray(image).save(temporary, format="png")


def settings_dict(settings: Settings) -> dict:
    """What a reader needs to redo it."""
    return {"scale": settings.scale, "effort": asdict(settings.effort), "samples": settings.samples,
            "seed": settings.seed, "device": settings.device, "sdxl_model": settings.sdxl_model}  # fmt: skip
