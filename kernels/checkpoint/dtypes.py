"""The names that safetensors gives to torch's dtypes."""

import torch

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""safetensors name to torch dtype. The packed F4 and F6 types are valid in a header but are not loaded here."""

if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7 and newer
    TORCH_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
