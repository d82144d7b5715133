// What is known of a mask before the scores are made: for each of its blocks of 64 x 64 whether it hides all, nothing, or some.
// Hidden blocks are passed over, keys and values unread; of blocks that hide nothing (and add nothing) the mask is not read again.
#pragma once

#include "../../core/problem.h"
#include "../hw/launch.h"

namespace flash_online::cuda {

constexpr int kMapBlock = 64;  // queries and keys

enum class MaskKind : uint8_t { kMixed = 0, kHidden = 1, kNothing = 2 };

// One byte a block, [batch, heads, queries / 64, keys / 64], 1 where the mask is broadcast.
struct BlockMap {
  uint8_t* data = nullptr;  // null: every block may hide some
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }

  __device__ const uint8_t* row(int64_t batch, int64_t head, int64_t query_block) const {
    return data + (((size[0] == 1 ? 0 : batch) * size[1] + (size[1] == 1 ? 0 : head)) * size[2] +
                   (size[2] == 1 ? 0 : query_block)) *
                      size[3];
  }
};

// The map that a problem is worth, without its memory; no elements: none.
BlockMap block_map_of(const AttentionProblem& problem);
void fill_block_map(const AttentionProblem& problem, const BlockMap& map, CUstream_st* stream);

// Key blocks of `kKeys` keys in the order of a range, hidden ones passed over. A whole warp asks; all get the same answer.
template <int kQueries, int kKeys>
class KeyBlocks {
 public:
  __device__ KeyBlocks(const BlockMap& map, int64_t batch, int64_t head, int query, int queries, int begin, int end)
      : columns_(static_cast<int>(map.size[3])), next_(begin), end_(end), known_end_(map.data ? begin : end) {
    if (!map.data) return;
    const int row = query / kMapBlock;
    rows_ = map.size[2] == 1 ? 1 : min((queries + kMapBlock - 1) / kMapBlock - row, (kQueries + kMapBlock - 1) / kMapBlock);
    row_ = map.row(batch, head, row);
  }

  // The number of the next block, `end` if there is none; whether the mask hides nothing in it.
  __device__ __forceinline__ int next(bool& nothing) {
    nothing = false;
    while (next_ < end_) {
      if (!row_) return next_++;
      if (next_ >= known_end_) look_ahead();
      const unsigned left = ~hidden_ >> (kWarp - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_ && next_ < end_) {
        nothing = nothing_ >> (kWarp - (known_end_ - next_)) & 1;
        return next_++;
      }
    }
    return end_;
  }

 private:
  // Of 32 blocks, one a lane.
  __device__ void look_ahead() {
    static_assert(kKeys <= kMapBlock && kMapBlock % kKeys == 0);
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarp;
    bool hidden = false, nothing = false;
    if (block < end_) {
      const int column = columns_ == 1 ? 0 : block * kKeys / kMapBlock;
      hidden = nothing = true;
      for (int r = 0; r < rows_; ++r) {
        const auto kind = static_cast<MaskKind>(row_[r * columns_ + column]);
        hidden &= kind == MaskKind::kHidden;
        nothing &= kind == MaskKind::kNothing;
      }
    }
    hidden_ = __ballot_sync(~0u, hidden);
    nothing_ = __ballot_sync(~0u, nothing);
    known_end_ = next_ + kWarp;
  }

  const uint8_t* row_ = nullptr;
  int rows_ = 0, columns_, next_, end_, known_end_;
  unsigned hidden_ = 0, nothing_ = 0;  // bit n: block known_end_ - 32 + n
};

}  // namespace flash_online::cuda
