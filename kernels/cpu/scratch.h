// Memory that is kept for the next call of its thread.
#pragma once

#include <cstdint>
#include <new>

namespace afm {

class Scratch {
 public:
  ~Scratch() { release(); }

  // Room for `count` numbers and 64 bytes more, on a boundary of 64; contents don't survive the next call.
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes > size_) {
      release();
      data_ = ::operator new(bytes, std::align_val_t{64});
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void release() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
    data_ = nullptr;
    size_ = 0;
  }
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace afm
