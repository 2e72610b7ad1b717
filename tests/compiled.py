"""Compares the tables of cases under torch.compile with the same cases in eager mode: values, layouts, gradients, random keys.

test_compile.py runs each case with one choice of placements and cuts on two ranks;
`python tests/compiled.py [--mesh 3] [--first 0] [--count 5] [--backend inductor] [FAMILY | FAMILY.CASE ...]` runs any number.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

# Modules called test_<family>, and the number of parts that the suite splits each into.
FAMILIES = {
    "attention": 1, "convolution": 1, "embedding": 1, "flip_roll_repeat": 1, "im2col_distance": 1, "indexing": 1, "joins": 1, "linalg": 2,
    "losses": 3, "matmul": 2, "normalization": 1, "out_arguments": 1, "padding": 1, "pointwise": 1, "pooling": 1, "random": 1, "reductions": 3,
    "resampling": 1, "sampling": 1, "scans": 1, "softmax": 1, "spectral": 1, "summands": 1, "uneven_list": 4, "views": 2,
}  # fmt: skip

RIGHT, OTHER_LAYOUT, RAISES, WRONG = "right", "laid out otherwise", "raises", "wrong"


class Trial(NamedTuple):
    name: str
    where: str  # placements and cuts of its arguments
    function: Callable[..., Any]
    arguments: Callable[[], list[Any]]  # makes them again for each run


class Outcome(NamedTuple):
    name: str
    kind: str
    text: str


# ---- what is tried, by family ----


def _of_cases(module: Any, mesh: Any) -> Iterator[tuple[str, list[Trial]]]:
    from oracle import arguments_of, combinations

    for case in module.CASES:
        arguments = arguments_of(case)
        yield case.name, [_placed(case, arguments, combo, mesh) for combo in combinations(case, arguments, mesh)]


def _of_uneven_list(module: Any, mesh: Any) -> Iterator[tuple[str, list[Trial]]]:
    from oracle import arguments_of

    rows = [5, 3] + [0] * (mesh.size(0) - 2)
    for case in module.CASES:
        arguments = arguments_of(case)
        rest = ("R",) * (mesh.ndim - 1)
        combo = [(("S(0)" if a.ndim and len(a) == 8 else "R", *rest), rows) for a in arguments]
        yield case.name, [_placed(case, arguments, combo, mesh)]


def _placed(case: Any, arguments: list[torch.Tensor], combo: Any, mesh: Any) -> Trial:
    from oracle import place

    def ours() -> list[Any]:
        return [
            a.clone() if i in case.plain else place(a, mesh, *combo[i]).requires_grad_(case.backward and a.is_floating_point())
            for i, a in enumerate(arguments)
        ]

    return Trial(case.name, ", ".join(f"{' '.join(p)} {cut}" for p, cut in combo), case.function, ours)


def _of_random(module: Any, mesh: Any) -> Iterator[tuple[str, list[Trial]]]:
    from oracle import case, choices

    whole = torch.zeros(module.SIZES, dtype=torch.float64)
    for name, function in module.OPS.items():
        unary = case(name, function, module.SIZES, backward=False)
        yield name, [_placed(unary, [whole], [choice], mesh) for choice in choices(whole, mesh.ndim, True)]


def _of_out_arguments(module: Any, mesh: Any) -> Iterator[tuple[str, list[Trial]]]:
    from oracle import case, combinations

    for name, (function, sizes) in module.OUT.items():
        generator = torch.Generator().manual_seed(7)
        arguments = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
        want = function(*arguments, out=torch.empty(0, dtype={"argmax": torch.int64, "gt": torch.bool}.get(name, torch.float64)))
        with_out = case(name, lambda *a, f=function: f(*a[:-1], out=a[-1]), *sizes, want.shape, backward=False)
        arguments.append(torch.zeros_like(want))
        yield name, [_placed(with_out, arguments, combo, mesh) for combo in combinations(with_out, arguments, mesh)]


def _of_summands(module: Any, mesh: Any) -> Iterator[tuple[str, list[Trial]]]:
    from oracle import place, with_summands

    g = torch.Generator().manual_seed(0)
    x = torch.rand(4, 3, generator=g, dtype=torch.float64) + 0.5
    y = torch.randn(4, 3, generator=g, dtype=torch.float64)
    for name, function in module.OPS.items():
        options = []
        for kind in module.KINDS:
            for mesh_dim in range(mesh.ndim):
                for other in ("R", "S(0)", "S(1)", "P"):

                    def ours(kind: str = kind, mesh_dim: int = mesh_dim, other: str = other) -> list[Any]:
                        return [with_summands(x, mesh, mesh_dim, kind, "R"), place(y, mesh, (other,) * mesh.ndim, "even")]

                    options.append(Trial(name, f"{kind} on mesh dim {mesh_dim}, {other}", function, ours))
        yield name, options


_OF_FAMILY = {
    "out_arguments": _of_out_arguments,
    "random": _of_random,
    "summands": _of_summands,
    "uneven_list": _of_uneven_list,
}


def _choices(family: str, mesh: Any) -> dict[str, list[Trial]]:
    """Every choice of placements and cuts, by case."""
    return dict(_OF_FAMILY.get(family, _of_cases)(importlib.import_module(f"test_{family}"), mesh))


def names_of(family: str, mesh_shape: tuple[int, ...]) -> list[str]:
    from oracle import mesh_of

    return list(_choices(family, mesh_of(mesh_shape)))


# ---- both ways ----


def _results(trial: Trial, mesh: Any, backend: str | None, dynamic: bool | None) -> tuple[Any, ...]:
    """Returns layouts; values, gradients (for seeds laid out in one of three ways) and the generator's state."""
    from oracle import SEEDS, differentiable, seed_like, whole
    from shardtensor import ShardTensor

    torch._dynamo.reset()
    torch.manual_seed(1)
    ours = trial.arguments()
    function = trial.function
    got = (torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic) if backend else function)(*ours)
    leaves, wanted = pytree.tree_leaves(got), differentiable(got)
    how = SEEDS[zlib.crc32(trial.name.encode()) % len(SEEDS)]
    generator = torch.Generator().manual_seed(11)
    seeds = [seed_like(t, torch.randn(t.shape, generator=generator, dtype=t.dtype), mesh, how) for t in wanted]
    inputs = [t for t in ours if t.requires_grad]
    grads = torch.autograd.grad(wanted, inputs, seeds, allow_unused=True) if wanted else []
    layouts = [str(t._layout) if isinstance(t, ShardTensor) else type(t).__name__ for t in leaves]
    return layouts, ([whole(t) for t in leaves], [None if g is None else whole(g) for g in grads], torch.get_rng_state())


def _outcome(trial: Trial, mesh: Any, backend: str, dynamic: bool | None) -> tuple[str, str]:
    want_layouts, want = _results(trial, mesh, None, None)
    try:
        layouts, got = _results(trial, mesh, backend, dynamic)
    except dist.DistBackendError:  # waited for a peer
        raise
    except Exception as error:
        return RAISES, f"{type(error).__name__}: {error}"
    try:
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-6, equal_nan=True)
    except AssertionError as error:
        return WRONG, str(error)
    if layouts != want_layouts:
        return OTHER_LAYOUT, f"{layouts} instead of {want_layouts}"
    return RIGHT, ""


def _joined(trials: list[Trial]) -> Trial:
    """One trial that runs all of them in one graph."""
    counts = [len(t.arguments()) for t in trials]

    def function(*arguments: Any) -> list[Any]:
        out, start = [], 0
        for trial, count in zip(trials, counts, strict=True):
            out.append(trial.function(*arguments[start : start + count]))
            start += count
        return out

    return Trial(trials[0].name, "", function, lambda: [a for t in trials for a in t.arguments()])


def _outcomes(trials: list[Trial], mesh: Any, backend: str, dynamic: bool | None = None) -> Iterator[Outcome]:
    """Runs them in one graph if all come out right in it, otherwise in one graph each."""
    if len(trials) > 1:
        kind, text = _outcome(_joined(trials), mesh, backend, dynamic)
        agree(kind, text)
        if kind == RIGHT:
            yield from (Outcome(t.name, kind, f"with {t.where}: ") for t in trials)
            return
    for trial in trials:
        kind, text = _outcome(trial, mesh, backend, dynamic)
        agree(f"{trial.name}: {kind}", f"with {trial.where}: {kind} {text}")
        yield Outcome(trial.name, kind, f"with {trial.where}: {text}")


def run(
    family: str,
    names: list[str],
    mesh_shape: tuple[int, ...],
    first: int = 0,
    count: int = 1,
    backend: str = "aot_eager",
    together: int = 1,
    alone: Sequence[str] = (),
    dynamic: bool | None = None,
) -> list[Outcome]:
    """Called on every rank: the outcomes of the choices numbered `first` to `first + count` of each case.

    One graph takes `together` of them, but the cases named in `alone` get a graph for each choice.
    """
    from oracle import mesh_of

    mesh, out = mesh_of(mesh_shape), []
    choices = _choices(family, mesh)
    trials: list[Trial] = []
    for name in names:
        options = choices[name]
        drawn = random.Random(name).sample(options, len(options))[first : first + count]
        if name in alone:
            for trial in drawn:
                out += _outcomes([trial], mesh, backend, dynamic)
        else:
            trials += drawn
    for start in range(0, len(trials), together):
        out += _outcomes(trials[start : start + together], mesh, backend, dynamic)
    return out


# ---- how many graphs serve two lengths ----

LONGER = 4, 6  # times the sizes in the table
LONGER_UNEVEN = 7, 11  # 3 ranks do not divide these, and they leave different remainders


class Frames(NamedTuple):
    name: str
    where: str  # the sizes that grow, and the one that is cut
    ours: int  # graphs; 0: it raised
    plain: int | None  # of plain torch, if ours are not 1; None: no other sizes fit
    text: str = ""


def _longer(case: Any, grown: set[int], times: int) -> list[torch.Tensor]:
    """Its arguments; dims whose size is in `grown` are `times` as long."""
    from oracle import arguments_of

    out = []
    generator = torch.Generator().manual_seed(7)
    for t, argument in zip(arguments_of(case), case.arguments, strict=True):
        by = [times if s in grown else 1 for s in t.shape]
        sizes = [s * b for s, b in zip(t.shape, by, strict=True)]
        out.append(t.repeat(by) if callable(argument) else torch.randn(sizes, generator=generator, dtype=torch.float64))
    return out


def _graphs(case: Any, grown: set[int], cut: int | None, mesh: Any, longer: tuple[int, ...]) -> int:
    """How many graphs serve all lengths: of plain torch, or of tensors sharded on their first dim of size `cut`. These must give
    eager mode's values and gradients."""
    from oracle import EVEN, arguments_of, differentiable, place, whole
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.function, backend=counter, fullgraph=True, dynamic=True)
    table = arguments_of(case)

    def values(function: Any, times: int) -> list[Any]:
        arguments = _longer(case, grown, times)
        for i, t in enumerate(table):
            if cut is not None and i not in case.plain:
                d = next((d for d, s in enumerate(t.shape) if s == cut and f"S({d})" in (case.only or (f"S({d})",))), None)
                where = "R" if d is None or i in case.replicated else f"S({d})"
                arguments[i] = place(arguments[i], mesh, (where, *("R",) * (mesh.ndim - 1)), EVEN)
        for t in arguments:
            t.requires_grad_(case.backward and t.is_floating_point())
        torch.manual_seed(1)
        out = function(*arguments)
        results = differentiable(out)
        if case.backward and results:
            losses = [t.abs().sum() for t in results]
            sum(loss if cut is None else loss.full_tensor() for loss in losses).backward()
        return [whole(t) for t in (*pytree.tree_leaves(out), *(t.grad for t in arguments))]

    for times in longer:
        got = values(compiled, times)
        if cut is not None:
            torch.testing.assert_close(got, values(case.function, times), equal_nan=True)
    return counter.frame_count


def frames(family: str, names: list[str], mesh_shape: tuple[int, ...], longer: tuple[int, ...]) -> list[Frames]:
    """Called on every rank: the graphs for two lengths, with the first dim that can be longer cut."""
    from oracle import arguments_of, mesh_of

    mesh, out = mesh_of(mesh_shape), []
    cases = {c.name: c for c in getattr(importlib.import_module(f"test_{family}"), "CASES", ())}
    for case in (cases[name] for name in names if name in cases):
        table = arguments_of(case)
        sizes = list(dict.fromkeys(s for t in table for s in t.shape if s > 1))
        for grown in [sizes, *([s] for s in sizes)] if len(sizes) > 1 else [sizes] if sizes else []:
            found = _frames_of(case, set(grown), grown[0], mesh, longer)
            if found.ours or found.plain:
                out.append(found)
                break
    return out


def _frames_of(case: Any, grown: set[int], cut: int, mesh: Any, longer: tuple[int, ...]) -> Frames:
    ours, plain, text = 0, None, ""
    try:
        ours = _graphs(case, grown, cut, mesh, longer)
    except dist.DistBackendError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    counts = _on_all_ranks(ours)  # a rank may compile again alone, if only its piece's sizes have become numbers
    ours = max(counts) if all(counts) else 0
    text = text or (f"the ranks compile {counts} times" if len(set(counts)) > 1 else "")
    if ours != 1:
        try:
            plain = _graphs(case, grown, None, mesh, longer)
        except Exception:  # torch itself takes no other sizes
            ours = 0
    return Frames(case.name, f"{sorted(grown)} longer, {cut} cut", ours, plain, text)


def run_placed(family: str, name: str, where: str, mesh_shape: tuple[int, ...]) -> Outcome:
    """Called on every rank: one case with its arguments placed and cut as `where` says."""
    from oracle import arguments_of, mesh_of

    mesh = mesh_of(mesh_shape)
    case = next(c for c in importlib.import_module(f"test_{family}").CASES if c.name == name)
    arguments = arguments_of(case)
    combo = [(tuple(words[:-1]), words[-1]) for words in map(str.split, where.split(", "))]
    (outcome,) = _outcomes([_placed(case, arguments, combo, mesh)], mesh, "aot_eager")
    return outcome


_apart: list[Any] = []


def _on_all_ranks(mine: Any) -> list[Any]:
    """It has its own group: a rank that raised may have left its peers in a collective."""
    if not _apart:
        _apart.append(dist.new_group())
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine, group=_apart[0])
    return theirs


def agree(mine: Any, more: str) -> None:
    """Raises if the ranks disagree."""
    theirs = _on_all_ranks(mine)
    assert theirs == [mine] * len(theirs), f"the ranks disagree: {theirs}; here: {more}"


def main() -> None:
    import argparse

    from pool import Pool, RankError, parse_mesh

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=parse_mesh, default="3", help="its shape, such as 2x2")
    parser.add_argument("--first", type=int, default=0, help="of a case's choices of placements and cuts")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--frames", action="store_true", help="count the graphs for several lengths, plain and ours")
    parser.add_argument("--longer", type=int, nargs=2, default=LONGER, help="how many times as long, with --frames")
    parser.add_argument("--dynamic", action="store_true", default=None, help="with symbols for sizes")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    shape = options.mesh
    pool = Pool(math.prod(shape))
    counts: Counter[str] = Counter()
    for name in options.names or FAMILIES:
        family, _, one = name.partition(".")
        for case in [one] if one else pool.run("compiled:names_of", family, shape)[0]:
            if options.frames:
                for f in pool.run("compiled:frames", family, [case], shape, tuple(options.longer), seconds=100)[0]:
                    counts["one graph" if f.ours == 1 else "as plain" if f.ours == f.plain else "more graphs" if f.ours else RAISES] += 1
                    if f.ours not in (1, f.plain):
                        print(f"{family}.{f.name}: {f.where}: ours {f.ours}, plain {f.plain} {' '.join(f.text.split())[:600]}", flush=True)
                continue
            try:
                arguments = family, [case], shape, options.first, options.count, options.backend, 1, (), options.dynamic
                outcomes = pool.run("compiled:run", *arguments, seconds=60 * options.count)[0]
            except RankError as error:
                outcomes = [Outcome(case, "out of step", str(error)[-1100:])]
            for outcome in outcomes:
                counts[outcome.kind] += 1
                if outcome.kind != RIGHT:
                    print(f"{outcome.kind:20s} {family}.{outcome.name}: {' '.join(outcome.text.split())[:1200]}", flush=True)
    print(dict(counts))
    pool.stop()


if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/", 1)[0])
    main()
