from __future__ import annotations

from typing import Any

import pytest
import shardtensor as st
import torch
import torch.nn.functional as F
from oracle import MESHES, case, ints, mesh_id, mesh_of, place, positive, run_on
from pool import on_ranks
from shardtensor import _C

REDUCTIONS = ("none", "mean", "sum")


def signs(*sizes: int) -> Any:
    return lambda g: torch.randint(0, 2, sizes, generator=g).to(torch.float64) * 2 - 1


def targets(high: int, *sizes: int, ignored: int = -100) -> Any:
    """Classes, a third of them ignored."""

    def make(g: torch.Generator) -> torch.Tensor:
        t = torch.randint(0, high, sizes, generator=g)
        return torch.where(torch.rand(sizes, generator=g) < 0.3, ignored, t)

    return make


def each_reduction(name: str, function: Any, *arguments: Any, **options: Any) -> list[Any]:
    def bind(reduction: str) -> Any:
        return lambda *a: function(*a, reduction=reduction)

    return [case(f"{name}_{r}", bind(r), *arguments, **options) for r in REDUCTIONS]


INPUTS, TARGETS = (6, 5, 3, 6, 2), (3, 2, 0, 1, 3)  # the lengths of five samples


def ctc(joined: bool, as_tensors: bool) -> list[Any]:
    """The batch may be cut; joined targets stay whole, and so do their lengths. One sample's input is too short for its target."""

    def bind(reduction: str) -> Any:
        def loss(x: Any, t: Any, inputs: Any = INPUTS, targets: Any = TARGETS) -> Any:
            return F.ctc_loss(x.log_softmax(-1), t, inputs, targets, reduction=reduction, zero_infinity=True)

        return loss

    def quiet(x: str, targets: str, *lengths: str) -> bool:
        alike = {("R", "R"), ("S(1)", "S(0)"), ("S(1)", "R")}
        whole = [targets, *lengths[1:]] if joined else []
        cut = lengths[:1] if joined else [targets, *lengths]
        return all(set(p.split()) == {"R"} for p in whole) and set(x.split()) <= {"R", "S(1)"} and all(
            set(zip(x.split(), p.split(), strict=True)) <= alike for p in cut
        )

    sizes = (sum(TARGETS),) if joined else (5, 3)
    lengths = [lambda g: torch.tensor(INPUTS), lambda g: torch.tensor(TARGETS)] if as_tensors else []
    name = "ctc_loss" + "_joined" * joined + "_tensors" * as_tensors
    return [
        case(f"{name}_{r}", bind(r), (6, 5, 4), lambda g: torch.randint(1, 4, sizes, generator=g), *lengths, quiet=quiet, cut_alike=True)
        for r in REDUCTIONS
    ]


CASES = [
    *each_reduction("mse_loss", F.mse_loss, (5, 4), (5, 4)),
    *each_reduction("l1_loss", F.l1_loss, (5, 4), (5, 4)),
    *each_reduction("smooth_l1_loss", lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.7, reduction=reduction), (5, 4), (5, 4)),
    *each_reduction("huber_loss", lambda x, y, reduction: F.huber_loss(x, y, delta=0.7, reduction=reduction), (5, 4), (5, 4)),
    *each_reduction("soft_margin_loss", lambda x, y, reduction: F.soft_margin_loss(x, y.detach(), reduction=reduction), (5, 4), signs(5, 4), partial=False),
    *each_reduction(
        "binary_cross_entropy",
        lambda x, y, w, reduction: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y), w.detach(), reduction=reduction),
        (5, 4), (5, 4), positive(4),
    ),
    *each_reduction(
        "binary_cross_entropy_with_logits",
        lambda x, y, w, reduction: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y), w.detach(), reduction=reduction),
        (5, 4), (5, 4), positive(5, 4),
    ),
    *each_reduction(
        "binary_cross_entropy_pos_weight",
        lambda x, y, w, reduction: F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=w.detach(), reduction=reduction),
        (5, 4), positive(5, 4), positive(4),
    ),
    *each_reduction("kl_div", lambda x, y, reduction: F.kl_div(x, torch.sigmoid(y), reduction=reduction), (5, 4), (5, 4)),
    case("kl_div_batchmean", lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), (5, 4), (5, 4)),
    *each_reduction("hinge_embedding_loss", F.hinge_embedding_loss, (5, 4), signs(5, 4), partial=False),
    *each_reduction("margin_ranking_loss", F.margin_ranking_loss, (6,), (6,), signs(6), partial=False),
    *each_reduction("cosine_embedding_loss", F.cosine_embedding_loss, (5, 4), (5, 4), signs(5), partial=False),
    *each_reduction("triplet_margin_loss", F.triplet_margin_loss, (5, 4), (5, 4), (5, 4)),
    *each_reduction("poisson_nll_loss", F.poisson_nll_loss, (5, 4), positive(5, 4)),
    *each_reduction("gaussian_nll_loss", F.gaussian_nll_loss, (5, 4), (5, 4), positive(5, 4)),
    *each_reduction("multi_margin_loss", F.multi_margin_loss, (5, 4), ints(4, 5)),
    *each_reduction(
        "multi_margin_weight", lambda x, t, w, reduction: F.multi_margin_loss(x, t, weight=w.detach(), reduction=reduction),
        (5, 4), ints(4, 5), positive(4),
    ),
    *each_reduction("multi_margin_one", F.multi_margin_loss, (4,), ints(4, 1)),
    *each_reduction("multilabel_margin_loss", F.multilabel_margin_loss, (5, 4), ints(4, 5, 4)),
    *each_reduction("multilabel_margin_one", F.multilabel_margin_loss, (4,), ints(4, 4)),
    *each_reduction("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, (5, 4), positive(5, 4)),
    # nll_loss and losses built on it
    *each_reduction("nll_loss", F.nll_loss, (5, 4), targets(4, 5)),
    *each_reduction("nll_loss_weight", lambda x, t, w, reduction: F.nll_loss(x, t, w.detach(), reduction=reduction),
                    (5, 4), targets(4, 5), positive(4)),
    *each_reduction("nll_loss_ignore", lambda x, t, reduction: F.nll_loss(x, t, ignore_index=2, reduction=reduction),
                    (5, 4), ints(4, 5)),
    *each_reduction("nll_loss_one", F.nll_loss, (4,), ints(4)),
    *each_reduction("nll_loss2d", F.nll_loss, (3, 4, 2, 3), targets(4, 3, 2, 3)),
    *each_reduction("nll_loss2d_weight", lambda x, t, w, reduction: F.nll_loss(x, t, w.detach(), reduction=reduction),
                    (3, 4, 2, 3), targets(4, 3, 2, 3), positive(4)),
    *each_reduction("nll_loss_3d", F.nll_loss, (3, 4, 2), targets(4, 3, 2)),
    *each_reduction("cross_entropy", F.cross_entropy, (5, 4), targets(4, 5)),
    *each_reduction("cross_entropy_one", F.cross_entropy, (4,), ints(4)),
    *each_reduction("cross_entropy_2d", F.cross_entropy, (3, 4, 2, 2), targets(4, 3, 2, 2)),
    *each_reduction(
        "cross_entropy_smoothed",
        lambda x, t, w, reduction: F.cross_entropy(x, t, w.detach(), label_smoothing=0.2, reduction=reduction),
        (5, 4), targets(4, 5), positive(4),
    ),
    *each_reduction("cross_entropy_smoothed_plain", lambda x, t, reduction: F.cross_entropy(x, t, label_smoothing=0.2, reduction=reduction),
                    (5, 4), targets(4, 5)),
    *each_reduction(
        "cross_entropy_probabilities",
        lambda x, t, reduction: F.cross_entropy(x, torch.sigmoid(t), label_smoothing=0.1, reduction=reduction),
        (5, 4), (5, 4),
    ),
    case("cross_entropy_all_ignored", lambda x, t: F.cross_entropy(x, t.fill_(-100)), (5, 4), ints(4, 5), limit=20),
    *ctc(False, False), *ctc(False, True), *ctc(True, False), *ctc(True, True),
    case("ctc_loss_one", lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (6,), (3,)), (6, 4), lambda g: torch.tensor([1, 3, 2]), limit=20),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


# ---- what is sent ----


def sent(loss: str, reduction: str, placement: str, cut: str) -> Any:
    """Forward's and backward's collectives and bytes, with sharded logits and everything else replicated."""
    mesh = mesh_of((3,))
    g = torch.Generator().manual_seed(1)
    x = place(torch.randn(32, 48, generator=g), mesh, (placement,), cut).requires_grad_()
    if loss == "nll_loss":
        target = torch.randint(0, 48, (32,), generator=g)
        call = lambda: F.nll_loss(x, target_there, reduction=reduction)  # noqa: E731
    else:
        target = torch.randn(32, 48, generator=g)
        call = lambda: getattr(F, loss)(x, target_there, reduction=reduction)  # noqa: E731
    target_there = place(target, mesh, ("R",), "even")
    _C.reset_comm_counts()
    out = call()
    forward = _C.comm_counts()
    seed = place(torch.ones(out.shape), mesh, ("R",), "even")
    _C.reset_comm_counts()
    (grad,) = torch.autograd.grad(out, x, seed)
    assert isinstance(grad, st.ShardTensor) and grad._layout == x._layout
    return forward, _C.comm_counts()


@pytest.mark.parametrize("cut", ["even", "uneven", "empty"])
@pytest.mark.parametrize("placement", ["S(0)", "S(1)"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "nll_loss"])
def test_logits_stay_where_they_are(pools, loss, reduction, placement, cut):
    for forward, backward in pools(3).run(sent, loss, reduction, placement, cut):
        assert not backward
        if loss == "nll_loss" and reduction == "mean":
            assert forward == {"all_reduce": (1, 4)}  # the total weight
        else:
            assert not forward


# ---- targets out of range ----


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("placement", ["S(1)", "R"])
@on_ranks(3)
def test_target_out_of_range(placement, two_d):
    sizes = (4, 6, 2, 2) if two_d else (4, 6)
    x = place(torch.randn(sizes, dtype=torch.float64), mesh_of((3,)), (placement,), "empty").requires_grad_()
    for bad in (6, -1):
        target = torch.full((4, 2, 2) if two_d else (4,), bad)
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            F.nll_loss(x, place(target, mesh_of((3,)), ("R",), "even"), reduction="none")
