"""Derived values: degrees, batch sizes, precision, widths, counts.

Every `derived` key of the tree has its value after `resolve`. What cannot be derived is reported
and replaced by something harmless, so that the checks can still look at the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fourfold.config.batch_schedule import Ramp, growth_problem
from fourfold.config.engine_section import Dtype, default_level
from fourfold.config.fields import Section
from fourfold.config.findings import ConfigFindings, multiple_near
from fourfold.config.model_section import GATED, ModelSection
from fourfold.config.schema import Config
from fourfold.errors import Setting

DEFAULT_MICRO_BATCH = 8
_BATCH = "Data.batch_size"
_DEGREES = (
    "Distributed.dp_degree",
    "Distributed.sharding.sharding_degree",
    "Distributed.mp_degree",
    "Distributed.pp_degree",
)


def resolve(config: Config, findings: ConfigFindings, world_size: int | None) -> None:
    """Fill in and adjust `config` for `world_size` processes, or for none started (None)."""
    if config.Global.device == "gpu":
        config.Global.device = "cuda"
    if config.Distributed.auto:
        findings.notice(
            "Distributed.auto: the layout is chosen when fourfold train starts; until then the "
            "degrees are taken as written",
            "Distributed.auto",
        )
    _resolve_degrees(config, findings, world_size)
    _resolve_batch(config, findings)
    _resolve_engine(config, findings)
    _resolve_precision(config, findings)
    _resolve_model(config, findings)
    _resolve_learning_rate(config, findings)
    _resolve_muon(config, findings)
    _resolve_data(config)
    _resolve_usage(config)


def _resolve_degrees(config: Config, findings: ConfigFindings, world_size: int | None) -> None:
    layout = config.Distributed
    sharding = layout.sharding.sharding_degree
    others = layout.mp_degree * layout.pp_degree * sharding
    product = (
        f"mp_degree={layout.mp_degree} * pp_degree={layout.pp_degree} * sharding_degree={sharding}"
    )
    if world_size is None:
        if layout.dp_degree is None:
            layout.dp_degree = _assumed_dp(config, findings)
    elif world_size % others:
        needed = others * (layout.dp_degree or 1)
        findings.problem(
            f"Distributed: {product} = {others} does not divide the {world_size} processes "
            f"started; start {needed}, or another multiple of {others}, or lower a degree",
            *_DEGREES[1:],
        )
        layout.dp_degree = layout.dp_degree or 1
    else:
        fitting = world_size // others
        if layout.dp_degree not in (None, fitting):
            findings.notice(
                f"Distributed.dp_degree={layout.dp_degree} * {product} is not the {world_size} "
                f"processes started; dp_degree becomes {fitting}",
                *_DEGREES,
            )
        layout.dp_degree = fitting


def _assumed_dp(config: Config, findings: ConfigFindings) -> int:
    """Before launch the number of processes is unknown; batch sizes may imply it."""
    sizes = config.Data.batch_size
    sharding = config.Distributed.sharding.sharding_degree
    dp = 1
    if sizes.global_batch_size is not None and sizes.local_batch_size is not None:
        per_copy = sizes.local_batch_size * sharding
        if sizes.global_batch_size % per_copy == 0:
            dp = sizes.global_batch_size // per_copy
    findings.notice(
        f"Distributed.dp_degree is derived from the number of processes at launch; {dp} is "
        "assumed until then",
        "Distributed.dp_degree",
    )
    return dp


def _resolve_batch(config: Config, findings: ConfigFindings) -> None:
    sizes = config.Data.batch_size
    dp = config.Distributed.dp_degree
    sharding = config.Distributed.sharding.sharding_degree
    ranks = dp * sharding
    names = (f"{_BATCH}.global_batch_size", f"{_BATCH}.local_batch_size", *_DEGREES)
    spread = f"dp_degree={dp} * sharding_degree={sharding}"
    if sizes.global_batch_size is None and sizes.local_batch_size is None:
        sizes.local_batch_size = sizes.micro_batch_size or DEFAULT_MICRO_BATCH
        findings.notice(
            f"{_BATCH}: neither global_batch_size nor local_batch_size is given; "
            f"local_batch_size={sizes.local_batch_size} is used",
            *names,
        )
    if sizes.global_batch_size is None:
        sizes.global_batch_size = sizes.local_batch_size * ranks
    elif sizes.local_batch_size is None:
        if sizes.global_batch_size % ranks:
            findings.problem(
                [
                    Setting(names[0], sizes.global_batch_size),
                    f" is not a multiple of {spread}; choose "
                    f"{multiple_near(sizes.global_batch_size, ranks)}",
                ],
                *names,
            )
        sizes.local_batch_size = max(1, sizes.global_batch_size // ranks)
    elif sizes.global_batch_size != sizes.local_batch_size * ranks:
        findings.problem(
            [
                Setting(names[0], sizes.global_batch_size),
                f" is not local_batch_size={sizes.local_batch_size} * {spread} = "
                f"{sizes.local_batch_size * ranks}; give one of the two sizes and leave the other "
                "empty",
            ],
            *names,
        )
    _resolve_ramp(config, findings)
    _resolve_micro_batch(config, findings)


def _resolve_ramp(config: Config, findings: ConfigFindings) -> None:
    """Drop a ramp that does not reach the global batch in whole increments."""
    sizes = config.Data.batch_size
    if sizes.rampup is None:
        return
    names = (f"{_BATCH}.rampup", f"{_BATCH}.global_batch_size")
    if problem := growth_problem(Ramp(*sizes.rampup), sizes.global_batch_size):
        findings.problem([Setting(names[0], sizes.rampup), f" {problem}"], *names)
        sizes.rampup = None


def _resolve_learning_rate(config: Config, findings: ConfigFindings) -> None:
    lr = config.Optimizer.lr
    if lr.decay_steps is None:
        lr.decay_steps = config.Engine.max_steps
    if lr.decay_samples is None and lr.warmup_samples is None:
        _resolve_wsd(config, findings, lr.decay_steps)
        return
    if lr.decay_samples is None:
        lr.decay_samples = config.batch_schedule.consumed(config.Engine.max_steps)
    if lr.warmup_samples is None:
        lr.warmup_samples = lr.warmup_rate * lr.decay_samples
    for name in ("decay_steps", "warmup_rate"):
        samples = "decay_samples" if name == "decay_steps" else "warmup_samples"
        if findings.given(f"Optimizer.lr.{name}") and findings.given(f"Optimizer.lr.{samples}"):
            findings.notice(
                f"Optimizer.lr.{name} has no effect: Optimizer.lr.{samples} is given",
                f"Optimizer.lr.{name}",
                f"Optimizer.lr.{samples}",
            )
    _resolve_wsd(config, findings, lr.decay_samples)


def _resolve_wsd(config: Config, findings: ConfigFindings, decay: int) -> None:
    """The length of the decay, counted as the rate is: in samples, or in steps."""
    lr = config.Optimizer.lr
    counted, other = "wsd_decay_steps", "wsd_decay_samples"
    if lr.decay_samples is not None:
        counted, other = other, counted
    unused, why = ["wsd_decay_rate", "wsd_decay_style", counted, other], str(lr.decay_style)
    if lr.decay_style == "wsd":
        by_rate = round(lr.wsd_decay_rate * decay)
        if getattr(lr, counted) is None:
            setattr(lr, counted, by_rate)
        same = getattr(lr, counted) == by_rate
        unused, why = [other] if same else ["wsd_decay_rate", other], f"wsd and {counted} given"
    _notice_unused(findings, lr, "Optimizer.lr", unused, f"decay_style={why}")


def _resolve_muon(config: Config, findings: ConfigFindings) -> None:
    optimizer, muon = config.Optimizer, config.Optimizer.muon
    followed = {
        "weight_decay": optimizer.weight_decay,
        "adjust_lr_fn": "match_rms_adamw" if muon.lr is None else "original",
    }
    names = [name for name in type(muon).model_fields if name not in followed]
    for name, value in followed.items():
        if getattr(muon, name) is None:
            setattr(muon, name, value)
        elif getattr(muon, name) != value:
            names.append(name)
    if optimizer.name != "Muon":
        _notice_unused(findings, muon, "Optimizer.muon", names, f"name={optimizer.name}")


def _notice_unused(
    findings: ConfigFindings, section: Section, path: str, names: list[str], why: str
) -> None:
    """Of these keys, those that were given another value than their default."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            findings.notice(f"{path}.{name}={value} has no effect with {why}", f"{path}.{name}")


def _resolve_micro_batch(config: Config, findings: ConfigFindings) -> None:
    sizes = config.Data.batch_size
    local = sizes.local_batch_size
    if sizes.micro_batch_size is None:
        ranks = max(1, sizes.global_batch_size // local)
        shares = [max(1, batch // ranks) for batch in config.batch_schedule.batches]
        most = max(1, min(DEFAULT_MICRO_BATCH, min(shares) // config.Distributed.pp_degree))
        common = math.gcd(*shares)
        sizes.micro_batch_size = next(size for size in range(most, 0, -1) if common % size == 0)
    elif local % sizes.micro_batch_size:
        findings.problem(
            [
                Setting(f"{_BATCH}.micro_batch_size", sizes.micro_batch_size),
                f" does not divide local_batch_size={local}; choose a divisor of {local}",
            ],
            f"{_BATCH}.micro_batch_size",
            f"{_BATCH}.local_batch_size",
            f"{_BATCH}.global_batch_size",
        )
    steps = max(1, local // sizes.micro_batch_size)
    if config.Engine.accumulate_steps not in (None, steps):
        findings.notice(
            f"Engine.accumulate_steps={config.Engine.accumulate_steps} becomes {steps} = "
            f"local_batch_size / micro_batch_size",
            "Engine.accumulate_steps",
        )
    config.Engine.accumulate_steps = steps


def _resolve_engine(config: Config, findings: ConfigFindings) -> None:
    engine = config.Engine
    if engine.test_iters is None:
        engine.test_iters = 10 * engine.eval_iters
    if engine.eval_tasks_freq is None:
        engine.eval_tasks_freq = engine.eval_freq
    never = {"Engine.eval_freq": engine.eval_freq, "Engine.eval_tasks_freq": engine.eval_tasks_freq}
    for key, frequency in zip(("Engine.samples", "Engine.eval_tasks"), never):
        wanted = engine.eval_tasks if "tasks" in key else engine.samples.wanted
        if wanted and not never[frequency]:
            findings.problem(
                [f"{key} would never be used: ", config.setting(frequency),
                 "; choose after how many steps"]
            )  # fmt: skip
    if engine.train_samples is not None:
        _resolve_length(config, findings)
    engine.save_load.save_steps = max(0, engine.save_load.save_steps)


def _resolve_length(config: Config, findings: ConfigFindings) -> None:
    """`train_samples` in steps; a smaller `max_steps` of the user's own still ends the run."""
    engine, asked = config.Engine, findings.given("Engine.max_steps")
    steps = config.batch_schedule.steps_within(engine.train_samples or 0)
    if steps == 0:
        findings.problem(
            [
                Setting("Engine.train_samples", engine.train_samples),
                f" is less than one step, which reads {config.batch_schedule.batch_of(0)} samples; "
                "choose more, or a smaller batch",
            ],
            "Engine.train_samples",
            f"{_BATCH}.global_batch_size",
            f"{_BATCH}.rampup",
        )
    engine.max_steps = min(engine.max_steps, max(steps, 1)) if asked else max(steps, 1)


def _resolve_precision(config: Config, findings: ConfigFindings) -> None:
    precision = config.Engine.mix_precision
    names = ("Engine.mix_precision.use_pure_fp16", "Engine.mix_precision.dtype")
    switched: Dtype = "float16" if precision.use_pure_fp16 else "float32"
    if precision.dtype is None:
        precision.dtype = switched
    elif precision.use_pure_fp16 not in (None, precision.dtype == "float16"):
        said = f"{names[0]}={precision.use_pure_fp16} and {names[1]}={precision.dtype} contradict"
        if findings.layer(names[0]) > findings.layer(names[1]):
            precision.dtype = switched
        findings.notice(f"{said}; {precision.dtype} is used", *names)
    precision.use_pure_fp16 = precision.dtype == "float16"
    if precision.level is None:
        # With bfloat16 it depends on the device, which `auto` finds when the run starts.
        if precision.dtype != "bfloat16" or config.Global.device != "auto":
            on_cpu = config.Global.device == "cpu"
            precision.level = default_level(precision.dtype, on_cpu=on_cpu)
    elif precision.dtype == "float32":
        findings.notice(
            f"Engine.mix_precision.level={precision.level} has no effect with float32",
            "Engine.mix_precision.level",
        )
        precision.level = None


def _resolve_model(config: Config, findings: ConfigFindings) -> None:
    model = config.Model
    _resolve_widths(model)
    _resolve_idle_options(model, findings)
    _resolve_recompute(model, findings)
    whole = model.use_recompute and model.recompute_granularity in ("full", "ops")
    if model.offload_activations and whole and model.recompute_method == "uniform":
        findings.notice(
            "Model.offload_activations has no effect where all layers are recomputed; turn "
            "Model.use_recompute off, or recompute some with Model.recompute_method=block",
            "Model.offload_activations",
        )
        model.offload_activations = False
    if model.sequence_parallel and config.Distributed.mp_degree == 1:
        findings.notice(
            "Model.sequence_parallel has no effect with Distributed.mp_degree=1",
            "Model.sequence_parallel",
        )
        model.sequence_parallel = False


def _resolve_widths(model: ModelSection) -> None:
    if model.ffn_hidden_size is None:
        gated = model.activation in GATED
        model.ffn_hidden_size = (
            -(-8 * model.hidden_size // (3 * 256)) * 256 if gated else 4 * model.hidden_size
        )
    if model.num_key_value_heads is None:
        model.num_key_value_heads = model.num_attention_heads
    if model.head_dim is None:
        model.head_dim = max(1, model.hidden_size // model.num_attention_heads)
    scaling = model.rope_scaling
    if scaling.type != "none" and scaling.original_max_position_embeddings is None:
        scaling.original_max_position_embeddings = max(
            1, int(model.max_position_embeddings / scaling.factor)
        )


def _resolve_idle_options(model: ModelSection, findings: ConfigFindings) -> None:
    """Options of the network that others make idle."""
    if model.position_embedding != "rotary":
        because = f"Model.position_embedding={model.position_embedding}"
        _no_effect(model, ("rope_theta", "partial_rotary_factor"), because, findings)
        if model.rope_scaling.type != "none":
            findings.notice(
                f"Model.rope_scaling.type={model.rope_scaling.type} has no effect with {because}",
                "Model.rope_scaling.type",
            )
            model.rope_scaling = type(model.rope_scaling)()
    if model.sliding_window is None:
        _no_effect(model, ("sliding_window_layers",), "no Model.sliding_window", findings)


def _no_effect(
    model: ModelSection, names: Sequence[str], because: str, findings: ConfigFindings
) -> None:
    """Say so of those that are set, and set them back."""
    for name in names:
        path, value = f"Model.{name}", getattr(model, name)
        field = ModelSection.model_fields[name]
        if value != field.default:
            findings.notice(f"{path}={value} has no effect with {because}", path)
            setattr(model, name, field.default)


def _resolve_recompute(model: ModelSection, findings: ConfigFindings) -> None:
    if model.use_recompute:
        model.recompute_granularity = model.recompute_granularity or "full"
    names = ["recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_keep"]
    because = "Model.use_recompute=False"
    if model.use_recompute:
        names, because = names[3:], f"Model.recompute_granularity={model.recompute_granularity}"
    if model.recompute_granularity == "ops" and model.use_recompute:
        return
    _no_effect(model, names, because, findings)


def _resolve_data(config: Config) -> None:
    dataset = config.Data.dataset
    if dataset.split_rounding is None:
        fleetx = dataset.order == "fleetx"
        dataset.split_rounding = "megatron_deepspeed" if fleetx else dataset.blend_rounding


def _resolve_usage(config: Config) -> None:
    if config.Inference.model_dir is None:
        config.Inference.model_dir = config.Engine.save_load.output_dir
    if config.Inference.mp_degree is None:
        config.Inference.mp_degree = config.Distributed.mp_degree
    if config.Eval.max_seq_len is None:
        config.Eval.max_seq_len = config.Data.dataset.max_seq_len
    if config.Eval.overlapping_eval is None:
        config.Eval.overlapping_eval = config.Eval.max_seq_len
