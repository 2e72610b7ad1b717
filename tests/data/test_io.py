"""data.read and data.write: each rank its boxes of an array on disk, and nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import mesh_here, mesh_of
from oracle import whole as whole_of
from pool import on_ranks
from shardtensor import Replicate, Shard, distribute_tensor
from shardtensor.data import _io, read, write, write_safetensors

# mesh, placements, lengths of the pieces along each mesh dim
LAYOUTS = [
    ((2,), ["S(0)"], None),
    ((2,), ["S(0)"], {0: [9, 0]}),
    ((3,), ["S(1)"], {0: [1, 0, 4]}),
    ((3,), ["S(0)"], {0: [2, 6, 1]}),
    ((2, 2), ["S(0)", "S(1)"], {0: [4, 5], 1: [5, 0]}),
    ((2, 2), ["S(1)", "R"], {0: [2, 3]}),
    ((2, 2), ["S(0)", "S(0)"], None),
    ((2,), ["R"], None),
]


def placements_of(texts):
    return [Replicate() if t == "R" else Shard(int(t[2])) for t in texts]


class Noting:
    """An array that notes how many elements are read."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.elements = array, array.shape, 0

    def __getitem__(self, box: Any) -> Any:
        part = self.array[box]
        self.elements += part.size
        return part


def sources(folder: Path, whole: torch.Tensor) -> dict[str, Any]:
    """The same values, as each rank opens them. The first rank makes the files."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    makes = dist.get_rank() == 0
    if makes:
        numpy.save(folder / "a.npy", whole.numpy())
        save_file({"other": torch.ones(3), "a": whole}, folder / "a.safetensors")
        torch.save(whole, folder / "a.pt")
    dist.barrier()
    opened = {
        "path": str(folder / "a.npy"),
        "memmap": numpy.load(folder / "a.npy", mmap_mode="r"),
        "array": whole.numpy(),
        "big-endian": whole.numpy().astype(">f4"),
        "tensor": torch.load(folder / "a.pt", mmap=True),
        "safetensors": safe_open(folder / "a.safetensors", "pt").__enter__().get_slice("a"),
    }
    with contextlib.suppress(ImportError):
        import h5py

        if makes:
            with h5py.File(folder / "a.h5", "w") as file:
                file.create_dataset("a", data=whole.numpy(), chunks=(2, 2))
        dist.barrier()
        opened["h5py"] = h5py.File(folder / "a.h5", "r")["a"]
    with contextlib.suppress(ImportError):
        import zarr

        if makes:
            zarr.open_array(folder / "a.zarr", mode="w", shape=whole.shape, chunks=(2, 2), dtype="float32")[:] = whole.numpy()
        dist.barrier()
        opened["zarr"] = zarr.open_array(folder / "a.zarr", mode="r")
    return opened


@pytest.mark.parametrize(("shape", "texts", "cuts"), LAYOUTS, ids=str)
@on_ranks(of="shape")
def test_read(shape, texts, cuts, tmp_path):
    mesh, placements = mesh_of(shape), placements_of(texts)
    whole = torch.arange(45.0).view(9, 5)
    for name, source in sources(tmp_path, whole).items():
        x = read(source, mesh, placements, sharding_shapes=cuts)
        assert type(x) is st.ShardTensor and x.placements == tuple(placements), name
        torch.testing.assert_close(whole_of(x), whole)
        assert cuts is None or all([s[placements[m].dim] for s in x.sharding_shapes()[m]] == cut for m, cut in cuts.items())
    noting = Noting(whole.numpy())
    x = read(noting, mesh, placements, sharding_shapes=cuts, dtype=torch.float64, requires_grad=True)
    assert noting.elements == x.to_local().numel() and x.dtype == torch.float64 and x.requires_grad and x.is_leaf
    x.sum().backward()


@pytest.mark.parametrize(("shape", "texts", "cuts"), LAYOUTS, ids=str)
@on_ranks(of="shape")
def test_write(shape, texts, cuts, tmp_path):
    from safetensors.torch import load_file

    mesh, placements = mesh_of(shape), placements_of(texts)
    whole = torch.arange(45.0).view(9, 5)
    x = read(whole, mesh, placements, sharding_shapes=cuts)
    targets = {
        "path": (tmp_path / "b.npy", False),
        "memmap": (lambda: numpy.load(tmp_path / "b.npy", mmap_mode="r+"), False),
        "in turn": (lambda: numpy.load(tmp_path / "b.npy", mmap_mode="r+"), True),
    }
    for times, (name, (target, in_turn)) in enumerate(targets.items(), 1):
        write(x * times, target() if name == "memmap" else target, in_turn=in_turn)
        assert numpy.array_equal(numpy.load(tmp_path / "b.npy"), times * whole.numpy()), name
        dist.barrier()

    scalar = st.distribute_tensor(torch.tensor(7), mesh, [st.Replicate()] * mesh.ndim)
    half = x.to(torch.bfloat16)
    write_safetensors({"x": x, "half": half, "scalar": scalar, "empty": x[:0]}, tmp_path / "b.safetensors", {"format": "pt"})
    back = load_file(tmp_path / "b.safetensors")
    assert back.keys() == {"x", "half", "scalar", "empty"} and back["empty"].shape == (0, 5)
    for name, want in {"x": whole, "half": whole.bfloat16(), "scalar": torch.tensor(7)}.items():
        torch.testing.assert_close(back[name], want, rtol=0, atol=0)


def run_hdf5(folder):
    import h5py

    if dist.get_rank() == 0:
        with h5py.File(folder / "c.h5", "w") as file:
            file.create_dataset("a", shape=(9, 5), dtype="float32", chunks=(4, 5))
    dist.barrier()

    @contextlib.contextmanager
    def opened():
        with h5py.File(folder / "c.h5", "r+") as file:
            yield file["a"]

    x = read(torch.arange(45.0).view(9, 5), mesh_here(), [Shard(0)], sharding_shapes={0: [5, 1, 3]})
    write(x, opened, in_turn=True)
    with h5py.File(folder / "c.h5", "r") as file:
        assert torch.equal(torch.from_numpy(file["a"][:]), x.full_tensor())


def test_hdf5_without_mpi_is_written_in_turn(pools, tmp_path):
    pytest.importorskip("h5py")
    pools(3).run(run_hdf5, tmp_path)


def run_zarr(folder):
    import zarr

    if dist.get_rank() == 0:
        zarr.open_array(folder / "c.zarr", mode="w", shape=(9, 5), chunks=(4, 5), dtype="float32")
    dist.barrier()
    whole = torch.arange(45.0).view(9, 5)

    def opened():
        return zarr.open_array(folder / "c.zarr", mode="r+")

    def written(x, *args, **options):
        write(x, *args, **options)
        assert torch.equal(torch.from_numpy(opened()[:]), x.full_tensor())
        dist.barrier()

    cut = read(whole, mesh_here(), [Shard(0)], sharding_shapes={0: [4, 0, 5]})
    written(cut, opened())
    through = read(whole * 2, mesh_here(), [Shard(0)], sharding_shapes={0: [3, 5, 1]})
    with pytest.raises((ValueError, RuntimeError), match=r"Cut at multiples of 4|failed on rank"):
        write(through, opened())
    written(through, opened, in_turn=True)


def test_zarr_chunks_are_written_by_one_rank_at_a_time(pools, tmp_path):
    pytest.importorskip("zarr")
    pools(3).run(run_zarr, tmp_path)


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
@on_ranks(2)
def test_a_file_appears_when_all_ranks_have_written_it(tmp_path, name):
    def store(values):
        x = distribute_tensor(values, mesh_here(), [Shard(0)])
        path = tmp_path / name
        write(x, path) if name.endswith("npy") else write_safetensors({"a": x}, path)

    store(torch.arange(18.0).view(9, 2))
    dist.barrier()
    good = (tmp_path / name).read_bytes()
    (tmp_path / name).chmod(0o640)
    seen = []
    to_disk = _io._to_disk

    def last_step(path):
        """What a rank that dies here would leave."""
        seen.append((tmp_path / name).read_bytes())
        if dist.get_rank() == 1:
            raise OSError("the disk is full, as it were")
        to_disk(path)

    _io._to_disk = last_step
    try:
        with pytest.raises((OSError, RuntimeError), match=r"as it were|failed on rank 1"):
            store(torch.ones(12, 5))
    finally:
        _io._to_disk = to_disk
    dist.barrier()
    assert seen == [good]
    assert (tmp_path / name).read_bytes() == good
    assert [file.name for file in tmp_path.iterdir()] == [name]  # nothing is left of the other
    dist.barrier()
    store(torch.ones(12, 5))
    dist.barrier()
    assert (tmp_path / name).read_bytes() != good
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


@on_ranks(2)
def test_refused_on_all_ranks(tmp_path):
    mesh, rank = mesh_here(), dist.get_rank()

    def raises(error, text, call, *args, **options):
        with pytest.raises(error, match=text):
            call(*args, **options)
        dist.barrier()

    class Broken:
        shape = (4, 2)

        def __getitem__(self, box):
            if rank == 1:
                raise OSError("a bad disk")
            return numpy.zeros((4, 2), "float32")[box]

    raises(OSError if rank else RuntimeError, "a bad disk" if rank else "failed on rank 1", read, Broken(), mesh, [Shard(0)])
    raises(ValueError, "differ between ranks 0 and 1", read, torch.ones(4 + rank, 2), mesh, [Shard(0)])
    raises(ValueError, "differ between ranks 0 and 1", read, torch.ones(4, 2).to([torch.float32, torch.float64][rank]), mesh, [Shard(0)])
    raises(ValueError, "differ between ranks 0 and 1", read, torch.ones(4, 2), mesh, [Shard(rank)])
    raises(ValueError, r"not that of a \.npy file", read, "a.txt", mesh, [Shard(0)])
    raises(ValueError, "add up to 3", read, torch.ones(4, 2), mesh, [Shard(0)], sharding_shapes={0: [1, 2]})
    x = read(torch.ones(4, 2), mesh, [Shard(0)])
    raises(ValueError, r"sizes \[4, 3\], the tensor \[4, 2\]", write, x, numpy.zeros((4, 3)))
    raises(TypeError, "a function that opens", write, x, numpy.zeros((4, 2)), in_turn=True)
    raises(TypeError, "takes a ShardTensor, not Tensor", write, torch.ones(2), numpy.zeros(2))
    raises(RuntimeError, "in summands", write, x.sum(0), numpy.zeros(2))
    raises(NotImplementedError, "which the format lacks", write_safetensors, {"x": x.to(torch.complex64)}, tmp_path / "d.safetensors")
    raises((FileNotFoundError, RuntimeError), r"No such file|failed on rank 0", write_safetensors, {"x": x}, tmp_path / "no" / "d.safetensors")
    assert read(torch.ones(4, 2), mesh).placements == (Replicate(),)
