"""torch's own op database: every op on its own samples, with argument layouts drawn by a fixed seed.

All ranks do the same: none may wait for another that has raised. On two ranks each sample also runs in checking mode.
"""

from __future__ import annotations

import opinfo
import pytest

# Ops that raise NotImplementedError, and why.
_MEMORY = "a ShardTensor's pieces cannot be given another memory in place"
UNSUPPORTED = {
    "as_strided in place": _MEMORY,
    "as_strided.partial_views in place": _MEMORY,
    "resize_": _MEMORY,
    "resize_ in place": _MEMORY,
    "resize_as_": _MEMORY,
    "resize_as_ in place": _MEMORY,
    "sparse.mm.reduce": "its first argument is sparse",
    "sparse.sampled_addmm": "its first argument is sparse",
    "to_sparse": "its result is sparse",
}

# Ops that are right only under implicit_replication(): torch makes a plain tensor on the way and passes it to an op.
_RANDOM = "the plain tensor is random, so the user must see that the ranks draw the same"
_MASKED = "torch.masked counts with a plain tensor of ones"
PLAIN_INSIDE = {
    "linalg.matrix_power": "the power 0 is a plain identity",
    "masked.mean": _MASKED,
    "masked.std": _MASKED,
    "masked.var": _MASKED,
    "nn.functional.fractional_max_pool2d": _RANDOM,
    "nn.functional.fractional_max_pool3d": _RANDOM,
    "pca_lowrank": _RANDOM,
    "svd_lowrank": _RANDOM,
    "unravel_index": "it divides by a plain tensor of the shape",
}
# Ops that return uninitialized memory, which the checking mode would report as pieces that differ.
UNWRITTEN = {
    "nn.functional.pad.circular": "torch copies the corners before it writes them",
}
OPS = opinfo.database()
WITHOUT_CPU = [name for name, op in OPS.items() if not op.supported_dtypes("cpu")]


def test_lists_name_ops_that_exist():
    names = {name.removesuffix(" in place") for name in UNSUPPORTED} | set(PLAIN_INSIDE) | set(UNWRITTEN) | set(opinfo.NOT_COMPARABLE)
    assert not names - set(OPS)
    assert len(WITHOUT_CPU) < 10


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [name for name in OPS if name not in WITHOUT_CPU])
def test_equals_torch(pools, name, world):
    answers = pools(world).run(opinfo.run_op, name, check=world == 2 and name not in UNWRITTEN)
    right, promoted, unsupported = answers[0]
    assert {(a.right, a.promoted, len(a.unsupported)) for a in answers} == {(right, promoted, len(unsupported))}
    assert not [text for text in unsupported if text.split(": sample")[0] not in UNSUPPORTED or "ShardTensor" not in text]
    assert unsupported if name in UNSUPPORTED else right
    assert not promoted or name in PLAIN_INSIDE


PARTS = 4  # of the database, each one test
# torch's CPU kernels happen to accept some samples of these ops. Here all are refused.
REFUSED_MIXED = {
    "bucketize": "one bool as long as it is alone",
    "searchsorted": "bools as long as there are none",
    "nn.functional.conv3d": "a float32 bias of a float64 convolution",
    "nn.functional.conv_transpose1d": "as conv3d",
    "nn.functional.conv_transpose2d": "as conv3d",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_mixed_dtypes_equal_torch(pools, part):
    names = sorted(OPS.keys() - set(WITHOUT_CPU) - UNSUPPORTED.keys() - REFUSED_MIXED.keys())[part::PARTS]
    outcomes = pools(3).run(opinfo.run_mixed, names, 3, 2, seconds=110)[0]
    assert not [text for o in outcomes for text in o.unsupported]
    assert sum(o.right for o in outcomes) > 250


def test_strict_mode_refuses_few(pools):
    """With the first dim of each tensor cut. Of the ops that are refused, most need the whole matrix, or find sizes in values."""
    names, counts = sorted(OPS.keys() - set(WITHOUT_CPU)), {}
    for part in range(4):
        counts |= pools(2).run(opinfo.run_strict, names[part::4], 2, seconds=110)[0]
    always = [name for name, (refused, tried) in counts.items() if refused == tried]
    assert len(counts) > 600 and "masked_select" in always
    assert len(always) <= 45, always
    assert sum(refused > 0 for refused, _ in counts.values()) <= 80


# Ops whose result has another order in memory than torch's, or is a view where torch's is not. By the arguments' order in memory.
_META = "torch's meta kernel says otherwise than its CPU kernel"
_NO_META = "torch has no meta kernel of it, so its results are taken for contiguous"
_MOVED = "a view that had to move data is a copy"
_NEVER_A_VIEW = "torch returns views that its schema calls copies"
_SQUEEZED = "torch runs it on one more dim, whose order its kernel for images finds by the strides"
LIE_OTHERWISE = {
    "any": {
        "_batch_norm_with_update": _META,
        "_native_batch_norm_legit": _META,
        "native_batch_norm": _META,
        "nn.functional.batch_norm": _META,
        "nn.functional.channel_shuffle": _META,
        "nn.functional.conv_transpose3d": _META,
        "nn.functional.max_unpool2d": _META,
        "nn.functional.max_unpool2d.grad": _META,
        "nn.functional.pad.replicate_negative": _META,
        "nn.functional.pixel_shuffle": _META,
        "linalg.lstsq": _NO_META,
        "linalg.lstsq.grad_oriented": _NO_META,
        "put": _META,
        "native_dropout_backward": "it is decomposed",
        "nn.functional.adaptive_max_pool1d": _SQUEEZED,
        "nn.functional.avg_pool1d": _SQUEEZED,
        "nn.functional.conv1d": _SQUEEZED,
        "nn.functional.conv_transpose1d": _SQUEEZED,
        "nn.functional.interpolate.area": _SQUEEZED,
        "nn.functional.max_pool1d": _SQUEEZED,
        "normal": "it draws one tensor's worth",
        "quantile": "it is made by other ops on the way",
        "nanquantile": "it is made by other ops on the way",
        "nn.functional.scaled_dot_product_attention": _MOVED,
        "select": _MOVED,
        "unbind": _MOVED,
        "unfold": _MOVED,
        "unsafe_chunk": _NEVER_A_VIEW,
        "unsafe_split": _NEVER_A_VIEW,
    },
    "expanded": {
        **dict.fromkeys(("broadcast_tensors", "broadcast_to", "expand", "expand_as", "squeeze", "squeeze.multiple", "view_as_complex"), _MOVED),
        "as_strided": "its elements lie beyond those of the tensor that was expanded",
        "as_strided_copy": "its elements lie beyond those of the tensor that was expanded",
        "as_strided_scatter": "its elements lie beyond those of the tensor that was expanded",
        "nn.functional.embedding": "max_norm writes into the expanded table",
    },
}


@pytest.mark.parametrize("memory", opinfo.MEMORY)
def test_results_lie_as_torchs(pools, memory):
    """Results have torch's order of dims in memory, for any order of the arguments. So they are views where torch's are."""
    names = sorted(OPS.keys() - set(WITHOUT_CPU) - LIE_OTHERWISE["any"].keys() - LIE_OTHERWISE.get(memory, {}).keys())
    wrong, compared = [], 0
    for part in range(4):
        for _, count, texts in pools(2).run(opinfo.run_all_orders, names[part::4], memory, 2, 2, seconds=110)[0]:
            compared += count
            wrong += texts
    assert not wrong, "\n".join(wrong)
    assert compared > {"channels_last": 150}.get(memory, 1000)
