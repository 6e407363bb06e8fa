// The CPU's tiles in plain C++, as Intel's manual describes the instructions (Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG to TILEZERO, and
// TDPBF16PS). What a CPU would refuse ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace emulated {

struct Tile {
  int rows = 0, row_bytes = 0;
  unsigned char bytes[16][64] = {};
};

inline thread_local Tile tiles[8];
inline thread_local bool is_configured = false;

inline void Check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "tiles: %s\n", what);
  std::abort();
}

inline Tile& Use(int index) {
  Check(is_configured, "used without a configuration");
  Check(index >= 0 && index < 8 && tiles[index].rows > 0, "no such tile");
  return tiles[index];
}

inline void LoadConfig(const void* memory) {
  Check(!is_configured, "not released");  // a CPU goes on, and the system saves them
  unsigned char config[64];
  std::memcpy(config, memory, 64);
  Check(config[0] == 1 && config[1] == 0, "palette");
  for (int i = 2; i < 16; ++i) Check(config[i] == 0, "reserved");
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * i, 2);
    int rows = config[48 + i];
    Check(i < 8 || (row_bytes == 0 && rows == 0), "a tile beyond the last");
    Check(row_bytes <= 64 && rows <= 16, "a tile too large");
    Check((row_bytes == 0) == (rows == 0), "half a tile");
    if (i < 8) tiles[i] = Tile{rows, row_bytes, {}};
  }
  is_configured = true;
}

inline void Release() { is_configured = false; }

inline void Zero(int index) { std::memset(Use(index).bytes, 0, sizeof Tile{}.bytes); }

inline void Load(int index, const void* base, int64_t stride) {
  Tile& tile = Use(index);
  std::memset(tile.bytes, 0, sizeof tile.bytes);
  for (int i = 0; i < tile.rows; ++i)
    std::memcpy(tile.bytes[i], static_cast<const char*>(base) + i * stride,
                tile.row_bytes);
}

inline void Store(int index, void* base, int64_t stride) {
  Tile& tile = Use(index);
  for (int i = 0; i < tile.rows; ++i)
    std::memcpy(static_cast<char*>(base) + i * stride, tile.bytes[i], tile.row_bytes);
}

inline float Element(const Tile& tile, int row, int column) {
  uint16_t half;
  std::memcpy(&half, tile.bytes[row] + 2 * column, 2);
  uint32_t word = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline void Multiply(int c_index, int a_index, int b_index) {
  Tile &c = Use(c_index), &a = Use(a_index), &b = Use(b_index);
  Check(c_index != a_index && c_index != b_index && a_index != b_index, "the same tile");
  Check(a.rows == c.rows && b.row_bytes == c.row_bytes, "sums of another size");
  Check(a.row_bytes == 4 * b.rows, "factors that do not fit");
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < b.rows; ++k) {
        even = __builtin_fmaf(Element(a, m, 2 * k), Element(b, k, 2 * n), even);
        odd = __builtin_fmaf(Element(a, m, 2 * k + 1), Element(b, k, 2 * n + 1), odd);
      }
      std::memcpy(&sum, c.bytes[m] + 4 * n, 4);
      sum += even + odd;
      std::memcpy(c.bytes[m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace emulated

#define _tile_loadconfig(memory) emulated::LoadConfig(memory)
#define _tile_release() emulated::Release()
#define _tile_zero(tile) emulated::Zero(tile)
#define _tile_loadd(tile, base, stride) emulated::Load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::Store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated::Multiply(c, a, b)
