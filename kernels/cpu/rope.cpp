#include "rope.h"

#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

namespace afm {

const RopeTable& RopeTable::of(float theta, int head_dim) { return find(theta, head_dim, {}); }

const RopeTable& RopeTable::of(const std::vector<float>& periods) {
  return find(0.0f, static_cast<int>(2 * periods.size()), periods);
}

const RopeTable& RopeTable::find(float theta, int head_dim, const std::vector<float>& periods) {
  // Never freed: threads may be turning queries while the process ends.
  static std::mutex& lock = *new std::mutex;
  static auto& tables = *new std::vector<std::unique_ptr<RopeTable>>;
  std::lock_guard<std::mutex> guard(lock);
  for (auto& table : tables) {
    if (table->theta == theta && table->head_dim == head_dim && table->periods == periods) return *table;
  }
  tables.emplace_back(new RopeTable(theta, head_dim, periods));
  return *tables.back();
}

const float* RopeTable::row(int64_t position, float* scratch) const {
  if (position < 0 || position >= kRowsPerChunk * kChunks) {
    fill(position, scratch);
    return scratch;
  }
  std::atomic<float*>& slot = chunks_[position / kRowsPerChunk];
  float* chunk = slot.load(std::memory_order_acquire);
  if (chunk == nullptr) {
    std::unique_ptr<float[]> made(new float[kRowsPerChunk * head_dim]);
    int64_t first = position - position % kRowsPerChunk;
    for (int64_t i = 0; i < kRowsPerChunk; ++i) fill(first + i, made.get() + i * head_dim);
    // Two threads may compute the same numbers; one of them stays.
    if (slot.compare_exchange_strong(chunk, made.get(), std::memory_order_acq_rel)) chunk = made.release();
  }
  return chunk + position % kRowsPerChunk * head_dim;
}

void RopeTable::fill(int64_t position, float* out) const {
  int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    double period = periods.empty() ? std::pow(static_cast<double>(theta), 2.0 * i / head_dim) : periods[i];
    double angle = static_cast<double>(position) / period;
    out[i] = static_cast<float>(std::cos(angle));
    out[half + i] = static_cast<float>(std::sin(angle));
  }
}

}  // namespace afm
