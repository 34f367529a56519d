/* Vectors of floats: loads of TYPE that widen, exp and tanh, sums and maxima. Any processor; gcc or clang. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16 /* floats of a vector */
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#ifdef __x86_64__
#define HOLD(x) __asm__("" : "+v"(x)) /* in a register: else gcc reads it again for every product */
#elif defined(__aarch64__)
#define HOLD(x) __asm__("" : "+w"(x))
#else
#define HOLD(x) (void)0
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

typedef float vf_anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
INLINE vf load(const float *p) { return *(const vf_anywhere *)p; }
INLINE void store(float *p, vf x) { *(vf_anywhere *)p = x; }

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
        type __attribute__((vector_size(WIDTH * sizeof(type)))) x;                                                     \
        memcpy(&x, p, sizeof x);                                                                                       \
        return __builtin_convertvector(x, vector);                                                                     \
    }
FROM(from_u16, uint16_t, vu)
FROM(from_u8, uint8_t, vu)
FROM(from_i8, int8_t, vi)
#endif

#ifdef COUNT_READS /* a test's: how many numbers of the cache were read */
int64_t reads;
#define COUNT reads += WIDTH
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
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
    vu bits = from_u16(p);
    vf x = (vf)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f; /* offset by 15 */
    return (vf)((vu)x | ((vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000)); /* infinity, NaN */
}

INLINE vf select_(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* exp(x) = 2^n (1 + q): returns q = exp(r) - 1 by its series, and 2^n; x within +-87. */
INLINE vf reduced(vf x, vf *power)
{
    vf shifted = x * 1.44269504088896f + 12582912.0f; /* 1.5 * 2^23 has no digits behind the point: n is in the last */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f; /* ln 2, the first part exact times n */
    *power = (vf)(((vu)shifted + 127) << 23);
    vf series = 1.0f / 720 + r * (1.0f / 5040);
    series = 1.0f / 24 + r * (1.0f / 120 + r * series);
    return r + r * r * (0.5f + r * (1.0f / 6 + r * series));
}

INLINE vf vexp(vf x) /* x <= 0, or -infinity */
{
    vf power, q = reduced(x, &power);
    return (vf)((vi)(power + power * q) & ~(x < -87.0f));
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

#define FOUR(i, a, b, c, d) a + i, b + i, c + i, d + i
#if WIDTH == 16 /* the same in each four lanes */
#define EACH(...) FOUR(0, __VA_ARGS__), FOUR(4, __VA_ARGS__), FOUR(8, __VA_ARGS__), FOUR(12, __VA_ARGS__)
#elif WIDTH == 8
#define EACH(...) FOUR(0, __VA_ARGS__), FOUR(4, __VA_ARGS__)
#else
#define EACH(...) FOUR(0, __VA_ARGS__)
#endif
typedef float v4 __attribute__((vector_size(16)));

INLINE vf pairs(vf x, vf y) /* of each four lanes: x0 + x2, y0 + y2, x1 + x3, y1 + y3 */
{
    return PICK(x, y, EACH(0, WIDTH, 1, WIDTH + 1)) + PICK(x, y, EACH(2, WIDTH + 2, 3, WIDTH + 3));
}

INLINE v4 sums(vf a, vf b, vf c, vf d) /* of the lanes of four vectors */
{
    vf x = pairs(a, b), y = pairs(c, d);
    v4 part[WIDTH / 4];
    x = PICK(x, y, EACH(0, 1, WIDTH, WIDTH + 1)) + PICK(x, y, EACH(2, 3, WIDTH + 2, WIDTH + 3));
    memcpy(part, &x, sizeof x);
    for (int half = WIDTH / 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            part[i] += part[i + half];
    return part[0];
}

INLINE vf larger(vf x, vf y) /* y where either is NaN */
{
    for (int t = 0; t < WIDTH; t++)
        x[t] = x[t] > y[t] ? x[t] : y[t];
    return x;
}

INLINE float maximum(vf x)
{
#pragma GCC unroll 8
    for (int half = WIDTH / 2; half; half /= 2)
        for (int t = 0; t < half; t++)
            x[t] = x[t] > x[t + half] ? x[t] : x[t + half];
    return x[0];
}
