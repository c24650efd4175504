"""`fourfold generate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold import storage
from fourfold.cli.options import ConfigFile, Overrides
from fourfold.errors import DataError, UserError

if TYPE_CHECKING:
    from fourfold.config import Config
    from fourfold.generate.module import GenerationModule

# The document's own prompt, for a call that names none and has nobody to ask.
DEFAULT_PROMPT = "Hi, GPT2. Tell me who Jack Ma is."
MAX_PROMPT_BYTES = 16 << 20


def generate(
    config: ConfigFile,
    override: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="The text to continue; may be repeated."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A text file that is the prompt, or a .jsonl file with a `prompt` or `text` on "
            "each line; - is standard input."
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes to spread the model over, as Distributed says; without it "
            "one process holds all of it.",
        ),
    ] = None,
) -> None:
    """Continue a text with a trained model, by the `Generation` section of its YAML file."""
    from fourfold.config import load_config
    from fourfold.generate.module import GenerationModule
    from fourfold.generate.sampling import without_effect
    from fourfold.launch.launchers import join_launcher, refuse_inside_launcher

    prompts = list(prompt or [])
    if prompt_file is not None:
        prompts += read_prompts(prompt_file)
    if nproc is not None:
        refuse_inside_launcher(os.environ, f"--nproc {nproc}")
    launcher = join_launcher(os.environ)
    launched = launcher.world_size if launcher is not None and launcher.world_size > 1 else None
    resolved = load_config(config, override or [], nproc or launched)
    for name in without_effect(resolved.Generation):
        strategy = resolved.Generation.decode_strategy
        say(f"Generation.{name} has no effect with decode_strategy={strategy}")
    if nproc is not None and nproc > 1:
        raise typer.Exit(_generate_in_processes(resolved, prompts or [DEFAULT_PROMPT], nproc))
    if launched is not None:
        _as_rank(resolved, prompts or [DEFAULT_PROMPT], launched)()
        return
    asks = not prompts and sys.stdin.isatty()
    module = GenerationModule(resolved, say)
    if asks:
        converse(module)
    else:
        write(module, prompts or [DEFAULT_PROMPT])


def _generate_in_processes(config: Config, prompts: list[str], nproc: int) -> int:
    from fourfold.launch.supervisor import supervise

    log_dir = storage.local_path(config.Engine.save_load.output_dir) / "logs" / "generate"
    return supervise(_as_rank(config, prompts, nproc), nproc, log_dir)


def _as_rank(config: Config, prompts: list[str], size: int) -> Callable[[], None]:
    """What each of `size` ranks does, with all that it needs imported; rank 0 prints."""
    from fourfold.device import select_device
    from fourfold.generate.distributed import free_of_training
    from fourfold.generate.module import GenerationModule
    from fourfold.mesh import connect
    from fourfold.parallel import layout_of, preload

    free_of_training(config)
    layout = layout_of(config)
    layout.check(size)
    preload(layout)

    def work() -> None:
        mesh = connect(layout, select_device(config.Global.device))
        module = GenerationModule(config, say if mesh.rank == 0 else lambda _: None, mesh)
        with redirect_stdout(sys.stdout if mesh.rank == 0 else None):
            write(module, prompts)
        mesh.close()

    return work


def say(text: str) -> None:
    print(text, file=sys.stderr)


def shown(text: str) -> str:
    """`text` without control characters if it goes to a terminal: it may come from anywhere."""
    # A rank that is not the first has no standard output.
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    kept = "\n\t"
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def write(module: GenerationModule, prompts: list[str]) -> None:
    """Print every prompt with its continuations; a single one appears as it is written."""
    single = len(prompts) == 1 and module.options.num_return_sequences == 1
    if single:
        write_single(module, prompts[0])
        return
    for prompt, continuations in zip(prompts, module.complete(prompts)):
        for continuation in continuations:
            print(shown(f"Prompt: {prompt}\nGeneration: {prompt}{continuation.text}"))


def write_single(module: GenerationModule, prompt: str) -> None:
    written: list[str] = []

    def show(_prompt: int, _number: int, text: str) -> None:
        if not written:
            print(shown(f"Prompt: {prompt}\nGeneration: {prompt}"), end="")
        written.append(text)
        print(shown(text), end="", flush=True)

    [[continuation]] = module.complete([prompt], on_text=show)
    if written:
        print()
    else:
        # Beam search has nothing to show before its end, and a text may end at once.
        print(shown(f"Prompt: {prompt}\nGeneration: {prompt}{continuation.text}"))


def converse(module: GenerationModule) -> None:
    """One prompt after the other from the terminal; an empty line or the end of input ends."""
    print("Type a text to continue; an empty line ends.")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if not prompt:
            return
        try:
            write(module, [prompt])
        except UserError as error:
            print(f"fourfold: {error}", file=sys.stderr)


def read_prompts(file: Path) -> list[str]:
    if str(file) == "-":
        return [sys.stdin.read().removesuffix("\n")]
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; name a file of prompts") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise DataError(f"{file}: larger than the {MAX_PROMPT_BYTES >> 20} MB prompts may have")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file}: not UTF-8 text; save it as UTF-8") from None
    if file.suffix != ".jsonl":
        return [text.removesuffix("\n")]
    lines = enumerate(text.splitlines(), start=1)
    prompts = [_prompt_of(line, file, number) for number, line in lines if line.strip()]
    if not prompts:
        raise DataError(f"{file}: holds no prompt; give each a line")
    return prompts


def _prompt_of(line: str, file: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        found = record.get("prompt", record.get("text"))
        if isinstance(found, str):
            return found
    raise DataError(f'{file}:{number}: no prompt here; write {{"prompt": "..."}} on each line')
