"""Process groups on the CPU that have the names and keep the rules of torch's NCCL groups, but run over Gloo.

shardtensor makes other calls to NCCL than to Gloo. With these groups it makes the NCCL calls, with ranks and data, without a GPU.
There are two: "nccl_like" stands for torch's older group, "nccl2_like" for the one that "nccl" means since torch 2.15. They
refuse what NCCL refuses: dtypes that it does not know, bitwise reductions, tensors that are not contiguous, sizes that do
not fit, batches of anything but sends and receives, messages of an nccl2 group outside of a batch, tensors on another device.

Results arrive at wait(), not before. After hold(), wait() does not return before release(): a device that is late. Until then the
groups keep what torch's keep: the older one its inputs and outputs, nccl2 its inputs alone. lost() tells which outputs were freed
before they had been written. A list of outputs whose first two have one address is one buffer to nccl2; empty ones have no address.
A lazy nccl2 group cannot begin with messages among some of the ranks.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as C10dBackend  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef

NAMES = {"nccl_like": "nccl", "nccl2_like": "nccl2"}
_MOVED = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.half, torch.bfloat16, torch.float, torch.double}
_REDUCED = _MOVED - {torch.bool}
_calls: Counter[str] = Counter()  # of this process, by name
_unaligned: list[str] = []
_lazy = False  # whether groups make their communicator at the first call
_OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG]


_device_goes_on = threading.Event()
_device_goes_on.set()
_failing: list[str] = []  # the next call of such a name raises


class Flight:
    """What the group itself knows of a call that has not ended."""

    def __init__(self, name: str, written: Sequence[Tensor], kept: list[Any]) -> None:
        self.name = name
        self.written = [StorageWeakRef(t.untyped_storage()) for t in written if t.numel()]
        self.kept = kept


_flights: list[Flight] = []


class Later(dist._Work):  # type: ignore[name-defined]
    """Runs `finish` once, at the first wait()."""

    def __init__(self, finish: Callable[[], None], flight: Flight) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._flight = flight
        _flights.append(flight)

    def wait(self, timeout: Any = None) -> bool:
        _device_goes_on.wait()
        finish, self._finish = self._finish, None
        if finish:
            finish()
            _flights.remove(self._flight)
        return True


def hold() -> None:
    """From now on, nothing ends."""
    _device_goes_on.clear()


def release() -> None:
    _device_goes_on.set()


def lost() -> list[str]:
    """The calls that have not ended and whose outputs have been freed. NCCL would write into memory of others."""
    return [flight.name for flight in _flights if any(ref.expired() for ref in flight.written)]


def forget() -> None:
    """Of the calls so far, nothing is in flight any more."""
    _flights.clear()


def in_flight() -> int:
    return len(_flights)


def fail_next(name: str) -> None:
    _failing.append(name)


class NcclLike(C10dBackend):
    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = name
        self._device = torch.device("cpu")
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._batch: list[tuple[str, list[Tensor], int, int]] | None = None
        self._has_communicator = not _lazy

    def getBackendName(self) -> str:
        return NAMES[self._name]

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return self._has_communicator

    def _begin(self, name: str, tensors: Sequence[Tensor], op: Any = None) -> None:
        messages = name in ("send", "recv")
        assert self._batch is None or messages, f"{name} in a batch"
        assert self._batch is not None or not messages or self.getBackendName() != "nccl2", f"{name} outside of a batch"
        assert self._has_communicator or not messages, f"{name}: all ranks would have to call"
        self._has_communicator = True
        if name in _failing:
            _failing.remove(name)
            raise RuntimeError(f"{name}: refused, as a test wants it")
        for t in tensors:
            assert t.device == self._device, f"{name}: a tensor on {t.device} in a group of {self._device}"
            assert t.is_contiguous(), f"{name}: a tensor of sizes {t.shape} and strides {t.stride()}"
            assert t.dtype in (_MOVED if op is None else _REDUCED), f"{name} of {t.dtype}"
            assert t.dtype == tensors[0].dtype, f"{name} of {t.dtype} and {tensors[0].dtype}"
        if op is not None and not any(op == known for known in _OPS):
            raise RuntimeError(f"{name}: NCCL has no such reduction")
        _calls[name] += 1
        self._note_starts(name, [(t, []) for t in tensors])

    def _note_starts(self, name: str, given: Sequence[tuple[Tensor, list[int]]]) -> None:
        for tensor, cut in given:
            starts = itertools.accumulate(cut[:-1], initial=0)
            if any((tensor.data_ptr() + start) % 16 for start, size in zip(starts, cut or [tensor.numel()], strict=True) if size):
                _unaligned.append(name)

    def _later(self, name: str, finish: Callable[[], None], given: Sequence[Tensor], places: Sequence[Tensor]) -> Later:
        kept = list(given) if self.getBackendName() == "nccl2" else [*given, *places, finish]
        return Later(finish, Flight(name, places, kept))

    def _to_come(
        self, name: str, given: Sequence[Tensor], places: Sequence[Tensor], values: Sequence[tuple[Tensor, Any]]
    ) -> Later:
        def finish() -> None:
            for place, (value, work) in zip(places, values, strict=True):
                if work:
                    work.wait()
                place.copy_(value.view(place.shape))

        return self._later(name, finish, given, places)

    def _from(self, root: int, value: Tensor) -> tuple[Tensor, Any]:
        out, options = value.clone(), dist.BroadcastOptions()
        options.rootRank = root
        return out, self._gloo.broadcast([out], options) if out.numel() else None

    def _reduced_on(self, root: int, value: Tensor, op: Any) -> tuple[Tensor, Any]:
        out, options = value.clone(), dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, op
        return out, self._gloo.reduce([out], options) if out.numel() else None

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Later:
        self._begin("broadcast", tensors)
        return self._to_come("broadcast", tensors, tensors, [self._from(opts.rootRank, tensors[0])])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Later:
        self._begin("allreduce", tensors, opts.reduceOp)
        out = tensors[0].clone()
        return self._to_come("allreduce", tensors, tensors, [(out, self._gloo.allreduce([out], opts))])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Later:
        (places,), (mine,) = outputs, inputs
        self._begin("allgather", [mine, *places])
        assert len(places) == self.size() and places[self.rank()].numel() == mine.numel()
        one_buffer = self.size() > 1 and places[0].data_ptr() == places[1].data_ptr()
        assert self.getBackendName() != "nccl2" or not one_buffer, "nccl2 would gather pieces of this rank's size"
        return self._to_come("allgather", [mine], places, [self._from(r, mine if r == self.rank() else p) for r, p in enumerate(places)])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any) -> Later:
        self._begin("all_gather_single", [output, mine])
        assert output.numel() == self.size() * mine.numel()
        places = list(output.view(-1).chunk(self.size()))
        return self._to_come("all_gather_single", [mine], places, [self._from(r, mine.view(-1)) for r in range(self.size())])

    def _added_up(self, out: Tensor, summands: Sequence[Tensor], op: Any) -> Later:
        assert len(summands) == self.size() and summands[self.rank()].numel() == out.numel()
        sums = [self._reduced_on(r, summand, op) for r, summand in enumerate(summands)]
        others = [work for r, (_, work) in enumerate(sums) if r != self.rank() and work]
        value, work = sums[self.rank()]

        def finish() -> None:
            for each in (work, *others):
                if each:
                    each.wait()
            out.copy_(value.view(out.shape))

        return self._later("reduce_scatter", finish, summands, [out])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Later:
        self._begin("reduce_scatter", [*outputs, *inputs[0]], opts.reduceOp)
        return self._added_up(outputs[0], inputs[0], opts.reduceOp)

    def reduce_scatter_single(self, out: Tensor, summands: Tensor, opts: Any) -> Later:
        self._begin("reduce_scatter_single", [out, summands], opts.reduceOp)
        return self._added_up(out, summands.view(self.size(), out.numel()).unbind(), opts.reduceOp)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_cut: list[int], given_cut: list[int], opts: Any
    ) -> Later:
        self._begin("all_to_all_single", [output, given])
        for tensor, cut in ((output, output_cut), (given, given_cut)):
            assert (not cut and tensor.size(0) % self.size() == 0) or sum(cut) == tensor.size(0)
        self._note_starts("all_to_all_single", [(output, output_cut), (given, given_cut)])
        arrived, sent = torch.empty_like(output), given.clone()
        work = self._gloo.all_to_all_single(arrived, sent, output_cut, given_cut, opts)
        return self._to_come("all_to_all_single", [given], [output], [(arrived, work)])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._message("send", tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, source, tag)

    def _message(self, name: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._begin(name, tensors)
        assert math.prod(tensors[0].shape) > 0
        if self._batch is not None:
            self._batch.append((name, tensors, peer, tag))
            return None
        work = getattr(self._gloo, name)(tensors, peer, tag)
        return self._later(name, lambda: work.wait() and None, tensors, tensors if name == "recv" else [])

    def start_coalescing(self) -> None:
        assert self.getBackendName() == "nccl2", "ranks without messages would have to take part too"
        assert self._batch is None
        self._batch = []

    def end_coalescing(self) -> Later:
        batch, self._batch = self._batch, None
        assert batch is not None
        _calls["batch"] += 1
        works = [getattr(self._gloo, name)(tensors, peer, tag) for name, tensors, peer, tag in batch]
        sent, received = ([tensors[0] for name, tensors, *_ in batch if name == kind] for kind in ("send", "recv"))
        return self._later("batch", lambda: [work.wait() for work in works] and None, sent, received)

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)


def unaligned() -> list[str]:
    """The calls since this was last called that NCCL would make byte by byte: something starts at no multiple of 16 bytes."""
    out = list(_unaligned)
    _unaligned.clear()
    return out


def calls() -> dict[str, int]:
    """The number of calls since this was last called, by name."""
    out = dict(_calls)
    _calls.clear()
    return out


def register() -> None:
    for name in NAMES:
        dist.Backend.register_backend(
            name,
            lambda store, rank, size, timeout, name=name: NcclLike(name, store, rank, size, timeout),
            devices=["cpu"],
        )
