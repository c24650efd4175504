"""Requests: from a client's body to sequences for the worker, or a clear refusal.

Fields left out take their values from the run's `Generation` section, except the seed: without one,
each request draws its own, which is in the reply.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

from fourfold.generate import Options
from fourfold.serve.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Limits,
)
from fourfold.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

PROMPT_FORMS = (
    "prompt: a text, a list of texts, a list of token ids or a list of such lists is expected"
)
SPEAKERS = {"user": "User", "assistant": "Assistant"}
# The model would continue with the other side of the conversation.
CHAT_STOP = "\nUser:"


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to be written. `new_tokens` may be 0 where only the prompt is to be scored."""

    prompt: tuple[int, ...]
    options: Options
    number: int
    stop: tuple[str, ...]
    new_tokens: int
    echo: str | None = None  # the prompt's text, where it belongs to the reply


@dataclass(frozen=True)
class ServingContext:
    """What a request is checked against and completed from."""

    tokenizer: Tokenizer
    defaults: Options
    default_stop: tuple[str, ...]
    positions: int
    limits: Limits


def completion_sequences(body: CompletionRequest, context: ServingContext) -> list[SequenceRequest]:
    """The sequences in the order of their choices: all of the first prompt, then of the next."""
    prompts = _prompts(body.prompt)
    _check_count(len(prompts), body, context.limits)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens: 0 writes nothing; choose 1 or more, or echo", param="max_tokens"
        )
    seed = _seed(body)
    sequences = []
    for prompt in prompts:
        ids = _encoded(prompt, context) if isinstance(prompt, str) else prompt
        _check_ids(ids, context)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else context.tokenizer.decode(ids)
        sequences += _sequences(body, ids, body.max_tokens, body.logprobs, seed, echo, context)
    return sequences


def chat_sequences(body: ChatRequest, context: ServingContext) -> list[SequenceRequest]:
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
    _check_count(1, body, context.limits)
    ids = _encoded(conversation(body.messages), context)
    _check_ids(ids, context)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    sequences = _sequences(body, ids, new, alternatives, _seed(body), None, context)
    return [replace(one, stop=(*one.stop, CHAT_STOP)) for one in sequences]


def conversation(messages: list[ChatMessage]) -> str:
    """The one template: instructions as they are, then a line for each speaker.

    It ends where the assistant speaks, without a blank, since tokens begin with theirs.
    """
    lines = []
    for message in messages:
        speaker = SPEAKERS.get(message.role)
        lines.append(f"{message.text}\n" if speaker is None else f"{speaker}: {message.text}")
    return "\n".join([*lines, "Assistant:"])


# -- checks and defaults ------------------------------------------------------------------------


def _prompts(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list)
    if prompt and all(type(one) is int for one in prompt):
        return [prompt]
    wrong = [one for one in prompt if not (isinstance(one, str) or _is_ids(one))]
    if wrong or not prompt or len({type(one) for one in prompt}) > 1:
        raise ApiError(400, PROMPT_FORMS, param="prompt")
    return prompt


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _check_count(prompts: int, body: GenerationRequest, limits: Limits) -> None:
    sequences = prompts * (body.n or 1)
    if sequences > limits.sequences:
        raise ApiError(
            400,
            f"{sequences} texts in one request, and at most {limits.sequences} are written; send "
            "fewer prompts or a lower n",
            param="n" if prompts == 1 else "prompt",
        )


def _encoded(text: str, context: ServingContext) -> list[int]:
    longest = context.tokenizer.longest_token_bytes
    if longest is not None:
        # A megabyte takes its time to encode, and its length alone may say that it cannot fit.
        fewest = -(-len(text.encode(errors="replace")) // longest)
        if fewest > context.positions:
            raise _too_long(f"at least {fewest}", context, "prompt")
    return context.tokenizer.encode_prompt(text)


def _too_long(prompt: str, context: ServingContext, param: str) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {context.positions} tokens; the prompt has "
        f"{prompt}",
        param=param,
        code="context_length_exceeded",
    )


def _check_ids(ids: list[int], context: ServingContext) -> None:
    if not ids:
        raise ApiError(
            400,
            "prompt: empty, so there is nothing to continue; give some text, or the token that "
            f"begins a new document, [{context.tokenizer.eos_id}]",
            param="prompt",
        )
    if min(ids) < 0 or max(ids) >= context.tokenizer.vocab_size:
        wrong = next(one for one in ids if not 0 <= one < context.tokenizer.vocab_size)
        raise ApiError(
            400,
            f"prompt: token id {str(wrong)[:20]} is not in the vocabulary, which goes from 0 to "
            f"{context.tokenizer.vocab_size - 1}",
            param="prompt",
        )


def _sequences(
    body: GenerationRequest,
    ids: list[int],
    asked_new: int | None,
    alternatives: int | None,
    seed: int,
    echo: str | None,
    context: ServingContext,
) -> list[SequenceRequest]:
    new = _new_tokens(len(ids), asked_new, context)
    options = _options(body, max(1, new), alternatives, seed, context.defaults)
    stop = context.default_stop if body.stop is None else body.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    prompt = tuple(ids)
    return [
        SequenceRequest(prompt, options, number, stops, new, echo) for number in range(body.n or 1)
    ]


def _new_tokens(prompt: int, asked: int | None, context: ServingContext) -> int:
    """Exactly as many as requested; a default is reduced to what fits."""
    room = context.positions - prompt
    if room < (1 if asked is None else asked):
        more = "" if asked is None else f", and max_tokens asks for {asked} more"
        raise _too_long(f"{prompt}{more}", context, "prompt" if room < 1 else "max_tokens")
    return min(context.defaults.max_dec_len, room) if asked is None else asked


def _options(
    body: GenerationRequest, new: int, alternatives: int | None, seed: int, defaults: Options
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


def _seed(body: GenerationRequest) -> int:
    return secrets.randbelow(1 << 31) if body.seed is None else body.seed
