"""Hugging Face's tensor parallelism (transformers 5, `tp_plan`) by whole heads, after replace_dtensor(), its expert parallelism for any
number of experts, and peft's LoRA over both.

transformers cuts the features of a layer as torch.chunk does, whatever the heads, and gives each rank plain tensors. Here the
layers of an attention module whose heads the ranks do not divide get the styles of AttentionHeads instead. GPT-2 and T5, for
which transformers has no plan, get one. The loader reads each rank's piece from the checkpoint by its layout.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

import shardtensor._C as _C
from shardtensor._late import when_imported
from shardtensor.parallel._attention import AttentionHeads, CountedHeads, FusedHeads, OutputHeads, QueryHeads
from shardtensor.parallel._heads import HEAD_SIZES, OUTPUTS, PROJECTIONS, number
from shardtensor.parallel._styles import ColwiseParallel, RowwiseParallel, is_conv1d, pieces_of_features
from shardtensor.tensor._factories import distribute_tensor
from shardtensor.tensor._pieces import box_views
from shardtensor.tensor._tensor import ShardTensor

# Of models without a plan, by model_type: transformers' styles, by the ends of the modules' names.
_PLANS = {
    "gpt2": {"c_attn": "colwise", "q_attn": "colwise", "c_fc": "colwise", "c_proj": "rowwise"},
    "t5": {
        **dict.fromkeys(("q", "k", "v", "relative_attention_bias", "wi", "wi_0", "wi_1"), "colwise"),
        **dict.fromkeys(("o", "wo"), "rowwise"),
    },
}
# One layer that computes queries, keys and values, side by side; or keys and values, beside one that computes the queries.
_FUSED, _FUSED_QUERY, _FUSED_OUTPUT = "c_attn", "q_attn", "c_proj"
# One layer that computes query, key and value of a head, then those of the next.
_HEAD_BY_HEAD = {"gpt_neox": "query_key_value"}
_NEEDED = {
    "transformers.core_model_loading:DtensorShardOperation",
    "transformers.core_model_loading:_dtensor_from_local_like",
    "transformers.modeling_utils:_dtensor_from_local_like",
}


def install(active: Callable[[], bool]) -> None:
    """Called once. Changes what transformers does while `active()` is true. Does nothing in versions whose functions have other names."""
    changed: set[str] = set()

    def change(module: Any, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            setattr(owner, name, wrap(getattr(owner, name)))
            changed.add(f"{module.__name__}:{name}")

    def ready() -> bool:
        """Cuts that the loader does not know must not be made."""
        return active() and changed >= _NEEDED

    def apply_by_heads(apply: Callable[..., Any]) -> Callable[..., Any]:
        def ours(model: nn.Module, tp_mesh: DeviceMesh, tp_plan: dict[str, str]) -> Any:
            return apply(model, tp_mesh, parallelize_heads(model, tp_mesh, tp_plan) if ready() else tp_plan)

        return ours

    def resolve_with_ours(resolve: Callable[..., Any]) -> Callable[..., Any]:
        def ours(self: Any, distributed_config: Any) -> Any:
            automatic = distributed_config.tp_size > 1 and distributed_config.tp_plan in (None, "auto")
            if automatic and not self._tp_plan and ready():
                self._tp_plan = plan_of_ours(self)
            return resolve(self, distributed_config)

        return ours

    def reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda param: _Piece(param, read) if isinstance(param, ShardTensor) else read(param)

    def cached_heads(count: Callable[..., Any]) -> Callable[..., Any]:
        def ours(tp_plan: dict[str, str], num_heads: Any, tp_size: int) -> Any:
            """transformers does not know which layer computes the keys in our plans. None: a cache takes its sizes from the first keys."""
            names = {name.rpartition(".")[2] for name, style in (tp_plan or {}).items() if style == "colwise"}
            return None if active() and names & {"k", _FUSED} else count(tp_plan, num_heads, tp_size)

        return ours

    def mixin(module: Any) -> None:
        change(module, module, "apply_tensor_parallelism", apply_by_heads)
        change(module, getattr(module, "DistributedMixin", None), "_resolve_parallel_plans", resolve_with_ours)

    def loading(module: Any) -> None:
        change(module, module, "DtensorShardOperation", reader)
        change(module, module, "_dtensor_from_local_like", _like_its_layout)

    def adapters_like_their_layers(add: Callable[..., None]) -> Callable[..., None]:
        def ours(tp_module: nn.Module, tp_plan_name: str, device_mesh: DeviceMesh, *, base_layer: nn.Module, **options: Any) -> None:
            if not active() or not _cut_like(base_layer, tp_module, tp_plan_name, device_mesh):
                add(tp_module, tp_plan_name, device_mesh, base_layer=base_layer, **options)

        return ours

    def whole_features(features: Callable[..., Any]) -> Callable[..., Any]:
        def ours(self: Any, module: nn.Module) -> Any:
            """Adapters begin whole, so that all ranks draw alike. peft makes them in the size of a piece, which differs."""
            whole = active() and type(module) is nn.Linear and isinstance(module.weight, ShardTensor)
            return (module.in_features, module.out_features) if whole else features(self, module)

        return ours

    def experts(module: Any) -> None:
        change(module, getattr(module, "MoEParamShard", None), "shard_param", lambda shard: _uneven_experts(shard, ready))
        change(module, getattr(module, "ExpertParallelLayer", None), "context_around_forward", _with_empty_experts)

    when_imported("transformers.distributed.mixin", mixin)
    when_imported("transformers.distributed.expert_parallel", experts)
    when_imported("transformers.core_model_loading", loading)
    when_imported("transformers.modeling_utils", lambda m: change(m, m, "_dtensor_from_local_like", _like_its_layout))
    when_imported("peft.tuners.lora.model", lambda m: change(m, m, "add_lora_tp_hooks_dtensor", adapters_like_their_layers))
    when_imported("peft.tuners.lora.layer", lambda m: change(m, getattr(m, "LoraLayer", None), "_get_in_out_features", whole_features))
    when_imported("transformers.generation.utils", lambda m: change(m, m, "get_kv_heads_per_rank", cached_heads))


def plan_of_ours(model: Any) -> dict[str, str]:
    """The plan of a model for which transformers has none, or an empty one."""
    ends = _PLANS.get(model.config.model_type, {})
    linear = [(name, name.rpartition(".")[2]) for name, m in model.named_modules() if hasattr(m, "weight")]
    return {re.sub(r"\.\d+(?=\.)", ".*", name): ends[end] for name, end in linear if end in ends}


# ---- experts that the ranks do not divide ----

# transformers finds the rank of an expert, and its place there, by dividing by the number of experts per rank. With torch.chunk's
# cut that holds for any number, if each rank counts as many as the first has. Those that a rank lacks are zeros that no token goes to.
_EACH = "_shardtensor_experts"


def _uneven_experts(shard: Callable[..., None], ready: Callable[[], bool]) -> Callable[..., None]:
    def ours(self: Any, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        param = module._parameters.get(name)
        whole = len(param) if param is not None and self.shards_expert_dim and hasattr(module, "num_experts") else 0
        each = -(-whole // mesh.size())
        if whole % mesh.size() == 0 or each * (mesh.size() - 1) >= whole or not ready():  # the loader needs an expert on each rank
            shard(self, module, name, mesh)
            return
        cut = distribute_tensor(param, mesh, [self.placement], src_data_rank=None)  # type: ignore[arg-type]
        module._parameters[name] = nn.Parameter(cut, param.requires_grad)  # type: ignore[union-attr]
        vars(module).update({_EACH: each, "num_experts": each, "_is_expert_parallel": True})

    return ours


def _with_empty_experts(around: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def ours(self: Any, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        with around(self, module, mesh):
            each = getattr(module, _EACH, 0)
            fewer = {name: p for name, p in module._parameters.items() if p is not None and len(p) < each}
            for name, p in fewer.items():
                module._parameters[name] = F.pad(p, [0, 0] * (p.dim() - 1) + [0, each - len(p)])  # type: ignore[assignment]
            try:
                yield
            finally:
                module._parameters.update(fewer)

    return ours


# ---- styles ----


def parallelize_heads(model: Any, mesh: DeviceMesh, plan: dict[str, str]) -> dict[str, str]:
    """Applies our styles where transformers' would cut heads, or cannot be applied. Returns the rest of the plan."""
    modules = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    for name, module in modules.items():
        styles |= _attention_styles(name, module, getattr(module, "config", model.config), mesh.size(), plan)
    for name, style in plan.items():
        if name in modules and name not in styles and is_conv1d(modules[name]) and style in ("colwise", "rowwise"):
            styles[name] = ColwiseParallel() if style == "colwise" else RowwiseParallel()
    for name, ours in styles.items():
        ours.src_data_rank = None  # all ranks read the same checkpoint
        ours._apply(modules[name], mesh)
    taken = tuple(name for name in styles if name in plan)
    return {name: style for name, style in plan.items() if name not in taken and name.rpartition(".")[0] not in taken}


def _attention_styles(name: str, module: nn.Module, config: Any, ranks: int, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """{} if the module is no attention, or transformers' own cuts keep its heads whole."""
    inside = f"{name}." if name else ""
    children = dict(module.named_children())
    columns, rows = ({child for child in children if plan.get(inside + child) == style} for style in ("colwise", "rowwise"))
    output = next((child for child in (*OUTPUTS, _FUSED_OUTPUT) if child in rows), None)
    size = number(module, HEAD_SIZES) or getattr(config, "head_dim", None) or 0
    if output is None or not size:
        return {}

    def heads_of(child: str) -> int:
        """The number of heads that a layer computes, or 0."""
        features = _features(children[child], 0)
        return 0 if features % size else features // size

    width = _features(children[output], 1)
    by_head = _HEAD_BY_HEAD.get(getattr(config, "model_type", ""))
    if by_head in columns and not width % size and _features(children[by_head], 0) == 3 * width:
        if not width // size % ranks:
            return {}
        return {inside + by_head: ColwiseParallel(multiple_of=3 * size), inside + output: RowwiseParallel(multiple_of=size)}
    query = next((names for names in PROJECTIONS if columns.issuperset(names)), None)
    if query is not None:
        q, k, v = query
        counts = [heads_of(child) for child in query]
        if width != counts[0] * size or counts[1] != counts[2] or not counts[1] or counts[0] % counts[1]:
            return {}
        heads = AttentionHeads(heads=counts[0], kv_heads=counts[1], head_dim=size)
        # A table with one column for each head, which is added to the scores.
        tables = {child for child in columns if isinstance(m := children[child], nn.Embedding) and m.embedding_dim == heads.heads}
        if not tables and not any(count % ranks for count in counts) and not hasattr(module, "n_heads"):
            return {}
        styles = heads.plan(name, q=q, k=k, v=v, o=output)
        styles |= {inside + child: QueryHeads(AttentionHeads(heads.heads, heads.kv, 1)) for child in tables}
    elif _FUSED in columns:
        heads = AttentionHeads(heads=width // size, head_dim=size)
        styles = {inside + _FUSED: FusedHeads(heads), inside + output: OutputHeads(heads)}
        if _FUSED_QUERY in columns:
            styles[inside + _FUSED_QUERY] = QueryHeads(heads)
    else:
        return {}
    if heads.kv == heads.heads:
        styles[name] = CountedHeads(heads, {"n_heads": 1, "split_size": size})
    return styles


def _cut_like(layer: Any, adapter: nn.Module, plan: str, mesh: DeviceMesh) -> bool:
    """Cuts one half of peft's adapter, a Linear, like the layer that it is added to. (transformers would use the size of a piece
    as the size of the whole.)
    """
    weight, dim = layer.weight, 0 if plan == "colwise" else 1
    if not isinstance(weight, ShardTensor) or type(layer) is not nn.Linear:
        return False
    style = ColwiseParallel() if dim == 0 else RowwiseParallel()
    style.pieces = list(pieces_of_features(weight._layout, dim, weight.shape[dim]))
    style.src_data_rank = None
    style._apply(adapter, mesh)
    return True


def _features(layer: Any, of: int) -> int:
    """A linear layer's number of output features (0) or input features (1); 0 if it is none that we can cut."""
    if type(layer) is nn.Linear:
        return int(layer.weight.shape[of])
    return int(layer.weight.shape[1 - of]) if is_conv1d(layer) else 0


# ---- loading ----


class _Piece:
    """Reads this rank's piece of a parameter from a checkpoint's tensor. Called in threads: it makes no layouts."""

    def __init__(self, param: ShardTensor, read: Callable[[Any], Any]) -> None:
        layout, local = param._layout, param._local_tensor
        self.shape, self.local_shape = list(param.shape), local.shape
        self.even = layout.is_even
        self.text = str(layout)
        self.theirs = read(param)
        meta = torch.empty(local.shape, device="meta")
        self.boxes = [(start, tuple(box.shape), box.storage_offset()) for start, box in _boxes(meta, layout, self.shape)]
        self.strides = meta.stride()

    def shard_tensor(self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> torch.Tensor | None:
        if self.even:
            return self.theirs.shard_tensor(source, tensor_idx=tensor_idx, device=device, dtype=dtype)  # type: ignore[no-any-return]
        sizes = list(source.shape) if isinstance(source, torch.Tensor) else list(source.get_shape())
        if sizes != self.shape:
            raise NotImplementedError(
                f"from_pretrained: a parameter of sizes {self.shape}, cut unevenly as {self.text}, cannot be made of a checkpoint's tensor of "
                f"sizes {sizes}; convert the checkpoint first"
            )
        first = source[tuple(slice(0, 0) for _ in sizes)]
        piece = torch.empty(self.local_shape, dtype=dtype or first.dtype, device=device or first.device)
        for start, shape, offset in self.boxes:
            part = source[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
            piece.as_strided(shape, self.strides, offset).copy_(part)
        return piece


def _boxes(local: torch.Tensor, layout: _C.Layout, sizes: list[int]) -> Iterable[tuple[list[int], torch.Tensor]]:
    return ((start, box) for start, box in box_views(local, layout, sizes) if box.numel())


def _like_its_layout(like: Callable[..., Any]) -> Callable[..., Any]:
    def ours(local_tensor: torch.Tensor, ref: Any) -> Any:
        if not isinstance(ref, ShardTensor):
            return like(local_tensor, ref)
        return _C.from_local(local_tensor.contiguous(), ref._layout, list(ref.shape), list(ref.stride()), None)

    return ours
