// XXH3-64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of what is given piece by piece. Knows no blocks.
#pragma once
#include <cstdint>

// The hash with seed 0 of `bytes` bytes, which must be a multiple of kStripe and more than kShortest: shorter inputs are
// hashed otherwise.
class Checksum {
  public:
    static constexpr int kStripe = 64;
    static constexpr int kShortest = 240;

    explicit Checksum(int64_t bytes);
    // The next `bytes` bytes, a multiple of kStripe.
    void take(const void* data, int64_t bytes);
    // After everything was taken. 1 where it would be 0, which means "not written" to the KV store.
    uint64_t value() const;

  private:
    void accumulate(const char* stripe, int at);
    void scramble();

    alignas(64) uint64_t sums_[8];
    int64_t bytes_;
    int64_t left_;      // stripes before the last one
    int of_block_ = 0;  // stripes taken since the sums were last scrambled
};
