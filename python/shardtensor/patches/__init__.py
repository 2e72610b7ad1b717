"""Changes inside torch for ShardTensors, one file per part of torch. `_table.py` joins their entries; `_patch.py` says what an entry
is, and makes it. docs/patches.md lists them."""

from __future__ import annotations

from shardtensor._late import at_first_use
from shardtensor.patches import _patch, ending, flops


def install() -> None:
    """Called once, at import. Makes the few patches that cannot wait; the others are made at the first use of shardtensor."""
    _patch.make(patch for patch in (*ending.PATCHES, *flops.PATCHES) if patch.at_import)
    at_first_use(_make_all)


def _make_all() -> None:
    from shardtensor.patches import _table  # noqa: PLC0415  slow, and not needed before

    _patch.make(_table.PATCHES)
    _patch.replace_in_importers()
