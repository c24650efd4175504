"""Seeds as functions: the same words always give the same 63-bit number, on every machine."""

from __future__ import annotations

import hashlib


def mix_seed(*words: int | str) -> int:
    """A seed drawn from `words`, as unrelated to that of other words as a hash can make it."""
    text = "\x1f".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
