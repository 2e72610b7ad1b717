"""Asynchronous results on CUDA streams and in CUDA graphs, with NCCL and one rank. Needs a GPU; one process for each kind of group.

NCCL's own stream is held back by a sleeping one, so that every race is certain: what should wait and does not reads memory that has
not been written, what should live and does not is overwritten.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

START = """
import sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
import shardtensor as st
from shardtensor import Partial, Replicate, Shard, _C

_C.comm_call_alone(True)
mesh = st.init_device_mesh("cuda", (1,))
n = 1 << 24
main, other, sleeper = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
ones = st.ShardTensor.from_local(torch.ones(n, device="cuda"), mesh, [Partial()], shape=(n,))
tiny = st.ShardTensor.from_local(torch.ones(1024, device="cuda"), mesh, [Partial()], shape=(1024,))


def move(x, to=None):
    return x.redistribute(mesh, [to or Shard(0)], async_op=True)


for to in (Shard(0), Replicate()):
    move(ones, to).to_local()  # communicator, allocator
torch.cuda.synchronize()


def held_back():
    "NCCL's stream waits for about a second; the main stream does not."
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(sleeper):
        torch.cuda._sleep(2_000_000_000)
        return move(tiny)
"""

TESTS = {
    "dropped": """
# A dropped result keeps its memory: new tensors do not get it.
for to in (Shard(0), Replicate()):
    held = held_back()
    y = move(ones, to)
    del y
    zeros = [torch.zeros(n, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    assert not any(int(z.count_nonzero()) for z in zeros), to
    move(tiny).to_local()
    _C.drain_dropped()
    assert _C.dropped_in_flight() == 0
""",
    "packed_input": """
# The first use is on another stream: the sent data stays until NCCL has read it.
for to in (Shard(0), Replicate()):
    held = held_back()
    y = move(ones, to)
    with torch.cuda.stream(other):
        got = y.to_local()
    others = [torch.full((n,), float("nan"), device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    assert int(got.isnan().sum()) == 0 and int((got != 1).sum()) == 0, to
""",
    "each_stream": """
# Every stream that uses the result waits for it.
for to in (Shard(0), Replicate()):
    held = held_back()
    y = move(ones, to)
    with torch.cuda.stream(other):
        y.to_local()
    got = y.to_local().clone()
    torch.cuda.synchronize()
    assert int((got != 1).sum()) == 0, to
    y.to_local()
    with torch.cuda.stream(other):
        assert int((y.to_local() != 1).sum()) == 0
""",
    "kept_until_read": """
# A result that another stream reads is not given away when the tensor is dropped.
y = move(ones)
y.to_local()
with torch.cuda.stream(other):
    torch.cuda._sleep(1_000_000_000)
    got = y.to_local() + 0
del y
others = [torch.full((n,), float("nan"), device="cuda") for _ in range(3)]
torch.cuda.synchronize()
assert int((got != 1).sum()) == 0
""",
    "graph_within": """
# Begun and used within the capture.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = move(ones).to_local() * 2
graph.replay()
torch.cuda.synchronize()
assert int((got != 2).sum()) == 0
""",
    "graph_dropped": """
# Begun and dropped within the capture: the graph is whole.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    move(tiny)
    got = ones.to_local() * 2
graph.replay()
torch.cuda.synchronize()
assert int((got != 2).sum()) == 0
""",
    "used_before": """
# Used before the capture, on another stream than the capture's: the caller has synchronised.
y = move(tiny)
y.to_local()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = y.to_local() * 2
graph.replay()
torch.cuda.synchronize()
assert int((got != 2).sum()) == 0
""",
    "graph_across": """
# Begun before the capture, used within: an error that says so, and the capture goes on.
y = move(tiny)
z = move(tiny)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    try:
        y.to_local()
    except RuntimeError as e:
        assert "began before the capture of a CUDA graph" in str(e), e
    else:
        raise AssertionError("no error")
    del z  # dropped within
    got = ones.to_local() * 2
graph.replay()
torch.cuda.synchronize()
assert int((got != 2).sum()) == 0
assert int((y.to_local() != 1).sum()) == 0  # now it may
_C.drain_dropped()
assert _C.dropped_in_flight() == 0
""",
}


def body(name):
    lines = "".join(f"    {line}\n" for line in TESTS[name].strip().splitlines())
    return f"def {name}():\n{lines}\n\nattempt({name})\n"


ATTEMPT = """
import traceback


def attempt(test):
    try:
        test()
    except BaseException:
        print(test.__name__, traceback.format_exc(limit=-2), flush=True)


"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and NCCL")
@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_streams(backend):
    if backend == "nccl2" and tuple(int(v) for v in torch.__version__.split(".")[:2]) < (2, 14):
        pytest.skip("this torch has no nccl2")
    script = START + ATTEMPT + "".join(body(name) for name in TESTS) + "print('the end')\ndist.destroy_process_group()\n"
    done = subprocess.run([sys.executable, "-c", script, backend], capture_output=True, text=True, timeout=80)
    assert done.stdout == "the end\n", done.stdout + done.stderr[-3000:]


def test_scripts():
    """Without a GPU, too: they are Python."""
    compile(START + ATTEMPT + "".join(body(name) for name in TESTS), "streams", "exec")
