"""torchrun ... -m shardtensor train.py args: runs a script written for torch.distributed.tensor with ShardTensors.

`-m package.module` in place of the file runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys

import shardtensor


def main() -> None:
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(f"usage: python -m shardtensor [-m] script [arguments]\n\n{__doc__}")
    sys.argv = arguments
    shardtensor.replace_dtensor()
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
