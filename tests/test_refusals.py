"""What torch refuses is refused on all ranks, whatever their pieces: the op database's wrong inputs, and dtypes ops do not take.

An error on one rank alone would leave the others waiting for it.
"""

from __future__ import annotations

import opinfo
import pytest

PARTS = 4
# Composites of several ops that take bools one by one.
BOOLS = ("masked.cumprod", "masked.cumsum", "nn.functional.scaled_dot_product_attention")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [None, "int64", "bool", "complex128"])
def test_on_all_ranks(pools, dtype, part):
    names = sorted(n for n in opinfo.database() if n not in opinfo.BY_VALUE and not (dtype == "bool" and n in BOOLS))[part::PARTS]
    refused = pools(3).run("opinfo:run_refusals", names, 2, dtype, seconds=110)
    assert refused[0] > 80, refused
