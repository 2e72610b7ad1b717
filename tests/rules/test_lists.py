"""Ops on lists of tensors."""

from __future__ import annotations

import pytest
import torch
from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C


@on_ranks((2,), (3,), (2, 2))
def test_foreach_max_and_powsum(shape):
    """Each is a summand: making it sends nothing, however many tensors there are and whether pieces are empty."""
    mesh = mesh_of(shape)
    generator = torch.Generator().manual_seed(3)
    rest = ("R",) * (mesh.ndim - 1)
    plain = [torch.randn(n, 4, generator=generator, dtype=torch.float64) - 5 for n in (5, 1, 7)]
    whole_numbers = [t.mul(10).to(torch.int64) for t in plain]
    makes = [(torch._foreach_max, (), plain), (torch._foreach_max, (), whole_numbers), (torch._foreach_max, (), [t > -5 for t in plain])]
    if hasattr(torch, "_foreach_powsum"):
        makes += [(torch._foreach_powsum, (order,), plain) for order in (2, 0, 1, 3.5)]
        makes += [(torch._foreach_powsum, (2, torch.float64), [t.float() for t in plain])]
    for make, arguments, values in makes:
        for placements in (("S(0)", *rest), ("S(1)", *rest), ("S(0)", "S(1)")[: mesh.ndim]):
            ours = [place(t, mesh, placements, cut) for t, cut in zip(values, (UNEVEN, UNEVEN, EMPTY), strict=True)]
            _C.reset_comm_counts()
            got = make(ours, *arguments)
            assert not _C.comm_counts(), (make.__name__, _C.comm_counts())
            compare(list(got), list(make(values, *arguments)), 1e-9, f"{make.__name__} {arguments} {placements}")
        if values is plain:
            summands = [place(t, mesh, ("P", *rest), "even") for t in values]
            compare(list(make(summands, *arguments)), list(make(values, *arguments)), 1e-9, f"{make.__name__} of summands")
    nothing = place(torch.zeros(0, 4), mesh, ("S(0)", *rest), "even")
    with pytest.raises(RuntimeError, match="empty tensor"):
        torch._foreach_max([nothing])


LISTS = {
    "row": lambda x, y: torch._foreach_sub_([x, x[:, 0]], [y, y[:, 0]]),
    "row_first": lambda x, y: torch._foreach_mul_([x[:, 1], x], [y[:, 1], y]),
    "twice": lambda x, y: torch._foreach_add_([x, x], [y, y]),
    "twice_scalars": lambda x, y: torch._foreach_mul_([x, x, x], [2.0, 3.0, 5.0]),
    "exchanged": lambda x, y: torch._foreach_copy_([x, y], [y, x]),
    "blocks": lambda x, y: torch._foreach_add_([x[:, :2], x[:, 2:]], [y[:, :2], y[:, 2:]]),
    "scalars": lambda x, y: torch._foreach_addcmul_([x, x], [y, y], [y, y], torch.tensor([2.0, 3.0])),
    "read": lambda x, y: torch._foreach_add_([y, x], [x, y]),
}


@on_ranks(2, 3)
def test_entries_of_a_list_that_overlap():
    """Entries of a list are written one after the other, as in torch, whatever moves between them."""
    whole, other = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layouts = [("R", EVEN), ("P", EVEN), *((f"S({d})", cut) for d in range(2) for cut in (EVEN, UNEVEN, EMPTY))]
    for name, write in LISTS.items():
        wants = [whole.clone(), other.clone()]
        write(*wants)
        for at, cut in layouts:
            for its_at, its_cut in layouts:
                x = place(whole, mesh_here(), (at,), cut)
                y = place(other, mesh_here(), (its_at,), its_cut)
                try:
                    write(x, y)
                except RuntimeError as error:  # a column of a matrix that is cut along its columns is a copy
                    assert name in ("row", "row_first", "blocks") and at == "S(1)", (name, at, its_at, error)
                    assert "read after its base tensor was written" in str(error), error
                    continue
                compare([x, y], wants, 1e-12, f"{name} {at} {cut} {its_at} {its_cut}")


@on_ranks(2)
def test_lists_of_numbers_with_one_more_tensor():
    """What the result is wrapped like is read after the op has taken its arguments."""
    numbers = [torch.tensor(v, dtype=torch.float64) for v in (2.0, 3.0, 5.0)]
    *ours, factor = (place(t, mesh_here(), ("R",), EVEN) for t in numbers)
    for other in (factor, numbers[-1]):
        want = [t * 5 for t in numbers[:-1]]
        compare(list(torch._foreach_mul(ours, other)), want, 1e-12, "_foreach_mul")
        written = [t.clone() for t in ours]
        torch._foreach_mul_(written, other)
        compare(written, want, 1e-12, "_foreach_mul_")
