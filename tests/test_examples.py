"""The example trains as its plain twin does."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_transformer.py"
SIZES = {"steps": 6, "context": 8}


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("train_transformer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(distributed):
    import torch

    module = example()
    return module.train(module.make_mesh("cpu") if distributed else None, dtype=torch.float64, **SIZES)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_are_those_of_plain_torch(pools, ranks):
    pool = pools(ranks)
    want = pool.run("test_examples:losses", False)[0]
    assert want[-1] < want[0]
    for got in pool.run("test_examples:losses", True):
        assert got == pytest.approx(want, abs=1e-5)


def test_command_line(tmp_path):
    """As the README starts it, with a picture or a word on why there is none."""
    picture = tmp_path / "losses.png"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", "2", "--context", "8", "--picture", str(picture)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "tensor=2" in done.stdout and "loss 3." in done.stdout
    if importlib.util.find_spec("matplotlib"):
        assert picture.stat().st_size > 1000
    else:
        assert "matplotlib is not installed" in done.stdout
