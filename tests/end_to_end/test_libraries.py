"""Libraries that ask torch for DTensors, unmodified, on ShardTensors. Skipped where a library is not installed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import shardtensor
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_here
from shardtensor import Partial, Replicate, Shard, ShardTensor, init_device_mesh
from shardtensor.experimental import context_parallel, context_parallel_unshard
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

DOUBLE = torch.float64


def as_launched():
    """Sets the environment variables that torchrun sets."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, RANK=rank, LOCAL_RANK=rank)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


# ---- Hugging Face transformers ----


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, hidden_size=32, intermediate_size=41, num_hidden_layers=2, max_position_embeddings=32)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)).to(DOUBLE)


def gpt_neox():
    """Five heads, whose queries, keys and values one layer computes, head by head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, hidden_size=20, intermediate_size=41, num_hidden_layers=2, max_position_embeddings=32)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=5)).to(DOUBLE)


def qwen_moe():
    """Seven experts, which transformers shares out itself, by their numbers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    experts = dict(num_experts=7, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    config = Qwen3MoeConfig(**sizes, **experts, max_position_embeddings=32)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").to(DOUBLE)


def tensor_parallel(make, cut, folder):
    """A model under its own plan, with 37 words and 41 hidden units: trained, and saved whole."""
    from transformers.distributed import DistributedConfig

    as_launched()
    plain = make()
    loader = type(plain)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain")
    dist.barrier()
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    world = dist.get_world_size()
    distributed, options = DistributedConfig(tp_size=world, tp_plan="auto"), {}
    if make is qwen_moe:
        distributed, options = DistributedConfig(tp_size=world, ep_size=world), {"experts_implementation": "eager"}
    with shardtensor.replace_dtensor():
        ours = loader.from_pretrained(folder / "plain", distributed_config=distributed, dtype=DOUBLE, **options)
        assert type(ours.get_parameter(cut).data) is shardtensor.ShardTensor
        results = []
        for model in (plain, ours):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                loss = model(input_ids=tokens, labels=tokens).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            results.append((loss.item(), [whole(p.grad) for p in model.parameters()]))
        torch.testing.assert_close(results[1], results[0])
        with torch.no_grad():
            torch.testing.assert_close(whole(ours(input_ids=tokens).logits), plain(input_ids=tokens).logits)
        ours.save_pretrained(folder / "ours")
    dist.barrier()
    again = loader.from_pretrained(folder / "ours", dtype=DOUBLE)
    torch.testing.assert_close(again.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("make", "cut"),
    [
        (llama, "model.layers.0.mlp.up_proj.weight"),
        (gpt_neox, "gpt_neox.layers.0.attention.query_key_value.weight"),
        (qwen_moe, "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_transformers_tensor_parallel(ranks, tmp_path, make, cut):
    pytest.importorskip("transformers", minversion="5.24" if make is qwen_moe else "5.20")
    ranks.run(tensor_parallel, make, cut, tmp_path, seconds=100)


def adapted(folder):
    """peft's LoRA over a tensor-parallel plan that gives the ranks unequal numbers of heads: begun and trained as in one process."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    as_launched()
    sizes = dict(vocab_size=37, hidden_size=20, intermediate_size=41, num_hidden_layers=2, max_position_embeddings=32)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=5, num_key_value_heads=5)).to(DOUBLE).save_pretrained(folder)
    dist.barrier()
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], init_lora_weights=False)
    tensor_parallel = dict(distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"))
    tokens, results = torch.arange(18).view(2, 9), []
    with shardtensor.replace_dtensor():
        for options in ({}, tensor_parallel):
            model = LlamaForCausalLM.from_pretrained(folder, dtype=DOUBLE, **options)
            torch.manual_seed(5)
            model = get_peft_model(model, config, autocast_adapter_dtype=False).to(DOUBLE)
            begun = [whole(p).detach().clone() for p in model.parameters()]
            optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
            for _ in range(3):
                loss = model(input_ids=tokens, labels=tokens).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            results.append((begun, losses, [whole(p).detach() for p in model.parameters()]))
        assert isinstance(model.get_parameter("base_model.model.model.layers.0.self_attn.o_proj.lora_A.default.weight"), shardtensor.ShardTensor)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("world", [2, 3])
def test_lora_over_a_tensor_parallel_plan(pools, world, tmp_path):
    pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("peft", minversion="0.21")
    pools(world).run(adapted, tmp_path, seconds=100)


def context_parallel_llama(balance, cache):
    """Llama with position_ids among the buffers: logits, loss and gradients of the whole sequence; eager attention is refused."""
    mesh = shardtensor.init_device_mesh("cpu", (dist.get_world_size(),))
    length, plain, ours = 13, llama(), llama()
    tokens = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(1))
    labels, places = tokens.roll(-1, 1), torch.arange(length).unsqueeze(0)
    want = plain(input_ids=tokens, position_ids=places, use_cache=False).logits
    torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    buffers = [tokens.clone(), labels.clone(), places.clone()]
    within = dict(buffers=buffers, buffer_seq_dims=[1, 1, 1], load_balance=balance)
    with context_parallel(mesh, **within):
        got = ours(input_ids=buffers[0], position_ids=buffers[2], use_cache=cache).logits
        torch.nn.functional.cross_entropy(got.flatten(0, 1), buffers[1].flatten(), reduction="sum").backward()
    (whole_logits,) = context_parallel_unshard(mesh, [got.detach()], [1], load_balance=balance)
    torch.testing.assert_close(whole_logits, want.detach(), rtol=1e-9, atol=1e-9)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(a.grad)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)
    ours.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="matmul of two activations"), context_parallel(mesh, **within):
        ours(input_ids=buffers[0], position_ids=buffers[2], use_cache=False)


@pytest.mark.parametrize("world", [2, 3])
def test_transformers_context_parallel(pools, world):
    pytest.importorskip("transformers", minversion="5.20")
    for balance in (True, False):
        for cache in (False, True):
            pools(world).run(context_parallel_llama, balance, cache, seconds=100)


# ---- TensorBoard ----


def logged(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    summand = ShardTensor.from_local(torch.tensor(2.0), mesh, [Partial()])
    rows = ShardTensor.from_local(torch.full((dist.get_rank() + 1, 2), 1.0), mesh, [Shard(0)], sharding_shapes="infer")
    with SummaryWriter(folder / str(dist.get_rank())) as writer:
        writer.add_scalar("number", summand.item(), 1)
        writer.add_scalar("loss", summand.redistribute(placements=[Replicate()]), 1)
        writer.add_histogram("rows", rows.full_tensor(), 1)
        for t in (summand, rows):  # a writer usually runs on one rank only: it must not wait for others
            with pytest.raises(RuntimeError, match=r"this rank holds a piece .* use full_tensor"):
                writer.add_histogram("piece", t, 1)
    events = EventAccumulator(str(folder / str(dist.get_rank()))).Reload()
    assert [e.value for name in ("number", "loss") for e in events.Scalars(name)] == [2.0 * world] * 2
    assert events.Histograms("rows")[0].histogram_value.num == rows.numel()


def test_tensorboard(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    ranks.run(logged, tmp_path)


# ---- torchao ----


def quantised():
    """Each rank quantises its own, uneven rows; the result is what the whole layer gives."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = st.init_device_mesh("cpu", (world,))
    sizes = {2: [3, 7], 4: [2, 4, 3, 1]}[world]
    torch.manual_seed(0)
    weight, x = torch.randn(10, 8), torch.randn(5, 8)

    def layer(rows, config):
        linear = torch.nn.Linear(8, len(rows), bias=False)
        linear.weight.data.copy_(rows)
        quantize_(linear, config)
        return linear

    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        local = layer(weight.split(sizes)[rank], config).weight.detach()
        w = st.ShardTensor.from_local(local, mesh, [st.Shard(0)], sharding_shapes={0: [(n, 8) for n in sizes]})
        y = torch.nn.functional.linear(st.distribute_tensor(x, mesh, [st.Replicate()]), w)
        assert y.placements == (st.Shard(1),) and y.to_local().shape == (5, sizes[rank])
        torch.testing.assert_close(y.full_tensor(), layer(weight, config)(x))
        assert type(w.to_local()) is type(local)
        with pytest.raises(NotImplementedError, match="Python subclass without memory of its own"):
            w.full_tensor()


def test_torchao(ranks):
    pytest.importorskip("torchao")
    ranks.run(quantised)


def in_eight_bits():
    """torchao's fp8 training, emulated on the CPU: its losses are those of one process, but for the rounding to bfloat16 of what is
    added up over ranks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    torch.manual_seed(0)
    begun = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64)).bfloat16()
    with st.replace_dtensor():
        mesh = mesh_here()
        plan = {"0": st.parallel.ColwiseParallel(), "2": st.parallel.RowwiseParallel()}
        ways = {
            "one process": lambda model: None,
            "tensor parallel": lambda model: st.parallel.parallelize_module(model, mesh, plan),
            "FSDP2": lambda model: [fully_shard(part, mesh=mesh) for part in (model[0], model[2], model)],
            "FSDP2 in eight bits": lambda model: [fully_shard(part, mesh=mesh) for part in (model[0], model[2], model)],
            "batch": lambda model: st.distribute_module(model, mesh),
        }
        if mesh.size() > 2:  # torch gathers what torchao gives it without padding: the ranks must divide the rows
            del ways["FSDP2 in eight bits"]
        losses = {}
        for name, cut in ways.items():
            config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=name.endswith("bits"))
            model = convert_to_float8_training(copy.deepcopy(begun), config=config)
            cut(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            given = st.distribute_tensor(x, mesh, [st.Shard(0)]) if name == "batch" else x
            losses[name] = []
            for _ in range(3):
                loss = model(given).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
    want = losses.pop("one process")
    assert want[2] < 0.9 * want[0]
    for name, got in losses.items():
        assert got == pytest.approx(want, rel=1e-2), name


@pytest.mark.parametrize("world", [2, 3])
def test_torchao_trains_in_eight_bits(pools, world):
    pytest.importorskip("torchao")
    pools(world).run(in_eight_bits, seconds=100)


# ---- accelerate ----


def accelerated(folder):
    """accelerate's FSDP2 path, which is meant for GPUs, made to run on the CPU: trained, clipped, saved and loaded."""
    as_launched()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with shardtensor.replace_dtensor():
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).to(DOUBLE)
        ours = copy.deepcopy(plain)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, ours)]
        accelerator = Accelerator(cpu=True)
        for shared in (AcceleratorState._shared_state, PartialState._shared_state):
            shared["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, state_dict_type="SHARDED_STATE_DICT"
        )
        ours, optimizers[1] = accelerator.prepare(ours, optimizers[1])
        assert all(type(p.data) is shardtensor.ShardTensor for p in ours.parameters())

        def step(x):
            results = []
            for model, optimizer, backward, clip in (
                (plain, optimizers[0], torch.Tensor.backward, torch.nn.utils.clip_grad_norm_),
                (ours, optimizers[1], accelerator.backward, accelerator.clip_grad_norm_),
            ):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                backward(loss)
                results.append((loss.item(), whole(clip(model.parameters(), 0.1))))
                optimizer.step()
            torch.testing.assert_close(results[1], results[0])

        x = torch.randn(6, 4, dtype=DOUBLE)
        step(x)
        accelerator.save_state(folder)
        saved = [whole(p.detach()).clone() for p in ours.parameters()]
        step(x)
        accelerator.load_state(folder)
        torch.testing.assert_close([whole(p.detach()) for p in ours.parameters()], saved)
        state = accelerator.get_state_dict(ours)
        assert {k: v.shape for k, v in state.items()} == (
            {k: v.shape for k, v in plain.state_dict().items()} if dist.get_rank() == 0 else {}
        )
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared.clear()


def test_accelerate(ranks, tmp_path):
    pytest.importorskip("accelerate")
    ranks.run(accelerated, tmp_path)


def saved_llama(folder, **sizes):
    """The model of one process; all ranks find it in the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=37, num_hidden_layers=2, max_position_embeddings=32, **sizes)).to(DOUBLE).train()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    return plain


def accelerated_llama(folder):
    """Tensor parallelism, which accelerate has on GPUs only: a rank without heads has empty pieces, all at one address."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import ParallelismConfig
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    as_launched()
    plain = saved_llama(folder, hidden_size=8, intermediate_size=11, num_attention_heads=2, num_key_value_heads=1)
    with shardtensor.replace_dtensor():
        distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        ours = LlamaForCausalLM.from_pretrained(folder, distributed_config=distributed, dtype=DOUBLE).train()
        empty = [p for p in ours.parameters() if isinstance(p, shardtensor.ShardTensor) and not p._local_tensor.numel()]
        parallel = ParallelismConfig(tp_size=dist.get_world_size())
        parallel._validate_accelerator = lambda accelerator: None  # it refuses CPUs
        accelerator = Accelerator(cpu=True, parallelism_config=parallel)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (plain, ours)]
        ours, optimizers[1] = accelerator.prepare(ours, optimizers[1])
        assert [id(p) for p in optimizers[1].param_groups[0]["params"]] == [id(p) for p in ours.parameters()]
        tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            results = []
            for model, optimizer, backward, clip in (
                (plain, optimizers[0], torch.Tensor.backward, torch.nn.utils.clip_grad_norm_),
                (ours, optimizers[1], accelerator.backward, accelerator.clip_grad_norm_),
            ):
                optimizer.zero_grad()
                loss = model(input_ids=tokens, labels=tokens).loss
                backward(loss)
                results.append((loss.item(), whole(clip(model.parameters(), 0.1)).item()))
                optimizer.step()
            assert results[1] == pytest.approx(results[0], rel=1e-6)
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared.clear()
    return len(empty)


def test_accelerate_tensor_parallel(pools, tmp_path):
    pytest.importorskip("accelerate", minversion="1.15")
    pytest.importorskip("transformers", minversion="5.24")
    empty = pools(3).run(accelerated_llama, tmp_path)
    assert empty[-1] > 1


def trained_by_trainer(folder):
    """transformers' Trainer on a model under its own plan: losses and clipped norms are those of a loop in one process."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import ParallelismConfig
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    as_launched()
    plain = saved_llama(folder / "begun", hidden_size=20, intermediate_size=41, num_attention_heads=5, num_key_value_heads=5)
    tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(1))
    optimizer, want = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        want.append((loss.item(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()))
        optimizer.step()
    patch = pytest.MonkeyPatch()
    patch.setattr(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)  # it refuses CPUs
    with shardtensor.replace_dtensor():
        distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        ours = LlamaForCausalLM.from_pretrained(folder / "begun", distributed_config=distributed, dtype=DOUBLE)
        options = dict(learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.1, optim="adamw_torch")
        saved = dict(save_strategy="steps", save_steps=3, save_only_model=True)
        quiet = dict(report_to=[], disable_tqdm=True, logging_steps=1)
        batches = dict(per_device_train_batch_size=3, max_steps=3)
        arguments = TrainingArguments(str(folder / "out"), use_cpu=True, **options, **saved, **quiet, **batches)
        rows = [dict(input_ids=row, labels=row) for row in tokens]
        trainer = Trainer(model=ours, args=arguments, train_dataset=rows)
        trainer.train()
        got = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        assert torch.tensor(got).allclose(torch.tensor(want), rtol=1e-4)
        assert type(ours.get_parameter("model.layers.0.mlp.up_proj.weight").data) is shardtensor.ShardTensor
    patch.undo()
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared.clear()
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder / "out" / "checkpoint-3", dtype=DOUBLE)
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_trainer(pools, world, tmp_path):
    pytest.importorskip("accelerate", minversion="1.15")
    pytest.importorskip("transformers", minversion="5.24")
    pools(world).run(trained_by_trainer, tmp_path, seconds=100)


# ---- Lightning ----


def lightning_module():
    import lightning
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)).to(DOUBLE)

        def configure_model(self):
            columns, rows = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
            if columns.size() > 1:
                parallelize_module(self.net, columns, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if rows.size() > 1:
                fully_shard(self.net, mesh=rows)

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Module()


def lit(rows, columns, epochs, saved, resumed):
    """A trainer's fit with clipped gradients, up to that many epochs; each rank of a row has the whole batch."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    as_launched()
    os.environ["GROUP_RANK"] = "0"
    batches = torch.randn(4, 3, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with shardtensor.replace_dtensor():
        module = lightning_module()
        strategy = dict(strategy=ModelParallelStrategy(rows, columns), plugins=TorchElasticEnvironment())
        options = dict(max_epochs=epochs, gradient_clip_val=0.1, use_distributed_sampler=False)
        trainer = lightning.Trainer(accelerator="cpu", devices=rows * columns, **strategy, **options, **quiet)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resumed)
        assert all(type(p.data) is shardtensor.ShardTensor for p in module.net[0].parameters())
        if saved is not None:
            trainer.save_checkpoint(saved)
    plain = lightning_module()
    optimizer = plain.configure_optimizers()
    for batch in batches.repeat(epochs, 1, 1):
        optimizer.zero_grad()
        plain.training_step(batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close([whole(p.detach()) for p in module.parameters()], [p.detach() for p in plain.parameters()])


def test_lightning(pools, tmp_path):
    """FSDP2 saves; tensor parallelism on more ranks resumes, and FSDP2 over it."""
    pytest.importorskip("lightning")
    pools(2).run(lit, 2, 1, 1, tmp_path / "saved", None)
    pools(3).run(lit, 1, 3, 2, None, tmp_path / "saved")
    pools(4).run(lit, 2, 2, 2, None, tmp_path / "saved")


LIT = """
import lightning, sys
from lightning.pytorch.strategies import ModelParallelStrategy
from test_libraries import lightning_module
from torch.utils.data import DataLoader
import torch

module = lightning_module()
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(1, 2), max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
trainer.fit(module, DataLoader(torch.ones(2, 3, 6, dtype=torch.float64), batch_size=None))
weight = module.net[0].weight.data
print(f"{sys.argv[1:]} {trainer.world_size} {type(weight).__name__} {tuple(weight.to_local().shape)}\\n", end="", flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [["lit.py"], ["-m", "lit"]], ids=" ".join)
def test_lightning_starts_the_ranks(tmp_path, how):
    """Without torchrun: the ranks that Lightning starts have ShardTensors too."""
    pytest.importorskip("lightning")
    (tmp_path / "lit.py").write_text(LIT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardtensor", *how, "--rate", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "--rate" in line)
    assert said == [f"['--rate', '3'] 2 ShardTensor ({rows}, 6)" for rows in (3, 4)]


# ---- torchtitan ----


def titanic():
    """torchtitan's Llama under its own plan: sequence parallel, recomputed op by op; FSDP2 too with two rows of ranks."""
    as_launched()
    with shardtensor.replace_dtensor():
        from torch.distributed.fsdp import fully_shard
        from torchtitan.config.job_config import JobConfig
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

        torch.manual_seed(0)
        sizes = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=61, multiple_of=16, max_seq_len=16)
        plain, ours = Transformer(sizes), Transformer(sizes)
        with torch.no_grad():
            plain.init_weights()
        ours.load_state_dict(plain.state_dict())
        rows = dist.get_world_size() // 2
        mesh = shardtensor.init_device_mesh("cpu", (rows, 2), mesh_dim_names=("data", "tensor"))
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=2)
        dims.get_mesh = lambda name: mesh["tensor"]  # whatever the number of ranks
        parallel_dims.device_type = "cpu"
        job = JobConfig()
        job.activation_checkpoint.mode = "selective"
        job.parallelism.tensor_parallel_degree = 2
        dims.__class__ = type("Dims", (ParallelDims,), {"fsdp_enabled": False, "dp_replicate_enabled": False})
        parallelize_llama(ours, dims, job)
        if rows > 1:
            for block in ours.layers.values():
                fully_shard(block, mesh=mesh["data"])
            fully_shard(ours, mesh=mesh["data"])
        assert all(type(p.data) is shardtensor.ShardTensor for p in ours.parameters())
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(1))
        results = []
        for model in (plain, ours):
            out = whole(model(tokens))
            out.square().mean().backward()
            results.append((out, [whole(p.grad) for p in model.parameters()]))
        torch.testing.assert_close(results[1], results[0])


def test_torchtitan(ranks):
    pytest.importorskip("torchtitan")
    pytest.importorskip("torchtitan.config.job_config", reason="this torchtitan computes attention by torch.compile alone")
    ranks.run(titanic)
