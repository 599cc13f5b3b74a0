// The pool's waiting and waking.
#include "threads.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "waiting.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace {

constexpr uint64_t kTileBits = 20;
constexpr uint64_t kTileMask = (uint64_t(1) << kTileBits) - 1;

uint64_t end_of(uint64_t word) { return (word >> kTileBits) & kTileMask; }
uint64_t next_of(uint64_t word) { return word & kTileMask; }

int this_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return 0;
#endif
}

}  // namespace

struct Pool::Helpers {
    std::mutex mutex;
    std::condition_variable work_came;
    std::condition_variable work_done;
    std::vector<std::thread> threads;
};

Pool::Pool(int helpers) : ranges_(size_t(helpers) + 1), helpers_(new Helpers) {
#if defined(__linux__)
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
#endif
    for (int i = 0; i < helpers; ++i) helpers_->threads.emplace_back([this, i] { help(i + 1); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(helpers_->mutex);
        stopping_ = true;
    }
    helpers_->work_came.notify_all();
    for (auto& helper : helpers_->threads) helper.join();
    delete helpers_;
}

void Pool::publish(int tiles, Call call, const void* context) {
    if (tiles <= 0) return;
    call_ = call;
    context_ = context;
    tiles_ = tiles;
    callers_core_.store(this_core(), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    job_ = (job_ + 1) & 0xffffff;
    int64_t count = int64_t(ranges_.size());
    for (int64_t i = 0; i < count; ++i) {
        uint64_t first = uint64_t(tiles * i / count), end = uint64_t(tiles * (i + 1) / count);
        ranges_[i].word.store((job_ << (2 * kTileBits)) | (end << kTileBits) | first, std::memory_order_seq_cst);
    }
    if (sleepers_.load(std::memory_order_seq_cst)) {
        { std::lock_guard<std::mutex> lock(helpers_->mutex); }
        helpers_->work_came.notify_all();
    }
    while (claim(0)) {
    }
    await_done(tiles);
}

// Runs one tile of the current job, if one is left.
bool Pool::claim(int thread) {
    int count = int(ranges_.size());
    for (int i = 0; i < count; ++i)
        if (claim_from(ranges_[(thread + i) % count], thread)) return true;
    return false;
}

bool Pool::claim_from(Range& range, int thread) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    do {
        if (next_of(word) >= end_of(word)) return false;
    } while (!range.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    // The job cannot end before this tile does, so what describes it stays as it is.
    int tiles = tiles_;
    call_(context_, int(next_of(word)), thread);
    if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == tiles && caller_sleeps_.load(std::memory_order_seq_cst)) {
        { std::lock_guard<std::mutex> lock(helpers_->mutex); }
        helpers_->work_done.notify_one();
    }
    return true;
}

bool Pool::unclaimed() const {
    for (auto& range : ranges_) {
        uint64_t word = range.word.load(std::memory_order_seq_cst);
        if (next_of(word) < end_of(word)) return true;
    }
    return false;
}

void Pool::await_done(int tiles) {
    auto ready = [&] { return done_.load(std::memory_order_seq_cst) == tiles; };
    if (spin(ready)) return;
    std::unique_lock<std::mutex> lock(helpers_->mutex);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    helpers_->work_done.wait(lock, ready);
    caller_sleeps_.store(false, std::memory_order_seq_cst);
}

void Pool::help(int thread) {
    while (true) {
        if (claim(thread)) continue;
        if (!await_job()) return;
        leave_callers_core();
    }
}

// The system wakes a thread on its waker's core if it can, and may leave it there for seconds, taking turns with the caller
// instead of helping it, while another group of processes is busy on the other cores. So a helper that finds itself there
// asks for any other core that it may use.
void Pool::leave_callers_core() {
#if defined(__linux__)
    int core = this_core();
    if (core < 0 || core >= CPU_SETSIZE || core != callers_core_.load(std::memory_order_relaxed)) return;
    cpu_set_t others = allowed_;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
#endif
}

// Returns when a tile can be claimed; false when the pool stops.
bool Pool::await_job() {
    auto ready = [&] { return stopping_.load(std::memory_order_relaxed) || unclaimed(); };
    if (!spin(ready)) {
        std::unique_lock<std::mutex> lock(helpers_->mutex);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        helpers_->work_came.wait(lock, ready);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    return !stopping_.load(std::memory_order_relaxed);
}
