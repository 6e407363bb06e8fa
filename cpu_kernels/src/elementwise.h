// What is done to each vector, or each element, by itself.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "vectors.h"

namespace jaxkv {

constexpr int64_t kNormsTogether = 16;      // vectors that a thread takes at once
constexpr int64_t kElementsTogether = 8192;  // and elements

// Root-mean-square normalisation (Zhang & Sennrich, 2019): in float32, rounds to T, then multiplies and rounds again.
template <class T>
void NormalizeVector(const T* x, const T* weight, int64_t dim, float eps, T* y) {
  Floats squares = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats part = LoadFloats(x + i, std::min<int64_t>(kLanes, dim - i));
    squares += part * part;
  }
  float sum[kLanes];
  SumLanes<1>(&squares, sum);
  const float factor = 1.0f / std::sqrt(sum[0] / dim + eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int count = std::min<int64_t>(kLanes, dim - i);
    T rounded[kLanes];
    StoreFloats(rounded, LoadFloats(x + i, count) * factor);
    StoreFloats(y + i, LoadFloats(rounded) * LoadFloats(weight + i, count), count);
  }
}

template <class T>
void NormalizeAll(const Norms& n, const ParallelFor& parallel_for) {
  const T* x = static_cast<const T*>(n.x);
  T* y = static_cast<T*>(n.y);
  parallel_for((n.count + kNormsTogether - 1) / kNormsTogether, [&](int64_t i) {
    const int64_t end = std::min((i + 1) * kNormsTogether, n.count);
    for (int64_t j = i * kNormsTogether; j < end; ++j) {
      NormalizeVector(x + j * n.dim, static_cast<const T*>(n.weight), n.dim, n.eps,
                      y + j * n.dim);
    }
  });
}

inline void Normalize(const Norms& n, const ParallelFor& parallel_for) {
  if (n.type == Type::kFloat32)
    NormalizeAll<float>(n, parallel_for);
  else
    NormalizeAll<BFloat16>(n, parallel_for);
}

// silu(gate) * up (Shazeer, 2020) in float32.
template <class T>
void GateAll(const Gates& g, const ParallelFor& parallel_for) {
  const T* gate = static_cast<const T*>(g.gate);
  const T* up = static_cast<const T*>(g.up);
  T* y = static_cast<T*>(g.y);
  parallel_for((g.count + kElementsTogether - 1) / kElementsTogether, [&](int64_t i) {
    const int64_t end = std::min((i + 1) * kElementsTogether, g.count);
    for (int64_t j = i * kElementsTogether; j < end; j += kLanes) {
      const int count = std::min<int64_t>(kLanes, end - j);
      const Floats x = LoadFloats(gate + j, count);
      // Exp ends at 88; what is divided by it would grow again.
      const Floats silu = Select(x < -88.0f, Floats{}, x / (Exp(-x) + 1.0f));
      StoreFloats(y + j, silu * LoadFloats(up + j, count), count);
    }
  });
}

inline void Gate(const Gates& g, const ParallelFor& parallel_for) {
  if (g.type == Type::kFloat32)
    GateAll<float>(g, parallel_for);
  else
    GateAll<BFloat16>(g, parallel_for);
}

}  // namespace jaxkv
