"""The table of tensor types and the table of file types (quant-formats.md#table-of-types).

Every other module asks this one for sizes, ids and names; a new type is one new row here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ikpy.errors import FileFormatError, UsageError


@dataclass(frozen=True)
class TensorType:
    """One tensor type: how its rows are cut into blocks and how many bytes they take.

    Shapes are in file order: ``shape[0]`` is the row length ne0, ``shape[1]`` the number of rows ne1.
    ``interleave`` rows share one block group (1 = plain); ``block_bytes`` is per row, so a group block holds
    ``interleave * block_bytes`` bytes. ``plain_partner`` names the plain type used where an interleaved one
    is not allowed, ``repack_of`` the type whose rows are permuted into this one (empty = none).
    ``requires_imatrix``: "E" the encoder refuses to run without an importance matrix, "P" only the
    quantization program refuses, "" optional, "-" not used. ``compute_scale_factor`` multiplies the row scale
    in inference but not in the file-format decode (quant-formats.md#factor-of-the-row-scale).
    """

    name: str
    id: int
    block_elements: int
    block_bytes: int
    row_extra_bytes: int = 0
    interleave: int = 1
    plain_partner: str = ""
    repack_of: str = ""
    requires_imatrix: str = ""
    activation_only: bool = False
    tensor_extra_bytes: int = 0
    compute_scale_factor: float = 1.0

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight without the row header."""
        return 8 * self.block_bytes / self.block_elements

    @property
    def is_quantized(self) -> bool:
        """Whether elements are coded in blocks rather than stored as numbers of their own."""
        return self.block_elements > 1 and self.name != "bf16_r16"

    def keeps_apart(self, parts: Sequence[int]) -> bool:
        """Whether no row group holds rows of two of the joined matrices whose rows are ``parts``."""
        return all(rows % self.interleave == 0 for rows in parts)

    def row_nbytes(self, ne0: int) -> int:
        """Bytes of one row of ``ne0`` elements; FileFormatError if ne0 is no multiple of the block."""
        if ne0 < 0 or ne0 % self.block_elements:
            raise FileFormatError(
                f"row length {ne0} is not a multiple of {self.block_elements}, the block of type {self.name}"
            )
        return self.row_extra_bytes + self.block_bytes * (ne0 // self.block_elements)

    def tensor_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of ``shape`` (ne0 first); FileFormatError if the type cannot hold that shape."""
        ne0, ne1 = shape[0], shape[1] if len(shape) > 1 else 1
        if self.tensor_extra_bytes:  # one scale for the whole tensor: its rows are not separate units
            return self.row_nbytes(math.prod(shape)) + self.tensor_extra_bytes
        if ne1 % self.interleave:
            raise FileFormatError(
                f"{ne1} rows are not a multiple of {self.interleave}, the row group of type {self.name}"
            )
        return self.row_nbytes(ne0) * math.prod(shape[1:])


@dataclass(frozen=True)
class FileType:
    """One value of ``general.file_type``.

    ``base_type`` is the tensor type given where no other rule applies, ``display`` the name shown in logs and
    tables, ``after_repack`` the file type of the repacked file (-1 = unchanged). Two names may share one id.
    """

    name: str
    id: int
    base_type: str
    display: str
    after_repack: int = -1
    selectable: bool = True


# name, id, block elements, block bytes, row header bytes, interleave, plain partner, repack of, imatrix.
# i2_s codes 128 elements in 32 bytes and ends with one scale for the tensor; bf16_r16 works on column pairs.
_ROWS = (
    TensorType("f32", 0, 1, 4, 0, 1, "", "", "-"),
    TensorType("f16", 1, 1, 2, 0, 1, "", "", "-"),
    TensorType("q4_0", 2, 32, 18, 0, 1, "", "", ""),
    TensorType("q4_1", 3, 32, 20, 0, 1, "", "", ""),
    TensorType("q5_0", 6, 32, 22, 0, 1, "", "", ""),
    TensorType("q5_1", 7, 32, 24, 0, 1, "", "", ""),
    TensorType("q8_0", 8, 32, 34, 0, 1, "", "", "-"),
    TensorType("q8_1", 9, 32, 36, 0, 1, "", "", "-", activation_only=True),
    TensorType("q2_K", 10, 256, 84, 0, 1, "", "", ""),
    TensorType("q3_K", 11, 256, 110, 0, 1, "", "", ""),
    TensorType("q4_K", 12, 256, 144, 0, 1, "", "", ""),
    TensorType("q5_K", 13, 256, 176, 0, 1, "", "", ""),
    TensorType("q6_K", 14, 256, 210, 0, 1, "", "", ""),
    TensorType("q8_K", 15, 256, 296, 0, 1, "", "", "-", activation_only=True),
    TensorType("iq2_xxs", 16, 256, 66, 0, 1, "", "", "E"),
    TensorType("iq2_xs", 17, 256, 74, 0, 1, "", "", "E"),
    TensorType("iq3_xxs", 18, 256, 98, 0, 1, "", "", ""),
    TensorType("iq1_s", 19, 256, 50, 0, 1, "", "", "E"),
    TensorType("iq4_nl", 20, 32, 18, 0, 1, "", "", ""),
    TensorType("iq3_s", 21, 256, 110, 0, 1, "", "", ""),
    TensorType("iq2_s", 22, 256, 82, 0, 1, "", "", "P"),
    TensorType("iq4_xs", 23, 256, 136, 0, 1, "", "", ""),
    TensorType("i8", 24, 1, 1, 0, 1, "", "", "-"),
    TensorType("i16", 25, 1, 2, 0, 1, "", "", "-"),
    TensorType("i32", 26, 1, 4, 0, 1, "", "", "-"),
    TensorType("i64", 27, 1, 8, 0, 1, "", "", "-"),
    TensorType("f64", 28, 1, 8, 0, 1, "", "", "-"),
    TensorType("iq1_m", 29, 256, 56, 0, 1, "", "", "P"),
    TensorType("bf16", 30, 1, 2, 0, 1, "", "", "-"),
    TensorType("q4_0_4x4", 31, 32, 18, 0, 4, "q4_0", "", "-"),
    TensorType("q4_0_4x8", 32, 32, 18, 0, 4, "q4_0", "", "-"),
    TensorType("q4_0_8x8", 33, 32, 18, 0, 8, "q4_0", "", "-"),
    TensorType("tq1_0", 34, 256, 54, 0, 1, "", "", "-"),
    TensorType("tq2_0", 35, 256, 66, 0, 1, "", "", "-"),
    TensorType("i2_s", 36, 128, 32, 0, 1, "", "", "-", tensor_extra_bytes=32),
    TensorType("mxfp4", 39, 32, 17, 0, 1, "", "", "-"),
    TensorType("nvfp4", 40, 64, 36, 0, 1, "", "", ""),
    TensorType("q1_0_g128", 41, 128, 18, 0, 1, "", "", "-"),
    TensorType("q8_0_x4", 97, 32, 34, 0, 1, "", "", "-", activation_only=True),
    TensorType("q8_1_x4", 98, 32, 36, 0, 1, "", "", "-", activation_only=True),
    TensorType("q8_2_x4", 99, 32, 36, 0, 1, "", "", "-", activation_only=True),
    TensorType("q6_0", 133, 32, 26, 0, 1, "", "", ""),
    TensorType("iq1_bn", 134, 64, 13, 2, 1, "", "", "-"),
    TensorType("iq2_bn", 135, 64, 16, 4, 1, "", "", "-"),
    TensorType("q8_K64", 136, 64, 68, 0, 1, "", "", "-", activation_only=True),
    TensorType("iq2_k", 137, 256, 76, 0, 1, "", "", ""),
    TensorType("iq3_k", 138, 256, 110, 0, 1, "", "", ""),
    TensorType("iq4_k", 139, 256, 144, 0, 1, "", "", ""),
    TensorType("iq5_k", 140, 256, 176, 0, 1, "", "", ""),
    TensorType("iq6_k", 141, 256, 212, 0, 1, "", "", ""),
    TensorType("iq4_ks", 144, 256, 136, 4, 1, "", "", ""),
    TensorType("iq2_ks", 145, 256, 70, 2, 1, "", "", ""),
    TensorType("iq4_kss", 146, 256, 128, 4, 1, "", "", ""),
    TensorType("q8_K16", 147, 64, 64, 20, 1, "", "", "-", activation_only=True),
    TensorType("q8_K32", 148, 256, 296, 0, 1, "", "", "-", activation_only=True),
    TensorType("q8_KR8", 149, 256, 296, 0, 1, "", "", "-", activation_only=True),
    TensorType("q8_K128", 150, 128, 140, 0, 1, "", "", "-", activation_only=True),
    TensorType("q8_KV", 151, 32, 32, 8, 1, "", "", "-"),
    TensorType("iq5_ks", 152, 256, 168, 4, 1, "", "", ""),
    TensorType("iq2_kt", 153, 256, 68, 4, 1, "", "", "P", compute_scale_factor=1.05),
    TensorType("iq3_kt", 154, 256, 100, 4, 1, "", "", "", compute_scale_factor=1.01),
    TensorType("iq4_kt", 155, 256, 128, 4, 1, "", "", ""),
    TensorType("iq3_ks", 156, 256, 102, 2, 1, "", "", ""),
    TensorType("iq2_kl", 157, 256, 86, 2, 1, "", "", ""),
    TensorType("iq1_kt", 158, 256, 56, 4, 1, "", "", "P"),
    TensorType("q4_0_r8", 202, 32, 18, 0, 8, "q4_0", "q4_0", ""),
    TensorType("q5_0_r4", 206, 32, 22, 0, 4, "q5_0", "q5_0", ""),
    TensorType("q8_0_r8", 208, 32, 34, 0, 8, "q8_0", "q8_0", "-"),
    TensorType("q2_k_r4", 210, 256, 84, 0, 4, "q2_K", "q2_K", ""),
    TensorType("q3_k_r4", 211, 256, 110, 0, 4, "q3_K", "q3_K", ""),
    TensorType("q4_k_r4", 212, 256, 144, 0, 4, "q4_K", "q4_K", ""),
    TensorType("q5_k_r4", 213, 256, 176, 0, 4, "q5_K", "q5_K", ""),
    TensorType("q6_k_r4", 214, 256, 210, 0, 4, "q6_K", "q6_K", ""),
    TensorType("iq2_xxs_r4", 216, 256, 66, 0, 4, "iq2_xxs", "iq2_xxs", "E"),
    TensorType("iq2_xs_r4", 217, 256, 74, 0, 4, "iq2_xs", "iq2_xs", "E"),
    TensorType("iq3_xxs_r4", 218, 256, 98, 0, 4, "iq3_xxs", "iq3_xxs", ""),
    TensorType("iq1_s_r4", 219, 32, 6, 2, 4, "iq1_s", "", "P"),
    TensorType("iq4_nl_r4", 220, 32, 18, 0, 4, "iq4_nl", "iq4_nl", ""),
    TensorType("iq3_s_r4", 221, 256, 110, 0, 4, "iq3_s", "iq3_s", ""),
    TensorType("iq2_s_r4", 222, 256, 82, 0, 4, "iq2_s", "iq2_s", "P"),
    TensorType("iq4_xs_r8", 223, 256, 136, 0, 8, "iq4_xs", "iq4_xs", ""),
    TensorType("iq1_m_r4", 229, 32, 7, 2, 4, "iq1_m", "", "P"),
    TensorType("bf16_r16", 230, 2, 4, 0, 16, "bf16", "bf16", "-"),
    TensorType("q6_0_r4", 233, 32, 26, 0, 4, "q6_0", "q6_0", ""),
    TensorType("iq2_bn_r4", 335, 64, 16, 4, 4, "iq2_bn", "iq2_bn", "-"),
    TensorType("iq2_k_r4", 337, 256, 76, 0, 4, "iq2_k", "iq2_k", ""),
    TensorType("iq3_k_r4", 338, 256, 110, 0, 4, "iq3_k", "iq3_k", ""),
    TensorType("iq4_k_r4", 339, 256, 144, 0, 4, "iq4_k", "iq4_k", ""),
    TensorType("iq5_k_r4", 340, 256, 176, 0, 4, "iq5_k", "iq5_k", ""),
    TensorType("iq4_ks_r4", 344, 256, 136, 4, 4, "iq4_ks", "iq4_ks", ""),
    TensorType("iq5_ks_r4", 352, 256, 168, 4, 4, "iq5_ks", "iq5_ks", ""),
    TensorType("mxfp4_r8", 353, 32, 17, 0, 8, "mxfp4", "mxfp4", "-"),
    TensorType("q8_k_r16", 397, 256, 258, 0, 16, "", "q8_K", "-"),
    TensorType("q8_KV_r8", 398, 32, 32, 4, 8, "q8_KV", "q8_KV", "-"),
    TensorType("q8_k_r8", 399, 256, 258, 0, 8, "q8_0", "q8_K", "-"),
)

# name, id, base tensor type, displayed name. The first row of an id is the one shown.
_FTYPE_ROWS = (
    FileType("F32", 0, "f32", "all F32"),
    FileType("F16", 1, "f16", "F16"),
    FileType("Q4_0", 2, "q4_0", "Q4_0", after_repack=202),
    FileType("Q4_1", 3, "q4_1", "Q4_1"),
    FileType("Q8_0", 7, "q8_0", "Q8_0", after_repack=207),
    FileType("Q5_0", 8, "q5_0", "Q5_0", after_repack=208),
    FileType("Q5_1", 9, "q5_1", "Q5_1"),
    FileType("Q2_K", 10, "q2_K", "Q2_K - Medium", after_repack=210),
    FileType("Q3_K_S", 11, "q3_K", "Q3_K - Small", after_repack=211),
    FileType("Q3_K_M", 12, "q3_K", "Q3_K - Medium", after_repack=211),
    FileType("Q3_K", 12, "q3_K", "Q3_K - Medium", after_repack=211),
    FileType("Q3_K_L", 13, "q3_K", "Q3_K - Large", after_repack=211),
    FileType("Q4_K_S", 14, "q4_K", "Q4_K - Small", after_repack=214),
    FileType("Q4_K_M", 15, "q4_K", "Q4_K - Medium", after_repack=214),
    FileType("Q4_K", 15, "q4_K", "Q4_K - Medium", after_repack=214),
    FileType("Q5_K_S", 16, "q5_K", "Q5_K - Small", after_repack=216),
    FileType("Q5_K_M", 17, "q5_K", "Q5_K - Medium", after_repack=216),
    FileType("Q5_K", 17, "q5_K", "Q5_K - Medium", after_repack=216),
    FileType("Q6_K", 18, "q6_K", "Q6_K", after_repack=218),
    FileType("IQ2_XXS", 19, "iq2_xxs", "IQ2_XXS - 2.0625 bpw", after_repack=219),
    FileType("IQ2_XS", 20, "iq2_xs", "IQ2_XS - 2.3125 bpw", after_repack=220),
    FileType("Q2_K_S", 21, "q2_K", "Q2_K - Small"),
    FileType("IQ3_XS", 22, "iq3_s", "IQ3_XS - 3.3 bpw"),
    FileType("IQ3_XXS", 23, "iq3_xxs", "IQ3_XXS - 3.0625 bpw", after_repack=223),
    FileType("IQ1_S", 24, "iq1_s", "IQ1_S - 1.5625 bpw", after_repack=224),
    FileType("IQ4_NL", 25, "iq4_nl", "IQ4_NL - 4.5 bpw", after_repack=225),
    FileType("IQ3_S", 26, "iq3_s", "IQ3_S - 3.4375 bpw", after_repack=226),
    FileType("IQ3_M", 27, "iq3_s", "IQ3_S mix - 3.66 bpw"),
    FileType("IQ2_S", 28, "iq2_xs", "IQ2_S - 2.5 bpw"),
    FileType("IQ2_M", 29, "iq2_s", "IQ2_M - 2.7 bpw", after_repack=229),
    FileType("IQ4_XS", 30, "iq4_xs", "IQ4_XS - 4.25 bpw", after_repack=230),
    FileType("IQ1_M", 31, "iq1_m", "IQ1_M - 1.75 bpw", after_repack=231),
    FileType("BF16", 32, "bf16", "BF16", after_repack=232),
    FileType("Q4_0_4_4", 33, "q4_0_4x4", "Q4_0_4_4"),
    FileType("Q4_0_4_8", 34, "q4_0_4x8", "Q4_0_4_8"),
    FileType("Q4_0_8_8", 35, "q4_0_8x8", "Q4_0_8_8"),
    FileType("MXFP4", 38, "mxfp4", "MXFP4 - 4.25 bpw"),
    FileType("NVFP4", 39, "nvfp4", "NVFP4 - 4.5 bpw"),
    FileType("Q1_0_G128", 41, "q1_0_g128", "Q1_0_G128", selectable=False),
    FileType("Q6_0", 135, "q6_0", "Q6_0", after_repack=335),
    FileType("IQ1_BN", 136, "iq1_bn", "IQ1_BN - 1.625 bpw Bitnet"),
    FileType("IQ2_BN", 137, "iq2_bn", "IQ2_BN - 2.00 bpw Bitnet", after_repack=337),
    FileType("IQ2_K", 138, "iq2_k", "IQ2_K - 2.375 bpw", after_repack=338),
    FileType("IQ3_K", 139, "iq3_k", "IQ3_K - 3.4325 bpw", after_repack=339),
    FileType("IQ4_K", 140, "iq4_k", "IQ4_K - 4.5 bpw", after_repack=340),
    FileType("IQ5_K", 141, "iq5_k", "IQ5_K - 5.5 bpw", after_repack=341),
    FileType("IQ6_K", 142, "iq6_k", "IQ6_K - 6.6 bpw"),
    FileType("IQ4_KS", 145, "iq4_ks", "IQ4_KS - 4.25 bpw", after_repack=345),
    FileType("IQ3_KL", 146, "iq3_k", "IQ3_KL - 4 bpw"),
    FileType("IQ2_KS", 147, "iq2_ks", "IQ2_KS - 2.1875 bpw"),
    FileType("IQ4_KSS", 148, "iq4_kss", "IQ4_KSS - 4.0 bpw"),
    FileType("Q8_KV", 149, "q8_KV", "Q8_KV", after_repack=398),
    FileType("IQ5_KS", 150, "iq5_ks", "IQ5_KS - 5.25 bpw", after_repack=350),
    FileType("IQ2_KT", 151, "iq2_kt", "IQ2_KT - 2.125 bpw"),
    FileType("IQ3_KT", 152, "iq3_kt", "IQ3_KT - 3.125 bpw"),
    FileType("IQ4_KT", 153, "iq4_kt", "IQ4_KT - 4.0 bpw"),
    FileType("IQ3_KS", 154, "iq3_ks", "IQ3_KS - 3.1875 bpw"),
    FileType("IQ2_KL", 155, "iq2_kl", "IQ2_KL - 2.6875 bpw"),
    FileType("IQ1_KT", 156, "iq1_kt", "IQ1_KT - 1.75 bpw"),
    FileType("Q4_0_R8", 202, "q4_0_r8", "Q4_0_R8 - 4.5 bpw"),
    FileType("Q8_0_R8", 207, "q8_0_r8", "Q8_0_R8 - 8.5 bpw"),
    FileType("Q5_0_R4", 208, "q5_0_r4", "Q5_0_R4 - 5.5 bpw"),
    FileType("Q2_K_R4", 210, "q2_k_r4", "Q2_K_R4"),
    FileType("Q3_K_R4", 211, "q3_k_r4", "Q3_K_R4"),
    FileType("Q4_K_R4", 214, "q4_k_r4", "Q4_K_R4"),
    FileType("Q5_K_R4", 216, "q5_k_r4", "Q5_K_R4"),
    FileType("Q6_K_R4", 218, "q6_k_r4", "Q6_K_R4"),
    FileType("IQ2_XXS_R4", 219, "iq2_xxs_r4", "IQ2_XXS_R4 - 2.0625 bpw"),
    FileType("IQ2_XS_R4", 220, "iq2_xs_r4", "IQ2_XS_R4 - 2.3125 bpw"),
    FileType("IQ3_XXS_R4", 223, "iq3_xxs_r4", "IQ3_XXS_R4 - 3.0625 bpw"),
    FileType("IQ1_S_R4", 224, "iq1_s_r4", "IQ1_S_R4 - 1.5 bpw"),
    FileType("IQ4_NL_R4", 225, "iq4_nl_r4", "IQ4_NL_R4 - 4.5 bpw"),
    FileType("IQ3_S_R4", 226, "iq3_s_r4", "IQ3_S_R4 - 3.4375 bpw"),
    FileType("IQ2_M_R4", 229, "iq2_s_r4", "IQ2_M_R4 - 2.7 bpw"),
    FileType("IQ4_XS_R8", 230, "iq4_xs_r8", "IQ4_XS_R8 - 4.25 bpw"),
    FileType("IQ1_M_R4", 231, "iq1_m_r4", "IQ1_M_R4 - 1.75 bpw"),
    FileType("BF16_R16", 232, "bf16_r16", "BF16_R16"),
    FileType("Q6_0_R4", 335, "q6_0_r4", "Q6_0_R4 - 6.5 bpw"),
    FileType("IQ2_BN_R4", 337, "iq2_bn_r4", "IQ2_BN_R4 - 2.00 bpw Bitnet"),
    FileType("IQ2_K_R4", 338, "iq2_k_r4", "IQ2_K_R4 - 2.375 bpw"),
    FileType("IQ3_K_R4", 339, "iq3_k_r4", "IQ3_K_R4 - 3.4325 bpw"),
    FileType("IQ4_K_R4", 340, "iq4_k_r4", "IQ4_K_R4 - 4.5 bpw"),
    FileType("IQ5_K_R4", 341, "iq5_k_r4", "IQ5_K_R4 - 5.5 bpw"),
    FileType("IQ4_KS_R4", 345, "iq4_ks_r4", "IQ4_KS_R4 - 4.25 bpw"),
    FileType("IQ5_KS_R4", 350, "iq5_ks_r4", "IQ5_KS_R4 - 5.25 bpw"),
    FileType("MXFP4_R8", 351, "mxfp4_r8", "MXFP4_R8"),
    FileType("Q8_KV_R8", 398, "q8_KV_r8", "Q8_KV_R8"),
    FileType("Q8_K_R8", 399, "q8_k_r8", "Q8_K_R8"),
)

# What `--repack` and `-rtr` turn each type into (quant-formats.md#repacking);
# F16 and BF16 only on CPUs that multiply bf16 natively.
_REPACK_TARGET = {row.repack_of: row.name for row in _ROWS if row.repack_of and row.name != "q8_k_r16"}
_REPACK_TARGET["f16"] = "bf16_r16"

_BY_ID = {row.id: row for row in _ROWS}
# Types that rows of a cache can have, by precision. Each has an encoder and a decoder in
# _native/kernels/cache/kv_types.cpp and in backends/cuda/kernels/kv_types.cuh.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q8_KV", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

_BY_NAME = {row.name.lower(): row for row in _ROWS}
# Spellings used as file type or master table names that differ from the type name.
_BY_NAME |= {
    old: _BY_NAME[new] for old, new in (("q4_0_4_4", "q4_0_4x4"), ("q4_0_4_8", "q4_0_4x8"), ("q4_0_8_8", "q4_0_8x8"))
}
_FTYPE_BY_NAME = {row.name.lower(): row for row in _FTYPE_ROWS}
_FTYPE_BY_ID = {row.id: row for row in reversed(_FTYPE_ROWS)}


def all_types() -> tuple[TensorType, ...]:
    """Every tensor type in order of its id, activation-only ones included."""
    return _ROWS


def by_id(type_id: int) -> TensorType:
    """The tensor type with the number used in files; FileFormatError if there is none."""
    try:
        return _BY_ID[int(type_id)]
    except KeyError:
        raise FileFormatError(f"unknown tensor type {type_id}; the file needs a newer version or is damaged") from None


def by_name(name: str) -> TensorType:
    """The tensor type of that name in any letter case; UsageError naming close matches if there is none."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        stored = {key: row for key, row in _BY_NAME.items() if not row.activation_only}
        raise UsageError(f"unknown tensor type '{name}'{_close_matches(name, stored)}") from None


def cache_type(name: str) -> TensorType | None:
    """The tensor type of that name in any letter case if the rows of a cache can have it, else None."""
    return next((by_name(each) for each in CACHE_TYPES if each.lower() == name.lower()), None)


def all_ftypes() -> tuple[FileType, ...]:
    """Every file type in order of its id; the preferred name of an id comes first."""
    return _FTYPE_ROWS


def ftype_by_id(ftype_id: int) -> FileType:
    """The file type with the number of ``general.file_type``; FileFormatError if there is none."""
    try:
        return _FTYPE_BY_ID[int(ftype_id)]
    except KeyError:
        raise FileFormatError(f"unknown file type {ftype_id}") from None


def ftype_by_name(name: str) -> FileType:
    """The selectable file type of that name (any letter case) or number; UsageError if none."""
    is_number = re.fullmatch(r"[0-9]{1,9}", name)
    row = _FTYPE_BY_ID.get(int(name)) if is_number else _FTYPE_BY_NAME.get(name.lower())
    if row is None or not row.selectable:
        selectable = {known: other for known, other in _FTYPE_BY_NAME.items() if other.selectable}
        raise UsageError(f"unknown file type '{name}'{_close_matches(name, selectable)}")
    return row


def usual_ftype(type_name: str) -> FileType | None:
    """The file type of files whose tensors mostly have this type, for those that do not tell; None if there is none."""
    rows = [row for row in _FTYPE_ROWS if row.base_type == type_name]
    same_name = [row for row in rows if row.name.lower() == type_name.lower()]
    return next(iter(same_name + rows), None)


def ftype_display_name(ftype_id: int, *, guessed: bool = False) -> str:
    """Name shown for a file type in logs and tables; ``guessed`` marks one inferred from the tensors."""
    row = _FTYPE_BY_ID.get(int(ftype_id))
    shown = row.display if row else "unknown, may not work"
    return f"{shown} (guessed)" if guessed else shown


def repack_target(type_name: str) -> str:
    """Name of the interleaved type that repacking turns ``type_name`` into, or "" if it has none."""
    return _REPACK_TARGET.get(type_name, "")


def _close_matches(name: str, known: dict[str, TensorType] | dict[str, FileType]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(known[match].name for match in close)}?" if close else ""
