"""A SentencePiece model by hand, as a protocol buffer."""

from __future__ import annotations

import struct


def field(number: int, content: bytes | int | float) -> bytes:
    """One field of a protocol buffer, short."""
    if isinstance(content, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", content)
    if isinstance(content, int):
        return bytes([number << 3, content])
    return bytes([number << 3 | 2, len(content)]) + content


def tiny_sentence_model() -> bytes:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [("ab", -0.0, 1), ("▁ab", -1.0, 1), ("▁", -2.0, 1), ("a", -3.0, 1), ("b", -4.0, 1)]
    content = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
        for text, score, kind in pieces
    )
    return content + field(2, field(3, 2)) + field(3, field(4, 0))
