// Sixteen lanes, in the compiler's own vector types: they become AVX-512 registers where there are
// such, pairs of AVX2 or quadruples of NEON registers elsewhere. Storage types: float, and Bf16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace baton {

struct Bf16 {
  uint16_t bits;
};

typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

template <typename To, typename From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
inline V load_raw(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename V>
inline void store_raw(void* to, V value) {
  std::memcpy(to, &value, sizeof(value));
}

inline F16 splat(float x) { return F16{} + x; }

inline F16 load(const float* from) { return load_raw<F16>(from); }
inline F16 load(const Bf16* from) {
#if defined(__AVX512F__)  // GCC makes two halves of it
  return as<F16>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(from)), 16));
#endif
  return as<F16>(__builtin_convertvector(load_raw<H16>(from), U16) << 16);
}

// Round to nearest, ties to even; the engine's values are finite.
inline H16 to_bf16(F16 x) {
#if defined(__AVX512BF16__)
  return as<H16>(_mm512_cvtneps_pbh(as<__m512>(x)));
#else
  U16 bits = as<U16>(x);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_convertvector(bits >> 16, H16);
#endif
}

inline void store(float* to, F16 x) { store_raw(to, x); }
inline void store(Bf16* to, F16 x) { store_raw(to, to_bf16(x)); }

inline float sum(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(as<__m512>(x));
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
#endif
}

inline F16 max(F16 a, F16 b) { return a > b ? a : b; }

inline float max_lane(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(as<__m512>(x));
#else
  float most = x[0];
  for (int i = 1; i < kLanes; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// e to the x for x <= 88, within two units in the last place; 0 below -87.
inline F16 exp(F16 x) {
  const F16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F16 clamped = max(x, splat(-87.0f));
  F16 whole = (clamped * 1.44269504088896341f + magic) - magic;
  F16 rest = clamped - whole * 0.693359375f;
  rest = rest - whole * -2.12194440e-4f;
  F16 y = splat(1.9875691500e-4f);
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  I16 power = (__builtin_convertvector(whole, I16) + 127) << 23;
  F16 result = y * as<F16>(power);
  return x < -87.0f ? F16{} : result;
}

// Products are taken on 32-bit words: one float, or two neighbouring Bf16.
template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

// sum += a * b per lane, over the values of each word.
template <typename T>
inline F16 dot(F16 sum, U16 a, U16 b) {
  if constexpr (sizeof(T) == 4) {
    return as<F16>(a) * as<F16>(b) + sum;
  } else {
#if defined(__AVX512BF16__)
    return as<F16>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(a), as<__m512bh>(b)));
#else
    sum = as<F16>(a << 16) * as<F16>(b << 16) + sum;
    return as<F16>(a & 0xffff0000u) * as<F16>(b & 0xffff0000u) + sum;
#endif
  }
}

// The i-th value of each word.
template <typename T>
inline F16 part(U16 words, int i) {
  if (sizeof(T) == 4) return as<F16>(words);
  return as<F16>(i == 0 ? words << 16 : words & 0xffff0000u);
}

// For each lane of the result the number of one of a's, or, from 16 on, of b's.
template <uint32_t... kFrom>
inline U16 shuffle(U16 a, U16 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, U16{kFrom...});
#endif
}

// In the lanes with bit kStep set, rows without that bit take what the rows kStep on have in the
// lanes without it, and the other way round.
template <uint32_t kStep, uint32_t... kLane>
inline void exchange(U16* rows, std::integer_sequence<uint32_t, kLane...>) {
#pragma GCC unroll 16
  for (uint32_t i = 0; i < 16; i++) {
    if (i & kStep) continue;
    U16 a = rows[i], b = rows[i + kStep];
    rows[i] = shuffle<(kLane & kStep ? kLane - kStep + 16 : kLane)...>(a, b);
    rows[i + kStep] = shuffle<(kLane & kStep ? kLane + 16 : kLane + kStep)...>(a, b);
  }
}

// Transpose 16 x 16 words in place.
inline void transpose(U16* rows) {
  constexpr auto lanes = std::make_integer_sequence<uint32_t, kLanes>();
  exchange<1>(rows, lanes);
  exchange<2>(rows, lanes);
  exchange<4>(rows, lanes);
  exchange<8>(rows, lanes);
}

// Lane i of the result is the sum of row i's lanes: a transposition whose rows are added on the way.
inline F16 lane_sums(const F16* from) {
  constexpr auto lanes = std::make_integer_sequence<uint32_t, kLanes>();
  U16 rows[kLanes];
  for (int i = 0; i < kLanes; i++) rows[i] = as<U16>(from[i]);
  auto add = [&](int step) {
    for (int i = 0; i < kLanes; i += 2 * step) {
      rows[i] = as<U16>(as<F16>(rows[i]) + as<F16>(rows[i + step]));
    }
  };
  exchange<1>(rows, lanes), add(1);
  exchange<2>(rows, lanes), add(2);
  exchange<4>(rows, lanes), add(4);
  exchange<8>(rows, lanes), add(8);
  return as<F16>(rows[0]);
}

// From even and odd lanes to the lower and the upper half of all.
inline void interleave(F16& even, F16& odd) {
  const U16 a = as<U16>(even), b = as<U16>(odd);
  even = as<F16>(shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b));
  odd = as<F16>(shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b));
}

}  // namespace baton
