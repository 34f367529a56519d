/* What a processor can do at most: sums of all that is read, and products in registers. Any processor; gcc or clang. */
#include <stdint.h>

#if defined(__AVX512F__)
#define BYTES 64 /* of a vector */
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define SUMS 12 /* enough for two multiply-adds a cycle, few enough for 16 registers */

typedef uint32_t words __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef float floats __attribute__((vector_size(BYTES)));

/* The sum of n words, modulo 2^32. */
uint32_t read_words(const uint32_t *p, int64_t n)
{
    words sums[8] = {{0}};
    const int64_t lanes = BYTES / 4, whole = n / (8 * lanes) * 8 * lanes;
    uint32_t sum = 0;
    for (int64_t i = 0; i < whole; i += 8 * lanes)
        for (int t = 0; t < 8; t++)
            sums[t] += *(const words *)(p + i + t * lanes);
    for (int64_t i = whole; i < n; i++)
        sum += p[i];
    for (int i = 0; i < 8 * lanes; i++)
        sum += sums[i / lanes][i % lanes];
    return sum;
}

/* `rounds` times x / 2 + 1 in every lane of 12 vectors: all come to 2. Returns their sum, twice the number of lanes. */
float multiply(int64_t rounds)
{
    floats x[SUMS], half = (floats){0} + 0.5f, all = {0};
    float sum = 0;
    for (int t = 0; t < SUMS; t++)
        x[t] = (floats){0} + (float)t;
    for (int64_t i = 0; i < rounds; i++)
        for (int t = 0; t < SUMS; t++)
            x[t] = x[t] * half + 1.0f;
    for (int t = 0; t < SUMS; t++)
        all += x[t];
    for (int t = 0; t < BYTES / 4; t++)
        sum += all[t];
    return sum;
}
