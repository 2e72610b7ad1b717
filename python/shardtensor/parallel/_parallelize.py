"""parallelize_module."""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as stock
from torch.distributed.tensor.parallel import ParallelStyle

from shardtensor.parallel._heads import check_groups, cut_heads
from shardtensor.tensor._ties import ties_kept

_parallelize = stock.parallelize_module
# Calls that have not returned: after replace_dtensor(), torch's function calls this one for submodules.
_calls: list[nn.Module] = []


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies a style to a module, or a plan {pattern of names: style} to its submodules, as torch's does.

    A parameter that several submodules hold stays one parameter. If the plan gives it different placements in two of them, an
    error says so; if the plan leaves out one of them, a warning does. Another warning says so if the plan cuts attention heads. If
    it gives a rank query heads without their key/value heads, an error has a plan that does not (see AttentionHeads).
    """
    _calls.append(module)
    try:
        with ties_kept(module, "parallelize_module") as followed:
            module = _parallelize(module, device_mesh, parallelize_plan, src_data_rank=src_data_rank)
    finally:
        _calls.pop()
    if not _calls:
        check_groups(module)
    for text in () if _calls else cut_heads(module):
        warnings.warn(text, stacklevel=2)
    for named, left_out in followed:
        warnings.warn(
            f"parallelize_module: {named} and {left_out} are one tied parameter, but the plan has a style for the first alone. Now both "
            "are one ShardTensor, and plain inputs of the second will raise: give its module a style with the same placement, call the "
            "model inside shardtensor.implicit_replication(), or untie them first",
            stacklevel=2,
        )
    return module
