"""The effect of a missing patch for torch.compile: functions of ShardTensors are not compiled."""

from __future__ import annotations

import warnings

from shardtensor.tensor._compile import graphs_refused

REFUSED = "torch.compile runs functions of ShardTensors in eager mode, and raises with fullgraph=True."


def refuse(why: str) -> None:
    warnings.warn(f"{why} {REFUSED}", RuntimeWarning, stacklevel=2)
    graphs_refused.insert(0, why)
