"""Peak rates of devices: the fastest they can multiply matrices, the denominator of MFU.

`PEAKS` is the one table of them, for plans too. The rate of a run's device is configured, looked up
by the device's name, or measured. An unknown device has none, and its MFU is n/a: a number against
some other device's peak would be worse than no number.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fourfold.errors import UserError


class Peak(NamedTuple):
    """What an MFU is a fraction of."""

    flops: float | None  # FLOP/s of one device; None where it is not known
    source: str  # where the figure is from, or why there is none


class DevicePeaks(NamedTuple):
    """Dense TFLOP/s as the makers state them, without sparsity; None where not supported."""

    fp16: float
    bf16: float | None
    fp32: float
    tf32: float | None = None


# The first entry whose words all occur in the device's name counts: special forms come first.
PEAKS: dict[str, DevicePeaks] = {
    "GB200": DevicePeaks(2500, 2500, 80, 1250),
    "B200": DevicePeaks(2250, 2250, 75, 1125),
    "GH200": DevicePeaks(989, 989, 67, 494.5),
    "H200 NVL": DevicePeaks(835.5, 835.5, 60, 417.5),
    "H200": DevicePeaks(989, 989, 67, 494.5),
    "H100 NVL": DevicePeaks(835.5, 835.5, 60, 417.5),
    "H100 PCIe": DevicePeaks(756, 756, 51, 378),
    "H100": DevicePeaks(989, 989, 67, 494.5),
    "H800 PCIe": DevicePeaks(756, 756, 51, 378),
    "H800": DevicePeaks(989, 989, 67, 494.5),
    "H20": DevicePeaks(148, 148, 44, 74),
    "A100": DevicePeaks(312, 312, 19.5, 156),
    "A800": DevicePeaks(312, 312, 19.5, 156),
    "A40": DevicePeaks(149.7, 149.7, 37.4, 74.8),
    "A10": DevicePeaks(125, 125, 31.2, 62.5),
    "L40S": DevicePeaks(362, 362, 91.6, 183),
    "L4": DevicePeaks(121, 121, 30.3, 60),
    "V100S": DevicePeaks(130, None, 16.4),
    "V100 PCIE": DevicePeaks(112, None, 14),
    "V100": DevicePeaks(125, None, 15.7),
    "T4": DevicePeaks(65, None, 8.1),
    "MI325X": DevicePeaks(1307.4, 1307.4, 163.4, 653.7),
    "MI300X": DevicePeaks(1307.4, 1307.4, 163.4, 653.7),
}

MEASURED_SIZES = (512, 1024, 2048)
MEASURED_SIZES_GPU = (2048, 4096, 8192)
SECONDS_PER_SIZE = 0.4


def peak_flops(setting: float | str | None, device: torch.device | str, dtype: torch.dtype) -> Peak:
    """One device's peak for products in `dtype`.

    `setting`: TFLOP/s as a number, "measure", or None to look the device's name up.
    """
    device = torch.device(device)
    if setting is None:
        return _named(device, dtype)
    if setting == "measure":
        return measure(device, dtype)
    if isinstance(setting, str) or not (math.isfinite(setting) and setting > 0):
        raise UserError(
            f"peak FLOP/s: {setting!r} is neither a positive number of TFLOP/s nor 'measure'; "
            "give one of them, or null to look the device up"
        )
    return Peak(setting * 1e12, f"{setting:g} TFLOP/s per device, as configured")


def measure(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Peak:
    """The best of the median rates of square products at a few sizes.

    Sizes at which one product takes too long are left out (fp16 on a CPU is that slow).
    """
    sizes = sizes or (MEASURED_SIZES_GPU if device.type == "cuda" else MEASURED_SIZES)
    best_rate, best_size = 0.0, 0
    for size in sizes:
        flops = 2 * size**3
        if best_rate and flops / best_rate > SECONDS_PER_SIZE:
            break
        rate = flops / _median_seconds(size, device, dtype, clock)
        if rate > best_rate:
            best_rate, best_size = rate, size
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else _name(device)
    name = str(dtype).removeprefix("torch.")
    return Peak(
        best_rate,
        f"{best_rate / 1e12:.3g} TFLOP/s per device, measured at "
        f"{best_size} x {best_size} {name} on {where}",
    )


def _median_seconds(
    size: int, device: torch.device, dtype: torch.dtype, clock: Callable[[], float]
) -> float:
    left = torch.randn(size, size, device=device).to(dtype)  # (size, size)
    right = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)  # warms caches and chooses the kernel
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS_PER_SIZE and len(times) < 50):
        _wait(device)
        start = clock()
        torch.mm(left, right, out=product)
        _wait(device)
        times.append(max(clock() - start, 1e-9))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _named(device: torch.device, dtype: torch.dtype) -> Peak:
    advice = "give the peak in TFLOP/s, or 'measure'"
    if device.type != "cuda":
        return Peak(None, f"n/a: unknown device {device.type}; {advice}")
    name = _name(device)
    words = name.replace("-", " ").lower().split()
    if "mig" in words:
        return Peak(None, f"n/a: {name} is a slice of a device; {advice}")
    for known, peaks in PEAKS.items():
        if set(known.lower().split()) <= set(words):
            rate, kind = _rate(peaks, dtype)
            if rate is None:
                return Peak(None, f"n/a: {name} has no {kind} peak; {advice}")
            return Peak(rate * 1e12, f"{rate:g} TFLOP/s per device, {known} in {kind}")
    return Peak(None, f"n/a: unknown device {name}; {advice}")


def _rate(peaks: DevicePeaks, dtype: torch.dtype) -> tuple[float | None, str]:
    if dtype == torch.float16:
        return peaks.fp16, "fp16"
    if dtype == torch.bfloat16:
        return peaks.bf16, "bf16"
    if dtype == torch.float32:
        # "high" and "medium" let fp32 products run on the tensor cores where they can.
        if peaks.tf32 is not None and torch.get_float32_matmul_precision() != "highest":
            return peaks.tf32, "tf32"
        return peaks.fp32, "fp32"
    return None, str(dtype).removeprefix("torch.")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
