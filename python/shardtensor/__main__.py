"""torchrun ... -m shardtensor train.py args: runs a script written for torch.distributed.tensor with ShardTensors.

`-m package.module` in place of the file runs a module.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import Any, NoReturn

import shardtensor
from shardtensor._late import when_imported


def main() -> None:
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        _stop(f"usage: python -m shardtensor [-m] script [arguments]\n\n{__doc__}")
    name = arguments[0]
    sys.argv = arguments
    shardtensor.replace_dtensor()
    _start_others_alike(["-m", name] if as_module else [os.path.abspath(name)])
    if as_module:
        sys.path.insert(0, os.getcwd())
        if not _is_module(name):
            _stop(f"python -m shardtensor: there is no module {name!r} to run, in {os.getcwd()} or installed")
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        if not os.path.exists(os.path.join(name, "__main__.py") if os.path.isdir(name) else name):
            _stop(f"python -m shardtensor: there is no script {name!r} to run, in {os.getcwd()}")
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        runpy.run_path(name, run_name="__main__")


def _start_others_alike(what: list[str]) -> None:
    """Lightning starts the other ranks itself, if torchrun has not. Without this they would run the script with DTensors."""

    def command() -> list[str]:
        return [sys.executable, "-m", "shardtensor", *what, *sys.argv[1:]]

    def change(module: Any) -> None:
        if hasattr(module, "_basic_subprocess_cmd"):
            module._basic_subprocess_cmd = command

    for package in ("lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.strategies.launchers.subprocess_script", change)


def _is_module(name: str) -> bool:
    """Whether `python -m` can run it. Imports the packages that it is in."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package imports what is not there
        return False
    return spec is not None and (spec.submodule_search_locations is None or _is_module(f"{name}.__main__"))


def _stop(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
