// Which blocks of queries a block of keys has to do with.
#pragma once

#include "block_map.cuh"

namespace flash_online::cuda {

// Blocks of kQueries queries, in order, that may see the block of keys from `key` on; those that the mask hides it from are
// passed over. A whole warp asks; all get the same answer.
template <int kQueries, int kKeys>
class QueryBlocks {
 public:
  __device__ QueryBlocks(const BlockMap& map, int64_t batch, int64_t head, int key, int keys, int begin, int end)
      : rows_(static_cast<int>(map.size[2])),
        columns_(static_cast<int>(map.size[3])),
        next_(begin),
        end_(end),
        known_end_(begin) {
    if (!map.data) return;
    const int column = columns_ == 1 ? 0 : key / kMapBlock;
    kinds_ = map.row(batch, head, 0) + column;
    taken_ = columns_ == 1 ? 1 : min((keys + kMapBlock - 1) / kMapBlock - column, (kKeys + kMapBlock - 1) / kMapBlock);
  }

  // The number of the next block, `end` if there is none; whether the mask hides nothing in it.
  __device__ __forceinline__ int next(bool& nothing) {
    nothing = false;
    while (next_ < end_) {
      if (!kinds_) return next_++;
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
    static_assert(kQueries <= kMapBlock && kMapBlock % kQueries == 0);
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarp;
    bool hidden = false, nothing = false;
    if (block < end_) {
      const uint8_t* const row = kinds_ + (rows_ == 1 ? 0 : int64_t{block} * kQueries / kMapBlock * columns_);
      hidden = nothing = true;
      for (int n = 0; n < taken_; ++n) {
        const auto kind = static_cast<MaskKind>(row[n]);
        hidden &= kind == MaskKind::kHidden;
        nothing &= kind == MaskKind::kNothing;
      }
    }
    hidden_ = __ballot_sync(~0u, hidden);
    nothing_ = __ballot_sync(~0u, nothing);
    known_end_ = next_ + kWarp;
  }

  const uint8_t* kinds_ = nullptr;
  int rows_, columns_, next_, end_, known_end_, taken_ = 0;
  unsigned hidden_ = 0, nothing_ = 0;  // bit n: block known_end_ - 32 + n
};

}  // namespace flash_online::cuda
