// Prints the kernel that csrc/cuda/rows/choice.h names for every kind of row, as ranges of lengths in vectors of 16 bytes, and
// for long rows on devices of several kinds. Exit code 1: a rule is chosen that is_chosen denies, for which no kernel exists.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "cuda/rows/choice.h"

using namespace flash_online::cuda;

namespace {

constexpr int64_t kMostVectors = 200000;

std::string name_of(const RowShape& shape) {
  if (shape.classes != 0) return "classes " + std::to_string(shape.classes) + ": a lane per row";
  const std::string size = std::to_string(shape.threads_per_row) + "x" + std::to_string(shape.vectors);
  return shape.in_registers ? "registers " + size + " of " + std::to_string(shape.threads) : "block " + size;
}

// Prints the ends of the ranges of 1, 2, ... `last` for which name(n) is the same; "" is left out.
void print_ranges(int64_t last, const std::function<std::string(int64_t)>& name) {
  for (int64_t n = 1; n <= last; ++n) {
    if (n < last && name(n + 1) == name(n)) continue;
    if (!name(n).empty()) std::printf("; to %ld: %s", static_cast<long>(n), name(n).c_str());
  }
  std::printf("\n");
}

std::string rule_name(RowOperators op, RowDeals deal, int64_t classes, int64_t vectors) {
  const int rule = choose_rule(op, deal, classes, vectors);
  if (rule < 0) return "";
  if (!is_chosen(rule, op, deal)) {
    std::printf("rule %d is chosen, but has no kernel\n", rule);
    std::exit(1);
  }
  return name_of(kRules[rule].shape);
}

void print_rules(const char* op_name, RowOperators op, const char* deal_name, RowDeals deal) {
  const int bytes = deal & k16Bits ? 2 : 4, per_vector = kRowVectorBytes / bytes;
  std::printf("%s, %s", op_name, deal_name);
  for (int classes = 1; classes <= 4; ++classes)
    if (deal_of(bytes, classes) == deal) std::printf("; %s", rule_name(op, deal, classes, 1).c_str());
  print_ranges(3000, [&](int64_t vectors) {
    // The longest row of so many vectors that is dealt so.
    int64_t classes = vectors * per_vector;
    while (deal_of(bytes, classes) != deal) --classes;
    return classes <= 4 ? "" : rule_name(op, deal, classes, vectors);
  });
}

void print_shared(const char* device_name, int tensors, const RowDevice& device) {
  std::printf("shared memory, compute capability %s, tensors %d", device_name, tensors);
  print_ranges(kMostVectors, [&](int64_t vectors) -> std::string {
    const SharedChoice choice = choose_shared(vectors, tensors, device);
    if (choice.shape < 0) return "multi-CTA";
    const SharedShape& shape = kSharedShapes[choice.shape];
    return std::to_string(choice.cluster) + " x " + std::to_string(shape.threads) + " threads, room for " +
           std::to_string(shape.vectors);
  });
}

}  // namespace

int main() {
  const struct {
    const char* name;
    RowOperators op;
  } operators[] = {{"writes", kWrites},
                   {"writes from two", kWritesFromTwo},
                   {"writes by scalars", kWritesByScalars},
                   {"writes by targets", kWritesByTargets},
                   {"reduces", kReduces},
                   {"reduces by targets", kReducesByTargets},
                   {"rare: writes", kRareWrites},
                   {"rare: writes by targets", kRareWritesByTargets},
                   {"rare: reduces", kRareReduces}};
  const struct {
    const char* name;
    RowDeals deal;
  } deals[] = {{"16 bits, whole vectors", k16Whole},
               {"16 bits, even", k16Even},
               {"16 bits, odd", k16Odd},
               {"32 bits, whole vectors", k32Whole},
               {"32 bits, words", k32Words}};
  for (const auto& op : operators)
    for (const auto& deal : deals) print_rules(op.name, op.op, deal.name, deal.deal);
  const struct {
    const char* name;
    RowDevice device;
  } devices[] = {{"8.0", {1, 163 << 10}}, {"8.9", {1, 99 << 10}}, {"9.0", {16, 227 << 10}}, {"12.0", {8, 99 << 10}}};
  for (const auto& device : devices)
    for (const int tensors : {1, 2}) print_shared(device.name, tensors, device.device);
}
