// What a kernel's code calls in the emulator; `runtime.cpp` implements it, outside the checks of memory.
#pragma once

namespace emulator {

typedef unsigned long uptr;

/// A place in the kernel's text: what a collective or a barrier is known by.
struct Site {
  const char* file;
  unsigned line, column;

  static constexpr Site here(
      const char* file = __builtin_FILE(),
      unsigned line = __builtin_LINE(),
      unsigned column = __builtin_COLUMN()) {
    return {file, line, column};
  }
};

/// Functions of float that Metal has twice, `precise` and `fast`; `functions.h` has their errors.
enum class Function {
  ACOS, ACOSH, ASIN, ASINH, ATAN, ATAN2, ATANH, COS, COSH, COSPI, DIVIDE, EXP, EXP2, EXP10, FMOD, LOG, LOG2, LOG10,
  POW, RSQRT, SIN, SINH, SINPI, SQRT, TAN, TANH, TANPI,
};

/// Combines the arguments of all lanes that exist, once every one of them has arrived.
typedef void (*Resolve)(void** arguments, unsigned lanes);

/// The attributes of one thread, under the names of the language.
struct Thread {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned threads_per_threadgroup[3];
  unsigned dispatch_threads_per_threadgroup[3];
  unsigned grid_size[3];
  unsigned grid_origin[3];
  unsigned thread_index_in_threadgroup[1];
  unsigned thread_index_in_simdgroup[1];
  unsigned thread_index_in_quadgroup[1];
  unsigned simdgroup_index_in_threadgroup[1];
  unsigned quadgroup_index_in_threadgroup[1];
  unsigned simdgroups_per_threadgroup[1];
  unsigned quadgroups_per_threadgroup[1];
  unsigned dispatch_simdgroups_per_threadgroup[1];
  unsigned dispatch_quadgroups_per_threadgroup[1];
  unsigned thread_execution_width[1];
  unsigned threads_per_simdgroup[1];
};

typedef void (*Entry)(const Thread*, void** buffers);

struct Buffer {
  const char* name;
  void* data;  // the caller's memory: read for an input, written for an output
  uptr size;
  int is_output;
  unsigned char* written;  // for outputs: 1 where the kernel wrote, one entry per byte
};

struct Launch {
  const char* name;
  Entry entry;
  Buffer* buffers;
  unsigned n_buffers;
  unsigned grid[3], threadgroup[3];
  unsigned long seed;
  int schedule;  // which of the runs: sets poison and the buffers' placement
  unsigned seconds;  // before a kernel that doesn't end is stopped
  unsigned threadgroup_bytes;  // the most that a kernel may declare
  uptr code_begin, code_end;  // of the kernel's library, for its tables
  int lets_equals_race;  // threads may write a byte that another one wrote, if they write the same
};

// A register machine may leave out and move what only asks where a thread is.
#ifdef MSL_OPAQUE
#define EMULATOR_CONST __attribute__((const))
#else
#define EMULATOR_CONST
#endif

extern "C" {
/// Launch a kernel n times in a process of its own; 0, or 1 with what went wrong in `error`.
int emulator_run(Launch* launches, unsigned n, char* error, uptr error_size);
void emulator_collective(const char* name, Site site, void* argument, Resolve resolve);
void emulator_barrier(const char* name, Site site, unsigned memory);
EMULATOR_CONST void* emulator_threadgroup_variable(int id, const char* name, uptr size);
/// Index of the running thread in its simdgroup.
EMULATOR_CONST unsigned emulator_lane();
[[noreturn]] void emulator_fail(const char* message, Site site);
/// A random number of the running thread, or of the simdgroup whose lanes' arguments are combined: the same one in
/// every schedule.
unsigned long emulator_draw();
float emulator_function(Function f, int is_fast, float x, float y, Site site);
/// A function of half; its result is a half.
float emulator_half_function(Function f, float x, float y);
/// A function as an operation that a register machine knows by its name alone.
EMULATOR_CONST float emulator_named(const char* name, int is_fast, float x, float y);
/// Where the ways are recorded that launches take, `width` bytes for each site; see `branches.py`.
void emulator_record_to(unsigned char* table, unsigned width);
void emulator_record(unsigned site, unsigned way);
}

inline bool branch(unsigned site, bool is_true) {
  emulator_record(site, is_true);
  return is_true;
}

template <typename T>
inline T min_of(unsigned site, T a, T b) {
  emulator_record(site, b < a);
  return b < a ? b : a;
}

template <typename T>
inline T max_of(unsigned site, T a, T b) {
  emulator_record(site, a < b);
  return a < b ? b : a;
}

/// Counts the turns of a loop, around which it goes once.
struct Loop {
  unsigned site, turns;
  bool is_over;

  Loop(unsigned of) : site(of), turns(0), is_over(false) {}
  ~Loop() { emulator_record(site, turns < 2 ? turns : 2); }
  bool once() {
    bool was_over = is_over;
    is_over = true;
    return !was_over;
  }
  bool next(bool goes_on) {
    turns += goes_on;
    return goes_on;
  }
};

}  // namespace emulator
