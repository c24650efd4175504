"""PaddleNLP's gpt-3 command lines: `run_pretrain_static.py` and the dygraph `run_pretrain.py`.

    main("static", "run_pretrain_static.py", sys.argv[1:])

The flags become `output_dir/config.yaml`, which names the flag behind each value, and the run is
`fourfold train -c` of that file. The static script compiles the model. No flag is dropped silently:
those without effect are listed at the start, and all problems are reported together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fourfold import cli
from fourfold.compat.flags import Flags, Translation
from fourfold.compat.paddlenlp_flags import (
    KEYS,
    GraphMode,
    PaddleLayout,
    problems_of,
    read_flags,
    without_effect,
)
from fourfold.compat.paddlenlp_models import (
    END_OF_TEXT,
    SIZES,
    InitialModel,
    find_model,
    initial_weights_dir,
    write_initial_weights,
)
from fourfold.errors import ConfigError, UserError, report
from fourfold.launch.launchers import join_launcher


def main(graph_mode: GraphMode, program: str, arguments: Sequence[str]) -> None:
    """Train as the flags say; ends the process as `fourfold train` would."""
    try:
        file = prepare(graph_mode, program, arguments)
    except (UserError, KeyboardInterrupt) as error:
        sys.exit(report(error))
    cli.main(["train", "-c", str(file)])


def prepare(graph_mode: GraphMode, program: str, arguments: Sequence[str]) -> Path:
    """The configuration file, checked and written, and the weights it begins with."""
    launcher = join_launcher(os.environ)
    processes = launcher.world_size if launcher else 1
    flags = read_flags(program, arguments)
    problems, model = [], None
    try:
        model = find_model(flags["model_name_or_path"], _sizes(flags))
    except UserError as error:
        problems.append(str(error))
    translation = translate(flags, graph_mode, model)
    layout = PaddleLayout.of(flags, graph_mode)
    problems += problems_of(flags, layout, translation, processes, program)
    if problems or model is None:
        raise ConfigError(problems)
    if os.environ.get("RANK", "0") == "0":
        if useless := without_effect(flags, layout):
            print(f"fourfold: without effect: {'; '.join(useless)}", flush=True)
        write_initial_weights(model, Path(flags["output_dir"]))
    return translation.write(flags["output_dir"])


def translate(flags: Flags, graph_mode: GraphMode, model: InitialModel | None) -> Translation:
    """The flags as keys; without sizes if the model was not found."""
    translation = Translation(f"PaddleNLP's gpt-3 ({graph_mode} graph)")
    translation.set_keys(flags, KEYS)
    if model is not None:
        _translate_model(translation, flags, model)
    _translate_layout(translation, flags, PaddleLayout.of(flags, graph_mode))
    _translate_data(translation, flags)
    _translate_precision(translation, flags)
    _translate_engine(translation, flags, graph_mode)
    _translate_generation(translation, flags)
    _translate_profiler(translation, flags)
    return translation


def _sizes(flags: Flags) -> dict[str, int]:
    return {name: flags[name] for name in SIZES if name in flags}


def _translate_model(translation: Translation, flags: Flags, model: InitialModel) -> None:
    named = "model_name_or_path"
    origin = flags.origin(named) if model.weights else flags.shown(named)
    for name, value in model.sizes.items():
        flag = flags.origin(name) if name in flags else origin
        translation.set(f"Model.{name}", value, flag)
    if model.weights is not None:
        weights = str(initial_weights_dir(Path(flags["output_dir"])))
        origin = "the weights of --model_name_or_path"
        translation.set("Engine.save_load.ckpt_dir", weights, origin)


def _translate_layout(translation: Translation, flags: Flags, layout: PaddleLayout) -> None:
    place = "Distributed.sharding"
    degree = flags.origin("sharding_degree") if layout.shards else "--use_sharding is not on"
    translation.set(f"{place}.sharding_degree", layout.sharding, degree)
    translation.set(
        f"{place}.sharding_stage", flags["sharding_stage"], flags.origin("sharding_stage")
    )
    offload = bool(flags["sharding_offload"])
    translation.set(f"{place}.sharding_offload", offload, flags.origin("sharding_offload"))
    sizes = [name for name in ("global_batch_size", "local_batch_size") if name in flags]
    for name in sizes:
        translation.set(f"Data.batch_size.{name}", flags[name], flags.origin(name))
    if not sizes:
        translation.set(
            "Data.batch_size.local_batch_size",
            flags["micro_batch_size"],
            "--micro_batch_size: no --global_batch_size is given",
        )


def _translate_data(translation: Translation, flags: Flags) -> None:
    translation.set("Data.dataset.order", "fleetx", "documents in file order, as in PaddleNLP")
    if flags["model_type"] == "gpt-cn":
        translation.set("Data.dataset.eos_token_id", END_OF_TEXT["gpt-cn"], "--model_type gpt-cn")


def _translate_precision(translation: Translation, flags: Flags) -> None:
    place = "Engine.mix_precision"
    if flags["use_pure_fp16"]:
        translation.set(f"{place}.dtype", "float16", "--use_pure_fp16")
        translation.set(f"{place}.level", "O2", "--use_pure_fp16")
    elif flags["use_amp"]:
        translation.set(f"{place}.dtype", "float16", "--use_amp")
        translation.set(f"{place}.level", flags["amp_level"], flags.origin("amp_level"))
    else:
        translation.set(f"{place}.dtype", "float32", "--use_amp is not on")


def _translate_engine(translation: Translation, flags: Flags, graph_mode: GraphMode) -> None:
    script = "the static script" if graph_mode == "static" else "the dygraph script"
    translation.set("Engine.graph_mode", graph_mode, script)
    recompute = bool(flags["use_recompute"])
    translation.set("Model.use_recompute", recompute, flags.origin("use_recompute"))
    translation.set("Engine.save_load.keep_last", 0, "every checkpoint is kept, as in PaddleNLP")
    if flags["lr_decay_style"] == "none":
        translation.set("Optimizer.lr.decay_style", "constant", "--lr_decay_style none")
        translation.set("Optimizer.lr.warmup_rate", 0.0, "--lr_decay_style none")
    if flags["check_accuracy"]:
        for key in ("Model.hidden_dropout_prob", "Model.attention_probs_dropout_prob"):
            translation.set(key, 0.0, "--check_accuracy")
        for key in ("Engine.eval_freq", "Engine.test_iters", "Engine.save_load.save_steps"):
            translation.set(key, 0, "--check_accuracy")


def _translate_generation(translation: Translation, flags: Flags) -> None:
    strategy = flags["decoding_strategy"]
    for name, key, off in (("topk", "Generation.top_k", 0), ("topp", "Generation.top_p", 1.0)):
        if strategy == f"{name}_sampling":
            translation.set(key, flags[name], flags.origin(name))
        else:
            translation.set(key, off, strategy)


def _translate_profiler(translation: Translation, flags: Flags) -> None:
    request = flags["profiler_options"]
    if request is None:
        return
    said = flags.origin("profiler_options")
    translation.set("Profiler.enable", True, said)
    translation.set("Profiler.scheduler", list(request.steps), said)
    if request.path is not None:
        translation.set("Profiler.profiler_log", request.path, said)
    if request.exits:
        last = min(flags["max_steps"], request.steps[1])
        translation.set("Engine.max_steps", last, f"{said}: exit_on_finished")
