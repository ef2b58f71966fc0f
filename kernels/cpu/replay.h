// An MLX graph that is traced once and then rebuilt for other arrays without calling Python.
//
// It is what `mx.compile` does without fusing. MLX's own starts a C++ compiler on a CPU, to fuse elementwise
// operations or only to find out whether it can, and replays nothing where there is none.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace afm {

namespace mx = mlx::core;

// Arrays of the same shapes and types to build a graph on. Evaluating one throws std::runtime_error.
std::vector<mx::array> placeholders(const std::vector<mx::array>& inputs);

class Replay {
 public:
  // The graph from `placeholders` to `outputs`; whatever else it reaches is a constant. `inputs` are the arrays that
  // the placeholders stand for: a graph that reaches one of them throws std::invalid_argument.
  Replay(const std::vector<mx::array>& inputs, const std::vector<mx::array>& placeholders,
         const std::vector<mx::array>& outputs);

  // The outputs for these inputs, not evaluated. Nothing if the inputs' number, a shape, a type or MLX's default
  // stream is not the graph's.
  std::optional<std::vector<mx::array>> operator()(const std::vector<mx::array>& inputs) const;

 private:
  // An operation, which reads slots and fills the next ones; or a constant, which fills one.
  struct Node {
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<size_t> inputs;
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> types;
    std::vector<mx::array> constant;
  };

  mx::Stream stream_;
  std::vector<std::pair<mx::Shape, mx::Dtype>> inputs_;  // slots 0, 1, ... are these
  std::vector<Node> nodes_;                              // each after those that it reads
  std::vector<size_t> outputs_;
  size_t slots_;
};

}  // namespace afm
