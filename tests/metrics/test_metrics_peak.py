"""Where the peak of MFU comes from, and what memory a process has."""

from __future__ import annotations

import math
import mmap
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold.errors import UserError
from fourfold.metrics import meter, peak_flops
from fourfold.metrics.peaks import measure

CPU = torch.device("cpu")


def test_a_given_peak_is_in_tflops() -> None:
    peak, reason = peak_flops(312, CPU, torch.bfloat16)
    assert peak == 312e12 and "312 TFLOP/s" in reason


@pytest.mark.parametrize("setting", [0, -1.0, math.nan, math.inf, "fast"])
def test_nonsense_is_refused(setting: float | str) -> None:
    with pytest.raises(UserError, match="TFLOP/s"):
        peak_flops(setting, CPU, torch.float32)


def test_a_cpu_is_not_in_the_table() -> None:
    peak, reason = peak_flops(None, "cpu", torch.float32)
    assert peak is None and reason.startswith("n/a: unknown device cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float16, 989),
        ("NVIDIA GH200 480GB", torch.float16, 989),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
    ],
)
def test_named_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, tflops: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak, _ = peak_flops(None, "cuda", dtype)
    assert peak == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", torch.bfloat16),  # not an A10
        ("NVIDIA GeForce RTX 9999", torch.bfloat16),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16),
        ("Tesla V100-SXM2-32GB", torch.bfloat16),
        ("NVIDIA H200", torch.float64),
    ],
)
def test_no_peak_is_made_up(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak, reason = peak_flops(None, "cuda", dtype)
    assert peak is None and reason.startswith("n/a: ") and name in reason


def test_fp32_on_tensor_cores_has_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(None, "cuda", torch.float32)[0] == 156e12


def products_taking(seconds: list[float]) -> Iterator[float]:
    """Readings of a clock around products that take these times."""
    now = 0.0
    for length in seconds:
        yield now
        now += length
        yield now


def test_the_measured_peak_is_the_best_median_of_the_sizes() -> None:
    times = [0.02, 9.0, 0.02, 0.14, 0.14, 0.14]  # the outlier must not count
    readings = products_taking(times)
    rate, reason = measure(CPU, torch.float32, sizes=(8, 16), clock=lambda: next(readings))
    assert rate == pytest.approx(2 * 16**3 / 0.14)
    assert "16 x 16 float32" in reason and "measured" in reason


def test_sizes_that_would_take_long_are_left_out() -> None:
    readings = products_taking([1.0, 1.0, 1.0])
    rate, _ = measure(CPU, torch.float32, sizes=(8, 64), clock=lambda: next(readings))
    assert rate == pytest.approx(2 * 8**3)


def test_measuring_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.metrics.peaks.MEASURED_SIZES", (64, 128))
    monkeypatch.setattr("fourfold.metrics.peaks.SECONDS_PER_SIZE", 0.01)
    peak, reason = peak_flops("measure", CPU, torch.float32)
    assert peak is not None and peak > 1e6 and "threads" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_grows_with_what_is_held_and_the_peak_stays() -> None:
    before = meter.host_memory()
    # Pages of its own: an allocator may give out some that are resident already.
    held = np.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=np.uint8)
    held[:] = 1
    during = meter.host_memory()
    assert before.rss_bytes and during.rss_bytes and during.peak_rss_bytes
    assert during.rss_bytes - before.rss_bytes > 0.9 * held.nbytes
    del held
    after = meter.host_memory()
    # The kernel counts pages per thread and adds up late, so a little may be missing.
    assert after.peak_rss_bytes and after.peak_rss_bytes > during.rss_bytes - 2**20


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_the_peak_has_the_platforms_unit(
    monkeypatch: pytest.MonkeyPatch, platform: str, unit: int
) -> None:
    usage = resource.struct_rusage([0.0, 0.0, 5000] + [0] * 13)
    monkeypatch.setattr(meter, "PROC_STATUS", Path("/nonexistent"))
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert meter.host_memory() == meter.HostMemory(None, 5000 * unit)


def test_no_accelerator_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert meter.device_memory() is None


def test_device_memory_is_what_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    for value, name in enumerate(names):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert meter.device_memory() == meter.DeviceMemory(0, 1, 2, 3)
