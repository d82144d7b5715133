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
    out[0] = static_cast<uint32_t>(group), out[1] = static_cast<uint32_t>(query), out[2] = static_cast<uint32_t>(head),
    out[3] = static_cast<uint32_t>(batch);
    rounds<0>(out);
  }

  // The same for many queries by many groups of a head. A query and a group meet in the third of the ten rounds; what either
  // gives to it is made once.
  struct OfQuery {
    uint32_t high, low;  // a product of the second round
  };
  struct OfGroup {
    uint32_t factor;  // of a product of the third round, but for the query's share
    uint32_t word[3];  // behind the third round, but for that product's high half and the query's share: the 1st, 3rd and 4th
  };
  FLASH_ONLINE_HD OfQuery of_query(int64_t head, int64_t query) const {
    const uint64_t product = first(high(second(static_cast<uint32_t>(head))) ^ static_cast<uint32_t>(query) ^ key[0]);
    return {high(product), low(product)};
  }
  FLASH_ONLINE_HD OfGroup of_group(int64_t batch, int64_t head, int64_t group) const {
    const uint64_t product = first(static_cast<uint32_t>(group)),
                   other = second(high(product) ^ static_cast<uint32_t>(batch) ^ key[1]),
                   third = first(high(other) ^ low(second(static_cast<uint32_t>(head))) ^ key_of<0, 1>());
    return {low(product) ^ key_of<1, 1>(), {low(other) ^ key_of<0, 2>(), high(third) ^ key_of<1, 2>(), low(third)}};
  }
  FLASH_ONLINE_HD void words(const OfQuery& query, const OfGroup& group, uint32_t (&out)[4]) const {
    const uint64_t product = second(query.high ^ group.factor);
    out[0] = high(product) ^ group.word[0], out[1] = low(product), out[2] = query.low ^ group.word[1], out[3] = group.word[2];
    rounds<3>(out);
  }

 private:
  FLASH_ONLINE_HD static uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  FLASH_ONLINE_HD static uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
  FLASH_ONLINE_HD static uint64_t product(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    return static_cast<uint64_t>(__umulhi(x, y)) << 32 | x * y;  // one instruction; the other way a 0 is added to it by another
#else
    return static_cast<uint64_t>(x) * y;
#endif
  }
  FLASH_ONLINE_HD static uint64_t first(uint32_t x) { return product(x, 0xD2511F53u); }
  FLASH_ONLINE_HD static uint64_t second(uint32_t x) { return product(x, 0xCD9E8D57u); }
  static constexpr uint32_t kStep[2] = {0x9E3779B9u, 0xBB67AE85u};  // of the key, from one round to the next
  template <int kWord, uint32_t kRound>
  FLASH_ONLINE_HD uint32_t key_of() const {
    constexpr uint32_t kSteps = kRound * kStep[kWord];
    return key[kWord] + kSteps;
  }
  // From round kFrom to the last.
  template <int kFrom>
  FLASH_ONLINE_HD void rounds(uint32_t (&c)[4]) const {
    constexpr uint32_t kFirstStep = kStep[0], kSecondStep = kStep[1];
    uint32_t k0 = key_of<0, kFrom>(), k1 = key_of<1, kFrom>();
    for (int round = kFrom; round < 10; ++round) {
      const uint64_t p0 = first(c[0]), p1 = second(c[2]);
      c[0] = high(p1) ^ c[1] ^ k0;
      c[2] = high(p0) ^ c[3] ^ k1;
      c[1] = low(p1);
      c[3] = low(p0);
      k0 += kFirstStep;
      k1 += kSecondStep;
    }
  }
};

// A weight is kept where its word is at least this; 2^32, never, for a probability of 1.
FLASH_ONLINE_HD uint64_t drop_threshold(double probability) { return static_cast<uint64_t>(probability * 4294967296.0); }

}  // namespace flash_online
