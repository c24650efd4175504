"""Samples and tasks with the weights of a run that is training, on whatever layout it trains.

`RunnerModel` is the network for generation and `RunnerScorer` for scoring, both through
`Runner.logits`: a forward pass as evaluations make it, over whole texts and without a cache of keys
and values. So nothing is built or copied for them, and every layout, precision and compiled graph
that can train can write and be measured. Scoring is shared among the data ranks; a text is written
by all of them alike, each token as rank 0 chooses it.

Everything is read and checked when the run starts: files, prompts, tasks of `lm_eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.config import Config
from fourfold.config.engine_section import EvalTaskSection
from fourfold.engine.in_loop import Numbers
from fourfold.engine.run_data import RunData
from fourfold.errors import DataError, UserError
from fourfold.evaluate.harness import Answers, model_class
from fourfold.evaluate.measures import (
    TextToMeasure,
    check_window,
    cloze_requests,
    score_cloze,
    text_numbers,
)
from fourfold.evaluate.scoring import Score, Scorer, ScoreRequest, padded_batch
from fourfold.generate import Options, complete
from fourfold.generate.completion import check_stop
from fourfold.generate.loading import tokenizer_of_run
from fourfold.generate.session import check_prompt
from fourfold.metrics.sinks import TextSample
from fourfold.parallel import Runner

# Logits in memory at a time, of all positions of a batch; at least one text's.
MOST_LOGITS = 1 << 26

Measure = Callable[[Runner], dict[str, Any]]


class RunnerModel:
    """A model in training as generation asks for it; see `SequenceModel`."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.max_positions = runner.parts[0].shape.max_position_embeddings
        self.lengths: list[int] = []
        self._rows: list[list[int]] = []
        self._width = 0

    def reserve(self, rows: int, positions: int) -> None:
        # One width for all steps, so that a compiled graph is compiled once.
        self._rows, self.lengths, self._width = [], [], positions

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._rows += [list(prompt) for prompt in prompts]
        return self._logits(self._rows[-len(prompts) :])

    def advance(self, tokens: Sequence[int]) -> Tensor:
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        return self._logits(self._rows)

    def arrange(self, rows: Sequence[int]) -> None:
        self._rows = [list(self._rows[row]) for row in rows]
        self.lengths = [len(row) for row in self._rows]

    def wipe(self, rows: Sequence[int]) -> None:
        """Nothing is stored."""

    def broadcast_choices(self, choices: list[float]) -> list[float]:
        mesh = self.runner.mesh
        return mesh.all_reduce(*(choices if mesh.rank == 0 else [0.0] * len(choices)))

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, V), after the last token of each, on every rank."""
        runner, self.lengths = self.runner, [len(row) for row in self._rows]
        # Weights that are gathered now must be usable for training.
        with torch.inference_mode(False), torch.no_grad():
            tokens = torch.zeros(len(rows), self._width, dtype=torch.int64)
            for place, row in enumerate(rows):
                tokens[place, : len(row)] = torch.tensor(row)
            each = most_rows(runner, self._width)
            ends = torch.tensor([len(row) - 1 for row in rows], device=runner.device)
            found = []
            for part, end in zip(tokens.split(each), ends.split(each)):
                logits = runner.logits(part)
                if logits is not None:
                    found.append(logits[torch.arange(len(part), device=logits.device), end])
            if runner.pipeline is None:
                return torch.cat(found)
            size = (len(rows), runner.parts[0].shape.vocab_size)
            whole = torch.cat(found) if found else torch.empty(size, device=runner.device)
            pipeline = runner.pipeline
            dist.broadcast(whole, group=pipeline.group, group_src=pipeline.rank_of_stage[-1])
            return whole


def most_rows(runner: Runner, length: int) -> int:
    """Texts of that length whose logits are made at a time."""
    return max(1, MOST_LOGITS // (length * runner.parts[0].shape.vocab_size))


class RunnerScorer(Scorer):
    """Scores requests with a model in training; a collective, with the same scores on all ranks."""

    def __init__(self, runner: Runner, batch_size: int) -> None:
        self._runner = runner
        positions = runner.parts[0].shape.max_position_embeddings
        self._batch_size = min(batch_size, most_rows(runner, positions))
        self._on_batch = None
        self._alternatives = 0
        self._vocab_size = None
        self.max_tokens = positions + 1

    def _score_batches(self, batches: list[list[ScoreRequest]]) -> Iterator[list[Score]]:
        """Dealt out to the data ranks in turn; where they do not divide, some repeat one."""
        mesh, degree = self._runner.mesh, self._runner.mesh.layout.data_degree
        rows = [sum(request.scored for request in batch) for batch in batches]
        table = torch.zeros(sum(rows), 2, dtype=torch.float64)
        places = table.split(rows)
        for first in range(0, len(batches), degree):
            own = min(first + mesh.data_rank, len(batches) - 1)
            found = self._compare_batch(batches[own])
            if found is not None and own == first + mesh.data_rank:
                places[own].copy_(found)
        mesh.all_reduce_(table)
        for batch, place in zip(batches, places):
            parts = place.split([request.scored for request in batch])
            empty = torch.empty(0, 0)
            yield [Score(part[:, 0], part[:, 1] > 0, empty, empty) for part in parts]

    def _compare_batch(self, batch: list[ScoreRequest]) -> Tensor | None:
        """Log-probability and whether it is the best, of every scored token; None on ranks that do
        not answer for this data rank."""
        padded, scored = padded_batch(batch, self.max_tokens)
        logits = self._runner.logits(padded[:, :-1])
        if logits is None or self._runner.mesh.coordinates["mp"] > 0:
            return None
        chosen_ids = padded[:, 1:][scored].to(logits.device).unsqueeze(1)
        logits = logits[scored.to(logits.device)]  # (M, V)
        chosen = logits.gather(1, chosen_ids).squeeze(1)
        is_best = chosen >= logits.amax(dim=-1)
        return torch.stack([(chosen - logits.logsumexp(dim=-1)).double(), is_best.double()], 1)


class WeightsInLoop:
    """What `Engine.samples` and `Engine.eval_tasks` name, ready to be asked between steps."""

    def __init__(self, config: Config, data: RunData) -> None:
        self.notices: list[str] = []
        self._config = config
        self._positions = config.Model.max_position_embeddings
        tokenizer = data.tokenizer() or tokenizer_of_run(config, self.notices.append)
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._prompts: list[str | list[int]] = []
        if config.Engine.samples.wanted:
            self._options = self._sampling()
            self._prompts = [*config.Engine.samples.prompts, *self._beginnings(data)]
            for prompt in self._prompts:
                ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
                check_prompt(ids, self._options, self._positions, tokenizer.vocab_size)
        tasks = config.Engine.eval_tasks
        self._tasks = [(task, self._prepared(task)) for task in tasks]

    # -- samples ------------------------------------------------------------------------------

    def samples(self, runner: Runner) -> list[TextSample]:
        written = complete(
            RunnerModel(runner),
            self._tokenizer,
            self._prompts,
            self._options,
            stop=self._config.Generation.stop,
        )
        return [
            TextSample(self._text(prompt), one.text)
            for prompt, (one,) in zip(self._prompts, written)
        ]

    def _sampling(self) -> Options:
        """Those of the Generation section, one text for each prompt."""
        config, length = self._config, self._config.Engine.samples.length
        given = Options.of(config.Generation, config.Global.seed)
        check_stop(config.Generation.stop)
        least = min(given.min_dec_len, length)
        return replace(given, max_dec_len=length, min_dec_len=least, num_return_sequences=1)

    def _beginnings(self, data: RunData) -> list[list[int]]:
        section = self._config.Engine.samples
        samples: Sequence[Any] | Any = data.samples.get("valid", ())
        if section.number > len(samples):
            raise DataError(
                f"Engine.samples.number={section.number}, and the validation data has "
                f"{len(samples)} samples; choose fewer, or give Engine.samples.prompts"
            )
        firsts = (samples[place][: section.prompt_tokens] for place in range(section.number))
        return [[int(token) for token in first] for first in firsts]

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    # -- tasks --------------------------------------------------------------------------------

    def tasks(self, runner: Runner) -> Iterator[tuple[str, str, Numbers]]:
        for task, measure in self._tasks:
            yield task.name, task.kind, measure(runner)

    def _prepared(self, task: EvalTaskSection) -> Measure:
        """The task with its data read; what is wrong with it is said now."""
        where = f"Engine.eval_tasks, {task.name}: "
        try:
            if task.kind == "lm_eval":
                return self._harness_task(task)
            check_window(self._config.Eval, self._positions)
            assert task.path is not None
            if not Path(task.path).is_file():
                raise DataError(f"{task.path}: there is no such file")
            return self._text_task(task.kind, Path(task.path))
        except UserError as error:
            raise type(error)(where + str(error)) from error

    def _text_task(self, kind: str, file: Path) -> Measure:
        section, tokenizer = self._config.Eval, self._tokenizer
        if kind == "cloze":
            requests = [*cloze_requests(tokenizer, file, section.max_seq_len)]
            if not requests:
                raise DataError(f"{file}: holds no text; give each example a line of JSON")
            return lambda runner: score_cloze(
                RunnerScorer(runner, section.batch_size), requests
            ).numbers()
        text = TextToMeasure.read(file, tokenizer, detokenize=section.detokenize)
        if len(text.tokens) < 2:
            raise DataError(f"{file}: holds no two tokens, so nothing can be predicted")
        return lambda runner: text_numbers(
            section, tokenizer, RunnerScorer(runner, section.batch_size), text
        )

    def _harness_task(self, task: EvalTaskSection) -> Measure:
        """A task of `lm_eval`, with its data; every rank asks its questions."""
        model, name = model_class(), task.task or task.name
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager, get_task_dict

        if task.path is not None and not Path(task.path).is_dir():
            raise DataError(f"{task.path}: there is no such directory")
        manager = TaskManager(include_path=task.path)
        if name not in manager.all_tasks:
            raise UserError(
                f"lm_eval knows no task {name}; give the directory of its YAML as path, or one of "
                "those that `lm_eval --tasks list` shows as task"
            )
        try:
            found = get_task_dict([name], manager)
        except Exception as error:
            raise DataError(f"lm_eval cannot open {name} ({error}); is its data here?") from error

        def measure(runner: Runner) -> dict[str, Any]:
            size = self._config.Eval.batch_size
            scorer = RunnerScorer(runner, size)
            network = RunnerModel(runner)
            answers = Answers(network, self._tokenizer, size, self._config.Global.seed, scorer)
            told = evaluator.evaluate(
                lm=model(answers), task_dict=found, limit=task.limit, bootstrap_iters=0
            )
            return harness_numbers(told["results"].get(name, {}))

        return measure


def harness_numbers(results: dict[str, Any]) -> Numbers:
    """The numbers of a task by their metric; those of a filter other than none have its name."""
    found = {}
    for key, value in results.items():
        metric, _, kind = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind and is_number and not metric.endswith("_stderr"):
            found[metric if kind == "none" else f"{metric}_{kind}"] = float(value)
    return found
