// Angles of the rotary embedding; knows nothing of MLX.
#pragma once

#include <atomic>
#include <cstdint>

namespace afm {

// Cosines and sines of one (theta, head_dim), computed in double when a position is first used and kept: all
// layers of a model turn the same positions by the same angles.
class RopeTable {
 public:
  // The table of these parameters, kept until the process ends. `head_dim` is even.
  static const RopeTable& of(float theta, int head_dim);

  // Cosines of `position * theta ** (-2i / head_dim)` for i < head_dim / 2, then the sines. `scratch` has room
  // for these head_dim numbers, and is used for positions that aren't kept.
  const float* row(int64_t position, float* scratch) const;

  const float theta;
  const int head_dim;

 private:
  RopeTable(float theta, int head_dim) : theta(theta), head_dim(head_dim) {}
  void fill(int64_t position, float* out) const;

  static constexpr int64_t kRowsPerChunk = 64;
  static constexpr int64_t kChunks = 1024;
  mutable std::atomic<float*> chunks_[kChunks] = {};
};

}  // namespace afm
