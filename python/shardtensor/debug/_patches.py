"""What shardtensor changes inside torch."""

from __future__ import annotations

from typing import NamedTuple

from shardtensor.patches import _patch, _table


class Change(NamedTuple):
    """One attribute of torch that shardtensor replaces, or one of torch's tables to which it adds."""

    name: str  # with its module
    state: str
    why: str


class Changes(tuple[Change, ...]):
    """All of them; as text, a table of names and states."""

    def __str__(self) -> str:
        width = max(len(change.name) for change in self)
        return "\n".join(f"{change.name.ljust(width)}  {change.state}" for change in self)


def patches() -> Changes:
    """What shardtensor replaces inside torch, and what has become of each change in this process: `print(shardtensor.debug.patches())`.

    States: made; waits for the first use of shardtensor, or for the import of a module; not needed by this version of torch;
    missing, because torch has no such attribute. docs/patches.md says why each is needed.
    """
    return Changes(Change(patch.path, _patch.state(patch), patch.why) for patch in _table.PATCHES)
