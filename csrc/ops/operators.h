// Defines and implements an operator as two overloads of one schema.
//
// Callers and graphs use `name`; flash_online/_autograd.py registers its derivative with the dispatcher's Autograd key.
// `name.below_autograd` is the same kernel without a derivative. The package calls it if no derivative is needed, or if it has
// made the graph itself: the Autograd key is Python and would cost microseconds. Under a tracer or a dispatch mode the second
// overload becomes the first (_autograd.py), so that no graph holds it. The first is defined first: torch resolves a call
// without an overload's name, such as a call in a saved TorchScript program, to the overload that was defined first.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace flash_online::ops {

inline constexpr char kBelowAutograd[] = ".below_autograd";

template <class Library>
void define(Library& library, std::string schema) {
  library.def(schema.c_str());
  library.def(schema.insert(schema.find('('), kBelowAutograd).c_str());
}

template <class Library, class Boxed>
void implement(Library& library, const std::string& name, Boxed boxed) {
  library.impl(name.c_str(), boxed);
  library.impl((name + kBelowAutograd).c_str(), boxed);
}

}  // namespace flash_online::ops
