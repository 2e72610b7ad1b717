"""Shards whole tensors, parameters and modules: the functions of torch.distributed._shard, and the state dict hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharder import Sharder
from torch.distributed._shard.sharding_plan.api import ShardingPlan

from shardtensor.sharded_tensor import _check
from shardtensor.sharded_tensor._move import Box, attempt, boxes_of, gather_values, group_of, move, require_member
from shardtensor.sharded_tensor._spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, add_shard, own_spec
from shardtensor.sharded_tensor._tensor import ShardedTensor, _device_types, finished_shard

_SPECS = (ChunkShardingSpec, EnumerableShardingSpec)

# ---- tensors ----


def shard_whole(tensor: torch.Tensor, spec: ShardingSpec, src_rank: int = 0, process_group: ProcessGroup | None = None) -> ShardedTensor:
    """Cuts the tensor of the group's rank `src_rank`. Of the other ranks' tensors only size and dtype are read."""
    group = group_of(process_group)
    properties = _check.properties_of(tensor)
    metadata = spec.build_metadata(tensor.size(), properties)
    _check.check_whole(metadata)
    wanted = boxes_of(metadata.shards_metadata, group)
    source = dist.get_global_rank(group, src_rank)
    held: list[Box] = [(source, [0] * tensor.dim(), list(tensor.size()))]
    devices = _device_types(metadata.shards_metadata) | {tensor.device.type}
    got = move([tensor] if dist.get_rank() == source else [], held, wanted, group, tensor.dtype, devices)
    mine = [shard for shard, box in zip(metadata.shards_metadata, wanted, strict=True) if box[0] == dist.get_rank()]
    shards = [finished_shard(t, shard, properties) for t, shard in zip(got, mine, strict=True)]
    return ShardedTensor._make(spec, metadata, shards, group)


add_shard(shard_whole)


def _shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: ProcessGroup | None = None
) -> ShardedTensor:
    """A ShardedTensor of the values of the group's rank `src_rank`. First checks that all ranks pass the same arguments."""
    return _shard_agreed(tensor, None, sharding_spec, src_rank, process_group)


def _shards_of(spec: ShardingSpec, tensor: torch.Tensor) -> Any:
    """What the ranks compare of a user's spec, which need not define equality: its shards, if it lists them. Its own `shard` alone
    decides where they lie."""
    try:
        return spec.build_metadata(tensor.size(), _check.properties_of(tensor)).shards_metadata
    except NotImplementedError:
        return type(spec).__qualname__


def _shard_agreed(
    tensor: torch.Tensor | None, error: Exception | None, spec: ShardingSpec, src_rank: int, process_group: ProcessGroup | None
) -> ShardedTensor:
    """`error`: the reason why this rank has no such tensor."""
    group = group_of(process_group)
    require_member(group, "shard_parameter")

    def check() -> dict[str, Any]:
        if error is not None:
            raise error
        assert tensor is not None
        if not tensor.is_contiguous():
            raise ValueError(f"input tensor is not a contiguous Tensor (rank {dist.get_rank()})")
        if not 0 <= src_rank < dist.get_world_size(group):
            raise ValueError(f"src_rank={src_rank} is not a rank of a group of {dist.get_world_size(group)} ranks")
        ours = own_spec(spec)
        asked: Any = ours
        if isinstance(ours, _SPECS):
            boxes_of(ours.build_metadata(tensor.size(), _check.properties_of(tensor)).shards_metadata, group)
        else:
            asked = _shards_of(ours, tensor)
        facts = dict(size=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad, device=tensor.device.type)
        return dict(src_rank=src_rank, sharding_spec=asked) | facts

    mine, problem = attempt(check)
    told = gather_values(mine, problem, group)
    assert mine is not None and tensor is not None
    for group_rank, theirs in enumerate(told):
        for name, value in mine.items():
            if value != theirs[name]:
                raise ValueError(
                    f"{name}={value} on rank: {dist.get_rank()} does not "
                    f"match with {name}={theirs[name]} on rank: {dist.get_global_rank(group, group_rank)}"
                )
    ours = own_spec(spec)
    if isinstance(ours, _SPECS):
        return shard_whole(tensor, ours, src_rank, group)
    return ours.shard(tensor, src_rank=src_rank, process_group=group)  # type: ignore[return-value]


# ---- modules ----


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: ProcessGroup | None = None
) -> None:
    """Replaces the parameter by a ShardedTensor of the values of the group's rank `src_rank`."""

    def find() -> torch.Tensor:
        if not hasattr(module, param_name):
            raise AttributeError(f"{type(module).__name__} has no attribute `{param_name}`")
        tensor = getattr(module, param_name)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Expected {type(module).__name__}.{param_name} to be a Tensor, but found {type(tensor).__name__}")
        if not tensor.is_contiguous():
            raise ValueError(f"param: {param_name} is not a contiguous Tensor (rank {dist.get_rank()})")
        return tensor

    tensor, error = attempt(find)
    sharded = _shard_agreed(tensor, error, sharding_spec, src_rank, process_group)
    module.register_parameter(param_name, nn.Parameter(sharded, sharded.requires_grad))


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: ProcessGroup | None = None) -> None:
    """Shards the parameters and submodules that the plan names, and hooks its outputs. A wrong plan changes nothing."""
    sharders = [name for name, entry in plan.plan.items() if isinstance(entry, Sharder)]
    for name, entry in plan.plan.items():
        if not isinstance(entry, (ShardingSpec, Sharder)):
            raise TypeError(f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}'")
        if name == "" and isinstance(entry, Sharder):
            raise KeyError("Module path must not be empty for custom sharder!")
        for path in sharders:
            if isinstance(entry, ShardingSpec) and f"{name.rpartition('.')[0]}.".startswith(f"{path}."):
                raise RuntimeError(
                    f"ShardingPlan is in-valid, trying to shard a parameter: {name}, but there's already a Sharder entry for module "
                    f"{path}, parameter sharding should not conflict with the submodule tree that a Sharder is working with!"
                )
    for name, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{name}'")
    for name, entry in plan.plan.items():
        parent, _, last = name.rpartition(".")
        if isinstance(entry, ShardingSpec):
            shard_parameter(module.get_submodule(parent), last, entry, src_rank, process_group)
        else:
            setattr(module.get_submodule(parent), last, entry.shard(module.get_submodule(name)))
    for name, spec in (plan.output_plan or {}).items():
        _reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or []:
        _collect_local_shard(module.get_submodule(name))


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Reshards the module's output by the spec, if it is a ShardedTensor."""

    def reshard(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(reshard)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Replaces the module's output by this rank's piece, if it is a ShardedTensor, and drops a cut dim of size 1."""

    def collect(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local, spec = output.local_tensor(), output._sharding_spec
        if isinstance(spec, ChunkShardingSpec) and local.size(spec.dim) == 1:  # type: ignore[arg-type]
            return local.squeeze(spec.dim)  # type: ignore[arg-type]
        return local

    module.register_forward_hook(collect)
    return module


# ---- state dicts ----


def _keys(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Every attribute of every submodule, with its name in a state dict."""
    for path, submodule in module.named_modules():
        start = prefix + path
        for name in list(submodule.__dict__):
            yield start + ("." if start else "") + name, submodule, name


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """For Module._register_state_dict_hook: adds ShardedTensors that are attributes, not parameters, to the state dict."""
    for key, submodule, name in _keys(module, prefix):
        if isinstance(submodule.__dict__[name], ShardedTensor):
            destination[key] = submodule.__dict__[name]


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """For Module._register_load_state_dict_pre_hook(..., with_module=True): the reverse of state_dict_hook."""
    for key, submodule, name in _keys(module, prefix):
        if isinstance(state_dict.get(key), ShardedTensor):
            setattr(submodule, name, state_dict[key])
