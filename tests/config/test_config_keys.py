"""Every key of the configuration is read by what it is about, or says that it has no effect.

Runs are made while every access to the tree is watched. A key counts as read when code outside of
`fourfold.config` asked for it. The few that only the configuration itself reads must change the
value of another key, or be named in a notice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_text_run import TextRun, make_run

from fourfold.cli import main
from fourfold.config import Config, load_config
from fourfold.config.fields import Section, leaves, section_type

# Keys that nothing outside of the configuration reads: a value other than the default.
INSIDE = {
    "Engine.train_samples": "24",
    "Engine.mix_precision.use_pure_fp16": "True",
    "Data.batch_size.local_batch_size": "8",
    "Data.batch_size.rampup": "[4, 4, 16]",
    "Optimizer.lr.wsd_decay_rate": "0.5",
}


class Watch:
    """Notes which keys are asked for by code outside of the configuration."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.places: dict[type[Section], list[str]] = {}
        self._find(Config, "")

    def _find(self, kind: type[Section], prefix: str) -> None:
        self.places.setdefault(kind, []).append(prefix)
        for name, field in kind.model_fields.items():
            if (inner := section_type(field)) is not None:
                self._find(inner, f"{prefix}{name}.")

    def note(self, kind: type[Section], names: Iterator[str]) -> None:
        asker = _asker()
        # The last reads the tree for the planner, to see what of the layout is left to it.
        if not asker.startswith("fourfold.config") or asker == "fourfold.config.auto_constraints":
            self.read.update(prefix + name for name in names for prefix in self.places[kind])

    def install(self, patch: pytest.MonkeyPatch) -> None:
        get, dump, watch = Section.__getattribute__, Section.model_dump, self

        def watched_get(section: Section, name: str) -> Any:
            kind = type(section)
            if kind in watch.places and name in kind.model_fields:
                watch.note(kind, iter([name]))
            return get(section, name)

        def watched_dump(section: Section, *given: Any, **named: Any) -> Any:
            # The whole tree is written to checkpoints, which is no reading.
            if type(section) is not Config:
                watch.note(type(section), (name for name, _ in leaves(type(section))))
            return dump(section, *given, **named)

        patch.setattr(Section, "__getattribute__", watched_get)
        patch.setattr(Section, "model_dump", watched_dump)


def _asker() -> str:
    """The module that asks: the first up the stack that is neither this one nor pydantic."""
    frame = sys._getframe(1)
    while (name := frame.f_globals["__name__"]) == __name__ or name.startswith("pydantic"):
        assert frame.f_back is not None
        frame = frame.f_back
    return str(name)


def commands(run: TextRun, scratch: Path) -> Iterator[list[str]]:
    """What reads all keys between them, in this process."""
    (scratch / "text.txt").write_text("the cat sat on a mat " * 20)
    yield ["generate", "--prompt", "the cat", "-o", "Inference.weights=bfloat16"]
    yield ["evaluate", "-o", f"Eval.eval_path={scratch / 'text.txt'}"]
    yield ["evaluate", "-o", "Eval.max_tokens=64"]
    train = ["Engine.max_steps=2", "Engine.mix_precision.dtype=float16", "Profiler.enable=True"]
    train += ["Profiler.scheduler=[1,2]", f"Profiler.profiler_log={scratch / 'profile'}"]
    train += [f"Engine.save_load.output_dir={scratch / 'run'}", "Optimizer.lr.decay_samples=16"]
    yield ["train", *(word for one in train for word in ("-o", one))]
    train = ["Engine.max_steps=2", "Optimizer.name=Muon", "Optimizer.lr.decay_style=wsd"]
    train += [f"Engine.save_load.output_dir={scratch / 'muon'}", "Engine.metrics_port=0"]
    train += ["Engine.spikes.action=rewind", "Engine.eval_freq=1", "Engine.samples.number=1"]
    train += ["Engine.samples.prompts=[the cat]", "Engine.samples.length=4"]
    task = f"{{name: text, kind: perplexity, path: {scratch / 'text.txt'}}}"
    train += [f"Engine.eval_tasks=[{task}]"]
    yield ["train", *(word for one in train for word in ("-o", one))]
    spread = ["Distributed.pp_degree=2", "Distributed.mp_degree=2", "Engine.accumulate_steps=4"]
    spread += ["Distributed.sharding.sharding_degree=2", "Data.batch_size.micro_batch_size=1"]
    yield ["plan", "--dry-run", *(word for one in spread for word in ("-o", one))]


def test_every_key_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch()
    watch.install(monkeypatch)
    run = make_run(tmp_path)
    for words in commands(run, tmp_path):
        with pytest.raises(SystemExit) as ended:
            main([*words, "-c", str(run.config)])
        assert ended.value.code == 0, (words, capsys.readouterr())
    unread = {name for name, _ in leaves(Config)} - watch.read
    assert unread == INSIDE.keys()


@pytest.mark.parametrize(("name", "value"), INSIDE.items())
def test_a_key_that_only_the_configuration_reads_changes_another_or_says_so(
    name: str, value: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("Data: {batch_size: {micro_batch_size: 4}}\n")
    before, after = load_config(file), load_config(file, [f"{name}={value}"])
    changed = {
        path
        for path, _ in leaves(Config)
        if path != name and before.setting(path) != after.setting(path)
    }
    told = [notice for notice in after.notices if f"{name}={value} has no effect" in notice]
    assert changed or told or before.batch_schedule != after.batch_schedule
