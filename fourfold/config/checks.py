"""Constraints between keys of a resolved configuration, and remarks on keys without effect.

Each message gives the values, the constraint they break and what to choose instead.
"""

from __future__ import annotations

from fourfold.config.entry import Findings
from fourfold.config.tree import Config

_TWO_STAGE_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
_ONE_STAGE_SCHEDULES = ("1F1B", "GPipe")


def check(config: Config, findings: Findings) -> None:
    _check_model(config, findings)
    _check_data(config, findings)
    _check_lengths(config, findings)
    _check_tensor_parallel(config, findings)
    _check_pipeline(config, findings)
    _check_sharding(config, findings)
    _check_fusion(config, findings)
    _check_learning_rate(config, findings)
    _check_generation(config, findings)
    _check_profiler(config, findings)


def _check_model(config: Config, findings: Findings) -> None:
    model = config.Model
    if model.hidden_size % model.num_attention_heads:
        findings.problem(
            f"Model.num_attention_heads={model.num_attention_heads} does not divide "
            f"Model.hidden_size={model.hidden_size}; "
            f"choose {_divisors(model.hidden_size, model.num_attention_heads)}",
            "Model.num_attention_heads",
            "Model.hidden_size",
        )
    ratio = model.ffn_hidden_size / model.hidden_size
    if ratio >= 8:
        findings.notice(
            f"Model.ffn_hidden_size={model.ffn_hidden_size} is {ratio:g} times "
            f"Model.hidden_size={model.hidden_size}; leave it empty for 4 times",
            "Model.ffn_hidden_size",
            "Model.hidden_size",
        )
    if not model.fuse_attn_qkv:
        findings.notice(
            "Model.fuse_attn_qkv=False has no effect: query, key and value are one projection, "
            "stored head by head",
            "Model.fuse_attn_qkv",
        )
    if model.type_vocab_size != type(model).model_fields["type_vocab_size"].default:
        findings.notice(
            f"Model.type_vocab_size={model.type_vocab_size} has no effect: a GPT has no "
            "token types",
            "Model.type_vocab_size",
        )
    eos = config.Data.dataset.eos_token_id
    if eos is not None and eos >= model.vocab_size:
        findings.problem(
            f"Data.dataset.eos_token_id={eos} is outside Model.vocab_size={model.vocab_size}; "
            f"choose an id below {model.vocab_size}",
            "Data.dataset.eos_token_id",
            "Model.vocab_size",
        )


def _check_data(config: Config, findings: Findings) -> None:
    dataset = config.Data.dataset
    own = {"train": dataset.train_data, "valid": dataset.valid_data, "test": dataset.test_data}
    names = [f"Data.dataset.{part}_data" for part, value in own.items() if value is not None]
    if names and dataset.input_dir is not None:
        findings.problem(
            f"{', '.join(names)} and Data.dataset.input_dir={dataset.input_dir} contradict: the "
            "one names each part's data, the other is cut into parts; set one of them to null",
            *names,
            "Data.dataset.input_dir",
        )
    elif names and own["train"] is None:
        findings.problem(
            f"{', '.join(names)} without Data.dataset.train_data leave nothing to train on; give "
            "train_data too, or input_dir in place of all",
            *names,
            "Data.dataset.train_data",
        )
    elif names and findings.given("Data.dataset.split"):
        findings.notice(
            "Data.dataset.split has no effect: with train_data each part is the whole of its own",
            "Data.dataset.split",
            *names,
        )


def _check_lengths(config: Config, findings: Findings) -> None:
    positions = config.Model.max_position_embeddings
    for path, length in (
        ("Data.dataset.max_seq_len", config.Data.dataset.max_seq_len),
        ("Eval.max_seq_len", config.Eval.max_seq_len),
    ):
        if length > positions and (path.startswith("Data") or findings.given(path)):
            findings.problem(
                f"{path}={length} is longer than Model.max_position_embeddings={positions}; "
                f"choose at most {positions}, or raise max_position_embeddings",
                path,
                "Model.max_position_embeddings",
            )
    if config.Eval.overlapping_eval > config.Eval.max_seq_len:
        findings.problem(
            f"Eval.overlapping_eval={config.Eval.overlapping_eval} would skip tokens between "
            f"windows of Eval.max_seq_len={config.Eval.max_seq_len}; "
            f"choose at most {config.Eval.max_seq_len}",
            "Eval.overlapping_eval",
            "Eval.max_seq_len",
            "Data.dataset.max_seq_len",
        )


def _check_tensor_parallel(config: Config, findings: Findings) -> None:
    model, mp = config.Model, config.Distributed.mp_degree
    for path, degree in (
        ("Distributed.mp_degree", mp),
        ("Inference.mp_degree", config.Inference.mp_degree),
    ):
        if model.num_attention_heads % degree and (path == "Distributed.mp_degree" or degree != mp):
            findings.problem(
                f"{path}={degree} does not divide "
                f"Model.num_attention_heads={model.num_attention_heads}; "
                f"choose {_divisors(model.num_attention_heads, degree)}",
                path,
                "Model.num_attention_heads",
            )
    if model.vocab_size % mp:
        padded = -(-model.vocab_size // (128 * mp)) * 128 * mp
        findings.problem(
            f"Distributed.mp_degree={mp} does not divide Model.vocab_size={model.vocab_size}; "
            f"pad the vocabulary, for example to {padded}",
            "Distributed.mp_degree",
            "Model.vocab_size",
        )
    if model.ffn_hidden_size % mp and findings.given("Model.ffn_hidden_size"):
        findings.problem(
            f"Distributed.mp_degree={mp} does not divide "
            f"Model.ffn_hidden_size={model.ffn_hidden_size}; choose a multiple of {mp}",
            "Model.ffn_hidden_size",
            "Distributed.mp_degree",
        )
    length = config.Data.dataset.max_seq_len
    if model.sequence_parallel and length % mp:
        findings.problem(
            f"Model.sequence_parallel needs Data.dataset.max_seq_len={length} to be a multiple of "
            f"Distributed.mp_degree={mp}; choose {-(-length // mp) * mp} or turn it off",
            "Data.dataset.max_seq_len",
            "Distributed.mp_degree",
            "Model.sequence_parallel",
        )


def _check_pipeline(config: Config, findings: Findings) -> None:
    layout, layers = config.Distributed, config.Model.num_layers
    pp, per_rank, schedule = layout.pp_degree, layout.virtual_pp_degree, layout.pp_schedule
    names = ("Distributed.pp_degree", "Distributed.virtual_pp_degree", "Model.num_layers")
    if pp == 1:
        for path, value, default in (
            ("Distributed.pp_schedule", schedule, "1F1B"),
            ("Distributed.virtual_pp_degree", per_rank, 1),
        ):
            if value != default:
                findings.notice(f"{path}={value} has no effect with pp_degree=1", path, names[0])
        return
    stages = pp * per_rank
    said = f"Distributed.pp_degree={pp} * virtual_pp_degree={per_rank}"
    if stages > layers:
        findings.problem(
            f"{said} = {stages} stages are more than Model.num_layers={layers}; "
            f"choose at most {layers} stages",
            *names,
        )
    elif layers % stages and per_rank > 1:
        findings.problem(
            f"{said} = {stages} stages do not divide Model.num_layers={layers}; "
            f"choose {_divisors(layers, stages)} stages",
            *names,
        )
    elif layers % stages:
        findings.notice(
            f"Distributed.pp_degree={pp} does not divide Model.num_layers={layers}; some stages "
            "hold one layer more and the others wait for them",
            *names,
        )
    _check_schedule(config, findings)


def _check_schedule(config: Config, findings: Findings) -> None:
    layout, micro_batches = config.Distributed, config.Engine.accumulate_steps
    pp, per_rank, schedule = layout.pp_degree, layout.virtual_pp_degree, layout.pp_schedule
    wanted = 2 if schedule in _TWO_STAGE_SCHEDULES else 1
    if schedule in _TWO_STAGE_SCHEDULES + _ONE_STAGE_SCHEDULES and per_rank != wanted:
        findings.problem(
            f"Distributed.virtual_pp_degree={per_rank} does not go with pp_schedule={schedule}, "
            f"which holds {wanted} stage{'s' * (wanted > 1)} per rank; set it to {wanted}",
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
    fewest = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
    if micro_batches < fewest:
        findings.problem(
            f"{said} are too few for pp_schedule={schedule} with pp_degree={pp}, which needs "
            f"{fewest}; lower micro_batch_size or raise local_batch_size",
            *names,
        )
    rounds = max(1, micro_batches // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and micro_batches % rounds:
        findings.problem(
            f"{said} do not fall into equal rounds over pp_degree={pp} for pp_schedule={schedule}; "
            f"choose a multiple of {pp}",
            *names,
        )


def _check_sharding(config: Config, findings: Findings) -> None:
    sharding = config.Distributed.sharding
    if sharding.sharding_degree > 1:
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


def _check_fusion(config: Config, findings: Findings) -> None:
    layout = config.Distributed
    degrees = {
        "mp_degree": layout.mp_degree,
        "pp_degree": layout.pp_degree,
        "sharding_degree": layout.sharding.sharding_degree,
    }
    above = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if config.Fused.tensor_fusion and above:
        findings.problem(
            f"Fused.tensor_fusion works on one device or with data parallelism alone, not with "
            f"{', '.join(above)}; turn it off",
            "Fused.tensor_fusion",
            "Distributed.mp_degree",
            "Distributed.pp_degree",
            "Distributed.sharding.sharding_degree",
        )


def _check_learning_rate(config: Config, findings: Findings) -> None:
    lr = config.Optimizer.lr
    if lr.max_lr < lr.min_lr:
        findings.notice(
            f"Optimizer.lr.max_lr={lr.max_lr:g} is below Optimizer.lr.min_lr={lr.min_lr:g}: after "
            "the warm-up the learning rate rises to min_lr",
            "Optimizer.lr.max_lr",
            "Optimizer.lr.min_lr",
        )


def _check_generation(config: Config, findings: Findings) -> None:
    generation = config.Generation
    if generation.min_dec_len > generation.max_dec_len:
        findings.problem(
            f"Generation.min_dec_len={generation.min_dec_len} is above "
            f"Generation.max_dec_len={generation.max_dec_len}; lower one or raise the other",
            "Generation.min_dec_len",
            "Generation.max_dec_len",
        )
    if generation.decode_strategy != "beam_search":
        return
    fewest = max(1, generation.num_return_sequences)
    if generation.num_beams < fewest:
        findings.problem(
            f"Generation.num_beams={generation.num_beams} is too few for "
            f"decode_strategy=beam_search with "
            f"num_return_sequences={generation.num_return_sequences}; choose at least {fewest}",
            "Generation.num_beams",
            "Generation.decode_strategy",
            "Generation.num_return_sequences",
        )


def _check_profiler(config: Config, findings: Findings) -> None:
    window = config.Profiler.scheduler
    if window is not None and (len(window) != 2 or window[0] >= window[1]):
        findings.problem(
            f"Profiler.scheduler={window} is not [start, end] with start below end; "
            "choose for example [1, 5]",
            "Profiler.scheduler",
        )


def _divisors(number: int, instead_of: int) -> str:
    """ "1, 2, 4 or 8": what divides `number`, the nearest ones when there are many."""
    divisors = [value for value in range(1, min(number, 4096) + 1) if number % value == 0]
    divisors = sorted(sorted(divisors, key=lambda value: abs(value - instead_of))[:8])
    if len(divisors) == 1:
        return str(divisors[0])
    return ", ".join(str(value) for value in divisors[:-1]) + f" or {divisors[-1]}"
