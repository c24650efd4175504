"""`torch.cuda` for devices that are not there: the Python half of tests/gpu/*.cpp.

A CPU build of torch has no CUDA runtime to ask, so what the package asks of it is answered here.
Nothing is asynchronous, but `Queue` counts as if it were: an event knows how many operations were
queued after it, so that a wait for old work is told from one that leaves the device idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl

DEVICES = 8
NAME, CAPABILITY = "NVIDIA H100 80GB HBM3", (9, 0)


class Queue:
    """The device's work: how many operations were given to it, and who waited for it."""

    def __init__(self) -> None:
        self.queued = 0
        self.on_wait: Callable[[str, int], None] = lambda what, behind: None

    def wait(self, what: str, since: int | None = None) -> None:
        """The host waits for all work, or for that queued before `since`."""
        self.on_wait(what, 0 if since is None else self.queued - since)


queue = Queue()


class Stream:
    def __init__(self, *given: Any, **named: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream_id, self.device_index, self.device_type = 0, self.device.index, 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        queue.wait("Stream.synchronize")

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None: ...


class Event:
    def __init__(self, *given: Any, **named: Any) -> None:
        self.recorded_at = queue.queued

    def record(self, stream: Stream | None = None) -> None:
        self.recorded_at = queue.queued

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        queue.wait("Event.synchronize", self.recorded_at)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """Around the imports of what generates: its tensors take part in nothing that stands in."""
    given: Any = torch.inference_mode
    torch.inference_mode = torch.no_grad  # type: ignore
    try:
        yield
    finally:
        torch.inference_mode = given  # type: ignore[misc]


def pretend() -> None:
    """Answer for `torch.cuda` from here on, in this process and those it forks."""
    cuda: Any = torch.cuda
    current = [0]

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: DEVICES
    cuda.current_device = lambda: current[0]
    cuda.set_device = set_device
    cuda.init = cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda call, **named: call()
    cuda.synchronize = lambda *device: queue.wait("torch.cuda.synchronize")
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *device: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = lambda stream: None
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = lambda *device: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *device: None
    cuda.is_bf16_supported = lambda *given, **named: True
    cuda.get_device_name = lambda *device: NAME
    cuda.get_device_capability = lambda *device: CAPABILITY
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name=NAME,
        uuid=f"stand-in-{torch.device(device).index if device is not None else current[0]}",
        total_memory=80 << 30,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
    )
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *device: 0)
        setattr(cuda, f"max_{name}", lambda *device: 0)
    cuda.reset_peak_memory_stats = lambda *device: None
    cuda.empty_cache = lambda: None
    cuda.nccl.version = lambda: (0, 0, 0)
