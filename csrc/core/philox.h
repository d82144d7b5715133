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

  static constexpr int kKeys = 8;  // of a query, that a draw decides about

  // Whether the weights of the keys kKeys * group .. kKeys * group + 7 of a query are kept: bit n for the n-th. A word decides
  // about two: as it is, and times 2^16 + 1, which makes the sum of its halves the upper one. Either is any number of 32 bits
  // equally often, and the upper 16 bits of both are independent.
  FLASH_ONLINE_HD unsigned kept(int64_t batch, int64_t head, int64_t query, int64_t group, uint32_t threshold) const {
    unsigned bits = 0;
    add_kept(of_query(batch, head, query), of_group(batch, head, group), threshold, 0, bits);
    return bits;
  }

  // The same for many queries by many groups of a head. The counter's words are the head, the query, the batch and the group:
  // a query and a group meet in the fourth of the ten rounds, and what either gives to it is made once.
  struct OfQuery {
    uint32_t word[3];  // behind the third round: the first but for the group's share, the second, the third but for it
  };
  struct OfGroup {
    uint32_t word[3];  // the first and the third but for the query's share, the fourth
  };
  FLASH_ONLINE_HD OfQuery of_query(int64_t batch, int64_t head, int64_t query) const {
    const uint64_t product = first(high(second(static_cast<uint32_t>(batch))) ^ static_cast<uint32_t>(query) ^ key_of<0, 0>());
    const uint64_t next = second(high(product) ^ low(first(static_cast<uint32_t>(head))) ^ key_of<1, 1>());
    return {{high(next), low(next), low(product)}};
  }
  FLASH_ONLINE_HD OfGroup of_group(int64_t batch, int64_t head, int64_t group) const {
    const uint64_t product = second(high(first(static_cast<uint32_t>(head))) ^ static_cast<uint32_t>(group) ^ key_of<1, 0>());
    const uint64_t next = first(high(product) ^ low(second(static_cast<uint32_t>(batch))) ^ key_of<0, 1>());
    return {{low(product) ^ key_of<0, 2>(), high(next) ^ key_of<1, 2>(), low(next)}};
  }
  // A draw's words, of its first four keys; those of the last four are again().
  FLASH_ONLINE_HD void words(const OfQuery& query, const OfGroup& group, uint32_t (&out)[kKeys / 2]) const {
    out[0] = query.word[0] ^ group.word[0], out[1] = query.word[1], out[2] = query.word[2] ^ group.word[1],
    out[3] = group.word[2];
    rounds<3>(out);
  }
  FLASH_ONLINE_HD static uint32_t again(uint32_t word) { return word * 0x10001u; }
  // Bits from `shift` on, which were 0.
  FLASH_ONLINE_HD void add_kept(const OfQuery& query, const OfGroup& group, uint32_t threshold, int shift,
                                unsigned& bits) const {
    uint32_t word[kKeys / 2];
    words(query, group, word);
    for (int n = 0; n < kKeys / 2; ++n) {
      if (word[n] >= threshold) bits |= 1u << (shift + n);
      if (again(word[n]) >= threshold) bits |= 1u << (shift + kKeys / 2 + n);
    }
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

// A weight is kept where its word is at least this. The probability of 1 asks for 2^32, which no word has: there what is kept
// counts for nothing.
FLASH_ONLINE_HD uint32_t drop_threshold(double probability) {
  return probability < 1 ? static_cast<uint32_t>(probability * 4294967296.0) : 0xffffffffu;
}

}  // namespace flash_online
