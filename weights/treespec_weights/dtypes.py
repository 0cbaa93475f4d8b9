"""Dtypes by their names in safetensors headers, which GGUF files share for tensors that are not in blocks."""

import torch

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that models compute in, by torch's names."""
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch dtype -> safetensors' name."""
LOADABLE = ("F64", "F32", "F16", "BF16")
"""Dtypes of tensors that can be loaded as weights."""
