from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from oracle import MESHES, case, compare, mesh_here, mesh_id, run_on
from pool import on_ranks
from shardtensor import Replicate, Shard, distribute_tensor, strict_mode
from test_matmul import batch_sharded
from test_reductions import complexes
from test_spatial import bytes_of_move, counted, draw_cut, numbers, place
from torch.distributed.device_mesh import init_device_mesh

CASES = [
    case("fft", lambda x: torch.fft.fft(x).abs(), (5, 4), quiet=batch_sharded(0), limit=20),
    case("fft_middle", lambda x: torch.fft.fft(x, dim=1), (3, 4, 3), quiet=batch_sharded(0, 2), limit=20),
    case("fft_complex", torch.fft.fft, complexes(5, 4), backward=False, quiet=batch_sharded(0), limit=15),
    case("fft_resized", lambda x: torch.fft.fft(x, n=6).real, (5, 4), quiet=batch_sharded(0), limit=15),
    case("ifft2", lambda x: torch.fft.ifft2(x), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("rfft", torch.fft.rfft, (5, 4), quiet=batch_sharded(0), limit=20),
    case("rfftn", lambda x: torch.fft.rfftn(x, dim=(1, 2)), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("irfft", lambda x: torch.fft.irfft(torch.complex(x, x.sin()), n=5), (5, 4), quiet=batch_sharded(0), limit=20),
    case("there_and_back", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(3, 4)), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("hfft", lambda x: torch.fft.hfft(torch.complex(x, x.cos())), (5, 4), quiet=batch_sharded(0), limit=15),
    case("ihfft", torch.fft.ihfft, (5, 4), quiet=batch_sharded(0), limit=15),
    case("fftshift", lambda x: torch.fft.fftshift(x, dim=1), (5, 4), quiet=batch_sharded(0), limit=15),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


# ---- along a cut dim: another dim is cut instead, by one exchange ----

# transform of (x, dims), whether x is complex
TRANSFORMS: dict[str, tuple[Callable[[Any, list[int]], Any], bool]] = {
    "fftn": (lambda x, dims: torch.fft.fftn(x, dim=dims), True),
    "ifftn": (lambda x, dims: torch.fft.ifftn(x, dim=dims, norm="ortho"), True),
    "rfftn": (lambda x, dims: torch.fft.rfftn(x, dim=dims), False),
    "irfftn": (lambda x, dims: torch.fft.irfftn(x, dim=dims, norm="forward"), True),
    "rfft": (lambda x, dims: torch.fft.rfft(x, dim=dims[0]), False),
    "fft": (lambda x, dims: torch.fft.fft(x, dim=dims[0]), True),
    "hfft": (lambda x, dims: torch.fft.hfft(x, dim=dims[0]), True),
}


def may_take_cut(sizes: Sequence[int], mesh: Any, placements: Sequence[Any], m: int, dims: Sequence[int]) -> bool:
    """Whether another dim than `dims` has an index for each rank, if mesh dim m cuts it too."""
    others = [d for d in range(len(sizes)) if d not in dims]
    pieces = {d: math.prod(n for k, n in enumerate(mesh.shape) if k != m and placements[k] == Shard(d)) for d in others}
    return any(sizes[d] >= mesh.size(m) * pieces[d] for d in others)


@on_ranks((2,), (3,), (2, 2))
def test_cut(shape):
    mesh, draw = init_device_mesh("cpu", shape), random.Random(f"{shape}")
    exchanged = 0
    for _ in range(100):
        sizes = [draw.randint(1, 12) for _ in range(draw.randint(2, 4))]
        name = draw.choice(list(TRANSFORMS))
        transform, is_complex = TRANSFORMS[name]
        dims = draw.sample(range(len(sizes)), draw.randint(1, len(sizes)) if name.endswith("n") else 1)
        if name in ("irfftn", "hfft") and sizes[dims[-1]] == 1:
            continue  # a result of no elements, which torch refuses
        whole = numbers(draw, *sizes)
        whole = (torch.complex(whole, numbers(draw, *sizes)) if is_complex else whole).requires_grad_()
        placements = [draw.choice([*map(Shard, dims), *map(Shard, range(len(sizes))), Replicate()]) for _ in shape]
        cuts = [
            draw_cut(draw, sizes[p.dim], n) if p.is_shard() and p not in placements[:m] else None
            for m, (p, n) in enumerate(zip(placements, shape, strict=True))
        ]
        x = place(whole, mesh, placements, cuts).requires_grad_()
        text = f"{name} {dims} of {x._layout}, {sizes}"
        y, sent = counted(lambda: transform(x, dims))  # noqa: B023
        want = transform(whole, dims)
        compare(y, want.detach(), 1e-9, text)
        moving = [m for m, p in enumerate(placements) if p.is_shard() and p.dim in dims]
        fits = all(may_take_cut(sizes, mesh, placements, m, dims) for m in moving)
        assert moving or not sent, f"{text} sends {sent}"
        if fits and len(moving) == 1:
            assert set(sent) <= {"all_to_all"} and sent.get("all_to_all", (0, 0))[0] <= 1, f"{text} sends {sent}"
            assert [p.is_shard() for p in y.placements] == [p.is_shard() for p in placements], f"{text}: {y._layout}"
            exchanged += 1
        if fits and len(dims) == 1:  # neither more nor less than what the ranks lack
            most = bytes_of_move(mesh, x, y, torch.arange(whole.numel()).view(sizes))
            assert most is None or sent.get("all_to_all", (0, 0))[1] == most, f"{text} sends {sent}, {most} bytes are enough"
        upstream = numbers(draw, *want.shape)
        upstream = torch.complex(upstream, numbers(draw, *want.shape)) if want.is_complex() else upstream
        grad = place(upstream, mesh, y.placements, y._layout.cuts)
        (g,), sent = counted(lambda: torch.autograd.grad(y, x, grad))  # noqa: B023
        compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, f"gradient of {text}")
        back = [m for m, p in enumerate(y.placements) if p.is_shard() and p.dim in dims]
        if all(may_take_cut(sizes, mesh, y.placements, m, dims) for m in back):
            assert set(sent) <= {"all_to_all"}, f"gradient of {text} sends {sent}"
    assert exchanged > 15


# One signal, cut over the ranks: rows of it are exchanged for columns. How long it is, and how it is cut.
SIGNALS: dict[str, tuple[int, list[int] | None]] = {"even": (8192, None), "uneven": (6000, [1000, 0, 5000]), "odd": (5 * 1021, None)}
WAVES: dict[str, Callable[[Any], Any]] = {
    "fft": torch.fft.fft,
    "ifft": lambda x: torch.fft.ifft(x, norm="ortho"),
    "rfft": lambda x: torch.fft.rfft(x.real, norm="forward"),
    "real": lambda x: torch.fft.fft(x.real),
    "irfft": lambda x: torch.fft.irfft(x, n=x.shape[-1] // 1000 * 2000),
    "hfft": lambda x: torch.fft.hfft(x, n=2 * x.shape[-1] - 1, norm="ortho"),
}


def run_signal(name: str, compiled: bool = False, inference: bool = False) -> None:
    mesh, draw = init_device_mesh("cpu", (3,)), random.Random(1)
    for length, cut in [SIGNALS["uneven"]] if compiled else SIGNALS.values():
        whole = torch.complex(numbers(draw, 1, length), numbers(draw, 1, length)).requires_grad_()
        x = place(whole, mesh, [Shard(1)], [cut]).requires_grad_()
        text = f"{name} of {x._layout}, {length}"
        torch._dynamo.reset()
        wave = torch.compile(WAVES[name], backend="aot_eager", dynamic=False) if compiled else WAVES[name]
        with torch.inference_mode(inference), strict_mode(not compiled):
            y, sent = counted(lambda: wave(x))  # noqa: B023
        want = WAVES[name](whole)
        compare(y, want.detach(), 1e-9, text)
        assert y.placements == (Shard(1),) and set(sent) <= {"all_to_all"}, f"{text} sends {sent}"
        if inference:
            continue
        parts = [y._layout.intervals(1, y.shape[1], [i])[0][1] for i in range(3)]
        assert max(parts) - min(parts) <= 200, f"{text}: {y._layout}"
        upstream = numbers(draw, *want.shape)
        upstream = torch.complex(upstream, numbers(draw, *want.shape)) if want.is_complex() else upstream
        (g,), sent = counted(lambda: torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts)))  # noqa: B023
        compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, f"gradient of {text}")
        assert set(sent) <= {"all_to_all"}, f"gradient of {text} sends {sent}"


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", WAVES)
def test_one_signal(pools, name, inference):
    pools(3).run(run_signal, name, inference=inference)


@on_ranks(3, seconds=100)
def test_signal_of_any_length():
    """In a graph whose sizes are symbols: a long signal is compiled again for each length, and exchanged."""
    from torch._dynamo.backends.common import aot_autograd

    mesh, draw, called = init_device_mesh("cpu", (3,)), random.Random(1), []

    def keep(graph: Any, _: Any) -> Any:
        called.extend(n.target._opname for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(torch.fft.rfft, backend=aot_autograd(fw_compiler=keep), dynamic=True)
    for length in (6000, 6300):
        whole = numbers(draw, 1, length).requires_grad_()
        x = place(whole, mesh, [Shard(1)], [None]).requires_grad_()
        y, want = compiled(x), torch.fft.rfft(whole)
        compare(y, want.detach(), 1e-9, "result")
        upstream = torch.ones_like(want).detach()
        (g,) = torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts))
        compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, "gradient")
    assert "all_to_all_single" in called and "all_gather_into_tensor" not in called, called


def test_one_signal_compiled(pools):
    pools(3).run(run_signal, "rfft", compiled=True, seconds=100)


@on_ranks(3)
def test_a_prime_length_gathers():
    """A length without two factors for three ranks is gathered, and so is a short signal. With strict mode, it raises."""
    mesh = init_device_mesh("cpu", (3,))
    for length in (8191, 600):
        whole = numbers(random.Random(2), length)
        x = place(whole, mesh, [Shard(0)], [None])
        y, sent = counted(lambda: torch.fft.fft(x))  # noqa: B023
        compare(y, torch.fft.fft(whole), 1e-9, f"{length}")
        assert set(sent) == {"all_gather"}, sent
        with strict_mode(), pytest.raises(RuntimeError, match="fft"):
            torch.fft.fft(x * 1)


# One image, without a batch or channels. There and back: rows at home, one exchange, columns; columns at home, one exchange, rows.
IMAGES = {"even": (12, 10, None), "uneven": (13, 7, [8, 0, 5])}


def run_image(height: int, width: int, cut: list[int] | None, inference: bool) -> None:
    mesh, draw = init_device_mesh("cpu", (3,)), random.Random(1)
    whole = numbers(draw, 1, 1, height, width)
    x = place(whole, mesh, [Shard(2)], [cut])
    with torch.inference_mode(inference), strict_mode():
        f, sent = counted(lambda: torch.fft.rfft2(x))
        assert f.placements == (Shard(3),)
        held = place(f.full_tensor(), mesh, [Shard(2)], [cut])  # before the exchange
        order = torch.arange(f.numel()).view(f.shape)
        assert sent == {"all_to_all": (1, bytes_of_move(mesh, held, f, order))}
        compare(f, torch.fft.rfft2(whole), 1e-9, "there")
        y, sent = counted(lambda: torch.fft.irfft2(f, s=(height, width)))
        assert y.placements == (Shard(2),)
        back = place(f.full_tensor(), mesh, [Shard(2)], [None])
        assert sent == {"all_to_all": (1, bytes_of_move(mesh, f, back, order))}
        compare(y, whole, 1e-9, "and back")


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("image", IMAGES)
def test_image(pools, image, inference):
    pools(3).run(run_image, *IMAGES[image], inference)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on_ranks(3, seconds=100)
def test_compiled(dynamic):
    from torch._dynamo.backends.common import aot_autograd

    mesh, draw, called = init_device_mesh("cpu", (3,)), random.Random(1), []

    def keep(graph: Any, _: Any) -> Any:
        called.extend(n.target._opname for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    function = torch.compile(lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), backend=aot_autograd(fw_compiler=keep), dynamic=dynamic)
    for width in (6, 8):
        whole = numbers(draw, 1, 2, 9, width).requires_grad_()
        x = place(whole, mesh, [Shard(2)], [[5, 0, 4]]).requires_grad_()
        y = function(x)
        assert y.placements == (Shard(2),)
        compare(y, whole.detach(), 1e-9, "there and back")
        upstream = numbers(draw, *whole.shape)
        (g,) = torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts))
        compare(g, upstream, 1e-9, "gradient")
    assert "all_to_all_single" in called and "all_gather_into_tensor" not in called


# ---- windows in time: a halo ----


def window_of(n: int, like: Any) -> Any:
    window = torch.hann_window(n, dtype=torch.float64)
    return place(window, like.device_mesh, [Replicate()], [None]) if hasattr(like, "placements") else window


STFTS: dict[str, Callable[[Any], Any]] = {
    "centred": lambda x: torch.stft(x, 16, 4, window=window_of(16, x), return_complex=True),
    "not centred": lambda x: torch.stft(x, 12, 5, window=window_of(12, x), center=False, return_complex=True, normalized=True),
    "narrow window": lambda x: torch.stft(x, 16, None, 9, window_of(9, x), return_complex=True, onesided=False),
    "real numbers": lambda x: torch.view_as_real(torch.stft(x, 16, 4, window=window_of(16, x), return_complex=True)),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", STFTS)
@on_ranks(3)
def test_stft(name, inference):
    mesh, draw = init_device_mesh("cpu", (3,)), random.Random(1)
    for sizes, cut in (((2, 90), None), ((2, 83), [40, 0, 43]), ((77,), [3, 70, 4])):
        whole = numbers(draw, *sizes).requires_grad_()
        x = place(whole, mesh, [Shard(len(sizes) - 1)], [cut]).requires_grad_()
        with torch.inference_mode(inference):
            y, sent = counted(lambda: STFTS[name](x))  # noqa: B023
        want = STFTS[name](whole)
        assert set(sent) <= {"all_to_all"} and y.placements == (Shard(len(sizes)),), f"{sent} {y._layout}"
        compare(y, want.detach(), 1e-9, name)
        if not inference:
            upstream = want.detach() * 2
            grad = place(upstream, mesh, y.placements, y._layout.cuts)
            (g,), sent = counted(lambda: torch.autograd.grad(y, x, grad))  # noqa: B023
            assert set(sent) <= {"all_to_all"}, sent
            compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, f"gradient of {name}")


# ---- in memory ----

# How a tensor of four dims lies.
LIES: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(3, 0, 1, 2),
    "reversed": lambda t: t.permute(2, 3, 1, 0),
    "sliced": lambda t: t[:, ::2].transpose(1, 2),
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "thin": lambda t: t[:, :1].transpose(0, 3),
}
DIMS = [(0,), (1,), (3,), (0, 1), (1, 0), (-1, -2), (3, 0), (1, 2, 3), (3, 1, 0), (0, 1, 2, 3)]


def in_memory(t: Any) -> list[int]:
    """The dims that have more than one index, the outermost first."""
    return sorted((d for d in range(t.ndim) if t.shape[d] > 1), key=lambda d: -t.stride(d))


@on_ranks(2, seconds=100)
def test_lies_in_memory_as_torchs():
    """The strides are torch's, which depend on those of the input, and the gradient's dims are ordered as torch's."""
    whole = torch.randn(4, 6, 4, 5, generator=torch.Generator().manual_seed(0))
    transforms: dict[str, Callable[[Any, Sequence[int]], Any]] = {
        "fftn": lambda t, dims: torch.fft.fftn(t, dim=dims),
        "rfftn": lambda t, dims: torch.fft.rfftn(t, dim=dims),
        "ihfftn": lambda t, dims: torch.fft.ihfftn(t, dim=dims),
        "irfftn": lambda t, dims: torch.fft.irfftn(torch.complex(t, t), dim=dims) if t.shape[dims[-1]] > 1 else t,
        "hfftn": lambda t, dims: torch.fft.hfftn(torch.complex(t, t), [*(t.shape[d] for d in dims[:-1]), 2 * t.shape[dims[-1]] - 1], dims),
    }
    for (lies, form), (name, transform), dims in itertools.product(LIES.items(), transforms.items(), DIMS):
        plain = form(whole).requires_grad_()
        want = transform(plain, dims)
        upstream = torch.ones_like(want, memory_format=torch.contiguous_format).detach()
        (back,) = torch.autograd.grad(want, plain, upstream)
        for placement in (Replicate(), Shard(0), Shard(1), Shard(3)):
            text = f"{name} {dims} of {lies} {placement}"
            x = form(distribute_tensor(whole, mesh_here(), [placement])).detach().requires_grad_()
            got = transform(x, dims)
            assert got.stride() == want.stride(), f"{text}: {got.stride()}, not {want.stride()}"
            compare(got, want.detach(), 1e-4, text)
            (g,) = torch.autograd.grad(got, x, distribute_tensor(upstream, mesh_here(), [Replicate()]))
            assert in_memory(g) == in_memory(back) or lies == "thin", f"gradient of {text}: {g.stride()}, not {back.stride()}"


@on_ranks(2, seconds=100)
def test_lies_in_memory_as_torchs_compiled():
    whole = torch.randn(4, 6, 4, 5, generator=torch.Generator().manual_seed(0))

    def both(t: Any) -> tuple[Any, Any]:
        return torch.fft.rfftn(t, dim=(0, 1)), torch.fft.irfft(torch.complex(t, t), dim=1)

    for lies, placement in (("contiguous", Shard(0)), ("channels_last", Shard(3))):
        for dynamic in (False, True):
            torch._dynamo.reset()
            x = LIES[lies](distribute_tensor(whole, mesh_here(), [placement]))
            for got, want in zip(torch.compile(both, backend="aot_eager", dynamic=dynamic)(x), both(LIES[lies](whole)), strict=True):
                assert got.stride() == want.stride(), (lies, placement, dynamic, got.stride(), want.stride())
                compare(got, want, 1e-4, f"{lies} {placement} {dynamic}")
