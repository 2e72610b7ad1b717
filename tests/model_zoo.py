"""The models that tests/models.py runs in parallel: small, with random weights, of sizes that the ranks do not divide.

Some are torch's alone; the others need the library that they name. None drops out, so one process computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Plan = dict[str, Any]  # of parallelize_module
WORDS, CLASSES = 37, 7
DTYPE = torch.float64


@dataclass(frozen=True)
class Model:
    """make() builds it; inputs(n) are its arguments for n samples, along dim 0; out() finds what the loss is made of."""

    name: str
    library: str  # that must be installed
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    out: Callable[[Any], torch.Tensor] = lambda out: out
    plan: Callable[[nn.Module], Plan] | None = None
    automatic: bool = False  # transformers' tp_plan="auto" is for it
    blocks: str = ""  # the name of the class that FSDP2 shards by itself and that is recomputed


# ---- inputs and plans ----


def tokens(n: int, length: int = 5) -> torch.Tensor:
    return torch.randint(WORDS, (n, length), generator=torch.Generator().manual_seed(n))


def pictures(n: int, size: int) -> torch.Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(n), dtype=DTYPE)


def steps(n: int) -> dict[str, torch.Tensor]:
    return dict(x=tokens(n))


def words(n: int) -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens(n))


def to_words(n: int) -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens(n), decoder_input_ids=tokens(n, length=4))


def pixels(size: int, name: str = "pixel_values", memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return lambda n: {name: pictures(n, size).to(memory_format=memory_format)}


def noisy(n: int) -> dict[str, torch.Tensor]:
    return dict(sample=pictures(n, 8), timestep=torch.arange(n))


def logits(out: Any) -> torch.Tensor:
    return out.logits


def linears(columns: str, rows: str, **options: Any) -> Plan:
    """Column-wise and row-wise styles for the names."""
    from shardtensor.parallel import ColwiseParallel, RowwiseParallel

    return {name: ColwiseParallel(**options) for name in columns.split()} | {name: RowwiseParallel() for name in rows.split()}


def ending(model: nn.Module, *ends: str) -> str:
    return " ".join(name for name, _ in model.named_modules() if name.endswith(ends))


def attention(at: str, heads: int, kv_heads: int, head_dim: int, **names: str) -> Plan:
    from shardtensor.parallel import AttentionHeads

    return AttentionHeads(heads=heads, kv_heads=kv_heads, head_dim=head_dim).plan(at, **names)


# ---- torch alone ----


class Encoder(nn.Module):
    """torch's own encoder, under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 5, 41, dropout=0.0, batch_first=True, norm_first=True)
        self.words, self.encoder = nn.Embedding(WORDS, 20), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(20, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.encoder(self.words(x), mask=mask, is_causal=True))


def encoder_plan(model: nn.Module) -> Plan:
    """Its attention has one packed weight for queries, keys and values, which stays whole."""
    return linears("encoder.layers.*.linear1", "encoder.layers.*.linear2")


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PatchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(20), nn.LayerNorm(20)])
        self.attention, self.up, self.down = Attention(20, 4), nn.Linear(20, 41), nn.Linear(41, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, 20, 4, stride=4), nn.Parameter(torch.randn(1, 5, 20))
        self.first, self.blocks = nn.Parameter(torch.zeros(1, 1, 20)), nn.Sequential(PatchBlock(), PatchBlock())
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.blocks(x)[:, 0])


def vision_plan(model: nn.Module) -> Plan:
    return attention("blocks.*.attention", 5, 5, 4) | linears("blocks.*.up", "blocks.*.down")


class ResidualBlock(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.Conv2d(outs, outs, 3, 1, 1, bias=False)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(outs), nn.BatchNorm2d(outs)])
        self.shortcut = nn.Conv2d(ins, outs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(self.norms[1](self.convs[1](y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.blocks, self.head = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2)), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.pool(F.relu(self.stem(x)))).mean((2, 3)))


class UNetBlock(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.norm, self.conv, self.time = nn.GroupNorm(2, ins), nn.Conv2d(ins, outs, 3, padding=1), nn.Linear(8, outs)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    """Down and up again, the pictures of the way down joined on; attention between the pixels at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.first, self.last = nn.Embedding(10, 8), nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.down, self.bottom, self.up = UNetBlock(6, 6), UNetBlock(6, 12), UNetBlock(18, 6)
        self.attention = Attention(12, 4)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        time = self.steps(timestep)
        wide = self.down(self.first(sample), time)
        x = self.bottom(F.avg_pool2d(wide, 2), time)
        pixels = x.flatten(2).transpose(1, 2)
        x = (pixels + self.attention(pixels)).transpose(1, 2).unflatten(2, x.shape[2:])
        x = torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), wide], 1)
        return self.last(self.up(x, time))


def unet_plan(model: nn.Module) -> Plan:
    return attention("attention", 3, 3, 4)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 12), nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(x))[0])


# ---- Hugging Face transformers ----

DECODER = dict(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, max_position_embeddings=32, use_cache=False)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, intermediate_size=41, num_attention_heads=6, num_key_value_heads=2))


def llama_plan(model: nn.Module) -> Plan:
    at = "model.layers.*"
    return attention(f"{at}.self_attn", 6, 2, 4) | linears(f"{at}.mlp.gate_proj {at}.mlp.up_proj", f"{at}.mlp.down_proj")


def qwen3_moe() -> nn.Module:
    """torch's kernel for experts takes no float64: this runs transformers' own loop over them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=4)
    experts = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10, experts_implementation="eager")
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DECODER, **heads, **experts))


def qwen3_moe_plan(model: nn.Module) -> Plan:
    """Queries and keys stay ShardTensors: the norms on them, which are whole on every rank, then get whole gradients."""
    at = "model.layers.*.self_attn"
    columns = linears(f"{at}.q_proj", f"{at}.o_proj", multiple_of=8, use_local_output=False)
    return columns | linears(f"{at}.k_proj {at}.v_proj", "", multiple_of=4, use_local_output=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=WORDS, n_positions=32, n_embd=20, n_layer=2, n_head=5, n_inner=41, use_cache=False)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=20, num_hidden_layers=2, num_attention_heads=5, intermediate_size=41, max_position_embeddings=32)
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def bert_plan(model: nn.Module) -> Plan:
    at = "bert.encoder.layer.*"
    names = dict(q="self.query", k="self.key", v="self.value", o="output.dense")
    return attention(f"{at}.attention", 5, 5, 4, **names) | linears(f"{at}.intermediate.dense", f"{at}.output.dense")


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=WORDS, d_model=20, d_kv=4, d_ff=41, num_layers=2, num_heads=5)
    return T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0, dropout_rate=0.0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=20, num_hidden_layers=2, num_attention_heads=5, intermediate_size=41)
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=CLASSES))


def vit_plan(model: nn.Module) -> Plan:
    return attention("vit.layers.*.attention", 5, 5, 4) | linears("vit.layers.*.mlp.fc1", "vit.layers.*.mlp.fc2")


def swin() -> nn.Module:
    """The windows of every second block are shifted."""
    from transformers import SwinConfig, SwinForImageClassification

    sizes = dict(image_size=16, patch_size=2, window_size=4, embed_dim=12, depths=[2, 2], num_heads=[3, 6])
    return SwinForImageClassification(SwinConfig(**sizes, drop_path_rate=0.0, num_labels=CLASSES))


def hidden_units(model: nn.Module) -> Plan:
    """Of multi-layer perceptrons that are named as transformers' and timm's are."""
    return linears(ending(model, "mlp.fc1"), ending(model, "mlp.fc2"))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES)
    return ResNetForImageClassification(ResNetConfig(**sizes)).to(memory_format=torch.channels_last)


# ---- peft, timm and diffusers ----


def adapted_llama() -> nn.Module:
    """Only low-rank matrices beside the projections are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))


def timm_swin() -> nn.Module:
    import timm

    sizes = dict(img_size=16, patch_size=2, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(3, 6))
    return timm.models.swin_transformer.SwinTransformer(**sizes, num_classes=CLASSES, drop_path_rate=0.0)


def timm_resnet() -> nn.Module:
    import timm

    kind, block = timm.models.resnet.ResNet, timm.models.resnet.BasicBlock
    model = kind(block, [1, 1, 1, 1], num_classes=CLASSES, channels=(8, 8, 16, 16), stem_width=8)
    return model.to(memory_format=torch.channels_last)


def diffusion() -> nn.Module:
    from diffusers import UNet2DModel

    sizes = dict(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4)
    blocks = dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    return UNet2DModel(**sizes, **blocks, attention_head_dim=4)


def diffusion_plan(model: nn.Module) -> Plan:
    """The attention divides its width by the number of all heads, so it must see whole sizes."""
    options = dict(multiple_of=4, use_local_output=False)
    return linears(ending(model, "to_q", "to_k", "to_v"), ending(model, "to_out.0"), **options)


channels_last = functools.partial(pixels, 32, memory_format=torch.channels_last)
_TORCH = [
    Model("TransformerEncoder", "torch", Encoder, steps, plan=encoder_plan, blocks="TransformerEncoderLayer"),
    Model("vision transformer", "torch", VisionTransformer, pixels(8, "x"), plan=vision_plan, blocks="PatchBlock"),
    Model("residual network, channels_last", "torch", ResNet, channels_last("x"), blocks="ResidualBlock"),
    Model("UNet", "torch", UNet, noisy, plan=unet_plan, blocks="UNetBlock"),
    Model("LSTM", "torch", LSTM, steps),
]
_TRANSFORMERS = [
    Model("Llama", "transformers", llama, words, logits, llama_plan, True, "LlamaDecoderLayer"),
    Model("Qwen3-MoE", "transformers", qwen3_moe, words, logits, qwen3_moe_plan, True, "Qwen3MoeDecoderLayer"),
    Model("GPT-2", "transformers", gpt2, words, logits, None, True, "GPT2Block"),
    Model("BERT", "transformers", bert, words, logits, bert_plan, blocks="BertLayer"),
    Model("T5", "transformers", t5, to_words, logits, None, True, "T5Block"),
    Model("ViT", "transformers", vit, pixels(8), logits, vit_plan, blocks="ViTLayer"),
    Model("Swin", "transformers", swin, pixels(16), logits, hidden_units, blocks="SwinLayer"),
    Model("ResNet, channels_last", "transformers", resnet, channels_last("pixel_values"), logits, blocks="ResNetBasicLayer"),
]
_OTHERS = [
    Model("Llama with LoRA", "peft", adapted_llama, words, logits, blocks="LlamaDecoderLayer"),
    Model("diffusion UNet", "diffusers", diffusion, noisy, lambda out: out.sample, diffusion_plan, blocks="ResnetBlock2D"),
    Model("Swin", "timm", timm_swin, pixels(16, "x"), plan=hidden_units, blocks="SwinTransformerBlock"),
    Model("ResNet, channels_last", "timm", timm_resnet, channels_last("x"), blocks="BasicBlock"),
]
MODELS = {f"{model.library}: {model.name}": model for model in (*_TORCH, *_TRANSFORMERS, *_OTHERS)}
