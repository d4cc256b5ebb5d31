import sys
from pathlib import Path

import lcs  # noqa: F401  before torch: it sets how threads wait

# isort: split
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from hub_site import dataset, hub, mine, pinned, project, trained  # noqa: F401  fixtures
from tiny import QUIET, source, tiny_run

from lcs.training.trainer import train

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True, scope="module")
def all_threads():
    """Which loops run, and how they round, depends on the number of threads: no file leaves another one to the next."""
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread():
    """Loops that are for one thread only are used; and small networks gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A tiny run, trained without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    train(tiny_run(), source(), folder, settings=QUIET)
    return folder
