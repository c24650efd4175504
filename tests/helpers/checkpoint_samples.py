"""Tensors whose every byte follows from a step number, so that a reader can tell what it got."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.bounded import HASH, digest_of

Tensors = dict[str, torch.Tensor]


def sample(step: int, floats: int = 8) -> Tensors:
    ramp = torch.arange(floats, dtype=torch.float32)
    return {
        "model.embed.weight": (ramp + step).reshape(2, -1),
        "model.norm.weight": (ramp[:4] * step).to(torch.bfloat16),
        "optim.embed.weight.exp_avg": (ramp - step).to(torch.float16),
        "optim.step": torch.tensor(step, dtype=torch.int64),
        "optim.empty": torch.empty(0, 3),
    }


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "loss_scale": 32768.0 / 3, "seed": 1024, "config": {"Model": {"n": [1]}}}


def blank(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same_bits(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape
        and left[name].dtype == right[name].dtype
        and torch.equal(bits(left[name]), bits(right[name]))
        for name in left
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def record_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data), "digest": digest_of(data, HASH)}


def forge(
    directory: Path, change: Callable[[dict[str, Any]], object], group: str = "model"
) -> None:
    """Change an index, and make everything else agree with it, as an attacker would."""
    path = directory / f"index-{group}.json"
    forged = json.loads(path.read_text())
    change(forged)
    path.write_text(json.dumps(forged))
    reseal(directory)


def reseal(directory: Path, change: Callable[[dict[str, Any]], object] = lambda root: None) -> None:
    """Make `manifest.json` fit the state and the indices as they now are, and itself."""
    path = directory / "manifest.json"
    root = json.loads(path.read_text())
    root["state"] = record_of(directory / "state.json")
    for group in root["groups"]:
        root["groups"][group] |= record_of(directory / f"index-{group}.json")
    del root["checksum"]
    change(root)
    body = json.dumps(root, indent=1).encode()[:-2]
    path.write_bytes(body + f',\n "checksum": "{digest_of(body, HASH)}"\n}}\n'.encode())


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; its exit code, 0 if `work` returned, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def crash_before_call(number: int) -> None:
    """In this process, end abruptly instead of making the `number`-th change to the disk."""
    left = number

    def guarded(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal left
            if left == 0:
                os._exit(77)
            left -= 1
            return original(*arguments, **options)

        return call

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "chmod"):
        setattr(os, name, guarded(getattr(os, name)))
