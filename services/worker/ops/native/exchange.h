// Collectives among processes of one host, through memory that they share. Knows no tensors.
#pragma once
#include "linear.h"

enum class ExchangeKind : int { kSum = 0, kGather = 1, kBroadcast = 2, kAllGather = 3, kReduceScatter = 4, kDispatch = 5, kCombine = 6 };

// Bytes of x that are a rank's, of whole elements. Ranks that have the same ones follow each other.
struct Share {
    int64_t first;
    int64_t end;
};

// How the rows of a mixture lie in x, one behind the other.
struct RoutedRows {
    const Share* shares;  // of each rank: bytes of the rows that are its own
    int64_t width;  // bytes of a row, no more than a buffer holds
    const uint64_t* holders;  // kCombine: for each row the set of ranks that have computed some of it, a bit for each
};

// One rank's end. The memory has a page of heads, one of 64 bytes for each rank from byte 64 on, and one notifier behind them,
// all zero at first, and behind that page two buffers of `capacity` bytes for each rank: what is exchanged goes through
// them piece by piece.
struct Exchange {
    char* memory;
    int rank;
    int ranks;  // kMaxRanks at the most
    int64_t capacity;  // a multiple of 64
    uint32_t number;  // of the last piece
    int posted;  // whether the next one is in our buffer already
    int64_t done;  // bytes of the current exchange
    int64_t sent;  // bytes of all exchanges that others could read here
    int64_t received;  // bytes of all exchanges that were read of others
};
constexpr int kHeadPage = 4096;
constexpr int kMaxRanks = 62;

// Values of `advance` beside 0 and the ranks'.
constexpr int kOtherExchange = -1;
constexpr int kGiven = -2;

// Every rank calls it for the same exchange, of the same kind and bytes. kSum: x becomes the sum of all ranks' x, each
// element's in the order of the ranks, in float, so that all have the same bits. kGather: rank 0 gets all ranks' x one
// behind the other in `to`, which may be null elsewhere. kBroadcast: x becomes rank 0's. kAllGather: each rank's share of
// x becomes that rank's; shares do not overlap. kReduceScatter: this rank's share of x becomes the sum that kSum would put
// there, and the rest of x is as it was. For these two `to` has the Share of each rank, the same everywhere.
//
// kDispatch and kCombine are these two for rows that go to some ranks only; `to` has RoutedRows. kDispatch: the first 8
// bytes of a row say to which, and they alone go to all; what else is in the rows of others that are not for this rank is
// undefined. kCombine: this rank's share of x becomes the sums over the ranks that a row was computed by, in their order,
// so it has the bits that kReduceScatter would give where the others have zeros.
//
// `milliseconds` below 0: what this rank gives first is there for others to read, and it returns kGiven without having waited: called
// again, it goes on. Returns 0 when it is done; 1 + the number of a rank that has not come for so many milliseconds: called again with the
// same arguments, it goes on; or kOtherExchange where another rank exchanges something else.
int advance(Exchange& own, ExchangeKind kind, Number number, char* x, int64_t bytes, char* to, int milliseconds);

// The notifier, for ranks that have nothing to do until another one begins something. Its number changes at each `notify`;
// beside it there is the greatest number that was called; `calls`: this call names one. Numbers may wrap around.
struct NotifierState {
    uint32_t changes;
    uint32_t called;
};
NotifierState notifier_state(const Exchange& own);
void notify(Exchange& own, bool calls, uint32_t call);
// Returns when `changes` is no longer `seen`, or after so many milliseconds.
void await_notify(Exchange& own, uint32_t seen, int milliseconds);
// A number that each rank shows the others. Whoever has to look at it again is woken by `notify`.
void show(Exchange& own, uint64_t shown);
uint64_t shown_by(const Exchange& own, int rank);
