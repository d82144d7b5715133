// Dropout's random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The counter
// is the position of a weight, so that the mask is the same for every tile size, kernel and device.
#pragma once

#include <cstdint>

#include "config.h"

namespace flash_online {

struct Philox {
  uint32_t key[2];

  // The arguments are (seed, offset) as the caller drew them; the multiplier, 2^64 / golden ratio, spreads the offset over the
  // key.
  FLASH_ONLINE_HD Philox(int64_t seed, int64_t offset) {
    const uint64_t mixed = static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(offset);
    key[0] = static_cast<uint32_t>(mixed);
    key[1] = static_cast<uint32_t>(mixed >> 32);
  }

  static constexpr int kKeys = 8;  // the keys of one query about which one draw decides

  // Returns whether the weights of the keys kKeys * group .. kKeys * group + 7 of a query are kept: bit n is for the n-th key.
  // Each of a draw's four words decides about two keys: once as it is, once multiplied by 2^16 + 1. The product's upper half is
  // the sum of the word's two halves. Both values are uniform over 32 bits, and their upper 16 bits are independent.
  FLASH_ONLINE_HD unsigned kept(int64_t batch, int64_t head, int64_t query, int64_t group, uint32_t threshold) const {
    unsigned bits = 0;
    add_kept(of_query(batch, head, query), of_group(batch, head, group), threshold, 0, bits);
    return bits;
  }

  // The functions below serve many queries and groups of one head. The counter's words are the head, the query, the batch and
  // the group. A query and a group first mix in the fourth of the ten rounds, so each one's share of the first three rounds is
  // computed once.
  struct OfQuery {
    uint32_t word[3];  // after round 3: word 0 without the group's share, word 1, and word 2 without the group's share
  };
  struct OfGroup {
    uint32_t word[3];  // after round 3: words 0 and 2 without the query's share, and word 3
  };
  FLASH_ONLINE_HD OfQuery of_query(int64_t batch, int64_t head, int64_t query) const {
    const uint64_t product =
        multiply_m0(high(multiply_m1(static_cast<uint32_t>(batch))) ^ static_cast<uint32_t>(query) ^ round_key<0, 0>());
    const uint64_t next = multiply_m1(high(product) ^ low(multiply_m0(static_cast<uint32_t>(head))) ^ round_key<1, 1>());
    return {{high(next), low(next), low(product)}};
  }
  FLASH_ONLINE_HD OfGroup of_group(int64_t batch, int64_t head, int64_t group) const {
    const uint64_t product =
        multiply_m1(high(multiply_m0(static_cast<uint32_t>(head))) ^ static_cast<uint32_t>(group) ^ round_key<1, 0>());
    const uint64_t next = multiply_m0(high(product) ^ low(multiply_m1(static_cast<uint32_t>(batch))) ^ round_key<0, 1>());
    return {{low(product) ^ round_key<0, 2>(), high(next) ^ round_key<1, 2>(), low(next)}};
  }
  // The four words of a draw, which decide about its first four keys; again() turns them into the words for its last four keys.
  FLASH_ONLINE_HD void words(const OfQuery& query, const OfGroup& group, uint32_t (&out)[kKeys / 2]) const {
    out[0] = query.word[0] ^ group.word[0], out[1] = query.word[1], out[2] = query.word[2] ^ group.word[1],
    out[3] = group.word[2];
    rounds<3>(out);
  }
  FLASH_ONLINE_HD static uint32_t again(uint32_t word) { return word * 0x10001u; }
  // Sets the bits of the kept keys, from bit `shift` on; these bits must be 0.
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
  FLASH_ONLINE_HD static uint64_t multiply_wide(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    // One instruction; the expression below costs a second one, which adds 0
    return static_cast<uint64_t>(__umulhi(x, y)) << 32 | x * y;
#else
    return static_cast<uint64_t>(x) * y;
#endif
  }
  FLASH_ONLINE_HD static uint64_t multiply_m0(uint32_t x) { return multiply_wide(x, 0xD2511F53u); }
  FLASH_ONLINE_HD static uint64_t multiply_m1(uint32_t x) { return multiply_wide(x, 0xCD9E8D57u); }
  static constexpr int kRounds = 10;
  static constexpr uint32_t kKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};  // what each key word grows by from one round to the next
  template <int kWord, uint32_t kRound>
  FLASH_ONLINE_HD uint32_t round_key() const {
    constexpr uint32_t kSteps = kRound * kKeyStep[kWord];
    return key[kWord] + kSteps;
  }
  // The rounds from kFrom to the last.
  template <int kFrom>
  FLASH_ONLINE_HD void rounds(uint32_t (&c)[4]) const {
    constexpr uint32_t kFirstStep = kKeyStep[0], kSecondStep = kKeyStep[1];
    uint32_t k0 = round_key<0, kFrom>(), k1 = round_key<1, kFrom>();
    for (int round = kFrom; round < kRounds; ++round) {
      const uint64_t p0 = multiply_m0(c[0]), p1 = multiply_m1(c[2]);
      c[0] = high(p1) ^ c[1] ^ k0;
      c[2] = high(p0) ^ c[3] ^ k1;
      c[1] = low(p1);
      c[3] = low(p0);
      k0 += kFirstStep;
      k1 += kSecondStep;
    }
  }
};

// A weight is kept where its word is at least this threshold. Probability 1 would need 2^32, which no word reaches; there kept
// weights are multiplied by 0.
FLASH_ONLINE_HD uint32_t drop_threshold(double probability) {
  return probability < 1 ? static_cast<uint32_t>(probability * 4294967296.0) : 0xffffffffu;
}

}  // namespace flash_online
