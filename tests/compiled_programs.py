"""Random programs (programs.py) under torch.compile: runs each again as one graph and compares its tensors and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from programs import Program

# Ops that cannot be in a graph, because what they do depends on values (for cov in torch too). And unfold: if its
# result is written, torch's graph zeroes what lies between the windows. And index_put with an index without dims, whose
# gradient has another shape in torch's graphs.
NOT_TRACED = {"cov", "index_put_two", "masked", "masked_select", "nonzero", "unique", "mask_set", "unfold"}
# Errors that compiling may raise, on all ranks: for a mask without dims, as in torch; and for a leaf whose sizes change in place,
# which torch does not trace.
REFUSED = ["data-dependent expression", "mutate the input tensor's metadata"]


def as_function(program: Program) -> Callable[..., list[torch.Tensor]]:
    """A function from the leaves to copies of the tensors alive at the end. (Copies, because several may share memory.)"""
    steps, living = tuple(program.steps), tuple(program.numbers)

    def run(*leaves: torch.Tensor) -> list[torch.Tensor]:
        values = dict(enumerate(leaves))
        for step in steps:
            out = step.run(*(values[k] for k in step.numbers))
            if step.makes is not None:
                values[step.makes] = out
        return [values[k].clone() for k in living]

    return run


def compare(program: Program, backend: str, dynamic: bool) -> None:
    """Compares with plain torch, whose tensors the program has kept; with symbols for sizes if `dynamic`. Skips a program whose
    gradients torch refuses."""
    if program.without_gradients:
        return
    torch._dynamo.reset()
    leaves = [make() for make in program.makers]
    program.lines.append("compiled")
    compiled = torch.compile(as_function(program), backend=backend, fullgraph=True)
    for leaf in leaves if dynamic else ():
        for d in range(leaf.ndim):
            torch._dynamo.maybe_mark_dynamic(leaf, d)
    got = program.together("compiled", lambda: compiled(*leaves), *REFUSED)
    if isinstance(got, Exception):
        if any(text in str(got) for text in REFUSED):
            return
        raise got
    for number, ours, plain in zip(program.numbers, got, program.plain, strict=True):
        _close(program, ours.detach().full_tensor(), plain.detach(), f"tensor {number}")
        if number < len(leaves):  # written in place
            _close(program, leaves[number].detach().full_tensor(), plain.detach(), f"leaf {number}")
    if program.grad:
        _gradients(program, leaves, got)


def _gradients(program: Program, leaves: list[Any], got: list[Any]) -> None:
    from oracle import place

    results = [(o, p) for o, p in zip(got, program.plain, strict=True) if p.requires_grad and p.is_floating_point()]
    if not results:
        return
    ours, plain = zip(*results, strict=True)
    seeds = [torch.randn(p.shape, generator=program.generator, dtype=p.dtype) for p in plain]
    placed = [place(s, program.mesh, ("R",) * program.mesh.ndim, "even") for s in seeds]
    plain_leaves = [leaf for leaf, _ in program.leaves]
    want = torch.autograd.grad(plain, plain_leaves, seeds, allow_unused=True)
    for k, (g, w) in enumerate(zip(torch.autograd.grad(ours, leaves, placed, allow_unused=True), want, strict=True)):
        # A graph gives zeros for a leaf that nothing depends on.
        assert g is not None or w is None, f"gradient {k} is missing"
        if g is not None:
            _close(program, g.full_tensor(), torch.zeros_like(g.full_tensor()) if w is None else w, f"gradient {k}")


def _close(program: Program, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    tolerance = program.tolerance
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"compiled, {what}: {m}")
