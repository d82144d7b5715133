// assert() that release builds keep, for device code: a failure stops the kernel, and the next call that synchronises with the
// device reports it.
#pragma once

#undef NDEBUG
#include <cassert>
