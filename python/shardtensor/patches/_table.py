"""All changes inside torch."""

from __future__ import annotations

from shardtensor.patches import (
    backward,
    caches,
    capture,
    cells,
    checkpoints,
    clipping,
    ddp,
    decompositions,
    dtensor,
    dynamic,
    ending,
    flops,
    fsdp,
    inductor,
    libraries,
    made_tensors,
    meta_kernels,
    optimizers,
    partitioners,
    pipelines,
    runtime,
    saved_tensors,
    saving,
    symbols,
)
from shardtensor.patches._patch import Patch

_FILES = (
    backward, cells, checkpoints, clipping, ddp, dtensor, ending, fsdp, libraries, made_tensors, optimizers, pipelines, saved_tensors,
    saving, caches, capture, decompositions, dynamic, flops, inductor, meta_kernels, partitioners, runtime, symbols,
)  # fmt: skip
# In the order in which they are made.
PATCHES: tuple[Patch, ...] = tuple(patch for file in _FILES for patch in file.PATCHES)
