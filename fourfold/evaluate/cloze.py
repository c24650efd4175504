"""LAMBADA-style cloze: does the model find the last word of each text?

The word is what follows the last blank, encoded with a blank before it and apart from the text
before it. It is found if each of its tokens is the most probable one there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import DataError
from fourfold.evaluate.scoring import Question, Scorer
from fourfold.tokenizer import Tokenizer

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Cloze:
    correct: int
    examples: int
    logprob: float  # of all words together

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples


def measure_cloze(scorer: Scorer, tokenizer: Tokenizer, file: Path, seq_len: int) -> Cloze:
    """Over the JSON lines of `file`, each with a `text`."""
    questions = (cloze_question(tokenizer, text, seq_len) for text in read_texts(file))
    correct = examples = 0
    logprob = 0.0
    for answer in scorer.answer(questions):
        correct += bool(answer.is_best.all())
        examples += 1
        logprob += answer.total
    if not examples:
        raise DataError(f"{file}: holds no text; give each example a line of JSON")
    return Cloze(correct, examples, logprob)


def cloze_question(tokenizer: Tokenizer, text: str, seq_len: int) -> Question:
    word = text.split()[-1]
    context = tokenizer.encode(text[: text.rindex(word)].strip())
    target = tokenizer.encode(f" {word}")
    # A long text loses its beginning; the window holds seq_len inputs and the last token.
    tokens = [*context, *target][-(seq_len + 1) :]
    return Question(tokens, min(len(target), len(tokens) - 1))


def read_texts(file: Path) -> Iterator[str]:
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield _text_of(line, f"{file}:{number}")
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; set Eval.eval_path to a file") from None


def _text_of(line: bytes, place: str) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{place}: a line of more than {MAX_LINE_BYTES >> 20} MB is no example")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}); each line is one JSON object") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{place}: no text here; write {{"text": "..."}} on each line')
    if len(text.split()) < 2:
        raise DataError(f"{place}: {text!r} has no word before its last; remove the line")
    return text
