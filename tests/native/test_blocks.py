"""The allocator of large tensors. It is a process's own for good, so each test is a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fourfold import native

pytestmark = pytest.mark.skipif(
    native.library("blocks") is None, reason=native.why_not("blocks") or ""
)

TAKE_OVER = """
import ctypes, os, random, resource, sys, threading
import torch
from fourfold import native
from fourfold.device import keep_freed_memory

def held():  # of this process, in bytes
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TAKE_OVER + program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_freed_block_is_the_next_tensors_of_its_size() -> None:
    run("""
keep_freed_memory()
kept = []
for _ in range(50):  # what stays and what goes by turns, which leaves gaps
    passing = torch.ones(1 << 20)
    kept.append(torch.ones(1 << 16))
    place = passing.data_ptr()
    del passing
    again = torch.empty(1 << 20)
    assert again.data_ptr() == place and place % 64 == 0
    del again
before = held()
for _ in range(50):
    torch.ones(1 << 20)
assert held() - before < 1 << 20
""")


def test_no_two_tensors_share_memory() -> None:
    """Whatever is allocated and freed, by several threads, small, large or larger than the rest."""
    run("""
assert native.library("blocks").take_over_large_tensors(ctypes.c_size_t(64 << 20)) == 0
assert native.library("blocks").take_over_large_tensors(ctypes.c_size_t(64 << 20)) == 1
failed = []

def work(seed):
    draw, alive = random.Random(seed), []
    for turn in range(600):
        if alive and draw.random() < 0.5:
            tensor, mark = alive.pop(draw.randrange(len(alive)))
            if not bool((tensor == mark).all()):
                failed.append(mark)
        else:
            size = draw.choice([0, 1, 1000, 65535, 65536, 65537, draw.randrange(1 << 20)])
            mark = float(seed * 10000 + turn)
            alive.append((torch.full((size,), mark), mark))
        if len(alive) > 24:  # more than there is room for
            del alive[:12]

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed
# All of it is one gap again.
assert len(torch.empty(60 << 20, dtype=torch.uint8)) == 60 << 20
""")


def test_torch_takes_memory_without_a_tensor_and_forks() -> None:
    """The first for what its low-precision products pack; the second beside a thread that may hold
    the lock."""
    run("""
weight = torch.randn(512, 768).bfloat16()  # from before
keep_freed_memory()
x = torch.randn(1024, 768).bfloat16().requires_grad_()
(x @ weight.t()).sum().backward()
assert x.grad.isfinite().all()
weight.resize_(1024, 768).zero_()

shared = torch.full((1 << 20,), 3.0)
stop = threading.Event()

def busy():
    while not stop.is_set():
        torch.empty(1 << 17)

thread = threading.Thread(target=busy)
thread.start()
torch.set_num_threads(1)
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        made = torch.empty(1 << 20).copy_(shared)
        del shared
        os._exit(0 if float(made[-1]) == 3.0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
""")


def test_a_limit_of_addresses_is_left_to_others() -> None:
    run("""
limit = 1 << 36
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
keep_freed_memory()
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
assert size < 16 << 30
assert native.library("blocks").take_over_large_tensors(ctypes.c_size_t(2 * limit)) == 1
torch.ones(1 << 20)
""")
