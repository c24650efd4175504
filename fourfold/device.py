"""The device of this process: which one it is, and how exactly it computes."""

from __future__ import annotations

import ctypes
import faulthandler
import os
from functools import cache

import torch

from fourfold import native
from fourfold.errors import UserError


def environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name}={text!r} is not a whole number; unset it or "
            "start through a launcher that sets it"
        ) from None


def select_device(wanted: str) -> torch.device:
    """`auto` takes a GPU when there is one; `gpu` and `cuda` insist on it."""
    if is_cpu(wanted):
        spare_missing_matrix_units()
        keep_freed_memory()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"Global.device={wanted} but this machine has no usable GPU; "
            "set Global.device to auto or cpu"
        )
    device = torch.device("cuda", _device_index(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    # DeviceMesh would choose by LOCAL_RANK itself if it found CUDA unused.
    torch.cuda.init()
    return device


@cache
def spare_missing_matrix_units() -> bool:
    """Keep torch from instructions that the processor announces but does not have.

    Some virtual machines announce AMX and kill a process that uses it, as low-precision products
    do. Tried once, in a separate process, before oneDNN is initialised; returns whether it was so.
    """
    if not hasattr(os, "fork") or not torch.cpu._is_amx_tile_supported():
        return False
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # its end is the answer, and no news
        try:
            ones = torch.ones(64, 64, dtype=torch.bfloat16)
            (ones @ ones).sum().item()
        finally:
            os._exit(0)
    missing = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    if missing:
        # Read before the first product, here and in every process started here.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    return missing


# mallopt's names for its parameters, and for each of them the variable that sets it from outside.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEEP = {
    _MMAP_THRESHOLD: ("MALLOC_MMAP_THRESHOLD_", 1 << 30),
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", (1 << 31) - 1),
    _TOP_PAD: ("MALLOC_TOP_PAD_", 64 << 20),
}


@cache
def keep_freed_memory() -> None:
    """Keep freed blocks in the process, for the next step to use.

    glibc returns every block of more than 32 MB to the kernel when it is freed, and a step frees
    and allocates gigabytes of them: each page is then mapped and zeroed anew, which took a quarter
    of a bfloat16 step of GPT-2 124M. Other C libraries have no such call, and need none.

    Large tensors have an allocator of their own, where it compiles: glibc's leaves gaps between
    them that it does not use again (fourfold/native/blocks.cpp).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, (variable, value) in _KEEP.items():
            if variable not in os.environ:
                mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
    if (blocks := native.library("blocks")) is not None:
        import resource  # which Windows has not

        # It reserves addresses for all of the machine's memory; a limit of addresses counts them.
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            blocks.take_over_large_tensors(ctypes.c_size_t(memory))


def is_cpu(wanted: str) -> bool:
    """Whether `Global.device` means the CPU, here."""
    return wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available())


def _device_index(visible: int) -> int:
    """The index of this process's GPU among those it can see."""
    local_rank = environment_int("LOCAL_RANK", 0)
    if local_rank < visible:
        return local_rank
    # Our launcher and torchrun show every process the same GPUs. Others may show each only its own
    # (srun --gpus-per-task=1, or more of them); that no two are the same is checked when they meet.
    ours = "FOURFOLD_STORE" in os.environ or "FOURFOLD_ATTEMPT" in os.environ
    if not (ours or "TORCHELASTIC_RUN_ID" in os.environ):
        return local_rank % visible
    raise UserError(
        f"process {local_rank + 1} of this machine finds {visible} GPU(s), and each process needs "
        "one of its own; start fewer processes, make more GPUs visible to them, or set "
        "Global.device=cpu"
    )


# -- how exactly it computes ----------------------------------------------------------------------


def set_numerics(matmul_precision: str, deterministic: bool) -> None:
    """For the whole process: the keys of the same name under `Engine`."""
    torch.set_float32_matmul_precision(matmul_precision)
    if not deterministic:
        return
    # Read by cuBLAS when it makes its workspaces, so before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Memory is written before it is read here; filling it first would be another pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
