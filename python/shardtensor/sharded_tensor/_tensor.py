"""ShardedTensor: this rank's shards, the list of all ranks' shards, and the process group they are in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device

from shardtensor._late import first_use
from shardtensor.sharded_tensor import _check
from shardtensor.sharded_tensor._move import (
    Box,
    Move,
    _get_current_process_group,
    agree,
    attempt,
    boxes_of,
    gather_values,
    group_of,
    move,
    place,
    require_member,
)
from shardtensor.sharded_tensor._spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
    own_spec,
)

if TYPE_CHECKING:
    from torch.distributed import rpc
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_call: Callable[..., Any]  # set_call() sets it
_KEPT_FORMATS = (torch.preserve_format, torch.contiguous_format)


class ShardedTensorBase(torch.Tensor):
    """Metadata and local shards without a process group: what a ShardedTensor is before it can communicate."""

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        **_: Any,
    ) -> Any:
        spec = own_spec(sharding_spec)
        _check.require_strided(layout)
        if memory_format != torch.contiguous_format:
            raise ValueError("Only torch.contiguous_format memory_format is currently supported")
        properties = TensorProperties(dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory)
        return cls._wrap(spec, spec.build_metadata(_check.flat_sizes(size), properties), [])

    @classmethod
    def _wrap(cls, spec: ShardingSpec, metadata: ShardedTensorMetadata, shards: list[Shard]) -> Any:
        """Nothing is checked."""
        first_use()
        properties = metadata.tensor_properties
        out = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            metadata.size,
            strides=getattr(properties, "strides", None),  # torch 2.11 has none
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=properties.pin_memory,
            requires_grad=properties.requires_grad,
        )
        out._sharding_spec, out._metadata, out._local_shards = spec, metadata, shards
        return out

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[misc]
        cls, local_shards: list[Shard], sharded_tensor_metadata: ShardedTensorMetadata, sharding_spec: ShardingSpec | None = None
    ) -> Any:
        _check.check_whole(sharded_tensor_metadata)
        spec, metadata = _with_spec(sharded_tensor_metadata, sharding_spec)
        return ShardedTensor._wrap(spec, metadata, local_shards)

    def metadata(self) -> ShardedTensorMetadata:
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """This rank's shards; empty if it has none."""
        return self._local_shards

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"A {cls.__name__} object is being used from c++ while calling {func.__module__}.{func.__name__} "
            "but the there is no custom __torch_dispatch__ implementation for it."
        )


class ShardedTensor(ShardedTensorBase):
    """A tensor cut into boxes on the ranks of a process group, with any number of boxes per rank.

    ShardedTensor(spec, *size) is uninitialised memory; see also the factories and init_from_local_shards. All ranks of the
    group must make the same calls. If a call communicates, an error of one rank is raised on all.
    """

    _OWN: ClassVar[set[str]] = {
        "_sharding_spec", "_metadata", "_local_shards", "_process_group", "_init_rrefs", "_remote_shards", "_sharded_tensor_id"
    }  # fmt: skip
    _process_group: ProcessGroup
    _remote_shards: dict[int, list[rpc.RRef[Shard]]]
    _sharded_tensor_id: int | None

    @dataclass
    class ProcessGroupState:
        """Which rank wrote a file, and the sizes of its groups."""

        local_rank: int
        global_rank: int
        local_world_size: int
        global_world_size: int

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> None:
        group, me = group_of(process_group), dist.get_rank()
        properties = self._metadata.tensor_properties
        _check.check_whole(self._metadata)
        placed = [(place(group, shard.placement), shard) for shard in self._metadata.shards_metadata]
        self._local_shards = [
            Shard(
                torch.empty(
                    shard.shard_sizes,
                    dtype=properties.dtype,
                    device=device,
                    requires_grad=requires_grad,
                    pin_memory=pin_memory,
                ),
                shard,
            )
            for (rank, device), shard in placed
            if rank == me
        ]
        self._join(group, init_rrefs)

    def _join(self, group: ProcessGroup, init_rrefs: bool) -> None:
        self._process_group, self._init_rrefs = group, init_rrefs
        self._remote_shards, self._sharded_tensor_id = {}, None
        if init_rrefs:
            from shardtensor.sharded_tensor import _remote  # noqa: PLC0415  slow: torch's rpc

            _remote.share(self)

    @classmethod
    def _make(
        cls, spec: ShardingSpec, metadata: ShardedTensorMetadata, shards: list[Shard], group: ProcessGroup, init_rrefs: bool = False
    ) -> ShardedTensor:
        """Nothing is checked."""
        out: ShardedTensor = cls._wrap(spec, metadata, shards)
        out._join(group, init_rrefs)
        return out

    def _alike(self, tensors: Sequence[torch.Tensor], **properties: Any) -> ShardedTensor:
        """A ShardedTensor with the same cuts and other values, in the order of the local shards."""
        metadata = _check.with_properties(self._metadata, **properties)
        shards = [Shard(tensor, shard.metadata) for tensor, shard in zip(tensors, self._local_shards, strict=True)]
        return self._make(self._sharding_spec, metadata, shards, self._process_group, self._init_rrefs)

    # ---- from shards ----

    @classmethod
    def _init_from_local_shards(
        cls, local_shards: list[Shard], *global_size: Any, process_group: ProcessGroup | None = None, init_rrefs: bool = False
    ) -> ShardedTensor:
        """The ranks exchange their metadata. With a None among the sizes, the shards are stacked along dim 0, by rank."""
        group = group_of(process_group)
        require_member(group, "init_from_local_shards")
        asked = list(global_size[0]) if len(global_size) == 1 and isinstance(global_size[0], Sequence) else list(global_size)

        def describe() -> ShardedTensorMetadata | None:
            sizes = _check.flat_sizes([0 if n is None else n for n in asked])
            return _check.local_metadata(local_shards, sizes, group)

        mine, error = attempt(describe)
        metadata = _check.global_metadata(gather_values(mine, error, group), group, asked)
        if None in asked:  # the shards' own offsets are wrong
            own = iter([s for s in metadata.shards_metadata if place(group, s.placement)[0] == dist.get_rank()])
            local_shards = [Shard(shard.tensor, next(own)) for shard in local_shards]
        spec, metadata = _with_spec(metadata, None)
        return cls._make(spec, metadata, local_shards, group, init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From one tensor per rank, the rank's only shard. Without communication."""
        if not local_tensor.is_contiguous():
            raise ValueError(f"local_tensor is not a contiguous Tensor. (rank {dist.get_rank()})")
        spec, group = own_spec(sharding_spec), group_of(process_group)
        metadata = spec.build_metadata(_check.flat_sizes(global_size), _check.properties_of(local_tensor))
        mine = [s for s in metadata.shards_metadata if place(group, s.placement)[0] == dist.get_rank()]
        return cls._init_from_local_shards_and_global_metadata(
            [Shard(local_tensor, shard) for shard in mine], metadata, group, init_rrefs, spec
        )

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """From metadata that is the same on every rank. It is trusted: only this rank's shards are compared with it."""
        group = group_of(process_group)
        _check.check_against(local_shards, sharded_tensor_metadata, group)
        spec, metadata = _with_spec(sharded_tensor_metadata, sharding_spec)
        return cls._make(spec, metadata, local_shards, group, init_rrefs)

    # ---- what there is ----

    def sharding_spec(self) -> ShardingSpec:
        return self._sharding_spec

    def local_tensor(self) -> torch.Tensor:
        """The tensor of this rank's only shard."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. Number of shards: {len(self._local_shards)} (rank {dist.get_rank()})"
            )
        return self._local_shards[0].tensor

    def is_pinned(self) -> bool:  # type: ignore[override]
        return self._metadata.tensor_properties.pin_memory

    def remote_shards(self) -> dict[int, list[rpc.RRef[Shard]]]:
        """RRefs to the other ranks' shards, by rank; requires init_rrefs=True."""
        if not self._init_rrefs:
            raise RuntimeError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote_shards

    def _boxes(self) -> list[Box]:
        return boxes_of(self._metadata.shards_metadata, self._process_group)

    def _pieces(self) -> list[torch.Tensor]:
        """This rank's tensors in the order of the metadata, which may differ from the order of local_shards."""
        boxes = zip(self._boxes(), self._metadata.shards_metadata, strict=True)
        return self._tensors_of([shard for (rank, _, _), shard in boxes if rank == dist.get_rank()])

    def _tensors_of(self, shards: Sequence[ShardMetadata]) -> list[torch.Tensor]:
        held = {(*s.metadata.shard_offsets, *s.metadata.shard_sizes): s.tensor for s in self._local_shards}
        return [held[*s.shard_offsets, *s.shard_sizes] for s in shards]

    # ---- to elsewhere ----

    def gather(  # type: ignore[override]
        self, dst: int = 0, out: torch.Tensor | None = None, enforce_dtype: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """Writes the whole tensor to `out` on the group's rank `dst`; `out` is None on the others. `dtype`: as sent."""
        if enforce_dtype:
            warnings.warn("`enforce_dtype` is deprecated. Please use `dtype` instead.", FutureWarning, stacklevel=2)
        group = self._process_group
        require_member(group, "ShardedTensor.gather")
        _, error = attempt(self._check_out, dst, out)
        agree("ShardedTensor.gather", group, error, dst=dst, dtype=dtype)
        whole: Box = (dist.get_global_rank(group, dst), [0] * self.dim(), list(self.size()))
        got = move(self._pieces(), self._boxes(), [whole], group, dtype or self.dtype, _device_types(self._metadata.shards_metadata))
        if out is not None:
            with torch.no_grad():
                out.copy_(got[0])

    def _check_out(self, dst: int, out: torch.Tensor | None) -> None:
        me, world = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
        if not 0 <= dst < world:
            raise ValueError(f"ShardedTensor.gather: argument 'dst' is {dst}, not a rank of a group of {world} ranks")
        if me != dst:
            if out is not None:
                raise ValueError(f"Argument ``dst_tensor`` must NOT be specified on non-destination ranks. (rank {me})")
        elif out is None:
            raise ValueError(f"Argument ``dst_tensor`` must be specified on destination rank {dst}")
        elif out.size() != self.size():
            raise ValueError(f"Argument ``dst_tensor`` have size {tuple(out.size())},but should be {tuple(self.size())}")

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cuts this tensor by the spec, in place: any spec, in one exchange. The gradient moves back.

        Under autograd every rank needs a shard of the result: one that has none would not take part in the backward.
        """
        group, now = self._process_group, self._metadata
        require_member(group, "ShardedTensor.reshard")

        def target() -> tuple[ShardingSpec, ShardedTensorMetadata, list[Box]]:
            spec = own_spec(resharding_spec)
            metadata = spec.build_metadata(now.size, now.tensor_properties)
            _check.check_whole(metadata)
            return spec, metadata, boxes_of(metadata.shards_metadata, group)

        made, error = attempt(target)
        agree("ShardedTensor.reshard", group, error, resharding_spec=made and made[1].shards_metadata)
        assert made is not None
        spec, metadata, wanted = made
        mine = [shard for shard, box in zip(metadata.shards_metadata, wanted, strict=True) if box[0] == dist.get_rank()]
        if set(metadata.shards_metadata) == set(now.shards_metadata):
            self._local_shards = [Shard(t, shard) for t, shard in zip(self._tensors_of(mine), mine, strict=True)]
        else:
            got = self._moved(wanted, _device_types([*now.shards_metadata, *metadata.shards_metadata]))
            self._local_shards = [finished_shard(t, shard, now.tensor_properties) for t, shard in zip(got, mine, strict=True)]
        self._metadata, self._sharding_spec = metadata, spec
        return self

    def _moved(self, wanted: list[Box], devices: set[str]) -> Sequence[torch.Tensor]:
        held, group = self._boxes(), self._process_group
        if not (self.requires_grad and torch.is_grad_enabled()):
            return move(self._pieces(), held, wanted, group, self.dtype, devices)
        idle = set(dist.get_process_group_ranks(group)) - {rank for rank, _, _ in wanted}
        if idle:
            raise RuntimeError(
                f"ShardedTensor.reshard: ranks {sorted(idle)} would have no shard and so no part in the backward; reshard under "
                "torch.no_grad(), or give each of them a shard, which may be empty"
            )
        anchor = torch.empty(0, dtype=self.dtype, requires_grad=True)
        return Move.apply(held, wanted, group, devices, anchor, *self._pieces())  # type: ignore[no-any-return, no-untyped-call]

    def cpu(  # type: ignore[override]
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: ProcessGroup | None = None
    ) -> ShardedTensor:
        _require_kept(memory_format)
        return self.to("cpu", process_group=process_group)

    def cuda(  # type: ignore[override]
        self,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """On each rank's current device."""
        _require_kept(memory_format)
        current = torch.device(torch.accelerator.current_device_index())
        if device is not None and torch.device(device) not in (current, torch.device(current.type)):
            raise AssertionError(f"Only device without device id (e.g. 'cpu' or '{current.type}') is expected for ShardedTensor!")
        return self._relocated(current, self.dtype, lambda t: t.to(current, non_blocking=non_blocking), process_group)

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:  # type: ignore[override]
        """As Tensor.to, and with `process_group`: the shards stay on their ranks, on the current device of each."""
        device, dtype, flags = self._target(args, kwargs)
        group, copied = kwargs.get("process_group"), kwargs.get("copy", flags[1])
        _require_kept(kwargs.get("memory_format", torch.preserve_format))
        here = all(place(self._process_group, s.placement)[1].type == device.type for s in self._metadata.shards_metadata)
        if not copied and here and device == self.device and dtype == self.dtype and group in (None, self._process_group):
            return self
        non_blocking = kwargs.get("non_blocking", flags[0])
        return self._relocated(device, dtype, lambda t: t.to(device, dtype, non_blocking, copied), group)

    def _target(self, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device, torch.dtype, list[bool]]:
        device, dtype, flags = kwargs.get("device"), kwargs.get("dtype"), []
        for arg in args:
            if isinstance(arg, bool):
                flags.append(arg)
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, (torch.device, str, int)):
                device = arg
            elif arg is not None:
                raise RuntimeError(f"ShardedTensor.to() have wrong arguments: {args}")
        where = torch.device(device) if device is not None else self.device
        if where.type not in ("cpu", "meta"):
            current = torch.device(torch.accelerator.current_device_index())
            if where.index not in (None, current.index):
                warnings.warn(
                    "ShardedTensor.to only move tensor to its current device"
                    "If you want to put to different device, use `reshard` instead.",
                    stacklevel=3,
                )
            where = current
        return where, dtype or self.dtype, [*flags, False, False]

    def _relocated(
        self,
        device: torch.device,
        dtype: torch.dtype,
        move_one: Callable[[torch.Tensor], torch.Tensor],
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """`move_one` moves a shard. The other ranks use their current devices, of which only the type is known here."""

        def moved(shard: ShardMetadata) -> ShardMetadata:
            rank, _ = place(self._process_group, shard.placement)
            there = device if rank == dist.get_rank() else torch.device(device.type)
            return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), _remote_device(f"rank:{rank}/{there}"))

        requires_grad = self.requires_grad and (dtype.is_floating_point or dtype.is_complex)
        metadata = _check.with_properties(self._metadata, dtype=dtype, requires_grad=requires_grad)
        if device.type != "cpu":
            metadata = _check.with_properties(metadata, pin_memory=False)
        metadata.shards_metadata = [moved(shard) for shard in metadata.shards_metadata]
        shards = [Shard(move_one(s.tensor), moved(s.metadata)) for s in self._local_shards]
        spec = _relocated_spec(self._sharding_spec, metadata.shards_metadata)
        return self._make(spec, metadata, shards, process_group or self._process_group, self._init_rrefs)

    # ---- ops, copies, files ----

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, types, args, kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({self._metadata})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            out = self._alike([copy.deepcopy(shard.tensor, memo) for shard in self._local_shards])
            out.__dict__.update(copy.deepcopy(self._attributes(), memo))
            memo[id(self)] = out
        return memo[id(self)]  # type: ignore[no-any-return]

    def _attributes(self) -> dict[str, Any]:
        """The attributes that other code, such as nn.Parameter, has set on the tensor."""
        return {name: value for name, value in self.__dict__.items() if name not in self._OWN}

    def __reduce_ex__(self, protocol: Any) -> Any:
        group = self._process_group
        ranks = self.ProcessGroupState(
            dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size()
        )
        state = (self._local_shards, self._metadata, astuple(ranks), self._sharding_spec, self._init_rrefs, self._attributes())
        return _rebuild, (type(self), *state)

    # ---- torch.distributed.checkpoint ----

    def _staged(self, copy_one: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
        """async_save's copy on the CPU: copies each shard, since the whole has no memory."""
        return self.detach()._relocated(torch.device("cpu"), self.dtype, copy_one)  # type: ignore[attr-defined, no-any-return]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from shardtensor.sharded_tensor import _checkpoint  # noqa: PLC0415  slow: torch's checkpoints

        return _checkpoint.chunks(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from shardtensor.sharded_tensor import _checkpoint  # noqa: PLC0415  slow: torch's checkpoints

        return _checkpoint.write_items(self, fqn)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        from shardtensor.sharded_tensor import _checkpoint  # noqa: PLC0415  slow: torch's checkpoints

        return _checkpoint.shard_at(self, index)


def set_call(call: Callable[..., Any]) -> None:
    """Sets the function (func, types, args, kwargs) that runs torch's functions on ShardedTensors. _ops, which has the table,
    calls this."""
    global _call
    _call = call


def _device_types(shards: Sequence[ShardMetadata]) -> set[str]:
    return {shard.placement.device().type for shard in shards if shard.placement is not None}


def _require_kept(memory_format: torch.memory_format) -> None:
    if memory_format not in _KEPT_FORMATS:
        raise RuntimeError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")


def _with_spec(metadata: ShardedTensorMetadata, spec: ShardingSpec | None) -> tuple[ShardingSpec, ShardedTensorMetadata]:
    """The spec and the metadata. If the spec is not given, it is inferred, and the metadata's shards get its order."""
    if spec is not None:
        return own_spec(spec), _check.with_properties(metadata)
    spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
    return spec, spec.build_metadata(metadata.size, metadata.tensor_properties)


def _relocated_spec(spec: ShardingSpec, shards: list[ShardMetadata]) -> ShardingSpec:
    if isinstance(spec, ChunkShardingSpec):
        return ChunkShardingSpec(spec.dim, [shard.placement for shard in shards])  # type: ignore[misc]
    if isinstance(spec, EnumerableShardingSpec):
        return EnumerableShardingSpec(shards)
    return _infer_sharding_spec_from_shards_metadata(shards)


def finished_shard(tensor: torch.Tensor, shard: ShardMetadata, properties: TensorProperties) -> Shard:
    """A shard of moved data, on the shard's device and with the tensor's properties."""
    assert shard.placement is not None
    tensor = tensor.to(shard.placement.device())
    if properties.pin_memory:
        tensor = tensor.pin_memory()
    return Shard(tensor if tensor.requires_grad else tensor.requires_grad_(properties.requires_grad), shard)


def _rebuild(
    cls: type[ShardedTensor],
    shards: list[Shard],
    metadata: ShardedTensorMetadata,
    saved: tuple[int, int, int, int],
    spec: ShardingSpec,
    init_rrefs: bool,
    attributes: dict[str, Any],
) -> ShardedTensor:
    """Unpickles on the rank that pickled it, in groups of the same sizes."""
    if not dist.is_initialized():
        raise RuntimeError('Need to initialize default process group using "init_process_group" before loading ShardedTensor')
    group = _get_current_process_group()
    found = (dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size())
    for name, was, now in zip(("Local rank", "Global rank", "Local world size", "Global world size"), saved, found, strict=True):
        if was != now:
            raise RuntimeError(f"{name} at save time was {was}, but at load time was {now}")
    out = cls._make(spec, metadata, shards, group, init_rrefs)
    out.__dict__.update(attributes)
    return out
