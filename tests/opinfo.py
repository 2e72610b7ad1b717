"""torch's own op database on ShardTensors: every op, its own samples, each tensor argument replicated or sharded.

`python tests/opinfo.py [--world 3] [names...]` prints one line per op that is not right and a summary.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

SAMPLES = 5  # of an op's sample inputs, spread over the list
CONFIGURATIONS = 10  # layouts per sample

# Not a function of its inputs alone, or about memory that a ShardTensor does not have.
NOT_COMPARABLE = {
    "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "bernoulli", "normal", "rand_like",
    "randn_like", "randint_like", "multinomial", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "uniform", "cauchy", "exponential", "geometric", "log_normal", "randn", "randint", "rand",
    "torch.ops.aten._safe_softmax.default", "resize_", "resize_as_", "nn.functional.multi_head_attention_forward", "svd_lowrank",
    "pca_lowrank", "normal.in_place", "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.feature_alpha_dropout.without_train", "normal.number_mean", "nn.functional.scaled_dot_product_attention.dropout",
}  # fmt: skip


def _key(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {_key(op): op for op in op_db}


def _spread(items: list[Any], n: int) -> list[Any]:
    return items if len(items) <= n else [items[i * len(items) // n] for i in range(n)]


def _layouts(tensors: list[Any], seed: str) -> list[list[tuple[str, str]]]:
    from oracle import EMPTY, EVEN, UNEVEN

    options = [[("R", EVEN), *((f"S({d})", cut) for d in range(t.ndim) for cut in (EVEN, UNEVEN, EMPTY))] for t in tensors]
    total = 1
    for o in options:
        total *= len(o)
    if total <= CONFIGURATIONS:
        return [list(c) for c in itertools.product(*options)]
    rng = random.Random(seed)
    out = [[rng.choice(o) for o in options] for _ in range(CONFIGURATIONS - 1)]
    return [[o[-1] for o in options], *out]


def run_op(name: str) -> tuple[str, str]:
    """On every rank: 'right', 'unsupported', 'wrong' or 'error', with what was seen."""
    import shardtensor as st
    import torch
    import torch.distributed as dist
    import torch.utils._pytree as pytree
    from oracle import check_backward, compare, mesh_of, place

    op = database()[name]
    mesh = mesh_of((dist.get_world_size(),))
    dtypes = op.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128) if d in dtypes), None)
    if dtype is None:
        return "unsupported", "no dtype to try"
    torch.manual_seed(0)
    random.seed(0)
    differentiable = op.supports_autograd and dtype.is_floating_point
    drawn = [s for s in op.sample_inputs("cpu", dtype, requires_grad=differentiable) if not s.kwargs.get("dropout_p")]
    samples = _spread(drawn, SAMPLES)
    unsupported = ""
    st.set_promotion_mode("replicate")
    try:
        for number, sample in enumerate(samples):
            flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            where = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
            for layouts in _layouts([flat[i] for i in where], f"{name} {number}"):
                what = f"{name}: sample {number} " + " ".join(f"{tuple(flat[i].shape)} {p} {c}" for i, (p, c) in zip(where, layouts, strict=True))
                plain, ours = list(flat), list(flat)
                for i, (placement, cut) in zip(where, layouts, strict=True):
                    plain[i] = flat[i].detach().clone().requires_grad_(flat[i].requires_grad)
                    ours[i] = place(flat[i].detach(), mesh, (placement,), cut).requires_grad_(flat[i].requires_grad)
                x, args, kwargs = pytree.tree_unflatten(plain, tree)
                try:
                    torch.manual_seed(1)
                    want = op.op(x, *args, **kwargs)
                except Exception:
                    continue
                x, args, kwargs = pytree.tree_unflatten(ours, tree)
                try:
                    torch.manual_seed(1)
                    got = op.op(x, *args, **kwargs)
                    compare(got, want, 1e-6, what)
                    if differentiable:
                        check_backward([plain[i] for i in where], [ours[i] for i in where], want, got, mesh, 1e-6, what)
                except NotImplementedError as error:
                    unsupported = f"{what}: {error}"
                except AssertionError as error:
                    kind = "unsupported" if "NotImplementedError" in str(error) else "error" if "backward:" in str(error) else "wrong"
                    if kind == "unsupported":
                        unsupported = str(error)
                        continue
                    return kind, str(error)
                except Exception as error:
                    return "error", f"{what}: {type(error).__name__}: {error}"
    finally:
        st.set_promotion_mode("error")
    return ("unsupported", unsupported) if unsupported else ("right", "")


def main() -> None:
    import argparse
    from collections import Counter

    from pool import Pool, RankError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    pool = Pool(options.world)
    counts: Counter[str] = Counter()
    names = options.names or list(database())
    for name in names:
        if name in NOT_COMPARABLE:
            counts["not comparable"] += 1
            continue
        try:
            kinds = pool.run("opinfo:run_op", name, seconds=100)
            kind, text = max(kinds, key=lambda k: ["right", "unsupported", "error", "wrong"].index(k[0]))
        except RankError as error:
            kind, text = "out of step", str(error)[-600:]
        if kind == "error":
            pool.stop()  # an error of one rank alone leaves the others waiting
        counts[kind] += 1
        if kind != "right":
            print(f"{kind:12s} {name}: {' '.join(text.split())[:400]}", flush=True)
    print(dict(counts))
    pool.stop()


if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/", 1)[0])
    main()
