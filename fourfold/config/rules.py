"""Rules between keys of a resolved configuration: legal layouts, and values that contradict.

Each message gives the values, the constraint they break and what to choose instead. The arithmetic
of legal layouts at the end is shared with the planner's search.
"""

from __future__ import annotations

from fourfold.config.findings import ConfigFindings
from fourfold.config.schema import Config
from fourfold.errors import Setting


def check(config: Config, findings: ConfigFindings) -> None:
    _check_model(config, findings)
    _check_data(config, findings)
    _check_lengths(config, findings)
    check_layout(config, findings)
    _check_fusion(config, findings)
    _check_recompute(config, findings)
    _check_learning_rate(config, findings)
    _check_generation(config, findings)
    _check_profiler(config, findings)
    _check_copies(config, findings)


def _check_model(config: Config, findings: ConfigFindings) -> None:
    model = config.Model
    heads, width = config.setting("Model.num_attention_heads"), config.setting("Model.hidden_size")
    if width.value % heads.value and not findings.given("Model.head_dim"):
        choice = divisors(width.value, heads.value)
        findings.problem([heads, " does not divide ", width, f"; choose {choice}"])
    shared = config.setting("Model.num_key_value_heads")
    if heads.value % shared.value:
        choice = divisors(heads.value, shared.value)
        findings.problem([shared, " does not divide ", heads, f"; choose {choice}"])
    _check_network(config, findings)
    ratio = model.ffn_hidden_size / model.hidden_size
    if ratio >= 8:
        ffn = config.setting("Model.ffn_hidden_size")
        findings.notice([ffn, f" is {ratio:g} times ", width, "; leave it empty for 4 times"])
    eos, size = config.setting("Data.dataset.eos_token_id"), config.setting("Model.vocab_size")
    if eos.value is not None and eos.value >= size.value:
        findings.problem([eos, " is outside ", size, f"; choose an id below {size.value}"])


def _check_network(config: Config, findings: ConfigFindings) -> None:
    """Options of the block that do not go together."""
    model = config.Model
    if model.qk_norm == "all_heads" and model.normalization != "RMSNorm":
        findings.problem(
            [config.setting("Model.qk_norm"), " needs Model.normalization=RMSNorm; choose per_head"]
        )
    if model.parallel_residual and model.norm_placement == "post":
        findings.problem(
            [config.setting("Model.parallel_residual"), " cannot be combined with ",
             config.setting("Model.norm_placement"), "; choose norm_placement pre"]
        )  # fmt: skip
    beyond = [one for one in model.sliding_window_layers or [] if one >= model.num_layers]
    if beyond:
        findings.problem(
            [config.setting("Model.sliding_window_layers"), f" names layer {beyond[0]}, but ",
             config.setting("Model.num_layers"), " are counted from 0; leave it out"]
        )  # fmt: skip
    if model.position_embedding != "rotary":
        return
    share = config.setting("Model.partial_rotary_factor")
    rotated = int(model.head_dim * share.value)
    if rotated < 2 or rotated % 2:
        findings.problem(
            [share, f" rotates {rotated} of ", config.setting("Model.head_dim"),
             ", and they are rotated in pairs; choose a share that gives an even number"]
        )  # fmt: skip
    scaling = model.rope_scaling
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.type == "llama3" and low >= high:
        findings.problem(
            [config.setting("Model.rope_scaling.low_freq_factor"), " must be below ",
             config.setting("Model.rope_scaling.high_freq_factor"), "; Llama 3 has 1 and 4"]
        )  # fmt: skip


def _check_data(config: Config, findings: ConfigFindings) -> None:
    dataset = config.Data.dataset
    own = {"train": dataset.train_data, "valid": dataset.valid_data, "test": dataset.test_data}
    names = [f"Data.dataset.{part}_data" for part, value in own.items() if value is not None]
    shown = [part for name in names for part in (", ", Setting(name))][1:]
    if names and dataset.input_dir is not None:
        findings.problem(
            [
                *shown,
                " and ",
                Setting("Data.dataset.input_dir", dataset.input_dir),
                " contradict: the one names each part's data, the other is cut into parts; set one "
                "of them to null",
            ]
        )
    elif names and own["train"] is None:
        findings.problem(
            [
                *shown,
                " without ",
                Setting("Data.dataset.train_data"),
                " leave nothing to train on; give train_data too, or input_dir in place of all",
            ]
        )
    elif names and findings.given("Data.dataset.split"):
        findings.notice(
            "Data.dataset.split has no effect: with train_data each part uses all of its own data",
            "Data.dataset.split",
            *names,
        )


def _check_lengths(config: Config, findings: ConfigFindings) -> None:
    positions = config.setting("Model.max_position_embeddings")
    for path in ("Data.dataset.max_seq_len", "Eval.max_seq_len"):
        length = config.setting(path)
        if length.value > positions.value and (path.startswith("Data") or findings.given(path)):
            choice = f"; choose at most {positions.value}, or raise max_position_embeddings"
            findings.problem([length, " is longer than ", positions, choice])
    step, window = config.setting("Eval.overlapping_eval"), config.setting("Eval.max_seq_len")
    if step.value > window.value:
        choice = f"; choose at most {window.value}"
        findings.problem(
            [step, " would skip tokens between windows of ", window, choice],
            "Eval.overlapping_eval",
            "Eval.max_seq_len",
            "Data.dataset.max_seq_len",
        )


def _check_fusion(config: Config, findings: ConfigFindings) -> None:
    layout = config.Distributed
    degrees = {
        "mp_degree": layout.mp_degree,
        "pp_degree": layout.pp_degree,
        "sharding_degree": layout.sharding.sharding_degree,
    }
    above = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if config.Fused.tensor_fusion and config.Optimizer.name == "Muon":
        findings.problem(
            [
                Setting("Fused.tensor_fusion"),
                " joins parameters to flat buffers, and ",
                config.setting("Optimizer.name"),
                " updates each matrix by itself; turn it off, or choose AdamW",
            ],
        )
    if config.Fused.tensor_fusion and above:
        findings.problem(
            [
                Setting("Fused.tensor_fusion"),
                " works on one device or with data parallelism alone, not with "
                f"{', '.join(above)}; turn it off",
            ],
            "Fused.tensor_fusion",
            "Distributed.mp_degree",
            "Distributed.pp_degree",
            "Distributed.sharding.sharding_degree",
        )


def _check_recompute(config: Config, findings: ConfigFindings) -> None:
    model, layout = config.Model, config.Distributed
    if not model.use_recompute:
        return
    granularity = config.setting("Model.recompute_granularity")
    together = config.setting("Model.recompute_num_layers")
    if model.recompute_method == "uniform" and together.value > 1 and granularity.value != "full":
        findings.problem(
            [together, " layers are recomputed together, which goes with whole layers, not with ",
             granularity, "; choose recompute_granularity full, or recompute_method block"]
        )  # fmt: skip
    if granularity.value != "ops":
        return
    if layout.pp_degree > 1 and layout.pp_schedule in SPLIT_SCHEDULES:
        findings.problem(
            [granularity, " cannot be combined with ", config.setting("Distributed.pp_schedule"),
             ", which splits the backward pass, while what was kept can be used only once; choose "
             "recompute_granularity full, or a schedule such as 1F1B"]
        )  # fmt: skip
    if config.Engine.graph_mode == "static":
        findings.problem(
            [granularity, " cannot be combined with ", config.setting("Engine.graph_mode"),
             ", where the compiler chooses what to keep of a layer and recomputes norms and GELU "
             "by itself; turn Model.use_recompute off, or choose recompute_granularity full"]
        )  # fmt: skip


def _check_learning_rate(config: Config, findings: ConfigFindings) -> None:
    lr = config.Optimizer.lr
    if lr.max_lr < lr.min_lr:
        findings.notice(
            f"Optimizer.lr.max_lr={lr.max_lr:g} is below Optimizer.lr.min_lr={lr.min_lr:g}: after "
            "the warm-up the learning rate rises to min_lr",
            "Optimizer.lr.max_lr",
            "Optimizer.lr.min_lr",
        )
    own = config.setting("Optimizer.muon.lr")
    if config.Optimizer.name == "Muon" and own.value is not None and lr.max_lr == 0:
        findings.problem(
            [own, " follows the schedule of ", config.setting("Optimizer.lr.max_lr"),
             ", which has no shape; choose a max_lr above 0"]
        )  # fmt: skip
    if lr.decay_style == "wsd":
        _check_wsd(config, findings)


def _check_wsd(config: Config, findings: ConfigFindings) -> None:
    """The decay must begin after the warm-up has ended."""
    lr = config.Optimizer.lr
    unit = "steps" if lr.decay_samples is None else "samples"
    decays = config.setting(f"Optimizer.lr.wsd_decay_{unit}")
    ends = config.setting(f"Optimizer.lr.decay_{unit}")
    warmup = lr.warmup_rate * lr.decay_steps if unit == "steps" else lr.warmup_samples or 0.0
    if decays.value > ends.value - warmup:
        most = int(ends.value - warmup)
        findings.problem(
            [decays, f" begins within the warm-up, which takes {warmup:g} of ", ends,
             f" {unit}; choose at most {most}, or a shorter warm-up"]
        )  # fmt: skip


def _check_generation(config: Config, findings: ConfigFindings) -> None:
    generation = config.Generation
    least, most = config.setting("Generation.min_dec_len"), config.setting("Generation.max_dec_len")
    if least.value > most.value:
        findings.problem([least, " is above ", most, "; lower one or raise the other"])
    if generation.decode_strategy != "beam_search":
        return
    fewest = max(1, generation.num_return_sequences)
    if generation.num_beams < fewest:
        findings.problem(
            [
                config.setting("Generation.num_beams"),
                " is too few for decode_strategy=beam_search with "
                f"num_return_sequences={generation.num_return_sequences}; choose at least {fewest}",
            ],
            "Generation.num_beams",
            "Generation.decode_strategy",
            "Generation.num_return_sequences",
        )


def _check_profiler(config: Config, findings: ConfigFindings) -> None:
    window = config.Profiler.scheduler
    if window is not None and (len(window) != 2 or window[0] >= window[1]):
        findings.problem(
            [
                Setting("Profiler.scheduler", window),
                " is not [start, end] with start below end; choose for example [1, 5]",
            ]
        )


def _check_copies(config: Config, findings: ConfigFindings) -> None:
    copies = config.setting("Engine.save_load.memory_copy_steps")
    resumes = config.setting("Engine.save_load.auto_resume")
    if copies.value and not resumes.value:
        findings.problem([copies, " is for a run that resumes; choose True for ", resumes])


# -- layouts ------------------------------------------------------------------------------------


def check_layout(config: Config, findings: ConfigFindings) -> None:
    _check_tensor_parallel(config, findings)
    _check_pipeline(config, findings)
    _check_sharding(config, findings)
    _check_growth(config, findings)


def _check_tensor_parallel(config: Config, findings: ConfigFindings) -> None:
    model, mp = config.Model, config.Distributed.mp_degree
    degree = config.setting("Distributed.mp_degree")
    heads = config.setting("Model.num_attention_heads")
    if heads.value % mp:
        choice = divisors(heads.value, mp)
        findings.problem([degree, " does not divide ", heads, f"; choose {choice}"])
    shared = config.setting("Model.num_key_value_heads")
    if heads.value % mp == 0 and not divides_model(mp, heads.value, mp, shared.value):
        choice = f"; choose an mp_degree that divides {shared.value} or is a multiple of it"
        findings.problem([degree, " neither divides nor is a multiple of ", shared, choice])
    if model.vocab_size % mp:
        padded = -(-model.vocab_size // (128 * mp)) * 128 * mp
        advice = f"some ranks hold one row more. A vocabulary padded to {padded} would be faster"
        size = config.setting("Model.vocab_size")
        findings.notice([degree, " does not divide ", size, f"; {advice}"])
    if model.ffn_hidden_size % mp and findings.given("Model.ffn_hidden_size"):
        ffn = config.setting("Model.ffn_hidden_size")
        choice = f"; choose a multiple of {mp}"
        findings.problem([degree, " does not divide ", ffn, choice], ffn.path)
    length = config.setting("Data.dataset.max_seq_len")
    if model.sequence_parallel and length.value % mp:
        switch = Setting("Model.sequence_parallel")
        choice = f"; choose {-(-length.value // mp) * mp} or turn it off"
        findings.problem(
            [switch, " needs ", length, " to be a multiple of ", degree, choice],
            length.path,
            degree.path,
        )


def _check_pipeline(config: Config, findings: ConfigFindings) -> None:
    layout, count = config.Distributed, config.setting("Model.num_layers")
    layers: int = count.value
    pp, per_rank, schedule = layout.pp_degree, layout.virtual_pp_degree, layout.pp_schedule
    names = ("Distributed.pp_degree", "Distributed.virtual_pp_degree", "Model.num_layers")
    if pp == 1:
        for path, value, default in (
            ("Distributed.pp_schedule", schedule, "1F1B"),
            ("Distributed.virtual_pp_degree", per_rank, 1),
            ("Distributed.pp_layers", layout.pp_layers, None),
        ):
            if value != default:
                findings.notice(f"{path}={value} has no effect with pp_degree=1", path, names[0])
        layout.pp_layers = None
        return
    stages = pp * per_rank
    degree, product = config.setting(names[0]), f" * virtual_pp_degree={per_rank} = {stages} stages"
    if not stages_fit(layers, pp, per_rank):
        choice = f"; choose at most {layers} stages"
        findings.problem([degree, f"{product} are more than ", count, choice], *names)
    elif layout.pp_layers is not None:
        _check_layer_counts(layout.pp_layers, stages, layers, findings)
    elif layers % stages:
        effect = "; the stages in the middle hold one layer more and the others wait for them"
        findings.notice([degree, f"{product} do not divide ", count, effect], *names)
    _check_schedule(config, findings)


def _check_layer_counts(
    per_stage: list[int], stages: int, layers: int, findings: ConfigFindings
) -> None:
    if len(per_stage) == stages and sum(per_stage) == layers:
        return
    findings.problem(
        [
            Setting("Distributed.pp_layers", per_stage),
            f" gives {sum(per_stage)} layers to {len(per_stage)} stages, but there are ",
            Setting("Model.num_layers", layers),
            f" and pp_degree * virtual_pp_degree = {stages} stages; list one number for each stage "
            "that add up, or leave it empty",
        ],
        "Distributed.pp_layers",
        "Distributed.pp_degree",
        "Distributed.virtual_pp_degree",
        "Model.num_layers",
    )


def _check_schedule(config: Config, findings: ConfigFindings) -> None:
    layout, micro_batches = config.Distributed, config.Engine.accumulate_steps
    pp, per_rank, schedule = layout.pp_degree, layout.virtual_pp_degree, layout.pp_schedule
    required = stages_per_rank(schedule)
    if required is not None and per_rank != required:
        findings.problem(
            [
                Setting("Distributed.virtual_pp_degree", per_rank),
                f" does not go with pp_schedule={schedule}, which holds {required} "
                f"stage{'s' * (required > 1)} per rank; set it to {required}",
            ],
            "Distributed.virtual_pp_degree",
            "Distributed.pp_schedule",
        )
    names = (
        "Data.batch_size.micro_batch_size",
        "Data.batch_size.local_batch_size",
        "Data.batch_size.global_batch_size",
        "Distributed.pp_degree",
        "Distributed.pp_schedule",
        "Distributed.virtual_pp_degree",
    )
    said = f"local_batch_size / micro_batch_size = {micro_batches} micro-batches"
    fewest = fewest_micro_batches(schedule, pp)
    if micro_batches < fewest:
        findings.problem(
            f"{said} are too few for pp_schedule={schedule} with pp_degree={pp}, which needs "
            f"{fewest}; lower micro_batch_size or raise local_batch_size",
            *names,
        )
    if not falls_into_rounds(schedule, pp, micro_batches):
        findings.problem(
            f"{said} do not fall into equal rounds over pp_degree={pp} for pp_schedule={schedule}; "
            f"choose a multiple of {pp}",
            *names,
        )


def _check_sharding(config: Config, findings: ConfigFindings) -> None:
    sharding = config.Distributed.sharding
    if sharding.sharding_degree > 1:
        _check_split_schedule(config, findings)
        return
    for path, value, default in (
        ("Distributed.sharding.sharding_stage", sharding.sharding_stage, 1),
        ("Distributed.sharding.sharding_offload", sharding.sharding_offload, False),
    ):
        if value != default:
            findings.notice(
                f"{path}={value} has no effect with sharding_degree=1",
                path,
                "Distributed.sharding.sharding_degree",
            )


def _check_growth(config: Config, findings: ConfigFindings) -> None:
    """A batch that grows must be one that the layout can cut at every size it has."""
    layout, sizes = config.Distributed, config.Data.batch_size
    ranks = layout.dp_degree * layout.sharding.sharding_degree
    names = ("Data.batch_size.rampup", "Data.batch_size.micro_batch_size", "Distributed.pp_degree")
    for size in config.batch_schedule.batches[:-1]:
        if size % (ranks * sizes.micro_batch_size):
            findings.problem(
                [
                    Setting("Data.batch_size.rampup", sizes.rampup),
                    f" has a step of {size} samples, which "
                    f"micro_batch_size={sizes.micro_batch_size} on {ranks} data ranks does not "
                    "divide; choose a start and an increment that are multiples of "
                    f"{ranks * sizes.micro_batch_size}",
                ],
                *names,
            )
            return
        micro_batches = size // (ranks * sizes.micro_batch_size)
        if layout.pp_degree > 1 and not schedule_fits(
            layout.pp_schedule, layout.pp_degree, layout.virtual_pp_degree, micro_batches
        ):
            findings.problem(
                [
                    Setting("Data.batch_size.rampup", sizes.rampup),
                    f" has a step of {micro_batches} micro-batches, which "
                    f"pp_schedule={layout.pp_schedule} cannot run with "
                    f"pp_degree={layout.pp_degree}; choose a start and an increment that are "
                    f"multiples of {layout.pp_degree * ranks * sizes.micro_batch_size}",
                ],
                *names,
                "Distributed.pp_schedule",
            )
            return


def _check_split_schedule(config: Config, findings: ConfigFindings) -> None:
    layout = config.Distributed
    stage, schedule = layout.sharding.sharding_stage, layout.pp_schedule
    if layout.pp_degree > 1 and not keeps_its_shards(schedule, stage):
        findings.problem(
            [
                Setting("Distributed.sharding.sharding_stage", stage),
                f" cannot be combined with pp_schedule={schedule}, which splits the backward pass "
                "and keeps weights and gradients whole until its end; choose sharding_stage 1, or "
                "a schedule such as 1F1B or Interleaved1F1B",
            ],
            "Distributed.sharding.sharding_stage",
            "Distributed.pp_schedule",
        )


def divisors(number: int, instead_of: int) -> str:
    """ "1, 2, 4 or 8": what divides `number`, the nearest ones when there are many."""
    divisors = [value for value in range(1, min(number, 4096) + 1) if number % value == 0]
    divisors = sorted(sorted(divisors, key=lambda value: abs(value - instead_of))[:8])
    if len(divisors) == 1:
        return str(divisors[0])
    return ", ".join(str(value) for value in divisors[:-1]) + f" or {divisors[-1]}"


# -- the arithmetic of legal layouts ------------------------------------------------------------

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
ONE_STAGE_SCHEDULES = ("1F1B", "GPipe")
ROUND_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")
SPLIT_SCHEDULES = ("InterleavedZeroBubble", *V_SCHEDULES)


def divides_model(mp: int, heads: int, ffn: int, kv_heads: int) -> bool:
    """Whether every model-parallel rank gets whole heads and an equal share of the ffn width.

    Key-value heads are divided too, or each is held by equally many ranks. The vocabulary need not
    divide: some ranks then hold one row more.
    """
    return heads % mp == 0 and ffn % mp == 0 and (kv_heads % mp == 0 or mp % kv_heads == 0)


def stages_fit(layers: int, pp: int, per_rank: int) -> bool:
    """Uneven stages are allowed, empty ones are not."""
    return pp * per_rank <= layers


def keeps_its_shards(schedule: str, sharding_stage: int) -> bool:
    """Schedules that split the backward pass need whole weights and gradients in between."""
    return sharding_stage == 1 or schedule not in SPLIT_SCHEDULES


def stages_per_rank(schedule: str) -> int | None:
    """How many stages a rank holds under `schedule`; None where the user chooses."""
    if schedule in V_SCHEDULES:
        return 2
    return 1 if schedule in ONE_STAGE_SCHEDULES else None


def fewest_micro_batches(schedule: str, pp: int) -> int:
    return {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)


def falls_into_rounds(schedule: str, pp: int, micro_batches: int) -> bool:
    """Interleaved schedules run the micro-batches in equal rounds over the stages."""
    return schedule not in ROUND_SCHEDULES or micro_batches % max(1, micro_batches // pp) == 0


def schedule_fits(schedule: str, pp: int, per_rank: int, micro_batches: int) -> bool:
    required = stages_per_rank(schedule)
    return (
        (required is None or per_rank == required)
        and micro_batches >= fewest_micro_batches(schedule, pp)
        and falls_into_rounds(schedule, pp, micro_batches)
    )
