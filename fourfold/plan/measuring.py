"""Timing this machine: products, a layer, memory, operations, the disk, messages between processes.

Every figure is the median of repeated timings, disturbances included: a run will meet them too.
Processes measure together, each with its share of the cores and no more of them than cores, because
that is how they will train.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.device import keep_freed_memory, spare_missing_matrix_units
from fourfold.errors import UserError
from fourfold.model import GPT, ModelShape
from fourfold.model.gpt import Block
from fourfold.model.init import initialize
from fourfold.model.loss import head_cross_entropy
from fourfold.optim import Optimizer
from fourfold.processors import num_processors

# (m, n, k): tokens by width, as forward, backward and weight-gradient products have them.
SHAPES = (
    (256, 256, 256),
    (512, 1536, 512),
    (1024, 1024, 1024),
    (2048, 3072, 768),
    (4096, 2048, 2048),
)
COPY_BYTES = 1 << 28
DISK_BYTES = 1 << 27
MESSAGE_BYTES = tuple(1 << power for power in (12, 16, 20, 22, 24))
TIMEOUT_SECONDS = 300.0
LAYER = ModelShape(8192, 384, 1, 6, 1536, 256)  # the layer that is timed, and the head
LAYER_SEQ, LAYER_BATCHES = 128, (1, 8)  # few tokens show what issuing costs, many what running
HEAD_TOKENS = 512
NETWORK = replace(LAYER, num_layers=2)  # the whole network that is timed
NETWORK_BATCH = 8
UPDATED = 1 << 22  # parameters

Rates = dict[tuple[int, int, int], float]  # FLOP/s by (m, n, k)


@dataclass(frozen=True)
class Measured:
    """What one process found."""

    rates: Rates  # in fp32
    low_rates: Rates  # in bf16
    layer_seconds: dict[int, float]  # batch -> forward and backward of LAYER in fp32
    head_seconds: float  # head and loss of HEAD_TOKENS tokens, the same
    network_seconds: float  # of NETWORK_BATCH whole samples through NETWORK, the same
    update_seconds: float  # of the optimizer, for UPDATED parameters
    memory_bandwidth: float
    launch: float
    messages: dict[int, float]  # bytes -> seconds of an all-reduce


def measure_together(processes: int, seconds: float) -> Measured:
    """What the first of `processes` finds while all of them measure."""
    if processes == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return measure(device, seconds)
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise UserError(
            f"--nproc {processes}: this machine has {torch.cuda.device_count()} GPUs; give at most "
            "that many"
        )
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{directory}/rendezvous"
        workers = [
            context.Process(target=_work, args=(rank, processes, rendezvous, seconds, results))
            for rank in range(processes)
        ]
        try:
            for worker in workers:
                worker.start()
            found: Measured = results.get(timeout=TIMEOUT_SECONDS)
            return found
        except Exception as error:
            raise UserError(
                f"--nproc {processes}: the processes did not answer ({type(error).__name__}); try "
                "fewer, or --nproc 1 to leave collectives out"
            ) from error
        finally:
            for worker in workers:
                worker.join(timeout=10)
                if worker.is_alive():
                    worker.terminate()


def _work(rank: int, processes: int, rendezvous: str, seconds: float, results: Any) -> None:
    """One of several processes; rank 0 reports."""
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(max(1, num_processors() // processes))
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=rendezvous, rank=rank, world_size=processes
    )
    dist.barrier()
    # More processes than cores would take turns: each then has its share of what a core can do,
    # which needs no measuring.
    busy = rank < num_processors() or on_gpu
    found = measure(device, seconds) if busy else None
    dist.barrier()
    messages = {size: _all_reduce_seconds(size, device, seconds) for size in MESSAGE_BYTES}
    if found is not None and rank == 0:
        results.put(replace(found, messages=messages))
    dist.barrier()
    dist.destroy_process_group()


def measure(device: torch.device, seconds: float) -> Measured:
    spare_missing_matrix_units()
    keep_freed_memory()
    return Measured(
        rates=_product_rates(device, torch.float32, seconds),
        low_rates=_product_rates(device, torch.bfloat16, seconds),
        layer_seconds={size: _layer_seconds(size, device, seconds) for size in LAYER_BATCHES},
        head_seconds=_head_seconds(device, seconds),
        network_seconds=_network_seconds(device, seconds),
        update_seconds=_update_seconds(device, seconds),
        memory_bandwidth=_copy_rate(device, seconds),
        launch=_launch_seconds(device, seconds),
        messages={},
    )


def _product_rates(
    device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[tuple[int, int, int], float]:
    rates = {}
    for m, n, k in SHAPES:
        left = torch.randn(m, k, device=device).to(dtype)
        right = torch.randn(k, n, device=device).to(dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        took = _typical(partial(torch.mm, left, right, out=out), device, seconds)
        rates[m, n, k] = 2 * m * n * k / took
        if took > seconds:  # larger ones would only take longer
            break
    return rates


def _layer_seconds(batch: int, device: torch.device, seconds: float) -> float:
    layer = Block(LAYER).to(device)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    x = torch.randn(batch, LAYER_SEQ, LAYER.hidden_size, device=device, requires_grad=True)

    def run() -> None:
        layer(x).sum().backward()

    return _typical(run, device, seconds)


def _head_seconds(device: torch.device, seconds: float) -> float:
    weight = torch.empty(LAYER.vocab_size, LAYER.hidden_size, device=device, requires_grad=True)
    torch.nn.init.normal_(weight, std=0.02)
    x = torch.randn(HEAD_TOKENS, LAYER.hidden_size, device=device, requires_grad=True)
    labels = torch.zeros(HEAD_TOKENS, dtype=torch.int64, device=device)
    mask = torch.ones(HEAD_TOKENS, device=device)

    def run() -> None:
        head_cross_entropy(x, weight, labels, mask, 1e-3, HEAD_TOKENS).backward()

    return _typical(run, device, seconds)


def _network_seconds(device: torch.device, seconds: float) -> float:
    """Embeddings, layers, head and loss one after the other, in memory they all share."""
    network = GPT(NETWORK).to(device)
    initialize(network, seed=0)
    tokens = torch.zeros(NETWORK_BATCH, NETWORK.max_position_embeddings, dtype=torch.int64)
    tokens = tokens.to(device)
    mask, positions = torch.ones_like(tokens).float(), torch.arange(tokens.shape[1], device=device)
    given = {"labels": tokens, "loss_mask": mask, "position_ids": positions.expand_as(tokens)}

    def run() -> None:
        network.zero_grad()
        network(tokens, **given, loss_scale=1e-3, dropout_seed=0).backward()

    return _typical(run, device, seconds)


def _update_seconds(device: torch.device, seconds: float) -> float:
    weight = torch.nn.Parameter(torch.zeros(UPDATED, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = Optimizer(
        {"weight": weight},
        decayed=["weight"],
        weight_decay=0.1,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        grad_clip=1.0,
    )
    return _typical(partial(optimizer.update, 1e-4, 1.0), device, seconds)


def _copy_rate(device: torch.device, seconds: float) -> float:
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _typical(lambda: target.copy_(source), device, seconds)


def _launch_seconds(device: torch.device, seconds: float) -> float:
    """Of one small operation with its share of a backward pass: half of a pair."""
    weight = torch.ones(8, device=device, requires_grad=True)

    def run() -> None:
        total = weight
        for _ in range(50):
            total = total * 1.0001
        total.sum().backward()

    return _typical(run, device, seconds) / 100


def _all_reduce_seconds(size: int, device: torch.device, seconds: float) -> float:
    """The number of repetitions is agreed on: every process must make the same calls."""
    values = torch.zeros(size // 4, device=device)
    dist.all_reduce(values)
    start = time.perf_counter()
    dist.all_reduce(values)
    wanted = torch.tensor([seconds / max(time.perf_counter() - start, 1e-6)])
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN) if device.type == "cpu" else None
    times = []
    for _ in range(int(min(max(wanted.item(), 3), 50)) if device.type == "cpu" else 20):
        start = time.perf_counter()
        dist.all_reduce(values)
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _typical(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The median of repeated times."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 200):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(max(time.perf_counter() - start, 1e-9))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disk_rate(directory: Path) -> float:
    """Bytes/s of a file written and brought to the disk."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            start = time.perf_counter()
            for _ in range(DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return DISK_BYTES / (time.perf_counter() - start)
    except OSError as error:
        raise UserError(
            f"--directory {directory}: cannot be written to ({error.strerror}); name the directory "
            "checkpoints will go to"
        ) from error
