"""What the scripts that write a page of docs/ share."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, text: str) -> int:
    """Writes the page; with --check, only compares. The exit status: 1 if they differ."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    if not page.exists() or page.read_text() != text:
        print(f"docs/{page.name} is out of date: run `python docs/{page.stem}.py`", file=sys.stderr)
        return 1
    return 0
