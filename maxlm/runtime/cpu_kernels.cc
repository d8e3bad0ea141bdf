// Products of inputs in 8 bits with packed kernels in 8 or 4 bits; see maxlm/model/layers/rounded_inputs.py.
//
// Shapes: M rows, I inputs, O outputs. A packed kernel consists of panels of 16 outputs. The outputs are padded to a
// multiple of 16, the inputs to a multiple of 32:
//
//   int8  [O / 16, I / 4, 16, 4]  codes from -127 to 127
//   int4  [O / 16, I / 8, 16, 4]  codes + 8; inputs 0 to 3 of 8 in the low halves of the bytes, 4 to 7 in the high
//
// Each row of the input is rounded to 8 bits in blocks of 32 inputs, with the scale max |x| / 127 of a block, as in
// llama.cpp's Q8_0. The sum of the products of a block is an exact integer.
//
// The result of a row depends neither on the other rows nor on the number of threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kWidth = 16;        // outputs of a panel
constexpr int64_t kBlock = 32;        // inputs that share a scale
constexpr int64_t kGroup = 4;         // panels of a group; a thread computes whole groups
constexpr int64_t kTask = 64 * 1024;  // bytes of a kernel for which a further thread is worth its start

#ifdef __AVX512VNNI__
constexpr bool kUnsignedInt8 = true;
constexpr int64_t kLanes = 16;
#else
constexpr bool kUnsignedInt8 = false;
constexpr int64_t kLanes = 8;
#endif
constexpr int64_t kVectors = kWidth / kLanes;  // vectors of a panel's outputs
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

int64_t DividedUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

template <typename Vector>
inline __attribute__((always_inline)) void Load(const void* from, Vector& into) {
  std::memcpy(&into, from, sizeof(Vector));
}

// Adds to each sum the products of 4 codes each with 4 inputs from -127 to 127. The codes are -127 to 127 if kBits is 8,
// and 0 to 15 if it is 4. If kUnsignedInt8, the result is too large by 128 times the inputs for kBits = 8.
template <int kBits>
inline __attribute__((always_inline)) void AddProducts(Ints& sums, const Ints& codes, const int8_t* x) {
#if defined(__AVX512VNNI__)
  int32_t four;
  std::memcpy(&four, x, 4);
  const Ints factor = kBits == 8 ? codes ^ (int32_t)0x80808080 : codes;
  sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)factor, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i inputs = _mm256_set1_epi32(four), factor = (__m256i)codes;
  // The first factor is unsigned, and the sum of two products must fit in 16 bits: |code| times sign(code) x.
  const __m256i pairs = kBits == 4 ? _mm256_maddubs_epi16(factor, inputs)
                                   : _mm256_maddubs_epi16(_mm256_abs_epi8(factor), _mm256_sign_epi8(inputs, factor));
  sums = (Ints)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  for (int byte = 0; byte < 4; ++byte) sums += (codes << (24 - 8 * byte) >> 24) * (int32_t)x[byte];
#endif
}

// Rows rounded to 8 bits.
struct Rounded {
  Rounded(const float* x, int64_t M, int64_t I) : inputs(DividedUp(I, kBlock) * kBlock), blocks(inputs / kBlock) {
    codes.resize(M * inputs);
    scales.resize(M * blocks);
    sums.resize(M * blocks);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t num = std::min(kBlock, I - block * kBlock);
        const float* from = x + m * I + block * kBlock;
        // The bits of |x| as integers have the order of the floats, and those of NaN are above all others.
        int32_t bits = 0;
        for (int64_t i = 0; i < num; ++i) {
          int32_t magnitude;
          std::memcpy(&magnitude, from + i, sizeof(float));
          bits = std::max(bits, magnitude & 0x7fffffff);
        }
        float largest;
        std::memcpy(&largest, &bits, sizeof(float));
        const bool is_finite = std::isfinite(largest);
        // Without a finite inverse, all inputs of the block are 0 or almost, or one is NaN.
        const float inverse = std::isfinite(127 / largest) ? 127 / largest : 0;
        int8_t* into = codes.data() + m * inputs + block * kBlock;
        int32_t sum = 0;
        for (int64_t i = 0; i < num; ++i) {
          into[i] = is_finite ? (int8_t)std::nearbyint(from[i] * inverse) : 0;
          sum += into[i];
        }
        scales[m * blocks + block] = is_finite ? largest / 127 : NAN;
        sums[m * blocks + block] = sum;
      }
    }
  }

  int64_t inputs, blocks;       // per row, padded
  std::vector<int8_t> codes;    // [M, inputs]
  std::vector<float> scales;    // [M, blocks]
  std::vector<int32_t> sums;    // [M, blocks], of the codes
};

// Product with a kernel in 8 or 4 bits and its scales [O / 16, I / group, 16].
template <int kBits>
struct IntegerProduct {
  template <int R, int P>
  void Tile(int64_t panel, int64_t row, Floats* y) const {
    constexpr int64_t kBytes = kBlock * kWidth * kBits / 8;
    constexpr int32_t kOffset = kBits == 4 ? -8 : kUnsignedInt8 ? -128 : 0;
    const int64_t blocks = x->blocks, per_scale = blocks / groups;
    for (int i = 0; i < R * P * kVectors; ++i) y[i] = Floats{};
    for (int64_t block = 0; block < blocks; ++block) {
      for (int v = 0; v < P * kVectors; ++v) {
        const int64_t p = panel + v / kVectors, lane = v % kVectors * kLanes;
        const uint8_t* from = codes + (p * blocks + block) * kBytes + 4 * lane;
        Ints sums[R];
        for (int r = 0; r < R; ++r) sums[r] = Ints{} + kOffset * x->sums[(row + r) * blocks + block];
#pragma GCC unroll 8
        for (int i = 0; i < kBlock / 4; ++i) {
          Ints four;
          Load(from + (kBits == 8 ? i : i / 2) * 4 * kWidth, four);
          if (kBits == 4) four = (i % 2 ? four >> 4 : four) & 0x0f0f0f0f;
          for (int r = 0; r < R; ++r) {
            AddProducts<kBits>(sums[r], four, x->codes.data() + (row + r) * x->inputs + block * kBlock + 4 * i);
          }
        }
        Floats scale;
        Load(scales + (p * groups + block / per_scale) * kWidth + lane, scale);
        for (int r = 0; r < R; ++r) {
          y[v * R + r] += __builtin_convertvector(sums[r], Floats) * (scale * x->scales[(row + r) * blocks + block]);
        }
      }
    }
  }

  const uint8_t* codes;
  const float* scales;
  int64_t groups;
  const Rounded* x;
};

// Runs work(begin, end) over parts of [0, num), in at most `threads` threads.
//
// This thread takes parts until none is left, and then waits only for parts that other threads have taken. So it never
// waits for a task that has no thread, although it may be a thread of the pool itself.
template <typename Work>
void RunInThreads(ffi::ThreadPool& pool, int64_t threads, int64_t num, Work work) {
  threads = std::min({threads, num, pool.num_threads()});
  if (threads <= 1) return work(0, num);
  struct Counts {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto counts = std::make_shared<Counts>();
  const int64_t size = DividedUp(num, 4 * threads);
  auto run = [counts, num, size, work] {
    for (int64_t begin; (begin = counts->next.fetch_add(size)) < num;) {
      const int64_t end = std::min(num, begin + size);
      work(begin, end);
      counts->done.fetch_add(end - begin, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (counts->done.load(std::memory_order_acquire) < num) {
#ifdef __x86_64__
    _mm_pause();
#endif
  }
}

template <int R, int P, typename Product>
void StoreTile(const Product& product, int64_t panel, int64_t row, int64_t O, float* y) {
  Floats found[R * P * kVectors];
  product.template Tile<R, P>(panel, row, found);
  for (int v = 0; v < P * kVectors; ++v) {
    const int64_t first = panel * kWidth + v * kLanes;
    for (int r = 0; r < R && first < O; ++r) {
      std::memcpy(y + (row + r) * O + first, &found[v * R + r], std::min(kLanes, O - first) * sizeof(float));
    }
  }
}

// Computes the product in tiles of up to 4 rows, or of several panels for fewer rows: additions to one sum wait for each
// other.
template <typename Product>
void Compute(ffi::ThreadPool& pool, const Product& product, int64_t M, int64_t O, int64_t bytes, float* y) {
  const int64_t panels = DividedUp(O, kWidth);
  RunInThreads(pool, bytes / kTask, DividedUp(panels, kGroup), [=](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t last = std::min(panels, (group + 1) * kGroup);
      for (int64_t row = 0; row < M; row += 4) {
        const int64_t rows = std::min<int64_t>(4, M - row);
        for (int64_t panel = group * kGroup; panel < last;) {
          const bool has_four = panel + 4 <= last, has_two = panel + 2 <= last;
          if (rows == 1 && has_four) {
            StoreTile<1, 4>(product, panel, row, O, y);
            panel += 4;
          } else if (rows == 2 && has_two) {
            StoreTile<2, 2>(product, panel, row, O, y);
            panel += 2;
          } else {
            if (rows == 1) StoreTile<1, 1>(product, panel, row, O, y);
            if (rows == 2) StoreTile<2, 1>(product, panel, row, O, y);
            if (rows == 3) StoreTile<3, 1>(product, panel, row, O, y);
            if (rows == 4) StoreTile<4, 1>(product, panel, row, O, y);
            ++panel;
          }
        }
      }
    }
  });
}

template <int kBits>
ffi::Error RunInteger(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> kernel,
                      ffi::Buffer<ffi::F32> scales, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t M = x.dimensions()[0], I = x.dimensions()[1], O = y->dimensions()[1];
  const Rounded rounded(x.typed_data(), M, I);
  const IntegerProduct<kBits> product{kernel.typed_data(), scales.typed_data(), scales.dimensions()[1], &rounded};
  Compute(pool, product, M, O, kernel.size_bytes(), y->typed_data());
  return ffi::Error::Success();
}

}  // namespace

#define DEFINE_INTEGER_HANDLER(name, bits)                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, RunInteger<bits>,              \
                                ffi::Ffi::Bind()                     \
                                    .Ctx<ffi::ThreadPool>()          \
                                    .Arg<ffi::Buffer<ffi::F32>>()    \
                                    .Arg<ffi::Buffer<ffi::U8>>()     \
                                    .Arg<ffi::Buffer<ffi::F32>>()    \
                                    .Ret<ffi::Buffer<ffi::F32>>())
DEFINE_INTEGER_HANDLER(Int8ProductHandler, 8);
DEFINE_INTEGER_HANDLER(Int4ProductHandler, 4);
