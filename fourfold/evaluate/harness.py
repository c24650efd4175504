"""EleutherAI's `lm_eval` on a Fourfold checkpoint.

    from lm_eval import simple_evaluate
    from fourfold.evaluate.harness import harness_model

    model = harness_model(load_config("config.yaml"))
    simple_evaluate(model=model, tasks=["lambada_openai"])

`lm_eval` is not a dependency: it is imported by `harness_model`, which needs it for the base class
its models must have. What the model answers is in `Answers`, which knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.evaluate.scoring import Question, Scorer
from fourfold.generate import Decoder, Options, complete
from fourfold.generate.loading import load_trained
from fourfold.tokenizer import Tokenizer

# The harness's own default where a task does not say.
DEFAULT_NEW_TOKENS = 256


class Answers:
    """The three questions the harness asks, for plain strings."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, batch_size: int, seed: int) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._scorer = Scorer(decoder, batch_size)
        self._seed = seed

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one.

        A context too long for the model loses its beginning.
        """
        questions = [self._question(*pair) for pair in pairs]
        return [(one.total, bool(one.is_best.all())) for one in self._scorer.answer(questions)]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each text from its first token on, by windows side by side.

        The first token is judged after an end of text, that of a later window after the one
        before it.
        """
        questions, owners = [], []
        width = self._scorer.max_tokens
        for owner, text in enumerate(texts):
            tokens = [self._tokenizer.eos_id, *self._tokenizer.encode(text)]
            for start in range(0, len(tokens) - 1, width - 1):
                window = tokens[start : start + width]
                questions.append(Question(window, len(window) - 1))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, answer in zip(owners, self._scorer.answer(questions)):
            totals[owner] += answer.total
        return totals

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Continuations without the stop strings that ended them."""
        return [self._generate(context, dict(settings)) for context, settings in requests]

    def _question(self, context: str, continuation: str) -> Question:
        # Blanks belong to the word after them, which is how the tokenizer learned it.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._tokenizer.encode(stripped)
        whole = self._tokenizer.encode(stripped + continuation)
        target = whole[len(before) :]
        tokens = [*(before or [self._tokenizer.eos_id]), *target]
        if len(target) >= self._scorer.max_tokens:
            raise UserError(
                f"a continuation of {len(target)} tokens does not fit into the model's "
                f"{self._scorer.max_tokens - 1} positions; leave the task out"
            )
        return Question(tokens[-self._scorer.max_tokens :], len(target))

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.pop("until", None) or []
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        new_tokens = int(settings.pop("max_gen_toks", DEFAULT_NEW_TOKENS))
        temperature = float(settings.pop("temperature", 0.0))
        sampled = bool(settings.pop("do_sample", temperature > 0.0)) and temperature > 0.0
        top = {name: settings.pop(name) for name in ("top_k", "top_p") if name in settings}
        if settings:
            raise UserError(f"generation settings {sorted(settings)} are not known here")
        positions = self._decoder.max_positions
        new_tokens = min(new_tokens, positions - 1)
        options = Options(
            max_dec_len=new_tokens,
            min_dec_len=0,
            decode_strategy="sampling" if sampled else "greedy_search",
            seed=self._seed,
            **(top | {"temperature": temperature} if sampled else {}),
        )
        ids = self._tokenizer.encode(context) or [self._tokenizer.eos_id]
        ids = ids[-(positions - new_tokens) :]
        [[result]] = complete(self._decoder, self._tokenizer, [ids], options, stop=stop)
        return result.text


def harness_model(config: Config) -> Any:
    """An `lm_eval.api.model.LM` for the checkpoint of a configuration."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError(
            "lm_eval is not installed; pip install lm_eval, best in an environment of its own"
        ) from None
    trained = load_trained(config, print, config.Eval.ckpt_dir)
    decoder = Decoder(trained.model, config.Inference.weights)
    answers = Answers(decoder, trained.tokenizer, config.Eval.batch_size, config.Global.seed)

    class FourfoldLM(LM):  # type: ignore[misc]
        """Requests in, answers in the same order out; `args` of a request are its strings."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return answers.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return answers.generate_until([request.args for request in requests])

    return FourfoldLM()
