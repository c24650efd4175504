"""Text that is hard to tokenize, and much that is not."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

# What split rules treat in ways of their own: contractions and what only looks like them, blanks of
# one to three bytes and what only looks like one, line ends, letters, marks and numbers of several
# scripts, signs next to them, and what stands for itself in the files of other tokenizers.
FRAGMENTS = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'", "''", "'S", "'LL", "'Ve", "'ſ", "\u2019s"),
    *("'l", "'v", "'r", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\r", "\t", "\x0b", "\x0c"),
    *("\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"),
    *("\u200b", "\u200d", "\u180e", "\ufeff", "\x1c", "\x1f", "\x7f", "\x02", "\ufffd", "\ue000"),
    *("a", "Z", "the", "HTTPServer", "é", "ß", "e\u0301", "ﬁ", "ª", "ǅ", "ʰ", "𝒳", "𐐷", "İ", "ſ"),
    *(
        "北京",
        "日本語",
        "カタカナ",
        "・",
        "\u30a0",
        "\u3099",
        "がん",
        "한국어",
        "각",
        "नमस्ते",
        "ไทย",
    ),
    *("עברית", "العربية", "\u202eabc\u202c", "ﷺ", "Ελλάδα", "русский", "\u0301", "\u0327\u0301"),
    *("1", "42", "1234", "1234567", "²", "½", "Ⅷ", "٣", "𝟙", "①", "零", "!", "(", "((", "/", "//"),
    *(
        "$",
        "=" * 40,
        "-->",
        "🏳️‍🌈",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "❤️",
        "_",
        "\\",
        "\U0010ffff",
        "\ufdd0",
        "\u3040",
    ),
    *("x" * 8, "y" * 16, "z" * 17, "w" * 33, " " * 33, "\\ud800", "\\u0000", "&nbsp;", "<b>"),
    *("<s>", "</s>", "<|endoftext|>", "<0x0A>", "[INST]", "Ġ", "##ing", "\u1e9b\u0323", "\u212b"),
)
# Signs that are also SentencePiece's and our own marks.
MARKS = ("▁", "▁▁x", "\x00", "\x01", "a\x00b")


def hard_texts(count: int = 400, seed: int = 15) -> list[str]:
    """Short texts of fragments, and a few with long runs of one character."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(FRAGMENTS, k=draw.randrange(1, 40))) for _ in range(count)]
    texts += ["".join(draw.choices(FRAGMENTS + MARKS, k=12)) for _ in range(count // 10)]
    runs = [
        " " * 9000 + "x",
        "7" * 5000,
        "a" * 5000,
        "\n" * 3000,
        "=" * 4000,
        "北" * 3000,
        " \n" * 900,
    ]
    return [*texts, *runs, "", " ", "\n", "no more"]


def python_texts(num_bytes: int) -> list[str]:
    """The sources of this Python's library, in order, about `num_bytes` of them."""
    texts: list[str] = []
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts or size >= num_bytes:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 300_000:
            texts.append(text)
            size += len(text.encode())
    return texts
