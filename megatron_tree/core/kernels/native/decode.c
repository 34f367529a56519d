/* Decoding on a CPU: attention of few queries over a KV cache that is read once, dense or in pages, fp32 or narrower.
 *
 * A task is CHUNK slots of one row of the batch, with all its heads. It walks over blocks of KEYS visible keys, and
 * inside a block over the KV heads, so memory is read in its order; all query heads of a KV head and all queries share
 * what was read. Numbers are widened in registers, everything is summed in fp32. A task's state depends on nothing but
 * its slots: bits are the same for any batch and any number of threads. The numbers at the formulas are those of
 * docs/design.md, section 1.
 */
#include "blocks.h"

#define AHEAD 32 /* how many keys later what is fetched now will be read */
#define ROWS 4  /* query rows that share what was read */

/* Products of `rows` queries q [rows, d_padded] with WIDTH / rows keys from number j on: s [rows, KEYS]. */
INLINE void score(const Call *c, const Block *b, int64_t n, int j, const float *q, int64_t d_padded, int rows, float *s)
{
    const int keys = WIDTH / (rows == 3 ? 4 : rows);
    const char *k[WIDTH];
    for (int t = 0; t < keys; t++)
        k[t] = b->k[j + t < b->count ? j + t : b->count - 1] + n * c->k_head;
    vf sum[WIDTH] = {0};
    int64_t i = 0, whole = c->d / WIDTH * WIDTH;
    for (; i < whole; i += WIDTH) {
        vf x[WIDTH];
        for (int t = 0; t < keys; t++)
            x[t] = widen(k[t] + i * SIZE);
        for (int r = 0; r < rows; r++) {
            vf y = load(q + r * d_padded + i);
            for (int t = 0; t < keys; t++)
                sum[r * keys + t] += y * x[t];
        }
    }
    if (i < c->d)
        for (int t = 0; t < keys; t++) {
            vf x = widen_some(k[t] + i * SIZE, c->d - i);
            for (int r = 0; r < rows; r++)
                sum[r * keys + t] += load(q + r * d_padded + i) * x;
        }
    vf all = sums(sum);
    for (int r = 0; r < rows; r++)
        memcpy(s + r * KEYS + j, (float *)&all + r * keys, keys * sizeof *s);
}

/* acc [rows, dv_padded] = acc * kept + p [rows, KEYS] times the block's values: `vectors` of them from column `from`;
 * where less than one is left, `some` columns. */
INLINE void add_values(const Call *c, const Block *b, int64_t n, const float *p, const float *kept, int rows,
                       int64_t dv_padded, float *acc, int64_t from, int vectors, int64_t some)
{
    vf sum[WIDTH];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < vectors; t++) {
            memcpy(&sum[r * vectors + t], acc + r * dv_padded + from + t * WIDTH, sizeof(vf));
            sum[r * vectors + t] *= kept[r];
        }
    for (int j = 0; j < b->count; j++) {
        const char *v = b->v[j] + n * c->v_head + from * SIZE;
        for (int t = 0; t < vectors; t++) {
            vf x = some ? widen_some(v, some) : widen(v + t * WIDTH * SIZE);
            for (int r = 0; r < rows; r++)
                sum[r * vectors + t] += p[r * KEYS + j] * x;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < vectors; t++)
            memcpy(acc + r * dv_padded + from + t * WIDTH, &sum[r * vectors + t], sizeof(vf));
}

INLINE void add_columns(const Call *c, const Block *b, int64_t n, const float *p, const float *kept, int rows,
                        int64_t dv_padded, float *acc)
{
    const int vectors = WIDTH / (rows == 3 ? 4 : rows == 1 ? 2 : rows);
    int64_t from = 0;
    for (; from + vectors * WIDTH <= c->d_v; from += vectors * WIDTH)
        add_values(c, b, n, p, kept, rows, dv_padded, acc, from, vectors, 0);
    for (; from + WIDTH <= c->d_v; from += WIDTH)
        add_values(c, b, n, p, kept, rows, dv_padded, acc, from, 1, 0);
    if (from < c->d_v)
        add_values(c, b, n, p, kept, rows, dv_padded, acc, from, 1, c->d_v - from);
}

/* Functions of their own for 1 to ROWS rows: their sums stay in registers. */
#define OF_ROWS(R)                                                                                                     \
    static __attribute__((noinline)) void score_##R(const Call *c, const Block *b, int64_t n, int from, int to,        \
                                                    const float *q, int64_t d_padded, float *s)                        \
    {                                                                                                                  \
        for (int j = from; j < to; j += WIDTH / (R == 3 ? 4 : R))                                                      \
            score(c, b, n, j, q, d_padded, R, s);                                                                      \
    }                                                                                                                  \
    static __attribute__((noinline)) void add_##R(const Call *c, const Block *b, int64_t n, const float *p,            \
                                                  const float *kept, int64_t dv_padded, float *acc)                    \
    {                                                                                                                  \
        add_columns(c, b, n, p, kept, R, dv_padded, acc);                                                              \
    }
OF_ROWS(1)
OF_ROWS(2)
OF_ROWS(3)
OF_ROWS(4)
static void (*const score_of[])(const Call *, const Block *, int64_t, int, int, const float *, int64_t, float *) = {
    score_1, score_2, score_3, score_4};
static void (*const add_of[])(const Call *, const Block *, int64_t, const float *, const float *, int64_t, float *) = {
    add_1, add_2, add_3, add_4};

/* How many rows from row i on share what is read; 0 if none of their queries sees a key of the block. */
static int64_t rows_at(const Call *c, const Block *b, int64_t i, int64_t rows)
{
    int64_t group = c->heads / c->kv_heads, some = rows - i < ROWS ? rows - i : ROWS;
    for (int64_t query = i / group; query * group < i + some; query++)
        if (b->sees[query])
            return some;
    return 0;
}

/* Scores of some keys of KV head n with all its rows. Their values come next, and keys AHEAD of them soon. */
static void score_keys(const Call *c, const Block *b, const Block *next, int64_t n, int from, int to, const float *q,
                       int64_t d_padded, int64_t rows, float *s)
{
    for (int j = from; j < to; j++) {
        int at = j + AHEAD;
        prefetch(b->v[j] + n * c->v_head, c->d_v * SIZE);
        if (at < b->count)
            prefetch(b->k[at] + n * c->k_head, c->d * SIZE);
        else if (at - b->count < next->count)
            prefetch(next->k[at - b->count] + n * c->k_head, c->d * SIZE);
    }
    for (int64_t i = 0, some; i < rows; i += ROWS)
        if ((some = rows_at(c, b, i, rows)))
            score_of[some - 1](c, b, n, from, to, q + i * d_padded, d_padded, s + i * KEYS);
}

/* The scores s [KEYS] of a query's head become weights p (2); returns how much what came before still counts. */
static float weights(const Call *c, const Block *b, const float *k_scale, const float *v_scale, int64_t query,
                     float slope, float *s, float *top, float *den)
{
    const uint8_t *seen = b->seen + query * KEYS;
    float scale = c->scale, cap = c->softcap, largest = *top, lanes[WIDTH], before = *top;
    int padded = (b->count + WIDTH - 1) / WIDTH * WIDTH;
    vf x, y, most = (vf){0} + largest, total = {0};
    for (int j = 0; j < padded; j += WIDTH) {
        x = load(s + j) * scale;
        if (c->k_scale)
            x *= load(k_scale + j);
        if (cap > 0)
            x = cap * vtanh(x * (1 / cap));
        if (slope != 0)
            x -= slope * load(b->gaps + query * KEYS + j);
        memcpy(s + j, &x, sizeof x);
        if (b->masked)
            for (int t = j; t < j + WIDTH; t++)
                s[t] = seen[t] ? s[t] : -INFINITY;
        for (int t = b->count; t < j + WIDTH; t++)
            s[t] = -INFINITY;
        memcpy(&x, s + j, sizeof x);
        most = select_((x > most) | (x != x), x, most); /* NaN stays */
    }
    memcpy(lanes, &most, sizeof lanes);
    for (int t = 0; t < WIDTH; t++)
        largest = lanes[t] > largest || lanes[t] != lanes[t] ? lanes[t] : largest;
    if (largest == -INFINITY) {
        memset(s, 0, padded * sizeof *s);
        return 1;
    }
    for (int j = 0; j < padded; j += WIDTH) {
        memcpy(&x, s + j, sizeof x);
        x = vexp(x - largest);
        total += x;
        if (c->v_scale) {
            memcpy(&y, v_scale + j, sizeof y);
            x *= y;
        }
        memcpy(s + j, &x, sizeof x);
    }
    memcpy(lanes, &total, sizeof lanes);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int t = 0; t < half; t++)
            lanes[t] += lanes[t + half];
    float kept = expf(before - largest);
    *top = largest;
    *den = *den * kept + lanes[0];
    return kept;
}

typedef struct { /* a task's memory; rows of the queries: KV head, query, head of the group */
    float *q, *acc, *top, *den, *s;
    const float *slopes;
} Memory;

static void attend_block(const Call *c, const Block *b, const Block *next, const Memory *m, int64_t rows,
                         int64_t d_padded, int64_t dv_padded)
{
    int64_t group = c->heads / c->kv_heads;
    int64_t pieces = (b->count + WIDTH - 1) / WIDTH, heads_inside = c->k_head < c->k_slot;
    for (int64_t i = 0; i < pieces * c->kv_heads; i++) { /* WIDTH keys of one head at a time, in the order of memory */
        int64_t n = heads_inside ? i % c->kv_heads : i / pieces;
        int64_t j = (heads_inside ? i / c->kv_heads : i % pieces) * WIDTH;
        int64_t end = j + WIDTH < b->count ? j + WIDTH : b->count;
        score_keys(c, b, next, n, j, end, m->q + n * rows * d_padded, d_padded, rows, m->s + n * rows * KEYS);
    }
    for (int64_t n = 0; n < c->kv_heads; n++) {
        float k_scale[KEYS], v_scale[KEYS];
        for (int j = 0; c->k_scale && j < KEYS; j++) {
            int at = j < b->count ? j : b->count - 1;
            memcpy(k_scale + j, b->k_scale[at] + n * c->ks_head, sizeof *k_scale);
            memcpy(v_scale + j, b->v_scale[at] + n * c->vs_head, sizeof *v_scale);
        }
        for (int64_t i = 0, some; i < rows; i += ROWS) {
            if (!(some = rows_at(c, b, i, rows)))
                continue; /* their states stay */
            int64_t first = n * rows + i;
            float kept[ROWS], *s = m->s + first * KEYS;
            for (int64_t r = 0; r < some; r++)
                kept[r] = weights(c, b, k_scale, v_scale, (i + r) / group,
                                  m->slopes ? m->slopes[n * group + (i + r) % group] : 0, s + r * KEYS,
                                  m->top + first + r, m->den + first + r);
            add_of[some - 1](c, b, n, s, kept, dv_padded, m->acc + first * dv_padded);
        }
    }
}

typedef struct { /* where the next block begins: in a task, from a slot on */
    int64_t task, slot;
} Place;

/* The next block of the place's task, or of those after it up to last - 1; b->task says which. */
static void fill_next(const Call *c, Block *b, Place *at, int64_t last)
{
    for (b->count = 0; at->task < last; at->task++, at->slot = 0) {
        int64_t row = at->task / c->num_chunks, from = at->task % c->num_chunks * c->chunk, end = from + c->chunk;
        int64_t length = c->lengths ? c->lengths[row] : c->slots, slot = from + at->slot;
        b->task = at->task;
        (c->selected ? fill_selected : fill)(c, b, row, &slot, end < length ? end : length);
        at->slot = slot - from;
        if (b->count)
            return;
    }
}

/* Tasks first to last - 1: each one's numerators, largest scores and denominators go to `parts`. While a block is
 * computed the next one is fetched, also that of another task. Returns 0, or 1 if memory ran out. */
int decode_tasks(const Call *c, int64_t first, int64_t last)
{
    int64_t group = c->heads / c->kv_heads, n = c->num_queries, rows = group * n, all = c->kv_heads * rows;
    int64_t d_padded = (c->d + WIDTH - 1) / WIDTH * WIDTH, dv_padded = (c->d_v + WIDTH - 1) / WIDTH * WIDTH;
    int64_t pairs = KEYS * n;
    float *floats = calloc(all * (d_padded + dv_padded + 2 + KEYS) + 2 * pairs + 1, sizeof *floats);
    uint8_t *seen = malloc(2 * (pairs + n) + 1), *sees = seen + 2 * pairs;
    if (!floats || !seen) {
        free(floats), free(seen);
        return 1;
    }
    Memory m = {floats, floats + all * d_padded};
    m.top = m.acc + all * dv_padded, m.den = m.top + all, m.s = m.den + all;
    float *gaps = m.s + all * KEYS;
    Block blocks[2] = {{.seen = seen, .sees = sees, .gaps = gaps},
                       {.seen = seen + pairs, .sees = sees + n, .gaps = gaps + pairs}};
    Block *b = blocks, *next = blocks + 1;
    Place at = {first, 0};
    fill_next(c, b, &at, last);
    for (int64_t task = first; task < last; task++) {
        int64_t row = task / c->num_chunks;
        m.slopes = c->slopes ? c->slopes + row * c->slopes_row : NULL;
        memset(m.acc, 0, all * dv_padded * sizeof *m.acc);
        for (int64_t i = 0; i < all; i++) {
            int64_t token = i % rows / group, head = i / rows * group + i % group;
            const float *q = c->q + row * c->q_row + token * c->q_token + head * c->q_head;
            memcpy(m.q + i * d_padded, q, c->d * sizeof *m.q);
            m.top[i] = -INFINITY, m.den[i] = 0;
        }
        while (b->count && b->task == task) {
            fill_next(c, next, &at, last);
            attend_block(c, b, next, &m, rows, d_padded, dv_padded);
            Block *done = b;
            b = next, next = done;
        }
        for (int64_t i = 0; i < all; i++) {
            float *part = c->parts + (task * all + i) * (c->d_v + 2);
            memcpy(part, m.acc + i * dv_padded, c->d_v * sizeof *part);
            part[c->d_v] = m.top[i];
            part[c->d_v + 1] = m.den[i];
        }
    }
    free(floats), free(seen);
    return 0;
}

/* Equation (4): the chunks of every row of the batch become its state, in order. */
void merge_tasks(const Call *c)
{
    int64_t group = c->heads / c->kv_heads, rows = group * c->num_queries, all = c->kv_heads * rows, wide = c->d_v + 2;
    for (int64_t row = 0; row < c->batch; row++)
        for (int64_t i = 0; i < all; i++) {
            int64_t token = i % rows / group, head = i / rows * group + i % group;
            const float *part = c->parts + (row * c->num_chunks * all + i) * wide;
            float *out = c->out + ((row * c->num_queries + token) * c->heads + head) * (c->d_v + 1);
            float top = -INFINITY, den = 0;
            memset(out, 0, c->d_v * sizeof *out);
            for (int64_t j = 0; j < c->num_chunks; j++) {
                float x = part[j * all * wide + c->d_v];
                top = x > top || x != x ? x : top;
            }
            if (top == -INFINITY) {
                out[c->d_v] = -INFINITY;
                continue;
            }
            for (int64_t j = 0; j < c->num_chunks; j++) {
                const float *x = part + j * all * wide;
                float kept = expf(x[c->d_v] - top);
                den += kept * x[c->d_v + 1];
                for (int64_t t = 0; t < c->d_v; t++)
                    out[t] += kept * x[t];
            }
            for (int64_t t = 0; t < c->d_v; t++)
                out[t] /= den;
            out[c->d_v] = top + logf(den);
        }
}
