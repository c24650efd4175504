"""Damage to files: what disks, transfers and attackers do to bytes."""

from __future__ import annotations

import random
import struct

NASTY = (
    0,
    1,
    2,
    0x7F,
    0xFF,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three random changes; the result may by chance equal the original."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(CHANGES)(data, rng)
    return data


def _anywhere(data: bytes, rng: random.Random) -> int:
    """An offset, half of the time among the first 256 bytes, where headers are."""
    end = max(len(data), 1)
    return rng.randrange(min(end, 256) if rng.random() < 0.5 else end)


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = _anywhere(data, rng)
    return start, min(start + rng.choice((1, 2, 4, 8, 16, 64, 1024)), len(data))


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    at = _anywhere(data, rng)
    return (
        data[:at]
        + bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 1])
        + data[at + 1 :]
    )


def set_byte(data: bytes, rng: random.Random) -> bytes:
    at = _anywhere(data, rng)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def set_number(data: bytes, rng: random.Random) -> bytes:
    width, letter = rng.choice(((2, "H"), (4, "I"), (8, "Q")))
    number = rng.choice(NASTY) if rng.random() < 0.7 else rng.randrange(2**16)
    at = _anywhere(data, rng)
    packed = struct.pack(rng.choice("<>") + letter, number % (1 << 8 * width))
    return data[:at] + packed + data[at + width :]


def add_to_number(data: bytes, rng: random.Random) -> bytes:
    """Slightly wrong counts and offsets are the ones that slip through."""
    width, letter = rng.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
    at = _anywhere(data, rng)
    if at + width > len(data):
        return data
    (number,) = struct.unpack_from("<" + letter, data, at)
    number = (number + rng.choice((-2, -1, 1, 2))) % (1 << 8 * width)
    return data[:at] + struct.pack("<" + letter, number) + data[at + width :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: _anywhere(data, rng)]


def extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 2, 4, 8, 100)))


def remove(data: bytes, rng: random.Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + data[stop:]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:stop] + data[start:stop] + data[stop:]


def zero(data: bytes, rng: random.Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + bytes(stop - start) + data[stop:]


def scramble(data: bytes, rng: random.Random) -> bytes:
    start, stop = _span(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[stop:]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Exchange two neighbouring spans of equal length, keeping every sum as it was."""
    start, stop = _span(data, rng)
    again = min(stop + (stop - start), len(data))
    return data[:start] + data[stop:again] + data[start:stop] + data[again:]


CHANGES = (
    flip_bit,
    set_byte,
    set_number,
    add_to_number,
    truncate,
    extend,
    remove,
    repeat,
    zero,
    scramble,
    swap,
)
