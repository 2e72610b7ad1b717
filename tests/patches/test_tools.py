"""torch's tools around training, on ShardTensors: what they print, count, save, hook and transform is what it should be."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from oracle import EMPTY, EVEN, UNEVEN, place
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor, init_device_mesh, randn
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from test_parallel import DOUBLE, MLP, full, mesh_here
from test_training import batch, pair, same_parameters, tensor_parallel
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader, TensorDataset, default_collate


def tensor(placement="S(0)", sizes=(5, 4), cut=UNEVEN, seed=0, dtype=DOUBLE):
    value = torch.randn(sizes, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return place(value, mesh_here(), (placement,), cut)


def whole(t):
    return t.detach().full_tensor().requires_grad_(t.requires_grad)


# ---- what is measured ----


def profiled():
    from torch.profiler import ProfilerActivity, profile

    x = tensor()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        torch.relu(x).redistribute(placements=[Shard(1)])
        (x * 2).sum().full_tensor()
        tensor(sizes=(4, 2048)).sum(0).full_tensor()  # fewer bytes would be gathered, not reduced
    names = [e.name for e in run.events()]
    assert [e.input_shapes for e in run.events() if e.name == "aten::relu"] == [[[5, 4]]]
    table = run.key_averages().table()
    return names, "aten::relu" in table


def test_profiler(ranks):
    for names, listed in ranks.run(profiled):
        assert {"aten::relu", "aten::mul", "aten::sum"} <= set(names) and listed
        assert {"gloo:all_to_all", "gloo:all_reduce"} <= set(names)


@on_ranks(2, 4)
def test_flop_counter():
    """Counts all ranks' work, whatever the layout, forward and backward, as torch does for DTensors."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for model in pair():
        with FlopCounterMode(display=False) as counter:
            x = batch().requires_grad_()
            model(x).sum().backward()
        by_module = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
        counts.append((counter.get_total_flops(), by_module))
    assert counts[0] == counts[1] and counts[0][0] == 3 * 2 * 4 * (6 * 7 + 7 * 5 + 5 * 3)
    for f in (
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: nn.functional.conv1d(q.flatten(0, 1), k[0, :, :, :3]),
        lambda q, k, v: torch.bmm(q[:, 0], k[:, 0].mT) + (q @ v.mT)[:, 0],
    ):
        totals = []
        ours = [tensor("S(0)", (2, 3, 5, 4), seed=i).requires_grad_() for i in range(3)]
        for arguments in (ours, [whole(t) for t in ours]):
            with FlopCounterMode(display=False) as counter:
                f(*arguments).sum().backward()
            totals.append(counter.get_total_flops())
        assert totals[0] == totals[1], totals
        assert totals[0] > 0 or torch.__version__ < "2.15"  # older torch does not count them all


def tracked_memory():
    """A rank's own bytes."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model = tensor_parallel(MLP(7), [""])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        model(batch()).square().mean().backward()
        optimizer.step()
    ((_, now),) = tracker.get_tracker_snapshot("current").items()
    sizes = {str(kind).rpartition(".")[-1]: n for kind, n in now.items()}
    own = sum(p.to_local().numel() * 8 for p in model.parameters())
    assert sizes["PARAM"] == sizes["GRAD"] == own
    assert sizes["OPT"] == 2 * own + 4 * len(list(model.parameters()))  # and a step counter each
    return own


def test_memory_tracker(ranks):
    own = ranks.run(tracked_memory)
    assert own[0] > own[-1]


@on_ranks(2, 4)
def test_timer():
    from torch.utils.benchmark import Timer

    x = tensor()
    measured = Timer("x.relu_()", globals={"x": x}).timeit(5)
    assert measured.number_per_run == 5 and x.full_tensor().min() == 0


def written_down():
    """Ops with the global sizes and placements; the collectives below with what each rank sends."""
    from torch.utils._debug_mode import DebugMode

    model = tensor_parallel(MLP(7), [""])
    with DebugMode() as mode:
        tensor().relu().full_tensor()
        model(batch()).sum().backward()
    return mode.debug_string()


def test_debug_mode(ranks):
    for text in ranks.run(written_down, seconds=110):  # it imports the compiler
        assert "aten::relu(dt: f64[5, 4]| S(0))" in text
        assert "aten::linear(dt: f64[4, 6]| R, dt: f64[7, 6]| S(0), dt: f64[7]| S(0))" in text
        assert "aten::linear_backward(dt: f64[4, 7]| S(1), dt: f64[4, 5]| R, dt: f64[5, 7]| S(1), [True, True, True])" in text
        assert "c10d::broadcast_(['t: u8[160]']" in text  # the summands of 4 x 5 numbers, gathered because they are so few


# ---- modes ----


@on_ranks(2, 4)
def test_inference_mode():
    x, y = tensor(), tensor("S(1)", seed=1)
    with torch.inference_mode():
        z = (x @ y.t()).relu()
        z.mul_(2)
        row = z[1:3]
        assert z.is_inference() and row.is_inference() and not x.is_inference()
        copied = x.clone().add_(1)
    torch.testing.assert_close(z.full_tensor(), (whole(x) @ whole(y).t()).relu() * 2)
    torch.testing.assert_close(row.full_tensor(), z.full_tensor()[1:3])
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        tensor().requires_grad_() * copied
    ours, plain = pair()
    with torch.inference_mode():
        torch.testing.assert_close(ours(batch()), plain(batch()))


@on_ranks(2, 4)
def test_autocast():
    x, w = tensor(dtype=torch.float32), tensor("S(1)", (3, 4), dtype=torch.float32, seed=1)
    for f in (
        lambda x, w: nn.functional.linear(x, w),
        lambda x, w: x @ x.t(),
        lambda x, w: torch.softmax(x @ w.t(), -1),
        lambda x, w: nn.functional.mse_loss(x.bfloat16(), x.bfloat16() * 2),
        lambda x, w: torch.stack([x, x.bfloat16()]),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = f(x, w), f(whole(x), whole(w))
        assert got.dtype == want.dtype
        torch.testing.assert_close(full(got), want, rtol=0.02, atol=0.02)
    results = []
    for model in (m.float() for m in pair()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch().float())
        out.float().square().mean().backward()
        assert out.dtype == torch.bfloat16
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        results.append([out.float(), *(full(p.grad) for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=0.05, atol=0.02)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, 4)
def test_anomaly_mode():
    x = tensor().requires_grad_()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan"):
        (x.sqrt() * 0).sum().backward()


# ---- values, copies, comparisons ----


def _replicate():
    return Replicate()


@on_ranks(2, 4)
def test_numbers():
    for placement in ("P", "S(0)", "R"):
        x = tensor(placement)
        loss = x.square().mean()
        want = x.full_tensor().square().mean().item()
        assert float(loss) == loss.item() == pytest.approx(want, rel=1e-12)
        assert f"{loss:.4f}" == f"{want:.4f}"
        assert int(loss * 0 + 3) == 3 and bool(loss > 0) and loss.redistribute(placements=[_replicate()]).tolist() == loss.item()


@on_ranks(2, 4)
def test_assert_close():
    x = tensor(sizes=(13, 4))  # no two cuts are alike on any rank
    torch.testing.assert_close(x, x.clone())
    torch.testing.assert_close({"a": [x, x * 2]}, {"a": [x.clone(), x + x]})
    unlike = [(x + 1, "not close"), (tensor(sizes=(13, 3)), "shape"), (tensor(sizes=(13, 4), dtype=torch.float32), "dtype")]
    if hasattr(torch.testing._comparison, "_unwrap_dtensor_for_comparison"):  # older torch compares only the values of DTensors
        unlike += [(tensor("S(1)", (13, 4)), "placements"), (whole(x), "ambiguous"), (tensor(sizes=(13, 4), cut=EVEN), "shape")]
    for other, word in unlike:
        with pytest.raises((AssertionError, TypeError), match=word):
            torch.testing.assert_close(x, other)


@on_ranks(2, 4)
def test_data_movement():
    x = tensor()
    assert type(x.to("cpu", non_blocking=True)) is type(x.cpu()) is type(x)
    assert x.to(torch.float32)._layout == x._layout
    rows = torch.arange(14.0).view(7, 2)
    batches = [distribute_tensor(b, mesh_here(), [Shard(0)]) for (b,) in DataLoader(TensorDataset(rows), batch_size=3)]
    torch.testing.assert_close(torch.cat(batches).full_tensor(), rows)
    torch.testing.assert_close(default_collate([x, x]).full_tensor(), torch.stack([whole(x)] * 2))


def copied():
    ours, plain = pair()
    ours(batch()).sum().backward()
    twin = copy.deepcopy(ours)
    assert twin[0].up.weight._layout == ours[0].up.weight._layout
    torch.testing.assert_close(full(twin[0].up.weight.grad), full(ours[0].up.weight.grad))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    torch.testing.assert_close(ours(batch()), plain(batch()))
    ours.load_state_dict(twin.state_dict())
    assert full(ours[0].up.weight).abs().sum() == 0
    vector = nn.utils.parameters_to_vector(ours[0].parameters())
    nn.utils.vector_to_parameters(torch.ones_like(vector), ours[0].parameters())
    assert all(full(p.detach()).eq(1).all() for p in ours[0].parameters())


def test_module_copies(ranks):
    ranks.run(copied)


# ---- hooks and what is saved ----


@on_ranks(2, 4)
def test_hooks():
    seen_by = []
    for model in pair():
        seen = []

        def note(*values, seen=seen):
            seen.extend(full(v).clone() for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))

        model[0].register_forward_pre_hook(lambda m, inputs, note=note: note(inputs))
        model[0].up.register_full_backward_hook(lambda m, gi, go, note=note: note(gi, go))
        model[0].down.register_full_backward_pre_hook(lambda m, go, note=note: note(go))
        model[0].register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
        model[0].up.weight.register_hook(lambda g, note=note: note(g))
        model[0].down.weight.register_hook(lambda g: g * 3)
        model[0].up.weight.register_post_accumulate_grad_hook(lambda p, note=note: note(p.grad))
        x = batch().requires_grad_()
        model(x).square().sum().backward()
        seen_by.append([*seen, x.grad, full(model[0].down.weight.grad)])
    assert len(seen_by[0]) == 8
    torch.testing.assert_close(seen_by[0], seen_by[1])


@pytest.mark.parametrize("how", ["kept", "to a file", "on cpu", "pinned"])
@on_ranks(2, 4)
def test_saved_tensors(how):
    kinds = []

    def pack(t):
        kinds.append(type(t))
        if how == "kept":
            return t
        file = io.BytesIO()
        torch.save(t, file)
        return file.getvalue()

    def unpack(packed):
        return packed if how == "kept" else torch.load(io.BytesIO(packed))

    context = {
        "on cpu": save_on_cpu,
        "pinned": lambda: save_on_cpu(pin_memory=True),
    }.get(how, lambda: saved_tensors_hooks(pack, unpack))
    ours, plain = pair()
    with context():
        out = ours(batch())
        x = tensor(cut=EMPTY).requires_grad_()
        y = (x.sin() * x).sum()
    out.square().sum().backward()
    plain(batch()).square().sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad)
    y.backward()
    assert x.grad._layout == x._layout
    torch.testing.assert_close(whole(x.grad), whole(x).detach().cos() * whole(x).detach() + whole(x).detach().sin())
    assert ShardTensor in kinds or how in ("on cpu", "pinned")


@on_ranks(2, 4)
def test_saved_tensors_may_be_overwritten():
    x = tensor().requires_grad_()
    with allow_mutation_on_saved_tensors():
        y = x.clone()
        z = y * y
        y.zero_()
        z.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole(x).detach())


@pytest.mark.parametrize("placement", ["S(0)", "S(1)", "R"])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@on_ranks(2, 4)
def test_parametrizations(name, placement):
    plain = nn.Linear(6, 5, dtype=DOUBLE)
    ours = copy.deepcopy(plain)
    ours.weight = nn.Parameter(place(plain.weight.detach(), mesh_here(), (placement,), UNEVEN))
    ours.bias = nn.Parameter(place(plain.bias.detach(), mesh_here(), ("R",), EVEN))
    for module in (plain, ours):
        getattr(parametrizations, name)(module)
    if name == "spectral_norm":  # its first vectors are random
        with torch.no_grad():
            for key, buffer in ours.parametrizations.weight[0].named_buffers():
                buffer.copy_(place(plain.parametrizations.weight[0].get_buffer(key), mesh_here(), ("R",), EVEN))
    got = ours(place(batch(), mesh_here(), ("R",), EVEN))
    want = plain(batch())
    torch.testing.assert_close(got.full_tensor(), want)
    got.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad)
    assert type(ours.weight) is ShardTensor
    parametrize.remove_parametrizations(ours, "weight")
    parametrize.remove_parametrizations(plain, "weight")
    torch.testing.assert_close(full(ours.weight.detach()), plain.weight.detach())


@on_ranks(2, 4)
def test_pruning():
    results = []
    for model in pair():
        prune.l1_unstructured(model[0].up, "weight", amount=10)
        model(batch()).square().sum().backward()
        results.append((full(model[0].up.weight.detach()), full(model[0].up.weight_orig.grad)))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][0].eq(0).sum() == 10


# ---- torch.func ----


def _loss(x):
    return (x.sin() * x).sum()


def _rows(y):
    """The indices for each row."""
    return (y > 0).long()


def _images(x, y):
    return torch.stack([x, y, x * y], 1)


TRANSFORMS = {
    "grad": lambda f, x, y: f.grad(_loss)(x),
    "grad_and_value": lambda f, x, y: f.grad_and_value(_loss)(x),
    "grad of grad": lambda f, x, y: f.grad(lambda z: f.grad(_loss)(z).square().sum())(x),
    "vjp": lambda f, x, y: f.vjp(torch.sin, x)[1](y),
    "jvp": lambda f, x, y: f.jvp(lambda z: z.sin() @ z.t(), (x,), (y,)),
    "jvp of softmax": lambda f, x, y: f.jvp(lambda z: torch.softmax(z, -1).sum(0), (x,), (y,)),
    "vmap": lambda f, x, y: f.vmap(torch.dot)(x, y),
    "vmap over columns": lambda f, x, y: f.vmap(lambda z: z.cumsum(0), in_dims=1, out_dims=1)(x),
    "vmap of a product": lambda f, x, y: f.vmap(lambda z: y @ z)(x),
    "gradients by row": lambda f, x, y: f.vmap(f.grad(_loss))(x),
    "indexed by row": lambda f, x, y: f.vmap(lambda z, i: z[i])(x, _rows(y)),
    "gradients of indexing": lambda f, x, y: f.vmap(f.grad(lambda z, i: (z[i] * z).sum()))(x, _rows(y)),
    "rows of one table": lambda f, x, y: f.vmap(lambda i: nn.functional.embedding(i, x))(_rows(y)),
    "rows of a table each": lambda f, x, y: f.vmap(nn.functional.embedding)(_rows(y), _images(x, y)),
    "batch norm": lambda f, x, y: f.vmap(lambda z: nn.functional.batch_norm(z, None, None, training=True))(_images(x, y)),
    "batch norm in use": lambda f, x, y: f.vmap(lambda z: nn.functional.batch_norm(z, z[0], z[1].exp()))(_images(x, y)),
    "gradients of batch norm": lambda f, x, y: f.vmap(
        f.grad(lambda z: nn.functional.batch_norm(z, None, None, training=True)[0].square().sum())
    )(_images(x, y)),
    "jacrev": lambda f, x, y: f.jacrev(torch.sin)(x),
    "jacfwd": lambda f, x, y: f.jacfwd(torch.sin)(x),
    "hessian": lambda f, x, y: f.hessian(_loss)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks(2, 4)
def test_transforms(name):
    for placements in (("S(0)", "S(0)"), ("S(0)", "S(1)"), ("R", "S(0)")):
        for cut in (UNEVEN, EMPTY):
            x, y = (tensor(p, (3, 2), cut, seed) for seed, p in enumerate(placements))
            got = pytree.tree_leaves(TRANSFORMS[name](torch.func, x, y))
            want = pytree.tree_leaves(TRANSFORMS[name](torch.func, whole(x), whole(y)))
            assert all(type(t) is ShardTensor for t in got)
            where = f"{placements} {cut}"
            torch.testing.assert_close([t.full_tensor() for t in got], want, msg=lambda m, where=where: f"{where}: {m}")


@on_ranks(2, 4)
def test_functional_call():
    from torch.func import functional_call, grad, vmap

    ours, plain = pair()
    values = [{k: v.detach() * 0.5 for k, v in m.named_parameters()} for m in (ours, plain)]
    torch.testing.assert_close(functional_call(ours, values[0], (batch(),)), functional_call(plain, values[1], (batch(),)))
    # The styles cannot see through torch.func's wrappers to move tensors, so they raise.
    with pytest.raises(NotImplementedError, match=r"inside torch\.func"):
        grad(lambda p: functional_call(ours, p, (batch(),)).sum())(values[0])
    with pytest.raises(NotImplementedError, match=r"inside torch\.func"):
        vmap(ours)(batch())
    # Without styles it works: a linear's own moves happen below torch.func.
    linear = nn.Linear(4, 3, dtype=DOUBLE)
    parameters = {k: place(v.detach(), mesh_here(), ("S(0)",), UNEVEN) for k, v in linear.named_parameters()}
    x = tensor("R")
    got = grad(lambda p: functional_call(linear, p, (x,)).square().sum())(parameters)
    everything = whole(x)
    want = grad(lambda p: functional_call(linear, p, (everything,)).square().sum())(
        {k: v.detach() for k, v in linear.named_parameters()}
    )
    torch.testing.assert_close({k: v.full_tensor() for k, v in got.items()}, want)
    rows = vmap(lambda row: functional_call(linear, parameters, (row,)))(x)
    torch.testing.assert_close(rows.full_tensor(), linear(whole(x)))
    # Plain tensors that torch's rules make on the way are accepted; the user's are not.
    mine = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=DOUBLE)
    with pytest.raises(RuntimeError, match=r"is a plain torch\.Tensor"):
        vmap(lambda row: row * mine)(x)


# ---- data parallelism by copies ----


@pytest.mark.parametrize("hidden", [8, 7])
@on_ranks(2, 4)
def test_ddp(hidden):
    """DDP over tensor parallelism takes the steps that one process takes on all the data."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plain = MLP(hidden)
    ours = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ours = DistributedDataParallel(ours, device_mesh=mesh["dp"])
    models = (plain, ours)
    optimizers = [torch.optim.AdamW(list(m.parameters()), lr=0.05) for m in models]
    for step in range(3):
        x = torch.randn(4, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
        losses = []
        for model, optimizer, given in zip(models, optimizers, (x, mine), strict=True):
            loss = model(given).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        dist.all_reduce(losses[1], group=mesh.get_group("dp"))
        torch.testing.assert_close(losses[1] / 2, losses[0])


@on_ranks(2, 4)
def test_ddp_inputs():
    """DDP passes ShardTensors through to a module of plain parameters."""
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MLP(7)

        def forward(self, x):
            assert type(x) is ShardTensor
            return self.inner(x.to_local())

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plain = MLP(7)
    ours = Inner()
    ours.inner.load_state_dict(plain.state_dict())
    ours = DistributedDataParallel(ours, process_group=mesh.get_group("dp"))
    mine = batch().chunk(2)[mesh["dp"].get_local_rank()]
    ours(ShardTensor.from_local(mine, mesh["tp"], [Replicate()])).square().mean().backward()
    plain(batch()).square().mean().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def composably():
    from torch.distributed._composable import replicate_with_fsdp

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plain = MLP(7)
    ours = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replicate_with_fsdp.replicate(ours, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, plain)]
    for _ in range(2):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            x = batch().chunk(2)[mesh["dp"].get_local_rank()] if model is ours else batch()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(type(p) is ShardTensor for p in ours.parameters())
    same_parameters(ours, plain)


def test_replicate(ranks):
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp", reason="this torch replicates by DDP alone")
    ranks.run(composably)


# ---- pipelines ----


def piped(schedule, between):
    """Two stages of tensor parallelism; what goes from one to the other is plain, replicated, or cut unevenly."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    tp = mesh["tp"]
    plain = nn.Sequential(MLP(7), MLP(3))
    plain[1].up = nn.Linear(5, 3, dtype=DOUBLE)
    at = mesh["pp"].get_local_rank()
    mine = copy.deepcopy(plain[at])
    local = between == "plain"
    down = RowwiseParallel(use_local_output=local, output_layouts=Shard(1) if between == "cut" else Replicate())
    parallelize_module(mine, tp, {"up": ColwiseParallel(use_local_output=False), "down": down})
    x, y = torch.randn(6, 6, dtype=DOUBLE), torch.randn(6, 5, dtype=DOUBLE)
    target = y if local else distribute_tensor(y, tp, [Replicate()])

    def loss_of(out, target):
        return (out - target).square().sum()

    options = {} if local else dict(get_mesh=lambda names, layout: tp)
    stage = pipelining.PipelineStage(mine, at, 2, torch.device("cpu"), group=mesh.get_group("pp"), **options)
    run = getattr(pipelining, schedule)(stage, n_microbatches=3, loss_fn=loss_of, scale_grads=False)
    for _ in range(2):
        mine.zero_grad()
        losses = []
        run.step(x) if at == 0 else run.step(target=target, losses=losses)
    total = loss_of(plain(x), y)
    total.backward()
    for a, b in zip(mine.parameters(), plain[at].parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad)
    if at == 1:
        torch.testing.assert_close(sum(full(loss.detach()) for loss in losses), total.detach())


@pytest.mark.parametrize("between", ["plain", "replicated", "cut"])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines(ranks, schedule, between):
    if between != "plain":
        utils = pytest.importorskip("torch.distributed.pipelining._utils")
        if not hasattr(utils, "_DTensorMeta"):
            pytest.skip("this torch sends plain tensors between stages")
    ranks.run(piped, schedule, between)


class Copied(nn.Module):
    """Schedules that compute gradients of inputs first cannot detach a view, and a style's output is one. In plain torch too."""

    def forward(self, x):
        return x.clone()


def piped_in_turns(schedule, between):
    """Each rank of the pipeline has two of four stages."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    tp, at, local = mesh["tp"], mesh["pp"].get_local_rank(), between == "plain"
    plain = [nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)).to(DOUBLE) for _ in range(4)]
    mine = (at, 3 - at) if schedule == "ScheduleZBVZeroBubble" else (at, at + 2)
    down = RowwiseParallel(use_local_output=local, output_layouts=Replicate() if local else Shard(1))
    ours = [parallelize_module(copy.deepcopy(plain[i]), tp, {"0": ColwiseParallel(use_local_output=False), "2": down}) for i in mine]
    options = dict(group=mesh.get_group("pp"))
    if not local:
        options["get_mesh"] = lambda names, layout: tp
    stages = [
        pipelining.PipelineStage(nn.Sequential(part, Copied()), i, 4, torch.device("cpu"), **options)
        for i, part in zip(mine, ours, strict=True)
    ]

    def loss_of(out, target):
        return (out - target).square().sum()

    run = getattr(pipelining, schedule)(stages, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
    x, y = torch.randn(8, 6, dtype=DOUBLE), torch.randn(8, 6, dtype=DOUBLE)
    target = y if local else distribute_tensor(y, tp, [Replicate()])
    run.step(*([x] if 0 in mine else []), **(dict(target=target) if 3 in mine else {}))
    loss_of(nn.Sequential(*plain)(x), y).backward()
    for i, part in zip(mine, ours, strict=True):
        for a, b in zip(part.parameters(), plain[i].parameters(), strict=True):
            torch.testing.assert_close(full(a.grad), b.grad)


@pytest.mark.parametrize("between", ["plain", "cut"])
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_pipelines_of_several_stages(pools, schedule, between):
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    if between != "plain" and not hasattr(utils, "_DTensorMeta"):
        pytest.skip("this torch sends plain tensors between stages")
    pools(4).run(piped_in_turns, schedule, between)


# ---- CUDA graphs ----


def captured():
    """A step with its collectives, recorded once and replayed on other data, is the step taken op by op."""
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), backend_override={0: "nccl"})
    recorded, plain = (
        parallelize_module(MLP(7).cuda(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}) for _ in range(2)
    )
    plain.load_state_dict(recorded.state_dict())
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=0.05, capturable=True) for m in (recorded, plain)}
    x = torch.zeros(4, 6, dtype=DOUBLE, device="cuda")

    def step(model):
        optimizers[model].zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizers[model].step()
        return loss.detach()

    _C.comm_call_alone(True)  # call NCCL even with one rank
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(recorded)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(recorded)
        for _ in range(3):
            step(plain)
        for _ in range(3):
            x.copy_(torch.randn(4, 6, dtype=DOUBLE))
            graph.replay()
            torch.testing.assert_close(full(loss), full(step(plain)))
        ours, wanted = ([full(p.detach()) for p in m.parameters()] for m in (recorded, plain))
        torch.testing.assert_close(ours, wanted)
    finally:
        _C.comm_call_alone(False)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_cuda_graphs(pools, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"a GPU for each of {world} ranks is needed")
    pools(world).run(captured)


# ---- collectives of torch.distributed ----


@on_ranks(2, 4)
def test_collectives_are_refused():
    import torch.distributed._functional_collectives as functional_collectives

    x = tensor()
    pieces = [torch.empty(5, 4, dtype=DOUBLE) for _ in range(dist.get_world_size())]
    for collective in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather(pieces, x),
        lambda: dist.all_to_all_single(x.clone(), x),
        lambda: dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0),
        lambda: functional_collectives.all_reduce(x, "sum", mesh_here()),
    ):
        with pytest.raises(NotImplementedError, match=r"a collective on a ShardTensor.*to_local\(\)"):
            collective()


# ---- tensors without values ----


def _step():
    """A bit of everything: factories, both directions, collectives, random numbers, an optimizer."""
    mesh = mesh_here()
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Dropout(0.5), nn.Linear(5, 3))
    distribute_module(model, mesh)
    rows = distribute_tensor(torch.ones(7, 4), mesh, [Shard(0)]) + randn(7, 4, device_mesh=mesh, placements=[Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(rows).log_softmax(0).square().mean()
    loss.backward()
    optimizer.step()
    parts = ShardTensor.from_local(torch.ones(3, 4), mesh, [Partial()])
    return [
        loss,
        model[0].weight,
        model[0].weight.grad,
        rows.redistribute(placements=[Shard(1)]),
        rows[2:6].flatten(),
        parts.redistribute(placements=[Shard(0)]),
        rows.full_tensor(),
        rows.redistribute(placements=[Replicate()]) @ model[0].weight.t(),
        torch.nn.functional.dropout(rows),
    ]


@on_ranks(2, 4)
def test_fake_tensors():
    """One rank alone finds out what all ranks would have. Nothing is sent."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def described(t):
        ours = isinstance(t, ShardTensor)
        local = t._local_tensor if ours else t
        return ours and str(t._layout), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, local.shape, local.stride()

    torch.manual_seed(0)
    real = _step()
    dist.barrier()
    if dist.get_rank() == 0:
        before = torch.get_rng_state()
        _C.reset_comm_counts()
        with FakeTensorMode() as mode:
            fake = _step()
            assert [described(t) for t in fake] == [described(t) for t in real]
            assert all(type(t._local_tensor if isinstance(t, ShardTensor) else t) is FakeTensor for t in fake)
            with pytest.raises(DataDependentOutputException):
                fake[0].item()
        outside = mode.from_tensor(real[3])
        assert described(outside.softmax(1)) == described(real[3])
        assert not _C.comm_counts()
        torch.testing.assert_close(torch.get_rng_state(), before)
        assert "aten.mul" in make_fx(lambda x: x * 2, tracing_mode="fake")(real[3]).code
        assert "all_gather_into_tensor" in make_fx(lambda x: x.full_tensor(), tracing_mode="fake")(real[3]).code
    dist.barrier()
