/* Decoding on a CPU: attention of few queries over a KV cache that is read once, dense or in pages, fp32 or narrower.
 *
 * A task is CHUNK slots of one row of the batch, with all its heads. It walks over blocks of KEYS visible keys: scores,
 * weights, values. Inside a block a piece of some keys is read at a time, in the order of memory, and up to ROWS query
 * rows of a KV head share what was read in registers. Numbers are widened there, everything is summed in fp32. A task's
 * state depends on nothing but its slots: bits are the same for any batch, pages and number of threads. The numbers at
 * the formulas are those of docs/design.md, section 1.
 */
#include "blocks.h"

#define ROWS 4            /* query rows that share what was read */
#define TILE 16           /* keys of a piece at most; the most sums of vectors at a time */
#define LARGE (8ll << 20) /* bytes of keys and values that no cache holds */
#define AHEAD 8192        /* bytes from what is read to what is fetched */
#if defined(__AVX512F__) || defined(__aarch64__)
#define OF_32(yes, no) yes /* registers; others have 16 */
#else
#define OF_32(yes, no) no
#endif

typedef struct { /* a task's memory; rows of the queries: KV head, query, head of the group; d and d_v: whole vectors */
    int64_t rows, d, d_v, ahead, inside; /* inside: the heads of a key lie together */
    int64_t piece;                       /* keys of which a head's are read together: TILE, half of it, or 1 */
    float *q, *acc, *s, *den, *top; /* den [.., WIDTH] */
    uint8_t *some; /* for every ROWS rows: how many share what is read; 0: none sees a key of the block */
    const float *slopes;
} Memory;

typedef struct {
    const char *const *at; /* keys or values to fetch meanwhile; NULL: none */
    int64_t head;
} Later;

/* `size` numbers from i on of what is read later, to the second cache: the first one is in use. */
INLINE void fetch_later(Later later, int t, int64_t i, int64_t size)
{
    for (int64_t x = 0; later.at && x < size; x += 64 / SIZE) {
        __builtin_prefetch(later.at[t] + later.head + (i + x) * SIZE, 0, 2);
        __asm__ volatile(""); /* gcc drops loops that only fetch */
    }
}

/* Products of `rows` queries q [rows, d] with `keys` keys: s [rows, KEYS]. */
INLINE void score(const Memory *m, const char *const *key, int64_t head, const float *q, int rows, int keys, float *s,
                  Later later)
{
    const char *k[TILE];
    vf sum[TILE] = {0}, y[ROWS];
    float all[TILE];
    for (int t = 0; t < keys; t++)
        k[t] = key[t] + head;
    for (int64_t i = 0; i < m->d; i += WIDTH) {
        for (int t = 0; t < keys && (keys == 1 ? !i : i * SIZE % 64 == 0); t++) /* a single key: all at once */
            fetch_later(later, t, i, keys == 1 ? m->d : 1);
        for (int r = 0; r < rows; r++) {
            y[r] = load(q + r * m->d + i);
            if (keys > 1)
                HOLD(y[r]);
        }
        for (int t = 0; t < keys; t++) {
            vf x = widen(k[t] + i * SIZE);
            if (rows > 1)
                HOLD(x);
            for (int r = 0; r < rows; r++)
                sum[r * keys + t] += y[r] * x;
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < rows * keys; t += 4) {
        v4 x = sums(sum[t], sum[t + 1], sum[t + 2], sum[t + 3]);
        memcpy(all + t, &x, sizeof x);
    }
    for (int r = 0; r < rows; r++)
        memcpy(s + r * KEYS, all + r * keys, keys * sizeof *s);
}

/* acc [rows, d_v] += p [rows, KEYS] times `keys` values, from a column on `vectors` at a time. Returns what is left. */
INLINE int64_t add(const Memory *m, const char *const *value, int keys, int64_t head, const float *p, int rows,
                   int vectors, int64_t from, float *acc, Later later)
{
    vf sum[TILE];
    for (; from + vectors * WIDTH <= m->d_v; from += vectors * WIDTH) {
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < vectors; t++)
                sum[r * vectors + t] = load(acc + r * m->d_v + from + t * WIDTH);
        for (int j = 0; j < keys; j++) {
            if (keys > 1 || !from)
                fetch_later(later, j, from, keys == 1 ? m->d_v : vectors * WIDTH);
            for (int t = 0; t < vectors; t++) {
                vf x = widen(value[j] + head + (from + t * WIDTH) * SIZE);
                if (rows > 1)
                    HOLD(x);
                for (int r = 0; r < rows; r++)
                    sum[r * vectors + t] += p[r * KEYS + j] * x;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < vectors; t++)
                store(acc + r * m->d_v + from + t * WIDTH, sum[r * vectors + t]);
    }
    return from;
}

/* A piece of a block from a number on, KV heads `head` to `heads` - 1: their scores. Tiles fill the registers, single
 * keys are read as they lie in memory. The first rows fetch. */
static void score_piece(const Block *b, const Memory *m, int64_t head, int64_t heads, int from, Later later)
{
#define SCORE(R, IF, KEYS_OF_TILE, AT)                                                                                 \
    if (m->some[i / ROWS] == R && (IF))                                                                                \
        for (int64_t n = head, row = n * m->rows + i; n < heads; n++, row += m->rows)                                  \
            for (int j = from; j < from + m->piece; j += KEYS_OF_TILE)                                                 \
                score(m, b->k + j, n * b->k_head, m->q + row * m->d, R, KEYS_OF_TILE, m->s + row * KEYS + j,           \
                      (Later){AT ? later.at + j - from : NULL, later.head + (n - head) * b->k_head});
    for (int64_t i = 0; i < m->rows; i += ROWS) {
        const char *const *at = i ? NULL : later.at;
        SCORE(1, m->piece == 1, 1, at) SCORE(1, m->piece > 1, 4, at)
        SCORE(2, m->piece == 1, 1, at) SCORE(2, m->piece > 1, 4, at)
        SCORE(3, 1, 4, at)
        SCORE(4, at, OF_32(4, 2), at) SCORE(4, !at, OF_32(4, 2), NULL)
    }
}

static void add_piece(const Block *b, const Memory *m, int64_t head, int64_t heads, int from, Later later)
{
#define SOME(R, NUM_KEYS, VECTORS, AT)                                                                                 \
    t = add(m, b->v + from, NUM_KEYS, n * b->v_head, m->s + row * KEYS + from, R, VECTORS, t, m->acc + row * m->d_v,   \
            (Later){AT, later.head + (n - head) * b->v_head});
#define ADD(R, IF, NUM_KEYS, VECTORS, AT)                                                                              \
    if (m->some[i / ROWS] == R && (IF))                                                                                \
        for (int64_t n = head, row = n * m->rows + i, t = 0; n < heads; n++, row += m->rows, t = 0) {                  \
            SOME(R, NUM_KEYS, VECTORS, AT) SOME(R, NUM_KEYS, VECTORS / 2, AT) SOME(R, NUM_KEYS, 1, AT)                 \
        }
    int keys = b->count - from < m->piece ? b->count - from : m->piece;
    for (int64_t i = 0; i < m->rows; i += ROWS) {
        const char *const *at = i ? NULL : later.at;
        ADD(1, keys == 1, 1, 8, at) ADD(1, keys > 1, keys, 8, at)
        ADD(2, keys == 1, 1, OF_32(8, 4), at) ADD(2, keys > 1, keys, OF_32(8, 4), at)
        ADD(3, 1, keys, 4, at)
        ADD(4, at, keys, OF_32(4, 2), at) ADD(4, !at, keys, OF_32(4, 2), NULL)
    }
}

/* The scores s [KEYS] of row i of KV head n become weights p (2), and what came before is scaled. */
static void weigh(const Call *c, const Block *b, const Memory *m, const float *k_scale, const float *v_scale, int64_t n,
                  int64_t i)
{
    int64_t group = c->heads / c->kv_heads, query = i / group, row = n * m->rows + i;
    const uint8_t *seen = b->seen + query * KEYS;
    float *s = m->s + row * KEYS, *acc = m->acc + row * m->d_v, before = m->top[row], cap = c->softcap;
    float slope = m->slopes ? m->slopes[n * group + i % group] : 0;
    int padded = (b->count + 15) / 16 * 16;
    vf most = (vf){0} + before, total = {0};
    for (int j = 0; (c->k_scale || cap > 0 || slope != 0) && j < padded; j += WIDTH) {
        vf x = c->k_scale ? load(s + j) * load(k_scale + j) : load(s + j);
        if (cap > 0)
            x = cap * vtanh(x * (1 / cap));
        store(s + j, slope != 0 ? x - slope * load(b->gaps + query * KEYS + j) : x);
    }
    for (int j = b->masked ? 0 : b->count; j < padded; j++)
        s[j] = j < b->count && seen[j] ? s[j] : -INFINITY;
    for (int j = 0; j < padded; j += WIDTH)
        most = larger(most, load(s + j));
    float largest = maximum(most);
    for (int j = 0; largest == -INFINITY && j < b->count; j++)
        largest = s[j] != s[j] ? s[j] : largest; /* NaN alone */
    if (largest == -INFINITY) {
        memset(s, 0, padded * sizeof *s);
        return;
    }
    for (int j = 0; j < padded; j += WIDTH) {
        vf x = vexp(load(s + j) - largest);
        total += x;
        store(s + j, c->v_scale ? x * load(v_scale + j) : x);
    }
    if (largest != before) {
        vf kept = vexp((vf){0} + (before - largest));
        store(m->den + row * WIDTH, load(m->den + row * WIDTH) * kept);
        for (int64_t t = 0; t < m->d_v; t += WIDTH)
            store(acc + t, load(acc + t) * kept);
    }
    m->top[row] = largest;
    store(m->den + row * WIDTH, load(m->den + row * WIDTH) + total);
}

/* What will be read AHEAD of number j of KV head n: keys, then values, then the next block's keys. */
INLINE Later fetch(const Call *c, const Block *b, const Block *next, const Memory *m, int values, int64_t n, int64_t j)
{
    int64_t at = j + m->ahead, end = (b->count + m->piece - 1) / m->piece * m->piece;
    if (at >= end) {
        at -= end;
        if (m->inside || ++n == c->kv_heads)
            n = m->inside ? n : 0, b = values ? next : b, values = !values;
    }
    if (at >= b->count)
        return (Later){NULL, 0};
    return values ? (Later){b->v + at, n * b->v_head} : (Later){b->k + at, n * b->k_head};
}

static void attend_block(const Call *c, const Block *b, const Block *next, const Memory *m)
{
    int64_t heads = c->kv_heads, inside = m->inside, group = c->heads / heads;
    int64_t pieces = (b->count + m->piece - 1) / m->piece, together = m->piece == 1 ? heads : 1;
    memset(m->some, 0, (m->rows + ROWS - 1) / ROWS);
    for (int64_t i = 0; i < m->rows; i++)
        if (b->sees[i / group])
            m->some[i / ROWS] = m->rows - i / ROWS * ROWS < ROWS ? m->rows % ROWS : ROWS;
    for (int values = 0; values < 2; values++) {
        for (int64_t outer = 0; outer < (inside ? pieces : heads); outer++)
            for (int64_t inner = 0; inner < (inside ? heads : pieces); inner += together) {
                int64_t n = inside ? inner : outer, j = (inside ? outer : inner) * m->piece;
                Later later = fetch(c, b, next, m, values, n, j);
                (values ? add_piece : score_piece)(b, m, n, n + together, j, later);
            }
        for (int64_t n = 0; n < heads && !values; n++) {
            float k_scale[KEYS], v_scale[KEYS];
            for (int j = 0; c->k_scale && j < KEYS; j++) {
                int at = j < b->count ? j : b->count - 1;
                memcpy(k_scale + j, b->k_scale[at] + n * c->ks_head, sizeof *k_scale);
                memcpy(v_scale + j, b->v_scale[at] + n * c->vs_head, sizeof *v_scale);
            }
            for (int64_t i = 0; i < m->rows; i++)
                if (b->sees[i / group]) /* else its state stays */
                    weigh(c, b, m, k_scale, v_scale, n, i);
        }
    }
}

INLINE int64_t whole(int64_t d) { return (d + WIDTH - 1) / WIDTH * WIDTH; }

/* A block for whole tiles of whole vectors: its last key is named again, rows of other lengths are copied. */
static void make_whole(const Call *c, Block *b)
{
    int64_t d = whole(c->d) * SIZE, d_v = whole(c->d_v) * SIZE;
    char *to = b->copy;
    for (int j = 0; to && j < b->count; j++) {
        const char *k = b->k[j], *v = b->v[j];
        b->k[j] = to, b->v[j] = to + c->kv_heads * d;
        for (int64_t n = 0; n < c->kv_heads; n++) {
            memcpy(to + n * d, k + n * c->k_head, c->d * SIZE);
            memcpy(to + c->kv_heads * d + n * d_v, v + n * c->v_head, c->d_v * SIZE);
        }
        to += c->kv_heads * (d + d_v);
    }
    b->k_head = to ? d : c->k_head, b->v_head = to ? d_v : c->v_head;
    for (int j = b->count; j % TILE; j++)
        b->k[j] = b->k[b->count - 1], b->v[j] = b->v[b->count - 1];
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
        if (b->count) {
            make_whole(c, b);
            return;
        }
    }
}

/* Tasks first to last - 1: each one's numerators, largest scores and denominators go to `parts`. While a block is
 * computed the next one is fetched, also that of another task. Returns 0, or 1 if memory ran out. */
int decode_tasks(const Call *c, int64_t first, int64_t last)
{
    int64_t group = c->heads / c->kv_heads, n = c->num_queries, rows = group * n, all = c->kv_heads * rows;
    Memory m = {.rows = rows, .d = whole(c->d), .d_v = whole(c->d_v), .inside = c->k_head < c->k_slot};
    int64_t pairs = KEYS * n, total = c->batch * c->slots * c->kv_heads * (c->d + c->d_v) * SIZE;
    m.piece = SIZE == 4 && rows <= 16 ? TILE / 2 : TILE;
    m.piece = m.inside && SIZE == 4 && rows <= 2 && total > LARGE ? 1 : m.piece; /* in the order of memory */
    int64_t bytes = m.d * SIZE * (m.inside ? c->kv_heads : 1);
    m.ahead = (AHEAD / (bytes * m.piece) + 1) * m.piece;
    m.ahead = m.ahead > KEYS / 2 ? KEYS / 2 : m.ahead;
    int64_t copied = m.d == c->d && m.d_v == c->d_v ? 0 : KEYS * c->kv_heads * (m.d + m.d_v) * SIZE;
    int64_t floats = all * (m.d + m.d_v + KEYS + WIDTH + 1) + 2 * pairs;
    int64_t size = 4 * floats + 2 * (copied + pairs + n) + rows;
    char *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!memory)
        return 1;
    memset(memory, 0, size);
    m.q = (float *)memory, m.acc = m.q + all * m.d, m.s = m.acc + all * m.d_v, m.den = m.s + all * KEYS;
    m.top = m.den + all * WIDTH;
    float *gaps = m.top + all;
    char *copy = (char *)(gaps + 2 * pairs);
    uint8_t *seen = (uint8_t *)copy + 2 * copied, *sees = seen + 2 * pairs;
    m.some = sees + 2 * n;
    Block blocks[2] = {{.seen = seen, .sees = sees, .gaps = gaps, .copy = copied ? copy : NULL},
                       {.seen = seen + pairs, .sees = sees + n, .gaps = gaps + pairs}};
    blocks[1].copy = copied ? copy + copied : NULL;
    Block *b = blocks, *next = blocks + 1;
    Place at = {first, 0};
    fill_next(c, b, &at, last);
    for (int64_t task = first; task < last; task++) {
        int64_t row = task / c->num_chunks;
        m.slopes = c->slopes ? c->slopes + row * c->slopes_row : NULL;
        memset(m.acc, 0, all * m.d_v * sizeof *m.acc);
        memset(m.den, 0, all * WIDTH * sizeof *m.den);
        for (int64_t i = 0; i < all; i++) {
            int64_t token = i % rows / group, head = i / rows * group + i % group;
            const float *q = c->q + row * c->q_row + token * c->q_token + head * c->q_head;
            for (int64_t t = 0; t < c->d; t++)
                m.q[i * m.d + t] = q[t] * (float)c->scale;
            m.top[i] = -INFINITY;
        }
        while (b->count && b->task == task) {
            fill_next(c, next, &at, last);
            attend_block(c, b, next, &m);
            Block *done = b;
            b = next, next = done;
        }
        for (int64_t i = 0; i < all; i++) {
            float *part = c->parts + (task * all + i) * (c->d_v + 2), den = 0;
            memcpy(part, m.acc + i * m.d_v, c->d_v * sizeof *part);
            for (int t = 0; t < WIDTH; t++)
                den += m.den[i * WIDTH + t];
            part[c->d_v] = m.top[i], part[c->d_v + 1] = den;
        }
    }
    free(memory);
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
