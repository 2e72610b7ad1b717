"""The resolver as data: from a rule and the operands' layouts to what moves and how the results are laid out.

One process plays each rank in turn, in a group that sends nothing: what the resolver decides is a function of layouts and sizes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from oracle import arguments_of, combinations, place, telling
from shardtensor.debug import _watch
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def play() -> Iterator[Callable[..., Any]]:
    """play(rank, mesh shape) -> a mesh, of which this process is that rank."""
    ahead = shardtensor._C.reduces_ahead()
    shardtensor.set_reduce_ahead(False)

    def mesh(rank: int, shape: tuple[int, ...]) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
        return shardtensor.init_device_mesh("cpu", shape)

    yield mesh
    dist.destroy_process_group()
    shardtensor.set_reduce_ahead(ahead)


def placed(mesh: Any, sizes: tuple[int, ...], layout: str) -> Any:
    """A tensor in a layout as its text says: "S(0)[5,1,0] R" has explicit cuts along mesh dim 0."""
    words = layout.split()
    explicit = [[int(n) for n in word[word.index("[") + 1 : -1].split(",")] for word in words if "[" in word]
    return place(torch.ones(sizes), mesh, [word.split("[")[0] for word in words], explicit[0] if explicit else "even")


def short(layout: Any) -> str:
    """Without the mesh."""
    return str(layout).split(" on ")[0]


def resolved(function: Callable[..., Any], arguments: list[Any], backward: bool = False) -> tuple[list[str], list[str]]:
    """What moves, in order, and the layouts of the results; with backward, of the gradients too."""
    moves: list[str] = []

    def hear(move: _watch.Move) -> None:
        moves.append(f"{move.argument} of {move.op}: {short(move.source)} -> {short(move.target)}")

    def read(halo: _watch.Halo) -> None:
        moves.append(f"halo of {halo.op.split(' ')[0]}: {short(halo.source)}")

    _watch.moves.listen(hear)
    _watch.halos.listen(read)
    try:
        results = pytree.tree_leaves(function(*arguments))
        if backward:
            ends = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            leaves = [t for t in arguments if t.requires_grad]
            results += torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True) if ends else []
    finally:
        _watch.moves.forget(hear)
        _watch.halos.forget(read)
    return moves, [short(t._layout) if isinstance(t, shardtensor.ShardTensor) else type(t).__name__ for t in results]


def rows_1_to_3(x: Any) -> Any:
    return x[1:4]


def attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


# name: (op, operands as (sizes, layout), what moves, layouts of the results), on three ranks
ON_THREE = {
    "alike": (torch.add, [((6, 4), "S(0)"), ((6, 4), "S(0)")], [], ["S(0)"]),
    "the second follows the first": (torch.add, [((6, 4), "S(0)"), ((6, 4), "S(1)")], ["other of aten::add.Tensor: S(1) -> S(0)"], ["S(0)"]),
    "a row has no such dim": (torch.add, [((6, 4), "S(0)"), ((4,), "S(0)")], ["other of aten::add.Tensor: S(0) -> R"], ["S(0)"]),
    "uneven and even": (
        torch.add,
        [((6, 4), "S(0)[5,1,0]"), ((6, 4), "S(0)")],
        ["other of aten::add.Tensor: S(0) -> S(0)[5,1,0]"],
        ["S(0)[5,1,0]"],
    ),
    "uneven and whole": (
        torch.add,
        [((6, 4), "S(0)[5,1,0]"), ((6, 4), "R")],
        ["other of aten::add.Tensor: R -> S(0)[5,1,0]"],
        ["S(0)[5,1,0]"],
    ),
    "summands stay": (torch.add, [((6, 4), "P"), ((6, 4), "P")], [], ["P(sum)"]),
    "a whole becomes summands": (torch.add, [((6, 4), "P"), ((6, 4), "R")], ["other of aten::add.Tensor: R -> P(sum)"], ["P(sum)"]),
    "summands become pieces": (torch.add, [((6, 4), "P"), ((6, 4), "S(0)")], ["self of aten::add.Tensor: P(sum) -> S(0)"], ["S(0)"]),
    "summands times a whole": (torch.mul, [((6, 4), "P"), ((6, 4), "R")], [], ["P(sum)"]),
    "one of two factors is added up": (torch.mul, [((6, 4), "P"), ((6, 4), "P")], ["other of aten::mul.Tensor: P(sum) -> R"], ["P(sum)"]),
    "no sum of relus": (torch.relu, [((6, 4), "P")], ["self of aten::relu: P(sum) -> R"], ["R"]),
    "a number counts once": (lambda x: x.add_(1), [((6, 4), "P")], ["other of aten::add_.Tensor: R -> P(sum)"], ["P(sum)"]),
    "in place keeps its layout": (
        lambda x, y: x.copy_(y),
        [((6, 4), "S(0)[5,1,0]"), ((6, 4), "R")],
        ["src of aten::copy_: R -> S(0)[5,1,0]"],
        ["S(0)[5,1,0]"],
    ),
    "mm by rows": (torch.mm, [((6, 4), "S(0)"), ((4, 3), "R")], [], ["S(0)"]),
    "mm by columns": (torch.mm, [((6, 4), "R"), ((4, 3), "S(1)")], [], ["S(1)"]),
    "mm contracted": (torch.mm, [((6, 4), "S(1)"), ((4, 3), "S(0)")], [], ["P(sum)"]),
    "mm contracted, uneven": (torch.mm, [((6, 4), "S(1)[3,0,1]"), ((4, 3), "S(0)[3,0,1]")], [], ["P(sum)"]),
    "mm contracted, cut otherwise": (
        torch.mm,
        [((6, 4), "S(1)[3,0,1]"), ((4, 3), "S(0)")],
        ["mat2 of aten::mm: S(0) -> S(0)[3,0,1]"],
        ["P(sum)"],
    ),
    "mm contracted, one whole": (torch.mm, [((6, 4), "S(1)"), ((4, 3), "R")], ["mat2 of aten::mm: R -> S(0)"], ["P(sum)"]),
    "mm by rows and columns": (torch.mm, [((6, 4), "S(0)"), ((4, 3), "S(1)")], ["mat2 of aten::mm: S(1) -> R"], ["S(0)"]),
    "mm of summands": (torch.mm, [((6, 4), "P"), ((4, 3), "P")], ["mat2 of aten::mm: P(sum) -> R"], ["P(sum)"]),
    "the larger of two stays": (torch.mm, [((6, 40), "S(0)"), ((40, 300), "S(1)")], ["self of aten::mm: S(0) -> R"], ["S(1)"]),
    "bmm by batches": (torch.bmm, [((2, 6, 4), "S(0)"), ((2, 4, 3), "S(0)")], [], ["S(0)"]),
    "a small weight is gathered": (F.linear, [((2, 6, 4), "S(1)"), ((3, 4), "S(0)")], ["weight of aten::linear: S(0) -> R"], ["S(1)"]),
    "sum": (torch.sum, [((6, 4), "S(0)")], [], ["P(sum)"]),
    "sum of other dims": (lambda x: x.sum(1), [((6, 4), "S(0)[5,1,0]")], [], ["S(0)[5,1,0]"]),
    "mean": (lambda x: x.mean(0), [((6, 4), "S(0)")], [], ["P(sum)"]),
    "greatest": (lambda x: x.amax(0), [((6, 4), "S(0)")], [], ["P(max)"]),
    "greatest of sums": (lambda x: x.amax(0), [((6, 4), "P")], ["self of aten::amax: P(sum) -> R"], ["R"]),
    "norm": (lambda x: x.norm(), [((6, 4), "S(0)")], [], ["P(norm)"]),
    "a kernel of its own: var": (lambda x: x.var(0), [((6, 4), "S(0)")], [], ["R"]),
    "a kernel of its own: argmax": (lambda x: x.argmax(0), [((6, 4), "S(0)")], [], ["R"]),
    "a kernel of its own: softmax": (lambda x: x.softmax(0), [((6, 4), "S(0)")], [], ["S(0)"]),
    "sorted along the cut": (lambda x: x.sort(0)[0], [((6, 4), "S(0)")], ["self of aten::sort: S(0) -> R"], ["R"]),
    "sorted along another dim": (lambda x: x.sort(1)[0], [((6, 4), "S(0)")], [], ["S(0)"]),
    "no rule, gathers": (lambda x: torch.linalg.qr(x)[0], [((6, 4), "S(0)")], ["A of aten::linalg_qr: S(0) -> R"], ["R"]),
    "transposed": (lambda x: x.t(), [((6, 4), "S(0)")], [], ["S(1)"]),
    "flattened": (lambda x: x.view(24), [((6, 4), "S(0)[5,1,0]")], [], ["S(0)[20,4,0]"]),
    "flattened across the cut": (lambda x: x.view(24), [((6, 4), "S(1)")], ["self of aten::view: S(1) -> S(0)"], ["S(0)"]),
    "unflattened in whole groups": (lambda x: x.view(2, 3, 4), [((6, 4), "S(0)")], ["self of aten::view: S(0) -> S(0)[3,3,0]"], ["S(0)"]),
    "a row at its owner": (lambda x: x[1], [((6, 4), "S(0)")], [], ["S(0)[4,0,0]"]),
    "some rows": (rows_1_to_3, [((6, 4), "S(0)")], [], ["S(0)[1,2,0]"]),
    "some rows of one rank": (rows_1_to_3, [((6, 4), "S(0)[5,1,0]")], [], ["S(0)[3,0,0]"]),
    "joined along the cut": (
        lambda x, y: torch.cat([x, y]),
        [((6, 4), "S(0)"), ((6, 4), "S(0)")],
        ["tensors of aten::cat: S(0) -> S(0)[4,2,0]", "tensors of aten::cat: S(0) -> S(0)[0,2,4]"],
        ["S(0)"],
    ),
    "joined along another dim": (
        lambda x, y: torch.cat([x, y]),
        [((6, 4), "S(1)"), ((6, 4), "R")],
        ["tensors of aten::cat: R -> S(1)"],
        ["S(1)"],
    ),
    "rows by a list": (lambda x, i: x[i.long()], [((6, 4), "S(0)"), ((2,), "R")], [], ["P(sum)"]),
    "columns by a list": (lambda x, i: x.index_select(0, i.long()), [((6, 4), "S(1)"), ((2,), "R")], [], ["S(1)"]),
    "windows": (F.conv1d, [((2, 4, 60), "S(2)"), ((3, 4, 3), "R")], ["halo of aten::convolution: S(2)"], ["S(2)[19,20,19]"]),
    "channels": (F.conv1d, [((2, 4, 60), "S(1)"), ((3, 4, 3), "R")], ["weight of aten::convolution: R -> S(1)"], ["P(sum)"]),
    "heads": (attention, [((2, 6, 8, 4), "S(1)")] * 3, [], ["S(1)"]),
    "a short sequence": (
        attention,
        [((2, 6, 8, 4), "S(2)")] * 3,
        ["key of aten::scaled_dot_product_attention: S(2) -> R", "value of aten::scaled_dot_product_attention: S(2) -> R"],
        ["S(2)"],
    ),
}

# The same on two by three ranks.
ON_A_GRID = {
    "cut twice": (torch.add, [((12, 4), "S(0) S(0)"), ((12, 4), "S(0) S(0)")], [], ["S(0) S(0)"]),
    "one dim each": (torch.mm, [((6, 4), "S(0) R"), ((4, 3), "R S(1)")], [], ["S(0) S(1)"]),
    "rows and the contracted dim": (torch.mm, [((6, 4), "S(0) S(1)"), ((4, 3), "R S(0)")], [], ["S(0) P(sum)"]),
    "one mesh dim moves": (
        torch.add,
        [((6, 4), "S(0) S(1)"), ((6, 4), "S(0) R")],
        ["other of aten::add.Tensor: S(0) R -> S(0) S(1)"],
        ["S(0) S(1)"],
    ),
    "summands along one": (torch.sum, [((6, 4), "S(0) R")], [], ["P(sum) R"]),
    "summands along both": (torch.sum, [((6, 4), "S(0) S(1)")], [], ["P(sum) P(sum)"]),
    "summands where the other is cut": (
        torch.mul,
        [((6, 4), "P R"), ((6, 4), "R S(0)")],
        ["self of aten::mul.Tensor: P(sum) R -> P(sum) S(0)"],
        ["P(sum) S(0)"],
    ),
}

CASES = {f"{shape}-{name}": (shape, *case) for shape, table in (((3,), ON_THREE), ((2, 3), ON_A_GRID)) for name, case in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_moves(play, name):
    shape, function, operands, moves, layouts = CASES[name]
    for rank in range(torch.Size(shape).numel()):
        mesh = play(rank, shape)
        assert resolved(function, [placed(mesh, *o) for o in operands]) == (moves, layouts), f"rank {rank}"


# Families whose ops look at no values, but for a few cases: what such a group gathers has none.
BY_LAYOUT = (
    "attention", "convolution", "flip_roll_repeat", "im2col_distance", "joins", "matmul", "normalization", "padding", "pointwise", "pooling",
    "reductions", "resampling", "softmax", "spectral", "views",
)  # fmt: skip
BY_VALUE = re.compile(r"inverse|segment_|(max|min)_dim|(max|min|median)$")  # the last: backward asks whether the result is NaN


@pytest.mark.parametrize("family", BY_LAYOUT)
def test_all_ranks_find_the_same(play, family):
    """One rank at a time, of five, of whom some hold nothing, and of a 2x3 mesh: forward and backward."""
    found = {}
    for shape in ((5,), (2, 3)):
        for rank in (0, 1, torch.Size(shape).numel() - 1):
            mesh = play(rank, shape)
            for case in importlib.import_module(f"test_{family}").CASES:
                if BY_VALUE.match(case.name):
                    continue
                arguments = arguments_of(case)
                for combo in telling(combinations(case, arguments, mesh)):
                    what = f"{case.name} on {shape}, {combo}"
                    ours = [
                        a.clone() if i in case.plain else place(a, mesh, *combo[i]).requires_grad_(case.backward and a.is_floating_point())
                        for i, a in enumerate(arguments)
                    ]
                    here = resolved(case.function, ours, case.backward)
                    there = found.setdefault(what, here)
                    assert here == there, f"{what}: rank {rank} finds {here}, rank 0 {there}"
