"""The data of a run: a data loader for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.config import Config
from fourfold.config.batch_schedule import LeftOut
from fourfold.config.recipe import Rounding
from fourfold.data import Loader, Mixture, Samples, TokenDataset, cache
from fourfold.data.splits import (
    SplitData,
    all_datasets,
    check_splits,
    open_splits,
    samples_of_run,
)
from fourfold.data.tokenizer_check import (
    check_checkpoint_tokenizer,
    find_end_of_text,
    find_tokenizer,
    tokenizer_of,
)
from fourfold.device import is_cpu
from fourfold.errors import DataError, UserError
from fourfold.mesh import Layout
from fourfold.tokenizer import Tokenizer


@dataclass
class RunData:
    """Samples and loaders of the parts that have data, and their sources."""

    config: Config
    data_ranks: tuple[int, int]  # this process, of how many
    parts: dict[str, SplitData]
    sources: list[TokenDataset]
    samples: dict[str, Samples | Mixture]
    loaders: dict[str, Loader]
    eos_token_id: int | None
    notices: list[str]

    @property
    def train_fingerprint(self) -> str:
        return self.samples["train"].fingerprint

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()

    def keep_tokenizer(self, output_dir: Path) -> list[str]:
        """Copy the tokenizer of the data beside the checkpoints, where `convert` and others look
        for it: a path in a configuration is valid only where the run was started, and until
        somebody moves the file. An existing copy is kept. Returns what the user should know."""
        file = output_dir / "tokenizer.json"
        try:
            if not file.exists() and (tokenizer := self.tokenizer()) is not None:
                tokenizer.save(file)
        except OSError as error:
            return [f"the tokenizer could not be copied to {file}: {error.strerror}"]
        return []

    def tokenizer(self) -> Tokenizer | None:
        """The one that made the data; where no manifest says which, the one that is named."""
        named = self.config.Global.tokenizer
        if named is not None:
            with suppress(UserError):
                tokenizer = Tokenizer.load(named)
                made_by = tokenizer_of(self.sources)
                if made_by is None or tokenizer.is_known_as(made_by):
                    return tokenizer
        found = (find_tokenizer(source)[0] for source in self.sources)
        return next((tokenizer for tokenizer in found if tokenizer is not None), None)

    # -- a checkpoint's share ---------------------------------------------------------------

    def state(self, consumed: int) -> dict[str, Any]:
        """What a checkpoint after `consumed` training samples keeps about the data."""
        train = self.samples["train"]
        return {
            "data_fingerprint": train.fingerprint,
            "tokenizer": tokenizer_of(self.sources),
            "masks": self._masks(),
            "split_rounding": self.config.Data.dataset.split_rounding,
            "mixture": train.state(self._place(consumed)) if isinstance(train, Mixture) else None,
            **({"left_out": left_out.to_list()} if (left_out := self.config.left_out) else {}),
        }

    def _place(self, consumed: int) -> int:
        """How far into the samples a run has come that read `consumed` of them."""
        return self.config.left_out.end_of(consumed)

    def _masks(self) -> dict[str, Any]:
        """The settings that decide which tokens are learnt from and attended to."""
        dataset = self.config.Data.dataset
        return {
            "eos_token_id": self.eos_token_id,
            "eod_mask_loss": dataset.eod_mask_loss,
            "reset_position_ids": dataset.reset_position_ids,
            "reset_attention_mask": dataset.reset_attention_mask,
        }

    def restore(self, state: dict[str, Any], consumed: int, checkpoint: str) -> list[str]:
        """Continue after a checkpoint with this state; returns what the user should know."""
        dataset = self.config.Data.dataset
        # The only rule there was, before checkpoints recorded which.
        self._check_split(state.get("split_rounding", "megatron_deepspeed"), checkpoint)
        notices = check_checkpoint_tokenizer(
            state.get("tokenizer"), self.sources, checkpoint, dataset.allow_tokenizer_mismatch
        )
        masks = self._masks()
        notices += [
            f"Data.dataset.{key} was {saved} in the saved run and is {masks[key]} now: the run "
            "learns something else from here on"
            for key, saved in state.get("masks", {}).items()
            if saved != masks.get(key)
        ]
        notices += self._keep_left_out(state, consumed)
        train = self.samples["train"]
        if dataset.order == "elastic" and isinstance(train, Mixture):
            return notices + self._go_on(train, state, self._place(consumed))
        if state["data_fingerprint"] != train.fingerprint:
            notices.append(
                "the training data, its split, its order, its weights or its length is not the "
                "saved run's: samples seen before may come again and others be missed. "
                "Data.dataset.order=elastic from the start of a run allows a change of weights "
                "or length"
            )
        return notices

    def _keep_left_out(self, state: dict[str, Any], consumed: int) -> list[str]:
        """Leave out what the saved run did, so that what it has read is what it counts."""
        saved = LeftOut.of(state.get("left_out") or [])
        place, now = saved.end_of(consumed), saved.joined(self.config.Data.dataset.leave_out)
        late = LeftOut(tuple(each for each in now.ranges if each[0] < place))
        if late != LeftOut(tuple(each for each in saved.ranges if each[0] < place)):
            raise DataError(
                f"Data.dataset.leave_out={self.config.Data.dataset.leave_out} names samples that "
                f"the saved run has read or passed already (the next one is {place}); name later "
                "ones, or start the run anew"
            )
        if now == self.config.left_out:
            return []
        self.config.leave_out(now)
        self.change_batches()
        return [f"left out by the saved run: {text_of_ranges(saved.ranges)}"]

    def _check_split(self, saved: Rounding, checkpoint: str) -> None:
        """Refuse to move documents between training, validation and test in mid-run."""
        for name, part in self.parts.items():
            before = replace(part.spec, split_rounding=saved)
            for dataset in part.datasets:
                was, now = before.documents(dataset), part.spec.documents(dataset)
                if was != now:
                    raise DataError(
                        f"{checkpoint} was trained with the documents {was.start} to {was.stop} of "
                        f"{dataset.path} as its {name} part, which are {now.start} to {now.stop} "
                        f"with Data.dataset.split_rounding={part.spec.split_rounding}; set "
                        f"Data.dataset.split_rounding={saved} to continue with the same data"
                    )

    def _go_on(self, train: Mixture, state: dict[str, Any], consumed: int) -> list[str]:
        saved = state.get("mixture") or {"start": 0, "served_before": {}, "sources": []}
        progress, notices = train.progress_after(saved, consumed)
        known = {entry["identity"] for entry in saved["sources"]} | set(saved["served_before"])
        if not known & {member.identity for member in train.members}:
            notices.append(
                "none of the training data, with this seed, split, order and sequence length, is "
                "the saved run's: every source begins at its first sample"
            )
        if progress != train.progress:
            self.loaders["train"].close()
            self.samples["train"] = self.parts["train"].open(progress)
            self.loaders["train"] = self._loader("train")
        return notices

    def change_batches(self) -> None:
        """Serve the training batches that the configuration has now, from as many samples as the
        run will read; to be called before any batch of these is taken."""
        train = replace(self.parts["train"], num_samples=samples_of_run(self.config)["train"])
        opened = self.samples["train"]
        progress = opened.progress if isinstance(opened, Mixture) else None
        self.loaders["train"].close()
        self.parts["train"], self.samples["train"] = train, train.open(progress)
        self.loaders["train"] = self._loader("train")

    def _loader(self, part: str) -> Loader:
        dataset, (rank, size) = self.config.Data.dataset, self.data_ranks
        return Loader(
            self.samples[part],
            self.config.batch_schedule
            if part == "train"
            else self.config.Data.batch_size.global_batch_size,
            eos_token_id=self.eos_token_id,
            eod_mask_loss=dataset.eod_mask_loss,
            reset_position_ids=dataset.reset_position_ids,
            reset_attention_mask=dataset.reset_attention_mask,
            rank=rank,
            size=size,
            prefetch=dataset.prefetch,
            vocab_size=self.config.Model.vocab_size,
            pin_memory=not is_cpu(self.config.Global.device),
        )


def text_of_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """The samples of these ranges, in words."""
    named = [f"{first} to {stop - 1}" if stop - first > 1 else f"{first}" for first, stop in ranges]
    return f"samples {', '.join(named)}"


def open_run_data(
    config: Config, layout: Layout, data_rank: int = 0, checked: bool = False
) -> RunData:
    """Open and check the data, and size each part for the whole run as the originals do.

    With `checked` another rank of the same start has just done so, and nothing is read again.
    """
    with cache.trusting(checked):
        return _open(config, layout, data_rank)


def _open(config: Config, layout: Layout, data_rank: int) -> RunData:
    parts = open_splits(config)
    notices, sources = check_splits(config, parts), all_datasets(parts)
    if layout.world_size > 1 and not cache.is_trusted():
        for source in sources:
            source.keep_fingerprint()
    eos_token_id, origin = find_end_of_text(config, sources)
    if left_out := LeftOut.of(config.Data.dataset.leave_out):
        notices.append(f"left out of the training data: {text_of_ranges(left_out.ranges)}")
    notices.append(f"end-of-text id: {eos_token_id} ({origin})")
    feeds = RunData(
        config,
        (data_rank, layout.data_degree),
        parts,
        sources,
        samples={name: part.open() for name, part in parts.items()},
        loaders={},
        eos_token_id=eos_token_id,
        notices=notices,
    )
    feeds.loaders = {name: feeds._loader(name) for name in parts}
    return feeds
