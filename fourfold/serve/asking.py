"""From a client's body to sequences for the worker: ids and options, or a clear refusal.

What a body leaves out is what the run's `Generation` section says, but for the seed: without one,
each request draws its own, which the reply tells.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

from fourfold.generate import Options
from fourfold.serve.limits import Limits
from fourfold.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    Request,
)
from fourfold.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

PROMPT_FORMS = (
    "prompt: a text, a list of texts, a list of token ids or a list of such lists is expected"
)
SPEAKERS = {"user": "User", "assistant": "Assistant"}
# The model would go on with the other side of the conversation.
CHAT_STOP = "\nUser:"


@dataclass(frozen=True)
class Wanted:
    """One sequence to be written. `new_tokens` may be 0 where only the prompt is to be judged."""

    prompt: tuple[int, ...]
    options: Options
    number: int
    stop: tuple[str, ...]
    new_tokens: int
    echo: str | None = None  # the prompt's text, where it belongs to the reply


@dataclass(frozen=True)
class Terms:
    """What every request is held against."""

    tokenizer: Tokenizer
    defaults: Options
    default_stop: tuple[str, ...]
    positions: int
    limits: Limits


def completion(body: CompletionRequest, terms: Terms) -> list[Wanted]:
    """The sequences in the order of their choices: all of the first prompt, then of the next."""
    prompts = _prompts(body.prompt)
    _check_count(len(prompts), body, terms.limits)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens: 0 writes nothing; choose 1 or more, or echo", param="max_tokens"
        )
    seed = _seed(body)
    wanted = []
    for prompt in prompts:
        ids = _encoded(prompt, terms) if isinstance(prompt, str) else prompt
        _check_ids(ids, terms)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else terms.tokenizer.decode(ids)
        wanted += _sequences(body, ids, body.max_tokens, body.logprobs, seed, echo, terms)
    return wanted


def chat(body: ChatRequest, terms: Terms) -> list[Wanted]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(
            400,
            "max_tokens: an older name of max_completion_tokens; give one of them",
            param="max_tokens",
        )
    new = body.max_completion_tokens or body.max_tokens
    if new == 0:
        raise ApiError(400, "max_tokens: 0 writes nothing; choose 1 or more", param="max_tokens")
    _check_count(1, body, terms.limits)
    ids = _encoded(conversation(body.messages), terms)
    _check_ids(ids, terms)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    sequences = _sequences(body, ids, new, alternatives, _seed(body), None, terms)
    return [replace(one, stop=(*one.stop, CHAT_STOP)) for one in sequences]


def conversation(messages: list[Message]) -> str:
    """The one template: instructions as they are, then a line for each speaker.

    It ends where the assistant speaks, without a blank, since tokens begin with theirs.
    """
    lines = []
    for message in messages:
        speaker = SPEAKERS.get(message.role)
        lines.append(f"{message.text}\n" if speaker is None else f"{speaker}: {message.text}")
    return "\n".join([*lines, "Assistant:"])


# Parts of the way


def _prompts(given: object) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    assert isinstance(given, list)
    if given and all(type(one) is int for one in given):
        return [given]
    wrong = [one for one in given if not (isinstance(one, str) or _is_ids(one))]
    if wrong or not given or len({type(one) for one in given}) > 1:
        raise ApiError(400, PROMPT_FORMS, param="prompt")
    return given


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _check_count(prompts: int, body: Request, limits: Limits) -> None:
    sequences = prompts * (body.n or 1)
    if sequences > limits.sequences:
        raise ApiError(
            400,
            f"{sequences} texts in one request, and at most {limits.sequences} are written; send "
            "fewer prompts or a lower n",
            param="n" if prompts == 1 else "prompt",
        )


def _encoded(text: str, terms: Terms) -> list[int]:
    longest = terms.tokenizer.longest_token_bytes
    if longest is not None:
        # A megabyte takes its time to encode, and its length alone may say that it cannot fit.
        fewest = -(-len(text.encode(errors="replace")) // longest)
        if fewest > terms.positions:
            raise _too_long(f"at least {fewest}", terms, "prompt")
    return terms.tokenizer.encode(text)


def _too_long(prompt: str, terms: Terms, param: str) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {terms.positions} tokens; the prompt has {prompt}",
        param=param,
        code="context_length_exceeded",
    )


def _check_ids(ids: list[int], terms: Terms) -> None:
    if not ids:
        raise ApiError(
            400,
            "prompt: empty, so there is nothing to continue; give some text, or the token that "
            f"begins a new document, [{terms.tokenizer.eos_id}]",
            param="prompt",
        )
    if min(ids) < 0 or max(ids) >= terms.tokenizer.vocab_size:
        wrong = next(one for one in ids if not 0 <= one < terms.tokenizer.vocab_size)
        raise ApiError(
            400,
            f"prompt: token id {str(wrong)[:20]} is not in the vocabulary, which goes from 0 to "
            f"{terms.tokenizer.vocab_size - 1}",
            param="prompt",
        )


def _sequences(
    body: Request,
    ids: list[int],
    asked_new: int | None,
    alternatives: int | None,
    seed: int,
    echo: str | None,
    terms: Terms,
) -> list[Wanted]:
    new = _new_tokens(len(ids), asked_new, terms)
    options = _options(body, max(1, new), alternatives, seed, terms.defaults)
    stop = terms.default_stop if body.stop is None else body.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    prompt = tuple(ids)
    return [Wanted(prompt, options, number, stops, new, echo) for number in range(body.n or 1)]


def _new_tokens(prompt: int, asked: int | None, terms: Terms) -> int:
    """As many as were asked for, exactly; a default is cut to the room there is."""
    room = terms.positions - prompt
    if room < (1 if asked is None else asked):
        more = "" if asked is None else f", and max_tokens asks for {asked} more"
        raise _too_long(f"{prompt}{more}", terms, "prompt" if room < 1 else "max_tokens")
    return min(terms.defaults.max_dec_len, room) if asked is None else asked


def _options(
    body: Request, new: int, alternatives: int | None, seed: int, defaults: Options
) -> Options:
    if body.min_tokens is not None and body.min_tokens > new:
        raise ApiError(
            400,
            f"min_tokens: {body.min_tokens} is more than the {new} that may be written",
            param="min_tokens",
        )
    fewest = defaults.min_dec_len if body.min_tokens is None else body.min_tokens
    temperature, strategy = body.temperature, defaults.decode_strategy
    if temperature is not None:
        # OpenAI's 0 is the limit, which is always the most probable token.
        strategy = "sampling" if temperature > 0 else "greedy_search"
    return replace(
        defaults,
        max_dec_len=new,
        min_dec_len=min(fewest, new),
        decode_strategy=strategy,
        temperature=temperature or defaults.temperature,
        top_k=_or(body.top_k, defaults.top_k),
        top_p=_or(body.top_p, defaults.top_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        num_return_sequences=1,
        seed=seed,
        alternatives=alternatives,
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _seed(body: Request) -> int:
    return secrets.randbelow(1 << 31) if body.seed is None else body.seed
