"""What a run reads: the datasets behind `Data.dataset`, and a loader for each split."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config import Config
from fourfold.data import Loader, Samples, TokenDataset, open_datasets
from fourfold.errors import ConfigError
from fourfold.mesh import Layout

GPT2_EOS = 50256


@dataclass
class Feeds:
    """Loaders for train, valid and test, and what they stand on."""

    sources: list[TokenDataset]
    samples: dict[str, Samples]
    loaders: dict[str, Loader]
    eos_token_id: int | None

    @property
    def train_fingerprint(self) -> str:
        return self.samples["train"].fingerprint

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()


def open_feeds(config: Config, layout: Layout, data_rank: int = 0) -> Feeds:
    """Open and check the data, and size each split for the whole run as the originals do."""
    dataset, engine = config.Data.dataset, config.Engine
    if dataset.input_dir is None:
        raise ConfigError(
            [
                "Data.dataset.input_dir is not set, so there is nothing to train on; name a "
                "directory that holds token files, e.g. -o Data.dataset.input_dir=./data"
            ]
        )
    sources = open_datasets(dataset.input_dir)
    for source in sources:
        source.check_ids(config.Model.vocab_size, dataset.cache_dir)
    global_batch = config.Data.batch_size.global_batch_size
    evaluations = engine.max_steps // engine.eval_freq + 1 if engine.eval_freq else 0
    wanted = {
        "train": global_batch * engine.max_steps,
        "valid": global_batch * evaluations * engine.eval_iters,
        "test": global_batch * engine.test_iters,
    }
    eos_token_id = dataset.eos_token_id
    if eos_token_id is None:
        eos_token_id = _eos_of(sources, config.Model.vocab_size)
    samples = {
        part: Samples.open(
            sources,
            split=dataset.split,
            part=part,
            seq_len=dataset.max_seq_len,
            num_samples=count,
            seed=config.Global.seed,
            order=dataset.order,
            cache_dir=dataset.cache_dir,
        )
        for part, count in wanted.items()
    }
    loaders = {
        part: Loader(
            samples[part],
            global_batch,
            eos_token_id=eos_token_id,
            eod_mask_loss=dataset.eod_mask_loss,
            rank=data_rank,
            size=layout.data_degree,
            prefetch=dataset.prefetch,
        )
        for part in wanted
    }
    return Feeds(sources, samples, loaders, eos_token_id)


def _eos_of(sources: list[TokenDataset], vocab_size: int) -> int | None:
    """The end-of-text id: what the data's own manifest says, else GPT-2's if the model has it."""
    for source in sources:
        if source.manifest is not None:
            return int(source.manifest["tokenizer"]["eos_id"])
    return GPT2_EOS if vocab_size > GPT2_EOS else None
