"""Continuous batching: many continuations at once, each starting and ending at any time.

    session = Session(network, eos_id=..., slots=8)
    name = session.add(prompt, options)        any time; waits until a slot is free
    for token in session.step(): ...           the next token of each running sequence, or several
    session.cancel(name)                       any time

`generate` and a server are loops around `step`. A sequence is a function of its prompt, its options
and its number alone: it draws from a stream of random numbers of its own, so neither its arrival
time nor its neighbours change it.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate import sampling
from fourfold.generate.decoder import Decoder, SequenceModel
from fourfold.generate.sampling import Options
from fourfold.generate.sharing import CacheRows, Running, Turn, judge_draft

# Prompts read in one go: more would make the running sequences wait too long for their next token.
PROMPT_TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class Token:
    """One token of a sequence. Log-probabilities are those of the model itself: before any
    processor, temperature or filter."""

    sequence: int
    id: int
    finish: str | None = None  # "stop" at the end of text, "length" at max_dec_len
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()  # the most probable ids, best first


class Session:
    """`slots` sequences run, the others wait in order of arrival."""

    def __init__(
        self,
        network: SequenceModel,
        *,
        eos_id: int | None,
        slots: int,
        positions: int | None = None,
        vocab_size: int | None = None,
        prompt_tokens_at_once: int = PROMPT_TOKENS_AT_ONCE,
        draft_tokens: int = 0,
    ) -> None:
        """`positions` is the longest prompt and continuation together, the model's own by default.

        Ids from `vocab_size` on, the padding of a model's vocabulary, are never produced. A step
        reads `prompt_tokens_at_once` tokens of prompts, or a little more: with few the first token
        of one comes soon and the running ones wait little, with many there are fewer steps. With
        `draft_tokens` up to that many tokens are guessed and checked together
        (fourfold/generate/sharing.py); for a network that cannot, that has no effect.
        """
        self.network = network
        self.positions = network.max_positions if positions is None else positions
        self.slots = slots
        network.reserve(slots, self.positions)
        self._eos_id = eos_id
        self._vocab_size = vocab_size
        self._prompt_tokens = prompt_tokens_at_once
        self._draft_tokens = draft_tokens
        self._cache: CacheRows | None = None  # where its rows can be used in any order
        if isinstance(network, Decoder) and network.fused is not None:
            self._cache = CacheRows(network, slots)
        self._names = count()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []  # in the order of the network's rows

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, prompt: Sequence[int], options: Options, number: int = 0) -> int:
        """A new sequence; returns the name its tokens carry.

        `number` distinguishes the continuations of one prompt. Raises UserError, and changes
        nothing, if the sequence could never run.
        """
        check_prompt(prompt, options, self.positions, self._vocab_size)
        if options.decode_strategy == "beam_search":
            raise UserError(
                "decode_strategy='beam_search' needs a network of its own and cannot share a "
                "session; choose sampling or greedy_search"
            )
        if options.force_eos and self._eos_id is None:
            raise UserError("force_eos needs an end-of-text id, and there is none")
        source = random.Random(stream_seed(options.seed, prompt, number))
        sequence = Running(next(self._names), tuple(prompt), options, source)
        self._waiting.append(sequence)
        return sequence.name

    def cancel(self, name: int) -> None:
        """Stop this sequence; harmless if it has already ended."""
        self._waiting = deque(one for one in self._waiting if one.name != name)
        for sequence in self._running:
            sequence.finished |= sequence.name == name
        self._forget_finished()

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """The next token of every running sequence, or several, and the first of some that
        waited."""
        if self._cache is not None:
            return self._step_in_place(self._cache)
        tokens = []
        if self._running:
            logits = self.network.advance([sequence.new[-1] for sequence in self._running])
            tokens += self._choose(self._running, logits)
            self._forget_finished()
        if group := self._next_group():
            tokens += self._choose(group, self._read(group))
            self._running += group
            self._forget_finished()
        return tokens

    def _step_in_place(self, cache: CacheRows) -> list[Token]:
        """Running sequences and prompts in one call, where none begins with another's."""
        unread = sum(len(one.prompt) - one.stored for one in self._running if not one.new)
        arrived = self._next_group() if unread < self._prompt_tokens else []
        waves = cache.waves(self._running, arrived, self._prompt_tokens, self._draft_tokens)
        self._running += arrived
        tokens = []
        for wave in waves:
            tokens += self._choose_for(wave, cache.run(wave))
        self._forget_finished()
        return tokens

    def _choose_for(self, wave: list[Turn], logits: Tensor) -> list[Token]:
        """A token of each turn; then the next of those whose draft has it, and so on."""
        ends = [0, *accumulate(turn.wanted for turn in wave)]
        places = {id(turn): place for turn, place in zip(wave, ends)}
        tokens, number = list[Token](), 0
        open_turns = [turn for turn in wave if turn.wanted]
        while open_turns:
            rows = [places[id(turn)] + number for turn in open_turns]
            part = logits if rows == list(range(len(logits))) else logits[rows]
            tokens += self._choose([turn.sequence for turn in open_turns], part)
            going_on = []
            for turn in open_turns:
                is_right = turn.draft[number : number + 1] == turn.sequence.new[-1:]
                if is_right and not turn.sequence.finished:
                    going_on.append(turn)
                else:
                    judge_draft(turn, number + is_right)
            open_turns, number = going_on, number + 1
        return tokens

    # -- rows of the network ----------------------------------------------------------------

    def _next_group(self) -> list[Running]:
        """The next in the queue: as many as there are free slots and as one prompt pass may
        take."""
        group: list[Running] = []
        longest, prompts = 0, set[tuple[int, ...]]()
        while self._waiting and len(self._running) + len(group) < self.slots:
            prompt = self._waiting[0].prompt
            shortest = min((len(known) for known in prompts), default=len(prompt))
            longest = max(longest, len(prompt))
            read = longest * len(prompts | {prompt})
            # Prompts read together are padded to the longest; not to more than twice the shortest.
            uneven = self._cache is None and longest > 2 * min(shortest, len(prompt))
            if group and (read > self._prompt_tokens or uneven):
                break
            prompts.add(prompt)
            group.append(self._waiting.popleft())
        return group

    def _read(self, group: list[Running]) -> Tensor:
        """Logits after the prompts; each prompt is read once, however many sequences continue
        it."""
        prompts = list(dict.fromkeys(sequence.prompt for sequence in group))
        logits = self.network.read(prompts)
        if len(prompts) < len(group):
            place = {prompt: number for number, prompt in enumerate(prompts)}
            sources = [place[sequence.prompt] for sequence in group]
            before = len(self._running)
            self.network.arrange([*range(before), *(before + source for source in sources)])
            logits = logits[sources]
        return logits

    def _forget_finished(self) -> None:
        """Where rows are kept dense the last move into the gaps, so that few are copied."""
        if self._cache is not None:
            self._cache.settle(self._running)
            self._running = [sequence for sequence in self._running if not sequence.finished]
            return
        kept = [row for row, sequence in enumerate(self._running) if not sequence.finished]
        if len(kept) == len(self._running):
            return
        gaps = [row for row in range(len(kept)) if self._running[row].finished]
        rows = list(range(len(kept)))
        for gap, row in zip(gaps, reversed(kept)):
            rows[gap] = row
        self.network.arrange(rows)
        self._running = [self._running[row] for row in rows]

    # -- tokens -----------------------------------------------------------------------------

    def _choose(self, sequences: list[Running], logits: Tensor) -> list[Token]:
        logits = logits[:, : self._vocab_size]  # (N, V)
        model_logits = logits
        if any(_changes_logits(sequence, self._eos_id) for sequence in sequences):
            self._check_finite(sequences, logits)
            logits = torch.stack(
                [
                    process(row, one.prompt, one.new, one.options, self._eos_id)
                    for one, row in zip(sequences, logits)
                ]
            )
        chosen = sampling.choose(
            logits,
            [_rule(sequence.options) for sequence in sequences],
            [sequence.random.random() for sequence in sequences],
        )
        if min(chosen) < 0:
            self._check_finite(sequences, model_logits)
        chosen = [int(token_id) for token_id in self.network.broadcast_choices([*chosen])]
        tokens = []
        for row, (sequence, token_id) in enumerate(zip(sequences, chosen)):
            sequence.new.append(token_id)
            finish = self._finish(sequence, token_id)
            sequence.finished = finish is not None
            likelihood = _likelihood(sequence.options, model_logits[row], token_id)
            tokens.append(Token(sequence.name, token_id, finish, *likelihood))
        return tokens

    def _check_finite(self, sequences: list[Running], logits: Tensor) -> None:
        """Nothing of a sequence that is not finite stays in the cache."""
        bad = not_finite(logits)
        if bad and self._cache is not None:
            self._cache.wipe([sequences[row] for row in bad])
        elif bad:
            # Those that are read now come after those that run.
            first = 0 if sequences is self._running else len(self._running)
            self.network.wipe([first + row for row in bad])
        if bad:
            raise UserError(NOT_FINITE)

    def _finish(self, sequence: Running, token_id: int) -> str | None:
        if token_id == self._eos_id:
            return "stop"
        return "length" if len(sequence.new) == sequence.options.max_dec_len else None


def _rule(options: Options) -> sampling.Rule:
    if options.decode_strategy == "greedy_search":
        return sampling.GREEDY
    return options.top_k, options.top_p, options.temperature


def check_prompt(
    prompt: Sequence[int], options: Options, positions: int, vocab_size: int | None
) -> None:
    if not prompt:
        raise UserError(
            "the prompt is empty, so there is nothing to continue; give some text (or, as ids, "
            "the end-of-text id alone, which begins a new document)"
        )
    if min(prompt) < 0 or (vocab_size is not None and max(prompt) >= vocab_size):
        raise UserError(
            f"the prompt has ids from {min(prompt)} to {max(prompt)}, and the vocabulary goes "
            f"from 0 to {'its end' if vocab_size is None else vocab_size - 1}; it was made with "
            "another tokenizer"
        )
    if len(prompt) + options.max_dec_len > positions:
        room = positions - len(prompt)
        advice = f"lower max_dec_len to {room} or " if room > 0 else ""
        raise UserError(
            f"the prompt has {len(prompt)} tokens, which with max_dec_len={options.max_dec_len} "
            f"is more than the {positions} positions there are; {advice}shorten the prompt"
        )


NOT_FINITE = (
    "the model's logits are not finite, so no token can be chosen; the checkpoint is "
    "damaged or its training diverged"
)


def not_finite(logits: Tensor) -> list[int]:
    """The rows of logits from which no token can be chosen."""
    finite = logits.amax(dim=-1).isfinite()
    # One question first: a GPU is waited for once, not for every row.
    if bool(finite.all()):
        return []
    return [row for row, is_finite in enumerate(finite.tolist()) if not is_finite]


def stream_seed(seed: int, prompt: Sequence[int], number: int) -> int:
    """Unrelated for every seed, prompt and number."""
    content = f"{seed}/{number}/{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "little")


def _changes_logits(sequence: Running, eos_id: int | None) -> bool:
    options, new = sequence.options, len(sequence.new)
    forbids = eos_id is not None and new < options.min_dec_len
    forces = options.force_eos and new == options.max_dec_len - 1
    return forbids or forces or options.repetition_penalty != 1.0


def process(
    logits: Tensor,
    prompt: Sequence[int],
    new: Sequence[int],
    options: Options,
    eos_id: int | None,
) -> Tensor:
    """The processors for one sequence, in FleetX's order. (V,) -> (V,)"""
    row = logits.unsqueeze(0)
    if eos_id is not None and len(new) < options.min_dec_len:
        row = sampling.forbid_eos(row, eos_id)
    if options.repetition_penalty != 1.0:
        seen = torch.tensor([[*prompt, *new]], device=logits.device)
        row = sampling.penalise_repetition(row, seen, options.repetition_penalty)
    if eos_id is not None and options.force_eos and len(new) == options.max_dec_len - 1:
        row = sampling.force_token(row, eos_id)
    return row[0]


def _likelihood(
    options: Options, logits: Tensor, token_id: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if options.alternatives is None:
        return None, ()
    logprobs = torch.log_softmax(logits, dim=-1)  # (V,)
    best, ids = logprobs.topk(min(options.alternatives, len(logprobs)))
    return float(logprobs[token_id]), tuple(zip(ids.tolist(), best.tolist()))
