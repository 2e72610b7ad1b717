"""Writes docs/patches.md: what shardtensor changes inside torch, when and why, from the table in python/shardtensor/patches/.

python docs/patches.py           writes the page
python docs/patches.py --check   fails where the page is not what would be written
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
if importlib.util.find_spec("shardtensor") is None:
    sys.path.insert(0, str(HERE.parent / "python"))

from pages import write_or_check  # noqa: E402
from shardtensor.patches._patch import Patch  # noqa: E402
from shardtensor.patches._table import PATCHES  # noqa: E402

PAGE = HERE / "patches.md"
HEAD = """# What shardtensor changes inside torch

Written by `python docs/patches.py` from the table `PATCHES` in `python/shardtensor/patches/`; do not edit.

Some functions of torch know DTensor, and would take a ShardTensor for one that is cut evenly; others know neither. They are
replaced, mostly by a function that calls torch's own unless it is given a ShardTensor.

`import shardtensor` replaces only what the first table lists. Everything else waits for the first use of shardtensor: the first
mesh (of `shardtensor.init_device_mesh` or of a ShardTensor), ShardedTensor or LocalShardsWrapper, or `replace_dtensor()`. What
belongs to a module of torch that has not been imported then (compile, FSDP, checkpoints, pipelining) is replaced after its import.
A program that has none of these runs torch's own functions. `print(shardtensor.debug.patches())` shows the state of each change in
a process.

If torch has no attribute of the name, one policy holds. Where the column "If torch lacks it" says "raises", the change is required:
its first use raises an error that names the attribute and torch's version. Elsewhere a warning or an error says what the column
says. "Ask upstream for" is what torch would need, so that the change could go.
"""


def table(patches: list[Patch]) -> str:
    rows = ["| replaced | why | if torch lacks it | ask upstream for |", "|---|---|---|---|"]
    for patch in patches:
        versions = (f", since torch {patch.since}" if patch.since != "2.11" else "") + (f", until torch {patch.until}" if patch.until else "")
        name = f"`{patch.path}`{'' if patch.name else ' (added to)'}{versions}"
        cells = (name, patch.why, patch.without or "raises", patch.ask)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    parts = [HEAD, "## At import\n", table([patch for patch in PATCHES if patch.at_import])]
    files: dict[str, list[Patch]] = {}
    for patch in PATCHES:
        if not patch.at_import:
            files.setdefault(patch.wrap.__module__.split(".")[-1], []).append(patch)
    for file, patches in files.items():
        parts += [f"## {file}.py\n", table(patches)]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
