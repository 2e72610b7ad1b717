"""torch.save. All versions.

It writes this rank's pieces, without communication. If all ranks save, each to a file of its own, nothing is lost; if one rank
saves, or all save to one file, most of the model is. Which of these happens cannot be known here, but a file for one rank's pieces
has the rank in its name.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardtensor.patches._patch import Patch
from shardtensor.tensor._tensor import pieces_saved


def _names_rank(path: str, rank: int) -> bool:
    """Whether the file's or its folder's name has the rank's number."""
    return re.search(rf"(?<!\d)0*{rank}(?!\d)", "/".join(path.split(os.sep)[-2:])) is not None


def _path_of(f: Any) -> str | None:
    """None: memory, which may be on its way to anywhere."""
    path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else None


def _warned(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def run(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        saved: list[str] = []
        token = pieces_saved.set(saved)
        try:
            save(obj, f, *args, **kwargs)
        finally:
            pieces_saved.reset(token)
        path = _path_of(f)
        if not saved or path is None or not dist.is_initialized() or _names_rank(path, dist.get_rank()):
            return
        warnings.warn(
            f"torch.save: {path!r} has only this rank's pieces of {len(saved)} ShardTensor{'s'[: len(saved) > 1]} (the first: {saved[0]}). For "
            "whole tensors, call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)) on all ranks (or t.full_tensor() for each), then torch.save on one. Or use "
            "torch.distributed.checkpoint.save on all ranks. If each rank saves its own pieces, put the rank into the file's name "
            f"(rank {dist.get_rank()})",
            stacklevel=2,
        )

    return run


PATCHES = tuple(
    Patch(
        module,
        "save",
        _warned,
        why="a file gets only this rank's pieces, of which a warning tells.",
        ask="a hook of torch.save that sees the path and what was pickled",
        without="torch.save writes only this rank's pieces, without a warning.",
        by_name=True,
    )
    for module in ("torch.serialization", "torch")
)
