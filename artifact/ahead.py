"""Works out ahead, with a process per core, what the steps will ask for: counted samples, locality, whole steps.

On a CPU one thread per job is about twice as fast as all threads on one job after another. Jobs are small (the samples
of one K, the trace of one checkpoint), so that the cores finish together; a step is drawn as soon as all it shows is
there. Whatever a job leaves is stored under the hash of all it depends on; a killed run goes on with the jobs that are
not done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

from torch import nn
from tqdm import tqdm

from artifact import locality
from artifact.context import Context, Settings
from artifact.steps import Checkpoint, Step
from lcs.counter.detector import Counter, load_counter
from lcs.errors import DiskFull
from lcs.threads import use_threads


@dataclass(frozen=True)
class Job:
    title: str
    seconds: float  # about how long it takes on one core
    work: Callable
    arguments: tuple
    after: frozenset[str] = frozenset()  # titles of the jobs whose results it wants
    draws: bool = False  # it draws a whole step


def work_ahead(settings: Settings, steps: list[Step], draw: Callable[[str, Settings], None]) -> None:
    """Does all that can be done side by side; a job that fails is met again by its step, or as one.

    A step that would be drawn with nothing beside it is left to the caller, which has all threads for it.
    """
    jobs = find_jobs(settings, steps, draw)
    workers = min(len(jobs), os.cpu_count() or 1)
    if settings.device != "cpu" or workers < 2:
        return
    total = sum(job.seconds for job in jobs)
    print(f"{len(jobs)} jobs in {workers} processes: samples, locality, figures (about {clock(total / workers)})",
          flush=True)  # fmt: skip
    start = time.monotonic()
    bar = tqdm(total=total, bar_format="{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left{postfix}")
    try:
        with bar, ending_with_us(ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),))) as pool:
            work_off(jobs, pool, workers, bar)
    except BrokenExecutor:
        print("      a process was killed, perhaps for want of memory: what is left is done in this one", flush=True)
    print(f"      {clock(time.monotonic() - start)}", flush=True)


def work_off(jobs: list[Job], pool: ProcessPoolExecutor, workers: int, bar: tqdm) -> None:
    """All jobs in their order, each once those it comes after are done, but for a step left alone at the end."""
    running: dict[Future, Job] = {}
    waiting = {job.title: job for job in jobs}
    while True:
        under_way = waiting.keys() | {job.title for job in running.values()}
        ready = [job for job in waiting.values() if not job.after & under_way]
        if not running and (not ready or (len(waiting) == 1 and ready[0].draws)):
            return
        for job in ready[: workers - len(running)]:
            running[pool.submit(job.work, *job.arguments)] = waiting.pop(job.title)
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            job, error = running.pop(done), done.exception()
            if isinstance(error, (DiskFull, BrokenExecutor)):
                raise error
            if error is not None and not job.draws:  # a step's own error is told in its turn
                bar.write(f"{job.title}: {error}")
            bar.set_postfix_str(job.title, refresh=False)
            bar.update(min(job.seconds, bar.total - bar.n))


@contextmanager
def ending_with_us(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """The pool, whose jobs are given up at once if anything ends this block early: what is done is stored already."""
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        processes = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise


def _begin(parent: int) -> None:
    """In a worker: one thread; it ends when the main process is gone, however that ended (`kill -9` too)."""
    use_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def find_jobs(settings: Settings, steps: list[Step], draw: Callable[[str, Settings], None]) -> list[Job]:
    """Everything that is not there yet; first what most work hangs on, its own and that of a step waiting for it."""
    counted = dict.fromkeys(c for step in steps if step.counted for c in step.needs(settings.scale))
    traced = dict.fromkeys(c for step in steps if step.traced for c in step.needs(settings.scale))
    context = Context(settings, settings.out, list(counted))
    counts = {
        c: [Job(f"{c.key}, K = {k}", context.seconds_of_k(c), count, (settings, c, k)) for k in context.uncounted(c)]
        for c in context.checkpoints
    }
    context = Context(settings, settings.out, list(traced))
    traces = {
        c: [Job(f"{c.key}, locality", locality.seconds_of_trace(context, c), trace, (settings, c))]
        for c in context.checkpoints
        if not locality.trace_file(context, c).exists()
    }
    jobs = [job for made in (*counts.values(), *traces.values()) for job in made]
    hanging = dict.fromkeys((job.title for job in jobs), 0.0)  # seconds of the longest step that waits for a job
    for step in steps:
        wanted = [made.get(c, []) for made, wants in ((counts, step.counted), (traces, step.traced)) if wants
                  for c in step.needs(settings.scale)]  # fmt: skip
        after = frozenset(job.title for made in wanted for job in made)
        jobs.append(Job(step.name, step.cost * settings.effort.pace, draw, (step.name, settings), after, draws=True))
        hanging |= {title: max(hanging[title], jobs[-1].seconds) for title in after}
    return sorted(jobs, key=lambda job: -job.seconds - hanging.get(job.title, 0.0))


def count(settings: Settings, checkpoint: Checkpoint, k: int) -> None:
    context = Context(settings, settings.out, [checkpoint])
    context.count(checkpoint, k, *_counted_with(settings, checkpoint))


@lru_cache(maxsize=1)  # a process is given the K of one checkpoint after another
def _counted_with(settings: Settings, checkpoint: Checkpoint) -> tuple[nn.Module, Counter]:
    return Context(settings, settings.out, [checkpoint]).model(checkpoint), load_counter()


def trace(settings: Settings, checkpoint: Checkpoint) -> None:
    locality.trace(Context(settings, settings.out, [checkpoint]), checkpoint)


def clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
