"""Cases from pytorch's issues and pull requests about DTensor, on ShardTensors: each must equal plain torch.

docs/dtensor_issues.md lists them. A test fails if ShardTensor has the bug of its issue. To see what DTensor does with a case:
torchrun --nproc-per-node 3 tests/end_to_end/test_dtensor_issues.py NAME
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LIBRARY = "shardtensor"
CASES = {}  # by name: the numbers of pytorch's issues, the numbers of ranks


def issue(*numbers, ranks=(2, 3)):
    def register(function):
        CASES[function.__name__] = (numbers, ranks)
        return function

    return register


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("name, world", [(name, n) for name, (_, ranks) in CASES.items() for n in ranks])


def test_issue(pools, name, world):
    pools(world).run(globals()[name])


def test_the_page_lists_the_issues_that_are_tested():
    page = (Path(__file__).parents[2] / "docs/dtensor_issues.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|.*`(\w+)` \|$", page, re.MULTILINE)
    assert {name: tuple(int(n) for n in numbers.split(",")) for numbers, name in rows} == {k: v[0] for k, v in CASES.items()}


# ---- for the cases ----


def st(part=""):
    return importlib.import_module(LIBRARY + part)


def line(name="x"):
    """A mesh of all ranks."""
    return st().init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def square():
    return st().init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def numbers(*sizes):
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).view(sizes)


def same(ours, plain):
    torch.testing.assert_close(ours.full_tensor(), plain, check_stride=False)


def summands(value, mesh):
    """`value` as a sum of another tensor on each rank."""
    world, rank = mesh.size(), mesh.get_local_rank()
    return st().DTensor.from_local(value * (rank + 1) * 2 / (world * (world + 1)), mesh, [st().Partial()])


# ---- moves ----


@issue(194457, ranks=(4,))
def a_dim_cut_twice_unevenly_loses_no_row():
    Shard, Replicate = st().Shard, st().Replicate
    mesh = square()
    mesh._flatten("both")  # with it, DTensor gathers along both mesh dims at once
    value = numbers(5, 3)
    x = st().distribute_tensor(value, mesh, [Shard(0), Shard(0)])
    whole = x.redistribute(placements=[Replicate(), Replicate()])
    assert torch.equal(whole.to_local(), value) and torch.equal(x.full_tensor(), value)


@issue(168134, 167859)
def uneven_strided_shards_hold_each_row_once():
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, value = line(), numbers(5)
    for factor in (2, 3):
        x = st().distribute_tensor(value, mesh, [_StridedShard(0, split_factor=factor)])
        pieces = [None] * mesh.size()
        dist.all_gather_object(pieces, x.to_local())
        assert torch.equal(torch.cat(pieces).sort().values, value)
        same(x, value)
        same(x.redistribute(placements=[st().Shard(0)]), value)
        same(x * x, value * value)


@issue(144109, 103306)
def from_local_of_any_sizes_keeps_them():
    mesh, rank = line(), dist.get_rank()
    pieces = [numbers(2, 2 + r) + r / 10 for r in range(mesh.size())]
    whole = torch.cat(pieces, 1)
    sizes = dict(sharding_shapes="infer") if LIBRARY == "shardtensor" else dict(shape=whole.shape, stride=whole.stride())
    x = st().DTensor.from_local(pieces[rank], mesh, [st().Shard(1)], **sizes)
    same(x, whole)
    assert torch.equal(x.to_local(), pieces[rank])


# ---- views ----


@issue(179502)
def a_view_that_crosses_a_cut_dim_has_the_right_values():
    value = numbers(12, 8)
    x = st().distribute_tensor(value, line(), [st().Shard(1)]).requires_grad_()
    y = x.view(-1, 6)
    same(y.detach(), value.view(-1, 6))
    weights = numbers(16, 6)
    (y * st().distribute_tensor(weights, line(), [st().Replicate()])).sum().backward()
    same(x.grad, weights.view(12, 8))


@issue(143372, 149764)
def an_uneven_or_empty_piece_can_be_flattened():
    for rows in (4, 5, 1):  # on three ranks: 2, 2, 0 and 2, 2, 1 and 1, 0, 0
        value = numbers(rows, 4)
        x = st().distribute_tensor(value, line(), [st().Shard(0)])
        same(x.view(-1), value.view(-1))
        same(x.view(-1).view(rows, 2, 2), value.view(rows, 2, 2))
        same(st().distribute_tensor(value, line(), [st().Shard(1)]).flatten(), value.flatten())


@issue(186282, ranks=(4,))
def a_dim_cut_by_two_mesh_dims_unflattens():
    for sizes in ((2, 4, 3), (2, 5, 3)):
        value = numbers(*sizes)
        x = st().distribute_tensor(value, square(), [st().Shard(1), st().Shard(1)]).requires_grad_()
        y = x.flatten(0, 1)
        same(y.detach(), value.flatten(0, 1))
        z = y.unflatten(0, sizes[:2]) * 2
        same(z.detach(), value * 2)
        z.sum().backward()
        same(x.grad, torch.full(sizes, 2.0))


@issue(167106)
def a_linear_layer_on_a_cut_sequence_sends_nothing():
    mesh = line()
    x, w, b = numbers(2, 7, 4), numbers(5, 4), numbers(5)
    ours = [st().distribute_tensor(x, mesh, [st().Shard(1)]), *(st().distribute_tensor(t, mesh, [st().Replicate()]) for t in (w, b))]
    with st(".debug").CommDebugMode() as comm:
        y = F.linear(*ours)
    assert comm.get_total_counts() == 0 and y.placements == (st().Shard(1),)
    same(y, F.linear(x, w, b))


@issue(147570)
def writing_through_a_view_reaches_the_base():
    value, factor = numbers(8, 9), numbers(4)
    for placement in (st().Shard(0), st().Shard(1)):
        x = st().distribute_tensor(value, line(), [placement])
        x.view(4, -1).mul_(st().distribute_tensor(factor[:, None], line(), [st().Replicate()]))
        same(x, (value.view(4, -1) * factor[:, None]).view(8, 9))


@issue(139735)
def initialising_a_slice_writes_to_the_tensor():
    value = numbers(8, 8)
    for piece in (slice(None, 2), 0, slice(3, 7)):
        x = st().distribute_tensor(value, line(), [st().Shard(0)])
        want = value.clone()
        for t in (x, want):
            nn.init.zeros_(t[piece])
        same(x, want)


@issue(174136)
def squeeze_in_place_keeps_piece_and_sizes_together():
    value = numbers(1, 4)
    x = st().distribute_tensor(value, line(), [st().Shard(0)])
    x.squeeze_(0)
    assert x.shape == (4,) and x.to_local().dim() == 1
    same(x, value[0])


# ---- summands ----


@issue(163193, 145218)
def a_number_is_added_once_to_summands():
    mesh, value = line(), numbers(10, 1)
    x = st().distribute_tensor(value, mesh, [st().Shard(0)])
    for number in (10, torch.tensor(10)):
        for total, plain in ((x.sum(), value.sum()), (torch.linalg.vector_norm(x), torch.linalg.vector_norm(value))):
            same(total + number, plain + number)
            same(number - total, number - plain)
            same(total.sub(number, alpha=2), plain.sub(number, alpha=2))
            total += number
            same(total, plain + number)


@issue(153603, 147180)
def scaling_after_a_reduction_uses_the_new_factor():
    mesh = line()
    value = numbers(mesh.size())
    x = st().distribute_tensor(value, mesh, [st().Shard(0)])
    for factor in (1, 2, -5, 0.5):
        for reduce in (torch.sum, torch.mean):
            same(reduce(x) * factor, reduce(value) * factor)
        same(factor * summands(value, mesh), factor * value)


@issue(163374)
def in_place_ops_that_are_not_linear_resolve_summands():
    value = numbers(6)
    x = summands(value, line())
    x.clamp_(max=2)
    same(x, value.clamp(max=2))


@issue(159856)
def a_norm_of_summands_is_the_norm_of_the_sum():
    mesh, value = line(), numbers(2, 3) - 3
    x = summands(value, mesh)
    for p in (1, 2, 3, float("inf")):
        same(torch.linalg.vector_norm(x, p), torch.linalg.vector_norm(value, p))
    for ours in torch._foreach_norm([x, x]):
        same(ours, torch.linalg.vector_norm(value))


@issue(162692)
def the_mean_of_uneven_pieces_weighs_them_by_size():
    value = numbers(5, 2)
    x = st().distribute_tensor(value, line(), [st().Shard(0)])
    same(x.mean(), value.mean())
    same(x.mean(0), value.mean(0))


@issue(166638)
def item_gives_the_sum_not_a_summand():
    value = numbers(7)
    x = st().distribute_tensor(value, line(), [st().Shard(0)])
    assert x.sum().item() == float(x.sum()) == value.sum().item()


# ---- modules ----


@issue(172812)
def local_map_keeps_uneven_sizes():
    mesh, value = line(), numbers(5, 3)
    placements = [st().Shard(0)]
    double = st(".experimental").local_map(lambda x: x * 2, out_placements=placements, in_placements=(placements,), device_mesh=mesh)
    y = double(st().distribute_tensor(value, mesh, placements))
    assert y.shape == (5, 3)
    same(y, value * 2)
    same(y + y, value * 4)


@issue(150336)
def tensor_parallel_layers_of_odd_sizes_train():
    parallel = st(".parallel")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    ours = parallel.parallelize_module(copy.deepcopy(plain), line(), plan)
    x = torch.randn(4, 3)
    for model in (plain, ours):
        model(x).square().sum().backward()
    torch.testing.assert_close(ours(x), plain(x))
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)


@issue(190746)
def loss_parallel_leaves_other_log_softmaxes_their_gradient():
    mesh, value, weights = line(), numbers(3, 5) / 5, numbers(3, 5)
    plain = value.clone().requires_grad_()
    (F.log_softmax(plain, -1) * weights).sum().backward()
    x = st().distribute_tensor(value, mesh, [st().Shard(1)]).requires_grad_()
    with st(".parallel").loss_parallel():
        (F.log_softmax(x, -1) * st().distribute_tensor(weights, mesh, [st().Shard(1)])).sum().backward()
    same(x.grad, plain.grad)


@issue(168058)
def random_values_do_not_depend_on_the_sharding():
    Replicate, Shard = st().Replicate, st().Shard
    drawn = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(5)
        x = st().rand(5, 7, device_mesh=line(), placements=[placement])
        drawn.append(F.dropout(x, 0.5).full_tensor())
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@issue(180346)
def clipping_works_over_several_meshes():
    world = dist.get_world_size()
    meshes = [line(), st().init_device_mesh("cpu", (1, world)), st().DeviceMesh("cpu", list(range(world))[::-1])]
    placements = [[st().Shard(0)], [st().Replicate(), st().Shard(0)], [st().Shard(1)]]
    plain, ours = [], []
    for i, (mesh, placement) in enumerate(zip(meshes, placements, strict=True)):
        value = numbers(5, 2) + i
        plain.append(nn.Parameter(torch.zeros(5, 2)))
        ours.append(nn.Parameter(st().distribute_tensor(torch.zeros(5, 2), mesh, placement)))
        plain[-1].grad, ours[-1].grad = value.clone(), st().distribute_tensor(value, mesh, placement)
    for foreach in (None, False):
        for norm_type in (2.0, float("inf")):
            norms = [nn.utils.clip_grad_norm_(ps, 3.0, norm_type, foreach=foreach) for ps in (ours, plain)]
            norm = norms[0]
            torch.testing.assert_close(norm.full_tensor() if isinstance(norm, st().DTensor) else norm, norms[1])
            for p, q in zip(ours, plain, strict=True):
                same(p.grad, q.grad)


# ---- checkpoints ----

ROWS = 5


def saved(path, shapes, cuts):
    import torch.distributed.checkpoint as dcp

    mesh = st().init_device_mesh("cpu", shapes)
    x = st().distribute_tensor(numbers(ROWS, 2), mesh, [st().Shard(0)] * mesh.ndim, sharding_shapes=cuts)
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, (x.offsets()[0], x.to_local().shape[0]))
    rows = [row for start, size in boxes for row in range(start, start + size)]
    assert sorted(rows) == list(range(ROWS))  # each row has one place
    dcp.save({"x": x}, checkpoint_id=path)


def loaded(path, shapes, cuts):
    import torch.distributed.checkpoint as dcp

    mesh = st().init_device_mesh("cpu", shapes)
    x = st().zeros(ROWS, 2, device_mesh=mesh, placements=[st().Shard(0)] * mesh.ndim, sharding_shapes=cuts)
    dcp.load({"x": x}, checkpoint_id=path)
    same(x, numbers(ROWS, 2))


CASES["checkpoints_of_uneven_pieces"] = ((161368, 160533), ())  # on two numbers of ranks each


@pytest.mark.parametrize("before, after", [
    (((2, 2), None), ((3,), None)),
    (((3,), {0: [0, 4, 1]}), ((2,), {0: [3, 2]})),
    (((2,), {0: [5, 0]}), ((2, 2), None)),
])  # fmt: skip
def test_checkpoints_of_uneven_pieces(pools, tmp_path, before, after):
    for function, (shapes, cuts) in (("saved", before), ("loaded", after)):
        pools(torch.Size(shapes).numel()).run(globals()[function], tmp_path, shapes, cuts)


@issue(164843, 136228)
def a_full_state_dict_of_rank_0_reaches_uneven_pieces():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = nn.Linear(7, 17)
    with getattr(st(), "replace_dtensor", contextlib.nullcontext)():
        model = nn.Linear(7, 17, device="meta")
        fully_shard(model, mesh=line())
        model.to_empty(device="cpu")
        state = whole.state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for name, p in model.state_dict().items():
            same(p, whole.state_dict()[name])


if __name__ == "__main__":
    LIBRARY = "torch.distributed.tensor"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
