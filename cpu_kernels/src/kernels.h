// What the kernels are given.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxkv {

enum class Type { kFloat32, kBFloat16 };

constexpr int64_t SizeOf(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// Runs task(0) ... task(count - 1), several at once and in any order.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>&)>;

// y[i] = x @ w[i].T for row-major arrays.
struct Weight {
  const void* w;  // [out_dim, in_dim], of x's type
  void* y;        // [tokens, out_dim]
  int64_t out_dim;
};

struct Products {
  const void* x;  // [tokens, in_dim]
  int64_t tokens;
  int64_t in_dim;
  Type type;
  Type result_type;
  const Weight* weights;
  int64_t num_weights;
};

// y[i] = x[i] / sqrt(mean(x[i] ** 2) + eps) * weight
struct Norms {
  const void* x;       // [count, dim]
  const void* weight;  // [dim]
  void* y;             // [count, dim]
  int64_t count;
  int64_t dim;
  Type type;
  float eps;
};

// y[i] = silu(gate[i]) * up[i]
struct Gates {
  const void* gate;
  const void* up;
  void* y;
  int64_t count;
  Type type;
};

// See paged_attention of jaxkv.device.attention.
struct Attention {
  const void* q;  // [tokens, q_heads, head_dim]
  Type q_type;
  const void* k;  // [num_blocks, kv_heads, block_size, head_dim]
  const void* v;
  Type kv_type;
  const int32_t* block_tables;  // [rows, width]
  const int32_t* kv_lens;       // [rows]
  const int32_t* cu_q_lens;     // [rows + 1]
  void* out;                    // like q
  float* lse;                   // [tokens, q_heads]
  int64_t tokens, rows, width, num_blocks, q_heads, kv_heads, block_size, head_dim;
  float scale;
  int64_t window;  // 0: all keys
  float soft_cap;  // 0: none
};

}  // namespace jaxkv
