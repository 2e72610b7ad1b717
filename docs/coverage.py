"""Writes docs/coverage.md: which ops have a sharding rule, which gather and which are refused, from the extension's registry.

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

from pages import write_or_check  # noqa: E402
from shardtensor import _C  # noqa: E402

PAGE = HERE / "coverage.md"
HEAD = """# What each op does

Written by `python docs/coverage.py` from the tables at the end of the files in `csrc/rules/ops/`; do not edit.

An op either has a rule, by which it runs on the pieces, or it gathers its inputs on every rank, or it is refused. In-place and
`out=` forms are counted with their op.
"""

KINDS = {
    "rule": """# Ops with a sharding rule

They communicate only where their inputs are cut along a dim that the op needs whole.
""",
    "gathers": """# Ops that gather

They need all of their inputs on every rank, as does each op that is not on this page and does not decompose into ops that are. The
result is right, and slow. A warning says so once for each op and layouts ([debugging.md](debugging.md)), and under
`shardtensor.strict_mode()` the call raises.
""",
    "refused": """# Ops that are refused

They cannot be done on pieces. Their errors say why, and what to do.
""",
}


def families(kind: str) -> dict[str, list[str]]:
    """{family: names of ops, forms and overloads folded}."""
    out: dict[str, set[str]] = {}
    for op, (family, of_kind) in _C.rules().items():
        name = op.split(".")[0]
        name = name if name.startswith("__") or not name.endswith("_") else name[:-1]
        if of_kind == kind:
            out.setdefault(family, set()).add(name)
    return {family: sorted(names) for family, names in sorted(out.items())}


def page() -> str:
    parts = [HEAD]
    for kind, head in KINDS.items():
        parts.append(head)
        for family, names in families(kind).items():
            parts.append(f"## {family} ({len(names)})\n\n" + ", ".join(f"`{n}`" for n in names) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
