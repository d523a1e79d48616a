// Flash attention with linear biases (ALiBi): as flash_heads.cu, for the head sizes of models that have them.
#include "flash.cuh"

IKPY_FLASH_BIASED(flash16_64_64_biased, 64, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_64_64_biased, 64, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_80_80_biased, 80, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_80_80_biased, 80, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_96_96_biased, 96, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_96_96_biased, 96, 4, 1, 64, 2);
IKPY_FLASH_BIASED(flash16_112_112_biased, 112, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_112_112_biased, 112, 4, 1, 32, 3);
IKPY_FLASH_BIASED(flash16_128_128_biased, 128, 1, 4, 64, 4);
IKPY_FLASH_BIASED(flash64_128_128_biased, 128, 4, 1, 32, 3);
