"""Stock DTensors among ShardTensors, and handlers written in Python."""

from __future__ import annotations

import pytest
import shardtensor as st
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from oracle import EVEN, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import Replicate, ShardTensor, implicit_replication
from shardtensor.experimental import register_sharding
from shardtensor.tensor import _handlers
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# Views, of which autograd makes a view, and ops that torch, or our own kernel, makes of others.
HANDLED = {
    "view": (torch.ops.aten.view.default, lambda x: x.view(-1)),
    "detach": (torch.ops.aten.detach.default, lambda x: x.detach()),
    "select": (torch.ops.aten.select.int, lambda x: x[1]),
    "cross_entropy_loss": (torch.ops.aten.cross_entropy_loss.default, lambda x: F.cross_entropy(x, x.detach() * 0 + 0.25)),
    "nll_loss": (torch.ops.aten.nll_loss.default, lambda x: F.nll_loss(x, (x.detach() * 0).sum(1).long())),
    "softmax": (torch.ops.aten.softmax.int, lambda x: x.softmax(1)),
}


COMPOSITES = ("cross_entropy_loss", "nll_loss", "softmax")


def _plain_before(x, s, w):
    return 0.01 * s * s + w.sum() * s + (x * s).sum() + (w * x).square().sum()


def _plain_behind(x, s, w):
    return (x * s).sum() + (w * x).square().sum() + 0.01 * s * s + w.sum() * s


def _twice(x, s, w):
    return (x * s + s * w).square().mean() * s


def _boxed(x, s, w):
    return torch.addcmul(x, x, w, value=0.5).pow(s).sum() + torch.hypot(x, s).sum() + torch.stack([x, x * w]).mean() / s


def _products(x, s, w):
    return (x @ torch.outer(w, w)).sum() * s + torch.nn.functional.linear(x, torch.outer(w, w), w).square().sum()


def _inner(x, s, w):
    return ((w * 3).sin() * x * (s * 3).exp()).square().mean()


def _in_place(x, s, w):
    return (x * 2).mul_(s).add_(w).square().mean()


@on_ranks(2, 3)
def test_plain_parameters():
    """Whether ShardTensors or plain tensors use them, and in any order."""
    whole = torch.arange(1.0, 21.0, dtype=torch.float64).view(5, 4) / 7
    x = place(whole, mesh_of((dist.get_world_size(),)), ("S(0)",), "uneven")
    for loss_of in (_plain_before, _plain_behind, _twice, _boxed, _products, _inner, _in_place):
        scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        weight = torch.nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
        wanted = [p.detach().clone().requires_grad_() for p in (scale, weight)]
        for _ in range(2):  # the second adds to the first
            with implicit_replication():
                loss = loss_of(x, scale, weight)
            loss.backward()  # in autograd's threads, and outside the mode
            loss_of(whole, *wanted).backward()
        for p, q in zip((scale, weight), wanted, strict=True):
            assert type(p.grad) is torch.Tensor, loss_of.__name__
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, f=loss_of: f"{f.__name__}: {m}")
        with implicit_replication():
            (first,) = torch.autograd.grad(loss_of(x, scale, weight), scale, create_graph=True)
            (second,) = torch.autograd.grad(first, scale, allow_unused=True)
        (expected,) = torch.autograd.grad(loss_of(whole, *wanted), wanted[0], create_graph=True)
        (expected2,) = torch.autograd.grad(expected, wanted[0], allow_unused=True)
        torch.testing.assert_close([first, second], [expected, expected2])
        torch.optim.SGD([scale, weight], lr=0.1).step()


@on_ranks(2)
def test_listeners():
    """Ops without a gradient skip autograd, and nothing else."""
    from torch.utils._python_dispatch import TorchDispatchMode

    x, t = (place(torch.arange(10.0).view(5, 2) + i, mesh_of((2,)), ("S(0)",), EVEN) for i in range(2))
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    with Listen():
        x + t
        torch.cat([x, t])
    assert seen == ["aten.add.Tensor", "aten.cat.default"]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        tangent = forward_ad.unpack_dual(dual * 3.0).tangent
        assert tangent.full_tensor().equal(t.full_tensor() * 3)
    w = x.clone().requires_grad_()
    with torch.no_grad():
        assert not (w * 2).requires_grad
    base = x.clone()
    view = base.view(-1)
    base.mul_(w)  # the view requires a gradient only because its base does
    assert (view + 1).requires_grad
    ShardTensor.register_dispatch_handler(torch.ops.aten.mul.Tensor, lambda a, b: a)
    assert (x * t).full_tensor().equal(x.full_tensor())
    _handlers.unregister_handler(torch.ops.aten.mul.Tensor)
    assert (x * t).full_tensor().equal(x.full_tensor() * t.full_tensor())


@on_ranks(2)
def test_a_handler_comes_before_calls_that_are_cached():
    x = place(torch.randn(4, 4, dtype=torch.float64), mesh_of((2,)), ("S(0)",), "even")
    other, aten = x + 1.0, torch.ops.aten
    calls = {
        aten.add.Tensor: lambda: x + x,
        aten.mul.Tensor: lambda: x * 2.0,
        aten.mm.default: lambda: torch.mm(x, x),
        aten.detach.default: lambda: x.detach(),
        aten.cat.default: lambda: torch.cat([x, x]),
        aten._softmax.default: lambda: x.softmax(1),
    }
    for op, call in calls.items():
        before = [call() for _ in range(3)][-1]
        ShardTensor.register_dispatch_handler(op, lambda *args, **kwargs: other)
        got = call()
        _handlers.unregister_handler(op)
        assert got.full_tensor().equal(other.full_tensor()) and call().full_tensor().equal(before.full_tensor()), op


@on_ranks(2)
def test_stock_and_ours_mix():
    mesh = mesh_of((dist.get_world_size(),))
    a, b = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    for cut in ("even", "uneven"):
        ours, stock = place(a, mesh, ("S(0)",), cut), distribute_tensor(b, mesh, [Shard(0)])
        assert type(stock) is not st.ShardTensor
        cases = {
            "ours + stock": (ours + stock, a + b),
            "stock + ours": (stock + ours, a + b),
            "mm": (stock @ ours, b @ a),
            "in place": (ours.clone().add_(stock), a + b),
            "cat": (torch.cat([ours, stock]), torch.cat([a, b])),
            "foreach": (torch._foreach_add([ours, stock], [stock, ours])[1], a + b),
            "argmax": (torch.where(ours > stock, ours, stock).argmax(), torch.where(a > b, a, b).argmax()),
        }
        for name, (got, want) in cases.items():
            assert type(got) is st.ShardTensor, name
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, name=name, cut=cut: f"{name} {cut}: {m}")


@on_ranks(2)
def test_gradient_reaches_stock():
    mesh = mesh_of((dist.get_world_size(),))
    a, b = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    ours = place(a, mesh, ("S(0)",), "uneven")
    stock = distribute_tensor(b, mesh, [Shard(0)]).requires_grad_()
    converted = st.ShardTensor.from_dtensor(stock)
    (converted * ours).sum().backward()
    assert isinstance(stock.grad, DTensor) and not isinstance(stock.grad, st.ShardTensor)
    torch.testing.assert_close(stock.grad.full_tensor(), a)
    # The converted tensor keeps its gradient too, in memory of its own.
    torch.testing.assert_close(converted.grad.full_tensor(), a)
    converted.grad.mul_(0)
    torch.testing.assert_close(stock.grad.full_tensor(), a)
    torch.optim.SGD([converted], lr=1.0)  # refuses what has no .grad
    (converted * ours).sum().backward()
    torch.testing.assert_close(converted.grad.full_tensor(), a)
    torch.testing.assert_close(stock.grad.full_tensor(), 2 * a)
    assert not st.ShardTensor.from_dtensor(stock * 2).retains_grad and not st.ShardTensor.from_dtensor(stock.detach()).requires_grad
    back = place(b, mesh, ("S(1)",), "even").requires_grad_()
    (back.to_dtensor() * 2).sum().backward()
    torch.testing.assert_close(back.grad.full_tensor(), torch.full_like(b, 2))


@on_ranks(2)
def test_handlers():
    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.ones(4, 4), mesh, ("S(0)",), "even")
    seen = []

    def double(a, **kwargs):
        seen.append("dispatch")
        return a * 2

    ShardTensor.register_dispatch_handler(torch.ops.aten.erf.default, double)
    assert torch.erf(x).full_tensor().eq(2).all() and seen == ["dispatch"]
    _handlers.unregister_handler(torch.ops.aten.erf.default)
    assert not torch.erf(x).full_tensor().eq(2).any()

    def gelu(func, types, args, kwargs):
        seen.append("function")
        return func(*args, **kwargs) * 0

    assert ShardTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    ShardTensor.register_function_handler(torch.nn.functional.gelu, gelu)
    y = x.clone().requires_grad_()
    assert torch.nn.functional.gelu(y).full_tensor().eq(0).all() and seen[-1] == "function"
    assert (x + 1).full_tensor().eq(2).all()
    _handlers.unregister_handler(torch.nn.functional.gelu)
    assert ShardTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    assert torch.nn.functional.gelu(x).full_tensor().ne(0).all()

    library = torch.library.Library("shardtensor_test", "DEF")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda t: t * 3, "CPU")
    assert torch.ops.shardtensor_test.thrice(x).full_tensor().eq(3).all()  # the fallback: gathered
    ShardTensor.register_named_function_handler("shardtensor_test::thrice", lambda t: t * 30)
    assert torch.ops.shardtensor_test.thrice(x).full_tensor().eq(30).all()
    _handlers.unregister_handler("shardtensor_test::thrice")
    library._destroy()


@pytest.mark.parametrize("sharding", [False, True], ids=["handler", "sharding"])
@on_ranks(2)
def test_handlers_are_asked_everywhere(sharding):
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    asked: list[str] = []

    def register(name, op):
        def whole_tensors(*args):
            asked.append(name)
            return [([Replicate()], [Replicate() if hasattr(a, "placements") else None for a in args])]

        def on_pieces(*args):
            asked.append(name)
            pieces = [a.to_local() if isinstance(a, ShardTensor) else a for a in args]
            return ShardTensor.from_local(op(*pieces), mesh_here(), [Replicate()])

        register_sharding(op)(whole_tensors) if sharding else ShardTensor.register_dispatch_handler(op, on_pieces)

    for name, (op, f) in HANDLED.items():
        want = f(whole)
        for inference, tracked in ((False, False), (True, False), (True, True), (False, True)):
            register(name, op)
            x = place(whole, mesh_here(), ("R",), "even").requires_grad_(tracked)
            try:
                with torch.inference_mode(inference):
                    got = f(x)
            except NotImplementedError as error:
                assert sharding and tracked and not inference and name in COMPOSITES and "no derivative" in str(error)
                continue
            finally:
                ShardTensor.unregister_handler(op)
            assert asked == [name], (name, inference, tracked)
            asked.clear()
            torch.testing.assert_close(got.detach().to_local(), want)
            if got.requires_grad and not inference:
                plain = whole.clone().requires_grad_()
                f(plain).square().sum().backward()
                got.square().sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        asked.clear()
        f(place(whole, mesh_here(), ("S(0)",), "even").requires_grad_())
        assert not asked, name
