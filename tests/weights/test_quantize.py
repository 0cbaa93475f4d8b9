"""Quantising a weight, and checkpoints in others' layouts: each against its published formula, computed apart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.conversions import loaded
from tests.helpers.models import edit_config, make_llama, new_folder
from treespec_weights import CheckpointError, UnsupportedModelError
from treespec_weights.quant_config import scheme_of
from treespec_weights.quantize import Quantized, compressed_tensors, dequantize, group_of, packed, quantize, unpacked

SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
Write = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # tensors that are stored, and the weight they mean


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group", "steps"), [(8, None, 127), (8, 32, 127), (4, 64, 8), (4, 32, 8)])
def test_the_rule(dtype: torch.dtype, bits: int, group: int | None, steps: int) -> None:
    weight = numbers(7, 128).to(dtype)
    weight[2] = 0.0
    values, scale, zero = quantize(weight, bits, group)
    groups = weight.float().unflatten(1, (-1, group or 128))
    expected = (groups.abs().amax(2) / steps).to(dtype)
    expected[expected == 0] = 1
    assert zero is None and torch.equal(scale, expected)
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    whole = torch.round(groups / expected.float()[..., None]).clamp(least, most).flatten(1)
    assert torch.equal((unpacked(values) if bits == 4 else values).float(), whole)
    error = (dequantize(Quantized(values, scale)) - weight.float()).abs()
    assert (error <= scale.float().repeat_interleave(group or 128, 1) * (0.51 if bits == 8 else 1.1)).all()


def test_packing() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(unpacked(packed(values)), values)
    assert packed(values)[0, 0].item() == 0x10  # -8 and -7: 0 and 1, the first in the low bits


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", 0, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight[3, 5] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantize(weight, 8)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"up_proj.weight': the weight has NaN or infinite"):
            loaded(folder, quantization="int8")


def test_groups() -> None:
    assert [group_of(sizes) for sizes in ({256, 1024}, {256, 704}, {96, 32})] == [128, 64, 32]
    with pytest.raises(ValueError, match="100 inputs are not whole groups of 64"):
        quantize(numbers(4, 100), 4, 64)


def words_of(numbers: Tensor, bits: int, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """int32: the numbers along a dimension, those of each word in this order from the lowest bits on."""
    parts = numbers.movedim(dim, -1).unflatten(-1, (-1, 32 // bits))[..., list(order)[: 32 // bits]]
    return (parts << bits * torch.arange(32 // bits)).sum(-1).to(torch.int32).movedim(-1, dim)


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}


def spread(values: Tensor, dim: int) -> Tensor:
    """One for each member of groups of 32, in float64."""
    return values.double().repeat_interleave(32, dim)


def check_layout(scheme: dict[str, Any], write: Write) -> None:
    """Stores the layers' matrices as `write` says and loads them: each is the weight that was meant, the rest as is."""
    folder = make_llama(new_folder("layout") / "m", 0, torch.bfloat16, **SIZES)
    plain, meant, stored = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in plain.items():
        if ".layers." in name and tensor.dim() == 2:
            parts, meant[name] = write(name, tensor)
            stored |= parts
        else:
            stored[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    found = loaded(edit_config(folder, quantization_config=scheme))
    for name, weight in meant.items():
        param = f"layers.0.{name.split('.')[-2].removesuffix('_proj')}"
        if f"{param}_scale" in found:
            parts = Quantized(found[param], found[f"{param}_scale"], found.get(f"{param}_zero"))
            torch.testing.assert_close(dequantize(parts), weight.float(), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found[param], weight)
    rest = {"embed": "model.embed_tokens", "layers.0.attn_norm": "model.layers.0.input_layernorm"}
    for param, name in (rest | {"lm_head": "lm_head", "final_norm": "model.norm"}).items():
        assert torch.equal(found[param], plain[f"{name}.weight"])


def compressed_scheme(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": ["Linear"], "weights": said | weights, "input_activations": None}
    scheme = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    return scheme | {"config_groups": {"g": group}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed(bits: int, symmetric: bool) -> None:
    """Word j of a row: sum of (q[8 j + i] + 8) << 4 i; zero points in words along the outputs."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (out, inputs), half = weight.shape, 1 << (bits - 1)
        q, zero = torch.randint(-half, half, (out, inputs)), torch.randint(-half, half, (out, inputs // 32))
        scale = (torch.rand(out, inputs // 32) + 0.1).bfloat16()
        parts = {"packed": words_of(q + half, bits, 1), "scale": scale, "shape": torch.tensor([out, inputs])}
        parts |= {} if symmetric else {"zero_point": words_of(zero + half, bits, 0)}
        meant = (q - (0 if symmetric else spread(zero, 1))) * spread(scale, 1)
        return {f"{name}_{part}": tensor for part, tensor in parts.items()}, meant

    check_layout(compressed_scheme(num_bits=bits, symmetric=symmetric), write)


def test_compressed_tensors_of_int8() -> None:
    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        scale = torch.rand(len(q), 1)
        return {name: q, f"{name}_scale": scale}, q.double() * scale

    check_layout(compressed_scheme(format="int-quantized", num_bits=8, strategy="channel", group_size=None), write)


def gptq(bits: int = 4, less: int = 1, **more: Callable[[int, int], Tensor]) -> Write:
    """Words run along the inputs, those of zero points along the outputs; these are one less in the first format.

    Further tensors are made from the numbers of outputs and inputs.
    """

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (out, inputs), groups = weight.shape, weight.shape[1] // 32
        q, zero = torch.randint(0, 1 << bits, (inputs, out)), torch.randint(less, 1 << bits, (groups, out))
        zero, scale = zero.clamp(max=200), (torch.rand(groups, out) + 0.1).half()
        parts = {"qweight": words_of(q, bits, 0), "qzeros": words_of(zero - less, bits, 1), "scales": scale}
        parts["g_idx"] = (torch.arange(inputs) // 32).to(torch.int32)
        parts |= {part: make(out, inputs) for part, make in more.items()}
        return named(name, parts), ((q - spread(zero, 0)) * spread(scale, 0)).T

    return write


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, version: str) -> None:
    said = {"bits": bits, "sym": False, "checkpoint_format": version, "desc_act": False}
    check_layout(GPTQ | said, gptq(bits, int(version == "gptq")))


@pytest.mark.parametrize("zero_point", [True, False])
def test_awq(zero_point: bool) -> None:
    """Word (k, j) holds outputs 8 j + 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (out, inputs), groups = weight.shape, weight.shape[1] // 32
        q, zero = torch.randint(0, 16, (inputs, out)), torch.randint(0, 16, (groups, out))
        zero = zero if zero_point else torch.full_like(zero, 8)
        scale = (torch.rand(groups, out) + 0.1).half()
        parts = {"qweight": words_of(q, 4, 1, order), "scales": scale}
        parts |= {"qzeros": words_of(zero, 4, 1, order)} if zero_point else {}
        return named(name, parts), ((q - spread(zero, 0)) * spread(scale, 0)).T

    check_layout(AWQ | {"group_size": 32, "zero_point": zero_point, "version": "gemm"}, write)


@pytest.mark.parametrize("how", ["tensor", "channel", "block", "fp8", "fp8 block"])
def test_fp8(how: str) -> None:
    """q * scale, of the tensor, the output, or the block; "weight_scale_inv" is multiplied with too."""
    rows, columns = 48, 32

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q, (out, inputs) = (weight.float() * 3).to(torch.float8_e4m3fn), weight.shape
        if "block" in how:
            scale = torch.rand(-(-out // rows), -(-inputs // columns)) + 0.1
            whole = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :inputs]
        else:
            scale = whole = torch.rand((out, 1) if how == "channel" else (1,)) + 0.1
        return {name: q, name + ("_scale_inv" if how == "fp8 block" else "_scale"): scale}, q.float() * whole

    if how.startswith("fp8"):
        said: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        said |= {"weight_block_size": [rows, columns]} if how == "fp8 block" else {}
    else:
        options = {"num_bits": 8, "type": "float", "strategy": how, "group_size": None}
        block = {"block_structure": [rows, columns]} if how == "block" else {}
        said = compressed_scheme(format="float-quantized", **options, **block)
    check_layout(said, write)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "'quant_method' is None"),
        ({"quant_method": "bitsandbytes"}, "'quant_method' is 'bitsandbytes'"),
        (AWQ | {"bits": 8}, "'bits' is 8.*supported: 4"),
        (AWQ | {"version": "gemv"}, "'version' is 'gemv'"),
        (AWQ | {"modules_to_not_convert": [1]}, r"'modules_to_not_convert' is \[1\]"),
        (GPTQ | {"group_size": 0}, "'group_size' is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format'"),
        (GPTQ | {"lm_head": True}, "'lm_head' is True"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "'activation_scheme' is 'static'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size'"),
        (compressed_scheme(num_bits=2), "'num_bits' is 2"),
        (compressed_scheme(strategy="tensor_group"), "'strategy' is 'tensor_group'"),
        (compressed_scheme(actorder="group"), "'actorder' is 'group'"),
        (compressed_scheme(format="nvfp4-pack-quantized"), "'format' is 'nvfp4-pack-quantized'"),
        (compressed_scheme() | {"config_groups": {}}, "'config_groups' is {}"),
        (compressed_scheme() | {"ignore": ["re:("]}, r"'ignore' is 're:\('"),
    ],
)
def test_what_is_not_covered_is_refused_by_its_key(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        scheme_of({"quantization_config": said})


@pytest.mark.parametrize(
    ("packing", "dtype", "sizes", "message"),
    [
        (None, None, None, "'.*_zero_point': missing"),
        (1, torch.int32, None, r"its zero points are torch.int32 \["),
        (1, torch.int8, [1, 2], r"weight_shape says \[1, 2\], expected"),
        (1, torch.int8, None, r"up_proj.weight_packed': missing"),
        (1, torch.int8, None, r"down_proj.weight_scale': has shape \[64, 3\], expected \[64, 4\]"),
    ],
)
def test_zero_points_and_sizes_that_contradict_the_weight(
    packing: int | None, dtype: torch.dtype, sizes: list[int] | None, message: str
) -> None:
    """Each would be read as other numbers than were meant."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = compressed_tensors(name, quantize(weight, 4, 32))
        if packing:
            zeros = torch.zeros(len(weight) // packing, weight.shape[1] // 32, dtype=dtype)
            parts[f"{name}_zero_point"] = zeros
        if "down" in name and "down" in message:
            parts[f"{name}_scale"] = parts[f"{name}_scale"][:, :-1]
        if "up" in name and "up" in message:
            del parts[f"{name}_packed"]
        return parts | ({f"{name}_shape": torch.tensor(sizes)} if sizes else {}), weight

    with pytest.raises(CheckpointError, match=message):
        check_layout(compressed_scheme(symmetric=False), write)


def test_gptq_with_tensors_that_the_model_has_not() -> None:
    """AutoGPTQ writes biases of zeros beside every weight; others are refused, and so are groups in another order."""
    said = GPTQ | {"sym": False}
    check_layout(said, gptq(bias=lambda out, _: torch.zeros(out).half()))
    with pytest.raises(CheckpointError, match="has no such bias, and it is not zero"):
        check_layout(said, gptq(bias=lambda out, _: torch.full((out,), 0.5).half()))
    unordered = gptq(g_idx=lambda _, inputs: (torch.arange(inputs).flip(0) // 32).to(torch.int32))
    with pytest.raises(CheckpointError, match=r"do not follow the inputs' order \(g_idx, act-order\)"):
        check_layout(said | {"desc_act": True}, unordered)


def test_fp8_that_a_dtype_has_no_room_for() -> None:
    scheme = scheme_of({"quantization_config": {"quant_method": "fp8"}})
    assert scheme is not None
    parts = {"a.weight": torch.full((2, 4), 448.0).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(1000.0)}
    with pytest.raises(ValueError, match=r"4.48e\+05 is infinite in torch.float16"):
        scheme.read("a.weight", 2, 4, parts.get, torch.float16)
    assert scheme.read("a.weight", 2, 4, parts.get, torch.bfloat16).isfinite().all()  # type: ignore[union-attr]
