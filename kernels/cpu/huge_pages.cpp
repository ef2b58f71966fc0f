#include "huge_pages.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace afm {

namespace {

std::atomic<bool> stopped{false};

}  // namespace

void stop_huge_pages() { stopped = true; }

#ifdef __linux__
namespace {

constexpr uintptr_t kHugePage = 2u << 20;
// Ranges this close are joined: an allocator keeps as much between blocks that it took from the system in turn.
constexpr uintptr_t kGap = 64 << 10;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, of Linux 6.1: at once, whatever the system's policy is

size_t collapse(uintptr_t begin, uintptr_t end) {
  begin = (begin + kHugePage - 1) / kHugePage * kHugePage;
  end = end / kHugePage * kHugePage;
  size_t granted = 0;
  // Page by page: one with a hole in it fails, and the others don't.
  for (; begin < end && !stopped; begin += kHugePage) {
    void* page = reinterpret_cast<void*>(begin);
    madvise(page, kHugePage, MADV_HUGEPAGE);  // an older kernel does it some time later
    if (madvise(page, kHugePage, kCollapse) == 0) granted += kHugePage;
  }
  return granted;
}

}  // namespace

size_t use_huge_pages(std::vector<std::pair<const void*, size_t>> ranges) {
  std::sort(ranges.begin(), ranges.end());
  size_t granted = 0;
  uintptr_t begin = 0, end = 0;
  for (auto [data, bytes] : ranges) {
    auto start = reinterpret_cast<uintptr_t>(data);
    if (start > end + kGap) {
      granted += collapse(begin, end);
      begin = end = start;
    }
    end = std::max(end, start + bytes);
  }
  return granted + collapse(begin, end);
}

void expect_huge_pages(const void* data, size_t bytes) {
  auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}
#else
void expect_huge_pages(const void*, size_t) {}

size_t use_huge_pages(std::vector<std::pair<const void*, size_t>>) { return 0; }
#endif

}  // namespace afm
