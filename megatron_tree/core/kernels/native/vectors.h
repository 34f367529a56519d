/* Vectors of floats: loads of TYPE that widen, exp and tanh, and sums. Any processor; gcc or clang. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16 /* floats of a vector */
#else
#define WIDTH 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));

enum { F32, BF16, F16, I8, E4M3 };
#ifndef TYPE
#define TYPE F32 /* of keys and values: each has a library of its own */
#endif
enum { SIZE = TYPE == F32 ? 4 : TYPE <= F16 ? 2 : 1 };

INLINE vf load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* WIDTH integers of 16 or 8 bits, widened: compilers make single loads of a vector conversion only since lately. */
#if defined(__AVX512F__)
INLINE vu from_u16(const char *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vu from_u8(const char *p) { return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi from_i8(const char *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__AVX2__)
INLINE vu from_u16(const char *p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vu from_u8(const char *p) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi from_i8(const char *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
#define FROM(name, type, vector)                                                                                       \
    INLINE vector name(const char *p)                                                                                  \
    {                                                                                                                  \
        type small[WIDTH];                                                                                             \
        vector x;                                                                                                      \
        memcpy(small, p, sizeof small);                                                                                \
        for (int i = 0; i < WIDTH; i++)                                                                                \
            x[i] = small[i];                                                                                           \
        return x;                                                                                                      \
    }
FROM(from_u16, uint16_t, vu)
FROM(from_u8, uint8_t, vu)
FROM(from_i8, int8_t, vi)
#endif

#ifdef COUNT_READS /* a test's: how many times WIDTH numbers of the cache were read */
int64_t reads;
#define COUNT reads++
#else
#define COUNT
#endif

/* WIDTH numbers of TYPE, widened. */
INLINE vf widen(const char *p)
{
    COUNT;
    if (TYPE == F32)
        return load((const float *)p);
    if (TYPE == I8)
        return __builtin_convertvector(from_i8(p), vf);
    if (TYPE == BF16)
        return (vf)(from_u16(p) << 16);
    if (TYPE == E4M3) {
        vu bits = from_u8(p), magnitude = bits & 0x7f;
        vf x = (vf)((bits & 0x80) << 24 | magnitude << 20) * 0x1p120f; /* exponents are offset by 7, not by 127 */
        return (vf)((vu)x | (vu)(magnitude == 0x7f)); /* NaN */
    }
    vu bits = from_u16(p);
    vf x = (vf)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f; /* offset by 15 */
    return (vf)((vu)x | ((vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000)); /* infinity, NaN */
}

INLINE vf widen_some(const char *p, int64_t n) /* where fewer than WIDTH are left */
{
    char some[4 * WIDTH] = {0};
    return widen(memcpy(some, p, n * SIZE));
}

INLINE void prefetch(const char *p, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(p + i, 0, 2); /* to the second cache: the first one is in use */
}

INLINE vf select_(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* exp(x) = 2^n (1 + q): returns q = exp(r) - 1 by its series, and 2^n; x within +-87. */
INLINE vf reduced(vf x, vf *power)
{
    vf n = x * 1.44269504088896f;
    n = (n + 12582912.0f) - 12582912.0f; /* to the nearest integer: 1.5 * 2^23 has no digits behind the point */
    vf r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f; /* ln 2, the first part exact times n */
    *power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    vf series = 1.0f / 720 + r * (1.0f / 5040);
    series = 1.0f / 24 + r * (1.0f / 120 + r * series);
    return r + r * r * (0.5f + r * (1.0f / 6 + r * series));
}

INLINE vf vexp(vf x) /* x <= 0, or -infinity */
{
    vi low = x < -87.0f;
    vf power, q = reduced(select_(low, (vf){0}, x), &power);
    q = power + power * q;
    return (vf)((vi)q & ~low);
}

INLINE vf vtanh(vf x)
{
    vf size = select_(x < 0.0f, -x, x), power;
    vf y = select_(size > 10.0f, (vf){0} + 20.0f, size + size);
    vf q = reduced(y, &power);
    vf e = power * q + (power - 1.0f); /* exp(2 size) - 1, also where that is near 0 */
    vf t = e / (e + 2.0f);
    return select_(x < 0.0f, -t, t);
}

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* The sum of each of WIDTH vectors: halves of two are added side by side, until one vector is left. */
INLINE vf sums(vf x[WIDTH])
{
#if WIDTH == 16
    for (int i = 0; i < 8; i++)
        x[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        x[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               PICK(x[2 * i], x[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        x[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               PICK(x[2 * i], x[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return PICK(x[0], x[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PICK(x[0], x[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    for (int i = 0; i < 4; i++)
        x[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) +
               PICK(x[2 * i], x[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        x[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13) +
               PICK(x[2 * i], x[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15);
    return PICK(x[0], x[1], 0, 2, 4, 6, 8, 10, 12, 14) + PICK(x[0], x[1], 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}
