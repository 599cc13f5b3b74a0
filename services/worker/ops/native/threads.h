// A pool of threads that share the tiles of one job after the other. Knows no arithmetic.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

// Runs jobs of independent tiles; the calling thread takes part, `helpers` threads join it.
//
// Each thread has a range of neighbouring tiles and claims them one by one; who has none left takes from the others'. So
// a helper that the system has taken off its core costs at most the tile that it holds, and one that sleeps costs
// nothing: the caller does the work itself. One job at a time, from one thread.
class Pool {
  public:
    explicit Pool(int helpers);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Threads that may run tiles, the caller included. Tiles get the number of theirs, from 0 (the caller).
    int threads() const { return int(ranges_.size()); }

    // Calls work(tile, thread) once for each tile in [0, tiles), tiles < kMaxTiles; returns when all are done.
    template <class Work> void run(int tiles, const Work& work) {
        if (tiles == 1 || threads() == 1) {
            for (int tile = 0; tile < tiles; ++tile) work(tile, 0);
            return;
        }
        publish(tiles, [](const void* context, int tile, int thread) { (*(const Work*)context)(tile, thread); }, &work);
    }

    static constexpr int kMaxTiles = 1 << 20;

  private:
    using Call = void (*)(const void*, int, int);

    void publish(int tiles, Call call, const void* context);
    bool claim(int thread);
    void help(int thread);
    bool await_job();
    void leave_callers_core();
    void await_done(int tiles);

    // Of each thread's range: the number of the job (24 bits), the end (20), the next unclaimed tile (20). In one word,
    // so that a helper that comes late to a job cannot claim a tile of the next one by the old one's terms.
    struct alignas(64) Range {
        std::atomic<uint64_t> word{0};
    };
    bool claim_from(Range& range, int thread);
    bool unclaimed() const;

    std::vector<Range> ranges_;
    int tiles_ = 0;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) Call call_ = nullptr;
    const void* context_ = nullptr;
    uint64_t job_ = 0;
    std::atomic<int> callers_core_{0};

    // The helpers, and what they and the caller sleep on: its headers would take longer to read than most units to compile.
    struct Helpers;
    alignas(64) Helpers* const helpers_;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stopping_{false};
#if defined(__linux__)
    cpu_set_t allowed_;  // the cores that this process may use
#endif
};
