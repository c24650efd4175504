"""The worker: the one thread that owns the model and batches all requests (continuous batching).

    job = worker.submit(sequences, who)   from the event loop; refused when the queue is full
    async for piece in job: ...           pieces of all its choices, as they are written
    job.cancel()                          any time; its slots are free at the next step

Between two steps of the session the thread takes in new jobs and drops cancelled and late ones.
Clients take turns at the free slots, however much each has requested. A sequence depends on nothing
but its own request (see fourfold/generate/session.py).

A step that fails ends the jobs in it, and the thread continues with a new session. If that fails
too, the model is lost: every job gets an error, `failed` is True, and `on_failure` is called once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from fourfold.errors import UserError
from fourfold.evaluate.scoring import Scorer, ScoreRequest
from fourfold.generate import Decoder, Session, Token
from fourfold.generate.module import GenerationModule
from fourfold.serve.metrics import Metrics
from fourfold.serve.protocol import ApiError, Limits
from fourfold.serve.replies import Detokenizer, TextPiece, echo_piece
from fourfold.serve.requests import SequenceRequest

# Tokens of prompts that one step reads: with more the first ones would wait for the prompts of
# others, with fewer the weights are read more often for the same prompts.
PROMPT_TOKENS = 64
# Whoever has just read the end of a text often sends the next prompt at once. A step that begins
# without it would make it wait for the whole step, so the step waits this long for it.
NEXT_PROMPT_SECONDS = 0.01
SHUTTING_DOWN = "the server is shutting down"
MODEL_FAILED = "the model failed; see the log"
log = logging.getLogger("fourfold.serve")


class CompletionJob:
    """One request on its way: the event loop's side of it."""

    def __init__(
        self,
        requests: Sequence[SequenceRequest],
        client: str,
        seconds: float,
        cancel: Callable[[CompletionJob], None],
    ) -> None:
        self.requests = list(requests)
        self.client = client
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.new_tokens = 0
        self.admitted = False
        self.over = False  # no more pieces are wanted; set by either side
        self.open = len(self.requests)  # choices without an end
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[TextPiece | ApiError] = asyncio.Queue()
        self._cancel = cancel

    def put(self, piece: TextPiece | ApiError) -> None:
        """From the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:
            self.over = True  # the loop is closed, and with it the client's connection

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        unfinished = len(self.requests)
        while unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            unfinished -= piece.finish is not None
            yield piece

    def cancel(self) -> None:
        """Harmless for a job that is done."""
        self._cancel(self)


class FairQueue:
    """Texts that wait, of each client in the order it sent them, and of all clients in turn."""

    def __init__(self) -> None:
        self._lines: dict[
            str, deque[tuple[CompletionJob, Detokenizer]]
        ] = {}  # the first is the next

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, job: CompletionJob, writer: Detokenizer) -> None:
        self._lines.setdefault(job.client, deque()).append((job, writer))

    def take(self) -> tuple[CompletionJob, Detokenizer]:
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        pair = line.popleft()
        if line:
            self._lines[client] = line
        return pair

    def remove(self, job: CompletionJob) -> None:
        line = deque(pair for pair in self._lines.get(job.client, ()) if pair[0] is not job)
        if line:
            self._lines[job.client] = line
        else:
            self._lines.pop(job.client, None)


class Worker:
    def __init__(
        self, module: GenerationModule, slots: int, limits: Limits, metrics: Metrics
    ) -> None:
        self.failed = False
        self.on_failure: Callable[[], None] = lambda: None  # called from the thread
        self._module = module
        self._limits = limits
        self._metrics = metrics
        self.slots = slots
        self._session = self._new_session()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._writers: dict[int, tuple[CompletionJob, Detokenizer]] = {}  # by the session's names
        self._to_score, self._to_write = FairQueue(), FairQueue()
        self._has_ended = False  # a text, in the last step
        self._lock = threading.Lock()  # guards the next two
        self._jobs: set[CompletionJob] = set()  # submitted and not over
        self._sequences: Counter[str] = Counter()  # of all jobs, by client
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="fourfold-worker", daemon=True)

    def _new_session(self) -> Session:
        return self._module.session(self.slots, prompt_tokens_at_once=PROMPT_TOKENS)

    # -- the event loop's side --------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def running(self) -> int:
        return self._session.running

    @property
    def waiting(self) -> int:
        return max(0, self._sequences.total() - self._session.running)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ends after the current step; unfinished jobs get an error."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, requests: Sequence[SequenceRequest], client: str) -> CompletionJob:
        with self._lock:
            if self._stopping:
                raise self._ended()
            self._check_room(len(requests), client)
            self._sequences[client] += len(requests)
            job = CompletionJob(requests, client, self._limits.request_seconds, self._ask_to_cancel)
            self._jobs.add(job)
        self._inbox.put(lambda: self._admit(job))
        return job

    def _check_room(self, sequences: int, client: str) -> None:
        room, all_texts = self.slots + self._limits.waiting, self._sequences.total()
        kept = self._limits.kept_for_newcomers if self._sequences[client] else 0
        if all_texts + sequences <= room - kept:
            return
        if all_texts + sequences <= room:
            message = (
                f"{self._sequences[client]} texts of this client are being written or wait, and "
                f"the last {kept} of {room} places are kept for others; try again"
            )
        else:
            message = f"the server is busy with {all_texts} texts of at most {room}; try again"
        raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})

    def _ended(self) -> ApiError:
        return ApiError(500, MODEL_FAILED) if self.failed else ApiError(503, SHUTTING_DOWN)

    def _ask_to_cancel(self, job: CompletionJob) -> None:
        if not job.over:
            self._inbox.put(lambda: self._drop(job))

    # -- the thread's side ------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException:
            log.critical("the model failed and could not be started again", exc_info=True)
            self.failed = True
        finally:
            self._close()
        if self.failed:
            self.on_failure()

    def _turn(self) -> None:
        idle = not (self._writers or self._to_score or self._to_write)
        try:
            self._take_in(wait=idle)
            if self._has_ended:
                self._await_prompt()
            self._step()
        except Exception as error:  # the thread must outlive any one request
            self._recover(error)
        self._drop_late()

    def _close(self) -> None:
        """No job is left without an answer, nor can one come any more."""
        with self._lock:
            self._stopping = True
            jobs = list(self._jobs)
            self._jobs.clear()
            self._sequences.clear()
        for job in jobs:
            # Only the event loop's side is left; the session may be in any state.
            job.over = True
            job.put(self._ended())
            self._metrics.cancelled(job.open)

    def _take_in(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _await_prompt(self) -> None:
        deadline = time.monotonic() + NEXT_PROMPT_SECONDS
        with suppress(Empty):
            while self._writers and not (self._to_score or self._to_write):
                self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))()

    def _step(self) -> None:
        if self._to_score:
            # One at a time: it takes as long as a step or more, and others are waiting.
            self._score_prompt(*self._to_score.take())
        while self._to_write and len(self._writers) < self.slots:
            job, writer = self._to_write.take()
            request = writer.request
            name = self._session.add(request.prompt, request.options, request.number)
            self._writers[name] = job, writer
        if not self._writers:
            return
        tokens = self._session.step()
        self._has_ended = False
        self._metrics.step(len(tokens))
        for token in tokens:
            if token.sequence not in self._writers:
                continue  # ended by an earlier token of the same step
            job, writer = self._writers[token.sequence]
            self._count_token(job)
            piece = writer.take(token)
            if piece.finish is not None:
                del self._writers[token.sequence]
                self._has_ended = True
                if token.finish is None:
                    self._session.cancel(token.sequence)
            if piece.text or piece.tokens or piece.finish is not None:
                self._give(job, piece)

    def _admit(self, job: CompletionJob) -> None:
        if job.over:
            return
        job.admitted = True
        for choice, request in enumerate(job.requests):
            writer = Detokenizer(choice, request, self._module.tokenizer)
            self._metrics.prompt(len(request.prompt))
            if request.echo is not None and request.options.alternatives is not None:
                self._to_score.put(job, writer)
                continue
            if request.echo is not None:
                self._give(job, echo_piece(choice, request, self._module.tokenizer))
            self._add(job, writer)

    def _score_prompt(self, job: CompletionJob, writer: Detokenizer) -> None:
        request, tokenizer = writer.request, self._module.tokenizer
        alternatives = request.options.alternatives
        assert alternatives is not None
        tokens = prompt_logprobs(
            self._module.decoder, request.prompt, alternatives, tokenizer.vocab_size
        )
        self._give(job, echo_piece(writer.choice, request, tokenizer, tokens))
        self._add(job, writer)

    def _add(self, job: CompletionJob, writer: Detokenizer) -> None:
        if writer.request.new_tokens == 0:
            self._give(job, TextPiece(writer.choice, finish="length"))
        else:
            self._to_write.put(job, writer)

    def _give(self, job: CompletionJob, piece: TextPiece) -> None:
        job.put(piece)
        if piece.finish is not None:
            job.open -= 1
            self._leave(job, 1)
            job.over = job.open == 0

    def _count_token(self, job: CompletionJob) -> None:
        if job.new_tokens == 0:
            self._metrics.first_token(time.monotonic() - job.began)
        job.new_tokens += 1

    # -- ends that are not the text's own ---------------------------------------------------

    def _drop_late(self) -> None:
        now = time.monotonic()
        for job in self._unfinished():
            if job.over:
                self._drop(job)
            elif now > job.deadline:
                seconds = self._limits.request_seconds
                late = ApiError(
                    504, f"not done within {seconds:g} seconds, which is the limit", code="timeout"
                )
                self._fail(job, late)

    def _fail(self, job: CompletionJob, error: ApiError) -> None:
        job.put(error)
        self._drop(job)

    def _drop(self, job: CompletionJob) -> None:
        """Nothing more for this job. Its open choices are counted once, however it ends."""
        for name in [name for name, (one, _) in self._writers.items() if one is job]:
            del self._writers[name]
            self._session.cancel(name)
        self._to_score.remove(job)
        self._to_write.remove(job)
        job.over = True
        self._metrics.cancelled(job.open)
        left, job.open = job.open, 0
        self._leave(job, left)

    def _leave(self, job: CompletionJob, sequences: int) -> None:
        with self._lock:
            self._sequences[job.client] -= sequences
            if not self._sequences[job.client]:
                del self._sequences[job.client]
            if job.open == 0:
                self._jobs.discard(job)

    def _unfinished(self) -> list[CompletionJob]:
        with self._lock:
            return list(self._jobs)

    def _recover(self, error: Exception) -> None:
        """After a failed step nothing is known about the cache, so everything starts afresh."""
        known = isinstance(error, UserError)
        if not known:
            log.exception("a step failed")
        message = str(error) if known else "the step failed; the server's log says why"
        self._writers, self._to_score, self._to_write = {}, FairQueue(), FairQueue()
        self._session = self._new_session()
        # A device that failed for good fails here, before another client waits for it.
        self._session.network.read([[self._module.tokenizer.eos_id]])
        self._session.network.arrange([])
        for job in self._unfinished():
            if job.admitted:
                self._fail(job, ApiError(500, message))


# -- prompts --------------------------------------------------------------------------------------


def prompt_logprobs(
    decoder: Decoder, prompt: Sequence[int], alternatives: int, vocab_size: int
) -> list[Token]:
    """The prompt's tokens, each with its log-probability after all before it.

    The first follows nothing and has none.
    """
    tokens = [Token(sequence=0, id=prompt[0])]
    if len(prompt) == 1:
        return tokens
    scorer = Scorer(decoder, batch_size=1, alternatives=alternatives, vocab_size=vocab_size)
    [score] = scorer.score([ScoreRequest(prompt, len(prompt) - 1)])
    columns = (score.logprobs, score.top_ids, score.top_logprobs)
    for token_id, logprob, *top in zip(prompt[1:], *(column.tolist() for column in columns)):
        tokens.append(Token(0, token_id, None, logprob, tuple(zip(*top))))
    return tokens
