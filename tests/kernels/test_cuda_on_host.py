"""Runs the source of the CUDA kernels on CPU tensors: box copies in test_kernels.py's tests, the generator against its CPU twin.

Threads take turns from barrier to barrier (cuda_on_host/), so this tests neither concurrency nor speed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import random
import sysconfig
from pathlib import Path

import pytest
import test_kernels
import torch

HERE = Path(__file__).parents[1] / "cuda_on_host"
BUILT = sorted(HERE.glob(f"_cuda_on_host*{sysconfig.get_config_var('EXT_SUFFIX')}"))
pytestmark = pytest.mark.skipif(not BUILT, reason="not built: cmake -S tests/cuda_on_host -B build/cuda_on_host, then --build")


def by_cuda(test):
    """A test of test_kernels.py without its `device` parameter."""

    @functools.wraps(test)
    def run(**arguments):
        test(**arguments, device="cpu")

    run.pytestmark = [mark for mark in getattr(test, "pytestmark", []) if mark.args[0] != "device"]
    parameters = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature([p for p in parameters if p.name != "device"])
    return run


test_boxes_of_many_tiles = by_cuda(test_kernels.test_boxes_of_many_tiles)
test_casts = by_cuda(test_kernels.test_casts)
test_copy_boxes = by_cuda(test_kernels.test_copy_boxes)
test_sources = by_cuda(test_kernels.test_expanded_conjugated_and_negated_sources)
test_many_boxes = by_cuda(test_kernels.test_many_boxes)
test_pack_and_unpack = by_cuda(test_kernels.test_pack_and_unpack)
test_parts_with_gaps = by_cuda(test_kernels.test_parts_with_gaps)
test_rows_too_many_for_a_cache = by_cuda(test_kernels.test_rows_too_many_for_a_cache)
test_unpack_reduce = by_cuda(test_kernels.test_unpack_reduce)


@pytest.fixture(scope="module")
def host():
    spec = importlib.util.spec_from_file_location("_cuda_on_host", BUILT[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def kernels_of_cuda(request, host, monkeypatch):
    """Makes test_kernels.py call these kernels. Each of its tests must launch one."""
    monkeypatch.setattr(test_kernels, "_C", host)
    host.launches()
    yield
    assert host.launches() or "draws" in request.node.name


def test_in_a_graph(host):
    """In a graph, the table of boxes travels in kernel arguments, over as many launches as needed."""
    x = torch.randn(500, 4, 8)
    boxes = [([i, i % 4, 0], [1, 4 - i % 4, 8]) for i in range(500)]
    flat, again = torch.zeros(test_kernels.numel(boxes)), torch.zeros(test_kernels.numel(boxes))
    host.pack(x, boxes, flat)
    assert host.launches() == 1
    host.capture(True)
    try:
        host.pack(x, boxes, again)
    finally:
        host.capture(False)
    test_kernels.same(flat, again)
    test_kernels.same(flat, test_kernels.packed(x, boxes))
    assert host.launches() > 1
    host.pack(x, boxes, again)  # outside a graph, one launch again
    assert host.launches() == 1
    host.pack(x, boxes, again)


def test_no_random_numbers_in_a_graph(host):
    """The host picks the key, so every replay would draw the same numbers."""
    x = torch.empty(3)
    host.capture(True)
    try:
        with pytest.raises(RuntimeError, match="every replay would draw the same"):
            host.fill(True, x, 1, [(3, [(0, 3)])], *DRAWS["uniform"], 0, 0)
    finally:
        host.capture(False)
    host.fill(True, x, 1, [(3, [(0, 3)])], *DRAWS["uniform"], 0, 0)


# Kinds in the order of kernels/random.h, with a and b.
DRAWS = {
    "uniform": (0, -2.0, 3.0),
    "normal": (1, 1.0, 2.0),
    "log_normal": (2, 0.5, 0.25),
    "exponential": (3, 1.5, 0.0),
    "cauchy": (4, 1.0, 2.0),
    "geometric": (5, 0.3, 0.0),
    "bernoulli": (6, 0.4, 0.0),
    "integer": (7, 0.0, 0.0),
}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def some_runs(size: int, rng: random.Random) -> list[tuple[int, int]]:
    if rng.random() < 0.3:
        return [(0, size)]
    cuts = sorted(rng.sample(range(size + 1), 2 * rng.randint(1, min(3, (size + 1) // 2))))
    return [(start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=True)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_the_cpus(host, kind, dtype):
    if dtype not in FLOATS and (kind not in ("geometric", "bernoulli", "integer") or (dtype, kind) == (torch.bool, "geometric")):
        for on_cuda in (True, False):
            with pytest.raises(NotImplementedError, match="not implemented for"):
                host.fill(on_cuda, torch.empty(3, dtype=dtype), 1, [(3, [(0, 3)])], *DRAWS[kind], 0, 0)
        return
    rng = random.Random(f"{kind} {dtype}")
    for sizes in [(1,), (7,), (1000,), (5000, 3), (9, 11, 13), (4, 1, 6, 5)]:
        for _ in range(3):
            dims = [(size, some_runs(size, rng)) for size in sizes]
            numel = 1
            for _, runs in dims:
                numel *= sum(length for _, length in runs)
            there, here = (torch.full((numel,), 1, dtype=dtype) for _ in range(2))
            rest = (*DRAWS[kind], rng.randint(-3, 3) if dtype.is_signed else 1, rng.choice([2, 100]) if dtype != torch.bool else 1)
            key = rng.getrandbits(64)
            host.fill(True, there, key, dims, *rest)
            assert host.launches() == 1
            host.fill(False, here, key, dims, *rest)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(there.view(bits), here.view(bits)), (sizes, dims)
