"""Trains and saves. Then it resumes on another number of ranks, with the same losses as an uninterrupted run.

    torchrun --nproc-per-node 3 examples/checkpoint_resume.py --steps 50 --folder checkpoint
    torchrun --nproc-per-node 2 examples/checkpoint_resume.py --steps 50 --folder checkpoint

The model is train_transformer.py's, cut by tensor_parallel.py's plan. A checkpoint has the pieces as the ranks held them; who
loads it says how it wants them cut by the tensors that it gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from shardtensor import init_device_mesh
from shardtensor.parallel import parallelize_module
from tensor_parallel import losses_of, plan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from train_transformer import build, fit, run


def train(
    device: str,
    *,
    folder: Path,
    context: int = 24,
    rate: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    steps: int = 100,
    **arguments,
) -> list[float]:
    """The losses of the steps that follow the checkpoint in `folder`."""
    model, data = build(context, dtype, backend)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    parallelize_module(model.to(device), mesh, plan(model.blocks[0].attention.head_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    done = 0
    if (folder / ".metadata").exists():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "steps": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        done = state["steps"]

    losses = fit(losses_of(model, device), optimizer, data, context=context, first=done, steps=steps, **arguments)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "steps": done + steps}, checkpoint_id=folder)
    return losses


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--folder", type=Path, default=Path("checkpoint"))
    run(train, __doc__, arguments)
