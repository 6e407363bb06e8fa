// The CPU's tiles of bfloat16 (AMX): 16 rows of 64 bytes, multiplied two at a time.
//
// A tile of weights has 16 outputs by 32 elements, as they lie in memory. A tile of tokens
// is packed beforehand: line i has elements 2 i and 2 i + 1 of 16 tokens. A tile of sums
// has 16 outputs by 16 tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(JAXKV_TILES)  // tests have others, for machines without
#define JAXKV_HAS_TILES
#include JAXKV_TILES
#elif defined(__AMX_BF16__)
#define JAXKV_HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

namespace jaxkv {

constexpr int kTileRows = 16;   // and float32 in a row
constexpr int kTileDepth = 32;  // bfloat16 in a row
constexpr int kTileSize = kTileRows * kTileDepth;

struct alignas(kLineBytes) TileRow {
  BFloat16 elements[kTileDepth];
};

#if defined(JAXKV_HAS_TILES)

// Whether the system lets this process use tiles; it has to be asked once.
inline bool MayUseTiles() {
#if defined(JAXKV_TILES)
  return true;
#else
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
#endif
}

// Says while it lives that all tiles of this thread are whole ones.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Config) == 64);
    static constexpr Config kConfig;  // constant: GCC takes its first bytes as read only
    _tile_loadconfig(&kConfig);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Packs at most 16 tokens, tile after tile; those that are missing are zeros.
inline void PackTokens(const BFloat16* x, int64_t tokens, int64_t in_dim,
                       BFloat16* packed) {
  static_assert(sizeof(Floats) == kTileDepth * sizeof(BFloat16));
  for (int64_t i = 0; i < in_dim; i += kTileDepth, packed += kTileSize) {
    Floats pairs[kTileRows] = {};  // only moved, whatever their bits
    for (int64_t n = 0; n < tokens; ++n) pairs[n] = Load<Floats>(x + n * in_dim + i);
    Transpose(pairs);
    std::memcpy(packed, pairs, sizeof pairs);
  }
}

// Multiplies one or two tiles of outputs with one or two of tokens, which are in_dim * 16
// apart in `x`. Fetches as many bytes as it reads of `w` from `ahead` on, if not null.
template <int kOuts, int kTokens>
inline void MultiplyTiles(const BFloat16* w, const BFloat16* x, int64_t in_dim,
                          float (&sums)[kOuts][kTokens][kTileRows * kTileRows],
                          const char* ahead) {
  const int64_t row_bytes = in_dim * sizeof(BFloat16);
  const BFloat16* next_w = w + kTileRows * in_dim;
  const BFloat16* next_x = x + kTileRows * in_dim;
  asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
  _tile_zero(0);
  if constexpr (kTokens > 1) _tile_zero(1);
  if constexpr (kOuts > 1) _tile_zero(2);
  if constexpr (kOuts > 1 && kTokens > 1) _tile_zero(3);
  for (int64_t i = 0; i < in_dim; i += kTileDepth) {
    if (ahead != nullptr) {
#pragma GCC unroll 32
      for (int line = 0; line < kOuts * kTileRows; ++line)
        Prefetch(ahead + line * kLineBytes);
      ahead += kOuts * kTileRows * kLineBytes;
    }
    _tile_loadd(4, w + i, row_bytes);
    _tile_loadd(6, x + i * kTileRows, kLineBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTokens > 1) {
      _tile_loadd(7, next_x + i * kTileRows, kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kOuts > 1) {
      _tile_loadd(5, next_w + i, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTokens > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], kLineBytes);
  if constexpr (kTokens > 1) _tile_stored(1, sums[0][1], kLineBytes);
  if constexpr (kOuts > 1) _tile_stored(2, sums[1][0], kLineBytes);
  if constexpr (kOuts > 1 && kTokens > 1) _tile_stored(3, sums[1][1], kLineBytes);
}

// Up to kTokens tiles of tokens by kOuts tiles of outputs.
template <int kOuts, int kTokens, class Y>
void MultiplyTilesTo(const BFloat16* w, const BFloat16* x, int64_t in_dim, int64_t tokens,
                     Y* y, int64_t y_stride, const char* ahead) {
  alignas(64) float sums[kOuts][kTokens][kTileRows * kTileRows];
  MultiplyTiles<kOuts, kTokens>(w, x, in_dim, sums, ahead);
  for (int out = 0; out < kOuts; ++out) {
    for (int group = 0; group < kTokens; ++group) {
      Floats rows[kTileRows];
      std::memcpy(rows, sums[out][group], sizeof rows);
      Transpose(rows);
      const int64_t first = group * kTileRows;
      for (int64_t n = first; n < std::min<int64_t>(tokens, first + kTileRows); ++n)
        StoreFloats(y + n * y_stride + out * kTileRows, rows[n - first]);
    }
  }
}

#endif

}  // namespace jaxkv
