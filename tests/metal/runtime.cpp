// The machine that kernels run on: one fiber per thread, a scheduler that is free to be unkind, and a check of
// every access to memory.
//
// A kernel is compiled with clang's instrumentation for data races, whose calls (`__tsan_read4` ...) end here:
// each address must be in a buffer, in threadgroup memory or on a stack, must be aligned, and must not race.
// Its arithmetic is compiled with the checks of undefined behaviour, whose reports (`__ubsan_handle_...`) end
// here too. One launch is one forked process, so that nothing a kernel does can harm the tests.
#include "runtime.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "functions.h"

using namespace emulator;

namespace {

constexpr unsigned LANES = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr uptr PAGE = 16384;  // a multiple of every page size in use
constexpr uptr STACK = 16 * PAGE;
constexpr unsigned MAX_REGIONS = 96;
constexpr unsigned NOBODY = ~0u, MANY = ~0u - 1;
constexpr unsigned SHARED = 1u << 31;  // with a simdgroup's global number: several of its lanes
constexpr unsigned MEMORY_DEVICE = 1, MEMORY_THREADGROUP = 2;

enum State { READY, AT_COLLECTIVE, AT_BARRIER, DONE };
enum Kind { INPUT, OUTPUT, THREADGROUP };

/// Who touched a byte last; `at` counts barriers, so that older entries are known to be ordered.
struct Shadow {
  unsigned writer, reader;
  unsigned written_at, read_at;
  unsigned written_at_simd, read_at_simd;
};

struct Region {
  const char* name;
  uptr begin, end;
  Kind kind;
  int id;
  Shadow* shadow;
  Buffer* buffer;
};

struct Fiber {
  void* stack_pointer;
  State state;
  Thread thread;
  const char* operation;
  Site site;
  unsigned memory;  // flags of the barrier it waits at
  void* argument;
  Resolve resolve;
  uint64_t random;  // state of the thread's own draws
};

Launch* launch;
char* report;
uptr report_size;
Fiber* fibers;
char* stacks;
uptr stacks_end;
unsigned n_threads, current = NOBODY;
unsigned resolving;  // first thread of the simdgroup whose arguments are being combined
void* scheduler_stack_pointer;
Region regions[MAX_REGIONS];
unsigned n_regions;
Region* found_at[256];  // by the low bits of a page's number: the region where an address was found last
uptr threadgroup_bytes;
void* buffer_addresses[MAX_REGIONS];
uint64_t random_state;
unsigned char* taken;  // shared with the process that launches
unsigned taken_width;
// Barriers passed since the launch began; a threadgroup's end counts as one.
unsigned threadgroup_epoch = 1, device_epoch = 1;
unsigned simd_epochs[MAX_THREADS / LANES];
unsigned threads_before;  // global number of this threadgroup's first thread

uint64_t next(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

uint64_t draw() { return next(random_state); }

/// Where the draws of one thread of the launch begin, whatever the schedule.
uint64_t random_of(uint64_t group, unsigned thread) {
  uint64_t x = launch->seed * 0x9e3779b97f4a7c15ull + (group * MAX_THREADS + thread + 1) * 0xd1342543de82ef95ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) | 1;
}

/// The second run flushes denormals of float, as Metal may (section 8.1 of its specification).
void set_denormals() {
  if (launch->schedule % 2 == 0) return;
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#else
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | 1ull << 24));
#endif
}

// ---- reports ------------------------------------------------------------------------------------------------

const char* where(char* text, uptr size) {
  if (current == NOBODY) {
    snprintf(text, size, "between threads");
    return text;
  }
  const Thread& t = fibers[current].thread;
  const unsigned *p = t.thread_position_in_threadgroup, *g = t.threadgroup_position_in_grid;
  snprintf(text, size, "thread (%u, %u, %u) of threadgroup (%u, %u, %u)", p[0], p[1], p[2], g[0], g[1], g[2]);
  return text;
}

[[noreturn]] void fail(const char* format, ...) {
  char place[128];
  int n = snprintf(report, report_size, "%s: ", where(place, sizeof place));
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report + n, report_size - n, format, arguments);
  va_end(arguments);
  _exit(1);
}

void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGALRM)
    fail("still running after %u s: a loop without end, or a launch that is too large", launch->seconds);
  fail("%s at address %p, outside everything that the kernel may touch", strsignal(number), info->si_addr);
}

void catch_signals() {
  static char alternative[65536];
  stack_t stack = {};
  stack.ss_sp = alternative;
  stack.ss_size = sizeof alternative;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM};
  for (int number : numbers) sigaction(number, &action, nullptr);
}

// ---- memory -------------------------------------------------------------------------------------------------

char* map(uptr size) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("no memory for %lu bytes", (unsigned long)size);
  return static_cast<char*>(p);
}

/// Memory between two guard pages, against the first or against the last one.
char* guarded(uptr size, bool at_end) {
  uptr room = (size + PAGE - 1) / PAGE * PAGE;
  char* base = map(room + 2 * PAGE);
  mprotect(base, PAGE, PROT_NONE);
  mprotect(base + PAGE + room, PAGE, PROT_NONE);
  return base + PAGE + (at_end ? (room - size) / 16 * 16 : 0);
}

Region& add_region(const char* name, Kind kind, char* begin, uptr size, bool has_shadow) {
  if (n_regions == MAX_REGIONS) fail("more than %u buffers and threadgroup variables", MAX_REGIONS);
  Region& r = regions[n_regions++];
  r = {name, uptr(begin), uptr(begin) + size, kind, -1, nullptr, nullptr};
  if (has_shadow) r.shadow = reinterpret_cast<Shadow*>(map(size * sizeof(Shadow) + 1));
  return r;
}

/// Bytes that no kernel should be able to mistake for a value, others in every run.
int poison() { return launch->schedule % 2 ? 0x4b : 0xff; }

void place_buffers() {
  bool at_end = launch->schedule % 2 == 0;
  for (unsigned i = 0; i < launch->n_buffers; ++i) {
    Buffer& b = launch->buffers[i];
    char* p = guarded(b.size ? b.size : 1, at_end);
    if (b.is_output)
      memset(p, poison(), b.size);
    else
      memcpy(p, b.data, b.size);
    add_region(b.name, b.is_output ? OUTPUT : INPUT, p, b.size, b.is_output).buffer = &b;
    buffer_addresses[i] = p;
  }
}

void return_outputs() {
  for (unsigned i = 0; i < n_regions; ++i) {
    Region& r = regions[i];
    if (r.kind != OUTPUT) continue;
    memcpy(r.buffer->data, reinterpret_cast<void*>(r.begin), r.buffer->size);
    for (uptr j = 0; j < r.buffer->size; ++j) r.buffer->written[j] = r.shadow[j].written_at != 0;
  }
}

void poison_threadgroup_memory() {
  for (unsigned i = 0; i < n_regions; ++i)
    if (regions[i].kind == THREADGROUP)
      memset(reinterpret_cast<void*>(regions[i].begin), poison(), regions[i].end - regions[i].begin);
}

Region* find_region(uptr address) {
  Region*& found = found_at[address / PAGE % 256];
  if (found && address >= found->begin && address < found->end) return found;
  for (unsigned i = 0; i < n_regions; ++i)
    if (address >= regions[i].begin && address < regions[i].end) return found = &regions[i];
  return nullptr;
}

[[noreturn]] void fail_access(uptr address, uptr size, bool is_write, void* pc) {
  const Region* nearest = nullptr;
  uptr distance = ~uptr(0);
  for (unsigned i = 0; i < n_regions; ++i) {
    const Region& r = regions[i];
    uptr d = address < r.begin ? r.begin - address : address + size > r.end ? address + size - r.end : 0;
    if (d < distance) distance = d, nearest = &r;
  }
  const char* verb = is_write ? "write" : "read";
  if (!nearest || distance > PAGE)
    fail("%s of %lu bytes at %#lx, near none of its buffers @%p", verb, size, address, pc);
  uptr span = nearest->end - nearest->begin;
  const char* kind = nearest->kind == THREADGROUP ? "threadgroup variable" : "buffer";
  if (address < nearest->begin)
    fail("%s of %lu bytes out of bounds: %lu bytes before %s `%s` @%p", verb, size, nearest->begin - address,
         kind, nearest->name, pc);
  fail("%s of %lu bytes out of bounds: at byte %lu of %s `%s`, which has %lu @%p", verb, size,
       address - nearest->begin, kind, nearest->name, span, pc);
}

bool is_local(unsigned thread) { return thread >= threads_before && thread < threads_before + n_threads; }

/// Global number of the simdgroup of a thread, or of several threads of one.
unsigned simdgroup_of(unsigned thread) { return thread & SHARED ? thread & ~SHARED : thread / LANES; }

/// Whether two accesses are unordered: by different threads with no barrier in between.
bool races(const Region& r, unsigned other, unsigned at, unsigned at_simd) {
  unsigned self = threads_before + current;
  if (at == 0 || other == self) return false;
  if (other == MANY) return r.kind == OUTPUT || at == threadgroup_epoch;
  unsigned simd = self / LANES, other_simd = simdgroup_of(other);
  if (r.kind == OUTPUT && !is_local(other_simd * LANES)) return true;
  if (at != (r.kind == THREADGROUP ? threadgroup_epoch : device_epoch)) return false;
  return simd != other_simd || at_simd == simd_epochs[current / LANES];
}

[[noreturn]] void fail_race(
    const Region& r, uptr offset, const char* first, unsigned other, bool is_write, void* pc) {
  char text[64];
  if (other == MANY)
    snprintf(text, sizeof text, "several threads");
  else if (other & SHARED)
    snprintf(text, sizeof text, "several lanes of a simdgroup");
  else if (!is_local(other))
    snprintf(text, sizeof text, "a thread of another threadgroup");
  else
    snprintf(text, sizeof text, "thread %u of the threadgroup", other - threads_before);
  bool is_equal = strstr(first, "same");
  fail("race %son byte %lu of `%s`: %s it, which %s %s with no barrier in between @%p",
       is_equal ? "of equal values " : "", offset, r.name, is_write ? "writes" : "reads", text,
       is_equal ? "wrote with the same value," : first, pc);
}

/// A byte that two threads write with no barrier in between; what the second one writes shows afterwards.
struct Overwritten {
  Region* region;
  uptr offset;
  unsigned other;
  unsigned char before;
};

constexpr unsigned MAX_OVERWRITTEN = 256;
Overwritten overwritten[MAX_OVERWRITTEN];
unsigned n_overwritten;
void* overwriting_pc;

/// Report the last write, now that it is done, if it overwrote what another thread had written.
void settle() {
  if (!n_overwritten) return;
  unsigned n = n_overwritten;
  n_overwritten = 0;
  for (unsigned i = 0; i < n; ++i) {
    const Overwritten& o = overwritten[i];
    if (*reinterpret_cast<unsigned char*>(o.region->begin + o.offset) != o.before)
      fail_race(*o.region, o.offset, "wrote", o.other, true, overwriting_pc);
  }
  if (launch->lets_equals_race) return;
  const Overwritten& o = overwritten[0];
  fail_race(*o.region, o.offset, "wrote the same value to", o.other, true, overwriting_pc);
}

unsigned joined_reader(const Shadow& s, unsigned self, unsigned now, unsigned now_simd) {
  if (s.read_at != now || s.reader == self) return self;
  if (s.reader == MANY || simdgroup_of(s.reader) != self / LANES) return MANY;
  return s.read_at_simd == now_simd ? SHARED | self / LANES : self;
}

void record(Region& r, uptr offset, uptr size, bool is_write, void* pc) {
  unsigned self = threads_before + current;
  unsigned now = r.kind == THREADGROUP ? threadgroup_epoch : device_epoch;
  unsigned now_simd = simd_epochs[current / LANES];
  for (uptr i = offset; i < offset + size; ++i) {
    Shadow& s = r.shadow[i];
    if (races(r, s.writer, s.written_at, s.written_at_simd)) {
      if (!is_write) fail_race(r, i, "wrote", s.writer, is_write, pc);
      if (n_overwritten < MAX_OVERWRITTEN)
        overwritten[n_overwritten++] = {&r, i, s.writer, *reinterpret_cast<unsigned char*>(r.begin + i)};
      overwriting_pc = pc;
    }
    if (is_write) {
      if (races(r, s.reader, s.read_at, s.read_at_simd)) fail_race(r, i, "read", s.reader, is_write, pc);
      s.writer = self, s.written_at = now, s.written_at_simd = now_simd;
    } else {
      s.reader = joined_reader(s, self, now, now_simd), s.read_at = now, s.read_at_simd = now_simd;
    }
  }
}

bool is_on_stack(uptr address) { return address >= uptr(stacks) && address < stacks_end; }

/// Check an access of a power of two bytes.
void access(uptr address, uptr size, bool is_write, void* pc) {
  if (is_on_stack(address) || current == NOBODY) return;
  if (address & (size - 1))
    fail("misaligned %s of %lu bytes at address %#lx @%p", is_write ? "write" : "read", size, address, pc);
  Region* r = find_region(address);
  if (!r && !is_write && address >= launch->code_begin && address < launch->code_end) return;
  if (!r || address + size > r->end) fail_access(address, size, is_write, pc);
  if (is_write && r->kind == INPUT) fail("write to input `%s` @%p", r->name, pc);
  if (r->shadow) record(*r, address - r->begin, size, is_write, pc);
}

/// Check accesses to n bytes, one by one.
void access_bytes(const void* p, uptr n, bool is_write, void* pc) {
  const uptr address = uptr(p);
  if (n && is_on_stack(address) && is_on_stack(address + n - 1)) return;
  for (uptr i = 0; i < n; ++i) access(address + i, 1, is_write, pc);
}

// ---- fibers -------------------------------------------------------------------------------------------------

// Saves the registers that a call preserves, and the stack pointer in `*from`; goes on where `to` was saved.
extern "C" void emulator_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulator_switch
  .hidden emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr unsigned SAVED = 6, RETURN_SLOT = 6;  // in words; the return address lies above the registers
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl emulator_switch
  .hidden emulator_switch
emulator_switch:
  sub sp, sp, #176
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
)");
constexpr unsigned SAVED = 22, RETURN_SLOT = 11;
#else
#error "the emulator switches fibers on x86-64 and AArch64 only"
#endif

void block(State state) {
  settle();
  fibers[current].state = state;
  emulator_switch(&fibers[current].stack_pointer, scheduler_stack_pointer);
}

void run_fiber() {
  launch->entry(&fibers[current].thread, buffer_addresses);
  block(DONE);
  __builtin_trap();  // a fiber that is done is never resumed
}

void start_fiber(unsigned i) {
  uintptr_t* top = reinterpret_cast<uintptr_t*>(stacks + (i + 1) * STACK) - 32;
  uintptr_t* sp = top - SAVED - 2;
  // The ABI wants the stack pointer at 8 modulo 16 where a function begins on x86-64, at 0 on AArch64.
  if (RETURN_SLOT == SAVED) sp = reinterpret_cast<uintptr_t*>(uintptr_t(sp) / 16 * 16);
  memset(sp, 0, (SAVED + 2) * sizeof *sp);
  sp[RETURN_SLOT] = reinterpret_cast<uintptr_t>(run_fiber);
  fibers[i].stack_pointer = sp;
  fibers[i].state = READY;
}

void allocate_fibers() {
  const unsigned n = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  fibers = reinterpret_cast<Fiber*>(map(n * sizeof(Fiber)));
  stacks = map(n * STACK);
  stacks_end = uptr(stacks) + n * STACK;
  for (unsigned i = 0; i < n; ++i) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
}

// ---- scheduler ----------------------------------------------------------------------------------------------

[[noreturn]] void fail_divergence(unsigned begin, unsigned end, const char* what) {
  unsigned arrived = begin;
  while (arrived < end && (fibers[arrived].state == DONE || fibers[arrived].state == READY)) ++arrived;
  const Fiber& a = fibers[arrived];
  current = arrived;
  unsigned n_same = 0, n_done = 0;
  const Fiber* other = nullptr;
  for (unsigned i = begin; i < end; ++i) {
    const Fiber& f = fibers[i];
    bool is_same = f.state == a.state && f.site.line == a.site.line && f.site.column == a.site.column &&
                   f.site.file == a.site.file && f.resolve == a.resolve;
    n_same += is_same;
    n_done += f.state == DONE;
    if (!is_same && f.state != DONE) other = &f;
  }
  if (other)
    fail("divergent %s: %u of %u threads %s are at %s (%s:%u:%u), another is at %s (%s:%u:%u)", a.operation,
         n_same, end - begin, what, a.operation, a.site.file, a.site.line, a.site.column, other->operation,
         other->site.file, other->site.line, other->site.column);
  fail("divergent %s (%s:%u:%u): %u of %u threads %s wait at it, %u have returned", a.operation, a.site.file,
       a.site.line, a.site.column, n_same, end - begin, what, n_done);
}

bool is_uniform(unsigned begin, unsigned end) {
  const Fiber& a = fibers[begin];
  for (unsigned i = begin + 1; i < end; ++i) {
    const Fiber& f = fibers[i];
    if (f.state != a.state) return false;
    if (a.state == DONE) continue;
    if (f.site.line != a.site.line || f.site.column != a.site.column) return false;
    if (f.site.file != a.site.file || f.resolve != a.resolve) return false;
  }
  return true;
}

/// Run every lane of a simdgroup to its next collective, barrier or end, in a random order.
void run_lanes(unsigned begin, unsigned end) {
  unsigned n = end - begin, start = draw() % LANES, stride = draw() % LANES | 1;
  for (unsigned k = 0; k < LANES; ++k) {
    unsigned lane = (start + k * stride) % LANES;
    if (lane >= n || fibers[begin + lane].state != READY) continue;
    current = begin + lane;
    emulator_switch(&scheduler_stack_pointer, fibers[current].stack_pointer);
    current = NOBODY;
  }
}

/// Run one simdgroup until all its lanes wait at a barrier or have returned, or a little.
void run_simdgroup(unsigned simd) {
  unsigned begin = simd * LANES, end = begin + LANES < n_threads ? begin + LANES : n_threads;
  do {
    run_lanes(begin, end);
    if (!is_uniform(begin, end)) fail_divergence(begin, end, "of the simdgroup");
    Fiber& first = fibers[begin];
    if (first.state != AT_COLLECTIVE) return;
    void* arguments[LANES];
    for (unsigned i = begin; i < end; ++i) arguments[i - begin] = fibers[i].argument;
    resolving = begin;
    if (first.resolve)
      first.resolve(arguments, end - begin);
    else
      ++simd_epochs[simd];
    for (unsigned i = begin; i < end; ++i) fibers[i].state = READY;
  } while (draw() % 4);
}

/// Let the threads pass a barrier once all of them wait at the same one; false when all have returned.
bool release_barrier() {
  if (!is_uniform(0, n_threads)) fail_divergence(0, n_threads, "of the threadgroup");
  if (fibers[0].state == DONE) return false;
  unsigned memory = fibers[0].memory;
  for (unsigned i = 0; i < n_threads; ++i) fibers[i].state = READY;
  if (memory & MEMORY_THREADGROUP) ++threadgroup_epoch;
  if (memory & MEMORY_DEVICE) ++device_epoch;
  return true;
}

void run_threadgroup() {
  poison_threadgroup_memory();
  ++threadgroup_epoch, ++device_epoch;
  for (unsigned i = 0; i < n_threads; ++i) start_fiber(i);
  unsigned n_simd = (n_threads + LANES - 1) / LANES;
  for (;;) {
    unsigned start = draw() % n_simd, simd = n_simd;
    for (unsigned k = 0; k < n_simd; ++k) {
      unsigned candidate = (start + k) % n_simd;
      if (fibers[candidate * LANES].state == READY) {
        simd = candidate;
        break;
      }
    }
    if (simd < n_simd)
      run_simdgroup(simd);
    else if (!release_barrier())
      return;
  }
}

void set_threads(const unsigned group[3], const unsigned groups[3]) {
  unsigned size[3];
  for (int a = 0; a < 3; ++a) {
    unsigned rest = launch->grid[a] - group[a] * launch->threadgroup[a];
    size[a] = rest < launch->threadgroup[a] ? rest : launch->threadgroup[a];
  }
  n_threads = size[0] * size[1] * size[2];
  unsigned nominal = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  uint64_t index = (uint64_t(group[2]) * groups[1] + group[1]) * groups[0] + group[0];
  for (unsigned i = 0; i < n_threads; ++i) {
    Thread& t = fibers[i].thread;
    fibers[i].random = random_of(index, i);
    unsigned position[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int a = 0; a < 3; ++a) {
      t.thread_position_in_threadgroup[a] = position[a];
      t.thread_position_in_grid[a] = group[a] * launch->threadgroup[a] + position[a];
      t.threadgroup_position_in_grid[a] = group[a];
      t.threadgroups_per_grid[a] = groups[a];
      t.threads_per_grid[a] = t.grid_size[a] = launch->grid[a];
      t.threads_per_threadgroup[a] = size[a];
      t.dispatch_threads_per_threadgroup[a] = launch->threadgroup[a];
      t.grid_origin[a] = 0;
    }
    t.thread_index_in_threadgroup[0] = i;
    t.thread_index_in_simdgroup[0] = i % LANES;
    t.thread_index_in_quadgroup[0] = i % 4;
    t.simdgroup_index_in_threadgroup[0] = i / LANES;
    t.quadgroup_index_in_threadgroup[0] = i / 4;
    t.simdgroups_per_threadgroup[0] = (n_threads + LANES - 1) / LANES;
    t.quadgroups_per_threadgroup[0] = (n_threads + 3) / 4;
    t.dispatch_simdgroups_per_threadgroup[0] = (nominal + LANES - 1) / LANES;
    t.dispatch_quadgroups_per_threadgroup[0] = (nominal + 3) / 4;
    t.thread_execution_width[0] = t.threads_per_simdgroup[0] = LANES;
  }
}

/// All threadgroups, each to its end, in a random order: a rotation with a stride coprime to their number.
void run_grid() {
  unsigned groups[3];
  for (int a = 0; a < 3; ++a)
    groups[a] = (launch->grid[a] + launch->threadgroup[a] - 1) / launch->threadgroup[a];
  uint64_t n = uint64_t(groups[0]) * groups[1] * groups[2];
  uint64_t stride = draw() % (n + 1) | 1;
  for (;; stride += 2) {
    uint64_t a = stride, b = n;
    while (b) a %= b, a ^= b, b ^= a, a ^= b;
    if (a == 1) break;
  }
  uint64_t start = draw() % n;
  for (uint64_t k = 0; k < n; ++k) {
    uint64_t i = (start + k * stride) % n;
    unsigned group[3] = {unsigned(i % groups[0]), unsigned(i / groups[0] % groups[1]),
                         unsigned(i / groups[0] / groups[1])};
    set_threads(group, groups);
    run_threadgroup();
    threads_before += MAX_THREADS;
  }
}

void run_launch(Launch* given) {
  launch = given;
  random_state = launch->seed * 0x9e3779b97f4a7c15ull + launch->schedule + 1;
  for (int i = 0; i < 8; ++i) draw();
  n_regions = 0, threadgroup_bytes = 0, threads_before = 0;
  memset(found_at, 0, sizeof found_at);
  alarm(launch->seconds);
  allocate_fibers();
  place_buffers();
  set_denormals();
  run_grid();
  return_outputs();
}

[[noreturn]] void run_child(Launch* launches, unsigned n, char* error, uptr error_size) {
  report = error;
  report_size = error_size;
  catch_signals();
  for (unsigned i = 0; i < n; ++i) run_launch(&launches[i]);
  _exit(0);
}

}  // namespace

extern "C" {

int emulator_run(Launch* launches, unsigned n, char* error, uptr error_size) {
  error[0] = 0;
  pid_t child = fork();
  if (child == 0) run_child(launches, n, error, error_size);
  if (child < 0) {
    snprintf(error, error_size, "fork failed");
    return 1;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
  }
  if (status != 0 && !error[0]) snprintf(error, error_size, "the process ended with status %#x", status);
  return status != 0;
}

void emulator_collective(const char* name, Site site, void* argument, Resolve resolve) {
  Fiber& f = fibers[current];
  f.operation = name, f.site = site, f.argument = argument, f.resolve = resolve;
  block(AT_COLLECTIVE);
}

void emulator_barrier(const char* name, Site site, unsigned memory) {
  Fiber& f = fibers[current];
  f.operation = name, f.site = site, f.memory = memory, f.argument = nullptr, f.resolve = nullptr;
  block(AT_BARRIER);
}

void* emulator_threadgroup_variable(int id, const char* name, uptr size) {
  for (unsigned i = 0; i < n_regions; ++i)
    if (regions[i].id == id) return reinterpret_cast<void*>(regions[i].begin);
  threadgroup_bytes += (size + 15) / 16 * 16;
  if (threadgroup_bytes > launch->threadgroup_bytes)
    fail("`%s` brings threadgroup memory to %lu bytes, the limit is %u", name, (unsigned long)threadgroup_bytes,
         launch->threadgroup_bytes);
  char* p = guarded(size, launch->schedule % 2 == 0);
  memset(p, poison(), size);
  add_region(name, THREADGROUP, p, size, true).id = id;
  return p;
}

void emulator_record_to(unsigned char* table, unsigned width) { taken = table, taken_width = width; }

void emulator_record(unsigned site, unsigned way) {
  if (taken) taken[site * taken_width + way] = 1;
}

unsigned emulator_lane() { return current % LANES; }

unsigned long emulator_draw() {
  // The low bits of such a generator are its worst.
  return next(fibers[current == NOBODY ? resolving : current].random) >> 16;
}

void emulator_fail(const char* message, Site site) {
  fail("%s (%s:%u:%u)", message, site.file, site.line, site.column);
}

// ---- what clang's instrumentation calls ---------------------------------------------------------------------

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ACCESS(size) \
  void __tsan_read##size(void* p) { \
    settle(); \
    access(uptr(p), size, false, __builtin_return_address(0)); \
  } \
  void __tsan_write##size(void* p) { \
    settle(); \
    access(uptr(p), size, true, __builtin_return_address(0)); \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

// Accesses whose type promises less alignment than their size (packed vectors) go byte by byte.
#define UNALIGNED(size) \
  void __tsan_unaligned_read##size(void* p) { \
    settle(); \
    access_bytes(p, size, false, __builtin_return_address(0)); \
  } \
  void __tsan_unaligned_write##size(void* p) { \
    settle(); \
    access_bytes(p, size, true, __builtin_return_address(0)); \
  }
UNALIGNED(2)
UNALIGNED(4)
UNALIGNED(8)
UNALIGNED(16)
#undef UNALIGNED

void* __tsan_memcpy(void* to, const void* from, uptr n) {
  settle();
  access_bytes(from, n, false, __builtin_return_address(0));
  access_bytes(to, n, true, __builtin_return_address(0));
  return memcpy(to, from, n);
}

void* __tsan_memmove(void* to, const void* from, uptr n) {
  settle();
  access_bytes(from, n, false, __builtin_return_address(0));
  access_bytes(to, n, true, __builtin_return_address(0));
  return memmove(to, from, n);
}

void* __tsan_memset(void* to, int value, uptr n) {
  settle();
  access_bytes(to, n, true, __builtin_return_address(0));
  return memset(to, value, n);
}

// Every report of undefined behaviour begins with its place in the source.
#define UNDEFINED(handler, what) \
  void __ubsan_handle_##handler##_abort(Site* site, uptr, uptr) { \
    fail(what " (%s:%u:%u)", site->file, site->line, site->column); \
  }
UNDEFINED(out_of_bounds, "index out of bounds of an array")
UNDEFINED(shift_out_of_bounds, "shift by more than the type's width, or of a negative value")
UNDEFINED(divrem_overflow, "integer division by zero or overflow")
UNDEFINED(add_overflow, "signed integer overflow in an addition")
UNDEFINED(sub_overflow, "signed integer overflow in a subtraction")
UNDEFINED(mul_overflow, "signed integer overflow in a multiplication")
UNDEFINED(negate_overflow, "signed integer overflow in a negation")
UNDEFINED(float_cast_overflow, "float value outside the range of the integer type")
UNDEFINED(builtin_unreachable, "unreachable code reached")
UNDEFINED(missing_return, "function ended without a return value")
#undef UNDEFINED

#if defined(__x86_64__)
// Rounding of float to bfloat (to nearest, ties to even), which old C runtimes lack.
__attribute__((target("sse2"))) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    bits |= 0x400000;
  else
    bits += 0x7fff + (bits >> 16 & 1);
  uint16_t high = bits >> 16;
  __bf16 result;
  memcpy(&result, &high, 2);
  return result;
}
#endif
}
