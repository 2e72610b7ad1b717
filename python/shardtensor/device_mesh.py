"""torch.distributed.device_mesh, under this package's name."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
