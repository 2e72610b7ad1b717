"""What must hold whatever a user does: keys that tell calls apart, roles that a schema gives, threads, late ops, foreign tensors."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from oracle import EVEN, UNEVEN, compare, mesh_here, place
from pool import Pool


def differ(name, first, second):
    """One op twice, with arguments that differ: the second call must not be answered as the first was."""
    x = torch.arange(6.0).view(3, 2)
    t = place(x.to(torch.complex64) if name == "pad" else x, mesh_here(), ("P" if name == "pad" else "S(0)",), UNEVEN)
    function = {
        "pad": lambda t, value: torch.constant_pad_nd(t, [1, 1], value),
        "norm": torch.linalg.vector_norm,
        "add": torch.add,
    }[name]
    for value in (first, second, first):
        compare(function(t, value), function(t.full_tensor(), value), 1e-6, f"{name} {value}")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("pad", 0j, 1j), ("pad", 1j, 0j), ("norm", 2**63, 2), ("norm", 2.0, 2**63), ("add", True, 1), ("add", 1, 1.5)],
)
def test_numbers_of_any_kind_are_told_apart(pools, name, first, second):
    pools(2).run(f"{__name__}:differ", name, first, second)


def weights_in_lists():
    """Where the other argument is a list of tensors, one holds numbers, or is a number, the rule is another."""
    import shardtensor as st

    mesh, n = mesh_here(), mesh_here().size()

    def summands(value):
        return st.ShardTensor.from_local(torch.full((2,), value / n), mesh, [st.Partial()])

    one, five, quarter = (summands(v) for v in (1.0, 5.0, 0.25))
    for weight, f in ((quarter, "List"), (0.25, "Scalar"), ([0.25], "ScalarList")):
        (out,) = torch._foreach_lerp([one], [five], [weight] if f == "List" else weight)
        compare(out, torch.full((2,), 2.0), 1e-6, f)
    for op, want in ((torch._foreach_addcdiv, 1 + 3 * 5 / 0.25), (torch._foreach_addcmul, 1 + 3 * 5 * 0.25)):
        for scalars in (torch.tensor([3.0]), [3.0], 3.0):
            (out,) = op([one], [five], [quarter], scalars)
            compare(out, torch.full((2,), want), 1e-4, f"{op.__name__} {scalars}")
        two = [st.distribute_tensor(torch.full((5,), float(i)), mesh, [st.Shard(0)]) for i in (1, 2)]
        in_place = {torch._foreach_addcdiv: torch._foreach_addcdiv_, torch._foreach_addcmul: torch._foreach_addcmul_}[op]
        in_place(two, [t.clone() for t in two], [t.clone() for t in two], torch.tensor([3.0, 4.0]))
        plain = [torch.full((5,), float(i)) for i in (1, 2)]
        in_place(plain, [t.clone() for t in plain], [t.clone() for t in plain], torch.tensor([3.0, 4.0]))
        compare(two, plain, 0, op.__name__)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lists_with_other_weights(pools, world):
    pools(world).run(f"{__name__}:weights_in_lists")


def custom_ops():
    """What an op of a user's library writes it may read too, also by name alone; and its name may be defined anew."""
    mesh = mesh_here()
    for times, schema in ((2, "grow(Tensor x, *, Tensor(a!) sum) -> ()"), (3, "grow(Tensor x, float by, *, Tensor(a!) sum) -> ()")):
        library = torch.library.Library("shardtensor_safe", "DEF")
        library.define(schema)
        library.impl("grow", lambda x, *by, sum, times=times: (sum.add_(x * times), None)[1], "CPU")
        for placement in ("R", "S(0)"):
            x = place(torch.ones(5, 2), mesh, ("S(0)",), UNEVEN)
            total = place(torch.full((5, 2), 10.0), mesh, (placement,), UNEVEN)
            torch.ops.shardtensor_safe.grow(x, *([0.5] if times == 3 else []), sum=total)
            assert total.full_tensor().eq(10 + times).all(), (placement, total.full_tensor())
        library._destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_custom_ops(pools, world):
    pools(world).run(f"{__name__}:custom_ops")


def many_operands():
    mesh = mesh_here()
    tensors = [torch.full((3,), float(i)) for i in range(70)]
    ours = [place(t, mesh, ("S(0)",), UNEVEN) for t in tensors]
    out = place(torch.zeros(210), mesh, ("S(0)",), EVEN)
    torch.cat(ours, out=out)
    compare(out, torch.cat(tensors), 0, "cat")
    summands = [place(t, mesh, ("P",), EVEN) for t in tensors]
    stacked = torch.stack(summands)
    assert stacked.placements[0].is_partial()
    compare(stacked, torch.stack(tensors), 1e-6, "stack")
    (one,) = [place(torch.ones(2), mesh, ("S(0)",), EVEN)]
    outs = torch._foreach_add([one] * 33_000, 1.0)
    assert len(outs) == 33_000 and outs[-1].full_tensor().eq(2).all()


def test_any_number_of_operands(pools):
    pools(2).run(f"{__name__}:many_operands")


class EntersStrict(logging.Handler):
    heard = 0

    def emit(self, record):
        import shardtensor as st
        from shardtensor import _C

        self.heard += 1
        t = place(torch.ones(3, 2), mesh_here(), ("R",), EVEN)
        with st.strict_mode():
            _C.clear_cache()
            for f in (torch.neg, torch.exp, torch.sum, torch.t, torch.relu) * 5:
                f(t)


def cleared_meanwhile():
    """Ops without a rule tell the log, whose handler is Python and clears what is being filled."""
    log = logging.getLogger("shardtensor")
    handler, level = EntersStrict(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    library = torch.library.Library("shardtensor_safe", "DEF")
    try:
        for i in range(20):
            library.define(f"plus{i}(Tensor x) -> Tensor")
            library.impl(f"plus{i}", lambda x, i=i: x + i, "CPU")
            x = place(torch.ones(5), mesh_here(), ("S(0)",), UNEVEN)
            op = getattr(torch.ops.shardtensor_safe, f"plus{i}")
            for _ in range(2):
                assert op(x).full_tensor().eq(1 + i).all()
        assert handler.heard >= 20
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        library._destroy()


def test_tables_are_cleared_while_they_are_filled(pools):
    pools(2).run(f"{__name__}:cleared_meanwhile")


def layouts_in_threads():
    """Ops let go of the GIL, so the threads make and drop the same layout at once: that of a whole tensor, which nothing else keeps."""
    from shardtensor import _C

    failed = []

    def work():
        try:
            for _ in range(20_000):
                _C.clear_cache()
                x * 2
        except Exception as error:
            failed.append(error)

    x = place(torch.ones(5, 2), mesh_here(), ("S(0)",), UNEVEN)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed


def test_threads_share_layouts(pools):
    pools(2).run(f"{__name__}:layouts_in_threads", seconds=60)


def foreign_tensors():
    """Tensors that look like ours to the dispatcher, and data that is put into the wrong one."""
    from shardtensor import _C
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = place(torch.ones(4, 2), mesh_here(), ("S(0)",), EVEN)
    wrapped = torch._to_functional_tensor(x)
    assert not _C.is_shard_tensor(wrapped)
    with pytest.raises(TypeError, match="expected a ShardTensor"):
        _C.layout(wrapped)
    with FakeTensorMode() as mode:
        traced = mode.from_tensor(x)
        plain = torch.ones(4, 2)
        for a, b in ((traced, plain), (plain, traced), (x, plain), (plain, x), (torch.ones(4, 2), x), (x, traced)):
            with pytest.raises(RuntimeError, match=r"incompatible tensor type|ShardTensor"):
                a.data = b
    other = place(torch.zeros(4, 2), mesh_here(), ("R",), EVEN)
    x.data = other
    assert x.placements[0].is_replicate() and x.full_tensor().eq(0).all()


def test_foreign_tensors(pools):
    pools(2).run(f"{__name__}:foreign_tensors")


def memory_of_the_whole():
    """Strides, views and overlap are facts of the whole tensor, the same on ranks with two rows, one and none."""
    import shardtensor as st

    mesh = mesh_here()

    def spread(t, dim=0):
        return st.distribute_tensor(t.clone() if t.is_contiguous() else t, mesh, [st.Shard(dim)], src_data_rank=None)

    turned = -torch.arange(1.0, 13).reshape(4, 3).t()  # 3 rows, cut 2 + 1
    for whole in (turned, turned.clone(memory_format=torch.contiguous_format)):
        x, plain = spread(whole), whole.clone()
        assert x.stride() == plain.stride()
        x.flatten().relu_()
        plain.flatten().relu_()
        compare(x, plain, 0, "a copy is written, or the tensor itself")
        compare(torch.as_strided(x, (3,), (1,)), torch.as_strided(plain, (3,), (1,)), 0, "as_strided")
        w, v = (t.detach().clone().requires_grad_() for t in (x, plain))
        for t in (w, v):
            (t * 1).flatten().mul_(3).sum().backward()
        compare(w.grad, v.grad, 0, "gradient")
    parts = spread(torch.ones(4, 4))
    torch.unsafe_split(parts, 2, 1)[0].contiguous().zero_()
    compare(parts, torch.ones(4, 4), 0, "unsafe_split")
    complex_ = torch.view_as_complex(spread(torch.randn(2, 6), 1).t().softmax(0))
    assert complex_.shape == (6,)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        spread(torch.arange(18.0).reshape(3, 6))[:, 1:5].view(12)
    rows = spread(torch.ones(3, 2))
    for write in (torch.Tensor.copy_, torch.Tensor.add_):
        with pytest.raises(RuntimeError, match="single memory location"):
            write(rows[1:], rows[:-1])
    stretched = spread(torch.arange(4.0).reshape(4, 1)).expand(4, 3)
    compare(stretched.redistribute(placements=[st.Replicate()]).add_(1), torch.arange(4.0)[:, None].expand(4, 3) + 1, 0, "no stride of 0")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_memory_is_the_wholes(pools, world):
    pools(world).run(f"{__name__}:memory_of_the_whole")


def channels_last():
    import shardtensor as st
    from oracle import lies_as_the_whole

    torch.manual_seed(0)
    mesh, last = mesh_here(), torch.channels_last
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, padding="same"), torch.nn.BatchNorm2d(6), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(6, 8, 2, groups=2),
        torch.nn.MaxPool2d(2), torch.nn.ZeroPad2d(1), torch.nn.GLU(1), torch.nn.GroupNorm(2, 4), torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(), torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 5),
    ).to(memory_format=last)  # fmt: skip
    image = torch.randn(5, 3, 9, 8).contiguous(memory_format=last)
    seen, wanted = [], []

    def look(into):
        return lambda m, inputs, output: into.append((type(m).__name__, output.stride(), output.is_contiguous(memory_format=last), output))

    import copy

    for n in (1, 5):  # a batch of one tells torch nothing of the order
        ours = st.distribute_module(copy.deepcopy(net), mesh)
        x = st.distribute_tensor(image[:n].contiguous(memory_format=last), mesh, [st.Shard(0)])
        assert x.is_contiguous(memory_format=last) and lies_as_the_whole(x)
        assert x.redistribute(placements=[st.Replicate()]).is_contiguous(memory_format=last)
        assert all(p.stride() == q.stride() for p, q in zip(ours.parameters(), net.parameters(), strict=True))
        seen.clear(), wanted.clear()
        for model, into in ((ours, seen), (net, wanted)):
            for m in model:
                m.register_forward_hook(look(into))
        with torch.no_grad():
            compare(ours.eval()(x), net.eval()(image[:n]), 1e-5, "net")
        for got, want in zip(seen, wanted, strict=True):
            assert got[2] == want[2] or n == 1, (got[:3], want[:3])
            assert lies_as_the_whole(got[3]), got[:3]
        for m in net:
            m._forward_hooks.clear()


@pytest.mark.parametrize("world", [1, 2])
def test_channels_last_stays(pools, world):
    pools(world).run(f"{__name__}:channels_last")


def failed_calls():
    """Change nothing. An inference tensor's views stay inference tensors."""
    import shardtensor as st

    x = place(torch.ones(4, dtype=torch.int64), mesh_here(), ("S(0)",), UNEVEN)
    v = x[:2]
    with pytest.raises(RuntimeError):
        x.add_(1.5)
    compare(v, torch.ones(2, dtype=torch.int64), 0, "a view of what was not written")
    x = place(torch.ones(4), mesh_here(), ("S(0)",), UNEVEN)
    out = place(torch.empty(0, dtype=torch.int64), mesh_here(), ("S(0)",), EVEN)
    with pytest.raises(RuntimeError):
        torch.add(x, x, out=out)
    assert out.shape == (0,)
    with torch.inference_mode():
        t = place(torch.ones(4, 2), mesh_here(), ("S(0)",), UNEVEN)
    assert t.is_inference() and t.detach().is_inference() and t.view(2, 4).is_inference() and not (t * 2).is_inference()
    with pytest.warns(UserWarning, match="taken as replicated"):
        compare(torch.tensor([1.0]) + x, torch.full((4,), 2.0), 0, "one element")
    with pytest.raises(TypeError, match="the mean of a tensor of dtype"):
        st.ShardTensor.from_local(torch.ones(3, dtype=torch.int64), mesh_here(), [st.Partial("avg")]).full_tensor()
    large = st.ShardTensor.from_local(torch.full((3,), 6e4, dtype=torch.half), mesh_here(), [st.Partial("avg")])
    compare(large, torch.full((3,), 6e4, dtype=torch.half), 0, "the mean is not too large")


@pytest.mark.parametrize("world", [1, 2])
def test_failed_calls(pools, world):
    pools(world).run(f"{__name__}:failed_calls")


def sums_of_bools():
    import shardtensor as st

    n = mesh_here().size()
    b = st.ShardTensor.from_local(torch.tensor([True, False, mesh_here().get_rank() == 0]), mesh_here(), [st.Partial()])
    plain = b.full_tensor()
    other = st.ShardTensor.from_local(torch.full((3,), 1.0 / n), mesh_here(), [st.Partial()])
    for f in (lambda b, o: b.float(), lambda b, o: b + o, lambda b, o: b * 2.5, lambda b, o: b * b, lambda b, o: b.sum(), lambda b, o: b.to(torch.int64)):
        compare(f(b, other), f(plain, torch.ones(3)), 1e-6, "bools")


@pytest.mark.parametrize("world", [2, 3])
def test_sums_of_bools(pools, world):
    pools(world).run(f"{__name__}:sums_of_bools")


def other_histories():
    """What a rank has run before must not change what it decides: each rank warms its caches with calls of its own."""
    import shardtensor as st

    mesh = mesh_here()
    rank = mesh.get_local_rank()

    def calls(rows, dim, index):
        x = torch.arange(rows * 4.0).view(rows, 4)
        t = st.distribute_tensor(x, mesh, [st.Shard(0)])
        for f in (
            lambda t: t.select(0, index),
            lambda t: t.sum(dim),
            lambda t: torch.cat([t, t], dim),
            lambda t: torch.cat([t, t[:0, 0]], dim),
            lambda t: t.t().softmax(dim) + t.t(),
            lambda t: torch.constant_pad_nd(t, [0, 1], float(index)),
            lambda t: t.contiguous().view(-1, 2),
            lambda t: t.unflatten(0, (2, -1)),
            lambda t: t.expand(2, rows, 4),
            lambda t: torch.matmul(t, t.t()),
            lambda t: t.as_strided((2, 4), (4, 1), 4),
        ):
            yield f, t, x

    # Alone: nothing here communicates, and what is read of a call differs from rank to rank.
    quiet = st.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [st.Replicate()])
    for _ in range(rank):
        quiet.select(0, -1), quiet.sum(1), torch.cat([quiet, quiet], 0), torch.cat([quiet, quiet[:0, 0]], 0), quiet.t().softmax(1)
        torch.constant_pad_nd(quiet, [0, 1], 2.0), quiet.view(-1), quiet.unflatten(0, (2, -1)), quiet.as_strided((2, 4), (4, 1), 0)
    for rows, dim, index in ((8, 0, 1), (6, 1, -1), (8, 1, -2), (10, 0, 3), (6, 0, 1)):
        for f, t, x in calls(rows, dim, index):
            compare(f(t), f(x), 1e-5, f"{rows} {dim} {index}")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_other_histories_agree(world):
    pool = Pool(world)  # of its own: ranks that have run nothing yet
    try:
        pool.run(f"{__name__}:other_histories")
    finally:
        pool.stop()
