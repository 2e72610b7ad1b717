from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool import Pool

# Tests, the programs they start and the ranks share few cores. Waiting OpenMP threads would take up those cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Several workers (pytest -n 2) do not share cores: ranks that are preempted while others wait for them take a fifth more time.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores, worker = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, cores[worker :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])] or cores)

# The installed package if there is one; else the one that CMake has built in the source tree.
if importlib.util.find_spec("shardtensor") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(n): the pool of n ranks."""
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        return made.setdefault(world, Pool(world))

    yield get
    for pool in made.values():
        pool.stop()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, pools: Callable[[int], Pool]) -> Pool:
    """A pool of two ranks, then one of four: for tests that must pass on both."""
    return pools(request.param)
