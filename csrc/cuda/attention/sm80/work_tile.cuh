// What a CTA of the general kernels works on.
#pragma once

#include "../../../core/sequence.h"
#include "../common/tile_list.cuh"

namespace flash_online::cuda {

// A tile of queries or of keys of one head, and the sequence that it is part of.
struct WorkTile {
  int64_t batch, head, block;  // block: the tile's number in the sequence; may be past its end
  Sequence sequence;
  int queries, keys;  // the sequence's

  __device__ __forceinline__ WorkTile(const AttentionProblem& problem, const TileCoord& coord)
      : batch(coord.sequence),
        head(coord.head),
        block(coord.block),
        sequence(sequence_of(problem, batch)),
        queries(static_cast<int>(sequence.queries.count)),
        keys(static_cast<int>(sequence.keys.count)) {}
};

}  // namespace flash_online::cuda
