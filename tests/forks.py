"""Runs of a program that imports shardtensor for the first time, each with other arguments or another environment.

They are forked off one process that has imported torch: that takes longer than all that most of these programs do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PARENT = """
import json, os, sys
import torch, torch.distributed.tensor

program, runs = json.load(sys.stdin)
assert "shardtensor" not in sys.modules
for arguments, environment, files in runs:
    if os.fork() == 0:
        for stream, file in zip((1, 2), files):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        for name, value in environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Run(NamedTuple):
    """A run's arguments, and what it changes in the environment; None takes a variable out."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str | None] = {}


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_each(program: str, runs: Sequence[Run], cwd: Path | None = None) -> list[Done]:
    with tempfile.TemporaryDirectory() as folder:
        files = [[f"{folder}/{i}.out", f"{folder}/{i}.err"] for i in range(len(runs))]
        asked = json.dumps([program, [[list(r.arguments), dict(r.environment), f] for r, f in zip(runs, files, strict=True)]])
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
        done = subprocess.run(
            [sys.executable, "-c", _PARENT], input=asked, capture_output=True, text=True, timeout=100, cwd=cwd,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        codes = [int(line) for line in done.stdout.split()]
        return [Done(code, *(Path(f).read_text() for f in pair)) for code, pair in zip(codes, files, strict=True)]
