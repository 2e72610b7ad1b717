"""torch's own op database on ShardTensors: every op on its own samples, each tensor argument replicated, sharded or in summands.

test_op_db.py runs a small part;
`python tests/opinfo.py [--mesh 3 or 2x2] [--samples 20] [--layouts 20] [--dtype complex128] [names...]`
runs more of it, prints one line per op with errors, and a summary.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

Layout = tuple[tuple[str, ...], str]  # placements, and the kind of cut

SAMPLES = 4  # of an op's sample inputs, spread over the list
LAYOUTS = 4  # per sample, on two ranks others than on three
SMALL = 20_000  # elements of all its tensors

_MEMORY = "what it returns is memory that nobody has written yet"
_RANDOM = "it draws random numbers, and another tensor's worth of them on shards than on the whole"

# Only sizes and dtypes are compared, because torch's values are no reference.
NOT_COMPARABLE = {
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _MEMORY),
    **dict.fromkeys(("resize_", "resize_as_"), _MEMORY),
    **dict.fromkeys(
        (
            "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.in_place",
            "normal.number_mean", "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform",
            "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout.with_train", "nn.functional.feature_alpha_dropout.without_train",
            "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
            "nn.functional.multi_head_attention_forward", "nn.functional.rrelu",
            "pca_lowrank", "svd_lowrank",
        ),
        _RANDOM,
    ),
}  # fmt: skip

# By the coarsest dtype that takes part: compare no more digits than its arithmetic has.
TOLERANCE = {"float64": 1e-6, "complex128": 1e-6, "float32": 1e-4, "complex64": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
TOLERANCE.update(dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 0.2))


def _key(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


# The database calls torch.Tensor's own method, which bypasses a subclass's.
# torch's formulas make some of their gradients as plain zeros (of a number, of no copies at all).
PLAIN_GRADIENTS = ("repeat", "tile")
AS_WRITTEN = {"__getitem__": operator.getitem}


def _call(op: Any, tree: Any, leaves: list[Any]) -> Any:
    import torch.utils._pytree as pytree

    x, args, kwargs = pytree.tree_unflatten(leaves, tree)
    return AS_WRITTEN.get(op.name, op.op)(x, *args, **kwargs)


def _refused(op: Any, tree: Any, flat: list[Any]) -> bool:
    """Whether torch itself rejects the call. torch's op may write to its arguments."""
    import torch

    return _raised(op, tree, [t.clone() if isinstance(t, torch.Tensor) else t for t in flat]) is not None


def _raised(op: Any, tree: Any, leaves: list[Any]) -> Exception | None:
    try:
        _call(op, tree, leaves)
    except Exception as error:
        return error
    return None


@functools.cache
def database() -> dict[str, Any]:
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):  # otherwise it reads the sources of the whole stack to find a calling unittest
        module.extract_test_fn = lambda: None
    return {_key(op): op for op in op_db}


def _elements(sample: Any) -> int:
    import torch
    import torch.utils._pytree as pytree

    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))


def _spread(samples: list[Any], n: int) -> list[Any]:
    """n of the samples, evenly spread over the small ones if there are any: a large tensor is slow and finds no more errors."""
    small = [s for s in samples if _elements(s) <= SMALL] or samples
    return small if len(small) <= n else [small[i * len(small) // n] for i in range(n)]


def _options(t: Any, mesh_ndim: int) -> list[Layout]:
    from oracle import choices

    return choices(t, mesh_ndim, t.element_size() >= 4 and bool(t.isfinite().all()))


def _layouts(tensors: list[Any], mesh_ndim: int, count: int, seed: str) -> list[list[Layout]]:
    """All combinations of the tensors' options if they are few; else one with all last dims cut, and random ones."""
    options = [_options(t, mesh_ndim) for t in tensors]
    if math.prod(len(o) for o in options) <= count:
        return [list(c) for c in itertools.product(*options)]
    rng = random.Random(seed)
    out = [[[x for x in o if "P" not in x[0]][-1] for o in options]]
    while len(out) < count:
        out.append([rng.choice(o) for o in options])
    return out


def _exact_summands(t: Any, n: int, mesh_dim: int) -> list[Any]:
    """t times -1, 1 or 2: they add up exactly to t."""
    import torch

    times = torch.tensor([1, -1] * (n // 2) + [1] if n % 2 else [2, -1] + [1, -1] * (n // 2 - 1))
    turn = torch.randint(0, n, t.shape, generator=torch.Generator().manual_seed(5 + mesh_dim))
    return [t * times[(turn + i) % n].to(t.dtype) for i in range(n)]


def _tolerance(*trees: Any) -> float:
    import torch
    import torch.utils._pytree as pytree

    dtypes = {str(t.dtype).removeprefix("torch.") for t in pytree.tree_leaves(trees) if isinstance(t, torch.Tensor)}
    return max((TOLERANCE[d] for d in dtypes if d in TOLERANCE), default=0.0)


def _same_form(got: Any, want: Any, what: str, compared: set[int]) -> None:
    import torch
    import torch.utils._pytree as pytree
    from oracle import whole

    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True))
    for i, (g, w) in enumerate(pairs):
        if isinstance(w, torch.Tensor):
            assert (g.shape, g.dtype) == (w.shape, w.dtype), f"{what}[{i}]: {g.shape} {g.dtype} instead of {w.shape} {w.dtype}"
            if id(g) not in compared:
                whole(g)


def _try(
    op: Any, sample: Any, layouts: list[Layout], mesh: Any, comparable: bool, what: str, inplace: bool, warm: bool, joint: Any
) -> None:
    """One sample under one choice of layouts; raises what the op raises, or AssertionError."""
    import torch
    import torch.utils._pytree as pytree
    from oracle import check_backward, compare, differentiable, place, plain_gradients, python_entered

    flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, t in enumerate(flat) if _is_strided(t)]
    grad = op.supports_inplace_autograd if inplace else True
    plain, ours = list(flat), list(flat)
    for i, (placements, cut) in zip(where, layouts, strict=True):
        plain[i] = flat[i].detach().clone().requires_grad_(grad and flat[i].requires_grad)
        ours[i] = place(flat[i].detach(), mesh, placements, cut, _exact_summands).requires_grad_(grad and flat[i].requires_grad)

    def call(leaves: list[Any]) -> Any:
        torch.manual_seed(1)
        if not inplace:
            return _call(op, tree, leaves)
        x, args, kwargs = pytree.tree_unflatten(leaves, tree)
        copy = x.clone()
        written = op.inplace_variant(copy, *args, **kwargs)
        assert written is copy, f"{what}: the in-place form returns another tensor"
        return copy

    def differentiate(leaves: list[Any]) -> None:
        results = differentiable(sample.output_process_fn_grad(call(leaves)))
        if results:
            wanted = differentiable([leaves[i] for i in where])
            torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results], allow_unused=True)

    try:
        want = call(plain)
    except Exception:
        return  # a sample that torch itself rejects
    if inplace and want.shape != flat[0].shape:
        return  # torch's addbmm_ resizes self
    got = call(ours)
    for step, f in (("call", call), ("backward", differentiate)) if warm else ():
        entered = python_entered(partial(f, ours)) - python_entered(partial(f, plain))
        assert not entered, f"{what}: a warm {step} enters Python: {entered}"
    # The determined part of the result (of eigenvectors, not their phases).
    determined = sample.output_process_fn_grad(got) if comparable else ()
    _same_form(got, want, what, {id(t) for t in pytree.tree_leaves(determined)})
    if not comparable:
        return
    want, got = sample.output_process_fn_grad(want), determined
    tolerance = _tolerance(flat, want)
    compare(_wide(got), _wide(want), tolerance, what, joint)
    if any(t.requires_grad for t in plain if isinstance(t, torch.Tensor)):
        want_grads = plain_gradients([plain[i] for i in where], want)
        plain_too = op.name in PLAIN_GRADIENTS
        check_backward(want_grads, [ours[i] for i in where], want, got, mesh, tolerance, what, joint, may_be_plain=plain_too)


def _wide(tree: Any) -> Any:
    """float8 as float32: torch compares float8 only bit by bit."""
    import torch
    import torch.utils._pytree as pytree

    def wide(t: Any) -> Any:
        return t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() and t.element_size() == 1 else t

    return pytree.tree_map(wide, tree)


def _is_strided(t: Any) -> bool:
    import torch

    return isinstance(t, torch.Tensor) and t.layout == torch.strided


class Outcome(NamedTuple):
    right: int  # calls
    promoted: int  # those that must take plain tensors as replicated, because the op itself makes one
    unsupported: list[str]


def _attempt(attempt: Callable[..., None], *args: Any) -> str:
    """The result of one call: "right", "plain" if it met a plain tensor, or why it is not supported. Raises if it is wrong."""
    try:
        attempt(*args)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:
        if "NotImplementedError" in str(error):
            return str(error)
        if "is a plain torch.Tensor of sizes" in str(error):
            return "plain"
        raise
    return "right"


def run_op(
    name: str,
    samples: int = SAMPLES,
    layouts: int = LAYOUTS,
    dtype_name: str | None = None,
    shape: tuple[int, ...] = (),
    mixed: bool = False,
    check: bool = False,
) -> Outcome:
    """Called on every rank. Raises if a call is neither right nor unsupported.

    mixed: one tensor of another dtype. check: the first choice of layouts of each sample runs in checking mode.
    """
    import numpy
    import shardtensor as st
    import torch
    import torch.distributed as dist
    import torch.utils._pytree as pytree
    from oracle import Joint, checking, mesh_of

    op = database()[name]
    mesh = mesh_of(shape or (dist.get_world_size(),))
    dtypes = op.supported_dtypes("cpu")
    usual = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn)
    wanted = (getattr(torch, dtype_name),) if dtype_name else usual
    dtype = next((d for d in wanted if d in dtypes), None)
    if dtype is None:
        return Outcome(0, 0, [])
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    drawn = _mixed(op) if mixed else list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
    comparable = name not in NOT_COMPARABLE
    if comparable:
        drawn = [s for s in drawn if not s.kwargs.get("dropout_p")]
    forms = [False, True] if op.inplace_variant else [False]
    right, promoted, unsupported = 0, 0, []
    joint = Joint()
    for number, sample in enumerate(_spread(drawn, samples)):
        tensors = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_strided(t)]
        choices = _layouts(tensors, mesh.ndim, layouts, f"{name} {number} {mesh.size()}")
        warm = (False, choices[-1]) if number == 0 and choices else None
        for inplace, choice in [(form, c) for form in forms for c in (choices[: max(layouts // 3, 1)] if form else choices)]:
            what = f"{name}{' in place' * inplace}: sample {number} " + ", ".join(
                f"{tuple(t.shape)} {' '.join(placements)} {cut}" for t, (placements, cut) in zip(tensors, choice, strict=True)
            )
            arguments = op, sample, choice, mesh, comparable, what, inplace, (inplace, choice) == warm, joint
            try:
                with checking(check and (inplace, choice) != warm and choice == choices[0]):
                    kind = _attempt(_try, *arguments)
                    if kind == "plain":
                        with st.implicit_replication():
                            kind = _attempt(_try, *arguments)
                        promoted += kind == "right"
            except Exception as error:
                raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
            right += kind == "right"
            if kind != "right":
                unsupported.append(f"{what}: {kind}")
    joint.compare()
    return Outcome(right, promoted, unsupported)


def _small_dtype(op: Any) -> Any:
    import torch

    return next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in op.supported_dtypes("cpu")), None)


# ---- the layout of gradients ----

FORMS = ("whole", "sliced", "transposed")
FIRST = 12  # samples of an op, of which some are tried


def _largest(samples: list[Any], n: int) -> list[Any]:
    """The n largest of the small samples: in tensors of one element there is nothing to lay out."""
    return sorted((s for s in samples if _elements(s) <= SMALL // 10), key=_elements, reverse=True)[:n]


def _viewed(t: Any, form: str) -> tuple[Any, Callable[[Any], Any]]:
    """A tensor, and how `t` is a view of it: all of it, the first columns of a larger one, or its transpose."""
    import torch

    if form == "sliced" and t.ndim:
        return torch.cat([t, t], -1), lambda x: x.narrow(-1, 0, t.shape[-1])
    if form == "transposed" and t.ndim > 1:
        return t.mT.contiguous(), lambda x: x.mT
    return t, lambda x: x


def _try_gradient(op: Any, sample: Any, form: str, layouts: list[Layout], seeded: Layout, mesh: Any, what: str) -> None:
    import torch
    import torch.utils._pytree as pytree
    from oracle import _seeds, compare, differentiable, place, plain_gradients, whole

    flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, t in enumerate(flat) if _is_strided(t)]
    plain, ours = list(flat), list(flat)
    leaves: list[list[Any]] = [[], []]
    for i, (placements, cut) in zip(where, layouts, strict=True):
        base, view = _viewed(flat[i].detach(), form)
        for side, leaf in ((plain, base.clone()), (ours, place(base, mesh, placements, cut))):
            leaves[side is ours].append(leaf.requires_grad_(flat[i].requires_grad))
            side[i] = view(leaf)
    torch.manual_seed(1)
    try:
        want = sample.output_process_fn_grad(_call(op, tree, plain))
        want_grads = plain_gradients(leaves[0], want)
    except Exception:
        return  # torch itself rejects it
    torch.manual_seed(1)
    got = sample.output_process_fn_grad(_call(op, tree, ours))
    placements, cut = seeded
    seeds = [place(s, mesh, [p if p == "R" or int(p[2:-1]) < s.ndim else "R" for p in placements], cut) for s in _seeds(differentiable(want))]
    wanted = [t for t in leaves[1] if t.requires_grad]
    grads = torch.autograd.grad(differentiable(got), wanted, seeds, allow_unused=True)
    # Whole values, so that all ranks find the same and go on.
    compare(pytree.tree_map(whole, (got, list(grads))), (want, want_grads), _tolerance(flat, want), what)


def _gradient_layouts(tensors: list[Any], result: Any, mesh_ndim: int, seed: str) -> list[tuple[str, list[Layout], Layout]]:
    """Each form of the arguments, each placement of each argument, the others replicated or as drawn, each of the gradient."""
    from oracle import EVEN, choices

    rng = random.Random(seed)
    whole = (("R",) * mesh_ndim, EVEN)
    options = [choices(t, mesh_ndim, False) for t in tensors]
    gradients = choices(result, mesh_ndim, False)
    out = []
    for form, (i, own), seeded in itertools.product(FORMS, enumerate(options), gradients):
        for mine, rest in itertools.product(own, (False, True)):
            if rest and len(options) == 1:
                continue
            layouts = [mine if k == i else rng.choice(o) if rest else whole for k, o in enumerate(options)]
            if (form, layouts, seeded) not in out[-2:]:
                out.append((form, layouts, seeded))
    return out


def run_gradient_layouts(names: list[str], shape: tuple[int, ...], every: int, most: int, samples: int = 2) -> tuple[int, list[str]]:
    """Called on every rank: how many calls with their gradients were right, and what was wrong.

    Of at most `most` calls per sample every `every`-th, at least one; in a run of all tests all of them.
    """
    import shardtensor as st
    import torch
    import torch.utils._pytree as pytree
    from oracle import differentiable, mesh_of, share

    mesh, right, wrong = mesh_of(shape), 0, []
    for name in names:
        op = database()[name]
        if name in NOT_COMPARABLE or not op.supports_autograd or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        random.seed(0)
        drawn = list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), FIRST))
        for number, sample in enumerate(_largest(drawn, samples)):
            flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            tensors = [t for t in flat if _is_strided(t)]
            try:
                results = differentiable(sample.output_process_fn_grad(_call(op, tree, list(flat))))
            except Exception:
                continue
            if not results or sample.kwargs.get("dropout_p"):
                continue
            seed = f"{name} {number} {shape}"
            calls = _gradient_layouts(tensors, max(results, key=lambda t: t.ndim), mesh.ndim, seed)
            calls = random.Random(seed).sample(calls, min(most, len(calls)))
            for form, layouts, seeded in share(calls, every, zlib.crc32(seed.encode()) % min(every, len(calls))):
                what = f"{name}, {form}, sample {number} " + ", ".join(
                    f"{tuple(t.shape)} {' '.join(p)} {cut}" for t, (p, cut) in zip(tensors, layouts, strict=True)
                )
                arguments = op, sample, form, layouts, seeded, mesh, what
                try:
                    kind = _attempt(_try_gradient, *arguments)
                    if kind == "plain":
                        with st.implicit_replication():
                            kind = _attempt(_try_gradient, *arguments)
                    right += kind == "right"
                except Exception as error:
                    wrong.append(f"{what}, gradient {seeded}: {type(error).__name__}: {error}")
    return right, wrong


# ---- the order of results' dims in memory ----

MEMORY = ("given", "transposed", "channels_last", "expanded")


def _remembered(t: Any, memory: str) -> Any:
    """The same values with other strides."""
    import torch

    if memory == "transposed" and t.ndim > 1:
        return t.detach().mT.contiguous().mT.clone()
    if memory == "channels_last" and t.ndim in (4, 5):
        return t.detach().contiguous(memory_format=torch.channels_last if t.ndim == 4 else torch.channels_last_3d)
    if memory == "expanded" and t.ndim > 1 and t.shape[0] > 1:
        return t.detach()[:1].expand(t.shape)
    return t.detach()


def run_orders(name: str, memory: str, samples: int, layouts: int) -> tuple[int, list[str]]:
    """Called on every rank: how many results were compared, and which differ from torch's in order or in being a view."""
    import shardtensor as st
    import torch
    import torch.distributed as dist
    import torch.utils._pytree as pytree
    from oracle import lies_as_the_whole, mesh_of, place

    op, mesh = database()[name], mesh_of((dist.get_world_size(),))
    dtype = _small_dtype(op)
    if dtype is None:
        return 0, []
    torch.manual_seed(0)
    compared, out = 0, []
    for number, sample in enumerate(_spread(list(op.sample_inputs("cpu", dtype)), samples)):
        flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        where = [i for i, t in enumerate(flat) if _is_strided(t)]
        plain = [_remembered(t, memory) if i in where else t for i, t in enumerate(flat)]
        if memory != "given" and all(plain[i].is_contiguous() for i in where):
            continue
        for choice in _layouts([plain[i] for i in where], 1, layouts, f"{name} {number}"):
            ours = list(plain)
            for i, (placements, cut) in zip(where, choice, strict=True):
                t = plain[i]
                if memory == "expanded" and 0 in t.stride():
                    ours[i] = place(t[:1], mesh, ["R" if p in ("S(0)", "P") else p for p in placements], cut).expand(t.shape)
                else:
                    ours[i] = place(t, mesh, placements, cut, _exact_summands)
            what = f"{name}, {memory}, sample {number} " + ", ".join(f"{tuple(plain[i].shape)} {c}" for i, c in zip(where, choice, strict=True))
            torch.manual_seed(1)
            try:
                want = _call(op, tree, plain)
            except Exception:
                continue
            torch.manual_seed(1)
            with st.implicit_replication():
                try:
                    got = _call(op, tree, ours)
                except NotImplementedError:
                    continue
                except Exception as error:
                    out.append(f"{what}: {error}")
                    continue
            for k, (g, w) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)):
                if isinstance(g, st.ShardTensor) and g.shape == w.shape and w.layout == torch.strided:
                    compared += 1
                    dims = [d for d in range(w.ndim) if w.shape[d] > 1]
                    same = [g.stride(d) for d in dims] == [w.stride(d) for d in dims] or w.numel() == 0
                    if not same:
                        out.append(f"{what}: result {k} {tuple(w.shape)} has strides {g.stride()}, torch's {w.stride()}")
                    elif not lies_as_the_whole(g):
                        out.append(f"{what}: result {k} {g.stride()} has a piece {tuple(g._local_tensor.shape)} {g._local_tensor.stride()}")
                    elif g._is_view() != w._is_view():
                        out.append(f"{what}: result {k} is {'a' if g._is_view() else 'no'} view, torch's is otherwise")
    return compared, out


def run_all_orders(names: list[str], memory: str, samples: int, layouts: int) -> list[tuple[str, int, list[str]]]:
    return [(name, *run_orders(name, memory, samples, layouts)) for name in names]


# Rejected because of values that only one rank holds.
BY_VALUE = ("gather", "multinomial", "normal", "scatter_reduce.amax", "scatter_reduce.amin")


def _refusable(op: Any, kind: str) -> list[Any]:
    """Samples that torch may reject.

    kind: "errors" for the database's wrong inputs; "mixed" for samples with one tensor of another dtype; or the name of a dtype
    that the op does not take, for samples of that dtype.
    """
    import torch
    import torch.utils._pytree as pytree

    if kind == "errors":
        return [e.sample_input for e in op.error_inputs("cpu")] if op.error_inputs_func else []
    taken = op.supported_dtypes("cpu")
    usual = next((d for d in (torch.float64, torch.float32, torch.int64, torch.bool) if d in taken), None)
    if usual is None or (kind != "mixed" and getattr(torch, kind) in taken):
        return []

    def changed(sample: Any, dtype: Any, which: slice = slice(None)) -> Any:
        flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        for i in [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.dtype == usual][which]:
            flat[i] = flat[i].detach().to(dtype)
        x, args, kwargs = pytree.tree_unflatten(flat, tree)
        return type(sample)(x, args=args, kwargs=kwargs)

    samples = list(itertools.islice(op.sample_inputs("cpu", usual), SAMPLES))
    if kind != "mixed":
        return [changed(s, getattr(torch, kind)) for s in samples]
    others = [d for d in (torch.float32, torch.int64, torch.bool) if d != usual]
    return [changed(s, d, slice(i, i + 1)) for s in samples for d in others for i in range(3)]


def _mixed(op: Any) -> list[Any]:
    """Samples with several dtypes that torch accepts."""
    import torch
    import torch.utils._pytree as pytree

    def is_taken(sample: Any) -> bool:
        flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        return len({t.dtype for t in flat if isinstance(t, torch.Tensor)}) > 1 and not _refused(op, tree, flat)

    return [s for s in _refusable(op, "mixed") if is_taken(s)]


def run_mixed(names: list[str], samples: int, layouts: int) -> list[Outcome]:
    return [run_op(name, samples, layouts, mixed=True) for name in names]


def run_refusals(names: list[str], layouts: int, kind: str) -> int:
    """Called on every rank: checks that calls that torch rejects raise on all ranks. Returns the number of calls."""
    import shardtensor as st
    import torch
    import torch.distributed as dist
    import torch.utils._pytree as pytree
    from oracle import mesh_of, place

    mesh = mesh_of((dist.get_world_size(),))
    refused = 0
    for name in names:
        op = database()[name]
        tried: list[tuple[Exception | None, str]] = []
        torch.manual_seed(0)
        for number, sample in enumerate(_refusable(op, kind)):
            flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            where = [i for i, t in enumerate(flat) if _is_strided(t) and t.device.type == "cpu" and t.ndim < 16]
            if not where or not _refused(op, tree, flat):
                continue
            for choice in _layouts([flat[i] for i in where], 1, layouts, f"{name} {number}"):
                ours = list(flat)
                for i, (placements, cut) in zip(where, choice, strict=True):
                    ours[i] = place(flat[i].detach(), mesh, placements, cut, _exact_summands)
                with st.implicit_replication():
                    tried.append((_raised(op, tree, ours), f"{name}: sample {number} {choice}"))
        ranks_refusing = torch.tensor([error is not None for error, _ in tried], dtype=torch.int64)
        dist.all_reduce(ranks_refusing)
        for ranks, (error, what) in zip(ranks_refusing.tolist(), tried, strict=True):
            assert ranks in (0, mesh.size()), f"{what}: the ranks disagree, here: {error!r}"
            assert ranks or kind != "errors", f"{what}: not refused"
            refused += bool(ranks)
    return refused


# ---- strict mode ----


def run_strict(names: list[str], samples: int) -> dict[str, tuple[int, int]]:
    """Called on every rank: of samples whose tensors are cut along their first dims, how many are refused in strict mode, forward or
    backward; and how many there are. Raises if a call raises anything else."""
    import shardtensor as st
    import torch
    import torch.distributed as dist
    import torch.utils._pytree as pytree
    from oracle import differentiable, mesh_of

    mesh = mesh_of((dist.get_world_size(),))
    tried: list[str] = []
    refused: list[bool] = []
    for name in names:
        op = database()[name]
        dtype = _small_dtype(op)
        torch.manual_seed(0)
        grad = op.supports_autograd and dtype in (torch.float32, torch.complex64)
        for sample in _spread(list(op.sample_inputs("cpu", dtype, requires_grad=grad)), samples) if dtype else ():
            flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            cuts = {i: [st.Shard(0)] if t.ndim and t.shape[0] > 1 else [st.Replicate()] for i, t in enumerate(flat) if _is_strided(t)}
            if [st.Shard(0)] not in cuts.values() or _refused(op, tree, flat):
                continue
            for i, cut in cuts.items():
                flat[i] = st.distribute_tensor(flat[i].detach(), mesh, cut).requires_grad_(flat[i].requires_grad)
            tried.append(name)
            refused.append(False)
            try:
                with st.implicit_replication(), st.strict_mode():
                    results = differentiable(sample.output_process_fn_grad(_call(op, tree, flat)))
                    if results:
                        torch.autograd.backward(results, [torch.ones_like(t) for t in results])
            except NotImplementedError:
                refused[-1] = True
    ranks = torch.tensor(refused, dtype=torch.int64)
    dist.all_reduce(ranks)
    assert set(ranks.tolist()) <= {0, mesh.size()}, "the ranks disagree"
    out = dict.fromkeys(tried, (0, 0))
    for name, here in zip(tried, refused, strict=True):
        out[name] = out[name][0] + here, out[name][1] + 1
    return out


def main() -> None:
    import argparse
    import time
    from collections import Counter

    from pool import Pool, RankError, parse_mesh

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=parse_mesh, default="3", help="its shape, such as 2x2")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--layouts", type=int, default=LAYOUTS)
    parser.add_argument("--dtype")
    parser.add_argument("--times", action="store_true", help="say how long each op took")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    shape = options.mesh
    pool = Pool(math.prod(shape))
    counts: Counter[str] = Counter()
    for name in options.names or list(database()):
        start = time.monotonic()
        try:
            answers = pool.run("opinfo:run_op", name, options.samples, options.layouts, options.dtype, shape, seconds=300)
            right, promoted, unsupported = answers[0]
            kind = "unsupported" if unsupported else "plain inside" if promoted else "right" if right else "not run"
            if any(len(a.unsupported) != len(unsupported) for a in answers):
                kind = "out of step"
            text = unsupported[0] if unsupported else ""
        except RankError as error:
            rank_zero = str(error).split("--- rank 1 ---")[0]
            kind = "wrong" if "Tensor-likes are not close" in rank_zero else "error"
            text = "".join(line + " " for line in rank_zero.splitlines() if not line.startswith((" ", "Traceback", "---")))[-1200:]
            if str(error).count("--- rank") != math.prod(shape) or "no answer" in str(error):
                kind, text = "out of step", str(error)[-3000:]
        counts[kind] += 1
        took = f" ({time.monotonic() - start:.1f} s)" if options.times else ""
        if kind != "right" or options.times:
            print(f"{kind:12s} {name}{took}: {' '.join(text.split())[:1200]}", flush=True)
    print(dict(counts))
    pool.stop()


if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/", 1)[0])
    main()
