// Export of functions from the shared libraries.
#pragma once
#include <stdint.h>

#ifdef _WIN32
#define PRONK_API extern "C" __declspec(dllexport)
#else
#define PRONK_API extern "C" __attribute__((visibility("default")))
#endif
