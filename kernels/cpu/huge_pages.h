// Huge pages for memory that is read from end to end once per token: in a virtual machine, walking 4 KB pages
// costs up to a sixth of the bandwidth. Linux only; elsewhere nothing happens.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace afm {

// Asks for huge pages under (address, bytes) ranges, joining those that lie side by side. Contents stay.
// Returns the bytes of whole huge pages that the system granted.
// Returns early, with what was granted until then, once `stop_huge_pages` was called.
size_t use_huge_pages(std::vector<std::pair<const void*, size_t>> ranges);

// Ends every `use_huge_pages` that runs, and all later ones: the process is about to end.
void stop_huge_pages();

// Asks that memory which nobody has touched yet comes in huge pages when it is.
void expect_huge_pages(const void* data, size_t bytes);

}  // namespace afm
