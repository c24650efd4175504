"""Megatron's log lines: from the configuration and the measured time, the published ones."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.tiny_run import TINY

from fourfold.config import Config, load_config
from fourfold.cost.flops import flops_per_token, megatron_deepspeed_flops_per_token
from fourfold.engine import build_engine
from fourfold.engine.benchmark import measurement
from fourfold.engine.monitoring import line_style
from fourfold.metrics import Console, Meter, Peak, Sinks, Step, StepOutcome
from fourfold.metrics.lines import LineStyle, MegatronLines
from fourfold.model import ModelShape
from fourfold.optim import build_schedule

# The log published with the 175B benchmark: iterations 5 to 10 of its measurement, and iteration
# 2400 of its training with the evaluation after it.
PUBLISHED = (Path(__file__).parent / "log_megatron_175b.txt").read_text().splitlines()
WORLD = 64

GPT3_175B = {
    "Engine": {"train_samples": 10846761, "logging_freq": 10, "log_style": "megatron"},
    "Data": {
        "batch_size": {
            "global_batch_size": 1536,
            "micro_batch_size": 1,
            "rampup": [16, 16, 433870],
        },
        "dataset": {"max_seq_len": 2048},
    },
    "Model": {
        "vocab_size": 51200,
        "hidden_size": 12288,
        "num_layers": 96,
        "num_attention_heads": 96,
        "max_position_embeddings": 2048,
        "use_recompute": False,
    },
    "Distributed": {"mp_degree": 8, "pp_degree": 8},
    "Optimizer": {
        "lr": {"max_lr": 6e-5, "min_lr": 6e-6, "decay_samples": 9400526, "warmup_samples": 13558}
    },
}
# As the second script of the benchmark changes the first.
MEASURED = [
    "Engine.train_samples=null",
    "Engine.max_steps=10",
    "Engine.logging_freq=1",
    "Data.batch_size.rampup=null",
    "Optimizer.lr.decay_samples=12288",
    "Optimizer.lr.warmup_samples=12.288",
]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    file = tmp_path / "gpt3_175b.yaml"
    file.write_text(yaml.safe_dump(GPT3_175B))
    return lambda *overrides: load_config(file, overrides, WORLD)


def step_record(config: Config, step: int, seconds: float, loss: float, scale: float) -> Step:
    """The record a run makes at `step` when each step of the window takes `seconds`."""
    window = config.Engine.logging_freq
    times = iter([0.0, window * seconds])
    meter = Meter(
        batch_schedule=config.batch_schedule,
        seq_len=config.Data.dataset.max_seq_len,
        world_size=WORLD,
        logging_freq=window,
        clock=lambda: next(times),
    )
    schedule = build_schedule(config)
    record = None
    for done in range(step - window + 1, step + 1):
        outcome = StepOutcome(
            step=done,
            epoch=0,
            batch=done - 1,
            loss=loss,
            learning_rate=schedule.lr_at(done + 1),
            grad_norm=0.0001,
            loss_scale=scale,
        )
        record = meter.end_step(outcome)
    assert record is not None
    return record


def printed(style: LineStyle, speak: Callable[[Sinks], None]) -> list[str]:
    stream = io.StringIO()
    with Sinks(Console(stream, style=style)) as sinks:
        speak(sinks)
    return stream.getvalue().splitlines()


def numbers(line: str) -> dict[str, float]:
    pairs = re.findall(r"([a-z (]+[)]?): +([\d.E+-]+) \|", line)
    return {name.strip(): float(value) for name, value in pairs}


def test_the_training_line_at_iteration_2400(configure: Callable[..., Config]) -> None:
    config = configure()
    assert config.Engine.max_steps == 8247
    assert config.batch_schedule.consumed(2400) == 1864624
    record = step_record(config, 2400, 315.8799, 9.002386, 2.0**34)
    (line,) = printed(line_style(config, WORLD), lambda sinks: sinks.train(record))
    assert line == PUBLISHED[6]


@pytest.mark.parametrize("line", PUBLISHED[:6], ids=lambda line: line[:26].strip())
def test_the_lines_of_the_measurement(line: str, configure: Callable[..., Config]) -> None:
    found = re.match(r" iteration +(\d+)/", line)
    assert found
    config, shown = configure(*MEASURED), numbers(line)
    seconds = shown["elapsed time per iteration (ms)"] / 1000
    record = step_record(config, int(found[1]), seconds, shown["lm loss"], 2.0**32)
    assert printed(line_style(config, WORLD), lambda sinks: sinks.train(record)) == [line]


def test_the_evaluation_block() -> None:
    # The published perplexity is of a loss with more digits than are printed.
    loss = math.log(8181.144)
    lines = printed(style(), lambda sinks: evaluate(sinks, "eval", 2400, loss))
    assert lines == PUBLISHED[7:]


def test_the_last_test_names_no_iteration() -> None:
    _, text, _ = printed(style(), lambda sinks: evaluate(sinks, "test", 8, 30.0))
    assert text == (
        " validation loss at the end of training for test data | lm loss value: 3.000000E+01 | "
        f"lm loss PPL: {math.exp(20):.6E} | "
    )


def style(**changes: Any) -> MegatronLines:
    fields = {"max_steps": 100, "seq_len": 16, "world_size": 2, "flops_per_sample": 1e12}
    return MegatronLines(**(fields | changes))


def evaluate(sinks: Sinks, name: Any, step: int, loss: float) -> None:
    sinks.evaluation(name, step=step, epoch=0, batch=1, loss=loss, seconds=1.0, batches=2)


def test_what_there_is_none_of_is_left_out(make_step: Callable[..., Step]) -> None:
    record = make_step(7, loss_scale=None, grad_norm=None, batch_seconds=0.0)
    (line,) = printed(style(), lambda sinks: sinks.train(record))
    assert "loss scale" not in line and "grad norm" not in line
    assert line.endswith(" | tokens per gpu per second (tgs): 0.000 | TFLOPs: 0.00 |")


def test_a_loss_that_is_no_number_is_printed(make_step: Callable[..., Step]) -> None:
    (line,) = printed(style(), lambda sinks: sinks.train(make_step(7, loss=math.nan)))
    assert " lm loss: NAN |" in line
    _, text, _ = printed(style(), lambda sinks: evaluate(sinks, "eval", 7, math.nan))
    assert "lm loss value: NAN | lm loss PPL: NAN" in text


def test_a_line_tells_of_the_steps_since_the_last(make_step: Callable[..., Step]) -> None:
    """The mean of the losses of updates made; skipped and NaN ones counted from line to line."""
    megatron = style()

    def step(sinks: Sinks, number: int, loss: float, skipped: bool = False) -> None:
        if skipped:
            sinks.event("skipped_update", step=number, loss=loss, grad_norm=1.0)
        megatron.take_loss(loss)

    def speak(sinks: Sinks) -> None:
        step(sinks, 1, 4.0)
        step(sinks, 2, math.nan, skipped=True)
        step(sinks, 3, 50.0, skipped=True)  # its gradient overflowed
        step(sinks, 4, 2.0)
        sinks.train(make_step(4, loss=2.0, skipped=2))
        step(sinks, 5, 1.0)
        sinks.train(make_step(5, loss=1.0, skipped=2))
        step(sinks, 6, math.inf, skipped=True)
        sinks.train(make_step(6, loss=math.inf, skipped=3))

    events, lines = partition(printed(megatron, speak))
    assert len(events) == 3 and all("[skipped_update] step: " in text for text in events)
    form = re.compile(r"lm loss: (\S+) .*skipped iterations: +(\d) .*nan iterations: +(\d)")
    assert [found.groups() for found in map(form.search, lines) if found] == [
        ("3.000000E+00", "2", "1"),
        ("1.000000E+00", "0", "0"),
        ("INF", "1", "1"),
    ]


def partition(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Events, which have the prefix, and the lines of steps, which have not."""
    events: list[str] = []
    lines: list[str] = []
    for text in texts:
        (events if "[    INFO]" in text else lines).append(text)
    return events, lines


def test_a_run_prints_them_and_without_saving_leaves_only_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses_printed(logging_freq: int) -> list[float]:
        directory = tmp_path / f"every_{logging_freq}"
        overrides = [
            "Engine.log_style=megatron",
            "Engine.max_steps=4",
            "Engine.eval_freq=4",
            f"Engine.logging_freq={logging_freq}",
            f"Engine.save_load.output_dir={directory}",
            f"Data.dataset.cache_dir={tmp_path / 'cache'}",
        ]
        build_engine(load_config(file, overrides, world_size=1)).fit(save=False)
        assert sorted(path.name for path in directory.iterdir()) == [
            "metrics.jsonl",
            "metrics.seal",
        ]
        text = capsys.readouterr().out
        assert "\n validation loss at iteration 4 | lm loss value: " in text
        assert "\n validation loss at the end of training for test data | " in text
        return [float(loss) for loss in re.findall(r" lm loss: (\S+) ", text)]

    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    first, second, third, fourth = losses_printed(1)
    assert losses_printed(2) == pytest.approx([(first + second) / 2, (third + fourth) / 2])


def test_the_two_conventions_for_a_step_of_175b(configure: Callable[..., Config]) -> None:
    shape, tokens = ModelShape.of(configure().Model), 1536 * 2048
    theirs = megatron_deepspeed_flops_per_token(shape, 2048, recomputes=False) * tokens
    assert f"{theirs:.7e}" == "3.3832281e+18"
    causal = flops_per_token(shape, 2048, causal=True) * tokens
    assert f"{causal:.7e}" == "3.3405978e+18"
    recomputed = megatron_deepspeed_flops_per_token(shape, 2048, recomputes=True) * tokens
    assert recomputed == pytest.approx(theirs * 4 / 3)
    assert recomputed == pytest.approx(flops_per_token(shape, 2048, recompute="full") * tokens)


def test_a_measurement_says_what_the_published_lines_say(configure: Callable[..., Config]) -> None:
    seconds = [numbers(line)["elapsed time per iteration (ms)"] / 1000 for line in PUBLISHED[:6]]
    peak = Peak(312e12, "312 TFLOP/s per device, A100 in fp16")
    config = configure(*MEASURED)
    records = [{"batch_seconds": each} for each in [999.0, *seconds[:3]]]
    told = measurement(config, WORLD, records, 1, peak)
    assert told.iterations == 3 and told.median_seconds == seconds[2]
    assert f"{told.tokens_per_device_per_second:.3f}" == "142.332"
    assert f"{told.tflops_per_device['megatron_deepspeed']:.2f}" == "153.08"
    assert f"{told.tflops_per_device['model']:.1f}" == "151.1"
    assert told.mfu == pytest.approx(0.484, abs=5e-4)
    assert told.peak_tflops == pytest.approx(312)
    text = "\n".join(told.lines())
    assert "48.4% of 312 TFLOP/s per device, A100 in fp16" in text
    assert "full attention, 3 passes" in text and "causal attention" in text


def test_a_growing_batch_is_told_as_it_is(make_step: Callable[..., Step]) -> None:
    record = make_step(9, global_batch_size=32, batch_seconds=2.0)
    (line,) = printed(style(flops_per_sample=1e12), lambda sinks: sinks.train(record))
    assert "global batch size:    32 |" in line
    assert "samples per second: 16.000 | tokens per gpu per second (tgs): 128.000" in line
    assert line.endswith(" TFLOPs: 8.00 |")
