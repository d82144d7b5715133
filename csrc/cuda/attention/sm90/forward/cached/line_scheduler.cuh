// Tiles over cached keys that shares of CTAs cut, where there are too few tiles to go round: an item of the decode kernel's
// line of work (../../../decode/line.cuh) is a tile of rows, and a step is a block of keys. What a share cuts off an item
// leaves partial results, which merge_partials() merges.
#pragma once

#include "../../../decode/partials.cuh"
#include "../tile_scheduler.cuh"

namespace flash_online::cuda {

struct LineOfTiles {
  DecodeShape shape;  // its key heads are the groups of query heads that lie side by side in a tile
  DecodePartials partials;
};

// The parts of a CTA's share, one after another. All lanes of a warp call it, and get the same answers.
class LineScheduler {
 public:
  struct Shared {};

  __device__ LineScheduler(const AttentionProblem& problem, const LineOfTiles& line)
      : problem_(problem),
        line_(line),
        cta_(static_cast<int>(blockIdx.x / static_cast<unsigned>(line.shape.abreast()))),
        which_(static_cast<int>(blockIdx.x) - cta_ * line.shape.abreast()),
        walk_(find_share(problem, KvSplits{}, line.shape, ctas(), cta_)) {}

  __device__ WorkTileCoord next() {
    walk_.next(problem_, KvSplits{}, line_.shape, false);
    if (walk_.done()) return {-1, 0, 0};
    const int2 tile_and_head = line_.shape.of_abreast(walk_.s.tile_and_head(line_.shape, walk_.item), which_);
    return {walk_.n, tile_and_head.y, tile_and_head.x};
  }
  __device__ void claim() {}

  // The sequence of the part, its blocks of keys, and the address of its partial results; null: it is a whole item.
  __device__ const DecodeSequence& sequence() const { return walk_.s; }
  __device__ int begin() const { return walk_.tile; }
  __device__ int end() const { return walk_.end; }
  __device__ float* partial() const {
    const bool is_whole = walk_.begins_item && walk_.ends_item;
    return is_whole ? nullptr : line_.partials.partial(which_ * ctas() + cta_, walk_.begins_item);
  }

 private:
  // For each of those that go abreast.
  __device__ int ctas() const { return static_cast<int>(gridDim.x / static_cast<unsigned>(line_.shape.abreast())); }

  const AttentionProblem& problem_;
  const LineOfTiles& line_;
  int cta_, which_;  // its number among those of one that goes abreast; of these
  DecodeWalk walk_;
};

}  // namespace flash_online::cuda
