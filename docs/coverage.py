"""Writes docs/coverage.md: which ops have a sharding rule, by family, from the extension's registry.

python docs/coverage.py           writes the page
python docs/coverage.py --check   fails where the page is not what would be written
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
if importlib.util.find_spec("shardtensor") is None:
    sys.path.insert(0, str(HERE.parent / "python"))

from shardtensor import _C  # noqa: E402

PAGE = HERE / "coverage.md"
HEAD = """# Ops with a sharding rule

Written by `python docs/coverage.py` from the tables at the end of the files in `csrc/rules/`; do not edit.

An op that is not here, and does not decompose into ops that are, has its inputs gathered on every rank: right, slow, and
logged by the logger `shardtensor`. Under `shardtensor.strict_mode()` it raises instead. In-place and `out=` forms are counted
with their op.
"""


def families() -> dict[str, list[str]]:
    """{family: names of ops, forms and overloads folded}."""
    out: dict[str, set[str]] = {}
    for op, family in _C.rules().items():
        name = op.split(".")[0]
        name = name if name.startswith("__") or not name.endswith("_") else name[:-1]
        out.setdefault(family, set()).add(name)
    return {family: sorted(names) for family, names in sorted(out.items())}


def page() -> str:
    parts = [HEAD]
    for family, names in families().items():
        parts.append(f"## {family} ({len(names)})\n\n" + ", ".join(f"`{n}`" for n in names) + "\n")
    return "\n".join(parts)


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if not PAGE.exists() or PAGE.read_text() != text:
        print("docs/coverage.md is out of date: run `python docs/coverage.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
