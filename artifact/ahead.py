"""Works out ahead, with a process per core, what the steps will ask for: counted samples, locality, whole steps.

On a CPU one thread per job is about twice as fast as all threads on one job after another. Jobs are small (the samples
of one K, the trace of one checkpoint), so that the cores finish together, and the longest begin first. Whatever a job
leaves is stored under the hash of all it depends on; a killed run goes on with the jobs that are not done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
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


def work_ahead(settings: Settings, steps: list[Step], draw_alone: Callable[[str, Settings], None]) -> None:
    """Does all that `steps` share or that can be done beside others; a job that fails is met again by its step."""
    jobs = find_jobs(settings, steps, draw_alone)
    workers = min(len(jobs), os.cpu_count() or 1)
    if settings.device != "cpu" or workers < 2:
        return
    total = sum(job.seconds for job in jobs)
    print(f"{len(jobs)} jobs in {workers} processes: samples, locality (about {clock(total / workers)})", flush=True)
    start = time.monotonic()
    bar = tqdm(total=total, bar_format="{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left{postfix}")
    with bar, ending_with_us(ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),))) as pool:
        running = {pool.submit(job.work, *job.arguments): job for job in jobs}
        for done in as_completed(running):
            job = running[done]
            if isinstance(done.exception(), DiskFull):
                raise done.exception()
            if done.exception() is not None:
                bar.write(f"{job.title}: {done.exception()}")
            bar.set_postfix_str(job.title, refresh=False)
            bar.update(min(job.seconds, total - bar.n))
    print(f"      {clock(time.monotonic() - start)}", flush=True)


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


def find_jobs(settings: Settings, steps: list[Step], draw_alone: Callable[[str, Settings], None]) -> list[Job]:
    """Everything that is not there yet, the longest first."""
    counted = dict.fromkeys(c for step in steps if step.counted for c in step.needs(settings.scale))
    traced = dict.fromkeys(c for step in steps if step.traced for c in step.needs(settings.scale))
    context = Context(settings, settings.out, list(counted))
    jobs = [
        Job(f"{c.key}, K = {k}", context.seconds_of_k(c), count, (settings, c, k))
        for c in context.checkpoints
        for k in context.uncounted(c)
    ]
    context = Context(settings, settings.out, list(traced))
    jobs += [
        Job(f"{c.key}, locality", locality.seconds_of_trace(context, c), trace, (settings, c))
        for c in context.checkpoints
        if not locality.trace_file(context, c).exists()
    ]
    pace = settings.effort.pace
    jobs += [Job(s.name, s.cost * pace, draw_alone, (s.name, settings)) for s in steps if s.alone]
    return sorted(jobs, key=lambda job: -job.seconds)


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
