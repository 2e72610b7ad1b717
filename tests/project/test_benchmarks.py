"""benchmarks/overhead.py beside another installation."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import shardtensor

ROOT = Path(__file__).parents[2]
HERE = Path(shardtensor.__file__).parents[1]


def overhead(*args, **variables):
    command = [sys.executable, ROOT / "benchmarks/overhead.py", "--repeats", "2", *args]
    env = os.environ | {"PYTHONPATH": str(HERE)} | variables
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def beside(folder):
    return ["--beside", f"PYTHONPATH={shlex.quote(str(folder))} {shlex.quote(sys.executable)}"]


def test_beside_itself(tmp_path):
    out = tmp_path / "out.json"
    done = overhead("--rows", "add", "new_shape", "forward_backward", "--json", out, *beside(HERE))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["errors"] == {"add": {}, "new_shape": {}, "forward_backward": {}}
    for row, costs in result["microseconds"].items():
        assert set(costs) == {"plain", "shardtensor", "beside"}, row
        assert min(costs.values()) > 0, row
    lines = done.stdout.splitlines()
    assert result["machine"]["beside: shardtensor"] == shardtensor.__version__
    titles = next(text for text in lines if text.startswith("microseconds")).split()
    assert titles == ["microseconds", "plain", "shardtensor", "beside", "shardtensor-plain", "beside-plain", "difference", "ours/plain"]
    add = dict(zip(titles, next(text for text in lines if text.startswith("add ")).split(), strict=True))
    assert abs(float(add["shardtensor"]) - float(add["beside"]) - float(add["difference"])) < 0.02


def test_an_error_of_the_other_is_the_rows(tmp_path):
    """Its from_local fails; this installation's does not. So the other is another, although this one is on PYTHONPATH."""
    package = tmp_path / "shardtensor"
    package.mkdir()
    (package / "__init__.py").write_text("""
__version__ = "0.0"
class ShardTensor:
    @staticmethod
    def from_local(*args):
        print("no answer")
        raise ValueError("of the other\\nsecond line")
""")
    done = overhead("--rows", "add", *beside(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "beside: shardtensor 0.0" in done.stdout
    assert "error: add, beside: ValueError: of the other\n" in done.stdout
    assert "no answer" in done.stderr


def test_a_python_that_ends_at_once():
    done = overhead("--rows", "add", "--beside", f"{shlex.quote(sys.executable)} -c 'exit(3)'")
    assert done.returncode == 1
    assert "the Python of --beside has ended with 3" in done.stderr


def test_only_in_one_process():
    done = overhead("--rows", "add", *beside(HERE), WORLD_SIZE="2")
    assert done.returncode == 2
    assert "argument --beside: only in one process" in done.stderr
