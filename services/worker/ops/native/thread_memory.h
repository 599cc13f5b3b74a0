// Memory that a thread keeps from its first use on. Arrays that are thread_local themselves would be a part of each thread's
// image, written with zeros once the thread calls the library, whatever it computes: 0.9 MiB each. Knows no tasks.
#pragma once
#include <memory>

namespace {

// Not zeroed, and the same for all that ask for this type: nobody keeps anything in it.
template <class Memory> Memory& thread_memory() {
    static thread_local std::unique_ptr<Memory> memory;
    if (!memory) memory.reset(new Memory);
    return *memory;
}

}  // namespace
