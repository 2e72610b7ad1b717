"""Process groups on the CPU that have the names and keep the rules of torch's NCCL groups, but run over Gloo.

shardtensor makes other calls to NCCL than to Gloo. With these groups it makes the NCCL calls, with ranks and data, without a GPU.
There are two: "nccl_like" stands for torch's older group, "nccl2_like" for the one that "nccl" means since torch 2.15. They
refuse what NCCL refuses: dtypes that it does not know, bitwise reductions, tensors that are not contiguous, sizes that do
not fit, batches of anything but sends and receives. Results arrive at wait(), not before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as C10dBackend  # type: ignore[attr-defined]

NAMES = {"nccl_like": "nccl", "nccl2_like": "nccl2"}
_MOVED = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.half, torch.bfloat16, torch.float, torch.double}
_REDUCED = _MOVED - {torch.bool}
_calls: Counter[str] = Counter()  # of this process, by name
_OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG]


class Later(dist._Work):  # type: ignore[name-defined]
    """Runs `finish` once, at the first wait()."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish:
            finish()
        return True


class NcclLike(C10dBackend):
    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = name
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._batch: list[tuple[Any, list[Tensor], int, int]] | None = None

    def getBackendName(self) -> str:
        return NAMES[self._name]

    @property
    def supports_coalescing(self) -> bool:
        return True

    def _begin(self, name: str, tensors: Sequence[Tensor], op: Any = None) -> None:
        assert self._batch is None or name in ("send", "recv"), f"{name} in a batch"
        for t in tensors:
            assert t.is_contiguous(), f"{name}: a tensor of sizes {t.shape} and strides {t.stride()}"
            assert t.dtype in (_MOVED if op is None else _REDUCED), f"{name} of {t.dtype}"
            assert t.dtype == tensors[0].dtype, f"{name} of {t.dtype} and {tensors[0].dtype}"
        if op is not None and not any(op == known for known in _OPS):
            raise RuntimeError(f"{name}: NCCL has no such reduction")
        _calls[name] += 1

    def _to_come(self, places: Sequence[Tensor], values: Sequence[tuple[Tensor, Any]]) -> Later:
        def finish() -> None:
            for place, (value, work) in zip(places, values, strict=True):
                if work:
                    work.wait()
                place.copy_(value.view(place.shape))

        return Later(finish)

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
        return self._to_come(tensors, [self._from(opts.rootRank, tensors[0])])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Later:
        self._begin("allreduce", tensors, opts.reduceOp)
        out = tensors[0].clone()
        return self._to_come(tensors, [(out, self._gloo.allreduce([out], opts))])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Later:
        (places,), (mine,) = outputs, inputs
        self._begin("allgather", [mine, *places])
        assert len(places) == self.size() and places[self.rank()].numel() == mine.numel()
        return self._to_come(places, [self._from(r, mine if r == self.rank() else p) for r, p in enumerate(places)])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any) -> Later:
        self._begin("all_gather_single", [output, mine])
        assert output.numel() == self.size() * mine.numel()
        places = list(output.view(-1).chunk(self.size()))
        return self._to_come(places, [self._from(r, mine.view(-1)) for r in range(self.size())])

    def _added_up(self, out: Tensor, summands: Sequence[Tensor], op: Any) -> Later:
        assert len(summands) == self.size() and summands[self.rank()].numel() == out.numel()
        sums = [self._reduced_on(r, summand, op) for r, summand in enumerate(summands)]
        others = [pair for r, pair in enumerate(sums) if r != self.rank()]
        return self._to_come([out, *(value for value, _ in others)], [sums[self.rank()], *others])

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
        arrived, sent = torch.empty_like(output), given.clone()
        work = self._gloo.all_to_all_single(arrived, sent, output_cut, given_cut, opts)
        return self._to_come([output], [(arrived, work)])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._message("send", tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, source, tag)

    def _message(self, name: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._begin(name, tensors)
        assert math.prod(tensors[0].shape) > 0
        call = getattr(self._gloo, name)
        if self._batch is None:
            return call(tensors, peer, tag)
        self._batch.append((call, tensors, peer, tag))
        return None

    def start_coalescing(self) -> None:
        assert self.getBackendName() == "nccl2", "ranks without messages would have to take part too"
        assert self._batch is None
        self._batch = []

    def end_coalescing(self) -> Later:
        batch, self._batch = self._batch, None
        assert batch is not None
        _calls["batch"] += 1
        works = [call(tensors, peer, tag) for call, tensors, peer, tag in batch]
        return Later(lambda: [work.wait() for work in works] and None)

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)


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
