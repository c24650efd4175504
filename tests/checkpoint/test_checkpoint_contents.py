"""What is saved comes back, bit for bit; what does not fit is refused with its name."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_samples import bits, blank, same_bits, sample, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import checkpoint
from fourfold.checkpoint import tensor_files
from fourfold.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any small shape, any bits: NaN payloads, infinities, negative zeros too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


tensor_names = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12
).filter(lambda name: name.isprintable() and name != "__metadata__")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(tensor_names, any_tensor(), max_size=6),
    st.dictionaries(st.text(), json_values, max_size=4),
)
def test_any_tensors_and_any_state_come_back_bit_for_bit(tensors, state) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint.save(folder, 3, tensors, state)
        assert checkpoint.verify(directory) == []
        into = blank(tensors)
        loaded = checkpoint.load(directory, into)
        assert same_bits(into, tensors)
        assert loaded == state == checkpoint.read_state(directory)
        assert json.dumps(loaded) == json.dumps(state)  # 1 is not 1.0, nor -0.0 0.0
        assert checkpoint.tensor_names(directory) == {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }


def test_every_bit_pattern_of_the_sixteen_bit_floats(tmp_path: Path) -> None:
    every = torch.arange(65536).to(torch.int32).to(torch.uint16)
    tensors = {f"model.{d}": every.clone().view(d) for d in (torch.float16, torch.bfloat16)}
    into = blank(tensors)
    checkpoint.load(checkpoint.save(tmp_path, 0, tensors, {}), into)
    assert same_bits(into, tensors)


def test_parameters_views_and_transposes(tmp_path: Path) -> None:
    flat = torch.randn(24)
    square = torch.randn(3, 4)
    weight = torch.nn.Parameter(torch.randn(3, 3))
    given_ = {"a.x": flat[:12], "a.y": flat[12:].view(3, 4), "a.t": square.t(), "a.p": weight}
    directory = checkpoint.save(tmp_path, 1, given_, {})
    flat_into, square_into = torch.zeros(24), torch.zeros(3, 4)
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    into = {
        "a.x": flat_into[:12],
        "a.y": flat_into[12:].view(3, 4),
        "a.t": square_into.t(),
        "a.p": parameter,
    }
    checkpoint.load(directory, into)
    assert torch.equal(flat_into, flat) and torch.equal(square_into, square)
    assert torch.equal(parameter, weight) and parameter.grad_fn is None and parameter.requires_grad


def test_large_groups_are_cut_into_several_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 100)
    tensors = {f"model.w{i}": torch.randn(1 + 7 * i) for i in range(8)}
    tensors |= {"optim.step": torch.tensor(9), "nodot": torch.ones(2)}
    directory = checkpoint.save(tmp_path, 1, tensors, {})
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len([name for name in names if name.startswith("model-")]) > 2
    assert "optim-00001-of-00001.safetensors" in names
    into = blank(tensors)
    checkpoint.load(directory, into)
    assert same_bits(into, tensors)


def test_the_model_alone_can_be_read_even_if_the_optimizer_is_damaged(tmp_path: Path) -> None:
    tensors = sample(5)
    directory = checkpoint.save(tmp_path, 5, tensors, state_of(5))
    (directory / "optim-00001-of-00001.safetensors").unlink()
    model = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    into = blank(model)
    assert checkpoint.load(directory, into, prefix="model.") == state_of(5)
    assert same_bits(into, model)
    with pytest.raises(CheckpointError, match=r"optim-00001-of-00001\.safetensors is missing"):
        checkpoint.load(directory, blank(tensors))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_our_files_for_any_layout(tmp_path: Path) -> None:
    tensors = {k: v for k, v in sample(5).items() if v.numel() > 0}
    directory = checkpoint.save(tmp_path, 5, tensors, {})
    into = blank(tensors)
    reader = dcp.HuggingFaceStorageReader(str(directory))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert same_bits(into, tensors)


def test_files_are_as_readable_as_their_directory(tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path, 1, sample(1), {})
    modes = {path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {directory.stat().st_mode & 0o666}


def test_a_checkpoint_copied_elsewhere_still_loads(tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path / "run", 5, sample(5), state_of(5))
    copy = shutil.copytree(directory, tmp_path / "best")
    into = blank(sample(5))
    assert checkpoint.resume(copy, into, pytest.fail) == (copy, state_of(5))
    assert same_bits(into, sample(5))


def test_version_2_stays_readable() -> None:
    golden = Path(__file__).parent / "golden_v2" / "step_7"
    into = blank(sample(7))
    assert checkpoint.verify(golden) == []
    assert checkpoint.load(golden, into) == state_of(7)
    assert same_bits(into, sample(7))


def test_a_run_on_eight_ranks_saved_in_version_2_stays_readable() -> None:
    """Written under pp2 x sharding2 (stage 3) x mp2, so most tensors are in four pieces."""
    golden = Path(__file__).parent / "golden_v2" / "step_2"
    assert checkpoint.verify(golden) == []
    names = checkpoint.tensor_names(golden)
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    assert checkpoint.load(golden, into)["consumed_samples"] == 16
    digest = hashlib.sha256()
    for name in sorted(into):
        digest.update(name.encode() + into[name].numpy().tobytes())
    # Of the whole tensors, as the code that wrote them loaded them.
    expected = "ec168352ad2395748d41b0b9125d0e985739e385f411fa8fe3d733f4140340bf"
    assert len(into) == 84 and digest.hexdigest() == expected


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path, 1, sample(1), {})
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 4, "more": []}))
    with pytest.raises(
        CheckpointError, match="format version 4; this Fourfold reads versions 2 and 3"
    ):
        checkpoint.load(directory, blank(sample(1)))


# --- another model ----------------------------------------------------------------------------


def test_all_misfits_are_reported_together(tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path, 1, sample(1), {})
    into = blank(sample(1))
    before = {name: bits(tensor).clone() for name, tensor in into.items()}
    del into["optim.step"]
    into["model.embed.weight"] = torch.zeros(3, 4)
    into["model.norm.weight"] = torch.zeros(4, dtype=torch.float16)
    into |= {f"model.new{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(checkpoint.MismatchError) as caught:
        checkpoint.load(directory, into)
    message = str(caught.value)
    assert "5 not in it: model.new0, model.new1, model.new2, ..." in message
    assert "1 only in it: optim.step" in message
    assert "model.embed.weight (there float32 [2, 4], here float32 [3, 4])" in message
    assert "model.norm.weight (there bfloat16 [4], here float16 [4])" in message
    untouched = "optim.embed.weight.exp_avg"
    assert torch.equal(bits(into[untouched]), before[untouched])


def test_resume_does_not_look_for_an_older_checkpoint_that_happens_to_fit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, sample(1), {})
    checkpoint.save(tmp_path, 2, {"model.other": torch.ones(1)}, {})
    with pytest.raises(checkpoint.MismatchError, match="step_2 is of another model"):
        checkpoint.resume(tmp_path, blank(sample(1)), pytest.fail)


# --- what cannot be saved is refused before anything is written -------------------------------


@pytest.mark.parametrize(
    ("tensors", "state"),
    [
        ({"": torch.ones(1)}, {}),
        ({"__metadata__": torch.ones(1)}, {}),
        ({"a\nb": torch.ones(1)}, {}),
        ({"a": torch.ones(2, dtype=torch.complex64)}, {}),
        ({"a": torch.eye(2).to_sparse()}, {}),
        ({"a": torch.ones(2, dtype=torch.uint16)}, {}),
        ({"a": torch.ones(1)}, {"tuple": (1, 2)}),
        ({"a": torch.ones(1)}, {"key": {1: 2}}),
        ({"a": torch.ones(1)}, {"nan": float("nan")}),
        ({"a": torch.ones(1)}, {"path": Path("x")}),
    ],
)
def test_unsavable_things_are_refused(tmp_path: Path, tensors, state) -> None:
    with pytest.raises((TypeError, ValueError)):
        checkpoint.save(tmp_path, 1, tensors, state)
    assert list(tmp_path.iterdir()) == []


def test_tied_tensors_must_be_given_once(tmp_path: Path) -> None:
    tied = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"model\.head and model\.embed are the same memory"):
        checkpoint.save(tmp_path, 1, {"model.embed": tied, "model.head": tied}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper than 64"):
        checkpoint.save(tmp_path, 1, sample(1), {"deep": deep})
    with pytest.raises(CheckpointError, match="at most"):
        checkpoint.save(tmp_path, 1, sample(1), {"long": "x" * (17 << 20)})
    assert list(tmp_path.iterdir()) == []
