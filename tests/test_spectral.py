from __future__ import annotations

import pytest
import torch
from oracle import MESHES, case, mesh_id, run_on
from test_matmul import batch_sharded
from test_reductions import complexes

CASES = [
    case("fft", lambda x: torch.fft.fft(x).abs(), (5, 4), quiet=batch_sharded(0), limit=20),
    case("fft_middle", lambda x: torch.fft.fft(x, dim=1), (3, 4, 3), quiet=batch_sharded(0, 2), limit=20),
    case("fft_complex", torch.fft.fft, complexes(5, 4), backward=False, quiet=batch_sharded(0), limit=15),
    case("fft_resized", lambda x: torch.fft.fft(x, n=6).real, (5, 4), quiet=batch_sharded(0), limit=15),
    case("ifft2", lambda x: torch.fft.ifft2(x), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("rfft", torch.fft.rfft, (5, 4), quiet=batch_sharded(0), limit=20),
    case("rfftn", lambda x: torch.fft.rfftn(x, dim=(1, 2)), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("irfft", lambda x: torch.fft.irfft(torch.complex(x, x.sin()), n=5), (5, 4), quiet=batch_sharded(0), limit=20),
    case("there_and_back", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(3, 4)), (4, 3, 4), quiet=batch_sharded(0), limit=20),
    case("hfft", lambda x: torch.fft.hfft(torch.complex(x, x.cos())), (5, 4), quiet=batch_sharded(0), limit=15),
    case("ihfft", torch.fft.ihfft, (5, 4), quiet=batch_sharded(0), limit=15),
    case("fftshift", lambda x: torch.fft.fftshift(x, dim=1), (5, 4), quiet=batch_sharded(0), limit=15),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
