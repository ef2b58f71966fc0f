// The little that core_test and the kernels need of a C library, on Linux on ARM. Zig has such a library as source
// only, and compiles it for minutes before it links a first program.
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

int main(int argc, char** argv);

namespace {

constexpr long kWrite = 64, kExit = 93, kUnmap = 215, kMap = 222;
constexpr size_t kHeader = 64;  // before an allocation: its size, and all boundaries that are asked for

const unsigned long* auxiliary = nullptr;  // pairs of a type and a value

long call(long number, long a, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0) {
  register long x8 asm("x8") = number;
  register long x0 asm("x0") = a;
  register long x1 asm("x1") = b;
  register long x2 asm("x2") = c;
  register long x3 asm("x3") = d;
  register long x4 asm("x4") = e;
  register long x5 asm("x5") = f;
  asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}

void put(const char* text) {
  size_t length = 0;
  while (text[length] != 0) ++length;
  call(kWrite, 1, reinterpret_cast<long>(text), static_cast<long>(length));
}

void put(unsigned long value) {
  char digits[24], *at = digits + sizeof digits - 1;
  *at = 0;
  do *--at = static_cast<char>('0' + value % 10);
  while ((value /= 10) > 0);
  put(at);
}

// Whole part and nine places, which is all that a failure needs.
void put(double value) {
  if (!(value > -1e9 && value < 1e9)) return put(value > 0 ? "much" : value < 0 ? "-much" : "nan");
  if (value < 0) put("-");
  const double size = value < 0 ? -value : value;
  const auto whole = static_cast<unsigned long>(size);
  put(whole);
  put(".");
  const auto part = static_cast<unsigned long>((size - static_cast<double>(whole)) * 1e9);
  for (unsigned long unit = 100000000; unit > part && unit > 1; unit /= 10) put("0");
  put(part);
}

}  // namespace

extern "C" {

void* memcpy(void* to, const void* from, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}

void* memset(void* to, int value, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<char*>(to)[i] = static_cast<char>(value);
  return to;
}

int memcmp(const void* a, const void* b, size_t count) {
  const auto *x = static_cast<const unsigned char*>(a), *y = static_cast<const unsigned char*>(b);
  for (size_t i = 0; i < count; ++i) {
    if (x[i] != y[i]) return x[i] - y[i];
  }
  return 0;
}

int bcmp(const void* a, const void* b, size_t count) { return memcmp(a, b, count); }

int strcmp(const char* a, const char* b) {
  while (*a != 0 && *a == *b) ++a, ++b;
  return *a - *b;
}

unsigned long long strtoull(const char* text, char**, int) {
  unsigned long long value = 0;
  for (; *text >= '0' && *text <= '9'; ++text) value = 10 * value + static_cast<unsigned>(*text - '0');
  return value;
}

void* calloc(size_t count, size_t size) {
  constexpr long kReadWrite = 3, kPrivateAnonymous = 0x22;
  const size_t bytes = count * size + kHeader;
  char* memory = reinterpret_cast<char*>(call(kMap, 0, static_cast<long>(bytes), kReadWrite, kPrivateAnonymous, -1));
  *reinterpret_cast<size_t*>(memory) = bytes;
  return memory + kHeader;
}

void* aligned_alloc(size_t, size_t size) { return calloc(size, 1); }

void free(void* memory) {
  if (memory == nullptr) return;
  char* start = static_cast<char*>(memory) - kHeader;
  call(kUnmap, reinterpret_cast<long>(start), static_cast<long>(*reinterpret_cast<size_t*>(start)));
}

// 2^n times the series of the rest.
double exp(double x) {
  constexpr double kLog2 = 0.6931471805599453, kLog2Rest = 2.3190468138462996e-17;
  const double whole = __builtin_rint(x / kLog2), rest = x - whole * kLog2 - whole * kLog2Rest;
  double sum = 1;
  for (int i = 20; i > 0; --i) sum = 1 + sum * rest / i;
  const double limited = whole < -1022 ? -1022 : whole > 1023 ? 1023 : whole;
  const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(limited) + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return sum * power;
}

unsigned long getauxval(unsigned long type) {
  for (const unsigned long* entry = auxiliary; entry[0] != 0; entry += 2) {
    if (entry[0] == type) return entry[1];
  }
  return 0;
}

// %s, %d, and any number of places before a %g.
int printf(const char* format, ...) {
  va_list values;
  va_start(values, format);
  for (; *format != 0; ++format) {
    if (*format != '%') {
      const char one[2] = {*format, 0};
      put(one);
      continue;
    }
    while (*++format == '.' || (*format >= '0' && *format <= '9')) {}
    if (*format == 's') put(va_arg(values, const char*));
    if (*format == 'd') put(static_cast<unsigned long>(va_arg(values, int)));
    if (*format == 'g') put(va_arg(values, double));
  }
  va_end(values);
  return 0;
}

void begin(const unsigned long* stack) {
  const unsigned long count = stack[0];
  auto arguments = reinterpret_cast<char**>(const_cast<unsigned long*>(stack + 1));
  const unsigned long* environment = stack + count + 2;
  while (*environment != 0) ++environment;
  auxiliary = environment + 1;
  call(kExit, main(static_cast<int>(count), arguments));
}

}  // extern "C"

asm(".globl _start\n_start:\n  mov x0, sp\n  bl begin\n");
