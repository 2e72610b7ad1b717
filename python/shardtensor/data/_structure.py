"""The tensors of a batch, and the containers around them: dicts, lists, tuples, dataclasses, and what torch's pytree knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Hole:
    """Stands for a tensor of a batch."""

    index: int


def replaced(change: Callable[[str, Any], Any], thing: Any, path: str = "") -> Any:
    """`thing` with change(path, tensor) in place of each tensor or Hole. A container without any is not copied."""
    if isinstance(thing, (torch.Tensor, Hole)):
        return change(path, thing)
    parts = _parts(thing)
    new = {key: replaced(change, part, f"{path}.{key}" if path else str(key)) for key, part in parts.items()}
    return thing if all(new[key] is parts[key] for key in parts) else _rebuilt(thing, new)


def take_apart(batch: Any) -> tuple[Any, list[str], list[torch.Tensor]]:
    """The batch with Holes instead of its tensors, the tensors' paths, and the tensors. One without dims has no rows: it stays."""
    paths: list[str] = []
    tensors: list[torch.Tensor] = []

    def take(path: str, t: torch.Tensor) -> Any:
        if t.ndim == 0:
            return t
        paths.append(path)
        tensors.append(t)
        return Hole(len(tensors) - 1)

    return replaced(take, batch), paths, tensors


def put_together(frame: Any, tensors: list[Any]) -> Any:
    return replaced(lambda _, hole: tensors[hole.index] if isinstance(hole, Hole) else hole, frame)


def without_rows(frame: Any, rows: int) -> Any:
    """The frame of an empty batch: a list that has an entry for each of the `rows`, such as names, becomes empty."""
    if isinstance(frame, list) and len(frame) == rows and all(not _parts(x) and not isinstance(x, (Hole, torch.Tensor)) for x in frame):
        return []
    parts = _parts(frame)
    new = {key: without_rows(part, rows) for key, part in parts.items()}
    return frame if all(new[key] is parts[key] for key in parts) else _rebuilt(frame, new)


def _parts(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, (list, tuple)):
        return dict(enumerate(thing))
    if type(thing) is not dict and type(thing) in pytree.SUPPORTED_NODES:
        return dict(enumerate(_one_level(thing)[0]))
    if isinstance(thing, Mapping):
        return dict(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if hasattr(thing, f.name)}
    return {}


def _rebuilt(thing: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*parts.values())
    if isinstance(thing, (list, tuple)):
        return type(thing)(parts.values())  # type: ignore[call-arg]
    if type(thing) is dict:
        return parts
    if type(thing) in pytree.SUPPORTED_NODES:
        return pytree.tree_unflatten(list(parts.values()), _one_level(thing)[1])
    if isinstance(thing, MutableMapping):
        clone = copy.copy(thing)
        clone.update(parts)
        return clone
    if isinstance(thing, Mapping):
        return type(thing)(parts)  # type: ignore[call-arg]
    clone = copy.copy(thing)
    for name, value in parts.items():
        object.__setattr__(clone, name, value)  # frozen dataclasses too
    return clone


def _one_level(thing: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(thing, is_leaf=lambda part: part is not thing)
