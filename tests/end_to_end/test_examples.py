"""The example trains as its plain twin does."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from shardtensor import _C

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_transformer.py"
# Scripts that know a library alone; they are started as they say.
BY_COMMAND = [("with_lightning", "lightning", 4), ("with_accelerate", "accelerate", 3)]
SIZES = {"steps": 6, "context": 8}
# Examples, and the numbers of ranks that they run on.
PARALLEL = [("tensor_parallel", 2), ("tensor_parallel", 3), ("sequence_parallel", 3), ("fsdp_tensor_parallel", 3), ("fsdp_tensor_parallel", 4)]
COMPILED = [("train_transformer", 2), ("train_transformer", 3), ("tensor_parallel", 2), ("sequence_parallel", 2), ("fsdp_tensor_parallel", 2)]


def example(name="train_transformer"):
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # they import each other
    return importlib.import_module(name)


def losses(distributed, **options):
    module = example()
    return module.train(module.make_mesh("cpu") if distributed else None, dtype=torch.float64, **SIZES | options)


def losses_of(name, **options):
    return example(name).train("cpu", dtype=torch.float64, **SIZES | options)


def compiled(name, backend="aot_eager", **options):
    """The losses, and how many graphs they took."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    options["backend"] = backend
    got = losses(True, **options) if name == "train_transformer" else losses_of(name, **options)
    return got, counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def plain(pools):
    """The losses of a model on one rank, in plain torch."""
    want = pools(2).run(losses, False)[0]
    assert want[-1] < want[0]
    return want


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_are_those_of_plain_torch(pools, plain, ranks):
    for got in pools(ranks).run(losses, True):
        assert got == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(("gpus", "backend", "device"), [(0, "gloo", "cpu"), (1, "gloo", "cpu"), (2, "nccl", "cuda"), (8, "nccl", "cuda")])
def test_nccl_where_every_rank_has_a_gpu(monkeypatch, gpus, backend, device):
    """The same command chooses the backend. The number of GPUs is faked."""
    joined, current = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(dist, "init_process_group", joined.append)
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert example().launch() == device
    assert joined == [backend] and current == [1] * (device == "cuda")


@pytest.mark.parametrize(("name", "ranks"), PARALLEL)
def test_parallel(pools, plain, name, ranks):
    for got in pools(ranks).run(losses_of, name):
        assert got == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(("name", "ranks"), COMPILED)
def test_compiled(pools, plain, name, ranks):
    """One graph: the whole model, or with FSDP2 a block. A graph break would make two, and so would a guard that fails later."""
    for got, graphs in pools(ranks).run(compiled, name, steps=3):
        assert got == pytest.approx(plain[:3], abs=1e-5)
        assert graphs == 1


def test_compiled_by_inductor(pools, plain):
    for got, graphs in pools(2).run(compiled, "train_transformer", "inductor", steps=3, seconds=110):
        assert got == pytest.approx(plain[:3], abs=1e-5)
        assert graphs == 1


def losses_in_space(device, **options):
    mode = st.get_promotion_mode()
    try:
        return example("space_parallel").train(device, dtype=torch.float64, steps=6, **options)
    finally:
        st.set_promotion_mode(mode)  # the example allows plain weights


def losses_on_sphere(device):
    _C.reset_comm_counts()
    losses = example("sphere_parallel").train(device, steps=5)
    sent = _C.comm_counts()
    assert "all_gather" not in sent, sent
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_space(pools, tmp_path, ranks):
    pytest.importorskip("numpy")
    (want, *_) = pools(ranks).run(losses_in_space, None)
    assert want[-1] < want[0]
    for got in pools(ranks).run(losses_in_space, "cpu", folder=tmp_path):
        assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sphere(pools, ranks):
    (want, *_) = pools(ranks).run(losses_on_sphere, None)
    assert want[-1] < want[0]
    for got in pools(ranks).run(losses_on_sphere, "cpu"):
        assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4)])
def test_resumed_on_other_ranks(pools, plain, tmp_path, before, after):
    first = pools(before).run(losses_of, "checkpoint_resume", folder=tmp_path, steps=2)
    rest = pools(after).run(losses_of, "checkpoint_resume", folder=tmp_path, steps=4)
    for a, b in itertools.product(first, rest):
        assert a + b == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(("words", "backend"), [([], None), (["--compile"], "inductor"), (["--compile", "aot_eager"], "aot_eager")])
def test_compile_option(monkeypatch, tmp_path, words, backend):
    asked = []
    monkeypatch.setattr(sys, "argv", ["example", "--picture", str(tmp_path / "losses.png"), *words])
    monkeypatch.setattr(example(), "launch", lambda: None)
    example().run(lambda device, backend, **rest: asked.append(backend) or [1.0], "An example.", alone=True)
    assert asked == [backend]


def test_all_are_tested():
    """Every script here is one of those above."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"train_transformer", "checkpoint_resume", "space_parallel", "sphere_parallel"} | {name for name, *_ in (*PARALLEL, *BY_COMMAND)}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "library", "ranks"), BY_COMMAND)
def test_libraries_by_one_command(plain, tmp_path, name, library, ranks):
    pytest.importorskip(library)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "shardtensor"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    options = ["--steps", "3", "--context", "8", "--dtype", "float64", "--picture", str(tmp_path / "losses.png")]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), *options], capture_output=True, text=True, env=environment, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert f"loss {plain[0]:.4f} at first, {plain[2]:.4f} at last" in done.stdout


@pytest.mark.parametrize("name", ["tensor_parallel", "checkpoint_resume"])
def test_without_torchrun(name, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=110)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(rf"which torchrun starts: torchrun --nproc-per-node \d .*{name}.py", done.stderr), done.stderr


def test_command_line(tmp_path):
    """Started as in the README. It draws a picture or says why it cannot; with what the README installs, it warns of nothing."""
    picture = tmp_path / "losses.png"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", "2", "--picture", str(picture)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks, cpu" in done.stdout and "loss 3." in done.stdout
    assert "next: " in done.stdout.splitlines()[-2]
    assert not importlib.util.find_spec("numpy") or done.stderr == ""
    assert "step    2  loss" in done.stdout and "2/2" not in done.stdout  # a pipe gets no bar
    if importlib.util.find_spec("matplotlib"):
        assert picture.stat().st_size > 1000
    else:
        assert "matplotlib is not installed" in done.stdout
