"""The inside of `helpers.fake_cuda`: torch's modes that make tensors fake and count waits."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import Config, load_config
from fourfold.engine.loop import Engine
from fourfold.engine.run_data import open_run_data
from fourfold.generate.decoder import Decoder
from fourfold.generate.distributed import DistributedDecoder
from fourfold.generate.sampling import Options
from fourfold.generate.session import Session
from fourfold.mesh import Mesh, fake_mesh
from fourfold.model import GPT, ModelShape
from fourfold.optim import build_optimizer
from fourfold.parallel import Runner, build_on_meta, build_runner, layout_of
from helpers.cuda_stand_in import queue
from helpers.fake_cuda import Request, Seen, Wait

DEVICE = torch.device("cuda", 0)
PACKAGE = "/fourfold/"
aten = torch.ops.aten
# Their result's shape depends on the numbers, so a GPU has to be asked for it.
ASK_FOR_A_SHAPE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}
COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}  # which argument is the source


def answer(request: Request, seen: Seen) -> None:
    config = load_config(request.yaml, request.overrides, world_size=request.world)
    with fake_mesh(layout_of(config), request.rank, DEVICE.type) as mesh:
        if request.generates:
            _generate(config, mesh, seen)
        else:
            _train(config, mesh, seen)


def _train(config: Config, mesh: Mesh, seen: Seen) -> None:
    """All steps of the run, by the loop itself."""
    data = open_run_data(config, mesh.layout, mesh.data_rank)
    with faked() as mode:
        runner = _build(config, mesh, mode)
        seen.off_device += _off_device(runner.masters)
        optimizer = build_optimizer(config, runner)
        engine = Engine(config, data, runner, optimizer)
        # Ranks that answer would be needed, and the group is left by `fake_mesh`.
        engine.resume = mesh.close = lambda: None  # type: ignore[method-assign]
        with counting(mode, lambda: engine.step, seen):
            engine.fit(save=False)
    lines = Path(config.Engine.save_load.output_dir, "metrics.jsonl")
    if lines.exists():  # the first rank's
        told = [json.loads(line) for line in lines.read_text().splitlines()]
        seen.logged += [one["step"] for one in told if one.get("kind") == "train"]


def _generate(config: Config, mesh: Mesh, seen: Seen) -> None:
    """A few tokens of three sequences of different lengths."""
    with faked() as mode:
        if mesh.size > 1:
            decoder: Decoder = DistributedDecoder(_build(config, mesh, mode, trains=False))
        else:
            with mode, DEVICE:
                model = GPT(ModelShape.of(config.Model))
            decoder = Decoder(model, config.Inference.weights)
        session = Session(decoder, eos_id=None, slots=4, vocab_size=config.Model.vocab_size)
        for number in range(3):
            options = Options(max_dec_len=4, top_k=5, repetition_penalty=1.0 + number / 2)
            session.add([1, *range(number)], options, number)
        steps = [0]
        with counting(mode, lambda: steps[0], seen):
            for steps[0] in range(1, 4):
                session.step()


def _build(config: Config, mesh: Mesh, mode: FakeTensorMode, *, trains: bool = True) -> Runner:
    meta = build_on_meta(config, mesh, DEVICE)
    with mode:
        meta.materialize()
    runner = build_runner(config, mesh, DEVICE, meta, trains=trains)
    if not trains:
        with mode:
            runner.after_load()
    return runner


def _off_device(parameters: dict[str, Any]) -> list[str]:
    return [name for name, one in parameters.items() if one.device != DEVICE]


# -- fake tensors for the GPU, real ones for the host ---------------------------------------------


@contextmanager
def faked() -> Iterator[FakeTensorMode]:
    mode, pinned = FakeTensorMode(allow_non_fake_inputs=True), Pinned()
    with ExitStack() as undoing:

        def replace(owner: Any, name: str, by: Any) -> None:
            undoing.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, by)

        # Or constants would be made on the device, which is said to be there.
        replace(FakeTensorMode, "avoid_device_init", property(lambda self: True))
        replace(Tensor, "pin_memory", lambda tensor, *device: pinned.mark(tensor.clone()))
        replace(Tensor, "is_pinned", lambda tensor, *device: tensor in pinned)
        # By name, for what is recomputed runs in a thread of autograd's, without `OnGpu`.
        replace(F, "scaled_dot_product_attention", _attention)
        with OnGpu(mode, pinned):
            yield mode


class Pinned:
    """Host memory that counts as pinned; kept, so that no other gets its address."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def mark(self, tensor: Tensor) -> Tensor:
        self.kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.kept


class OnGpu(TorchFunctionMode):
    """What is made on the GPU, or goes there, is fake; what is read from it is a one."""

    def __init__(self, mode: FakeTensorMode, pinned: Pinned) -> None:
        super().__init__()
        self.mode = mode
        self.pinned = pinned

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            queue.wait("tolist()")
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        if func is torch.tensor and _on_gpu(kwargs.get("device")):
            # In two steps, or the fake one would keep the numbers and compute with them.
            made = torch.tensor(*args, **kwargs | {"device": "cpu"})
            with self.mode:
                return made.to(kwargs["device"])
        pins = kwargs.pop("pin_memory", False)
        with self.mode if _goes_to_gpu(func, args, kwargs) else nullcontext():
            result = func(*args, **kwargs)
        return self.pinned.mark(result) if pins else result


def _goes_to_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is Tensor.to and _on_gpu(*args[1:2]):
        return True
    return func is Tensor.cuda or _on_gpu(kwargs.get("device"))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As a GPU chooses: the flash kernel for low precision without a mask, else the efficient
    one, which reads a mask as numbers of the queries' type. Shared keys and values are repeated:
    only shapes and devices matter here."""
    if enable_gqa:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    if attn_mask is not None:
        assert attn_mask.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
    elif q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal
    )[0]


def _on_gpu(place: Any = None) -> bool:
    return isinstance(place, torch.device | str) and torch.device(place).type == "cuda"


# -- counting waits -------------------------------------------------------------------------------


@contextmanager
def counting(mode: FakeTensorMode, step: Any, seen: Seen) -> Iterator[None]:
    def note(what: str, behind: int) -> None:
        seen.waits.append(Wait(step(), what, _line_of_the_package(), behind))

    before, queue.on_wait = queue.on_wait, note
    try:
        with Watch(mode, step, seen):
            yield
    finally:
        queue.on_wait = before


class Watch(TorchDispatchMode):
    """Above the fake mode: counts what the device is given and what makes the host wait for it."""

    def __init__(self, mode: FakeTensorMode, step: Any, seen: Seen) -> None:
        super().__init__()
        self.mode = mode
        self.step = step
        self.seen = seen
        self.counted_step = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)  # only a question
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].is_cuda:
                queue.wait("item()")
            return torch.ones((), dtype=args[0].dtype).item()
        if func in ASK_FOR_A_SHAPE and args[0].is_cuda:
            queue.wait(func.__name__)
        self._count()
        if func is aten._pin_memory.default:
            return args[0].clone()  # fake tensors have no such operation
        if func in COPIES:
            return self._copy(func, args, kwargs)
        # Torch's own operators make tensors too.
        with self.mode if _on_gpu(kwargs.get("device")) else nullcontext():
            return func(*args, **kwargs)

    def _count(self) -> None:
        if self.step() != self.counted_step:
            self.counted_step, self.seen.operations = self.step(), 0
        self.seen.operations += 1
        queue.queued += 1

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, target = args[COPIES[func]], args[0]
        to_host = func is aten.copy_.default and source.is_cuda and target.is_cpu
        if to_host and not isinstance(target, FakeTensor):
            # The host's memory is real and has no numbers to get.
            queue_copy(source, target, bool(kwargs.get("non_blocking", args[2:] == (True,))))
            return target.zero_()
        copied = func(*args, **kwargs)
        if source.device.type != copied.device.type and copied.device.type != "meta":
            waits_not = kwargs.get("non_blocking", False) or args[2:] == (True,)
            queue_copy(source, copied, bool(waits_not))
        return copied


def queue_copy(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    """A copy is asynchronous only if that is asked for and the host's memory is pinned."""
    host = source if source.is_cpu else target
    way = f"copy {source.device.type} to {target.device.type}"
    if not non_blocking:
        queue.wait(f"{way}, blocking")
    elif not host.is_pinned():
        queue.wait(f"{way}, not pinned")


def _line_of_the_package() -> str:
    for frame in reversed(traceback.extract_stack(limit=80)):
        if PACKAGE in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.rpartition(PACKAGE)[2]}:{frame.lineno} {frame.line}"
    return "outside the package"
