"""torch.compile's protocol for ShardTensors: how to flatten and unflatten them, what to guard, which tangents are allowed.

A graph holds the pieces. A ShardTensor that stands for a tensor of a graph carries Python's dispatch key. Its ops go to
__torch_dispatch__ and then to the same C++ handler, where collectives become nodes of the graph (csrc/comm/traced.h).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._guards import CompileContext, Guard, TracingContext
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

import shardtensor._C as _C
from shardtensor._late import at_first_use, when_imported
from shardtensor.tensor import _handlers
from shardtensor.tensor._layout import make_layout, placements_of
from shardtensor.tensor._mesh import as_device_mesh, innermost_mesh

# The inner tensor of a view with symbols that its sizes and strides do not show: its storage offset, and pieces that depend on
# more than the length that they cut. They are the sizes of this tensor, which has no elements: (0, offset, *pieces).
EXTENTS = "_extents"

Cuts = Sequence[Sequence[int] | None]
_Tuples = tuple[tuple[int, ...] | None, ...]


def _tuples(cuts: Cuts) -> _Tuples:
    return tuple(None if cut is None else tuple(cut) for cut in cuts)


class ShardOrder(tuple):  # type: ignore[type-arg]
    """A spec's shard_order with torch's entries, plus facts that torch does not know: every rank's cuts, the storage offset, and
    the mesh dims whose summands are picked (docs/design.md). If EXTENTS has them, a cut is () and the offset is None.

    torch.compile stores it, compares it, writes it to its caches, and passes it back when it unflattens a tensor.
    """

    offset: int | None
    picked: tuple[int, ...]
    _cuts: _Tuples | _C.Layout

    def __new__(cls, entries: Sequence[Any], cuts: Cuts | _C.Layout, offset: int | None = 0, picked: Sequence[int] = ()) -> ShardOrder:
        self = super().__new__(cls, entries)
        self.picked = tuple(cuts.picked if isinstance(cuts, _C.Layout) else picked)
        self._cuts = cuts if isinstance(cuts, _C.Layout) else _tuples(cuts)
        self.offset = offset
        return self

    @property
    def cuts(self) -> _Tuples:
        """Read late: torch flattens tensors that it never unflattens, and a view's cuts may be symbols, which become numbers here."""
        if isinstance(self._cuts, _C.Layout):
            self._cuts = _tuples(self._cuts.cuts)
        return self._cuts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardOrder) and self._all == other._all

    def __ne__(self, other: object) -> bool:
        return not self == other

    @property
    def _all(self) -> tuple[Any, ...]:
        return tuple(self), self.cuts, self.offset, self.picked

    def __hash__(self) -> int:
        return hash(self._all)

    def __reduce__(self) -> Any:
        return ShardOrder, self._all

    def __deepcopy__(self, memo: Any) -> ShardOrder:
        return self

    def __repr__(self) -> str:
        return f"ShardOrder({tuple(self)!r}, cuts={self.cuts!r}, offset={self.offset!r}, picked={self.picked!r})"


_orders: dict[tuple[int, int | None], ShardOrder] = {}  # by layout and offset
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])


def flatten(t: Any) -> tuple[list[str], Any]:
    if _TORCH < (2, 12) and TracingContext.try_get() is not None:
        raise NotImplementedError(
            f"shardtensor: torch {torch.__version__} cannot compile functions of ShardTensors; 2.12 and newer can. Keep them out of the "
            "compiled function, or mark their function with torch.compiler.disable"
        )
    guard_graph()
    layout, offset, extents = t._layout, offset_of(t), _has_extents(t)
    order = _orders.get((layout.id, offset))
    if order is None:
        order = cast(ShardOrder, t._spec.shard_order)
        if not layout.has_symbols:
            order = _orders[layout.id, offset] = ShardOrder(order, order.cuts, offset, order.picked)  # which keeps no layout
        elif extents:
            order = ShardOrder(order, [() if _is_of_symbols(cut) else cut for cut in layout.traced_cuts], offset, order.picked)
    meta = TensorMeta(t.shape, t.stride(), t.dtype)
    return ["_local_tensor", "device_mesh", *[EXTENTS] * extents], (placements_of(layout), meta, order, t.requires_grad)


def offset_of(t: torch.Tensor) -> int | None:
    """The storage offset; None if EXTENTS has it. Another symbol is guarded to be a number."""
    return None if _has_extents(t) and _is_symbol(t.storage_offset()) else int(t.storage_offset())


def _is_symbol(n: Any) -> bool:
    return isinstance(n, torch.SymInt) and n.node.maybe_as_int() is None


def _is_of_symbols(cut: Any) -> bool:
    return bool(cut) and isinstance(cut[0], tuple) and len(cut[0]) == 1


def _has_extents(t: torch.Tensor) -> bool:
    return EXTENTS in t.__dict__


def keep_extents(t: torch.Tensor) -> None:
    """Makes EXTENTS of a tensor of a graph that needs one."""
    layout, offset = _C.layout(t), t.storage_offset()
    t.__dict__.pop(EXTENTS, None)  # an in-place view may have had another
    if layout.has_symbols or _is_symbol(offset):
        pieces = [n for cut in layout.traced_cuts if _is_of_symbols(cut) for (n,) in cut]
        t.__dict__[EXTENTS] = _C.local(t).new_empty((0, offset, *pieces))


def unflatten(inner: dict[str, Any], context: Any, sizes: Any, strides: Any) -> torch.Tensor:
    placements, _meta, order, requires_grad = context
    mesh, offset = inner["device_mesh"], order.offset
    extents = inner.get(EXTENTS)
    if extents is None:
        layout = _layout_of(mesh, placements, sizes, order)
    else:
        _, there, *pieces = extents.shape
        offset = there if offset is None else offset
        cuts = [_taken(pieces, n) if cut == () else cut for cut, n in zip(order.cuts, mesh.shape, strict=True)]
        layout = _settled(_made(mesh, placements, len(sizes), cuts, order), sizes)
    out = _C.wrap(inner["_local_tensor"], layout, sizes, strides, offset)
    if layout.has_symbols or _is_symbol(offset):
        out.__dict__[EXTENTS] = extents
    return out.requires_grad_(requires_grad)


def _taken(pieces: list[Any], n: int) -> list[Any]:
    """The first n pieces, which leave the list."""
    taken, pieces[:] = pieces[:n], pieces[n:]
    return [(piece,) for piece in taken] if any(_is_symbol(piece) for piece in taken) else [int(piece) for piece in taken]


def _layout_of(mesh: Any, placements: tuple[Placement, ...], sizes: Any, order: ShardOrder) -> _C.Layout:
    known = order.__dict__.get("_layout")  # for the mesh and placements of the last call
    if known is not None and known[0] is mesh and known[1] == placements:
        layout = known[2]
    else:
        cuts = order.cuts if any(order.cuts) else ()
        layout = _made(mesh, placements, len(sizes), cuts, order)
        order.__dict__["_layout"] = mesh, placements, layout
    return _settled(layout, sizes)


def _made(mesh: Any, placements: tuple[Placement, ...], ndim: int, cuts: Any, order: ShardOrder) -> _C.Layout:
    layout = make_layout(mesh, placements, ndim, cuts, who="ShardTensor.__tensor_unflatten__")
    return layout.picking(order.picked) if order.picked else layout


def _settled(layout: _C.Layout, sizes: Any) -> _C.Layout:
    if layout.follows_sizes and not any(isinstance(n, torch.SymInt) for n in sizes):
        return layout.settled(sizes)
    return layout


def shares_of(pieces: list[Any], size: torch.SymInt) -> tuple[list[int], list[int], int, list[int], list[list[int]]] | None:
    """How pieces follow from the size that they cut: (sizes, shares, per, times, quotients), as PieceSizes has them. None if they
    do not."""
    import sympy  # type: ignore[import-untyped]  # noqa: PLC0415  slow
    from torch.utils._sympy.functions import FloorDiv  # noqa: PLC0415  slow: sympy

    def expressions(all_numbers: bool) -> list[Any]:
        given = [n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (size, *pieces)]
        return [_without_floors(n, size.node.shape_env, all_numbers).expand() for n in given]

    whole, *parts = expressions(all_numbers=False)
    floors = [floor for part in parts for floor in part.atoms(FloorDiv)]
    if whole.has(FloorDiv) or any(floor.args[0].has(FloorDiv) for floor in floors):
        whole, *parts = expressions(all_numbers=True)
        floors = []
    if whole.is_number:
        return None
    leading, factor = _leading(whole)

    def times(n: Any, term: Any) -> Any:
        return n.as_coefficients_dict().get(term, sympy.Integer(0))

    def of_whole(n: Any) -> tuple[Any, Any]:
        """The share of the size, and what is left."""
        share = times(n, leading) / factor
        return share, (n - share * whole).expand()

    quotients = {floor: [*of_whole(floor.args[0].expand()), floor.args[1]] for floor in floors}
    floors = sorted(quotients, key=lambda floor: str(quotients[floor]))  # the same for equal cuts
    rest = [of_whole(part - sum(times(part, floor) * floor for floor in floors)) for part in parts]
    each = [times(part, floor) for part in parts for floor in floors]
    if not all(n.is_Rational for n in itertools.chain(*rest, *quotients.values())) or not all(n.is_Integer for n in each):
        return None
    shares_and_sizes, per = _integers([n for both in rest for n in both])
    return shares_and_sizes[1::2], shares_and_sizes[::2], per, [int(n) for n in each], [_integers(quotients[floor])[0] for floor in floors]


def _integers(numbers: list[Any]) -> tuple[list[int], int]:
    """The rational numbers times the second result."""
    per = math.lcm(*(int(n.q) for n in numbers))
    return [int(n * per) for n in numbers], per


def _without_floors(expression: Any, env: Any, all_numbers: bool) -> Any:
    """Divisions without a remainder become fractions. With `all_numbers` the others do too: their remainders become numbers of the
    graph. Without an environment the expression stays as it is."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415  slow: sympy
    from torch.utils._sympy.functions import FloorDiv  # noqa: PLC0415  slow: sympy

    def exact(n: Any) -> Any:
        if not n.has(FloorDiv):
            return n
        if not isinstance(n, FloorDiv):
            return n.func(*map(exact, n.args))
        numerator, divisor = n.args
        known = divisor.is_Integer and statically_known_true(env.create_symintnode(numerator, hint=None) % int(divisor) == 0)
        if known or (divisor.is_Integer and all_numbers):
            return (exact(numerator) - env.evaluate_expr(numerator % divisor)) / divisor
        return n

    return exact(expression) if env else expression


def _leading(expression: Any) -> tuple[Any, Any]:
    """A term that is not a number, without its factor; and the factor."""
    terms = [(term, n) for term, n in expression.as_coefficients_dict().items() if not term.is_number]
    return max(terms, key=lambda t: str(t[0]))


def tangent(t: Any) -> Any:
    """The tangent in the form that the graph expects: whole instead of in summands, and no view."""
    if t._layout.has_partial:
        return t.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in t.placements])
    return t.clone() if _has_extents(t) else t


def tangent_like(t: Any, context: Any, expected_type: Any) -> Any:
    """Converts a tangent whose layout differs from the one that the graph was traced for. Of an argument that the graph writes, torch
    takes it to be a plain tensor: zeros, unless something reads the argument after the graph."""
    if expected_type is not None:
        return t.full_tensor() if expected_type is torch.Tensor else None
    placements, _meta, order, _requires_grad = context
    layout = _layout_of(as_device_mesh(t._layout.mesh), placements, t.shape, order)
    return _C.redistribute(t, layout)


# ---- sizes that only the backward needs as numbers ----

_in_numbers: Any = None  # dynamo's id of the compilation


def numbers_from_now_on() -> bool:
    """Makes dynamo's present compilation trace with numbers once it starts again; false if it did so already."""
    global _in_numbers
    compilation = CompileContext.current_compile_id()
    if compilation is None or compilation == _in_numbers:
        return False
    _in_numbers = compilation
    return True


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Makes all sizes numbers, if the compilation started again for that."""
    global _in_numbers
    context = CompileContext.try_get()
    if context is None or context.compile_id != _in_numbers:
        return
    if context.attempt == 0:  # torch gives ids again after a reset
        _in_numbers = None
        return
    for t in tensors:
        for n in t.shape:
            if not isinstance(n, torch.SymInt) or n.node.hint is not None:
                int(n)  # guards


# ---- guards ----

# Reasons why no graph may be traced or run now.
graphs_refused: list[str] = []


def guard_graph() -> None:
    """While dynamo traces, adds our guards: torch itself guards neither a DTensor's sizes nor our modes."""
    context = TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource  # noqa: PLC0415  slow: dynamo

    if not is_of_ours():
        context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), _add_guards), collect_debug_stack=False)
        if graphs_refused:
            _refuse("shardtensor refuses graphs here", graphs_refused[-1], "Do not compile such modules.")
        _refuse_lasting_modes()


def is_tracing() -> bool:
    return TracingContext.try_get() is not None


def is_of_ours() -> bool:
    """Whether the graph that is being traced has seen ShardTensors."""
    context = TracingContext.try_get()
    if context is None:
        return False
    from torch._dynamo.source import GlobalStateSource  # noqa: PLC0415  slow: dynamo

    guards = context.guards_context.dynamo_guards.get_guards_for_source(GlobalStateSource())
    return any(guard.create_fn is _add_guards for guard in guards)


def may_be_of_ours() -> bool:
    """The same; also True outside dynamo, where it cannot be known."""
    return TracingContext.try_get() is None or is_of_ours()


def _state_of_modes() -> tuple[int, int, int | None, bool]:
    """All state that changes what ops do: promotion, strict mode, plain targets, users' handlers; the current mesh, which
    functions without a mesh argument use; and whether graphs may run."""
    mesh = innermost_mesh()
    return _C.state_of_modes(), _handlers.version(), None if mesh is None else mesh.id, bool(graphs_refused)


def _add_guards(builder: Any, guard: Guard) -> None:
    from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts  # noqa: PLC0415  slow: dynamo

    made_with = _state_of_modes()  # at the function's entry: modes that tracing set have been undone
    _lambda_guard(
        builder.guard_manager.root,
        lambda _: _state_of_modes() == made_with,
        get_verbose_code_parts(f"shardtensor's modes == {made_with}", guard),
        guard,
    )
    for source in builder.check_fn_manager.output_graph.input_source_to_sizes_strides:
        value = builder.get(source)
        if _C.is_shard_tensor(value):
            # Global sizes and strides that are numbers in the graph.
            GuardBuilder.TENSOR_MATCH(builder, source.make_guard(GuardBuilder.TENSOR_MATCH), value)


def _lambda_guard(manager: Any, check: Callable[[Any], bool], text: list[str], guard: Guard) -> None:
    try:
        manager.add_lambda_guard(check, text, guard.user_stack)
    except TypeError:  # older torch has no such argument
        manager.add_lambda_guard(check, text)


# ---- modes ----


def _output_graph() -> Any:
    """The graph that dynamo, or the backend that dynamo has called, is tracing on this thread."""
    if TracingContext.try_get() is None:
        return None
    from torch._dynamo.symbolic_convert import tls  # noqa: PLC0415  slow: dynamo

    translator = getattr(tls, "current_tx", None)
    return translator and translator.output


def after_tracing(undo: Callable[[], None]) -> None:
    """While a graph is traced: calls `undo` when tracing ends, also after an exception, the last one first."""
    graph = _output_graph()
    if graph is not None:
        graph.add_cleanup_hook(undo)


def _refuse_lasting_modes() -> None:
    """Raises if a graph leaves a mode set: it would be set when the graph is traced, not when it runs."""
    graph, entered_with = _output_graph(), _state_of_modes()

    def check(_: torch.fx.GraphModule) -> None:
        if _state_of_modes() != entered_with:
            _refuse(
                "shardtensor's modes differ at the end of a graph",
                "A compiled function cannot set a mode of shardtensor (set_promotion_mode, set_strict) for good.",
                "Use a context manager (promotion_mode, strict_mode), or set the mode outside of the function.",
            )

    if graph is not None:
        graph.add_graph_finalizer(check)


def _refuse(what: str, why: str, way_out: str) -> None:
    """With fullgraph=True, dynamo raises this; otherwise it runs the function in eager mode."""
    from torch._dynamo.exc import unimplemented  # noqa: PLC0415  slow: dynamo

    unimplemented(gb_type=what, context="", explanation=why, hints=[way_out])


# ---- AOTAutograd's cache of graphs, which ranks may share ----


def stable_hash(t: Any) -> str:
    """Part of a graph's cache key: this rank's sizes, its place in the mesh, and the names of process groups."""
    local = t._local_tensor
    parts = code(), text_of(t._layout.mesh), flatten(t)[1], local.shape, local.stride(), local.device
    return hash_of(repr(parts).encode())


def text_of(mesh: _C.Mesh) -> str:
    return repr((mesh.device_type, mesh.shape, mesh.ranks, mesh.dim_names, mesh.groups, mesh.world, mesh.rank))


@functools.cache
def code() -> str:
    """A hash of this package and the extension, byte for byte: a graph of one version must not serve another."""
    files = [Path(_C.__file__), *sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hash_of(b"".join(file.read_bytes() for file in files))


def hash_of(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


# ---- functions ----

functions_in_graphs: set[Callable[..., Any]] = set()


def in_graph(*functions: Callable[..., Any]) -> None:
    """Dynamo puts calls of these functions into its graph without tracing into them: they read objects that dynamo cannot trace
    (meshes, layouts). What they do to pieces is traced later, by the backend."""
    functions_in_graphs.update(functions)

    def allow(decorators: Any) -> None:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # noqa: PLC0415  comes with dynamo

        # If a graph is split at a call, Python runs the call: torch 2.12 raises on the meshes inside instead of splitting
        # again.
        as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for function in functions:
            decorators.allow_in_graph(function)
            set_code_exec_strategy(function.__code__, as_it_is)

    when_imported("torch._dynamo.decorators", allow)


def constant_in_graph(function: Callable[..., Any]) -> None:
    """Dynamo calls the function while it traces, and treats the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_graphs(reason: str, *functions: Callable[..., Any]) -> None:
    """Dynamo does not trace these functions: it splits the graph there or, with fullgraph=True, raises with the reason."""
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]

    def skip(eval_frame: Any) -> None:  # also for calls from a frame that dynamo does not trace
        for function in functions:
            eval_frame.skip_code(function.__code__)

    when_imported("torch._dynamo.eval_frame", skip)


def _fake_key(like: torch.Tensor, after: torch.Tensor | None, groups: Sequence[str]) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)  # on the CPU


# torch looks through all modules for the one that calls this, which takes longer than the rest of this file.
at_first_use(lambda: torch.library.register_fake("shardtensor::next_key", _fake_key))
