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
struct alignas(64) Notifier {
    std::atomic<uint32_t> changes;
    std::atomic<uint32_t> waiting;  // ranks that sleep until it changes
    std::atomic<uint32_t> called;
};
static_assert(sizeof(Head) == 64 && std::atomic<uint64_t>::is_always_lock_free, "heads are shared by processes");

Head& head(const Exchange& own, int rank) { return ((Head*)own.memory)[1 + rank]; }
Notifier& notifier(const Exchange& own) { return ((Notifier*)own.memory)[1 + kMaxRanks]; }
static_assert(sizeof(Notifier) == 64 && (2 + kMaxRanks) * 64 <= kHeadPage, "the notifier is on the page of heads");
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
    syscall(SYS_futex, &word, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
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

// x becomes the sum of `count` items of so many `parts`, in their order. All but the lanes behind the last whole ones are
// read as they lie.
template <class Item> void sum_into(int parts, const Item* const* from, Item* x, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        F sum = load(from[0] + i);
        for (int part = 1; part < parts; ++part) sum = sum + load(from[part] + i);
        store(x + i, sum);
    }
    if (i == count) return;
    size_t rest = size_t(count - i) * sizeof(Item);
    Item lanes[kLanes] = {};
    memcpy(lanes, from[0] + i, rest);
    F sum = load(lanes);
    for (int part = 1; part < parts; ++part) {
        memcpy(lanes, from[part] + i, rest);
        sum = sum + load(lanes);
    }
    store(lanes, sum);
    memcpy(x + i, lanes, rest);
}

// The piece of an exchange that is under way: bytes of x from `first` to `end`.
struct Piece {
    uint32_t number;
    int64_t first;
    int64_t end;
    Share of(Share share) const {
        int64_t from = std::max(first, share.first);
        return {from, std::max(from, std::min(end, share.end))};
    }
};

void put(Exchange& own, const Piece& piece, const char* x, Share part) {
    char* at = buffer(own, own.rank, piece.number) + (part.first - piece.first);
    memcpy(at, x + part.first, size_t(part.end - part.first));
    own.sent += part.end - part.first;
}

void take(Exchange& own, const Piece& piece, int rank, char* to, Share part) {
    memcpy(to, buffer(own, rank, piece.number) + (part.first - piece.first), size_t(part.end - part.first));
    own.received += part.end - part.first;
}

// The parts of a piece that are in the share of another rank, each once.
template <class Each> void each_other_share(const Exchange& own, const Share* shares, const Each& each) {
    int64_t last = -1;
    for (int rank = 0; rank < own.ranks; ++rank) {
        if (rank == own.rank || shares[rank].first == shares[rank].end || shares[rank].first == last) continue;
        last = shares[rank].first;
        each(rank, shares[rank]);
    }
}

bool has(uint64_t ranks, int rank) { return ranks >> rank & 1; }

// The rows of a share that are in a piece, which has whole ones.
template <class Each> void each_row(const Piece& piece, const RoutedRows& rows, Share share, const Each& each) {
    Share part = piece.of(share);
    for (int64_t at = part.first; at < part.end; at += rows.width) each(Share{at, at + rows.width});
}

// A rank's part of an exchange reaches the buffers only where another one reads it.
void give(Exchange& own, ExchangeKind kind, const Piece& piece, const char* x, const void* to) {
    const Share* shares = (const Share*)to;
    const RoutedRows& rows = *(const RoutedRows*)to;
    switch (kind) {
        case ExchangeKind::kSum: return put(own, piece, x, {piece.first, piece.end});
        case ExchangeKind::kGather:
            if (own.rank) put(own, piece, x, {piece.first, piece.end});
            return;
        case ExchangeKind::kBroadcast:
            if (!own.rank) put(own, piece, x, {piece.first, piece.end});
            return;
        case ExchangeKind::kAllGather: return put(own, piece, x, piece.of(shares[own.rank]));
        case ExchangeKind::kReduceScatter:
            return each_other_share(own, shares, [&](int, Share share) { put(own, piece, x, piece.of(share)); });
        case ExchangeKind::kDispatch: return put(own, piece, x, piece.of(rows.shares[own.rank]));
        case ExchangeKind::kCombine:
            return each_other_share(own, rows.shares, [&](int, Share share) {
                each_row(piece, rows, share, [&](Share row) {
                    if (has(rows.holders[row.first / rows.width], own.rank)) put(own, piece, x, row);
                });
            });
    }
}

void sum_parts(Number kept, int parts, const char* const* from, char* x, int64_t bytes) {
    if (kept == Number::kHalf) sum_into(parts, (const Bf16* const*)from, (Bf16*)x, bytes / 2);
    else sum_into(parts, (const float* const*)from, (float*)x, bytes / 4);
}

void sum_part(Exchange& own, Number kept, const Piece& piece, char* x, Share part) {
    const char* from[kMaxRanks];
    for (int rank = 0; rank < own.ranks; ++rank)
        from[rank] = rank == own.rank
            ? x + part.first
            : buffer(own, rank, piece.number) + (part.first - piece.first);
    sum_parts(kept, own.ranks, from, x + part.first, part.end - part.first);
    own.received += (part.end - part.first) * (own.ranks - 1);
}

void take_row(Exchange& own, const Piece& piece, int rank, char* x, Share row) {
    Share ranks{row.first, row.first + int64_t(sizeof(uint64_t))};
    take(own, piece, rank, x + row.first, ranks);
    uint64_t holders;
    memcpy(&holders, x + row.first, sizeof holders);
    if (has(holders, own.rank)) take(own, piece, rank, x + ranks.end, {ranks.end, row.end});
}

void sum_row(Exchange& own, Number kept, const Piece& piece, char* x, Share row, uint64_t holders) {
    const char* from[kMaxRanks];
    int parts = 0, others = 0;
    for (int rank = 0; rank < own.ranks; ++rank) {
        if (!has(holders, rank)) continue;
        others += rank != own.rank;
        from[parts++] = rank == own.rank
            ? x + row.first
            : buffer(own, rank, piece.number) + (row.first - piece.first);
    }
    if (parts) sum_parts(kept, parts, from, x + row.first, row.end - row.first);
    else memset(x + row.first, 0, size_t(row.end - row.first));
    own.received += others * (row.end - row.first);
}

void read_piece(Exchange& own, ExchangeKind kind, Number kept, const Piece& piece, char* x, int64_t bytes, char* to) {
    const Share* shares = (const Share*)to;
    const RoutedRows& rows = *(const RoutedRows*)to;
    Share whole{piece.first, piece.end};
    switch (kind) {
        case ExchangeKind::kSum: return sum_part(own, kept, piece, x, whole);
        case ExchangeKind::kGather:
            if (own.rank) return;
            memcpy(to + piece.first, x + piece.first, size_t(piece.end - piece.first));
            for (int rank = 1; rank < own.ranks; ++rank) take(own, piece, rank, to + rank * bytes + piece.first, whole);
            return;
        case ExchangeKind::kBroadcast:
            if (own.rank) take(own, piece, 0, x + piece.first, whole);
            return;
        case ExchangeKind::kAllGather:
            return each_other_share(own, shares, [&](int rank, Share share) {
                Share part = piece.of(share);
                take(own, piece, rank, x + part.first, part);
            });
        case ExchangeKind::kReduceScatter: return sum_part(own, kept, piece, x, piece.of(shares[own.rank]));
        case ExchangeKind::kDispatch:
            return each_other_share(own, rows.shares, [&](int rank, Share share) {
                each_row(piece, rows, share, [&](Share row) { take_row(own, piece, rank, x, row); });
            });
        case ExchangeKind::kCombine:
            return each_row(piece, rows, rows.shares[own.rank], [&](Share row) {
                sum_row(own, kept, piece, x, row, rows.holders[row.first / rows.width]);
            });
    }
}

int64_t piece_bytes(const Exchange& own, ExchangeKind kind, const void* to) {
    if (kind != ExchangeKind::kDispatch && kind != ExchangeKind::kCombine) return own.capacity;
    int64_t width = ((const RoutedRows*)to)->width;
    return own.capacity / width * width;
}

}  // namespace

int advance(Exchange& own, ExchangeKind kind, Number kept, char* x, int64_t bytes, char* to, int milliseconds) {
    uint64_t what = uint64_t(bytes) << 3 | uint64_t(kind);
    while (own.done < bytes) {
        uint32_t number = own.number + 1;
        Piece piece{number, own.done, std::min(own.done + piece_bytes(own, kind, to), bytes)};
        if (!own.posted) {
            give(own, kind, piece, x, to);
            post(own, what);
            own.posted = 1;
        }
        if (milliseconds < 0) return kGiven;
        for (int rank = 0; rank < own.ranks; ++rank) {
            if (rank == own.rank) continue;
            if (!await(head(own, rank), number, milliseconds)) return 1 + rank;
            if (head(own, rank).what[number % 2].load(std::memory_order_relaxed) != what) return kOtherExchange;
        }
        read_piece(own, kind, kept, piece, x, bytes, to);
        own.number = number;
        own.posted = 0;
        own.done = piece.end;
    }
    own.done = 0;
    return 0;
}

NotifierState notifier_state(const Exchange& own) {
    uint32_t changes = notifier(own).changes.load(std::memory_order_seq_cst);  // first: what is called later is a change, too
    return {changes, notifier(own).called.load(std::memory_order_seq_cst)};
}

void notify(Exchange& own, bool calls, uint32_t call) {
    Notifier& shared = notifier(own);
    uint32_t called = shared.called.load(std::memory_order_seq_cst);
    while (calls && int32_t(call - called) > 0 && !shared.called.compare_exchange_weak(called, call)) {
    }
    shared.changes.fetch_add(1, std::memory_order_seq_cst);
    if (shared.waiting.load(std::memory_order_seq_cst)) wake_all(shared.changes);
}

void await_notify(Exchange& own, uint32_t seen, int milliseconds) {
    Notifier& shared = notifier(own);
    auto ready = [&] { return shared.changes.load(std::memory_order_seq_cst) != seen; };
    await_word(shared.changes, shared.waiting, ready, milliseconds);
}

void show(Exchange& own, uint64_t shown) { head(own, own.rank).shown.store(shown, std::memory_order_seq_cst); }

uint64_t shown_by(const Exchange& own, int rank) { return head(own, rank).shown.load(std::memory_order_seq_cst); }
