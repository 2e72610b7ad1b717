from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(n): the pool of n ranks."""
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        return made.setdefault(world, Pool(world))

    yield get
    for pool in made.values():
        pool.stop()
