// Dropout's random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), counted by
// the position of a weight, so that the mask is the same for every tile size, kernel and device.
#pragma once

#include <cstdint>

#include "config.h"

namespace flash_online {

struct Philox {
  uint32_t key[2];

  // (seed, offset) as the caller drew them; the multiplier spreads the offset over the key (2^64 / golden ratio).
  FLASH_ONLINE_HD Philox(int64_t seed, int64_t offset) {
    const uint64_t mixed = static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(offset);
    key[0] = static_cast<uint32_t>(mixed);
    key[1] = static_cast<uint32_t>(mixed >> 32);
  }

  // Four words, for the keys 4 * group .. 4 * group + 3 of a query.
  FLASH_ONLINE_HD void words(int64_t batch, int64_t head, int64_t query, int64_t group, uint32_t (&out)[4]) const {
    uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(query), c2 = static_cast<uint32_t>(head),
             c3 = static_cast<uint32_t>(batch), k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }
};

// A weight is kept where its word is at least this; 2^32, never, for a probability of 1.
FLASH_ONLINE_HD uint64_t drop_threshold(double probability) { return static_cast<uint64_t>(probability * 4294967296.0); }

}  // namespace flash_online
