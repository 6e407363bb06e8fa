// Vectors of float32, as wide as those of the instruction set compiled for.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace jaxkv {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int64_t kLineBytes = 64;  // of a cache

using Floats [[gnu::vector_size(kLanes * 4)]] = float;
using Ints [[gnu::vector_size(kLanes * 4)]] = int32_t;
using Words [[gnu::vector_size(kLanes * 4)]] = uint32_t;
using Halves [[gnu::vector_size(kLanes * 2)]] = uint16_t;

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// Into the second level: what a tile needs next would crowd out the first.
inline void Prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

template <class T>
inline T Load(const void* from) {
  T vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats LoadFloats(const float* from) { return Load<Floats>(from); }

inline Floats LoadFloats(const BFloat16* from) {
  Words words = __builtin_convertvector(Load<Halves>(from), Words) << 16;
  return std::bit_cast<Floats>(words);
}

// The first `count` of a vector; the others are zeros.
template <class T>
inline Floats LoadFloats(const T* from, int count) {
  if (count == kLanes) return LoadFloats(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return LoadFloats(padded);
}

inline void StoreFloats(float* to, Floats vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// Rounds to the nearest, and between two to the even one; NaN stays NaN.
inline void StoreFloats(BFloat16* to, Floats vector) {
  Words words = std::bit_cast<Words>(vector);
  Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  Words result = vector == vector ? rounded : (words >> 16) | 0x40;
  Halves halves = __builtin_convertvector(result, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// Stores the first `count`.
template <class T>
inline void StoreFloats(T* to, Floats vector, int count) {
  if (count == kLanes) return StoreFloats(to, vector);
  T padded[kLanes];
  StoreFloats(padded, vector);
  std::memcpy(to, padded, count * sizeof(T));
}

inline Floats Broadcast(float value) { return value - Floats{}; }

inline float ToFloat(float value) { return value; }

inline float ToFloat(BFloat16 value) {
  uint32_t word = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

inline Floats Select(Ints condition, Floats yes, Floats no) {
  return condition ? yes : no;
}

inline Floats Max(Floats a, Floats b) { return Select(a > b, a, b); }

// Sums of vectors' lanes. Lanes are added in the same order however many vectors are
// reduced together, so that a sum does not depend on what is computed beside it.
namespace reduction {

using Lanes = std::make_integer_sequence<int, kLanes>;

// Adds lanes that are kDistance apart, of `a` where that bit of the lane is not set and
// of `b` where it is.
template <int kDistance, int... kLane>
inline Floats Fold(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  Floats near = __builtin_shufflevector(
      a, b, (kLane & kDistance ? kLane + kLanes : kLane)...);
  Floats far = __builtin_shufflevector(
      a, b, ((kLane ^ kDistance) + (kLane & kDistance ? kLanes : 0))...);
  return near + far;
}

template <int kCount, int kDistance>
inline Floats FoldAll(Floats* vectors) {
  if constexpr (kDistance == 0) {
    return vectors[0];
  } else if constexpr (kCount == 1) {
    vectors[0] = Fold<kDistance>(vectors[0], vectors[0], Lanes{});
    return FoldAll<1, kDistance / 2>(vectors);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kCount / 2; ++i)
      vectors[i] = Fold<kDistance>(vectors[i], vectors[i + kCount / 2], Lanes{});
    return FoldAll<kCount / 2, kDistance / 2>(vectors);
  }
}

template <int kStride, int... kLane>
inline Floats Compact(Floats a, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, a, (kLane * kStride % kLanes)...);
}

}  // namespace reduction

// Writes the sum of the lanes of each vector, which it uses up. `sums` has room for
// kLanes more.
template <int kCount>
inline void SumLanes(Floats* vectors, float* sums) {
  constexpr int kTogether = [] {
    int count = 1;
    while (2 * count <= kCount && 2 * count <= kLanes) count *= 2;
    return count;
  }();
  Floats result = reduction::FoldAll<kTogether, kLanes / 2>(vectors);
  StoreFloats(sums, reduction::Compact<kLanes / kTogether>(result, reduction::Lanes{}));
  if constexpr (kCount > kTogether)
    SumLanes<kCount - kTogether>(vectors + kTogether, sums + kTogether);
}

inline float MaxLane(Floats vector) {
  using reduction::Lanes;
  auto fold = [&]<int kDistance, int... kLane>(
                  std::integral_constant<int, kDistance>,
                  std::integer_sequence<int, kLane...>) {
    vector = Max(vector, __builtin_shufflevector(vector, vector, (kLane ^ kDistance)...));
  };
  if constexpr (kLanes >= 16) fold(std::integral_constant<int, 8>{}, Lanes{});
  if constexpr (kLanes >= 8) fold(std::integral_constant<int, 4>{}, Lanes{});
  fold(std::integral_constant<int, 2>{}, Lanes{});
  fold(std::integral_constant<int, 1>{}, Lanes{});
  return vector[0];
}

// Transposes kLanes vectors, by log2(kLanes) perfect shuffles.
namespace transposition {

template <int kFirst, int... kLane>
inline Floats Interleave(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * kLanes)...);
}

// Of each four lanes of `a` and `b` two, from kFirst on, kWidth of them by turns.
template <int kWidth, int kFirst, int... kLane>
inline Floats InQuarters(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(
      a, b,
      (kLane / 4 * 4 + kFirst +
       (kWidth == 1 ? kLane % 4 / 2 + kLane % 2 * kLanes
                    : kLane % 2 + kLane % 4 / 2 * kLanes))...);
}

}  // namespace transposition

inline void Transpose(Floats (&rows)[kLanes]) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int distance = 1; distance < kLanes; distance *= 2) {
    Floats next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      Floats a = rows[i], b = rows[i + kLanes / 2];
      next[2 * i] = transposition::Interleave<0>(a, b, kAll);
      next[2 * i + 1] = transposition::Interleave<kLanes / 2>(a, b, kAll);
    }
    std::memcpy(&rows, &next, sizeof next);
  }
}

// Loads kLanes elements, from `first` on, of each of kLanes lines, and transposes them.
template <class T>
inline void LoadTransposed(const T* const (&lines)[kLanes], int64_t first,
                           Floats (&columns)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) columns[i] = LoadFloats(lines[i] + first);
  Transpose(columns);
}

#if defined(__AVX512F__)
// By loads of quarters, which leave half of the shuffles to do, none across quarters.
template <>
inline void LoadTransposed(const float* const (&lines)[kLanes], int64_t first,
                           Floats (&columns)[kLanes]) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int64_t quarter = 0; quarter < kLanes; quarter += 4) {
    Floats rows[4];  // of lines i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      auto load = [&](int line) { return _mm_loadu_ps(lines[line] + first + quarter); };
      __m512 row = _mm512_castps128_ps512(load(i));
      row = _mm512_insertf32x4(row, load(i + 4), 1);
      row = _mm512_insertf32x4(row, load(i + 8), 2);
      rows[i] = (Floats)_mm512_insertf32x4(row, load(i + 12), 3);
    }
    Floats pairs[4];
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      pairs[i] = transposition::InQuarters<1, 0>(rows[i], rows[i + 1], kAll);
      pairs[i + 1] = transposition::InQuarters<1, 2>(rows[i], rows[i + 1], kAll);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Floats* result = columns + quarter + 2 * i;
      result[0] = transposition::InQuarters<2, 0>(pairs[i], pairs[i + 2], kAll);
      result[1] = transposition::InQuarters<2, 2>(pairs[i], pairs[i + 2], kAll);
    }
  }
}
#endif

// exp, within 2 units in the last place; 0 below -87.3, of NaN it is NaN. Reduction by
// ln 2 in two parts and a polynomial of degree 6 (Cody & Waite, 1980).
inline Floats Exp(Floats x) {
  Floats clamped = Select(x > 88.0f, Broadcast(88.0f), x);
  Floats shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds
  Floats n = shifted - 12582912.0f;
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = r * 1.3981999507e-3f + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints power = (std::bit_cast<Ints>(shifted) + 127) << 23;
  Floats result = p * std::bit_cast<Floats>(power);
  return Select(x < -87.3f, Broadcast(0.0f), result);
}

}  // namespace jaxkv
