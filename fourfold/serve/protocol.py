"""Bounds, errors and request bodies of the OpenAI protocol.

Every field of a body is supported, refused, or named here as harmless. A field that is not in these
classes is refused by its name. A field that is here but not supported takes only its neutral value,
which many clients send by default. Types are taken literally: "16" and 16.0 are no integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError


@dataclass(frozen=True)
class Limits:
    """Every bound of the server: beyond it a request is refused, with its number in the message."""

    head_bytes: int = 64 << 10  # request line and headers
    body_bytes: int = 1 << 20
    sequences: int = 64  # prompts times n of one request
    waiting: int = 128  # sequences without a slot, of all requests
    connections: int = 256
    spare_connections: int = 32  # beyond, while all others are busy; only /health is answered
    request_seconds: float = 300.0  # from its first byte to the last of the reply
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    shutdown_seconds: float = 10.0

    # Failed logins from one address: how many at a time, and how long each one counts.
    guesses: int = 8
    guess_seconds: float = 1.0

    # Of single fields; OpenAI's own are lower or the same.
    n: int = 16
    alternatives: int = 20
    stops: int = 16
    stop_characters: int = 256
    messages: int = 1024

    @property
    def kept_for_newcomers(self) -> int:
        """Places in the queue reserved for clients that have nothing in it yet."""
        return self.waiting // 4


# -- bodies -------------------------------------------------------------------------------------

LIMITS = Limits()
# Logits divided by less may be more than a float32 holds.
SMALLEST_TEMPERATURE = 0.001


class ApiError(Exception):
    """A reply in the shape OpenAI's clients expect of an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}


def _only(*neutral: Any) -> AfterValidator:
    """For what is not supported: only values that request nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise ValueError("is not supported by this server; leave it out")
        return value

    return AfterValidator(check)


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: Annotated[bool | None, _only(False)] = None


def _not_nearly_0(temperature: float) -> float:
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise ValueError(f"choose 0 (the most probable token), or {SMALLEST_TEMPERATURE} and more")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_not_nearly_0)]
Stop = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_characters)]


class GenerationRequest(RequestBody):
    """What both kinds of completion share. A field left out is what the run's file says."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=LIMITS.n)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=LIMITS.stops)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Not of OpenAI, and usual among servers of its kind.
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None

    # Harmless: they change nothing here and promise nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    presence_penalty: Annotated[float | None, _only(0.0)] = None
    frequency_penalty: Annotated[float | None, _only(0.0)] = None
    logit_bias: Annotated[dict[str, Any] | None, _only({})] = None


class CompletionRequest(GenerationRequest):
    # Looked into by requests.py: one clear sentence for all its wrong forms.
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.alternatives)] | None = None
    suffix: Annotated[str | None, _only()] = None
    best_of: Annotated[int | None, _only(1)] = None


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=LIMITS.messages)]
    name: Annotated[str | None, _only()] = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=LIMITS.messages)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.alternatives)] | None = None
    tools: Annotated[list[Any] | None, _only([])] = None
    tool_choice: Annotated[str | None, _only("none", "auto")] = None
    response_format: Annotated[dict[str, Any] | None, _only({"type": "text"})] = None
    store: Annotated[bool | None, _only(False)] = None


_FIELDS = {
    field
    for kind in (CompletionRequest, ChatRequest, ChatMessage, TextPart, StreamOptions)
    for field in kind.model_fields
}
Kind = TypeVar("Kind", bound=RequestBody)


def parse(kind: type[Kind], data: bytes) -> Kind:
    """The body as `kind`, or the first thing that is wrong with it."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part)[:64] for part in found["loc"]]
    # Alternatives of a type have places too, such as "list[TextPart]"; clients know only fields.
    name = ".".join(part for part in place if part.isdecimal() or part in _FIELDS)
    if found["type"] == "json_invalid":
        raise ApiError(400, f"the body is not JSON: {found['msg']}")
    if found["type"] == "extra_forbidden":
        raise ApiError(
            400,
            f"unknown field {'.'.join(place)!r}; a field that would be ignored is refused",
            param=".".join(place),
            code="unknown_field",
        )
    reason = found["msg"].removeprefix("Value error, ")
    raise ApiError(400, f"{name or 'the body'}: {reason}", param=name or None)
