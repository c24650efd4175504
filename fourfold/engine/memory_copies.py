"""Copies of a run's state in memory, every few steps, so that a lost machine loses next to nothing.

    Engine.save_load.memory_copy_steps: 1

Each rank writes its part of a checkpoint to the memory of its machine and sends it to the next
machine (`fourfold.checkpoint.neighbours`), while the next step is computed. A round that begins
after a failure takes the newest of these copies that is complete, if it is newer than the newest
checkpoint on the disk, exactly as it would take that.

Which copies count is written on the disk, in `.timeline` of the output directory, where whoever
begins to train there begins a timeline of its own. So what a machine that was cut off still holds,
or one that another run went on without, is never taken: only copies of the last timeline, and the
one copy that it began from. With it is the configuration: a run that was changed goes on from what
its user sees, the checkpoints.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold import checkpoint, heartbeat, storage
from fourfold.atomic_files import replace_text
from fourfold.checkpoint import PendingSave
from fourfold.checkpoint.bounded import encode_json
from fourfold.checkpoint.copy_store import (
    TIMELINE,
    CopyOf,
    CopyStore,
    in_words,
    memory_identity,
    new_timeline,
)
from fourfold.checkpoint.disk import explained
from fourfold.checkpoint.manifest import MAX_STATE_BYTES, STATE
from fourfold.checkpoint.neighbours import CopyExchange, Recovery, ring
from fourfold.checkpoint.tensor_files import sources_of
from fourfold.config import Config
from fourfold.engine import saving
from fourfold.engine.agreement import flat_settings
from fourfold.engine.probes import free_memory
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import Sinks
from fourfold.shards import Tensors, as_shards

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine

TIMELINE_FILE = ".timeline"
MAX_TIMELINE_BYTES = 1 << 20
# For headers and records.
OVERHEAD = 1.02
# The one that is complete and the one being made.
COPIES = 2
# What another number of machines changes in a configuration, and what has nothing to do with a
# run's state.
_LAYOUT = re.compile(
    r"Distributed\.|Engine\.save_load\.|Engine\.accumulate_steps$|"
    r"Data\.batch_size\.(local|micro)_batch_size$|"
    r"Model\.(use_recompute|recompute_\w+|sequence_parallel)$"
)


@dataclass(frozen=True)
class RunTimeline:
    """What is said on the disk of the copies that count."""

    timeline: str
    origin: CopyOf | None  # the copy it began from
    settings: dict[str, str]

    def counts(self, copy: CopyOf) -> bool:
        return copy.timeline == self.timeline or copy == self.origin

    def encode(self) -> str:
        return json.dumps(asdict(self))


def read_timeline(data: bytes) -> RunTimeline | None:
    """None if it is damaged: then no copy counts."""
    try:
        value = json.loads(data[:MAX_TIMELINE_BYTES])
        origin = None if value["origin"] is None else CopyOf(*value["origin"])
        names = [value["timeline"], *([] if origin is None else [origin.timeline])]
        settings = value["settings"]
        if not all(isinstance(name, str) and TIMELINE.fullmatch(name) for name in names):
            return None
        if not isinstance(settings, dict) or not all(
            isinstance(word, str) for pair in settings.items() for word in pair
        ):
            return None
        if origin is not None and type(origin.step) is not int:
            return None
        return RunTimeline(names[0], origin, settings)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def settings_of(config: Config) -> dict[str, str]:
    """Those that a copy and the run that takes it must have in common."""
    flat = flat_settings(config.to_dict())
    return {key: value for key, value in flat.items() if not _LAYOUT.match(key)}


def remove_copies(output_dir: Path) -> list[str]:
    """Remove what an earlier run of this directory left in the memory of this machine."""
    store = CopyStore(output_dir)
    if not store.is_there:
        return []
    store.remove()
    return [
        "copies in memory that an earlier run of this directory left were removed from "
        f"{socket.gethostname()}: Engine.save_load.memory_copy_steps=0"
    ]


@dataclass(frozen=True)
class _RankMemory:
    """What each rank says of the memory it would keep copies in."""

    memory: list[object]  # which one it is
    host: str
    part_bytes: int  # of a copy
    free_bytes: int  # with what copies of earlier runs take now


@dataclass
class _Costs:
    number: int = 0
    standing_seconds: float = 0.0
    whole_seconds: float = 0.0
    taken: float = 0.0  # when the last one began


class MemoryCopies:
    """The copies of one run, as one of its ranks makes them. Every method is a collective."""

    def __init__(self, run: Engine) -> None:
        self.run, self.mesh = run, run.mesh
        self.every = run.config.Engine.save_load.memory_copy_steps
        self.store = CopyStore(run.output_dir)
        self.settings = settings_of(run.config)  # as the user gave them; a run may change its own
        self.timeline = ""
        self.origin: CopyOf | None = None
        self.good: CopyOf | None = None
        self.costs = _Costs()
        self._pending: CopyOf | None = None
        self.mesh.on_all_ranks(self.store.open)
        own = _RankMemory(
            memory_identity(),
            socket.gethostname(),
            int(saving.bytes_to_save(run.runner, run.optimizer) * OVERHEAD),
            _free_bytes(self.store),
        )
        told = self.mesh.gather(json.dumps(asdict(own)))
        self.ranks = [_RankMemory(**json.loads(text)) for text in told]
        by_memory: dict[str, list[int]] = {}
        for rank, said in enumerate(self.ranks):
            by_memory.setdefault(json.dumps(said.memory), []).append(rank)
        self.machines = [*by_memory.values()]
        self.leads = any(self.mesh.rank == ranks[0] for ranks in self.machines)
        self.sends = ring(self.machines)
        timeout = run.config.Distributed.timeout_seconds
        self.exchange = CopyExchange(self.sends, self.mesh.rank, timeout) if self.sends else None

    def check_room(self) -> list[str]:
        """Refuse what cannot be kept in the memory of every machine; else say what it takes."""
        parts, most = [said.part_bytes for said in self.ranks], 0
        where = self.store.root.parent
        for ranks in self.machines:
            own = sum(parts[rank] for rank in ranks)
            others = sum(parts[sender] for sender, taker in self.sends if taker in ranks)
            needed, said = COPIES * (own + others), self.ranks[ranks[0]]
            most = max(most, needed)
            if needed > said.free_bytes:
                neighbour = f" and of its neighbour's {others / 1e9:.3f} GB" if others else ""
                raise UserError(
                    f"Engine.save_load.memory_copy_steps={self.every} takes {needed / 1e9:.3f} GB "
                    f"of {where} on {said.host}: {COPIES} copies of its {own / 1e9:.3f} GB"
                    f"{neighbour}; it has {said.free_bytes / 1e9:.3f} GB of memory for that. Give "
                    "it more (a container: docker run --shm-size, a memory volume in Kubernetes), "
                    "use more machines, or set it to 0"
                )
        what = f"copies in memory every {self.every} steps, up to {most / 1e9:.3f} GB on a machine"
        if self.every == 1:
            what = what.replace("every 1 steps", "at every step")
        if self.exchange is None and len(self.machines) == 1:
            return [
                f"{what}; all ranks are on one machine, so they outlive processes but not the "
                "machine, whose loss costs the steps since the last checkpoint"
            ]
        return [f"{what}; each is also on the next machine, so that one of them may be lost"]

    # -- after a failure --------------------------------------------------------------------

    def recover(self, newest_saved: int, tensors: Tensors) -> list[str] | None:
        """Put together the newest complete copy of a later step than the newest checkpoint's, as a
        checkpoint at `store.whole`; what is to be said, or None if there is no such copy."""
        began, notices = time.monotonic(), list[str]()
        recovery = Recovery(self.store, self.mesh, self.machines, notices.append, heartbeat.alive)
        offers = recovery.offers()
        line = self._read_line()
        newer = {copy: held for copy, held in offers.items() if copy.step > newest_saved}
        usable = {copy: held for copy, held in newer.items() if line and line.counts(copy)}
        if line and usable and (key := self._changed(line.settings)):
            usable = {}
            notices.append(
                f"copies in memory are not used: they were made with another {key}; the run "
                "continues from its last checkpoint"
            )
        elif stale := newer.keys() - usable.keys():
            notices.append(
                f"{len(stale)} of the copies in memory left out: the run went on without them"
            )
        found = recovery.newest(usable, tensors)
        self.run.notices += notices
        if found is None:
            return None
        self.origin = found
        seconds = time.monotonic() - began
        return [f"the copies of step {found.step} in memory were put together in {seconds:.2f} s"]

    def forget(self) -> None:
        """What was put together is no longer needed, or was of no use."""
        if self.leads:
            self.store.clear_whole()

    def _changed(self, settings: Mapping[str, str]) -> str | None:
        both = {**self.settings, **settings}
        return next((k for k in both if self.settings.get(k) != settings.get(k)), None)

    def _read_line(self) -> RunTimeline | None:
        """What the disk says; the same on all ranks."""
        text = None
        if self.mesh.rank == 0:
            path = self.run.output_dir / TIMELINE_FILE
            address = storage.address_of(path)
            with suppress(OSError):
                text = (path.read_bytes() if address is None else storage.read(address)).decode(
                    errors="replace"
                )
        told = self.mesh.broadcast_first(text)
        return None if told is None else read_timeline(told.encode())

    # -- while the run goes on --------------------------------------------------------------

    def begin(self, origin: CopyOf | None = None) -> None:
        """Begin a timeline: the run goes on from this copy, or from a checkpoint or step 0.

        No copy may be under way.
        """
        told = self.mesh.broadcast_first(new_timeline() if self.mesh.rank == 0 else None)
        assert told is not None
        line = RunTimeline(told, origin, self.settings)
        self.mesh.on_all_ranks(lambda: self._write_line(line) if self.mesh.rank == 0 else None)
        self.timeline, self.origin, self.good = told, origin, origin
        if self.leads:
            self.store.keep(() if origin is None else (origin,))

    def _write_line(self, line: RunTimeline) -> None:
        """Unless others have taken over the directory."""
        self.run.ranks.may_commit()
        path = self.run.output_dir / TIMELINE_FILE
        address = storage.address_of(path)
        try:
            if address is None:
                replace_text(path, line.encode())
            else:
                storage.write(address, line.encode().encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {storage.name_of(path)}: {explained(error, path.parent)}"
            ) from error

    def copy(self, sinks: Sinks) -> None:
        """Begin the copy of the current step; the one before must have been made."""
        began, run = time.perf_counter(), self.run
        self.finish(sinks)
        shards = as_shards(saving.tensors_to_save(run.runner, run.optimizer))
        state = encode_json(saving.state_of(run), MAX_STATE_BYTES, STATE)
        copy = CopyOf(self.timeline, run.step)
        if self.leads:
            self.store.keep([one for one in (self.good, copy) if one is not None])
        sources = sources_of(shards)
        for name, source in sources.items():
            if not shards[name].local.is_cpu:
                source.settle()
        moved = threading.Event()
        place, ranks = self.store.place(copy), (self.mesh.rank, self.mesh.size)

        def work() -> Path:
            record, problem = None, None
            try:
                record = self.store.write(copy, ranks, shards, sources, state, moved.set)
            except (OSError, CheckpointError) as error:
                problem = in_words(error)
            try:
                if self.exchange is not None:
                    self.exchange.run(place, *ranks, record)
            except OSError as error:
                problem = problem or in_words(error)
            if problem is not None:
                raise CheckpointError(problem)
            self.costs.whole_seconds += time.perf_counter() - began
            return place

        run.saves.copying, self._pending = PendingSave(work, moved, sources), copy
        self.costs.number += 1
        self.costs.standing_seconds += time.perf_counter() - began

    def finish(self, sinks: Sinks) -> None:
        """Wait for the copy under way. One that failed is reported; the next one is tried."""
        try:
            self._await_pending()
        except UserError as error:
            sinks.event("failed_copy", step=self.run.step, reason=str(error))
            kept = (
                "there is none" if self.good is None else f"that of step {self.good.step} is kept"
            )
            sinks.notice(f"a copy in memory failed: {error}; {kept}", level="WARNING")

    def _await_pending(self) -> None:
        pending, self.run.saves.copying = self.run.saves.copying, None
        copy, self._pending = self._pending, None
        if pending is None:
            return
        self.mesh.on_all_ranks(lambda: pending.wait(heartbeat.alive))
        self.good = copy

    def close(self, sinks: Sinks) -> None:
        """The run has ended and is saved: remove them all, and say what they cost."""
        self.finish(sinks)
        if self.leads:
            self.store.remove()
        if self.mesh.rank == 0:
            with suppress(OSError):
                path = self.run.output_dir / TIMELINE_FILE
                address = storage.address_of(path)
                path.unlink(missing_ok=True) if address is None else storage.remove(address)
        costs = self.costs
        if costs.number:
            part = self.ranks[self.mesh.rank].part_bytes
            sinks.notice(
                f"{costs.number} copies in memory, {part / 1e6:.2f} MB of rank 0 in each: the run "
                f"stood still for {costs.standing_seconds / costs.number * 1e3:.1f} ms on average, "
                f"and a copy was complete after {costs.whole_seconds / costs.number * 1e3:.1f} ms"
            )


def _free_bytes(store: CopyStore) -> int:
    """What copies may take here: of the file system, and of the memory it is made of."""
    free = checkpoint.free_bytes(store.root.parent)
    free = min(free, free_memory() or free)
    return free + store.used_bytes()
