"""The time of `import shardtensor` beyond `import torch.distributed.tensor`: the least of several fresh processes."""

from __future__ import annotations

import argparse
import subprocess
import sys

MEASURE = """
import time
import torch.distributed.tensor
start = time.perf_counter()
import shardtensor
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    times = [
        float(subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout)
        for _ in range(parser.parse_args().repeats)
    ]
    print(f"import shardtensor: {min(times) * 1e3:.0f} ms over torch.distributed.tensor, {'met' if min(times) < 0.05 else 'NOT MET'}: under 50 ms")


if __name__ == "__main__":
    main()
