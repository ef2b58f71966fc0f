// Which instruction sets this machine runs, and which one is in use.
#include "isa.h"
#include "palette_vbmi.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace afm {
namespace {

// `__builtin_cpu_supports` asks for the registers, too: whether the system saves them is in XCR0.
#if defined(__x86_64__)
bool has_avx2() {
  constexpr unsigned kHalves = 1u << 29;  // of compilers, not all know "f16c" by name
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c & kHalves) != 0;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#else
  return true;  // every Apple processor since 2019, so all of the M series
#endif
}
#endif

struct Choice {
  bool (*runs)();
  const Kernels* (*table)();  // called only where `runs`: it is compiled for the same instructions as its kernels
};

constexpr Choice kChoices[] = {
#if defined(__x86_64__)
    {has_avx512, avx512_kernels},
    {has_avx2, avx2_kernels},
#elif defined(__aarch64__)
    {has_dot_product, neon_kernels},
#endif
    {[] { return true; }, portable_kernels},
};

struct Usable {
  const Kernels* tables[std::size(kChoices)];
  size_t count = 0;

  Usable() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const Choice& choice : kChoices) {
      const Kernels* table = choice.runs() ? choice.table() : nullptr;
      if (table != nullptr) tables[count++] = table;
    }
  }
};

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

bool has_vbmi() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

std::span<const Kernels* const> usable_kernels() {
  static const Usable usable;
  return {usable.tables, usable.count};
}

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *usable_kernels().front();
}

bool use_kernels(const char* name) {
  for (const Kernels* table : usable_kernels()) {
    if (std::strcmp(name, table->name) == 0) {
      chosen.store(table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace afm
