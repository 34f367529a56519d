/* The merge of packed states, for memory.c. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Equation (4): n packed states of `rows` rows, `next` numbers apart, whose last column is lse, become one, in order. */
void merge_states(const float *states, float *out, int64_t n, int64_t next, int64_t rows, int64_t columns)
{
    for (int64_t row = 0; row < rows; row++, out += columns) {
        const float *state = states + row * columns, *lse = state + columns - 1;
        float top = -INFINITY, den = 0;
        for (int64_t i = 0; i < n; i++)
            top = lse[i * next] > top || lse[i * next] != lse[i * next] ? lse[i * next] : top;
        memset(out, 0, columns * sizeof *out);
        if (top == -INFINITY) {
            out[columns - 1] = -INFINITY;
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            float weight = expf(lse[i * next] - top);
            den += weight;
            for (int64_t t = 0; t < columns - 1; t++)
                out[t] += weight * state[i * next + t];
        }
        for (int64_t t = 0; t < columns - 1; t++)
            out[t] /= den;
        out[columns - 1] = top + logf(den);
    }
}
