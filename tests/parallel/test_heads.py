"""Attention heads shared out over ranks, against one process: an attention module in the shape of Hugging Face's, and its Llama."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import mesh_here
from pool import on_ranks
from shardtensor.parallel import AttentionHeads, ColwiseParallel, RowwiseParallel, parallelize_module
from test_parallel import compare_gradients, counted, full
from torch import nn

DOUBLE = torch.float64
# (query heads, key/value heads, ranks)
SHARED = [(4, 1, 2), (4, 1, 3), (6, 2, 3), (8, 2, 3), (6, 3, 2), (8, 4, 2), (8, 4, 3), (5, 5, 2), (5, 5, 3), (32, 8, 3)]
FEW = [(2, 1, 3), (2, 2, 3), (1, 1, 2)]  # one rank has none
SIZE = 2


class Attention(nn.Module):
    """Views its projections as the heads that they have, and repeats each key/value head for its group of query heads."""

    def __init__(self, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim, self.num_key_value_groups = SIZE, heads // kv_heads
        self.q_proj = nn.Linear(6, heads * SIZE, dtype=DOUBLE)
        self.k_proj, self.v_proj = (nn.Linear(6, kv_heads * SIZE, dtype=DOUBLE) for _ in range(2))
        self.o_proj = nn.Linear(heads * SIZE, 6, dtype=DOUBLE)

    def forward(self, x, cache=None):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            cache[:] = k, v = [torch.cat([old, new], 2) for old, new in zip(cache or (k[:, :, :0], v[:, :, :0]), (k, v), strict=True)]
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        assert k.shape[1] == q.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Grouped(Attention):
    """Has torch repeat them."""

    def __init__(self, heads: int, kv_heads: int):
        super().__init__(heads, kv_heads)
        self.num_key_value_groups = 1

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def heads_of(heads, kv_heads):
    return AttentionHeads(heads=heads, kv_heads=kv_heads, head_dim=SIZE)


# ---- what each rank has ----


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "want"),
    [
        (8, 4, 3, [(4, (0, 1), 2), (2, (2,), 2), (2, (3,), 2)]),  # whole groups
        (32, 8, 3, [(12, (0, 1, 2), 4), (12, (3, 4, 5), 4), (8, (6, 7), 4)]),
        (5, 5, 4, [(2, (0, 1), 1), (1, (2,), 1), (1, (3,), 1), (1, (4,), 1)]),
        (4, 1, 3, [(2, (0,), 2), (1, (0,), 1), (1, (0,), 1)]),  # one key/value head, on all ranks
        (6, 2, 3, [(2, (0,), 2), (2, (0, 1), 1), (2, (1,), 2)]),
        (8, 2, 3, [(3, (0,), 3), (3, (0, 1, 1), 1), (2, (1,), 2)]),  # rank 1: one query of head 0, two of head 1
        (12, 2, 5, [(3, (0,), 3), (3, (0,), 3), (2, (1,), 2), (2, (1,), 2), (2, (1,), 2)]),
        (2, 1, 3, [(1, (0,), 1), (1, (0,), 1), (0, (), 1)]),
    ],
)
def test_shares(heads, kv_heads, ranks, want):
    shares = heads_of(heads, kv_heads).shares(ranks)
    assert [(s.queries, s.kv, s.repeats) for s in shares] == want


@pytest.mark.parametrize("heads", range(1, 13))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_query_has_its_own_key(heads, ranks):
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        shares = heads_of(heads, kv_heads).shares(ranks)
        queries = [(s.first + n, s.kv[n // s.repeats]) for s in shares for n in range(s.queries)]
        assert queries == [(n, n // (heads // kv_heads)) for n in range(heads)]
        assert all(len(s.kv) * s.repeats == s.queries for s in shares)
        assert all(s.queries for s in shares) or ranks > heads


# ---- attention ----


def attention(heads, kv_heads, kind=Attention):
    plain = kind(heads, kv_heads)
    ours = copy.deepcopy(plain)
    plan = heads_of(heads, kv_heads).plan("0", repeats=kind is Attention)
    ours = copy.deepcopy(parallelize_module(nn.Sequential(ours), mesh_here(), plan))[0]
    a, b = torch.randn(2, 2, 5, 6, dtype=DOUBLE)[0].repeat(2, 1, 1, 1).requires_grad_().unbind()
    a, b = (t.detach().requires_grad_() for t in (a, b))
    out, forward = counted(lambda: ours(a))
    want = plain(b)
    torch.testing.assert_close(out, want)
    _, backward = counted(lambda: out.square().sum().backward())
    want.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    compare_gradients(ours, plain)
    assert forward == {"all_reduce": 1}  # the sum of the output
    assert backward == {"all_reduce": 1}  # the input's gradient
    if kind is Attention:
        caches = [], []
        for n in range(4):
            torch.testing.assert_close(ours(a[:, n : n + 1], caches[0]), plain(b[:, n : n + 1], caches[1]))
        return caches[0][0].shape[1]
    return None


@pytest.mark.parametrize(("heads", "kv_heads", "world"), SHARED + FEW)
def test_attention(pools, heads, kv_heads, world):
    kept = pools(world).run(attention, heads, kv_heads)
    assert kept == [max(len(share.kv), 1) for share in heads_of(heads, kv_heads).shares(world)]


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 1, 3), (8, 2, 3), (8, 4, 3), (2, 1, 3)])
@on_ranks()
def test_attention_that_torch_groups(heads, kv_heads):
    attention(heads, kv_heads, Grouped)


@on_ranks(3, seconds=100)
def test_training():
    """Steps of an optimizer with clipped gradients, where ranks share a key/value head; compiled too."""
    plain = Attention(8, 2)
    ours, compiled = (parallelize_module(nn.Sequential(copy.deepcopy(plain)), mesh_here(), heads_of(8, 2).plan("0")) for _ in "ab")
    x = torch.randn(2, 5, 6, dtype=DOUBLE)
    results = []
    for model, run in ((plain, plain), (ours, ours), (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append((full(norm), [full(p.detach()) for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    assert ours.state_dict()["0.k_proj.weight"].shape == plain.k_proj.weight.shape


# ---- plans that part queries from their keys ----


def parted(heads, kv_heads, multiple_of):
    def plan(**local):
        styles = {f"0.{name}_proj": ColwiseParallel(multiple_of=multiple_of, **local) for name in "qkv"}
        return styles | {"0.o_proj": RowwiseParallel(multiple_of=multiple_of)}

    parallelize_module(nn.Sequential(Attention(heads, kv_heads)), mesh_here(), plan(use_local_output=False))  # whole tensors
    with pytest.raises(ValueError, match=r"key/value heads that they read") as raised:
        parallelize_module(nn.Sequential(Attention(heads, kv_heads)), mesh_here(), plan())
    return str(raised.value)


@pytest.mark.filterwarnings("ignore:parallelize_module")
@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 1, 2), (6, 2, 3), (8, 2, 3), (6, 3, 2), (8, 4, 3)])
@pytest.mark.parametrize("multiple_of", [SIZE, 1])
def test_queries_without_their_keys_raise(pools, heads, kv_heads, world, multiple_of):
    texts = pools(world).run(parted, heads, kv_heads, multiple_of)
    assert len(set(texts)) == 1
    plan = f"AttentionHeads(heads={heads}, kv_heads={kv_heads}, head_dim={SIZE}).plan('0', q='q_proj', k='k_proj', v='v_proj', o='o_proj')"
    assert plan in texts[0]


def other_heads():
    """Queries and keys by the styles of different heads; modules that cannot be changed; heads that are none."""
    mesh = mesh_here()
    model = nn.Sequential(Attention(4, 2), Attention(4, 1))
    plan = heads_of(4, 2).plan("0") | heads_of(4, 1).plan("1")
    plan["1.q_proj"] = AttentionHeads(heads=2, head_dim=2 * SIZE).plan()["q_proj"]
    plan["1.k_proj"] = AttentionHeads(heads=1, head_dim=SIZE).plan()["k_proj"]
    texts = []
    for broken in (
        lambda: parallelize_module(copy.deepcopy(model), mesh, plan | {"0.q_proj": heads_of(8, 2).plan()["q_proj"]}),
        lambda: parallelize_module(nn.Sequential(Grouped(4, 1)), mesh, heads_of(4, 1).plan("0")),
        lambda: parallelize_module(nn.Sequential(Attention(4, 1)), mesh, heads_of(4, 1).plan("0", repeats="n")),
        lambda: heads_of(4, 3),
        lambda: AttentionHeads(heads=4),
    ):
        with pytest.raises(ValueError) as raised:
            broken()
        texts.append(str(raised.value))
    return texts


def test_refusals(pools):
    wanted = ["8 features was given heads of 8 * 2", "no attribute num_key_value_groups or n_rep", "no attribute n that is 4", "divide", "head_dim"]
    for texts in pools(2).run(other_heads):
        for text, want in zip(texts, wanted, strict=True):
            assert want in text


# ---- Hugging Face ----


def hugging_face(cases, mask):
    from transformers import LlamaConfig, LlamaForCausalLM

    for heads, kv_heads in cases:
        sizes = dict(vocab_size=37, hidden_size=4 * heads, intermediate_size=41, num_hidden_layers=2, max_position_embeddings=32)
        config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, eos_token_id=None, initializer_range=0.3)
        plain = LlamaForCausalLM(config).to(DOUBLE)
        ours = copy.deepcopy(plain)
        plan = AttentionHeads(heads=heads, kv_heads=kv_heads, head_dim=4).plan("model.layers.*.self_attn")
        plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(ours, mesh_here(), plan | {"model.layers.*.mlp.down_proj": RowwiseParallel()})
        tokens = torch.randint(37, (2, 6), generator=torch.Generator().manual_seed(1))
        inputs = dict(input_ids=tokens, attention_mask=torch.tensor([[1] * 6, [0] * (2 * mask) + [1] * (6 - 2 * mask)]))
        a, b = (model(**inputs, labels=tokens) for model in (ours, plain))
        torch.testing.assert_close(full(a.logits), b.logits)
        a.loss.backward()
        b.loss.backward()
        compare_gradients(ours, plain)
        a, b = (model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in (ours, plain))
        assert a.equal(b)


@pytest.mark.parametrize("mask", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("world", [2, 3])
def test_llama(pools, world, mask):
    pytest.importorskip("transformers", minversion="5.0")
    pools(world).run(hugging_face, [(h, kv) for h, kv, n in SHARED if n == world], mask, seconds=150)


# The sizes of small models: heads, hidden units and experts that 2 or 3 ranks do not divide. torch's kernels for experts take no
# float64, so these run transformers' own loop.
DECODER = dict(hidden_size=24, num_hidden_layers=2, max_position_embeddings=32, head_dim=4, intermediate_size=41)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=10, router_aux_loss_coef=0.0)
MODELS = {
    "Llama": DECODER | dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "Llama-few": DECODER | dict(num_attention_heads=2, num_key_value_heads=1),
    "Qwen3": DECODER | dict(num_attention_heads=5, num_key_value_heads=5),
    "Qwen3Moe": DECODER | EXPERTS | dict(num_attention_heads=4, num_key_value_heads=1, num_experts=4),
    "Mixtral": DECODER | dict(num_attention_heads=8, num_key_value_heads=4, num_local_experts=3, intermediate_size=10),
    "Gemma": DECODER | dict(num_attention_heads=4, num_key_value_heads=1),
    "GPT2": dict(n_embd=20, n_layer=2, n_head=5, n_positions=32, n_inner=21),
    "GPT2-even": dict(n_embd=24, n_layer=2, n_head=6, n_positions=32),
    "T5": dict(d_model=20, d_kv=4, d_ff=21, num_heads=5, num_layers=2, relative_attention_num_buckets=8),
}
HEADS_OF = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}


def automatic(name, folder, fsdp_size=1):
    import transformers
    from test_libraries import as_launched
    from transformers.distributed import DistributedConfig

    as_launched()
    sizes, name = MODELS[name], name.partition("-")[0]
    ends = dict(vocab_size=37, bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=0, initializer_range=0.3)
    config = getattr(transformers, f"{name}Config")(**sizes, **ends)
    kind = getattr(transformers, f"{name}{HEADS_OF.get(name, 'ForCausalLM')}")
    if dist.get_rank() == 0:
        kind(config).to(DOUBLE).save_pretrained(folder / "plain")
    dist.barrier()
    options = dict(dtype=DOUBLE) | (dict(experts_implementation="eager") if name in ("Qwen3Moe", "Mixtral") else {})
    plain = kind.from_pretrained(folder / "plain", **options)
    with shardtensor.replace_dtensor():
        distributed = DistributedConfig(tp_size=dist.get_world_size() // fsdp_size, fsdp_size=fsdp_size, tp_plan="auto")
        ours = kind.from_pretrained(folder / "plain", distributed_config=distributed, **options)
        tokens = torch.randint(2, 37, (2, 6), generator=torch.Generator().manual_seed(1))
        results = [model(input_ids=tokens, labels=tokens) for model in (ours, plain)]
        for result in results:
            result.loss.backward()
        torch.testing.assert_close(full(results[0].logits), results[1].logits)
        compare_gradients(ours, plain)
        for cache in ({}, dict(cache_implementation="static")):
            a, b = (m.generate(tokens, max_new_tokens=5, do_sample=False, **cache) for m in (ours, plain))
            assert a.equal(b)
        ours.save_pretrained(folder / "ours")
    dist.barrier()
    again = kind.from_pretrained(folder / "ours", **options)
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=0)
    cut = {p: p._local_tensor.numel() for p in ours.parameters() if isinstance(p, shardtensor.ShardTensor)}
    return sum(cut.values()), sum(p.numel() for p in cut)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_automatic_plans(pools, tmp_path, name, world):
    pytest.importorskip("transformers", minversion="5.24")
    held = pools(world).run(automatic, name, tmp_path, seconds=150)
    assert all(own < whole for own, whole in held)
    if name != "GPT2":  # its fused layer stays whole where the ranks' heads differ in number
        assert sum(own for own, _ in held) < 1.3 * held[0][1]


def test_automatic_plan_with_fsdp(pools, tmp_path):
    pytest.importorskip("transformers", minversion="5.24")
    pools(4).run(automatic, "Qwen3", tmp_path, 2, seconds=150)


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
config = GPT2Config(n_embd=12, n_layer=2, n_head=3, n_positions=16, vocab_size=31, initializer_range=0.3, eos_token_id=None)
if dist.get_rank() == 0:
    GPT2LMHeadModel(config).save_pretrained("model")
dist.barrier()
plain = GPT2LMHeadModel.from_pretrained("model")
model = GPT2LMHeadModel.from_pretrained("model", distributed_config=DistributedConfig(tp_plan="auto"))
tokens = torch.tensor([[3, 1, 4, 1, 5]])
torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
weight = model.transformer.h[0].attn.c_proj.weight
if dist.get_rank() == 0:
    print(type(weight.data).__name__, tuple(weight.to_local().shape), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_unmodified_script(tmp_path):
    """transformers is imported after its functions were replaced."""
    pytest.importorskip("transformers", minversion="5.24")

    (tmp_path / "script.py").write_text(SCRIPT)
    package = os.path.dirname(os.path.dirname(shardtensor.__file__))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardtensor", "script.py"]
    done = subprocess.run(
        [sys.executable, *launch],
        capture_output=True, text=True, timeout=150, cwd=tmp_path, env=os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ShardTensor (8, 12)"
