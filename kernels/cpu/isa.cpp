// Which instruction sets this machine runs, and which one is in use.
#include "isa.h"
#include "palette_vbmi.h"

#include <atomic>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace afm {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  constexpr unsigned kHalves = 1u << 29;  // of compilers, not all know "f16c" by name
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c & kHalves) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

// The tile registers' 8 KB are saved for threads that asked for them only: Linux wants to be asked once per
// process. Other systems have no such call, and get by without AMX.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kTile) == 0 || (d & kInt8) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
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

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> tables;
  auto add = [&](bool runs, const Kernels* table) {
    if (runs && table != nullptr) tables.push_back(table);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  add(amx_kernels() != nullptr && has_amx(), amx_kernels());
  add(has_avx512(), avx512_kernels());
  add(has_avx2(), avx2_kernels());
#elif defined(__aarch64__)
  add(has_dot_product(), neon_kernels());
#endif
  add(true, portable_kernels());
  return tables;
}

const std::vector<const Kernels*>& tables() {
  static const std::vector<const Kernels*> found = usable();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

bool has_vbmi() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *tables().front();
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* table : tables()) names.emplace_back(table->name);
  return names;
}

std::string instruction_set() { return kernels().name; }

bool use_instruction_set(const std::string& name) {
  for (const Kernels* table : tables()) {
    if (name == table->name) {
      chosen.store(table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace afm
