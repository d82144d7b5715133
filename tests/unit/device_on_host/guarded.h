// How functions for ctypes report errors: by -1, and a text in last_error().
#pragma once

#include <exception>
#include <string>

inline std::string error;

// What f() returns, or -1 after an error.
template <class F>
auto guarded(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return -1;
  }
}

extern "C" {
inline __attribute__((used)) const char* last_error() { return error.c_str(); }
}
