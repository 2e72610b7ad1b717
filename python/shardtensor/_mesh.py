"""DeviceMesh to the extension's Mesh and back.

A Mesh holds names of process groups, never the groups: one destroyed and made anew under its name is found again.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh

from shardtensor import _C

_device_meshes: dict[int, weakref.ReferenceType[DeviceMesh]] = {}
_strong: dict[int, DeviceMesh] = {}
_ATTRIBUTE = "_shardtensor_mesh"


def as_mesh(device_mesh: DeviceMesh) -> _C.Mesh:
    """The extension's view of a DeviceMesh, kept on the DeviceMesh."""
    known = getattr(device_mesh, _ATTRIBUTE, None)
    names = list(getattr(device_mesh, "_dim_group_names", None) or [""] * device_mesh.ndim)
    if known is not None and known.groups == names:
        return known
    mesh = _C.Mesh(
        device_mesh.device_type,
        list(device_mesh.mesh.shape),
        device_mesh.mesh.flatten().tolist(),
        list(device_mesh.mesh_dim_names or ()),
        names,
        device_mesh.get_rank(),
    )
    setattr(device_mesh, _ATTRIBUTE, mesh)
    _device_meshes[mesh.id] = weakref.ref(device_mesh)
    return mesh


def as_device_mesh(mesh: _C.Mesh) -> DeviceMesh:
    """The user's DeviceMesh; an equal one without process groups of its own where the user's is gone."""
    reference = _device_meshes.get(mesh.id)
    device_mesh = reference() if reference is not None else None
    if device_mesh is None:
        ranks = torch.tensor(mesh.ranks, dtype=torch.int).view(mesh.shape)
        device_mesh = DeviceMesh(
            mesh.device_type, ranks, mesh_dim_names=tuple(mesh.dim_names) or None, _init_backend=False, _rank=mesh.rank
        )
        if all(mesh.groups):
            device_mesh._dim_group_names = list(mesh.groups)
        setattr(device_mesh, _ATTRIBUTE, mesh)
        _strong[mesh.id] = device_mesh
        _device_meshes[mesh.id] = weakref.ref(device_mesh)
    return device_mesh


def current_mesh(who: str) -> DeviceMesh:
    """The mesh of the innermost `with mesh:`; without one, all ranks of the default process group in a row."""
    if _mesh_resources.mesh_stack:
        return _mesh_resources.get_current_mesh()
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who}: argument 'device_mesh' is None and no process group is initialised; "
            "pass a mesh (shardtensor.init_device_mesh) or launch with torchrun and call init_process_group"
        )
    global _default
    names = (dist.group.WORLD.group_name,) if dist.group.WORLD is not None else ()
    if _default is None or tuple(getattr(_default, "_dim_group_names", ())) != names:
        device = dist.distributed_c10d._get_pg_default_device(dist.group.WORLD).type
        _default = init_device_mesh(device, (dist.get_world_size(),))
    return _default


_default: DeviceMesh | None = None
