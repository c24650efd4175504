"""Continuous batching: many continuations at once, each starting and ending at any time.

    session = Session(network, eos_id=..., slots=8)
    name = session.add(prompt, options)        any time; waits until a slot is free
    for token in session.step(): ...           one new token of each running sequence
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
from dataclasses import dataclass, field
from itertools import count, groupby

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate import sampling
from fourfold.generate.decoder import SequenceModel
from fourfold.generate.sampling import Options

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


@dataclass
class Running:
    """A sequence: the tokens so far and where its random numbers come from."""

    name: int
    prompt: tuple[int, ...]
    options: Options
    random: random.Random
    new: list[int] = field(default_factory=list)
    finished: bool = False


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
    ) -> None:
        """`positions` is the longest prompt and continuation together, the model's own by default.

        Ids from `vocab_size` on, the padding of a model's vocabulary, are never produced.
        """
        self.network = network
        self.positions = network.max_positions if positions is None else positions
        self.slots = slots
        network.reserve(slots, self.positions)
        self._eos_id = eos_id
        self._vocab_size = vocab_size
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
        """One token of every running sequence, and the first of some that waited."""
        tokens = []
        if self._running:
            logits = self.network.advance([sequence.new[-1] for sequence in self._running])
            tokens += self._choose(self._running, logits)
            self._forget_finished()
        if group := self._next_group():
            tokens += self._choose(group, self._read(group), first_row=len(self._running))
            self._running += group
            self._forget_finished()
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
            if group and (read > PROMPT_TOKENS_AT_ONCE or longest > 2 * min(shortest, len(prompt))):
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
        """The last rows move into the gaps, so that few are copied."""
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

    def _choose(self, sequences: list[Running], logits: Tensor, first_row: int = 0) -> list[Token]:
        logits = logits[:, : self._vocab_size]  # (N, V)
        check_finite(logits, self.network, first_row)
        model_logits = logits
        if any(_changes_logits(sequence, self._eos_id) for sequence in sequences):
            logits = torch.stack(
                [
                    process(row, one.prompt, one.new, one.options, self._eos_id)
                    for one, row in zip(sequences, logits)
                ]
            )
        chosen = self._select(sequences, logits)
        tokens = []
        for row, (sequence, token_id) in enumerate(zip(sequences, chosen)):
            sequence.new.append(token_id)
            finish = self._finish(sequence, token_id)
            sequence.finished = finish is not None
            likelihood = _likelihood(sequence.options, model_logits[row], token_id)
            tokens.append(Token(sequence.name, token_id, finish, *likelihood))
        return tokens

    def _select(self, sequences: list[Running], logits: Tensor) -> list[int]:
        chosen = [0] * len(sequences)
        numbered = sorted(enumerate(sequences), key=lambda pair: _rule(pair[1]))
        for rule, members in groupby(numbered, key=lambda pair: _rule(pair[1])):
            rows = [row for row, _ in members]
            part = logits if len(rows) == len(sequences) else logits[rows]
            if rule is GREEDY:
                ids = part.argmax(dim=-1)
            else:
                drawn = [sequences[row].random.random() for row in rows]
                uniforms = torch.tensor(drawn, dtype=torch.float64, device=part.device)
                ids = sampling.sample(part, *rule, uniforms)
            for row, token_id in zip(rows, ids.tolist()):
                chosen[row] = token_id
        return [int(token_id) for token_id in self.network.broadcast_choices([*chosen])]

    def _finish(self, sequence: Running, token_id: int) -> str | None:
        if token_id == self._eos_id:
            return "stop"
        return "length" if len(sequence.new) == sequence.options.max_dec_len else None


GREEDY = (0, 0.0, 0.0)


def _rule(sequence: Running) -> tuple[int, float, float]:
    """Sequences with the same options are sampled together."""
    options = sequence.options
    if options.decode_strategy == "greedy_search":
        return GREEDY
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


def check_finite(logits: Tensor, network: SequenceModel, first_row: int = 0) -> None:
    """Refuse logits that are not finite; the rows they come from, starting at `first_row`, are
    wiped."""
    finite = logits.amax(dim=-1).isfinite()
    if not bool(finite.all()):
        network.wipe([first_row + row for row in (~finite).nonzero()[:, 0].tolist()])
        raise UserError(
            "the model's logits are not finite, so no token can be chosen; the checkpoint is "
            "damaged or its training diverged"
        )


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
