"""Arrays on disk, read and written box by box: no rank ever holds the whole."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import shardtensor._C as _C
from shardtensor.tensor._factories import _full_layout
from shardtensor.tensor._from_local import from_everyone
from shardtensor.tensor._layout import _REPLICATE, ShardingShapes
from shardtensor.tensor._mesh import as_mesh, device_of, given_mesh
from shardtensor.tensor._pieces import _refuse_summands, box_views, has_shards
from shardtensor.tensor._tensor import ShardTensor


def read(
    source: Any,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    sharding_shapes: ShardingShapes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """A ShardTensor whose piece each rank reads from `source`: its box, and nothing else.

    source: an object that has a shape and returns a part for a tuple of slices. A numpy array or memmap, an h5py Dataset, a zarr
    Array, a slice of a safetensors file (`file.get_slice(name)`), a tensor (`torch.load(..., mmap=True)`), or the path of a .npy
    file. Each rank opens its own. Ranks that hold the same piece all read it.

    dtype: of the result; by default that of `source`. The ranks compare sizes, dtypes and arguments, and if reading fails on one
    of them, all raise.
    """
    who = "data.read"
    mesh = given_mesh(mesh, who)
    view = as_mesh(mesh)
    if not view.has_this_rank:
        raise ValueError(f"{who}: argument 'mesh' ({view}) does not hold rank {view.rank}, so this rank has nothing to read")
    piece, sizes, layout, error = None, [], None, None
    try:
        source = _opened(source)
        sizes = _sizes_of(source)
        layout = _full_layout(mesh, placements, sizes, sharding_shapes, who)
        piece = _read_piece(source, layout, sizes).to(dtype=dtype, device=device_of(mesh))
    except Exception as problem:
        error = problem
    _agree(who, view, device_of(mesh), error, (sizes, str(layout), layout and layout.cuts, piece is not None and piece.dtype))
    assert piece is not None and layout is not None
    return _C.wrap(piece, layout, sizes, _C.strides_like(sizes, piece)).requires_grad_(requires_grad)  # type: ignore[return-value]


def write(x: torch.Tensor, target: Any, *, in_turn: bool = False) -> None:
    """Writes a ShardTensor to `target`: each rank its box; of ranks that hold the same piece, the first.

    target: an object that takes a part for a tuple of slices, such as a numpy memmap opened with "r+", a zarr Array or an h5py Dataset of a
    file that all ranks may write to; or the path of a .npy file, which appears when it is complete (one that was there before stays as
    it was until then). It may also be a function that opens one and
    returns it, or returns a context manager that gives it.

    in_turn: one rank after the other opens the target by the function, writes and closes it. For files that only one process at
    a time may write to (HDF5 without MPI), and for zarr Arrays with chunks that several ranks write to.

    When it returns, all ranks have written. If writing fails on a rank, all raise. numpy has no bfloat16: such values are written as
    float32.
    """
    who = "data.write"
    x = _whole_summands_refused(x, who)
    view, device = x._layout.mesh, device_of(x._layout.mesh)
    if in_turn and not callable(target):
        raise TypeError(f"{who}: with in_turn=True the argument 'target' is a function that opens the target, not {type(target).__name__}")
    path = Path(os.path.realpath(target)) if isinstance(target, (str, os.PathLike)) else None
    if path is not None:
        _make_npy(path, x, who)
        target = _mapped(_unfinished(path), "r+")
    for turn in range(len(view.ranks)) if in_turn else [None]:
        error: Exception | None = None
        try:
            if turn is None or view.ranks[turn] == view.rank:
                with _open(target) as array:
                    if list(_sizes_of(array)) != list(x.shape):
                        raise ValueError(f"{who}: argument 'target' has sizes {_sizes_of(array)}, the tensor {list(x.shape)} (rank {view.rank})")
                    if not in_turn:
                        _check_chunks(array, x, who)
                    for offsets, box in _my_boxes(x):
                        array[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))] = _for_target(box, array)
                    if hasattr(array, "flush"):
                        array.flush()
        except Exception as problem:
            error = problem
        if path is None:
            _agree(who, view, device, error, None)
        else:
            _finish(path, who, view, device, error)


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Writes ShardTensors of one mesh to a .safetensors file: the first rank its header, and each rank its boxes.

    The file appears when it is complete. Until then it has another name beside it, and a file that was there before stays as it was."""
    who = "data.write_safetensors"
    if not tensors:
        raise ValueError(f"{who}: argument 'tensors' is empty")
    checked = {name: _whole_summands_refused(t, f"{who}: {name!r}") for name, t in tensors.items()}
    first = next(iter(checked.values()))
    view, device = first._layout.mesh, device_of(first._layout.mesh)
    for name, t in checked.items():
        if t._layout.mesh != view:
            raise ValueError(f"{who}: {name!r} is on {t._layout.mesh}, other tensors on {view}; write each mesh's to a file of its own (rank {view.rank})")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start, begins = 0, {}
    for name, t in checked.items():
        if t.dtype not in _SAFE:
            raise NotImplementedError(f"{who}: {name!r} is {t.dtype}, which the format lacks (rank {view.rank})")
        begins[name] = start
        header[name] = {"dtype": _SAFE[t.dtype], "shape": list(t.shape), "data_offsets": [start, start + t.numel() * t.itemsize]}
        start += t.numel() * t.itemsize
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = Path(os.path.realpath(path))
    error: Exception | None = None
    try:
        if view.rank == view.ranks[0]:
            with open(_unfinished(path), "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + start)
    except Exception as problem:
        error = problem
    _agree(who, view, device, error, (text, os.fspath(path)))
    try:
        for name, t in checked.items():
            _write_bytes(t, _unfinished(path), 8 + len(text) + begins[name])
    except Exception as problem:
        error = problem
    _finish(path, who, view, device, error)


# ---- a file appears when it is complete ----


def _unfinished(path: Path) -> Path:
    """The file's name until all ranks have written it; the same on all ranks, and in the same folder."""
    return path.with_name(f".{path.stem}.unfinished{path.suffix}")


def _finish(path: Path, who: str, view: _C.Mesh, device: torch.device, error: Exception | None) -> None:
    """This rank has written its part, or failed. If all have, and all parts are on the disk, the file gets its name."""
    part, first = _unfinished(path), view.rank == view.ranks[0]
    try:
        if error is None:
            _to_disk(part)
    except Exception as problem:
        error = problem
    try:
        _agree(who, view, device, error, None)
    except Exception:
        if first:
            part.unlink(missing_ok=True)
        raise
    try:
        if first:
            if path.exists():
                shutil.copymode(path, part)
            os.replace(part, path)
            _to_disk(path.parent)
    except Exception as problem:
        error = problem
    _agree(who, view, device, error, None)


def _to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# ---- all ranks go on, or none ----


def _agree(who: str, view: _C.Mesh, device: torch.device, error: Exception | None, same: Any) -> None:
    """Raises on all ranks if one has failed, or if `same` differs."""
    told = from_everyone([error is not None, zlib.crc32(repr(same).encode())], view, device)
    if error is not None:
        raise error
    for rank, (failed, _) in zip(view.ranks, told, strict=True):
        if failed:
            raise RuntimeError(f"{who}: failed on rank {rank}, whose error says why (rank {view.rank})")
    for rank, (_, digest) in zip(view.ranks, told, strict=True):
        if digest != told[0][1]:
            raise ValueError(
                f"{who}: sizes, dtype or arguments differ between ranks {view.ranks[0]} and {rank}; here they are {same} (rank {view.rank})"
            )


def _whole_summands_refused(x: torch.Tensor, who: str) -> ShardTensor:
    if not isinstance(x, DTensor):
        raise TypeError(f"{who}: takes a ShardTensor, not {type(x).__name__}")
    ours = ShardTensor.from_dtensor(x)
    layout = ours._layout
    if has_shards(ours):
        raise NotImplementedError(f"{who}: the tensor's pieces are LocalShardsWrappers; redistribute it to a layout first (rank {layout.mesh.rank})")
    if not layout.mesh.has_this_rank:
        raise ValueError(f"{who}: {layout.mesh} does not hold rank {layout.mesh.rank}, so this rank has nothing to write")
    _refuse_summands(layout, f"{who}: the tensor")
    return ours.detach()  # type: ignore[return-value]


# ---- this rank's boxes ----


def _my_boxes(x: ShardTensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """This rank's boxes, empty ones left out; none if an earlier rank holds the same."""
    layout = x._layout
    if any(c for c, (kind, *_) in zip(layout.mesh.coordinate, layout.placements, strict=True) if kind == _REPLICATE):
        return
    for offsets, box in box_views(x._local_tensor, layout, list(x.shape)):
        if box.numel():
            yield offsets, box


def _read_piece(source: Any, layout: _C.Layout, sizes: list[int]) -> torch.Tensor:
    boxes = [
        (offsets, _as_tensor(source[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]).reshape(lengths))
        for offsets, lengths in layout.boxes(sizes)
    ]
    if len(boxes) == 1:
        return boxes[0][1].contiguous()
    piece = boxes[0][1].new_empty(layout.local_sizes(sizes))
    for (_, box), (_, to) in zip(boxes, box_views(piece, layout, sizes), strict=True):
        to.copy_(box)
    return piece


def _as_tensor(part: Any) -> torch.Tensor:
    """A tensor with memory of its own: a memmap's would read the file again whenever it is used."""
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    import numpy  # noqa: PLC0415  optional

    array = numpy.array(part, copy=True, order="C")
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))  # weather data are often big-endian


def _for_target(box: torch.Tensor, array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return box
    box = box.cpu()
    return (box.float() if box.dtype == torch.bfloat16 else box).numpy()  # numpy has no bfloat16


# ---- sources and targets ----


def _sizes_of(array: Any) -> list[int]:
    shape = array.get_shape() if hasattr(array, "get_shape") else array.shape
    return [int(n) for n in shape]


def _opened(source: Any) -> Any:
    return _mapped(Path(source), "r")() if isinstance(source, (str, os.PathLike)) else source


def _mapped(path: Path, mode: Literal["r", "r+", "w+"]) -> Callable[[], Any]:
    if path.suffix != ".npy":
        raise ValueError(f"data: path {path} is not that of a .npy file; open other files and pass what has a shape and takes slices")

    def opened() -> Any:
        import numpy  # noqa: PLC0415  optional

        return numpy.load(path, mmap_mode=mode)

    return opened


@contextmanager
def _open(target: Any) -> Iterator[Any]:
    opened = target() if callable(target) and not hasattr(target, "__setitem__") else target
    if isinstance(opened, AbstractContextManager) and not hasattr(opened, "__setitem__"):
        with opened as array:
            yield array
    else:
        yield opened


def _make_npy(path: Path, x: ShardTensor, who: str) -> None:
    """The first rank makes the file."""
    view, error = x._layout.mesh, None
    try:
        _mapped(path, "w+")
        if view.rank == view.ranks[0]:
            import numpy  # noqa: PLC0415  optional

            dtype = _for_target(x._local_tensor.new_empty(0), None).dtype
            numpy.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=dtype, shape=tuple(x.shape)).flush()
    except Exception as problem:
        error = problem
    _agree(who, view, device_of(view), error, (os.fspath(path), x.dtype, x._layout.placements, x._layout.cuts))


def _check_chunks(array: Any, x: ShardTensor, who: str) -> None:
    """Refuses an array whose chunks are written as a whole (zarr's) if a cut runs through a chunk: of two ranks that write to one
    chunk at the same time, one would undo what the other has written."""
    chunks = getattr(array, "shards", None) or getattr(array, "chunks", None)
    if not isinstance(chunks, Sequence) or not all(isinstance(n, int) for n in chunks) or type(array).__module__.startswith("h5py"):
        return
    layout = x._layout
    for dim, (size, chunk) in enumerate(zip(x.shape, chunks, strict=True)):
        for start, length in layout.intervals(dim, size):
            if length and start % chunk:
                raise ValueError(
                    f"{who}: argument 'target' has chunks of {chunk} along dim {dim}, and the piece of rank {layout.mesh.rank} begins at {start}, inside "
                    f"one. Cut at multiples of {chunk} (redistribute with sharding_shapes), or let the ranks write in turn: pass a function that "
                    "opens the target, and in_turn=True"
                )


# ---- safetensors ----

_SAFE = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def _write_bytes(x: ShardTensor, path: str | os.PathLike[str], start: int) -> None:
    import numpy  # noqa: PLC0415  optional

    if not x.numel():
        return
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    boxes = list(_my_boxes(x))
    if boxes:
        file = numpy.memmap(path, dtype=str(plain).removeprefix("torch."), mode="r+", offset=start, shape=tuple(x.shape))
        for offsets, box in boxes:
            part = box.cpu().contiguous()
            if box.ndim:
                file[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))] = part.view(plain).numpy()
            else:
                file[()] = part.reshape(1).view(plain).numpy()[0]
        file.flush()
