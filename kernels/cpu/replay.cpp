#include "replay.h"

#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "mlx/device.h"
#include "primitives_common.h"

namespace afm {

namespace {

class Placeholder : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("an array's numbers are asked for while the graph that makes them is being built");
  }

  const char* name() const override { return "Placeholder"; }
};

mx::Stream current_stream() { return mx::default_stream(mx::default_device()); }

}  // namespace

std::vector<mx::array> placeholders(const std::vector<mx::array>& inputs) {
  std::vector<mx::array> made;
  for (auto& in : inputs)
    made.emplace_back(in.shape(), in.dtype(), std::make_shared<Placeholder>(current_stream()),
                      std::vector<mx::array>{});
  return made;
}

Replay::Replay(const std::vector<mx::array>& inputs, const std::vector<mx::array>& placeholders,
               const std::vector<mx::array>& outputs)
    : stream_(current_stream()), slots_(0) {
  std::unordered_set<std::uintptr_t> outside;
  for (auto& in : inputs) outside.insert(in.id());
  std::unordered_map<std::uintptr_t, size_t> slot_of;
  for (auto& in : placeholders) {
    inputs_.emplace_back(in.shape(), in.dtype());
    slot_of.emplace(in.id(), slots_++);
  }
  // Depth first, without recursion: an array is looked at once before its inputs have slots, and once after.
  std::vector<mx::array> open(outputs.rbegin(), outputs.rend());
  while (!open.empty()) {
    mx::array a = open.back();
    if (slot_of.count(a.id())) {
      open.pop_back();
      continue;
    }
    require(!outside.count(a.id()), "a function that is to be replayed uses an array ", a.shape(),
            " that it was given in another way than as its argument");
    Node node;
    if (a.has_primitive()) {
      const size_t before = open.size();
      for (auto& in : a.inputs())
        if (!slot_of.count(in.id())) open.push_back(in);
      if (open.size() > before) continue;
      node.primitive = a.primitive_ptr();
      for (auto& in : a.inputs()) node.inputs.push_back(slot_of.at(in.id()));
      for (auto& out : a.outputs()) {
        node.shapes.push_back(out.shape());
        node.types.push_back(out.dtype());
        slot_of.emplace(out.id(), slots_++);
      }
    } else {
      node.constant.push_back(a);
      slot_of.emplace(a.id(), slots_++);
    }
    nodes_.push_back(std::move(node));
    open.pop_back();
  }
  for (auto& out : outputs) outputs_.push_back(slot_of.at(out.id()));
}

std::optional<std::vector<mx::array>> Replay::operator()(const std::vector<mx::array>& inputs) const {
  if (inputs.size() != inputs_.size() || stream_ != current_stream()) return {};
  for (size_t i = 0; i < inputs.size(); i++)
    if (inputs[i].shape() != inputs_[i].first || inputs[i].dtype() != inputs_[i].second) return {};
  std::vector<mx::array> slots(inputs);
  slots.reserve(slots_);
  for (auto& node : nodes_) {
    if (!node.primitive) {
      slots.push_back(node.constant.front());
      continue;
    }
    std::vector<mx::array> read;
    read.reserve(node.inputs.size());
    for (size_t slot : node.inputs) read.push_back(slots[slot]);
    if (node.shapes.size() == 1) {
      slots.emplace_back(node.shapes[0], node.types[0], node.primitive, std::move(read));
    } else {
      for (auto& out : mx::array::make_arrays(node.shapes, node.types, node.primitive, read))
        slots.push_back(std::move(out));
    }
  }
  std::vector<mx::array> outputs;
  for (size_t slot : outputs_) outputs.push_back(slots[slot]);
  return outputs;
}

}  // namespace afm
