// Asking Linux for tiles.
#include "tiles.h"

#if defined(BATON_TILES) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool allow_tiles() {
#if defined(BATON_TILES) && defined(__linux__)
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
