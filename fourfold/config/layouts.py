"""Which products of the four axes are legal for a model and a batch, and the nearest that are.

Each message gives the values, the constraint they break and what to choose instead.
"""

from __future__ import annotations

from fourfold.config.entry import Findings
from fourfold.config.legal import (
    falls_into_rounds,
    fewest_micro_batches,
    keeps_its_shards,
    schedule_fits,
    stages_fit,
    stages_per_rank,
)
from fourfold.config.tree import Config


def check_layout(config: Config, findings: Findings) -> None:
    _check_tensor_parallel(config, findings)
    _check_pipeline(config, findings)
    _check_sharding(config, findings)
    _check_growth(config, findings)


def _check_tensor_parallel(config: Config, findings: Findings) -> None:
    model, mp = config.Model, config.Distributed.mp_degree
    if model.num_attention_heads % mp:
        findings.problem(
            f"Distributed.mp_degree={mp} does not divide "
            f"Model.num_attention_heads={model.num_attention_heads}; "
            f"choose {divisors(model.num_attention_heads, mp)}",
            "Distributed.mp_degree",
            "Model.num_attention_heads",
        )
    if model.vocab_size % mp:
        padded = -(-model.vocab_size // (128 * mp)) * 128 * mp
        findings.notice(
            f"Distributed.mp_degree={mp} does not divide Model.vocab_size={model.vocab_size}; some "
            f"ranks hold one row more. A vocabulary padded to {padded} would be faster",
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
            ("Distributed.pp_layers", layout.pp_layers, None),
        ):
            if value != default:
                findings.notice(f"{path}={value} has no effect with pp_degree=1", path, names[0])
        layout.pp_layers = None
        return
    stages = pp * per_rank
    said = f"Distributed.pp_degree={pp} * virtual_pp_degree={per_rank}"
    if not stages_fit(layers, pp, per_rank):
        findings.problem(
            f"{said} = {stages} stages are more than Model.num_layers={layers}; "
            f"choose at most {layers} stages",
            *names,
        )
    elif layout.pp_layers is not None:
        _check_given_layers(layout.pp_layers, stages, layers, findings)
    elif layers % stages:
        findings.notice(
            f"{said} = {stages} stages do not divide Model.num_layers={layers}; the stages in the "
            "middle hold one layer more and the others wait for them",
            *names,
        )
    _check_schedule(config, findings)


def _check_given_layers(given: list[int], stages: int, layers: int, findings: Findings) -> None:
    if len(given) == stages and sum(given) == layers:
        return
    findings.problem(
        f"Distributed.pp_layers={given} gives {sum(given)} layers to {len(given)} stages, but "
        f"there are Model.num_layers={layers} and pp_degree * virtual_pp_degree = {stages} stages; "
        "list one number for each stage that add up, or leave it empty",
        "Distributed.pp_layers",
        "Distributed.pp_degree",
        "Distributed.virtual_pp_degree",
        "Model.num_layers",
    )


def _check_schedule(config: Config, findings: Findings) -> None:
    layout, micro_batches = config.Distributed, config.Engine.accumulate_steps
    pp, per_rank, schedule = layout.pp_degree, layout.virtual_pp_degree, layout.pp_schedule
    wanted = stages_per_rank(schedule)
    if wanted is not None and per_rank != wanted:
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


def _check_sharding(config: Config, findings: Findings) -> None:
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


def _check_growth(config: Config, findings: Findings) -> None:
    """A batch that grows must be one that the layout can cut at every size it has."""
    layout, sizes = config.Distributed, config.Data.batch_size
    ranks = layout.dp_degree * layout.sharding.sharding_degree
    names = ("Data.batch_size.rampup", "Data.batch_size.micro_batch_size", "Distributed.pp_degree")
    for size in config.pace.batches[:-1]:
        if size % (ranks * sizes.micro_batch_size):
            findings.problem(
                f"Data.batch_size.rampup={sizes.rampup} has a step of {size} samples, which "
                f"micro_batch_size={sizes.micro_batch_size} on {ranks} data ranks does not divide; "
                f"choose a start and an increment that are multiples of "
                f"{ranks * sizes.micro_batch_size}",
                *names,
            )
            return
        micro_batches = size // (ranks * sizes.micro_batch_size)
        if layout.pp_degree > 1 and not schedule_fits(
            layout.pp_schedule, layout.pp_degree, layout.virtual_pp_degree, micro_batches
        ):
            findings.problem(
                f"Data.batch_size.rampup={sizes.rampup} has a step of {micro_batches} "
                f"micro-batches, which pp_schedule={layout.pp_schedule} cannot run with "
                f"pp_degree={layout.pp_degree}; choose a start and an increment that are multiples "
                f"of {layout.pp_degree * ranks * sizes.micro_batch_size}",
                *names,
                "Distributed.pp_schedule",
            )
            return


def _check_split_schedule(config: Config, findings: Findings) -> None:
    layout = config.Distributed
    stage, schedule = layout.sharding.sharding_stage, layout.pp_schedule
    if layout.pp_degree > 1 and not keeps_its_shards(schedule, stage):
        findings.problem(
            f"Distributed.sharding.sharding_stage={stage} cannot hold with pp_schedule={schedule}, "
            "which splits the backward pass and keeps weights and gradients whole until its end; "
            "choose sharding_stage 1, or a schedule such as 1F1B or Interleaved1F1B",
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
