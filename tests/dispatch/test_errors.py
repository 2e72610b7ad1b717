"""A mistake raises on every rank at once; the error names argument and rank. The process group works afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_id, mesh_of, place
from pool import Pool, on_ranks
from shardtensor import (
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    scatter_tensor,
    set_promotion_mode,
    strict_mode,
    zeros,
)
from shardtensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.device_mesh import DeviceMesh

WORLDS = [(2, (2,)), (3, (3,))]


def piece(*sizes, **options):
    return torch.ones(sizes, **options)


# Each takes the mesh and this rank, and makes a mistake on at least one rank.


def shape_does_not_fit(mesh, me):
    ShardTensor.from_local(piece(2, 3), mesh, [Shard(0)], shape=(7, 3), run_check=True)


def one_rank_does_not_fit(mesh, me):
    ShardTensor.from_local(piece(2 + (me == 1), 3), mesh, [Shard(0)], run_check=True)


def one_rank_does_not_fit_the_shapes(mesh, me):
    shapes = {0: [(2, 3)] * mesh.size()}
    ShardTensor.from_local(piece(2 + (me == 1), 3), mesh, [Shard(0)], sharding_shapes=shapes, run_check=True)


def another_number_of_dims(mesh, me):
    # Shard(1) is out of range on one rank only.
    ShardTensor.from_local(piece(*(2, 3)[me == 1 :]), mesh, [Shard(1)], sharding_shapes="infer")


def pieces_do_not_tile(mesh, me):
    ShardTensor.from_local(piece(2, 3 + (me == 1)), mesh, [Shard(0)], sharding_shapes="infer")


def another_dtype(mesh, me):
    ShardTensor.from_local(piece(2, dtype=torch.float64 if me == 1 else torch.float32), mesh, [Shard(0)], run_check=True)


def another_placement(mesh, me):
    ShardTensor.from_local(piece(2, 2), mesh, [Shard(me == 1)], run_check=True)


def unknown_mode(mesh, me):
    ShardTensor.from_local(piece(2), mesh, sharding_shapes="guess")


def chunk_without_shape(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(0)], sharding_shapes="chunk")


def dim_out_of_range(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(1)])


def negative_dim_out_of_range(mesh, me):
    distribute_tensor(piece(2), mesh, [Shard(-2)])


def redistribute_dim_out_of_range(mesh, me):
    zeros(3, device_mesh=mesh).redistribute(placements=[Shard(1)])


def distributed_twice(mesh, me):
    distribute_tensor(distribute_tensor(piece(3), mesh, [Shard(0)]), mesh, [Replicate()])


def redistribute_to_nothing(mesh, me):
    zeros(3, device_mesh=mesh).redistribute()


def too_many_placements(mesh, me):
    zeros(3, device_mesh=mesh).redistribute(placements=[Shard(0), Replicate()])


def too_few_placements(mesh, me):
    distribute_tensor(piece(3), mesh, [])


def not_a_placement(mesh, me):
    zeros(3, device_mesh=mesh, placements=["Shard(0)"])


def summands_asked_for(mesh, me):
    zeros(3, device_mesh=mesh).redistribute(placements=[Partial()])


def sizes_do_not_add_up(mesh, me):
    zeros(5, device_mesh=mesh).redistribute(placements=[Shard(0)], sharding_shapes={0: [(2,)] * mesh.size()})


def shapes_to_be_inferred(mesh, me):
    zeros(5, device_mesh=mesh).redistribute(placements=[Shard(0)], sharding_shapes="infer")


def nested_sizes_do_not_add_up(mesh, me):
    two = mesh_of((1, mesh.size()))
    shapes = {0: [(5,)], 1: [(2,), *[(1,)] * (mesh.size() - 1)]}
    zeros(5, device_mesh=two, placements=[Shard(0), Shard(0)], sharding_shapes=shapes)


def too_few_shapes(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Shard(0)], sharding_shapes={0: [(5,)]})


def shapes_of_another_rank(mesh, me):
    distribute_tensor(piece(2, 1), mesh, [Shard(0)], sharding_shapes={0: [(1,)] * mesh.size()})


def one_size_for_all(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Shard(0)], sharding_shapes={0: 5})


def half_a_size(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Shard(0)], sharding_shapes={0: [2.5] * mesh.size()})


def negative_size(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Shard(0)], sharding_shapes={0: [6, -1, *[0] * (mesh.size() - 2)]})


def sizes_of_another_total(mesh, me):
    distribute_tensor(piece(5), mesh, [Shard(0)], sharding_shapes={0: [2] * mesh.size()})


def sizes_without_a_mesh_dim(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(0)], sharding_shapes=[2] * mesh.size())


def named_mesh_dim(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(0)], sharding_shapes={"tp": [2] * mesh.size()})


def piece_of_another_size(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(0)], sharding_shapes={0: [3] * mesh.size()})


def sizes_that_some_ranks_tell_otherwise(mesh, me):
    ShardTensor.from_local(piece(2), mesh, [Shard(0)], sharding_shapes={0: [2] * (mesh.size() - (me == 1))}, run_check=True)


def nested_sizes_of_half_the_rows(mesh, me):
    two = mesh_of((mesh.size(), 1))
    zeros(5, device_mesh=two, placements=[Shard(0), Shard(0)], sharding_shapes={1: [1] * (mesh.size() + 1)})


def shapes_for_no_mesh_dim(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Shard(0)], sharding_shapes={1: [(5,)]})


def shapes_where_nothing_is_cut(mesh, me):
    zeros(5, device_mesh=mesh, placements=[Replicate()], sharding_shapes={0: [(5,)] * mesh.size()})


def mesh_without_some_ranks(mesh, me):
    ShardTensor.from_local(piece(2), smaller_mesh(), [Shard(0)], sharding_shapes="infer")
    raise ValueError("device_mesh rank 0 is in it")


def scatter_from_outside(mesh, me):
    scatter_tensor(piece(2), 99, mesh)


def scatter_nothing(mesh, me):
    scatter_tensor(None, 1, mesh)


def scatter_of_another_shape(mesh, me):
    scatter_tensor(piece(2) if me == 0 else None, 0, mesh, shape=(3,))


def scatter_with_two_meshes(mesh, me):
    scatter_tensor(piece(2) if me == 0 else None, 0, mesh, mesh=mesh)


def two_shapes(mesh, me):
    ShardTensor.from_local(piece(2), mesh, shape=(2,), global_shape=(2,))


def pieces_of_another_shape(mesh, me):
    ShardTensor.from_local(piece(2 + me), mesh, [Shard(0)], global_shape=(99,))


def source_out_of_range(mesh, me):
    distribute_tensor(piece(2), mesh, src_data_rank=5)


def distribute_elsewhere(mesh, me):
    distribute_tensor(distribute_tensor(piece(4), mesh), mesh, [Shard(0)])


def distribute_elsewhere_of_the_same_shape(mesh, me):
    distribute_tensor(distribute_tensor(piece(4), mesh, [Shard(0)]), backward_mesh(mesh.size()), [Shard(0)])


def redistribute_to_nowhere(mesh, me):
    zeros(3, device_mesh=mesh).redistribute()


def summands_on_another_mesh(mesh, me):
    other = init_device_mesh("cpu", (1, mesh.size()))
    zeros(3, device_mesh=mesh).redistribute(other, [Shard(0), Partial()])


def meshes_mixed(mesh, me):
    zeros(3, device_mesh=mesh) + zeros(3, device_mesh=init_device_mesh("cpu", (1, mesh.size())))


def meshes_that_print_alike_mixed(mesh, me):
    zeros(3, device_mesh=mesh) + zeros(3, device_mesh=backward_mesh(mesh.size()))


def plain_state_dict(mesh, me):
    model = torch.nn.Linear(3, 4)
    plain = {name: t.clone() for name, t in model.state_dict().items()}
    parallelize_module(model, mesh, ColwiseParallel()).load_state_dict(plain)


def offsets_of_nothing(mesh, me):
    zeros(3, device_mesh=mesh).offsets(0)


def not_a_tensor(mesh, me):
    ShardTensor.from_local([1, 2], mesh)


def distributed_already(mesh, me):
    ShardTensor.from_local(zeros(3, device_mesh=mesh), mesh)


def gradient_of_another_size(mesh, me):
    x = zeros(5, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    x.to_local(grad_placements=[Replicate()]).sum().backward()


def no_rule_under_strict_mode(mesh, me):
    x = place(piece(5, 4), mesh, ("S(0)",), "uneven")
    with strict_mode():
        torch.linalg.svdvals(x)


def plain_tensor_among_ours(mesh, me):
    place(piece(5, 4), mesh, ("S(0)",), "uneven") + piece(5, 4)


def plain_row(mesh, me):
    place(piece(5, 4), mesh, ("S(0)",), "uneven")[0] = piece(4)


def plain_column(mesh, me):
    place(piece(5, 4), mesh, ("S(1)",), "uneven")[:, 0] = piece(5)


def write_into_a_plain_tensor(mesh, me):
    with implicit_replication():
        piece(5, 4).add_(place(piece(5, 4), mesh, ("S(0)",), "uneven"))


def write_to_one_place_several_times(mesh, me):
    place(piece(4, 1), mesh, ("S(0)",), "even").expand(4, 3).add_(1)  # the last of three ranks has no rows


def write_to_one_place_in_a_list(mesh, me):
    torch._foreach_add_([place(piece(4, 1), mesh, ("S(0)",), "even").expand(4, 3)], 1)


def sizes_that_differ(mesh, me):
    place(piece(5, 3), mesh, ("S(0)",), "empty") + place(piece(4, 3), mesh, ("S(0)",), "empty")


def sizes_that_differ_in_a_list(mesh, me):
    torch._foreach_add_([place(piece(4, 3), mesh, ("S(0)",), "empty")], [place(piece(5, 3), mesh, ("S(0)",), "empty")])


def result_larger_than_what_is_written(mesh, me):
    place(piece(1, 3), mesh, ("R",), "even").add_(place(piece(2, 3), mesh, ("S(0)",), "even"))


def integers_where_reals_are_needed(mesh, me):
    place(torch.arange(5), mesh, ("S(0)",), "empty").softmax(0)


def a_dim_twice(mesh, me):
    place(piece(5, 3), mesh, ("S(0)",), "empty").amax((0, -2))


def unknown_promotion_mode(mesh, me):
    set_promotion_mode("ignore")


# The mistake, the error, and what its text must contain.
WRONG = [
    (shape_does_not_fit, ValueError, "argument 'local_tensor'", "rank 0"),
    (one_rank_does_not_fit, ValueError, "argument 'local_tensor'", "on rank"),
    (one_rank_does_not_fit_the_shapes, ValueError, "argument 'local_tensor' has sizes [3, 3]", "on rank 1"),
    (another_number_of_dims, ValueError, "argument 'local_tensor' has 2 dims on rank 0, 1 on rank 1"),
    (pieces_do_not_tile, ValueError, "argument 'local_tensor'", "on rank 1", "do not tile"),
    (another_dtype, ValueError, "argument 'local_tensor' is torch.float32 on rank 0, torch.float64 on rank 1"),
    (another_placement, ValueError, "'placements'", "differ between ranks 0 and 1"),
    (unknown_mode, ValueError, "argument 'sharding_shapes' is 'guess'", "rank {me}"),
    (chunk_without_shape, ValueError, "'shape'", "rank {me}"),
    (dim_out_of_range, IndexError, "Sharding dim 1 greater than tensor ndim 1. ", "argument 'placements'", "S(1) names a dim", "rank {me}"),
    (negative_dim_out_of_range, IndexError, "argument 'placements'", "S(-2) names a dim", "rank {me}"),
    (redistribute_dim_out_of_range, IndexError, "argument 'placements'", "rank {me}"),
    (distributed_twice, ValueError, "Cannot distribute a DTensor with placements S(0)", "to a different placements R", "rank {me}"),
    (redistribute_to_nothing, RuntimeError, "placements is needed for redistribute!", "argument 'placements' is None"),
    (too_many_placements, ValueError, "must have the same length as `device_mesh.ndim`! Found placements length: 2", "argument 'placements'", "rank {me}"),
    (too_few_placements, ValueError, "must have the same length", "length: 0, ", "argument 'placements'", "rank {me}"),
    (not_a_placement, TypeError, "argument 'placements'", "rank {me}"),
    (summands_asked_for, RuntimeError, "argument 'placements'", "rank {me}"),
    (sizes_do_not_add_up, ValueError, "argument 'sharding_shapes'", "add up to", "rank {me}"),
    (shapes_to_be_inferred, ValueError, "argument 'sharding_shapes'", "'infer' is given", "rank {me}"),
    (nested_sizes_do_not_add_up, ValueError, "argument 'sharding_shapes'", "mesh dim 1 add up to", "rank {me}"),
    (too_few_shapes, ValueError, "argument 'sharding_shapes'", "1 entries for mesh dim 0; give one for each of its", "rank {me}"),
    (one_size_for_all, TypeError, "argument 'sharding_shapes'", "mesh dim 0 is given 5; give a list", "rank {me}"),
    (half_a_size, TypeError, "argument 'sharding_shapes'", "mesh dim 0, entry 0 is 2.5; give the size", "rank {me}"),
    (negative_size, ValueError, "argument 'sharding_shapes'", "mesh dim 0, entry 1 is a negative size, -1", "rank {me}"),
    (sizes_of_another_total, ValueError, "argument 'sharding_shapes'", "add up to", "but tensor dim 0 has 5", "rank {me}"),
    (sizes_without_a_mesh_dim, ValueError, "argument 'sharding_shapes' is [2, 2", "or a dict", "rank {me}"),
    (named_mesh_dim, ValueError, "argument 'sharding_shapes'", "mesh dim 'tp' is named", "rank {me}"),
    (piece_of_another_size, ValueError, "argument 'local_tensor' has sizes [2] on rank {me}", "leaves [3] there"),
    (sizes_that_some_ranks_tell_otherwise, ValueError, "'sharding_shapes'", "differ between ranks 0 and 1"),
    (nested_sizes_of_half_the_rows, ValueError, "argument 'sharding_shapes'", "such lists in one", "rank {me}"),
    (shapes_of_another_rank, ValueError, "argument 'sharding_shapes'", "2 dims", "rank {me}"),
    (shapes_for_no_mesh_dim, ValueError, "argument 'sharding_shapes'", "mesh dim 1", "rank {me}"),
    (shapes_where_nothing_is_cut, ValueError, "argument 'sharding_shapes'", "shards nothing", "rank {me}"),
    (mesh_without_some_ranks, ValueError, "device_mesh", "rank {me}"),
    (scatter_from_outside, ValueError, "argument 'global_src' is rank 99", "rank {me}"),
    (scatter_nothing, ValueError, "argument 'tensor' is None on the source, rank 1", "rank {me}"),
    (scatter_with_two_meshes, TypeError, "arguments 'device_mesh' and 'mesh' mean the same"),
    (two_shapes, TypeError, "arguments 'shape' and 'global_shape' mean the same"),
    (pieces_of_another_shape, ValueError, "argument 'shape' is (99,), but the ranks' pieces make up (", "rank {me}"),
    (scatter_of_another_shape, ValueError, "argument 'shape' is (3,) on rank {me}, rank 0 has (2,)"),
    (source_out_of_range, ValueError, "argument 'src_data_rank' is 5", "rank {me}"),
    (distribute_elsewhere, ValueError, "argument 'tensor'", "redistribute", "rank {me}"),
    (distribute_elsewhere_of_the_same_shape, ValueError, "argument 'tensor'", ") of ranks [0, 1", ") of ranks [{last}, ", "rank {me}"),
    (redistribute_to_nowhere, RuntimeError, "argument 'placements'"),
    (summands_on_another_mesh, RuntimeError, "argument 'placements'", "rank {me}"),
    (meshes_mixed, RuntimeError, "add", "different meshes", "rank {me}"),
    (meshes_that_print_alike_mixed, RuntimeError, "different meshes", ") of ranks [0, 1", ") of ranks [{last}, "),
    (plain_state_dict, RuntimeError, "set_model_state_dict with StateDictOptions(full_state_dict=True)"),
    (offsets_of_nothing, ValueError, "argument 'mesh_dim'", "rank {me}"),
    (not_a_tensor, TypeError, "argument 'local_tensor' is list"),
    (distributed_already, RuntimeError, "argument 'local_tensor' is a ShardTensor"),
    (gradient_of_another_size, RuntimeError, "gradient on rank {me}", "grad_placements"),
    (no_rule_under_strict_mode, NotImplementedError, "svd", "strict mode", "rank {me}"),
    (plain_tensor_among_ours, RuntimeError, "argument 'other'", "plain torch.Tensor", "distribute_tensor"),
    (plain_row, RuntimeError, "the value is a plain torch.Tensor of sizes [4] among", "distribute_tensor"),
    (plain_column, RuntimeError, "the value is a plain torch.Tensor of sizes [5] among", "distribute_tensor"),
    (write_into_a_plain_tensor, RuntimeError, "plain torch.Tensor 'self'"),
    (write_to_one_place_several_times, RuntimeError, "argument 'self'", "single memory location", "rank {me}"),
    (write_to_one_place_in_a_list, RuntimeError, "argument 'self'", "single memory location", "rank {me}"),
    (sizes_that_differ, RuntimeError, "add", "argument 'other' (4)", "must match", "argument 'self' (5)", "rank {me}"),
    (sizes_that_differ_in_a_list, RuntimeError, "foreach_add", "argument 'other' (5)", "argument 'self' (4)", "rank {me}"),
    (result_larger_than_what_is_written, RuntimeError, "output with shape [1, 3] doesn't match"),
    (integers_where_reals_are_needed, NotImplementedError, "softmax", "not implemented for 'Long'", "rank {me}"),
    (a_dim_twice, RuntimeError, "dim 0 appears multiple times"),
    (unknown_promotion_mode, ValueError, "argument 'mode'"),
]


_made = {}


def smaller_mesh():
    """A mesh of rank 0 alone. All ranks make it, once."""
    if "mesh" not in _made:
        _made["mesh"] = DeviceMesh("cpu", torch.tensor([0]))
    return _made["mesh"]


def backward_mesh(size):
    """A mesh of all ranks, the last one first; made once, by all."""
    if "backward" not in _made:
        _made["backward"] = DeviceMesh("cpu", torch.arange(size).flip(0))
    return _made["backward"]


@on_ranks((2,), (3,), seconds=20)
@pytest.mark.parametrize("index", range(len(WRONG)), ids=[w[0].__name__ for w in WRONG])
def test_wrong(shape, index):
    function, error, *says = WRONG[index]
    mesh, me = mesh_of(shape), dist.get_rank()
    with pytest.raises(error) as caught:
        function(mesh, me)
    text = str(caught.value)
    for part in says:
        part = part.format(me=me, last=dist.get_world_size() - 1)
        assert part in text, f"{part!r} is not in: {text}"
    # No rank is left behind, and none is out of step.
    assert place(torch.arange(5.0), mesh, ("S(0)",), "uneven").full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---- modes ----


def promotion(shape):
    mesh = mesh_of(shape)
    x, plain = place(torch.arange(20.0).view(5, 4), mesh, ("S(0)",), "uneven"), torch.ones(5, 4)
    assert st.get_promotion_mode() == "error"
    assert (x + torch.tensor(1.0)).full_tensor()[0, 0] == 1  # a tensor without dims counts as a number
    with st.implicit_replication():
        assert st.get_promotion_mode() == "replicate"
        assert (x + plain).full_tensor().equal(torch.arange(20.0).view(5, 4) + 1)
        assert (plain * x).full_tensor().equal(torch.arange(20.0).view(5, 4))
    assert st.get_promotion_mode() == "error"
    with st.promotion_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            (x + plain).full_tensor()
    assert len([w for w in caught if "plain torch.Tensor" in str(w.message)]) <= 1  # once per process
    with pytest.raises(KeyError), st.promotion_mode("replicate"):
        raise KeyError
    assert st.get_promotion_mode() == "error"


def warned_once():
    mesh = mesh_of((2,))
    x = place(torch.ones(5, 4), mesh, ("S(0)",), "uneven")
    with st.promotion_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x + torch.ones(5, 4)
    told = [str(w.message) for w in caught]
    assert len(told) == 1 and "argument 'other' is a plain torch.Tensor" in told[0] and "taken as replicated" in told[0], told


def strict(shape):
    mesh = mesh_of(shape)
    x = place(torch.arange(20.0).view(5, 4), mesh, ("S(0)",), "uneven")
    want = torch.linalg.svdvals(torch.arange(20.0).view(5, 4))
    torch.testing.assert_close(torch.linalg.svdvals(x).full_tensor(), want)
    with st.strict_mode():
        (x + 1).sum()  # these ops have rules
        assert (x.sum().sqrt() / 2 > 0).item()  # summands are added up, not gathered
        with st.strict_mode(False):
            torch.linalg.svdvals(x)
        with pytest.raises(NotImplementedError):
            torch.linalg.svdvals(x)
        whole = x.redistribute(placements=[st.Replicate()] * x.device_mesh.ndim)
        for op in (torch.nonzero, lambda t: t[t > 2], lambda t: torch.block_diag(t, t), torch.unique, torch.unique_consecutive):
            op(whole)  # nothing to gather
            with pytest.raises(NotImplementedError, match="strict mode forbids gathering"):
                op(x)
    torch.linalg.svdvals(x)
    st.set_strict(True)
    with pytest.raises(NotImplementedError):
        torch.linalg.svdvals(x)
    st.set_strict(False)


def cut_off_views(shape):
    """One op copies data for many views. A write to such a view would not reach the base, so it is refused."""
    mesh = mesh_of(shape)

    x = place(torch.arange(5.0), mesh, ("S(0)",), "uneven")
    view = x.unbind()[3]
    with pytest.raises(RuntimeError, match="would not reach the base tensor"):
        view.add_(1)
    with pytest.raises(RuntimeError, match="would not reach the base tensor"):
        view[None].add_(1)  # nor a view of it
    assert view.clone().add_(1).full_tensor().item() == 4.0 and x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    x = place(torch.arange(20.0).view(5, 4), mesh, ("S(0)",), "uneven")
    x.unbind()[3][1:].add_(1)  # a row is at its owner: nothing was copied
    want = torch.arange(20.0).view(5, 4)
    want[3, 1:] += 1
    assert x.full_tensor().equal(want)


def gradients_of_cut_off_views(shape):
    """Autograd adds up gradients in place where it can, but not into one that a view op has made."""
    mesh = mesh_of(shape)
    x = place(torch.arange(20.0).view(5, 4), mesh, ("S(0)",), "uneven").requires_grad_()
    (x.diagonal().sum() + x.t().diagonal().sum() + x.view(20).sum()).backward()
    want = torch.ones(5, 4)
    want.diagonal().add_(2)
    assert x.grad.full_tensor().equal(want)


@pytest.mark.parametrize("world", WORLDS, ids=mesh_id)
@pytest.mark.parametrize("function", ["promotion", "strict", "cut_off_views", "gradients_of_cut_off_views"])
def test_modes(pools, function, world):
    pools(world[0]).run(globals()[function], world[1])


def test_warned_once():
    pool = Pool(2)
    try:
        pool.run(warned_once)
    finally:
        pool.stop()


ALONE = """
import os, re, sys
import torch, torch.distributed
import shardtensor

for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "none")):
    try:
        shardtensor.init_device_mesh("cpu", (1,))
    except ValueError as error:
        assert f"environment variable {variable} expected, but not set" in str(error) and "torchrun --nproc" in str(error), error
        way_out = re.search(r"first calls (.*)", str(error))[1]
    else:
        sys.exit(f"{variable} is set")
    os.environ[variable] = value
try:
    shardtensor.init_device_mesh("cpu", (1,))
except ValueError as error:
    assert "torchrun" not in str(error)  # no port
exec(way_out)
mesh = shardtensor.init_device_mesh("cpu", (1,))
x = shardtensor.distribute_tensor(torch.ones(3, 2), mesh, [shardtensor.Shard(0)])
assert (x * 2).sum().item() == 12
torch.distributed.destroy_process_group()
"""


def test_one_process_alone_is_told_how_to_start():
    unset = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
