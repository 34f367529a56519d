/* Decoding on a CPU: attention of few queries over a KV cache that is read once, dense or in pages, fp32 or narrower.
 *
 * A task is CHUNK slots of one row of the batch, with all its heads. It walks over blocks of KEYS visible keys, and
 * inside a block over the KV heads, so memory is read in its order; all query heads of a KV head and all queries share
 * what was read. Numbers are widened in registers, everything is summed in fp32. A task's state depends on nothing but
 * its slots: bits are the same for any batch and any number of threads. The numbers at the formulas are those of
 * docs/design.md, section 1.
 */
#include "vectors.h"

#define KEYS 64 /* of a block */
#define AHEAD 32 /* how many keys later what is fetched now will be read */
#define ROWS 4  /* query rows that share what was read */

typedef struct { /* __init__.py has the same; strides in bytes */
    int64_t batch, num_queries, heads, kv_heads, d, d_v;
    int64_t slots, chunk, num_chunks; /* of a row */
    int64_t page_size;                /* slots that lie `k_slot` apart: all of a row's without pages */
    int64_t table_row;                /* elements between rows of the table; without a table row i is page i */
    int64_t q_row, q_token, q_head; /* in elements */
    int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;
    int64_t ks_page, ks_slot, ks_head, vs_page, vs_slot, vs_head;
    int64_t q_pos_row, q_pos_token, k_pos_row, k_pos_slot; /* in elements */
    int64_t left, right, slopes_row; /* of the window, -1: unbounded; of ALiBi's slopes, in elements */
    double scale, softcap;
    const float *q;
    const char *k, *v, *k_scale, *v_scale;
    const int32_t *table;
    const int64_t *lengths, *q_pos, *k_pos;
    const float *slopes; /* ALiBi's, [batch or 1, heads]; NULL: none */
    float *parts; /* [batch, num_chunks, kv_heads, rows, d_v + 2]: numerators, largest score, denominator */
    float *out;   /* [batch, num_queries, heads, d_v + 1]: out, then lse */
} Call;

typedef struct {
    int count, masked; /* masked: some query does not see some key */
    const char *k[KEYS], *v[KEYS], *k_scale[KEYS], *v_scale[KEYS]; /* of KV head 0 */
    uint8_t *seen;                                                 /* [num_queries, KEYS] */
    float *gaps; /* [num_queries, KEYS]: between positions; for ALiBi */
} Block;

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
    for (int64_t i = 0; i < rows; i += ROWS)
        score_of[(rows - i < ROWS ? rows - i : ROWS) - 1](c, b, n, from, to, q + i * d_padded, d_padded, s + i * KEYS);
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

/* The next block of keys that some query sees, from *slot on; hidden ones are not read: they may be NaN. */
static void fill(const Call *c, Block *b, int64_t row, int64_t *slot, int64_t end)
{
    int64_t number = *slot / c->page_size, at = *slot % c->page_size;
    b->count = b->masked = 0;
    for (; *slot < end && b->count < KEYS; ++*slot, at++) {
        if (at == c->page_size)
            number++, at = 0;
        if (c->k_pos) {
            int64_t pos = c->k_pos[row * c->k_pos_row + *slot * c->k_pos_slot], seen_by = 0;
            if (pos < 0)
                continue;
            for (int64_t i = 0; i < c->num_queries; i++) {
                int64_t gap = c->q_pos[row * c->q_pos_row + i * c->q_pos_token] - pos;
                int sees = (c->left < 0 || gap <= c->left) && (c->right < 0 || -gap <= c->right);
                b->seen[i * KEYS + b->count] = sees;
                if (c->slopes)
                    b->gaps[i * KEYS + b->count] = gap < 0 ? -gap : gap;
                seen_by += sees;
            }
            if (!seen_by)
                continue;
            b->masked |= seen_by < c->num_queries;
        }
        int64_t page = c->table ? c->table[row * c->table_row + number] : row;
        b->k[b->count] = c->k + page * c->k_page + at * c->k_slot;
        b->v[b->count] = c->v + page * c->v_page + at * c->v_slot;
        if (c->k_scale) {
            b->k_scale[b->count] = c->k_scale + page * c->ks_page + at * c->ks_slot;
            b->v_scale[b->count] = c->v_scale + page * c->vs_page + at * c->vs_slot;
        }
        b->count++;
    }
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
        for (int64_t i = 0; i < rows; i += ROWS) {
            int64_t first = n * rows + i;
            float kept[ROWS], *s = m->s + first * KEYS;
            for (int64_t r = 0; r < ROWS && i + r < rows; r++)
                kept[r] = weights(c, b, k_scale, v_scale, (i + r) / group,
                                  m->slopes ? m->slopes[n * group + (i + r) % group] : 0, s + r * KEYS,
                                  m->top + first + r, m->den + first + r);
            add_of[(rows - i < ROWS ? rows - i : ROWS) - 1](c, b, n, s, kept, dv_padded, m->acc + first * dv_padded);
        }
    }
}

/* One chunk of one row of the batch: its numerators, largest scores and denominators go to `parts`. */
static int attend(const Call *c, int64_t task)
{
    int64_t row = task / c->num_chunks, slot = task % c->num_chunks * c->chunk, end = slot + c->chunk;
    int64_t group = c->heads / c->kv_heads, rows = group * c->num_queries, all = c->kv_heads * rows;
    int64_t d_padded = (c->d + WIDTH - 1) / WIDTH * WIDTH, dv_padded = (c->d_v + WIDTH - 1) / WIDTH * WIDTH;
    int64_t length = c->lengths ? c->lengths[row] : c->slots, pairs = KEYS * c->num_queries;
    float *parts = c->parts + task * all * (c->d_v + 2);
    float *floats = calloc(all * (d_padded + dv_padded + 2 + KEYS) + 2 * pairs + 1, sizeof *floats);
    Memory m = {floats, floats + all * d_padded, .slopes = c->slopes ? c->slopes + row * c->slopes_row : NULL};
    uint8_t *seen = malloc(2 * pairs + 1);
    if (!floats || !seen) {
        free(floats), free(seen);
        return 1;
    }
    m.top = m.acc + all * dv_padded, m.den = m.top + all, m.s = m.den + all;
    end = end < length ? end : length;
    for (int64_t i = 0; i < all; i++) {
        int64_t token = i % rows / group, head = i / rows * group + i % group;
        memcpy(m.q + i * d_padded, c->q + row * c->q_row + token * c->q_token + head * c->q_head, c->d * sizeof *m.q);
        m.top[i] = -INFINITY;
    }
    float *gaps = m.s + all * KEYS;
    Block blocks[2] = {{.seen = seen, .gaps = gaps}, {.seen = seen + pairs, .gaps = gaps + pairs}};
    Block *b = blocks, *next = blocks + 1;
    for (fill(c, b, row, &slot, end); b->count;) {
        fill(c, next, row, &slot, end);
        attend_block(c, b, next, &m, rows, d_padded, dv_padded);
        Block *done = b;
        b = next, next = done;
    }
    for (int64_t i = 0; i < all; i++) {
        float *part = parts + i * (c->d_v + 2);
        memcpy(part, m.acc + i * dv_padded, c->d_v * sizeof *part);
        part[c->d_v] = m.top[i];
        part[c->d_v + 1] = m.den[i];
    }
    free(floats), free(seen);
    return 0;
}

/* Tasks first to last - 1. Returns 0, or 1 if memory ran out. */
int decode_tasks(const Call *c, int64_t first, int64_t last)
{
    int failed = 0;
    for (int64_t task = first; task < last; task++)
        failed |= attend(c, task);
    return failed;
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
