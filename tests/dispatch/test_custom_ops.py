"""Ops of other libraries without a rule: torch.library.custom_op and the like. Their inputs are gathered, and their kernels get plain
tensors, so that they may read memory."""

import math
import os
import subprocess
import sys
import warnings

import pytest
import shardtensor
import torch
from oracle import EVEN, UNEVEN, compare, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C, Replicate, Shard, ShardTensor, strict_mode
from shardtensor.experimental import register_sharding

MESHES = [(2,), (3,), (2, 2)]
LAYOUTS = {1: [("S(0)",), ("S(1)",), ("P",), ("R",)], 2: [("S(0)", "S(1)"), ("S(0)", "S(0)"), ("P", "S(1)"), ("R", "P")]}


def _placed(t, mesh, placements):
    return place(t, mesh, placements, EVEN if placements == ("S(0)", "S(0)") else UNEVEN)


def _values(*sizes):
    return torch.arange(math.prod(sizes), dtype=torch.float64).view(sizes) - 3


def _numpy(t):
    assert type(t) is torch.Tensor, f"the kernel got a {type(t).__name__}"
    return t.detach().numpy()


def _define(name, kernel, mutates=(), **options):
    """Once per process: tests share their ranks."""
    space, _, op = name.partition("::")
    if not hasattr(getattr(torch.ops, space), op):
        torch.library.custom_op(name, kernel, mutates_args=mutates, **options)
    return getattr(getattr(torch.ops, space), op)


def twice(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.from_numpy(_numpy(x) * by)


def parts(xs: list[torch.Tensor], y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    whole = sum(_numpy(x) for x in xs)
    return torch.from_numpy(whole.sum(0)), torch.from_numpy(whole if y is None else whole - _numpy(y))


def grow(x: torch.Tensor, by: torch.Tensor) -> None:
    _numpy(x)[:] += _numpy(by)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@on_ranks(of="shape")
def test_kernels_get_plain_tensors(shape):
    mesh = mesh_of(shape)
    a, b = _values(5, 4), _values(5, 4) * 2
    for devices in (None, "cpu"):
        where = "cpu" if devices else "all"
        doubled = _define(f"st_custom::twice_{where}", twice, device_types=devices)
        added = _define(f"st_custom::parts_{where}", parts, device_types=devices)
        grown = _define(f"st_custom::grow_{where}", grow, ("x",), device_types=devices)
        for first in LAYOUTS[len(shape)]:
            for second in LAYOUTS[len(shape)]:
                x, y = _placed(a, mesh, first), _placed(b, mesh, second)
                out = doubled(x, 2.5)
                assert type(out) is ShardTensor and all(p.is_replicate() for p in out.placements), out
                compare(out, a * 2.5, 1e-12, f"twice {first}")
                rows, whole = added([x, y, x], y)
                compare([rows, whole], [(2 * a + b).sum(0), 2 * a], 1e-12, f"parts {first} {second}")
                compare(added([x])[1], a, 1e-12, "parts of one")
                before = x.placements
                grown(x, y)
                assert x.placements == before
                compare(x, a + b, 1e-12, f"grow {first} {second}")


def _cubed():
    """With a derivative, which is a custom op too."""

    def cube(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(_numpy(x) ** 3)

    def slope(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(3 * _numpy(x) ** 2 * _numpy(grad))

    known = hasattr(torch.ops.st_custom, "cube")
    backward = _define("st_custom::slope", slope)
    op = _define("st_custom::cube", cube)
    if not known:
        torch.library.register_fake("st_custom::slope", lambda x, grad: torch.empty_like(x))
        torch.library.register_fake("st_custom::cube", lambda x: torch.empty_like(x))

        def setup(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        torch.library.register_autograd("st_custom::cube", lambda ctx, grad: backward(*ctx.saved_tensors, grad), setup_context=setup)
    return op


def run_gradients(shape, compiled):
    mesh, cube, a = mesh_of(shape), _cubed(), _values(5, 4)

    def step(x):
        return (cube(x * 2) + x).tanh()

    plain = a.clone().requires_grad_()
    step(plain).sum().backward()
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(step, backend="aot_eager", fullgraph=True)
    else:
        call = step
    for placements in LAYOUTS[len(shape)]:
        if compiled and "P" in placements:
            continue
        x = _placed(a, mesh, placements).requires_grad_()
        out = call(x)
        compare(out, step(plain).detach(), 1e-12, f"{placements}")
        out.sum().backward()
        compare(x.grad, plain.grad, 1e-12, f"gradient {placements}")


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_gradients(pools, shape):
    pools(math.prod(shape)).run(run_gradients, shape, False)


def test_in_graphs(pools):
    pools(2).run(run_gradients, (2,), True)


@on_ranks(2, 3)
def test_other_kinds():
    """A composite stays one: its kernel gets ShardTensors, and its ops use their rules. A sharding of the user's, or a handler, comes
    first, also one that was registered before the op's kernel; without it, the op gathers."""
    mesh, a = mesh_here(), _values(5, 4)
    x = place(a, mesh, ("S(0)",), UNEVEN)
    library = torch.library.Library("st_custom_others", "DEF")
    seen = []

    def kernel(x):
        seen.append(type(x))
        return x * 2

    def calls(op, kind):
        seen.clear()
        _C.reset_comm_counts()
        compare(op(x), a * 2, 0, str(op))
        assert seen == [kind], seen

    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", kernel, "CompositeImplicitAutograd")
    calls(torch.ops.st_custom_others.composite, ShardTensor)
    library.define("by_name(Tensor x) -> Tensor")
    library.impl("by_name", kernel, "CompositeExplicitAutograd")
    calls(torch.ops.st_custom_others.by_name, torch.Tensor)
    library.define("as_cpp.other(Tensor x) -> Tensor")
    library.m.impl("as_cpp.other", "CompositeExplicitAutograd", kernel, False)  # as a C++ library does: Python is not told
    calls(torch.ops.st_custom_others.as_cpp.other, torch.Tensor)

    library.define("later(Tensor x) -> Tensor")
    ShardTensor.register_named_function_handler("st_custom_others::later", lambda x: x * 3)
    library.impl("later", kernel, "CompositeExplicitAutograd")
    later = torch.ops.st_custom_others.later
    compare(later(x), a * 3, 0, "a handler")
    ShardTensor.unregister_handler("st_custom_others::later")
    calls(later, torch.Tensor)

    op = torch.ops.st_custom_others.by_name.default
    torch.library.register_fake("st_custom_others::by_name", lambda x: torch.empty_like(x))
    register_sharding(op)(lambda x: [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])])
    seen.clear()
    out = op(x)
    assert out.placements == x.placements and torch.Tensor in seen and ShardTensor not in seen
    ShardTensor.unregister_handler(op)
    calls(op, torch.Tensor)
    library._destroy()

    # Defined again, as a composite.
    again = torch.library.Library("st_custom_others", "DEF")
    again.define("by_name(Tensor x) -> Tensor")
    again.impl("by_name", kernel, "CompositeImplicitAutograd")
    calls(torch.ops.st_custom_others.by_name, ShardTensor)
    again._destroy()


@on_ranks(2)
def test_strict_mode_refuses():
    x = place(_values(5, 4), mesh_here(), ("S(0)",), UNEVEN)
    op = _define("st_custom::twice_all", twice)
    with strict_mode(), warnings.catch_warnings(), pytest.raises(Exception, match="st_custom::twice_all"):
        warnings.simplefilter("ignore")
        op(x, 2.0)


EARLY = """
import torch, torch.distributed as dist

@torch.library.custom_op("st_early::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)

import shardtensor as st
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = st.distribute_tensor(torch.arange(6.0), st.init_device_mesh("cpu", (1,)), [st.Shard(0)])
assert type(twice(x)) is st.ShardTensor and twice(x).full_tensor().tolist() == [0, 2, 4, 6, 8, 10]
dist.destroy_process_group()
"""


def test_ops_from_before_the_import():
    path = os.pathsep.join([os.path.dirname(os.path.dirname(shardtensor.__file__)), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
