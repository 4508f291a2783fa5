// Sixteen lanes: one AVX-512 register, two of AVX2, four of NEON. They are the compiler's own vectors,
// as wide as a register, for GCC keeps wider ones in memory. Storage types: float, Bf16, and for weights
// Int8.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// A call would pass lanes of several registers through memory.
#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

struct Bf16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};

#if defined(__AVX512F__)
constexpr int kPartBytes = 64;
constexpr int kRegisters = 32;  // that hold sixteen lanes
#elif defined(__AVX__)
constexpr int kPartBytes = 32;
constexpr int kRegisters = 8;
#else
constexpr int kPartBytes = 16;
constexpr int kRegisters = 8;  // NEON's; SSE has half
#endif

constexpr int kLanes = 16;
constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = kLanes / kParts;

template <typename T>
struct Lanes {
  typedef T Part __attribute__((vector_size(kPartLanes * sizeof(T))));
  Part parts[kParts];
};

typedef Lanes<float> F16;
typedef Lanes<uint32_t> U16;
typedef Lanes<int32_t> I16;
typedef Lanes<uint16_t> H16;

// A value of what `part(i)` gives for each part.
template <typename To, typename Do>
BATON_INLINE To of_parts(Do part) {
  To to;
  for (int i = 0; i < kParts; i++) to.parts[i] = part(i);
  return to;
}

template <typename T>
struct Scalar {  // not deduced, so that any number will do
  typedef T type;
};

#define BATON_OPERATOR(op)                                                            \
  template <typename T>                                                               \
  BATON_INLINE Lanes<T> operator op(Lanes<T> a, Lanes<T> b) {                         \
    return of_parts<Lanes<T>>([&](int i) { return a.parts[i] op b.parts[i]; });       \
  }                                                                                   \
  template <typename T>                                                               \
  BATON_INLINE Lanes<T> operator op(Lanes<T> a, typename Scalar<T>::type b) {         \
    return of_parts<Lanes<T>>([&](int i) { return a.parts[i] op b; });                \
  }                                                                                   \
  template <typename T>                                                               \
  BATON_INLINE Lanes<T> operator op(typename Scalar<T>::type a, Lanes<T> b) {         \
    return of_parts<Lanes<T>>([&](int i) { return a op b.parts[i]; });                \
  }                                                                                   \
  template <typename T, typename B>                                                   \
  BATON_INLINE Lanes<T>& operator op##=(Lanes<T>& a, B b) {                           \
    return a = a op b;                                                                \
  }
BATON_OPERATOR(+)
BATON_OPERATOR(-)
BATON_OPERATOR(*)
BATON_OPERATOR(/)
BATON_OPERATOR(&)
BATON_OPERATOR(|)
BATON_OPERATOR(<<)
BATON_OPERATOR(>>)
#undef BATON_OPERATOR

// A change of type, not of size. Lanes go part by part, else GCC takes them through memory.
template <typename To, typename From>
BATON_INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename To, typename T>
BATON_INLINE To as(Lanes<T> from) {
  return of_parts<To>([&](int i) { return as<typename To::Part>(from.parts[i]); });
}

template <typename V>
BATON_INLINE V load_raw(const void* from) {
  return of_parts<V>([&](int i) {
    typename V::Part value;
    std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(value), sizeof(value));
    return value;
  });
}

template <>
BATON_INLINE uint32_t load_raw(const void* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
BATON_INLINE void store_raw(void* to, Lanes<T> value) {
  for (int i = 0; i < kParts; i++) {
    std::memcpy(static_cast<char*>(to) + i * sizeof(value.parts[i]), &value.parts[i],
                sizeof(value.parts[i]));
  }
}

template <typename T>
BATON_INLINE I16 operator<(Lanes<T> a, Lanes<T> b) {
  return of_parts<I16>([&](int i) { return a.parts[i] < b.parts[i]; });
}

// a where the mask is set, else b.
BATON_INLINE F16 select(I16 mask, F16 a, F16 b) {
  return of_parts<F16>([&](int i) { return mask.parts[i] ? a.parts[i] : b.parts[i]; });
}

BATON_INLINE U16 splat_raw(uint32_t x) { return U16{} + x; }

// By integers: adding a float to zero would stay an addition.
BATON_INLINE F16 splat(float x) { return as<F16>(splat_raw(as<uint32_t>(x))); }

BATON_INLINE U16 widened(H16 from) {
#if defined(__AVX512F__)  // GCC makes two halves of it
  return {as<U16::Part>(_mm512_cvtepu16_epi32(as<__m256i>(from.parts[0])))};
#elif defined(__AVX2__)
  return of_parts<U16>(
      [&](int i) { return as<U16::Part>(_mm256_cvtepu16_epi32(as<__m128i>(from.parts[i]))); });
#else
  return of_parts<U16>([&](int i) { return __builtin_convertvector(from.parts[i], U16::Part); });
#endif
}

BATON_INLINE F16 load(const float* from) { return load_raw<F16>(from); }
BATON_INLINE F16 load(const Bf16* from) { return as<F16>(widened(load_raw<H16>(from)) << 16); }

// Round to nearest, ties to even; the engine's values are finite.
BATON_INLINE H16 to_bf16(F16 x) {
#if defined(__AVX512BF16__)
  return {as<H16::Part>(_mm512_cvtneps_pbh(x.parts[0]))};
#else
  const U16 bits = as<U16>(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return of_parts<H16>([&](int i) { return __builtin_convertvector(rounded.parts[i], H16::Part); });
#endif
}

// What a T keeps of it.
template <typename T>
BATON_INLINE F16 rounded(F16 x) {
  if constexpr (sizeof(T) == 4) return x;
  return as<F16>(widened(to_bf16(x)) << 16);
}

BATON_INLINE void store(float* to, F16 x) { store_raw(to, x); }
BATON_INLINE void store(Bf16* to, F16 x) { store_raw(to, to_bf16(x)); }

BATON_INLINE F16 max(F16 a, F16 b) {
#if defined(__AVX512F__)  // GCC makes a comparison and a choice of it
  return {_mm512_max_ps(a.parts[0], b.parts[0])};
#elif defined(__AVX2__)
  return of_parts<F16>([&](int i) { return _mm256_max_ps(a.parts[i], b.parts[i]); });
#else
  return select(b < a, a, b);
#endif
}

// All lanes as one number, by an operation of two.
template <typename Two>
BATON_INLINE float reduce(F16 x, Two two) {
  F16::Part all = x.parts[0];
  for (int i = 1; i < kParts; i++) all = two(all, x.parts[i]);
  float result = all[0];
  for (int i = 1; i < kPartLanes; i++) result = two(result, all[i]);
  return result;
}

BATON_INLINE float sum(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x.parts[0]);
#else
  return reduce(x, [](auto a, auto b) { return a + b; });
#endif
}

BATON_INLINE float max_lane(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x.parts[0]);
#else
  return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
#endif
}

// Whether any lane is above a number.
BATON_INLINE bool any_above(F16 x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.parts[0], splat(least).parts[0], _CMP_GT_OQ) != 0;
#else
  return max_lane(x) > least;
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

// 2 to the x for x from -126 to 127; for a lower x, 2 to the -126. By a polynomial of least relative
// error from -0.5 to 0.5: 2e-8 for floats, less than their rounding; 8e-5 for what becomes a Bf16,
// which has 4e-3.
template <typename T>
BATON_INLINE F16 exp2(F16 x) {
  const F16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 clamped = max(x, splat(-126.0f)), whole = clamped + magic;
  const F16 rest = clamped - (whole - magic);
  F16 y;
  if constexpr (sizeof(T) == 2) {
    y = rest * 0.05517166853f + 0.2426111251f;
    y = y * rest + 0.6932609677f;
    y = y * rest + 0.9999280572f;
  } else {
    y = rest * 1.534581243e-4f + 1.339993090e-3f;
    y = y * rest + 9.618489072e-3f;
    y = y * rest + 5.550328642e-2f;
    y = y * rest + 0.2402264625f;
    y = y * rest + 0.6931471825f;
    y = y * rest + 1.0f;
  }
  return as<F16>(as<U16>(y) + (as<U16>(whole) << 23));  // its lowest bits are the integer's
}

// 1 / x: by an estimate within 6e-5 of it where that becomes a Bf16.
template <typename T>
BATON_INLINE F16 reciprocal(F16 x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) return {_mm512_rcp14_ps(x.parts[0])};
#endif
  return 1.0f / x;
}

BATON_INLINE F16 to_float(I16 from) {
  return of_parts<F16>([&](int i) { return __builtin_convertvector(from.parts[i], F16::Part); });
}

// Products are taken on words: one float, or two neighbouring Bf16 or Int8.
template <typename T>
constexpr int kPerWord = sizeof(T) == 4 ? 1 : 2;

// The i-th value of each word. Words of Int8 have 16 bits, which are a lane's lowest.
template <typename T>
BATON_INLINE F16 part(U16 words, int i) {
  if (sizeof(T) == 1) return to_float(as<I16>(words << (i == 0 ? 24 : 16)) >> 24);
  if (sizeof(T) == 4) return as<F16>(words);
  return as<F16>(i == 0 ? words << 16 : words & 0xffff0000u);
}

// sum += a * b per lane, over the values of each word.
template <typename T>
BATON_INLINE F16 dot(F16 sum, U16 a, U16 b) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    return {_mm512_dpbf16_ps(sum.parts[0], as<__m512bh>(a.parts[0]), as<__m512bh>(b.parts[0]))};
  }
#endif
  for (int i = 0; i < kPerWord<T>; i++) sum = part<T>(a, i) * part<T>(b, i) + sum;
  return sum;
}

// Sixteen words of weights T as `part` takes them.
template <typename T>
BATON_INLINE U16 load_words(const char* from) {
  if constexpr (sizeof(T) == 1) return widened(load_raw<H16>(from));
  return load_raw<U16>(from);
}

#if defined(__AVX512VBMI__)
// Bf16's upper and lower byte of 0 to 127, and, in place of 0, of 128.
struct Bf16OfBytes {
  alignas(64) uint8_t upper[128], lower[128];
};
constexpr Bf16OfBytes kBf16OfBytes = [] {
  Bf16OfBytes table{};
  for (int i = 0; i < 128; i++) {
    int value = i == 0 ? 128 : i, exponent = 127;
    while (value >> (exponent - 126)) exponent++;
    const int bits = exponent << 7 | ((value << (134 - exponent)) & 127);
    table.upper[i] = bits >> 8;
    table.lower[i] = bits & 255;
  }
  return table;
}();
#endif

// Thirty-two words of weights T as words of Bf16, which hold every Int8.
template <typename T>
BATON_INLINE void load_bf16_words(const char* from, U16* to) {
#if defined(__AVX512VBMI__)
  if constexpr (sizeof(T) == 1) {  // by looking magnitudes up; 0 and -128 share one
    auto table = [](const uint8_t* at) { return _mm512_load_si512(at); };
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undone by the interleaving
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
    const __m512i size = _mm512_abs_epi8(x);
    const uint8_t *up = kBf16OfBytes.upper, *low = kBf16OfBytes.lower;
    const __m512i bare = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(x, x), table(up), size,
                                                        table(up + 64));
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i upper = _mm512_ternarylogic_epi64(bare, x, sign, 0xf8);  // bare | (x & sign)
    const __m512i lower = _mm512_permutex2var_epi8(table(low), size, table(low + 64));
    to[0] = {as<U16::Part>(_mm512_unpacklo_epi8(lower, upper))};
    to[1] = {as<U16::Part>(_mm512_unpackhi_epi8(lower, upper))};
    return;
  }
#endif
  for (int i = 0; i < 2; i++) {
    if constexpr (sizeof(T) == 2) {
      to[i] = load_raw<U16>(from + i * 64);
    } else {
      const U16 words = load_words<T>(from + i * 32);
      to[i] = (as<U16>(part<T>(words, 0)) >> 16) | (as<U16>(part<T>(words, 1)) & 0xffff0000u);
    }
  }
}

// For each lane of the result the number of one of a's, or, from kPartLanes on, of b's.
template <uint32_t... kFrom>
inline U16::Part shuffle(U16::Part a, U16::Part b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, U16::Part{kFrom...});
#endif
}

constexpr auto kLaneNumbers = std::make_integer_sequence<uint32_t, kPartLanes>();

// In the lanes with bit kStep set, rows without that bit take what the rows kStep on have in the
// lanes without it, and the other way round.
template <uint32_t kStep, uint32_t... kLane>
inline void exchange(U16* rows, std::integer_sequence<uint32_t, kLane...>) {
#pragma GCC unroll 16
  for (uint32_t i = 0; i < 16; i++) {
    if (i & kStep) continue;
    U16 &a = rows[i], &b = rows[i + kStep];
    for (int p = 0; p < kParts; p++) {
      const U16::Part from = a.parts[p], with = b.parts[p];
      if constexpr (kStep < kPartLanes) {
        a.parts[p] = shuffle<(kLane & kStep ? kLane - kStep + kPartLanes : kLane)...>(from, with);
        b.parts[p] = shuffle<(kLane & kStep ? kLane + kPartLanes : kLane + kStep)...>(from, with);
      } else if (p * kPartLanes & kStep) {
        std::swap(a.parts[p], b.parts[p - kStep / kPartLanes]);
      }
    }
  }
}

// Transpose 16 x 16 words in place.
inline void transpose(U16* rows) {
  exchange<1>(rows, kLaneNumbers);
  exchange<2>(rows, kLaneNumbers);
  exchange<4>(rows, kLaneNumbers);
  exchange<8>(rows, kLaneNumbers);
}

// Lane i of the result is the sum of row i's lanes: a transposition whose rows are added on the way.
inline F16 lane_sums(const F16* from) {
  U16 rows[kLanes];
  for (int i = 0; i < kLanes; i++) rows[i] = as<U16>(from[i]);
  auto add = [&](int step) {
    for (int i = 0; i < kLanes; i += 2 * step) {
      rows[i] = as<U16>(as<F16>(rows[i]) + as<F16>(rows[i + step]));
    }
  };
  exchange<1>(rows, kLaneNumbers), add(1);
  exchange<2>(rows, kLaneNumbers), add(2);
  exchange<4>(rows, kLaneNumbers), add(4);
  exchange<8>(rows, kLaneNumbers), add(8);
  return as<F16>(rows[0]);
}

template <uint32_t... kLane>
BATON_INLINE void interleave(F16& even, F16& odd, std::integer_sequence<uint32_t, kLane...>) {
  const U16 a = as<U16>(even), b = as<U16>(odd);
  U16 lower, upper;
  for (int p = 0; p < 2 * kParts; p++) {
    const U16::Part x = a.parts[p / 2], y = b.parts[p / 2];
    (p < kParts ? lower : upper).parts[p % kParts] =
        p % 2 == 0 ? shuffle<(kLane / 2 + kLane % 2 * kPartLanes)...>(x, y)
                   : shuffle<(kLane / 2 + kPartLanes / 2 + kLane % 2 * kPartLanes)...>(x, y);
  }
  even = as<F16>(lower);
  odd = as<F16>(upper);
}

// From even and odd lanes to the lower and the upper half of all.
BATON_INLINE void interleave(F16& even, F16& odd) { interleave(even, odd, kLaneNumbers); }

}  // namespace baton
