"""What must hold whatever a user does: keys that tell calls apart, roles that a schema gives, threads, late ops, foreign tensors."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import shardtensor as st
import torch
import torch.utils._pytree as pytree
from oracle import EVEN, UNEVEN, compare, lies_as_the_whole, mesh_here, place
from pool import Pool, on_ranks
from shardtensor import _C
from shardtensor.debug import log_gathers
from shardtensor.tensor._layout import make_layout
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("pad", 0j, 1j), ("pad", 1j, 0j), ("norm", 2**63, 2), ("norm", 2.0, 2**63), ("add", True, 1), ("add", 1, 1.5)],
)
@on_ranks(2)
def test_numbers_of_any_kind_are_told_apart(name, first, second):
    """Calls one op with arguments that differ: the second call must not reuse the first's answer."""
    x = torch.arange(6.0).view(3, 2)
    t = place(x.to(torch.complex64) if name == "pad" else x, mesh_here(), ("P" if name == "pad" else "S(0)",), UNEVEN)
    function = {
        "pad": lambda t, value: torch.constant_pad_nd(t, [1, 1], value),
        "norm": torch.linalg.vector_norm,
        "add": torch.add,
    }[name]
    for value in (first, second, first):
        compare(function(t, value), function(t.full_tensor(), value), 1e-6, f"{name} {value}")


@on_ranks(1, 2, 3)
def test_lists_with_other_weights():
    """An op on lists has another rule if its weight is a list of tensors, a list of numbers, or a number."""
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


@on_ranks(1, 2)
def test_custom_ops():
    """A user's op may also read what it writes, even a keyword-only argument. Its name may be defined again."""
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


@on_ranks(2)
def test_any_number_of_operands():
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


class EntersStrict(logging.Handler):
    heard = 0

    def emit(self, record):
        self.heard += 1
        t = place(torch.ones(3, 2), mesh_here(), ("R",), EVEN)
        with st.strict_mode():
            _C.clear_cache()
            for f in (torch.neg, torch.exp, torch.sum, torch.t, torch.relu) * 5:
                f(t)


@on_ranks(2)
def test_tables_are_cleared_while_they_are_filled():
    """Ops without a rule tell Python, before their operands move and at each move. There, handlers clear what is being filled."""
    log = logging.getLogger("shardtensor")
    handler = EntersStrict()
    log.addHandler(handler)
    log_gathers("every", all_ranks=True)
    _C.set_fallback_log(lambda *said: handler.emit(None))
    library = torch.library.Library("shardtensor_safe", "DEF")
    try:
        for i in range(20):
            library.define(f"plus{i}(Tensor x) -> Tensor")
            library.impl(f"plus{i}", lambda x, i=i: x + i, "CPU")
            x = place(torch.ones(5), mesh_here(), ("S(0)",), UNEVEN)
            op = getattr(torch.ops.shardtensor_safe, f"plus{i}")
            for _ in range(2):
                assert op(x).full_tensor().eq(1 + i).all()
        assert handler.heard >= 3 * 20
    finally:
        log.removeHandler(handler)
        log_gathers("off")
        library._destroy()


@on_ranks(2, seconds=60)
def test_threads_share_layouts():
    """Ops release the GIL, so threads make and drop one layout at once: a whole tensor's, which nothing else keeps alive."""
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


@on_ranks(2)
def test_foreign_tensors():
    """Tensors that look like ours to the dispatcher, and `.data` set to the wrong kind of tensor."""
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


@on_ranks(1, 2, 3)
def test_memory_is_the_wholes():
    """Strides, views and overlap are facts of the whole tensor, the same on ranks with two rows, one and none."""
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


@on_ranks(1, 2)
def test_channels_last_stays():
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


    for n in (1, 5):  # a batch of one does not show the order by its strides
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


@on_ranks(1, 2)
def test_failed_calls():
    """Failed calls change nothing. An inference tensor's views stay inference tensors."""
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
    torch.set_warn_always(True)  # otherwise it warns once per process
    try:
        with pytest.warns(UserWarning, match="taken as replicated"):
            compare(torch.tensor([1.0]) + x, torch.full((4,), 2.0), 0, "one element")
    finally:
        torch.set_warn_always(False)
    with pytest.raises(TypeError, match="the mean of a tensor of dtype"):
        st.ShardTensor.from_local(torch.ones(3, dtype=torch.int64), mesh_here(), [st.Partial("avg")]).full_tensor()
    large = st.ShardTensor.from_local(torch.full((3,), 6e4, dtype=torch.half), mesh_here(), [st.Partial("avg")])
    compare(large, torch.full((3,), 6e4, dtype=torch.half), 0, "the mean is not too large")


@on_ranks(2, 3)
def test_sums_of_bools():
    n = mesh_here().size()
    b = st.ShardTensor.from_local(torch.tensor([True, False, mesh_here().get_rank() == 0]), mesh_here(), [st.Partial()])
    plain = b.full_tensor()
    other = st.ShardTensor.from_local(torch.full((3,), 1.0 / n), mesh_here(), [st.Partial()])
    for f in (lambda b, o: b.float(), lambda b, o: b + o, lambda b, o: b * 2.5, lambda b, o: b * b, lambda b, o: b.sum(), lambda b, o: b.to(torch.int64)):
        compare(f(b, other), f(plain, torch.ones(3)), 1e-6, "bools")


def other_histories():
    """What a rank has run before must not change what it decides: each rank warms its caches with calls of its own."""
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

    # On this rank alone: nothing here communicates, and ranks make different numbers of calls.
    quiet = st.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [st.Replicate()])
    for _ in range(rank):
        quiet.select(0, -1), quiet.sum(1), torch.cat([quiet, quiet], 0), torch.cat([quiet, quiet[:0, 0]], 0), quiet.t().softmax(1)
        torch.constant_pad_nd(quiet, [0, 1], 2.0), quiet.view(-1), quiet.unflatten(0, (2, -1)), quiet.as_strided((2, 4), (4, 1), 0)
    for rows, dim, index in ((8, 0, 1), (6, 1, -1), (8, 1, -2), (10, 0, 3), (6, 0, 1)):
        for f, t, x in calls(rows, dim, index):
            compare(f(t), f(x), 1e-5, f"{rows} {dim} {index}")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_other_histories_agree(world):
    pool = Pool(world)  # a new pool, whose ranks have run nothing yet
    try:
        pool.run(other_histories)
    finally:
        pool.stop()


@on_ranks(2, 3)
def test_gradients_move_to_the_same_placements():
    """redistribute() to a tensor's own placements moves only its gradient, as in DTensor. The result can be written."""
    mesh, n = mesh_here(), mesh_here().size()
    for at in (st.Replicate(), st.Shard(0)):
        x = st.distribute_tensor(torch.ones(4), mesh, [at]).requires_grad_()
        local = x.redistribute(placements=[at]).to_local(grad_placements=[st.Partial()] if at == st.Replicate() else None)
        (local * 2).sum().backward()
        assert x.grad.placements == (at,)
        assert x.grad.to_local().eq(2 * n if at == st.Replicate() else 2).all()
    x = place(torch.arange(5.0), mesh, ("S(0)",), UNEVEN).requires_grad_()
    x.redistribute(placements=[st.Shard(0)]).sum().backward()
    assert x.grad.placements == (st.Shard(0),) and x.grad._spec.sharding_shapes() == x._spec.sharding_shapes()
    y = x * 1
    y.redistribute(placements=[st.Shard(0)]).mul_(3)
    compare(y, torch.arange(5.0) * 3, 0, "written")
    (grad,) = torch.autograd.grad(y.sum(), x)
    compare(grad, torch.full((5,), 3.0), 0, "gradient of what was written")
    with torch.no_grad():
        assert x.redistribute(placements=[st.Shard(0)]) is x


@on_ranks(1, 2, 3)
def test_gradients_of_summands():
    """from_local: the derivative of the reduced value with respect to this rank's summand."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    mesh, n, me = mesh_here(), mesh_here().size(), mesh_here().get_local_rank()
    all_of_them = torch.randn(n, 3, 2, dtype=torch.float64) + 0.5
    all_of_them[:, 1] = 2.0  # a tie
    seed = torch.randn(3, 2, dtype=torch.float64)
    for placement, reduce in (
        (st.Partial(), lambda t: t.sum(0)),
        (st.Partial("avg"), lambda t: t.mean(0)),
        (st.Partial("max"), lambda t: t.amax(0)),
        (st.Partial("min"), lambda t: t.amin(0)),
        (st.Partial("product"), lambda t: t.prod(0)),
        (_NormPartial(norm_type=2), lambda t: torch.linalg.vector_norm(t, 2, 0)),
    ):
        plain = all_of_them.clone().requires_grad_()
        want = reduce(plain)
        (want_grad,) = torch.autograd.grad(want, plain, seed)
        for records in (True, False):
            local = all_of_them[me].clone().requires_grad_(records)
            x = st.ShardTensor.from_local(local, mesh, [placement])
            assert x.placements == (placement,), (x.placements, placement)
            compare(x.detach(), want.detach(), 1e-9, str(placement))
            if records:
                (x * place(seed, mesh, ("S(0)",), UNEVEN)).sum().backward()
                torch.testing.assert_close(local.grad, want_grad[me])
    local = torch.ones(2, requires_grad=True)
    x = st.ShardTensor.from_local(local, mesh, [st.Partial("avg")], grad_placements=[st.Partial()])
    x.sum().backward()
    assert local.grad.sum() <= 2  # as grad_placements says: a summand of the gradient


@on_ranks(1, 2)
def test_the_gradient_of_nothing():
    """torch.cat accepts empty tensors of one dim among others. Each gets a ShardTensor as its gradient."""
    mesh = mesh_here()
    x = place(torch.randn(5, 2), mesh, ("S(0)",), UNEVEN).requires_grad_()
    nothing = [st.distribute_tensor(torch.ones(0), mesh, [at]).requires_grad_() for at in (st.Shard(0), st.Replicate())]
    for dim in (0, -1):
        grads = torch.autograd.grad((torch.cat([nothing[0], x, nothing[1]], dim) * 2).sum(), [x, *nothing])
        assert all(isinstance(g, st.ShardTensor) for g in grads), grads
        compare(grads[0], torch.full((5, 2), 2.0), 0, "x")
        assert grads[1].shape == grads[2].shape == (0,)


def test_modes_left_in_the_order_they_were_entered():
    first, second, third = (st.promotion_mode(m) for m in ("replicate", "warn", "replicate"))
    seen = []
    for step in (first.__enter__, second.__enter__, third.__enter__):
        step()
        seen.append(st.get_promotion_mode())
    for context in (second, first, third):
        context.__exit__(None, None, None)
        seen.append(st.get_promotion_mode())
    assert seen == ["replicate", "warn", "replicate", "replicate", "replicate", "error"]


@on_ranks(2)
def test_modes_of_threads():
    """A promotion mode set by a context applies to this thread and to the autograd threads that work for it."""
    x = place(torch.ones(3, 2), mesh_here(), ("S(0)",), UNEVEN)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with st.promotion_mode("replicate"):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    assert st.get_promotion_mode() == "error"
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        x + torch.ones(3, 2)
    leave.set()
    thread.join(30)

    seen = []

    class Deep(torch.autograd.Function):
        """torch runs a backward on another thread if too many are nested on one."""

        @staticmethod
        def forward(ctx, t, depth):
            ctx.depth = depth
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), st.get_promotion_mode()))
            if ctx.depth:
                with torch.enable_grad():
                    leaf = torch.ones(2, requires_grad=True)
                    Deep.apply(leaf, ctx.depth - 1).sum().backward()
            return grad, None

    with st.promotion_mode("warn"):
        st.set_promotion_mode("replicate")  # for threads without a mode of their own
        try:
            Deep.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
        finally:
            st.set_promotion_mode("error")
    assert {mode for _, mode in seen} == {"warn"} and len({ident for ident, _ in seen}) > 1, seen
    assert st.get_promotion_mode() == "error"


@on_ranks(2, 3)
def test_refused_dtypes():
    """A dtype that cannot be added up is refused by all ranks, those without elements too."""
    mesh, n = mesh_here(), mesh_here().size()
    shapes = {0: [(0,)] * (n - 1) + [(4,)]}
    for dtype in (torch.uint16, torch.complex32):
        x = st.ShardTensor.from_local(torch.ones(4).to(dtype), mesh, [st.Partial()])
        with pytest.raises(NotImplementedError, match="not implemented for"):
            x.redistribute(placements=[st.Shard(0)], sharding_shapes=shapes)
    for dtype in (torch.int16, torch.float8_e4m3fn):
        x = st.ShardTensor.from_local(torch.ones(4).to(dtype), mesh, [st.Partial()])
        piece = x.redistribute(placements=[st.Shard(0)], sharding_shapes=shapes).to_local()
        assert piece.dtype == dtype and piece.float().eq(n).all()


@on_ranks(3)
def test_beside_the_mesh():
    """A rank outside the mesh takes no part in ops that gather or read a value on the way, and raises nothing."""
    mesh = DeviceMesh("cpu", [0, 1])
    inside = mesh.get_coordinate() is not None
    whole = torch.arange(9.0).view(3, 3) / 9
    level = st.distribute_tensor(torch.tensor([0.5]), mesh, [st.Replicate()])
    for name, f in {
        "matrix_exp": torch.linalg.matrix_exp,
        "matrix_rank": torch.linalg.matrix_rank,
        "quantile": lambda t: t.quantile(0.5),
        "quantile_of_tensor": lambda t: t.quantile(level if isinstance(t, st.ShardTensor) else torch.tensor([0.5]), dim=0),
    }.items():
        x, p = st.distribute_tensor(whole, mesh, [st.Shard(0)]).requires_grad_(), whole.clone().requires_grad_()
        y, want = f(x), f(p)
        assert y.shape == want.shape and (inside or (y.to_local().eq(0).all() and y.to_local().shape == ((0,) if y.dim() else ()))), name
        if inside:
            torch.testing.assert_close(y.to_local().detach(), want.detach())
        if want.is_floating_point():
            y.sum().backward()
            want.sum().backward()
            assert x.grad.shape == p.grad.shape, name
            if inside:
                torch.testing.assert_close(x.grad.full_tensor(), p.grad)
    x = st.distribute_tensor(whole, mesh, [st.Shard(0)])
    assert torch.equal(x, x) is True and torch.equal(x, x * 2) is (not inside)
    assert x.is_same_size(x) and not x.is_same_size(x[1:])


# Ops without a meta kernel, or whose formula reads values; and a sample of the others.
BESIDE = [
    "__getitem__", "abs", "cdist", "cumprod", "geqrf", "histogram", "index_fill", "masked_fill", "matmul", "max.reduction_no_dim",
    "median", "nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention", "softmax.with_dtype", "std", "to", "unsafe_chunk", "view_as_complex",
]  # fmt: skip


@on_ranks(3)
def test_database_beside_the_mesh():
    """On ranks outside of the mesh, ops and their gradients have torch's sizes and dtypes and are ShardTensors."""
    import opinfo

    mesh = DeviceMesh("cpu", [0, 1])
    for name in BESIDE:
        op = opinfo.database()[name]
        for number, sample in enumerate(opinfo._spread(list(op.sample_inputs("cpu", torch.float32)), 3)):
            flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            plain = [t.detach().clone() if opinfo._is_strided(t) else t for t in flat]
            where = [i for i, t in enumerate(flat) if opinfo._is_strided(t)]
            ours = list(plain)
            for i in where:
                at = st.Shard(0) if plain[i].dim() and number % 2 == 0 else st.Replicate()
                ours[i] = st.distribute_tensor(plain[i], mesh, [at])
            inputs = [i for i in where if plain[i].dtype == torch.float32 and op.supports_autograd]
            for i in inputs:
                plain[i].requires_grad_()
                ours[i].requires_grad_()
            want = [t for t in pytree.tree_leaves(opinfo._call(op, tree, plain)) if isinstance(t, torch.Tensor)]
            with st.implicit_replication():
                got = [t for t in pytree.tree_leaves(opinfo._call(op, tree, ours)) if isinstance(t, torch.Tensor)]
            assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want], (name, number)
            for results, leaves in ((got, ours), (want, plain)):
                roots = [t.abs() if t.is_complex() else t for t in results if t.requires_grad]
                if roots:
                    sum(t.double().sum() for t in roots).backward(inputs=[leaves[i] for i in inputs])
            for i in inputs:
                assert (ours[i].grad is None) == (plain[i].grad is None), (name, number, i)
                assert ours[i].grad is None or (isinstance(ours[i].grad, st.ShardTensor) and ours[i].grad.shape == plain[i].shape), (name, number)
    x = st.distribute_tensor(torch.randn(2, 3), mesh, [st.Shard(0)])
    assert x.type_as(st.zeros(2, dtype=torch.float64, device_mesh=mesh)).dtype == torch.float64
    assert x[[True, False]].shape == (1, 3) and x.to("cpu", torch.float64).shape == (2, 3)
    assert torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.1), torch.tensor(0), 0, 255).shape == (2, 3)
    with st.implicit_replication():
        assert torch.fake_quantize_per_channel_affine(x, torch.ones(2), torch.zeros(2), 0, 0, 255).shape == (2, 3)
    places = st.distribute_tensor(torch.tensor([0, 1]), mesh, [st.Replicate()])
    spectrum, window = torch.randn(9, 20, dtype=torch.complex64), torch.ones(16)
    for kwargs in ({}, {"window": window}, {"window": window, "length": 70}, {"return_complex": True, "onesided": False}):
        values = spectrum if kwargs.get("onesided", True) else torch.randn(16, 20, dtype=torch.complex64)
        want = torch.istft(values, 16, **kwargs)
        if "window" in kwargs:
            kwargs["window"] = w = st.distribute_tensor(window, mesh, [st.Replicate()]).requires_grad_()
        ours = st.distribute_tensor(values, mesh, [st.Shard(1)]).requires_grad_()
        got = torch.istft(ours, 16, **kwargs)
        assert got.shape == want.shape and got.dtype == want.dtype, kwargs
        got.abs().sum().backward()
        assert ours.grad.shape == values.shape and ("window" not in kwargs or w.grad.shape == window.shape)
        if mesh.get_coordinate() is not None:
            torch.testing.assert_close(got.full_tensor(), want)
    if mesh.get_coordinate() is None:
        for f in (torch.nonzero, torch.unique, lambda t: t.masked_select(t > 0), lambda t: torch.tensor_split(t, places)):
            with pytest.raises(NotImplementedError, match=r"rank 2 is not in .*does not have the values that the sizes"):
                f(x)


@on_ranks(1, 2)
def test_pooled_images():
    """Mean-pooling whole images gives the result channels_last strides in place."""
    whole = torch.randn(4, 6, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    for at in ("R", "S(0)", "S(1)", "S(2)", "P"):
        x, p = place(whole, mesh_here(), (at,), UNEVEN).to(memory_format=torch.channels_last).requires_grad_(), whole.clone().requires_grad_()
        y, want = torch.nn.AdaptiveAvgPool2d(1)(x), torch.nn.AdaptiveAvgPool2d(1)(p)
        assert y.stride() == want.stride(), (at, y.stride(), want.stride())
        compare(y.detach(), want.detach(), 1e-9, at)
        (y * y).sum().backward()
        (want * want).sum().backward()
        compare(x.grad, p.grad, 1e-9, at)
    with pytest.raises(NotImplementedError, match="memory or shape of its pieces cannot be replaced in place"):
        place(torch.ones(4, 2), mesh_here(), ("S(0)",), EVEN).as_strided_((2, 4), (4, 1))
    assert isinstance(y, st.ShardTensor)


@on_ranks(2, 3)
def test_tangents_of_one_operand():
    """Forward mode where one operand has a tangent and another has none."""
    g = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((5, 3), (4, 3), (4,)))
    functions = {
        "linear": F.linear,
        "matmul": lambda x, w, b: x @ w.t() * 2,
        "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
        "cat": lambda x, w, b: torch.cat([x, w]).exp(),
        "add": lambda x, w, b: F.linear(x, w) + b,
        "div": lambda x, w, b: F.linear(x, w) / b,
        "layer_norm": lambda x, w, b: F.layer_norm(F.linear(x, w), (4,), b, b),
    }
    layouts = [("S(0)", "R", "R"), ("R", "S(0)", "S(0)"), ("S(1)", "S(1)", "R"), ("P", "S(0)", "P")]
    for name, f in functions.items():
        for which in range(3):
            if name in ("matmul", "cat") and which == 2:
                continue

            def of_one(v, values, f=f, which=which):
                return f(*values[:which], v, *values[which + 1 :])

            plain = [x, w, b]
            tangent = torch.ones_like(plain[which]) * 0.5
            out, want = torch.func.jvp(lambda v, of_one=of_one, plain=plain: of_one(v, plain), (plain[which],), (tangent,))
            for layout in layouts:
                ours = [place(t, mesh_here(), (at,), UNEVEN) for t, at in zip(plain, layout, strict=True)]
                for at in ("R", layout[which]):
                    t = place(tangent, mesh_here(), (at,), UNEVEN)
                    got = torch.func.jvp(lambda v, of_one=of_one, ours=ours: of_one(v, ours), (ours[which],), (t,))
                    compare(got[0], out, 1e-9, f"{name} {which} {layout}")
                    compare(got[1], want, 1e-9, f"tangent of {name} {which} {layout} {at}")


class Wrapped(torch.Tensor):
    """Like the tensors of an all-gather extension: the values are in an inner tensor, and results are wrapped again."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map(lambda a: a.inner if isinstance(a, cls) else a, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return torch.utils._pytree.tree_map(lambda a: cls(a) if isinstance(a, torch.Tensor) else a, out)


@on_ranks(1, 2)
def test_pieces_of_a_class():
    mesh, n, me = mesh_here(), mesh_here().size(), mesh_here().get_local_rank()
    plain = lambda t: t.to_local().detach().inner if isinstance(t.to_local(), Wrapped) else t.to_local()  # noqa: E731

    def made(wrap):
        return torch.nn.Parameter(st.ShardTensor.from_local(wrap(torch.ones(3, 4)), mesh, [st.Shard(0)]))

    def clipped(p):
        p.grad = torch.full_like(p.detach(), 0.5)
        assert torch.nn.utils.clip_grad_norm_([p], 0.25).item() == pytest.approx(0.5 * (12 * n) ** 0.5)
        return p.grad

    for f in (
        lambda p: torch.nn.init.normal_(p),
        lambda p: torch.nn.init.uniform_(p),
        lambda p: torch.nn.init.kaiming_uniform_(p),
        lambda p: torch.nn.init.trunc_normal_(p),  # these two check whether any number is out of range
        lambda p: torch.nn.init.trunc_normal_(p, 0.0, 1.0, 1.5, 3.0),
        lambda p: torch.nn.functional.dropout(p, 0.5),
        clipped,
    ):
        torch.manual_seed(3)
        want = f(made(lambda t: t))
        torch.manual_seed(3)
        assert torch.equal(plain(f(made(Wrapped))), plain(want))
    for foreach in (True, False):
        p = made(Wrapped)
        with torch.no_grad():
            p.mul_(2)
            p.detach()[:, 1:].add_(1)
        (p * (me + 1)).backward(torch.ones_like(p.detach()))
        torch.optim.SGD([p], lr=1.0, foreach=foreach).step()
        want = torch.full((3, 4), 3.0)
        want[:, 0] = 2.0
        assert torch.equal(plain(p), want - (me + 1)), plain(p)
    assert made(Wrapped).sum().item() == 12 * n


@on_ranks(2)
def test_ranks_that_disagree_on_gradients():
    mesh, me = mesh_here(), mesh_here().get_local_rank()
    local = torch.ones(2, 2, requires_grad=me == 1)
    with pytest.raises(ValueError, match="requires grad on rank 1 and not on rank 0"):
        st.ShardTensor.from_local(local, mesh, [st.Shard(0)], run_check=True)
    with torch.no_grad():
        st.ShardTensor.from_local(local, mesh, [st.Shard(0)], run_check=True)
    x = place(torch.ones(5, 2), mesh, ("S(0)",), UNEVEN)
    _C.reset_comm_counts()
    assert torch.ones(5, 2).is_same_size(x) and x.is_same_size(torch.ones(5, 2)) and not x.is_same_size(x.t())
    assert not _C.comm_counts()


@on_ranks(2, 3)
def test_signs_of_norms():
    """A negative value is refused as a norm's summand, whichever rank holds it."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    to = make_layout(mesh_here(), [_NormPartial(norm_type=2)], 1, who="test")
    for at in ("S(0)", "R"):
        x = place(torch.tensor([3.0, 1.0, 2.0, -1.0]), mesh_here(), (at,), UNEVEN)
        with pytest.raises(RuntimeError, match="negative value cannot be kept"):
            _C.redistribute(x, to, None, None, False)
        compare(_C.redistribute(x.abs(), to, None, None, False), torch.tensor([3.0, 1.0, 2.0, 1.0]), 1e-6, at)


@on_ranks(1, 2)
def test_padded_sequences():
    from torch.nn.utils.rnn import pad_sequence

    plain = [torch.randn(n, 3) for n in (4, 6, 5)]
    for at in ("S(0)", "S(1)", "R", "P"):
        ours = [place(t, mesh_here(), (at,), UNEVEN).requires_grad_() for t in plain]
        theirs = [t.clone().requires_grad_() for t in plain]
        for options in ({}, {"batch_first": True, "padding_value": 2.0}, {"padding_side": "left"}):
            got, want = pad_sequence(ours, **options), pad_sequence(theirs, **options)
            compare(got.detach(), want.detach(), 1e-6, f"{at} {options}")
            seed = torch.randn(want.shape)
            grads = torch.autograd.grad(got, ours, place(seed, mesh_here(), ("R",), EVEN))
            compare(list(grads), list(torch.autograd.grad(want, theirs, seed)), 1e-6, f"{at} {options}")
