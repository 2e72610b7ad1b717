"""Loads the extension, or says in one line why that failed."""

import torch

_OLDEST = (2, 11)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


try:
    import shardtensor._build as _build
except ImportError:
    raise ImportError(
        "shardtensor: the extension has not been built; run `pip install .` (or `pip install -e . --no-build-isolation`)"
    ) from None

if _version(torch.__version__) < _OLDEST:
    raise ImportError(f"shardtensor: torch {torch.__version__} is too old; {_OLDEST[0]}.{_OLDEST[1]} or newer is needed")
if torch.__version__ != _build.TORCH:
    raise ImportError(
        f"shardtensor: built for torch {_build.TORCH}, but torch {torch.__version__} is installed; "
        "build it again: pip install --no-build-isolation --force-reinstall --no-deps ."
    )
if not torch.distributed.is_available():
    raise ImportError("shardtensor: this torch was built without torch.distributed")

try:
    import shardtensor._C  # noqa: F401
except ImportError as error:
    raise ImportError(f"shardtensor: the extension does not load with torch {torch.__version__}: {error}") from None
