"""Damaged index and array files are refused with DataError or read as what they say.

A mutant that is accepted must give, document by document, what an independent decoder (struct for
`.idx`, numpy and zipfile for the others) reads from the same mutated bytes, and must hold the rules
the format has: the lengths add up to the tokens present. Damage no rule can reveal (another dtype
of the same width, two lengths exchanged together with their pointers, a flipped bit in the ids of
a `.npy`) is therefore read as written. Archive members carry a CRC, so for them accepted means
unchanged. Any other exception fails the test; a hang is stopped by an alarm.
"""

from __future__ import annotations

import io
import random
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.mutate import mutate
from helpers.token_files import write_fleetx, write_legacy, write_megatron

from fourfold.data import Samples, SampleSpec, open_datasets
from fourfold.errors import DataError

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
DOCUMENTS = [[i * 7 + j for j in range(i % 5)] for i in range(40)]
Lists = list[list[int]]


def cut(ids: np.ndarray, lens: list[int]) -> Lists:
    assert min(lens, default=0) >= 0
    assert sum(lens) == len(ids)
    ends = np.cumsum([0, *lens])
    return [ids[begin:end].tolist() for begin, end in pairwise(ends)]


def decode_idx(index: bytes, tokens: bytes) -> Lists:
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\x00\x00", 1)
    sizes = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    starts = struct.unpack_from(f"<{documents}q", index, 34 + 12 * sequences)
    assert starts[0] == 0 and starts[-1] == sequences and list(starts) == sorted(starts)
    dtype = np.dtype(DTYPES[code])
    assert sum(sizes) * dtype.itemsize == len(tokens)
    return [
        np.frombuffer(tokens, dtype, size, pointer).tolist() if size else []
        for size, pointer in zip(sizes, pointers)
    ]


def decode_npy(content: bytes) -> np.ndarray:
    return np.load(io.BytesIO(content), allow_pickle=False)


def decode_npz(content: bytes, key: str) -> np.ndarray:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return decode_npy(archive.read(f"{key}.npy"))


class Target:
    """A dataset, the file of it to damage, and the independent decoder."""

    def __init__(self, directory: Path, name: str, decode: Callable[[bytes], Lists]) -> None:
        self.directory = directory
        self.file = directory / name
        self.original = self.file.read_bytes()
        self.decode = decode

    def try_mutant(self, content: bytes) -> bool:
        """Whether it was accepted."""
        self.file.unlink()  # a mapping of the previous mutant may still be alive
        self.file.write_bytes(content)
        try:
            (dataset,) = open_datasets(self.directory)
        except DataError as error:
            assert self.file.name.split("_")[0].split(".")[0] in str(error)
            return False
        got = [dataset.tokens(document).tolist() for document in range(len(dataset))]
        assert got == self.decode(content)
        dataset.max_id()
        assert len(dataset.fingerprint) == 64
        samples = Samples.open(
            [dataset], SampleSpec("8,1,1", "train", 5, 1, cache_dir=self.directory / "c"), 3
        )
        assert all(len(samples[i]) == 6 for i in range(len(samples)))
        return True


def targets(directory: Path) -> dict[str, Target]:
    def place(name: str) -> Path:
        (directory / name).mkdir()
        return directory / name / "x"

    mapped = write_megatron(place("megatron"), DOCUMENTS)
    fleetx = write_fleetx(place("fleetx"), DOCUMENTS)
    packed = write_fleetx(place("packed"), DOCUMENTS, compressed=True)
    legacy = write_legacy(place("legacy"), DOCUMENTS)
    legacy_packed = write_legacy(place("legacy_packed"), DOCUMENTS, compressed=True)
    tokens = Path(f"{mapped}.bin").read_bytes()
    ids = np.load(f"{fleetx}_ids.npy")
    lens = [len(document) for document in DOCUMENTS]

    def lens_of(content: bytes) -> Lists:
        return cut(ids, decode_npz(content, "lens").tolist())

    def all_of(content: bytes) -> Lists:
        return cut(decode_npz(content, "ids"), decode_npz(content, "lens").tolist())

    return {
        "idx": Target(mapped.parent, "x.idx", lambda content: decode_idx(content, tokens)),
        "npy": Target(fleetx.parent, "x_ids.npy", lambda content: cut(decode_npy(content), lens)),
        "npz": Target(fleetx.parent, "x_idx.npz", lens_of),
        "npz compressed": Target(packed.parent, "x_idx.npz", lens_of),
        "legacy": Target(legacy.parent, "x_ids.npz", all_of),
        "legacy compressed": Target(legacy_packed.parent, "x_ids.npz", all_of),
    }


@pytest.fixture
def alarm() -> Iterator[None]:
    def hung(*_: object) -> None:
        pytest.fail("a mutant took more than the time for all")

    previous = signal.signal(signal.SIGALRM, hung)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def fuzz(directory: Path, mutants_each: int, seed: int) -> None:
    for name, target in targets(directory).items():
        assert target.try_mutant(target.original)
        accepted = refused = 0
        for number in range(mutants_each):
            content = mutate(target.original, random.Random(f"{seed} {name} {number}"))
            try:
                was_accepted = target.try_mutant(content)
            except Exception as error:
                raise AssertionError(f"mutant {number} of {name}, seed {seed}") from error
            accepted += was_accepted
            refused += not was_accepted
        target.file.write_bytes(target.original)
        assert refused > mutants_each // 3, f"{name}: the mutations miss the point"


def test_mutants(tmp_path: Path, alarm: None) -> None:
    fuzz(tmp_path, 250, seed=1)


@pytest.mark.slow
def test_many_mutants(tmp_path: Path, alarm: None) -> None:
    fuzz(tmp_path, 2500, seed=2)


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    rng = random.Random(3)
    for target in targets(tmp_path).values():
        for size in (0, 1, 9, 33, 34, 200, 5000):
            assert not target.try_mutant(rng.randbytes(size))
        target.file.write_bytes(target.original)
