"""A trained model ready to generate: configuration and checkpoint in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fourfold import native
from fourfold.config import Config
from fourfold.generate.completion import Continuation, check_stop, complete
from fourfold.generate.decoder import Decoder
from fourfold.generate.loading import load_trained
from fourfold.generate.sampling import Options
from fourfold.generate.session import PROMPT_TOKENS_AT_ONCE, Session
from fourfold.mesh import Mesh


def without_effect(config: Config) -> Iterator[str]:
    """Keys of FleetX's inference that have no effect here, if they are set to something else."""
    inference, save_load = config.Inference, config.Engine.save_load
    if inference.model_dir != save_load.output_dir:
        yield (
            f"Inference.model_dir={inference.model_dir} has no effect: nothing is exported, and "
            "the model is that of Engine.save_load.ckpt_dir, or the newest one of output_dir"
        )
    if inference.mp_degree != config.Distributed.mp_degree:
        yield (
            f"Inference.mp_degree={inference.mp_degree} has no effect: several processes share the "
            f"model as Distributed says; set Distributed.mp_degree={inference.mp_degree} for that"
        )


def slower_here(decoder: Decoder, config: Config) -> Iterator[str]:
    """What the compiled kernels would do, where they are not in use."""
    if decoder.fused is not None:
        return
    if decoder.device.type == "cpu" and (reason := native.why_not("decode")):
        yield f"generation is slower than it could be, without compiled kernels: {reason}"
    if config.Inference.draft_tokens:
        yield (
            f"Inference.draft_tokens={config.Inference.draft_tokens} has no effect: drafts are "
            "checked by the compiled kernels, which this model does not run on"
        )


class GenerationModule:
    """The model of a configuration, its weights from `ckpt_dir` (or the run's own output)."""

    def __init__(
        self,
        config: Config,
        on_notice: Callable[[str], None] = print,
        mesh: Mesh | None = None,
    ) -> None:
        """With a `mesh` of several ranks the model is spread over them as `Distributed` says, and
        every rank must make the same calls."""
        self.config = config
        # Invalid options are reported before any file is read.
        self.options = Options.of(config.Generation, config.Global.seed)
        check_stop(config.Generation.stop)
        for note in without_effect(config):
            on_notice(note)
        self.decoder: Decoder
        if mesh is not None and mesh.size > 1:
            from fourfold.generate.distributed import DistributedDecoder, load_distributed

            runner, self.tokenizer, self.path = load_distributed(config, mesh, on_notice)
            self.decoder = DistributedDecoder(runner)
        else:
            trained = load_trained(config, on_notice)
            self.tokenizer, self.path = trained.tokenizer, trained.path
            self.decoder = Decoder(trained.model, config.Inference.weights)
        for note in slower_here(self.decoder, config):
            on_notice(note)

    def generate(self, text: str) -> list[str]:
        """Prompt and continuation, once for each of `num_return_sequences`."""
        return [text + one.text for one in self.complete([text])[0]]

    def complete(
        self,
        texts: Sequence[str],
        on_text: Callable[[int, int, str], None] | None = None,
    ) -> list[list[Continuation]]:
        """The continuations of each text; `on_text` gets prompt, continuation and new text."""
        return complete(
            self.decoder,
            self.tokenizer,
            texts,
            self.options,
            stop=self.config.Generation.stop,
            on_text=on_text,
            draft_tokens=self.config.Inference.draft_tokens,
        )

    def session(
        self,
        slots: int,
        positions: int | None = None,
        prompt_tokens_at_once: int = PROMPT_TOKENS_AT_ONCE,
    ) -> Session:
        """For sequences that come and go. The module's decoder serves one session at a time."""
        return Session(
            self.decoder,
            eos_id=self.tokenizer.eos_id,
            slots=slots,
            positions=positions,
            vocab_size=self.tokenizer.vocab_size,
            prompt_tokens_at_once=prompt_tokens_at_once,
            draft_tokens=self.config.Inference.draft_tokens,
        )
