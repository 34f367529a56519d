/* Collectives among the ranks of one host, through memory that they share; __init__.py has the rest.
 *
 * A collective is one or several steps. In a step every rank writes a piece into its slot, publishes the step's number,
 * and reads the others' slots once they have published it, too. Slots alternate between steps, and a rank writes into one
 * again only after all have published the step in between, so nobody reads it any more. Sums are added up in rank order.
 *
 * A rank that waits looks for a while, unless more ranks are awake than there are cores: those that it waits for may need
 * this one. Then it sleeps on a futex. (With sched_yield, which Linux takes for having used up a slice of time, other
 * processes would run first.) The others wake it up when the last one that it waits for has come. All accesses to what
 * is shared and changes are sequentially consistent: either the sleeper sees the step, or its publisher sees the sleeper. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "states.h"

#define LINE 128           /* bytes that no two ranks write to */
#define LOOKS_NS 10000     /* for so long a rank looks before it sleeps: about what it takes to sleep and be woken */
#define SLEEPS_NS 50000000 /* for so long it sleeps before the caller looks what keeps the others */
#define ONE_ROUND 65536    /* bytes of all ranks together that every rank adds up itself */
#define EVERYONE -1

enum { DONE, WAITING, DIFFERENT };
enum { GATHER, EXCHANGE, BROADCAST, MERGE, SUM_F32, SUM_F64, SUM_BF16 }; /* __init__.py has the same */

typedef struct {
    _Alignas(LINE) _Atomic uint64_t step;    /* the last one that this rank has published */
    _Alignas(LINE) _Atomic uint64_t awaited; /* the step that it sleeps for, 0: it does not */
    _Atomic int64_t source;                  /* whose, or EVERYONE's */
    _Atomic uint32_t bell;                   /* the futex: goes up to wake it */
} Rank;

typedef struct {
    _Alignas(LINE) int64_t op, source, bytes; /* of the collective: what all must agree on */
    uint64_t stamp;                           /* of the call, for the same */
    _Alignas(LINE) char data[];
} Slot;

typedef struct { /* __init__.py has the same */
    char *memory;
    int64_t world, rank, capacity; /* bytes of a slot's data */
    int64_t cores;                 /* for these ranks */
    uint64_t step, stamp;          /* of this rank, and of the call that it is in */
    int64_t at;                    /* bytes of the collective that are done; */
    int32_t round, published;      /* where in a piece it is */
    int32_t fd;
} Team;

typedef struct {
    int64_t op, source; /* EVERYONE, or the rank that broadcasts */
    const char *in;
    char *out;
    int64_t bytes; /* of in; of an exchange of one of its entries; of a gather by parts of all of them */
    const int64_t *parts; /* of a gather: bytes of every rank, NULL: equal; of MERGE: columns, first of the rows, number */
} Call;

static Rank *rank_of(const Team *t, int64_t r) { return (Rank *)t->memory + r; }

static Slot *slot_of(const Team *t, uint64_t step, int64_t r)
{
    int64_t size = sizeof(Slot) + t->capacity;
    return (Slot *)(t->memory + t->world * sizeof(Rank) + ((int64_t)(step & 1) * t->world + r) * size);
}

int64_t bytes_needed(int64_t world, int64_t capacity)
{
    return world * (int64_t)sizeof(Rank) + 2 * world * ((int64_t)sizeof(Slot) + capacity);
}

static int has_come(const Team *t, uint64_t step, int64_t source)
{
    if (source != EVERYONE)
        return atomic_load(&rank_of(t, source)->step) >= step;
    for (int64_t r = 0; r < t->world; r++)
        if (atomic_load(&rank_of(t, r)->step) < step)
            return 0;
    return 1;
}

/* Whether each rank that does not sleep can have a core of its own. */
static int has_core(const Team *t)
{
    int64_t awake = 0;
    for (int64_t r = 0; r < t->world; r++)
        awake += atomic_load(&rank_of(t, r)->awaited) == 0;
    return awake <= t->cores;
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* 1 once it has come, 0 after a while. */
static int wait_for(const Team *t, uint64_t step, int64_t source)
{
    if (has_come(t, step, source))
        return 1;
    for (int64_t end = now() + LOOKS_NS; has_core(t) && now() < end;)
        if (has_come(t, step, source))
            return 1;
    Rank *own = rank_of(t, t->rank);
    struct timespec limit = {.tv_nsec = SLEEPS_NS};
    uint32_t bell = atomic_load(&own->bell);
    atomic_store(&own->source, source);
    atomic_store(&own->awaited, step);
    if (!has_come(t, step, source))
        syscall(SYS_futex, &own->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    atomic_store(&own->awaited, 0);
    return has_come(t, step, source);
}

static void publish(const Team *t, uint64_t step)
{
    atomic_store(&rank_of(t, t->rank)->step, step);
    for (int64_t r = 0; r < t->world; r++) {
        Rank *other = rank_of(t, r);
        uint64_t awaited = r == t->rank ? 0 : atomic_load(&other->awaited);
        if (awaited && has_come(t, awaited, atomic_load(&other->source)) &&
            atomic_compare_exchange_strong(&other->awaited, &awaited, 0)) { /* from now on it counts as awake */
            atomic_fetch_add(&other->bell, 1);
            syscall(SYS_futex, &other->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
        }
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float of_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float x) /* to the nearest, ties to even */
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define BLOCK 512 /* elements that are added up at once */
#define ADD_UP(NAME, TYPE, WIDE, WIDEN, NARROW)                                                  \
    static void NAME(const Team *t, uint64_t step, int64_t first, int64_t stop, char *result)    \
    {                                                                                            \
        WIDE total[BLOCK];                                                                       \
        for (int64_t at = first, n; at < stop; at += n) {                                        \
            n = least(BLOCK, stop - at);                                                         \
            for (int64_t r = 0; r < t->world; r++) {                                             \
                const TYPE *x = (const TYPE *)slot_of(t, step, r)->data + at;                    \
                if (r == 0)                                                                      \
                    for (int64_t i = 0; i < n; i++)                                              \
                        total[i] = WIDEN(x[i]);                                                  \
                else                                                                             \
                    for (int64_t i = 0; i < n; i++)                                              \
                        total[i] += WIDEN(x[i]);                                                 \
            }                                                                                    \
            for (int64_t i = 0; i < n; i++)                                                      \
                ((TYPE *)result)[at + i] = NARROW(total[i]);                                     \
        }                                                                                        \
    }
ADD_UP(add_up_f32, float, float, , )
ADD_UP(add_up_f64, double, double, , )
ADD_UP(add_up_bf16, uint16_t, float, of_bf16, to_bf16)

static void add_up(const Team *t, int64_t op, uint64_t step, int64_t first, int64_t stop, char *result)
{
    if (op == SUM_F32)
        add_up_f32(t, step, first, stop, result);
    else if (op == SUM_F64)
        add_up_f64(t, step, first, stop, result);
    else
        add_up_bf16(t, step, first, stop, result);
}

static int64_t item_size(int64_t op) { return op == SUM_F64 ? 8 : op == SUM_F32 ? 4 : 2; }

static int rounds_of(const Team *t, const Call *c)
{
    return c->op >= SUM_F32 && c->bytes * t->world > ONE_ROUND ? 2 : 1;
}

/* The elements of a piece of n bytes that a rank adds up in the second of two rounds. */
static int64_t first_of(const Team *t, const Call *c, int64_t n, int64_t rank)
{
    int64_t count = n / item_size(c->op), share = (count + t->world - 1) / t->world;
    return least(rank * share, count);
}

/* The bytes of a rank in a piece of at most n bytes of a gather. */
static int64_t part_of(const Team *t, const Call *c, int64_t n, int64_t rank)
{
    int64_t left = c->parts[rank] - t->at;
    return left < 0 ? 0 : least(left, n);
}

/* Write this rank's part of a piece of n bytes into its slot. */
static void put(const Team *t, const Call *c, int64_t n, char *data)
{
    const char *in = c->in + t->at;
    if (c->op == GATHER && c->parts)
        n = part_of(t, c, n, t->rank);
    if (t->round == 1)
        add_up(t, c->op, t->step - 1, first_of(t, c, n, t->rank), first_of(t, c, n, t->rank + 1), data);
    else if (c->op == EXCHANGE)
        for (int64_t r = 0; r < t->world; r++)
            memcpy(data + r * n, in + r * c->bytes, n);
    else if (c->op != BROADCAST || c->source == t->rank)
        memcpy(data, in, n);
}

/* Take the result from all slots. */
static void take(const Team *t, const Call *c, int64_t n)
{
    char *out = c->out + t->at;
    if (t->round == 1) {
        for (int64_t r = 0; r < t->world; r++) {
            int64_t first = first_of(t, c, n, r) * item_size(c->op), stop = first_of(t, c, n, r + 1) * item_size(c->op);
            memcpy(out + first, slot_of(t, t->step, r)->data + first, stop - first);
        }
    } else if (c->op == MERGE) {
        int64_t columns = c->parts[0], skipped = c->parts[1] * columns * sizeof(float);
        const float *first = (const float *)(slot_of(t, t->step, 0)->data + skipped);
        int64_t next = (int64_t)(sizeof(Slot) + t->capacity) / (int64_t)sizeof(float);
        merge_states(first, (float *)out, t->world, next, c->parts[2], columns);
    } else if (c->op == GATHER && c->parts) {
        for (int64_t r = 0; r < t->world; out += c->parts[r++])
            memcpy(out, slot_of(t, t->step, r)->data, part_of(t, c, n, r));
    } else if (c->op == BROADCAST) {
        if (c->source != t->rank)
            memcpy(out, slot_of(t, t->step, c->source)->data, n);
    } else if (c->op >= SUM_F32) {
        if (rounds_of(t, c) == 1)
            add_up(t, c->op, t->step, 0, n / item_size(c->op), out);
    } else {
        int64_t own = c->op == EXCHANGE ? t->rank * n : 0;
        for (int64_t r = 0; r < t->world; r++)
            memcpy(out + r * c->bytes, slot_of(t, t->step, r)->data + own, n);
    }
}

static int differs(const Team *t, const Call *c)
{
    for (int64_t r = 0; r < t->world; r++) {
        Slot *x = slot_of(t, t->step, r);
        if ((c->source == EVERYONE || c->source == r) &&
            (x->stamp != t->stamp || x->op != c->op || x->source != c->source || x->bytes != c->bytes))
            return 1;
    }
    return 0;
}

/* One collective:
 *   GATHER     in [bytes] of every rank -> out [world, bytes]; with parts in [parts[rank]] -> out [bytes], their sum
 *   EXCHANGE   in [world, bytes] -> out [world, bytes]: entry r came from rank r, whose entry for this rank it was
 *   BROADCAST  in [bytes] of rank `source` -> out [bytes] of the others
 *   MERGE      in [bytes], at most a slot, a state of every rank -> out, the merged states of some rows
 *   SUM_...    in [bytes] of every rank -> out [bytes]; bf16 is added up in fp32. Large ones in two rounds: every rank
 *              adds up its share of a piece, and hands it out
 * WAITING: call it again, with fresh = 0, to go on waiting. */
int collective(Team *t, int64_t op, int64_t source, const char *in, char *out, int64_t bytes, const int64_t *parts,
               int32_t fresh)
{
    Call c = {op, source, in, out, bytes, parts};
    int64_t most = op == EXCHANGE ? t->capacity / t->world : t->capacity, end = bytes;
    if (op == GATHER && parts)
        for (int64_t r = end = 0; r < t->world; r++)
            end = parts[r] > end ? parts[r] : end;
    if (fresh)
        t->at = t->round = t->published = 0;
    while (t->at < end) {
        int64_t n = least(most, end - t->at);
        if (!t->published) {
            if (!wait_for(t, t->step, EVERYONE))
                return WAITING;
            Slot *own = slot_of(t, ++t->step, t->rank);
            own->op = op;
            own->source = source;
            own->bytes = bytes;
            own->stamp = t->stamp;
            put(t, &c, n, own->data);
            publish(t, t->step);
            t->published = 1;
        }
        if (!wait_for(t, t->step, source))
            return WAITING;
        if (differs(t, &c))
            return DIFFERENT;
        take(t, &c, n);
        t->published = 0;
        t->round = (t->round + 1) % rounds_of(t, &c);
        if (t->round == 0)
            t->at += n;
    }
    return DONE;
}

/* Take the lock that the others see while this process is alive; 0: it is taken. */
int be_alive(const Team *t)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = t->rank, .l_len = 1};
    return fcntl(t->fd, F_SETLK, &lock) ? errno : 0;
}

static int is_alive(const Team *t, int64_t r)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = r, .l_len = 1};
    return r == t->rank || fcntl(t->fd, F_GETLK, &lock) || lock.l_type != F_UNLCK;
}

/* Whom this rank waits for: late[r] = 1 if rank r has not come to this step, 2 if its process is gone as well. */
void see_who_is_late(const Team *t, int8_t *late)
{
    int64_t source = atomic_load(&rank_of(t, t->rank)->source);
    for (int64_t r = 0; r < t->world; r++) {
        int gone = !is_alive(t, r); /* asked first: a rank may come and end in between */
        int awaited = (source == EVERYONE || source == r) && atomic_load(&rank_of(t, r)->step) < t->step;
        late[r] = awaited ? 1 + gone : 0;
    }
}

/* Whether this process sees the locks of all ranks. */
int sees_all(const Team *t)
{
    for (int64_t r = 0; r < t->world; r++)
        if (!is_alive(t, r))
            return 0;
    return 1;
}
