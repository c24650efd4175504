"""EleutherAI's `lm_eval` on a Fourfold checkpoint, from Python or with the harness's own command.

    from lm_eval import simple_evaluate
    from fourfold.evaluate.harness import harness_model

    model = harness_model(load_config("config.yaml"))
    simple_evaluate(model=model, tasks=["lambada_openai"])

    python -m fourfold.evaluate.harness --model fourfold --model_args config=config.yaml ...

`lm_eval` is not a dependency: it is imported where it is needed, for the base class its models must
have and for its command. The model's answers come from `Answers`, which knows nothing of `lm_eval`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fourfold.config import Config, load_config
from fourfold.errors import UserError, report
from fourfold.evaluate.scoring import Scorer, ScoreRequest
from fourfold.generate import Decoder, Options, SequenceModel, complete
from fourfold.generate.loading import load_trained
from fourfold.tokenizer import Tokenizer

# The harness's own default where a task does not say, and its names for it, the first first.
DEFAULT_NEW_TOKENS = 256
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Answers:
    """The three questions the harness asks, for plain strings."""

    def __init__(
        self,
        decoder: SequenceModel,
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int,
        scorer: Scorer | None = None,
    ) -> None:
        """A `scorer` is needed for a network that is no `Decoder`."""
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._begin = list(tokenizer.begin_ids) or [tokenizer.eos_id]
        self._batch_size = batch_size
        if scorer is None:
            assert isinstance(decoder, Decoder)
            scorer = Scorer(decoder, batch_size)
        self._scorer = scorer
        self._seed = seed

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one.

        A context too long for the model loses its beginning.
        """
        requests = [self._request(*pair) for pair in pairs]
        return [(one.total, bool(one.is_best.all())) for one in self._scorer.score(requests)]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each text from its first token on.

        The first token is scored after what begins a text, or an end of text. Windows lie side by
        side, each beginning with the last token of the one before it; the last reaches back as far
        as the model's positions do.
        """
        requests, owners = [], []
        positions = self._scorer.max_tokens - 1
        for owner, text in enumerate(texts):
            tokens = [*self._begin, *self._tokenizer.encode(text)]
            for start in range(0, len(tokens) - 1, positions):
                stop = min(start + positions, len(tokens) - 1)
                requests.append(
                    ScoreRequest(tokens[max(0, stop - positions) : stop + 1], stop - start)
                )
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, score in zip(owners, self._scorer.score(requests)):
            totals[owner] += score.total
        return totals

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Continuations without the stop strings that ended them, generated `batch_size` at a
        time."""
        groups: dict[tuple[Options, tuple[str, ...]], list[tuple[int, list[int]]]]
        groups = defaultdict(list)
        for place, (context, settings) in enumerate(requests):
            options, stop = self._options(dict(settings))
            ids = self._tokenizer.encode_prompt(context) or self._begin
            room = self._decoder.max_positions - options.max_dec_len
            groups[options, stop].append((place, ids[-room:]))
        texts = [""] * len(requests)
        for (options, stop), members in groups.items():
            # Prompts of similar length are read together, the longest first.
            members.sort(key=lambda member: -len(member[1]))
            written = complete(
                self._decoder,
                self._tokenizer,
                [ids for _, ids in members],
                options,
                stop=stop,
                max_slots=self._batch_size,
            )
            for (place, _), [result] in zip(members, written):
                texts[place] = result.text
        return texts

    def _request(self, context: str, continuation: str) -> ScoreRequest:
        # Blanks belong to the word after them, which is how the tokenizer learned it.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._tokenizer.encode_prompt(stripped)
        whole = self._tokenizer.encode_prompt(stripped + continuation)
        target = whole[len(before) :]
        tokens = [*(before or self._begin), *target]
        if len(target) >= self._scorer.max_tokens:
            raise UserError(
                f"a continuation of {len(target)} tokens does not fit into the model's "
                f"{self._scorer.max_tokens - 1} positions; leave the task out"
            )
        return ScoreRequest(tokens[-self._scorer.max_tokens :], len(target))

    def _options(self, settings: dict[str, Any]) -> tuple[Options, tuple[str, ...]]:
        """What the harness calls generation settings, and the strings that end a text."""
        until = settings.pop("until", None) or []
        stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        lengths = [settings.pop(name, None) for name in NEW_TOKENS]
        new_tokens = next((int(one) for one in lengths if one is not None), DEFAULT_NEW_TOKENS)
        temperature = float(settings.pop("temperature", 0.0))
        sampled = bool(settings.pop("do_sample", temperature > 0.0)) and temperature > 0.0
        top = {name: settings.pop(name) for name in ("top_k", "top_p") if name in settings}
        if settings:
            raise UserError(f"generation settings {sorted(settings)} are not known here")
        options = Options(
            max_dec_len=min(new_tokens, self._decoder.max_positions - 1),
            min_dec_len=0,
            decode_strategy="sampling" if sampled else "greedy_search",
            seed=self._seed,
            **(top | {"temperature": temperature} if sampled else {}),
        )
        return options, stop


def answers_of(config: Config) -> Answers:
    """For the checkpoint of a configuration, as its `Eval` section says."""
    trained = load_trained(config, lambda text: print(text, file=sys.stderr), config.Eval.ckpt_dir)
    decoder = Decoder(trained.model, config.Inference.weights)
    return Answers(decoder, trained.tokenizer, config.Eval.batch_size, config.Global.seed)


def harness_model(config: Config) -> Any:
    """An `lm_eval.api.model.LM` for the checkpoint of a configuration."""
    return model_class()(config)


def model_class() -> Any:
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError(
            "lm_eval is not installed; pip install lm_eval, best in an environment of its own"
        ) from None

    class FourfoldLM(LM):  # type: ignore[misc]
        """Requests in, answers in the same order out; `args` of a request are its strings."""

        def __init__(self, config: Config | Answers | str, **options: Any) -> None:
            """`options` are those of the harness's command: its own, and --model_args, of which
            those with a dot are configuration keys. Answers are those of a model that is loaded
            already."""
            super().__init__()
            if isinstance(config, str):
                config = load_config(config, _overrides(options))
            self._answers = config if isinstance(config, Answers) else answers_of(config)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return self._answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return self._answers.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return self._answers.generate_until([request.args for request in requests])

    return FourfoldLM


def _overrides(options: dict[str, Any]) -> list[str]:
    """The harness's --batch_size and --device, and keys by their own names, as `key=value`."""
    options = {name: value for name, value in options.items() if value is not None}
    batch_size, device = options.pop("batch_size", None), options.pop("device", None)
    unknown = sorted(name for name in options if "." not in name)
    if unknown:
        raise UserError(
            f"--model_args {', '.join(unknown)}: not known here; give config=FILE and "
            "configuration keys such as Eval.ckpt_dir=DIR"
        )
    if batch_size is not None and not str(batch_size).isdecimal():
        raise UserError(f"--batch_size {batch_size}: give a number of texts")
    overrides = [f"{name}={value}" for name, value in options.items()]
    if batch_size is not None:
        overrides.append(f"Eval.batch_size={batch_size}")
    if device is not None:
        overrides.append(f"Global.device={_device(str(device))}")
    return overrides


def _device(asked: str) -> str:
    # The harness's default; it too takes the CPU without a GPU.
    if asked in ("cuda", "cuda:0"):
        return "auto"
    if asked.startswith("cuda:"):
        raise UserError(f"--device {asked}: choose a GPU with CUDA_VISIBLE_DEVICES instead")
    return asked


def main() -> None:
    """The harness's own command, which then knows `--model fourfold`."""
    try:
        model = model_class()
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model

        register_model("fourfold")(model)
        cli_evaluate()
    except UserError as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
