// Products of a few tokens with weights kept as [out_dim, in_dim].
//
// Both operands are contiguous along the axis summed over, so vectors need neither packed
// (tiles.h: tokens are), and a weight is read in order and, for up to kBlockTokens tokens,
// once. Every output is the sum of the same partial sums, each taken in order: it depends
// on its own token and weight only, to the last bit.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace jaxkv {

constexpr int kTileTokens = kLanes == 16 ? 4 : 3;
constexpr int kTileOut = kLanes == 16 ? 6 : 4;
constexpr int64_t kBlockTokens = 32;
constexpr int64_t kBlockBytes = 256 * 1024;  // of x, so that it stays in a core's cache
constexpr int64_t kChunkBytes = 96 * 1024;   // of weights, what a thread takes at once

// How elements of two types are multiplied, kLanes or twice as many at a time.
template <class X, class W>
struct Multiplier {
  static constexpr int kStep = kLanes;
  using Left = Floats;
  using Right = Floats;
  static Left LoadLeft(const X* x) { return LoadFloats(x); }
  static Left LoadLeft(const X* x, int count) { return LoadFloats(x, count); }
  static Right LoadRight(const W* w) { return LoadFloats(w); }
  static Right LoadRight(const W* w, int count) { return LoadFloats(w, count); }
  static Floats Add(Floats sum, Left x, Right w) { return sum + x * w; }
};

#if defined(__AVX512BF16__)
template <>
struct Multiplier<BFloat16, BFloat16> {
  static constexpr int kStep = 2 * kLanes;
  using Left = __m512bh;
  using Right = __m512bh;
  static Left LoadLeft(const BFloat16* x) { return Load<__m512bh>(x); }
  static Left LoadLeft(const BFloat16* x, int count) {
    BFloat16 padded[kStep] = {};
    std::memcpy(padded, x, count * sizeof(BFloat16));
    return Load<__m512bh>(padded);
  }
  static Right LoadRight(const BFloat16* w) { return LoadLeft(w); }
  static Right LoadRight(const BFloat16* w, int count) { return LoadLeft(w, count); }
  static Floats Add(Floats sum, Left x, Right w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, x, w);
  }
};
using BFloat16Left = BFloat16;
#else
// Without an instruction for it, the tokens are widened beforehand.
using BFloat16Left = float;
#endif

// kM tokens by kN outputs. Fetches kAhead lines from `ahead` on in each step.
template <int kM, int kN, int kAhead, class X, class W, class Y>
inline void MultiplyTile(const X* x, const W* w, int64_t in_dim, Y* y, int64_t y_stride,
                         const char* ahead) {
  using M = Multiplier<X, W>;
  Floats sums[kM * kN] = {};
  int64_t i = 0;
  for (; i + M::kStep <= in_dim; i += M::kStep) {
#pragma GCC unroll 8
    for (int line = 0; line < kAhead; ++line) Prefetch(ahead + line * kLineBytes);
    ahead += kAhead * kLineBytes;
    typename M::Right right[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) right[n] = M::LoadRight(w + n * in_dim + i);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      typename M::Left left = M::LoadLeft(x + m * in_dim + i);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n)
        sums[m * kN + n] = M::Add(sums[m * kN + n], left, right[n]);
    }
  }
  if (int rest = in_dim - i; rest > 0) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) {
        auto left = M::LoadLeft(x + m * in_dim + i, rest);
        auto right = M::LoadRight(w + n * in_dim + i, rest);
        sums[m * kN + n] = M::Add(sums[m * kN + n], left, right);
      }
    }
  }
  float results[kM * kN + 2 * kLanes];
  SumLanes<kM * kN>(sums, results);
  Y rounded[kM * kN + kLanes];
  for (int j = 0; j < kM * kN; j += kLanes)
    StoreFloats(rounded + j, LoadFloats(results + j));
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m)
    std::memcpy(y + m * y_stride, rounded + m * kN, kN * sizeof(Y));
}

// At most kM tokens by at most kTileOut outputs.
template <int kM, int kAhead, class X, class W, class Y>
void MultiplySome(int64_t tokens, int64_t outs, const X* x, const W* w, int64_t in_dim,
                  Y* y, int64_t y_stride, const char* ahead) {
  if constexpr (kM > 0) {
    if (tokens < kM) {
      return MultiplySome<kM - 1, kAhead>(tokens, outs, x, w, in_dim, y, y_stride,
                                          ahead);
    }
    if (outs == kTileOut)
      return MultiplyTile<kM, kTileOut, kAhead>(x, w, in_dim, y, y_stride, ahead);
    for (int64_t n = 0; n < outs; ++n)
      MultiplyTile<kM, 1, 0>(x, w + n * in_dim, in_dim, y + n, y_stride, ahead);
  }
}

// Some tokens by some outputs, kTileOut outputs after another. While it multiplies with
// the weights of one such group, it fetches those of the next.
template <int kAhead, class X, class W, class Y>
void MultiplyBlock(int64_t tokens, int64_t outs, const X* x, const W* w, int64_t in_dim,
                   Y* y, int64_t y_stride) {
  const int64_t group_bytes = kTileOut * in_dim * sizeof(W);
  const int64_t tile_bytes =
      in_dim / Multiplier<X, W>::kStep * kAhead * kLineBytes;  // fetched in a tile
  for (int64_t n = 0; n < outs; n += kTileOut) {
    const W* group = w + n * in_dim;
    const int64_t num_outs = std::min<int64_t>(kTileOut, outs - n);
    int64_t fetched = 0;
    for (int64_t m = 0; m < tokens; m += kTileTokens, fetched += tile_bytes) {
      const int64_t num_tokens = std::min<int64_t>(kTileTokens, tokens - m);
      const X* tile = x + m * in_dim;
      Y* result = y + m * y_stride + n;
      if (fetched < group_bytes) {
        const char* ahead = reinterpret_cast<const char*>(group) + group_bytes + fetched;
        MultiplySome<kTileTokens, kAhead>(num_tokens, num_outs, tile, group, in_dim,
                                          result, y_stride, ahead);
      } else {
        MultiplySome<kTileTokens, 0>(num_tokens, num_outs, tile, group, in_dim, result,
                                     y_stride, nullptr);
      }
    }
  }
}

// How many vectors of in_dim elements fit into so many bytes, by whole tiles.
inline int64_t Fit(int64_t bytes, int64_t in_dim, int64_t size, int64_t tile) {
  return std::max<int64_t>(bytes / std::max(in_dim * size, size) / tile, 1) * tile;
}

// Cuts the weights into chunks of outputs, and runs task(w, outs, y, y_stride) of each.
template <class W, class Y, class Task>
void ForEachChunk(const Products& p, int64_t chunk, const ParallelFor& parallel_for,
                  const Task& task) {
  int64_t total = 0;
  for (int64_t i = 0; i < p.num_weights; ++i)
    total += (p.weights[i].out_dim + chunk - 1) / chunk;
  parallel_for(total, [&](int64_t index) {
    const Weight* weight = p.weights;
    for (int64_t chunks; index >= (chunks = (weight->out_dim + chunk - 1) / chunk);
         ++weight)
      index -= chunks;
    const int64_t begin = index * chunk;
    task(static_cast<const W*>(weight->w) + begin * p.in_dim,
         std::min(chunk, weight->out_dim - begin), static_cast<Y*>(weight->y) + begin,
         weight->out_dim);
  });
}

template <class X, class W, class Y>
void MultiplyAll(const X* x, const Products& p, const ParallelFor& parallel_for) {
  const int64_t block =
      std::min(Fit(kBlockBytes, p.in_dim, sizeof(X), kTileTokens), kBlockTokens);
  const int64_t chunk = Fit(kChunkBytes, p.in_dim, sizeof(W), kTileOut);
  constexpr int kAll = kTileOut * Multiplier<X, W>::kStep * sizeof(W) / kLineBytes;
  auto task = [&](const W* w, int64_t outs, Y* y, int64_t y_stride) {
    for (int64_t m = 0; m < p.tokens; m += block) {
      const int64_t tokens = std::min(block, p.tokens - m);
      const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
      auto multiply = tiles == 1   ? MultiplyBlock<kAll, X, W, Y>
                      : tiles == 2 ? MultiplyBlock<(kAll + 1) / 2, X, W, Y>
                                   : MultiplyBlock<(kAll + 2) / 3, X, W, Y>;
      multiply(tokens, outs, x + m * p.in_dim, w, p.in_dim, y + m * y_stride, y_stride);
    }
  };
  ForEachChunk<W, Y>(p, chunk, parallel_for, task);
}

#if defined(JAXKV_HAS_TILES)
// Whether the CPU's tiles can be used, and all of these products consist of whole ones.
// Never does it depend on the tokens, since other sums would be rounded otherwise.
inline bool FitTiles(const Products& p) {
  return p.in_dim > 0 && p.in_dim % kTileDepth == 0 &&
         std::all_of(p.weights, p.weights + p.num_weights,
                     [](const Weight& w) { return w.out_dim % kTileRows == 0; }) &&
         MayUseTiles();
}

// As MultiplyAll: while it multiplies two tiles of outputs, it fetches the next two.
template <class Y>
void MultiplyAllInTiles(const BFloat16* x, const Products& p,
                        const ParallelFor& parallel_for) {
  const int64_t groups = (p.tokens + kTileRows - 1) / kTileRows;
  const int64_t group_size = kTileRows * p.in_dim;
  auto rows = std::make_unique_for_overwrite<TileRow[]>(groups * group_size / kTileDepth);
  BFloat16* packed = rows[0].elements;
  auto pack = [&](int64_t group) {
    const int64_t first = group * kTileRows;
    PackTokens(x + first * p.in_dim, std::min<int64_t>(kTileRows, p.tokens - first),
               p.in_dim, packed + group * group_size);
  };
  if (groups <= 2) {
    for (int64_t group = 0; group < groups; ++group) pack(group);
  } else {
    parallel_for(groups, pack);
  }
  auto task = [&](const BFloat16* w, int64_t outs, Y* y, int64_t y_stride) {
    TileScope scope;
    for (int64_t group = 0; group < groups; group += 2) {
      const BFloat16* tokens = packed + group * group_size;
      const int64_t first = group * kTileRows, num_tokens = p.tokens - first;
      for (int64_t n = 0; n < outs;) {
        const bool is_pair = n + 2 * kTileRows <= outs;
        const int64_t num_outs = is_pair ? 2 * kTileRows : kTileRows;
        const BFloat16* tile = w + n * p.in_dim;
        const char* ahead = reinterpret_cast<const char*>(tile + num_outs * p.in_dim);
        auto multiply = groups - group > 1 ? is_pair ? MultiplyTilesTo<2, 2, Y>
                                                     : MultiplyTilesTo<1, 2, Y>
                        : is_pair          ? MultiplyTilesTo<2, 1, Y>
                                           : MultiplyTilesTo<1, 1, Y>;
        multiply(tile, tokens, p.in_dim, num_tokens, y + first * y_stride + n, y_stride,
                 group == 0 ? ahead : nullptr);
        n += num_outs;
      }
    }
  };
  const int64_t chunk = Fit(kChunkBytes, p.in_dim, sizeof(BFloat16), 2 * kTileRows);
  ForEachChunk<BFloat16, Y>(p, chunk, parallel_for, task);
}
#endif

// Counts the tokens up to the last that is not all zeros.
template <class X>
int64_t CountTokens(const X* x, int64_t tokens, int64_t in_dim) {
  for (; tokens > 0; --tokens) {
    const X* token = x + (tokens - 1) * in_dim;
    for (int64_t i = 0; i < in_dim; ++i) {
      if (ToFloat(token[i]) != 0) return tokens;
    }
  }
  return 0;
}

// The products of zeros, which padding is, are not computed.
template <class X, class W>
void MultiplyTo(const X* x, Products p, const ParallelFor& parallel_for) {
  const int64_t tokens = CountTokens(x, p.tokens, p.in_dim);
  for (int64_t i = 0; i < p.num_weights; ++i) {
    const int64_t line = p.weights[i].out_dim * SizeOf(p.result_type);
    std::memset(static_cast<char*>(p.weights[i].y) + tokens * line, 0,
                (p.tokens - tokens) * line);
  }
  p.tokens = tokens;
  if (tokens == 0) return;
#if defined(JAXKV_HAS_TILES)
  if constexpr (std::is_same_v<X, BFloat16>) {
    if (FitTiles(p)) {
      return p.result_type == Type::kFloat32
                 ? MultiplyAllInTiles<float>(x, p, parallel_for)
                 : MultiplyAllInTiles<BFloat16>(x, p, parallel_for);
    }
  }
#endif
  if (p.result_type == Type::kFloat32)
    MultiplyAll<X, W, float>(x, p, parallel_for);
  else
    MultiplyAll<X, W, BFloat16>(x, p, parallel_for);
}

inline void Multiply(const Products& p, const ParallelFor& parallel_for) {
  if (p.type == Type::kFloat32) {
    MultiplyTo<float, float>(static_cast<const float*>(p.x), p, parallel_for);
  } else if constexpr (std::is_same_v<BFloat16Left, BFloat16>) {
    MultiplyTo<BFloat16Left, BFloat16>(static_cast<const BFloat16Left*>(p.x), p,
                                       parallel_for);
  } else {
    const BFloat16* narrow = static_cast<const BFloat16*>(p.x);
    auto wide = std::make_unique<float[]>(p.tokens * p.in_dim);
    for (int64_t i = 0; i < p.tokens * p.in_dim; ++i) wide[i] = ToFloat(narrow[i]);
    MultiplyTo<float, BFloat16>(wide.get(), p, parallel_for);
  }
}

}  // namespace jaxkv
