"""Models of libraries, unmodified, in parallel: equal to one process. Skipped where a model's library is not installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_zoo import MODELS
from models import WAYS, runs

OLDEST = {"transformers": "5.24"}
RUN = re.compile(r"\d+(?: to \d+)?")
PAGE = Path(__file__).parents[2] / "docs/models.md"


def case(name, way, world, then):
    return pytest.param(name, way, world, then, id=f"{name}-{way.function.__name__}-{world}" + (f"-{then}" if then else ""))


@pytest.mark.parametrize(("name", "way", "world", "then"), [case(*run) for run in runs()])
def test_equal_to_one_process(pools, tmp_path, name, way, world, then):
    library = MODELS[name].library
    pytest.importorskip(library, minversion=OLDEST.get(library))
    way.run(pools, name, world, then, tmp_path)


def test_all_are_on_the_page():
    """With every run that is tested here. `python docs/models.py --check` runs them and compares the whole page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    title, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert title[2:-1] == [way.title for way in WAYS]
    want = {(m.name, m.library): [len(way.ranks) if way.suits(m) else 0 for way in WAYS] for m in MODELS.values()}
    assert {(name, library): [len(RUN.findall(cell)) for cell in cells] for name, library, *cells, _ in rows} == want
