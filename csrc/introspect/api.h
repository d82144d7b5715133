// The one symbol that libflash_online.so exports: what it can tell of itself without torch or Python. _introspect looks it up
// by name, so the table only ever grows at its end.
#pragma once

#include <cstdint>

namespace flash_online {

struct Api {
  const char* (*build_info)();  // JSON: what was built, by what, for what
  // Bytes of scratch that a worker of a CPU kernel's forward pass takes, one worker a thread at most.
  int64_t (*attention_scratch)(bool float64, int64_t width, int64_t value_width);
  int64_t (*row_scratch)(bool float64, int64_t k);  // k: of the top k, else 0
};

}  // namespace flash_online

extern "C" const flash_online::Api flash_online_api;
