"""torch.distributed.rendezvous: what its error says to do if the process was not started by torchrun. All versions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from shardtensor.patches._once import wrap_once


def _with_a_way_out(from_environment: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(from_environment)
    def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from from_environment(*args, **kwargs)
        except ValueError as error:
            if not str(error).endswith("expected, but not set"):
                raise
            raise ValueError(
                f"{error}. torchrun sets it: `torchrun --nproc-per-node 2 train.py` starts two ranks. One process alone, as in a REPL or a "
                'notebook, first calls torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
            ) from None

    return run


def install() -> None:
    """Wraps the one way of finding the other ranks that reads the environment, once."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name
    wrap_once(rendezvous, "_env_rendezvous_handler", _with_a_way_out)
    rendezvous._rendezvous_handlers["env"] = rendezvous._env_rendezvous_handler
