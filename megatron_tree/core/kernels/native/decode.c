/* Decoding on a CPU: attention of few queries over a KV cache that is read once, dense or in pages, fp32 or narrower.
 *
 * A task is CHUNK slots of one row of the batch, with all its heads. It walks over blocks of KEYS visible keys: scores,
 * weights, values. Up to ROWS query rows of a KV head share what was read in registers, and what comes later is fetched
 * meanwhile. A large cache in fp32 is read key by key, in the order of memory: only so does the processor read ahead as
 * well; else TILE keys at a time fill the registers. Numbers are widened there, everything is summed in fp32. A task's
 * state depends on nothing but its slots: bits are the same for any batch, pages and number of threads. The numbers at
 * the formulas are those of docs/design.md, section 1.
 */
#include "blocks.h"

#define ROWS 4            /* query rows that share what was read */
#define TILE 16           /* keys that are read together; the most sums of vectors at a time */
#define LARGE (8ll << 20) /* bytes of keys and values that no cache holds */
#define AHEAD 8192        /* bytes from what is read to what is fetched */
#if defined(__AVX512F__) || defined(__aarch64__)
#define OF_32(yes, no) yes /* registers; others have 16 */
#else
#define OF_32(yes, no) no
#endif

typedef struct { /* a task's memory; rows of the queries: KV head, query, head of the group; d and d_v: whole vectors */
    int64_t rows, d, d_v, ahead, inside; /* inside: the heads of a key lie together */
    int64_t piece;                       /* keys that are read together: TILE or 1 */
    float *q, *acc, *s, *den, *top;      /* q: vectors of ROWS rows alternate; den [.., WIDTH] */
    uint8_t *some; /* for every ROWS rows: how many share what is read; 0: none sees a key of the block */
    const float *slopes;
    const char *later[KEYS]; /* for each key or value of the block: what comes AHEAD of it, of the same head */
} Memory;

typedef struct { /* of a block: keys `from` to `to` - 1 of KV heads `head` to `heads` - 1, for ROWS of their rows */
    int64_t from, to, head, heads, row;
    const char *const *later; /* what to fetch meanwhile: the first 2 ROWS rows do, as processors drop some requests */
} Part;

/* Scores s [.., KEYS] of `rows` queries of each of `heads` KV heads, with 1, 2 or 4 `keys`. */
INLINE void score_tile(const char *const *key, const char *const *later, int64_t k_head, const float *q, int64_t d,
                       float *s, int rows, int keys, int heads)
{
    vf sum[TILE] = {0}, y[ROWS];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < d; i += WIDTH) {
            for (int r = 0; r < rows; r++) {
                y[r] = load(q + h * rows * d + i * rows + r * WIDTH);
                if (keys > 1)
                    HOLD(y[r]);
            }
            for (int t = 0; t < keys; t++) {
                if (i * SIZE % 64 == 0)
                    __builtin_prefetch(later[t] + h * k_head + i * SIZE);
                vf x = widen(key[t] + h * k_head + i * SIZE);
                if (rows > 1)
                    HOLD(x);
                for (int r = 0; r < rows; r++)
                    sum[(h * rows + r) * keys + t] += y[r] * x;
            }
        }
#pragma GCC unroll 4
    for (int t = 0; t < rows * keys * heads; t += 4) {
        v4 x = sums(sum[t], sum[t + 1], sum[t + 2], sum[t + 3]);
        for (int u = 0; u < 4 && t + u < rows * keys * heads; u++)
            s[(t + u) / keys * KEYS + (t + u) % keys] = x[u];
    }
}

INLINE void score_part(const Block *b, const Memory *m, const Part *part, int rows, int keys, int heads)
{
    const int64_t d = m->d, k_head = b->k_head, all = m->rows, piece = keys == 1 ? 1 : TILE, to = part->to;
    for (int64_t from = part->from; from < to; from += piece)
        for (int64_t n = part->head, several; n < part->heads; n += several ? heads : 1) {
            const float *q = m->q + (n * all + part->row) * d;
            float *s = m->s + (n * all + part->row) * KEYS;
            several = n + heads <= part->heads;
            for (int64_t j = from; j < from + piece; j += keys) {
                const char *key[4], *later[4];
                for (int t = 0; t < keys; t++)
                    key[t] = b->k[j + t] + n * k_head, later[t] = part->later[j + t] + n * k_head;
                if (several)
                    score_tile(key, later, k_head, q, d, s + j, rows, keys, heads);
                else
                    score_tile(key, later, k_head, q, d, s + j, rows, keys, 1);
            }
        }
}

/* acc [rows, d_v] += p [rows, KEYS] times `keys` values, from a column on `vectors` at a time. Returns what is left. */
INLINE int64_t add_tile(const char *const *value, const char *const *later, int64_t keys, int64_t head, const float *p,
                        float *acc, int64_t d_v, int64_t from, int rows, int vectors)
{
    vf sum[TILE];
    for (; from + vectors * WIDTH <= d_v; from += vectors * WIDTH) {
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < vectors; t++)
                sum[r * vectors + t] = load(acc + r * d_v + from + t * WIDTH);
        for (int64_t j = 0; j < keys; j++) {
            const char *v = value[j] + head + from * SIZE, *next = later[j] + head + from * SIZE;
            for (int t = 0; t < vectors; t++) {
                if (t * WIDTH * SIZE % 64 == 0)
                    __builtin_prefetch(next + t * WIDTH * SIZE);
                vf x = widen(v + t * WIDTH * SIZE);
                if (rows > 1)
                    HOLD(x);
                for (int r = 0; r < rows; r++)
                    sum[r * vectors + t] += p[r * KEYS + j] * x;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < vectors; t++)
                store(acc + r * d_v + from + t * WIDTH, sum[r * vectors + t]);
    }
    return from;
}

INLINE void add_part(const Block *b, const Memory *m, const Part *part, int rows, int piece, int vectors)
{
    const int64_t d_v = m->d_v, v_head = b->v_head, all = m->rows, to = part->to;
    for (int64_t j = part->from; j < to; j += piece)
        for (int64_t n = part->head; n < part->heads; n++) {
            const float *p = m->s + (n * all + part->row) * KEYS + j;
            float *acc = m->acc + (n * all + part->row) * d_v;
            int64_t keys = to - j < piece ? to - j : piece, t = 0;
            t = add_tile(b->v + j, part->later + j, keys, n * v_head, p, acc, d_v, t, rows, vectors);
            t = add_tile(b->v + j, part->later + j, keys, n * v_head, p, acc, d_v, t, rows, vectors / 2);
            add_tile(b->v + j, part->later + j, keys, n * v_head, p, acc, d_v, t, rows, 1);
        }
}

typedef void Step(const Block *b, const Memory *m, const Part *part);

/* For R rows, with tiles of some keys of a head, or of a key's heads. Inlined into one, they lack registers. */
#define STEP(name, ...)                                                                                                \
    static __attribute__((noinline)) void name(const Block *b, const Memory *m, const Part *part) { __VA_ARGS__; }
#define STEPS(R, NUM_KEYS, HEADS, VECTORS)                                                                             \
    STEP(score_keys_##R, score_part(b, m, part, R, NUM_KEYS, 1))                                                       \
    STEP(score_key_##R, score_part(b, m, part, R, 1, HEADS))                                                           \
    STEP(add_keys_##R, add_part(b, m, part, R, TILE, VECTORS))                                                         \
    STEP(add_key_##R, add_part(b, m, part, R, 1, VECTORS))
STEPS(1, 4, 4, 8)
STEPS(2, 4, 4, OF_32(8, 4))
STEPS(3, 4, 4, 4)
STEPS(4, OF_32(4, 2), OF_32(4, 2), OF_32(4, 2))
static Step *const score_keys[] = {score_keys_1, score_keys_2, score_keys_3, score_keys_4};
static Step *const score_key[] = {score_key_1, score_key_2, score_key_3, score_key_4};
static Step *const add_keys[] = {add_keys_1, add_keys_2, add_keys_3, add_keys_4};
static Step *const add_key[] = {add_key_1, add_key_2, add_key_3, add_key_4};

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

/* Names what is fetched while the keys, or the values, of KV head n are read: what comes `ahead` keys later, at the end
 * the next head's, or the values, or the next block's keys. */
static void look_ahead(const Block *b, const Block *next, Memory *m, int values, int64_t n, int64_t heads, int end)
{
    const char *const *now = values ? b->v : b->k, *const *then = now;
    int64_t ahead = m->ahead < end ? m->ahead : end, head = values ? b->v_head : b->k_head, offset = head;
    if (m->inside || n + 1 == heads)
        then = !values ? b->v : next->count ? next->k : b->k, offset = -n * head;
    memcpy(m->later, now + ahead, (end - ahead) * sizeof *now);
    for (int64_t j = 0; j < ahead; j++)
        m->later[end - ahead + j] = then[j] + offset;
}

static void attend_block(const Call *c, const Block *b, const Block *next, Memory *m)
{
    int64_t heads = c->kv_heads, group = c->heads / heads, together = m->inside ? heads : 1;
    int end = (b->count + TILE - 1) / TILE * TILE, length = m->rows > ROWS ? TILE : end;
    memset(m->some, 0, (m->rows + ROWS - 1) / ROWS);
    for (int64_t i = 0; i < m->rows; i++)
        if (b->sees[i / group])
            m->some[i / ROWS] = m->rows - i / ROWS * ROWS < ROWS ? m->rows % ROWS : ROWS;
    for (int values = 0; values < 2; values++) {
        Step *const *steps = m->piece == 1 ? (values ? add_key : score_key) : values ? add_keys : score_keys;
        for (int64_t n = 0; n < heads; n += together) {
            look_ahead(b, next, m, values, n, heads, end);
            for (int64_t j = 0; j < end; j += length)
                for (int64_t i = 0; i < m->rows; i += ROWS) {
                    int64_t to = values && j + length > b->count ? b->count : j + length;
                    const char *const *later = i < 2 * ROWS ? m->later : values ? b->v : b->k;
                    if (m->some[i / ROWS])
                        steps[m->some[i / ROWS] - 1](b, m, &(Part){j, to, n, n + together, i, later});
                }
        }
        for (int64_t n = 0; n < heads && !values; n++) {
            float k_scale[KEYS], v_scale[KEYS];
            for (int j = 0; c->k_scale && j < KEYS; j++) {
                int at = j < b->count ? j : b->count - 1;
                memcpy(k_scale + j, b->k_scale[at] + n * c->ks_head, sizeof *k_scale);
                memcpy(v_scale + j, b->v_scale[at] + n * c->vs_head, sizeof *v_scale);
            }
            for (int64_t i = 0; i < m->rows; i++)
                if (m->some[i / ROWS]) /* else its state stays; so it does with weights of 0 */
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
    for (int j = b->count; j < KEYS; j++)
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
    int64_t bytes = m.d * SIZE * (m.inside ? c->kv_heads : 1); /* that lie together */
    int few = SIZE == 4 && rows <= ROWS && (rows * 4 <= WIDTH || bytes >= 2048); /* products for each number */
    m.piece = few && m.inside && total > LARGE ? 1 : TILE;
    m.ahead = AHEAD / (bytes * m.piece) * m.piece + m.piece;
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
            int64_t r = i % rows % ROWS, first = i % rows - r, together = rows - first < ROWS ? rows - first : ROWS;
            for (int64_t t = 0; t < c->d; t++)
                m.q[(i - r) * m.d + (t / WIDTH * together + r) * WIDTH + t % WIDTH] = q[t] * (float)c->scale;
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
