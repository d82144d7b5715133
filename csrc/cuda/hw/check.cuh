// A device assert that stays in release builds: the kernel stops, and the next call that waits for the device reports it.
#pragma once

#undef NDEBUG
#include <cassert>
