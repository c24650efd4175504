"""Ranks that work together must agree: on the code, on the libraries, the configuration, the data.

Nothing else tells of a machine with yesterday's checkout or another learning rate: the run trains,
and what comes of it belongs to neither. So before anything is built every rank compares what it
runs with rank 0, and the first difference is named with both hosts. Equal ranks exchange a hash
each; only where these differ the facts themselves.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from fourfold import __version__
from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.processors import processor_name

PACKAGE = Path(__file__).parent.parent
# Libraries whose numbers a run depends on.
LIBRARIES = ("torch", "numpy", "safetensors")
# Where something lies may differ between machines: what lies there is compared itself.
LOCAL_KEYS = ("input_dir", "cache_dir", "tensorboard_dir", "tokenizer")
SHOWN_CHARACTERS = 120


def facts_of(config: Config) -> dict[str, str]:
    """What this process runs, by the name a message has for it."""
    facts = {
        "Fourfold": f"{__version__}, source {source_hash()}",
        "Python": python_version().rpartition(".")[0],
    }
    return facts | library_versions() | flat_settings(config.to_dict())


@cache
def source_hash() -> str:
    """Of all modules of the package: a version may be edited where it is installed."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def library_versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`Optimizer.lr.max_lr` -> "0.01", for every key of a configuration."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        elif key not in LOCAL_KEYS:
            flat[f"{prefix}{key}"] = json.dumps(value, sort_keys=True, default=str)
    return flat


def hardware_of(device: torch.device) -> str:
    """What this rank computes with, as far as its numbers or its pace depend on it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return processor_name()


def compare_hardware(mesh: Mesh, device: torch.device) -> list[str]:
    """A notice where ranks compute with different hardware, which is allowed; a collective."""
    if mesh.size == 1:
        return []
    told = mesh.gather(json.dumps([socket.gethostname(), hardware_of(device)]))
    kinds: dict[str, list[str]] = {}
    for host, hardware in map(json.loads, told):
        kinds.setdefault(hardware, []).append(host)
    if len(kinds) == 1:
        return []
    named = "; ".join(f"{kind} on {', '.join(sorted({*hosts}))}" for kind, hosts in kinds.items())
    return [f"ranks compute with different hardware, and the slowest sets the pace: {named}"]


def check_agreement(mesh: Mesh, facts: Mapping[str, str]) -> None:
    """A `UserError` on every rank if one has other facts than rank 0; a collective."""
    if mesh.size == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    mine = hashlib.sha256(text.encode()).digest()[:6]
    hashes = [row[0] for row in mesh.all_gather(float(int.from_bytes(mine, "big")))]
    odd = next((rank for rank, value in enumerate(hashes) if value != hashes[0]), None)
    if odd is None:
        return
    speaks = mesh.rank in (0, odd)
    told = mesh.gather(json.dumps([socket.gethostname(), facts]) if speaks else "")
    raise UserError(_difference(odd, json.loads(told[0]), json.loads(told[odd])))


def _difference(
    rank: int, first: tuple[str, dict[str, str]], other: tuple[str, dict[str, str]]
) -> str:
    (first_host, theirs), (other_host, odd) = first, other
    different = [name for name in {**theirs, **odd} if theirs.get(name) != odd.get(name)]
    name = different[0]
    more = f" (and {len(different) - 1} more differences)" if len(different) > 1 else ""
    return (
        f"rank {rank} on {other_host} disagrees with rank 0 on {first_host}: {name} is "
        f"{_shown(odd.get(name))} there and {_shown(theirs.get(name))} here{more}; give every "
        "machine the same code, configuration and data"
    )


def _shown(value: str | None) -> str:
    return "missing" if value is None else value[:SHOWN_CHARACTERS]
