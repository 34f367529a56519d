/* A call of the kernel, and the keys that it reads: blocks of those that some query sees. */
#include "vectors.h"

#define KEYS 128 /* of a block */

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
    int64_t sharers, selected_row;   /* rows that read one row of the cache; elements between rows of `selected` */
    double scale, softcap;
    const float *q;
    const char *k, *v, *k_scale, *v_scale;
    const int32_t *table, *selected; /* selected: the slots that a row reads, -1: none; NULL: all, in order */
    const int64_t *lengths, *q_pos, *k_pos;
    const float *slopes; /* ALiBi's, [batch or 1, heads]; NULL: none */
    float *parts; /* [batch, num_chunks, kv_heads, rows, d_v + 2]: numerators, largest score, denominator */
    float *out;   /* [batch, num_queries, heads, d_v + 1]: out, then lse */
} Call;

typedef struct {
    int64_t task;
    int count, masked; /* masked: some query does not see some key */
    const char *k[KEYS], *v[KEYS], *k_scale[KEYS], *v_scale[KEYS]; /* of KV head 0 */
    int64_t k_head, v_head; /* between heads */
    char *copy; /* of keys and values that are no whole vectors, with zeros behind them; NULL: none */
    uint8_t *seen, *sees; /* [num_queries, KEYS], and [num_queries]: whether a query sees some key */
    float *gaps; /* [num_queries, KEYS]: between positions; for ALiBi */
} Block;

/* A key of KV head 0: slot `at` of page `number` of a row of the cache. */
INLINE void put_key(const Call *c, Block *b, int64_t row, int64_t number, int64_t at)
{
    int64_t page = c->table ? c->table[row * c->table_row + number] : row;
    b->k[b->count] = c->k + page * c->k_page + at * c->k_slot;
    b->v[b->count] = c->v + page * c->v_page + at * c->v_slot;
    if (c->k_scale) {
        b->k_scale[b->count] = c->k_scale + page * c->ks_page + at * c->ks_slot;
        b->v_scale[b->count] = c->v_scale + page * c->vs_page + at * c->vs_slot;
    }
    b->count++;
}

/* The next block of selected keys, from *entry of the row's list on. */
static void fill_selected(const Call *c, Block *b, int64_t row, int64_t *entry, int64_t end)
{
    const int32_t *selected = c->selected + row * c->selected_row;
    b->count = b->masked = 0;
    memset(b->sees, 1, c->num_queries);
    for (; *entry < end && b->count < KEYS; ++*entry)
        if (selected[*entry] >= 0)
            put_key(c, b, row / c->sharers, selected[*entry] / c->page_size, selected[*entry] % c->page_size);
}

/* The next block of keys that some query sees, from *slot on; hidden ones are not read: they may be NaN. */
static void fill(const Call *c, Block *b, int64_t row, int64_t *slot, int64_t end)
{
    int64_t number = *slot / c->page_size, at = *slot % c->page_size;
    b->count = b->masked = 0;
    memset(b->sees, !c->k_pos, c->num_queries);
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
                b->sees[i] |= sees;
                if (c->slopes)
                    b->gaps[i * KEYS + b->count] = gap < 0 ? -gap : gap;
                seen_by += sees;
            }
            if (!seen_by)
                continue;
            b->masked |= seen_by < c->num_queries;
        }
        put_key(c, b, row, number, at);
    }
}
