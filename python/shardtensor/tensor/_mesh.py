"""DeviceMesh to the extension's Mesh and back.

A Mesh holds names of process groups, never the groups: a group that was destroyed and made again under its name is found.
DeviceMesh objects hold groups, so they are not kept alive here either, except submeshes, which live as long as their root mesh.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

import shardtensor._C as _C
from shardtensor._late import first_use

# Not an attribute of the DeviceMesh, because users pickle meshes. By identity, because equal meshes may have other groups.
_meshes: dict[int, tuple[weakref.ReferenceType[DeviceMesh], _C.Mesh, list[str], str]] = {}
# DeviceMeshes made here, without groups of their own: the last few. If another is wanted again, an equal one is made.
_stand_ins: dict[int, DeviceMesh] = {}
_KEPT = 16
_SUBMESHES = "_shardtensor_submeshes"


def _before_the_first(make: Any) -> Any:
    """The initialiser of the extension's Mesh until there is one: every ShardTensor has a mesh."""

    def __init__(self: _C.Mesh, *args: Any, **kwargs: Any) -> None:
        first_use()
        _C.Mesh.__init__ = make  # type: ignore[method-assign]
        make(self, *args, **kwargs)

    return __init__


_C.Mesh.__init__ = _before_the_first(vars(_C.Mesh)["__init__"])  # type: ignore[method-assign]


def as_mesh(device_mesh: DeviceMesh) -> _C.Mesh:
    """The extension's view of a DeviceMesh."""
    device_mesh = real_mesh(device_mesh)
    names = getattr(device_mesh, "_dim_group_names", None) or [""] * device_mesh.ndim
    known = _meshes.get(id(device_mesh))
    if known is not None and known[0]() is device_mesh and known[2] == names and (known[3] or not dist.is_initialized()):
        _C.set_device_mesh(known[1], known[0])  # of equal meshes, the last one passed in
        return known[1]
    with unset_fake_temporarily():  # reads the mesh's tensor of ranks
        mesh = _view(device_mesh, names)
    _remember(device_mesh, mesh)
    return mesh


def real_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself, which torch.compile wraps in an object of its own while it traces."""
    return getattr(device_mesh, "real_obj", device_mesh)


def given_mesh(device_mesh: DeviceMesh | None, who: str) -> DeviceMesh:
    """The argument `device_mesh`; for None, the current mesh."""
    return current_mesh(who) if device_mesh is None else real_mesh(device_mesh)


def _view(device_mesh: DeviceMesh, names: list[str]) -> _C.Mesh:
    simulation: Any = sys.modules.get("torch.distributed._local_tensor")
    if simulation is not None and simulation.local_tensor_mode() is not None:
        raise NotImplementedError(
            "shardtensor: torch's LocalTensorMode simulates all ranks in one process; a ShardTensor's piece belongs to the rank of its "
            "process. Run one process per rank (torchrun, with gloo on CPUs), or use torch.distributed.tensor in this mode"
        )
    rank = device_mesh.get_rank() if dist.is_initialized() else device_mesh._rank
    return _C.Mesh(
        device_mesh.device_type,
        list(device_mesh.mesh.shape),
        device_mesh.mesh.flatten().tolist(),
        list(device_mesh.mesh_dim_names or ()),
        list(names),
        rank,
        _world(),
        _group_ranks(device_mesh, names),
    )


def device_of(mesh: DeviceMesh | _C.Mesh) -> torch.device:
    """Where this rank's pieces live: on the device of the mesh's process groups, if they have one."""
    if mesh.device_type == "cuda":
        device = _C.device_of(mesh if isinstance(mesh, _C.Mesh) else as_mesh(mesh))
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    return torch.device(mesh.device_type)


def at_home(device_mesh: DeviceMesh) -> DeviceMesh:
    """For a mesh from a file, the equal mesh that is in use here, if there is one."""
    mesh = _view(device_mesh, list(getattr(device_mesh, "_dim_group_names", None) or [""] * device_mesh.ndim))
    return _C.device_mesh(mesh) or device_mesh


def _group_ranks(device_mesh: DeviceMesh, names: list[str]) -> list[list[int]]:
    """Per mesh dim, each coordinate's rank in its process group: groups sort their ranks, meshes need not."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None or not all(names):
        return []
    out: list[list[int]] = []
    for mesh_dim, name in enumerate(names):
        at: list[Any] = list(coordinate)
        at[mesh_dim] = slice(None)
        line = device_mesh.mesh[tuple(at)].tolist()
        ranks = _ranks_of_group(name, line)
        out.append([] if ranks == line else [ranks.index(rank) for rank in line])
    return out if any(out) else []


def _ranks_of_group(name: str, default: list[int]) -> list[int]:
    try:
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type, attr-defined]
    except (KeyError, RuntimeError, ValueError):  # torch has no list of this group's ranks
        return default
    return ranks if sorted(ranks) == sorted(default) else default


def _world() -> str:
    """The name of the default group, which moves pieces from mesh to mesh."""
    group: Any = dist.group.WORLD
    return group.group_name if group is not None else ""


def _remember(device_mesh: DeviceMesh, mesh: _C.Mesh) -> None:
    key = id(device_mesh)
    _meshes[key] = (weakref.ref(device_mesh, lambda _: _meshes.pop(key, None)), mesh, mesh.groups, mesh.world)
    _C.set_device_mesh(mesh, weakref.ref(device_mesh))
    _stand_ins.pop(mesh.id, None)
    # mesh["tp"] is a new object each time, but FSDP needs the root mesh of a parameter's mesh.
    root: Any = device_mesh._get_root_mesh()
    if root is not device_mesh:
        root.__dict__.setdefault(_SUBMESHES, {})[mesh.id] = device_mesh


def as_device_mesh(mesh: _C.Mesh) -> DeviceMesh:
    """The user's DeviceMesh; if that no longer exists, an equal one without process groups of its own."""
    device_mesh = _C.device_mesh(mesh)
    if device_mesh is None:
        with unset_fake_temporarily():
            ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").view(mesh.shape)
            device_mesh = DeviceMesh(
                mesh.device_type, ranks, mesh_dim_names=tuple(mesh.dim_names) or None, _init_backend=False, _rank=mesh.rank
            )
        if all(mesh.groups):
            device_mesh._dim_group_names = list(mesh.groups)  # type: ignore[arg-type]
        _remember(device_mesh, mesh)
        _stand_ins[mesh.id] = device_mesh
        while len(_stand_ins) > _KEPT:
            del _stand_ins[next(iter(_stand_ins))]
    return device_mesh


def current_mesh(who: str) -> DeviceMesh:
    """The mesh of the innermost `with mesh:`; without one, a 1-d mesh of all ranks of the default process group."""
    if _mesh_resources.mesh_stack:
        return _mesh_resources.get_current_mesh()
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who}: argument 'device_mesh' is None and no process group is initialised; "
            "pass a mesh (shardtensor.init_device_mesh) or launch with torchrun and call init_process_group"
        )
    group: Any = dist.group.WORLD
    return as_device_mesh(group_mesh(group, dist.distributed_c10d._get_pg_default_device(group).type))


def innermost_mesh() -> _C.Mesh | None:
    """The mesh of the innermost `with mesh:`, if there is one."""
    stack = _mesh_resources.mesh_stack
    return as_mesh(stack[-1]) if stack else None


def group_mesh(group: Any, device_type: str) -> _C.Mesh:
    """A 1-d mesh of a process group's ranks; None: the default group."""
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    return _C.Mesh(device_type, [len(ranks)], ranks, [], [group.group_name], dist.get_rank(), _world())


def told_apart(a: _C.Layout, b: _C.Layout) -> tuple[str, str]:
    """Both layouts as text. If the texts are the same, with what differs between their meshes."""
    texts = str(a), str(b)
    if texts[0] != texts[1] or a.mesh.id == b.mesh.id:
        return texts
    differ = "ranks" if a.mesh.ranks != b.mesh.ranks else "groups"
    first, second = (f"{text} of {differ} {getattr(layout.mesh, differ)}" for text, layout in zip(texts, (a, b), strict=True))
    return first, second
