"""The train, valid and test data that `Data.dataset` names: the sources of each, and their samples.

With `input_dir` the three parts are cut from the same sources by `split`; with `train_data`,
`valid_data` and `test_data` each part is the whole of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold import storage
from fourfold.config import Config
from fourfold.config.recipe import Recipe, parse_recipe
from fourfold.data.datasets import TokenDataset
from fourfold.data.mixture import DataSource, Mixture, MixtureProgress
from fourfold.data.readers import open_datasets
from fourfold.data.samples import PARTS, Samples, SampleSpec, SampleStream, whole_split
from fourfold.data.tokenizer_check import check_agreement
from fourfold.errors import ConfigError, DataError


@dataclass(frozen=True)
class SplitData:
    """The data of one part before any index is built, and the samples a run needs of it."""

    sources: list[DataSource]
    weighted: bool
    spec: SampleSpec
    num_samples: int

    @property
    def datasets(self) -> list[TokenDataset]:
        return [dataset for source in self.sources for dataset in source.datasets]

    @property
    def streams(self) -> list[SampleStream]:
        return [SampleStream.from_sources(source.datasets, self.spec) for source in self.sources]

    def open(self, progress: MixtureProgress | None = None) -> Samples | Mixture:
        """Its samples, as a mixture wherever sources have to be counted one by one."""
        is_train = self.spec.part == "train"
        if (self.weighted or (is_train and self.spec.order == "elastic")) and (
            is_train or any(stream.tokens_per_epoch for stream in self.streams)
        ):
            return Mixture.open(self.sources, self.spec, self.num_samples, progress)
        return Samples.open(self.datasets, self.spec, self.num_samples)


def open_splits(config: Config) -> dict[str, SplitData]:
    """Open the datasets of every part that has any. Reads no tokens and builds nothing."""
    dataset = config.Data.dataset
    storage.limit_blocks(int(dataset.block_cache_gb * 1e9))
    num_samples = samples_of_run(config)
    opened: dict[str, list[TokenDataset]] = {}
    splits = {}
    for name, value, split in _recipes(config):
        recipe = parse_recipe(value)
        splits[name] = SplitData(
            sources=_sources(recipe, opened, dataset.cache_dir),
            weighted=recipe.weights is not None,
            spec=SampleSpec(
                split=split,
                part=name,
                seq_len=dataset.max_seq_len,
                seed=config.Global.seed,
                order=dataset.order,
                blend_rounding=dataset.blend_rounding,
                cache_dir=dataset.cache_dir,
                split_rounding=dataset.split_rounding,
            ),
            num_samples=num_samples[name],
        )
    return splits


def open_recipe(text: str, num_samples: int, seq_len: int) -> SplitData:
    """All that a recipe names as training data, without a configuration."""
    try:
        recipe = parse_recipe(text)
    except ValueError as error:
        raise DataError(f"{text}: {error}") from None
    spec = SampleSpec(whole_split("train"), "train", seq_len, seed=0)
    return SplitData(_sources(recipe, {}), recipe.weights is not None, spec, num_samples)


def all_datasets(splits: dict[str, SplitData]) -> list[TokenDataset]:
    """Each dataset once, though several parts may read it."""
    return list({id(d): d for split in splits.values() for d in split.datasets}.values())


def check_splits(config: Config, splits: dict[str, SplitData]) -> list[str]:
    """Raise DataError for tokens outside the model's or the tokenizer's vocabulary; returns
    notices."""
    dataset, vocab_size = config.Data.dataset, config.Model.vocab_size
    datasets = all_datasets(splits)
    remarks = check_agreement(
        datasets, vocab_size, config.Global.tokenizer, dataset.allow_tokenizer_mismatch
    )
    for one in datasets:
        one.check_ids(vocab_size)
    return remarks


def samples_of_run(config: Config) -> dict[str, int]:
    """How many samples of each part the whole run reads, counted as the originals do."""
    engine, batch = config.Engine, config.Data.batch_size.global_batch_size
    evaluations = engine.max_steps // engine.eval_freq + 1 if engine.eval_freq else 0
    train = config.batch_schedule.consumed(engine.max_steps)
    if config.Data.dataset.order == "elastic":
        # Other orders would change with the length; there the loader makes up for what is missing.
        train += len(config.left_out)
    return {
        "train": train,
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
            yield name, value, whole_split(name)


def _sources(
    recipe: Recipe, opened: dict[str, list[TokenDataset]], cache_dir: str | None = None
) -> list[DataSource]:
    """A weighted source per path; without weights, all paths together are one source."""

    def datasets_at(path: str) -> list[TokenDataset]:
        if path not in opened:
            opened[path] = open_datasets(path)
            for dataset in opened[path]:
                dataset.cache_dir = cache_dir
        return opened[path]

    if recipe.weights is None:
        if not recipe.paths:
            raise DataError("no dataset was named: the list is empty")
        datasets = [dataset for path in recipe.paths for dataset in datasets_at(path)]
        return [DataSource(str(recipe), 1.0, datasets)]
    return [
        DataSource(path, weight, datasets_at(path))
        for weight, path in zip(recipe.weights, recipe.paths)
    ]
