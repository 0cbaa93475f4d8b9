"""Quantised models of every family: what they compute, and that their trees have the bits of plain decoding."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.exactness import differences, run
from tests.helpers.families import TYPICAL, VOCAB, Case, make_model
from tests.helpers.models import OracleDrafter, greedy, open_llm, random_prompts
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.models.test_decoder_parity import our_logits
from treespec import SpecConfig
from treespec.errors import KernelError
from treespec_kernels.tuning.testing import assert_close
from treespec_weights import ModelShape, family_of, read_config
from treespec_weights.load import expected_tensors, quantizable
from treespec_weights.quantize import dequantize, quantize

pytestmark = pytest.mark.slow

LENGTHS, TOKENS = (3, 40, 70), 12


def dequantised_copy(source: Path, folder: Path) -> Path:
    """The checkpoint with what its matrices are after int8, in float32."""
    config = read_config(source)
    rules = family_of(config, source)
    shape = ModelShape.from_hf(config, rules, source)
    tensors, matrices = load_file(source / "model.safetensors"), quantizable(shape)
    for placement in expected_tensors(shape, rules):
        if any(param in matrices for param in placement.params):
            parts = placement.unpack(tensors[placement.name])
            parts = {name: dequantize(quantize(part, 8)) for name, part in parts.items()}
            tensors[placement.name] = placement.pack(parts).contiguous()
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@needs_compiler
@pytest.mark.parametrize("case", TYPICAL.values(), ids=TYPICAL)
def test_int8(case: Case, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", case, 3)
    plain = open_llm(source, quantization="int8")
    assert plain.stats()["frozen"]["quantization"] == "int8"
    (tokens,) = random_prompts((70,), vocab=VOCAB)
    held = open_llm(dequantised_copy(source, tmp_path / "held"))
    assert_close(our_logits(plain, tokens), our_logits(held, tokens), max_error=1e-3, rms_error=2e-5)
    prompts = random_prompts(LENGTHS, vocab=VOCAB)
    expected = run(plain, prompts, greedy(TOKENS))
    drafter = OracleDrafter(expected.sequences, 6, vocab=VOCAB)
    tree = run(open_llm(source, [drafter], quantization="int8"), prompts, greedy(TOKENS), SpecConfig(nodes=16))
    assert not (found := differences(expected, tree)), "\n".join(found[:10])
    assert tree.acceptance_length > 2


def test_compiled_passes_of_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="compile=True"):
        open_llm(make_model(tmp_path / "model", TYPICAL["gemma2"], 3), quantization="int8", compile=True)
