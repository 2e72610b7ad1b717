"""Layouts, meshes and what is kept about moves: dropped when nobody holds them, freed with their thread, bounded."""

from __future__ import annotations

import gc
import threading
import time

import torch
import torch.distributed as dist
from pool import on_ranks
from shardtensor import _C
from shardtensor.tensor import _mesh

R, S0, S1 = (0, -1, 1, "sum", 2.0), (1, 0, 1, "sum", 2.0), (1, 1, 1, "sum", 2.0)


def mesh_of(*shape, group=""):
    return _C.Mesh("cpu", shape, range(torch.Size(shape).numel()), [], [group] * len(shape), 0)


def test_meshes_and_layouts_are_dropped():
    gc.collect()
    before = _C.alive()
    mesh = mesh_of(7, group="of this test")
    layouts = [_C.Layout(mesh, [S0], [[i, 1, 1, 1, 1, 1, 1]]) for i in range(2, 12)]
    assert _C.alive() == (before[0] + 10, before[1] + 1)
    del layouts[3:]
    assert _C.alive() == (before[0] + 3, before[1] + 1)
    del mesh
    assert _C.alive()[1] == before[1] + 1  # the layouts hold it
    layouts.clear()
    assert _C.alive() == before


def test_equal_meshes_are_one():
    mesh = mesh_of(5, group="again")
    assert mesh_of(5, group="again").id == mesh.id
    was = mesh.id
    del mesh
    assert mesh_of(5, group="again").id != was  # a new one


def test_stand_ins_for_device_meshes_are_few():
    for i in range(40):
        mesh = mesh_of(3, group=f"gone {i}")
        assert list(_mesh.as_device_mesh(mesh).mesh) == [0, 1, 2]
        assert _mesh.as_device_mesh(mesh) is _mesh.as_device_mesh(mesh)
        del mesh
    gc.collect()
    assert len(_mesh._stand_ins) <= 16 and len(_mesh._meshes) <= 20 + len(_mesh._stand_ins)


def prepared(n, sizes, cut=None):
    mesh = mesh_of(n)
    return _C.prepare(_C.Layout(mesh, [S0], [cut]), _C.Layout(mesh, [S1]), sizes, 4)


def in_thread(call):
    out = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    thread.join()
    return out[0]


def test_what_is_kept_holds_no_layout():
    def run():
        before = _C.alive()
        mesh = mesh_of(6)
        source, target = _C.Layout(mesh, [S0], [[1, 2, 3, 4, 5, 6]]), _C.Layout(mesh, [S1])
        _C.prepare(source, target, [21, 30], 4)
        assert _C.kept()[0] == 3  # a plan, its exchange, and the rows of the cut
        _C.prepare(source, target, [21, 30], 4)
        assert _C.kept()[0] == 3
        del source, target, mesh
        assert _C.alive() == before
        return True

    gc.collect()
    assert in_thread(run)


def test_what_is_kept_is_forgotten_with_its_layouts():
    def run():
        most = 0
        for i in range(2000):  # each layout is dropped before the next
            prepared(4, [16 + i, 8], [4, 4, 4, 4 + i])
            most = max(most, _C.kept()[0])
        return most

    assert in_thread(run) <= 70


def test_what_is_kept_is_bounded():
    def run():
        mesh = mesh_of(4)
        source, target = _C.Layout(mesh, [S0]), _C.Layout(mesh, [S1])
        most = [0, 0]
        for i in range(6000):  # dynamic sizes
            _C.prepare(source, target, [8, 8, i + 1], 4)
            most = [max(a, b) for a, b in zip(most, _C.kept(), strict=True)]
        large = mesh_of(4096)
        uneven = _C.Layout(large, [S0], [[1 + i % 3 for i in range(4096)]])
        for i in range(60):
            _C.prepare(uneven, _C.Layout(large, [S1]), [8191, 4096, i + 1], 4)
            most = [max(a, b) for a, b in zip(most, _C.kept(), strict=True)]
        return most

    entries, weight = in_thread(run)
    assert entries <= 4096 and weight <= 2**18


@on_ranks(2)
def test_threads_take_their_caches_with_them():
    from oracle import mesh_of, place

    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.ones(4, 4), mesh, ["S(0)"], "even")
    x + x
    before = _C.cache_info()["threads"]
    assert in_thread(lambda: ((x + x).sum(), _C.cache_info()["threads"]))[1] == before + 1
    end = time.monotonic() + 10  # Python joins a thread a little before it ends
    while _C.cache_info()["threads"] != before and time.monotonic() < end:
        time.sleep(0.001)
    assert _C.cache_info()["threads"] == before


def many_threads():
    """Layouts that threads make and drop at the same time."""
    mesh = mesh_of(3)
    failed = []

    def run(turn):
        try:
            for i in range(300):
                cut = [(i + turn) % 5, 2, 9]
                a, b = _C.Layout(mesh, [S0], [cut]), _C.Layout(mesh_of(3), [S1])
                assert a.cuts == [cut] and a.mesh.id == mesh.id
                _C.prepare(a, b, [sum(cut), 6], 4)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed


def test_many_threads():
    many_threads()
