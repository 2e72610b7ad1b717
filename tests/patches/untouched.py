"""For programs that tests start: which attributes of torch something replaces."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

# What the changes are made in, wherever torch has imported it by then.
EVERYTHING = (
    "torch.distributed.tensor.parallel.ddp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.experimental",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint._state_dict_stager",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._optim_utils",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
    "torch.testing",
    "torch._dynamo.variables.builder",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._inductor.utils",
    "torch._inductor.comms",
)
# Lists and dicts of torch that changes are added to.
TABLES = (
    ("torch.utils._foreach_utils", "_foreach_supported_types"),
    ("torch.optim.optimizer", "_foreach_supported_types"),
    ("torch.utils.flop_counter", "flop_registry"),
)


def import_everything() -> None:
    for name in EVERYTHING:
        importlib.import_module(name)


def snapshot() -> dict[str, Any]:
    """The attributes of torch's modules and classes, and what is in its tables."""
    found: dict[str, Any] = {}
    classes: dict[int, type] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" and name not in ("sys", "multiprocessing.util"):
            continue
        for attribute, value in list(vars(module).items()) if module is not None else ():
            found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                classes[id(value)] = value
    for cls in classes.values():
        found |= {f"{cls.__module__}.{cls.__qualname__}.{attribute}": value for attribute, value in list(vars(cls).items())}
    for module_name, attribute in TABLES:
        if module_name in sys.modules:
            table = getattr(sys.modules[module_name], attribute)
            found |= {f"{module_name}.{attribute}[{key}]": table[key] for key in (table if isinstance(table, dict) else range(len(table)))}
            found[f"{module_name}.{attribute}, how many"] = len(table)
    engine = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    found |= {f"DTensor's engine: {name}": value for name, value in vars(engine).items()}
    found["DTensor's engine: how many attributes"] = len(vars(engine))
    found |= {f"DTensor's engine: handler of {op}": handler for op, handler in engine._custom_op_handlers.items()}
    return found


def by(before: dict[str, Any], package: Any) -> set[str]:
    """The names that have another value now, which is a function of the package's files, and what has been added to tables."""
    after, folder = snapshot(), os.path.dirname(package.__file__)

    def is_of_package(value: Any) -> bool:
        return getattr(getattr(value, "__func__", value), "__code__", by.__code__).co_filename.startswith(folder)

    return {name for name in replaced(before) if name.endswith(", how many") or (name in after and is_of_package(after[name]))}


def replaced(before: dict[str, Any]) -> list[str]:
    """The names that have another value now. Numbers and texts count by value."""
    after = snapshot()
    simple = (int, str, float, type(None), tuple)

    def differ(old: Any, new: Any) -> bool:
        return old is not new and not (isinstance(old, simple) and type(old) is type(new) and old == new)

    return sorted(name for name, old in before.items() if name not in after or differ(old, after[name]))
