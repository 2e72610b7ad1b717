"""What torch refuses is refused on all ranks, whatever their pieces: the op database's wrong inputs, tensors of
mixed dtypes, and dtypes that ops do not take.

An error on one rank alone would leave the others waiting for it.
"""

from __future__ import annotations

import opinfo
import pytest

PARTS = 4
# We ask a kernel for its dtypes with few elements: too few for the square that these ops need.
SQUARES = ("nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["errors", "mixed", "int64", "bool", "complex128", "float8_e4m3fn", "uint16"])
def test_on_all_ranks(pools, kind, part):
    left_out = SQUARES if kind in ("float8_e4m3fn", "uint16") else ()
    names = sorted(n for n in opinfo.database() if n not in (*opinfo.BY_VALUE, *left_out))[part::PARTS]
    refused = pools(3).run("opinfo:run_refusals", names, 2, kind, seconds=110)
    assert refused[0] > 80, refused
