"""What `Data.dataset` of a configuration means: the sources of each part, and their samples.

With `input_dir` the three parts are cut from the same sources by `split`; with `train_data`,
`valid_data` and `test_data` each part is the whole of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.config import Config
from fourfold.config.recipe import Recipe, parse_recipe
from fourfold.data.agreement import check_agreement
from fourfold.data.dataset import TokenDataset
from fourfold.data.discovery import open_datasets
from fourfold.data.mixture import Mixture, Progress, Serving, Source
from fourfold.data.samples import Samples
from fourfold.data.split import PARTS, whole
from fourfold.errors import ConfigError, DataError


@dataclass(frozen=True)
class Part:
    """One part of the data before any index is built."""

    sources: list[Source]
    weighted: bool
    serving: Serving
    wanted: int

    @property
    def datasets(self) -> list[TokenDataset]:
        return [dataset for source in self.sources for dataset in source.datasets]

    @property
    def tokens(self) -> int:
        streams = [self.serving.stream(source.datasets) for source in self.sources]
        return sum(stream.tokens_per_epoch for stream in streams)

    def open(self, progress: Progress | None = None) -> Samples | Mixture:
        """Its samples, as a mixture wherever sources have to be counted one by one."""
        name = self.serving.part
        elastic_train = self.serving.order == "elastic" and name == "train"
        if (self.weighted or elastic_train) and (name == "train" or self.tokens > 0):
            return Mixture.open(self.sources, self.serving, self.wanted, progress)
        return self.serving.samples(self.datasets, self.wanted)


def parts_of(config: Config) -> dict[str, Part]:
    """Open the datasets of every part that has any. Reads no tokens and builds nothing."""
    dataset = config.Data.dataset
    wanted = wanted_samples(config)
    opened: dict[str, list[TokenDataset]] = {}
    parts = {}
    for name, value, split in _recipes(config):
        recipe = parse_recipe(value)
        parts[name] = Part(
            sources=_sources(recipe, opened, dataset.cache_dir),
            weighted=recipe.weights is not None,
            serving=Serving(
                split=split,
                part=name,
                seq_len=dataset.max_seq_len,
                seed=config.Global.seed,
                order=dataset.order,
                rounding=dataset.blend_rounding,
                cache_dir=dataset.cache_dir,
                split_rounding=dataset.split_rounding,
            ),
            wanted=wanted[name],
        )
    return parts


def part_of_recipe(text: str, num_samples: int, seq_len: int) -> Part:
    """The whole of what a recipe names, for training, without a configuration."""
    try:
        recipe = parse_recipe(text)
    except ValueError as error:
        raise DataError(f"{text}: {error}") from None
    serving = Serving(whole("train"), "train", seq_len, seed=0, order="megatron")
    return Part(_sources(recipe, {}), recipe.weights is not None, serving, num_samples)


def all_datasets(parts: dict[str, Part]) -> list[TokenDataset]:
    """Each dataset once, though several parts may read it."""
    return list({id(d): d for part in parts.values() for d in part.datasets}.values())


def check_parts(config: Config, parts: dict[str, Part]) -> list[str]:
    """Raise DataError for tokens the model or the tokenizer cannot mean; returns remarks."""
    dataset, vocab_size = config.Data.dataset, config.Model.vocab_size
    datasets = all_datasets(parts)
    remarks = check_agreement(
        datasets, vocab_size, config.Global.tokenizer, dataset.allow_tokenizer_mismatch
    )
    for one in datasets:
        one.check_ids(vocab_size)
    return remarks


def wanted_samples(config: Config) -> dict[str, int]:
    """How many samples of each part the whole run reads, counted as the originals do."""
    engine, batch = config.Engine, config.Data.batch_size.global_batch_size
    evaluations = engine.max_steps // engine.eval_freq + 1 if engine.eval_freq else 0
    return {
        "train": config.pace.consumed(engine.max_steps),
        "valid": batch * evaluations * engine.eval_iters,
        "test": batch * engine.test_iters,
    }


def _recipes(config: Config) -> Iterator[tuple[str, str | list[str], str | list[float]]]:
    """Part, what its key says, and the split that applies."""
    dataset = config.Data.dataset
    own = {"train": dataset.train_data, "valid": dataset.valid_data, "test": dataset.test_data}
    if dataset.input_dir is None and own["train"] is None:
        raise ConfigError(
            [
                "Data.dataset.input_dir is not set, so there is nothing to train on; name a "
                "directory that holds token files, e.g. -o Data.dataset.input_dir=./data, or give "
                "each part its own with train_data, valid_data and test_data"
            ]
        )
    for name in PARTS:
        value = own[name]
        if dataset.input_dir is not None:
            yield name, dataset.input_dir, dataset.split
        elif value is not None:
            yield name, value, whole(name)


def _sources(
    recipe: Recipe, opened: dict[str, list[TokenDataset]], cache_dir: str | None = None
) -> list[Source]:
    """A weighted source per path; without weights, all paths together are one source."""

    def datasets_at(path: str) -> list[TokenDataset]:
        if path not in opened:
            opened[path] = open_datasets(path)
            for dataset in opened[path]:
                dataset.cache_dir = cache_dir
        return opened[path]

    if recipe.weights is None:
        if not recipe.paths:
            raise DataError("no dataset was named: an empty list says nothing to read")
        datasets = [dataset for path in recipe.paths for dataset in datasets_at(path)]
        return [Source(str(recipe), 1.0, datasets)]
    return [
        Source(path, weight, datasets_at(path))
        for weight, path in zip(recipe.weights, recipe.paths)
    ]
