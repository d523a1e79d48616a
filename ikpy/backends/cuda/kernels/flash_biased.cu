// Flash attention with biases, linear ones (ALiBi) and those of a table (T5): as flash_heads.cu, for the head
// sizes of models that have them.
#include "flash.cuh"

IKPY_FLASH_BIASED(flash16_64_64_biased, kLinear, 64, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_64_64_biased, kLinear, 64, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_80_80_biased, kLinear, 80, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_80_80_biased, kLinear, 80, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_96_96_biased, kLinear, 96, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_96_96_biased, kLinear, 96, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_112_112_biased, kLinear, 112, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_112_112_biased, kLinear, 112, 4, 1, 32, 3);
IKPY_FLASH_BIASED(flash16_128_128_biased, kLinear, 128, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_128_128_biased, kLinear, 128, 4, 1, 32, 3);

IKPY_FLASH_BIASED(flash16_64_64_table, kTable, 64, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_64_64_table, kTable, 64, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_128_128_table, kTable, 128, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_128_128_table, kTable, 128, 4, 1, 32, 3);
