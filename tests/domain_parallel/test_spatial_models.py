"""Whole models cut in space, forward and backward: the same as one process, the cut stays, and nothing is gathered."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import compare, mesh_here
from pool import on_ranks
from shardtensor import Replicate, Shard, ShardTensor, points, strict_mode
from test_spatial import counted, numbers, place
from torch import nn

# ---- models ----


class Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Any) -> Any:
        return F.relu(self.norm2(self.second(F.relu(self.norm(self.first(x))))) + self.short(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


class Mean(nn.Module):
    """What torchvision's networks end with, without pooling."""

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3))


class Identity(nn.Module):
    """A residual block without a short cut of its own: the gradient of the sum, and that of the block, are added up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: Any) -> Any:
        return x + self.second(F.relu(self.first(x)))


def identities() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 1), Identity(6), Identity(6), Mean(), nn.Linear(6, 5))


class Next(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down, self.scale = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Parameter(torch.randn(width))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(1, 8), Next(8), nn.Conv2d(8, 16, 2, 2), Next(16), Next(16))


def convnext_with_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(1, 8), Next(8), Next(8), Mean(), nn.Linear(8, 5))


class Decoder(nn.Module):
    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.decoder, self.post_quant_conv, self.vae = vae.decoder, vae.post_quant_conv, [vae]  # the encoder is not trained

    def forward(self, z: Any) -> Any:
        self.vae[0].decoder, self.vae[0].post_quant_conv = self.decoder, self.post_quant_conv
        return self.vae[0].decode(z).sample


def video_vae(attention: bool) -> nn.Module:
    from diffusers import AutoencoderKLWan

    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, False]}
    vae = AutoencoderKLWan(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, **sizes)
    if not attention:
        vae.decoder.mid_block.attentions[0] = nn.Identity()
    return Decoder(vae)


def moved(x: Any, dim: int, lengths: list[int] | None = None) -> Any:
    """Cut along another dim; a plain tensor stays."""
    if not isinstance(x, ShardTensor):
        return x
    return x.redistribute(placements=[Shard(dim)], sharding_shapes=lengths and {0: lengths})


class Spectral(nn.Module):
    """A Fourier layer as it is written for one process."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.complex64) / width)
        self.skip = nn.Conv2d(width, width, 1)

    def spectral(self, x: Any) -> Any:
        m, (height, width) = self.modes, x.shape[2:]
        f = torch.fft.rfft2(x)
        low, high = (torch.einsum("bixy,ioxy->boxy", part, w) for part, w in zip((f[:, :, :m, :m], f[:, :, -m:, :m]), self.weight, strict=True))
        f = torch.cat([F.pad(low, (0, 0, 0, height - 2 * m)), high], 2)
        return torch.fft.irfft2(F.pad(f, (0, width // 2 + 1 - m)), s=(height, width))

    def forward(self, x: Any) -> Any:
        return F.gelu(self.skip(x) + self.spectral(x))


class FewModes(Spectral):
    """Rows are transformed at home; only the modes that are kept are exchanged, and cut over the ranks while columns are transformed."""

    def spectral(self, x: Any) -> Any:
        m, (height, width) = self.modes, x.shape[2:]
        rows = [shape[2] for shape in x.sharding_shapes()[0]] if hasattr(x, "sharding_shapes") else None
        f = moved(torch.fft.rfft(x, dim=3)[..., :m], 3).transpose(2, 3)  # the cut before the rows, so that einsum's batch keeps it
        f = torch.fft.fft(f, dim=3)
        low, high = (torch.einsum("biyx,ioyx->boyx", part, w) for part, w in zip((f[..., :m], f[..., -m:]), self.weight, strict=True))
        f = torch.cat([F.pad(low, (0, height - 2 * m)), high], 3)
        f = moved(torch.fft.ifft(f, dim=3).transpose(2, 3), 2, rows)
        return torch.fft.irfft(f, n=width, dim=3)


def fourier(layer: type[Spectral]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 1), layer(6, 3), layer(6, 3), nn.Conv2d(6, 1, 1))


# model, sizes of its input, the dim that is cut, the lengths of the pieces by number of ranks, what it may send
EXCHANGES = {"all_to_all", "all_reduce", "reduce_scatter"}
MODELS: dict[str, tuple[Any, list[int], int, dict[int, list[int]], set[str]]] = {
    "resnet": (resnet, [2, 3, 64, 32], 2, {2: [40, 24], 3: [28, 0, 36]}, EXCHANGES),
    "residuals": (identities, [2, 3, 12, 8], 2, {2: [7, 5], 3: [9, 0, 3]}, EXCHANGES),
    "convnext": (convnext, [2, 3, 64, 32], 2, {2: [40, 24], 3: [24, 8, 32]}, EXCHANGES),
    "convnext, mean": (convnext_with_head, [2, 3, 64, 32], 2, {2: [40, 24], 3: [24, 8, 32]}, EXCHANGES),
    "video vae": (lambda: video_vae(False), [1, 4, 2, 8, 6], 3, {3: [4, 1, 3]}, EXCHANGES),
    # Attention in the middle block gathers the keys of a frame.
    "video vae with attention": (lambda: video_vae(True), [1, 4, 1, 8, 6], 3, {2: [5, 3]}, EXCHANGES | {"all_gather"}),
    "fourier": (lambda: fourier(Spectral), [2, 1, 16, 12], 2, {2: [11, 5], 3: [9, 0, 7]}, EXCHANGES),
    "fourier, few modes": (lambda: fourier(FewModes), [2, 1, 16, 12], 2, {2: [11, 5], 3: [9, 0, 7]}, EXCHANGES),
}


def dense(out: Any) -> Any:
    return out if isinstance(out, torch.Tensor) else out[0]


def check(plain: nn.Module, mesh: Any, inputs: list[torch.Tensor], ours: list[Any], may_send: set[str], text: str) -> Any:
    """Result and gradients of inputs and weights. Returns the result."""
    model = st.distribute_module(copy.deepcopy(plain), mesh)
    for ins in (inputs, ours):
        for t in ins:
            t.requires_grad_(t.is_floating_point())
    y, sent = counted(lambda: dense(model(*ours)))
    assert set(sent) <= may_send, f"{text}: forward sends {sent}"
    want = dense(plain(*inputs))
    compare(y, want.detach(), 1e-9, text)
    seed = numbers(random.Random(7), *want.shape)
    grad = place(seed, mesh, [p if p.is_shard() else st.Replicate() for p in y.placements], y._layout.cuts)
    _, sent = counted(lambda: y.backward(grad))
    assert set(sent) <= may_send, f"{text}: backward sends {sent}"
    want.backward(seed)
    names = [f"input {i}" for i in range(len(inputs))] + [name for name, _ in plain.named_parameters()]
    for name, a, b in zip(names, [*ours, *model.parameters()], [*inputs, *plain.parameters()], strict=True):
        if b.grad is not None:
            compare(a.grad, b.grad, 1e-9, f"{text}: gradient of {name}")
    return y


def run_model(name: str) -> None:
    make, sizes, dim, cuts, may_send = MODELS[name]
    mesh = mesh_here()
    torch.manual_seed(0)
    plain = make().double()
    for p in plain.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    whole = numbers(random.Random(3), *sizes)
    y = check(plain, mesh, [whole], [place(whole, mesh, [Shard(dim)], [cuts[mesh.size()]])], may_send, name)
    assert y.ndim == 2 or y.placements == (Shard(dim),)


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, (_, _, _, cuts, _) in MODELS.items() for world in cuts])
def test_model(pools, name, world):
    if "vae" in name:
        pytest.importorskip("diffusers")
    pools(world).run(run_model, name, seconds=100)


@pytest.mark.parametrize("end", ["mean", "scale"])
@on_ranks(2, 3)
def test_gradients_of_residuals_stay_cut(end):
    """Gradients of residuals stay cut, and only halos are sent."""
    mesh, draw = mesh_here(), random.Random(5)
    cut = {2: [5, 4], 3: [4, 0, 5]}[mesh.size()]
    whole, weights = numbers(draw, 2, 3, 9, 6), [numbers(draw, 3, 3, 3, 3) for _ in range(2)]
    x, plain = place(whole, mesh, [Shard(2)], [cut]).requires_grad_(), whole.clone().requires_grad_()
    ours = [place(w, mesh, [Replicate()], [None]) for w in weights]
    scale: Any = numbers(draw, 3, 1, 1)

    def network(x: Any, weights: Any) -> Any:
        for w in weights:
            x = x + F.conv2d(F.relu(x), w, padding=1)
        if end == "mean":
            return x.mean((2, 3)).square().sum()
        return (x * scale).sum((2, 3)).square().sum()

    (want,) = torch.autograd.grad(network(plain, weights), plain)
    scale = place(scale, mesh, [Replicate()], [None])
    with strict_mode():
        y = network(x, ours)
        (got,), sent = counted(lambda: torch.autograd.grad(y, x))
    compare(got, want, 1e-9, "gradient")
    assert got._layout == x._layout, (got._layout, sent)
    # A row of gradients of [2, 3, 6] numbers across the cut, per convolution. The scale gives every rank the whole gradient, so that the
    # second convolution lacks nothing; what it returns is cut, and so is the sum.
    calls = {"mean": 2, "scale": 1}[end]
    assert sent["all_to_all"] == (calls, calls * 2 * 3 * 6 * 8 * (cut[dist.get_rank()] > 0)), sent
    assert set(sent) <= {"all_to_all", "all_reduce"}, sent


# ---- a mesh graph network: nodes and edges are cut apart from each other ----


class GraphNet(nn.Module):
    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()

        def mlp(inputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width))

        self.encode_nodes, self.encode_edges, self.decode = mlp(3), mlp(4), nn.Linear(width, 2)
        self.of_edges, self.of_nodes = (nn.ModuleList(mlp(n * width) for _ in range(layers)) for n in (3, 2))

    def forward(self, x: Any, places: Any, senders: Any, receivers: Any) -> Any:
        apart = points.take(places, senders) - points.take(places, receivers)
        edges = self.encode_edges(torch.cat([apart, apart.norm(dim=1, keepdim=True)], 1))
        nodes = self.encode_nodes(x)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes, strict=True):
            edges = edges + of_edges(torch.cat([edges, points.take(nodes, senders), points.take(nodes, receivers)], 1))
            nodes = nodes + of_nodes(torch.cat([nodes, points.scatter(edges, receivers, like=nodes)], 1))
        return self.decode(nodes)


@on_ranks(2, 3)
def test_graph_network():
    mesh, draw = mesh_here(), random.Random(4)
    cuts = {2: ([21, 9], [50, 70]), 3: ([4, 26, 0], [70, 0, 50])}[mesh.size()]
    whole = [numbers(draw, 30, 3), numbers(draw, 30, 3)]
    ends = [torch.tensor([draw.randrange(30) for _ in range(120)]) for _ in "sr"]
    ours = [place(t, mesh, [Shard(0)], [cuts[i]]) for i, t in ((0, whole[0]), (0, whole[1]), (1, ends[0]), (1, ends[1]))]
    torch.manual_seed(0)
    # all_gather: the numbers of rows that ranks ask of each other
    y = check(GraphNet().double(), mesh, [*whole, *ends], ours, EXCHANGES | {"all_gather"}, "graph network")
    assert y._layout == ours[0]._layout
