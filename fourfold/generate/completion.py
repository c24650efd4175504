"""Text completion: prompts in, continuations out; ids with `generate`, texts with `complete`.

Sampling and greedy search run in a `Session`; beam search (`beam_search`) is here. `TextStream`
turns ids into text while they arrive: no half characters, and nothing after a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fourfold.errors import UserError
from fourfold.generate.decoder import SequenceModel
from fourfold.generate.sampling import Options
from fourfold.generate.session import (
    NOT_FINITE,
    Session,
    Token,
    check_prompt,
    not_finite,
    process,
)
from fourfold.tokenizer import Tokenizer

# Sequences run at once; more wait. A bound on the memory of the cache.
MAX_SLOTS = 64


@dataclass
class Continuation:
    """New ids without the end of text and, from `complete`, their text without the prompt."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""  # "stop" at the end of text or a stop string, "length" at max_dec_len
    tokens: list[Token] = field(default_factory=list)  # of sampling and greedy_search
    text: str = ""


# Prompt number, continuation number, token: True ends the continuation.
OnToken = Callable[[int, int, Token], bool | None]


def generate(
    network: SequenceModel,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    eos_id: int | None,
    vocab_size: int | None = None,
    on_token: OnToken | None = None,
    max_slots: int = MAX_SLOTS,
    draft_tokens: int = 0,
) -> list[list[Continuation]]:
    """`num_return_sequences` continuations of each prompt.

    Each is what its prompt would produce alone: neither the other prompts nor their number change
    it.
    """
    for prompt in prompts:
        check_prompt(prompt, options, network.max_positions, vocab_size)
    if options.decode_strategy == "beam_search":
        return [
            [
                _of_beam(beam, eos_id)
                for beam in beam_search(
                    network, prompt, options, eos_id=eos_id, vocab_size=vocab_size
                )
            ]
            for prompt in prompts
        ]
    results = [[Continuation() for _ in range(options.num_return_sequences)] for _ in prompts]
    if not prompts:
        return results
    session = Session(
        network,
        eos_id=eos_id,
        slots=min(max_slots, len(prompts) * options.num_return_sequences),
        positions=max(map(len, prompts)) + options.max_dec_len,
        vocab_size=vocab_size,
        draft_tokens=draft_tokens,
    )
    places = {}
    for place, prompt in enumerate(prompts):
        for number in range(options.num_return_sequences):
            places[session.add(prompt, options, number)] = place, number
    while session.running or session.waiting:
        for token in session.step():
            if token.sequence not in places:
                continue  # cancelled by an earlier token of the same step
            place, number = places[token.sequence]
            _record(results[place][number], token, eos_id)
            if on_token is not None and on_token(place, number, token):
                session.cancel(token.sequence)
                del places[token.sequence]
                results[place][number].finish = "stop"
    return results


def _record(result: Continuation, token: Token, eos_id: int | None) -> None:
    result.tokens.append(token)
    if token.id != eos_id:
        result.ids.append(token.id)
    result.finish = token.finish or result.finish


def _of_beam(beam: Beam, eos_id: int | None) -> Continuation:
    ended = beam.ids[-1] == eos_id
    return Continuation(list(beam.ids[:-1] if ended else beam.ids), "stop" if ended else "length")


def complete(
    network: SequenceModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    options: Options,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, int, str], None] | None = None,
    max_slots: int = MAX_SLOTS,
    draft_tokens: int = 0,
) -> list[list[Continuation]]:
    """`generate` for prompts that are texts, or ids already, with the texts that follow them.

    `on_text` receives prompt, continuation and each new piece of text. A continuation ends before
    the first of the `stop` strings that appears in it.
    """
    check_stop(stop)
    if stop and options.decode_strategy == "beam_search":
        raise UserError(
            "stop strings do not go with decode_strategy='beam_search', which writes no text "
            "before its end; leave them out, or choose sampling or greedy_search"
        )
    streams: dict[tuple[int, int], TextStream] = {}
    texts: dict[tuple[int, int], str] = {}

    def on_token(prompt: int, number: int, token: Token) -> bool:
        place = prompt, number
        stream = streams.setdefault(place, TextStream(tokenizer, stop))
        new = "" if token.id == tokenizer.eos_id else stream.feed(token.id)
        if token.finish is not None:
            new += stream.flush()
        texts[place] = texts.get(place, "") + new
        if new and on_text is not None:
            on_text(prompt, number, new)
        return stream.stopped

    results = generate(
        network,
        [tokenizer.encode_prompt(one) if isinstance(one, str) else one for one in prompts],
        options,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        on_token=on_token,
        max_slots=max_slots,
        draft_tokens=draft_tokens,
    )
    for prompt, continuations in enumerate(results):
        for number, result in enumerate(continuations):
            known = texts.get((prompt, number))
            if known is None:
                known = tokenizer.decode(result.ids, skip_special=True, continues=True)
            result.text = known
    return results


# -- text while it arrives ------------------------------------------------------------------------


HALF_CHARACTER = "\ufffd"
# Decoding starts this many ids before the new ones, for tokenizers that look at their neighbours.
CONTEXT = 4


class TextStream:
    """`feed` returns the text an id adds; what may still change is held back until it cannot.

    Held back are the bytes of an unfinished character, and an end that may become a stop string.
    A stop string and all after it are never returned; `stopped` is true from then on.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        check_stop(stop)
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = 0  # how many ids are in `_held` or given out
        self._held = ""

    def feed(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(token_id)
        new = self._new_text()
        if new.endswith(HALF_CHARACTER):
            return ""
        self._decoded = len(self._ids)
        return self._give(new, final=False)

    def flush(self) -> str:
        """What was held back, once no id will follow."""
        if self.stopped:
            return ""
        new = self._new_text()
        self._decoded = len(self._ids)
        return self._give(new, final=True)

    def _new_text(self) -> str:
        start = max(0, self._decoded - CONTEXT)
        return self._text(self._ids[start:])[len(self._text(self._ids[start : self._decoded])) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=True, continues=True)

    def _give(self, new: str, final: bool) -> str:
        text = self._held + new
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        kept = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise UserError("an empty stop string would end every text before it begins; leave it out")


# -- beam search ----------------------------------------------------------------------------------

# The `num_beams` most probable texts so far, extended together. In every step the 2 `num_beams`
# best extensions are looked at. Those that end are set aside if they are among the first
# `num_beams`; the best that do not end go on. A text that has ended scores its log-probability
# divided by its length in new tokens to the power of `length_penalty`. The search ends at
# `max_dec_len`; or once `num_beams` texts have ended and, with `early_stopping`, at once, or
# without, when the best that goes on would not, if it ended now, score above the worst of them.
#
# These are the rules of `transformers`. The processors (minimum length, repetition) act on
# log-probabilities, which are not normalised again.


@dataclass(frozen=True)
class Beam:
    """New ids, the end of text included, and the sum of their log-probabilities."""

    ids: tuple[int, ...]
    logprob: float

    def score(self, length_penalty: float) -> float:
        return self.logprob / len(self.ids) ** length_penalty


@torch.inference_mode()
def beam_search(
    network: SequenceModel,
    prompt: Sequence[int],
    options: Options,
    *,
    eos_id: int | None,
    vocab_size: int | None = None,
) -> list[Beam]:
    """The best `num_return_sequences` continuations, best first."""
    check_prompt(prompt, options, network.max_positions, vocab_size)
    network.reserve(options.num_beams, len(prompt) + options.max_dec_len)
    logits = network.read([prompt])
    beams, ended = [Beam((), 0.0)], list[Beam]()
    while True:
        logits = logits[:, :vocab_size]  # (beams, V)
        if bad := not_finite(logits):
            network.wipe(bad)
            raise UserError(NOT_FINITE)
        extensions = _extensions(network, beams, logits, prompt, options, eos_id)
        last = len(beams[0].ids) + 1 == options.max_dec_len
        going_on = []
        for rank, (source, beam) in enumerate(extensions):
            if not last and beam.ids[-1] != eos_id:
                going_on.append((source, beam))
            elif rank < options.num_beams:
                ended.append(beam)
        ended.sort(key=lambda beam: -beam.score(options.length_penalty))
        del ended[options.num_beams :]
        going_on = going_on[: options.num_beams]
        if not going_on or _settled(going_on[0][1], ended, options):
            return ended[: options.num_return_sequences]
        network.arrange([source for source, _ in going_on])
        beams = [beam for _, beam in going_on]
        logits = network.advance([beam.ids[-1] for beam in beams])


def _extensions(
    network: SequenceModel,
    beams: list[Beam],
    logits: torch.Tensor,
    prompt: Sequence[int],
    options: Options,
    eos_id: int | None,
) -> list[tuple[int, Beam]]:
    """The best continuations, each with the beam it extends; best first."""
    logprobs = torch.log_softmax(logits, dim=-1)  # (beams, V)
    totals = torch.stack(
        [
            process(row, prompt, beam.ids, options, eos_id) + beam.logprob
            for beam, row in zip(beams, logprobs)
        ]
    )
    vocabulary = totals.shape[1]
    best, places = totals.flatten().topk(min(2 * options.num_beams, totals.numel()))
    agreed = network.broadcast_choices([*best.tolist(), *places.tolist()])
    found = []
    for total, place in zip(agreed[: len(best)], agreed[len(best) :]):
        source, token_id = divmod(int(place), vocabulary)
        if total > -torch.inf:
            found.append((source, Beam((*beams[source].ids, token_id), total)))
    return found


def _settled(best_going_on: Beam, ended: list[Beam], options: Options) -> bool:
    if len(ended) < options.num_beams:
        return False
    penalty = options.length_penalty
    return options.early_stopping or best_going_on.score(penalty) <= ended[-1].score(penalty)
