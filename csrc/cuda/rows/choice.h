// Which kernel computes a row: by the operator, the size of an element and the row's length, and by nothing else, so that a
// row has the same bits whatever stands around it. Host code without CUDA; tests/unit/test_row_choice.py compares every choice
// with a list.
//
// The first rule of kRules that matches decides for rows of up to 2,048 vectors of 16 bytes, which stay in registers or, a
// block of them per CTA, in shared memory. kSharedRules is for longer rows. To add or change a choice, edit a rule: kernels are
// compiled for the rules that can be chosen, and for no other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/integer.h"

namespace flash_online::cuda {

constexpr int kRowVectorBytes = 16;

// ---- what a choice depends on

// The operators, by what they need of a row (dispatch.cuh). Rare ones have kernels for fewer lengths.
enum RowOperators : unsigned {
  kWrites = 1,  // a result per element
  kWritesFromTwo = 2,  // of two tensors
  kWritesByScalars = 4,  // with a scalar per row
  kWritesByTargets = 8,  // with an int64 target per row
  kReduces = 16,  // scalars per row alone
  kReducesByTargets = 32,
  kRareWrites = 64,
  kRareWritesByTargets = 128,
  kRareReduces = 256,

  kWriters = kWrites | kWritesByScalars,
  kReducers = kReduces | kReducesByTargets,
  kRareWriters = kRareWrites | kRareWritesByTargets,
  kOften = kWriters | kWritesFromTwo | kWritesByTargets | kReducers,
  kAnyOperator = kOften | kRareWriters | kRareReduces
};

// Rows by the size of an element and by how they are dealt to threads (Deal in staged_vectors.cuh): by vectors if the row is a
// whole number of them, else by words of 4 bytes. Where 16-bit classes are odd in number, rows begin between words.
enum RowDeals : unsigned {
  k16Whole = 1,
  k16Even = 2,
  k16Odd = 4,
  k32Whole = 8,
  k32Words = 16,

  kWhole = k16Whole | k32Whole,
  k16Bits = k16Whole | k16Even | k16Odd,
  kAnyDeal = k16Bits | kWhole | k32Words
};
constexpr int kRowDeals = 5;

constexpr bool is_whole(int64_t element_bytes, int64_t classes) { return classes * element_bytes % kRowVectorBytes == 0; }
constexpr RowDeals deal_of(int64_t element_bytes, int64_t classes) {
  if (element_bytes == 4) return is_whole(4, classes) ? k32Whole : k32Words;
  return is_whole(2, classes) ? k16Whole : classes % 2 == 0 ? k16Even : k16Odd;
}

// A set of pairs of an operator and a deal.
constexpr uint64_t each(unsigned operators, unsigned deals) {
  uint64_t pairs = 0;
  for (int op = 0; operators >> op != 0; ++op)
    if (operators >> op & 1) pairs |= uint64_t{deals} << op * kRowDeals;
  return pairs;
}

// ---- rows of up to 2,048 vectors

struct RowShape {
  bool in_registers;  // else a block of rows in shared memory: block_row.cuh
  int threads_per_row;
  int vectors;  // of a thread, at most
  int threads;  // of a CTA
  int classes = 0;  // of the row, if the kernel knows the number; then a thread has a row
};
constexpr RowShape block(int lanes, int vectors) { return {false, lanes, vectors, 128}; }
constexpr RowShape few_classes(int classes) { return {false, 1, 1, 128, classes}; }
constexpr RowShape registers(int threads_per_row, int vectors, int threads) {
  return {true, threads_per_row, vectors, threads};
}

struct RowRule {
  uint64_t pairs;
  int first, last;  // vectors in the row; or classes, if shape.classes is not 0
  RowShape shape;
  const char* reason;
};

// Measured on an H100 and an H200: docs/lab/rows.md. The longest row of a rule fills all vectors of its threads. A rule for
// registers begins at the length from which idle lanes cost less than a block, which waits for all of its rows.
constexpr RowRule kRules[] = {
    {each(kAnyOperator, kAnyDeal), 1, 1, few_classes(1), "instructions are what short rows wait for: no bounds are checked"},
    {each(kAnyOperator, kAnyDeal), 2, 2, few_classes(2), "as 1 class"},
    {each(kAnyOperator, kAnyDeal), 3, 3, few_classes(3), "as 1 class"},
    {each(kAnyOperator, kAnyDeal), 4, 4, few_classes(4), "as 1 class"},

    {each(kWriters, kWhole), 4, 4, registers(2, 2, 128), "a warp waits for its own rows only"},
    {each(kWriters, kWhole), 7, 8, registers(4, 2, 128), "over 3 of 4 vectors in use"},
    {each(kWriters, kWhole), 13, 16, registers(8, 2, 128), "over 3 of 4 vectors in use"},
    {each(kReduces, kWhole), 4, 4, registers(2, 2, 256), "128 threads would end faster than a GPU starts a CTA, 1.2 ns"},
    {each(kReduces, kWhole), 7, 8, registers(4, 2, 256), "as 4 vectors"},
    {each(kReduces, kWhole), 13, 16, registers(8, 2, 256), "as 4 vectors"},

    {each(kWritesFromTwo, k16Whole), 4, 4, registers(2, 2, 128), "float32 loses up to 6 %; 9 to 16 vectors lose too"},
    {each(kWritesFromTwo, k16Whole), 8, 8, registers(4, 2, 128), "two tensors leave registers for fewer warps, which pay"},
    {each(kWritesFromTwo, k16Whole), 29, 32, registers(16, 2, 128), "for idle lanes: over 7 of 8 vectors in use"},
    {each(kWritesFromTwo, k16Whole), 57, 64, registers(32, 2, 128), "over 7 of 8 vectors in use"},
    {each(kWritesFromTwo, k16Whole), 113, 128, registers(64, 2, 64), "over 7 of 8 vectors in use"},
    {each(kWritesFromTwo, k16Whole), 225, 256, registers(128, 2, 128), "over 7 of 8 vectors in use"},

    {each(kWriters, k16Whole), 25, 32, registers(8, 4, 128), "over 3 of 4 vectors in use"},
    {each(kWriters, k16Whole), 49, 64, registers(16, 4, 128), "over 3 of 4 vectors in use"},
    {each(kWriters | kRareWrites, k16Whole), 97, 128, registers(32, 4, 128), "over 3 of 4 vectors in use"},
    {each(kWriters | kRareWrites, k16Whole), 193, 256, registers(64, 4, 64), "two warps are better than 8 vectors per thread"},
    {each(kWriters, k32Whole), 33, 64, registers(16, 4, 128), "half the elements per vector: idle lanes cost less"},
    {each(kWriters, k32Whole), 65, 96, registers(32, 3, 128), "no thread computes a fourth vector that is not there"},
    {each(kWriters, k32Whole), 97, 128, registers(32, 4, 128), "as 65 vectors"},
    {each(kWriters, k32Whole), 129, 192, registers(64, 3, 64), "two warps are better than 6 vectors per thread"},
    {each(kWriters, k32Whole), 193, 256, registers(64, 4, 64), "two warps are better than 8 vectors per thread"},
    {each(kRareWrites, k32Whole), 65, 128, registers(32, 4, 128), "one shape in place of two"},
    {each(kRareWrites, k32Whole), 129, 256, registers(64, 4, 64), "one shape in place of two"},

    {each(kWritesByTargets, k16Whole), 29, 32, registers(8, 4, 128), "a loss's gradient takes registers, as two tensors do"},
    {each(kWritesByTargets, kWhole), 57, 64, registers(16, 4, 128), "over 7 of 8 vectors in use"},
    {each(kWritesByTargets | kRareWritesByTargets, kWhole), 113, 128, registers(32, 4, 128), "over 7 of 8 vectors in use"},
    {each(kWritesByTargets | kRareWritesByTargets, kWhole), 225, 256, registers(64, 4, 64), "over 7 of 8 vectors in use"},

    {each(kReducers, kWhole), 17, 32, registers(8, 4, 128), "reading alone is better from registers, idle lanes or not"},
    {each(kReducers, kWhole), 33, 64, registers(16, 4, 128), "as 17 vectors"},
    {each(kReducers, kWhole), 65, 96, registers(32, 3, 128), "no thread computes a fourth vector that is not there"},
    {each(kReducers, kWhole), 97, 128, registers(32, 4, 128), "as 65 vectors"},
    {each(kReducers, kWhole) | each(kReduces, k32Words), 129, 192, registers(32, 6, 128), "as 17 vectors"},
    {each(kReducers, kWhole) | each(kReduces, k32Words), 193, 256, registers(32, 8, 128), "as 17 vectors"},
    {each(kRareReduces, kWhole), 65, 128, registers(32, 4, 128), "one shape in place of two"},
    {each(kRareReduces, kWhole), 129, 256, registers(32, 8, 128), "one shape in place of two"},

    {each(kWriters, k32Words), 65, 96, registers(32, 3, 128), "words of floats straight from global memory"},
    {each(kWriters, k32Words), 97, 128, registers(32, 4, 128), "as 65 vectors"},
    {each(kWriters, k32Words), 129, 192, registers(32, 6, 128), "as 65 vectors"},
    {each(kWriters, k32Words), 193, 256, registers(32, 8, 128), "as 65 vectors"},

    {each(kWriters | kWritesByTargets, kWhole) | each(kReducers, kAnyDeal) | each(kWriters, k32Words), 257, 384,
     registers(128, 3, 128), "too long for a warp; a block would hold few rows"},
    {each(kWriters | kWritesByTargets, kWhole) | each(kReducers, kAnyDeal) | each(kWriters, k32Words), 385, 512,
     registers(128, 4, 128), "as 257 vectors; longer results are better staged in shared memory"},
    {each(kRareWriters, kWhole) | each(kRareReduces, kAnyDeal), 257, 512, registers(128, 4, 128), "one shape in place of two"},
    {each(kReducers, kAnyDeal) | each(kWriters, k32Words), 513, 768, registers(256, 3, 256), "nothing to stage"},
    {each(kReducers, kAnyDeal) | each(kWriters, k32Words), 769, 1024, registers(256, 4, 256), "as 513 vectors"},
    {each(kReducers, kAnyDeal) | each(kWriters, k32Words), 1025, 1536, registers(512, 3, 512), "as 513 vectors"},
    {each(kReducers, kAnyDeal) | each(kWriters, k32Words), 1537, 2048, registers(512, 4, 512), "as 513 vectors"},
    {each(kRareReduces, kAnyDeal), 513, 1024, registers(256, 4, 256), "one shape in place of two"},
    {each(kRareReduces, kAnyDeal), 1025, 2048, registers(512, 4, 512), "one shape in place of two"},

    {each(kOften, k16Bits), 1, 1, block(1, 1), "a lane per row, without room for vectors that are not there"},
    {each(kOften, kAnyDeal), 2, 2, block(1, 2), "as 1 vector"},
    {each(kWrites | kWritesFromTwo, kWhole) | each(kWritesByScalars, k32Whole), 3, 4, block(4, 1),
     "a lane of four vectors would meet three others in its banks"},
    {each(kWrites | kWritesFromTwo, kWhole) | each(kWritesByScalars, k32Whole), 5, 8, block(8, 1),
     "eight neighbouring vectors are in all banks; costly where each lane repeats work per row"},
    {each(kOften, k16Even), 5, 8, block(1, 8), "all rows begin with a word: fewer lanes repeat the work per row"},
    {each(kOften, k16Even), 9, 16, block(2, 8), "as 5 vectors"},
    {each(kOften, k16Even), 17, 32, block(4, 8), "as 5 vectors"},
    {each(kOften, k16Even), 33, 64, block(8, 8), "as 5 vectors"},
    {each(kAnyOperator, kAnyDeal), 1, 4, block(1, 4), "rows that begin anywhere: one bulk copy per block"},
    {each(kAnyOperator, kAnyDeal), 5, 8, block(2, 4), "as 1 vector"},
    {each(kAnyOperator, kAnyDeal), 9, 16, block(4, 4), "as 1 vector"},
    {each(kAnyOperator, kAnyDeal), 17, 32, block(8, 4), "as 1 vector"},
    {each(kAnyOperator, kAnyDeal), 33, 64, block(16, 4), "as 1 vector"},
    {each(kAnyOperator, kAnyDeal), 65, 128, block(32, 4), "as 1 vector"},
    {each(kAnyOperator, kAnyDeal), 129, 256, block(32, 8), "as 1 vector"},
};
constexpr int kRuleCount = sizeof(kRules) / sizeof(kRules[0]);
constexpr int64_t kMostRuledVectors = 2048;  // of operators that reduce
constexpr int64_t kManyClasses = 1 << 30;  // the rules for few classes do not match

// The rule for a row, -1 if it is longer than all of them. `before`: the rules that are asked.
constexpr int choose_rule(RowOperators op, RowDeals deal, int64_t classes, int64_t vectors, int before = kRuleCount) {
  const uint64_t pair = each(op, deal);
  for (int i = 0; i < before; ++i) {
    const int64_t length = kRules[i].shape.classes != 0 ? classes : vectors;
    if (kRules[i].first <= length && length <= kRules[i].last && (kRules[i].pairs & pair) != 0) return i;
  }
  return -1;
}

static_assert(choose_rule(kReduces, k16Odd, kManyClasses, kMostRuledVectors) >= 0);
static_assert(choose_rule(kReduces, k16Odd, kManyClasses, kMostRuledVectors + 1) < 0);

// True if choose_rule returns this rule for some row of an operator and a deal.
constexpr bool is_chosen(int rule, RowOperators op, RowDeals deal) {
  const RowRule& own = kRules[rule];
  if ((own.pairs & each(op, deal)) == 0) return false;
  if (own.shape.classes != 0) return deal_of(deal & k16Bits ? 2 : 4, own.shape.classes) == deal;
  // Nor is there a row of one vector of floats that has more.
  for (int64_t vectors = deal & k16Bits || own.first > 1 ? own.first : 2; vectors <= own.last;) {
    const int other = choose_rule(op, deal, kManyClasses, vectors, rule);
    if (other < 0) return true;
    vectors = kRules[other].last + 1;
  }
  return false;
}

// ---- longer rows with results as long as the row, in the shared memory of a CTA or of a cluster (shared_row.cuh)

struct SharedShape {
  int threads;  // of a CTA
  int vectors;  // of a thread, of all tensors, at most
  int ctas_per_sm;
  bool cluster;
  constexpr int64_t bytes() const { return int64_t{threads} * vectors * kRowVectorBytes; }
};
// Measured: the smaller the CTAs the better, since one is read while another is written.
constexpr SharedShape kSharedShapes[] = {
    {128, 8, 9, false}, {256, 8, 5, false}, {256, 16, 5, false},  // one CTA per row
    {256, 8, 5, true},  {256, 16, 5, true}, {512, 12, 2, true},  {1024, 12, 1, true},
};

struct RowDevice {
  int largest_cluster;  // in CTAs; 1: the device has no clusters
  int64_t shared_bytes;  // of a CTA, at most
};

struct SharedChoice {
  int shape = -1;  // of kSharedShapes; -1: the row is too long
  int cluster = 1;  // CTAs per row
  int vectors = 0;  // of a thread, of one tensor
};

constexpr bool fits(const SharedShape& shape, const RowDevice& device) {
  constexpr int64_t kStaticBytes = 20 << 10;  // of shared memory in addition to the row, at most
  return device.shared_bytes >= shape.bytes() + kStaticBytes;
}

// The choice for rows of `vectors` vectors in each of `tensors` tensors.
constexpr SharedChoice choose_shared(int64_t vectors, int tensors, const RowDevice& device) {
  struct Rule {
    int shape, least_cluster, most_cluster, most_vectors;
  };
  const int largest = device.largest_cluster;
  const Rule rules[] = {
      {0, 1, 1, 8},
      {1, 1, 1, 8},
      {2, 1, 1, largest == 1 ? 16 : 10},  // one CTA is faster than a cluster up to 40 KiB
      {3, 2, largest, 8},  // the more CTAs of 256 threads, up to 48 KiB each, the better
      {4, 2, largest, 12},
      {4, largest, largest, 16},
      {5, largest, largest, 12},
      {6, largest, largest, 12},
  };
  const auto choose = [&](const Rule& rule, int cluster) -> SharedChoice {
    const SharedShape& shape = kSharedShapes[rule.shape];
    if (cluster < rule.least_cluster || cluster > rule.most_cluster) return {};
    if (shape.cluster != (cluster > 1)) return {};
    const int64_t per_thread = ceil_div(vectors, int64_t{shape.threads} * cluster);
    if (per_thread * tensors > rule.most_vectors || !fits(shape, device)) return {};
    return {rule.shape, cluster, static_cast<int>(per_thread)};
  };
  for (int cluster = 1; cluster <= largest; cluster *= 2)
    for (const Rule& rule : rules)
      if (const SharedChoice choice = choose(rule, cluster); choice.shape >= 0) return choice;
  return {};
}

}  // namespace flash_online::cuda
