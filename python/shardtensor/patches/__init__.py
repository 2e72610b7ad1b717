"""What is changed inside torch so that it makes right graphs of ShardTensors, one file per part of torch. Each waits until that part is
imported."""

from __future__ import annotations

from shardtensor._late import when_imported
from shardtensor.patches import caches, capture, decompositions, partitioners, runtime


def install() -> None:
    when_imported("torch._decomp.decompositions", decompositions.patch)
    when_imported("torch._functorch._aot_autograd.autograd_cache", caches.patch)
    when_imported("torch._functorch._aot_autograd.graph_capture", capture.patch)
    when_imported("torch._functorch._aot_autograd.runtime_wrappers", runtime.patch)
    when_imported("torch._functorch.partitioners", partitioners.patch)
