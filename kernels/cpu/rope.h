// Angles of the rotary embedding; knows nothing of MLX.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace afm {

// Cosines and sines of a head's pairs, computed in double when a position is first used and kept: all layers of a
// model turn the same positions by the same angles.
class RopeTable {
 public:
  // The table of these parameters, kept until the process ends. `head_dim` is even.
  static const RopeTable& of(float theta, int head_dim);

  // The same for the angles `position / periods[i]`.
  static const RopeTable& of(const std::vector<float>& periods);

  // Cosines of `position * theta ** (-2i / head_dim)` for i < head_dim / 2, then the sines. `scratch` has room
  // for these head_dim numbers, and is used for positions that aren't kept.
  const float* row(int64_t position, float* scratch) const;

  const float theta;
  const int head_dim;
  const std::vector<float> periods;  // empty: powers of theta

 private:
  RopeTable(float theta, int head_dim, const std::vector<float>& periods)
      : theta(theta), head_dim(head_dim), periods(periods) {}
  static const RopeTable& find(float theta, int head_dim, const std::vector<float>& periods);
  void fill(int64_t position, float* out) const;

  static constexpr int64_t kRowsPerChunk = 64;
  static constexpr int64_t kChunks = 1024;
  mutable std::atomic<float*> chunks_[kChunks] = {};
};

}  // namespace afm
