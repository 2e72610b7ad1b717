"""Every optimizer step (loop, foreach or fused) on parameters of any layout equals plain torch's."""

from __future__ import annotations

import copy

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C
from torch import nn

OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9),
    "Adam": dict(lr=0.01),
    "AdamW": dict(lr=0.01, amsgrad=True),
    "NAdam": dict(lr=0.01),
    "RAdam": dict(lr=0.01),
    "Adamax": dict(lr=0.01),
    "Adagrad": dict(lr=0.1),
    "Adadelta": dict(lr=0.1),
    "RMSprop": dict(lr=0.01, momentum=0.5),
    "Rprop": dict(lr=0.01),
    "ASGD": dict(lr=0.01),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
PLACEMENTS = ["R", "S(0)", "S(1)"]
GRADIENTS = ["R", "S(0)", "P"]


def step_equals_torch(name, how, options):
    mesh = mesh_of((dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    plain, ours = [], []
    for p in PLACEMENTS:
        for g in GRADIENTS:
            for cut in (EVEN, UNEVEN):
                value = torch.randn(5, 4, generator=generator, dtype=torch.float64)
                gradient = torch.randn(5, 4, generator=generator, dtype=torch.float64)
                plain.append(torch.nn.Parameter(value.clone()))
                plain[-1].grad = gradient.clone()
                ours.append(torch.nn.Parameter(place(value, mesh, (p,), cut)))
                ours[-1].grad = place(gradient, mesh, (g,), cut)
    flags = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}[how]
    for params in (plain, ours):
        optimizer = getattr(torch.optim, name)(params, **options, **flags)
        for _ in range(3):
            optimizer.step()
    compare(ours, plain, 1e-9, f"{name} {how}")
    assert all(type(p) is type(ours[0]) for p in ours)
    return len(ours)


def gradients_move_together(how):
    """Gradients move to their parameters' layouts in as few collectives as one needs. The step itself does not communicate."""
    mesh = mesh_of((dist.get_world_size(),))
    flags = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}[how]
    ours = [torch.nn.Parameter(place(torch.randn(5, 4, dtype=torch.float64), mesh, (p,), UNEVEN)) for p in PLACEMENTS * 2]
    optimizer = torch.optim.AdamW(ours, lr=0.01, **flags)
    seen = []
    for gradient in ("P", "S(0)"):
        for p in ours:
            p.grad = place(torch.randn(5, 4, dtype=torch.float64), mesh, (gradient,), UNEVEN)
        versions = [p._version for p in ours]
        _C.reset_comm_counts()
        optimizer.step()
        seen.append({kind: calls for kind, (calls, _) in _C.comm_counts().items()})
        assert all(p._version > v for p, v in zip(ours, versions, strict=True))
    return seen


def beside_plain_parameters(name, how, options):
    """Plain parameters between ShardTensors, and gradients in summands: they are reduced together."""
    mesh = mesh_of((dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    large = 2**15 + 1
    plain, ours = [], []
    for place_of_p, place_of_g, sizes in [
        (None, None, (3,)), ("R", "P", (5, 4)), ("S(0)", "S(0)", (5, 4)), ("R", "P", (7,)), (None, None, (2, 3)), ("R", "P", (large,)),
        ("R", "P", ()), ("S(0)", "P", (5, 4)), ("R", "R", (4,)),
    ]:  # fmt: skip
        value, gradient = (torch.randn(sizes, generator=generator, dtype=torch.float64) for _ in range(2))
        plain.append(torch.nn.Parameter(value.clone()))
        plain[-1].grad = gradient.clone()
        ours.append(torch.nn.Parameter(place(value, mesh, (place_of_p,), UNEVEN) if place_of_p else value.clone()))
        ours[-1].grad = place(gradient, mesh, (place_of_g,), EVEN if place_of_g == "P" else UNEVEN) if place_of_g else gradient.clone()
    flags = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}[how]
    steps = [getattr(torch.optim, name)(params, **options, **flags).step for params in (plain, ours)]
    steps[0]()
    _C.reset_comm_counts()
    steps[1]()
    calls = {kind: calls for kind, (calls, _) in _C.comm_counts().items() if calls}
    steps[0]()
    steps[1]()
    compare([p for p in ours if hasattr(p, "placements")], [b for a, b in zip(ours, plain, strict=True) if hasattr(a, "placements")], 1e-9, name)
    for a, b in zip(ours, plain, strict=True):
        if not hasattr(a, "placements"):
            torch.testing.assert_close(a, b)
    return calls


@pytest.mark.parametrize(
    "name, how", [(n, h) for n in OPTIMIZERS for h in ("loop", "foreach", "fused") if h != "fused" or n in FUSED]
)
def test_step(ranks, name, how):
    assert ranks.run(step_equals_torch, name, how, OPTIMIZERS[name])[0] == 18


@pytest.mark.parametrize("how", ["loop", "foreach", "fused"])
def test_communication(ranks, how):
    # Two of each to R, S(0) and S(1), from summands and from S(0).
    want = [{"all_reduce": 1, "reduce_scatter": 1}, {"all_gather": 1, "all_to_all": 1}]
    assert ranks.run(gradients_move_together, how)[0] == want


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf"), "value"])
@on_ranks(2, 4)
def test_clip(kind, foreach):
    mesh = mesh_of((dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    plain, ours = [], []
    for g in ["R", "S(0)", "S(1)", "P"]:
        gradient = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        for params, value in ((plain, gradient.clone()), (ours, place(gradient, mesh, (g,), UNEVEN))):
            params.append(torch.nn.Parameter(torch.zeros_like(value)))
            params[-1].grad = value
    if kind == "value":
        torch.nn.utils.clip_grad_value_(plain, 0.5, foreach=foreach)
        torch.nn.utils.clip_grad_value_(ours, 0.5, foreach=foreach)
    else:
        want = torch.nn.utils.clip_grad_norm_(plain, 0.1, norm_type=kind, foreach=foreach)
        got = torch.nn.utils.clip_grad_norm_(ours, 0.1, norm_type=kind, foreach=foreach)
        compare(got, want, 1e-9, "norm")
    compare([p.grad for p in ours], [p.grad for p in plain], 1e-9, "clipped")


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@on_ranks(2, 4)
def test_norms(foreach):
    """Empty pieces and all orders. The total takes one all-reduce, however many tensors there are."""
    mesh = mesh_of((dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    plain = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (5, 1, 7)]
    ours = [place(t, mesh, ("S(0)",), cut) for t, cut in zip(plain, (UNEVEN, UNEVEN, EMPTY), strict=True)]
    for order in (2.0, 1.0, 3.0, 0.0, float("inf")):
        got = torch._foreach_norm(ours, order)
        compare(list(got), list(torch._foreach_norm(plain, order)), 1e-9, f"norm {order}")
        _C.reset_comm_counts()
        total = torch.nn.utils.get_total_norm(ours, order, foreach=foreach)
        compare(total, torch.nn.utils.get_total_norm(plain, order, foreach=foreach), 1e-9, f"total norm {order}")
        assert {kind: calls for kind, (calls, _) in _C.comm_counts().items()} == {"all_reduce": 1}
    summands = [place(t, mesh, ("P",), "even") for t in plain]
    for order in (2.0, float("inf")):
        _C.reset_comm_counts()
        total = torch.nn.utils.get_total_norm([*ours, *summands], order, foreach=foreach)
        calls = {kind: calls for kind, (calls, _) in _C.comm_counts().items()}
        compare(total, torch.nn.utils.get_total_norm([*plain, *plain], order, foreach=foreach), 1e-9, f"total norm {order} with summands")
        assert calls == {"all_reduce": 2}  # the summands together; then the norms


@on_ranks(2, 4)
def test_unscale():
    mesh = mesh_of((dist.get_world_size(),))
    for row in range(5):
        gradient = torch.ones(5, 4)
        gradient[row, 2] = float("inf")
        p = torch.nn.Parameter(place(torch.zeros(5, 4), mesh, ("S(0)",), "even"))
        p.grad = place(gradient, mesh, ("S(0)",), "even")
        found, scale = torch.zeros(()), torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad], found, scale)
        assert found.item() == 1.0, row
        assert p.grad.full_tensor()[(row + 1) % 5, 0].item() == 0.5


@pytest.mark.parametrize(("name", "how"), [(n, h) for n in OPTIMIZERS for h in ("loop", "foreach", "fused") if h != "fused" or n in FUSED])
def test_beside_plain_parameters(ranks, name, how):
    for calls in ranks.run(beside_plain_parameters, name, how, OPTIMIZERS[name]):
        if name == "Rprop":  # makes a state like the gradient, in another layout than a cut parameter's
            calls.pop("all_gather")
        assert calls == {"all_reduce": 1, "reduce_scatter": 1}  # four gradients together; the cut one


class Preconditioned(torch.optim.Optimizer):
    """Keeps matrices and vectors of its own, as plain tensors, and writes them."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.setdefault(p, {})
                left = state.setdefault("left", torch.eye(p.shape[0]) + 0.1)
                scale = state.setdefault("scale", torch.arange(1.0, p.shape[1] + 1))
                p.add_(left @ p.grad * scale, alpha=-0.1)
                torch.add(left, p.grad @ p.grad.T, alpha=0.01, out=left)
                scale.lerp_(p.grad.square().mean(0), 0.1)
                torch._foreach_add_([left[0], scale], [p.grad[1, 0].expand(p.shape[0]), p.grad[2]], alpha=0.1)
        return loss


def cut(module, mesh):
    module.weight = torch.nn.Parameter(st.distribute_tensor(module.weight.detach(), mesh, [st.Shard(0)]))


@pytest.mark.parametrize("kind", ["own", "lbfgs"])
@on_ranks(2, 4)
def test_state_of_its_own(kind):
    mesh = mesh_here()
    make = {"own": Preconditioned, "lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=3)}[kind]
    torch.manual_seed(1)
    plain = nn.Linear(6, 5, bias=False)
    ours = st.distribute_module(copy.deepcopy(plain), mesh, lambda name, module, mesh: cut(module, mesh))
    x = torch.randn(7, 6)
    put = st.distribute_tensor(x, mesh, [st.Replicate()])
    optimizers = make(plain.parameters()), make(ours.parameters())
    for _ in range(3):
        for model, batch, optimizer in ((plain, x, optimizers[0]), (ours, put, optimizers[1])):

            def closure(model=model, batch=batch, optimizer=optimizer):
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss = model(batch).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
    torch.testing.assert_close(ours.weight.full_tensor(), plain.weight, rtol=1e-4, atol=1e-5)
    if kind == "own":
        torch.testing.assert_close(optimizers[1].state[ours.weight], optimizers[0].state[plain.weight], rtol=1e-4, atol=1e-5)
    # The model in a closure is not the optimizer's, and plain parameters may differ between ranks.
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        optimizers[1].step(lambda: ours(x).sum())
    assert st.get_promotion_mode() == "error"
    mixed = Preconditioned([*ours.parameters(), nn.Parameter(torch.ones(2, 3))])
    ours(put).sum().backward()
    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        mixed.step()
