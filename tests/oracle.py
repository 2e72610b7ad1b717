"""The brute-force oracle: compares an op on ShardTensors with the same op on plain tensors, over placements and cuts.

A case is a name, a function of tensors, and the sizes of its arguments. It runs on every rank for all combinations of
placements and cuts of the arguments, or for a fixed sample if there are many. Checks that forward and backward equal plain
torch's, that every rank's piece has the sizes of its layout, and that the case allows the communication.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

_HERE = os.path.dirname(os.path.abspath(__file__))

TRIES_ALL = "SHARDTENSOR_TEST_ALL" in os.environ


def share(items: Iterable[Any], n: int, first: int = 0) -> list[Any]:
    """Every n-th of the items, from the one numbered `first` on; where all are to be tried, all."""
    return list(items) if TRIES_ALL else list(items)[first::n]


# A tensor argument: sizes (double precision, random), or a function that makes it from a generator.
Maker = Callable[[torch.Generator], torch.Tensor]
Summands = Callable[[torch.Tensor, int, int], list[torch.Tensor]]  # (tensor, n, mesh dim) -> n summands of the tensor


@dataclass
class Case:
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    backward: bool = True
    # Given each argument's placements (as text: "R", "S(0)", "P"), whether the forward must not communicate at all.
    quiet: Callable[..., bool] | None = None
    # `quiet` applies only if the sharded arguments have the same cuts.
    cut_alike: bool = False
    # Whether floating arguments may be Partial; which arguments stay replicated; which stay plain tensors.
    partial: bool = True
    replicated: tuple[int, ...] = ()
    plain: tuple[int, ...] = ()
    tolerance: float = 1e-9
    # The most combinations tried per mesh: others on two ranks than on more, and half as many on a mesh of two dims.
    limit: int = 32
    # Placements tried for every argument, instead of all.
    only: Sequence[str] | None = None
    marks: dict[str, Any] = field(default_factory=dict)


def case(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Case:
    return Case(name, function, arguments, **options)


def ints(high: int, *sizes: int) -> Maker:
    return lambda g: torch.randint(0, high, sizes, generator=g)


def bools(*sizes: int) -> Maker:
    return lambda g: torch.rand(sizes, generator=g) > 0.5


def positive(*sizes: int) -> Maker:
    return lambda g: torch.rand(sizes, generator=g, dtype=torch.float64) + 0.1


def make(argument: Any, generator: torch.Generator) -> torch.Tensor:
    if callable(argument):
        return argument(generator)
    return torch.randn(argument, generator=generator, dtype=torch.float64)


def arguments_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [make(a, generator) for a in case.arguments]


# ---- layouts ----

EVEN, UNEVEN, EMPTY, ONE = "even", "uneven", "empty", "one"


def cut_sizes(size: int, pieces: int, kind: str | Sequence[int]) -> list[int] | None:
    if not isinstance(kind, str):
        return list(kind)
    if kind == EVEN:
        return None
    if kind == EMPTY:  # the first rank has nothing
        rest = pieces - 1
        return [0] + [size // rest + (1 if i < size % rest else 0) for i in range(rest)] if rest else None
    if kind == ONE:  # one rank has everything
        return [size if i == size % pieces else 0 for i in range(pieces)]
    # growing pieces: 1, 2, ... until the size is used up
    weights = [i + 1 for i in range(pieces)]
    cut = [size * w // sum(weights) for w in weights]
    cut[-1] += size - sum(cut)
    return cut


def choices(t: torch.Tensor, mesh_ndim: int, partial: bool) -> list[tuple[tuple[str, ...], str]]:
    """Every (placements, cut) for a tensor: placements as text, one per mesh dim."""
    single = ["R", *(f"S({d})" for d in range(t.ndim))]
    if partial and (t.is_floating_point() or t.is_complex()):
        single.append("P")
    out = []
    for combo in itertools.product(single, repeat=mesh_ndim):
        sharded = any(c.startswith("S") for c in combo)
        nested = len({c for c in combo if c.startswith("S")}) < sum(c.startswith("S") for c in combo)
        for cut in (EVEN, UNEVEN, EMPTY) if sharded and not nested else (EVEN,):
            out.append((combo, cut))
    return out


def random_summands(whole: torch.Tensor, n: int, mesh_dim: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1000 + mesh_dim)
    parts = [torch.randn(whole.shape, generator=g, dtype=whole.dtype) for _ in range(n - 1)]
    return [*parts, whole - sum(parts) if parts else whole]


def place(
    whole: torch.Tensor, mesh: Any, placements: Sequence[str], cut: str | Sequence[int], summands: Summands = random_summands
) -> Any:
    """The whole tensor as a ShardTensor, without communication."""
    import shardtensor as st
    from shardtensor import _C, Partial, Replicate, Shard
    from shardtensor.tensor._layout import make_layout

    objects: list[Any] = []
    cuts: list[list[int] | None] = []
    for m, text in enumerate(placements):
        cuts.append(None)
        if text == "R":
            objects.append(Replicate())
        elif text == "P":
            objects.append(Partial())
        else:
            dim = int(text[2:-1])
            objects.append(Shard(dim))
            cuts[m] = cut_sizes(whole.shape[dim], mesh.size(m), cut)
    layout = make_layout(mesh, objects, whole.ndim, cuts, who="oracle")
    assert not layout.misfit(list(whole.shape)), "two mesh dims on one tensor dim are cut evenly here"
    local = whole.detach().clone()
    for m, text in enumerate(placements):
        if text == "P":
            local = summands(local, mesh.size(m), m)[mesh.get_local_rank(m)]
    for d in range(whole.ndim):
        (start, length), *more = layout.intervals(d, whole.shape[d])
        assert not more
        local = local.narrow(d, start, length)
    strides = list(whole.stride())
    out = _C.wrap(_C.laid(local.clone(memory_format=torch.contiguous_format), strides), layout, list(whole.shape), strides)
    assert isinstance(out, st.ShardTensor)
    return out


def summands_of_kind(whole: torch.Tensor, n: int, mesh_dim: int, kind: str) -> list[torch.Tensor]:
    """n tensors whose reduction of this kind is `whole`, which is positive."""
    g = torch.Generator().manual_seed(mesh_dim)
    parts = [torch.rand(whole.shape, generator=g, dtype=whole.dtype) + 0.5 for _ in range(n)]
    holder = torch.randint(n, whole.shape, generator=g)
    if kind in ("min", "max"):
        away = 1 if kind == "min" else -1
        return [torch.where(holder == i, whole, whole + away * part) for i, part in enumerate(parts)]
    if kind == "avg":
        return [*parts[1:], whole * n - sum(parts[1:])]
    if kind == "sum":
        return [*parts[1:], whole - sum(parts[1:])]
    if kind == "product":
        return [*parts[1:], whole / torch.stack([torch.ones_like(whole), *parts[1:]]).prod(0)]
    return [whole * part / sum(p * p for p in parts).sqrt() for part in parts]


def with_summands(whole: torch.Tensor, mesh: Any, mesh_dim: int, kind: str, rest: str) -> Any:
    """Summands along one mesh dim, `rest` along the others."""
    from shardtensor import _C
    from shardtensor.tensor._layout import make_layout
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    mine = summands_of_kind(whole, mesh.size(mesh_dim), mesh_dim, kind)[mesh.get_local_rank(mesh_dim)]
    texts = ["R" if m == mesh_dim else rest for m in range(mesh.ndim)]
    cut = place(mine, mesh, texts, "uneven")
    placements: list[Any] = list(cut.placements)
    placements[mesh_dim] = _NormPartial(2.0) if kind == "norm" else Partial(kind)
    cuts = cut._layout.cuts
    where = make_layout(mesh, placements, whole.ndim, cuts, who="test")
    return _C.wrap(cut._local_tensor, where, list(whole.shape), list(whole.stride()))


def _check_piece(value: Any) -> None:
    """Checks that this rank's piece has the sizes of its layout."""
    want = value._layout.local_sizes(list(value.shape))
    got = list(value._local_tensor.shape)
    assert want == got, f"the piece on rank {dist.get_rank()} has sizes {got}, but {value._layout} of {tuple(value.shape)} gives {want}"
    misfit = value._layout.misfit(list(value.shape))
    assert not misfit, misfit
    assert lies_as_the_whole(value), (
        f"the piece on rank {dist.get_rank()} has sizes {got} and strides {value._local_tensor.stride()}, "
        f"the whole {tuple(value.shape)} and {value.stride()} ({value._layout})"
    )


def lies_as_the_whole(value: Any) -> bool:
    """Whether the piece's dims have the same order in memory as the whole's."""
    local = value._local_tensor
    if local.numel() == 0 or local.ndim != value.ndim or 0 in value.stride():
        return True
    dims = [d for d in range(local.ndim) if local.shape[d] > 1]
    return all(
        (value.stride(a) > value.stride(b)) == (local.stride(a) > local.stride(b)) for a in dims for b in dims if value.stride(a) != value.stride(b)
    )


def shared(results: Any, arguments: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Which results share memory with which arguments, on this rank."""
    kept = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]

    def address(t: torch.Tensor) -> int:
        return getattr(t, "_local_tensor", t).untyped_storage().data_ptr()

    return {(i, k) for i, r in enumerate(kept) for k, a in enumerate(arguments) if address(a) and address(r) == address(a)}


def whole(value: Any) -> Any:
    """A result as plain values."""
    import shardtensor as st

    if not isinstance(value, st.ShardTensor):
        return value
    _check_piece(value)
    return value.detach().full_tensor()


def _here(value: Any, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's pieces of the result and of the expected result; sends nothing, except that summands are added up first."""
    import shardtensor as st
    from shardtensor.tensor._pieces import _piece

    if not isinstance(value, st.ShardTensor) or value._layout.has_partial:
        return whole(value), want
    _check_piece(value)
    return value._local_tensor.detach(), _piece(want, value._layout)


def _close(g: torch.Tensor, w: torch.Tensor, tolerance: float) -> bool:
    """A faster assert_close(), in a fifth of the time. True means close; False means that assert_close() must decide."""
    if (g.device, g.layout) != (w.device, w.layout) or w.layout != torch.strided or w.dtype == torch.complex32:
        return False
    return torch.equal(g, w) or (w.dtype in _FLOATS and torch.allclose(g, w, rtol=tolerance, atol=tolerance, equal_nan=True))


_FLOATS = {torch.float64, torch.float32, torch.complex128}


# Without min and max: gloo's lose NaN.
_MADE_BY = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT}


class Joint:
    """Checks that need all ranks, done together at the end: the whole values of summands, and equal layouts."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[tuple[torch.Tensor, torch.Tensor, float, str]]] = {}
        self._layouts = 0

    def keep(self, value: Any, want: torch.Tensor, tolerance: float, what: str) -> bool:
        """Keeps a value of floating-point summands or factors for later. False for others: compare these now."""
        import shardtensor as st
        from shardtensor.tensor._pieces import _piece

        if not isinstance(value, st.ShardTensor):
            return False
        self._layouts = zlib.crc32(str(value._layout).encode(), self._layouts)
        if value.dtype not in _FLOATS or value.dtype.is_complex:
            return False
        partial = {m: p for m, p in enumerate(value.placements) if p.is_partial()}
        kinds = {p.reduce_op if type(p) is st.Partial else "" for p in partial.values()}
        if len(kinds) != 1 or not kinds <= _MADE_BY.keys():
            return False
        _check_piece(value)
        kept = self._kept.setdefault((value.device_mesh, tuple(partial), *kinds, value.dtype), [])
        kept.append((value._local_tensor.detach(), _piece(want, value._layout), tolerance, what))
        return True

    def compare(self) -> None:
        for (mesh, mesh_dims, kind, _), kept in self._kept.items():
            made = torch.cat([local.reshape(-1) for local, *_ in kept])
            for m in mesh_dims:
                dist.all_reduce(made, _MADE_BY[kind], group=mesh.get_group(m))
                if kind == "avg":
                    made /= mesh.size(m)
            for got, (_, want, tolerance, what) in zip(made.split([local.numel() for local, *_ in kept]), kept, strict=True):
                _assert_close(got.view(want.shape), want, tolerance, what)
        self._kept.clear()
        most_and_least = torch.tensor([self._layouts, -self._layouts])
        dist.all_reduce(most_and_least, dist.ReduceOp.MAX)
        assert most_and_least.sum() == 0, "the ranks have different layouts"


def _assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    if not _close(got, want, tolerance):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


def compare(got: Any, want: Any, tolerance: float, what: str, joint: Joint | None = None) -> None:
    """Raises if they differ; for summands, only when `joint` compares."""
    got_flat, got_tree = pytree.tree_flatten(got)
    want_flat, want_tree = pytree.tree_flatten(want)
    assert len(got_flat) == len(want_flat), f"{what}: {got_tree} instead of {want_tree}"
    for i, (g, w) in enumerate(zip(got_flat, want_flat, strict=True)):
        if isinstance(w, torch.Tensor):
            assert tuple(g.shape) == tuple(w.shape), f"{what}[{i}]: shape {tuple(g.shape)} instead of {tuple(w.shape)}"
            assert g.dtype == w.dtype, f"{what}[{i}]: {g.dtype} instead of {w.dtype}"
            if joint is None or not joint.keep(g, w.detach(), tolerance, f"{what}[{i}]"):
                _assert_close(*_here(g, w.detach()), tolerance, f"{what}[{i}]")
        else:
            assert g == w or (g != g and w != w), f"{what}[{i}]: {g} instead of {w}"


def python_entered(f: Callable[[], Any]) -> set[tuple[str, str]]:
    """The Python functions outside the tests that later calls of f enter, by file and name."""
    entered: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and not frame.f_code.co_filename.startswith(_HERE):
            entered.add((frame.f_code.co_filename, frame.f_code.co_name))

    def once_more() -> set[tuple[str, str]]:
        entered.clear()
        gc.disable()
        sys.setprofile(note)
        try:
            f()
        finally:
            sys.setprofile(None)
            gc.enable()
        return set(entered)

    f()
    # Once, something may be freed that an earlier test has left. All ranks run f equally often: it may communicate.
    return once_more() & once_more()


def combinations(case: Case, arguments: list[torch.Tensor], mesh: Any) -> list[Any]:
    per_argument = []
    for i, t in enumerate(arguments):
        if i in case.plain or i in case.replicated:
            per_argument.append([(("R",) * mesh.ndim, EVEN)])
        else:
            options = choices(t, mesh.ndim, case.partial)
            if case.only is not None:
                options = [o for o in options if all(p in case.only for p in o[0])]
            per_argument.append(options)
    total = math.prod(len(options) for options in per_argument)
    limit = case.limit // mesh.ndim
    if total <= limit:
        return list(itertools.product(*per_argument))
    # Four arguments on a 2-d mesh have millions of combinations: draw numbers, and expand only those.
    drawn = random.Random(case.name).sample(range(total), min(total, 2 * limit))
    return [_combination(n, per_argument) for n in (drawn[:limit] if mesh.size() == 2 else drawn[-limit:])]


def telling(combos: list[Any]) -> list[Any]:
    """A few of the combinations. They still contain every argument's choices, and every two arguments' placements, cut alike or not."""
    tells = []
    for combo in combos:
        told: set[Any] = set(enumerate(combo))
        for (i, (a, cut)), (j, (b, other)) in itertools.combinations(enumerate(combo), 2):
            both = any(p.startswith("S") for p in a) and any(p.startswith("S") for p in b)
            told |= {(i, j, m, *pair, both and cut == other) for m, pair in enumerate(zip(a, b, strict=True))}
        tells.append(told)
    missing, out = set().union(*tells), []
    while missing:
        best = max(range(len(combos)), key=lambda n: len(tells[n] & missing))
        out.append(combos[best])
        missing -= tells[best]
    return out


def _combination(number: int, per_argument: list[list[Any]]) -> tuple[Any, ...]:
    out = []
    for options in reversed(per_argument):
        number, at = divmod(number, len(options))
        out.append(options[at])
    return tuple(reversed(out))


def run_case(module: str, name: str, mesh_shape: tuple[int, ...], check: bool = False) -> int:
    """Called on every rank: the case called `name` of a test module, on a mesh of all ranks; check: partly in checking mode."""
    import importlib

    from shardtensor import _C

    case = next(c for c in importlib.import_module(module).CASES if c.name == name)
    mesh = mesh_of(mesh_shape)
    torch.manual_seed(0)  # checking mode compares the ranks' generators, and an earlier test may have drawn on some ranks only
    arguments = arguments_of(case)
    tried = combinations(case, arguments, mesh)
    if not TRIES_ALL:
        tried = telling(tried)
    plain = [a.clone().requires_grad_(case.backward and a.is_floating_point()) for a in arguments]
    want = case.function(*plain)
    want_grads = plain_gradients(plain, want) if case.backward else []
    joint = Joint()
    for number, combo in enumerate(tried):
        what = f"{case.name} on {mesh_shape} with " + ", ".join(f"{' '.join(p)} {cut}" for p, cut in combo)
        ours = [
            a.clone() if i in case.plain else place(a, mesh, *combo[i]).requires_grad_(case.backward and a.is_floating_point())
            for i, a in enumerate(arguments)
        ]
        _C.reset_comm_counts()
        with checking(check and number % CHECKED == 0):
            try:
                got = case.function(*ours)
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        counts = _C.comm_counts()
        alike = not case.cut_alike or len({cut for p, cut in combo if any(x.startswith("S") for x in p)}) <= 1
        if alike and case.quiet is not None and case.quiet(*(" ".join(p) for p, _ in combo)):
            assert not counts, f"{what}: communicates {counts}"
        compare(got, want, case.tolerance, what, joint)
        aliases = shared(got, ours) - shared(want, plain)
        assert not aliases, f"{what}: a result shares memory with an argument, plain torch's does not: {aliases} (result, argument)"
        if case.backward:
            with checking(check and number % CHECKED == 0):
                check_backward(want_grads, ours, want, got, mesh, case.tolerance, what, joint)
    joint.compare()
    return len(tried)


SEEDS = ("as the result", "replicated", "in summands")


def seed_like(result: Any, seed: torch.Tensor, mesh: Any, how: str) -> Any:
    """A gradient as it may arrive at a result: in the result's layout, replicated, or in summands where it is not cut."""
    from shardtensor import _C, Partial, Replicate, ShardTensor
    from shardtensor.tensor._layout import _make, fitting_cuts

    if how == "replicated" or not isinstance(result, ShardTensor):
        return place(seed, mesh, ("R",) * mesh.ndim, EVEN)
    rest = Partial() if how == "in summands" and (seed.is_floating_point() or seed.is_complex()) else Replicate()
    placements = [p if p.is_shard() else rest for p in result.placements]
    layout = _make(result._layout.mesh, placements, seed.ndim, "oracle")
    layout = _make(layout.mesh, placements, seed.ndim, "oracle", fitting_cuts(result._layout, layout.placements))
    local = seed
    for d in range(seed.ndim):
        runs = [local.narrow(d, start, length) for start, length in layout.intervals(d, seed.shape[d])]
        local = torch.cat(runs or [local.narrow(d, 0, 0)], d)
    for m, p in enumerate(placements):
        if p.is_partial():  # the seed times 2, -1, 1, -1, ...: they add up exactly to the seed
            c, n = mesh.get_local_rank(m), mesh.size(m)
            local = local * (1 if n % 2 and c == 0 else 2 if c == 0 else -1 if c % 2 else 1)
    return _C.wrap(local.contiguous(), layout, list(seed.shape), list(seed.stride()))


def differentiable(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]


def _seeds(results: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in results]


def plain_gradients(plain: Any, want: Any) -> list[Any]:
    """What check_backward() awaits."""
    results = differentiable(want)
    leaves = [t for t in plain if t.requires_grad]
    return list(torch.autograd.grad(results, leaves, _seeds(results), allow_unused=True)) if results else []


def check_backward(
    want_grads: list[Any],
    ours: Any,
    want: Any,
    got: Any,
    mesh: Any,
    tolerance: float,
    what: str,
    joint: Joint | None = None,
    may_be_plain: bool = False,
) -> None:
    w, g = differentiable(want), differentiable(got)
    assert len(w) == len(g), f"{what}: {len(g)} results require grad instead of {len(w)}"
    if not w:
        return
    our_leaves = [t for t in ours if t.requires_grad]
    how = SEEDS[zlib.crc32(what.encode()) % len(SEEDS)]
    our_seeds = [seed_like(t, s, mesh, how) for t, s in zip(g, _seeds(w), strict=True)]
    try:
        got_grads = torch.autograd.grad(g, our_leaves, our_seeds, allow_unused=True)
    except Exception as error:
        raise AssertionError(f"{what}: backward, gradient {how}: {type(error).__name__}: {error}") from error
    kinds = [(type(g), type(t)) for g, t in zip(got_grads, our_leaves, strict=True) if g is not None and type(g) is not type(t)]
    assert may_be_plain or not kinds, f"{what}: gradient, itself {how}: {kinds}"
    compare(list(got_grads), want_grads, tolerance, f"{what}: gradient, itself {how}", joint)


_meshes: dict[tuple[int, ...], Any] = {}


def mesh_of(shape: tuple[int, ...]) -> Any:
    from shardtensor import init_device_mesh

    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape)
    return _meshes[shape]


# Every family is tried on these: (ranks, mesh shape).
MESHES = [(2, (2,)), (3, (3,)), (4, (2, 2))]


def run_on(pools: Any, mesh: tuple[int, tuple[int, ...]], module: str, name: str) -> None:
    """A case on one of MESHES; on two ranks partly in checking mode."""
    world, shape = mesh
    assert pools(world).run(run_case, module, name, shape, check=world == 2)[0] > 0


CHECKED = 8  # every eighth call: the checking mode communicates before and after each op


def checking(on: bool) -> Any:
    from shardtensor import debug

    return debug.check() if on else contextlib.nullcontext()


def mesh_here() -> Any:
    """One mesh dim over all ranks."""
    return mesh_of((dist.get_world_size(),))


def mesh_id(mesh: Any) -> str:
    return "x".join(str(n) for n in mesh[1])
