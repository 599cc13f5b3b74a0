// The pieces of an exchange: each rank posts its own, waits for all others', and reads what it needs of them.
#include "exchange.h"

#include <algorithm>
#include <atomic>

#include "waiting.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

struct alignas(64) Head {
    std::atomic<uint32_t> posted;  // the number of the last piece in the rank's buffer
    std::atomic<uint32_t> waiting;  // ranks that sleep until it changes
    std::atomic<uint64_t> what[2];  // kind and bytes of the exchange that the piece in each buffer is of
    std::atomic<uint64_t> shown;
};
struct alignas(64) Bell {
    std::atomic<uint32_t> changes;
    std::atomic<uint32_t> waiting;  // ranks that sleep until it changes
    std::atomic<uint32_t> called;
};
static_assert(sizeof(Head) == 64 && std::atomic<uint64_t>::is_always_lock_free, "heads are shared by processes");

Head& head(const Exchange& own, int rank) { return ((Head*)own.memory)[1 + rank]; }
Bell& bell(const Exchange& own) { return ((Bell*)own.memory)[1 + kMostExchanging]; }
static_assert(sizeof(Bell) == 64 && (2 + kMostExchanging) * 64 <= kHeadPage, "the bell is on the page of heads");
// Two buffers take turns. Whoever writes the piece n has seen all ranks post n - 1, and so be done with reading n - 2,
// which lay where n goes to.
char* buffer(const Exchange& own, int rank, uint32_t number) {
    return own.memory + kHeadPage + (int64_t(rank) * 2 + number % 2) * own.capacity;
}

void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
#if defined(__linux__)
    timespec left{time_t(nanoseconds / 1000000000), long(nanoseconds % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &left, nullptr, 0);
#else
    (void)word, (void)seen;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min<int64_t>(nanoseconds, 50000)));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, kMostExchanging, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

void post(Exchange& own, uint64_t what) {
    Head& mine = head(own, own.rank);
    mine.what[(own.number + 1) % 2].store(what, std::memory_order_relaxed);
    mine.posted.store(own.number + 1, std::memory_order_seq_cst);
    if (mine.waiting.load(std::memory_order_seq_cst)) wake_all(mine.posted);
}

// Whether `word`, of which `waiting` says how many sleep for it, has become what is waited for in time.
template <class Ready>
bool await_word(std::atomic<uint32_t>& word, std::atomic<uint32_t>& waiting, const Ready& ready, int milliseconds) {
    if (spin(ready)) return true;
    using Clock = std::chrono::steady_clock;
    auto end = Clock::now() + std::chrono::milliseconds(milliseconds);
    waiting.fetch_add(1, std::memory_order_seq_cst);
    bool come = false;
    while (true) {
        uint32_t seen = word.load(std::memory_order_seq_cst);
        if ((come = ready())) break;
        int64_t left = std::chrono::duration_cast<std::chrono::nanoseconds>(end - Clock::now()).count();
        if (left <= 0) break;
        sleep_until_changed(word, seen, left);
    }
    waiting.fetch_sub(1, std::memory_order_seq_cst);
    return come;
}

bool await(Head& other, uint32_t number, int milliseconds) {
    auto ready = [&] { return int32_t(other.posted.load(std::memory_order_seq_cst) - number) >= 0; };
    return await_word(other.posted, other.waiting, ready, milliseconds);
}

template <class Item> void sum_into(const Exchange& own, uint32_t number, Item* x, int64_t bytes) {
    int64_t count = bytes / int64_t(sizeof(Item)), i = 0;
    const Item* from[kMostExchanging];
    for (int rank = 0; rank < own.ranks; ++rank) from[rank] = (const Item*)buffer(own, rank, number);
    for (; i + kLanes <= count; i += kLanes) {
        F sum = load(from[0] + i);
        for (int rank = 1; rank < own.ranks; ++rank) sum = sum + load(from[rank] + i);
        store(x + i, sum);
    }
    if (i == count) return;
    // Buffers are longer than what is in them: the last lanes may be read, and are not kept.
    Item lanes[kLanes];
    F sum = load(from[0] + i);
    for (int rank = 1; rank < own.ranks; ++rank) sum = sum + load(from[rank] + i);
    store(lanes, sum);
    memcpy(x + i, lanes, size_t(count - i) * sizeof(Item));
}

// A rank's own part of an exchange reaches the buffers only where another one reads it.
bool gives(const Exchange& own, ExchangeKind kind) {
    return kind == ExchangeKind::kSum || (kind == ExchangeKind::kGather) == (own.rank > 0);
}

void read_piece(const Exchange& own, ExchangeKind kind, Number kept, char* x, int64_t bytes, char* to, int64_t piece) {
    uint32_t number = own.number + 1;
    char* at = x + own.done;
    switch (kind) {
        case ExchangeKind::kSum:
            if (kept == Number::kHalf) sum_into(own, number, (Bf16*)at, piece);
            else sum_into(own, number, (float*)at, piece);
            return;
        case ExchangeKind::kGather:
            if (own.rank) return;
            memcpy(to + own.done, at, size_t(piece));
            for (int rank = 1; rank < own.ranks; ++rank)
                memcpy(to + rank * bytes + own.done, buffer(own, rank, number), size_t(piece));
            return;
        case ExchangeKind::kBroadcast:
            if (own.rank) memcpy(at, buffer(own, 0, number), size_t(piece));
            return;
    }
}

}  // namespace

int advance(Exchange& own, ExchangeKind kind, Number kept, char* x, int64_t bytes, char* to, int milliseconds) {
    uint64_t what = uint64_t(bytes) << 2 | uint64_t(kind);
    while (own.done < bytes) {
        int64_t piece = std::min(own.capacity, bytes - own.done);
        uint32_t number = own.number + 1;
        if (!own.posted) {
            if (gives(own, kind)) memcpy(buffer(own, own.rank, number), x + own.done, size_t(piece));
            post(own, what);
            own.posted = 1;
        }
        for (int rank = 0; rank < own.ranks; ++rank) {
            if (rank == own.rank) continue;
            if (!await(head(own, rank), number, milliseconds)) return 1 + rank;
            if (head(own, rank).what[number % 2].load(std::memory_order_relaxed) != what) return kOtherExchange;
        }
        read_piece(own, kind, kept, x, bytes, to, piece);
        own.number = number;
        own.posted = 0;
        own.done += piece;
    }
    own.done = 0;
    return 0;
}

BellState bell_state(const Exchange& own) {
    uint32_t changes = bell(own).changes.load(std::memory_order_seq_cst);  // first: what is called later is a change, too
    return {changes, bell(own).called.load(std::memory_order_seq_cst)};
}

void ring(Exchange& own, bool calls, uint32_t call) {
    Bell& shared = bell(own);
    uint32_t called = shared.called.load(std::memory_order_seq_cst);
    while (calls && int32_t(call - called) > 0 && !shared.called.compare_exchange_weak(called, call)) {
    }
    shared.changes.fetch_add(1, std::memory_order_seq_cst);
    if (shared.waiting.load(std::memory_order_seq_cst)) wake_all(shared.changes);
}

void await_ring(Exchange& own, uint32_t seen, int milliseconds) {
    Bell& shared = bell(own);
    auto ready = [&] { return shared.changes.load(std::memory_order_seq_cst) != seen; };
    await_word(shared.changes, shared.waiting, ready, milliseconds);
}

void show(Exchange& own, uint64_t shown) { head(own, own.rank).shown.store(shown, std::memory_order_seq_cst); }

uint64_t shown_by(const Exchange& own, int rank) { return head(own, rank).shown.load(std::memory_order_seq_cst); }
