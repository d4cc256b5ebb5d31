"""Runs the steps of the artifact: in order, each at most once per content, resumable, with times.

A step's folder holds what it drew and `step.json` with the hash of all it depends on (weights, settings, code). If
the hash is unchanged the step is not run again; a step works in a hidden folder that replaces the old one only when
it is done. A kill in the moment between leaves the step to be drawn again, from samples that are still there.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import time
import traceback
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from artifact import claims, report
from artifact.ahead import clock, work_ahead
from artifact.context import COUNT_SOURCES, Context, Say, Settings, code_hash, settings_dict
from artifact.registry import STEPS
from artifact.steps import EFFORTS, Checkpoint, Output, Step
from lcs import weights
from lcs.counter.detector import MANIFEST_KEY as COUNTER
from lcs.counter.detector import load_counter
from lcs.data.files import content_hash, read_json, sha256_of, write_json
from lcs.errors import DiskFull, LcsError
from lcs.experiments import get_scale
from lcs.hub.pull import pull, trainer
from lcs.sampling import check_device
from lcs.sdxl.package import MINI_ID, check_files, folder_facts, mini_sha256

HERE = Path(__file__).parent
STEP_FILE = "step.json"  # what a step left behind, in its folder


def run_artifact(
    out: Path,
    scale: str = "mini",
    effort: str = "standard",
    only: str | None = None,
    source: str = "weights",
    samples: int | None = None,
    device: str = "auto",
    seed: int = 0,
    data: Path | None = None,
    root: Path = weights.WEIGHTS,
    keep: Path | None = None,
    cifar: Path | None = None,
    sdxl_model: str = MINI_ID,
    sdxl_offload: bool = False,
    again: bool = False,
) -> bool:
    """Runs everything, or the steps of `only`; True if every step was drawn from all the checkpoints it wants.

    source: "weights" uses what is in `root`, "train" also trains what is missing (into `out`/weights). keep: a folder
    for the small files that the app and the README show. What was drawn before and still holds stays in the report, and
    is drawn anew only with `again`; counted samples and locality behind it are kept all the same.
    """
    began = time.monotonic()
    steps = choose_steps(only)
    if keep is not None:
        report.check_keep(keep)
    settings = check_settings(out, scale, effort, source, samples, device, seed, root, sdxl_model, sdxl_offload)
    wanted = list(dict.fromkeys(c for step in steps for c in step.needs(scale)))
    check_hashes(settings, steps, wanted)
    acquire(settings, wanted, source == "train", data, cifar)
    if again:
        drawn = [file for step in steps if (file := settings.out / step.name / STEP_FILE).exists()]
        settings = replace(settings, stale=tuple(map(_mark, drawn)))
    todo = [step for step in steps if not is_drawn(step, settings)]
    work_ahead(settings, todo, draw_ahead)
    undrawn = [step for step in todo if not is_drawn(step, settings)]
    results: dict[str, Output] = {}
    failures: dict[str, str] = {}
    done = spent = 0.0
    for i, step in enumerate(steps, 1):
        left = sum(s.cost for s in steps[i - 1 :] if s in undrawn) * (spent / done if done else settings.effort.pace)
        print(f"[{i}/{len(steps)}] {step.name}: {step.title} (about {clock(left)} left)", flush=True)
        start = time.monotonic()
        try:
            results[step.name], fresh = run_step(step, settings)
            took = results[step.name].seconds
            note = clock(took) if fresh else f"drawn ahead in {clock(took)}" if step in todo else "unchanged"
            if results[step.name].sampling:
                note += f", its samples and measurements {clock(results[step.name].sampling)} of one core"
            for key in results[step.name].missing:
                print(f"      missing: {key}")
            if fresh:
                done, spent = done + step.cost, spent + time.monotonic() - start
        except DiskFull as error:
            raise LcsError(f"{error}; make room and run the same command again, what is drawn is kept") from None
        except LcsError as error:
            failures[step.name] = str(error)
            note = f"not drawn: {error}"
        except MemoryError:
            raise
        except Exception as error:  # a defect of one step must not cost the others
            failures[step.name] = f"{type(error).__name__}: {error}"
            note = f"failed: {failures[step.name]}"
            traceback.print_exc(file=sys.stderr)
        print(f"      {note}", flush=True)
    everything = earlier_results(settings, steps) | results
    shown = [step for step in STEPS if step in steps or step.name in everything]
    verdicts = claims.judge({name: result.numbers for name, result in everything.items()})
    total = time.monotonic() - began
    wanted = list(dict.fromkeys(c for step in shown for c in step.needs(scale)))
    facts = report.environment(settings_dict(settings), settings, wanted, total)
    report.write(settings.out, shown, everything, failures, verdicts, facts)
    if keep is not None:
        report.keep_small(settings.out, keep, shown, everything, verdicts, facts)
    print(claims.as_text(verdicts))
    complete = not failures and not any(r.missing for r in results.values())
    print(f"{settings.out / 'report.html'}: {len(results)} of {len(steps)} steps in {clock(total)}"
          + ("" if complete else "; not everything could be drawn, see above"))  # fmt: skip
    return complete


def choose_steps(only: str | None) -> list[Step]:
    if only is None:
        return list(STEPS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {name: step for step in STEPS for name in (step.name, *step.also)}
    if unknown := [name for name in names if name not in known]:
        raise LcsError(f"unknown step {unknown[0]!r}; choose from {', '.join(known)}")
    if not names:
        raise LcsError(f"--only names no step; choose from {', '.join(known)}")
    return [step for step in STEPS if step in [known[name] for name in names]]


def check_settings(
    out, scale, effort, source, samples, device, seed, root, sdxl_model=MINI_ID, sdxl_offload=False
) -> Settings:
    get_scale(scale)
    if effort not in EFFORTS:
        raise LcsError(f"unknown effort {effort!r}; choose from {', '.join(EFFORTS)}")
    if source not in ("weights", "train"):
        raise LcsError(f"--from {source!r} is unknown; choose weights or train")
    if samples is not None and not 1 <= samples <= 100_000:
        raise LcsError(f"--samples {samples} is not possible; allowed: 1..100000")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if seed < 0:
        raise LcsError(f"--seed {seed} is not possible; at least 0")
    check_device(device)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise LcsError(f"cannot write to {out}: {error.strerror or error}") from None
    roots = Path(root), out / "weights"
    return Settings(scale, EFFORTS[effort], out, device, seed, samples, sdxl_model, sdxl_offload, roots)


def check_hashes(settings: Settings, steps: list[Step], wanted: list[Checkpoint]) -> None:
    """Damaged weights stop the run before anything is drawn from them."""
    if any(step.counted for step in steps) and COUNTER in weights.read_manifest():  # without one, its steps say so
        load_counter()
    mini = weights.WEIGHTS / MINI_ID
    if settings.sdxl_model == MINI_ID and mini.is_dir() and any(step.name == "sdxl" for step in steps):
        check_files(mini)
    for checkpoint in wanted:
        root = settings.root_of(checkpoint)
        if root is not None:
            entry = weights.read_manifest(root)[checkpoint.key]
            if sha256_of(root / entry["file"]) != entry["sha256"]:
                raise LcsError(f"{root / entry['file']} does not match its sha256 in the manifest; fetch it again")


def acquire(
    settings: Settings, wanted: list[Checkpoint], train: bool, data: Path | None, cifar: Path | None = None
) -> None:
    """Pulls what was published, trains the rest if asked to; what is still missing is reported by the steps."""
    for checkpoint in wanted:
        if settings.root_of(checkpoint) is not None:
            continue
        home = settings.roots[0]
        if "hub" in weights.read_manifest(home).get(checkpoint.key, {}):
            try:
                print(f"{checkpoint.key}: {pull(checkpoint.run, checkpoint.stage, home)}")
                continue
            except LcsError as error:
                print(f"{checkpoint.key}: {error}")
        if train:
            print(f"{checkpoint.key}: training it")
            try:
                runs, home = settings.out / "runs", settings.out / "weights"
                cpu = settings.device == "cpu"
                trainer(runs, checkpoint.stage, home, data, cifar, settings.seed, cpu)(checkpoint.run)
            except DiskFull:
                raise
            except LcsError as error:  # e.g. no scenes with so many objects: the others can go on
                print(f"{checkpoint.key}: {error}")


def draw_ahead(name: str, settings: Settings) -> None:
    """A step as a job of another process, by its name (a `Step` holds functions, which cannot be sent)."""
    run_step(next(step for step in STEPS if step.name == name), settings, say=None)


def run_step(step: Step, settings: Settings, say: Say = print) -> tuple[Output, bool]:
    """The step's output, and whether it was drawn now (False: nothing it depends on has changed)."""
    folder, partial = settings.out / step.name, settings.out / f".{step.name}.partial"
    needs = step.needs(settings.scale)
    there = [c for c in needs if settings.root_of(c) is not None]
    if len(there) < step.least:
        lacking = next(c.key for c in needs if c not in there)
        raise LcsError(
            f"needs {step.least} of {len(needs)} checkpoints, {len(there)} are there; "
            f"pull or train (--from train) the others, e.g. {lacking}"
        )
    key = _key(step, settings, there, needs)
    stored = _stored(folder, key, settings.stale)
    if stored is not None:
        return stored, False
    start = time.monotonic()
    shutil.rmtree(partial, ignore_errors=True)
    context = Context(settings, partial, needs, say, parts=settings.out / "parts" / f"{step.name}-{key}")
    try:
        context.output.numbers = step.make(context)
        context.output.seconds = round(time.monotonic() - start, 1)
        check_declared(step, context.output)
        write_json(partial / STEP_FILE, {"key": key, "output": asdict(context.output)})
        old = settings.out / f".{step.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        for done_with in (settings.out / "parts").glob(f"{step.name}-*"):
            shutil.rmtree(done_with, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return context.output, True


def _key(step: Step, settings: Settings, there: list[Checkpoint], needs: list[Checkpoint]) -> str:
    """Hash of all a step depends on: its checkpoints, the counter, mini-sdxl, the settings and the code."""
    counter = weights.read_manifest(weights.WEIGHTS).get(COUNTER, {}).get("sha256")
    sdxl = [mini_sha256(), folder_facts(settings.sdxl_model)]
    return content_hash([
        step.name, settings_dict(settings), [(c.key, settings.sha256(c)) for c in there], [c.key for c in needs],
        counter, sdxl if step.name == "sdxl" else None,
        code_hash((*COUNT_SOURCES, *step.sources), *imported_here(Path(inspect.getsourcefile(step.make)))),
    ])  # fmt: skip


def imported_here(file: Path) -> set[Path]:
    """A file and all of this folder that it imports, and they."""
    found, new = set(), {file}
    while new:
        found |= new
        lines = [
            line for path in new for line in re.findall(r"^from artifact(?:\.| import )(.+)", path.read_text(), re.M)
        ]
        names = {name for line in lines for name in line.split(" import")[0].split(", ")}
        new = {HERE / f"{name}.py" for name in names} - found
    return found


def check_declared(step: Step, output: Output) -> None:
    """What a step draws is what it says it makes."""
    names = [Path(item["file"]).stem for item in (*output.figures, *output.tables)]
    if other := [name for name in names if not any(fnmatch(name, pattern) for pattern in step.makes)]:
        raise LcsError(f"{step.name} drew {other[0]}, which it does not declare; it makes {', '.join(step.makes)}")


def _mark(file: Path) -> tuple[int, int]:
    """Tells a file from one that replaces it: while both are there they have different numbers."""
    facts = file.stat()
    return facts.st_ino, facts.st_mtime_ns


def _stored(folder: Path, key: str, stale: tuple[tuple[int, int], ...] = ()) -> Output | None:
    """What a step drew earlier, if nothing it depends on has changed, all its files are there and it is not stale."""
    if not (folder / STEP_FILE).exists() or _mark(folder / STEP_FILE) in stale:
        return None
    kinds = {"figures": (".png", ".pdf"), "tables": (".md", ".csv")}
    try:
        stored = read_json(folder / STEP_FILE)
        files = [(folder / item["file"]).with_suffix(suffix) for kind, suffixes in kinds.items()
                 for item in stored["output"][kind] for suffix in suffixes]  # fmt: skip
        if stored["key"] != key or not all(file.exists() for file in files):
            return None
        return Output(**stored["output"])
    except (LcsError, KeyError, TypeError):  # damaged: draw it again
        return None


def is_drawn(step: Step, settings: Settings) -> Output | None:
    """What a step drew before, if that still holds."""
    needs = step.needs(settings.scale)
    there = [c for c in needs if settings.root_of(c) is not None]
    return _stored(settings.out / step.name, _key(step, settings, there, needs), settings.stale)


def earlier_results(settings: Settings, steps: list[Step]) -> dict[str, Output]:
    """Steps that are not drawn now, but were before and are still valid: the report and the claims keep them."""
    found = {step.name: is_drawn(step, replace(settings, stale=())) for step in STEPS if step not in steps}
    return {name: output for name, output in found.items() if output is not None}
