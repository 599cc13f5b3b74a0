// How a thread waits for another one that is about to be ready.
#pragma once
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waking a sleeping thread takes 5 to 50 µs, and the jobs of one forward pass follow each other within a few: so a
// waiter spins first, then lets others have the core, then sleeps. The cores are shared with other processes, which
// is why the spinning is short. Returns whether it has become ready: false is a reason to sleep.
template <class Ready> bool spin(const Ready& ready) {
    using Clock = std::chrono::steady_clock;
    for (int i = 0; i < 200; ++i) {
        if (ready()) return true;
        relax();
    }
    auto end = Clock::now() + std::chrono::microseconds(60);
    do {
        for (int i = 0; i < 20; ++i) {
            if (ready()) return true;
            relax();
        }
        std::this_thread::yield();
    } while (Clock::now() < end);
    return ready();
}
