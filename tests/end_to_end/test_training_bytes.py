"""A transformer block under the parallel styles makes the collectives of hand-written code, and sends as much."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import mesh_here
from pool import on_ranks
from shardtensor import _C, DeviceMesh, Replicate, Shard, distribute_tensor
from shardtensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, _entered, parallelize_module
from torch import nn
from torch.utils.checkpoint import checkpoint

DOUBLE = torch.float64
WIDTH, HEAD = 8, 2


class Block(nn.Module):
    """[sequence, batch, width]."""

    def __init__(self, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, dtype=DOUBLE), nn.LayerNorm(WIDTH, dtype=DOUBLE)
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, heads * HEAD, dtype=DOUBLE) for name in "qkv"})
        self.attention.forward = self.attend
        self.attention["out"] = nn.Linear(heads * HEAD, WIDTH, dtype=DOUBLE)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden, dtype=DOUBLE), nn.GELU(), nn.Linear(hidden, WIDTH, dtype=DOUBLE))

    def attend(self, x):
        q, k, v = (self.attention[name](x).unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for name in "qkv")
        return self.attention["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def block(heads, hidden):
    """Two blocks with the same values. deepcopy would leave attention.forward with the first block."""
    made = Block(heads, hidden), Block(heads, hidden)
    made[1].load_state_dict(made[0].state_dict())
    return made


def plan(sequence):
    parts = {"output_layouts": Shard(0), "use_local_output": False} if sequence else {}
    styles = {f"attention.{name}": ColwiseParallel(multiple_of=HEAD) for name in "qkv"}
    styles |= {"attention.out": RowwiseParallel(multiple_of=HEAD, **parts), "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(**parts)}
    if sequence:
        gathered = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        styles |= {name: SequenceParallel(sequence_dim=0) for name in ("norm1", "norm2")} | {"attention": gathered, "mlp": gathered}
    return styles


def counted(f):
    """What f returns, and {collective: (calls, bytes)}."""
    _C.reset_comm_counts()
    out = f()
    return out, {kind: count for kind, count in _C.comm_counts().items() if count[0]}


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def a_block(heads, hidden, length, sequence):
    mesh = mesh_here()
    plain, ours = block(heads, hidden)
    parallelize_module(ours, mesh, plan(sequence))
    x = torch.randn(length, 3, WIDTH, dtype=DOUBLE)
    weights = torch.randn_like(x)
    want = plain(x)
    (want * weights).sum().backward()
    given = x
    if sequence:
        given, weights = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, weights))
    out, forward = counted(lambda: ours(given))
    _, backward = counted(lambda: out.backward(weights))
    torch.testing.assert_close(full(out), want)
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad, msg=lambda text, name=name: f"{name}: {text}")
    return forward, backward


SIZES = pytest.mark.parametrize(
    ("heads", "hidden", "length"), [(6, 12, 6), (7, 13, 7), (2, 2, 2)], ids=["even", "uneven", "empty"]
)


@pytest.mark.parametrize("world", [2, 3])
@SIZES
def test_tensor_parallel(pools, world, heads, hidden, length):
    """By hand: an all-reduce behind attention and behind the MLP, and in the backward one before each."""
    activations = length * 3 * WIDTH * 8
    for forward, backward in pools(world).run(a_block, heads, hidden, length, False):
        assert forward == backward == {"all_reduce": (2, 2 * activations)}


@pytest.mark.parametrize("world", [2, 3])
@SIZES
def test_sequence_parallel(pools, world, heads, hidden, length):
    """By hand: a gather before attention and before the MLP, a reduce-scatter behind each; in the backward the other way round."""
    row = 3 * WIDTH * 8
    lengths = [len(rows) for rows in torch.arange(length).chunk(world)] + [0] * world
    for rank, (forward, backward) in enumerate(pools(world).run(a_block, heads, hidden, length, True)):
        mine = lengths[rank] * row
        assert forward == backward == {"all_gather": (2, 2 * mine), "reduce_scatter": (2, 2 * (length * row - mine))}


# ---- plain tensors that several modules take


def qkv(**options):
    """Three linear layers cut by columns, and the same layers uncut."""
    plain = nn.ModuleDict({name: nn.Linear(WIDTH, 7, dtype=DOUBLE) for name in "qkv"})
    ours = copy.deepcopy(plain)
    style = ColwiseParallel(use_local_output=False, **options)
    return parallelize_module(ours, mesh_here(), dict.fromkeys("qkv", style)), plain


def inputs(leaf=False):
    """An input for ours and one for the plain layers: the leaves, and what the layers take."""
    x = torch.randn(3, WIDTH, dtype=DOUBLE)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    return leaves, [t if leaf else t * 2 for t in leaves]


def total(layers, x):
    return sum(full(layer(x)).square().sum() for layer in layers.values())


def check(leaves, ours=None, plain=None):
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    for a, b in zip(ours.parameters() if ours else (), plain.parameters() if plain else (), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(full(a.grad), b.grad)


def reductions(outs):
    """How many the backward of these makes."""
    _, calls = counted(lambda: torch.autograd.backward(outs, [out.detach() for out in outs]))
    return calls.get("all_reduce", (0, 0))[0]


def of_one_input(leaf, frozen):
    ours, plain = qkv()
    ours.requires_grad_(not frozen)
    plain.requires_grad_(not frozen)
    leaves, given = inputs(leaf)
    counts = []
    for layers, x in zip((ours, plain), given, strict=True):
        outs = [layer(x) for layer in layers.values()]
        counts.append(reductions(outs))
    check(leaves, ours, plain)
    gone = [weakref.ref(x) for x in given]
    gc.disable()
    del x, outs
    given.clear()
    leaves.clear()
    assert [ref() for ref in gone] == [None, None]
    gc.enable()
    return counts[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_one_reduction_for_all(pools, world, leaf, frozen):
    assert pools(world).run(of_one_input, leaf, frozen) == [1] * world


def memory():
    """The ShardTensor dies with the plain tensor, and with the graph if a graph needs it."""
    ours, _ = qkv()
    ours.requires_grad_(False)  # then the graph saves no input
    _, (a, _) = inputs()
    out = ours["q"](a)
    (entered,) = [plain for plain in _entered._recent.plain if plain() is a]
    piece = weakref.ref(entered.tensor._local_tensor)
    gone = weakref.ref(a)
    gc.disable()
    del a
    assert gone() is None and entered.tensor is None and entered.node is None and piece() is None
    gc.enable()
    out.sum().backward()
    for _ in range(50):
        _, (a, _) = inputs()
        ours["q"](a)
    assert len(_entered._recent.plain) <= _entered._MOST


def test_nothing_is_kept(pools):
    pools(2).run(memory)


CHANGES = {
    "in place": lambda x: x.mul_(3),
    "through a view": lambda x: x[1].zero_(),
    "without grad": lambda x: x.detach().mul_(3),
    "data": lambda x: setattr(x, "data", x.data * 3),
    "data of other strides": lambda x: setattr(x, "data", x.data.t().contiguous().t()),
    "cut off": lambda x: x.detach_().requires_grad_(),
}


@pytest.mark.parametrize("how", CHANGES)
@on_ranks(2)
def test_a_changed_input_enters_anew(how):
    """Between two layers the input changes. The gradient is that of the second, which a stale ShardTensor would not give."""
    ours, plain = qkv()
    leaves, given = inputs()
    for layers, x in zip((ours, plain), given, strict=True):
        layers["q"](x)
        CHANGES[how](x)
        total({"k": layers["k"]}, x).backward()
    torch.testing.assert_close(full(ours["k"].weight.grad), plain["k"].weight.grad)
    if how == "cut off":
        leaves = given
    check(leaves)


def written_inside():
    """A layer writes to the ShardTensor that it gets: the next one must not get its gradient's path."""
    ours, _ = qkv()
    _, (a, _) = inputs()
    seen = []

    def write(module, args):
        seen.append(args[0].mul_(2))

    ours["q"].register_forward_pre_hook(write)
    ours["k"].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ours["q"](a)
    ours["k"](a)
    written, other = seen
    assert "Mul" in written.grad_fn.name() and "FromLocal" in other.grad_fn.name()


def other_modes():
    """Calls without grad neither use what is shared nor leave anything behind."""
    ours, plain = qkv()
    leaves, (a, b) = inputs()
    before = list(_entered._recent.plain)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(full(ours["q"](a)), plain["q"](b))
    with torch.inference_mode():
        x = torch.ones(2, WIDTH, dtype=DOUBLE)
        torch.testing.assert_close(full(ours["q"](x)), plain["q"](x))
    assert [p for p in _entered._recent.plain if p not in before] == []
    loss = total({"q": ours["q"]}, a)
    with torch.no_grad():
        assert not ours["k"](a).requires_grad
    (loss + total({"k": ours["k"]}, a)).backward()
    total({"q": plain["q"], "k": plain["k"]}, b).backward()
    check(leaves)


def several_backwards():
    """Each layer's own backward, twice, and the gradient of a gradient."""
    ours, plain = qkv()
    leaves, given = inputs()
    for layers, x in zip((ours, plain), given, strict=True):
        for layer in layers.values():
            full(layer(x)).square().sum().backward(retain_graph=True)
        loss = total(layers, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
    check(leaves, ours, plain)


def hooks():
    """A hook on the plain tensor sees the whole gradient, as in plain torch."""
    ours, plain = qkv()
    leaves, given = inputs()
    seen = []
    for layers, x in zip((ours, plain), given, strict=True):
        x.retain_grad()
        x.register_hook(seen.append)
        total(layers, x).backward()
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(given[0].grad, given[1].grad)
    check(leaves)


def other_meshes():
    """Styles of another mesh, and of one that is equal."""
    ours, plain = qkv()
    leaves, (a, b) = inputs()
    again, reversed_ranks = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    layers = [ours["q"]]
    for name, mesh in (("k", again), ("v", reversed_ranks)):
        layer = copy.deepcopy(plain[name])
        layers.append(parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False)))
    outs = [layer(a) for layer in layers]
    n = reductions(outs)
    reductions([layer(b) for layer in plain.values()])
    check(leaves)
    assert n == 2, n


def other_transforms():
    ours, _ = qkv()
    _, (a, _) = inputs()
    ours["q"](a)
    with pytest.raises(NotImplementedError, match=r"a tensor inside torch\.func\.grad"):
        torch.func.grad(lambda x: ours["q"](x).sum())(a)


def long_lived():
    """An encoder's output, read by many decoder layers by turns with other tensors: one reduction."""
    ours, plain = qkv()
    leaves, (a, b) = inputs()
    parts = []
    for layers, memory in ((ours, a), (plain, b)):
        x, parts = torch.ones(3, WIDTH, dtype=DOUBLE, requires_grad=True), []
        for _ in range(4):
            parts += [layers["q"](x * 2), layers["k"](memory), layers["v"](memory)]
        n = reductions(parts)
        assert n == (5 if layers is ours else 0), n
    check(leaves, ours, plain)


def threads():
    """Two threads take the same tensor: each has its own ShardTensor, so no rank's reductions depend on who was first."""
    ours, _ = qkv()
    _, (a, _) = inputs()
    entrance, mine, theirs = _entered.Entrance(mesh_here()), [], []

    def enter(into):
        into.extend(entrance.enter(a) for _ in range(2))

    thread = threading.Thread(target=enter, args=(theirs,))
    thread.start()
    thread.join()
    enter(mine)
    assert mine[0] is mine[1] and theirs[0] is theirs[1] and mine[0] is not theirs[0]
    total(ours, a).backward()


@pytest.mark.parametrize(
    "attack",
    ["written_inside", "other_modes", "several_backwards", "hooks", "other_meshes", "other_transforms", "long_lived", "threads"],
)
def test_sharing(pools, attack):
    pools(2).run(globals()[attack])


def checkpointed(reentrant, inside, leaf):
    """The recomputation shares as the forward does."""
    ours, plain = qkv()
    leaves, given = inputs(leaf)

    def run(layers, x):
        x = x.sin() if inside else x
        return tuple(full(layer(x)) for layer in layers.values())

    outs = checkpoint(run, ours, given[0], use_reentrant=reentrant)
    n = reductions(outs)
    reductions(run(plain, given[1]))
    check(leaves, ours, plain)
    return n


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["given", "computed"])
@pytest.mark.parametrize("leaf", [False, True], ids=["", "leaf"])
def test_activation_checkpointing(pools, reentrant, inside, leaf):
    assert pools(2).run(checkpointed, reentrant, inside, leaf) == [1, 1]


def graphs(collectives):
    """A backend that notes the collectives of the graphs in two lists, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def note(into):
        def compiler(graph, inputs):
            names = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
            into.extend(name[1] for name in names if name[0] == "_c10d_functional" and name[1] != "wait_tensor")
            return graph

        return compiler

    forward, backward = collectives
    return aot_autograd(
        fw_compiler=note(forward), bw_compiler=note(backward), partition_fn=min_cut_rematerialization_partition
    )


def compiled(how):
    """One graph for all layers, or one for each."""
    ours, plain = qkv()
    leaves, given = inputs()
    calls = [], []
    for layers in (ours, plain):
        layers["q"].requires_grad_(False)  # then its graph saves no input, which may be written

    def run(layers, x):
        x = x.sin()
        outs = [layers["q"](x)]
        if how == "written":
            x.mul_(2)
        return [*outs, layers["k"](x), layers["v"](x)]

    function = run
    if how == "each layer":
        for layer in ours.values():
            layer.compile(backend=graphs(calls), fullgraph=True)
    else:
        function = torch.compile(run, backend=graphs(calls), fullgraph=True)
    reductions(function(ours, given[0]))
    reductions(run(plain, given[1]))
    check(leaves, ours, plain)
    return len(calls[1])


@pytest.mark.parametrize(("how", "n"), [("one graph", 1), ("written", 2), ("each layer", 3)])
def test_compiled(pools, how, n):
    """Each graph enters its own inputs, so separate graphs share nothing."""
    assert pools(2).run(compiled, how) == [n, n]


def compiled_block(sequence):
    plain, ours = block(7, 13)
    parallelize_module(ours, mesh_here(), plan(sequence))
    x = torch.randn(7, 3, WIDTH, dtype=DOUBLE)
    plain(x).square().sum().backward()
    calls = [], []
    given = distribute_tensor(x, mesh_here(), [Shard(0)]) if sequence else x
    out = torch.compile(ours, backend=graphs(calls), fullgraph=True)(given)
    out.backward(2 * out.detach())
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad, msg=lambda text, name=name: f"{name}: {text}")
    return calls


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_compiled_block(pools, sequence):
    wanted = ["all_gather_into_tensor", "reduce_scatter_tensor"] if sequence else ["all_reduce"]
    for forward, backward in pools(2).run(compiled_block, sequence):
        assert forward == backward == wanted * 2
