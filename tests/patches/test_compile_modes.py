"""torch.compile: modes entered inside a graph, local_map, and the parallel styles, against eager."""

from __future__ import annotations

import operator

import pytest
import shardtensor
import torch
import torch.nn.functional as F
from oracle import mesh_here, share
from pool import on_ranks
from shardtensor import _C, distribute_module, parallel
from shardtensor.experimental import local_map
from shardtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    loss_parallel,
    parallelize_module,
)
from shardtensor.tensor._modes import is_strict
from test_compile import S0, S1, Block, P, R, _counting, _features, _steps, _tensor_parallel, _whole, equal_compiled, rows, spread

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.12 and newer compile functions of ShardTensors")


def _row():
    return torch.arange(1.0, 7.0)


# ---- modes inside a graph ----


def _replicated(x, w):
    with shardtensor.implicit_replication():
        y = x * _row()
    return y * 2


def _replicated_product(x, w):
    with shardtensor.promotion_mode("replicate"):
        return torch.relu(x @ torch.ones(6, 5)) + torch.ones(5)


def _as_decorator(x, w):
    @shardtensor.implicit_replication()
    def inside(x):
        return x * _row()

    return inside(x)


def _nested(x, w):
    with shardtensor.strict_mode(), shardtensor.implicit_replication():
        y = x * _row()
        with shardtensor.strict_mode(False):
            y = y + torch.linalg.matrix_exp(w).sum()  # has no rule
        return y + _row()


def _read(x, w):
    outside = shardtensor.get_promotion_mode()
    with shardtensor.implicit_replication():
        if shardtensor.get_promotion_mode() == "replicate":
            x = x * 3
        with shardtensor.strict_mode():
            x = x * 5 if is_strict() else x
    return x * 7 if shardtensor.get_promotion_mode() == outside == "error" and not is_strict() else x


def _set_and_set_back(x, w):
    shardtensor.set_promotion_mode("replicate")
    y = x * _row()
    shardtensor.set_promotion_mode("error")
    return y


def _caught(x, w):
    try:
        with shardtensor.implicit_replication():
            x = x * _row()
            raise KeyError
    except KeyError:
        return x * (2 if shardtensor.get_promotion_mode() == "error" else 3)


def _in_a_checkpoint(x, w):
    def inside(y):
        with shardtensor.implicit_replication():
            return torch.relu(y * _row()).softmax(0)

    return torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False) @ w


def _loss(x, w):
    logits = (x @ w).redistribute(placements=[S1])
    with loss_parallel():
        return F.cross_entropy(logits, torch.arange(7) % 6, weight=_row(), label_smoothing=0.1)


def _nll(x, w):
    with loss_parallel():
        return F.nll_loss(F.log_softmax(x, -1), torch.arange(7) % 6, reduction="none")


MODES = {
    "replicated": _replicated,
    "replicated_product": _replicated_product,
    "as_decorator": _as_decorator,
    "nested": _nested,
    "read": _read,
    "set_and_set_back": _set_and_set_back,
    "caught": _caught,
    "in_a_checkpoint": _in_a_checkpoint,
    "loss": _loss,
    "nll": _nll,
}


def equal_in_modes(names, backend):
    equal_compiled(names, backend, MODES)
    assert _C.state_of_modes() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_modes_inside(pools, world, backend):
    pools(world).run(equal_in_modes, list(MODES), backend, seconds=110)


@pytest.mark.parametrize("world", share([3, 1], 2))
def test_modes_inside_by_inductor(pools, world):
    pools(world).run(equal_in_modes, ["replicated", "nested", "read", "loss"], "inductor", seconds=110)


# ---- what tracing leaves behind, and what a graph is guarded on ----


def _raises(x):
    with shardtensor.implicit_replication():
        raise KeyError("of mine")


def _raises_in_an_op(x):
    with shardtensor.strict_mode(), shardtensor.implicit_replication():
        return x * torch.ones(5)  # x has six columns


def _breaks(x):
    with shardtensor.implicit_replication():
        y = x * _row()
        torch._dynamo.graph_break()
        return y + _row()


def _lasting(x):
    shardtensor.set_promotion_mode("replicate")
    return x * _row()


def _failing(gm, inputs):
    """A backend that raises at the graph's first multiplication, which is inside the mode."""
    class Failing(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is operator.mul:
                raise RuntimeError("backend failed")
            return super().call_function(target, args, kwargs)

    Failing(gm).run(*inputs)


def restored():
    """However tracing ends, the modes are as they were before, even if the user had set them."""
    x = spread(torch.ones(7, 6))
    for function, backend, why in (
        (_raises, "aot_eager", "of mine"),
        (_raises_in_an_op, "aot_eager", "size|shape"),
        (_breaks, "aot_eager", "graph_break"),
        (_lasting, "aot_eager", "cannot set a mode of shardtensor"),
        (lambda x: _replicated(x, x), _failing, "backend failed"),
    ):
        for strict in (False, True):
            torch._dynamo.reset()
            with shardtensor.strict_mode(strict):
                before = _C.state_of_modes()
                with pytest.raises(Exception, match=why):
                    torch.compile(function, backend=backend, fullgraph=True)(x)
                assert _C.state_of_modes() == before, why


def in_parts():
    """Without fullgraph, what cannot be in one graph runs as in eager mode."""
    x = spread(torch.arange(42.0).reshape(7, 6))
    for function in (_breaks, _lasting):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager")
        want = _whole(function(x))
        after = _C.state_of_modes()
        for _ in range(2):
            shardtensor.set_promotion_mode("error")
            torch.testing.assert_close(_whole(compiled(x)), want)
            assert _C.state_of_modes() == after
        shardtensor.set_promotion_mode("error")
    torch._dynamo.reset()
    with pytest.raises(KeyError, match="of mine"):
        torch.compile(_raises, backend="aot_eager")(x)
    assert _C.state_of_modes() == 0


def guarded_at_the_entry():
    """A graph is guarded on the modes around the call, not on those set inside: that would recompile it at every call."""
    def function(x):
        with shardtensor.implicit_replication():
            y = x * _row()
        return y * (2 if shardtensor.get_promotion_mode() == "error" else 3)

    x = spread(torch.ones(7, 6))
    compiled, counter = _counting(function)
    for around, factor, frames in (("error", 2, 1), ("error", 2, 1), ("replicate", 3, 2), ("error", 2, 2), ("replicate", 3, 2)):
        with shardtensor.promotion_mode(around):
            torch.testing.assert_close(_whole(compiled(x)), _row().expand(7, 6) * factor)
            assert shardtensor.get_promotion_mode() == around
        assert counter.frame_count == frames
    reads, _ = _counting(lambda t: t * (2 if shardtensor.get_promotion_mode() == "error" else 3))  # its graph has no ShardTensor
    for around, factor in (("error", 2.0), ("replicate", 3.0), ("error", 2.0)):
        with shardtensor.promotion_mode(around):
            assert reads(torch.ones(())).item() == factor


def closed_again():
    """What comes after the mode is traced without it."""
    def after(x):
        with shardtensor.implicit_replication():
            y = x * _row()
        return y + _row()

    def after_the_loss(x):
        with loss_parallel():
            loss = F.cross_entropy(x, torch.zeros(7, dtype=torch.long))
        return loss + F.cross_entropy(x, torch.zeros(7, dtype=torch.long))

    for function in (after, after_the_loss):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"plain torch\.Tensor"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(spread(torch.ones(7, 6)))


def kept():
    """Nodes that set a mode are not dead code, although nothing reads their results."""
    from torch._dynamo.backends.registry import lookup_backend

    def tidying(gm, inputs):
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return lookup_backend("aot_eager")(gm, inputs)

    equal_compiled(["replicated", "loss"], tidying, MODES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["closed_again", "guarded_at_the_entry", "in_parts", "kept", "restored"])
def test_modes_outlast_no_graph(pools, name, world):
    pools(world).run(globals()[name])


# ---- local_map ----


def _local_map(func, out, inputs=lambda x, w: (x,), **options):
    def run(x, w):
        results = local_map(func, out, **options)(*inputs(x, w))
        if not isinstance(results, tuple):
            return results
        return sum((i + 2) * (_whole(r).tanh().sum() if isinstance(r, torch.Tensor) else r) for i, r in enumerate(results))

    return run


def _even(x, w):
    return w.redistribute(placements=[S0]), w


def _both(a, b):
    return a @ b, (a * 2).sum(0), a.t() * 3


def _with_cuts(x, w):
    return local_map(lambda t: t.softmax(1) * 2, [S0], sharding_shapes=rows(mesh_here().size(), 6))(x)


def _with_other_cuts(x, w):
    """The result has twice the rows of its input."""
    cuts = {0: [(2 * n, m) for n, m in rows(mesh_here().size(), 6)[0]]}
    return local_map(lambda t: torch.cat([t, t * 3]), [S0], in_placements=([S0],), sharding_shapes=cuts)(x)


MAPPED = {
    "even": _local_map(lambda a, b: torch.relu(a @ b), [S0], _even),
    "even_other_size": _local_map(lambda a, b: torch.cat([a, a * 2]), [S0], _even),
    "several_outputs": _local_map(_both, ([S0], [P], [S1]), _even, in_placements=([S0], [R]), in_grad_placements=([S0], [P])),
    "an_output_that_is_no_tensor": _local_map(lambda a, b: (a * 2, b.shape[1]), ([S0], None), _even),
    "moved_inputs": _local_map(
        lambda a, b: a @ b, [S0], lambda x, w: (w, w), in_placements=([S0], [R]), redistribute_inputs=True
    ),
    "moved_to_summands": _local_map(
        lambda a, b: a @ b, [P], lambda x, w: (w, w), in_placements=([S1], [S0]), redistribute_inputs=True
    ),
    "gradients_in_summands": _local_map(lambda a, b: a @ b, [S0], _even, in_grad_placements=([S0], [P])),
    "moved_with_gradients_in_summands": _local_map(
        lambda a, b: a @ b,
        [S0],
        lambda x, w: (x.redistribute(placements=[R])[:6], w),
        in_placements=([S0], [R]),
        in_grad_placements=([S0], [P]),
        redistribute_inputs=True,
    ),
    "with_cuts": _with_cuts,
    "with_other_cuts": _with_other_cuts,
    "uneven_to_summands": _local_map(lambda a, b: (a @ b).sum(0), [P], lambda x, w: (x, w), in_grad_placements=([S0], [P])),
    "uneven_and_whole": _local_map(lambda a, b: b * 2, [R], lambda x, w: (x, w)),
}


def equal_mapped(names, backend):
    equal_compiled(names, backend, MAPPED)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MAPPED)
def test_local_map(pools, name, world):
    pools(world).run(equal_mapped, [name], "aot_eager")


@pytest.mark.parametrize(("world", "backend"), [(2, "eager"), (3, "eager"), (3, "inductor")])
def test_local_map_by_other_backends(pools, world, backend):
    pools(world).run(equal_mapped, ["several_outputs", "with_cuts", "uneven_to_summands"], backend, seconds=110)


@on_ranks(2, 3)
def test_local_map_of_unknown_cuts_says_why():
    """This rank's piece alone does not tell how a result is cut. Asking all ranks is refused inside a graph."""
    for function in (_local_map(lambda t: t * 2, [S0]), _local_map(lambda t: t[:1], [S0], in_placements=([S0],))):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="the ranks exchange sizes"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(spread(torch.ones(7, 6)), spread(torch.ones(6, 6), R))


# ---- training steps ----


def _sequence_parallel(_):
    """Between the layers, activations are cut along the sequence of 5."""
    plan = {f"attention.{name}": ColwiseParallel(multiple_of=4) for name in "qkv"}
    plan["attention.o"] = RowwiseParallel(multiple_of=4, output_layouts=S1, use_local_output=False)
    plan["attention"] = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R)
    plan |= {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=S1, use_local_output=False)}
    whole = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=S1, output_layouts=S1, desired_output_layouts=R
    )
    return parallelize_module(parallelize_module(Block(), mesh_here(), plan), mesh_here(), whole)


class _Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12))

    def forward(self, x, factor, *, shift):
        return x * self.weight * factor + shift, x.sum(1)


class _Prepared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = _Scaled()

    def forward(self, x):
        moved, total = self.scaled(x, 2.0, shift=x * 3)
        return moved.sum(1) + total


def _prepared(_):
    model = _Prepared()
    distribute_module(model, mesh_here())
    inputs = PrepareModuleInput(
        input_layouts=(R, None),
        desired_input_layouts=(S1, None),
        input_kwarg_layouts={"shift": R},
        desired_input_kwarg_layouts={"shift": S1},
    )
    outputs = PrepareModuleOutput(output_layouts=(S1, P), desired_output_layouts=(R, R), use_local_output=True)
    for style in (inputs, outputs):
        parallelize_module(model.scaled, mesh_here(), style)
    return model


def _tokens(step):
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))


class _LanguageModel(torch.nn.Module):
    """11 words, which two and three ranks do not divide. The loss is taken inside."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = torch.nn.Embedding(11, 12), Block(), torch.nn.Linear(12, 11)

    def forward(self, tokens):
        logits = self.head(self.block(self.embedding(tokens)))
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _language_model(embedding):
    def make(_):
        plan = {"embedding": getattr(parallel, embedding)(input_layouts=R, output_layouts=R)}
        plan["head"] = parallel.ColwiseParallel(use_local_output=False)
        model = parallel.parallelize_module(_LanguageModel(), mesh_here(), plan)
        _tensor_parallel(model.block, mesh_here())
        return model

    return make


class _PlainNorm(torch.nn.Module):
    """Uses a parameter that no plan names together with ShardTensors."""

    def __init__(self):
        super().__init__()
        self.up, self.scale, self.down = torch.nn.Linear(12, 19), torch.nn.Parameter(torch.ones(19)), torch.nn.Linear(19, 12)

    def forward(self, x):
        with shardtensor.implicit_replication():
            y = torch.relu(self.up(x)) * self.scale
        return self.down(y)


def _implicitly_replicated(_):
    return parallelize_module(_PlainNorm(), mesh_here(), {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


MODELS = {
    "sequence_parallel": (_sequence_parallel, _features),
    "prepared": (_prepared, _features),
    "embedding_by_columns": (_language_model("ColwiseParallel"), _tokens),
    "embedding_by_rows": (_language_model("RowwiseParallel"), _tokens),
    "implicitly_replicated": (_implicitly_replicated, _features),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", MODELS)
def test_training_steps(name, backend="aot_eager"):
    make, batch = MODELS[name]
    torch.testing.assert_close(_steps(make, backend, batch=batch), _steps(make, None, batch=batch), atol=1e-5, rtol=0)


# ---- input_reshard ----


class _MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 19), torch.nn.Linear(19, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def _resharded(compiled_part):
    def make(backend):
        model = parallelize_module(_MLP(), mesh_here(), {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
        if compiled_part and backend:
            model.forward = torch.compile(model.forward, backend=backend)
            model(_features(0))  # its graph is for calls without input_reshard
        return input_reshard(model, mesh_here(), 0)

    return make


@on_ranks(2, seconds=110)
def test_input_reshard_is_not_compiled():
    """A graph would pass pieces to input_reshard, which takes them for whole tensors. So no graph runs inside input_reshard."""
    for whole in (torch.nn.Sequential(_resharded(False)(None)), _resharded(False)(None)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="input_reshard cuts what a module saves"):
            torch.compile(whole, backend="aot_eager", fullgraph=True)(_features(0))
    torch.testing.assert_close(_steps(_resharded(True), "aot_eager", compiled_blocks=True), _steps(_resharded(False), None))


# ---- how much the forward saves ----


@on_ranks(2)
def test_memory_budgets():
    """Less memory, the same values: collectives and random keys of the forward are saved, whatever else is computed again."""
    import torch._functorch.config as config

    def loss(x, w):
        return (F.dropout(torch.relu(x @ w), 0.5).tanh() @ w).softmax(0).square().sum()

    results = []
    for budget in (None, 0, 0.1, 0.5):
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = (spread(torch.arange(n * 6.0).sin().reshape(n, 6), S0, grad=True) for n in (7, 6))
        with config.patch(activation_memory_budget=1 if budget is None else budget):
            run = loss if budget is None else torch.compile(loss, backend="aot_eager", fullgraph=True)
            out = run(x, w)
            _whole(out).backward()
        results.append([_whole(t.detach()) for t in (out, x.grad, w.grad)])
    for one in results[1:]:
        torch.testing.assert_close(one, results[0])
