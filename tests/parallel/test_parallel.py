"""The parallel styles against the same modules in one process, for features, heads, vocabularies and sequences of any size."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import mesh_here
from pool import on_ranks
from shardtensor import _C, Replicate, Shard, ShardTensor, distribute_tensor, parallel
from shardtensor import parallel as p
from shardtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    loss_parallel,
    parallelize_module,
)
from torch import nn

DOUBLE = torch.float64


class MLP(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(6, hidden, dtype=DOUBLE)
        self.down = nn.Linear(hidden, 5, dtype=DOUBLE)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Conv1D(nn.Module):
    """Hugging Face's linear layer, with a transposed weight."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = (nn.Parameter(torch.randn(*n, dtype=DOUBLE)) for n in ((nx, nf), (nf,)))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    """Uses as many heads as this rank's features hold."""

    def __init__(self, heads: int, head_dim: int, kv_heads: int | None = None):
        super().__init__()
        self.head_dim, self.group = head_dim, heads // (kv_heads or heads)
        counts = (heads, kv_heads or heads, kv_heads or heads)
        self.q, self.k, self.v = (nn.Linear(6, n * head_dim, bias=False, dtype=DOUBLE) for n in counts)
        self.out = nn.Linear(heads * head_dim, 6, dtype=DOUBLE)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, *(t.repeat_interleave(self.group, 1) for t in (k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=DOUBLE)
        self.layers = nn.ModuleList([MLP(7), MLP(4)])
        self.layers[1].up = nn.Linear(5, 4, dtype=DOUBLE)

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def counted(f):
    """What f returns, and the number of calls of each collective that it made."""
    _C.reset_comm_counts()
    out = f()
    return out, {kind: calls for kind, (calls, _) in _C.comm_counts().items() if calls}


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def compare_gradients(ours, plain):
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None and a.shape == b.shape, name
        torch.testing.assert_close(full(a.grad), b.grad, msg=lambda text, name=name: f"{name}: {text}")


def two_linears(hidden, local, transposed=False):
    plain = MLP(hidden)
    if transposed:
        plain.up, plain.down = Conv1D(hidden, 6), Conv1D(5, hidden)
    ours = copy.deepcopy(plain)
    parallelize_module(ours, mesh_here(), {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()})
    x = torch.randn(2, 4, 6, dtype=DOUBLE)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, forward = counted(lambda: ours(a))
    want = plain(b)
    torch.testing.assert_close(out, want)
    _, backward = counted(lambda: out.square().sum().backward())
    want.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    compare_gradients(ours, plain)
    assert all(p.grad.placements == p.placements for p in ours.parameters())
    n = dist.get_world_size()
    assert ours.up.weight.to_local().shape == plain.up.weight.chunk(n, int(transposed))[dist.get_rank()].shape
    return forward, backward


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("local", [True, False], ids=["local", "distributed"])
@pytest.mark.parametrize("hidden", [6, 7])
@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
def test_two_linears(pools, world, hidden, local, transposed):
    for forward, backward in pools(world).run(two_linears, hidden, local, transposed):
        assert forward == {"all_reduce": 1}  # the sum of the second linear's output
        assert backward == {"all_reduce": 1}  # the input's gradient


def heads(count, kv_heads=None):
    """The README's plan."""
    head_dim, kv_heads = 2, kv_heads or count
    plain = Attention(count, head_dim, kv_heads)
    ours = copy.deepcopy(plain)
    group = count // kv_heads * head_dim
    plan = {"q": ColwiseParallel(multiple_of=group, use_local_output=False), "out": RowwiseParallel(multiple_of=group)}
    plan |= {name: ColwiseParallel(multiple_of=head_dim, use_local_output=False) for name in "kv"}
    parallelize_module(ours, mesh_here(), plan)
    x = torch.randn(2, 5, 6, dtype=DOUBLE)
    out, forward = counted(lambda: ours(x))
    want = plain(x)
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    compare_gradients(ours, plain)
    return forward, ours.q.weight.to_local().shape[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [3, 5])
def test_uneven_heads_stay_whole(pools, world, count):
    results = pools(world).run(heads, count)
    assert all(forward == {"all_reduce": 1} for forward, _ in results)
    rows = [n for _, n in results]
    assert sum(rows) == 2 * count and all(n % 2 == 0 for n in rows)


@pytest.mark.parametrize(
    ("count", "kv_heads", "world"), [(4, 1, 2), (4, 1, 3), (6, 2, 3), (8, 2, 3), (6, 3, 2), (8, 4, 2), (8, 4, 3), (32, 8, 3)]
)
def test_grouped_heads_stay_together(pools, count, kv_heads, world):
    for forward, rows in pools(world).run(heads, count, kv_heads):
        if kv_heads > 1:  # the view cuts a single head's features again, so they are gathered
            assert forward == {"all_reduce": 1}
        assert rows % (2 * count // kv_heads) == 0


def warned(module, plan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(module, mesh_here(), plan)
    return [str(w.message) for w in caught if str(w.message).startswith("parallelize_module")]


def cut_heads():
    """Three heads of three features: without multiple_of, the ranks get five and four."""
    def told(**options):
        plan = {f"*.{name}": ColwiseParallel(**options) for name in "qkv"} | {"*.out": RowwiseParallel(**options)}
        return warned(nn.Sequential(Attention(3, 3)), plan)

    mlp = MLP(7)
    mlp.head_dim = 2  # seven features are no heads
    cut = told()
    with shardtensor.replace_dtensor():
        assert told() == cut
    return cut, told(multiple_of=3), warned(mlp, {"up": ColwiseParallel()})


def test_cut_heads_are_warned_of(pools):
    for cut, whole, other in pools(2).run(cut_heads):
        assert len(cut) == 3 and not whole and not other
        assert "features of '0.q' are cut into [5, 4] over the ranks, but Attention has heads of 3" in cut[0]
        assert "pass multiple_of=3 to ColwiseParallel" in cut[0]


def stale_optimizer():
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    gc.collect()
    model = MLP(7)
    early = torch.optim.AdamW(model.parameters())
    parallelize_module(model, mesh_here(), {"up": ColwiseParallel()})
    late = torch.optim.AdamW(model.parameters())
    model.up(torch.randn(3, 6, dtype=DOUBLE)).sum().backward()
    late.step()
    with pytest.raises(RuntimeError, match=r"AdamW.step: 2 of its 4 parameters .*shape \(7, 6\).* Build the optimizer afterwards"):
        early.step()
    assert len(_global_optimizer_pre_hooks) == 1
    del early
    gc.collect()
    assert not _global_optimizer_pre_hooks  # optimizers are looked at only while such parameters are alive


def tied_elsewhere():
    """A parameter that is replaced in one module, and trained in another."""
    model = MLP(4)
    weight = model.up.weight
    early = torch.optim.SGD([weight], lr=0.5)
    parallelize_module(model.up, mesh_here(), ColwiseParallel())
    before = weight.detach().clone()
    weight.sum().backward()
    early.step()
    assert weight.equal(before - 0.5)


@pytest.mark.parametrize("what", ["stale_optimizer", "tied_elsewhere"])
def test_an_optimizer_built_before(pools, what):
    pools(2).run(globals()[what])


def _replicate():
    return Replicate()


@on_ranks(2, 3)
@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_embedding(style):
    plain = nn.Embedding(11, 5, dtype=DOUBLE)
    ours = copy.deepcopy(plain)
    parallel.parallelize_module(ours, mesh_here(), getattr(parallel, style)(output_layouts=_replicate(), input_layouts=_replicate()))
    tokens = torch.tensor([[0, 10, 3], [5, 5, 7]])
    out, want = ours(tokens), plain(tokens)
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    compare_gradients(ours, plain)


@on_ranks(2, 3)
@pytest.mark.parametrize("given", ["distributed", "pieces"])
def test_sequence_parallel(given):
    """Norm on pieces of the sequence, linears on pieces of the features, by patterns of names."""
    mesh = mesh_here()
    plain = Block()
    ours = copy.deepcopy(plain)
    plan = {
        "norm": SequenceParallel(sharding_shapes="infer"),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(ours, mesh, plan)
    x = torch.randn(2, 7, 6, dtype=DOUBLE)
    if given == "distributed":
        piece = distribute_tensor(x, mesh, [Shard(1)])
    else:
        cut = {2: [5, 2], 3: [5, 0, 2]}[dist.get_world_size()]
        piece = x.split(cut, 1)[dist.get_rank()]
    out = ours(piece)
    want = plain(x)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), want)
    out.square().sum().backward()
    want.square().sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad, msg=lambda text, name=name: f"{name}: {text}")


class TwoInputs(nn.Module):
    def forward(self, x, n, *, bias):
        assert n == 3
        return x * n + bias, n


@on_ranks(2, 3)
def test_inputs_and_outputs_are_prepared():
    mesh = mesh_here()
    x, bias = torch.randn(5, 4), torch.randn(5, 4)
    module = TwoInputs()
    style = PrepareModuleInput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(0), None),
        input_kwarg_layouts={"bias": Replicate()},
        desired_input_kwarg_layouts={"bias": Shard(0)},
    )
    parallelize_module(module, mesh, style)
    out, n = module(x, 3, bias=bias)
    assert isinstance(out, ShardTensor) and out.placements == (Shard(0),) and n == 3
    torch.testing.assert_close(out.full_tensor(), x * 3 + bias)
    both = PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(1), None),
        input_kwarg_layouts={"bias": Replicate()},
        desired_input_kwarg_layouts={"bias": Shard(1)},
        output_layouts=(Shard(1), None),
        desired_output_layouts=(Replicate(), None),
    )
    out, n = parallelize_module(TwoInputs(), mesh, both)(x, 3, bias=bias)
    assert type(out) is torch.Tensor and n == 3
    torch.testing.assert_close(out, x * 3 + bias)


LOSSES = {
    "mean": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "ignored": dict(ignore_index=3),
    "weights": dict(weight=True),
    "smooth": dict(label_smoothing=0.2),
    "smooth_weights": dict(label_smoothing=0.2, weight=True, reduction="sum"),
}


def class_sharded(name):
    options = dict(LOSSES[name])
    classes = 11
    if options.pop("weight", None):
        options["weight"] = torch.rand(classes, dtype=DOUBLE)
    logits = torch.randn(4, classes, dtype=DOUBLE)
    target = torch.tensor([0, 10, 3, 7])
    a = distribute_tensor(logits, mesh_here(), [Shard(1)]).requires_grad_()
    b = logits.clone().requires_grad_()

    with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
        F.cross_entropy(a, target, **options)
    with loss_parallel():
        with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):
            a + logits  # only targets of losses may be plain
        loss, forward = counted(lambda: F.cross_entropy(a, target, **options))
        _, backward = counted(lambda: loss.sum().backward())
    want = F.cross_entropy(b, target, **options)
    want.sum().backward()
    torch.testing.assert_close(loss.full_tensor(), want)
    assert a.grad.placements == (Shard(1),)
    torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    return forward, backward


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_parallel_never_gathers(pools, world, name):
    for forward, backward in pools(world).run(class_sharded, name):
        assert set(forward) <= {"all_reduce"}, forward
        # With smoothing and weights, the smoothed part's gradient is gathered, and autograd adds the other part to it in place.
        assert set(backward) <= {"all_reduce"} | ({"all_gather"} if name == "smooth_weights" else set()), backward


def resharded():
    mesh = mesh_here()
    plain = MLP(7)
    ours = copy.deepcopy(plain)
    parallelize_module(ours, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    input_reshard(ours, mesh, 0)
    x = torch.randn(5, 6, dtype=DOUBLE)
    out, calls = counted(lambda: ours(x))
    want = plain(x)
    torch.testing.assert_close(out, want)
    _, backward = counted(lambda: out.square().sum().backward())
    want.square().sum().backward()
    compare_gradients(ours, plain)
    return calls, backward


@pytest.mark.parametrize("world", [2, 3])
def test_inputs_are_kept_in_pieces(pools, world):
    for calls, backward in pools(world).run(resharded):
        assert calls == {"all_reduce": 1}
        assert backward.get("all_gather", 0) >= 1, backward  # what was saved in pieces is gathered


def refusals():
    mesh = mesh_here()
    texts = []
    for f in (
        lambda: p.parallelize_module(nn.Conv1d(2, 2, 1), mesh, p.ColwiseParallel()),
        lambda: p.parallelize_module(nn.Linear(4, 6), mesh, p.ColwiseParallel(multiple_of=4)),
        lambda: p.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(),)),
        lambda: p.parallelize_module(
            nn.Identity(), mesh, p.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
        )(torch.zeros(2)),
        lambda: p.parallelize_module(nn.Linear(4, 6), mesh, p.ColwiseParallel())(3),
    ):
        with pytest.raises((NotImplementedError, ValueError, AssertionError, TypeError)) as error:
            f()
        texts.append(str(error.value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p.parallelize_module(MLP(4), mesh, {"nowhere": p.ColwiseParallel()})
    texts.append(str(caught[0].message))
    return texts


def test_bad_plans_say_what_is_wrong(pools):
    wanted = ["Conv1d cannot", "'multiple_of' is 4", "same length", "same length", "got int", "nowhere"]
    for texts in pools(2).run(refusals):
        assert [w for w, t in zip(wanted, texts, strict=True) if w not in t] == []


def test_every_public_name_is_here():
    import torch.distributed.tensor.parallel as torchs

    assert set(torchs.__all__) <= set(parallel.__all__)
    assert set(parallel.__all__) == {n for n in vars(parallel) if not n.startswith("_")}
