/* Products of a few rows with a matrix of weights, which is read once, as fast as memory gives it; summed in fp32. */
#include "vectors.h"

#define AHEAD 4096 /* bytes from what is read to what is fetched */
#define MOST 8     /* rows */

typedef struct { /* product.py has the same */
    int64_t rows, width, num_out, weights_row; /* weights_row: elements between rows of weights */
    const float *x;                            /* [rows, width] */
    const char *weights;                       /* TYPE [num_out, width] */
    const float *bias;                         /* [num_out]; NULL: none */
    float *out;                                /* [rows, num_out] */
} Product;

/* Add the products of WIDTH weights with so many numbers of every row. */
INLINE void add_products(int rows, const char *weights, const float *x, int64_t x_row, vf *sum)
{
    vf w = widen(weights);
    HOLD(w);
    for (int r = 0; r < rows; r++)
        sum[r] += w * load(x + r * x_row);
}

INLINE void multiply_rows(const Product *p, int rows)
{
    int64_t whole = p->width / WIDTH * WIDTH, left = p->width - whole;
    float last[WIDTH] = {0}, x[MOST * WIDTH] = {0}; /* behind the last whole vector; `last` in TYPE */
    for (int r = 0; r < rows; r++)
        memcpy(x + r * WIDTH, p->x + r * p->width + whole, left * sizeof *x);
    for (int64_t i = 0; i < p->num_out; i++) {
        const char *weights = p->weights + i * p->weights_row * SIZE;
        vf sum[2][MOST] = {0}; /* in turns: an addition takes longer than reading a vector */
        int64_t t = 0;
        for (; t + WIDTH < whole; t += 2 * WIDTH)
            for (int j = 0; j < 2; j++) {
                const char *at = weights + (t + j * WIDTH) * SIZE;
                __builtin_prefetch(at + AHEAD);
                add_products(rows, at, p->x + t + j * WIDTH, p->width, sum[j]);
            }
        if (t < whole)
            add_products(rows, weights + t * SIZE, p->x + t, p->width, sum[0]);
        if (left) {
            memcpy(last, weights + whole * SIZE, left * SIZE);
            add_products(rows, (const char *)last, x, WIDTH, sum[1]);
        }
        for (int r = 0; r < rows; r++) {
            vf all = sum[0][r] + sum[1][r];
            p->out[r * p->num_out + i] = sums(all, all, all, all)[0] + (p->bias ? p->bias[i] : 0);
        }
    }
}

void multiply(const Product *p)
{
    if (p->rows == 1)
        multiply_rows(p, 1);
    else if (p->rows == 2)
        multiply_rows(p, 2);
    else if (p->rows == 4)
        multiply_rows(p, 4);
    else
        multiply_rows(p, MOST);
}
