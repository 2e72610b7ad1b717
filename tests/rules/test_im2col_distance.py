from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, case, ints, mesh_id, run_on
from test_matmul import batch_sharded

LIMIT = 15


def alike(*placements):
    """All cut on the batch, or none."""
    return len(set(placements)) == 1 and set(placements[0].split()) <= {"R", "S(0)"}


def together(name, function, *sizes, **options):
    return case(name, function, *sizes, quiet=alike, cut_alike=True, limit=LIMIT, **options)


CASES = [
    case("unfold", lambda x: F.unfold(x, 2), (4, 2, 3, 3), quiet=batch_sharded(0), limit=LIMIT),
    case("fold", lambda x: F.fold(x, (3, 3), 2), (4, 8, 4), quiet=batch_sharded(0), limit=LIMIT),
    together("cdist", torch.cdist, (4, 3, 2), (4, 5, 2)),
    case("cdist_rows", torch.cdist, (5, 2), (3, 2), quiet=batch_sharded(0), limit=LIMIT),
    case("cdist_1", lambda x, y: torch.cdist(x, y, p=1), (4, 3, 2), (4, 5, 2), quiet=alike, cut_alike=True, limit=LIMIT),
    *(case(f"pdist_{p}", lambda x, p=p: torch.pdist(x, p), (5, 4), quiet=lambda x: set(x.split()) <= {"R", "S(1)"}, limit=LIMIT)
      for p in (0, 0.5, 1, 2, 3, float("inf"))),
    case("bilinear", F.bilinear, (5, 2), (5, 3), (4, 2, 3), (4,), quiet=lambda x, y, *w: alike(x, y) and {*w} <= {"R", "R R"},
         cut_alike=True, limit=LIMIT),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (3, 4, 2, 2), quiet=batch_sharded(0, 2, 3), limit=LIMIT),
    case("channel_shuffle_of_one", lambda x: F.channel_shuffle(x, 1), (3, 4, 2, 2), quiet=batch_sharded(0, 2, 3), limit=LIMIT),
    case("isin", torch.isin, ints(9, 5, 2), ints(9, 3), backward=False, quiet=batch_sharded(0, 1), limit=LIMIT),
    case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (5, 3), (5, 1), limit=LIMIT,
         quiet=alike, cut_alike=True, partial=False),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
