"""Software CUDA: `torch.device("cuda")` that computes, with eight devices and something for nccl.

    python -m helpers.software_cuda LIBRARY NCCL train -c run.yaml -o Global.device=gpu ...

is the command `fourfold` on such devices: their memory is the host's and their kernels are the
CPU's, so numbers are the CPU's too, while everything else is as on GPUs: choice of the device,
process groups, copies, pinned memory, mixed devices, which are refused. Nothing is asynchronous.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def command(libraries: tuple[Path, Path], words: list[str], log: Path) -> int:
    """Run `fourfold` with these words; its exit code, and in `log` what it said."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    with log.open("w") as said:
        return subprocess.run(
            [sys.executable, "-m", "helpers.software_cuda", *map(str, libraries), *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        ).returncode


def main(library: str, nccl: str, words: list[str]) -> None:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch

    from helpers import cuda_stand_in

    torch.set_num_threads(1)
    cuda_stand_in.pretend()
    _use_its_storage()
    _in_place_of_nccl(nccl)
    sys.argv = ["fourfold", *words]
    with cuda_stand_in.no_inference_mode():
        import fourfold.evaluate
        import fourfold.generate.distributed
        from fourfold.cli import main as fourfold

    fourfold()


def _use_its_storage() -> None:
    import torch

    cuda: Any = torch.cuda
    counts = torch.ops.software_cuda.counts
    cuda.memory_allocated = cuda.memory_reserved = lambda *device: counts()[1]
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *device: counts()[2]
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.ops.software_cuda.resize_storage(whole, int(size))
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _in_place_of_nccl(library: str) -> None:
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("software_nccl", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        own = dist.PrefixStore("software", store)
        return module.around(dist.ProcessGroupGloo(own, rank, size, timeout=timeout))

    dist.Backend.register_backend("software_nccl", make, devices=["cuda"])
    init_process_group = dist.init_process_group

    def init(backend: str, **named: Any) -> None:
        init_process_group(backend.replace("nccl", "software_nccl"), **named)

    dist.init_process_group = init  # type: ignore[assignment]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
