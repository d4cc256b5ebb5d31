"""`lcs bench app`: the app as a visitor meets it, through its HTTP API.

A server of its own process is started cold. Wall-clock seconds are what a visitor waits; on a machine that does other
work they say little, so the server's processor seconds stand beside them. Memory is the server's resident size, its
largest value while `clients` visitors ask for samples at the same moment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from lcs.errors import LcsError
from lcs.experiments import TEST_LOCATIONS
from lcs.weights import WEIGHTS

START_SECONDS = 600  # a start takes 10 s; a machine full of other work needs patience
CONDITIONS = "; ".join(f"{x},{y}" for x, y in TEST_LOCATIONS[:6])


def bench_app(clients: int = 30, weights: Path | None = None) -> dict:
    """Cold start, first and second grid, locality map, and the load test."""
    with _server(weights or WEIGHTS) as (url, process, started):
        result = {"cold_start_seconds": started[0], "cold_start_cpu_seconds": started[1]}
        names = _call(url, "models", [])[1][0]
        standard = next((n for n in names if "local" not in n and not n.startswith(("color", "cifar"))), None)
        if standard is None:
            raise LcsError(f"no standard model in {weights or WEIGHTS}: nothing to measure")
        experiment, objects = standard.rsplit("-m", 1)
        grid = [experiment, int(objects), CONDITIONS, 0, 16, "dpmpp_2m", 4]
        calls = {
            "first_grid": ("sample", grid), "next_grid": ("sample", grid),
            "locality_map": ("locality", [standard, "none", CONDITIONS, 0.65, 0.65, 0]),
        }  # fmt: skip
        for name, (endpoint, values) in calls.items():
            wall, cpu = time.perf_counter(), _cpu(process)
            status, _ = _call(url, endpoint, values)
            if status != "complete":
                raise LcsError(f"{endpoint} did not answer: {status}")
            result[f"{name}_seconds"] = time.perf_counter() - wall
            result[f"{name}_cpu_seconds"] = _cpu(process) - cpu
        result["memory_after_mb"] = process.memory_info().rss / 1e6
        if clients:
            result |= _load(url, process, grid, clients)
        return {"run": standard, **result}


def _load(url: str, process: psutil.Process, grid: list, clients: int) -> dict:
    """`clients` visitors at once; some are answered, the others are told that the queue is full."""
    peak, done = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        outcomes = [s for s, _ in pool.map(lambda i: _call(url, "sample", [*grid[:3], i, *grid[4:]]), range(clients))]
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    return {
        "clients": clients, "answered": outcomes.count("complete"), "refused_politely": outcomes.count("busy"),
        "failed": len(outcomes) - outcomes.count("complete") - outcomes.count("busy"), "load_seconds": took,
        "memory_peak_mb": max(peak) / 1e6,
    }  # fmt: skip


def _call(url: str, endpoint: str, values: list) -> tuple[str, list | None]:
    """("complete", outputs), ("busy", None) if the queue is full, or what went wrong."""
    with httpx.Client(timeout=600) as client:
        sent = client.post(f"{url}/gradio_api/call/{endpoint}", json={"data": values})
        if sent.status_code != 200:
            return ("busy" if sent.status_code == 503 else f"status {sent.status_code}"), None
        event = ""
        with client.stream("GET", f"{url}/gradio_api/call/{endpoint}/{sent.json()['event_id']}") as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: ") and event in ("complete", "error"):
                    return event, json.loads(line.removeprefix("data: "))
    return event or "no answer", None


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def _server(weights: Path):
    """(address, process, (seconds, processor seconds) until the page was served) of a fresh `lcs app`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "lcs",
        "app",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--weights",
        str(weights),
    ]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if child.poll() is not None:
                raise LcsError(f"the app ended: {(child.stderr.read() or b'').decode()[-500:]}")
            if time.perf_counter() - began > START_SECONDS:
                raise LcsError(f"the app did not answer within {START_SECONDS} s")
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        process = psutil.Process(child.pid)
        yield url, process, (time.perf_counter() - began, _cpu(process))
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
