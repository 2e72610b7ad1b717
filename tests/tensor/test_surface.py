"""Every public name of torch.distributed.tensor and its submodules is here, with the same signature; ours may take more."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import shardtensor
import torch
from shardtensor import ShardTensor
from torch.distributed.tensor import DTensor

MODULES = ["", ".parallel", ".experimental", ".debug", ".placement_types", ".device_mesh"]
METHODS = ["from_local", "to_local", "full_tensor", "redistribute"]
PAGE = Path(__file__).parents[2] / "docs" / "dtensor.md"


def pairs():
    for module in MODULES:
        stock = importlib.import_module(f"torch.distributed.tensor{module}")
        for name in stock.__all__:
            yield module, name, getattr(stock, name)


def takes_the_same(stock, ours):
    theirs, own = (list(inspect.signature(f).parameters.values()) for f in (stock, ours))
    positional = [p for p in theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert [p.name for p in own[: len(positional)]] == [p.name for p in positional]
    by_name = {p.name: p for p in own}
    for p in theirs:
        assert p.name in by_name, p.name
        assert by_name[p.name].kind == p.kind and by_name[p.name].default == p.default, p.name
    for p in own:  # additional parameters must be optional
        assert p.name in {q.name for q in theirs} or p.default is not p.empty, p.name


@pytest.mark.parametrize(("module", "name", "stock"), [pytest.param(*p, id=f"tensor{p[0]}.{p[1]}") for p in pairs()])
def test_name(module, name, stock):
    ours = getattr(importlib.import_module(f"shardtensor{module}"), name, None)
    assert ours is not None
    if stock is DTensor:
        assert ours is shardtensor.ShardTensor
    elif ours is not stock:
        assert name in importlib.import_module(f"shardtensor{module}").__all__
        takes_the_same(stock, ours)


@pytest.mark.parametrize("name", METHODS)
def test_method(name):
    takes_the_same(getattr(DTensor, name), getattr(ShardTensor, name))


def test_page():
    """docs/dtensor.md lists each name once and describes it correctly."""
    if torch.__version__ < "2.15":
        pytest.skip("the page has the names of torch 2.15")
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    said = dict(rows)
    assert len(said) == len(rows)
    methods = {f"DTensor.{name}" for name in vars(DTensor) if not name.startswith("_")}
    assert said.keys() == methods | {name for _, name, _ in pairs()}
    for module, name, stock in pairs():
        ours = getattr(importlib.import_module(f"shardtensor{module}"), name)
        assert said[name] == ("same" if ours is stock else "more"), name

    for name in methods:
        assert getattr(ShardTensor, name.removeprefix("DTensor.")) is not getattr(DTensor, name.removeprefix("DTensor."))
