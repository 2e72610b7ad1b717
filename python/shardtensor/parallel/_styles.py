"""The parallel styles: how to place a module's parameters, inputs and outputs on a 1-d mesh.

Two arguments are not in torch: `multiple_of` shares out features in whole units (attention heads), as evenly as possible, and
`sharding_shapes` gives the sizes of plain inputs that are pieces, as in ShardTensor.from_local.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

import shardtensor._C as _C
from shardtensor.parallel._entered import Entrance, can_share, enter_in_graph
from shardtensor.tensor import _compile
from shardtensor.tensor._factories import distribute_module, distribute_tensor
from shardtensor.tensor._from_local import Shapes
from shardtensor.tensor._layout import make_layout, moved_layout
from shardtensor.tensor._tensor import ShardTensor, refuse_transformed

Layouts = Placement | tuple[Placement | None, ...]

# By module class, which dim of each parameter is cut; a parameter that is not named is replicated.
Cuts = dict[type[nn.Module], dict[str, int]]
_COLUMNS: Cuts = {nn.Linear: {"weight": 0, "bias": 0}, nn.Embedding: {"weight": 1}}
_ROWS: Cuts = {nn.Linear: {"weight": 1}, nn.Embedding: {"weight": 0}}


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Hugging Face's linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _cuts_of(module: nn.Module, table: Cuts) -> dict[str, int] | None:
    cuts = next((dims for cls, dims in table.items() if isinstance(module, cls)), None)
    if cuts is None and is_conv1d(module):
        cuts = {key: 1 - dim if key == "weight" else dim for key, dim in table[nn.Linear].items()}
    return cuts


# The style of each linear layer and embedding.
_styles: weakref.WeakKeyDictionary[nn.Module, ParallelStyle] = weakref.WeakKeyDictionary()


def note_style(module: nn.Module, style: ParallelStyle) -> None:
    _styles[module] = style


def style_of(module: nn.Module) -> ParallelStyle | None:
    """The style that cut this module's features."""
    return _styles.get(module)


def _describe(style: ParallelStyle, *names: str) -> str:
    return f"{type(style).__name__}({', '.join(f'{n}={getattr(style, n)}' for n in names)})"


def _tuple(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _enter(value: Any, mesh: DeviceMesh, layout: Placement, shapes: Shapes, who: str) -> ShardTensor:
    """A plain tensor becomes this rank's piece under `layout`; a distributed tensor keeps its layout."""
    if isinstance(value, ShardTensor):
        return value
    if isinstance(value, DTensor):
        return ShardTensor.from_dtensor(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{who}: expected a torch.Tensor to become {layout}, got {type(value).__name__} ({value!r:.80})")
    if isinstance(layout, Replicate) and shapes is None:
        if torch.compiler.is_compiling():
            return enter_in_graph(value, mesh)
        if can_share(value):
            return Entrance(mesh).enter(value)
    return ShardTensor.from_local(value, mesh, (layout,), run_check=False, sharding_shapes=shapes)


class _Target:
    """A placement that a style moves tensors to. A step of a model calls each style a few times, with the processor's caches
    full of other code: there, a Python function that is not called saves microseconds."""

    __slots__ = ("known", "placements")

    def __init__(self, placement: Placement | None):
        self.placements = None if placement is None else (placement,)
        # By a tensor's layout and number of dims: the layout to move it to, None if it is there.
        self.known: dict[tuple[_C.Layout, int], _C.Layout | None] = {}

    def move(self, value: ShardTensor, local: bool = False) -> torch.Tensor:
        """The value there, or this rank's piece of it. A value that is there already stays as it is: then the gradients of all its
        users are added up before any of them moves."""
        if type(value) is not ShardTensor or torch.compiler.is_compiling() or _C.is_traced(value):
            moved = _moved(value, self.placements)
            return moved.to_local() if local else moved
        if self.placements is not None:
            layout = _C.layout(value)
            try:
                wanted = self.known[layout, value.ndim]
            except KeyError:
                there = moved_layout(layout, self.placements, value.ndim, who="a parallel style")
                wanted = self.known[layout, value.ndim] = None if there == layout else there
            if wanted is not None:
                value = _C.redistribute(value, wanted, None, None, True)
        return _C.to_local(value) if local else value


def _moved(value: ShardTensor, placements: tuple[Placement, ...] | None) -> ShardTensor:
    if placements is None:
        return value
    if type(value) is ShardTensor and moved_layout(value._layout, placements, value.ndim, who="a parallel style") == value._layout:
        return value
    if not isinstance(value, DTensor):
        refuse_transformed(value, "a parallel style")
    return value.redistribute(placements=placements, async_op=True)


_compile.in_graph(_moved)


class _Features(ParallelStyle):
    """nn.Linear, nn.Embedding and Hugging Face's Conv1D with their features cut over the ranks."""

    cut_dims: Cuts
    usual_input: Placement
    usual_output: Placement
    pieces: list[int] | None = None  # each rank's features, if another layer's tell them

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        multiple_of: int = 1,
        sharding_shapes: Shapes = None,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or self.usual_input,)
        self.output_layouts = (output_layouts or self.usual_output,)
        self.use_local_output = use_local_output
        self.multiple_of = multiple_of
        self.sharding_shapes = sharding_shapes

    def __repr__(self) -> str:
        return _describe(self, "input_layouts", "output_layouts", "use_local_output")

    def _preparation(self, mesh: DeviceMesh) -> Callable[[nn.Module, Any], torch.Tensor]:
        """The function that turns the module's first argument into the layer's input."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cuts = _cuts_of(module, self.cut_dims)
        if cuts is None:
            raise NotImplementedError(
                f"{type(self).__name__}: nn.Linear, nn.Embedding and Conv1D can be cut along their features, {type(module).__name__} cannot; "
                "give its submodules a style each, or shard its parameters with distribute_module"
            )
        note_style(module, self)

        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(submodule.named_parameters(recurse=False)):
                submodule.register_parameter(key, self._distributed(parameter, cuts.get(key), mesh))

        prepare, target, local = self._preparation(device_mesh), _Target(self.output_layouts[0]), self.use_local_output
        distribute_module(module, device_mesh, partition)
        module.register_forward_pre_hook(lambda m, inputs: (prepare(m, inputs[0]), *inputs[1:]))
        module.register_forward_hook(lambda m, inputs, output: target.move(output, local))
        return module

    def _distributed(self, parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
        placement: Placement = Replicate() if dim is None else Shard(dim)
        sizes = None if dim is None else self._sizes(parameter.shape[dim], mesh)
        shapes = None if sizes is None else {0: sizes}
        spread = distribute_tensor(
            parameter.detach(), mesh, (placement,), src_data_rank=self.src_data_rank, sharding_shapes=shapes
        )
        return nn.Parameter(spread, parameter.requires_grad)

    def _sizes(self, features: int, mesh: DeviceMesh) -> list[int] | None:
        """Each rank's features, unless they are cut as torch.chunk does."""
        if self.pieces is not None or self.multiple_of == 1:
            return self.pieces
        if features % self.multiple_of:
            raise ValueError(
                f"{type(self).__name__}: argument 'multiple_of' is {self.multiple_of}, which does not divide the {features} features "
                f"(rank {mesh.get_rank()})"
            )
        return [n * self.multiple_of for n in shared_out(features // self.multiple_of, mesh.size())]


def shared_out(units: int, ranks: int) -> list[int]:
    """Each rank's number of units. They differ by one at most, so a rank has none only if there are fewer units than ranks."""
    return [units // ranks + (rank < units % ranks) for rank in range(ranks)]


class ColwiseParallel(_Features):
    """Each rank holds some of the output features: a Linear's rows of weight and bias, an Embedding's columns."""

    cut_dims = _COLUMNS
    usual_input = Replicate()
    usual_output = Shard(-1)

    def _preparation(self, mesh: DeviceMesh) -> Callable[[nn.Module, Any], torch.Tensor]:
        layout, shapes, target = self.input_layouts[0], self.sharding_shapes, _Target(Replicate())
        entrance = Entrance(mesh) if isinstance(layout, Replicate) and shapes is None else None

        def prepare(module: nn.Module, value: Any) -> torch.Tensor:
            if entrance is not None and type(value) is torch.Tensor and isinstance(module, nn.Linear):
                _check_features(module, value)
            if entrance is not None and can_share(value):
                return entrance.enter(value)
            return target.move(_enter(value, mesh, layout, shapes, "ColwiseParallel"))

        return prepare


def _check_features(module: nn.Linear, value: torch.Tensor) -> None:
    if value.ndim and value.shape[-1] != module.in_features:
        raise ValueError(
            f"ColwiseParallel: the input has {value.shape[-1]} features on rank {dist.get_rank()}, but the Linear takes "
            f"{module.in_features}. If this is one rank's part, the output of another ColwiseParallel: make this module a RowwiseParallel, or "
            "give it input_layouts=Shard(-1), which gathers the parts"
        )


class RowwiseParallel(_Features):
    """Each rank holds some of the input features: a Linear's columns of weight, an Embedding's rows. The results are summed."""

    cut_dims = _ROWS
    usual_input = Shard(-1)
    usual_output = Replicate()

    def _preparation(self, mesh: DeviceMesh) -> Callable[[nn.Module, Any], torch.Tensor]:
        layout, shapes = self.input_layouts[0], self.sharding_shapes
        whole, cut = _Target(Replicate()), _Target(Shard(-1))
        like_weight = _LikeWeight(mesh) if shapes is None and layout == Shard(-1) else None

        def prepare(module: nn.Module, value: Any) -> torch.Tensor:
            if isinstance(module, nn.Embedding):
                return whole.move(_enter(value, mesh, layout, shapes, "RowwiseParallel"))
            weight = module.weight
            if like_weight is not None and type(value) is torch.Tensor and isinstance(weight, ShardTensor):
                return like_weight.enter(value, weight, 1 if isinstance(module, nn.Linear) else 0)  # else Conv1D
            x = _enter(value, mesh, layout, shapes, "RowwiseParallel")
            # linear cuts a whole input like the weight, whose cut may differ from torch.chunk's.
            return x if x.placements == (Replicate(),) else cut.move(x)

        return prepare


class _LikeWeight:
    """Lets plain tensors enter whose last dim is cut like a weight's input features, which are its dim `dim`."""

    __slots__ = ("known", "mesh")

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        # By the weight's layout, dim and features, and the input's number of dims: the input's layout, the features that this rank
        # has, and whether all ranks have as many.
        self.known: dict[tuple[_C.Layout, int, int, int], tuple[_C.Layout, int, bool]] = {}

    def enter(self, value: torch.Tensor, weight: ShardTensor, dim: int) -> ShardTensor:
        if torch.compiler.is_compiling():
            return _enter_like_weight(value, weight, dim, self.mesh)
        features = weight.shape[dim]
        key = _C.layout(weight), dim, features, value.ndim
        layout, mine, even = self.known.get(key) or self._find(key)
        if value.shape[-1] != mine or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return _enter_like_weight(value, weight, dim, self.mesh)  # it raises, except on a rank outside the mesh
        return _C.from_local(value, layout, None if even else [*value.shape[:-1], features])

    def _find(self, key: tuple[_C.Layout, int, int, int]) -> tuple[_C.Layout, int, bool]:
        layout, dim, features, ndim = key
        pieces, mesh = pieces_of_features(layout, dim, features), layout.mesh
        even = len(set(pieces)) == 1
        entered = make_layout(self.mesh, (Shard(-1),), ndim, () if even else (pieces,), who="RowwiseParallel")
        known = self.known[key] = entered, pieces[mesh.coordinate[0]] if mesh.has_this_rank else -1, even
        return known


@lru_cache(maxsize=4096)
def pieces_of_features(layout: _C.Layout, dim: int, features: int) -> tuple[int, ...]:
    """Each rank's, of a matrix that has them along `dim`, on a 1-d mesh."""
    return tuple(layout.local_sizes([features, features], [rank])[dim] for rank in range(layout.mesh.shape[0]))


def _enter_like_weight(value: torch.Tensor, weight: ShardTensor, dim: int, mesh: DeviceMesh) -> ShardTensor:
    pieces = pieces_of_features(weight._layout, dim, weight.shape[dim])
    shapes: Shapes = {0: pieces} if len(set(pieces)) > 1 else None
    return _enter(value, mesh, Shard(-1), shapes, "RowwiseParallel")


_compile.in_graph(_enter_like_weight)


class SequenceParallel(ParallelStyle):
    """Norms and dropout on pieces of the sequence; the parameters are replicated as they are."""

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False, sharding_shapes: Shapes = None):
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output
        self.sharding_shapes = sharding_shapes

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(submodule.named_parameters(recurse=False)):
                whole = ShardTensor.from_local(parameter.detach(), mesh, (Replicate(),), run_check=False)
                submodule.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))

        (sharding,) = self.sequence_sharding
        shapes, target, local, stay = self.sharding_shapes, _Target(sharding), self.use_local_output, _Target(None)
        distribute_module(module, device_mesh, replicate)
        module.register_forward_pre_hook(
            lambda m, inputs: (target.move(_enter(inputs[0], device_mesh, sharding, shapes, "SequenceParallel")), *inputs[1:])
        )
        module.register_forward_hook(lambda m, inputs, output: stay.move(output, local))
        return module


class PrepareModuleInput(ParallelStyle):
    """Turns a module's inputs into ShardTensors of `input_layouts` and moves them to `desired_input_layouts`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        sharding_shapes: Shapes = None,
    ):
        self.input_layouts = _tuple(input_layouts)
        self.desired_input_layouts = _tuple(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        self.sharding_shapes = sharding_shapes
        _same_length("input_layouts", self.input_layouts, "desired_input_layouts", self.desired_input_layouts)
        if input_kwarg_layouts is not None:
            _same_length(
                "input_kwarg_layouts", self.input_kwarg_layouts, "desired_input_kwarg_layouts", self.desired_input_kwarg_layouts
            )

    def __repr__(self) -> str:
        return _describe(
            self,
            "input_layouts",
            "desired_input_layouts",
            "input_kwarg_layouts",
            "desired_input_kwarg_layouts",
            "use_local_output",
        )

    def _one(self, value: Any, mesh: DeviceMesh, layout: Placement | None, target: _Target) -> Any:
        if layout is None:
            return value
        return target.move(_enter(value, mesh, layout, self.sharding_shapes, "PrepareModuleInput"), self.use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        targets = [_Target(want) for want in self.desired_input_layouts or ()]
        by_key = {key: _Target(want) for key, want in self.desired_input_kwarg_layouts.items()}
        nowhere = _Target(None)

        def prepare(m: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.input_layouts is not None and self.desired_input_layouts is not None:
                _check_count("inputs", inputs, "input_layouts", self.input_layouts, module)
                wanted = zip(inputs, self.input_layouts, targets, strict=True)
                inputs = tuple(self._one(value, device_mesh, layout, target) for value, layout, target in wanted)
            if self.input_kwarg_layouts:
                have = self.input_kwarg_layouts
                kwargs = {k: self._one(v, device_mesh, have.get(k), by_key.get(k, nowhere)) for k, v in kwargs.items()}
            return inputs, kwargs

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Turns a module's outputs into ShardTensors of `output_layouts` and moves them to `desired_output_layouts`."""

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
        sharding_shapes: Shapes = None,
    ):
        self.output_layouts = _tuple(output_layouts)
        self.desired_output_layouts = _tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        self.sharding_shapes = sharding_shapes
        _same_length("output_layouts", self.output_layouts, "desired_output_layouts", self.desired_output_layouts)

    def __repr__(self) -> str:
        return _describe(self, "output_layouts", "desired_output_layouts", "use_local_output")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        targets = [_Target(want) for want in self.desired_output_layouts or ()]

        def finish(m: nn.Module, inputs: Any, outputs: Any) -> Any:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            assert self.output_layouts is not None and self.desired_output_layouts is not None
            _check_count("outputs", values, "output_layouts", self.output_layouts, module)
            out = []
            for value, layout, target in zip(values, self.output_layouts, targets, strict=True):
                if layout is not None:
                    entered = _enter(value, device_mesh, layout, self.sharding_shapes, "PrepareModuleOutput")
                    value = target.move(entered, self.use_local_output)
                out.append(value)
            return out[0] if len(out) == 1 else tuple(out)

        module.register_forward_hook(finish)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ):
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts, use_local_output=use_local_output
        )

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)


def _same_length(name: str, a: Any, other: str, b: Any) -> None:
    if a is not None and (b is None or len(a) != len(b)):
        raise AssertionError(f"{name} and {other} should have same length! Got {a} and {b}")


def _check_count(what: str, values: tuple[Any, ...], name: str, layouts: tuple[Any, ...], module: nn.Module) -> None:
    if len(values) != len(layouts):
        raise ValueError(
            f"module {what} and {name} should have same length! {type(module).__name__} has {len(values)}, {name} {len(layouts)}"
        )
