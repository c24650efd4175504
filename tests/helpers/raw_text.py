"""Raw text as users have it: exports of `datasets`, and GPT-2's two vocabulary files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from helpers.tiny_text_run import sentences

UNICODE = [
    "Zürich, 北京 and São Paulo — naïve façades.\n\n\tTabs,   runs of  blanks \u00a0and 🙂🙃.",
    "Ещё раз: “quotes”, ﬁ ligatures, e\u0301 in two parts, 𝔸𝔹.\r\nDon't, we'll, I'd!",
    "It says <|endoftext|> in the middle and that is only text.",
]


def wikipedia_articles(count: int = 120) -> list[str]:
    return UNICODE + sentences(count, seed=11)


def web_pages(count: int = 160) -> list[str]:
    return sentences(count, seed=12) + [text[::-1] for text in UNICODE]


def write_wikipedia(file: Path, articles: Sequence[str]) -> Path:
    """As `wikipedia.to_json` writes it: id, url, title, text; all but ASCII escaped."""
    with file.open("w") as lines:
        for number, text in enumerate(articles):
            title = f"Größe {number}"
            url = f"https://en.wikipedia.org/wiki/{number}"
            article = {"id": str(number), "url": url, "title": title, "text": text}
            lines.write(json.dumps(article) + "\n")
    return file


def write_openwebtext(file: Path, pages: Sequence[str]) -> Path:
    """As `openwebtext.to_json` writes it, in the newer form that does not escape."""
    with file.open("w", encoding="utf-8") as lines:
        for text in pages:
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return file


def write_vocabulary(directory: Path, size: int = 320) -> tuple[Path, Path]:
    """`gpt2-vocab.json` and `gpt2-merges.txt` of a small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(wikipedia_articles() * 2, trainer)
    tokenizer.model.save(str(directory), "gpt2")
    return directory / "gpt2-vocab.json", directory / "gpt2-merges.txt"
