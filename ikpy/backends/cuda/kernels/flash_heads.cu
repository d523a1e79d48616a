// Flash attention for the head sizes of grouped-query models and of encoders of pictures (72, 88): 16 rows
// per block (few queries) or 64.
#include "flash.cuh"

IKPY_FLASH(flash16_64_64, 64, 64, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_64_64, 64, 64, 4, 1, 64, false, 2);
IKPY_FLASH(flash16_72_72, 72, 72, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_72_72, 72, 72, 4, 1, 64, false, 2);
IKPY_FLASH(flash16_80_80, 80, 80, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_80_80, 80, 80, 4, 1, 64, false, 2);
IKPY_FLASH(flash16_88_88, 88, 88, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_88_88, 88, 88, 4, 1, 64, false, 2);
IKPY_FLASH(flash16_96_96, 96, 96, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_96_96, 96, 96, 4, 1, 64, false, 2);
IKPY_FLASH(flash16_112_112, 112, 112, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_112_112, 112, 112, 4, 1, 32, false, 3);
IKPY_FLASH(flash16_128_128, 128, 128, 1, 4, 64, false, 4);
IKPY_FLASH(flash64_128_128, 128, 128, 4, 1, 32, false, 3);
