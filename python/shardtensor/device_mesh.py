"""torch.distributed.device_mesh, under this package's name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _stock  # by name: replace_dtensor() replaces it in its module

from shardtensor._late import first_use

__all__ = ["DeviceMesh", "init_device_mesh"]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import init_device_mesh
else:

    @functools.wraps(_stock)
    def init_device_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        """torch's function. Its error says what to do if the process was not started by torchrun."""
        first_use()  # even before there is a ShardTensor, fully_shard on this mesh may cut columns unevenly
        try:
            return _stock(*args, **kwargs)
        except ValueError as error:
            if not str(error).endswith("expected, but not set"):
                raise
            raise ValueError(
                f"{error}. torchrun sets it: `torchrun --nproc-per-node 2 train.py` starts two ranks. One process alone, as in a REPL or a "
                'notebook, first calls torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
            ) from None
