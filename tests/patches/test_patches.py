"""The table of changes inside torch: what is changed when, what is not, and what happens if torch lacks an attribute."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import shardtensor as st
import torch
from pool import on_ranks
from shardtensor import _late
from shardtensor.patches import _patch, fsdp
from shardtensor.patches._patch import MissingError, Patch
from shardtensor.patches._table import PATCHES
from shardtensor.tensor import _compile
from torch import nn
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent

START = f"""
import sys
sys.path[:0] = {[str(HERE), str(Path(st.__file__).parents[1])]!r}
import torch
import torch.distributed.tensor
import untouched
"""
EVERYTHING = START + "untouched.import_everything()\nbefore = untouched.snapshot()\n"
# What `import shardtensor` may replace. Barriers: ranks must count them alike before they have ShardTensors. The set of classes that
# torch.load accepts: it must find ours in a file before there is a ShardTensor. A FlopCounterMode copies the formulas when it is made.
AT_IMPORT = """
AT_IMPORT = {
    "torch._weights_only_unpickler._marked_safe_globals_set",
    "torch.distributed.barrier",
    "torch.distributed.destroy_process_group",
    "torch.distributed.distributed_c10d.barrier",
    "torch.distributed.distributed_c10d.destroy_process_group",
    "torch.utils.flop_counter.flop_registry, how many",
}
"""
COMPILES = torch.__version__ >= "2.12"  # functions of ShardTensors
IMPORT = "import shardtensor\n"
A_MESH = 'shardtensor._C.Mesh("cpu", [1], [0], [], [""], 0)'


def run(program, *, cwd=None):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240, cwd=cwd, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_replaces_two_functions():
    run(
        EVERYTHING
        + AT_IMPORT
        + """
import shardtensor, shardtensor.data, shardtensor.debug, shardtensor.experimental, shardtensor.parallel, shardtensor.points
import shardtensor.sharded_tensor, shardtensor.domain_parallel
from shardtensor import *
assert set(untouched.replaced(before)) == AT_IMPORT, untouched.replaced(before)
"""
    )


STOCK = """
import copy, shardtensor, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def train(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

x = torch.randn(5, 4)
plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
train(plain, x)
torch.save(plain.state_dict(), "plain.pt")
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
train(model, x)
assert {type(p.data) for p in model.parameters()} == {DTensor}
options = StateDictOptions(full_state_dict=True)
set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="saved")
dcp.load({"model": get_model_state_dict(model)}, checkpoint_id="saved")
compiled = torch.compile(lambda a, b: (a @ b).relu().sum(), backend="aot_eager")
w = torch.randn(4, 3, requires_grad=True)
compiled(x, w).backward()
compiled(distribute_tensor(x, mesh["tp"], [Shard(0)]), distribute_tensor(w.detach(), mesh["tp"], [Shard(1)]).requires_grad_()).backward()
dist.barrier()
dist.destroy_process_group()
assert untouched.by(before, shardtensor) == AT_IMPORT - {"torch._weights_only_unpickler._marked_safe_globals_set"}, untouched.by(before, shardtensor)
made = {change.name for change in shardtensor.debug.patches() if change.state == "made"}
assert made == {name for name in AT_IMPORT if "distributed" in name} | {"torch.utils.flop_counter.register_flop_formula"}, made
"""


def test_a_program_without_shard_tensors_runs_torchs_functions(tmp_path):
    run(EVERYTHING + AT_IMPORT + STOCK, cwd=tmp_path)


# Made by another process: loading them is a first use.
SAVED = START + """
import pickle, shardtensor as st, shardtensor.sharded_tensor as sharded, shardtensor.sharding_spec as spec
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
t = st.distribute_tensor(torch.ones(4), st.init_device_mesh("cpu", (1,)), [st.Shard(0)])
torch.save(t, "tensor0.pt")
pickle.dump(t, open("tensor0.pickle", "wb"))
pickle.dump(t._spec, open("spec0.pickle", "wb"))
torch.save(st.LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)]), "shards0.pt")
torch.save(sharded.zeros(spec.ChunkShardingSpec(0, ["rank:0/cpu"]), 4), "sharded0.pt")
"""
GROUP = """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""
TORCHS_MESH = (
    GROUP
    + """
from torch.distributed.device_mesh import init_device_mesh
from shardtensor import Replicate, Shard
mesh = init_device_mesh("cpu", (1,))
assert any(change.state.startswith("waits for the first use") for change in shardtensor.debug.patches())
"""
)
USES = {
    "mesh": A_MESH,
    "init_device_mesh": GROUP + 'shardtensor.init_device_mesh("cpu", (1,))',
    "replace_dtensor": "shardtensor.replace_dtensor()",
    "LocalShardsWrapper": "shardtensor.LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)])",
    "ShardedTensor": GROUP
    + """
import shardtensor.sharded_tensor as sharded, shardtensor.sharding_spec as spec
sharded.zeros(spec.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
""",
    "from_local": TORCHS_MESH + "shardtensor.ShardTensor.from_local(torch.ones(4), mesh, [Shard(0)])",
    "current_mesh": GROUP + "shardtensor.ShardTensor.from_local(torch.ones(4))",
    "distribute_tensor": TORCHS_MESH + "shardtensor.distribute_tensor(torch.ones(4), mesh, [Shard(0)])",
    "scatter_tensor": TORCHS_MESH + "shardtensor.scatter_tensor(torch.ones(4), 0, mesh, [Shard(0)])",
    "distribute_module": TORCHS_MESH + "shardtensor.distribute_module(torch.nn.Linear(2, 2), mesh)",
    "parallelize_module": TORCHS_MESH
    + """
from shardtensor.parallel import ColwiseParallel, parallelize_module
parallelize_module(torch.nn.Linear(2, 2), mesh, ColwiseParallel())
""",
    "factory": TORCHS_MESH + "shardtensor.zeros(4, device_mesh=mesh, placements=[Shard(0)])",
    "random factory": TORCHS_MESH + "shardtensor.randn(4, device_mesh=mesh, placements=[Shard(0)])",
    "domain_parallel": TORCHS_MESH
    + """
import shardtensor.domain_parallel
shardtensor.domain_parallel.scatter_tensor(torch.ones(4), 0, mesh, (Shard(0),))
""",
    "torch's ShardedTensor": GROUP
    + """
from torch.distributed._shard import sharded_tensor, sharding_spec
stock = sharded_tensor.zeros(sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
shardtensor.ShardTensor.from_sharded_tensor(stock)
""",
    "a thread": TORCHS_MESH
    + """
import threading
thread = threading.Thread(target=lambda: shardtensor.distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
thread.start()
thread.join()
""",
    "torch.compile": TORCHS_MESH
    + """
inside = torch.compile(lambda x: shardtensor.ShardTensor.from_local(x, mesh, [Shard(0)]) * 2, backend="aot_eager", fullgraph=True)
assert inside(torch.ones(4)).full_tensor().tolist() == [2] * 4
""",
    "torch.load": GROUP + 'assert torch.load("tensor0.pt").full_tensor().tolist() == [1] * 4',
    "pickle": GROUP + 'import pickle; pickle.load(open("tensor0.pickle", "rb"))',
    "a spec from a file": GROUP + 'import pickle; pickle.load(open("spec0.pickle", "rb"))',
    "LocalShardsWrapper from a file": 'torch.load("shards0.pt")',
    "ShardedTensor from a file": GROUP + 'torch.load("sharded0.pt", weights_only=False)',
}
if not COMPILES:
    del USES["torch.compile"]


def test_all_is_made_at_the_first_use(tmp_path):
    """Each use is the first in a process of its own."""
    run(SAVED, cwd=tmp_path)
    run(
        EVERYTHING
        + f"""
import os, traceback, warnings
import shardtensor
from shardtensor.patches._table import PATCHES
warnings.simplefilter("error", RuntimeWarning)
waiting = [change for change in shardtensor.debug.patches() if change.state.startswith("waits for the first use")]
assert len(waiting) > 60, shardtensor.debug.patches()

def check(use):
    exec(use, globals())
    states = {{change.state.split(" torch ")[0] for change in shardtensor.debug.patches()}}
    assert states <= {{"made", "not needed before", "not needed since"}}, shardtensor.debug.patches()
    changed = untouched.replaced(before)
    for patch in PATCHES:
        if patch.name and patch.needed and patch.name not in ("FSDPState", "FSDPParamGroup", "register_flop_formula", "_foreach_supported_types"):
            name = patch.path if "_op_dispatcher" not in patch.name else "DTensor's engine: how many attributes"
            assert name in changed, name
    for module, table in untouched.TABLES:
        assert f"{{module}}.{{table}}, how many" in changed, table

failed = []
for name, use in {USES!r}.items():
    if os.fork() == 0:
        try:
            check(use)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    failed += [name] * (os.wait()[1] != 0)
assert failed == [], failed
""",
        cwd=tmp_path,
    )


def test_what_is_imported_later_is_changed_then():
    run(
        START
        + f"""
import importlib.util, shardtensor
{A_MESH}
assert importlib.util.find_spec("torch.utils.flop_counter")  # looks for it, and does not import it
states = {{change.name: change.state for change in shardtensor.debug.patches()}}
assert states["torch.utils.flop_counter.register_flop_formula"] == "waits for the import of torch.utils.flop_counter", states
assert "torch.distributed.checkpoint" not in sys.modules and "torch._inductor.utils" not in sys.modules
untouched.import_everything()
left = [change for change in shardtensor.debug.patches() if change.state != "made" and not change.state.startswith("not needed")]
assert left == [], left
assert torch.ops.aten.linear_backward in torch.utils.flop_counter.flop_registry
"""
    )


def test_functions_that_were_imported_by_name_are_replaced():
    run(
        START
        + f"""
import shardtensor
from torch import save
from torch.nn.utils import get_total_norm
stock = [save]  # a name would be replaced
{A_MESH}
assert save is torch.save is not stock[0] and save.__wrapped__ is stock[0]
assert get_total_norm is torch.nn.utils.get_total_norm and get_total_norm.__wrapped__.__name__ == "_get_total_norm"
"""
    )


def test_barriers_that_were_imported_by_name_before_are_never_counted():
    """Counted from the first use on, they would differ: it need not be the same barrier on all ranks."""
    run(
        f"import torch\nfrom torch.distributed import barrier\n{START}"
        + f"""
import shardtensor
{A_MESH}
assert barrier is not torch.distributed.barrier and torch.distributed.barrier.__wrapped__ is barrier
"""
    )


@pytest.mark.skipif(not COMPILES, reason="torch 2.12 and newer compile functions of ShardTensors")
def test_a_first_use_in_a_compiled_function_comes_before_its_graph():
    run(
        START
        + IMPORT
        + TORCHS_MESH
        + """
import torch._functorch._aot_autograd.graph_capture as capture
from shardtensor import _late
happened, stock = [], capture._create_graph
def create_graph(*args, **options):
    happened.append("graph")
    return stock(*args, **options)
capture._create_graph = create_graph
_late.at_first_use(lambda: happened.append("first use"))
x = torch.randn(4, 3, requires_grad=True)
@torch.compile(backend="aot_eager", fullgraph=True)
def loss(x):
    return (shardtensor.ShardTensor.from_local(x, mesh, [Shard(0)]) * x.detach().sum() * 2).sum().full_tensor()
loss(x).backward()
assert happened[:2] == ["first use", "graph"], happened
assert capture._create_graph.__wrapped__ is create_graph
torch.testing.assert_close(x.grad, torch.full((4, 3), 2.0) * x.detach().sum())
"""
    )


def test_a_flop_counter_that_was_made_before_counts_alike():
    run(
        START
        + IMPORT
        + TORCHS_MESH
        + """
from torch.utils.flop_counter import FlopCounterMode
counters = FlopCounterMode(display=False), FlopCounterMode(display=False)
def count(counter, *tensors):
    x, w = (t.requires_grad_() for t in tensors)
    with counter:
        torch.nn.functional.linear(x, w).sum().backward()
    return counter.get_total_flops()
tensors = torch.randn(2, 3, 4), torch.randn(5, 4)
plain = count(counters[0], *tensors)
ours = count(counters[1], *(shardtensor.distribute_tensor(t.detach(), mesh, [Replicate()]) for t in tensors))
assert ours == plain == 3 * 2 * 2 * 3 * 4 * 5, (ours, plain)
"""
    )


def test_models_that_were_wrapped_before_train_as_before():
    """fully_shard, DDP, clipping and a scheduler's step, set up by torch alone, go on after the first use."""
    run(
        START
        + IMPORT
        + TORCHS_MESH
        + """
import copy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
models = [plain, fully_shard(copy.deepcopy(plain), mesh=mesh), DistributedDataParallel(copy.deepcopy(plain))]
optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
x = torch.randn(4, 3)
def train():
    losses = []
    for model, optimizer, scheduler in zip(models, optimizers, schedulers):
        loss = model(x).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses
first = train()
weight = shardtensor.distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
assert sys.modules["torch.optim.adam"].adam.__wrapped__.__name__ == "adam"
for losses in (first, train(), train()):
    assert max(losses) - min(losses) < 1e-5, losses
assert losses[0] < first[0]
"""
    )


def test_optimizers_that_were_made_before_take_part():
    """A class's step is wrapped with its first object, which here had plain parameters."""
    run(
        START
        + IMPORT
        + TORCHS_MESH
        + """
def step(p):
    optimizer = torch.optim.LBFGS([p], max_iter=3)
    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return p.detach()
plain = step(torch.nn.Parameter(torch.arange(4.0)))
ours = step(torch.nn.Parameter(shardtensor.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])))
torch.testing.assert_close(ours.full_tensor(), plain)
assert torch.optim.LBFGS.step.hooked and torch.optim.LBFGS.step.__code__.co_filename.endswith("optimizers.py")
"""
    )


# ---- the policy ----


@pytest.fixture
def module():
    """A module of torch that has one function, and loses it with its patch."""
    made = types.ModuleType("torch.made_for_a_test")
    made.there = lambda: "torch's"
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]
    _late._waiting.pop(made.__name__, None)  # a patch that raised waits for the next import


def entry(module, name, **options):
    return Patch(module.__name__, name, lambda stock: lambda: "ours", "it is a test.", "nothing", **options)


@pytest.mark.parametrize("name", ["gone", "gone.deeper"])
def test_a_required_patch_that_is_missing_raises(module, name):
    with pytest.raises(MissingError, match=rf"torch {torch.__version__.replace('+', '.')} has no torch\.made_for_a_test\.{name}, .*a test"):
        _patch.make([entry(module, name)])


def test_a_patch_replaces_what_is_there(module):
    _patch.make([entry(module, "there")])
    assert module.there() == "ours"


def test_another_that_is_missing_says_what_follows(module):
    lacking = entry(module, "gone", without="Go on foot.")
    with pytest.warns(RuntimeWarning, match=r"has no torch\.made_for_a_test\.gone.*Go on foot\."):
        _patch.make([lacking])
    assert _patch.state(lacking) == "missing"


def test_what_a_wrapper_needs_besides_counts_as_missing(module):
    needy = Patch(module.__name__, "there", lambda stock: module.rest, "it is a test.", "nothing", without="Go on foot.")
    with pytest.warns(RuntimeWarning, match=r"Go on foot.*has no attribute 'rest'"):
        _patch.make([needy])
    assert module.there() == "torch's"


def test_versions_that_do_not_need_it(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options, says in ((dict(since="99.0"), "not needed before torch 99.0"), (dict(until="2.0"), "not needed since torch 2.0")):
            patch = entry(module, "gone", **options)
            _patch.make([patch])
            assert _patch.state(patch) == says


def test_without_one_for_compile_no_graph_is_made(module):
    from shardtensor.patches._graphs import REFUSED, refuse

    before = list(_compile.graphs_refused)
    try:
        with pytest.warns(RuntimeWarning, match="fullgraph=True"):
            _patch.make([entry(module, "gone", without=REFUSED, turn_off=refuse)])
        assert "has no torch.made_for_a_test.gone" in _compile.graphs_refused[0]
    finally:
        _compile.graphs_refused[:] = before


@on_ranks(2)
def test_without_one_for_fsdp_shard_tensors_are_refused():
    assert all(patch.turn_off == fsdp._refused.append or patch.name.endswith("__init__") for patch in fsdp.PATCHES if "FSDPParam." in patch.name)
    mesh = st.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    fsdp._refused.append("torch has no such thing")
    try:
        fully_shard(nn.Linear(3, 2), mesh=mesh["dp"])
        with pytest.raises(RuntimeError, match=r"fully_shard: parameter 'weight' is a ShardTensor\. torch has no such thing"):
            fully_shard(st.distribute_module(nn.Linear(3, 2), mesh["tp"]), mesh=mesh["dp"])
    finally:
        fsdp._refused.clear()


# ---- the table ----


def test_each_entry_says_what_it_must():
    assert len({(patch.module, patch.name, patch.wrap) for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.why.endswith(".") and patch.ask and not patch.ask.endswith("."), patch
        assert patch.required or patch.without.endswith("."), patch
        assert patch.turn_off is None or patch.without, patch


def test_the_page_of_patches_is_up_to_date():
    script = HERE.parents[1] / "docs/patches.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_states_read_as_a_table():
    rows = str(st.debug.patches()).splitlines()
    assert len(rows) == len(PATCHES) and rows[0].split("  ")[0] == PATCHES[0].path
