"""Evaluation of a checkpoint: from an `Eval` section to a table of results.

evaluate(config)      perplexity of a text, cloze accuracy (LAMBADA), or loss of prepared data
measure_cloze(...)    how often the model predicts the last word of a text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fourfold.config import Config
from fourfold.config.schema import EvalSection
from fourfold.errors import DataError, UserError
from fourfold.evaluate.perplexity import count_words, detokenize_wikitext, measure_loss, read_part
from fourfold.evaluate.scoring import Scorer, ScoreRequest
from fourfold.generate import Decoder
from fourfold.generate.loading import Trained, load_trained
from fourfold.metrics.lines import perplexity
from fourfold.terminal import table_lines
from fourfold.tokenizer import Tokenizer

Notice = Callable[[str], None]
Numbers = dict[str, float | int]
MAX_LINE_BYTES = 1 << 20  # of an example of cloze


@dataclass(frozen=True)
class Result:
    """What was measured, on what, and the numbers."""

    measure: str
    data: str
    checkpoint: str
    weights: str
    numbers: Numbers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        rows = [("measure", self.measure), ("data", self.data), ("checkpoint", self.checkpoint)]
        rows.append(("weights", self.weights))
        for name, value in self.numbers.items():
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            rows.append((name.replace("_", " "), shown))
        return "\n".join(table_lines(rows))


def evaluate(config: Config, on_notice: Notice = print) -> Result:
    """Measure what `config.Eval` names; progress goes to `on_notice`."""
    section, dataset = config.Eval, config.Data.dataset
    if section.eval_path is None and dataset.input_dir is None and dataset.train_data is None:
        raise UserError(
            "nothing to evaluate on: set Eval.eval_path to a text (or, with Eval.cloze_eval, to "
            "JSON lines), or Data.dataset.input_dir to prepared data"
        )
    if section.eval_path is not None and not Path(section.eval_path).is_file():
        raise DataError(f"Eval.eval_path={section.eval_path}: there is no such file")
    for name in _without_effect(section):
        on_notice(f"Eval.{name} has no effect on this measure")
    trained = load_trained(
        config, on_notice, section.ckpt_dir, needs_text=section.eval_path is not None
    )
    decoder = Decoder(trained.model, config.Inference.weights)
    check_window(section, decoder.max_positions)
    scorer = Scorer(decoder, section.batch_size, _progress(section.logging_freq, on_notice))
    measure, numbers = _measure(config, trained, scorer)
    return Result(
        measure,
        section.eval_path or f"{section.part} part of Data.dataset",
        str(trained.path),
        config.Inference.weights,
        numbers,
    )


def check_window(section: EvalSection, positions: int) -> None:
    if section.max_seq_len > positions:
        raise UserError(
            f"Eval.max_seq_len={section.max_seq_len} is longer than the model's "
            f"{positions} positions; choose at most {positions}"
        )


def _without_effect(section: Any) -> list[str]:
    """Keys that were set but do not apply to this measure."""
    if section.eval_path is None:
        idle = {"cloze_eval", "detokenize"}
    elif section.cloze_eval:
        idle = {"overlapping_eval", "detokenize", "part", "max_tokens"}
    else:
        idle = {"part", "max_tokens"}
    defaults = {name: field.default for name, field in type(section).model_fields.items()}
    defaults["overlapping_eval"] = section.max_seq_len
    return sorted(name for name in idle if getattr(section, name) != defaults[name])


def _measure(config: Config, trained: Trained, scorer: Scorer) -> tuple[str, Numbers]:
    section = config.Eval
    if section.eval_path is None:
        return "loss", _measure_prepared(config, trained, scorer)
    file = Path(section.eval_path)
    if not section.cloze_eval:
        text = TextToMeasure.read(file, trained.tokenizer, detokenize=section.detokenize)
        return "perplexity", text_numbers(section, trained.tokenizer, scorer, text)
    return "cloze", measure_cloze(scorer, trained.tokenizer, file, section.max_seq_len).numbers()


@dataclass(frozen=True)
class TextToMeasure:
    """A text to measure the perplexity of."""

    tokens: Sequence[int]
    words: int  # of the text as it is in the file

    @classmethod
    def read(cls, file: Path, tokenizer: Tokenizer, *, detokenize: bool) -> TextToMeasure:
        raw = read_text(file)
        text = detokenize_wikitext(raw) if detokenize else raw
        return cls(tokenizer.encode(text), count_words(raw))


def text_numbers(
    section: EvalSection, tokenizer: Tokenizer, scorer: Scorer, text: TextToMeasure
) -> Numbers:
    loss = measure_loss(
        scorer,
        [text.tokens],
        section.max_seq_len,
        section.overlapping_eval,
        token_bytes=tokenizer.token_bytes,
    )
    ratio = loss.tokens / max(text.words - 1, 1)
    return {
        "loss": loss.mean,
        "perplexity": perplexity(loss.mean),
        "adjusted_perplexity": perplexity(loss.mean * ratio),
        "token_ratio": ratio,
        "bits_per_byte": loss.bits_per_byte,
        "tokens": loss.tokens,
        "words": text.words,
    }


def _measure_prepared(config: Config, trained: Trained, scorer: Scorer) -> Numbers:
    section = config.Eval
    pieces, eos_id = read_part(config)
    tokenizer = trained.named_tokenizer
    loss = measure_loss(
        scorer,
        pieces,
        section.max_seq_len,
        section.overlapping_eval,
        ignored_input=eos_id if config.Data.dataset.eod_mask_loss else None,
        token_bytes=None if tokenizer is None else tokenizer.token_bytes,
    )
    numbers: Numbers = {"loss": loss.mean, "perplexity": perplexity(loss.mean)}
    if tokenizer is not None:
        numbers["bits_per_byte"] = loss.bits_per_byte
    return {**numbers, "tokens": loss.tokens}


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; name a file that can be read") from None


def _progress(every: int, on_notice: Notice) -> Callable[[int], None]:
    def tell(batches: int) -> None:
        if batches % every == 0:
            on_notice(f"{batches} batches done")

    return tell


# -- cloze --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cloze:
    """How many last words were predicted.

    The word is what follows the last blank, encoded with a blank before it and separately from the
    text before it. It counts as predicted if each of its tokens is the most probable one there.
    """

    correct: int
    examples: int
    logprob: float  # of all words together

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples

    def numbers(self) -> Numbers:
        return {
            "correct": self.correct,
            "examples": self.examples,
            "accuracy": self.accuracy,
            "word_perplexity": perplexity(-self.logprob / self.examples),
        }


def measure_cloze(scorer: Scorer, tokenizer: Tokenizer, file: Path, seq_len: int) -> Cloze:
    """Over the JSON lines of `file`, each with a `text`."""
    cloze = score_cloze(scorer, cloze_requests(tokenizer, file, seq_len))
    if not cloze.examples:
        raise DataError(f"{file}: holds no text; give each example a line of JSON")
    return cloze


def score_cloze(scorer: Scorer, requests: Iterable[ScoreRequest]) -> Cloze:
    correct = examples = 0
    logprob = 0.0
    for score in scorer.score(requests):
        correct += bool(score.is_best.all())
        examples += 1
        logprob += score.total
    return Cloze(correct, examples, logprob)


def cloze_requests(tokenizer: Tokenizer, file: Path, seq_len: int) -> Iterator[ScoreRequest]:
    return (cloze_request(tokenizer, text, seq_len) for text in read_texts(file))


def cloze_request(tokenizer: Tokenizer, text: str, seq_len: int) -> ScoreRequest:
    word = text.split()[-1]
    context = tokenizer.encode_prompt(text[: text.rindex(word)].strip())
    target = tokenizer.encode_continuation(f" {word}")
    # A long text loses its beginning; the window holds seq_len inputs and the last token.
    tokens = [*context, *target][-(seq_len + 1) :]
    return ScoreRequest(tokens, min(len(target), len(tokens) - 1))


def read_texts(file: Path) -> Iterator[str]:
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield _text_of(line, f"{file}:{number}")
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; name a file that can be read") from None


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
