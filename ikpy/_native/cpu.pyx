"""CPU features of this machine, as far as they decide which ISA tier may run."""

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #include <cpuid.h>
    static int ikpy_has_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
            && __builtin_cpu_supports("bmi2");
    }
    static int ikpy_has_avxvnni(void) {
        unsigned a, b, c, d;
        return ikpy_has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }
    static int ikpy_has_avx512(void) {
        __builtin_cpu_init();
        return ikpy_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
    }
    static int ikpy_has_avx512bf16(void) { __builtin_cpu_init(); return __builtin_cpu_supports("avx512bf16"); }
    static int ikpy_has_avx512vbmi(void) { __builtin_cpu_init(); return __builtin_cpu_supports("avx512vbmi"); }
    #else
    static int ikpy_has_avx2(void) { return 0; }
    static int ikpy_has_avxvnni(void) { return 0; }
    static int ikpy_has_avx512(void) { return 0; }
    static int ikpy_has_avx512bf16(void) { return 0; }
    static int ikpy_has_avx512vbmi(void) { return 0; }
    #endif
    """
    int ikpy_has_avx2()
    int ikpy_has_avxvnni()
    int ikpy_has_avx512()
    int ikpy_has_avx512bf16()
    int ikpy_has_avx512vbmi()


def features() -> dict:
    """Map of feature name to bool: avx2 (with FMA, F16C, BMI2), avxvnni (the same with dot products of bytes), avx512 (F/BW/VL/DQ/CD/VNNI), avx512bf16, avx512vbmi."""
    return {
        "avx2": bool(ikpy_has_avx2()),
        "avxvnni": bool(ikpy_has_avxvnni()),
        "avx512": bool(ikpy_has_avx512()),
        "avx512bf16": bool(ikpy_has_avx512bf16()),
        "avx512vbmi": bool(ikpy_has_avx512vbmi()),
    }
