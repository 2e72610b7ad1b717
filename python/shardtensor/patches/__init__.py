"""Changes inside torch for ShardTensors, one file per part of torch. Each file names the versions of torch that need it. A part
that is slow to import is changed after its import."""

from __future__ import annotations

from shardtensor._late import when_imported
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
    starting,
    symbols,
)


def install() -> None:
    """Called once."""
    for module in (
        backward,
        cells,
        checkpoints,
        clipping,
        ddp,
        dtensor,
        ending,
        fsdp,
        libraries,
        made_tensors,
        optimizers,
        pipelines,
        saved_tensors,
        saving,
        starting,
    ):
        module.install()
    when_imported("torch._decomp.decompositions", decompositions.patch)
    when_imported("torch._dynamo.variables.builder", dynamic.patch)
    when_imported("torch._functorch._aot_autograd.autograd_cache", caches.patch)
    when_imported("torch._functorch._aot_autograd.graph_capture", capture.patch)
    when_imported("torch._functorch._aot_autograd.graph_compile", capture.patch_caller)
    when_imported("torch._functorch._aot_autograd.runtime_wrappers", runtime.patch)
    when_imported("torch._inductor.utils", inductor.patch)
    when_imported("torch._meta_registrations", meta_kernels.patch)
    when_imported("torch._functorch.partitioners", partitioners.patch)
    when_imported("torch.distributed.tensor.parallel.ddp", ddp.patch)
    when_imported("torch.fx.experimental.proxy_tensor", symbols.patch)
    when_imported("torch.utils.flop_counter", flops.patch)
